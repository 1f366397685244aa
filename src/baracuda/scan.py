# SPDX-License-Identifier: Apache-2.0
"""Prefix scans along one axis, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from baracuda import _core
from baracuda._base import Descriptor, Plan, cached_plan
from baracuda._outputs import new_output, returned
from baracuda.dtypes import canonical
from baracuda.errors import InvalidProblemError
from baracuda.plan import PlanPreference

__all__ = [
    "ScanBackwardDescriptor",
    "ScanBackwardPlan",
    "ScanDescriptor",
    "ScanPlan",
    "cummax",
    "cummax_backward",
    "cummin",
    "cummin_backward",
    "cumprod",
    "cumprod_backward",
    "cumsum",
    "cumsum_backward",
    "linear_recurrence",
    "linear_recurrence_backward",
    "logcumsumexp",
    "logcumsumexp_backward",
]

Kind = Literal["cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "linear_recurrence"]
Ties = Literal["first", "last"]


@dataclass(frozen=True, kw_only=True)
class ScanDescriptor(Descriptor, operator="scan"):
    """The problem of :class:`ScanPlan`.

    Attributes:
        kind: ``"cumsum"``, ``"cumprod"``, ``"cummax"``, ``"cummin"``, ``"logcumsumexp"`` or
            ``"linear_recurrence"``.
        shape: extents of the operands, rank 1 to 8.
        axis: the axis to scan along; negative ones count from the last.
        dtype: of the inputs: float16, bfloat16, float32, float64; for all kinds but logcumsumexp and
            linear_recurrence also bool, uint8 and int8 to int64.
        out_dtype: of ``y``, for cumsum and cumprod. None is int64 for integers and bool, else `dtype`.
            float16 and bfloat16 also give float32; integers also give their own dtype and int32, unless
            that is narrower.
        reverse: scan from the last element to the first.
        exclusive: leave each element out of its own output, so that the first output is the kind's
            identity. Not for linear_recurrence.
        indices: cummax and cummin also write where each extremum is.
        ties: which of equal extrema keeps the index, ``"first"`` or ``"last"``; +0 and -0 are equal.
        index_dtype: int32 or int64; None is int64.
        has_h0: a linear recurrence begins with a given value in each row instead of 0.
    """

    kind: Kind
    shape: Sequence[int]
    axis: int = -1
    dtype: Any
    out_dtype: Any = None
    reverse: bool = False
    exclusive: bool = False
    indices: bool = False
    ties: Ties = "first"
    index_dtype: Any = None
    has_h0: bool = False


class ScanPlan(Plan):
    """A prefix scan along one axis.

    ========================= ==============================================================
    kind                      y_j
    ========================= ==============================================================
    cumsum, cumprod           sum, product of x_0 ... x_j
    cummax, cummin            the largest, smallest of x_0 ... x_j; a NaN wins and stays
    logcumsumexp              log(exp(x_0) + ... + exp(x_j))
    linear_recurrence         h_j = a_j h_{j-1} + b_j
    ========================= ==============================================================

    With ``exclusive=True`` y_j leaves x_j out and y_0 is the identity: 0, 1, the dtype's lowest or highest
    value (infinities for floating dtypes) with index -1, or -infinity. With ``reverse=True`` the axis is
    walked from its end; nothing is subtracted from a total.

    Operands of ``run``, any strides:
        x (in), y (out): shape ``shape``.
        indices (out): shape ``shape``, with ``indices=True``.
        a, b (in), h (out): shape ``shape``, instead of x and y, for linear_recurrence.
        h0 (in): ``shape`` without ``axis``, with ``has_h0=True``.

    Precision: float16 and bfloat16 are computed in float32 and rounded once, at the store; float32 in
    float32, float64 in float64. Integers wrap around. The order in which elements are combined is fixed by the
    descriptor and the strides, so results have the same bits in every run.

    ``path`` tells which kernel takes row-major operands on a GPU: ``"rows"``,
    ``"long rows"`` or ``"columns"``.

    The scaled pairs of logcumsumexp and the composition of affine maps of linear_recurrence follow
    G. E. Blelloch, Prefix Sums and Their Applications, 1990.

    >>> import numpy as np, baracuda as bc
    >>> plan = bc.ScanPlan(kind="cumsum", shape=(2, 3), axis=1, dtype="float32", device="cpu")
    >>> x, y = np.array([[1, 2, 3], [4, 5, 6]], np.float32), np.empty((2, 3), np.float32)
    >>> plan.run(x=x, y=y)
    >>> y.tolist()
    [[1.0, 3.0, 6.0], [4.0, 9.0, 15.0]]
    """

    Descriptor: ClassVar[type[Any]] = ScanDescriptor


@dataclass(frozen=True, kw_only=True)
class ScanBackwardDescriptor(Descriptor, operator="scan_backward"):
    """The problem of :class:`ScanBackwardPlan`.

    Attributes:
        kind: as in :class:`ScanDescriptor`.
        shape: extents of the operands, rank 1 to 8.
        axis: the axis that was scanned.
        dtype: float16, bfloat16, float32 or float64.
        reverse: of the forward scan.
        exclusive: of the forward scan.
        saved: what tells a gradient of cummax or cummin where the extrema are: the outputs ``"y"``
            (the fastest, only with ``ties="first"``), the inputs ``"x"``, or the ``"indices"``.
        ties: of the forward scan.
        index_dtype: of the saved indices, int32 or int64; None is int64.
        has_h0: the linear recurrence began with given values.
    """

    kind: Kind
    shape: Sequence[int]
    axis: int = -1
    dtype: Any
    reverse: bool = False
    exclusive: bool = False
    saved: Literal["y", "x", "indices"] = "y"
    ties: Ties = "first"
    index_dtype: Any = None
    has_h0: bool = False


class ScanBackwardPlan(Plan):
    """The gradient of a prefix scan, from the gradient of its output.

    Operands of ``run``, all of shape ``shape`` and any strides:

    ========================= ===================================== =============
    kind                      in                                    out
    ========================= ===================================== =============
    cumsum                    dy                                    dx
    cumprod, logcumsumexp     dy, x, y                              dx
    cummax, cummin            dy and what ``saved`` names           dx
    linear_recurrence         dh, a, h; h0 with ``has_h0``          da, db; dh0
    ========================= ===================================== =============

    h0 and dh0 have shape ``shape`` without ``axis``.

    All kinds are the one recurrence S_j = g_j + c_{j+1} S_{j+1} from the far end, in one pass: c is 1 for
    cumsum, x for cumprod, exp(y_j - y_{j+1}) for logcumsumexp, a for the linear recurrence, and 0 in front
    of a new extremum. Nothing is divided, so zeros in a product and wide ranges of exponents are exact, and
    nothing is added atomically. An element whose x is -infinity gets 0 from logcumsumexp.

    >>> import numpy as np, baracuda as bc
    >>> plan = bc.ScanBackwardPlan(kind="cumprod", shape=(4,), axis=0, dtype="float32", device="cpu")
    >>> x, dx = np.array([2, 0, 3, 4], np.float32), np.empty(4, np.float32)
    >>> plan.run(dy=np.ones(4, np.float32), x=x, y=np.cumprod(x), dx=dx)
    >>> dx.tolist()
    [1.0, 32.0, 0.0, 0.0]
    """

    Descriptor: ClassVar[type[Any]] = ScanBackwardDescriptor


def _scan(
    kind: Kind,
    x: Any,
    out: Any,
    stream: Any,
    preference: PlanPreference | None,
    axis: int,
    reverse: bool,
    exclusive: bool,
    out_dtype: Any = None,
    ties: Ties = "first",
    indices: bool = False,
    out_indices: Any = None,
    index_dtype: Any = None,
) -> Any:
    shape, dtype, device = _core.describe(x, f"{kind}: x")
    if out_dtype is None and out is not None:
        out_dtype = _core.describe(out, f"{kind}: out")[1]
    plan = cached_plan(
        ScanPlan,
        device,
        preference,
        kind=kind,
        shape=shape,
        axis=axis,
        dtype=dtype,
        out_dtype=None if out_dtype is None else canonical(out_dtype, f"{kind}: dtype"),
        reverse=reverse,
        exclusive=exclusive,
        indices=indices,
        ties=ties,
        index_dtype=None if index_dtype is None else canonical(index_dtype, f"{kind}: index_dtype"),
    )
    y = new_output(x, shape, plan.operands[1].dtype, device, stream) if out is None else out
    if out_indices is not None and not indices:
        raise InvalidProblemError(f"{kind}: out_indices: expected indices=True")
    if not indices:
        plan.run(x=x, y=y, stream=stream)
        return returned(y, x) if out is None else y
    where = new_output(x, shape, plan.operands[2].dtype, device, stream) if out_indices is None else out_indices
    plan.run(x=x, y=y, indices=where, stream=stream)
    return (returned(y, x) if out is None else y), (returned(where, x) if out_indices is None else where)


def cumsum(
    x: Any,
    axis: int = -1,
    *,
    reverse: bool = False,
    exclusive: bool = False,
    dtype: Any = None,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """Sums of each element and those before it along an axis.

    Args:
        x: a tensor, on the CPU or a GPU.
        axis: the axis; negative ones count from the last.
        reverse: from the last element to the first.
        exclusive: each element is left out of its own sum.
        dtype: of the result; None is int64 for integers and bool, else that of `x`.
        out: the tensor to write to; None makes one of the kind of `x`.
        stream: see :meth:`baracuda.Plan.run`.
        preference: what the selection of the kernel must keep to.

    Raises:
        InvalidProblemError: `axis` is outside, or `out` doesn't fit.
        UnsupportedError: there is no kernel for these dtypes.

    >>> import numpy as np, baracuda as bc
    >>> bc.cumsum(np.array([1.0, 2.0, 3.0])).tolist(), bc.cumsum(np.array([1, 2, 3]), exclusive=True).tolist()
    ([1.0, 3.0, 6.0], [0, 1, 3])
    """
    return _scan("cumsum", x, out, stream, preference, axis, reverse, exclusive, dtype)


def cumprod(
    x: Any,
    axis: int = -1,
    *,
    reverse: bool = False,
    exclusive: bool = False,
    dtype: Any = None,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """Products of each element and those before it along an axis. Arguments are those of :func:`cumsum`.

    >>> import numpy as np, baracuda as bc
    >>> bc.cumprod(np.array([[1.0, 2.0, 3.0]])).tolist()
    [[1.0, 2.0, 6.0]]
    """
    return _scan("cumprod", x, out, stream, preference, axis, reverse, exclusive, dtype)


def cummax(
    x: Any,
    axis: int = -1,
    *,
    reverse: bool = False,
    exclusive: bool = False,
    indices: bool = False,
    ties: Ties = "first",
    index_dtype: Any = None,
    out: Any = None,
    out_indices: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The largest of each element and those before it along an axis; a NaN wins and stays.

    Args:
        x: a tensor, on the CPU or a GPU.
        axis: the axis; negative ones count from the last.
        reverse: from the last element to the first.
        exclusive: each element is left out of its own maximum.
        indices: also give the place of each maximum along the axis.
        ties: which of equal maxima that is, ``"first"`` or ``"last"``.
        index_dtype: int32 or int64; None is int64.
        out: the tensor to write the maxima to; None makes one of the kind of `x`.
        out_indices: the tensor to write the indices to.
        stream: see :meth:`baracuda.Plan.run`.
        preference: what the selection of the kernel must keep to.

    Returns:
        The maxima, or with ``indices=True`` the maxima and the indices.

    Raises:
        InvalidProblemError: `axis` is outside, or an output doesn't fit.

    >>> import numpy as np, baracuda as bc
    >>> y, where = bc.cummax(np.array([1.0, 3.0, 3.0, 2.0]), indices=True)
    >>> y.tolist(), where.tolist()
    ([1.0, 3.0, 3.0, 3.0], [0, 1, 1, 1])
    """
    return _scan(
        "cummax", x, out, stream, preference, axis, reverse, exclusive, None, ties, indices, out_indices, index_dtype
    )


