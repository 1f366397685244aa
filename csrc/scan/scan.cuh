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

template <class L, int kItems>
struct Bytes;
template <class... T, int kItems>
struct Bytes<List<T...>, kItems> {
  static constexpr int sum = ((int(sizeof(T)) * kItems * kWarp) + ... + 0);
  static constexpr int largest_of(std::initializer_list<int> sizes) {
    int best = 0;
    for (int size : sizes) best = size > best ? size : best;
    return best;
  }
  static constexpr int largest = largest_of({int(sizeof(T)) * kItems * kWarp...});
  static constexpr int widest = largest_of({int(sizeof(T))...});
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

// ---- A warp's elements in shared memory -------------------------------------------------------

// Vectors of sixteen bytes are stored with their low address bits mixed, so that both reading
// consecutive vectors and reading one lane's run of kVectors have no bank conflicts.
template <int kVectors>
__device__ __forceinline__ int mixed(int vector) {
  constexpr int kShift = kVectors > 8 ? (kVectors > 16 ? 5 : 4) : 3;
  return vector ^ ((vector >> kShift) & 7);
}

template <int kSize>
__device__ __forceinline__ void copy_async(uint32_t shared, const void *global) {
  if constexpr (kSize == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(global), "n"(kSize) : "memory");
  }
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
  return uint32_t(__cvta_generic_to_shared(pointer));
}

template <class T, int kItems>
struct Slot {
  static constexpr int kPerVector = 16 / int(sizeof(T));
  static constexpr int kVectors = kItems / kPerVector;  // of a lane
  static_assert(kVectors >= 1 && kItems % kPerVector == 0);
  static constexpr int kBytes = kItems * kWarp * int(sizeof(T));

  __device__ static int place(int element) {
    return mixed<kVectors>(element / kPerVector) * 16 + element % kPerVector * int(sizeof(T));
  }
};

// Starts copying the warp's elements [first, first + 32 kItems) of a row into its slot.
template <class T, int kItems>
__device__ __forceinline__ void fetch(std::byte *slot, const T *row, int64_t step, int access, int64_t first,
                                      int64_t length, int lane) {
  using S = Slot<T, kItems>;
  constexpr int V = S::kPerVector;
  // Elements of the warp that are there.
  const int left = int(min(length - first, int64_t(kWarp * kItems)));
  if (access != kStrided) {
    const uint32_t base = shared_address(slot);
    const T *from = access == kForward ? row + first : row - first - (V - 1);
    const int direction = access == kForward ? V : -V;
    const int whole = left > 0 ? left / V : 0;
#pragma unroll
    for (int i = 0; i < S::kVectors; ++i) {
      const int vector = i * kWarp + lane;
      if (vector < whole) copy_async<16>(base + mixed<S::kVectors>(vector) * 16, from + vector * direction);
    }
    // The rest of a vector that the row's end cuts.
    if (lane < left - whole * V) {
      T *to = reinterpret_cast<T *>(slot + mixed<S::kVectors>(whole) * 16);
      to[access == kForward ? lane : V - 1 - lane] = row[(first + whole * V + lane) * step];
    }
  } else if constexpr (sizeof(T) >= 4) {
    const T *from = row + (first + lane) * step;
#pragma unroll 4
    for (int i = 0; i < kItems; ++i) {
      const int element = i * kWarp + lane;
      if (element < left) copy_async<sizeof(T)>(shared_address(slot + S::place(element)), from);
      from += kWarp * step;
    }
  } else {
    constexpr int kBatch = kItems < 16 ? kItems : 16;
    const T *from = row + (first + lane) * step;
#pragma unroll 1
    for (int start = 0; start < kItems; start += kBatch) {
      T batch[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if ((start + i) * kWarp + lane < left) batch[i] = *from;
        from += kWarp * step;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int element = (start + i) * kWarp + lane;
        if (element < left) *reinterpret_cast<T *>(slot + S::place(element)) = batch[i];
      }
    }
  }
}

template <class T, int kPerVector>
struct alignas(16) Vector {
  T value[kPerVector];
};

