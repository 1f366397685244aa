// SPDX-License-Identifier: Apache-2.0
// From a call to its kernel. Each dtype has a file of its own that instantiates these.
#pragma once

#include "pooling/fractional_max_pool_runs.cuh"
#include "pooling/fractional_max_pool_slabs.cuh"
#include "pooling/fractional_max_pool_staged.cuh"
#include "pooling/fractional_max_pool_sweep.cuh"

namespace baracuda {

// The rows of a block of pool_rows, and its shared memory; 0 rows where they are too long for it.
struct PoolRowsShape {
  int32_t rows = 0;
  int32_t planes = 0;
  size_t shared = 0;
};
PoolRowsShape pool_rows_shape(const PoolProblem &problem, size_t real_size, size_t element_size);

// The slices of a block of pool_staged, and its shared memory; 0 slices where it can't.
struct PoolStagedShape {
  int32_t slices = 0;
  int32_t rows_at = 0;
  int32_t columns_at = 0;
  size_t shared = 0;
};
PoolStagedShape pool_staged_shape(const PoolProblem &problem, size_t element_size);

// How pool_tiles cuts the work; 0 slots where a thread can't hold its sums.
struct PoolTilesShape {
  int32_t slots = 0;
  int32_t strip = 0;
  int32_t strip_outs = 0;
  bool chunked = false;
  int32_t chunks = 1;
  int32_t columns_at = 0;
  int32_t rows_at = 0;
  int32_t sums_at = 0;
  size_t shared = 0;
};
// How pool_patches cuts the work; 0 slots where it can't.
struct PoolPatchesShape {
  int32_t slots = 0;
  int32_t strip = 0;
  int32_t rows = 0;
  int32_t tile_rows = 0;
  int32_t pitch = 0;
  int32_t decoded_at = 0;
  int32_t spans_at = 0;
  int32_t rows_at = 0;
  size_t shared = 0;
};
PoolPatchesShape pool_patches_shape(const PoolProblem &problem, size_t real_size);
PoolRunsShape pool_runs_shape(const PoolProblem &problem, size_t element_size);
PoolSlabsShape pool_slabs_shape(const PoolProblem &problem, size_t element_size);
// How pool_sweep cuts the work; 0 warps where it can't.
struct PoolSweepShape {
  int32_t warps = 0;
  int32_t columns = 0;
  int32_t strip = 0;
  uint32_t open = 0;
  uint32_t stages_at = 0;
  uint32_t gradients_at = 0;
  uint32_t stage_bytes = 0;
  uint32_t rows_at = 0;
  size_t shared = 0;
};
PoolSweepShape pool_sweep_shape(const PoolProblem &problem, size_t element_size, size_t index_size);
// Whether the middle axis has nothing to say.
inline bool pool_is_flat(const PoolProblem &problem) {
  return problem.axis[kMiddle].in == 1 && problem.axis[kMiddle].out == 1;
}
PoolTilesShape pool_tiles_shape(const PoolProblem &problem, size_t real_size, size_t element_size, bool unit);

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
  rows.plane_rows = problem.axis[kSlow].out * problem.axis[kMiddle].out;
  rows.rows = problem.planes() * rows.plane_rows;
  rows.block_rows = shape.rows;
  rows.planes = shape.planes;
  rows.aligned = reinterpret_cast<uintptr_t>(call.y.data) % (2 * sizeof(T)) == 0 &&
                 reinterpret_cast<uintptr_t>(call.indices.data) % (2 * sizeof(Index)) == 0;
  rows.prefetch = pool_row_major(problem, call.x, true) ? kRowsPrefetch : 0;
  rows.wide = rows.rows >= int64_t(1) << 32;
  rows.by_plane_rows = Divider(uint32_t(rows.plane_rows));
  rows.by_channels = Divider(uint32_t(problem.channels));
  rows.by_middle_out = Divider(uint32_t(problem.axis[kMiddle].out));
  rows.by_fast_out = Divider(uint32_t(problem.axis[kFast].out));
  const auto windows = [&](int32_t slow, int32_t middle, int32_t fast) {
    return problem.axis[kSlow].window == slow && problem.axis[kMiddle].window == middle &&
           problem.axis[kFast].window == fast;
  };
  const bool unit = call.x.axis[kFast] == 1 || problem.axis[kFast].in == 1;
  const Grid grid = {ceil_div(rows.rows, shape.rows), kPoolThreads, shape.shared};
  if (unit && windows(2, 1, 2)) {
    launch(pool_rows<T, Index, 2, 1, 2, true, 4, kPoolThreads, kPoolBlocks>, grid, stream, rows);
  } else if (unit && windows(3, 1, 3)) {
    launch(pool_rows<T, Index, 3, 1, 3, true, 2, kPoolThreads, kPoolBlocks>, grid, stream, rows);
  } else if (unit && windows(2, 2, 2)) {
    // Measured: 16-bit cells want more warps, wider ones more loads of a warp; the widest have no room for them.
    constexpr int kUnroll = sizeof(T) == 4 ? 4 : 2;
    constexpr int kBlocks = sizeof(T) == 2 ? 5 : kPoolBlocks;
    launch(pool_rows<T, Index, 2, 2, 2, true, kUnroll, kPoolThreads, kBlocks>, grid, stream, rows);
  } else if (unit && windows(3, 3, 3)) {
    launch(pool_rows<T, Index, 3, 3, 3, true, 2, kPoolThreads, 3>, grid, stream, rows);
  } else {
    launch(pool_rows<T, Index, 0, 0, 0, false, 2, kPoolThreads, kPoolBlocks>, grid, stream, rows);
  }
}

