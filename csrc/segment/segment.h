// SPDX-License-Identifier: Apache-2.0
// Segment reductions as the kernels see them.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>

#include "runtime/bits.h"
#include "runtime/device.h"
#include "runtime/dtype.h"
#include "runtime/tensor.h"
#include "runtime/workspace.h"

namespace baracuda {

enum class SegmentKind { sum, mean, max, min, prod };
enum class SegmentIds { unsorted, sorted, offsets };

// What sums and products are kept in. Integers wrap around, and a mean of narrow ones is exact.
template <class T>
struct SegmentReal {
  using type = std::conditional_t<std::is_integral_v<T>, uint64_t, float>;
};
template <>
struct SegmentReal<double> {
  using type = double;
};

// A matrix; strides in elements.
struct SegmentView {
  void *data = nullptr;
  int64_t row = 0;
  int64_t column = 0;

  template <class T>
  BARACUDA_HD T &at(int64_t r, int64_t c) const {
    return static_cast<T *>(data)[r * row + c * column];
  }
};

// Ids or offsets.
struct SegmentIndices {
  const void *data = nullptr;
  int64_t stride = 0;
  bool wide = false;

  BARACUDA_HD int64_t operator[](int64_t at) const {
    return wide ? static_cast<const int64_t *>(data)[at * stride] : static_cast<const int32_t *>(data)[at * stride];
  }
};

// Sizes, and what all kernels need to know of the problem.
struct SegmentProblem {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t segments = 0;
  SegmentKind kind = SegmentKind::sum;
  SegmentIds ids = SegmentIds::unsorted;
  DLDataType dtype = {};
  bool wide_index = false;
  bool even = false;       // ties share
  bool any_order = false;  // sums may differ in their last bits from run to run

  bool extreme() const { return kind == SegmentKind::max || kind == SegmentKind::min; }
};

struct SegmentForward {
  SegmentProblem problem;
  SegmentView input;
  SegmentIndices ids;
  SegmentView output;
  SegmentView arg;          // without data: none is wanted
  uint64_t empty_bits = 0;  // the element that empty segments hold
};

struct SegmentBackward {
  SegmentProblem problem;
  SegmentView d_output;
  SegmentView input;  // with data where it was saved
  SegmentIndices ids;
  SegmentView arg;  // with data where it was saved
  SegmentView d_input;
};

// ---------------------------------------------------------------------------------------------------
// Maxima and minima. Elements of any type become unsigned integers whose order is the wanted one, so
// that a result never depends on which of two came first.

template <class Bits>
struct SegmentOrder {
  using Key = std::conditional_t<sizeof(Bits) == 8, uint64_t, uint32_t>;

  Bits magnitude;  // of floats, all bits but the sign; else none
  Bits sign;       // the sign bit, or none of unsigned integers
  Bits infinity;   // larger magnitudes are NaN
  Bits reverse;    // all bits for a minimum
  Bits nan;

  // NaN is above everything.
  BARACUDA_HD Key key(Bits bits) const {
    const Bits negative = Bits(Bits(0) - Bits(bits >> (8 * sizeof(Bits) - 1)));
    const Bits ordered = Bits(bits ^ Bits((negative & magnitude) | sign) ^ reverse);
    return Bits(bits & magnitude) > infinity ? ~Key(0) : Key(ordered);
  }
  BARACUDA_HD Bits bits(Key key) const {
    if (is_nan(key)) return nan;
    const Bits ordered = Bits(Bits(key) ^ reverse);
    const bool positive = Bits(ordered >> (8 * sizeof(Bits) - 1)) != 0;
    return Bits(ordered ^ sign ^ (positive ? Bits(0) : magnitude));
  }
  BARACUDA_HD bool is_nan(Key key) const { return magnitude != 0 && key == ~Key(0); }
};

template <class Bits>
SegmentOrder<Bits> segment_order(DLDataType dtype, bool minimum) {
  constexpr int kWidth = 8 * sizeof(Bits);
  SegmentOrder<Bits> order = {};
  order.infinity = Bits(~Bits(0));
  order.reverse = minimum ? Bits(~Bits(0)) : Bits(0);
  if (dtype.code == kDLUInt) return order;
  order.sign = Bits(Bits(1) << (kWidth - 1));
  if (dtype.code == kDLInt) return order;
  const int fraction = dtype == DTypeOf<bfloat16>::value ? 7 : kWidth == 16 ? 10 : kWidth == 32 ? 23 : 52;
  order.magnitude = Bits(order.sign - 1);
  order.infinity = Bits(order.magnitude - Bits((uint64_t(1) << fraction) - 1));
  order.nan = Bits(order.infinity | Bits(uint64_t(1) << (fraction - 1)));
  return order;
}

// ---------------------------------------------------------------------------------------------------
// Reductions: what is kept of the rows seen so far. `Row` counts rows, and its highest value stands
// for none.

template <class T>
struct SegmentSum {
  using Element = T;
  using State = SegmentReal<T>::type;
  using Row = uint32_t;

