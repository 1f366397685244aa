// SPDX-License-Identifier: Apache-2.0
// Forward of contiguous tensors, windows of two, from sm_90 on: older cards were not measured.
//
// A block takes a few outputs along the slow axis with all that lies beside them. Their cells are on the way to shared
// memory while the block works out where windows start. Threads copy them, not the copy engine: beside so many writes
// the engine takes longer (measured: the whole kernel by a twentieth, in float32 and three dimensions). What is written
// is cut into whole lines, whatever the length of a row.
#pragma once

#include "pooling/fractional_max_pool.cuh"
#include "runtime/gate.cuh"

namespace baracuda {

constexpr int32_t kStagedWindow = 2;
constexpr int kStagedUnroll = 2;
constexpr int kStagedPiece = 16;  // bytes that a thread copies at once
constexpr int kStagedBlocks = 5;  // on a multiprocessor at least; registers follow from it

// Measured: pool_rows is as fast with wider elements.
constexpr size_t pool_staged_widest(bool flat) { return flat ? 2 : 4; }

struct PoolStagedCall {
  PoolProblem problem;
  PoolSamples samples;
  const void *x;
  void *y;
  void *indices;
  int32_t slices;  // of outputs in a block
  int32_t blocks;  // of a plane
  int32_t slice_outs;
  uint32_t slice_bytes;  // of cells
  int32_t rows_at;       // in shared memory, behind the cells
  int32_t columns_at;
  ShortDivider by_fast_out;
  Divider by_middle_out;
  Divider by_blocks;
  Divider by_channels;
};

// A row's first cell in shared memory, and in its plane.
struct PoolStagedRow {
  int32_t cell;
  uint32_t index;
};

template <class T, class Index, bool kFlat>
__global__ void __launch_bounds__(kPoolThreads, kStagedBlocks)
    pool_staged(const __grid_constant__ PoolStagedCall call) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using Real = typename PoolReal<T>::type;
  constexpr int kMiddleWindow = kFlat ? 1 : kStagedWindow;
  constexpr int kLines = kStagedWindow * kMiddleWindow;
  constexpr int kCells = kLines * kStagedWindow;
  constexpr uint32_t kLine = 32;  // elements
  extern __shared__ __align__(16) char shared[];
  const PoolAxis &slow = call.problem.axis[kSlow];
  const PoolAxis &middle = call.problem.axis[kMiddle];
  const PoolAxis &fast = call.problem.axis[kFast];
  const Placement placement = call.problem.placement;
  PoolStagedRow *const rows = reinterpret_cast<PoolStagedRow *>(shared + call.rows_at);
  uint32_t *const columns = reinterpret_cast<uint32_t *>(shared + call.columns_at);
  const uint32_t plane = call.by_blocks.divide(blockIdx.x);
  const int32_t i0 = int32_t(blockIdx.x - plane * uint32_t(call.blocks)) * call.slices;
  const int32_t slices = min(call.slices, slow.out - i0);
  const uint32_t n = call.by_channels.divide(plane);
  const int32_t row_cells = fast.in;
  const int32_t slice_cells = middle.in * fast.in;

