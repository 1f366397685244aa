// SPDX-License-Identifier: Apache-2.0
// Where the RoIs of a gradient touch few tiles: which these are, and zeros for all others.
#pragma once

#include "image/roi_align_bands.cuh"

namespace baracuda {

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

}  // namespace baracuda