// The lane's own kItems consecutive elements.
template <class T, int kItems>
__device__ __forceinline__ void read_slot(const std::byte *slot, bool mirrored, int lane, T (&items)[kItems]) {
  using S = Slot<T, kItems>;
  constexpr int V = S::kPerVector;
#pragma unroll
  for (int i = 0; i < S::kVectors; ++i) {
    const auto vector =
        *reinterpret_cast<const Vector<T, V> *>(slot + mixed<S::kVectors>(lane * S::kVectors + i) * 16);
#pragma unroll
    for (int e = 0; e < V; ++e) items[i * V + e] = mirrored ? vector.value[V - 1 - e] : vector.value[e];
  }
}

// Writes the lane's kItems elements out, through the slot, so that a warp stores whole lines.
template <class T, int kItems>
__device__ __forceinline__ void store_items(std::byte *slot, const T (&items)[kItems], T *row, int64_t step,
                                            int access, int64_t first, int64_t length, int lane) {
  using S = Slot<T, kItems>;
  constexpr int V = S::kPerVector;
  const int left = int(min(length - first, int64_t(kWarp * kItems)));
  const bool mirrored = access == kBackward;
#pragma unroll
  for (int i = 0; i < S::kVectors; ++i) {
    Vector<T, V> vector;
#pragma unroll
    for (int e = 0; e < V; ++e) vector.value[e] = mirrored ? items[i * V + V - 1 - e] : items[i * V + e];
    *reinterpret_cast<Vector<T, V> *>(slot + mixed<S::kVectors>(lane * S::kVectors + i) * 16) = vector;
  }
  __syncwarp();
  if (access != kStrided) {
    T *to = access == kForward ? row + first : row - first - (V - 1);
    const int direction = access == kForward ? V : -V;
    const int whole = left > 0 ? left / V : 0;
#pragma unroll
    for (int i = 0; i < S::kVectors; ++i) {
      const int vector = i * kWarp + lane;
      if (vector < whole)
        *reinterpret_cast<uint4 *>(to + vector * direction) =
            *reinterpret_cast<const uint4 *>(slot + mixed<S::kVectors>(vector) * 16);
    }
    if (lane < left - whole * V)
      row[(first + whole * V + lane) * step] =
          reinterpret_cast<const T *>(slot + mixed<S::kVectors>(whole) * 16)[mirrored ? V - 1 - lane : lane];
  } else {
    T *to = row + (first + lane) * step;
#pragma unroll 4
    for (int i = 0; i < kItems; ++i) {
      const int element = i * kWarp + lane;
      if (element < left) *to = *reinterpret_cast<const T *>(slot + S::place(element));
      to += kWarp * step;
    }
  }
  __syncwarp();
}

// The lane's elements of all inputs, as they are stored.
template <class L, int kItems>
struct Held;
template <int kItems>
struct Held<List<>, kItems> {};
template <class T, class... Rest, int kItems>
struct Held<List<T, Rest...>, kItems> {
  T items[kItems];
  Held<List<Rest...>, kItems> rest;
};
template <int k, class L, int kItems>
__device__ __forceinline__ auto &held(Held<L, kItems> &all) {
  if constexpr (k == 0) {
    return all.items;
  } else {
    return held<k - 1>(all.rest);
  }
}

template <class Op>
struct Place {
  int64_t length;
  int64_t first;  // the lane's first element, in scan order
};

// Element i of the lane, ready for the operator.
template <class Op, int kItems>
__device__ __forceinline__ typename Op::Item element(const Op &op, Held<typename Op::Inputs, kItems> &items, int i,
                                                     typename Op::Acc neighbour, int64_t lane_first, int64_t length) {
  using A = typename Op::Acc;
  constexpr int kInputs = Op::Inputs::size;
  typename Op::Item item = {};
  for_each<kInputs>([&](auto k) { item.in[k()] = widen<A>(held<k()>(items)[i]); });
  if constexpr (Op::kNeighbour) {
    item.next = i + 1 < kItems ? widen<A>(held<kInputs - 1>(items)[i + 1 < kItems ? i + 1 : i]) : neighbour;
    item.has_next = lane_first + i + 1 < length;
    if constexpr (Op::kFinal) {
      // What stands in for the neighbour behind the last element was put in its place by the caller.
      if (!item.has_next) item.next = neighbour;
    }
  }
  if constexpr (Op::kPosition)
    item.position = uint32_t(op.flags.reverse ? length - 1 - (lane_first + i) : lane_first + i);
  return item;
}

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

