// SPDX-License-Identifier: Apache-2.0
#include "segment/segment_cells.cuh"

namespace baracuda {
namespace {

constexpr int kTileThreads = 512;
constexpr int kTileWarps = kTileThreads / 32;
constexpr int kTileItems = kBucketTile / kTileThreads;
constexpr uint32_t kNowhere = ~uint32_t(0);

template <class Bits, class Place>
struct TileMemory {
  uint32_t peers[kTileWarps][kBuckets];   // lanes of a warp that have the bucket
  uint16_t counts[kTileWarps][kBuckets];  // rows that a warp has seen of it, then where they begin
  uint32_t begins[kBuckets];
  Bits elements[kBucketTile];
  Place places[kBucketTile];
};

__global__ __launch_bounds__(kBuckets) void forget_totals(uint32_t *totals) { totals[threadIdx.x] = 0; }

// Rows of a tile in the order of buckets, and in each as they come: a warp has neighbouring rows.
template <class Bits, class Place>
__global__ __launch_bounds__(kTileThreads, 2) void fill_buckets(const __grid_constant__ SegmentBuckets buckets,
                                                                SegmentView input, SegmentIndices ids, int64_t rows,
                                                                int64_t segments, Bits *elements, Place *places,
                                                                uint16_t *bounds) {
  extern __shared__ __align__(16) uint64_t segment_memory[];
  auto &memory = *reinterpret_cast<TileMemory<Bits, Place> *>(segment_memory);
  const int warp = int(threadIdx.x) / 32;
  const int lane = int(threadIdx.x) & 31;
  const int64_t tile = blockIdx.x;
  const int in_tile = warp * 32 * kTileItems + lane;
  const int64_t first = tile * kBucketTile + in_tile;
  uint32_t id[kTileItems];
  Bits element[kTileItems];
  {
    int64_t given[kTileItems];
    segment_load_ids(ids, first, 32, rows, given);
#pragma unroll
    for (int k = 0; k < kTileItems; ++k)
      element[k] = static_cast<const Bits *>(input.data)[min(first + k * 32, rows - 1) * input.row];
#pragma unroll
    for (int k = 0; k < kTileItems; ++k)
      id[k] = uint64_t(given[k]) < uint64_t(segments) ? uint32_t(given[k]) : kNowhere;
  }
  for (int b = lane; b < kBuckets; b += 32) {
    memory.peers[warp][b] = 0;
    memory.counts[warp][b] = 0;
  }
  __syncwarp();
  // The bucket, and the rank among the warp's rows of it.
  uint32_t rank[kTileItems];
#pragma unroll
  for (int k = 0; k < kTileItems; ++k) {
    const bool valid = id[k] != kNowhere;
    const uint32_t bucket = valid ? buckets.by_cells.divide(id[k]) : 0;
    volatile uint32_t *peers = &memory.peers[warp][bucket];
    volatile uint16_t *count = &memory.counts[warp][bucket];
    if (valid) atomicOr(&memory.peers[warp][bucket], 1u << lane);
    __syncwarp();
    uint32_t same = 0;
    uint32_t before = 0;
    if (valid) {
      same = *peers;
      before = *count;
    }
    __syncwarp();
    if (valid && (same >> lane) == 1) {
      *peers = 0;
      *count = uint16_t(before + __popc(same));
    }
    __syncwarp();
    rank[k] = bucket << 16 | (before + __popc(same & ((1u << lane) - 1)));
  }
  __syncthreads();
  // A bucket's rows begin behind those of the buckets before, a warp's behind those of the warps before.
  uint32_t total = 0;
  if (threadIdx.x < kBuckets) {
    for (int w = 0; w < kTileWarps; ++w) {
      const uint32_t count = memory.counts[w][threadIdx.x];
      memory.counts[w][threadIdx.x] = uint16_t(total);
      total += count;
    }
    uint32_t sum = total;
    for (int apart = 1; apart < 32; apart *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, sum, apart);
      if (lane >= apart) sum += other;
    }
    memory.begins[threadIdx.x] = sum;
  }
  __syncthreads();
  uint32_t begin = 0;
  uint32_t kept = 0;
  for (int w = 0; w < kBuckets / 32; ++w) {
    const uint32_t sum = memory.begins[w * 32 + 31];
    if (w < warp) begin += sum;
    kept += sum;
  }
  if (threadIdx.x < kBuckets) begin += memory.begins[threadIdx.x] - total;
  __syncthreads();
  if (threadIdx.x < kBuckets) {
    memory.begins[threadIdx.x] = begin;
    bounds[threadIdx.x * buckets.tiles + tile] = uint16_t(begin);
    if (total > 0) atomicAdd(buckets.totals + threadIdx.x, total);
  }
  if (threadIdx.x == 0) bounds[kBuckets * buckets.tiles + tile] = uint16_t(kept);
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kTileItems; ++k) {
    if (id[k] == kNowhere) continue;
    const uint32_t bucket = rank[k] >> 16;
    const uint32_t at = (rank[k] & 0xffff) + memory.begins[bucket] + memory.counts[warp][bucket];
    const uint32_t cell = id[k] - bucket * uint32_t(buckets.cells);
    memory.elements[at] = element[k];
    memory.places[at] = Place(sizeof(Place) == 4 ? cell << kBucketTileBits | uint32_t(in_tile + k * 32) : cell);
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < kept; i += kTileThreads) {
    elements[tile * kBucketTile + i] = memory.elements[i];
    places[tile * kBucketTile + i] = memory.places[i];
  }
}

