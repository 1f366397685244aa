// SPDX-License-Identifier: Apache-2.0
// The choice of kernel for a scan, and its launch.
#pragma once

#include <algorithm>
#include <bit>

#include "runtime/workspace.h"
#include "scan/scan_columns.cuh"
#include "scan/scan_rows.cuh"
#include "scan/scan_stream.cuh"
#include "scan/scan_strips.cuh"

namespace baracuda::scan {

// Shapes of the kernels, by what was measured: as many loads under way as registers allow.
template <class Op>
struct Tuning {
  static constexpr int kInputs = Op::Inputs::size;
  static constexpr int kWidest = Bytes<typename Op::Inputs>::widest();
  // A lane's elements of a row.
  static constexpr int kRun = kWidest == 8 ? 8 : kWidest == 2 ? 32 : 16;
  // Of a row that takes less time than it takes to begin: what is read at once.
  static constexpr int kShortRun = 16 / kWidest;
  // One output as wide as the inputs, from few registers.
  static constexpr bool kPlain =
      std::is_same_v<typename Op::Acc, float> && Op::Outputs::size == 1 && Bytes<typename Op::Outputs>::all(kWidest);
  // Results and where they come from, which take several times the room of an input.
  static constexpr bool kIndices = Op::kPosition && Op::Outputs::size > kInputs;
  // Warps of a multiprocessor, as many as have the registers that they need.
  static constexpr int kRowResidents = kRestarts<Op> || (kIndices && kRun == 32) ? 20
                                       : kInputs == 1                            ? 8 * ((kRun == 32 ? 3 : 4) + kPlain)
                                       : kPlain && !Op::kBased && kWidest == 4   ? 24
                                                                                 : 16;
  // Whether warps that wait for each other cost more than a row that takes its warps longer, where there are many rows.
  static constexpr bool kFewWarps = kWidest == 2 && (kInputs > 1 || Op::kBased);
  static constexpr bool kLargeMap = sizeof(typename Op::Map) >= 16;
  // Long rows stream where all operands have elements of one size and results find room in the inputs' place, or are
  // indices no narrower than they. Tiles are then of one shape whatever kernel takes them, so that alignment doesn't
  // show.
  static constexpr bool kStreams = Bytes<typename Op::Inputs>::all(kWidest) &&
                                   ((kIndices && Bytes<typename Op::Outputs>::sum >= 2 * kWidest) ||
                                    (Op::Outputs::size <= kInputs && Bytes<typename Op::Outputs>::all(kWidest))) &&
                                   std::is_floating_point_v<typename Op::Acc> && !Op::kRare;
  // A lane's sixteen-byte pieces where there are indices: an odd number, and seven tiles of four warps fit.
  static constexpr int kIndexedPieces =
      (210 * 1024 / (7 * 4 * kWarp * Bytes<typename Op::Outputs>::sum) * kWidest / 16 - 1) | 1;
  // What is worked out for a tile but not for each element is worth a large one, and what is worked out for each lane a
  // long run; but several tiles must be on their way while others wait for what comes before them.
  static constexpr int kLongBytes = kIndices ? 16 * kIndexedPieces : kInputs == 3 ? 48 : 112;
  static constexpr int kLongRun = kStreams ? kLongBytes / kWidest : kRun;
  static constexpr int kLongWarps = !kStreams || (kInputs == 1 && !kIndices) ? 8 : kInputs == 3 ? 12 : 4;
  static constexpr int kLongBlocks = !kStreams      ? (kInputs > 1 || kLargeMap ? 2 : 4)
                                     : kInputs == 3 ? 1
                                     : kInputs == 2 ? 3
                                     : kIndices     ? 4
                                                    : 2;
  // Of the streaming kernel: groups of warps that take tiles in turn, stages, and how many tiles a group reduces ahead.
  static constexpr int kLongGroups = kInputs == 3 ? 1 : 2;
  static constexpr int kLongStages = kInputs == 3 ? 4 : kIndices ? 7 : 8;
  static constexpr int kLongAhead = 2;
  // Narrow integers are many kinds of kernels for few uses, so theirs are small.
  static constexpr bool kSmall = std::is_same_v<typename Op::Acc, int64_t> && kWidest < 4;
  // Columns of a thread: eight bytes, but not more than four, and two where there are several inputs.
  static constexpr int kMostColumns = kInputs == 1 && !Op::kBased ? 4 : 2;
  static constexpr int kColumns = 8 / kWidest > kMostColumns ? kMostColumns : 8 / kWidest;
  static constexpr int kLines = kSmall ? 4 : kInputs < 3 ? 16 : 8;
  // Halves that are taken apart one by one, which takes more registers than pairs do.
  static constexpr bool kTakenApart = kInputs == 1 && kPlain && kWidest == 2 && !Op::kBased && !kInPairs<Op>;
  static constexpr int kColumnGroups = kInputs > 1 || Op::kBased || (kWidest == 4 && kPlain) || kTakenApart ? 8 : 16;
  static constexpr int kColumnBlocks = kColumnGroups == 16 || (kInputs == 2 && kWidest >= 4) || (kLargeMap && !kPlain)
                                           ? 2
                                       : kInputs == 1 && kPlain && !kTakenApart && (kWidest == 2 || !Op::kBased) ? 4
                                                                                                                 : 3;
  // Whether long axes have blocks of twice the groups, two of a multiprocessor: 32 warps. Those of the usual size are
  // 40 with single columns, which hold up the L2 with parts of its sectors, and 24 with pairs of halves.
  template <int kOfThread>
  static constexpr bool kDeep = kInputs == 3 && Op::Outputs::size == 2 && kOfThread * kWidest <= 4;
  // Strips of columns, for halves: of float32, tiles are as fast. Memory is slow with lines of less than 256 bytes.
  static constexpr bool kStrips = kPlain && kWidest == 2 && Bytes<typename Op::Inputs>::all(2) && !Op::kRare;
  static constexpr int kStripColumns = 4;
  static constexpr int kStripWarps = kInputs == 1 ? 8 : 4;
  static constexpr int kStripStages = 3;
  static constexpr int kStripBlocks = 2;
};
template <class Op>
constexpr int kLongTile = Tuning<Op>::kLongWarps * Share<Op, Tuning<Op>::kLongRun>::kItems;

// From this many rows on, a block for each row fills the card.
constexpr int64_t kRowsThatFill = 256;
// Of a block, where there are as many.
constexpr int kFewestRowWarps = 2;
// From this many rows on, one that takes longer leaves no part of the card idle for long.
constexpr int64_t kManyRows = 8192;
// With fewer columns than this, tiles of columns leave the card idle while carries pass along the
// axis, and strided rows are better.
constexpr int64_t kColumnsThatPay = 512;
// Tiles of columns of a part: so many that the carry is there when the next tile wants it, and no more, because memory
// is faster where what is read at a time lies together.
constexpr int64_t kTilesTogether = 256;
// From this long axes on, deep tiles are mostly full.
constexpr int64_t kLengthForDeep = 512;
// From this many columns on, a block for each strip fills the card.
constexpr int64_t kColumnsThatFill = 16384;

inline bool aligned(int64_t value, int64_t bytes) { return value % bytes == 0; }

// How an operand's rows can be reached, runs of `run` elements of `size` bytes at a time.
inline Access access_of(const Geometry &g, int operand, int64_t size, int run) {
  const int64_t step = g.length == 1 ? 1 : g.step[operand];
  const int64_t bytes = std::min<int64_t>(16, size * run);
  if (step != 1 && step != -1) return kStrided;
  const int64_t start = int64_t(reinterpret_cast<uintptr_t>(g.data[operand])) - (step == 1 ? 0 : (run - 1) * size);
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

template <class Op, int kRun>
Accesses accesses_of(const Geometry &g) {
  Accesses accesses = {};
  for (int k = 0; k < Op::Inputs::size; ++k) accesses.of[k] = access_of(g, k, Sizes<typename Op::Inputs>::of[k], kRun);
  accesses.vectors = std::none_of(accesses.of, accesses.of + Op::Inputs::size, [](int of) { return of == kStrided; });
  for (int k = 0; k < Op::Outputs::size; ++k) {
    const int slot = Op::Inputs::size + k;
    accesses.of[slot] = access_of(g, slot, Sizes<typename Op::Outputs>::of[k], kRun);
  }
  return accesses;
}

// Of the current device.
inline int attribute(cudaDeviceAttr of) {
  int device = 0;
  int value = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&value, of, device), "cudaDeviceGetAttribute");
  return value;
}

