// SPDX-License-Identifier: Apache-2.0
// One lane's consecutive elements: folded into a map, and applied to the value before them.
#pragma once

#include "scan/scan_elements.cuh"

namespace baracuda::scan {

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

// Whether what the first pass works out for each element is worked out anew in the second, which takes fewer registers.
template <class Op>
constexpr bool kAnew = false;
template <class T>
constexpr bool kAnew<LogSumExpRatios<T>> = true;

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

// Of what reads elements again: whether it reads shared memory, so that it may as well.
template <class Again>
constexpr bool kReadsShared = requires { Again::kShared; };

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
    one_by_one<kCount, (kKept > 0 || kReadsShared<Again>)>(
        item, again, [&](int, const typename Op::Item &taken) { map = op.combine(map, op.map(taken)); });
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
      one_by_one<kCount, (kKept > 0 || kReadsShared<Again>)>(item, again, [&](int i, const typename Op::Item &taken) {
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

}  // namespace baracuda::scan
