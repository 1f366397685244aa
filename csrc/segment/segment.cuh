// SPDX-License-Identifier: Apache-2.0
// Rows of one segment are brought together (sorted, where they aren't), and the sequence of all
// segments and rows is cut into chunks of equal length, however long segments are.
#pragma once

#include <algorithm>
#include <bit>

#include "runtime/gate.cuh"
#include "runtime/launch.cuh"
#include "segment/segment.h"

namespace baracuda {

constexpr int kSegmentThreads = 256;

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
  SegmentIndices offsets;
  const uint32_t *order;  // NULL: rows are where they are
  SegmentNumbers first;   // of each chunk, the first segment that stands in it or after it
  int64_t chunks;
  int32_t chunk;  // places

  __device__ int64_t clamped(int64_t at) const {
    const int64_t offset = offsets[at];
    return offset < 0 ? 0 : offset > rows ? rows : offset;
  }
  __device__ int64_t begin(int64_t segment) const { return clamped(segment); }
  __device__ int64_t end(int64_t segment) const {
    const int64_t from = clamped(segment);
    const int64_t to = clamped(segment + 1);
    return to > from ? to : from;
  }
};

struct SegmentChunks {
  int32_t chunk = 0;
  int64_t count = 0;
};

// Ids of every `step`th row from `first` on, -1 behind the last. All are asked for before any is looked at.
template <int kCount>
__device__ __forceinline__ void segment_load_ids(const SegmentIndices &ids, int64_t first, int64_t step, int64_t rows,
                                                 int64_t (&id)[kCount]) {
  const auto load = [&](const auto *from) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) id[k] = from[max(min(first + k * step, rows - 1), int64_t(0)) * ids.stride];
  };
  if (ids.wide) {
    load(static_cast<const int64_t *>(ids.data));
  } else {
    load(static_cast<const int32_t *>(ids.data));
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k)
    if (first + k * step < 0 || first + k * step >= rows) id[k] = -1;
}

// How many columns' marks are in a word.
constexpr int kSegmentMarked = 32;

// How few segments are shared out: lanes side by side, `vector` columns each, tiles of columns, parts of rows, and how
// many rows a lane has on their way at once.
struct SegmentFew {
  int vector = 1;
  int across = 1;
  int tiles = 1;
  int parts = 1;
  int stream_rows = 0;
};

// Rows of one column by `count` buckets of 2^cell_bits neighbouring segments, in tiles. Buckets of more than `piece`
// rows are shared out; there are at most `units` pieces.
struct SegmentBuckets {
  int cell_bits = 0;
  int copy_bits = 0;  // of sums: there are 2^copy_bits cells for a segment
  int count = 0;
  uint32_t piece = 0;
  int64_t tiles = 0;
  int64_t units = 0;
  int64_t stride = 0;  // of tiles, in records of four rows
  void *elements = nullptr;
  void *places = nullptr;       // the cell and, if wanted, the row in the tile; NULL where they share words
  uint16_t *bounds = nullptr;   // where each tile's bucket begins, [count + 1][tiles]
  uint32_t *totals = nullptr;   // rows of each bucket
  uint32_t *done = nullptr;     // pieces of each bucket that are reduced
  uint32_t *lengths = nullptr;  // of pieces' segments
};

// Segments of more than `most` rows that several share, in pieces.
struct SegmentLongPiece {
  int64_t segment;
  int64_t begin;  // its first row, in the order of segments
};

struct SegmentLongList {
  int64_t most = 0;
  int64_t pieces_most = 0;
  uint32_t *count = nullptr;  // one less than there are pieces
  SegmentLongPiece *pieces = nullptr;
  unsigned long long *longest = nullptr;  // of each segment's columns, a key and, below it, ~row
};

// Of an id, one more than it; 0 of what is below all segments, and one more than the last one's of what is above.
using SegmentTileKey = uint32_t;

// What is known of a part of sorted rows when its block is through.
struct SegmentTileEnds {
  SegmentTileKey starts;  // of the segment that begins in it and goes on in the next part, or 0
  int passed;             // whether all rows are of one segment that began before and goes on
  int gaps;
};

// From one segment on to another.
struct SegmentTileGap {
  SegmentTileKey from;
  SegmentTileKey to;
};

