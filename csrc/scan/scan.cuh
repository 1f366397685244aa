// SPDX-License-Identifier: Apache-2.0
// The CUDA kernels of the scans: templates on the operator. Bits follow from the operator, the
// shape and the choice of kernel alone: elements are cut into tiles by their place in scan order
// and folded in a fixed order, whatever the addresses.
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

template <class T>
__device__ __forceinline__ T *row_start(const Geometry &g, int operand, int64_t row) {
  int64_t offset[1];
  row_offsets(g, row, operand, offset);
  return reinterpret_cast<T *>(g.data[operand]) + offset[0];
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

// ---- Elements as they lie in registers --------------------------------------------------------

template <int kBytes>
struct UnsignedOf;
template <>
struct UnsignedOf<1> {
  using type = uint8_t;
};
template <>
struct UnsignedOf<2> {
  using type = uint16_t;
};
template <>
struct UnsignedOf<4> {
  using type = uint32_t;
};
template <>
struct UnsignedOf<8> {
  using type = uint2;
};
template <>
struct UnsignedOf<16> {
  using type = uint4;
};
template <int kBytes>
using Unsigned = typename UnsignedOf<kBytes>::type;

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
  __device__ __forceinline__ void load_piece(int piece, const void *from) {
    const auto wide = *reinterpret_cast<const Unsigned<kPieceBytes> *>(from);
    if constexpr (kPieceBytes < 4) {
      word[0] = wide;
    } else {
      memcpy(word + piece * (kPieceBytes / 4), &wide, kPieceBytes);
    }
  }
  __device__ __forceinline__ void store_piece(int piece, void *to) const {
    Unsigned<kPieceBytes> wide;
    if constexpr (kPieceBytes < 4) {
      wide = Unsigned<kPieceBytes>(word[0]);
    } else {
      memcpy(&wide, word + piece * (kPieceBytes / 4), kPieceBytes);
    }
    *reinterpret_cast<Unsigned<kPieceBytes> *>(to) = wide;
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

// ---- One lane's consecutive elements ----------------------------------------------------------

// What elements of an operator with kBased have in common, and the sums of their terms up to each of kKept.
template <class Op, int kKept = 0>
struct Common {
  typename Op::Acc base;
  typename Op::Acc sums[kKept];
};
template <class Op>
struct Common<Op, 0> {
  typename Op::Acc base;
};

// Whether sums are worth keeping from the first pass to the second: a logarithm and one exponential for each element
// are what the units for them can do in the time.
template <class Op>
constexpr bool kKeepsSums = Op::kBased && Op::Inputs::size == 1;

// Whether pairs of elements are scanned at once. Zeros of both signs among them aren't: the first counts, and not +0.
template <class Op>
constexpr bool kInPairs = false;
template <class T>
constexpr bool kInPairs<Extremum<T>> = kIsHalf<T>;

// Whether runs without a restart, which are most, are worth telling apart: they add up, and their outputs are zeros.
template <class Op>
constexpr bool kRestarts = false;
template <class T>
constexpr bool kRestarts<ExtremumGradient<T>> = kIsHalf<T>;

// Whether exclusive scans have code of their own, which saves a choice for each element.
template <class Op>
constexpr bool kApart = false;
template <class T, class U>
constexpr bool kApart<Sum<T, U>> = std::is_floating_point_v<Accumulator<T>>;
template <class T, class U>
constexpr bool kApart<Product<T, U>> = std::is_floating_point_v<Accumulator<T>>;
template <class T>
constexpr bool kApart<Extremum<T>> = std::is_floating_point_v<Accumulator<T>>;

// Whether the largest of an operator's keys is found from pairs of elements, before they are taken apart.
template <class Op>
constexpr bool kKeysInPairs = false;
template <class Op>
  requires(Op::kBased && !Op::kAscending && Op::Inputs::size == 1)
constexpr bool kKeysInPairs<Op> = kIsHalf<at<0, typename Op::Inputs>>;

// The largest key of kCount elements.
template <int kCount, class Op, class Get>
__device__ __forceinline__ auto largest_key(const Get &item) {
  if constexpr (Op::kBased) {
    typename Op::Acc largest = Op::key(item(Op::kAscending ? kCount - 1 : 0));
    if constexpr (!Op::kAscending) {
#pragma unroll
      for (int i = 1; i < kCount; ++i) largest = larger_of(largest, Op::key(item(i)));
    }
    return largest;
  }
}

// Calls body(i, element i) in a loop that isn't unrolled. Elements come out of the registers, or where `kAgain` from
// memory once more, so that they need not stay in registers for something rare.
template <int kCount, bool kAgain, class Get, class Again, class Body>
__device__ __forceinline__ void one_by_one(const Get &item, [[maybe_unused]] const Again &again, const Body &body) {
  if constexpr (kAgain) {
#pragma unroll 1
    for (int i = 0; i < kCount; ++i) body(i, again(i));
  } else {
    decltype(item(0)) items[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) items[i] = item(i);
#pragma unroll 1
    for (int i = 0; i < kCount; ++i) body(i, items[i]);
  }
}

// The map of kCount elements, and what they have in common. `largest` gives the largest key.
template <int kCount, class Op, int kKept, class Get, class Again, class Largest>
__device__ __forceinline__ typename Op::Map fold(const Op &op, Common<Op, kKept> &common, const Get &item,
                                                 [[maybe_unused]] const Again &again,
                                                 [[maybe_unused]] const Largest &largest) {
  if constexpr (Op::kBased) {
    using A = typename Op::Acc;
    A &base = common.base;
    base = Op::common_base(Op::key(item(0)), largest());
    A sum = Op::term(item(0), base);
    if constexpr (kKept > 0) common.sums[0] = sum;
#pragma unroll
    for (int i = 1; i < kCount; ++i) {
      sum += Op::term(item(i), base);
      if constexpr (kKept > 0) common.sums[i] = sum;
    }
    if (sum - sum == A(0)) return {base, sum};  // finite
    // Rare, so in a loop that stays short.
    base = A(NAN);
    typename Op::Map map = op.identity();
    one_by_one<kCount, (kKept > 0)>(item, again,
                                    [&](int, const typename Op::Item &taken) { map = op.combine(map, op.map(taken)); });
    return map;
  } else {
    typename Op::Map map = op.map(item(0));
#pragma unroll
    for (int i = 1; i < kCount; ++i) {
      if constexpr (requires { op.extend(map, item(i)); }) {
        map = op.extend(map, item(i));
      } else {
        map = op.combine(map, op.map(item(i)));
      }
    }
    return map;
  }
}

// Calls body(op), for operators with kApart with an op of which the compiler knows whether the scan is exclusive.
template <class Op, class Body>
__device__ __forceinline__ void with_exclusive(const Op &op, const Body &body) {
  if constexpr (kApart<Op>) {
    Op known = op;
    if (op.flags.exclusive) {
      known.flags.exclusive = true;
      body(known);
    } else {
      known.flags.exclusive = false;
      body(known);
    }
  } else {
    body(op);
  }
}

// Applies kCount elements to `value` one after the other; put(i, result, value after it). Where sums are kept the
// elements may have left the registers.
template <int kCount, class Op, int kKept, class Get, class Again, class Put>
__device__ __forceinline__ void run(const Op &op, typename Op::Value value, const Common<Op, kKept> &common,
                                    const Get &item, const Again &again, const Put &put) {
  if constexpr (Op::kBased) {
    using A = typename Op::Acc;
    const A base = common.base;
    const bool exclusive = op.flags.exclusive;
    // The value is taken to the elements' base, or their sums to the value's.
    const bool larger = base >= value.base;
    const A down = scale_down(larger ? base - value.base : value.base - base);
    const A scale = larger ? A(1) : down;
    const A carry = larger ? value.sum * down : value.sum;
    A sum;
    if constexpr (kKept > 0) {
      sum = common.sums[0];
    } else {
      sum = Op::term(item(0), base);
    }
    A after = multiply_add(sum, scale, carry);
    if (base == base && Op::well_scaled(base, value, after)) {
      const A shared = larger ? base : value.base;
      const auto put_first = [&] {
        put(0, {{exclusive ? Op::shown(item(0), value) : Op::shown_scaled(item(0), after, shared)}}, value);
      };
      if constexpr (kKept > 0) {
        // Results may take the place of the sums.
        A sums[kCount];
#pragma unroll
        for (int i = 0; i < kCount; ++i) sums[i] = common.sums[i];
        // Moved out of the way once, in place of a choice for each element.
        if (exclusive) {
#pragma unroll
          for (int i = kCount - 1; i > 0; --i) sums[i] = sums[i - 1];
        }
        put_first();
#pragma unroll
        for (int i = 1; i < kCount; ++i)
          put(i, {{Op::shown_scaled(item(i), multiply_add(sums[i], scale, carry), shared)}}, value);
      } else {
        put_first();
#pragma unroll
        for (int i = 1; i < kCount; ++i) {
          const A before = after;
          sum += Op::term(item(i), base);
          after = multiply_add(sum, scale, carry);
          put(i, {{Op::shown_scaled(item(i), exclusive ? before : after, shared)}}, value);
        }
      }
    } else {
      A shown[kCount];
      one_by_one<kCount, (kKept > 0)>(item, again, [&](int i, const typename Op::Item &taken) {
        typename Op::Result result;
        value = op.step(value, taken, result);
        shown[i] = result.out[0];
      });
#pragma unroll
      for (int i = 0; i < kCount; ++i) put(i, {{shown[i]}}, value);
    }
  } else {
    with_exclusive(op, [&](const Op &known) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        typename Op::Result result;
        value = known.step(value, item(i), result);
        put(i, result, value);
      }
    });
  }
}

