// SPDX-License-Identifier: Apache-2.0
// Rows, one or several in a warp, or with one or several warps for each. As with all kernels of the scans, bits follow
// from the operator, the shape and the choice of kernel alone: elements are cut into tiles by their place in scan order
// and folded in a fixed order, whatever the addresses.
#pragma once

#include "scan/scan_share.cuh"

namespace baracuda::scan {

// At most, in a block.
constexpr int kRowWarps = 8;

// A block has `groups` of 2^warps_shift warps, one for each row; of one warp, for rows of 2^shift slots. So many
// registers are taken that a multiprocessor holds kResidents warps.
template <class Op, int kRun, int kResidents>
__global__ void __launch_bounds__(kResidents *kWarp / 2, 2)
    scan_rows(const __grid_constant__ Op op, const __grid_constant__ Geometry g,
              const __grid_constant__ Accesses access, int warps_shift, int shift, uint32_t groups) {
  using Map = typename Op::Map;
  using Row = Share<Op, kRun, kKeepsSums<Op>>;
  static_assert(kResidents >= 2 * kRowWarps);
  extern __shared__ __align__(16) std::byte stages[];
  __shared__ Map totals[2][kRowWarps];
  const int lane = int(threadIdx.x) % kWarp;
  const int warp = int(threadIdx.x) / kWarp;
  const int row_warps = 1 << warps_shift;
  const int place = warp & (row_warps - 1);
  std::byte *stage = stages + warp * Row::kStageBytes;
  const int64_t row = (int64_t(blockIdx.x) * groups + (warp >> warps_shift)) * (Row::kItems >> shift);
  typename Row::Rows rows;
  Row::rows_of(g, Slots(g, row, 0, shift, Row::kItems), lane, rows);
  // What needs no memory is worked out by then.
  wait_for_earlier_work();
  let_next_kernel_start();
  typename Op::Value carry = initial_value(op, g, min(row + (lane * kRun >> shift), g.rows - 1));
  int parity = 0;
  // A row's warps come to the barriers together; a block's rows are of one length.
  for (int64_t tile = 0; tile < g.length; tile += int64_t(row_warps) * Row::kItems) {
    const Slots slots(g, row, tile + place * Row::kItems, shift, Row::kItems);
    Row share;
    share.load(op, g, access, slots, rows, stage, lane);
    const Map inclusive = share.reduce(op, g, slots, lane, Row::reader(g, slots, rows, lane));
    typename Op::Value value = carry;
    if (row_warps > 1) {
      if (lane == kWarp - 1) totals[parity][warp] = inclusive;
      __syncthreads();
      Map others = lane < row_warps ? totals[parity][warp - place + lane] : op.identity();
      others = warp_scan<kRowWarps>(op, others, lane);
      const Map left = shuffle(others, place > 0 ? place - 1 : 0);
      if (place > 0) value = op.apply(left, carry);
      carry = op.apply(shuffle(others, row_warps - 1), carry);
      parity ^= 1;
    }
    value = op.apply(exclusive_of(op, inclusive, lane, Row::lanes(slots)), value);
    share.finish(op, g, access, slots, rows, value, stage, lane);
  }
}

}  // namespace baracuda::scan
