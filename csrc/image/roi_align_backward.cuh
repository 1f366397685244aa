// SPDX-License-Identifier: Apache-2.0
// RoI-align backward on the GPU. The map is cut into regions of tiles. A warp owns a tile, a lane a channel of it, with
// the sums of all cells in registers; it gathers from the RoIs that touch the region, in their order. What a RoI's bins
// weigh is worked out once, into the workspace.
#pragma once

#include <algorithm>

#include "image/roi_align.cuh"

namespace baracuda {

constexpr int kTileSide = 8;
constexpr int kTilesDown = 2;
constexpr int kTilesAcross = 4;
constexpr int kRegionRows = kTileSide * kTilesDown;
constexpr int kRegionColumns = kTileSide * kTilesAcross;
constexpr int kTileWarps = kTilesDown * kTilesAcross;
constexpr int kTileThreads = kTileWarps * kLanes;
// Columns of bins whose weights a warp holds at a time.
constexpr int kTileBins = 3;
// RoIs that a block looks at before it works on those that touch its region.
constexpr int kRoiBatch = 1024;

// The cells that a RoI has weights for, both ends included; none where y0 > y1.
struct RoiBounds {
  int32_t y0, y1, x0, x1;
};

struct RoiTable {
  int32_t *batch;     // [rois], -1 for RoIs without cells
  RoiBounds *bounds;  // [rois]
  char *records;      // [rois], of `record` bytes each, which begin with the bounds once more
  int32_t record;     // bytes
  int32_t y_at;       // of a record: the weights of y begin there,
  int32_t x_at;       // those of x,
  int32_t bins_at;    // and the bins' reaches
  int32_t places_y;
  int32_t places_x;
};

// A bin's cells within a record: weights[place - first + cell] is the weight of a cell, and zero for at least
// kTileSide - 1 cells on both sides of the reach.
struct RoiReach {
  int32_t first;
  int32_t count;
  int32_t place;
  int32_t padding;
};

// One block for each RoI.
template <class Real>
__global__ void __launch_bounds__(kRoiThreads)
    roi_align_prepare(RoiAlignProblem problem, RoiRows rois, RoiTable table) {
  __shared__ RoiBounds shared_bounds;
  const int64_t r = blockIdx.x;
  const int lane = int(threadIdx.x % kLanes);
  const int warp = int(threadIdx.x / kLanes);
  const RoiGeometry<Real> roi = roi_geometry<Real>(problem, rois, r);
  char *record = table.records + r * table.record;
  Real *const weights_y = reinterpret_cast<Real *>(record + table.y_at);
  Real *const weights_x = reinterpret_cast<Real *>(record + table.x_at);
  const int32_t places = (table.bins_at - table.y_at) / int32_t(sizeof(Real));
  RoiReach *const bins = reinterpret_cast<RoiReach *>(record + table.bins_at);
  if (threadIdx.x == 0) shared_bounds = {INT32_MAX, -1, INT32_MAX, -1};
  if (roi.batch >= 0) {
    // Of both axes, and what lies between, which is copied, too.
    for (int32_t i = int32_t(threadIdx.x); i < places; i += kRoiThreads) weights_y[i] = 0;
  }
  __syncthreads();
  if (roi.batch >= 0) {
    for (int32_t b = warp; b < problem.pooled_h + problem.pooled_w; b += kRoiThreads / kLanes) {
      const bool is_y = b < problem.pooled_h;
      const RoiAxis<Real> axis = axis_of(roi, is_y);
      const int32_t own = is_y ? b : b - problem.pooled_h;
      const RoiCells cells = axis.reach(own);
      // The mean belongs to one axis.
      const Real scale = is_y ? roi.count : Real(1);
      const int32_t place =
          kTileSide + axis.list_place(own, is_y ? problem.pooled_h : problem.pooled_w, cells.first, kTileSide);
      Real *const weights = is_y ? weights_y : weights_x;
      for (int32_t i = lane; i < cells.count; i += kLanes)
        weights[place + i] = axis.weight(own, cells.first + i) / scale;
      if (lane == 0) {
        bins[b] = {cells.first, cells.count, place, 0};
        if (cells.count > 0) {
          atomicMin(is_y ? &shared_bounds.y0 : &shared_bounds.x0, cells.first);
          atomicMax(is_y ? &shared_bounds.y1 : &shared_bounds.x1, cells.first + cells.count - 1);
        }
      }
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    table.bounds[r] = shared_bounds;
    *reinterpret_cast<RoiBounds *>(record) = shared_bounds;
    table.batch[r] = shared_bounds.y1 >= 0 && shared_bounds.x1 >= 0 ? roi.batch : -1;
  }
}

struct RoiAlignTilesCall {
  RoiAlignBackward backward;
  RoiTable table;
  int32_t down;     // regions
  int32_t across;   // regions
  int32_t groups;   // of channels
  int64_t regions;  // of all images and groups
  // The memory has two halves, each of several RoIs: while one is worked on, the other fills.
  int32_t half_rois;
  int32_t roi_bytes;
  int32_t gradient_at;  // of a RoI's
};

__device__ __forceinline__ void copy_16(void *to, const void *from, int bytes) {
  const unsigned address = unsigned(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes) : "memory");
}

// All threads copy bytes that begin at the same place of 16 as `to`.
__device__ inline void copy_piece(char *to, const char *from, int32_t bytes) {
  for (int32_t i = int32_t(threadIdx.x) * 16; i < bytes; i += kTileThreads * 16)
    copy_16(to + i, from + i, min(bytes - i, 16));
}

template <class T, bool kStaged>
class RoiTile {
 public:
  using Real = typename ImageReal<T>::type;

