// SPDX-License-Identifier: Apache-2.0
// Writing a block at starts that are data: where it lands, shared by the CPU and the CUDA kernels.
#pragma once

#include "runtime/device.h"
#include "runtime/half.h"
#include "runtime/tensor.h"

namespace baracuda {

// The starts of a block's axes, or of each entry along its first axis.
struct Starts {
  Tensor tensor;  // int32 or int64, [rank] or [entries, rank]
  bool batched = false;
  bool clamp = false;
};

// The start that is meant: with clamp the block is shifted inside (extent <= bound then), without
// it a start from which nothing shows is brought near, so that sums of it can't overflow.
BARACUDA_HD inline int64_t place_start(int64_t start, int64_t bound, int64_t extent, bool clamp) {
  const int64_t low = clamp ? 0 : -extent;
  const int64_t high = clamp ? bound - extent : bound;
  return start < low ? low : start > high ? high : start;
}

// What becomes of the block and its window in the large tensor.
enum class Motion {
  write,  // window = block
  read,   // block = window, zeros where the window is outside
  zero    // window = 0
};

// One axis of the window and the block. Starts, bounds and extents count steps.
struct DynamicAxis {
  int64_t bound;   // the large tensor's extent
  int64_t extent;  // the block's
  int64_t window_stride;
  int64_t block_stride;
  int column;    // in the starts
  int64_t unit;  // steps for each unit of its start: more than one where a covered axis is merged in
  bool flipped;  // counted from its end, so that the written side's step is positive
};

// A block and the tensor it moves in, brought to the form that the kernels take: axes from the one
// with the longest step of the written side to the shortest; addresses and steps in cells (bytes, or
// half bytes for packed types).
struct DynamicCopy {
  Motion motion;
  bool packed = false;
  int64_t element = 0;
  int64_t window = 0;
  int64_t block = 0;
  int64_t low = 0;  // cells that the side that is read spans
  int64_t high = 0;
  int rank = 0;
  DynamicAxis axis[kMaxRank] = {};
  int batch_axis = -1;
  // The last axis is consecutive on both sides.
  bool runs = false;
  // No two runs of the window have a byte in common, wherever they start.
  bool isolated = true;
};

// `block` has at least one element and so has `large`; for Motion::zero its data is not looked at.
DynamicCopy plan_dynamic(Motion motion, const Tensor &large, const Tensor &block, const Starts &starts);

void dynamic_copy_cpu(Motion motion, const Tensor &large, const Tensor &block, const Starts &starts);
// Enqueues on the current device.
void dynamic_copy_cuda(const DynamicCopy &copy, const Starts &starts, Stream stream);

// starts[..., axis] += step, stopping at the largest index.
void advance_starts_cpu(const Starts &starts, int axis, int64_t step);
void advance_starts_cuda(const Starts &starts, int axis, int64_t step, Stream stream);

// The architecture whose machine code runs: "sm_90".
std::string dynamic_copy_arch(const char *plan);

}  // namespace baracuda
