// SPDX-License-Identifier: Apache-2.0
// RoI-align forward on the GPU. Each RoI's weighted rows and columns are listed once, into the workspace, the largest
// RoIs first. A warp then takes a RoI and a few channels: for each row of bins it adds up the weighted rows of the
// map, then from these sums each bin its weighted columns. With channels last or a turned map a lane is a channel, and
// the products of both lists are walked.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <type_traits>

#include "image/roi_align.cuh"
#include "image/roi_turn.cuh"

namespace baracuda {

// A weighted row or column, without padding.
template <class Real>
struct alignas(2 * sizeof(Real)) RoiEntry {
  Real weight;
  std::conditional_t<sizeof(Real) == sizeof(double), int64_t, int32_t> cell;
};

// Rows of a bin that are loaded together. Lists of rows are cut into chunks of as many, each of a single bin.
constexpr int32_t kChunkRows = 4;

// What a RoI's record begins with; offsets are in bytes from its begin.
struct alignas(kRoiVector) RoiHead {
  int32_t roi;
  int32_t batch;  // -1: zeros
  int32_t first;  // column, a multiple of what a lane loads at once
  int32_t end;    // column
  int32_t rows_at;
  int32_t columns_at;
  int32_t bytes;
  int32_t chunks;
};

// Then come three lists of numbers, the chunks that bins begin with, the columns that bins begin with, each with an
// end, and the chunks' counts with an end of 0; then the rows, kChunkRows a chunk, and the columns.
struct RoiRecords {
  char *data;
  int32_t bytes;  // of a record at most
  int32_t pooled_h;
  int32_t ranked;  // whether records lie in the order of the RoIs' sizes