// Sorted rows in parts, each of which has its ends, some gaps that it leaves, and states of the segment that began
// before and of the one that goes on.
struct SegmentTiles {
  int64_t part = 0;  // rows
  int parts = 0;
  SegmentTileEnds *ends = nullptr;
  SegmentTileGap *gaps = nullptr;
  std::byte *states = nullptr;
};

enum class SegmentCells { none, few, shared, buckets, runs };

// What is -1 in a workspace before it is known, in one piece: offsets and bounds of chunks, and how long a list is.
struct SegmentBounds {
  uint4 *data = nullptr;
  int64_t count = 0;

  __device__ void forget(int64_t from, int64_t step) const {
    for (int64_t at = from; at < count; at += step) data[at] = make_uint4(~0u, ~0u, ~0u, ~0u);
  }
};

// Rows of long segments in pieces of equal length, and by how many parts of lanes, 2^part_bits, others are shared.
struct SegmentPieces {
  int rows = 0;
  int part_bits = 0;
  int64_t count = 0;
  uint32_t *owners = nullptr;  // one more than the long segment that a piece begins in, or 0
};

// In how many passes ids are sorted, by digits of so many bits, in tiles of so many rows to a thread.
struct SegmentSort {
  // Which of the keys and values are sorted in the end.
  int last() const { return (passes - 1) % 2; }

  int passes = 0;
  int bits = 0;
  int each = 0;
  int64_t tiles = 0;
};

// What a workspace holds; NULL where the problem has no use for it.
struct SegmentSpace {
  uint32_t *keys[2] = {};
  uint32_t *values[2] = {};
  SegmentSort sort;
  uint32_t *digits = nullptr;  // how often tiles have each, and how often all have
  SegmentNumbers offsets;
  SegmentNumbers first;
  SegmentBounds bounds;
  SegmentChunks chunks;
  SegmentCells cells = SegmentCells::none;
  SegmentFew few;
  SegmentBuckets buckets;
  bool owned = false;  // by those who have a segment each
  SegmentLongList longs;
  SegmentTiles tiles;
  SegmentPieces pieces;
  std::byte *partial = nullptr;
  std::byte *states = nullptr;  // of each segment and column, for a backward
  uint32_t *marks = nullptr;    // of each row, bits of the columns that take the gradient
  SegmentNumbers ids;           // of each row, from offsets
  uint32_t *counts = nullptr;
  std::byte *ends = nullptr;  // of chunks of runs
  uint32_t *taken = nullptr;  // how many of them are taken
};

// Rows so narrow that neighbouring lanes take segments, not columns.
inline bool segment_narrow_rows(const SegmentProblem &problem) { return problem.columns * problem.dtype.bits / 8 < 32; }

// The most elements that are loaded at once, as far as sizes allow it.
inline int segment_vector(const SegmentProblem &problem) {
  const int vector = 16 / (problem.dtype.bits / 8);
  return problem.columns % vector == 0 && !segment_narrow_rows(problem) ? vector : 1;
}

// How many lanes go side by side, `vector` elements each.
inline int segment_across(int64_t columns, int vector) {
  return int(std::bit_ceil(uint64_t(std::min<int64_t>(ceil_div(columns, vector), 32))));
}

// The most elements that a block of segment_any keeps: of two chunks.
constexpr int kSegmentStaged = 4096;

// In which order rows are added follows from the problem alone.
inline SegmentChunks segment_chunks(const SegmentProblem &problem) {
  const int64_t places = problem.rows + problem.segments;
  int32_t chunk = 256;
  if (segment_narrow_rows(problem)) {
    constexpr int64_t kBlocks = kMultiprocessors * 8;
    chunk = int32_t(kSegmentStaged / 2 / std::bit_ceil(uint64_t(problem.columns)));
    while (chunk > 64 && ceil_div(places, chunk) < kBlocks) chunk /= 2;
  } else {
    constexpr int64_t kWarps = kMultiprocessors * 48;
    const int vector = segment_vector(problem);
    const int64_t across = segment_across(problem.columns, vector);
    const int64_t lanes = ceil_div(problem.columns, across * vector) * across;
    while (chunk > 32 && ceil_div(places, chunk) * lanes / 32 < kWarps) chunk /= 2;
  }
  return {chunk, std::max<int64_t>(ceil_div(places, chunk), 1)};
}

