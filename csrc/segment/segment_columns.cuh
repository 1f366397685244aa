// SPDX-License-Identifier: Apache-2.0
// Single columns, ids in any order: rows are put into buckets of neighbouring segments, tile by tile, and a block
// takes a bucket, or a piece of a full one, whose segments' cells fit into its shared memory. Rows of a bucket come
// in any order, so what becomes of a cell must not depend on it: maxima don't, nor do sums of integers.
#pragma once

#include "segment/segment_lanes.cuh"

namespace baracuda {

constexpr int kBucketTileBits = 13;
constexpr int kBucketTile = 1 << kBucketTileBits;
constexpr int kMostBuckets = 512;
// Records of a bucket are read by so many at once; what is missing of the last are fillers.
constexpr int kRecords = 4;
constexpr int kBucketThreads = 1024;

template <class T>
using Records = SegmentPack<T, kRecords>;

// Whether an element and its place share a word.
constexpr bool bucket_shares_words(int element_bytes, int place_bytes) { return element_bytes + place_bytes == 4; }

// Records as they lie in memory, elements and places each on their own or together.
template <class Element, class Place>
struct BucketRecords {
  static constexpr bool kShared = bucket_shares_words(sizeof(Element), sizeof(Place));
  static constexpr int kElementBytes = kRecords * (kShared ? 4 : int(sizeof(Element)));
  using Word = std::conditional_t<kShared, uint32_t, Element>;
  void *elements;
  void *places;

