// SPDX-License-Identifier: Apache-2.0
#include "runtime/plan.h"

#include <atomic>

#include "runtime/overlap.h"
#include "runtime/repeat.h"

namespace baracuda {

void Plan::finish() {
  static std::atomic<uint64_t> created = 0;
  number_ = ++created;
  for (OperandSpec &spec : operands_) spec.alignment = find_dtype(spec.dtype)->alignment;
  if (!options_.backend.empty() && options_.backend != sku_.backend)
    unsupported(name_, ": backend \"", options_.backend, "\" was asked for, this problem has \"", sku_.backend, "\"");
  if (options_.deterministic && !sku_.guarantee.deterministic)
    unsupported(name_, ": no deterministic kernel for this problem");
  if (options_.max_workspace >= 0 && workspace_size_ > size_t(options_.max_workspace))
    unsupported(name_, ": needs a workspace of ", workspace_size_, " bytes, max_workspace is ", options_.max_workspace);
}

void Plan::check_workspace(const void *workspace, size_t size) const {
  if (size < workspace_size_)
    throw Error(BARACUDA_WORKSPACE_TOO_SMALL,
                text(name_, ": workspace: expected at least ", workspace_size_, " bytes, got ", size), workspace_size_,
                size);
  if (workspace_size_ == 0) return;
  if (!workspace) refuse("workspace: is NULL");
  if (reinterpret_cast<uintptr_t>(workspace) % kWorkspaceAlignment != 0)
    throw Error(BARACUDA_MISALIGNED_OPERAND, text(name_, ": workspace: expected an address that is a multiple of ",
                                                  kWorkspaceAlignment, ", got ", workspace));
}

void Plan::launch(const Operands &operands, void *workspace, void *stream) const {
  const DeviceGuard guard(options_.device);
  run({operands, static_cast<std::byte *>(workspace), stream});
}

Recording Plan::record(const Operands &operands) const {
  struct Scope {
    explicit Scope(Recording *into) { recording = into; }
    ~Scope() { recording = nullptr; }
  };
  Recording kept;
  kept.device = options_.device;
  const Scope scope(&kept);
  launch(operands, nullptr, nullptr);
  return kept;
}

const DTypeInfo &Plan::check_dtype(const char *field, DLDataType dtype) const {
  const DTypeInfo *info = find_dtype(dtype);
  if (!info) unsupported(name_, ": ", field, ": no kernel for ", dtype_name(dtype));
  return *info;
}

void Plan::check_shape(const char *field, const baracuda_shape &shape, DLDataType dtype, Shape &out) const {
  if (shape.rank < 1) refuse(field, ": expected a rank of 1 to ", kMaxRank, ", got ", shape.rank);
  if (shape.rank > kMaxRank)
    unsupported(name_, ": ", field, ": expected a rank of 1 to ", kMaxRank, ", got ", shape.rank);
  out.rank = shape.rank;
  __int128 elements = 1;
  for (int axis = 0; axis < shape.rank; ++axis) {
    const int64_t extent = shape.extent[axis];
    if (extent < 0) refuse(field, ": extent ", extent, " of axis ", axis, " is negative");
    out[axis] = extent;
    // Zero extents are left out, so that strides of empty tensors can be formed, too.
    if (extent > 0) elements *= extent;
    if (elements * nibbles(dtype) > INT64_MAX)
      refuse(field, ": ", shape_text(shape.extent, shape.rank), " has more bytes than an int64 can count");
  }
}

Options read_options(const char *plan, const baracuda_plan_options *options) {
  if (!options) invalid(plan, ": options is NULL");
  baracuda_plan_options known = {};
  copy_descriptor(plan, &known, sizeof known, options);
  Options chosen;
  chosen.device = resolve_device(plan, known.device);
  chosen.deterministic = known.deterministic != 0;
  chosen.backend = known.backend ? known.backend : "";
  chosen.max_workspace = known.max_workspace;
  return chosen;
}

void copy_descriptor(const char *plan, void *to, size_t size, const void *from) {
  if (!from) invalid(plan, ": descriptor is NULL");
  size_t given = 0;
  std::memcpy(&given, from, sizeof given);
  if (given < sizeof given) invalid(plan, ": struct_size of the descriptor is ", given);
  // A caller built against an older header gives a shorter struct; the rest stays zero. One built
  // against a newer header may use only what this library knows.
  const auto *bytes = static_cast<const unsigned char *>(from);
  for (size_t i = size; i < given; ++i)
    if (bytes[i] != 0) unsupported(plan, ": the descriptor has fields that this version does not know");
  std::memcpy(to, from, given < size ? given : size);
}

}  // namespace baracuda

using baracuda::guarded;
using baracuda::Plan;

namespace {

const Plan &as_plan(const baracuda_plan *plan) {
  if (!plan) baracuda::invalid("plan is NULL");
  return *reinterpret_cast<const Plan *>(plan);
}

}  // namespace

struct baracuda_bound {
  const Plan *plan;
  baracuda::Operands operands;
  bool recorded;
  baracuda::Recording recording;
};

