// SPDX-License-Identifier: Apache-2.0
// What the CUDA kernels of the scans are made of: where operands lie, maps that move between lanes, and elements as
// they lie in registers.
#pragma once

#include <bit>

#include "runtime/launch.cuh"
#include "scan/scan.h"

namespace baracuda::scan {

constexpr int kWarp = 32;
constexpr uint32_t kAll = 0xffffffffu;

// How a row's elements are reached.
enum Access : int {
  kForward = 0,   // consecutive, sixteen bytes at a time
  kBackward = 1,  // consecutive from the far end, sixteen bytes at a time
  kStrided = 2,   // one by one
};

// Calls body(integral_constant<int, 0>{}), ... for each position of the list.
template <int kCount, class Body, int k = 0>
__device__ __forceinline__ void for_each(Body &&body) {
  if constexpr (k < kCount) {
    body(std::integral_constant<int, k>{});
    for_each<kCount, Body, k + 1>(static_cast<Body &&>(body));
  }
}

template <class L>
struct Bytes;
template <class... T>
struct Bytes<List<T...>> {
  static constexpr int sum = (int(sizeof(T)) + ...);
  static constexpr bool all(int size) { return ((int(sizeof(T)) == size) && ...); }
  static constexpr int widest() {
    int best = 0;
    for (int size : {int(sizeof(T))...}) best = size > best ? size : best;
    return best;
  }
};

// An operand's place in a Geometry.
template <class Op>
struct Layout {
  static constexpr int kInputs = Op::Inputs::size;
  static constexpr int kOutputs = Op::Outputs::size;
  static constexpr int kLines = kInputs + kOutputs;
  static constexpr int kInitialSlot = kLines;
  static constexpr int kFinalSlot = kLines + 1;
  // Operands in which a column is found at once.
  static constexpr int kFound = Op::kFinal ? kFinalSlot + 1 : kLines;
};

// Where a row begins, in elements, in `kCount` operands from `first` on.
template <int kCount>
__device__ __forceinline__ void row_offsets(const Geometry &g, int64_t row, int first, int64_t (&offset)[kCount]) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) offset[k] = 0;
#pragma unroll 1
  for (int axis = g.rank - 1; axis > 0; --axis) {
    const int64_t extent = g.extent[axis];
    // A division of 64-bit numbers is many instructions.
    const bool small = (row | extent) >> 32 == 0;
    const int64_t quotient = small ? int64_t(uint32_t(row) / uint32_t(extent)) : row / extent;
    const int64_t place = row - quotient * extent;
#pragma unroll
    for (int k = 0; k < kCount; ++k) offset[k] += place * g.stride[first + k][axis];
    row = quotient;
  }
  if (g.rank > 0) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) offset[k] += row * g.stride[first + k][0];
  }
}

__device__ __forceinline__ int64_t row_offset(const Geometry &g, int operand, int64_t row) {
  int64_t offset[1];
  row_offsets(g, row, operand, offset);
  return offset[0];
}
template <class T>
__device__ __forceinline__ T *row_start(const Geometry &g, int operand, int64_t row) {
  return reinterpret_cast<T *>(g.data[operand]) + row_offset(g, operand, row);
}

// Maps and values move between lanes and blocks as 32-bit words.
template <class V>
struct Words {
  static constexpr int count = int((sizeof(V) + 3) / 4);
  uint32_t word[count];
};
template <class V>
__device__ __forceinline__ Words<V> to_words(const V &value) {
  Words<V> words;
  static_assert(sizeof(V) % 4 == 0);
  memcpy(words.word, &value, sizeof value);
  return words;
}
template <class V>
__device__ __forceinline__ V from_words(const Words<V> &words) {
  V value;
  memcpy(&value, words.word, sizeof value);
  return value;
}
template <class V>
__device__ __forceinline__ V shuffle_up(const V &value, int distance) {
  Words<V> words = to_words(value);
#pragma unroll
  for (int i = 0; i < Words<V>::count; ++i) words.word[i] = __shfl_up_sync(kAll, words.word[i], distance);
  return from_words<V>(words);
}
template <class V>
__device__ __forceinline__ V shuffle_down(const V &value, int distance) {
  Words<V> words = to_words(value);
#pragma unroll
  for (int i = 0; i < Words<V>::count; ++i) words.word[i] = __shfl_down_sync(kAll, words.word[i], distance);
  return from_words<V>(words);
}
template <class V>
__device__ __forceinline__ V shuffle(const V &value, int lane) {
  Words<V> words = to_words(value);
#pragma unroll
  for (int i = 0; i < Words<V>::count; ++i) words.word[i] = __shfl_sync(kAll, words.word[i], lane);
  return from_words<V>(words);
}

