// SPDX-License-Identifier: Apache-2.0
// Every operator as data. A new operator adds its fields and one row.
#include "baracuda/operators.h"

#include <cstddef>
#include <iterator>

#include "baracuda/image.h"
#include "baracuda/kv_cache.h"
#include "baracuda/layout.h"
#include "baracuda/pooling.h"
#include "baracuda/scan.h"
#include "baracuda/segment.h"

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

constexpr const char *kBounds[] = {"drop", "clamp", nullptr};
constexpr const char *kGradients[] = {"both", "dest", "source", nullptr};

constexpr baracuda_field kDynamicWriteSlice[] = {
    {"dest_shape", BARACUDA_FIELD_SHAPE, offsetof(baracuda_dynamic_write_slice_desc, dest_shape), nullptr},
    {"block_shape", BARACUDA_FIELD_SHAPE, offsetof(baracuda_dynamic_write_slice_desc, block_shape), nullptr},
    {"dtype", BARACUDA_FIELD_DTYPE, offsetof(baracuda_dynamic_write_slice_desc, dtype), nullptr},
    {"index_dtype", BARACUDA_FIELD_DTYPE, offsetof(baracuda_dynamic_write_slice_desc, index_dtype), nullptr},
    {"batched", BARACUDA_FIELD_BOOL, offsetof(baracuda_dynamic_write_slice_desc, batched), nullptr},
    {"bounds", BARACUDA_FIELD_CHOICE, offsetof(baracuda_dynamic_write_slice_desc, bounds), kBounds},
    {"advance_axis", BARACUDA_FIELD_INT64, offsetof(baracuda_dynamic_write_slice_desc, advance_axis), nullptr},
};

using DynamicBackward = baracuda_dynamic_write_slice_backward_desc;
constexpr baracuda_field kDynamicWriteSliceBackward[] = {
    {"dest_shape", BARACUDA_FIELD_SHAPE, offsetof(DynamicBackward, dest_shape), nullptr},
    {"block_shape", BARACUDA_FIELD_SHAPE, offsetof(DynamicBackward, block_shape), nullptr},
    {"dtype", BARACUDA_FIELD_DTYPE, offsetof(DynamicBackward, dtype), nullptr},
    {"index_dtype", BARACUDA_FIELD_DTYPE, offsetof(DynamicBackward, index_dtype), nullptr},
    {"batched", BARACUDA_FIELD_BOOL, offsetof(DynamicBackward, batched), nullptr},
    {"bounds", BARACUDA_FIELD_CHOICE, offsetof(DynamicBackward, bounds), kBounds},
    {"gradients", BARACUDA_FIELD_CHOICE, offsetof(DynamicBackward, gradients), kGradients},
};

// The two descriptors have the same fields.
template <class Descriptor>
constexpr baracuda_field kKvCache[] = {
    {"tokens", BARACUDA_FIELD_INT64, offsetof(Descriptor, tokens), nullptr},
    {"heads", BARACUDA_FIELD_INT64, offsetof(Descriptor, heads), nullptr},
    {"dim", BARACUDA_FIELD_INT64, offsetof(Descriptor, dim), nullptr},
    {"blocks", BARACUDA_FIELD_INT64, offsetof(Descriptor, blocks), nullptr},
    {"block_size", BARACUDA_FIELD_INT64, offsetof(Descriptor, block_size), nullptr},
    {"dtype", BARACUDA_FIELD_DTYPE, offsetof(Descriptor, dtype), nullptr},
    {"cache_dtype", BARACUDA_FIELD_OPTIONAL_DTYPE, offsetof(Descriptor, cache_dtype), nullptr},
    {"index_dtype", BARACUDA_FIELD_DTYPE, offsetof(Descriptor, index_dtype), nullptr},
};
constexpr auto &kKvCacheAppend = kKvCache<baracuda_kv_cache_append_desc>;
constexpr auto &kKvCacheGather = kKvCache<baracuda_kv_cache_gather_desc>;

constexpr const char *kPlacements[] = {"even", "torch", nullptr};
constexpr const char *kIndexBases[] = {"tensor", "plane", nullptr};

