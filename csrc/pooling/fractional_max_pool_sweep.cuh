// SPDX-License-Identifier: Apache-2.0
// Backward in two dimensions of contiguous tensors, on cards with a copy engine (sm_90).
//
// A block sweeps over a strip of a plane's rows. The engine brings a few rows of outputs at a time into shared memory,
// as the one piece that they are there, and is some of them ahead. Each warp owns some columns, so that it takes the
// neighbours of each row that could name them, in the order of pool_runs. The open rows of sums are shared, so that
// those that are done are written by all threads, whole lines of them.
#pragma once

#include "pooling/fractional_max_pool_runs.cuh"
#include "runtime/gate.cuh"

namespace baracuda {

// A warp takes 32 times `vectors` outputs of a row at once, and a block `rows` rows, of which `stages` times as many
// are in shared memory or on their way.
struct SweepTuning {
  int vectors = 0;
  int rows = 0;
  int stages = 0;
  int blocks = 0;  // of kSweepMostWarps warps on a multiprocessor at least; registers follow from it
};
// No vectors where pool_runs is to be taken.
constexpr SweepTuning sweep_tuning(size_t element_size) {
  if (element_size == 2) return {2, 3, 3, 3};
  if (element_size == 4) return {2, 4, 3, 3};
  return {};
}
constexpr int kSweepMostWarps = 8;

struct PoolSweepCall {
  PoolProblem problem;
  const void *dy;
  const void *indices;
  void *dx;
  bool accumulate;
  bool aligned;  // four cells can be written at once
  int32_t strip;
  int32_t strips;
  int32_t columns;  // of a warp
  uint32_t ring;    // cells in the open rows
  // Where the parts of shared memory begin.
  uint32_t stages_at;
  uint32_t gradients_at;  // within a stage
  uint32_t stage_bytes;
  uint32_t rows_at;
  ShortDivider row;  // cells in a row of x
  Divider by_strips;
  // The outputs that could name a cell of a strip's rows, or of a warp's columns. Blocks are too short to work them
  // out.
  PoolRange rows_over[kPoolMostStrips];
  PoolRange columns_over[kSweepMostWarps];
};

// A row of outputs: the rows of the strip that it could name.
struct alignas(16) PoolSweepRow {
  int64_t base;    // the index of the first one's first cell
  uint32_t place;  // of that cell among the sums
  uint16_t low;    // counted from the strip's first row
  uint16_t count;
};

template <class T, class Index, int kVectors, int kRows, int kStages, int kBlocks>
__global__ void __launch_bounds__(kSweepMostWarps *kLanes, kBlocks)
    pool_sweep(const __grid_constant__ PoolSweepCall call) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) char shared[];
  __shared__ uint64_t gates[kStages];
  constexpr uint32_t kNone = ~0u;
  const PoolAxis &slow = call.problem.axis[kSlow];
  const PoolAxis &fast = call.problem.axis[kFast];
  const uint32_t lane = threadIdx.x % kLanes;
  const uint32_t warp = threadIdx.x / kLanes;
  PoolSweepRow *const rows = reinterpret_cast<PoolSweepRow *>(shared + call.rows_at);

  const uint32_t plane = call.by_strips.divide(blockIdx.x);
  const uint32_t strip = blockIdx.x - plane * uint32_t(call.strips);
  const int32_t s0 = int32_t(strip) * call.strip;
  const int32_t s1 = min(s0 + call.strip, slow.in);
  const int32_t over_begin = call.rows_over[strip].begin;
  const int32_t count = call.rows_over[strip].end - over_begin;
  const int64_t first = int64_t(plane) * call.problem.out_plane() + int64_t(over_begin) * fast.out;
  const Index *const names = static_cast<const Index *>(call.indices) + first;
  const T *const gives = static_cast<const T *>(call.dy) + first;

  // Some bytes before the rows and behind them may come along: they are in the tensors.
  const auto load = [&](int32_t row, int stage) {
    const int32_t begin = row * fast.out;
    const int32_t end = min(row + kRows, count) * fast.out;
    const auto below = [](const void *p) { return reinterpret_cast<uintptr_t>(p) / kBulkBytes * kBulkBytes; };
    const auto above = [&](const void *p) { return below(static_cast<const char *>(p) + kBulkBytes - 1); };
    const uintptr_t from_names = below(names + begin);
    const uintptr_t from_gives = below(gives + begin);
    const uint32_t names_bytes = uint32_t(above(names + end) - from_names);
    const uint32_t gives_bytes = uint32_t(above(gives + end) - from_gives);
    std::byte *const to = reinterpret_cast<std::byte *>(shared) + call.stages_at + uint32_t(stage) * call.stage_bytes;
    uint64_t *const gate = &gates[stage];
    arrive_and_announce(gate, names_bytes + gives_bytes);
    bulk_load(to, reinterpret_cast<const std::byte *>(from_names), names_bytes, gate);
    bulk_load(to + call.gradients_at, reinterpret_cast<const std::byte *>(from_gives), gives_bytes, gate);
  };
  const bool loads = threadIdx.x == 0;
  if (loads) {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) set_gate(&gates[stage], 1);
    show_copy_engine();
