// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "pooling/fractional_max_pool.h"
#include "runtime/dtype.h"
#include "runtime/parallel.h"

namespace baracuda {
namespace {

// Window starts of one plane, axis after axis.
template <class Real>
class Starts {
 public:
  explicit Starts(const PoolProblem &problem) : problem_(problem) {
    for (int axis = 0; axis < kPoolAxes; ++axis) start_[axis].resize(size_t(problem.axis[axis].out));
  }
  void set(const Real (&u)[kPoolAxes]) {
    for (int axis = 0; axis < kPoolAxes; ++axis)
      for (int32_t i = 0; i < problem_.axis[axis].out; ++i)
        start_[axis][size_t(i)] = window_start(problem_.axis[axis], problem_.placement, i, u[axis]);
  }
  int32_t operator()(int axis, int32_t i) const { return start_[axis][size_t(i)]; }

 private:
  const PoolProblem &problem_;
  std::vector<int32_t> start_[kPoolAxes];
};

template <class T, class Index>
class Forward {
 public:
  using Real = PoolReal<T>::type;

  explicit Forward(const PoolForward &call) : call_(call), problem_(call.problem) {}

  // One slice of outputs along the slow axis of one plane.
  void slice(int64_t n, int64_t c, int32_t i, const Starts<Real> &starts) const {
    const T *x = static_cast<const T *>(call_.x.data) + call_.x.plane(n, c);
    T *y = static_cast<T *>(call_.y.data) + call_.y.plane(n, c);
    Index *indices = static_cast<Index *>(call_.indices.data);
    if (indices) indices += call_.indices.plane(n, c);
    const int64_t origin = problem_.index_origin(n * problem_.channels + c);
    for (int32_t m = 0; m < problem_.axis[kMiddle].out; ++m) {
      for (int32_t j = 0; j < problem_.axis[kFast].out; ++j) {
        int64_t cell = 0;
        const T best = maximum(x, starts(kSlow, i), starts(kMiddle, m), starts(kFast, j), cell);
        y[call_.y.cell(i, m, j)] = best;
        if (indices) indices[call_.indices.cell(i, m, j)] = Index(origin + cell);
      }
    }
  }

 private:
  T maximum(const T *x, int32_t slow, int32_t middle, int32_t fast, int64_t &cell) const {
    const PoolAxis *axis = problem_.axis;
    const bool last_nan = problem_.placement == Placement::torch;
    T best = x[call_.x.cell(slow, middle, fast)];
    Real highest = Real(best);
    cell = (int64_t(slow) * axis[kMiddle].in + middle) * axis[kFast].in + fast;
    for (int32_t s = slow; s < slow + axis[kSlow].window; ++s) {
      for (int32_t m = middle; m < middle + axis[kMiddle].window; ++m) {
        for (int32_t f = fast; f < fast + axis[kFast].window; ++f) {
          const T value = x[call_.x.cell(s, m, f)];
          if (!beats(Real(value), highest, last_nan)) continue;
          best = value;
          highest = Real(value);
          cell = (int64_t(s) * axis[kMiddle].in + m) * axis[kFast].in + f;
        }
      }
    }
    return best;
  }

  const PoolForward &call_;
  const PoolProblem &problem_;
};

template <class T, class Index>
void forward(const PoolForward &call) {
  using Real = PoolReal<T>::type;
  const PoolProblem &problem = call.problem;
  const int64_t slices = problem.axis[kSlow].out;
  const Forward<T, Index> body(call);
  const int64_t window =
      int64_t(problem.axis[kSlow].window) * problem.axis[kMiddle].window * problem.axis[kFast].window;
  parallel_for(problem.planes() * slices, problem.planes() * problem.out_plane() * (window + 4),
               [&](int64_t begin, int64_t end) {
                 Starts<Real> starts(problem);
                 int64_t known = -1;
                 for (int64_t place = begin; place < end; ++place) {
                   const int64_t plane = place / slices;
                   const int64_t n = plane / problem.channels;
                   const int64_t c = plane % problem.channels;
                   if (plane != known) {
                     Real u[kPoolAxes];
                     plane_samples(call.samples, problem, n, c, u);
                     starts.set(u);
                     known = plane;
                   }
                   body.slice(n, c, int32_t(place % slices), starts);
                 }
               });
}

// Where each window of an axis may begin, and one past the last cell it may hold.
struct Span {
  int32_t begin;
  int32_t end;

  bool holds(int64_t cell) const { return begin <= cell && cell < end; }
};

std::vector<Span> spans_of(const PoolAxis &axis) {
  std::vector<Span> spans(size_t(axis.out));
  for (int32_t i = 0; i < axis.out; ++i) spans[size_t(i)] = {axis.earliest(i), axis.latest(i) + axis.window};
  return spans;
}

template <class T, class Index>
class Backward {
 public:
  using Real = PoolReal<T>::type;

