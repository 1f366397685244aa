// SPDX-License-Identifier: Apache-2.0
// The CUDA kernels of the scans: templates on the operator. Bits follow from the operator, the
// shape and the choice of kernel alone: elements are cut into tiles by their place in scan order
// and folded in a fixed order, whatever the addresses.
#pragma once

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

template <int k, class L>
struct At;
template <int k, class T, class... Rest>
struct At<k, List<T, Rest...>> : At<k - 1, List<Rest...>> {};
template <class T, class... Rest>
struct At<0, List<T, Rest...>> {
  using type = T;
};
template <int k, class L>
using at = typename At<k, L>::type;

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
  static constexpr int widest() {
    int best = 0;
    for (int size : {int(sizeof(T))...}) best = size > best ? size : best;
    return best;
  }
};

// Where each operand's row begins.
template <class Op>
struct Layout {
  static constexpr int kInputs = Op::Inputs::size;
  static constexpr int kOutputs = Op::Outputs::size;
  static constexpr int kInitialSlot = kInputs + kOutputs;
  static constexpr int kFinalSlot = kInputs + kOutputs + 1;
};

__device__ __forceinline__ int64_t row_offset(const Geometry &g, int operand, int64_t row) {
  if (g.rank <= 1) return g.rank == 0 ? 0 : row * g.stride[operand][0];
  int64_t offset = 0;
  if (g.rows <= int64_t(0xffffffffu)) {
    uint32_t rest = uint32_t(row);
#pragma unroll 1
    for (int axis = g.rank - 1; axis > 0; --axis) {
      const uint32_t extent = uint32_t(g.extent[axis]);
      const uint32_t quotient = rest / extent;
      offset += int64_t(rest - quotient * extent) * g.stride[operand][axis];
      rest = quotient;
    }
    return offset + int64_t(rest) * g.stride[operand][0];
  }
  int64_t rest = row;
#pragma unroll 1
  for (int axis = g.rank - 1; axis > 0; --axis) {
    const int64_t quotient = rest / g.extent[axis];
    offset += (rest - quotient * g.extent[axis]) * g.stride[operand][axis];
    rest = quotient;
  }
  return offset + rest * g.stride[operand][0];
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

// Inclusive scan over groups of `width` lanes.
template <class Op>
__device__ __forceinline__ typename Op::Map warp_scan(const Op &op, typename Op::Map map, int lane, int width = kWarp) {
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    if (distance < width) {
      const typename Op::Map left = shuffle_up(map, distance);
      if ((lane & (width - 1)) >= distance) map = op.combine(left, map);
    }
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
  __device__ __forceinline__ void fill(T value) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) put(i, value);
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
  __device__ __forceinline__ void turn_if(bool turn) {
    const Packed other = turned();
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = turn ? other.word[i] : word[i];
  }
  __device__ __forceinline__ void load(const void *from) {
    constexpr int kPiece = kBytes < 16 ? kBytes : 16;
    using Wide = Unsigned<kPiece>;
#pragma unroll
    for (int p = 0; p < kBytes / kPiece; ++p) {
      const Wide wide = reinterpret_cast<const Wide *>(from)[p];
      if constexpr (kPiece < 4) {
        word[0] = wide;
      } else {
        memcpy(word + p * (kPiece / 4), &wide, kPiece);
      }
    }
  }
  __device__ __forceinline__ void store(void *to) const {
    constexpr int kPiece = kBytes < 16 ? kBytes : 16;
    using Wide = Unsigned<kPiece>;
#pragma unroll
    for (int p = 0; p < kBytes / kPiece; ++p) {
      Wide wide;
      if constexpr (kPiece < 4) {
        wide = Wide(word[0]);
      } else {
        memcpy(&wide, word + p * (kPiece / 4), kPiece);
      }
      reinterpret_cast<Wide *>(to)[p] = wide;
    }
  }
  // Keeps the compiler from holding on to what it took apart earlier.
  __device__ __forceinline__ void forget() {
    if constexpr (kSize < 4) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) asm volatile("" : "+r"(word[i]));
    }
  }
};

