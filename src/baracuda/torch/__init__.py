# SPDX-License-Identifier: Apache-2.0
"""The operators for PyTorch: with gradients, under ``torch.compile``, CUDA graphs and ``torch.func``.

Importing this module needs PyTorch. Every function is an operator of ``torch.ops.baracuda``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from baracuda._arguments import segments_of_offsets
from baracuda._forms import sum_dtype
from baracuda.errors import InvalidProblemError
from baracuda.layout import _ranges
from baracuda.torch._register import LIBRARY, NAMES, TAGS, calls, compiling, direct, operators

__all__ = [
    "Extremes",
    "FractionalMaxPool2d",
    "FractionalMaxPool3d",
    "RoIAlign",
    "RoIPool",
    "batched_nms",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "dynamic_update_slice",
    "dynamic_update_slice_",
    "fractional_max_pool2d",
    "fractional_max_pool3d",
    "kv_cache_append_",
    "kv_cache_gather",
    "linear_recurrence",
    "logcumsumexp",
    "nms",
    "nms_padded",
    "roi_align",
    "roi_pool",
    "segment_max",
    "segment_mean",
    "segment_min",
    "segment_prod",
    "segment_sum",
    "write_slice",
    "write_slice_",
]

_LOW = (torch.float16, torch.bfloat16)


class Extremes(NamedTuple):
    """Running maxima or minima, and where each is along the axis.

    Attributes:
        values: the extrema.
        indices: int64.
    """

    values: Tensor
    indices: Tensor


def _under_autocast(tensor: Tensor) -> bool:
    return bool(torch.is_autocast_enabled(tensor.device.type))


def _widest(*tensors: Tensor | None) -> list[Tensor | None]:
    """Under autocast, floating tensors of one operator are promoted to the widest of them."""
    first = tensors[0]
    assert first is not None
    wide = first.dtype
    if all(tensor is None or tensor.dtype == wide for tensor in tensors) or not _under_autocast(first):
        return list(tensors)
    for tensor in tensors:
        if tensor is not None:
            wide = torch.promote_types(wide, tensor.dtype)
    return [tensor if tensor is None else tensor.to(wide) for tensor in tensors]


# ---------------------------------------------------------------------------------------------------
# Scans.


def _sum(kind: str, input: Tensor, dim: int, dtype: torch.dtype | None, reverse: bool, exclusive: bool) -> Tensor:  # noqa: A002
    if dtype is None and input.dtype in _LOW and _under_autocast(input):
        dtype = torch.float32
    result: Tensor = calls[kind](*_sum_arguments(input, dim, dtype, reverse, exclusive))
    return result


def _sum_arguments(
    input: Tensor,  # noqa: A002
    dim: int,
    dtype: torch.dtype | None,
    reverse: bool,
    exclusive: bool,
) -> tuple[Any, ...]:
    return input, dim, reverse, exclusive, sum_dtype(NAMES[input.dtype]) if dtype is None else NAMES[dtype]


_cumsum, _cumprod = (
    direct(kind, functools.partial(_sum, kind), _sum_arguments, (torch._C._is_any_autocast_enabled,))
    for kind in ("cumsum", "cumprod")
)


def cumsum(
    input: Tensor,  # noqa: A002
    dim: int,
    *,
    dtype: torch.dtype | None = None,
    reverse: bool = False,
    exclusive: bool = False,
) -> Tensor:
    """Sums of each element and those before it along an axis; as ``torch.cumsum``.

    Args:
        input: any tensor with at least one axis.
        dim: the axis.
        dtype: of the result: float32 for 16-bit floats, an integer dtype for integers; None is int64 for
            integers and bool, else that of `input`, under autocast float32 for 16-bit floats.
        reverse: from the last element to the first.
        exclusive: each element is left out of its own sum.

    >>> import torch, baracuda.torch as bt
    >>> bt.cumsum(torch.tensor([1.0, 2.0, 3.0]), 0, reverse=True).tolist()
    [6.0, 5.0, 3.0]
    """
    call = functools.partial(_sum, "cumsum") if compiling() else _cumsum
    result: Tensor = call(input, dim, dtype, reverse, exclusive)
    return result


def cumprod(
    input: Tensor,  # noqa: A002
    dim: int,
    *,
    dtype: torch.dtype | None = None,
    reverse: bool = False,
    exclusive: bool = False,
) -> Tensor:
    """Products along an axis; as ``torch.cumprod``. The gradient is exact with any number of zeros.

    Arguments are those of :func:`cumsum`.

    >>> import torch, baracuda.torch as bt
    >>> bt.cumprod(torch.tensor([1.0, 2.0, 3.0]), 0).tolist()
    [1.0, 2.0, 6.0]
    """
    call = functools.partial(_sum, "cumprod") if compiling() else _cumprod
    result: Tensor = call(input, dim, dtype, reverse, exclusive)
    return result


def logcumsumexp(
    input: Tensor,  # noqa: A002
    dim: int,
    *,
    reverse: bool = False,
    exclusive: bool = False,
) -> Tensor:
    """Logarithms of the sums of exponentials along an axis; as ``torch.logcumsumexp``.

    Arguments are those of :func:`cumsum`.

    >>> import torch, baracuda.torch as bt
    >>> bt.logcumsumexp(torch.tensor([1000.0, 1000.0]), 0).tolist()
    [1000.0, 1000.6931762695312]
    """
    result: Tensor = calls["logcumsumexp"](input, dim, reverse, exclusive)
    return result


def cummax(
    input: Tensor,  # noqa: A002
    dim: int,
    *,
    reverse: bool = False,
    exclusive: bool = False,
    ties: Literal["first", "last"] = "last",
) -> Extremes:
    """The largest of each element and those before it, and where it is; as ``torch.cummax``.

    Args:
        input: any tensor with at least one axis.
        dim: the axis.
        reverse: from the last element to the first.
        exclusive: each element is left out of its own maximum; the first index is then -1.
        ties: which of equal maxima the index is of. torch's is the last.

    >>> import torch, baracuda.torch as bt
    >>> bt.cummax(torch.tensor([1.0, 3.0, 3.0, 2.0]), 0).indices.tolist()
    [0, 1, 2, 2]
    """
    return Extremes(*calls["cummax_with_indices"](input, dim, reverse, exclusive, ties, "int64"))


def cummin(
    input: Tensor,  # noqa: A002
    dim: int,
    *,
    reverse: bool = False,
    exclusive: bool = False,
    ties: Literal["first", "last"] = "last",
) -> Extremes:
    """The smallest of each element and those before it, and where it is; as ``torch.cummin``.

    Arguments are those of :func:`cummax`.

    >>> import torch, baracuda.torch as bt
    >>> bt.cummin(torch.tensor([3.0, 1.0, 2.0]), 0).values.tolist()
    [3.0, 1.0, 1.0]
    """
    return Extremes(*calls["cummin_with_indices"](input, dim, reverse, exclusive, ties, "int64"))


def _recurrence(a: Tensor, b: Tensor, h0: Tensor | None, dim: int, reverse: bool) -> Tensor:
    result: Tensor = calls["linear_recurrence"](*_widest(a, b, h0), dim, reverse)
    return result


_direct_recurrence = direct("linear_recurrence", _recurrence, lambda *args: args)


def linear_recurrence(
    a: Tensor, b: Tensor, dim: int = -1, *, h0: Tensor | None = None, reverse: bool = False
) -> Tensor:
    """h_j = a_j h_{j-1} + b_j along an axis. It can be differentiated as often as you like.

    Args:
        a: the coefficients.
        b: of the shape and dtype of `a`.
        dim: the axis.
        h0: what comes before the first element, of the shape without the axis; None is 0.
        reverse: h_j = a_j h_{j+1} + b_j.

    >>> import torch, baracuda.torch as bt
    >>> bt.linear_recurrence(torch.tensor([2.0, 3.0, 5.0]), torch.ones(3)).tolist()
    [1.0, 4.0, 21.0]
    """
    call = _recurrence if compiling() else _direct_recurrence
    result: Tensor = call(a, b, h0, dim, reverse)
    return result


# ---------------------------------------------------------------------------------------------------
# Segments.


def _segment(kind: str, data: Tensor, segment_ids: Tensor | None, offsets: Tensor | None, *settings: Any) -> Any:
    """Of `settings` see :func:`_segment_arguments`."""
    where = f"segment_{kind}"
    shape = data.shape[1:]
    matrix = data if data.dim() == 2 else data.reshape(data.shape[0], shape.numel())
    *tensors, num_segments, ids, ties, empty_value = _segment_arguments(where, matrix, segment_ids, offsets, *settings)
    return_arg = settings[-1]
    # Of the two gradients of an extremum, the one that reads `arg` is several times faster.
    if return_arg or (kind in ("max", "min") and ties == "first" and data.requires_grad):
        result = calls[f"{where}_with_arg"](*tensors, num_segments, ids, empty_value)
    else:
        result = (calls[where](*tensors, num_segments, ids, ties, empty_value),)
    if data.dim() != 2:
        result = tuple(one.reshape(num_segments, *shape) for one in result)
    return tuple(result) if return_arg else result[0]


def _segment_arguments(
    where: str,
    matrix: Tensor,
    segment_ids: Tensor | None,
    offsets: Tensor | None,
    num_segments: int | None,
    is_sorted: bool,
    ties: str,
    empty_value: float | None,
    return_arg: bool,  # noqa: ARG001  the caller's
) -> tuple[Any, ...]:
    """Of the operator without indices."""
    if (segment_ids is None) == (offsets is None):
        raise InvalidProblemError(f"{where}: expected one of segment_ids and offsets")
    if offsets is not None:
        num_segments = segments_of_offsets(offsets.shape[0], num_segments, where)
        return matrix, None, offsets, num_segments, "offsets", ties, empty_value
    if num_segments is None:
        raise InvalidProblemError(f"{where}: num_segments: is missing; reading it from the ids would wait")
    return matrix, segment_ids, None, num_segments, "sorted" if is_sorted else "unsorted", ties, empty_value


def _segment_of_matrix(where: str, data: Tensor, *others: Any) -> tuple[Any, ...] | None:
    return None if data.dim() != 2 or others[-1] else _segment_arguments(where, data, *others)


_direct_segment = {
    kind: direct(
        f"segment_{kind}", functools.partial(_segment, kind), functools.partial(_segment_of_matrix, f"segment_{kind}")
    )
    for kind in ("sum", "mean", "max", "min", "prod")
}


def _segments(kind: str) -> Any:
    return functools.partial(_segment, kind) if compiling() else _direct_segment[kind]


def segment_sum(
    data: Tensor,
    segment_ids: Tensor | None = None,
    num_segments: int | None = None,
    *,
    offsets: Tensor | None = None,
    sorted: bool = False,  # noqa: A002
    empty_value: float | None = None,
) -> Tensor:
    """The sum of the rows of each segment; see :class:`baracuda.SegmentReducePlan`.

    Args:
        data: [N, ...].
        segment_ids: [N], int32 or int64; rows whose id is outside 0 .. num_segments - 1 are dropped. Or
        offsets: [S + 1]: segment s has the rows ``offsets[s]`` to ``offsets[s + 1] - 1``.
        num_segments: S; with ids it must be given.
        sorted: a promise that ids never fall.
        empty_value: what empty segments hold; by default 0.

    Returns:
        [S, ...].

    >>> import torch, baracuda.torch as bt
    >>> bt.segment_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 2]), 3).tolist()
    [1.0, 0.0, 6.0]
    """
    call = _segments("sum")
    result: Tensor = call(data, segment_ids, offsets, num_segments, sorted, "first", empty_value, False)
    return result


def segment_mean(
    data: Tensor,
    segment_ids: Tensor | None = None,
    num_segments: int | None = None,
    *,
    offsets: Tensor | None = None,
    sorted: bool = False,  # noqa: A002
    empty_value: float | None = None,
) -> Tensor:
    """The mean of the rows of each segment, by default 0 where it is empty. See :func:`segment_sum`.

    >>> import torch, baracuda.torch as bt
    >>> bt.segment_mean(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 2]), 3).tolist()
    [1.0, 0.0, 3.0]
    """
    call = _segments("mean")
    result: Tensor = call(data, segment_ids, offsets, num_segments, sorted, "first", empty_value, False)
    return result


def segment_max(
    data: Tensor,
    segment_ids: Tensor | None = None,
    num_segments: int | None = None,
    *,
    offsets: Tensor | None = None,
    sorted: bool = False,  # noqa: A002
    empty_value: float | None = None,
    ties: Literal["first", "even"] = "first",
    return_arg: bool = False,
) -> Any:
    """The maximum of the rows of each segment; by default the dtype's lowest value where it is empty.

    See :func:`segment_sum` for the other arguments.

    Args:
        ties: the ``"first"`` of equal rows takes the gradient, or they share it (``"even"``).
        return_arg: return ``(output, arg)``, where `arg` is the lowest row that holds the maximum.

    >>> import torch, baracuda.torch as bt
    >>> bt.segment_max(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 2]), 3).tolist()
    [1.0, -inf, 4.0]
    """
    return _segments("max")(data, segment_ids, offsets, num_segments, sorted, ties, empty_value, return_arg)


def segment_min(
    data: Tensor,
    segment_ids: Tensor | None = None,
    num_segments: int | None = None,
    *,
    offsets: Tensor | None = None,
    sorted: bool = False,  # noqa: A002
    empty_value: float | None = None,
    ties: Literal["first", "even"] = "first",
    return_arg: bool = False,
) -> Any:
    """The minimum of the rows of each segment; by default the dtype's highest value where it is empty.

    See :func:`segment_max`.

    >>> import torch, baracuda.torch as bt
    >>> bt.segment_min(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 2]), 3).tolist()
    [1.0, inf, 2.0]
    """
    return _segments("min")(data, segment_ids, offsets, num_segments, sorted, ties, empty_value, return_arg)


def segment_prod(
    data: Tensor,
    segment_ids: Tensor | None = None,
    num_segments: int | None = None,
    *,
    offsets: Tensor | None = None,
    sorted: bool = False,  # noqa: A002
    empty_value: float | None = None,
) -> Tensor:
    """The product of the rows of each segment, by default 1 where it is empty. See :func:`segment_sum`.

    >>> import torch, baracuda.torch as bt
    >>> bt.segment_prod(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 2]), 3).tolist()
    [1.0, 1.0, 8.0]
    """
    call = _segments("prod")
    result: Tensor = call(data, segment_ids, offsets, num_segments, sorted, "first", empty_value, False)
    return result


# ---------------------------------------------------------------------------------------------------
# Pooling.


def _sizes(value: int | Sequence[int], rank: int) -> tuple[int, ...]:
    return (value,) * rank if isinstance(value, (int, torch.SymInt)) else tuple(value)


def _fractional(
    rank: int,
    input: Tensor,  # noqa: A002
    samples: Tensor,
    kernel_size: int | Sequence[int],
    output_size: int | Sequence[int] | None,
    output_ratio: float | Sequence[float] | None,
) -> tuple[Tensor, Tensor]:
    where = f"fractional_max_pool{rank}d"
    if input.dim() not in (rank + 1, rank + 2):
        raise InvalidProblemError(f"{where}: input: expected {rank + 1} or {rank + 2} axes, got {input.dim()}")
    batched = input if input.dim() == rank + 2 else input.unsqueeze(0)
    samples = samples.to(_samples_dtype(input))
    result: tuple[Tensor, Tensor] = calls[where](
        *_fractional_arguments(rank, batched, samples, kernel_size, output_size, output_ratio)
    )
    if input.dim() == rank + 1:
        result = (result[0].squeeze(0), result[1].squeeze(0))
    return result


def _samples_dtype(input: Tensor) -> torch.dtype:  # noqa: A002
    return torch.float64 if input.dtype == torch.float64 else torch.float32


def _fractional_arguments(
    rank: int,
    batched: Tensor,
    samples: Tensor,
    kernel_size: int | Sequence[int],
    output_size: int | Sequence[int] | None,
    output_ratio: float | Sequence[float] | None,
) -> tuple[Any, ...]:
    if (output_size is None) == (output_ratio is None):
        raise InvalidProblemError(f"fractional_max_pool{rank}d: expected one of output_size and output_ratio")
    if output_size is not None:
        pooled = _sizes(output_size, rank)
    else:
        ratios = [output_ratio] * rank if isinstance(output_ratio, (int, float)) else list(output_ratio or ())
        pooled = tuple(int(extent * ratio) for extent, ratio in zip(batched.shape[-rank:], ratios, strict=True))
    return batched, samples, _sizes(kernel_size, rank), pooled, "torch", "plane", "int64"


def _fractional_of_batch(rank: int, input: Tensor, samples: Tensor, *settings: Any) -> tuple[Any, ...] | None:  # noqa: A002
    fits = input.dim() == rank + 2 and samples.dtype == _samples_dtype(input)
    return _fractional_arguments(rank, input, samples, *settings) if fits else None


_direct_fractional = {
    rank: direct(
        f"fractional_max_pool{rank}d",
        functools.partial(_fractional, rank),
        functools.partial(_fractional_of_batch, rank),
    )
    for rank in (2, 3)
}


def _pool(
    rank: int,
    input: Tensor,  # noqa: A002
    samples: Tensor | None,
    return_indices: bool,
    *settings: Any,
) -> Any:
    if samples is None:
        planes = input.shape[:-rank]
        batch = planes if len(planes) == 2 else (1, *planes)
        samples = torch.rand(*batch, rank, dtype=_samples_dtype(input), device=input.device)
    call = functools.partial(_fractional, rank) if compiling() else _direct_fractional[rank]
    result = call(input, samples, *settings)
    return result if return_indices else result[0]


def fractional_max_pool2d(
    input: Tensor,  # noqa: A002
    kernel_size: int | Sequence[int],
    output_size: int | Sequence[int] | None = None,
    output_ratio: float | Sequence[float] | None = None,
    return_indices: bool = False,
    _random_samples: Tensor | None = None,
) -> Any:
    """Fractional max pooling with the windows and indices of ``torch.nn.functional.fractional_max_pool2d``.

    >>> import torch, baracuda.torch as bt
    >>> bt.fractional_max_pool2d(torch.randn(1, 3, 8, 8), 2, output_size=5).shape
    torch.Size([1, 3, 5, 5])
    """
    return _pool(2, input, _random_samples, return_indices, kernel_size, output_size, output_ratio)


def fractional_max_pool3d(
    input: Tensor,  # noqa: A002
    kernel_size: int | Sequence[int],
    output_size: int | Sequence[int] | None = None,
    output_ratio: float | Sequence[float] | None = None,
    return_indices: bool = False,
    _random_samples: Tensor | None = None,
) -> Any:
    """Fractional max pooling with the windows and indices of ``torch.nn.functional.fractional_max_pool3d``.

    >>> import torch, baracuda.torch as bt
    >>> bt.fractional_max_pool3d(torch.randn(3, 8, 8, 8), 2, output_ratio=0.5).shape
    torch.Size([3, 4, 4, 4])
    """
    return _pool(3, input, _random_samples, return_indices, kernel_size, output_size, output_ratio)


class FractionalMaxPool2d(torch.nn.FractionalMaxPool2d):
    """``torch.nn.FractionalMaxPool2d`` by this library's kernels.

    >>> import torch, baracuda.torch as bt
    >>> bt.FractionalMaxPool2d(3, output_size=4)(torch.randn(2, 3, 9, 9)).shape
    torch.Size([2, 3, 4, 4])
    """

    def forward(self, input: Tensor) -> Any:  # noqa: A002
        """Pools."""
        return fractional_max_pool2d(
            input, self.kernel_size, self.output_size, self.output_ratio, self.return_indices, self._random_samples
        )


class FractionalMaxPool3d(torch.nn.FractionalMaxPool3d):
    """``torch.nn.FractionalMaxPool3d`` by this library's kernels.

    >>> import torch, baracuda.torch as bt
    >>> bt.FractionalMaxPool3d(2, output_ratio=0.5)(torch.randn(1, 3, 8, 8, 8)).shape
    torch.Size([1, 3, 4, 4, 4])
    """

    def forward(self, input: Tensor) -> Any:  # noqa: A002
        """Pools."""
        return fractional_max_pool3d(
            input, self.kernel_size, self.output_size, self.output_ratio, self.return_indices, self._random_samples
        )


# ---------------------------------------------------------------------------------------------------
# Regions of images.


def _regions(input: Tensor, boxes: Tensor | Sequence[Tensor], where: str) -> Tensor:  # noqa: A002
    """[R, 5], float32 or float64."""
    if input.dim() != 4:
        raise InvalidProblemError(f"{where}: input: expected [N, C, H, W], got {tuple(input.shape)}")
    if not isinstance(boxes, Tensor):
        if not boxes:
            return input.new_zeros((0, 5), dtype=torch.float32)
        for entry in boxes:
            if entry.dim() != 2 or entry.shape[1] != 4:
                raise InvalidProblemError(f"{where}: boxes: expected [L, 4] for each image, got {tuple(entry.shape)}")
        numbered = [
            torch.cat([torch.full_like(entry[:, :1], image), entry], dim=1) for image, entry in enumerate(boxes)
        ]
        boxes = torch.cat(numbered)
    if boxes.dim() != 2 or boxes.shape[1] != 5:
        raise InvalidProblemError(f"{where}: boxes: expected [R, 5], got {tuple(boxes.shape)}")
    return boxes.float() if boxes.dtype in _LOW else boxes


def _align(input: Tensor, boxes: Any, *settings: Any) -> Tensor:  # noqa: A002
    result: Tensor = calls["roi_align"](*_align_arguments(input, _regions(input, boxes, "roi_align"), *settings))
    return result


def _align_arguments(
    input: Tensor,  # noqa: A002
    rois: Tensor,
    output_size: int | Sequence[int],
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
) -> tuple[Any, ...]:
    return input, rois, _sizes(output_size, 2), float(spatial_scale), max(0, sampling_ratio), aligned


def _pool_regions(input: Tensor, boxes: Any, *settings: Any) -> Any:  # noqa: A002
    return calls["roi_pool"](*_pool_regions_arguments(input, _regions(input, boxes, "roi_pool"), *settings))


def _pool_regions_arguments(
    input: Tensor,  # noqa: A002
    rois: Tensor,
    output_size: int | Sequence[int],
    spatial_scale: float,
) -> tuple[Any, ...]:
    return input, rois, _sizes(output_size, 2), float(spatial_scale), "int32"


def _of_rows(arguments: Any, where: str, input: Tensor, boxes: Tensor, *settings: Any) -> tuple[Any, ...] | None:  # noqa: A002
    """Where the boxes are what the operator takes."""
    rois = _regions(input, boxes, where)
    found: tuple[Any, ...] = arguments(input, rois, *settings)
    return found if rois is boxes else None


_direct_align = direct("roi_align", _align, functools.partial(_of_rows, _align_arguments, "roi_align"))
_direct_pool_regions = direct(
    "roi_pool", _pool_regions, functools.partial(_of_rows, _pool_regions_arguments, "roi_pool")
)


def roi_align(
    input: Tensor,  # noqa: A002
    boxes: Tensor | Sequence[Tensor],
    output_size: int | Sequence[int],
    spatial_scale: float = 1.0,
    sampling_ratio: int = -1,
    aligned: bool = False,
) -> Tensor:
    """RoI-align with the arguments of torchvision's; see :class:`baracuda.RoiAlignPlan`.

    Args:
        input: [N, C, H, W].
        boxes: [R, 5], rows (batch, x1, y1, x2, y2); or one [L, 4] for each image. They get no gradient.
        output_size: (height, width) or one number for both.
        spatial_scale: boxes times this are in cells.
        sampling_ratio: samples of a bin along each axis; 0 and -1: adaptive.
        aligned: move boxes by half a cell.

    >>> import torch, baracuda.torch as bt
    >>> bt.roi_align(torch.ones(1, 1, 8, 8), [torch.tensor([[0.0, 0.0, 4.0, 4.0]])], 2).tolist()
    [[[[1.0, 1.0], [1.0, 1.0]]]]
    """
    call = _align if compiling() else _direct_align
    result: Tensor = call(input, boxes, output_size, spatial_scale, sampling_ratio, aligned)
    return result


def roi_pool(
    input: Tensor,  # noqa: A002
    boxes: Tensor | Sequence[Tensor],
    output_size: int | Sequence[int],
    spatial_scale: float = 1.0,
) -> Tensor:
    """RoI-pooling with the arguments of torchvision's; see :class:`baracuda.RoiPoolPlan` and :func:`roi_align`.

    >>> import torch, baracuda.torch as bt
    >>> x = torch.arange(64.0).reshape(1, 1, 8, 8)
    >>> bt.roi_pool(x, torch.tensor([[0.0, 0, 0, 3, 3]]), 2).tolist()
    [[[[9.0, 11.0], [25.0, 27.0]]]]
    """
    call = _pool_regions if compiling() else _direct_pool_regions
    result: Tensor = call(input, boxes, output_size, spatial_scale)[0]
    return result


class RoIAlign(torch.nn.Module):
    """:func:`roi_align` as a module, with the arguments of torchvision's.

    >>> import torch, baracuda.torch as bt
    >>> bt.RoIAlign(7, 0.25, 2, aligned=True)(torch.ones(1, 2, 16, 16), torch.zeros(3, 5)).shape
    torch.Size([3, 2, 7, 7])
    """

    def __init__(
        self,
        output_size: int | Sequence[int],
        spatial_scale: float,
        sampling_ratio: int,
        aligned: bool = False,
    ) -> None:
        super().__init__()
        self.output_size = output_size
        self.spatial_scale = spatial_scale
        self.sampling_ratio = sampling_ratio
        self.aligned = aligned

    def forward(self, input: Tensor, rois: Tensor | Sequence[Tensor]) -> Tensor:  # noqa: A002
        """Resamples the regions."""
        return roi_align(input, rois, self.output_size, self.spatial_scale, self.sampling_ratio, self.aligned)

    def extra_repr(self) -> str:
        """The arguments."""
        return (
            f"output_size={self.output_size}, spatial_scale={self.spatial_scale}, "
            f"sampling_ratio={self.sampling_ratio}, aligned={self.aligned}"
        )


class RoIPool(torch.nn.Module):
    """:func:`roi_pool` as a module, with the arguments of torchvision's.

    >>> import torch, baracuda.torch as bt
    >>> bt.RoIPool(7, 0.25)(torch.ones(1, 2, 16, 16), torch.zeros(3, 5)).shape
    torch.Size([3, 2, 7, 7])
    """

    def __init__(self, output_size: int | Sequence[int], spatial_scale: float) -> None:
        super().__init__()
        self.output_size = output_size
        self.spatial_scale = spatial_scale

    def forward(self, input: Tensor, rois: Tensor | Sequence[Tensor]) -> Tensor:  # noqa: A002
        """Pools the regions."""
        return roi_pool(input, rois, self.output_size, self.spatial_scale)

    def extra_repr(self) -> str:
        """The arguments."""
        return f"output_size={self.output_size}, spatial_scale={self.spatial_scale}"


def nms_padded(
    boxes: Tensor, scores: Tensor, iou_threshold: float, classes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Non-maximum suppression whose results have a fixed size, so that nothing waits for the device.

    Args:
        boxes: [N, 4], rows (x1, y1, x2, y2).
        scores: [N].
        iou_threshold: the overlap, over the union, beyond which a box is suppressed.
        classes: [N]; boxes of different classes don't suppress each other.

    Returns:
        ``(keep, count)``, int64: the numbers of the kept boxes in descending order of their scores, then -1;
        and how many those are, [1].

    >>> import torch, baracuda.torch as bt
    >>> boxes = torch.tensor([[0.0, 0, 9, 9], [0, 0, 10, 10], [20, 20, 30, 30]])
    >>> keep, count = bt.nms_padded(boxes, torch.tensor([0.3, 0.9, 0.5]), 0.5)
    >>> keep.tolist(), count.tolist()
    ([1, 2, -1], [2])
    """
    result: tuple[Tensor, Tensor] = calls["nms_padded"](boxes, scores, classes, float(iou_threshold))
    return result


