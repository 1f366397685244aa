// SPDX-License-Identifier: Apache-2.0
// What the kernels of non-maximum suppression share: their workspace.
#pragma once

#include "image/nms.h"
#include "runtime/launch.cuh"

namespace baracuda::nms {

constexpr int kLanes = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kLanes;
// Tiles of a group, whose hulls have a hull.
constexpr int kGroup = 32;
// Up to as many boxes are ranked by counting, which is quadratic and takes one launch; others are sorted.
constexpr int64_t kMostCounted = 1 << 14;
constexpr int kCountChunk = 2 * kThreads;
// Stored overlaps for each box, and beside that.
constexpr int64_t kOverlapsEach = 16;
constexpr int64_t kOverlapsMore = 4096;

enum State : int32_t { kWaiting, kKept, kSuppressed };

struct Counters {
  uint32_t overlaps;
  uint32_t ticket;
  uint32_t kept;
  uint32_t filtered;  // of these the later boxes have been compared with
};

// Where most boxes are, by a sample, so that neither the scale nor a few far away matter.
struct Survey {
  float low[2];
  float per_unit[2];
  int32_t class_bits;
};

// Of a box' four numbers.
template <class Real>
struct alignas(16) Intervals {
  Real low[4];
  Real high[4];
};

struct ClassRange {
  uint32_t low;
  uint32_t high;
};

template <class Real>
struct Space {
  // Of many boxes.
  uint64_t *keys;
  uint64_t *sorted;
  void *sort;
  size_t sort_bytes;
  // Of few boxes: how many of a chunk come before each.
  uint32_t *before;

  Counters *counters;
  Survey *survey;
  int32_t *order;       // box of each rank
  NmsBox<Real> *boxes;  // by rank
  int64_t *classes;     // by rank; NULL: all boxes are of one class
  int32_t *states;      // by rank
  uint32_t *lists;      // by rank: the first overlap, counted from 1; 0: none
  uint2 *overlaps;      // the earlier box' rank, and the next of the list
  uint32_t most_overlaps;
  uint32_t *kept_bits;  // by rank
  int32_t *kept_ranks;  // without lists: those kept so far

  int cell_bits;
  uint32_t *cells;   // how many boxes each has
  uint32_t *starts;  // the first place of each
  uint2 *spots;      // by rank: the cell, and how many are before in it
  uint32_t *ranks;   // by place
  NmsBox<Real> *placed;
  int64_t *placed_classes;
  // Of tiles, then of groups: what their boxes have, and what these reach.
  Intervals<Real> *held;
  Intervals<Real> *reached;
  ClassRange *kinds;
  Intervals<Real> *group_held;
  ClassRange *group_kinds;

  __device__ int64_t class_at(int64_t rank) const { return classes ? classes[rank] : 0; }
};

}  // namespace baracuda::nms
