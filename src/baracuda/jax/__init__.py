# SPDX-License-Identifier: Apache-2.0
"""The operators for JAX: under ``jax.jit``, ``jax.grad`` and ``jax.vmap``, on the CPU and on CUDA.

Importing this module needs JAX, and a build of the library with the handler for XLA, which wheels have. All
functions are pure: what writes in place elsewhere returns what was written, and XLA reuses a donated buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from baracuda._arguments import segments_of_offsets
from baracuda.errors import InvalidProblemError
from baracuda.jax._bind import call, register
from baracuda.layout import _ranges

__all__ = [
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "dynamic_update_slice",
    "fractional_max_pool2d",
    "fractional_max_pool3d",
    "kv_cache_append",
    "kv_cache_gather",
    "linear_recurrence",
    "logcumsumexp",
    "nms",
    "roi_align",
    "roi_pool",
    "segment_max",
    "segment_mean",
    "segment_min",
    "segment_prod",
    "segment_sum",
    "write_slice",
]

register()


def _index_dtype() -> str:
    return str(np.dtype(jnp.zeros((), int).dtype))


# ---------------------------------------------------------------------------------------------------
# Scans.


def _sum(kind: str, x: Any, axis: int, dtype: Any, reverse: bool, exclusive: bool) -> jax.Array:
    x = jnp.asarray(x)
    if dtype is None:
        dtype = _index_dtype() if x.dtype == bool else x.dtype
    result: jax.Array = call(kind, x, axis=axis, reverse=reverse, exclusive=exclusive, out_dtype=np.dtype(dtype).name)[
        0
    ]
    return result


def cumsum(x: Any, axis: int = -1, *, dtype: Any = None, reverse: bool = False, exclusive: bool = False) -> jax.Array:
    """Sums of each element and those before it along an axis.

    Args:
        x: any array with at least one axis.
        axis: the axis; negative ones count from the last.
        dtype: of the result: float32 for 16-bit floats, an integer dtype for integers; None is that of `x`.
        reverse: from the last element to the first.
        exclusive: each element is left out of its own sum.

    >>> import jax, jax.numpy as jnp, baracuda.jax as bj
    >>> jax.jit(bj.cumsum)(jnp.array([1.0, 2.0, 3.0])).tolist()
    [1.0, 3.0, 6.0]
    """
    return _sum("cumsum", x, axis, dtype, reverse, exclusive)


def cumprod(x: Any, axis: int = -1, *, dtype: Any = None, reverse: bool = False, exclusive: bool = False) -> jax.Array:
    """Products along an axis; the gradient is exact with any number of zeros. Arguments are those of `cumsum`.

    >>> import jax, jax.numpy as jnp, baracuda.jax as bj
    >>> jax.grad(lambda x: bj.cumprod(x).sum())(jnp.array([2.0, 0.0, 3.0])).tolist()
    [1.0, 8.0, 0.0]
    """
    return _sum("cumprod", x, axis, dtype, reverse, exclusive)


def logcumsumexp(x: Any, axis: int = -1, *, reverse: bool = False, exclusive: bool = False) -> jax.Array:
    """Logarithms of the sums of exponentials along an axis. Arguments are those of :func:`cumsum`.

    >>> import jax.numpy as jnp, baracuda.jax as bj
    >>> [round(y, 3) for y in bj.logcumsumexp(jnp.array([1000.0, 1000.0])).tolist()]
    [1000.0, 1000.693]
    """
    result: jax.Array = call("logcumsumexp", x, axis=axis, reverse=reverse, exclusive=exclusive)[0]
    return result


def _extremes(kind: str, x: Any, axis: int, reverse: bool, exclusive: bool, indices: bool, ties: str) -> Any:
    direction = {"axis": axis, "reverse": reverse, "exclusive": exclusive}
    if indices:
        return call(f"{kind}_with_indices", x, **direction, ties=ties, index_dtype=_index_dtype())
    return call(kind, x, **direction)[0]


def cummax(
    x: Any,
    axis: int = -1,
    *,
    reverse: bool = False,
    exclusive: bool = False,
    indices: bool = False,
    ties: Literal["first", "last"] = "first",
) -> Any:
    """The largest of each element and those before it along an axis; a NaN wins and stays.

    Args:
        x: any array with at least one axis.
        axis: the axis; negative ones count from the last.
        reverse: from the last element to the first.
        exclusive: each element is left out of its own maximum.
        indices: return ``(y, indices)``, where the indices are places along the axis.
        ties: which of equal maxima the index is of.

    >>> import jax.numpy as jnp, baracuda.jax as bj
    >>> y, where = bj.cummax(jnp.array([1.0, 3.0, 3.0, 2.0]), indices=True)
    >>> y.tolist(), where.tolist()
    ([1.0, 3.0, 3.0, 3.0], [0, 1, 1, 1])
    """
    return _extremes("cummax", x, axis, reverse, exclusive, indices, ties)


def cummin(
    x: Any,
    axis: int = -1,
    *,
    reverse: bool = False,
    exclusive: bool = False,
    indices: bool = False,
    ties: Literal["first", "last"] = "first",
) -> Any:
    """The smallest of each element and those before it along an axis. Arguments are those of :func:`cummax`.

    >>> import jax.numpy as jnp, baracuda.jax as bj
    >>> bj.cummin(jnp.array([3.0, 1.0, 2.0])).tolist()
    [3.0, 1.0, 1.0]
    """
    return _extremes("cummin", x, axis, reverse, exclusive, indices, ties)


def linear_recurrence(a: Any, b: Any, axis: int = -1, *, h0: Any = None, reverse: bool = False) -> jax.Array:
    """h_j = a_j h_{j-1} + b_j along an axis. It can be differentiated as often as you like.

    Args:
        a: the coefficients.
        b: of the shape and dtype of `a`.
        axis: the axis; negative ones count from the last.
        h0: what comes before the first element, of the shape without the axis; None is 0.
        reverse: h_j = a_j h_{j+1} + b_j.

    >>> import jax.numpy as jnp, baracuda.jax as bj
    >>> bj.linear_recurrence(jnp.array([2.0, 3.0, 5.0]), jnp.ones(3)).tolist()
    [1.0, 4.0, 21.0]
    """
    result: jax.Array = call("linear_recurrence", a, b, h0, axis=axis, reverse=reverse)[0]
    return result


# ---------------------------------------------------------------------------------------------------
# Segments.


def _segment(
    kind: str,
    data: Any,
    segment_ids: Any,
    num_segments: int | None,
    offsets: Any,
    is_sorted: bool,
    ties: str,
    empty_value: float | None,
    return_arg: bool = False,
) -> Any:
    where = f"segment_{kind}"
    if (segment_ids is None) == (offsets is None):
        raise InvalidProblemError(f"{where}: expected one of segment_ids and offsets")
    if offsets is not None:
        offsets = jnp.asarray(offsets)
        num_segments = segments_of_offsets(offsets.shape[0], num_segments, where)
    if num_segments is None:
        raise InvalidProblemError(f"{where}: num_segments: is missing; the shape of the result must be known")
    data = jnp.asarray(data)
    ids = "offsets" if offsets is not None else "sorted" if is_sorted else "unsorted"
    settings: dict[str, Any] = {"num_segments": num_segments, "ids": ids}
    # Of the two gradients of an extremum, the one that reads `arg` is several times faster.
    with_arg = return_arg or (kind in ("max", "min") and ties == "first")
    if not with_arg:
        settings["ties"] = ties
    columns = int(np.prod(data.shape[1:], dtype=np.int64))
    results = call(
        f"{where}_with_arg" if with_arg else where,
        data.reshape(data.shape[0], columns),
        segment_ids,
        offsets,
        **settings,
        empty_value=empty_value,
    )
    results = tuple(result.reshape(num_segments, *data.shape[1:]) for result in results)
    return results if return_arg else results[0]


def segment_sum(
    data: Any,
    segment_ids: Any = None,
    num_segments: int | None = None,
    *,
    offsets: Any = None,
    sorted: bool = False,  # noqa: A002
    empty_value: float | None = None,
) -> jax.Array:
    """The sum of the rows of each segment; see :class:`baracuda.SegmentReducePlan`.

    Args:
        data: [N, ...].
        segment_ids: [N]; rows whose id is outside 0 .. num_segments - 1 are dropped. Or
        offsets: [S + 1]: segment s has the rows ``offsets[s]`` to ``offsets[s + 1] - 1``.
        num_segments: S; with ids it must be given.
        sorted: a promise that ids never fall.
        empty_value: what empty segments hold; by default 0.

    >>> import jax.numpy as jnp, baracuda.jax as bj
    >>> bj.segment_sum(jnp.array([1.0, 2.0, 4.0]), jnp.array([0, 2, 2]), 3).tolist()
    [1.0, 0.0, 6.0]
    """
    result: jax.Array = _segment("sum", data, segment_ids, num_segments, offsets, sorted, "first", empty_value)
    return result


def segment_mean(
    data: Any,
    segment_ids: Any = None,
    num_segments: int | None = None,
    *,
    offsets: Any = None,
    sorted: bool = False,  # noqa: A002
    empty_value: float | None = None,
) -> jax.Array:
    """The mean of the rows of each segment, by default 0 where it is empty. See :func:`segment_sum`.

    >>> import jax.numpy as jnp, baracuda.jax as bj
    >>> bj.segment_mean(jnp.array([1.0, 2.0, 4.0]), jnp.array([0, 2, 2]), 3).tolist()
    [1.0, 0.0, 3.0]
    """
    result: jax.Array = _segment("mean", data, segment_ids, num_segments, offsets, sorted, "first", empty_value)
    return result


def segment_max(
    data: Any,
    segment_ids: Any = None,
    num_segments: int | None = None,
    *,
    offsets: Any = None,
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

    >>> import jax.numpy as jnp, baracuda.jax as bj
    >>> bj.segment_max(jnp.array([1.0, 2.0, 4.0]), jnp.array([0, 2, 2]), 3).tolist()
    [1.0, -inf, 4.0]
    """
    return _segment("max", data, segment_ids, num_segments, offsets, sorted, ties, empty_value, return_arg)


