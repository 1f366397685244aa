// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "layout/copy.cuh"
#include "layout/write_slice.h"

namespace baracuda {

// The axes of a StridedCopy, with what a thread needs to find its place along them.
struct CopyAxes {
  // One more than a tensor has: words of an element can be an axis, too.
  static constexpr int kAxes = kMaxRank + 1;

  int rank;
  Divider extent32[kAxes];
  int64_t extent[kAxes];
  int64_t dest_stride[kAxes];
  int64_t source_stride[kAxes];
};

struct RunCopy {
  int64_t dest;
  int64_t source;
  int64_t run;
  int64_t source_low;
  int64_t source_high;
  int64_t chunks;  // threads for each run
  Divider chunks32;
  int64_t total;
  CopyAxes axes;
};

template <bool kWide>
__device__ __forceinline__ void locate(const CopyAxes &axes, int64_t row, int64_t &dest, int64_t &source) {
#pragma unroll 1
  for (int axis = axes.rank - 1; axis >= 0; --axis) {
    const int64_t place = split<kWide>(row, axes.extent[axis], axes.extent32[axis]);
    dest += place * axes.dest_stride[axis];
    source += place * axes.source_stride[axis];
  }
}

// One thread for each sixteen aligned bytes of the destination; lanes without work stay for the
// exchange of loads.
template <bool kPacked, bool kWide>
__global__ void __launch_bounds__(kCopyThreads, kPacked ? 7 : 8) copy_runs(const __grid_constant__ RunCopy copy) {
  constexpr int kCells = kPacked ? 32 : 16;
  let_next_kernel_start();
  int64_t index = int64_t(blockIdx.x) * kCopyThreads + threadIdx.x;
  const bool inside = index < copy.total;
  if (!inside) index = copy.total - 1;
  const int64_t chunk_of_run = split<kWide>(index, copy.chunks, copy.chunks32);
  int64_t dest = copy.dest;
  int64_t source = copy.source;
  locate<kWide>(copy.axes, index, dest, source);

  const int64_t chunk = (dest & ~int64_t(kCells - 1)) + chunk_of_run * kCells;
  const int begin = chunk > dest ? 0 : int(dest - chunk);
  const int64_t rest = dest + copy.run - chunk;
  const int end = rest < kCells ? int(rest) : kCells;
  wait_for_earlier_work();
  copy_chunk<kPacked>(inside && begin < end, chunk, begin, end, source + (chunk - dest), copy.source_low,
                      copy.source_high);
}

struct ElementCopy {
  int64_t dest;
  int64_t source;
  int64_t total;
  CopyAxes axes;
};

// One thread for each element, along the shortest step of the destination.
template <class Word, bool kWide>
__global__ void __launch_bounds__(kCopyThreads) copy_elements(const __grid_constant__ ElementCopy copy) {
  let_next_kernel_start();
  const int64_t index = int64_t(blockIdx.x) * kCopyThreads + threadIdx.x;
  int64_t dest = copy.dest;
  int64_t source = copy.source;
  locate<kWide>(copy.axes, index, dest, source);
  wait_for_earlier_work();
  if (index < copy.total) *reinterpret_cast<Word *>(dest) = *reinterpret_cast<const Word *>(source);
}

// One thread for each half byte whose address has the given parity. Two passes write a destination
// in which neighbouring half bytes belong to different runs: within a pass no byte has two writers.
template <bool kWide>
__global__ void __launch_bounds__(kCopyThreads) copy_nibbles(const __grid_constant__ ElementCopy copy, int parity) {
  let_next_kernel_start();
  const int64_t index = int64_t(blockIdx.x) * kCopyThreads + threadIdx.x;
  int64_t dest = copy.dest;
  int64_t source = copy.source;
  locate<kWide>(copy.axes, index, dest, source);
  wait_for_earlier_work();
  if (index < copy.total && (dest & 1) == parity) copy_nibble(dest, source);
}

// A transposing copy: the destination's shortest step is along `columns`, the source's along
// `rows`, so a square tile goes through shared memory and both sides are coalesced.
struct TileCopy {
  int64_t dest;
  int64_t source;
  int64_t rows;
  int64_t columns;
  int64_t dest_row_stride;
  int64_t source_column_stride;
  int64_t tiles_down;
  int64_t tiles_across;
  int64_t total;  // tiles in all
  CopyAxes axes;  // the others
};

constexpr int kTile = 32;
constexpr int kTileThreadRows = 8;

template <class Word>
__global__ void __launch_bounds__(kTile *kTileThreadRows) copy_tiles(const __grid_constant__ TileCopy copy) {
  __shared__ Word tile[kTile][kTile + 1];
  let_next_kernel_start();
  int64_t index = blockIdx.x;
  const int64_t across = index % copy.tiles_across * kTile;
  index /= copy.tiles_across;
  const int64_t down = index % copy.tiles_down * kTile;
  index /= copy.tiles_down;
  int64_t dest = copy.dest;
  int64_t source = copy.source;
  locate<true>(copy.axes, index, dest, source);
  const int lane = int(threadIdx.x % kTile);
  const int line = int(threadIdx.x / kTile);
  constexpr int64_t kBytes = sizeof(Word);
  wait_for_earlier_work();
#pragma unroll
  for (int i = line; i < kTile; i += kTileThreadRows) {
    const int64_t row = down + lane;
    const int64_t column = across + i;
    if (row < copy.rows && column < copy.columns)
      tile[i][lane] = *reinterpret_cast<const Word *>(source + row * kBytes + column * copy.source_column_stride);
  }
  __syncthreads();
#pragma unroll
  for (int i = line; i < kTile; i += kTileThreadRows) {
    const int64_t row = down + i;
    const int64_t column = across + lane;
    if (row < copy.rows && column < copy.columns)
      *reinterpret_cast<Word *>(dest + row * copy.dest_row_stride + column * kBytes) = tile[lane][i];
  }
}

}  // namespace baracuda
