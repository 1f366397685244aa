// SPDX-License-Identifier: Apache-2.0
// Pairs of boxes that overlap by more than the threshold, on lists of their later boxes.
#pragma once

#include "image/nms_order.cuh"

namespace baracuda::nms {

template <class Real>
__device__ inline Real least(Real a, Real b) {
  return b < a ? b : a;
}
template <class Real>
__device__ inline Real greatest(Real a, Real b) {
  return a < b ? b : a;
}

template <class Real>
__device__ inline Intervals<Real> no_intervals() {
  constexpr Real kFar = Real(INFINITY);
  return {{kFar, kFar, kFar, kFar}, {-kFar, -kFar, -kFar, -kFar}};
}

// Whether a box can overlap any, whose overlaps are never negative: finite, with an area. Of others the shared area or
// its ratio to the union is zero or NaN.
template <class Real>
__device__ inline bool can_overlap(const NmsBox<Real> &box) {
  const Real area = nms_area(box);
  return box.x1 < box.x2 && box.y1 < box.y2 && area > 0 && area < Real(INFINITY);
}

// Where the numbers are of those that overlap a box by more than the threshold t. If they do, so do their sides along
// each axis: of two sides of lengths a and b, then, they share more than t times what they cover together. So the other
// begins between a/t before this one's end and t·a before it, and ends likewise.
template <class Real>
__device__ inline Intervals<Real> reach_of(const NmsBox<Real> &box, Real threshold) {
  constexpr Real kFar = Real(INFINITY);
  // A negative threshold is exceeded by boxes that lie apart.
  if (threshold < 0) return {{-kFar, -kFar, -kFar, -kFar}, {kFar, kFar, kFar, kFar}};
  if (!can_overlap(box)) return no_intervals<Real>();
  // The margins are far above the rounding of areas and ratios, but where these are next to nothing.
  constexpr Real kLeastArea = sizeof(Real) == 8 ? Real(1e-290) : Real(1e-30);
  constexpr Real kLeastThreshold = Real(1e-4);
  const bool sure = threshold > kLeastThreshold && nms_area(box) > kLeastArea;
  const Real shared = sure ? threshold * Real(0.999) : Real(0);
  const Real most = sure ? 1 / shared : kFar;
  const Real width = box.x2 - box.x1;
  const Real height = box.y2 - box.y1;
  return {{box.x2 - most * width, box.y2 - most * height, box.x1 + shared * width, box.y1 + shared * height},
          {box.x2 - shared * width, box.y2 - shared * height, box.x1 + most * width, box.y1 + most * height}};
}

template <class Real>
__device__ inline bool meet(const Intervals<Real> &a, const Intervals<Real> &b) {
  bool all = true;
  for (int k = 0; k < 4; ++k) all &= a.low[k] <= b.high[k] & b.low[k] <= a.high[k];
  return all;
}

__device__ inline bool meet(ClassRange a, ClassRange b) { return a.low <= b.high && b.low <= a.high; }

template <class Real>
__device__ inline void join_lanes(Intervals<Real> &intervals) {
  for (int k = 0; k < 4; ++k) {
    for (int step = kLanes / 2; step > 0; step /= 2) {
      intervals.low[k] = least(intervals.low[k], __shfl_xor_sync(kAllLanes, intervals.low[k], step));
      intervals.high[k] = greatest(intervals.high[k], __shfl_xor_sync(kAllLanes, intervals.high[k], step));
    }
  }
}

__device__ inline ClassRange join_lanes(ClassRange range) {
  return {__reduce_min_sync(kAllLanes, range.low), __reduce_max_sync(kAllLanes, range.high)};
}

// A warp for each tile, a block for each group.
template <class Real>
__global__ void __launch_bounds__(kGroup *kLanes) make_hulls(int64_t count, Real threshold, Space<Real> space) {
  __shared__ Intervals<Real> shared_held[kGroup];
  __shared__ ClassRange shared_kinds[kGroup];
  wait_for_earlier_work();
  const int64_t place = int64_t(blockIdx.x) * kGroup * kLanes + threadIdx.x;
  const int lane = int(threadIdx.x % kLanes);
  const int warp = int(threadIdx.x / kLanes);
  Intervals<Real> held = no_intervals<Real>();
  Intervals<Real> reached = held;
  ClassRange kinds = {~0u, 0};
  if (place < count) {
    const NmsBox<Real> box = space.placed[place];
    if (can_overlap(box)) held = {{box.x1, box.y1, box.x2, box.y2}, {box.x1, box.y1, box.x2, box.y2}};
    reached = reach_of(box, threshold);
    const uint32_t kind = space.classes ? class_bucket(space.placed_classes[place], space.survey->class_bits) : 0;
    kinds = {kind, kind};
  }
  join_lanes(held);
  join_lanes(reached);
  kinds = join_lanes(kinds);
  if (lane == 0) {
    if (place < count) {
      space.held[place / kLanes] = held;
      space.reached[place / kLanes] = reached;
      space.kinds[place / kLanes] = kinds;
    }
    shared_held[warp] = held;
    shared_kinds[warp] = kinds;
  }
  __syncthreads();
  if (warp != 0) return;
  held = shared_held[lane];
  join_lanes(held);
  kinds = join_lanes(shared_kinds[lane]);
  if (lane != 0) return;
  space.group_held[blockIdx.x] = held;
  space.group_kinds[blockIdx.x] = kinds;
}

template <class Real>
struct alignas(16) Placed {
  NmsBox<Real> box;
  int64_t kind;
  Real area;
  uint32_t rank;
};

// Overlaps that a warp has found wait for others, so that a slot is asked for less often.
constexpr int kWaitingOverlaps = 128;
constexpr int kFindThreads = 128;
template <class Real>
constexpr int kFindBlocks = sizeof(Real) == 8 ? 6 : 10;  // of a multiprocessor, at least
constexpr int kFindWarps = kFindThreads / kLanes;
constexpr int kMostTiles = 2 * kFindThreads;

template <class Real>
struct Finder {
  Placed<Real> own[kLanes];
  Intervals<Real> held;
  uint32_t groups[kFindThreads];
  uint32_t tiles[kMostTiles];
  uint2 waiting[kFindWarps][kWaitingOverlaps];
  uint32_t found[kFindWarps];
  int32_t groups_count;
  int32_t tiles_count;
  int32_t tiles_taken;
  uint32_t base;
};

__device__ inline void store_overlap(uint2 *overlaps, uint32_t most, uint32_t *lists, uint32_t slot, uint2 ranks) {
  if (slot < most) overlaps[slot] = make_uint2(ranks.x, atomicExch(&lists[ranks.y], slot + 1));
}

// Adds the numbers of those lanes where it holds to a list in shared memory. Returns its length then.
__device__ inline int32_t list_lanes(bool holds, uint32_t number, uint32_t *list, int32_t *count) {
  const unsigned lanes = __ballot_sync(kAllLanes, holds);
  const int lane = int(threadIdx.x % kLanes);
  int32_t base = 0;
  if (lane == 0 && lanes) base = atomicAdd(count, __popc(lanes));
  base = __shfl_sync(kAllLanes, base, 0);
  if (holds) list[base + __popc(lanes & ((1u << lane) - 1))] = number;
  return base + __popc(lanes);
}

// A block compares a tile with itself and those after it, or with every so manieth of them. Its warps look for tiles
// to compare with together, then each takes one at a time.
template <class Real>
__global__ void __launch_bounds__(kFindThreads, kFindBlocks<Real>)
    find_overlaps(int64_t count, int32_t slices, Real threshold, Space<Real> space) {
  __shared__ Finder<Real> shared;
  wait_for_earlier_work();
  const int lane = int(threadIdx.x % kLanes);
  const int warp = int(threadIdx.x / kLanes);
  const int64_t tiles = (count + kLanes - 1) / kLanes;
  const int64_t groups = (tiles + kGroup - 1) / kGroup;
  const int64_t tile = blockIdx.x / uint32_t(slices);
  const int32_t slice = int32_t(blockIdx.x % uint32_t(slices));
  bool beyond = false;  // more overlaps than are stored
  if (warp == 0) {
    const int64_t place = tile * kLanes + lane;
    if (place < count) {
      const NmsBox<Real> box = space.placed[place];
      shared.own[lane] = {box, space.classes ? space.placed_classes[place] : 0, nms_area(box), space.ranks[place]};
    }
    if (lane == 0) {
      shared.held = space.held[tile];
      shared.groups_count = shared.tiles_count = shared.tiles_taken = 0;
      beyond = *static_cast<volatile uint32_t *>(&space.counters->overlaps) > space.most_overlaps;
    }
  }
  if (__syncthreads_or(beyond)) return;
  Intervals<Real> own_reach = no_intervals<Real>();
  if (tile * kLanes + lane < count) own_reach = reach_of(shared.own[lane].box, threshold);
  const Intervals<Real> reached = space.reached[tile];
  const ClassRange kinds = space.kinds[tile];

  uint32_t found = 0;  // overlaps of the warp that wait
  const auto compare = [&](int64_t other) {
    unsigned wanted = __ballot_sync(kAllLanes, meet(own_reach, space.held[other]));
    if (!wanted) return;
    const int64_t place = other * kLanes + lane;
    const bool there = place < count;
    Placed<Real> box = {};
    if (there) box.box = space.placed[place];
    if (!__any_sync(kAllLanes, there && meet(reach_of(box.box, threshold), shared.held))) return;
    if (there) {
      if (space.classes) box.kind = space.placed_classes[place];
      box.area = nms_area(box.box);
      box.rank = space.ranks[place];
    }
    unsigned hits = 0;
    while (wanted) {
      const int k = __ffs(int(wanted)) - 1;
      wanted &= wanted - 1;
      const Placed<Real> &mine = shared.own[k];
      if (mine.kind == box.kind && nms_overlap(mine.box, mine.area, box.box, box.area, threshold)) hits |= 1u << k;
    }
    if (other == tile) hits &= (1u << lane) - 1;
    if (!there) hits = 0;
    if (!__any_sync(kAllLanes, hits != 0)) return;
    const uint32_t own_hits = uint32_t(__popc(hits));
    uint32_t before = own_hits;
    for (int step = 1; step < kLanes; step *= 2) {
      const uint32_t others = __shfl_up_sync(kAllLanes, before, unsigned(step));
      if (lane >= step) before += others;
    }
    const uint32_t all = __shfl_sync(kAllLanes, before, kLanes - 1);
    const bool direct = all > kWaitingOverlaps;
    uint32_t base = 0;
    if (found + all > kWaitingOverlaps) {
      if (lane == 0) {
        base = atomicAdd(&space.counters->overlaps, direct ? found + all : found);
        if (base >= space.most_overlaps) {
          beyond = true;
          atomicAdd(&shared.tiles_taken, kMostTiles);  // none is left for the other warps
        }
      }
      base = __shfl_sync(kAllLanes, base, 0);
      for (uint32_t k = uint32_t(lane); k < found; k += kLanes)
        store_overlap(space.overlaps, space.most_overlaps, space.lists, base + k, shared.waiting[warp][k]);
      base += found;
      found = 0;
      __syncwarp();
    }
    for (uint32_t k = before - own_hits; hits != 0; ++k, hits &= hits - 1) {
      const uint32_t mine = shared.own[__ffs(int(hits)) - 1].rank;
      const uint2 ranks = make_uint2(min(mine, box.rank), max(mine, box.rank));
      if (direct) {
        store_overlap(space.overlaps, space.most_overlaps, space.lists, base + k, ranks);
      } else {
        shared.waiting[warp][found + k] = ranks;
      }
    }
    if (!direct) found += all;
    __syncwarp();
  };
  const auto compare_listed = [&] {
    while (true) {
      int32_t next = 0;
      if (lane == 0) next = atomicAdd(&shared.tiles_taken, 1);
      next = __shfl_sync(kAllLanes, next, 0);
      if (next >= shared.tiles_count) break;
      compare(shared.tiles[next]);
    }
    if (lane == 0) shared.found[warp] = found;
    if (__syncthreads_or(beyond)) return false;
    if (threadIdx.x == 0) shared.tiles_count = shared.tiles_taken = 0;
    __syncthreads();
    return true;
  };

  for (int64_t from = tile / kGroup; from < groups; from += kFindThreads) {
    const int64_t group = from + threadIdx.x;
    const bool meets =
        group < groups && meet(kinds, space.group_kinds[group]) && meet(reached, space.group_held[group]);
    list_lanes(meets, uint32_t(group), shared.groups, &shared.groups_count);
    const int32_t listed = __syncthreads_count(meets);
    for (int32_t k = 0; k < listed; k += kFindWarps) {
      int32_t length = 0;
      if (k + warp < listed) {
        const int64_t other = int64_t(shared.groups[k + warp]) * kGroup + lane;
        const bool may = other >= tile && other < tiles && int32_t(other % slices) == slice;
        length = list_lanes(may && meet(kinds, space.kinds[other]) && meet(reached, space.held[other]), uint32_t(other),
                            shared.tiles, &shared.tiles_count);
      }
      // The last to add to it knows its length.
      if (__syncthreads_or(length > kMostTiles - kFindThreads) && !compare_listed()) return;
    }
    if (threadIdx.x == 0) shared.groups_count = 0;
    __syncthreads();
  }
  if (!compare_listed()) return;
  if (threadIdx.x == 0) {
    uint32_t all = 0;
    for (int k = 0; k < kFindWarps; ++k) all += shared.found[k];
    shared.base = all ? atomicAdd(&space.counters->overlaps, all) : 0;
  }
  __syncthreads();
  uint32_t base = shared.base;
  for (int k = 0; k < warp; ++k) base += shared.found[k];
  for (uint32_t k = uint32_t(lane); k < found; k += kLanes)
    store_overlap(space.overlaps, space.most_overlaps, space.lists, base + k, shared.waiting[warp][k]);
}

}  // namespace baracuda::nms