// ---- A warp's share of a row ------------------------------------------------------------------

// The value before a row's first element.
template <class Op>
__device__ __forceinline__ typename Op::Value initial_value(const Op &op, const Geometry &g, int64_t row) {
  if constexpr (Op::kInitial) {
    using T = at<0, typename Op::Inputs>;
    constexpr int slot = Layout<Op>::kInitialSlot;
    if (g.data[slot]) return widen<typename Op::Acc>(*row_start<T>(g, slot, row));
  }
  return op.start();
}

// What an operator finds behind the last element of a row, as its neighbour.
template <class Op>
__device__ __forceinline__ typename Op::Acc behind_last(const Op &op, const Geometry &g, int64_t row,
                                                        typename Op::Acc last) {
  if constexpr (Op::kFinal) {
    using T = at<0, typename Op::Inputs>;
    constexpr int slot = Layout<Op>::kInitialSlot;
    return g.data[slot] ? widen<typename Op::Acc>(*row_start<T>(g, slot, row)) : typename Op::Acc(0);
  } else {
    return op.behind(last);
  }
}

template <class Op>
__device__ __forceinline__ void store_final(const Geometry &g, int64_t row, typename Op::Value value) {
  if constexpr (Op::kFinal) {
    using T = at<0, typename Op::Outputs>;
    constexpr int slot = Layout<Op>::kFinalSlot;
    if (g.data[slot]) *row_start<T>(g, slot, row) = narrow<T>(value);
  }
}

