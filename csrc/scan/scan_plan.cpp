// SPDX-License-Identifier: Apache-2.0
#include "baracuda/scan.h"
#include "runtime/plan.h"
#include "runtime/workspace.h"
#include "scan/scan.h"

namespace baracuda::scan {
namespace {

constexpr DLDataType kInt64 = DTypeOf<int64_t>::value;
constexpr DLDataType kInt32 = DTypeOf<int32_t>::value;
constexpr DLDataType kBool = DTypeOf<bool>::value;
constexpr const char *kKinds[] = {"cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "linear_recurrence"};

bool given(DLDataType dtype) { return dtype.bits != 0; }
bool is_floating(DLDataType dtype) { return dtype.code == kDLFloat || dtype.code == kDLBfloat; }
bool is_extremum(int kind) { return kind == BARACUDA_CUMMAX || kind == BARACUDA_CUMMIN; }

// What forward and backward have in common: the problem's shape, and a scan of one kind that may
// run as another operation first.
class AxisPlan : public Plan {
 public:
  using Plan::Plan;

 protected:
  void check_problem(int kind, const baracuda_shape &shape, int64_t axis, DLDataType dtype) {
    if (kind < BARACUDA_CUMSUM || kind > BARACUDA_LINEAR_RECURRENCE) refuse("kind: ", kind, " is none");
    kind_ = kind;
    dtype_ = check_dtype("dtype", dtype).dtype;
    check_shape("shape", shape, dtype, shape_);
    if (axis < -shape_.rank || axis >= shape_.rank)
      refuse("axis: expected ", -shape_.rank, " to ", shape_.rank - 1, " for shape ", to_string(shape_), ", got ",
             axis);
    axis_ = int(axis < 0 ? axis + shape_.rank : axis);
    rows_shape_.rank = 0;
    for (int i = 0; i < shape_.rank; ++i)
      if (i != axis_) rows_shape_[rows_shape_.rank++] = shape_[i];
    rows_ = rows_shape_.count();
    length_ = shape_[axis_];
  }

  DLDataType check_index_dtype(DLDataType dtype) const {
    if (!given(dtype)) return kInt64;
    if (!(dtype == kInt64) && !(dtype == kInt32))
      refuse("index_dtype: expected int32 or int64, got ", dtype_name(dtype));
    if (dtype == kInt32 && length_ > int64_t(INT32_MAX))
      refuse("index_dtype: int32 can't hold the indices of an axis of ", length_);
    return dtype;
  }
  void check_length_for_indices() const {
    if (length_ >= int64_t(kNoIndex)) unsupported(name_, ": shape: no kernel for indices along an axis of ", length_);
  }
  void check_ties(int ties) const {
    if (ties != BARACUDA_SCAN_TIES_FIRST && ties != BARACUDA_SCAN_TIES_LAST)
      refuse("ties: expected first or last, got ", ties);
  }

  // One run of an operation on this plan's device.
  struct Pass {
    RunCpu cpu = nullptr;
    const CudaScan *cuda = nullptr;
    size_t workspace = 0;
  };
  Pass pass_for(Operation operation, DLDataType in, DLDataType out) const {
    const Choice choice = {operation, in, out, flags_.exclusive};
    Pass pass;
    if constexpr (kWithCuda) {
      if (device().is_cuda()) {
        pass.cuda = scan_cuda(choice);
        if (pass.cuda) pass.workspace = pass.cuda->workspace(rows_, length_);
      }
    }
    if (!device().is_cuda()) pass.cpu = scan_cpu(choice);
    if (!pass.cpu && !pass.cuda)
      unsupported(name_, ": dtype: no kernel for ", kKinds[kind_], " of ", std::string(dtype_name(in)),
                  in == out || !given(out) ? std::string() : text(" to ", dtype_name(out)));
    return pass;
  }
  void run_pass(const Pass &pass, const Flags &flags, const Geometry &geometry, std::byte *workspace,
                Stream stream) const {
    if constexpr (kWithCuda) {
      if (pass.cuda) {
        pass.cuda->run(flags, geometry, workspace, stream);
        return;
      }
    }
    (void)workspace;
    (void)stream;
    pass.cpu(flags, geometry);
  }

  void describe_kernel(const char *op, const Pass &pass, DLDataType aux, bool exact) {
    const char *accumulator = exact || !is_floating(dtype_) ? (is_extremum(kind_) ? "none" : "int64")
                              : dtype_.bits == 64           ? "float64"
                                                            : "float32";
    sku_ = {"scan",
            op,
            dtype_name(dtype_),
            given(aux) ? dtype_name(aux) : nullptr,
            "cpu",
            "cpu",
            {exact || !is_floating(dtype_) ? "exact" : accumulator, accumulator, true, true}};
    path_ = shape_.count() == 0 ? "empty" : "rows";
    if constexpr (kWithCuda) {
      if (pass.cuda) {
        sku_.arch = pass.cuda->arch(name_);
        sku_.backend = "bespoke";
        if (shape_.count() > 0) {
          // Row-major operands, of which only the steps matter here.
          Tensor tensor;
          static std::byte somewhere;
          tensor.data = &somewhere;
          tensor.dtype = dtype_;
          tensor.shape = shape_;
          set_row_major_strides(tensor);
          GeometryBuilder builder(shape_, axis_, false);
          builder.line(0, tensor);
          path_ = pass.cuda->path(builder.build(0));
        }
      }
    }
  }

  int64_t bytes_of(DLDataType dtype) const { return storage_bytes(dtype, shape_.count()); }
  bool empty() const { return shape_.count() == 0; }

  int kind_ = 0;
  Shape shape_;
  int axis_ = 0;
  Shape rows_shape_;
  int64_t rows_ = 0;
  int64_t length_ = 0;
  DLDataType dtype_ = {};
  Flags flags_;
};

class ScanPlan final : public AxisPlan {
 public:
  static constexpr const char *kName = "ScanPlan";

  ScanPlan(const baracuda_scan_desc &desc, Options options) : AxisPlan(kName, std::move(options)) {
    check_problem(desc.kind, desc.shape, desc.axis, desc.dtype);
    check_ties(desc.ties);
    const bool accumulates = kind_ == BARACUDA_CUMSUM || kind_ == BARACUDA_CUMPROD;
    const bool integral = dtype_.code == kDLInt || dtype_.code == kDLUInt || dtype_.code == kDLBool;
    DLDataType out = given(desc.out_dtype)     ? check_dtype("out_dtype", desc.out_dtype).dtype
                     : accumulates && integral ? kInt64
                                               : dtype_;
    if (!accumulates && !(out == dtype_))
      refuse("out_dtype: ", kKinds[kind_], " gives ", std::string(dtype_name(dtype_)), ", ", dtype_name(out),
             " was asked for");
    if (desc.indices && !is_extremum(kind_)) refuse("indices: ", kKinds[kind_], " has none");
    if (desc.ties != BARACUDA_SCAN_TIES_FIRST && !is_extremum(kind_)) refuse("ties: ", kKinds[kind_], " has none");
    if (desc.has_h0 && kind_ != BARACUDA_LINEAR_RECURRENCE) refuse("has_h0: ", kKinds[kind_], " has no h0");
    if (desc.exclusive && kind_ == BARACUDA_LINEAR_RECURRENCE) refuse("exclusive: linear_recurrence has no such form");
    const DLDataType index = check_index_dtype(desc.index_dtype);
    flags_.exclusive = desc.exclusive != 0;
    flags_.reverse = desc.reverse != 0;
    flags_.smallest = kind_ == BARACUDA_CUMMIN;
    flags_.last = desc.ties == BARACUDA_SCAN_TIES_LAST;

    Operation operation = Operation::sum;
    DLDataType aux = {};
    switch (kind_) {
      case BARACUDA_CUMSUM:
      case BARACUDA_CUMPROD:
        operation = kind_ == BARACUDA_CUMSUM ? Operation::sum : Operation::product;
        aux = out == dtype_ ? DLDataType{} : out;
        break;
      case BARACUDA_CUMMAX:
      case BARACUDA_CUMMIN:
        operation = desc.indices ? Operation::indexed_extremum : Operation::extremum;
        if (desc.indices) {
          check_length_for_indices();
          aux = index;
        }
        break;
      case BARACUDA_LOGCUMSUMEXP:
        operation = Operation::log_sum_exp;
        break;
      default:
        operation = Operation::linear_recurrence;
    }
    pass_ = pass_for(operation, dtype_, desc.indices ? index : out);
    workspace_size_ = pass_.workspace;
    launches_only_ = workspace_size_ == 0;

    if (kind_ == BARACUDA_LINEAR_RECURRENCE) {
      operands_ = {{"a", Role::in, dtype_, shape_}, {"b", Role::in, dtype_, shape_}, {"h", Role::out, dtype_, shape_}};
      inputs_ = 2;
      if (desc.has_h0) operands_.push_back({"h0", Role::in, dtype_, rows_shape_});
    } else {
      operands_ = {{"x", Role::in, dtype_, shape_}, {"y", Role::out, out, shape_}};
      inputs_ = 1;
      if (desc.indices) operands_.push_back({"indices", Role::out, index, shape_});
    }
    has_h0_ = desc.has_h0 != 0;
    cost_.bytes = inputs_ * bytes_of(dtype_) + bytes_of(out) + (desc.indices ? bytes_of(index) : 0) +
                  (has_h0_ ? storage_bytes(dtype_, rows_) : 0);
    cost_.operations = shape_.count() * (kind_ == BARACUDA_LINEAR_RECURRENCE || kind_ == BARACUDA_LOGCUMSUMEXP ? 2 : 1);
    describe_kernel(kKinds[kind_], pass_, aux, is_extremum(kind_));
  }

 protected:
  void run(const Call &call) const override {
    if (empty()) return;
    GeometryBuilder builder(shape_, axis_, flags_.reverse);
    const int count = int(operands_.size()) - int(has_h0_);
    for (int slot = 0; slot < count; ++slot) builder.line(slot, call.operands[slot]);
    if (has_h0_) builder.row(count, call.operands[count]);
    run_pass(pass_, flags_, builder.build(inputs_), call.workspace, call.stream);
  }

 private:
  Pass pass_;
  int inputs_ = 1;
  bool has_h0_ = false;
};

class ScanBackwardPlan final : public AxisPlan {
 public:
  static constexpr const char *kName = "ScanBackwardPlan";

  ScanBackwardPlan(const baracuda_scan_backward_desc &desc, Options options) : AxisPlan(kName, std::move(options)) {
    check_problem(desc.kind, desc.shape, desc.axis, desc.dtype);
    check_ties(desc.ties);
    if (!is_floating(dtype_)) unsupported(name_, ": dtype: no gradient for ", dtype_name(dtype_));
    if (desc.saved < BARACUDA_SCAN_SAVED_Y || desc.saved > BARACUDA_SCAN_SAVED_INDICES)
      refuse("saved: ", desc.saved, " is none");
    if (desc.saved != BARACUDA_SCAN_SAVED_Y && !is_extremum(kind_))
      refuse("saved: ", kKinds[kind_], " has no such choice");
    if (desc.ties != BARACUDA_SCAN_TIES_FIRST && !is_extremum(kind_)) refuse("ties: ", kKinds[kind_], " has none");
    if (desc.ties != BARACUDA_SCAN_TIES_FIRST && desc.saved == BARACUDA_SCAN_SAVED_Y)
      refuse("saved: y does not tell the last of equal extrema; save x or indices");
    if (desc.has_h0 && kind_ != BARACUDA_LINEAR_RECURRENCE) refuse("has_h0: ", kKinds[kind_], " has no h0");
    if (desc.exclusive && kind_ == BARACUDA_LINEAR_RECURRENCE) refuse("exclusive: linear_recurrence has no such form");
    const DLDataType index = check_index_dtype(desc.index_dtype);
    forward_.exclusive = flags_.exclusive = desc.exclusive != 0;
    forward_.reverse = desc.reverse != 0;
    forward_.smallest = kind_ == BARACUDA_CUMMIN;
    forward_.last = desc.ties == BARACUDA_SCAN_TIES_LAST;
    flags_.reverse = !forward_.reverse;

    Operation operation = Operation::sum;
    DLDataType aux = {};
    int64_t bytes = 0;
    operands_ = {{"dy", Role::in, dtype_, shape_}};
    switch (kind_) {
      case BARACUDA_CUMSUM:
        break;
      case BARACUDA_CUMPROD:
      case BARACUDA_LOGCUMSUMEXP:
        operation = kind_ == BARACUDA_CUMPROD ? Operation::product_gradient : Operation::log_sum_exp_gradient;
        operands_.push_back({"x", Role::in, dtype_, shape_});
        operands_.push_back({"y", Role::in, dtype_, shape_});
        break;
      case BARACUDA_CUMMAX:
      case BARACUDA_CUMMIN:
        if (desc.saved == BARACUDA_SCAN_SAVED_INDICES) {
          operands_.push_back({"indices", Role::in, index, shape_});
          aux = index;
        } else {
          operands_.push_back({desc.saved == BARACUDA_SCAN_SAVED_X ? "x" : "y", Role::in, dtype_, shape_});
        }
        // The outputs of an inclusive scan tell the records themselves; else they are marked first.
        marked_ = desc.saved != BARACUDA_SCAN_SAVED_Y || flags_.exclusive;
        scan_for_marks_ = desc.saved == BARACUDA_SCAN_SAVED_X;
        operation = marked_ ? Operation::marked_extremum_gradient : Operation::extremum_gradient;
        if (scan_for_marks_) {
          check_length_for_indices();
          mark_pass_ = pass_for(Operation::marks, dtype_, {});
        }
        break;
      default:
        operation = Operation::linear_recurrence_gradient;
        operands_ = {
            {"dh", Role::in, dtype_, shape_}, {"a", Role::in, dtype_, shape_}, {"h", Role::in, dtype_, shape_}};
    }
    inputs_ = int(operands_.size());
    for (const OperandSpec &operand : operands_) bytes += bytes_of(operand.dtype);
    if (kind_ == BARACUDA_LINEAR_RECURRENCE) {
      operands_.push_back({"da", Role::out, dtype_, shape_});
      operands_.push_back({"db", Role::out, dtype_, shape_});
      has_h0_ = desc.has_h0 != 0;
      if (has_h0_) {
        operands_.push_back({"h0", Role::in, dtype_, rows_shape_});
        operands_.push_back({"dh0", Role::out, dtype_, rows_shape_});
      }
    } else {
      operands_.push_back({"dx", Role::out, dtype_, shape_});
    }
    pass_ = pass_for(operation, dtype_, kind_ == BARACUDA_CUMSUM ? dtype_ : DLDataType{});
    Workspace counter(nullptr);
    take(counter);
    workspace_size_ = counter.size();
    launches_only_ = workspace_size_ == 0;
    cost_.bytes = bytes + (kind_ == BARACUDA_LINEAR_RECURRENCE ? 2 : 1) * bytes_of(dtype_) +
                  (has_h0_ ? 2 * storage_bytes(dtype_, rows_) : 0);
    cost_.operations = shape_.count() * (kind_ == BARACUDA_CUMSUM ? 1 : 3);
    describe_kernel(kOps[kind_], pass_, aux, false);
  }

 protected:
  void run(const Call &call) const override {
    const int lines = inputs_ + (kind_ == BARACUDA_LINEAR_RECURRENCE ? 2 : 1);
    if (empty()) {
      if (has_h0_ && rows_ > 0) zero(call.operands[lines + 1], call.stream);
      return;
    }
    Workspace workspace(call.workspace);
    const Pieces pieces = take(workspace);
    GeometryBuilder builder(shape_, axis_, flags_.reverse);
    for (int slot = 0; slot < lines; ++slot) builder.line(slot, call.operands[slot]);
    if (marked_) {
      Tensor marks;
      marks.data = pieces.marks;
      marks.dtype = kBool;
      marks.shape = shape_;
      set_row_major_strides(marks);
      make_marks(call, marks, pieces.scan);
      builder.line(1, marks);
    }
    if (has_h0_) {
      builder.row(lines, call.operands[lines]);
      builder.row(lines + 1, call.operands[lines + 1]);
    }
    run_pass(pass_, flags_, builder.build(inputs_), pieces.scan, call.stream);
  }

 private:
  static constexpr const char *kOps[] = {"cumsum_backward", "cumprod_backward",      "cummax_backward",
                                         "cummin_backward", "logcumsumexp_backward", "linear_recurrence_backward"};
  struct Pieces {
    std::byte *marks;
    std::byte *scan;
  };
  Pieces take(Workspace &workspace) const {
    Pieces pieces = {};
    pieces.scan = workspace.take<std::byte>(int64_t(std::max(pass_.workspace, mark_pass_.workspace)));
    if (marked_) pieces.marks = workspace.take<std::byte>(shape_.count());
    return pieces;
  }

  void make_marks(const Call &call, const Tensor &marks, std::byte *workspace) const {
    if (scan_for_marks_) {
      GeometryBuilder builder(shape_, axis_, forward_.reverse);
      builder.line(0, call.operands[1]);
      builder.line(1, marks);
      run_pass(mark_pass_, forward_, builder.build(1), workspace, call.stream);
      return;
    }
    const MarkSource source = {marks, call.operands[1], axis_, forward_.reverse, forward_.exclusive};
    if constexpr (kWithCuda) {
      if (device().is_cuda()) {
        mark_cuda(source, call.stream);
        return;
      }
    }
    mark_cpu(source);
  }

  void zero(const Tensor &tensor, Stream stream) const {
    if constexpr (kWithCuda) {
      if (device().is_cuda()) {
        zero_cuda(tensor, stream);
        return;
      }
    }
    (void)stream;
    zero_cpu(tensor);
  }

  Pass pass_;
  Pass mark_pass_;
  Flags forward_;
  int inputs_ = 1;
  bool marked_ = false;
  bool scan_for_marks_ = false;
  bool has_h0_ = false;
};

}  // namespace
}  // namespace baracuda::scan

extern "C" baracuda_status baracuda_scan_plan_create(const baracuda_scan_desc *desc,
                                                     const baracuda_plan_options *options, baracuda_plan **plan) {
  return baracuda::create_plan<baracuda::scan::ScanPlan>(desc, options, plan);
}

extern "C" baracuda_status baracuda_scan_backward_plan_create(const baracuda_scan_backward_desc *desc,
                                                              const baracuda_plan_options *options,
                                                              baracuda_plan **plan) {
  return baracuda::create_plan<baracuda::scan::ScanBackwardPlan>(desc, options, plan);
}
