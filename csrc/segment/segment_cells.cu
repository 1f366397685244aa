// SPDX-License-Identifier: Apache-2.0
// Maxima without sorting: a multiprocessor keeps a cell for each segment and column in shared memory. In
// what order rows reach a cell makes no difference. A cell is a key, with the row below it where that is wanted,
// and 0 where no row came: no float has that key.
#include "segment/segment.cuh"

namespace baracuda {
namespace {

template <class Bits, bool kArg>
struct Maximum {
  using Cell = std::conditional_t<kArg, unsigned long long, uint32_t>;

  SegmentOrder<Bits> order;
  SegmentView output;  // without data: only the row is wanted
  SegmentView arg;
  bool wide;
  uint32_t none;
  Bits empty;

  __device__ static Cell cell(uint32_t key, uint32_t row) {
    if constexpr (kArg) return Cell(key) << 32 | uint32_t(~row);
    return key;
  }
  __device__ static void raise(Cell *at, Cell value) {
    if (value > *at) atomicMax(at, value);
  }
  __device__ void store(int64_t segment, int64_t column, Cell value) const {
    uint32_t key;
    if constexpr (kArg) {
      key = uint32_t(value >> 32);
      const uint32_t row = value == 0 ? none : ~uint32_t(value);
      if (wide) {
        arg.at<int64_t>(segment, column) = row;
      } else {
        arg.at<uint32_t>(segment, column) = row;
      }
    } else {
      key = value;
    }
    if (output.data) output.at<Bits>(segment, column) = key == 0 ? empty : order.bits(key);
  }
};

// ---------------------------------------------------------------------------------------------------
// Few cells: each block has them all.

constexpr int kMostCells = 8192;

template <class Bits, int kVector>
__global__ __launch_bounds__(kSegmentThreads) void max_few(const __grid_constant__ Maximum<Bits, false> maximum,
                                                           SegmentView input, SegmentIndices ids, int64_t rows,
                                                           int columns, int segments, int across, int lane_bits,
                                                           uint32_t *all) {
  using Pack = SegmentPack<Bits, kVector>;
  using Word = SegmentPack<std::conditional_t<kVector == 1, Bits, uint32_t>, kVector == 1 ? 1 : sizeof(Pack) / 4>;
  constexpr int kRows = 4;
  __shared__ uint32_t cells[kMostCells];
  for (int c = threadIdx.x; c < segments * columns; c += kSegmentThreads) cells[c] = 0;
  __syncthreads();
  const int groups = kSegmentThreads >> lane_bits;
  const int lane = int(threadIdx.x) & (across - 1);
  for (int64_t first = int64_t(blockIdx.x) * groups * kRows + (int(threadIdx.x) >> lane_bits); first < rows;
       first += int64_t(gridDim.x) * groups * kRows) {
    int64_t segment[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = first + r * groups;
      segment[r] = row < rows ? ids[row] : -1;
      if (uint64_t(segment[r]) >= uint64_t(segments)) segment[r] = -1;
    }
    for (int column = lane * kVector; column < columns; column += across * kVector) {
      Pack pack[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (segment[r] < 0) continue;
        const Bits *from = static_cast<const Bits *>(input.data) + (first + r * groups) * input.row;
        pack[r] = bit_cast<Pack>(*reinterpret_cast<const Word *>(from + column * input.column));
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (segment[r] < 0) continue;
        uint32_t *at = cells + int(segment[r]) * columns + column;
#pragma unroll
        for (int v = 0; v < kVector; ++v) maximum.raise(at + v, maximum.order.key(pack[r].value[v]));
      }
    }
  }
  __syncthreads();
  for (int c = threadIdx.x; c < segments * columns; c += kSegmentThreads) maximum.raise(all + c, cells[c]);
}

template <class Bits>
__global__ __launch_bounds__(kSegmentThreads) void finish_few(const __grid_constant__ Maximum<Bits, false> maximum,
                                                              const uint32_t *all, int columns, int count) {
  const int c = int(blockIdx.x) * kSegmentThreads + threadIdx.x;
  if (c < count) maximum.store(c / columns, c % columns, all[c]);
}

// ---------------------------------------------------------------------------------------------------
// Single columns and more segments than a block has cells for: the rows of a tile are put into buckets,
// neighbouring segments each, then a block takes one bucket of all tiles.

constexpr int kTileThreads = 512;
constexpr int kTileItems = 16;
constexpr int kTile = kTileThreads * kTileItems;
constexpr int kTileBits = 13;
constexpr int kMostBuckets = 256;
// As far as cells suffice: one for each multiprocessor.
constexpr int64_t kBuckets = 128;
constexpr int kBucketThreads = 1024;
static_assert(kTile == 1 << kTileBits && kMostCells == 1 << kTileBits);

// Of a tile's records in the order of buckets: the key, and the cell with, if wanted, the row in the tile.
template <class Bits, bool kArg>
struct Buckets {
  using Place = std::conditional_t<kArg, uint32_t, uint16_t>;