def segment_min(
    data: Any,
    segment_ids: Any = None,
    num_segments: int | None = None,
    *,
    offsets: Any = None,
    sorted: bool = False,  # noqa: A002
    empty_value: float | None = None,
    ties: Literal["first", "even"] = "first",
    return_arg: bool = False,
) -> Any:
    """The minimum of the rows of each segment; by default the dtype's highest value where it is empty.

    See :func:`segment_max`.

    >>> import jax.numpy as jnp, baracuda.jax as bj
    >>> bj.segment_min(jnp.array([1.0, 2.0, 4.0]), jnp.array([0, 2, 2]), 3).tolist()
    [1.0, inf, 2.0]
    """
    return _segment("min", data, segment_ids, num_segments, offsets, sorted, ties, empty_value, return_arg)


def segment_prod(
    data: Any,
    segment_ids: Any = None,
    num_segments: int | None = None,
    *,
    offsets: Any = None,
    sorted: bool = False,  # noqa: A002
    empty_value: float | None = None,
) -> jax.Array:
    """The product of the rows of each segment, by default 1 where it is empty. See :func:`segment_sum`.

    >>> import jax.numpy as jnp, baracuda.jax as bj
    >>> bj.segment_prod(jnp.array([1.0, 2.0, 4.0]), jnp.array([0, 2, 2]), 3).tolist()
    [1.0, 1.0, 8.0]
    """
    result: jax.Array = _segment("prod", data, segment_ids, num_segments, offsets, sorted, "first", empty_value)
    return result