// Puts an element's outputs among those of its lane. In ascending order; narrow ones wait in `pending` for
// the next, so that two are rounded by one instruction.
template <class Op, int kCount>
__device__ __forceinline__ void keep(Held<typename Op::Outputs, kCount> &outputs, int i,
                                     const typename Op::Result &result,
                                     typename Op::Acc (&pending)[Op::Outputs::size]) {
  for_each<Op::Outputs::size>([&](auto k) {
    using U = at<k(), typename Op::Outputs>;
    if constexpr (Op::kPosition && k() == 1) {
      held<k()>(outputs).put(i, U(index_of(result)));
    } else if constexpr (kIsHalf<U> && kCount % 2 == 0) {
      if (i % 2 == 0) {
        pending[k()] = result.out[k()];
      } else {
        held<k()>(outputs).put_pair(i - 1, float(pending[k()]), float(result.out[k()]));
      }
    } else {
      held<k()>(outputs).put(i, narrow<U>(result.out[k()]));
    }
  });
}

struct Accesses {
  int of[kMaxScanOperands];
  bool vectors;  // no input is strided
};

// Pieces are kept in shared memory with their low address bits mixed, so that neither reading
// consecutive pieces nor reading a lane's run of kPieces has bank conflicts.
template <int kPieces>
__device__ __forceinline__ int mixed(int piece) {
  constexpr int kShift = kPieces > 8 ? 4 : 3;
  return kPieces == 1 ? piece : piece ^ ((piece >> kShift) & 7);
}

