// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "pooling/fractional_max_pool_runs.cuh"
#include "runtime/gate.cuh"

namespace baracuda {

// ---------------------------------------------------------------------------------------------------
// Backward, three dimensions, contiguous operands, on cards with a copy engine (sm_90). A block owns some rows of cells
// in every slice of a strip, and keeps the open sums in shared memory. The engine brings the outputs that could name
// one of them, slice by slice and as the one piece that they are there, and is some slices ahead.
//
// A slice of outputs is shared out among teams of a few lanes, each with a few neighbouring rows, which it adds one
// after the other. Along an axis each window begins after the one before. So a team's rows name no cell that another
// one's could, but for those at its beginning, which the last row of the team before could name, too, and nobody else.
// All teams add at once, and keep what is for those cells until all have added the rest. So outputs that name the same
// cell are added in their order, whatever the indices are.
//
// Within a row a lane takes neighbouring outputs, and adds them in their order. Windows of two overlap with their
// neighbours only: in indices of a forward pass, of outputs in two lanes no more than a lane's last and the next one's
// first name the same cell, and the former lane adds both. Where other indices have it otherwise, lanes add one after
// the other.

struct SlabTuning {
  int threads = 0;  // of a block at most
  int blocks = 0;   // on a multiprocessor at least; registers and shared memory follow from it
};
// No threads where other kernels are to be taken.
constexpr SlabTuning slab_tuning(size_t element_size) {
  if (element_size == 2 || element_size == 4) return {320, 2};
  return {};
}
constexpr int kSlabOutputs = 3;  // of a lane in a row, or one more
constexpr int kSlabRows = 3;     // of a team; the argument above needs two
constexpr int kSlabShare = 8;    // of the slices, one in so many is left for short strips
constexpr int kFewestSlabStages = 2;
constexpr int kMostSlabStages = 4;
constexpr uint32_t kNoPlace = ~0u;

// How the work is cut; 0 slots where it can't be.
struct PoolSlabsShape {
  int32_t outputs = 0;  // of a lane in a row
  uint32_t lanes = 0;   // of a team
  int32_t threads = 0;
  int32_t band = 0;  // rows
  int32_t bands = 0;
  // Blocks are given out in the order of their numbers, those of short strips last, to whoever is done first.
  int32_t strip = 0;  // slices
  int32_t long_strips = 0;
  int32_t short_strip = 0;
  int32_t strips = 0;
  int32_t slots = 0;
  uint32_t slot_bytes = 0;
  int32_t stages = 0;
  uint32_t stage_bytes = 0;
  uint32_t gradients_at = 0;  // in a stage
  // Where the parts of shared memory begin.
  int32_t stages_at = 0;
  int32_t slices_at = 0;
  size_t shared = 0;

