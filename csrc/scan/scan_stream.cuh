// SPDX-License-Identifier: Apache-2.0
// Few long rows on cards whose copy engine takes whole tiles (sm_90): as in scan_long.cuh every row is cut into tiles
// that are spread over the card, in one pass over memory. Here one block lives on each multiprocessor and streams its
// tiles through a ring of stages in shared memory, so that many tiles are under way at once: some on their way from
// memory, some reduced and waiting for what comes before them, one on its way back.
//
// The warps of a block have roles. The carrier draws tiles, starts their copies, and sends results away. What no result
// replaces comes before the results that are in its stage have gone, if it is most of the stage. The workers
// reduce a tile, and only then finish the one that came kAhead earlier, in place; there may be several groups of them,
// which take tiles in turn. The clerk folds the workers' totals and publishes the tile's aggregate; the messenger
// fetches what comes before the tile. The block that draws first is the scanner.
//
// Progress: tiles are drawn in order, and each group takes its tiles in the order in which they were drawn. An
// aggregate waits for no more than the finish of earlier tiles of its block, whose prefixes need the aggregates of
// tiles drawn before, so the first tile that isn't finished never waits.
#pragma once

#include "runtime/gate.cuh"
#include "scan/scan_long.cuh"

namespace baracuda::scan {

// A lane's elements are an odd number of sixteen-byte pieces, so that a warp reads them without bank conflicts. Results
// take the place of an input whose elements are as wide, or where there is none their own.
template <class Op, int kRun, int kWarps, int kGroups, int kStages>
struct StreamShape {
  static constexpr int kInputs = Op::Inputs::size;
  static constexpr int kOutputs = Op::Outputs::size;
  static constexpr int kSize = Bytes<typename Op::Inputs>::widest();
  static constexpr int kItems = kWarp * kRun;
  static constexpr int kTile = kWarps * kItems;
  static constexpr int kRunBytes = kRun * kSize;
  static constexpr int kWorkers = kGroups * kWarps;
  static constexpr int kThreads = (kWorkers + 3) * kWarp;
  template <int k>
  static constexpr int kOutputSize = int(sizeof(at<k, typename Op::Outputs>));
  // Where an output's part of a stage begins, in bytes; of the one behind the last, how long a stage is.
  template <int k>
  static constexpr int output_offset() {
    if constexpr (k < kInputs && k < kOutputs) {
      if (kOutputSize<k> == kSize) return k * kTile * kSize;
    }
    int offset = kInputs * kTile * kSize;
    [&]<int... j>(std::integer_sequence<int, j...>) {
      ((offset += j < kInputs && kOutputSize<j> == kSize ? 0 : kTile * kOutputSize<j>), ...);
    }(std::make_integer_sequence<int, k>{});
    return offset;
  }
  static constexpr int kStageBytes = output_offset<kOutputs>();
  static constexpr size_t kSharedBytes = size_t(kStages) * kStageBytes;
  // The first inputs, in whose places results may come, or which are read again there. The others' places are free as
  // soon as the workers have the elements in registers, and the next tile is drawn then where that is most of a stage.
  static constexpr bool kDrawsEarly = !Op::kBased && kInputs > 2 * kOutputs;
  static constexpr int kReplaced = kDrawsEarly ? kOutputs : kInputs;
  static_assert(kRunBytes % 32 == 16);
  static_assert(kStages <= kWarp);
  static_assert([]<class... U>(List<U...>) {
    return ((kRun * int(sizeof(U)) % 16 == 0) && ...);
  }(typename Op::Outputs{}));

