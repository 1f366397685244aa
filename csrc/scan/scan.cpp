// SPDX-License-Identifier: Apache-2.0
#include "scan/scan.h"

#include <cstdlib>

namespace baracuda::scan {

void GeometryBuilder::add(int slot, const Tensor &tensor, bool line) {
  if (!tensor.present()) return;
  data_[slot] = tensor.data;
  for (int axis = 0, own = 0; axis < shape_.rank; ++axis) {
    if (!line && axis == axis_) continue;
    stride_[slot][axis] = tensor.stride[own++];
  }
}

void GeometryBuilder::line(int slot, const Tensor &tensor) {
  add(slot, tensor, true);
  if (reverse_ && data_[slot]) data_[slot] += (shape_[axis_] - 1) * stride_[slot][axis_] * (tensor.dtype.bits / 8);
}

void GeometryBuilder::row(int slot, const Tensor &tensor) { add(slot, tensor, false); }

Geometry GeometryBuilder::build(int leader) const {
  Geometry g;
  g.length = shape_[axis_];
  int order[kMaxRank];
  int count = 0;
  for (int axis = 0; axis < shape_.rank; ++axis) {
    if (axis == axis_ || shape_[axis] == 1) continue;
    int place = count++;
    const auto steps = [&](int of) { return std::llabs(stride_[leader][of]); };
    for (; place > 0 && steps(order[place - 1]) < steps(axis); --place) order[place] = order[place - 1];
    order[place] = axis;
  }
  for (int slot = 0; slot < kMaxScanOperands; ++slot) {
    g.data[slot] = data_[slot];
    g.step[slot] = reverse_ ? -stride_[slot][axis_] : stride_[slot][axis_];
  }
  for (int i = 0; i < count; ++i) {
    const int axis = order[i];
    g.rows *= shape_[axis];
    bool continues = g.rank > 0;
    for (int slot = 0; continues && slot < kMaxScanOperands; ++slot)
      continues = !data_[slot] || g.stride[slot][g.rank - 1] == stride_[slot][axis] * shape_[axis];
    if (continues) {
      g.extent[g.rank - 1] *= shape_[axis];
    } else {
      g.extent[g.rank++] = shape_[axis];
    }
    for (int slot = 0; slot < kMaxScanOperands; ++slot) g.stride[slot][g.rank - 1] = stride_[slot][axis];
  }
  return g;
}

}  // namespace baracuda::scan
