// SPDX-License-Identifier: Apache-2.0
#include "baracuda/image.h"
#include "image/nms.h"
#include "image/roi_plan.h"

namespace baracuda {
namespace {

class NmsPlan final : public Plan {
 public:
  static constexpr const char *kName = "NmsPlan";

  NmsPlan(const baracuda_nms_desc &desc, Options options) : Plan(kName, std::move(options)) {
    check_real("dtype", desc.dtype);
    const DLDataType scores_dtype = desc.scores_dtype.bits != 0 ? desc.scores_dtype : desc.dtype;
    check_real("scores_dtype", scores_dtype);
    const bool classes = desc.class_dtype.bits != 0;
    if (classes && !dispatch_dtype<int32_t, int64_t>(desc.class_dtype, [](auto) {}))
      refuse("class_dtype: expected int32 or int64, got ", dtype_name(desc.class_dtype));
    if (!is_finite(desc.iou_threshold)) refuse("iou_threshold: expected a finite number, got ", desc.iou_threshold);
    Shape boxes;
    Shape each;
    check_shape("num_boxes", {2, {desc.num_boxes, kCorners}}, desc.dtype, boxes);
    check_shape("num_boxes", {1, {desc.num_boxes}}, DTypeOf<int64_t>::value, each);
    if (desc.num_boxes > kMostBoxes)
      unsupported(kName, ": num_boxes: expected at most ", kMostBoxes, ", got ", desc.num_boxes);
    threshold_ = desc.iou_threshold;

    operands_ = {{"boxes", Role::in, desc.dtype, boxes}, {"scores", Role::in, scores_dtype, each}};
    if (classes) operands_.push_back({"classes", Role::in, desc.class_dtype, each});
    keep_ = int(operands_.size());
    operands_.push_back({"keep", Role::out, DTypeOf<int64_t>::value, each});
    operands_.push_back({"count", Role::out, DTypeOf<int64_t>::value, {1, {1}}});
    for (const OperandSpec &operand : operands_) cost_.bytes += storage_bytes(operand.dtype, operand.shape.count());
    const char *real = desc.dtype == DTypeOf<double>::value ? "float64" : "float32";
    path_ = "direct";
    sku_ = {"image", "nms", dtype_name(desc.dtype), dtype_name(scores_dtype), "cpu", "cpu", {real, "none", true, true}};
    if constexpr (kWithCuda) {
      if (device().is_cuda()) {
        sku_.arch = image_arch(kName);
        sku_.backend = "bespoke";
        path_ = "tiles";
        workspace_size_ = nms_workspace(desc.num_boxes, desc.dtype, classes);
      }
    }
  }

 protected:
  void run(const Call &call) const override {
    const Tensor &boxes = call.operands[0];
    const Tensor &scores = call.operands[1];
    const Tensor &keep = call.operands[keep_];
    NmsCall nms;
    nms.boxes_count = boxes.shape[0];
    nms.threshold = threshold_;
    nms.dtype = boxes.dtype;
    nms.boxes = {boxes.data, boxes.stride[0], boxes.dtype};
    nms.corner_step = boxes.stride[1];
    nms.scores = {scores.data, scores.stride[0], scores.dtype};
    if (keep_ > kClasses) {
      const Tensor &classes = call.operands[kClasses];
      nms.classes = classes.data;
      nms.class_step = classes.stride[0];
      nms.wide_classes = classes.dtype.bits == 64;
    }
    nms.keep = keep.as<int64_t>();
    nms.keep_step = keep.stride[0];
    nms.count = call.operands[keep_ + 1].as<int64_t>();
    nms.workspace = call.workspace;
    if constexpr (kWithCuda) {
      if (device().is_cuda()) {
        nms_cuda(nms, call.stream);
        return;
      }
    }
    nms_cpu(nms);
  }

 private:
  static constexpr int64_t kCorners = 4;
  static constexpr int64_t kMostBoxes = 1 << 26;
  static constexpr int kClasses = 2;

  void check_real(const char *field, DLDataType dtype) const {
    if (!dispatch_dtype<float16, bfloat16, float, double>(dtype, [](auto) {}))
      unsupported(kName, ": ", field, ": expected float16, bfloat16, float32 or float64, got ",
                  check_dtype(field, dtype).name);
  }

  double threshold_;
  int keep_;
};

}  // namespace
}  // namespace baracuda

extern "C" baracuda_status baracuda_nms_plan_create(const baracuda_nms_desc *desc, const baracuda_plan_options *options,
                                                    baracuda_plan **plan) {
  return baracuda::create_plan<baracuda::NmsPlan>(desc, options, plan);
}
