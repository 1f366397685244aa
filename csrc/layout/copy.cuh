// SPDX-License-Identifier: Apache-2.0
// What the kernels that move elements are made of.
#pragma once

#include "runtime/launch.cuh"
#include "runtime/tensor.h"

namespace baracuda {

constexpr int kCopyThreads = 256;

// Quotient and remainder; with 32-bit indices by multiplication.
template <bool kWide>
__device__ __forceinline__ int64_t split(int64_t &index, int64_t divisor, const Divider &divider) {
  if constexpr (kWide) {
    const int64_t rest = index % divisor;
    index /= divisor;
    return rest;
  } else {
    const uint32_t quotient = divider.divide(uint32_t(index));
    const uint32_t rest = uint32_t(index) - quotient * divider.divisor;
    index = quotient;
    return rest;
  }
}

// Sixteen bytes at an address that is a multiple of sixteen, of which only those within
// [low, high) may be touched; the others read as zero.
template <bool kPacked>
__device__ __forceinline__ uint4 load_within(int64_t segment, int64_t low, int64_t high) {
  constexpr int kCells = kPacked ? 32 : 16;
  if (segment >= low && segment + kCells <= high)
    return *reinterpret_cast<const uint4 *>(kPacked ? segment >> 1 : segment);
  uint32_t words[4] = {};
  const int64_t base = kPacked ? segment >> 1 : segment;
  const int64_t first = kPacked ? low >> 1 : low;
  const int64_t last = kPacked ? (high + 1) >> 1 : high;
#pragma unroll
  for (int i = 0; i < 16; ++i)
    if (base + i >= first && base + i < last)
      words[i / 4] |= uint32_t(*reinterpret_cast<const uint8_t *>(base + i)) << (i % 4 * 8);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Sixteen bytes from the thirty-two of a and b, `bits` bits in.
__device__ __forceinline__ uint4 shift_right(uint4 a, uint4 b, uint32_t bits) {
  const uint32_t word = bits / 32;
  const uint32_t w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  uint32_t v[5];
#pragma unroll
  for (int i = 0; i < 5; ++i)
    v[i] = word == 0 ? w[i] : word == 1 ? w[i + 1] : word == 2 ? w[i + 2] : i + 3 < 8 ? w[i + 3] : 0;
  const uint32_t rest = bits % 32;
  return make_uint4(__funnelshift_r(v[0], v[1], rest), __funnelshift_r(v[1], v[2], rest),
                    __funnelshift_r(v[2], v[3], rest), __funnelshift_r(v[3], v[4], rest));
}

// Cells [begin, end) of a chunk, in stores as wide as their places allow. A byte of which only one
// half is written keeps the other.
template <bool kPacked>
__device__ __forceinline__ void store_part(int64_t chunk, int begin, int end, uint4 value) {
  uint8_t *bytes = reinterpret_cast<uint8_t *>(kPacked ? chunk >> 1 : chunk);
  const uint32_t words[4] = {value.x, value.y, value.z, value.w};
  const int first = kPacked ? (begin + 1) >> 1 : begin;
  const int last = kPacked ? end >> 1 : end;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t word = words[i];
    const int low = 4 * i;
    if (first <= low && last >= low + 4) {
      *reinterpret_cast<uint32_t *>(bytes + low) = word;
      continue;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int place = low + 2 * half;
      const uint32_t two = word >> (16 * half);
      if (first <= place && last >= place + 2) {
        *reinterpret_cast<uint16_t *>(bytes + place) = uint16_t(two);
      } else {
        if (first <= place && place < last) bytes[place] = uint8_t(two);
        if (first <= place + 1 && place + 1 < last) bytes[place + 1] = uint8_t(two >> 8);
      }
    }
    if constexpr (kPacked) {
      const int head = begin >> 1;  // its high half only
      if ((begin & 1) && head / 4 == i) bytes[head] = uint8_t((bytes[head] & 0x0fu) | (word >> (head % 4 * 8) & 0xf0u));
      const int tail = end >> 1;  // its low half only
      if ((end & 1) && tail / 4 == i) bytes[tail] = uint8_t((bytes[tail] & 0xf0u) | (word >> (tail % 4 * 8) & 0x0fu));
    }
  }
}

template <bool kPacked>
__device__ __forceinline__ void store_chunk(int64_t chunk, int begin, int end, uint4 value) {
  if (begin == 0 && end == (kPacked ? 32 : 16)) {
    *reinterpret_cast<uint4 *>(kPacked ? chunk >> 1 : chunk) = value;
  } else {
    store_part<kPacked>(chunk, begin, end, value);
  }
}

// Cells [begin, end) of the sixteen bytes of the destination at `chunk`, from a source whose cell
// `from` belongs at `chunk` (it may lie before the source when begin > 0). The source may be aligned
// differently: two aligned loads and a shift make up the chunk. Shifts are by bits, so half bytes
// cost nothing extra. Only cells within [low, high) are read. The second load is mostly the next
// lane's first, so it is taken from there: all lanes of a warp come here, with or without work.
template <bool kPacked>
__device__ __forceinline__ void copy_chunk(bool active, int64_t chunk, int begin, int end, int64_t from, int64_t low,
                                           int64_t high) {
  constexpr int kCells = kPacked ? 32 : 16;
  constexpr int kBits = kPacked ? 4 : 8;
  constexpr unsigned kWarp = 0xffffffffu;
  const int64_t segment = from & ~int64_t(kCells - 1);
  const int offset = int(from - segment);

  const bool needs_first = active && offset + begin < kCells;
  const bool needs_second = active && offset + end > kCells;
  uint4 first = make_uint4(0, 0, 0, 0);
  if (needs_first) first = load_within<kPacked>(segment, low, high);
  uint4 second = make_uint4(0, 0, 0, 0);
  if (__any_sync(kWarp, needs_second)) {
    const bool next_has_it =
        __shfl_down_sync(kWarp, segment, 1) == segment + kCells & __shfl_down_sync(kWarp, int(needs_first), 1) != 0;
    second = make_uint4(__shfl_down_sync(kWarp, first.x, 1), __shfl_down_sync(kWarp, first.y, 1),
                        __shfl_down_sync(kWarp, first.z, 1), __shfl_down_sync(kWarp, first.w, 1));
    if (needs_second && (threadIdx.x % 32 == 31 || !next_has_it))
      second = load_within<kPacked>(segment + kCells, low, high);
  }
  if (!active) return;
  const uint4 value = offset == 0 ? first : shift_right(first, second, uint32_t(offset * kBits));
  store_chunk<kPacked>(chunk, begin, end, value);
}

__device__ __forceinline__ void copy_nibble(int64_t dest, int64_t source) {
  const uint32_t value = *reinterpret_cast<const uint8_t *>(source >> 1) >> (source & 1 ? 4 : 0) & 15u;
  uint8_t *byte = reinterpret_cast<uint8_t *>(dest >> 1);
  *byte = uint8_t(dest & 1 ? (*byte & 0x0fu) | value << 4 : (*byte & 0xf0u) | value);
}

}  // namespace baracuda
