// SPDX-License-Identifier: Apache-2.0
// RoI-pooling backward on the GPU, by gather, with the sums in shared memory. A block owns some cells of a channel and
// reads the bins of the RoIs over them, a thread a bin; of those that name the same cell the first adds first. With
// channels last a warp owns a tile of cells of 32 channels, a lane a channel, and goes through the RoIs in their order.
#include <algorithm>

#include "image/roi_align.cuh"
#include "image/roi_pool.h"

namespace baracuda {
namespace {

constexpr int kPartThreads = 512;
constexpr int kPartWarps = kPartThreads / kLanes;
// Sums of a block, in bytes; two blocks run beside each other.
template <class Real>
constexpr int32_t kPartBytes = sizeof(Real) == sizeof(double) ? 64 * 1024 : 80 * 1024;
// Cells share them, at the price of more turns.
constexpr uint32_t kClaims = 2048;
constexpr uint32_t kOrders = kPartThreads;
constexpr uint32_t kMostTurns = UINT32_MAX / kOrders;
constexpr int64_t kMostPartBins = 1 << 20;

// A RoI over a block's cells.
template <class Real>
struct PoolItem {
  int32_t roi;
  Real y_start, y_bin;
  Real x_start, x_bin;
};

struct PoolPartsCall {
  RoiPoolBackward backward;
  Divider by_w;
  Divider by_pw;
  Divider by_bins;
  Divider by_columns;
  int32_t rows;
  int32_t columns;
  int32_t down;
  int32_t across;
  int64_t tasks;
};

// A bin of a listed RoI: the cell that it names, and its gradient.
template <class T>
struct PoolBin {
  int32_t item;
  int32_t bin;
  int64_t named;  // -1: there is none
  T value;
};

// A sum takes one bin in a turn, the first of those that wait for it.
template <class T>
__global__ void __launch_bounds__(kPartThreads, 2) roi_pool_parts(const __grid_constant__ PoolPartsCall call) {
  using Real = typename ImageReal<T>::type;
  extern __shared__ __align__(16) char shared[];
  __shared__ PoolItem<Real> items[kPartThreads];
  __shared__ uint32_t claims[kClaims];
  __shared__ int32_t counts[kPartWarps];
  Real *const sums = reinterpret_cast<Real *>(shared);
  const RoiPoolBackward &backward = call.backward;
  const RoiProblem &problem = backward.problem;
  const ImageView &doutput = backward.doutput;
  const ImageView &dinput = backward.dinput;
  const RoiIndices &argmax = backward.argmax;
  const int32_t thread = int32_t(threadIdx.x);
  const int lane = thread % kLanes;
  const int warp = thread / kLanes;
  const int32_t bins = problem.pooled_h * problem.pooled_w;
  const int64_t cells = int64_t(problem.h) * problem.w;
  uint32_t turn = 0;
  for (int32_t i = thread; i < int32_t(kClaims); i += kPartThreads) claims[i] = 0;
  for (int64_t task = blockIdx.x; task < call.tasks; task += gridDim.x) {
    const int32_t part = int32_t(task % (int64_t(call.down) * call.across));
    const int64_t plane = task / (int64_t(call.down) * call.across);
    const int64_t c = plane % problem.c;
    const int32_t n = int32_t(plane / problem.c);
    const int32_t row0 = part / call.across * call.rows;
    const int32_t column0 = part % call.across * call.columns;
    const int32_t rows = min(call.rows, problem.h - row0);
    const int32_t columns = min(call.columns, problem.w - column0);
    for (int32_t i = thread; i < call.rows * call.columns; i += kPartThreads) sums[i] = 0;
    for (int64_t from = 0; from < problem.rois; from += kPartThreads) {
      bool touches = false;
      RoiPoolGeometry<Real> roi;
      if (from + thread < problem.rois && backward.rois.batch(from + thread, int32_t(problem.n)) == n) {
        roi = roi_pool_geometry<Real>(problem, backward.rois, from + thread);
        if (roi.batch == n) {
          const RoiCells y = roi.y.reach_of_all(problem.pooled_h);
          const RoiCells x = roi.x.reach_of_all(problem.pooled_w);
          touches = y.first < row0 + rows && y.first + y.count > row0 && x.first < column0 + columns &&
                    x.first + x.count > column0;
        }
      }
      const unsigned word = __ballot_sync(kAllLanes, touches);
      if (lane == 0) counts[warp] = __popc(word);
      __syncthreads();
      int32_t before = 0;
      int32_t count = 0;
      for (int k = 0; k < kPartWarps; ++k) {
        before += k < warp ? counts[k] : 0;
        count += counts[k];
      }
      if (touches)
        items[before + __popc(word & ((1u << lane) - 1))] = {int32_t(from) + thread, roi.y.start, roi.y.bin,
                                                             roi.x.start, roi.x.bin};
      __syncthreads();
      const int32_t end = count * bins;
      PoolBin<T> coming = {};
      const auto fetch = [&](int32_t entry) {
        coming.named = -1;
        if (entry >= end) return;
        coming.item = int32_t(call.by_bins.divide(uint32_t(entry)));
        coming.bin = entry - coming.item * bins;
        const int64_t r = items[coming.item].roi;
        const int32_t ph = int32_t(call.by_pw.divide(uint32_t(coming.bin)));
        const int32_t pw = coming.bin - ph * problem.pooled_w;
        coming.named = argmax.get(argmax.view.plane(r, c) + argmax.view.cell(ph, pw));
        coming.value = static_cast<const T *>(doutput.data)[doutput.plane(r, c) + doutput.cell(ph, pw)];
      };
      fetch(thread);
      for (int32_t first = 0; first < end; first += kPartThreads) {
        int32_t place = -1;
        const Real value = Real(coming.value);
        if (coming.named >= 0 && coming.named < cells) {
          const PoolItem<Real> &item = items[coming.item];
          const int32_t ph = int32_t(call.by_pw.divide(uint32_t(coming.bin)));
          const int32_t pw = coming.bin - ph * problem.pooled_w;
          const int32_t row = int32_t(call.by_w.divide(uint32_t(coming.named)));
          const int32_t column = int32_t(coming.named) - row * problem.w;
          const auto within = [](int32_t cell, const RoiCells &reach) {
            return uint32_t(cell - reach.first) < uint32_t(reach.count);
          };
          if (within(row, RoiPoolAxis<Real>{item.y_start, item.y_bin, problem.h}.reach(ph)) &&
              within(column, RoiPoolAxis<Real>{item.x_start, item.x_bin, problem.w}.reach(pw)) &&
              within(row, {row0, rows}) && within(column, {column0, columns}))
            place = (row - row0) * call.columns + column - column0;
        }
        fetch(first + kPartThreads + thread);
        bool waits = place >= 0;
        while (__syncthreads_or(waits)) {
          // Claims of later turns, and in a turn those of earlier bins, are higher.
          if (++turn == kMostTurns) {
            turn = 1;
            for (int32_t i = thread; i < int32_t(kClaims); i += kPartThreads) claims[i] = 0;
            __syncthreads();
          }
          uint32_t *const claim = claims + uint32_t(place) % kClaims;
          const uint32_t own = turn * kOrders + uint32_t(kPartThreads - 1 - thread);
          if (waits) atomicMax(claim, own);
          __syncthreads();
          if (waits && *claim == own) {
            sums[place] += value;
            waits = false;
          }
        }
      }
    }
    T *const to = static_cast<T *>(dinput.data) + dinput.plane(n, c);
    __syncthreads();
    for (int32_t i = thread; i < rows * call.columns; i += kPartThreads) {
      const int32_t row = int32_t(call.by_columns.divide(uint32_t(i)));
      const int32_t column = i - row * call.columns;
      if (column >= columns) continue;
      T &at = to[dinput.cell(row0 + row, column0 + column)];
      at = T(backward.accumulate ? Real(at) + sums[i] : sums[i]);
    }
  }
}

constexpr int kTileSide = 8;
constexpr int kTileCells = kTileSide * kTileSide;
constexpr int kTileWarps = 4;
constexpr int kTileThreads = kTileWarps * kLanes;
// One more than lanes, so that a channel's cells lie in different banks.
constexpr int kTileStride = kLanes + 1;

template <class T>
__global__ void __launch_bounds__(kTileThreads)
    roi_pool_tiles(RoiPoolBackward call, int32_t down, int32_t across, int64_t tasks) {
  using Real = typename ImageReal<T>::type;
  extern __shared__ __align__(16) char shared[];
  const RoiProblem &problem = call.problem;
  const int lane = int(threadIdx.x % kLanes);
  Real *const sums = reinterpret_cast<Real *>(shared) + threadIdx.x / kLanes * kTileCells * kTileStride;
  const int64_t groups = (problem.c + kLanes - 1) / kLanes;
  const int64_t cells = int64_t(problem.h) * problem.w;
  for (int64_t task = int64_t(blockIdx.x) * kTileWarps + threadIdx.x / kLanes; task < tasks;
       task += int64_t(gridDim.x) * kTileWarps) {
    const int64_t c0 = task % groups * kLanes;
    const int64_t place = task / groups;
    const int32_t column0 = int32_t(place % across) * kTileSide;
    const int32_t row0 = int32_t(place / across % down) * kTileSide;
    const int32_t n = int32_t(place / across / down);
    const int32_t channels = int32_t(min(problem.c - c0, int64_t(kLanes)));
    for (int i = 0; i < kTileCells; ++i) sums[i * kTileStride + lane] = 0;
    const auto meets = [](const RoiCells &reach, int32_t from) {
      return reach.first < from + kTileSide && reach.first + reach.count > from;
    };
    for (int64_t from = 0; from < problem.rois; from += kLanes) {
      bool touches = false;
      if (from + lane < problem.rois && call.rois.batch(from + lane, int32_t(problem.n)) == n) {
        const RoiPoolGeometry<Real> roi = roi_pool_geometry<Real>(problem, call.rois, from + lane);
        touches = roi.batch == n && meets(roi.y.reach_of_all(problem.pooled_h), row0) &&
                  meets(roi.x.reach_of_all(problem.pooled_w), column0);
      }
      unsigned left = __ballot_sync(kAllLanes, touches);
      while (left) {
        const int64_t r = from + __ffs(int(left)) - 1;
        left &= left - 1;
        if (lane >= channels) continue;
        const RoiPoolGeometry<Real> roi = roi_pool_geometry<Real>(problem, call.rois, r);
        const T *const given = static_cast<const T *>(call.doutput.data) + call.doutput.plane(r, c0 + lane);
        const int64_t named = call.argmax.view.plane(r, c0 + lane);
        for (int32_t ph = 0; ph < problem.pooled_h; ++ph) {
          const RoiCells rows = roi.y.reach(ph);
          if (!meets(rows, row0)) continue;
          for (int32_t pw = 0; pw < problem.pooled_w; ++pw) {
            const RoiCells columns = roi.x.reach(pw);
            if (!meets(columns, column0)) continue;
            const int64_t index = call.argmax.get(named + call.argmax.view.cell(ph, pw));
            if (index < 0 || index >= cells) continue;
            const int32_t row = int32_t(index / problem.w);
            const int32_t column = int32_t(index - int64_t(row) * problem.w);
            const bool own = row >= max(rows.first, row0) && row < min(rows.first + rows.count, row0 + kTileSide) &&
                             column >= max(columns.first, column0) &&
                             column < min(columns.first + columns.count, column0 + kTileSide);
            if (own)
              sums[((row - row0) * kTileSide + column - column0) * kTileStride + lane] +=
                  Real(given[call.doutput.cell(ph, pw)]);
          }
        }
      }
    }
    __syncwarp();
    T *const to = static_cast<T *>(call.dinput.data) + call.dinput.plane(n, c0);
    const bool last = call.dinput.channel == 1 && problem.c > 1;
    for (int i = 0; i < kTileCells; ++i) {
      // Lanes are channels of a cell, or half the cells of a channel.
      const int32_t channel = last ? lane : i / 2;
      const int32_t cell = last ? i : i % 2 * kLanes + lane;
      const int32_t row = row0 + cell / kTileSide;
      const int32_t column = column0 + cell % kTileSide;
      if (channel >= channels || row >= problem.h || column >= problem.w) continue;
      const Real sum = sums[cell * kTileStride + channel];
      T &at = to[channel * call.dinput.channel + call.dinput.cell(row, column)];
      at = T(call.accumulate ? Real(at) + sum : sum);
    }
    __syncwarp();
  }
}

template <class T>
void backward(const RoiPoolBackward &call, Stream stream) {
  using Real = typename ImageReal<T>::type;
  const RoiProblem &problem = call.problem;
  const bool channels_last = call.doutput.channel == 1 && problem.c > 1;
  if (!channels_last && int64_t(problem.h) * problem.w <= INT32_MAX &&
      int64_t(problem.pooled_h) * problem.pooled_w <= kMostPartBins && problem.rois <= INT32_MAX - kPartThreads) {
    constexpr int32_t kCells = kPartBytes<Real> / int32_t(sizeof(Real));
    // Blocks that fill a large GPU, if cells can be shared out among as many.
    constexpr int64_t kManyBlocks = 512;
    constexpr int32_t kFewestRows = 8;
    PoolPartsCall parts = {};
    parts.backward = call;
    parts.across = int32_t(ceil_div(problem.w, kCells));
    parts.columns = int32_t(ceil_div(problem.w, parts.across));
    parts.rows = std::min(problem.h, kCells / parts.columns);
    const int64_t planes = problem.n * problem.c;
    while (parts.rows > kFewestRows && planes * parts.across * ceil_div(problem.h, parts.rows) < kManyBlocks)
      parts.rows = (parts.rows + 1) / 2;
    parts.down = int32_t(ceil_div(problem.h, parts.rows));
    parts.rows = int32_t(ceil_div(problem.h, parts.down));
    parts.by_w = Divider(uint32_t(problem.w));
    parts.by_pw = Divider(uint32_t(std::max(problem.pooled_w, 1)));
    parts.by_bins = Divider(uint32_t(std::max(problem.pooled_h * problem.pooled_w, 1)));
    parts.by_columns = Divider(uint32_t(parts.columns));
    parts.tasks = planes * parts.down * parts.across;
    const size_t shared = size_t(parts.rows) * parts.columns * sizeof(Real);
    allow_roi_shared(roi_pool_parts<T>, shared);
    launch(roi_pool_parts<T>, {std::min(parts.tasks, kMostBlocks), kPartThreads, shared}, stream, parts);
    return;
  }
  constexpr size_t kShared = sizeof(Real) * kTileWarps * kTileCells * kTileStride;
  const int64_t down = ceil_div(problem.h, kTileSide);
  const int64_t across = ceil_div(problem.w, kTileSide);
  const int64_t tasks = problem.n * down * across * ceil_div(problem.c, kLanes);
  allow_roi_shared(roi_pool_tiles<T>, kShared);
  launch(roi_pool_tiles<T>, {std::min(ceil_div(tasks, kTileWarps), kMostBlocks), kTileThreads, kShared}, stream, call,
         int32_t(down), int32_t(across), tasks);
}

}  // namespace

void roi_pool_backward_cuda(const RoiPoolBackward &call, Stream stream) {
  dispatch_dtype<float16, bfloat16, float, double>(
      call.dtype, [&](auto tag) { backward<typename decltype(tag)::type>(call, stream); });
}

}  // namespace baracuda
