// SPDX-License-Identifier: Apache-2.0
#include "segment/segment_cells.cuh"
#include "segment/segment_totals.cuh"

namespace baracuda {

void segment_sums(const SegmentForward &call, const SegmentSpace &space, Stream stream) {
  dispatch_dtype<float16, bfloat16, float, double>(call.problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) < 8) {
      if (space.cells != SegmentCells::none) {
        const auto op = segment_totals_op<SegmentSum, T>(call);
        segment_reduce_cells(call.problem, call.input, call.ids, op, op.mean || call.empty_bits != 0, space, stream);
        return;
      }
    }
    segment_totals<SegmentSum, T, 16 / sizeof(T)>(call, space, stream);
  });
}

}  // namespace baracuda