  SegmentBuckets size;
  Bits *keys;
  Place *places;
  uint16_t *bounds;  // where each tile's bucket begins, [buckets + 1][tiles]
};

template <class Bits, bool kArg>
__global__ __launch_bounds__(kTileThreads) void fill_buckets(SegmentOrder<Bits> order,
                                                             const __grid_constant__ Buckets<Bits, kArg> buckets,
                                                             SegmentView input, SegmentIndices ids, int64_t rows,
                                                             int64_t segments) {
  using Place = typename Buckets<Bits, kArg>::Place;
  __shared__ uint32_t staged[kTile];
  __shared__ uint32_t counts[kMostBuckets];
  const int64_t tile = blockIdx.x;
  const int64_t first = tile * kTile + threadIdx.x;
  uint32_t id[kTileItems];
  Bits element[kTileItems];
#pragma unroll
  for (int k = 0; k < kTileItems; ++k) {
    const int64_t row = first + k * kTileThreads;
    int64_t given = -1;
    if (row < rows) {
      given = ids[row];
      element[k] = static_cast<const Bits *>(input.data)[row * input.row];
    }
    id[k] = uint64_t(given) < uint64_t(segments) ? uint32_t(given) : ~uint32_t(0);
  }
  if (threadIdx.x < kMostBuckets) counts[threadIdx.x] = 0;
  __syncthreads();
  uint32_t rank[kTileItems];
#pragma unroll
  for (int k = 0; k < kTileItems; ++k)
    if (id[k] != ~uint32_t(0)) rank[k] = atomicAdd(counts + (id[k] >> buckets.size.cell_bits), 1u);
  __syncthreads();
  // Where buckets begin, in place: each thread adds what is one, two, four, ... before.
  uint32_t begin = threadIdx.x < kMostBuckets ? counts[threadIdx.x] : 0;
  const uint32_t own = begin;
  for (int step = 1; step < kMostBuckets; step *= 2) {
    const uint32_t before = threadIdx.x < kMostBuckets && int(threadIdx.x) >= step ? counts[threadIdx.x - step] : 0;
    __syncthreads();
    begin += before;
    if (threadIdx.x < kMostBuckets) counts[threadIdx.x] = begin;
    __syncthreads();
  }
  const uint32_t total = counts[kMostBuckets - 1];
  __syncthreads();
  if (threadIdx.x < kMostBuckets) counts[threadIdx.x] = begin - own;
  if (int(threadIdx.x) < buckets.size.buckets)
    buckets.bounds[threadIdx.x * buckets.size.tiles + tile] = uint16_t(begin - own);
  if (threadIdx.x == 0) buckets.bounds[buckets.size.buckets * buckets.size.tiles + tile] = uint16_t(total);
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kTileItems; ++k) {
    if (id[k] == ~uint32_t(0)) continue;
    rank[k] += counts[id[k] >> buckets.size.cell_bits];
    staged[rank[k]] = uint32_t(order.key(element[k]));
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < total; i += kTileThreads) buckets.keys[tile * kTile + i] = Bits(staged[i]);
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kTileItems; ++k) {
    if (id[k] == ~uint32_t(0)) continue;
    const uint32_t cell = id[k] & ((1u << buckets.size.cell_bits) - 1);
    staged[rank[k]] = kArg ? cell << kTileBits | uint32_t(k * kTileThreads + threadIdx.x) : cell;
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < total; i += kTileThreads) buckets.places[tile * kTile + i] = Place(staged[i]);
}

