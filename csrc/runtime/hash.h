// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace baracuda {

// 2^64 over the golden ratio. Fibonacci hashing takes the upper bits of a product with it.
constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;

// A place among 2^bits.
constexpr uint64_t fibonacci_hash(uint64_t key, int bits) { return key * kGolden >> (64 - bits); }

}  // namespace baracuda
