// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <dlpack/dlpack.h>

#include "runtime/half.h"

namespace baracuda {

constexpr bool operator==(DLDataType a, DLDataType b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

struct DTypeInfo {
  const char *name;  // as NumPy and ml_dtypes have it
  DLDataType dtype;
  // An address must be a multiple of this many bytes. A complex number needs what its parts need.
  int alignment;
};

// NULL when the type is none that the library knows.
const DTypeInfo *find_dtype(DLDataType dtype);
// Also for types that the library does not know: "float4_e2m1fn", "code 23 of 6 bits".
const char *dtype_name(DLDataType dtype);

// Addresses and strides of packed int4 and uint4 are counted in half bytes, so that one unit fits
// every type.
constexpr int64_t kNibblesPerByte = 2;
constexpr int64_t nibbles(DLDataType dtype) { return dtype.bits / 4; }
constexpr bool is_packed(DLDataType dtype) { return dtype.bits == 4; }

template <class T>
struct DTypeOf;
#define BARACUDA_DTYPE_OF(type, code_, bits_)                                \
  template <>                                                                \
  struct DTypeOf<type> {                                                     \
    static constexpr DLDataType value = {uint8_t(code_), uint8_t(bits_), 1}; \
  };
BARACUDA_DTYPE_OF(bool, kDLBool, 8)
BARACUDA_DTYPE_OF(int8_t, kDLInt, 8)
BARACUDA_DTYPE_OF(int16_t, kDLInt, 16)
BARACUDA_DTYPE_OF(int32_t, kDLInt, 32)
BARACUDA_DTYPE_OF(int64_t, kDLInt, 64)
BARACUDA_DTYPE_OF(uint8_t, kDLUInt, 8)
BARACUDA_DTYPE_OF(uint16_t, kDLUInt, 16)
BARACUDA_DTYPE_OF(uint32_t, kDLUInt, 32)
BARACUDA_DTYPE_OF(uint64_t, kDLUInt, 64)
BARACUDA_DTYPE_OF(float16, kDLFloat, 16)
BARACUDA_DTYPE_OF(bfloat16, kDLBfloat, 16)
BARACUDA_DTYPE_OF(float, kDLFloat, 32)
BARACUDA_DTYPE_OF(double, kDLFloat, 64)
#undef BARACUDA_DTYPE_OF

template <class T>
struct TypeTag {
  using type = T;
};

// Calls body(TypeTag<T>{}) for the one of Types whose dtype this is; false when it is none of them.
template <class... Types, class Body>
bool dispatch_dtype(DLDataType dtype, Body &&body) {
  return ((dtype == DTypeOf<Types>::value && (body(TypeTag<Types>{}), true)) || ...);
}

}  // namespace baracuda
