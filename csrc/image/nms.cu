// SPDX-License-Identifier: Apache-2.0
// Non-maximum suppression entirely on the device, in a fixed number of launches.
//
// Boxes are ranked by their scores, and put into an order of class and space, in which 32 neighbours are a tile. What
// overlaps a box by more than the threshold has corners in intervals that follow from the box: tiles, then boxes, are
// compared only where the one's corners lie in the other's intervals. Each overlap found is put on the list of the
// later box of the two. Then every box looks at the earlier boxes on its list: it is suppressed as soon as one of them
// is kept, and kept when all of them are suppressed. A box waits only for earlier ones, and blocks take their ranks by
// ticket, so those are running or done.
//
// Overlaps are stored up to a bound. Where there are more, which takes many boxes on top of one another, one block goes
// through the ranks instead and compares with the kept boxes; what the first of these suppress is left out by all.
//
// Which boxes share a tile depends on the order in which atomics arrive. What overlaps and what is kept doesn't.
#include <algorithm>
#include <bit>

#include <cub/device/device_radix_sort.cuh>

#include "image/nms_decide.cuh"
#include "image/nms_order.cuh"
#include "image/nms_overlaps.cuh"
#include "runtime/workspace.h"

namespace baracuda {
namespace nms {
namespace {

size_t sort_bytes_of(int64_t count) {
  size_t bytes = 0;
  check_cuda(cub::DeviceRadixSort::SortKeys(nullptr, bytes, static_cast<const uint64_t *>(nullptr),
                                            static_cast<uint64_t *>(nullptr), int(count), 32, 64),
             "DeviceRadixSort");
  return bytes;
}

template <class Real>
Space<Real> lay_out(int64_t count, bool classes, Workspace &space) {
  Space<Real> s = {};
  if (count <= kMostCounted) {
    s.before = space.take<uint32_t>(count * ceil_div(count, kCountChunk));
  } else {
    s.keys = space.take<uint64_t>(count);
    s.sorted = space.take<uint64_t>(count);
    s.sort_bytes = sort_bytes_of(count);
    s.sort = space.take<std::byte>(int64_t(s.sort_bytes));
  }
  s.counters = space.take<Counters>(1);
  s.survey = space.take<Survey>(1);
  s.order = space.take<int32_t>(count);
  s.boxes = space.take<NmsBox<Real>>(count);
  s.states = space.take<int32_t>(count);
  s.lists = space.take<uint32_t>(count);
  s.most_overlaps = uint32_t(kOverlapsEach * count + kOverlapsMore);
  s.overlaps = space.take<uint2>(s.most_overlaps);
  s.kept_bits = space.take<uint32_t>(ceil_div(count, kLanes));
  s.kept_ranks = space.take<int32_t>(count);
  // Some boxes a cell; an even number of bits, for two axes.
  s.cell_bits = std::clamp(int(std::bit_width(uint64_t(count / 8)) + 1) / 2 * 2, 8, 18);
  s.cells = space.take<uint32_t>(int64_t(1) << s.cell_bits);
  s.starts = space.take<uint32_t>(int64_t(1) << s.cell_bits);
  s.spots = space.take<uint2>(count);
  s.ranks = space.take<uint32_t>(count);
  s.placed = space.take<NmsBox<Real>>(count);
  if (classes) {
    s.classes = space.take<int64_t>(count);
    s.placed_classes = space.take<int64_t>(count);
  }
  const int64_t tiles = ceil_div(count, kLanes);
  const int64_t groups = ceil_div(tiles, kGroup);
  s.held = space.take<Intervals<Real>>(tiles);
  s.reached = space.take<Intervals<Real>>(tiles);
  s.kinds = space.take<ClassRange>(tiles);
  s.group_held = space.take<Intervals<Real>>(groups);
  s.group_kinds = space.take<ClassRange>(groups);
  return s;
}

template <class Real>
void rank_by_scores(const NmsCall &call, const Space<Real> &space, Stream stream) {
  const int64_t count = call.boxes_count;
  const int64_t blocks = ceil_div(count, kThreads);
  const bool wide = call.scores.dtype.bits == 64;
  if (space.before) {
    const int32_t chunks = int32_t(ceil_div(count, kCountChunk));
    launch(wide ? count_before<Real, uint64_t> : count_before<Real, uint32_t>,
           {.blocks = 1 + blocks * chunks, .threads = kThreads, .early = true}, stream, call, chunks, space);
    return;
  }
  for (int round = 0; round < (wide ? 2 : 1); ++round) {
    launch(make_keys<Real>, {.blocks = 1 + blocks, .threads = kThreads, .early = true}, stream, call, round == 1,
           space);
    size_t bytes = space.sort_bytes;
    check_cuda(cub::DeviceRadixSort::SortKeys(space.sort, bytes, space.keys, space.sorted, int(count), 32, 64,
                                              static_cast<cudaStream_t>(stream)),
               "DeviceRadixSort");
  }
}

template <class Real>
void run(const NmsCall &call, Stream stream) {
  const int64_t count = call.boxes_count;
  const auto grid = [](int64_t blocks, int threads = kThreads) {
    return Grid{.blocks = blocks, .threads = threads, .early = true};
  };
  if (count == 0) {
    launch(collect<Real>, grid(1), stream, call, int64_t(1), Space<Real>{});
    return;
  }
  Workspace workspace(call.workspace);
  const Space<Real> space = lay_out<Real>(count, call.classes != nullptr, workspace);
  const Real threshold = Real(call.threshold);
  const Grid each = grid(ceil_div(count, kThreads));
  rank_by_scores(call, space, stream);
  launch(gather_boxes<Real>, each, stream, call, space);
  const int64_t cells = int64_t(1) << space.cell_bits;
  launch(place_cells<Real>, grid(ceil_div(cells, kStartThreads * kStartEach), kStartThreads), stream, space);
  launch(place_boxes<Real>, each, stream, count, space);
  const int64_t tiles = ceil_div(count, kLanes);
  launch(make_hulls<Real>, grid(ceil_div(tiles, kGroup), kGroup * kLanes), stream, count, threshold, space);
  // Enough blocks for a large GPU, whatever the number of boxes.
  constexpr int64_t kWantedBlocks = 1 << 10;
  const int32_t slices = int32_t(std::min(ceil_div(kWantedBlocks, tiles), tiles));
  launch(find_overlaps<Real>, grid(tiles * slices, kFindThreads), stream, count, slices, threshold, space);
  launch(decide<Real>, each, stream, count, space);
  const int64_t first = std::min(count, int64_t(kSweepThreads));
  launch(sweep<Real>, grid(1, kSweepThreads), stream, int64_t(0), first, threshold, space);
  if (count > first) {
    launch(filter<Real>, grid(ceil_div(count - first, kThreads)), stream, count, threshold, space);
    launch(sweep<Real>, grid(1, kSweepThreads), stream, first, count, threshold, space);
  }
  // Each block counts what is before it, so they are not too many.
  constexpr int64_t kMostBlocks = 256;
  const int64_t words_each = std::max(ceil_div(tiles, kMostBlocks * kWarps), int64_t(4));
  launch(collect<Real>, grid(ceil_div(tiles, words_each * kWarps)), stream, call, words_each, space);
}

}  // namespace
}  // namespace nms

void nms_cuda(const NmsCall &call, Stream stream) {
  if (call.dtype == DTypeOf<double>::value) {
    nms::run<double>(call, stream);
  } else {
    nms::run<float>(call, stream);
  }
}

size_t nms_workspace(int64_t boxes, DLDataType dtype, bool classes) {
  if (boxes == 0) return 0;
  Workspace space(nullptr);
  if (dtype == DTypeOf<double>::value) {
    nms::lay_out<double>(boxes, classes, space);
  } else {
    nms::lay_out<float>(boxes, classes, space);
  }
  return space.size();
}

}  // namespace baracuda
