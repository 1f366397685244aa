// SPDX-License-Identifier: Apache-2.0
#include <limits>

#include "segment/segment.cuh"

namespace baracuda {
namespace {

constexpr int kRowsAtOnce = 4;

// Ids that never fall, with -1 and `segments` for what is outside.
struct SortedIds {
  const uint32_t *keys;  // NULL: the ids themselves
  SegmentIndices ids;
  int64_t segments;

  __device__ int64_t operator[](int64_t at) const {
    if (keys) return keys[at];
    return inside(ids[at]);
  }
  __device__ int64_t inside(int64_t id) const { return id < 0 ? -1 : id > segments ? segments : id; }
  // Of rows that are as many apart as a block has threads; -1 outside.
  template <class Number>
  __device__ void load(Number first, Number rows, Number (&id)[kRowsAtOnce]) const {
    if (keys || rows == 0) {
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        const Number row = first + r * kSegmentThreads;
        id[r] = row >= 0 && row < rows ? Number(keys[row]) : -1;
      }
    } else {
      int64_t given[kRowsAtOnce];
      segment_load_ids(ids, first, kSegmentThreads, rows, given);
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) id[r] = Number(inside(given[r]));
    }
  }
};

// Offsets where ids rise, and bounds of chunks, of as many segments as are passed at once. The others stay as they
// were.
constexpr int64_t kMostPassed = 32;

__global__ __launch_bounds__(kSegmentThreads) void forget_bounds(SegmentBounds bounds) {
  bounds.forget(int64_t(blockIdx.x) * kSegmentThreads + threadIdx.x, int64_t(gridDim.x) * kSegmentThreads);
}

// Number: any place.
template <class Number>
__global__ __launch_bounds__(kSegmentThreads) void mark_rises(SortedIds ids, SegmentGroups groups,
                                                              SegmentNumbers offsets, int chunk_bits) {
  wait_for_earlier_work();
  let_next_kernel_start();
  const Number rows = Number(groups.rows);
  const Number segments = Number(groups.segments);
  const Number chunks = Number(groups.chunks);
  const Number first = Number(blockIdx.x) * (kSegmentThreads * kRowsAtOnce) + Number(threadIdx.x);
  Number id[kRowsAtOnce];
  Number before[kRowsAtOnce];
  ids.load<Number>(first, rows, id);
  ids.load<Number>(first - 1, rows, before);
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) {
    const Number row = first + r * kSegmentThreads;
    if (row > rows) break;
    if (row == rows) id[r] = segments;
    if (id[r] - before[r] > Number(kMostPassed)) continue;
    for (Number segment = before[r] + 1; segment <= id[r]; ++segment) offsets.set(segment, row);
    // Rows and the segments that stand before them take the places up to that of this row.
    Number chunk = ((before[r] + row) >> chunk_bits) + 1;
    const Number last = row == rows ? chunks : min((id[r] + row + 1) >> chunk_bits, chunks);
    for (; chunk <= last; ++chunk) groups.first.set(chunk, min((chunk << chunk_bits) - row, segments));
  }
}

// Offsets alone, from ids two neighbours at a time. The block passes together what is passed at once and much, each
// time less than all segments.
constexpr int kRisePairs = 4;
constexpr int kRiseRows = 2 * kRisePairs * kSegmentThreads;

