// SPDX-License-Identifier: Apache-2.0
// Where the windows of fractional pooling lie along one axis, for the CPU and the CUDA kernels alike.
#pragma once

#include <cstdint>

#include "runtime/exact.h"
#include "runtime/half.h"

namespace baracuda {

enum class Placement { even, torch };

// One axis: `out` windows of `window` cells over `in` cells.
//
// A window's start depends on its plane's sample u, but only a little: it lies in
// [earliest(i), latest(i)] for every u. The backward pass needs no more than that.
struct PoolAxis {
  int32_t in = 1;
  int32_t window = 1;
  int32_t out = 1;
  // How far rounding may move a start beyond floor(i * last_start / (out - 1)) and the cell after
  // it; `tie` is 1 where only an exact quotient may fall one short. All zero for Placement::even.
  int32_t below = 0;
  int32_t above = 0;
  int32_t tie = 0;
  // A single window lies at the end, whatever u is.
  int32_t pinned = 0;

  BARACUDA_HD int32_t last_start() const { return in - window; }
  BARACUDA_HD int32_t earliest(int32_t i) const;
  BARACUDA_HD int32_t latest(int32_t i) const;
};

// Quotients of numbers that are not negative; on the GPU 32 bits are much faster than 64.
BARACUDA_HD inline int64_t quotient(int64_t dividend, int32_t divisor) {
  if (uint64_t(dividend) <= 0xffffffffu) return int64_t(uint32_t(dividend) / uint32_t(divisor));
  return dividend / divisor;
}

// Samples belong to [0, 1). Others are moved there, NaN to 0, so that no window can leave the input.
template <class Real>
BARACUDA_HD inline Real unit_sample(Real u) {
  constexpr Real kMost = sizeof(Real) == 4 ? Real(0x1.fffffep-1) : Real(0x1.fffffffffffffp-1);
  return u > Real(0) ? (u < kMost ? u : kMost) : Real(0);
}

BARACUDA_HD inline int32_t clamp_start(int64_t start, int32_t last) {
  return start < 0 ? 0 : start > last ? last : int32_t(start);
}

// floor(i * last_start / (out - 1) + u): the quotient exactly, then one rounding of its fraction.
template <class Real>
struct EvenStart {
  int32_t whole;
  Real fraction;

  BARACUDA_HD EvenStart(const PoolAxis &axis, int32_t i) {
    const int64_t product = int64_t(i) * axis.last_start();
    whole = int32_t(quotient(product, axis.out - 1));
    const int32_t rest = int32_t(product - int64_t(whole) * (axis.out - 1));
    fraction = exact_divide(Real(rest), Real(axis.out - 1));
  }
  // `u` is in [0, 1).
  BARACUDA_HD int32_t at(const PoolAxis &axis, Real u) const {
    const int32_t start = whole + (exact_add(fraction, u) >= Real(1));
    return start < axis.last_start() ? start : axis.last_start();
  }
};

// The only window of an axis.
template <class Real>
BARACUDA_HD inline int32_t single_start(const PoolAxis &axis, Placement placement, Real u) {
  if (placement == Placement::torch) return axis.last_start();
  return clamp_start(int64_t(exact_multiply(u, Real(axis.last_start()))), axis.last_start());
}

// PyTorch's rule; `step` is torch_step(axis).
template <class Real>
BARACUDA_HD inline Real torch_step(const PoolAxis &axis) {
  return exact_divide(Real(axis.last_start()), Real(axis.out - 1));
}
template <class Real>
BARACUDA_HD inline int32_t torch_start(const PoolAxis &axis, int32_t i, Real u, Real step) {
  if (i == axis.out - 1) return axis.last_start();
  const int64_t start = int64_t(exact_multiply(exact_add(Real(i), u), step)) - int64_t(exact_multiply(u, step));
  return clamp_start(start, axis.last_start());
}

// The first cell of window i.
template <class Real>
BARACUDA_HD inline int32_t window_start(const PoolAxis &axis, Placement placement, int32_t i, Real u) {
  u = unit_sample(u);
  if (axis.out == 1) return single_start(axis, placement, u);
  if (placement == Placement::torch) return torch_start(axis, i, u, torch_step<Real>(axis));
  return EvenStart<Real>(axis, i).at(axis, u);
}

BARACUDA_HD inline int32_t PoolAxis::earliest(int32_t i) const {
  if (out == 1) return pinned ? last_start() : 0;
  int64_t product = int64_t(i) * last_start() - tie;
  if (product < 0) product = 0;
  return clamp_start(quotient(product, out - 1) - below, last_start());
}

BARACUDA_HD inline int32_t PoolAxis::latest(int32_t i) const {
  if (out == 1) return last_start();
  return clamp_start(quotient(int64_t(i) * last_start(), out - 1) + 1 + above, last_start());
}

struct PoolRange {
  int32_t begin;
  int32_t end;
};

// The windows that hold a cell for some u: those with earliest(i) <= cell < latest(i) + window.
BARACUDA_HD inline PoolRange windows_over(const PoolAxis &axis, int32_t cell) {
  if (axis.out == 1) return {0, !axis.pinned || cell >= axis.last_start()};
  const int32_t last = axis.last_start();
  if (last == 0) return {0, axis.out};
  const int64_t steps = axis.out - 1;
  const int64_t behind = int64_t(cell) - axis.window - axis.above;
  const int64_t begin = behind <= 0 ? 0 : quotient(behind * steps + last - 1, last);
  const int64_t end = quotient((int64_t(cell) + 1 + axis.below) * steps - 1 + axis.tie, last) + 1;
  return {int32_t(begin), int32_t(end < axis.out ? end : axis.out)};
}

// The extents must have been checked. `real_bits`: 24 for float, 53 for double.
inline PoolAxis make_pool_axis(int32_t in, int32_t window, int32_t out, Placement placement, int real_bits) {
  PoolAxis axis;
  axis.in = in;
  axis.window = window;
  axis.out = out;
  axis.pinned = placement == Placement::torch;
  if (placement == Placement::torch) {
    // Each of the two products that PyTorch truncates carries a few relative errors of half a unit
    // in the last place; extents below 2^22 are converted exactly. Their difference is within
    // `error` of i * last_start / (out - 1), give or take what truncation takes away.
    const double units = in < (1 << 22) ? 6 : 16;
    const double error = units * in / double(int64_t(1) << real_bits);
    if (error * (out - 1) < 1) {
      axis.tie = 1;
    } else {
      axis.below = axis.above = 1 + int32_t(error);
    }
  }
  return axis;
}

// The cells that a window may hold are at most this many.
inline int64_t window_reach(const PoolAxis &axis) {
  if (axis.out == 1) return axis.pinned ? axis.window : axis.in;
  const int64_t reach = int64_t(axis.window) + 1 + axis.below + axis.above + axis.tie;
  return reach < axis.in ? reach : axis.in;
}

// The windows that may hold one of `cells` neighbouring cells are at most this many.
inline int64_t windows_over_most(const PoolAxis &axis, int64_t cells) {
  if (axis.out == 1) return 1;
  if (axis.last_start() == 0) return axis.out;
  const int64_t steps = axis.out - 1;
  const int64_t apart = ((cells + axis.window + axis.below + axis.above) * steps - 1 + axis.tie) / axis.last_start();
  return apart < steps ? apart + 1 : axis.out;
}

}  // namespace baracuda
