// SPDX-License-Identifier: Apache-2.0
// Every operator as data. A new operator adds its fields and one row.
#include "baracuda/operators.h"

#include <cstddef>
#include <iterator>

#include "baracuda/layout.h"

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

constexpr baracuda_operator kOperators[] = {
    {"write_slice", "WriteSlicePlan", "layout", sizeof(baracuda_write_slice_desc), kWriteSlice, std::size(kWriteSlice),
     create<baracuda_write_slice_desc, baracuda_write_slice_plan_create>},
};

}  // namespace

extern "C" const baracuda_operator *baracuda_operators(size_t *count) {
  if (count) *count = std::size(kOperators);
  return kOperators;
}
