// SPDX-License-Identifier: Apache-2.0
#include "baracuda/image.h"
#include "image/roi_plan.h"
#include "image/roi_pool.h"

namespace baracuda {
namespace {

// What the forward and the backward plans have in common.
class RoiPoolBase : public RoiPlan {
 protected:
  template <class Descriptor>
  RoiPoolBase(const char *name, const Descriptor &desc, Options options) : RoiPlan(name, desc, std::move(options)) {
    set_pooled(desc.pooled_h, desc.pooled_w, 1);
    launches_only_ = true;
    if constexpr (kWithCuda)
      if (device().is_cuda()) path_ = "any";
  }

  // What the faster path needs, if there is one.
  void use_workspace(size_t wanted, const char *path) {
    if (wanted == 0 || !allows_workspace(wanted)) return;
    path_ = path;
    workspace_size_ = wanted;
    launches_only_ = false;
  }

  void check_index_dtype(DLDataType dtype) {
    if (!dispatch_dtype<int32_t, int64_t>(dtype, [](auto) {}))
      refuse("index_dtype: expected int32 or int64, got ", dtype_name(dtype));
    const int64_t cells = in_[2] * in_[3];
    if (dtype == DTypeOf<int32_t>::value && cells - 1 > INT32_MAX)
      refuse("index_dtype: int32 can't count the ", cells, " cells of a plane");
  }
};

class RoiPoolPlan final : public RoiPoolBase {
 public:
  static constexpr const char *kName = "RoiPoolPlan";

  RoiPoolPlan(const baracuda_roi_pool_desc &desc, Options options) : RoiPoolBase(kName, desc, std::move(options)) {
    operands_ = {{"input", Role::in, desc.dtype, in_},
                 {"rois", Role::in, desc.rois_dtype, rois_},
                 {"output", Role::out, desc.dtype, out_}};
    if (desc.index_dtype.bits != 0) {
      check_index_dtype(desc.index_dtype);
      operands_.push_back({"argmax", Role::out, desc.index_dtype, out_});
      cost_.bytes += storage_bytes(desc.index_dtype, out_.count());
    }
    cost_.operations = out_.count();
    set_sku("roi_pool", desc.dtype, desc.rois_dtype, "exact", "none");
    if constexpr (kWithCuda) {
      if (device().is_cuda()) use_workspace(roi_pool_workspace(problem_, desc.dtype), "turned");
    }
  }

 protected:
  void run(const Call &call) const override {
    if (out_.count() == 0) return;
    RoiPoolForward forward = {problem_,
                              image_view(call.operands[kInput]),
                              roi_rows(call.operands[kRois]),
                              image_view(call.operands[kOutput]),
                              {},
                              operands_[kInput].dtype,
                              call.workspace};
    if (operands_.size() > kArgmax) {
      const Tensor &argmax = call.operands[kArgmax];
      forward.argmax = {image_view(argmax), argmax.dtype.bits == 64};
    }
    if constexpr (kWithCuda) {
      if (device().is_cuda()) {
        roi_pool_cuda(forward, call.stream);
        return;
      }
    }
    roi_pool_cpu(forward);
  }

 private:
  enum { kInput, kRois, kOutput, kArgmax };
};

class RoiPoolBackwardPlan final : public RoiPoolBase {
 public:
  static constexpr const char *kName = "RoiPoolBackwardPlan";

  RoiPoolBackwardPlan(const baracuda_roi_pool_backward_desc &desc, Options options)
      : RoiPoolBase(kName, desc, std::move(options)), accumulate_(desc.accumulate != 0) {
    check_index_dtype(desc.index_dtype);
    operands_ = {{"doutput", Role::in, desc.dtype, out_},
                 {"rois", Role::in, desc.rois_dtype, rois_},
                 {"argmax", Role::in, desc.index_dtype, out_},
                 {"dinput", accumulate_ ? Role::inout : Role::out, desc.dtype, in_}};
    cost_.bytes += storage_bytes(desc.index_dtype, out_.count());
    if (accumulate_) cost_.bytes += storage_bytes(desc.dtype, in_.count());
    cost_.operations = out_.count();
    set_sku("roi_pool_backward", desc.dtype, desc.index_dtype, real_name(desc.dtype), real_name(desc.dtype));
    if constexpr (kWithCuda) {
      if (device().is_cuda()) use_workspace(roi_pool_backward_workspace(problem_, desc.dtype), "bands");
    }
  }

 protected:
  void run(const Call &call) const override {
    if (in_.count() == 0) return;
    const Tensor &argmax = call.operands[kArgmax];
    const RoiPoolBackward backward = {problem_,
                                      image_view(call.operands[kDoutput]),
                                      roi_rows(call.operands[kRois]),
                                      {image_view(argmax), argmax.dtype.bits == 64},
                                      image_view(call.operands[kDinput]),
                                      operands_[kDoutput].dtype,
                                      accumulate_,
                                      call.workspace};
    if constexpr (kWithCuda) {
      if (device().is_cuda()) {
        roi_pool_backward_cuda(backward, call.stream);
        return;
      }
    }
    roi_pool_backward_cpu(backward);
  }

 private:
  enum { kDoutput, kRois, kArgmax, kDinput };

  bool accumulate_;
};

}  // namespace
}  // namespace baracuda

extern "C" {

baracuda_status baracuda_roi_pool_plan_create(const baracuda_roi_pool_desc *desc, const baracuda_plan_options *options,
                                              baracuda_plan **plan) {
  return baracuda::create_plan<baracuda::RoiPoolPlan>(desc, options, plan);
}

baracuda_status baracuda_roi_pool_backward_plan_create(const baracuda_roi_pool_backward_desc *desc,
                                                       const baracuda_plan_options *options, baracuda_plan **plan) {
  return baracuda::create_plan<baracuda::RoiPoolBackwardPlan>(desc, options, plan);
}
}