  __device__ RoiTile(const RoiAlignTilesCall &call, int32_t row, int32_t column)
      : call_(call), row_(row), column_(column) {
#pragma unroll
    for (int i = 0; i < kTileSide; ++i)
#pragma unroll
      for (int j = 0; j < kTileSide; ++j) sum_[i][j] = 0;
  }

  // Adds what one RoI gives. `record` holds its weights; `given` the lane's gradients.
  __device__ __forceinline__ void add(const char *record, const T *given, int64_t given_row, int64_t given_column) {
    const RoiBounds bounds = *reinterpret_cast<const RoiBounds *>(record);
    if (bounds.y0 >= row_ + kTileSide || bounds.y1 < row_ || bounds.x0 >= column_ + kTileSide || bounds.x1 < column_)
      return;
    const RoiAlignProblem &problem = call_.backward.problem;
    const Real *const weights_y = reinterpret_cast<const Real *>(record + call_.table.y_at);
    const Real *const weights_x = reinterpret_cast<const Real *>(record + call_.table.x_at);
    const RoiReach *const bins_y = reinterpret_cast<const RoiReach *>(record + call_.table.bins_at);
    const RoiReach *const bins_x = bins_y + problem.pooled_h;
    bool odd = false;
    for (int32_t x_from = 0; x_from < problem.pooled_w; x_from += kLanes) {
      const Bins over_x = over(bins_x, x_from, problem.pooled_w, column_);
      for (int32_t first = over_x.first; first < over_x.end; first += kTileBins) {
        Real wx[kTileBins][kTileSide];
#pragma unroll
        for (int k = 0; k < kTileBins; ++k) {
          // The weights begin with zeros.
          const int32_t place = first + k < over_x.end ? place_of(bins_x[first + k], column_) : 0;
#pragma unroll
          for (int j = 0; j < kTileSide; ++j) wx[k][j] = weights_x[place + j];
        }
        const T *const line = given + first * given_column;
        const int32_t count = over_x.end - first;
        for (int32_t y_from = 0; y_from < problem.pooled_h; y_from += kLanes) {
          const Bins over_y = over(bins_y, y_from, problem.pooled_h, row_);
          for (int32_t ph = over_y.first; ph < over_y.end; ++ph)
            add_row<false>(line + ph * given_row, given_column, count, wx, weights_y + place_of(bins_y[ph], row_), odd);
        }
        if (__any_sync(kAllLanes, odd)) {
          for (int32_t y_from = 0; y_from < problem.pooled_h; y_from += kLanes) {
            const Bins over_y = over(bins_y, y_from, problem.pooled_h, row_);
            for (int32_t ph = over_y.first; ph < over_y.end; ++ph)
              add_row<true>(line + ph * given_row, given_column, count, wx, weights_y + place_of(bins_y[ph], row_),
                            odd);
          }
          odd = false;
        }
      }
    }
  }