# ---------------------------------------------------------------------------------------------------
# Pooling.


def _sizes(value: int | Sequence[int], rank: int) -> tuple[int, ...]:
    return (value,) * rank if isinstance(value, int) else tuple(value)


def _fractional(
    rank: int, x: Any, kernel_size: Any, output_size: Any, random_samples: Any, placement: str, return_indices: bool
) -> Any:
    x = jnp.asarray(x)
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    results = call(
        f"fractional_max_pool{rank}d",
        x,
        jnp.asarray(random_samples).astype(wide),
        kernel_size=_sizes(kernel_size, rank),
        output_size=_sizes(output_size, rank),
        placement=placement,
        index_base="plane",
        index_dtype=_index_dtype(),
    )
    return results if return_indices else results[0]


def fractional_max_pool2d(
    x: Any,
    kernel_size: int | Sequence[int],
    output_size: int | Sequence[int],
    random_samples: Any,
    *,
    placement: Literal["even", "torch"] = "even",
    return_indices: bool = False,
) -> Any:
    """Fractional max pooling; see :class:`baracuda.FractionalMaxPool2dPlan`.

    Args:
        x: [N, C, H, W].
        kernel_size: the window, one number or (height, width).
        output_size: (oH, oW) or one number for both.
        random_samples: [N, C, 2], from [0, 1), as ``jax.random.uniform`` gives them.
        placement: ``"even"`` or ``"torch"``.
        return_indices: return ``(y, indices)``, which are places in a plane of H·W cells.

    >>> import jax, jax.numpy as jnp, baracuda.jax as bj
    >>> samples = jax.random.uniform(jax.random.key(0), (1, 3, 2))
    >>> bj.fractional_max_pool2d(jnp.zeros((1, 3, 8, 8)), 2, 5, samples).shape
    (1, 3, 5, 5)
    """
    return _fractional(2, x, kernel_size, output_size, random_samples, placement, return_indices)


