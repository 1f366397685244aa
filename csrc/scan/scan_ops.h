// SPDX-License-Identifier: Apache-2.0
// The mathematics of the scans, for host and device. An operator turns each element into a map of
// the carried value; maps compose associatively, so that warps and blocks can fold them in any
// fixed order, and `step` applies one element's map in place and gives the element's outputs.
//
// All positions are in scan order: a reverse scan is the same scan seen from the other end.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "scan/twofold.h"

namespace baracuda::scan {

// A stored truth value: any byte but 0 is true.
struct Boolean {
  uint8_t byte;
};

template <class T>
struct AccumulatorOf {
  using type =
      std::conditional_t<std::is_same_v<T, double>, double,
                         std::conditional_t<std::is_integral_v<T> || std::is_same_v<T, Boolean>, int64_t, float>>;
};
template <class T>
using Accumulator = typename AccumulatorOf<T>::type;

template <class A, class T>
BARACUDA_HD inline A widen(T value) {
  if constexpr (std::is_same_v<T, Boolean>) {
    return A(value.byte != 0);
  } else if constexpr (std::is_same_v<T, float16> || std::is_same_v<T, bfloat16>) {
    return A(float(value));
  } else {
    return A(value);
  }
}

template <class T, class A>
BARACUDA_HD inline T narrow(A value) {
  if constexpr (std::is_same_v<T, Boolean>) {
    return Boolean{uint8_t(value != A(0))};
  } else if constexpr (std::is_same_v<T, float16> || std::is_same_v<T, bfloat16>) {
    return T(float(value));
  } else {
    return T(value);
  }
}

template <class... Types>
struct List {
  static constexpr int size = sizeof...(Types);
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
using at = At<k, L>::type;

// One element in scan order.
template <class A, int kInputs>
struct Element {
  A in[kInputs];
  // The last input's value one place further on, for operators with kNeighbour; behind the last
  // element what the operator's `behind` says.
  A next;
  // The place along the axis, in the tensor's own order; for operators with kPosition.
  uint32_t position;
};

template <class A>
BARACUDA_HD inline A infinity() {
  return A(INFINITY);
}

// Of the results of operators with kPosition.
template <class R>
BARACUDA_HD inline int64_t index_of(const R &result) {
  return result.index;
}

struct Flags {
  bool exclusive = false;
  bool smallest = false;  // cummin
  bool last = false;      // of equal extrema the last keeps the index
  bool reverse = false;
};

// What operators have in common, to be overridden.
template <class V, int kOutputCount, class A>
struct Basics {
  using Acc = A;
  using Value = V;
  static constexpr bool kNeighbour = false;
  static constexpr bool kPosition = false;
  static constexpr bool kInitial = false;  // a value before the first element may be given, per row
  static constexpr bool kFinal = false;    // the value after the last element may be asked for, per row
  static constexpr bool kRare = false;     // seldom asked for: not worth a kernel for each access pattern
  static constexpr bool kHeavy = false;    // much to compute for each element
  static constexpr bool kBased = false;    // several elements can be taken at once, relative to one base
  struct Result {
    A out[kOutputCount];
  };
  Flags flags;
};

// Narrow integers are summed to int64 but for those who ask for something else.
template <class T, class U>
constexpr bool kSeldomOutput = (std::is_integral_v<T> || std::is_same_v<T, Boolean>) && sizeof(T) < 4 && sizeof(U) < 8;

template <class T, class U, class A = Accumulator<T>, class V = Carried<U, A>>
struct Sum : Basics<V, 1, A> {
  static constexpr bool kRare = kSeldomOutput<T, U>;
  using Inputs = List<T>;
  using Outputs = List<U>;
  using Map = V;
  using Item = Element<A, 1>;
  using Result = typename Basics<V, 1, A>::Result;
  BARACUDA_HD Map identity() const { return carried<V>(A(0)); }
  BARACUDA_HD V start() const { return identity(); }
  BARACUDA_HD Map map(const Item &item) const { return carried<V>(item.in[0]); }
  BARACUDA_HD Map extend(Map l, const Item &item) const { return add(l, item.in[0]); }
  BARACUDA_HD Map combine(Map l, Map r) const { return add(l, r); }
  BARACUDA_HD V apply(Map map, V value) const { return add(value, map); }
  BARACUDA_HD V step(V value, const Item &item, Result &result) const {
    const V after = add(value, item.in[0]);
    result.out[0] = rounded(this->flags.exclusive ? value : after);
    return after;
  }
};

template <class T, class U, class A = Accumulator<T>, class V = Carried<U, A>>
struct Product : Basics<V, 1, A> {
  static constexpr bool kRare = kSeldomOutput<T, U>;
  using Inputs = List<T>;
  using Outputs = List<U>;
  using Map = V;
  using Item = Element<A, 1>;
  using Result = typename Basics<V, 1, A>::Result;
  BARACUDA_HD Map identity() const { return carried<V>(A(1)); }
  BARACUDA_HD V start() const { return identity(); }
  BARACUDA_HD Map map(const Item &item) const { return carried<V>(item.in[0]); }
  BARACUDA_HD Map extend(Map l, const Item &item) const { return multiply(l, item.in[0]); }
  BARACUDA_HD Map combine(Map l, Map r) const { return multiply(l, r); }
  BARACUDA_HD V apply(Map map, V value) const { return multiply(value, map); }
  BARACUDA_HD V step(V value, const Item &item, Result &result) const {
    const V after = multiply(value, item.in[0]);
    result.out[0] = rounded(this->flags.exclusive ? value : after);
    return after;
  }
};

// The largest or smallest value in the type T: the identity of cummin or cummax.
template <class T, class A>
BARACUDA_HD inline A extreme(bool largest) {
  if constexpr (std::is_same_v<T, Boolean>) {
    return A(largest ? 1 : 0);
  } else if constexpr (std::is_floating_point_v<A>) {
    return largest ? infinity<A>() : -infinity<A>();
  } else {
    return largest ? A(std::numeric_limits<T>::max()) : A(std::numeric_limits<T>::min());
  }
}

// Minima are maxima of values turned upside down, and the other way round.
template <class A>
BARACUDA_HD inline A turned(A value, bool turn) {
  if constexpr (std::is_same_v<A, float>) {
    return bit_cast<float>(bit_cast<uint32_t>(value) ^ (turn ? 0x80000000u : 0u));
  } else if constexpr (std::is_same_v<A, double>) {
    return bit_cast<double>(bit_cast<uint64_t>(value) ^ (turn ? uint64_t(1) << 63 : uint64_t(0)));
  } else {
    return turn ? A(~value) : value;
  }
}

// What no value in the type T is below, turned.
template <class T, class A>
BARACUDA_HD inline A lowest(bool turn) {
  if constexpr (std::is_floating_point_v<A>) {
    return -infinity<A>();
  } else {
    return turned(extreme<T, A>(turn), turn);
  }
}

template <class A>
BARACUDA_HD inline bool is_number(A value) {
  if constexpr (std::is_floating_point_v<A>) {
    return value == value;
  } else {
    return true;
  }
}

// Whether `next` takes over from `current` as the maximum: NaN wins and stays, and of equal values the first or the
// last is kept.
template <class A>
BARACUDA_HD inline bool takes_over(A current, A next) {
  return is_number(current) && !(next <= current);
}
template <class A>
BARACUDA_HD inline bool takes_over_from_equal(A current, A next) {
  return (is_number(current) || !is_number(next)) && !(next < current);
}

// Which of two equal values is kept shows only in the sign of zero.
template <class T, class A = Accumulator<T>>
struct Extremum : Basics<A, 1, A> {
  using Inputs = List<T>;
  using Outputs = List<T>;
  using Map = A;
  using Item = Element<A, 1>;
  using Result = typename Basics<A, 1, A>::Result;
  BARACUDA_HD Map identity() const { return lowest<T, A>(this->flags.smallest); }
  BARACUDA_HD A start() const { return identity(); }
  BARACUDA_HD Map map(const Item &item) const { return turned(item.in[0], this->flags.smallest); }
  BARACUDA_HD Map combine(Map l, Map r) const { return takes_over(l, r) ? r : l; }
  BARACUDA_HD A apply(Map map, A value) const { return combine(value, map); }
  BARACUDA_HD A step(A value, const Item &item, Result &result) const {
    const A after = combine(value, map(item));
    result.out[0] = turned(this->flags.exclusive ? value : after, this->flags.smallest);
    return after;
  }
};

template <class A>
struct Record {
  A value;
  uint32_t index;
};
constexpr uint32_t kNoIndex = 0xffffffffu;

// cummax and cummin with indices. `I` is the type of the stored index; Boolean stores instead
// whether the element is a new extremum, which is all that the gradient needs.
template <class T, class I, class A = Accumulator<T>>
struct IndexedExtremum : Basics<Record<A>, 2, A> {
  static constexpr bool kMarks = std::is_same_v<I, Boolean>;
  static constexpr bool kRare = kSeldomOutput<T, I>;
  static constexpr bool kPosition = true;
  using Inputs = List<T>;
  using Outputs = std::conditional_t<kMarks, List<I>, List<T, I>>;
  using Map = Record<A>;
  using Item = Element<A, 1>;
  using Value = Record<A>;
  struct Result {
    A out[1];
    int64_t index;
  };
  BARACUDA_HD Map identity() const { return {lowest<T, A>(this->flags.smallest), kNoIndex}; }
  BARACUDA_HD Value start() const { return identity(); }
  BARACUDA_HD Map map(const Item &item) const { return {turned(item.in[0], this->flags.smallest), item.position}; }
  BARACUDA_HD Map combine(Map l, Map r) const {
    const bool takes = this->flags.last ? takes_over_from_equal(l.value, r.value) : takes_over(l.value, r.value);
    // The first of all elements may be the lowest value itself.
    const bool right = r.index != kNoIndex && (takes || l.index == kNoIndex);
    return right ? r : l;
  }
  BARACUDA_HD Value apply(Map map, Value value) const { return combine(value, map); }
  BARACUDA_HD Value step(Value value, const Item &item, Result &result) const {
    const Value after = combine(value, map(item));
    const Value shown = this->flags.exclusive ? value : after;
    result.out[0] = turned(shown.value, this->flags.smallest);
    if constexpr (kMarks) {
      result.out[0] = A(after.index == item.position);
    } else {
      result.index = shown.index == kNoIndex ? int64_t(-1) : int64_t(shown.index);
    }
    return after;
  }
};

// log(sum(exp)) as sum * 16^base. Bases are whole numbers, so that changing one is exact and takes no
// exponential, which lets warps and blocks combine sums at the cost of a few additions.
template <class A>
struct ScaledSum {
  A base;
  A sum;
};

// 16^(-difference) for whole differences >= 0; 0 where it is too small to matter.
BARACUDA_HD inline float scale_down(float difference) {
  // Adding 1.5 * 2^23 leaves the exponent field of the result in the lowest bits.
  const float exponent = multiply_add(difference < 31.75f ? difference : 31.75f, -4.0f, 12583039.0f);
  return bit_cast<float>(bit_cast<uint32_t>(exponent) << 23);
}
BARACUDA_HD inline double scale_down(double difference) {
  return difference < 250 ? bit_cast<double>(uint64_t(1023 - 4 * int(difference)) << 52) : 0.0;
}
BARACUDA_HD inline float exp2_of(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return std::exp2(x);
#endif
}
BARACUDA_HD inline double exp2_of(double x) { return ::exp2(x); }
BARACUDA_HD inline float log2_of(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return std::log2(x);
#endif
}
// With -infinity as the lowest finite number.
BARACUDA_HD inline float finite_below(float x) {
  const float lowest = -3.40282347e38f;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(lowest));
  return y;
#else
  return x < lowest ? lowest : x;
#endif
}
// The larger one; a NaN only if both are.
BARACUDA_HD inline float larger_of(float a, float b) { return fmaxf(a, b); }
BARACUDA_HD inline double larger_of(double a, double b) { return ::fmax(a, b); }

template <class A>
struct LogConstants;
template <>
struct LogConstants<float> {
  static constexpr float kLog2e = 1.44269502f, kLog2eRest = 1.92596299e-8f;  // together log2(e)
  static constexpr float kLn16 = 2.77258873f, kLn16Rest = -7.61861720e-9f;   // together ln(16)
  static constexpr float kWhole = 4194304.0f;  // products with log2(e) beyond are whole numbers
  static constexpr float kLargest = 3e38f;
  static constexpr float kFinite = 1e30f;
};
template <>
struct LogConstants<double> {
  static constexpr double kLog2e = 1.4426950408889634, kLog2eRest = 2.0355273740931033e-17;
  static constexpr double kLn16 = 2.772588722239781, kLn16Rest = 9.2761987253292384e-17;
  static constexpr double kWhole = 2251799813685248.0;
  static constexpr double kLargest = 1e308;
  static constexpr double kFinite = 1e300;
};

// Sums of exponentials. An operator takes neighbouring elements at once: they get one base, so that each costs one
// exponential and one addition.
template <class T, int kInputs, class A>
struct ScaledSumBasics : Basics<ScaledSum<A>, 1, A> {
  static constexpr bool kBased = true;
  using Outputs = List<T>;
  using Map = ScaledSum<A>;
  using Value = ScaledSum<A>;
  using Item = Element<A, kInputs>;
  using Result = typename Basics<ScaledSum<A>, 1, A>::Result;
  using Constants = LogConstants<A>;
  // Rounded to half precision, what is left out doesn't show.
  static constexpr bool kCoarse = sizeof(T) < sizeof(float) && std::is_same_v<A, float>;
  BARACUDA_HD Map identity() const { return {-Constants::kLargest, A(0)}; }
  BARACUDA_HD Value start() const { return identity(); }
  BARACUDA_HD Map combine(Map l, Map r) const {
    const bool left = l.base >= r.base;
    const A scale = scale_down(left ? l.base - r.base : r.base - l.base);
    return {left ? l.base : r.base, left ? multiply_add(r.sum, scale, l.sum) : multiply_add(l.sum, scale, r.sum)};
  }
  BARACUDA_HD Value apply(Map map, Value value) const { return combine(value, map); }
  // log2(exp(x)) - 4 base
  BARACUDA_HD static A exponent(A x, A base) {
    const A main = multiply_add(x, Constants::kLog2e, A(-4) * base);
    return kCoarse ? main : multiply_add(x, Constants::kLog2eRest, main);
  }
  BARACUDA_HD static A base_for(A x) { return std::rint(x * (Constants::kLog2e / 4)); }
};

template <class T, class A = Accumulator<T>>
struct LogSumExp : ScaledSumBasics<T, 1, A> {
  using Own = ScaledSumBasics<T, 1, A>;
  using typename Own::Constants;
  using typename Own::Item;
  using typename Own::Map;
  using typename Own::Result;
  using typename Own::Value;
  using Inputs = List<T>;
  BARACUDA_HD Map map(const Item &item) const {
    const A x = item.in[0];
    const A size = x < A(0) ? -x : x;
    if (size < Constants::kWhole) {
      const A base = Own::base_for(x);
      return {base, exp2_of(Own::exponent(x, base))};
    }
    if (x != x) return {-Constants::kLargest, x};
    if (size == infinity<A>()) return {x < A(0) ? -Constants::kLargest : Constants::kLargest, x < A(0) ? A(0) : x};
    return {x * (Constants::kLog2e / 4), A(1)};
  }
  BARACUDA_HD static A shown(const Item &, Value value) {
    const A log = std::log(value.sum);
    return multiply_add(value.base, Constants::kLn16, multiply_add(value.base, Constants::kLn16Rest, log));
  }
  BARACUDA_HD Value step(Value value, const Item &item, Result &result) const {
    const Value after = this->combine(value, map(item));
    result.out[0] = shown(item, this->flags.exclusive ? value : after);
    return after;
  }

