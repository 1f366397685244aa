// SPDX-License-Identifier: Apache-2.0
#include "segment/segment.cuh"

namespace baracuda {
namespace {

// A count for each segment.
struct Counts {
  const uint32_t *counts;  // NULL: the distance of offsets
  SegmentGroups groups;

  __device__ int64_t operator[](int64_t segment) const {
    return counts ? int64_t(counts[segment]) : groups.end(segment) - groups.begin(segment);
  }
};

// What an element of d_input is, from that of d_output; `at` counts the elements of one segment after the
// other.

template <class Bits>
struct TakesAll {
  using Element = Bits;
  static constexpr bool kUsesInput = false;

  __device__ Bits operator()(Bits dy, Bits, int64_t, int64_t, int64_t) const { return dy; }
};

template <class T>
struct TakesMean {
  using Element = T;
  static constexpr bool kUsesInput = false;
  using Real = typename SegmentReal<T>::type;

  Counts counts;

  __device__ T operator()(T dy, T, int64_t, int64_t segment, int64_t) const {
    return T(Real(dy) / Real(counts[segment]));
  }
};

template <class T, class Bits>
struct TakesEven {
  using Element = T;
  static constexpr bool kUsesInput = true;
  using Real = typename SegmentReal<T>::type;
  using Tally = SegmentTally<Bits, uint32_t>;

  Tally tally;
  const typename Tally::State *states;

  __device__ T operator()(T dy, T x, int64_t row, int64_t, int64_t at) const {
    const typename Tally::State state = states[at];
    if (tally.order.is_nan(state.key)) return T(state.tally == uint32_t(row) ? Real(dy) : Real(0));
    const bool takes = tally.order.key(bit_cast<Bits>(x)) == state.key;
    return T(takes ? Real(dy) / Real(state.tally) : Real(0));
  }
};

template <class T>
struct TakesProduct {
  using Element = T;
  static constexpr bool kUsesInput = true;
  using Real = typename SegmentReal<T>::type;

  using Packed = SegmentPackedProduct<Real>;
  using Word = SegmentPack<uint32_t, sizeof(Packed) / 4>;

  const Packed *states;

