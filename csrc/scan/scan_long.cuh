// SPDX-License-Identifier: Apache-2.0
// Few long rows: every row is cut into tiles, spread over the whole card, in one pass over memory.
//
// Each block takes tiles by ticket. It holds a tile in registers, publishes its aggregate, and only
// then finishes the tile that it took before, whose prefix has had the time to come. One
// block in the whole grid, the scanner, reads the aggregates, folds them in batches of 32 in a fixed
// order and publishes each tile's prefix. Its warps take batches in turn: each folds its own as the
// aggregates come, and only the value after a batch goes from warp to warp. Nothing depends on timing
// but when, never what.
//
// Progress: tickets are handed out in order and the scanner has the first. A tile waits for the
// aggregates of the tiles before it, and whoever drew them publishes them without waiting. The
// scanner publishes what the leading ready tiles allow and doesn't wait for whole batches.
#pragma once

#include "scan/scan_share.cuh"

namespace baracuda::scan {

// A value's 32-bit words, each beside a mark that it was written. Each such pair is stored and loaded whole, so that no
// fences are needed; two go by one instruction where a value has an even number, and begins at a multiple of sixteen
// bytes therefore, but one by one where every lane of a warp has a value of its own (`kOfMany`), to which pairs brought
// nothing. The memory is zeroed before the kernel.
template <class V, bool kOfMany = false>
struct Letter {
  static constexpr int kWords = Words<V>::count;
  static constexpr bool kTwice = !kOfMany && kWords % 2 == 0;
  uint64_t word[kWords];

  __device__ __forceinline__ static Letter of(const V &value, uint32_t mark) {
    const Words<V> words = to_words(value);
    Letter letter;
#pragma unroll
    for (int i = 0; i < kWords; ++i) letter.word[i] = uint64_t(mark) << 32 | words.word[i];
    return letter;
  }
  __device__ __forceinline__ void send(uint64_t *to) const {
#pragma unroll
    for (int i = 0; i < kWords; i += kTwice ? 2 : 1) {
      if constexpr (kTwice) {
        asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(to + i), "l"(word[i]), "l"(word[i + 1])
                     : "memory");
      } else {
        asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to + i), "l"(word[i]) : "memory");
      }
    }
  }
  // Under way until it is opened.
  __device__ __forceinline__ void fetch(const uint64_t *from) {
#pragma unroll
    for (int i = 0; i < kWords; i += kTwice ? 2 : 1) {
      if constexpr (kTwice) {
        asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                     : "=l"(word[i]), "=l"(word[i + 1])
                     : "l"(from + i)
                     : "memory");
      } else {
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word[i]) : "l"(from + i) : "memory");
      }
    }
  }
  __device__ __forceinline__ bool written(uint32_t mark) const {
    bool all = true;
#pragma unroll
    for (int i = 0; i < kWords; ++i) all = all && uint32_t(word[i] >> 32) == mark;
    return all;
  }
  __device__ __forceinline__ V value() const {
    Words<V> words;
#pragma unroll
    for (int i = 0; i < kWords; ++i) words.word[i] = uint32_t(word[i]);
    return from_words<V>(words);
  }
  // Whether all was written, which `to` is then.
  __device__ __forceinline__ bool open(V &to, uint32_t mark) const {
    const bool all = written(mark);
    if (all) to = value();
    return all;
  }
};
template <bool kOfMany = false, class V>
__device__ __forceinline__ void publish(uint64_t *to, const V &value, uint32_t mark) {
  Letter<V, kOfMany>::of(value, mark).send(to);
}
template <class V>
__device__ __forceinline__ bool receive(const uint64_t *from, V &value, uint32_t mark) {
  Letter<V> letter;
  letter.fetch(from);
  return letter.open(value, mark);
}
template <class V, bool kOfMany = false>
__device__ __forceinline__ V await(const uint64_t *from, uint32_t mark) {
  Letter<V, kOfMany> letter;
  for (letter.fetch(from); !letter.written(mark); letter.fetch(from)) __nanosleep(20);
  return letter.value();
}

constexpr uint32_t kReady = 1;
constexpr int kScannerWarps = 8;

// Zeroes what blocks tell each other before the kernel that does, which may come to its wait meanwhile.
template <class Piece>
__global__ void clear_pieces(Piece *pieces, int64_t count) {
  let_next_kernel_start();
  wait_for_earlier_work();
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < count; i += int64_t(gridDim.x) * blockDim.x)
    pieces[i] = {};
}

struct LongTiles {
  uint32_t total;
  uint32_t per_row;
  uint32_t *ticket;
  uint64_t *aggregates;
  uint64_t *prefixes;
};

