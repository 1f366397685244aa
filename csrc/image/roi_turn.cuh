// SPDX-License-Identifier: Apache-2.0
// Turning a map of channels that lie apart, so that those of a cell lie side by side: [batch, cell, channel].
#pragma once

#include "image/roi_align.cuh"

namespace baracuda {

constexpr int kMapTurnThreads = 256;
constexpr int kMapTurnWarps = kMapTurnThreads / kLanes;
constexpr int kMapTurnSide = 2 * kLanes;

// What a lane loads at once of a turned map at most; the channels of a cell are filled up to a multiple.
template <class T>
constexpr int kTurnedVector = int(kRoiVector / int64_t(sizeof(T)));

template <class T>
int64_t turned_channels(const RoiProblem &problem) {
  return ceil_div(problem.c, kTurnedVector<T>) * kTurnedVector<T>;
}

template <class T>
int64_t turned_elements(const RoiProblem &problem) {
  return problem.n * problem.h * problem.w * turned_channels<T>(problem);
}

// Whether the map can be turned, and a warp then has enough of channels.
inline bool can_turn(const RoiProblem &problem) {
  constexpr int64_t kFewestChannels = 32;
  constexpr double kMostElements = double(int64_t(1) << 40);
  const int64_t cells = int64_t(problem.h) * problem.w;
  return problem.c >= kFewestChannels && problem.c <= INT32_MAX / 2 && cells > 0 && problem.n > 0 &&
         cells <= INT32_MAX && int64_t(problem.pooled_h) * problem.pooled_w <= INT32_MAX &&
         double(problem.n) * double(cells) * double(problem.c) <= kMostElements;
}

template <class T>
ImageView turned_view(const RoiProblem &problem, void *data) {
  const int64_t channels = turned_channels<T>(problem);
  return {data, channels * problem.w * problem.h, 1, channels * problem.w, channels};
}

// Starts while the kernel before it runs, which has waited for what the map comes from; what follows must wait for
// both.
template <class T>
__global__ void __launch_bounds__(kMapTurnThreads)
    roi_turn_map(const __grid_constant__ RoiProblem problem, const __grid_constant__ ImageView from,
                 const __grid_constant__ ImageView to, int64_t tasks) {
  __shared__ T tile[kMapTurnSide][kMapTurnSide + (sizeof(T) < 4 ? 4 / sizeof(T) : 1)];
  const int lane = int(threadIdx.x % kLanes);
  const int warp = int(threadIdx.x / kLanes);
  const int32_t cells = problem.h * problem.w;
  const int64_t groups = (to.column + kMapTurnSide - 1) / kMapTurnSide;
  const int64_t across = (int64_t(cells) + kMapTurnSide - 1) / kMapTurnSide;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t c0 = task % groups * kMapTurnSide;
    const int32_t cell0 = int32_t(task / groups % across) * kMapTurnSide;
    const int64_t n = task / groups / across;
    const T *const source = static_cast<const T *>(from.data) + from.plane(n, c0);
    T value[kMapTurnSide / kMapTurnWarps][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // The last tile's end can lie beyond 32 bits.
      const int32_t cell = cell0 + min(half * kLanes + lane, cells - 1 - cell0);
      const int32_t row = cell / problem.w;
      const int64_t offset = from.cell(row, cell - row * problem.w);
#pragma unroll
      for (int k = 0; k < kMapTurnSide / kMapTurnWarps; ++k) {
        const int channel = k * kMapTurnWarps + warp;
        value[k][half] = c0 + channel < problem.c ? source[channel * from.channel + offset] : T(0.0f);
      }
    }
#pragma unroll
    for (int k = 0; k < kMapTurnSide / kMapTurnWarps; ++k) {
      tile[k * kMapTurnWarps + warp][lane] = value[k][0];
      tile[k * kMapTurnWarps + warp][kLanes + lane] = value[k][1];
    }
    __syncthreads();
    T *const target = static_cast<T *>(to.data) + to.plane(n, c0) + cell0 * to.column;
#pragma unroll
    for (int k = 0; k < kMapTurnSide / kMapTurnWarps; ++k) {
      const int cell = k * kMapTurnWarps + warp;
      if (cell < cells - cell0) {
        if (c0 + lane < to.column) target[cell * to.column + lane] = tile[lane][cell];
        if (c0 + kLanes + lane < to.column) target[cell * to.column + kLanes + lane] = tile[kLanes + lane][cell];
      }
    }
    __syncthreads();
  }
  wait_for_earlier_work();
}

template <class T>
void turn_map(const RoiProblem &problem, const ImageView &from, const ImageView &to, Stream stream) {
  const int64_t tasks =
      problem.n * ceil_div(int64_t(problem.h) * problem.w, kMapTurnSide) * ceil_div(to.column, kMapTurnSide);
  launch(roi_turn_map<T>, {std::min(tasks, kMostBlocks), kMapTurnThreads, 0, true}, stream, problem, from, to, tasks);
}

}  // namespace baracuda