  BARACUDA_HD int32_t strip_begin(int32_t at) const {
    return at < long_strips ? at * strip : long_strips * strip + (at - long_strips) * short_strip;
  }
};

struct PoolSlabsCall {
  PoolProblem problem;
  const void *dy;
  const void *indices;
  PoolView dx;
  bool accumulate;
  bool aligned;  // four cells can be written at once
  PoolSlabsShape shape;
  uint32_t long_blocks;
  // The outputs that could name a strip's slices, and a band's rows: many instructions for a block to work out.
  PoolRange over_strip[kPoolMostStrips];
  PoolRange over_band[kPoolMostStrips];
  ShortDivider slice;  // cells in a slice of x
  ShortDivider row;    // cells in a row of x
};

// A slice of outputs: which slices of cells it could name, and where the first one's sums lie.
struct alignas(16) PoolSlabSlice {
  int32_t low;
  uint32_t count;
  uint32_t head;
};

__device__ __forceinline__ void load_shared(uint32_t address, uint64_t &value) {
  asm volatile("ld.shared.b64 %0, [%1];" : "=l"(value) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_shared(uint32_t address, uint32_t &value) {
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_shared(uint32_t address, uint16_t &value) {
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(value) : "r"(address) : "memory");
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// Brings `bytes` bytes from `from` on, and what surrounds them in whole sixteens, to where they lie alike in a line of
// shared memory, of which `to` is the first. Nothing from `end` on, where a tensor ends, is read: what lies between
// there and the last whole sixteen, the thread copies itself. Returns what the engine brings.
__device__ __forceinline__ uint32_t load_around(std::byte *to, const std::byte *from, uint32_t bytes,
                                                const std::byte *end, uint64_t *gate, bool keep) {
  const uint32_t before = uint32_t(reinterpret_cast<uintptr_t>(from) % kBulkBytes);
  from -= before;
  bytes += before;
  to += reinterpret_cast<uintptr_t>(from) % kBulkLine;
  const uint32_t inside = uint32_t(min(int64_t(end - from), int64_t(bytes + kBulkBytes))) / kBulkBytes * kBulkBytes;
  const uint32_t whole = min((bytes + kBulkBytes - 1) / kBulkBytes * kBulkBytes, inside);
  for (uint32_t at = whole; at < bytes; at += sizeof(uint16_t))
    *reinterpret_cast<uint16_t *>(to + at) = *reinterpret_cast<const uint16_t *>(from + at);
  if (whole > 0 && keep) bulk_load_and_keep(to, from, whole, gate);
  if (whole > 0 && !keep) bulk_load(to, from, whole, gate);
  return whole;
}
#endif

// Adds a lane's values to the sums in its places, one after the other; to the last one's `second`, too.
template <int kOutputs>
__device__ __forceinline__ void add_outputs(const uint32_t (&place)[kOutputs], const float (&value)[kOutputs],
                                            float second) {
  float sum[kOutputs] = {};
#pragma unroll
  for (int e = 0; e < kOutputs; ++e) load_sum_where(place[e] != kNoPlace, place[e], sum[e]);
#pragma unroll
  for (int e = 0; e < kOutputs; ++e) {
    // No more than three neighbours can name a column.
    if (e >= 2) sum[e] = place[e] == place[e >= 2 ? e - 2 : 0] ? sum[e >= 2 ? e - 2 : 0] : sum[e];
    if (e >= 1) sum[e] = place[e] == place[e >= 1 ? e - 1 : 0] ? sum[e >= 1 ? e - 1 : 0] : sum[e];
    sum[e] += value[e];
    if (e == kOutputs - 1) sum[e] += second;
  }
#pragma unroll
  for (int e = 0; e < kOutputs; ++e) store_sum_where(place[e] != kNoPlace, place[e], sum[e]);
}

template <class T, class Index, int kOutputs, int kRows, int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) pool_slabs(const __grid_constant__ PoolSlabsCall call) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using Real = typename PoolReal<T>::type;
  static_assert(kRunReach == 3 && kRows >= 2);
  constexpr int kLateRows = 2;  // of a team's rows may wait for the team before
  extern __shared__ __align__(kBulkLine) char slab_memory[];
  __shared__ uint64_t loaded[kMostSlabStages];
  const PoolAxis &slow = call.problem.axis[kSlow];
  const PoolAxis &middle = call.problem.axis[kMiddle];
  const PoolAxis &fast = call.problem.axis[kFast];
  const PoolSlabsShape &shape = call.shape;
  const uint32_t threads = blockDim.x;
  const uint32_t ring_bytes = uint32_t(shape.slots) * shape.slot_bytes;
  char *const sums = slab_memory;
  std::byte *const stages = reinterpret_cast<std::byte *>(slab_memory + shape.stages_at);
  PoolSlabSlice *const slices_of = reinterpret_cast<PoolSlabSlice *>(slab_memory + shape.slices_at);

  uint32_t rest = blockIdx.x;
  const auto next = [&](int32_t count) {
    const uint32_t at = rest % uint32_t(count);
    rest /= uint32_t(count);
    return int32_t(at);
  };
  const bool is_long = rest < call.long_blocks;
  if (!is_long) rest -= call.long_blocks;
  const int32_t band = next(shape.bands);
  const int32_t strip = is_long ? next(shape.long_strips) : shape.long_strips + next(shape.strips - shape.long_strips);
  const int64_t plane = rest;
  const int32_t b0 = band * shape.band;
  const int32_t b1 = min(b0 + shape.band, middle.in);
  const int32_t s0 = shape.strip_begin(strip);
  const int32_t s1 = min(shape.strip_begin(strip + 1), slow.in);
  const PoolRange over_slow = call.over_strip[strip];
  const PoolRange over_band = call.over_band[band];
  const int32_t slices_count = max(over_slow.end - over_slow.begin, 0);
  const uint32_t rows = uint32_t(max(over_band.end - over_band.begin, 0));
  const uint32_t cells = uint32_t(b1 - b0) * uint32_t(fast.in);
  const uint32_t slice_outputs = uint32_t(middle.out) * uint32_t(fast.out);
  const int32_t first_named = middle.earliest(over_band.begin) * fast.in;
  const int64_t first_output =
      plane * call.problem.out_plane() + int64_t(over_band.begin) * fast.out + int64_t(over_slow.begin) * slice_outputs;

  const auto load = [&](int32_t slice, int32_t stage) {
    const int64_t first = first_output + int64_t(slice) * slice_outputs;
    const int64_t all = call.problem.planes() * call.problem.out_plane();
    std::byte *const to = stages + uint32_t(stage) * shape.stage_bytes;
    uint64_t *const gate = &loaded[stage];
    // Where strips meet, both read a slice. Those of one length begin together, and long ones before short ones: the
    // first to read it is the later strip, or the last long one.
    const int32_t at = over_slow.begin + slice;
    bool keep = false;
    if (shape.strips > shape.long_strips) {
      if (strip > 0 && at < call.over_strip[strip - 1].end) {
        keep = strip != shape.long_strips;
      } else {
        keep = strip + 1 == shape.long_strips && at >= call.over_strip[strip + 1].begin;
      }
    }
    const auto bring = [&](std::byte *part, const void *data, uint32_t size) {
      const std::byte *const from = static_cast<const std::byte *>(data);
      return load_around(part, from + first * size, rows * uint32_t(fast.out) * size, from + all * size, gate, keep);
    };
    const uint32_t names = bring(to, call.indices, sizeof(Index));
    const uint32_t gradients = bring(to + shape.gradients_at, call.dy, sizeof(T));
    arrive_and_announce(gate, names + gradients);
  };
  // One warp brings the first slices, or waits until they may be read, while the last ones work out tables.
  if (threadIdx.x < kLanes) {
    if (threadIdx.x == 0) {
      for (int32_t t = 0; t < shape.stages; ++t) set_gate(&loaded[t], 1);
      show_copy_engine();
    }
    wait_for_earlier_work();
    let_next_kernel_start();
    if (threadIdx.x == 0) {
      for (int32_t t = 0; t < min(shape.stages, slices_count); ++t) load(t, t);
    }
  }

  const uint32_t lane = threadIdx.x % kLanes;
  const uint32_t team = lane / shape.lanes;
  const uint32_t team_lane = lane - team * shape.lanes;
  const uint32_t teams = kLanes / shape.lanes;  // of a warp
  const uint32_t first_row = (threadIdx.x / kLanes * teams + team) * kRows;
  const bool works = team < teams && first_row < rows;
  const bool has_next = team_lane + 1 < shape.lanes;
  const uint32_t lane_before = team_lane > 0 ? 1u << (lane - 1) : 0;
  // The first cell that an output could name in a slice is counted from the one of the band's first output. Columns
  // and rows from there on.
  const int32_t first_column = int32_t(team_lane) * kOutputs;
  uint32_t column_of[kOutputs];
  uint32_t columns_of[kOutputs];
  uint32_t row_of[kRows];
  uint32_t late_below = 0;  // cells that the team before could name, too
  {
    // The spans of columns, where sums will lie: they take many instructions.
    PoolSpan *const spans = reinterpret_cast<PoolSpan *>(sums);
    int32_t *const lows = reinterpret_cast<int32_t *>(spans + fast.out);
    const int32_t first = int32_t(threads - 1 - threadIdx.x);
    for (int32_t t = first; t < fast.out; t += int32_t(threads)) spans[t] = window_span(fast, t, 0, fast.in);
    for (int32_t t = first; t < int32_t(rows); t += int32_t(threads))
      lows[t] = middle.earliest(over_band.begin + t) * fast.in - first_named;
    for (int32_t t = first; t < slices_count; t += int32_t(threads)) {
      const PoolSpan span = window_span(slow, over_slow.begin + t, s0, s1);
      slices_of[t] = {span.low, span.count, uint32_t(span.low - s0) % uint32_t(shape.slots) * shape.slot_bytes};
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < kOutputs; ++e) {
      const bool some = works && first_column + e < fast.out;
      column_of[e] = some ? uint32_t(spans[first_column + e].low) : 0;
      columns_of[e] = some ? spans[first_column + e].count : 0;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      row_of[r] = works && first_row + r < rows ? uint32_t(lows[first_row + r]) : kNoPlace / 2;
    if (works && first_row > 0) late_below = uint32_t(lows[first_row - 1] + kRunReach * fast.in);
    __syncthreads();
  }
  wait_for_earlier_work();
  for (uint32_t t = threadIdx.x * 16; t < ring_bytes; t += threads * 16)
    *reinterpret_cast<uint4 *>(sums + t) = uint4{0, 0, 0, 0};

  const int64_t n = plane / call.problem.channels;
  const int64_t c = plane - n * call.problem.channels;
  T *to = static_cast<T *>(call.dx.data) + call.dx.plane(n, c) + call.dx.cell(s0, 0, 0) + int64_t(b0) * fast.in;
  const int64_t origin = call.problem.index_origin(plane) + first_named;
  const uint32_t before = uint32_t(b0) * uint32_t(fast.in) - uint32_t(first_named);
  uint32_t sums_at = shared_address(sums);
  asm volatile("" : "+r"(sums_at));  // kept, not worked out again and again
  const uint32_t stages_at = shared_address(stages);

  int32_t done = s0;  // slices below are written
  uint32_t done_at = sums_at;
  const auto write_slices = [&](int32_t until) {
#pragma unroll 1
    for (; done < until; ++done) {
      if (call.aligned && !call.accumulate) {
#pragma unroll 2
        for (uint32_t cell = threadIdx.x * kTileColumns; cell < cells; cell += threads * kTileColumns) {
          float four[kTileColumns];
          take_sums(done_at + cell * uint32_t(sizeof(float)), four);
          write_cells(to + cell, four, kTileColumns, 1, true, false);
        }
      } else {
#pragma unroll 1
        for (uint32_t cell = threadIdx.x; cell < cells; cell += threads) {
          const float sum = take_sum(done_at + cell * uint32_t(sizeof(float)));
          to[cell] = T(call.accumulate ? float(to[cell]) + sum : sum);
        }
      }
      done_at += shape.slot_bytes;
      if (done_at == sums_at + ring_bytes) done_at = sums_at;
      to += call.dx.axis[kSlow];
    }
  };

  const uint32_t lane_output = works ? first_row * uint32_t(fast.out) + uint32_t(first_column) : 0;
  int32_t stage = 0;
  uint32_t parity = 0;
  // All that is asked is where in a line a slice begins.
  uint32_t names_from = uint32_t(reinterpret_cast<uintptr_t>(call.indices)) + uint32_t(first_output) * sizeof(Index);
  uint32_t gradients_from = uint32_t(reinterpret_cast<uintptr_t>(call.dy)) + uint32_t(first_output) * sizeof(T);
#pragma unroll 1
  for (int32_t i = 0; i < slices_count; ++i) {
    const PoolSlabSlice slices = slices_of[i];
    const int64_t slice_base = origin + uint32_t(slices.low) * call.slice.divisor;
    const uint32_t stage_at = stages_at + uint32_t(stage) * shape.stage_bytes;
    uint32_t names_at = stage_at + names_from % kBulkLine + lane_output * uint32_t(sizeof(Index));
    uint32_t gradients_at =
        stage_at + shape.gradients_at + gradients_from % kBulkLine + lane_output * uint32_t(sizeof(T));
    names_from += slice_outputs * uint32_t(sizeof(Index));
    gradients_from += slice_outputs * uint32_t(sizeof(T));
    uint32_t place[kRows][kOutputs];
    uint32_t late[kLateRows][kOutputs];
    Real value[kRows][kOutputs];
    Real second[kRows];
    uint32_t joined[kRows];
    bool far = false;
    pass(&loaded[stage], parity);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      BitsOf<Index> name[kOutputs];
      BitsOf<T> gradient[kOutputs];
#pragma unroll
      for (int e = 0; e < kOutputs; ++e) {
        load_shared(names_at + e * uint32_t(sizeof(Index)), name[e]);
        load_shared(gradients_at + e * uint32_t(sizeof(T)), gradient[e]);
      }
      // Lanes without a row look at another one.
      const uint32_t step = first_row + uint32_t(r) + 1 < rows ? uint32_t(fast.out) : 0;
      names_at += step * uint32_t(sizeof(Index));
      gradients_at += step * uint32_t(sizeof(T));
#pragma unroll
      for (int e = 0; e < kOutputs; ++e) {
        // Where an index names a cell before the output's first one in any axis, a quotient or the column is out of
        // bounds.
        const BitsOf<Index> relative = name[e] - BitsOf<Index>(slice_base);
        uint32_t left = uint32_t(relative) - row_of[r] - column_of[e];
        const uint32_t s = call.slice.divide(left);
        left = call.slice.rest(left, s);
        const uint32_t m = call.row.divide(left);
        const uint32_t column = call.row.rest(left, m);
        const uint32_t named = left + row_of[r] + column_of[e];
        const uint32_t cell = named - before;
        // Without branches, which cost more than the comparisons.
        bool mine = s < slices.count;
        if (sizeof(Index) > 4) mine = mine & (uint32_t(relative >> 16 >> 16) == 0);
        mine = mine & (m < kRunReach) & (column < columns_of[e]) & (cell < cells);
        const uint32_t at = slices.head + s * shape.slot_bytes + cell * uint32_t(sizeof(Real));
        const uint32_t wrapped = sums_at + min(at, at - ring_bytes);
        place[r][e] = mine ? wrapped : kNoPlace;
        value[r][e] = real_of<T>(gradient[e]);
        if (r < kLateRows) late[r < kLateRows ? r : 0][e] = named < late_below;
      }
      // Of outputs in two lanes that name the same cell, the former lane has both values. Zero changes no sum.
      constexpr int kLast = kOutputs - 1;
      const uint32_t next = __shfl_down_sync(~0u, place[r][0], 1);
      const uint32_t next_but_one = __shfl_down_sync(~0u, place[r][1], 1);
      const Real next_value = __shfl_down_sync(~0u, value[r][0], 1);
      const bool same = has_next & (next == place[r][kLast]);
      second[r] = same ? next_value : Real(0);
      far |= has_next & (((next == place[r][kLast - 1]) & (next != kNoPlace)) |
                         ((next_but_one == place[r][kLast]) & (next_but_one != kNoPlace)));
      joined[r] = __ballot_sync(~0u, same) & lane_before;
    }
    far = __any_sync(~0u, far);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (!far && joined[r] != 0) place[r][0] = kNoPlace;
#pragma unroll
      for (int e = 0; r < kLateRows && e < kOutputs; ++e) {
        uint32_t &place_late = late[r < kLateRows ? r : 0][e];
        const bool is_late = place_late != 0;
        place_late = is_late ? place[r][e] : kNoPlace;
        place[r][e] = is_late ? kNoPlace : place[r][e];
      }
    }
    const auto add = [&](const uint32_t (&places)[kOutputs], int r) {
      if (!far) {
        add_outputs(places, value[r], second[r]);
        __syncwarp();
        return;
      }
#pragma unroll 1
      for (uint32_t at = 0; at < kLanes; ++at) {
#pragma unroll
        for (int e = 0; e < kOutputs; ++e) add_where(at == lane && places[e] != kNoPlace, places[e], value[r][e]);
        __syncwarp();
      }
    };
    __syncthreads();
    // All of the slices before are added, and all have looked at this stage.
    if (threadIdx.x == 0 && i + shape.stages < slices_count) load(i + shape.stages, stage);
    if (++stage == shape.stages) {
      stage = 0;
      parity ^= 1;
    }
    // Where there are slots enough, others may already add to those behind.
    const bool waits = slices.low - done + int32_t(slices.count) > shape.slots;
    write_slices(slices.low);
    if (waits) __syncthreads();
#pragma unroll
    for (int r = 0; r < kRows; ++r) add(place[r], r);
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kLateRows; ++r) add(late[r], r);
  }
  __syncthreads();
  write_slices(s1);
#endif
}

}  // namespace baracuda
