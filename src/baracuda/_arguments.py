# SPDX-License-Identifier: Apache-2.0
"""Arguments of the function forms, as descriptors and plans take them."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Iterable
from typing import Any

from baracuda.errors import InvalidProblemError

__all__ = ["integer", "integers", "per_axis", "segments_of_offsets", "several"]


def integer(value: Any, where: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidProblemError(f"{where}: expected an integer, got {value!r}") from None


def integers(values: Iterable[Any], where: str) -> tuple[int, ...]:
    return tuple(integer(value, where) for value in _entries(values, "integers", where))


def per_axis(value: Any, rank: int, where: str, convert: Callable[[Any, str], Any] = integer) -> tuple[Any, ...]:
    """One number for all axes, or one for each."""
    if isinstance(value, numbers.Real):
        return (convert(value, where),) * rank
    values = _entries(value, f"one number or {rank}", where)
    if len(values) != rank:
        raise InvalidProblemError(f"{where}: expected one number or {rank}, got {len(values)}")
    return tuple(convert(entry, where) for entry in values)


def several(out: Any, names: tuple[str, ...], where: str) -> tuple[Any, ...]:
    """As many outputs as there are names."""
    if isinstance(out, (tuple, list)) and len(out) == len(names):
        return tuple(out)
    got = f"{len(out)} entries" if isinstance(out, (tuple, list)) else type(out).__name__
    raise InvalidProblemError(f"{where}: out: expected ({', '.join(names)}), got {got}")


def segments_of_offsets(count: int, num_segments: int | None, where: str) -> int:
    """How many segments that many offsets bound, which `num_segments` may say, too."""
    if num_segments is not None and num_segments != count - 1:
        raise InvalidProblemError(
            f"{where}: num_segments: expected {count - 1} for {count} offsets, got {num_segments}"
        )
    return count - 1


def _entries(values: Any, expected: str, where: str) -> tuple[Any, ...]:
    try:
        return tuple(values)
    except TypeError:
        raise InvalidProblemError(f"{where}: expected {expected}, got {values!r}") from None
