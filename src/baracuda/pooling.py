# SPDX-License-Identifier: Apache-2.0
"""Fractional max pooling in two and three dimensions, forward and backward."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from baracuda import _core
from baracuda._arguments import integer, integers, per_axis, several
from baracuda._base import Descriptor, Plan, cached_plan
from baracuda._outputs import new_output, returned, scalar_operand
from baracuda.errors import InvalidProblemError
from baracuda.plan import PlanPreference

__all__ = [
    "FractionalMaxPool2dBackwardDescriptor",
    "FractionalMaxPool2dBackwardPlan",
    "FractionalMaxPool2dDescriptor",
    "FractionalMaxPool2dPlan",
    "FractionalMaxPool3dBackwardDescriptor",
    "FractionalMaxPool3dBackwardPlan",
    "FractionalMaxPool3dDescriptor",
    "FractionalMaxPool3dPlan",
    "fractional_max_pool2d",
    "fractional_max_pool2d_backward",
    "fractional_max_pool3d",
    "fractional_max_pool3d_backward",
]

Placement = Literal["even", "torch"]
IndexBase = Literal["tensor", "plane"]


@dataclass(frozen=True, kw_only=True)
class FractionalMaxPool2dDescriptor(Descriptor, operator="fractional_max_pool2d"):
    """The problem of :class:`FractionalMaxPool2dPlan`. Extents are at least 1.

    Attributes:
        batch: N.
        channels: C.
        h_in: H, the height of the input.
        w_in: W, its width.
        window_h: height of a window, at most H.
        window_w: width of a window, at most W.
        h_out: oH, the height of the output.
        w_out: oW, its width.
        dtype: float16, bfloat16, float32 or float64.
        placement: ``"even"`` or ``"torch"``, see :class:`FractionalMaxPool2dPlan`.
        index_base: indices are positions in the whole ``"tensor"`` or within a ``"plane"`` (H·W).
        index_dtype: int64 or int32; None: the plan writes no indices.
        samples: samples are an operand; else they are generated from `seed` and the operand ``offset``.
        seed: the generator's key.
        samples_dtype: float32 (None is the same), or float64 where `dtype` is that.
    """

    batch: int
    channels: int
    h_in: int
    w_in: int
    window_h: int
    window_w: int
    h_out: int
    w_out: int
    dtype: Any
    placement: Placement = "even"
    index_base: IndexBase = "tensor"
    index_dtype: Any = "int64"
    samples: bool = True
    seed: int = 0
    samples_dtype: Any = None


@dataclass(frozen=True, kw_only=True)
class FractionalMaxPool3dDescriptor(Descriptor, operator="fractional_max_pool3d"):
    """The problem of :class:`FractionalMaxPool3dPlan`. Extents are at least 1.

    Attributes:
        batch: N.
        channels: C.
        d_in: D, the depth of the input.
        h_in: H, its height.
        w_in: W, its width.
        window_d: depth of a window, at most D.
        window_h: height of a window, at most H.
        window_w: width of a window, at most W.
        d_out: oD, the depth of the output.
        h_out: oH, its height.
        w_out: oW, its width.
        dtype: float16, bfloat16, float32 or float64.
        placement: ``"even"`` or ``"torch"``, see :class:`FractionalMaxPool2dPlan`.
        index_base: indices are positions in the whole ``"tensor"`` or within a ``"plane"`` (D·H·W).
        index_dtype: int64 or int32; None: the plan writes no indices.
        samples: samples are an operand; else they are generated from `seed` and the operand ``offset``.
        seed: the generator's key.
        samples_dtype: float32 (None is the same), or float64 where `dtype` is that.
    """

    batch: int
    channels: int
    d_in: int
    h_in: int
    w_in: int
    window_d: int
    window_h: int
    window_w: int
    d_out: int
    h_out: int
    w_out: int
    dtype: Any
    placement: Placement = "even"
    index_base: IndexBase = "tensor"
    index_dtype: Any = "int64"
    samples: bool = True
    seed: int = 0
    samples_dtype: Any = None


@dataclass(frozen=True, kw_only=True)
class FractionalMaxPool2dBackwardDescriptor(Descriptor, operator="fractional_max_pool2d_backward"):
    """The problem of :class:`FractionalMaxPool2dBackwardPlan`. Extents are at least 1.

    Attributes:
        batch: N.
        channels: C.
        h_in: H, the height of the input.
        w_in: W, its width.
        window_h: height of a window, at most H.
        window_w: width of a window, at most W.
        h_out: oH, the height of the output.
        w_out: oW, its width.
        dtype: float16, bfloat16, float32 or float64.
        placement: ``"even"`` or ``"torch"``, the forward's.
        index_base: indices are positions in the whole ``"tensor"`` or within a ``"plane"`` (H·W).
        index_dtype: int64 or int32.
        accumulate: add to ``dx`` instead of overwriting it.
    """

    batch: int
    channels: int
    h_in: int
    w_in: int
    window_h: int
    window_w: int
    h_out: int
    w_out: int
    dtype: Any
    placement: Placement = "even"
    index_base: IndexBase = "tensor"
    index_dtype: Any = "int64"
    accumulate: bool = False


@dataclass(frozen=True, kw_only=True)
class FractionalMaxPool3dBackwardDescriptor(Descriptor, operator="fractional_max_pool3d_backward"):
    """The problem of :class:`FractionalMaxPool3dBackwardPlan`. Extents are at least 1.

    Attributes:
        batch: N.
        channels: C.
        d_in: D, the depth of the input.
        h_in: H, its height.
        w_in: W, its width.
        window_d: depth of a window, at most D.
        window_h: height of a window, at most H.
        window_w: width of a window, at most W.
        d_out: oD, the depth of the output.
        h_out: oH, its height.
        w_out: oW, its width.
        dtype: float16, bfloat16, float32 or float64.
        placement: ``"even"`` or ``"torch"``, the forward's.
        index_base: indices are positions in the whole ``"tensor"`` or within a ``"plane"`` (D·H·W).
        index_dtype: int64 or int32.
        accumulate: add to ``dx`` instead of overwriting it.
    """

    batch: int
    channels: int
    d_in: int
    h_in: int
    w_in: int
    window_d: int
    window_h: int
    window_w: int
    d_out: int
    h_out: int
    w_out: int
    dtype: Any
    placement: Placement = "even"
    index_base: IndexBase = "tensor"
    index_dtype: Any = "int64"
    accumulate: bool = False


class FractionalMaxPool2dPlan(Plan):
    """Max pooling with windows spread over the input, so that any output size fits.

    Operands of ``run``:
        x (in): [N, C, H, W], any strides.
        random_samples (in): [N, C, 2], in [0, 1); of each plane, one for each axis. Samples outside count
            as the nearest number inside, NaN as 0. With ``samples=False`` there is instead
        offset (in): int64 [1]. Plane p = n·C + c takes the words of Philox 4x32-10 with the key `seed` and
            the counter (offset, p), 64 bits each; sample a is ``(word[a] >> 8) * 2**-24``.
        y (out): [N, C, oH, oW].
        indices (out): [N, C, oH, oW], row-major positions of the maxima, whatever x's strides.

    ``placement="even"``: of n cells, o windows of k cells start at ``floor(i * (n - k) / (o - 1) + u)``, one
    window alone at ``floor(u * (n - k))``, none beyond n - k; the samples' order is (H, W). o may be
    larger than n. ``placement="torch"`` is PyTorch's rule, ``int((i + u) * a) - int(u * a)`` with
    ``a = (n - k) / (o - 1)`` and the last window at n - k; the order is (W, H), and o + k - 1 is at most n.
    Both are computed in float32, for float64 tensors in float64; CPU and CUDA agree on every bit.

    The first maximum wins. A NaN beats any number: the first NaN of the window, under
    ``placement="torch"`` the last. Values are copied bit for bit.

    >>> import numpy as np, baracuda as bc
    >>> plan = bc.FractionalMaxPool2dPlan(
    ...     batch=1, channels=1, h_in=4, w_in=4, window_h=2, window_w=2, h_out=2, w_out=3,
    ...     dtype="float32", device="cpu")
    >>> x = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)
    >>> y, indices = np.empty((1, 1, 2, 3), np.float32), np.empty((1, 1, 2, 3), np.int64)
    >>> plan.run(x=x, random_samples=np.full((1, 1, 2), 0.5, np.float32), y=y, indices=indices)
    >>> y[0, 0].tolist()
    [[5.0, 6.0, 7.0], [13.0, 14.0, 15.0]]
    """

    Descriptor: ClassVar[type[Any]] = FractionalMaxPool2dDescriptor


class FractionalMaxPool3dPlan(Plan):
    """:class:`FractionalMaxPool2dPlan` in three dimensions.

    Operands of ``run``:
        x (in): [N, C, D, H, W], any strides.
        random_samples (in): [N, C, 3], in the order (D, H, W) under either placement; or, with
            ``samples=False``,
        offset (in): int64 [1].
        y (out): [N, C, oD, oH, oW].
        indices (out): [N, C, oD, oH, oW].

    ``placement="torch"`` takes o + k - 1 < n.

    >>> import numpy as np, baracuda as bc
    >>> plan = bc.FractionalMaxPool3dPlan(
    ...     batch=1, channels=1, d_in=2, h_in=2, w_in=4, window_d=2, window_h=1, window_w=2, d_out=1, h_out=2,
    ...     w_out=2, dtype="float32", index_dtype=None, device="cpu")
    >>> x = np.arange(16, dtype=np.float32).reshape(1, 1, 2, 2, 4)
    >>> y = np.empty((1, 1, 1, 2, 2), np.float32)
    >>> plan.run(x=x, random_samples=np.zeros((1, 1, 3), np.float32), y=y)
    >>> y[0, 0, 0].tolist()
    [[9.0, 11.0], [13.0, 15.0]]
    """

    Descriptor: ClassVar[type[Any]] = FractionalMaxPool3dDescriptor


class FractionalMaxPool2dBackwardPlan(Plan):
    """The gradient of :class:`FractionalMaxPool2dPlan` from the indices alone.

    Operands of ``run``:
        dy (in): [N, C, oH, oW].
        indices (in): [N, C, oH, oW], as the forward wrote them.
        dx (out, with ``accumulate`` inout): [N, C, H, W]; all of it is written.

    A cell gets the sum of dy over the outputs whose index names it, in the order of the outputs, in float32
    (float64 for float64), rounded once. No atomics: the same bits in every run, on the CPU and on CUDA.
    An index that no window of its output could hold, whatever the sample, adds nothing.

    >>> import numpy as np, baracuda as bc
    >>> plan = bc.FractionalMaxPool2dBackwardPlan(
    ...     batch=1, channels=1, h_in=1, w_in=5, window_h=1, window_w=2, h_out=1, w_out=3, dtype="float32",
    ...     device="cpu")
    >>> dx = np.empty((1, 1, 1, 5), np.float32)
    >>> dy, indices = np.array([[[[1, 2, 4]]]], np.float32), np.array([[[[0, 2, 4]]]])
    >>> plan.run(dy=dy, indices=indices, dx=dx)
    >>> dx[0, 0, 0].tolist()
    [1.0, 0.0, 2.0, 0.0, 4.0]
    """

    Descriptor: ClassVar[type[Any]] = FractionalMaxPool2dBackwardDescriptor


class FractionalMaxPool3dBackwardPlan(Plan):
    """:class:`FractionalMaxPool2dBackwardPlan` in three dimensions.

    Operands of ``run``:
        dy (in): [N, C, oD, oH, oW].
        indices (in): [N, C, oD, oH, oW].
        dx (out, with ``accumulate`` inout): [N, C, D, H, W].

    >>> import numpy as np, baracuda as bc
    >>> plan = bc.FractionalMaxPool3dBackwardPlan(
    ...     batch=1, channels=1, d_in=2, h_in=1, w_in=2, window_d=2, window_h=1, window_w=1, d_out=1, h_out=1,
    ...     w_out=2, dtype="float32", device="cpu")
    >>> dx = np.empty((1, 1, 2, 1, 2), np.float32)
    >>> dy, indices = np.array([[[[[1, 2]]]]], np.float32), np.array([[[[[2, 1]]]]])
    >>> plan.run(dy=dy, indices=indices, dx=dx)
    >>> dx.reshape(2, 2).tolist()
    [[0.0, 2.0], [1.0, 0.0]]
    """

    Descriptor: ClassVar[type[Any]] = FractionalMaxPool3dBackwardDescriptor


def fractional_max_pool2d(
    x: Any,
    kernel_size: int | Sequence[int],
    output_size: int | Sequence[int] | None = None,
    output_ratio: float | Sequence[float] | None = None,
    return_indices: bool = False,
    *,
    random_samples: Any = None,
    seed: int | None = None,
    offset: Any = 0,
    placement: Placement = "even",
    index_base: IndexBase = "tensor",
    index_dtype: Any = "int64",
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """Fractional max pooling; see :class:`FractionalMaxPool2dPlan`.

    Args:
        x: [N, C, H, W] or [C, H, W].
        kernel_size: the window, one number or (height, width).
        output_size: (oH, oW) or one number for both; or else
        output_ratio: the output's part of the input, in (0, 1), one number or two; ``int(n * ratio)`` outputs.
        return_indices: return ``(y, indices)``.
        random_samples: [N, C, 2], for unbatched input also [C, 2]; of more batch entries than N the first
            N count. Or else
        seed: the seed of the generator. One of the two must be given.
        offset: the generator's offset, a number or an int64 tensor of one element on the device of `x`.
        placement: ``"even"`` or ``"torch"``.
        index_base: ``"tensor"`` or ``"plane"``.
        index_dtype: int64 or int32.
        out: where to write: y, or (y, indices).
        stream: see :meth:`baracuda.Plan.run`.
        preference: what the selection of the kernel must keep to.

    Returns:
        y or (y, indices), of the kind of `x`.

    Raises:
        InvalidProblemError: a size, ratio or shape can't be right, or there are neither samples nor a seed.

    >>> import numpy as np, baracuda as bc
    >>> x = np.arange(36, dtype=np.float32).reshape(1, 1, 6, 6)
    >>> bc.fractional_max_pool2d(x, 2, output_size=3, seed=1).shape
    (1, 1, 3, 3)
    """
    return _forward(FractionalMaxPool2dPlan, ("h", "w"), x, kernel_size, output_size, output_ratio,
                    return_indices, random_samples, seed, offset, placement, index_base, index_dtype, out,
                    stream, preference)  # fmt: skip


def fractional_max_pool3d(
    x: Any,
    kernel_size: int | Sequence[int],
    output_size: int | Sequence[int] | None = None,
    output_ratio: float | Sequence[float] | None = None,
    return_indices: bool = False,
    *,
    random_samples: Any = None,
    seed: int | None = None,
    offset: Any = 0,
    placement: Placement = "even",
    index_base: IndexBase = "tensor",
    index_dtype: Any = "int64",
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """:func:`fractional_max_pool2d` for x [N, C, D, H, W] or [C, D, H, W] and samples [N, C, 3].

    >>> import numpy as np, baracuda as bc
    >>> x = np.zeros((1, 2, 6, 6, 6), np.float32)
    >>> bc.fractional_max_pool3d(x, 2, output_ratio=0.5, seed=1).shape
    (1, 2, 3, 3, 3)
    """
    return _forward(FractionalMaxPool3dPlan, ("d", "h", "w"), x, kernel_size, output_size, output_ratio,
                    return_indices, random_samples, seed, offset, placement, index_base, index_dtype, out,
                    stream, preference)  # fmt: skip


def fractional_max_pool2d_backward(
    dy: Any,
    indices: Any,
    input_shape: Sequence[int],
    kernel_size: int | Sequence[int],
    *,
    placement: Placement = "even",
    index_base: IndexBase = "tensor",
    accumulate: bool = False,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The gradient of :func:`fractional_max_pool2d` with respect to x.

    Args:
        dy: [N, C, oH, oW] or [C, oH, oW].
        indices: what the forward returned; int64 or int32.
        input_shape: of x, with or without N as `dy` is.
        kernel_size: the forward's.
        placement: the forward's.
        index_base: the forward's.
        accumulate: add to `out` instead of overwriting it.
        out: where to write dx.
        stream: see :meth:`baracuda.Plan.run`.
        preference: what the selection of the kernel must keep to.

    Returns:
        dx, of the kind of `dy`.

    >>> import numpy as np, baracuda as bc
    >>> x = np.arange(36, dtype=np.float32).reshape(1, 1, 6, 6)
    >>> y, indices = bc.fractional_max_pool2d(x, 2, output_size=3, seed=1, return_indices=True)
    >>> float(bc.fractional_max_pool2d_backward(np.ones_like(y), indices, x.shape, 2).sum())
    9.0
    """
    return _backward(FractionalMaxPool2dBackwardPlan, ("h", "w"), dy, indices, input_shape, kernel_size, placement,
                     index_base, accumulate, out, stream, preference)  # fmt: skip


