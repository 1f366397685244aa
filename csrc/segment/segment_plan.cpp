// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstring>

#include "baracuda/segment.h"
#include "runtime/plan.h"
#include "segment/segment.h"

namespace baracuda {
namespace {

template <class... Types>
bool is_one_of(DLDataType dtype) {
  return dispatch_dtype<Types...>(dtype, [](auto) {});
}

SegmentView view_of(const Tensor &tensor) { return {tensor.data, tensor.stride[0], tensor.stride[1]}; }

SegmentIndices indices_of(const Tensor &tensor) { return {tensor.data, tensor.stride[0], tensor.dtype.bits == 64}; }

class SegmentPlan : public Plan {
 protected:
  using Plan::Plan;

  template <class Descriptor>
  void read_problem(const Descriptor &desc) {
    if (desc.kind < BARACUDA_SEGMENT_SUM || desc.kind > BARACUDA_SEGMENT_PROD)
      refuse("kind: expected sum, mean, max, min or prod, got ", desc.kind);
    if (desc.ids < BARACUDA_SEGMENT_UNSORTED || desc.ids > BARACUDA_SEGMENT_OFFSETS)
      refuse("ids: expected unsorted, sorted or offsets, got ", desc.ids);
    if (desc.ties != BARACUDA_TIES_FIRST && desc.ties != BARACUDA_TIES_EVEN)
      refuse("ties: expected first or even, got ", desc.ties);
    check_dtype("index_dtype", desc.index_dtype);
    if (!is_one_of<int32_t, int64_t>(desc.index_dtype))
      refuse("index_dtype: expected int32 or int64, got ", dtype_name(desc.index_dtype));
    problem_.rows = desc.num_inputs;
    problem_.columns = desc.embedding_dim;
    problem_.segments = desc.num_segments;
    problem_.kind = SegmentKind(desc.kind);
    problem_.ids = SegmentIds(desc.ids);
    problem_.dtype = desc.dtype;
    problem_.wide_index = desc.index_dtype.bits == 64;
    problem_.even = desc.ties == BARACUDA_TIES_EVEN;
    problem_.any_order = !options_.deterministic;

    check_shape("num_inputs, embedding_dim", {2, {desc.num_inputs, desc.embedding_dim}}, DTypeOf<int64_t>::value,
                rows_shape_);
    check_shape("num_segments, embedding_dim", {2, {desc.num_segments, desc.embedding_dim}}, DTypeOf<int64_t>::value,
                segments_shape_);
    const bool offsets = problem_.ids == SegmentIds::offsets;
    if (offsets && desc.num_segments == INT64_MAX) refuse("num_segments: one more offset can't be counted");
    Shape shape;
    check_shape(offsets ? "num_segments" : "num_inputs", {1, {offsets ? desc.num_segments + 1 : desc.num_inputs}},
                desc.index_dtype, shape);
    ids_ = {offsets ? "offsets" : "segment_ids", Role::in, desc.index_dtype, shape};
    arg_ = {"arg", Role::in, desc.index_dtype, segments_shape_};
  }

  void check_arg_rows() const {
    if (!problem_.wide_index && problem_.rows > INT32_MAX)
      refuse("index_dtype: int32 can't count the ", problem_.rows, " rows that arg may name");
  }

  void set_sku(const char *op, bool exact) {
    const bool integers = !is_one_of<float16, bfloat16, float, double>(problem_.dtype);
    const char *real = integers ? "int64" : problem_.dtype == DTypeOf<double>::value ? "float64" : "float32";
    sku_ = {"segment",
            op,
            dtype_name(problem_.dtype),
            problem_.wide_index ? "int64" : "int32",
            "cpu",
            "cpu",
            {exact || integers ? "exact" : real, exact ? "none" : real, true, true}};
    path_ = "direct";
  }

  // What the cheapest way must move: rows read or written once, and segments.
  void add_cost(DLDataType dtype, const Shape &shape) { cost_.bytes += storage_bytes(dtype, shape.count()); }

