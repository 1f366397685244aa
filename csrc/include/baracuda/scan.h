/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BARACUDA_SCAN_H_
#define BARACUDA_SCAN_H_

#include "plan.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum baracuda_scan_kind {
  BARACUDA_CUMSUM = 0,
  BARACUDA_CUMPROD = 1,
  BARACUDA_CUMMAX = 2,
  BARACUDA_CUMMIN = 3,
  BARACUDA_LOGCUMSUMEXP = 4,
  BARACUDA_LINEAR_RECURRENCE = 5 /* h_j = a_j h_{j-1} + b_j */
} baracuda_scan_kind;

/* Which of equal extrema keeps the index. */
typedef enum baracuda_scan_ties { BARACUDA_SCAN_TIES_FIRST = 0, BARACUDA_SCAN_TIES_LAST = 1 } baracuda_scan_ties;

/* A scan along one axis.
 * Operands: x (in), y (out) and, with `indices`, indices (out), all of `shape`; for a linear
 * recurrence a, b (in), with `has_h0` h0 (in, `shape` without the axis), and h (out). */
typedef struct baracuda_scan_desc {
  size_t struct_size; /* sizeof(baracuda_scan_desc) */
  int32_t kind;       /* baracuda_scan_kind */
  baracuda_shape shape;
  int64_t axis; /* negative: from the last */
  DLDataType dtype;
  DLDataType out_dtype;   /* of y; bits 0: int64 for sums and products of integers, else dtype */
  int32_t reverse;        /* from the last element to the first */
  int32_t exclusive;      /* each output leaves out its own element */
  int32_t indices;        /* cummax and cummin: also where each extremum is */
  int32_t ties;           /* baracuda_scan_ties */
  DLDataType index_dtype; /* int32 or int64; bits 0: int64 */
  int32_t has_h0;
} baracuda_scan_desc;

/* What a gradient of cummax or cummin finds the extrema by. */
typedef enum baracuda_scan_saved {
  BARACUDA_SCAN_SAVED_Y = 0,
  BARACUDA_SCAN_SAVED_X = 1,
  BARACUDA_SCAN_SAVED_INDICES = 2
} baracuda_scan_saved;

/* The gradient of a scan; `reverse`, `exclusive` and `ties` are the forward scan's.
 * Operands, all of `shape`:
 *   cumsum: dy (in), dx (out)
 *   cumprod, logcumsumexp: dy, x, y (in), dx (out)
 *   cummax, cummin: dy and what `saved` names (in), dx (out)
 *   linear_recurrence: dh, a, h (in), with `has_h0` h0 (in), da, db (out), with `has_h0` dh0 (out) */
typedef struct baracuda_scan_backward_desc {
  size_t struct_size; /* sizeof(baracuda_scan_backward_desc) */
  int32_t kind;
  baracuda_shape shape;
  int64_t axis;
  DLDataType dtype;
  int32_t reverse;
  int32_t exclusive;
  int32_t saved; /* baracuda_scan_saved */
  int32_t ties;
  DLDataType index_dtype;
  int32_t has_h0;
} baracuda_scan_backward_desc;

baracuda_status baracuda_scan_plan_create(const baracuda_scan_desc *desc, const baracuda_plan_options *options,
                                          baracuda_plan **plan);
baracuda_status baracuda_scan_backward_plan_create(const baracuda_scan_backward_desc *desc,
                                                   const baracuda_plan_options *options, baracuda_plan **plan);

#ifdef __cplusplus
}
#endif

#endif
