// SPDX-License-Identifier: Apache-2.0
// RoI-pooling: the maximum of each bin of whole cells.
#pragma once

#include "image/roi.h"
#include "runtime/device.h"
#include "runtime/dtype.h"

namespace baracuda {

// One axis of one RoI, in whole cells.
template <class Real>
struct RoiPoolAxis {
  Real start;
  Real bin;
  int32_t cells;

  BARACUDA_HD RoiCells reach(int32_t b) const {
    const int32_t first = inside(exact_add(std::floor(exact_multiply(Real(b), bin)), start));
    const int32_t end = inside(exact_add(std::ceil(exact_multiply(Real(b + 1), bin)), start));
    return {first, end > first ? end - first : 0};
  }
  // Of `bins` bins.
  BARACUDA_HD RoiCells reach_of_all(int32_t bins) const {
    const int32_t first = reach(0).first;
    const RoiCells last = reach(bins - 1);
    return {first, last.first + last.count - first};
  }

 private:
  BARACUDA_HD int32_t inside(Real place) const {
    return place > 0 ? (place < Real(cells) ? int32_t(place) : cells) : 0;
  }
};

template <class Real>
struct RoiPoolGeometry {
  int32_t batch = -1;  // -1: the RoI takes no part
  RoiPoolAxis<Real> y = {};
  RoiPoolAxis<Real> x = {};
};

template <class Real>
BARACUDA_HD inline bool roi_pool_axis(const RoiProblem &problem, Real from, Real to, int32_t cells, int32_t bins,
                                      RoiPoolAxis<Real> &axis) {
  from = std::round(exact_multiply(from, Real(problem.scale)));
  to = std::round(exact_multiply(to, Real(problem.scale)));
  const Real extent = exact_add(exact_add(to, -from), Real(1));
  if (!is_finite(extent)) return false;
  axis.start = from;
  axis.bin = exact_divide(extent > 1 ? extent : Real(1), Real(bins));
  axis.cells = cells;
  return true;
}

template <class Real>
BARACUDA_HD inline RoiPoolGeometry<Real> roi_pool_geometry(const RoiProblem &problem, const RoiRows &rois, int64_t r) {
  RoiPoolGeometry<Real> roi;
  const int32_t batch = rois.batch(r, int32_t(problem.n));
  if (batch < 0 || problem.pooled_h == 0 || problem.pooled_w == 0) return roi;
  if (!roi_pool_axis(problem, rois.at<Real>(r, 1), rois.at<Real>(r, 3), problem.w, problem.pooled_w, roi.x)) return roi;
  if (!roi_pool_axis(problem, rois.at<Real>(r, 2), rois.at<Real>(r, 4), problem.h, problem.pooled_h, roi.y)) return roi;
  roi.batch = batch;
  return roi;
}

// Positions in a plane, in either type.
struct RoiIndices {
  ImageView view;
  bool wide = false;

  BARACUDA_HD int64_t get(int64_t offset) const {
    return wide ? static_cast<const int64_t *>(view.data)[offset] : static_cast<const int32_t *>(view.data)[offset];
  }
  BARACUDA_HD void set(int64_t offset, int64_t index) const {
    if (wide) {
      static_cast<int64_t *>(view.data)[offset] = index;
    } else {
      static_cast<int32_t *>(view.data)[offset] = int32_t(index);
    }
  }
};

struct RoiPoolForward {
  RoiProblem problem;
  ImageView input;
  RoiRows rois;
  ImageView output;
  RoiIndices argmax;  // without data: none are wanted
  DLDataType dtype;
  std::byte *workspace;  // NULL: there is none
};

struct RoiPoolBackward {
  RoiProblem problem;
  ImageView doutput;
  RoiRows rois;
  RoiIndices argmax;
  ImageView dinput;
  DLDataType dtype;
  bool accumulate;
  std::byte *workspace;  // NULL: there is none
};

// The first maximum of a bin; the first NaN, if there is one.
template <class T, class Real>
BARACUDA_HD inline void roi_pool_output(const RoiPoolForward &call, const RoiPoolGeometry<Real> &roi, int64_t r,
                                        int64_t c, int32_t ph, int32_t pw) {
  T best = T(Real(0));
  int64_t index = -1;
  if (roi.batch >= 0) {
    const T *input = static_cast<const T *>(call.input.data) + call.input.plane(roi.batch, c);
    const RoiCells rows = roi.y.reach(ph);
    const RoiCells columns = roi.x.reach(pw);
    for (int32_t row = rows.first; row < rows.first + rows.count; ++row) {
      for (int32_t column = columns.first; column < columns.first + columns.count; ++column) {
        const T value = input[call.input.cell(row, column)];
        const Real number = Real(value);
        const Real most = Real(best);
        if (index >= 0 && !(number > most) && !(number != number && most == most)) continue;
        best = value;
        index = int64_t(row) * call.problem.w + column;
      }
    }
  }
  static_cast<T *>(call.output.data)[call.output.plane(r, c) + call.output.cell(ph, pw)] = best;
  if (call.argmax.view.data) call.argmax.set(call.argmax.view.plane(r, c) + call.argmax.view.cell(ph, pw), index);
}

void roi_pool_cpu(const RoiPoolForward &call);
void roi_pool_backward_cpu(const RoiPoolBackward &call);
// Enqueue on the current device.
void roi_pool_cuda(const RoiPoolForward &call, Stream stream);
void roi_pool_backward_cuda(const RoiPoolBackward &call, Stream stream);
// What the faster paths need; 0 where there is only the plain one.
size_t roi_pool_workspace(const RoiProblem &problem, DLDataType dtype);
size_t roi_pool_backward_workspace(const RoiProblem &problem, DLDataType dtype);

}  // namespace baracuda
