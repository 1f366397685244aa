// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace baracuda {

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
  using type = uint64_t;
};

// The unsigned integer of so many bytes.
template <int kBytes>
using Unsigned = typename UnsignedOf<kBytes>::type;

template <class T>
using BitsOf = Unsigned<sizeof(T)>;

}  // namespace baracuda