  // After everything else: limits, workspace and names of the CUDA kernels.
  template <class Way>
  void choose_device(bool brings_together, bool names_rows, const Way &way) {
    if constexpr (kWithCuda) {
      if (!device().is_cuda()) return;
      const bool unsorted = problem_.ids == SegmentIds::unsorted;
      if (((brings_together && unsorted) || names_rows) && problem_.rows > kSegmentMostRows)
        unsupported(name_, ": num_inputs: at most ", kSegmentMostRows, " rows unless ids are sorted, and for arg, got ",
                    problem_.rows);
      if (brings_together && unsorted && problem_.segments > kSegmentMostRows)
        unsupported(name_, ": num_segments: at most ", kSegmentMostRows, " unless ids are sorted, got ",
                    problem_.segments);
      const SegmentWay chosen = way();
      workspace_size_ = chosen.workspace;
      path_ = chosen.path;
      sku_.guarantee.bit_stable_on_same_hardware = sku_.guarantee.deterministic = chosen.deterministic;
      sku_.arch = segment_arch(name_);
      sku_.backend = "bespoke";
    }
  }

  SegmentProblem problem_;
  Shape rows_shape_;
  Shape segments_shape_;
  OperandSpec ids_;
  OperandSpec arg_;
};

class SegmentReducePlan final : public SegmentPlan {
 public:
  static constexpr const char *kName = "SegmentReducePlan";

  SegmentReducePlan(const baracuda_segment_reduce_desc &desc, Options options)
      : SegmentPlan(kName, std::move(options)) {
    const DTypeInfo &dtype = check_dtype("dtype", desc.dtype);
    if (!is_one_of<float16, bfloat16, float, double, int8_t, uint8_t, int32_t, int64_t>(desc.dtype))
      unsupported(name_, ": dtype: expected float16, bfloat16, float32, float64, int8, uint8, int32 or int64, got ",
                  dtype.name);
    read_problem(desc);
    const bool return_arg = desc.return_arg != 0;
    if (return_arg && !problem_.extreme()) refuse("return_arg: only max and min have one");
    if (return_arg && problem_.even) refuse("ties: even has no use for the one row of return_arg");
    if (return_arg) check_arg_rows();
    dispatch_dtype<float16, bfloat16, float, double, int8_t, uint8_t, int32_t, int64_t>(
        desc.dtype, [&](auto tag) { empty_bits_ = empty_bits<typename decltype(tag)::type>(desc.empty_value); });

    operands_ = {
        {"input", Role::in, desc.dtype, rows_shape_}, ids_, {"output", Role::out, desc.dtype, segments_shape_}};
    if (return_arg) {
      arg_.role = Role::out;
      operands_.push_back(arg_);
    }
    for (const OperandSpec &operand : operands_) add_cost(operand.dtype, operand.shape);
    cost_.operations = rows_shape_.count();
    set_sku("segment_reduce", problem_.extreme());
    choose_device(true, return_arg, [&] { return segment_reduce_way(problem_, return_arg); });
  }

 protected:
  void run(const Call &call) const override {
    if (segments_shape_.count() == 0) return;
    SegmentForward forward;
    forward.problem = problem_;
    forward.input = view_of(call.operands[kInput]);
    forward.ids = indices_of(call.operands[kIds]);
    forward.output = view_of(call.operands[kOutput]);
    if (operands_.size() > kArg) forward.arg = view_of(call.operands[kArg]);
    forward.empty_bits = empty_bits_;
    if constexpr (kWithCuda) {
      if (device().is_cuda()) {
        segment_reduce_cuda(forward, call.workspace, call.stream);
        return;
      }
    }
    segment_reduce_cpu(forward);
  }

 private:
  enum { kInput, kIds, kOutput, kArg };

  template <class T>
  uint64_t empty_bits(const baracuda_optional_double &given) const {
    T value;
    if (given.present) {
      value = empty_of<T>(given.value);
    } else if (problem_.kind == SegmentKind::prod) {
      value = T(1);
    } else if (problem_.extreme()) {
      return lowest<T>();
    } else {
      value = T(0);
    }
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    return bits;
  }

  template <class T>
  T empty_of(double value) const {
    if constexpr (std::is_integral_v<T>) {
      constexpr int kBits = 8 * sizeof(T) - std::is_signed_v<T>;
      const double limit = std::ldexp(1.0, kBits);
      if (!(value == std::floor(value) && value < limit && value >= (std::is_signed_v<T> ? -limit : 0.0)))
        refuse("empty_value: expected an integer of ", dtype_name(problem_.dtype), ", got ", value);
      return T(value);
    } else if constexpr (std::is_same_v<T, double>) {
      return value;
    } else {
      return T(float(value));
    }
  }