// The outputs of a lane, as they will be stored.
template <class Op, int kItems>
__device__ __forceinline__ void keep(Held<typename Op::Outputs, kItems> &outputs, int i,
                                     const typename Op::Result &result) {
  for_each<Op::Outputs::size>([&](auto k) {
    using U = at<k(), typename Op::Outputs>;
    if constexpr (Op::kPosition && k() == 1) {
      held<k()>(outputs)[i] = U(index_of(result));
    } else {
      held<k()>(outputs)[i] = narrow<U>(result.out[k()]);
    }
  });
}

struct Accesses {
  int of[kMaxScanOperands];
};

// Starts copying a warp's elements of all inputs, one slot after the other.
template <class Op, int kItems>
__device__ __forceinline__ void fetch_all(const Geometry &g, const Accesses &access, const Pointers<Op> &pointers,
                                          std::byte *slots, int64_t first, int lane) {
  int offset = 0;
  for_each<Op::Inputs::size>([&](auto k) {
    using T = at<k(), typename Op::Inputs>;
    fetch<T, kItems>(slots + offset, reinterpret_cast<const T *>(pointers.row[k()]), g.step[k()], access.of[k()],
                     first, g.length, lane);
    offset += Slot<T, kItems>::kBytes;
  });
}

template <class Op, int kItems>
__device__ __forceinline__ void read_all(const Accesses &access, const std::byte *slots, int lane,
                                         Held<typename Op::Inputs, kItems> &items) {
  int offset = 0;
  for_each<Op::Inputs::size>([&](auto k) {
    using T = at<k(), typename Op::Inputs>;
    read_slot<T, kItems>(slots + offset, access.of[k()] == kBackward, lane, held<k()>(items));
    offset += Slot<T, kItems>::kBytes;
  });
}

// The next lane's first element of the last input; `beyond` is what follows the warp's last one.
template <class Op, int kItems>
__device__ __forceinline__ typename Op::Acc neighbour_of(Held<typename Op::Inputs, kItems> &items,
                                                         typename Op::Acc beyond, int lane) {
  using A = typename Op::Acc;
  if constexpr (Op::kNeighbour) {
    const A own = widen<A>(held<Op::Inputs::size - 1>(items)[0]);
    const A next = shuffle_down(own, 1);
    return lane == kWarp - 1 ? beyond : next;
  }
  return A(0);
}

template <class Op, int kItems>
__device__ __forceinline__ typename Op::Map fold(const Op &op, Held<typename Op::Inputs, kItems> &items,
                                                 typename Op::Acc neighbour, int64_t lane_first, int64_t length) {
  typename Op::Map map = op.map(element<Op, kItems>(op, items, 0, neighbour, lane_first, length));
#pragma unroll
  for (int i = 1; i < kItems; ++i)
    map = op.combine(map, op.map(element<Op, kItems>(op, items, i, neighbour, lane_first, length)));
  return map;
}

// Applies the lane's elements to `value` and stores the outputs.
template <class Op, int kItems>
__device__ __forceinline__ void finish(const Op &op, const Geometry &g, const Accesses &access,
                                       const Pointers<Op> &pointers, std::byte *slot,
                                       Held<typename Op::Inputs, kItems> &items, typename Op::Acc neighbour,
                                       typename Op::Value value, int64_t warp_first, int64_t row, int lane) {
  Held<typename Op::Outputs, kItems> outputs;
  const int64_t lane_first = warp_first + lane * kItems;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    typename Op::Result result;
    value = op.step(value, element<Op, kItems>(op, items, i, neighbour, lane_first, g.length), result);
    keep<Op, kItems>(outputs, i, result);
    if constexpr (Op::kFinal) {
      if (lane_first + i == g.length - 1) store_final<Op>(g, row, value);
    }
  }
  for_each<Op::Outputs::size>([&](auto k) {
    using U = at<k(), typename Op::Outputs>;
    constexpr int operand = Op::Inputs::size + k();
    if (Op::Outputs::size == 1 || g.data[operand])
      store_items<U, kItems>(slot, held<k()>(outputs), reinterpret_cast<U *>(pointers.row[operand]), g.step[operand],
                             access.of[operand], warp_first, g.length, lane);
  });
}

// ---- Rows: one or several warps for each row --------------------------------------------------

constexpr int kMaxRowWarps = 16;

template <class Op, int kItems>
struct RowsShape {
  static constexpr int kSlots = Bytes<typename Op::Inputs, kItems>::sum > Bytes<typename Op::Outputs, kItems>::largest
                                    ? Bytes<typename Op::Inputs, kItems>::sum
                                    : Bytes<typename Op::Outputs, kItems>::largest;
  // Blocks on a multiprocessor: two, where a lane's elements leave room for them in the registers.
  static constexpr int kBlocks = kSlots / kWarp <= 64 ? 2 : 1;
};