def fractional_max_pool3d(
    x: Any,
    kernel_size: int | Sequence[int],
    output_size: int | Sequence[int],
    random_samples: Any,
    *,
    placement: Literal["even", "torch"] = "even",
    return_indices: bool = False,
) -> Any:
    """:func:`fractional_max_pool2d` for x [N, C, D, H, W] and samples [N, C, 3].

    >>> import jax, jax.numpy as jnp, baracuda.jax as bj
    >>> samples = jax.random.uniform(jax.random.key(0), (1, 3, 3))
    >>> bj.fractional_max_pool3d(jnp.zeros((1, 3, 8, 8, 8)), 2, 5, samples).shape
    (1, 3, 5, 5, 5)
    """
    return _fractional(3, x, kernel_size, output_size, random_samples, placement, return_indices)


# ---------------------------------------------------------------------------------------------------
# Regions of images.


def _regions(boxes: Any) -> jax.Array:
    boxes = jnp.asarray(boxes)
    return boxes.astype(jnp.float32) if boxes.dtype.itemsize == 2 else boxes


def roi_align(
    input: Any,  # noqa: A002
    boxes: Any,
    output_size: int | Sequence[int],
    spatial_scale: float = 1.0,
    sampling_ratio: int = 0,
    aligned: bool = False,
) -> jax.Array:
    """RoI-align; see :class:`baracuda.RoiAlignPlan`.

    Args:
        input: [N, C, H, W].
        boxes: [R, 5], rows (batch, x1, y1, x2, y2). They get no gradient.
        output_size: (height, width) or one number for both.
        spatial_scale: boxes times this are in cells.
        sampling_ratio: samples of a bin along each axis; 0 and -1: adaptive.
        aligned: move boxes by half a cell.

    >>> import jax.numpy as jnp, baracuda.jax as bj
    >>> bj.roi_align(jnp.ones((1, 1, 8, 8)), jnp.array([[0.0, 0, 0, 4, 4]]), 2).tolist()
    [[[[1.0, 1.0], [1.0, 1.0]]]]
    """
    result: jax.Array = call(
        "roi_align",
        input,
        _regions(boxes),
        output_size=_sizes(output_size, 2),
        spatial_scale=float(spatial_scale),
        sampling_ratio=max(0, sampling_ratio),
        aligned=aligned,
    )[0]
    return result


def roi_pool(
    input: Any,  # noqa: A002
    boxes: Any,
    output_size: int | Sequence[int],
    spatial_scale: float = 1.0,
) -> jax.Array:
    """RoI-pooling; see :class:`baracuda.RoiPoolPlan` and :func:`roi_align`.

    >>> import jax.numpy as jnp, baracuda.jax as bj
    >>> x = jnp.arange(64.0).reshape(1, 1, 8, 8)
    >>> bj.roi_pool(x, jnp.array([[0.0, 0, 0, 3, 3]]), 2).tolist()
    [[[[9.0, 11.0], [25.0, 27.0]]]]
    """
    result: jax.Array = call(
        "roi_pool",
        input,
        _regions(boxes),
        output_size=_sizes(output_size, 2),
        spatial_scale=float(spatial_scale),
        index_dtype="int32",
    )[0]
    return result


def _int64() -> Any:
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64  # noqa: PLC0415  # where it was before JAX 0.8

    return enable_x64()


def nms(boxes: Any, scores: Any, iou_threshold: float, classes: Any = None) -> tuple[jax.Array, jax.Array]:
    """Non-maximum suppression; see :class:`baracuda.NmsPlan`.

    Args:
        boxes: [N, 4], rows (x1, y1, x2, y2).
        scores: [N].
        iou_threshold: the overlap, over the union, beyond which a box is suppressed.
        classes: [N]; boxes of different classes don't suppress each other.

    Returns:
        ``(keep, count)``: the numbers of the kept boxes in descending order of their scores, then -1; and how
        many those are. JAX's default integers.

    >>> import jax.numpy as jnp, baracuda.jax as bj
    >>> boxes = jnp.array([[0.0, 0, 9, 9], [0, 0, 10, 10], [20, 20, 30, 30]])
    >>> keep, count = bj.nms(boxes, jnp.array([0.3, 0.9, 0.5]), 0.5)
    >>> keep.tolist(), int(count)
    ([1, 2, -1], 2)
    """
    dtype = _index_dtype()
    arrays = [None if array is None else jnp.asarray(array) for array in (boxes, scores, classes)]
    # The plan counts in int64, whatever JAX's default is.
    with _int64():
        keep, count = call("nms_padded", *arrays, iou_threshold=float(iou_threshold))
        return keep.astype(dtype), count[0].astype(dtype)


