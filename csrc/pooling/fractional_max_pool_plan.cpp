// SPDX-License-Identifier: Apache-2.0
#include "baracuda/pooling.h"
#include "pooling/fractional_max_pool.h"
#include "runtime/plan.h"

namespace baracuda {
namespace {

// An axis of the descriptor: its name in sentences and its three extents.
struct AxisFields {
  const char *name;
  int64_t in;
  int64_t window;
  int64_t out;
};

constexpr int kMaxSpatial = 3;

template <class Descriptor>
int spatial_axes(const Descriptor &desc, AxisFields (&axes)[kMaxSpatial]) {
  int rank = 0;
  if constexpr (requires { desc.d_in; }) axes[rank++] = {"d", desc.d_in, desc.window_d, desc.d_out};
  axes[rank++] = {"h", desc.h_in, desc.window_h, desc.h_out};
  axes[rank++] = {"w", desc.w_in, desc.window_w, desc.w_out};
  return rank;
}

// The axis of a tensor [batch, channels, spatial...] that a kernel's axis is, or -1.
int tensor_axis(int rank, int axis) {
  if (rank == 3) return 2 + axis;
  return axis == kSlow ? 2 : axis == kFast ? 3 : -1;
}

PoolView view_of(const Tensor &tensor) {
  PoolView view;
  view.data = tensor.data;
  view.batch = tensor.stride[0];
  view.channel = tensor.stride[1];
  for (int axis = 0; axis < kPoolAxes; ++axis) {
    const int place = tensor_axis(tensor.rank() - 2, axis);
    view.axis[axis] = place < 0 ? 0 : tensor.stride[place];
  }
  return view;
}

// What the forward and the backward plans have in common.
class PoolPlan : public Plan {
 public:
  using Plan::Plan;

 protected:
  template <class Descriptor>
  void read_problem(const Descriptor &desc) {
    if (!dispatch_dtype<float16, bfloat16, float, double>(desc.dtype, [](auto) {})) {
      unsupported(name_, ": dtype: expected float16, bfloat16, float32 or float64, got ",
                  check_dtype("dtype", desc.dtype).name);
    }
    if (desc.placement != BARACUDA_PLACEMENT_EVEN && desc.placement != BARACUDA_PLACEMENT_TORCH)
      refuse("placement: expected even or torch, got ", desc.placement);
    if (desc.index_base != BARACUDA_INDEX_TENSOR && desc.index_base != BARACUDA_INDEX_PLANE)
      refuse("index_base: expected tensor or plane, got ", desc.index_base);
    if (desc.batch < 1) refuse("batch: expected at least 1, got ", desc.batch);
    if (desc.channels < 1) refuse("channels: expected at least 1, got ", desc.channels);
    problem_.batch = desc.batch;
    problem_.channels = desc.channels;
    problem_.placement = Placement(desc.placement);
    problem_.plane_index = desc.index_base == BARACUDA_INDEX_PLANE;

    AxisFields axes[kMaxSpatial] = {};
    rank_ = spatial_axes(desc, axes);
    baracuda_shape in = {rank_ + 2, {desc.batch, desc.channels}};
    baracuda_shape out = in;
    for (int axis = 0; axis < rank_; ++axis) {
      check_axis(axes[axis]);
      in.extent[2 + axis] = axes[axis].in;
      out.extent[2 + axis] = axes[axis].out;
    }
    check_shape("x", in, DTypeOf<int64_t>::value, in_);
    check_shape("y", out, DTypeOf<int64_t>::value, out_);
    for (int axis = 0; axis < kPoolAxes; ++axis) {
      const int place = tensor_axis(rank_, axis) - 2;
      if (place < 0) continue;
      problem_.axis[axis] = make_pool_axis(int32_t(axes[place].in), int32_t(axes[place].window),
                                           int32_t(axes[place].out), problem_.placement, real_bits(desc.dtype));
      const bool reversed = rank_ == 2 && problem_.placement == Placement::torch;
      problem_.sample_of[axis] = reversed ? rank_ - 1 - place : place;
    }
  }

  // The dtype that kernels take indices in.
  void read_index_dtype(DLDataType dtype) {
    if (!dispatch_dtype<int32_t, int64_t>(dtype, [](auto) {}))
      refuse("index_dtype: expected int32 or int64, got ", dtype_name(dtype));
    const int64_t count = problem_.plane_index ? problem_.in_plane() : in_.count();
    if (dtype == DTypeOf<int32_t>::value && count - 1 > INT32_MAX)
      refuse("index_dtype: int32 can't count the ", count, " cells of ",
             problem_.plane_index ? "a plane" : "x; index_base plane counts fewer");
    index_dtype_ = dtype;
  }

  void set_sku(const char *op, DLDataType dtype, const char *aux_dtype, const char *math, const char *accumulator) {
    sku_ = {"pooling", op, dtype_name(dtype), aux_dtype, "cpu", "cpu", {math, accumulator, true, true}};
    if constexpr (kWithCuda) {
      if (device().is_cuda()) {
        sku_.arch = fractional_max_pool_arch(name_);
        sku_.backend = "bespoke";
      }
    }
  }