  __device__ __forceinline__ void set(uint32_t row, Element element, Place place) const {
    if constexpr (kShared) {
      static_cast<uint32_t *>(elements)[row] = uint32_t(element) << 16 | place;
    } else {
      static_cast<Element *>(elements)[row] = element;
      static_cast<Place *>(places)[row] = place;
    }
  }
  __device__ __forceinline__ void copy(int64_t at, const BucketRecords &from, int from_at) const {
    static_cast<Records<Word> *>(elements)[at] = static_cast<const Records<Word> *>(from.elements)[from_at];
    if constexpr (!kShared)
      static_cast<Records<Place> *>(places)[at] = static_cast<const Records<Place> *>(from.places)[from_at];
  }
  // Unpacked only when it is looked at, so that loads wait for nothing.
  struct Loaded {
    Records<Word> words;
    Records<Place> places;
    __device__ __forceinline__ void unpack(Records<Element> &element, Records<Place> &place) const {
      if constexpr (kShared) {
#pragma unroll
        for (int r = 0; r < kRecords; ++r) {
          element.value[r] = bit_cast<Element>(uint16_t(words.value[r] >> 16));
          place.value[r] = Place(words.value[r]);
        }
      } else {
        element = words;
        place = places;
      }
    }
  };
  __device__ __forceinline__ Loaded load(uint32_t at) const {
    Loaded loaded;
    loaded.words = static_cast<const Records<Word> *>(elements)[at];
    if constexpr (!kShared) loaded.places = static_cast<const Records<Place> *>(places)[at];
    return loaded;
  }
};

template <class Op>
struct SegmentBucketCall {
  Op op;
  SegmentBuckets buckets;
  int64_t rows;
  int64_t segments;
  std::byte *partial;
  uint32_t *counts;  // NULL: not wanted
  bool once;         // of sums: rows need not tell whether a segment is empty
};

struct BucketPiece {
  int bucket;
  int piece;
  int pieces;
  uint32_t rows;  // at most so many
};

// The piece that is this block's; a bucket of -1 if there is none. For all threads of a block.
__device__ __forceinline__ BucketPiece find_bucket_piece(const SegmentBuckets &buckets) {
  __shared__ int32_t begins[kMostBuckets + 1];
  __shared__ int32_t sums[kMostBuckets / 32];
  const int lane = int(threadIdx.x) & 31;
  const int b = int(threadIdx.x);
  int pieces = 0;
  if (b < kMostBuckets) {
    if (b < buckets.count)
      pieces = int(max(int64_t(1), (int64_t(buckets.totals[b]) + buckets.piece - 1) / buckets.piece));
    int behind = pieces;
    for (int apart = 1; apart < 32; apart *= 2) {
      const int other = __shfl_up_sync(~0u, behind, apart);
      if (lane >= apart) behind += other;
    }
    begins[b] = behind - pieces;
    if (lane == 31) sums[b / 32] = behind;
  }
  __syncthreads();
  if (b < kMostBuckets) {
    int before = 0;
    for (int w = 0; w < b / 32; ++w) before += sums[w];
    begins[b] += before;
    if (b == kMostBuckets - 1) begins[kMostBuckets] = begins[b] + pieces;
  }
  __syncthreads();
  const int unit = int(blockIdx.x);
  if (unit >= begins[kMostBuckets]) return {-1, 0, 0, 0};
  int bucket = 0;
  for (int half = kMostBuckets / 2; half > 0; half /= 2)
    if (begins[bucket + half] <= unit) bucket += half;
  BucketPiece found = {bucket, unit - begins[bucket], begins[bucket + 1] - begins[bucket], buckets.totals[bucket]};
  const int64_t tiles = (buckets.tiles + found.pieces - 1) / found.pieces;
  found.rows = uint32_t(min(int64_t(found.rows), tiles * kBucketTile));
  return found;
}

// Hands all records of a piece to `take`, as many as are read at once, with the number of their tile. The last tiles
// come first: what was written last is still in the cache.
template <class Element, class Place, int kLanes, class Take>
__device__ __forceinline__ void visit_bucket(const SegmentBuckets &buckets, const BucketPiece &piece,
                                             const Take &take) {
  constexpr int kAtOnce = 3;
  constexpr int kGroups = kBucketThreads / kLanes;
  // There are registers for two sets of records if these are short.
  constexpr bool kAhead = BucketRecords<Element, Place>::kShared;
  using Loaded = typename BucketRecords<Element, Place>::Loaded;
  struct Run {
    int64_t tile;
    int begin;
    int end;
  };
  const int lane = int(threadIdx.x) & (kLanes - 1);
  const BucketRecords<Element, Place> records = {buckets.elements, buckets.places};
  const uint16_t *begins = buckets.bounds + int64_t(piece.bucket) * buckets.tiles;
  const uint16_t *ends = begins + buckets.tiles;
  const int64_t step = int64_t(piece.pieces) * kGroups;
  const auto find = [&](int64_t tile) -> Run {
    if (tile < 0) return {tile, 0, 0};
    return {tile, begins[tile], ends[tile]};
  };
  const auto load = [&](const Run &run, int from, Loaded(&loaded)[kAtOnce]) {
    const uint32_t first = uint32_t(run.tile) * uint32_t(buckets.stride);
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a) {
      if (from + a * kLanes >= run.end) break;
      loaded[a] = records.load(first + uint32_t(from + a * kLanes));
    }
  };
  const auto pass = [&](const Run &run, int from, const Loaded(&loaded)[kAtOnce]) {
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a) {
      if (from + a * kLanes >= run.end) break;
      Records<Element> element;
      Records<Place> place;
      loaded[a].unpack(element, place);
      take(element, place, run.tile);
    }
  };
  Run run = find(buckets.tiles - 1 - piece.piece - int64_t(piece.pieces) * (int(threadIdx.x) / kLanes));
  Loaded loaded[kAtOnce];
  if constexpr (kAhead) {
    Run next = find(run.tile - step);
    load(run, run.begin + lane, loaded);
    while (run.tile >= 0) {
      const Run far = find(next.tile - step);
      Loaded ahead[kAtOnce];
      load(next, next.begin + lane, ahead);
      pass(run, run.begin + lane, loaded);
      for (int from = run.begin + lane + kLanes * kAtOnce; from < run.end; from += kLanes * kAtOnce) {
        load(run, from, loaded);
        pass(run, from, loaded);
      }
#pragma unroll
      for (int a = 0; a < kAtOnce; ++a) loaded[a] = ahead[a];
      run = next;
      next = far;
    }
  } else {
    while (run.tile >= 0) {
      const Run next = find(run.tile - step);
      for (int from = run.begin + lane; from < run.end; from += kLanes * kAtOnce) {
        load(run, from, loaded);
        pass(run, from, loaded);
      }
      run = next;
    }
  }
}