def fractional_max_pool3d_backward(
    dy: Any,
    indices: Any,
    input_shape: Sequence[int],
    kernel_size: int | Sequence[int],
    *,
    placement: Placement = "even",
    index_base: IndexBase = "tensor",
    accumulate: bool = False,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """:func:`fractional_max_pool2d_backward` in three dimensions."""
    return _backward(FractionalMaxPool3dBackwardPlan, ("d", "h", "w"), dy, indices, input_shape, kernel_size,
                     placement, index_base, accumulate, out, stream, preference)  # fmt: skip


def _forward(
    plan_class: type[Plan],
    axes: tuple[str, ...],
    x: Any,
    kernel_size: Any,
    output_size: Any,
    output_ratio: Any,
    return_indices: bool,
    random_samples: Any,
    seed: int | None,
    offset: Any,
    placement: Placement,
    index_base: IndexBase,
    index_dtype: Any,
    out: Any,
    stream: Any,
    preference: PlanPreference | None,
) -> Any:
    rank = len(axes)
    where = f"fractional_max_pool{rank}d"
    shape, dtype, device = _core.describe(x, f"{where}: x")
    batch = _leading(shape, axes, f"{where}: x")
    if (output_size is None) == (output_ratio is None):
        raise InvalidProblemError(f"{where}: expected one of output_size and output_ratio")
    if output_size is not None:
        outputs = per_axis(output_size, rank, f"{where}: output_size")
    else:
        ratios = per_axis(output_ratio, rank, f"{where}: output_ratio", _ratio)
        outputs = tuple(int(extent * ratio) for extent, ratio in zip(shape[-rank:], ratios, strict=True))
    if random_samples is None and seed is None:
        raise InvalidProblemError(f"{where}: expected random_samples or a seed; there is no default")
    if random_samples is not None and seed is not None:
        raise InvalidProblemError(f"{where}: random_samples and seed: expected one of them, got both")

    samples_dtype = None
    if random_samples is not None:
        random_samples, samples_dtype = _samples(random_samples, (*batch, rank), len(shape) == rank + 1, dtype, where)
    plan = cached_plan(
        plan_class,
        device,
        preference,
        batch=batch[0],
        channels=batch[1],
        **{f"{axis}_in": extent for axis, extent in zip(axes, shape[-rank:], strict=True)},
        **_windows(axes, kernel_size, where),
        **{f"{axis}_out": extent for axis, extent in zip(axes, outputs, strict=True)},
        dtype=dtype,
        placement=placement,
        index_base=index_base,
        index_dtype=index_dtype if return_indices else None,
        samples=seed is None,
        seed=0 if seed is None else integer(seed, f"{where}: seed"),
        samples_dtype=samples_dtype,
    )
    out_shape = (*shape[:-rank], *outputs)
    if out is None:
        y = new_output(x, out_shape, dtype, device, stream)
        indices = new_output(x, out_shape, _dtype_of(plan, "indices"), device, stream) if return_indices else None
    elif return_indices:
        y, indices = several(out, ("y", "indices"), where)
    else:
        y, indices = out, None
    operands = {"y": _with_batch(y, rank)}
    if return_indices:
        operands["indices"] = _with_batch(indices, rank)
    if seed is None:
        operands["random_samples"] = random_samples
    elif isinstance(offset, numbers.Integral):
        operands["offset"] = scalar_operand(x, int(offset), device, stream)
    else:
        operands["offset"] = offset
    plan.run(x=_with_batch(x, rank), stream=stream, **operands)
    if not return_indices:
        return returned(y, x)
    return returned(y, x), returned(indices, x)


def _backward(
    plan_class: type[Plan],
    axes: tuple[str, ...],
    dy: Any,
    indices: Any,
    input_shape: Sequence[int],
    kernel_size: Any,
    placement: Placement,
    index_base: IndexBase,
    accumulate: bool,
    out: Any,
    stream: Any,
    preference: PlanPreference | None,
) -> Any:
    rank = len(axes)
    where = f"fractional_max_pool{rank}d_backward"
    shape, dtype, device = _core.describe(dy, f"{where}: dy")
    batch = _leading(shape, axes, f"{where}: dy")
    index_shape, index_dtype, _ = _core.describe(indices, f"{where}: indices")
    if index_shape != shape:
        raise InvalidProblemError(f"{where}: indices: expected shape {shape}, got {index_shape}")
    input_shape = integers(input_shape, f"{where}: input_shape")
    if len(input_shape) != len(shape) or input_shape[:-rank] != shape[:-rank]:
        raise InvalidProblemError(
            f"{where}: input_shape: expected {(*shape[:-rank], *axes)} for dy of shape {shape}, got {input_shape}"
        )
    if accumulate and out is None:
        raise InvalidProblemError(f"{where}: accumulate: expected out, to add to")
    plan = cached_plan(
        plan_class,
        device,
        preference,
        batch=batch[0],
        channels=batch[1],
        **{f"{axis}_in": extent for axis, extent in zip(axes, input_shape[-rank:], strict=True)},
        **_windows(axes, kernel_size, where),
        **{f"{axis}_out": extent for axis, extent in zip(axes, shape[-rank:], strict=True)},
        dtype=dtype,
        placement=placement,
        index_base=index_base,
        index_dtype=index_dtype,
        accumulate=accumulate,
    )
    dx = new_output(dy, input_shape, dtype, device, stream) if out is None else out
    plan.run(dy=_with_batch(dy, rank), indices=_with_batch(indices, rank), dx=_with_batch(dx, rank), stream=stream)
    return returned(dx, dy)


def _dtype_of(plan: Plan, name: str) -> str:
    return next(operand.dtype for operand in plan.operands if operand.name == name)


def _leading(shape: tuple[int, ...], axes: tuple[str, ...], where: str) -> tuple[int, int]:
    """(N, C), N being 1 for unbatched shapes."""
    if len(shape) not in (len(axes) + 1, len(axes) + 2):
        raise InvalidProblemError(f"{where}: expected shape ([n,] c, {', '.join(axes)}), got {shape}")
    return (1, shape[0]) if len(shape) == len(axes) + 1 else (shape[0], shape[1])


def _ratio(value: Any, where: str) -> float:
    ratio = float(value)
    if not 0 < ratio < 1:
        raise InvalidProblemError(f"{where}: expected numbers between 0 and 1, got {ratio}")
    return ratio


def _windows(axes: tuple[str, ...], kernel_size: Any, where: str) -> dict[str, int]:
    windows = per_axis(kernel_size, len(axes), f"{where}: kernel_size")
    return {f"window_{axis}": window for axis, window in zip(axes, windows, strict=True)}


def _samples(samples: Any, expected: tuple[int, ...], unbatched: bool, dtype: str, where: str) -> tuple[Any, str]:
    """Samples of the plan's shape, in a dtype that it takes."""
    where = f"{where}: random_samples"
    shape, given, _ = _core.describe(samples, where)
    if unbatched and len(shape) == 2:
        samples = samples.reshape((1, *shape))
        shape = (1, *shape)
    if len(shape) != 3 or shape[1:] != expected[1:] or shape[0] < expected[0]:
        raise InvalidProblemError(f"{where}: expected shape {expected}, got {shape}")
    if shape[0] > expected[0]:
        samples = samples[: expected[0]]
    allowed = ("float32", "float64") if dtype == "float64" else ("float32",)
    if given in allowed:
        return samples, given
    if given not in ("float16", "bfloat16", "float64"):
        raise InvalidProblemError(f"{where}: expected dtype {' or '.join(allowed)}, got {given}")
    convert = getattr(samples, "astype", None)
    if convert is not None:
        return convert("float32"), "float32"
    return samples.float(), "float32"


def _with_batch(tensor: Any, rank: int) -> Any:
    """A view with a batch axis; a tensor that can't be reshaped is passed on for the plan's sentence."""
    shape = getattr(tensor, "shape", None)
    if shape is None or len(shape) != rank + 1 or isinstance(tensor, _core.Tensor):
        return tensor
    return tensor[None]
