// SPDX-License-Identifier: Apache-2.0
// RoI-align backward on the GPU, deterministic. The map is cut into tiles. A warp owns a tile, a lane a channel of it,
// with the sums of all its cells in registers; it gathers from the RoIs that touch the tile, in their order. What a
// RoI's bins weigh is worked out once, into the workspace. The warps of a block have the same tile, so they share what
// they look up, and wait for each other little. Gradients are read where they are, as few bins of a RoI reach a tile:
// through shared memory, some steps ahead, two rows of bins by one instruction. They mostly lie in one line, and what
// L2 can do is limited by requests, which are of a line, more than by bytes.
#pragma once

#include <algorithm>

#include "image/roi_align_ring.cuh"
#include "image/roi_align_touched.cuh"

namespace baracuda {

// Warps of a block have the same tile and channels of their own.
constexpr int kMostTileWarps = 8;
constexpr int kMostTileThreads = kMostTileWarps * kLanes;
// RoIs that a block looks at before it works on those that touch its tile; of these, steps that it prepares.
constexpr int kRoiBatch = 1024;
constexpr int kMostSteps = 96;
constexpr size_t kTileLists = kRoiBatch / kLanes * sizeof(uint32_t) + kRoiBatch * sizeof(uint16_t);
// What a block has at least, on the smallest cards.
constexpr size_t kMostTileShared = 99 * 1024;
// A channel's sums of a row, in turn; lanes lie in different banks.
constexpr int kTurnedRow = kTileSide + 1;

// A tile's sums of one channel.
template <class T>
class RoiTile {
 public:
  using Real = typename ImageReal<T>::type;