// kCount elements of each type of a list.
template <class L, int kCount>
struct Held;
template <int kCount>
struct Held<List<>, kCount> {
  static constexpr int kWords = 0;
};
template <class T, class... Rest, int kCount>
struct Held<List<T, Rest...>, kCount> {
  static constexpr int kWords = Packed<T, kCount>::kWords + Held<List<Rest...>, kCount>::kWords;
  Packed<T, kCount> items;
  Held<List<Rest...>, kCount> rest;
};
template <int k, class L, int kCount>
__device__ __forceinline__ auto &held(Held<L, kCount> &all) {
  if constexpr (k == 0) {
    return all.items;
  } else {
    return held<k - 1>(all.rest);
  }
}

// Stands for elements behind a row's end, which must not disturb those before it.
template <class Op, class T>
__device__ __forceinline__ T filler() {
  if constexpr (Op::kBased) {
    return narrow<T>(-infinity<typename Op::Acc>());
  } else {
    return T{};
  }
}

// A lane's kCount elements from `first` on, of which `left` are there. `row` is the tile's start.
template <class Op, class T, int kCount>
__device__ __forceinline__ void load_lane(Packed<T, kCount> &items, const T *row, int64_t step, int access, int first,
                                          int left) {
  if (access != kStrided && first + kCount <= left) {
    items.load(access == kForward ? row + first : row - first - (kCount - 1));
    items.turn_if(access == kBackward);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) items.put(i, first + i < left ? row[(first + i) * step] : filler<Op, T>());
  }
}

template <class T, int kCount>
__device__ __forceinline__ void store_lane(Packed<T, kCount> &items, T *row, int64_t step, int access, int first,
                                           int left) {
  if (access != kStrided && first + kCount <= left) {
    items.turn_if(access == kBackward);
    items.store(access == kForward ? row + first : row - first - (kCount - 1));
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (first + i < left) row[(first + i) * step] = items.get(i);
  }
}

// The same through shared memory of the warp's own, so that neighbouring lanes store neighbouring
// elements.
template <class T, int kCount>
__device__ __forceinline__ void store_staged(Packed<T, kCount> &items, T *row, int64_t step, std::byte *stage, int lane,
                                             int left) {
  T *staged = reinterpret_cast<T *>(stage);
#pragma unroll
  for (int i = 0; i < kCount; ++i) staged[lane * kCount + i] = items.get(i);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int at = i * kWarp + lane;
    if (at < left) row[at * step] = staged[at];
  }
  __syncwarp();
}

// ---- One lane's consecutive elements ----------------------------------------------------------

// The map of kCount elements, and their common base where the operator knows of such.
template <int kCount, class Op, class Get>
__device__ __forceinline__ typename Op::Map fold(const Op &op, typename Op::Acc &base, const Get &item) {
  if constexpr (Op::kBased) {
    using A = typename Op::Acc;
    base = op.template common_base<kCount>([&](int i) { return item(i).in[0]; });
    if (base == base) {
      A sum = exp2_of(Op::exponent(item(0).in[0], base));
#pragma unroll
      for (int i = 1; i < kCount; ++i) sum += exp2_of(Op::exponent(item(i).in[0], base));
      return {base, sum};
    }
    // Rare: elements are taken out of the registers for a loop that stays short.
    A x[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = item(i).in[0];
    typename Op::Map map = op.identity();
#pragma unroll 1
    for (int i = 0; i < kCount; ++i) map = op.combine(map, op.map({{x[i]}}));
    return map;
  }
  typename Op::Map map = op.map(item(0));
#pragma unroll
  for (int i = 1; i < kCount; ++i) map = op.combine(map, op.map(item(i)));
  return map;
}

// Applies kCount elements to `value` one after the other; put(i, result, value after it).
template <int kCount, class Op, class Get, class Put>
__device__ __forceinline__ void run(const Op &op, typename Op::Value value, typename Op::Acc base, const Get &item,
                                    const Put &put) {
  if constexpr (Op::kBased) {
    using A = typename Op::Acc;
    const bool exclusive = op.flags.exclusive;
    A out[kCount];
    if (base == base) {
      // The value is taken to the elements' base, or their sum to the value's.
      const bool larger = base >= value.base;
      const A down = scale_down(larger ? base - value.base : value.base - base);
      const A scale = larger ? A(1) : down;
      const A carry = larger ? value.sum * down : value.sum;
      // Taken down, a value before elements of much larger base is lost.
      const A before = Op::log_of(value);
      if (larger) value.base = base;
      A sum = A(0);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        sum += exp2_of(Op::exponent(item(i).in[0], base));
        value.sum = multiply_add(sum, scale, carry);
        out[i] = Op::log_of(value);
      }
      if (exclusive) {
#pragma unroll
        for (int i = kCount - 1; i > 0; --i) out[i] = out[i - 1];
        out[0] = before;
      }
    } else {
      A x[kCount];
      A y[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = item(i).in[0];
#pragma unroll 1
      for (int i = 0; i < kCount; ++i) {
        typename Op::Result result;
        value = op.step(value, {{x[i]}}, result);
        y[i] = result.out[0];
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) out[i] = y[i];
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) put(i, typename Op::Result{{out[i]}}, value);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      typename Op::Result result;
      value = op.step(value, item(i), result);
      put(i, result, value);
    }
  }
}

