// SPDX-License-Identifier: Apache-2.0
// Reductions without sorting, where what is kept of all segments fits into shared memory: each thread, or each
// warp, has a cell for each segment that nobody else touches, and cells are joined in a fixed order.
#pragma once

#include "segment/segment.cuh"

namespace baracuda {

inline void segment_allow_shared(const void *kernel, size_t bytes) {
  if (bytes > 48 * 1024)
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)),
               "cudaFuncSetAttribute");
}

// ---------------------------------------------------------------------------------------------------
// Few segments: a thread has cells for all of them, in its columns.

constexpr int kFewThreads = 256;

template <class Op>
struct SegmentFewCall {
  Op op;
  SegmentView input;
  SegmentIndices ids;
  int64_t rows;
  int64_t columns;
  int segments;
  int across;
  int tiles;
  int parts;
  bool paired;  // two elements can be loaded at once
  typename Op::State *partial;
  uint32_t *counts;  // NULL: states tell whether there was a row
};

template <class Op, int kColumns>
__global__ __launch_bounds__(kFewThreads) void segment_few(const __grid_constant__ SegmentFewCall<Op> call) {
  using Element = typename Op::Element;
  using State = typename Op::State;
  using Pack = SegmentPack<Element, kColumns>;
  using Word = SegmentPack<typename SegmentBitsOf<sizeof(Pack)>::type, 1>;
  constexpr int kRows = 16;
  extern __shared__ __align__(16) uint64_t segment_memory[];
  State *cells = reinterpret_cast<State *>(segment_memory);
  uint32_t *counts = reinterpret_cast<uint32_t *>(cells + call.segments * kFewThreads * kColumns);
  using Cells = SegmentPack<State, kColumns>;
  Cells *own = reinterpret_cast<Cells *>(segment_memory) + threadIdx.x;
  constexpr int kStep = kFewThreads * kColumns;
  for (int s = 0; s < call.segments; ++s) {
#pragma unroll
    for (int v = 0; v < kColumns; ++v) own[s * kFewThreads].value[v] = call.op.identity();
  }
  if (call.counts) {
    for (int s = threadIdx.x; s < call.segments; s += kFewThreads) counts[s] = 0;
    __syncthreads();
  }
  const int part = int(blockIdx.x) / call.tiles;
  const int tile = int(blockIdx.x) - part * call.tiles;
  const int groups = kFewThreads / call.across;
  const int group = int(threadIdx.x) / call.across;
  const int lane = int(threadIdx.x) & (call.across - 1);
  const int64_t column = int64_t(tile) * call.across * kColumns + lane * kColumns;
  const Element *input = static_cast<const Element *>(call.input.data) + column * call.input.column;
  // The last of an odd number of columns stands alone.
  const int mine = int(max(int64_t(0), min(call.columns - column, int64_t(kColumns))));
  const bool whole = kColumns == 1 || (call.paired && mine == kColumns);
  const int64_t step = int64_t(call.parts) * groups * kRows;
  for (int64_t first = (int64_t(part) * groups + group) * kRows; first < call.rows; first += step) {
    int64_t segment[kRows];
    Pack pack[kRows];
    segment_load_ids(call.ids, first, 1, call.rows, segment);
    if (whole) {
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        pack[r] =
            bit_cast<Pack>(*reinterpret_cast<const Word *>(input + min(first + r, call.rows - 1) * call.input.row));
    } else {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int v = 0; v < kColumns; ++v)
          if (v < mine)
            pack[r].value[v] = input[min(first + r, call.rows - 1) * call.input.row + v * call.input.column];
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (uint64_t(segment[r]) >= uint64_t(call.segments)) continue;
      Cells &at = own[int(segment[r]) * kFewThreads];
      Cells cell = at;
#pragma unroll
      for (int v = 0; v < kColumns; ++v)
        if (v < mine) call.op.add(cell.value[v], pack[r].value[v], typename Op::Row(first + r));
      at = cell;
      if (call.counts && column == 0) atomicAdd(counts + segment[r], 1u);
    }
  }
  __syncthreads();
  const int width = call.across * kColumns;
  for (int i = threadIdx.x; i < call.segments * width; i += kFewThreads) {
    const int s = i / width;
    const int c = i - s * width;
    const int64_t to = int64_t(tile) * width + c;
    if (to >= call.columns) continue;
    State state = call.op.identity();
    // Neighbouring segments begin at different groups, which are in different banks.
    for (int g = 0; g < groups; ++g) call.op.join(state, cells[s * kStep + ((g + s) & (groups - 1)) * width + c]);
    call.partial[(int64_t(part) * call.segments + s) * call.columns + to] = state;
  }
  if (call.counts && tile == 0)
    for (int s = threadIdx.x; s < call.segments; s += kFewThreads)
      call.counts[int64_t(part) * call.segments + s] = counts[s];
}

