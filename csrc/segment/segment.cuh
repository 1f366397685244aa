// SPDX-License-Identifier: Apache-2.0
// Rows of one segment are brought together (sorted, where they aren't), and the sequence of all
// segments and rows is cut into chunks of equal length, however long segments are.
#pragma once

#include <algorithm>
#include <bit>

#include "runtime/launch.cuh"
#include "segment/segment.h"

namespace baracuda {

constexpr int kSegmentThreads = 256;
// What a block keeps of a single column: a chunk, and as many rows of a segment that begins at its end.
constexpr int kFlatRows = 4096;

// Non-negative numbers below 2^31 in 32 bits, others in 64.
struct SegmentNumbers {
  void *data = nullptr;
  bool wide = false;

  __device__ int64_t operator[](int64_t at) const {
    return wide ? static_cast<const int64_t *>(data)[at] : static_cast<const int32_t *>(data)[at];
  }
  __device__ void set(int64_t at, int64_t value) const {
    if (wide) {
      static_cast<int64_t *>(data)[at] = value;
    } else {
      static_cast<int32_t *>(data)[at] = int32_t(value);
    }
  }
};

// Where the rows of each segment are. A segment takes one place, and each of its rows one more: segment j
// stands at begin(j) + j and its rows follow it. So chunks of places bound the work of empty segments, too.
struct SegmentGroups {
  int64_t rows;
  int64_t segments;
  SegmentIndices offsets;  // with data: given; else there are
  SegmentNumbers begins;   // of segments that have rows,
  SegmentNumbers ends;     // 0 of those that have none, and
  const int64_t *front;    // how many rows come before the first segment
  const uint32_t *order;   // NULL: rows are where they are
  SegmentNumbers first;    // of each chunk, the first segment that stands in it or after it
  int64_t chunks;
  int32_t chunk;  // places