  struct Task {
    uint32_t tile;
    uint32_t place;  // in its row
    int count;       // of elements
    bool ends;       // the row does, with this tile
    int64_t row;
    std::byte *out[kOutputs];  // where a stage's first byte goes
  };
  struct Control {
    uint64_t full[kStages];
    uint64_t reduced[kStages];
    uint64_t ready[kStages];
    uint64_t taken[kStages];  // into registers, by the workers who finish the tile
    uint64_t finished[kStages];
    uint64_t written[kStages];  // by every lane of the workers; of tiles that a row's end cuts short
    Task task[kStages];
    typename Op::Map totals[kStages][kWarps];
    typename Op::Map lefts[kStages][kWarps];  // of a worker's share, within the tile
    typename Op::Value prefixes[kStages];
    alignas(16) std::byte beyond[kStages][16];  // of the last input, what follows the tile
    Relay<typename Op::Value> relay;
    uint32_t first_tile;
  };
  static constexpr size_t kControlBytes = (sizeof(Control) + 127) / 128 * 128;
};

// Where in an operand's part of a stage the elements of a tile lie, in bytes; from `inner_low` to `inner_high` the copy
// engine takes them.
template <int kTile, int kSize, bool kReverse>
struct Extent {
  int low;
  int high;
  int inner_low;
  int inner_high;
  __device__ __forceinline__ explicit Extent(int count)
      : low(kReverse ? (kTile - count) * kSize : 0),
        high(low + count * kSize),
        inner_low((low + 15) & ~15),
        inner_high(max(high & ~15, inner_low)) {}
  __device__ __forceinline__ uint32_t inner_bytes() const { return uint32_t(inner_high - inner_low); }
  // The others.
  template <class T>
  __device__ __forceinline__ void copy_edges(std::byte *to, const std::byte *from) const {
    for (int at = low; at < min(inner_low, high); at += kSize)
      *reinterpret_cast<T *>(to + at) = *reinterpret_cast<const T *>(from + at);
    for (int at = inner_high; at < high; at += kSize)
      *reinterpret_cast<T *>(to + at) = *reinterpret_cast<const T *>(from + at);
  }
};

// Elements of a lane's run once more, from its inputs' places in a stage. What lies beyond the row's end is any number,
// which shows in no output.
template <class Op, int kRun, bool kReverse>
struct StageReader {
  static constexpr bool kShared = true;
  const std::byte *run[Op::Inputs::size];
  __device__ __forceinline__ typename Op::Item operator()(int i) const {
    typename Op::Item item = {};
    for_each<Op::Inputs::size>([&](auto k) {
      using T = at<k(), typename Op::Inputs>;
      item.in[k()] = widen<typename Op::Acc>(reinterpret_cast<const T *>(run[k()])[kReverse ? kRun - 1 - i : i]);
    });
    return item;
  }
};

template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int by = 1) {
    stage += by;
    if (stage >= kStages) {
      stage -= kStages;
      parity ^= 1;
    }
  }
};