inline void allow_shared(const void *kernel, size_t bytes) {
  if (bytes > 32 * 1024)
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)),
               "cudaFuncSetAttribute");
}

template <class Op, int kRun = Tuning<Op>::kRun, int kResidents = Tuning<Op>::kRowResidents>
void launch_rows(const Op &op, const Geometry &g, Stream stream) {
  using Row = Share<Op, kRun>;
  // Tiles of equal numbers of warps, a power of two so that a block's warps are all at work.
  const int most = Tuning<Op>::kFewWarps && g.rows >= kManyRows ? 2 : kRowWarps;
  const int64_t tiles = ceil_div(g.length, most * Row::kItems);
  const int warps = int(std::bit_ceil(uint64_t(ceil_div(ceil_div(g.length, tiles), Row::kItems))));
  // Lanes of a row that takes less than a warp.
  const int lanes = warps > 1 ? kWarp : int(std::bit_ceil(uint64_t(ceil_div(g.length, kRun))));
  const int shift = std::bit_width(unsigned(lanes * kRun)) - 1;
  // Small blocks: those of a multiprocessor are then at different places, some at memory and some at work.
  const int64_t all_groups = ceil_div(g.rows, kWarp / lanes);
  const auto groups = uint32_t(std::min<int64_t>(std::max(kFewestRowWarps / warps, 1), all_groups));
  const auto kernel = scan_rows<Op, kRun, kResidents>;
  const size_t bytes = size_t(groups) * warps * Row::kStageBytes;
  allow_shared(reinterpret_cast<const void *>(kernel), bytes);
  launch(kernel, {ceil_div(all_groups, groups), int(groups) * warps * kWarp, bytes, true}, stream, op, g,
         accesses_of<Op, kRun>(g), std::countr_zero(unsigned(warps)), shift, groups);
}

