// SPDX-License-Identifier: Apache-2.0
#include "segment/segment_cells.cuh"

namespace baracuda {
namespace {

// Hands d_output to the rows that hold the maxima.
template <class Bits>
struct Takers : SegmentArgMax<Bits, uint32_t> {
  using State = typename SegmentArgMax<Bits, uint32_t>::State;
  static constexpr bool kRows = true;
  SegmentView d_output;
  SegmentView d_input;

  __device__ int64_t seen(const State &state) const { return state.row != this->kNone; }
  template <int kVector>
  __device__ void store(int64_t segment, int64_t column, int64_t length, const State (&state)[kVector]) const {
#pragma unroll
    for (int v = 0; v < kVector; ++v)
      if (length > 0) d_input.at<Bits>(state[v].row, column + v) = d_output.at<const Bits>(segment, column + v);
  }
};

}  // namespace

bool segment_spread_shared(const SegmentBackward &call, const SegmentSpace &space, Stream stream) {
  const int bytes = call.problem.dtype.bits / 8;
  if (!segment_aligned(call.d_input, 16 / bytes, bytes)) return false;
  const auto run = [&](auto tag) {
    Takers<typename decltype(tag)::type> op = {};
    op.d_output = call.d_output;
    op.d_input = call.d_input;
    segment_reduce_shared(call.problem, call.input, call.ids, op, call.d_input, space, stream);
  };
  if (bytes == 2) {
    run(TypeTag<uint16_t>{});
  } else {
    run(TypeTag<uint32_t>{});
  }
  return true;
}

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
