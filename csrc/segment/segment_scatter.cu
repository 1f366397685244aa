// SPDX-License-Identifier: Apache-2.0
// The gradient of a maximum of single columns: zeros, and then what each segment's row takes.
#include "segment/segment.cuh"

namespace baracuda {
namespace {

constexpr int kScatterAtOnce = 4;

// Rows of a window alone, so that zeros that were just written are still in the cache.
template <class Bits, class Arg, class Id, bool kChecked>
__global__ __launch_bounds__(kSegmentThreads) void scatter_column(SegmentView d_output, SegmentView arg,
                                                                  SegmentIndices ids, int64_t segments, Bits *d_input,
                                                                  uint64_t first_row, uint64_t rows) {
  const int64_t first = int64_t(blockIdx.x) * kSegmentThreads * kScatterAtOnce + threadIdx.x;
  const Id *from = static_cast<const Id *>(ids.data);
  uint64_t row[kScatterAtOnce];
  Bits dy[kScatterAtOnce];
#pragma unroll
  for (int r = 0; r < kScatterAtOnce; ++r) {
    const int64_t segment = first + r * kSegmentThreads;
    row[r] = ~uint64_t(0);
    if (segment < segments) row[r] = uint64_t(static_cast<const Arg *>(arg.data)[segment * arg.row]) - first_row;
    if (segment < segments) dy[r] = static_cast<const Bits *>(d_output.data)[segment * d_output.row];
  }
  Id owner[kScatterAtOnce];
#pragma unroll
  for (int r = 0; r < kScatterAtOnce; ++r)
    if (kChecked && row[r] < rows) owner[r] = __ldcs(from + int64_t(first_row + row[r]) * ids.stride);
#pragma unroll
  for (int r = 0; r < kScatterAtOnce; ++r) {
    if (row[r] >= rows) continue;
    // So that no two segments write one element, whatever arg holds.
    if (!kChecked || int64_t(owner[r]) == first + r * kSegmentThreads) d_input[first_row + row[r]] = dy[r];
  }
}

}  // namespace

void segment_scatter_column(const SegmentBackward &call, const SegmentView &arg, int arg_bytes, bool checked,
                            Stream stream) {
  const SegmentProblem &problem = call.problem;
  // What the cache holds until the rows are scattered.
  constexpr int64_t kWindowBytes = int64_t(24) << 20;
  const int bytes = problem.dtype.bits / 8;
  const auto scatter = [&](auto bits, auto arg_tag, auto id) {
    using Bits = typename decltype(bits)::type;
    using Arg = typename decltype(arg_tag)::type;
    using Id = typename decltype(id)::type;
    // Each window asks for all of arg.
    constexpr int64_t kMostWindows = 4;
    const int64_t windows = std::min(ceil_div(problem.rows * bytes, kWindowBytes), kMostWindows);
    const int64_t each = ceil_div(ceil_div(problem.rows, windows), 64) * 64;
    for (int64_t row = 0; row < problem.rows; row += each) {
      const int64_t rows = std::min(each, problem.rows - row);
      Bits *to = static_cast<Bits *>(call.d_input.data);
      check_cuda(cudaMemsetAsync(to + row, 0, size_t(rows * bytes), static_cast<cudaStream_t>(stream)),
                 "cudaMemsetAsync");
      if (problem.segments > 0)
        launch(checked ? scatter_column<Bits, Arg, Id, true> : scatter_column<Bits, Arg, Id, false>,
               {ceil_div(problem.segments, kSegmentThreads * kScatterAtOnce), kSegmentThreads}, stream, call.d_output,
               arg, call.ids, problem.segments, to, uint64_t(row), uint64_t(rows));
    }
  };
  const auto with_id = [&](auto bits, auto arg_tag) {
    if (call.ids.wide) {
      scatter(bits, arg_tag, TypeTag<int64_t>{});
    } else {
      scatter(bits, arg_tag, TypeTag<int32_t>{});
    }
  };
  const auto with_arg = [&](auto bits) {
    if (arg_bytes == 8) {
      with_id(bits, TypeTag<int64_t>{});
    } else {
      with_id(bits, TypeTag<uint32_t>{});
    }
  };
  switch (bytes) {
    case 2:
      return with_arg(TypeTag<uint16_t>{});
    case 4:
      return with_arg(TypeTag<uint32_t>{});
    default:
      return with_arg(TypeTag<uint64_t>{});
  }
}

}  // namespace baracuda
