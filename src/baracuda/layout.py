# SPDX-License-Identifier: Apache-2.0
"""Moving elements: writing a block into a tensor in place."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from types import EllipsisType
from typing import Any, ClassVar, Literal, TypeVar

from baracuda import _core
from baracuda._base import Descriptor, Plan, cached_plan
from baracuda.errors import InvalidProblemError
from baracuda.plan import PlanPreference

__all__ = ["WriteSliceDescriptor", "WriteSlicePlan", "write_slice"]

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
        shape = tuple(operator.index(extent) for extent in dest_shape)
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
    return operator.index(start), operator.index(end)