  __device__ RoiTile() { clear(); }

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kTileSide; ++i)
#pragma unroll
      for (int j = 0; j < kTileSide; ++j) sum_[i][j] = 0;
  }

  // Every so many of the steps. `given` are the lane's gradients; the next step's are on their way while one is worked
  // on.
  template <bool kCareful>
  __device__ __forceinline__ void add(const TileStep<Real> *steps, int32_t first, int32_t every, int32_t count,
                                      const T *given, const ImageView &doutput) {
    if (every > 1 && first >= count) return;
    T coming[kStepRows][kStepBins];
    const auto load = [&](const TileStep<Real> &step) {
#pragma unroll
      for (int r = 0; r < kStepRows; ++r) {
        const T *const from = given + step.offset + r * doutput.row;
        const int32_t bins = step.rows >> r * kRowBits ? step.bins : 0;
#pragma unroll
        for (int k = 0; k < kStepBins; ++k) coming[r][k] = k < bins ? from[k * doutput.column] : T(Real(0));
      }
    };
    load(steps[first]);
    for (int32_t s = first; s < count; s += every) {
      Real value[kStepRows][kStepBins];
#pragma unroll
      for (int r = 0; r < kStepRows; ++r)
#pragma unroll
        for (int k = 0; k < kStepBins; ++k) value[r][k] = Real(coming[r][k]);
      if (s + every < count) load(steps[s + every]);
      add_step<kCareful>(value, steps[s]);
    }
  }

  // The same, not carefully, through an empty ring.
  __device__ __forceinline__ void add_ahead(const TileStep<Real> *steps, int32_t first, int32_t every, int32_t count,
                                            RoiRing<T> ring) {
#pragma unroll 1
    for (int32_t i = 0; i < kRing - 1; ++i) ring.fetch(steps, first + i * every, count);
    for (int32_t s = first; s < count; s += every) {
      // All lanes have read the slot that is filled now.
      ring.wait();
      ring.fetch(steps, s + (kRing - 1) * every, count);
      const TileStep<Real> &step = steps[s];
      Real value[kStepRows][kStepBins];
#pragma unroll
      for (int r = 0; r < kStepRows; ++r)
        if (r == 0 || step.rows >> r * kRowBits) ring.read(value[r], r, step.offset);
      ring.drop_oldest();
      add_step<false>(value, step);
    }
    // Or the compiler has lanes meet after every branch of the loop.
    __syncwarp();
  }

  // Adds up the sums of as many neighbouring warps, of which each has its number and room for a row, in the first. For
  // all threads of a block.
  __device__ void collect(Real *room, int32_t number, int32_t warps) {
    Real *const own = room + threadIdx.x % kLanes * kTurnedRow;
#pragma unroll
    for (int i = 0; i < kTileSide; ++i) {
      if (number > 0) {
#pragma unroll
        for (int j = 0; j < kTileSide; ++j) own[j] = sum_[i][j];
      }
      __syncthreads();
      if (number == 0) {
        for (int32_t other = 1; other < warps; ++other) {
#pragma unroll
          for (int j = 0; j < kTileSide; ++j) sum_[i][j] += own[other * kLanes * kTurnedRow + j];
        }
      }
      __syncthreads();
    }
  }

  __device__ Real sum(int i, int j) const { return sum_[i][j]; }

  __device__ bool finite() const {
    Real zero = 0;
#pragma unroll
    for (int i = 0; i < kTileSide; ++i)
#pragma unroll
      for (int j = 0; j < kTileSide; ++j) zero += sum_[i][j] * Real(0);
    return zero == 0;
  }

 private:
  template <bool kCareful>
  __device__ __forceinline__ void add_step(const Real (&value)[kStepRows][kStepBins], const TileStep<Real> &step) {
    static_assert(kStepRows == 2);
    if (step.rows >> kRowBits)
      add_rows<kCareful, 2>(value, step);
    else
      add_rows<kCareful, 1>(value, step);
  }

  // Careful means that a weight of zero is no factor. It matters where numbers are infinite, none, or so large that
  // sums of others are.
  template <bool kCareful, int kRows>
  __device__ __forceinline__ void add_rows(const Real (&value)[kStepRows][kStepBins], const TileStep<Real> &step) {
    Real line[kRows][kTileSide];
    Real weight[kTileSide];
    load_weights(weight, step.x[0]);
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int j = 0; j < kTileSide; ++j) line[r][j] = kCareful && weight[j] == 0 ? Real(0) : weight[j] * value[r][0];
#pragma unroll
    for (int k = 1; k < kStepBins; ++k) {
      if (k < step.bins) {
        load_weights(weight, step.x[k]);
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
          for (int j = 0; j < kTileSide; ++j)
            if (!kCareful || weight[j] != 0) line[r][j] += weight[j] * value[r][k];
      }
    }
    const int32_t rows = step.rows;
    // All at once, rather than where they are wanted.
    Real down[kRows][kTileSide];
#pragma unroll
    for (int r = 0; r < kRows; ++r) load_weights(down[r], step.y[r]);
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < kTileSide; i += 2) {
        if (!(rows & 1 << (r * kRowBits + i / 2))) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const Real share = down[r][i + half];
          if (kCareful && share == 0) continue;
#pragma unroll
          for (int j = 0; j < kTileSide; ++j) sum_[i + half][j] += share * line[r][j];
        }
      }
  }

  Real sum_[kTileSide][kTileSide];
};

// The steps of 32 RoIs, one for each lane.
template <class Real>
class TileSteps {
 public:
  // Lanes without a RoI have -1.
  __device__ TileSteps(const RoiAlignTilesCall &call, int32_t roi, int32_t tile_row, int32_t tile_column)
      : call_(call), roi_(roi) {
    int32_t count = 0;
    if (roi >= 0) {
      const RoiTiles tiles = call.table.tiles[roi];
      const char *const record = call.table.records + roi * int64_t(call.table.record);
      y_ = reinterpret_cast<const RoiBand *>(record)[tile_row - tiles.y0];
      x_ = reinterpret_cast<const RoiBand *>(record + call.table.bands_x_at)[tile_column - tiles.x0];
      count = (y_.count + kStepRows - 1) / kStepRows * ((x_.count + kStepBins - 1) / kStepBins);
    }
    end_ = count;
    for (int distance = 1; distance < kLanes; distance *= 2) {
      const int32_t other = __shfl_up_sync(kAllLanes, end_, unsigned(distance));
      if (int(threadIdx.x % kLanes) >= distance) end_ += other;
    }
    total_ = __shfl_sync(kAllLanes, end_, kLanes - 1);
    begin_ = end_ - count;
  }

