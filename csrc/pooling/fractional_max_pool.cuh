// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>

#include "pooling/fractional_max_pool.h"
#include "runtime/launch.cuh"

namespace baracuda {

constexpr int kPoolThreads = 256;
constexpr int kPoolMostStrips = 32;  // that a plane is cut into
constexpr int kPoolBlocks = 4;       // on a multiprocessor at least; registers follow from it
// Of what a block of pool_rows reads, this much is asked for ahead: more would hold up what is wanted first.
constexpr uint32_t kRowsPrefetch = 32 * 1024;

// Values move as their bits, unchanged, and stay narrow until they are compared.
template <class T>
__device__ __forceinline__ BitsOf<T> load_bits(const T *from) {
  return __ldg(reinterpret_cast<const BitsOf<T> *>(from));
}

template <class T>
__device__ __forceinline__ typename PoolReal<T>::type real_of(BitsOf<T> bits) {
  return typename PoolReal<T>::type(bit_cast<T>(bits));
}

template <class T, int kCount>
struct alignas(sizeof(T) * kCount) PoolPack {
  T value[kCount];
};

// Whether one of the numbers is a NaN.
__device__ __forceinline__ bool unordered(float a, float b) {
  uint32_t result;
  asm("{\n\t.reg .pred nan;\n\tsetp.nan.f32 nan, %1, %2;\n\tselp.u32 %0, 1, 0, nan;\n\t}"
      : "=r"(result)
      : "f"(a), "f"(b));
  return result != 0;
}
__device__ __forceinline__ bool unordered(double a, double b) {
  uint32_t result;
  asm("{\n\t.reg .pred nan;\n\tsetp.nan.f64 nan, %1, %2;\n\tselp.u32 %0, 1, 0, nan;\n\t}"
      : "=r"(result)
      : "d"(a), "d"(b));
  return result != 0;
}

// The highest of a window's cells, and how far it lies from the first one. Neither holds if one of them is a NaN,
// which is noted.
template <class T, int kMiddleWindow, int kFastWindow, int kCells>
__device__ __forceinline__ void highest_cell(const BitsOf<T> (&cells)[kCells], int32_t slice_cells, int32_t row_cells,
                                             BitsOf<T> &best, uint32_t &offset, bool &any_nan) {
  using Real = typename PoolReal<T>::type;
  Real highest = real_of<T>(cells[0]);
  offset = 0;
  // One comparison looks at two numbers.
#pragma unroll
  for (int cell = 0; cell < kCells; cell += 2)
    any_nan |= unordered(real_of<T>(cells[cell]), real_of<T>(cells[min(cell + 1, kCells - 1)]));
#pragma unroll
  for (int cell = 1; cell < kCells; ++cell) {
    const int line = cell / kFastWindow;
    const Real value = real_of<T>(cells[cell]);
    const bool higher = value > highest;
    highest = higher ? value : highest;
    offset = higher
                 ? uint32_t(line / kMiddleWindow * slice_cells + line % kMiddleWindow * row_cells + cell % kFastWindow)
                 : offset;
  }
  // It is one of the cells, so nothing is rounded.
  best = bit_cast<BitsOf<T>>(T(highest));
}

// Results that nobody here reads again: they are not to displace what others still need.
template <class T>
__device__ __forceinline__ void stream_out(T *to, BitsOf<T> bits) {
  __stcs(reinterpret_cast<BitsOf<T> *>(to), bits);
}
template <class T, int kCount>
__device__ __forceinline__ void stream_out(PoolPack<T, kCount> *to, const PoolPack<T, kCount> &pack) {
  using Word = MemoryWord<sizeof(pack)>;
  __stcs(reinterpret_cast<Word *>(to), bit_cast<Word>(pack));
}

// Quotients of numbers below 2^31 in two instructions. Those of larger numbers are not exact, but never
// below the quotient. The divisor is at least 2.
struct ShortDivider {
  uint32_t divisor = 2;
  uint32_t negated = 0u - 2u;
  uint32_t multiplier = 1u << 31;
  uint32_t shift = 0;

