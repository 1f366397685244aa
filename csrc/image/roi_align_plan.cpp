// SPDX-License-Identifier: Apache-2.0
#include "baracuda/image.h"
#include "image/roi_align.h"
#include "runtime/plan.h"

namespace baracuda {
namespace {

ImageView view_of(const Tensor &tensor) {
  return {tensor.data, tensor.stride[0], tensor.stride[1], tensor.stride[2], tensor.stride[3]};
}

RoiRows rows_of(const Tensor &rois) {
  return {rois.data, rois.stride[0], rois.stride[1], rois.dtype == DTypeOf<double>::value};
}

// What the forward and the backward plans have in common.
class RoiAlignBase : public Plan {
 protected:
  template <class Descriptor>
  RoiAlignBase(const char *name, const char *op, const Descriptor &desc, Options options)
      : Plan(name, std::move(options)) {
    if (!dispatch_dtype<float16, bfloat16, float, double>(desc.dtype, [](auto) {}))
      unsupported(name_, ": dtype: expected float16, bfloat16, float32 or float64, got ",
                  check_dtype("dtype", desc.dtype).name);
    if (!dispatch_dtype<float, double>(desc.rois_dtype, [](auto) {}))
      refuse("rois_dtype: expected float32 or float64, got ", dtype_name(desc.rois_dtype));
    check_shape("n, c, h, w", {4, {desc.n, desc.c, desc.h, desc.w}}, desc.dtype, in_);
    check_shape("num_rois, c, pooled_h, pooled_w", {4, {desc.num_rois, desc.c, desc.pooled_h, desc.pooled_w}},
                desc.dtype, out_);
    check_shape("num_rois", {2, {desc.num_rois, kRoiNumbers}}, desc.rois_dtype, rois_);
    if (!is_finite(desc.spatial_scale)) refuse("spatial_scale: expected a finite number, got ", desc.spatial_scale);
    if (desc.sampling_ratio < 0)
      refuse("sampling_ratio: expected at least 0, which is adaptive, got ", desc.sampling_ratio);
    check_count("n", desc.n);
    check_count("num_rois", desc.num_rois);
    check_axis("h", desc.h, desc.pooled_h, desc.sampling_ratio);
    check_axis("w", desc.w, desc.pooled_w, desc.sampling_ratio);
    problem_ = {desc.n,
                desc.c,
                int32_t(desc.h),
                int32_t(desc.w),
                desc.num_rois,
                int32_t(desc.pooled_h),
                int32_t(desc.pooled_w),
                desc.spatial_scale,
                int32_t(desc.sampling_ratio),
                desc.aligned != 0};

    const int64_t bytes = storage_bytes(desc.rois_dtype, rois_.count()) + storage_bytes(desc.dtype, out_.count());
    // Each output takes two products with the rows of two banded matrices that have few entries.
    constexpr int64_t kOperations = 8;
    cost_ = {bytes + storage_bytes(desc.dtype, in_.count()), kOperations * out_.count()};
    const char *real = desc.dtype == DTypeOf<double>::value ? "float64" : "float32";
    path_ = "direct";
    sku_ = {"image", op, dtype_name(desc.dtype), dtype_name(desc.rois_dtype), "cpu", "cpu", {real, real, true, true}};
    if constexpr (kWithCuda) {
      if (device().is_cuda()) {
        sku_.arch = image_arch(name);
        sku_.backend = "bespoke";
      }
    }
  }

  static constexpr int64_t kRoiNumbers = 5;

  RoiAlignProblem problem_;
  Shape in_;
  Shape out_;
  Shape rois_;