  __device__ int32_t total() const { return total_; }

  // All lanes together. Steps from the total on aren't written.
  __device__ void write(TileStep<Real> *to, int32_t s) const {
    int owner = 0;
#pragma unroll
    for (int half = kLanes / 2; half > 0; half /= 2)
      if (__shfl_sync(kAllLanes, end_, owner + half - 1) <= s) owner += half;
    const int32_t roi = __shfl_sync(kAllLanes, roi_, owner);
    const int32_t y_first = __shfl_sync(kAllLanes, y_.first, owner);
    const int32_t y_count = __shfl_sync(kAllLanes, y_.count, owner);
    const int32_t y_place = __shfl_sync(kAllLanes, y_.place, owner);
    const int32_t x_first = __shfl_sync(kAllLanes, x_.first, owner);
    const int32_t x_count = __shfl_sync(kAllLanes, x_.count, owner);
    const int32_t x_place = __shfl_sync(kAllLanes, x_.place, owner);
    const int32_t begin = __shfl_sync(kAllLanes, begin_, owner);
    if (s >= total_) return;
    const int32_t down = (y_count + kStepRows - 1) / kStepRows;
    const int32_t chunk = (s - begin) / down * kStepBins;
    const int32_t row = (s - begin) % down * kStepRows;
    const char *const record = call_.table.records + roi * int64_t(call_.table.record);
    to->offset = call_.backward.doutput.plane(roi, 0) + call_.backward.doutput.cell(y_first + row, x_first + chunk);
    to->bins = min(x_count - chunk, kStepBins);
    Real weight[kTileSide];
    const Real *const y =
        reinterpret_cast<const Real *>(record + call_.table.weights_y_at) + (y_place + row) * kTileSide;
    int32_t rows = 0;
#pragma unroll
    for (int r = 0; r < kStepRows; ++r) {
      if (r >= y_count - row) continue;
      load_weights(weight, y + r * kTileSide);
#pragma unroll
      for (int i = 0; i < kTileSide; ++i) {
        to->y[r][i] = weight[i];
        if (weight[i] != 0) rows |= 1 << (r * kRowBits + i / 2);
      }
    }
    to->rows = rows;
    const Real *const x =
        reinterpret_cast<const Real *>(record + call_.table.weights_x_at) + (x_place + chunk) * kTileSide;
#pragma unroll
    for (int k = 0; k < kStepBins; ++k) {
      if (k >= x_count - chunk) continue;
      load_weights(weight, x + k * kTileSide);
#pragma unroll
      for (int i = 0; i < kTileSide; ++i) to->x[k][i] = weight[i];
    }
  }

 private:
  const RoiAlignTilesCall &call_;
  int32_t roi_;
  RoiBand y_ = {};
  RoiBand x_ = {};
  int32_t begin_;
  int32_t end_;
  int32_t total_;
};

