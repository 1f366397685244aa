// SPDX-License-Identifier: Apache-2.0
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
  __device__ void load(int64_t first, int64_t rows, int64_t (&id)[kRowsAtOnce]) const {
    if (keys || rows == 0) {
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        const int64_t row = first + r * kSegmentThreads;
        id[r] = row >= 0 && row < rows ? int64_t(keys[row]) : -1;
      }
    } else {
      segment_load_ids(ids, first, kSegmentThreads, rows, id);
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) id[r] = inside(id[r]);
    }
  }
};

// Offsets where ids rise, and bounds of chunks, of as many segments as are passed at once. The others stay as they
// were.
constexpr int64_t kMostPassed = 32;

__global__ __launch_bounds__(kSegmentThreads) void forget_bounds(SegmentBounds bounds) {
  bounds.forget(int64_t(blockIdx.x) * kSegmentThreads + threadIdx.x, int64_t(gridDim.x) * kSegmentThreads);
}

__global__ __launch_bounds__(kSegmentThreads) void mark_rises(SortedIds ids, SegmentGroups groups,
                                                              SegmentNumbers offsets, int chunk_bits) {
  wait_for_earlier_work();
  let_next_kernel_start();
  const int64_t first = int64_t(blockIdx.x) * kSegmentThreads * kRowsAtOnce + threadIdx.x;
  int64_t id[kRowsAtOnce];
  int64_t before[kRowsAtOnce];
  ids.load(first, groups.rows, id);
  ids.load(first - 1, groups.rows, before);
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) {
    const int64_t row = first + r * kSegmentThreads;
    if (row > groups.rows) break;
    if (row == groups.rows) id[r] = groups.segments;
    if (id[r] - before[r] > kMostPassed) continue;
    for (int64_t segment = before[r] + 1; segment <= id[r]; ++segment) offsets.set(segment, row);
    // Rows and the segments that stand before them take the places up to this one.
    const int64_t place = id[r] + row + 1;
    const int64_t last = row == groups.rows ? groups.chunks : min(place >> chunk_bits, groups.chunks);
    for (int64_t chunk = ((before[r] + row) >> chunk_bits) + 1; chunk <= last; ++chunk)
      groups.first.set(chunk, min((chunk << chunk_bits) - row, groups.segments));
  }
}