  // What no element is below, in the order of the kind.
  template <class T>
  uint64_t lowest() const {
    using Bits = BitsOf<T>;
    const SegmentOrder<Bits> order = segment_order<Bits>(problem_.dtype, problem_.kind == SegmentKind::min);
    // An infinity has the highest magnitude that is a number.
    if (order.magnitude != 0) return Bits(order.infinity | (order.reverse ? Bits(0) : order.sign));
    return order.bits(0);
  }

  uint64_t empty_bits_ = 0;
};

class SegmentReduceBackwardPlan final : public SegmentPlan {
 public:
  static constexpr const char *kName = "SegmentReduceBackwardPlan";

  SegmentReduceBackwardPlan(const baracuda_segment_reduce_backward_desc &desc, Options options)
      : SegmentPlan(kName, std::move(options)) {
    const DTypeInfo &dtype = check_dtype("dtype", desc.dtype);
    if (!is_one_of<float16, bfloat16, float, double>(desc.dtype))
      unsupported(name_, ": dtype: expected float16, bfloat16, float32 or float64, got ", dtype.name);
    read_problem(desc);
    if (desc.saved != BARACUDA_SAVED_INPUT && desc.saved != BARACUDA_SAVED_ARG)
      refuse("saved: expected input or arg, got ", desc.saved);
    const bool takes_arg = desc.saved == BARACUDA_SAVED_ARG;
    if (takes_arg && !problem_.extreme()) refuse("saved: only max and min have an arg");
    if (takes_arg && problem_.even) refuse("saved: ties even needs the input, arg names one row of several");
    if (takes_arg) check_arg_rows();
    const bool takes_input = !takes_arg && (problem_.extreme() || problem_.kind == SegmentKind::prod);

    operands_ = {{"d_output", Role::in, desc.dtype, segments_shape_}, ids_};
    if (takes_input) add(input_, {"input", Role::in, desc.dtype, rows_shape_});
    if (takes_arg) add(arg_at_, arg_);
    add(d_input_, {"d_input", Role::out, desc.dtype, rows_shape_});
    for (const OperandSpec &operand : operands_) add_cost(operand.dtype, operand.shape);
    cost_.operations = rows_shape_.count();
    set_sku("segment_reduce_backward", problem_.kind == SegmentKind::sum || (problem_.extreme() && !problem_.even));
    const bool counts = problem_.kind == SegmentKind::mean && problem_.ids == SegmentIds::unsorted;
    choose_device(takes_input, takes_input || counts, [&] { return segment_reduce_backward_way(problem_, takes_arg); });
  }

 protected:
  void run(const Call &call) const override {
    if (rows_shape_.count() == 0) return;
    SegmentBackward backward;
    backward.problem = problem_;
    backward.d_output = view_of(call.operands[0]);
    backward.ids = indices_of(call.operands[1]);
    if (input_ >= 0) backward.input = view_of(call.operands[input_]);
    if (arg_at_ >= 0) backward.arg = view_of(call.operands[arg_at_]);
    backward.d_input = view_of(call.operands[d_input_]);
    if constexpr (kWithCuda) {
      if (device().is_cuda()) {
        segment_reduce_backward_cuda(backward, call.workspace, call.stream);
        return;
      }
    }
    segment_reduce_backward_cpu(backward);
  }

 private:
  void add(int &place, const OperandSpec &operand) {
    place = int(operands_.size());
    operands_.push_back(operand);
  }

  int input_ = -1;
  int arg_at_ = -1;
  int d_input_ = -1;
};

}  // namespace
}  // namespace baracuda

extern "C" baracuda_status baracuda_segment_reduce_plan_create(const baracuda_segment_reduce_desc *desc,
                                                               const baracuda_plan_options *options,
                                                               baracuda_plan **plan) {
  return baracuda::create_plan<baracuda::SegmentReducePlan>(desc, options, plan);
}

extern "C" baracuda_status baracuda_segment_reduce_backward_plan_create(
    const baracuda_segment_reduce_backward_desc *desc, const baracuda_plan_options *options, baracuda_plan **plan) {
  return baracuda::create_plan<baracuda::SegmentReduceBackwardPlan>(desc, options, plan);
}
