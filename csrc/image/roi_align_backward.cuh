// SPDX-License-Identifier: Apache-2.0
// RoI-align backward on the GPU, deterministic. The map is cut into tiles. A warp owns a tile, a lane a channel of it,
// with the sums of all its cells in registers; it gathers from the RoIs that touch the tile, in their order. What a
// RoI's bins weigh is worked out once, into the workspace. A warp of each block does nothing but bring these weights
// and the gradients of the RoIs that touch its tiles.
#pragma once

#include <algorithm>

#include "image/roi_align.cuh"

namespace baracuda {

constexpr int kTileSide = 8;
constexpr int kTileWarps = 8;
constexpr int kTileThreads = (kTileWarps + 1) * kLanes;
// A tile's sums of a row of cells in turn: lanes, and tiles beside each other, lie in different banks.
constexpr int kTurnLane = kTileSide + 1;
constexpr int kTurnTile = kLanes * kTurnLane + kTileSide;
constexpr int kListThreads = 2 * kLanes;
// RoIs that a lane looks at together.
constexpr int kTileLooks = 4;
constexpr int kMostStages = 16;

// The bins that reach a tile along an axis, neighbours, and where their weights begin: kTileSide for each.
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

// Bins times tiles that they reach, at most.
template <class Real>
int64_t roi_band_places(int64_t cells, int64_t bins) {
  return RoiAxis<Real>::list_places(cells, bins, 0) / kTileSide + 2 * bins;
}

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

struct RoiAlignTilesCall {
  RoiAlignBackward backward;
  RoiTable table;
  int32_t down;     // regions
  int32_t across;   // regions
  int32_t groups;   // of channels
  int64_t regions;  // of all images and groups
  // A block's tiles; warps beyond as many take turns with the RoIs of the same tiles.
  int32_t tiles_down;
  int32_t tiles_across;
  // Of the ring, and what lies where in a stage.
  int32_t stages;
  int32_t stage_bytes;
  int32_t weights_x_at;
  int32_t gradient_at;
};

// What a stage begins with; then come the bands of the block's tiles, and their weights.
struct alignas(kRoiVector) TileStage {
  int32_t row;  // the first tile that has a band
  int32_t rows;
  int32_t column;
  int32_t columns;
  int32_t place_y;  // of the first weight
  int32_t place_x;
  int32_t shift;  // bytes
  int32_t roi;    // -1: there are no more
};

__device__ __forceinline__ unsigned shared_address(const void *pointer) {
  return unsigned(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void copy_16(void *to, const void *from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
               : "memory");
}

class Barrier {
 public:
  __device__ explicit Barrier(uint64_t *at) : address_(shared_address(at)) {}
  __device__ void init(int count) const {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address_), "r"(count) : "memory");
  }
  __device__ void arrive() const {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(address_) : "memory");
  }
  // As soon as this thread's copies so far have come.
  __device__ void arrive_with_copies() const {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address_) : "memory");
  }
  __device__ void wait(uint32_t parity) const {
    uint32_t done = 0;
    while (!done)
      asm volatile(
#if __CUDA_ARCH__ >= 900
          "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
#else
          "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
#endif
          : "=r"(done)
          : "r"(address_), "r"(parity)
          : "memory");
  }

 private:
  unsigned address_;
};

// A place in the ring.
struct RingPlace {
  int32_t stage;
  uint32_t parity;

  __device__ void advance(int32_t by, int32_t stages) {
    stage += by;
    while (stage >= stages) {
      stage -= stages;
      parity ^= 1;
    }
  }
};

template <class Real>
struct alignas(kRoiVector) RoiVector {
  static constexpr int kCount = int(kRoiVector / int64_t(sizeof(Real)));
  Real value[kCount];
};

template <class Real>
__device__ __forceinline__ void load_weights(Real (&into)[kTileSide], const Real *from) {
  constexpr int kCount = RoiVector<Real>::kCount;
#pragma unroll
  for (int i = 0; i < kTileSide; i += kCount) {
    const RoiVector<Real> some = *reinterpret_cast<const RoiVector<Real> *>(from + i);
#pragma unroll
    for (int j = 0; j < kCount; ++j) into[i + j] = some.value[j];
  }
}

// All warps but the one that brings RoIs.
__device__ __forceinline__ void sync_tiles() { asm volatile("bar.sync 1, %0;" ::"n"(kTileWarps * kLanes) : "memory"); }