// Whether this block is the last of those that have a piece of the bucket, whose partial states are then all there.
__device__ __forceinline__ bool last_of_bucket(const SegmentBuckets &buckets, const BucketPiece &piece) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(buckets.done + piece.bucket, 1u) + 1 == uint32_t(piece.pieces);
  __syncthreads();
  __threadfence();
  return last;
}

// Keys of the cells of maxima: an element's bits, at the upper end of a word, in the order of unsigned integers. That
// of NaN is the highest, and no float has the key 0.
template <SegmentLanes kLanes, class Bits>
struct BucketKeys {
  // bfloat16 is the upper half of float32.
  static constexpr bool kHalf = kLanes == SegmentLanes::float16;
  static constexpr int kShift = 32 - 8 * int(sizeof(Bits));
  uint32_t signs;  // of a minimum, the maximum of numbers with the other sign

  __device__ uint32_t key(Bits bits) const {
    const uint32_t value = uint32_t(bits) << kShift ^ signs;
    return kHalf ? segment_keys<SegmentLanes::float16>(value) & 0xffff0000u
                 : segment_keys<SegmentLanes::float32>(value);
  }
  // The key that the order has of it.
  __device__ uint32_t ordered(const SegmentOrder<Bits> &order, uint32_t key) const {
    if (key == 0) return 0;
    const uint32_t value = key ^ (key >> 31 ? 0x80000000u : ~0u);
    return order.key(Bits((value ^ signs) >> kShift));
  }
};

// Without a branch: where the key isn't higher, it goes to a cell that nobody looks at.
__device__ __forceinline__ void raise_cell(uint32_t *at, uint32_t known, uint32_t cell, uint32_t *spare) {
  asm volatile("red.shared.max.u32 [%0], %1;" ::"r"(uint32_t(__cvta_generic_to_shared(cell > known ? at : spare))),
               "r"(cell)
               : "memory");
}
__device__ __forceinline__ void raise_cell(unsigned long long *at, unsigned long long known, unsigned long long cell,
                                           unsigned long long *) {
  if (cell > known) atomicMax(at, cell);
}

template <class Op, SegmentLanes kLanes>
__global__ __launch_bounds__(kBucketThreads,
                             1) void bucket_extremes(const __grid_constant__ SegmentBucketCall<Op> call) {
  using Element = typename Op::Element;
  using Place = typename Op::Place;
  using State = typename Op::State;
  // A key, and below it a row, the lowest of which is highest. No float has the key 0.
  using Cell = std::conditional_t<Op::kRows, unsigned long long, uint32_t>;
  extern __shared__ __align__(16) uint64_t segment_memory[];
  Cell *cells = reinterpret_cast<Cell *>(segment_memory);
  const SegmentBuckets &buckets = call.buckets;
  const int count = 1 << buckets.cell_bits;
  for (int c = threadIdx.x; c <= count; c += kBucketThreads) cells[c] = 0;
  const BucketKeys<kLanes, Element> keys = {call.op.order.reverse ? 0x80000000u : 0};
  Cell *spare = cells + count + 1 + (int(threadIdx.x) & 31);
  wait_for_earlier_work();
  const BucketPiece piece = find_bucket_piece(buckets);
  if (piece.bucket < 0) return;
  visit_bucket<Element, Place, 8>(
      buckets, piece, [&](const Records<Element> &element, const Records<Place> &place, int64_t tile) {
        Cell cell[kRecords];
        Cell *at[kRecords];
        Cell known[kRecords];
#pragma unroll
        for (int r = 0; r < kRecords; ++r) {
          cell[r] = keys.key(element.value[r]);
          at[r] = cells + place.value[r];
          if constexpr (Op::kRows) {
            const uint32_t row = uint32_t(tile) * kBucketTile + (place.value[r] & (kBucketTile - 1));
            cell[r] = cell[r] << 32 | uint32_t(~row);
            at[r] = cells + (place.value[r] >> kBucketTileBits);
          }
          known[r] = *at[r];
        }
#pragma unroll
        for (int r = 0; r < kRecords; ++r) raise_cell(at[r], known[r], cell[r], spare);
      });
  __syncthreads();
  const int64_t first = int64_t(piece.bucket) << buckets.cell_bits;
  const int mine = int(min(int64_t(count), call.segments - first));
  Cell *partial = reinterpret_cast<Cell *>(call.partial);
  if (piece.pieces > 1) {
    for (int c = threadIdx.x; c < mine; c += kBucketThreads) partial[int64_t(blockIdx.x) * count + c] = cells[c];
    if (!last_of_bucket(buckets, piece)) return;
  }
  for (int c = threadIdx.x; c < mine; c += kBucketThreads) {
    Cell cell = cells[c];
    for (int p = 0; p < piece.pieces; ++p)
      if (p != piece.piece) cell = max(cell, __ldcg(partial + (int64_t(blockIdx.x) - piece.piece + p) * count + c));
    State state[1];
    if constexpr (Op::kRows) {
      state[0] = {keys.ordered(call.op.order, uint32_t(cell >> 32)), ~uint32_t(cell)};
    } else {
      state[0] = keys.ordered(call.op.order, cell);
    }
    call.op.template store<1>(first + c, 0, cell != 0, state);
  }
}

