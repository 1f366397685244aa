// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "layout/copy.cuh"
#include "layout/dynamic_write.h"

namespace baracuda {

// A DynamicCopy as the kernels take it. Indices fit 32 bits: a larger copy is cut into several.
struct DynamicArguments {
  struct Axis {
    Divider count;  // entries of the block that this launch moves, from `first` on
    int64_t first;
    int64_t bound;
    int64_t extent;
    int64_t room;  // the highest start under clamp, in units
    int64_t unit;
    int64_t window_stride;
    int64_t block_stride;
    int column;
    bool flipped;
    bool batch;  // its entries have starts of their own, and stay where they are
  };

  int64_t window;
  int64_t block;
  int64_t low;  // cells of the side that is read
  int64_t high;
  int64_t element;  // cells
  const void *starts;
  int64_t entry_stride;
  int64_t column_stride;
  bool wide_starts;
  bool clamp;
  bool whole_rows;  // chunks are counted from the row's beginning, not from the run's
  int rank;
  uint32_t total;
  Divider chunks;  // threads for each run
  Axis axis[kMaxRank];
};

__device__ __forceinline__ int64_t load_start(const DynamicArguments &copy, int64_t entry, int column) {
  const int64_t place = entry * copy.entry_stride + column * copy.column_stride;
  return copy.wide_starts ? static_cast<const int64_t *>(copy.starts)[place]
                          : static_cast<const int32_t *>(copy.starts)[place];
}

// place_start in steps along an axis as the kernel counts it.
__device__ __forceinline__ int64_t place_on(const DynamicArguments::Axis &axis, int64_t start, bool clamp) {
  int64_t placed;
  if (clamp) {
    placed = (start < 0 ? 0 : start > axis.room ? axis.room : start) * axis.unit;
  } else {
    placed = place_start(start, axis.bound, axis.extent, false);
  }
  return axis.flipped ? axis.bound - axis.extent - placed : placed;
}

// Where a thread works: the cell in the window's tensor and the block's cell that belongs to it, for
// a run with the last axis left at 0.
struct Place {
  int64_t window;
  int64_t block;
  int64_t last_start;  // of the last axis of a run
  bool outside;
};

// `index` counts the block's entries over the first `axes` axes. All that doesn't follow from the
// starts comes first; then this waits for earlier work, whose starts these may be, and all of them are
// loaded before any is used, so that their latencies overlap. With `kAhead` the block's cells from
// `ahead` on set out for the L2 cache at the same time.
template <bool kAhead, bool kPacked>
__device__ __forceinline__ Place find_place(const DynamicArguments &copy, uint32_t index, int axes, int64_t ahead) {
  int64_t in_block[kMaxRank];
  int64_t start[kMaxRank];
  int64_t entry = 0;
  Place place = {copy.window, copy.block, 0, false};
#pragma unroll
  for (int a = kMaxRank - 1; a >= 0; --a) {
    if (a >= axes) continue;
    const DynamicArguments::Axis &axis = copy.axis[a];
    const uint32_t quotient = axis.count.divide(index);
    in_block[a] = axis.first + (index - quotient * axis.count.divisor);
    index = quotient;
    if (axis.batch) entry = axis.flipped ? axis.extent - 1 - in_block[a] : in_block[a];
    place.window += in_block[a] * axis.window_stride;
    place.block += in_block[a] * axis.block_stride;
  }
  wait_for_earlier_work();
#pragma unroll
  for (int a = 0; a < kMaxRank; ++a) start[a] = a < copy.rank ? load_start(copy, entry, copy.axis[a].column) : 0;
  if constexpr (kAhead) {
    const int64_t cell = place.block + ahead;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(kPacked ? cell >> 1 : cell));
  }
#pragma unroll
  for (int a = 0; a < kMaxRank; ++a) {
    if (a >= copy.rank) continue;
    const DynamicArguments::Axis &axis = copy.axis[a];
    if (a >= axes) {
      place.last_start = place_on(axis, start[a], copy.clamp);
    } else if (axis.batch) {
      place.outside = place.outside || (!copy.clamp && start[a] != 0);
    } else {
      const int64_t placed = place_on(axis, start[a], copy.clamp);
      place.outside = place.outside || in_block[a] + placed < 0 || in_block[a] + placed >= axis.bound;
      place.window += placed * axis.window_stride;
    }
  }
  return place;
}

