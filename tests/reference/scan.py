# SPDX-License-Identifier: Apache-2.0
"""Scans and their gradients in float64, each output from its definition: sums over index sets, no recurrences
but the linear one's own. Gradients are dx_i = sum over j of g_j times the derivative of y_j by x_i."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["gradient", "linear_gradient", "linear_recurrence", "scan"]


def _lines(array: Any, axis: int, reverse: bool) -> np.ndarray:
    """The axis last, in scan order."""
    moved = np.moveaxis(np.asarray(array), axis, -1)
    return moved[..., ::-1] if reverse else moved


def _back(lines: np.ndarray, axis: int, reverse: bool) -> np.ndarray:
    return np.moveaxis(lines[..., ::-1] if reverse else lines, -1, axis)


def _place(row: np.ndarray, smallest: bool, last: bool) -> int:
    """Where the extremum of a row of at least one element is. A NaN is one, and of NaNs and of equal
    extrema the first or the last counts."""
    nans = np.flatnonzero(np.isnan(row)) if row.dtype.kind == "f" else []
    if len(nans):
        return int(nans[-1 if last else 0])
    found = np.flatnonzero(row == (row.min() if smallest else row.max()))
    return int(found[-1 if last else 0])


def scan(
    kind: str, x: Any, axis: int = -1, *, reverse: bool = False, exclusive: bool = False, ties: str = "first"
) -> tuple[np.ndarray, np.ndarray]:
    """The outputs, and for cummax and cummin where they are (else zeros)."""
    lines = _lines(x, axis, reverse)
    n = lines.shape[-1]
    integral = lines.dtype.kind in "iub"
    wide = lines if kind in ("cummax", "cummin") else lines.astype(np.int64 if integral else np.float64)
    if not integral:
        wide = lines.astype(np.float64)
    out = np.empty(wide.shape, wide.dtype)
    where = np.zeros(wide.shape, np.int64)
    for at in np.ndindex(*wide.shape[:-1]):
        for j in range(n):
            row = wide[at][: j if exclusive else j + 1]
            if kind == "cumsum":
                out[at][j] = row.sum(dtype=wide.dtype)
            elif kind == "cumprod":
                out[at][j] = row.prod(dtype=wide.dtype)
            elif kind == "logcumsumexp":
                high = row.max() if row.size else -np.inf
                out[at][j] = high if not np.isfinite(high) else high + np.log(np.exp(row - high).sum())
            elif row.size:
                place = _place(row, kind == "cummin", ties == "last")
                out[at][j] = row[place]
                where[at][j] = n - 1 - place if reverse else place
            else:
                out[at][j] = _identity(lines.dtype, kind == "cummin")
                where[at][j] = -1
    return _back(out, axis, reverse), _back(where, axis, reverse)


def _identity(dtype: np.dtype[Any], largest: bool) -> Any:
    if dtype.kind == "b":
        return largest
    if dtype.kind in "iu":
        return np.iinfo(dtype).max if largest else np.iinfo(dtype).min
    return np.inf if largest else -np.inf


def gradient(
    kind: str,
    dy: Any,
    x: Any,
    axis: int = -1,
    *,
    reverse: bool = False,
    exclusive: bool = False,
    ties: str = "first",
) -> tuple[np.ndarray, np.ndarray]:
    """dx, and the sums of the magnitudes of its terms."""
    g, values = (_lines(np.asarray(a, np.float64), axis, reverse) for a in (dy, x))
    y, where = (_lines(a, axis, reverse) for a in scan(kind, x, axis, reverse=reverse, exclusive=exclusive, ties=ties))
    n = g.shape[-1]
    dx = np.zeros(g.shape)
    magnitude = np.zeros(g.shape)
    for at in np.ndindex(*g.shape[:-1]):
        row = values[at]
        for i in range(n):
            for j in range(i + 1 if exclusive else i, n):
                if kind == "cumsum":
                    derivative = 1.0
                elif kind == "cumprod":
                    factors = row[: j if exclusive else j + 1]
                    derivative = np.delete(factors, i).prod()
                elif kind == "logcumsumexp":
                    derivative = 0.0 if row[i] == -np.inf else np.exp(row[i] - y[at][j])
                else:
                    derivative = float(where[at][j] == (n - 1 - i if reverse else i))
                if derivative != 0.0:
                    dx[at][i] += g[at][j] * derivative
                    magnitude[at][i] += abs(g[at][j] * derivative)
    return _back(dx, axis, reverse), _back(magnitude, axis, reverse)


def linear_recurrence(
    a: Any, b: Any, axis: int, *, reverse: bool = False, h0: Any = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """h, and the sums of the magnitudes of its terms."""
    a_, b_ = (_lines(np.asarray(v, np.float64), axis, reverse) for v in (a, b))
    h, magnitude = np.empty(a_.shape), np.empty(a_.shape)
    before = np.broadcast_to(np.asarray(h0, np.float64), a_.shape[:-1])
    size = np.abs(before)
    for j in range(a_.shape[-1]):
        before = a_[..., j] * before + b_[..., j]
        size = np.abs(a_[..., j]) * size + np.abs(b_[..., j])
        h[..., j], magnitude[..., j] = before, size
    return _back(h, axis, reverse), _back(magnitude, axis, reverse)


def linear_gradient(
    dh: Any, a: Any, h: Any, axis: int, *, reverse: bool = False, h0: Any = 0.0
) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(da, db, dh0), and the sums of the magnitudes of their terms."""
    g, a_, h_ = (_lines(np.asarray(v, np.float64), axis, reverse) for v in (dh, a, h))
    n = g.shape[-1]
    first = np.broadcast_to(np.asarray(h0, np.float64), g.shape[:-1])
    da, db, m = np.zeros(g.shape), np.zeros(g.shape), np.zeros(g.shape)
    dh0, m0 = np.zeros(g.shape[:-1]), np.zeros(g.shape[:-1])
    for j in range(n):
        for i in range(j + 1):
            term = g[..., j] * a_[..., i + 1 : j + 1].prod(-1)
            db[..., i] += term
            m[..., i] += np.abs(term)
        term = g[..., j] * a_[..., : j + 1].prod(-1)
        dh0 += term
        m0 += np.abs(term)
    before = np.concatenate([first[..., None], h_[..., : n - 1]], -1)[..., :n]
    da = db * before
    backs = tuple(_back(v, axis, reverse) for v in (da, db, m * np.abs(before), m))
    return (backs[0], backs[1], dh0), (backs[2], backs[3], m0)
