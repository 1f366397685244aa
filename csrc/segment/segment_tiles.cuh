// SPDX-License-Identifier: Apache-2.0
// Maxima of wide rows and few segments: a block brings the rows of a tile together by a count of their ids, reads them
// segment by segment, and keeps a cell for every segment and column in shared memory. Rows of a tile come in any order,
// which makes no difference to maxima.
#pragma once

#include "segment/segment_columns.cuh"

namespace baracuda {

constexpr int kTiledThreads = 512;
constexpr int kTiledWarps = kTiledThreads / 32;
constexpr int kTiledRowBits = 11;
constexpr int kTiledRows = 1 << kTiledRowBits;
constexpr int kTiledEach = kTiledRows / kTiledThreads;
constexpr int kTiledMostSegments = kTiledThreads;

inline size_t segment_tiled_bytes(const SegmentProblem &problem, size_t state) {
  return size_t(problem.segments * problem.columns) * state + (kTiledRows + kTiledMostSegments) * sizeof(uint32_t);
}

// What those have in common that keep a cell of every segment in each of several parts of the rows.
template <class Op>
struct SegmentPartsCall {
  Op op;
  SegmentView input;
  SegmentIndices ids;
  int64_t rows;
  int64_t columns;
  int segments;
  int across;
  int parts;
  typename Op::State *partial;
  uint32_t *counts;  // NULL: states tell whether there was a row
};

template <class Op>
struct SegmentTiledCall : SegmentPartsCall<Op> {
  int64_t part;  // rows of a block
  int tile;
  bool whole;  // a lane's elements can be loaded at once
};

template <class Op, int kVector>
__global__ __launch_bounds__(kTiledThreads, 2) void segment_tiled(const __grid_constant__ SegmentTiledCall<Op> call) {
  using Element = typename Op::Element;
  using State = typename Op::State;
  using Pack = SegmentPack<Element, kVector>;
  using Word = SegmentPack<uint64_t, 2>;
  // A key, and below it a row, the lowest of which is highest. No float has the key 0.
  using Cell = std::conditional_t<Op::kRows, unsigned long long, uint32_t>;
  constexpr int kAtOnce = 4;
  constexpr uint32_t kNowhere = ~uint32_t(0);
  static_assert(sizeof(Pack) == sizeof(Word));
  extern __shared__ __align__(16) uint64_t segment_memory[];
  __shared__ uint32_t sums[kTiledWarps];
  const int size = call.segments * int(call.columns);
  Cell *cells = reinterpret_cast<Cell *>(segment_memory);
  uint32_t *places = reinterpret_cast<uint32_t *>(cells + size);
  uint32_t *begins = places + kTiledRows;
  for (int c = threadIdx.x; c < size; c += kTiledThreads) cells[c] = 0;
  const int warp = int(threadIdx.x) / 32;
  const int group = int(threadIdx.x) / call.across;
  const int groups = kTiledThreads / call.across;
  const int column = (int(threadIdx.x) & (call.across - 1)) * kVector;
  const bool taken = column < call.columns;
  const Element *input = static_cast<const Element *>(call.input.data) + column * call.input.column;
  const int64_t end = min((blockIdx.x + 1) * call.part, call.rows);

  const auto flush = [&](uint32_t segment, const State(&state)[kVector]) {
    if (segment == kNowhere) return;
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      Cell cell;
      if constexpr (Op::kRows) {
        cell = Cell(state[v].key) << 32 | uint32_t(~state[v].row);
      } else {
        cell = state[v];
      }
      Cell *at = cells + segment * uint32_t(call.columns) + column + v;
      if (cell > *at) atomicMax(at, cell);
    }
  };

  for (int64_t first = blockIdx.x * call.part; first < end; first += call.tile) {
    const int count = int(min(int64_t(call.tile), end - first));
    uint32_t id[kTiledEach];
    uint32_t rank[kTiledEach];
#pragma unroll
    for (int k = 0; k < kTiledEach; ++k) {
      const int row = k * kTiledThreads + int(threadIdx.x);
      const int64_t given = row < count ? call.ids[first + row] : -1;
      id[k] = uint64_t(given) < uint64_t(call.segments) ? uint32_t(given) : kNowhere;
    }
    begins[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kTiledEach; ++k)
      if (id[k] != kNowhere) rank[k] = atomicAdd(begins + id[k], 1u);
    __syncthreads();
    const uint32_t own = begins[threadIdx.x];
    uint32_t behind = own;
    for (int apart = 1; apart < 32; apart *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, behind, apart);
      if ((int(threadIdx.x) & 31) >= apart) behind += other;
    }
    if ((threadIdx.x & 31) == 31) sums[warp] = behind;
    __syncthreads();
    uint32_t before = 0;
    uint32_t total = 0;
#pragma unroll
    for (int w = 0; w < kTiledWarps; ++w) {
      const uint32_t sum = sums[w];
      if (w < warp) before += sum;
      total += sum;
    }
    begins[threadIdx.x] = before + behind - own;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kTiledEach; ++k)
      if (id[k] != kNowhere)
        places[begins[id[k]] + rank[k]] = id[k] << kTiledRowBits | uint32_t(k * kTiledThreads + int(threadIdx.x));
    __syncthreads();

    const int share = (int(total) + groups - 1) / groups;
    const int to = taken ? min((group + 1) * share, int(total)) : 0;
    uint32_t segment = kNowhere;
    State state[kVector];
    for (int at = group * share; at < to; at += kAtOnce) {
      uint32_t place[kAtOnce];
      Word word[kAtOnce];
#pragma unroll
      for (int a = 0; a < kAtOnce; ++a) {
        place[a] = places[min(at + a, to - 1)];
        const Element *from = input + (first + (place[a] & (kTiledRows - 1))) * call.input.row;
        if (call.whole) {
          word[a] = *reinterpret_cast<const Word *>(from);
        } else {
          Pack pack;
#pragma unroll
          for (int v = 0; v < kVector; ++v) pack.value[v] = from[v * call.input.column];
          word[a] = bit_cast<Word>(pack);
        }
      }
#pragma unroll
      for (int a = 0; a < kAtOnce; ++a) {
        // Behind the last row it comes again, which makes no difference.
        const uint32_t next = place[a] >> kTiledRowBits;
        if (next != segment) {
          flush(segment, state);
          segment = next;
#pragma unroll
          for (int v = 0; v < kVector; ++v) state[v] = call.op.identity();
        }
        const Pack pack = bit_cast<Pack>(word[a]);
        const auto row = typename Op::Row(first + (place[a] & (kTiledRows - 1)));
#pragma unroll
        for (int v = 0; v < kVector; ++v) call.op.add(state[v], pack.value[v], row);
      }
    }
    flush(segment, state);
    __syncthreads();
  }
  State *partial = call.partial + int64_t(blockIdx.x) * size;
  for (int c = threadIdx.x; c < size; c += kTiledThreads) {
    const Cell cell = cells[c];
    if constexpr (Op::kRows) {
      partial[c] = {uint32_t(cell >> 32), ~uint32_t(cell)};
    } else {
      partial[c] = cell;
    }
  }
}

}  // namespace baracuda