  ShortDivider() = default;
  explicit ShortDivider(uint32_t d) : divisor(d), negated(0u - d), shift(uint32_t(std::bit_width(d - 1)) - 1) {
    multiplier = uint32_t(((uint64_t(1) << (32 + shift)) + d - 1) / d);
  }
  __device__ uint32_t divide(uint32_t n) const { return __umulhi(n, multiplier) >> shift; }
  __device__ uint32_t rest(uint32_t n, uint32_t quotient) const { return n + quotient * negated; }
};

// Asks for what lies in [from, to), up to a number of bytes, without waiting for it.
__device__ __forceinline__ void prefetch_second_level(const void *from, const void *to, uint32_t most) {
#if __CUDA_ARCH__ >= 900
  constexpr uintptr_t kWhole = 16;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(from) + kWhole - 1) / kWhole * kWhole;
  const uintptr_t end = reinterpret_cast<uintptr_t>(to) / kWhole * kWhole;
  if (begin < end)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(begin),
                 "r"(uint32_t(min(end - begin, uintptr_t(most))))
                 : "memory");
#endif
}

// ---------------------------------------------------------------------------------------------------
// Forward, row-major outputs.
//
// A block takes consecutive rows of outputs, whichever planes they lie in. It first works out where the
// windows of its rows and columns start, so that an output costs little more than two looks at shared memory
// besides its window. Threads take pairs of neighbours that can be written at once, a warp whole lines of them,
// whatever the length of a row: lines in parts cost the second-level cache more than they hold.

constexpr uint32_t kRowsLine = 64;  // outputs that a warp writes at once

struct PoolRowsCall {
  PoolProblem problem;
  PoolSamples samples;
  PoolView x;
  void *y;
  void *indices;
  int64_t rows;        // of all planes
  int32_t block_rows;  // of a block
  int32_t planes;      // at most this many in a block
  int32_t plane_rows;
  bool aligned;       // pairs can be written at once
  uint32_t prefetch;  // bytes of x at most; none where it has gaps
  bool wide;          // rows are counted in 64 bits
  Divider by_plane_rows;
  Divider by_channels;
  Divider by_middle_out;
  Divider by_fast_out;
};

// Where the windows of a row of outputs begin.
template <class T>
struct alignas(16) PoolRow {
  const T *from;
  int64_t index;
};