// The RoIs of a batch that touch a tile, in their order, as numbers within the batch. For all threads of a block.
__device__ inline int32_t find_rois(const RoiAlignTilesCall &call, int64_t from, int32_t n, int32_t tile_row,
                                    int32_t tile_column, uint32_t *words, uint16_t *found) {
  constexpr int kWords = kRoiBatch / kLanes;
  static_assert(kWords == kLanes);
  const int lane = int(threadIdx.x % kLanes);
  const int warps = int(blockDim.x / kLanes);
#pragma unroll 4
  for (int k = int(threadIdx.x / kLanes); k < kWords; k += warps) {
    const int64_t r = from + k * kLanes + lane;
    bool touches = false;
    if (r < call.backward.problem.rois) {
      const RoiTiles tiles = call.table.tiles[r];
      touches = call.table.batch[r] == n && tiles.y0 <= tile_row && tiles.y1 >= tile_row && tiles.x0 <= tile_column &&
                tiles.x1 >= tile_column;
    }
    const unsigned word = __ballot_sync(kAllLanes, touches);
    if (lane == 0) words[k] = word;
  }
  __syncthreads();
  const unsigned own = words[lane];
  int32_t upto = __popc(own);
  for (int distance = 1; distance < kLanes; distance *= 2) {
    const int32_t other = __shfl_up_sync(kAllLanes, upto, unsigned(distance));
    if (lane >= distance) upto += other;
  }
  for (int k = int(threadIdx.x / kLanes); k < kWords; k += warps) {
    const unsigned word = __shfl_sync(kAllLanes, own, k);
    const int32_t end = __shfl_sync(kAllLanes, upto, k);
    const unsigned later = word >> lane;
    if (later & 1) found[end - __popc(later)] = uint16_t(k * kLanes + lane);
  }
  __syncthreads();
  return __shfl_sync(kAllLanes, upto, kLanes - 1);
}

