// SPDX-License-Identifier: Apache-2.0
// Single columns whose rows are where they are: sorted ids, whose runs a warp follows through its chunk of rows, and
// offsets, of which each lane of a warp has a segment.
#pragma once

#include "segment/segment.cuh"

namespace baracuda {

constexpr int kRunThreads = 256;
constexpr int kRunWarps = kRunThreads / 32;
constexpr int kRunStep = 128;  // rows that a warp takes at once
constexpr int kRunSteps = 4;   // how many of these are under way
constexpr uint32_t kRunDropped = ~uint32_t(0);
constexpr uint32_t kRunNone = ~uint32_t(0) - 1;

// How a chunk ends: the segment that began in it and goes on, and whether it is all of one that does both.
struct SegmentRunEnd {
  uint32_t segment;
  uint32_t passes;
};

// Of offsets: for each chunk, one more than the long segments that are in it, of which one began no later than the
// chunk and one later; and for the chunk in which one begins, how many of its pieces are there.
struct SegmentLongs {
  uint32_t *segments;
  uint32_t *pieces;
};

template <class Op>
struct SegmentRunCall {
  Op op;
  SegmentView input;
  SegmentIndices ids;
  int64_t rows;
  int64_t segments;
  int64_t chunks;
  int32_t chunk;
  bool paired;                  // four rows can be loaded at once
  typename Op::State *partial;  // of a chunk, what belongs to a segment of the chunk before, and to one of that after
  uint32_t *lengths;
  SegmentRunEnd *ends;
  SegmentLongs longs;
};

template <class State, class Move>
__device__ __forceinline__ State segment_move(const State &state, const Move &move) {
  constexpr int kWords = sizeof(State) / 4;
  struct All {
    uint32_t word[kWords];
  };
  All all = bit_cast<All>(state);
#pragma unroll
  for (int w = 0; w < kWords; ++w) all.word[w] = move(all.word[w]);
  return bit_cast<State>(all);
}

// What all lanes of a warp have, in one state.
template <class Op>
__device__ __forceinline__ void join_lanes(const Op &op, typename Op::State &state) {
  for (int apart = 16; apart > 0; apart /= 2)
    op.join(state, segment_move(state, [&](uint32_t word) { return __shfl_xor_sync(~0u, word, apart); }));
}

// Four elements at once.
template <class Element>
__device__ __forceinline__ SegmentPack<Element, 4> load_four(const Element *from) {
  using Elements = SegmentPack<Element, 4>;
  constexpr int kBytes = sizeof(Elements);
  using Word = SegmentPack<typename SegmentBitsOf<kBytes == 16 ? 8 : kBytes>::type, kBytes == 16 ? 2 : 1>;
  // In a variable of its own: a reference to memory would be copied byte by byte.
  const Word word = *reinterpret_cast<const Word *>(from);
  return bit_cast<Elements>(word);
}

// What another block of this launch wrote.
template <class State>
__device__ __forceinline__ State load_fresh(const State *from) {
  constexpr int kWords = sizeof(State) / 4;
  struct All {
    uint32_t word[kWords];
  } all;
#pragma unroll
  for (int w = 0; w < kWords; ++w) all.word[w] = __ldcg(reinterpret_cast<const uint32_t *>(from) + w);
  return bit_cast<State>(all);
}

template <class Op>
__global__ __launch_bounds__(kRunThreads) void fill_empty(const __grid_constant__ SegmentRunCall<Op> call) {
  const int64_t segment = int64_t(blockIdx.x) * kRunThreads + threadIdx.x;
  const typename Op::State none[1] = {call.op.identity()};
  if (segment < call.segments) call.op.template store<1>(segment, 0, 0, none);
}

template <class Op, class Id>
__global__ __launch_bounds__(kRunThreads, 4) void reduce_runs(const __grid_constant__ SegmentRunCall<Op> call) {
  using Element = typename Op::Element;
  using State = typename Op::State;
  const int lane = int(threadIdx.x) & 31;
  const uint32_t below = (1u << lane) - 1;
  const int64_t chunk = int64_t(blockIdx.x) * kRunWarps + int(threadIdx.x) / 32;
  if (chunk >= call.chunks) return;
  const int64_t begin = chunk * call.chunk;
  const int64_t end = min(begin + call.chunk, call.rows);
  const Id *ids = static_cast<const Id *>(call.ids.data);
  const Element *input = static_cast<const Element *>(call.input.data);
  const auto segment_of = [&](Id id) {
    return uint64_t(int64_t(id)) < uint64_t(call.segments) ? uint32_t(id) : kRunDropped;
  };
  const auto segment_at = [&](int64_t row) { return segment_of(ids[row * call.ids.stride]); };

  State carry = call.op.identity();
  uint32_t carried = 0;
  uint32_t last = begin > 0 ? segment_at(begin - 1) : kRunNone;
  bool opened = false;  // whether a segment has begun in the chunk
  const auto finish = [&](uint32_t segment, const State &state, uint32_t length, bool open) {
    if (open) {
      call.partial[2 * chunk] = state;
      call.lengths[2 * chunk] = length;
    } else if (segment < kRunNone) {
      const State whole[1] = {state};
      call.op.template store<1>(segment, 0, length, whole);
    }
  };
  for (int64_t at = begin; at < end; at += kRunSteps * kRunStep) {
    uint32_t segments[kRunSteps][4];
    Element element[kRunSteps][4];
    if (call.paired && at + kRunSteps * kRunStep <= end) {
      using Ids = SegmentPack<Id, 16 / sizeof(Id)>;
      Ids given[kRunSteps][4 * sizeof(Id) / 16];
#pragma unroll
      for (int s = 0; s < kRunSteps; ++s) {
        const int64_t row = at + s * kRunStep + lane * 4;
#pragma unroll
        for (int i = 0; i < int(4 * sizeof(Id) / 16); ++i) given[s][i] = reinterpret_cast<const Ids *>(ids + row)[i];
        const SegmentPack<Element, 4> some = load_four(input + row);
#pragma unroll
        for (int k = 0; k < 4; ++k) element[s][k] = some.value[k];
      }
#pragma unroll
      for (int s = 0; s < kRunSteps; ++s) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          constexpr int kEach = 16 / sizeof(Id);
          segments[s][k] = segment_of(given[s][k / kEach].value[k % kEach]);
        }
      }
    } else {
#pragma unroll
      for (int s = 0; s < kRunSteps; ++s) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int64_t row = at + s * kRunStep + lane * 4 + k;
          const bool there = row < end;
          segments[s][k] = there ? segment_at(row) : kRunNone;
          element[s][k] = input[min(row, end - 1) * call.input.row];
        }
      }
    }