// Offsets alone. The block passes together what is passed at once and much, each time less than all segments.
__global__ __launch_bounds__(kSegmentThreads) void find_rises(SortedIds ids, int64_t rows, SegmentNumbers offsets) {
  __shared__ int64_t passed[kSegmentThreads * kRowsAtOnce];
  __shared__ int found;
  if (threadIdx.x == 0) found = 0;
  __syncthreads();
  let_next_kernel_start();
  const int64_t first = int64_t(blockIdx.x) * kSegmentThreads * kRowsAtOnce + threadIdx.x;
  int64_t id[kRowsAtOnce];
  int64_t before[kRowsAtOnce];
  ids.load(first, rows, id);
  ids.load(first - 1, rows, before);
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) {
    const int64_t row = first + r * kSegmentThreads;
    if (row > rows) break;
    if (row == rows) id[r] = ids.segments;
    if (id[r] - before[r] > kMostPassed) {
      passed[atomicAdd(&found, 1)] = row;
    } else {
      for (int64_t segment = before[r] + 1; segment <= id[r]; ++segment) offsets.set(segment, row);
    }
  }
  __syncthreads();
  // Ids that rise again and again, where they must not fall, must not make more of it.
  int64_t left = ids.segments + 1;
  for (int p = 0; p < found; ++p) {
    const int64_t row = passed[p];
    const int64_t from = row == 0 ? 0 : ids[row - 1] + 1;
    const int64_t to = row == rows ? ids.segments : ids[row];
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

// The same by all lanes of a warp.
template <class Holds>
__device__ int64_t search_wide(int64_t count, const Holds &holds) {
  const int lane = int(threadIdx.x) & 31;
  int64_t low = 0;
  while (count > 0) {
    const int64_t step = (count + 31) / 32;
    const int64_t at = (lane + 1) * step - 1;
    const uint32_t held = __ballot_sync(~0u, at >= count || holds(low + at));
    // The last lane's place is behind all, or holds the answer that no other has.
    const int64_t before = held ? (__ffs(int(held)) - 1) * step : count;
    low += before;
    count = min(count - before, step - 1);
  }
  return low;
}

// A thread for each offset and each bound of a chunk that isn't marked.
__global__ __launch_bounds__(kSegmentThreads) void find_bounds(SortedIds ids, SegmentGroups groups,
                                                               SegmentNumbers offsets) {
  wait_for_earlier_work();
  let_next_kernel_start();
  int64_t at = int64_t(blockIdx.x) * kSegmentThreads + threadIdx.x;
  if (at <= groups.segments) {
    if (offsets[at] < 0) offsets.set(at, search(groups.rows, [&](int64_t row) { return ids[row] >= at; }));
    return;
  }
  at -= groups.segments + 1;
  if (at > groups.chunks || groups.first[at] >= 0) return;
  // Of the places before, those that rows don't take are segments.
  const int64_t place = at * groups.chunk;
  const int64_t rows = search(groups.rows, [&](int64_t row) { return row + ids[row] + 1 >= place; });
  groups.first.set(at, min(max(place - rows, int64_t(0)), groups.segments));
}

// A warp for each bound of a chunk.
__global__ __launch_bounds__(kSegmentThreads) void find_chunks(SegmentGroups groups) {
  const int64_t at = (int64_t(blockIdx.x) * kSegmentThreads + threadIdx.x) / 32;
  if (at > groups.chunks) return;
  const int64_t place = at * groups.chunk;
  const int64_t first = search_wide(groups.segments, [&](int64_t j) { return groups.begin(j) + j >= place; });
  if (threadIdx.x % 32 == 0) groups.first.set(at, first);
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
  for (int64_t row = int64_t(blockIdx.x) * kSegmentThreads + threadIdx.x; row < rows;
       row += int64_t(gridDim.x) * kSegmentThreads) {
    const int64_t id = ids[row];
    if (uint64_t(id) < uint64_t(segments)) atomicAdd(shared ? local + id : counts + id, 1u);
  }
  if (!shared) return;
  __syncthreads();
  for (int64_t s = threadIdx.x; s < segments; s += kSegmentThreads)
    if (local[s] != 0) atomicAdd(counts + s, local[s]);
}

// From ids that never fall to offsets and bounds of chunks.
void launch_bounds(const SortedIds &ids, const SegmentGroups &groups, const SegmentSpace &space, Stream stream) {
  // Those of a sort are forgotten by its first kernel.
  if (!groups.order)
    launch(forget_bounds, {ceil_div(space.bounds.count, kSegmentThreads), kSegmentThreads}, stream, space.bounds);
  launch(mark_rises, {ceil_div(groups.rows + 1, kSegmentThreads * kRowsAtOnce), kSegmentThreads, 0, true}, stream, ids,
         groups, space.offsets, std::countr_zero(unsigned(groups.chunk)));
  launch(find_bounds, {ceil_div(groups.segments + 1 + groups.chunks + 1, kSegmentThreads), kSegmentThreads, 0, true},
         stream, ids, groups, space.offsets);
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
    launch(find_chunks, {ceil_div((groups.chunks + 1) * 32, kSegmentThreads), kSegmentThreads}, stream, groups);
    return groups;
  }
  SegmentGroups groups = groups_of(problem, as_indices(space.offsets), space);
  SortedIds sorted = {nullptr, ids, problem.segments};
  if (problem.ids == SegmentIds::unsorted && problem.rows > 0) {
    const int which = segment_sort(problem, ids, payload, space, stream);
    sorted.keys = space.keys[which];
    groups.order = space.values[which];
  }
  launch_bounds(sorted, groups, space, stream);
  return groups;
}

SegmentIndices segment_offsets(const SegmentProblem &problem, const SegmentIndices &ids, const SegmentSpace &space,
                               Stream stream) {
  launch(find_rises, {ceil_div(problem.rows + 1, kSegmentThreads * kRowsAtOnce), kSegmentThreads}, stream,
         SortedIds{nullptr, ids, problem.segments}, problem.rows, space.offsets);
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
  const int64_t blocks = std::min<int64_t>(ceil_div(problem.rows, kSegmentThreads * kRowsAtOnce), 132 * 4);
  launch(count_ids, {blocks, kSegmentThreads, shared ? size_t(problem.segments) * sizeof(uint32_t) : 0}, stream, ids,
         problem.rows, problem.segments, space.counts, shared);
}

std::string segment_arch(const char *plan) { return kernel_arch(plan, reinterpret_cast<const void *>(expand)); }

}  // namespace baracuda
