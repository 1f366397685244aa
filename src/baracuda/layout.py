# SPDX-License-Identifier: Apache-2.0
"""Moving elements: writing a block into a tensor in place, where the host or the device says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from types import EllipsisType
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np

from baracuda import _core
from baracuda._arguments import integer, integers
from baracuda._base import Descriptor, Plan, cached_plan
from baracuda._outputs import new_output, returned
from baracuda.errors import InvalidProblemError
from baracuda.plan import PlanPreference

__all__ = [
    "DynamicWriteSliceBackwardDescriptor",
    "DynamicWriteSliceBackwardPlan",
    "DynamicWriteSliceDescriptor",
    "DynamicWriteSlicePlan",
    "WriteSliceDescriptor",
    "WriteSlicePlan",
    "dynamic_update_slice",
    "dynamic_update_slice_backward",
    "write_slice",
]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class WriteSliceDescriptor(Descriptor, operator="write_slice"):
    """The problem of :class:`WriteSlicePlan`.

    Attributes:
        dest_shape: extents of the destination, in elements, rank 1 to 8.
        ranges: ``(start, end)`` for each axis, ``0 <= start <= end <= extent``.
        dtype: any dtype of the library, int4 and uint4 included.
        overlap: ``"refuse"`` a source that shares elements with the window, or ``"stage"`` it through
            the workspace.
    """

    dest_shape: Sequence[int]
    ranges: Sequence[tuple[int, int]]
    dtype: Any
    overlap: Literal["refuse", "stage"] = "refuse"


class WriteSlicePlan(Plan):
    """``dest[start:end, ...] = source``, in place: elements outside the window keep their bits.

    No arithmetic is done, so every bit arrives, those of NaNs too.

    Operands of ``run``:
        dest (inout): shape ``dest_shape``, any strides whose elements do not overlap.
        source (in): the window's shape, ``end - start`` on each axis, any strides.

    int4 and uint4 are packed two to a byte, the lower index in the low half, rows back to back. They
    come as a uint8 tensor (flat, or with the last axis halved) or as a DLPack tensor of 4 bits. Windows
    may start and end within a byte: the other half of it is kept.

    A source that is the window itself is fine and moves nothing. With ``overlap="stage"`` any overlap
    gives what NumPy gives, at the price of a workspace of the window's size.

    ``path`` tells how row-major operands are written: ``"whole"`` (all of the destination), ``"chunk"``
    (one contiguous part of it), ``"rows"`` (separate runs) or ``"empty"``.

    >>> import numpy as np, baracuda as bc
    >>> plan = bc.WriteSlicePlan(dest_shape=(2, 4), ranges=((0, 2), (1, 3)), dtype="int32", device="cpu")
    >>> dest, source = np.zeros((2, 4), np.int32), np.array([[1, 2], [3, 4]], np.int32)
    >>> plan.run(dest=dest, source=source)
    >>> dest.tolist()
    [[0, 1, 2, 0], [0, 3, 4, 0]]
    """

    Descriptor: ClassVar[type[Any]] = WriteSliceDescriptor


Range = tuple[int, int] | slice | EllipsisType


def write_slice(
    dest: T,
    source: Any,
    ranges: Range | Sequence[Range],
    *,
    dtype: Any = None,
    dest_shape: Sequence[int] | None = None,
    overlap: Literal["refuse", "stage"] = "refuse",
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> T:
    """Assigns a block in place: ``dest[ranges] = source``.

    Args:
        dest: the tensor to write into: NumPy, torch, CuPy or anything of DLPack, on the CPU or a GPU.
        source: a tensor of the window's shape, dtype and device.
        ranges: for each axis a ``(start, end)``, or a slice without a step as NumPy has it (``numpy.s_``
            makes them; negative ends count from the back, ``...`` stands for the axes between, axes
            left out are covered whole).
        dtype: ``"int4"`` or ``"uint4"`` for packed bytes; else it is ``dest``'s.
        dest_shape: the shape in elements, for packed bytes; else it is ``dest``'s.
        overlap: what to do with a source that shares elements with the window: ``"refuse"`` or
            ``"stage"``.
        stream: see :meth:`baracuda.Plan.run`.
        preference: what the selection of the kernel must keep to.

    Returns:
        ``dest``.

    Raises:
        InvalidProblemError: a range is outside, or shapes, dtypes or devices differ.

    >>> import numpy as np, baracuda as bc
    >>> cache = np.zeros((2, 8), np.float32)
    >>> bc.write_slice(cache, np.ones((2, 1), np.float32), np.s_[:, 3:4])[0].tolist()
    [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    """
    shape, own_dtype, device = _core.describe(dest, "write_slice: dest")
    if dest_shape is not None:
        shape = integers(dest_shape, "write_slice: dest_shape")
    plan = cached_plan(
        WriteSlicePlan,
        device,
        preference,
        dest_shape=shape,
        ranges=_ranges(ranges, shape),
        dtype=own_dtype if dtype is None else dtype,
        overlap=overlap,
    )
    plan.run(dest=dest, source=source, stream=stream)
    return dest


def _ranges(ranges: Any, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """A (start, end) for each axis."""
    if type(ranges) is tuple and len(ranges) == len(shape):
        for entry in ranges:
            if type(entry) is not tuple or len(entry) != 2 or type(entry[0]) is not int or type(entry[1]) is not int:
                break
        else:
            return ranges
    if isinstance(ranges, (slice, EllipsisType)):
        ranges = (ranges,)
    entries = list(ranges)
    if len(entries) == 2 and all(isinstance(entry, Integral) for entry in entries):
        entries = [tuple(entries)]
    # By identity: an entry may be an array, which compares element by element.
    place = next((place for place, entry in enumerate(entries) if entry is Ellipsis), None)
    if place is not None:
        entries[place : place + 1] = [slice(None)] * (len(shape) - len(entries) + 1)
    entries += [slice(None)] * (len(shape) - len(entries))
    if len(entries) != len(shape):
        raise InvalidProblemError(f"write_slice: ranges: expected at most {len(shape)}, got {len(entries)}")
    return tuple(_range(entry, extent, axis) for axis, (entry, extent) in enumerate(zip(entries, shape, strict=True)))


def _range(entry: Any, extent: int, axis: int) -> tuple[int, int]:
    if isinstance(entry, slice):
        if entry.step not in (None, 1):
            raise InvalidProblemError(f"write_slice: ranges: expected no step on axis {axis}, got {entry.step}")
        start, end, _ = entry.indices(extent)
        return start, max(start, end)
    try:
        start, end = entry
    except (TypeError, ValueError):
        raise InvalidProblemError(
            f"write_slice: ranges: expected (start, end) or a slice on axis {axis}, got {entry!r}"
        ) from None
    where = f"write_slice: ranges: axis {axis}"
    return integer(start, where), integer(end, where)


@dataclass(frozen=True, kw_only=True)
class DynamicWriteSliceDescriptor(Descriptor, operator="dynamic_write_slice"):
    """The problem of :class:`DynamicWriteSlicePlan`.

    Attributes:
        dest_shape: extents of the destination, in elements, rank 1 to 8.
        block_shape: extents of the source, as many; with ``bounds="clamp"`` none is larger than the destination's.
        dtype: any dtype of the library, int4 and uint4 included.
        index_dtype: of the starts, ``"int32"`` or ``"int64"``.
        batched: each entry of the leading axis has starts of its own.
        bounds: ``"drop"`` elements that would fall outside, or ``"clamp"`` the start, so that the whole block
            is inside.
        advance_axis: the axis whose starts grow by the block's extent after the write, or -1: none.
    """

    dest_shape: Sequence[int]
    block_shape: Sequence[int]
    dtype: Any
    index_dtype: Any = "int32"
    batched: bool = False
    bounds: Literal["drop", "clamp"] = "drop"
    advance_axis: int = -1


class DynamicWriteSlicePlan(Plan):
    """``dest[start:start + extent, ...] = source``, in place, with starts that are read on the device.

    A captured CUDA graph thus writes at a new place in every replay. No start can make it write outside of
    the destination, and none is an error: what is outside is dropped, or the start is clamped to
    ``0 <= start <= dest extent - block extent``. Negative starts don't count from the back.

    Operands of ``run``:
        dest (inout): shape ``dest_shape``, any strides whose elements do not overlap.
        source (in): shape ``block_shape``, any strides.
        starts (in): ``index_dtype``, shape ``[rank]``. With ``batched``, shape ``[leading extent, rank]``: entry
            ``i`` of ``source`` goes into entry ``i`` of ``dest`` by row ``i``. Its first column is 0; with
            ``bounds="drop"`` any other number there leaves the entry out. With ``advance_axis`` it is an inout.

    int4 and uint4 are packed as in :class:`WriteSlicePlan`; a start may lie within a byte, and the other half
    of that byte is kept. ``path`` is ``"runs"``, ``"elements"`` (blocks whose rows are short) or ``"empty"``.

    Starts that advance stop at the largest index of their dtype. Advancing is a second, tiny launch.

    >>> import numpy as np, baracuda as bc
    >>> plan = bc.DynamicWriteSlicePlan(
    ...     dest_shape=(6,), block_shape=(2,), dtype="int32", advance_axis=0, device="cpu")
    >>> dest, position = np.zeros(6, np.int32), np.array([1], np.int32)
    >>> for step in (1, 2):
    ...     plan.run(dest=dest, source=np.full(2, step, np.int32), starts=position)
    >>> dest.tolist(), position.tolist()
    ([0, 1, 1, 2, 2, 0], [5])
    """

    Descriptor: ClassVar[type[Any]] = DynamicWriteSliceDescriptor


@dataclass(frozen=True, kw_only=True)
class DynamicWriteSliceBackwardDescriptor(Descriptor, operator="dynamic_write_slice_backward"):
    """The problem of :class:`DynamicWriteSliceBackwardPlan`.

    Attributes:
        dest_shape: of the gradient of the result.
        block_shape: of the source, as in :class:`DynamicWriteSliceDescriptor`.
        dtype: any dtype of the library but int4 and uint4.
        index_dtype: of the starts, ``"int32"`` or ``"int64"``.
        batched: each entry of the leading axis has starts of its own.
        bounds: as in the forward pass.
        gradients: ``"both"``, ``"dest"`` or ``"source"``.
    """

    dest_shape: Sequence[int]
    block_shape: Sequence[int]
    dtype: Any
    index_dtype: Any = "int32"
    batched: bool = False
    bounds: Literal["drop", "clamp"] = "drop"
    gradients: Literal["both", "dest", "source"] = "both"


class DynamicWriteSliceBackwardPlan(Plan):
    """The gradients of :class:`DynamicWriteSlicePlan`, as a function of ``dest`` and ``source``.

    Operands of ``run``:
        grad (in): the gradient of the result, shape ``dest_shape``.
        starts (in): as in the forward pass, before they advanced.
        d_dest (out): shape ``dest_shape``: ``grad`` with the window zeroed. May be ``grad`` itself.
        d_source (out): shape ``block_shape``: the window of ``grad``; zeros for elements that were dropped.

    ``gradients`` says which of the two there are; the other is no operand then. No arithmetic is done.

    >>> import numpy as np, baracuda as bc
    >>> plan = bc.DynamicWriteSliceBackwardPlan(dest_shape=(4,), block_shape=(2,), dtype="int32", device="cpu")
    >>> grad, d_source = np.array([5, 6, 7, 8], np.int32), np.empty(2, np.int32)
    >>> plan.run(grad=grad, starts=np.array([3], np.int32), d_dest=grad, d_source=d_source)
    >>> grad.tolist(), d_source.tolist()
    ([5, 6, 7, 0], [8, 0])
    """

    Descriptor: ClassVar[type[Any]] = DynamicWriteSliceBackwardDescriptor


def dynamic_update_slice(
    dest: T,
    source: Any,
    starts: Any,
    *,
    bounds: Literal["drop", "clamp"] = "drop",
    dtype: Any = None,
    dest_shape: Sequence[int] | None = None,
    block_shape: Sequence[int] | None = None,
    advance_axis: int = -1,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> T:
    """Assigns a block in place at starts that may be on the device: ``dest[start:start + extent, ...] = source``.

    Args:
        dest: the tensor to write into: NumPy, torch, CuPy or anything of DLPack, on the CPU or a GPU.
        source: a tensor of dest's rank, dtype and device.
        starts: an int32 or int64 tensor on dest's device, ``[rank]``, or ``[leading extent, rank]`` for starts
            of each entry's own. Lists of integers are taken, too; for a GPU they are copied there, which waits.
        bounds: ``"drop"`` elements that would fall outside, or ``"clamp"`` the start, as
            ``jax.lax.dynamic_update_slice`` does. A negative start doesn't count from the back.
        dtype: ``"int4"`` or ``"uint4"`` for packed bytes; else it is ``dest``'s.
        dest_shape, block_shape: the shapes in elements, for packed bytes; else they are the tensors'.
        advance_axis: the axis whose starts grow by the block's extent after the write, or -1: none.
        stream: see :meth:`baracuda.Plan.run`.
        preference: what the selection of the kernel must keep to.

    Returns:
        ``dest``.

    >>> import numpy as np, baracuda as bc
    >>> bc.dynamic_update_slice(np.zeros(5, np.int8), np.ones(3, np.int8), [4]).tolist()
    [0, 0, 0, 0, 1]
    >>> bc.dynamic_update_slice(np.zeros(5, np.int8), np.ones(3, np.int8), [4], bounds="clamp").tolist()
    [0, 0, 1, 1, 1]
    """
    own_shape, own_dtype, device = _core.describe(dest, "dynamic_update_slice: dest")
    source_shape = _core.describe(source, "dynamic_update_slice: source")[0]
    starts, starts_shape, index_dtype = _starts(starts, device, stream, "dynamic_update_slice")
    plan = cached_plan(
        DynamicWriteSlicePlan,
        device,
        preference,
        dest_shape=own_shape if dest_shape is None else tuple(dest_shape),
        block_shape=source_shape if block_shape is None else tuple(block_shape),
        dtype=own_dtype if dtype is None else dtype,
        index_dtype=index_dtype,
        batched=len(starts_shape) == 2,
        bounds=bounds,
        advance_axis=advance_axis,
    )
    plan.run(dest=dest, source=source, starts=starts, stream=stream)
    return dest


def dynamic_update_slice_backward(
    grad: Any,
    starts: Any,
    block_shape: Sequence[int],
    *,
    bounds: Literal["drop", "clamp"] = "drop",
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> tuple[Any, Any]:
    """The gradients of :func:`dynamic_update_slice`, seen as a function of ``dest`` and ``source``.

    Args:
        grad: the gradient of the result.
        starts: as in the forward pass.
        block_shape: the source's shape.
        bounds: as in the forward pass.
        stream: see :meth:`baracuda.Plan.run`.
        preference: what the selection of the kernel must keep to.

    Returns:
        ``(d_dest, d_source)``: ``grad`` with the window zeroed; the window, with zeros where the source was
        dropped. New arrays of the kind of ``grad``.

    >>> import numpy as np, baracuda as bc
    >>> d_dest, d_source = bc.dynamic_update_slice_backward(np.arange(1.0, 6.0), [3], (3,))
    >>> d_dest.tolist(), d_source.tolist()
    ([1.0, 2.0, 3.0, 0.0, 0.0], [4.0, 5.0, 0.0])
    """
    shape, dtype, device = _core.describe(grad, "dynamic_update_slice_backward: grad")
    starts, starts_shape, index_dtype = _starts(starts, device, stream, "dynamic_update_slice_backward")
    block = integers(block_shape, "dynamic_update_slice_backward: block_shape")
    plan = cached_plan(
        DynamicWriteSliceBackwardPlan,
        device,
        preference,
        dest_shape=shape,
        block_shape=block,
        dtype=dtype,
        index_dtype=index_dtype,
        batched=len(starts_shape) == 2,
        bounds=bounds,
    )
    d_dest = new_output(grad, shape, dtype, device, stream)
    d_source = new_output(grad, block, dtype, device, stream)
    plan.run(grad=grad, starts=starts, d_dest=d_dest, d_source=d_source, stream=stream)
    return returned(d_dest, grad), returned(d_source, grad)


def _starts(starts: Any, device: str, stream: Any, where: str) -> tuple[Any, tuple[int, ...], str]:
    """Starts as a tensor on the device, their shape and dtype."""
    if isinstance(starts, (list, tuple)):
        host = np.array(starts)
        if host.size and host.dtype.kind not in "iu":
            raise InvalidProblemError(f"{where}: starts: expected integers, got {starts!r}")
        starts = host = host.astype(np.int64)
        if device != "cpu":
            starts = _core.empty(host.shape, "int64", device, stream)
            _core.upload(starts, host)
    shape, dtype, _ = _core.describe(starts, f"{where}: starts")
    return starts, shape, dtype
