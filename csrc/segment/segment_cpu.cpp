// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <vector>

#include "runtime/parallel.h"
#include "segment/segment.h"

namespace baracuda {
namespace {

// The rows of each segment, in order.
class Groups {
 public:
  Groups(const SegmentProblem &problem, const SegmentIndices &ids)
      : problem_(problem), segment_of_(size_t(problem.rows), -1), begin_(size_t(problem.segments)), end_(begin_) {
    if (problem.ids == SegmentIds::offsets) {
      read_offsets(ids);
    } else {
      sort(ids);
    }
  }

  int64_t begin(int64_t segment) const { return begin_[size_t(segment)]; }
  int64_t end(int64_t segment) const { return end_[size_t(segment)]; }
  int64_t count(int64_t segment) const { return end(segment) - begin(segment); }
  int64_t row(int64_t place) const { return order_.empty() ? place : order_[size_t(place)]; }
  // -1: none
  int64_t segment_of(int64_t row) const { return segment_of_[size_t(row)]; }

 private:
  void read_offsets(const SegmentIndices &offsets) {
    int64_t next = problem_.segments > 0 ? offsets[0] : 0;
    for (int64_t segment = 0; segment < problem_.segments; ++segment) {
      const int64_t first = next;
      next = offsets[segment + 1];
      const int64_t begin = std::clamp<int64_t>(first, 0, problem_.rows);
      const int64_t end = std::clamp<int64_t>(next, begin, problem_.rows);
      begin_[size_t(segment)] = begin;
      end_[size_t(segment)] = end;
      std::fill(segment_of_.begin() + begin, segment_of_.begin() + end, segment);
    }
  }

  void sort(const SegmentIndices &ids) {
    int64_t kept = 0;
    for (int64_t row = 0; row < problem_.rows; ++row) {
      const int64_t id = ids[row];
      if (id < 0 || id >= problem_.segments) continue;
      segment_of_[size_t(row)] = id;
      ++end_[size_t(id)];
      ++kept;
    }
    int64_t place = 0;
    for (int64_t segment = 0; segment < problem_.segments; ++segment) {
      begin_[size_t(segment)] = place;
      place += end_[size_t(segment)];
      end_[size_t(segment)] = begin_[size_t(segment)];
    }
    order_.resize(size_t(kept));
    for (int64_t row = 0; row < problem_.rows; ++row) {
      const int64_t id = segment_of(row);
      if (id >= 0) order_[size_t(end_[size_t(id)]++)] = row;
    }
  }

  const SegmentProblem &problem_;
  std::vector<int64_t> segment_of_;
  std::vector<int64_t> begin_;
  std::vector<int64_t> end_;
  std::vector<int64_t> order_;
};

// Reduces every segment by `op` and gives the states of each of its columns to
// finish(segment, column, state, count).
template <class Op, class Finish>
void reduce(const SegmentProblem &problem, const SegmentView &input, const Groups &groups, const Op &op,
            const Finish &finish) {
  const int64_t columns = problem.columns;
  parallel_for(problem.segments, (problem.rows + problem.segments) * columns, [&](int64_t first, int64_t last) {
    std::vector<typename Op::State> states(static_cast<size_t>(columns));
    for (int64_t segment = first; segment < last; ++segment) {
      std::fill(states.begin(), states.end(), op.identity());
      for (int64_t place = groups.begin(segment); place < groups.end(segment); ++place) {
        const int64_t row = groups.row(place);
        for (int64_t column = 0; column < columns; ++column)
          op.add(states[size_t(column)], input.at<const typename Op::Element>(row, column), typename Op::Row(row));
      }
      for (int64_t column = 0; column < columns; ++column)
        finish(segment, column, states[size_t(column)], groups.count(segment));
    }
  });
}

template <class T, template <class> class Op>
void accumulate(const SegmentForward &call, const Groups &groups) {
  const bool mean = call.problem.kind == SegmentKind::mean;
  T empty;
  std::memcpy(&empty, &call.empty_bits, sizeof empty);
  reduce(call.problem, call.input, groups, Op<T>(),
         [&](int64_t segment, int64_t column, Op<T>::State state, int64_t count) {
           call.output.at<T>(segment, column) = count == 0 ? empty : T(mean ? segment_mean<T>(state, count) : state);
         });
}

template <class Bits>
void extremes(const SegmentForward &call, const Groups &groups) {
  const SegmentOrder<Bits> order = segment_order<Bits>(call.problem.dtype, call.problem.kind == SegmentKind::min);
  const SegmentArgMax<Bits, uint64_t> op = {order};
  reduce(call.problem, call.input, groups, op, [&](int64_t segment, int64_t column, const auto &state, int64_t count) {
    call.output.at<Bits>(segment, column) = count == 0 ? Bits(call.empty_bits) : order.bits(state.key);
    if (!call.arg.data) return;
    const int64_t arg = count == 0 ? call.problem.rows : int64_t(state.row);
    if (call.problem.wide_index) {
      call.arg.at<int64_t>(segment, column) = arg;
    } else {
      call.arg.at<int32_t>(segment, column) = int32_t(arg);
    }
  });
}

// Writes gradient(row, segment, column) to every element whose row has a segment, and 0 to the others.
template <class T, class Gradient>
void spread(const SegmentBackward &call, const Groups &groups, const Gradient &gradient) {
  const SegmentProblem &problem = call.problem;
  parallel_for(problem.rows, problem.rows * problem.columns * 2, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const int64_t segment = groups.segment_of(row);
      for (int64_t column = 0; column < problem.columns; ++column)
        call.d_input.at<T>(row, column) = segment < 0 ? T(0.0f) : gradient(row, segment, column);
    }
  });
}

