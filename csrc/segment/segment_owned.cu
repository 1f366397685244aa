// SPDX-License-Identifier: Apache-2.0
// Maxima and minima of wide rows, and their gradients, where segments are short: a few lanes have a segment each, or a
// block has one. For a gradient they go over its rows again, which they still have or which are near, so that neither
// the rows nor the gradient go by twice. Segments of more rows than a chunk has places are shared out by chunks.
#include "segment/segment_lanes.cuh"

namespace baracuda {
namespace {

constexpr int kWords = 4;  // of a lane: one load
constexpr int kHeld = 8;   // rows
constexpr int kParts = 8;  // of a segment, where they are shared out in a block

using Pack = SegmentPack<uint32_t, kWords>;

// Columns and strides count words.
struct OwnedCall {
  SegmentGroups groups;
  SegmentView input;
  SegmentView d_output;
  SegmentView d_input;  // without data: the maxima are wanted
  int64_t columns;
  int64_t tiles;
  int across;
  int lane_bits;
  unsigned long long *longest;  // of each chunk's long segment that begins there: a key and, below it, ~row
  int64_t elements;             // of a row
};

__device__ __forceinline__ Pack load_words(const SegmentView &view, int64_t row, int64_t column) {
  return *reinterpret_cast<const Pack *>(static_cast<const uint32_t *>(view.data) + row * view.row + column);
}

__device__ __forceinline__ void store_words(const SegmentView &view, int64_t row, int64_t column, const Pack &pack) {
  // An assignment would store word by word.
  __stwb(reinterpret_cast<uint4 *>(static_cast<uint32_t *>(view.data) + row * view.row + column),
         make_uint4(pack.value[0], pack.value[1], pack.value[2], pack.value[3]));
}

template <SegmentLanes kLanes, bool kShared, bool kGradient>
__global__ __launch_bounds__(kSegmentThreads,
                             3) void visit_owned(const __grid_constant__ OwnedCall call,
                                                 const __grid_constant__ SegmentFloatMaxima<kLanes> op) {
  __shared__ Pack maxima[kShared ? kSegmentThreads : 1];
  if (call.longest) {
    const int64_t count = call.groups.chunks * call.elements;
    for (int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; at < count; at += int64_t(gridDim.x) * blockDim.x)
      call.longest[at] = 0;
  }
  int lane;
  int part = 0;
  int64_t owner;
  if constexpr (kShared) {
    lane = int(threadIdx.x) & (call.across - 1);
    part = int(threadIdx.x) >> call.lane_bits;
    owner = blockIdx.x;
  } else {
    lane = int(threadIdx.x) & (call.across - 1);
    owner = (int64_t(blockIdx.x) * kSegmentThreads + threadIdx.x) >> call.lane_bits;
  }
  const int64_t segment = owner / call.tiles;
  if (segment >= call.groups.segments) return;
  const int64_t column = ((owner - segment * call.tiles) * call.across + lane) * kWords;
  const bool mine = column < call.columns;
  if (!kShared && !mine) return;
  int64_t from = call.groups.begin(segment);
  const int64_t end = call.groups.end(segment);
  if (end - from > call.groups.chunk || (kGradient && end == from)) return;
  const int length = int(end - from);
  int count = length;
  if constexpr (kShared) {
    // So that a part without rows has none with rows behind it.
    const int each = (length + kParts - 1) / kParts;
    from += part * each;
    count = min(each, count - part * each);
    if (!mine) count = 0;
  }
  const uint32_t *order = call.groups.order;
  Pack dy = {};
  if (kGradient && mine) dy = load_words(call.d_output, segment, column);
  Pack pack[kHeld];
  // Rows from this one on: of an order, from none.
  const int64_t base = order ? 0 : from;
  uint32_t row[kHeld];
  const auto load = [&](int first) {
#pragma unroll
    for (int r = 0; r < kHeld; ++r)
      if (first + r < count) row[r] = order ? __ldg(order + from + first + r) : uint32_t(first + r);
#pragma unroll
    for (int r = 0; r < kHeld; ++r)
      if (first + r < count) pack[r] = load_words(call.input, base + row[r], column);
  };
  Pack most;
#pragma unroll
  for (int w = 0; w < kWords; ++w) most.value[w] = op.identity();
  // Backwards, so that the first rows are still there in the end.
  for (int first = (count - 1) / kHeld * kHeld; first >= 0; first -= kHeld) {
    load(first);
#pragma unroll
    for (int r = 0; r < kHeld; ++r) {
      if (first + r >= count) break;
#pragma unroll
      for (int w = 0; w < kWords; ++w) op.add(most.value[w], pack[r].value[w], row[r]);
    }
  }
  if constexpr (kShared) {
    maxima[threadIdx.x] = most;
    __syncthreads();
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      const Pack other = maxima[p * call.across + lane];
#pragma unroll
      for (int w = 0; w < kWords; ++w) op.join(most.value[w], other.value[w]);
    }
    for (int p = 0; kGradient && p < part; ++p) {
      const Pack other = maxima[p * call.across + lane];
#pragma unroll
      for (int w = 0; w < kWords; ++w) dy.value[w] &= segment_differ<kLanes>(other.value[w], most.value[w]);
    }
  }
  if constexpr (!kGradient) {
    if (mine && part == 0) op.template store<kWords>(segment, column, length, most.value);
  } else {
    // What is left of dy: nothing once a row has taken it.
    for (int first = 0; first < count; first += kHeld) {
      if (first > 0) load(first);
#pragma unroll
      for (int r = 0; r < kHeld; ++r) {
        if (first + r >= count) break;
        Pack result;
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          // Any NaN becomes the one that maxima are.
          uint32_t value = op.identity();
          op.add(value, pack[r].value[w], row[r]);
          const uint32_t other = segment_differ<kLanes>(value, most.value[w]);
          result.value[w] = dy.value[w] & ~other;
          dy.value[w] &= other;
        }
        store_words(call.d_input, base + row[r], column, result);
      }
    }
  }
}

