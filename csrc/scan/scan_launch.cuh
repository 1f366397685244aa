// SPDX-License-Identifier: Apache-2.0
// The choice of kernel for a scan, and its launch.
#pragma once

#include <algorithm>

#include "runtime/workspace.h"
#include "scan/scan_columns.cuh"

namespace baracuda::scan {

// Elements of a lane in scans of rows. The gradient of an extremum is light on arithmetic and on
// registers, so more of its loads can be under way.
template <class Op>
constexpr int kRowItems = 16;
template <class T, class A>
constexpr int kRowItems<ExtremumGradient<T, A>> = 32;

// From this many rows on, a block for each row fills the card.
constexpr int64_t kRowsThatFill = 256;
// With fewer columns than this, tiles of columns leave the card idle while carries pass along the
// axis, and strided rows are better.
constexpr int64_t kColumnsThatPay = 512;

template <class Op>
struct LongChoice {
  static constexpr int kElementBytes = Bytes<typename Op::Inputs, 1>::sum / kWarp;
  static constexpr int kMost = Bytes<typename Op::Outputs, 1>::widest > 4 || Bytes<typename Op::Inputs, 1>::widest > 4 ? 16 : 32;
  static constexpr int kItems = kElementBytes <= 4 ? kMost : kElementBytes <= 12 ? std::min(kMost, kElementBytes <= 6 ? 32 : 16) : 8;
  // As many stages as a multiprocessor's shared memory holds.
  static constexpr int stages() {
    const int stage = kLongWarps * (Bytes<typename Op::Inputs, kItems>::sum + kWarp * int(sizeof(typename Op::Map)));
    const int rest = kLongWarps * Bytes<typename Op::Outputs, kItems>::largest + 2048;
    const int fit = (220 * 1024 - rest) / stage;
    return fit > 6 ? 6 : fit;
  }
  static constexpr int kStages = stages();
};

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

// `vector` 0: sixteen bytes of each operand's type.
template <class Op>
Accesses accesses_of(const Geometry &g, int vector) {
  Accesses accesses = {};
  for (int k = 0; k < Op::Inputs::size; ++k) {
    const int64_t size = Sizes<typename Op::Inputs>::of[k];
    accesses.of[k] = access_of(g, k, size, vector ? vector : int(16 / size));
  }
  for (int k = 0; k < Op::Outputs::size; ++k) {
    const int64_t size = Sizes<typename Op::Outputs>::of[k];
    const int slot = Op::Inputs::size + k;
    accesses.of[slot] = access_of(g, slot, size, vector ? vector : int(16 / size));
  }
  return accesses;
}

template <class Op>
void launch_short(const Op &op, const Geometry &g, Stream stream) {
  constexpr int kItems = ShortShape<Op>::kItems;
  int width = 1;
  while (int64_t(width) * kItems < g.length) width *= 2;
  const int64_t rows = int64_t(kShortThreads / width) * ShortShape<Op>::kRowsAtOnce;
  launch(scan_short_rows<Op>, {ceil_div(g.rows, rows), kShortThreads}, stream, op, g, accesses_of<Op>(g, kItems), width);
}

template <class Op, int kItems = kRowItems<Op>>
void launch_rows(const Op &op, const Geometry &g, Stream stream) {
  int warps = 1;
  while (warps < kMaxRowWarps && int64_t(warps) * kWarp * kItems < g.length) warps *= 2;
  const int block_warps = std::max(warps, 8);
  const int64_t blocks = std::min<int64_t>(ceil_div(g.rows, block_warps / warps), INT32_MAX);
  const size_t bytes = size_t(block_warps) * RowsShape<Op, kItems>::kSlots;
  const auto kernel = scan_rows<Op, kItems>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)), "cudaFuncSetAttribute");
  launch(kernel, {blocks, block_warps * kWarp, bytes}, stream, op, g, accesses_of<Op>(g, 0), warps);
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

inline int multiprocessors() {
  int device = 0;
  int count = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return count;
}

template <class Op, int kItems = LongChoice<Op>::kItems, int kStages = LongChoice<Op>::kStages>
void launch_long(const Op &op, const Geometry &g, std::byte *base, Stream stream) {
  using Shape = LongShape<Op, kItems, kStages>;
  const LongWorkspace<Op> workspace(g, Shape::kTile, base);
  const auto kernel = scan_long_rows<Op, kItems, kStages>;
  const size_t bytes = sizeof(typename Shape::Shared);
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)), "cudaFuncSetAttribute");
  check_cuda(cudaMemsetAsync(workspace.begin, 0, workspace.bytes, static_cast<cudaStream_t>(stream)), "cudaMemsetAsync");
  const int64_t blocks = std::min<int64_t>(multiprocessors(), workspace.tiles.total);
  launch(kernel, {blocks, kLongThreads, bytes}, stream, op, g, accesses_of<Op>(g, 0), workspace.tiles);
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

template <class Op, int kLines = 0>
void launch_columns(const Op &op, const Geometry &g, std::byte *base, Stream stream) {
  using Shape = ColumnShape<Op, kLines>;
  constexpr int kColumns = Shape::kColumns;
  // Neighbouring columns can be read together where they are neighbours in every operand.
  bool vectors = g.rank >= 1 && g.extent[g.rank - 1] % kColumns == 0;
  for (int operand = 0; vectors && operand < Op::Inputs::size + Op::Outputs::size; ++operand) {
    if (!g.data[operand]) continue;
    const int64_t size = operand < Op::Inputs::size ? Sizes<typename Op::Inputs>::of[operand]
                                                    : Sizes<typename Op::Outputs>::of[operand - Op::Inputs::size];
    const int64_t bytes = std::min<int64_t>(16, size * kColumns);
    vectors = g.stride[operand][g.rank - 1] == 1 && aligned(int64_t(reinterpret_cast<uintptr_t>(g.data[operand])), bytes) &&
              aligned(g.step[operand] * size, bytes);
    for (int axis = 0; vectors && axis < g.rank - 1; ++axis) vectors = aligned(g.stride[operand][axis] * size, bytes);
  }
  ColumnTiles tiles = {};
  tiles.across = uint32_t(ceil_div(g.rows, Shape::kTileColumns));
  tiles.down = uint32_t(ceil_div(g.length, Shape::kTileLines));
  if (tiles.down > 1) {
    const ColumnWorkspace<Op> workspace(g, base);
    tiles.ticket = workspace.ticket;
    tiles.carries = workspace.carries;
    check_cuda(cudaMemsetAsync(base, 0, workspace.bytes, static_cast<cudaStream_t>(stream)), "cudaMemsetAsync");
  }
  const auto kernel = scan_columns<Op, kLines>;
  const size_t bytes = sizeof(typename Shape::Shared);
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)), "cudaFuncSetAttribute");
  launch(kernel, {int64_t(tiles.across) * tiles.down, kColumnThreads, bytes}, stream, op, g, tiles, int(vectors));
}

}  // namespace baracuda::scan