# How many boxes are kept is known only after the run; the operator waits for it.
def _nms(boxes: Tensor, scores: Tensor, classes: Tensor | None, iou_threshold: float) -> Tensor:
    keep, count = operators["nms_padded"](boxes, scores, classes, iou_threshold)
    kept: Tensor = keep[: int(count.item())].clone()
    return kept


def _fake_nms(boxes: Tensor, scores: Tensor, classes: Tensor | None, iou_threshold: float) -> Tensor:
    del scores, classes, iou_threshold
    kept = torch.library.get_ctx().new_dynamic_size()
    return boxes.new_empty((kept,), dtype=torch.int64)


LIBRARY.define("nms(Tensor boxes, Tensor scores, Tensor? classes, float iou_threshold) -> Tensor", tags=TAGS)
LIBRARY.impl("nms", _nms, "CompositeExplicitAutograd")
torch.library.register_fake("baracuda::nms", _fake_nms, lib=LIBRARY)


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """The numbers of the boxes that non-maximum suppression keeps, in descending order of their scores.

    Arguments are those of :func:`nms_padded`, which doesn't wait for the device as this does.

    >>> import torch, baracuda.torch as bt
    >>> boxes = torch.tensor([[0.0, 0, 9, 9], [0, 0, 10, 10], [20, 20, 30, 30]])
    >>> bt.nms(boxes, torch.tensor([0.3, 0.9, 0.5]), 0.5).tolist()
    [1, 2]
    """
    result: Tensor = torch.ops.baracuda.nms.default(boxes.detach(), scores.detach(), None, float(iou_threshold))
    return result


