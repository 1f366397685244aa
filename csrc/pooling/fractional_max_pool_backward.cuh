// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "pooling/fractional_max_pool.cuh"

namespace baracuda {

// ---------------------------------------------------------------------------------------------------
// Backward. A thread owns a tile of a few rows of kTileColumns cells in every slice of a strip, and goes
// through the outputs that could name one of them, in the order of the outputs. Sums lie in shared memory,
// where a thread has words of its own: no atomics, no barriers, and a cell is one look at the index away.
// As many slices are open as a window may reach; one that no later output can reach is written.
//
// Neighbouring tiles read some outputs twice. They do so at the same time, from the cache.

constexpr int kTileColumns = 4;
constexpr int kTileRows = 4;  // of tiles of three dimensions
constexpr int kTileThreads = 128;
// Outputs of a row that are loaded at once.
constexpr int kTileGather = 5;
constexpr int kTileMostGather = 8;
// Measured: two dimensions want many warps, and so few registers; in three, shared memory leaves room for few
// warps and many registers.
//
// An output may be loaded in place of the one that was just added, which takes one set of registers; or whole
// sets are loaded ahead of the one at hand.
constexpr bool tile_in_place(bool flat) { return flat; }
struct TileTuning {
  int sets;
  int blocks;  // on a multiprocessor at least; registers follow from it
};
constexpr TileTuning tile_tuning(bool flat, bool unit, bool chunked, bool wide) {
  if (flat) return {1, chunked ? 5 : wide ? 6 : unit ? 8 : 7};
  return {2, wide ? 3 : 4};
}

// Numbers that are not negative, in 32 bits where they fit.
__device__ __forceinline__ int64_t short_quotient(int64_t dividend, int64_t divisor) {
  if (uint64_t(dividend | divisor) <= 0xffffffffu) return uint32_t(dividend) / uint32_t(divisor);
  return dividend / divisor;
}

struct PoolTilesCall {
  PoolProblem problem;
  PoolView dy;
  PoolView indices;
  PoolView dx;
  bool accumulate;
  bool aligned;         // a tile's row can be written at once
  bool channels_first;  // in the order of the threads: channels lie closest in memory
  int32_t strip;        // slices of a thread
  int32_t strips;
  int32_t middle_tiles;
  int32_t fast_tiles;
  int64_t tiles;  // of a strip
  // At most, over all tiles: rows of outputs of a tile in a slice, and times that kGather of a row are taken.
  int32_t rows;
  int32_t chunks;
  int32_t slot_mask;  // slots for open slices, a power of two, less one
  int32_t strip_outs;
  // Where the parts of shared memory begin.
  int32_t columns_at;
  int32_t rows_at;
  int32_t sums_at;
  // Elements from a tile's last row of outputs in a slice to its first one in the next.
  int64_t named_wrap;
  int64_t given_wrap;
  ShortDivider slice;  // cells in a slice of x
  ShortDivider row;    // cells in a row of x
};

// Cells from `low` on.
struct PoolSpan {
  int32_t low;
  uint32_t count;
};

// Which of a tile's rows a row of outputs could name: `count` of them, in the plane `offset` cells after the
// tile's first one, in a slot `place` bytes.
struct PoolTileRow {
  uint32_t offset;
  uint16_t count;
  uint16_t place;
};

__device__ __forceinline__ PoolSpan window_span(const PoolAxis &axis, int32_t i, int32_t begin, int32_t end) {
  const int32_t low = max(axis.earliest(i), begin);
  return {low, uint32_t(max(min(axis.latest(i) + axis.window, end) - low, 0))};
}

// Adds to a word of shared memory, or doesn't. Written out, because the compiler makes a branch of it.
__device__ __forceinline__ void add_where(bool wanted, uint32_t address, float value) {
  asm volatile(
      "{\n\t.reg .pred wanted;\n\t.reg .f32 sum;\n\t"
      "setp.ne.u32 wanted, %0, 0;\n\t"
      "@wanted ld.shared.f32 sum, [%1];\n\t"
      "@wanted add.rn.f32 sum, sum, %2;\n\t"
      "@wanted st.shared.f32 [%1], sum;\n\t}"
      :
      : "r"(uint32_t(wanted)), "r"(address), "f"(value)
      : "memory");
}
__device__ __forceinline__ void add_where(bool wanted, uint32_t address, double value) {
  asm volatile(
      "{\n\t.reg .pred wanted;\n\t.reg .f64 sum;\n\t"
      "setp.ne.u32 wanted, %0, 0;\n\t"
      "@wanted ld.shared.f64 sum, [%1];\n\t"
      "@wanted add.rn.f64 sum, sum, %2;\n\t"
      "@wanted st.shared.f64 [%1], sum;\n\t}"
      :
      : "r"(uint32_t(wanted)), "r"(address), "d"(value)
      : "memory");
}

// Loads where wanted, and else keeps what is there. Written out, because the compiler moves a plain load up and
// then needs the registers twice. What follows is on its way to the second-level cache, too: neighbours want it.
__device__ __forceinline__ void load_where(bool wanted, const uint16_t *from, uint16_t &value) {
  asm volatile(
      "{\n\t.reg .pred wanted;\n\tsetp.ne.u32 wanted, %2, 0;\n\t"
      "@wanted ld.global.nc.L2::256B.b16 %0, [%1];\n\t}"
      : "+h"(value)
      : "l"(from), "r"(uint32_t(wanted)));
}
// A register of its own for 16 bits: two that share one are merged, which waits for the load.
__device__ __forceinline__ void load_where(bool wanted, const uint16_t *from, uint32_t &value) {
  asm volatile(
      "{\n\t.reg .pred wanted;\n\tsetp.ne.u32 wanted, %2, 0;\n\t"
      "@wanted ld.global.nc.L2::256B.u16 %0, [%1];\n\t}"
      : "+r"(value)
      : "l"(from), "r"(uint32_t(wanted)));
}
__device__ __forceinline__ void load_where(bool wanted, const uint32_t *from, uint32_t &value) {
  asm volatile(
      "{\n\t.reg .pred wanted;\n\tsetp.ne.u32 wanted, %2, 0;\n\t"
      "@wanted ld.global.nc.L2::256B.b32 %0, [%1];\n\t}"
      : "+r"(value)
      : "l"(from), "r"(uint32_t(wanted)));
}
__device__ __forceinline__ void load_where(bool wanted, const uint64_t *from, uint64_t &value) {
  asm volatile(
      "{\n\t.reg .pred wanted;\n\tsetp.ne.u32 wanted, %2, 0;\n\t"
      "@wanted ld.global.nc.L2::256B.b64 %0, [%1];\n\t}"
      : "+l"(value)
      : "l"(from), "r"(uint32_t(wanted)));
}

// Writes the cells of a tile's row, of which `count` are in the tensor; `whole`: all at once.
template <class T, class Real>
__device__ __forceinline__ void write_cells(T *row, Real (&cells)[kTileColumns], int32_t count, int64_t step,
                                            bool whole, bool accumulate) {
  if (whole) {
    using Pack = PoolPack<T, kTileColumns>;
    Pack pack;
    if (accumulate) {
      pack = *reinterpret_cast<const Pack *>(row);
#pragma unroll
      for (int e = 0; e < kTileColumns; ++e) cells[e] = Real(pack.value[e]) + cells[e];
    }
#pragma unroll
    for (int e = 0; e < kTileColumns; ++e) pack.value[e] = T(cells[e]);
    *reinterpret_cast<Pack *>(row) = pack;
    return;
  }
#pragma unroll
  for (int e = 0; e < kTileColumns; ++e) {
    if (e >= count) break;
    T &cell = row[e * step];
    cell = T(accumulate ? Real(cell) + cells[e] : cells[e]);
  }
}

template <class T, class Index, bool kFlat, bool kUnit, int kRows, int kGather, bool kChunked, int kSets, int kThreads,
          int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) pool_tiles(const __grid_constant__ PoolTilesCall call) {
  static_assert(kGather * kTileColumns <= 32);
  constexpr bool kInPlace = tile_in_place(kFlat);
  using Real = typename PoolReal<T>::type;
  extern __shared__ __align__(16) char shared[];
  const PoolAxis &slow = call.problem.axis[kSlow];
  const PoolAxis &middle = call.problem.axis[kMiddle];
  const PoolAxis &fast = call.problem.axis[kFast];
  PoolSpan *const slow_span = reinterpret_cast<PoolSpan *>(shared);
  uint32_t *const columns_of = reinterpret_cast<uint32_t *>(shared + call.columns_at) + threadIdx.x;
  PoolTileRow *const row_of = reinterpret_cast<PoolTileRow *>(shared + call.rows_at) + threadIdx.x;
  // Words of a thread, by slot, row and column.
  constexpr uint32_t kWord = kThreads * sizeof(Real);
  constexpr uint32_t kRowWords = kTileColumns * kWord;
  constexpr uint32_t kSlotWords = kRows * kRowWords;
  char *const sums = shared + call.sums_at + threadIdx.x * sizeof(Real);
  const auto sum_at = [&](uint32_t place) -> Real & { return *reinterpret_cast<Real *>(sums + place); };
  uint32_t sums_at = uint32_t(__cvta_generic_to_shared(sums));
  asm volatile("" : "+r"(sums_at));  // kept, not worked out again and again

  const int32_t part = int32_t(blockIdx.x % uint32_t(call.strips));
  const int32_t s0 = part * call.strip;
  const int32_t s1 = min(s0 + call.strip, slow.in);
  const PoolRange over_slow = {windows_over(slow, s0).begin, windows_over(slow, s1 - 1).end};
#pragma unroll 1
  for (int32_t t = threadIdx.x; t < over_slow.end - over_slow.begin; t += kThreads)
    slow_span[t] = window_span(slow, over_slow.begin + t, s0, s1);
  __syncthreads();

  int64_t rest = int64_t(blockIdx.x / uint32_t(call.strips)) * kThreads + threadIdx.x;
  if (rest >= call.tiles) return;
  const auto next = [&](int64_t count) {
    const int64_t whole = short_quotient(rest, count);
    const int64_t at = rest - whole * count;
    rest = whole;
    return at;
  };
  int64_t c = 0;
  if (call.channels_first) c = next(call.problem.channels);
  const int32_t f0 = int32_t(next(call.fast_tiles)) * kTileColumns;
  const int32_t m0 = kFlat ? 0 : int32_t(next(call.middle_tiles)) * kRows;
  if (!call.channels_first) c = next(call.problem.channels);
  const int64_t n = rest;
  const int32_t f1 = min(f0 + kTileColumns, fast.in);
  const int32_t m1 = min(m0 + kRows, middle.in);
  const PoolRange over_fast = {windows_over(fast, f0).begin, windows_over(fast, f1 - 1).end};
  const PoolRange over_middle = {windows_over(middle, m0).begin, windows_over(middle, m1 - 1).end};

  const PoolView &named = call.indices;
  const PoolView &given = call.dy;
  const int64_t named_step = kUnit ? 1 : named.axis[kFast];
  const int64_t given_step = kUnit ? 1 : given.axis[kFast];
  const int64_t dx_step = kUnit ? 1 : call.dx.axis[kFast];
  const int32_t first_row = kFlat ? 0 : over_middle.begin;
  // The tile's first outputs of the row that is loaded next, and its first cell of slice `done`.
  const Index *names = static_cast<const Index *>(named.data) + named.plane(n, c) +
                       named.cell(over_slow.begin, first_row, 0) + over_fast.begin * named_step;
  const T *gives = static_cast<const T *>(given.data) + given.plane(n, c) + given.cell(over_slow.begin, first_row, 0) +
                   over_fast.begin * given_step;
  T *to = static_cast<T *>(call.dx.data) + call.dx.plane(n, c) + call.dx.cell(s0, m0, 0) + f0 * dx_step;
  // The index of the tile's first cell in the plane's first slice.
  const int64_t origin =
      call.problem.index_origin(n * call.problem.channels + c) + (kFlat ? 0 : int64_t(m0) * fast.in) + f0;

  // Which of the tile's columns each output could name, in the order of the outputs.
#pragma unroll 1
  for (int32_t chunk = 0; chunk < (kChunked ? call.chunks : 1); ++chunk) {
    uint32_t columns = 0;
#pragma unroll 1
    for (int32_t e = 0; e < kGather; ++e) {
      const int32_t j = over_fast.begin + chunk * kGather + e;
      if (j >= over_fast.end) break;
      const PoolSpan span = window_span(fast, j, f0, f1);
      columns |= ((1u << span.count) - 1u) << (uint32_t(span.low - f0) + uint32_t(e) * kTileColumns);
    }
    columns_of[chunk * kThreads] = columns;
  }
  if constexpr (!kFlat) {
#pragma unroll 1
    for (int32_t row = 0; row < call.rows; ++row) {
      PoolSpan span = {m0, 0};
      if (over_middle.begin + row < over_middle.end) span = window_span(middle, over_middle.begin + row, m0, m1);
      row_of[row * kThreads] = {uint32_t(span.low - m0) * uint32_t(fast.in), uint16_t(span.count),
                                uint16_t(uint32_t(span.low - m0) * kRowWords)};
    }
  }
#pragma unroll 1
  for (uint32_t place = 0; place < uint32_t(call.slot_mask + 1) * kSlotWords; place += kWord) sum_at(place) = Real(0);

  int32_t done = s0;  // slices below are written
  const auto write_slices = [&](int32_t until) {
#pragma unroll 1
    for (; done < until; ++done) {
      const uint32_t slot = uint32_t(done & call.slot_mask) * kSlotWords;
#pragma unroll
      for (int b = 0; b < kRows; ++b) {
        Real cells[kTileColumns];
#pragma unroll
        for (int e = 0; e < kTileColumns; ++e) {
          Real &sum = sum_at(slot + b * kRowWords + e * kWord);
          cells[e] = sum;
          sum = Real(0);
        }
        if (!kFlat && m0 + b >= m1) continue;
        T *const row = to + (kFlat ? 0 : b * call.dx.axis[kMiddle]);
        write_cells(row, cells, f1 - f0, dx_step, call.aligned, call.accumulate);
      }
      to += call.dx.axis[kSlow];
    }
  };

  struct Set {
    BitsOf<Index> name[kGather];
    BitsOf<T> gradient[kGather];
  };
  Set sets[kSets];
#pragma unroll
  for (int u = 0; u < kSets; ++u) {
#pragma unroll
    for (int e = 0; e < kGather; ++e) {
      sets[u].name[e] = BitsOf<Index>(-1);
      sets[u].gradient[e] = 0;
    }
  }
  struct Walk {
    int32_t row, chunk;
  };
  // Whether a row has been left.
  const auto advance = [&](Walk &walk) {
    if (kChunked && ++walk.chunk < call.chunks) return false;
    walk.chunk = 0;
    if (kFlat || ++walk.row == call.rows) walk.row = 0;
    return true;
  };
  Walk ahead = {0, 0};
  int32_t ahead_slices = over_slow.end - over_slow.begin;
  const int32_t tile_rows = kFlat ? 1 : over_middle.end - over_middle.begin;
  const int32_t tile_outs = over_fast.end - over_fast.begin;
  // The outputs that are loaded next.
  struct Row {
    const Index *names;
    const T *gives;
    int32_t count;
  };
  const auto next_row = [&]() {
    Row row = {names, gives, tile_outs};
    if constexpr (kChunked) {
      row.names += ahead.chunk * kGather * named_step;
      row.gives += ahead.chunk * kGather * given_step;
      row.count -= ahead.chunk * kGather;
    }
    if (ahead_slices <= 0 || (!kFlat && ahead.row >= tile_rows)) row.count = 0;
    if (advance(ahead)) {
      const bool wraps = kFlat || ahead.row == 0;
      names += wraps ? call.named_wrap : named.axis[kMiddle];
      gives += wraps ? call.given_wrap : given.axis[kMiddle];
      if (wraps) --ahead_slices;
    }
    return row;
  };
  // Outputs beyond the tile's keep what the set had before; no column is theirs.
  const auto load_one = [&](Set &set, const Row &row, int e) {
    const auto *const name = reinterpret_cast<const BitsOf<Index> *>(row.names + e * named_step);
    const auto *const gradient = reinterpret_cast<const BitsOf<T> *>(row.gives + e * given_step);
    if constexpr (kInPlace) {
      load_where(e < row.count, name, set.name[e]);
      load_where(e < row.count, gradient, set.gradient[e]);
    } else if (e < row.count) {
      set.name[e] = __ldg(name);
      set.gradient[e] = __ldg(gradient);
    }
  };
  const auto load = [&](Set &set) {
    const Row row = next_row();
#pragma unroll
    for (int e = 0; e < kGather; ++e) load_one(set, row, e);
  };
  Walk at = {0, 0};
  const PoolSpan *slices_at = slow_span;
  PoolSpan slices = {0, 0};
  int64_t slice_base = 0;
  uint32_t columns = columns_of[0];
  const auto add = [&](Set &set) {
    if (at.row == 0 && at.chunk == 0) {
      slices = *slices_at++;
      slice_base = origin + int64_t(slices.low) * (kFlat ? call.row : call.slice).divisor;
      write_slices(slices.low);
    }
    if constexpr (kChunked) columns = columns_of[at.chunk * kThreads];
    PoolTileRow row = {0, 1, 0};
    if constexpr (!kFlat) row = row_of[at.row * kThreads];
    const int64_t base = slice_base + row.offset;
    const uint32_t row_at = sums_at + row.place;
    Row next = {};
    if constexpr (kInPlace) next = next_row();
#pragma unroll
    for (int e = 0; e < kGather; ++e) {
      // The place after the first cell that the output could name, had it all columns. Where an index names
      // one before that in any axis, a quotient or the column is out of bounds.
      const BitsOf<Index> relative = set.name[e] - BitsOf<Index>(base);
      uint32_t left = uint32_t(relative);
      const ShortDivider &outer = kFlat ? call.row : call.slice;
      const uint32_t s = outer.divide(left);
      left = outer.rest(left, s);
      bool mine = s < slices.count;
      if (sizeof(Index) > 4) mine = mine && relative >> 31 >> 1 == 0;
      uint32_t place = ((uint32_t(slices.low) + s) & uint32_t(call.slot_mask)) * kSlotWords + row_at;
      if constexpr (!kFlat) {
        const uint32_t m = call.row.divide(left);
        left = call.row.rest(left, m);
        mine = mine && m < row.count;
        place += m * kRowWords;
      }
      place += left * kWord;
      // Shifted by more than it has, a word is zero.
      const uint32_t own = columns >> (e * kTileColumns) & ((1u << kTileColumns) - 1u);
      mine = mine && (__funnelshift_rc(own, 0, left) & 1u) != 0;
      add_where(mine, place, real_of<T>(set.gradient[e]));
      if constexpr (kInPlace) load_one(set, next, e);
    }
    advance(at);
  };

  constexpr int kFirst = kInPlace ? kSets : kSets - 1;
#pragma unroll
  for (int u = 0; u < kFirst; ++u) load(sets[u]);
  const int32_t steps = (over_slow.end - over_slow.begin) * (kFlat ? 1 : call.rows) * (kChunked ? call.chunks : 1);
#pragma unroll 1
  for (int32_t step = 0; step < steps; step += kSets) {
#pragma unroll
    for (int u = 0; u < kSets; ++u) {
      if constexpr (!kInPlace) load(sets[(u + kSets - 1) % kSets]);
      if (step + u < steps) add(sets[u]);
    }
  }
  write_slices(s1);
}

