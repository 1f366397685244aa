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
  if (element_size <= 4) return {2, 4, 3, 3};
  return {};
}
constexpr int kSweepMostWarps = 8;

// Quotients in one instruction of numbers below 2^32 over the divisor. Those of larger numbers are not exact, but never
// below the quotient. The divisor is at least 2.
struct SmallDivider {
  uint32_t negated = 0u - 2u;
  uint32_t multiplier = 1u << 31;

  SmallDivider() = default;
  explicit SmallDivider(uint32_t d) : negated(0u - d), multiplier(uint32_t(((uint64_t(1) << 32) + d - 1) / d)) {}
  __device__ uint32_t divide(uint32_t n) const { return __umulhi(n, multiplier); }
  __device__ uint32_t rest(uint32_t n, uint32_t quotient) const { return n + quotient * negated; }
};

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
  uint32_t open;    // rows of sums
  uint32_t ring;    // their bytes
  // Where the parts of shared memory begin.
  uint32_t stages_at;
  uint32_t gradients_at;  // within a stage
  uint32_t stage_bytes;
  uint32_t rows_at;
  SmallDivider row;  // cells in a row of x
  Divider by_strips;
  Divider by_open;
  Divider by_slow_steps;  // from window to window
  Divider by_fast_steps;
  // The outputs that could name a cell of a strip's rows, and the first one that a warp takes.
  PoolRange rows_over[kPoolMostStrips];
  int32_t outputs_from[kSweepMostWarps];
};

// PoolAxis's bounds of a start, by a division that the host prepared: blocks are too short for a real one.
__device__ __forceinline__ int32_t earliest_start(const PoolAxis &axis, const Divider &by_steps, int32_t i) {
  const int32_t product = max(i * axis.last_start() - axis.tie, 0);
  return min(max(int32_t(by_steps.divide(uint32_t(product))) - axis.below, 0), axis.last_start());
}
__device__ __forceinline__ int32_t latest_start(const PoolAxis &axis, const Divider &by_steps, int32_t i) {
  return min(int32_t(by_steps.divide(uint32_t(i * axis.last_start()))) + 1 + axis.above, axis.last_start());
}

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
  extern __shared__ __align__(kBulkLine) char sweep_memory[];
  __shared__ uint64_t gates[kStages];
  constexpr uint32_t kNone = ~0u;
  constexpr uint32_t kNever = ~1u;
  const PoolAxis &slow = call.problem.axis[kSlow];
  const PoolAxis &fast = call.problem.axis[kFast];
  const uint32_t lane = threadIdx.x % kLanes;
  const uint32_t warp = threadIdx.x / kLanes;
  PoolSweepRow *const rows = reinterpret_cast<PoolSweepRow *>(sweep_memory + call.rows_at);

  const uint32_t plane = call.by_strips.divide(blockIdx.x);
  const uint32_t strip = blockIdx.x - plane * uint32_t(call.strips);
  const int32_t s0 = int32_t(strip) * call.strip;
  const int32_t s1 = min(s0 + call.strip, slow.in);
  const int32_t over_begin = call.rows_over[strip].begin;
  const int32_t count = call.rows_over[strip].end - over_begin;
  const int64_t first = int64_t(plane) * call.problem.out_plane() + int64_t(over_begin) * fast.out;
  const Index *const names = static_cast<const Index *>(call.indices) + first;
  const T *const gives = static_cast<const T *>(call.dy) + first;
  char *const stages = sweep_memory + call.stages_at;

  // Some bytes before the rows and behind them may come along: they are in the tensors.
  const Index *names_ahead = names;
  const T *gives_ahead = gives;
  int32_t rows_ahead = count;
  const auto load = [&](int stage) {
    if (rows_ahead <= 0) return;
    const int32_t outputs = min(kRows, rows_ahead) * fast.out;
    const auto below = [](const void *p) { return reinterpret_cast<uintptr_t>(p) / kBulkBytes * kBulkBytes; };
    const auto above = [&](const void *p) { return below(static_cast<const char *>(p) + kBulkBytes - 1); };
    const uintptr_t from_names = below(names_ahead);
    const uintptr_t from_gives = below(gives_ahead);
    const uint32_t names_bytes = uint32_t(above(names_ahead + outputs) - from_names);
    const uint32_t gives_bytes = uint32_t(above(gives_ahead + outputs) - from_gives);
    std::byte *const to = reinterpret_cast<std::byte *>(stages) + uint32_t(stage) * call.stage_bytes;
    uint64_t *const gate = &gates[stage];
    arrive_and_announce(gate, names_bytes + gives_bytes);
    bulk_load(to + from_names % kBulkLine, reinterpret_cast<const std::byte *>(from_names), names_bytes, gate);
    bulk_load(to + call.gradients_at + from_gives % kBulkLine, reinterpret_cast<const std::byte *>(from_gives),
              gives_bytes, gate);
    names_ahead += outputs;
    gives_ahead += outputs;
    rows_ahead -= kRows;
  };
  const bool loads = threadIdx.x == 0;
  if (loads) {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) set_gate(&gates[stage], 1);
    show_copy_engine();
