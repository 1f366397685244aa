// SPDX-License-Identifier: Apache-2.0
// Few long rows: every row is cut into tiles, spread over the whole card, in one pass over memory.
//
// Each block takes tiles by ticket. It holds a tile in registers, publishes its aggregate, and only
// then finishes the tile that it took before, whose prefix has had the time to come. One
// warp in the whole grid, the scanner, reads the aggregates, folds them in batches of 128 in a fixed
// order and publishes each tile's prefix. Nothing depends on timing but when, never what.
//
// Progress: tickets are handed out in order and the scanner has the first. A tile waits for the
// aggregates of the tiles before it, and whoever drew them publishes them without waiting. The
// scanner publishes what the leading ready tiles allow and doesn't wait for whole batches.
#pragma once

#include "scan/scan.cuh"

namespace baracuda::scan {

// A 32-bit word beside a mark that it was written. Each is stored and loaded whole, so that no
// fences are needed. The memory is zeroed before the kernel.
__device__ __forceinline__ void put_word(uint64_t *to, uint32_t value, uint32_t mark) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(uint64_t(mark) << 32 | value) : "memory");
}
__device__ __forceinline__ uint64_t get_word(const uint64_t *from) {
  uint64_t word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  return word;
}
template <class V>
__device__ __forceinline__ void publish(uint64_t *to, const V &value, uint32_t mark) {
  const Words<V> words = to_words(value);
#pragma unroll
  for (int i = 0; i < Words<V>::count; ++i) put_word(to + i, words.word[i], mark);
}
template <class V>
__device__ __forceinline__ bool receive(const uint64_t *from, V &value, uint32_t mark) {
  Words<V> words;
  bool ready = true;
#pragma unroll
  for (int i = 0; i < Words<V>::count; ++i) {
    const uint64_t word = get_word(from + i);
    ready = ready && uint32_t(word >> 32) == mark;
    words.word[i] = uint32_t(word);
  }
  value = from_words<V>(words);
  return ready;
}
template <class V>
__device__ __forceinline__ V await(const uint64_t *from, uint32_t mark) {
  V value;
  while (!receive(from, value, mark)) __nanosleep(20);
  return value;
}

constexpr int kScannerTiles = 4;  // of a lane
constexpr uint32_t kReady = 1;

struct LongTiles {
  uint32_t total;
  uint32_t per_row;
  uint32_t *ticket;
  uint64_t *aggregates;
  uint64_t *prefixes;
};

template <class Op>
__device__ __forceinline__ void scanner(const Op &op, const LongTiles &tiles, int lane) {
  using Map = typename Op::Map;
  using Value = typename Op::Value;
  constexpr size_t kMapWords = Words<Map>::count;
  constexpr size_t kValueWords = Words<Value>::count;
  constexpr uint32_t kBatch = kWarp * kScannerTiles;
  Value carry = op.start();
  for (uint32_t base = 0; base < tiles.total; base += kBatch) {
    const uint32_t count = min(kBatch, tiles.total - base);
    Map map[kScannerTiles];
    bool have[kScannerTiles];
    bool head[kScannerTiles];  // a row begins here
#pragma unroll
    for (int q = 0; q < kScannerTiles; ++q) {
      have[q] = false;
      head[q] = (base + lane * kScannerTiles + q) % tiles.per_row == 0;
      map[q] = op.identity();
    }
    uint32_t published = 0;
    while (published < count) {
      int leading = 0;
      Map got[kScannerTiles];
      bool ready[kScannerTiles];
#pragma unroll
      for (int q = 0; q < kScannerTiles; ++q) {
        const uint32_t index = lane * kScannerTiles + q;
        ready[q] = false;
        if (!have[q] && index < count)
          ready[q] = receive(tiles.aggregates + (base + index) * kMapWords, got[q], kReady);
      }
#pragma unroll
      for (int q = 0; q < kScannerTiles; ++q) {
        if (ready[q]) {
          map[q] = got[q];
          have[q] = true;
        }
        if (have[q] && leading == q) leading = q + 1;
      }
      const uint32_t full = __ballot_sync(kAll, leading == kScannerTiles);
      const int lanes = full == kAll ? kWarp : __ffs(int(~full)) - 1;
      const int rest = __shfl_sync(kAll, leading, lanes & (kWarp - 1));
      const uint32_t reached = lanes == kWarp ? kBatch : uint32_t(lanes * kScannerTiles + rest);
      if (reached <= published) continue;
      // Tiles that aren't reached count as the identity; what comes before them doesn't change.
      Map folded = op.identity();
      uint32_t restarted = 0;
#pragma unroll
      for (int q = 0; q < kScannerTiles; ++q) {
        if (lane * kScannerTiles + q >= reached) continue;
        folded = head[q] ? map[q] : op.combine(folded, map[q]);
        restarted |= head[q];
      }
#pragma unroll
      for (int distance = 1; distance < kWarp; distance *= 2) {
        const Map left = shuffle_up(folded, distance);
        const uint32_t left_restarted = __shfl_up_sync(kAll, restarted, distance);
        if (lane >= distance) {
          if (!restarted) folded = op.combine(left, folded);
          restarted |= left_restarted;
        }
      }
      Map before = shuffle_up(folded, 1);
      uint32_t before_restarted = __shfl_up_sync(kAll, restarted, 1);
      if (lane == 0) {
        before = op.identity();
        before_restarted = 0;
      }
#pragma unroll
      for (int q = 0; q < kScannerTiles; ++q) {
        const uint32_t index = lane * kScannerTiles + q;
        if (index >= reached) continue;
        if (index >= published && !head[q])
          publish(tiles.prefixes + (base + index) * kValueWords,
                  Value(op.apply(before, before_restarted ? op.start() : carry)), kReady);
        before = head[q] ? map[q] : op.combine(before, map[q]);
        before_restarted |= head[q];
      }
      published = reached;
      if (published == count) {
        const Map all = shuffle(folded, kWarp - 1);
        const uint32_t all_restarted = __shfl_sync(kAll, restarted, kWarp - 1);
        carry = op.apply(all, all_restarted ? op.start() : carry);
      }
    }
  }
}

