// SPDX-License-Identifier: Apache-2.0
// Lists for the gradient of RoI-align: which bins of a RoI reach the tiles of a map, and what they weigh there.
#pragma once

#include "image/roi_align.cuh"

namespace baracuda {

constexpr int kTileSide = 8;
constexpr int kListThreads = 2 * kLanes;

// The bins that reach a tile along an axis, neighbours, and the place where their weights begin: kTileSide for each.
struct alignas(kRoiVector) RoiBand {
  int32_t first;
  int32_t count;
  int32_t place;
  int32_t padding;
};

// Tiles that a RoI touches, both ends included.
struct alignas(kRoiVector) RoiTiles {
  int32_t y0, y1, x0, x1;
};

struct RoiTable {
  int32_t *batch;   // [rois], -1 for RoIs without cells
  RoiTiles *tiles;  // [rois]
  char *records;    // [rois], of `record` bytes each: the bands of y and x, from tiles y0 and x0 on, and their weights
  int32_t record;   // bytes
  int32_t bands_x_at;
  int32_t weights_y_at;
  int32_t weights_x_at;
};

// A block lists a RoI: its first warp the rows, the other the columns.
template <class Real>
__global__ void __launch_bounds__(kListThreads) roi_align_bands(RoiAlignProblem problem, RoiRows rois, RoiTable table) {
  extern __shared__ __align__(16) char shared[];
  __shared__ int2 ends[2];
  wait_for_earlier_work();
  let_next_kernel_start();
  const int64_t r = blockIdx.x;
  const int lane = int(threadIdx.x % kLanes);
  const bool is_y = threadIdx.x < kLanes;
  const RoiGeometry<Real> roi = roi_geometry<Real>(problem, rois, r);
  const RoiAxis<Real> axis = axis_of(roi, is_y);
  const int32_t bins = is_y ? problem.pooled_h : problem.pooled_w;
  int2 *const tiles = reinterpret_cast<int2 *>(shared) + (is_y ? 0 : problem.pooled_h);
  char *const record = table.records + r * table.record;
  RoiBand *const bands = reinterpret_cast<RoiBand *>(record + (is_y ? 0 : table.bands_x_at));
  Real *const weights = reinterpret_cast<Real *>(record + (is_y ? table.weights_y_at : table.weights_x_at));
  int32_t begin = INT32_MAX;
  int32_t end = -1;
  for (int32_t b = lane; b < bins; b += kLanes) {
    const RoiCells cells = roi.batch >= 0 ? axis.reach(b) : RoiCells{0, 0};
    int2 reached = make_int2(0, -1);
    if (cells.count > 0) {
      reached = make_int2(cells.first / kTileSide, (cells.first + cells.count - 1) / kTileSide);
      begin = min(begin, reached.x);
      end = max(end, reached.y);
    }
    tiles[b] = reached;
  }
  begin = __reduce_min_sync(kAllLanes, begin);
  end = __reduce_max_sync(kAllLanes, end);
  if (lane == 0) ends[is_y ? 0 : 1] = make_int2(begin, end);
  __syncthreads();
  const int2 ends_y = ends[0];
  const int2 ends_x = ends[1];
  const bool some = ends_y.y >= 0 && ends_x.y >= 0;
  if (threadIdx.x == 0) {
    table.batch[r] = some ? roi.batch : -1;
    table.tiles[r] = {ends_y.x, ends_y.y, ends_x.x, ends_x.y};
  }
  if (!some) return;
  int32_t places = 0;
  for (int32_t from = begin; from <= end; from += kLanes) {
    RoiBand band = {0, 0, 0, 0};
    const int32_t tile = from + lane;
    for (int32_t b = 0; b < bins; ++b) {
      if (tiles[b].x > tile || tiles[b].y < tile) continue;
      if (band.count == 0) band.first = b;
      ++band.count;
    }
    if (tile > end) band.count = 0;
    int32_t upto = band.count;
    for (int distance = 1; distance < kLanes; distance *= 2) {
      const int32_t other = __shfl_up_sync(kAllLanes, upto, unsigned(distance));
      if (lane >= distance) upto += other;
    }
    band.place = places + upto - band.count;
    if (tile <= end) bands[tile - begin] = band;
    places += __shfl_sync(kAllLanes, upto, kLanes - 1);
  }
  for (int32_t i = lane; i < places * kTileSide; i += kLanes) weights[i] = 0;
  __syncwarp();
  // The mean belongs to one axis.
  const Real scale = is_y ? roi.count : Real(1);
  for (int32_t b = lane; b < bins; b += kLanes)
    axis.each(b, [&](int32_t cell, Real weight) {
      const RoiBand band = bands[cell / kTileSide - begin];
      weights[(band.place + b - band.first) * kTileSide + cell % kTileSide] = weight / scale;
    });
}

// Bins times tiles that they reach, at most.
template <class Real>
int64_t roi_band_places(int64_t cells, int64_t bins) {
  return RoiAxis<Real>::list_places(cells, bins) / kTileSide + 2 * bins;
}

// Everything is left at NULL with a base of NULL.
template <class Real>
RoiTable roi_table(const RoiAlignProblem &problem, Workspace &space) {
  constexpr int64_t kMostRecord = 100 * 1024;
  RoiTable table = {};
  const int64_t bands_x_at = ceil_div(problem.h, kTileSide) * int64_t(sizeof(RoiBand));
  const int64_t weights_y_at = bands_x_at + ceil_div(problem.w, kTileSide) * int64_t(sizeof(RoiBand));
  const int64_t slot = kTileSide * int64_t(sizeof(Real));
  const int64_t weights_x_at = weights_y_at + roi_band_places<Real>(problem.h, problem.pooled_h) * slot;
  const int64_t record = weights_x_at + roi_band_places<Real>(problem.w, problem.pooled_w) * slot;
  if (record > kMostRecord) return table;
  table.record = int32_t(record);
  table.bands_x_at = int32_t(bands_x_at);
  table.weights_y_at = int32_t(weights_y_at);
  table.weights_x_at = int32_t(weights_x_at);
  table.batch = space.take<int32_t>(problem.rois);
  table.tiles = space.take<RoiTiles>(problem.rois);
  table.records = space.take<char>(problem.rois * record);
  return table;
}

}  // namespace baracuda
