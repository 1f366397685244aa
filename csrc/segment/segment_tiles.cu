// SPDX-License-Identifier: Apache-2.0
// Maxima and minima of sorted ids' rows that lie one behind the other: a warp goes through a part of them in tiles,
// which the copy engine brings. What begins and ends in a tile is a group of lanes' each; the rows of what goes on are
// shared by all groups. Segments that several warps have are joined in the end, first those of a block.
#include "segment/segment_lanes.cuh"

namespace baracuda {
namespace {

constexpr int kWords = 4;  // of a lane: one load
constexpr int kTileWarps = 8;
constexpr int kTileThreads = kTileWarps * 32;
// Of a multiprocessor. While some wait for their tiles, others are at work: more tiles for fewer warps were slower
// where segments are short.
constexpr int kTileBlocks = 4;
constexpr int kTileBytes = 4096;  // at most; a row for each lane of a warp
constexpr int kTileMostParts = int(kMultiprocessors) * kTileBlocks;

using Pack = SegmentPack<uint32_t, kWords>;
using TileKey = SegmentTileKey;

// Of a block, long stretches of segments without rows that it leaves to all blocks together.
constexpr int kTileGaps = 4;

// Columns and strides count words.
struct TileCall {
  SegmentView input;
  SegmentIndices ids;
  int64_t rows;
  int64_t segments;
  int64_t part;  // rows of a warp
  int tile;      // rows
  int columns;
  int across;
  int lane_bits;
  SegmentTiles space;

  __device__ Pack *state(int part, bool last, int column) const {
    return reinterpret_cast<Pack *>(space.states) + ((2 * int64_t(part) + last) * columns + column) / kWords;
  }
};

int tile_rows(const SegmentProblem &problem) {
  return int(std::min<int64_t>(kTileBytes / (problem.columns * problem.dtype.bits / 8), 32));
}

template <SegmentLanes kLanes>
__device__ __forceinline__ void join_words(const SegmentFloatMaxima<kLanes> &op, Pack &to, const Pack &from) {
#pragma unroll
  for (int w = 0; w < kWords; ++w) op.join(to.value[w], from.value[w]);
}

template <SegmentLanes kLanes, bool kMinimum>
__global__ __launch_bounds__(kTileThreads,
                             kTileBlocks) void reduce_tiles(const __grid_constant__ TileCall call,
                                                            const __grid_constant__ SegmentFloatMaxima<kLanes> op) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int kRows = 4;  // at once
  constexpr TileKey kMostAlone = 32;
  constexpr int kTilePacks = kTileBytes / sizeof(Pack);
  extern __shared__ __align__(16) uint64_t segment_memory[];
  __shared__ uint64_t gates[kTileWarps];
  // Of warps, what SegmentTileEnds has of blocks.
  __shared__ TileKey starts[kTileWarps];
  __shared__ bool passed[kTileWarps];
  __shared__ bool begins_before;
  __shared__ int gaps;
  __shared__ unsigned long long left;
  const int warp = int(threadIdx.x) / 32;
  const int own = int(threadIdx.x) & 31;
  const int64_t begin = (int64_t(blockIdx.x) * kTileWarps + warp) * call.part;
  const int rows = int(max(min(call.rows - begin, call.part), int64_t(0)));
  const int tiles = (rows + call.tile - 1) / call.tile;
  const int row_bytes = call.columns * 4;
  Pack *packs = reinterpret_cast<Pack *>(segment_memory) + warp * kTilePacks;
  const auto fetch = [&](int tile) {
    if (tile >= tiles) return;
    const uint32_t bytes = uint32_t(min(rows - tile * call.tile, call.tile) * row_bytes);
    arrive_and_announce(&gates[warp], bytes);
    bulk_load(reinterpret_cast<std::byte *>(packs),
              static_cast<const std::byte *>(call.input.data) + (begin + tile * call.tile) * row_bytes, bytes,
              &gates[warp]);
  };
  if (own == 0) {
    set_gate(&gates[warp], 1);
    show_copy_engine();
    fetch(0);
  }
  int64_t id = rows > 0 ? call.ids[begin + min(own, rows - 1)] : 0;
  const int64_t id_before = begin > 0 && rows > 0 ? call.ids[begin - 1] : -1;
  const int64_t id_behind = begin + rows < call.rows ? call.ids[begin + rows] : INT64_MAX;
  let_next_kernel_start();
  if (threadIdx.x == 0) {
    gaps = 0;
    left = uint64_t(call.segments);
    begins_before = false;
  }
  __syncthreads();