  __device__ Real sum(int i, int j) const { return sum_[i][j]; }

 private:
  struct Bins {
    int32_t first;
    int32_t end;
  };

  // Which of 32 bins reach the tile: neighbours, because positions ascend or descend with the bins.
  __device__ __forceinline__ Bins over(const RoiReach *bins, int32_t from, int32_t count, int32_t cell) const {
    const int32_t b = from + int32_t(threadIdx.x % kLanes);
    bool reaches = false;
    if (b < count)
      reaches = bins[b].first < cell + kTileSide && bins[b].first + bins[b].count > cell && bins[b].count > 0;
    const unsigned mask = __ballot_sync(kAllLanes, reaches);
    const int32_t first = from + __ffs(int(mask)) - 1;
    return {first, mask == 0 ? first : first + __popc(mask)};
  }

  __device__ __forceinline__ static int32_t place_of(const RoiReach &bin, int32_t cell) {
    return bin.place + cell - bin.first;
  }

  // Of numbers so large that sums of them may not be finite, and of those that aren't, a weight of zero is no factor:
  // they are left out at first, and added by themselves.
  template <bool kOdd>
  __device__ __forceinline__ void add_row(const T *given, int64_t given_column, int32_t count,
                                          const Real (&wx)[kTileBins][kTileSide], const Real *wy, bool &odd) {
    constexpr Real kSafe = sizeof(Real) == sizeof(float) ? Real(0x1p120) : Real(0x1p1000);
    Real value[kTileBins];
#pragma unroll
    for (int k = 0; k < kTileBins; ++k) {
      value[k] = k < count ? Real(given[k * given_column]) : Real(0);
      const bool safe = value[k] < kSafe && value[k] > -kSafe;
      if (safe == kOdd) value[k] = 0;
      odd = odd || !safe;
    }
    Real line[kTileSide];
#pragma unroll
    for (int j = 0; j < kTileSide; ++j) {
      line[j] = 0;
#pragma unroll
      for (int k = 0; k < kTileBins; ++k)
        if (!kOdd || wx[k][j] != 0) line[j] += wx[k][j] * value[k];
    }
#pragma unroll
    for (int i = 0; i < kTileSide; ++i) {
      const Real weight = wy[i];
      if (kOdd && weight == 0) continue;
#pragma unroll
      for (int j = 0; j < kTileSide; ++j) sum_[i][j] += weight * line[j];
    }
  }

