// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "image/roi_align.h"
#include "runtime/dtype.h"
#include "runtime/parallel.h"

namespace baracuda {
namespace {

template <class Real>
struct Weighted {
  int32_t cell;
  Real weight;
};

// The weighted cells of an axis, bin after bin.
template <class Real>
struct Lists {
  std::vector<Weighted<Real>> entries;
  std::vector<size_t> begin;
  // Of all bins: the first cell and one past the last.
  int32_t first = 0;
  int32_t end = 0;

  Lists(const RoiAxis<Real> &axis, int32_t bins) {
    begin.push_back(0);
    for (int32_t b = 0; b < bins; ++b) {
      axis.each(b, [&](int32_t cell, Real weight) {
        first = entries.empty() ? cell : std::min(first, cell);
        end = std::max(end, cell + 1);
        entries.push_back({cell, weight});
      });
      begin.push_back(entries.size());
    }
  }
  template <class Body>
  void each(int32_t b, const Body &body) const {
    for (size_t place = begin[size_t(b)]; place < begin[size_t(b) + 1]; ++place)
      body(entries[place].cell, entries[place].weight);
  }
};

template <class Real>
struct Roi {
  Real count;
  Lists<Real> y;
  Lists<Real> x;

  Roi(const RoiAlignProblem &problem, const RoiGeometry<Real> &roi)
      : count(roi.count),
        y(roi.y, roi.batch < 0 ? 0 : problem.pooled_h),
        x(roi.x, roi.batch < 0 ? 0 : problem.pooled_w) {}
  bool empty() const { return y.entries.empty() || x.entries.empty(); }
};

template <class T>
void forward(const RoiAlignForward &call) {
  using Real = ImageReal<T>::type;
  const RoiAlignProblem &problem = call.problem;
  const int64_t planes = problem.rois * problem.c;
  const int64_t bins = int64_t(problem.pooled_h) * problem.pooled_w;
  parallel_for(planes, planes * bins * 64, [&](int64_t begin, int64_t end) {
    std::vector<Real> sums(size_t(problem.w));
    for (int64_t place = begin; place < end;) {
      const int64_t r = place / problem.c;
      const RoiGeometry<Real> geometry = roi_geometry<Real>(problem, call.rois, r);
      const Roi<Real> roi(problem, geometry);
      for (; place < end && place / problem.c == r; ++place) {
        const int64_t c = place % problem.c;
        const T *input = static_cast<const T *>(call.input.data);
        if (!roi.empty()) input += call.input.plane(geometry.batch, c);
        T *output = static_cast<T *>(call.output.data) + call.output.plane(r, c);
        for (int32_t ph = 0; ph < problem.pooled_h; ++ph) {
          if (roi.empty()) {
            for (int32_t pw = 0; pw < problem.pooled_w; ++pw) output[call.output.cell(ph, pw)] = T(Real(0));
            continue;
          }
          std::fill(sums.begin() + roi.x.first, sums.begin() + roi.x.end, Real(0));
          roi.y.each(ph, [&](int32_t row, Real weight) {
            for (int32_t column = roi.x.first; column < roi.x.end; ++column)
              sums[size_t(column)] += weight * Real(input[call.input.cell(row, column)]);
          });
          for (int32_t pw = 0; pw < problem.pooled_w; ++pw) {
            Real sum = 0;
            roi.x.each(pw, [&](int32_t column, Real weight) { sum += weight * sums[size_t(column)]; });
            output[call.output.cell(ph, pw)] = T(sum / roi.count);
          }
        }
      }
    }
  });
}

template <class T>
void backward(const RoiAlignBackward &call) {
  using Real = ImageReal<T>::type;
  const RoiAlignProblem &problem = call.problem;
  std::vector<std::vector<std::pair<int64_t, Roi<Real>>>> rois(size_t(problem.n));
  for (int64_t r = 0; r < problem.rois; ++r) {
    const RoiGeometry<Real> geometry = roi_geometry<Real>(problem, call.rois, r);
    if (geometry.batch < 0) continue;
    Roi<Real> roi(problem, geometry);
    if (!roi.empty()) rois[size_t(geometry.batch)].emplace_back(r, std::move(roi));
  }
  const int64_t cells = int64_t(problem.h) * problem.w;
  const int64_t planes = problem.n * problem.c;
  const int64_t bins = int64_t(problem.pooled_h) * problem.pooled_w;
  parallel_for(planes, planes * cells + problem.rois * problem.c * bins * 64, [&](int64_t begin, int64_t end) {
    std::vector<Real> plane(static_cast<size_t>(cells));
    std::vector<Real> sums(size_t(problem.w));
    for (int64_t place = begin; place < end; ++place) {
      const int64_t n = place / problem.c;
      const int64_t c = place % problem.c;
      std::fill(plane.begin(), plane.end(), Real(0));
      for (const auto &[r, roi] : rois[size_t(n)]) {
        const T *doutput = static_cast<const T *>(call.doutput.data) + call.doutput.plane(r, c);
        for (int32_t ph = 0; ph < problem.pooled_h; ++ph) {
          std::fill(sums.begin() + roi.x.first, sums.begin() + roi.x.end, Real(0));
          for (int32_t pw = 0; pw < problem.pooled_w; ++pw) {
            const Real given = Real(doutput[call.doutput.cell(ph, pw)]) / roi.count;
            roi.x.each(pw, [&](int32_t column, Real weight) { sums[size_t(column)] += weight * given; });
          }
          roi.y.each(ph, [&](int32_t row, Real weight) {
            Real *cell = plane.data() + int64_t(row) * problem.w;
            for (int32_t column = roi.x.first; column < roi.x.end; ++column)
              cell[column] += weight * sums[size_t(column)];
          });
        }
      }
      T *dinput = static_cast<T *>(call.dinput.data) + call.dinput.plane(n, c);
      for (int32_t row = 0; row < problem.h; ++row) {
        for (int32_t column = 0; column < problem.w; ++column) {
          T &cell = dinput[call.dinput.cell(row, column)];
          const Real sum = plane[size_t(int64_t(row) * problem.w + column)];
          cell = T(call.accumulate ? Real(cell) + sum : sum);
        }
      }
    }
  });
}

}  // namespace

void roi_align_cpu(const RoiAlignForward &call) {
  dispatch_dtype<float16, bfloat16, float, double>(call.dtype,
                                                   [&](auto tag) { forward<typename decltype(tag)::type>(call); });
}

void roi_align_backward_cpu(const RoiAlignBackward &call) {
  dispatch_dtype<float16, bfloat16, float, double>(call.dtype,
                                                   [&](auto tag) { backward<typename decltype(tag)::type>(call); });
}

}  // namespace baracuda