// Where the elements of a warp are: slot s of its 32 * kRun holds element `first + s % width` of row
// `row + s / width`, if there is such. `width` is a power of two, and all slots where the row is
// longer.
struct Slots {
  int64_t row;
  int64_t first;
  int shift;  // log2(width)
  int rows;   // that there are
  int left;   // elements of a row from `first` on; at most width + 1, which tells that more follow

  __device__ __forceinline__ Slots(const Geometry &g, int64_t row, int64_t first, int shift, int slots)
      : row(row),
        first(first),
        shift(shift),
        rows(int(min(max(g.rows - row, int64_t(0)), int64_t(slots >> shift)))),
        left(int(min(max(g.length - first, int64_t(0)), int64_t(1 << shift) + 1))) {}
  __device__ __forceinline__ int place(int slot) const { return slot & ((1 << shift) - 1); }
  __device__ __forceinline__ bool exists(int slot) const { return (slot >> shift) < rows && place(slot) < left; }
};

// `kKeeps`: whether the sums of kKeepsSums are kept from reduce() to finish().
template <class Op, int kRun, bool kKeeps = false>
struct Share {
  using A = typename Op::Acc;
  using Map = typename Op::Map;
  static constexpr int kItems = kWarp * kRun;
  static constexpr int kInputs = Op::Inputs::size;
  static constexpr int kLast = kInputs - 1;
  static constexpr int kWidest = Bytes<typename Op::Inputs>::widest() > Bytes<typename Op::Outputs>::widest()
                                     ? Bytes<typename Op::Inputs>::widest()
                                     : Bytes<typename Op::Outputs>::widest();
  // A warp's room for one operand.
  static constexpr int kStageBytes = kItems * kWidest;
  // Of a warp that has no more than one row, which may hold other numbers than powers of two.
  static constexpr int kShift = std::bit_width(unsigned(kItems - 1));
  __device__ __forceinline__ static Slots one_row(const Geometry &g, int64_t row, int64_t first) {
    return Slots(g, row, first, kShift, 1 << kShift);
  }

  Held<typename Op::Inputs, kRun> raw;
  A next;                                // what follows the lane's run
  Common<Op, kKeeps ? kRun : 0> common;  // of the run

  // The lane's own row, or one that there is.
  __device__ __forceinline__ static int64_t row_of(const Slots &slots, int lane) {
    return slots.row + max(min((lane * kRun) >> slots.shift, slots.rows - 1), 0);
  }
  __device__ __forceinline__ static bool whole_run(const Slots &slots, int lane) {
    return ((lane * kRun) >> slots.shift) < slots.rows && slots.place(lane * kRun) + kRun <= slots.left;
  }
  // From the first slots of each lane's row, where a slot's element is in memory.
  template <class T>
  __device__ __forceinline__ static T *address(const Slots &slots, T *own, int64_t step, int slot) {
    T *start = own;
    if ((1 << slots.shift) < kItems)
      start = reinterpret_cast<T *>(__shfl_sync(kAll, reinterpret_cast<unsigned long long>(own), slot / kRun));
    return start + slots.place(slot) * step;
  }
  // Where the lane's row begins in the operands.
  using Rows = int64_t[Layout<Op>::kLines];
  __device__ __forceinline__ static void rows_of(const Geometry &g, const Slots &slots, int lane, Rows &rows) {
    row_offsets(g, row_of(slots, lane), 0, rows);
  }
  template <class T>
  __device__ __forceinline__ static T *own_row(const Geometry &g, int operand, const Slots &slots, const Rows &rows) {
    return reinterpret_cast<T *>(g.data[operand]) + (rows[operand] + slots.first * g.step[operand]);
  }

