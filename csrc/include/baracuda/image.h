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

/* Greedy non-maximum suppression. Boxes are looked at in descending order of their scores, equal ones in the order
 * they come in, NaN last; a box is kept unless one kept before it, of its class, overlaps it by more than
 * iou_threshold of their union. A box with a NaN overlaps none.
 *
 * Operands: boxes (in, [num_boxes, 4], rows (x1, y1, x2, y2)), scores (in, [num_boxes]), classes (in, [num_boxes], unless
 * class_dtype has no bits), keep (out, int64 [num_boxes]), count (out, int64 [1]). keep holds the numbers of the kept
 * boxes in that order, and -1 after the first `count`. */
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
baracuda_status baracuda_nms_plan_create(const baracuda_nms_desc *desc, const baracuda_plan_options *options,
                                         baracuda_plan **plan);

#ifdef __cplusplus
}
#endif

#endif
