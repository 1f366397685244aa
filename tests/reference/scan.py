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


def _seen(n: int, exclusive: bool) -> np.ndarray:
    """[j, i]: whether output j is of element i."""
    return np.tri(n, n, -1 if exclusive else 0, dtype=bool)


def scan(
    kind: str, x: Any, axis: int = -1, *, reverse: bool = False, exclusive: bool = False, ties: str = "first"
) -> tuple[np.ndarray, np.ndarray]:
    """The outputs, and for cummax and cummin where they are (else zeros)."""
    lines = _lines(x, axis, reverse)
    n = lines.shape[-1]
    seen = _seen(n, exclusive)
    where = np.zeros(lines.shape, np.int64)
    if kind in ("cummax", "cummin"):
        smallest = kind == "cummin"
        wide = lines if lines.dtype.kind in "iub" else lines.astype(np.float64)
        elements = np.where(seen, wide[..., None, :], _identity(lines.dtype, smallest))
        out = elements.min(-1) if smallest else elements.max(-1)
        found = elements == out[..., None]
        if wide.dtype.kind == "f":
            found |= np.isnan(elements) & np.isnan(out)[..., None]
        found &= seen
        # A NaN is an extremum; of NaNs and of equal extrema the first or the last counts.
        place = n - 1 - found[..., ::-1].argmax(-1) if ties == "last" else found.argmax(-1)
        where = np.where(found.any(-1), n - 1 - place if reverse else place, -1)
    else:
        wide = lines.astype(np.int64 if lines.dtype.kind in "iub" else np.float64)
        if kind == "cumsum":
            out = np.where(seen, wide[..., None, :], 0).sum(-1)
        elif kind == "cumprod":
            out = np.where(seen, wide[..., None, :], 1).prod(-1)
        else:
            elements = np.where(seen, wide[..., None, :], -np.inf)
            high = elements.max(-1)
            base = np.where(np.isfinite(high), high, 0)
            with np.errstate(divide="ignore"):
                logs = base + np.log(np.exp(elements - base[..., None]).sum(-1))
            out = np.where(np.isfinite(high), logs, high)
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
    seen = _seen(n, exclusive)
    dx = np.zeros(g.shape)
    magnitude = np.zeros(g.shape)
    for i in range(n):
        # Of all outputs by element i.
        if kind == "cumsum":
            derivative = np.ones(g.shape)
        elif kind == "cumprod":
            others = np.where(np.arange(n) == i, 1.0, values)
            derivative = np.where(seen, others[..., None, :], 1.0).prod(-1)
        elif kind == "logcumsumexp":
            with np.errstate(invalid="ignore", over="ignore"):
                derivative = np.where(values[..., i, None] == -np.inf, 0.0, np.exp(values[..., i, None] - y))
        else:
            derivative = (where == (n - 1 - i if reverse else i)).astype(float)
        used = seen[:, i] & (derivative != 0)
        terms = np.where(used, g, 0) * np.where(used, derivative, 0)
        dx[..., i] = terms.sum(-1)
        magnitude[..., i] = np.abs(terms).sum(-1)
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
    db, m = np.zeros(g.shape), np.zeros(g.shape)
    for i in range(-1, n):
        # What each h_j from i on has of h_i; h_{-1} is h0.
        factors = np.multiply.accumulate(a_[..., i + 1 :], -1)
        if i < 0:
            terms = g * factors
            dh0, m0 = terms.sum(-1), np.abs(terms).sum(-1)
        else:
            terms = g[..., i:] * np.concatenate([np.ones((*g.shape[:-1], 1)), factors], -1)
            db[..., i], m[..., i] = terms.sum(-1), np.abs(terms).sum(-1)
    before = np.concatenate([first[..., None], h_[..., : n - 1]], -1)[..., :n]
    da = db * before
    backs = tuple(_back(v, axis, reverse) for v in (da, db, m * np.abs(before), m))
    return (backs[0], backs[1], dh0), (backs[2], backs[3], m0)