  // One by one, neighbouring lanes neighbouring elements, into memory that the warp shares.
  template <class T>
  __device__ __forceinline__ static void store_staged(const Slots &slots, const T *own, int64_t step, std::byte *stage,
                                                      int lane) {
    constexpr int kAtOnce = kRun % 8 == 0 ? 8 : kRun % 4 == 0 ? 4 : kRun % 2 == 0 ? 2 : 1;
#pragma unroll 1
    for (int i = 0; i < kRun; i += kAtOnce) {
      T value[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int slot = (i + j) * kWarp + lane;
        const T *from = address(slots, own, step, slot);
        value[j] = slots.exists(slot) ? *from : T{};
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) *staged<T>(stage, (i + j) * kWarp + lane) = value[j];
    }
  }
  template <class T>
  __device__ __forceinline__ static void load_run(Packed<T, kRun> &run, std::byte *stage, int lane) {
    using P = Packed<T, kRun>;
#pragma unroll
    for (int p = 0; p < P::kPieces; ++p)
      run.load_piece(p, stage + mixed<P::kPieces>(lane * P::kPieces + p) * P::kPieceBytes);
  }
  template <class T>
  __device__ __forceinline__ static T *staged(std::byte *stage, int slot) {
    using P = Packed<T, kRun>;
    return reinterpret_cast<T *>(stage + mixed<P::kPieces>(slot / P::kPieceItems) * P::kPieceBytes) +
           slot % P::kPieceItems;
  }

  // All at once.
  __device__ __forceinline__ void load(const Op &op, const Geometry &g, const Accesses &access, const Slots &slots,
                                       const Rows &rows, std::byte *stage, int lane) {
    const bool full = __all_sync(kAll, whole_run(slots, lane));
    const A behind = behind_share(g, slots, rows, lane);
    if (full && access.vectors) {
      // All loads are under way before the first is waited for.
      for_each<kInputs>([&](auto k) {
        using T = at<k(), typename Op::Inputs>;
        const T *own = own_row<const T>(g, k(), slots, rows);
        const int place = slots.place(lane * kRun);
        held<k()>(raw).load(access.of[k()] == kBackward ? own - (place + kRun - 1) : own + place);
      });
      for_each<kInputs>([&](auto k) { held<k()>(raw).turn_if(access.of[k()] == kBackward); });
    } else {
      for_each<kInputs>([&](auto k) {
        using T = at<k(), typename Op::Inputs>;
        store_staged(slots, own_row<const T>(g, k(), slots, rows), g.step[k()], stage, lane);
        __syncwarp();
        load_run<T>(held<k()>(raw), stage, lane);
        __syncwarp();
      });
    }
    find_next(op, g, slots, behind, lane);
  }

  // For the last lane, the neighbour behind the share.
  __device__ __forceinline__ static A behind_share(const Geometry &g, const Slots &slots, const Rows &rows, int lane) {
    if constexpr (Op::kNeighbour) {
      using T = at<kLast, typename Op::Inputs>;
      if (lane == kWarp - 1 && left_of(slots, lane) > kRun)
        return widen<A>(own_row<const T>(g, kLast, slots, rows)[kItems * g.step[kLast]]);
    }
    return A(0);
  }
  __device__ __forceinline__ static int left_of(const Slots &slots, int lane) {
    return ((lane * kRun) >> slots.shift) < slots.rows ? slots.left - slots.place(lane * kRun) : 0;
  }
  __device__ __forceinline__ void find_next(const Op &op, const Geometry &g, const Slots &slots, A behind, int lane) {
    if constexpr (Op::kNeighbour) {
      using T = at<kLast, typename Op::Inputs>;
      auto &last = held<kLast>(raw);
      const A following = shuffle_down(last.template widened<A>(0), 1);
      const int left = left_of(slots, lane);
      next = lane < kWarp - 1 ? following : behind;
      if (left == kRun) {
        next = behind_last(op, g, row_of(slots, lane), last.template widened<A>(kRun - 1));
      } else if (left > 0 && left < kRun) {
#pragma unroll
        for (int i = 1; i < kRun; ++i)
          if (i == left)
            last.replace(i, narrow<T>(behind_last(op, g, row_of(slots, lane), last.template widened<A>(i - 1))));
      }
    }
  }

  // Element i of the lane's run.
  __device__ __forceinline__ typename Op::Item item(int i, uint32_t position, uint32_t onward) {
    typename Op::Item item = {};
    for_each<kInputs>([&](auto k) { item.in[k()] = held<k()>(raw).template widened<A>(i); });
    if constexpr (Op::kNeighbour)
      item.next = i + 1 < kRun ? held<kLast>(raw).template widened<A>(i + 1 < kRun ? i + 1 : i) : next;
    if constexpr (Op::kPosition) item.position = position + uint32_t(i) * onward;
    return item;
  }
  __device__ __forceinline__ static uint32_t position_of(const Op &op, const Geometry &g, const Slots &slots,
                                                         int lane) {
    const int64_t place = slots.first + slots.place(lane * kRun);
    return uint32_t(op.flags.reverse ? g.length - 1 - place : place);
  }
  __device__ __forceinline__ static uint32_t onward(const Op &op) { return op.flags.reverse ? 0xffffffffu : 1u; }
  // Lanes that hold a row.
  __device__ __forceinline__ static int lanes(const Slots &slots) {
    return slots.shift >= kShift ? kWarp : max((1 << slots.shift) / kRun, 1);
  }