// Brings rows together and cuts chunks. Elements of a `payload` of one column are sorted instead of their rows,
// and stand where `order` points.
SegmentGroups segment_groups(const SegmentProblem &problem, const SegmentIndices &ids, const SegmentView *payload,
                             const SegmentSpace &space, Stream stream);
// Where segments of sorted ids begin.
SegmentIndices segment_offsets(const SegmentProblem &problem, const SegmentIndices &ids, const SegmentSpace &space,
                               Stream stream);
// The segment of each row, from offsets.
void segment_expand(const SegmentProblem &problem, const SegmentIndices &offsets, const SegmentSpace &space,
                    Stream stream);
void segment_count(const SegmentProblem &problem, const SegmentIndices &ids, const SegmentSpace &space, Stream stream);
SegmentSort segment_sort_of(const SegmentProblem &problem);
// Stable, by segments.
void segment_sort(const SegmentProblem &problem, const SegmentIndices &ids, const SegmentView *payload,
                  const SegmentSpace &space, Stream stream);

// Takes cells where reductions without sorting are possible, else nothing.
void segment_take_cells(Workspace &workspace, const SegmentProblem &problem, size_t state, SegmentSpace &space);
size_t segment_few_bytes(const SegmentProblem &problem, size_t state, int vector);
size_t segment_bucket_bytes(int cell_bits, size_t cell);
size_t segment_bucket_sum_bytes(const SegmentProblem &problem, int cell_bits, int copy_bits);
void segment_fill_buckets(const SegmentProblem &problem, const SegmentView &input, const SegmentIndices &ids,
                          bool with_rows, const SegmentSpace &space, Stream stream);

// Each instantiates its kernels in a file of its own.
void segment_sums(const SegmentForward &call, const SegmentSpace &space, Stream stream);
void segment_integer_sums(const SegmentForward &call, const SegmentSpace &space, Stream stream);
void segment_products(const SegmentForward &call, const SegmentSpace &space, Stream stream);
void segment_extremes(const SegmentForward &call, const SegmentSpace &space, Stream stream);
void segment_places(const SegmentForward &call, const SegmentSpace &space, Stream stream);
// Sums in the order in which rows come.
void segment_add_atomically(const SegmentForward &call, std::byte *workspace, Stream stream);
size_t segment_atomic_bytes(const SegmentProblem &problem);
// Leave their states in the workspace.
void segment_tallies(const SegmentBackward &call, const SegmentSpace &space, Stream stream);
void segment_factors(const SegmentBackward &call, const SegmentSpace &space, Stream stream);
// Of single columns of d_input in one piece, and ids; an arg of the workspace need not be checked.
void segment_scatter_column(const SegmentBackward &call, const SegmentView &arg, int arg_bytes, bool checked,
                            Stream stream);
// By those who have a whole segment each. False where pointers or strides don't allow it.
bool segment_has_owners(const SegmentProblem &problem);
void segment_take_longs(Workspace &workspace, const SegmentProblem &problem, SegmentLongList &longs);
bool segment_reduce_owned(const SegmentForward &call, const SegmentSpace &space, Stream stream);
bool segment_spread_owned(const SegmentBackward &call, const SegmentSpace &space, Stream stream);
// Of sorted ids, by parts of the rows. False as above.
bool segment_has_tiles(const SegmentProblem &problem);
void segment_take_tiles(Workspace &workspace, const SegmentProblem &problem, SegmentTiles &tiles);
bool segment_reduce_tiles(const SegmentForward &call, const SegmentTiles &tiles, Stream stream);
// Where the space has shared cells, in one go. False where d_input doesn't allow it.
bool segment_spread_shared(const SegmentBackward &call, const SegmentSpace &space, Stream stream);
// From those, or from arg, which may stand in the workspace, to the gradient.
void segment_spread(const SegmentBackward &call, const SegmentSpace &space, Stream stream);

template <class Op>
struct SegmentReduceCall {
  Op op;
  SegmentGroups groups;
  SegmentView input;
  int64_t columns;
  int64_t tiles;
  int across;
  int lane_bits;
  bool staged;
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
};

