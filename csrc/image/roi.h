// SPDX-License-Identifier: Apache-2.0
// Regions of interest: a batch number and a box, as rows of a tensor.
#pragma once

#include <cmath>
#include <cstdint>

#include "runtime/exact.h"

namespace baracuda {

// What values are interpolated, compared and added in.
template <class T>
struct ImageReal {
  using type = float;
};
template <>
struct ImageReal<double> {
  using type = double;
};

// A tensor [batch, channel, row, column] or [roi, channel, row, column]; strides in elements.
struct ImageView {
  void *data = nullptr;
  int64_t batch = 0;
  int64_t channel = 0;
  int64_t row = 0;
  int64_t column = 0;

  BARACUDA_HD int64_t plane(int64_t n, int64_t c) const { return n * batch + c * channel; }
  BARACUDA_HD int64_t cell(int64_t y, int64_t x) const { return y * row + x * column; }
};

// The rows (batch, x1, y1, x2, y2).
struct RoiRows {
  const void *data = nullptr;
  int64_t roi = 0;
  int64_t number = 0;
  bool is_double = false;

  BARACUDA_HD double at(int64_t r, int place) const {
    const int64_t offset = r * roi + place * number;
    return is_double ? static_cast<const double *>(data)[offset] : double(static_cast<const float *>(data)[offset]);
  }
  // Of `batches`; -1 where it is none of them.
  BARACUDA_HD int32_t batch(int64_t r, int32_t batches) const {
    const double given = at(r, 0);
    return given > -1 && given < batches ? int32_t(given) : -1;
  }
};

template <class Real>
BARACUDA_HD inline bool is_finite(Real value) {
  return value - value == Real(0);
}

}  // namespace baracuda