// ---- A warp's part of a row -------------------------------------------------------------------

template <class Op>
struct Pointers {
  // Rows of the operands, by slot of the Layout.
  std::byte *row[Op::Inputs::size + Op::Outputs::size];
};

template <class Op>
__device__ __forceinline__ Pointers<Op> rows_of(const Geometry &g, int64_t row) {
  Pointers<Op> pointers;
  for_each<Op::Inputs::size>([&](auto k) {
    pointers.row[k()] = reinterpret_cast<std::byte *>(row_start<at<k(), typename Op::Inputs>>(g, k(), row));
  });
  for_each<Op::Outputs::size>([&](auto k) {
    constexpr int slot = Op::Inputs::size + k();
    pointers.row[slot] = reinterpret_cast<std::byte *>(row_start<at<k(), typename Op::Outputs>>(g, slot, row));
  });
  return pointers;
}

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

// Behind the last element of a gradient's row stands the forward scan's initial value.
template <class Op>
__device__ __forceinline__ typename Op::Acc behind_last(const Geometry &g, int64_t row) {
  if constexpr (Op::kFinal) {
    using T = at<0, typename Op::Inputs>;
    constexpr int slot = Layout<Op>::kInitialSlot;
    if (g.data[slot]) return widen<typename Op::Acc>(*row_start<T>(g, slot, row));
  }
  return typename Op::Acc(0);
}

template <class Op>
__device__ __forceinline__ void store_final(const Geometry &g, int64_t row, typename Op::Value value) {
  if constexpr (Op::kFinal) {
    using T = at<0, typename Op::Outputs>;
    constexpr int slot = Layout<Op>::kFinalSlot;
    if (g.data[slot]) *row_start<T>(g, slot, row) = narrow<T>(value);
  }
}

template <class R>
__device__ __forceinline__ int64_t index_of(const R &result) {
  return result.index;
}

// Puts an element's outputs among those of its lane. In ascending order.
template <class Op, int kCount>
__device__ __forceinline__ void keep(Held<typename Op::Outputs, kCount> &outputs, int i,
                                     const typename Op::Result &result) {
  for_each<Op::Outputs::size>([&](auto k) {
    using U = at<k(), typename Op::Outputs>;
    if constexpr (Op::kPosition && k() == 1) {
      held<k()>(outputs).put(i, U(index_of(result)));
    } else {
      held<k()>(outputs).put(i, narrow<U>(result.out[k()]));
    }
  });
}

struct Accesses {
  int of[kMaxScanOperands];
};

// Vectors are sixteen bytes of the widest input, unless the outputs would be longer than 32 bytes.
template <class Op>
constexpr int kVector = 16 / Bytes<typename Op::Inputs>::widest() < 32 / Bytes<typename Op::Outputs>::widest()
                            ? 16 / Bytes<typename Op::Inputs>::widest()
                            : 32 / Bytes<typename Op::Outputs>::widest();

// Vectors are kept in shared memory with their low address bits mixed, so that neither reading
// consecutive vectors nor reading a lane's run of kVectors has bank conflicts.
template <int kVectors>
__device__ __forceinline__ int mixed(int vector) {
  constexpr int kShift = kVectors > 8 ? 4 : 3;
  return vector ^ ((vector >> kShift) & 7);
}