// ---------------------------------------------------------------------------------------------------
// Backward, three dimensions, contiguous rows. A block owns a patch of cells in every slice of a strip. Of each
// slice of outputs it first works out, once for each output, which cell it names; then a thread goes through
// those that could name a cell of its tile, in the order of the outputs, and adds. As before, sums lie in shared
// memory, and only their thread touches them.

constexpr int kPatch = 64;  // cells a side
constexpr int kPatchThreads = (kPatch / kTileColumns) * (kPatch / kTileRows);
constexpr int kPatchPasses = 9;  // outputs of a slice that a thread loads
constexpr int kPatchBlocks = 2;  // on a multiprocessor at least; registers follow from it

struct PoolPatchesCall {
  PoolProblem problem;
  PoolView dy;
  PoolView indices;
  PoolView dx;
  bool accumulate;
  bool aligned;  // a tile's row can be written at once
  int32_t strip;
  int32_t strips;
  int32_t fast_patches;
  int32_t middle_patches;
  int32_t slots;
  int32_t rows;       // of outputs of a patch in a slice, at most
  int32_t tile_rows;  // of a tile
  int32_t pitch;      // of rows of decoded outputs
  // Where the parts of shared memory begin.
  int32_t decoded_at;
  int32_t spans_at;
  int32_t rows_at;
  ShortDivider slice;  // cells in a slice of x
  ShortDivider row;    // cells in a row of x
};