  __device__ int64_t clamped(int64_t number) const { return number < 0 ? 0 : number > rows ? rows : number; }
  // Of a segment without rows any place with end() not beyond it.
  __device__ int64_t begin(int64_t segment) const {
    if (offsets.data) return clamped(offsets[segment]);
    const int64_t to = end(segment);
    if (to == 0) return 0;
    const int64_t from = clamped(begins[segment]);
    return from < to ? from : to;
  }
  __device__ int64_t end(int64_t segment) const {
    if (!offsets.data) return clamped(ends[segment]);
    const int64_t from = clamped(offsets[segment]);
    const int64_t to = clamped(offsets[segment + 1]);
    return to > from ? to : from;
  }
  __device__ int64_t rows_before() const { return offsets.data ? clamped(offsets[0]) : *front; }
};

struct SegmentChunks {
  int32_t chunk = 0;
  int64_t count = 0;
};

// Rows of a single column by neighbouring segments: tiles of rows, buckets of 2^cell_bits segments.
struct SegmentBuckets {
  int cell_bits = 0;
  int buckets = 0;
  int64_t tiles = 0;
};

// How rows come together.
enum class SegmentPath { chunks, cells, buckets };

// What a workspace holds; NULL where the problem has no use for it.
struct SegmentSpace {
  uint32_t *keys[2] = {};
  uint32_t *values[2] = {};
  std::byte *sort = nullptr;
  size_t sort_bytes = 0;
  // Where the rows that are sorted lie: of each place the segment and the row.
  const uint32_t *sorted = nullptr;
  const uint32_t *order = nullptr;
  SegmentNumbers begins;
  SegmentNumbers ends;
  int64_t *front = nullptr;
  SegmentNumbers first;
  SegmentChunks chunks;
  SegmentBuckets buckets;
  uint16_t *bounds = nullptr;
  std::byte *partial = nullptr;
  std::byte *states = nullptr;  // of each segment and column, for a backward
  SegmentNumbers ids;           // of each row, from offsets
  uint32_t *counts = nullptr;
};

// How lanes share a matrix: `across` of a group of `lanes` have different columns, `vector` each at a time,
// and the others different rows.
struct SegmentLanes {
  int vector = 1;
  int across = 1;
  int lanes = 1;
  int64_t tiles = 1;
};

// `vector`: elements that are loaded at once. In which order rows are added follows from the problem alone.
inline SegmentLanes segment_lanes(const SegmentProblem &problem, int vector) {
  SegmentLanes lanes;
  const int64_t columns = problem.columns;
  lanes.vector = vector;
  lanes.across = int(std::bit_ceil(uint64_t(std::min<int64_t>(ceil_div(columns, vector), 32))));
  // Few idle lanes in the last tile.
  if (vector == 1 && columns > 32)
    for (int across = 16; across >= 8; across /= 2)
      if (ceil_div(columns, across) * across < ceil_div(columns, lanes.across) * lanes.across) lanes.across = across;
  lanes.lanes = lanes.across;
  constexpr int64_t kFewBytes = 32;
  if (columns * problem.dtype.bits / 8 < kFewBytes) {
    const int64_t average = problem.rows / std::max<int64_t>(problem.segments, 1);
    while (lanes.lanes < 32 && lanes.lanes / lanes.across * 2 < average) lanes.lanes *= 2;
  }
  lanes.tiles = ceil_div(columns, int64_t(lanes.across) * lanes.vector);
  return lanes;
}

// The most elements that are loaded at once, as far as sizes allow it.
inline int segment_vector(const SegmentProblem &problem) {
  const int vector = 16 / (problem.dtype.bits / 8);
  return problem.columns % vector == 0 && problem.columns >= 32 / (problem.dtype.bits / 8) ? vector : 1;
}

inline SegmentChunks segment_chunks(const SegmentProblem &problem) {
  constexpr int64_t kWarps = 132 * 48;
  const SegmentLanes lanes = segment_lanes(problem, segment_vector(problem));
  const int64_t places = problem.rows + problem.segments;
  if (problem.columns == 1) {
    // A block's.
    int32_t chunk = kFlatRows / 2;
    while (chunk > 256 && ceil_div(places, chunk) < 132 * 4) chunk /= 2;
    return {chunk, std::max<int64_t>(ceil_div(places, chunk), 1)};
  }
  int32_t chunk = 256;
  while (chunk > 32 && ceil_div(places, chunk) * lanes.tiles * lanes.lanes / 32 < kWarps) chunk /= 2;
  return {chunk, std::max<int64_t>(ceil_div(places, chunk), 1)};
}

// Sorts rows by segment, stably, and leaves the result in the space. Elements of a `payload` of one column take
// the places of their rows.
void segment_sort(const SegmentProblem &problem, const SegmentIndices &ids, const SegmentView *payload,
                  SegmentSpace &space, Stream stream);
// Brings rows together and cuts chunks.
SegmentGroups segment_groups(const SegmentProblem &problem, const SegmentIndices &ids, const SegmentView *payload,
                             SegmentSpace &space, Stream stream);
// Where segments of sorted ids begin and end.
SegmentGroups segment_bounds(const SegmentProblem &problem, const SegmentIndices &ids, const SegmentSpace &space,
                             Stream stream);
// The segment of each row, from offsets.
void segment_expand(const SegmentProblem &problem, const SegmentIndices &offsets, SegmentSpace &space, Stream stream);
void segment_count(const SegmentProblem &problem, const SegmentIndices &ids, SegmentSpace &space, Stream stream);
size_t segment_sort_bytes(const SegmentProblem &problem);

// Each instantiates its kernels in a file of its own.
void segment_sums(const SegmentForward &call, SegmentSpace &space, Stream stream);
void segment_integer_sums(const SegmentForward &call, SegmentSpace &space, Stream stream);
void segment_products(const SegmentForward &call, SegmentSpace &space, Stream stream);
void segment_extremes(const SegmentForward &call, SegmentSpace &space, Stream stream);
void segment_places(const SegmentForward &call, SegmentSpace &space, Stream stream);
SegmentPath segment_path(const SegmentProblem &problem, bool with_arg);
void segment_take_cells(Workspace &workspace, const SegmentProblem &problem, SegmentPath path, bool with_arg,
                        SegmentSpace &space);
void segment_max_cells(const SegmentForward &call, SegmentSpace &space, Stream stream);
// Leave their states in the workspace.
void segment_tallies(const SegmentBackward &call, SegmentSpace &space, Stream stream);
void segment_factors(const SegmentBackward &call, SegmentSpace &space, Stream stream);
// Whether it pays to sort rows only to read each row of d_output and arg once.
bool segment_sorts_for_arg(const SegmentProblem &problem);
// From those, or from arg, which may stand in the workspace, to the gradient.
void segment_spread(const SegmentBackward &call, SegmentSpace &space, Stream stream);

template <class Op>
struct SegmentReduceCall {
  Op op;
  SegmentGroups groups;
  SegmentView input;
  int64_t columns;
  int64_t tiles;
  int across;
  int lane_bits;
  typename Op::State *partial;
};

template <class T, int kCount>
struct alignas(sizeof(T) * kCount) SegmentPack {
  T value[kCount];
};

// Segments and their pieces are done with here. A segment of more rows than a chunk has places is cut
// at the bounds of chunks, and its pieces are put together by segment_join.
template <class Op, int kVector>
__device__ __forceinline__ void segment_finish(const SegmentReduceCall<Op> &call, int64_t chunk, int64_t first,
                                               int64_t segment, int64_t column, int64_t length,
                                               typename Op::State (&state)[kVector]) {
  if (length > call.groups.chunk) {
    typename Op::State *to = call.partial + (2 * chunk + (segment >= first)) * call.columns + column;
#pragma unroll
    for (int v = 0; v < kVector; ++v) to[v] = state[v];
  } else {
    call.op.template store<kVector>(segment, column, length, state);
  }
}

// What a chunk has to do: segments [from, to), of which the one before `first` is a piece of a long one,
// and rows [begin, end).
struct SegmentWork {
  int64_t from;
  int64_t first;
  int64_t to;
  int64_t begin;
  int64_t end;
  int64_t length;  // of the long one
};

__device__ __forceinline__ SegmentWork segment_work(const SegmentGroups &groups, int64_t chunk) {
  SegmentWork work;
  const int64_t place = chunk * groups.chunk;
  const int64_t beyond = place + groups.chunk;
  work.first = groups.first[chunk];
  const int64_t next = groups.first[chunk + 1];
  // Offsets that fall must not make more of a chunk than it has places.
  work.to = min(max(next, work.first), work.first + groups.chunk);
  const int64_t before = max(work.first - 1, int64_t(0));
  const int64_t last = max(work.to - 1, int64_t(0));
  const int64_t before_begin = groups.begin(before);
  const int64_t before_end = groups.end(before);
  const int64_t last_begin = groups.begin(last);
  const int64_t last_end = groups.end(last);
  // What segments don't take of the places before, rows do. A short segment that reaches into this chunk is done
  // with in the one before.
  work.begin = min(max(max(place - work.first, groups.rows_before()), work.first > 0 ? before_end : 0), groups.rows);
  work.length = 0;
  work.from = work.first;
  if (work.first > 0 && before_end - before_begin > groups.chunk && before_end + before >= place) {
    work.from = before;
    work.begin = max(before_begin, place - before - 1);
    work.length = before_end - before_begin;
  }
  work.end = min(beyond - next, groups.rows);
  if (last_end > last_begin) {
    work.end = last_end;
    if (last_end - last_begin > groups.chunk) work.end = min(work.end, beyond - last - 1);
  }
  work.end = max(work.begin, min(work.end, work.begin + 2 * groups.chunk));
  return work;
}

// A group of lanes per chunk and tile of columns, each lane with its own columns: rows go by without regard to
// where segments end, so that several loads are always in flight.
template <class Op, int kVector>
__global__ __launch_bounds__(kSegmentThreads) void segment_stream(const __grid_constant__ SegmentReduceCall<Op> call) {
  using Pack = SegmentPack<typename Op::Element, kVector>;
  constexpr int kRows = 4;
  const int64_t group = (int64_t(blockIdx.x) * kSegmentThreads + threadIdx.x) >> call.lane_bits;
  const int64_t chunk = group / call.tiles;
  const int lane = int(threadIdx.x) & (call.across - 1);
  const int64_t column = ((group - chunk * call.tiles) * call.across + lane) * kVector;
  if (chunk >= call.groups.chunks || column >= call.columns) return;
  const SegmentWork work = segment_work(call.groups, chunk);
  if (work.to == work.from) return;

  typename Op::State state[kVector];
#pragma unroll
  for (int v = 0; v < kVector; ++v) state[v] = call.op.identity();
  int64_t segment = work.from;
  int64_t end = max(work.begin, call.groups.end(segment));
  int64_t begin = work.length > 0 ? end - work.length : work.begin;
  const auto step = [&] {
    segment_finish(call, chunk, work.first, segment, column, end - begin, state);
#pragma unroll
    for (int v = 0; v < kVector; ++v) state[v] = call.op.identity();
    begin = end;
    ++segment;
    end = segment < work.to ? max(begin, call.groups.end(segment)) : INT64_MAX;
  };

  const typename Op::Element *input = static_cast<const typename Op::Element *>(call.input.data) + column;
  const uint32_t *order = call.groups.order;
  uint32_t rows[kRows];
  const auto find_rows = [&](int64_t at) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (order && at + r < work.end) rows[r] = __ldg(order + at + r);
  };
  find_rows(work.begin);
  for (int64_t at = work.begin; at < work.end; at += kRows) {
    Pack pack[kRows];
    typename Op::Row numbers[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (at + r >= work.end) break;
      const int64_t row = order ? int64_t(rows[r]) : at + r;
      numbers[r] = typename Op::Row(row);
      using Word = SegmentPack<uint32_t, sizeof(Pack) / 4>;
      const Word word = *reinterpret_cast<const Word *>(input + row * call.input.row);
      pack[r] = bit_cast<Pack>(word);
    }
    find_rows(at + kRows);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (at + r >= work.end) break;
      while (at + r >= end) step();
#pragma unroll
      for (int v = 0; v < kVector; ++v) call.op.add(state[v], pack[r].value[v], numbers[r]);
    }
  }
  while (segment < work.to) step();
}