// Between vector j of the warp's j-th group, which is how memory is read and written best, and the
// lane's own run of consecutive vectors, which is how they are scanned best.
template <bool kToRuns, int kGroups, class P>
__device__ __forceinline__ void transpose(P *const (&items)[kGroups], std::byte *stage, int lane) {
  if constexpr (kGroups > 1) {
#pragma unroll
    for (int j = 0; j < kGroups; ++j)
      items[j]->store(stage + mixed<kGroups>(kToRuns ? j * kWarp + lane : lane * kGroups + j) * P::kBytes);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kGroups; ++j)
      items[j]->load(stage + mixed<kGroups>(kToRuns ? lane * kGroups + j : j * kWarp + lane) * P::kBytes);
    __syncwarp();
  }
}

// What a warp holds of one row: kGroups times 32 vectors, of which a lane scans kGroups that follow
// one another.
template <class Op, int kGroups>
struct Part {
  using A = typename Op::Acc;
  using Map = typename Op::Map;
  static constexpr int V = kVector<Op>;
  static constexpr int kRun = kGroups * V;  // of a lane
  static constexpr int kGroup = kWarp * V;
  static constexpr int kItems = kGroups * kGroup;
  static constexpr int kInputs = Op::Inputs::size;
  static constexpr int kLast = kInputs - 1;
  static constexpr int kWidest = Bytes<typename Op::Inputs>::widest() > Bytes<typename Op::Outputs>::widest()
                                     ? Bytes<typename Op::Inputs>::widest()
                                     : Bytes<typename Op::Outputs>::widest();
  // A warp's room for transposing an operand.
  static constexpr int kStageBytes = kItems * kWidest;

  Held<typename Op::Inputs, V> items[kGroups];
  A next;  // what follows the lane's run
  A base;
  Map before;     // what comes before the lane's run within this part
  int64_t first;  // of the row
  int left;       // elements from `first` on, but not more than kItems + 1

