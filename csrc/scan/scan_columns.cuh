// SPDX-License-Identifier: Apache-2.0
// Scans along an axis that isn't the one with the shortest steps: neighbouring threads take
// neighbouring columns. Tiles are 32 x kColumns wide and kLines x kGroups deep, in registers; a tile
// waits for the carry of the tile before it along the axis. Tiles are given out by ticket, part by
// part of the columns, and of a part all column tiles of one depth before those of the next, so that
// what a tile waits for is finished or running.
#pragma once

#include "scan/scan_long.cuh"

namespace baracuda::scan {

// What finds columns without dividing: by the extent of the innermost row axis.
struct ColumnFinder {
  Divider inner;
  bool divides = false;  // two row axes, and columns that 32 bits count
};

template <int kCount>
__device__ __forceinline__ void column_offsets(const Geometry &g, const ColumnFinder &finder, int64_t column,
                                               int64_t (&offset)[kCount]) {
  if (finder.divides) {
    const uint32_t outer = finder.inner.divide(uint32_t(column));
    const uint32_t place = uint32_t(column) - outer * finder.inner.divisor;
#pragma unroll
    for (int k = 0; k < kCount; ++k) offset[k] = outer * g.stride[k][0] + place * g.stride[k][1];
  } else {
    row_offsets(g, column, 0, offset);
  }
}

struct ColumnTiles {
  Divider per_part;  // by the number of a part's tiles
  Divider wide;      // by the number of its tiles of columns; the last part's may not all exist
  uint32_t down;     // tiles along the axis
  ColumnFinder finder;
  uint32_t *ticket;
  uint64_t *carries;  // one slot for each column
};

// Whether neighbouring columns are pairs for kInPairs.
template <class Op, int kColumns>
constexpr bool kPairs = kInPairs<Op> && kColumns % 2 == 0;

// Whether neighbouring columns are pairs for kRestarts.
template <class Op, int kColumns>
constexpr bool kRestartPairs = kRestarts<Op> && kColumns % 2 == 0;

// All bits of a half where the elements of two pairs differ, as NaN does from anything.
template <class T>
__device__ __forceinline__ uint32_t differing_pair(uint32_t a, uint32_t b) {
  uint32_t differ;
  if constexpr (std::is_same_v<T, bfloat16>) {
    asm("set.neu.u32.bf16x2 %0, %1, %2;" : "=r"(differ) : "r"(a), "r"(b));
  } else {
    asm("set.neu.u32.f16x2 %0, %1, %2;" : "=r"(differ) : "r"(a), "r"(b));
  }
  return differ;
}
// And where an element is a number.
template <class T>
__device__ __forceinline__ uint32_t numbers_of_pair(uint32_t pair) {
  uint32_t numbers;
  if constexpr (std::is_same_v<T, bfloat16>) {
    asm("set.num.u32.bf16x2 %0, %1, %1;" : "=r"(numbers) : "r"(pair));
  } else {
    asm("set.num.u32.f16x2 %0, %1, %1;" : "=r"(numbers) : "r"(pair));
  }
  return numbers;
}

// Among a thread's lines and one more.
template <int kColumns, class Line, int kLines, class More>
__device__ __forceinline__ bool zeros_of_both_signs(Line (&lines)[kLines], const More &more) {
  ZerosSeen zeros;
#pragma unroll
  for (int w = 0; w < kColumns / 2; ++w) {
    zeros.see(more(w));
#pragma unroll
    for (int r = 0; r < kLines; ++r) zeros.see(held<0>(lines[r]).word[w]);
  }
  return zeros.both();
}

// `kLines` lines of a thread's `kColumns` columns, which are neighbours in memory and accessed together.
template <class Op, int kColumns, int kLines>
struct ColumnLines {
  using Map = typename Op::Map;
  using Value = typename Op::Value;
  using A = typename Op::Acc;
  static constexpr int kInputs = Op::Inputs::size;
  static constexpr int kLast = kInputs - 1;
  static constexpr bool kKeeps = kKeepsSums<Op>;
  using Outputs = Held<typename Op::Outputs, kColumns>;