// Sums are kept as integers of 64 bits, so that the order of rows makes no difference, in units that follow from the
// exponents of some rows of the piece, with b bits in reserve if it has fewer than 2^b rows. What rows have below a
// unit is kept beside, down to 2^(b - 32) of it. So most sums are exact. Those of segments that have rows too large for
// that, or may lose more than N * 2^-61 of their largest magnitude with one of N rows, are added once more, in units
// that the largest exponent of the segment's rows in the piece sets: n rows lose less than n * 2^(b - 62) of the
// largest magnitude.
struct BucketSum {
  static constexpr uint32_t kNan = 1;
  static constexpr uint32_t kInfinity = 2;
  static constexpr uint32_t kMinusInfinity = 4;
  static constexpr uint32_t kMostExponent = 255;  // of what is no number
  static constexpr uint32_t kBeyond = kMostExponent + 1;
  static constexpr uint32_t kBeyondBase = 1024;

  __device__ static uint32_t exponent(float x) { return bit_cast<uint32_t>(x) << 1 >> 24; }
  // One more than the exponent, the same for zeros and subnormals.
  __device__ static uint32_t top(float x) { return exponent(x) + 1; }
  // What a row's exponent is taken from for the distance by which its mantissa is shifted.
  __device__ static uint32_t base(uint32_t top, int bits) {
    return top == 0 ? 0 : top == kBeyond ? kBeyondBase : max(top - 1, 1u) + uint32_t(bits);
  }

  __device__ static uint32_t distance(float x, uint32_t base) { return base - max(exponent(x), 1u); }
  // Rounded down.
  __device__ static int64_t units(float x, uint32_t base) {
    const uint32_t own = exponent(x);
    const uint32_t fraction = bit_cast<uint32_t>(x) & 0x7fffff;
    const int sign = bit_cast<int>(x) >> 31;
    const int mantissa = (int((own ? fraction | 0x800000 : fraction) << 7) ^ sign) - sign;
    return int64_t(uint64_t(uint32_t(mantissa)) << 32) >> min(distance(x, base), 63u);
  }
  // Whether it has a place and nothing is rounded: the mantissa stands 39 bits above the lowest.
  __device__ static bool is_plain(float x, uint32_t base, int bits) {
    return x == 0 || distance(x, base) - uint32_t(bits) <= uint32_t(39 - bits);
  }
  // What is below a unit, too, in 2^(bits - 32) of it. Whether that is rounded is returned.
  __device__ static bool split(float x, uint32_t base, int bits, int64_t &units, uint32_t &rest) {
    const double scaled = double(x) * power(189 - int(base) + 32 - bits);
    const double whole = floor(scaled);
    const double above = floor(whole * power(bits - 32));
    units = int64_t(above);
    rest = uint32_t(whole - above * power(32 - bits));
    return whole != scaled;
  }
  // How large a segment's largest row must be for that.
  __device__ static uint32_t least_top(uint32_t base, int bits, int64_t rows) {
    return uint32_t(max(int(base) + bits - 32 - (63 - __clzll(rows)), 2));
  }
  __device__ static double value(int64_t units, uint32_t base) {
    if (base == kBeyondBase) {
      if ((units & kNan) || (units & (kInfinity | kMinusInfinity)) == (kInfinity | kMinusInfinity)) return NAN;
      return units & kInfinity ? INFINITY : -INFINITY;
    }
    // Exact but for the one rounding of the integer.
    return double(units) * power(int(base) - 189);
  }
  __device__ static double power(int exponent) { return bit_cast<double>(uint64_t(exponent + 1023) << 52); }
  __device__ static uint32_t flag(float x) { return x != x ? kNan : x > 0 ? kInfinity : kMinusInfinity; }
};