  const int groups = 32 >> call.lane_bits;
  const int group = own >> call.lane_bits;
  const int lane = own & (call.across - 1);
  const int column = lane * kWords;
  const bool has_column = column < call.columns;
  const int row_packs = call.columns / kWords;
  const TileKey segments = TileKey(call.segments);
  const auto forget = [&](Pack &state) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) state.value[w] = op.identity();
  };
  const int own_bytes = warp * kTileBytes + min(lane, row_packs - 1) * int(sizeof(Pack));
  // Rows that are as many apart; the last one may be added again.
  const auto add_rows = [&](Pack &state, int from, int to, int apart) {
    const int step = apart * row_bytes;
    const int last = own_bytes + (to - 1) * row_bytes;
    for (int at = own_bytes + from * row_bytes; at <= last; at += kRows * step) {
      Pack pack[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        pack[r] = *reinterpret_cast<const Pack *>(reinterpret_cast<const std::byte *>(segment_memory) +
                                                  min(at + r * step, last));
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if constexpr (kMinimum) {
#pragma unroll
          for (int w = 0; w < kWords; ++w) op.add(state.value[w], pack[r].value[w], 0);
        } else {
          join_words(op, state, pack[r]);
        }
      }
    }
  };
  const auto key_of = [&](int64_t id) { return id < 0 ? 0 : TileKey(min(id, call.segments) + 1); };
  const auto counts = [&](TileKey key) { return key - 1 < segments; };
  const auto join_groups = [&](Pack &state) {
    for (int apart = call.across; apart < 32; apart *= 2) join_words(op, state, segment_shuffle(state, apart));
  };
  const auto store = [&](TileKey key, const Pack &state) {
    if (has_column) op.template store<kWords>(int64_t(key) - 1, column, 1, state.value);
  };
  // Segments from one on to another that have no rows. Where ids rise again and again, where they must not fall, what
  // is passed for more than all segments is forgotten.
  const auto fill = [&](TileKey from, TileKey to) {
    if (to <= from) return;
    if (to - from > kMostAlone) {
      bool here = false;
      if (own == 0) {
        const unsigned long long before = atomicAdd(&left, -uint64_t(to - from));
        if (before <= uint64_t(segments) && before >= to - from) {
          const int at = atomicAdd(&gaps, 1);
          here = at >= kTileGaps;
          if (!here) call.space.gaps[int64_t(blockIdx.x) * kTileGaps + at] = {from, to};
        }
      }
      if (!__shfl_sync(~0u, here, 0)) return;
    }
    const Pack none = {};
    for (TileKey segment = from + group; segment < to; segment += groups)
      if (has_column) op.template store<kWords>(segment, column, 0, none.value);
  };

  // The run that is open, of which each group has some rows.
  Pack open;
  forget(open);
  TileKey key_before = key_of(id_before);
  bool has_rows = false;
  bool from_before = true;
  Pack head;  // of the segment that began before the warp's rows
  bool has_head = false;
  for (int tile = 0; tile < tiles; ++tile) {
    const int count = min(rows - tile * call.tile, call.tile);
    const TileKey key = key_of(id);
    TileKey before = __shfl_up_sync(~0u, key, 1);
    if (own == 0) before = key_before;
    const uint32_t rises = __ballot_sync(~0u, own < count && key != before);
    const uint32_t skips = __ballot_sync(~0u, own < count && key > before + 1);
    if (tile + 1 < tiles) id = call.ids[begin + min((tile + 1) * call.tile + own, rows - 1)];
    pass(&gates[warp], uint32_t(tile) & 1);
    const int first = rises ? __ffs(int(rises)) - 1 : count;
    add_rows(open, group, first, groups);
    if (rises) {
      join_groups(open);
      if (from_before && (has_rows || first > 0) && counts(key_before)) {
        head = open;
        has_head = true;
      }
      // Runs that end in the tile, a group's each, the open one first.
      uint32_t mine = rises;
      for (int g = 0; g < group; ++g) mine &= mine - 1;
      for (int base = 0; base < __popc(rises); base += groups) {
        const bool is_open = base + group == 0;
        const int stop = __ffs(int(mine)) - 1;
        const int start = is_open ? stop : 31 - __clz(int(rises & ((1u << (stop & 31)) - 1)));
        const TileKey other = __shfl_sync(~0u, key, start);
        const TileKey its = is_open ? key_before : other;
        if (mine && counts(its) && !(is_open && from_before)) {
          if (!is_open) forget(open);
          add_rows(open, start, stop, 1);
          store(its, open);
        }
        for (int g = 0; g < groups; ++g) mine &= mine - 1;
      }
      from_before = false;
      forget(open);
      add_rows(open, 31 - __clz(int(rises)) + group, count, groups);
      for (uint32_t some = skips; some; some &= some - 1) {
        const int at = __ffs(int(some)) - 1;
        fill(__shfl_sync(~0u, before, at), min(__shfl_sync(~0u, key, at) - 1, segments));
      }
    }
    has_rows = true;
    key_before = __shfl_sync(~0u, key, count - 1);
    __syncwarp();
    if (own == 0) fetch(tile + 1);
  }
  bool tail = false;
  if (has_rows) {
    const bool at_end = begin + rows == call.rows;
    join_groups(open);
    if (counts(key_before)) {
      tail = !at_end && key_of(id_behind) == key_before;
      if (from_before) {
        head = open;
        has_head = true;
      } else if (!tail && group == 0) {
        store(key_before, open);
      }
    }
    if (at_end) fill(key_before, segments);
  }
  // Where tiles were.
  if (group == 0 && has_head) packs[lane] = head;
  if (own == 0) {
    starts[warp] = tail && !from_before ? key_before : 0;
    passed[warp] = tail && from_before;
    if (warp == 0) begins_before = has_head;
  }
  __syncthreads();
  // What one warp has of a segment and others behind it, in one state; whether it goes on behind the block's rows.
  const auto follow = [&](Pack &state, int from) {
    for (int w = from; w < kTileWarps; ++w) {
      join_words(op, state, packs[(w - warp) * kTilePacks + lane]);
      if (!passed[w]) return false;
    }
    return true;
  };
  if (group > 0) return;
  if (starts[warp] != 0) {
    if (!follow(open, warp + 1)) {
      store(key_before, open);
    } else if (has_column) {
      *call.state(int(blockIdx.x), true, column) = open;
    }
  }
  if (warp > 0) return;
  bool through = false;
  if (begins_before) {
    through = passed[0] && follow(head, 1);
    if (has_column) *call.state(int(blockIdx.x), false, column) = head;
  }
  if (lane > 0) return;
  TileKey goes_on = 0;
  for (int w = 0; w < kTileWarps; ++w) {
    if (starts[w] != 0) {
      goes_on = starts[w];
    } else if (!passed[w]) {
      goes_on = 0;
    }
  }
  call.space.ends[blockIdx.x] = {goes_on, through, min(gaps, kTileGaps)};