__device__ __forceinline__ SegmentWork segment_work(const SegmentGroups &groups, int64_t chunk) {
  SegmentWork work;
  const int64_t place = chunk * groups.chunk;
  work.first = groups.first[chunk];
  // Offsets that fall must not make more of a chunk than it has places.
  work.to = min(max(groups.first[chunk + 1], work.first), work.first + groups.chunk);
  work.from = work.first;
  work.begin = work.first < groups.segments ? groups.begin(work.first) : groups.rows;
  if (work.first > 0) {
    const int64_t before = work.first - 1;
    const int64_t begin = groups.begin(before);
    const int64_t end = groups.end(before);
    if (end - begin > groups.chunk && end + before >= place) {
      work.from = before;
      work.begin = max(begin, place - before - 1);
    }
  }
  work.end = work.begin;
  if (work.to > work.from) {
    const int64_t last = work.to - 1;
    const int64_t begin = groups.begin(last);
    work.end = groups.end(last);
    if (work.end - begin > groups.chunk) work.end = min(work.end, place + groups.chunk - last - 1);
    work.end = max(work.begin, min(work.end, work.begin + 2 * groups.chunk));
  }
  return work;
}

// A group of lanes per chunk and tile of columns, each lane with its own columns: rows go by without regard to
// where segments end, through shared memory of which each lane has its own, so that many loads are always in flight.
template <class Op, int kVector>
__global__ __launch_bounds__(kSegmentThreads, sizeof(typename Op::State) * kVector <= 32 ? 3 : 2) void segment_stream(
    const __grid_constant__ SegmentReduceCall<Op> call) {
  using Pack = SegmentPack<typename Op::Element, kVector>;
  static_assert(sizeof(Pack) == 16);
  constexpr int kRows = 4;
  constexpr int kStages = 3;
  __shared__ uint4 ring[kStages][kRows][kSegmentThreads];
  wait_for_earlier_work();
  let_next_kernel_start();
  const int64_t group = (int64_t(blockIdx.x) * kSegmentThreads + threadIdx.x) >> call.lane_bits;
  const int64_t chunk = group / call.tiles;
  const int lane = int(threadIdx.x) & (call.across - 1);
  const int64_t column = ((group - chunk * call.tiles) * call.across + lane) * kVector;
  if (chunk >= call.groups.chunks || column >= call.columns) return;
  const SegmentWork work = segment_work(call.groups, chunk);
  if (work.to == work.from) return;

  const typename Op::Element *input = static_cast<const typename Op::Element *>(call.input.data) + column;
  const uint32_t *order = call.groups.order;
  const int count = int(work.end - work.begin);
  uint32_t rows[kRows];
  const auto find_rows = [&](int at) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (order && at + r < count) rows[r] = order[work.begin + at + r];
  };
  const auto fetch = [&](int at, int stage) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (at + r >= count) break;
      const int64_t row = order ? int64_t(rows[r]) : work.begin + at + r;
      copy_ahead<16>(&ring[stage][r][threadIdx.x], input + row * call.input.row);
    }
    commit_copies();
    find_rows(at + kRows);
  };
  find_rows(0);
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) fetch(s * kRows, s);

  typename Op::State state[kVector];
