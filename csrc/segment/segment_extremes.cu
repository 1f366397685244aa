// SPDX-License-Identifier: Apache-2.0
#include "segment/segment_cells.cuh"
#include "segment/segment_lanes.cuh"

namespace baracuda {
namespace {

constexpr uint32_t kInfinity = 0x7f800000u;
constexpr uint32_t kNan = 0x7fc00000u;

template <SegmentLanes kLanes, class Bits = uint32_t>
SegmentFloatMaxima<kLanes, Bits> float_op(const SegmentForward &call, const SegmentView &output, uint32_t infinity,
                                          uint32_t nan) {
  return segment_float_maxima<kLanes, Bits>(call.problem.kind == SegmentKind::min, infinity, nan,
                                            uint32_t(call.empty_bits), output);
}

template <SegmentLanes kLanes, class Bits>
void float_runs(const SegmentForward &call, uint32_t infinity, uint32_t nan, const SegmentSpace &space, Stream stream) {
  segment_reduce_runs(call.problem, call.input, call.ids, float_op<kLanes, Bits>(call, call.output, infinity, nan),
                      space, stream);
}

template <SegmentLanes kLanes>
void float_maxima(const SegmentForward &call, uint32_t infinity, uint32_t nan, const SegmentSpace &space,
                  Stream stream) {
  constexpr int kVector = 4;
  constexpr bool kPairs = kLanes != SegmentLanes::float32;
  SegmentProblem problem = call.problem;
  SegmentView input = call.input;
  SegmentView output = call.output;
  if (kPairs) {
    problem.dtype = DTypeOf<float>::value;
    problem.columns /= 2;
    input.row /= 2;
    output.row /= 2;
  }
  const auto op = float_op<kLanes>(call, output, infinity, nan);
  segment_reduce<SegmentFloatMaxima<kLanes>, kVector>(problem, input, call.ids, op,
                                                      segment_aligned(op.output, kVector, 4), false, space, stream);
}

// Rows of 16-bit elements that can be loaded and stored eight at a time.
bool are_pairs(const SegmentForward &call) {
  constexpr int kVector = 8;
  return call.problem.dtype.bits == 16 && segment_vector(call.problem) == kVector &&
         segment_aligned(call.input, kVector, 2) && segment_aligned(call.output, kVector, 2);
}

}  // namespace

void segment_extremes(const SegmentForward &call, const SegmentSpace &space, Stream stream) {
  const DLDataType dtype = call.problem.dtype;
  if (space.cells == SegmentCells::runs) {
    if (dtype == DTypeOf<float>::value)
      return float_runs<SegmentLanes::float32, uint32_t>(call, kInfinity, kNan, space, stream);
    if (dtype == DTypeOf<bfloat16>::value)
      return float_runs<SegmentLanes::bfloat16, uint16_t>(call, 0x7f80u, 0x7fc0u, space, stream);
    return float_runs<SegmentLanes::float16, uint16_t>(call, 0x7c00u, 0x7e00u, space, stream);
  }
  if (space.cells == SegmentCells::none) {
    if (dtype == DTypeOf<float>::value)
      return float_maxima<SegmentLanes::float32>(call, kInfinity, kNan, space, stream);
    if (dtype == DTypeOf<bfloat16>::value && are_pairs(call))
      return float_maxima<SegmentLanes::bfloat16>(call, 0x7f80u, 0x7fc0u, space, stream);
    if (dtype == DTypeOf<float16>::value && are_pairs(call))
      return float_maxima<SegmentLanes::float16>(call, 0x7c00u, 0x7e00u, space, stream);
  }
  dispatch_segment_bits(dtype, [&](auto tag) {
    using Bits = typename decltype(tag)::type;
    constexpr int kVector = sizeof(Bits) >= 4 ? 16 / sizeof(Bits) : 1;
    SegmentExtremes<Bits> op = {};
    op.order = segment_order<Bits>(dtype, call.problem.kind == SegmentKind::min);
    op.output = call.output;
    op.empty = Bits(call.empty_bits);
    if constexpr (sizeof(Bits) == 2 || sizeof(Bits) == 4) {
      if (space.cells != SegmentCells::none) {
        segment_reduce_cells(call.problem, call.input, call.ids, op, false, space, stream);
        return;
      }
    }
    segment_reduce<decltype(op), kVector>(call.problem, call.input, call.ids, op,
                                          segment_aligned(call.output, kVector, sizeof(Bits)), false, space, stream);
  });
}

}  // namespace baracuda
