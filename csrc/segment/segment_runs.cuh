// SPDX-License-Identifier: Apache-2.0
// Single columns whose rows are where they are: sorted ids, whose runs a warp follows through its chunk of rows, and
// offsets, of which each lane of a warp has a segment.
#pragma once

#include "segment/segment.cuh"

namespace baracuda {

constexpr int kRunThreads = 256;
constexpr int kRunWarps = kRunThreads / 32;
constexpr int kRunEach = 16;             // rows of a lane, one behind the other
constexpr int kRunStep = 32 * kRunEach;  // rows that a warp takes at once
constexpr int kRunStages = 2;            // how many of these are in shared memory, or on their way
constexpr int kRunBlocks = 2;            // of a multiprocessor at once
constexpr int kRunMostSteps = 4;         // of a chunk of sorted ids
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
  bool whole;                   // 16 bytes can be loaded at once
  typename Op::State *partial;  // of a chunk, what belongs to a segment of the chunk before, and to one of that after
  uint32_t *lengths;
  SegmentRunEnd *ends;
  uint32_t *taken;  // chunks of sorted ids that are taken besides each warp's first
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
  using Word = SegmentPack<Unsigned<kBytes == 16 ? 8 : kBytes>, kBytes == 16 ? 2 : 1>;
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
  let_next_kernel_start();
  const typename Op::State none[1] = {call.op.identity()};
  if (blockIdx.x == 0 && threadIdx.x == 0) *call.taken = 0;
  for (int64_t segment = int64_t(blockIdx.x) * kRunThreads + threadIdx.x; segment < call.segments;
       segment += int64_t(gridDim.x) * kRunThreads)
    call.op.template store<1>(segment, 0, 0, none);
}

// Where the `part`th 16 bytes of a lane are, which has kParts of them: so that neither lanes that write neighbouring
// parts nor lanes that read each its own meet in a bank.
template <int kParts>
__device__ __forceinline__ int run_place(int lane, int part) {
  constexpr int kLanes = 8 / kParts;  // in 128 bytes
  const int line = lane / kLanes;
  return line * 8 + (((lane % kLanes) * kParts + part) ^ (line % kParts));
}

// What a lane has of a step, in shared memory.
template <class T>
struct SegmentRunPart {
  static constexpr int kBytes = kRunEach * int(sizeof(T));
  static constexpr int kParts = kBytes / 16;
  static constexpr int kInPart = 16 / int(sizeof(T));
  using Part = SegmentPack<T, kInPart>;

  // All rows of a step, by all lanes.
  __device__ static void copy(const T *from, std::byte *to) {
    const int lane = int(threadIdx.x) & 31;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      const int at = p * 32 + lane;
      copy_ahead<16>(to + 16 * run_place<kParts>(at / kParts, at % kParts), from + at * kInPart);
    }
  }
  // One row of a step.
  __device__ static T &at(std::byte *memory, int row) {
    const int lane = row / kRunEach;
    const int within = row % kRunEach;
    return reinterpret_cast<Part *>(memory)[run_place<kParts>(lane, within / kInPart)].value[within % kInPart];
  }
  // Of the lane's own rows.
  __device__ static Part load(const std::byte *memory, int part) {
    using Word = SegmentPack<uint64_t, 2>;
    const Word word = reinterpret_cast<const Word *>(memory)[run_place<kParts>(int(threadIdx.x) & 31, part)];
    return bit_cast<Part>(word);
  }
};

template <class Op, class Id>
constexpr size_t kRunBytes = size_t(kRunStages) * kRunStep * (sizeof(Id) + sizeof(typename Op::Element));

