// SPDX-License-Identifier: Apache-2.0
// Reductions without sorting, where what is kept of all segments fits into shared memory: each thread, or each
// warp, has a cell for each segment that nobody else touches, and cells are joined in a fixed order.
#pragma once

#include "segment/segment_columns.cuh"
#include "segment/segment_runs.cuh"
#include "segment/segment_shared.cuh"

namespace baracuda {

// ---------------------------------------------------------------------------------------------------
// Few segments: a thread has cells for all of them, in its columns.

constexpr int kFewThreads = 256;
constexpr int kFewRows = 16;

// Of the ids that a block's warps have at hand, two batches each.
inline size_t segment_few_id_bytes(int across) {
  return size_t(2 * kFewRows * kFewThreads / across) * sizeof(uint32_t);
}

template <class Op>
struct SegmentFewCall : SegmentPartsCall<Op> {
  int tiles;
  bool paired;  // two elements can be loaded at once
};

template <class Op, int kColumns>
__global__ __launch_bounds__(kFewThreads, 2) void segment_few(const __grid_constant__ SegmentFewCall<Op> call) {
  using Element = typename Op::Element;
  using State = typename Op::State;
  using Pack = SegmentPack<Element, kColumns>;
  using Word = SegmentPack<BitsOf<Pack>, 1>;
  using Cells = SegmentPack<State, kColumns>;
  constexpr int kStep = kFewThreads * kColumns;
  constexpr uint32_t kNowhere = ~uint32_t(0);
  extern __shared__ __align__(16) uint64_t segment_memory[];
  State *cells = reinterpret_cast<State *>(segment_memory);
  uint32_t *counts = reinterpret_cast<uint32_t *>(cells + call.segments * kStep);
  Cells *own = reinterpret_cast<Cells *>(segment_memory) + threadIdx.x;
  const int lane = int(threadIdx.x) & (call.across - 1);
  const int warp = int(threadIdx.x) / 32;
  const int beside = 32 / call.across;  // rows that a warp takes at once
  const int batch = kFewRows * beside;
  // Of a warp's rows, the first of the segment's cells.
  uint32_t *segments = counts + call.segments + 2 * warp * batch;
  for (int s = 0; s < call.segments; ++s) {
#pragma unroll
    for (int v = 0; v < kColumns; ++v) own[s * kFewThreads].value[v] = call.op.identity();
  }
  if (call.counts) {
    for (int s = threadIdx.x; s < call.segments; s += kFewThreads) counts[s] = 0;
    __syncthreads();
  }
  const int part = int(blockIdx.x) / call.tiles;
  const int tile = int(blockIdx.x) - part * call.tiles;
  const int groups = kFewThreads / call.across;
  const int among = (int(threadIdx.x) & 31) / call.across;
  const int64_t column = int64_t(tile) * call.across * kColumns + lane * kColumns;
  const Element *input = static_cast<const Element *>(call.input.data) + column * call.input.column;
  // The last of an odd number of columns stands alone.
  const int mine = int(max(int64_t(0), min(call.columns - column, int64_t(kColumns))));
  const bool whole = kColumns == 1 ? mine == 1 : call.paired && mine == kColumns;
  const int64_t apart = beside * call.input.row;
  const int64_t step = int64_t(call.parts) * (kFewThreads / 32) * batch;

  const auto load = [&](int64_t first, Pack(&pack)[kFewRows]) {
    const Element *from = input + (first + among) * call.input.row;
    if (whole && first + batch <= call.rows) {
#pragma unroll
      for (int r = 0; r < kFewRows; ++r) {
        // In a variable of its own: a reference to memory would be copied byte by byte.
        const Word word = *reinterpret_cast<const Word *>(from + r * apart);
        pack[r] = bit_cast<Pack>(word);
      }
    } else {
#pragma unroll
      for (int r = 0; r < kFewRows; ++r) {
#pragma unroll
        for (int v = 0; v < kColumns; ++v)
          if (v < mine && first + among + r * beside < call.rows)
            pack[r].value[v] = from[r * apart + v * call.input.column];
      }
    }
  };
  const auto id_of = [&](int64_t row) {
    const int64_t id = row < call.rows ? call.ids[row] : -1;
    return uint64_t(id) < uint64_t(call.segments) ? uint32_t(id) * kFewThreads : kNowhere;
  };
  // The first of a batch's ids are asked for together with its rows.
  const auto keep_ids = [&](int64_t first, uint32_t id, uint32_t *to) {
    const int l = int(threadIdx.x) & 31;
    if (l < batch) to[l] = id;
    for (int i = l + 32; i < batch; i += 32) to[i] = id_of(first + i);
    __syncwarp();
  };
  int64_t first = (int64_t(part) * (kFewThreads / 32) + warp) * batch;
  Pack pack[kFewRows];
  if (first < call.rows) {
    const uint32_t id = id_of(first + (int(threadIdx.x) & 31));
    load(first, pack);
    keep_ids(first, id, segments);
  }
  int at_work = 0;
  while (first < call.rows) {
    const int64_t next = first + step;
    Pack next_pack[kFewRows];
    uint32_t next_id = kNowhere;
    if (next < call.rows) {
      next_id = id_of(next + (int(threadIdx.x) & 31));
      load(next, next_pack);
    }
    const uint32_t *from = segments + at_work * batch + among;
#pragma unroll
    for (int r = 0; r < kFewRows; ++r) {
      const uint32_t segment = from[r * beside];
      if (segment == kNowhere) continue;
      Cells &at = own[segment];
      Cells cell = at;
#pragma unroll
      for (int v = 0; v < kColumns; ++v)
        if (v < mine) call.op.add(cell.value[v], pack[r].value[v], typename Op::Row(first + among + r * beside));
      at = cell;
      if (call.counts && column == 0) atomicAdd(counts + segment / kFewThreads, 1u);
    }
    at_work ^= 1;
    if (next < call.rows) keep_ids(next, next_id, segments + at_work * batch);
#pragma unroll
    for (int r = 0; r < kFewRows; ++r) pack[r] = next_pack[r];
    first = next;
  }
  __syncthreads();
  const int width = call.across * kColumns;
  for (int i = threadIdx.x; i < call.segments * width; i += kFewThreads) {
    const int s = i / width;
    const int c = i - s * width;
    const int64_t to = int64_t(tile) * width + c;
    if (to >= call.columns) continue;
    State state = call.op.identity();
    // Neighbouring segments begin at different groups, which are in different banks.
    for (int g = 0; g < groups; ++g) call.op.join(state, cells[s * kStep + ((g + s) & (groups - 1)) * width + c]);
    call.partial[(int64_t(part) * call.segments + s) * call.columns + to] = state;
  }
  if (call.counts && tile == 0)
    for (int s = threadIdx.x; s < call.segments; s += kFewThreads)
      call.counts[int64_t(part) * call.segments + s] = counts[s];
}

constexpr int kFewAtOnce = 32;

template <class Op>
__global__ __launch_bounds__(kFewThreads) void segment_parts_join(const __grid_constant__ SegmentPartsCall<Op> call) {
  using State = typename Op::State;
  constexpr int kSlices = kFewThreads / kFewAtOnce;
  constexpr int kParts = 8;
  __shared__ State states[kSlices][kFewAtOnce];
  __shared__ uint32_t lengths[kSlices][kFewAtOnce];
  wait_for_earlier_work();
  const int lane = int(threadIdx.x) % kFewAtOnce;
  const int slice = int(threadIdx.x) / kFewAtOnce;
  const int64_t size = call.segments * call.columns;
  const int64_t at = int64_t(blockIdx.x) * kFewAtOnce + lane;
  const int64_t segment = at / call.columns;
  State state = call.op.identity();
  uint32_t length = 0;
  if (at < size) {
    for (int part = slice; part < call.parts; part += kParts * kSlices) {
      State some[kParts];
#pragma unroll
      for (int p = 0; p < kParts; ++p)
        if (part + p * kSlices < call.parts) some[p] = call.partial[(part + p * kSlices) * size + at];
#pragma unroll
      for (int p = 0; p < kParts; ++p)
        if (part + p * kSlices < call.parts) call.op.join(state, some[p]);
    }
    if (call.counts)
      for (int part = slice; part < call.parts; part += kSlices)
        length += call.counts[int64_t(part) * call.segments + segment];
  }
  states[slice][lane] = state;
  lengths[slice][lane] = length;
  __syncthreads();
  if (slice > 0 || at >= size) return;
  for (int s = 1; s < kSlices; ++s) {
    call.op.join(state, states[s][lane]);
    length += lengths[s][lane];
  }
  const State total[1] = {state};
  call.op.template store<1>(segment, at - segment * call.columns, call.counts ? length : call.op.seen(state), total);
}

// ---------------------------------------------------------------------------------------------------

template <template <class> class Call, class Op>
Call<Op> segment_parts_call(const SegmentProblem &problem, const SegmentView &input, const SegmentIndices &ids,
                            const Op &op, bool counts, const SegmentSpace &space) {
  Call<Op> call = {};
  call.op = op;
  call.input = input;
  call.ids = ids;
  call.rows = problem.rows;
  call.columns = problem.columns;
  call.segments = int(problem.segments);
  call.across = space.few.across;
  call.parts = space.few.parts;
  call.partial = reinterpret_cast<typename Op::State *>(space.partial);
  call.counts = counts ? space.counts : nullptr;
  return call;
}

template <class Op>
void segment_launch_join(const SegmentPartsCall<Op> &call, Stream stream) {
  launch(segment_parts_join<Op>, {ceil_div(call.segments * call.columns, kFewAtOnce), kFewThreads, 0, true}, stream,
         call);
}

// As segment_reduce, where the space has few segments.
template <class Op>
void segment_reduce_few(const SegmentProblem &problem, const SegmentView &input, const SegmentIndices &ids,
                        const Op &op, bool counts, const SegmentSpace &space, Stream stream) {
  auto call = segment_parts_call<SegmentFewCall>(problem, input, ids, op, counts, space);
  call.tiles = space.few.tiles;
  call.paired = segment_aligned(input, 2, sizeof(typename Op::Element));
  const auto kernel = space.few.vector == 2 ? segment_few<Op, 2> : segment_few<Op, 1>;
  const size_t shared = segment_few_bytes(problem, sizeof(typename Op::State), space.few.vector);
  segment_allow_shared(reinterpret_cast<const void *>(kernel), shared);
  launch(kernel, {int64_t(call.parts) * call.tiles, kFewThreads, shared}, stream, call);
  segment_launch_join<Op>(call, stream);
}

// The same, where it has shared cells. What is `zeroed`, if it has data, is all zeros before anything is stored.
template <class Op>
void segment_reduce_shared(const SegmentProblem &problem, const SegmentView &input, const SegmentIndices &ids,
                           const Op &op, const SegmentView &zeroed, const SegmentSpace &space, Stream stream) {
  constexpr int kBytes = sizeof(typename Op::Element);
  auto call = segment_parts_call<SegmentSharedCall>(problem, input, ids, op, false, space);
  call.part = ceil_div(problem.rows, int64_t(call.parts));
  if (problem.kind == SegmentKind::min) call.signs = kBytes == 2 ? 0x80008000u : 0x80000000u;
  call.whole = segment_aligned(input, 16 / kBytes, kBytes);
  call.zeroed = zeroed;
  const int stream_rows = call.whole && call.input.row == problem.columns ? space.few.stream_rows : 0;
  const auto run = [&](auto kernel) {
    const size_t shared = segment_shared_bytes(problem, Op::kRows) + size_t(segment_stream_bytes(stream_rows));
    segment_allow_shared(reinterpret_cast<const void *>(kernel), shared);
    launch(kernel, {call.parts, kSharedThreads, shared}, stream, call);
  };
  const auto choose = [&](auto lanes) {
    constexpr SegmentLanes kLanes = decltype(lanes)::value;
    if (stream_rows == 0) return run(segment_shared<Op, kLanes, 0>);
    if constexpr (kBytes == 2) {
      if (stream_rows == kStreamMany) return run(segment_shared<Op, kLanes, kStreamMany>);
    }
    run(segment_shared<Op, kLanes, kStreamFew>);
  };
  if constexpr (kBytes == 4) {
    choose(std::integral_constant<SegmentLanes, SegmentLanes::float32>());
  } else if (problem.dtype == DTypeOf<bfloat16>::value) {
    choose(std::integral_constant<SegmentLanes, SegmentLanes::bfloat16>());
  } else {
    choose(std::integral_constant<SegmentLanes, SegmentLanes::float16>());
  }
  segment_launch_join<Op>(call, stream);
}

// The same, where it has cells of any kind.
template <class Op>
void segment_reduce_cells(const SegmentProblem &problem, const SegmentView &input, const SegmentIndices &ids,
                          const Op &op, bool counts, const SegmentSpace &space, Stream stream) {
  if (space.cells == SegmentCells::few) return segment_reduce_few(problem, input, ids, op, counts, space, stream);
  if constexpr (requires { op.order; }) {
    if (space.cells == SegmentCells::shared) return segment_reduce_shared(problem, input, ids, op, {}, space, stream);
  }
  if (space.cells == SegmentCells::runs) {
    segment_reduce_runs(problem, input, ids, op, space, stream);
  } else {
    segment_reduce_buckets(problem, input, ids, op, space, stream);
  }
}

}  // namespace baracuda
