// SPDX-License-Identifier: Apache-2.0
// Two orders of the boxes: ranks by score, and places by class and space, in which neighbours share tiles.
#pragma once

#include "image/nms_space.cuh"
#include "runtime/hash.h"

namespace baracuda::nms {

// A box' numbers along an axis: twice its centre.
template <class Real>
__device__ inline float middle(const NmsBox<Real> &box, int axis) {
  return axis == 0 ? float(box.x1) + float(box.x2) : float(box.y1) + float(box.y2);
}

__device__ inline uint32_t class_bucket(int64_t kind, int bits) {
  return bits == 0 ? 0 : uint32_t(fibonacci_hash(uint64_t(kind), bits));
}

// ---------------------------------------------------------------------------------------------------
// Ranks.

// One block samples the boxes: between which numbers most of them lie, half of the samples for each axis, and about how
// many classes there are.
template <class Real>
__device__ void survey_boxes(const NmsCall &call, Survey *survey, int cell_bits) {
  constexpr int kSamples = kThreads / 2;
  constexpr int kClassBits = 10;
  __shared__ alignas(16) float values[2][kSamples];
  __shared__ float sorted[2][kSamples];
  __shared__ uint32_t seen[(1 << kClassBits) / kLanes];
  const int axis = int(threadIdx.x) / kSamples;
  const int own = int(threadIdx.x) % kSamples;
  const int64_t box = threadIdx.x * call.boxes_count / kThreads;
  const float given = middle(nms_box<Real>(call, box), axis);
  const float value = fabsf(given) < INFINITY ? given : INFINITY;
  values[axis][own] = value;
  if (threadIdx.x < (1 << kClassBits) / kLanes) seen[threadIdx.x] = 0;
  __syncthreads();
  const uint32_t bucket = class_bucket(call.class_of(box), kClassBits);
  atomicOr(&seen[bucket / kLanes], 1u << bucket % kLanes);
  int before = 0;
  int known = 0;
#pragma unroll 8
  for (int k = 0; k < kSamples; ++k) {
    const float other = values[axis][k];
    before += other < value || (other == value && k < own);
    known += other < INFINITY;
  }
  sorted[axis][before] = value;
  __syncthreads();
  if (own == 0) {
    // A few at either end may be anywhere.
    constexpr int kEnds = 32;
    const float low = known ? sorted[axis][known / kEnds] : 0;
    const float high = known ? sorted[axis][known - 1 - known / kEnds] : 0;
    const float margin = (high - low) / (kEnds / 2);
    survey->low[axis] = low - margin;
    survey->per_unit[axis] = high > low ? 1 / (high - low + 2 * margin) : 0;
  }
  if (threadIdx.x < (1 << kClassBits) / kLanes) {
    const uint32_t classes = __reduce_add_sync(kAllLanes, uint32_t(__popc(seen[threadIdx.x])));
    // Some cells are left for each class.
    if (threadIdx.x == 0) survey->class_bits = classes == 1 ? 0 : min(kLanes - __clz(int(classes)), cell_bits - 4);
  }
}

// What the first launch does beside ranking: its first block doesn't rank.
template <class Real>
__device__ bool prepare(const NmsCall &call, const Space<Real> &space) {
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (thread == 0) *space.counters = {};
  for (int64_t cell = thread; cell < int64_t(1) << space.cell_bits; cell += int64_t(gridDim.x) * kThreads)
    space.cells[cell] = 0;
  if (blockIdx.x == 0) survey_boxes<Real>(call, space.survey, space.cell_bits);
  return blockIdx.x == 0;
}

__device__ inline uint32_t rank_key(float score) {
  if (score != score) return 0xffffffffu;
  const uint32_t bits = bit_cast<uint32_t>(score + 0.0f);
  return bits >> 31 ? bits : ~bits & 0x7fffffffu;
}

// A block compares the boxes of its threads with a chunk of boxes.
template <class Real, class Key>
__global__ void __launch_bounds__(kThreads) count_before(NmsCall call, int32_t chunks, Space<Real> space) {
  constexpr int kAtOnce = 16 / sizeof(Key);
  struct alignas(16) Keys {
    Key of[kAtOnce];
  };
  __shared__ Keys keys[kCountChunk / kAtOnce];
  wait_for_earlier_work();
  if (prepare(call, space)) return;
  const int32_t block = int32_t(blockIdx.x) - 1;
  const int32_t count = int32_t(call.boxes_count);
  const int32_t first = block % chunks * kCountChunk;
  const int32_t block_first = block / chunks * kThreads;
  const int32_t own = block_first + int32_t(threadIdx.x);
  const auto key_of = [&](int32_t i) {
    const double score = call.scores.at(i);
    if constexpr (sizeof(Key) == 8) {
      return nms_key(score);
    } else {
      return rank_key(float(score));
    }
  };
  for (int k = int(threadIdx.x); k < kCountChunk; k += kThreads)
    keys[k / kAtOnce].of[k % kAtOnce] = first + k < count ? key_of(first + k) : ~Key(0);
  __syncthreads();
  if (own >= count) return;
  const Key key = key_of(own);
  uint32_t before = 0;
  const auto count_those = [&](auto comes_first) {
#pragma unroll 4
    for (int k = 0; k < kCountChunk; k += kAtOnce) {
      const Keys others = keys[k / kAtOnce];
      for (int n = 0; n < kAtOnce; ++n) before += comes_first(others.of[n], first + k + n);
    }
  };
  // Of equal ones those that come in first do.
  if (first + kCountChunk <= block_first) {
    count_those([&](Key other, int32_t) { return other <= key; });
  } else if (first >= block_first + kThreads) {
    count_those([&](Key other, int32_t) { return other < key; });
  } else {
    // Without branches, of which there would be one for each box.
    count_those([&](Key other, int32_t i) { return (other < key) | ((other == key) & (i < own)); });
  }
  space.before[int64_t(block % chunks) * count + own] = before;
}

// The sort is by the upper half of these. Scores of 64 bits take it twice, their lower halves first.
template <class Real>
__global__ void __launch_bounds__(kThreads) make_keys(NmsCall call, bool again, Space<Real> space) {
  wait_for_earlier_work();
  if (again ? blockIdx.x == 0 : prepare(call, space)) return;
  const int64_t i = int64_t(blockIdx.x - 1) * kThreads + threadIdx.x;
  if (i >= call.boxes_count) return;
  const uint32_t box = again ? uint32_t(space.sorted[i]) : uint32_t(i);
  const double score = call.scores.at(box);
  uint32_t key = 0;
  if (call.scores.dtype.bits == 64) {
    const uint64_t whole = nms_key(score);
    key = uint32_t(again ? whole >> 32 : whole);
  } else {
    key = rank_key(float(score));
  }
  space.keys[i] = uint64_t(key) << 32 | box;
}

// ---------------------------------------------------------------------------------------------------
// Places.

// The place of a point of 2^levels by as many on Hilbert's curve, neighbours on which are neighbours in the plane.
__device__ inline uint32_t hilbert(uint32_t x, uint32_t y, int levels) {
  uint32_t place = 0;
  for (int level = levels - 1; level >= 0; --level) {
    const uint32_t right = x >> level & 1;
    const uint32_t up = y >> level & 1;
    place = place << 2 | (3 * right ^ up);
    // The quarter is turned so that it begins and ends where its neighbours do.
    if (up == 0) {
      const uint32_t turned = right ? ~y : y;
      y = right ? ~x : x;
      x = turned;
    }
  }
  return place;
}

// Puts each box where its rank is, and counts it in its cell.
template <class Real>
__global__ void __launch_bounds__(kThreads) gather_boxes(NmsCall call, Space<Real> space) {
  wait_for_earlier_work();
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const unsigned active = __ballot_sync(kAllLanes, i < call.boxes_count);
  if (i >= call.boxes_count) return;
  int64_t rank = i;
  int32_t box = int32_t(i);
  if (space.before) {
    const int64_t chunks = (call.boxes_count + kCountChunk - 1) / kCountChunk;
    rank = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) rank += space.before[chunk * call.boxes_count + i];
  } else {
    box = int32_t(uint32_t(space.sorted[i]));
  }
  const Survey survey = *space.survey;
  const NmsBox<Real> corners = nms_box<Real>(call, box);
  space.order[rank] = box;
  space.boxes[rank] = corners;
  space.states[rank] = kWaiting;
  space.lists[rank] = 0;
  call.keep[rank * call.keep_step] = -1;
  const int levels = (space.cell_bits - survey.class_bits) / 2;
  uint32_t at[2];
  for (int axis = 0; axis < 2; ++axis) {
    const float part = (middle(corners, axis) - survey.low[axis]) * survey.per_unit[axis];
    const float cells = float(1 << levels);
    at[axis] = uint32_t(fminf(fmaxf(part * cells, 0), cells - 1));  // NaN: 0
  }
  uint32_t cell = hilbert(at[0], at[1], levels);
  if (call.classes) {
    const int64_t kind = call.class_of(box);
    space.classes[rank] = kind;
    cell |= class_bucket(kind, survey.class_bits) << (2 * levels);
  }
  // Lanes of one cell count together, as many boxes may be alike.
  const unsigned alike = __match_any_sync(active, cell);
  const int lane = int(threadIdx.x % kLanes);
  const int leader = __ffs(int(alike)) - 1;
  uint32_t before = 0;
  if (lane == leader) before = atomicAdd(&space.cells[cell], uint32_t(__popc(alike)));
  before = __shfl_sync(alike, before, leader) + uint32_t(__popc(alike & ((1u << lane) - 1)));
  space.spots[rank] = make_uint2(cell, before);
}

