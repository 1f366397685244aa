// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "runtime/half.h"

namespace baracuda {

// Where host and device must round alike, nothing may be contracted to a fused multiply-add or replaced by an
// approximate division.
#if defined(__CUDA_ARCH__)
__device__ inline float exact_add(float a, float b) { return __fadd_rn(a, b); }
__device__ inline float exact_multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ inline float exact_divide(float a, float b) { return __fdiv_rn(a, b); }
__device__ inline double exact_add(double a, double b) { return __dadd_rn(a, b); }
__device__ inline double exact_multiply(double a, double b) { return __dmul_rn(a, b); }
__device__ inline double exact_divide(double a, double b) { return __ddiv_rn(a, b); }
#else
// The host's baseline, x86-64, has no fused instructions to contract to.
template <class Real>
inline Real exact_add(Real a, Real b) {
  return a + b;
}
template <class Real>
inline Real exact_multiply(Real a, Real b) {
  return a * b;
}
template <class Real>
inline Real exact_divide(Real a, Real b) {
  return a / b;
}
#endif

}  // namespace baracuda
