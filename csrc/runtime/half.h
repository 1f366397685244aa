// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define BARACUDA_HD __host__ __device__
#else
#define BARACUDA_HD
#endif

namespace baracuda {

template <class To, class From>
BARACUDA_HD inline To bit_cast(const From &from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// Storage types: arithmetic is done in float, and a value is rounded (to nearest, ties to even)
// only when it is stored.
struct bfloat16 {
  uint16_t bits;

  bfloat16() = default;
  BARACUDA_HD explicit bfloat16(float value) {
#if defined(__CUDA_ARCH__)
    bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
#else
    const uint32_t u = bit_cast<uint32_t>(value);
    bits = (u & 0x7fffffffu) > 0x7f800000u ? uint16_t(u >> 16 | 0x40u) : uint16_t((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
#endif
  }
  BARACUDA_HD explicit operator float() const { return bit_cast<float>(uint32_t(bits) << 16); }
};

struct float16 {
  uint16_t bits;

  float16() = default;
  BARACUDA_HD explicit float16(float value) {
#if defined(__CUDA_ARCH__)
    bits = __half_as_ushort(__float2half_rn(value));
#else
    bits = from_float(value);
#endif
  }
  BARACUDA_HD explicit operator float() const {
#if defined(__CUDA_ARCH__)
    return __half2float(__ushort_as_half(bits));
#else
    return to_float(bits);
#endif
  }

 private:
  static uint16_t from_float(float value) {
    const uint32_t u = bit_cast<uint32_t>(value);
    const uint32_t sign = u >> 16 & 0x8000u;
    const uint32_t magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
    if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // rounds to 65536 or beyond
    if (magnitude < 0x38800000u) {
      // Subnormal: adding 0.5 puts the unit in the last place of the float at 2^-24, the
      // spacing of float16's subnormals, so the addition does the rounding.
      const float shifted = bit_cast<float>(magnitude) + 0.5f;
      return uint16_t(sign | (bit_cast<uint32_t>(shifted) - 0x3f000000u));
    }
    const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
    return uint16_t(sign | ((rounded - 0x38000000u) >> 13));
  }
  static float to_float(uint16_t bits) {
    const uint32_t sign = uint32_t(bits & 0x8000u) << 16;
    const uint32_t magnitude = bits & 0x7fffu;
    if (magnitude >= 0x7c00u) return bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    if (magnitude >= 0x400u) return bit_cast<float>(sign | ((magnitude << 13) + 0x38000000u));
    const float value = float(magnitude) * 0x1p-24f;
    return bit_cast<float>(sign | bit_cast<uint32_t>(value));
  }
};

}  // namespace baracuda