#pragma unroll
  for (int v = 0; v < kVector; ++v) state[v] = call.op.identity();
  int64_t segment = work.from;
  int64_t begin = call.groups.begin(segment);
  int64_t end = call.groups.end(segment);
  // Where the segment ends, as rows of the chunk are counted.
  int stop = int(min(end - work.begin, int64_t(INT32_MAX)));
  // Where the next segment ends is asked for one segment ahead.
  const auto end_of = [&](int64_t s) { return s < work.to ? call.groups.clamped(s + 1) : INT64_MAX; };
  int64_t next_end = end_of(segment + 1);
  const auto step = [&] {
    segment_finish(call, chunk, work.first, segment, column, end - begin, state);
#pragma unroll
    for (int v = 0; v < kVector; ++v) state[v] = call.op.identity();
    begin = end;
    end = max(begin, next_end);
    stop = int(min(end - work.begin, int64_t(INT32_MAX)));
    ++segment;
    next_end = end_of(segment + 1);
  };

  int stage = 0;
  for (int at = 0; at < count; at += kRows) {
    fetch(at + (kStages - 1) * kRows, stage == 0 ? kStages - 1 : stage - 1);
    wait_for_copies<kStages - 1>();
    Pack pack[kRows];
    typename Op::Row numbers[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (at + r >= count) break;
      numbers[r] = typename Op::Row(order ? int64_t(order[work.begin + at + r]) : work.begin + at + r);
      pack[r] = bit_cast<Pack>(ring[stage][r][threadIdx.x]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (at + r >= count) break;
      while (at + r >= stop) step();
#pragma unroll
      for (int v = 0; v < kVector; ++v) call.op.add(state[v], pack[r].value[v], numbers[r]);
    }
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  while (segment < work.to) step();
}

template <class State>
__device__ __forceinline__ State segment_shuffle(const State &state, int from_lane_xor) {
  static_assert(sizeof(State) % 4 == 0);
  using Words = SegmentPack<uint32_t, 1>;
  constexpr int kWords = sizeof(State) / 4;
  struct All {
    Words word[kWords];
  };
  All all = bit_cast<All>(state);
#pragma unroll
  for (int w = 0; w < kWords; ++w) all.word[w].value[0] = __shfl_xor_sync(~0u, all.word[w].value[0], from_lane_xor);
  return bit_cast<State>(all);
}

// Any strides and any number of columns: a block per chunk and tile of columns, a thread for each segment and column.
// Narrow rows are brought into shared memory first, and a warp takes what is long for a thread.
template <class Op>
__global__ __launch_bounds__(kSegmentThreads) void segment_any(const __grid_constant__ SegmentReduceCall<Op> call) {
  using Element = typename Op::Element;
  using State = typename Op::State;
  constexpr int kAtOnce = 4;
  constexpr int kShort = 64;
  constexpr int kMostLong = 2 * kSegmentStaged / kShort;
  extern __shared__ __align__(16) uint64_t segment_memory[];
  __shared__ int found;
  __shared__ int32_t longs[kMostLong];
  wait_for_earlier_work();
  let_next_kernel_start();
  const int64_t chunk = int64_t(blockIdx.x) / call.tiles;
  const int first_column = int(int64_t(blockIdx.x) - chunk * call.tiles) * call.across;
  const int columns = int(min(call.columns - first_column, int64_t(call.across)));
  const SegmentWork work = segment_work(call.groups, chunk);
  if (work.to == work.from) return;
  const uint32_t *order = call.groups.order;
  const auto row_of = [&](int64_t at) { return order ? int64_t(order[at]) : at; };
  const Element *input = static_cast<const Element *>(call.input.data) + first_column * call.input.column;
  Element *staged = reinterpret_cast<Element *>(segment_memory);
  const int items = int(work.to - work.from) * columns;
  int item = threadIdx.x;
  int64_t from = 0;
  int64_t to = 0;
  const auto find = [&] {
    const int64_t segment = work.from + (columns == 1 ? item : item / columns);
    from = call.groups.begin(segment);
    to = call.groups.end(segment);
  };
  if (item < items) find();
  if (call.staged) {
    if (threadIdx.x == 0) found = 0;
    const int count = int(work.end - work.begin) * columns;
    constexpr int kLoads = 8;
    for (int first = threadIdx.x; first < count; first += kLoads * kSegmentThreads) {
      Element element[kLoads];
#pragma unroll
      for (int l = 0; l < kLoads; ++l) {
        const int i = first + l * kSegmentThreads;
        if (i >= count) break;
        const int at = columns == 1 ? i : i / columns;
        element[l] = input[row_of(work.begin + at) * call.input.row + (i - at * columns) * call.input.column];
      }
#pragma unroll
      for (int l = 0; l < kLoads; ++l)
        if (first + l * kSegmentThreads < count) staged[first + l * kSegmentThreads] = element[l];
    }
    __syncthreads();
  }
  const auto add = [&](State &state, int64_t at, int64_t stop, int apart, int column) {
    for (; at < stop; at += kAtOnce * apart) {
      Element element[kAtOnce];
      typename Op::Row numbers[kAtOnce];
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        const int64_t place = at + r * apart;
        if (place >= stop) break;
        const int64_t row = row_of(place);
        numbers[r] = typename Op::Row(row);
        element[r] = call.staged ? staged[int(place - work.begin) * columns + column]
                                 : input[row * call.input.row + column * call.input.column];
      }
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r)
        if (at + r * apart < stop) call.op.add(state, element[r], numbers[r]);
    }
  };

  while (item < items) {
    const int index = columns == 1 ? item : item / columns;
    const int column = item - index * columns;
    const int64_t begin = max(from, work.begin);
    const int64_t stop = min(to, work.end);
    if (call.staged && stop - begin > kShort) {
      const int place = atomicAdd(&found, 1);
      // There are no more unless a promise is broken.
      if (place < kMostLong) longs[place] = item;
    } else {
      State state[1] = {call.op.identity()};
      add(state[0], begin, stop, 1, column);
      segment_finish(call, chunk, work.first, work.from + index, first_column + column, to - from, state);
    }
    item += kSegmentThreads;
    if (item < items) find();
  }
  if (!call.staged) return;
  __syncthreads();
  const int lane = int(threadIdx.x) & 31;
  for (int l = int(threadIdx.x) / 32; l < min(found, kMostLong); l += kSegmentThreads / 32) {
    const int index = longs[l] / columns;
    const int column = longs[l] - index * columns;
    const int64_t segment = work.from + index;
    from = call.groups.begin(segment);
    to = call.groups.end(segment);
    State state[1] = {call.op.identity()};
    add(state[0], max(from, work.begin) + lane, min(to, work.end), 32, column);
    for (int apart = 16; apart > 0; apart /= 2) call.op.join(state[0], segment_shuffle(state[0], apart));
    if (lane == 0) segment_finish(call, chunk, work.first, segment, column, to - from, state);
  }
}