// A warp takes chunk after chunk, whose first step is on its way before the chunk before is done.
template <class Op, class Id>
__global__ __launch_bounds__(kRunThreads,
                             kRunBlocks) void reduce_runs(const __grid_constant__ SegmentRunCall<Op> call) {
  using Element = typename Op::Element;
  using State = typename Op::State;
  using Ids = SegmentRunPart<Id>;
  using Elements = SegmentRunPart<Element>;
  static_assert(kRunStages == 2);
  extern __shared__ __align__(128) std::byte run_memory[];
  const int lane = int(threadIdx.x) & 31;
  const uint32_t below = (1u << lane) - 1;
  const Id *ids = static_cast<const Id *>(call.ids.data);
  const Element *input = static_cast<const Element *>(call.input.data);
  const auto segment_of = [&](Id id) {
    return uint64_t(int64_t(id)) < uint64_t(call.segments) ? uint32_t(id) : kRunDropped;
  };
  // Outside the rows, none that a segment has.
  const auto id_at = [&](int64_t row) { return row >= 0 && row < call.rows ? ids[row * call.ids.stride] : Id(-1); };
  std::byte *memory = run_memory + (int(threadIdx.x) / 32) * kRunBytes<Op, Id>;
  const auto ids_of = [&](int stage) { return memory + stage * kRunStep * int(sizeof(Id)); };
  const auto elements_of = [&](int stage) {
    return memory + kRunStep * (kRunStages * int(sizeof(Id)) + stage * int(sizeof(Element)));
  };
  const auto end_of = [&](int64_t chunk) { return min((chunk + 1) * call.chunk, call.rows); };
  const auto fetch = [&](int64_t at, int64_t end, int stage) {
    if (call.whole && at + kRunStep <= end) {
      Ids::copy(ids + at, ids_of(stage));
      Elements::copy(input + at, elements_of(stage));
    } else if (at < end) {
      for (int r = lane; r < kRunStep; r += 32) {
        const int64_t row = at + r;
        // Behind the last row come some that no segment has.
        Ids::at(ids_of(stage), r) = row < end ? ids[row * call.ids.stride] : Id(-1);
        Elements::at(elements_of(stage), r) = input[min(row, end - 1) * call.input.row];
      }
    }
    commit_copies();
  };
  const auto finish = [&](uint32_t segment, const State &state, uint32_t length) {
    const State whole[1] = {state};
    if (segment < kRunNone) call.op.template store<1>(segment, 0, length, whole);
  };

  int64_t chunk = int64_t(blockIdx.x) * kRunWarps + int(threadIdx.x) / 32;
  Id id_before = id_at(chunk * call.chunk - 1);
  fetch(chunk * call.chunk, end_of(chunk), 0);
  // The kernel before began when all earlier work was done, and only fills the output: rows are read before it ends.
  wait_for_earlier_work();
  let_next_kernel_start();
  int stage = 0;
  while (chunk < call.chunks) {
    const int64_t begin = chunk * call.chunk;
    const int64_t end = end_of(chunk);
    const Id id_behind = id_at(end);
    uint32_t taken = 0;
    if (lane == 0) taken = atomicAdd(call.taken, 1u);
    int64_t next = chunk;
    State carry = call.op.identity();
    uint32_t carried = 0;
    uint32_t last = begin > 0 ? segment_of(id_before) : kRunNone;
    bool opened = false;  // whether a segment has begun in the chunk
    const auto finish_first = [&](uint32_t segment, const State &state, uint32_t length) {
      if (opened) {
        if (length > 0) finish(segment, state, length);
      } else {
        // A chunk that nothing goes on in says so, too: join_runs reads ahead.
        call.partial[2 * chunk] = state;
        call.lengths[2 * chunk] = length;
      }
    };
    for (int64_t at = begin; at < end; at += kRunStep) {
      if (at + kRunStep < end) {
        fetch(at + kRunStep, end, stage ^ 1);
      } else {
        next = int64_t(gridDim.x) * kRunWarps + __shfl_sync(~0u, taken, 0);
        id_before = id_at(next * call.chunk - 1);
        fetch(next * call.chunk, end_of(next), stage ^ 1);
      }
      wait_for_copies<kRunStages - 1>();
      __syncwarp();
      // The lane's rows, whose first segment may have begun before, and last may go on.
      const uint32_t before = lane == 0 ? last : segment_of(Ids::at(ids_of(stage), lane * kRunEach - 1));
      uint32_t segment = before;
      State run = call.op.identity();
      State lead = run;
      uint32_t length = 0;
      uint32_t led = 0;
      bool headed = false;
#pragma unroll
      for (int part = 0; part < kRunEach / 4; ++part) {
        uint32_t segments[4];
        Element element[4];
#pragma unroll
        for (int k = 0; k < 4; k += Ids::kInPart) {
          const auto some = Ids::load(ids_of(stage), (part * 4 + k) / Ids::kInPart);
#pragma unroll
          for (int i = 0; i < Ids::kInPart; ++i) segments[k + i] = segment_of(some.value[i]);
        }
        const auto some = Elements::load(elements_of(stage), part * 4 / Elements::kInPart);
#pragma unroll
        for (int k = 0; k < 4; ++k) element[k] = some.value[part * 4 % Elements::kInPart + k];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (segments[k] != segment) {
            if (headed) {
              finish(segment, run, length);
            } else {
              lead = run;
              led = length;
              headed = true;
            }
            segment = segments[k];
            run = call.op.identity();
            length = 0;
          }
          call.op.add(run, element[k], typename Op::Row(at + lane * kRunEach + part * 4 + k));
          ++length;
        }
      }
      // What comes in from the lanes before.
      const uint32_t heads = __ballot_sync(~0u, headed);
      const uint32_t up_to = heads & (below | 1u << lane);
      const int start = up_to ? 31 - __clz(int(up_to)) : 0;
      State tail = run;
      uint32_t count = length;
#pragma unroll
      for (int apart = 1; apart < 32; apart *= 2) {
        State other = segment_move(tail, [&](uint32_t word) { return __shfl_up_sync(~0u, word, apart); });
        const uint32_t more = __shfl_up_sync(~0u, count, apart);
        if (lane - apart >= start) {
          call.op.join(other, tail);
          tail = other;
          count += more;
        }
      }
      State in = segment_move(tail, [&](uint32_t word) { return __shfl_up_sync(~0u, word, 1); });
      uint32_t more = __shfl_up_sync(~0u, count, 1);
      if (lane == 0) {
        in = carry;
        more = carried;
      } else if ((heads & below) == 0) {
        State whole = carry;
        call.op.join(whole, in);
        in = whole;
        more += carried;
      }
      State whole = in;
      if (headed) {
        call.op.join(whole, lead);
        if ((heads & below) == 0) {
          finish_first(before, whole, more + led);
        } else {
          finish(before, whole, more + led);
        }
        whole = run;
        more = 0;
      } else {
        call.op.join(whole, run);
      }
      carry = segment_move(whole, [&](uint32_t word) { return __shfl_sync(~0u, word, 31); });
      carried = __shfl_sync(~0u, more + length, 31);
      last = __shfl_sync(~0u, segment, 31);
      opened |= heads != 0;
      stage ^= 1;
      __syncwarp();
    }
    if (lane == 0) {
      const bool goes_on = end < call.rows && segment_of(id_behind) == last;
      SegmentRunEnd how = {kRunNone, 0};
      if (!opened) {
        how.passes = goes_on;
        finish_first(last, carry, carried);
      } else if (goes_on) {
        how.segment = last;
      } else {
        finish(last, carry, carried);
      }
      call.partial[2 * chunk + 1] = carry;
      call.lengths[2 * chunk + 1] = carried;
      call.ends[chunk] = how;
    }
    chunk = next;
  }
}