  __device__ T operator()(T dy, T x, int64_t, int64_t, int64_t at) const {
    const Word word = reinterpret_cast<const Word *>(states)[at];
    return T(segment_product_gradient(bit_cast<Packed>(word), Real(x), Real(dy)));
  }
};

// From here on, rows are gathered: a group of lanes for each row, several rows after another.

struct SpreadSizes {
  int64_t rows;
  int64_t columns;
  int64_t segments;
  SegmentIndices ids;
  int across;
  int lane_bits;
  const uint32_t *order = nullptr;  // rows as ids have them; NULL: one after the other
};

template <class Body>
__device__ __forceinline__ void each_row(const SpreadSizes &sizes, int64_t (&row)[4], int64_t (&segment)[4],
                                         const Body &body) {
  const int groups = kSegmentThreads >> sizes.lane_bits;
  const int64_t first = int64_t(blockIdx.x) * groups * 4 + (int(threadIdx.x) >> sizes.lane_bits);
  segment_load_ids(sizes.ids, first, groups, sizes.rows, segment);
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    row[r] = first + r * groups;
    if (uint64_t(segment[r]) >= uint64_t(sizes.segments)) segment[r] = -1;
    if (sizes.order && row[r] < sizes.rows) row[r] = sizes.order[row[r]];
  }
  body(int(threadIdx.x) & (sizes.across - 1));
}

// Loads a word at once: memory that is looked at as bits of another type would be loaded by single bytes.
template <class Pack, class Word>
__device__ __forceinline__ Pack load_pack(const Word *from) {
  const Word word = *from;
  return bit_cast<Pack>(word);
}

// What nobody reads soon leaves the cache to what is read often.
template <class T, int kVector>
__device__ __forceinline__ void store_pack(T *to, const SegmentPack<T, kVector> &pack) {
  if constexpr (sizeof(pack) == 16) {
    __stcs(reinterpret_cast<uint4 *>(to), bit_cast<uint4>(pack));
  } else {
    static_assert(kVector == 1);
    *to = pack.value[0];
  }
}

// Each row of d_output by the number of its segment's rows.
template <class T, int kVector>
__global__ __launch_bounds__(kSegmentThreads) void share_out(Counts counts, SegmentView d_output, int64_t columns,
                                                             int64_t segments, T *shares) {
  using Pack = SegmentPack<T, kVector>;
  using Real = typename SegmentReal<T>::type;
  const int64_t at = (int64_t(blockIdx.x) * kSegmentThreads + threadIdx.x) * kVector;
  const int64_t segment = at / columns;
  if (segment >= segments) return;
  const int64_t column = at - segment * columns;
  const T *from = static_cast<const T *>(d_output.data) + segment * d_output.row + column * d_output.column;
  const Real count = Real(counts[segment]);
  Pack pack = *reinterpret_cast<const Pack *>(from);
#pragma unroll
  for (int v = 0; v < kVector; ++v) pack.value[v] = T(Real(pack.value[v]) / count);
  *reinterpret_cast<Pack *>(shares + at) = pack;
}

template <class Rule, int kVector>
__global__ __launch_bounds__(kSegmentThreads) void gather_gradient(const __grid_constant__ Rule rule,
                                                                   const __grid_constant__ SpreadSizes sizes,
                                                                   SegmentView d_output, SegmentView input,
                                                                   SegmentView d_input) {
  using Element = typename Rule::Element;
  using Pack = SegmentPack<Element, kVector>;
  using Word =
      SegmentPack<std::conditional_t<kVector == 1, BitsOf<Element>, uint32_t>, kVector == 1 ? 1 : sizeof(Pack) / 4>;
  int64_t row[4];
  int64_t segment[4];
  each_row(sizes, row, segment, [&](int lane) {
    for (int64_t column = int64_t(lane) * kVector; column < sizes.columns; column += int64_t(sizes.across) * kVector) {
      Pack dy[4];
      Pack x[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        if (segment[r] < 0) continue;
        const Element *from = static_cast<const Element *>(d_output.data) + segment[r] * d_output.row;
        dy[r] = load_pack<Pack>(reinterpret_cast<const Word *>(from + column * d_output.column));
        if constexpr (Rule::kUsesInput) {
          from = static_cast<const Element *>(input.data) + row[r] * input.row;
          x[r] = load_pack<Pack>(reinterpret_cast<const Word *>(from + column * input.column));
        }
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        if (row[r] >= sizes.rows) continue;
        Pack result = {};
        if (segment[r] >= 0) {
#pragma unroll
          for (int v = 0; v < kVector; ++v)
            result.value[v] =
                rule(dy[r].value[v], x[r].value[v], row[r], segment[r], segment[r] * sizes.columns + column + v);
        }
        Element *to = static_cast<Element *>(d_input.data) + row[r] * d_input.row + column * d_input.column;
        store_pack(to, result);
      }
    }
  });
}

// Only the row that `arg` names takes the gradient. Rows are below 2^32, as are negative numbers not.
template <class Bits, class Arg, int kVector>
__global__ __launch_bounds__(kSegmentThreads) void gather_chosen(const __grid_constant__ SpreadSizes sizes,
                                                                 SegmentView d_output, SegmentView arg,
                                                                 SegmentView d_input) {
  using Pack = SegmentPack<Bits, kVector>;
  using Word = SegmentPack<std::conditional_t<kVector == 1, Bits, uint32_t>, kVector == 1 ? 1 : sizeof(Pack) / 4>;
  constexpr int kArgs = kVector == 1 ? 1 : 16 / sizeof(Arg) < kVector ? 16 / sizeof(Arg) : kVector;
  using Args = SegmentPack<Arg, kArgs>;
  int64_t row[4];
  int64_t segment[4];
  each_row(sizes, row, segment, [&](int lane) {
    for (int64_t column = int64_t(lane) * kVector; column < sizes.columns; column += int64_t(sizes.across) * kVector) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        if (row[r] >= sizes.rows) continue;
        Pack result = {};
        if (segment[r] >= 0) {
          const Bits *from = static_cast<const Bits *>(d_output.data) + segment[r] * d_output.row;
          const Pack dy = load_pack<Pack>(reinterpret_cast<const Word *>(from + column * d_output.column));
          const Arg *named = static_cast<const Arg *>(arg.data) + segment[r] * arg.row + column * arg.column;
#pragma unroll
          for (int v = 0; v < kVector; v += kArgs) {
            const Args args = *reinterpret_cast<const Args *>(named + v);
#pragma unroll
            for (int a = 0; a < kArgs; ++a) result.value[v + a] = args.value[a] == Arg(row[r]) ? dy.value[v + a] : 0;
          }
        }
        Bits *to = static_cast<Bits *>(d_input.data) + row[r] * d_input.row + column * d_input.column;
        *reinterpret_cast<Word *>(to) = bit_cast<Word>(result);
      }
    }
  });
}

