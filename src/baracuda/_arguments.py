# SPDX-License-Identifier: Apache-2.0
"""Numbers that the function forms take, as descriptors take them."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Iterable
from typing import Any

from baracuda.errors import InvalidProblemError

__all__ = ["integer", "integers", "per_axis"]


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


def _entries(values: Any, expected: str, where: str) -> tuple[Any, ...]:
    try:
        return tuple(values)
    except TypeError:
        raise InvalidProblemError(f"{where}: expected {expected}, got {values!r}") from None
