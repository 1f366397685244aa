// SPDX-License-Identifier: Apache-2.0
// Rows that are where they are, and so wide that a lane has several elements: a few lanes side by side have a segment
// each, or several times as many where segments are long. Those that are far longer are shared out in pieces.
#pragma once

#include "segment/segment.cuh"

namespace baracuda {

template <class Op>
struct SegmentRowsCall {
  Op op;
  int64_t rows;
  int64_t segments;
  int64_t columns;
  SegmentIndices offsets;
  SegmentView input;
  int64_t tiles;
  int across;
  int lane_bits;
  bool loaded_whole;  // a lane's elements at once
  bool stored_whole;
  SegmentPieces pieces;
  typename Op::State *partial;  // of a piece, and of the rows before it

  __device__ int64_t bound(int64_t segment) const { return max(int64_t(0), min(offsets[segment], rows)); }
};

// Every `apart`th of `count` rows.
template <class Op, int kVector>
__device__ __forceinline__ void segment_add_rows(const SegmentRowsCall<Op> &call, int64_t column, int64_t row,
                                                 int count, int apart, typename Op::State (&state)[kVector]) {
  using Element = typename Op::Element;
  using Pack = SegmentPack<Element, kVector>;
  using Word = SegmentPack<uint32_t, sizeof(Pack) / 4>;
  constexpr int kRows = 8;
  const Element *from =
      static_cast<const Element *>(call.input.data) + row * call.input.row + column * call.input.column;
  const int64_t step = apart * call.input.row;
  if (!call.loaded_whole) {
    for (int r = 0; r < count; r += apart, from += step) {
#pragma unroll
      for (int v = 0; v < kVector; ++v) call.op.add(state[v], from[v * call.input.column], typename Op::Row(row + r));
    }
    return;
  }
  for (int left = count; left > 0; left -= kRows * apart) {
    Pack pack[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r * apart < left) {
        const Word word = *reinterpret_cast<const Word *>(from);
        pack[r] = bit_cast<Pack>(word);
      }
      from += step;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r * apart >= left) break;
#pragma unroll
      for (int v = 0; v < kVector; ++v) call.op.add(state[v], pack[r].value[v], typename Op::Row(row + r * apart));
    }
    row += kRows * apart;
  }
}

template <class Op, int kVector>
__device__ __forceinline__ void segment_store(const SegmentRowsCall<Op> &call, int64_t segment, int64_t column,
                                              int64_t length, const typename Op::State (&state)[kVector]) {
  if (call.stored_whole) {
    call.op.template store<kVector>(segment, column, length, state);
  } else {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      const typename Op::State one[1] = {state[v]};
      call.op.template store<1>(segment, column + v, length, one);
    }
  }
}

template <class Op, int kVector>
using SegmentRowStates = typename Op::State[kVector][kSegmentThreads];

// What `parts` times `across` lanes have, side by side and in whole warps if there are more than one, in the first of
// them. For all threads of a block.
template <class Op, int kVector>
__device__ __forceinline__ void segment_join_parts(const SegmentRowsCall<Op> &call, int parts,
                                                   SegmentRowStates<Op, kVector> &states,
                                                   typename Op::State (&state)[kVector]) {
  const int lanes = parts * call.across;
  for (int apart = min(lanes, 32) / 2; apart >= call.across; apart /= 2) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) call.op.join(state[v], segment_shuffle(state[v], apart));
  }
  if (lanes <= 32) return;
  __syncthreads();
#pragma unroll
  for (int v = 0; v < kVector; ++v) states[v][threadIdx.x] = state[v];
  __syncthreads();
  if ((int(threadIdx.x) & (lanes - 1)) >= 32) return;
  for (int other = 32; other < lanes; other += 32) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) call.op.join(state[v], states[v][int(threadIdx.x) + other]);
  }
}

// How many blocks are to share a multiprocessor.
template <class Op, int kVector>
constexpr int kSegmentRowBlocks = sizeof(typename Op::State) * kVector > 32 ? 2 : 4;

