// SPDX-License-Identifier: Apache-2.0
// The choice of kernel for a scan, and its launch.
#pragma once

#include <algorithm>

#include "runtime/workspace.h"
#include "scan/scan_columns.cuh"

namespace baracuda::scan {

// Shapes of the kernels, by what was measured: as many loads under way as registers allow.
template <class Op>
struct Tuning {
  // Registers of one vector of each input.
  static constexpr int kWords = Held<typename Op::Inputs, kVector<Op>>::kWords;
  // Narrow integers are many kinds of kernels for few uses, so theirs are small.
  static constexpr bool kSmall = std::is_same_v<typename Op::Acc, int64_t> && Bytes<typename Op::Inputs>::widest() < 4;
  static constexpr int kItems = kWords <= 8 ? 16 : 8;
  static constexpr int kRowGroups = kSmall || kVector<Op> >= kItems ? 1 : kItems / kVector<Op>;
  static constexpr int kRowBlocks = 2;
  static constexpr int kLongGroups = kRowGroups;
  static constexpr int kLongWarps = 16;
  static constexpr int kLongBlocks = 2;
  // Columns of a thread: eight bytes of the widest input, but not more than four.
  static constexpr int kWide = 8 / Bytes<typename Op::Inputs>::widest();
  static constexpr int kColumns = kWide > 4 ? 4 : kWide;
  static constexpr bool kHalfBased = Op::kBased && Bytes<typename Op::Inputs>::widest() == 2;
  static constexpr int kLines = kSmall ? 4 : kWords <= 4 && !kHalfBased ? 16 : 8;
  static constexpr int kColumnGroups = kWords > 4 || (Op::kBased && !kHalfBased) ? 8 : 16;
  static constexpr int kColumnBlocks = kColumnGroups == 8 ? 3 : 2;
};
template <class Op>
constexpr int kLongTile = Tuning<Op>::kLongWarps * Part<Op, Tuning<Op>::kLongGroups>::kItems;

// From this many rows on, a block for each row fills the card.
constexpr int64_t kRowsThatFill = 256;
// With fewer columns than this, tiles of columns leave the card idle while carries pass along the
// axis, and strided rows are better.
constexpr int64_t kColumnsThatPay = 512;

inline bool aligned(int64_t value, int64_t bytes) { return value % bytes == 0; }

// How an operand's rows can be reached, `vector` elements of `size` bytes at a time.
inline Access access_of(const Geometry &g, int operand, int64_t size, int vector) {
  const int64_t step = g.length == 1 ? 1 : g.step[operand];
  const int64_t bytes = std::min<int64_t>(16, size * vector);
  if (step != 1 && step != -1) return kStrided;
  const int64_t start = int64_t(reinterpret_cast<uintptr_t>(g.data[operand])) - (step == 1 ? 0 : (vector - 1) * size);
  if (!aligned(start, bytes)) return kStrided;
  for (int axis = 0; axis < g.rank; ++axis)
    if (!aligned(g.stride[operand][axis] * size, bytes)) return kStrided;
  return step == 1 ? kForward : kBackward;
}

template <class L>
struct Sizes;
template <class... T>
struct Sizes<List<T...>> {
  static constexpr int64_t of[] = {int64_t(sizeof(T))...};
};

template <class Op>
Accesses accesses_of(const Geometry &g) {
  Accesses accesses = {};
  for (int k = 0; k < Op::Inputs::size; ++k)
    accesses.of[k] = access_of(g, k, Sizes<typename Op::Inputs>::of[k], kVector<Op>);
  for (int k = 0; k < Op::Outputs::size; ++k) {
    const int slot = Op::Inputs::size + k;
    accesses.of[slot] = access_of(g, slot, Sizes<typename Op::Outputs>::of[k], kVector<Op>);
  }
  return accesses;
}

inline void allow_shared(const void *kernel, size_t bytes) {
  if (bytes > 32 * 1024)
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)),
               "cudaFuncSetAttribute");
}

template <class Op>
void launch_short(const Op &op, const Geometry &g, Stream stream) {
  int width = 1;
  while (int64_t(width) * kVector<Op> < g.length) width *= 2;
  const int64_t rows = int64_t(kShortThreads / width) * kRowsAtOnce<Op>;
  launch(scan_short_rows<Op>, {ceil_div(g.rows, rows), kShortThreads, 0, true}, stream, op, g, accesses_of<Op>(g),
         width);
}

template <class Op, int kGroups = Tuning<Op>::kRowGroups, int kBlocks = Tuning<Op>::kRowBlocks>
void launch_rows(const Op &op, const Geometry &g, Stream stream) {
  constexpr int64_t kWarpItems = Part<Op, kGroups>::kItems;
  // Tiles of equal numbers of warps.
  const int64_t tiles = ceil_div(g.length, kMaxRowWarps * kWarpItems);
  const int warps = int(ceil_div(ceil_div(g.length, tiles), kWarpItems));
  const int rows = std::max(8 / warps, 1);
  const Accesses accesses = accesses_of<Op>(g);
  const size_t bytes = size_t(rows * warps) * Part<Op, kGroups>::kStageBytes;
  const auto kernel = scan_rows<Op, kGroups, kBlocks>;
  allow_shared(reinterpret_cast<const void *>(kernel), bytes);
  launch(kernel, {ceil_div(g.rows, rows), rows * warps * kWarp, bytes, true}, stream, op, g, accesses, warps);
}