  static constexpr bool kAscending = false;
  BARACUDA_HD static A key(const Item &item) { return item.in[0]; }
  // Not a number where there is none.
  BARACUDA_HD static A common_base(A, A largest) {
    return largest < Constants::kWhole && largest > -Constants::kWhole ? Own::base_for(largest) : A(NAN);
  }
  BARACUDA_HD static A term(const Item &item, A base) { return exp2_of(Own::exponent(item.in[0], base)); }
  // Sums only grow, so where the first one's smallest term has a precise exponent all are well scaled.
  BARACUDA_HD static bool well_scaled(A, Value, A first) {
    return first >= A(1) / 262144 && first < Constants::kFinite;
  }
  // What is shown for a well scaled sum.
  BARACUDA_HD static A shown_scaled(const Item &item, A sum, A base) {
#if defined(__CUDA_ARCH__)
    if constexpr (std::is_same_v<A, float>) {
      if constexpr (Own::kCoarse) return multiply_add(log2_of(sum), Constants::kLn16 / 4, base * Constants::kLn16);
      // The exponent apart, as a number of its own: log2 of the rest is small and so is its error.
      const uint32_t bits = bit_cast<uint32_t>(sum);
      const float whole = bit_cast<float>((bits >> 23) | 0x4b000000u) - 8388735.0f;
      const float rest = log2_of(bit_cast<float>((bits & 0x007fffffu) | 0x3f800000u));
      const float exponent = multiply_add(base, 4.0f, whole);
      return multiply_add(exponent, Constants::kLn16 / 4,
                          multiply_add(exponent, Constants::kLn16Rest / 4, rest * (Constants::kLn16 / 4)));
    }
#endif
    return shown(item, {base, sum});
  }
};

// Whether errors of the ratios of neighbouring sums don't show, though they add up along the axis.
template <class T>
constexpr bool kRatiosDo = sizeof(T) < sizeof(float);

// Inputs dy, x, y: dx_j = exp(x_j) * (the sum of dy_k exp(-y_k) over the outputs k that x_j is in). The sum is scanned,
// so that errors don't add up along the axis as they would in a product of exp(y_{j-1} - y_j).
template <class T, class A = Accumulator<T>>
struct LogSumExpGradient : ScaledSumBasics<T, 3, A> {
  using Own = ScaledSumBasics<T, 3, A>;
  using typename Own::Constants;
  using typename Own::Item;
  using typename Own::Map;
  using typename Own::Result;
  using typename Own::Value;
  using Inputs = List<T, T, T>;
  static constexpr bool kHeavy = true;
  static constexpr bool kRare = kRatiosDo<T>;
  // Beyond this size neighbouring numbers are so far apart that one exponential of two is all of their sum.
  static constexpr A kApart = 1e9;
  BARACUDA_HD Map map(const Item &item) const {
    const A key = -item.in[2];
    if (key != key) return {-Constants::kLargest, key};
    // An output is -inf where all elements up to it are, which get no gradient.
    if (key == infinity<A>()) return this->identity();
    if (key < -Constants::kLargest) return {-Constants::kLargest, A(0) * item.in[0]};
    const A size = key < A(0) ? -key : key;
    if (size > kApart) return {key * (Constants::kLog2e / 4), item.in[0]};
    const A base = Own::base_for(key);
    return {base, item.in[0] * exp2_of(Own::exponent(key, base))};
  }
  BARACUDA_HD static A shown(const Item &item, Value value) {
    const A x = item.in[1];
    const A size = x < A(0) ? -x : x;
    if (size > kApart && x > -infinity<A>()) {
      const A base = x * (Constants::kLog2e / 4);
      const A far = base < -value.base ? A(0) : infinity<A>();
      return (base == -value.base ? A(1) : x == x ? far : x) * value.sum;
    }
    return exp2_of(Own::exponent(x, -value.base)) * value.sum;
  }
  BARACUDA_HD Value step(Value value, const Item &item, Result &result) const {
    const Value after = this->combine(value, map(item));
    result.out[0] = shown(item, this->flags.exclusive ? value : after);
    return after;
  }