// Rows of one long segment in a chunk.
struct LongPiece {
  int64_t segment;
  int64_t begin;
  int64_t end;
  int64_t slot;
};

// Of at most two: what began before, and what begins here.
__device__ __forceinline__ bool find_long(const SegmentGroups &groups, int64_t chunk, bool begins, LongPiece &piece) {
  const int64_t first = groups.first[chunk];
  piece.segment = (begins ? groups.first[chunk + 1] : first) - 1;
  if (piece.segment < 0 || (begins && piece.segment < first)) return false;
  const int64_t from = groups.begin(piece.segment);
  const int64_t to = groups.end(piece.segment);
  const int64_t place = chunk * groups.chunk - piece.segment - 1;
  piece.begin = max(from, place);
  piece.end = min(to, place + groups.chunk);
  piece.slot = (from + piece.segment) / groups.chunk;
  return to - from > groups.chunk;
}

template <class Bits>
__global__ __launch_bounds__(kSegmentThreads) void find_longest(const __grid_constant__ OwnedCall call,
                                                                SegmentOrder<Bits> order) {
  constexpr int kVector = 16 / sizeof(Bits);
  using Elements = SegmentPack<Bits, kVector>;
  constexpr int kAtOnce = 4;
  const int lane = int(threadIdx.x) & (call.across - 1);
  const int part = int(threadIdx.x) >> call.lane_bits;
  const int parts = kSegmentThreads >> call.lane_bits;
  const SegmentArgMax<Bits, uint32_t> op = {order};
  for (const bool begins : {false, true}) {
    LongPiece piece;
    if (!find_long(call.groups, blockIdx.x, begins, piece)) continue;
    for (int64_t column = lane * kWords; column < call.columns; column += call.across * kWords) {
      typename SegmentArgMax<Bits, uint32_t>::State state[kVector];
#pragma unroll
      for (int v = 0; v < kVector; ++v) state[v] = op.identity();
      for (int64_t at = piece.begin + part; at < piece.end; at += kAtOnce * parts) {
        uint32_t row[kAtOnce];
        Pack pack[kAtOnce];
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
          const int64_t place = at + r * parts;
          if (place < piece.end) row[r] = call.groups.order ? __ldg(call.groups.order + place) : uint32_t(place);
        }
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r)
          if (at + r * parts < piece.end) pack[r] = load_words(call.input, row[r], column);
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
          if (at + r * parts >= piece.end) break;
          const Elements elements = bit_cast<Elements>(pack[r]);
#pragma unroll
          for (int v = 0; v < kVector; ++v) op.add(state[v], elements.value[v], row[r]);
        }
      }
      unsigned long long *to = call.longest + piece.slot * call.elements + column * (kVector / kWords);