// The words of a long scan, zeroed by one memset.
template <class Op>
struct LongWorkspace {
  LongTiles tiles = {};
  std::byte *begin = nullptr;
  size_t bytes = 0;

  LongWorkspace(const Geometry &g, int tile, std::byte *base) {
    Workspace workspace(base);
    tiles.per_row = uint32_t(ceil_div(g.length, tile));
    tiles.total = uint32_t(tiles.per_row * g.rows);
    tiles.ticket = workspace.take<uint32_t>(1);
    tiles.aggregates = workspace.take<uint64_t>(int64_t(tiles.total) * Words<typename Op::Map>::count);
    tiles.prefixes = workspace.take<uint64_t>(int64_t(tiles.total) * Words<typename Op::Value>::count);
    begin = base;
    bytes = workspace.size();
  }
};

template <class Op, int kGroups = Tuning<Op>::kLongGroups, int kWarps = Tuning<Op>::kLongWarps,
          int kBlocks = Tuning<Op>::kLongBlocks>
void launch_long(const Op &op, const Geometry &g, std::byte *base, Stream stream) {
  const LongWorkspace<Op> workspace(g, kWarps * Part<Op, kGroups>::kItems, base);
  const Accesses accesses = accesses_of<Op>(g);
  const size_t bytes = size_t(kWarps) * Part<Op, kGroups>::kStageBytes;
  const auto kernel = scan_long_rows<Op, kGroups, kWarps, kBlocks>;
  allow_shared(reinterpret_cast<const void *>(kernel), bytes);
  check_cuda(cudaMemsetAsync(workspace.begin, 0, workspace.bytes, static_cast<cudaStream_t>(stream)),
             "cudaMemsetAsync");
  // One block more than tiles: the scanner's.
  launch(kernel, {int64_t(workspace.tiles.total) + 1, kWarps * kWarp, bytes}, stream, op, g, accesses, workspace.tiles);
}

// One slot for each column's carry, zeroed by one memset.
template <class Op>
struct ColumnWorkspace {
  uint32_t *ticket = nullptr;
  uint64_t *carries = nullptr;
  size_t bytes = 0;

  ColumnWorkspace(const Geometry &g, std::byte *base) {
    Workspace workspace(base);
    ticket = workspace.take<uint32_t>(1);
    carries = workspace.take<uint64_t>(g.rows * Words<typename Op::Value>::count);
    bytes = workspace.size();
  }
};

template <class Op, int kColumns, int kLines, int kGroups, int kBlocks>
void launch_columns_of(const Op &op, const Geometry &g, std::byte *base, Stream stream) {
  ColumnTiles tiles = {};
  tiles.across = uint32_t(ceil_div(g.rows, kColumns * kWarp));
  tiles.down = uint32_t(ceil_div(g.length, kLines * kGroups));
  if (tiles.down > 1) {
    const ColumnWorkspace<Op> workspace(g, base);
    tiles.ticket = workspace.ticket;
    tiles.carries = workspace.carries;
    check_cuda(cudaMemsetAsync(base, 0, workspace.bytes, static_cast<cudaStream_t>(stream)), "cudaMemsetAsync");
  }
  const auto kernel = scan_columns<Op, kColumns, kLines, kGroups, kBlocks>;
  launch(kernel, {int64_t(tiles.across) * tiles.down, kGroups * kWarp, 0, tiles.down == 1}, stream, op, g, tiles);
}

// Whether neighbouring columns can be read together: they are neighbours in every operand.
template <class Op, int kColumns>
bool columns_are_vectors(const Geometry &g) {
  if (g.rank < 1 || g.extent[g.rank - 1] % kColumns != 0) return false;
  for (int operand = 0; operand < Op::Inputs::size + Op::Outputs::size; ++operand) {
    if (!g.data[operand]) continue;
    const int64_t size = operand < Op::Inputs::size ? Sizes<typename Op::Inputs>::of[operand]
                                                    : Sizes<typename Op::Outputs>::of[operand - Op::Inputs::size];
    const int64_t bytes = std::min<int64_t>(16, size * kColumns);
    if (g.stride[operand][g.rank - 1] != 1 || !aligned(int64_t(reinterpret_cast<uintptr_t>(g.data[operand])), bytes) ||
        !aligned(g.step[operand] * size, bytes))
      return false;
    for (int axis = 0; axis < g.rank - 1; ++axis)
      if (!aligned(g.stride[operand][axis] * size, bytes)) return false;
  }
  return true;
}

template <class Op, int kLines = Tuning<Op>::kLines, int kGroups = Tuning<Op>::kColumnGroups,
          int kBlocks = Tuning<Op>::kColumnBlocks>
void launch_columns(const Op &op, const Geometry &g, std::byte *base, Stream stream) {
  constexpr int kColumns = Tuning<Op>::kColumns;
  if constexpr (kColumns > 1) {
    if (columns_are_vectors<Op, kColumns>(g)) {
      launch_columns_of<Op, kColumns, kLines, kGroups, kBlocks>(op, g, base, stream);
      return;
    }
  }
  launch_columns_of<Op, 1, kLines, kGroups, kBlocks>(op, g, base, stream);
}

}  // namespace baracuda::scan
