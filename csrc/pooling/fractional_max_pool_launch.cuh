// SPDX-License-Identifier: Apache-2.0
// From a call to its kernel. Each dtype has a file of its own that instantiates these.
#pragma once

#include "pooling/fractional_max_pool.cuh"

namespace baracuda {

// The outputs of a block of pool_rows, and its shared memory; 0 outputs where the rows are too long for it.
struct PoolRowsShape {
  int32_t outputs = 0;
  int32_t rows = 0;
  int32_t planes = 0;
  size_t shared = 0;
};
PoolRowsShape pool_rows_shape(const PoolProblem &problem, size_t real_size);

// How pool_ring cuts the work; 0 slots where a warp can't hold its cells.
struct PoolRingShape {
  int32_t slots = 0;
  int32_t overlap = 0;
  int32_t strip = 0;
  int32_t middle_tile = 0;
  int32_t fast_tile = 0;
  size_t shared = 0;
};
PoolRingShape pool_ring_shape(const PoolProblem &problem, size_t real_size);

// Whether a view of inputs or of outputs is row-major.
bool pool_row_major(const PoolProblem &problem, const PoolView &view, bool of_inputs);
PoolOrder pool_order(const PoolProblem &problem, const PoolView &view, bool of_inputs);
// Whether neighbouring channels lie closest, and there are enough of them for whole lines.
bool pool_channels_last(const PoolProblem &problem, const PoolView &view, bool of_inputs);
PoolLines pool_lines_of(const PoolProblem &problem, bool of_inputs);

template <class T>
void fractional_max_pool_cuda_of(const PoolForward &call, Stream stream);
template <class T>
void fractional_max_pool_backward_cuda_of(const PoolBackward &call, Stream stream);

template <class Kernel>
void allow_shared(Kernel *kernel, size_t bytes) {
  constexpr size_t kWithoutAsking = 48 * 1024;
  if (bytes > kWithoutAsking)
    check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    int(bytes)),
               "cudaFuncSetAttribute");
}

template <class T, class Index>
void launch_pool_rows(const PoolForward &call, const PoolRowsShape &shape, Stream stream) {
  const PoolProblem &problem = call.problem;
  PoolRowsCall rows = {};
  rows.problem = problem;
  rows.samples = call.samples;
  rows.x = call.x;
  rows.y = call.y.data;
  rows.indices = call.indices.data;
  rows.outputs = problem.planes() * problem.out_plane();
  rows.block_outputs = shape.outputs;
  rows.rows = shape.rows;
  rows.planes = shape.planes;
  rows.rows_of_plane = problem.axis[kSlow].out * problem.axis[kMiddle].out;
  rows.out_fast = Divider(uint32_t(problem.axis[kFast].out));
  const Grid grid = {ceil_div(rows.outputs, shape.outputs), kPoolThreads, shape.shared};
  const auto windows = [&](int32_t slow, int32_t middle, int32_t fast) {
    return problem.axis[kSlow].window == slow && problem.axis[kMiddle].window == middle &&
           problem.axis[kFast].window == fast;
  };
  if (windows(2, 1, 2)) {
    launch(pool_rows<T, Index, 2, 1, 2, 4, kPoolBlocks>, grid, stream, rows);
  } else if (windows(3, 1, 3)) {
    launch(pool_rows<T, Index, 3, 1, 3, 2, kPoolBlocks>, grid, stream, rows);
  } else if (windows(2, 2, 2)) {
    launch(pool_rows<T, Index, 2, 2, 2, 2, kPoolBlocks>, grid, stream, rows);
  } else {
    launch(pool_rows<T, Index, 0, 0, 0, 1, kPoolBlocks>, grid, stream, rows);
  }
}

// Whether a table with an entry for each place of an axis fits in shared memory.
template <class Entry>
bool pool_table_fits(int64_t entries) {
  return entries * int64_t(sizeof(Entry)) <= kMostTableBytes;
}

template <class T, class Index>
void launch_pool_lines(const PoolForward &call, Stream stream) {
  using Entry = EvenStart<typename PoolReal<T>::type>;
  const PoolProblem &problem = call.problem;
  const int32_t entries = problem.axis[kFast].out;
  PoolLinesForward lines = {call, pool_lines_of(problem, false), false};
  lines.table = problem.placement == Placement::even && entries > 1 && pool_table_fits<Entry>(entries);
  const Grid grid = {ceil_div(lines.lines.total, kPoolThreads), kPoolThreads,
                     lines.table ? size_t(entries) * sizeof(Entry) : 0};
  const auto windows = [&](int32_t slow, int32_t middle, int32_t fast) {
    return problem.axis[kSlow].window == slow && problem.axis[kMiddle].window == middle &&
           problem.axis[kFast].window == fast;
  };
  if (windows(2, 1, 2)) {
    launch(pool_lines<T, Index, 2, 1, 2>, grid, stream, lines);
  } else if (windows(2, 2, 2)) {
    launch(pool_lines<T, Index, 2, 2, 2>, grid, stream, lines);
  } else {
    launch(pool_lines<T, Index, 0, 0, 0>, grid, stream, lines);
  }
}

