// SPDX-License-Identifier: Apache-2.0
// Rows by their segments, and those of one segment as they come: a radix sort, from the lowest digit up. A digit has as
// many bits as one block can count, so that ids take fewer passes than bytes would, and each pass is a count of every
// tile's digits, a scan of the counts and a move.
#include "segment/segment.cuh"

namespace baracuda {
namespace {

constexpr int kMostDigitBits = 9;
constexpr int kSortThreads = 1 << kMostDigitBits;
constexpr int kSortWarps = kSortThreads / 32;
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

  // Of rows that are kStep apart. All are asked for before any is looked at.
  template <int kStep, int kEach>
  __device__ __forceinline__ void load_keys(int64_t first, int64_t rows, uint32_t (&key)[kEach]) const {
    if (keys) {
      load<kStep>(keys, 1, first, rows, key);
      return;
    }
    // Ids that don't count come behind all others.
    const auto inside = [&](const auto(&id)[kEach]) {
#pragma unroll
      for (int k = 0; k < kEach; ++k)
        key[k] = uint32_t(uint64_t(int64_t(id[k])) < uint64_t(segments) ? id[k] : segments);
    };
    if (ids.wide) {
      int64_t id[kEach];
      load<kStep>(static_cast<const int64_t *>(ids.data), ids.stride, first, rows, id);
      inside(id);
    } else {
      int32_t id[kEach];
      load<kStep>(static_cast<const int32_t *>(ids.data), ids.stride, first, rows, id);
      inside(id);
    }
  }
  template <int kStep, int kEach>
  __device__ __forceinline__ void load_values(int64_t first, int64_t rows, uint32_t (&value)[kEach]) const {
    if (values) {
      load<kStep>(values, 1, first, rows, value);
    } else if (!payload.data) {
#pragma unroll
      for (int k = 0; k < kEach; ++k) value[k] = uint32_t(first) + k * kStep;
    } else if (payload_bytes == 4) {
      load<kStep>(static_cast<const uint32_t *>(payload.data), payload.row, first, rows, value);
    } else if (payload_bytes == 2) {
      load<kStep>(static_cast<const uint16_t *>(payload.data), payload.row, first, rows, value);
    } else {
      load<kStep>(static_cast<const uint8_t *>(payload.data), payload.row, first, rows, value);
    }
  }

  // Behind the last row it comes again.
  template <int kStep, class From, class To, int kEach>
  __device__ static void load(const From *from, int64_t apart, int64_t first, int64_t rows, To (&to)[kEach]) {
    if (first + (kEach - 1) * kStep < rows) {
      from += first * apart;
#pragma unroll
      for (int k = 0; k < kEach; ++k) to[k] = from[k * kStep * apart];
    } else {
#pragma unroll
      for (int k = 0; k < kEach; ++k) to[k] = from[min(first + k * kStep, rows - 1) * apart];
    }
  }
};

struct SortPass {
  SortSource from;
  int64_t rows;
  int64_t tiles;
  int shift;
  int bits;
  uint32_t *counts;  // of each digit and tile; once scanned, of the tiles before
  uint32_t *totals;  // of each digit; NULL: counts are few, and are not scanned
  uint32_t *keys;
  uint32_t *values;

