/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BARACUDA_SEGMENT_H_
#define BARACUDA_SEGMENT_H_

#include "plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Segment reductions: the rows of input [num_inputs, embedding_dim] that belong to one segment are
 * reduced, column by column, to one row of output [num_segments, embedding_dim].
 *
 * Which rows these are is said by segment_ids [num_inputs], or, with BARACUDA_SEGMENT_OFFSETS, by
 * offsets [num_segments + 1]: segment s has the rows offsets[s] .. offsets[s + 1] - 1. Ids outside
 * 0 .. num_segments - 1 are dropped, offsets are clamped to 0 .. num_inputs. Ids that are promised to
 * be sorted and are not, and offsets that fall, give undefined values, but nothing outside the operands
 * is read or written. */

typedef enum baracuda_segment_kind {
  BARACUDA_SEGMENT_SUM = 0,
  BARACUDA_SEGMENT_MEAN = 1, /* of integers: rounded down */
  BARACUDA_SEGMENT_MAX = 2,  /* NaN is above all numbers, and -0 below +0 */
  BARACUDA_SEGMENT_MIN = 3,  /* NaN is below all numbers, and -0 below +0 */
  BARACUDA_SEGMENT_PROD = 4
} baracuda_segment_kind;

typedef enum baracuda_segment_ids {
  BARACUDA_SEGMENT_UNSORTED = 0,
  BARACUDA_SEGMENT_SORTED = 1, /* segment_ids never fall */
  BARACUDA_SEGMENT_OFFSETS = 2
} baracuda_segment_ids;

typedef enum baracuda_segment_ties {
  BARACUDA_TIES_FIRST = 0, /* the lowest row takes the gradient */
  BARACUDA_TIES_EVEN = 1   /* equal rows share it; of several NaN the first takes it */
} baracuda_segment_ties;

typedef enum baracuda_segment_saved {
  BARACUDA_SAVED_INPUT = 0,
  BARACUDA_SAVED_ARG = 1 /* what the forward wrote: max and min with BARACUDA_TIES_FIRST */
} baracuda_segment_saved;

/* Operands: input (in), segment_ids or offsets (in), output (out), arg (out, with return_arg: the
 * lowest row that holds the maximum or minimum, num_inputs where a segment is empty). */
typedef struct baracuda_segment_reduce_desc {
  size_t struct_size;
  int32_t kind; /* baracuda_segment_kind */
  int32_t ids;  /* baracuda_segment_ids */
  int64_t num_inputs;
  int64_t embedding_dim;
  int64_t num_segments;
  DLDataType dtype;       /* float16, bfloat16, float32, float64, int8, uint8, int32 or int64 */
  DLDataType index_dtype; /* of segment_ids, offsets and arg: int32 or int64 */
  int32_t ties;           /* baracuda_segment_ties; there is no arg to share a gradient by */
  int32_t return_arg;
  /* What empty segments hold; absent: 0 (sum, mean), 1 (prod), or the lowest (max) or highest (min)
   * value of the dtype, infinities included. */
  baracuda_optional_double empty_value;
} baracuda_segment_reduce_desc;

/* Operands: d_output (in), input (in: prod, and max and min with BARACUDA_SAVED_INPUT), segment_ids or
 * offsets (in), arg (in, with BARACUDA_SAVED_ARG), d_input (out; rows without a segment get 0). */
typedef struct baracuda_segment_reduce_backward_desc {
  size_t struct_size;
  int32_t kind;
  int32_t ids;
  int64_t num_inputs;
  int64_t embedding_dim;
  int64_t num_segments;
  DLDataType dtype; /* float16, bfloat16, float32 or float64 */
  DLDataType index_dtype;
  int32_t ties;
  int32_t saved; /* baracuda_segment_saved */
} baracuda_segment_reduce_backward_desc;

baracuda_status baracuda_segment_reduce_plan_create(const baracuda_segment_reduce_desc *desc,
                                                    const baracuda_plan_options *options, baracuda_plan **plan);
baracuda_status baracuda_segment_reduce_backward_plan_create(const baracuda_segment_reduce_backward_desc *desc,
                                                             const baracuda_plan_options *options,
                                                             baracuda_plan **plan);

#ifdef __cplusplus
}
#endif

#endif