  Held<typename Op::Inputs, kColumns> lines[kLines];
  Packed<at<kLast, typename Op::Inputs>, kColumns> beyond;  // the last input's line behind these
  A next[kColumns];
  Packed<at<kLast, typename Op::Inputs>, kColumns> next_pairs;
  Common<Op, kKeeps ? kLines : 0> common[kColumns];
  Map total[kColumns];
  int64_t first;  // of the lines, along the axis
  int64_t left;   // lines from there on
  bool there;     // the columns exist

  // Of a column in operands of one element for each.
  template <class Start>
  __device__ __forceinline__ static auto place_of(const Geometry &g, const Start &start, int j) {
    return [&g, &start, j](int slot) { return start(slot) + (j > 0 ? j * g.stride[slot][g.rank - 1] : 0); };
  }
  // What follows the last line.
  template <class Start>
  __device__ __forceinline__ void find_next(const Op &op, const Geometry &g, const Start &start) {
    if constexpr (Op::kNeighbour) {
      using T = at<kLast, typename Op::Inputs>;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) next[j] = beyond.template widened<A>(j);
      next_pairs = beyond;
      if (left <= kLines) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          // Read beyond the last line, this is that line's.
          const A behind = behind_last(op, next[j], given_value<Op>(g, place_of(g, start, j)));
          next[j] = behind;
          next_pairs.replace(j, narrow<T>(behind));
#pragma unroll
          for (int r = 1; r < kLines; ++r)
            if (r == left) held<kLast>(lines[r]).replace(j, narrow<T>(behind));
        }
      }
    }
  }
  __device__ __forceinline__ typename Op::Item item_at(const Op &op, const Geometry &g, int r, int j) const {
    typename Op::Item item = {};
    for_each<kInputs>([&](auto k) { item.in[k()] = held<k()>(lines[r]).template widened<A>(j); });
    if constexpr (Op::kNeighbour)
      item.next = r + 1 < kLines ? held<kLast>(lines[r + 1 < kLines ? r + 1 : r]).template widened<A>(j) : next[j];
    if constexpr (Op::kPosition) item.position = uint32_t(op.flags.reverse ? g.length - 1 - (first + r) : first + r);
    return item;
  }
  // From memory once more, as long as no output has been stored. `start(k)` is where the columns begin.
  template <class Start>
  __device__ __forceinline__ auto again_at(const Geometry &g, const Start &start, int j) const {
    return [&g, &start, this, j](int r) {
      typename Op::Item item = {};
      for_each<kInputs>([&](auto k) {
        using T = at<k(), typename Op::Inputs>;
        const T *from = reinterpret_cast<const T *>(g.data[k()]) + start(k()) + j;
        if (r < left) item.in[k()] = widen<A>(from[(first + r) * g.step[k()]]);
      });
      return item;
    };
  }
  // Which of two columns have a record in a line: all bits of a half, or none.
  __device__ __forceinline__ uint32_t records_at(int r, int w) const {
    using T = at<kLast, typename Op::Inputs>;
    const uint32_t following =
        r + 1 < kLines ? held<kLast>(lines[r + 1 < kLines ? r + 1 : r]).word[w] : next_pairs.word[w];
    return differing_pair<T>(held<kLast>(lines[r]).word[w], following) & numbers_of_pair<T>(following);
  }
  // The sum, or zero behind a record.
  __device__ __forceinline__ static A restarted(A sum, uint32_t records, int j) {
    return __uint_as_float(__float_as_uint(sum) & ~__byte_perm(records, 0, j == 0 ? 0x9999 : 0xbbbb));
  }
  // Finds `total`, the map of each column's lines.
  template <class Start>
  __device__ __forceinline__ void fold_all(const Op &op, const Geometry &g, const Start &start) {
    const auto fold_lines = [&] {
      constexpr bool kKeys = kKeysInPairs<Op> && kColumns % 2 == 0;
      [[maybe_unused]] auto largest = held<0>(lines[0]);
      if constexpr (kKeys) {
#pragma unroll
        for (int r = 1; r < kLines; ++r)
#pragma unroll
          for (int w = 0; w < kColumns / 2; ++w)
            largest.word[w] = larger_pair<at<0, typename Op::Inputs>>(largest.word[w], held<0>(lines[r]).word[w]);
      }
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const auto get = [&](int r) { return item_at(op, g, r, j); };
        total[j] = fold<kLines>(op, common[j], get, again_at(g, start, j), [&] {
          if constexpr (kKeys) {
            return largest.template widened<A>(j);
          } else {
            return largest_key<kLines, Op>(get);
          }
        });
      }
    };
    if constexpr (kPairs<Op, kColumns>) {
      using T = at<0, typename Op::Inputs>;
      bool zero = false;
#pragma unroll
      for (int w = 0; w < kColumns / 2; ++w) {
        Packed<T, 2> pair = {{held<0>(lines[0]).word[w]}};
#pragma unroll
        for (int r = 1; r < kLines; ++r)
          pair.word[0] = op.flags.smallest ? extreme_pair<T, true>(pair.word[0], held<0>(lines[r]).word[w])
                                           : extreme_pair<T, false>(pair.word[0], held<0>(lines[r]).word[w]);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          total[2 * w + j] = turned(pair.template widened<A>(j), op.flags.smallest);
          zero |= total[2 * w + j] == A(0);
        }
      }
      if (zero && zeros_of_both_signs<kColumns>(lines, [](int) { return kNoZeros; })) fold_lines();
    } else if constexpr (kRestartPairs<Op, kColumns>) {
#pragma unroll
      for (int w = 0; w < kColumns / 2; ++w) {
        A sum[2];
        uint32_t any = 0;
#pragma unroll
        for (int r = 0; r < kLines; ++r) {
          const uint32_t records = records_at(r, w);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const A dy = held<0>(lines[r]).template widened<A>(2 * w + j);
            sum[j] = restarted(r == 0 ? dy : add(sum[j], dy), records, j);
          }
          any |= records;
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) total[2 * w + j] = {sum[j], j == 0 ? any & 0xffffu : any >> 16};
      }
    } else {
      fold_lines();
    }
  }
  // Stores the outputs, line by line: store(r, line). `value` comes before the lines.
  template <class Start, class Store>
  __device__ __forceinline__ void run_all(const Op &op, const Geometry &g, const Start &start, Value (&value)[kColumns],
                                          const Store &store) {
    Outputs outputs;
    [[maybe_unused]] A pending[Op::Outputs::size];
    if constexpr (kPairs<Op, kColumns>) {
      using T = at<0, typename Op::Inputs>;
      auto &carry = held<0>(outputs);
      bool zero = false;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        zero |= value[j] <= A(0) && !(total[j] < A(0));
        if (j % 2 == 1)
          carry.put_pair(j - 1, turned(value[j - 1], op.flags.smallest), turned(value[j], op.flags.smallest));
      }
      if (!zero || !zeros_of_both_signs<kColumns>(lines, [&](int w) { return carry.word[w]; })) {
#pragma unroll
        for (int r = 0; r < kLines; ++r) {
          if (op.flags.exclusive) store(r, outputs);
#pragma unroll
          for (int w = 0; w < Packed<T, kColumns>::kWords; ++w) {
            const uint32_t pair = held<0>(lines[r]).word[w];
            carry.word[w] = op.flags.smallest ? extreme_pair<T, true>(carry.word[w], pair)
                                              : extreme_pair<T, false>(carry.word[w], pair);
          }
          if (!op.flags.exclusive) store(r, outputs);
        }
        return;
      }
    }
    if constexpr (kRestartPairs<Op, kColumns>) {
#pragma unroll
      for (int r = 0; r < kLines; ++r) {
#pragma unroll
        for (int w = 0; w < kColumns / 2; ++w) {
          const uint32_t records = records_at(r, w);
#pragma unroll
          for (int j = 0; j < 2; ++j)
            value[2 * w + j] = add(value[2 * w + j], held<0>(lines[r]).template widened<A>(2 * w + j));
          outputs.items.put_pair(2 * w, value[2 * w], value[2 * w + 1]);
          outputs.items.word[w] &= records;
#pragma unroll
          for (int j = 0; j < 2; ++j) value[2 * w + j] = restarted(value[2 * w + j], records, j);
        }
        store(r, outputs);
      }
      return;
    }
    if constexpr (Op::kBased) {
      // Column by column; outputs take the place of the sums, or of the inputs.
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
        run<kLines>(
            op, value[j], common[j], [&](int r) { return item_at(op, g, r, j); }, again_at(g, start, j),
            [&](int r, const typename Op::Result &result, const Value &) {
              if constexpr (kKeeps) {
                common[j].sums[r] = result.out[0];
              } else {
                held<0>(lines[r]).replace(j, narrow<at<0, typename Op::Outputs>>(result.out[0]));
              }
            });
    }
    // Zero, which the compiler can't tell.
    [[maybe_unused]] const uint32_t nothing = uint32_t(g.rank) >> 31;
    // In 32 bits: beyond one line more it does not matter.
    [[maybe_unused]] const int lines_left = int(min(left, int64_t(kLines + 1)));
    with_exclusive(op, [&](const Op &known) {
#pragma unroll
      for (int r = 0; r < kLines; ++r) {
        // A single input is widened twice, from fewer registers; coefficients of several are kept.
        if constexpr (kInputs == 1 && !kKeeps) held<0>(lines[r]).forget(nothing);
        if constexpr (Op::kBased && !kKeeps) {
          held<0>(outputs) = held<0>(lines[r]);
        } else {
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
            typename Op::Result result;
            if constexpr (kKeeps) {
              result.out[0] = common[j].sums[r];
            } else {
              const Value after = known.step(value[j], item_at(op, g, r, j), result);
              // The final value stays until it is stored once, not in each line's code.
              if (!Op::kFinal || r < lines_left) value[j] = after;
            }
            keep<Op, kColumns>(outputs, j, result, pending);
          }
        }
        store(r, outputs);
      }
    });
    if constexpr (Op::kFinal) {
      if (there && lines_left > 0 && lines_left <= kLines) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) store_final<Op>(g, place_of(g, start, j), value[j]);
      }
    }
  }
};

