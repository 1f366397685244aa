// SPDX-License-Identifier: Apache-2.0
// What the plans of all operators on regions have in common.
#pragma once

#include "image/roi.h"
#include "runtime/plan.h"

namespace baracuda {

inline ImageView image_view(const Tensor &tensor) {
  return {tensor.data, tensor.stride[0], tensor.stride[1], tensor.stride[2], tensor.stride[3]};
}

inline RoiRows roi_rows(const Tensor &rois) {
  return {rois.data, rois.stride[0], rois.stride[1], rois.dtype == DTypeOf<double>::value};
}

class RoiPlan : public Plan {
 protected:
  template <class Descriptor>
  RoiPlan(const char *name, const Descriptor &desc, Options options) : Plan(name, std::move(options)) {
    if (!dispatch_dtype<float16, bfloat16, float, double>(desc.dtype, [](auto) {}))
      unsupported(name_, ": dtype: expected float16, bfloat16, float32 or float64, got ",
                  check_dtype("dtype", desc.dtype).name);
    if (!dispatch_dtype<float, double>(desc.rois_dtype, [](auto) {}))
      refuse("rois_dtype: expected float32 or float64, got ", dtype_name(desc.rois_dtype));
    check_shape("n, c, h, w", {4, {desc.n, desc.c, desc.h, desc.w}}, DTypeOf<int64_t>::value, in_);
    check_shape("num_rois, c, pooled_h, pooled_w", {4, {desc.num_rois, desc.c, desc.pooled_h, desc.pooled_w}},
                DTypeOf<int64_t>::value, out_);
    check_shape("num_rois", {2, {desc.num_rois, kRoiNumbers}}, desc.rois_dtype, rois_);
    if (!is_finite(desc.spatial_scale)) refuse("spatial_scale: expected a finite number, got ", desc.spatial_scale);
    check_count("n", desc.n, INT32_MAX);
    check_count("num_rois", desc.num_rois, INT32_MAX);
    check_count("h", desc.h, kMostRoiCells);
    check_count("w", desc.w, kMostRoiCells);
    problem_ = {desc.n, desc.c, int32_t(desc.h), int32_t(desc.w), desc.num_rois, 0, 0, desc.spatial_scale};
    cost_.bytes = storage_bytes(desc.rois_dtype, rois_.count()) + storage_bytes(desc.dtype, out_.count()) +
                  storage_bytes(desc.dtype, in_.count());
    path_ = "direct";
  }

  // Samples of a bin along each axis.
  void set_pooled(int64_t pooled_h, int64_t pooled_w, int64_t samples) {
    check_samples("h", pooled_h, samples);
    check_samples("w", pooled_w, samples);
    problem_.pooled_h = int32_t(pooled_h);
    problem_.pooled_w = int32_t(pooled_w);
  }

  void set_sku(const char *op, DLDataType dtype, DLDataType other, const char *math, const char *accumulator) {
    sku_ = {"image", op, dtype_name(dtype), dtype_name(other), "cpu", "cpu", {math, accumulator, true, true}};
    if constexpr (kWithCuda) {
      if (device().is_cuda()) {
        sku_.arch = image_arch(name_);
        sku_.backend = "bespoke";
      }
    }
  }

  static const char *real_name(DLDataType dtype) { return dtype == DTypeOf<double>::value ? "float64" : "float32"; }

  RoiProblem problem_;
  Shape in_;
  Shape out_;
  Shape rois_;

 private:
  static constexpr int64_t kRoiNumbers = 5;

  void check_count(const char *field, int64_t count, int64_t most) const {
    if (count > most) unsupported(name_, ": ", field, ": expected at most ", most, ", got ", count);
  }
  void check_samples(const char *axis, int64_t bins, int64_t samples) const {
    if (__int128(bins) * (samples > 1 ? samples : 1) > kMostRoiSamples)
      unsupported(name_, ": pooled_", axis, ", sampling_ratio: expected at most ", kMostRoiSamples,
                  " samples along an axis, got ", bins, " x ", samples);
  }
};

}  // namespace baracuda