constexpr int kFewAtOnce = 32;

template <class Op>
__global__ __launch_bounds__(kFewThreads) void segment_few_join(const __grid_constant__ SegmentFewCall<Op> call) {
  using State = typename Op::State;
  constexpr int kSlices = kFewThreads / kFewAtOnce;
  constexpr int kParts = 4;
  __shared__ State states[kSlices][kFewAtOnce];
  __shared__ uint32_t lengths[kSlices][kFewAtOnce];
  const int lane = int(threadIdx.x) % kFewAtOnce;
  const int slice = int(threadIdx.x) / kFewAtOnce;
  const int64_t size = call.segments * call.columns;
  const int64_t at = int64_t(blockIdx.x) * kFewAtOnce + lane;
  const int64_t segment = at / call.columns;
  State state = call.op.identity();
  uint32_t length = 0;
  if (at < size) {
    for (int part = slice; part < call.parts; part += kParts * kSlices) {
      State some[kParts];
#pragma unroll
      for (int p = 0; p < kParts; ++p)
        if (part + p * kSlices < call.parts) some[p] = call.partial[(part + p * kSlices) * size + at];
#pragma unroll
      for (int p = 0; p < kParts; ++p)
        if (part + p * kSlices < call.parts) call.op.join(state, some[p]);
    }
    if (call.counts)
      for (int part = slice; part < call.parts; part += kSlices)
        length += call.counts[int64_t(part) * call.segments + segment];
  }
  states[slice][lane] = state;
  lengths[slice][lane] = length;
  __syncthreads();
  if (slice > 0 || at >= size) return;
  for (int s = 1; s < kSlices; ++s) {
    call.op.join(state, states[s][lane]);
    length += lengths[s][lane];
  }
  const State total[1] = {state};
  call.op.template store<1>(segment, at - segment * call.columns, call.counts ? length : call.op.seen(state), total);
}

// ---------------------------------------------------------------------------------------------------
// One column: rows are put into buckets of neighbouring segments, tile by tile, in the order of rows. A block takes a
// bucket, or a piece of a full one, and a warp of it some of the tiles.

constexpr int kBuckets = 256;
constexpr int kBucketTileBits = 13;
constexpr int kBucketTile = 1 << kBucketTileBits;
constexpr int kMostBucketWarps = 16;

// Pieces of a bucket that has this many rows.
__device__ __forceinline__ int64_t bucket_pieces(const SegmentBuckets &buckets, int bucket) {
  return max(int64_t(1), (int64_t(buckets.totals[bucket]) + buckets.piece - 1) / buckets.piece);
}

// Which of all pieces each bucket has: they begin at begins[bucket]. For the first warp of a block.
__device__ __forceinline__ void count_bucket_pieces(const SegmentBuckets &buckets, int32_t (&begins)[kBuckets + 1]) {
  constexpr int kEach = kBuckets / 32;
  const int lane = int(threadIdx.x) & 31;
  int pieces[kEach];
  int sum = 0;
#pragma unroll
  for (int b = 0; b < kEach; ++b) {
    pieces[b] = int(bucket_pieces(buckets, lane * kEach + b));
    sum += pieces[b];
  }
  int before = sum;
  for (int apart = 1; apart < 32; apart *= 2) {
    const int other = __shfl_up_sync(~0u, before, apart);
    if (lane >= apart) before += other;
  }
  before -= sum;
#pragma unroll
  for (int b = 0; b < kEach; ++b) {
    begins[lane * kEach + b] = before;
    before += pieces[b];
  }
  if (lane == 31) begins[kBuckets] = before;
}

template <class Op>
struct SegmentBucketCall {
  Op op;
  SegmentBuckets buckets;
  int64_t segments;
  int warps;
  typename Op::State *partial;
  uint32_t *counts;  // NULL: states tell whether there was a row
};

