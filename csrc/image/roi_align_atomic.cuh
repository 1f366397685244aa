// SPDX-License-Identifier: Apache-2.0
// RoI-align backward on the GPU by atomic additions, for callers who don't ask for the same bits in every run. It costs
// what the RoIs have, and not a look at each cell of the map for RoIs over it. Their weighted rows and columns come
// from the lists of the forward.
#pragma once

#include <algorithm>

#include "image/roi_align_backward.cuh"
#include "image/roi_align_forward.cuh"

namespace baracuda {

constexpr int kAddThreads = 256;
constexpr int kAddWarps = kAddThreads / kLanes;

struct RoiAlignAddCall {
  RoiAlignBackward backward;
  RoiRecords records;
  int64_t tasks;
};

// A warp takes a channel of a RoI, a lane a weighted column of a bin.
template <class T>
__global__ void __launch_bounds__(kAddThreads) roi_align_add(const __grid_constant__ RoiAlignAddCall call) {
  extern __shared__ __align__(16) char shared[];
  const RoiAlignProblem &problem = call.backward.problem;
  const ImageView &doutput = call.backward.doutput;
  const ImageView &dinput = call.backward.dinput;
  const int lane = int(threadIdx.x % kLanes);
  const int warp = int(threadIdx.x / kLanes);
  wait_for_earlier_work();
  for (int64_t task = blockIdx.x; task < call.tasks; task += gridDim.x) {
    copy_record(shared, call.records.data + task % problem.rois * call.records.bytes, kAddThreads);
    __syncthreads();
    const auto [head, rows_begin, columns_begin, counts, rows, columns] =
        lists_of<T>(call.records, shared, problem.pooled_w);
    const int64_t c = task / problem.rois * kAddWarps + warp;
    const int32_t entries = c < problem.c && head.batch >= 0 ? columns_begin[problem.pooled_w] : 0;
    const T *const given = static_cast<const T *>(doutput.data) + doutput.plane(head.roi, c);
    T *const to = static_cast<T *>(dinput.data) + dinput.plane(max(head.batch, 0), c);
    int32_t pw = 0;
    for (int32_t i = lane; i < entries; i += kLanes) {
      while (columns_begin[pw + 1] <= i) ++pw;
      const RoiEntry<T> column = columns[i];
      for (int32_t ph = 0; ph < problem.pooled_h; ++ph) {
        const T value = given[doutput.cell(ph, pw)] * column.weight;
        const int32_t last = rows_begin[ph + 1] - 1;
        const int32_t end = last * kChunkRows + (counts[last] & kChunkCount);
        for (int32_t j = rows_begin[ph] * kChunkRows; j < end; ++j)
          atomicAdd(to + dinput.cell(rows[j].cell, column.cell), rows[j].weight * value);
      }
    }
    __syncthreads();
  }
}

// Sums of 16-bit numbers would be rounded at each addition, so there are none of them. A cell that many bins weigh is
// found once by its tile, but waits here for each.
template <class T>
bool roi_align_adds_of(const RoiAlignProblem &problem) {
  constexpr double kMostBins = 512;
  const double bins = double(problem.rois) * problem.pooled_h * problem.pooled_w;
  return problem.rois > 0 && bins <= kMostBins && roi_rows_shared<T>(problem, 1) > 0;
}

template <class T>
void roi_align_add_cuda_of(const RoiAlignBackward &call, Stream stream) {
  const RoiAlignProblem &problem = call.problem;
  Workspace space(call.workspace);
  const RoiRecords records = roi_records<T>(problem, space);
  launch(roi_align_list<T>, {problem.rois, kRowsThreads, 0, true}, stream, problem, call.rois, records, 1);
  if (!call.accumulate) clear_map<T>(problem, call.dinput, stream);
  RoiAlignAddCall add = {call, records, problem.rois * ceil_div(problem.c, kAddWarps)};
  allow_roi_shared(roi_align_add<T>, size_t(records.bytes));
  launch(roi_align_add<T>, {std::min(add.tasks, kMostBlocks), kAddThreads, size_t(records.bytes), true}, stream, add);
}

}  // namespace baracuda
