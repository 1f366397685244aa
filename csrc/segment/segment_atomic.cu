// SPDX-License-Identifier: Apache-2.0
// Sums in whatever order rows reach their segment: for callers who don't ask for the same bits in every run.
#include <cstring>

#include "segment/segment.cuh"

namespace baracuda {
namespace {

constexpr int kRowsAtOnce = 4;

struct AtomicSpace {
  std::byte *sums;  // of 16-bit floats; others are added up where they are wanted
  uint32_t *counts;
};

AtomicSpace atomic_space(Workspace &workspace, const SegmentProblem &problem) {
  AtomicSpace space = {};
  if (problem.dtype.bits == 16)
    space.sums = workspace.take<std::byte>(problem.segments * problem.columns * int64_t(sizeof(float)));
  space.counts = workspace.take<uint32_t>(problem.segments);
  return space;
}

template <class Real>
__global__ __launch_bounds__(kSegmentThreads) void clear_sums(SegmentView sums, int64_t columns, int64_t segments,
                                                              uint32_t *counts) {
  const int64_t at = int64_t(blockIdx.x) * kSegmentThreads + threadIdx.x;
  const int64_t segment = at / columns;
  if (segment >= segments) return;
  sums.at<Real>(segment, at - segment * columns) = 0;
  if (counts && segment * columns == at) counts[segment] = 0;
}

template <class Real, int kVector>
__device__ __forceinline__ void add_all(Real *to, const Real (&value)[kVector]) {
#if __CUDA_ARCH__ >= 900
  constexpr bool kAtOnce = kVector == 4 && sizeof(Real) == 4;
#else
  constexpr bool kAtOnce = false;
#endif
  if constexpr (kAtOnce) {
    atomicAdd(reinterpret_cast<float4 *>(to), make_float4(value[0], value[1], value[2], value[3]));
  } else {
#pragma unroll
    for (int v = 0; v < kVector; ++v) atomicAdd(to + v, value[v]);
  }
}

// A group of `across` lanes for each row.
template <class T, int kVector>
__global__ __launch_bounds__(kSegmentThreads) void add_rows(SegmentView input, SegmentIndices ids, int64_t rows,
                                                            int64_t columns, int64_t segments, int across,
                                                            int lane_bits, SegmentView sums, uint32_t *counts) {
  using Real = typename SegmentReal<T>::type;
  using Pack = SegmentPack<T, kVector>;
  const int groups = kSegmentThreads >> lane_bits;
  const int lane = int(threadIdx.x) & (across - 1);
  const int64_t first = int64_t(blockIdx.x) * groups * kRowsAtOnce + (int(threadIdx.x) >> lane_bits);
  int64_t id[kRowsAtOnce];
  segment_load_ids(ids, first, groups, rows, id);
  for (int64_t column = int64_t(lane) * kVector; column < columns; column += int64_t(across) * kVector) {
    Pack pack[kRowsAtOnce];
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      if (uint64_t(id[r]) >= uint64_t(segments)) continue;
      const T *from = static_cast<const T *>(input.data) + (first + r * groups) * input.row + column * input.column;
      pack[r] = *reinterpret_cast<const Pack *>(from);
    }
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      if (uint64_t(id[r]) >= uint64_t(segments)) continue;
      Real value[kVector];
#pragma unroll
      for (int v = 0; v < kVector; ++v) value[v] = Real(pack[r].value[v]);
      add_all<Real, kVector>(static_cast<Real *>(sums.data) + id[r] * sums.row + column * sums.column, value);
      if (counts && column == 0) atomicAdd(counts + id[r], 1u);
    }
  }
}

template <class T>
__global__ __launch_bounds__(kSegmentThreads) void finish_sums(SegmentView sums, SegmentView output, int64_t columns,
                                                               int64_t segments, const uint32_t *counts, bool mean,
                                                               T empty) {
  using Real = typename SegmentReal<T>::type;
  const int64_t at = int64_t(blockIdx.x) * kSegmentThreads + threadIdx.x;
  const int64_t segment = at / columns;
  if (segment >= segments) return;
  const int64_t column = at - segment * columns;
  Real sum = sums.at<Real>(segment, column);
  if (counts) {
    const uint32_t count = counts[segment];
    if (mean) sum /= Real(count);
    output.at<T>(segment, column) = count == 0 ? empty : T(sum);
  } else {
    output.at<T>(segment, column) = T(sum);
  }
}

}  // namespace

size_t segment_atomic_bytes(const SegmentProblem &problem) {
  Workspace counter(nullptr);
  atomic_space(counter, problem);
  return counter.size();
}

void segment_add_atomically(const SegmentForward &call, std::byte *workspace, Stream stream) {
  const SegmentProblem &problem = call.problem;
  Workspace pieces(workspace);
  const AtomicSpace space = atomic_space(pieces, problem);
  const bool mean = problem.kind == SegmentKind::mean;
  uint32_t *counts = mean || call.empty_bits != 0 ? space.counts : nullptr;
  const int64_t size = problem.segments * problem.columns;
  const Grid each = {ceil_div(size, kSegmentThreads), kSegmentThreads};
  dispatch_dtype<float16, bfloat16, float, double>(problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Real = typename SegmentReal<T>::type;
    constexpr int kVector = sizeof(T) == 8 ? 2 : 4;
    const SegmentView sums = space.sums ? SegmentView{space.sums, problem.columns, 1} : call.output;
    launch(clear_sums<Real>, each, stream, sums, problem.columns, problem.segments, counts);
    const bool vectors = problem.columns % kVector == 0 && segment_aligned(call.input, kVector, sizeof(T)) &&
                         segment_aligned(sums, kVector, sizeof(Real));
    const int across = segment_across(problem.columns, vectors ? kVector : 1);
    const int lane_bits = std::countr_zero(unsigned(across));
    const Grid grid = {ceil_div(problem.rows, int64_t(kSegmentThreads >> lane_bits) * kRowsAtOnce), kSegmentThreads};
    if (problem.rows > 0)
      launch(vectors ? add_rows<T, kVector> : add_rows<T, 1>, grid, stream, call.input, call.ids, problem.rows,
             problem.columns, problem.segments, across, lane_bits, sums, counts);
    if (!counts && !space.sums) return;
    T empty;
    std::memcpy(&empty, &call.empty_bits, sizeof empty);
    launch(finish_sums<T>, each, stream, sums, call.output, problem.columns, problem.segments, counts, mean, empty);
  });
}

}  // namespace baracuda