def batched_nms(boxes: Tensor, scores: Tensor, idxs: Tensor, iou_threshold: float) -> Tensor:
    """:func:`nms` among the boxes of each class, all classes in one call.

    >>> import torch, baracuda.torch as bt
    >>> boxes = torch.tensor([[0.0, 0, 9, 9], [0, 0, 10, 10], [20, 20, 30, 30]])
    >>> bt.batched_nms(boxes, torch.tensor([0.3, 0.9, 0.5]), torch.tensor([0, 1, 1]), 0.5).tolist()
    [1, 2, 0]
    """
    result: Tensor = torch.ops.baracuda.nms.default(boxes.detach(), scores.detach(), idxs, float(iou_threshold))
    return result


# ---------------------------------------------------------------------------------------------------
# Writes.


def _as_written(dest: Tensor, source: Tensor) -> Tensor:
    return source.to(dest.dtype) if source.dtype != dest.dtype and _under_autocast(dest) else source


def _write(name: str, dest: Tensor, source: Tensor, ranges: Any) -> Any:
    return calls[name](*_write_arguments(dest, _as_written(dest, source), ranges))


def _write_arguments(dest: Tensor, source: Tensor, ranges: Any) -> tuple[Any, ...]:
    pairs = _ranges(ranges, tuple(dest.shape))
    start, end = zip(*pairs, strict=True) if pairs else ((), ())
    return dest, source, start, end