#pragma unroll
    for (int s = 0; s < kRunSteps; ++s) {
      const int64_t row = at + s * kRunStep + lane * 4;
      const uint32_t (&segment)[4] = segments[s];
      State own[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        own[k] = call.op.identity();
        call.op.add(own[k], element[s][k], typename Op::Row(row + k));
      }
      uint32_t before = __shfl_up_sync(~0u, segment[3], 1);
      if (lane == 0) before = last;
      const bool head[4] = {segment[0] != before, segment[1] != segment[0], segment[2] != segment[1],
                            segment[3] != segment[2]};
      // What a lane leaves open.
      State tail = own[0];
      uint32_t length = 1;
#pragma unroll
      for (int k = 1; k < 4; ++k) {
        if (head[k]) {
          tail = own[k];
          length = 1;
        } else {
          call.op.join(tail, own[k]);
          ++length;
        }
      }
      const uint32_t heads = __ballot_sync(~0u, head[0] || head[1] || head[2] || head[3]);
      const uint32_t up_to = heads & (below | 1u << lane);
      const int start = up_to ? 31 - __clz(int(up_to)) : 0;
#pragma unroll
      for (int apart = 1; apart < 32; apart *= 2) {
        State other = segment_move(tail, [&](uint32_t word) { return __shfl_up_sync(~0u, word, apart); });
        const uint32_t more = __shfl_up_sync(~0u, length, apart);
        if (lane - apart >= start) {
          call.op.join(other, tail);
          tail = other;
          length += more;
        }
      }
      State run = segment_move(tail, [&](uint32_t word) { return __shfl_up_sync(~0u, word, 1); });
      uint32_t count = __shfl_up_sync(~0u, length, 1);
      const bool first = (heads & below) == 0;
      if (lane == 0) {
        run = carry;
        count = carried;
      } else if (first) {
        State whole = carry;
        call.op.join(whole, run);
        run = whole;
        count += carried;
      }
      bool open = first && !opened;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (head[k]) {
          // A chunk that nothing goes on in says so, too: join_runs reads ahead.
          if (count > 0 || open) finish(k == 0 ? before : segment[k - 1], run, count, open);
          open = false;
          run = own[k];
          count = 1;
        } else {
          call.op.join(run, own[k]);
          ++count;
        }
      }
      carry = segment_move(run, [&](uint32_t word) { return __shfl_sync(~0u, word, 31); });
      carried = __shfl_sync(~0u, count, 31);
      last = __shfl_sync(~0u, segment[3], 31);
      opened |= heads != 0;
    }
  }
  if (lane != 0) return;
  const bool goes_on = last != kRunNone && end < call.rows && segment_at(end) == last;
  SegmentRunEnd how = {kRunNone, 0};
  if (!opened) {
    how.passes = goes_on;
    finish(last, carry, carried, true);
  } else if (goes_on) {
    how.segment = last;
    call.partial[2 * chunk + 1] = carry;
    call.lengths[2 * chunk + 1] = carried;
  } else {
    finish(last, carry, carried, false);
  }
  call.ends[chunk] = how;
}

