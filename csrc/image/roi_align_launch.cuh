// SPDX-License-Identifier: Apache-2.0
// From a call to its kernel. Each dtype has a file of its own that instantiates these.
#pragma once

#include <algorithm>
#include <cstdlib>

#include "image/roi_align.cuh"
#include "runtime/workspace.h"

namespace baracuda {

// Blocks beyond this loop.
constexpr int64_t kMostBlocks = INT32_MAX;
// Shared memory that lets two blocks run beside each other.
constexpr int64_t kMostSharedOfTwo = 100 * 1024;

// The lists of a block of the forward; 0 where they don't fit.
template <class Real>
size_t roi_shared_bytes(const RoiAlignProblem &problem, int64_t warp_bytes) {
  const int64_t bytes =
      roi_list_bytes<Real>(RoiAxis<Real>::list_places(problem.h, problem.pooled_h, 0), problem.pooled_h) +
      roi_list_bytes<Real>(RoiAxis<Real>::list_places(problem.w, problem.pooled_w, 0), problem.pooled_w) +
      kRoiWarps * warp_bytes;
  return bytes <= kMostSharedOfTwo ? size_t(bytes) : 0;
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
  table.places_y = int32_t(places_y);
  table.places_x = int32_t(places_x);
  table.y_at = int32_t(y_at);
  table.x_at = int32_t(x_at);
  table.bins_at = int32_t(bins_at);
  table.record = int32_t(record);
  table.batch = space.take<int32_t>(problem.rois);
  table.bounds = space.take<RoiBounds>(problem.rois);
  table.records = space.take<char>(problem.rois * record);
  return table;
}

// Whether the boxes cover the map so often that turning it is the lesser part. What a bin gains by it is as much as
// turning kTurned cells takes.
inline bool roi_align_turns(const RoiAlignProblem &problem) {
  constexpr int64_t kTurned = 7;
  return problem.c >= kLanes &&
         problem.rois * problem.pooled_h * problem.pooled_w * kTurned >= problem.n * problem.h * problem.w;
}

template <class Kernel>
void allow_roi_shared(Kernel *kernel, size_t bytes) {
  constexpr size_t kWithoutAsking = 32 * 1024;
  if (bytes > kWithoutAsking)
    check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    int(bytes)),
               "cudaFuncSetAttribute");
}

template <class T>
void roi_align_cuda_of(const RoiAlignForward &call, Stream stream) {
  using Real = typename ImageReal<T>::type;
  const RoiAlignProblem &problem = call.problem;
  const ImageView &input = call.input;
  constexpr int kVector = sizeof(T) == sizeof(double) ? 2 : 4;
  const bool lines = input.channel == 1 && problem.c > 1 && std::abs(input.column) > 1;
  if (!lines && call.workspace) {
    T *const turned = reinterpret_cast<T *>(call.workspace);
    const int64_t cell_tiles = ceil_div(int64_t(problem.h) * problem.w, kLanes);
    const int64_t tiles = problem.n * ceil_div(problem.c, kLanes) * cell_tiles;
    launch(roi_align_turn<T>, {std::min(tiles, kMostBlocks), kRoiThreads}, stream, problem, input, turned, cell_tiles,
           tiles);
    RoiAlignForward again = call;
    again.input = {turned, problem.c * problem.h * problem.w, 1, problem.c * problem.w, problem.c};
    again.workspace = nullptr;
    roi_align_cuda_of<T>(again, stream);
    return;
  }
  const size_t shared = roi_shared_bytes<Real>(problem, lines ? 0 : roi_warp_bytes<Real>(problem.pooled_w));
  if (shared == 0) {
    const int64_t outputs = problem.rois * problem.c * problem.pooled_h * problem.pooled_w;
    launch(roi_align_any<T>, {std::min(ceil_div(outputs, kRoiThreads), kMostBlocks), kRoiThreads}, stream, call,
           outputs);
    return;
  }
  // Whether kVector elements in a row can be loaded at once.
  const auto whole = [](int64_t elements) { return elements % kVector == 0; };
  const bool packs =
      reinterpret_cast<uintptr_t>(input.data) % (kVector * sizeof(T)) == 0 && whole(input.batch) && whole(input.row) &&
      (lines ? whole(problem.c) && whole(input.column) : input.column == 1 && whole(problem.w) && whole(input.channel));
  const int64_t group = lines ? kLanes * (packs ? kVector : 1) : kRoiBlockChannels;
  const int64_t groups = ceil_div(problem.c, group);
  const RoiAlignForwardCall forward = {call, problem.rois * groups,
                                       int32_t(RoiAxis<Real>::list_places(problem.h, problem.pooled_h, 0)),
                                       int32_t(RoiAxis<Real>::list_places(problem.w, problem.pooled_w, 0))};
  const Grid grid = {std::min(forward.tasks, kMostBlocks), kRoiThreads, shared};
  const auto kernel = lines ? (packs ? roi_align_lines<T, kVector> : roi_align_lines<T, 1>)
                            : (packs ? roi_align_rows<T, kVector> : roi_align_rows<T, 1>);
  allow_roi_shared(kernel, shared);
  launch(kernel, grid, stream, forward);
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
