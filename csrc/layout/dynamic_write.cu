// SPDX-License-Identifier: Apache-2.0
#include "layout/dynamic_write.cuh"

#include <limits>

namespace baracuda {
namespace {

constexpr int64_t kIndexLimit = int64_t(1) << 31;

Grid grid_for(int64_t threads) {
  return {.blocks = ceil_div(threads, kCopyThreads), .threads = kCopyThreads, .early = true};
}

DynamicArguments make_arguments(const DynamicCopy &copy, const Starts &starts) {
  DynamicArguments arguments = {};
  arguments.window = copy.window;
  arguments.block = copy.block;
  arguments.low = copy.low;
  arguments.high = copy.high;
  arguments.element = copy.element;
  const Tensor &tensor = starts.tensor;
  arguments.starts = tensor.data;
  arguments.entry_stride = starts.batched ? tensor.stride[0] : 0;
  arguments.column_stride = tensor.stride[starts.batched ? 1 : 0];
  arguments.wide_starts = tensor.dtype.bits == 64;
  arguments.clamp = starts.clamp;
  arguments.rank = copy.rank;
  for (int index = 0; index < copy.rank; ++index) {
    const DynamicAxis &axis = copy.axis[index];
    arguments.axis[index] = {{},
                             0,
                             axis.bound,
                             axis.extent,
                             (axis.bound - axis.extent) / axis.unit,
                             axis.unit,
                             axis.window_stride,
                             axis.block_stride,
                             axis.column,
                             axis.flipped,
                             index == copy.batch_axis};
  }
  return arguments;
}

// Calls body(arguments) for parts of the block whose threads can be counted in 32 bits: `axes` axes
// are cut, each of their entries takes `threads` threads.
template <class Body>
void for_each_part(DynamicArguments &arguments, int64_t (&count)[kMaxRank], int axes, int64_t threads,
                   const Body &body) {
  __int128 total = threads;
  int longest = 0;
  for (int axis = 0; axis < axes; ++axis) {
    total *= count[axis];
    if (count[axis] > count[longest]) longest = axis;
  }
  if (total < kIndexLimit) {
    for (int axis = 0; axis < axes; ++axis) arguments.axis[axis].count = Divider(uint32_t(count[axis]));
    arguments.total = uint32_t(total);
    body(arguments);
    return;
  }
  if (axes == 0 || count[longest] < 2)
    throw Error(BARACUDA_UNSUPPORTED, "dynamic_write_slice: a run of 32 GiB or more has no kernel");
  const int64_t all = count[longest];
  const int64_t first = arguments.axis[longest].first;
  count[longest] = all / 2;
  for_each_part(arguments, count, axes, threads, body);
  count[longest] = all - all / 2;
  arguments.axis[longest].first = first + all / 2;
  for_each_part(arguments, count, axes, threads, body);
  count[longest] = all;
  arguments.axis[longest].first = first;
}

template <class Body>
void for_each_part(DynamicArguments &arguments, const DynamicCopy &copy, int axes, int64_t threads, const Body &body) {
  int64_t count[kMaxRank] = {};
  for (int axis = 0; axis < axes; ++axis) count[axis] = copy.axis[axis].extent;
  for_each_part(arguments, count, axes, threads, body);
}

template <Motion kMotion, bool kPacked>
void launch_runs(const DynamicCopy &copy, const Starts &starts, Stream stream) {
  constexpr int64_t kCells = kPacked ? 32 : 16;
  DynamicArguments arguments = make_arguments(copy, starts);
  const DynamicAxis &last = copy.axis[copy.rank - 1];
  const bool reads = kMotion == Motion::read;
  // Where every row begins at the same place within its sixteen bytes, that place is known here;
  // otherwise there is room for the worst.
  int64_t lead = (reads ? copy.block : copy.window) & (kCells - 1);
  for (int axis = 0; axis < copy.rank - 1; ++axis)
    if ((reads ? copy.axis[axis].block_stride : copy.axis[axis].window_stride) & (kCells - 1)) lead = kCells - 1;
  // A start may be anywhere, so a run has the worst lead, unless its row leaves it no room.
  int64_t chunks = ceil_div(lead + last.extent * copy.element, kCells);
  if (!reads) {
    const int64_t of_row = ceil_div(lead + last.bound * copy.element, kCells);
    chunks = ceil_div(kCells - copy.element + last.extent * copy.element, kCells);
    if (copy.window % copy.element != 0) chunks = ceil_div(kCells - 1 + last.extent * copy.element, kCells);
    arguments.whole_rows = of_row <= chunks;
    if (arguments.whole_rows) chunks = of_row;
  }
  if (chunks < kIndexLimit) arguments.chunks = Divider(uint32_t(chunks));
  for_each_part(arguments, copy, copy.rank - 1, chunks, [&](const DynamicArguments &part) {
    launch(dynamic_runs<kMotion, kPacked>, grid_for(part.total), stream, part);
  });
}

template <Motion kMotion, class Word>
void launch_elements(const DynamicCopy &copy, const Starts &starts, Stream stream) {
  DynamicArguments arguments = make_arguments(copy, starts);
  for_each_part(arguments, copy, copy.rank, 1, [&](const DynamicArguments &part) {
    launch(dynamic_elements<kMotion, Word>, grid_for(part.total), stream, part);
  });
}

void launch_nibbles(const DynamicCopy &copy, const Starts &starts, Stream stream) {
  DynamicArguments arguments = make_arguments(copy, starts);
  for (const int parity : {0, 1})
    for_each_part(arguments, copy, copy.rank, 1, [&](const DynamicArguments &part) {
      launch(dynamic_nibbles, grid_for(part.total), stream, part, parity);
    });
}

// The widest power of two, up to sixteen bytes, that divides all addresses and steps.
int64_t common_alignment(const DynamicCopy &copy) {
  int64_t bits = copy.window | copy.block | copy.element | 16;
  for (int axis = 0; axis < copy.rank; ++axis) bits |= copy.axis[axis].window_stride | copy.axis[axis].block_stride;
  return bits & -bits;
}

template <Motion kMotion>
void launch_bytes(const DynamicCopy &copy, const Starts &starts, Stream stream) {
  if (copy.runs && copy.axis[copy.rank - 1].extent * copy.element > 16) {
    launch_runs<kMotion, false>(copy, starts, stream);
    return;
  }
  switch (common_alignment(copy)) {
    case 1:
      launch_elements<kMotion, uint8_t>(copy, starts, stream);
      break;
    case 2:
      launch_elements<kMotion, uint16_t>(copy, starts, stream);
      break;
    case 4:
      launch_elements<kMotion, uint32_t>(copy, starts, stream);
      break;
    case 8:
      launch_elements<kMotion, uint2>(copy, starts, stream);
      break;
    default:
      launch_elements<kMotion, uint4>(copy, starts, stream);
  }
}

}  // namespace

void dynamic_copy_cuda(const DynamicCopy &copy, const Starts &starts, Stream stream) {
  if (copy.packed) {
    // Gradients have no packed types.
    if (copy.isolated) {
      launch_runs<Motion::write, true>(copy, starts, stream);
    } else {
      launch_nibbles(copy, starts, stream);
    }
    return;
  }
  switch (copy.motion) {
    case Motion::write:
      launch_bytes<Motion::write>(copy, starts, stream);
      break;
    case Motion::read:
      launch_bytes<Motion::read>(copy, starts, stream);
      break;
    case Motion::zero:
      launch_bytes<Motion::zero>(copy, starts, stream);
      break;
  }
}

void advance_starts_cuda(const Starts &starts, int axis, int64_t step, Stream stream) {
  const Tensor &tensor = starts.tensor;
  const int64_t entries = starts.batched ? tensor.shape[0] : 1;
  const int64_t stride = starts.batched ? tensor.stride[0] : 1;
  const int64_t column = axis * tensor.stride[starts.batched ? 1 : 0];
  if (tensor.dtype.bits == 64) {
    launch(advance_starts<int64_t>, grid_for(entries), stream, tensor.as<int64_t>() + column, entries, stride, step,
           std::numeric_limits<int64_t>::max());
  } else {
    launch(advance_starts<int32_t>, grid_for(entries), stream, tensor.as<int32_t>() + column, entries, stride, step,
           int64_t(std::numeric_limits<int32_t>::max()));
  }
}

std::string dynamic_copy_arch(const char *plan) {
  return kernel_arch(plan, reinterpret_cast<const void *>(dynamic_runs<Motion::write, false>));
}

}  // namespace baracuda
