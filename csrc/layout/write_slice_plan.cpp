// SPDX-License-Identifier: Apache-2.0
#include "baracuda/layout.h"
#include "layout/write_slice.h"
#include "runtime/overlap.h"
#include "runtime/plan.h"
#include "runtime/workspace.h"

namespace baracuda {
namespace {

class WriteSlicePlan final : public Plan {
 public:
  static constexpr const char *kName = "WriteSlicePlan";

  WriteSlicePlan(const baracuda_write_slice_desc &desc, Options options) : Plan(kName, std::move(options)) {
    const DTypeInfo &dtype = check_dtype("dtype", desc.dtype);
    Shape dest;
    check_shape("dest_shape", desc.dest_shape, desc.dtype, dest);
    check_ranges(desc.ranges, dest);
    if (desc.overlap != BARACUDA_OVERLAP_REFUSE && desc.overlap != BARACUDA_OVERLAP_STAGE)
      refuse("overlap: expected refuse or stage, got ", desc.overlap);
    staged_ = desc.overlap == BARACUDA_OVERLAP_STAGE;

    OperandSpec to = {"dest", Role::inout, desc.dtype, dest};
    to.in_place_with = kSource;
    to.window_start = start_;
    to.window = extent_;
    to.may_overlap = staged_;
    operands_ = {to, {"source", Role::in, desc.dtype, extent_}};

    const int64_t bytes = storage_bytes(desc.dtype, extent_.count());
    cost_ = {2 * bytes, 0};
    if (staged_) {
      Workspace counter(nullptr);
      take_stage(counter);
      workspace_size_ = counter.size();
    }
    launches_only_ = !staged_;
    choose_kernel(dest, dtype.name);
  }

 protected:
  void run(const Call &call) const override {
    if (extent_.count() == 0) return;
    const Tensor window = window_of(call.operands[kDest], start_, extent_);
    const Tensor &source = call.operands[kSource];
    if (same_elements(window, source)) return;
    if (staged_ && shared_memory(window, source) != Overlap::none) {
      Workspace workspace(call.workspace);
      Tensor stage = source;
      stage.phase = 0;
      stage.data = take_stage(workspace);
      set_row_major_strides(stage);
      copy(stage, source, call.stream);
      copy(window, stage, call.stream);
    } else {
      copy(window, source, call.stream);
    }
  }

 private:
  enum { kDest, kSource };

  std::byte *take_stage(Workspace &workspace) const {
    return workspace.take<std::byte>(storage_bytes(operands_[kSource].dtype, extent_.count()));
  }

  void check_ranges(const baracuda_ranges &ranges, const Shape &dest) {
    if (ranges.rank != dest.rank)
      refuse("ranges: expected ", dest.rank, " ranges for dest_shape ", to_string(dest), ", got ", ranges.rank);
    start_.rank = extent_.rank = dest.rank;
    for (int axis = 0; axis < dest.rank; ++axis) {
      const int64_t start = ranges.start[axis];
      const int64_t end = ranges.end[axis];
      if (start < 0 || end < start || end > dest[axis])
        refuse("ranges: expected 0 <= start <= end <= ", dest[axis], " on axis ", axis, ", got (", start, ", ", end,
               ")");
      start_[axis] = start;
      extent_[axis] = end - start;
    }
  }

  void choose_kernel(const Shape &dest, const char *dtype) {
    // One chunk: after the first axis on which the window has more than one entry, every axis is
    // covered whole.
    bool chunk = true;
    bool whole = true;
    int axis = 0;
    while (axis < dest.rank && extent_[axis] <= 1) {
      whole = whole && extent_[axis] == dest[axis];
      ++axis;
    }
    for (int first = axis; axis < dest.rank; ++axis) {
      whole = whole && extent_[axis] == dest[axis];
      chunk = chunk && (axis == first || extent_[axis] == dest[axis]);
    }
    path_ = extent_.count() == 0 ? "empty" : whole ? "whole" : chunk ? "chunk" : "rows";
    sku_ = {"layout", "write_slice", dtype, nullptr, "cpu", "cpu", {"exact", "none", true, true}};
    if constexpr (kWithCuda) {
      if (device().is_cuda()) {
        sku_.arch = write_slice_arch(kName);
        sku_.backend = "bespoke";
      }
    }
  }

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

  Shape start_;
  Shape extent_;
  bool staged_;
};

}  // namespace
}  // namespace baracuda

extern "C" baracuda_status baracuda_write_slice_plan_create(const baracuda_write_slice_desc *desc,
                                                            const baracuda_plan_options *options,
                                                            baracuda_plan **plan) {
  return baracuda::create_plan<baracuda::WriteSlicePlan>(desc, options, plan);
}
