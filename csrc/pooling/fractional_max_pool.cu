// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdlib>

#include "pooling/fractional_max_pool_launch.cuh"

namespace baracuda {

extern template void fractional_max_pool_cuda_of<float16>(const PoolForward &, Stream);
extern template void fractional_max_pool_cuda_of<bfloat16>(const PoolForward &, Stream);
extern template void fractional_max_pool_cuda_of<float>(const PoolForward &, Stream);
extern template void fractional_max_pool_cuda_of<double>(const PoolForward &, Stream);
extern template void fractional_max_pool_backward_cuda_of<float16>(const PoolBackward &, Stream);
extern template void fractional_max_pool_backward_cuda_of<bfloat16>(const PoolBackward &, Stream);
extern template void fractional_max_pool_backward_cuda_of<float>(const PoolBackward &, Stream);
extern template void fractional_max_pool_backward_cuda_of<double>(const PoolBackward &, Stream);

namespace {

constexpr int64_t kNarrowLimit = int64_t(1) << 31;

// Ends a kernel that has nothing to do; the architecture of its machine code is that of all.
__global__ void arch_probe() {}

size_t real_size(DLDataType dtype) { return dtype == DTypeOf<double>::value ? sizeof(double) : sizeof(float); }

}  // namespace

PoolRowsShape pool_rows_shape(const PoolProblem &problem, size_t real_size) {
  constexpr size_t kMostShared = 16 * 1024;
  PoolRowsShape shape;
  const int64_t fast = problem.axis[kFast].out;
  const int64_t rows_of_plane = int64_t(problem.axis[kSlow].out) * problem.axis[kMiddle].out;
  // Positions within a plane are 32-bit there.
  if (problem.out_plane() >= kNarrowLimit || problem.in_plane() >= kNarrowLimit) return shape;
  for (int32_t outputs = 4096; outputs >= 256; outputs /= 2) {
    const int64_t rows = (outputs + fast - 2) / fast + 1;
    const int64_t planes = (rows + rows_of_plane - 2) / rows_of_plane + 1;
    const size_t shared = size_t(rows) * (2 * sizeof(int64_t) + sizeof(int32_t)) +
                          size_t(planes) * (kPoolAxes * real_size + size_t(fast) * sizeof(int32_t));
    if (shared > kMostShared) continue;
    shape = {outputs, int32_t(rows), int32_t(planes), shared};
    break;
  }
  return shape;
}

PoolRingShape pool_ring_shape(const PoolProblem &problem, size_t real_size) {
  constexpr int64_t kMostOverlap = 8;
  constexpr int64_t kMostSpans = 2048;
  constexpr int64_t kMostWarpBytes = 8 * 1024;
  PoolRingShape shape;
  const PoolAxis *axis = problem.axis;
  const int64_t spans = int64_t(axis[kSlow].out) + axis[kMiddle].out + axis[kFast].out;
  const int64_t overlap = window_overlap(axis[kFast]);
  const int64_t slots = window_reach(axis[kSlow]);
  const int64_t cells = kMostWarpBytes / int64_t(real_size);
  if (problem.in_plane() >= kNarrowLimit || problem.out_plane() >= kNarrowLimit / 2 || spans > kMostSpans ||
      overlap > kMostOverlap || slots > cells / kWarp)
    return shape;
  shape.slots = int32_t(slots);
  shape.overlap = int32_t(overlap);
  // Whole rows, if they fit; else as many cells of one as do, a multiple of the vector width.
  const int64_t most_fast = cells / slots / 4 * 4;
  shape.fast_tile = int32_t(std::min<int64_t>(axis[kFast].in, most_fast));
  const int64_t most_middle = std::max<int64_t>(1, cells / (slots * shape.fast_tile));
  shape.middle_tile = int32_t(std::min<int64_t>({axis[kMiddle].in, most_middle, 8}));
  // Long strips read few outputs twice; short ones keep enough warps busy. One wave of them on a large GPU
  // leaves no short second one.
  constexpr int64_t kWantedWarps = 132 * kRingBlocks * kRingWarps;
  const int64_t patches =
      problem.planes() * ceil_div(axis[kMiddle].in, shape.middle_tile) * ceil_div(axis[kFast].in, shape.fast_tile);
  const int64_t shortest = std::min<int64_t>(axis[kSlow].in, 8 * slots);
  const int64_t strips = std::clamp<int64_t>(kWantedWarps / patches, 1, ceil_div(axis[kSlow].in, shortest));
  shape.strip = int32_t(ceil_div(axis[kSlow].in, strips));
  shape.shared = size_t(ceil_div(spans * int64_t(sizeof(PoolSpan)), 16) * 16) +
                 size_t(kRingWarps) * size_t(slots) * size_t(shape.middle_tile) * size_t(shape.fast_tile) * real_size;
  return shape;
}

bool pool_row_major(const PoolProblem &problem, const PoolView &view, bool of_inputs) {
  const auto extent = [&](int axis) -> int64_t { return of_inputs ? problem.axis[axis].in : problem.axis[axis].out; };
  const int64_t slow = extent(kSlow);
  const int64_t middle = extent(kMiddle);
  const int64_t fast = extent(kFast);
  // The stride of an axis of one entry means nothing.
  const auto fits = [](int64_t extent, int64_t stride, int64_t wanted) { return extent == 1 || stride == wanted; };
  return fits(fast, view.axis[kFast], 1) && fits(middle, view.axis[kMiddle], fast) &&
         fits(slow, view.axis[kSlow], fast * middle) && fits(problem.channels, view.channel, fast * middle * slow) &&
         fits(problem.batch, view.batch, fast * middle * slow * problem.channels);
}

PoolOrder pool_order(const PoolProblem &problem, const PoolView &view, bool of_inputs) {
  int64_t extent[kTensorAxes] = {problem.batch, problem.channels};
  int64_t stride[kTensorAxes] = {view.batch, view.channel};
  for (int axis = 0; axis < kPoolAxes; ++axis) {
    extent[2 + axis] = of_inputs ? problem.axis[axis].in : problem.axis[axis].out;
    stride[2 + axis] = view.axis[axis];
  }
  int order[kTensorAxes] = {0, 1, 2, 3, 4};
  std::stable_sort(order, order + kTensorAxes, [&](int a, int b) {
    // Axes of one entry come first, whatever their strides are.
    return (extent[a] == 1 ? INT64_MAX : std::abs(stride[a])) > (extent[b] == 1 ? INT64_MAX : std::abs(stride[b]));
  });
  PoolOrder result = {};
  result.total = 1;
  for (int place = kTensorAxes - 1; place >= 0; --place) {
    const int axis = order[place];
    result.step[axis] = result.total;
    result.extent[axis] = extent[axis];
    result.total *= extent[axis];
  }
  result.wide = result.total >= int64_t(1) << 32;
  if (!result.wide) {
    for (int axis = 0; axis < kTensorAxes; ++axis) {
      result.step32[axis] = Divider(uint32_t(result.step[axis]));
      result.extent32[axis] = Divider(uint32_t(result.extent[axis]));
    }
  }
  return result;
}

bool pool_channels_last(const PoolProblem &problem, const PoolView &view, bool of_inputs) {
  constexpr int64_t kFewestChannels = 8;
  if (problem.channels < kFewestChannels) return false;
  for (int axis = 0; axis < kPoolAxes; ++axis) {
    const int32_t extent = of_inputs ? problem.axis[axis].in : problem.axis[axis].out;
    if (extent > 1 && std::abs(view.axis[axis]) <= std::abs(view.channel)) return false;
  }
  return true;
}

PoolLines pool_lines_of(const PoolProblem &problem, bool of_inputs) {
  const auto extent = [&](int axis) { return of_inputs ? problem.axis[axis].in : problem.axis[axis].out; };
  PoolLines lines = {};
  lines.pieces = int32_t(ceil_div(extent(kFast), kLineItems));
  lines.total = problem.planes() * extent(kSlow) * extent(kMiddle) * lines.pieces;
  lines.wide = lines.total >= int64_t(1) << 32;
  if (!lines.wide) {
    lines.channels = Divider(uint32_t(problem.channels));
    lines.pieces32 = Divider(uint32_t(lines.pieces));
    lines.middle = Divider(uint32_t(extent(kMiddle)));
    lines.slow = Divider(uint32_t(extent(kSlow)));
  }
  return lines;
}

void fractional_max_pool_cuda(const PoolForward &call, Stream stream) {
  dispatch_dtype<float16, bfloat16, float, double>(
      call.dtype, [&](auto tag) { fractional_max_pool_cuda_of<typename decltype(tag)::type>(call, stream); });
}

void fractional_max_pool_backward_cuda(const PoolBackward &call, Stream stream) {
  dispatch_dtype<float16, bfloat16, float, double>(
      call.dtype, [&](auto tag) { fractional_max_pool_backward_cuda_of<typename decltype(tag)::type>(call, stream); });
}

const char *fractional_max_pool_path(const PoolProblem &problem, DLDataType dtype) {
  return pool_rows_shape(problem, real_size(dtype)).outputs > 0 ? "rows" : "any";
}

const char *fractional_max_pool_backward_path(const PoolProblem &problem, DLDataType dtype) {
  return pool_ring_shape(problem, real_size(dtype)).slots > 0 ? "ring" : "any";
}

std::string fractional_max_pool_arch(const char *plan) {
  return kernel_arch(plan, reinterpret_cast<const void *>(arch_probe));
}

}  // namespace baracuda
