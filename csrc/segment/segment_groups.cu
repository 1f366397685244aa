// SPDX-License-Identifier: Apache-2.0
#include <cub/device/device_radix_sort.cuh>

#include "segment/segment.cuh"

namespace baracuda {
namespace {

constexpr int kRowsAtOnce = 4;

// Ids that don't count sort behind all others.
template <class Bits>
__global__ __launch_bounds__(kSegmentThreads) void fill_keys(SegmentIndices ids, int64_t rows, int64_t segments,
                                                             const Bits *payload, int64_t payload_step, uint32_t *keys,
                                                             uint32_t *values) {
  const int64_t first = int64_t(blockIdx.x) * kSegmentThreads * kRowsAtOnce + threadIdx.x;
  int64_t id[kRowsAtOnce];
  segment_load_ids(ids, first, kSegmentThreads, rows, id);
  uint32_t value[kRowsAtOnce];
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) {
    const int64_t row = min(first + r * kSegmentThreads, rows - 1);
    value[r] = payload ? uint32_t(payload[row * payload_step]) : uint32_t(row);
  }
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) {
    const int64_t row = first + r * kSegmentThreads;
    if (row >= rows) break;
    keys[row] = uint32_t(uint64_t(id[r]) < uint64_t(segments) ? id[r] : segments);
    values[row] = value[r];
  }
}

// Ids that never fall, with -1 and `segments` for what is outside.
struct SortedIds {
  const uint32_t *keys;  // NULL: the ids themselves
  SegmentIndices ids;
  int64_t segments;

  __device__ int64_t operator[](int64_t at) const {
    if (keys) return __ldg(keys + at);
    return inside(ids[at]);
  }
  __device__ int64_t inside(int64_t id) const { return id < 0 ? -1 : id > segments ? segments : id; }
  // Of rows that are as many apart as a block has threads; -1 outside.
  __device__ void load(int64_t first, int64_t rows, int64_t (&id)[kRowsAtOnce]) const {
    if (keys) {
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        const int64_t row = first + r * kSegmentThreads;
        id[r] = row >= 0 && row < rows ? int64_t(__ldg(keys + row)) : -1;
      }
    } else {
      segment_load_ids(ids, first, kSegmentThreads, rows, id);
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) id[r] = inside(id[r]);
    }
  }
};

// Offsets where ids rise, of as many segments as are passed at once. The others stay as they were.
constexpr int64_t kMostPassed = 32;

__global__ __launch_bounds__(kSegmentThreads) void forget_offsets(SegmentNumbers offsets, int64_t count) {
  const int64_t at = int64_t(blockIdx.x) * kSegmentThreads + threadIdx.x;
  if (at < count) offsets.set(at, -1);
}