constexpr int kStartThreads = 1024;
constexpr int kStartEach = 4;  // of a uint4

// Each block adds up all cells before its own, too: there are few blocks.
template <class Real>
__global__ void __launch_bounds__(kStartThreads) place_cells(Space<Real> space) {
  __shared__ uint32_t of_warps[kStartThreads / kLanes];
  __shared__ uint32_t base;
  wait_for_earlier_work();
  const int lane = int(threadIdx.x % kLanes);
  const int warp = int(threadIdx.x / kLanes);
  const int64_t first = int64_t(blockIdx.x) * kStartThreads;
  const auto *quads = reinterpret_cast<const uint4 *>(space.cells);
  uint32_t earlier = 0;
#pragma unroll 4
  for (int64_t k = threadIdx.x; k < first; k += kStartThreads) {
    const uint4 quad = quads[k];
    earlier += quad.x + quad.y + quad.z + quad.w;
  }
  const int64_t own = first + threadIdx.x;
  const bool there = own * kStartEach < int64_t(1) << space.cell_bits;
  const uint4 quad = there ? quads[own] : make_uint4(0, 0, 0, 0);
  const uint32_t number = quad.x + quad.y + quad.z + quad.w;
  uint32_t sum = number;
  for (int step = 1; step < kLanes; step *= 2) {
    const uint32_t others = __shfl_up_sync(kAllLanes, sum, unsigned(step));
    if (lane >= step) sum += others;
  }
  if (lane == kLanes - 1) of_warps[warp] = sum;
  if (threadIdx.x == 0) base = 0;
  __syncthreads();
  earlier = __reduce_add_sync(kAllLanes, earlier);
  if (lane == 0 && earlier != 0) atomicAdd(&base, earlier);
  __syncthreads();
  if (!there) return;
  uint32_t start = base + sum - number;
  for (int k = 0; k < warp; ++k) start += of_warps[k];
  const uint32_t second = start + quad.x;
  const uint32_t third = second + quad.y;
  reinterpret_cast<uint4 *>(space.starts)[own] = make_uint4(start, second, third, third + quad.z);
}

template <class Real>
__global__ void __launch_bounds__(kThreads) place_boxes(int64_t count, Space<Real> space) {
  wait_for_earlier_work();
  const int64_t rank = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (rank >= count) return;
  const uint2 spot = space.spots[rank];
  const uint32_t place = space.starts[spot.x] + spot.y;
  space.ranks[place] = uint32_t(rank);
  space.placed[place] = space.boxes[rank];
  if (space.classes) space.placed_classes[place] = space.classes[rank];
}

}  // namespace baracuda::nms
