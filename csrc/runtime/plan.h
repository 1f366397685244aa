// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "baracuda/plan.h"
#include "runtime/device.h"
#include "runtime/error.h"
#include "runtime/recording.h"
#include "runtime/tensor.h"

namespace baracuda {

constexpr int kMaxOperands = 12;
constexpr size_t kWorkspaceAlignment = 256;

enum class Role { in = BARACUDA_IN, out = BARACUDA_OUT, inout = BARACUDA_INOUT };

// An argument of run, as data. The one checker in check.cpp holds operands against it.
struct OperandSpec {
  const char *name;
  Role role;
  DLDataType dtype;
  Shape shape;
  bool optional = false;
  // The operand that may be the very same elements in the same order, or -1.
  int in_place_with = -1;
  // The part of an output that is written, where that is not all of it; `window.rank` 0: all.
  Shape window_start = {};
  Shape window = {};
  // The kernels order reads before writes themselves, so that shared elements are fine.
  bool may_overlap = false;
  // Of `dtype`, in bytes; filled in by the runtime.
  int alignment = 1;

  bool written() const { return role != Role::in; }
};

struct Options {
  Device device;
  bool deterministic = true;
  std::string backend;         // empty: any
  int64_t max_workspace = -1;  // negative: no limit
};

struct Guarantee {
  const char *math_precision = nullptr;
  const char *accumulator = nullptr;
  bool bit_stable_on_same_hardware = true;
  bool deterministic = true;
};

struct Sku {
  const char *category = nullptr;
  const char *op = nullptr;
  const char *dtype = nullptr;
  const char *aux_dtype = nullptr;
  std::string arch;
  const char *backend = nullptr;
  Guarantee guarantee;
};

struct Cost {
  int64_t bytes = 0;
  int64_t operations = 0;
};

// The operands of one run, checked, in the order of the list.
struct Operands {
  // Only the list's own slots are ever set.
  Tensor tensor[kMaxOperands];

  const Tensor &operator[](int index) const { return tensor[index]; }
  Tensor &operator[](int index) { return tensor[index]; }
};

struct Call {
  const Operands &operands;
  std::byte *workspace;
  Stream stream;
};

// The base of every operator's plan. A derived constructor checks the descriptor, fills the
// protected members and picks the kernel; the rest is here.
class Plan {
 public:
  explicit Plan(const char *name, Options options) : name_(name), options_(std::move(options)) {}
  Plan(const Plan &) = delete;
  Plan &operator=(const Plan &) = delete;
  virtual ~Plan() = default;

  // Refuses what the preference forbids. Called once by create_plan, when construction is done.
  void finish();

  void check(DLTensor *const operands[], const uint64_t flags[], size_t count, Operands &checked) const;
  void check_workspace(const void *workspace, size_t size) const;
  void launch(const Operands &operands, void *workspace, void *stream) const;
  // Whether a run is launches that can be kept.
  bool can_record() const { return launches_only_ && options_.device.is_cuda(); }
  Recording record(const Operands &operands) const;

  const char *name() const { return name_; }
  // No other plan of the process has or had it.
  uint64_t number() const { return number_; }
  const std::string &path() const { return path_; }
  const Device &device() const { return options_.device; }
  const std::vector<OperandSpec> &operands() const { return operands_; }
  size_t workspace_size() const { return workspace_size_; }
  const Sku &sku() const { return sku_; }
  const Cost &cost() const { return cost_; }

 protected:
  // Enqueues the work; the device is current. Operands may be empty.
  virtual void run(const Call &call) const = 0;
  // Refusals that a list of operands can't express.
  virtual void check_more(const Operands &) const {}

  // What the plan's sentences begin with.
  template <class... Parts>
  [[noreturn]] void refuse(const Parts &...parts) const {
    invalid(name_, ": ", parts...);
  }
  // Rank 1..8, no negative extent, and a byte count that an int64 holds.
  void check_shape(const char *field, const baracuda_shape &shape, DLDataType dtype, Shape &out) const;
  const DTypeInfo &check_dtype(const char *field, DLDataType dtype) const;
  // For kernels that there is another one for, which needs less.
  bool allows_workspace(size_t bytes) const {
    return options_.max_workspace < 0 || bytes <= size_t(options_.max_workspace);
  }

  const char *name_;
  Options options_;
  std::vector<OperandSpec> operands_;
  size_t workspace_size_ = 0;
  Sku sku_;
  Cost cost_;
  std::string path_;
  // Run needs no workspace and consists of `launch` calls alone, so that a bound plan can keep them.
  bool launches_only_ = false;

 private:
  uint64_t number_ = 0;

  void check_overlaps(const Operands &checked) const;
};

Options read_options(const char *plan, const baracuda_plan_options *options);
void copy_descriptor(const char *plan, void *to, size_t size, const void *from);

// The body of every creator: `P` is constructed from the descriptor and the options.
template <class P, class Descriptor>
baracuda_status create_plan(const Descriptor *desc, const baracuda_plan_options *options,
                            baracuda_plan **plan) noexcept {
  return guarded([&] {
    if (!plan) invalid(P::kName, ": plan is NULL");
    *plan = nullptr;
    Descriptor descriptor = {};
    copy_descriptor(P::kName, &descriptor, sizeof descriptor, desc);
    Options chosen = read_options(P::kName, options);
    const DeviceGuard guard(chosen.device);
    auto created = std::make_unique<P>(descriptor, std::move(chosen));
    created->finish();
    *plan = reinterpret_cast<baracuda_plan *>(static_cast<Plan *>(created.release()));
  });
}

}  // namespace baracuda