template <class State>
__device__ __forceinline__ State segment_shuffle(const State &state, int from_lane_xor, unsigned mask) {
  static_assert(sizeof(State) % 4 == 0);
  using Words = SegmentPack<uint32_t, 1>;
  constexpr int kWords = sizeof(State) / 4;
  struct All {
    Words word[kWords];
  };
  All all = bit_cast<All>(state);
#pragma unroll
  for (int w = 0; w < kWords; ++w) all.word[w].value[0] = __shfl_xor_sync(mask, all.word[w].value[0], from_lane_xor);
  return bit_cast<State>(all);
}

// Any strides and any number of columns; where these are few, the lanes of a group share the rows of a segment.
template <class Op>
__global__ __launch_bounds__(kSegmentThreads) void segment_split(const __grid_constant__ SegmentReduceCall<Op> call) {
  constexpr int kRows = 4;
  using Element = typename Op::Element;
  const int lanes = 1 << call.lane_bits;
  const int lane = int(threadIdx.x) & (lanes - 1);
  const int64_t group = (int64_t(blockIdx.x) * kSegmentThreads + threadIdx.x) >> call.lane_bits;
  const int64_t chunk = group / call.tiles;
  const int64_t column = (group - chunk * call.tiles) * call.across + (lane & (call.across - 1));
  const int apart = lanes / call.across;
  if (chunk >= call.groups.chunks) return;
  const bool mine = column < call.columns;
  const unsigned in_group = (lanes == 32 ? ~0u : (1u << lanes) - 1) << (threadIdx.x & 31 & unsigned(-lanes));
  const SegmentWork work = segment_work(call.groups, chunk);
  const Element *input = static_cast<const Element *>(call.input.data) + (mine ? column * call.input.column : 0);

  for (int64_t segment = work.from; segment < work.to; ++segment) {
    const int64_t from = call.groups.begin(segment);
    const int64_t to = call.groups.end(segment);
    typename Op::State state[1] = {call.op.identity()};
    const int64_t stop = min(to, work.end);
    for (int64_t at = max(from, work.begin) + lane / call.across; at < stop; at += kRows * apart) {
      Element element[kRows];
      typename Op::Row numbers[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int64_t place = at + r * apart;
        if (place >= stop) break;
        const int64_t row = call.groups.order ? int64_t(__ldg(call.groups.order + place)) : place;
        numbers[r] = typename Op::Row(row);
        if (mine) element[r] = input[row * call.input.row];
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (at + r * apart >= stop) break;
        if (mine) call.op.add(state[0], element[r], numbers[r]);
      }
    }
    for (int across = lanes / 2; across >= call.across; across /= 2)
      call.op.join(state[0], segment_shuffle(state[0], across, in_group));
    if (mine && lane < call.across) segment_finish(call, chunk, work.first, segment, column, to - from, state);
  }
}

