// SPDX-License-Identifier: Apache-2.0
#include "baracuda/layout.h"
#include "layout/dynamic_write.h"
#include "layout/write_slice.h"
#include "runtime/overlap.h"
#include "runtime/plan.h"

namespace baracuda {
namespace {

// What the write and its gradients have in common: the shapes, the starts and how to move.
class DynamicPlan : public Plan {
 protected:
  template <class Descriptor>
  DynamicPlan(const char *name, const char *op, const Descriptor &desc, Options options)
      : Plan(name, std::move(options)), batched_(desc.batched != 0), clamp_(desc.bounds == BARACUDA_BOUNDS_CLAMP) {
    const DTypeInfo &dtype = check_dtype("dtype", desc.dtype);
    const DTypeInfo &index = check_dtype("index_dtype", desc.index_dtype);
    if (!(index.dtype == DTypeOf<int32_t>::value || index.dtype == DTypeOf<int64_t>::value))
      refuse("index_dtype: expected int32 or int64, got ", index.name);
    if (desc.bounds != BARACUDA_BOUNDS_DROP && desc.bounds != BARACUDA_BOUNDS_CLAMP)
      refuse("bounds: expected drop or clamp, got ", desc.bounds);
    check_shape("dest_shape", desc.dest_shape, desc.dtype, large_);
    check_shape("block_shape", desc.block_shape, desc.dtype, block_);
    if (block_.rank != large_.rank)
      refuse("block_shape: expected ", large_.rank, " extents for dest_shape ", to_string(large_), ", got ",
             to_string(block_));
    if (batched_ && block_[0] != large_[0])
      refuse("block_shape: expected the leading extent ", large_[0], " of dest_shape, for batched starts, got ",
             block_[0]);
    for (int axis = 0; clamp_ && axis < large_.rank; ++axis)
      if (block_[axis] > large_[axis])
        refuse("block_shape: expected at most ", to_string(large_), ", for bounds clamp, got ", to_string(block_));
    starts_.rank = batched_ ? 2 : 1;
    starts_[0] = batched_ ? large_[0] : large_.rank;
    if (batched_) starts_[1] = large_.rank;

    const int64_t last = block_[block_.rank - 1] * nibbles(desc.dtype);
    empty_ = large_.count() == 0 || block_.count() == 0;
    path_ = empty_ ? "empty" : is_packed(desc.dtype) || last > 16 * kNibblesPerByte ? "runs" : "elements";
    launches_only_ = true;
    sku_ = {"layout", op, dtype.name, index.name, "cpu", "cpu", {"exact", "none", true, true}};
    if constexpr (kWithCuda) {
      if (device().is_cuda()) {
        sku_.arch = dynamic_copy_arch(name);
        sku_.backend = "bespoke";
      }
    }
  }

  Starts starts(const Tensor &tensor) const { return {tensor, batched_, clamp_}; }

  void move(Motion motion, const Tensor &large, const Tensor &block, const Starts &starts, Stream stream) const {
    if constexpr (kWithCuda) {
      if (device().is_cuda()) {
        dynamic_copy_cuda(plan_dynamic(motion, large, block, starts), starts, stream);
        return;
      }
    }
    dynamic_copy_cpu(motion, large, block, starts);
  }

  Shape large_ = {};
  Shape block_ = {};
  Shape starts_ = {};
  bool batched_;
  bool clamp_;
  bool empty_;
};

class DynamicWriteSlicePlan final : public DynamicPlan {
 public:
  static constexpr const char *kName = "DynamicWriteSlicePlan";

  DynamicWriteSlicePlan(const baracuda_dynamic_write_slice_desc &desc, Options options)
      : DynamicPlan(kName, "dynamic_write_slice", desc, std::move(options)), advance_axis_(int(desc.advance_axis)) {
    if (desc.advance_axis < -1 || desc.advance_axis >= large_.rank)
      refuse("advance_axis: expected -1 or an axis of dest_shape ", to_string(large_), ", got ", desc.advance_axis);
    if (batched_ && desc.advance_axis == 0)
      refuse("advance_axis: expected an axis after the first, along which batched starts don't move, got 0");
    operands_ = {{"dest", Role::inout, desc.dtype, large_},
                 {"source", Role::in, desc.dtype, block_},
                 {"starts", advance_axis_ >= 0 ? Role::inout : Role::in, desc.index_dtype, starts_}};
    cost_ = {2 * storage_bytes(desc.dtype, block_.count()) + storage_bytes(desc.index_dtype, starts_.count()), 0};
  }

