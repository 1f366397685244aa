// SPDX-License-Identifier: Apache-2.0
// Sums of few columns in whatever order rows reach their segment: for callers who don't ask for the same bits.
#include "segment/segment.cuh"

namespace baracuda {
namespace {

constexpr int kRowsAtOnce = 4;

template <class T, class Real>
__global__ __launch_bounds__(kSegmentThreads) void add_rows(SegmentView input, SegmentIndices ids, int64_t rows,
                                                            int columns, int64_t segments, Real *sums,
                                                            uint32_t *counts) {
  const int64_t first = int64_t(blockIdx.x) * kSegmentThreads * kRowsAtOnce + threadIdx.x;
  int64_t id[kRowsAtOnce];
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) {
    const int64_t row = first + r * kSegmentThreads;
    id[r] = row < rows ? ids[row] : -1;
  }
  for (int column = 0; column < columns; ++column) {
    Real value[kRowsAtOnce];
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r)
      if (uint64_t(id[r]) < uint64_t(segments)) value[r] = Real(input.at<const T>(first + r * kSegmentThreads, column));
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r)
      if (uint64_t(id[r]) < uint64_t(segments)) atomicAdd(sums + id[r] * columns + column, value[r]);
  }
  if (!counts) return;
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r)
    if (uint64_t(id[r]) < uint64_t(segments)) atomicAdd(counts + id[r], 1u);
}

template <class T, class Real>
__global__ __launch_bounds__(kSegmentThreads) void finish_sums(SegmentView output, int columns, int64_t segments,
                                                               const Real *sums, const uint32_t *counts, bool mean,
                                                               T empty) {
  const int64_t at = int64_t(blockIdx.x) * kSegmentThreads + threadIdx.x;
  const int64_t segment = at / columns;
  if (segment >= segments) return;
  T value = T(sums[at]);
  if (counts) {
    const uint32_t count = counts[segment];
    if (mean) value = T(sums[at] / Real(count));
    if (count == 0) value = empty;
  }
  output.at<T>(segment, at - segment * columns) = value;
}

}  // namespace

bool segment_adds_atomically(const SegmentProblem &problem) {
  // Fewer segments would wait for one another, and longer rows are faster when sorted.
  constexpr int64_t kMostColumns = 4;
  constexpr int64_t kFewestSegments = 4096;
  const bool floats = problem.dtype.code != kDLInt && problem.dtype.code != kDLUInt;
  return floats && (problem.kind == SegmentKind::sum || problem.kind == SegmentKind::mean) &&
         problem.ids == SegmentIds::unsorted && problem.columns > 0 && problem.columns <= kMostColumns &&
         problem.segments >= kFewestSegments && problem.rows <= kSegmentMostRows;
}

namespace {

struct AtomicSpace {
  std::byte *sums;
  uint32_t *counts;
};

AtomicSpace atomic_space(Workspace &workspace, const SegmentProblem &problem) {
  const int64_t size = problem.dtype.bits == 64 ? sizeof(double) : sizeof(float);
  AtomicSpace space = {};
  space.sums = workspace.take<std::byte>(problem.segments * problem.columns * size);
  space.counts = workspace.take<uint32_t>(problem.segments);
  return space;
}

}  // namespace

size_t segment_atomic_space(const SegmentProblem &problem) {
  Workspace counter(nullptr);
  atomic_space(counter, problem);
  return counter.size();
}

void segment_add_atomically(const SegmentForward &call, std::byte *workspace, Stream stream) {
  const SegmentProblem &problem = call.problem;
  Workspace pieces(workspace);
  const AtomicSpace space = atomic_space(pieces, problem);
  check_cuda(cudaMemsetAsync(workspace, 0, pieces.size(), static_cast<cudaStream_t>(stream)), "cudaMemsetAsync");
  const bool mean = problem.kind == SegmentKind::mean;
  uint32_t *counts = mean || call.empty_bits != 0 ? space.counts : nullptr;
  dispatch_dtype<float16, bfloat16, float, double>(problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Real = typename SegmentReal<T>::type;
    Real *sums = reinterpret_cast<Real *>(space.sums);
    const int columns = int(problem.columns);
    T empty;
    memcpy(&empty, &call.empty_bits, sizeof empty);
    if (problem.rows > 0)
      launch(add_rows<T, Real>, {ceil_div(problem.rows, kSegmentThreads * kRowsAtOnce), kSegmentThreads}, stream,
             call.input, call.ids, problem.rows, columns, problem.segments, sums, counts);
    launch(finish_sums<T, Real>, {ceil_div(problem.segments * columns, kSegmentThreads), kSegmentThreads}, stream,
           call.output, columns, problem.segments, sums, counts, mean, empty);
  });
}

}  // namespace baracuda