  __device__ __forceinline__ void load(const Geometry &g, const Accesses &access, const Pointers<Op> &pointers,
                                       int64_t start, int lane) {
    first = start;
    const int64_t rest = g.length - first;
    left = rest < 0 ? 0 : rest > kItems ? kItems + 1 : int(rest);
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      for_each<kInputs>([&](auto k) {
        using T = at<k(), typename Op::Inputs>;
        load_lane<Op>(held<k()>(items[j]), reinterpret_cast<const T *>(pointers.row[k()]) + first * g.step[k()],
                      g.step[k()], access.of[k()], j * kGroup + lane * V, left);
      });
    }
    if constexpr (Op::kNeighbour) {
      using T = at<kLast, typename Op::Inputs>;
      next = A(0);
      if (lane == kWarp - 1 && left > kItems)
        next = widen<A>(reinterpret_cast<const T *>(pointers.row[kLast])[(first + kItems) * g.step[kLast]]);
    }
  }

  // Element i of the lane's run.
  __device__ __forceinline__ typename Op::Item item(const Op &op, const Geometry &g, int i, int lane) {
    typename Op::Item item = {};
    for_each<kInputs>([&](auto k) { item.in[k()] = held<k()>(items[i / V]).template widened<A>(i % V); });
    const int place = lane * kRun + i;
    if constexpr (Op::kNeighbour) {
      const int after = i + 1 < kRun ? i + 1 : i;
      item.next = i + 1 < kRun ? held<kLast>(items[after / V]).template widened<A>(after % V) : next;
      item.has_next = place + 1 < left;
      if constexpr (Op::kFinal) {
        if (!item.has_next) item.next = next;
      }
    }
    if constexpr (Op::kPosition)
      item.position = uint32_t(op.flags.reverse ? g.length - 1 - (first + place) : first + place);
    return item;
  }

  // The map of the whole part, in every lane.
  __device__ __forceinline__ Map reduce(const Op &op, const Geometry &g, int64_t row, std::byte *stage, int lane) {
    for_each<kInputs>([&](auto k) {
      using P = Packed<at<k(), typename Op::Inputs>, V>;
      P *vectors[kGroups];
#pragma unroll
      for (int j = 0; j < kGroups; ++j) vectors[j] = &held<k()>(items[j]);
      transpose<true, kGroups, P>(vectors, stage, lane);
    });
    if constexpr (Op::kNeighbour) {
      const A following = shuffle_down(held<kLast>(items[0]).template widened<A>(0), 1);
      if (lane < kWarp - 1) next = following;
      if constexpr (Op::kFinal) {
        if (lane * kRun < left && lane * kRun + kRun >= left) next = behind_last<Op>(g, row);
      }
    }
    const Map own = fold<kRun>(op, base, [&](int i) { return item(op, g, i, lane); });
    const Map inclusive = warp_scan(op, own, lane);
    before = exclusive_of(op, inclusive, lane);
#pragma unroll
    for (int j = 0; j < kGroups; ++j) for_each<kInputs>([&](auto k) { held<k()>(items[j]).forget(); });
    return shuffle(inclusive, kWarp - 1);
  }

  // Outputs, with `value` before the part.
  __device__ __forceinline__ void finish(const Op &op, const Geometry &g, const Accesses &access,
                                         const Pointers<Op> &pointers, typename Op::Value value, int64_t row,
                                         std::byte *stage, int lane) {
    Held<typename Op::Outputs, V> outputs[kGroups];
    run<kRun>(
        op, op.apply(before, value), base, [&](int i) { return item(op, g, i, lane); },
        [&](int i, const typename Op::Result &result, const typename Op::Value &after) {
          keep<Op, V>(outputs[i / V], i % V, result);
          if constexpr (Op::kFinal) {
            if (lane * kRun + i == left - 1) store_final<Op>(g, row, after);
          }
        });
    for_each<Op::Outputs::size>([&](auto k) {
      using U = at<k(), typename Op::Outputs>;
      using P = Packed<U, V>;
      constexpr int slot = kInputs + k();
      if (Op::Outputs::size > 1 && !g.data[slot]) return;
      P *vectors[kGroups];
#pragma unroll
      for (int j = 0; j < kGroups; ++j) vectors[j] = &held<k()>(outputs[j]);
      transpose<false, kGroups, P>(vectors, stage, lane);
      U *to = reinterpret_cast<U *>(pointers.row[slot]) + first * g.step[slot];
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        if (access.of[slot] == kStrided) {
          store_staged(*vectors[j], to + j * kGroup * g.step[slot], g.step[slot], stage, lane,
                       min(left, kItems) - j * kGroup);
        } else {
          store_lane(*vectors[j], to, g.step[slot], access.of[slot], j * kGroup + lane * V, min(left, kItems));
        }
      }
    });
  }
};

// ---- Rows: one or several warps for each row --------------------------------------------------

constexpr int kMaxRowWarps = 16;

template <class Op, int kGroups, int kBlocks>
__global__ void __launch_bounds__(kMaxRowWarps *kWarp, kBlocks)
    scan_rows(const __grid_constant__ Op op, const __grid_constant__ Geometry g,
              const __grid_constant__ Accesses access, int row_warps) {
  using Map = typename Op::Map;
  using Row = Part<Op, kGroups>;
  extern __shared__ __align__(16) std::byte stages[];
  __shared__ Map totals[2][kMaxRowWarps];
  wait_for_earlier_work();
  let_next_kernel_start();
  const int lane = int(threadIdx.x) % kWarp;
  const int warp = int(threadIdx.x) / kWarp;
  const int place = warp % row_warps;
  const int64_t row = int64_t(blockIdx.x) * (int(blockDim.x) / kWarp / row_warps) + warp / row_warps;
  // A row's warps come to the barriers together; a block's rows are of one length.
  const bool live = row < g.rows;
  const Pointers<Op> pointers = rows_of<Op>(g, live ? row : g.rows - 1);
  typename Op::Value carry = initial_value(op, g, live ? row : g.rows - 1);
  int parity = 0;
  for (int64_t tile = 0; tile < g.length; tile += int64_t(row_warps) * Row::kItems) {
    Row part;
    part.load(g, access, pointers, live ? tile + place * Row::kItems : g.length, lane);
    std::byte *stage = stages + warp * Row::kStageBytes;
    Map total = part.reduce(op, g, row, stage, lane);
    typename Op::Value value = carry;
    if (row_warps > 1) {
      if (lane == 0) totals[parity][warp] = total;
      __syncthreads();
      Map others = lane < row_warps ? totals[parity][warp - place + lane] : op.identity();
      others = warp_scan(op, others, lane);
      total = shuffle(others, row_warps - 1);
      const Map left = shuffle(others, place > 0 ? place - 1 : 0);
      if (place > 0) value = op.apply(left, carry);
      parity ^= 1;
    }
    part.finish(op, g, access, pointers, value, row, stage, lane);
    carry = op.apply(total, carry);
  }
}