template <class T, class Index, int kSlowWindow, int kMiddleWindow, int kFastWindow, bool kUnit, int kUnroll,
          int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) pool_rows(const __grid_constant__ PoolRowsCall call) {
  using Real = typename PoolReal<T>::type;
  extern __shared__ __align__(16) char shared[];
  const PoolAxis &slow = call.problem.axis[kSlow];
  const PoolAxis &middle = call.problem.axis[kMiddle];
  const PoolAxis &fast = call.problem.axis[kFast];
  PoolRow<T> *const row_of = reinterpret_cast<PoolRow<T> *>(shared);
  Real *const samples = reinterpret_cast<Real *>(row_of + call.block_rows);
  int32_t *const row_starts = reinterpret_cast<int32_t *>(samples + call.planes * kPoolAxes);
  int32_t *const fast_start = row_starts + call.block_rows;

  const int64_t first_row = int64_t(blockIdx.x) * call.block_rows;
  const int32_t rows = int32_t(min(int64_t(call.block_rows), call.rows - first_row));
  const int64_t first_plane =
      call.wide ? first_row / call.plane_rows : int64_t(call.by_plane_rows.divide(uint32_t(first_row)));
  const int32_t row_of_plane = int32_t(first_row - first_plane * call.plane_rows);
  const int32_t planes = int32_t(call.by_plane_rows.divide(uint32_t(row_of_plane + rows - 1))) + 1;
  const auto batch_of = [&](int64_t plane) {
    return call.wide ? plane / call.problem.channels : int64_t(call.by_channels.divide(uint32_t(plane)));
  };

  // What the block reads, whatever the samples are, is on its way to the second-level cache meanwhile.
  if (call.prefetch > 0 && threadIdx.x == kThreads - 1) {
    const auto slice_of = [&](int32_t row) { return int32_t(call.by_middle_out.divide(uint32_t(row))); };
    const int32_t last_row = row_of_plane + rows - 1 - (planes - 1) * call.plane_rows;
    const int64_t slice_cells = int64_t(middle.in) * fast.in;
    const T *const from = static_cast<const T *>(call.x.data) + first_plane * call.problem.in_plane();
    prefetch_second_level(
        from + slow.earliest(slice_of(row_of_plane)) * slice_cells,
        from + (planes - 1) * call.problem.in_plane() + (slow.latest(slice_of(last_row)) + slow.window) * slice_cells,
        call.prefetch);
  }
  for (int32_t p = threadIdx.x; p < planes; p += kThreads) {
    const int64_t plane = first_plane + p;
    const int64_t n = batch_of(plane);
    Real u[kPoolAxes];
    plane_samples(call.samples, call.problem, n, plane - n * call.problem.channels, u);
#pragma unroll
    for (int axis = 0; axis < kPoolAxes; ++axis) samples[p * kPoolAxes + axis] = u[axis];
  }
  __syncthreads();
  for (int32_t r = threadIdx.x; r < rows; r += kThreads) {
    const int32_t p = int32_t(call.by_plane_rows.divide(uint32_t(row_of_plane + r)));
    const int32_t row = row_of_plane + r - p * call.plane_rows;
    const int32_t i = int32_t(call.by_middle_out.divide(uint32_t(row)));
    const int32_t s = window_start(slow, call.problem.placement, i, samples[p * kPoolAxes + kSlow]);
    const int32_t m =
        window_start(middle, call.problem.placement, row - i * middle.out, samples[p * kPoolAxes + kMiddle]);
    const int64_t plane = first_plane + p;
    const int64_t n = batch_of(plane);
    row_of[r] = {
        static_cast<const T *>(call.x.data) + call.x.plane(n, plane - n * call.problem.channels) + call.x.cell(s, m, 0),
        call.problem.index_origin(plane) + (int64_t(s) * middle.in + m) * fast.in};
    row_starts[r] = p * fast.out;
  }
  for (int32_t t = threadIdx.x; t < planes * fast.out; t += kThreads) {
    const int32_t p = int32_t(call.by_fast_out.divide(uint32_t(t)));
    fast_start[t] = window_start(fast, call.problem.placement, t - p * fast.out, samples[p * kPoolAxes + kFast]);
  }
  __syncthreads();

  const int64_t first = first_row * fast.out;
  T *y = static_cast<T *>(call.y) + first;
  Index *indices = call.indices ? static_cast<Index *>(call.indices) + first : nullptr;
  asm volatile("" : "+l"(y), "+l"(indices));                    // kept, not worked out again and again
  const int32_t before = int32_t(uint32_t(first) % kRowsLine);  // outputs of the first line that aren't of the block
  const int32_t outs = rows * fast.out;
  const bool last_nan = call.problem.placement == Placement::torch;
  const int64_t slow_step = call.x.axis[kSlow];
  const int64_t middle_step = call.x.axis[kMiddle];
  const int64_t fast_step = kUnit ? 1 : call.x.axis[kFast];
  // 32 bits are enough for offsets within a plane: one of more cells takes another kernel.
  const int32_t row_cells = fast.in;
  const int32_t slice_cells = middle.in * fast.in;
  constexpr bool kFixed = kSlowWindow > 0;
  constexpr int kLines = kSlowWindow * kMiddleWindow;
  constexpr int kCells = kLines * kFastWindow;
#pragma unroll 1
  for (int32_t at = 2 * int32_t(threadIdx.x) - before; at < outs; at += kThreads * kUnroll) {
    const T *from[kUnroll];
    int64_t index[kUnroll];
#pragma unroll
    for (int e = 0; e < kUnroll; ++e) {
      const uint32_t t = uint32_t(max(0, min(at + e / 2 * (2 * kThreads) + e % 2, outs - 1)));
      const uint32_t r = call.by_fast_out.divide(t);
      const int32_t f = fast_start[row_starts[r] + int32_t(t - r * uint32_t(fast.out))];
      const PoolRow<T> row = row_of[r];
      from[e] = row.from + f * fast_step;
      index[e] = row.index + uint32_t(f);
    }
    BitsOf<T> best[kUnroll];
    uint32_t offset[kUnroll];  // of the maximum from the window's first cell
    bool any_nan = false;
    if constexpr (kFixed) {
      // All loads come before the first comparison, so that they are in flight together.
      BitsOf<T> cells[kUnroll][kCells];
#pragma unroll
      for (int e = 0; e < kUnroll; ++e)
#pragma unroll
        for (int line = 0; line < kLines; ++line)
#pragma unroll
          for (int w = 0; w < kFastWindow; ++w)
            cells[e][line * kFastWindow + w] = load_bits(
                from[e] + (line / kMiddleWindow * slow_step + line % kMiddleWindow * middle_step) + w * fast_step);
#pragma unroll
      for (int e = 0; e < kUnroll; ++e) {
        highest_cell<T, kMiddleWindow, kFastWindow>(cells[e], slice_cells, row_cells, best[e], offset[e], any_nan);
      }
    }
    if (!kFixed || any_nan) {
#pragma unroll
      for (int e = 0; e < kUnroll; ++e) {
        best[e] = load_bits(from[e]);
        Real highest = real_of<T>(best[e]);
        offset[e] = 0;
#pragma unroll 1
        for (int32_t s = 0; s < slow.window; ++s) {
#pragma unroll 1
          for (int32_t m = 0; m < middle.window; ++m) {
            const T *const line = from[e] + (s * slow_step + m * middle_step);
            const uint32_t line_offset = uint32_t(s * slice_cells + m * row_cells);
#pragma unroll kFixed ? 1 : 4
            for (int32_t w = 0; w < fast.window; ++w) {
              const BitsOf<T> bits = load_bits(line + w * fast_step);
              const Real value = real_of<T>(bits);
              if (!beats(value, highest, last_nan)) continue;
              best[e] = bits;
              highest = value;
              offset[e] = line_offset + uint32_t(w);
            }
          }
        }
      }
    }
#pragma unroll
    for (int e = 0; e < kUnroll; e += 2) {
      const int32_t t = at + e / 2 * (2 * kThreads);
      if (t >= outs) break;
      if (call.aligned && t >= 0 && t + 1 < outs) {
        const PoolPack<BitsOf<T>, 2> values = {best[e], best[e + 1]};
        const PoolPack<Index, 2> names = {Index(index[e] + offset[e]), Index(index[e + 1] + offset[e + 1])};
        stream_out(reinterpret_cast<PoolPack<BitsOf<T>, 2> *>(y + t), values);
        if (indices) stream_out(reinterpret_cast<PoolPack<Index, 2> *>(indices + t), names);
        continue;
      }
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        if (uint32_t(t + v) >= uint32_t(outs)) continue;
        stream_out(y + (t + v), best[e + v]);
        if (indices) __stcs(indices + (t + v), Index(index[e + v] + offset[e + v]));
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------
// Any strides. Threads follow the memory of what they write, so that channels-last tensors are read
// and written in whole lines, too.

constexpr int kTensorAxes = 2 + kPoolAxes;
constexpr int kAnyItems = 16;  // elements of a thread
constexpr int64_t kMostTableBytes = 32 * 1024;

// The elements of a tensor [batch, channel, slow, middle, fast] in the order of their addresses.
struct PoolOrder {
  int64_t total;
  bool wide;                  // positions need 64 bits
  int64_t step[kTensorAxes];  // elements of this order between neighbours along an axis
  int64_t extent[kTensorAxes];
  Divider step32[kTensorAxes];
  Divider extent32[kTensorAxes];
};

__device__ __forceinline__ void find_place(const PoolOrder &order, int64_t index, int64_t (&at)[kTensorAxes]) {
  if (order.wide) {
#pragma unroll
    for (int axis = 0; axis < kTensorAxes; ++axis) at[axis] = index / order.step[axis] % order.extent[axis];
  } else {
#pragma unroll
    for (int axis = 0; axis < kTensorAxes; ++axis) {
      const uint32_t whole = order.step32[axis].divide(uint32_t(index));
      at[axis] = whole - order.extent32[axis].divide(whole) * order.extent32[axis].divisor;
    }
  }
}

struct PoolAnyForward {
  PoolForward pool;
  PoolOrder order;
  bool table;  // the parts of starts that hold for all planes fit in shared memory
};

template <class T, class Index>
__global__ void __launch_bounds__(kPoolThreads, kPoolBlocks) pool_any(const __grid_constant__ PoolAnyForward call) {
  using Real = typename PoolReal<T>::type;
  extern __shared__ __align__(16) char shared[];
  const PoolProblem &problem = call.pool.problem;
  const PoolAxis &slow = problem.axis[kSlow];
  const PoolAxis &middle = problem.axis[kMiddle];
  const PoolAxis &fast = problem.axis[kFast];
  EvenStart<Real> *const table = reinterpret_cast<EvenStart<Real> *>(shared);
  if (call.table) {
    for (int32_t t = threadIdx.x; t < slow.out + middle.out + fast.out; t += kPoolThreads) {
      const int axis = t < slow.out ? kSlow : t < slow.out + middle.out ? kMiddle : kFast;
      const int32_t i = t - (axis == kSlow ? 0 : axis == kMiddle ? slow.out : slow.out + middle.out);
      if (problem.axis[axis].out > 1) table[t] = EvenStart<Real>(problem.axis[axis], i);
    }
    __syncthreads();
  }
  Real step[kPoolAxes];
#pragma unroll
  for (int axis = 0; axis < kPoolAxes; ++axis) step[axis] = torch_step<Real>(problem.axis[axis]);

  const T *const x = static_cast<const T *>(call.pool.x.data);
  const bool last_nan = problem.placement == Placement::torch;
  const int64_t first = int64_t(blockIdx.x) * (kPoolThreads * kAnyItems) + threadIdx.x;
#pragma unroll 1
  for (int e = 0; e < kAnyItems; ++e) {
    const int64_t index = first + e * kPoolThreads;
    if (index >= call.order.total) return;
    int64_t at[kTensorAxes];
    find_place(call.order, index, at);
    Real u[kPoolAxes];
    plane_samples(call.pool.samples, problem, at[0], at[1], u);
    int32_t start[kPoolAxes];
    int32_t entry = 0;
#pragma unroll
    for (int axis = 0; axis < kPoolAxes; ++axis) {
      const PoolAxis &windows = problem.axis[axis];
      const int32_t i = int32_t(at[2 + axis]);
      if (windows.out == 1) {
        start[axis] = single_start(windows, problem.placement, u[axis]);
      } else if (problem.placement == Placement::torch) {
        start[axis] = torch_start(windows, i, u[axis], step[axis]);
      } else if (call.table) {
        start[axis] = table[entry + i].at(windows, u[axis]);
      } else {
        start[axis] = EvenStart<Real>(windows, i).at(windows, u[axis]);
      }
      entry += windows.out;
    }
    const T *const from =
        x + (call.pool.x.plane(at[0], at[1]) + call.pool.x.cell(start[kSlow], start[kMiddle], start[kFast]));
    BitsOf<T> best = load_bits(from);
    Real highest = real_of<T>(best);
    int64_t place = 0;
    for (int32_t s = 0; s < slow.window; ++s) {
      for (int32_t m = 0; m < middle.window; ++m) {
        const T *const row = from + call.pool.x.cell(s, m, 0);
        const int64_t row_place = (int64_t(s) * middle.in + m) * fast.in;
#pragma unroll 4
        for (int32_t w = 0; w < fast.window; ++w) {
          const BitsOf<T> bits = load_bits(row + w * call.pool.x.axis[kFast]);
          const Real value = real_of<T>(bits);
          if (beats(value, highest, last_nan)) {
            best = bits;
            highest = value;
            place = row_place + w;
          }
        }
      }
    }
    stream_out(
        static_cast<T *>(call.pool.y.data) + call.pool.y.plane(at[0], at[1]) + call.pool.y.cell(at[2], at[3], at[4]),
        best);
    if (call.pool.indices.data) {
      const int64_t plane = at[0] * problem.channels + at[1];
      const int64_t cell =
          problem.index_origin(plane) + (int64_t(start[kSlow]) * middle.in + start[kMiddle]) * fast.in + start[kFast];
      static_cast<Index *>(
          call.pool.indices.data)[call.pool.indices.plane(at[0], at[1]) + call.pool.indices.cell(at[2], at[3], at[4])] =
          Index(cell + place);
    }
  }
}

struct PoolAnyBackward {
  PoolBackward pool;
  PoolOrder order;
  bool table;  // the ranges of windows over all cells of the axes fit in shared memory
};

template <class T, class Index>
__global__ void __launch_bounds__(kPoolThreads, kPoolBlocks)
    pool_any_backward(const __grid_constant__ PoolAnyBackward call) {
  using Real = typename PoolReal<T>::type;
  extern __shared__ __align__(16) char shared[];
  const PoolProblem &problem = call.pool.problem;
  const PoolAxis &slow = problem.axis[kSlow];
  const PoolAxis &middle = problem.axis[kMiddle];
  const PoolAxis &fast = problem.axis[kFast];
  PoolRange *const table = reinterpret_cast<PoolRange *>(shared);
  if (call.table) {
    for (int32_t t = threadIdx.x; t < slow.in + middle.in + fast.in; t += kPoolThreads) {
      const int axis = t < slow.in ? kSlow : t < slow.in + middle.in ? kMiddle : kFast;
      table[t] = windows_over(problem.axis[axis], t - (axis == kSlow     ? 0
                                                       : axis == kMiddle ? slow.in
                                                                         : slow.in + middle.in));
    }
    __syncthreads();
  }
  const int64_t first = int64_t(blockIdx.x) * (kPoolThreads * kAnyItems) + threadIdx.x;
#pragma unroll 1
  for (int e = 0; e < kAnyItems; ++e) {
    const int64_t index = first + e * kPoolThreads;
    if (index >= call.order.total) return;
    int64_t at[kTensorAxes];
    find_place(call.order, index, at);
    PoolRange over[kPoolAxes];
    int32_t entry = 0;
#pragma unroll
    for (int axis = 0; axis < kPoolAxes; ++axis) {
      over[axis] = call.table ? table[entry + at[2 + axis]] : windows_over(problem.axis[axis], int32_t(at[2 + axis]));
      entry += problem.axis[axis].in;
    }
    const Index *const indices =
        static_cast<const Index *>(call.pool.indices.data) + call.pool.indices.plane(at[0], at[1]);
    const T *const dy = static_cast<const T *>(call.pool.dy.data) + call.pool.dy.plane(at[0], at[1]);
    const int64_t cell =
        problem.index_origin(at[0] * problem.channels + at[1]) + (at[2] * middle.in + at[3]) * fast.in + at[4];
    Real sum = 0;
    for (int32_t i = over[kSlow].begin; i < over[kSlow].end; ++i) {
      for (int32_t m = over[kMiddle].begin; m < over[kMiddle].end; ++m) {
        const int64_t named = call.pool.indices.cell(i, m, 0);
        const int64_t given = call.pool.dy.cell(i, m, 0);
#pragma unroll 3
        for (int32_t j = over[kFast].begin; j < over[kFast].end; ++j)
          if (int64_t(__ldg(indices + named + j * call.pool.indices.axis[kFast])) == cell)
            sum += real_of<T>(load_bits(dy + given + j * call.pool.dy.axis[kFast]));
      }
    }
    T *const to =
        static_cast<T *>(call.pool.dx.data) + call.pool.dx.plane(at[0], at[1]) + call.pool.dx.cell(at[2], at[3], at[4]);
    *to = T(call.pool.accumulate ? Real(*to) + sum : sum);
  }
}

// ---------------------------------------------------------------------------------------------------
// Channels last. Neighbouring threads take neighbouring channels, so that every access is of whole
// lines, and each walks along the fast axis, so that it looks for its plane once.

constexpr int kLineItems = 16;  // cells of a thread

// Threads of which the channel runs fastest, then pieces of lines, then middle, slow and batch.
struct PoolLines {
  int64_t total;
  int32_t pieces;  // of a line
  bool wide;       // positions need 64 bits
  Divider channels;
  Divider pieces32;
  Divider middle;
  Divider slow;
};

struct PoolLine {
  int64_t n, c, slow, middle;
  int32_t begin;
};

__device__ __forceinline__ PoolLine find_line(const PoolLines &lines, const PoolProblem &problem, int32_t slow,
                                              int32_t middle, int64_t index) {
  PoolLine line;
  if (lines.wide) {
    line.c = index % problem.channels;
    index /= problem.channels;
    line.begin = int32_t(index % lines.pieces) * kLineItems;
    index /= lines.pieces;
    line.middle = index % middle;
    index /= middle;
    line.slow = index % slow;
    line.n = index / slow;
  } else {
    uint32_t rest = uint32_t(index);
    uint32_t next = lines.channels.divide(rest);
    line.c = rest - next * lines.channels.divisor;
    rest = next;
    next = lines.pieces32.divide(rest);
    line.begin = int32_t(rest - next * lines.pieces32.divisor) * kLineItems;
    rest = next;
    next = lines.middle.divide(rest);
    line.middle = rest - next * lines.middle.divisor;
    rest = next;
    next = lines.slow.divide(rest);
    line.slow = rest - next * lines.slow.divisor;
    line.n = next;
  }
  return line;
}

struct PoolLinesForward {
  PoolForward pool;
  PoolLines lines;
  bool table;
};

template <class T, class Index, int kSlowWindow, int kMiddleWindow, int kFastWindow>
__global__ void __launch_bounds__(kPoolThreads, kPoolBlocks) pool_lines(const __grid_constant__ PoolLinesForward call) {
  using Real = typename PoolReal<T>::type;
  extern __shared__ __align__(16) char shared[];
  const PoolProblem &problem = call.pool.problem;
  const PoolAxis &slow = problem.axis[kSlow];
  const PoolAxis &middle = problem.axis[kMiddle];
  const PoolAxis &fast = problem.axis[kFast];
  EvenStart<Real> *const table = reinterpret_cast<EvenStart<Real> *>(shared);
  if (call.table) {
    for (int32_t t = threadIdx.x; t < fast.out; t += kPoolThreads) table[t] = EvenStart<Real>(fast, t);
    __syncthreads();
  }
  const int64_t index = int64_t(blockIdx.x) * kPoolThreads + threadIdx.x;
  if (index >= call.lines.total) return;
  const PoolLine line = find_line(call.lines, problem, slow.out, middle.out, index);
  Real u[kPoolAxes];
  plane_samples(call.pool.samples, problem, line.n, line.c, u);
  const int32_t s0 = window_start(slow, problem.placement, int32_t(line.slow), u[kSlow]);
  const int32_t m0 = window_start(middle, problem.placement, int32_t(line.middle), u[kMiddle]);
  const Real step = torch_step<Real>(fast);

  const PoolView &view = call.pool.x;
  const T *const x = static_cast<const T *>(view.data) + (view.plane(line.n, line.c) + view.cell(s0, m0, 0));
  T *const y = static_cast<T *>(call.pool.y.data) +
               (call.pool.y.plane(line.n, line.c) + call.pool.y.cell(line.slow, line.middle, 0));
  Index *indices = static_cast<Index *>(call.pool.indices.data);
  if (indices) indices += call.pool.indices.plane(line.n, line.c) + call.pool.indices.cell(line.slow, line.middle, 0);
  const int64_t origin =
      problem.index_origin(line.n * problem.channels + line.c) + (int64_t(s0) * middle.in + m0) * fast.in;
  const bool last_nan = problem.placement == Placement::torch;
  constexpr bool kFixed = kSlowWindow > 0;
  const int32_t slow_window = kFixed ? kSlowWindow : slow.window;
  const int32_t middle_window = kFixed ? kMiddleWindow : middle.window;
  const int32_t fast_window = kFixed ? kFastWindow : fast.window;
  const int32_t end = min(line.begin + kLineItems, fast.out);
#pragma unroll 2
  for (int32_t j = line.begin; j < end; ++j) {
    int32_t f0;
    if (fast.out == 1) {
      f0 = single_start(fast, problem.placement, u[kFast]);
    } else if (problem.placement == Placement::torch) {
      f0 = torch_start(fast, j, u[kFast], step);
    } else {
      f0 = (call.table ? table[j] : EvenStart<Real>(fast, j)).at(fast, u[kFast]);
    }
    const T *const from = x + f0 * view.axis[kFast];
    BitsOf<T> best = load_bits(from);
    Real highest = real_of<T>(best);
    int64_t place = 0;
#pragma unroll
    for (int32_t s = 0; s < slow_window; ++s) {
#pragma unroll
      for (int32_t m = 0; m < middle_window; ++m) {
#pragma unroll
        for (int32_t w = 0; w < fast_window; ++w) {
          if (kFixed && (s | m | w) == 0) continue;
          const BitsOf<T> bits = load_bits(from + view.cell(s, m, w));
          const Real value = real_of<T>(bits);
          if (beats(value, highest, last_nan)) {
            best = bits;
            highest = value;
            place = (int64_t(s) * middle.in + m) * fast.in + w;
          }
        }
      }
    }
    stream_out(y + j * call.pool.y.axis[kFast], best);
    if (indices) __stcs(indices + j * call.pool.indices.axis[kFast], Index(origin + f0 + place));
  }
}

}  // namespace baracuda
