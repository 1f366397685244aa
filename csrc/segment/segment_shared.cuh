// SPDX-License-Identifier: Apache-2.0
// Maxima of wide rows and few segments: a block goes through its rows as they come and keeps a cell for every segment
// and column in shared memory. Rows come in any order, which makes no difference to maxima. Once a segment has had some
// rows, few elements are above their cells.
#pragma once

#include "runtime/gate.cuh"
#include "segment/segment_columns.cuh"
#include "segment/segment_lanes.cuh"

namespace baracuda {

constexpr int kSharedThreads = 1024;
constexpr int kSharedBlocks = 1;      // of a multiprocessor
constexpr int kSharedRowsAtOnce = 8;  // of a lane
// What a cell of 16-bit floats has room for beside the key.
constexpr int64_t kSharedMostRows = 1 << 16;

// Where there is room beside the cells, rows come through the copy engine: a warp's in batches, two of which are on
// their way in turns. Of 16-bit floats, which take longer to look at, a lane has more rows of a batch.
constexpr int kStreamTurns = 2;
constexpr int kStreamFew = 2;
constexpr int kStreamMany = 4;
constexpr int segment_batch_bytes(int stream_rows) { return stream_rows * 32 * 16; }
constexpr int64_t segment_stream_bytes(int stream_rows) {
  return int64_t(kSharedThreads / 32) * kStreamTurns * segment_batch_bytes(stream_rows);
}

// The key and, below it, the row of the part, the lowest of which is highest. No float has the key 0.
constexpr int segment_shared_cell(int element_bits, bool rows) { return rows && element_bits == 32 ? 8 : 4; }

inline size_t segment_shared_bytes(const SegmentProblem &problem, bool rows) {
  return size_t(problem.segments * problem.columns) * size_t(segment_shared_cell(problem.dtype.bits, rows));
}

// What those have in common that keep a cell of every segment in each of several parts of the rows.
template <class Op>
struct SegmentPartsCall {
  Op op;
  SegmentView input;
  SegmentIndices ids;
  int64_t rows;
  int64_t columns;
  int segments;
  int across;
  int parts;
  typename Op::State *partial;
  uint32_t *counts;  // NULL: states tell whether there was a row
};

template <class Op>
struct SegmentSharedCall : SegmentPartsCall<Op> {
  int64_t part;        // rows of a block
  uint32_t signs;      // of a minimum, which is a maximum of numbers with the other sign
  bool whole;          // a lane's elements can be loaded at once
  SegmentView zeroed;  // as large as the input, or without data
};

// kStreamRows: of a lane, in a batch; 0 where rows don't stream.
template <class Op, SegmentLanes kLanes, int kStreamRows>
__global__ __launch_bounds__(kSharedThreads,
                             kSharedBlocks) void segment_shared(const __grid_constant__ SegmentSharedCall<Op> call) {
  using Element = typename Op::Element;
  using State = typename Op::State;
  constexpr int kVector = 16 / sizeof(Element);
  constexpr bool kPairs = kLanes != SegmentLanes::float32;
  constexpr int kRows = kStreamRows > 0 ? kStreamRows : kSharedRowsAtOnce;
  constexpr uint32_t kNowhere = ~uint32_t(0);
  using Cell =
      std::conditional_t<segment_shared_cell(8 * sizeof(Element), Op::kRows) == 8, unsigned long long, uint32_t>;
  using Cells = SegmentPack<Cell, 16 / sizeof(Cell)>;
  using Pack = SegmentPack<Element, kVector>;
  constexpr int kInCells = 16 / sizeof(Cell);
  constexpr int kParts = kVector / kInCells;
  extern __shared__ __align__(16) uint64_t segment_memory[];
  Cells *cells = reinterpret_cast<Cells *>(segment_memory);
  const int lanes = int(call.columns) / kVector;
  const int size = call.segments * int(call.columns);
  for (int c = threadIdx.x; c < size / kInCells; c += kSharedThreads) reinterpret_cast<uint4 *>(segment_memory)[c] = {};
  const int lane = int(threadIdx.x) & (call.across - 1);
  const int beside = 32 / call.across;
  const int among = (int(threadIdx.x) & 31) / call.across;
  const int warp = int(threadIdx.x) / 32;
  // Rows are counted from the part's first.
  const int64_t begin = blockIdx.x * call.part;
  const int rows = int(max(min(call.part, call.rows - begin), int64_t(0)));
  const Element *input =
      static_cast<const Element *>(call.input.data) + begin * call.input.row + lane * kVector * call.input.column;
  const auto forget = [&](int row) {
    Element *to = static_cast<Element *>(call.zeroed.data) + (begin + row) * call.zeroed.row + lane * kVector;
    __stcs(reinterpret_cast<uint4 *>(to), uint4());
  };
  const auto add = [&](uint32_t id, const uint4 &word, int row) {
    Cells *own = cells + (id == kNowhere ? 0 : id) * uint32_t(lanes * kParts) + lane;
    const uint32_t words[4] = {word.x, word.y, word.z, word.w};
    Cell found[kVector];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t keys = segment_keys<kLanes>(words[w] ^ call.signs);
      if constexpr (kPairs) {
        const uint32_t below = Op::kRows ? uint32_t(kSharedMostRows - 1) - uint32_t(row) : 0;
        found[2 * w] = keys << 16 | below;
        found[2 * w + 1] = (keys & 0xffff0000u) | below;
      } else if constexpr (Op::kRows) {
        found[w] = Cell(keys) << 32 | ~uint32_t(row);
      } else {
        found[w] = keys;
      }
    }
    Cells known[kParts];
    bool above = false;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      known[p] = own[p * lanes];
#pragma unroll
      for (int c = 0; c < kInCells; ++c) above |= found[p * kInCells + c] > known[p].value[c];
    }
    if (!above || id == kNowhere) return;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
#pragma unroll
      for (int c = 0; c < kInCells; ++c)
        if (found[p * kInCells + c] > known[p].value[c]) atomicMax(&own[p * lanes].value[c], found[p * kInCells + c]);
    }
  };

  if constexpr (kStreamRows > 0) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    __shared__ uint64_t gates[kSharedThreads / 32][kStreamTurns];
    constexpr int kBatchBytes = segment_batch_bytes(kStreamRows);
    // No more than a warp has lanes, each of which knows the id of one.
    const int batch = kRows * beside;
    const int row_bytes = lanes * 16;
    std::byte *ring =
        reinterpret_cast<std::byte *>(segment_memory) + size * int(sizeof(Cell)) + warp * kStreamTurns * kBatchBytes;
    const std::byte *from = static_cast<const std::byte *>(call.input.data) + begin * row_bytes;
    const int own_row = int(threadIdx.x) & 31;
    const int own_bytes = among * row_bytes + min(lane, lanes - 1) * 16;
    int64_t ids[kStreamTurns];
    const auto fetch = [&](int turn, int first) {
      const int count = min(batch, rows - first);
      if (count <= 0) return;
      ids[turn] = call.ids[begin + first + min(own_row, count - 1)];
      if (own_row == 0) {
        arrive_and_announce(&gates[warp][turn], uint32_t(count * row_bytes));
        bulk_load(ring + turn * kBatchBytes, from + int64_t(first) * row_bytes, uint32_t(count * row_bytes),
                  &gates[warp][turn]);
      }
    };
    const int step = kSharedThreads / 32 * batch;
    if (own_row == 0) {
      for (int t = 0; t < kStreamTurns; ++t) set_gate(&gates[warp][t], 1);
      show_copy_engine();
    }
    __syncwarp();