  __device__ static const int32_t *numbers(const char *record) {
    return reinterpret_cast<const int32_t *>(record + sizeof(RoiHead));
  }
  __device__ const int32_t *columns_begin(const char *record) const { return numbers(record) + pooled_h + 1; }
};

// What a record holds.
template <class Real>
struct RoiLists {
  const RoiHead &head;
  const int32_t *rows_begin;
  const int32_t *columns_begin;
  const int32_t *counts;
  const RoiEntry<Real> *rows;
  const RoiEntry<Real> *columns;
};
template <class Real>
__device__ inline RoiLists<Real> lists_of(const RoiRecords &records, const char *record, int32_t pooled_w) {
  const RoiHead &head = *reinterpret_cast<const RoiHead *>(record);
  const int32_t *const columns_begin = records.columns_begin(record);
  return {head,
          RoiRecords::numbers(record),
          columns_begin,
          columns_begin + pooled_w + 1,
          reinterpret_cast<const RoiEntry<Real> *>(record + head.rows_at),
          reinterpret_cast<const RoiEntry<Real> *>(record + head.columns_at)};
}

// A chunk's count of rows, and whether it is its bin's last.
constexpr int32_t kChunkLast = 2 * kChunkRows;
constexpr int32_t kChunkCount = kChunkLast - 1;

// Threads that list a RoI, and those that add it up.
constexpr int kRowsWarps = 2;
constexpr int kRowsThreads = kRowsWarps * kLanes;
constexpr int kRowsWarpChannels = 8;
constexpr int kRowsChannels = kRowsWarps * kRowsWarpChannels;
// A lane's loads of a row, and a warp's.
constexpr int kRowsItems = 3;
constexpr int kRowsPacks = kRowsItems * kLanes;
// Rows of bins that a warp holds sums of.
constexpr int kRowsPlanes = 4;
// What each block copies of a record before it knows the size; written in any case.
constexpr int32_t kRecordStart = kRowsThreads * int32_t(kRoiVector);

// The entries of an axis at most.
template <class Real>
int64_t roi_entries(const RoiAlignProblem &problem, int64_t cells, int64_t bins) {
  const int64_t places = RoiAxis<Real>::list_places(cells, bins);
  return problem.sampling_ratio > 0 ? std::min(places, 2 * bins * problem.sampling_ratio) : places;
}

template <class Real>
int64_t roi_record_bytes(const RoiAlignProblem &problem) {
  const int64_t chunks =
      roi_entries<Real>(problem, problem.h, problem.pooled_h) / kChunkRows + int64_t(problem.pooled_h);
  const int64_t numbers = problem.pooled_h + 1 + problem.pooled_w + 1 + chunks + 1;
  const int64_t entries = chunks * kChunkRows + roi_entries<Real>(problem, problem.w, problem.pooled_w);
  return std::max<int64_t>(int64_t(sizeof(RoiHead)) + whole_vectors(numbers * int64_t(sizeof(int32_t))) +
                               whole_vectors(entries * int64_t(sizeof(RoiEntry<Real>))),
                           kRecordStart);
}

// A warp's sums of columns. Those of two channels and of two planes begin at different banks.
template <class Real>
struct RowsSums {
  static constexpr int kPad = int(kRoiVector / int64_t(sizeof(Real)));
  __host__ __device__ static constexpr int32_t channel(int32_t cells) { return cells + kPad; }
  __host__ __device__ static constexpr int32_t plane(int32_t vector) {
    return kRowsPacks * vector + (kRowsWarpChannels + 2) * kPad;
  }
};

// The shared memory of a block of roi_align_rows; 0 where it doesn't fit.
template <class Real>
size_t roi_rows_shared(const RoiAlignProblem &problem, int32_t vector) {
  // With more columns than a warp takes at once, sums of bins are kept between.
  const bool wide = problem.w > kRowsPacks * vector;
  const int64_t bytes =
      roi_record_bytes<Real>(problem) + kRowsWarps * int64_t(sizeof(Real)) *
                                            (int64_t(kRowsPlanes) * RowsSums<Real>::plane(vector) +
                                             (wide ? int64_t(problem.pooled_h) * problem.pooled_w : 0));
  return bytes <= kMostSharedOfTwo ? size_t(whole_vectors(bytes)) : 0;
}

template <class Real>
RoiRecords roi_records(const RoiAlignProblem &problem, Workspace &space) {
  if (roi_rows_shared<Real>(problem, 1) == 0) return {};
  const int64_t bytes = roi_record_bytes<Real>(problem);
  return {space.take<char>(problem.rois * bytes), int32_t(bytes), problem.pooled_h,
          int32_t(problem.rois <= kMostRanked)};
}

__device__ inline float roi_work(const RoiAlignProblem &problem, const RoiRows &rois, int64_t r) {
  const float most = 2.0f * float(problem.sampling_ratio) * float(problem.pooled_h);
  return roi_area(problem, rois, r, problem.sampling_ratio > 0 ? most : INFINITY);
}

// A block lists a RoI: its first warp the rows, the other the columns, a lane a bin.
template <class Real>
__global__ void __launch_bounds__(kRowsThreads)
    roi_align_list(RoiAlignProblem problem, RoiRows rois, RoiRecords records, int32_t vector) {
  __shared__ int32_t shared_total[kRowsWarps];
  __shared__ int32_t shared_before[kRowsWarps];
  __shared__ int32_t shared_first;
  __shared__ int32_t shared_end;
  wait_for_earlier_work();
  let_next_kernel_start();
  const int64_t r = blockIdx.x;
  const int lane = int(threadIdx.x % kLanes);
  const int warp = int(threadIdx.x / kLanes);
  const bool is_y = warp == 0;
  const RoiGeometry<Real> roi = roi_geometry<Real>(problem, rois, r);
  const RoiAxis<Real> axis = axis_of(roi, is_y);
  const int32_t bins = is_y ? problem.pooled_h : problem.pooled_w;
  const auto chunks_of = [](int32_t rows) { return max((rows + kChunkRows - 1) / kChunkRows, 1); };
  const auto count_of = [&](int32_t b, int32_t &first, int32_t &end) {
    int32_t count = 0;
    if (b < bins && roi.batch >= 0)
      axis.each(b, [&](int32_t cell, Real) {
        first = min(first, cell);
        end = max(end, cell + 1);
        ++count;
      });
    return count;
  };
  int32_t first = problem.w;
  int32_t end = 0;
  int32_t total = 0;
  for (int32_t from = 0; from < bins; from += kLanes) {
    const int32_t count = count_of(from + lane, first, end);
    total += from + lane >= bins ? 0 : is_y ? chunks_of(count) : count;
  }
  int32_t before = 0;
  if (records.ranked) {
    const float own = roi_work(problem, rois, r);
    for (int64_t other = threadIdx.x; other < problem.rois; other += kRowsThreads) {
      const float work = roi_work(problem, rois, other);
      before += int32_t(work > own || (work == own && other < r));
    }
  }
  total = __reduce_add_sync(kAllLanes, total);
  before = __reduce_add_sync(kAllLanes, before);
  first = __reduce_min_sync(kAllLanes, first);
  end = __reduce_max_sync(kAllLanes, end);
  if (lane == 0) {
    shared_total[warp] = total;
    shared_before[warp] = before;
    if (!is_y) {
      shared_first = first / vector * vector;
      shared_end = end;
    }
  }
  __syncthreads();
  const int64_t slot = records.ranked ? int64_t(shared_before[0] + shared_before[1]) : r;
  char *const record = records.data + slot * records.bytes;
  const int32_t chunks = shared_total[0];
  const int32_t columns = shared_total[1];
  int32_t *const rows_begin = reinterpret_cast<int32_t *>(record + sizeof(RoiHead));
  int32_t *const columns_begin = rows_begin + problem.pooled_h + 1;
  int32_t *const counts = columns_begin + problem.pooled_w + 1;
  RoiHead head = {int32_t(r), roi.batch, min(shared_first, shared_end), shared_end, 0, 0, 0, chunks};
  const int32_t numbers_end = int32_t(reinterpret_cast<char *>(counts + chunks + 1) - record);
  head.rows_at = int32_t(whole_vectors(numbers_end));
  head.columns_at = head.rows_at + chunks * kChunkRows * int32_t(sizeof(RoiEntry<Real>));
  const int32_t columns_end = head.columns_at + columns * int32_t(sizeof(RoiEntry<Real>));
  head.bytes = int32_t(whole_vectors(columns_end));
  if (threadIdx.x == 0) *reinterpret_cast<RoiHead *>(record) = head;
  // What lies between the lists and behind them is copied, too.
  for (int32_t at = numbers_end + int32_t(threadIdx.x) * 4; at < head.rows_at; at += kRowsThreads * 4)
    *reinterpret_cast<int32_t *>(record + at) = 0;
  for (int32_t at = columns_end + int32_t(threadIdx.x) * 4; at < max(head.bytes, kRecordStart); at += kRowsThreads * 4)
    *reinterpret_cast<int32_t *>(record + at) = 0;

  RoiEntry<Real> *const entries = reinterpret_cast<RoiEntry<Real> *>(record + (is_y ? head.rows_at : head.columns_at));
  int32_t *const begins = is_y ? rows_begin : columns_begin;
  // The mean belongs to one axis.
  const Real scale = is_y ? Real(1) : roi.count;
  int32_t place = 0;
  for (int32_t from = 0; from < bins; from += kLanes) {
    const int32_t b = from + lane;
    const int32_t count = count_of(b, first, end);
    const int32_t taken = b >= bins ? 0 : is_y ? chunks_of(count) : count;
    int32_t upto = taken;
    for (int distance = 1; distance < kLanes; distance *= 2) {
      const int32_t other = __shfl_up_sync(kAllLanes, upto, unsigned(distance));
      if (lane >= distance) upto += other;
    }
    const int32_t own = place + upto - taken;
    place += __shfl_sync(kAllLanes, upto, kLanes - 1);
    if (b >= bins) continue;
    begins[b] = own;
    RoiEntry<Real> *to = entries + (is_y ? own * kChunkRows : own);
    if (roi.batch >= 0) axis.each(b, [&](int32_t cell, Real weight) { *to++ = {weight / scale, cell}; });
    if (is_y) {
      for (int32_t i = count; i < taken * kChunkRows; ++i) *to++ = {0, 0};
      for (int32_t i = 0; i < taken; ++i)
        counts[own + i] = min(count - i * kChunkRows, kChunkRows) + (i + 1 == taken ? kChunkLast : 0);
    }
  }
  if (lane == 0) {
    begins[bins] = place;
    if (is_y) counts[chunks] = 0;
  }
}

struct RoiAlignForwardCall {
  RoiAlignForward forward;
  RoiRecords records;
  // All RoIs for a group of channels, then for the next: what they read lies in the cache, unlike the whole map.
  int64_t tasks;
  int32_t partials_at;  // in shared memory, sums of bins between two windows of columns
  int32_t staged_bins;  // outputs are turned back by as many bins at once
  Divider by_pw;
};

// All `threads` copy a record; at least kRowsThreads.
__device__ inline void copy_record(char *to, const char *from, int32_t threads) {
  const int32_t at = int32_t(threadIdx.x) * int32_t(kRoiVector);
  const int32_t bytes = reinterpret_cast<const RoiHead *>(from)->bytes;
  if (at < kRecordStart) *reinterpret_cast<int4 *>(to + at) = *reinterpret_cast<const int4 *>(from + at);
  for (int32_t i = kRecordStart + at; i < bytes; i += threads * int32_t(kRoiVector))
    *reinterpret_cast<int4 *>(to + i) = *reinterpret_cast<const int4 *>(from + i);
}

// Lanes lie along the rows of the map, each with kVector cells of a row.
template <class T, int kVector>
__global__ void __launch_bounds__(kRowsThreads, sizeof(T) < sizeof(float) ? 10 : 8)
    roi_align_rows(const __grid_constant__ RoiAlignForwardCall call) {
  using Real = typename ImageReal<T>::type;
  using Pack = RoiPack<T, kVector>;
  using Sums = RowsSums<Real>;
  constexpr int32_t kPlane = Sums::plane(kVector);
  extern __shared__ __align__(16) char shared[];
  const RoiAlignProblem &problem = call.forward.problem;
  const ImageView &input = call.forward.input;
  const ImageView &output = call.forward.output;
  const int lane = int(threadIdx.x % kLanes);
  const int warp = int(threadIdx.x / kLanes);
  const int32_t ph_count = problem.pooled_h;
  const int32_t pw_count = problem.pooled_w;
  const SmallDivider by_pw(pw_count);
  Real *const sums = reinterpret_cast<Real *>(shared + call.records.bytes) + warp * kRowsPlanes * kPlane;
  Real *const partials = reinterpret_cast<Real *>(shared + call.partials_at) + warp * ph_count * pw_count;
  const int64_t rois = problem.rois;
  wait_for_earlier_work();

  for (int64_t task = blockIdx.x; task < call.tasks; task += gridDim.x) {
    copy_record(shared, call.records.data + task % rois * call.records.bytes, kRowsThreads);
    __syncthreads();
    [[maybe_unused]] const auto [head, rows_begin, columns_begin, counts, rows, columns] =
        lists_of<Real>(call.records, shared, pw_count);
    const int64_t c = task / rois * kRowsChannels + warp * kRowsWarpChannels;
    const int32_t channels = int32_t(max(min(problem.c - c, int64_t(kRowsWarpChannels)), int64_t(0)));
    const int32_t packs = (head.end - head.first + kVector - 1) / kVector;
    // As many channels at once as have their loads in a warp's.
    int32_t at_once = kRowsWarpChannels;
    while (at_once > 1 && at_once * packs > kRowsPacks) at_once /= 2;
    const int32_t stride = Sums::channel(kRowsPacks / at_once * kVector);

    for (int32_t sub = 0; sub < channels; sub += at_once) {
      const int32_t now = min(at_once, channels - sub);
      const T *const from = static_cast<const T *>(call.forward.input.data) + input.plane(max(head.batch, 0), c + sub);
      T *const to = static_cast<T *>(output.data) + output.plane(head.roi, c + sub);
      int32_t window = 0;
      do {
        const int32_t width = min(packs - window, kRowsPacks);
        const int32_t begin = head.first + window * kVector;
        const int32_t items = now * width;
        const int32_t rounds = (items + kLanes - 1) / kLanes;
        const SmallDivider by_width(max(width, 1));
        const T *at[kRowsItems];
        int32_t sum_at[kRowsItems];
#pragma unroll
        for (int k = 0; k < kRowsItems; ++k) {
          const int32_t item = max(min(k * kLanes + lane, items - 1), 0);
          const int32_t channel = by_width.divide(item);
          const int32_t column = (item - channel * width) * kVector;
          at[k] = from + channel * input.channel + (begin + column) * input.column;
          sum_at[k] = k * kLanes + lane < items ? channel * stride + column : -1;
        }
        Pack ring[kChunkRows][kRowsItems];
        const auto load = [&](int d, int32_t chunk) {
          const int64_t row = int64_t(rows[chunk * kChunkRows + d].cell) * input.row;
#pragma unroll
          for (int k = 0; k < kRowsItems; ++k)
            if (k < rounds) ring[d][k] = *reinterpret_cast<const Pack *>(at[k] + row);
        };
        int32_t chunk = 0;
        int32_t kind = counts[0];
#pragma unroll
        for (int d = 0; d < kChunkRows; ++d)
          if (d < (kind & kChunkCount)) load(d, 0);
        for (int32_t ph = 0; ph < ph_count; ph += kRowsPlanes) {
          const int32_t planes = min(ph_count - ph, kRowsPlanes);
          for (int32_t plane = 0; plane < planes; ++plane) {
            Real sum[kRowsItems][kVector];
#pragma unroll
            for (int k = 0; k < kRowsItems; ++k)
#pragma unroll
              for (int v = 0; v < kVector; ++v) sum[k][v] = 0;
            bool last;
            do {
              // A row's place is free for one of the next chunk as soon as it is added.
              const int32_t next = counts[chunk + 1];
#pragma unroll
              for (int d = 0; d < kChunkRows; ++d) {
                if (d < (kind & kChunkCount)) {
                  const Real weight = rows[chunk * kChunkRows + d].weight;
#pragma unroll
                  for (int k = 0; k < kRowsItems; ++k)
                    if (k < rounds) {
#pragma unroll
                      for (int v = 0; v < kVector; ++v) sum[k][v] += weight * Real(ring[d][k].value[v]);
                    }
                }
                if (d < (next & kChunkCount)) load(d, chunk + 1);
              }
              last = kind >= kChunkLast;
              kind = next;
              ++chunk;
            } while (!last);
#pragma unroll
            for (int k = 0; k < kRowsItems; ++k)
              if (sum_at[k] >= 0) {
                RoiPack<Real, kVector> pack;
#pragma unroll
                for (int v = 0; v < kVector; ++v) pack.value[v] = sum[k][v];
                *reinterpret_cast<RoiPack<Real, kVector> *>(sums + plane * kPlane + sum_at[k]) = pack;
              }
          }
          __syncwarp();
          for (int32_t pair = lane; pair < planes * pw_count; pair += kLanes) {
            const int32_t plane = by_pw.divide(pair);
            const int32_t pw = pair - plane * pw_count;
            const int32_t from_column = columns_begin[pw];
            const int32_t end_column = columns_begin[pw + 1];
            constexpr int32_t kAtOnce = 4;
            for (int32_t part = 0; part < now; part += kAtOnce) {
              const Real *const line = sums + plane * kPlane + part * stride;
              Real sum[kAtOnce] = {};
              if (window > 0) sum[0] = partials[ph * pw_count + pair];
              int32_t offset[kAtOnce];
#pragma unroll
              for (int j = 0; j < kAtOnce; ++j) offset[j] = min(j, at_once - 1) * stride;
#pragma unroll 2
              for (int32_t i = from_column; i < end_column; ++i) {
                const RoiEntry<Real> entry = columns[i];
                const int32_t column = int32_t(entry.cell) - begin;
                if (uint32_t(column) < uint32_t(width * kVector)) {
#pragma unroll
                  for (int j = 0; j < kAtOnce; ++j) sum[j] += entry.weight * line[offset[j] + column];
                }
              }
              if (window + kRowsPacks < packs) {
                partials[ph * pw_count + pair] = sum[0];
              } else {
                T *const cell = to + part * output.channel + output.cell(ph + plane, pw);
#pragma unroll
                for (int j = 0; j < kAtOnce; ++j)
                  if (part + j < now) cell[j * output.channel] = T(sum[j]);
              }
            }
          }
          __syncwarp();
        }
        window += kRowsPacks;
      } while (window < packs);
    }
    __syncthreads();
  }
}

// Of a turned map in float32, a lane's channels; more would make fewer warps of a RoI, and registers scarce.
constexpr int kStripVector = 2;
constexpr int kStripChannels = kLanes * kStripVector;
constexpr int kMostStripWarps = 14;
constexpr int kStripBlocks = 2;  // of the most warps, on a multiprocessor; registers follow from it

// The warps of a block of roi_align_strips, which takes as many rows of bins at once; 0 where their outputs don't fit
// beside the lists.
template <class T>
int32_t strip_warps(const RoiAlignProblem &problem) {
  const int64_t strip = int64_t(problem.pooled_w) * kStripChannels * int64_t(sizeof(T));
  const int64_t room = (kMostSharedOfTwo - whole_vectors(roi_record_bytes<T>(problem))) / std::max<int64_t>(strip, 1);
  const int64_t most = std::min<int64_t>(kMostStripWarps, room);
  if (most < kRowsWarps || problem.pooled_h == 0) return 0;
  // Rows of bins are shared out evenly.
  return std::max(int32_t(ceil_div(problem.pooled_h, ceil_div(problem.pooled_h, most))), int32_t(kRowsWarps));
}

// Lanes are channels of a turned map, and a warp takes a row of bins: what it finds out about the rows of the map
// serves all of these bins. A block gathers the outputs of its channels before it writes them.
template <class T>
__global__ void __launch_bounds__(kMostStripWarps *kLanes, kStripBlocks)
    roi_align_strips(const __grid_constant__ RoiAlignForwardCall call) {
  static_assert(std::is_same_v<T, typename ImageReal<T>::type>);
  using Pack = RoiPack<T, kStripVector>;
  extern __shared__ __align__(16) char shared[];
  const RoiAlignProblem &problem = call.forward.problem;
  const ImageView &input = call.forward.input;
  const ImageView &output = call.forward.output;
  const int lane = int(threadIdx.x % kLanes);
  const int warp = int(threadIdx.x / kLanes);
  const int32_t warps = int32_t(blockDim.x / kLanes);
  const int32_t pw_count = problem.pooled_w;
  const int64_t rois = problem.rois;
  T *const staged = reinterpret_cast<T *>(shared + call.records.bytes);
  // A row of the turned map has no more elements than 32 bits count.
  const int32_t stride = int32_t(input.column);
  wait_for_earlier_work();
  for (int64_t task = blockIdx.x; task < call.tasks; task += gridDim.x) {
    copy_record(shared, call.records.data + task % rois * call.records.bytes, int32_t(blockDim.x));
    __syncthreads();
    const auto [head, rows_begin, columns_begin, counts, rows, columns] = lists_of<T>(call.records, shared, pw_count);
    const int64_t c0 = task / rois * kStripChannels;
    const int64_t c = c0 + lane * kStripVector;
    const int32_t channels = int32_t(min(problem.c - c0, int64_t(kStripChannels)));
    T *const to = static_cast<T *>(output.data) + output.plane(head.roi, c0);
    const T *const from = static_cast<const T *>(input.data) + input.plane(max(head.batch, 0), c);
    for (int32_t first = 0; first < problem.pooled_h; first += warps) {
      const int32_t strips = min(problem.pooled_h - first, warps);
      const int32_t count = strips * pw_count;
      if (warp < strips && c < problem.c) {
        const int32_t ph = first + warp;
        T *const own = staged + lane * kStripVector * count + warp * pw_count;
        bool begins = true;
        for (int32_t chunk = rows_begin[ph]; chunk < rows_begin[ph + 1]; ++chunk, begins = false) {
          const auto take = [&]<int kAtOnce>(std::integral_constant<int, kAtOnce>) {
            const T *line[kAtOnce];
            T weight[kAtOnce];
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k) {
              const RoiEntry<T> row = rows[chunk * kChunkRows + k];
              line[k] = from + int64_t(row.cell) * input.row;
              weight[k] = row.weight;
            }
            int32_t j = columns_begin[0];
            for (int32_t pw = 0; pw < pw_count; ++pw) {
              T sum[kStripVector] = {};
              const int32_t end = columns_begin[pw + 1];
#pragma unroll 2
              for (; j < end; ++j) {
                const RoiEntry<T> column = columns[j];
                const int32_t offset = column.cell * stride;
                Pack pack[kAtOnce];
#pragma unroll
                for (int k = 0; k < kAtOnce; ++k) pack[k] = *reinterpret_cast<const Pack *>(line[k] + offset);
#pragma unroll
                for (int v = 0; v < kStripVector; ++v) {
                  T part = 0;
#pragma unroll
                  for (int k = 0; k < kAtOnce; ++k) part += weight[k] * pack[k].value[v];
                  sum[v] += column.weight * part;
                }
              }
#pragma unroll
              for (int v = 0; v < kStripVector; ++v) {
                T &cell = own[v * count + pw];
                cell = begins ? sum[v] : cell + sum[v];
              }
            }
          };
          switch (counts[chunk] & kChunkCount) {
            case 4:
              take(std::integral_constant<int, 4>{});
              break;
            case 3:
              take(std::integral_constant<int, 3>{});
              break;
            case 2:
              take(std::integral_constant<int, 2>{});
              break;
            case 1:
              take(std::integral_constant<int, 1>{});
              break;
            default:
              for (int32_t i = 0; i < kStripVector * pw_count; ++i) own[i / pw_count * count + i % pw_count] = 0;
          }
        }
      }
      __syncthreads();
      constexpr int32_t kPackItems = int32_t(kRoiVector / int64_t(sizeof(T)));
      const int32_t outputs = channels * count;
      // Outputs in a row, as they are staged.
      const bool whole = strips == problem.pooled_h && output.channel == count && output.row == pw_count &&
                         output.column == 1 && outputs % kPackItems == 0 &&
                         reinterpret_cast<uintptr_t>(to) % kRoiVector == 0;
      if (whole) {
        for (int32_t i = int32_t(threadIdx.x); i < outputs / kPackItems; i += int32_t(blockDim.x))
          reinterpret_cast<int4 *>(to)[i] = reinterpret_cast<const int4 *>(staged)[i];
      } else {
        const SmallDivider by_count(count);
        for (int32_t i = int32_t(threadIdx.x); i < outputs; i += int32_t(blockDim.x)) {
          const int32_t channel = by_count.divide(i);
          const int32_t b = i - channel * count;
          const int32_t strip = int32_t(call.by_pw.divide(uint32_t(b)));
          to[channel * output.channel + output.cell(first + strip, b - strip * pw_count)] = staged[i];
        }
      }
      __syncthreads();
    }
  }
}

