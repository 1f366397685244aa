// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <limits>

#include "layout/dynamic_write.h"
#include "layout/write_slice.h"
#include "runtime/parallel.h"

namespace baracuda {
namespace {

bool is_wide(const Starts &starts) { return starts.tensor.dtype.bits == 64; }

int64_t start_at(const Starts &starts, int64_t entry, int axis) {
  const Tensor &tensor = starts.tensor;
  const int64_t place = starts.batched ? entry * tensor.stride[0] + axis * tensor.stride[1] : axis * tensor.stride[0];
  return is_wide(starts) ? tensor.as<int64_t>()[place] : tensor.as<int32_t>()[place];
}

// The part of a block that is inside, as a range of the block; `window` is where it lies.
struct Visible {
  Shape block;
  Shape window;
  Shape extent;
};

// Entry `entry` of a batch is a problem of its own, with one place along the first axis.
Visible visible_part(const Tensor &large, const Tensor &block, const Starts &starts, int64_t entry) {
  Visible part;
  part.block.rank = part.window.rank = part.extent.rank = large.rank();
  for (int axis = 0; axis < large.rank(); ++axis) {
    const bool own = starts.batched && axis == 0;
    const int64_t bound = own ? 1 : large.shape[axis];
    const int64_t extent = own ? 1 : block.shape[axis];
    const int64_t start = place_start(start_at(starts, entry, axis), bound, extent, starts.clamp);
    const int64_t first = start < 0 ? -start : 0;
    const int64_t last = start + extent > bound ? bound - start : extent;
    part.block[axis] = first + (own ? entry : 0);
    part.window[axis] = start + first + (own ? entry : 0);
    part.extent[axis] = last > first ? last - first : 0;
  }
  return part;
}

void fill_zero(const Tensor &tensor) {
  const int64_t size = nibbles(tensor.dtype) / kNibblesPerByte;
  int64_t index[kMaxRank] = {};
  std::byte *at = tensor.data;
  for (int64_t left = tensor.shape.count(); left > 0; --left) {
    std::memset(at, 0, size_t(size));
    for (int axis = tensor.rank() - 1; axis >= 0; --axis) {
      at += tensor.stride[axis] * size;
      if (++index[axis] < tensor.shape[axis]) break;
      at -= index[axis] * tensor.stride[axis] * size;
      index[axis] = 0;
    }
  }
}

template <class Index>
void advance(const Tensor &tensor, bool batched, int axis, int64_t step) {
  constexpr int64_t kHighest = std::numeric_limits<Index>::max();
  for (int64_t entry = 0; entry < (batched ? tensor.shape[0] : 1); ++entry) {
    Index &start =
        tensor.as<Index>()[batched ? entry * tensor.stride[0] + axis * tensor.stride[1] : axis * tensor.stride[0]];
    start = step > kHighest || int64_t(start) > kHighest - step ? Index(kHighest) : Index(start + step);
  }
}

}  // namespace

void dynamic_copy_cpu(Motion motion, const Tensor &large, const Tensor &block, const Starts &starts) {
  if (motion == Motion::read) fill_zero(block);
  for (int64_t entry = 0; entry < (starts.batched ? large.shape[0] : 1); ++entry) {
    const Visible part = visible_part(large, block, starts, entry);
    if (part.extent.count() == 0) continue;
    const Tensor window = window_of(large, part.window, part.extent);
    if (motion == Motion::zero) {
      fill_zero(window);
      continue;
    }
    const Tensor inside = window_of(block, part.block, part.extent);
    write_slice_cpu(motion == Motion::write ? plan_copy(window, inside) : plan_copy(inside, window));
  }
}

void advance_starts_cpu(const Starts &starts, int axis, int64_t step) {
  if (is_wide(starts)) {
    advance<int64_t>(starts.tensor, starts.batched, axis, step);
  } else {
    advance<int32_t>(starts.tensor, starts.batched, axis, step);
  }
}

}  // namespace baracuda