template <class Bits, bool kArg>
__global__ __launch_bounds__(kBucketThreads) void max_bucket(const __grid_constant__ Maximum<Bits, kArg> maximum,
                                                             const __grid_constant__ Buckets<Bits, kArg> buckets,
                                                             int64_t segments) {
  using Cell = typename Maximum<Bits, kArg>::Cell;
  extern __shared__ unsigned long long memory[];
  Cell *cells = reinterpret_cast<Cell *>(memory);
  const int count = 1 << buckets.size.cell_bits;
  for (int c = threadIdx.x; c < count; c += kBucketThreads) cells[c] = 0;
  __syncthreads();
  const int64_t tiles = buckets.size.tiles;
  const uint16_t *begins = buckets.bounds + blockIdx.x * tiles;
  const int lane = int(threadIdx.x) & 31;
  for (int64_t first = threadIdx.x & ~31u; first < tiles; first += kBucketThreads) {
    // A tile's bounds are in each lane; the lanes read the records of one tile after the other.
    const bool mine = first + lane < tiles;
    const int own_begin = mine ? begins[first + lane] : 0;
    const int own_end = mine ? begins[tiles + first + lane] : 0;
    const int here = int(min(int64_t(32), tiles - first));
    constexpr int kAtOnce = 4;
    for (int t = 0; t < here; t += kAtOnce) {
      uint32_t key[kAtOnce][2];
      uint32_t place[kAtOnce][2];
      int begin[kAtOnce];
      int end[kAtOnce];
#pragma unroll
      for (int a = 0; a < kAtOnce; ++a) {
        begin[a] = __shfl_sync(~0u, own_begin, (t + a) & 31) + lane;
        end[a] = t + a < here ? __shfl_sync(~0u, own_end, (t + a) & 31) : 0;
        const int64_t at = (first + t + a) * kTile + begin[a];
#pragma unroll
        for (int p = 0; p < 2; ++p) {
          if (begin[a] + 32 * p >= end[a]) continue;
          key[a][p] = buckets.keys[at + 32 * p];
          place[a][p] = buckets.places[at + 32 * p];
        }
      }
#pragma unroll
      for (int a = 0; a < kAtOnce; ++a) {
        const int64_t tile = first + t + a;
        const auto take = [&](uint32_t key, uint32_t place) {
          if (sizeof(Bits) < 4 && key == Bits(~Bits(0))) key = ~uint32_t(0);
          const uint32_t row = kArg ? uint32_t(tile * kTile) + (place & (kTile - 1)) : 0;
          maximum.raise(cells + (kArg ? place >> kTileBits : place), maximum.cell(key, row));
        };
#pragma unroll
        for (int p = 0; p < 2; ++p)
          if (begin[a] + 32 * p < end[a]) take(key[a][p], place[a][p]);
        for (int i = begin[a] + 64; i < end[a]; i += 32)
          take(buckets.keys[tile * kTile + i], buckets.places[tile * kTile + i]);
      }
    }
  }
  __syncthreads();
  const int64_t segment = int64_t(blockIdx.x) << buckets.size.cell_bits;
  for (int c = threadIdx.x; c < count && segment + c < segments; c += kBucketThreads)
    maximum.store(segment + c, 0, cells[c]);
}

template <class Bits, bool kArg>
Maximum<Bits, kArg> maximum_of(const SegmentForward &call) {
  Maximum<Bits, kArg> maximum = {};
  maximum.order = segment_order<Bits>(call.problem.dtype, call.problem.kind == SegmentKind::min);
  maximum.output = call.output;
  maximum.arg = call.arg;
  maximum.wide = call.problem.wide_index;
  maximum.none = uint32_t(call.problem.rows);
  maximum.empty = Bits(call.empty_bits);
  return maximum;
}

template <class Bits, int kVector>
void launch_few(const SegmentForward &call, uint32_t *all, Stream stream) {
  const SegmentProblem &problem = call.problem;
  const Maximum<Bits, false> maximum = maximum_of<Bits, false>(call);
  const int columns = int(problem.columns);
  const int count = int(problem.segments) * columns;
  const int across = int(std::bit_ceil(uint64_t(std::min<int64_t>(ceil_div(columns, kVector), 32))));
  const int lane_bits = std::countr_zero(unsigned(across));
  constexpr int64_t kBlocks = 132 * 6;
  const int64_t blocks = std::min(kBlocks, ceil_div(problem.rows, int64_t(kSegmentThreads >> lane_bits) * 4));
  check_cuda(cudaMemsetAsync(all, 0, size_t(count) * sizeof(uint32_t), static_cast<cudaStream_t>(stream)),
             "cudaMemsetAsync");
  launch(max_few<Bits, kVector>, {blocks, kSegmentThreads}, stream, maximum, call.input, call.ids, problem.rows,
         columns, int(problem.segments), across, lane_bits, all);
  launch(finish_few<Bits>, {ceil_div(count, kSegmentThreads), kSegmentThreads}, stream, maximum, all, columns, count);
}

