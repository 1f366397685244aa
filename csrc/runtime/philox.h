// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "runtime/half.h"

namespace baracuda {

struct PhiloxWords {
  uint32_t word[4];
};

// Philox 4x32-10: four random words from a counter and a key, on the CPU and on the GPU alike.
// J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, Parallel Random Numbers: As Easy as 1, 2, 3, 2011.
BARACUDA_HD inline PhiloxWords philox_4x32_10(PhiloxWords counter, uint64_t key) {
  uint32_t key0 = uint32_t(key);
  uint32_t key1 = uint32_t(key >> 32);
  uint32_t *c = counter.word;
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t(0xD2511F53u) * c[0];
    const uint64_t product1 = uint64_t(0xCD9E8D57u) * c[2];
    const uint32_t c1 = c[1];
    const uint32_t c3 = c[3];
    c[0] = uint32_t(product1 >> 32) ^ c1 ^ key0;
    c[1] = uint32_t(product1);
    c[2] = uint32_t(product0 >> 32) ^ c3 ^ key1;
    c[3] = uint32_t(product0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// A float in [0, 1) from the upper 24 bits, exactly.
BARACUDA_HD inline float unit_float(uint32_t word) { return float(word >> 8) * 0x1p-24f; }

}  // namespace baracuda