def cummin(
    x: Any,
    axis: int = -1,
    *,
    reverse: bool = False,
    exclusive: bool = False,
    indices: bool = False,
    ties: Ties = "first",
    index_dtype: Any = None,
    out: Any = None,
    out_indices: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The smallest of each element and those before it along an axis. Arguments are those of :func:`cummax`.

    >>> import numpy as np, baracuda as bc
    >>> bc.cummin(np.array([3.0, 1.0, 2.0])).tolist()
    [3.0, 1.0, 1.0]
    """
    return _scan(
        "cummin", x, out, stream, preference, axis, reverse, exclusive, None, ties, indices, out_indices, index_dtype
    )


def logcumsumexp(
    x: Any,
    axis: int = -1,
    *,
    reverse: bool = False,
    exclusive: bool = False,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """log(exp(x_0) + ... + exp(x_j)) along an axis, without leaving the range of the dtype.

    Arguments are those of :func:`cumsum`; `x` is float16, bfloat16, float32 or float64.

    >>> import numpy as np, baracuda as bc
    >>> bc.logcumsumexp(np.array([1000.0, 1000.0])).round(4).tolist()
    [1000.0, 1000.6931]
    """
    return _scan("logcumsumexp", x, out, stream, preference, axis, reverse, exclusive)


def linear_recurrence(
    a: Any,
    b: Any,
    axis: int = -1,
    *,
    h0: Any = None,
    reverse: bool = False,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """h_j = a_j h_{j-1} + b_j along an axis.

    Args:
        a: the coefficients: float16, bfloat16, float32 or float64.
        b: a tensor of the shape, dtype and device of `a`.
        axis: the axis; negative ones count from the last.
        h0: what comes before the first element, of the shape without the axis; None is 0.
        reverse: h_j = a_j h_{j+1} + b_j.
        out: the tensor to write to; None makes one of the kind of `a`.
        stream: see :meth:`baracuda.Plan.run`.
        preference: what the selection of the kernel must keep to.

    Raises:
        InvalidProblemError: `axis` is outside, or shapes, dtypes or devices differ.

    >>> import numpy as np, baracuda as bc
    >>> bc.linear_recurrence(np.array([2.0, 3.0, 5.0]), np.ones(3)).tolist()
    [1.0, 4.0, 21.0]
    """
    shape, dtype, device = _core.describe(a, "linear_recurrence: a")
    plan = cached_plan(
        ScanPlan, device, preference, kind="linear_recurrence", shape=shape, axis=axis, dtype=dtype,
        reverse=reverse, has_h0=h0 is not None,
    )  # fmt: skip
    initial = {} if h0 is None else {"h0": h0}
    if out is not None:
        plan.run(a=a, b=b, h=out, stream=stream, **initial)
        return out
    h = new_output(a, shape, dtype, device, stream)
    plan.run(a=a, b=b, h=h, stream=stream, **initial)
    return returned(h, a)


def _gradient(
    kind: Kind, dy: Any, inputs: dict[str, Any], out: Any, stream: Any, preference: PlanPreference | None, **fields: Any
) -> Any:
    shape, dtype, device = _core.describe(dy, f"{kind}_backward: dy")
    plan = cached_plan(ScanBackwardPlan, device, preference, kind=kind, shape=shape, dtype=dtype, **fields)
    if out is not None:
        plan.run(dy=dy, dx=out, stream=stream, **inputs)
        return out
    dx = new_output(dy, shape, dtype, device, stream)
    plan.run(dy=dy, dx=dx, stream=stream, **inputs)
    return returned(dx, dy)


def cumsum_backward(
    dy: Any,
    axis: int = -1,
    *,
    reverse: bool = False,
    exclusive: bool = False,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The gradient of :func:`cumsum`: the sums of `dy` from the other end.

    >>> import numpy as np, baracuda as bc
    >>> bc.cumsum_backward(np.array([1.0, 2.0, 3.0])).tolist()
    [6.0, 5.0, 3.0]
    """
    return _gradient("cumsum", dy, {}, out, stream, preference, axis=axis, reverse=reverse, exclusive=exclusive)


def cumprod_backward(
    dy: Any,
    x: Any,
    y: Any,
    axis: int = -1,
    *,
    reverse: bool = False,
    exclusive: bool = False,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The gradient of :func:`cumprod`, exact with any number of zeros.

    Args:
        dy: the gradient of the output.
        x: the input of the forward scan.
        y: its output.
        axis, reverse, exclusive: of the forward scan.
        out: the tensor to write to; None makes one of the kind of `dy`.
        stream: see :meth:`baracuda.Plan.run`.
        preference: what the selection of the kernel must keep to.

    >>> import numpy as np, baracuda as bc
    >>> x = np.array([2.0, 0.0, 3.0, 4.0])
    >>> bc.cumprod_backward(np.ones(4), x, bc.cumprod(x)).tolist()
    [1.0, 32.0, 0.0, 0.0]
    """
    return _gradient(
        "cumprod", dy, {"x": x, "y": y}, out, stream, preference, axis=axis, reverse=reverse, exclusive=exclusive
    )


def logcumsumexp_backward(
    dy: Any,
    x: Any,
    y: Any,
    axis: int = -1,
    *,
    reverse: bool = False,
    exclusive: bool = False,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The gradient of :func:`logcumsumexp`; an element that is -infinity gets 0.

    Arguments are those of :func:`cumprod_backward`.

    >>> import numpy as np, baracuda as bc
    >>> x = np.array([1000.0, 0.0])
    >>> bc.logcumsumexp_backward(np.ones(2), x, bc.logcumsumexp(x)).tolist()
    [2.0, 0.0]
    """
    return _gradient(
        "logcumsumexp", dy, {"x": x, "y": y}, out, stream, preference, axis=axis, reverse=reverse, exclusive=exclusive
    )


def _extremum_gradient(
    kind: Kind, dy: Any, x: Any, y: Any, indices: Any, out: Any, stream: Any, preference: Any, **fields: Any
) -> Any:
    given = {name: value for name, value in (("x", x), ("y", y), ("indices", indices)) if value is not None}
    if len(given) != 1:
        raise InvalidProblemError(
            f"{kind}_backward: expected one of x, y and indices, got {' and '.join(given) if given else 'none'}"
        )
    (saved,) = given
    index_dtype = _core.describe(indices, f"{kind}_backward: indices")[1] if saved == "indices" else None
    return _gradient(kind, dy, given, out, stream, preference, saved=saved, index_dtype=index_dtype, **fields)


def cummax_backward(
    dy: Any,
    x: Any = None,
    axis: int = -1,
    *,
    y: Any = None,
    indices: Any = None,
    reverse: bool = False,
    exclusive: bool = False,
    ties: Ties = "first",
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The gradient of :func:`cummax`: each element's `dy` goes to where the maximum was found.

    Args:
        dy: the gradient of the output.
        x: the input of the forward scan, or
        y: its output, which is the fastest and takes ``ties="first"``, or
        indices: its indices; exactly one of the three.
        axis, reverse, exclusive, ties: of the forward scan.
        out: the tensor to write to; None makes one of the kind of `dy`.
        stream: see :meth:`baracuda.Plan.run`.
        preference: what the selection of the kernel must keep to.

    >>> import numpy as np, baracuda as bc
    >>> bc.cummax_backward(np.ones(4), np.array([1.0, 3.0, 3.0, 2.0])).tolist()
    [1.0, 3.0, 0.0, 0.0]
    """
    return _extremum_gradient(
        "cummax", dy, x, y, indices, out, stream, preference, axis=axis, reverse=reverse, exclusive=exclusive, ties=ties
    )


def cummin_backward(
    dy: Any,
    x: Any = None,
    axis: int = -1,
    *,
    y: Any = None,
    indices: Any = None,
    reverse: bool = False,
    exclusive: bool = False,
    ties: Ties = "first",
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The gradient of :func:`cummin`. Arguments are those of :func:`cummax_backward`.

    >>> import numpy as np, baracuda as bc
    >>> bc.cummin_backward(np.ones(3), np.array([3.0, 1.0, 2.0])).tolist()
    [1.0, 2.0, 0.0]
    """
    return _extremum_gradient(
        "cummin", dy, x, y, indices, out, stream, preference, axis=axis, reverse=reverse, exclusive=exclusive, ties=ties
    )


def linear_recurrence_backward(
    dh: Any,
    a: Any,
    h: Any,
    axis: int = -1,
    *,
    h0: Any = None,
    reverse: bool = False,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The gradient of :func:`linear_recurrence`.

    Args:
        dh: the gradient of the output.
        a: the coefficients of the forward scan.
        h: its output.
        axis, reverse: of the forward scan.
        h0: what the forward scan began with, if it was given.
        stream: see :meth:`baracuda.Plan.run`.
        preference: what the selection of the kernel must keep to.

    Returns:
        The gradients of a and b, and of h0 if it is given.

    >>> import numpy as np, baracuda as bc
    >>> a = np.array([2.0, 3.0, 5.0])
    >>> da, db = bc.linear_recurrence_backward(np.ones(3), a, bc.linear_recurrence(a, np.ones(3)))
    >>> da.tolist(), db.tolist()
    ([0.0, 6.0, 4.0], [19.0, 6.0, 1.0])
    """
    shape, dtype, device = _core.describe(dh, "linear_recurrence_backward: dh")
    plan = cached_plan(
        ScanBackwardPlan, device, preference, kind="linear_recurrence", shape=shape, axis=axis, dtype=dtype,
        reverse=reverse, has_h0=h0 is not None,
    )  # fmt: skip
    names = ("da", "db") if h0 is None else ("da", "db", "dh0")
    shapes = {operand.name: operand.shape for operand in plan.operands}
    outputs = {name: new_output(dh, shapes[name], dtype, device, stream) for name in names}
    inputs = {"dh": dh, "a": a, "h": h} if h0 is None else {"dh": dh, "a": a, "h": h, "h0": h0}
    plan.run(stream=stream, **inputs, **outputs)
    return tuple(returned(output, dh) for output in outputs.values())
