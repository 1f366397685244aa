// SPDX-License-Identifier: Apache-2.0
#include "segment/segment_cells.cuh"

namespace baracuda {

void segment_places(const SegmentForward &call, const SegmentSpace &space, Stream stream) {
  dispatch_segment_bits(call.problem.dtype, [&](auto tag) {
    using Bits = typename decltype(tag)::type;
    constexpr int kVector = sizeof(Bits) == 1 ? 1 : 16 / sizeof(Bits);
    SegmentPlaces<Bits> op = {};
    op.order = segment_order<Bits>(call.problem.dtype, call.problem.kind == SegmentKind::min);
    op.output = call.output;
    op.arg = call.arg;
    op.wide = call.problem.wide_index;
    op.none = uint32_t(call.problem.rows);
    op.empty = Bits(call.empty_bits);
    if constexpr (sizeof(Bits) == 2 || sizeof(Bits) == 4) {
      if (space.cells != SegmentCells::none) {
        segment_reduce_cells(call.problem, call.input, call.ids, op, false, space, stream);
        return;
      }
    }
    const bool aligned = segment_aligned(call.arg, kVector, op.wide ? 8 : 4) &&
                         (!call.output.data || segment_aligned(call.output, kVector, sizeof(Bits)));
    segment_reduce<decltype(op), kVector>(call.problem, call.input, call.ids, op, aligned, true, space, stream);
  });
}

}  // namespace baracuda