// The first tile of a row takes the row's initial value into its aggregate.
template <class Op>
__device__ __forceinline__ typename Op::Map with_initial(const Op &op, const Geometry &g, typename Op::Map map,
                                                         int64_t row) {
  if constexpr (Op::kInitial) map.b = op.apply(map, initial_value(op, g, row));
  return map;
}

template <class Op, int kRun, int kWarps, int kBlocks>
__global__ void __launch_bounds__(kWarps *kWarp, kBlocks)
    scan_long_rows(const __grid_constant__ Op op, const __grid_constant__ Geometry g,
                   const __grid_constant__ Accesses access, const __grid_constant__ LongTiles tiles) {
  using Map = typename Op::Map;
  using Value = typename Op::Value;
  using Tile = Share<Op, kRun>;
  using Rows = typename Tile::Rows;
  extern __shared__ __align__(16) std::byte stages[];
  __shared__ Map totals[kWarps];
  __shared__ Value prefix;
  __shared__ uint32_t ticket;
  const int lane = int(threadIdx.x) % kWarp;
  const int warp = int(threadIdx.x) / kWarp;
  std::byte *stage = stages + warp * Tile::kStageBytes;
  if (threadIdx.x == 0) ticket = atomicAdd(tiles.ticket, 1u);
  __syncthreads();
  if (ticket == 0) {
    if (warp == 0) scanner(op, tiles, lane);
    return;
  }
  const auto row_of = [&](uint32_t tile) { return int64_t(tile / tiles.per_row); };
  const auto place_of = [&](uint32_t tile) { return tile % tiles.per_row; };
  const auto slots_of = [&](uint32_t tile) {
    return Tile::one_row(g, row_of(tile), (int64_t(place_of(tile)) * kWarps + warp) * Tile::kItems);
  };
  Tile held;
  Map before = op.identity();  // the lane's run, within the held tile
  uint32_t held_tile = tiles.total;
  for (;;) {
    // A ticket is drawn as late as can be: whoever draws a later one waits for this tile's aggregate.
    const uint32_t tile = ticket - 1;
    const bool more = tile < tiles.total;
    const bool holds = held_tile < tiles.total;
    if (!more && !holds) return;
    Tile next;
    Map next_before = op.identity();
    if (more) {
      const Slots slots = slots_of(tile);
      Rows rows;
      Tile::rows_of(g, slots, lane, rows);
      next.load(op, g, access, slots, rows, stage, lane);
      const Map inclusive = next.reduce(op, g, slots, lane);
      next_before = exclusive_of(op, inclusive, lane);
      if (lane == kWarp - 1) totals[warp] = inclusive;
    }
    __syncthreads();
    if (more) {
      Map others = lane < kWarps ? totals[lane] : op.identity();
      others = warp_scan<kWarps>(op, others, lane);
      if (warp == 0 && lane == kWarps - 1)
        publish(tiles.aggregates + size_t(tile) * Words<Map>::count,
                place_of(tile) == 0 ? with_initial(op, g, others, row_of(tile)) : others, kReady);
      const Map left = shuffle(others, warp > 0 ? warp - 1 : 0);
      if (warp > 0) next_before = op.combine(left, next_before);
    }
    if (holds && threadIdx.x == kWarp)
      prefix = place_of(held_tile) == 0
                   ? initial_value(op, g, row_of(held_tile))
                   : await<Value>(tiles.prefixes + size_t(held_tile) * Words<Value>::count, kReady);
    __syncthreads();
    uint32_t drawn = 0;
    if (threadIdx.x == 0) drawn = more ? atomicAdd(tiles.ticket, 1u) : tiles.total + 1;
    if (holds) {
      const Slots slots = slots_of(held_tile);
      Rows rows;
      Tile::rows_of(g, slots, lane, rows);
      held.finish(op, g, access, slots, rows, op.apply(before, prefix), stage, lane);
    }
    held = next;
    before = next_before;
    held_tile = more ? tile : tiles.total;
    if (threadIdx.x == 0) ticket = drawn;
    __syncthreads();
  }
}

}  // namespace baracuda::scan
