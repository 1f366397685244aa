// SPDX-License-Identifier: Apache-2.0
#include "segment/segment.cuh"

namespace baracuda {
namespace {

template <class T>
struct Factors : SegmentOthers<T> {
  using State = typename SegmentOthers<T>::State;
  using Packed = SegmentPackedProduct<typename SegmentReal<T>::type>;
  Packed *to;
  int64_t columns;

  template <int kVector>
  __device__ void store(int64_t segment, int64_t column, int64_t, const State (&state)[kVector]) const {
#pragma unroll
    for (int v = 0; v < kVector; ++v) to[segment * columns + column + v] = segment_pack(state[v]);
  }
};

}  // namespace

void segment_tallies(const SegmentBackward &call, const SegmentSpace &space, Stream stream) {
  const auto tally = [&](auto tag) {
    using Bits = typename decltype(tag)::type;
    SegmentStates<SegmentTally<Bits, uint32_t>> op = {};
    op.order = segment_order<Bits>(call.problem.dtype, call.problem.kind == SegmentKind::min);
    op.to = reinterpret_cast<decltype(op.to)>(space.states);
    op.columns = call.problem.columns;
    segment_reduce<decltype(op), 16 / sizeof(Bits)>(call.problem, call.input, call.ids, op, true, true, space, stream);
  };
  switch (call.problem.dtype.bits) {
    case 16:
      return tally(TypeTag<uint16_t>{});
    case 32:
      return tally(TypeTag<uint32_t>{});
    default:
      return tally(TypeTag<uint64_t>{});
  }
}

void segment_factors(const SegmentBackward &call, const SegmentSpace &space, Stream stream) {
  dispatch_dtype<float16, bfloat16, float, double>(call.problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    Factors<T> op = {};
    op.to = reinterpret_cast<decltype(op.to)>(space.states);
    op.columns = call.problem.columns;
    segment_reduce<decltype(op), 16 / sizeof(T)>(call.problem, call.input, call.ids, op, true, false, space, stream);
  });
}

}  // namespace baracuda