// The largest finite exponent of some rows of the piece, the same in every run, and some more. Or none, where they
// differ by so much that most segments would be added twice.
template <class Element>
__device__ __forceinline__ uint32_t sample_exponents(const SegmentBuckets &buckets, const BucketPiece &piece) {
  constexpr uint32_t kMore = 2;
  constexpr uint32_t kFarApart = 44;
  constexpr int kLanes = 4;
  __shared__ uint32_t largest;
  __shared__ uint32_t smallest;
  if (threadIdx.x == 0) {
    largest = 0;
    smallest = BucketSum::kMostExponent;
  }
  __syncthreads();
  uint32_t most = 0;
  uint32_t least = BucketSum::kMostExponent;
  const int64_t tile = piece.piece + int64_t(piece.pieces) * (int(threadIdx.x) / kLanes);
  if (tile < buckets.tiles) {
    const uint16_t *bounds = buckets.bounds + int64_t(piece.bucket) * buckets.tiles + tile;
    const BucketRecords<Element, uint16_t> records = {buckets.elements, buckets.places};
    const int end = bounds[buckets.tiles];
    for (int q = bounds[0] + (int(threadIdx.x) & (kLanes - 1)); q < end; q += kLanes) {
      Records<Element> element;
      Records<uint16_t> place;
      records.load(uint32_t(tile) * uint32_t(buckets.stride) + uint32_t(q)).unpack(element, place);
#pragma unroll
      for (int r = 0; r < kRecords; ++r) {
        const float x = float(element.value[r]);
        const uint32_t exponent = BucketSum::exponent(x);
        if (exponent < BucketSum::kMostExponent && x != 0) {
          most = max(most, exponent);
          least = min(least, exponent);
        }
      }
    }
  }
  most = __reduce_max_sync(~0u, most);
  least = __reduce_min_sync(~0u, least);
  if ((threadIdx.x & 31) == 0) {
    atomicMax(&largest, most);
    atomicMin(&smallest, least);
  }
  __syncthreads();
  const bool near = largest <= smallest + kFarApart;
  return near ? min(largest + kMore, BucketSum::kMostExponent - 1) : BucketSum::kMostExponent;
}