  // For operators with kInPairs.
  template <bool kSmaller>
  __device__ __forceinline__ A extreme_of_run() {
    using T = at<0, typename Op::Inputs>;
    Packed<T, 2> pair = {{held<0>(raw).word[0]}};
#pragma unroll
    for (int i = 1; i < kRun / 2; ++i) pair.word[0] = extreme_pair<T, kSmaller>(pair.word[0], held<0>(raw).word[i]);
    pair.word[0] = extreme_pair<T, kSmaller>(pair.word[0], twice_high(pair.word[0]));
    return pair.template widened<A>(0);
  }
  template <bool kSmaller>
  __device__ __forceinline__ uint32_t extremes(uint32_t carry, Packed<at<0, typename Op::Inputs>, kRun> &run) {
    using T = at<0, typename Op::Inputs>;
#pragma unroll
    for (int i = 0; i < kRun / 2; ++i) {
      const uint32_t pair = held<0>(raw).word[i];
      run.word[i] = extreme_pair<T, kSmaller>(extreme_pair<T, kSmaller>(pair, twice_low(pair)), carry);
      carry = twice_high(run.word[i]);
    }
    return carry;
  }
  // Of the run and another pair.
  __device__ __forceinline__ bool zeros_of_both_signs(uint32_t pair) {
    ZerosSeen zeros;
    zeros.see(pair);
#pragma unroll
    for (int i = 0; i < kRun / 2; ++i) zeros.see(held<0>(raw).word[i]);
    return zeros.both();
  }
  // The run's outputs; false where pairs don't do.
  __device__ __forceinline__ bool scan_pairs(const Op &op, A value, Packed<at<0, typename Op::Inputs>, kRun> &run) {
    using T = at<0, typename Op::Inputs>;
    const bool smallest = op.flags.smallest;
    Packed<T, 2> pair;
    pair.put_pair(0, turned(value, smallest), turned(value, smallest));
    const uint32_t carry = pair.word[0];
    pair.word[0] = smallest ? extremes<true>(carry, run) : extremes<false>(carry, run);
    if (value <= A(0) && !(turned(pair.template widened<A>(0), smallest) < A(0)) && zeros_of_both_signs(carry))
      return false;
    if (op.flags.exclusive) {
#pragma unroll
      for (int i = kRun / 2 - 1; i >= 0; --i)
        run.word[i] = __byte_perm(i > 0 ? run.word[i > 0 ? i - 1 : 0] : carry, run.word[i], 0x5432);
    }
    return true;
  }
  // For operators with kRestarts: whether the sum doesn't start again within the run.
  __device__ __forceinline__ bool goes_on() {
    const auto &last = held<kLast>(raw);
    uint32_t differ = 0;
    for (const uint32_t word : last.word) differ |= word ^ twice_low(last.word[0]);
    return differ == 0 && !Op::record(item(kRun - 1, 0, 0));
  }

  // The maps up to the end of each lane's run, within its row.
  template <class Again>
  __device__ __forceinline__ Map reduce(const Op &op, const Geometry &g, const Slots &slots, int lane,
                                        const Again &again) {
    const uint32_t position = position_of(op, g, slots, lane);
    const auto get = [&](int i) { return item(i, position, onward(op)); };
    const auto fold_run = [&](const auto &largest) { return fold<kRun>(op, common, get, again, largest); };
    Map own;
    if constexpr (kInPairs<Op>) {
      own = turned(op.flags.smallest ? extreme_of_run<true>() : extreme_of_run<false>(), op.flags.smallest);
      if (own == A(0) && zeros_of_both_signs(kNoZeros)) own = fold_run(nullptr);
    } else if constexpr (kRestarts<Op>) {
      if (goes_on()) {
        own = op.map(get(0));
#pragma unroll
        for (int i = 1; i < kRun; ++i) own.sum = add(own.sum, get(i).in[0]);
      } else {
        own = fold_run(nullptr);
      }
    } else {
      own = fold_run([&] {
        if constexpr (kKeysInPairs<Op> && kRun > 1) {
          using T = at<0, typename Op::Inputs>;
          Packed<T, 2> pair = {{held<0>(raw).word[0]}};
#pragma unroll
          for (int i = 1; i < kRun / 2; ++i) pair.word[0] = larger_pair<T>(pair.word[0], held<0>(raw).word[i]);
          return larger_of(pair.template widened<A>(0), pair.template widened<A>(1));
        } else {
          return largest_key<kRun, Op>(get);
        }
      });
    }
    return warp_scan(op, own, lane, lanes(slots));
  }

