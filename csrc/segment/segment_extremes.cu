// SPDX-License-Identifier: Apache-2.0
#include "segment/segment.cuh"

namespace baracuda {
namespace {

enum class Lanes { float32, bfloat16, float16 };

// The larger of two float32, or of each two of a pair of 16-bit floats; NaN is above all, and -0 below +0.
template <Lanes kLanes>
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
  uint32_t result;
  if constexpr (kLanes == Lanes::float32) {
    float value;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(value) : "f"(__uint_as_float(a)), "f"(__uint_as_float(b)));
    result = __float_as_uint(value);
  } else if constexpr (kLanes == Lanes::bfloat16) {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  }
  return result;
}

// Maxima by the instruction that there is for floats. A minimum is that of numbers with the other sign.
template <Lanes kLanes>
struct FloatMaxima {
  using Element = uint32_t;
  using State = uint32_t;
  using Row = uint32_t;

  uint32_t signs;
  uint32_t lowest;
  uint32_t empty;
  uint32_t infinity;
  uint32_t nan;
  SegmentView output;

  __device__ State identity() const { return lowest; }
  __device__ void add(State &state, Element element, Row) const { join(state, element ^ signs); }
  __device__ void join(State &state, const State &other) const { state = larger<kLanes>(state, other); }

  // The library's NaN for any.
  __device__ uint32_t one_nan(uint32_t value, uint32_t half) const {
    const uint32_t magnitude = half & (half >> 1);
    return (value & magnitude) > (infinity & half) ? (value & ~half) | (nan & half) : value;
  }
  template <int kVector>
  __device__ void store(int64_t segment, int64_t column, int64_t length, const State (&state)[kVector]) const {
    uint32_t value[kVector];
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      value[v] = state[v] ^ signs;
      if constexpr (kLanes == Lanes::float32) {
        value[v] = one_nan(value[v], 0xffffffffu);
      } else {
        value[v] = one_nan(one_nan(value[v], 0xffffu), 0xffff0000u);
      }
      if (length == 0) value[v] = empty;
    }
    segment_write<kVector>(output, segment, column, value);
  }
};

template <Lanes kLanes>
void float_maxima(const SegmentForward &call, const SegmentProblem &problem, const SegmentView &input,
                  const SegmentView &output, uint32_t infinity, uint32_t nan, uint32_t empty, SegmentSpace &space,
                  Stream stream) {
  constexpr int kVector = 4;
  constexpr uint32_t kSigns = kLanes == Lanes::float32 ? 0x80000000u : 0x80008000u;
  FloatMaxima<kLanes> op = {};
  op.signs = problem.kind == SegmentKind::min ? kSigns : 0;
  op.lowest = infinity | kSigns;
  op.empty = empty;
  op.infinity = infinity;
  op.nan = nan;
  op.output = output;
  segment_reduce<FloatMaxima<kLanes>, kVector>(problem, input, call.ids, op, segment_aligned(output, kVector, 4), false,
                                               space, stream);
}

// Whether a matrix of 16-bit elements is one of pairs.
bool is_of_pairs(const SegmentView &view) {
  return view.column == 1 && view.row % 2 == 0 && reinterpret_cast<uintptr_t>(view.data) % 4 == 0;
}

bool by_instruction(const SegmentForward &call, SegmentSpace &space, Stream stream) {
  SegmentProblem problem = call.problem;
  const uint32_t empty = uint32_t(call.empty_bits);
  if (problem.dtype == DTypeOf<float>::value) {
    float_maxima<Lanes::float32>(call, problem, call.input, call.output, 0x7f800000u, 0x7fc00000u, empty, space,
                                 stream);
    return true;
  }
  const bool brain = problem.dtype == DTypeOf<bfloat16>::value;
  if (!(brain || problem.dtype == DTypeOf<float16>::value)) return false;
  if (problem.columns % 2 != 0 || problem.columns < 4 || !is_of_pairs(call.input) || !is_of_pairs(call.output))
    return false;
  problem.dtype = DTypeOf<float>::value;
  problem.columns /= 2;
  const SegmentView input = {call.input.data, call.input.row / 2, 1};
  const SegmentView output = {call.output.data, call.output.row / 2, 1};
  if (brain) {
    float_maxima<Lanes::bfloat16>(call, problem, input, output, 0x7f807f80u, 0x7fc07fc0u, empty * 0x10001u, space,
                                  stream);
  } else {
    float_maxima<Lanes::float16>(call, problem, input, output, 0x7c007c00u, 0x7e007e00u, empty * 0x10001u, space,
                                 stream);
  }
  return true;
}

}  // namespace

void segment_extremes(const SegmentForward &call, SegmentSpace &space, Stream stream) {
  if (by_instruction(call, space, stream)) return;
  dispatch_segment_bits(call.problem.dtype, [&](auto tag) {
    using Bits = typename decltype(tag)::type;
    constexpr int kVector = sizeof(Bits) == 8 ? 2 : 1;
    SegmentExtremes<Bits> op = {};
    op.order = segment_order<Bits>(call.problem.dtype, call.problem.kind == SegmentKind::min);
    op.output = call.output;
    op.empty = Bits(call.empty_bits);
    segment_reduce<decltype(op), kVector>(call.problem, call.input, call.ids, op,
                                          segment_aligned(call.output, kVector, sizeof(Bits)), false, space, stream);
  });
}

}  // namespace baracuda