template <class Op, int kItems>
__global__ void __launch_bounds__(kMaxRowWarps *kWarp, RowsShape<Op, kItems>::kBlocks)
    scan_rows(const __grid_constant__ Op op, const __grid_constant__ Geometry g,
              const __grid_constant__ Accesses access, int row_warps) {
  using Map = typename Op::Map;
  using Value = typename Op::Value;
  using A = typename Op::Acc;
  extern __shared__ __align__(16) std::byte shared[];
  __shared__ Map totals[2][kMaxRowWarps];
  const int lane = int(threadIdx.x) % kWarp;
  const int warp = int(threadIdx.x) / kWarp;
  const int place = warp % row_warps;
  const int rows_per_block = int(blockDim.x) / kWarp / row_warps;
  std::byte *slots = shared + warp * RowsShape<Op, kItems>::kSlots;
  constexpr int kWarpItems = kWarp * kItems;
  const int64_t blocks = (g.rows + rows_per_block - 1) / rows_per_block;
  int parity = 0;
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t own = block * rows_per_block + warp / row_warps;
    const bool live = own < g.rows;
    const int64_t row = live ? own : g.rows - 1;
    const Pointers<Op> pointers = rows_of<Op>(g, row);
    Value carry = initial_value(op, g, row);
    for (int64_t tile = 0; tile < g.length; tile += int64_t(row_warps) * kWarpItems) {
      const int64_t first = tile + place * kWarpItems;
      A beyond = A(0);
      Held<typename Op::Inputs, kItems> items;
      if (live) fetch_all<Op, kItems>(g, access, pointers, slots, first, lane);
      commit_copies();
      if constexpr (Op::kNeighbour) {
        constexpr int last = Op::Inputs::size - 1;
        using T = at<last, typename Op::Inputs>;
        const int64_t next = first + kWarpItems;
        if (lane == kWarp - 1 && next < g.length)
          beyond = widen<A>(reinterpret_cast<const T *>(pointers.row[last])[next * g.step[last]]);
      }
      wait_copies<0>();
      __syncwarp();
      read_all<Op, kItems>(access, slots, lane, items);
      __syncwarp();
      const int64_t lane_first = first + lane * kItems;
      A neighbour = neighbour_of<Op, kItems>(items, beyond, lane);
      if constexpr (Op::kFinal) {
        if (lane_first < g.length && lane_first + kItems >= g.length) neighbour = behind_last<Op>(g, row);
      }
      const Map inclusive = warp_scan(op, fold<Op, kItems>(op, items, neighbour, lane_first, g.length), lane);
      Map before = exclusive_of(op, inclusive, lane);
      Map total = shuffle(inclusive, kWarp - 1);
      if (row_warps > 1) {
        if (lane == 0) totals[parity][warp] = total;
        __syncthreads();
        Map others = lane < row_warps ? totals[parity][warp - place + lane] : op.identity();
        others = warp_scan(op, others, lane);
        total = shuffle(others, row_warps - 1);
        const Map left = shuffle(others, place > 0 ? place - 1 : 0);
        if (place > 0) before = op.combine(left, before);
        parity ^= 1;
      }
      const Value value = op.apply(before, carry);
      if (live) finish<Op, kItems>(op, g, access, pointers, slots, items, neighbour, value, first, row, lane);
      carry = op.apply(total, carry);
    }
  }
}

// ---- Short rows: a few lanes for each row -----------------------------------------------------

template <class Op>
struct ShortShape {
  // Elements of a lane: sixteen bytes of the widest input.
  static constexpr int kItems = 16 / Bytes<typename Op::Inputs, 1>::widest;
  static constexpr int kRowsAtOnce = 4;
};
constexpr int kShortThreads = 256;

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

template <class T, int kItems>
__device__ __forceinline__ void load_lane(const T *row, int64_t step, int access, int first, int length,
                                          T (&items)[kItems]) {
  constexpr int kBytes = int(sizeof(T)) * kItems;
  using Wide = Unsigned<kBytes>;
  if (access != kStrided && first + kItems <= length) {
    const T *from = access == kForward ? row + first : row - first - (kItems - 1);
    const Wide wide = *reinterpret_cast<const Wide *>(from);
    T loaded[kItems];
    memcpy(loaded, &wide, kBytes);
#pragma unroll
    for (int e = 0; e < kItems; ++e) items[e] = access == kForward ? loaded[e] : loaded[kItems - 1 - e];
  } else {
#pragma unroll
    for (int e = 0; e < kItems; ++e) items[e] = first + e < length ? row[(first + e) * step] : T{};
  }
}

