// SPDX-License-Identifier: Apache-2.0
// Rows by their segments, and those of one segment as they come: a radix sort, from the lowest digit up. A digit has as
// many bits as one block can count, so that ids take fewer passes than bytes would, and each pass is a count of every
// tile's digits, a scan of the counts and a move.
#include "segment/segment.cuh"

namespace baracuda {
namespace {

constexpr int kMostDigitBits = 9;
constexpr int kScanThreads = 128;
constexpr int kScanEach = 4;

// What a pass reads: ids and what they bring along, or what the pass before wrote.
struct SortSource {
  const uint32_t *keys;  // NULL: ids
  const uint32_t *values;
  SegmentIndices ids;
  int64_t segments;
  SegmentView payload;  // without data: the row
  int payload_bytes;

  // Of rows that are `step` apart, as many as there are. All are asked for before any is looked at.
  template <int kEach>
  __device__ __forceinline__ void load_keys(int64_t first, int64_t step, int64_t rows, uint32_t (&key)[kEach]) const {
    if (keys) {
#pragma unroll
      for (int k = 0; k < kEach; ++k) key[k] = keys[min(first + k * step, rows - 1)];
    } else {
      int64_t id[kEach];
      segment_load_ids(ids, first, step, rows, id);
      // Ids that don't count come behind all others.
#pragma unroll
      for (int k = 0; k < kEach; ++k) key[k] = uint32_t(uint64_t(id[k]) < uint64_t(segments) ? id[k] : segments);
    }
  }
  template <int kEach>
  __device__ __forceinline__ void load_values(int64_t first, int64_t step, int64_t rows,
                                              uint32_t (&value)[kEach]) const {
    const auto load = [&](const auto *from, int64_t apart) {
#pragma unroll
      for (int k = 0; k < kEach; ++k) value[k] = from[min(first + k * step, rows - 1) * apart];
    };
    if (values) {
      load(values, 1);
    } else if (!payload.data) {
#pragma unroll
      for (int k = 0; k < kEach; ++k) value[k] = uint32_t(first + k * step);
    } else if (payload_bytes == 4) {
      load(static_cast<const uint32_t *>(payload.data), payload.row);
    } else if (payload_bytes == 2) {
      load(static_cast<const uint16_t *>(payload.data), payload.row);
    } else {
      load(static_cast<const uint8_t *>(payload.data), payload.row);
    }
  }
};

struct SortPass {
  SortSource from;
  int64_t rows;
  int64_t tiles;
  int shift;
  int bits;
  uint32_t *counts;  // of each digit and tile
  uint32_t *totals;  // of each digit
  uint32_t *keys;
  uint32_t *values;

  __device__ uint32_t digit(uint32_t key) const { return key >> shift & ((1u << bits) - 1); }
};

template <int kThreads, int kEach>
__global__ __launch_bounds__(kThreads) void count_digits(const __grid_constant__ SortPass pass, SegmentBounds bounds) {
  __shared__ uint32_t counts[1 << kMostDigitBits];
  const int digits = 1 << pass.bits;
  for (int d = threadIdx.x; d < digits; d += kThreads) counts[d] = 0;
  wait_for_earlier_work();
  let_next_kernel_start();
  bounds.forget(int64_t(blockIdx.x) * kThreads + threadIdx.x, int64_t(gridDim.x) * kThreads);
  const int64_t first = int64_t(blockIdx.x) * kThreads * kEach + threadIdx.x;
  uint32_t key[kEach];
  pass.from.load_keys(first, kThreads, pass.rows, key);
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kEach; ++k)
    if (first + k * kThreads < pass.rows) atomicAdd(counts + pass.digit(key[k]), 1u);
  __syncthreads();
  for (int d = threadIdx.x; d < digits; d += kThreads) pass.counts[d * pass.tiles + blockIdx.x] = counts[d];
}

// The sum of what threads before this one have, and of all.
template <int kThreads>
__device__ __forceinline__ uint32_t scan_block(uint32_t value, uint32_t (&sums)[kThreads / 32], uint32_t &total) {
  const int lane = int(threadIdx.x) & 31;
  const int warp = int(threadIdx.x) / 32;
  uint32_t behind = value;
  for (int apart = 1; apart < 32; apart *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, behind, apart);
    if (lane >= apart) behind += other;
  }
  if (lane == 31) sums[warp] = behind;
  __syncthreads();
  uint32_t before = behind - value;
  total = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) {
    const uint32_t sum = sums[w];
    if (w < warp) before += sum;
    total += sum;
  }
  __syncthreads();
  return before;
}

