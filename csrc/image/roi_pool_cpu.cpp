// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "image/roi_pool.h"
#include "runtime/parallel.h"

namespace baracuda {
namespace {

template <class T>
void forward(const RoiPoolForward &call) {
  using Real = ImageReal<T>::type;
  const RoiProblem &problem = call.problem;
  const int64_t planes = problem.rois * problem.c;
  const int64_t bins = int64_t(problem.pooled_h) * problem.pooled_w;
  parallel_for(planes, planes * bins * 16, [&](int64_t begin, int64_t end) {
    for (int64_t place = begin; place < end; ++place) {
      const int64_t r = place / problem.c;
      const RoiPoolGeometry<Real> roi = roi_pool_geometry<Real>(problem, call.rois, r);
      for (int32_t ph = 0; ph < problem.pooled_h; ++ph)
        for (int32_t pw = 0; pw < problem.pooled_w; ++pw)
          roi_pool_output<T, Real>(call, roi, r, place % problem.c, ph, pw);
    }
  });
}

bool holds(const RoiCells &cells, int64_t cell) { return cell >= cells.first && cell < cells.first + cells.count; }

template <class T>
void backward(const RoiPoolBackward &call) {
  using Real = ImageReal<T>::type;
  const RoiProblem &problem = call.problem;
  const int64_t cells = int64_t(problem.h) * problem.w;
  const int64_t planes = problem.n * problem.c;
  const int64_t bins = int64_t(problem.pooled_h) * problem.pooled_w;
  parallel_for(planes, planes * cells + problem.rois * problem.c * bins * 8, [&](int64_t begin, int64_t end) {
    std::vector<Real> plane(static_cast<size_t>(cells));
    for (int64_t place = begin; place < end; ++place) {
      const int64_t n = place / problem.c;
      const int64_t c = place % problem.c;
      std::fill(plane.begin(), plane.end(), Real(0));
      for (int64_t r = 0; r < problem.rois; ++r) {
        const RoiPoolGeometry<Real> roi = roi_pool_geometry<Real>(problem, call.rois, r);
        if (roi.batch != n) continue;
        const T *doutput = static_cast<const T *>(call.doutput.data) + call.doutput.plane(r, c);
        const ImageView &view = call.argmax.view;
        for (int32_t ph = 0; ph < problem.pooled_h; ++ph) {
          const RoiCells rows = roi.y.reach(ph);
          for (int32_t pw = 0; pw < problem.pooled_w; ++pw) {
            const int64_t index = call.argmax.get(view.plane(r, c) + view.cell(ph, pw));
            if (index < 0 || index >= cells || !holds(rows, index / problem.w) ||
                !holds(roi.x.reach(pw), index % problem.w))
              continue;
            plane[size_t(index)] += Real(doutput[call.doutput.cell(ph, pw)]);
          }
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

void roi_pool_cpu(const RoiPoolForward &call) {
  dispatch_dtype<float16, bfloat16, float, double>(call.dtype,
                                                   [&](auto tag) { forward<typename decltype(tag)::type>(call); });
}

void roi_pool_backward_cpu(const RoiPoolBackward &call) {
  dispatch_dtype<float16, bfloat16, float, double>(call.dtype,
                                                   [&](auto tag) { backward<typename decltype(tag)::type>(call); });
}

}  // namespace baracuda