constexpr int kJoinChunks = 32;

// Puts the pieces of long segments together. A block looks after the long segments that end in its chunks: as many
// threads side by side as there are columns have one of few pieces, and all share the pieces of another.
template <class Op>
__global__ __launch_bounds__(kSegmentThreads) void segment_join(const __grid_constant__ SegmentReduceCall<Op> call) {
  using State = typename Op::State;
  constexpr int kAtOnce = 4;
  constexpr int64_t kFewPieces = 16;
  __shared__ int found;
  __shared__ int64_t ends[kJoinChunks];
  __shared__ State states[kSegmentThreads];
  wait_for_earlier_work();
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
  int across = 1;
  while (across < kSegmentThreads && across < call.columns) across *= 2;
  const int apart = kSegmentThreads / across;
  const int part = int(threadIdx.x) / across;
  const int lane = int(threadIdx.x) & (across - 1);
  for (const bool few : {true, false}) {
    for (int index = few ? part : 0; index < found; index += few ? apart : 1) {
      const int64_t segment = ends[index];
      const int64_t begin = groups.begin(segment);
      const int64_t end = groups.end(segment);
      const int64_t from = (begin + segment) / groups.chunk;
      // Chunks that a broken promise left out have no piece that anybody wrote.
      const int64_t pieces = min((end + segment) / groups.chunk, groups.chunks - 1) - from + 1;
      if ((pieces <= kFewPieces) != few) continue;
      const int64_t each = few ? pieces : (pieces + apart - 1) / apart;
      const int64_t first = few ? 0 : part * each;
      const int64_t stop = min(pieces, first + each);
      for (int64_t tile = 0; tile < call.columns; tile += across) {
        const int64_t column = tile + lane;
        State state[1] = {call.op.identity()};
        for (int64_t piece = first; column < call.columns && piece < stop; piece += kAtOnce) {
          State some[kAtOnce];
#pragma unroll
          for (int p = 0; p < kAtOnce; ++p)
            if (piece + p < stop)
              some[p] = call.partial[(2 * (from + piece + p) + (piece + p == 0)) * call.columns + column];
#pragma unroll
          for (int p = 0; p < kAtOnce; ++p)
            if (piece + p < stop) call.op.join(state[0], some[p]);
        }
        if (!few) {
          states[threadIdx.x] = state[0];
          for (int half = apart / 2; half > 0; half /= 2) {
            __syncthreads();
            if (part < half) call.op.join(states[threadIdx.x], states[threadIdx.x + half * across]);
          }
          state[0] = states[threadIdx.x];
          __syncthreads();
        }
        if ((few || part == 0) && column < call.columns) call.op.template store<1>(segment, column, end - begin, state);
      }
    }
  }
}

