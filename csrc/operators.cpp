// SPDX-License-Identifier: Apache-2.0
// Every operator as data. A new operator adds its fields and one row.
#include "baracuda/operators.h"

#include <cstddef>
#include <iterator>

#include "baracuda/layout.h"
#include "baracuda/scan.h"

namespace {

template <class Descriptor,
          baracuda_status (*kCreate)(const Descriptor *, const baracuda_plan_options *, baracuda_plan **)>
baracuda_status create(const void *desc, const baracuda_plan_options *options, baracuda_plan **plan) {
  return kCreate(static_cast<const Descriptor *>(desc), options, plan);
}

constexpr const char *kOverlaps[] = {"refuse", "stage", nullptr};

constexpr baracuda_field kWriteSlice[] = {
    {"dest_shape", BARACUDA_FIELD_SHAPE, offsetof(baracuda_write_slice_desc, dest_shape), nullptr},
    {"ranges", BARACUDA_FIELD_RANGES, offsetof(baracuda_write_slice_desc, ranges), nullptr},
    {"dtype", BARACUDA_FIELD_DTYPE, offsetof(baracuda_write_slice_desc, dtype), nullptr},
    {"overlap", BARACUDA_FIELD_CHOICE, offsetof(baracuda_write_slice_desc, overlap), kOverlaps},
};

constexpr const char *kScanKinds[] = {"cumsum",       "cumprod",           "cummax", "cummin",
                                      "logcumsumexp", "linear_recurrence", nullptr};
constexpr const char *kTies[] = {"first", "last", nullptr};
constexpr const char *kSaved[] = {"y", "x", "indices", nullptr};

constexpr baracuda_field kScan[] = {
    {"kind", BARACUDA_FIELD_CHOICE, offsetof(baracuda_scan_desc, kind), kScanKinds},
    {"shape", BARACUDA_FIELD_SHAPE, offsetof(baracuda_scan_desc, shape), nullptr},
    {"axis", BARACUDA_FIELD_INT64, offsetof(baracuda_scan_desc, axis), nullptr},
    {"dtype", BARACUDA_FIELD_DTYPE, offsetof(baracuda_scan_desc, dtype), nullptr},
    {"out_dtype", BARACUDA_FIELD_OPTIONAL_DTYPE, offsetof(baracuda_scan_desc, out_dtype), nullptr},
    {"reverse", BARACUDA_FIELD_BOOL, offsetof(baracuda_scan_desc, reverse), nullptr},
    {"exclusive", BARACUDA_FIELD_BOOL, offsetof(baracuda_scan_desc, exclusive), nullptr},
    {"indices", BARACUDA_FIELD_BOOL, offsetof(baracuda_scan_desc, indices), nullptr},
    {"ties", BARACUDA_FIELD_CHOICE, offsetof(baracuda_scan_desc, ties), kTies},
    {"index_dtype", BARACUDA_FIELD_OPTIONAL_DTYPE, offsetof(baracuda_scan_desc, index_dtype), nullptr},
    {"has_h0", BARACUDA_FIELD_BOOL, offsetof(baracuda_scan_desc, has_h0), nullptr},
};

constexpr baracuda_field kScanBackward[] = {
    {"kind", BARACUDA_FIELD_CHOICE, offsetof(baracuda_scan_backward_desc, kind), kScanKinds},
    {"shape", BARACUDA_FIELD_SHAPE, offsetof(baracuda_scan_backward_desc, shape), nullptr},
    {"axis", BARACUDA_FIELD_INT64, offsetof(baracuda_scan_backward_desc, axis), nullptr},
    {"dtype", BARACUDA_FIELD_DTYPE, offsetof(baracuda_scan_backward_desc, dtype), nullptr},
    {"reverse", BARACUDA_FIELD_BOOL, offsetof(baracuda_scan_backward_desc, reverse), nullptr},
    {"exclusive", BARACUDA_FIELD_BOOL, offsetof(baracuda_scan_backward_desc, exclusive), nullptr},
    {"saved", BARACUDA_FIELD_CHOICE, offsetof(baracuda_scan_backward_desc, saved), kSaved},
    {"ties", BARACUDA_FIELD_CHOICE, offsetof(baracuda_scan_backward_desc, ties), kTies},
    {"index_dtype", BARACUDA_FIELD_OPTIONAL_DTYPE, offsetof(baracuda_scan_backward_desc, index_dtype), nullptr},
    {"has_h0", BARACUDA_FIELD_BOOL, offsetof(baracuda_scan_backward_desc, has_h0), nullptr},
};

constexpr baracuda_operator kOperators[] = {
    {"write_slice", "WriteSlicePlan", "layout", sizeof(baracuda_write_slice_desc), kWriteSlice, std::size(kWriteSlice),
     create<baracuda_write_slice_desc, baracuda_write_slice_plan_create>},
    {"scan", "ScanPlan", "scan", sizeof(baracuda_scan_desc), kScan, std::size(kScan),
     create<baracuda_scan_desc, baracuda_scan_plan_create>},
    {"scan_backward", "ScanBackwardPlan", "scan", sizeof(baracuda_scan_backward_desc), kScanBackward,
     std::size(kScanBackward), create<baracuda_scan_backward_desc, baracuda_scan_backward_plan_create>},
};

}  // namespace

extern "C" const baracuda_operator *baracuda_operators(size_t *count) {
  if (count) *count = std::size(kOperators);
  return kOperators;
}
