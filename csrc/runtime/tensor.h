// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <dlpack/dlpack.h>

#include "baracuda/plan.h"
#include "runtime/dtype.h"

namespace baracuda {

constexpr int kMaxRank = BARACUDA_MAX_RANK;

struct Shape {
  int rank = 0;
  int64_t extent[kMaxRank];  // those beyond the rank are not set

  int64_t &operator[](int axis) { return extent[axis]; }
  int64_t operator[](int axis) const { return extent[axis]; }
  int64_t count() const {
    int64_t product = 1;
    for (int axis = 0; axis < rank; ++axis) product *= extent[axis];
    return product;
  }
};

// "(2, 3)", "(2,)"
std::string to_string(const Shape &shape);
std::string shape_text(const int64_t *extents, int rank);

// What a kernel sees of an operand: checked, with the byte offset applied and strides explicit.
// `data` is NULL where an optional operand is absent.
struct Tensor {
  std::byte *data = nullptr;
  DLDataType dtype = {};
  Shape shape;
  int64_t stride[kMaxRank];  // in elements
  // Packed types: half bytes from `data` to the first element, 0 or 1.
  int phase = 0;

  int rank() const { return shape.rank; }
  bool present() const { return data != nullptr; }
  // Moves the first element by this many elements' places.
  void advance(int64_t elements) {
    const int64_t halves = phase + elements * nibbles(dtype);
    data += halves >> 1;
    phase = int(halves & 1);
  }
  template <class T>
  T *as() const {
    return reinterpret_cast<T *>(data);
  }
};

void set_row_major_strides(Tensor &tensor);
// Strides of axes of extent 1, and of tensors without elements, do not matter.
bool is_row_major(const Tensor &tensor);
// Bytes that hold `count` elements packed back to back.
constexpr int64_t storage_bytes(DLDataType dtype, int64_t count) {
  return (count * nibbles(dtype) + kNibblesPerByte - 1) / kNibblesPerByte;
}

}  // namespace baracuda