// Lanes are channels, kVector of them each. With channels of the output far apart, a block gathers some bins of all of
// its channels before it writes them.
template <class T, int kVector, bool kStaged>
__global__ void __launch_bounds__(kRoiThreads) roi_align_lines(const __grid_constant__ RoiAlignForwardCall call) {
  using Real = typename ImageReal<T>::type;
  using Pack = RoiPack<T, kVector>;
  extern __shared__ __align__(16) char shared[];
  const RoiAlignProblem &problem = call.forward.problem;
  const ImageView &input = call.forward.input;
  const ImageView &output = call.forward.output;
  const int lane = int(threadIdx.x % kLanes);
  const int warp = int(threadIdx.x / kLanes);
  const int32_t pw_count = problem.pooled_w;
  const int32_t bins = problem.pooled_h * pw_count;
  const int64_t rois = problem.rois;
  T *const staged = reinterpret_cast<T *>(shared + call.records.bytes);
  // Between the cells of a row; of a turned map, the number of channels.
  using Stride = std::conditional_t<kStaged, int32_t, int64_t>;
  const Stride stride = Stride(input.column);
  wait_for_earlier_work();
  for (int64_t task = blockIdx.x; task < call.tasks; task += gridDim.x) {
    copy_record(shared, call.records.data + task % rois * call.records.bytes, kRoiThreads);
    __syncthreads();
    const auto [head, rows_begin, columns_begin, counts, rows, columns] =
        lists_of<Real>(call.records, shared, pw_count);
    const int64_t c0 = task / rois * kLanes * kVector;
    const int64_t c = c0 + lane * kVector;
    T *const to = static_cast<T *>(output.data) + output.plane(head.roi, c0);
    const T *const from = static_cast<const T *>(input.data) + input.plane(max(head.batch, 0), c);
    for (int32_t first = 0; first < bins; first += call.staged_bins) {
      const int32_t count = min(bins - first, call.staged_bins);
      if (c < problem.c) {
        for (int32_t b = first + warp; b < first + count; b += kRoiThreads / kLanes) {
          const int32_t ph = int32_t(call.by_pw.divide(uint32_t(b)));
          const int32_t pw = b - ph * pw_count;
          const int32_t last = rows_begin[ph + 1] - 1;
          Real sum[kVector] = {};
          const int32_t end = last * kChunkRows + (counts[last] & kChunkCount);
          int32_t i = rows_begin[ph] * kChunkRows;
          const auto take = [&]<int kAtOnce>(std::integral_constant<int, kAtOnce>) {
            const T *line[kAtOnce];
            Real part[kAtOnce][kVector] = {};
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k) line[k] = from + int64_t(rows[i + k].cell) * input.row;
#pragma unroll(kAtOnce == 1 ? 4 : 1)
            for (int32_t j = columns_begin[pw]; j < columns_begin[pw + 1]; ++j) {
              const RoiEntry<Real> column = columns[j];
              const int64_t offset = int64_t(column.cell) * stride;
              Pack pack[kAtOnce];
#pragma unroll
              for (int k = 0; k < kAtOnce; ++k) pack[k] = *reinterpret_cast<const Pack *>(line[k] + offset);
#pragma unroll
              for (int k = 0; k < kAtOnce; ++k)
#pragma unroll
                for (int v = 0; v < kVector; ++v) part[k][v] += column.weight * Real(pack[k].value[v]);
            }
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k)
#pragma unroll
              for (int v = 0; v < kVector; ++v) sum[v] += rows[i + k].weight * part[k][v];
            i += kAtOnce;
          };
          // Loads of several rows are in flight at once, and share what a column costs.
          if constexpr (kStaged) {
            while (i + 4 <= end) take(std::integral_constant<int, 4>{});
            if (i + 2 <= end) take(std::integral_constant<int, 2>{});
          }
          while (i < end) take(std::integral_constant<int, 1>{});
#pragma unroll
          for (int v = 0; v < kVector; ++v) {
            if constexpr (kStaged) {
              staged[(lane * kVector + v) * call.staged_bins + b - first] = T(sum[v]);
            } else {
              to[(lane * kVector + v) * output.channel + output.cell(ph, pw)] = T(sum[v]);
            }
          }
        }
      }
      if constexpr (kStaged) {
        __syncthreads();
        const int32_t channels = int32_t(min(problem.c - c0, int64_t(kLanes) * kVector));
        const SmallDivider by_count(count);
        for (int32_t i = int32_t(threadIdx.x); i < channels * count; i += kRoiThreads) {
          const int32_t channel = by_count.divide(i);
          const int32_t b = i - channel * count;
          const int32_t ph = int32_t(call.by_pw.divide(uint32_t(first + b)));
          to[channel * output.channel + output.cell(ph, first + b - ph * pw_count)] =
              staged[channel * call.staged_bins + b];
        }
        __syncthreads();
      }
    }
    __syncthreads();
  }
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

