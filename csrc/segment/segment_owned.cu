// SPDX-License-Identifier: Apache-2.0
// Maxima and minima of wide rows, and their gradients, where segments are short: a few lanes have a segment each, or a
// block has one. For a gradient they go over its rows again, which they still have or which are near, so that neither
// the rows nor the gradient go by twice. Those who have a long segment put it on a list of pieces, which are shared
// out.
#include "segment/segment_lanes.cuh"

namespace baracuda {
namespace {

constexpr int kWords = 4;    // of a lane: one load
constexpr int kHeld = 8;     // rows
constexpr int kParts = 8;    // of a segment, where they are shared out in a block
constexpr int kPiece = 256;  // rows

using Pack = SegmentPack<uint32_t, kWords>;

// Whether a segment has more rows than few lanes side by side would have soon done.
bool shares_blocks(const SegmentProblem &problem) {
  constexpr int64_t kManyRows = 24;
  const int64_t words = problem.columns * problem.dtype.bits / 32;
  return segment_across(words, kWords) >= 8 && problem.rows >= kManyRows * problem.segments;
}

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
  int64_t elements;  // of a row
  SegmentLongList longs;

  // Long segments begin more rows apart than there are short ones.
  __device__ unsigned long long *longest(int64_t segment) const {
    return longs.longest + groups.begin(segment) / (longs.most + 1) * elements;
  }
  __device__ int64_t pieces() const { return min(int64_t(*longs.count + 1), longs.pieces_most); }
};

__device__ __forceinline__ Pack load_words(const SegmentView &view, int64_t row, int64_t column) {
  return *reinterpret_cast<const Pack *>(static_cast<const uint32_t *>(view.data) + row * view.row + column);
}

__device__ __forceinline__ void store_words(const SegmentView &view, int64_t row, int64_t column, const Pack &pack) {
  // An assignment would store word by word.
  __stwb(reinterpret_cast<uint4 *>(static_cast<uint32_t *>(view.data) + row * view.row + column),
         make_uint4(pack.value[0], pack.value[1], pack.value[2], pack.value[3]));
}

// Puts a long segment on the list, by as many lanes as have columns of it.
template <SegmentLanes kLanes>
__device__ __forceinline__ void announce(const OwnedCall &call, int64_t segment, int64_t column, int lane) {
  constexpr int kEach = kLanes == SegmentLanes::float32 ? 1 : 2;
  unsigned long long *longest = call.longest(segment) + column * kEach;
#pragma unroll
  for (int e = 0; e < kWords * kEach; ++e) longest[e] = 0;
  // The first tile's.
  if (column != lane * kWords) return;
  const int lanes = int(min(call.columns / kWords, int64_t(call.across)));
  const uint32_t all = (lanes == 32 ? ~0u : (1u << lanes) - 1) << (int(threadIdx.x) & 31 & ~(call.across - 1));
  const int64_t from = call.groups.begin(segment);
  const uint32_t pieces = uint32_t((call.groups.end(segment) - from + kPiece - 1) / kPiece);
  uint32_t first = 0;
  if (lane == 0) first = atomicAdd(call.longs.count, pieces) + 1;
  first = __shfl_sync(all, first, int(threadIdx.x) & 31 & ~(call.across - 1));
  // More than there is room for only where offsets fall.
  for (uint32_t p = uint32_t(lane); p < pieces && first + p < call.longs.pieces_most; p += uint32_t(lanes))
    call.longs.pieces[first + p] = {segment, from + int64_t(p) * kPiece};
}

template <SegmentLanes kLanes, bool kShared, bool kGradient>
__global__ __launch_bounds__(kSegmentThreads,
                             3) void visit_owned(const __grid_constant__ OwnedCall call,
                                                 const __grid_constant__ SegmentFloatMaxima<kLanes> op) {
  __shared__ Pack maxima[kShared ? kSegmentThreads : 1];
  wait_for_earlier_work();
  let_next_kernel_start();
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
  if (end - from > call.longs.most) {
    if (mine && part == 0) announce<kLanes>(call, segment, column, lane);
    return;
  }
  if (kGradient && end == from) return;
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
      if (first + r < count) row[r] = order ? order[from + first + r] : uint32_t(first + r);
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

// The largest of each long segment's columns so far, by those who have its pieces.
template <class Bits>
__global__ __launch_bounds__(kSegmentThreads) void find_longest(const __grid_constant__ OwnedCall call,
                                                                SegmentOrder<Bits> order) {
  constexpr int kVector = 16 / sizeof(Bits);
  using Elements = SegmentPack<Bits, kVector>;
  using State = typename SegmentArgMax<Bits, uint32_t>::State;
  constexpr int kAtOnce = 4;
  __shared__ unsigned long long found[kSegmentThreads * kVector];
  wait_for_earlier_work();
  let_next_kernel_start();
  const int lane = int(threadIdx.x) & (call.across - 1);
  const int part = int(threadIdx.x) >> call.lane_bits;
  const int parts = kSegmentThreads >> call.lane_bits;
  const int width = call.across * kVector;
  const SegmentArgMax<Bits, uint32_t> op = {order};
  const int64_t pieces = call.pieces();
  for (int64_t p = blockIdx.x; p < pieces; p += gridDim.x) {
    const SegmentLongPiece piece = call.longs.pieces[p];
    const int64_t end = min(piece.begin + kPiece, call.groups.end(piece.segment));
    for (int64_t tile = 0; tile < call.elements; tile += width) {
      const int64_t column = tile / kVector * kWords + lane * kWords;
      State state[kVector];
#pragma unroll
      for (int v = 0; v < kVector; ++v) state[v] = op.identity();
      for (int64_t at = piece.begin + part; column < call.columns && at < end; at += kAtOnce * parts) {
        uint32_t row[kAtOnce];
        Pack pack[kAtOnce];
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
          const int64_t place = at + r * parts;
          if (place < end) row[r] = call.groups.order ? call.groups.order[place] : uint32_t(place);
        }
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r)
          if (at + r * parts < end) pack[r] = load_words(call.input, row[r], column);
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
          if (at + r * parts >= end) break;
          const Elements elements = bit_cast<Elements>(pack[r]);
#pragma unroll
          for (int v = 0; v < kVector; ++v) op.add(state[v], elements.value[v], row[r]);
        }
      }
#pragma unroll
      for (int v = 0; v < kVector; ++v)
        found[part * width + lane * kVector + v] =
            static_cast<unsigned long long>(state[v].key) << 32 | uint32_t(~state[v].row);
      __syncthreads();
      if (int(threadIdx.x) < width && tile + threadIdx.x < call.elements) {
        unsigned long long most = 0;
        for (int other = 0; other < parts; ++other) most = max(most, found[other * width + threadIdx.x]);
        atomicMax(call.longest(piece.segment) + tile + threadIdx.x, most);
      }
      __syncthreads();
    }
  }
}

