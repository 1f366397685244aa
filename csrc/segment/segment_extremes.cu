// SPDX-License-Identifier: Apache-2.0
#include "segment/segment.cuh"

namespace baracuda {

void segment_extremes(const SegmentForward &call, const SegmentSpace &space, Stream stream) {
  dispatch_segment_bits(call.problem.dtype, [&](auto tag) {
    using Bits = typename decltype(tag)::type;
    constexpr int kVector = sizeof(Bits) == 1 ? 1 : 16 / sizeof(Bits);
    SegmentExtremes<Bits> op = {};
    op.order = segment_order<Bits>(call.problem.dtype, call.problem.kind == SegmentKind::min);
    op.output = call.output;
    op.empty = Bits(call.empty_bits);
    segment_reduce<decltype(op), kVector>(call.problem, call.input, call.ids, op,
                                          segment_aligned(call.output, kVector, sizeof(Bits)), false, space, stream);
  });
}

}  // namespace baracuda