template <class Op, int kColumns, int kLines, int kGroups, int kBlocks>
__global__ void __launch_bounds__(kGroups *kWarp, kBlocks)
    scan_columns(const __grid_constant__ Op op, const __grid_constant__ Geometry g,
                 const __grid_constant__ ColumnTiles tiles) {
  using Map = typename Op::Map;
  using Value = typename Op::Value;
  constexpr int kTileColumns = kColumns * kWarp;
  constexpr int kInputs = Op::Inputs::size;
  constexpr int kLast = kInputs - 1;
  constexpr size_t kWords = Words<Value>::count;
  // Of each column: the map of a group's lines, and then the value before them.
  union Slot {
    Map map;
    Value value;
  };
  __shared__ Slot slots[kGroups][kTileColumns];
  // Which tile it is along the axis and across, and where the lanes' columns begin in each operand.
  __shared__ uint32_t depth;
  __shared__ uint32_t across;
  __shared__ int64_t starts[Layout<Op>::kFound][kWarp];
  const int lane = int(threadIdx.x) % kWarp;
  const int group = int(threadIdx.x) / kWarp;

  wait_for_earlier_work();
  // One group finds them for all.
  if (group == 0) {
    uint32_t ticket = blockIdx.x;
    if (tiles.down > 1) {
      if (lane == 0) ticket = atomicAdd(tiles.ticket, 1u);
      ticket = __shfl_sync(kAll, ticket, 0);
    }
    const uint32_t part = tiles.per_part.divide(ticket);
    const uint32_t of_part = ticket - part * tiles.per_part.divisor;
    const uint32_t down = tiles.wide.divide(of_part);
    const uint32_t along = (part - down) * tiles.wide.divisor + of_part;
    const int64_t column = int64_t(along) * kTileColumns + lane * kColumns;
    int64_t start[Layout<Op>::kFound];
    column_offsets(g, tiles.finder, column < g.rows ? column : 0, start);
#pragma unroll
    for (int k = 0; k < Layout<Op>::kFound; ++k) starts[k][lane] = start[k];
    if (lane == 0) {
      depth = down;
      across = along;
    }
  }
  __syncthreads();
  const int64_t column = int64_t(across) * kTileColumns + lane * kColumns;
  const int64_t first = (int64_t(depth) * kGroups + group) * kLines;
  const bool there = column < g.rows;
  // Lines from this thread's first on. What is read beyond the last one repeats it: it changes
  // nothing before it.
  const int64_t left = g.length - first;

  ColumnLines<Op, kColumns, kLines> held_lines;
  held_lines.first = first;
  held_lines.left = left;
  held_lines.there = there;
  auto &lines = held_lines.lines;
  for_each<kInputs>([&](auto k) {
    using T = at<k(), typename Op::Inputs>;
    const int64_t step = g.step[k()];
    const T *from =
        reinterpret_cast<const T *>(g.data[k()]) + (starts[k()][lane] + (left < 1 ? g.length - 1 : first) * step);
    if (left > kLines) {
#pragma unroll
      for (int r = 0; r < kLines; ++r) {
        held<k()>(lines[r]).load(from);
        from += step;
      }
    } else {
#pragma unroll
      for (int r = 0; r < kLines; ++r) {
        held<k()>(lines[r]).load(from);
        // Nothing but this keeps both loops from becoming one, with all addresses in registers.
        asm volatile("");
        if (r + 1 < left) from += step;
      }
    }
    if constexpr (Op::kNeighbour && k() == kLast) held_lines.beyond.load(from);
  });

  const auto start = [&](int k) { return starts[k][lane]; };
  held_lines.find_next(op, g, start);
  held_lines.fold_all(op, g, start);
#pragma unroll
  for (int j = 0; j < kColumns; ++j) slots[group][lane * kColumns + j].map = held_lines.total[j];
  __syncthreads();
  // A thread for each column fetches what the tile before left, takes it from group to group and leaves what the next
  // tile needs.
  static_assert(kTileColumns <= kGroups * kWarp);
  if (int(threadIdx.x) < kTileColumns) {
    const int own = int(threadIdx.x);
    const int64_t own_column = int64_t(across) * kTileColumns + own;
    const bool exists = own_column < g.rows;
    uint64_t *carry = tiles.carries + size_t(own_column) * kWords;
    Value value = op.start();
    if (exists) value = depth == 0 ? initial_value(op, g, own_column) : await<Value, true>(carry, depth);
    // A loop, across which the compiler doesn't hold on to elements that it took apart. Exponentials it keeps anyway.
    constexpr int kAtOnce = Op::kBased || Op::kHeavy ? kGroups : 4;
#pragma unroll kAtOnce
    for (int of = 0; of < kGroups; ++of) {
      const Map map = slots[of][own].map;
      slots[of][own].value = value;
      value = op.apply(map, value);
    }
    if (exists && depth + 1 < tiles.down) publish<true>(carry, value, depth + 1);
  }
  __syncthreads();
  let_next_kernel_start();
  Value value[kColumns];
#pragma unroll
  for (int j = 0; j < kColumns; ++j) value[j] = slots[group][lane * kColumns + j].value;

  // Lines of outputs, one after the other.
  const int count = there ? int(min(left, int64_t(kLines))) : 0;
  std::byte *to[Op::Outputs::size];
  for_each<Op::Outputs::size>([&](auto k) {
    using U = at<k(), typename Op::Outputs>;
    constexpr int slot = kInputs + k();
    to[k()] = g.data[slot] + (starts[slot][lane] + first * g.step[slot]) * int64_t(sizeof(U));
  });
  const auto store = [&](int r, const Held<typename Op::Outputs, kColumns> &line) {
    for_each<Op::Outputs::size>([&](auto k) {
      using U = at<k(), typename Op::Outputs>;
      constexpr int slot = kInputs + k();
      if (r < count && (Op::Outputs::size == 1 || g.data[slot])) held<k()>(line).store(to[k()]);
      to[k()] += g.step[slot] * int64_t(sizeof(U));
    });
  };
  held_lines.run_all(op, g, start, value, store);
}

}  // namespace baracuda::scan