// A single column: a block loads its chunk's rows at once, then a thread takes a segment, or a warp a larger one.
template <class Op>
__global__ __launch_bounds__(kSegmentThreads) void segment_flat(const __grid_constant__ SegmentReduceCall<Op> call) {
  using Element = typename Op::Element;
  using Row = typename Op::Row;
  using State = typename Op::State;
  constexpr int kLoads = 8;
  constexpr int kFewRows = 32;
  constexpr int kMostLarge = kFlatRows / 32;
  __shared__ Element elements[kFlatRows];
  __shared__ int64_t large[kMostLarge];
  __shared__ int found;
  const SegmentGroups &groups = call.groups;
  const int64_t chunk = blockIdx.x;
  const SegmentWork work = segment_work(groups, chunk);
  const int count = int(work.end - work.begin);
  if (threadIdx.x == 0) found = 0;
  const Element *input = static_cast<const Element *>(call.input.data);
  const uint32_t *order = groups.order ? groups.order + work.begin : nullptr;
  const auto row_at = [&](int place) { return order ? int64_t(__ldg(order + place)) : work.begin + place; };
  for (int base = threadIdx.x; base < count; base += kSegmentThreads * kLoads) {
    int64_t row[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k)
      if (base + k * kSegmentThreads < count) row[k] = row_at(base + k * kSegmentThreads);
#pragma unroll
    for (int k = 0; k < kLoads; ++k)
      if (base + k * kSegmentThreads < count) elements[base + k * kSegmentThreads] = input[row[k] * call.input.row];
  }
  __syncthreads();
  // Places in the block's rows; offsets that fall may be anywhere.
  const auto here = [&](int64_t row) { return int(min(max(row, work.begin), work.end) - work.begin); };
  const auto reduce = [&](int64_t segment, int from, int step) {
    State state = call.op.identity();
    const int stop = here(groups.end(segment));
    for (int at = here(groups.begin(segment)) + from; at < stop; at += step)
      call.op.add(state, elements[at], Row(row_at(at)));
    return state;
  };
  const auto finish = [&](int64_t segment, const State &state) {
    State one[1] = {state};
    segment_finish(call, chunk, work.first, segment, 0, groups.end(segment) - groups.begin(segment), one);
  };
  for (int64_t segment = work.from + threadIdx.x; segment < work.to; segment += kSegmentThreads) {
    if (here(groups.end(segment)) - here(groups.begin(segment)) > kFewRows) {
      // More than fit come from offsets that fall; their values mean nothing.
      const int place = atomicAdd(&found, 1);
      if (place < kMostLarge) large[place] = segment;
    } else {
      finish(segment, reduce(segment, 0, 1));
    }
  }
  __syncthreads();
  const int lane = int(threadIdx.x) & 31;
  for (int index = int(threadIdx.x) / 32; index < min(found, kMostLarge); index += kSegmentThreads / 32) {
    State state = reduce(large[index], lane, 32);
    for (int across = 16; across > 0; across /= 2) call.op.join(state, segment_shuffle(state, across, ~0u));
    if (lane == 0) finish(large[index], state);
  }
}