#pragma unroll 1
    for (int stage = 0; stage < kStages; ++stage)
      if (stage * kRows < count) load(stage * kRows, stage);
  }
  // Behind the last row there are some that could name none, to complete what is taken at a time.
  const int64_t origin = call.problem.index_origin(plane);
  for (int32_t t = int32_t(threadIdx.x); t < count + kRows; t += int32_t(blockDim.x)) {
    PoolSpan span = {s1, 0};
    if (t < count) span = window_span(slow, over_begin + t, s0, s1);
    rows[t] = {origin + int64_t(span.low) * fast.in, uint32_t(span.low - s0) * uint32_t(fast.in) % call.ring,
               uint16_t(span.low - s0), uint16_t(span.count)};
  }
  for (uint32_t t = threadIdx.x * 4; t < call.ring; t += blockDim.x * 4)
    *reinterpret_cast<float4 *>(shared + t * sizeof(float)) = float4{0, 0, 0, 0};

  // The lane's outputs in each row, and which of the warp's columns they could name.
  const int32_t b0 = int32_t(warp) * call.columns;
  const int32_t b1 = min(b0 + call.columns, fast.in);
  const PoolRange over_columns = call.columns_over[warp];
  int32_t column_of[kVectors];
  PoolSpan columns[kVectors];
  uint32_t further[kVectors];  // than the first that the output could name at all
#pragma unroll
  for (int e = 0; e < kVectors; ++e) {
    const int32_t j = over_columns.begin + e * kLanes + int32_t(lane);
    column_of[e] = min(j, over_columns.end - 1);
    columns[e] = window_span(fast, column_of[e], b0, b1);
    if (column_of[e] < j) columns[e].count = 0;
    further[e] = uint32_t(columns[e].low - fast.earliest(column_of[e]));
  }
  const uint32_t sums_at = shared_address(shared);
  T *to = static_cast<T *>(call.dx) + (int64_t(plane) * slow.in + s0) * fast.in;
  uint32_t done = 0;  // rows of the strip below are written
  uint32_t head = 0;  // where the sums of row `done` lie
  int stage = 0;
  uint32_t parity = 0;
  __syncthreads();
#pragma unroll 1
  for (int32_t i = 0; i < count; i += kRows) {
    pass(&gates[stage], parity);
    const char *const staged = shared + call.stages_at + uint32_t(stage) * call.stage_bytes;
    const auto within = [&](const auto *from) {
      return uint32_t(reinterpret_cast<uintptr_t>(from + i * fast.out) % kBulkBytes);
    };
    const auto *const name_of = reinterpret_cast<const BitsOf<Index> *>(staged + within(names));
    const auto *const gradient_of = reinterpret_cast<const BitsOf<T> *>(staged + call.gradients_at + within(gives));
    uint32_t place[kRows][kVectors];
    uint32_t distance[kRows][kVectors];
    HeldOf<T> gradient[kRows][kVectors];
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const uint4 words = *reinterpret_cast<const uint4 *>(rows + (i + u));
      const auto row = bit_cast<PoolSweepRow>(words);
#pragma unroll
      for (int e = 0; e < kVectors; ++e) {
        // Where an index names a cell before the output's first one in an axis, the quotient or the column is out of
        // bounds.
        const int32_t output = u * fast.out + column_of[e];
        const BitsOf<Index> relative = name_of[output] - BitsOf<Index>(row.base);
        gradient[u][e] = gradient_of[output];
        const uint32_t left = uint32_t(relative) - uint32_t(columns[e].low);
        const uint32_t s = call.row.divide(left);
        const uint32_t column = call.row.rest(left, s);
        bool mine = (s < row.count) & (column < columns[e].count);
        if (sizeof(Index) > 4) mine = mine & (uint32_t(relative >> 16 >> 16) == 0);
        const uint32_t at = row.place + uint32_t(relative);
        place[u][e] = sums_at + min(at, at - call.ring) * uint32_t(sizeof(float));
        distance[u][e] = mine ? column + further[e] : kNone;
      }
    }
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      float sum[kVectors] = {};
#pragma unroll
      for (int d = kRunReach - 1; d >= 0; --d) {
#pragma unroll
        for (int e = 0; e < kVectors; ++e) load_sum_where(distance[u][e] == uint32_t(d), place[u][e], sum[e]);
#pragma unroll
        for (int e = 0; e < kVectors; ++e) {
          sum[e] += real_of<T>(BitsOf<T>(gradient[u][e]));
          store_sum_where(distance[u][e] == uint32_t(d), place[u][e], sum[e]);
        }
        __syncwarp();
      }
    }
    const uint32_t until = rows[i + kRows].low;
    __syncthreads();
    if (loads && i + kStages * kRows < count) load(i + kStages * kRows, stage);
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
    // No output of the next rows could name one that is written here, so the others needn't wait.
    const uint32_t cells = (until - done) * uint32_t(fast.in);
    const auto sum_at = [&](uint32_t cell) {
      const uint32_t at = head + cell;
      return sums_at + min(at, at - call.ring) * uint32_t(sizeof(float));
    };
    if (call.aligned && !call.accumulate) {
#pragma unroll 1
      for (uint32_t cell = threadIdx.x * kTileColumns; cell < cells; cell += blockDim.x * kTileColumns) {
        float four[kTileColumns];
        take_sums(sum_at(cell), four);
        write_cells(to + cell, four, kTileColumns, 1, true, false);
      }
    } else {
#pragma unroll 1
      for (uint32_t cell = threadIdx.x; cell < cells; cell += blockDim.x) {
        const float sum = take_sum(sum_at(cell));
        to[cell] = T(call.accumulate ? float(to[cell]) + sum : sum);
      }
    }
    to += cells;
    head += cells;
    head = min(head, head - call.ring);
    done = until;
  }
#endif
}

}  // namespace baracuda
