// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>

#include "segment/segment.cuh"

namespace baracuda {

template <template <class> class Reduction, class T>
SegmentTotals<Reduction, T> segment_totals_op(const SegmentForward &call) {
  SegmentTotals<Reduction, T> op = {};
  op.output = call.output;
  op.mean = call.problem.kind == SegmentKind::mean;
  std::memcpy(&op.empty, &call.empty_bits, sizeof op.empty);
  return op;
}

template <template <class> class Reduction, class T, int kVector>
void segment_totals(const SegmentForward &call, const SegmentSpace &space, Stream stream) {
  const auto op = segment_totals_op<Reduction, T>(call);
  segment_reduce<SegmentTotals<Reduction, T>, kVector>(
      call.problem, call.input, call.ids, op, segment_aligned(call.output, kVector, sizeof(T)), false, space, stream);
}

}  // namespace baracuda