constexpr int kJoinChunks = 32;

// Puts the pieces of long segments together. A block looks after the long segments that end in its chunks.
template <class Op>
__global__ __launch_bounds__(kSegmentThreads) void segment_join(const __grid_constant__ SegmentReduceCall<Op> call) {
  using State = typename Op::State;
  constexpr int kAtOnce = 4;
  __shared__ int found;
  __shared__ int64_t ends[kJoinChunks];
  __shared__ State states[kSegmentThreads];
  const SegmentGroups &groups = call.groups;
  if (threadIdx.x == 0) found = 0;
  __syncthreads();
  const int64_t chunk = int64_t(blockIdx.x) * kJoinChunks + threadIdx.x;
  if (threadIdx.x < kJoinChunks && chunk < groups.chunks && groups.first[chunk] > 0) {
    const int64_t segment = groups.first[chunk] - 1;
    const int64_t length = groups.end(segment) - groups.begin(segment);
    // Its last row's place.
    const int64_t last = groups.end(segment) + segment;
    if (length > groups.chunk && last / groups.chunk == chunk) ends[atomicAdd(&found, 1)] = segment;
  }
  __syncthreads();
  // As many threads side by side as there are columns, the others share the pieces.
  int across = 1;
  while (across < kSegmentThreads && across < call.columns) across *= 2;
  const int apart = kSegmentThreads / across;
  const int part = int(threadIdx.x) / across;
  for (int index = 0; index < found; ++index) {
    const int64_t segment = ends[index];
    const int64_t begin = groups.begin(segment);
    const int64_t end = groups.end(segment);
    const int64_t from = (begin + segment) / groups.chunk;
    // Chunks that a broken promise left out have no piece that anybody wrote.
    const int64_t pieces = min((end + segment) / groups.chunk, groups.chunks - 1) - from + 1;
    const int64_t each = (pieces + apart - 1) / apart;
    for (int64_t tile = 0; tile < call.columns; tile += across) {
      const int64_t column = tile + threadIdx.x % across;
      State state = call.op.identity();
      if (column < call.columns) {
        const int64_t stop = min(pieces, (part + 1) * each);
        for (int64_t piece = part * each; piece < stop; piece += kAtOnce) {
          State some[kAtOnce];
#pragma unroll
          for (int p = 0; p < kAtOnce; ++p)
            if (piece + p < stop)
              some[p] = call.partial[(2 * (from + piece + p) + (piece + p == 0)) * call.columns + column];
#pragma unroll
          for (int p = 0; p < kAtOnce; ++p)
            if (piece + p < stop) call.op.join(state, some[p]);
        }
      }
      states[threadIdx.x] = state;
      for (int half = apart / 2; half > 0; half /= 2) {
        __syncthreads();
        if (part < half) call.op.join(states[threadIdx.x], states[threadIdx.x + half * across]);
      }
      if (part == 0 && column < call.columns) {
        State total[1] = {states[threadIdx.x]};
        call.op.template store<1>(segment, column, end - begin, total);
      }
      __syncthreads();
    }
  }
}