#pragma unroll
    for (int t = 0; t < kStreamTurns; ++t) fetch(t, warp * batch + t * step);
    let_next_kernel_start();
    __syncthreads();
    uint32_t parity = 0;
    for (int base = warp * batch; base < rows; base += kStreamTurns * step, parity ^= 1) {
#pragma unroll
      for (int t = 0; t < kStreamTurns; ++t) {
        const int first = base + t * step;
        if (first >= rows) break;
        const bool counts = first + own_row < rows && uint64_t(ids[t]) < uint64_t(call.segments);
        const uint32_t own_id = counts ? uint32_t(ids[t]) : kNowhere;
        pass(&gates[warp][t], parity);
        uint4 word[kRows];
        uint32_t id[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          id[r] = __shfl_sync(~0u, own_id, r * beside + among);
          if (lane >= lanes) id[r] = kNowhere;
          word[r] = *reinterpret_cast<const uint4 *>(ring + t * kBatchBytes + r * beside * row_bytes + own_bytes);
        }
        __syncwarp();
        fetch(t, first + kStreamTurns * step);
        if (call.zeroed.data) {
#pragma unroll
          for (int r = 0; r < kRows; ++r)
            if (lane < lanes && first + r * beside + among < rows) forget(first + r * beside + among);
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) add(id[r], word[r], first + r * beside + among);
      }
    }