_write_slice, _write_slice_ = (
    direct(name, functools.partial(_write, name), _write_arguments) for name in ("write_slice", "write_slice_")
)


def write_slice(dest: Tensor, source: Tensor, ranges: Any) -> Tensor:
    """A copy of `dest` with ``[ranges] = source``, with gradients to both.

    Args:
        dest: any tensor.
        source: of the window's shape and of `dest`'s dtype, which autocast gives it.
        ranges: for each axis a ``(start, end)`` or a slice, as :func:`baracuda.write_slice` takes them.

    >>> import torch, baracuda.torch as bt
    >>> bt.write_slice(torch.zeros(4), torch.ones(2), (1, 3)).tolist()
    [0.0, 1.0, 1.0, 0.0]
    """
    call = functools.partial(_write, "write_slice") if compiling() else _write_slice
    result: Tensor = call(dest, source, ranges)
    return result


def write_slice_(dest: Tensor, source: Tensor, ranges: Any) -> Tensor:
    """``dest[ranges] = source`` in place, without gradients. Returns `dest`; arguments are those of `write_slice`.

    >>> import torch, baracuda.torch as bt
    >>> x = torch.zeros(4)
    >>> bt.write_slice_(x, torch.ones(2), (1, 3)) is x
    True
    """
    call = functools.partial(_write, "write_slice_") if compiling() else _write_slice_
    call(dest, source, ranges)
    return dest


