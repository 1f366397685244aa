// SPDX-License-Identifier: Apache-2.0
#include "layout/write_slice.h"

#include <algorithm>

namespace baracuda {
namespace {

int64_t cell_address(const Tensor &tensor, bool packed) {
  const int64_t byte = int64_t(reinterpret_cast<uintptr_t>(tensor.data));
  return packed ? byte * kNibblesPerByte + tensor.phase : byte;
}

// Runs of half bytes keep to bytes of their own when they begin and end on bytes, or when at least
// one half byte lies between any two (strides being nested, so that runs come one after another).
bool keeps_to_own_bytes(const StridedCopy &copy) {
  bool whole_bytes = copy.dest % 2 == 0 && copy.run % 2 == 0;
  bool nested = true;
  bool gaps = true;
  int64_t span = copy.run;
  for (int axis = copy.rank - 1; axis >= 0; --axis) {
    const int64_t stride = copy.dest_stride[axis];
    whole_bytes = whole_bytes && stride % 2 == 0;
    nested = nested && stride >= span;
    gaps = gaps && stride > span;
    span += stride * (copy.extent[axis] - 1);
  }
  return nested && (whole_bytes || gaps);
}

}  // namespace

Tensor window_of(const Tensor &tensor, const Shape &start, const Shape &extent) {
  Tensor view = tensor;
  view.shape = extent;
  int64_t offset = 0;
  for (int axis = 0; axis < tensor.rank(); ++axis) offset += start[axis] * tensor.stride[axis];
  view.advance(offset);
  return view;
}

StridedCopy plan_copy(const Tensor &dest, const Tensor &source) {
  StridedCopy copy;
  copy.packed = is_packed(dest.dtype);
  copy.dest = cell_address(dest, copy.packed);
  copy.source = cell_address(source, copy.packed);
  const int64_t element = copy.packed ? 1 : nibbles(dest.dtype) / kNibblesPerByte;

  struct Axis {
    int64_t extent, dest, source;
  };
  Axis axes[kMaxRank];
  int count = 0;
  for (int axis = 0; axis < dest.rank(); ++axis) {
    const int64_t extent = dest.shape[axis];
    if (extent == 1) continue;
    Axis next = {extent, dest.stride[axis] * element, source.stride[axis] * element};
    if (next.dest < 0) {
      copy.dest += next.dest * (extent - 1);
      copy.source += next.source * (extent - 1);
      next.dest = -next.dest;
      next.source = -next.source;
    }
    // Insertion keeps equal steps in their order; tensors have few axes and most come sorted.
    int place = count++;
    for (; place > 0 && axes[place - 1].dest < next.dest; --place) axes[place] = axes[place - 1];
    axes[place] = next;
  }
  // From the innermost axis outwards: an axis that continues the one within it is part of it.
  copy.run = element;
  int merged = count;
  for (int axis = count - 1; axis >= 0; --axis) {
    const Axis &outer = axes[axis];
    if (merged == count && outer.dest == copy.run && outer.source == copy.run) {
      copy.run *= outer.extent;
      continue;
    }
    if (merged < count) {
      Axis &inner = axes[merged];
      if (outer.dest == inner.dest * inner.extent && outer.source == inner.source * inner.extent) {
        inner.extent *= outer.extent;
        continue;
      }
    }
    axes[--merged] = outer;
  }
  copy.source_low = copy.source_high = copy.source;
  for (int axis = merged; axis < count; ++axis) {
    copy.extent[copy.rank] = axes[axis].extent;
    copy.dest_stride[copy.rank] = axes[axis].dest;
    copy.source_stride[copy.rank] = axes[axis].source;
    copy.rows *= axes[axis].extent;
    (axes[axis].source < 0 ? copy.source_low : copy.source_high) += axes[axis].source * (axes[axis].extent - 1);
    ++copy.rank;
  }
  copy.source_high += copy.run;
  copy.isolated = !copy.packed || keeps_to_own_bytes(copy);
  return copy;
}

}  // namespace baracuda
