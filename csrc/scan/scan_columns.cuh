// SPDX-License-Identifier: Apache-2.0
// Scans along an axis that isn't the one with the shortest steps: neighbouring threads take
// neighbouring columns. Tiles are kColumns columns wide and kLines x kGroups deep; a tile waits for
// the carry of the tile before it along the axis. Tiles are given out by ticket, all column tiles
// of one depth before those of the next, so that what a tile waits for is finished or running.
#pragma once

#include "scan/scan_long.cuh"

namespace baracuda::scan {

constexpr int kColumnGroups = 16;  // warps, one below the other
constexpr int kColumnThreads = kColumnGroups * kWarp;

template <class Op, int kLinesOfThread = 0>
struct ColumnShape {
  // Columns of a thread: eight bytes of the widest input, but not more than four.
  static constexpr int kWide = 8 / Bytes<typename Op::Inputs, 1>::widest;
  static constexpr int kColumns = kWide > 4 ? 4 : kWide;
  static constexpr int kTileColumns = kColumns * kWarp;
  static constexpr int kInputBytes = Bytes<typename Op::Inputs, kColumns>::sum / kWarp;  // of a thread and line
  // Lines of a thread: fewer, where each takes much shared memory.
  static constexpr int kLines = kLinesOfThread ? kLinesOfThread : kInputBytes <= 16 ? 16 : 4;
  static constexpr int kTileLines = kLines * kColumnGroups;
  struct Shared {
    typename Op::Map maps[kColumnGroups][kTileColumns];
    typename Op::Value carry[kTileColumns];
    uint32_t ticket;
    alignas(16) std::byte lines[(Op::kNeighbour ? kLines * kColumnThreads + kWarp : kLines * kColumnThreads) *
                                kInputBytes];
  };
};

struct ColumnTiles {
  uint32_t across;  // tiles of columns
  uint32_t down;    // tiles along the axis
  uint32_t *ticket;
  uint64_t *carries;  // one slot for each column
};

template <class Op, int kLinesOfThread = 0>
__global__ void __launch_bounds__(kColumnThreads, 2)
    scan_columns(const __grid_constant__ Op op, const __grid_constant__ Geometry g,
                 const __grid_constant__ ColumnTiles tiles, int vectors) {
  using Shape = ColumnShape<Op, kLinesOfThread>;
  using Map = typename Op::Map;
  using Value = typename Op::Value;
  using A = typename Op::Acc;
  constexpr int kColumns = Shape::kColumns;
  constexpr int kLines = Shape::kLines;
  constexpr int kInputs = Op::Inputs::size;
  constexpr int kLast = kInputs - 1;
  using Last = at<kLast, typename Op::Inputs>;
  constexpr size_t kWords = Words<Value>::count;
  extern __shared__ __align__(16) std::byte raw[];
  typename Shape::Shared &shared = *reinterpret_cast<typename Shape::Shared *>(raw);
  const int lane = int(threadIdx.x) % kWarp;
  const int group = int(threadIdx.x) / kWarp;

  uint32_t ticket = blockIdx.x;
  if (tiles.down > 1) {
    if (threadIdx.x == 0) shared.ticket = atomicAdd(tiles.ticket, 1u);
    __syncthreads();
    ticket = shared.ticket;
  }
  const uint32_t depth = ticket / tiles.across;
  const int64_t tile_column = int64_t(ticket - depth * tiles.across) * Shape::kTileColumns;
  const int64_t tile_line = int64_t(depth) * Shape::kTileLines;
  const int64_t first = tile_line + group * kLines;
  const int64_t left = g.length - first;  // lines of this thread and those behind

  // Column j of this thread.
  const auto column = [&](int j) { return tile_column + (vectors ? lane * kColumns + j : j * kWarp + lane); };
  const auto in_tile = [&](int j) { return vectors ? lane * kColumns + j : j * kWarp + lane; };

  // Columns that are neighbours in memory share one offset.
  int64_t base[kInputs + Op::Outputs::size];
  for_each<kInputs + Op::Outputs::size>(
      [&](auto operand) { base[operand()] = row_offset(g, operand(), min(column(0), g.rows - 1)); });
  const auto offset = [&](int operand, int j) {
    return vectors || j == 0 ? base[operand] + j : row_offset(g, operand, min(column(j), g.rows - 1));
  };

  // Each thread copies to slots of its own: line r of operand k at [k][r][thread].
  constexpr auto slot_of = [](int k_offset, int line, int thread, int bytes, int lines) {
    (void)lines;
    return k_offset + (line * kColumnThreads + thread) * bytes;
  };
  int place = 0;
  for_each<kInputs>([&](auto k) {
    using T = at<k(), typename Op::Inputs>;
    constexpr int kBytes = int(sizeof(T)) * kColumns;
    const T *data = reinterpret_cast<const T *>(g.data[k()]);
    const int64_t step = g.step[k()];
    // The line behind the tile is wanted, too, by the last group.
    const int lines = Op::kNeighbour && k() == kLast && group == kColumnGroups - 1 ? kLines + 1 : kLines;
    const auto slot_at = [&](int r) {
      return shared.lines + (r < kLines ? slot_of(place, r, int(threadIdx.x), kBytes, kLines)
                                        : slot_of(place, kLines, lane, kBytes, kLines));
    };
    if (vectors) {
      const T *from = data + base[k()] + first * step;
      if (column(0) < g.rows) {
#pragma unroll
        for (int r = 0; r < kLines + 1; ++r) {
          if (r < lines && r < left) {
            if constexpr (kBytes >= 4) {
              copy_async<kBytes>(shared_address(slot_at(r)), from);
            } else {
              *reinterpret_cast<Unsigned<kBytes> *>(slot_at(r)) = *reinterpret_cast<const Unsigned<kBytes> *>(from);
            }
          }
          from += step;
        }
      }
    } else {
#pragma unroll 1
      for (int j = 0; j < kColumns; ++j) {
        if (column(j) >= g.rows) continue;
        const T *from = data + offset(k(), j) + first * step;
#pragma unroll
        for (int r = 0; r < kLines + 1; ++r) {
          if (r < lines && r < left) {
            T *to = reinterpret_cast<T *>(slot_at(r)) + j;
            if constexpr (sizeof(T) >= 4) {
              copy_async<sizeof(T)>(shared_address(to), from);
            } else {
              *to = *from;
            }
          }
          from += step;
        }
      }
    }
    place += (kLines * kColumnThreads + (Op::kNeighbour && k() == kLast ? kWarp : 0)) * kBytes;
  });
  commit_copies();
  wait_copies<0>();
  if constexpr (Op::kNeighbour) __syncthreads();

  const auto load = [&](auto k, int line, int thread, int j) {
    using T = at<k(), typename Op::Inputs>;
    constexpr int kBytes = int(sizeof(T)) * kColumns;
    int base = 0;
    for_each<k()>([&](auto before) {
      base += kLines * kColumnThreads * kColumns * int(sizeof(at<before(), typename Op::Inputs>));
    });
    return reinterpret_cast<const T *>(shared.lines + slot_of(base, line, thread, kBytes, kLines))[j];
  };
  // What follows this thread's last line.
  A beyond[kColumns];
  if constexpr (Op::kNeighbour) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      beyond[j] = A(0);
      if (left > kLines)
        beyond[j] = widen<A>(group < kColumnGroups - 1
                                 ? load(std::integral_constant<int, kLast>{}, 0, int(threadIdx.x) + kWarp, j)
                                 : load(std::integral_constant<int, kLast>{}, kLines, lane, j));
      if constexpr (Op::kFinal) {
        if (left > 0 && left <= kLines && column(j) < g.rows) beyond[j] = behind_last<Op>(g, column(j));
      }
    }
  }
  const auto item_at = [&](int r, int j) {
    typename Op::Item item = {};
    for_each<kInputs>([&](auto k) { item.in[k()] = widen<A>(load(k, r, int(threadIdx.x), j)); });
    if constexpr (Op::kNeighbour) {
      item.has_next = r + 1 < left;
      item.next = r + 1 < kLines && item.has_next
                      ? widen<A>(load(std::integral_constant<int, kLast>{}, r + 1 < kLines ? r + 1 : r,
                                      int(threadIdx.x), j))
                      : beyond[j];
    }
    if constexpr (Op::kPosition) item.position = uint32_t(op.flags.reverse ? g.length - 1 - (first + r) : first + r);
    return item;
  };

  Map map[kColumns];