// So few elements that what takes time is one run and what is folded after it.
constexpr int64_t kFewElements = int64_t(1) << 17;
template <class Op>
bool brief(const Geometry &g) {
  return g.length <= kRowWarps * kWarp * Tuning<Op>::kShortRun && g.rows * g.length <= kFewElements;
}

// Before a kernel that starts early.
inline void clear(std::byte *begin, size_t bytes, Stream stream) {
  const int64_t pieces = int64_t(bytes / sizeof(uint4));
  launch(clear_pieces<uint4>, {std::min<int64_t>(ceil_div(pieces, 256), 256), 256, 0, true}, stream,
         reinterpret_cast<uint4 *>(begin), pieces);
}

// The words of a long scan, zeroed by a kernel of its own.
template <class Op>
struct LongWorkspace {
  LongTiles tiles = {};
  size_t bytes = 0;

  LongWorkspace(const Geometry &g, int tile, std::byte *base) {
    Workspace workspace(base);
    tiles.per_row = uint32_t(ceil_div(g.length, tile));
    tiles.total = uint32_t(tiles.per_row * g.rows);
    tiles.ticket = workspace.take<uint32_t>(1);
    tiles.aggregates = workspace.take<uint64_t>(int64_t(tiles.total) * Words<typename Op::Map>::count);
    tiles.prefixes = workspace.take<uint64_t>(int64_t(tiles.total) * Words<typename Op::Value>::count);
    bytes = workspace.size();
  }
};

template <class Op, int kRun = Tuning<Op>::kLongRun, int kWarps = Tuning<Op>::kLongWarps,
          int kBlocks = Tuning<Op>::kLongBlocks>
void launch_long(const Op &op, const Geometry &g, std::byte *base, Stream stream) {
  using Tile = Share<Op, kRun>;
  const LongWorkspace<Op> workspace(g, kWarps * Tile::kItems, base);
  const size_t bytes = size_t(kWarps) * Tile::kStageBytes;
  const auto kernel = scan_long_rows<Op, kRun, kWarps, kBlocks>;
  allow_shared(reinterpret_cast<const void *>(kernel), bytes);
  clear(base, workspace.bytes, stream);
  // As many blocks as the card holds; each takes tiles until there are no more. One is the scanner's.
  const int64_t blocks =
      std::min<int64_t>(workspace.tiles.total, int64_t(attribute(cudaDevAttrMultiProcessorCount)) * kBlocks - 1) + 1;
  launch(kernel, {blocks, kWarps * kWarp, bytes, true}, stream, op, g, accesses_of<Op, kRun>(g), workspace.tiles);
}

// Whether the copy engine can bring and take all rows: elements are neighbours, in one direction.
template <class Op, int kRun = Tuning<Op>::kLongRun>
bool neighbours(const Geometry &g) {
  const Accesses accesses = accesses_of<Op, kRun>(g);
  for (int operand = 0; operand < Layout<Op>::kLines; ++operand)
    if (g.data[operand] && (accesses.of[operand] == kStrided || accesses.of[operand] != accesses.of[0])) return false;
  return true;
}

template <class Op, int kRun = Tuning<Op>::kLongRun, int kWarps = Tuning<Op>::kLongWarps,
          int kGroups = Tuning<Op>::kLongGroups, int kStages = Tuning<Op>::kLongStages,
          int kAhead = Tuning<Op>::kLongAhead>
void launch_stream(const Op &op, const Geometry &g, std::byte *base, Stream stream) {
  using S = StreamShape<Op, kRun, kWarps, kGroups, kStages>;
  const LongWorkspace<Op> workspace(g, S::kTile, base);
  const bool reverse = accesses_of<Op, kRun>(g).of[0] == kBackward;
  const auto kernel = reverse ? scan_stream<Op, true, kRun, kWarps, kGroups, kStages, kAhead>
                              : scan_stream<Op, false, kRun, kWarps, kGroups, kStages, kAhead>;
  allow_shared(reinterpret_cast<const void *>(kernel), S::kSharedBytes);
  clear(base, workspace.bytes, stream);
  const int64_t blocks =
      std::min<int64_t>(int64_t(workspace.tiles.total) + 1, attribute(cudaDevAttrMultiProcessorCount));
  launch(kernel, {blocks, S::kThreads, S::kSharedBytes, true}, stream, op, g, workspace.tiles);
}

