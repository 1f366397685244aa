// SPDX-License-Identifier: Apache-2.0
// Forward, a thread takes an output. Backward, a warp owns a tile of cells of 32 channels, a lane a channel, with the
// sums in shared memory; it goes through the RoIs in their order.
#include "image/roi_pool.h"

#include <algorithm>

#include "runtime/launch.cuh"

namespace baracuda {
namespace {

constexpr int kLanes = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = INT32_MAX;

template <class T>
__global__ void __launch_bounds__(kThreads) roi_pool_any(RoiPoolForward call, int64_t outputs, bool channels_last) {
  using Real = typename ImageReal<T>::type;
  const RoiProblem &problem = call.problem;
  const int64_t bins = int64_t(problem.pooled_h) * problem.pooled_w;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < outputs; i += int64_t(gridDim.x) * kThreads) {
    const int64_t r = i / (problem.c * bins);
    const int64_t within = i - r * problem.c * bins;
    const int64_t c = channels_last ? within % problem.c : within / bins;
    const int32_t bin = int32_t(channels_last ? within / problem.c : within % bins);
    roi_pool_output<T, Real>(call, roi_pool_geometry<Real>(problem, call.rois, r), r, c, bin / problem.pooled_w,
                             bin % problem.pooled_w);
  }
}

constexpr int kTileSide = 8;
constexpr int kTileCells = kTileSide * kTileSide;
constexpr int kTileWarps = 4;
constexpr int kTileThreads = kTileWarps * kLanes;
// One more than lanes, so that a channel's cells lie in different banks.
constexpr int kTileStride = kLanes + 1;

template <class T>
__global__ void __launch_bounds__(kTileThreads)
    roi_pool_tiles(RoiPoolBackward call, int32_t down, int32_t across, int64_t tasks) {
  using Real = typename ImageReal<T>::type;
  extern __shared__ __align__(16) char shared[];
  const RoiProblem &problem = call.problem;
  const int lane = int(threadIdx.x % kLanes);
  Real *const sums = reinterpret_cast<Real *>(shared) + threadIdx.x / kLanes * kTileCells * kTileStride;
  const int64_t groups = (problem.c + kLanes - 1) / kLanes;
  const int64_t cells = int64_t(problem.h) * problem.w;
  for (int64_t task = int64_t(blockIdx.x) * kTileWarps + threadIdx.x / kLanes; task < tasks;
       task += int64_t(gridDim.x) * kTileWarps) {
    const int64_t c0 = task % groups * kLanes;
    const int64_t place = task / groups;
    const int32_t column0 = int32_t(place % across) * kTileSide;
    const int32_t row0 = int32_t(place / across % down) * kTileSide;
    const int32_t n = int32_t(place / across / down);
    const int32_t channels = int32_t(min(problem.c - c0, int64_t(kLanes)));
    for (int i = 0; i < kTileCells; ++i) sums[i * kTileStride + lane] = 0;
    const auto meets = [](const RoiCells &reach, int32_t from) {
      return reach.first < from + kTileSide && reach.first + reach.count > from;
    };
    for (int64_t from = 0; from < problem.rois; from += kLanes) {
      bool touches = false;
      if (from + lane < problem.rois && call.rois.batch(from + lane, int32_t(problem.n)) == n) {
        const RoiPoolGeometry<Real> roi = roi_pool_geometry<Real>(problem, call.rois, from + lane);
        touches = roi.batch == n && meets(roi.y.reach_of_all(problem.pooled_h), row0) &&
                  meets(roi.x.reach_of_all(problem.pooled_w), column0);
      }
      unsigned left = __ballot_sync(kAllLanes, touches);
      while (left) {
        const int64_t r = from + __ffs(int(left)) - 1;
        left &= left - 1;
        if (lane >= channels) continue;
        const RoiPoolGeometry<Real> roi = roi_pool_geometry<Real>(problem, call.rois, r);
        const T *const given = static_cast<const T *>(call.doutput.data) + call.doutput.plane(r, c0 + lane);
        const int64_t named = call.argmax.view.plane(r, c0 + lane);
        for (int32_t ph = 0; ph < problem.pooled_h; ++ph) {
          const RoiCells rows = roi.y.reach(ph);
          if (!meets(rows, row0)) continue;
          for (int32_t pw = 0; pw < problem.pooled_w; ++pw) {
            const RoiCells columns = roi.x.reach(pw);
            if (!meets(columns, column0)) continue;
            const int64_t index = call.argmax.get(named + call.argmax.view.cell(ph, pw));
            if (index < 0 || index >= cells) continue;
            const int32_t row = int32_t(index / problem.w);
            const int32_t column = int32_t(index - int64_t(row) * problem.w);
            const bool own = row >= max(rows.first, row0) && row < min(rows.first + rows.count, row0 + kTileSide) &&
                             column >= max(columns.first, column0) &&
                             column < min(columns.first + columns.count, column0 + kTileSide);
            if (own)
              sums[((row - row0) * kTileSide + column - column0) * kTileStride + lane] +=
                  Real(given[call.doutput.cell(ph, pw)]);
          }
        }
      }
    }
    __syncwarp();
    T *const to = static_cast<T *>(call.dinput.data) + call.dinput.plane(n, c0);
    const bool last = call.dinput.channel == 1 && problem.c > 1;
    for (int i = 0; i < kTileCells; ++i) {
      // Lanes are channels of a cell, or half the cells of a channel.
      const int32_t channel = last ? lane : i / 2;
      const int32_t cell = last ? i : i % 2 * kLanes + lane;
      const int32_t row = row0 + cell / kTileSide;
      const int32_t column = column0 + cell % kTileSide;
      if (channel >= channels || row >= problem.h || column >= problem.w) continue;
      const Real sum = sums[cell * kTileStride + channel];
      T &at = to[channel * call.dinput.channel + call.dinput.cell(row, column)];
      at = T(call.accumulate ? Real(at) + sum : sum);
    }
    __syncwarp();
  }
}

template <class T>
void forward(const RoiPoolForward &call, Stream stream) {
  const int64_t outputs = call.problem.rois * call.problem.c * call.problem.pooled_h * call.problem.pooled_w;
  const bool channels_last = call.input.channel == 1 && call.problem.c > 1;
  launch(roi_pool_any<T>, {std::min(ceil_div(outputs, kThreads), kMostBlocks), kThreads}, stream, call, outputs,
         channels_last);
}

template <class T>
void backward(const RoiPoolBackward &call, Stream stream) {
  using Real = typename ImageReal<T>::type;
  constexpr size_t kShared = sizeof(Real) * kTileWarps * kTileCells * kTileStride;
  const RoiProblem &problem = call.problem;
  const int64_t down = ceil_div(problem.h, kTileSide);
  const int64_t across = ceil_div(problem.w, kTileSide);
  const int64_t tasks = problem.n * down * across * ceil_div(problem.c, kLanes);
  const auto kernel = roi_pool_tiles<T>;
  if constexpr (sizeof(Real) == sizeof(double))
    check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    int(kShared)),
               "cudaFuncSetAttribute");
  launch(kernel, {std::min(ceil_div(tasks, kTileWarps), kMostBlocks), kTileThreads, kShared}, stream, call,
         int32_t(down), int32_t(across), tasks);
}

}  // namespace

void roi_pool_cuda(const RoiPoolForward &call, Stream stream) {
  dispatch_dtype<float16, bfloat16, float, double>(
      call.dtype, [&](auto tag) { forward<typename decltype(tag)::type>(call, stream); });
}

void roi_pool_backward_cuda(const RoiPoolBackward &call, Stream stream) {
  dispatch_dtype<float16, bfloat16, float, double>(
      call.dtype, [&](auto tag) { backward<typename decltype(tag)::type>(call, stream); });
}

}  // namespace baracuda
