// SPDX-License-Identifier: Apache-2.0
// RoI-align backward on the GPU, deterministic. The map is cut into tiles. A warp owns a tile, a lane a channel of it,
// with the sums of all its cells in registers; it gathers from the RoIs that touch the tile, in their order. What a
// RoI's bins weigh is worked out once, into the workspace. The warps of a block have the same tile, so they share what
// they look up, and wait for each other little. Gradients are read where they are, as few bins of a RoI reach a tile:
// through shared memory, some steps ahead, two rows of bins by one instruction. They mostly lie in one line, and what
// L2 can do is limited by requests, which are of a line, more than by bytes.
#pragma once

#include <algorithm>

#include "image/roi_align.cuh"

namespace baracuda {

constexpr int kTileSide = 8;
// Warps of a block have the same tile and channels of their own.
constexpr int kMostTileWarps = 8;
constexpr int kMostTileThreads = kMostTileWarps * kLanes;
// Neighbouring bins that a step takes: of a row, and rows.
constexpr int kStepBins = 4;
constexpr int kStepRows = 2;
// A bit for each pair of a tile's rows.
constexpr int kRowBits = kTileSide / 2;
// Steps whose gradients a warp has in shared memory or on their way there.
constexpr int kRing = 3;
// RoIs that a block looks at before it works on those that touch its tile; of these, steps that it prepares.
constexpr int kRoiBatch = 1024;
constexpr int kMostSteps = 96;
constexpr size_t kTileLists = kRoiBatch / kLanes * sizeof(uint32_t) + kRoiBatch * sizeof(uint16_t);
// What a block has at least, on the smallest cards.
constexpr size_t kMostTileShared = 99 * 1024;
// A channel's sums of a row, in turn; lanes lie in different banks.
constexpr int kTurnedRow = kTileSide + 1;
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

struct RoiAlignTilesCall {
  RoiAlignBackward backward;
  RoiTable table;
  int32_t down;    // tiles
  int32_t across;  // tiles
  int32_t parts;   // blocks that share the channels
  int64_t tasks;   // of all images and parts
  int32_t splits;
  bool ahead;  // gradients go through shared memory
  // Where RoIs touch few tiles.
  int32_t touched_words;
  size_t touched_at;  // in shared memory
  bool packs;         // whether zeros can be written by vectors
  Divider by_strips;  // of rows, in a plane
  Divider by_channels;
};

struct TilePlace {
  int32_t n;
  int32_t row;
  int32_t column;
};

// Which tiles RoIs touch, a bit for each, and maybe some beside them; each row of tiles begins a word. In shared
// memory, for all threads of a block.
class TouchedTiles {
 public:
  static constexpr int64_t kBytesOfWord = sizeof(uint32_t) + sizeof(int32_t);

  __host__ __device__ static int32_t words_of_row(int32_t across) { return (across + kLanes - 1) / kLanes; }

  TouchedTiles() = default;

  __device__ TouchedTiles(const RoiAlignTilesCall &call, char *shared)
      : bits_(reinterpret_cast<uint32_t *>(shared + call.touched_at)),
        before_(reinterpret_cast<int32_t *>(bits_ + call.touched_words)),
        words_(call.touched_words),
        down_(call.down),
        of_row_(words_of_row(call.across)) {}

  template <class Real>
  __device__ void find(const RoiAlignProblem &problem, const RoiRows &rois) {
    for (int32_t i = int32_t(threadIdx.x); i < words_; i += int32_t(blockDim.x)) bits_[i] = 0;
    __syncthreads();
    for (int64_t r = threadIdx.x; r < problem.rois; r += blockDim.x) {
      const RoiGeometry<Real> roi = roi_geometry<Real>(problem, rois, r);
      if (roi.batch < 0) continue;
      const RoiCells rows = roi.y.reach_of_all(problem.pooled_h);
      const RoiCells columns = roi.x.reach_of_all(problem.pooled_w);
      if (rows.count == 0 || columns.count == 0) continue;
      const int32_t first = columns.first / kTileSide;
      const int32_t last = (columns.first + columns.count - 1) / kTileSide;
      for (int32_t row = rows.first / kTileSide; row <= (rows.first + rows.count - 1) / kTileSide; ++row) {
        for (int32_t word = first / kLanes; word <= last / kLanes; ++word) {
          const uint32_t from = kAllLanes << max(first - word * kLanes, 0);
          const uint32_t upto = kAllLanes >> max((word + 1) * kLanes - 1 - last, 0);
          atomicOr(row_of(roi.batch, row) + word, from & upto);
        }
      }
    }
    __syncthreads();
  }