  const auto load = [&](int32_t begin, int32_t end) {
    const char *const from =
        static_cast<const char *>(call.x) + (int64_t(plane) * slow.in + begin) * int64_t(call.slice_bytes);
    const uint32_t to = shared_address(shared);
    const uint32_t bytes = uint32_t(end - begin) * call.slice_bytes;
#pragma unroll 4
    for (uint32_t at = threadIdx.x * kStagedPiece; at < bytes; at += kPoolThreads * kStagedPiece)
      copy_ahead<kStagedPiece>(to + at, from + at);
    commit_copies();
  };
  // A row that no window needs is worth it that the copies needn't wait for samples; a slice isn't.
  if (kFlat) load(slow.earliest(i0), slow.latest(i0 + slices - 1) + kStagedWindow);
  Real u[kPoolAxes];
  plane_samples(call.samples, call.problem, n, plane - n * uint32_t(call.problem.channels), u);
  const int32_t begin = kFlat ? slow.earliest(i0) : window_start(slow, placement, i0, u[kSlow]);
  if (!kFlat) load(begin, window_start(slow, placement, i0 + slices - 1, u[kSlow]) + kStagedWindow);
  for (int32_t r = int32_t(threadIdx.x); r < slices * middle.out; r += kPoolThreads) {
    const int32_t i = int32_t(call.by_middle_out.divide(uint32_t(r)));
    const int32_t s = window_start(slow, placement, i0 + i, u[kSlow]);
    const int32_t m = window_start(middle, placement, r - i * middle.out, u[kMiddle]);
    rows[r] = {(s - begin) * slice_cells + m * row_cells, uint32_t(s * slice_cells + m * row_cells)};
  }
  for (int32_t t = int32_t(threadIdx.x); t < fast.out; t += kPoolThreads)
    columns[t] = uint32_t(window_start(fast, placement, t, u[kFast]));
  wait_for_copies<0>();
  __syncthreads();

  const int64_t first = (int64_t(plane) * slow.out + i0) * call.slice_outs;
  const int32_t outs = slices * call.slice_outs;
  T *const y = static_cast<T *>(call.y) + first;
  Index *const indices = call.indices ? static_cast<Index *>(call.indices) + first : nullptr;
  const int64_t origin = call.problem.index_origin(plane);
  const bool last_nan = placement == Placement::torch;
  const int32_t before = int32_t(uint32_t(first) % kLine);  // outputs of the first line that aren't of the block
#pragma unroll 1
  for (int32_t at = int32_t(threadIdx.x) - before; at < outs; at += kPoolThreads * kStagedUnroll) {
    BitsOf<T> cells[kStagedUnroll][kCells];
    uint32_t index[kStagedUnroll];
#pragma unroll
    for (int e = 0; e < kStagedUnroll; ++e) {
      const uint32_t t = uint32_t(max(0, min(at + e * kPoolThreads, outs - 1)));
      const uint32_t r = call.by_fast_out.divide(t);
      const PoolStagedRow row = rows[r];
      const uint32_t column = columns[call.by_fast_out.rest(t, r)];
      index[e] = row.index + column;
      const BitsOf<T> *const from = reinterpret_cast<const BitsOf<T> *>(shared) + (uint32_t(row.cell) + column);
#pragma unroll
      for (int line = 0; line < kLines; ++line)
#pragma unroll
        for (int w = 0; w < kStagedWindow; ++w)
          cells[e][line * kStagedWindow + w] =
              from[line / kMiddleWindow * slice_cells + line % kMiddleWindow * row_cells + w];
    }
#pragma unroll
    for (int e = 0; e < kStagedUnroll; ++e) {
      BitsOf<T> best;
      uint32_t offset;
      bool any_nan = false;
      highest_cell<T, kMiddleWindow, kStagedWindow>(cells[e], slice_cells, row_cells, best, offset, any_nan);
      if (any_nan) {
        best = cells[e][0];
        offset = 0;
#pragma unroll
        for (int cell = 1; cell < kCells; ++cell) {
          if (!beats(real_of<T>(cells[e][cell]), real_of<T>(best), last_nan)) continue;
          best = cells[e][cell];
          const int line = cell / kStagedWindow;
          offset =
              uint32_t(line / kMiddleWindow * slice_cells + line % kMiddleWindow * row_cells + cell % kStagedWindow);
        }
      }
      const int32_t t = at + e * kPoolThreads;
      if (uint32_t(t) >= uint32_t(outs)) continue;
      stream_out(y + t, best);
      if (indices) __stcs(indices + t, Index(origin + (index[e] + offset)));
    }
  }
#endif
}

}  // namespace baracuda
