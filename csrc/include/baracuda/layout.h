/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BARACUDA_LAYOUT_H_
#define BARACUDA_LAYOUT_H_

#include "plan.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum baracuda_overlap {
  BARACUDA_OVERLAP_REFUSE = 0, /* a source that shares elements with the window is an error */
  BARACUDA_OVERLAP_STAGE = 1   /* such a source is copied to the workspace first */
} baracuda_overlap;

/* dest[start:end, ...] = source, in place: elements outside the window keep their bits.
 * Operands: dest (inout, dest_shape), source (in, end - start on every axis). */
typedef struct baracuda_write_slice_desc {
  size_t struct_size; /* sizeof(baracuda_write_slice_desc) */
  baracuda_shape dest_shape;
  baracuda_ranges ranges;
  DLDataType dtype;
  int32_t overlap; /* baracuda_overlap */
} baracuda_write_slice_desc;

baracuda_status baracuda_write_slice_plan_create(const baracuda_write_slice_desc *desc,
                                                 const baracuda_plan_options *options, baracuda_plan **plan);

#ifdef __cplusplus
}
#endif

#endif