  int64_t window_cells() const {
    return int64_t(problem_.axis[kSlow].window) * problem_.axis[kMiddle].window * problem_.axis[kFast].window;
  }

  static int real_bits(DLDataType dtype) { return dtype == DTypeOf<double>::value ? 53 : 24; }

  PoolProblem problem_;
  int rank_ = 0;
  Shape in_;
  Shape out_;
  DLDataType index_dtype_ = DTypeOf<int64_t>::value;

 private:
  void check_axis(const AxisFields &axis) const {
    if (axis.in < 1) refuse(axis.name, "_in: expected at least 1, got ", axis.in);
    if (axis.out < 1) refuse(axis.name, "_out: expected at least 1, got ", axis.out);
    if (axis.window < 1 || axis.window > axis.in)
      refuse("window_", axis.name, ": expected 1 to ", axis.in, ", the extent of ", axis.name, ", got ", axis.window);
    if (axis.in > INT32_MAX || axis.out > INT32_MAX)
      unsupported(name_, ": ", axis.name, ": expected extents of at most ", INT32_MAX, ", got ", axis.in, " and ",
                  axis.out);
    if (problem_.placement != Placement::torch) return;
    const int64_t limit = rank_ == 2 ? axis.in : axis.in - 1;
    if (axis.out + axis.window - 1 > limit)
      refuse(axis.name, "_out: placement torch takes at most ", limit - axis.window + 1, " outputs for ", axis.in,
             " cells and a window of ", axis.window, ", got ", axis.out);
  }
};

class ForwardPlan : public PoolPlan {
 public:
  template <class Descriptor>
  ForwardPlan(const char *name, const char *op, const Descriptor &desc, Options options)
      : PoolPlan(name, std::move(options)) {
    read_problem(desc);
    const bool wants_indices = desc.index_dtype.bits != 0;
    if (wants_indices) read_index_dtype(desc.index_dtype);
    generated_ = desc.samples == 0;
    seed_ = uint64_t(desc.seed);

    DLDataType samples_dtype = DTypeOf<float>::value;
    if (desc.samples_dtype.bits != 0) samples_dtype = desc.samples_dtype;
    const bool wide = samples_dtype == DTypeOf<double>::value;
    if (!(samples_dtype == DTypeOf<float>::value) && !(wide && desc.dtype == samples_dtype))
      refuse("samples_dtype: expected float32", desc.dtype == DTypeOf<double>::value ? " or float64" : "", ", got ",
             dtype_name(samples_dtype));
    Shape samples;
    samples.rank = 3;
    samples[0] = desc.batch;
    samples[1] = desc.channels;
    samples[2] = rank_;
    Shape one;
    one.rank = 1;
    one[0] = 1;

    operands_ = {{"x", Role::in, desc.dtype, in_}};
    if (generated_) {
      operands_.push_back({"offset", Role::in, DTypeOf<int64_t>::value, one});
    } else {
      operands_.push_back({"random_samples", Role::in, samples_dtype, samples});
    }
    operands_.push_back({"y", Role::out, desc.dtype, out_});
    if (wants_indices) operands_.push_back({"indices", Role::out, index_dtype_, out_});

    cost_.bytes = storage_bytes(desc.dtype, in_.count()) + storage_bytes(desc.dtype, out_.count()) +
                  (wants_indices ? storage_bytes(index_dtype_, out_.count()) : 0) +
                  (generated_ ? int64_t(sizeof(int64_t)) : storage_bytes(samples_dtype, samples.count()));
    cost_.operations = out_.count() * (window_cells() - 1);
    path_ = "direct";
    if constexpr (kWithCuda)
      if (device().is_cuda()) path_ = fractional_max_pool_path(problem_, desc.dtype);
    set_sku(op, desc.dtype, wants_indices ? dtype_name(index_dtype_) : nullptr, "exact", "none");
  }

 protected:
  void run(const Call &call) const override {
    PoolForward forward;
    forward.problem = problem_;
    forward.x = view_of(call.operands[kX]);
    forward.y = view_of(call.operands[kY]);
    if (operands_.size() > kIndices) forward.indices = view_of(call.operands[kIndices]);
    forward.dtype = operands_[kX].dtype;
    forward.index_dtype = index_dtype_;
    const Tensor &source = call.operands[kSource];
    forward.samples.seed = seed_;
    if (generated_) {
      forward.samples.offset = source.as<const int64_t>();
    } else {
      forward.samples.data = source.data;
      forward.samples.is_double = source.dtype == DTypeOf<double>::value;
      forward.samples.batch = source.stride[0];
      forward.samples.channel = source.stride[1];
      forward.samples.sample = source.stride[2];
    }
    if constexpr (kWithCuda) {
      if (device().is_cuda()) {
        fractional_max_pool_cuda(forward, call.stream);
        return;
      }
    }
    fractional_max_pool_cpu(forward);
  }

