// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "runtime/device.h"
#include "runtime/tensor.h"
#include "scan/scan_ops.h"

namespace baracuda::scan {

// Inputs, outputs, and the values before the first and after the last element.
constexpr int kMaxScanOperands = 7;

// The operands of one scan: `rows` independent lines of `length` elements. Steps are in elements
// and in scan order, so a reverse scan begins at the far end and steps backwards. Row axes run from
// the one with the longest steps to the one with the shortest; axes that continue each other in
// every operand are one.
struct Geometry {
  int64_t length = 0;
  int64_t rows = 1;
  int rank = 0;
  int64_t extent[kMaxRank] = {};
  std::byte *data[kMaxScanOperands] = {};  // NULL: absent
  int64_t step[kMaxScanOperands] = {};
  int64_t stride[kMaxScanOperands][kMaxRank] = {};
};

// Builds a Geometry, operand by operand.
class GeometryBuilder {
 public:
  GeometryBuilder(const Shape &shape, int axis, bool reverse) : shape_(shape), axis_(axis), reverse_(reverse) {}
  // An operand of the whole shape.
  void line(int slot, const Tensor &tensor);
  // An operand of the shape without the axis: one element for each row.
  void row(int slot, const Tensor &tensor);
  // `leader`: the slot whose strides order the row axes, an output.
  Geometry build(int leader) const;

 private:
  void add(int slot, const Tensor &tensor, bool line);

  Shape shape_;
  int axis_;
  bool reverse_;
  std::byte *data_[kMaxScanOperands] = {};
  int64_t stride_[kMaxScanOperands][kMaxRank] = {};
};

enum class Operation {
  sum,
  product,
  extremum,
  indexed_extremum,
  marks,  // of the elements that are new extrema
  log_sum_exp,
  linear_recurrence,
  product_gradient,
  log_sum_exp_gradient,
  extremum_gradient,
  marked_extremum_gradient,
  linear_recurrence_gradient,
};

// What picks an operator's instance: `out` is the output's type for sums and products, and the
// indices' for indexed extrema.
struct Choice {
  Operation operation;
  DLDataType in;
  DLDataType out;
  bool exclusive = false;  // gradients of exclusive scans are operators of their own
};

using RunCpu = void (*)(const Flags &flags, const Geometry &geometry);
// NULL where there is none.
RunCpu scan_cpu(const Choice &choice);

struct CudaScan {
  // Bytes for any strides of operands of this many rows and elements.
  size_t (*workspace)(int64_t rows, int64_t length);
  const char *(*path)(const Geometry &geometry);
  void (*run)(const Flags &flags, const Geometry &geometry, std::byte *workspace, Stream stream);
  std::string (*arch)(const char *plan);
};
const CudaScan *scan_cuda(const Choice &choice);

// Marks of new extrema, from what else tells them. `marks` and `from` are of one shape.
struct MarkSource {
  Tensor marks;
  Tensor from;  // indices, or the outputs of an exclusive scan
  int axis;
  bool reverse;
  bool exclusive;
};
// Whether the element at `place` along the axis is a new extremum. `from(step)` is what stands
// `step` in memory away from its place. In an exclusive scan an element shows in the output after
// it, and the last one in none.
template <class T, class From>
BARACUDA_HD inline bool is_mark(const MarkSource &source, int64_t place, const From &from) {
  const int64_t length = source.from.shape.extent[source.axis];
  const int64_t onward = source.reverse ? -1 : 1;
  const bool first = place == (source.reverse ? length - 1 : 0);
  const bool last = place == (source.reverse ? 0 : length - 1);
  if (source.exclusive && last) return false;
  const int64_t step = source.exclusive ? onward * source.from.stride[source.axis] : 0;
  if constexpr (std::is_integral_v<T>) {
    return int64_t(from(step)) == place;
  } else {
    if (first) return true;
    const auto here = widen<Accumulator<T>>(from(0));
    const auto after = widen<Accumulator<T>>(from(step));
    return !(here == after || (here != here && after != after));
  }
}
void mark_cpu(const MarkSource &source);
void mark_cuda(const MarkSource &source, Stream stream);

// Zeros in every element, for rows without elements.
void zero_cpu(const Tensor &tensor);
void zero_cuda(const Tensor &tensor, Stream stream);

}  // namespace baracuda::scan
