# SPDX-License-Identifier: Apache-2.0
"""Fractional max pooling, plane by plane and output by output.

Starts are exact fractions where the rule allows it, and else NumPy scalars of the type that the rule is
computed in, so that every operation rounds once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox 4x32-10 as Salmon et al. (2011) define it."""
    mask = 0xFFFFFFFF
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & mask, (p0 >> 32) ^ c[3] ^ k[1], p0 & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c[0], c[1], c[2], c[3]


def generated_samples(seed: int, offset: int, batch: int, channels: int, rank: int) -> Array:
    """[batch, channels, rank]"""
    mask = 0xFFFFFFFF
    samples = np.empty((batch * channels, rank), np.float32)
    for plane in range(batch * channels):
        words = philox((offset & mask, offset >> 32 & mask, plane, 0), (seed & mask, seed >> 32 & mask))
        samples[plane] = [(word >> 8) * 2.0**-24 for word in words[:rank]]
    return samples.reshape(batch, channels, rank)


def clamp_sample(u: Any, real: type) -> Any:
    u = real(u)
    if not u > 0:
        return real(0)
    return min(u, np.nextafter(real(1), real(0)))


def exact_start(n: int, k: int, o: int, i: int, u: float) -> Fraction:
    """The real number whose floor placement "even" is."""
    return Fraction(u) * (n - k) if o == 1 else Fraction(i * (n - k), o - 1) + Fraction(u)


def start(n: int, k: int, o: int, i: int, u: Any, placement: str, real: type) -> int:
    u = clamp_sample(u, real)
    last = n - k
    if placement == "torch":
        if i == o - 1:
            return last
        step = real(last) / real(o - 1)
        place = int((real(i) + u) * step) - int(u * step)
    elif o == 1:
        place = int(u * real(last))
    else:
        whole, rest = divmod(i * last, o - 1)
        place = whole + int(real(rest) / real(o - 1) + u >= 1)
    return max(0, min(place, last))


def sample_order(rank: int, placement: str) -> list[int]:
    """Which sample each axis takes."""
    return [1, 0] if rank == 2 and placement == "torch" else list(range(rank))


def starts_of(
    shape: Sequence[int], window: Sequence[int], out: Sequence[int], u: Array, placement: str, real: type
) -> list[list[int]]:
    order = sample_order(len(shape), placement)
    return [
        [start(n, k, o, i, u[order[axis]], placement, real) for i in range(o)]
        for axis, (n, k, o) in enumerate(zip(shape, window, out, strict=True))
    ]


def forward(
    x: Array, window: Sequence[int], out: Sequence[int], samples: Array, placement: str, index_base: str
) -> tuple[Array, Array]:
    """x [n, c, ...] to (y, indices)."""
    real = np.float64 if x.dtype == np.float64 else np.float32
    n, c, *shape = x.shape
    y = np.empty((n, c, *out), x.dtype)
    indices = np.empty((n, c, *out), np.int64)
    cells = int(np.prod(shape))
    for plane, (b, ch) in enumerate(itertools.product(range(n), range(c))):
        starts = starts_of(shape, window, out, samples[b, ch], placement, real)
        flat = x[b, ch].reshape(-1)
        wide = flat.astype(np.float64)
        numbers = np.arange(cells).reshape(shape)
        for place in itertools.product(*map(range, out)):
            box = tuple(slice(starts[axis][i], starts[axis][i] + window[axis]) for axis, i in enumerate(place))
            inside = numbers[box].reshape(-1)
            values = wide[inside]
            nans = np.flatnonzero(np.isnan(values))
            best = nans[-1 if placement == "torch" else 0] if nans.size else int(np.argmax(values))
            y[b, ch][place] = flat[inside[best]]
            indices[b, ch][place] = inside[best] + (plane * cells if index_base == "tensor" else 0)
    return y, indices


def backward(dy: Array, indices: Array, shape: Sequence[int], index_base: str, dx: Array | None = None) -> Array:
    """Sums in the order of the outputs, in float32 (float64 for float64), rounded once.

    `shape` is that of x. All indices must be right. With `dx` the sums are added to it.
    """
    real = np.float64 if dy.dtype == np.float64 else np.float32
    n, c = shape[:2]
    cells = int(np.prod(shape[2:]))
    sums = np.zeros((n * c, cells), real)
    flat_indices = indices.reshape(n * c, -1).astype(np.int64)
    flat_dy = dy.reshape(n * c, -1)
    for plane in range(n * c):
        within = flat_indices[plane] - (plane * cells if index_base == "tensor" else 0)
        # Unbuffered, so one after the other.
        np.add.at(sums[plane], within, flat_dy[plane].astype(real))
    sums = sums.reshape(shape)
    return sums.astype(dy.dtype) if dx is None else (dx.astype(real) + sums).astype(dy.dtype)
