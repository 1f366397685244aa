// SPDX-License-Identifier: Apache-2.0
// Maxima by the instructions that there are for floats, on words of one float32 or of two 16-bit floats.
#pragma once

#include "segment/segment.cuh"

namespace baracuda {

enum class SegmentLanes { float32, bfloat16, float16 };

// The larger of two float32, or of each two of a pair of 16-bit floats; NaN is above all, and -0 below +0.
template <SegmentLanes kLanes>
__device__ __forceinline__ uint32_t segment_larger(uint32_t a, uint32_t b) {
  uint32_t result;
  if constexpr (kLanes == SegmentLanes::float32) {
    float value;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(value) : "f"(bit_cast<float>(a)), "f"(bit_cast<float>(b)));
    result = bit_cast<uint32_t>(value);
  } else if constexpr (kLanes == SegmentLanes::bfloat16) {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  }
  return result;
}

// All bits where two words' floats have different bits, none where they have the same.
template <SegmentLanes kLanes>
__device__ __forceinline__ uint32_t segment_differ(uint32_t a, uint32_t b) {
  if constexpr (kLanes == SegmentLanes::float32) {
    return a == b ? 0u : ~0u;
  } else {
    const uint32_t bits = a ^ b;
    const uint32_t signs = ((bits & 0x7fff7fffu) + 0x7fff7fffu) | bits;
    uint32_t all;
    // Each half's sign, sixteen times.
    asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(all) : "r"(signs));
    return all;
  }
}

// Unsigned integers in the order of a word's floats, each in its own bits: NaN all ones, none 0.
template <SegmentLanes kLanes>
__device__ __forceinline__ uint32_t segment_keys(uint32_t word) {
  // Of all NaN one is left.
  const uint32_t value = segment_larger<kLanes>(word, word);
  if constexpr (kLanes == SegmentLanes::float32) {
    return value ^ (uint32_t(int32_t(value) >> 31) | 0x80000000u);
  } else {
    uint32_t negative;
    asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(negative) : "r"(value));
    return value ^ (negative | 0x80008000u);
  }
}

// Maxima by the instruction that there is for floats. A minimum is that of numbers with the other sign. Bits: uint32_t,
// or uint16_t for the lower half alone.
template <SegmentLanes kLanes, class Bits = uint32_t>
struct SegmentFloatMaxima {
  using Element = Bits;
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
  __device__ void join(State &state, const State &other) const { state = segment_larger<kLanes>(state, other); }

  // The library's NaN for any, of the elements in these bits.
  __device__ uint32_t one_nan(uint32_t value, uint32_t bits) const {
    const uint32_t magnitude = bits & (bits >> 1);
    return (value & magnitude) > (infinity & bits) ? (value & ~bits) | (nan & bits) : value;
  }
  template <int kVector>
  __device__ void store(int64_t segment, int64_t column, int64_t length, const State (&state)[kVector]) const {
    Bits value[kVector];
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      uint32_t bits = state[v] ^ signs;
      if constexpr (kLanes == SegmentLanes::float32) {
        bits = one_nan(bits, 0xffffffffu);
      } else {
        bits = one_nan(bits, 0xffffu);
        if constexpr (sizeof(Bits) == 4) bits = one_nan(bits, 0xffff0000u);
      }
      value[v] = Bits(length == 0 ? empty : bits);
    }
    segment_write<kVector>(output, segment, column, value);
  }
};

// `output` counts elements of Bits, the others are those of one float.
template <SegmentLanes kLanes, class Bits = uint32_t>
SegmentFloatMaxima<kLanes, Bits> segment_float_maxima(bool minimum, uint32_t infinity, uint32_t nan, uint32_t empty,
                                                      const SegmentView &output) {
  constexpr bool kPairs = kLanes != SegmentLanes::float32;
  constexpr uint32_t kSigns = kPairs ? 0x80008000u : 0x80000000u;
  constexpr uint32_t kTwice = kPairs ? 0x10001u : 1u;
  return {minimum ? kSigns : 0, (infinity * kTwice) | kSigns, empty * kTwice, infinity * kTwice, nan * kTwice, output};
}

}  // namespace baracuda