template <class T, class Index, bool kFlat>
void launch_pool_staged(const PoolStagedCall &call, Grid grid, Stream stream) {
  if constexpr (sizeof(T) <= pool_staged_widest(kFlat)) {
    const auto kernel = pool_staged<T, Index, kFlat>;
    allow_shared(kernel, grid.shared_bytes);
    launch(kernel, grid, stream, call);
  }
}

template <class T, class Index>
bool launch_pool_staged(const PoolForward &call, Stream stream) {
  const PoolProblem &problem = call.problem;
  const PoolStagedShape shape = pool_staged_shape(problem, sizeof(T));
  if (shape.slices == 0 || !DeviceGuard::kernels_can_wait() ||
      reinterpret_cast<uintptr_t>(call.x.data) % kStagedPiece != 0 || !pool_row_major(problem, call.x, true))
    return false;
  const PoolAxis *axis = problem.axis;
  PoolStagedCall staged = {};
  staged.problem = problem;
  staged.samples = call.samples;
  staged.x = call.x.data;
  staged.y = call.y.data;
  staged.indices = call.indices.data;
  staged.slices = shape.slices;
  staged.blocks = int32_t(ceil_div(axis[kSlow].out, shape.slices));
  staged.slice_outs = axis[kMiddle].out * axis[kFast].out;
  staged.slice_bytes = uint32_t(axis[kMiddle].in) * uint32_t(axis[kFast].in) * uint32_t(sizeof(T));
  staged.rows_at = shape.rows_at;
  staged.columns_at = shape.columns_at;
  staged.by_fast_out = ShortDivider(uint32_t(axis[kFast].out));
  staged.by_middle_out = Divider(uint32_t(axis[kMiddle].out));
  staged.by_blocks = Divider(uint32_t(staged.blocks));
  staged.by_channels = Divider(uint32_t(problem.channels));
  const Grid grid = {problem.planes() * staged.blocks, kPoolThreads, shape.shared};
  if (pool_is_flat(problem)) {
    launch_pool_staged<T, Index, true>(staged, grid, stream);
  } else {
    launch_pool_staged<T, Index, false>(staged, grid, stream);
  }
  return true;
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
    if (launch_pool_staged<T, Index>(call, stream)) return;
    const PoolRowsShape shape = pool_rows_shape(problem, sizeof(Real), sizeof(T));
    if (shape.rows > 0) {
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

template <class T, class Index, bool kFlat, bool kUnit>
void launch_pool_tiles(const PoolTilesCall &call, bool chunked, Grid grid, Stream stream) {
  constexpr int kRows = kFlat ? 1 : kTileRows;
  constexpr bool kWide = sizeof(T) == sizeof(double);
  constexpr TileTuning kWhole = tile_tuning(kFlat, kUnit, false, kWide);
  constexpr TileTuning kParts = tile_tuning(kFlat, kUnit, true, kWide);
  const auto kernel =
      chunked
          ? pool_tiles<T, Index, kFlat, kUnit, kRows, kTileMostGather, true, kParts.sets, kTileThreads, kParts.blocks>
          : pool_tiles<T, Index, kFlat, kUnit, kRows, kTileGather, false, kWhole.sets, kTileThreads, kWhole.blocks>;
  allow_shared(kernel, grid.shared_bytes);
  launch(kernel, grid, stream, call);
}

// Whether the rows of a view are contiguous.
inline bool pool_unit(const PoolView &view, int32_t extent) { return extent == 1 || view.axis[kFast] == 1; }

// Whether whole packs of four can be written.
template <class T>
bool pool_whole_packs(const PoolProblem &problem, const PoolView &dx) {
  const auto whole = [](int64_t elements) { return elements % kTileColumns == 0; };
  return reinterpret_cast<uintptr_t>(dx.data) % (kTileColumns * sizeof(T)) == 0 && whole(problem.axis[kFast].in) &&
         whole(dx.axis[kMiddle]) && whole(dx.axis[kSlow]) && whole(dx.channel) && whole(dx.batch);
}

template <class T, class Index>
bool launch_pool_patches(const PoolBackward &call, Stream stream) {
  const PoolProblem &problem = call.problem;
  const PoolAxis *axis = problem.axis;
  const PoolPatchesShape shape = pool_patches_shape(problem, sizeof(typename PoolReal<T>::type));
  if (shape.slots == 0 || !pool_unit(call.dy, axis[kFast].out) || !pool_unit(call.indices, axis[kFast].out) ||
      !pool_unit(call.dx, axis[kFast].in))
    return false;
  PoolPatchesCall patches = {};
  patches.problem = problem;
  patches.dy = call.dy;
  patches.indices = call.indices;
  patches.dx = call.dx;
  patches.accumulate = call.accumulate;
  patches.aligned = pool_whole_packs<T>(problem, call.dx);
  patches.strip = shape.strip;
  patches.strips = int32_t(ceil_div(axis[kSlow].in, shape.strip));
  patches.fast_patches = int32_t(ceil_div(axis[kFast].in, kPatch));
  patches.middle_patches = int32_t(ceil_div(axis[kMiddle].in, kPatch));
  patches.slots = shape.slots;
  patches.rows = shape.rows;
  patches.tile_rows = shape.tile_rows;
  patches.pitch = shape.pitch;
  patches.decoded_at = shape.decoded_at;
  patches.spans_at = shape.spans_at;
  patches.rows_at = shape.rows_at;
  patches.slice = ShortDivider(uint32_t(axis[kMiddle].in) * uint32_t(axis[kFast].in));
  patches.row = ShortDivider(uint32_t(axis[kFast].in));
  allow_shared(pool_patches<T, Index>, shape.shared);
  launch(pool_patches<T, Index>,
         Grid{problem.planes() * patches.strips * patches.fast_patches * patches.middle_patches, kPatchThreads,
              shape.shared},
         stream, patches);
  return true;
}

template <class T, class Index, bool kFlat>
void launch_pool_runs(const PoolRunsCall &call, Grid grid, Stream stream) {
  constexpr RunTuning kTuning = run_tuning(kFlat, sizeof(T));
  if constexpr (kTuning.vectors > 0) {
    const auto kernel = pool_runs<T, Index, kFlat, kTuning.vectors, kTuning.sets, kTuning.blocks>;
    allow_shared(kernel, grid.shared_bytes);
    launch(kernel, grid, stream, call);
  }
}

// Whether the slices of a view are contiguous.
inline bool pool_whole_slices(const PoolProblem &problem, const PoolView &view, bool of_inputs) {
  const auto extent = [&](int axis) { return of_inputs ? problem.axis[axis].in : problem.axis[axis].out; };
  return pool_unit(view, extent(kFast)) && (extent(kMiddle) == 1 || view.axis[kMiddle] == extent(kFast));
}

template <class T, class Index>
bool launch_pool_runs(const PoolBackward &call, Stream stream) {
  const PoolProblem &problem = call.problem;
  const PoolAxis *axis = problem.axis;
  const PoolRunsShape shape = pool_runs_shape(problem, sizeof(T));
  if (shape.slots == 0 || !pool_whole_slices(problem, call.dy, false) ||
      !pool_whole_slices(problem, call.indices, false) || !pool_whole_slices(problem, call.dx, true))
    return false;
  const bool flat = pool_is_flat(problem);
  PoolRunsCall runs = {};
  runs.problem = problem;
  runs.dy = call.dy;
  runs.indices = call.indices;
  runs.dx = call.dx;
  runs.accumulate = call.accumulate;
  runs.aligned = pool_whole_packs<T>(problem, call.dx);
  runs.shape = shape;
  runs.slice = ShortDivider(uint32_t(axis[kMiddle].in) * uint32_t(axis[kFast].in));
  runs.row = ShortDivider(uint32_t(axis[kFast].in));
  const Grid grid = {ceil_div(problem.planes(), kRunWarps) * shape.strips * shape.bands, kRunWarps * kLanes,
                     shape.shared};
  if (flat) {
    launch_pool_runs<T, Index, true>(runs, grid, stream);
  } else {
    launch_pool_runs<T, Index, false>(runs, grid, stream);
  }
  return true;
}

// The windows over the cells of an axis from `begin` on, to before `end` or the axis' end.
inline PoolRange windows_over(const PoolAxis &axis, int32_t begin, int32_t end) {
  return {windows_over(axis, begin).begin, windows_over(axis, std::min(end, axis.in) - 1).end};
}
// The windows over each part of an axis that is cut into parts of so many cells.
inline void windows_over_parts(const PoolAxis &axis, int32_t part, int32_t parts, PoolRange *ranges) {
  for (int32_t t = 0; t < parts; ++t) ranges[t] = windows_over(axis, t * part, (t + 1) * part);
}

template <class T, class Index>
bool launch_pool_slabs(const PoolBackward &call, Stream stream) {
  constexpr SlabTuning kTuning = slab_tuning(sizeof(T));
  if constexpr (kTuning.threads > 0) {
    const PoolProblem &problem = call.problem;
    const PoolAxis *axis = problem.axis;
    const auto whole = [](const void *data) { return reinterpret_cast<uintptr_t>(data) % kBulkBytes == 0; };
    const PoolSlabsShape shape = pool_slabs_shape(problem, sizeof(T));
    if (shape.slots == 0 || !DeviceGuard::kernels_can_wait() || !whole(call.dy.data) || !whole(call.indices.data) ||
        !pool_row_major(problem, call.dy, false) || !pool_row_major(problem, call.indices, false) ||
        !pool_whole_slices(problem, call.dx, true))
      return false;
    PoolSlabsCall slabs = {};
    slabs.problem = problem;
    slabs.dy = call.dy.data;
    slabs.indices = call.indices.data;
    slabs.dx = call.dx;
    slabs.accumulate = call.accumulate;
    slabs.aligned = pool_whole_packs<T>(problem, call.dx);
    slabs.shape = shape;
    const int64_t blocks = problem.planes() * shape.bands;
    slabs.long_blocks = uint32_t(blocks * shape.long_strips);
    for (int32_t t = 0; t < shape.strips; ++t)
      slabs.over_strip[t] = windows_over(axis[kSlow], shape.strip_begin(t), shape.strip_begin(t + 1));
    windows_over_parts(axis[kMiddle], shape.band, shape.bands, slabs.over_band);
    slabs.slice = ShortDivider(uint32_t(axis[kMiddle].in) * uint32_t(axis[kFast].in));
    slabs.row = ShortDivider(uint32_t(axis[kFast].in));
    const auto kernel = shape.outputs == kSlabOutputs
                            ? pool_slabs<T, Index, kSlabOutputs, kSlabRows, kTuning.threads, kTuning.blocks>
                            : pool_slabs<T, Index, kSlabOutputs + 1, kSlabRows, kTuning.threads, kTuning.blocks>;
    allow_shared(kernel, shape.shared);
    launch(kernel, Grid{blocks * shape.strips, shape.threads, shape.shared, true}, stream, slabs);
    return true;
  } else {
    return false;
  }
}

template <class T, class Index>
bool launch_pool_sweep(const PoolBackward &call, Stream stream) {
  const PoolProblem &problem = call.problem;
  const PoolAxis *axis = problem.axis;
  const auto whole = [](const PoolView &view, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(view.data) % kBulkBytes == 0 && bytes % kBulkBytes == 0;
  };
  const int64_t outs = problem.planes() * problem.out_plane();
  if (!DeviceGuard::kernels_can_wait() || !pool_row_major(problem, call.dy, false) ||
      !pool_row_major(problem, call.indices, false) || !pool_row_major(problem, call.dx, true) ||
      !whole(call.dy, outs * int64_t(sizeof(T))) || !whole(call.indices, outs * int64_t(sizeof(Index))))
    return false;
  const PoolSweepShape shape = pool_sweep_shape(problem, sizeof(T), sizeof(Index));
  if (shape.warps == 0) return false;
  PoolSweepCall sweep = {};
  sweep.problem = problem;
  sweep.dy = call.dy.data;
  sweep.indices = call.indices.data;
  sweep.dx = call.dx.data;
  sweep.accumulate = call.accumulate;
  sweep.aligned = pool_whole_packs<T>(problem, call.dx);
  sweep.strip = shape.strip;
  sweep.strips = int32_t(ceil_div(axis[kSlow].in, shape.strip));
  sweep.columns = shape.columns;
  sweep.open = shape.open;
  sweep.ring = shape.open * uint32_t(axis[kFast].in) * uint32_t(sizeof(float));
  sweep.stages_at = shape.stages_at;
  sweep.gradients_at = shape.gradients_at;
  sweep.stage_bytes = shape.stage_bytes;
  sweep.rows_at = shape.rows_at;
  sweep.row = SmallDivider(uint32_t(axis[kFast].in));
  sweep.by_strips = Divider(uint32_t(sweep.strips));
  sweep.by_open = Divider(sweep.open);
  sweep.by_slow_steps = Divider(uint32_t(axis[kSlow].out - 1));
  sweep.by_fast_steps = Divider(uint32_t(axis[kFast].out - 1));
  windows_over_parts(axis[kSlow], sweep.strip, sweep.strips, sweep.rows_over);
  constexpr SweepTuning kTuning = sweep_tuning(sizeof(T));
  // All of a warp's outputs are in the row, even where some of them could name none of its columns.
  for (int32_t warp = 0; warp < shape.warps; ++warp)
    sweep.outputs_from[warp] =
        std::min(windows_over(axis[kFast], warp * shape.columns).begin, axis[kFast].out - kTuning.vectors * kLanes);
  if constexpr (kTuning.vectors > 0) {
    const auto kernel = pool_sweep<T, Index, kTuning.vectors, kTuning.rows, kTuning.stages, kTuning.blocks>;
    allow_shared(kernel, shape.shared);
    launch(kernel, Grid{problem.planes() * sweep.strips, shape.warps * kLanes, shape.shared}, stream, sweep);
  }
  return true;
}

template <class T, class Index>
bool launch_pool_tiles(const PoolBackward &call, Stream stream) {
  const PoolProblem &problem = call.problem;
  const PoolAxis *axis = problem.axis;
  const bool is_unit = pool_unit(call.dy, axis[kFast].out) && pool_unit(call.indices, axis[kFast].out) &&
                       pool_unit(call.dx, axis[kFast].in);
  const bool channels_first = !is_unit && pool_channels_last(problem, call.dx, true);
  const PoolTilesShape shape = pool_tiles_shape(problem, sizeof(typename PoolReal<T>::type), sizeof(T), is_unit);
  if (shape.slots == 0 || !(is_unit || channels_first)) return false;

  const bool flat = pool_is_flat(problem);
  const int32_t rows = flat ? 1 : kTileRows;
  PoolTilesCall tiles = {};
  tiles.problem = problem;
  tiles.dy = call.dy;
  tiles.indices = call.indices;
  tiles.dx = call.dx;
  tiles.accumulate = call.accumulate;
  tiles.channels_first = channels_first;
  tiles.strip = shape.strip;
  tiles.strips = int32_t(ceil_div(axis[kSlow].in, shape.strip));
  tiles.middle_tiles = int32_t(ceil_div(axis[kMiddle].in, rows));
  tiles.fast_tiles = int32_t(ceil_div(axis[kFast].in, kTileColumns));
  tiles.tiles = problem.planes() * tiles.middle_tiles * tiles.fast_tiles;
  tiles.rows = int32_t(windows_over_most(axis[kMiddle], rows));
  tiles.slot_mask = shape.slots - 1;
  tiles.strip_outs = shape.strip_outs;
  tiles.chunks = shape.chunks;
  tiles.columns_at = shape.columns_at;
  tiles.rows_at = shape.rows_at;
  const auto wrap = [&](const PoolView &view) { return view.axis[kSlow] - (tiles.rows - 1) * view.axis[kMiddle]; };
  tiles.named_wrap = wrap(call.indices);
  tiles.given_wrap = wrap(call.dy);
  tiles.sums_at = shape.sums_at;
  tiles.slice = ShortDivider(uint32_t(axis[kMiddle].in) * uint32_t(axis[kFast].in));
  tiles.row = ShortDivider(uint32_t(axis[kFast].in));
  tiles.aligned = is_unit && pool_whole_packs<T>(problem, call.dx);

  const Grid grid = {ceil_div(tiles.tiles, kTileThreads) * tiles.strips, kTileThreads, shape.shared};
  if (flat && is_unit) {
    launch_pool_tiles<T, Index, true, true>(tiles, shape.chunked, grid, stream);
  } else if (flat) {
    launch_pool_tiles<T, Index, true, false>(tiles, shape.chunked, grid, stream);
  } else {
    launch_pool_tiles<T, Index, false, false>(tiles, shape.chunked, grid, stream);
  }
  return true;
}

template <class T, class Index>
void launch_pool_backward(const PoolBackward &call, Stream stream) {
  const PoolProblem &problem = call.problem;
  if (launch_pool_slabs<T, Index>(call, stream) || launch_pool_sweep<T, Index>(call, stream) ||
      launch_pool_runs<T, Index>(call, stream) || launch_pool_patches<T, Index>(call, stream) ||
      launch_pool_tiles<T, Index>(call, stream))
    return;
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