  // The outputs of the forward scan only grow.
  static constexpr bool kAscending = true;
  BARACUDA_HD static A key(const Item &item) { return -item.in[2]; }
  // Terms and shares within e^60 of each other have precise exponents.
  BARACUDA_HD static A common_base(A first, A last) {
    const A span = last - first;
    return last < Constants::kWhole && last > -Constants::kWhole && span < A(60) && span > A(-60) ? Own::base_for(last)
                                                                                                  : A(NAN);
  }
  BARACUDA_HD static A term(const Item &item, A base) {
    const A share = exp2_of(Own::exponent(-item.in[2], base));
    // Whether a product is fused with the sum after it must not depend on the kernel, as it does with what a double's
    // exponential becomes.
    if constexpr (std::is_same_v<A, double>) return exact_multiply(item.in[0], share);
    return item.in[0] * share;
  }
  BARACUDA_HD static bool well_scaled(A base, Value value, A) { return value.base < base + A(8); }
  BARACUDA_HD static A shown_scaled(const Item &item, A sum, A base) {
    return exp2_of(Own::exponent(item.in[1], -base)) * sum;
  }
};

// value -> a * value + b. A zero stays clear of an `a` that overflowed while maps were composed.
template <class V>
struct Affine {
  V a;
  V b;
};

template <class V>
BARACUDA_HD inline V affine_apply(const Affine<V> &map, V value) {
  return either(is_zero(value), map.b, add(multiply(map.a, value), map.b));
}
template <class V>
BARACUDA_HD inline Affine<V> affine_combine(const Affine<V> &l, const Affine<V> &r) {
  return {multiply(l.a, r.a), affine_apply(r, l.b)};
}

// `V` carries values, of numbers of type A.
template <class A, class V, int kOutputCount>
struct AffineBasics : Basics<V, kOutputCount, A> {
  using Map = Affine<V>;
  BARACUDA_HD Map identity() const { return {carried<V>(A(1)), carried<V>(A(0))}; }
  BARACUDA_HD V start() const { return carried<V>(A(0)); }
  BARACUDA_HD Map combine(const Map &l, const Map &r) const { return affine_combine(l, r); }
  BARACUDA_HD V apply(const Map &map, V value) const { return affine_apply(map, value); }
};

// h_j = a_j h_{j-1} + b_j
template <class T, class A = Accumulator<T>>
struct LinearRecurrence : AffineBasics<A, A, 1> {
  static constexpr bool kInitial = true;
  using Inputs = List<T, T>;
  using Outputs = List<T>;
  using Map = Affine<A>;
  using Item = Element<A, 2>;
  using Result = typename Basics<A, 1, A>::Result;
  BARACUDA_HD Map map(const Item &item) const { return {item.in[0], item.in[1]}; }
  BARACUDA_HD A step(A value, const Item &item, Result &result) const {
    const A after = multiply_add(item.in[0], value, item.in[1]);
    result.out[0] = after;
    return after;
  }
};

// The gradients scan from the other end: T_j = c_j (g_j + T_{j+1}), dx_j = o_j (g_j + T_{j+1}),
// with g_j left out of dx_j, and not scaled in T_j, where the forward scan was exclusive.

// Inputs dy, x, y. c_j = x_j, o_j = y_{j-1}; exclusive: o_j = y_j.
template <class T, bool kExclusive, class A = Accumulator<T>, class V = Carried<T, A>>
struct ProductGradient : AffineBasics<A, V, 1> {
  static constexpr bool kNeighbour = true;
  static constexpr bool kRare = kExclusive;
  using Inputs = List<T, T, T>;
  using Outputs = List<T>;
  using Map = Affine<V>;
  using Item = Element<A, 3>;
  using Result = typename Basics<V, 1, A>::Result;
  BARACUDA_HD static A behind(A) { return A(1); }
  BARACUDA_HD Map map(const Item &item) const {
    const V dy = carried<V>(item.in[0]);
    return {carried<V>(item.in[1]), kExclusive ? dy : multiply(dy, item.in[1])};
  }
  BARACUDA_HD Map extend(const Map &l, const Item &item) const { return {multiply(l.a, item.in[1]), after(l.b, item)}; }
  BARACUDA_HD V step(V value, const Item &item, Result &result) const {
    const A sum = rounded(kExclusive ? value : add(value, item.in[0]));
    result.out[0] = (kExclusive ? item.in[2] : item.next) * sum;
    return after(value, item);
  }

