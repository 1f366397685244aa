// SPDX-License-Identifier: Apache-2.0
// Which boxes are kept: by the lists of overlaps, or without them.
#pragma once

#include "image/nms_space.cuh"

namespace baracuda::nms {

template <class Real>
__global__ void __launch_bounds__(kThreads) decide(int64_t count, Space<Real> space) {
  __shared__ uint32_t ticket;
  // Of warps, which look at one another's while they change.
  __shared__ uint32_t kept_of[kWarps];
  __shared__ uint32_t suppressed_of[kWarps];
  wait_for_earlier_work();
  if (space.counters->overlaps > space.most_overlaps) return;
  if (threadIdx.x == 0) ticket = atomicAdd(&space.counters->ticket, 1);
  if (threadIdx.x < kWarps) {
    kept_of[threadIdx.x] = 0;
    suppressed_of[threadIdx.x] = 0;
  }
  __syncthreads();
  const int lane = int(threadIdx.x % kLanes);
  const int warp = int(threadIdx.x / kLanes);
  const int64_t block = int64_t(ticket) * kThreads;
  const int64_t first = block + warp * kLanes;
  const int64_t rank = first + lane;
  const bool there = rank < count;
  uint32_t entry = there ? space.lists[rank] : 0;
  State state = there ? kWaiting : kSuppressed;
  uint2 overlap = make_uint2(0, 0);
  bool loaded = false;
  unsigned inside = 0;  // those of its own warp that may suppress it
  unsigned kept = 0;
  unsigned suppressed = 0;
  while (true) {
    const bool waited = state == kWaiting;
    if (waited && entry != 0) {
      if (!loaded) overlap = space.overlaps[entry - 1];
      loaded = true;
      int32_t other = kWaiting;
      if (overlap.x >= first) {
        inside |= 1u << (overlap.x - first);
        other = kSuppressed;
      } else if (overlap.x >= block) {
        const int word = int(overlap.x - block) / kLanes;
        const unsigned bit = 1u << overlap.x % kLanes;
        other = atomicOr(&kept_of[word], 0) & bit         ? kKept
                : atomicOr(&suppressed_of[word], 0) & bit ? kSuppressed
                                                          : kWaiting;
      } else {
        other = *static_cast<volatile int32_t *>(&space.states[overlap.x]);
      }
      if (other == kKept) {
        state = kSuppressed;
      } else if (other == kSuppressed) {
        entry = overlap.y;
        loaded = false;
      }
    }
    if (!__any_sync(kAllLanes, state == kWaiting && entry != 0)) {
      // The rest is up to the warp. Each round decides those at least whose earlier ones are decided.
      const bool may = state != kSuppressed;
      unsigned next = __ballot_sync(kAllLanes, may);
      do {
        kept = next;
        next = __ballot_sync(kAllLanes, may && (inside & kept) == 0);
      } while (next != kept);
      state = kept >> lane & 1 ? kKept : kSuppressed;
    } else if (state == kWaiting) {
      if (inside & kept) {
        state = kSuppressed;
      } else if (entry == 0 && (inside & ~suppressed) == 0) {
        state = kKept;
      }
    }
    if (waited && state != kWaiting) *static_cast<volatile int32_t *>(&space.states[rank]) = state;
    kept = __ballot_sync(kAllLanes, state == kKept);
    suppressed = __ballot_sync(kAllLanes, state == kSuppressed);
    if (lane == 0) {
      atomicOr(&kept_of[warp], kept);
      atomicOr(&suppressed_of[warp], suppressed);
    }
    if ((kept | suppressed) == kAllLanes) break;
  }
  if (lane == 0 && there) space.kept_bits[first / kLanes] = kept;
}

constexpr int kSweepThreads = 1024;

// Where overlaps were too many: one block, a chunk of ranks at a time, compares with the boxes kept so far.
template <class Real>
__global__ void __launch_bounds__(kSweepThreads) sweep(int64_t begin, int64_t end, Real threshold, Space<Real> space) {
  __shared__ NmsBox<Real> boxes[kSweepThreads];
  __shared__ int64_t classes[kSweepThreads];
  __shared__ int32_t next;
  wait_for_earlier_work();
  if (space.counters->overlaps <= space.most_overlaps) return;
  int64_t kept = begin == 0 ? 0 : space.counters->kept;
  for (int64_t from = begin; from < end; from += kSweepThreads) {
    const int64_t rank = from + threadIdx.x;
    bool alive = rank < end && space.states[rank] != kSuppressed;
    if (!__syncthreads_or(alive)) {
      if (rank < end && threadIdx.x % kLanes == 0) space.kept_bits[rank / kLanes] = 0;
      continue;
    }
    NmsBox<Real> box = {};
    Real area = 0;
    int64_t kind = 0;
    if (alive) {
      box = space.boxes[rank];
      area = nms_area(box);
      kind = space.class_at(rank);
    }
    // Those that the filter has compared with are behind `begin`.
    for (int64_t base = begin == 0 ? 0 : space.counters->filtered; base < kept; base += kSweepThreads) {
      const int here = int(min(kept - base, int64_t(kSweepThreads)));
      if (int(threadIdx.x) < here) {
        const int32_t other = space.kept_ranks[base + threadIdx.x];
        boxes[threadIdx.x] = space.boxes[other];
        classes[threadIdx.x] = space.class_at(other);
      }
      __syncthreads();
      for (int k = 0; k < here && alive; ++k)
        if (classes[k] == kind && nms_overlap(boxes[k], nms_area(boxes[k]), box, area, threshold)) alive = false;
      __syncthreads();
    }
    boxes[threadIdx.x] = box;
    classes[threadIdx.x] = kind;
    // The first that is alive is kept, and suppresses others of the chunk.
    int32_t last = -1;
    while (true) {
      if (threadIdx.x == 0) next = kSweepThreads;
      __syncthreads();
      const unsigned living = __ballot_sync(kAllLanes, alive && int32_t(threadIdx.x) > last);
      if (threadIdx.x % kLanes == 0 && living) atomicMin(&next, int32_t(threadIdx.x) + __ffs(int(living)) - 1);
      __syncthreads();
      last = next;
      __syncthreads();
      if (last == kSweepThreads) break;
      if (int32_t(threadIdx.x) == last) space.kept_ranks[kept] = int32_t(rank);
      ++kept;
      if (alive && int32_t(threadIdx.x) > last && classes[last] == kind &&
          nms_overlap(boxes[last], nms_area(boxes[last]), box, area, threshold))
        alive = false;
    }
    const unsigned bits = __ballot_sync(kAllLanes, alive);
    if (rank < end && threadIdx.x % kLanes == 0) space.kept_bits[rank / kLanes] = bits;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    space.counters->kept = uint32_t(kept);
    if (begin == 0) space.counters->filtered = uint32_t(kept);
  }
}

// All blocks compare the ranks behind the first chunk with the boxes that were kept of it; mostly few are left.
template <class Real>
__global__ void __launch_bounds__(kThreads) filter(int64_t count, Real threshold, Space<Real> space) {
  wait_for_earlier_work();
  if (space.counters->overlaps <= space.most_overlaps) return;
  const int64_t rank = kSweepThreads + int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (rank >= count) return;
  const NmsBox<Real> box = space.boxes[rank];
  const Real area = nms_area(box);
  const int64_t kind = space.class_at(rank);
  for (uint32_t k = 0; k < space.counters->filtered; ++k) {
    const int32_t other = space.kept_ranks[k];
    const NmsBox<Real> by = space.boxes[other];
    if (space.class_at(other) == kind && nms_overlap(by, nms_area(by), box, area, threshold)) {
      space.states[rank] = kSuppressed;
      return;
    }
  }
}

// A block writes the numbers of the kept boxes of its words, having counted those before.
template <class Real>
__global__ void __launch_bounds__(kThreads) collect(NmsCall call, int64_t words_each, Space<Real> space) {
  __shared__ uint32_t of_warps[kWarps];
  wait_for_earlier_work();
  const int lane = int(threadIdx.x % kLanes);
  const int warp = int(threadIdx.x / kLanes);
  const int64_t words = (call.boxes_count + kLanes - 1) / kLanes;
  // Each warp has as many.
  const int64_t first = blockIdx.x * words_each * kWarps;
  const int64_t own = first + warp * words_each;
  const int64_t end = min(own + words_each, words);
  uint32_t kept = 0;
  for (int64_t word = threadIdx.x; word < first; word += kThreads) kept += uint32_t(__popc(space.kept_bits[word]));
  uint32_t before = __reduce_add_sync(kAllLanes, kept);
  if (lane == 0) of_warps[warp] = before;
  __syncthreads();
  int64_t place = 0;
  for (int k = 0; k < kWarps; ++k) place += of_warps[k];
  __syncthreads();
  kept = 0;
  for (int64_t word = own + lane; word < end; word += kLanes) kept += uint32_t(__popc(space.kept_bits[word]));
  before = __reduce_add_sync(kAllLanes, kept);
  if (lane == 0) of_warps[warp] = before;
  __syncthreads();
  for (int k = 0; k < warp; ++k) place += of_warps[k];
  // Loads of several words are under way at once.
  constexpr int kAtOnce = 4;
  for (int64_t word = own; word < end; word += kAtOnce) {
    uint32_t bits[kAtOnce];
    int32_t boxes[kAtOnce];
    for (int k = 0; k < kAtOnce; ++k) bits[k] = word + k < end ? space.kept_bits[word + k] : 0;
    for (int k = 0; k < kAtOnce; ++k) boxes[k] = bits[k] >> lane & 1 ? space.order[(word + k) * kLanes + lane] : 0;
    for (int k = 0; k < kAtOnce; ++k) {
      if (bits[k] >> lane & 1) call.keep[(place + __popc(bits[k] & ((1u << lane) - 1))) * call.keep_step] = boxes[k];
      place += __popc(bits[k]);
    }
  }
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x == kThreads - 1) *call.count = place;
}

}  // namespace baracuda::nms