def _update(name: str, dest: Tensor, source: Tensor, starts: Tensor, bounds: str) -> Any:
    return calls[name](dest, _as_written(dest, source), starts, bounds)


_update_slice, _update_slice_ = (
    direct(name, functools.partial(_update, name), lambda *arguments: arguments)
    for name in ("dynamic_update_slice", "dynamic_update_slice_")
)


def dynamic_update_slice(
    dest: Tensor, source: Tensor, starts: Tensor, *, bounds: Literal["drop", "clamp"] = "drop"
) -> Tensor:
    """A copy of `dest` with `source` at starts that are read on the device, with gradients to both.

    Args:
        dest: any tensor.
        source: of the rank and dtype of `dest`, which autocast gives it.
        starts: int32 or int64, [rank], or [leading extent, rank] for starts of each entry's own.
        bounds: ``"drop"`` elements that would fall outside, or ``"clamp"`` the start.

    >>> import torch, baracuda.torch as bt
    >>> bt.dynamic_update_slice(torch.zeros(4), torch.ones(2), torch.tensor([3])).tolist()
    [0.0, 0.0, 0.0, 1.0]
    """
    call = functools.partial(_update, "dynamic_update_slice") if compiling() else _update_slice
    result: Tensor = call(dest, source, starts, bounds)
    return result