// Inclusive scan over groups of `width` lanes, at most kMostLanes.
template <int kMostLanes = kWarp, class Op>
__device__ __forceinline__ typename Op::Map warp_scan(const Op &op, typename Op::Map map, int lane, int width = kWarp) {
#pragma unroll
  for (int distance = 1; distance < kMostLanes; distance *= 2) {
    // Without a branch, which would cost more than combining with nothing.
    typename Op::Map left = shuffle_up(map, distance);
    if ((lane & (width - 1)) < distance) left = op.identity();
    map = op.combine(left, map);
  }
  return map;
}
template <class Op>
__device__ __forceinline__ typename Op::Map exclusive_of(const Op &op, const typename Op::Map &inclusive, int lane,
                                                         int width = kWarp) {
  const typename Op::Map left = shuffle_up(inclusive, 1);
  return (lane & (width - 1)) == 0 ? op.identity() : left;
}

template <class T>
constexpr bool kIsHalf = std::is_same_v<T, bfloat16> || std::is_same_v<T, float16>;

// The larger elements of two pairs, or the smaller ones: NaN where either is, and of two zeros +0, or -0.
template <class T, bool kSmaller>
__device__ __forceinline__ uint32_t extreme_pair(uint32_t a, uint32_t b) {
  static_assert(kIsHalf<T>);
  uint32_t extreme;
  if constexpr (std::is_same_v<T, bfloat16>) {
    if constexpr (kSmaller) {
      asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(extreme) : "r"(a), "r"(b));
    } else {
      asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(extreme) : "r"(a), "r"(b));
    }
  } else if constexpr (kSmaller) {
    asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(extreme) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(extreme) : "r"(a), "r"(b));
  }
  return extreme;
}
// Pairs of which equal elements have equal bits: of zeros and NaNs one each.
template <class T>
__device__ __forceinline__ uint32_t one_zero_one_nan(uint32_t pair) {
  static_assert(kIsHalf<T>);
  uint32_t sum;
  if constexpr (std::is_same_v<T, bfloat16>) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(pair), "r"(0x3f803f80u), "r"(0u));
  } else {
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(pair), "r"(0u));
  }
  return sum;
}
// Pairs of one element, the first or the second of another pair.
__device__ __forceinline__ uint32_t twice_low(uint32_t pair) { return __byte_perm(pair, 0, 0x1010); }
__device__ __forceinline__ uint32_t twice_high(uint32_t pair) { return __byte_perm(pair, 0, 0x3232); }

// Zeros of which signs are among pairs.
constexpr uint32_t kNoZeros = 0x7fff7fffu;
struct ZerosSeen {
  // As integers no half is smaller than the one with nothing but a sign.
  uint32_t negative = 0x7fff7fffu;
  uint32_t positive = 0x7fff7fffu;
  __device__ __forceinline__ void see(uint32_t pair) {
    negative = __vmins2(negative, pair);
    positive = __vmins2(positive, pair ^ 0x80008000u);
  }
  __device__ __forceinline__ bool both() const { return is_sign(negative) && is_sign(positive); }

 private:
  __device__ __forceinline__ static bool is_sign(uint32_t pair) {
    return (pair & 0xffffu) == 0x8000u || pair >> 16 == 0x8000u;
  }
};

