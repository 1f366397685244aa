/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BARACUDA_POOLING_H_
#define BARACUDA_POOLING_H_

#include "plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Fractional max pooling: windows of a fixed size, spread over the input so that any number of
 * outputs fits, at places that a random number per plane and axis decides.
 *
 * x [batch, channels, (d_in,) h_in, w_in], y and indices [batch, channels, (d_out,) h_out, w_out].
 * Every extent is at least 1, and a window no larger than its axis. */

typedef enum baracuda_placement {
  /* Window i of an axis starts at floor(i (in - window) / (out - 1) + u), a single window at
   * floor(u (in - window)); no start goes beyond in - window. Samples come in the order (h, w), (d, h, w). */
  BARACUDA_PLACEMENT_EVEN = 0,
  /* PyTorch's rule, its order of samples ((w, h) in 2-D, (d, h, w) in 3-D), and its limits: out + window - 1
   * must be at most `in` in 2-D and less than `in` in 3-D. */
  BARACUDA_PLACEMENT_TORCH = 1
} baracuda_placement;

typedef enum baracuda_index_base {
  BARACUDA_INDEX_TENSOR = 0, /* positions in the whole of x, row-major */
  BARACUDA_INDEX_PLANE = 1   /* positions within the (d,) h, w of one batch entry and channel */
} baracuda_index_base;

/* Operands: x (in), random_samples (in, [batch, channels, 2]) or offset (in, int64 [1]), y (out),
 * indices (out, unless index_dtype has no bits).
 *
 * The first maximum of a window wins. A NaN beats any number: the first NaN of the window, or, with
 * BARACUDA_PLACEMENT_TORCH, the last. Samples outside [0, 1) count as its nearest element, NaN as 0. */
typedef struct baracuda_fractional_max_pool2d_desc {
  size_t struct_size;
  int64_t batch;
  int64_t channels;
  int64_t h_in;
  int64_t w_in;
  int64_t window_h;
  int64_t window_w;
  int64_t h_out;
  int64_t w_out;
  DLDataType dtype;         /* float16, bfloat16, float32 or float64 */
  DLDataType index_dtype;   /* int64 or int32; bits 0: no indices */
  DLDataType samples_dtype; /* float32, bits 0 for the same, or float64 where dtype is that */
  int32_t placement;        /* baracuda_placement */
  int32_t index_base;       /* baracuda_index_base */
  /* Non-zero: samples are an operand. Zero: they come from Philox 4x32-10 with key `seed` and
   * counter (offset, n * channels + c), 64 bits each; sample a is (word a >> 8) * 2^-24. */
  int32_t samples;
  int64_t seed;
} baracuda_fractional_max_pool2d_desc;

typedef struct baracuda_fractional_max_pool3d_desc {
  size_t struct_size;
  int64_t batch;
  int64_t channels;
  int64_t d_in;
  int64_t h_in;
  int64_t w_in;
  int64_t window_d;
  int64_t window_h;
  int64_t window_w;
  int64_t d_out;
  int64_t h_out;
  int64_t w_out;
  DLDataType dtype;
  DLDataType index_dtype;
  DLDataType samples_dtype;
  int32_t placement;
  int32_t index_base;
  int32_t samples;
  int64_t seed;
} baracuda_fractional_max_pool3d_desc;

/* Operands: dy (in), indices (in), dx (out, or inout with `accumulate`).
 *
 * Each cell of dx gets the sum of dy over the outputs whose index names it, in the order of the
 * outputs. An index that no window of its output could hold, whatever the sample, adds nothing. */
typedef struct baracuda_fractional_max_pool2d_backward_desc {
  size_t struct_size;
  int64_t batch;
  int64_t channels;
  int64_t h_in;
  int64_t w_in;
  int64_t window_h;
  int64_t window_w;
  int64_t h_out;
  int64_t w_out;
  DLDataType dtype;
  DLDataType index_dtype;
  int32_t placement;
  int32_t index_base;
  int32_t accumulate; /* non-zero: add to dx instead of overwriting it */
} baracuda_fractional_max_pool2d_backward_desc;

typedef struct baracuda_fractional_max_pool3d_backward_desc {
  size_t struct_size;
  int64_t batch;
  int64_t channels;
  int64_t d_in;
  int64_t h_in;
  int64_t w_in;
  int64_t window_d;
  int64_t window_h;
  int64_t window_w;
  int64_t d_out;
  int64_t h_out;
  int64_t w_out;
  DLDataType dtype;
  DLDataType index_dtype;
  int32_t placement;
  int32_t index_base;
  int32_t accumulate;
} baracuda_fractional_max_pool3d_backward_desc;

baracuda_status baracuda_fractional_max_pool2d_plan_create(const baracuda_fractional_max_pool2d_desc *desc,
                                                           const baracuda_plan_options *options, baracuda_plan **plan);
baracuda_status baracuda_fractional_max_pool3d_plan_create(const baracuda_fractional_max_pool3d_desc *desc,
                                                           const baracuda_plan_options *options, baracuda_plan **plan);
baracuda_status baracuda_fractional_max_pool2d_backward_plan_create(
    const baracuda_fractional_max_pool2d_backward_desc *desc, const baracuda_plan_options *options,
    baracuda_plan **plan);
baracuda_status baracuda_fractional_max_pool3d_backward_plan_create(
    const baracuda_fractional_max_pool3d_backward_desc *desc, const baracuda_plan_options *options,
    baracuda_plan **plan);

#ifdef __cplusplus
}
#endif

#endif
