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

typedef enum baracuda_bounds {
  BARACUDA_BOUNDS_DROP = 0, /* elements that would fall outside are not written */
  BARACUDA_BOUNDS_CLAMP = 1 /* the whole block is shifted inside */
} baracuda_bounds;

/* dest[start:start + block_shape, ...] = source, in place, where the start of each axis is read on
 * the device when the work runs. Any start is safe.
 * Operands: dest (inout, dest_shape), source (in, block_shape), starts (in, [rank]; inout with
 * advance_axis). `batched`: dest and source have the same leading extent, starts is [leading
 * extent, rank], and entry i of source goes to entry i of dest by starts of its own. */
typedef struct baracuda_dynamic_write_slice_desc {
  size_t struct_size; /* sizeof(baracuda_dynamic_write_slice_desc) */
  baracuda_shape dest_shape;
  baracuda_shape block_shape;
  DLDataType dtype;
  DLDataType index_dtype; /* int32 or int64 */
  int32_t batched;
  int32_t bounds;       /* baracuda_bounds */
  int64_t advance_axis; /* after the write this axis' starts grow by the block's extent; -1: none does */
} baracuda_dynamic_write_slice_desc;

baracuda_status baracuda_dynamic_write_slice_plan_create(const baracuda_dynamic_write_slice_desc *desc,
                                                         const baracuda_plan_options *options, baracuda_plan **plan);

typedef enum baracuda_gradients {
  BARACUDA_GRADIENTS_BOTH = 0,
  BARACUDA_GRADIENTS_DEST = 1,
  BARACUDA_GRADIENTS_SOURCE = 2
} baracuda_gradients;

/* The gradients of dynamic_write_slice as a function of dest and source.
 * Operands: grad (in, dest_shape), starts (in), d_dest (out, dest_shape: grad with the window
 * zeroed; may be grad itself), d_source (out, block_shape: the window; zeros for elements that were
 * dropped). The operand of a gradient that is not wanted is not in the list. */
typedef struct baracuda_dynamic_write_slice_backward_desc {
  size_t struct_size; /* sizeof(baracuda_dynamic_write_slice_backward_desc) */
  baracuda_shape dest_shape;
  baracuda_shape block_shape;
  DLDataType dtype; /* not int4 or uint4 */
  DLDataType index_dtype;
  int32_t batched;
  int32_t bounds;    /* baracuda_bounds */
  int32_t gradients; /* baracuda_gradients */
} baracuda_dynamic_write_slice_backward_desc;

baracuda_status baracuda_dynamic_write_slice_backward_plan_create(
    const baracuda_dynamic_write_slice_backward_desc *desc, const baracuda_plan_options *options, baracuda_plan **plan);

#ifdef __cplusplus
}
#endif

#endif