// With splits, some neighbouring warps have the same channels and share the steps of their tile. Where RoIs touch few
// tiles, only these are tasks, and half the blocks write zeros to all others in the map's order.
template <class T, bool kSplits, bool kFew>
__global__ void __launch_bounds__(kMostTileThreads, sizeof(T) == sizeof(double) ? 1 : 2)
    roi_align_tiles(const __grid_constant__ RoiAlignTilesCall call) {
  using Real = typename ImageReal<T>::type;
  extern __shared__ __align__(16) char shared[];
  __shared__ TileStep<Real> steps[kMostSteps];
  __shared__ uint32_t words[kRoiBatch / kLanes];
  __shared__ uint16_t found[kRoiBatch];
  const RoiAlignProblem &problem = call.backward.problem;
  const ImageView &doutput = call.backward.doutput;
  const ImageView &dinput = call.backward.dinput;
  const int lane = int(threadIdx.x % kLanes);
  const int warp = int(threadIdx.x / kLanes);
  const int32_t splits = kSplits ? call.splits : 1;
  const int32_t split = kSplits ? warp % splits : 0;

  int64_t first_task = blockIdx.x;
  int64_t step = gridDim.x;
  int64_t tasks = call.tasks;
  TouchedTiles touched;
  if constexpr (kFew) {
    // The kernel before this one has waited for what used the map or wrote the RoIs.
    touched = TouchedTiles(call, shared);
    touched.find<Real>(problem, call.backward.rois);
    first_task /= 2;
    step /= 2;
    if (blockIdx.x % 2 == 0) {
      clear_untouched<T>(call, touched, first_task, step);
      wait_for_earlier_work();
      return;
    }
    tasks = touched.number() * int64_t(call.parts);
  }
  wait_for_earlier_work();

  for (int64_t task = first_task; task < tasks; task += step) {
    int32_t part;
    TilePlace at;
    if constexpr (kFew) {
      part = int32_t(uint32_t(task) % uint32_t(call.parts));
      at = touched.place(int32_t(uint32_t(task) / uint32_t(call.parts)));
    } else {
      part = int32_t(task % call.parts);
      const int64_t place = task / call.parts;
      at = {int32_t(place / call.across / call.down), int32_t(place / call.across % call.down),
            int32_t(place % call.across)};
    }
    const auto [n, tile_row, tile_column] = at;
    const int64_t c0 = int64_t(part) * (blockDim.x / splits) + warp / splits * kLanes;
    const int32_t channels = int32_t(min(problem.c - c0, int64_t(kLanes)));
    // Lanes without a channel of their own take part with another's, and store nothing.
    const T *const base = static_cast<const T *>(doutput.data) + doutput.plane(0, c0);
    const T *const given = base + min(lane, channels - 1) * doutput.channel;
    const RoiRing<T> ring(shared + warp * RoiRing<T>::kBytes, base, doutput);
    const bool ahead = call.ahead && channels == kLanes;
    RoiTile<T> tile;
    bool some_rois = false;  // touch the tile, for which every thread counts alike
    // Once more, carefully, where a sum of the block's isn't finite.
    for (bool careful = false;; careful = true) {
      for (int64_t from = 0; from < problem.rois; from += kRoiBatch) {
        const int32_t count = find_rois(call, from, n, tile_row, tile_column, words, found);
        some_rois = some_rois || count > 0;
        for (int32_t k = 0; k < count; k += kLanes) {
          int32_t begin = 0;
          int32_t some = 0;
          int32_t total = 0;
          do {
            {
              // Where steps are so many, looked up again rather than kept: registers are few.
              const TileSteps<Real> of(call, k + lane < count ? int32_t(from) + found[k + lane] : -1, tile_row,
                                       tile_column);
              total = of.total();
              some = min(total - begin, kMostSteps);
              for (int32_t s = warp * kLanes; s < some; s += int32_t(blockDim.x))
                of.write(steps + s + lane, begin + s + lane);
            }
            __syncthreads();
            if (channels > 0) {
              if (careful)
                tile.template add<true>(steps, split, splits, some, given, doutput);
              else if (ahead)
                tile.add_ahead(steps, split, splits, some, ring);
              else
                tile.template add<false>(steps, split, splits, some, given, doutput);
            }
            __syncthreads();
            begin += kMostSteps;
          } while (begin < total);
        }
      }
      if (careful || !some_rois || !__syncthreads_or(!tile.finite())) break;
      tile.clear();
    }

    if constexpr (kSplits) {
      tile.collect(reinterpret_cast<Real *>(shared) + warp * kLanes * kTurnedRow, split, splits);
      if (split > 0) continue;
    }
    if (channels <= 0) continue;

    // Channels lie far apart, or side by side; in the first case a warp writes some cells of several.
    const int32_t row = tile_row * kTileSide;
    const int32_t column = tile_column * kTileSide;
    T *to = static_cast<T *>(dinput.data) + dinput.plane(n, c0) + dinput.cell(row, column);
    const int32_t rows = min(problem.h - row, kTileSide);
    const int32_t columns = min(problem.w - column, kTileSide);
    const auto store = [&](T *cell, Real sum) { *cell = T(call.backward.accumulate ? Real(*cell) + sum : sum); };
    if (dinput.channel == 1 && problem.c > 1) {
      to += lane;
#pragma unroll
      for (int i = 0; i < kTileSide; ++i) {
        T *cell = to;
#pragma unroll
        for (int j = 0; j < kTileSide; ++j) {
          if (lane < channels && i < rows && j < columns) store(cell, tile.sum(i, j));
          cell += dinput.column;
        }
        to += dinput.row;
      }
      continue;
    }
    constexpr int kBeside = kLanes / kTileSide;
    Real *const turn = reinterpret_cast<Real *>(shared) + warp * kLanes * kTurnedRow;
    const int32_t own = lane % kTileSide;
    const int32_t first = lane / kTileSide;
    const int32_t last = own < columns ? channels : 0;
    to += first * dinput.channel + own * dinput.column;
#pragma unroll
    for (int i = 0; i < kTileSide; ++i) {
#pragma unroll
      for (int j = 0; j < kTileSide; ++j) turn[lane * kTurnedRow + j] = tile.sum(i, j);
      __syncwarp();
      T *cell = to;
#pragma unroll
      for (int k = 0; k < kTileSide; ++k) {
        if (first + k * kBeside < last && i < rows) store(cell, turn[(first + k * kBeside) * kTurnedRow + own]);
        cell += kBeside * dinput.channel;
      }
      to += dinput.row;
      __syncwarp();
    }
  }
}