template <class T>
constexpr bool kTurns = sizeof(T) < sizeof(double);
// Outputs are then gathered as they are summed up.
template <class T>
constexpr bool kStrips = std::is_same_v<T, float>;

// Whether the map's channels are best put side by side first.
template <class T>
bool roi_align_turns_of(const RoiAlignProblem &problem) {
  if (!kTurns<T> || !can_turn(problem) || turned_channels<T>(problem) * problem.w > INT32_MAX ||
      roi_rows_shared<typename ImageReal<T>::type>(problem, 1) == 0)
    return false;
  if constexpr (kStrips<T>) {
    if (strip_warps<T>(problem) == 0) return false;
  }
  const double bins = double(problem.pooled_h) * problem.pooled_w;
  // The cells that are turned in the time that an output saves.
  constexpr double kTurnedCells = sizeof(T) == sizeof(float) ? 6 : 8;
  return kTurnedCells * double(problem.rois) * bins >= double(problem.n) * problem.h * problem.w;
}

template <class T>
struct RoiAlignSpace {
  RoiRecords records;
  T *turned;
};

template <class T>
RoiAlignSpace<T> roi_align_space(const RoiAlignProblem &problem, bool turn, Workspace &space) {
  const RoiRecords records = roi_records<typename ImageReal<T>::type>(problem, space);
  return {records, turn ? space.take<T>(turned_elements<T>(problem)) : nullptr};
}