// A tile's sums of one channel.
template <class T>
class RoiTile {
 public:
  using Real = typename ImageReal<T>::type;

  __device__ RoiTile() {
#pragma unroll
    for (int i = 0; i < kTileSide; ++i)
#pragma unroll
      for (int j = 0; j < kTileSide; ++j) sum_[i][j] = 0;
  }

  // Adds what one RoI gives, whose gradients for the channel are `given`.
  __device__ __forceinline__ void add(const RoiBand &y, const RoiBand &x, const Real *weights_y, const Real *weights_x,
                                      const T *given, int64_t row, int64_t column) {
    given += y.first * row + x.first * column;
    bool odd = false;
    for (int32_t i = 0; i < y.count; ++i)
      add_row<false>(x.count, weights_y + i * kTileSide, weights_x, given + i * row, column, odd);
    if (__any_sync(kAllLanes, odd))
      for (int32_t i = 0; i < y.count; ++i)
        add_row<true>(x.count, weights_y + i * kTileSide, weights_x, given + i * row, column, odd);
  }

  __device__ Real sum(int i, int j) const { return sum_[i][j]; }

 private:
  // Of numbers so large that sums of them may not be finite, and of those that aren't, a weight of zero is no factor:
  // they are left out at first, and added by themselves.
  template <bool kOdd>
  __device__ __forceinline__ void add_row(int32_t count, const Real *weights_y, const Real *weights_x, const T *given,
                                          int64_t column, bool &odd) {
    constexpr Real kSafe = sizeof(Real) == sizeof(float) ? Real(0x1p120) : Real(0x1p1000);
    Real line[kTileSide] = {};
#pragma unroll 2
    for (int32_t k = 0; k < count; ++k) {
      Real value = Real(given[k * column]);
      const bool safe = fabs(value) < kSafe;
      odd = odd || !safe;
      if (safe == kOdd) value = 0;
      Real weight[kTileSide];
      load_weights(weight, weights_x + k * kTileSide);
#pragma unroll
      for (int j = 0; j < kTileSide; ++j)
        if (!kOdd || weight[j] != 0) line[j] += weight[j] * value;
    }
    Real weight[kTileSide];
    load_weights(weight, weights_y);
#pragma unroll
    for (int i = 0; i < kTileSide; ++i) {
      if (kOdd && weight[i] == 0) continue;
#pragma unroll
      for (int j = 0; j < kTileSide; ++j) sum_[i][j] += weight[i] * line[j];
    }
  }

  Real sum_[kTileSide][kTileSide];
};