// A block for each digit: how many rows of tiles before have it.
__global__ __launch_bounds__(kScanThreads) void scan_counts(const __grid_constant__ SortPass pass) {
  __shared__ uint32_t sums[kScanThreads / 32];
  wait_for_earlier_work();
  let_next_kernel_start();
  uint32_t *counts = pass.counts + blockIdx.x * pass.tiles;
  uint32_t before = 0;
  for (int64_t tile = 0; tile < pass.tiles; tile += kScanThreads * kScanEach) {
    const int64_t first = tile + int(threadIdx.x) * kScanEach;
    uint32_t count[kScanEach];
    uint32_t own = 0;
#pragma unroll
    for (int k = 0; k < kScanEach; ++k) {
      count[k] = first + k < pass.tiles ? counts[first + k] : 0;
      own += count[k];
    }
    uint32_t total;
    uint32_t sum = before + scan_block<kScanThreads>(own, sums, total);
#pragma unroll
    for (int k = 0; k < kScanEach; ++k) {
      if (first + k < pass.tiles) counts[first + k] = sum;
      sum += count[k];
    }
    before += total;
  }
  if (threadIdx.x == 0) pass.totals[blockIdx.x] = before;
}

template <int kThreads, int kEach>
size_t move_bytes(int bits) {
  return size_t(kThreads) * kEach * 2 * sizeof(uint32_t) + (size_t(kThreads / 32) << bits) * sizeof(uint16_t);
}

template <int kThreads, int kEach>
__global__ __launch_bounds__(kThreads) void move_rows(const __grid_constant__ SortPass pass) {
  constexpr int kWarps = kThreads / 32;
  constexpr int kTile = kThreads * kEach;
  static_assert(kThreads >= 1 << kMostDigitBits && kEach * 32 < 1 << 16);
  extern __shared__ __align__(16) uint32_t segment_sorted[];
  __shared__ uint32_t begins[1 << kMostDigitBits];   // in the tile
  __shared__ uint32_t targets[1 << kMostDigitBits];  // of a digit, less where it begins in the tile
  __shared__ uint32_t sums[kWarps];
  uint32_t *keys = segment_sorted;
  uint32_t *values = keys + kTile;
  uint16_t *counts = reinterpret_cast<uint16_t *>(values + kTile);
  const int digits = 1 << pass.bits;
  const int lane = int(threadIdx.x) & 31;
  const int warp = int(threadIdx.x) / 32;
  uint16_t *own = counts + (warp << pass.bits);
  for (int d = lane; d < digits; d += 32) own[d] = 0;
  wait_for_earlier_work();
  let_next_kernel_start();
  const int64_t tile = int64_t(blockIdx.x) * kTile;
  const int64_t first = tile + warp * 32 * kEach + lane;
  uint32_t key[kEach];
  uint32_t value[kEach];
  pass.from.load_keys(first, 32, pass.rows, key);
  pass.from.load_values(first, 32, pass.rows, value);
  const bool counted = int(threadIdx.x) < digits;
  const uint32_t total = counted ? pass.totals[threadIdx.x] : 0;
  const uint32_t earlier = counted ? pass.counts[int(threadIdx.x) * pass.tiles + blockIdx.x] : 0;
  __syncwarp();
  uint32_t rank[kEach];
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    // Behind the last row there is what comes last in the tile.
    if (first + k * 32 >= pass.rows) key[k] = ~0u;
    const uint32_t digit = pass.digit(key[k]);
#if SORT_MATCH
    const uint32_t peers = __match_any_sync(~0u, digit);
#else
    uint32_t peers = ~0u;
#pragma unroll
    for (int b = 0; b < kMostDigitBits; ++b) {
      const bool set = digit >> b & 1;
      const uint32_t all = __ballot_sync(~0u, set);
      peers &= set ? all : ~all;
    }
#endif
    const uint32_t before = own[digit];
    rank[k] = before + __popc(peers & ((1u << lane) - 1));
    __syncwarp();
    if (lane == 31 - __clz(int(peers))) own[digit] = uint16_t(rank[k] + 1);
    __syncwarp();
  }
  __syncthreads();
  uint32_t in_tile = 0;
  if (counted) {
#pragma unroll 8
    for (int w = 0; w < kWarps; ++w) {
      uint16_t &at = counts[(w << pass.bits) + threadIdx.x];
      const uint32_t count = at;
      at = uint16_t(in_tile);
      in_tile += count;
    }
  }
  uint32_t all;
  const uint32_t begin = scan_block<kThreads>(in_tile, sums, all);
  const uint32_t before = scan_block<kThreads>(total, sums, all);
  if (counted) {
    begins[threadIdx.x] = begin;
    targets[threadIdx.x] = before + earlier - begin;
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const uint32_t digit = pass.digit(key[k]);
    const uint32_t at = begins[digit] + own[digit] + rank[k];
    keys[at] = key[k];
    values[at] = value[k];
  }
  __syncthreads();
  const int count = int(min(pass.rows - tile, int64_t(kTile)));
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const int i = k * kThreads + int(threadIdx.x);
    if (i >= count) break;
    const uint32_t target = targets[pass.digit(keys[i])] + uint32_t(i);
    pass.keys[target] = keys[i];
    pass.values[target] = values[i];
  }
}

