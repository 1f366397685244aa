// SPDX-License-Identifier: Apache-2.0
// RoI-pooling backward on the GPU, by gather, with the sums in shared memory. The map is cut into bands of rows, and
// the bins over each band are listed once, into the workspace, in their order. A warp owns a band of a channel and goes
// through the list, a lane a bin; of those that name the same cell the first adds first. Each lane leaves its bit at a
// number made of its cell, and finds those of the lanes before it there, which costs less than to match cells.
// Otherwise, and with channels last, a warp owns a tile of cells of 32 channels, a lane a channel, and goes through the
// RoIs in their order.
#include <algorithm>

#include "image/roi_align.cuh"
#include "image/roi_pool.h"
#include "runtime/workspace.h"

namespace baracuda {
namespace {

constexpr int kBandThreads = 256;
constexpr int kBandWarps = kBandThreads / kLanes;
// Blocks run beside each other on a multiprocessor, each with the sums of its warps, in bytes.
constexpr int kBandBlocks = 3;
constexpr int64_t kBandBytes = 73 * 1024;
// Cells of a band that have the same number wait for each other in vain: few, if there are many numbers.
constexpr uint32_t kNumbers = 128;
constexpr int64_t kNumbersBytes = kNumbers * sizeof(uint32_t);
// Bins of a lane that are worked on together, while as many are on their way.
constexpr int kBinsAtOnce = 2;
constexpr int kListThreads = 1024;
constexpr int kListWarps = kListThreads / kLanes;

// A bin of a RoI, and which cells of a band it has: from a row and column up to others, which have the guards.
struct alignas(kRoiVector) PoolEntry {
  uint32_t roi;
  uint32_t bin;
  uint32_t from;
  uint32_t upto;
};

// Bits above a row and above a column, so that a subtraction compares both.
constexpr uint32_t kGuards = 0x80008000;
constexpr int kRowShift = 16;
constexpr int64_t kMostCells = kBandBytes / kBandWarps / int64_t(sizeof(float));
static_assert(kMostCells < 1 << (kRowShift - 1));

__device__ inline uint32_t row_and_column(int32_t row, int32_t column) {
  return uint32_t(row) << kRowShift | uint32_t(column);
}

__device__ inline PoolEntry pool_entry(uint32_t roi, int32_t bin, RoiCells rows, RoiCells columns) {
  if (rows.count <= 0 || columns.count <= 0) return {roi, uint32_t(bin), ~kGuards, kGuards};
  return {roi, uint32_t(bin), row_and_column(rows.first, columns.first),
          row_and_column(rows.first + rows.count - 1, columns.first + columns.count - 1) | kGuards};
}

struct PoolList {
  int64_t begin;
  int64_t count;
};

struct PoolBands {
  int32_t rows;   // of a band; 0: there are none
  int32_t count;  // of an image
  Divider by_rows;
  int64_t most;  // entries in all
  PoolList *lists;
  PoolEntry *entries;
};

template <class Real>
PoolBands pool_bands(const RoiProblem &problem, Workspace &space) {
  PoolBands bands = {};
  const int64_t cells = (kBandBytes / kBandWarps - kNumbersBytes) / int64_t(sizeof(Real));
  const int64_t bins = int64_t(problem.pooled_h) * problem.pooled_w;
  if (problem.w > cells || problem.h == 0 || problem.w == 0 || problem.rois * bins > INT32_MAX / 2 ||
      int64_t(problem.h) * problem.w > INT32_MAX)
    return bands;
  // Blocks that fill a large GPU, if rows can be shared out among as many.
  constexpr int64_t kManyBlocks = 396;
  constexpr int64_t kFewestRows = 4;
  int64_t rows = std::min<int64_t>(problem.h, cells / problem.w);
  const int64_t blocks = problem.n * ceil_div(problem.c, kBandWarps);
  while (rows > kFewestRows && blocks * ceil_div(problem.h, rows) < kManyBlocks) rows = (rows + 1) / 2;
  bands.count = int32_t(ceil_div(problem.h, rows));
  bands.rows = int32_t(ceil_div(problem.h, bands.count));
  bands.by_rows = Divider(uint32_t(bands.rows));
  // The rows of all bins of a RoI add up to little more than the map, and each may begin and end within a band.
  const int64_t row_bands = 2 * problem.pooled_h + (problem.h + 2 * problem.pooled_h) / bands.rows + 1;
  bands.most = problem.rois * problem.pooled_w * row_bands;
  bands.lists = space.take<PoolList>(problem.n * bands.count);
  bands.entries = space.take<PoolEntry>(bands.most);
  return bands;
}

// The sum of all threads' numbers, and in `before` that of the threads before this one. For all threads of a block.
__device__ inline int64_t sum_of_block(int64_t own, int64_t (&of_warps)[kListWarps], int64_t &before) {
  const int lane = int(threadIdx.x % kLanes);
  const int warp = int(threadIdx.x / kLanes);
  int64_t upto = own;
  for (int distance = 1; distance < kLanes; distance *= 2) {
    const int64_t other = __shfl_up_sync(kAllLanes, upto, unsigned(distance));
    if (lane >= distance) upto += other;
  }
  __syncthreads();
  if (lane == kLanes - 1) of_warps[warp] = upto;
  __syncthreads();
  before = upto - own;
  int64_t sum = 0;
  for (int k = 0; k < kListWarps; ++k) {
    before += k < warp ? of_warps[k] : 0;
    sum += of_warps[k];
  }
  return sum;
}

// A block lists the bins over a band of an image: a thread counts those of a RoI, then takes some of all. Where its
// list begins follows from all that the lists before it have: those of the bands before, and of the same band of the
// images before.
template <class Real>
__global__ void __launch_bounds__(kListThreads)
    roi_pool_list(const __grid_constant__ RoiProblem problem, RoiRows rois, const __grid_constant__ PoolBands bands) {
  __shared__ int64_t of_warps[kListWarps];
  __shared__ int32_t ends[kListThreads];        // of the RoIs' bins
  __shared__ int32_t first_rows[kListThreads];  // of bins over the band
  wait_for_earlier_work();
  let_next_kernel_start();
  const int32_t band = int32_t(blockIdx.x) % bands.count;
  const int32_t n = int32_t(blockIdx.x) / bands.count;
  const int32_t row0 = band * bands.rows;
  const int32_t rows = min(bands.rows, problem.h - row0);
  struct Own {
    int32_t batch = -1;
    int32_t first = 0;  // row of bins over the band
    int32_t count = 0;
    int64_t before = 0;  // rows of bins in bands before
  };
  const auto look_at = [&](int64_t r) {
    Own own;
    RoiPoolGeometry<Real> roi;
    if (r < problem.rois) roi = roi_pool_geometry<Real>(problem, rois, r);
    own.batch = roi.batch;
    if (own.batch < 0) return own;
    for (int32_t ph = 0; ph < problem.pooled_h; ++ph) {
      const RoiCells reach = roi.y.reach(ph);
      if (reach.count == 0) continue;
      const int32_t low = int32_t(bands.by_rows.divide(uint32_t(reach.first)));
      const int32_t high = int32_t(bands.by_rows.divide(uint32_t(reach.first + reach.count - 1)));
      own.before += max(min(high + 1, band) - low, 0);
      if (low > band || high < band) continue;
      if (own.count == 0) own.first = ph;
      ++own.count;
    }
    return own;
  };
  Own own;
  int64_t before = 0;
  for (int64_t from = 0; from < problem.rois; from += kListThreads) {
    own = look_at(from + threadIdx.x);
    before += own.before + (own.batch < n ? own.count : 0);
  }
  int64_t unused;
  int64_t begin = sum_of_block(before * problem.pooled_w, of_warps, unused);
  const int64_t list_begin = begin;
  for (int64_t from = 0; from < problem.rois; from += kListThreads) {
    if (problem.rois > kListThreads) own = look_at(from + threadIdx.x);
    const int32_t bins = own.batch == n ? own.count * problem.pooled_w : 0;
    int64_t at;
    const int64_t sum = sum_of_block(bins, of_warps, at);
    ends[threadIdx.x] = int32_t(at) + bins;
    first_rows[threadIdx.x] = own.first;
    __syncthreads();
    for (int32_t i = int32_t(threadIdx.x); i < sum; i += kListThreads) {
      int32_t owner = 0;
#pragma unroll
      for (int32_t half = kListThreads / 2; half > 0; half /= 2)
        if (ends[owner + half - 1] <= i) owner += half;
      const int32_t bin = i - (owner > 0 ? ends[owner - 1] : 0);
      const int32_t ph = first_rows[owner] + bin / problem.pooled_w;
      const int32_t pw = bin % problem.pooled_w;
      const RoiPoolGeometry<Real> roi = roi_pool_geometry<Real>(problem, rois, from + owner);
      const RoiCells y = roi.y.reach(ph);
      const int32_t low = max(y.first - row0, 0);
      const int32_t high = min(y.first + y.count - row0, rows);
      if (begin + i < bands.most)
        bands.entries[begin + i] = pool_entry(uint32_t(from) + uint32_t(owner), ph * problem.pooled_w + pw,
                                              {low, high - low}, roi.x.reach(pw));
    }
    begin += sum;
  }
  if (threadIdx.x == 0) bands.lists[blockIdx.x] = {list_begin, min(begin, bands.most) - list_begin};
}

// In bytes, between RoIs and between bins that follow each other, row by row.
struct BinStrides {
  uint32_t roi;
  uint32_t bin;  // 0: not so, or they are too large

