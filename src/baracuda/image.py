# SPDX-License-Identifier: Apache-2.0
"""Operators on regions of images: RoI-align and RoI-pooling, forward and backward, and non-maximum suppression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from baracuda import _core
from baracuda._arguments import integer, integers, per_axis, several
from baracuda._base import Descriptor, Plan, cached_plan
from baracuda._outputs import first_of, new_output, returned, stacked_boxes
from baracuda.errors import InvalidProblemError
from baracuda.plan import PlanPreference

__all__ = [
    "NmsDescriptor",
    "NmsPlan",
    "RoiAlignBackwardDescriptor",
    "RoiAlignBackwardPlan",
    "RoiAlignDescriptor",
    "RoiAlignPlan",
    "RoiPoolBackwardDescriptor",
    "RoiPoolBackwardPlan",
    "RoiPoolDescriptor",
    "RoiPoolPlan",
    "batched_nms",
    "nms",
    "roi_align",
    "roi_align_backward",
    "roi_pool",
    "roi_pool_backward",
]


@dataclass(frozen=True, kw_only=True)
class RoiAlignDescriptor(Descriptor, operator="roi_align"):
    """The problem of :class:`RoiAlignPlan`. Any extent may be 0.

    Attributes:
        n: images in the batch.
        c: channels.
        h: height of the feature map, at most 2^20.
        w: its width, at most 2^20.
        num_rois: R, the number of regions.
        pooled_h: bins along the height of a region.
        pooled_w: bins along its width.
        spatial_scale: boxes times this are in cells of the feature map.
        sampling_ratio: samples of a bin along each axis; 0: as many as the bin has cells, rounded up.
        aligned: move boxes by half a cell, so that a coordinate names a place and not a pixel.
        dtype: float16, bfloat16, float32 or float64.
        rois_dtype: float32 or float64, whatever `dtype` is.
    """

    n: int
    c: int
    h: int
    w: int
    num_rois: int
    pooled_h: int
    pooled_w: int
    spatial_scale: float = 1.0
    sampling_ratio: int = 0
    aligned: bool = False
    dtype: Any
    rois_dtype: Any = "float32"


@dataclass(frozen=True, kw_only=True)
class RoiAlignBackwardDescriptor(Descriptor, operator="roi_align_backward"):
    """The problem of :class:`RoiAlignBackwardPlan`. Any extent may be 0.

    Attributes:
        n: images in the batch.
        c: channels.
        h: height of the feature map, at most 2^20.
        w: its width, at most 2^20.
        num_rois: R, the number of regions.
        pooled_h: bins along the height of a region.
        pooled_w: bins along its width.
        spatial_scale: boxes times this are in cells of the feature map.
        sampling_ratio: samples of a bin along each axis; 0: as many as the bin has cells, rounded up.
        aligned: move boxes by half a cell.
        dtype: float16, bfloat16, float32 or float64.
        rois_dtype: float32 or float64, whatever `dtype` is.
        accumulate: add to ``dinput`` instead of overwriting it.
    """

    n: int
    c: int
    h: int
    w: int
    num_rois: int
    pooled_h: int
    pooled_w: int
    spatial_scale: float = 1.0
    sampling_ratio: int = 0
    aligned: bool = False
    dtype: Any
    rois_dtype: Any = "float32"
    accumulate: bool = False


@dataclass(frozen=True, kw_only=True)
class RoiPoolDescriptor(Descriptor, operator="roi_pool"):
    """The problem of :class:`RoiPoolPlan`. Any extent may be 0.

    Attributes:
        n: images in the batch.
        c: channels.
        h: height of the feature map, at most 2^20.
        w: its width, at most 2^20.
        num_rois: R, the number of regions.
        pooled_h: bins along the height of a region.
        pooled_w: bins along its width.
        spatial_scale: boxes times this are in cells of the feature map.
        dtype: float16, bfloat16, float32 or float64.
        rois_dtype: float32 or float64, whatever `dtype` is.
        index_dtype: int64 or int32; None: the plan writes no argmax.
    """

    n: int
    c: int
    h: int
    w: int
    num_rois: int
    pooled_h: int
    pooled_w: int
    spatial_scale: float = 1.0
    dtype: Any
    rois_dtype: Any = "float32"
    index_dtype: Any = "int32"


@dataclass(frozen=True, kw_only=True)
class RoiPoolBackwardDescriptor(Descriptor, operator="roi_pool_backward"):
    """The problem of :class:`RoiPoolBackwardPlan`. Any extent may be 0.

    Attributes:
        n: images in the batch.
        c: channels.
        h: height of the feature map, at most 2^20.
        w: its width, at most 2^20.
        num_rois: R, the number of regions.
        pooled_h: bins along the height of a region.
        pooled_w: bins along its width.
        spatial_scale: boxes times this are in cells of the feature map.
        dtype: float16, bfloat16, float32 or float64.
        rois_dtype: float32 or float64, whatever `dtype` is.
        index_dtype: int64 or int32.
        accumulate: add to ``dinput`` instead of overwriting it.
    """

    n: int
    c: int
    h: int
    w: int
    num_rois: int
    pooled_h: int
    pooled_w: int
    spatial_scale: float = 1.0
    dtype: Any
    rois_dtype: Any = "float32"
    index_dtype: Any = "int32"
    accumulate: bool = False


@dataclass(frozen=True, kw_only=True)
class NmsDescriptor(Descriptor, operator="nms"):
    """The problem of :class:`NmsPlan`.

    Attributes:
        num_boxes: how many there are, at most 2^26.
        iou_threshold: a box whose overlap with a kept one is more than this part of their union is not kept.
        dtype: of the boxes, float16, bfloat16, float32 or float64.
        scores_dtype: one of these; None: the boxes'.
        class_dtype: int64 or int32; None: all boxes are of one class.
    """

    num_boxes: int
    iou_threshold: float
    dtype: Any = "float32"
    scores_dtype: Any = None
    class_dtype: Any = None


class RoiAlignPlan(Plan):
    """Each region of interest resampled to a grid of pooled_h x pooled_w means of bilinear samples.

    Operands of ``run``:
        input (in): [N, C, H, W], any strides, channels first or last.
        rois (in): [R, 5], rows (batch, x1, y1, x2, y2).
        output (out): [R, C, pooled_h, pooled_w].

    A region gives zeros if its batch number is not one of 0 to N - 1, if a coordinate is NaN or infinite, or if
    ``sampling_ratio=0`` would take more than 2^20 samples along an axis. Inverted and empty boxes have no samples
    where their number is adaptive; where it is fixed they are sampled from right to left, or at one place.
    Samples count 0 outside [-1, H] and [-1, W]. Geometry and sums are in float32, for float64 features in float64.

    >>> import numpy as np, baracuda as bc
    >>> plan = bc.RoiAlignPlan(
    ...     n=1, c=1, h=3, w=3, num_rois=1, pooled_h=2, pooled_w=2, sampling_ratio=1, aligned=True,
    ...     dtype="float32", device="cpu")
    >>> x = np.arange(1, 10, dtype=np.float32).reshape(1, 1, 3, 3)
    >>> y = np.empty((1, 1, 2, 2), np.float32)
    >>> plan.run(input=x, rois=np.array([[0, 0, 0, 2, 2]], np.float32), output=y)
    >>> y[0, 0].tolist()
    [[1.0, 2.0], [4.0, 5.0]]
    """

    Descriptor: ClassVar[type[Any]] = RoiAlignDescriptor


class RoiAlignBackwardPlan(Plan):
    """The gradient of :class:`RoiAlignPlan` with respect to its input.

    Operands of ``run``:
        doutput (in): [R, C, pooled_h, pooled_w], any strides.
        rois (in): [R, 5], the forward's.
        dinput (out, with ``accumulate`` inout): [N, C, H, W]; all of it is written.

    A cell gathers from the regions over it, in float32 (float64 for float64), rounded once. No atomics: the same bits
    in every run, unless the preference's ``deterministic=False`` lets few regions be added atomically.

    >>> import numpy as np, baracuda as bc
    >>> plan = bc.RoiAlignBackwardPlan(
    ...     n=1, c=1, h=3, w=3, num_rois=1, pooled_h=1, pooled_w=1, sampling_ratio=1, dtype="float32", device="cpu")
    >>> dx = np.empty((1, 1, 3, 3), np.float32)
    >>> plan.run(doutput=np.ones((1, 1, 1, 1), np.float32), rois=np.array([[0, 0, 0, 1, 1]], np.float32), dinput=dx)
    >>> dx[0, 0].tolist()
    [[0.25, 0.25, 0.0], [0.25, 0.25, 0.0], [0.0, 0.0, 0.0]]
    """

    Descriptor: ClassVar[type[Any]] = RoiAlignBackwardDescriptor


class RoiPoolPlan(Plan):
    """Each region of interest cut into pooled_h x pooled_w bins of whole cells; an output is a bin's maximum.

    Operands of ``run``:
        input (in): [N, C, H, W], any strides.
        rois (in): [R, 5], rows (batch, x1, y1, x2, y2).
        output (out): [R, C, pooled_h, pooled_w].
        argmax (out): of the same shape, the maximum's position in its plane of H·W cells, whatever the strides.

    Corners are rounded to whole cells, halves away from zero, and the last row and column belong to the region. A bin
    without cells gives 0 and argmax -1, and so does a region with a batch number that is not one of 0 to N - 1 or
    with a coordinate that is NaN or infinite. The first maximum wins; a NaN beats any number, the first NaN of a bin.

    >>> import numpy as np, baracuda as bc
    >>> plan = bc.RoiPoolPlan(
    ...     n=1, c=1, h=4, w=4, num_rois=1, pooled_h=2, pooled_w=2, dtype="float32", device="cpu")
    >>> x = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)
    >>> y, argmax = np.empty((1, 1, 2, 2), np.float32), np.empty((1, 1, 2, 2), np.int32)
    >>> plan.run(input=x, rois=np.array([[0, 0, 0, 3, 3]], np.float32), output=y, argmax=argmax)
    >>> y[0, 0].tolist()
    [[5.0, 7.0], [13.0, 15.0]]
    """

    Descriptor: ClassVar[type[Any]] = RoiPoolDescriptor


class RoiPoolBackwardPlan(Plan):
    """The gradient of :class:`RoiPoolPlan` with respect to its input.

    Operands of ``run``:
        doutput (in): [R, C, pooled_h, pooled_w].
        rois (in): [R, 5], the forward's.
        argmax (in): [R, C, pooled_h, pooled_w], as the forward wrote it.
        dinput (out, with ``accumulate`` inout): [N, C, H, W]; all of it is written.

    A cell gets the sum of doutput over the bins that hold it and whose argmax names it, in the order of the regions
    and their bins, in float32 (float64 for float64), rounded once. No atomics: the same bits in every run, on the
    CPU and on CUDA.

    >>> import numpy as np, baracuda as bc
    >>> plan = bc.RoiPoolBackwardPlan(
    ...     n=1, c=1, h=1, w=4, num_rois=1, pooled_h=1, pooled_w=2, dtype="float32", device="cpu")
    >>> dx = np.empty((1, 1, 1, 4), np.float32)
    >>> plan.run(doutput=np.array([[[[1, 2]]]], np.float32), rois=np.array([[0, 0, 0, 3, 0]], np.float32),
    ...          argmax=np.array([[[[1, 2]]]], np.int32), dinput=dx)
    >>> dx[0, 0].tolist()
    [[0.0, 1.0, 2.0, 0.0]]
    """

    Descriptor: ClassVar[type[Any]] = RoiPoolBackwardDescriptor


class NmsPlan(Plan):
    """Greedy non-maximum suppression, all of it on the device.

    Operands of ``run``:
        boxes (in): [N, 4], rows (x1, y1, x2, y2).
        scores (in): [N].
        classes (in): [N], with ``class_dtype`` only: boxes of different classes don't see each other.
        keep (out): int64 [N], the numbers of the kept boxes in descending order of their scores, then -1.
        count (out): int64 [1], how many are kept.

    Boxes are looked at in descending order of scores, equal ones in the order they come in, NaN last. A box is
    kept unless its overlap with one kept before, over their union, is more than `iou_threshold`. That is computed in
    float32, for float64 boxes in float64, each operation rounded once, so CPU and CUDA agree. A box with a NaN
    overlaps none. Outputs have a fixed size, so a run can be captured.

    >>> import numpy as np, baracuda as bc
    >>> plan = bc.NmsPlan(num_boxes=3, iou_threshold=0.5, device="cpu")
    >>> boxes = np.array([[0, 0, 9, 9], [0, 0, 10, 10], [20, 20, 30, 30]], np.float32)
    >>> keep, count = np.empty(3, np.int64), np.empty(1, np.int64)
    >>> plan.run(boxes=boxes, scores=np.array([0.3, 0.9, 0.5], np.float32), keep=keep, count=count)
    >>> keep.tolist(), count.tolist()
    ([1, 2, -1], [2])
    """

    Descriptor: ClassVar[type[Any]] = NmsDescriptor


def nms(
    boxes: Any,
    scores: Any,
    iou_threshold: float,
    *,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """Non-maximum suppression; see :class:`NmsPlan`.

    The number of kept boxes is read back, which waits for the device; a plan doesn't.

    Args:
        boxes: [N, 4], rows (x1, y1, x2, y2).
        scores: [N].
        iou_threshold: the overlap, over the union, beyond which a box is suppressed.
        stream: see :meth:`baracuda.Plan.run`.
        preference: what the selection of the kernel must keep to.

    Returns:
        The numbers of the kept boxes, int64, in descending order of their scores.

    >>> import numpy as np, baracuda as bc
    >>> boxes = np.array([[0, 0, 9, 9], [0, 0, 10, 10], [20, 20, 30, 30]], np.float32)
    >>> bc.nms(boxes, np.array([0.3, 0.9, 0.5], np.float32), 0.5).tolist()
    [1, 2]
    """
    return _nms(boxes, scores, None, iou_threshold, stream, preference, "nms")


def batched_nms(
    boxes: Any,
    scores: Any,
    idxs: Any,
    iou_threshold: float,
    *,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """:func:`nms` among the boxes of each class, all classes in one call.

    Args:
        boxes: [N, 4], rows (x1, y1, x2, y2).
        scores: [N].
        idxs: [N], int64 or int32, the class of each box.
        iou_threshold: the overlap, over the union, beyond which a box is suppressed.
        stream: see :meth:`baracuda.Plan.run`.
        preference: what the selection of the kernel must keep to.

    Returns:
        The numbers of the kept boxes, int64, in descending order of their scores.

    >>> import numpy as np, baracuda as bc
    >>> boxes = np.array([[0, 0, 9, 9], [0, 0, 10, 10], [20, 20, 30, 30]], np.float32)
    >>> bc.batched_nms(boxes, np.array([0.3, 0.9, 0.5], np.float32), np.array([0, 1, 1]), 0.5).tolist()
    [1, 2, 0]
    """
    return _nms(boxes, scores, idxs, iou_threshold, stream, preference, "batched_nms")


def roi_pool(
    input: Any,  # noqa: A002  torchvision's name
    boxes: Any,
    output_size: int | Sequence[int],
    spatial_scale: float = 1.0,
    *,
    return_argmax: bool = False,
    index_dtype: Any = "int32",
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """RoI-pooling; see :class:`RoiPoolPlan`.

    Args:
        input: [N, C, H, W].
        boxes: [R, 5], rows (batch, x1, y1, x2, y2); or one [L, 4] for each image, rows (x1, y1, x2, y2). 16-bit
            boxes are converted to float32.
        output_size: (pooled_h, pooled_w) or one number for both.
        spatial_scale: boxes times this are in cells.
        return_argmax: return ``(y, argmax)``.
        index_dtype: int32 or int64, of argmax.
        out: where to write: y, or (y, argmax).
        stream: see :meth:`baracuda.Plan.run`.
        preference: what the selection of the kernel must keep to.

    Returns:
        [R, C, pooled_h, pooled_w], of the kind of `input`; or that and argmax.

    >>> import numpy as np, baracuda as bc
    >>> x = np.arange(64, dtype=np.float32).reshape(1, 1, 8, 8)
    >>> bc.roi_pool(x, np.array([[0, 0, 0, 3, 3]], np.float32), 2)[0, 0].tolist()
    [[9.0, 11.0], [25.0, 27.0]]
    """
    where = "roi_pool"
    shape, dtype, device = _core.describe(input, f"{where}: input")
    if len(shape) != 4:
        raise InvalidProblemError(f"{where}: input: expected shape (n, c, h, w), got {shape}")
    boxes, count, rois_dtype = _rois(boxes, input, device, stream, where)
    pooled = per_axis(output_size, 2, f"{where}: output_size")
    plan = cached_plan(
        RoiPoolPlan, device, preference, **_fields(shape, count, pooled, dtype, rois_dtype),
        spatial_scale=float(spatial_scale), index_dtype=index_dtype if return_argmax else None,
    )  # fmt: skip
    out_shape = (count, shape[1], *pooled)
    argmax = None
    if out is None:
        output = new_output(input, out_shape, dtype, device, stream)
        if return_argmax:
            argmax = new_output(input, out_shape, plan.operands[-1].dtype, device, stream)
    else:
        output, argmax = several(out, ("y", "argmax"), where) if return_argmax else (out, None)
    extra = {"argmax": argmax} if return_argmax else {}
    plan.run(input=input, rois=boxes, output=output, **extra, stream=stream)
    return (returned(output, input), returned(argmax, input)) if return_argmax else returned(output, input)


def roi_pool_backward(
    grad: Any,
    boxes: Any,
    argmax: Any,
    input_shape: Sequence[int],
    spatial_scale: float = 1.0,
    *,
    accumulate: bool = False,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The gradient of :func:`roi_pool` with respect to its input; see :class:`RoiPoolBackwardPlan`.

    Args:
        grad: [R, C, pooled_h, pooled_w].
        boxes: the forward's.
        argmax: what the forward returned; int32 or int64.
        input_shape: (N, C, H, W).
        spatial_scale: the forward's.
        accumulate: add to `out` instead of overwriting it.
        out: where to write.
        stream: see :meth:`baracuda.Plan.run`.
        preference: what the selection of the kernel must keep to.

    Returns:
        [N, C, H, W], of the kind of `grad`.

    >>> import numpy as np, baracuda as bc
    >>> x, boxes = np.ones((1, 1, 8, 8), np.float32), np.array([[0, 0, 0, 3, 3]], np.float32)
    >>> y, argmax = bc.roi_pool(x, boxes, 2, return_argmax=True)
    >>> float(bc.roi_pool_backward(y, boxes, argmax, x.shape).sum())
    4.0
    """
    where = "roi_pool_backward"
    shape, dtype, device = _core.describe(grad, f"{where}: grad")
    _, index_dtype, _ = _core.describe(argmax, f"{where}: argmax")
    input_shape = _input_shape(shape, input_shape, where)
    if accumulate and out is None:
        raise InvalidProblemError(f"{where}: accumulate: expected out, to add to")
    boxes, count, rois_dtype = _rois(boxes, grad, device, stream, where)
    plan = cached_plan(
        RoiPoolBackwardPlan, device, preference, **_fields(input_shape, count, shape[2:], dtype, rois_dtype),
        spatial_scale=float(spatial_scale), index_dtype=index_dtype, accumulate=accumulate,
    )  # fmt: skip
    dinput = new_output(grad, input_shape, dtype, device, stream) if out is None else out
    plan.run(doutput=grad, rois=boxes, argmax=argmax, dinput=dinput, stream=stream)
    return returned(dinput, grad)