 private:
  void check_count(const char *field, int64_t count) const {
    if (count > INT32_MAX) unsupported(name_, ": ", field, ": expected at most ", INT32_MAX, ", got ", count);
  }
  void check_axis(const char *axis, int64_t cells, int64_t bins, int64_t samples) const {
    if (cells > kMostRoiCells)
      unsupported(name_, ": ", axis, ": expected at most ", kMostRoiCells, " cells, got ", cells);
    if (__int128(bins) * (samples > 1 ? samples : 1) > kMostRoiSamples)
      unsupported(name_, ": pooled_", axis, ", sampling_ratio: expected at most ", kMostRoiSamples,
                  " samples along an axis, got ", bins, " x ", samples);
  }
};

class RoiAlignPlan final : public RoiAlignBase {
 public:
  static constexpr const char *kName = "RoiAlignPlan";

  RoiAlignPlan(const baracuda_roi_align_desc &desc, Options options)
      : RoiAlignBase(kName, "roi_align", desc, std::move(options)) {
    operands_ = {{"input", Role::in, desc.dtype, in_},
                 {"rois", Role::in, desc.rois_dtype, rois_},
                 {"output", Role::out, desc.dtype, out_}};
    launches_only_ = true;
    if constexpr (kWithCuda)
      if (device().is_cuda()) path_ = roi_align_path(problem_, desc.dtype);
  }

 protected:
  void run(const Call &call) const override {
    if (out_.count() == 0) return;
    const RoiAlignForward forward = {problem_, view_of(call.operands[kInput]), rows_of(call.operands[kRois]),
                                     view_of(call.operands[kOutput]), operands_[kInput].dtype};
    if constexpr (kWithCuda) {
      if (device().is_cuda()) {
        roi_align_cuda(forward, call.stream);
        return;
      }
    }
    roi_align_cpu(forward);
  }

 private:
  enum { kInput, kRois, kOutput };
};

class RoiAlignBackwardPlan final : public RoiAlignBase {
 public:
  static constexpr const char *kName = "RoiAlignBackwardPlan";

  RoiAlignBackwardPlan(const baracuda_roi_align_backward_desc &desc, Options options)
      : RoiAlignBase(kName, "roi_align_backward", desc, std::move(options)), accumulate_(desc.accumulate != 0) {
    operands_ = {{"doutput", Role::in, desc.dtype, out_},
                 {"rois", Role::in, desc.rois_dtype, rois_},
                 {"dinput", accumulate_ ? Role::inout : Role::out, desc.dtype, in_}};
    if (accumulate_) cost_.bytes += storage_bytes(desc.dtype, in_.count());
    if constexpr (kWithCuda) {
      if (device().is_cuda()) {
        path_ = roi_align_backward_path(problem_, desc.dtype);
        workspace_size_ = roi_align_backward_workspace(problem_, desc.dtype);
      }
    }
  }

 protected:
  void run(const Call &call) const override {
    if (in_.count() == 0) return;
    const RoiAlignBackward backward = {problem_,
                                       view_of(call.operands[kDoutput]),
                                       rows_of(call.operands[kRois]),
                                       view_of(call.operands[kDinput]),
                                       operands_[kDoutput].dtype,
                                       accumulate_,
                                       call.workspace};
    if constexpr (kWithCuda) {
      if (device().is_cuda()) {
        roi_align_backward_cuda(backward, call.stream);
        return;
      }
    }
    roi_align_backward_cpu(backward);
  }

 private:
  enum { kDoutput, kRois, kDinput };

  bool accumulate_;
};

}  // namespace
}  // namespace baracuda

extern "C" {

baracuda_status baracuda_roi_align_plan_create(const baracuda_roi_align_desc *desc,
                                               const baracuda_plan_options *options, baracuda_plan **plan) {
  return baracuda::create_plan<baracuda::RoiAlignPlan>(desc, options, plan);
}

baracuda_status baracuda_roi_align_backward_plan_create(const baracuda_roi_align_backward_desc *desc,
                                                        const baracuda_plan_options *options, baracuda_plan **plan) {
  return baracuda::create_plan<baracuda::RoiAlignBackwardPlan>(desc, options, plan);
}
}