// Whether rows of the matrix can be read, or written, `vector` elements of `bytes` bytes at a time.
inline bool segment_aligned(const SegmentView &view, int vector, int bytes) {
  const int at_once = std::min(vector * bytes, 16);
  return view.column == 1 && view.row * bytes % at_once == 0 &&
         reinterpret_cast<uintptr_t>(view.data) % uintptr_t(at_once) == 0;
}

// Reduces every segment and hands it to op.store. `kVector`: elements that are read at once, where sizes
// allow it and `aligned` says that what op.store writes does, too.
template <class Op, int kVector>
void segment_reduce(const SegmentProblem &problem, const SegmentView &input, const SegmentIndices &ids, const Op &op,
                    bool aligned, bool needs_rows, SegmentSpace &space, Stream stream) {
  constexpr int kBytes = sizeof(typename Op::Element);
  const bool vectors =
      kVector > 1 && segment_vector(problem) == kVector && aligned && segment_aligned(input, kVector, kBytes);
  const SegmentLanes lanes = segment_lanes(problem, vectors ? kVector : 1);
  const SegmentChunks &chunks = space.chunks;
  // Single elements travel with the sort.
  const bool travels = problem.ids == SegmentIds::unsorted && problem.columns == 1 && kBytes <= 4 && !needs_rows;
  SegmentReduceCall<Op> call = {};
  call.op = op;
  call.groups = segment_groups(problem, ids, travels ? &input : nullptr, space, stream);
  call.input = input;
  if (travels) {
    call.input = {const_cast<uint32_t *>(call.groups.order), 4 / kBytes, 1};
    call.groups.order = nullptr;
    space.order = nullptr;
  }
  call.columns = problem.columns;
  call.tiles = lanes.tiles;
  call.across = lanes.across;
  call.lane_bits = std::countr_zero(unsigned(lanes.lanes));
  call.partial = reinterpret_cast<typename Op::State *>(space.partial);
  const Grid grid = {ceil_div(chunks.count * lanes.tiles * lanes.lanes, kSegmentThreads), kSegmentThreads};
  if (problem.columns == 1) {
    launch(segment_flat<Op>, {chunks.count, kSegmentThreads}, stream, call);
  } else if constexpr (kVector > 1) {
    if (vectors) {
      launch(segment_stream<Op, kVector>, grid, stream, call);
    } else {
      launch(segment_split<Op>, grid, stream, call);
    }
  } else {
    launch(segment_split<Op>, grid, stream, call);
  }
  if (problem.rows > chunks.chunk)
    launch(segment_join<Op>, {ceil_div(chunks.count, kJoinChunks), kSegmentThreads}, stream, call);
}