// Brings what the RoIs that touch the block's tiles have for them, in the order of the RoIs.
template <class T, bool kStaged>
__device__ void bring_rois(const RoiAlignTilesCall &call, int64_t n, int32_t tile_row, int32_t tile_column, int64_t c0,
                           char *ring, uint64_t *full, uint64_t *empty, int32_t turns, RingPlace &place) {
  using Real = typename ImageReal<T>::type;
  constexpr int32_t kSlot = kTileSide * int32_t(sizeof(Real)) / int32_t(kRoiVector);
  const RoiAlignProblem &problem = call.backward.problem;
  const RoiTable &table = call.table;
  const ImageView &doutput = call.backward.doutput;
  const int lane = int(threadIdx.x % kLanes);
  const int32_t channels = int32_t(min(problem.c - c0, int64_t(kLanes)));
  const int32_t pieces = problem.pooled_h * problem.pooled_w;
  const auto copy = [&](char *to, const char *from, int32_t vectors) {
    for (int32_t i = lane; i < vectors; i += kLanes) copy_16(to + i * kRoiVector, from + i * kRoiVector, kRoiVector);
  };
  for (int64_t from = 0; from < problem.rois; from += kTileLooks * kLanes) {
    RoiTiles tiles[kTileLooks];
    bool touches[kTileLooks];
#pragma unroll
    for (int k = 0; k < kTileLooks; ++k) {
      const int64_t r = from + k * kLanes + lane;
      touches[k] = r < problem.rois && table.batch[r] == n;
      if (r < problem.rois) tiles[k] = table.tiles[r];
    }
#pragma unroll
    for (int k = 0; k < kTileLooks; ++k) {
      touches[k] = touches[k] && tiles[k].y0 < tile_row + call.tiles_down && tiles[k].y1 >= tile_row &&
                   tiles[k].x0 < tile_column + call.tiles_across && tiles[k].x1 >= tile_column;
      TileStage mine = {};
      int32_t slots_y = 0;
      int32_t slots_x = 0;
      int32_t first = INT32_MAX;  // bins of y
      int32_t end = 0;
      if (touches[k]) {
        const char *const record = table.records + (from + k * kLanes + lane) * table.record;
        mine.row = max(tiles[k].y0, tile_row);
        mine.rows = min(tiles[k].y1, tile_row + call.tiles_down - 1) - mine.row + 1;
        mine.column = max(tiles[k].x0, tile_column);
        mine.columns = min(tiles[k].x1, tile_column + call.tiles_across - 1) - mine.column + 1;
        const RoiBand *const y = reinterpret_cast<const RoiBand *>(record) + (mine.row - tiles[k].y0);
        const RoiBand *const x =
            reinterpret_cast<const RoiBand *>(record + table.bands_x_at) + (mine.column - tiles[k].x0);
        const RoiBand x_begin = x[0];
        const RoiBand x_last = x[mine.columns - 1];
        mine.place_x = x_begin.place;
        slots_x = x_last.place + x_last.count - x_begin.place;
        for (int32_t i = 0; i < mine.rows; ++i) {
          const RoiBand band = y[i];
          if (i == 0) mine.place_y = band.place;
          slots_y += band.count;
          if (band.count == 0) continue;
          first = min(first, band.first);
          end = max(end, band.first + band.count);
        }
      }
      unsigned some = __ballot_sync(kAllLanes, slots_x > 0 && slots_y > 0);
      while (some) {
        const int of = __ffs(int(some)) - 1;
        some &= some - 1;
        TileStage stage;
        stage.row = __shfl_sync(kAllLanes, mine.row, of);
        stage.rows = __shfl_sync(kAllLanes, mine.rows, of);
        stage.column = __shfl_sync(kAllLanes, mine.column, of);
        stage.columns = __shfl_sync(kAllLanes, mine.columns, of);
        stage.place_y = __shfl_sync(kAllLanes, mine.place_y, of);
        stage.place_x = __shfl_sync(kAllLanes, mine.place_x, of);
        stage.shift = 0;
        stage.roi = int32_t(from) + k * kLanes + of;
        const int32_t y0 = __shfl_sync(kAllLanes, tiles[k].y0, of);
        const int32_t x0 = __shfl_sync(kAllLanes, tiles[k].x0, of);
        const int32_t count_y = __shfl_sync(kAllLanes, slots_y, of);
        const int32_t count_x = __shfl_sync(kAllLanes, slots_x, of);
        const int32_t bins_first = __shfl_sync(kAllLanes, first, of);
        const int32_t bins_end = __shfl_sync(kAllLanes, end, of);
        const int64_t r = from + k * kLanes + of;
        const char *const record = table.records + r * table.record;
        char *const to = ring + place.stage * call.stage_bytes;
        Barrier(empty + place.stage).wait(place.parity);
        char *const bands = to + sizeof(TileStage);
        copy(bands, record + (stage.row - y0) * int32_t(sizeof(RoiBand)), stage.rows);
        copy(bands + call.tiles_down * sizeof(RoiBand),
             record + table.bands_x_at + (stage.column - x0) * int32_t(sizeof(RoiBand)), stage.columns);
        char *const weights = bands + (call.tiles_down + call.tiles_across) * sizeof(RoiBand);
        copy(weights, record + table.weights_y_at + stage.place_y * kSlot * kRoiVector, count_y * kSlot);
        copy(to + call.weights_x_at, record + table.weights_x_at + stage.place_x * kSlot * kRoiVector, count_x * kSlot);
        if constexpr (kStaged) {
          // Of each channel the rows of bins that reach the tiles, as vectors that begin where those of memory do.
          const char *piece =
              reinterpret_cast<const char *>(static_cast<const T *>(doutput.data) + doutput.plane(r, c0));
          stage.shift = int32_t(reinterpret_cast<uintptr_t>(piece) % kRoiVector);
          piece -= stage.shift;
          constexpr int32_t kSize = int32_t(sizeof(T));
          constexpr int32_t kBytes = int32_t(kRoiVector);
          const int32_t whole = stage.shift + channels * pieces * kSize;
          const int32_t begin = stage.shift + bins_first * problem.pooled_w * kSize;
          const int32_t bytes = (bins_end - bins_first) * problem.pooled_w * kSize;
          const int32_t vectors = (bytes + kBytes - 1) / kBytes + 1;
          const SmallDivider by_vectors(vectors);
          for (int32_t i = lane; i < channels * vectors; i += kLanes) {
            const int32_t channel = by_vectors.divide(i);
            const int32_t own = begin + channel * pieces * kSize;
            const int32_t at = (own / kBytes + i - channel * vectors) * kBytes;
            if (at < own + bytes) copy_16(to + call.gradient_at + at, piece + at, min(kBytes, whole - at));
          }
        }
        if (lane == 0) *reinterpret_cast<TileStage *>(to) = stage;
        const Barrier ready(full + place.stage);
        ready.arrive_with_copies();
        if (lane == 0) ready.arrive();
        place.advance(1, call.stages);
      }
    }
  }
  for (int32_t turn = 0; turn < turns; ++turn) {
    Barrier(empty + place.stage).wait(place.parity);
    if (lane == 0) reinterpret_cast<TileStage *>(ring + place.stage * call.stage_bytes)->roi = -1;
    const Barrier ready(full + place.stage);
    ready.arrive_with_copies();
    if (lane == 0) ready.arrive();
    place.advance(1, call.stages);
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

template <class T, bool kStaged>
__global__ void __launch_bounds__(kTileThreads, sizeof(T) == sizeof(double) ? 1 : 2)
    roi_align_tiles(const __grid_constant__ RoiAlignTilesCall call) {
  using Real = typename ImageReal<T>::type;
  extern __shared__ __align__(16) char shared[];
  __shared__ uint64_t full[kMostStages];
  __shared__ uint64_t empty[kMostStages];
  const RoiAlignProblem &problem = call.backward.problem;
  const ImageView &doutput = call.backward.doutput;
  const ImageView &dinput = call.backward.dinput;
  const int lane = int(threadIdx.x % kLanes);
  const int warp = int(threadIdx.x / kLanes);
  const int32_t tiles = call.tiles_down * call.tiles_across;
  const int32_t turns = kTileWarps / tiles;
  if (threadIdx.x < unsigned(call.stages)) {
    Barrier(full + threadIdx.x).init(kLanes + 1);
    Barrier(empty + threadIdx.x).init(tiles);
  }
  __syncthreads();
  // At first all places are free.
  RingPlace at = {0, warp == kTileWarps ? 1u : 0u};
  if (warp < kTileWarps) at.advance(warp / tiles, call.stages);
  wait_for_earlier_work();

  for (int64_t task = blockIdx.x; task < call.regions; task += gridDim.x) {
    const int64_t c0 = task % call.groups * kLanes;
    const int64_t place = task / call.groups;
    const int32_t tile_column = int32_t(place % call.across) * call.tiles_across;
    const int32_t tile_row = int32_t(place / call.across % call.down) * call.tiles_down;
    const int64_t n = place / call.across / call.down;
    if (warp == kTileWarps) {
      bring_rois<T, kStaged>(call, n, tile_row, tile_column, c0, shared, full, empty, turns, at);
    } else {
      const int32_t own = warp % tiles;
      const int32_t own_row = own / call.tiles_across;
      const int32_t own_column = own % call.tiles_across;
      const int32_t channels = int32_t(min(problem.c - c0, int64_t(kLanes)));
      // Lanes without a channel of their own take part with another's, and store nothing.
      const int32_t channel = min(lane, channels - 1);
      RoiTile<T> tile;
      for (bool more = true; more;) {
        Barrier(full + at.stage).wait(at.parity);
        const char *const memory = shared + at.stage * call.stage_bytes;
        const TileStage stage = *reinterpret_cast<const TileStage *>(memory);
        more = stage.roi >= 0;
        const int32_t row = tile_row + own_row - stage.row;
        const int32_t column = tile_column + own_column - stage.column;
        if (more && uint32_t(row) < uint32_t(stage.rows) && uint32_t(column) < uint32_t(stage.columns)) {
          const RoiBand *const bands = reinterpret_cast<const RoiBand *>(memory + sizeof(TileStage));
          const RoiBand y = bands[row];
          const RoiBand x = bands[call.tiles_down + column];
          const Real *const weights_y = reinterpret_cast<const Real *>(bands + call.tiles_down + call.tiles_across) +
                                        (y.place - stage.place_y) * kTileSide;
          const Real *const weights_x =
              reinterpret_cast<const Real *>(memory + call.weights_x_at) + (x.place - stage.place_x) * kTileSide;
          if constexpr (kStaged) {
            const T *const given = reinterpret_cast<const T *>(memory + call.gradient_at + stage.shift);
            tile.add(y, x, weights_y, weights_x, given + channel * problem.pooled_h * problem.pooled_w,
                     problem.pooled_w, 1);
          } else {
            const T *const given = static_cast<const T *>(doutput.data) + doutput.plane(stage.roi, c0 + channel);
            tile.add(y, x, weights_y, weights_x, given, doutput.row, doutput.column);
          }
        }
        __syncwarp();
        if (lane == 0) Barrier(empty + at.stage).arrive();
        at.advance(turns, call.stages);
      }

      // Sums of the same cell meet, and lanes that were channels become columns, in the ring's memory.
      Real *const turn = reinterpret_cast<Real *>(shared);
      const int32_t columns = call.tiles_across * kTileSide;
      const bool beside = dinput.channel == 1 && problem.c > 1;
      T *const to = static_cast<T *>(dinput.data) + dinput.plane(n, c0);
#pragma unroll
      for (int i = 0; i < kTileSide; ++i) {
        sync_tiles();
#pragma unroll
        for (int j = 0; j < kTileSide; ++j) turn[warp * kTurnTile + lane * kTurnLane + j] = tile.sum(i, j);
        sync_tiles();
        for (int32_t k = int32_t(threadIdx.x); k < tiles * kTileSide * kLanes; k += kTileWarps * kLanes) {
          const int32_t c = beside ? k % kLanes : k / columns % kLanes;
          const int32_t column = beside ? k / kLanes % columns : k % columns;
          const int32_t down = k / (columns * kLanes);
          const int32_t row = (tile_row + down) * kTileSide + i;
          if (c >= channels || row >= problem.h || tile_column * kTileSide + column >= problem.w) continue;
          const Real *const sums =
              turn + (down * call.tiles_across + column / kTileSide) * kTurnTile + c * kTurnLane + column % kTileSide;
          Real sum = 0;
#pragma unroll 1
          for (int32_t other = 0; other < turns; ++other) sum += sums[other * tiles * kTurnTile];
          T &cell = to[c * dinput.channel + dinput.cell(row, tile_column * kTileSide + column)];
          cell = T(call.backward.accumulate ? Real(cell) + sum : sum);
        }
      }
    }
    __syncthreads();
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

// How the map is cut, and what a stage of the ring holds.
struct RoiTileShape {
  int32_t tiles_down = 0;
  int32_t tiles_across = 0;
  int32_t stages = 0;
  int32_t stage_bytes = 0;
  int32_t weights_x_at = 0;
  int32_t gradient_at = 0;
  bool staged = false;
};

template <class Real>
RoiTileShape roi_tile_shape(const RoiAlignProblem &problem, int64_t element, bool contiguous) {
  // Blocks that fill a large GPU several times.
  constexpr int64_t kManyBlocks = 512;
  // All of it, for two blocks beside each other.
  constexpr int64_t kMostShared = 111 * 1024;
  RoiTileShape shape;
  const int64_t rows = ceil_div(problem.h, kTileSide);
  const int64_t columns = ceil_div(problem.w, kTileSide);
  const int64_t planes = problem.n * ceil_div(problem.c, kLanes);
  for (const auto &[down, across] : {std::pair(2, 4), std::pair(1, 4), std::pair(1, 2), std::pair(1, 1)}) {
    shape.tiles_down = down;
    shape.tiles_across = across;
    if (planes * ceil_div(rows, down) * ceil_div(columns, across) >= kManyBlocks) break;
  }
  const auto weights = [](int64_t tiles, int64_t bins) {
    const int64_t places = std::min(bins * tiles, roi_band_places<Real>(tiles * kTileSide, bins));
    return places * kTileSide * int64_t(sizeof(Real));
  };
  const int64_t weights_at =
      int64_t(sizeof(TileStage)) + (shape.tiles_down + shape.tiles_across) * int64_t(sizeof(RoiBand));
  const int64_t weights_x_at = weights_at + weights(shape.tiles_down, problem.pooled_h);
  const int64_t gradient_at = weights_x_at + weights(shape.tiles_across, problem.pooled_w);
  const int64_t gradients = whole_vectors(kLanes * int64_t(problem.pooled_h) * problem.pooled_w * element) + kRoiVector;
  shape.staged = contiguous && 2 * (gradient_at + gradients) <= kMostShared;
  const int64_t bytes = gradient_at + (shape.staged ? gradients : 0);
  shape.stages = int32_t(std::min<int64_t>(kMostShared / bytes, kMostStages));
  if (shape.stages < 2) return {};
  shape.stage_bytes = int32_t(bytes);
  shape.weights_x_at = int32_t(weights_x_at);
  shape.gradient_at = int32_t(gradient_at);
  return shape;
}

// Everything is left at NULL with a base of NULL.
template <class Real>
RoiTable roi_table(const RoiAlignProblem &problem, Workspace &space) {
  RoiTable table = {};
  const int64_t bands_x_at = ceil_div(problem.h, kTileSide) * int64_t(sizeof(RoiBand));
  const int64_t weights_y_at = bands_x_at + ceil_div(problem.w, kTileSide) * int64_t(sizeof(RoiBand));
  const int64_t slot = kTileSide * int64_t(sizeof(Real));
  const int64_t weights_x_at = weights_y_at + roi_band_places<Real>(problem.h, problem.pooled_h) * slot;
  const int64_t record = weights_x_at + roi_band_places<Real>(problem.w, problem.pooled_w) * slot;
  const int64_t bins = (int64_t(problem.pooled_h) + problem.pooled_w) * int64_t(sizeof(int2));
  if (roi_tile_shape<Real>(problem, 0, false).stages == 0 || bins > kMostSharedOfTwo) return table;
  table.record = int32_t(record);
  table.bands_x_at = int32_t(bands_x_at);
  table.weights_y_at = int32_t(weights_y_at);
  table.weights_x_at = int32_t(weights_x_at);
  table.batch = space.take<int32_t>(problem.rois);
  table.tiles = space.take<RoiTiles>(problem.rois);
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
  if (table.record == 0) {
    const int64_t cells = problem.n * problem.c * problem.h * problem.w;
    launch(roi_align_any_backward<T>, {std::min(ceil_div(cells, kRoiThreads), kMostBlocks), kRoiThreads}, stream, call,
           cells);
    return;
  }
  const int64_t pieces = int64_t(problem.pooled_h) * problem.pooled_w;
  const auto fits = [](int64_t extent, int64_t stride, int64_t wanted) { return extent <= 1 || stride == wanted; };
  const bool contiguous = fits(problem.pooled_w, given.column, 1) &&
                          fits(problem.pooled_h, given.row, problem.pooled_w) && fits(problem.c, given.channel, pieces);
  const RoiTileShape shape = roi_tile_shape<Real>(problem, sizeof(T), contiguous);
  if (problem.rois > 0) {
    const size_t bins = (size_t(problem.pooled_h) + size_t(problem.pooled_w)) * sizeof(int2);
    allow_roi_shared(roi_align_bands<Real>, bins);
    launch(roi_align_bands<Real>, {problem.rois, kListThreads, bins, true}, stream, problem, call.rois, table);
  }
  RoiAlignTilesCall tiles = {};
  tiles.backward = call;
  tiles.table = table;
  tiles.down = int32_t(ceil_div(ceil_div(problem.h, kTileSide), shape.tiles_down));
  tiles.across = int32_t(ceil_div(ceil_div(problem.w, kTileSide), shape.tiles_across));
  tiles.groups = int32_t(ceil_div(problem.c, kLanes));
  tiles.regions = problem.n * tiles.down * tiles.across * tiles.groups;
  tiles.tiles_down = shape.tiles_down;
  tiles.tiles_across = shape.tiles_across;
  tiles.stages = shape.stages;
  tiles.stage_bytes = shape.stage_bytes;
  tiles.weights_x_at = shape.weights_x_at;
  tiles.gradient_at = shape.gradient_at;
  constexpr size_t kTurn = kTileWarps * kTurnTile * sizeof(Real);
  const size_t shared = std::max(size_t(shape.stages) * size_t(shape.stage_bytes), kTurn);
  const auto kernel = shape.staged ? roi_align_tiles<T, true> : roi_align_tiles<T, false>;
  allow_roi_shared(kernel, shared);
  launch(kernel, {std::min(tiles.regions, kMostBlocks), kTileThreads, shared, true}, stream, tiles);
}

}  // namespace baracuda