 private:
  enum { kX, kSource, kY, kIndices };

  bool generated_;
  uint64_t seed_;
};

class BackwardPlan : public PoolPlan {
 public:
  template <class Descriptor>
  BackwardPlan(const char *name, const char *op, const Descriptor &desc, Options options)
      : PoolPlan(name, std::move(options)) {
    read_problem(desc);
    read_index_dtype(desc.index_dtype);
    accumulate_ = desc.accumulate != 0;
    operands_ = {{"dy", Role::in, desc.dtype, out_},
                 {"indices", Role::in, index_dtype_, out_},
                 {"dx", accumulate_ ? Role::inout : Role::out, desc.dtype, in_}};
    cost_.bytes = storage_bytes(desc.dtype, out_.count()) + storage_bytes(index_dtype_, out_.count()) +
                  (accumulate_ ? 2 : 1) * storage_bytes(desc.dtype, in_.count());
    cost_.operations = out_.count();
    const char *real = desc.dtype == DTypeOf<double>::value ? "float64" : "float32";
    set_sku(op, desc.dtype, dtype_name(index_dtype_), real, real);
    // Behind the SKU, whose architecture it depends on.
    path_ = "direct";
    if constexpr (kWithCuda)
      if (device().is_cuda()) path_ = fractional_max_pool_backward_path(problem_, desc.dtype, index_dtype_);
  }

 protected:
  void run(const Call &call) const override {
    PoolBackward backward;
    backward.problem = problem_;
    backward.dy = view_of(call.operands[kDy]);
    backward.indices = view_of(call.operands[kIndices]);
    backward.dx = view_of(call.operands[kDx]);
    backward.dtype = operands_[kDy].dtype;
    backward.index_dtype = index_dtype_;
    backward.accumulate = accumulate_;
    if constexpr (kWithCuda) {
      if (device().is_cuda()) {
        fractional_max_pool_backward_cuda(backward, call.stream);
        return;
      }
    }
    fractional_max_pool_backward_cpu(backward);
  }

 private:
  enum { kDy, kIndices, kDx };

  bool accumulate_;
};

struct FractionalMaxPool2dPlan final : ForwardPlan {
  static constexpr const char *kName = "FractionalMaxPool2dPlan";
  FractionalMaxPool2dPlan(const baracuda_fractional_max_pool2d_desc &desc, Options options)
      : ForwardPlan(kName, "fractional_max_pool2d", desc, std::move(options)) {}
};

struct FractionalMaxPool3dPlan final : ForwardPlan {
  static constexpr const char *kName = "FractionalMaxPool3dPlan";
  FractionalMaxPool3dPlan(const baracuda_fractional_max_pool3d_desc &desc, Options options)
      : ForwardPlan(kName, "fractional_max_pool3d", desc, std::move(options)) {}
};

struct FractionalMaxPool2dBackwardPlan final : BackwardPlan {
  static constexpr const char *kName = "FractionalMaxPool2dBackwardPlan";
  FractionalMaxPool2dBackwardPlan(const baracuda_fractional_max_pool2d_backward_desc &desc, Options options)
      : BackwardPlan(kName, "fractional_max_pool2d_backward", desc, std::move(options)) {}
};

struct FractionalMaxPool3dBackwardPlan final : BackwardPlan {
  static constexpr const char *kName = "FractionalMaxPool3dBackwardPlan";
  FractionalMaxPool3dBackwardPlan(const baracuda_fractional_max_pool3d_backward_desc &desc, Options options)
      : BackwardPlan(kName, "fractional_max_pool3d_backward", desc, std::move(options)) {}
};

}  // namespace
}  // namespace baracuda

extern "C" {

baracuda_status baracuda_fractional_max_pool2d_plan_create(const baracuda_fractional_max_pool2d_desc *desc,
                                                           const baracuda_plan_options *options, baracuda_plan **plan) {
  return baracuda::create_plan<baracuda::FractionalMaxPool2dPlan>(desc, options, plan);
}

baracuda_status baracuda_fractional_max_pool3d_plan_create(const baracuda_fractional_max_pool3d_desc *desc,
                                                           const baracuda_plan_options *options, baracuda_plan **plan) {
  return baracuda::create_plan<baracuda::FractionalMaxPool3dPlan>(desc, options, plan);
}

baracuda_status baracuda_fractional_max_pool2d_backward_plan_create(
    const baracuda_fractional_max_pool2d_backward_desc *desc, const baracuda_plan_options *options,
    baracuda_plan **plan) {
  return baracuda::create_plan<baracuda::FractionalMaxPool2dBackwardPlan>(desc, options, plan);
}

baracuda_status baracuda_fractional_max_pool3d_backward_plan_create(
    const baracuda_fractional_max_pool3d_backward_desc *desc, const baracuda_plan_options *options,
    baracuda_plan **plan) {
  return baracuda::create_plan<baracuda::FractionalMaxPool3dBackwardPlan>(desc, options, plan);
}
}