#endif
}

// Joins the parts of segments that begin in one block's rows and end in another's: as many lanes side by side as have a
// row, and the block where there are many. And fills the gaps.
constexpr int kJoinThreads = 256;
constexpr int kJoinBlocks = kMultiprocessors;
static_assert(kTileMostParts <= kJoinBlocks * kJoinThreads / 32);
template <SegmentLanes kLanes>
__global__ __launch_bounds__(kJoinThreads) void join_tiles(const __grid_constant__ TileCall call,
                                                           const __grid_constant__ SegmentFloatMaxima<kLanes> op) {
  constexpr int kAlone = 32;
  __shared__ uint32_t passed[(kTileMostParts + 31) / 32];
  __shared__ Pack states[kJoinThreads];
  __shared__ int longs[kJoinThreads];
  __shared__ int found;
  __shared__ uint16_t gappy[kTileMostParts];
  __shared__ int gappy_count;
  wait_for_earlier_work();
  const int thread = int(threadIdx.x);
  const int groups = kJoinThreads >> call.lane_bits;
  const int group = thread >> call.lane_bits;
  const int lane = thread & (call.across - 1);
  const int column = lane * kWords;
  const bool has_column = column < call.columns;
  if (thread == 0) found = gappy_count = 0;
  __syncthreads();
  const int words = (call.space.parts + 31) / 32;
  for (int p = thread; p < 32 * words; p += kJoinThreads) {
    SegmentTileEnds ends = {};
    if (p < call.space.parts) ends = call.space.ends[p];
    if (ends.gaps > 0) gappy[atomicAdd(&gappy_count, 1)] = uint16_t(p);
    const uint32_t all = __ballot_sync(~0u, ends.passed);
    if ((thread & 31) == 0) passed[p / 32] = all;
  }
  __syncthreads();
  // The first from there on that isn't passed: the last one isn't.
  const auto end_of = [&](int at) {
    uint32_t not_passed = ~passed[at / 32] & ~0u << (at & 31);
    int word = at / 32;
    while (not_passed == 0) not_passed = ~passed[++word];
    return min(word * 32 + __ffs(int(not_passed)) - 1, call.space.parts - 1);
  };
  const auto gather = [&](int first, int end, int from, int step, Pack &most) {
    constexpr int kAtOnce = 8;
#pragma unroll
    for (int w = 0; w < kWords; ++w) most.value[w] = op.identity();
    for (int at = first + from; has_column && at <= end; at += kAtOnce * step) {
      Pack some[kAtOnce];
#pragma unroll
      for (int a = 0; a < kAtOnce; ++a)
        if (at + a * step <= end) some[a] = *call.state(at + a * step, at + a * step == first, column);
#pragma unroll
      for (int a = 0; a < kAtOnce; ++a)
        if (at + a * step <= end) join_words(op, most, some[a]);
    }
  };
  const int part = int(blockIdx.x) + group * int(gridDim.x);
  const TileKey key = part < call.space.parts ? call.space.ends[part].starts : 0;
  if (key != 0) {
    const int end = end_of(part + 1);
    if (end - part > kAlone) {
      if (lane == 0) longs[atomicAdd(&found, 1)] = part;
    } else {
      Pack most;
      gather(part, end, 0, 1, most);
      if (has_column) op.template store<kWords>(int64_t(key) - 1, column, 1, most.value);
    }
  }
  __syncthreads();
  for (int l = 0; l < found; ++l) {
    Pack most;
    gather(longs[l], end_of(longs[l] + 1), group, groups, most);
    states[thread] = most;
    for (int half = groups / 2; half > 0; half /= 2) {
      __syncthreads();
      if (group < half) join_words(op, states[thread], states[thread + (half << call.lane_bits)]);
    }
    if (group == 0 && has_column)
      op.template store<kWords>(int64_t(call.space.ends[longs[l]].starts) - 1, column, 1, states[thread].value);
    __syncthreads();
  }
  for (int g = 0; g < gappy_count; ++g) {
    const int part = gappy[g];
    for (int i = 0; i < call.space.ends[part].gaps; ++i) {
      const SegmentTileGap gap = call.space.gaps[part * kTileGaps + i];
      const Pack none = {};
      for (int64_t at = int64_t(gap.from) + int(blockIdx.x) * groups + group; at < gap.to;
           at += int(gridDim.x) * groups)
        if (has_column) op.template store<kWords>(at, column, 0, none.value);
    }
  }
}