template <class Op>
__global__ __launch_bounds__(kBucketThreads, 1) void bucket_sums(const __grid_constant__ SegmentBucketCall<Op> call) {
  using Element = typename Op::Element;
  extern __shared__ __align__(16) uint64_t segment_memory[];
  // A segment that is to be added once more, at least if its largest row isn't large.
  constexpr uint32_t kPerhaps = 1;
  constexpr uint32_t kSurely = uint32_t(1) << 31;
  __shared__ bool again;
  __shared__ bool indeed;
  const SegmentBuckets &buckets = call.buckets;
  const int count = 1 << buckets.cell_bits;
  const int copies = 1 << buckets.copy_bits;
  // Neighbouring lanes have copies of a cell in neighbouring banks, so that many rows of one segment don't meet.
  const int size = (count + 1) << buckets.copy_bits;
  uint32_t *low = reinterpret_cast<uint32_t *>(segment_memory);
  uint32_t *high = low + size;
  uint32_t *below = high + size;
  uint32_t *tops = below + count + 1;  // 0 where units are the piece's
  uint32_t *lengths = tops + count + 1;
  const int all = 2 * (size + count + 1) + (call.counts ? size : 0);
  for (int c = threadIdx.x; c < all; c += kBucketThreads) low[c] = 0;
  if (threadIdx.x == 0) again = indeed = false;
  wait_for_earlier_work();
  const BucketPiece piece = find_bucket_piece(buckets);
  if (piece.bucket < 0) return;
  const int bits = 32 - __clz(int(piece.rows));
  const int own_copy = int(threadIdx.x) & (copies - 1);
  const auto visit = [&](const auto &take) {
    visit_bucket<Element, uint16_t, 4>(buckets, piece,
                                       [&](const Records<Element> &element, const Records<uint16_t> &place, int64_t) {
                                         float x[kRecords];
#pragma unroll
                                         for (int r = 0; r < kRecords; ++r) x[r] = float(element.value[r]);
                                         take(x, place);
                                       });
  };
  const auto cell = [&](uint16_t place) { return (int(place) << buckets.copy_bits) + own_copy; };
  const auto raise = [&](int at, int64_t units, uint32_t before) {
    const uint32_t lower = uint32_t(units);
    atomicAdd(high + at, uint32_t(uint64_t(units) >> 32) + uint32_t(before + lower < lower));
  };
  const auto add = [&](int at, int64_t units) { raise(at, units, atomicAdd(low + at, uint32_t(units))); };
  const auto count_rows = [&](const Records<uint16_t> &place) {
    if (!call.counts) return;
#pragma unroll
    for (int r = 0; r < kRecords; ++r) atomicAdd(lengths + cell(place.value[r]), 1u);
  };

  const uint32_t most = call.once ? sample_exponents<Element>(buckets, piece) : BucketSum::kMostExponent;
  const bool every = most == BucketSum::kMostExponent;
  const uint32_t base = BucketSum::base(most + 1, bits);
  if (!every) {
    visit([&](const float (&x)[kRecords], const Records<uint16_t> &place) {
      bool plain = true;
#pragma unroll
      for (int r = 0; r < kRecords; ++r) plain &= BucketSum::is_plain(x[r], base, bits);
      if (plain) {
        int64_t units[kRecords];
        uint32_t before[kRecords];
#pragma unroll
        for (int r = 0; r < kRecords; ++r) {
          units[r] = BucketSum::units(x[r], base);
          before[r] = atomicAdd(low + cell(place.value[r]), uint32_t(units[r]));
        }
#pragma unroll
        for (int r = 0; r < kRecords; ++r) raise(cell(place.value[r]), units[r], before[r]);
      } else {
#pragma unroll
        for (int r = 0; r < kRecords; ++r) {
          if (max(BucketSum::exponent(x[r]), 1u) > base - uint32_t(bits)) {
            atomicOr(tops + place.value[r], kSurely);
            again = true;
            continue;
          }
          int64_t units;
          uint32_t rest;
          if (BucketSum::split(x[r], base, bits, units, rest)) {
            atomicOr(tops + place.value[r], kPerhaps);
            again = true;
          }
          add(cell(place.value[r]), units);
          if (rest != 0) atomicAdd(below + place.value[r], rest);
        }
      }
      count_rows(place);
    });
    __syncthreads();
  }
  if (every || again) {
    visit([&](const float (&x)[kRecords], const Records<uint16_t> &place) {
#pragma unroll
      for (int r = 0; r < kRecords; ++r) {
        const uint32_t known = tops[place.value[r]];
        const uint32_t top = BucketSum::top(x[r]) | (known & kSurely);
        if ((every || known != 0) && top > known) atomicMax(tops + place.value[r], top);
      }
    });
    __syncthreads();
    const uint32_t least = BucketSum::least_top(base, bits, call.rows);
    for (int c = threadIdx.x; c <= count; c += kBucketThreads) {
      const uint32_t top = tops[c];
      const bool twice = every || (top & kSurely) || top < least;
      tops[c] = twice ? BucketSum::base(top & ~kSurely, bits) : 0;
      if (tops[c] == 0) continue;
      indeed = true;
      for (int k = 0; k < copies; ++k) low[(c << buckets.copy_bits) + k] = high[(c << buckets.copy_bits) + k] = 0;
    }
    __syncthreads();
    if (indeed) {
      visit([&](const float (&x)[kRecords], const Records<uint16_t> &place) {
#pragma unroll
        for (int r = 0; r < kRecords; ++r) {
          const uint32_t own = tops[place.value[r]];
          if (own == 0) continue;
          if (own != BucketSum::kBeyondBase) {
            add(cell(place.value[r]), BucketSum::units(x[r], own));
          } else if (BucketSum::top(x[r]) == BucketSum::kBeyond) {
            atomicOr(low + cell(place.value[r]), BucketSum::flag(x[r]));
          }
        }
        if (every) count_rows(place);
      });
      __syncthreads();
    }
  }
  const int64_t first = int64_t(piece.bucket) << buckets.cell_bits;
  const int mine = int(min(int64_t(count), call.segments - first));
  double *partial = reinterpret_cast<double *>(call.partial);
  const auto own = [&](int c, double &sum, uint32_t &length) {
    const uint32_t top = tops[c];
    int64_t units = 0;
    length = call.counts ? 0 : call.once || top != 0;
    for (int k = 0; k < copies; ++k) {
      // Neighbours begin at different copies, which are in different banks.
      const int at = (c << buckets.copy_bits) + ((k + c) & (copies - 1));
      const int64_t some = int64_t(uint64_t(high[at]) << 32 | low[at]);
      units = top == BucketSum::kBeyondBase ? units | some : units + some;
      if (call.counts) length += lengths[at];
    }
    sum = top != 0 ? BucketSum::value(units, top)
          : every  ? 0.0
                   : BucketSum::value(units, base) + double(below[c]) * BucketSum::power(int(base) - 189 + bits - 32);
  };
  if (piece.pieces > 1) {
    for (int c = threadIdx.x; c < mine; c += kBucketThreads) {
      double sum;
      uint32_t length;
      own(c, sum, length);
      partial[int64_t(blockIdx.x) * count + c] = sum;
      buckets.lengths[int64_t(blockIdx.x) * count + c] = length;
    }
    if (!last_of_bucket(buckets, piece)) return;
  }
  for (int c = threadIdx.x; c < mine; c += kBucketThreads) {
    double sum = 0;
    int64_t length = 0;
    if (piece.pieces == 1) {
      uint32_t rows;
      own(c, sum, rows);
      length = rows;
    } else {
      for (int p = 0; p < piece.pieces; ++p) {
        const int64_t from = (int64_t(blockIdx.x) - piece.piece + p) * count + c;
        sum += __ldcg(partial + from);
        length += __ldcg(buckets.lengths + from);
      }
    }
    const typename Op::State state[1] = {typename Op::State(sum)};
    call.op.template store<1>(first + c, 0, length, state);
  }
}

