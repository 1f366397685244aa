# SPDX-License-Identifier: Apache-2.0
"""Segment reductions and their gradients by plain loops: over segments, columns and rows, in Python's own
numbers (float64, and integers without a limit)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def rows_of_segments(form: str, ids: Array, rows: int, segments: int) -> list[list[int]]:
    """The rows of each segment, lowest first."""
    if form == "offsets":
        clamped = [min(max(int(offset), 0), rows) for offset in ids]
        return [list(range(clamped[s], clamped[s + 1])) for s in range(segments)]
    members: list[list[int]] = [[] for _ in range(segments)]
    for row, number in enumerate(ids.tolist()):
        if 0 <= number < segments:
            members[number].append(row)
    return members


def number(value: Any) -> Any:
    """An element as a Python number; float16 and bfloat16 are exact in float64."""
    return int(value) if np.issubdtype(np.asarray(value).dtype, np.integer) else float(value)


def is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def beats(kind: str, value: Any, best: Any) -> bool:
    """Whether a value is better than the best before it. NaN beats all; +0 is above -0."""
    if is_nan(best):
        return False
    if is_nan(value):
        return True
    if value == best == 0 and isinstance(value, float):
        value, best = math.copysign(1, value), math.copysign(1, best)
    return value > best if kind == "max" else value < best


def default_empty(kind: str, dtype: np.dtype[Any]) -> Any:
    if kind in ("sum", "mean"):
        return 0
    if kind == "prod":
        return 1
    if np.issubdtype(dtype, np.integer):
        return np.iinfo(dtype).min if kind == "max" else np.iinfo(dtype).max
    return -math.inf if kind == "max" else math.inf


def reduce_one(kind: str, values: Sequence[Any]) -> tuple[Any, int]:
    """The result of a segment's column, which is not empty, and the place of the maximum or minimum in it."""
    place = 0
    if kind in ("max", "min"):
        for index, value in enumerate(values):
            if index and beats(kind, value, values[place]):
                place = index
        return values[place], place
    if kind == "prod":
        product: Any = 1
        for value in values:
            product = product * value
        return product, place
    if isinstance(values[0], int):
        total = sum(values)
        return (wrapped(total, np.dtype("int64")) // len(values) if kind == "mean" else total), place
    # What fsum can't do: inf - inf.
    exact = math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
    return (exact / len(values) if kind == "mean" else exact), place


def wrapped(value: int, dtype: np.dtype[Any]) -> int:
    """An integer modulo what the dtype holds."""
    bits = dtype.itemsize * 8
    value &= (1 << bits) - 1
    return value - (1 << bits) if np.issubdtype(dtype, np.signedinteger) and value >> (bits - 1) else value


def forward(kind: str, data: Array, members: list[list[int]], empty: Any = None) -> tuple[Array, Array]:
    """Results in float64 (integers in the dtype of the data), and arg."""
    columns = data.shape[1]
    integers = np.issubdtype(data.dtype, np.integer)
    output = np.zeros((len(members), columns), data.dtype if integers else np.float64)
    arg = np.full((len(members), columns), data.shape[0], np.int64)
    if empty is None:
        empty = default_empty(kind, data.dtype)
    for segment, rows in enumerate(members):
        for column in range(columns):
            if not rows:
                output[segment, column] = empty
                continue
            value, place = reduce_one(kind, [number(data[row, column]) for row in rows])
            output[segment, column] = wrapped(value, data.dtype) if integers else value
            arg[segment, column] = rows[place]
    return output, arg


def same(a: float, b: float) -> bool:
    """Whether two numbers tie: zeros of both signs are different."""
    return a == b and math.copysign(1, a) == math.copysign(1, b)


def backward(kind: str, d_output: Array, data: Array, members: list[list[int]], ties: str = "first") -> Array:
    """In float64; `data` gives the shape, even where its values play no part."""
    result = np.zeros(data.shape, np.float64)
    for segment, rows in enumerate(members):
        for column in range(data.shape[1]):
            dy = float(d_output[segment, column])
            values = [float(data[row, column]) for row in rows]
            if not rows:
                continue
            if kind in ("sum", "mean"):
                shares = [dy if kind == "sum" else dy / len(rows)] * len(rows)
            elif kind == "prod":
                shares = [dy * math.prod(values[:i] + values[i + 1 :]) for i in range(len(rows))]
            else:
                best, place = reduce_one(kind, values)
                winners = [place]
                if ties == "even" and not is_nan(best):
                    winners = [i for i, value in enumerate(values) if same(value, best)]
                shares = [dy / len(winners) if i in winners else 0.0 for i in range(len(rows))]
            for row, share in zip(rows, shares, strict=True):
                result[row, column] = share
    return result