// An output's gradient and the place of the cell that it names, in bytes. Threads read each of them several
// times, so 16-bit gradients share a word with the place.
template <class T>
struct alignas(2 * sizeof(typename PoolReal<T>::type)) PoolDecoded {
  using Real = typename PoolReal<T>::type;
  Real gradient;
  uint32_t at;

  __device__ static PoolDecoded of(BitsOf<T> bits, uint32_t place) { return {real_of<T>(bits), place}; }
  __device__ Real value() const { return gradient; }
  __device__ uint32_t place() const { return at; }
  __device__ bool is_of(uint32_t tile, uint32_t tile_bits) const { return ((at ^ tile) & tile_bits) == 0; }
};
template <class T>
  requires(sizeof(T) == 2)
struct PoolDecoded<T> {
  uint32_t word;  // of the place, which is below 128 KiB, the bits from 2 on and the last one

  __device__ static PoolDecoded of(BitsOf<T> bits, uint32_t place) {
    return {uint32_t(bits) | place << 14 | (place & 1u << 31)};
  }
  __device__ float value() const { return real_of<T>(BitsOf<T>(word)); }
  __device__ uint32_t place() const { return word >> 14 & ~3u; }
  __device__ bool is_of(uint32_t tile, uint32_t tile_bits) const {
    return ((word ^ tile << 14) & (tile_bits << 14 | 1u << 31)) == 0;
  }
};

