// SPDX-License-Identifier: Apache-2.0
// Non-maximum suppression entirely on the device, in a fixed number of launches.
//
// Boxes are ranked by their scores, then put into an order of space, in which 32 neighbours are a tile. Only tiles
// whose hulls meet are compared; each overlap found is put on the list of the later box of the two. Then every box
// looks at the earlier boxes on its list: it is suppressed as soon as one of them is kept, and kept when all of them
// are suppressed. A box waits only for earlier ones, and blocks take their ranks by ticket, so those are running or
// done.
//
// Overlaps are stored up to a bound. Where there are more, which takes many boxes on top of one another, one block goes
// through the ranks instead and compares with the kept boxes; what the first of these suppress is left out by all.
#include "image/nms.h"

#include <algorithm>

#include <cub/device/device_radix_sort.cuh>

#include "runtime/launch.cuh"
#include "runtime/workspace.h"

namespace baracuda {
namespace {

constexpr int kLanes = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kLanes;
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

template <class Real>
struct Space {
  uint64_t *keys;
  uint64_t *sorted;
  void *sort;
  size_t sort_bytes;
  Counters *counters;
  int32_t *order;       // box of each rank
  NmsBox<Real> *boxes;  // by rank
  Real *areas;          // by rank
  int64_t *classes;     // by rank
  int32_t *states;      // by rank
  uint32_t *lists;      // by rank: the first overlap, counted from 1; 0: none
  uint2 *overlaps;      // the earlier box' rank, and the next of the list
  uint32_t most_overlaps;
  NmsBox<Real> *hulls;  // of tiles
  uint32_t *kept_bits;  // by rank
  int32_t *kept_ranks;  // without lists: those kept so far
};

size_t sort_bytes_of(int64_t count) {
  size_t bytes = 0;
  check_cuda(cub::DeviceRadixSort::SortKeys(nullptr, bytes, static_cast<const uint64_t *>(nullptr),
                                            static_cast<uint64_t *>(nullptr), int(count), 32, 64),
             "DeviceRadixSort");
  return bytes;
}

template <class Real>
Space<Real> lay_out(int64_t count, Workspace &space) {
  Space<Real> s = {};
  s.keys = space.take<uint64_t>(count);
  s.sorted = space.take<uint64_t>(count);
  s.sort_bytes = sort_bytes_of(count);
  s.sort = space.take<std::byte>(int64_t(s.sort_bytes));
  s.counters = space.take<Counters>(1);
  s.order = space.take<int32_t>(count);
  s.boxes = space.take<NmsBox<Real>>(count);
  s.areas = space.take<Real>(count);
  s.classes = space.take<int64_t>(count);
  s.states = space.take<int32_t>(count);
  s.lists = space.take<uint32_t>(count);
  s.most_overlaps = uint32_t(kOverlapsEach * count + kOverlapsMore);
  s.overlaps = space.take<uint2>(s.most_overlaps);
  s.hulls = space.take<NmsBox<Real>>(ceil_div(count, kLanes));
  s.kept_bits = space.take<uint32_t>(ceil_div(count, kLanes));
  s.kept_ranks = space.take<int32_t>(count);
  return s;
}

__device__ inline uint32_t rank_key(float score) {
  if (score != score) return 0xffffffffu;
  const uint32_t bits = bit_cast<uint32_t>(score + 0.0f);
  return bits >> 31 ? bits : ~bits & 0x7fffffffu;
}

// The sort is by the upper half of these. Scores of 64 bits take it twice, their lower halves first.
__global__ void make_keys(NmsCall call, uint64_t *keys, const uint64_t *sorted, bool lower, Counters *counters) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i == 0) *counters = {};
  if (i >= call.boxes_count) return;
  const uint32_t box = sorted ? uint32_t(sorted[i]) : uint32_t(i);
  const double score = call.scores.at(box);
  uint32_t key = 0;
  if (call.scores.dtype.bits == 64) {
    const uint64_t whole = nms_key(score);
    key = uint32_t(lower ? whole : whole >> 32);
  } else {
    key = rank_key(float(score));
  }
  keys[i] = uint64_t(key) << 32 | box;
}

// The upper 16 bits of a float as a number that grows with it: neighbours in space get neighbours.
__device__ inline uint32_t coarse(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  return (bits >> 31 ? ~bits : bits | 0x80000000u) >> 16;
}

__device__ inline uint32_t spread(uint32_t bits) {
  bits = (bits | bits << 8) & 0x00ff00ffu;
  bits = (bits | bits << 4) & 0x0f0f0f0fu;
  bits = (bits | bits << 2) & 0x33333333u;
  return (bits | bits << 1) & 0x55555555u;
}