  __device__ __forceinline__ Map reduce(const Op &op, const Geometry &g, const Slots &slots, int lane) {
    static_assert(!kKeeps);
    return reduce(op, g, slots, lane, [](int) { return typename Op::Item{}; });
  }
  // Element i of the lane's run once more, from memory, as long as no output has been stored.
  __device__ __forceinline__ static auto reader(const Geometry &g, const Slots &slots, const Rows &rows, int lane) {
    return [&g, &slots, &rows, lane](int i) {
      typename Op::Item item = {};
      for_each<kInputs>([&](auto k) {
        using T = at<k(), typename Op::Inputs>;
        const int slot = lane * kRun + i;
        const T *own = own_row<const T>(g, k(), slots, rows);
        if (slots.exists(slot)) item.in[k()] = widen<A>(own[slots.place(slot) * g.step[k()]]);
      });
      return item;
    };
  }

  template <class U>
  __device__ __forceinline__ static void store_one(const Slots &slots, U *own, int64_t step, bool vectors,
                                                   bool backward, Packed<U, kRun> &run, std::byte *stage, int lane) {
    using P = Packed<U, kRun>;
    const int first = mixed<P::kPieces>(lane * P::kPieces);
#pragma unroll
    for (int p = 0; p < P::kPieces; ++p) {
      const int piece =
          std::has_single_bit(unsigned(P::kPieces)) ? first ^ p : mixed<P::kPieces>(lane * P::kPieces + p);
      run.store_piece(p, stage + piece * P::kPieceBytes);
    }
    __syncwarp();
    if (vectors) {
      Packed<U, P::kPieceItems> piece[P::kPieces];
#pragma unroll
      for (int p = 0; p < P::kPieces; ++p) piece[p].load(stage + mixed<P::kPieces>(p * kWarp + lane) * P::kPieceBytes);
      if ((1 << slots.shift) >= kItems) {
        const int onward = backward ? -kWarp * P::kPieceItems : kWarp * P::kPieceItems;
        U *to = own + (backward ? 1 - (lane + 1) * P::kPieceItems : lane * P::kPieceItems);
#pragma unroll
        for (int p = 0; p < P::kPieces; ++p) {
          piece[p].turn_if(backward);
          piece[p].store(to + p * onward);
        }
      } else {
#pragma unroll
        for (int p = 0; p < P::kPieces; ++p) {
          U *to = address(slots, own, step, (p * kWarp + lane) * P::kPieceItems);
          piece[p].turn_if(backward);
          piece[p].store(backward ? to - (P::kPieceItems - 1) : to);
        }
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < kRun; ++i) {
        const int slot = i * kWarp + lane;
        U *to = address(slots, own, step, slot);
        if (slots.exists(slot)) *to = *staged<U>(stage, slot);
      }
    }
    __syncwarp();
  }

