// SPDX-License-Identifier: Apache-2.0
// RoI-align on the GPU.
//
// Forward, a warp takes a RoI and a few channels: for each row of bins it adds up the weighted rows of the map, then
// from these sums each bin its weighted columns. With channels last a lane is a channel, and the products of both
// lists are walked; where the boxes cover the map often enough, it is worth turning the map for that first.
//
// Backward, the map is cut into regions of tiles. A warp owns a tile, a lane a channel of it, with the sums of all
// cells in registers; it gathers from the RoIs that touch the region, in their order. What a RoI's bins weigh is
// worked out once, into the workspace.
#pragma once

#include "image/roi_align.h"
#include "runtime/launch.cuh"

namespace baracuda {

constexpr int kLanes = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// ---------------------------------------------------------------------------------------------------------------
// Lists of weighted cells, made by a block.

template <class Real>
struct RoiLists {
  Real *weight;
  int32_t *cell;
  int2 *bins;  // place and count
};

// The bytes of one axis' lists.
template <class Real>
__host__ __device__ inline int64_t roi_list_bytes(int64_t places, int64_t bins) {
  return (places * int64_t(sizeof(Real) + sizeof(int32_t)) + bins * int64_t(sizeof(int2)) + 15) / 16 * 16;
}

template <class Real>
__device__ inline RoiLists<Real> roi_lists_at(char *memory, int32_t places, int32_t bins) {
  RoiLists<Real> lists;
  lists.bins = reinterpret_cast<int2 *>(memory);
  lists.weight = reinterpret_cast<Real *>(lists.bins + bins);
  lists.cell = reinterpret_cast<int32_t *>(lists.weight + places);
  return lists;
}

// By members, so that it stays in registers.
template <class Real>
__device__ inline RoiAxis<Real> axis_of(const RoiGeometry<Real> &roi, bool is_y) {
  return {is_y ? roi.y.start : roi.x.start, is_y ? roi.y.bin : roi.x.bin, is_y ? roi.y.grid : roi.x.grid,
          is_y ? roi.y.cells : roi.x.cells};
}

// A warp fills in the list of a bin.
template <class Real>
__device__ inline void make_roi_list(const RoiAxis<Real> &axis, int32_t b, int32_t bins, const RoiLists<Real> &lists) {
  const int lane = int(threadIdx.x % kLanes);
  const RoiCells cells = axis.reach(b);
  const int32_t place = axis.list_place(b, bins, cells.first, 0);
  int32_t count = 0;
  for (int32_t from = 0; from < cells.count; from += kLanes) {
    const int32_t cell = cells.first + from + lane;
    const Real weight = from + lane < cells.count ? axis.weight(b, cell) : Real(0);
    const unsigned some = __ballot_sync(kAllLanes, weight != 0);
    if (weight != 0) {
      const int32_t at = place + count + __popc(some & ((1u << lane) - 1));
      lists.weight[at] = weight;
      lists.cell[at] = cell;
    }
    count += __popc(some);
  }
  if (lane == 0) lists.bins[b] = make_int2(place, count);
}

// ---------------------------------------------------------------------------------------------------------------
// Forward.

constexpr int kRoiWarps = 8;
constexpr int kRoiThreads = kRoiWarps * kLanes;
constexpr int kRoiWarpChannels = 8;
constexpr int kRoiBlockChannels = kRoiWarps * kRoiWarpChannels;
// Columns that a warp holds sums of at a time, and the distance of two channels' sums: these fall into different banks.
constexpr int kRoiColumns = 64;
constexpr int kRoiColumnStride = kRoiColumns + 4;
// Items of a lane at a time.
constexpr int kRoiItems = 3;

struct RoiAlignForwardCall {
  RoiAlignForward forward;
  // All RoIs of a group of channels, then those of the next: a group's part of the map stays in the L2 cache.
  int64_t tasks;
  int32_t places_y;
  int32_t places_x;
};

// What a warp needs beside the lists: the sums of columns and the bins of a row.
template <class Real>
__host__ __device__ inline int64_t roi_warp_bytes(int64_t pooled_w) {
  return (kRoiWarpChannels * (kRoiColumnStride + pooled_w) * int64_t(sizeof(Real)) + 15) / 16 * 16;
}

template <class T, int kVector>
struct alignas(sizeof(T) * kVector) RoiPack {
  T value[kVector];
};

// Quotients of small numbers by one that many of them share.
struct SmallDivider {
  uint32_t divisor;
  uint32_t multiplier;