  BARACUDA_HD State identity() const { return State(0); }
  BARACUDA_HD void add(State &state, T element, Row) const { state += State(element); }
  BARACUDA_HD void join(State &state, const State &other) const { state += other; }
};

template <class T>
struct SegmentProd {
  using Element = T;
  using State = SegmentReal<T>::type;
  using Row = uint32_t;

  BARACUDA_HD State identity() const { return State(1); }
  BARACUDA_HD void add(State &state, T element, Row) const { state *= State(element); }
  BARACUDA_HD void join(State &state, const State &other) const { state *= other; }
};

// The mean of `count` rows, from their sum.
template <class T, class Real>
BARACUDA_HD inline Real segment_mean(Real sum, int64_t count) {
  if constexpr (std::is_integral_v<T>) {
    const int64_t whole = int64_t(sum) / count;
    return Real(whole - (int64_t(sum) % count < 0));
  } else {
    return sum / Real(count);
  }
}

template <class Bits>
struct SegmentMax {
  using Element = Bits;
  using State = SegmentOrder<Bits>::Key;
  using Row = uint32_t;

  SegmentOrder<Bits> order;

  BARACUDA_HD State identity() const { return 0; }
  BARACUDA_HD void add(State &state, Bits element, Row) const { join(state, order.key(element)); }
  BARACUDA_HD void join(State &state, const State &other) const { state = other > state ? other : state; }
};

// A maximum and the first row that holds it.
template <class Bits, class RowNumber>
struct SegmentArgMax {
  using Element = Bits;
  using Row = RowNumber;
  struct State {
    SegmentOrder<Bits>::Key key;
    Row row;
  };
  static constexpr Row kNone = ~Row(0);

  SegmentOrder<Bits> order;

  BARACUDA_HD State identity() const { return {0, kNone}; }
  BARACUDA_HD void add(State &state, Bits element, Row row) const { join(state, {order.key(element), row}); }
  BARACUDA_HD void join(State &state, const State &other) const {
    // The lowest integer has the identity's key, but no row is above kNone.
    if (other.key > state.key || (other.key == state.key && other.row < state.row)) state = other;
  }
};

// A maximum and how many rows hold it; of a NaN, the first row that does.
template <class Bits, class RowNumber>
struct SegmentTally {
  using Element = Bits;
  using Row = RowNumber;
  struct State {
    SegmentOrder<Bits>::Key key;
    Row tally;
  };

  SegmentOrder<Bits> order;

  BARACUDA_HD State identity() const { return {0, 0}; }
  BARACUDA_HD void add(State &state, Bits element, Row row) const {
    const auto key = order.key(element);
    join(state, {key, order.is_nan(key) ? row : Row(1)});
  }
  BARACUDA_HD void join(State &state, const State &other) const {
    if (other.key > state.key) {
      state = other;
    } else if (other.key == state.key) {
      const Row least = other.tally < state.tally ? other.tally : state.tally;
      state.tally = order.is_nan(state.key) ? least : state.tally + other.tally;
    }
  }
};

// A product that neither overflows nor loses its factors: the finite ones that are not zero as
// mantissa * 2^exponent, the sign of all in the mantissa, and how many of the others there are,
// counted up to two.
template <class Real>
struct SegmentProduct {
  int64_t exponent;
  Real mantissa;  // 0.5 <= |mantissa| < 1
  uint8_t zeros;
  uint8_t infinities;
  uint8_t nans;
};

// The bits of floats.
template <class Real>
struct SegmentParts {
  using Bits = BitsOf<Real>;
  static constexpr int kFraction = sizeof(Real) == 8 ? 52 : 23;
  static constexpr Bits kExponents = (Bits(1) << (8 * sizeof(Real) - 1 - kFraction)) - 1;
  static constexpr int kHalf = int(kExponents / 2) - 1;  // the exponent of 0.5, as it is kept