  // The lane's outputs, with `value` before its run.
  template <class Again>
  __device__ __forceinline__ void outputs(const Op &op, const Geometry &g, const Slots &slots, typename Op::Value value,
                                          int lane, Held<typename Op::Outputs, kRun> &outputs, const Again &again) {
    if constexpr (kInPairs<Op>) {
      if (scan_pairs(op, value, held<0>(outputs))) return;
    }
    if constexpr (kRestarts<Op>) {
      if (goes_on()) {
        for (uint32_t &word : held<0>(outputs).word) word = 0;
        return;
      }
    }
    const uint32_t position = position_of(op, g, slots, lane);
    A pending[Op::Outputs::size];
    run<kRun>(
        op, value, common, [&](int i) { return item(i, position, onward(op)); }, again,
        [&](int i, const typename Op::Result &result, const typename Op::Value &after) {
          keep<Op, kRun>(outputs, i, result, pending);
          if constexpr (Op::kFinal) {
            if (slots.place(lane * kRun) + i == slots.left - 1 && slots.exists(lane * kRun + i))
              store_final<Op>(g, row_of(slots, lane), after);
          }
        });
  }
  __device__ __forceinline__ void outputs(const Op &op, const Geometry &g, const Slots &slots, typename Op::Value value,
                                          int lane, Held<typename Op::Outputs, kRun> &outputs) {
    static_assert(!kKeeps);
    this->outputs(op, g, slots, value, lane, outputs, [](int) { return typename Op::Item{}; });
  }
  __device__ __forceinline__ void finish(const Op &op, const Geometry &g, const Accesses &access, const Slots &slots,
                                         const Rows &rows, typename Op::Value value, std::byte *stage, int lane) {
    const bool full = __all_sync(kAll, whole_run(slots, lane));
    Held<typename Op::Outputs, kRun> outputs;
    this->outputs(op, g, slots, value, lane, outputs, reader(g, slots, rows, lane));
    for_each<Op::Outputs::size>([&](auto k) {
      using U = at<k(), typename Op::Outputs>;
      constexpr int slot = kInputs + k();
      if (Op::Outputs::size == 1 || g.data[slot])
        store_one(slots, own_row<U>(g, slot, slots, rows), g.step[slot], full && access.of[slot] != kStrided,
                  access.of[slot] == kBackward, held<k()>(outputs), stage, lane);
    });
  }
};

// ---- Rows: several in a warp, or one or several warps for each --------------------------------

constexpr int kRowWarps = 8;

// 2^warps_shift warps for each row; where that is one, rows of 2^shift slots.
template <class Op, int kRun, int kBlocks>
__global__ void __launch_bounds__(kRowWarps *kWarp, kBlocks)
    scan_rows(const __grid_constant__ Op op, const __grid_constant__ Geometry g,
              const __grid_constant__ Accesses access, int warps_shift, int shift) {
  using Map = typename Op::Map;
  using Row = Share<Op, kRun, kKeepsSums<Op>>;
  extern __shared__ __align__(16) std::byte stages[];
  __shared__ Map totals[2][kRowWarps];
  wait_for_earlier_work();
  let_next_kernel_start();
  const int lane = int(threadIdx.x) % kWarp;
  const int warp = int(threadIdx.x) / kWarp;
  const int row_warps = 1 << warps_shift;
  const int place = warp & (row_warps - 1);
  std::byte *stage = stages + warp * Row::kStageBytes;
  const int64_t row =
      (int64_t(blockIdx.x) * (kRowWarps >> warps_shift) + (warp >> warps_shift)) * (Row::kItems >> shift);
  typename Op::Value carry = initial_value(op, g, min(row + (lane * kRun >> shift), g.rows - 1));
  typename Row::Rows rows;
  Row::rows_of(g, Slots(g, row, 0, shift, Row::kItems), lane, rows);
  int parity = 0;
  // A row's warps come to the barriers together; a block's rows are of one length.
  for (int64_t tile = 0; tile < g.length; tile += int64_t(row_warps) * Row::kItems) {
    const Slots slots(g, row, tile + place * Row::kItems, shift, Row::kItems);
    Row share;
    share.load(op, g, access, slots, rows, stage, lane);
    const Map inclusive = share.reduce(op, g, slots, lane, Row::reader(g, slots, rows, lane));
    typename Op::Value value = carry;
    if (row_warps > 1) {
      if (lane == kWarp - 1) totals[parity][warp] = inclusive;
      __syncthreads();
      Map others = lane < row_warps ? totals[parity][warp - place + lane] : op.identity();
      others = warp_scan<kRowWarps>(op, others, lane, kRowWarps);
      const Map left = shuffle(others, place > 0 ? place - 1 : 0);
      if (place > 0) value = op.apply(left, carry);
      carry = op.apply(shuffle(others, row_warps - 1), carry);
      parity ^= 1;
    }
    value = op.apply(exclusive_of(op, inclusive, lane, Row::lanes(slots)), value);
    share.finish(op, g, access, slots, rows, value, stage, lane);
  }
}

}  // namespace baracuda::scan