constexpr baracuda_field field_of(const char *name, baracuda_field_kind kind, size_t offset,
                                  const char *const *choices = nullptr) {
  return {name, kind, offset, choices};
}

// The four descriptors of pooling share most of their fields.
#define BARACUDA_POOL_FIELD(Desc, kind, name) field_of(#name, BARACUDA_FIELD_##kind, offsetof(Desc, name))
#define BARACUDA_POOL_PLANES(Desc) BARACUDA_POOL_FIELD(Desc, INT64, batch), BARACUDA_POOL_FIELD(Desc, INT64, channels)
#define BARACUDA_POOL_EXTENTS_2D(Desc)                                                        \
  BARACUDA_POOL_FIELD(Desc, INT64, h_in), BARACUDA_POOL_FIELD(Desc, INT64, w_in),             \
      BARACUDA_POOL_FIELD(Desc, INT64, window_h), BARACUDA_POOL_FIELD(Desc, INT64, window_w), \
      BARACUDA_POOL_FIELD(Desc, INT64, h_out), BARACUDA_POOL_FIELD(Desc, INT64, w_out)
#define BARACUDA_POOL_EXTENTS_3D(Desc)                                                        \
  BARACUDA_POOL_FIELD(Desc, INT64, d_in), BARACUDA_POOL_FIELD(Desc, INT64, h_in),             \
      BARACUDA_POOL_FIELD(Desc, INT64, w_in), BARACUDA_POOL_FIELD(Desc, INT64, window_d),     \
      BARACUDA_POOL_FIELD(Desc, INT64, window_h), BARACUDA_POOL_FIELD(Desc, INT64, window_w), \
      BARACUDA_POOL_FIELD(Desc, INT64, d_out), BARACUDA_POOL_FIELD(Desc, INT64, h_out),       \
      BARACUDA_POOL_FIELD(Desc, INT64, w_out)
#define BARACUDA_POOL_RULES(Desc)                                                           \
  BARACUDA_POOL_FIELD(Desc, DTYPE, dtype),                                                  \
      field_of("placement", BARACUDA_FIELD_CHOICE, offsetof(Desc, placement), kPlacements), \
      field_of("index_base", BARACUDA_FIELD_CHOICE, offsetof(Desc, index_base), kIndexBases)
#define BARACUDA_POOL_FORWARD(Desc)                                                                 \
  BARACUDA_POOL_FIELD(Desc, OPTIONAL_DTYPE, index_dtype), BARACUDA_POOL_FIELD(Desc, BOOL, samples), \
      BARACUDA_POOL_FIELD(Desc, INT64, seed), BARACUDA_POOL_FIELD(Desc, OPTIONAL_DTYPE, samples_dtype)
#define BARACUDA_POOL_BACKWARD(Desc) \
  BARACUDA_POOL_FIELD(Desc, DTYPE, index_dtype), BARACUDA_POOL_FIELD(Desc, BOOL, accumulate)

constexpr baracuda_field kFractionalMaxPool2d[] = {BARACUDA_POOL_PLANES(baracuda_fractional_max_pool2d_desc),
                                                   BARACUDA_POOL_EXTENTS_2D(baracuda_fractional_max_pool2d_desc),
                                                   BARACUDA_POOL_RULES(baracuda_fractional_max_pool2d_desc),
                                                   BARACUDA_POOL_FORWARD(baracuda_fractional_max_pool2d_desc)};
constexpr baracuda_field kFractionalMaxPool2dBackward[] = {
    BARACUDA_POOL_PLANES(baracuda_fractional_max_pool2d_backward_desc),
    BARACUDA_POOL_EXTENTS_2D(baracuda_fractional_max_pool2d_backward_desc),
    BARACUDA_POOL_RULES(baracuda_fractional_max_pool2d_backward_desc),
    BARACUDA_POOL_BACKWARD(baracuda_fractional_max_pool2d_backward_desc)};