# ---------------------------------------------------------------------------------------------------
# Writes.


def write_slice(dest: Any, source: Any, ranges: Any) -> jax.Array:
    """`dest` with ``[ranges] = source``, with gradients to both.

    Args:
        dest: any array.
        source: of the window's shape and of `dest`'s dtype.
        ranges: for each axis a ``(start, end)`` or a slice, as :func:`baracuda.write_slice` takes them.

    >>> import jax.numpy as jnp, baracuda.jax as bj
    >>> bj.write_slice(jnp.zeros(4), jnp.ones(2), (1, 3)).tolist()
    [0.0, 1.0, 1.0, 0.0]
    """
    dest = jnp.asarray(dest)
    pairs = _ranges(ranges, tuple(dest.shape))
    result: jax.Array = call(
        "write_slice", dest, source, start=tuple(pair[0] for pair in pairs), end=tuple(pair[1] for pair in pairs)
    )[0]
    return result


def dynamic_update_slice(
    dest: Any, source: Any, starts: Any, *, bounds: Literal["drop", "clamp"] = "clamp"
) -> jax.Array:
    """`dest` with `source` at starts that are read on the device, with gradients to both.

    Args:
        dest: any array.
        source: of the rank and dtype of `dest`.
        starts: integers, [rank], or [leading extent, rank] for starts of each entry's own.
        bounds: ``"clamp"`` the start, as ``jax.lax.dynamic_update_slice`` does, or ``"drop"`` elements that would
            fall outside. A negative start doesn't count from the back.

    >>> import jax.numpy as jnp, baracuda.jax as bj
    >>> bj.dynamic_update_slice(jnp.zeros(4), jnp.ones(2), jnp.array([3]), bounds="drop").tolist()
    [0.0, 0.0, 0.0, 1.0]
    """
    result: jax.Array = call("dynamic_update_slice", dest, source, starts, bounds=bounds)[0]
    return result


def kv_cache_append(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    *,
    key_scale: Any = None,
    value_scale: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """The caches with the keys and values of tokens appended; see :class:`baracuda.KvCacheAppendPlan`.

    Donate the caches to the jitted function (``donate_argnums``), and nothing but the tokens is written.

    Args:
        key, value: [tokens, heads, dim].
        key_cache, value_cache: [blocks, block_size, heads, dim].
        slot_mapping: [tokens]; a slot that is outside skips its token.
        key_scale, value_scale: float32, [1]; where the caches are float8 and the tokens aren't.

    >>> import jax.numpy as jnp, baracuda.jax as bj
    >>> cache, token = jnp.zeros((1, 4, 1, 1)), jnp.ones((1, 1, 1))
    >>> bj.kv_cache_append(token, token, cache, cache, jnp.array([2]))[0].ravel().tolist()
    [0.0, 0.0, 1.0, 0.0]
    """
    keys, values = call("kv_cache_append", key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)
    return keys, values


def kv_cache_gather(
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    *,
    dtype: Any = None,
    key_scale: Any = None,
    value_scale: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Reads keys and values back from a paged cache; see :class:`baracuda.KvCacheGatherPlan`.

    Args:
        key_cache, value_cache: [blocks, block_size, heads, dim].
        slot_mapping: [tokens]; a slot that is outside gives zeros.
        dtype: of the result; None is the caches'.
        key_scale, value_scale: as in :func:`kv_cache_append`.

    >>> import jax.numpy as jnp, baracuda.jax as bj
    >>> cache = jnp.arange(4.0).reshape(1, 4, 1, 1)
    >>> bj.kv_cache_gather(cache, cache, jnp.array([3, 1]))[0].ravel().tolist()
    [3.0, 1.0]
    """
    key_cache = jnp.asarray(key_cache)
    name = np.dtype(key_cache.dtype if dtype is None else dtype).name
    keys, values = call("kv_cache_gather", key_cache, value_cache, slot_mapping, key_scale, value_scale, dtype=name)
    return keys, values