// Whether rows of the matrix can be read, or written, `vector` elements of `bytes` bytes at a time.
inline bool segment_aligned(const SegmentView &view, int vector, int bytes) {
  const int at_once = std::min(vector * bytes, 16);
  return view.column == 1 && view.row * bytes % at_once == 0 &&
         reinterpret_cast<uintptr_t>(view.data) % uintptr_t(at_once) == 0;
}

template <class Op, int kVector>
void segment_reduce_rows(const SegmentProblem &problem, const SegmentView &input, const SegmentIndices &ids,
                         const Op &op, bool aligned, const SegmentSpace &space, Stream stream);

// Reduces every segment and hands it to op.store. `kVector`: elements that are read at once, where sizes
// allow it and `aligned` says that what op.store writes does, too.
template <class Op, int kVector>
void segment_reduce(const SegmentProblem &problem, const SegmentView &input, const SegmentIndices &ids, const Op &op,
                    bool aligned, bool needs_rows, const SegmentSpace &space, Stream stream) {
  constexpr int kBytes = sizeof(typename Op::Element);
  const SegmentChunks &chunks = space.chunks;
  if constexpr (kVector > 1) {
    if (space.pieces.count > 0 && segment_vector(problem) == kVector)
      return segment_reduce_rows<Op, kVector>(problem, input, ids, op, aligned, space, stream);
  }
  // Single elements travel with the sort.
  const bool travels = problem.ids == SegmentIds::unsorted && problem.columns == 1 && kBytes <= 4 && !needs_rows;
  SegmentReduceCall<Op> call = {};
  call.op = op;
  call.groups = segment_groups(problem, ids, travels ? &input : nullptr, space, stream);
  call.input = input;
  if (travels) {
    call.input = {const_cast<uint32_t *>(call.groups.order), 4 / kBytes, 1};
    call.groups.order = nullptr;
  }
  call.columns = problem.columns;
  call.partial = reinterpret_cast<typename Op::State *>(space.partial);
  bool vectors = false;
  if constexpr (kVector > 1) {
    vectors = segment_vector(problem) == kVector && aligned && segment_aligned(input, kVector, kBytes);
    if (vectors) {
      call.across = segment_across(problem.columns, kVector);
      call.lane_bits = std::countr_zero(unsigned(call.across));
      call.tiles = ceil_div(problem.columns, int64_t(call.across) * kVector);
      const Grid grid = {ceil_div(chunks.count * call.tiles * call.across, kSegmentThreads), kSegmentThreads, 0, true};
      launch(segment_stream<Op, kVector>, grid, stream, call);
    }
  }
  if (!vectors) {
    constexpr int64_t kMostAcross = 64;
    call.across = int(std::min(problem.columns, kMostAcross));
    call.tiles = ceil_div(problem.columns, call.across);
    call.staged = segment_narrow_rows(problem);
    const size_t shared = call.staged ? 2 * size_t(chunks.chunk) * size_t(call.across) * kBytes : 0;
    launch(segment_any<Op>, {chunks.count * call.tiles, kSegmentThreads, shared, true}, stream, call);
  }
  if (problem.rows > chunks.chunk)
    launch(segment_join<Op>, {ceil_div(chunks.count, kJoinChunks), kSegmentThreads, 0, true}, stream, call);
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
  using Place = uint16_t;
  static constexpr bool kRows = false;
  SegmentView output;
  bool mean;
  T empty;

  // How many rows there were, where only 0 makes a difference.
  __device__ int64_t seen(const State &) const { return 1; }
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
  using Place = uint16_t;
  static constexpr bool kRows = false;
  SegmentView output;
  Bits empty;

  // No float has the identity's key.
  __device__ int64_t seen(const State &state) const { return state != 0; }
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
  using Place = uint32_t;
  static constexpr bool kRows = true;
  SegmentView output;  // without data: only the row is wanted
  SegmentView arg;
  bool wide;
  uint32_t none;
  Bits empty;

  __device__ int64_t seen(const State &state) const { return state.row != this->kNone; }
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

#include "segment/segment_rows.cuh"