  __device__ uint64_t offset(const PoolEntry &entry) const {
    return uint64_t(entry.roi) * roi + uint64_t(entry.bin) * bin;
  }
};

BinStrides bin_strides(const RoiProblem &problem, const ImageView &view, int64_t element) {
  const bool follow = problem.pooled_h == 1 || view.row == problem.pooled_w * view.column;
  const int64_t bin = problem.pooled_w == 1 ? view.row : follow ? view.column : 0;
  const auto fits = [&](int64_t stride) { return stride >= 0 && stride <= UINT32_MAX / element; };
  if (!fits(bin) || !fits(view.batch)) return {0, 0};
  return {uint32_t(view.batch * element), uint32_t(bin * element)};
}

struct PoolBandsCall {
  RoiPoolBackward backward;
  PoolBands bands;
  Divider by_w;
  uint32_t rows_of_cells;  // at kRowsScale, the rows that a cell has before it
  BinStrides given;
  BinStrides named;
  int64_t groups;  // of channels
  int64_t tasks;
  bool packs;  // whether a band lies in one piece, and can be written by packs
};

// The row of a cell of a band follows from a product, as there are few cells.
constexpr int kCellShift = 4;
constexpr uint32_t kRowsScale = uint32_t((uint64_t(1) << 32) >> kCellShift);
static_assert(kMostCells * kMostCells <= kRowsScale && kMostCells << kCellShift <= UINT32_MAX);

// What a lane adds, and to which cells it may.
template <class T, class Index>
struct PoolBin {
  Index named;
  T value;
  uint32_t from;
  uint32_t upto;
};

template <class T, class Index>
__global__ void __launch_bounds__(kBandThreads, kBandBlocks)
    roi_pool_bands(const __grid_constant__ PoolBandsCall call) {
  using Real = typename ImageReal<T>::type;
  constexpr int kVector = int(kRoiVector / int64_t(sizeof(Real)));
  constexpr int32_t kStep = kBinsAtOnce * kLanes;
  extern __shared__ __align__(16) char shared[];
  const RoiPoolBackward &backward = call.backward;
  const RoiProblem &problem = backward.problem;
  const ImageView &doutput = backward.doutput;
  const ImageView &dinput = backward.dinput;
  const ImageView &argmax = backward.argmax.view;
  const PoolBands &bands = call.bands;
  const int lane = int(threadIdx.x % kLanes);
  // From one lane, so that the compiler knows it to be the same for all.
  const int warp = __shfl_sync(kAllLanes, int(threadIdx.x / kLanes), 0);
  const int32_t packs = (bands.rows * problem.w + kVector - 1) / kVector;
  RoiPack<Real, kVector> *const packed = reinterpret_cast<RoiPack<Real, kVector> *>(shared) + warp * packs;
  Real *const sums = packed->value;
  // A bit for each lane with a cell of that number.
  uint32_t *const lanes_of =
      reinterpret_cast<uint32_t *>(shared + kBandWarps * packs * kRoiVector) + uint32_t(warp) * kNumbers;
  for (uint32_t i = uint32_t(lane); i < kNumbers; i += kLanes) lanes_of[i] = 0;
  const uint32_t self = 1u << lane;
  wait_for_earlier_work();
  for (int64_t task = blockIdx.x; task < call.tasks; task += gridDim.x) {
    const int32_t band = int32_t(task % bands.count);
    const int64_t c = task / bands.count % call.groups * kBandWarps + warp;
    const int32_t n = int32_t(task / bands.count / call.groups);
    const int32_t row0 = band * bands.rows;
    const int32_t rows = min(bands.rows, problem.h - row0);
    if (c >= problem.c) continue;
    for (int32_t i = lane; i < packs; i += kLanes) packed[i] = {};
    __syncwarp();
    const PoolList list = bands.lists[n * bands.count + band];
    const PoolEntry *const entries = bands.entries + list.begin;
    const int32_t count = int32_t(list.count);
    const char *const given =
        reinterpret_cast<const char *>(static_cast<const T *>(doutput.data) + doutput.plane(0, c));
    const char *const named =
        reinterpret_cast<const char *>(static_cast<const Index *>(argmax.data) + argmax.plane(0, c));
    const uint32_t cells = uint32_t(rows * problem.w);
    PoolEntry entry[kBinsAtOnce];
    PoolBin<T, Index> bin[kBinsAtOnce];
    // Beyond the end the last is read again, which is cheaper than not to read.
    const auto read = [&](int32_t first) {
#pragma unroll
      for (int k = 0; k < kBinsAtOnce; ++k) entry[k] = entries[min(first + k * kLanes + lane, count - 1)];
    };
    // What is loaded isn't looked at before the bins in hand are done.
    const auto fetch = [&] {
#pragma unroll
      for (int k = 0; k < kBinsAtOnce; ++k) {
        bin[k].named = *reinterpret_cast<const Index *>(named + call.named.offset(entry[k]));
        bin[k].value = *reinterpret_cast<const T *>(given + call.given.offset(entry[k]));
        bin[k].from = entry[k].from;
        bin[k].upto = entry[k].upto;
      }
    };
    if (count > 0) {
      read(0);
      fetch();
      read(kStep);
    }
    for (int32_t first = 0; first < count; first += kStep) {
      Real value[kBinsAtOnce];
      uint32_t place[kBinsAtOnce];
      bool adds[kBinsAtOnce];
#pragma unroll
      for (int k = 0; k < kBinsAtOnce; ++k) {
        using Place = std::make_unsigned_t<Index>;
        const Place from_band = Place(bin[k].named) - Place(row0 * problem.w);
        place[k] = uint32_t(from_band);
        const uint32_t row = __umulhi(place[k] << kCellShift, call.rows_of_cells);
        const uint32_t cell = place[k] + row * ((1u << kRowShift) - uint32_t(problem.w));
        const uint32_t within = ((cell | kGuards) - bin[k].from) & (bin[k].upto - cell);
        adds[k] = first + k * kLanes + lane < count && from_band < cells && (within & kGuards) == kGuards;
        value[k] = Real(bin[k].value);
      }
      fetch();
      read(first + 2 * kStep);
      int32_t turn[kBinsAtOnce];
#pragma unroll
      for (int k = 0; k < kBinsAtOnce; ++k) {
        uint32_t *const lanes = lanes_of + place[k] % kNumbers;
        const uint32_t own = adds[k] ? self : 0;
        atomicXor(lanes, own);
        __syncwarp();
        turn[k] = adds[k] ? __popc(*lanes & (self - 1)) : -1;
        __syncwarp();
        atomicXor(lanes, own);
        __syncwarp();
      }
#pragma unroll
      for (int k = 0; k < kBinsAtOnce; ++k) {
        int32_t now = 0;
        do {
          if (turn[k] == now) sums[place[k]] += value[k];
          __syncwarp();
          ++now;
        } while (__any_sync(kAllLanes, turn[k] >= now));
      }
    }
    T *const to = static_cast<T *>(dinput.data) + dinput.plane(n, c) + dinput.cell(row0, 0);
    const auto sum_of = [&](T before, Real sum) { return T(backward.accumulate ? Real(before) + sum : sum); };
    if (call.packs) {
      using Pack = RoiPack<T, kVector>;
#pragma unroll 4
      for (int32_t i = lane; i < rows * problem.w / kVector; i += kLanes) {
        Pack *const at = reinterpret_cast<Pack *>(to) + i;
        Pack pack = {};
        if (backward.accumulate) pack = *at;
#pragma unroll
        for (int v = 0; v < kVector; ++v) pack.value[v] = sum_of(pack.value[v], packed[i].value[v]);
        *at = pack;
      }
    } else {
      for (int32_t i = lane; i < rows * problem.w; i += kLanes) {
        const int32_t row = int32_t(call.by_w.divide(uint32_t(i)));
        T &at = to[dinput.cell(row, i - row * problem.w)];
        at = sum_of(at, sums[i]);
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
  Workspace space(call.workspace);
  PoolBandsCall lists = {};
  lists.bands = pool_bands<Real>(problem, space);
  lists.given = bin_strides(problem, call.doutput, sizeof(T));
  lists.named = bin_strides(problem, call.argmax.view, call.argmax.wide ? sizeof(int64_t) : sizeof(int32_t));
  if (!channels_last && call.workspace && lists.bands.rows > 0 && lists.given.bin != 0 && lists.named.bin != 0) {
    const PoolBands &bands = lists.bands;
    constexpr int kVector = int(kRoiVector / int64_t(sizeof(Real)));
    const ImageView &to = call.dinput;
    const auto whole = [](int64_t elements) { return elements % kVector == 0; };
    lists.backward = call;
    lists.by_w = Divider(uint32_t(problem.w));
    lists.rows_of_cells = uint32_t(ceil_div(kRowsScale, problem.w));
    lists.groups = ceil_div(problem.c, kBandWarps);
    lists.tasks = problem.n * lists.groups * bands.count;
    lists.packs = to.column == 1 && to.row == problem.w && whole(problem.w) && whole(to.channel) && whole(to.batch) &&
                  reinterpret_cast<uintptr_t>(to.data) % (kVector * sizeof(T)) == 0;
    const int64_t sums = ceil_div(int64_t(bands.rows) * problem.w, kVector) * kRoiVector;
    const size_t shared = size_t(kBandWarps * (sums + kNumbersBytes));
    launch(roi_pool_list<Real>, {problem.n * bands.count, kListThreads, 0, true}, stream, problem, call.rois, bands);
    const auto run = [&](auto kernel) {
      allow_roi_shared(kernel, shared);
      launch(kernel, {std::min(lists.tasks, kMostBlocks), kBandThreads, shared, true}, stream, lists);
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

size_t roi_pool_backward_workspace(const RoiProblem &problem, DLDataType dtype) {
  Workspace space(nullptr);
  if (dtype == DTypeOf<double>::value)
    pool_bands<double>(problem, space);
  else
    pool_bands<float>(problem, space);
  return space.size();
}

void roi_pool_backward_cuda(const RoiPoolBackward &call, Stream stream) {
  dispatch_dtype<float16, bfloat16, float, double>(
      call.dtype, [&](auto tag) { backward<typename decltype(tag)::type>(call, stream); });
}

}  // namespace baracuda