// Puts the pieces of segments together that go beyond a chunk: a warp for each chunk in which one begins.
template <class Op>
__global__ __launch_bounds__(kRunThreads) void join_runs(const __grid_constant__ SegmentRunCall<Op> call) {
  using State = typename Op::State;
  constexpr int kAtOnce = 8;
  const int lane = int(threadIdx.x) & 31;
  const int64_t chunk = int64_t(blockIdx.x) * kRunWarps + int(threadIdx.x) / 32;
  if (chunk >= call.chunks) return;
  const uint32_t segment = call.ends[chunk].segment;
  if (segment >= kRunNone) return;
  State state = call.op.identity();
  int64_t length = 0;
  bool more = true;
  for (int64_t from = chunk + 1; more; from += 32 * kAtOnce) {
    State some[kAtOnce];
    uint32_t lengths[kAtOnce];
    bool passes[kAtOnce];
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a) {
      const int64_t at = from + a * 32 + lane;
      passes[a] = false;
      if (at >= call.chunks) continue;
      passes[a] = call.ends[at].passes != 0;
      some[a] = call.partial[2 * at];
      lengths[a] = call.lengths[2 * at];
    }
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a) {
      const uint32_t ending = __ballot_sync(~0u, !passes[a]);
      const int last = ending ? __ffs(int(ending)) - 1 : 31;
      if (more && lane <= last && from + a * 32 + lane < call.chunks) {
        call.op.join(state, some[a]);
        length += lengths[a];
      }
      more = more && ending == 0;
    }
  }
  join_lanes(call.op, state);
  for (int apart = 16; apart > 0; apart /= 2) length += __shfl_xor_sync(~0u, length, apart);
  State whole[1] = {call.partial[2 * chunk + 1]};
  call.op.join(whole[0], state);
  if (lane == 0) call.op.template store<1>(segment, 0, length + call.lengths[2 * chunk + 1], whole);
}

// ---------------------------------------------------------------------------------------------------

// A lane takes segments of up to so many rows, a warp longer ones, and several warps those longer than a chunk.
constexpr int kRangeShort = 128;
constexpr int kRangeChunk = 2048;
constexpr int kRangeStaged = 1024;

template <class Op>
__global__ __launch_bounds__(kRunThreads) void forget_longs(const __grid_constant__ SegmentRunCall<Op> call) {
  const int64_t chunk = int64_t(blockIdx.x) * kRunThreads + threadIdx.x;
  if (chunk >= call.chunks) return;
  call.longs.segments[2 * chunk] = call.longs.segments[2 * chunk + 1] = 0;
  call.longs.pieces[chunk] = 0;
}