  BARACUDA_HD static int exponent(Real x) { return int(bit_cast<Bits>(x) >> kFraction & kExponents); }
  BARACUDA_HD static bool normal(int exponent) { return exponent > 0 && exponent < int(kExponents); }
  BARACUDA_HD static Real with_exponent(Real x, int exponent) {
    return bit_cast<Real>(Bits((bit_cast<Bits>(x) & ~Bits(kExponents << kFraction)) | Bits(exponent) << kFraction));
  }
};

template <class Real>
BARACUDA_HD inline SegmentProduct<Real> segment_factor(Real x) {
  SegmentProduct<Real> factor = {1, Real(0.5), 0, 0, 0};
  if (x != x) {
    factor.nans = 1;
  } else if (x == 0 || x - x != 0) {
    (x == 0 ? factor.zeros : factor.infinities) = 1;
    factor.mantissa = std::copysign(Real(0.5), x);
  } else {
    int exponent = 0;
    factor.mantissa = std::frexp(x, &exponent);
    factor.exponent = exponent;
  }
  return factor;
}

BARACUDA_HD inline uint8_t segment_up_to_two(int count) { return uint8_t(count < 2 ? count : 2); }

template <class Real>
BARACUDA_HD inline void segment_multiply(SegmentProduct<Real> &product, Real mantissa, int64_t exponent) {
  product.exponent += exponent;
  product.mantissa *= mantissa;
  if (std::fabs(product.mantissa) < Real(0.5)) {
    product.mantissa *= 2;
    product.exponent -= 1;
  }
}

template <class Real>
BARACUDA_HD inline void segment_multiply(SegmentProduct<Real> &product, const SegmentProduct<Real> &factor) {
  segment_multiply(product, factor.mantissa, factor.exponent);
  product.zeros = segment_up_to_two(product.zeros + factor.zeros);
  product.infinities = segment_up_to_two(product.infinities + factor.infinities);
  product.nans = segment_up_to_two(product.nans + factor.nans);
}

template <class Real>
BARACUDA_HD inline void segment_multiply(SegmentProduct<Real> &product, Real x) {
  using Parts = SegmentParts<Real>;
  const int exponent = Parts::exponent(x);
  if (Parts::normal(exponent)) {
    segment_multiply(product, Parts::with_exponent(x, Parts::kHalf), exponent - Parts::kHalf);
  } else {
    segment_multiply(product, segment_factor(x));
  }
}

// dy times the product of all factors but x, which is one of them.
template <class Real>
BARACUDA_HD inline Real segment_product_gradient(const SegmentProduct<Real> &product, Real x, Real dy) {
  const SegmentProduct<Real> factor = segment_factor(x);
  // Of two, one is left.
  const bool nan = product.nans > factor.nans;
  const bool infinity = product.infinities > factor.infinities;
  const bool zero = product.zeros > factor.zeros;
  const Real mantissa = product.mantissa / factor.mantissa;
  if (nan || (infinity && zero)) return Real(NAN);
  if (zero) return dy * std::copysign(Real(0), mantissa);
  if (infinity) return dy * std::copysign(Real(INFINITY), mantissa);
  if (dy == 0 || dy - dy != 0) return dy * mantissa;
  int exponent = 0;
  const Real scaled = std::frexp(dy, &exponent) * mantissa;
  int64_t power = product.exponent - factor.exponent + exponent;
  constexpr int64_t kLimit = 1 << 14;
  power = power < -kLimit ? -kLimit : power > kLimit ? kLimit : power;
  return std::ldexp(scaled, int(power));
}

// A product in less memory, once all factors are in it. An exponent is bounded where more makes no difference.
template <class Real>
struct SegmentPackedProduct {
  using Bits = BitsOf<Real>;
  static constexpr int kMostExponent = 1 << 20;
  static constexpr int kCountBits = 6;  // two for each of zeros, infinities and NaN