#pragma unroll 1
    for (int stage = 0; stage < kStages; ++stage) load(stage);
  }
  // Behind the last row there are some that could name none, to complete what is taken at a time.
  const int64_t origin = call.problem.index_origin(plane);
  for (int32_t t = int32_t(threadIdx.x); t < count + kRows; t += int32_t(blockDim.x)) {
    int32_t low = s1;
    int32_t behind = s1;
    if (t < count) {
      low = max(earliest_start(slow, call.by_slow_steps, over_begin + t), s0);
      behind = min(latest_start(slow, call.by_slow_steps, over_begin + t) + slow.window, s1);
    }
    const uint32_t from = uint32_t(low - s0);
    const uint32_t slot = from - call.by_open.divide(from) * call.open;
    rows[t] = {origin + int64_t(low) * fast.in, slot * uint32_t(fast.in) * uint32_t(sizeof(float)), uint16_t(from),
               uint16_t(max(behind - low, 0))};
  }
  for (uint32_t t = threadIdx.x * 16; t < call.ring; t += blockDim.x * 16)
    *reinterpret_cast<float4 *>(sweep_memory + t) = float4{0, 0, 0, 0};

  // The lane's outputs in each row, and at which distances from the first column that they could name there is one of
  // the warp's.
  const int32_t b0 = int32_t(warp) * call.columns;
  const int32_t b1 = min(b0 + call.columns, fast.in);
  const int32_t output = call.outputs_from[warp] + int32_t(lane);
  uint32_t earliest[kVectors];
  uint32_t wanted[kVectors][kRunReach];
#pragma unroll
  for (int e = 0; e < kVectors; ++e) {
    const int32_t j = output + e * kLanes;
    const int32_t low = earliest_start(fast, call.by_fast_steps, j);
    const int32_t behind = min(latest_start(fast, call.by_fast_steps, j) + fast.window, b1);
    earliest[e] = uint32_t(low);
#pragma unroll
    for (int d = 0; d < kRunReach; ++d) wanted[e][d] = low + d >= b0 && low + d < behind ? uint32_t(d) : kNever;
  }
  const uint32_t sums_at = shared_address(sweep_memory);
  const uint32_t names_pitch = uint32_t(fast.out) * uint32_t(sizeof(Index));
  const uint32_t gives_pitch = uint32_t(fast.out) * uint32_t(sizeof(T));
  uint32_t names_from = uint32_t(reinterpret_cast<uintptr_t>(names));
  uint32_t gives_from = uint32_t(reinterpret_cast<uintptr_t>(gives));
  T *to = static_cast<T *>(call.dx) + (int64_t(plane) * slow.in + s0) * fast.in;
  uint32_t done = 0;  // rows of the strip below are written
  uint32_t head = 0;  // where the sums of row `done` lie
  int stage = 0;
  uint32_t parity = 0;
  float sum[kVectors] = {};  // where none is loaded there is an older one, which isn't stored either
  __syncthreads();
#pragma unroll 1
  for (int32_t i = 0; i < count; i += kRows) {
    pass(&gates[stage], parity);
    const char *const staged = stages + uint32_t(stage) * call.stage_bytes;
    const char *name_at = staged + names_from % kBulkLine + uint32_t(output) * uint32_t(sizeof(Index));
    const char *give_at = staged + call.gradients_at + gives_from % kBulkLine + uint32_t(output) * uint32_t(sizeof(T));
    names_from += kRows * names_pitch;
    gives_from += kRows * gives_pitch;
    uint32_t place[kRows][kVectors];
    uint32_t distance[kRows][kVectors];
    HeldOf<T> gradient[kRows][kVectors];
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const uint4 words = *reinterpret_cast<const uint4 *>(rows + (i + u));
      const auto row = bit_cast<PoolSweepRow>(words);
#pragma unroll
      for (int e = 0; e < kVectors; ++e) {
        // Where an index names a cell before the output's first one in an axis, the quotient or the distance is none
        // that is wanted.
        const BitsOf<Index> relative =
            reinterpret_cast<const BitsOf<Index> *>(name_at)[e * kLanes] - BitsOf<Index>(row.base);
        gradient[u][e] = reinterpret_cast<const BitsOf<T> *>(give_at)[e * kLanes];
        const uint32_t left = uint32_t(relative) - earliest[e];
        const uint32_t s = call.row.divide(left);
        bool mine = s < row.count;
        if (sizeof(Index) > 4) mine = mine & (uint32_t(relative >> 16 >> 16) == 0);
        const uint32_t at = row.place + uint32_t(relative) * uint32_t(sizeof(float));
        place[u][e] = sums_at + min(at, at - call.ring);
        distance[u][e] = mine ? call.row.rest(left, s) : kNone;
      }
      name_at += names_pitch;
      give_at += gives_pitch;
    }
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
#pragma unroll
      for (int d = kRunReach - 1; d >= 0; --d) {
#pragma unroll
        for (int e = 0; e < kVectors; ++e) load_sum_where(distance[u][e] == wanted[e][d], place[u][e], sum[e]);
#pragma unroll
        for (int e = 0; e < kVectors; ++e) {
          sum[e] += real_of<T>(BitsOf<T>(gradient[u][e]));
          store_sum_where(distance[u][e] == wanted[e][d], place[u][e], sum[e]);
        }
        __syncwarp();
      }
    }
    const uint32_t until = rows[i + kRows].low;
    __syncthreads();
    if (loads) load(stage);
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
    // No output of the next rows could name one that is written here, so the others needn't wait.
    const uint32_t cells = (until - done) * uint32_t(fast.in);
    const auto sum_at = [&](uint32_t cell) {
      const uint32_t at = head + cell * uint32_t(sizeof(float));
      return sums_at + min(at, at - call.ring);
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
    head += cells * uint32_t(sizeof(float));
    head = min(head, head - call.ring);
    done = until;
  }
#endif
}

}  // namespace baracuda