// Puts the pieces of segments together that go beyond a chunk: a lane for each chunk in which one begins, and all lanes
// of a warp for the chunks behind the next.
template <class Op>
__global__ __launch_bounds__(kRunThreads) void join_runs(const __grid_constant__ SegmentRunCall<Op> call) {
  using State = typename Op::State;
  constexpr int kAtOnce = 8;
  const int lane = int(threadIdx.x) & 31;
  const int64_t own = int64_t(blockIdx.x) * kRunThreads + threadIdx.x;
  wait_for_earlier_work();
  State state = call.op.identity();
  int64_t length = 0;
  uint32_t segment = kRunNone;
  bool longer = false;
  // Of the last chunk no segment goes on.
  if (own + 1 < call.chunks) {
    segment = call.ends[own].segment;
    longer = call.ends[own + 1].passes != 0 && segment < kRunNone;
    state = call.partial[2 * own + 1];
    call.op.join(state, call.partial[2 * own + 2]);
    length = int64_t(call.lengths[2 * own + 1]) + call.lengths[2 * own + 2];
  }
  for (uint32_t rest = __ballot_sync(~0u, longer); rest; rest &= rest - 1) {
    const int owner = __ffs(int(rest)) - 1;
    State behind = call.op.identity();
    int64_t rows = 0;
    bool more = true;
    for (int64_t from = own - lane + owner + 2; more; from += 32 * kAtOnce) {
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
          call.op.join(behind, some[a]);
          rows += lengths[a];
        }
        more = more && ending == 0;
      }
    }
    join_lanes(call.op, behind);
    for (int apart = 16; apart > 0; apart /= 2) rows += __shfl_xor_sync(~0u, rows, apart);
    if (lane == owner) {
      call.op.join(state, behind);
      length += rows;
    }
  }
  const State whole[1] = {state};
  if (segment < kRunNone) call.op.template store<1>(segment, 0, length, whole);
}

