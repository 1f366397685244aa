// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "runtime/device.h"
#include "runtime/tensor.h"
#include "scan/scan_ops.h"

namespace baracuda::scan {

// Inputs, outputs, and the values before the first and after the last element.
constexpr int kMaxScanOperands = 7;

// The operands of one scan: `rows` independent lines of `length` elements. Steps are in elements
// and in scan order, so a reverse scan begins at the far end and steps backwards. Row axes run from
// the one with the longest steps to the one with the shortest; axes that continue each other in
// every operand are one.
struct Geometry {
  int64_t length = 0;
  int64_t rows = 1;
  int rank = 0;
  int64_t extent[kMaxRank] = {};
  std::byte *data[kMaxScanOperands] = {};  // NULL: absent
  int64_t step[kMaxScanOperands] = {};
  int64_t stride[kMaxScanOperands][kMaxRank] = {};
};

}  // namespace baracuda::scan