  __device__ uint32_t digit(uint32_t key) const { return key >> shift & ((1u << bits) - 1); }
};

// `kEach` rows to a thread.
template <int kEach>
__global__ __launch_bounds__(kSortThreads) void count_digits(const __grid_constant__ SortPass pass,
                                                             SegmentBounds bounds) {
  __shared__ uint32_t counts[1 << kMostDigitBits];
  const int digits = 1 << pass.bits;
  for (int d = threadIdx.x; d < digits; d += kSortThreads) counts[d] = 0;
  wait_for_earlier_work();
  let_next_kernel_start();
  bounds.forget(int64_t(blockIdx.x) * kSortThreads + threadIdx.x, int64_t(gridDim.x) * kSortThreads);
  const int64_t first = int64_t(blockIdx.x) * kSortThreads * kEach + threadIdx.x;
  uint32_t key[kEach];
  pass.from.load_keys<kSortThreads>(first, pass.rows, key);
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kEach; ++k)
    if (first + k * kSortThreads < pass.rows) atomicAdd(counts + pass.digit(key[k]), 1u);
  __syncthreads();
  for (int d = threadIdx.x; d < digits; d += kSortThreads) pass.counts[d * pass.tiles + blockIdx.x] = counts[d];
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

// Of a tile's rows, or before, of each warp's digits.
template <int kEach>
__host__ __device__ int move_words(int bits) {
  return max(2 * kSortThreads * kEach, kSortWarps << bits);
}

template <int kEach>
size_t move_bytes(int bits) {
  return size_t(move_words<kEach>(bits)) * sizeof(uint32_t) + (size_t(kSortWarps) << bits) * sizeof(uint16_t);
}

// For each digit, how many rows of all tiles and of those before the block's have it.
__device__ __forceinline__ void sum_counts(const SortPass &pass, uint32_t *totals, uint32_t *earlier) {
  const int apart = min(kSortThreads >> pass.bits, 32);
  const int digit = int(threadIdx.x) / apart;
  uint32_t total = 0;
  uint32_t before = 0;
  if (digit < 1 << pass.bits) {
    const uint32_t *counts = pass.counts + digit * pass.tiles;
    const int tiles = int(pass.tiles);
#pragma unroll 8
    for (int tile = int(threadIdx.x) & (apart - 1); tile < tiles; tile += apart) {
      const uint32_t count = counts[tile];
      total += count;
      if (tile < int(blockIdx.x)) before += count;
    }
  }
  for (int other = apart / 2; other > 0; other /= 2) {
    total += __shfl_xor_sync(~0u, total, other);
    before += __shfl_xor_sync(~0u, before, other);
  }
  if ((int(threadIdx.x) & (apart - 1)) == 0 && digit < 1 << pass.bits) {
    totals[digit] = total;
    earlier[digit] = before;
  }
}

template <int kEach>
__global__ __launch_bounds__(kSortThreads, kEach > 8 ? 1 : 2) void move_rows(const __grid_constant__ SortPass pass) {
  constexpr int kTile = kSortThreads * kEach;
  static_assert(kTile < 1 << 16);
  extern __shared__ __align__(16) uint32_t segment_sorted[];
  __shared__ uint32_t begins[1 << kMostDigitBits];   // in the tile; at first, a digit's rows
  __shared__ uint32_t targets[1 << kMostDigitBits];  // of a digit, less where it begins in the tile; at first, a
                                                     // digit's rows in tiles before
  __shared__ uint32_t sums[kSortWarps];
  uint32_t *keys = segment_sorted;
  uint32_t *values = keys + kTile;
  uint16_t *counts = reinterpret_cast<uint16_t *>(segment_sorted + move_words<kEach>(pass.bits));
  const int digits = 1 << pass.bits;
  const int lane = int(threadIdx.x) & 31;
  const int warp = int(threadIdx.x) / 32;
  uint16_t *own = counts + (warp << pass.bits);
  // Which lanes of a warp have a digit; lies where rows will be.
  uint32_t *peers = segment_sorted + (warp << pass.bits);
  for (int d = lane; d < digits; d += 32) {
    own[d] = 0;
    peers[d] = 0;
  }
  wait_for_earlier_work();
  let_next_kernel_start();
  const int64_t tile = int64_t(blockIdx.x) * kTile;
  const int64_t first = tile + warp * 32 * kEach + lane;
  uint32_t key[kEach];
  uint32_t value[kEach];
  pass.from.load_keys<32>(first, pass.rows, key);
  pass.from.load_values<32>(first, pass.rows, value);
  const bool counted = int(threadIdx.x) < digits;
  if (!pass.totals) {
    sum_counts(pass, begins, targets);
  } else if (counted) {
    begins[threadIdx.x] = pass.totals[threadIdx.x];
    targets[threadIdx.x] = pass.counts[int(threadIdx.x) * pass.tiles + blockIdx.x];
  }
  __syncwarp();
  uint32_t rank[kEach];
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    // Behind the last row there is what comes last in the tile.
    if (first + k * 32 >= pass.rows) key[k] = ~0u;
    const uint32_t digit = pass.digit(key[k]);
    atomicOr(peers + digit, 1u << lane);
    __syncwarp();
    const uint32_t all = peers[digit];
    const uint32_t before = own[digit];
    __syncwarp();
    rank[k] = before + __popc(all & ((1u << lane) - 1));
    if (all >> lane == 1) {
      peers[digit] = 0;
      own[digit] = uint16_t(rank[k] + 1);
    }
    __syncwarp();
  }
  __syncthreads();
  const uint32_t total = counted ? begins[threadIdx.x] : 0;
  const uint32_t earlier = counted ? targets[threadIdx.x] : 0;
  uint32_t in_tile = 0;
  if (counted) {
#pragma unroll 8
    for (int w = 0; w < kSortWarps; ++w) {
      uint16_t &at = counts[(w << pass.bits) + threadIdx.x];
      const uint32_t count = at;
      at = uint16_t(in_tile);
      in_tile += count;
    }
  }
  uint32_t all;
  const uint32_t begin = scan_block<kSortThreads>(in_tile, sums, all);
  const uint32_t before = scan_block<kSortThreads>(total, sums, all);
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
  uint32_t target[kEach];
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const int i = k * kSortThreads + int(threadIdx.x);
    key[k] = keys[i];
    value[k] = values[i];
    target[k] = targets[pass.digit(key[k])] + uint32_t(i);
  }
  const int count = int(min(pass.rows - tile, int64_t(kTile)));
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    if (k * kSortThreads + int(threadIdx.x) >= count) continue;
    pass.keys[target[k]] = key[k];
    pass.values[target[k]] = value[k];
  }
}