// A segment that is longer than a piece has its rows before the first multiple of a piece's length here.
template <class Op, int kVector, bool kParts>
__global__ __launch_bounds__(kSegmentThreads, kSegmentRowBlocks<Op, kVector>) void segment_own_rows(
    const __grid_constant__ SegmentRowsCall<Op> call) {
  wait_for_earlier_work();
  let_next_kernel_start();
  const int part_bits = kParts ? call.pieces.part_bits : 0;
  const int64_t owner = (int64_t(blockIdx.x) * kSegmentThreads + threadIdx.x) >> (call.lane_bits + part_bits);
  const int64_t segment = call.tiles == 1 ? owner : owner / call.tiles;
  const int64_t tile = owner - segment * call.tiles;
  const int lane = int(threadIdx.x) & (call.across - 1);
  const int part = kParts ? (int(threadIdx.x) >> call.lane_bits) & ((1 << part_bits) - 1) : 0;
  const int64_t column = (tile * call.across + lane) * kVector;
  const bool mine = segment < call.segments;
  int64_t length = 0;
  int64_t first = 0;
  bool shared = false;
  typename Op::State state[kVector];
#pragma unroll
  for (int v = 0; v < kVector; ++v) state[v] = call.op.identity();
  if (mine) {
    const int64_t begin = call.bound(segment);
    length = max(call.bound(segment + 1) - begin, int64_t(0));
    const int rows = call.pieces.rows;
    first = (begin + rows - 1) / rows;
    shared = length > rows;
    if (part == 0 && tile == 0) {
      // What no segment has is nobody else's.
      const int64_t from = segment == 0 ? 0 : first;
      const int64_t to = segment == call.segments - 1 ? call.pieces.count : (begin + length + rows - 1) / rows;
      for (int64_t piece = from + lane; piece < to; piece += call.across)
        call.pieces.owners[piece] =
            shared && piece >= first && piece * rows < begin + length ? uint32_t(segment) + 1 : 0;
    }
    const int count = int(shared ? first * rows - begin : length);
    if (column < call.columns) segment_add_rows(call, column, begin + part, count - part, 1 << part_bits, state);
  }
  if constexpr (kParts) {
    __shared__ SegmentRowStates<Op, kVector> states;
    segment_join_parts<Op, kVector>(call, 1 << part_bits, states, state);
  }
  if (!mine || part != 0 || column >= call.columns) return;
  if (shared) {
    typename Op::State *to = call.partial + (2 * first + 1) * call.columns + column;
#pragma unroll
    for (int v = 0; v < kVector; ++v) to[v] = state[v];
  } else {
    segment_store<Op, kVector>(call, segment, column, length, state);
  }
}

// Hands pieces of long segments, by tiles of columns, that are this block's to `take`, as many as it has threads at
// once, in any order: the piece's number, and the bounds of its segment.
struct SegmentRowJob {
  int64_t piece;
  int64_t segment;
  int64_t begin;
  int64_t end;
  int tile;
};

template <class Op, class Wanted, class Take>
__device__ __forceinline__ void segment_visit_pieces(const SegmentRowsCall<Op> &call, const Wanted &wanted,
                                                     const Take &take) {
  __shared__ SegmentRowJob jobs[kSegmentThreads];
  __shared__ int found;
  const int rows = call.pieces.rows;
  const int64_t count = call.pieces.count * call.tiles;
  for (int64_t base = blockIdx.x; base < count; base += int64_t(gridDim.x) * kSegmentThreads) {
    if (threadIdx.x == 0) found = 0;
    __syncthreads();
    const int64_t looked = base + int64_t(threadIdx.x) * gridDim.x;
    SegmentRowJob job = {call.tiles == 1 ? looked : looked / call.tiles, -1, 0, 0, 0};
    const int64_t row = job.piece * rows;
    if (looked < count) job.segment = int64_t(call.pieces.owners[job.piece]) - 1;
    if (uint64_t(job.segment) < uint64_t(call.segments)) {
      job.begin = call.bound(job.segment);
      job.end = call.bound(job.segment + 1);
      job.tile = int(looked - job.piece * call.tiles);
      // Where a promise is broken, what another run left may be found.
      if (job.begin <= row && row < job.end && wanted(job)) jobs[atomicAdd(&found, 1)] = job;
    }
    __syncthreads();
    take(jobs, found);
    __syncthreads();
  }
}

// As many lanes for each piece, a warp at least, as have so many of its rows one after the other.
constexpr int kSegmentPieceRows = 32;

template <class Op, int kVector>
__global__ __launch_bounds__(kSegmentThreads, kSegmentRowBlocks<Op, kVector>) void segment_share_rows(
    const __grid_constant__ SegmentRowsCall<Op> call) {
  __shared__ SegmentRowStates<Op, kVector> states;
  wait_for_earlier_work();
  let_next_kernel_start();
  const int rows = call.pieces.rows;
  const int lane = int(threadIdx.x) & (call.across - 1);
  const int group = int(threadIdx.x) >> call.lane_bits;
  const int groups = kSegmentThreads >> call.lane_bits;
  const int parts = min(max(32 >> call.lane_bits, rows / kSegmentPieceRows), groups);
  const int part = group & (parts - 1);
  const auto all = [](const SegmentRowJob &) { return true; };
  segment_visit_pieces(call, all, [&](const SegmentRowJob *jobs, int count) {
    for (int j = 0; j < count; j += groups / parts) {
      const SegmentRowJob job = jobs[min(j + group / parts, count - 1)];
      const int64_t row = job.piece * rows;
      const int64_t column = (int64_t(job.tile) * call.across + lane) * kVector;
      const bool mine = j + group / parts < count && column < call.columns;
      typename Op::State state[kVector];
#pragma unroll
      for (int v = 0; v < kVector; ++v) state[v] = call.op.identity();
      const int length = int(min(job.end - row, int64_t(rows)));
      if (mine) segment_add_rows(call, column, row + part, length - part, parts, state);
      segment_join_parts<Op, kVector>(call, parts, states, state);
      if (!mine || part != 0) continue;
      typename Op::State *to = call.partial + 2 * job.piece * call.columns + column;
#pragma unroll
      for (int v = 0; v < kVector; ++v) to[v] = state[v];
    }
  });
}