  // How many there are, which then have numbers.
  __device__ int32_t number() {
    const int lane = int(threadIdx.x % kLanes);
    int32_t count = 0;
    for (int32_t from = 0; from < words_; from += kLanes) {
      const int32_t own = from + lane < words_ ? __popc(bits_[from + lane]) : 0;
      int32_t upto = own;
      for (int distance = 1; distance < kLanes; distance *= 2) {
        const int32_t other = __shfl_up_sync(kAllLanes, upto, unsigned(distance));
        if (lane >= distance) upto += other;
      }
      if (threadIdx.x < kLanes && from + lane < words_) before_[from + lane] = count + upto - own;
      count += __shfl_sync(kAllLanes, upto, kLanes - 1);
    }
    __syncthreads();
    return count;
  }

  __device__ TilePlace place(int32_t number) const {
    int32_t word = 0;
    for (int32_t end = words_; end - word > 1;) {
      const int32_t middle = (word + end) / 2;
      if (before_[middle] <= number) {
        word = middle;
      } else {
        end = middle;
      }
    }
    const uint32_t upto = bits_[word] << (kLanes - 1 - threadIdx.x % kLanes);
    const unsigned found = __ballot_sync(kAllLanes, __popc(upto) > number - before_[word]);
    const int32_t row = word / of_row_;
    return {row / down_, row % down_, word % of_row_ * kLanes + __ffs(int(found)) - 1};
  }

  __device__ bool has(int32_t n, int32_t tile_row, int32_t tile_column) const {
    return row_of(n, tile_row)[tile_column / kLanes] >> tile_column % kLanes & 1;
  }

 private:
  __device__ uint32_t *row_of(int32_t n, int32_t tile_row) const { return bits_ + (n * down_ + tile_row) * of_row_; }

  uint32_t *bits_ = nullptr;
  int32_t *before_ = nullptr;  // each word, how many there are
  int32_t words_ = 0;
  int32_t down_ = 0;
  int32_t of_row_ = 0;
};

constexpr int32_t kStripRows = 8;
static_assert(kTileSide % kStripRows == 0);

// Zeros where no RoI touches a tile, in the map's order: a warp takes some rows of a plane.
template <class T>
__device__ void clear_untouched(const RoiAlignTilesCall &call, const TouchedTiles &touched, int64_t block,
                                int64_t blocks) {
  const RoiProblem &problem = call.backward.problem;
  const ImageView &to = call.backward.dinput;
  const int64_t warps = blockDim.x / kLanes;
  const int64_t strips = problem.n * problem.c * call.by_strips.divisor;
  for (int64_t i = block * warps + threadIdx.x / kLanes; i < strips; i += blocks * warps) {
    const uint32_t plane = call.by_strips.divide(uint32_t(i));
    const int32_t row = int32_t(uint32_t(i) - plane * call.by_strips.divisor) * kStripRows;
    const int32_t n = int32_t(call.by_channels.divide(plane));
    const uint32_t c = plane - uint32_t(n) * call.by_channels.divisor;
    T *const first = static_cast<T *>(to.data) + to.plane(n, c) + to.cell(row, 0);
    const auto clear = [&](auto zeros) {
      constexpr int32_t kCells = int32_t(sizeof(zeros) / sizeof(T));
      for (int32_t column = int32_t(threadIdx.x % kLanes) * kCells; column < problem.w; column += kLanes * kCells) {
        if (touched.has(n, row / kTileSide, column / kTileSide)) continue;
        T *line = first + column;
#pragma unroll
        for (int k = 0; k < kStripRows; ++k) {
          if (row + k < problem.h) *reinterpret_cast<decltype(zeros) *>(line) = zeros;
          line += to.row;
        }
      }
    };
    if (call.packs)
      clear(make_int4(0, 0, 0, 0));
    else
      clear(T(0.0f));
  }
}

struct alignas(kRoiVector) TileStepHead {
  int64_t offset;  // of the first bin's gradient, in elements
  int32_t bins;    // of a row
  int32_t rows;    // a bit for each pair of the tile's rows with a weight, for one row of bins after the other
};

// What some neighbouring bins add to a tile.
template <class Real>
struct TileStep : TileStepHead {
  alignas(kRoiVector) Real y[kStepRows][kTileSide];
  Real x[kStepBins][kTileSide];
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

// The next steps' gradients of a warp's channels, in shared memory. Lanes copy both rows of a few channels together.
template <class T>
class RoiRing {
 public:
  using Real = typename ImageReal<T>::type;

  // Copies are of words. Where one has two elements, the first and the last may have one that isn't wanted.
  static constexpr int kWordBytes = std::max(int(sizeof(T)), 4);
  static constexpr int kWordElements = kWordBytes / int(sizeof(T));
  static constexpr int kPlaces = 4;  // words of a row and channel
  static_assert(kPlaces * kWordElements >= kStepBins + kWordElements - 1);
  static constexpr int kBeside = kLanes / kPlaces / kStepRows;  // channels
  // Rows begin in different banks.
  static constexpr int kRowBytes = (kLanes + kBeside) * kPlaces * kWordBytes;
  static constexpr int kSlotBytes = kStepRows * kRowBytes;
  static constexpr int kBytes = kRing * kSlotBytes;