template <SegmentLanes kLanes>
void run(const SegmentForward &call, uint32_t infinity, uint32_t nan, const SegmentTiles &space, Stream stream) {
  const SegmentProblem &problem = call.problem;
  const int each = 32 / problem.dtype.bits;
  TileCall own = {};
  own.input = call.input;
  own.ids = call.ids;
  own.rows = problem.rows;
  own.segments = problem.segments;
  own.part = space.part;
  own.tile = tile_rows(problem);
  own.columns = int(problem.columns) / each;
  own.across = segment_across(own.columns, kWords);
  own.lane_bits = std::countr_zero(unsigned(own.across));
  own.space = space;
  const auto op =
      segment_float_maxima<kLanes>(problem.kind == SegmentKind::min, infinity, nan, uint32_t(call.empty_bits),
                                   SegmentView{call.output.data, call.output.row / each, 1});
  constexpr size_t kShared = kTileWarps * kTileBytes;
  const auto kernel = problem.kind == SegmentKind::min ? reduce_tiles<kLanes, true> : reduce_tiles<kLanes, false>;
  launch(kernel, {space.parts, kTileThreads, kShared}, stream, own, op);
  launch(join_tiles<kLanes>, {std::min(space.parts, kJoinBlocks), kJoinThreads, 0, true}, stream, own, op);
}

}  // namespace

