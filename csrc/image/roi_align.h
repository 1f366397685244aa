// SPDX-License-Identifier: Apache-2.0
// RoI-align. Along each axis a bin is a short list of weighted cells, and an output is the sum over the product of
// its two lists: A_y X A_x^T / count, with two banded matrices for each RoI.
#pragma once

#include "image/roi.h"
#include "runtime/device.h"
#include "runtime/tensor.h"

namespace baracuda {

struct RoiAlignProblem : RoiProblem {
  int32_t sampling_ratio = 0;
  bool aligned = false;
};

// One axis of one RoI, in cells. `bin` is negative where the box is inverted.
template <class Real>
struct RoiAxis {
  Real start;
  Real bin;
  int32_t grid;
  int32_t cells;

  // Samples are numbered so that positions ascend, which rounding leaves intact.
  BARACUDA_HD Real position(int32_t b, int32_t sample) const {
    const Real place = Real(bin < 0 ? grid - 1 - sample : sample) + Real(0.5);
    return exact_add(exact_add(start, exact_multiply(Real(b), bin)),
                     exact_divide(exact_multiply(place, bin), Real(grid)));
  }

  // One at or before the first that lies at a position or beyond it.
  BARACUDA_HD int32_t first_sample(int32_t b, Real from) const {
    constexpr int32_t kFew = 8;
    int32_t sample = 0;
    int32_t end = grid > kFew ? grid : 0;
    while (sample < end) {
      const int32_t middle = (sample + end) / 2;
      if (position(b, middle) >= from) {
        end = middle;
      } else {
        sample = middle + 1;
      }
    }
    return sample;
  }

  // What a sample at a position gives a cell.
  BARACUDA_HD Real share(Real position, int32_t cell) const {
    if (!(position >= Real(-1) && position <= Real(cells))) return 0;
    const int32_t last = cells - 1;
    if (position >= Real(last)) return Real(cell == last);
    const int32_t before = position > 0 ? int32_t(position) : 0;
    const Real beyond = position > 0 ? position - Real(before) : Real(0);
    return cell == before ? Real(1) - beyond : cell == before + 1 ? beyond : Real(0);
  }

  // All of a bin's cells with a weight, and maybe others between or beside them.
  BARACUDA_HD RoiCells reach(int32_t b) const { return reach(b, b); }
  // Those of `bins` bins.
  BARACUDA_HD RoiCells reach_of_all(int32_t bins) const { return bin < 0 ? reach(bins - 1, 0) : reach(0, bins - 1); }

  BARACUDA_HD Real weight(int32_t b, int32_t cell) const {
    Real sum = 0;
    for (int32_t sample = first_sample(b, Real(cell - 1)); sample < grid; ++sample) {
      const Real place = position(b, sample);
      if (place > Real(cell + 1)) break;
      sum += share(place, cell);
    }
    return sum;
  }

  // The cells of a bin that have a weight, in ascending order. Neighbouring samples mostly share them.
  template <class Body>
  BARACUDA_HD void each(int32_t b, const Body &body) const {
    const int32_t last = cells - 1;
    int32_t cell = -1;
    Real here = 0;
    Real next = 0;
    for (int32_t sample = first_sample(b, Real(-1)); sample < grid; ++sample) {
      const Real place = position(b, sample);
      if (place < Real(-1)) continue;
      if (!(place <= Real(cells))) break;
      const bool inside = place > 0 && place < Real(last);
      const int32_t before = inside ? int32_t(place) : place > 0 ? last : 0;
      const Real beyond = inside ? place - Real(before) : Real(0);
      if (before != cell) {
        if (here != 0) body(cell, here);
        if (before != cell + 1 && next != 0) body(cell + 1, next);
        here = before == cell + 1 ? next : Real(0);
        next = 0;
        cell = before;
      }
      here += Real(1) - beyond;
      next += beyond;
    }
    if (here != 0) body(cell, here);
    if (next != 0) body(cell + 1, next);
  }

  // As many cells as the reaches of all bins have at most: little more than the axis, since bins lie beside each other.
  // Neighbours share up to two cells, and rounding may move a position across a third.
  static constexpr int64_t list_places(int64_t cells, int64_t bins) {
    constexpr int64_t kShared = 3;
    return cells + kShared * bins;
  }

