// SPDX-License-Identifier: Apache-2.0
// RoI-pooling forward on the GPU. The map is turned once, so that its channels lie side by side, and a lane takes a few
// of them; where that doesn't pay or fit, a thread takes an output.
#include "image/roi_pool.h"

#include <algorithm>

#include "image/roi_turn.cuh"
#include "runtime/workspace.h"

namespace baracuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kLanes;

// What is worked out once for each RoI.
template <class Real>
struct alignas(16) PoolHead {
  int32_t roi;
  RoiPoolGeometry<Real> geometry;
};

// A warp for each RoI; the largest first, where there are few enough to compare all with all.
template <class Real>
__global__ void __launch_bounds__(kThreads) roi_pool_list(RoiProblem problem, RoiRows rois, PoolHead<Real> *heads) {
  wait_for_earlier_work();
  let_next_kernel_start();
  const int64_t r = int64_t(blockIdx.x) * kWarps + threadIdx.x / kLanes;
  if (r >= problem.rois) return;
  const int lane = int(threadIdx.x % kLanes);
  int32_t before = int32_t(r);
  if (problem.rois <= kMostRanked) {
    before = 0;
    const float own = roi_area(problem, rois, r);
    for (int64_t other = lane; other < problem.rois; other += kLanes) {
      const float area = roi_area(problem, rois, other);
      before += int32_t(area > own || (area == own && other < r));
    }
    before = __reduce_add_sync(kAllLanes, before);
  }
  if (lane == 0) heads[before] = {int32_t(r), roi_pool_geometry<Real>(problem, rois, r)};
}

template <class T>
constexpr int kPoolVector = sizeof(T) == sizeof(double) ? 2 : 4;

template <class T>
struct alignas(sizeof(T) * kPoolVector<T>) PoolPack {
  T value[kPoolVector<T>];
};

template <class Real>
struct PoolLinesCall {
  RoiPoolForward forward;
  const PoolHead<Real> *heads;
  Divider by_pw;
  int32_t staged_bins;
  bool channels_last;  // of the output
  int64_t tasks;
};