#pragma unroll
  for (int j = 0; j < kColumns; ++j) map[j] = op.identity();
#pragma unroll
  for (int r = 0; r < kLines; ++r) {
    if (r < left) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) map[j] = op.combine(map[j], op.map(item_at(r, j)));
    }
  }
#pragma unroll
  for (int j = 0; j < kColumns; ++j) shared.maps[group][in_tile(j)] = map[j];
  __syncthreads();
  Map before[kColumns];
#pragma unroll
  for (int j = 0; j < kColumns; ++j) before[j] = op.identity();
  for (int above = 0; above < group; ++above) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) before[j] = op.combine(before[j], shared.maps[above][in_tile(j)]);
  }
  // The last group fetches what the tile before left and leaves what the next needs.
  if (group == kColumnGroups - 1) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int64_t c = column(j);
      Value carry = op.start();
      if (c < g.rows) {
        uint64_t *slot = tiles.carries + size_t(c) * kWords;
        carry = depth == 0 ? initial_value(op, g, c) : await<Value>(slot, depth);
        if (depth + 1 < tiles.down) publish(slot, Value(op.apply(op.combine(before[j], map[j]), carry)), depth + 1);
      }
      shared.carry[in_tile(j)] = carry;
    }
  }
  __syncthreads();
  Value value[kColumns];
#pragma unroll
  for (int j = 0; j < kColumns; ++j) value[j] = op.apply(before[j], shared.carry[in_tile(j)]);
#pragma unroll
  for (int r = 0; r < kLines; ++r) {
    if (r >= left) continue;
    Held<typename Op::Outputs, kColumns> outputs;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      typename Op::Result result;
      value[j] = op.step(value[j], item_at(r, j), result);
      keep<Op, kColumns>(outputs, j, result);
      if constexpr (Op::kFinal) {
        if (first + r == g.length - 1 && column(j) < g.rows) store_final<Op>(g, column(j), value[j]);
      }
    }
    for_each<Op::Outputs::size>([&](auto k) {
      using U = at<k(), typename Op::Outputs>;
      constexpr int operand = kInputs + k();
      if (Op::Outputs::size > 1 && !g.data[operand]) return;
      U *to = reinterpret_cast<U *>(g.data[operand]) + (first + r) * g.step[operand];
      if (vectors) {
        if (column(0) < g.rows) store_lane<U, kColumns>(to + base[operand], 1, kForward, 0, kColumns, held<k()>(outputs));
      } else {
#pragma unroll
        for (int j = 0; j < kColumns; ++j)
          if (column(j) < g.rows) to[offset(operand, j)] = held<k()>(outputs)[j];
      }
    });
  }
}

}  // namespace baracuda::scan