constexpr baracuda_field kFractionalMaxPool3d[] = {BARACUDA_POOL_PLANES(baracuda_fractional_max_pool3d_desc),
                                                   BARACUDA_POOL_EXTENTS_3D(baracuda_fractional_max_pool3d_desc),
                                                   BARACUDA_POOL_RULES(baracuda_fractional_max_pool3d_desc),
                                                   BARACUDA_POOL_FORWARD(baracuda_fractional_max_pool3d_desc)};
constexpr baracuda_field kFractionalMaxPool3dBackward[] = {
    BARACUDA_POOL_PLANES(baracuda_fractional_max_pool3d_backward_desc),
    BARACUDA_POOL_EXTENTS_3D(baracuda_fractional_max_pool3d_backward_desc),
    BARACUDA_POOL_RULES(baracuda_fractional_max_pool3d_backward_desc),
    BARACUDA_POOL_BACKWARD(baracuda_fractional_max_pool3d_backward_desc)};

#define BARACUDA_ROI_FIELDS(Desc)                                                                                     \
  field_of("n", BARACUDA_FIELD_INT64, offsetof(Desc, n)), field_of("c", BARACUDA_FIELD_INT64, offsetof(Desc, c)),     \
      field_of("h", BARACUDA_FIELD_INT64, offsetof(Desc, h)), field_of("w", BARACUDA_FIELD_INT64, offsetof(Desc, w)), \
      field_of("num_rois", BARACUDA_FIELD_INT64, offsetof(Desc, num_rois)),                                           \
      field_of("pooled_h", BARACUDA_FIELD_INT64, offsetof(Desc, pooled_h)),                                           \
      field_of("pooled_w", BARACUDA_FIELD_INT64, offsetof(Desc, pooled_w)),                                           \
      field_of("spatial_scale", BARACUDA_FIELD_DOUBLE, offsetof(Desc, spatial_scale))
#define BARACUDA_ROI_ALIGN_FIELDS(Desc)                                                                        \
  BARACUDA_ROI_FIELDS(Desc), field_of("sampling_ratio", BARACUDA_FIELD_INT64, offsetof(Desc, sampling_ratio)), \
      field_of("aligned", BARACUDA_FIELD_BOOL, offsetof(Desc, aligned)),                                       \
      field_of("dtype", BARACUDA_FIELD_DTYPE, offsetof(Desc, dtype)),                                          \
      field_of("rois_dtype", BARACUDA_FIELD_DTYPE, offsetof(Desc, rois_dtype))

constexpr baracuda_field kRoiAlign[] = {BARACUDA_ROI_ALIGN_FIELDS(baracuda_roi_align_desc)};
constexpr baracuda_field kRoiAlignBackward[] = {
    BARACUDA_ROI_ALIGN_FIELDS(baracuda_roi_align_backward_desc),
    field_of("accumulate", BARACUDA_FIELD_BOOL, offsetof(baracuda_roi_align_backward_desc, accumulate))};

#define BARACUDA_ROI_POOL_FIELDS(Desc)                                                       \
  BARACUDA_ROI_FIELDS(Desc), field_of("dtype", BARACUDA_FIELD_DTYPE, offsetof(Desc, dtype)), \
      field_of("rois_dtype", BARACUDA_FIELD_DTYPE, offsetof(Desc, rois_dtype))

constexpr baracuda_field kRoiPool[] = {
    BARACUDA_ROI_POOL_FIELDS(baracuda_roi_pool_desc),
    field_of("index_dtype", BARACUDA_FIELD_OPTIONAL_DTYPE, offsetof(baracuda_roi_pool_desc, index_dtype))};
constexpr baracuda_field kRoiPoolBackward[] = {
    BARACUDA_ROI_POOL_FIELDS(baracuda_roi_pool_backward_desc),
    field_of("index_dtype", BARACUDA_FIELD_DTYPE, offsetof(baracuda_roi_pool_backward_desc, index_dtype)),
    field_of("accumulate", BARACUDA_FIELD_BOOL, offsetof(baracuda_roi_pool_backward_desc, accumulate))};