template <class Op, bool kReverse, int kRun, int kWarps, int kGroups, int kStages, int kAhead>
__global__ void __launch_bounds__(StreamShape<Op, kRun, kWarps, kGroups, kStages>::kThreads, 1)
    scan_stream(const __grid_constant__ Op op, const __grid_constant__ Geometry g,
                const __grid_constant__ LongTiles tiles) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using S = StreamShape<Op, kRun, kWarps, kGroups, kStages>;
  using Task = typename S::Task;
  using Map = typename Op::Map;
  using Value = typename Op::Value;
  // Runs lie in registers as they do in memory, unless that would be a kernel's code for something rare.
  constexpr bool kBack = kReverse && kFromFarEnd<Op, kRun>;
  using Tile = Share<Op, kRun, false, kBack>;
  static_assert(kGroups * (kAhead + 1) < kStages);
  extern __shared__ __align__(128) std::byte ring_bytes[];
  __shared__ typename S::Control control;
  const int lane = int(threadIdx.x) % kWarp;
  const int warp = int(threadIdx.x) / kWarp;
  const auto input = [&](int stage, int operand) {
    return ring_bytes + size_t(stage) * S::kStageBytes + operand * (S::kTile * S::kSize);
  };
  const auto output = [&](int stage, auto k) {
    return ring_bytes + size_t(stage) * S::kStageBytes + S::template output_offset<k()>();
  };
  wait_for_earlier_work();
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      set_gate(&control.full[s], 1);
      set_gate(&control.reduced[s], kWarps);
      set_gate(&control.ready[s], kWarps + 1);
      if constexpr (S::kDrawsEarly) set_gate(&control.taken[s], kWarps);
      set_gate(&control.finished[s], kWarps);
      set_gate(&control.written[s], kWarps * kWarp);
    }
    show_copy_engine();
    control.relay.clear();
    control.first_tile = atomicAdd(tiles.ticket, 1u) - 1;
  }
  __syncthreads();
  let_next_kernel_start();
  const uint32_t first_tile = control.first_tile;
  if (first_tile == UINT32_MAX) {
    constexpr int kScanners = S::kWorkers < kScannerWarps ? S::kWorkers : kScannerWarps;
    if (warp < kScanners) scanner(op, tiles, control.relay, warp, kScanners, lane);
    return;
  }

  if (warp == S::kWorkers) {  // the carrier
    if (lane != 0) return;
    // Where the row of the latest tile begins.
    int64_t row = -1;
    uint32_t row_tile = 0;
    int64_t offsets[Layout<Op>::kLines];
    Ring<kStages> ring;
    uint32_t tile = first_tile;
    int end = INT32_MAX;
    uint32_t written_parities = 0;
    for (int i = 0; i - kStages < end; ++i, ring.advance()) {
      Task &task = control.task[ring.stage];
      uint64_t *gate = &control.full[ring.stage];
      const bool refills = i >= kStages;
      const auto send = [&] {
        pass(&control.finished[ring.stage], ring.parity ^ 1);
        const bool cut = task.count < S::kTile;
        if (cut) {
          pass(&control.written[ring.stage], written_parities >> ring.stage & 1);
          written_parities ^= 1u << ring.stage;
        }
        for_each<S::kOutputs>([&](auto k) {
          using U = at<k(), typename Op::Outputs>;
          std::byte *to = task.out[k()];
          if (S::kOutputs > 1 && !to) return;
          const Extent<S::kTile, int(sizeof(U)), kReverse> extent(task.count);
          const std::byte *from = output(ring.stage, k);
          if (extent.inner_bytes() > 0)
            bulk_store(to + extent.inner_low, from + extent.inner_low, extent.inner_bytes());
          if (cut) extent.template copy_edges<U>(to, from);
        });
        close_bulk_stores();
      };
      // As late as can be: whoever draws a later one waits for this tile's aggregate. Its number is on the way while
      // results are sent.
      if (refills) pass(S::kDrawsEarly ? &control.taken[ring.stage] : &control.finished[ring.stage], ring.parity ^ 1);
      if (i > 0 && end == INT32_MAX) tile = atomicAdd(tiles.ticket, 1u) - 1;
      if (refills && !S::kDrawsEarly) send();
      if (tile >= tiles.total) {
        if (refills && S::kDrawsEarly) send();
        end = min(end, i);
        // For each group of workers.
        if (i < end + kGroups) {
          task.tile = tile;
          arrive(gate);
        }
        continue;
      }
      // Divisions take long.
      if (row < 0 || tile - row_tile >= tiles.per_row) {
        row = tile / tiles.per_row;
        row_tile = uint32_t(row) * tiles.per_row;
        row_offsets(g, row, 0, offsets);
      }
      const uint32_t place = tile - row_tile;
      const int64_t first = int64_t(place) * S::kTile;
      const int64_t left = g.length - first;
      const int count = int(min(left, int64_t(S::kTile)));
      const bool cut = count < S::kTile;
      const auto origin = [&](int operand, int size) {
        return g.data[operand] + (offsets[operand] + (kReverse ? -first - (S::kTile - 1) : first)) * size;
      };
      const Extent<S::kTile, S::kSize, kReverse> extent(count);
      const auto load = [&](auto k) {
        if (extent.inner_bytes() > 0)
          bulk_load(input(ring.stage, k()) + extent.inner_low, origin(k(), S::kSize) + extent.inner_low,
                    extent.inner_bytes(), gate);
      };
      const int late = cut ? S::kInputs : S::kReplaced;
      if (late < S::kInputs) announce(gate, (S::kInputs - late) * extent.inner_bytes());
      for_each<S::kInputs>([&](auto k) {
        if (k() >= late) load(k);
      });
      if (refills && S::kDrawsEarly) send();
      task.tile = tile;
      task.place = place;
      task.count = count;
      task.ends = left == count;
      task.row = row;
      for_each<S::kOutputs>([&](auto k) {
        constexpr int slot = S::kInputs + k();
        task.out[k()] = g.data[slot] ? origin(slot, S::template kOutputSize<k()>) : nullptr;
      });
      if (refills) wait_for_bulk_reads();
      const auto behind = [](int bytes) { return kReverse ? -bytes : S::kTile * S::kSize; };
      const bool follows = Op::kNeighbour && left > count;
      // Sixteen bytes may be more than what is left of the row.
      const bool follows_whole = follows && (left - count) * S::kSize >= 16;
      std::byte *beyond = control.beyond[ring.stage];
      if (cut) {
        for_each<S::kInputs>([&](auto k) {
          extent.template copy_edges<at<k(), typename Op::Inputs>>(input(ring.stage, k()), origin(k(), S::kSize));
        });
      }
      if (follows && !follows_whole) {
        using T = at<S::kInputs - 1, typename Op::Inputs>;
        *reinterpret_cast<T *>(beyond + (kReverse ? 16 - S::kSize : 0)) =
            *reinterpret_cast<const T *>(origin(S::kInputs - 1, S::kSize) + behind(S::kSize));
      }
      arrive_and_announce(gate, extent.inner_bytes() * late + (follows_whole ? 16 : 0));
      for_each<S::kInputs>([&](auto k) {
        if (k() < late) load(k);
      });
      if (follows_whole) bulk_load(beyond, origin(S::kInputs - 1, S::kSize) + behind(16), 16, gate);
    }
    wait_for_bulk_stores();
    return;
  }

  if (warp == S::kWorkers + 1) {  // the clerk
    for (Ring<kStages> ring;; ring.advance()) {
      pass(&control.full[ring.stage], ring.parity);
      const Task &task = control.task[ring.stage];
      if (task.tile >= tiles.total) return;
      pass(&control.reduced[ring.stage], ring.parity);
      Map others = lane < kWarps ? control.totals[ring.stage][lane] : op.identity();
      others = warp_scan<kWarps>(op, others, lane);
      if (lane == kWarps - 1)
        publish(tiles.aggregates + size_t(task.tile) * Words<Map>::count,
                task.place == 0 ? with_initial(op, g, others, task.row) : others, kReady);
      const Map left = shuffle_up(others, 1);
      if (lane < kWarps) {
        control.lefts[ring.stage][lane] = left;
        // Each lane for what it has written.
        arrive(&control.ready[ring.stage]);
      }
    }
  }

  if (warp == S::kWorkers + 2) {  // the messenger: each lane for a stage
    uint32_t parity = 0;
    bool asks = false;
    int last = INT32_MAX;
    for (int i = lane < kStages ? lane : INT32_MAX; __any_sync(kAll, i < last);) {
      const Task &task = control.task[lane < kStages ? lane : 0];
      bool ended = false;
      if (i < last && !asks && is_open(&control.full[lane], parity)) {
        ended = task.tile >= tiles.total;
        asks = !ended;
      }
      last = min(last, int(__reduce_min_sync(kAll, ended ? unsigned(i) : unsigned(INT32_MAX))));
      Value prefix = op.start();
      bool got = false;
      if (asks) {
        got = task.place == 0;
        if (got) {
          prefix = initial_value(op, g, task.row);
        } else {
          got = receive(tiles.prefixes + size_t(task.tile) * Words<Value>::count, prefix, kReady);
        }
      }
      if (got) {
        control.prefixes[lane] = prefix;
        arrive(&control.ready[lane]);
        asks = false;
        parity ^= 1;
        i += kStages;
      }
      if (!__any_sync(kAll, got)) __nanosleep(20);
    }
    return;
  }

  // A worker.
  const int group = warp / kWarps;
  const int place = warp - group * kWarps;  // in the tile
  const int run = kReverse ? (kWarps - place) * kWarp - 1 - lane : place * kWarp + lane;
  const auto slots_of = [&](const Task &task) {
    return Tile::one_row(g, task.row, int64_t(task.place) * S::kTile + place * S::kItems);
  };
  const auto take = [&](Tile &tile, int stage, const Task &task) {
    for_each<S::kInputs>([&](auto k) {
      held<k()>(tile.raw).load(input(stage, k()) + run * S::kRunBytes);
      held<k()>(tile.raw).turn_if(kReverse && !kBack);
    });
    typename Op::Acc beyond = typename Op::Acc(0);
    if constexpr (Op::kNeighbour) {
      using T = at<S::kInputs - 1, typename Op::Inputs>;
      if (lane == kWarp - 1) {
        const std::byte *next =
            input(stage, S::kInputs - 1) + (kReverse ? run * S::kRunBytes - S::kSize : (run + 1) * S::kRunBytes);
        if (place == kWarps - 1) next = control.beyond[stage] + (kReverse ? 16 - S::kSize : 0);
        beyond = widen<typename Op::Acc>(*reinterpret_cast<const T *>(next));
      }
    }
    if (task.ends) {
      const Slots slots = slots_of(task);
      // What lies beyond the end mustn't show.
      const int left = slots.left - lane * kRun;
      for_each<S::kInputs>([&](auto k) {
        using T = at<k(), typename Op::Inputs>;
#pragma unroll
        for (int i = 0; i < kRun; ++i)
          if (i >= left) held<k()>(tile.raw).replace(Tile::spot(i), T{});
      });
      tile.find_next(op, g, slots, beyond, lane);
    } else if constexpr (Op::kNeighbour) {
      const auto following =
          shuffle_down(held<S::kInputs - 1>(tile.raw).template widened<typename Op::Acc>(Tile::spot(0)), 1);
      tile.next = lane < kWarp - 1 ? following : beyond;
    }
    tile.find_restarts();
  };
  const auto again = [&](int stage) {
    StageReader<Op, kRun, kReverse> reader;
    for (int k = 0; k < S::kInputs; ++k) reader.run[k] = input(stage, k) + run * S::kRunBytes;
    return reader;
  };
  Map before[kAhead + 1];
  Common<Op> common[kAhead + 1] = {};
