// SPDX-License-Identifier: Apache-2.0
#include "baracuda/image.h"
#include "image/roi_align.h"
#include "image/roi_plan.h"

namespace baracuda {
namespace {

// What the forward and the backward plans have in common.
class RoiAlignBase : public RoiPlan {
 protected:
  template <class Descriptor>
  RoiAlignBase(const char *name, const char *op, const Descriptor &desc, Options options)
      : RoiPlan(name, desc, std::move(options)) {
    if (desc.sampling_ratio < 0)
      refuse("sampling_ratio: expected at least 0, which is adaptive, got ", desc.sampling_ratio);
    set_pooled(desc.pooled_h, desc.pooled_w, desc.sampling_ratio);
    static_cast<RoiProblem &>(align_) = problem_;
    align_.sampling_ratio = int32_t(desc.sampling_ratio);
    align_.aligned = desc.aligned != 0;
    // Each output takes two products with the rows of two banded matrices that have few entries.
    constexpr int64_t kOperations = 8;
    cost_.operations = kOperations * out_.count();
    set_sku(op, desc.dtype, desc.rois_dtype, real_name(desc.dtype), real_name(desc.dtype));
  }

  RoiAlignProblem align_;
};

class RoiAlignPlan final : public RoiAlignBase {
 public:
  static constexpr const char *kName = "RoiAlignPlan";

  RoiAlignPlan(const baracuda_roi_align_desc &desc, Options options)
      : RoiAlignBase(kName, "roi_align", desc, std::move(options)) {
    operands_ = {{"input", Role::in, desc.dtype, in_},
                 {"rois", Role::in, desc.rois_dtype, rois_},
                 {"output", Role::out, desc.dtype, out_}};
    if constexpr (kWithCuda) {
      if (device().is_cuda()) {
        turn_ = roi_align_turns(align_, desc.dtype) && allows_workspace(roi_align_workspace(align_, desc.dtype, true));
        const size_t wanted = roi_align_workspace(align_, desc.dtype, turn_);
        path_ = allows_workspace(wanted) ? roi_align_path(align_, desc.dtype, turn_) : "any";
        if (allows_workspace(wanted)) workspace_size_ = wanted;
      }
    }
  }

 protected:
  void run(const Call &call) const override {
    if (out_.count() == 0) return;
    const RoiAlignForward forward = {align_,
                                     image_view(call.operands[kInput]),
                                     roi_rows(call.operands[kRois]),
                                     image_view(call.operands[kOutput]),
                                     operands_[kInput].dtype,
                                     turn_,
                                     call.workspace};
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

  bool turn_ = false;
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
        any_order_ = !options_.deterministic && roi_align_adds(align_, desc.dtype) &&
                     allows_workspace(roi_align_add_workspace(align_, desc.dtype));
        const size_t wanted =
            any_order_ ? roi_align_add_workspace(align_, desc.dtype) : roi_align_backward_workspace(align_, desc.dtype);
        path_ = any_order_ ? "atomic" : allows_workspace(wanted) ? roi_align_backward_path(align_, desc.dtype) : "any";
        if (allows_workspace(wanted)) workspace_size_ = wanted;
        sku_.guarantee.bit_stable_on_same_hardware = sku_.guarantee.deterministic = !any_order_;
      }
    }
  }

 protected:
  void run(const Call &call) const override {
    if (in_.count() == 0) return;
    const RoiAlignBackward backward = {align_,
                                       image_view(call.operands[kDoutput]),
                                       roi_rows(call.operands[kRois]),
                                       image_view(call.operands[kDinput]),
                                       operands_[kDoutput].dtype,
                                       accumulate_,
                                       any_order_,
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
  bool any_order_ = false;
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
