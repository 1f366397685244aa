// SPDX-License-Identifier: Apache-2.0
// Greedy non-maximum suppression: a box is kept unless one that was kept before it overlaps it by more than the
// threshold.
#pragma once

#include "image/roi.h"
#include "runtime/device.h"
#include "runtime/dtype.h"

namespace baracuda {

// Any number of the four floating dtypes.
struct RealColumn {
  const void *data = nullptr;
  int64_t step = 0;
  DLDataType dtype = {};

  BARACUDA_HD double at(int64_t i) const {
    const int64_t place = i * step;
    if (dtype.bits == 64) return static_cast<const double *>(data)[place];
    if (dtype.bits == 32) return static_cast<const float *>(data)[place];
    if (dtype.code == kDLBfloat) return float(static_cast<const bfloat16 *>(data)[place]);
    return float(static_cast<const float16 *>(data)[place]);
  }
};

struct NmsCall {
  int64_t boxes_count = 0;
  double threshold = 0;
  DLDataType dtype = {};
  RealColumn boxes;         // of rows,
  int64_t corner_step = 0;  // whose four numbers lie this far apart
  RealColumn scores;
  const void *classes = nullptr;  // NULL: all boxes are of one class
  int64_t class_step = 0;
  bool wide_classes = false;
  int64_t *keep = nullptr;
  int64_t keep_step = 0;
  int64_t *count = nullptr;
  std::byte *workspace = nullptr;

  BARACUDA_HD int64_t class_of(int64_t i) const {
    if (!classes) return 0;
    return wide_classes ? static_cast<const int64_t *>(classes)[i * class_step]
                        : static_cast<const int32_t *>(classes)[i * class_step];
  }
};

template <class Real>
struct alignas(16) NmsBox {
  Real x1, y1, x2, y2;
};

template <class Real>
BARACUDA_HD inline NmsBox<Real> nms_box(const NmsCall &call, int64_t i) {
  RealColumn corner = call.boxes;
  const int64_t first = i * corner.step;
  corner.step = 1;
  return {Real(corner.at(first)), Real(corner.at(first + call.corner_step)),
          Real(corner.at(first + 2 * call.corner_step)), Real(corner.at(first + 3 * call.corner_step))};
}

template <class Real>
BARACUDA_HD inline Real nms_area(const NmsBox<Real> &box) {
  return exact_multiply(exact_add(box.x2, -box.x1), exact_add(box.y2, -box.y1));
}

// Whether the overlap over the union is more than the threshold; never, if any number is NaN.
template <class Real>
BARACUDA_HD inline bool nms_overlap(const NmsBox<Real> &a, Real a_area, const NmsBox<Real> &b, Real b_area,
                                    Real threshold) {
  const Real left = a.x1 > b.x1 ? a.x1 : b.x1;
  const Real right = a.x2 < b.x2 ? a.x2 : b.x2;
  const Real top = a.y1 > b.y1 ? a.y1 : b.y1;
  const Real bottom = a.y2 < b.y2 ? a.y2 : b.y2;
  const Real width = exact_add(right, -left);
  const Real height = exact_add(bottom, -top);
  const Real shared = exact_multiply(width > 0 ? width : Real(0), height > 0 ? height : Real(0));
  const Real all = exact_add(exact_add(a_area, b_area), -shared);
  // Most pairs are decided without a division. The margin is far above its rounding.
  if (threshold >= 0 && all > 0 && shared < threshold * Real(0.9999) * all) return false;
  return exact_divide(shared, all) > threshold;
}

// Numbers whose ascending order is the descending order of scores, NaN last, both zeros alike.
BARACUDA_HD inline uint64_t nms_key(double score) {
  if (score != score) return ~uint64_t(0);
  const uint64_t bits = bit_cast<uint64_t>(score + 0.0);
  return bits >> 63 ? bits : ~bits & ~(uint64_t(1) << 63);
}

void nms_cpu(const NmsCall &call);
// Enqueues on the current device.
void nms_cuda(const NmsCall &call, Stream stream);
size_t nms_workspace(int64_t boxes, DLDataType dtype, bool classes);

}  // namespace baracuda
