// SPDX-License-Identifier: Apache-2.0
// Few long rows: every row is cut into tiles, spread over the whole card, in one pass over memory.
//
// Persistent blocks take tiles by ticket, in order, and keep a ring of tiles on its way to shared
// memory. A block publishes the aggregate of a tile some tiles ahead of the one that it finishes.
// One warp in the whole grid, the scanner, reads the aggregates, folds them in batches of 128 in a
// fixed order and publishes each tile's prefix. Nothing depends on timing but when, never what.
//
// Progress: tickets are handed out in order, so whatever a tile needs belongs to blocks that are
// running. Let w be the first unfinished tile. Its block has nothing older to finish and so has
// published w's aggregate; all tiles before w are finished; so the scanner, which publishes what
// the leading ready tiles allow and doesn't wait for whole batches, publishes w's prefix.
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

constexpr int kLongWarps = 8;
constexpr int kLongThreads = (kLongWarps + 1) * kWarp;  // and the warp that may be the scanner
constexpr int kTicketRing = 8;
constexpr int kScannerTiles = 4;  // of a lane
constexpr uint32_t kReady = 1;

template <class Op, int kItems, int kStages>
struct LongShape {
  static constexpr int kTile = kLongWarps * kWarp * kItems;
  static constexpr int kSlots = Bytes<typename Op::Inputs, kItems>::sum;
  static constexpr int kOut = Bytes<typename Op::Outputs, kItems>::largest;
  struct Shared {
    alignas(16) std::byte slots[kStages][kLongWarps][kSlots];
    alignas(16) std::byte out[kLongWarps][kOut];
    typename Op::Map before[kStages][kLongWarps * kWarp];  // what comes before a lane within its warp
    typename Op::Map warps[kStages][kLongWarps];           // what comes before a warp within the tile
    typename Op::Map totals[2][kLongWarps];
    alignas(8) std::byte beyond[kStages][kLongWarps][8];  // the element after a warp's last
    uint32_t tickets[kTicketRing];
    uint32_t role;
  };
  static constexpr size_t kAggregateWords = Words<typename Op::Map>::count;
  static constexpr size_t kPrefixWords = Words<typename Op::Value>::count;
};

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
        if (!have[q] && index < count) ready[q] = receive(tiles.aggregates + (base + index) * kMapWords, got[q], kReady);
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

__device__ __forceinline__ void compute_barrier() {
  asm volatile("bar.sync 1, %0;" ::"n"(kLongWarps * kWarp) : "memory");
}

// The first tile of a row takes the row's initial value into its aggregate.
template <class Op>
__device__ __forceinline__ typename Op::Map with_initial(const Op &op, const Geometry &g, typename Op::Map map,
                                                         int64_t row) {
  if constexpr (Op::kInitial) map.b = op.apply(map, initial_value(op, g, row));
  return map;
}