template <class Bits, class Place>
void fill(const SegmentProblem &problem, const SegmentView &input, const SegmentIndices &ids, const SegmentSpace &space,
          Stream stream) {
  const SegmentBuckets &buckets = space.buckets;
  const size_t shared = sizeof(TileMemory<Bits, Place>);
  const auto kernel = fill_buckets<Bits, Place>;
  segment_allow_shared(reinterpret_cast<const void *>(kernel), shared);
  launch(forget_totals, {1, kBuckets}, stream, buckets.totals);
  launch(kernel, {buckets.tiles, kTileThreads, shared}, stream, buckets, input, ids, problem.rows, problem.segments,
         static_cast<Bits *>(buckets.elements), static_cast<Place *>(buckets.places), buckets.bounds);
}

// What a block may have for cells.
int64_t shared_bytes() {
  int device = 0;
  int bytes = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute");
  constexpr int kReserved = 3 * 1024;
  return bytes - kReserved;
}

}  // namespace

int segment_bucket_warps(int64_t cells, size_t state) {
  const int64_t each = shared_bytes() / cells - int64_t(sizeof(uint32_t));
  return int(std::clamp<int64_t>(each / int64_t(state), 0, kMostBucketWarps));
}

size_t segment_few_bytes(const SegmentProblem &problem, size_t state, int vector) {
  return size_t(problem.segments) * (size_t(kFewThreads * vector) * state + sizeof(uint32_t));
}

void segment_take_cells(Workspace &workspace, const SegmentProblem &problem, size_t state, SegmentSpace &space) {
  constexpr int64_t kMultiprocessors = 132;
  constexpr int64_t kFewestRows = 1 << 14;
  if (problem.rows < kFewestRows || problem.ids == SegmentIds::offsets || problem.rows > kSegmentMostRows) return;
  constexpr int64_t kFewSegments = 1024;
  const int64_t most = shared_bytes();
  const auto bytes = [&](int vector) { return int64_t(segment_few_bytes(problem, state, vector)); };
  // With fewer blocks side by side, sorting was faster.
  constexpr int64_t kFewestBlocks = 3;
  if (problem.segments < kFewSegments && bytes(problem.columns > 32 ? 2 : 1) * kFewestBlocks <= most) {
    space.cells = SegmentCells::few;
    SegmentFew &few = space.few;
    few.vector = problem.columns > 32 ? 2 : 1;
    few.across = segment_across(problem.columns, few.vector);
    few.tiles = int(ceil_div(problem.columns, int64_t(few.across) * few.vector));
    constexpr int64_t kMostBlocks = 6;
    const int64_t blocks = kMultiprocessors * std::min(most / bytes(few.vector), kMostBlocks);
    few.parts = int(std::clamp<int64_t>(blocks / few.tiles, 1, ceil_div(problem.rows, 16 * kFewThreads / few.across)));
    space.partial = workspace.take<std::byte>(few.parts * problem.segments * problem.columns * int64_t(state));
    space.counts = workspace.take<uint32_t>(few.parts * problem.segments);
    return;
  }
  constexpr int kFewestWarps = 4;
  // Rows that meet in a cell wait for one another.
  constexpr int64_t kFewestCells = 128;
  const int64_t cells = std::max(ceil_div(problem.segments, kBuckets), kFewestCells);
  if (problem.columns != 1 || problem.ids != SegmentIds::unsorted || problem.rows < problem.segments || cells > 65536 ||
      segment_bucket_warps(cells, state) < kFewestWarps)
    return;
  space.cells = SegmentCells::buckets;
  SegmentBuckets &buckets = space.buckets;
  buckets.cells = int(cells);
  buckets.by_cells = Divider(uint32_t(cells));
  buckets.tiles = ceil_div(problem.rows, kBucketTile);
  buckets.piece = std::max<int64_t>(2 * ceil_div(problem.rows, kBuckets), kBucketTile);
  buckets.units = kBuckets + ceil_div(problem.rows, buckets.piece);
  const int64_t records = buckets.tiles * kBucketTile;
  buckets.elements = workspace.take<std::byte>(records * problem.dtype.bits / 8);
  buckets.places = workspace.take<std::byte>(records * (state == 8 ? 4 : 2));
  buckets.bounds = workspace.take<uint16_t>((kBuckets + 1) * buckets.tiles);
  buckets.totals = workspace.take<uint32_t>(kBuckets);
  space.partial = workspace.take<std::byte>(buckets.units * cells * int64_t(state));
  space.counts = workspace.take<uint32_t>(buckets.units * cells);
}

void segment_fill_buckets(const SegmentProblem &problem, const SegmentView &input, const SegmentIndices &ids,
                          bool with_rows, const SegmentSpace &space, Stream stream) {
  const auto run = [&](auto tag) {
    using Bits = typename decltype(tag)::type;
    if (with_rows) {
      fill<Bits, uint32_t>(problem, input, ids, space, stream);
    } else {
      fill<Bits, uint16_t>(problem, input, ids, space, stream);
    }
  };
  if (problem.dtype.bits == 32) {
    run(TypeTag<uint32_t>{});
  } else {
    run(TypeTag<uint16_t>{});
  }
}

}  // namespace baracuda