  explicit Backward(const PoolBackward &call) : call_(call), problem_(call.problem) {
    for (int axis = 0; axis < kPoolAxes; ++axis) spans_[axis] = spans_of(problem_.axis[axis]);
  }

  // The slices [begin, end) of one plane along the slow axis. `sums` is room that calls share.
  void slices(int64_t plane, int32_t begin, int32_t end, std::vector<Real> &sums) const {
    const PoolAxis *axis = problem_.axis;
    const int64_t n = plane / problem_.channels;
    const int64_t c = plane % problem_.channels;
    const int64_t slice = int64_t(axis[kMiddle].in) * axis[kFast].in;
    sums.assign(size_t((end - begin) * slice), Real(0));
    gather(n, c, problem_.index_origin(plane) + begin * slice, begin, end, sums);
    T *dx = static_cast<T *>(call_.dx.data) + call_.dx.plane(n, c);
    size_t at = 0;
    for (int32_t s = begin; s < end; ++s) {
      for (int32_t m = 0; m < axis[kMiddle].in; ++m) {
        for (int32_t f = 0; f < axis[kFast].in; ++f, ++at) {
          T &to = dx[call_.dx.cell(s, m, f)];
          to = T(call_.accumulate ? Real(to) + sums[at] : sums[at]);
        }
      }
    }
  }

 private:
  // `origin` is the index of the first cell of the slices.
  void gather(int64_t n, int64_t c, int64_t origin, int32_t begin, int32_t end, std::vector<Real> &sums) const {
    const PoolAxis *axis = problem_.axis;
    const T *dy = static_cast<const T *>(call_.dy.data) + call_.dy.plane(n, c);
    const Index *indices = static_cast<const Index *>(call_.indices.data) + call_.indices.plane(n, c);
    const int32_t first = windows_over(axis[kSlow], begin).begin;
    const int32_t last = windows_over(axis[kSlow], end - 1).end;
    for (int32_t i = first; i < last; ++i) {
      for (int32_t m = 0; m < axis[kMiddle].out; ++m) {
        for (int32_t j = 0; j < axis[kFast].out; ++j) {
          // Unsigned, because an index may be any number.
          const uint64_t at = uint64_t(indices[call_.indices.cell(i, m, j)]) - uint64_t(origin);
          if (at >= sums.size()) continue;
          const uint64_t row = at / uint64_t(axis[kFast].in);
          if (!spans_[kFast][size_t(j)].holds(int64_t(at % uint64_t(axis[kFast].in))) ||
              !spans_[kMiddle][size_t(m)].holds(int64_t(row % uint64_t(axis[kMiddle].in))) ||
              !spans_[kSlow][size_t(i)].holds(begin + int64_t(row / uint64_t(axis[kMiddle].in))))
            continue;
          sums[size_t(at)] += Real(dy[call_.dy.cell(i, m, j)]);
        }
      }
    }
  }

  const PoolBackward &call_;
  const PoolProblem &problem_;
  std::vector<Span> spans_[kPoolAxes];
};

template <class T, class Index>
void backward(const PoolBackward &call) {
  const PoolProblem &problem = call.problem;
  const int64_t slices = problem.axis[kSlow].in;
  const Backward<T, Index> body(call);
  parallel_for(problem.planes() * slices, problem.planes() * (problem.in_plane() + problem.out_plane()) * 8,
               [&](int64_t begin, int64_t end) {
                 std::vector<typename PoolReal<T>::type> sums;
                 while (begin < end) {
                   const int64_t plane = begin / slices;
                   const int64_t stop = std::min(end, (plane + 1) * slices);
                   body.slices(plane, int32_t(begin - plane * slices), int32_t(stop - plane * slices), sums);
                   begin = stop;
                 }
               });
}

// Calls body with the element's type and the index's.
template <class Body>
void dispatch(DLDataType dtype, DLDataType index_dtype, const Body &body) {
  dispatch_dtype<float16, bfloat16, float, double>(dtype, [&](auto element) {
    dispatch_dtype<int32_t, int64_t>(index_dtype, [&](auto index) { body(element, index); });
  });
}

}  // namespace

void fractional_max_pool_cpu(const PoolForward &call) {
  dispatch(call.dtype, call.index_dtype, [&](auto element, auto index) {
    forward<typename decltype(element)::type, typename decltype(index)::type>(call);
  });
}

void fractional_max_pool_backward_cpu(const PoolBackward &call) {
  dispatch(call.dtype, call.index_dtype, [&](auto element, auto index) {
    backward<typename decltype(element)::type, typename decltype(index)::type>(call);
  });
}

}  // namespace baracuda