// Which word of a slot is a cell's: bits 2 to 5 of its row and of its column tell the thread, the others the word of
// it.
__device__ __forceinline__ uint32_t patch_word(uint32_t row, uint32_t column) {
  static_assert(kTileRows == 4 && kTileColumns == 4 && kPatch == 64);
  return (row << 10 & 0xc00) | (column << 8 & 0x300) | (row << 2 & 0xf0) | column >> 2;
}

template <class T, class Index>
__global__ void __launch_bounds__(kPatchThreads, kPatchBlocks)
    pool_patches(const __grid_constant__ PoolPatchesCall call) {
  using Real = typename PoolReal<T>::type;
  extern __shared__ __align__(16) char shared[];
  constexpr uint32_t kNone = 1u << 31;
  constexpr uint32_t kSlotBytes = kPatch * kPatch * sizeof(Real);
  // As in pool_tiles, words of a thread by slot, row and column: neighbouring threads never meet in a bank.
  constexpr uint32_t kWord = kPatchThreads * sizeof(Real);
  constexpr uint32_t kTileBits = (kPatchThreads - 1) * uint32_t(sizeof(Real)) | kNone;
  const PoolAxis &slow = call.problem.axis[kSlow];
  const PoolAxis &middle = call.problem.axis[kMiddle];
  const PoolAxis &fast = call.problem.axis[kFast];
  PoolDecoded<T> *const decoded = reinterpret_cast<PoolDecoded<T> *>(shared + call.decoded_at);
  PoolSpan *const slow_span = reinterpret_cast<PoolSpan *>(shared + call.spans_at);
  PoolTileRow *const row_of = reinterpret_cast<PoolTileRow *>(shared + call.rows_at);

  uint32_t rest = blockIdx.x;
  const auto next = [&](uint32_t count) {
    const uint32_t at = rest % count;
    rest /= count;
    return int32_t(at);
  };
  const int32_t s0 = next(call.strips) * call.strip;
  const int32_t f0 = next(call.fast_patches) * kPatch;
  const int32_t m0 = next(call.middle_patches) * kPatch;
  const int64_t c = next(uint32_t(call.problem.channels));
  const int64_t n = rest;
  const int32_t s1 = min(s0 + call.strip, slow.in);
  const int32_t f1 = min(f0 + kPatch, fast.in);
  const int32_t m1 = min(m0 + kPatch, middle.in);
  const PoolRange over_slow = {windows_over(slow, s0).begin, windows_over(slow, s1 - 1).end};
  const PoolRange over_fast = {windows_over(fast, f0).begin, windows_over(fast, f1 - 1).end};
  const PoolRange over_middle = {windows_over(middle, m0).begin, windows_over(middle, m1 - 1).end};
  const int32_t slices_count = over_slow.end - over_slow.begin;
  const int32_t rows = over_middle.end - over_middle.begin;
  const int32_t columns = max(over_fast.end - over_fast.begin, 0);
  for (int32_t t = threadIdx.x; t < slices_count; t += kPatchThreads)
    slow_span[t] = window_span(slow, over_slow.begin + t, s0, s1);
  for (int32_t t = threadIdx.x; t < rows; t += kPatchThreads) {
    const PoolSpan span = window_span(middle, over_middle.begin + t, m0, m1);
    row_of[t] = {uint32_t(span.low) * uint32_t(fast.in), uint16_t(span.count), uint16_t(span.low - m0)};
  }
  for (int32_t t = threadIdx.x; t < (call.rows + call.tile_rows) * call.pitch; t += kPatchThreads)
    decoded[t] = PoolDecoded<T>::of(0, kNone);
  for (uint32_t t = threadIdx.x * 16; t < uint32_t(call.slots) * kSlotBytes; t += kPatchThreads * 16)
    *reinterpret_cast<uint4 *>(shared + t) = uint4{0, 0, 0, 0};

  // What the thread decodes: one column, every few rows.
  const int32_t pass_rows = columns > 0 ? kPatchThreads / columns : 0;
  const int32_t first_row = columns > 0 ? int32_t(threadIdx.x) / columns : 0;
  const int32_t column = int32_t(threadIdx.x) - first_row * columns;
  const int32_t my_rows = first_row < pass_rows ? rows : 0;
  const PoolSpan span = window_span(fast, over_fast.begin + column, f0, f1);
  const Index *names = static_cast<const Index *>(call.indices.data) + call.indices.plane(n, c) +
                       call.indices.cell(over_slow.begin, over_middle.begin + first_row, over_fast.begin + column);
  const T *gives = static_cast<const T *>(call.dy.data) + call.dy.plane(n, c) +
                   call.dy.cell(over_slow.begin, over_middle.begin + first_row, over_fast.begin + column);
  const int64_t origin = call.problem.index_origin(n * call.problem.channels + c);
  // What it adds: a tile of four rows of four cells.
  const int32_t tf = f0 + int32_t(threadIdx.x % 16) * 4;
  const int32_t tm = m0 + int32_t(threadIdx.x / 16) * 4;
  const bool has_tile = tf < f1 && tm < m1;
  const uint32_t tile_at = threadIdx.x * uint32_t(sizeof(Real));
  const PoolDecoded<T> *const candidates =
      decoded + (has_tile ? (windows_over(middle, tm).begin - over_middle.begin) * call.pitch +
                                windows_over(fast, tf).begin - over_fast.begin
                          : 0);
  int32_t tile_rows = has_tile ? windows_over(middle, min(tm + 4, m1) - 1).end - windows_over(middle, tm).begin : 0;
  tile_rows = int32_t(__reduce_max_sync(0xffffffffu, uint32_t(max(tile_rows, 0))));
  T *to = static_cast<T *>(call.dx.data) + call.dx.plane(n, c) + call.dx.cell(s0, tm, tf);
  uint32_t sums_at = uint32_t(__cvta_generic_to_shared(shared));
  asm volatile("" : "+r"(sums_at));
  __syncthreads();

  int32_t done = s0;
  uint32_t head = 0;
  const auto write_slices = [&](int32_t until) {
#pragma unroll 1
    for (; done < until; ++done) {
      char *const from = shared + head * kSlotBytes + tile_at;
      if (++head == uint32_t(call.slots)) head = 0;
      if (has_tile) {
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          Real cells[kTileColumns];
#pragma unroll
          for (int e = 0; e < kTileColumns; ++e) {
            Real &sum = *reinterpret_cast<Real *>(from + (b * kTileColumns + e) * kWord);
            cells[e] = sum;
            sum = Real(0);
          }
          if (tm + b >= m1) continue;
          write_cells(to + b * call.dx.axis[kMiddle], cells, f1 - tf, 1, call.aligned, call.accumulate);
        }
      }
      to += call.dx.axis[kSlow];
    }
  };
  BitsOf<Index> name[kPatchPasses];
  BitsOf<T> gradient[kPatchPasses];
