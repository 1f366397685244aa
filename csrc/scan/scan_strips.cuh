// SPDX-License-Identifier: Apache-2.0
// Scans along an axis that isn't the one with the shortest steps, of so many columns that blocks need not share them:
// a block goes along a strip of 32 x kColumns of them, from end to end, its warps taking kLines lines in turn. A ring
// of stages in shared memory keeps each warp's next lines on their way. The value goes from warp to warp.
#pragma once

#include "runtime/gate.cuh"
#include "scan/scan_columns.cuh"

namespace baracuda::scan {

// Has a value computed before what follows.
template <class V>
__device__ __forceinline__ void compute_now(V &value) {
  Words<V> words = to_words(value);
#pragma unroll
  for (int i = 0; i < Words<V>::count; ++i) asm volatile("" : "+r"(words.word[i]));
  value = from_words<V>(words);
}

template <class Op, int kColumns, int kLines, int kWarps, int kStages>
struct StripShape {
  static constexpr int kInputs = Op::Inputs::size;
  static constexpr int kSize = Bytes<typename Op::Inputs>::widest();
  static constexpr int kLineBytes = kWarp * kColumns * kSize;
  static constexpr int kInputBytes = kLines * kLineBytes;
  // With the line behind the last one, of the last input.
  static constexpr int kStageBytes = kInputs * kInputBytes + (Op::kNeighbour ? kLineBytes : 0);
  static constexpr size_t kRingBytes = size_t(kWarps) * kStages * kStageBytes;
  // What goes from warp to warp.
  struct Control {
    typename Op::Value carries[kWarps][kColumns][kWarp];  // before each warp's lines
    uint64_t gates[kWarps];                               // which open when they are there
  };
  static constexpr size_t kControlBytes = sizeof(Control);
  // Pieces of sixteen bytes, one for each lane.
  static constexpr int kPieceColumns = 16 / kSize;
  static constexpr int kPiecesOfLine = kLineBytes / 16;
  static constexpr int kLinesAtOnce = kWarp / kPiecesOfLine;
  static_assert(Bytes<typename Op::Inputs>::all(kSize) && kWarp % kPiecesOfLine == 0 && kLines % kLinesAtOnce == 0);
};

template <class Op, int kColumns, int kLines, int kWarps, int kStages, int kBlocks>
__global__ void __launch_bounds__(kWarps *kWarp, kBlocks)
    scan_strips(const __grid_constant__ Op op, const __grid_constant__ Geometry g,
                const __grid_constant__ ColumnFinder finder) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using S = StripShape<Op, kColumns, kLines, kWarps, kStages>;
  using Value = typename Op::Value;
  constexpr int kInputs = S::kInputs;
  constexpr int kLast = kInputs - 1;
  constexpr int kRound = kWarps * kLines;
  extern __shared__ __align__(16) std::byte strip_bytes[];
  __shared__ typename S::Control control;
  const int lane = int(threadIdx.x) % kWarp;
  const int warp = int(threadIdx.x) / kWarp;
  std::byte *ring = strip_bytes + size_t(warp) * kStages * S::kStageBytes;
  const int64_t strip = int64_t(blockIdx.x) * (kColumns * kWarp);

  // A lane copies the same piece of every kLinesAtOnce-th line.
  const int piece_line = lane / S::kPiecesOfLine;
  const std::byte *from[kInputs];
  {
    const int64_t column = strip + lane % S::kPiecesOfLine * S::kPieceColumns;
    int64_t start[kInputs];
    column_offsets(g, finder, column < g.rows ? column : 0, start);
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
          if (r < kLines || piece_line == 0) copy_ahead<16>(to + k() * S::kInputBytes + r * S::kLineBytes, line);
          line += step * S::kLinesAtOnce;
        }
      } else {
        // What is read beyond the last line repeats it: it changes nothing before it.
#pragma unroll 1
        for (int r = 0; r < kCount; r += S::kLinesAtOnce)
          if (r < kLines || piece_line == 0)
            copy_ahead<16>(to + k() * S::kInputBytes + r * S::kLineBytes,
                           from[k()] + min(first + piece_line + r, g.length - 1) * step);
      }
    });
  };

  const int64_t begin = int64_t(warp) * kLines;
  wait_for_earlier_work();
#pragma unroll 1
  for (int s = 0; s < kStages - 1; ++s) {
    if (begin + s * kRound < g.length) copy_lines(s, begin + s * kRound);
    commit_copies();
  }
  if (threadIdx.x == 0) {
    // Unrolled: the sanitizer takes as many gates for granted as there are instructions that set one.
#pragma unroll
    for (int w = 0; w < kWarps; ++w) set_gate(&control.gates[w], kWarp);
  }
  __syncthreads();
  let_next_kernel_start();

  ColumnLines<Op, kColumns, kLines> columns;
  const int64_t column = strip + lane * kColumns;
  columns.there = column < g.rows;
  int64_t starts[Layout<Op>::kFound];
  column_offsets(g, finder, columns.there ? column : 0, starts);
  const auto start = [&](int k) { return starts[k]; };
  int stage = 0;
  uint32_t parity = warp == 0;
#pragma unroll 1
  for (int64_t first = begin; first < g.length; first += kRound) {
    columns.first = first;
    columns.left = g.length - first;
    wait_for_copies<kStages - 2>();
    // All lanes' pieces are there, and all have taken those from the stage before.
    __syncwarp();
    if (columns.left > int64_t(kStages - 1) * kRound)
      copy_lines(stage > 0 ? stage - 1 : kStages - 1, first + int64_t(kStages - 1) * kRound);
    commit_copies();
    for_each<kInputs>([&](auto k) {
      using T = at<k(), typename Op::Inputs>;
      const std::byte *place = ring + stage * S::kStageBytes + k() * S::kInputBytes + lane * int(kColumns * sizeof(T));
#pragma unroll
      for (int r = 0; r < kLines; ++r) held<k()>(columns.lines[r]).load(place + r * S::kLineBytes);
      if constexpr (Op::kNeighbour && k() == kLast) columns.beyond.load(place + kLines * S::kLineBytes);
    });
    stage = stage + 1 < kStages ? stage + 1 : 0;

    columns.find_next(op, g, start);
    columns.fold_all(op, g, start);
    Value value[kColumns];
    if (first == 0) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) value[j] = columns.there ? initial_value(op, g, column + j) : op.start();
    } else {
      // The other warps wait for what comes after this gate, so nothing is put off until then.
#pragma unroll
      for (int j = 0; j < kColumns; ++j) compute_now(columns.total[j]);
      pass(&control.gates[warp], parity);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) value[j] = control.carries[warp][j][lane];
    }
    parity ^= 1;
    if (columns.left > kLines) {
      const int next_warp = warp + 1 < kWarps ? warp + 1 : 0;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) control.carries[next_warp][j][lane] = op.apply(columns.total[j], value[j]);
      arrive(&control.gates[next_warp]);
    }

    const int count = columns.there ? int(min(columns.left, int64_t(kLines))) : 0;
    std::byte *to[Op::Outputs::size];
    for_each<Op::Outputs::size>([&](auto k) {
      using U = at<k(), typename Op::Outputs>;
      constexpr int slot = kInputs + k();
      to[k()] = g.data[slot] + (starts[slot] + first * g.step[slot]) * int64_t(sizeof(U));
    });
    columns.run_all(op, g, start, value, [&](int r, const auto &line) {
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