// Whether a row is the segment's: so that no two segments write one place, whatever arg holds.
__device__ __forceinline__ bool owns(const SpreadSizes &sizes, const SegmentGroups &groups, int64_t segment,
                                     int64_t row) {
  return sizes.ids.data ? sizes.ids[row] == segment : groups.begin(segment) <= row && row < groups.end(segment);
}

// Of each row, the columns that take the gradient, 32 of them in a word.
struct Marks {
  uint32_t *data;
  int64_t words;  // of a row
};

__global__ __launch_bounds__(kSegmentThreads) void forget_marks(Marks marks, int64_t count) {
  for (int64_t at = int64_t(blockIdx.x) * kSegmentThreads + threadIdx.x; at < count;
       at += int64_t(gridDim.x) * kSegmentThreads)
    reinterpret_cast<uint4 *>(marks.data)[at] = {};
}

// A warp for each segment: lanes that name the same row have its bits.
template <class Arg>
__global__ __launch_bounds__(kSegmentThreads) void mark_chosen(const __grid_constant__ SpreadSizes sizes,
                                                               const __grid_constant__ SegmentGroups groups,
                                                               SegmentView arg, Marks marks) {
  constexpr int kAtOnce = 2;
  constexpr uint32_t kNone = ~uint32_t(0);
  wait_for_earlier_work();
  const int lane = int(threadIdx.x) & 31;
  const int64_t segment = (int64_t(blockIdx.x) * kSegmentThreads + threadIdx.x) / 32;
  if (segment >= sizes.segments) return;
  for (int64_t word = 0; word < marks.words; word += kAtOnce) {
    uint32_t row[kAtOnce];
#pragma unroll
    for (int w = 0; w < kAtOnce; ++w) {
      const int64_t column = (word + w) * kSegmentMarked + lane;
      row[w] = kNone;
      if (column >= sizes.columns) continue;
      const uint64_t named = uint64_t(arg.at<const Arg>(segment, column));
      if (named < uint64_t(sizes.rows)) row[w] = uint32_t(named);
    }
#pragma unroll
    for (int w = 0; w < kAtOnce; ++w) {
      if (word + w >= marks.words) break;
      const uint32_t same = __match_any_sync(~0u, row[w]);
      if (row[w] != kNone && lane == __ffs(int(same)) - 1 && owns(sizes, groups, segment, row[w]))
        marks.data[int64_t(row[w]) * marks.words + word + w] = same;
    }
  }
}

