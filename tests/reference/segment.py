# SPDX-License-Identifier: Apache-2.0
"""Segment reductions and their gradients: `plain_forward` and `plain_backward` define them by loops over segments,
columns and rows, in Python's own numbers (float64, and integers without a limit); `forward` and `backward` give the
same by NumPy, segments side by side."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
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


def plain_forward(kind: str, data: Array, members: list[list[int]], empty: Any = None) -> tuple[Array, Array]:
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


def plain_backward(kind: str, d_output: Array, data: Array, members: list[list[int]], ties: str = "first") -> Array:
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


# ---------------------------------------------------------------------------------------------------
# The same for many rows.


class Grouped:
    """Rows, those of a segment side by side, lowest first."""

    def __init__(self, members: list[list[int]]) -> None:
        self.lengths = np.array([len(rows) for rows in members], np.int64)
        self.rows = np.array(list(itertools.chain.from_iterable(members)), np.int64)
        self.segments = np.repeat(np.arange(len(members)), self.lengths)  # of each of the rows
        self.filled = np.flatnonzero(self.lengths)
        self.starts = (np.cumsum(self.lengths) - self.lengths)[self.filled]

    def reduce(self, ufunc: np.ufunc, values: Array, identity: Any) -> Array:
        """Column by column; `values` are those of the rows, in their order here."""
        result = np.full((self.lengths.size, *values.shape[1:]), identity, values.dtype)
        if self.filled.size:
            result[self.filled] = ufunc.reduceat(values, self.starts, axis=0)
        return result

    def each(self, function: Callable[[list[float]], float], values: Array) -> Array:
        """A function of the values of a segment's column; 0 where there are none."""
        result = np.zeros((self.lengths.size, values.shape[1]))
        ends = self.starts + self.lengths[self.filled]
        for column in range(values.shape[1]):
            own = values[:, column].tolist()
            result[self.filled, column] = [function(own[a:b]) for a, b in zip(self.starts, ends, strict=True)]
        return result


def total_or_nan(values: list[float]) -> float:
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def keys_of(kind: str, data: Array) -> Array:
    """Integers that compare as `beats` says: the higher one wins."""
    if np.issubdtype(data.dtype, np.integer):
        keys = data.astype(np.int64)
        return keys if kind == "max" else ~keys
    bits = data.astype(np.float64).view(np.int64)
    keys = np.where(bits < 0, bits ^ np.iinfo(np.int64).max, bits)
    return np.where(np.isnan(data.astype(np.float64)), np.iinfo(np.int64).max, keys if kind == "max" else ~keys)


def winners_of(kind: str, data: Array, grouped: Grouped) -> tuple[Array, Array]:
    """Which of the rows hold the best of their segment, and the first that does, or N."""
    keys = keys_of(kind, data)[grouped.rows]
    best = grouped.reduce(np.maximum, keys, np.iinfo(np.int64).min)
    wins = keys == best[grouped.segments]
    first = grouped.reduce(np.minimum, np.where(wins, grouped.rows[:, None], data.shape[0]), data.shape[0])
    return wins, first


def forward(kind: str, data: Array, members: list[list[int]], empty: Any = None) -> tuple[Array, Array]:
    """Results in float64 (integers in the dtype of the data), and arg."""
    grouped = Grouped(members)
    columns = data.shape[1]
    integers = np.issubdtype(data.dtype, np.integer)
    values = data[grouped.rows].astype(np.int64 if integers else np.float64)
    arg = np.full((len(members), columns), data.shape[0], np.int64)
    arg[grouped.filled] = grouped.rows[grouped.starts][:, None]
    counts = np.maximum(grouped.lengths, 1)[:, None]
    if kind in ("max", "min"):
        _, arg = winners_of(kind, data, grouped)
        output = np.zeros((len(members), columns), values.dtype)
        output[grouped.filled] = np.take_along_axis(data, arg[grouped.filled], axis=0)
    elif integers:
        # 64 bits that wrap around.
        output = grouped.reduce(np.multiply if kind == "prod" else np.add, values, 0)
        output = output // counts if kind == "mean" else output
    else:
        output = grouped.each(math.prod if kind == "prod" else total_or_nan, values)
        output = output / counts if kind == "mean" else output
    output = output.astype(data.dtype) if integers else output
    output[grouped.lengths == 0] = default_empty(kind, data.dtype) if empty is None else empty
    return output, arg


def backward(kind: str, d_output: Array, data: Array, members: list[list[int]], ties: str = "first") -> Array:
    """In float64; `data` gives the shape, even where its values play no part."""
    grouped = Grouped(members)
    result = np.zeros(data.shape, np.float64)
    dy = d_output.astype(np.float64)[grouped.segments]
    if kind == "mean":
        dy = dy / grouped.lengths[grouped.segments][:, None]
    elif kind == "prod":
        values = data.astype(np.float64)[grouped.rows]
        for start, length in zip(grouped.starts, grouped.lengths[grouped.filled], strict=True):
            for column in range(data.shape[1]):
                own = values[start : start + length, column].tolist()
                dy[start : start + length, column] *= [math.prod(own[:i] + own[i + 1 :]) for i in range(length)]
    elif kind in ("max", "min"):
        wins, first = winners_of(kind, data, grouped)
        if ties == "first":
            wins = grouped.rows[:, None] == first[grouped.segments]
        else:
            nan = np.isnan(data.astype(np.float64))[grouped.rows]
            wins &= ~nan | (grouped.rows[:, None] == first[grouped.segments])
        shares = grouped.reduce(np.add, wins.astype(np.float64), 1)
        dy = np.where(wins, dy / shares[grouped.segments], 0)
    result[grouped.rows] = dy
    return result