  Bits mantissa;
  Bits rest;

  BARACUDA_HD int exponent() const { return int(uint32_t(rest) >> kCountBits) - kMostExponent; }
  BARACUDA_HD bool finite() const { return (uint32_t(rest) & ((1u << kCountBits) - 1)) == 0; }
};

template <class Real>
BARACUDA_HD inline SegmentPackedProduct<Real> segment_pack(const SegmentProduct<Real> &product) {
  using Packed = SegmentPackedProduct<Real>;
  using Bits = Packed::Bits;
  constexpr int64_t kMost = Packed::kMostExponent;
  const int64_t exponent = product.exponent < -kMost ? -kMost : product.exponent > kMost ? kMost : product.exponent;
  const uint32_t counts = uint32_t(product.zeros) << 4 | uint32_t(product.infinities) << 2 | uint32_t(product.nans);
  return {bit_cast<Bits>(product.mantissa), Bits(uint32_t(exponent + kMost) << Packed::kCountBits | counts)};
}

template <class Real>
BARACUDA_HD inline Real segment_product_gradient(const SegmentPackedProduct<Real> &packed, Real x, Real dy) {
  using Parts = SegmentParts<Real>;
  const Real mantissa = bit_cast<Real>(packed.mantissa);
  const int of_x = Parts::exponent(x);
  const int of_dy = Parts::exponent(dy);
  if (Parts::normal(of_x) && Parts::normal(of_dy) && packed.finite()) {
    const Real scaled = Parts::with_exponent(dy, Parts::kHalf) * (mantissa / Parts::with_exponent(x, Parts::kHalf));
    const int exponent = Parts::exponent(scaled) + packed.exponent() + of_dy - of_x;
    if (Parts::normal(exponent)) return Parts::with_exponent(scaled, exponent);
  }
  const uint32_t counts = uint32_t(packed.rest);
  const SegmentProduct<Real> product = {packed.exponent(), mantissa, uint8_t(counts >> 4 & 3), uint8_t(counts >> 2 & 3),
                                        uint8_t(counts & 3)};
  return segment_product_gradient(product, x, dy);
}

template <class T>
struct SegmentOthers {
  using Element = T;
  using Real = SegmentReal<T>::type;
  using State = SegmentProduct<Real>;
  using Row = uint32_t;

  BARACUDA_HD State identity() const { return {1, Real(0.5), 0, 0, 0}; }
  BARACUDA_HD void add(State &state, T element, Row) const { segment_multiply(state, Real(element)); }
  BARACUDA_HD void join(State &state, const State &other) const { segment_multiply(state, other); }
};

// Calls body with the bits of elements of this size.
template <class Body>
void dispatch_segment_bits(DLDataType dtype, const Body &body) {
  switch (dtype.bits) {
    case 8:
      return body(TypeTag<uint8_t>{});
    case 16:
      return body(TypeTag<uint16_t>{});
    case 32:
      return body(TypeTag<uint32_t>{});
    default:
      return body(TypeTag<uint64_t>{});
  }
}

void segment_reduce_cpu(const SegmentForward &call);
void segment_reduce_backward_cpu(const SegmentBackward &call);
// What runs, and the size of its workspace.
struct SegmentWay {
  const char *path;
  size_t workspace;
  bool deterministic = true;
};
SegmentWay segment_reduce_way(const SegmentProblem &problem, bool with_arg);
SegmentWay segment_reduce_backward_way(const SegmentProblem &problem, bool from_arg);
// Enqueue on the current device.
void segment_reduce_cuda(const SegmentForward &call, std::byte *workspace, Stream stream);
void segment_reduce_backward_cuda(const SegmentBackward &call, std::byte *workspace, Stream stream);
// The most rows that may come in any order, or among which arg may choose.
constexpr int64_t kSegmentMostRows = (int64_t(1) << 32) - 2;
// The architecture whose machine code runs: "sm_90".
std::string segment_arch(const char *plan);

}  // namespace baracuda
