// SPDX-License-Identifier: Apache-2.0
#include "layout/dynamic_write.h"

namespace baracuda {
namespace {

int64_t cell_address(const Tensor &tensor, bool packed) {
  const int64_t byte = int64_t(reinterpret_cast<uintptr_t>(tensor.data));
  return packed ? byte * kNibblesPerByte + tensor.phase : byte;
}

int64_t written_stride(Motion motion, const DynamicAxis &axis) {
  return motion == Motion::read ? axis.block_stride : axis.window_stride;
}

// Axes along which the large tensor has one entry go outermost, whatever their steps say.
bool comes_after(Motion motion, const DynamicAxis &left, const DynamicAxis &right) {
  if (left.bound == 1 || right.bound == 1) return left.bound != 1 && right.bound == 1;
  return written_stride(motion, left) < written_stride(motion, right);
}

// Runs of half bytes keep to bytes of their own where each row of the large tensor does (it begins
// on a byte and is no longer than the steps between rows), or where a half byte or more lies
// between rows. Then it doesn't matter where in its row a run is.
bool keeps_to_own_bytes(const DynamicCopy &copy) {
  bool whole_bytes = copy.window % 2 == 0;
  bool nested = true;
  bool gaps = true;
  int64_t span = 1;
  for (int index = copy.rank - 1; index >= 0; --index) {
    const DynamicAxis &axis = copy.axis[index];
    if (axis.bound == 1) continue;
    if (index < copy.rank - 1) {
      whole_bytes = whole_bytes && axis.window_stride % 2 == 0;
      gaps = gaps && axis.window_stride > span;
    }
    nested = nested && axis.window_stride >= span;
    span += axis.window_stride * (axis.bound - 1);
  }
  return nested && (whole_bytes || gaps);
}

// An axis that is covered whole under clamp starts at 0, so that it and the one around it are one
// where both sides are consecutive.
bool merge_into(DynamicAxis &outer, const DynamicAxis &inner, bool clamp) {
  if (!clamp || inner.bound != inner.extent || outer.flipped || inner.flipped) return false;
  if (outer.window_stride != inner.window_stride * inner.bound) return false;
  if (outer.block_stride != inner.block_stride * inner.extent) return false;
  outer.bound *= inner.bound;
  outer.extent *= inner.extent;
  outer.unit *= inner.bound;
  outer.window_stride = inner.window_stride;
  outer.block_stride = inner.block_stride;
  return true;
}

}  // namespace

DynamicCopy plan_dynamic(Motion motion, const Tensor &large, const Tensor &block, const Starts &starts) {
  DynamicCopy copy;
  copy.motion = motion;
  copy.packed = is_packed(large.dtype);
  copy.element = copy.packed ? 1 : nibbles(large.dtype) / kNibblesPerByte;
  copy.window = cell_address(large, copy.packed);
  const bool zero = motion == Motion::zero;
  copy.block = zero ? 0 : cell_address(block, copy.packed);
  for (int axis = 0; axis < large.rank(); ++axis) {
    const int64_t step = large.stride[axis] * copy.element;
    DynamicAxis next = {
        large.shape[axis], block.shape[axis], step, zero ? step : block.stride[axis] * copy.element, axis, 1, false};
    // Steps of axes with one entry mean nothing and may be anything.
    if (next.bound == 1) next.window_stride = copy.element;
    if (next.extent == 1) next.block_stride = next.window_stride;
    if (written_stride(motion, next) < 0) {
      copy.window += next.window_stride * (next.bound - 1);
      copy.block += next.block_stride * (next.extent - 1);
      next.window_stride = -next.window_stride;
      next.block_stride = -next.block_stride;
      next.flipped = true;
    }
    // Insertion keeps equal steps in their order; tensors have few axes and most come sorted.
    int place = copy.rank++;
    for (; place > 0 && comes_after(motion, copy.axis[place - 1], next); --place)
      copy.axis[place] = copy.axis[place - 1];
    copy.axis[place] = next;
  }
  // Under clamp an axis with one entry has one place.
  int kept = 0;
  for (int index = 0; index < copy.rank; ++index) {
    const DynamicAxis &next = copy.axis[index];
    const bool batch = starts.batched && next.column == 0;
    if (starts.clamp && next.bound == 1 && !batch) continue;
    const bool joins = kept > 0 && !batch && !(starts.batched && copy.axis[kept - 1].column == 0) &&
                       merge_into(copy.axis[kept - 1], next, starts.clamp);
    if (!joins) copy.axis[kept++] = next;
  }
  copy.rank = kept;
  for (int index = 0; index < copy.rank; ++index)
    if (starts.batched && copy.axis[index].column == 0) copy.batch_axis = index;

  const bool reads_window = motion == Motion::read;
  copy.low = copy.high = reads_window ? copy.window : copy.block;
  for (int index = 0; index < copy.rank; ++index) {
    const DynamicAxis &axis = copy.axis[index];
    const int64_t stride = reads_window ? axis.window_stride : axis.block_stride;
    const int64_t extent = reads_window ? axis.bound : axis.extent;
    (stride < 0 ? copy.low : copy.high) += stride * (extent - 1);
  }
  copy.high += copy.element;
  if (copy.rank > 0 && copy.batch_axis != copy.rank - 1) {
    const DynamicAxis &last = copy.axis[copy.rank - 1];
    copy.runs = last.window_stride == copy.element && last.block_stride == copy.element;
  }
  copy.isolated = !copy.packed || (copy.runs && keeps_to_own_bytes(copy));
  return copy;
}

}  // namespace baracuda
