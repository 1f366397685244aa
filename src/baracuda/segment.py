# SPDX-License-Identifier: Apache-2.0
"""Segment reductions: sum, mean, maximum, minimum and product of the rows of each segment, and their gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from baracuda import _core
from baracuda._arguments import integer, segments_of_offsets, several
from baracuda._base import Descriptor, Plan, cached_plan
from baracuda._outputs import new_output, returned
from baracuda.errors import InvalidProblemError
from baracuda.plan import PlanPreference

__all__ = [
    "SegmentReduceBackwardDescriptor",
    "SegmentReduceBackwardPlan",
    "SegmentReduceDescriptor",
    "SegmentReducePlan",
    "UnsortedSegmentMaxBackwardPlan",
    "UnsortedSegmentMaxPlan",
    "UnsortedSegmentMeanBackwardPlan",
    "UnsortedSegmentMeanPlan",
    "UnsortedSegmentMinBackwardPlan",
    "UnsortedSegmentMinPlan",
    "UnsortedSegmentProdBackwardPlan",
    "UnsortedSegmentProdPlan",
    "UnsortedSegmentSumBackwardPlan",
    "UnsortedSegmentSumPlan",
    "segment_max",
    "segment_max_backward",
    "segment_mean",
    "segment_mean_backward",
    "segment_min",
    "segment_min_backward",
    "segment_prod",
    "segment_prod_backward",
    "segment_sum",
    "segment_sum_backward",
]

Kind = Literal["sum", "mean", "max", "min", "prod"]
Ids = Literal["unsorted", "sorted", "offsets"]
Ties = Literal["first", "even"]


@dataclass(frozen=True, kw_only=True)
class SegmentReduceDescriptor(Descriptor, operator="segment_reduce"):
    """The problem of :class:`SegmentReducePlan`.

    Attributes:
        kind: ``"sum"``, ``"mean"``, ``"max"``, ``"min"`` or ``"prod"``.
        num_inputs: N, the rows of the input.
        embedding_dim: D, the columns of input and output.
        num_segments: S, the rows of the output.
        dtype: float16, bfloat16, float32, float64, int8, uint8, int32 or int64.
        index_dtype: int32 or int64, of the ids or offsets and of ``arg``.
        ids: ``"unsorted"``; ``"sorted"``, a promise that ids never fall; or ``"offsets"`` instead of ids.
        ties: how the gradient will treat equal rows; ``"even"`` has no ``arg``.
        empty_value: what empty segments hold; None: 0, of prod 1, of max and min the dtype's lowest and
            highest value, infinities included.
        return_arg: max and min also write ``arg``.
    """

    kind: Kind
    num_inputs: int
    embedding_dim: int
    num_segments: int
    dtype: Any
    index_dtype: Any = "int64"
    ids: Ids = "unsorted"
    ties: Ties = "first"
    empty_value: float | None = None
    return_arg: bool = False


@dataclass(frozen=True, kw_only=True)
class SegmentReduceBackwardDescriptor(Descriptor, operator="segment_reduce_backward"):
    """The problem of :class:`SegmentReduceBackwardPlan`.

    Attributes:
        kind: ``"sum"``, ``"mean"``, ``"max"``, ``"min"`` or ``"prod"``.
        num_inputs: N, the rows of the input.
        embedding_dim: D, the columns of input and output.
        num_segments: S, the rows of the output.
        dtype: float16, bfloat16, float32 or float64.
        index_dtype: int32 or int64, of the ids or offsets and of ``arg``.
        ids: ``"unsorted"``; ``"sorted"``, a promise that ids never fall; or ``"offsets"`` instead of ids.
        ties: of max and min: the ``"first"`` of equal rows takes the gradient, or they share it (``"even"``).
        saved: of max and min: the ``"input"``, or the forward's ``"arg"``, which is cheaper.
    """

    kind: Kind
    num_inputs: int
    embedding_dim: int
    num_segments: int
    dtype: Any
    index_dtype: Any = "int64"
    ids: Ids = "unsorted"
    ties: Ties = "first"
    saved: Literal["input", "arg"] = "input"


class SegmentReducePlan(Plan):
    """Reduces the rows of each segment, column by column, to one row.

    Operands of ``run``:
        input (in): [N, D], any strides.
        segment_ids (in): [N]; a row whose id is outside 0 .. S - 1 is dropped. With ``ids="offsets"`` instead
        offsets (in): [S + 1]; segment s has the rows ``offsets[s]`` to ``offsets[s + 1] - 1``. Offsets are
            clamped to 0 .. N.
        output (out): [S, D].
        arg (out): [S, D], with ``return_arg``: the lowest row that holds the maximum or minimum, N where a
            segment is empty.

    Sums, means and products of 16-bit floats are kept in float32 and rounded once; those of integers wrap
    around, and means of integers are rounded down. For max and min, NaN is above, or below, all numbers, and
    -0 is below +0.

    Ids that were promised to be sorted and are not, and offsets that fall, give undefined values; nothing
    outside the operands is read or written.

    >>> import numpy as np, baracuda as bc
    >>> plan = bc.SegmentReducePlan(
    ...     kind="max", num_inputs=4, embedding_dim=1, num_segments=3, dtype="float32", return_arg=True,
    ...     device="cpu")
    >>> output, arg = np.empty((3, 1), np.float32), np.empty((3, 1), np.int64)
    >>> data, ids = np.array([[1], [5], [2], [5]], np.float32), np.array([2, 0, 2, 0])
    >>> plan.run(input=data, segment_ids=ids, output=output, arg=arg)
    >>> output[:, 0].tolist(), arg[:, 0].tolist()
    ([5.0, -inf, 2.0], [1, 4, 2])
    """

    Descriptor: ClassVar[type[Any]] = SegmentReduceDescriptor


class SegmentReduceBackwardPlan(Plan):
    """The gradient of :class:`SegmentReducePlan` with respect to its input.

    Operands of ``run``:
        d_output (in): [S, D].
        segment_ids (in): [N], or offsets (in): [S + 1], as in the forward.
        input (in): [N, D]; of prod, and of max and min with ``saved="input"``.
        arg (in): [S, D], with ``saved="arg"``, as the forward wrote it. A row that is not of the segment takes
            nothing.
        d_input (out): [N, D]; all of it is written, rows without a segment with 0.

    The gradient of a maximum that is NaN goes to the first NaN, under either rule for ties. That of a product
    is d_output times the product of the other rows, exact with any number of zeros and infinities: it is not
    divided out of the product, and factors neither overflow nor underflow on the way.

    >>> import numpy as np, baracuda as bc
    >>> plan = bc.SegmentReduceBackwardPlan(
    ...     kind="prod", num_inputs=3, embedding_dim=1, num_segments=1, dtype="float32", device="cpu")
    >>> d_input = np.empty((3, 1), np.float32)
    >>> data, ids = np.array([[2], [0], [3]], np.float32), np.zeros(3, np.int64)
    >>> plan.run(d_output=np.ones((1, 1), np.float32), input=data, segment_ids=ids, d_input=d_input)
    >>> d_input[:, 0].tolist()
    [0.0, 6.0, 0.0]
    """

    Descriptor: ClassVar[type[Any]] = SegmentReduceBackwardDescriptor


class _Unsorted(Plan):
    """A plan of which the name gives the kind and that ids are in any order."""

    _kind: ClassVar[Kind]

    def __init__(self, **fields: Any) -> None:
        super().__init__(kind=self._kind, ids="unsorted", **fields)

    def _select(self, descriptor: Any, device: object, preference: PlanPreference | None) -> None:
        if (descriptor.kind, descriptor.ids) != (self._kind, "unsorted"):
            raise InvalidProblemError(
                f"{type(self).__name__}: expected kind {self._kind!r} and ids 'unsorted', "
                f"got {descriptor.kind!r} and {descriptor.ids!r}"
            )
        super()._select(descriptor, device, preference)


class UnsortedSegmentSumPlan(_Unsorted, SegmentReducePlan):
    """:class:`SegmentReducePlan` with ``kind="sum"`` and ``ids="unsorted"``.

    >>> import numpy as np, baracuda as bc
    >>> plan = bc.UnsortedSegmentSumPlan(
    ...     num_inputs=2, embedding_dim=1, num_segments=1, dtype="float32", device="cpu")
    >>> output = np.empty((1, 1), np.float32)
    >>> plan.run(input=np.array([[3], [5]], np.float32), segment_ids=np.zeros(2, np.int64), output=output)
    >>> output[0].tolist()
    [8.0]
    """

    _kind = "sum"


class UnsortedSegmentMeanPlan(_Unsorted, SegmentReducePlan):
    """:class:`SegmentReducePlan` with ``kind="mean"`` and ``ids="unsorted"``.

    >>> import numpy as np, baracuda as bc
    >>> plan = bc.UnsortedSegmentMeanPlan(
    ...     num_inputs=2, embedding_dim=1, num_segments=1, dtype="float32", device="cpu")
    >>> output = np.empty((1, 1), np.float32)
    >>> plan.run(input=np.array([[3], [5]], np.float32), segment_ids=np.zeros(2, np.int64), output=output)
    >>> output[0].tolist()
    [4.0]
    """

    _kind = "mean"


class UnsortedSegmentMaxPlan(_Unsorted, SegmentReducePlan):
    """:class:`SegmentReducePlan` with ``kind="max"`` and ``ids="unsorted"``.

    >>> import numpy as np, baracuda as bc
    >>> plan = bc.UnsortedSegmentMaxPlan(
    ...     num_inputs=2, embedding_dim=1, num_segments=1, dtype="float32", device="cpu")
    >>> output = np.empty((1, 1), np.float32)
    >>> plan.run(input=np.array([[3], [5]], np.float32), segment_ids=np.zeros(2, np.int64), output=output)
    >>> output[0].tolist()
    [5.0]
    """

    _kind = "max"


class UnsortedSegmentMinPlan(_Unsorted, SegmentReducePlan):
    """:class:`SegmentReducePlan` with ``kind="min"`` and ``ids="unsorted"``.

    >>> import numpy as np, baracuda as bc
    >>> plan = bc.UnsortedSegmentMinPlan(
    ...     num_inputs=2, embedding_dim=1, num_segments=1, dtype="float32", device="cpu")
    >>> output = np.empty((1, 1), np.float32)
    >>> plan.run(input=np.array([[3], [5]], np.float32), segment_ids=np.zeros(2, np.int64), output=output)
    >>> output[0].tolist()
    [3.0]
    """

    _kind = "min"


class UnsortedSegmentProdPlan(_Unsorted, SegmentReducePlan):
    """:class:`SegmentReducePlan` with ``kind="prod"`` and ``ids="unsorted"``.

    >>> import numpy as np, baracuda as bc
    >>> plan = bc.UnsortedSegmentProdPlan(
    ...     num_inputs=2, embedding_dim=1, num_segments=1, dtype="float32", device="cpu")
    >>> output = np.empty((1, 1), np.float32)
    >>> plan.run(input=np.array([[3], [5]], np.float32), segment_ids=np.zeros(2, np.int64), output=output)
    >>> output[0].tolist()
    [15.0]
    """

    _kind = "prod"


class UnsortedSegmentSumBackwardPlan(_Unsorted, SegmentReduceBackwardPlan):
    """:class:`SegmentReduceBackwardPlan` with ``kind="sum"`` and ``ids="unsorted"``.

    >>> import numpy as np, baracuda as bc
    >>> plan = bc.UnsortedSegmentSumBackwardPlan(
    ...     num_inputs=2, embedding_dim=1, num_segments=1, dtype="float32", device="cpu")
    >>> dy, ids, d_input = np.ones((1, 1), np.float32), np.zeros(2, np.int64), np.empty((2, 1), np.float32)
    >>> plan.run(d_output=dy, segment_ids=ids, d_input=d_input)
    >>> d_input[:, 0].tolist()
    [1.0, 1.0]
    """

    _kind = "sum"


class UnsortedSegmentMeanBackwardPlan(_Unsorted, SegmentReduceBackwardPlan):
    """:class:`SegmentReduceBackwardPlan` with ``kind="mean"`` and ``ids="unsorted"``.

    >>> import numpy as np, baracuda as bc
    >>> plan = bc.UnsortedSegmentMeanBackwardPlan(
    ...     num_inputs=2, embedding_dim=1, num_segments=1, dtype="float32", device="cpu")
    >>> dy, ids, d_input = np.ones((1, 1), np.float32), np.zeros(2, np.int64), np.empty((2, 1), np.float32)
    >>> plan.run(d_output=dy, segment_ids=ids, d_input=d_input)
    >>> d_input[:, 0].tolist()
    [0.5, 0.5]
    """

    _kind = "mean"


class UnsortedSegmentMaxBackwardPlan(_Unsorted, SegmentReduceBackwardPlan):
    """:class:`SegmentReduceBackwardPlan` with ``kind="max"`` and ``ids="unsorted"``.

    >>> import numpy as np, baracuda as bc
    >>> plan = bc.UnsortedSegmentMaxBackwardPlan(
    ...     num_inputs=2, embedding_dim=1, num_segments=1, dtype="float32", device="cpu")
    >>> dy, ids, d_input = np.ones((1, 1), np.float32), np.zeros(2, np.int64), np.empty((2, 1), np.float32)
    >>> data = np.array([[3], [5]], np.float32)
    >>> plan.run(d_output=dy, input=data, segment_ids=ids, d_input=d_input)
    >>> d_input[:, 0].tolist()
    [0.0, 1.0]
    """

    _kind = "max"


class UnsortedSegmentMinBackwardPlan(_Unsorted, SegmentReduceBackwardPlan):
    """:class:`SegmentReduceBackwardPlan` with ``kind="min"`` and ``ids="unsorted"``.

    >>> import numpy as np, baracuda as bc
    >>> plan = bc.UnsortedSegmentMinBackwardPlan(
    ...     num_inputs=2, embedding_dim=1, num_segments=1, dtype="float32", device="cpu")
    >>> dy, ids, d_input = np.ones((1, 1), np.float32), np.zeros(2, np.int64), np.empty((2, 1), np.float32)
    >>> data = np.array([[3], [5]], np.float32)
    >>> plan.run(d_output=dy, input=data, segment_ids=ids, d_input=d_input)
    >>> d_input[:, 0].tolist()
    [1.0, 0.0]
    """

    _kind = "min"


class UnsortedSegmentProdBackwardPlan(_Unsorted, SegmentReduceBackwardPlan):
    """:class:`SegmentReduceBackwardPlan` with ``kind="prod"`` and ``ids="unsorted"``.

    >>> import numpy as np, baracuda as bc
    >>> plan = bc.UnsortedSegmentProdBackwardPlan(
    ...     num_inputs=2, embedding_dim=1, num_segments=1, dtype="float32", device="cpu")
    >>> dy, ids, d_input = np.ones((1, 1), np.float32), np.zeros(2, np.int64), np.empty((2, 1), np.float32)
    >>> data = np.array([[3], [5]], np.float32)
    >>> plan.run(d_output=dy, input=data, segment_ids=ids, d_input=d_input)
    >>> d_input[:, 0].tolist()
    [5.0, 3.0]
    """

    _kind = "prod"


def segment_sum(
    data: Any,
    segment_ids: Any = None,
    num_segments: int | None = None,
    *,
    offsets: Any = None,
    sorted: bool = False,
    empty_value: float | None = None,
    check_data: bool = False,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The sum of the rows of each segment; see :class:`SegmentReducePlan`.

    Args:
        data: [N, ...]; what follows the first axis is reduced element by element.
        segment_ids: [N], int32 or int64; rows whose id is outside 0 .. num_segments - 1 are dropped.
        num_segments: S. None: one more than the highest id, which is read back from the device, and so waits.
        offsets: [S + 1], instead of ids: segment s has the rows ``offsets[s]`` to ``offsets[s + 1] - 1``.
        sorted: a promise that ids never fall.
        empty_value: what empty segments hold; by default 0.
        check_data: read the ids or offsets back first, which waits, and refuse those that are out of range,
            or not in the order that was promised.
        out: where to write.
        stream: see :meth:`baracuda.Plan.run`.
        preference: what the selection of the kernel must keep to.

    Returns:
        [S, ...], of the kind of `data`.

    Raises:
        InvalidProblemError: shapes, dtypes or devices differ, or `check_data` found an id.

    >>> import numpy as np, baracuda as bc
    >>> bc.segment_sum(np.array([1.0, 2.0, 4.0]), np.array([0, 2, 2]), 3).tolist()
    [1.0, 0.0, 6.0]
    """
    return _forward("sum", data, segment_ids, num_segments, offsets, sorted, empty_value, False,
                    check_data, out, stream, preference)  # fmt: skip