#pragma unroll
  for (int k = 0; k < kPatchPasses; ++k) {
    name[k] = BitsOf<Index>(-1);
    gradient[k] = 0;
  }
  const int64_t named_step = pass_rows * call.indices.axis[kMiddle];
  const int64_t given_step = pass_rows * call.dy.axis[kMiddle];
  const auto load = [&]() {
    const Index *from_names = names;
    const T *from_gives = gives;
#pragma unroll
    for (int k = 0; k < kPatchPasses; ++k) {
      const bool wanted = first_row + k * pass_rows < my_rows;
      load_where(wanted, reinterpret_cast<const BitsOf<Index> *>(from_names), name[k]);
      load_where(wanted, reinterpret_cast<const BitsOf<T> *>(from_gives), gradient[k]);
      from_names += named_step;
      from_gives += given_step;
    }
    names += call.indices.axis[kSlow];
    gives += call.dy.axis[kSlow];
  };
  load();
#pragma unroll 1
  for (int32_t i = 0; i < slices_count; ++i) {
    const PoolSpan slices = slow_span[i];
    write_slices(slices.low);
    __syncthreads();  // all have added the slice before
    const int64_t slice_base = origin + int64_t(slices.low) * call.slice.divisor;
#pragma unroll
    for (int k = 0; k < kPatchPasses; ++k) {
      const int32_t r = first_row + k * pass_rows;
      if (r >= my_rows) break;
      const PoolTileRow row = row_of[r];
      const BitsOf<Index> relative = name[k] - BitsOf<Index>(slice_base + row.offset);
      uint32_t left = uint32_t(relative);
      const uint32_t s = call.slice.divide(left);
      left = call.slice.rest(left, s);
      bool mine = s < slices.count;
      if (sizeof(Index) > 4) mine = mine && uint32_t(relative >> 16 >> 16) == 0;
      const uint32_t m = call.row.divide(left);
      left = call.row.rest(left, m);
      mine = mine && m < row.count && left - uint32_t(span.low) < span.count;
      const uint32_t slot = head + s;
      const uint32_t place = min(slot, slot - uint32_t(call.slots)) * kSlotBytes +
                             patch_word(m + row.place, left - uint32_t(f0)) * uint32_t(sizeof(Real));
      decoded[r * call.pitch + column] = PoolDecoded<T>::of(gradient[k], mine ? place : kNone);
    }
    __syncthreads();
    if (i + 1 < slices_count) load();
    if (has_tile) {
      const PoolDecoded<T> *from = candidates;
#pragma unroll 1
      for (int32_t r = 0; r < tile_rows; ++r, from += call.pitch) {
        PoolDecoded<T> each[kTileGather];
#pragma unroll
        for (int e = 0; e < kTileGather; ++e) each[e] = from[e];
#pragma unroll
        for (int e = 0; e < kTileGather; ++e)
          add_where(each[e].is_of(tile_at, kTileBits), sums_at + each[e].place(), each[e].value());
      }
    }
  }
  write_slices(s1);
}

}  // namespace baracuda