template <class Id>
__global__ __launch_bounds__(kSegmentThreads) void find_rises(const Id *ids, int64_t stride, bool paired, int64_t rows,
                                                              int64_t segments, SegmentNumbers offsets) {
  using Pair = std::conditional_t<sizeof(Id) == 8, longlong2, int2>;
  __shared__ uint16_t rises[kRiseRows];
  __shared__ uint16_t passed[kRiseRows];
  __shared__ int found[2];
  if (threadIdx.x < 2) found[threadIdx.x] = 0;
  __syncthreads();
  let_next_kernel_start();
  const int lane = int(threadIdx.x) & 31;
  const int64_t base = int64_t(blockIdx.x) * kRiseRows;
  const auto place_of = [&](int p) { return 2 * (p * kSegmentThreads + int(threadIdx.x)); };
  const auto load = [&](int64_t row) { return ids[max(min(row, rows - 1), int64_t(0)) * stride]; };
  Id before[kRisePairs];
  Id id[kRisePairs][2];
#pragma unroll
  for (int p = 0; p < kRisePairs; ++p) {
    const int64_t row = base + place_of(p);
    if (paired && row + 1 < rows) {
      const Pair pair = *reinterpret_cast<const Pair *>(ids + row);
      id[p][0] = pair.x;
      id[p][1] = pair.y;
    } else {
      id[p][0] = load(row);
      id[p][1] = load(row + 1);
    }
    if (lane == 0) before[p] = load(row - 1);
  }
  // The first row and what is behind the last count as rises.
  const int last = int(min(rows - base, int64_t(kRiseRows)));
#pragma unroll
  for (int p = 0; p < kRisePairs; ++p) {
    const Id neighbour = __shfl_up_sync(~0u, id[p][1], 1);
    if (lane > 0) before[p] = neighbour;
    const int place = place_of(p);
    const bool first = id[p][0] != before[p] || base + place == 0 || place == last;
    const bool second = id[p][1] != id[p][0] || place + 1 == last;
    const int count = (first && place <= last) + (second && place + 1 <= last);
    if (count == 0) continue;
    int at = atomicAdd(&found[0], count);
    if (first && place <= last) rises[at++] = uint16_t(place);
    if (second && place + 1 <= last) rises[at] = uint16_t(place + 1);
  }
  __syncthreads();
  // What segments begin at a row.
  const auto bounds = [&](int64_t row, int64_t &from, int64_t &to) {
    const auto inside = [&](int64_t id) { return id < 0 ? -1 : min(id, segments); };
    from = row == 0 ? 0 : inside(load(row - 1)) + 1;
    to = row == rows ? segments : inside(load(row));
  };
  int64_t from;
  int64_t to;
  for (int r = threadIdx.x; r < found[0]; r += kSegmentThreads) {
    const int64_t row = base + rises[r];
    bounds(row, from, to);
    if (to - from >= kMostPassed) {
      passed[atomicAdd(&found[1], 1)] = rises[r];
    } else {
      for (int64_t segment = from; segment <= to; ++segment) offsets.set(segment, row);
    }
  }
  __syncthreads();
  // Ids that rise again and again, where they must not fall, must not make more of it.
  int64_t left = segments + 1;
  for (int p = 0; p < found[1]; ++p) {
    const int64_t row = base + passed[p];
    bounds(row, from, to);
    left -= to + 1 - from;
    if (left < 0) return;
    for (int64_t segment = from + threadIdx.x; segment <= to; segment += kSegmentThreads) offsets.set(segment, row);
  }
}

// The first of 0 .. count for which `holds` is true, which it stays, or count.
template <class Holds>
__device__ int64_t search(int64_t count, const Holds &holds) {
  int64_t low = 0;
  while (count > 0) {
    const int64_t half = count / 2;
    if (holds(low + half)) {
      count = half;
    } else {
      low += half + 1;
      count -= half + 1;
    }
  }
  return low;
}

// A thread for each offset and each bound of a chunk that isn't marked.
__global__ __launch_bounds__(kSegmentThreads) void find_bounds(SortedIds ids, SegmentGroups groups,
                                                               SegmentNumbers offsets, bool marked) {
  wait_for_earlier_work();
  let_next_kernel_start();
  int64_t at = int64_t(blockIdx.x) * kSegmentThreads + threadIdx.x;
  if (at <= groups.segments) {
    if (!marked || offsets[at] < 0) offsets.set(at, search(groups.rows, [&](int64_t row) { return ids[row] >= at; }));
    return;
  }
  at -= groups.segments + 1;
  if (at > groups.chunks || (marked && groups.first[at] >= 0)) return;
  // Of the places before, those that rows don't take are segments.
  const int64_t place = at * groups.chunk;
  const int64_t rows = search(groups.rows, [&](int64_t row) { return row + ids[row] + 1 >= place; });
  groups.first.set(at, min(max(place - rows, int64_t(0)), groups.segments));
}

__global__ __launch_bounds__(kSegmentThreads) void find_chunks(SegmentGroups groups) {
  const int64_t at = int64_t(blockIdx.x) * kSegmentThreads + threadIdx.x;
  if (at > groups.chunks) return;
  const int64_t place = at * groups.chunk;
  groups.first.set(at, search(groups.segments, [&](int64_t j) { return groups.begin(j) + j >= place; }));
}

__global__ __launch_bounds__(kSegmentThreads) void expand(SegmentGroups groups, SegmentNumbers ids) {
  const int64_t row = int64_t(blockIdx.x) * kSegmentThreads + threadIdx.x;
  if (row >= groups.rows) return;
  const int64_t segment = search(groups.segments, [&](int64_t j) { return groups.end(j) > row; });
  ids.set(row, segment < groups.segments && groups.begin(segment) <= row ? segment : -1);
}

constexpr int kMostShared = 8192;

__global__ __launch_bounds__(kSegmentThreads) void count_ids(SegmentIndices ids, int64_t rows, int64_t segments,
                                                             uint32_t *counts, bool shared) {
  extern __shared__ uint32_t local[];
  if (shared) {
    for (int64_t s = threadIdx.x; s < segments; s += kSegmentThreads) local[s] = 0;
    __syncthreads();
  }
  constexpr int64_t kStep = kSegmentThreads * kRowsAtOnce;
  for (int64_t first = blockIdx.x * kStep + threadIdx.x; first < rows; first += gridDim.x * kStep) {
    int64_t id[kRowsAtOnce];
    segment_load_ids(ids, first, kSegmentThreads, rows, id);
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r)
      if (uint64_t(id[r]) < uint64_t(segments)) atomicAdd(shared ? local + id[r] : counts + id[r], 1u);
  }
  if (!shared) return;
  __syncthreads();
  for (int64_t s = threadIdx.x; s < segments; s += kSegmentThreads)
    if (local[s] != 0) atomicAdd(counts + s, local[s]);
}

