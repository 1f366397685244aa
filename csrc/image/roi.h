// SPDX-License-Identifier: Apache-2.0
// Regions of interest: a batch number and a box, as rows of a tensor.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#include "runtime/exact.h"

namespace baracuda {

// What values are interpolated, compared and added in.
template <class T>
struct ImageReal {
  using type = float;
};
template <>
struct ImageReal<double> {
  using type = double;
};

// Of all bins along an axis, and cells of an axis. Within these, float positions that can reach a cell are off by
// less than half a cell, and by less than the distance of two samples.
constexpr int32_t kMostRoiSamples = 1 << 20;
constexpr int64_t kMostRoiCells = 1 << 20;

struct RoiProblem {
  int64_t n = 0;
  int64_t c = 0;
  int32_t h = 0;
  int32_t w = 0;
  int64_t rois = 0;
  int32_t pooled_h = 0;
  int32_t pooled_w = 0;
  double scale = 1;
};

struct RoiCells {
  int32_t first;
  int32_t count;
};

// A tensor [batch, channel, row, column] or [roi, channel, row, column]; strides in elements.
struct ImageView {
  void *data = nullptr;
  int64_t batch = 0;
  int64_t channel = 0;
  int64_t row = 0;
  int64_t column = 0;

  BARACUDA_HD int64_t plane(int64_t n, int64_t c) const { return n * batch + c * channel; }
  BARACUDA_HD int64_t cell(int64_t y, int64_t x) const { return y * row + x * column; }
};

// The rows (batch, x1, y1, x2, y2).
struct RoiRows {
  const void *data = nullptr;
  int64_t roi = 0;
  int64_t number = 0;
  bool is_double = false;

  template <class Real>
  BARACUDA_HD Real at(int64_t r, int place) const {
    const int64_t offset = r * roi + place * number;
    return is_double ? Real(static_cast<const double *>(data)[offset]) : Real(static_cast<const float *>(data)[offset]);
  }
  // Of `batches`; -1 where it is none of them. Whole numbers of 32 bits need not be floats.
  BARACUDA_HD int32_t batch(int64_t r, int32_t batches) const {
    if (is_double) return batch_of(at<double>(r, 0), batches);
    const float given = at<float>(r, 0);
    constexpr float kBeyond = 2147483648.0f;
    return given > -1 && given < kBeyond && int32_t(given) < batches ? int32_t(given) : -1;
  }

 private:
  BARACUDA_HD static int32_t batch_of(double given, int32_t batches) {
    return given > -1 && given < batches ? int32_t(given) : -1;
  }
};

template <class Real>
BARACUDA_HD inline bool is_finite(Real value) {
  return value - value == Real(0);
}

// The architecture whose machine code runs: "sm_90".
std::string image_arch(const char *plan);

}  // namespace baracuda