template <class T>
void roi_align_cuda_of(const RoiAlignForward &call, Stream stream) {
  using Real = typename ImageReal<T>::type;
  const RoiAlignProblem &problem = call.problem;
  const ImageView &input = call.input;
  constexpr int kVector = sizeof(T) == sizeof(double) ? 2 : 4;
  Workspace workspace(call.workspace);
  const RoiAlignSpace<T> space = roi_align_space<T>(problem, call.turn, workspace);
  const RoiRecords &records = space.records;
  if (records.bytes == 0 || !call.workspace) {
    const int64_t outputs = problem.rois * problem.c * problem.pooled_h * problem.pooled_w;
    launch(roi_align_any<T>, {std::min(ceil_div(outputs, kRoiThreads), kMostBlocks), kRoiThreads}, stream, call,
           outputs);
    return;
  }
  const bool lines = input.channel == 1 && problem.c > 1 && std::abs(input.column) > 1;
  const auto run = [&](auto kernel, const RoiAlignForwardCall &forward, int threads, size_t shared) {
    allow_roi_shared(kernel, shared);
    launch(kernel, {std::min(forward.tasks, kMostBlocks), threads, shared, true}, stream, forward);
  };
  // Whether kVector elements in a row can be loaded at once.
  const auto whole = [](int64_t elements) { return elements % kVector == 0; };
  const bool packs =
      reinterpret_cast<uintptr_t>(input.data) % (kVector * sizeof(T)) == 0 && whole(input.batch) && whole(input.row) &&
      (lines ? whole(problem.c) && whole(input.column) : input.column == 1 && whole(problem.w) && whole(input.channel));
  const bool turn = call.turn && !lines;
  const int32_t vector = packs ? kVector : 1;
  launch(roi_align_list<Real>, {problem.rois, kRowsThreads, 0, true}, stream, problem, call.rois, records, vector);
  RoiAlignForwardCall forward = {
      call, records, 0, 0, problem.pooled_h * problem.pooled_w, Divider(uint32_t(problem.pooled_w))};
  const auto tasks = [&](int64_t channels) { return problem.rois * ceil_div(problem.c, channels); };
  if (turn) {
    if constexpr (kTurns<T>) {
      forward.forward.input = turned_view<T>(problem, space.turned);
      turn_map<T>(problem, input, forward.forward.input, stream);
    }
    if constexpr (kStrips<T>) {
      const int32_t warps = strip_warps<T>(problem);
      forward.tasks = tasks(kStripChannels);
      run(roi_align_strips<T>, forward, warps * kLanes,
          size_t(records.bytes) + size_t(warps) * size_t(problem.pooled_w) * kStripChannels * sizeof(T));
    } else if constexpr (kTurns<T>) {
      constexpr int32_t kBinBytes = kLanes * kTurnedVector<T> * int32_t(sizeof(T));
      constexpr int32_t kMostStaged = 25 * 1024;
      forward.staged_bins = std::min(forward.staged_bins, kMostStaged / kBinBytes);
      forward.tasks = tasks(kLanes * kTurnedVector<T>);
      run(roi_align_lines<T, kTurnedVector<T>, true>, forward, kRoiThreads,
          size_t(records.bytes) + size_t(forward.staged_bins) * kBinBytes);
    }
  } else if (lines) {
    forward.tasks = tasks(kLanes * vector);
    run(packs ? roi_align_lines<T, kVector, false> : roi_align_lines<T, 1, false>, forward, kRoiThreads,
        size_t(records.bytes));
  } else {
    const int64_t sums = int64_t(sizeof(Real)) * kRowsWarps * kRowsPlanes * RowsSums<Real>::plane(vector);
    forward.tasks = tasks(kRowsChannels);
    forward.partials_at = int32_t(records.bytes + sums);
    run(packs ? roi_align_rows<T, kVector> : roi_align_rows<T, 1>, forward, kRowsThreads,
        roi_rows_shared<Real>(problem, vector));
  }
}

}  // namespace baracuda