#pragma unroll
  for (int q = 0; q <= kAhead; ++q) before[q] = op.identity();
  Ring<kStages> ring = {group};
  Ring<kStages> behind = {group};
  int end = INT32_MAX;
  for (int i = 0; i - kAhead < end; ++i) {
#pragma unroll
    for (int q = 0; q < kAhead; ++q) {
      before[q] = before[q + 1];
      common[q] = common[q + 1];
    }
    if (i < end) {
      pass(&control.full[ring.stage], ring.parity);
      const Task &task = control.task[ring.stage];
      if (task.tile >= tiles.total) {
        end = i;
      } else {
        Tile tile;
        take(tile, ring.stage, task);
        const Map inclusive = tile.reduce(op, g, slots_of(task), lane, again(ring.stage));
        before[kAhead] = exclusive_of(op, inclusive, lane);
        common[kAhead] = tile.common;
        if (lane == kWarp - 1) {
          control.totals[ring.stage][place] = inclusive;
          arrive(&control.reduced[ring.stage]);
        }
        ring.advance(kGroups);
      }
    }
    if (i >= kAhead && i - kAhead < end) {
      const Task &task = control.task[behind.stage];
      Tile tile;
      take(tile, behind.stage, task);
      if constexpr (S::kDrawsEarly) {
        __syncwarp();
        if (lane == 0) arrive(&control.taken[behind.stage]);
      }
      tile.common = common[0];
      pass(&control.ready[behind.stage], behind.parity);
      const Map within = place > 0 ? op.combine(control.lefts[behind.stage][place], before[0]) : before[0];
      Held<typename Op::Outputs, kRun> outputs;
      tile.outputs(op, g, slots_of(task), op.apply(within, control.prefixes[behind.stage]), lane, outputs,
                   again(behind.stage));
      for_each<S::kOutputs>([&](auto k) {
        held<k()>(outputs).turn_if(kReverse && !kBack);
        held<k()>(outputs).store(output(behind.stage, k) + run * (kRun * S::template kOutputSize<k()>));
      });
      show_copy_engine();
      // What the carrier itself reads, each lane shows for what it has written.
      if (task.count < S::kTile) arrive(&control.written[behind.stage]);
      __syncwarp();
      if (lane == 0) arrive(&control.finished[behind.stage]);
      behind.advance(kGroups);
    }
  }
#endif
}

}  // namespace baracuda::scan