// One thread for each sixteen aligned bytes of the side that is written; lanes without work stay for
// the exchange of loads. The last axis is consecutive on both sides.
template <Motion kMotion, bool kPacked>
__global__ void __launch_bounds__(kCopyThreads) dynamic_runs(const __grid_constant__ DynamicArguments copy) {
  constexpr int kCells = kPacked ? 32 : 16;
  let_next_kernel_start();
  uint32_t index = blockIdx.x * kCopyThreads + threadIdx.x;
  const bool active = index < copy.total;
  if (!active) index = copy.total - 1;
  const uint32_t run = copy.chunks.divide(index);
  const int64_t chunk_of_run = index - run * copy.chunks.divisor;
  const DynamicArguments::Axis &last = copy.axis[copy.rank - 1];
  const int64_t ahead = min(chunk_of_run * kCells, (last.extent - 1) * copy.element);
  const Place place = find_place<kMotion == Motion::write, kPacked>(copy, run, copy.rank - 1, ahead);

  const int64_t row_end = place.window + last.bound * copy.element;
  const int64_t run_begin = place.window + place.last_start * copy.element;  // in the window's tensor
  const int64_t run_end = run_begin + last.extent * copy.element;
  // Of the run, what is inside its row.
  const int64_t seen_begin = run_begin > place.window ? run_begin : place.window;
  const int64_t seen_end = place.outside ? seen_begin : run_end < row_end ? run_end : row_end;
  const auto within = [](int64_t cell, int64_t chunk) {
    return int(cell <= chunk ? 0 : cell - chunk < kCells ? cell - chunk : kCells);
  };
  if constexpr (kMotion == Motion::read) {
    const int64_t chunk = (place.block & ~int64_t(kCells - 1)) + chunk_of_run * kCells;
    const int64_t shift = run_begin - place.block;
    const int begin = within(place.block, chunk);
    const int end = within(place.block + last.extent * copy.element, chunk);
    const int first = max(begin, within(seen_begin - shift, chunk));
    const int beyond = min(end, within(seen_end - shift, chunk));
    const bool reads = active && first < beyond;
    copy_chunk<kPacked>(reads, chunk, first, beyond, chunk + shift, copy.low, copy.high);
    if (!active || begin >= end) return;
    const uint4 zeros = make_uint4(0, 0, 0, 0);
    if (!reads) {
      store_chunk<kPacked>(chunk, begin, end, zeros);
    } else {
      if (begin < first) store_part<kPacked>(chunk, begin, first, zeros);
      if (beyond < end) store_part<kPacked>(chunk, beyond, end, zeros);
    }
  } else {
    const int64_t anchor = copy.whole_rows ? place.window : seen_begin;
    const int64_t chunk = (anchor & ~int64_t(kCells - 1)) + chunk_of_run * kCells;
    const int begin = within(seen_begin, chunk);
    const int end = within(seen_end, chunk);
    const bool writes = active && begin < end;
    if constexpr (kMotion == Motion::write) {
      copy_chunk<kPacked>(writes, chunk, begin, end, place.block + (chunk - run_begin), copy.low, copy.high);
    } else if (writes) {
      store_chunk<kPacked>(chunk, begin, end, make_uint4(0, 0, 0, 0));
    }
  }
}

// One thread for each element, along the shortest step of the side that is written.
template <Motion kMotion, class Word>
__global__ void __launch_bounds__(kCopyThreads) dynamic_elements(const __grid_constant__ DynamicArguments copy) {
  let_next_kernel_start();
  const uint32_t index = blockIdx.x * kCopyThreads + threadIdx.x;
  const Place place = find_place<kMotion == Motion::write, false>(copy, min(index, copy.total - 1), copy.rank, 0);
  if (index >= copy.total || (kMotion != Motion::read && place.outside)) return;
  Word *to = reinterpret_cast<Word *>(kMotion == Motion::read ? place.block : place.window);
  const Word *from = reinterpret_cast<const Word *>(kMotion == Motion::read ? place.window : place.block);
  // An element that is wider than its alignment goes word by word.
  const int words = int(copy.element) / int(sizeof(Word));
  for (int word = 0; word < words; ++word) to[word] = kMotion == Motion::zero || place.outside ? Word{} : from[word];
}

// One thread for each half byte, in two passes by the parity of its address: within a pass no byte
// has two writers.
__global__ void __launch_bounds__(kCopyThreads)
    dynamic_nibbles(const __grid_constant__ DynamicArguments copy, int parity) {
  let_next_kernel_start();
  const uint32_t index = blockIdx.x * kCopyThreads + threadIdx.x;
  const Place place = find_place<true, true>(copy, min(index, copy.total - 1), copy.rank, 0);
  if (index < copy.total && !place.outside && (place.window & 1) == parity) copy_nibble(place.window, place.block);
}

template <class Index>
__global__ void advance_starts(Index *starts, int64_t entries, int64_t stride, int64_t step, int64_t highest) {
  let_next_kernel_start();
  const int64_t entry = int64_t(blockIdx.x) * kCopyThreads + threadIdx.x;
  wait_for_earlier_work();
  if (entry >= entries) return;
  Index &start = starts[entry * stride];
  start = step > highest || int64_t(start) > highest - step ? Index(highest) : Index(start + step);
}

}  // namespace baracuda