template <class T, int kItems>
__device__ __forceinline__ void store_lane(T *row, int64_t step, int access, int first, int length,
                                           const T (&items)[kItems]) {
  constexpr int kBytes = int(sizeof(T)) * kItems;
  constexpr int kPiece = kBytes < 16 ? kBytes : 16;
  using Wide = Unsigned<kPiece>;
  constexpr int kPieces = kBytes / int(sizeof(Wide));
  static_assert(kPieces * int(sizeof(Wide)) == kBytes);
  if (access != kStrided && first + kItems <= length) {
    T *to = access == kForward ? row + first : row - first - (kItems - 1);
    T turned[kItems];
#pragma unroll
    for (int e = 0; e < kItems; ++e) turned[e] = access == kForward ? items[e] : items[kItems - 1 - e];
    Wide wide[kPieces];
    memcpy(wide, turned, kBytes);
#pragma unroll
    for (int p = 0; p < kPieces; ++p) reinterpret_cast<Wide *>(to)[p] = wide[p];
  } else {
#pragma unroll
    for (int e = 0; e < kItems; ++e)
      if (first + e < length) row[(first + e) * step] = items[e];
  }
}

// `width` lanes, a power of two, hold a row.
template <class Op>
__global__ void __launch_bounds__(kShortThreads)
    scan_short_rows(const __grid_constant__ Op op, const __grid_constant__ Geometry g,
                    const __grid_constant__ Accesses access, int width) {
  constexpr int kItems = ShortShape<Op>::kItems;
  constexpr int kRows = ShortShape<Op>::kRowsAtOnce;
  using A = typename Op::Acc;
  const int lane = int(threadIdx.x) % kWarp;
  const int first = (lane & (width - 1)) * kItems;
  const int length = int(g.length);
  const int rows_per_block = kShortThreads / width;
  const int64_t base = int64_t(blockIdx.x) * (rows_per_block * kRows) + int(threadIdx.x) / width;
  Held<typename Op::Inputs, kItems> items[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = base + r * rows_per_block;
    for_each<Op::Inputs::size>([&](auto k) {
      using T = at<k(), typename Op::Inputs>;
      if (row < g.rows) {
        load_lane<T, kItems>(row_start<T>(g, k(), row), g.step[k()], access.of[k()], first, length, held<k()>(items[r]));
      } else {
#pragma unroll
        for (int e = 0; e < kItems; ++e) held<k()>(items[r])[e] = T{};
      }
    });
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = base + r * rows_per_block;
    A neighbour = A(0);
    if constexpr (Op::kNeighbour) {
      neighbour = shuffle_down(widen<A>(held<Op::Inputs::size - 1>(items[r])[0]), 1);
      if constexpr (Op::kFinal) {
        if (first < length && first + kItems >= length && row < g.rows) neighbour = behind_last<Op>(g, row);
      }
    }
    const typename Op::Map inclusive =
        warp_scan(op, fold<Op, kItems>(op, items[r], neighbour, first, length), lane, width);
    const typename Op::Map before = exclusive_of(op, inclusive, lane, width);
    if (row < g.rows && first < length) {
      typename Op::Value value = op.apply(before, initial_value(op, g, row));
      Held<typename Op::Outputs, kItems> outputs;
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        typename Op::Result result;
        value = op.step(value, element<Op, kItems>(op, items[r], i, neighbour, first, length), result);
        keep<Op, kItems>(outputs, i, result);
        if constexpr (Op::kFinal) {
          if (first + i == length - 1) store_final<Op>(g, row, value);
        }
      }
      for_each<Op::Outputs::size>([&](auto k) {
        using U = at<k(), typename Op::Outputs>;
        constexpr int operand = Op::Inputs::size + k();
        if (Op::Outputs::size == 1 || g.data[operand])
          store_lane<U, kItems>(row_start<U>(g, operand, row), g.step[operand], access.of[operand], first, length,
                                held<k()>(outputs));
      });
    }
  }
}

}  // namespace baracuda::scan