// Rows from .. to - 1 by all lanes of a warp.
template <class Op>
__device__ __forceinline__ typename Op::State reduce_range(const SegmentRunCall<Op> &call, int64_t from, int64_t to) {
  using Element = typename Op::Element;
  constexpr int kAtOnce = 8;
  const Element *input = static_cast<const Element *>(call.input.data);
  typename Op::State state = call.op.identity();
  for (int64_t at = from + (int(threadIdx.x) & 31); at < to; at += 32 * kAtOnce) {
    Element element[kAtOnce];
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a)
      if (at + a * 32 < to) element[a] = input[(at + a * 32) * call.input.row];
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a)
      if (at + a * 32 < to) call.op.add(state, element[a], typename Op::Row(at + a * 32));
  }
  join_lanes(call.op, state);
  return state;
}

template <class Op>
__device__ __forceinline__ int64_t range_bound(const SegmentRunCall<Op> &call, int64_t at) {
  return max(int64_t(0), min(call.ids[min(at, call.segments)], call.rows));
}

template <class Op>
__global__ __launch_bounds__(kRunThreads) void reduce_ranges(const __grid_constant__ SegmentRunCall<Op> call) {
  using Element = typename Op::Element;
  using State = typename Op::State;
  constexpr int kLoads = kRangeStaged / 128;
  using Elements = SegmentPack<Element, 4>;
  __shared__ Elements staged[kRunWarps][kRangeStaged / 4];
  const int lane = int(threadIdx.x) & 31;
  const int64_t segment = int64_t(blockIdx.x) * kRunThreads + threadIdx.x;
  const Element *input = static_cast<const Element *>(call.input.data);
  Elements *kept = staged[int(threadIdx.x) / 32];
  int64_t begin = range_bound(call, segment);
  int64_t end = __shfl_down_sync(~0u, begin, 1);
  if (lane == 31) end = range_bound(call, segment + 1);
  // Offsets that fall must not make more of a warp's work than there are rows.
  const bool falls = __any_sync(~0u, end < begin);
  if (segment >= call.segments || falls) end = begin;
  const int64_t length = end - begin;
  State state = call.op.identity();
  uint32_t longs = __ballot_sync(~0u, length > kRangeShort);
  if (length > kRangeShort) begin = end;
  while (longs) {
    const int owner = __ffs(int(longs)) - 1;
    longs &= longs - 1;
    const int64_t to = __shfl_sync(~0u, end, owner);
    const int64_t from = to - __shfl_sync(~0u, length, owner);
    if (to - from > kRangeChunk) {
      for (int64_t chunk = from / kRangeChunk + lane; chunk * kRangeChunk < to; chunk += 32)
        call.longs.segments[2 * chunk + (chunk * kRangeChunk < from)] = uint32_t(segment - lane + owner) + 1;
    } else {
      const State some = reduce_range(call, from, to);
      if (lane == owner) state = some;
    }
  }
  while (true) {
    int64_t first = begin < end ? begin : INT64_MAX;
    int64_t last = begin < end ? end : 0;
    for (int apart = 16; apart > 0; apart /= 2) {
      first = min(first, __shfl_xor_sync(~0u, first, apart));
      last = max(last, __shfl_xor_sync(~0u, last, apart));
    }
    if (first >= last) break;
    first &= ~int64_t(3);
    const int count = int(min(last - first, int64_t(kRangeStaged)));
    Elements some[kLoads];
    if (call.paired && first + kRangeStaged <= call.rows) {
#pragma unroll
      for (int l = 0; l < kLoads; ++l)
        if (l * 128 + lane * 4 < count) some[l] = load_four(input + first + l * 128 + lane * 4);
    } else {
#pragma unroll
      for (int l = 0; l < kLoads; ++l) {
#pragma unroll
        for (int k = 0; k < 4; ++k)
          some[l].value[k] = input[min(first + l * 128 + lane * 4 + k, call.rows - 1) * call.input.row];
      }
    }
    __syncwarp();
#pragma unroll
    for (int l = 0; l < kLoads; ++l)
      if (l * 128 + lane * 4 < count) kept[l * 32 + lane] = some[l];
    __syncwarp();
    const Element *at = reinterpret_cast<const Element *>(kept);
    const int to = begin < end ? int(min(end - first, int64_t(kRangeStaged))) : 0;
    const int from = begin < end ? int(min(begin - first, int64_t(kRangeStaged))) : 0;
    for (int i = from; i < to; ++i) call.op.add(state, at[i], typename Op::Row(first + i));
    if (from < to) begin = first + to;
  }
  const State whole[1] = {state};
  if (segment < call.segments && length <= kRangeChunk) call.op.template store<1>(segment, 0, length, whole);
}