template <class Op>
__global__ __launch_bounds__(32 * kMostBucketWarps,
                             1) void segment_bucket(const __grid_constant__ SegmentBucketCall<Op> call) {
  using Element = typename Op::Element;
  using State = typename Op::State;
  using Place = typename Op::Place;
  const SegmentBuckets &buckets = call.buckets;
  extern __shared__ __align__(16) uint64_t segment_memory[];
  State *cells = reinterpret_cast<State *>(segment_memory);
  uint32_t *counts = reinterpret_cast<uint32_t *>(cells + call.warps * buckets.cells);
  __shared__ int32_t begins[kBuckets + 1];
  const int threads = 32 * call.warps;
  const int warp = int(threadIdx.x) / 32;
  const int lane = int(threadIdx.x) & 31;
  for (int c = threadIdx.x; c < call.warps * buckets.cells; c += threads) cells[c] = call.op.identity();
  if (call.counts)
    for (int c = threadIdx.x; c < buckets.cells; c += threads) counts[c] = 0;
  if (warp == 0) count_bucket_pieces(buckets, begins);
  __syncthreads();
  const int unit = int(blockIdx.x);
  if (unit >= begins[kBuckets]) return;
  int bucket = 0;
  for (int half = kBuckets / 2; half > 0; half /= 2)
    if (begins[bucket + half] <= unit) bucket += half;
  const int64_t pieces = begins[bucket + 1] - begins[bucket];

  State *own = cells + warp * buckets.cells;
  const Element *elements = static_cast<const Element *>(buckets.elements);
  const Place *places = static_cast<const Place *>(buckets.places);
  const uint16_t *bounds = buckets.bounds + bucket * buckets.tiles;
  const int64_t step = pieces * call.warps;
  const int64_t first = (unit - begins[bucket]) * int64_t(call.warps) + warp;
  const auto take = [&](bool valid, Element element, Place place, uint32_t tile) {
    const uint32_t cell = valid ? (Op::kRows ? place >> kBucketTileBits : place) : ~uint32_t(lane);
    const unsigned same = __match_any_sync(~0u, cell);
    const int rank = __popc(same & ((1u << lane) - 1));
    const int rounds = __reduce_max_sync(~0u, rank);
    for (int round = 0; round <= rounds; ++round) {
      if (valid && rank == round) {
        State state = own[cell];
        call.op.add(state, element, typename Op::Row(tile * kBucketTile + (place & (kBucketTile - 1))));
        own[cell] = state;
      }
      __syncwarp();
    }
    if (call.counts && valid) atomicAdd(counts + cell, 1u);
  };

  // The rows of 32 tiles follow one another; each lane has the bounds of a tile.
  constexpr int kAtOnce = 4;
  struct Loaded {
    Element element[kAtOnce];
    Place place[kAtOnce];
    uint32_t tile[kAtOnce];
  };
  const int64_t count = first < buckets.tiles ? (buckets.tiles - first + step - 1) / step : 0;
  const auto find_bounds = [&](int64_t at, int &begin, int &end) {
    begin = end = 0;
    if (at + lane >= count) return;
    begin = bounds[first + (at + lane) * step];
    end = bounds[buckets.tiles + first + (at + lane) * step];
  };
  int next_begin;
  int next_end;
  find_bounds(0, next_begin, next_end);
  for (int64_t at = 0; at < count; at += 32) {
    const int length = next_end - next_begin;
    int behind = length;
    for (int apart = 1; apart < 32; apart *= 2) {
      const int other = __shfl_up_sync(~0u, behind, apart);
      if (lane >= apart) behind += other;
    }
    const int total = __shfl_sync(~0u, behind, 31);
    const int before = behind - length;
    const int shift = next_begin - before;
    find_bounds(at + 32, next_begin, next_end);
    const int64_t first_tile = first + at * step;
    const auto load = [&](int from, Loaded &loaded) {
#pragma unroll
      for (int a = 0; a < kAtOnce; ++a) {
        const int index = from + a * 32 + lane;
        int tile = 0;
#pragma unroll
        for (int half = 16; half > 0; half /= 2)
          if (__shfl_sync(~0u, before, tile + half) <= index) tile += half;
        const int64_t row = (first_tile + tile * step) * kBucketTile + __shfl_sync(~0u, shift, tile) + index;
        loaded.tile[a] = uint32_t(first_tile + tile * step);
        if (index >= total) continue;
        loaded.element[a] = elements[row];
        loaded.place[a] = places[row];
      }
    };
    Loaded now;
    load(0, now);
    for (int from = 0; from < total; from += 32 * kAtOnce) {
      Loaded next;
      load(from + 32 * kAtOnce, next);
#pragma unroll
      for (int a = 0; a < kAtOnce; ++a)
        if (from + a * 32 < total) take(from + a * 32 + lane < total, now.element[a], now.place[a], now.tile[a]);
      now = next;
    }
  }
  __syncthreads();
  for (int c = threadIdx.x; c < buckets.cells; c += threads) {
    State state = cells[c];
    for (int w = 1; w < call.warps; ++w) call.op.join(state, cells[w * buckets.cells + c]);
    call.partial[int64_t(unit) * buckets.cells + c] = state;
    if (call.counts) call.counts[int64_t(unit) * buckets.cells + c] = counts[c];
  }
}

