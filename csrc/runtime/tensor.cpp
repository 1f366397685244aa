// SPDX-License-Identifier: Apache-2.0
#include "runtime/tensor.h"

namespace baracuda {

std::string shape_text(const int64_t *extents, int rank) {
  std::string out = "(";
  for (int axis = 0; axis < rank; ++axis) {
    if (axis) out += ", ";
    out += std::to_string(extents[axis]);
  }
  return out + (rank == 1 ? ",)" : ")");
}

std::string to_string(const Shape &shape) { return shape_text(shape.extent, shape.rank); }

void set_row_major_strides(Tensor &tensor) {
  int64_t step = 1;
  for (int axis = tensor.rank() - 1; axis >= 0; --axis) {
    tensor.stride[axis] = step;
    step *= tensor.shape[axis] > 0 ? tensor.shape[axis] : 1;
  }
}

bool is_row_major(const Tensor &tensor) {
  int64_t step = 1;
  bool matches = true;
  for (int axis = tensor.rank() - 1; axis >= 0; --axis) {
    if (tensor.shape[axis] == 0) return true;
    if (tensor.shape[axis] != 1 && tensor.stride[axis] != step) matches = false;
    step *= tensor.shape[axis];
  }
  return matches;
}

}  // namespace baracuda