template <class Op, int kItems, int kStages>
__global__ void __launch_bounds__(kLongThreads, 1)
    scan_long_rows(const __grid_constant__ Op op, const __grid_constant__ Geometry g,
                   const __grid_constant__ Accesses access, const __grid_constant__ LongTiles tiles) {
  using Shape = LongShape<Op, kItems, kStages>;
  using Map = typename Op::Map;
  using Value = typename Op::Value;
  using A = typename Op::Acc;
  constexpr int kWarpItems = kWarp * kItems;
  constexpr int kAhead = kStages - 2;  // tiles by which the aggregates run ahead
  static_assert(kStages >= 3 && kStages < kTicketRing);
  constexpr int kLast = Op::Inputs::size - 1;
  using Last = at<kLast, typename Op::Inputs>;

  extern __shared__ __align__(16) std::byte raw[];
  typename Shape::Shared &shared = *reinterpret_cast<typename Shape::Shared *>(raw);
  const int lane = int(threadIdx.x) % kWarp;
  const int warp = int(threadIdx.x) / kWarp;

  if (threadIdx.x == 0) shared.role = shared.tickets[0] = atomicAdd(tiles.ticket, 1u);
  __syncthreads();
  if (warp == kLongWarps) {
    if (shared.role == 0) scanner(op, tiles, lane);
    return;
  }

  const auto row_of = [&](uint32_t tile) { return int64_t(tile / tiles.per_row); };
  const auto first_of = [&](uint32_t tile) {
    return int64_t(tile % tiles.per_row) * Shape::kTile + warp * kWarpItems;
  };

  const auto load = [&](uint32_t tile, int stage) {
    if (tile < tiles.total) {
      const Pointers<Op> pointers = rows_of<Op>(g, row_of(tile));
      const int64_t first = first_of(tile);
      fetch_all<Op, kItems>(g, access, pointers, shared.slots[stage][warp], first, lane);
      if constexpr (Op::kNeighbour) {
        const int64_t next = first + kWarpItems;
        if (lane == 0 && next < g.length) {
          const Last *from = reinterpret_cast<const Last *>(pointers.row[kLast]) + next * g.step[kLast];
          // Copies are of four bytes at least: an aligned word holds the element.
          const auto address = reinterpret_cast<uintptr_t>(from);
          if constexpr (sizeof(Last) == 8) {
            copy_async<8>(shared_address(shared.beyond[stage][warp]), from);
          } else {
            copy_async<4>(shared_address(shared.beyond[stage][warp]),
                          reinterpret_cast<const void *>(address & ~uintptr_t(3)));
          }
        }
      }
    }
    commit_copies();
  };
  const auto beyond_of = [&](uint32_t tile, int stage) {
    if constexpr (Op::kNeighbour) {
      const std::byte *slot = shared.beyond[stage][warp];
      if constexpr (sizeof(Last) < 4) {
        const Last *from = reinterpret_cast<const Last *>(row_start<Last>(g, kLast, row_of(tile))) +
                           (first_of(tile) + kWarpItems) * g.step[kLast];
        slot += reinterpret_cast<uintptr_t>(from) & 3;
      }
      return widen<A>(*reinterpret_cast<const Last *>(slot));
    }
    return A(0);
  };
  const auto neighbour_in = [&](Held<typename Op::Inputs, kItems> &items, uint32_t tile, int stage) {
    A neighbour = neighbour_of<Op, kItems>(items, beyond_of(tile, stage), lane);
    if constexpr (Op::kFinal) {
      const int64_t lane_first = first_of(tile) + lane * kItems;
      if (lane_first < g.length && lane_first + kItems >= g.length) neighbour = behind_last<Op>(g, row_of(tile));
    }
    return neighbour;
  };

  // Folds a tile that has landed; the caller synchronises the warps before `publish_tile`.
  const auto reduce = [&](uint32_t tile, int stage, int parity) {
    if (tile >= tiles.total) return;
    Held<typename Op::Inputs, kItems> items;
    read_all<Op, kItems>(access, shared.slots[stage][warp], lane, items);
    const A neighbour = neighbour_in(items, tile, stage);
    const Map inclusive =
        warp_scan(op, fold<Op, kItems>(op, items, neighbour, first_of(tile) + lane * kItems, g.length), lane);
    shared.before[stage][warp * kWarp + lane] = exclusive_of(op, inclusive, lane);
    if (lane == kWarp - 1) shared.totals[parity][warp] = inclusive;
  };
  const auto publish_tile = [&](uint32_t tile, int stage, int parity) {
    if (tile >= tiles.total || warp != 0) return;
    Map map = lane < kLongWarps ? shared.totals[parity][lane] : op.identity();
    map = warp_scan(op, map, lane, kLongWarps);
    const Map before = exclusive_of(op, map, lane, kLongWarps);
    if (lane < kLongWarps) shared.warps[stage][lane] = before;
    if (lane == kLongWarps - 1) {
      if (tile % tiles.per_row == 0) map = with_initial(op, g, map, row_of(tile));
      publish(tiles.aggregates + size_t(tile) * Shape::kAggregateWords, map, kReady);
    }
  };

  // Tickets are taken one at a time, so that the first tiles spread over all blocks.
  for (int s = 0; s < kStages - 1; ++s) {
    if (s > 0) {
      if (threadIdx.x == 0) shared.tickets[s] = atomicAdd(tiles.ticket, 1u);
      compute_barrier();
    }
    load(shared.tickets[s], s);
  }
  if (threadIdx.x == 0) shared.tickets[kStages - 1] = atomicAdd(tiles.ticket, 1u);
#pragma unroll
  for (int s = 0; s < kAhead; ++s) {
    wait_copies<1>();
    __syncwarp();
    reduce(shared.tickets[s], s, s & 1);
    compute_barrier();
    publish_tile(shared.tickets[s], s, s & 1);
  }

  int stage = 0;
  for (uint32_t i = 0;; ++i) {
    const uint32_t tile = shared.tickets[i % kTicketRing];
    if (tile >= tiles.total) break;
    const int behind = stage == 0 ? kStages - 1 : stage - 1;  // the stage that was finished last
    const int ahead = behind == 0 ? kStages - 1 : behind - 1;  // of tile i + kAhead
    load(shared.tickets[(i + kStages - 1) % kTicketRing], behind);
    uint32_t claimed = 0;
    if (threadIdx.x == 0) claimed = atomicAdd(tiles.ticket, 1u);

    const bool head = tile % tiles.per_row == 0;
    Value carry;
    bool ready = true;
    if (head) {
      carry = initial_value(op, g, row_of(tile));
    } else {
      ready = receive(tiles.prefixes + size_t(tile) * Shape::kPrefixWords, carry, kReady);
    }

    const uint32_t next = shared.tickets[(i + kAhead) % kTicketRing];
    wait_copies<1>();
    __syncwarp();
    reduce(next, ahead, int(i + kAhead) & 1);
    if (threadIdx.x == 0) shared.tickets[(i + kStages) % kTicketRing] = claimed;
    compute_barrier();
    publish_tile(next, ahead, int(i + kAhead) & 1);

    if (!__all_sync(kAll, ready)) carry = await<Value>(tiles.prefixes + size_t(tile) * Shape::kPrefixWords, kReady);
    Held<typename Op::Inputs, kItems> items;
    read_all<Op, kItems>(access, shared.slots[stage][warp], lane, items);
    const A neighbour = neighbour_in(items, tile, stage);
    const Map before = op.combine(shared.warps[stage][warp], shared.before[stage][warp * kWarp + lane]);
    finish<Op, kItems>(op, g, access, rows_of<Op>(g, row_of(tile)), shared.out[warp], items, neighbour,
                       op.apply(before, carry), first_of(tile), row_of(tile), lane);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  wait_copies<0>();
}

}  // namespace baracuda::scan