template <class T>
void shares(const SegmentBackward &call, const Groups &groups) {
  using Real = SegmentReal<T>::type;
  const bool mean = call.problem.kind == SegmentKind::mean;
  spread<T>(call, groups, [&](int64_t, int64_t segment, int64_t column) {
    const Real dy = Real(call.d_output.at<const T>(segment, column));
    return T(mean ? dy / Real(groups.count(segment)) : dy);
  });
}

template <class T>
void products(const SegmentBackward &call, const Groups &groups) {
  using Real = SegmentReal<T>::type;
  const SegmentProblem &problem = call.problem;
  std::vector<SegmentProduct<Real>> all(size_t(problem.segments * problem.columns));
  reduce(problem, call.input, groups, SegmentOthers<T>(),
         [&](int64_t segment, int64_t column, const SegmentProduct<Real> &state, int64_t) {
           all[size_t(segment * problem.columns + column)] = state;
         });
  spread<T>(call, groups, [&](int64_t row, int64_t segment, int64_t column) {
    return T(segment_product_gradient(all[size_t(segment * problem.columns + column)],
                                      Real(call.input.at<const T>(row, column)),
                                      Real(call.d_output.at<const T>(segment, column))));
  });
}

// Ties share evenly.
template <class T, class Bits>
void even_shares(const SegmentBackward &call, const Groups &groups) {
  using Real = SegmentReal<T>::type;
  using Op = SegmentTally<Bits, uint64_t>;
  const SegmentProblem &problem = call.problem;
  const Op op = {segment_order<Bits>(problem.dtype, problem.kind == SegmentKind::min)};
  std::vector<typename Op::State> all(size_t(problem.segments * problem.columns));
  reduce(problem, call.input, groups, op, [&](int64_t segment, int64_t column, const Op::State &state, int64_t) {
    all[size_t(segment * problem.columns + column)] = state;
  });
  spread<T>(call, groups, [&](int64_t row, int64_t segment, int64_t column) {
    const typename Op::State &state = all[size_t(segment * problem.columns + column)];
    const Real dy = Real(call.d_output.at<const T>(segment, column));
    if (op.order.is_nan(state.key)) return T(state.tally == uint64_t(row) ? dy : Real(0));
    const bool takes = op.order.key(call.input.at<const Bits>(row, column)) == state.key;
    return T(takes ? dy / Real(state.tally) : Real(0));
  });
}

// One row takes all: the one that `arg` names, or the first that holds the maximum.
template <class T, class Bits>
void chosen(const SegmentBackward &call, const Groups &groups) {
  const SegmentProblem &problem = call.problem;
  std::vector<uint64_t> first;
  if (!call.arg.data) {
    const SegmentOrder<Bits> order = segment_order<Bits>(problem.dtype, problem.kind == SegmentKind::min);
    const SegmentArgMax<Bits, uint64_t> op = {order};
    first.resize(size_t(problem.segments * problem.columns));
    reduce(problem, call.input, groups, op, [&](int64_t segment, int64_t column, const auto &state, int64_t) {
      first[size_t(segment * problem.columns + column)] = state.row;
    });
  }
  const auto arg = [&](int64_t segment, int64_t column) -> int64_t {
    if (!call.arg.data) return int64_t(first[size_t(segment * problem.columns + column)]);
    return problem.wide_index ? call.arg.at<const int64_t>(segment, column)
                              : call.arg.at<const int32_t>(segment, column);
  };
  spread<T>(call, groups, [&](int64_t row, int64_t segment, int64_t column) {
    return arg(segment, column) == row ? call.d_output.at<const T>(segment, column) : T(0.0f);
  });
}

}  // namespace

void segment_reduce_cpu(const SegmentForward &call) {
  const Groups groups(call.problem, call.ids);
  if (call.problem.extreme()) {
    dispatch_segment_bits(call.problem.dtype, [&](auto tag) { extremes<typename decltype(tag)::type>(call, groups); });
    return;
  }
  dispatch_dtype<float16, bfloat16, float, double, int8_t, uint8_t, int32_t, int64_t>(
      call.problem.dtype, [&](auto tag) {
        using T = decltype(tag)::type;
        if (call.problem.kind == SegmentKind::prod) {
          accumulate<T, SegmentProd>(call, groups);
        } else {
          accumulate<T, SegmentSum>(call, groups);
        }
      });
}

void segment_reduce_backward_cpu(const SegmentBackward &call) {
  const Groups groups(call.problem, call.ids);
  dispatch_dtype<float16, bfloat16, float, double>(call.problem.dtype, [&](auto tag) {
    using T = decltype(tag)::type;
    using Bits = BitsOf<T>;
    if (call.problem.kind == SegmentKind::prod) {
      products<T>(call, groups);
    } else if (!call.problem.extreme()) {
      shares<T>(call, groups);
    } else if (call.problem.even) {
      even_shares<T, Bits>(call, groups);
    } else {
      chosen<T, Bits>(call, groups);
    }
  });
}

}  // namespace baracuda