// Every `apart`th of a long segment's states: of the rows before its first piece, and then of the pieces.
template <class Op, int kVector>
__device__ __forceinline__ void segment_add_pieces(const SegmentRowsCall<Op> &call, const SegmentRowJob &job,
                                                   int64_t column, int64_t first, int apart,
                                                   typename Op::State (&state)[kVector]) {
  constexpr int kAtOnce = 4;
  const int64_t pieces = (job.end + call.pieces.rows - 1) / call.pieces.rows - job.piece;
  for (int64_t at = first; at <= pieces; at += kAtOnce * apart) {
    typename Op::State some[kAtOnce][kVector];
#pragma unroll
    for (int p = 0; p < kAtOnce; ++p) {
      const int64_t which = at + p * apart;
      if (which > pieces) break;
      const int64_t slot = which == 0 ? 2 * job.piece + 1 : 2 * (job.piece + which - 1);
#pragma unroll
      for (int v = 0; v < kVector; ++v) some[p][v] = call.partial[slot * call.columns + column + v];
    }
#pragma unroll
    for (int p = 0; p < kAtOnce; ++p) {
      if (at + p * apart > pieces) break;
#pragma unroll
      for (int v = 0; v < kVector; ++v) call.op.join(state[v], some[p][v]);
    }
  }
}

// Puts the pieces of long segments together: a few lanes where they are few, else a block.
template <class Op, int kVector>
__global__ __launch_bounds__(kSegmentThreads) void segment_join_rows(const __grid_constant__ SegmentRowsCall<Op> call) {
  __shared__ SegmentRowStates<Op, kVector> states;
  constexpr int64_t kFewPieces = 32;
  wait_for_earlier_work();
  const int64_t few = kFewPieces * call.pieces.rows;
  const int lane = int(threadIdx.x) & (call.across - 1);
  const int group = int(threadIdx.x) >> call.lane_bits;
  const int groups = kSegmentThreads >> call.lane_bits;
  const auto is_first = [&](const SegmentRowJob &job) {
    return job.piece * call.pieces.rows - job.begin < call.pieces.rows;
  };
  segment_visit_pieces(call, is_first, [&](const SegmentRowJob *jobs, int count) {
    for (const bool alone : {true, false}) {
      for (int j = alone ? group : 0; j < count; j += alone ? groups : 1) {
        const SegmentRowJob job = jobs[j];
        if ((job.end - job.begin < few) != alone) continue;
        const int64_t column = (int64_t(job.tile) * call.across + lane) * kVector;
        const bool mine = column < call.columns;
        typename Op::State state[kVector];
#pragma unroll
        for (int v = 0; v < kVector; ++v) state[v] = call.op.identity();
        if (mine) segment_add_pieces(call, job, column, alone ? 0 : group, alone ? 1 : groups, state);
        if (!alone) segment_join_parts<Op, kVector>(call, groups, states, state);
        if (mine && (alone || group == 0))
          segment_store<Op, kVector>(call, job.segment, column, job.end - job.begin, state);
      }
    }
  });
}

// As segment_reduce, where the space has pieces. In which order rows are added doesn't depend on alignment.
template <class Op, int kVector>
void segment_reduce_rows(const SegmentProblem &problem, const SegmentView &input, const SegmentIndices &ids,
                         const Op &op, bool aligned, const SegmentSpace &space, Stream stream) {
  SegmentRowsCall<Op> call = {};
  const bool sorted = problem.ids == SegmentIds::sorted;
  call.op = op;
  call.rows = problem.rows;
  call.segments = problem.segments;
  call.columns = problem.columns;
  call.offsets = sorted ? segment_offsets(problem, ids, space, stream) : ids;
  call.input = input;
  call.across = segment_across(problem.columns, kVector);
  call.lane_bits = std::countr_zero(unsigned(call.across));
  call.tiles = ceil_div(problem.columns, int64_t(call.across) * kVector);
  call.loaded_whole = segment_aligned(input, kVector, sizeof(typename Op::Element));
  call.stored_whole = aligned;
  call.pieces = space.pieces;
  call.partial = reinterpret_cast<typename Op::State *>(space.partial);
  const int part_bits = call.pieces.part_bits;
  const int64_t threads = (problem.segments * call.tiles) << (call.lane_bits + part_bits);
  launch(part_bits > 0 ? segment_own_rows<Op, kVector, true> : segment_own_rows<Op, kVector, false>,
         {ceil_div(threads, kSegmentThreads), kSegmentThreads, 0, sorted}, stream, call);
  if (problem.rows <= call.pieces.rows) return;
  const auto blocks = [&](int64_t most) { return std::min(call.pieces.count * call.tiles, most); };
  launch(segment_share_rows<Op, kVector>,
         {blocks(kMultiprocessors * kSegmentRowBlocks<Op, kVector>), kSegmentThreads, 0, true}, stream, call);
  launch(segment_join_rows<Op, kVector>, {blocks(kMultiprocessors), kSegmentThreads, 0, true}, stream, call);
}

}  // namespace baracuda
