// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "pooling/fractional_max_pool_backward.cuh"

namespace baracuda {

// ---------------------------------------------------------------------------------------------------
// Backward, contiguous slices. A warp owns a run of cells in every slice of a strip: some columns of a row in two
// dimensions, some rows in three. The outputs that could name one of them are a run of each slice of outputs, so
// that neighbouring lanes load neighbouring outputs, whole lines of them, and each output is looked at once.
//
// The sums of a run lie in shared memory, where only its warp touches them, and outputs that name the same cell are
// added in their order. Those that a warp takes at once lie in one row, or so far apart that they can't name the same
// column; and in a row each window begins after the one before, so that of two outputs that name a cell, the earlier
// one has it further behind the first column that it could name. So lanes add in the order of that distance, the
// furthest first, and no two of a distance name the same cell.

constexpr int kLanes = 32;
constexpr int kRunWarps = 4;  // of a block: their planes differ, all else is the same
constexpr int kRunReach = 3;  // columns that an output could name, at most

// Outputs are taken 32 times `vectors` at once. As in pool_tiles they are loaded in place of those that are added, or
// in whole sets ahead.
struct RunTuning {
  int vectors = 0;
  int sets = 0;
  int blocks = 0;  // on a multiprocessor at least; registers follow from it
};
// No vectors where other kernels are to be taken. Measured: in two dimensions, 16-bit outputs want many warps, and
// wider ones more loads of a warp. In three, loads far ahead made it slower, and wider outputs gain nothing.
constexpr RunTuning run_tuning(bool flat, size_t element_size) {
  if (element_size == 2) return flat ? RunTuning{3, 2, 8} : RunTuning{5, 1, 4};
  if (element_size == 4 && flat) return {3, 3, 4};
  return {};
}

// How the work is cut; 0 slots where it can't be.
struct PoolRunsShape {
  int32_t strip = 0;
  int32_t strips = 0;
  int32_t band = 0;  // columns of a run in two dimensions, rows in three
  int32_t bands = 0;
  int32_t groups = 0;  // of `vectors` times 32 outputs, in a slice
  int32_t slots = 0;
  uint32_t slot_bytes = 0;
  // Where the parts of shared memory begin.
  int32_t outputs_at = 0;
  int32_t sums_at = 0;
  size_t shared = 0;
};

struct PoolRunsCall {
  PoolProblem problem;
  PoolView dy;
  PoolView indices;
  PoolView dx;
  bool accumulate;
  bool aligned;  // four cells can be written at once
  PoolRunsShape shape;
  ShortDivider slice;  // cells in a slice of x
  ShortDivider row;    // cells in a row of x
};

// An output of a run: the first cell that it could name in a slice, counted from the one of the run's first output,
// and how many rows and columns from there.
struct alignas(8) PoolRunOutput {
  uint32_t offset;
  uint16_t rows;
  uint16_t columns;
};

// What an element is held in until it is used.
template <class T>
using HeldOf = std::conditional_t<sizeof(T) == 2, uint32_t, BitsOf<T>>;

// A word of shared memory is loaded or stored where wanted. Written out, because the compiler makes branches of it.
__device__ __forceinline__ void load_sum_where(bool wanted, uint32_t address, float &sum) {
  asm volatile(
      "{\n\t.reg .pred wanted;\n\tsetp.ne.u32 wanted, %2, 0;\n\t"
      "@wanted ld.shared.f32 %0, [%1];\n\t}"
      : "+f"(sum)
      : "r"(address), "r"(uint32_t(wanted))
      : "memory");
}
__device__ __forceinline__ void store_sum_where(bool wanted, uint32_t address, float sum) {
  asm volatile(
      "{\n\t.reg .pred wanted;\n\tsetp.ne.u32 wanted, %2, 0;\n\t"
      "@wanted st.shared.f32 [%1], %0;\n\t}"
      :
      : "f"(sum), "r"(address), "r"(uint32_t(wanted))
      : "memory");
}

// Takes four sums, which become zero.
__device__ __forceinline__ void take_sums(uint32_t address, float (&sums)[kTileColumns]) {
  asm volatile(
      "ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n\t"
      "st.shared.v4.f32 [%4], {%5, %5, %5, %5};"
      : "=&f"(sums[0]), "=&f"(sums[1]), "=&f"(sums[2]), "=&f"(sums[3])
      : "r"(address), "f"(0.0f)
      : "memory");
}
__device__ __forceinline__ float take_sum(uint32_t address) {
  float sum;
  asm volatile("ld.shared.f32 %0, [%1];\n\tst.shared.f32 [%1], %2;" : "=&f"(sum) : "r"(address), "f"(0.0f) : "memory");
  return sum;
}

// Writes a warp's cells, which are contiguous, as are their sums.
template <class T>
__device__ __forceinline__ void write_run(T *to, uint32_t sums, uint32_t cells, uint32_t lane, bool aligned,
                                          bool accumulate) {
  // Most calls have no more to do than this, and it is a good part of what a row costs.
  if (aligned && !accumulate) {
#pragma unroll 1
    for (uint32_t cell = lane * kTileColumns; cell < cells; cell += kLanes * kTileColumns) {
      float four[kTileColumns];
      take_sums(sums + cell * uint32_t(sizeof(float)), four);
      write_cells(to + cell, four, kTileColumns, 1, true, false);
    }
    return;
  }
#pragma unroll 1
  for (uint32_t cell = lane; cell < cells; cell += kLanes) {
    const float sum = take_sum(sums + cell * uint32_t(sizeof(float)));
    to[cell] = T(accumulate ? float(to[cell]) + sum : sum);
  }
}

template <class T, class Index, bool kFlat, int kVectors, int kSets, int kBlocks>
__global__ void __launch_bounds__(kRunWarps *kLanes, kBlocks) pool_runs(const __grid_constant__ PoolRunsCall call) {
  using Real = typename PoolReal<T>::type;
  extern __shared__ __align__(16) char shared[];
  constexpr int kThreads = kRunWarps * kLanes;
  constexpr bool kInPlace = kSets == 1;
  constexpr uint32_t kNone = ~0u;
  const PoolRunsShape &shape = call.shape;
  const PoolAxis &slow = call.problem.axis[kSlow];
  const PoolAxis &middle = call.problem.axis[kMiddle];
  const PoolAxis &fast = call.problem.axis[kFast];
  uint32_t lane = threadIdx.x % kLanes;
  const uint32_t warp = threadIdx.x / kLanes;
  const uint32_t ring_bytes = uint32_t(shape.slots) * shape.slot_bytes;
  PoolSpan *const slow_span = reinterpret_cast<PoolSpan *>(shared);
  PoolRunOutput *const outputs = reinterpret_cast<PoolRunOutput *>(shared + shape.outputs_at);
  char *const sums = shared + shape.sums_at + warp * ring_bytes;

  uint32_t rest = blockIdx.x;
  const auto next = [&](int32_t count) {
    const uint32_t at = rest % uint32_t(count);
    rest /= uint32_t(count);
    return int32_t(at);
  };
  const PoolAxis &banded = kFlat ? fast : middle;
  const int32_t s0 = next(shape.strips) * shape.strip;
  const int32_t s1 = min(s0 + shape.strip, slow.in);
  const int32_t b0 = next(shape.bands) * shape.band;
  const int32_t b1 = min(b0 + shape.band, banded.in);
  const int64_t plane = int64_t(rest) * kRunWarps + warp;
  const PoolRange over_slow = {windows_over(slow, s0).begin, windows_over(slow, s1 - 1).end};
  const PoolRange over_band = {windows_over(banded, b0).begin, windows_over(banded, b1 - 1).end};
  const int32_t slices_count = max(over_slow.end - over_slow.begin, 0);
  // The run in a slice of x, and the outputs that could name one of its cells in a slice of y.
  const int32_t band_cells = kFlat ? 1 : fast.in;
  const int32_t band_outputs = kFlat ? 1 : fast.out;
  const uint32_t cells = uint32_t(b1 - b0) * uint32_t(band_cells);
  const int32_t count = max(over_band.end - over_band.begin, 0) * band_outputs;
  const int32_t first_named = banded.earliest(over_band.begin) * band_cells;
  for (int32_t t = threadIdx.x; t < slices_count; t += kThreads)
    slow_span[t] = window_span(slow, over_slow.begin + t, s0, s1);
  const int32_t table = shape.groups * (kVectors * kLanes);
  if constexpr (kFlat) {
    for (int32_t t = threadIdx.x; t < table; t += kThreads) {
      PoolSpan columns = {first_named, 0};
      if (t < count) columns = window_span(fast, over_band.begin + t, 0, fast.in);
      outputs[t] = {uint32_t(columns.low - first_named), 1, uint16_t(columns.count)};
    }
  } else {
    // First the spans of rows and of columns, where sums will lie: they take many instructions.
    PoolSpan *const columns = reinterpret_cast<PoolSpan *>(shared + shape.sums_at);
    PoolSpan *const rows = columns + fast.out;
    for (int32_t t = threadIdx.x; t < fast.out; t += kThreads) columns[t] = window_span(fast, t, 0, fast.in);
    for (int32_t t = threadIdx.x; t < over_band.end - over_band.begin; t += kThreads)
      rows[t] = window_span(middle, over_band.begin + t, 0, middle.in);
    __syncthreads();
    for (int32_t t = threadIdx.x; t < table; t += kThreads) {
      PoolRunOutput output = {0, 0, 0};
      if (t < count) {
        const int32_t r = int32_t(uint32_t(t) / uint32_t(fast.out));
        const PoolSpan row = rows[r];
        const PoolSpan column = columns[t - r * fast.out];
        output = {uint32_t(row.low * fast.in + column.low - first_named), uint16_t(row.count), uint16_t(column.count)};
      }
      outputs[t] = output;
    }
  }
  __syncthreads();
  for (uint32_t t = lane * 16; t < ring_bytes; t += kLanes * 16)
    *reinterpret_cast<uint4 *>(sums + t) = uint4{0, 0, 0, 0};
  __syncwarp();
  if (plane >= call.problem.planes()) return;

  const int64_t n = plane / call.problem.channels;
  const int64_t c = plane - n * call.problem.channels;
  const int64_t first_output = int64_t(over_band.begin) * band_outputs + lane;
  // The lane's first outputs of the slice that is loaded next, and the run's first cell of slice `done`.
  const Index *names = static_cast<const Index *>(call.indices.data) + call.indices.plane(n, c) +
                       call.indices.cell(over_slow.begin, 0, 0) + first_output;
  const T *gives =
      static_cast<const T *>(call.dy.data) + call.dy.plane(n, c) + call.dy.cell(over_slow.begin, 0, 0) + first_output;
  T *to = static_cast<T *>(call.dx.data) + call.dx.plane(n, c) + call.dx.cell(s0, 0, 0) + int64_t(b0) * band_cells;
  const int64_t origin = call.problem.index_origin(plane) + first_named;
  const uint32_t before = uint32_t(b0) * uint32_t(band_cells) - uint32_t(first_named);
  uint32_t sums_at = uint32_t(__cvta_generic_to_shared(sums));
  asm volatile("" : "+r"(sums_at), "+r"(lane));  // kept, not worked out again and again

  int32_t done = s0;  // slices below are written
  uint32_t head = 0;  // where the sums of slice `done` lie
  const auto write_slices = [&](int32_t until) {
#pragma unroll 1
    for (; done < until; ++done) {
      write_run(to, sums_at + head, cells, lane, call.aligned, call.accumulate);
      head += shape.slot_bytes;
      if (head == ring_bytes) head = 0;
      to += call.dx.axis[kSlow];
    }
    __syncwarp();
  };

  struct Set {
    BitsOf<Index> name[kVectors];
    HeldOf<T> gradient[kVectors];
  };
  Set sets[kSets] = {};
  // The outputs that are loaded next: `count` from the lane's first one on.
  struct Group {
    const Index *names;
    const T *gives;
    int32_t count;
  };
  int32_t ahead_slices = slices_count;
  int32_t ahead_group = 0;
  const auto next_group = [&]() {
    const int32_t skipped = kFlat ? 0 : ahead_group * (kVectors * kLanes);
    const Group group = {names + skipped, gives + skipped, ahead_slices > 0 ? count - int32_t(lane) - skipped : 0};
    if (kFlat || ++ahead_group == shape.groups) {
      ahead_group = 0;
      --ahead_slices;
      names += call.indices.axis[kSlow];
      gives += call.dy.axis[kSlow];
    }
    return group;
  };
  // Lanes without an output keep what they had before; there is no cell that they could name.
  const auto load_one = [&](Set &set, const Group &group, int e) {
    const bool wanted = e * kLanes < group.count;
    load_where(wanted, reinterpret_cast<const BitsOf<Index> *>(group.names + e * kLanes), set.name[e]);
    load_where(wanted, reinterpret_cast<const BitsOf<T> *>(group.gives + e * kLanes), set.gradient[e]);
  };
  const auto load = [&](Set &set) {
    const Group group = next_group();
#pragma unroll
    for (int e = 0; e < kVectors; ++e) load_one(set, group, e);
  };
  PoolRunOutput flat_outputs[kVectors];
#pragma unroll
  for (int e = 0; kFlat && e < kVectors; ++e) flat_outputs[e] = outputs[e * kLanes + lane];

  const ShortDivider &outer = kFlat ? call.row : call.slice;
  const PoolSpan *slices_at = slow_span;
  PoolSpan slices = {0, 0};
  int64_t slice_base = 0;
  int32_t at_group = 0;
  const auto add = [&](Set &set) {
    if (kFlat || at_group == 0) {
      slices = *slices_at++;
      slice_base = origin + uint32_t(slices.low) * outer.divisor;
      write_slices(slices.low);
    }
    uint32_t place[kVectors];
    uint32_t distance[kVectors];
    Real value[kVectors];
    Group group = {};
    if constexpr (kInPlace) group = next_group();
#pragma unroll
    for (int e = 0; e < kVectors; ++e) {
      const PoolRunOutput output = kFlat ? flat_outputs[e] : outputs[(at_group * kVectors + e) * kLanes + lane];
      // Where an index names a cell before the output's first one in any axis, a quotient or the column is out of
      // bounds.
      const BitsOf<Index> relative = set.name[e] - BitsOf<Index>(slice_base);
      uint32_t left = uint32_t(relative) - output.offset;
      const uint32_t s = outer.divide(left);
      left = outer.rest(left, s);
      // Without branches, which cost more than the comparisons.
      bool mine = s < slices.count;
      if (sizeof(Index) > 4) mine = mine & (uint32_t(relative >> 16 >> 16) == 0);
      uint32_t column = left;
      if constexpr (!kFlat) {
        const uint32_t m = call.row.divide(left);
        column = call.row.rest(left, m);
        mine = mine & (m < output.rows);
      }
      const uint32_t cell = left + output.offset - before;
      mine = mine & (column < output.columns) & (cell < cells);
      const uint32_t at = head + s * shape.slot_bytes + cell * uint32_t(sizeof(Real));
      place[e] = sums_at + min(at, at - ring_bytes);
      distance[e] = mine ? column : kNone;
      value[e] = real_of<T>(BitsOf<T>(set.gradient[e]));
      if constexpr (kInPlace) load_one(set, group, e);
    }
    // In two dimensions all outputs of a group lie in one row.
    constexpr int kTogether = kFlat ? kVectors : 1;
    Real sum[kTogether] = {};
#pragma unroll
    for (int first = 0; first < kVectors; first += kTogether) {
#pragma unroll
      for (int d = kRunReach - 1; d >= 0; --d) {
#pragma unroll
        for (int e = 0; e < kTogether; ++e)
          load_sum_where(distance[first + e] == uint32_t(d), place[first + e], sum[e]);
#pragma unroll
        for (int e = 0; e < kTogether; ++e) {
          sum[e] += value[first + e];
          store_sum_where(distance[first + e] == uint32_t(d), place[first + e], sum[e]);
        }
        __syncwarp();
      }
    }
    if (!kFlat && ++at_group == shape.groups) at_group = 0;
  };

  constexpr int kAhead = kInPlace ? kSets : kSets - 1;
#pragma unroll
  for (int u = 0; u < kAhead; ++u) load(sets[u]);
  const int32_t steps = slices_count * shape.groups;
#pragma unroll 1
  for (int32_t step = 0; step < steps; step += kSets) {
#pragma unroll
    for (int u = 0; u < kSets; ++u) {
      if constexpr (!kInPlace) load(sets[(u + kAhead) % kSets]);
      if (u == 0 || step + u < steps) add(sets[u]);
    }
  }
  write_slices(s1);
}

}  // namespace baracuda