constexpr baracuda_field kNms[] = {
    {"num_boxes", BARACUDA_FIELD_INT64, offsetof(baracuda_nms_desc, num_boxes), nullptr},
    {"iou_threshold", BARACUDA_FIELD_DOUBLE, offsetof(baracuda_nms_desc, iou_threshold), nullptr},
    {"dtype", BARACUDA_FIELD_DTYPE, offsetof(baracuda_nms_desc, dtype), nullptr},
    {"scores_dtype", BARACUDA_FIELD_OPTIONAL_DTYPE, offsetof(baracuda_nms_desc, scores_dtype), nullptr},
    {"class_dtype", BARACUDA_FIELD_OPTIONAL_DTYPE, offsetof(baracuda_nms_desc, class_dtype), nullptr},
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

constexpr const char *kSegmentKinds[] = {"sum", "mean", "max", "min", "prod", nullptr};
constexpr const char *kSegmentIds[] = {"unsorted", "sorted", "offsets", nullptr};
constexpr const char *kSegmentTies[] = {"first", "even", nullptr};
constexpr const char *kSegmentSaved[] = {"input", "arg", nullptr};

#define BARACUDA_SEGMENT_FIELDS(Desc)                                                 \
  field_of("kind", BARACUDA_FIELD_CHOICE, offsetof(Desc, kind), kSegmentKinds),       \
      field_of("num_inputs", BARACUDA_FIELD_INT64, offsetof(Desc, num_inputs)),       \
      field_of("embedding_dim", BARACUDA_FIELD_INT64, offsetof(Desc, embedding_dim)), \
      field_of("num_segments", BARACUDA_FIELD_INT64, offsetof(Desc, num_segments)),   \
      field_of("dtype", BARACUDA_FIELD_DTYPE, offsetof(Desc, dtype)),                 \
      field_of("index_dtype", BARACUDA_FIELD_DTYPE, offsetof(Desc, index_dtype)),     \
      field_of("ids", BARACUDA_FIELD_CHOICE, offsetof(Desc, ids), kSegmentIds),       \
      field_of("ties", BARACUDA_FIELD_CHOICE, offsetof(Desc, ties), kSegmentTies)

using SegmentReduce = baracuda_segment_reduce_desc;
using SegmentReduceBackward = baracuda_segment_reduce_backward_desc;
constexpr baracuda_field kSegmentReduce[] = {
    BARACUDA_SEGMENT_FIELDS(SegmentReduce),
    field_of("empty_value", BARACUDA_FIELD_OPTIONAL_DOUBLE, offsetof(SegmentReduce, empty_value)),
    field_of("return_arg", BARACUDA_FIELD_BOOL, offsetof(SegmentReduce, return_arg)),
};
constexpr baracuda_field kSegmentReduceBackward[] = {
    BARACUDA_SEGMENT_FIELDS(SegmentReduceBackward),
    field_of("saved", BARACUDA_FIELD_CHOICE, offsetof(SegmentReduceBackward, saved), kSegmentSaved),
};

constexpr baracuda_operator kOperators[] = {
    {"write_slice", "WriteSlicePlan", "layout", sizeof(baracuda_write_slice_desc), kWriteSlice, std::size(kWriteSlice),
     create<baracuda_write_slice_desc, baracuda_write_slice_plan_create>},
    {"dynamic_write_slice", "DynamicWriteSlicePlan", "layout", sizeof(baracuda_dynamic_write_slice_desc),
     kDynamicWriteSlice, std::size(kDynamicWriteSlice),
     create<baracuda_dynamic_write_slice_desc, baracuda_dynamic_write_slice_plan_create>},
    {"dynamic_write_slice_backward", "DynamicWriteSliceBackwardPlan", "layout", sizeof(DynamicBackward),
     kDynamicWriteSliceBackward, std::size(kDynamicWriteSliceBackward),
     create<DynamicBackward, baracuda_dynamic_write_slice_backward_plan_create>},
    {"kv_cache_append", "KvCacheAppendPlan", "kv_cache", sizeof(baracuda_kv_cache_append_desc), kKvCacheAppend,
     std::size(kKvCacheAppend), create<baracuda_kv_cache_append_desc, baracuda_kv_cache_append_plan_create>},
    {"kv_cache_gather", "KvCacheGatherPlan", "kv_cache", sizeof(baracuda_kv_cache_gather_desc), kKvCacheGather,
     std::size(kKvCacheGather), create<baracuda_kv_cache_gather_desc, baracuda_kv_cache_gather_plan_create>},
    {"fractional_max_pool2d", "FractionalMaxPool2dPlan", "pooling", sizeof(baracuda_fractional_max_pool2d_desc),
     kFractionalMaxPool2d, std::size(kFractionalMaxPool2d),
     create<baracuda_fractional_max_pool2d_desc, baracuda_fractional_max_pool2d_plan_create>},
    {"fractional_max_pool3d", "FractionalMaxPool3dPlan", "pooling", sizeof(baracuda_fractional_max_pool3d_desc),
     kFractionalMaxPool3d, std::size(kFractionalMaxPool3d),
     create<baracuda_fractional_max_pool3d_desc, baracuda_fractional_max_pool3d_plan_create>},
    {"fractional_max_pool2d_backward", "FractionalMaxPool2dBackwardPlan", "pooling",
     sizeof(baracuda_fractional_max_pool2d_backward_desc), kFractionalMaxPool2dBackward,
     std::size(kFractionalMaxPool2dBackward),
     create<baracuda_fractional_max_pool2d_backward_desc, baracuda_fractional_max_pool2d_backward_plan_create>},
    {"fractional_max_pool3d_backward", "FractionalMaxPool3dBackwardPlan", "pooling",
     sizeof(baracuda_fractional_max_pool3d_backward_desc), kFractionalMaxPool3dBackward,
     std::size(kFractionalMaxPool3dBackward),
     create<baracuda_fractional_max_pool3d_backward_desc, baracuda_fractional_max_pool3d_backward_plan_create>},
    {"roi_align", "RoiAlignPlan", "image", sizeof(baracuda_roi_align_desc), kRoiAlign, std::size(kRoiAlign),
     create<baracuda_roi_align_desc, baracuda_roi_align_plan_create>},
    {"roi_align_backward", "RoiAlignBackwardPlan", "image", sizeof(baracuda_roi_align_backward_desc), kRoiAlignBackward,
     std::size(kRoiAlignBackward), create<baracuda_roi_align_backward_desc, baracuda_roi_align_backward_plan_create>},
    {"roi_pool", "RoiPoolPlan", "image", sizeof(baracuda_roi_pool_desc), kRoiPool, std::size(kRoiPool),
     create<baracuda_roi_pool_desc, baracuda_roi_pool_plan_create>},
    {"roi_pool_backward", "RoiPoolBackwardPlan", "image", sizeof(baracuda_roi_pool_backward_desc), kRoiPoolBackward,
     std::size(kRoiPoolBackward), create<baracuda_roi_pool_backward_desc, baracuda_roi_pool_backward_plan_create>},
    {"nms", "NmsPlan", "image", sizeof(baracuda_nms_desc), kNms, std::size(kNms),
     create<baracuda_nms_desc, baracuda_nms_plan_create>},
    {"scan", "ScanPlan", "scan", sizeof(baracuda_scan_desc), kScan, std::size(kScan),
     create<baracuda_scan_desc, baracuda_scan_plan_create>},
    {"scan_backward", "ScanBackwardPlan", "scan", sizeof(baracuda_scan_backward_desc), kScanBackward,
     std::size(kScanBackward), create<baracuda_scan_backward_desc, baracuda_scan_backward_plan_create>},
    {"segment_reduce", "SegmentReducePlan", "segment", sizeof(SegmentReduce), kSegmentReduce, std::size(kSegmentReduce),
     create<SegmentReduce, baracuda_segment_reduce_plan_create>},
    {"segment_reduce_backward", "SegmentReduceBackwardPlan", "segment", sizeof(SegmentReduceBackward),
     kSegmentReduceBackward, std::size(kSegmentReduceBackward),
     create<SegmentReduceBackward, baracuda_segment_reduce_backward_plan_create>},
};

}  // namespace

extern "C" const baracuda_operator *baracuda_operators(size_t *count) {
  if (count) *count = std::size(kOperators);
  return kOperators;
}