template <int kThreads, int kEach>
void run_pass(const SortPass &pass, const SegmentBounds &bounds, Stream stream) {
  const size_t shared = move_bytes<kThreads, kEach>(pass.bits);
  const auto move = move_rows<kThreads, kEach>;
  if (shared > 48 * 1024)
    check_cuda(cudaFuncSetAttribute(move, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)),
               "cudaFuncSetAttribute");
  launch(count_digits<kThreads, kEach>, {pass.tiles, kThreads, 0, true}, stream, pass, bounds);
  launch(scan_counts, {int64_t(1) << pass.bits, kScanThreads, 0, true}, stream, pass);
  launch(move, {pass.tiles, kThreads, shared, true}, stream, pass);
}

constexpr int kLargeThreads = 1024;
constexpr int kLargeEach = 8;
constexpr int kSmallThreads = 512;
constexpr int kSmallEach = 4;

}  // namespace

SegmentSort segment_sort_of(const SegmentProblem &problem) {
  constexpr int64_t kFewestTiles = 64;
  constexpr int64_t kLarge = kLargeThreads * kLargeEach;
  SegmentSort sort;
  const int bits = std::bit_width(uint64_t(problem.segments));
  sort.passes = int(ceil_div(bits, kMostDigitBits));
  sort.bits = int(ceil_div(bits, sort.passes));
  sort.large = problem.rows >= kFewestTiles * kLarge;
  sort.tiles = ceil_div(problem.rows, sort.large ? kLarge : int64_t(kSmallThreads) * kSmallEach);
  return sort;
}

int segment_sort(const SegmentProblem &problem, const SegmentIndices &ids, const SegmentView *payload,
                 const SegmentSpace &space, Stream stream) {
  const SegmentSort &sort = space.sort;
  SegmentBounds bounds = space.bounds;
  SortPass pass = {};
  pass.from.ids = ids;
  pass.from.segments = problem.segments;
  if (payload) pass.from.payload = *payload;
  pass.from.payload_bytes = problem.dtype.bits / 8;
  pass.rows = problem.rows;
  pass.tiles = sort.tiles;
  pass.bits = sort.bits;
  pass.counts = space.digits;
  pass.totals = space.digits + (sort.tiles << sort.bits);
  for (int p = 0; p < sort.passes; ++p) {
    pass.keys = space.keys[p % 2];
    pass.values = space.values[p % 2];
    if (sort.large) {
      run_pass<kLargeThreads, kLargeEach>(pass, bounds, stream);
    } else {
      run_pass<kSmallThreads, kSmallEach>(pass, bounds, stream);
    }
    pass.from.keys = pass.keys;
    pass.from.values = pass.values;
    pass.shift += pass.bits;
    bounds.count = 0;
  }
  return (sort.passes - 1) % 2;
}

}  // namespace baracuda