// ---------------------------------------------------------------------------------------------------

// A lane takes segments of up to so many rows, a warp longer ones, and several warps those longer than a chunk.
constexpr int kRangeShort = 128;
constexpr int kRangeChunk = 2048;
constexpr int kRangeStaged = 1024;

template <class Op>
__global__ __launch_bounds__(kRunThreads) void forget_longs(const __grid_constant__ SegmentRunCall<Op> call) {
  let_next_kernel_start();
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
  wait_for_earlier_work();
  let_next_kernel_start();
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
    if (call.whole && first + kRangeStaged <= call.rows) {
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
  wait_for_earlier_work();
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
  const auto whole = [](const void *data, int64_t stride) {
    return stride == 1 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  };
  call.whole = whole(input.data, input.row);
  call.partial = reinterpret_cast<typename Op::State *>(space.partial);
  call.lengths = space.counts;
  call.ends = reinterpret_cast<SegmentRunEnd *>(space.ends);
  if (problem.ids == SegmentIds::offsets) {
    call.longs = {reinterpret_cast<uint32_t *>(space.ends), space.counts};
    const Grid grid = {ceil_div(problem.segments, kRunThreads), kRunThreads};
    const Grid chunks = {ceil_div(call.chunks, kRunWarps), kRunThreads};
    launch(forget_longs<Op>, {ceil_div(call.chunks, kRunThreads), kRunThreads}, stream, call);
    launch(reduce_ranges<Op>, {grid.blocks, grid.threads, 0, true}, stream, call);
    launch(reduce_longs<Op>, {chunks.blocks, chunks.threads, 0, true}, stream, call);
    return;
  }
  call.whole = call.whole && whole(ids.data, ids.stride);
  call.taken = space.taken;
  constexpr int64_t kFillBlocks = 4;
  launch(fill_empty<Op>,
         {std::min(ceil_div(problem.segments, kRunThreads), kMultiprocessors * kFillBlocks), kRunThreads}, stream,
         call);
  const auto run = [&](auto kernel, size_t warp_bytes) {
    segment_allow_shared(reinterpret_cast<const void *>(kernel), kRunWarps * warp_bytes);
    const int64_t blocks = std::min(ceil_div(call.chunks, kRunWarps), kMultiprocessors * kRunBlocks);
    launch(kernel, {blocks, kRunThreads, kRunWarps * warp_bytes, true}, stream, call);
  };
  if (ids.wide) {
    run(reduce_runs<Op, int64_t>, kRunBytes<Op, int64_t>);
  } else {
    run(reduce_runs<Op, int32_t>, kRunBytes<Op, int32_t>);
  }
  launch(join_runs<Op>, {ceil_div(call.chunks, kRunThreads), kRunThreads, 0, true}, stream, call);
}

}  // namespace baracuda