// Rows gather what is marked alone.
template <class Bits, int kVector>
__global__ __launch_bounds__(kSegmentThreads) void gather_marked(const __grid_constant__ SpreadSizes sizes,
                                                                 SegmentView d_output, Marks marks,
                                                                 SegmentView d_input) {
  using Pack = SegmentPack<Bits, kVector>;
  using Word = SegmentPack<uint32_t, sizeof(Pack) / 4>;
  constexpr int kRows = 2;
  static_assert(kSegmentMarked % kVector == 0 && sizeof(Pack) == sizeof(uint4));
  wait_for_earlier_work();
  const int groups = kSegmentThreads >> sizes.lane_bits;
  const int lane = int(threadIdx.x) & (sizes.across - 1);
  const int64_t first = int64_t(blockIdx.x) * groups * kRows + (int(threadIdx.x) >> sizes.lane_bits);
  int64_t segment[kRows];
  segment_load_ids(sizes.ids, first, groups, sizes.rows, segment);
  for (int64_t column = int64_t(lane) * kVector; column < sizes.columns; column += int64_t(sizes.across) * kVector) {
    uint32_t takes[kRows] = {};
    Pack result[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = first + r * groups;
      if (row >= sizes.rows) break;
      const uint32_t word = marks.data[row * marks.words + column / kSegmentMarked];
      takes[r] = (word >> (column % kSegmentMarked)) & ((1u << kVector) - 1);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      result[r] = {};
      if (takes[r] == 0) continue;
      const Bits *from = static_cast<const Bits *>(d_output.data) + segment[r] * d_output.row + column;
      const Pack dy = load_pack<Pack>(reinterpret_cast<const Word *>(from));
#pragma unroll
      for (int v = 0; v < kVector; ++v) result[r].value[v] = (takes[r] >> v) & 1 ? dy.value[v] : Bits(0);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = first + r * groups;
      if (row >= sizes.rows) break;
      const Word word = bit_cast<Word>(result[r]);
      // d_output is to stay in the cache.
      __stcs(reinterpret_cast<uint4 *>(static_cast<Bits *>(d_input.data) + row * d_input.row + column),
             make_uint4(word.value[0], word.value[1], word.value[2], word.value[3]));
    }
  }
}

// The same the other way round, into zeros: for few segments of many rows. `rows` of the sizes counts segments.
template <class Bits, class Arg>
__global__ __launch_bounds__(kSegmentThreads) void scatter_chosen(const __grid_constant__ SpreadSizes sizes,
                                                                  const __grid_constant__ SegmentGroups groups,
                                                                  SegmentView d_output, SegmentView arg,
                                                                  SegmentView d_input) {
  const int across = 1 << sizes.lane_bits;
  const int count = kSegmentThreads >> sizes.lane_bits;
  const int lane = int(threadIdx.x) & (across - 1);
  const int64_t first = int64_t(blockIdx.x) * count * 4 + (int(threadIdx.x) >> sizes.lane_bits);
  for (int64_t column = lane; column < sizes.columns; column += across) {
    uint64_t row[4];
    Bits dy[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int64_t segment = first + r * count;
      row[r] = ~uint64_t(0);
      if (segment >= sizes.segments) continue;
      row[r] = uint64_t(arg.at<const Arg>(segment, column));
      dy[r] = d_output.at<const Bits>(segment, column);
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if (row[r] >= uint64_t(sizes.rows)) continue;
      const int64_t segment = first + r * count;
      const int64_t at = int64_t(row[r]);
      if (owns(sizes, groups, segment, at)) d_input.at<Bits>(at, column) = dy[r];
    }
  }
}

struct Launcher {
  const SegmentBackward &call;
  const SegmentSpace &space;
  Stream stream;

  const SegmentProblem &problem() const { return call.problem; }

  SegmentIndices row_ids() const {
    if (problem().ids != SegmentIds::offsets) return call.ids;
    segment_expand(problem(), call.ids, space, stream);
    return {space.ids.data, 1, space.ids.wide};
  }

  SegmentGroups groups() const {
    SegmentGroups groups = {};
    groups.rows = problem().rows;
    groups.segments = problem().segments;
    groups.offsets =
        problem().ids == SegmentIds::offsets ? call.ids : SegmentIndices{space.offsets.data, 1, space.offsets.wide};
    return groups;
  }

  SpreadSizes sizes(const SegmentIndices &ids, int vector) const {
    SpreadSizes sizes = {problem().rows, problem().columns, problem().segments, ids, 1, 0};
    sizes.across = int(std::bit_ceil(uint64_t(std::min<int64_t>(ceil_div(problem().columns, vector), 32))));
    sizes.lane_bits = std::countr_zero(unsigned(sizes.across));
    return sizes;
  }