template <class Bits, bool kArg>
void launch_buckets(const SegmentForward &call, SegmentSpace &space, Stream stream) {
  using Cell = typename Maximum<Bits, kArg>::Cell;
  const SegmentProblem &problem = call.problem;
  const Maximum<Bits, kArg> maximum = maximum_of<Bits, kArg>(call);
  const Buckets<Bits, kArg> buckets = {space.buckets, reinterpret_cast<Bits *>(space.keys[0]),
                                       reinterpret_cast<typename Buckets<Bits, kArg>::Place *>(space.values[0]),
                                       space.bounds};
  launch(fill_buckets<Bits, kArg>, {space.buckets.tiles, kTileThreads}, stream, maximum.order, buckets, call.input,
         call.ids, problem.rows, problem.segments);
  const size_t shared = sizeof(Cell) << space.buckets.cell_bits;
  if (shared > 48 * 1024)
    check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void *>(max_bucket<Bits, kArg>),
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)),
               "cudaFuncSetAttribute");
  launch(max_bucket<Bits, kArg>, {space.buckets.buckets, kBucketThreads, shared}, stream, maximum, buckets,
         problem.segments);
}

}  // namespace

SegmentPath segment_path(const SegmentProblem &problem, bool with_arg) {
  const bool narrow_float = problem.dtype.bits < 64 && problem.dtype.code != kDLInt && problem.dtype.code != kDLUInt;
  // Few rows to a cell are better sorted.
  constexpr int64_t kFewestRows = 1 << 14;
  if (problem.ids != SegmentIds::unsorted || !problem.extreme() || problem.even || !narrow_float ||
      problem.rows < kFewestRows)
    return SegmentPath::chunks;
  if (!with_arg && problem.segments <= kMostCells && problem.columns <= kMostCells &&
      problem.segments * problem.columns <= kMostCells)
    return SegmentPath::cells;
  // A bucket is one multiprocessor's work.
  if (problem.columns == 1 && problem.rows >= 4 * problem.segments && problem.rows <= kSegmentMostRows &&
      problem.segments >= kBuckets && problem.segments <= int64_t(kMostBuckets) * kMostCells)
    return SegmentPath::buckets;
  return SegmentPath::chunks;
}

void segment_take_cells(Workspace &workspace, const SegmentProblem &problem, SegmentPath path, bool with_arg,
                        SegmentSpace &space) {
  if (path == SegmentPath::cells) {
    space.keys[0] = workspace.take<uint32_t>(problem.segments * problem.columns);
    return;
  }
  space.buckets.cell_bits =
      std::min(kTileBits, int(std::bit_width(uint64_t(ceil_div(problem.segments, kBuckets) - 1))));
  space.buckets.buckets = int(ceil_div(problem.segments, int64_t(1) << space.buckets.cell_bits));
  space.buckets.tiles = ceil_div(problem.rows, kTile);
  const int64_t records = space.buckets.tiles * kTile;
  space.keys[0] = reinterpret_cast<uint32_t *>(workspace.take<std::byte>(records * problem.dtype.bits / 8));
  space.values[0] = reinterpret_cast<uint32_t *>(workspace.take<std::byte>(records * (with_arg ? 4 : 2)));
  space.bounds = workspace.take<uint16_t>((space.buckets.buckets + 1) * space.buckets.tiles);
}

void segment_max_cells(const SegmentForward &call, SegmentSpace &space, Stream stream) {
  constexpr int kVectorBytes = 16;
  const auto run = [&](auto tag) {
    using Bits = typename decltype(tag)::type;
    constexpr int kVector = kVectorBytes / sizeof(Bits);
    if (space.buckets.tiles == 0) {
      if (call.problem.columns % kVector == 0 && segment_aligned(call.input, kVector, sizeof(Bits))) {
        launch_few<Bits, kVector>(call, space.keys[0], stream);
      } else {
        launch_few<Bits, 1>(call, space.keys[0], stream);
      }
    } else if (call.arg.data) {
      launch_buckets<Bits, true>(call, space, stream);
    } else {
      launch_buckets<Bits, false>(call, space, stream);
    }
  };
  if (call.problem.dtype.bits == 32) {
    run(TypeTag<uint32_t>{});
  } else {
    run(TypeTag<uint16_t>{});
  }
}

}  // namespace baracuda
