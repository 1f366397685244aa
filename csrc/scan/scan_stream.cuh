// SPDX-License-Identifier: Apache-2.0
// Few long rows on cards whose copy engine takes whole tiles (sm_90): as in scan_long.cuh every row is cut into tiles
// that are spread over the card, in one pass over memory. Here one block lives on each multiprocessor and streams its
// tiles through a ring of stages in shared memory, so that many tiles are under way at once: some on their way from
// memory, some reduced and waiting for what comes before them, one on its way back.
//
// The warps of a block have roles. The producer draws tiles and starts their copies. The workers reduce a tile, and
// only then finish the one that came kAhead earlier, in place; the copy engine takes the results away. The clerk folds
// the workers' totals, publishes the tile's aggregate, and later fetches the tile's prefix. The block that draws first
// is the scanner.
//
// Progress: tiles are drawn in order, and each block takes its tiles in the order in which it drew them. An aggregate
// waits for no more than the finish of earlier tiles of its block, whose prefixes need the aggregates of tiles drawn
// before, so the first tile that isn't finished never waits.
#pragma once

#include "scan/scan_long.cuh"

namespace baracuda::scan {

__device__ __forceinline__ uint32_t shared_address(const void *p) { return uint32_t(__cvta_generic_to_shared(p)); }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// A gate is a word in shared memory that opens when enough have arrived, and all bytes that were announced; time and
// again, each time with the other parity.
__device__ __forceinline__ void set_gate(uint64_t *gate, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(gate)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive(uint64_t *gate) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(gate)) : "memory");
}
__device__ __forceinline__ void arrive_and_announce(uint64_t *gate, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(gate)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void pass(uint64_t *gate, uint32_t parity) {
  uint32_t open;
  do {
    asm volatile(
        "{\n\t.reg .pred p;\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(open)
        : "r"(shared_address(gate)), "r"(parity)
        : "memory");
  } while (!open);
}
// Copies of the engine: both ends and the size are multiples of sixteen bytes.
__device__ __forceinline__ void bulk_load(std::byte *to, const std::byte *from, uint32_t bytes, uint64_t *gate) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(gate))
               : "memory");
}
__device__ __forceinline__ void bulk_store(std::byte *to, const std::byte *from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void close_bulk_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until shared memory may be written again.
__device__ __forceinline__ void wait_for_bulk_reads() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void wait_for_bulk_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// What the thread wrote is there for the copy engine.
__device__ __forceinline__ void show_copy_engine() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#endif

// A lane's elements are an odd number of sixteen-byte pieces, so that a warp reads them without bank conflicts.
template <class Op, int kRun, int kWarps, int kStages>
struct StreamShape {
  static constexpr int kInputs = Op::Inputs::size;
  static constexpr int kOutputs = Op::Outputs::size;
  static constexpr int kSize = Bytes<typename Op::Inputs>::widest();
  static constexpr int kItems = kWarp * kRun;
  static constexpr int kTile = kWarps * kItems;
  static constexpr int kRunBytes = kRun * kSize;
  static constexpr int kShareBytes = kItems * kSize;
  static constexpr int kTileBytes = kTile * kSize;
  static constexpr int kThreads = (kWarps + 2) * kWarp;
  static constexpr size_t kSharedBytes = size_t(kStages) * kTileBytes * kInputs;
  static_assert(kRunBytes % 32 == 16);

  struct Task {
    uint32_t tile;
    uint32_t place;  // in its row
    int count;       // of elements
    int64_t row;
    std::byte *out[kOutputs];  // where a stage's first byte goes
  };
  struct Control {
    uint64_t full[kStages];
    uint64_t reduced[kStages];
    uint64_t ready[kStages];
    uint64_t empty[kStages];
    Task task[kStages];
    typename Op::Map totals[kStages][kWarps];
    typename Op::Map lefts[kStages][kWarps];  // of a worker's share, within the tile
    typename Op::Value prefixes[kStages];
    alignas(16) std::byte beyond[kStages][16];  // of the last input, what follows the tile
    uint32_t first_tile;
  };
  static constexpr size_t kControlBytes = (sizeof(Control) + 127) / 128 * 128;
};

template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <class Op, int kRun, int kWarps, int kStages, int kAhead>
__global__ void __launch_bounds__(StreamShape<Op, kRun, kWarps, kStages>::kThreads, 1)
    scan_stream(const __grid_constant__ Op op, const __grid_constant__ Geometry g,
                const __grid_constant__ bool backward, const __grid_constant__ LongTiles tiles) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using S = StreamShape<Op, kRun, kWarps, kStages>;
  using Map = typename Op::Map;
  using Value = typename Op::Value;
  using Tile = Share<Op, kRun>;
  static_assert(kAhead + 2 <= kStages);
  extern __shared__ __align__(128) std::byte ring_bytes[];
  __shared__ typename S::Control control;
  const int lane = int(threadIdx.x) % kWarp;
  const int warp = int(threadIdx.x) / kWarp;
  const auto region = [&](int stage, int operand) {
    return ring_bytes + (size_t(stage) * S::kInputs + operand) * S::kTileBytes;
  };
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      set_gate(&control.full[s], 1);
      set_gate(&control.reduced[s], kWarps);
      set_gate(&control.ready[s], kWarps);
      set_gate(&control.empty[s], kWarps);
    }
    show_copy_engine();
    control.first_tile = atomicAdd(tiles.ticket, 1u) - 1;
  }
  __syncthreads();
  const uint32_t first_tile = control.first_tile;
  if (first_tile == UINT32_MAX) {
    if (warp == 0) scanner(op, tiles, lane);
    return;
  }

  if (warp == kWarps) {  // the producer
    if (lane != 0) return;
    uint32_t tile = first_tile;
    Ring<kStages> ring;
    for (int i = 0;; ++i) {
      if (i >= kStages) pass(&control.empty[ring.stage], ring.parity ^ 1);
      // As late as can be: whoever draws a later one waits for this tile's aggregate.
      if (i > 0) tile = atomicAdd(tiles.ticket, 1u) - 1;
      typename S::Task &task = control.task[ring.stage];
      uint64_t *gate = &control.full[ring.stage];
      task.tile = tile;
      if (tile >= tiles.total) {
        arrive(gate);
        return;
      }
      const int64_t row = tile / tiles.per_row;
      const uint32_t place = tile - uint32_t(row) * tiles.per_row;
      const int64_t first = int64_t(place) * S::kTile;
      const int64_t left = g.length - first;
      const int count = int(min(left, int64_t(S::kTile)));
      task.place = place;
      task.count = count;
      task.row = row;
      int64_t offsets[Layout<Op>::kLines];
      row_offsets(g, row, 0, offsets);
      // Where in memory a stage's first byte has its place.
      const auto origin = [&](int operand) {
        return g.data[operand] + (offsets[operand] + (backward ? -first - (S::kTile - 1) : first)) * S::kSize;
      };
      for_each<S::kOutputs>(
          [&](auto k) { task.out[k()] = g.data[S::kInputs + k()] ? origin(S::kInputs + k()) : nullptr; });
      const int low = backward ? (S::kTile - count) * S::kSize : 0;
      const int high = low + count * S::kSize;
      const int inner_low = (low + 15) & ~15;
      const int inner_high = max(high & ~15, inner_low);
      const bool follows = Op::kNeighbour && left > count;
      // Sixteen bytes may be more than what is left of the row.
      const bool follows_whole = follows && (left - count) * S::kSize >= 16;
      for_each<S::kInputs>([&](auto k) {
        using T = at<k(), typename Op::Inputs>;
        const std::byte *from = origin(k());
        std::byte *to = region(ring.stage, k());
        for (int at = low; at < min(inner_low, high); at += S::kSize)
          *reinterpret_cast<T *>(to + at) = *reinterpret_cast<const T *>(from + at);
        for (int at = inner_high; at < high; at += S::kSize)
          *reinterpret_cast<T *>(to + at) = *reinterpret_cast<const T *>(from + at);
        if (k() == S::kInputs - 1 && follows && !follows_whole) {
          const int at = backward ? -S::kSize : S::kTileBytes;
          *reinterpret_cast<T *>(control.beyond[ring.stage] + (backward ? 16 - S::kSize : 0)) =
              *reinterpret_cast<const T *>(from + at);
        }
      });
      const uint32_t bytes = uint32_t(inner_high - inner_low);
      arrive_and_announce(gate, bytes * S::kInputs + (follows_whole ? 16 : 0));
      if (bytes > 0) {
        for_each<S::kInputs>(
            [&](auto k) { bulk_load(region(ring.stage, k()) + inner_low, origin(k()) + inner_low, bytes, gate); });
      }
      if (follows_whole)
        bulk_load(control.beyond[ring.stage], origin(S::kInputs - 1) + (backward ? -16 : S::kTileBytes), 16, gate);
      ring.advance();
    }
  }

  if (warp == kWarps + 1) {  // the clerk
    Ring<kStages> ring;
    Ring<kStages> behind;
    int end = INT32_MAX;
    for (int i = 0; i - kAhead < end; ++i) {
      if (i < end) {
        pass(&control.full[ring.stage], ring.parity);
        const typename S::Task &task = control.task[ring.stage];
        if (task.tile >= tiles.total) {
          end = i;
        } else {
          pass(&control.reduced[ring.stage], ring.parity);
          Map others = lane < kWarps ? control.totals[ring.stage][lane] : op.identity();
          others = warp_scan<kWarps>(op, others, lane);
          if (lane == kWarps - 1)
            publish(tiles.aggregates + size_t(task.tile) * Words<Map>::count,
                    task.place == 0 ? with_initial(op, g, others, task.row) : others, kReady);
          const Map left = shuffle_up(others, 1);
          if (lane < kWarps) control.lefts[ring.stage][lane] = left;
          ring.advance();
        }
      }
      if (i >= kAhead && i - kAhead < end) {
        const typename S::Task &task = control.task[behind.stage];
        const Value prefix = task.place == 0
                                 ? initial_value(op, g, task.row)
                                 : await<Value>(tiles.prefixes + size_t(task.tile) * Words<Value>::count, kReady);
        if (lane == 0) control.prefixes[behind.stage] = prefix;
        // Each lane for what it has written.
        if (lane < kWarps) arrive(&control.ready[behind.stage]);
        behind.advance();
      }
    }
    return;
  }

  // A worker.
  const int run = backward ? (kWarps - warp) * kWarp - 1 - lane : warp * kWarp + lane;
  const auto slots_of = [&](const typename S::Task &task) {
    return Tile::one_row(g, task.row, int64_t(task.place) * S::kTile + warp * S::kItems);
  };
  const auto take = [&](Tile &tile, int stage, const typename S::Task &task, const Slots &slots) {
    for_each<S::kInputs>([&](auto k) {
      held<k()>(tile.raw).load(region(stage, k()) + run * S::kRunBytes);
      held<k()>(tile.raw).turn_if(backward);
    });
    if (task.count < S::kTile) {
      // What lies beyond the end mustn't show.
      const int left = slots.left - lane * kRun;
      for_each<S::kInputs>([&](auto k) {
        using T = at<k(), typename Op::Inputs>;
#pragma unroll
        for (int i = 0; i < kRun; ++i)
          if (i >= left) held<k()>(tile.raw).replace(i, T{});
      });
    }
    if constexpr (Op::kNeighbour) {
      using T = at<S::kInputs - 1, typename Op::Inputs>;
      typename Op::Acc beyond = typename Op::Acc(0);
      if (lane == kWarp - 1) {
        const std::byte *next = backward ? region(stage, S::kInputs - 1) + run * S::kRunBytes - S::kSize
                                         : region(stage, S::kInputs - 1) + (run + 1) * S::kRunBytes;
        if (warp == kWarps - 1) next = control.beyond[stage] + (backward ? 16 - S::kSize : 0);
        beyond = widen<typename Op::Acc>(*reinterpret_cast<const T *>(next));
      }
      tile.find_next(op, g, slots, beyond, lane);
    }
  };
  Map before[kAhead + 1];
  Common<Op> common[kAhead + 1] = {};