#pragma unroll
      for (int v = 0; v < kVector; ++v)
        if (state[v].row != op.kNone)
          atomicMax(to + v, static_cast<unsigned long long>(state[v].key) << 32 | uint32_t(~state[v].row));
    }
  }
}

// Rows of long segments, and zeros to those of none.
template <class Bits>
__global__ __launch_bounds__(kSegmentThreads) void spread_long(const __grid_constant__ OwnedCall call) {
  constexpr int kVector = 16 / sizeof(Bits);
  using Elements = SegmentPack<Bits, kVector>;
  const SegmentGroups &groups = call.groups;
  const int lane = int(threadIdx.x) & (call.across - 1);
  const int part = int(threadIdx.x) >> call.lane_bits;
  const int parts = kSegmentThreads >> call.lane_bits;
  const int64_t place = int64_t(blockIdx.x) * groups.chunk;
  const auto row_at = [&](int64_t at) { return groups.order ? int64_t(__ldg(groups.order + at)) : at; };
  const auto forget = [&](int64_t from, int64_t to) {
    for (int64_t at = from + part; at < to; at += parts)
      for (int64_t column = lane * kWords; column < call.columns; column += call.across * kWords)
        store_words(call.d_input, row_at(at), column, {});
  };
  forget(place, min(place + groups.chunk, groups.begin(0)));
  const int64_t behind = place - groups.segments;
  forget(max(behind, groups.clamped(groups.segments)), min(behind + groups.chunk, groups.rows));
  if (!call.longest) return;
  for (const bool begins : {false, true}) {
    LongPiece piece;
    if (!find_long(groups, blockIdx.x, begins, piece)) continue;
    for (int64_t column = lane * kWords; column < call.columns; column += call.across * kWords) {
      const Elements dy = bit_cast<Elements>(load_words(call.d_output, piece.segment, column));
      const unsigned long long *from = call.longest + piece.slot * call.elements + column * (kVector / kWords);
      uint32_t taker[kVector];
#pragma unroll
      for (int v = 0; v < kVector; ++v) taker[v] = ~uint32_t(from[v]);
      for (int64_t at = piece.begin + part; at < piece.end; at += parts) {
        const int64_t row = row_at(at);
        Elements result;
#pragma unroll
        for (int v = 0; v < kVector; ++v) result.value[v] = taker[v] == uint32_t(row) ? dy.value[v] : Bits(0);
        store_words(call.d_input, row, column, bit_cast<Pack>(result));
      }
    }
  }
}

template <class Bits>
__global__ __launch_bounds__(kSegmentThreads) void store_long(const __grid_constant__ OwnedCall call,
                                                              SegmentOrder<Bits> order, SegmentView output) {
  LongPiece piece;
  if (!find_long(call.groups, blockIdx.x, true, piece)) return;
  const unsigned long long *from = call.longest + piece.slot * call.elements;
  for (int64_t column = threadIdx.x; column < call.elements; column += kSegmentThreads)
    output.at<Bits>(piece.segment, column) = order.bits(uint32_t(from[column] >> 32));
}