// Starts while the kernel before it runs, which has waited for what used the map before; what follows must wait for
// both.
template <class T>
__global__ void __launch_bounds__(kRoiThreads)
    roi_clear(const __grid_constant__ ImageView to, RoiProblem problem, int64_t packs, int64_t cells) {
  const int64_t first = int64_t(blockIdx.x) * kRoiThreads + threadIdx.x;
  const int64_t step = int64_t(gridDim.x) * kRoiThreads;
  for (int64_t i = first; i < packs; i += step) static_cast<int4 *>(to.data)[i] = make_int4(0, 0, 0, 0);
  for (int64_t i = first; i < cells; i += step) {
    const int64_t row = i / problem.w;
    const int64_t plane = row / problem.h;
    static_cast<T *>(
        to.data)[to.plane(plane / problem.c, plane % problem.c) + to.cell(row % problem.h, i % problem.w)] = T(0.0f);
  }
  wait_for_earlier_work();
}

// Whether a map lies in one piece that can be written by vectors.
template <class T>
bool lies_in_packs(const RoiProblem &problem, const ImageView &map) {
  return map.column == 1 && map.row == problem.w && map.channel == int64_t(problem.h) * problem.w &&
         map.batch == problem.c * map.channel && reinterpret_cast<uintptr_t>(map.data) % kRoiVector == 0 &&
         problem.n * map.batch * int64_t(sizeof(T)) % kRoiVector == 0;
}

// After a kernel that has waited for what came earlier.
template <class T>
void clear_map(const RoiProblem &problem, const ImageView &map, Stream stream) {
  constexpr int64_t kEnoughBlocks = 1024;
  const int64_t cells = problem.n * problem.c * problem.h * problem.w;
  const bool packs = lies_in_packs<T>(problem, map);
  const int64_t count = packs ? cells * int64_t(sizeof(T)) / kRoiVector : cells;
  launch(roi_clear<T>, {std::min(ceil_div(count, kRoiThreads), kEnoughBlocks), kRoiThreads, 0, true}, stream, map,
         problem, packs ? count : 0, packs ? 0 : count);
}

// A thread for each cell; for maps so large that lists of them would be long.
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

// Where RoIs leave most tiles alone, only the others are tasks, and zeros are written in the map's order, which is
// faster.
template <class T>
bool touches_few(const RoiAlignBackward &call, size_t room, RoiAlignTilesCall &tiles) {
  constexpr int64_t kTilesOfRoi = 64;
  constexpr int64_t kVector = kRoiVector / int64_t(sizeof(T));
  const RoiAlignProblem &problem = call.problem;
  const ImageView &to = call.dinput;
  const int64_t words = problem.n * tiles.down * TouchedTiles::words_of_row(tiles.across);
  const int64_t strips = ceil_div(problem.h, kStripRows);
  if (call.accumulate || problem.rois == 0 || problem.rois * kTilesOfRoi > problem.n * tiles.down * tiles.across ||
      tiles.splits > 1 || to.column != 1 || words * TouchedTiles::kBytesOfWord > int64_t(room) ||
      tiles.tasks > UINT32_MAX || problem.n * problem.c * strips > UINT32_MAX)
    return false;
  const auto whole = [](int64_t elements) { return elements % kVector == 0; };
  tiles.packs = whole(problem.w) && whole(to.row) && whole(to.channel) && whole(to.batch) &&
                reinterpret_cast<uintptr_t>(to.data) % kRoiVector == 0;
  tiles.touched_words = int32_t(words);
  tiles.by_strips = Divider(uint32_t(strips));
  tiles.by_channels = Divider(uint32_t(problem.c));
  return true;
}

