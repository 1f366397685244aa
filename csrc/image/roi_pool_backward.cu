// SPDX-License-Identifier: Apache-2.0
// RoI-pooling backward on the GPU, by gather, with the sums in shared memory. A warp owns a band of rows of a channel
// and goes through the bins over it in their order, a lane a bin; of those that name the same cell the first adds
// first. The warps of a block have the same band of different channels, and share the list of bins. With channels last
// a warp owns a tile of cells of 32 channels, a lane a channel, and goes through the RoIs in their order.
#include <algorithm>

#include "image/roi_align.cuh"
#include "image/roi_pool.h"

namespace baracuda {
namespace {

constexpr int kBandThreads = 256;
constexpr int kBandWarps = kBandThreads / kLanes;
// Sums of a block, and its lists, in bytes; two blocks run beside each other.
template <class Real>
constexpr int64_t kBandBytes = sizeof(Real) == sizeof(double) ? 64 * 1024 : 76 * 1024;
constexpr int64_t kListBytes = 22 * 1024;
// Steps that are worked on together, while the bins of as many are on their way.
constexpr int kStepsAtOnce = 4;

// The cells of a block that a bin has along an axis, both ends in 16 bits.
class PoolReach {
 public:
  PoolReach() = default;
  // Of the cells from `first` on.
  __device__ PoolReach(const RoiCells &reach, int32_t first, int32_t count)
      : bits_(uint32_t(max(reach.first - first, 0)) | uint32_t(max(min(reach.first + reach.count - first, count), 0))
                                                          << 16) {}
  __device__ bool has(int32_t cell) const { return cell >= int32_t(bits_ & 0xffff) && cell < int32_t(bits_ >> 16); }

 private:
  uint32_t bits_ = 0;
};

// As many neighbouring bins as there are lanes, or a row of bins that has fewer.
struct PoolStep {
  uint16_t item;
  uint16_t part;
  PoolReach rows;
};

struct PoolBandsCall {
  RoiPoolBackward backward;
  Divider by_columns;
  Divider by_w;
  int32_t batch;   // RoIs that a block looks at before it works on those that touch its cells
  int32_t chunks;  // of a row of bins
  int32_t rows;
  int32_t columns;
  int32_t down;
  int32_t across;
  int64_t groups;  // of channels
  int64_t tasks;
  bool packs;  // whether a band lies in one piece, and can be written by packs

  int32_t parts() const { return backward.problem.pooled_h * chunks; }
  int64_t list_bytes() const {
    return batch * (parts() * int64_t(sizeof(PoolStep)) + backward.problem.pooled_w * int64_t(sizeof(PoolReach)));
  }
};

// Sums of two counts, of RoIs and of steps.
class PoolCounts {
 public:
  __device__ PoolCounts(int32_t rois, int32_t steps) : both_(uint32_t(rois) | uint32_t(steps) << kRoiBits) {}
  __device__ int32_t rois() const { return int32_t(both_ & ((1u << kRoiBits) - 1)); }
  __device__ int32_t steps() const { return int32_t(both_ >> kRoiBits); }

  // Those of the threads before this one, and in `all` those of all threads. For all threads of a block.
  __device__ static PoolCounts before(PoolCounts own, uint32_t (&of_warps)[kBandWarps], PoolCounts &all) {
    const int lane = int(threadIdx.x % kLanes);
    const int warp = int(threadIdx.x / kLanes);
    uint32_t upto = own.both_;
    for (int distance = 1; distance < kLanes; distance *= 2) {
      const uint32_t other = __shfl_up_sync(kAllLanes, upto, unsigned(distance));
      if (lane >= distance) upto += other;
    }
    __syncthreads();
    if (lane == kLanes - 1) of_warps[warp] = upto;
    __syncthreads();
    uint32_t before = upto - own.both_;
    uint32_t sum = 0;
#pragma unroll
    for (int k = 0; k < kBandWarps; ++k) {
      before += k < warp ? of_warps[k] : 0;
      sum += of_warps[k];
    }
    all.both_ = sum;
    own.both_ = before;
    return own;
  }