// Of a forward, `d_output` and `d_input` are without data.
template <SegmentLanes kLanes, class Bits>
void visit(const SegmentBackward &call, const SegmentView &output, uint64_t empty_bits, uint32_t infinity, uint32_t nan,
           const SegmentSpace &space, Stream stream) {
  const SegmentProblem &problem = call.problem;
  constexpr int kEach = 4 / sizeof(Bits);
  const auto words = [](const SegmentView &view) { return SegmentView{view.data, view.row / kEach, 1}; };
  const bool minimum = problem.kind == SegmentKind::min;
  const bool gradient = call.d_input.data != nullptr;
  const auto op = segment_float_maxima<kLanes>(minimum, infinity, nan, uint32_t(empty_bits), words(output));
  OwnedCall own = {};
  own.groups = segment_groups(problem, call.ids, nullptr, space, stream);
  own.input = words(call.input);
  own.d_output = words(call.d_output);
  own.d_input = words(call.d_input);
  own.columns = problem.columns / kEach;
  own.across = segment_across(own.columns, kWords);
  own.lane_bits = std::countr_zero(unsigned(own.across));
  own.tiles = ceil_div(own.columns, int64_t(own.across) * kWords);
  own.elements = problem.columns;
  if (problem.rows > space.chunks.chunk) own.longest = reinterpret_cast<unsigned long long *>(space.partial);
  // Rows of a segment that a few lanes side by side would take too long for.
  constexpr int64_t kManyRows = 24;
  const int64_t owners = problem.segments * own.tiles;
  if (own.across >= 8 && problem.rows >= kManyRows * problem.segments) {
    launch(gradient ? visit_owned<kLanes, true, true> : visit_owned<kLanes, true, false>, {owners, kParts * own.across},
           stream, own, op);
  } else {
    launch(gradient ? visit_owned<kLanes, false, true> : visit_owned<kLanes, false, false>,
           {ceil_div(owners * own.across, kSegmentThreads), kSegmentThreads}, stream, own, op);
  }
  const auto order = segment_order<Bits>(problem.dtype, minimum);
  const Grid chunks = {space.chunks.count, kSegmentThreads};
  if (own.longest) launch(find_longest<Bits>, chunks, stream, own, order);
  if (gradient) {
    launch(spread_long<Bits>, chunks, stream, own);
  } else if (own.longest) {
    launch(store_long<Bits>, chunks, stream, own, order, output);
  }
}

void dispatch(const SegmentBackward &call, const SegmentView &output, uint64_t empty_bits, const SegmentSpace &space,
              Stream stream) {
  const DLDataType dtype = call.problem.dtype;
  if (dtype == DTypeOf<float>::value) {
    visit<SegmentLanes::float32, uint32_t>(call, output, empty_bits, 0x7f800000u, 0x7fc00000u, space, stream);
  } else if (dtype == DTypeOf<bfloat16>::value) {
    visit<SegmentLanes::bfloat16, uint16_t>(call, output, empty_bits, 0x7f80u, 0x7fc0u, space, stream);
  } else {
    visit<SegmentLanes::float16, uint16_t>(call, output, empty_bits, 0x7c00u, 0x7e00u, space, stream);
  }
}

bool all_aligned(DLDataType dtype, std::initializer_list<SegmentView> views) {
  const int bytes = dtype.bits / 8;
  for (const SegmentView &view : views)
    if (!segment_aligned(view, 16 / bytes, bytes)) return false;
  return true;
}

}  // namespace

bool segment_has_owners(const SegmentProblem &problem) {
  const DLDataType dtype = problem.dtype;
  return problem.extreme() && problem.segments > 0 && segment_vector(problem) > 1 &&
         (dtype == DTypeOf<float>::value || dtype == DTypeOf<bfloat16>::value || dtype == DTypeOf<float16>::value);
}

bool segment_reduce_owned(const SegmentForward &call, const SegmentSpace &space, Stream stream) {
  if (!all_aligned(call.problem.dtype, {call.input, call.output})) return false;
  SegmentBackward own = {};
  own.problem = call.problem;
  own.input = call.input;
  own.ids = call.ids;
  dispatch(own, call.output, call.empty_bits, space, stream);
  return true;
}

bool segment_spread_owned(const SegmentBackward &call, const SegmentSpace &space, Stream stream) {
  if (!all_aligned(call.problem.dtype, {call.input, call.d_output, call.d_input})) return false;
  dispatch(call, {}, 0, space, stream);
  return true;
}

}  // namespace baracuda