template <class Real>
__global__ void gather_boxes(NmsCall call, Space<Real> space) {
  const int64_t rank = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (rank >= call.boxes_count) return;
  const int32_t box = int32_t(uint32_t(space.sorted[rank]));
  const NmsBox<Real> corners = nms_box<Real>(call, box);
  space.order[rank] = box;
  space.boxes[rank] = corners;
  space.areas[rank] = nms_area(corners);
  space.classes[rank] = call.class_of(box);
  space.states[rank] = kWaiting;
  call.keep[rank * call.keep_step] = -1;
  space.lists[rank] = 0;
  const float x = float(corners.x1) + float(corners.x2);
  const float y = float(corners.y1) + float(corners.y2);
  space.keys[rank] = uint64_t(spread(coarse(x)) | spread(coarse(y)) << 1) << 32 | uint64_t(rank);
}

template <class Real>
__device__ inline Real least(Real a, Real b) {
  return b < a ? b : a;
}

// A hull that holds what its boxes can share with others. NaN shares nothing.
template <class Real>
__global__ void make_hulls(int64_t count, Space<Real> space) {
  const int64_t place = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  constexpr Real kFar = Real(INFINITY);
  NmsBox<Real> hull = {kFar, kFar, -kFar, -kFar};
  if (place < count) {
    const NmsBox<Real> box = space.boxes[uint32_t(space.sorted[place])];
    hull.x1 = least(hull.x1, box.x1);
    hull.y1 = least(hull.y1, box.y1);
    hull.x2 = -least(-hull.x2, -box.x2);
    hull.y2 = -least(-hull.y2, -box.y2);
  }
  for (int step = kLanes / 2; step > 0; step /= 2) {
    hull.x1 = least(hull.x1, __shfl_xor_sync(kAllLanes, hull.x1, step));
    hull.y1 = least(hull.y1, __shfl_xor_sync(kAllLanes, hull.y1, step));
    hull.x2 = -least(-hull.x2, -__shfl_xor_sync(kAllLanes, hull.x2, step));
    hull.y2 = -least(-hull.y2, -__shfl_xor_sync(kAllLanes, hull.y2, step));
  }
  if (threadIdx.x % kLanes == 0 && place < count) space.hulls[place / kLanes] = hull;
}

// A warp compares a tile with itself and those after it, or with every so manieth of them.
template <class Real>
__global__ void __launch_bounds__(kThreads)
    find_overlaps(int64_t count, int32_t slices, Real threshold, Space<Real> space) {
  __shared__ NmsBox<Real> shared_box[kWarps][kLanes];
  __shared__ Real shared_area[kWarps][kLanes];
  __shared__ int64_t shared_class[kWarps][kLanes];
  __shared__ uint32_t shared_rank[kWarps][kLanes];
  const int lane = int(threadIdx.x % kLanes);
  const int warp = int(threadIdx.x / kLanes);
  const int64_t tiles = (count + kLanes - 1) / kLanes;
  const int64_t task = int64_t(blockIdx.x) * kWarps + warp;
  const int64_t tile = task / slices;
  if (tile >= tiles) return;
  const int64_t own = tile * kLanes + lane;
  const int own_count = int(min(count - tile * kLanes, int64_t(kLanes)));
  const uint32_t own_rank = own < count ? uint32_t(space.sorted[own]) : 0;
  shared_box[warp][lane] = space.boxes[own_rank];
  shared_area[warp][lane] = space.areas[own_rank];
  shared_class[warp][lane] = space.classes[own_rank];
  shared_rank[warp][lane] = own_rank;
  __syncwarp();
  const NmsBox<Real> hull = space.hulls[tile];
  for (int64_t from = tile + task % slices; from < tiles; from += int64_t(kLanes) * slices) {
    bool meets = false;
    if (from + lane * slices < tiles) {
      const NmsBox<Real> other = space.hulls[from + lane * slices];
      // A negative threshold is exceeded by boxes that lie apart.
      meets = threshold < 0 || (hull.x1 < other.x2 && other.x1 < hull.x2 && hull.y1 < other.y2 && other.y1 < hull.y2);
    }
    unsigned left = __ballot_sync(kAllLanes, meets);
    while (left) {
      const int64_t other = from + (__ffs(int(left)) - 1) * slices;
      left &= left - 1;
      const int64_t place = other * kLanes + lane;
      const uint32_t rank = place < count ? uint32_t(space.sorted[place]) : 0;
      const NmsBox<Real> box = space.boxes[rank];
      const Real area = space.areas[rank];
      const int64_t kind = space.classes[rank];
      unsigned hits = 0;
#pragma unroll 8
      for (int k = 0; k < kLanes; ++k)
        if (shared_class[warp][k] == kind &&
            nms_overlap(shared_box[warp][k], shared_area[warp][k], box, area, threshold))
          hits |= 1u << k;
      if (own_count < kLanes) hits &= (1u << own_count) - 1;
      if (other == tile) hits &= (1u << lane) - 1;
      if (place >= count) hits = 0;
      if (!__any_sync(kAllLanes, hits != 0)) continue;
      // Slots for all of the warp's.
      const uint32_t found = uint32_t(__popc(hits));
      uint32_t before = found;
      for (int step = 1; step < kLanes; step *= 2) {
        const uint32_t others = __shfl_up_sync(kAllLanes, before, unsigned(step));
        if (lane >= step) before += others;
      }
      uint32_t base = 0;
      if (lane == kLanes - 1) base = atomicAdd(&space.counters->overlaps, before);
      base = __shfl_sync(kAllLanes, base, kLanes - 1);
      // Each warp stops at its first that is beyond, so the counter can't come round.
      if (base >= space.most_overlaps) return;
      for (uint32_t slot = base + before - found; hits != 0; ++slot, hits &= hits - 1) {
        if (slot >= space.most_overlaps) break;
        const uint32_t first = shared_rank[warp][__ffs(int(hits)) - 1];
        space.overlaps[slot] = make_uint2(min(first, rank), atomicExch(&space.lists[max(first, rank)], slot + 1));
      }
    }
  }
}