  const RoiAlignTilesCall &call_;
  int32_t row_;
  int32_t column_;
  Real sum_[kTileSide][kTileSide];
};

template <class T, bool kStaged>
__global__ void __launch_bounds__(kTileThreads, sizeof(T) == sizeof(double) ? 1 : 2)
    roi_align_tiles(const __grid_constant__ RoiAlignTilesCall call) {
  using Real = typename ImageReal<T>::type;
  extern __shared__ __align__(16) char shared[];
  __shared__ int32_t found[kRoiBatch];
  __shared__ int32_t found_of[kRoiBatch / kLanes];
  __shared__ Real turn[kTilesDown][kLanes][kRegionColumns + 1];
  const RoiAlignProblem &problem = call.backward.problem;
  const RoiTable &table = call.table;
  const ImageView &doutput = call.backward.doutput;
  const ImageView &dinput = call.backward.dinput;
  const int lane = int(threadIdx.x % kLanes);
  const int warp = int(threadIdx.x / kLanes);
  const int64_t pieces = int64_t(problem.pooled_h) * problem.pooled_w;

  for (int64_t task = blockIdx.x; task < call.regions; task += gridDim.x) {
    const int64_t c0 = task % call.groups * kLanes;
    const int64_t place = task / call.groups;
    const int32_t column0 = int32_t(place % call.across) * kRegionColumns;
    const int32_t row0 = int32_t(place / call.across % call.down) * kRegionRows;
    const int32_t n = int32_t(place / call.across / call.down);
    const int64_t channels = min(problem.c - c0, int64_t(kLanes));
    RoiTile<T, kStaged> tile(call, row0 + warp / kTilesAcross * kTileSide, column0 + warp % kTilesAcross * kTileSide);

    for (int64_t from = 0; from < problem.rois; from += kRoiBatch) {
      // The RoIs of this batch that touch the region, in their order.
      constexpr int kRounds = kRoiBatch / kTileThreads;
      bool touches[kRounds];
      unsigned ballot[kRounds];
#pragma unroll
      for (int k = 0; k < kRounds; ++k) {
        const int64_t r = from + k * kTileThreads + threadIdx.x;
        touches[k] = false;
        if (r < problem.rois && table.batch[r] == n) {
          const RoiBounds bounds = table.bounds[r];
          touches[k] = bounds.y0 < row0 + kRegionRows && bounds.y1 >= row0 && bounds.x0 < column0 + kRegionColumns &&
                       bounds.x1 >= column0;
        }
      }
#pragma unroll
      for (int k = 0; k < kRounds; ++k) {
        ballot[k] = __ballot_sync(kAllLanes, touches[k]);
        if (lane == 0) found_of[k * kTileWarps + warp] = __popc(ballot[k]);
      }
      __syncthreads();
      int32_t count = 0;
      for (int k = 0; k < kRounds * kTileWarps; ++k) {
        if (k % kTileWarps == warp && touches[k / kTileWarps])
          found[count + __popc(ballot[k / kTileWarps] & ((1u << lane) - 1))] =
              int32_t(k / kTileWarps) * kTileThreads + int32_t(threadIdx.x);
        count += found_of[k];
      }
      __syncthreads();

      const auto gradients_of = [&](int64_t r) { return static_cast<const T *>(doutput.data) + doutput.plane(r, c0); };
      const auto fetch = [&](int32_t begin, int32_t half) {
        const int32_t end = min(begin + call.half_rois, count);
        for (int32_t k = begin; k < end; ++k) {
          const int64_t r = from + found[k];
          char *const at = shared + (half * call.half_rois + k - begin) * call.roi_bytes;
          copy_piece(at, table.records + r * table.record, table.record);
          if constexpr (kStaged) {
            const char *const piece = reinterpret_cast<const char *>(gradients_of(r));
            const int32_t shift = int32_t(reinterpret_cast<uintptr_t>(piece) % 16);
            copy_piece(at + call.gradient_at, piece - shift, shift + int32_t(channels * pieces * int64_t(sizeof(T))));
          }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
      };
      // Lanes without a channel of their own take part with another's, and store nothing.
      const int64_t own = min(int64_t(lane), channels - 1);
      fetch(0, 0);
      for (int32_t begin = 0, half = 0; begin < count; begin += call.half_rois, half ^= 1) {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();
        fetch(begin + call.half_rois, half ^ 1);
        const int32_t end = min(begin + call.half_rois, count);
        for (int32_t k = begin; k < end; ++k) {
          const int64_t r = from + found[k];
          const char *const at = shared + (half * call.half_rois + k - begin) * call.roi_bytes;
          if constexpr (kStaged) {
            const uintptr_t shift = reinterpret_cast<uintptr_t>(gradients_of(r)) % 16;
            tile.add(at, reinterpret_cast<const T *>(at + call.gradient_at + shift) + own * pieces, problem.pooled_w,
                     1);
          } else {
            tile.add(at, gradients_of(r) + own * doutput.channel, doutput.row, doutput.column);
          }
        }
      }
      asm volatile("cp.async.wait_all;" ::: "memory");
      __syncthreads();
    }

    // Channels lie far apart, or side by side; in the first case a warp writes one of them at a time.
    const bool turned = !(dinput.channel == 1 && problem.c > 1);
    T *to = static_cast<T *>(dinput.data) + dinput.plane(n, c0);
    const auto store = [&](int64_t channel, int32_t row, int32_t column, Real sum) {
      if (channel >= channels || row >= problem.h || column >= problem.w) return;
      T &cell = to[channel * dinput.channel + dinput.cell(row, column)];
      cell = T(call.backward.accumulate ? Real(cell) + sum : sum);
    };
#pragma unroll
    for (int i = 0; i < kTileSide; ++i) {
      if (turned) {
#pragma unroll
        for (int j = 0; j < kTileSide; ++j)
          turn[warp / kTilesAcross][lane][warp % kTilesAcross * kTileSide + j] = tile.sum(i, j);
        __syncthreads();
        for (int k = warp; k < kTilesDown * kLanes; k += kTileWarps)
          store(k % kLanes, row0 + k / kLanes * kTileSide + i, column0 + lane, turn[k / kLanes][k % kLanes][lane]);
        __syncthreads();
      } else {
#pragma unroll
        for (int j = 0; j < kTileSide; ++j)
          store(lane, row0 + warp / kTilesAcross * kTileSide + i, column0 + warp % kTilesAcross * kTileSide + j,
                tile.sum(i, j));
      }
    }
  }
}

// A thread for each cell; for maps whose lists don't fit in shared memory.
template <class T>
__global__ void __launch_bounds__(kRoiThreads) roi_align_any_backward(RoiAlignBackward call, int64_t cells) {
  using Real = typename ImageReal<T>::type;
  const RoiAlignProblem &problem = call.problem;
  for (int64_t i = int64_t(blockIdx.x) * kRoiThreads + threadIdx.x; i < cells; i += int64_t(gridDim.x) * kRoiThreads) {
    const int32_t column = int32_t(i % problem.w);
    const int32_t row = int32_t(i / problem.w % problem.h);
    const int64_t plane = i / problem.w / problem.h;
    const int64_t c = plane % problem.c;
    const int64_t n = plane / problem.c;
    Real sum = 0;
    for (int64_t r = 0; r < problem.rois; ++r) {
      if (call.rois.batch(r, int32_t(problem.n)) != n) continue;
      const RoiGeometry<Real> roi = roi_geometry<Real>(problem, call.rois, r);
      if (roi.batch < 0) continue;
      const T *given = static_cast<const T *>(call.doutput.data) + call.doutput.plane(r, c);
      for (int32_t ph = 0; ph < problem.pooled_h; ++ph) {
        const RoiCells rows = roi.y.reach(ph);
        if (row < rows.first || row >= rows.first + rows.count) continue;
        const Real weight = roi.y.weight(ph, row);
        if (weight == 0) continue;
        Real part = 0;
        for (int32_t pw = 0; pw < problem.pooled_w; ++pw) {
          const RoiCells columns = roi.x.reach(pw);
          if (column < columns.first || column >= columns.first + columns.count) continue;
          const Real share = roi.x.weight(pw, column);
          if (share != 0) part += share * Real(given[call.doutput.cell(ph, pw)]);
        }
        sum += weight * part / roi.count;
      }
    }
    T &cell = static_cast<T *>(call.dinput.data)[call.dinput.plane(n, c) + call.dinput.cell(row, column)];
    cell = T(call.accumulate ? Real(cell) + sum : sum);
  }
}

// How roi_align_tiles lays out its memory: for each RoI the record, and if they fit its gradients of 32 channels.
struct RoiTileShape {
  int32_t half_rois = 0;
  int32_t bytes = 0;
  int32_t gradient_at = 0;
  bool staged = false;
};

inline RoiTileShape roi_tile_shape(const RoiAlignProblem &problem, int32_t record, int64_t element, bool contiguous) {
  constexpr int64_t kVector = 16;
  constexpr int64_t kMostRois = 8;
  RoiTileShape shape;
  const int64_t gradients =
      ceil_div(kLanes * int64_t(problem.pooled_h) * problem.pooled_w * element, kVector) * kVector + kVector;
  shape.gradient_at = record;
  shape.staged = contiguous && 2 * (record + gradients) <= kMostSharedOfTwo;
  const int64_t bytes = record + (shape.staged ? gradients : 0);
  shape.half_rois = int32_t(std::min(kMostSharedOfTwo / (2 * bytes), kMostRois));
  shape.bytes = int32_t(bytes);
  return shape;
}

// Everything is left at NULL with a base of NULL.
template <class Real>
RoiTable roi_table(const RoiAlignProblem &problem, Workspace &space) {
  constexpr int64_t kVector = 16;
  const auto aligned = [](int64_t bytes) { return ceil_div(bytes, kVector) * kVector; };
  RoiTable table = {};
  const int64_t places_y = kTileSide + RoiAxis<Real>::list_places(problem.h, problem.pooled_h, kTileSide);
  const int64_t places_x = kTileSide + RoiAxis<Real>::list_places(problem.w, problem.pooled_w, kTileSide);
  const int64_t y_at = sizeof(RoiBounds);
  const int64_t x_at = y_at + aligned(places_y * int64_t(sizeof(Real)));
  const int64_t bins_at = x_at + aligned(places_x * int64_t(sizeof(Real)));
  const int64_t record = bins_at + (int64_t(problem.pooled_h) + problem.pooled_w) * int64_t(sizeof(RoiReach));
  if (2 * record > kMostSharedOfTwo) return table;
  table.y_at = int32_t(y_at);
  table.x_at = int32_t(x_at);
  table.bins_at = int32_t(bins_at);
  table.record = int32_t(record);
  table.batch = space.take<int32_t>(problem.rois);
  table.bounds = space.take<RoiBounds>(problem.rois);
  table.records = space.take<char>(problem.rois * record);
  return table;
}

template <class T>
void roi_align_backward_cuda_of(const RoiAlignBackward &call, Stream stream) {
  using Real = typename ImageReal<T>::type;
  const RoiAlignProblem &problem = call.problem;
  Workspace space(call.workspace);
  const RoiTable table = roi_table<Real>(problem, space);
  const ImageView &given = call.doutput;
  const int64_t pieces = int64_t(problem.pooled_h) * problem.pooled_w;
  const auto fits = [](int64_t extent, int64_t stride, int64_t wanted) { return extent <= 1 || stride == wanted; };
  const bool contiguous = fits(problem.pooled_w, given.column, 1) &&
                          fits(problem.pooled_h, given.row, problem.pooled_w) && fits(problem.c, given.channel, pieces);
  if (table.record == 0) {
    const int64_t cells = problem.n * problem.c * problem.h * problem.w;
    launch(roi_align_any_backward<T>, {std::min(ceil_div(cells, kRoiThreads), kMostBlocks), kRoiThreads}, stream, call,
           cells);
    return;
  }
  const RoiTileShape shape = roi_tile_shape(problem, table.record, sizeof(T), contiguous);
  if (problem.rois > 0) launch(roi_align_prepare<Real>, {problem.rois, kRoiThreads}, stream, problem, call.rois, table);
  RoiAlignTilesCall tiles = {};
  tiles.backward = call;
  tiles.table = table;
  tiles.down = int32_t(ceil_div(problem.h, kRegionRows));
  tiles.across = int32_t(ceil_div(problem.w, kRegionColumns));
  tiles.groups = int32_t(ceil_div(problem.c, kLanes));
  tiles.regions = problem.n * tiles.down * tiles.across * tiles.groups;
  tiles.half_rois = shape.half_rois;
  tiles.roi_bytes = shape.bytes;
  tiles.gradient_at = shape.gradient_at;
  const size_t shared = 2 * size_t(shape.half_rois) * size_t(shape.bytes);
  const auto kernel = shape.staged ? roi_align_tiles<T, true> : roi_align_tiles<T, false>;
  allow_roi_shared(kernel, shared);
  launch(kernel, {std::min(tiles.regions, kMostBlocks), kTileThreads, shared}, stream, tiles);
}

}  // namespace baracuda
