/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BARACUDA_IMAGE_H_
#define BARACUDA_IMAGE_H_

#include "plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/* RoI-align: each region of interest is cut into pooled_h x pooled_w bins, and an output is the mean of
 * samples in its bin, interpolated between the four cells around each.
 *
 * A RoI (batch, x1, y1, x2, y2) times spatial_scale, less half a cell with `aligned`, is a box in cells.
 * Without `aligned` it is at least one cell wide and high. A bin has sampling_ratio samples along each
 * axis; 0: its extent, rounded up. Sample i of g lies at (i + 1/2) / g of the bin. Outside [-1, extent] it
 * counts 0; else it is moved onto the outermost cells where it lies beyond their centres.
 *
 * A RoI gives zeros, and has no gradient, if its batch number is not one of the input's, if a coordinate or an
 * extent of its box is infinite or NaN, or if sampling_ratio 0 would take more than 2^20 samples along an axis.
 * A cell whose weight is zero plays no part, whatever it holds. */

/* Operands: input (in, [n, c, h, w]), rois (in, [num_rois, 5]), output (out, [num_rois, c, pooled_h, pooled_w]). */
typedef struct baracuda_roi_align_desc {
  size_t struct_size;
  int64_t n;
  int64_t c;
  int64_t h;
  int64_t w;
  int64_t num_rois;
  int64_t pooled_h;
  int64_t pooled_w;
  double spatial_scale;
  int64_t sampling_ratio; /* 0: adaptive */
  int32_t aligned;
  DLDataType dtype;      /* float16, bfloat16, float32 or float64 */
  DLDataType rois_dtype; /* float32 or float64 */
} baracuda_roi_align_desc;

/* Operands: doutput (in), rois (in), dinput (out, or inout with `accumulate`). All of dinput is written. */
typedef struct baracuda_roi_align_backward_desc {
  size_t struct_size;
  int64_t n;
  int64_t c;
  int64_t h;
  int64_t w;
  int64_t num_rois;
  int64_t pooled_h;
  int64_t pooled_w;
  double spatial_scale;
  int64_t sampling_ratio;
  int32_t aligned;
  DLDataType dtype;
  DLDataType rois_dtype;
  int32_t accumulate; /* non-zero: add to dinput instead of overwriting it */
} baracuda_roi_align_backward_desc;

/* RoI-pooling: each region of interest is cut into pooled_h x pooled_w bins of whole cells, which overlap by a cell
 * where they must, and an output is the maximum of its bin.
 *
 * The corners of a RoI's box are multiplied by spatial_scale and rounded, halves away from zero; its last row and
 * column belong to it, and it is at least one cell wide and high. Bin b of an axis has the cells from
 * floor(b extent / bins) to ceil((b + 1) extent / bins), as far as they lie in the map; without any its output is 0.
 * The first maximum wins; a NaN beats any number, the first NaN of the bin. A RoI gives zeros if its batch number is
 * not one of the input's, or if a coordinate or extent of its box is infinite or NaN.
 *
 * Operands: input (in, [n, c, h, w]), rois (in, [num_rois, 5]), output (out, [num_rois, c, pooled_h, pooled_w]), argmax
 * (out, of the same shape, unless index_dtype has no bits): the maximum's position in its plane of h w cells, or -1. */
typedef struct baracuda_roi_pool_desc {
  size_t struct_size;
  int64_t n;
  int64_t c;
  int64_t h;
  int64_t w;
  int64_t num_rois;
  int64_t pooled_h;
  int64_t pooled_w;
  double spatial_scale;
  DLDataType dtype;       /* float16, bfloat16, float32 or float64 */
  DLDataType rois_dtype;  /* float32 or float64 */
  DLDataType index_dtype; /* int64 or int32; bits 0: no argmax */
} baracuda_roi_pool_desc;

/* Operands: doutput (in), rois (in), argmax (in), dinput (out, or inout with `accumulate`).
 *
 * Each cell gets the sum of doutput over the bins that hold it and whose argmax names it, in the order of the RoIs and
 * their bins. */
typedef struct baracuda_roi_pool_backward_desc {
  size_t struct_size;
  int64_t n;
  int64_t c;
  int64_t h;
  int64_t w;
  int64_t num_rois;
  int64_t pooled_h;
  int64_t pooled_w;
  double spatial_scale;
  DLDataType dtype;
  DLDataType rois_dtype;
  DLDataType index_dtype;
  int32_t accumulate;
} baracuda_roi_pool_backward_desc;

/* Greedy non-maximum suppression. Boxes are looked at in descending order of their scores, equal ones in the order
 * they come in, NaN last; a box is kept unless one kept before it, of its class, overlaps it by more than
 * iou_threshold of their union. A box with a NaN overlaps none.
 *
 * Operands: boxes (in, [num_boxes, 4], rows (x1, y1, x2, y2)), scores (in, [num_boxes]), classes (in, [num_boxes],
 * unless class_dtype has no bits), keep (out, int64 [num_boxes]), count (out, int64 [1]). keep holds the numbers of the
 * kept boxes in that order, and -1 after the first `count`. */
typedef struct baracuda_nms_desc {
  size_t struct_size;
  int64_t num_boxes;
  double iou_threshold;
  DLDataType dtype;        /* float16, bfloat16, float32 or float64 */
  DLDataType scores_dtype; /* one of these; bits 0: the boxes' */
  DLDataType class_dtype;  /* int64 or int32; bits 0: there are no classes */
} baracuda_nms_desc;

baracuda_status baracuda_roi_align_plan_create(const baracuda_roi_align_desc *desc,
                                               const baracuda_plan_options *options, baracuda_plan **plan);
baracuda_status baracuda_roi_align_backward_plan_create(const baracuda_roi_align_backward_desc *desc,
                                                        const baracuda_plan_options *options, baracuda_plan **plan);
baracuda_status baracuda_roi_pool_plan_create(const baracuda_roi_pool_desc *desc, const baracuda_plan_options *options,
                                              baracuda_plan **plan);
baracuda_status baracuda_roi_pool_backward_plan_create(const baracuda_roi_pool_backward_desc *desc,
                                                       const baracuda_plan_options *options, baracuda_plan **plan);
baracuda_status baracuda_nms_plan_create(const baracuda_nms_desc *desc, const baracuda_plan_options *options,
                                         baracuda_plan **plan);

#ifdef __cplusplus
}
#endif

#endif