template <class Real>
__global__ void __launch_bounds__(kThreads) decide(int64_t count, Space<Real> space) {
  __shared__ uint32_t ticket;
  if (space.counters->overlaps > space.most_overlaps) return;
  if (threadIdx.x == 0) ticket = atomicAdd(&space.counters->ticket, 1);
  __syncthreads();
  const int lane = int(threadIdx.x % kLanes);
  const int64_t rank = int64_t(ticket) * kThreads + threadIdx.x;
  const int64_t first = rank - lane;
  const bool there = rank < count;
  uint32_t entry = there ? space.lists[rank] : 0;
  State state = there ? kWaiting : kSuppressed;
  uint2 overlap = make_uint2(0, 0);
  bool loaded = false;
  unsigned kept = 0;
  unsigned suppressed = 0;
  while (true) {
    if (state == kWaiting) {
      if (entry == 0) {
        state = kKept;
      } else {
        if (!loaded) {
          overlap = space.overlaps[entry - 1];
          loaded = true;
        }
        int32_t other = kWaiting;
        if (overlap.x >= first) {
          // Of this warp.
          const unsigned bit = 1u << (overlap.x - first);
          other = kept & bit ? kKept : suppressed & bit ? kSuppressed : kWaiting;
        } else {
          other = *static_cast<volatile int32_t *>(&space.states[overlap.x]);
        }
        if (other == kKept) {
          state = kSuppressed;
        } else if (other == kSuppressed) {
          entry = overlap.y;
          loaded = false;
          if (entry == 0) state = kKept;
        }
      }
      if (state != kWaiting) *static_cast<volatile int32_t *>(&space.states[rank]) = state;
    }
    kept = __ballot_sync(kAllLanes, state == kKept);
    suppressed = __ballot_sync(kAllLanes, state == kSuppressed);
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
      area = space.areas[rank];
      kind = space.classes[rank];
    }
    // Those that the filter has compared with are behind `begin`.
    for (int64_t base = begin == 0 ? 0 : space.counters->filtered; base < kept; base += kSweepThreads) {
      const int here = int(min(kept - base, int64_t(kSweepThreads)));
      if (int(threadIdx.x) < here) {
        const int32_t other = space.kept_ranks[base + threadIdx.x];
        boxes[threadIdx.x] = space.boxes[other];
        classes[threadIdx.x] = space.classes[other];
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
  if (space.counters->overlaps <= space.most_overlaps) return;
  const int64_t rank = kSweepThreads + int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (rank >= count) return;
  const NmsBox<Real> box = space.boxes[rank];
  const Real area = space.areas[rank];
  const int64_t kind = space.classes[rank];
  for (uint32_t k = 0; k < space.counters->filtered; ++k) {
    const int32_t other = space.kept_ranks[k];
    if (space.classes[other] == kind && nms_overlap(space.boxes[other], space.areas[other], box, area, threshold)) {
      space.states[rank] = kSuppressed;
      return;
    }
  }
}

constexpr int kCollectWords = 256;

// A block writes the numbers of the kept boxes of its words, having counted those before.
__global__ void __launch_bounds__(kThreads) collect(NmsCall call, const uint32_t *kept_bits, const int32_t *order) {
  __shared__ int32_t of_warp[kWarps];
  const int lane = int(threadIdx.x % kLanes);
  const int warp = int(threadIdx.x / kLanes);
  const int64_t words = (call.boxes_count + kLanes - 1) / kLanes;
  const int64_t own = int64_t(blockIdx.x) * kCollectWords;
  // Own words are counted by their threads' warps, too, so that each warp knows where its part begins.
  int32_t before = 0;
  for (int64_t word = threadIdx.x; word < own; word += kThreads) before += __popc(kept_bits[word]);
  const uint32_t bits = own + threadIdx.x < words ? kept_bits[own + threadIdx.x] : 0;
  before = int32_t(__reduce_add_sync(kAllLanes, unsigned(before)));
  if (lane == 0) of_warp[warp] = before;
  __syncthreads();
  int64_t place = 0;
  for (int k = 0; k < kWarps; ++k) place += of_warp[k];
  __syncthreads();
  const int32_t here = int32_t(__reduce_add_sync(kAllLanes, unsigned(__popc(bits))));
  if (lane == 0) of_warp[warp] = here;
  __syncthreads();
  for (int k = 0; k < warp; ++k) place += of_warp[k];
  for (int k = 0; k < kLanes; ++k) {
    const uint32_t word = __shfl_sync(kAllLanes, bits, k);
    const int64_t rank = (own + warp * kLanes + k) * kLanes + lane;
    if (word >> lane & 1) call.keep[(place + __popc(word & ((1u << lane) - 1))) * call.keep_step] = order[rank];
    place += __popc(word);
  }
  if (own + kCollectWords >= words && threadIdx.x == kThreads - 1) *call.count = place;
}

template <class Real>
void run(const NmsCall &call, Stream stream) {
  const int64_t count = call.boxes_count;
  if (count == 0) {
    launch(collect, {1, kThreads}, stream, call, nullptr, nullptr);
    return;
  }
  Workspace workspace(call.workspace);
  const Space<Real> space = lay_out<Real>(count, workspace);
  const Real threshold = Real(call.threshold);
  const Grid each = {ceil_div(count, kThreads), kThreads};
  const auto sort = [&] {
    size_t bytes = space.sort_bytes;
    check_cuda(cub::DeviceRadixSort::SortKeys(space.sort, bytes, space.keys, space.sorted, int(count), 32, 64,
                                              static_cast<cudaStream_t>(stream)),
               "DeviceRadixSort");
  };
  const uint64_t *unsorted = nullptr;
  const uint64_t *sorted = space.sorted;
  launch(make_keys, each, stream, call, space.keys, unsorted, true, space.counters);
  sort();
  if (call.scores.dtype.bits == 64) {
    launch(make_keys, each, stream, call, space.keys, sorted, false, space.counters);
    sort();
  }
  launch(gather_boxes<Real>, each, stream, call, space);
  sort();
  launch(make_hulls<Real>, each, stream, count, space);
  // Enough warps for a large GPU, whatever the number of boxes.
  constexpr int64_t kWantedWarps = 1 << 15;
  const int64_t tiles = ceil_div(count, kLanes);
  const int32_t slices = int32_t(std::min(ceil_div(kWantedWarps, tiles), tiles));
  launch(find_overlaps<Real>, {ceil_div(tiles * slices, kWarps), kThreads}, stream, count, slices, threshold, space);
  launch(decide<Real>, each, stream, count, space);
  const int64_t first = std::min(count, int64_t(kSweepThreads));
  launch(sweep<Real>, {1, kSweepThreads}, stream, int64_t(0), first, threshold, space);
  if (count > first) {
    launch(filter<Real>, {ceil_div(count - first, kThreads), kThreads}, stream, count, threshold, space);
    launch(sweep<Real>, {1, kSweepThreads}, stream, first, count, threshold, space);
  }
  launch(collect, {ceil_div(tiles, kCollectWords), kThreads}, stream, call,
         static_cast<const uint32_t *>(space.kept_bits), static_cast<const int32_t *>(space.order));
}

}  // namespace

void nms_cuda(const NmsCall &call, Stream stream) {
  if (call.dtype == DTypeOf<double>::value) {
    run<double>(call, stream);
  } else {
    run<float>(call, stream);
  }
}

size_t nms_workspace(int64_t boxes, DLDataType dtype) {
  if (boxes == 0) return 0;
  Workspace space(nullptr);
  if (dtype == DTypeOf<double>::value) {
    lay_out<double>(boxes, space);
  } else {
    lay_out<float>(boxes, space);
  }
  return space.size();
}

}  // namespace baracuda
