// SPDX-License-Identifier: Apache-2.0
// Scans along an axis that isn't the one with the shortest steps, of so many columns that blocks need not share them:
// a block goes along a strip of 32 x kColumns of them, from end to end, its warps taking kLines lines in turn. A ring
// of stages in shared memory keeps each warp's next lines on their way. The value goes from warp to warp.
#pragma once

#include "runtime/gate.cuh"
#include "scan/scan_columns.cuh"

namespace baracuda::scan {

__device__ __forceinline__ void copy_piece(std::byte *to, const std::byte *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void commit_pieces() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait_for_pieces() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

template <class Op, int kColumns, int kLines, int kWarps, int kStages>
struct StripShape {
  static constexpr int kInputs = Op::Inputs::size;
  static constexpr int kSize = Bytes<typename Op::Inputs>::widest();
  static constexpr int kPieceColumns = 16 / kSize;
  static constexpr int kLineBytes = kWarp * kColumns * kSize;
  static constexpr int kInputBytes = kLines * kLineBytes;
  // With the line behind the last one, of the last input.
  static constexpr int kStageBytes = kInputs * kInputBytes + (Op::kNeighbour ? kLineBytes : 0);
  // Of sixteen bytes, one for each lane.
  static constexpr int kPiecesOfLine = kLineBytes / 16;
  static constexpr int kLinesAtOnce = kWarp / kPiecesOfLine;
  static constexpr size_t kSharedBytes = size_t(kWarps) * kStages * kStageBytes;
  static_assert(Bytes<typename Op::Inputs>::all(kSize) && kWarp % kPiecesOfLine == 0 && kLines % kLinesAtOnce == 0);
};

template <class Op, int kColumns, int kLines, int kWarps, int kStages, int kBlocks>
__global__ void __launch_bounds__(kWarps *kWarp, kBlocks)
    scan_strips(const __grid_constant__ Op op, const __grid_constant__ Geometry g) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using S = StripShape<Op, kColumns, kLines, kWarps, kStages>;
  using Value = typename Op::Value;
  constexpr int kInputs = S::kInputs;
  constexpr int kLast = kInputs - 1;
  constexpr int kTurn = kWarps * kLines;
  extern __shared__ __align__(16) std::byte ring_bytes[];
  // Of each warp: the values before its lines, and the gate that opens when they are there.
  __shared__ Value carries[kWarps][kColumns][kWarp];
  __shared__ uint64_t gates[kWarps];
  const int lane = int(threadIdx.x) % kWarp;
  const int warp = int(threadIdx.x) / kWarp;
  std::byte *ring = ring_bytes + size_t(warp) * kStages * S::kStageBytes;
  const int64_t strip = int64_t(blockIdx.x) * (kColumns * kWarp);

  // A lane copies the same piece of every kLinesAtOnce-th line.
  const int piece_line = lane / S::kPiecesOfLine;
  const std::byte *from[kInputs];
  {
    const int64_t column = strip + lane % S::kPiecesOfLine * S::kPieceColumns;
    int64_t start[kInputs];
    row_offsets(g, column < g.rows ? column : 0, 0, start);
#pragma unroll
    for (int k = 0; k < kInputs; ++k) from[k] = g.data[k] + start[k] * S::kSize;
  }
  const auto copy_lines = [&](int stage, int64_t first) {
    std::byte *to = ring + stage * S::kStageBytes + lane * 16;
    const bool whole = g.length - first > kLines;
    for_each<kInputs>([&](auto k) {
      constexpr int kCount = kLines + (Op::kNeighbour && k() == kLast);
      const int64_t step = g.step[k()] * S::kSize;
      if (whole) {
        const std::byte *line = from[k()] + (first + piece_line) * step;
#pragma unroll
        for (int r = 0; r < kCount; r += S::kLinesAtOnce) {
          if (r < kLines || piece_line == 0) copy_piece(to + k() * S::kInputBytes + r * S::kLineBytes, line);
          line += step * S::kLinesAtOnce;
        }
      } else {
        // What is read beyond the last line repeats it: it changes nothing before it.
#pragma unroll 1
        for (int r = 0; r < kCount; r += S::kLinesAtOnce)
          if (r < kLines || piece_line == 0)
            copy_piece(to + k() * S::kInputBytes + r * S::kLineBytes,
                       from[k()] + min(first + piece_line + r, g.length - 1) * step);
      }
    });
  };

  ColumnLines<Op, kColumns, kLines> held_lines;
  held_lines.column = strip + lane * kColumns;
  held_lines.there = held_lines.column < g.rows;
  int64_t starts[Layout<Op>::kLines];
  row_offsets(g, held_lines.there ? held_lines.column : 0, 0, starts);
  const auto start = [&](int k) { return starts[k]; };

  if (kWarps > 1) {
    if (threadIdx.x < kWarps) set_gate(&gates[threadIdx.x], kWarp);
    __syncthreads();
  }
  wait_for_earlier_work();
  let_next_kernel_start();
  const int64_t begin = int64_t(warp) * kLines;
#pragma unroll 1
  for (int s = 0; s < kStages; ++s) {
    if (begin + s * kTurn < g.length) copy_lines(s, begin + s * kTurn);
    commit_pieces();
  }
  Value carry[kColumns];
#pragma unroll
  for (int j = 0; j < kColumns; ++j)
    carry[j] = held_lines.there && warp == 0 ? initial_value(op, g, held_lines.column + j) : op.start();

  int stage = 0;
  uint32_t parity = warp == 0;
#pragma unroll 1
  for (int64_t first = begin; first < g.length; first += kTurn) {
    held_lines.first = first;
    held_lines.left = g.length - first;
    wait_for_pieces<kStages - 1>();
    __syncwarp();
    for_each<kInputs>([&](auto k) {
      using T = at<k(), typename Op::Inputs>;
      const std::byte *place = ring + stage * S::kStageBytes + k() * S::kInputBytes + lane * int(kColumns * sizeof(T));
#pragma unroll
      for (int r = 0; r < kLines; ++r) held<k()>(held_lines.lines[r]).load(place + r * S::kLineBytes);
      if constexpr (Op::kNeighbour && k() == kLast) held_lines.beyond.load(place + kLines * S::kLineBytes);
    });
    __syncwarp();
    if (held_lines.left > int64_t(kStages) * kTurn) copy_lines(stage, first + int64_t(kStages) * kTurn);
    commit_pieces();
    stage = stage + 1 < kStages ? stage + 1 : 0;

    held_lines.find_next(op, g);
    held_lines.fold_all(op, g, start);
    Value value[kColumns];
    if (kWarps == 1 || first == 0) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) value[j] = carry[j];
    } else {
      pass(&gates[warp], parity);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) value[j] = carries[warp][j][lane];
    }
    parity ^= 1;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) carry[j] = op.apply(held_lines.total[j], value[j]);
    if (kWarps > 1) {
      const int to = warp + 1 < kWarps ? warp + 1 : 0;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) carries[to][j][lane] = carry[j];
      arrive(&gates[to]);
    }
    const int count = held_lines.there ? int(min(held_lines.left, int64_t(kLines))) : 0;
    std::byte *to[Op::Outputs::size];
    for_each<Op::Outputs::size>([&](auto k) {
      using U = at<k(), typename Op::Outputs>;
      constexpr int slot = kInputs + k();
      to[k()] = g.data[slot] + (starts[slot] + first * g.step[slot]) * int64_t(sizeof(U));
    });
    held_lines.run_all(op, g, start, value, [&](int r, const auto &line) {
      for_each<Op::Outputs::size>([&](auto k) {
        using U = at<k(), typename Op::Outputs>;
        constexpr int slot = kInputs + k();
        if (r < count && (Op::Outputs::size == 1 || g.data[slot])) held<k()>(line).store(to[k()]);
        to[k()] += g.step[slot] * int64_t(sizeof(U));
      });
    });
  }
#endif
}

}  // namespace baracuda::scan
