// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "pooling/fractional_max_pool.h"
#include "runtime/launch.cuh"

namespace baracuda {

constexpr int kPoolThreads = 256;
constexpr int kPoolBlocks = 4;  // on a multiprocessor at least; registers follow from it
constexpr int kWarp = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;

// The bits of an element, so that values move unchanged and stay narrow until they are compared.
template <int kBytes>
struct PoolBits;
template <>
struct PoolBits<2> {
  using type = uint16_t;
};
template <>
struct PoolBits<4> {
  using type = uint32_t;
};
template <>
struct PoolBits<8> {
  using type = unsigned long long;
};

template <class T>
using BitsOf = typename PoolBits<sizeof(T)>::type;

template <class T>
__device__ __forceinline__ BitsOf<T> load_bits(const T *from) {
  return __ldg(reinterpret_cast<const BitsOf<T> *>(from));
}

template <class T>
__device__ __forceinline__ typename PoolReal<T>::type real_of(BitsOf<T> bits) {
  return typename PoolReal<T>::type(bit_cast<T>(bits));
}

// Results that nobody here reads again: they are not to displace what others still need.
template <class T>
__device__ __forceinline__ void stream_out(T *to, BitsOf<T> bits) {
  __stcs(reinterpret_cast<BitsOf<T> *>(to), bits);
}

// ---------------------------------------------------------------------------------------------------
// Forward, row-major outputs.
//
// A block takes consecutive outputs, whichever planes they lie in. It first works out where the
// windows of its rows and columns start, so that an output costs one division by a constant and
// two looks at shared memory besides its window.

struct PoolRowsCall {
  PoolProblem problem;
  PoolSamples samples;
  PoolView x;
  void *y;
  void *indices;
  int64_t outputs;
  int32_t block_outputs;
  int32_t rows;    // at most this many in a block
  int32_t planes;  // at most this many in a block
  int32_t rows_of_plane;
  Divider out_fast;
};

template <class T, class Index, int kSlowWindow, int kMiddleWindow, int kFastWindow, int kUnroll, int kBlocks>
__global__ void __launch_bounds__(kPoolThreads, kBlocks) pool_rows(const __grid_constant__ PoolRowsCall call) {
  using Real = typename PoolReal<T>::type;
  extern __shared__ __align__(16) char shared[];
  const PoolAxis &slow = call.problem.axis[kSlow];
  const PoolAxis &middle = call.problem.axis[kMiddle];
  const PoolAxis &fast = call.problem.axis[kFast];
  int64_t *const row_place = reinterpret_cast<int64_t *>(shared);
  int64_t *const row_index = row_place + call.rows;
  Real *const samples = reinterpret_cast<Real *>(row_index + call.rows);
  int32_t *const row_starts = reinterpret_cast<int32_t *>(samples + call.planes * kPoolAxes);
  int32_t *const fast_start = row_starts + call.rows;

  const int64_t first = int64_t(blockIdx.x) * call.block_outputs;
  const int32_t count = int32_t(min(int64_t(call.block_outputs), call.outputs - first));
  const int64_t first_row = first / fast.out;
  const int32_t lead = int32_t(first - first_row * fast.out);
  const int32_t rows = (lead + count - 1) / fast.out + 1;
  const int64_t first_plane = first_row / call.rows_of_plane;
  const int32_t row_of_plane = int32_t(first_row - first_plane * call.rows_of_plane);
  const int32_t planes = (row_of_plane + rows - 1) / call.rows_of_plane + 1;

  for (int32_t p = threadIdx.x; p < planes; p += kPoolThreads) {
    const int64_t plane = first_plane + p;
    const int64_t n = plane / call.problem.channels;
    Real u[kPoolAxes];
    plane_samples(call.samples, call.problem, n, plane - n * call.problem.channels, u);
#pragma unroll
    for (int axis = 0; axis < kPoolAxes; ++axis) samples[p * kPoolAxes + axis] = u[axis];
  }
  __syncthreads();
  for (int32_t r = threadIdx.x; r < rows; r += kPoolThreads) {
    const int32_t p = (row_of_plane + r) / call.rows_of_plane;
    const int32_t row = row_of_plane + r - p * call.rows_of_plane;
    const int32_t i = row / middle.out;
    const int32_t s = window_start(slow, call.problem.placement, i, samples[p * kPoolAxes + kSlow]);
    const int32_t m =
        window_start(middle, call.problem.placement, row - i * middle.out, samples[p * kPoolAxes + kMiddle]);
    const int64_t plane = first_plane + p;
    const int64_t n = plane / call.problem.channels;
    row_place[r] = call.x.plane(n, plane - n * call.problem.channels) + call.x.cell(s, m, 0);
    row_index[r] = call.problem.index_origin(plane) + (int64_t(s) * middle.in + m) * fast.in;
    row_starts[r] = p * fast.out;
  }
  for (int32_t t = threadIdx.x; t < planes * fast.out; t += kPoolThreads) {
    const int32_t p = t / fast.out;
    fast_start[t] = window_start(fast, call.problem.placement, t - p * fast.out, samples[p * kPoolAxes + kFast]);
  }
  __syncthreads();

  const T *const x = static_cast<const T *>(call.x.data);
  T *const y = static_cast<T *>(call.y) + first;
  Index *const indices = call.indices ? static_cast<Index *>(call.indices) + first : nullptr;
  const bool last_nan = call.problem.placement == Placement::torch;
  const int64_t slow_step = call.x.axis[kSlow];
  const int64_t middle_step = call.x.axis[kMiddle];
  const int64_t fast_step = call.x.axis[kFast];
  constexpr bool kFixed = kSlowWindow > 0;
  constexpr int kCells = kFixed ? kSlowWindow * kMiddleWindow * kFastWindow : 1;

  for (int32_t base = threadIdx.x; base < count; base += kPoolThreads * kUnroll) {
    BitsOf<T> cells[kUnroll][kCells];
    int64_t index[kUnroll];
    const T *from[kUnroll];
    // All loads come before the first comparison, so that they are in flight together.
#pragma unroll
    for (int e = 0; e < kUnroll; ++e) {
      const int32_t t = lead + min(base + e * kPoolThreads, count - 1);
      const int32_t r = int32_t(call.out_fast.divide(uint32_t(t)));
      const int32_t f = fast_start[row_starts[r] + (t - r * fast.out)];
      from[e] = x + (row_place[r] + f * fast_step);
      index[e] = row_index[r] + f;
      if constexpr (kFixed) {
#pragma unroll
        for (int s = 0; s < kSlowWindow; ++s)
#pragma unroll
          for (int m = 0; m < kMiddleWindow; ++m)
#pragma unroll
            for (int w = 0; w < kFastWindow; ++w)
              cells[e][(s * kMiddleWindow + m) * kFastWindow + w] =
                  load_bits(from[e] + (s * slow_step + m * middle_step + w * fast_step));
      }
    }
#pragma unroll
    for (int e = 0; e < kUnroll; ++e) {
      BitsOf<T> best;
      int64_t place = 0;
      if constexpr (kFixed) {
        best = cells[e][0];
        Real highest = real_of<T>(best);
        int32_t offset = 0;
#pragma unroll
        for (int s = 0; s < kSlowWindow; ++s)
#pragma unroll
          for (int m = 0; m < kMiddleWindow; ++m)
#pragma unroll
            for (int w = 0; w < kFastWindow; ++w) {
              const BitsOf<T> bits = cells[e][(s * kMiddleWindow + m) * kFastWindow + w];
              const Real value = real_of<T>(bits);
              if ((s | m | w) != 0 && beats(value, highest, last_nan)) {
                best = bits;
                highest = value;
                // 32 bits are enough: a plane of more cells takes the other kernel.
                offset = (s * middle.in + m) * fast.in + w;
              }
            }
        place = offset;
      } else {
        best = load_bits(from[e]);
        Real highest = real_of<T>(best);
        for (int32_t s = 0; s < slow.window; ++s) {
          for (int32_t m = 0; m < middle.window; ++m) {
            const T *row = from[e] + (s * slow_step + m * middle_step);
            const int64_t row_offset = (int64_t(s) * middle.in + m) * fast.in;
#pragma unroll 4
            for (int32_t w = 0; w < fast.window; ++w) {
              const BitsOf<T> bits = load_bits(row + w * fast_step);
              const Real value = real_of<T>(bits);
              if (beats(value, highest, last_nan)) {
                best = bits;
                highest = value;
                place = row_offset + w;
              }
            }
          }
        }
      }
      const int32_t t = base + e * kPoolThreads;
      if (t < count) {
        stream_out(y + t, best);
        if (indices) __stcs(indices + t, Index(index[e] + place));
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------
// Backward, row-major operands.
//
// A warp owns some cells of dx, keeps their sums in shared memory, and goes through the outputs that
// could name them in the order of the outputs. It moves along the slow axis with a ring of as many
// slices as a window may reach; a slice that no later output can reach is written. A cell belongs to
// one warp, so there are no atomics.
//
// Lanes take outputs that lie side by side. Where several of them name one cell, the first of them
// adds the others' gradients to its own, in their order. All such lanes are within `overlap` places.

struct PoolRingCall {
  PoolProblem problem;
  const void *dy;
  const void *indices;
  void *dx;
  bool accumulate;
  int32_t overlap;
  int32_t slots;  // slices in the ring
  // Cells that a warp owns: `strip` slices of `middle_tile` rows of `fast_tile` cells.
  int32_t strip;
  int32_t middle_tile;
  int32_t fast_tile;
  int32_t strips;
  int32_t middle_tiles;
  int32_t fast_tiles;
  int64_t warps;
  Divider slice;  // cells in a slice of x
  Divider row;    // cells in a row of x
  bool aligned;   // rows and addresses allow cells to be written several at once
};

constexpr int kRingWarps = 4;
// Cells of dx that a lane writes at once: sixteen bytes of their sums.
template <class Real>
constexpr int kRingVector = 16 / sizeof(Real);
constexpr int kRingAhead = 3;   // loads in flight beyond the outputs at hand
constexpr int kRingBlocks = 5;  // on a multiprocessor at least; registers follow from it

// Where window i of an axis may begin, and one past the last cell it may hold.
struct PoolSpan {
  int32_t begin;
  int32_t end;
};

template <class T, int kVector>
struct alignas(sizeof(T) * kVector) PoolPack {
  T value[kVector];
};

template <class T, class Real, int kVector>
__device__ __forceinline__ void write_row(T *to, Real *from, int32_t count, bool accumulate, int lane) {
  for (int32_t t = lane * kVector; t < count; t += kWarp * kVector) {
    using RealPack = PoolPack<Real, kVector>;
    using Pack = PoolPack<T, kVector>;
    RealPack sums = *reinterpret_cast<const RealPack *>(from + t);
    Pack pack;
    if (accumulate) {
      pack = *reinterpret_cast<const Pack *>(to + t);
#pragma unroll
      for (int e = 0; e < kVector; ++e) sums.value[e] = Real(pack.value[e]) + sums.value[e];
    }
#pragma unroll
    for (int e = 0; e < kVector; ++e) pack.value[e] = T(sums.value[e]);
    *reinterpret_cast<Pack *>(to + t) = pack;
#pragma unroll
    for (int e = 0; e < kVector; ++e) sums.value[e] = Real(0);
    *reinterpret_cast<RealPack *>(from + t) = sums;
  }
}

template <class T, class Index, bool kFlat, int kAhead, int kBlocks>
__global__ void __launch_bounds__(kRingWarps *kWarp, kBlocks) pool_ring(const __grid_constant__ PoolRingCall call) {
  using Real = typename PoolReal<T>::type;
  extern __shared__ __align__(16) char shared[];
  const PoolAxis &slow = call.problem.axis[kSlow];
  const PoolAxis &middle = call.problem.axis[kMiddle];
  const PoolAxis &fast = call.problem.axis[kFast];
  // Spans of all windows: the planes' samples play no part in them.
  PoolSpan *const slow_span = reinterpret_cast<PoolSpan *>(shared);
  PoolSpan *const middle_span = slow_span + slow.out;
  PoolSpan *const fast_span = middle_span + middle.out;
  const int32_t spans = slow.out + middle.out + fast.out;
  for (int32_t t = threadIdx.x; t < spans; t += kRingWarps * kWarp) {
    const int axis = t < slow.out ? kSlow : t < slow.out + middle.out ? kMiddle : kFast;
    const int32_t i = t - (axis == kSlow ? 0 : axis == kMiddle ? slow.out : slow.out + middle.out);
    const PoolAxis &windows = call.problem.axis[axis];
    slow_span[t] = {windows.earliest(i), windows.latest(i) + windows.window};
  }
  __syncthreads();

  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  int64_t tile = int64_t(blockIdx.x) * kRingWarps + warp;
  if (tile >= call.warps) return;
  const int32_t patch = call.slots * call.middle_tile * call.fast_tile;
  Real *const sums =
      reinterpret_cast<Real *>(shared + (size_t(spans) * sizeof(PoolSpan) + 15) / 16 * 16) + warp * patch;
  for (int32_t t = lane; t < patch; t += kWarp) sums[t] = Real(0);
  __syncwarp();

  const int32_t f0 = int32_t(tile % call.fast_tiles) * call.fast_tile;
  tile /= call.fast_tiles;
  const int32_t m0 = int32_t(tile % call.middle_tiles) * call.middle_tile;
  tile /= call.middle_tiles;
  const int32_t s0 = int32_t(tile % call.strips) * call.strip;
  const int64_t plane = tile / call.strips;
  const int32_t s1 = min(s0 + call.strip, slow.in);
  const int32_t m1 = min(m0 + call.middle_tile, middle.in);
  const int32_t f1 = min(f0 + call.fast_tile, fast.in);

  const PoolRange over_slow = {windows_over(slow, s0).begin, windows_over(slow, s1 - 1).end};
  const PoolRange over_middle = {windows_over(middle, m0).begin, windows_over(middle, m1 - 1).end};
  const PoolRange over_fast = {windows_over(fast, f0).begin, windows_over(fast, f1 - 1).end};
  const int32_t columns = over_fast.end - over_fast.begin;
  const int32_t chunks = (columns + kWarp - 1) / kWarp;

  const T *const dy = static_cast<const T *>(call.dy) + plane * call.problem.out_plane();
  const Index *const indices = static_cast<const Index *>(call.indices) + plane * call.problem.out_plane();
  const int64_t origin = call.problem.index_origin(plane);
  const uint32_t cells = uint32_t(call.problem.in_plane());
  T *const dx = static_cast<T *>(call.dx) + plane * call.problem.in_plane();

  int32_t done = s0;  // slices below are written
  int32_t head = 0;   // the slot of slice `done`
  const auto write_slices = [&](int32_t until) {
#pragma unroll 1
    for (; done < until; ++done) {
#pragma unroll 1
      for (int32_t m = m0; m < m1; ++m) {
        T *const to = dx + (int64_t(done) * middle.in + m) * fast.in + f0;
        Real *const from = sums + (head * call.middle_tile + (m - m0)) * call.fast_tile;
        if (call.aligned) {
          write_row<T, Real, kRingVector<Real>>(to, from, f1 - f0, call.accumulate, lane);
        } else {
          write_row<T, Real, 1>(to, from, f1 - f0, call.accumulate, lane);
        }
      }
      if (++head == call.slots) head = 0;
    }
    __syncwarp();
  };

  // A walk over the chunks that loads ahead of the one that adds.
  struct {
    int32_t i, m, chunk, place;
  } ahead = {over_slow.begin, over_middle.begin, 0, 0};
  ahead.place = (ahead.i * middle.out + ahead.m) * fast.out + over_fast.begin + lane;
  Index names[kAhead];
  BitsOf<T> gradients[kAhead];
  const auto load = [&](Index &name, BitsOf<T> &gradient) {
    name = Index(-1);  // no cell
    gradient = 0;
    if (ahead.i < over_slow.end && ahead.chunk * kWarp + lane < columns) {
      name = __ldg(indices + ahead.place);
      gradient = load_bits(dy + ahead.place);
    }
    ahead.place += kWarp;
    if (++ahead.chunk < chunks) return;
    ahead.chunk = 0;
    if (++ahead.m >= over_middle.end) {
      ahead.m = over_middle.begin;
      ++ahead.i;
    }
    ahead.place = (ahead.i * middle.out + ahead.m) * fast.out + over_fast.begin + lane;
  };
#pragma unroll
  for (int e = 0; e < kAhead; ++e) load(names[e], gradients[e]);

#pragma unroll 1
  for (int32_t i = over_slow.begin; i < over_slow.end; ++i) {
    const PoolSpan slices = slow_span[i];
    write_slices(min(max(slices.begin, s0), s1));
    const uint32_t slow_limit = uint32_t(max(min(slices.end, s1) - done, 0));
#pragma unroll 1
    for (int32_t m = over_middle.begin; m < over_middle.end; ++m) {
      const PoolSpan rows = middle_span[m];
      const int32_t low = max(rows.begin, m0);
      const uint32_t middle_limit = uint32_t(max(min(rows.end, m1) - low, 0));
#pragma unroll 1
      for (int32_t chunk = 0; chunk < chunks; ++chunk) {
        const Index name = names[0];
        const Real gradient = real_of<T>(gradients[0]);
#pragma unroll
        for (int e = 0; e + 1 < kAhead; ++e) {
          names[e] = names[e + 1];
          gradients[e] = gradients[e + 1];
        }
        load(names[kAhead - 1], gradients[kAhead - 1]);

        const int64_t relative = int64_t(name) - origin;
        const uint32_t cell = uint32_t(relative);
        bool mine = name >= 0 && uint64_t(relative) < uint64_t(cells);
        const Divider &outer = kFlat ? call.row : call.slice;
        const uint32_t s = outer.divide(cell);
        uint32_t rest = cell - s * outer.divisor;
        const uint32_t slice = s - uint32_t(done);
        mine = mine && slice < slow_limit;
        int32_t row = head + int32_t(slice);
        if (row >= call.slots) row -= call.slots;
        if (!kFlat) {
          const uint32_t at = call.row.divide(rest);
          rest -= at * call.row.divisor;
          mine = mine && at - uint32_t(low) < middle_limit;
          row = row * call.middle_tile + int32_t(at) - m0;
        }
        const int32_t f = int32_t(rest);
        const PoolSpan span = fast_span[min(over_fast.begin + chunk * kWarp + lane, fast.out - 1)];
        mine = mine && f >= max(span.begin, f0) && f < min(span.end, f1);
        const int32_t key = mine ? row * call.fast_tile + f - f0 : -1;
        Real sum = mine ? sums[key] + gradient : Real(0);
        const auto take = [&](int32_t apart) {
          const int32_t before = __shfl_up_sync(kAllLanes, key, apart);
          const int32_t after = __shfl_down_sync(kAllLanes, key, apart);
          const Real theirs = __shfl_down_sync(kAllLanes, gradient, apart);
          if (lane + apart < kWarp && after == key) sum += theirs;
          if (lane >= apart && before == key) mine = false;
        };
        // Looking further than `overlap` finds nothing.
        take(1);
        take(2);
#pragma unroll 1
        for (int32_t apart = 3; apart <= call.overlap; ++apart) take(apart);
        if (mine) sums[key] = sum;
        __syncwarp();
      }
    }
  }
  write_slices(s1);
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

struct PoolLinesBackward {
  PoolBackward pool;
  PoolLines lines;
  bool table;
};

template <class T, class Index>
__global__ void __launch_bounds__(kPoolThreads, kPoolBlocks)
    pool_lines_backward(const __grid_constant__ PoolLinesBackward call) {
  using Real = typename PoolReal<T>::type;
  extern __shared__ __align__(16) char shared[];
  const PoolProblem &problem = call.pool.problem;
  const PoolAxis &middle = problem.axis[kMiddle];
  const PoolAxis &fast = problem.axis[kFast];
  PoolRange *const table = reinterpret_cast<PoolRange *>(shared);
  if (call.table) {
    for (int32_t t = threadIdx.x; t < fast.in; t += kPoolThreads) table[t] = windows_over(fast, t);
    __syncthreads();
  }
  const int64_t index = int64_t(blockIdx.x) * kPoolThreads + threadIdx.x;
  if (index >= call.lines.total) return;
  const PoolLine line = find_line(call.lines, problem, problem.axis[kSlow].in, middle.in, index);
  const PoolRange over_slow = windows_over(problem.axis[kSlow], int32_t(line.slow));
  const PoolRange over_middle = windows_over(middle, int32_t(line.middle));
  const PoolView &named = call.pool.indices;
  const PoolView &given = call.pool.dy;
  const Index *const indices = static_cast<const Index *>(named.data) + named.plane(line.n, line.c);
  const T *const dy = static_cast<const T *>(given.data) + given.plane(line.n, line.c);
  T *const dx = static_cast<T *>(call.pool.dx.data) +
                (call.pool.dx.plane(line.n, line.c) + call.pool.dx.cell(line.slow, line.middle, 0));
  const int64_t origin =
      problem.index_origin(line.n * problem.channels + line.c) + (line.slow * middle.in + line.middle) * fast.in;
  const int32_t end = min(line.begin + kLineItems, fast.in);
  for (int32_t f = line.begin; f < end; ++f) {
    const PoolRange over_fast = call.table ? table[f] : windows_over(fast, f);
    Real sum = 0;
    for (int32_t i = over_slow.begin; i < over_slow.end; ++i) {
      for (int32_t m = over_middle.begin; m < over_middle.end; ++m) {
        const Index *const names = indices + named.cell(i, m, 0);
        const T *const gives = dy + given.cell(i, m, 0);
#pragma unroll 4
        for (int32_t j = over_fast.begin; j < over_fast.end; ++j)
          if (int64_t(__ldg(names + j * named.axis[kFast])) == origin + f)
            sum += real_of<T>(load_bits(gives + j * given.axis[kFast]));
      }
    }
    T *const to = dx + f * call.pool.dx.axis[kFast];
    *to = T(call.pool.accumulate ? Real(*to) + sum : sum);
  }
}

}  // namespace baracuda