// ---------------------------------------------------------------------------------------------------
// What becomes of the states.

template <int kVector, class T>
__device__ __forceinline__ void segment_write(const SegmentView &view, int64_t segment, int64_t column,
                                              const T (&value)[kVector]) {
  T *to = static_cast<T *>(view.data) + segment * view.row + column * view.column;
  if constexpr (kVector == 1) {
    *to = value[0];
  } else {
    constexpr int kAtOnce = sizeof(T) * kVector > 16 ? 16 / sizeof(T) : kVector;
    using Pack = SegmentPack<T, kAtOnce>;
    using Word = SegmentPack<uint32_t, sizeof(Pack) / 4>;
#pragma unroll
    for (int v = 0; v < kVector; v += kAtOnce) {
      Pack pack;
#pragma unroll
      for (int p = 0; p < kAtOnce; ++p) pack.value[p] = value[v + p];
      reinterpret_cast<Word *>(to + v)[0] = bit_cast<Word>(pack);
    }
  }
}

template <template <class> class Reduction, class T>
struct SegmentTotals : Reduction<T> {
  using State = typename Reduction<T>::State;
  SegmentView output;
  bool mean;
  T empty;

  template <int kVector>
  __device__ void store(int64_t segment, int64_t column, int64_t length, const State (&state)[kVector]) const {
    T value[kVector];
#pragma unroll
    for (int v = 0; v < kVector; ++v)
      value[v] = length == 0 ? empty : T(mean ? segment_mean<T>(state[v], length) : state[v]);
    segment_write<kVector>(output, segment, column, value);
  }
};

template <class Bits>
struct SegmentExtremes : SegmentMax<Bits> {
  using State = typename SegmentMax<Bits>::State;
  SegmentView output;
  Bits empty;

  template <int kVector>
  __device__ void store(int64_t segment, int64_t column, int64_t length, const State (&state)[kVector]) const {
    Bits value[kVector];
#pragma unroll
    for (int v = 0; v < kVector; ++v) value[v] = length == 0 ? empty : this->order.bits(state[v]);
    segment_write<kVector>(output, segment, column, value);
  }
};

template <class Bits>
struct SegmentPlaces : SegmentArgMax<Bits, uint32_t> {
  using State = typename SegmentArgMax<Bits, uint32_t>::State;
  SegmentView output;  // without data: only the row is wanted
  SegmentView arg;
  bool wide;
  uint32_t none;
  Bits empty;

  template <int kVector>
  __device__ void store(int64_t segment, int64_t column, int64_t length, const State (&state)[kVector]) const {
    if (output.data) {
      Bits value[kVector];
#pragma unroll
      for (int v = 0; v < kVector; ++v) value[v] = length == 0 ? empty : this->order.bits(state[v].key);
      segment_write<kVector>(output, segment, column, value);
    }
    if (wide) {
      int64_t row[kVector];
#pragma unroll
      for (int v = 0; v < kVector; ++v) row[v] = length == 0 ? none : state[v].row;
      segment_write<kVector>(arg, segment, column, row);
    } else {
      uint32_t row[kVector];
#pragma unroll
      for (int v = 0; v < kVector; ++v) row[v] = length == 0 ? none : state[v].row;
      segment_write<kVector>(arg, segment, column, row);
    }
  }
};

// States as they are, for a backward.
template <class Reduction>
struct SegmentStates : Reduction {
  using State = typename Reduction::State;
  State *to;
  int64_t columns;

  template <int kVector>
  __device__ void store(int64_t segment, int64_t column, int64_t, const State (&state)[kVector]) const {
#pragma unroll
    for (int v = 0; v < kVector; ++v) to[segment * columns + column + v] = state[v];
  }
};

}  // namespace baracuda