 protected:
  enum { kDest, kSource, kStarts };

  void run(const Call &call) const override {
    const Starts starts = this->starts(call.operands[kStarts]);
    if (!empty_) move(Motion::write, call.operands[kDest], call.operands[kSource], starts, call.stream);
    if (advance_axis_ < 0 || starts_.count() == 0) return;
    if constexpr (kWithCuda) {
      if (device().is_cuda()) {
        advance_starts_cuda(starts, advance_axis_, block_[advance_axis_], call.stream);
        return;
      }
    }
    advance_starts_cpu(starts, advance_axis_, block_[advance_axis_]);
  }

 private:
  int advance_axis_;
};

class DynamicWriteSliceBackwardPlan final : public DynamicPlan {
 public:
  static constexpr const char *kName = "DynamicWriteSliceBackwardPlan";

  DynamicWriteSliceBackwardPlan(const baracuda_dynamic_write_slice_backward_desc &desc, Options options)
      : DynamicPlan(kName, "dynamic_write_slice_backward", desc, std::move(options)) {
    if (is_packed(desc.dtype)) unsupported(kName, ": dtype: no kernel for ", dtype_name(desc.dtype));
    if (desc.gradients < BARACUDA_GRADIENTS_BOTH || desc.gradients > BARACUDA_GRADIENTS_SOURCE)
      refuse("gradients: expected both, dest or source, got ", desc.gradients);
    operands_ = {{"grad", Role::in, desc.dtype, large_}, {"starts", Role::in, desc.index_dtype, starts_}};
    cost_ = {storage_bytes(desc.index_dtype, starts_.count()), 0};
    if (desc.gradients != BARACUDA_GRADIENTS_SOURCE) {
      dest_ = int(operands_.size());
      OperandSpec gradient = {"d_dest", Role::out, desc.dtype, large_};
      gradient.in_place_with = kGrad;
      operands_.push_back(gradient);
      cost_.bytes += 2 * storage_bytes(desc.dtype, large_.count());
    }
    if (desc.gradients != BARACUDA_GRADIENTS_DEST) {
      source_ = int(operands_.size());
      operands_.push_back({"d_source", Role::out, desc.dtype, block_});
      cost_.bytes += 2 * storage_bytes(desc.dtype, block_.count());
    }
  }

 protected:
  enum { kGrad, kStarts };

  void run(const Call &call) const override {
    const Tensor &grad = call.operands[kGrad];
    const Starts starts = this->starts(call.operands[kStarts]);
    // Read before the window is zeroed: d_dest may be grad itself.
    if (source_ >= 0 && block_.count() != 0) move(Motion::read, grad, call.operands[source_], starts, call.stream);
    if (dest_ < 0 || large_.count() == 0) return;
    const Tensor &dest = call.operands[dest_];
    if (!same_elements(dest, grad)) copy(dest, grad, call.stream);
    if (!empty_) {
      Tensor window;
      window.dtype = dest.dtype;
      window.shape = block_;
      move(Motion::zero, dest, window, starts, call.stream);
    }
  }

 private:
  void copy(const Tensor &to, const Tensor &from, Stream stream) const {
    const StridedCopy plan = plan_copy(to, from);
    if constexpr (kWithCuda) {
      if (device().is_cuda()) {
        write_slice_cuda(plan, stream);
        return;
      }
    }
    write_slice_cpu(plan);
  }

  int dest_ = -1;
  int source_ = -1;
};

}  // namespace
}  // namespace baracuda

extern "C" baracuda_status baracuda_dynamic_write_slice_plan_create(const baracuda_dynamic_write_slice_desc *desc,
                                                                    const baracuda_plan_options *options,
                                                                    baracuda_plan **plan) {
  return baracuda::create_plan<baracuda::DynamicWriteSlicePlan>(desc, options, plan);
}

extern "C" baracuda_status baracuda_dynamic_write_slice_backward_plan_create(
    const baracuda_dynamic_write_slice_backward_desc *desc, const baracuda_plan_options *options,
    baracuda_plan **plan) {
  return baracuda::create_plan<baracuda::DynamicWriteSliceBackwardPlan>(desc, options, plan);
}