  Grid grid(const SpreadSizes &sizes, int64_t rows) const {
    return {ceil_div(rows, int64_t(kSegmentThreads >> sizes.lane_bits) * 4), kSegmentThreads};
  }

  bool aligned(int vector, int bytes) const {
    return problem().columns % vector == 0 && segment_aligned(call.d_output, vector, bytes) &&
           segment_aligned(call.d_input, vector, bytes);
  }

  template <class Rule>
  void gather(const Rule &rule) const {
    constexpr int kBytes = sizeof(typename Rule::Element);
    constexpr int kVector = 16 / kBytes;
    if (aligned(kVector, kBytes) && (!Rule::kUsesInput || segment_aligned(call.input, kVector, kBytes))) {
      run<kVector>(rule);
    } else {
      run<1>(rule);
    }
  }

  // Where rows of d_output are read more than once: what each row gets of them, and then that.
  template <class T>
  void share_out_and_gather(const Counts &counts) const {
    constexpr int kVector = 16 / sizeof(T);
    T *shares = reinterpret_cast<T *>(space.states);
    const int64_t elements = problem().segments * problem().columns;
    const bool vectors = problem().columns % kVector == 0 && segment_aligned(call.d_output, kVector, sizeof(T));
    launch(vectors ? share_out<T, kVector> : share_out<T, 1>,
           {ceil_div(elements, kSegmentThreads * (vectors ? kVector : 1)), kSegmentThreads}, stream, counts,
           call.d_output, problem().columns, problem().segments, shares);
    SegmentBackward shared = call;
    shared.d_output = {shares, problem().columns, 1};
    Launcher{shared, space, stream}.gather(TakesAll<BitsOf<T>>{});
  }

  template <int kVector, class Rule>
  void run(const Rule &rule) const {
    SpreadSizes shape = sizes(SegmentIndices(), kVector);
    // Rows that were sorted come in the order of their segments, so that what is kept of these is read once.
    constexpr int64_t kNarrowIds = int64_t(1) << 31;
    if (Rule::kUsesInput && kVector > 1 && space.sort.passes > 0 && problem().segments < kNarrowIds) {
      shape.ids = {space.keys[space.sort.last()], 1, false};
      shape.order = space.values[space.sort.last()];
    } else {
      shape.ids = row_ids();
    }
    launch(gather_gradient<Rule, kVector>, grid(shape, problem().rows), stream, rule, shape, call.d_output, call.input,
           call.d_input);
  }

  template <class Bits, class Arg, int kVector>
  void marked(const SegmentView &arg) const {
    const Marks marks = {space.marks, ceil_div(problem().columns, kSegmentMarked)};
    const SpreadSizes shape = sizes(row_ids(), kVector);
    constexpr int64_t kMostBlocks = kMultiprocessors * 8;
    const int64_t count = ceil_div(problem().rows * marks.words, 4);
    launch(forget_marks, {std::min(ceil_div(count, kSegmentThreads), kMostBlocks), kSegmentThreads}, stream, marks,
           count);
    if (problem().segments > 0)
      launch(mark_chosen<Arg>, {ceil_div(problem().segments * 32, kSegmentThreads), kSegmentThreads, 0, true}, stream,
             shape, groups(), arg, marks);
    launch(gather_marked<Bits, kVector>,
           {ceil_div(problem().rows, int64_t(kSegmentThreads >> shape.lane_bits) * 2), kSegmentThreads, 0, true},
           stream, shape, call.d_output, marks, call.d_input);
  }