// The value before a batch of tiles, on its way to the scanner's warp that has the batch: words beside marks here
// too, and by atomic operations, so that no fences are needed. Two places do: who writes to one has the value after
// what was there last.
template <class V>
struct Relay {
  using Word = unsigned long long;
  Word word[2][Words<V>::count];

  // By one thread, before the first batch.
  __device__ __forceinline__ void clear() {
    for (auto &place : word)
      for (Word &one : place) one = 0;
  }
  // By one lane.
  __device__ __forceinline__ void hand_on(uint32_t batch, const V &value) {
    const Words<V> words = to_words(value);
#pragma unroll
    for (int i = 0; i < Words<V>::count; ++i) atomicExch(&word[batch % 2][i], Word(batch) << 32 | words.word[i]);
  }
  // By all lanes; whether it had come.
  __device__ __forceinline__ bool take_over(uint32_t batch, V &value, int lane) {
    const bool reads = lane < Words<V>::count;
    const Word one = reads ? atomicOr(&word[batch % 2][lane], 0) : 0;
    if (!__all_sync(kAll, !reads || uint32_t(one >> 32) == batch)) return false;
    Words<V> words;
#pragma unroll
    for (int i = 0; i < Words<V>::count; ++i) words.word[i] = __shfl_sync(kAll, uint32_t(one), i);
    value = from_words<V>(words);
    return true;
  }
};

// One warp of the `warps` that the scanner has.
template <class Op>
__device__ __forceinline__ void scanner(const Op &op, const LongTiles &tiles, Relay<typename Op::Value> &relay,
                                        int warp, int warps, int lane) {
  using Map = typename Op::Map;
  using Value = typename Op::Value;
  constexpr size_t kMapWords = Words<Map>::count;
  constexpr size_t kValueWords = Words<Value>::count;
  const uint32_t batches = (tiles.total - 1) / kWarp + 1;
  for (uint32_t batch = warp; batch < batches; batch += warps) {
    const uint32_t tile = batch * kWarp + lane;
    const int count = int(min(uint32_t(kWarp), tiles.total - batch * kWarp));
    const bool head = tile % tiles.per_row == 0;  // a row begins here
    bool have = lane >= count;
    Map map = op.identity();
    // Of the tiles of the batch up to this lane's and before it, since the last row began.
    Map folded = map;
    Map before = map;
    uint32_t restarted = 0;
    uint32_t before_restarted = 0;
    Value carry = op.start();
    bool carries = batch == 0;
    int reached = 0;
    int published = 0;
    Letter<Map> letter;
    if (!have) letter.fetch(tiles.aggregates + tile * kMapWords);
    while (published < count) {
      if (!have) {
        have = letter.open(map, kReady);
        // While those that have come are folded.
        if (!have) letter.fetch(tiles.aggregates + tile * kMapWords);
      }
      const uint32_t ready = __ballot_sync(kAll, have);
      const int leading = min(ready == kAll ? kWarp : __ffs(int(~ready)) - 1, count);
      if (leading > reached) {
        reached = leading;
        // Tiles that aren't reached count as the identity; what comes before them doesn't change.
        folded = lane < reached ? map : op.identity();
        restarted = lane < reached && head;
#pragma unroll
        for (int distance = 1; distance < kWarp; distance *= 2) {
          const Map left = shuffle_up(folded, distance);
          const uint32_t left_restarted = __shfl_up_sync(kAll, restarted, distance);
          if (lane >= distance) {
            if (!restarted) folded = op.combine(left, folded);
            restarted |= left_restarted;
          }
        }
        before = exclusive_of(op, folded, lane);
        before_restarted = __shfl_up_sync(kAll, restarted, 1);
        if (lane == 0) before_restarted = 0;
      }
      if (!carries) carries = relay.take_over(batch, carry, lane);
      if (!carries || reached == published) continue;
      if (reached == count && lane == count - 1)
        relay.hand_on(batch + 1, op.apply(folded, restarted ? op.start() : carry));
      if (lane >= published && lane < reached && !head)
        publish(tiles.prefixes + tile * kValueWords, Value(op.apply(before, before_restarted ? op.start() : carry)),
                kReady);
      published = reached;
      __syncwarp();
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
  __shared__ Relay<Value> relay;
  const int lane = int(threadIdx.x) % kWarp;
  const int warp = int(threadIdx.x) / kWarp;
  std::byte *stage = stages + warp * Tile::kStageBytes;
  wait_for_earlier_work();
  if (threadIdx.x == 0) {
    ticket = atomicAdd(tiles.ticket, 1u);
    relay.clear();
  }
  __syncthreads();
  let_next_kernel_start();
  if (ticket == 0) {
    constexpr int kScanners = kWarps < kScannerWarps ? kWarps : kScannerWarps;
    if (warp < kScanners) scanner(op, tiles, relay, warp, kScanners, lane);
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