 private:
  static constexpr int kRoiBits = 10;
  static_assert(kBandThreads < 1 << kRoiBits && kListBytes / int64_t(sizeof(PoolStep)) < int64_t(1) << (32 - kRoiBits));

  uint32_t both_;
};

// What a lane adds in a step.
template <class T, class Index>
struct PoolBin {
  Index named;
  T value;
  PoolReach rows;
  PoolReach columns;
};

template <class T, class Index>
__global__ void __launch_bounds__(kBandThreads, 2) roi_pool_bands(const __grid_constant__ PoolBandsCall call) {
  using Real = typename ImageReal<T>::type;
  constexpr int kVector = int(kRoiVector / int64_t(sizeof(Real)));
  extern __shared__ __align__(16) char shared[];
  __shared__ int32_t roi_of[kBandThreads];
  __shared__ uint32_t counts[kBandWarps];
  const RoiPoolBackward &backward = call.backward;
  const RoiProblem &problem = backward.problem;
  const ImageView &doutput = backward.doutput;
  const ImageView &dinput = backward.dinput;
  const ImageView &argmax = backward.argmax.view;
  const int32_t thread = int32_t(threadIdx.x);
  const int lane = thread % kLanes;
  const int warp = thread / kLanes;
  const int32_t cells = problem.h * problem.w;
  const int32_t ph_count = problem.pooled_h;
  const int32_t pw_count = problem.pooled_w;
  // Steps that a warp takes side by side.
  const int32_t step_lanes = max(min(pw_count, kLanes), 1);
  const int32_t beside = kLanes / step_lanes;
  const int32_t own_step = SmallDivider(step_lanes).divide(lane);
  const int32_t own_bin = lane - own_step * step_lanes;
  const int32_t packs = (call.rows * call.columns + kVector - 1) / kVector;
  RoiPack<Real, kVector> *const sums_of_all = reinterpret_cast<RoiPack<Real, kVector> *>(shared);
  RoiPack<Real, kVector> *const packed = sums_of_all + warp * packs;
  Real *const sums = packed->value;
  PoolStep *const steps = reinterpret_cast<PoolStep *>(sums_of_all + kBandWarps * packs);
  PoolReach *const reaches = reinterpret_cast<PoolReach *>(steps + call.batch * ph_count * call.chunks);
  for (int64_t task = blockIdx.x; task < call.tasks; task += gridDim.x) {
    const int32_t bands = call.down * call.across;
    const int32_t band = int32_t(task % bands);
    const int64_t c = task / bands % call.groups * kBandWarps + warp;
    const int32_t n = int32_t(task / bands / call.groups);
    const int32_t row0 = band / call.across * call.rows;
    const int32_t column0 = band % call.across * call.columns;
    const int32_t rows = min(call.rows, problem.h - row0);
    const int32_t columns = min(call.columns, problem.w - column0);
    for (int32_t i = lane; i < packs; i += kLanes) packed[i] = {};
    for (int64_t from = 0; from < problem.rois; from += call.batch) {
      const auto meets = [](const RoiCells &reach, int32_t first, int32_t count) {
        return reach.first < first + count && reach.first + reach.count > first;
      };
      const int64_t r = from + thread;
      RoiPoolGeometry<Real> roi;
      int32_t first_ph = 0;
      int32_t end_ph = 0;
      if (thread < call.batch && r < problem.rois && backward.rois.batch(r, int32_t(problem.n)) == n) {
        roi = roi_pool_geometry<Real>(problem, backward.rois, r);
        if (roi.batch == n && meets(roi.y.reach_of_all(ph_count), row0, rows) &&
            meets(roi.x.reach_of_all(pw_count), column0, columns)) {
          while (first_ph < ph_count && !meets(roi.y.reach(first_ph), row0, rows)) ++first_ph;
          end_ph = first_ph;
          while (end_ph < ph_count && meets(roi.y.reach(end_ph), row0, rows)) ++end_ph;
        }
      }
      PoolCounts all(0, 0);
      const PoolCounts own(end_ph > first_ph, (end_ph - first_ph) * call.chunks);
      const PoolCounts before = PoolCounts::before(own, counts, all);
      if (end_ph > first_ph) {
        const int32_t item = before.rois();
        roi_of[item] = int32_t(r);
        for (int32_t pw = 0; pw < pw_count; ++pw)
          reaches[item * pw_count + pw] = PoolReach(roi.x.reach(pw), column0, columns);
        PoolStep *to = steps + before.steps();
        for (int32_t ph = first_ph; ph < end_ph; ++ph) {
          const PoolReach reach(roi.y.reach(ph), row0, rows);
          for (int32_t chunk = 0; chunk < call.chunks; ++chunk)
            *to++ = {uint16_t(item), uint16_t(ph * call.chunks + chunk), reach};
        }
      }
      __syncthreads();
      if (c >= problem.c) continue;

      const int32_t total = all.steps();
      PoolBin<T, Index> ahead[kStepsAtOnce];
      // What is loaded isn't looked at before the steps in hand are done.
      const auto fetch = [&](int32_t first) {
#pragma unroll
        for (int k = 0; k < kStepsAtOnce; ++k) {
          PoolBin<T, Index> &bin = ahead[k];
          const int32_t s = first + k * beside + own_step;
          bin.named = -1;
          bin.rows = {};
          if (own_step >= beside || s >= total) continue;
          const PoolStep step = steps[s];
          const int32_t ph = call.chunks == 1 ? step.part : step.part / call.chunks;
          const int32_t pw = own_bin + (step.part - ph * call.chunks) * kLanes;
          if (pw >= pw_count) continue;
          const int64_t of = roi_of[step.item];
          bin.rows = step.rows;
          bin.columns = reaches[step.item * pw_count + pw];
          bin.named = static_cast<const Index *>(argmax.data)[argmax.plane(of, c) + argmax.cell(ph, pw)];
          bin.value = static_cast<const T *>(doutput.data)[doutput.plane(of, c) + doutput.cell(ph, pw)];
        }
      };
      fetch(0);
      for (int32_t first = 0; first < total; first += kStepsAtOnce * beside) {
        Real value[kStepsAtOnce];
        int32_t place[kStepsAtOnce];
#pragma unroll
        for (int k = 0; k < kStepsAtOnce; ++k) {
          const PoolBin<T, Index> &bin = ahead[k];
          const int32_t named = bin.named >= 0 && bin.named < cells ? int32_t(bin.named) : 0;
          const int32_t named_row = int32_t(call.by_w.divide(uint32_t(named)));
          const int32_t row = named_row - row0;
          const int32_t column = named - named_row * problem.w - column0;
          const bool adds = named == bin.named && bin.rows.has(row) && bin.columns.has(column);
          place[k] = adds ? row * call.columns + column : -1 - lane;
          value[k] = Real(bin.value);
        }
        fetch(first + kStepsAtOnce * beside);
        int32_t turn[kStepsAtOnce];
        bool more[kStepsAtOnce];
#pragma unroll
        for (int k = 0; k < kStepsAtOnce; ++k)
          turn[k] = __popc(__match_any_sync(kAllLanes, place[k]) & ((1u << lane) - 1));
#pragma unroll
        for (int k = 0; k < kStepsAtOnce; ++k) more[k] = __any_sync(kAllLanes, turn[k] > 0);
#pragma unroll
        for (int k = 0; k < kStepsAtOnce; ++k) {
          if (place[k] >= 0 && turn[k] == 0) sums[place[k]] += value[k];
          __syncwarp();
          if (!more[k]) continue;
          for (int32_t now = 1; __any_sync(kAllLanes, turn[k] >= now); ++now) {
            if (turn[k] == now) sums[place[k]] += value[k];
            __syncwarp();
          }
        }
      }
    }
    if (c >= problem.c) continue;
    __syncwarp();
    T *const to = static_cast<T *>(dinput.data) + dinput.plane(n, c) + dinput.cell(row0, column0);
    const auto sum_of = [&](T before, Real sum) { return T(backward.accumulate ? Real(before) + sum : sum); };
    if (call.packs) {
      using Pack = RoiPack<T, kVector>;
      for (int32_t i = lane; i < rows * columns / kVector; i += kLanes) {
        Pack *const at = reinterpret_cast<Pack *>(to) + i;
        Pack pack = {};
        if (backward.accumulate) pack = *at;
#pragma unroll
        for (int v = 0; v < kVector; ++v) pack.value[v] = sum_of(pack.value[v], packed[i].value[v]);
        *at = pack;
      }
    } else {
      for (int32_t i = lane; i < rows * call.columns; i += kLanes) {
        const int32_t row = int32_t(call.by_columns.divide(uint32_t(i)));
        const int32_t column = i - row * call.columns;
        if (column < columns) to[dinput.cell(row, column)] = sum_of(to[dinput.cell(row, column)], sums[i]);
      }
    }
    __syncwarp();
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
  PoolBandsCall bands = {};
  bands.backward = call;
  bands.chunks = int32_t(std::max<int64_t>(ceil_div(problem.pooled_w, kLanes), 1));
  bands.batch = 1;
  if (!channels_last && int64_t(problem.h) * problem.w <= INT32_MAX && bands.list_bytes() <= kListBytes) {
    bands.batch = int32_t(std::min<int64_t>(kListBytes / std::max<int64_t>(bands.list_bytes(), 1), kBandThreads));
    constexpr int32_t kCells = int32_t(kBandBytes<Real> / kBandWarps / int64_t(sizeof(Real)));
    constexpr int kVector = int(kRoiVector / int64_t(sizeof(Real)));
    // Blocks that fill a large GPU, if rows can be shared out among as many.
    constexpr int64_t kManyBlocks = 264;
    constexpr int32_t kFewestRows = 4;
    bands.across = int32_t(ceil_div(problem.w, kCells));
    bands.columns = int32_t(ceil_div(problem.w, bands.across));
    bands.rows = std::min(problem.h, kCells / bands.columns);
    bands.groups = ceil_div(problem.c, kBandWarps);
    const int64_t blocks = problem.n * bands.groups * bands.across;
    while (bands.rows > kFewestRows && blocks * ceil_div(problem.h, bands.rows) < kManyBlocks)
      bands.rows = (bands.rows + 1) / 2;
    bands.down = int32_t(ceil_div(problem.h, bands.rows));
    bands.rows = int32_t(ceil_div(problem.h, bands.down));
    bands.by_columns = Divider(uint32_t(bands.columns));
    bands.by_w = Divider(uint32_t(problem.w));
    bands.tasks = blocks * bands.down;
    const ImageView &to = call.dinput;
    const auto whole = [](int64_t elements) { return elements % kVector == 0; };
    bands.packs = bands.across == 1 && to.column == 1 && to.row == problem.w && whole(problem.w) && whole(to.channel) &&
                  whole(to.batch) && reinterpret_cast<uintptr_t>(to.data) % (kVector * sizeof(T)) == 0;
    const int64_t sums = kBandWarps * ceil_div(int64_t(bands.rows) * bands.columns, kVector) * kRoiVector;
    const size_t shared = size_t(sums + bands.list_bytes());
    const auto run = [&](auto kernel) {
      allow_roi_shared(kernel, shared);
      launch(kernel, {std::min(bands.tasks, kMostBlocks), kBandThreads, shared}, stream, bands);
    };
    if (call.argmax.wide)
      run(roi_pool_bands<T, int64_t>);
    else
      run(roi_pool_bands<T, int32_t>);
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