// Whether a row's gradients lie beside each other, and whole words of them within the tensor.
template <class T>
bool lies_in_words(const RoiProblem &problem, const ImageView &doutput) {
  constexpr uintptr_t kWord = RoiRing<T>::kWordBytes;
  if (doutput.column != 1) return false;
  if (kWord == sizeof(T)) return true;
  const auto first = reinterpret_cast<uintptr_t>(doutput.data);
  const int64_t last = doutput.plane(problem.rois - 1, problem.c - 1) + doutput.cell(problem.pooled_h - 1, 0);
  const uintptr_t end = first + uintptr_t(last + problem.pooled_w) * sizeof(T);
  return doutput.batch >= 0 && doutput.channel >= 0 && doutput.row >= 0 && first % kWord == 0 && end % kWord == 0;
}

template <class T>
void roi_align_backward_cuda_of(const RoiAlignBackward &call, Stream stream) {
  using Real = typename ImageReal<T>::type;
  const RoiAlignProblem &problem = call.problem;
  Workspace space(call.workspace);
  const RoiTable table = roi_table<Real>(problem, space);
  if (table.record == 0 || !call.workspace) {
    const int64_t cells = problem.n * problem.c * problem.h * problem.w;
    launch(roi_align_any_backward<T>, {std::min(ceil_div(cells, kRoiThreads), kMostBlocks), kRoiThreads}, stream, call,
           cells);
    return;
  }
  const size_t bands = size_t(problem.pooled_h + problem.pooled_w) * sizeof(int2);
  allow_roi_shared(roi_align_bands<Real>, bands);
  if (problem.rois > 0)
    launch(roi_align_bands<Real>, {problem.rois, kListThreads, bands, true}, stream, problem, call.rois, table);
  RoiAlignTilesCall tiles = {};
  tiles.backward = call;
  tiles.table = table;
  tiles.down = int32_t(ceil_div(problem.h, kTileSide));
  tiles.across = int32_t(ceil_div(problem.w, kTileSide));
  // Blocks that fill a large GPU several times, if there are as many.
  constexpr int64_t kManyBlocks = 512;
  const int64_t places = problem.n * tiles.down * tiles.across;
  const int64_t groups = ceil_div(problem.c, kLanes);
  int64_t warps = std::min<int64_t>(groups, kMostTileWarps);
  const bool few_tiles = places * ceil_div(groups, warps) < kManyBlocks;
  while (warps > 1 && places * ceil_div(groups, warps) < kManyBlocks) warps = (warps + 1) / 2;
  tiles.parts = int32_t(ceil_div(groups, warps));
  warps = ceil_div(groups, tiles.parts);
  tiles.splits = few_tiles && warps <= 2 ? int32_t(kMostTileWarps / warps) : 1;
  warps *= tiles.splits;
  tiles.tasks = places * tiles.parts;
  tiles.ahead = lies_in_words<T>(problem, call.doutput);
  constexpr size_t kDeclared = sizeof(TileStep<Real>) * kMostSteps + kTileLists;
  constexpr size_t kTurn = kLanes * kTurnedRow * sizeof(Real);
  const size_t room = size_t(warps) * (tiles.ahead ? std::max(kTurn, size_t(RoiRing<T>::kBytes)) : kTurn);
  const auto run = [&](auto kernel, int64_t blocks, size_t shared) {
    allow_roi_shared(kernel, shared, kDeclared);
    launch(kernel, {blocks, int(warps) * kLanes, shared, true}, stream, tiles);
  };
  if (touches_few<T>(call, kMostTileShared - kDeclared - room, tiles)) {
    // Pairs of blocks that fill a large GPU about twice.
    constexpr int64_t kManyWarps = 264 * kMostTileWarps;
    tiles.touched_at = room;
    run(roi_align_tiles<T, false, true>, 2 * std::min(ceil_div(kManyWarps, warps), tiles.tasks),
        room + size_t(tiles.touched_words * TouchedTiles::kBytesOfWord));
  } else if (tiles.splits > 1) {
    run(roi_align_tiles<T, true, false>, std::min(tiles.tasks, kMostBlocks), room);
  } else {
    run(roi_align_tiles<T, false, false>, std::min(tiles.tasks, kMostBlocks), room);
  }
}

}  // namespace baracuda