template <class T, class Index>
void launch_pool(const PoolForward &call, Stream stream) {
  using Real = typename PoolReal<T>::type;
  const PoolProblem &problem = call.problem;
  if (pool_row_major(problem, call.y, false) && (!call.indices.data || pool_row_major(problem, call.indices, false))) {
    const PoolRowsShape shape = pool_rows_shape(problem, sizeof(Real));
    if (shape.outputs > 0) {
      launch_pool_rows<T, Index>(call, shape, stream);
      return;
    }
  }
  if (pool_channels_last(problem, call.y, false)) {
    launch_pool_lines<T, Index>(call, stream);
    return;
  }
  PoolAnyForward any = {call, pool_order(problem, call.y, false), false};
  const int64_t entries = int64_t(problem.axis[kSlow].out) + problem.axis[kMiddle].out + problem.axis[kFast].out;
  any.table = problem.placement == Placement::even && pool_table_fits<EvenStart<Real>>(entries);
  const Grid grid = {ceil_div(any.order.total, kPoolThreads * kAnyItems), kPoolThreads,
                     any.table ? size_t(entries) * sizeof(EvenStart<Real>) : 0};
  launch(pool_any<T, Index>, grid, stream, any);
}

template <class T, class Index>
bool launch_pool_ring(const PoolBackward &call, Stream stream) {
  using Real = typename PoolReal<T>::type;
  const PoolProblem &problem = call.problem;
  const PoolAxis *axis = problem.axis;
  if (!pool_row_major(problem, call.dy, false) || !pool_row_major(problem, call.indices, false) ||
      !pool_row_major(problem, call.dx, true))
    return false;
  const PoolRingShape shape = pool_ring_shape(problem, sizeof(Real));
  if (shape.slots == 0) return false;
  PoolRingCall ring = {};
  ring.problem = problem;
  ring.dy = call.dy.data;
  ring.indices = call.indices.data;
  ring.dx = call.dx.data;
  ring.accumulate = call.accumulate;
  ring.overlap = shape.overlap;
  ring.slots = shape.slots;
  ring.strip = shape.strip;
  ring.middle_tile = shape.middle_tile;
  ring.fast_tile = shape.fast_tile;
  ring.strips = int32_t(ceil_div(axis[kSlow].in, shape.strip));
  ring.middle_tiles = int32_t(ceil_div(axis[kMiddle].in, shape.middle_tile));
  ring.fast_tiles = int32_t(ceil_div(axis[kFast].in, shape.fast_tile));
  ring.warps = problem.planes() * ring.strips * ring.middle_tiles * ring.fast_tiles;
  ring.slice = Divider(uint32_t(axis[kMiddle].in) * uint32_t(axis[kFast].in));
  ring.row = Divider(uint32_t(axis[kFast].in));
  constexpr int32_t kVector = kRingVector<Real>;
  ring.aligned = reinterpret_cast<uintptr_t>(call.dx.data) % (kVector * sizeof(T)) == 0 &&
                 axis[kFast].in % kVector == 0 && shape.fast_tile % kVector == 0;
  const Grid grid = {ceil_div(ring.warps, kRingWarps), kRingWarps * kWarp, shape.shared};
  if (axis[kMiddle].in == 1) {
    allow_shared(pool_ring<T, Index, true, kRingAhead, kRingBlocks>, shape.shared);
    launch(pool_ring<T, Index, true, kRingAhead, kRingBlocks>, grid, stream, ring);
  } else {
    allow_shared(pool_ring<T, Index, false, kRingAhead, kRingBlocks>, shape.shared);
    launch(pool_ring<T, Index, false, kRingAhead, kRingBlocks>, grid, stream, ring);
  }
  return true;
}

template <class T, class Index>
void launch_pool_backward(const PoolBackward &call, Stream stream) {
  const PoolProblem &problem = call.problem;
  if (launch_pool_ring<T, Index>(call, stream)) return;
  if (pool_channels_last(problem, call.dx, true)) {
    const int32_t cells = problem.axis[kFast].in;
    const PoolLinesBackward lines = {call, pool_lines_of(problem, true), pool_table_fits<PoolRange>(cells)};
    const Grid grid = {ceil_div(lines.lines.total, kPoolThreads), kPoolThreads,
                       lines.table ? size_t(cells) * sizeof(PoolRange) : 0};
    launch(pool_lines_backward<T, Index>, grid, stream, lines);
    return;
  }
  PoolAnyBackward any = {call, pool_order(problem, call.dx, true), false};
  const int64_t entries = int64_t(problem.axis[kSlow].in) + problem.axis[kMiddle].in + problem.axis[kFast].in;
  any.table = pool_table_fits<PoolRange>(entries);
  const Grid grid = {ceil_div(any.order.total, kPoolThreads * kAnyItems), kPoolThreads,
                     any.table ? size_t(entries) * sizeof(PoolRange) : 0};
  launch(pool_any_backward<T, Index>, grid, stream, any);
}

template <class T>
void fractional_max_pool_cuda_of(const PoolForward &call, Stream stream) {
  if (call.index_dtype == DTypeOf<int32_t>::value) {
    launch_pool<T, int32_t>(call, stream);
  } else {
    launch_pool<T, int64_t>(call, stream);
  }
}

template <class T>
void fractional_max_pool_backward_cuda_of(const PoolBackward &call, Stream stream) {
  if (call.index_dtype == DTypeOf<int32_t>::value) {
    launch_pool_backward<T, int32_t>(call, stream);
  } else {
    launch_pool_backward<T, int64_t>(call, stream);
  }
}

}  // namespace baracuda