def _input_shape(shape: tuple[int, ...], input_shape: Sequence[int], where: str) -> tuple[int, ...]:
    """The given one, if it can be of the input to a gradient of this shape."""
    input_shape = integers(input_shape, f"{where}: input_shape")
    if len(shape) != 4:
        raise InvalidProblemError(f"{where}: grad: expected shape (rois, c, pooled_h, pooled_w), got {shape}")
    if len(input_shape) != 4 or input_shape[1] != shape[1]:
        raise InvalidProblemError(f"{where}: input_shape: expected (n, {shape[1]}, h, w), got {input_shape}")
    return input_shape


def _nms(
    boxes: Any,
    scores: Any,
    classes: Any,
    iou_threshold: float,
    stream: Any,
    preference: PlanPreference | None,
    where: str,
) -> Any:
    shape, dtype, device = _core.describe(boxes, f"{where}: boxes")
    if len(shape) != 2 or shape[1] != 4:
        raise InvalidProblemError(f"{where}: boxes: expected shape (boxes, 4), got {shape}")
    _, scores_dtype, _ = _core.describe(scores, f"{where}: scores")
    operands = {"boxes": boxes, "scores": scores}
    class_dtype = None
    if classes is not None:
        operands["classes"] = classes
        _, class_dtype, _ = _core.describe(classes, f"{where}: idxs")
    plan = cached_plan(
        NmsPlan, device, preference, num_boxes=shape[0], iou_threshold=float(iou_threshold), dtype=dtype,
        scores_dtype=scores_dtype, class_dtype=class_dtype,
    )  # fmt: skip
    keep = new_output(boxes, (shape[0],), "int64", device, stream)
    count = new_output(boxes, (1,), "int64", device, stream)
    plan.run(**operands, keep=keep, count=count, stream=stream)
    return first_of(keep, count, boxes, device, stream)