def dynamic_update_slice_(
    dest: Tensor, source: Tensor, starts: Tensor, *, bounds: Literal["drop", "clamp"] = "drop"
) -> Tensor:
    """:func:`dynamic_update_slice` in place, without gradients. Returns `dest`.

    >>> import torch, baracuda.torch as bt
    >>> bt.dynamic_update_slice_(torch.zeros(4), torch.ones(2), torch.tensor([3]), bounds="clamp").tolist()
    [0.0, 0.0, 1.0, 1.0]
    """
    call = functools.partial(_update, "dynamic_update_slice_") if compiling() else _update_slice_
    call(dest, source, starts, bounds)
    return dest


def kv_cache_append_(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Appends the keys and values of tokens to a paged cache, in place; see :class:`baracuda.KvCacheAppendPlan`.

    Args:
        key, value: [tokens, heads, dim].
        key_cache, value_cache: [blocks, block_size, heads, dim].
        slot_mapping: [tokens], int32 or int64; a slot that is outside skips its token.
        key_scale, value_scale: float32, [1]; where the caches are float8 and the tokens aren't.

    >>> import torch, baracuda.torch as bt
    >>> caches = torch.zeros(2, 1, 4, 1, 1)
    >>> bt.kv_cache_append_(torch.ones(1, 1, 1), torch.ones(1, 1, 1), *caches, torch.tensor([2]))
    >>> caches[0].flatten().tolist()
    [0.0, 0.0, 1.0, 0.0]
    """
    calls["kv_cache_append_"](key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)


def kv_cache_gather(
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    dtype: torch.dtype | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Reads keys and values back from a paged cache; see :class:`baracuda.KvCacheGatherPlan`.

    Args:
        key_cache, value_cache: [blocks, block_size, heads, dim].
        slot_mapping: [tokens]; a slot that is outside gives zeros.
        dtype: of the result; None is the caches'.
        key_scale, value_scale: as in :func:`kv_cache_append_`.

    >>> import torch, baracuda.torch as bt
    >>> cache = torch.arange(4.0).reshape(1, 4, 1, 1)
    >>> bt.kv_cache_gather(cache, cache, torch.tensor([3, 1]))[0].flatten().tolist()
    [3.0, 1.0]
    """
    name = NAMES[key_cache.dtype if dtype is None else dtype]
    result: tuple[Tensor, Tensor] = calls["kv_cache_gather"](
        key_cache, value_cache, slot_mapping, key_scale, value_scale, name
    )
    return result