  __device__ explicit SmallDivider(int32_t by) : divisor(uint32_t(by)), multiplier(0xffffffffu / uint32_t(by) + 1) {}
  __device__ int32_t divide(int32_t number) const {
    return divisor == 1 ? number : int32_t(__umulhi(uint32_t(number), multiplier));
  }
};

// The lists of a RoI's bins, by all warps.
template <class Real>
__device__ inline void make_roi_lists(const RoiGeometry<Real> &roi, const RoiAlignProblem &problem,
                                      const RoiLists<Real> &y, const RoiLists<Real> &x) {
  if (roi.batch < 0) return;
  for (int32_t b = int32_t(threadIdx.x / kLanes); b < problem.pooled_h + problem.pooled_w; b += kRoiWarps) {
    const bool is_y = b < problem.pooled_h;
    make_roi_list(axis_of(roi, is_y), is_y ? b : b - problem.pooled_h, is_y ? problem.pooled_h : problem.pooled_w,
                  {is_y ? y.weight : x.weight, is_y ? y.cell : x.cell, is_y ? y.bins : x.bins});
  }
}

// Lanes lie along the rows of the map, each with kVector cells of a row.
template <class T, int kVector>
__global__ void __launch_bounds__(kRoiThreads, sizeof(T) == sizeof(double) ? 2 : 3)
    roi_align_rows(const __grid_constant__ RoiAlignForwardCall call) {
  using Real = typename ImageReal<T>::type;
  using Pack = RoiPack<T, kVector>;
  extern __shared__ __align__(16) char shared[];
  const RoiAlignProblem &problem = call.forward.problem;
  const ImageView &input = call.forward.input;
  const ImageView &output = call.forward.output;
  const int lane = int(threadIdx.x % kLanes);
  const int warp = int(threadIdx.x / kLanes);
  const int32_t ph_count = problem.pooled_h;
  const int32_t pw_count = problem.pooled_w;
  const SmallDivider by_pw(pw_count);
  const RoiLists<Real> y = roi_lists_at<Real>(shared, call.places_y, ph_count);
  char *memory = shared + roi_list_bytes<Real>(call.places_y, ph_count);
  const RoiLists<Real> x = roi_lists_at<Real>(memory, call.places_x, pw_count);
  memory += roi_list_bytes<Real>(call.places_x, pw_count) + warp * roi_warp_bytes<Real>(pw_count);
  Real *const sums = reinterpret_cast<Real *>(memory);
  Real *const outs = sums + kRoiWarpChannels * kRoiColumnStride;

  for (int64_t task = blockIdx.x; task < call.tasks; task += gridDim.x) {
    const int64_t r = task % problem.rois;
    const int64_t c = task / problem.rois * kRoiBlockChannels + warp * kRoiWarpChannels;
    const RoiGeometry<Real> roi = roi_geometry<Real>(problem, call.forward.rois, r);
    make_roi_lists(roi, problem, y, x);
    __syncthreads();
    const int32_t channels = int32_t(min(problem.c - c, int64_t(kRoiWarpChannels)));
    if (channels > 0) {
      T *const to = static_cast<T *>(output.data) + output.plane(r, c);
      const int32_t outputs = channels * pw_count;
      // The columns of all bins.
      int32_t first = problem.w;
      int32_t end = 0;
      if (roi.batch >= 0) {
        for (int32_t b = lane; b < pw_count; b += kLanes) {
          const int2 list = x.bins[b];
          if (list.y == 0) continue;
          first = min(first, x.cell[list.x]);
          end = max(end, x.cell[list.x + list.y - 1] + 1);
        }
        first = __reduce_min_sync(kAllLanes, first) / kVector * kVector;
        end = __reduce_max_sync(kAllLanes, end);
      }
      const bool once = end - first <= kRoiColumns;
      const T *const from = static_cast<const T *>(input.data) + input.plane(roi.batch < 0 ? 0 : roi.batch, c);
      const T *at[kRoiItems];
      int32_t sum_at[kRoiItems];
      // Where the lane's items of a group lie.
      const auto find_items = [&](int32_t begin, int32_t packs, int32_t group, int32_t items) {
        const SmallDivider by_packs(packs);
#pragma unroll
        for (int k = 0; k < kRoiItems; ++k) {
          const int32_t item = min(group + k * kLanes + lane, items - 1);
          const int32_t channel = by_packs.divide(item);
          const int32_t column = (item - channel * packs) * kVector;
          at[k] = from + channel * input.channel + (begin + column) * input.column;
          sum_at[k] = channel * kRoiColumnStride + column;
        }
      };
      // Mostly these are the same for all rows of bins.
      const int32_t all_packs = (end - first + kVector - 1) / kVector;
      const bool same = once && end > first && all_packs * channels <= kRoiItems * kLanes;
      if (same) find_items(first, all_packs, 0, all_packs * channels);
      for (int32_t ph = 0; ph < ph_count; ++ph) {
        const int2 rows = roi.batch >= 0 ? y.bins[ph] : make_int2(0, 0);
        if (!once)
          for (int32_t i = lane; i < outputs; i += kLanes) outs[i] = 0;
        int32_t begin = first;
        do {
          const int32_t columns = max(min(end - begin, kRoiColumns), 0);
          const int32_t packs = (columns + kVector - 1) / kVector;
          const int32_t items = rows.y == 0 ? 0 : packs * channels;
          for (int32_t group = 0; group < items; group += kRoiItems * kLanes) {
            if (!same) find_items(begin, packs, group, items);
            Real sum[kRoiItems][kVector];
#pragma unroll
            for (int k = 0; k < kRoiItems; ++k)
#pragma unroll
              for (int v = 0; v < kVector; ++v) sum[k][v] = 0;
            const int32_t rounds = min((items - group + kLanes - 1) / kLanes, kRoiItems);
            Pack pack[2][kRoiItems];
            const auto load = [&](Pack(&into)[kRoiItems], int32_t entry) {
              const int64_t row = y.cell[entry] * input.row;
#pragma unroll
              for (int k = 0; k < kRoiItems; ++k)
                if (k < rounds) into[k] = *reinterpret_cast<const Pack *>(at[k] + row);
            };
            const auto add = [&](const Pack(&of)[kRoiItems], int32_t entry) {
              const Real weight = y.weight[entry];
#pragma unroll
              for (int k = 0; k < kRoiItems; ++k)
                if (k < rounds) {
#pragma unroll
                  for (int v = 0; v < kVector; ++v) sum[k][v] += weight * Real(of[k].value[v]);
                }
            };
            // A row's loads are on their way while the row before is added.
            const int32_t last = rows.x + rows.y - 1;
            load(pack[0], rows.x);
            int32_t entry = rows.x;
            for (; entry < last; entry += 2) {
              load(pack[1], entry + 1);
              add(pack[0], entry);
              if (entry + 2 <= last) load(pack[0], entry + 2);
              add(pack[1], entry + 1);
            }
            if (entry == last) add(pack[0], last);
#pragma unroll
            for (int k = 0; k < kRoiItems; ++k)
              if (group + k * kLanes + lane < items) {
#pragma unroll
                for (int v = 0; v < kVector; ++v) sums[sum_at[k] + v] = sum[k][v];
              }
          }
          __syncwarp();
          for (int32_t i = lane; i < outputs; i += kLanes) {
            const int32_t channel = by_pw.divide(i);
            const int32_t pw = i - channel * pw_count;
            const int2 list = rows.y == 0 ? make_int2(0, 0) : x.bins[pw];
            const Real *line = sums + channel * kRoiColumnStride - begin;
            Real sum = once ? Real(0) : outs[i];
            if (once) {
#pragma unroll 4
              for (int32_t entry = list.x; entry < list.x + list.y; ++entry)
                sum += x.weight[entry] * line[x.cell[entry]];
            } else {
              for (int32_t entry = list.x; entry < list.x + list.y; ++entry) {
                const int32_t cell = x.cell[entry];
                if (cell >= begin && cell < begin + columns) sum += x.weight[entry] * line[cell];
              }
              outs[i] = sum;
            }
            if (begin + columns >= end) to[channel * output.channel + output.cell(ph, pw)] = T(sum / roi.count);
          }
          __syncwarp();
          begin += kRoiColumns;
        } while (begin < end);
      }
    }
    __syncthreads();
  }
}

// Lanes are channels, kVector of them each.
template <class T, int kVector>
__global__ void __launch_bounds__(kRoiThreads) roi_align_lines(const __grid_constant__ RoiAlignForwardCall call) {
  using Real = typename ImageReal<T>::type;
  using Pack = RoiPack<T, kVector>;
  extern __shared__ __align__(16) char shared[];
  const RoiAlignProblem &problem = call.forward.problem;
  const ImageView &input = call.forward.input;
  const ImageView &output = call.forward.output;
  const int lane = int(threadIdx.x % kLanes);
  const int warp = int(threadIdx.x / kLanes);
  const int32_t ph_count = problem.pooled_h;
  const int32_t pw_count = problem.pooled_w;
  const RoiLists<Real> y = roi_lists_at<Real>(shared, call.places_y, ph_count);
  const RoiLists<Real> x =
      roi_lists_at<Real>(shared + roi_list_bytes<Real>(call.places_y, ph_count), call.places_x, pw_count);
  for (int64_t task = blockIdx.x; task < call.tasks; task += gridDim.x) {
    const int64_t r = task % problem.rois;
    const int64_t c = (task / problem.rois * kLanes + lane) * kVector;
    const RoiGeometry<Real> roi = roi_geometry<Real>(problem, call.forward.rois, r);
    make_roi_lists(roi, problem, y, x);
    __syncthreads();
    if (c < problem.c) {
      T *const to = static_cast<T *>(output.data) + output.plane(r, c);
      const T *const from = static_cast<const T *>(input.data) + input.plane(roi.batch < 0 ? 0 : roi.batch, c);
      for (int32_t b = warp; b < ph_count * pw_count; b += kRoiWarps) {
        const int32_t ph = b / pw_count;
        const int32_t pw = b - ph * pw_count;
        Real sum[kVector] = {};
        if (roi.batch >= 0) {
          const int2 rows = y.bins[ph];
          const int2 columns = x.bins[pw];
          for (int32_t i = rows.x; i < rows.x + rows.y; ++i) {
            const T *const line = from + y.cell[i] * input.row;
            Real part[kVector] = {};
#pragma unroll 4
            for (int32_t j = columns.x; j < columns.x + columns.y; ++j) {
              const Pack pack = *reinterpret_cast<const Pack *>(line + x.cell[j] * input.column);
#pragma unroll
              for (int v = 0; v < kVector; ++v) part[v] += x.weight[j] * Real(pack.value[v]);
            }
#pragma unroll
            for (int v = 0; v < kVector; ++v) sum[v] += y.weight[i] * part[v];
          }
        }
#pragma unroll
        for (int v = 0; v < kVector; ++v) to[v * output.channel + output.cell(ph, pw)] = T(sum[v] / roi.count);
      }
    }
    __syncthreads();
  }
}

// The map with its channels last, for roi_align_lines: a block turns tiles of kLanes channels by kLanes cells.
template <class T>
__global__ void __launch_bounds__(kRoiThreads)
    roi_align_turn(RoiAlignProblem problem, ImageView input, T *turned, int64_t cell_tiles, int64_t tiles) {
  __shared__ T tile[kLanes][kLanes + 1];
  wait_for_earlier_work();
  const int lane = int(threadIdx.x % kLanes);
  const int warp = int(threadIdx.x / kLanes);
  const int64_t cells = int64_t(problem.h) * problem.w;
  const int64_t channel_tiles = (problem.c + kLanes - 1) / kLanes;
  for (int64_t i = blockIdx.x; i < tiles; i += gridDim.x) {
    const int64_t cell = i % cell_tiles * kLanes;
    const int64_t channel = i / cell_tiles % channel_tiles * kLanes;
    const int64_t n = i / cell_tiles / channel_tiles;
    if (cell + lane < cells) {
      const int32_t y = int32_t((cell + lane) / problem.w);
      const int32_t x = int32_t(cell + lane - int64_t(y) * problem.w);
      const T *const from = static_cast<const T *>(input.data) + input.plane(n, channel) + input.cell(y, x);
#pragma unroll
      for (int k = warp; k < kLanes; k += kRoiWarps)
        if (channel + k < problem.c) tile[k][lane] = from[k * input.channel];
    }
    __syncthreads();
    if (channel + lane < problem.c) {
      T *const to = turned + (n * cells + cell) * problem.c + channel + lane;
#pragma unroll
      for (int k = warp; k < kLanes; k += kRoiWarps)
        if (cell + k < cells) to[k * problem.c] = tile[lane][k];
    }
    __syncthreads();
  }
  let_next_kernel_start();
}

// A thread for each output; for maps that are too large for lists in shared memory.
template <class T>
__global__ void __launch_bounds__(kRoiThreads) roi_align_any(RoiAlignForward call, int64_t outputs) {
  using Real = typename ImageReal<T>::type;
  const RoiAlignProblem &problem = call.problem;
  for (int64_t i = int64_t(blockIdx.x) * kRoiThreads + threadIdx.x; i < outputs;
       i += int64_t(gridDim.x) * kRoiThreads) {
    const int32_t pw = int32_t(i % problem.pooled_w);
    const int32_t ph = int32_t(i / problem.pooled_w % problem.pooled_h);
    const int64_t plane = i / problem.pooled_w / problem.pooled_h;
    const int64_t c = plane % problem.c;
    const int64_t r = plane / problem.c;
    const RoiGeometry<Real> roi = roi_geometry<Real>(problem, call.rois, r);
    Real sum = 0;
    if (roi.batch >= 0) {
      const T *from = static_cast<const T *>(call.input.data) + call.input.plane(roi.batch, c);
      const RoiCells rows = roi.y.reach(ph);
      const RoiCells columns = roi.x.reach(pw);
      for (int32_t row = rows.first; row < rows.first + rows.count; ++row) {
        const Real weight = roi.y.weight(ph, row);
        if (weight == 0) continue;
        Real part = 0;
        for (int32_t column = columns.first; column < columns.first + columns.count; ++column) {
          const Real share = roi.x.weight(pw, column);
          if (share != 0) part += share * Real(from[call.input.cell(row, column)]);
        }
        sum += weight * part;
      }
    }
    static_cast<T *>(call.output.data)[call.output.plane(r, c) + call.output.cell(ph, pw)] = T(sum / roi.count);
  }
}

// ---------------------------------------------------------------------------------------------------------------
// Backward.

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
    // Of both axes.
    for (int32_t i = int32_t(threadIdx.x); i < places; i += kRoiThreads) weights_y[i] = 0;
  }
  __syncthreads();
  if (roi.batch >= 0) {
    for (int32_t b = warp; b < problem.pooled_h + problem.pooled_w; b += kRoiWarps) {
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

}  // namespace baracuda