// ---- Short rows: a few lanes for each row -----------------------------------------------------

constexpr int kShortThreads = 256;

// `width` lanes, a power of two, hold a row.
template <class Op>
constexpr int kRowsAtOnce = 4;

template <class Op>
__global__ void __launch_bounds__(kShortThreads)
    scan_short_rows(const __grid_constant__ Op op, const __grid_constant__ Geometry g,
                    const __grid_constant__ Accesses access, int width) {
  constexpr int V = kVector<Op>;
  constexpr int kRows = kRowsAtOnce<Op>;
  constexpr int kInputs = Op::Inputs::size;
  using A = typename Op::Acc;
  wait_for_earlier_work();
  let_next_kernel_start();
  const int lane = int(threadIdx.x) % kWarp;
  const int first = (lane & (width - 1)) * V;
  const int length = int(g.length);
  const int rows_per_block = kShortThreads / width;
  const int64_t base = int64_t(blockIdx.x) * (rows_per_block * kRows) + int(threadIdx.x) / width;
  Held<typename Op::Inputs, V> items[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = base + r * rows_per_block;
    for_each<kInputs>([&](auto k) {
      using T = at<k(), typename Op::Inputs>;
      load_lane<Op>(held<k()>(items[r]), row_start<T>(g, k(), min(row, g.rows - 1)), g.step[k()], access.of[k()], first,
                    row < g.rows ? length : 0);
    });
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = base + r * rows_per_block;
    A neighbour = A(0);
    if constexpr (Op::kNeighbour) {
      neighbour = shuffle_down(held<kInputs - 1>(items[r]).template widened<A>(0), 1);
      if constexpr (Op::kFinal) {
        if (first < length && first + V >= length && row < g.rows) neighbour = behind_last<Op>(g, row);
      }
    }
    const auto item = [&](int i) {
      typename Op::Item item = {};
      for_each<kInputs>([&](auto k) { item.in[k()] = held<k()>(items[r]).template widened<A>(i); });
      if constexpr (Op::kNeighbour) {
        item.next = i + 1 < V ? held<kInputs - 1>(items[r]).template widened<A>(i + 1 < V ? i + 1 : i) : neighbour;
        item.has_next = first + i + 1 < length;
        if constexpr (Op::kFinal) {
          if (!item.has_next) item.next = neighbour;
        }
      }
      if constexpr (Op::kPosition) item.position = uint32_t(op.flags.reverse ? length - 1 - (first + i) : first + i);
      return item;
    };
    A common;
    const typename Op::Map inclusive = warp_scan(op, fold<V>(op, common, item), lane, width);
    const typename Op::Map before = exclusive_of(op, inclusive, lane, width);
    if (row < g.rows && first < length) {
      Held<typename Op::Outputs, V> outputs;
      run<V>(op, op.apply(before, initial_value(op, g, row)), common, item,
             [&](int i, const typename Op::Result &result, const typename Op::Value &after) {
               keep<Op, V>(outputs, i, result);
               if constexpr (Op::kFinal) {
                 if (first + i == length - 1) store_final<Op>(g, row, after);
               }
             });
      for_each<Op::Outputs::size>([&](auto k) {
        using U = at<k(), typename Op::Outputs>;
        constexpr int slot = kInputs + k();
        if (Op::Outputs::size == 1 || g.data[slot])
          store_lane(held<k()>(outputs), row_start<U>(g, slot, row), g.step[slot], access.of[slot], first, length);
      });
    }
  }
}

}  // namespace baracuda::scan