  // `base` is the first channel's plane of gradients.
  __device__ RoiRing(const char *room, const T *base, const ImageView &doutput) {
    const int lane = int(threadIdx.x % kLanes);
    const int row = lane / kPlaces % kStepRows;
    const int channel = lane / kPlaces / kStepRows;
    word_ = lane % kPlaces;
    bits_ = ((1 << kRowBits) - 1) << row * kRowBits;
    from_ = reinterpret_cast<uintptr_t>(base + channel * doutput.channel + row * doutput.row);
    each_ = uintptr_t(kBeside * doutput.channel) * sizeof(T);
    odd_ = uint32_t(reinterpret_cast<uintptr_t>(base + lane * doutput.channel) / sizeof(T));
    row_ = uint32_t(doutput.row);
    const uint32_t begin = uint32_t(__cvta_generic_to_shared(room));
    to_ = begin + uint32_t(row * kRowBytes + (channel * kPlaces + word_) * kWordBytes);
    own_ = begin + uint32_t(lane * kPlaces * kWordBytes);
  }

  // Into the next slot; nothing where there is no such step.
  __device__ __forceinline__ void fetch(const TileStep<Real> *steps, int32_t s, int32_t count) {
    if (s < count) {
      const auto &[offset, bins, rows] = static_cast<const TileStepHead &>(steps[s]);
      uintptr_t from = from_ + uintptr_t(offset) * sizeof(T);
      const int32_t unwanted = int32_t(from / sizeof(T) % kWordElements);
      from += uintptr_t(word_) * kWordBytes - uintptr_t(unwanted) * sizeof(T);
      if (bool(rows & bits_) & (word_ * kWordElements < unwanted + bins)) {
#pragma unroll
        for (int i = 0; i < kLanes / kBeside; ++i)
          copy(to_ + uint32_t(i * kBeside * kPlaces * kWordBytes), from + uintptr_t(i) * each_);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    advance(to_, filled_);
  }

  // For the oldest slot; all but one are filled or being filled.
  __device__ __forceinline__ void wait() const {
    asm volatile("cp.async.wait_group %0;" ::"n"(kRing - 2) : "memory");
    __syncwarp();
  }

  // A row's gradients of the lane's channel, from the oldest slot.
  __device__ __forceinline__ void read(Real (&value)[kStepBins], int row, int64_t offset) const {
    const char *const at = static_cast<const char *>(__cvta_shared_to_generic(own_ + uint32_t(row * kRowBytes)));
    if constexpr (kWordElements == 1) {
      constexpr int kCount = RoiVector<T>::kCount;
#pragma unroll
      for (int i = 0; i < kStepBins; i += kCount) {
        const RoiVector<T> some = reinterpret_cast<const RoiVector<T> *>(at)[i / kCount];
#pragma unroll
        for (int j = 0; j < kCount; ++j) value[i + j] = some.value[j];
      }
    } else {
      const uint4 words = *reinterpret_cast<const uint4 *>(at);
      const uint32_t shift = (odd_ + uint32_t(offset) + uint32_t(row) * row_) % 2 * 16;
      const uint2 wanted = {__funnelshift_r(words.x, words.y, shift), __funnelshift_r(words.y, words.z, shift)};
      T some[kStepBins];
      static_assert(sizeof(some) == sizeof(wanted));
      memcpy(some, &wanted, sizeof(some));
#pragma unroll
      for (int i = 0; i < kStepBins; ++i) value[i] = Real(some[i]);
    }
  }

  __device__ __forceinline__ void drop_oldest() { advance(own_, dropped_); }

 private:
  __device__ __forceinline__ static void copy(uint32_t to, uintptr_t from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(kWordBytes) : "memory");
  }
  __device__ __forceinline__ static void advance(uint32_t &address, int32_t &slot) {
    const bool last = slot == kRing - 1;
    address += last ? uint32_t(kSlotBytes - kBytes) : uint32_t(kSlotBytes);
    slot = last ? 0 : slot + 1;
  }

  uintptr_t from_;  // of the lane's row and first channel
  uintptr_t each_;  // from one of the lane's channels to the next
  uint32_t to_;     // the lane's first word, in the slot to be filled
  uint32_t own_;    // the lane's channel, in the oldest slot
  int32_t filled_ = 0;
  int32_t dropped_ = 0;
  int32_t word_;
  int32_t bits_;  // the lane's row in a step's
  uint32_t odd_;  // as a number of elements, of which one bit counts
  uint32_t row_;
};

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

// Bins times tiles that they reach, at most.
template <class Real>
int64_t roi_band_places(int64_t cells, int64_t bins) {
  return RoiAxis<Real>::list_places(cells, bins, 0) / kTileSide + 2 * bins;
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
