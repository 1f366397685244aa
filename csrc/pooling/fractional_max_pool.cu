// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cstdlib>

#include "pooling/fractional_max_pool_launch.cuh"

namespace baracuda {

extern template void fractional_max_pool_cuda_of<float16>(const PoolForward &, Stream);
extern template void fractional_max_pool_cuda_of<bfloat16>(const PoolForward &, Stream);
extern template void fractional_max_pool_cuda_of<float>(const PoolForward &, Stream);
extern template void fractional_max_pool_cuda_of<double>(const PoolForward &, Stream);
extern template void fractional_max_pool_backward_cuda_of<float16>(const PoolBackward &, Stream);
extern template void fractional_max_pool_backward_cuda_of<bfloat16>(const PoolBackward &, Stream);
extern template void fractional_max_pool_backward_cuda_of<float>(const PoolBackward &, Stream);
extern template void fractional_max_pool_backward_cuda_of<double>(const PoolBackward &, Stream);

namespace {

constexpr int64_t kNarrowLimit = int64_t(1) << 31;

// Ends a kernel that has nothing to do; the architecture of its machine code is that of all.
__global__ void arch_probe() {}

size_t real_size(DLDataType dtype) { return dtype == DTypeOf<double>::value ? sizeof(double) : sizeof(float); }

}  // namespace

PoolRowsShape pool_rows_shape(const PoolProblem &problem, size_t real_size, size_t element_size) {
  constexpr int64_t kMostShared = 16 * 1024;
  PoolRowsShape shape;
  const int64_t fast = problem.axis[kFast].out;
  const int64_t plane_rows = int64_t(problem.axis[kSlow].out) * problem.axis[kMiddle].out;
  // Positions within a plane are 32-bit there.
  if (problem.out_plane() >= kNarrowLimit || problem.in_plane() >= kNarrowLimit) return shape;
  // What a block works out before it begins is worth many outputs; but it can ask for so many bytes ahead only,
  // and there should be blocks for all.
  constexpr int64_t kWantedBlocks = kMultiprocessors * kPoolBlocks * 2;
  const int64_t total = problem.planes() * plane_rows * fast;
  int64_t most = element_size == 2 ? 4096 : element_size == 4 ? 3072 : 2048;
  while (most > 1024 && total / most < kWantedBlocks) most /= 2;
  for (int64_t rows = std::max<int64_t>(1, most / fast); rows > 0; rows /= 2) {
    const int64_t planes = (rows + plane_rows - 2) / plane_rows + 1;
    const int64_t shared = rows * int64_t(sizeof(PoolRow<float>) + sizeof(int32_t)) +
                           planes * (kPoolAxes * int64_t(real_size) + fast * int64_t(sizeof(int32_t)));
    if (shared > kMostShared) continue;
    shape = {int32_t(rows), int32_t(planes), size_t(shared)};
    break;
  }
  return shape;
}

PoolStagedShape pool_staged_shape(const PoolProblem &problem, size_t element_size) {
  constexpr int64_t kMostShared = 56 * 1024;
  constexpr int64_t kWantedBlocks = kMultiprocessors * kStagedBlocks * 2;
  PoolStagedShape shape;
  const PoolAxis *axis = problem.axis;
  const bool flat = pool_is_flat(problem);
  if (element_size > pool_staged_widest(flat)) return shape;
  for (int a = 0; a < kPoolAxes; ++a) {
    if (flat && a == kMiddle) continue;
    // Cells between windows would be copied for nothing.
    if (axis[a].window != kStagedWindow || axis[a].out < 2 ||
        axis[a].last_start() > int64_t(kStagedWindow) * (axis[a].out - 1))
      return shape;
  }
  const PoolAxis &slow = axis[kSlow];
  const int64_t slice_bytes = int64_t(axis[kMiddle].in) * axis[kFast].in * int64_t(element_size);
  const int64_t slice_outs = int64_t(axis[kMiddle].out) * axis[kFast].out;
  if (slice_bytes % kStagedPiece != 0 || problem.in_plane() >= kNarrowLimit || problem.out_plane() >= kNarrowLimit ||
      problem.planes() * slow.out >= kNarrowLimit)
    return shape;
  const auto up = [](int64_t bytes) { return round_up(bytes, kStagedPiece); };
  int64_t slices = std::clamp<int64_t>((element_size == 2 ? 4096 : 3072) / slice_outs, 1, slow.out);
  while (slices > 1 && problem.planes() * ceil_div(slow.out, slices) < kWantedBlocks) slices /= 2;
  for (; slices > 0; slices /= 2) {
    const int64_t apart = ceil_div((slices - 1) * slow.last_start(), slow.out - 1);
    const int64_t cells = apart + kStagedWindow + flat + slow.below + slow.above + slow.tie;
    const int64_t rows_at = std::min<int64_t>(cells, slow.in) * slice_bytes;
    const int64_t columns_at = up(rows_at + slices * axis[kMiddle].out * int64_t(sizeof(PoolStagedRow)));
    const int64_t shared = columns_at + axis[kFast].out * int64_t(sizeof(uint32_t));
    if (shared > kMostShared) continue;
    shape = {int32_t(slices), int32_t(rows_at), int32_t(columns_at), size_t(shared)};
    break;
  }
  return shape;
}

namespace {

constexpr int64_t kProcessorShared = 227 * 1024;
constexpr int64_t kStripSlack = 11;

// How many slices a block takes, where there are `blocks` blocks for a slice and `at_once` run at once; 0: none.
//
// Long strips read few outputs twice; but there should be blocks for all multiprocessors, and the last ones
// should end together. All blocks take as long as each other, so the cost is the outputs of a strip, a few
// more for its beginning, times the rounds of blocks. Of strips that cost at most a `slack`-th more than the best,
// the short ones even out what the model leaves out. These are a large GPU's numbers.
int64_t pool_strip(const PoolAxis &slow, int64_t slots, int64_t blocks, int64_t at_once, int64_t slack) {
  constexpr int64_t kMostSpans = 2048;
  int64_t cost[kPoolMostStrips + 1] = {};
  int64_t least = INT64_MAX;
  int64_t strip = 0;
  const auto length_of = [&](int64_t strips) { return ceil_div(slow.in, strips); };
  const auto fits = [&](int64_t strips) {
    return (strips == 1 || length_of(strips) >= slots) && windows_over_most(slow, length_of(strips)) <= kMostSpans;
  };
  for (int64_t strips = 1; strips <= kPoolMostStrips; ++strips) {
    if (!fits(strips)) continue;
    const int64_t rounds = ceil_div(blocks * ceil_div(slow.in, length_of(strips)), at_once);
    cost[strips] = rounds * (windows_over_most(slow, length_of(strips)) + 2);
    least = std::min(least, cost[strips]);
  }
  for (int64_t strips = 1; strips <= kPoolMostStrips; ++strips)
    if (cost[strips] > 0 && cost[strips] <= least + least / slack) strip = length_of(strips);
  return strip;
}

// Whether lanes can add in the order that pool_runs tells of: of two outputs in a row, the later one's window has to
// begin later.
bool pool_runs_ordered(const PoolProblem &problem) {
  const PoolAxis &fast = problem.axis[kFast];
  return fast.out > 1 && fast.below == 0 && fast.last_start() >= fast.out - 1 + fast.tie &&
         window_reach(fast) <= kRunReach && problem.in_plane() < kNarrowLimit && problem.out_plane() < kNarrowLimit;
}

}  // namespace

PoolPatchesShape pool_patches_shape(const PoolProblem &problem, size_t real_size) {
  constexpr int64_t kMostShared = kProcessorShared / kPatchBlocks - 1024;
  PoolPatchesShape shape;
  const PoolAxis *axis = problem.axis;
  const int64_t patches = ceil_div(axis[kMiddle].in, kPatch) * ceil_div(axis[kFast].in, kPatch);
  const int64_t slots = window_reach(axis[kSlow]);
  const int64_t rows = windows_over_most(axis[kMiddle], std::min(kPatch, axis[kMiddle].in));
  const int64_t columns = windows_over_most(axis[kFast], std::min(kPatch, axis[kFast].in));
  // Patches that are mostly outside waste their threads.
  if (pool_is_flat(problem) || problem.in_plane() >= kNarrowLimit || problem.out_plane() >= kNarrowLimit ||
      axis[kFast].in < 2 || 2 * int64_t(axis[kMiddle].in) * axis[kFast].in < patches * kPatch * kPatch ||
      windows_over_most(axis[kFast], kTileColumns) > kTileGather || columns > kPatchThreads ||
      ceil_div(rows, kPatchThreads / columns) > kPatchPasses || problem.planes() * patches >= kNarrowLimit / 32)
    return shape;
  const int64_t strip =
      pool_strip(axis[kSlow], slots, problem.planes() * patches, kMultiprocessors * kPatchBlocks, kStripSlack);
  if (strip == 0) return shape;
  shape.tile_rows = int32_t(windows_over_most(axis[kMiddle], kTileRows));
  shape.rows = int32_t(rows);
  shape.pitch = int32_t(columns) + kTileGather;
  const int64_t decoded_at = slots * kPatch * kPatch * int64_t(real_size);
  const int64_t spans_at = decoded_at + (rows + shape.tile_rows) * shape.pitch * 2 * int64_t(real_size);
  const int64_t rows_at = spans_at + windows_over_most(axis[kSlow], strip) * int64_t(sizeof(PoolSpan));
  const int64_t shared = rows_at + rows * int64_t(sizeof(PoolTileRow));
  if (shared > kMostShared) return shape;
  shape.slots = int32_t(slots);
  shape.strip = int32_t(strip);
  shape.decoded_at = int32_t(decoded_at);
  shape.spans_at = int32_t(spans_at);
  shape.rows_at = int32_t(rows_at);
  shape.shared = size_t(shared);
  return shape;
}

PoolRunsShape pool_runs_shape(const PoolProblem &problem, size_t element_size) {
  constexpr int64_t kMostShared = kProcessorShared / 3 - 1024;
  constexpr int64_t kSolidCells = 1024;  // of a run in three dimensions
  PoolRunsShape shape;
  const PoolAxis *axis = problem.axis;
  const PoolAxis &slow = axis[kSlow];
  const PoolAxis &fast = axis[kFast];
  const bool flat = pool_is_flat(problem);
  const PoolAxis &banded = axis[flat ? kFast : kMiddle];
  const RunTuning tuning = run_tuning(flat, element_size);
  const int64_t group = tuning.vectors * kLanes;
  const int64_t reach = window_reach(fast);
  if (tuning.vectors == 0 || !pool_runs_ordered(problem)) return shape;
  int64_t band = 0;
  if (flat) {
    constexpr int64_t kWhole = 8;  // columns, so that lines are written whole
    int64_t bands = 0;
    do {
      ++bands;
      band = round_up(ceil_div(fast.in, bands), kWhole);
    } while (windows_over_most(fast, band) > group && band > kWhole);
  } else {
    band = std::min<int64_t>(banded.in, kSolidCells / fast.in);
    // Outputs that a warp takes at once may lie in two rows, but then not within reach of each other.
    if (band == 0 || fast.out < kLanes - 1 + reach) return shape;
  }
  const int64_t bands = ceil_div(banded.in, band);
  const int64_t over_band = windows_over_most(banded, band);
  const int64_t outputs = over_band * (flat ? 1 : fast.out);
  const int64_t groups = ceil_div(outputs, group);
  const int64_t blocks_planes = ceil_div(problem.planes(), kRunWarps);
  // Lanes without an output, warps without a plane, and outputs that several warps read are wasted.
  if ((flat && groups > 1) || 6 * outputs < 5 * groups * group ||
      4 * problem.planes() < 3 * blocks_planes * kRunWarps || 5 * over_band * banded.in > 8 * band * banded.out ||
      blocks_planes * bands >= kNarrowLimit / 32)
    return shape;
  const int64_t slots = window_reach(slow);
  const int64_t slot_bytes = round_up(band * (flat ? 1 : fast.in) * int64_t(sizeof(float)), 16);
  const int64_t fixed = groups * group * int64_t(sizeof(PoolRunOutput)) + kRunWarps * slots * slot_bytes;
  if (fixed > kMostShared) return shape;
  const int64_t at_once = kMultiprocessors * std::min<int64_t>(tuning.blocks, kProcessorShared / (fixed + 2048));
  const int64_t strip = pool_strip(slow, slots, blocks_planes * bands, at_once, INT64_MAX);
  if (strip == 0) return shape;
  shape.strip = int32_t(strip);
  shape.strips = int32_t(ceil_div(slow.in, strip));
  shape.band = int32_t(band);
  shape.bands = int32_t(bands);
  shape.groups = int32_t(groups);
  shape.slots = int32_t(slots);
  shape.slot_bytes = uint32_t(slot_bytes);
  shape.outputs_at = int32_t(round_up(windows_over_most(slow, strip) * int64_t(sizeof(PoolSpan)), 16));
  shape.sums_at = int32_t(shape.outputs_at + groups * group * int64_t(sizeof(PoolRunOutput)));
  shape.shared = size_t(shape.outputs_at + fixed);
  return shape;
}

PoolSlabsShape pool_slabs_shape(const PoolProblem &problem, size_t element_size) {
  PoolSlabsShape shape;
  const PoolAxis &slow = problem.axis[kSlow];
  const PoolAxis &middle = problem.axis[kMiddle];
  const PoolAxis &fast = problem.axis[kFast];
  const SlabTuning tuning = slab_tuning(element_size);
  // Of two outputs along an axis, the later one's window has to begin later.
  const auto ordered = [](const PoolAxis &axis) {
    return axis.out > 1 && axis.last_start() >= axis.out - 1 && window_reach(axis) <= kRunReach;
  };
  if (tuning.threads == 0 || pool_is_flat(problem) || problem.placement != Placement::even || !ordered(middle) ||
      !ordered(fast) || problem.in_plane() >= kNarrowLimit || problem.out_plane() >= kNarrowLimit)
    return shape;
  // Lanes without an output are wasted.
  constexpr int64_t kAllBusy = kLanes * kSlabOutputs * (kSlabOutputs + 1);
  int64_t busy = 0;
  for (int32_t outputs = kSlabOutputs; outputs <= kSlabOutputs + 1; ++outputs) {
    const int64_t lanes = ceil_div(fast.out, outputs);
    const int64_t lanes_busy = kLanes / lanes * fast.out * (kAllBusy / kLanes) / outputs;
    if (lanes_busy <= busy) continue;
    busy = lanes_busy;
    shape.outputs = outputs;
    shape.lanes = uint32_t(lanes);
  }
  if (3 * busy < 2 * kAllBusy) return shape;
  // With so many more slots than an output could name at once, a slice is written while the next one's are added.
  const int64_t reach = window_reach(slow);
  const int64_t apart = slow.out > 1 ? ceil_div(slow.last_start(), slow.out - 1) : 0;
  const int64_t most_shared = kProcessorShared / tuning.blocks - 1024;
  const auto up = [](int64_t bytes) { return round_up(bytes, kBulkBytes); };
  for (int64_t bands = 1; bands <= std::min<int64_t>(middle.in, kPoolMostStrips); ++bands) {
    const int64_t band = ceil_div(middle.in, bands);
    const int64_t rows = windows_over_most(middle, band);
    const int64_t threads = ceil_div(ceil_div(rows, kSlabRows), kLanes / shape.lanes) * kLanes;
    if (threads > tuning.threads) continue;
    const int64_t blocks = problem.planes() * ceil_div(middle.in, band);
    // Outputs that several blocks read are wasted.
    if (5 * rows * middle.in > 8 * band * middle.out || blocks >= kNarrowLimit / 32) return shape;
    const int64_t strip = pool_strip(slow, reach, blocks, kMultiprocessors * tuning.blocks, INT64_MAX);
    if (strip == 0) return shape;
    const int64_t slot_bytes = up(band * fast.in * int64_t(sizeof(float)));
    // A slice may begin anywhere in a line, and a row's last lane reads on a little.
    const auto lines = [](int64_t bytes) { return round_up(bytes, kBulkLine); };
    const int64_t gradients_at = lines(rows * fast.out * int64_t(sizeof(int64_t)) + kBulkLine);
    const int64_t stage_bytes = gradients_at + lines(rows * fast.out * int64_t(element_size) + kBulkLine + kBulkBytes);
    const int64_t tables = up(fast.out * int64_t(sizeof(PoolSpan)) + rows * int64_t(sizeof(int32_t)));
    const int64_t slices_bytes = windows_over_most(slow, strip) * int64_t(sizeof(PoolSlabSlice));
    int64_t slots = reach + apart + 1;
    int64_t stages_at = 0;
    int64_t stages = 0;
    while (stages < kFewestSlabStages && slots > reach) {
      --slots;
      stages_at = lines(std::max(slots * slot_bytes, tables));
      stages = std::min<int64_t>((most_shared - stages_at - slices_bytes) / stage_bytes, kMostSlabStages);
    }
    if (stages < kFewestSlabStages) continue;
    // Where there is room for few blocks, and all strips are as long as each other, some blocks are done long before
    // others, because memory doesn't serve all multiprocessors alike. So some of the slices are left for them. Where
    // outputs are dense, instructions are what takes time, and each beginning of a strip costs more of them.
    const int64_t share = strip / kSlabShare;
    const int64_t long_strips = ceil_div(slow.in, strip);
    const int64_t left = slow.in - long_strips * (strip - share);
    const bool shares = element_size > 2 && stages_at + stages * stage_bytes > kProcessorShared / (tuning.blocks + 1) &&
                        4 * slow.out <= 3 * slow.in && share >= reach && left >= share &&
                        2 * long_strips <= kPoolMostStrips;
    const int64_t long_strip = shares ? strip - share : strip;
    const int64_t short_strip = shares ? ceil_div(left, left / share) : 0;
    const int64_t short_strips = shares ? ceil_div(left, short_strip) : 0;
    shape.threads = int32_t(threads);
    shape.band = int32_t(band);
    shape.bands = int32_t(ceil_div(middle.in, band));
    shape.strip = int32_t(long_strip);
    shape.long_strips = int32_t(long_strips);
    shape.short_strip = int32_t(short_strip);
    shape.strips = int32_t(long_strips + short_strips);
    shape.slots = int32_t(slots);
    shape.slot_bytes = uint32_t(slot_bytes);
    shape.stages = int32_t(stages);
    shape.stage_bytes = uint32_t(stage_bytes);
    shape.gradients_at = uint32_t(gradients_at);
    shape.stages_at = int32_t(stages_at);
    shape.slices_at = int32_t(stages_at + stages * stage_bytes);
    // Multiprocessors that are free first are given as many of an early kernel's blocks as they have room for: no more
    // than others are to have.
    const int64_t each = ceil_div(blocks * shape.strips, kMultiprocessors);
    const int64_t no_more = (kProcessorShared + 1024) / (each + 1) - 1024 + kBulkBytes;
    shape.shared = size_t(std::max(shape.slices_at + slices_bytes, no_more));
    break;
  }
  return shape;
}

PoolSweepShape pool_sweep_shape(const PoolProblem &problem, size_t element_size, size_t index_size) {
  PoolSweepShape shape;
  const PoolAxis &slow = problem.axis[kSlow];
  const PoolAxis &fast = problem.axis[kFast];
  const SweepTuning tuning = sweep_tuning(element_size);
  // With wider steps there could be rows that no window holds.
  if (tuning.vectors == 0 || !pool_is_flat(problem) || !pool_runs_ordered(problem) || slow.out < 2 ||
      slow.last_start() > 2 * (slow.out - 1) || fast.out < tuning.vectors * kLanes ||
      problem.planes() >= kNarrowLimit / 32)
    return shape;
  // What the kernel divides has to be small enough.
  const auto narrow = [](const PoolAxis &axis) { return int64_t(axis.out) * axis.last_start() < kNarrowLimit; };
  if (!narrow(slow) || !narrow(fast) || window_reach(slow) * fast.in >= kNarrowLimit / fast.in) return shape;
  int64_t warps = 0;
  int64_t columns = 0;
  do {
    columns = ceil_div(fast.in, ++warps);
  } while (windows_over_most(fast, columns) > tuning.vectors * kLanes);
  if (warps > kSweepMostWarps || (warps - 1) * columns >= fast.in) return shape;
  // While some rows are written, others are added to that the next outputs could name. The sums, and those of a row,
  // are a multiple of sixteen bytes.
  int64_t open = ceil_div((2 * tuning.rows - 1) * int64_t(slow.last_start()), slow.out - 1) + window_reach(slow);
  while (open * fast.in % kTileColumns != 0) ++open;
  const auto up = [](int64_t bytes) { return round_up(bytes, kBulkLine); };
  const int64_t stages_at = up(open * fast.in * int64_t(sizeof(float)));
  const int64_t gradients_at = up(tuning.rows * fast.out * int64_t(index_size) + kBulkLine);
  const int64_t stage_bytes = gradients_at + up(tuning.rows * fast.out * int64_t(element_size) + kBulkLine);
  const int64_t rows_at = stages_at + tuning.stages * stage_bytes;
  const auto shared = [&](int64_t strip) {
    return rows_at + (windows_over_most(slow, strip) + tuning.rows) * int64_t(sizeof(PoolSweepRow));
  };
  constexpr int64_t kUsualStrip = 64;
  constexpr int64_t kAtOnce = 24;  // warps, as their registers allow
  const int64_t blocks = std::min<int64_t>(kAtOnce / warps, kProcessorShared / (shared(kUsualStrip) + 1024));
  if (blocks < 2) return shape;
  // Measured: short strips are faster, though more rows are read twice.
  constexpr int64_t kShortStripSlack = 8;
  const int64_t strip = pool_strip(slow, open, problem.planes(), kMultiprocessors * blocks, kShortStripSlack);
  // Measured: where few blocks run, many warps are worth more than bytes that are ahead.
  constexpr int64_t kFewBlocks = 3 * kMultiprocessors;
  if (strip == 0 || problem.planes() * ceil_div(slow.in, strip) < kFewBlocks) return shape;
  shape.warps = int32_t(warps);
  shape.columns = int32_t(columns);
  shape.strip = int32_t(strip);
  shape.open = uint32_t(open);
  shape.stages_at = uint32_t(stages_at);
  shape.gradients_at = uint32_t(gradients_at);
  shape.stage_bytes = uint32_t(stage_bytes);
  shape.rows_at = uint32_t(rows_at);
  shape.shared = size_t(shared(strip));
  return shape;
}

PoolTilesShape pool_tiles_shape(const PoolProblem &problem, size_t real_size, size_t element_size, bool unit) {
  constexpr int64_t kMostSums = 64 * 1024;
  constexpr int64_t kMostGather = 64;
  constexpr int64_t kMostRows = 16;
  PoolTilesShape shape;
  const PoolAxis *axis = problem.axis;
  const bool flat = pool_is_flat(problem);
  const int64_t rows = flat ? 1 : kTileRows;
  const int64_t slots = int64_t(std::bit_ceil(uint64_t(window_reach(axis[kSlow]))));
  const int64_t sums = slots * rows * kTileColumns * kTileThreads * int64_t(real_size);
  const int64_t out_rows = windows_over_most(axis[kMiddle], rows);
  const int64_t gather = windows_over_most(axis[kFast], kTileColumns);
  // A row of one cell has no quotients to speak of.
  if (problem.in_plane() >= kNarrowLimit || problem.out_plane() >= kNarrowLimit || axis[kFast].in < 2 ||
      sums > kMostSums || gather > kMostGather || out_rows > kMostRows)
    return shape;
  shape.chunked = gather > kTileGather;
  shape.chunks = shape.chunked ? int32_t(ceil_div(gather, kTileMostGather)) : 1;
  const int64_t rows_bytes = flat ? 0 : out_rows * kTileThreads * int64_t(sizeof(PoolTileRow));
  const int64_t columns_bytes = shape.chunks * kTileThreads * int64_t(sizeof(uint32_t));
  const int64_t blocks = ceil_div(
      problem.planes() * ceil_div(axis[kMiddle].in, rows) * ceil_div(axis[kFast].in, kTileColumns), kTileThreads);
  const int64_t at_once =
      kMultiprocessors * std::min<int64_t>(tile_tuning(flat, unit, shape.chunked, real_size == sizeof(double)).blocks,
                                           kProcessorShared / (sums + rows_bytes + columns_bytes + 2048));
  // Measured: 16-bit outputs are bound by instructions, and have none to spare for the beginnings of short strips.
  const int64_t strip =
      pool_strip(axis[kSlow], slots, blocks, at_once, flat && unit && element_size == 2 ? INT64_MAX : kStripSlack);
  if (strip == 0) return shape;
  const int64_t outs = windows_over_most(axis[kSlow], strip);
  shape.slots = int32_t(slots);
  shape.strip = int32_t(strip);
  shape.strip_outs = int32_t(outs);
  shape.columns_at = int32_t(outs * int64_t(sizeof(PoolSpan)));
  shape.rows_at = shape.columns_at + int32_t(columns_bytes);
  shape.sums_at = int32_t(ceil_div(shape.rows_at + rows_bytes, int64_t(sizeof(double))) * int64_t(sizeof(double)));
  shape.shared = size_t(shape.sums_at + sums);
  return shape;
}

bool pool_row_major(const PoolProblem &problem, const PoolView &view, bool of_inputs) {
  const auto extent = [&](int axis) -> int64_t { return of_inputs ? problem.axis[axis].in : problem.axis[axis].out; };
  const int64_t slow = extent(kSlow);
  const int64_t middle = extent(kMiddle);
  const int64_t fast = extent(kFast);
  // The stride of an axis of one entry means nothing.
  const auto fits = [](int64_t extent, int64_t stride, int64_t wanted) { return extent == 1 || stride == wanted; };
  return fits(fast, view.axis[kFast], 1) && fits(middle, view.axis[kMiddle], fast) &&
         fits(slow, view.axis[kSlow], fast * middle) && fits(problem.channels, view.channel, fast * middle * slow) &&
         fits(problem.batch, view.batch, fast * middle * slow * problem.channels);
}

PoolOrder pool_order(const PoolProblem &problem, const PoolView &view, bool of_inputs) {
  int64_t extent[kTensorAxes] = {problem.batch, problem.channels};
  int64_t stride[kTensorAxes] = {view.batch, view.channel};
  for (int axis = 0; axis < kPoolAxes; ++axis) {
    extent[2 + axis] = of_inputs ? problem.axis[axis].in : problem.axis[axis].out;
    stride[2 + axis] = view.axis[axis];
  }
  int order[kTensorAxes] = {0, 1, 2, 3, 4};
  std::stable_sort(order, order + kTensorAxes, [&](int a, int b) {
    // Axes of one entry come first, whatever their strides are.
    return (extent[a] == 1 ? INT64_MAX : std::abs(stride[a])) > (extent[b] == 1 ? INT64_MAX : std::abs(stride[b]));
  });
  PoolOrder result = {};
  result.total = 1;
  for (int place = kTensorAxes - 1; place >= 0; --place) {
    const int axis = order[place];
    result.step[axis] = result.total;
    result.extent[axis] = extent[axis];
    result.total *= extent[axis];
  }
  result.wide = result.total >= int64_t(1) << 32;
  if (!result.wide) {
    for (int axis = 0; axis < kTensorAxes; ++axis) {
      result.step32[axis] = Divider(uint32_t(result.step[axis]));
      result.extent32[axis] = Divider(uint32_t(result.extent[axis]));
    }
  }
  return result;
}

bool pool_channels_last(const PoolProblem &problem, const PoolView &view, bool of_inputs) {
  constexpr int64_t kFewestChannels = 8;
  if (problem.channels < kFewestChannels) return false;
  for (int axis = 0; axis < kPoolAxes; ++axis) {
    const int32_t extent = of_inputs ? problem.axis[axis].in : problem.axis[axis].out;
    if (extent > 1 && std::abs(view.axis[axis]) <= std::abs(view.channel)) return false;
  }
  return true;
}

PoolLines pool_lines_of(const PoolProblem &problem, bool of_inputs) {
  const auto extent = [&](int axis) { return of_inputs ? problem.axis[axis].in : problem.axis[axis].out; };
  PoolLines lines = {};
  lines.pieces = int32_t(ceil_div(extent(kFast), kLineItems));
  lines.total = problem.planes() * extent(kSlow) * extent(kMiddle) * lines.pieces;
  lines.wide = lines.total >= int64_t(1) << 32;
  if (!lines.wide) {
    lines.channels = Divider(uint32_t(problem.channels));
    lines.pieces32 = Divider(uint32_t(lines.pieces));
    lines.middle = Divider(uint32_t(extent(kMiddle)));
    lines.slow = Divider(uint32_t(extent(kSlow)));
  }
  return lines;
}

void fractional_max_pool_cuda(const PoolForward &call, Stream stream) {
  dispatch_dtype<float16, bfloat16, float, double>(
      call.dtype, [&](auto tag) { fractional_max_pool_cuda_of<typename decltype(tag)::type>(call, stream); });
}

void fractional_max_pool_backward_cuda(const PoolBackward &call, Stream stream) {
  dispatch_dtype<float16, bfloat16, float, double>(
      call.dtype, [&](auto tag) { fractional_max_pool_backward_cuda_of<typename decltype(tag)::type>(call, stream); });
}

const char *fractional_max_pool_path(const PoolProblem &problem, DLDataType dtype) {
  return pool_rows_shape(problem, real_size(dtype), dtype.bits / 8).rows > 0 ? "rows" : "any";
}

const char *fractional_max_pool_backward_path(const PoolProblem &problem, DLDataType dtype, DLDataType index_dtype) {
  const int size = dtype.bits / 8;
  const int index_size = index_dtype.bits / 8;
  if (DeviceGuard::kernels_can_wait() && pool_slabs_shape(problem, size).slots > 0) return "slabs";
  const int64_t outs = problem.planes() * problem.out_plane();
  const bool whole = outs * size % kBulkBytes == 0 && outs * index_size % kBulkBytes == 0;
  if (DeviceGuard::kernels_can_wait() && whole && pool_sweep_shape(problem, size, index_size).warps > 0) return "sweep";
  if (pool_runs_shape(problem, size).slots > 0) return "runs";
  if (pool_patches_shape(problem, real_size(dtype)).slots > 0) return "patches";
  return pool_tiles_shape(problem, real_size(dtype), dtype.bits / 8, true).slots > 0 ? "tiles" : "any";
}

std::string fractional_max_pool_arch(const char *plan) {
  return kernel_arch(plan, reinterpret_cast<const void *>(arch_probe));
}

}  // namespace baracuda