template <int kEach>
void run_pass(const SortPass &pass, const SegmentBounds &bounds, Stream stream) {
  const size_t shared = move_bytes<kEach>(pass.bits);
  // With what is static it may be more than is allowed unasked.
  constexpr size_t kAllowed = 40 * 1024;
  if (shared > kAllowed)
    check_cuda(cudaFuncSetAttribute(move_rows<kEach>, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)),
               "cudaFuncSetAttribute");
  launch(count_digits<kEach>, {pass.tiles, kSortThreads, 0, true}, stream, pass, bounds);
  if (pass.totals) launch(scan_counts, {int64_t(1) << pass.bits, kScanThreads, 0, true}, stream, pass);
  launch(move_rows<kEach>, {pass.tiles, kSortThreads, shared, true}, stream, pass);
}

}  // namespace

SegmentSort segment_sort_of(const SegmentProblem &problem) {
  // Half of what runs at once.
  constexpr int64_t kFewestTiles = 64;
  constexpr int kMostEach = 16;
  constexpr int kFewestEach = 4;
  SegmentSort sort;
  const int bits = std::bit_width(uint64_t(problem.segments));
  sort.passes = int(ceil_div(bits, kMostDigitBits));
  sort.bits = int(ceil_div(bits, sort.passes));
  sort.each = kMostEach;
  while (sort.each > kFewestEach && problem.rows < kFewestTiles * kSortThreads * sort.each) sort.each /= 2;
  sort.tiles = ceil_div(problem.rows, int64_t(kSortThreads) * sort.each);
  return sort;
}

void segment_sort(const SegmentProblem &problem, const SegmentIndices &ids, const SegmentView *payload,
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
  // As few as each block has soon added up.
  constexpr int64_t kFewCounts = int64_t(1) << 13;
  if ((sort.tiles << sort.bits) > kFewCounts) pass.totals = space.digits + (sort.tiles << sort.bits);
  for (int p = 0; p < sort.passes; ++p) {
    pass.keys = space.keys[p % 2];
    pass.values = space.values[p % 2];
    const auto run = sort.each == 16 ? run_pass<16> : sort.each == 8 ? run_pass<8> : run_pass<4>;
    run(pass, bounds, stream);
    pass.from.keys = pass.keys;
    pass.from.values = pass.values;
    pass.shift += pass.bits;
    bounds.count = 0;
  }
}

}  // namespace baracuda