// Lanes are channels, kPoolVector of them each. A block gathers some bins of all of its channels before it writes
// them.
template <class T>
__global__ void __launch_bounds__(kThreads)
    roi_pool_lines(const __grid_constant__ PoolLinesCall<typename ImageReal<T>::type> call) {
  using Real = typename ImageReal<T>::type;
  constexpr int kVector = kPoolVector<T>;
  extern __shared__ __align__(16) char shared[];
  const RoiProblem &problem = call.forward.problem;
  const ImageView &input = call.forward.input;
  const ImageView &output = call.forward.output;
  const RoiIndices &argmax = call.forward.argmax;
  const int lane = int(threadIdx.x % kLanes);
  const int warp = int(threadIdx.x / kLanes);
  const int32_t bins = problem.pooled_h * problem.pooled_w;
  int32_t *const staged_index = reinterpret_cast<int32_t *>(shared);
  T *const staged = reinterpret_cast<T *>(staged_index + kLanes * kVector * call.staged_bins);
  wait_for_earlier_work();
  for (int64_t task = blockIdx.x; task < call.tasks; task += gridDim.x) {
    const PoolHead<Real> head = call.heads[task % problem.rois];
    const int64_t c0 = task / problem.rois * kLanes * kVector;
    const int64_t c = c0 + lane * kVector;
    const int32_t channels = int32_t(min(problem.c - c0, int64_t(kLanes) * kVector));
    const T *const from = static_cast<const T *>(input.data) + input.plane(max(head.geometry.batch, 0), c);
    for (int32_t first = 0; first < bins; first += call.staged_bins) {
      const int32_t count = min(bins - first, call.staged_bins);
      if (c < problem.c) {
        for (int32_t b = first + warp; b < first + count; b += kWarps) {
          const int32_t ph = int32_t(call.by_pw.divide(uint32_t(b)));
          const int32_t pw = b - ph * problem.pooled_w;
          RoiCells rows = {0, 0};
          RoiCells columns = {0, 0};
          if (head.geometry.batch >= 0) {
            rows = head.geometry.y.reach(ph);
            columns = head.geometry.x.reach(pw);
          }
          const bool empty = rows.count == 0 || columns.count == 0;
          Real best[kVector];
          int32_t index[kVector];
#pragma unroll
          for (int v = 0; v < kVector; ++v) {
            best[v] = empty ? Real(0) : -Real(INFINITY);
            index[v] = empty ? -1 : rows.first * problem.w + columns.first;
          }
          for (int32_t row = rows.first; row < rows.first + rows.count; ++row) {
            const T *const line = from + row * input.row;
#pragma unroll 4
            for (int32_t column = columns.first; column < columns.first + columns.count; ++column) {
              const PoolPack<T> pack = *reinterpret_cast<const PoolPack<T> *>(line + column * input.column);
#pragma unroll
              for (int v = 0; v < kVector; ++v) {
                const Real number = Real(pack.value[v]);
                if (!(number <= best[v]) && best[v] == best[v]) {
                  best[v] = number;
                  index[v] = row * problem.w + column;
                }
              }
            }
          }
#pragma unroll
          for (int v = 0; v < kVector; ++v) {
            const int32_t at = (lane * kVector + v) * call.staged_bins + b - first;
            // A NaN's bits need not outlive its way through a wider type.
            if (sizeof(T) == sizeof(Real) || best[v] == best[v]) {
              staged[at] = T(best[v]);
            } else {
              staged[at] = from[v + input.cell(index[v] / problem.w, index[v] % problem.w)];
            }
            staged_index[at] = index[v];
          }
        }
      }
      __syncthreads();
      const int32_t inner = call.channels_last ? channels : count;
      const SmallDivider by_inner(inner);
      for (int32_t i = int32_t(threadIdx.x); i < channels * count; i += kThreads) {
        const int32_t outer = by_inner.divide(i);
        const int32_t channel = call.channels_last ? i - outer * inner : outer;
        const int32_t b = call.channels_last ? outer : i - outer * inner;
        const int32_t ph = int32_t(call.by_pw.divide(uint32_t(first + b)));
        const int32_t pw = first + b - ph * problem.pooled_w;
        const int32_t at = channel * call.staged_bins + b;
        static_cast<T *>(output.data)[output.plane(head.roi, c0 + channel) + output.cell(ph, pw)] = staged[at];
        if (argmax.view.data)
          argmax.set(argmax.view.plane(head.roi, c0 + channel) + argmax.view.cell(ph, pw), staged_index[at]);
      }
      __syncthreads();
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) roi_pool_any(RoiPoolForward call, int64_t outputs, bool channels_last) {
  using Real = typename ImageReal<T>::type;
  const RoiProblem &problem = call.problem;
  const int64_t bins = int64_t(problem.pooled_h) * problem.pooled_w;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < outputs; i += int64_t(gridDim.x) * kThreads) {
    const int64_t r = i / (problem.c * bins);
    const int64_t within = i - r * problem.c * bins;
    const int64_t c = channels_last ? within % problem.c : within / bins;
    const int32_t bin = int32_t(channels_last ? within / problem.c : within % bins);
    roi_pool_output<T, Real>(call, roi_pool_geometry<Real>(problem, call.rois, r), r, c, bin / problem.pooled_w,
                             bin % problem.pooled_w);
  }
}

template <class T>
struct PoolSpace {
  PoolHead<typename ImageReal<T>::type> *heads = nullptr;
  T *turned = nullptr;
};

template <class T>
PoolSpace<T> pool_space(const RoiProblem &problem, Workspace &space) {
  PoolSpace<T> pool;
  if (!can_turn(problem)) return pool;
  // The cells that are turned in the time that an output saves.
  constexpr double kTurnedCells = 4;
  if (kTurnedCells * double(problem.rois) * problem.pooled_h * problem.pooled_w <
      double(problem.n) * problem.h * problem.w)
    return pool;
  pool.heads = space.take<PoolHead<typename ImageReal<T>::type>>(problem.rois);
  pool.turned = space.take<T>(turned_elements<T>(problem));
  return pool;
}

template <class T>
void forward(const RoiPoolForward &call, Stream stream) {
  const RoiProblem &problem = call.problem;
  const int64_t outputs = problem.rois * problem.c * problem.pooled_h * problem.pooled_w;
  const bool channels_last = call.input.channel == 1 && problem.c > 1;
  Workspace workspace(call.workspace);
  const PoolSpace<T> space = pool_space<T>(problem, workspace);
  if (!space.heads) {
    launch(roi_pool_any<T>, {std::min(ceil_div(outputs, kThreads), kMostBlocks), kThreads}, stream, call, outputs,
           channels_last);
    return;
  }
  constexpr int kVector = kPoolVector<T>;
  const ImageView &input = call.input;
  const auto whole = [](int64_t elements) { return elements % kVector == 0; };
  const bool direct = channels_last && reinterpret_cast<uintptr_t>(input.data) % (kVector * sizeof(T)) == 0 &&
                      whole(problem.c) && whole(input.batch) && whole(input.row) && whole(input.column);
  launch(roi_pool_list<typename ImageReal<T>::type>, {ceil_div(problem.rois, kWarps), kThreads, 0, true}, stream,
         problem, call.rois, space.heads);
  PoolLinesCall<typename ImageReal<T>::type> lines = {};
  lines.forward = call;
  if (!direct) {
    lines.forward.input = turned_view<T>(problem, space.turned);
    turn_map<T>(problem, call.input, lines.forward.input, stream);
  }
  lines.heads = space.heads;
  lines.by_pw = Divider(uint32_t(problem.pooled_w));
  constexpr int32_t kOutputBytes = kLanes * kVector * int32_t(sizeof(T) + sizeof(int32_t));
  constexpr int32_t kMostStaged = 50 * 1024;
  const int64_t bins = int64_t(problem.pooled_h) * problem.pooled_w;
  lines.staged_bins = int32_t(std::min(bins, int64_t(kMostStaged / kOutputBytes)));
  lines.channels_last = call.output.channel == 1 && problem.c > 1;
  lines.tasks = problem.rois * ceil_div(problem.c, kLanes * kVector);
  const size_t shared = size_t(lines.staged_bins) * kOutputBytes;
  allow_roi_shared(roi_pool_lines<T>, shared);
  launch(roi_pool_lines<T>, {std::min(lines.tasks, kMostBlocks), kThreads, shared, true}, stream, lines);
}

}  // namespace

void roi_pool_cuda(const RoiPoolForward &call, Stream stream) {
  dispatch_dtype<float16, bfloat16, float, double>(
      call.dtype, [&](auto tag) { forward<typename decltype(tag)::type>(call, stream); });
}

size_t roi_pool_workspace(const RoiProblem &problem, DLDataType dtype) {
  Workspace space(nullptr);
  dispatch_dtype<float16, bfloat16, float, double>(
      dtype, [&](auto tag) { pool_space<typename decltype(tag)::type>(problem, space); });
  return space.size();
}

}  // namespace baracuda