// A warp for each chunk that long segments are in; the last of a segment puts its pieces together.
template <class Op>
__global__ __launch_bounds__(kRunThreads) void reduce_longs(const __grid_constant__ SegmentRunCall<Op> call) {
  using State = typename Op::State;
  constexpr int kAtOnce = 8;
  const int lane = int(threadIdx.x) & 31;
  const int64_t chunk = int64_t(blockIdx.x) * kRunWarps + int(threadIdx.x) / 32;
  if (chunk >= call.chunks) return;
  for (int slot = 0; slot < 2; ++slot) {
    const int64_t segment = int64_t(call.longs.segments[2 * chunk + slot]) - 1;
    if (segment < 0) continue;
    const int64_t begin = range_bound(call, segment);
    const int64_t end = range_bound(call, segment + 1);
    const State piece = reduce_range(call, max(begin, chunk * kRangeChunk), min(end, (chunk + 1) * kRangeChunk));
    if (lane == 0) call.partial[2 * chunk + slot] = piece;
    __threadfence();
    const int64_t from = begin / kRangeChunk;
    const int64_t pieces = (end - 1) / kRangeChunk - from + 1;
    uint32_t before = 0;
    if (lane == 0) before = atomicAdd(call.longs.pieces + from, 1u);
    before = __shfl_sync(~0u, before, 0);
    if (before + 1 != uint32_t(pieces)) continue;
    __threadfence();
    State whole[1] = {call.op.identity()};
    for (int64_t p = lane; p < pieces; p += 32 * kAtOnce) {
      State some[kAtOnce];
#pragma unroll
      for (int a = 0; a < kAtOnce; ++a) {
        const int64_t at = p + a * 32;
        if (at < pieces) some[a] = load_fresh(call.partial + 2 * (from + at) + ((from + at) * kRangeChunk < begin));
      }
#pragma unroll
      for (int a = 0; a < kAtOnce; ++a)
        if (p + a * 32 < pieces) call.op.join(whole[0], some[a]);
    }
    join_lanes(call.op, whole[0]);
    if (lane == 0) call.op.template store<1>(segment, 0, end - begin, whole);
  }
}

// As segment_reduce, where the space has runs.
template <class Op>
void segment_reduce_runs(const SegmentProblem &problem, const SegmentView &input, const SegmentIndices &ids,
                         const Op &op, const SegmentSpace &space, Stream stream) {
  SegmentRunCall<Op> call = {};
  call.op = op;
  call.input = input;
  call.ids = ids;
  call.rows = problem.rows;
  call.segments = problem.segments;
  call.chunks = space.chunks.count;
  call.chunk = space.chunks.chunk;
  call.paired = input.row == 1 && segment_aligned({input.data, 4, 1}, 4, sizeof(typename Op::Element));
  call.partial = reinterpret_cast<typename Op::State *>(space.partial);
  call.lengths = space.counts;
  call.ends = reinterpret_cast<SegmentRunEnd *>(space.ends);
  if (problem.ids == SegmentIds::offsets) {
    call.longs = {reinterpret_cast<uint32_t *>(space.ends), space.counts};
    const Grid grid = {ceil_div(problem.segments, kRunThreads), kRunThreads};
    const Grid chunks = {ceil_div(call.chunks, kRunWarps), kRunThreads};
    launch(forget_longs<Op>, {ceil_div(call.chunks, kRunThreads), kRunThreads}, stream, call);
    launch(reduce_ranges<Op>, grid, stream, call);
    launch(reduce_longs<Op>, chunks, stream, call);
    return;
  }
  const int bytes = ids.wide ? 8 : 4;
  call.paired = call.paired && ids.stride == 1 && segment_aligned({const_cast<void *>(ids.data), 4, 1}, 4, bytes);
  launch(fill_empty<Op>, {ceil_div(problem.segments, kRunThreads), kRunThreads}, stream, call);
  const Grid grid = {ceil_div(call.chunks, kRunWarps), kRunThreads};
  launch(ids.wide ? reduce_runs<Op, int64_t> : reduce_runs<Op, int32_t>, grid, stream, call);
  launch(join_runs<Op>, grid, stream, call);
}

}  // namespace baracuda