inline ColumnFinder finder_of(const Geometry &g) {
  ColumnFinder finder;
  finder.divides = g.rank == 2 && g.rows <= int64_t(UINT32_MAX);
  if (finder.divides) finder.inner = Divider(uint32_t(g.extent[1]));
  return finder;
}

// One slot for each column's carry, zeroed by a kernel of its own.
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
  constexpr int kTileColumns = kColumns * kWarp;
  ColumnTiles tiles = {};
  // Parts are of one width, and where that fits of whole extents of the innermost row axis, so that lines are read to
  // their ends.
  const int64_t across = ceil_div(g.rows, kTileColumns);
  const int64_t inner = g.rank > 0 ? g.extent[g.rank - 1] : 1;
  const int64_t least = ceil_div(kTilesTogether * kTileColumns, inner) * inner / kTileColumns;
  const int64_t parts = std::max<int64_t>(across / least, 1);
  tiles.wide = Divider(uint32_t(ceil_div(across, parts)));
  tiles.down = uint32_t(ceil_div(g.length, kLines * kGroups));
  tiles.per_part = Divider(tiles.wide.divisor * tiles.down);
  tiles.finder = finder_of(g);
  if (tiles.down > 1) {
    const ColumnWorkspace<Op> workspace(g, base);
    tiles.ticket = workspace.ticket;
    tiles.carries = workspace.carries;
    clear(base, workspace.bytes, stream);
  }
  const auto kernel = scan_columns<Op, kColumns, kLines, kGroups, kBlocks>;
  launch(kernel, {parts * tiles.per_part.divisor, kGroups * kWarp, 0, true}, stream, op, g, tiles);
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

template <class Op, int kColumns = Tuning<Op>::kStripColumns, int kLines = Tuning<Op>::kLines,
          int kWarps = Tuning<Op>::kStripWarps, int kStages = Tuning<Op>::kStripStages,
          int kBlocks = Tuning<Op>::kStripBlocks>
void launch_strips(const Op &op, const Geometry &g, Stream stream) {
  using S = StripShape<Op, kColumns, kLines, kWarps, kStages>;
  const auto kernel = scan_strips<Op, kColumns, kLines, kWarps, kStages, kBlocks>;
  allow_shared(reinterpret_cast<const void *>(kernel), S::kRingBytes);
  launch(kernel, {ceil_div(g.rows, kColumns * kWarp), kWarps * kWarp, S::kRingBytes, true}, stream, op, g,
         finder_of(g));
}

// Whether there are columns for strips, and the device has the barriers and the shared memory.
template <class Op>
bool strips_do(const Geometry &g) {
  using S =
      StripShape<Op, Tuning<Op>::kStripColumns, Tuning<Op>::kLines, Tuning<Op>::kStripWarps, Tuning<Op>::kStripStages>;
  return g.rows >= kColumnsThatFill && g.length > Tuning<Op>::kLines * Tuning<Op>::kColumnGroups &&
         DeviceGuard::kernels_can_wait() &&
         attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) >= int(S::kRingBytes + S::kControlBytes) &&
         columns_are_vectors<Op, S::kPieceColumns>(g);
}

template <class Op, int kColumns>
void launch_tiles(const Op &op, const Geometry &g, std::byte *base, Stream stream) {
  using Tuned = Tuning<Op>;
  if constexpr (Tuned::template kDeep<kColumns>) {
    // More warps do for pairs where lines begin at pieces of sixteen bytes.
    if (g.length >= kLengthForDeep && (kColumns == 1 || columns_are_vectors<Op, 16 / Tuned::kWidest>(g)))
      return launch_columns_of<Op, kColumns, Tuned::kLines, 2 * Tuned::kColumnGroups, 2>(op, g, base, stream);
  }
  launch_columns_of<Op, kColumns, Tuned::kLines, Tuned::kColumnGroups, Tuned::kColumnBlocks>(op, g, base, stream);
}

template <class Op>
void launch_columns(const Op &op, const Geometry &g, std::byte *base, Stream stream) {
  if constexpr (Tuning<Op>::kStrips) {
    if (strips_do<Op>(g)) return launch_strips(op, g, stream);
  }
  constexpr int kColumns = Tuning<Op>::kColumns;
  if constexpr (kColumns > 1) {
    if (columns_are_vectors<Op, kColumns>(g)) return launch_tiles<Op, kColumns>(op, g, base, stream);
  }
  launch_tiles<Op, 1>(op, g, base, stream);
}

}  // namespace baracuda::scan
