// SPDX-License-Identifier: Apache-2.0
#include "segment/segment_cells.cuh"

namespace baracuda {
namespace {

constexpr int kTileThreads = 1024;
constexpr int kTileWarps = kTileThreads / 32;
constexpr int kTileItems = kBucketTile / kTileThreads;
// Of buckets, and of each lane's rows that no segment has.
constexpr int kTileCounters = kMostBuckets + 32;
// Two sets of counters, and sums of warps.
constexpr int64_t kTileCounterBytes = (2 * kTileCounters + kTileWarps) * int64_t(sizeof(uint32_t));
static_assert(kTileThreads >= kTileCounters && kTileWarps == 32);

__global__ __launch_bounds__(kMostBuckets) void forget_totals(SegmentBuckets buckets) {
  let_next_kernel_start();
  buckets.totals[threadIdx.x] = 0;
  buckets.done[threadIdx.x] = 0;
}

// Which of a tile's rows a thread has: two neighbours at a time.
__device__ __forceinline__ int row_in_tile(int k) { return (k / 2) * 2 * kTileThreads + 2 * int(threadIdx.x) + k % 2; }

template <class T>
__device__ __forceinline__ SegmentPack<T, 2> load_pair(const SegmentPack<T, 2> *from) {
  using Word = std::conditional_t<sizeof(T) == 2, unsigned, std::conditional_t<sizeof(T) == 4, uint2, ulonglong2>>;
  const Word word = *reinterpret_cast<const Word *>(from);
  return bit_cast<SegmentPack<T, 2>>(word);
}

// Rows of tiles by buckets, in each in any order, with fillers that belong to no segment. While a tile is put in order,
// the next is on its way: each thread has room for its own rows of it.
template <class Bits, class Place, class Id>
__global__ __launch_bounds__(kTileThreads, 1) void fill_buckets(const __grid_constant__ SegmentBuckets buckets,
                                                                SegmentView input, SegmentIndices ids, int64_t rows,
                                                                int64_t segments, bool paired) {
  using Record = BucketRecords<Bits, Place>;
  extern __shared__ __align__(16) uint64_t segment_memory[];
  // In turns: rows are counted in one, while the other is forgotten.
  __shared__ uint32_t counters[2][kTileCounters];
  __shared__ uint32_t sums[kTileWarps];
  auto *next_ids = reinterpret_cast<SegmentPack<Id, 2> *>(segment_memory) + threadIdx.x;
  auto *next_elements =
      reinterpret_cast<SegmentPack<Bits, 2> *>(segment_memory + kBucketTile * sizeof(Id) / 8) + threadIdx.x;
  uint64_t *staged_memory = segment_memory + kBucketTile * (sizeof(Id) + sizeof(Bits)) / 8;
  const Record staged = {staged_memory, staged_memory + buckets.stride * (Record::kElementBytes / 8)};
  const int lane = int(threadIdx.x) & 31;
  const int warp = int(threadIdx.x) / 32;
  const int b = int(threadIdx.x);
  const Id *from = static_cast<const Id *>(ids.data);
  const Bits *data = static_cast<const Bits *>(input.data);
  const auto fetch = [&](int64_t tile) {
    const int64_t first = tile * kBucketTile;
    if (paired && first + kBucketTile <= rows) {
#pragma unroll
      for (int k = 0; k < kTileItems / 2; ++k) {
        copy_ahead<sizeof *next_ids>(next_ids + k * kTileThreads, from + first + row_in_tile(2 * k));
        copy_ahead<sizeof *next_elements>(next_elements + k * kTileThreads, data + first + row_in_tile(2 * k));
      }
    } else if (first < rows) {
      for (int k = 0; k < kTileItems; ++k) {
        const int64_t row = first + row_in_tile(k);
        next_ids[k / 2 * kTileThreads].value[k % 2] = row < rows ? from[row * ids.stride] : Id(-1);
        next_elements[k / 2 * kTileThreads].value[k % 2] = data[min(row, rows - 1) * input.row];
      }
    }
    commit_copies();
  };
  // Rows of no segment are counted, too: no lane takes another way, and ranks are asked for at once.
  const uint32_t nowhere = uint32_t(kMostBuckets + lane) << buckets.cell_bits;
  if (b < kTileCounters) counters[0][b] = 0;
  wait_for_earlier_work();
  let_next_kernel_start();
  fetch(blockIdx.x);
  __syncthreads();
  uint32_t seen = 0;
  int turn = 0;
  for (int64_t tile = blockIdx.x; tile < buckets.tiles; tile += gridDim.x) {
    uint32_t id[kTileItems];
    SegmentPack<Bits, 2> element[kTileItems / 2];
    wait_for_copies<0>();
#pragma unroll
    for (int k = 0; k < kTileItems / 2; ++k) {
      const SegmentPack<Id, 2> given = load_pair(next_ids + k * kTileThreads);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        id[2 * k + i] = uint64_t(int64_t(given.value[i])) < uint64_t(segments) ? uint32_t(given.value[i]) : nowhere;
      element[k] = load_pair(next_elements + k * kTileThreads);
    }
    fetch(tile + gridDim.x);
    uint32_t *counts = counters[turn];
    turn ^= 1;
    uint32_t rank[kTileItems];
#pragma unroll
    for (int k = 0; k < kTileItems; ++k) rank[k] = atomicAdd(counts + (id[k] >> buckets.cell_bits), 1u);
    __syncthreads();
    if (b < kTileCounters) counters[turn][b] = 0;
    const uint32_t count = b < buckets.count ? counts[b] : 0;
    const uint32_t whole = (count + kRecords - 1) / kRecords * kRecords;
    uint32_t behind = whole;
    if (warp * 32 < buckets.count) {
      for (int apart = 1; apart < 32; apart *= 2) {
        const uint32_t other = __shfl_up_sync(~0u, behind, apart);
        if (lane >= apart) behind += other;
      }
    }
    if (lane == 31) sums[warp] = behind;
    __syncthreads();
    const uint32_t sum = sums[lane];
    const uint32_t total = __reduce_add_sync(~0u, sum);
    if (warp * 32 < buckets.count) {
      const uint32_t begin = __reduce_add_sync(~0u, lane < warp ? sum : 0) + behind - whole;
      if (b < buckets.count) {
        counts[b] = begin;
        seen += count;
        buckets.bounds[b * buckets.tiles + tile] = uint16_t(begin / kRecords);
        for (uint32_t i = count; i < whole; ++i)
          staged.set(begin + i, 0,
                     Place(uint32_t(1) << buckets.cell_bits << (sizeof(Place) == 4 ? kBucketTileBits : 0)));
      }
      if (b == 0) buckets.bounds[buckets.count * buckets.tiles + tile] = uint16_t(total / kRecords);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kTileItems; ++k) {
      const uint32_t cell = id[k] & ((uint32_t(1) << buckets.cell_bits) - 1);
      const uint32_t to = counts[id[k] >> buckets.cell_bits] + rank[k];
      if (id[k] != nowhere)
        staged.set(to, element[k / 2].value[k % 2],
                   Place(sizeof(Place) == 4 ? cell << kBucketTileBits | uint32_t(row_in_tile(k)) : cell));
    }
    __syncthreads();
    const Record to = Record{buckets.elements, buckets.places};
    for (int q = threadIdx.x; q < int(total) / kRecords; q += kTileThreads)
      to.copy(tile * buckets.stride + q, staged, q);
  }
  if (b < buckets.count && seen > 0) atomicAdd(buckets.totals + b, seen);
}

// What a block needs beside its counters, for elements, places and ids of so many bytes.
size_t tile_bytes(const SegmentBuckets &buckets, int element, int place, int id) {
  return size_t(buckets.stride) * kRecords * (element + place) + size_t(kBucketTile) * (element + id);
}

template <class Bits, class Place, class Id>
void fill(const SegmentProblem &problem, const SegmentView &input, const SegmentIndices &ids, const SegmentSpace &space,
          Stream stream) {
  const SegmentBuckets &buckets = space.buckets;
  const size_t shared = tile_bytes(buckets, sizeof(Bits), sizeof(Place), sizeof(Id));
  const auto kernel = fill_buckets<Bits, Place, Id>;
  const bool paired = input.row == 1 && ids.stride == 1 && segment_aligned({input.data, 2, 1}, 2, sizeof(Bits)) &&
                      segment_aligned({const_cast<void *>(ids.data), 2, 1}, 2, sizeof(Id));
  segment_allow_shared(reinterpret_cast<const void *>(kernel), shared);
  launch(forget_totals, {1, kMostBuckets}, stream, buckets);
  launch(kernel, {std::min(buckets.tiles, kMultiprocessors), kTileThreads, shared, true}, stream, buckets, input, ids,
         problem.rows, problem.segments, paired);
}

// What a block may have for cells.
int64_t shared_bytes() {
  int device = 0;
  int bytes = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute");
  constexpr int kReserved = 4 * 1024;
  return bytes - kReserved;
}

// In how many parts rows go by where blocks share cells, or 0: what all segments hold should be a small part of what
// is read.
int64_t shared_parts(const SegmentProblem &problem, bool with_rows, int64_t most) {
  constexpr int64_t kFewestRows = 1024;
  const int vector = segment_vector(problem);
  if (!problem.extreme() || problem.ids == SegmentIds::offsets || vector * problem.dtype.bits != 128 ||
      problem.columns > 32 * vector || int64_t(segment_shared_bytes(problem, with_rows)) * kSharedBlocks > most)
    return 0;
  const int64_t parts = problem.rows / std::max(kFewestRows, 8 * problem.segments);
  if (parts < kMultiprocessors / 2) return 0;
  return std::max(std::min(parts, kMultiprocessors * kSharedBlocks), ceil_div(problem.rows, kSharedMostRows));
}

// How many rows of each lane a batch has where rows stream, or 0: as many as the room for all batches allows, and a
// warp has lanes for.
int stream_rows(const SegmentProblem &problem, int across, int64_t room) {
  const auto fits = [&](int rows) { return rows <= across && segment_stream_bytes(rows) <= room; };
  if (!DeviceGuard::kernels_can_wait()) return 0;
  if (problem.dtype.bits == 16 && fits(kStreamMany)) return kStreamMany;
  return fits(kStreamFew) ? kStreamFew : 0;
}

}  // namespace

size_t segment_few_bytes(const SegmentProblem &problem, size_t state, int vector) {
  return size_t(problem.segments) * (size_t(kFewThreads * vector) * state + sizeof(uint32_t)) +
         segment_few_id_bytes(segment_across(problem.columns, vector));
}

size_t segment_bucket_bytes(int cell_bits, size_t cell) {
  // One of fillers, and one that each lane may spoil.
  return ((size_t(1) << cell_bits) + 1 + 32) * cell;
}

size_t segment_bucket_sum_bytes(const SegmentProblem &problem, int cell_bits, int copy_bits) {
  const size_t cells = (size_t(1) << cell_bits) + 1;
  return cells * sizeof(uint32_t) * (2 + (problem.kind == SegmentKind::mean ? 3 : 2) * (size_t(1) << copy_bits));
}

void segment_take_cells(Workspace &workspace, const SegmentProblem &problem, size_t state, SegmentSpace &space) {
  constexpr int64_t kFewestRows = 1 << 14;
  if (problem.rows < kFewestRows || problem.rows > kSegmentMostRows) return;
  constexpr int64_t kFewSegments = 1024;
  const int64_t most = shared_bytes();
  const auto bytes = [&](int vector) { return int64_t(segment_few_bytes(problem, state, vector)); };
  const int vector = problem.columns > 32 ? 2 : 1;
  // With fewer blocks side by side, sorting was faster.
  constexpr int64_t kFewestBlocks = 3;
  const bool with_rows = state > sizeof(uint32_t);
  if (const int64_t parts = shared_parts(problem, with_rows, most); parts > 0) {
    space.cells = SegmentCells::shared;
    space.few.across = segment_across(problem.columns, segment_vector(problem));
    space.few.parts = int(parts);
    const int64_t room = most - int64_t(segment_shared_bytes(problem, with_rows));
    space.few.stream_rows = stream_rows(problem, space.few.across, room);
    space.partial = workspace.take<std::byte>(parts * problem.segments * problem.columns * int64_t(state));
    return;
  }
  if (problem.segments < kFewSegments && problem.ids != SegmentIds::offsets && bytes(vector) * kFewestBlocks <= most) {
    space.cells = SegmentCells::few;
    SegmentFew &few = space.few;
    few.vector = vector;
    few.across = segment_across(problem.columns, few.vector);
    few.tiles = int(ceil_div(problem.columns, int64_t(few.across) * few.vector));
    constexpr int64_t kMostBlocks = 4;
    const int64_t blocks = kMultiprocessors * std::min(most / bytes(few.vector), kMostBlocks);
    few.parts =
        int(std::clamp<int64_t>(blocks / few.tiles, 1, ceil_div(problem.rows, kFewRows * kFewThreads / few.across)));
    space.partial = workspace.take<std::byte>(few.parts * problem.segments * problem.columns * int64_t(state));
    space.counts = workspace.take<uint32_t>(few.parts * problem.segments);
    return;
  }
  if (problem.columns != 1 || problem.segments > kSegmentMostRows) return;
  if (problem.ids != SegmentIds::unsorted) {
    if (problem.ids == SegmentIds::offsets && problem.rows / 64 > problem.segments) return;
    space.cells = SegmentCells::runs;
    // Of sorted ids, at least as many chunks as warps are at work at once, and some more, as not all get on alike.
    constexpr int64_t kWarps = kMultiprocessors * kRunBlocks * kRunWarps;
    const int64_t steps = ceil_div(ceil_div(problem.rows, kWarps), int64_t(kRunStep));
    const int64_t chunk =
        problem.ids == SegmentIds::offsets ? kRangeChunk : std::min(steps, int64_t(kRunMostSteps)) * kRunStep;
    space.chunks = {int32_t(chunk), ceil_div(problem.rows, chunk)};
    space.partial = workspace.take<std::byte>(2 * space.chunks.count * int64_t(state));
    space.counts = workspace.take<uint32_t>(2 * space.chunks.count);
    space.ends = workspace.take<std::byte>(space.chunks.count * int64_t(sizeof(SegmentRunEnd)));
    space.taken = workspace.take<uint32_t>(1);
    return;
  }
  if (problem.rows < problem.segments) return;
  // As few as keep a bucket's cells in shared memory: what all blocks write lies in fewer places.
  constexpr int64_t kWanted = 128;
  constexpr int kFewestBits = 7;
  constexpr int kMostBits = 14;
  constexpr int kManyBits = 13;
  const auto bits_of = [&](int64_t buckets) {
    return int(std::bit_width(uint64_t(ceil_div(problem.segments, buckets) - 1)));
  };
  int cell_bits = std::max(kFewestBits, bits_of(kWanted));
  if (cell_bits > kManyBits) cell_bits = std::max(kManyBits, bits_of(kMostBuckets));
  if (cell_bits > kMostBits) return;
  constexpr int kMostCopyBits = 3;
  int copy_bits = kMostCopyBits;
  while (!problem.extreme() && copy_bits >= 0 &&
         int64_t(segment_bucket_sum_bytes(problem, cell_bits, copy_bits)) > most)
    --copy_bits;
  if (copy_bits < 0) return;
  SegmentBuckets &buckets = space.buckets;
  buckets.cell_bits = cell_bits;
  buckets.copy_bits = copy_bits;
  buckets.count = int(ceil_div(problem.segments, int64_t(1) << cell_bits));
  buckets.tiles = ceil_div(problem.rows, kBucketTile);
  buckets.stride = ceil_div(kBucketTile + (kRecords - 1) * buckets.count, 8 * kRecords) * 8;
  buckets.piece = uint32_t(std::max<int64_t>(
      buckets.count >= 128 ? 2 * ceil_div(problem.rows, buckets.count) : ceil_div(problem.rows, kMultiprocessors),
      kBucketTile));
  buckets.units = buckets.count + ceil_div(problem.rows, buckets.piece);
  const int element = problem.dtype.bits / 8;
  const int place = with_rows ? 4 : 2;
  if (int64_t(tile_bytes(buckets, element, place, sizeof(int64_t))) + kTileCounterBytes > most) return;
  space.cells = SegmentCells::buckets;
  const int64_t records = buckets.tiles * buckets.stride * kRecords;
  const bool together = bucket_shares_words(element, place);
  buckets.elements = workspace.take<std::byte>(records * (together ? element + place : element));
  if (!together) buckets.places = workspace.take<std::byte>(records * place);
  buckets.bounds = workspace.take<uint16_t>((buckets.count + 1) * buckets.tiles);
  buckets.totals = workspace.take<uint32_t>(kMostBuckets);
  buckets.done = workspace.take<uint32_t>(kMostBuckets);
  space.partial = workspace.take<std::byte>((buckets.units << cell_bits) * (problem.extreme() ? int64_t(state) : 8));
  if (!problem.extreme()) buckets.lengths = workspace.take<uint32_t>(buckets.units << cell_bits);
}

void segment_fill_buckets(const SegmentProblem &problem, const SegmentView &input, const SegmentIndices &ids,
                          bool with_rows, const SegmentSpace &space, Stream stream) {
  const auto run = [&](auto bits, auto place) {
    using Bits = typename decltype(bits)::type;
    using Place = typename decltype(place)::type;
    if (ids.wide) {
      fill<Bits, Place, int64_t>(problem, input, ids, space, stream);
    } else {
      fill<Bits, Place, int32_t>(problem, input, ids, space, stream);
    }
  };
  const auto with_place = [&](auto bits) {
    if (with_rows) {
      run(bits, TypeTag<uint32_t>{});
    } else {
      run(bits, TypeTag<uint16_t>{});
    }
  };
  if (problem.dtype.bits == 32) {
    with_place(TypeTag<uint32_t>{});
  } else {
    with_place(TypeTag<uint16_t>{});
  }
}

}  // namespace baracuda