 private:
  BARACUDA_HD static V after(V value, const Item &item) {
    return kExclusive ? add(multiply(value, item.in[1]), item.in[0]) : multiply(add(value, item.in[0]), item.in[1]);
  }
};

// Inputs dy, x, y of an inclusive scan, from ratios, which takes fewer registers than the scaled sums of
// LogSumExpGradient: c_j = exp(y_{j-1} - y_j), o_j = exp(x_j - y_j).
template <class T, class A = Accumulator<T>>
struct LogSumExpRatios : AffineBasics<A, A, 1> {
  static constexpr bool kNeighbour = true;
  static constexpr bool kHeavy = true;
  using Inputs = List<T, T, T>;
  using Outputs = List<T>;
  using Map = Affine<A>;
  using Item = Element<A, 3>;
  using Result = typename Basics<A, 1, A>::Result;
  BARACUDA_HD static A behind(A) { return -infinity<A>(); }
  BARACUDA_HD Map map(const Item &item) const {
    const A c = ratio(item.next, item.in[2]);
    return {c, c * item.in[0]};
  }
  BARACUDA_HD Map extend(const Map &l, const Item &item) const {
    const A c = ratio(item.next, item.in[2]);
    return {l.a * c, c * (item.in[0] + l.b)};
  }
  BARACUDA_HD A step(A value, const Item &item, Result &result) const {
    const A sum = item.in[0] + value;
    result.out[0] = ratio(item.in[1], item.in[2]) * sum;
    return ratio(item.next, item.in[2]) * sum;
  }