#endif
  } else {
    let_next_kernel_start();
    __syncthreads();
    const int count = lane < lanes ? rows : 0;
    const int step = kSharedThreads / 32 * kRows * beside;
    for (int first = warp * kRows * beside + among; first < count; first += step) {
      const auto row = [&](int r) { return first + r * beside; };
      uint4 word[kRows];
      if (call.whole) {
#pragma unroll
        for (int r = 0; r < kRows; ++r)
          if (row(r) < count) word[r] = *reinterpret_cast<const uint4 *>(input + row(r) * call.input.row);
      } else {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          Pack pack = {};
#pragma unroll
          for (int v = 0; v < kVector; ++v)
            if (row(r) < count) pack.value[v] = input[row(r) * call.input.row + v * call.input.column];
          word[r] = bit_cast<uint4>(pack);
        }
      }
      uint32_t id[kRows];
      const auto load_ids = [&](const auto *ids) {
        ids += begin * call.ids.stride;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const int64_t given = ids[min(row(r), count - 1) * call.ids.stride];
          id[r] = row(r) < count && uint64_t(given) < uint64_t(call.segments) ? uint32_t(given) : kNowhere;
        }
      };
      if (call.ids.wide) {
        load_ids(static_cast<const int64_t *>(call.ids.data));
      } else {
        load_ids(static_cast<const int32_t *>(call.ids.data));
      }
      if (call.zeroed.data) {
#pragma unroll
        for (int r = 0; r < kRows; ++r)
          if (row(r) < count) forget(row(r));
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if (id[r] != kNowhere) add(id[r], word[r], row(r));
    }
  }
  __syncthreads();
  State *partial = call.partial + int64_t(blockIdx.x) * size;
  for (int c = threadIdx.x; c < size; c += kSharedThreads) {
    const int segment = c / int(call.columns);
    const int column = c - segment * int(call.columns);
    const int v = column % kVector;
    const Cell cell = cells[(segment * kParts + v / kInCells) * lanes + column / kVector].value[v % kInCells];
    uint32_t key = uint32_t(cell >> (8 * (sizeof(Cell) - (kPairs ? 2 : 4))));
    if (kPairs && key == 0xffff) key = ~0u;
    if constexpr (!Op::kRows) {
      partial[c] = key;
    } else if constexpr (kPairs) {
      partial[c] = {key, cell == 0 ? ~0u : uint32_t(begin + (kSharedMostRows - 1) - (cell & 0xffff))};
    } else {
      partial[c] = {key, cell == 0 ? ~0u : uint32_t(begin + ~uint32_t(cell))};
    }
  }
}

}  // namespace baracuda
