// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "runtime/dtype.h"
#include "runtime/half.h"

namespace baracuda {

// Storage types like those of half.h. A float is rounded to nearest, ties to even, and saturates: what
// lies beyond the largest finite number, infinities included, becomes that number. NaN becomes 0x7f.
namespace detail {

// kMantissa bits of mantissa, the exponent's bias, and the encoding of the largest finite number.
template <int kMantissa, int kBias, uint32_t kLargest>
BARACUDA_HD inline uint8_t round_to_float8(float value) {
  const uint32_t u = bit_cast<uint32_t>(value);
  const uint32_t sign = u >> 24 & 0x80u;
  const uint32_t magnitude = u & 0x7fffffffu;
  constexpr int kDropped = 23 - kMantissa;
  constexpr uint32_t kSmallestNormal = uint32_t(127 - kBias + 1) << 23;
  if (magnitude > 0x7f800000u) return 0x7f;
  if (magnitude < kSmallestNormal) {
    // Subnormal: next to this power of two floats are spaced as the subnormals are, so that the
    // addition does the rounding.
    constexpr uint32_t kSpacing = uint32_t(127 - kBias + 1 - kMantissa + 23) << 23;
    const float shifted = bit_cast<float>(magnitude) + bit_cast<float>(kSpacing);
    return uint8_t(sign | (bit_cast<uint32_t>(shifted) - kSpacing));
  }
  const uint32_t rounded = magnitude + (1u << (kDropped - 1)) - 1u + (magnitude >> kDropped & 1u);
  const uint32_t bits = (rounded >> kDropped) - (uint32_t(127 - kBias) << kMantissa);
  return uint8_t(sign | (bits < kLargest ? bits : kLargest));
}

}  // namespace detail

struct float8_e4m3fn {
  uint8_t bits;

  float8_e4m3fn() = default;
  BARACUDA_HD explicit float8_e4m3fn(float value) : bits(detail::round_to_float8<3, 7, 0x7e>(value)) {}
  BARACUDA_HD explicit operator float() const {
    if ((bits & 0x7fu) == 0x7fu) return bit_cast<float>(uint32_t(bits & 0x80u) << 24 | 0x7fc00000u);
    // As a float16 of the same exponent field it is 2^-8 of what it is.
    float16 half;
    half.bits = uint16_t((bits & 0x80u) << 8 | (bits & 0x7fu) << 7);
    return float(half) * 256.0f;
  }
};

struct float8_e5m2 {
  uint8_t bits;

  float8_e5m2() = default;
  BARACUDA_HD explicit float8_e5m2(float value) : bits(detail::round_to_float8<2, 15, 0x7b>(value)) {}
  BARACUDA_HD explicit operator float() const {
    float16 half;
    half.bits = uint16_t(bits << 8);
    return float(half);
  }
};

template <>
struct DTypeOf<float8_e4m3fn> {
  static constexpr DLDataType value = {kDLFloat8_e4m3fn, 8, 1};
};
template <>
struct DTypeOf<float8_e5m2> {
  static constexpr DLDataType value = {kDLFloat8_e5m2, 8, 1};
};

}  // namespace baracuda
