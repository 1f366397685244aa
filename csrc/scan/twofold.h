// SPDX-License-Identifier: Apache-2.0
// Numbers of twice the precision: a number and what was lost when it was rounded. A sum or product that is carried
// along like this is off by little more than its last rounding, however many elements went into it.
//
// The error of an addition: D. E. Knuth, The Art of Computer Programming, volume 2, section 4.2.2, theorem B. That of
// a multiplication is one fused multiply-add away.
#pragma once

#include <cmath>
#include <type_traits>

#include "runtime/exact.h"

namespace baracuda::scan {

template <class A>
struct Twofold {
  A high;
  A low;
};

template <class A>
BARACUDA_HD inline A add(A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    // Integers wrap; unsigned arithmetic says so without undefined behaviour.
    return A(std::make_unsigned_t<A>(a) + std::make_unsigned_t<A>(b));
  } else {
    return a + b;
  }
}
template <class A>
BARACUDA_HD inline A multiply(A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    return A(std::make_unsigned_t<A>(a) * std::make_unsigned_t<A>(b));
  } else {
    return a * b;
  }
}
BARACUDA_HD inline float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
BARACUDA_HD inline double multiply_add(double a, double b, double c) { return ::fma(a, b, c); }

template <class A>
BARACUDA_HD inline Twofold<A> add(Twofold<A> a, A b) {
  const A sum = exact_add(a.high, b);
  const A added = exact_add(sum, -a.high);
  const A lost = exact_add(exact_add(a.high, -exact_add(sum, -added)), exact_add(b, -added));
  return {sum, exact_add(a.low, lost)};
}
template <class A>
BARACUDA_HD inline Twofold<A> add(Twofold<A> a, Twofold<A> b) {
  const Twofold<A> sum = add(a, b.high);
  return {sum.high, exact_add(sum.low, b.low)};
}
template <class A>
BARACUDA_HD inline Twofold<A> multiply(Twofold<A> a, A b) {
  const A product = exact_multiply(a.high, b);
  return {product, multiply_add(a.low, b, multiply_add(a.high, b, -product))};
}
template <class A>
BARACUDA_HD inline Twofold<A> multiply(Twofold<A> a, Twofold<A> b) {
  const Twofold<A> product = multiply(a, b.high);
  return {product.high, multiply_add(a.high, b.low, product.low)};
}

// As one number. Where it is infinite, what was lost is not a number, and any number does in its place.
template <class A>
BARACUDA_HD inline A rounded(Twofold<A> a) {
  constexpr A kAny = -3e38f;
#if defined(__CUDA_ARCH__)
  return a.high + (std::is_same_v<A, float> ? A(fmaxf(a.low, kAny)) : A(::fmax(a.low, kAny)));
#else
  return a.high + (a.low > kAny ? a.low : kAny);
#endif
}
template <class A>
BARACUDA_HD inline A rounded(A a) {
  return a;
}

template <class A>
BARACUDA_HD inline bool is_zero(Twofold<A> a) {
  return a.high == A(0) && a.low == A(0);
}
template <class A>
BARACUDA_HD inline bool is_zero(A a) {
  return a == A(0);
}

// One of two numbers, without a branch.
template <class A>
BARACUDA_HD inline Twofold<A> either(bool first, Twofold<A> a, Twofold<A> b) {
  return {first ? a.high : b.high, first ? a.low : b.low};
}
template <class A>
BARACUDA_HD inline A either(bool first, A a, A b) {
  return first ? a : b;
}

// A number as a V, which is A or twofold.
template <class V, class A>
BARACUDA_HD inline V carried(A a) {
  if constexpr (std::is_same_v<V, A>) {
    return a;
  } else {
    return {a, A(0)};
  }
}

// What carries sums and products for outputs of type U: twofold where U shows the rounding of A.
template <class U, class A>
using Carried = std::conditional_t<std::is_floating_point_v<U> && std::is_same_v<U, A>, Twofold<A>, A>;

}  // namespace baracuda::scan
