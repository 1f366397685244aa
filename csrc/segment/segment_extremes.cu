// SPDX-License-Identifier: Apache-2.0
#include "segment/segment_cells.cuh"

namespace baracuda {
namespace {

enum class Lanes { float32, bfloat16, float16 };

// The larger of two float32, or of each two of a pair of 16-bit floats; NaN is above all, and -0 below +0.
template <Lanes kLanes>
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
  uint32_t result;
  if constexpr (kLanes == Lanes::float32) {
    float value;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(value) : "f"(bit_cast<float>(a)), "f"(bit_cast<float>(b)));
    result = bit_cast<uint32_t>(value);
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

  // The library's NaN for any, of the elements in these bits.
  __device__ uint32_t one_nan(uint32_t value, uint32_t bits) const {
    const uint32_t magnitude = bits & (bits >> 1);
    return (value & magnitude) > (infinity & bits) ? (value & ~bits) | (nan & bits) : value;
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
void float_maxima(const SegmentForward &call, uint32_t infinity, uint32_t nan, const SegmentSpace &space,
                  Stream stream) {
  constexpr int kVector = 4;
  constexpr bool kPairs = kLanes != Lanes::float32;
  constexpr uint32_t kSigns = kPairs ? 0x80008000u : 0x80000000u;
  constexpr uint32_t kTwice = kPairs ? 0x10001u : 1u;
  SegmentProblem problem = call.problem;
  SegmentView input = call.input;
  FloatMaxima<kLanes> op = {};
  op.signs = problem.kind == SegmentKind::min ? kSigns : 0;
  op.infinity = infinity * kTwice;
  op.nan = nan * kTwice;
  op.lowest = op.infinity | kSigns;
  op.empty = uint32_t(call.empty_bits) * kTwice;
  op.output = call.output;
  if (kPairs) {
    problem.dtype = DTypeOf<float>::value;
    problem.columns /= 2;
    input.row /= 2;
    op.output.row /= 2;
  }
  segment_reduce<FloatMaxima<kLanes>, kVector>(problem, input, call.ids, op, segment_aligned(op.output, kVector, 4),
                                               false, space, stream);
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
  if (space.cells == SegmentCells::none) {
    if (dtype == DTypeOf<float>::value)
      return float_maxima<Lanes::float32>(call, 0x7f800000u, 0x7fc00000u, space, stream);
    if (dtype == DTypeOf<bfloat16>::value && are_pairs(call))
      return float_maxima<Lanes::bfloat16>(call, 0x7f80u, 0x7fc0u, space, stream);
    if (dtype == DTypeOf<float16>::value && are_pairs(call))
      return float_maxima<Lanes::float16>(call, 0x7c00u, 0x7e00u, space, stream);
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