// Rows of long segments, and zeros to those of none.
template <class Bits>
__global__ __launch_bounds__(kSegmentThreads) void spread_long(const __grid_constant__ OwnedCall call) {
  constexpr int kVector = 16 / sizeof(Bits);
  using Elements = SegmentPack<Bits, kVector>;
  wait_for_earlier_work();
  const SegmentGroups &groups = call.groups;
  const int lane = int(threadIdx.x) & (call.across - 1);
  const int part = int(threadIdx.x) >> call.lane_bits;
  const int parts = kSegmentThreads >> call.lane_bits;
  const auto row_at = [&](int64_t at) { return groups.order ? int64_t(groups.order[at]) : at; };
  const auto forget = [&](int64_t from, int64_t to) {
    for (int64_t at = from + blockIdx.x * int64_t(parts) + part; at < to; at += int64_t(gridDim.x) * parts)
      for (int64_t column = lane * kWords; column < call.columns; column += call.across * kWords)
        store_words(call.d_input, row_at(at), column, {});
  };
  forget(0, groups.begin(0));
  forget(groups.clamped(groups.segments), groups.rows);
  if (!call.longs.pieces) return;
  const int64_t pieces = call.pieces();
  for (int64_t p = blockIdx.x; p < pieces; p += gridDim.x) {
    const SegmentLongPiece piece = call.longs.pieces[p];
    const int64_t end = min(piece.begin + kPiece, groups.end(piece.segment));
    for (int64_t column = lane * kWords; column < call.columns; column += call.across * kWords) {
      const Elements dy = bit_cast<Elements>(load_words(call.d_output, piece.segment, column));
      const unsigned long long *from = call.longest(piece.segment) + column * (kVector / kWords);
      uint32_t taker[kVector];
#pragma unroll
      for (int v = 0; v < kVector; ++v) taker[v] = ~uint32_t(from[v]);
      for (int64_t at = piece.begin + part; at < end; at += parts) {
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
  wait_for_earlier_work();
  const int64_t pieces = call.pieces();
  for (int64_t p = blockIdx.x; p < pieces; p += gridDim.x) {
    const SegmentLongPiece piece = call.longs.pieces[p];
    if (piece.begin != call.groups.begin(piece.segment)) continue;
    const unsigned long long *from = call.longest(piece.segment);
    for (int64_t column = threadIdx.x; column < call.elements; column += kSegmentThreads)
      output.at<Bits>(piece.segment, column) = order.bits(uint32_t(from[column] >> 32));
  }
}

// Of a forward, which there is of 16-bit floats, `d_output` and `d_input` are without data.
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
  SegmentSpace bare = space;
  bare.chunks.count = -1;
  own.groups = segment_groups(problem, call.ids, nullptr, bare, stream);
  own.input = words(call.input);
  own.d_output = words(call.d_output);
  own.d_input = words(call.d_input);
  own.columns = problem.columns / kEach;
  own.across = segment_across(own.columns, kWords);
  own.lane_bits = std::countr_zero(unsigned(own.across));
  own.tiles = ceil_div(own.columns, int64_t(own.across) * kWords);
  own.elements = problem.columns;
  own.longs = space.longs;
  const int64_t owners = problem.segments * own.tiles;
  const bool shared = shares_blocks(problem);
  const Grid grid = shared ? Grid{owners, kParts * own.across, 0, true}
                           : Grid{ceil_div(owners * own.across, kSegmentThreads), kSegmentThreads, 0, true};
  if (gradient) {
    launch(shared ? visit_owned<kLanes, true, true> : visit_owned<kLanes, false, true>, grid, stream, own, op);
  } else if constexpr (kLanes != SegmentLanes::float32) {
    launch(shared ? visit_owned<kLanes, true, false> : visit_owned<kLanes, false, false>, grid, stream, own, op);
  }
  const auto order = segment_order<Bits>(problem.dtype, minimum);
  constexpr int64_t kMostBlocks = kMultiprocessors * 8;
  const Grid pieces = {std::clamp<int64_t>(own.longs.pieces_most, kMultiprocessors, kMostBlocks), kSegmentThreads, 0,
                       true};
  if (own.longs.pieces) launch(find_longest<Bits>, pieces, stream, own, order);
  if (gradient) {
    launch(spread_long<Bits>, pieces, stream, own);
  } else if constexpr (kLanes != SegmentLanes::float32) {
    if (own.longs.pieces) launch(store_long<Bits>, pieces, stream, own, order, output);
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

void segment_take_longs(Workspace &workspace, const SegmentProblem &problem, SegmentLongList &longs) {
  longs.most = shares_blocks(problem) ? 512 : 128;
  if (problem.rows <= longs.most) return;
  const int64_t segments = problem.rows / (longs.most + 1);
  longs.pieces_most = segments + problem.rows / kPiece;
  longs.pieces = workspace.take<SegmentLongPiece>(longs.pieces_most);
  longs.longest = workspace.take<unsigned long long>((segments + 1) * problem.columns);
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