template <class Op>
__global__ __launch_bounds__(kSegmentThreads) void segment_bucket_join(
    const __grid_constant__ SegmentBucketCall<Op> call) {
  __shared__ int32_t begins[kBuckets + 1];
  if (threadIdx.x < 32) count_bucket_pieces(call.buckets, begins);
  __syncthreads();
  const int64_t segment = int64_t(blockIdx.x) * kSegmentThreads + threadIdx.x;
  if (segment >= call.segments) return;
  const int bucket = int(call.buckets.by_cells.divide(uint32_t(segment)));
  const int64_t cell = segment - int64_t(bucket) * call.buckets.cells;
  typename Op::State state[1] = {call.op.identity()};
  int64_t length = 0;
  for (int64_t unit = begins[bucket]; unit < begins[bucket + 1]; ++unit) {
    call.op.join(state[0], call.partial[unit * call.buckets.cells + cell]);
    if (call.counts) length += call.counts[unit * call.buckets.cells + cell];
  }
  call.op.template store<1>(segment, 0, call.counts ? length : call.op.seen(state[0]), state);
}

// ---------------------------------------------------------------------------------------------------

// As segment_reduce, where the space has cells.
template <class Op>
void segment_reduce_cells(const SegmentProblem &problem, const SegmentView &input, const SegmentIndices &ids,
                          const Op &op, bool counts, const SegmentSpace &space, Stream stream) {
  using State = typename Op::State;
  if (space.cells == SegmentCells::few) {
    SegmentFewCall<Op> call = {};
    call.op = op;
    call.input = input;
    call.ids = ids;
    call.rows = problem.rows;
    call.columns = problem.columns;
    call.segments = int(problem.segments);
    call.across = space.few.across;
    call.tiles = space.few.tiles;
    call.parts = space.few.parts;
    call.paired = segment_aligned(input, 2, sizeof(typename Op::Element));
    call.partial = reinterpret_cast<State *>(space.partial);
    call.counts = counts ? space.counts : nullptr;
    const auto run = [&](auto kernel) {
      const size_t shared = segment_few_bytes(problem, sizeof(State), space.few.vector);
      segment_allow_shared(reinterpret_cast<const void *>(kernel), shared);
      launch(kernel, {int64_t(call.parts) * call.tiles, kFewThreads, shared}, stream, call);
    };
    if (space.few.vector == 2) {
      run(segment_few<Op, 2>);
    } else {
      run(segment_few<Op, 1>);
    }
    launch(segment_few_join<Op>, {ceil_div(problem.segments * problem.columns, kFewAtOnce), kFewThreads}, stream, call);
    return;
  }
  segment_fill_buckets(problem, input, ids, Op::kRows, space, stream);
  SegmentBucketCall<Op> call = {};
  call.op = op;
  call.buckets = space.buckets;
  call.segments = problem.segments;
  call.warps = segment_bucket_warps(space.buckets.cells, sizeof(State));
  call.partial = reinterpret_cast<State *>(space.partial);
  call.counts = counts ? space.counts : nullptr;
  const size_t shared =
      size_t(space.buckets.cells) * (size_t(call.warps) * sizeof(State) + (counts ? sizeof(uint32_t) : 0));
  segment_allow_shared(reinterpret_cast<const void *>(segment_bucket<Op>), shared);
  launch(segment_bucket<Op>, {space.buckets.units, 32 * call.warps, shared}, stream, call);
  launch(segment_bucket_join<Op>, {ceil_div(problem.segments, kSegmentThreads), kSegmentThreads}, stream, call);
}

}  // namespace baracuda