__global__ __launch_bounds__(kSegmentThreads) void mark_rises(SortedIds ids, int64_t rows, int64_t segments,
                                                              SegmentNumbers offsets) {
  const int64_t first = int64_t(blockIdx.x) * kSegmentThreads * kRowsAtOnce + threadIdx.x;
  int64_t id[kRowsAtOnce];
  int64_t before[kRowsAtOnce];
  ids.load(first, rows, id);
  ids.load(first - 1, rows, before);
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) {
    const int64_t row = first + r * kSegmentThreads;
    if (row > rows) break;
    if (row == rows) id[r] = segments;
    if (id[r] - before[r] > kMostPassed) continue;
    for (int64_t segment = before[r] + 1; segment <= id[r]; ++segment) offsets.set(segment, row);
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

// A thread for each offset, where there are none yet, and for each bound of a chunk.
__global__ __launch_bounds__(kSegmentThreads) void find_bounds(SortedIds ids, SegmentGroups groups,
                                                               SegmentNumbers offsets, bool marked) {
  int64_t at = int64_t(blockIdx.x) * kSegmentThreads + threadIdx.x;
  if (offsets.data) {
    if (at <= groups.segments) {
      if (!marked || offsets[at] < 0) offsets.set(at, search(groups.rows, [&](int64_t row) { return ids[row] >= at; }));
      return;
    }
    at -= groups.segments + 1;
  }
  if (at > groups.chunks) return;
  const int64_t place = at * groups.chunk;
  if (offsets.data) {
    // Of the places before, those that rows don't take are segments.
    const int64_t rows = search(groups.rows, [&](int64_t row) { return row + ids[row] + 1 >= place; });
    groups.first.set(at, min(max(place - rows, int64_t(0)), groups.segments));
  } else {
    groups.first.set(at, search(groups.segments, [&](int64_t j) { return groups.begin(j) + j >= place; }));
  }
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

template <class Bits>
void launch_fill_keys(const SegmentProblem &problem, const SegmentIndices &ids, const SegmentView *payload,
                      const SegmentSpace &space, Stream stream) {
  launch(fill_keys<Bits>, {ceil_div(problem.rows, kSegmentThreads * kRowsAtOnce), kSegmentThreads}, stream, ids,
         problem.rows, problem.segments, static_cast<const Bits *>(payload ? payload->data : nullptr),
         payload ? payload->row : 0, space.keys[0], space.values[0]);
}

int key_bits(int64_t segments) { return std::bit_width(uint64_t(segments)); }

void sort_pairs(const SegmentProblem &problem, void *temporary, size_t &bytes, cub::DoubleBuffer<uint32_t> &keys,
                cub::DoubleBuffer<uint32_t> &values, Stream stream) {
  check_cuda(cub::DeviceRadixSort::SortPairs(temporary, bytes, keys, values, problem.rows, 0,
                                             key_bits(problem.segments), static_cast<cudaStream_t>(stream)),
             "radix sort");
}

// From ids that never fall to offsets, where there are none, and bounds of chunks.
void launch_bounds(const SortedIds &ids, const SegmentGroups &groups, const SegmentNumbers &offsets, Stream stream) {
  constexpr int64_t kFewSegments = 4096;
  const bool marks = offsets.data && groups.segments > kFewSegments;
  const int64_t count = groups.segments + 1;
  if (marks) {
    launch(forget_offsets, {ceil_div(count, kSegmentThreads), kSegmentThreads}, stream, offsets, count);
    launch(mark_rises, {ceil_div(groups.rows + 1, kSegmentThreads * kRowsAtOnce), kSegmentThreads}, stream, ids,
           groups.rows, groups.segments, offsets);
  }
  const int64_t threads = groups.chunks + 1 + (offsets.data ? count : 0);
  launch(find_bounds, {ceil_div(threads, kSegmentThreads), kSegmentThreads}, stream, ids, groups, offsets, marks);
}

SegmentIndices as_indices(const SegmentNumbers &numbers) { return {numbers.data, 1, numbers.wide}; }

SegmentGroups groups_of(const SegmentProblem &problem, const SegmentIndices &offsets, const SegmentSpace &space) {
  return {problem.rows, problem.segments, offsets, nullptr, space.first, space.chunks.count, space.chunks.chunk};
}

}  // namespace

size_t segment_sort_bytes(const SegmentProblem &problem) {
  size_t bytes = 0;
  cub::DoubleBuffer<uint32_t> none;
  sort_pairs(problem, nullptr, bytes, none, none, nullptr);
  return bytes;
}

SegmentGroups segment_groups(const SegmentProblem &problem, const SegmentIndices &ids, const SegmentView *payload,
                             const SegmentSpace &space, Stream stream) {
  const bool given = problem.ids == SegmentIds::offsets;
  SegmentGroups groups = groups_of(problem, given ? ids : as_indices(space.offsets), space);
  SortedIds sorted = {nullptr, ids, problem.segments};
  if (problem.ids == SegmentIds::unsorted) {
    sorted.keys = space.keys[0];
    if (problem.rows > 0) {
      if (!payload || problem.dtype.bits == 32) {
        launch_fill_keys<uint32_t>(problem, ids, payload, space, stream);
      } else if (problem.dtype.bits == 16) {
        launch_fill_keys<uint16_t>(problem, ids, payload, space, stream);
      } else {
        launch_fill_keys<uint8_t>(problem, ids, payload, space, stream);
      }
      cub::DoubleBuffer<uint32_t> keys(space.keys[0], space.keys[1]);
      cub::DoubleBuffer<uint32_t> values(space.values[0], space.values[1]);
      size_t bytes = space.sort_bytes;
      sort_pairs(problem, space.sort, bytes, keys, values, stream);
      sorted.keys = keys.Current();
      groups.order = values.Current();
    }
  }
  launch_bounds(sorted, groups, given ? SegmentNumbers() : space.offsets, stream);
  return groups;
}

void segment_offsets(const SegmentProblem &problem, const SegmentIndices &ids, const SegmentSpace &space,
                     Stream stream) {
  SegmentGroups groups = groups_of(problem, ids, space);
  groups.chunks = -1;
  launch_bounds({nullptr, ids, problem.segments}, groups, space.offsets, stream);
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