  template <class Bits, class Arg>
  void chosen(const SegmentView &arg) const {
    constexpr int kVector = 16 / sizeof(Bits);
    const int64_t elements = problem().rows * problem().columns;
    const bool dense = call.d_input.column == 1 || problem().columns == 1;
    const bool whole = dense && (problem().rows == 1 || call.d_input.row == problem().columns);
    if (space.marks && aligned(kVector, sizeof(Bits))) return marked<Bits, Arg, kVector>(arg);
    // What a row reads when gathered, d_output and arg, costs more than zeros when it is read often.
    const int64_t often = problem().columns * int64_t(sizeof(Bits)) < 32 ? 4 : 24;
    if (whole && problem().columns == 1 && problem().ids != SegmentIds::offsets &&
        problem().rows >= often * problem().segments) {
      segment_scatter_column(call, arg, sizeof(Arg), call.arg.data != nullptr, stream);
      return;
    }
    if (whole && problem().rows >= often * problem().segments) {
      check_cuda(
          cudaMemsetAsync(call.d_input.data, 0, size_t(elements) * sizeof(Bits), static_cast<cudaStream_t>(stream)),
          "cudaMemsetAsync");
      if (problem().segments == 0) return;
      const bool offsets = problem().ids == SegmentIds::offsets;
      const SpreadSizes shape = sizes(offsets ? SegmentIndices() : call.ids, 1);
      launch(scatter_chosen<Bits, Arg>, grid(shape, problem().segments), stream, shape, groups(), call.d_output, arg,
             call.d_input);
      return;
    }
    const SegmentIndices ids = row_ids();
    if (aligned(kVector, sizeof(Bits)) && segment_aligned(arg, kVector, sizeof(Arg))) {
      const SpreadSizes shape = sizes(ids, kVector);
      launch(gather_chosen<Bits, Arg, kVector>, grid(shape, problem().rows), stream, shape, call.d_output, arg,
             call.d_input);
    } else {
      const SpreadSizes shape = sizes(ids, 1);
      launch(gather_chosen<Bits, Arg, 1>, grid(shape, problem().rows), stream, shape, call.d_output, arg, call.d_input);
    }
  }
};

template <class Body>
void dispatch_float_bits(DLDataType dtype, const Body &body) {
  switch (dtype.bits) {
    case 16:
      return body(TypeTag<uint16_t>{});
    case 32:
      return body(TypeTag<uint32_t>{});
    default:
      return body(TypeTag<uint64_t>{});
  }
}

}  // namespace

void segment_spread(const SegmentBackward &call, const SegmentSpace &space, Stream stream) {
  const SegmentProblem &problem = call.problem;
  const Launcher launcher = {call, space, stream};
  if (problem.kind == SegmentKind::sum) {
    dispatch_float_bits(problem.dtype, [&](auto tag) { launcher.gather(TakesAll<typename decltype(tag)::type>{}); });
    return;
  }
  if (problem.extreme() && !problem.even) {
    const SegmentView own = {space.states, problem.columns, 1};
    dispatch_float_bits(problem.dtype, [&](auto tag) {
      using Bits = typename decltype(tag)::type;
      if (!call.arg.data) {
        launcher.chosen<Bits, uint32_t>(own);
      } else if (problem.wide_index) {
        launcher.chosen<Bits, uint64_t>(call.arg);
      } else {
        launcher.chosen<Bits, uint32_t>(call.arg);
      }
    });
    return;
  }
  if (problem.kind == SegmentKind::mean) {
    if (problem.ids == SegmentIds::unsorted) {
      segment_count(problem, call.ids, space, stream);
    } else if (problem.ids == SegmentIds::sorted) {
      segment_offsets(problem, call.ids, space, stream);
    }
  }
  dispatch_dtype<float16, bfloat16, float, double>(problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Bits = BitsOf<T>;
    using Real = typename SegmentReal<T>::type;
    if (problem.kind == SegmentKind::mean) {
      const Counts counts = {space.counts, launcher.groups()};
      if (space.states) {
        launcher.share_out_and_gather<T>(counts);
      } else {
        launcher.gather(TakesMean<T>{counts});
      }
    } else if (problem.kind == SegmentKind::prod) {
      launcher.gather(TakesProduct<T>{reinterpret_cast<const SegmentPackedProduct<Real> *>(space.states)});
    } else {
      using Rule = TakesEven<T, Bits>;
      launcher.gather(Rule{{segment_order<Bits>(problem.dtype, problem.kind == SegmentKind::min)},
                           reinterpret_cast<const typename Rule::Tally::State *>(space.states)});
    }
  });
}

}  // namespace baracuda
