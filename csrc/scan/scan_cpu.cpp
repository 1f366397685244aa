// SPDX-License-Identifier: Apache-2.0
// One row after the other, element after element; rows in parallel.
#include <algorithm>
#include <cstring>

#include "runtime/parallel.h"
#include "scan/scan_select.h"

namespace baracuda::scan {
namespace {

int64_t row_offset(const Geometry &g, int operand, int64_t row) {
  int64_t offset = 0;
  for (int axis = g.rank - 1; axis >= 0; --axis) {
    offset += row % g.extent[axis] * g.stride[operand][axis];
    row /= g.extent[axis];
  }
  return offset;
}

template <int kCount, int k = 0, class Body>
void for_each(const Body &body) {
  if constexpr (k < kCount) {
    body(std::integral_constant<int, k>{});
    for_each<kCount, k + 1>(body);
  }
}

template <class Op>
void scan_row(const Op &op, const Geometry &g, int64_t row) {
  using A = Op::Acc;
  constexpr int kInputs = Op::Inputs::size;
  constexpr int kOutputs = Op::Outputs::size;
  constexpr int kInitialSlot = kInputs + kOutputs;
  const std::byte *in[kInputs];
  std::byte *out[kOutputs];
  for_each<kInputs>(
      [&](auto k) { in[k()] = g.data[k()] + row_offset(g, k(), row) * int64_t(sizeof(at<k(), typename Op::Inputs>)); });
  for_each<kOutputs>([&](auto k) {
    constexpr int slot = kInputs + k();
    out[k()] = g.data[slot] ? g.data[slot] + row_offset(g, slot, row) * int64_t(sizeof(at<k(), typename Op::Outputs>))
                            : nullptr;
  });
  const auto load = [&](auto k, int64_t place) {
    using T = at<k(), typename Op::Inputs>;
    return widen<A>(reinterpret_cast<const T *>(in[k()])[place * g.step[k()]]);
  };
  typename Op::Value value = op.start();
  A behind = A(0);
  if constexpr (Op::kInitial || Op::kFinal) {
    using T = at<0, typename Op::Inputs>;
    if (g.data[kInitialSlot]) {
      const A initial = widen<A>(reinterpret_cast<const T *>(g.data[kInitialSlot])[row_offset(g, kInitialSlot, row)]);
      if constexpr (Op::kInitial) value = initial;
      if constexpr (Op::kFinal) behind = initial;
    }
  }
  for (int64_t place = 0; place < g.length; ++place) {
    typename Op::Item item = {};
    for_each<kInputs>([&](auto k) { item.in[k()] = load(k, place); });
    if constexpr (Op::kNeighbour) {
      if (place + 1 < g.length) {
        item.next = load(std::integral_constant<int, kInputs - 1>{}, place + 1);
      } else if constexpr (Op::kFinal) {
        item.next = behind;
      } else {
        item.next = op.behind(item.in[kInputs - 1]);
      }
    }
    if constexpr (Op::kPosition) item.position = uint32_t(op.flags.reverse ? g.length - 1 - place : place);
    typename Op::Result result;
    value = op.step(value, item, result);
    for_each<kOutputs>([&](auto k) {
      using U = at<k(), typename Op::Outputs>;
      if (!out[k()]) return;
      U &to = reinterpret_cast<U *>(out[k()])[place * g.step[kInputs + k()]];
      if constexpr (Op::kPosition && k() == 1) {
        to = U(index_of(result));
      } else {
        to = narrow<U>(result.out[k()]);
      }
    });
  }
  if constexpr (Op::kFinal) {
    using T = at<0, typename Op::Outputs>;
    constexpr int slot = kInitialSlot + 1;
    if (g.data[slot]) reinterpret_cast<T *>(g.data[slot])[row_offset(g, slot, row)] = narrow<T>(value);
  }
}

template <class Op>
void run(const Flags &flags, const Geometry &g) {
  Op op;
  op.flags = flags;
  parallel_for(g.rows, g.rows * g.length * 8, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) scan_row(op, g, row);
  });
}

// Calls body(place, index) for each element, `place` in row-major order.
template <class Body>
void each_element(const Shape &shape, const Body &body) {
  int64_t index[kMaxRank] = {};
  const int64_t count = shape.count();
  for (int64_t place = 0; place < count; ++place) {
    body(place, index);
    for (int axis = shape.rank - 1; axis >= 0 && ++index[axis] == shape[axis]; --axis) index[axis] = 0;
  }
}

int64_t offset_at(const Tensor &tensor, const int64_t *index) {
  int64_t offset = 0;
  for (int axis = 0; axis < tensor.rank(); ++axis) offset += index[axis] * tensor.stride[axis];
  return offset;
}

}  // namespace

RunCpu scan_cpu(const Choice &choice) {
  RunCpu chosen = nullptr;
  dispatch_dtype<float, double, float16, bfloat16, int8_t, int16_t, int32_t, int64_t, uint8_t, bool>(
      choice.in, [&](auto tag) {
        select_operator<typename decltype(tag)::type>(choice,
                                                      [&](auto op) { chosen = run<typename decltype(op)::type>; });
      });
  return chosen;
}

void mark_cpu(const MarkSource &source) {
  dispatch_dtype<int32_t, int64_t, float, double, float16, bfloat16>(source.from.dtype, [&](auto tag) {
    using T = decltype(tag)::type;
    const T *from = source.from.as<T>();
    each_element(source.from.shape, [&](int64_t place, const int64_t *index) {
      const int64_t at = offset_at(source.from, index);
      source.marks.data[place] =
          std::byte(is_mark<T>(source, index[source.axis], [&](int64_t step) { return from[at + step]; }));
    });
  });
}

void zero_cpu(const Tensor &tensor) {
  const size_t size = tensor.dtype.bits / 8;
  each_element(tensor.shape, [&](int64_t, const int64_t *index) {
    std::memset(tensor.data + offset_at(tensor, index) * int64_t(size), 0, size);
  });
}

}  // namespace baracuda::scan
