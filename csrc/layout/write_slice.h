// SPDX-License-Identifier: Apache-2.0
// The index arithmetic of a strided copy, shared by the CPU and the CUDA kernels.
#pragma once

#include "runtime/device.h"
#include "runtime/tensor.h"

namespace baracuda {

// A copy between two views of one shape, brought to the form that the kernels take: `rows` runs of
// `run` cells, consecutive on both sides. A cell is the smallest thing that has an address: half a
// byte for packed types, a byte for the others. Axes run from the one with the longest step in the
// destination to the shortest.
struct StridedCopy {
  bool packed = false;
  int64_t dest = 0;  // the address of the first run, in cells
  int64_t source = 0;
  int64_t run = 0;
  int64_t rows = 1;
  int rank = 0;
  int64_t extent[kMaxRank] = {};
  int64_t dest_stride[kMaxRank] = {};  // in cells, positive
  int64_t source_stride[kMaxRank] = {};
  // Cells that the source spans: [source_low, source_high).
  int64_t source_low = 0;
  int64_t source_high = 0;
  // No two runs have a byte of the destination in common, so that each can be written by a thread
  // of its own. Only packed types can fail this.
  bool isolated = true;

  int64_t cells_per_16_bytes() const { return packed ? 32 : 16; }
  int64_t bytes() const { return packed ? rows * run / 2 : rows * run; }
};

// Both views are of one shape with at least one element.
StridedCopy plan_copy(const Tensor &dest, const Tensor &source);

// The window of a tensor, as a view.
Tensor window_of(const Tensor &tensor, const Shape &start, const Shape &extent);

void write_slice_cpu(const StridedCopy &copy);
// Enqueues on the current device.
void write_slice_cuda(const StridedCopy &copy, Stream stream);
// The architecture whose machine code runs: "sm_90".
std::string write_slice_arch(const char *plan);

}  // namespace baracuda