def segment_mean(
    data: Any,
    segment_ids: Any = None,
    num_segments: int | None = None,
    *,
    offsets: Any = None,
    sorted: bool = False,
    empty_value: float | None = None,
    check_data: bool = False,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The mean of the rows of each segment, by default 0 where it is empty. See :func:`segment_sum`.

    >>> import numpy as np, baracuda as bc
    >>> bc.segment_mean(np.array([1.0, 2.0, 4.0]), np.array([0, 2, 2]), 3).tolist()
    [1.0, 0.0, 3.0]
    """
    return _forward("mean", data, segment_ids, num_segments, offsets, sorted, empty_value, False,
                    check_data, out, stream, preference)  # fmt: skip


def segment_max(
    data: Any,
    segment_ids: Any = None,
    num_segments: int | None = None,
    *,
    offsets: Any = None,
    sorted: bool = False,
    empty_value: float | None = None,
    return_arg: bool = False,
    check_data: bool = False,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The maximum of the rows of each segment; by default the dtype's lowest value where it is empty.

    See :func:`segment_sum` for the arguments.

    With `return_arg` the result is ``(output, arg)``, where `arg` is the lowest row that holds it, N where
    a segment is empty, in the dtype of the ids or offsets.

    >>> import numpy as np, baracuda as bc
    >>> bc.segment_max(np.array([1.0, 2.0, 4.0]), np.array([0, 2, 2]), 3).tolist()
    [1.0, -inf, 4.0]
    """
    return _forward("max", data, segment_ids, num_segments, offsets, sorted, empty_value, return_arg, check_data,
                    out, stream, preference)  # fmt: skip


def segment_min(
    data: Any,
    segment_ids: Any = None,
    num_segments: int | None = None,
    *,
    offsets: Any = None,
    sorted: bool = False,
    empty_value: float | None = None,
    return_arg: bool = False,
    check_data: bool = False,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The minimum of the rows of each segment; by default the dtype's highest value where it is empty.

    See :func:`segment_sum` for the arguments.

    With `return_arg` the result is ``(output, arg)``, where `arg` is the lowest row that holds it, N where
    a segment is empty, in the dtype of the ids or offsets.

    >>> import numpy as np, baracuda as bc
    >>> bc.segment_min(np.array([1.0, 2.0, 4.0]), np.array([0, 2, 2]), 3).tolist()
    [1.0, inf, 2.0]
    """
    return _forward("min", data, segment_ids, num_segments, offsets, sorted, empty_value, return_arg, check_data,
                    out, stream, preference)  # fmt: skip


def segment_prod(
    data: Any,
    segment_ids: Any = None,
    num_segments: int | None = None,
    *,
    offsets: Any = None,
    sorted: bool = False,
    empty_value: float | None = None,
    check_data: bool = False,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The product of the rows of each segment, by default 1 where it is empty. See :func:`segment_sum`.

    >>> import numpy as np, baracuda as bc
    >>> bc.segment_prod(np.array([1.0, 2.0, 4.0]), np.array([0, 2, 2]), 3).tolist()
    [1.0, 1.0, 8.0]
    """
    return _forward("prod", data, segment_ids, num_segments, offsets, sorted, empty_value, False,
                    check_data, out, stream, preference)  # fmt: skip


def segment_sum_backward(
    d_output: Any,
    segment_ids: Any = None,
    *,
    offsets: Any = None,
    num_inputs: int | None = None,
    sorted: bool = False,
    check_data: bool = False,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The gradient of :func:`segment_sum` with respect to the data; see :class:`SegmentReduceBackwardPlan`.

    Args:
        d_output: [S, ...].
        segment_ids: the forward's.
        offsets: the forward's.
        num_inputs: N; with ids it is their number, with offsets by default the last offset, which is read back.
        sorted: the forward's.
        check_data: as in :func:`segment_sum`.
        out: where to write.
        stream: see :meth:`baracuda.Plan.run`.
        preference: what the selection of the kernel must keep to.

    Returns:
        [N, ...], of the kind of `d_output`; 0 where a row has no segment.

    >>> import numpy as np, baracuda as bc
    >>> bc.segment_sum_backward(np.array([1.0, 10.0]), np.array([1, 0, 7])).tolist()
    [10.0, 1.0, 0.0]
    """
    return _backward("sum", d_output, None, segment_ids, offsets, num_inputs, sorted, "first", None, check_data,
                     out, stream, preference)  # fmt: skip


def segment_mean_backward(
    d_output: Any,
    segment_ids: Any = None,
    *,
    offsets: Any = None,
    num_inputs: int | None = None,
    sorted: bool = False,
    check_data: bool = False,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The gradient of :func:`segment_mean`; see :func:`segment_sum_backward`.

    >>> import numpy as np, baracuda as bc
    >>> bc.segment_mean_backward(np.array([1.0, 10.0]), np.array([1, 1, 0])).tolist()
    [5.0, 5.0, 1.0]
    """
    return _backward("mean", d_output, None, segment_ids, offsets, num_inputs, sorted, "first", None, check_data,
                     out, stream, preference)  # fmt: skip


def segment_max_backward(
    d_output: Any,
    data: Any = None,
    segment_ids: Any = None,
    *,
    offsets: Any = None,
    sorted: bool = False,
    ties: Ties = "first",
    arg: Any = None,
    check_data: bool = False,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The gradient of :func:`segment_max` with respect to `data`; see :class:`SegmentReduceBackwardPlan`.

    Args:
        d_output: [S, ...].
        data: the forward's, [N, ...]. With `arg` and ids it may be left out.
        segment_ids: the forward's.
        offsets: the forward's.
        sorted: the forward's.
        ties: the ``"first"`` of equal rows takes the gradient, or they share it (``"even"``).
        arg: what the forward returned; then `data` isn't read, which is several times faster.
        check_data: as in :func:`segment_sum`.
        out: where to write.
        stream: see :meth:`baracuda.Plan.run`.
        preference: what the selection of the kernel must keep to.

    Returns:
        [N, ...], of the kind of `d_output`; 0 where a row has no segment.

    >>> import numpy as np, baracuda as bc
    >>> data, ids = np.array([3.0, 3.0, 1.0]), np.array([0, 0, 1])
    >>> bc.segment_max_backward(np.array([1.0, 10.0]), data, ids).tolist()
    [1.0, 0.0, 10.0]
    >>> bc.segment_max_backward(np.array([1.0, 10.0]), data, ids, ties="even").tolist()
    [0.5, 0.5, 10.0]
    """
    return _backward("max", d_output, data, segment_ids, offsets, None, sorted, ties, arg, check_data,
                     out, stream, preference)  # fmt: skip


def segment_min_backward(
    d_output: Any,
    data: Any = None,
    segment_ids: Any = None,
    *,
    offsets: Any = None,
    sorted: bool = False,
    ties: Ties = "first",
    arg: Any = None,
    check_data: bool = False,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The gradient of :func:`segment_min` with respect to `data`.

    Arguments are those of :func:`segment_max_backward`.

    >>> import numpy as np, baracuda as bc
    >>> data, ids = np.array([3.0, 3.0, 1.0]), np.array([0, 0, 1])
    >>> bc.segment_min_backward(np.array([1.0, 10.0]), data, ids).tolist()
    [1.0, 0.0, 10.0]
    >>> bc.segment_min_backward(np.array([1.0, 10.0]), data, ids, ties="even").tolist()
    [0.5, 0.5, 10.0]
    """
    return _backward("min", d_output, data, segment_ids, offsets, None, sorted, ties, arg, check_data,
                     out, stream, preference)  # fmt: skip


def segment_prod_backward(
    d_output: Any,
    data: Any,
    segment_ids: Any = None,
    *,
    offsets: Any = None,
    sorted: bool = False,
    check_data: bool = False,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The gradient of :func:`segment_prod` with respect to `data`, exact with any number of zeros.

    Arguments are those of :func:`segment_max_backward`.

    >>> import numpy as np, baracuda as bc
    >>> bc.segment_prod_backward(np.array([1.0]), np.array([2.0, 0.0, 3.0]), np.array([0, 0, 0])).tolist()
    [0.0, 6.0, 0.0]
    """
    return _backward("prod", d_output, data, segment_ids, offsets, None, sorted, "first", None, check_data,
                     out, stream, preference)  # fmt: skip


def _forward(
    kind: Kind,
    data: Any,
    segment_ids: Any,
    num_segments: int | None,
    offsets: Any,
    is_sorted: bool,
    empty_value: float | None,
    return_arg: bool,
    check_data: bool,
    out: Any,
    stream: Any,
    preference: PlanPreference | None,
) -> Any:
    where = f"segment_{kind}"
    shape, dtype, device = _core.describe(data, f"{where}: data")
    _check_rank(f"{where}: data", data, shape)
    ids, indices, count, index_dtype = _groups(where, segment_ids, offsets, is_sorted)
    if ids == "offsets":
        segments = segments_of_offsets(count, num_segments, where)
    elif num_segments is None:
        segments = _highest(indices) + 1
    else:
        segments = integer(num_segments, f"{where}: num_segments")
    if check_data:
        _check(where, ids, indices, shape[0], segments)
    columns = math.prod(shape[1:])
    plan = cached_plan(
        SegmentReducePlan,
        device,
        preference,
        kind=kind,
        num_inputs=shape[0],
        embedding_dim=columns,
        num_segments=segments,
        dtype=dtype,
        index_dtype=index_dtype,
        ids=ids,
        empty_value=empty_value,
        return_arg=return_arg,
    )
    out_shape = (segments, *shape[1:])
    names = ("output", "arg") if return_arg else ("output",)
    if out is None:
        written = tuple(
            new_output(data, (segments, columns), kept, device, stream) for kept in (dtype, index_dtype)[: len(names)]
        )
        operands = dict(zip(names, written, strict=True))
    else:
        written = several(out, names, where) if return_arg else (out,)
        operands = {name: _written(one, out_shape, where) for name, one in zip(names, written, strict=True)}
    operands[_OPERAND[ids]] = indices
    plan.run(input=_matrix(data, shape), stream=stream, **operands)
    results = tuple(_result(one, data, out_shape) if out is None else one for one in written)
    return results if return_arg else results[0]


def _backward(
    kind: Kind,
    d_output: Any,
    data: Any,
    segment_ids: Any,
    offsets: Any,
    num_inputs: int | None,
    is_sorted: bool,
    ties: Ties,
    arg: Any,
    check_data: bool,
    out: Any,
    stream: Any,
    preference: PlanPreference | None,
) -> Any:
    where = f"segment_{kind}_backward"
    shape, dtype, device = _core.describe(d_output, f"{where}: d_output")
    _check_rank(f"{where}: d_output", d_output, shape)
    ids, indices, count, index_dtype = _groups(where, segment_ids, offsets, is_sorted)
    takes_data = kind == "prod" or (kind in ("max", "min") and arg is None)
    if takes_data and data is None:
        raise InvalidProblemError(f"{where}: data: is missing{'' if kind == 'prod' else ', and so is arg'}")
    if data is not None:
        data_shape = _core.describe(data, f"{where}: data")[0]
        _check_rank(f"{where}: data", data, data_shape)
        rows = data_shape[0]
    elif num_inputs is not None:
        rows = integer(num_inputs, f"{where}: num_inputs")
        if ids != "offsets" and rows != count:
            raise InvalidProblemError(f"{where}: num_inputs: expected {count} for {count} ids, got {num_inputs}")
    else:
        rows = _highest(indices) if ids == "offsets" else count
    in_shape = (rows, *shape[1:])
    columns = math.prod(shape[1:])
    if check_data:
        _check(where, ids, indices, rows, shape[0])
    plan = cached_plan(
        SegmentReduceBackwardPlan,
        device,
        preference,
        kind=kind,
        num_inputs=rows,
        embedding_dim=columns,
        num_segments=shape[0],
        dtype=dtype,
        index_dtype=index_dtype,
        ids=ids,
        ties=ties,
        saved="input" if arg is None else "arg",
    )
    d_input = new_output(d_output, (rows, columns), dtype, device, stream) if out is None else out
    operands = {_OPERAND[ids]: indices, "d_input": d_input if out is None else _written(out, in_shape, where)}
    if takes_data:
        operands["input"] = _matrix(data, in_shape)
    if arg is not None:
        operands["arg"] = _matrix(arg, shape)
    plan.run(d_output=_matrix(d_output, shape), stream=stream, **operands)
    return _result(d_input, d_output, in_shape) if out is None else out


_OPERAND: dict[Ids, str] = {"unsorted": "segment_ids", "sorted": "segment_ids", "offsets": "offsets"}


def _groups(where: str, segment_ids: Any, offsets: Any, is_sorted: bool) -> tuple[Ids, Any, int, str]:
    """What says which rows a segment has: its form, the array, its length and its dtype."""
    if (segment_ids is None) == (offsets is None):
        raise InvalidProblemError(f"{where}: expected one of segment_ids and offsets")
    ids: Ids = "offsets" if segment_ids is None else "sorted" if is_sorted else "unsorted"
    indices = offsets if segment_ids is None else segment_ids
    shape, dtype, _ = _core.describe(indices, f"{where}: {_OPERAND[ids]}")
    if len(shape) != 1 or (ids == "offsets" and shape[0] < 1):
        expected = "[num_segments + 1]" if ids == "offsets" else "[num_inputs]"
        raise InvalidProblemError(f"{where}: {_OPERAND[ids]}: expected {expected}, got {shape}")
    return ids, indices, shape[0], dtype


def _check_rank(where: str, tensor: Any, shape: tuple[int, ...]) -> None:
    if not shape:
        raise InvalidProblemError(f"{where}: expected at least one axis")
    if isinstance(tensor, _core.Tensor) and len(shape) != 2:
        raise InvalidProblemError(f"{where}: expected a baracuda.Tensor of two axes, got {shape}")


def _matrix(tensor: Any, shape: tuple[int, ...]) -> Any:
    """[rows, columns] of an input; a tensor of another shape is passed on for the plan's sentence."""
    if len(shape) == 2 or tuple(getattr(tensor, "shape", ())) != shape or isinstance(tensor, _core.Tensor):
        return tensor
    return tensor.reshape((shape[0], math.prod(shape[1:])))


def _written(out: Any, shape: tuple[int, ...], where: str) -> Any:
    """The same of what the caller wants written: never a copy."""
    if len(shape) == 2 or tuple(getattr(out, "shape", ())) != shape or isinstance(out, _core.Tensor):
        return out
    matrix = (shape[0], math.prod(shape[1:]))
    seen = out.reshape(matrix)
    if _address(seen) != _address(out):
        raise InvalidProblemError(f"{where}: out: {shape} can't be seen as {matrix} without a copy")
    return seen


def _address(array: Any) -> int:
    if hasattr(array, "data_ptr"):
        return int(array.data_ptr())
    interface = array.__array_interface__ if isinstance(array, np.ndarray) else array.__cuda_array_interface__
    return int(interface["data"][0])


def _result(matrix: Any, like: Any, shape: tuple[int, ...]) -> Any:
    """What was allocated as a matrix, as the caller gets it."""
    result = returned(matrix, like)
    return result if tuple(result.shape) == shape or isinstance(result, _core.Tensor) else result.reshape(shape)


def _host(indices: Any) -> np.ndarray[Any, np.dtype[Any]]:
    if hasattr(indices, "numpy") and not isinstance(indices, np.ndarray):
        return np.asarray(indices.cpu().numpy() if hasattr(indices, "cpu") else indices.numpy())
    return np.asarray(indices.get() if hasattr(indices, "get") else indices)


def _highest(indices: Any) -> int:
    """The highest of the ids or offsets, or -1."""
    host = _host(indices)
    return max(-1, int(host.max())) if host.size else -1


def _check(where: str, ids: Ids, indices: Any, rows: int, segments: int) -> None:
    host = _host(indices)
    limit = rows + 1 if ids == "offsets" else segments
    wrong = (host < 0) | (host >= limit)
    if wrong.any():
        place = int(wrong.argmax())
        raise InvalidProblemError(
            f"{where}: {_OPERAND[ids]}: expected 0 to {limit - 1}, got {int(host[place])} at {place}"
        )
    falls = host[1:] < host[:-1]
    if ids != "unsorted" and falls.any():
        place = int(falls.argmax()) + 1
        raise InvalidProblemError(
            f"{where}: {_OPERAND[ids]}: expected no lower than before, got {int(host[place])} at {place}"
        )