const baracuda::Recording *baracuda::recorded_launches(const baracuda_bound *bound) {
  return bound && bound->recorded ? &bound->recording : nullptr;
}

extern "C" {

// Questions that can't fail answer an absent plan with nothing.
const char *baracuda_plan_name(const baracuda_plan *plan) { return plan ? as_plan(plan).name() : ""; }
const char *baracuda_plan_path(const baracuda_plan *plan) { return plan ? as_plan(plan).path().c_str() : ""; }
size_t baracuda_plan_operand_count(const baracuda_plan *plan) { return plan ? as_plan(plan).operands().size() : 0; }
size_t baracuda_plan_workspace_size(const baracuda_plan *plan) { return plan ? as_plan(plan).workspace_size() : 0; }

DLDevice baracuda_plan_device(const baracuda_plan *plan) {
  if (!plan) return {kDLCPU, 0};
  const baracuda::Device &device = as_plan(plan).device();
  return {device.type, device.ordinal};
}

baracuda_status baracuda_plan_operand(const baracuda_plan *plan, size_t index, baracuda_operand_info *info) {
  return guarded([&] {
    const Plan &self = as_plan(plan);
    if (!info) baracuda::invalid(self.name(), ": info is NULL");
    if (index >= self.operands().size())
      baracuda::invalid(self.name(), ": operand ", index, " of ", self.operands().size());
    const baracuda::OperandSpec &spec = self.operands()[index];
    *info = {spec.name,         static_cast<baracuda_role>(spec.role),
             spec.dtype,        spec.shape.rank,
             spec.shape.extent, spec.optional,
             spec.in_place_with};
  });
}

void baracuda_plan_sku(const baracuda_plan *plan, baracuda_sku *sku) {
  if (!sku) return;
  *sku = {};
  if (!plan) return;
  const baracuda::Sku &own = as_plan(plan).sku();
  *sku = {own.category,
          own.op,
          own.dtype,
          own.aux_dtype,
          nullptr,
          nullptr,
          own.arch.c_str(),
          own.backend,
          own.guarantee.math_precision,
          own.guarantee.accumulator,
          own.guarantee.bit_stable_on_same_hardware,
          own.guarantee.deterministic};
}

void baracuda_plan_cost(const baracuda_plan *plan, baracuda_cost *cost) {
  if (!cost) return;
  *cost = {};
  if (plan) *cost = {as_plan(plan).cost().bytes, as_plan(plan).cost().operations};
}

baracuda_status baracuda_plan_can_implement(const baracuda_plan *plan, DLTensor *const operands[],
                                            const uint64_t flags[], size_t operand_count) {
  return guarded([&] {
    baracuda::Operands checked;
    as_plan(plan).check(operands, flags, operand_count, checked);
  });
}

baracuda_status baracuda_plan_run(const baracuda_plan *plan, DLTensor *const operands[], const uint64_t flags[],
                                  size_t operand_count, void *workspace, size_t workspace_size, void *stream) {
  return guarded([&] {
    const Plan &self = as_plan(plan);
    baracuda::RepeatedRun *place = nullptr;
    if (self.can_record() && operands && operand_count == self.operands().size())
      place = &baracuda::place_of_run(self.number(), operands, operand_count);
    const bool again = place && place->signature.is_of(self.number(), operands, flags, operand_count);
    if (again && place->recorded) {
      baracuda::replay(place->recording, stream);
      return;
    }
    baracuda::Operands checked;
    self.check(operands, flags, operand_count, checked);
    if (again) {
      place->recording = self.record(checked);
      place->recorded = true;
      baracuda::replay(place->recording, stream);
      return;
    }
    self.check_workspace(workspace, workspace_size);
    self.launch(checked, workspace, stream);
    if (place) {
      place->recorded = false;
      place->signature.read(self.number(), operands, flags, operand_count);
    }
  });
}

baracuda_status baracuda_plan_bind(const baracuda_plan *plan, DLTensor *const operands[], const uint64_t flags[],
                                   size_t operand_count, baracuda_bound **bound) {
  return guarded([&] {
    const Plan &self = as_plan(plan);
    if (!bound) baracuda::invalid(self.name(), ": bound is NULL");
    *bound = nullptr;
    auto made = std::make_unique<baracuda_bound>();
    self.check(operands, flags, operand_count, made->operands);
    made->plan = &self;
    made->recorded = self.can_record();
    if (made->recorded) made->recording = self.record(made->operands);
    *bound = made.release();
  });
}

baracuda_status baracuda_bound_run(const baracuda_bound *bound, void *workspace, size_t workspace_size, void *stream) {
  return guarded([&] {
    if (!bound) baracuda::invalid("bound is NULL");
    if (bound->recorded) {
      baracuda::replay(bound->recording, stream);
      return;
    }
    bound->plan->check_workspace(workspace, workspace_size);
    bound->plan->launch(bound->operands, workspace, stream);
  });
}

void baracuda_bound_destroy(baracuda_bound *bound) { delete bound; }

void baracuda_plan_destroy(baracuda_plan *plan) { delete reinterpret_cast<Plan *>(plan); }
}