def roi_align(
    input: Any,  # noqa: A002  torchvision's name
    boxes: Any,
    output_size: int | Sequence[int],
    spatial_scale: float = 1.0,
    sampling_ratio: int = 0,
    aligned: bool = False,
    *,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """RoI-align; see :class:`RoiAlignPlan`.

    Args:
        input: [N, C, H, W].
        boxes: [R, 5], rows (batch, x1, y1, x2, y2); or one [L, 4] for each image, rows (x1, y1, x2, y2). 16-bit
            boxes are converted to float32.
        output_size: (pooled_h, pooled_w) or one number for both.
        spatial_scale: boxes times this are in cells.
        sampling_ratio: samples of a bin along each axis; 0 and -1: adaptive.
        aligned: move boxes by half a cell.
        out: where to write.
        stream: see :meth:`baracuda.Plan.run`.
        preference: what the selection of the kernel must keep to.

    Returns:
        [R, C, pooled_h, pooled_w], of the kind of `input`.

    >>> import numpy as np, baracuda as bc
    >>> x = np.ones((2, 3, 16, 16), np.float32)
    >>> boxes = [np.array([[0, 0, 8, 8]], np.float32), np.array([[2, 2, 9, 5], [1, 1, 4, 4]], np.float32)]
    >>> bc.roi_align(x, boxes, 7).shape
    (3, 3, 7, 7)
    """
    where = "roi_align"
    shape, dtype, device = _core.describe(input, f"{where}: input")
    if len(shape) != 4:
        raise InvalidProblemError(f"{where}: input: expected shape (n, c, h, w), got {shape}")
    boxes, count, rois_dtype = _rois(boxes, input, device, stream, where)
    pooled = per_axis(output_size, 2, f"{where}: output_size")
    plan = cached_plan(
        RoiAlignPlan, device, preference, **_fields(shape, count, pooled, dtype, rois_dtype),
        spatial_scale=float(spatial_scale), sampling_ratio=_sampling(sampling_ratio, where), aligned=aligned,
    )  # fmt: skip
    output = new_output(input, (count, shape[1], *pooled), dtype, device, stream) if out is None else out
    plan.run(input=input, rois=boxes, output=output, stream=stream)
    return returned(output, input)


def roi_align_backward(
    grad: Any,
    boxes: Any,
    input_shape: Sequence[int],
    output_size: int | Sequence[int] | None = None,
    spatial_scale: float = 1.0,
    sampling_ratio: int = 0,
    aligned: bool = False,
    *,
    accumulate: bool = False,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The gradient of :func:`roi_align` with respect to its input; see :class:`RoiAlignBackwardPlan`.

    Args:
        grad: [R, C, pooled_h, pooled_w].
        boxes: the forward's.
        input_shape: (N, C, H, W).
        output_size: the forward's; None: what `grad` has.
        spatial_scale: the forward's.
        sampling_ratio: the forward's.
        aligned: the forward's.
        accumulate: add to `out` instead of overwriting it.
        out: where to write.
        stream: see :meth:`baracuda.Plan.run`.
        preference: what the selection of the kernel must keep to.

    Returns:
        [N, C, H, W], of the kind of `grad`.

    >>> import numpy as np, baracuda as bc
    >>> boxes = np.array([[0, 1, 1, 7, 9]], np.float32)
    >>> dx = bc.roi_align_backward(np.ones((1, 1, 4, 4), np.float32), boxes, (1, 1, 12, 12))
    >>> round(float(dx.sum()), 4)
    16.0
    """
    where = "roi_align_backward"
    shape, dtype, device = _core.describe(grad, f"{where}: grad")
    input_shape = _input_shape(shape, input_shape, where)
    pooled = shape[2:] if output_size is None else per_axis(output_size, 2, f"{where}: output_size")
    if accumulate and out is None:
        raise InvalidProblemError(f"{where}: accumulate: expected out, to add to")
    boxes, count, rois_dtype = _rois(boxes, grad, device, stream, where)
    plan = cached_plan(
        RoiAlignBackwardPlan, device, preference, **_fields(input_shape, count, pooled, dtype, rois_dtype),
        spatial_scale=float(spatial_scale), sampling_ratio=_sampling(sampling_ratio, where), aligned=aligned,
        accumulate=accumulate,
    )  # fmt: skip
    dinput = new_output(grad, input_shape, dtype, device, stream) if out is None else out
    plan.run(doutput=grad, rois=boxes, dinput=dinput, stream=stream)
    return returned(dinput, grad)


def _fields(shape: tuple[int, ...], count: int, pooled: tuple[int, ...], dtype: str, rois_dtype: str) -> dict[str, Any]:
    return {
        **dict(zip("nchw", shape, strict=True)),
        "num_rois": count,
        "pooled_h": pooled[0],
        "pooled_w": pooled[1],
        "dtype": dtype,
        "rois_dtype": rois_dtype,
    }


def _sampling(ratio: int, where: str) -> int:
    ratio = integer(ratio, f"{where}: sampling_ratio")
    return 0 if ratio == -1 else ratio


def _rois(boxes: Any, like: Any, device: str, stream: Any, where: str) -> tuple[Any, int, str]:
    """Rows with batch numbers, how many, and their dtype."""
    if isinstance(boxes, (list, tuple)):
        for place, entry in enumerate(boxes):
            shape, _, _ = _core.describe(entry, f"{where}: boxes[{place}]")
            if len(shape) != 2 or shape[1] != 4:
                raise InvalidProblemError(f"{where}: boxes[{place}]: expected shape (boxes, 4), got {shape}")
        boxes = stacked_boxes(boxes, like, device, stream)
    shape, dtype, _ = _core.describe(boxes, f"{where}: boxes")
    if len(shape) != 2 or shape[1] != 5:
        raise InvalidProblemError(
            f"{where}: boxes: expected shape (rois, 5) with batch numbers, or a list with (boxes, 4) for each image, "
            f"got {shape}"
        )
    if dtype in ("float16", "bfloat16"):
        convert = getattr(boxes, "astype", None)
        boxes = boxes.float() if convert is None else convert("float32")
        dtype = "float32"
    return boxes, shape[0], dtype