inline void segment_allow_shared(const void *kernel, size_t bytes) {
  if (bytes > 48 * 1024)
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)),
               "cudaFuncSetAttribute");
}

// As segment_reduce, where the space has buckets.
template <class Op>
void segment_reduce_buckets(const SegmentProblem &problem, const SegmentView &input, const SegmentIndices &ids,
                            const Op &op, const SegmentSpace &space, Stream stream) {
  segment_fill_buckets(problem, input, ids, Op::kRows, space, stream);
  SegmentBucketCall<Op> call = {op, space.buckets, problem.rows, problem.segments, space.partial, nullptr, false};
  const auto run = [&](auto kernel, size_t shared) {
    segment_allow_shared(reinterpret_cast<const void *>(kernel), shared);
    launch(kernel, {space.buckets.units, kBucketThreads, shared, true}, stream, call);
  };
  if constexpr (requires { op.order; }) {
    const auto with = [&](auto kernel) {
      run(kernel, segment_bucket_bytes(space.buckets.cell_bits, Op::kRows ? 8 : 4));
    };
    if constexpr (sizeof(typename Op::Element) == 4) {
      with(bucket_extremes<Op, SegmentLanes::float32>);
    } else if (problem.dtype == DTypeOf<bfloat16>::value) {
      with(bucket_extremes<Op, SegmentLanes::bfloat16>);
    } else {
      with(bucket_extremes<Op, SegmentLanes::float16>);
    }
  } else {
    if (problem.kind == SegmentKind::mean) call.counts = space.buckets.lengths;
    call.once = call.counts || bit_cast<Unsigned<sizeof op.empty>>(op.empty) == 0;
    run(bucket_sums<Op>, segment_bucket_sum_bytes(problem, space.buckets.cell_bits, space.buckets.copy_bits));
  }
}

}  // namespace baracuda