void launch_forget(const SegmentBounds &bounds, Stream stream) {
  launch(forget_bounds, {ceil_div(bounds.count, kSegmentThreads), kSegmentThreads}, stream, bounds);
}

// From ids that never fall to offsets and bounds of chunks.
void launch_bounds(const SortedIds &ids, const SegmentGroups &groups, const SegmentSpace &space, Stream stream) {
  constexpr int64_t kFewSegments = 4096;
  const bool marks = groups.order || groups.segments > kFewSegments;
  // Those of a sort are forgotten by its first kernel.
  if ((marks || space.owned) && !groups.order) launch_forget(space.bounds, stream);
  if (marks) {
    const bool narrow = groups.rows + groups.segments < int64_t(1) << 30;
    launch(narrow ? mark_rises<int32_t> : mark_rises<int64_t>,
           {ceil_div(groups.rows + 1, kSegmentThreads * kRowsAtOnce), kSegmentThreads, 0, true}, stream, ids, groups,
           space.offsets, std::countr_zero(unsigned(groups.chunk)));
  }
  launch(find_bounds, {ceil_div(groups.segments + 1 + groups.chunks + 1, kSegmentThreads), kSegmentThreads, 0, true},
         stream, ids, groups, space.offsets, marks);
}

SegmentIndices as_indices(const SegmentNumbers &numbers) { return {numbers.data, 1, numbers.wide}; }

SegmentGroups groups_of(const SegmentProblem &problem, const SegmentIndices &offsets, const SegmentSpace &space) {
  return {problem.rows, problem.segments, offsets, nullptr, space.first, space.chunks.count, space.chunks.chunk};
}

}  // namespace

SegmentGroups segment_groups(const SegmentProblem &problem, const SegmentIndices &ids, const SegmentView *payload,
                             const SegmentSpace &space, Stream stream) {
  if (problem.ids == SegmentIds::offsets) {
    const SegmentGroups groups = groups_of(problem, ids, space);
    launch(find_chunks, {ceil_div(groups.chunks + 1, kSegmentThreads), kSegmentThreads}, stream, groups);
    return groups;
  }
  SegmentGroups groups = groups_of(problem, as_indices(space.offsets), space);
  SortedIds sorted = {nullptr, ids, problem.segments};
  if (problem.ids == SegmentIds::unsorted && problem.rows > 0) {
    segment_sort(problem, ids, payload, space, stream);
    sorted.keys = space.keys[space.sort.last()];
    groups.order = space.values[space.sort.last()];
  }
  launch_bounds(sorted, groups, space, stream);
  return groups;
}

SegmentIndices segment_offsets(const SegmentProblem &problem, const SegmentIndices &ids, const SegmentSpace &space,
                               Stream stream) {
  const auto run = [&](const auto *from) {
    const bool paired = ids.stride == 1 && reinterpret_cast<uintptr_t>(from) % (2 * sizeof *from) == 0;
    launch(find_rises<std::remove_cvref_t<decltype(*from)>>, {ceil_div(problem.rows + 1, kRiseRows), kSegmentThreads},
           stream, from, ids.stride, paired, problem.rows, problem.segments, space.offsets);
  };
  if (ids.wide) {
    run(static_cast<const int64_t *>(ids.data));
  } else {
    run(static_cast<const int32_t *>(ids.data));
  }
  return as_indices(space.offsets);
}

void segment_expand(const SegmentProblem &problem, const SegmentIndices &offsets, const SegmentSpace &space,
                    Stream stream) {
  launch(expand, {ceil_div(problem.rows, kSegmentThreads), kSegmentThreads}, stream, groups_of(problem, offsets, space),
         space.ids);
}

void segment_count(const SegmentProblem &problem, const SegmentIndices &ids, const SegmentSpace &space, Stream stream) {
  check_cuda(
      cudaMemsetAsync(space.counts, 0, size_t(problem.segments) * sizeof(uint32_t), static_cast<cudaStream_t>(stream)),
      "cudaMemsetAsync");
  const bool shared = problem.segments <= kMostShared;
  const int64_t most = shared ? kMultiprocessors * 4 : std::numeric_limits<int32_t>::max();
  const int64_t blocks = std::min(ceil_div(problem.rows, kSegmentThreads * kRowsAtOnce), most);
  launch(count_ids, {blocks, kSegmentThreads, shared ? size_t(problem.segments) * sizeof(uint32_t) : 0}, stream, ids,
         problem.rows, problem.segments, space.counts, shared);
}

std::string segment_arch(const char *plan) { return kernel_arch(plan, reinterpret_cast<const void *>(expand)); }

}  // namespace baracuda