 private:
  // From the bin with the lowest positions to that with the highest.
  BARACUDA_HD RoiCells reach(int32_t lowest, int32_t highest) const {
    if (grid <= 0) return {0, 0};
    const Real low = position(lowest, 0);
    const Real high = position(highest, grid - 1);
    const Real last = Real(cells - 1);
    if (!(high >= Real(-1) && low <= Real(cells))) return {0, 0};
    const int32_t first = low > 0 ? (low < last ? int32_t(low) : cells - 1) : 0;
    const int32_t end = high < last ? (high > 0 ? int32_t(high) + 2 : 1) : cells;
    return {first, end - first};
  }
};

template <class Real>
struct RoiGeometry {
  int32_t batch = -1;  // -1: the RoI takes no part
  RoiAxis<Real> y = {};
  RoiAxis<Real> x = {};
  Real count = 1;
};

template <class Real>
BARACUDA_HD inline bool roi_axis(const RoiAlignProblem &problem, Real from, Real to, int32_t cells, int32_t bins,
                                 RoiAxis<Real> &axis) {
  const Real scale = Real(problem.scale);
  const Real shift = problem.aligned ? Real(0.5) : Real(0);
  from = exact_add(exact_multiply(from, scale), -shift);
  to = exact_add(exact_multiply(to, scale), -shift);
  Real extent = exact_add(to, -from);
  // Of finite numbers, too, the difference need not be finite.
  if (!is_finite(extent)) return false;
  if (!problem.aligned && extent < 1) extent = 1;
  axis.start = from;
  axis.bin = exact_divide(extent, Real(bins));
  axis.cells = cells;
  axis.grid = problem.sampling_ratio;
  if (problem.sampling_ratio > 0) return true;
  const Real wanted = std::ceil(axis.bin);
  if (!(wanted * Real(bins) <= Real(kMostRoiSamples))) return false;
  axis.grid = wanted > 0 ? int32_t(wanted) : 0;
  return true;
}

template <class Real>
BARACUDA_HD inline RoiGeometry<Real> roi_geometry(const RoiAlignProblem &problem, const RoiRows &rois, int64_t r) {
  RoiGeometry<Real> roi;
  const int32_t batch = rois.batch(r, int32_t(problem.n));
  if (batch < 0 || problem.h == 0 || problem.w == 0) return roi;
  if (!roi_axis(problem, rois.at<Real>(r, 1), rois.at<Real>(r, 3), problem.w, problem.pooled_w, roi.x)) return roi;
  if (!roi_axis(problem, rois.at<Real>(r, 2), rois.at<Real>(r, 4), problem.h, problem.pooled_h, roi.y)) return roi;
  if (roi.x.grid > 0 && roi.y.grid > 0) roi.count = Real(roi.x.grid) * Real(roi.y.grid);
  roi.batch = batch;
  return roi;
}

struct RoiAlignForward {
  RoiAlignProblem problem;
  ImageView input;
  RoiRows rois;
  ImageView output;
  DLDataType dtype;
  bool turn;             // the map, into the workspace, if its channels lie apart
  std::byte *workspace;  // NULL: there is none
};

struct RoiAlignBackward {
  RoiAlignProblem problem;
  ImageView doutput;
  RoiRows rois;
  ImageView dinput;
  DLDataType dtype;
  bool accumulate;
  bool any_order;        // adds atomically; only where roi_align_adds says so
  std::byte *workspace;  // NULL: there is none
};

void roi_align_cpu(const RoiAlignForward &call);
void roi_align_backward_cpu(const RoiAlignBackward &call);
// Enqueue on the current device.
void roi_align_cuda(const RoiAlignForward &call, Stream stream);
void roi_align_backward_cuda(const RoiAlignBackward &call, Stream stream);
// The access paths of row-major operands, and what they need. Both can do without, slowly.
const char *roi_align_path(const RoiAlignProblem &problem, DLDataType dtype, bool turn);
bool roi_align_turns(const RoiAlignProblem &problem, DLDataType dtype);
size_t roi_align_workspace(const RoiAlignProblem &problem, DLDataType dtype, bool turn);
const char *roi_align_backward_path(const RoiAlignProblem &problem, DLDataType dtype);
size_t roi_align_backward_workspace(const RoiAlignProblem &problem, DLDataType dtype);
// Whether atomic additions are the fastest way, and what they need.
bool roi_align_adds(const RoiAlignProblem &problem, DLDataType dtype);
size_t roi_align_add_workspace(const RoiAlignProblem &problem, DLDataType dtype);

}  // namespace baracuda