// Short rows of short segments, and segments of hardly a row each, were slower than where lanes look for their own.
bool segment_has_tiles(const SegmentProblem &problem) {
  constexpr int64_t kFewestRows = 1 << 14;
  constexpr int64_t kFewestBytes = 64;
  constexpr int64_t kMostBytes = 32 * 16;
  const DLDataType dtype = problem.dtype;
  const int64_t bytes = problem.columns * dtype.bits / 8;
  const int64_t fewest_of_each = bytes < 128 ? 32 : 2;
  return problem.ids == SegmentIds::sorted && problem.extreme() &&
         (dtype == DTypeOf<bfloat16>::value || dtype == DTypeOf<float16>::value) && bytes % 16 == 0 &&
         bytes >= kFewestBytes && bytes <= kMostBytes && problem.rows >= kFewestRows &&
         problem.rows >= fewest_of_each * problem.segments && problem.segments > 0 &&
         problem.segments <= kSegmentMostRows && DeviceGuard::kernels_can_wait();
}

void segment_take_tiles(Workspace &workspace, const SegmentProblem &problem, SegmentTiles &tiles) {
  tiles.part = std::max(ceil_div(problem.rows, kTileMostParts * kTileWarps), int64_t(tile_rows(problem)));
  tiles.parts = int(ceil_div(problem.rows, tiles.part * kTileWarps));
  tiles.ends = workspace.take<SegmentTileEnds>(tiles.parts);
  tiles.gaps = workspace.take<SegmentTileGap>(tiles.parts * kTileGaps);
  tiles.states = workspace.take<std::byte>(2 * tiles.parts * problem.columns * (problem.dtype.bits / 8));
}

bool segment_reduce_tiles(const SegmentForward &call, const SegmentTiles &tiles, Stream stream) {
  const SegmentProblem &problem = call.problem;
  const int bytes = problem.dtype.bits / 8;
  const bool whole = segment_aligned(call.input, 16 / bytes, bytes) && call.input.row == problem.columns;
  if (!whole || !segment_aligned(call.output, 16 / bytes, bytes)) return false;
  if (problem.dtype == DTypeOf<bfloat16>::value) {
    run<SegmentLanes::bfloat16>(call, 0x7f80u, 0x7fc0u, tiles, stream);
  } else {
    run<SegmentLanes::float16>(call, 0x7c00u, 0x7e00u, tiles, stream);
  }
  return true;
}

}  // namespace baracuda