// The larger elements of two pairs; NaN only where both are.
template <class T>
__device__ __forceinline__ uint32_t larger_pair(uint32_t a, uint32_t b) {
  static_assert(kIsHalf<T>);
  uint32_t larger;
  if constexpr (std::is_same_v<T, bfloat16>) {
    asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  } else {
    asm("max.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  }
  return larger;
}

// kCount stored elements, packed: narrow ones are taken apart where they are used and not before,
// so that they take few registers meanwhile.
template <class T, int kCount>
struct Packed {
  static constexpr int kSize = int(sizeof(T));
  static constexpr int kBytes = kSize * kCount;
  static constexpr int kWords = (kBytes + 3) / 4;
  uint32_t word[kWords];

  __device__ __forceinline__ T get(int i) const {
    T value;
    if constexpr (kSize == 8) {
      const uint2 pair = {word[2 * i], word[2 * i + 1]};
      memcpy(&value, &pair, 8);
    } else if constexpr (kSize == 4) {
      memcpy(&value, &word[i], 4);
    } else {
      const Unsigned<kSize> bits = Unsigned<kSize>(word[i * kSize / 4] >> (i * kSize % 4 * 8));
      memcpy(&value, &bits, kSize);
    }
    return value;
  }
  template <class A>
  __device__ __forceinline__ A widened(int i) const {
    if constexpr (std::is_same_v<T, bfloat16>) {
      return A(__uint_as_float(i % 2 ? word[i / 2] & 0xffff0000u : word[i / 2] << 16));
    } else {
      return widen<A>(get(i));
    }
  }
  // Elements i and i + 1, of which i is even, at once.
  __device__ __forceinline__ void put_pair(int i, float low, float high) {
    static_assert(kIsHalf<T>);
    if constexpr (std::is_same_v<T, bfloat16>) {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word[i / 2]) : "f"(high), "f"(low));
    } else {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word[i / 2]) : "f"(high), "f"(low));
    }
  }
  // In ascending order.
  __device__ __forceinline__ void put(int i, T value) {
    if constexpr (kSize == 8) {
      uint2 pair;
      memcpy(&pair, &value, 8);
      word[2 * i] = pair.x;
      word[2 * i + 1] = pair.y;
    } else if constexpr (kSize == 4) {
      memcpy(&word[i], &value, 4);
    } else {
      Unsigned<kSize> bits;
      memcpy(&bits, &value, kSize);
      const int shift = i * kSize % 4 * 8;
      uint32_t &to = word[i * kSize / 4];
      to = shift == 0 ? uint32_t(bits) : to | uint32_t(bits) << shift;
    }
  }
  __device__ __forceinline__ void replace(int i, T value) {
    if constexpr (kSize < 4) {
      const uint32_t mask = kSize == 1 ? 0xff : 0xffff;
      const int shift = i * kSize % 4 * 8;
      Unsigned<kSize> bits;
      memcpy(&bits, &value, kSize);
      uint32_t &to = word[i * kSize / 4];
      to = (to & ~(mask << shift)) | uint32_t(bits) << shift;
    } else {
      put(i, value);
    }
  }
  // The elements in the opposite order.
  __device__ __forceinline__ Packed turned() const {
    Packed other;
    if constexpr (kBytes % 4 != 0) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) other.put(i, get(kCount - 1 - i));
    } else {
      constexpr int kStep = kSize == 8 ? 2 : 1;
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const int from = (kWords / kStep - 1 - i / kStep) * kStep + i % kStep;
        const uint32_t mirror = kSize == 1 ? 0x0123 : kSize == 2 ? 0x1032 : 0x3210;
        other.word[i] = kSize >= 4 ? word[from] : __byte_perm(word[from], 0, mirror);
      }
    }
    return other;
  }
  // `turn` is the same for all threads, and seldom true: a branch, which nothing but the asm keeps from becoming a
  // choice for each word.
  __device__ __forceinline__ void turn_if(bool turn) {
    if (turn) {
      *this = turned();
      asm volatile("");
    }
  }
  // Keeps the compiler from holding on to what it took apart earlier. `nothing` is zero, but it can't tell.
  __device__ __forceinline__ void forget(uint32_t nothing) {
    if constexpr (kSize < 4) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) word[i] ^= nothing;
    }
  }

  // Memory is read and written in pieces of sixteen bytes, or one shorter piece.
  static constexpr int kPieceBytes = kBytes < 16 ? kBytes : 16;
  static constexpr int kPieces = kBytes / kPieceBytes;
  static constexpr int kPieceItems = kCount / kPieces;
  // Two registers, not one number of 64 bits, for which some kernels of columns took more instructions.
  using Piece = std::conditional_t<kPieceBytes == 8, uint2, MemoryWord<kPieceBytes>>;
  __device__ __forceinline__ void load_piece(int piece, const void *from) {
    const auto wide = *reinterpret_cast<const Piece *>(from);
    if constexpr (kPieceBytes < 4) {
      word[0] = wide;
    } else {
      memcpy(word + piece * (kPieceBytes / 4), &wide, kPieceBytes);
    }
  }
  __device__ __forceinline__ void store_piece(int piece, void *to) const {
    Piece wide;
    if constexpr (kPieceBytes < 4) {
      wide = Piece(word[0]);
    } else {
      memcpy(&wide, word + piece * (kPieceBytes / 4), kPieceBytes);
    }
    *reinterpret_cast<Piece *>(to) = wide;
  }
  __device__ __forceinline__ void load(const void *from) {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) load_piece(p, reinterpret_cast<const std::byte *>(from) + p * kPieceBytes);
  }
  __device__ __forceinline__ void store(void *to) const {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) store_piece(p, reinterpret_cast<std::byte *>(to) + p * kPieceBytes);
  }
};

// kCount elements of each type of a list.
template <class L, int kCount>
struct Held;
template <int kCount>
struct Held<List<>, kCount> {};
template <class T, class... Rest, int kCount>
struct Held<List<T, Rest...>, kCount> {
  Packed<T, kCount> items;
  Held<List<Rest...>, kCount> rest;
};
template <int k, class Any>
__device__ __forceinline__ auto &held(Any &all) {
  if constexpr (k == 0) {
    return all.items;
  } else {
    return held<k - 1>(all.rest);
  }
}

}  // namespace baracuda::scan