 private:
  // exp(p - q). Where an output is -inf, so are the elements up to there, whose share is 0.
  BARACUDA_HD static A ratio(A p, A q) { return exp2_of((p - finite_below(q)) * A(1.4426950408889634)); }
};

// A sum that starts again behind each record.
template <class V>
struct Segment {
  V sum;
  uint32_t restarted;
};

template <class T, class A, bool kExclusive, class V = Carried<T, A>>
struct ExtremumGradientBasics : Basics<V, 1, A> {
  static constexpr bool kRare = kExclusive;
  using Outputs = List<T>;
  using Map = Segment<V>;
  using Value = V;
  using Result = typename Basics<V, 1, A>::Result;
  BARACUDA_HD Map identity() const { return {start(), 0}; }
  BARACUDA_HD V start() const { return carried<V>(A(0)); }
  BARACUDA_HD Map combine(const Map &l, const Map &r) const {
    return {either(r.restarted != 0, r.sum, add(l.sum, r.sum)), l.restarted | r.restarted};
  }
  BARACUDA_HD V apply(const Map &map, V value) const {
    return either(map.restarted != 0, map.sum, add(value, map.sum));
  }
  BARACUDA_HD Map map_of(A dy, bool record) const { return {carried<V>(kExclusive || !record ? dy : A(0)), record}; }
  BARACUDA_HD Map extend_by(const Map &l, A dy, bool record) const {
    return {either(record, carried<V>(kExclusive ? dy : A(0)), add(l.sum, dy)), l.restarted | uint32_t(record)};
  }
  BARACUDA_HD V step_of(V value, A dy, bool record, Result &result) const {
    const V sum = add(value, dy);
    const A shown = rounded(kExclusive ? value : sum);
    result.out[0] = record ? shown : A(0);
    return either(record, carried<V>(kExclusive ? dy : A(0)), sum);
  }
};

// Inputs dy, marks: whether the element is a record.
template <class T, bool kExclusive, class A = Accumulator<T>>
struct MarkedExtremumGradient : ExtremumGradientBasics<T, A, kExclusive> {
  using Own = ExtremumGradientBasics<T, A, kExclusive>;
  using typename Own::Map;
  using typename Own::Result;
  using typename Own::Value;
  using Inputs = List<T, Boolean>;
  using Item = Element<A, 2>;
  BARACUDA_HD Map map(const Item &item) const { return this->map_of(item.in[0], item.in[1] != A(0)); }
  BARACUDA_HD Map extend(const Map &l, const Item &item) const {
    return this->extend_by(l, item.in[0], item.in[1] != A(0));
  }
  BARACUDA_HD Value step(Value value, const Item &item, Result &result) const {
    return this->step_of(value, item.in[0], item.in[1] != A(0), result);
  }
};

// Inputs dy, y of an inclusive scan. Element j is a record where y_j differs from y_{j-1}, NaN being equal to NaN.
template <class T, class A = Accumulator<T>>
struct ExtremumGradient : ExtremumGradientBasics<T, A, false> {
  using Own = ExtremumGradientBasics<T, A, false>;
  using typename Own::Map;
  using typename Own::Result;
  using typename Own::Value;
  static constexpr bool kNeighbour = true;
  using Inputs = List<T, T>;
  using Item = Element<A, 2>;
  // An extremum that is NaN stays, so where the neighbour is NaN the element is, too.
  BARACUDA_HD static bool record(const Item &item) { return item.in[1] != item.next && item.next == item.next; }
  // Any number that differs.
  BARACUDA_HD static A behind(A last) { return last == A(0) ? A(1) : A(0); }
  BARACUDA_HD Map map(const Item &item) const { return this->map_of(item.in[0], record(item)); }
  BARACUDA_HD Map extend(const Map &l, const Item &item) const { return this->extend_by(l, item.in[0], record(item)); }
  BARACUDA_HD Value step(Value value, const Item &item, Result &result) const {
    return this->step_of(value, item.in[0], record(item), result);
  }
};

// Inputs dh, a, h; outputs da, db. The value before the first step of the recurrence may be given
// (`initial`, as the neighbour of the last element in scan order); its gradient is the final value.
template <class T, class A = Accumulator<T>>
struct LinearRecurrenceGradient : AffineBasics<A, A, 2> {
  static constexpr bool kNeighbour = true;
  static constexpr bool kFinal = true;
  using Inputs = List<T, T, T>;
  using Outputs = List<T, T>;
  using Map = Affine<A>;
  using Item = Element<A, 3>;
  using Result = typename Basics<A, 2, A>::Result;
  BARACUDA_HD Map map(const Item &item) const { return {item.in[1], item.in[1] * item.in[0]}; }
  BARACUDA_HD A step(A value, const Item &item, Result &result) const {
    const A sum = item.in[0] + value;
    // `next` holds h0, or 0, behind the last element.
    result.out[0] = sum * item.next;
    result.out[1] = sum;
    return item.in[1] * sum;
  }
};

}  // namespace baracuda::scan
