// SPDX-License-Identifier: Apache-2.0
#include "layout/write_slice.cuh"

#include <numeric>

namespace baracuda {
namespace {

constexpr int64_t kNarrowLimit = int64_t(1) << 32;

CopyAxes make_axes(const StridedCopy &copy) {
  CopyAxes axes = {};
  axes.rank = copy.rank;
  for (int axis = 0; axis < copy.rank; ++axis) {
    axes.extent[axis] = copy.extent[axis];
    if (copy.extent[axis] < kNarrowLimit) axes.extent32[axis] = Divider(uint32_t(copy.extent[axis]));
    axes.dest_stride[axis] = copy.dest_stride[axis];
    axes.source_stride[axis] = copy.source_stride[axis];
  }
  return axes;
}

Grid grid_for(int64_t threads) {
  return {.blocks = ceil_div(threads, kCopyThreads), .threads = kCopyThreads, .early = true};
}

template <bool kPacked>
void launch_runs(const StridedCopy &copy, Stream stream) {
  RunCopy arguments = {copy.dest, copy.source, copy.run, copy.source_low, copy.source_high, 0, {}, 0, make_axes(copy)};
  const int64_t cells = copy.cells_per_16_bytes();
  // Where every run starts at the same place within its sixteen bytes, that place is known here;
  // otherwise there is room for the worst.
  int64_t lead = copy.dest & (cells - 1);
  for (int axis = 0; axis < copy.rank; ++axis)
    if (copy.dest_stride[axis] & (cells - 1)) lead = cells - 1;
  arguments.chunks = ceil_div(lead + copy.run, cells);
  arguments.total = arguments.chunks * copy.rows;
  if (arguments.total < kNarrowLimit) {
    arguments.chunks32 = Divider(uint32_t(arguments.chunks));
    launch(copy_runs<kPacked, false>, grid_for(arguments.total), stream, arguments);
  } else {
    launch(copy_runs<kPacked, true>, grid_for(arguments.total), stream, arguments);
  }
}

// The axis along which the source is consecutive, where the destination isn't, or -1.
int transposed_axis(const StridedCopy &copy) {
  if (copy.rank < 2 || copy.dest_stride[copy.rank - 1] != copy.run) return -1;
  for (int axis = copy.rank - 2; axis >= 0; --axis)
    if (copy.source_stride[axis] == copy.run && copy.extent[axis] >= 8 && copy.extent[copy.rank - 1] >= 8) return axis;
  return -1;
}

template <class Word>
bool launch_tiles(const StridedCopy &copy, Stream stream) {
  const int rows = transposed_axis(copy);
  if (rows < 0 || copy.run != int64_t(sizeof(Word))) return false;
  const int columns = copy.rank - 1;
  TileCopy arguments = {};
  arguments.dest = copy.dest;
  arguments.source = copy.source;
  arguments.rows = copy.extent[rows];
  arguments.columns = copy.extent[columns];
  arguments.dest_row_stride = copy.dest_stride[rows];
  arguments.source_column_stride = copy.source_stride[columns];
  arguments.tiles_down = ceil_div(arguments.rows, kTile);
  arguments.tiles_across = ceil_div(arguments.columns, kTile);
  StridedCopy others = copy;
  others.rank = 0;
  int64_t count = 1;
  for (int axis = 0; axis < copy.rank; ++axis) {
    if (axis == rows || axis == columns) continue;
    others.extent[others.rank] = copy.extent[axis];
    others.dest_stride[others.rank] = copy.dest_stride[axis];
    others.source_stride[others.rank] = copy.source_stride[axis];
    ++others.rank;
    count *= copy.extent[axis];
  }
  arguments.axes = make_axes(others);
  arguments.total = count * arguments.tiles_down * arguments.tiles_across;
  if (arguments.total > INT32_MAX) return false;
  launch(copy_tiles<Word>, {.blocks = arguments.total, .threads = kTile * kTileThreadRows, .early = true}, stream,
         arguments);
  return true;
}

template <class Word>
void launch_elements(const StridedCopy &copy, Stream stream) {
  if (launch_tiles<Word>(copy, stream)) return;
  ElementCopy arguments = {copy.dest, copy.source, copy.rows, make_axes(copy)};
  if (copy.run > int64_t(sizeof(Word))) {
    // Elements wider than their alignment go word by word, along an axis of their own.
    CopyAxes &axes = arguments.axes;
    const int64_t words = copy.run / int64_t(sizeof(Word));
    axes.extent[axes.rank] = words;
    axes.extent32[axes.rank] = Divider(uint32_t(words));
    axes.dest_stride[axes.rank] = axes.source_stride[axes.rank] = int64_t(sizeof(Word));
    ++axes.rank;
    arguments.total *= words;
  }
  if (arguments.total < kNarrowLimit) {
    launch(copy_elements<Word, false>, grid_for(arguments.total), stream, arguments);
  } else {
    launch(copy_elements<Word, true>, grid_for(arguments.total), stream, arguments);
  }
}

void launch_nibbles(const StridedCopy &copy, Stream stream) {
  ElementCopy arguments = {copy.dest, copy.source, copy.rows * copy.run, make_axes(copy)};
  if (copy.run > 1) {
    CopyAxes &axes = arguments.axes;
    axes.extent[axes.rank] = copy.run;
    if (copy.run < kNarrowLimit) axes.extent32[axes.rank] = Divider(uint32_t(copy.run));
    axes.dest_stride[axes.rank] = axes.source_stride[axes.rank] = 1;
    ++axes.rank;
  }
  for (const int parity : {0, 1}) {
    if (arguments.total < kNarrowLimit) {
      launch(copy_nibbles<false>, grid_for(arguments.total), stream, arguments, parity);
    } else {
      launch(copy_nibbles<true>, grid_for(arguments.total), stream, arguments, parity);
    }
  }
}

// The widest power of two, up to sixteen bytes, that divides all addresses and steps.
int64_t common_alignment(const StridedCopy &copy) {
  int64_t bits = copy.dest | copy.source | copy.run | 16;
  for (int axis = 0; axis < copy.rank; ++axis) bits |= copy.dest_stride[axis] | copy.source_stride[axis];
  return bits & -bits;
}

}  // namespace

void write_slice_cuda(const StridedCopy &copy, Stream stream) {
  if (copy.packed) {
    if (copy.isolated) {
      launch_runs<true>(copy, stream);
    } else {
      launch_nibbles(copy, stream);
    }
    return;
  }
  if (copy.run > 16 || copy.rank == 0) {
    launch_runs<false>(copy, stream);
    return;
  }
  switch (common_alignment(copy)) {
    case 1:
      launch_elements<uint8_t>(copy, stream);
      break;
    case 2:
      launch_elements<uint16_t>(copy, stream);
      break;
    case 4:
      launch_elements<uint32_t>(copy, stream);
      break;
    case 8:
      launch_elements<uint2>(copy, stream);
      break;
    default:
      launch_elements<uint4>(copy, stream);
  }
}

std::string write_slice_arch(const char *plan) {
  return kernel_arch(plan, reinterpret_cast<const void *>(copy_runs<false, false>));
}

}  // namespace baracuda