#pragma unroll
  for (int q = 0; q <= kAhead; ++q) before[q] = op.identity();
  Ring<kStages> ring;
  Ring<kStages> behind;
  int end = INT32_MAX;
  int draining = -1;
  for (int i = 0; i - kAhead < end; ++i) {
#pragma unroll
    for (int q = 0; q < kAhead; ++q) {
      before[q] = before[q + 1];
      common[q] = common[q + 1];
    }
    if (i < end) {
      pass(&control.full[ring.stage], ring.parity);
      const typename S::Task &task = control.task[ring.stage];
      if (task.tile >= tiles.total) {
        end = i;
      } else {
        const Slots slots = slots_of(task);
        Tile tile;
        take(tile, ring.stage, task, slots);
        const Map inclusive = tile.reduce(op, g, slots, lane);
        before[kAhead] = exclusive_of(op, inclusive, lane);
        common[kAhead] = tile.common;
        if (lane == kWarp - 1) {
          control.totals[ring.stage][warp] = inclusive;
          arrive(&control.reduced[ring.stage]);
        }
        ring.advance();
      }
    }
    if (lane == 0 && draining >= 0) {
      wait_for_bulk_reads();
      arrive(&control.empty[draining]);
      draining = -1;
    }
    if (i >= kAhead && i - kAhead < end) {
      const typename S::Task &task = control.task[behind.stage];
      const Slots slots = slots_of(task);
      Tile tile;
      take(tile, behind.stage, task, slots);
      tile.common = common[0];
      pass(&control.ready[behind.stage], behind.parity);
      const Map within = warp > 0 ? op.combine(control.lefts[behind.stage][warp], before[0]) : before[0];
      Held<typename Op::Outputs, kRun> outputs;
      tile.outputs(op, g, slots, op.apply(within, control.prefixes[behind.stage]), lane, outputs);
      for_each<S::kOutputs>([&](auto k) {
        held<k()>(outputs).turn_if(backward);
        held<k()>(outputs).store(region(behind.stage, k()) + run * S::kRunBytes);
      });
      show_copy_engine();
      __syncwarp();
      const int low = backward ? (S::kTile - task.count) * S::kSize : 0;
      const int high = low + task.count * S::kSize;
      const int share = (backward ? kWarps - 1 - warp : warp) * S::kShareBytes;
      const int from = max(share, low);
      const int to = min(share + S::kShareBytes, high);
      const int inner_from = (from + 15) & ~15;
      const int inner_to = to & ~15;
      if (from < to) {
        for_each<S::kOutputs>([&](auto k) {
          using U = at<k(), typename Op::Outputs>;
          std::byte *out = task.out[k()];
          if (S::kOutputs > 1 && !out) return;
          const std::byte *results = region(behind.stage, k());
          if (lane == 0 && inner_from < inner_to)
            bulk_store(out + inner_from, results + inner_from, uint32_t(inner_to - inner_from));
          if (task.count < S::kTile) {
            if (lane == 0)
              for (int at = from; at < min(inner_from, to); at += S::kSize)
                *reinterpret_cast<U *>(out + at) = *reinterpret_cast<const U *>(results + at);
            if (lane == 0)
              for (int at = max(inner_to, inner_from); at < to; at += S::kSize)
                *reinterpret_cast<U *>(out + at) = *reinterpret_cast<const U *>(results + at);
          }
        });
      }
      if (lane == 0) {
        close_bulk_stores();
        draining = behind.stage;
      }
      behind.advance();
    }
  }
  if (lane == 0) wait_for_bulk_stores();
#endif
}

}  // namespace baracuda::scan
