# SPDX-License-Identifier: Apache-2.0
"""Blocks at starts that are data, element by element, and paged caches, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

__all__ = ["append", "gather", "gradients", "quantize", "write"]


def place_of(index: Sequence[int], starts: Sequence[int], dest: Sequence[int], block: Sequence[int], clamp: bool):
    """Where an element of a block goes, or None where that is outside."""
    place = []
    for at, start, extent, size in zip(index, starts, dest, block, strict=True):
        first = min(max(int(start), 0), extent - size) if clamp else int(start)
        place.append(first + at)
    return tuple(place) if all(0 <= at < extent for at, extent in zip(place, dest, strict=True)) else None


def pairs(dest: Sequence[int], block: Sequence[int], starts: np.ndarray, clamp: bool):
    """(index in the block, place in the destination or None), for each element of the block."""
    for index in np.ndindex(*block):
        if starts.ndim == 1:
            yield index, place_of(index, starts, dest, block, clamp)
        else:
            # An entry is a problem of its own, of extent 1 along the leading axis.
            entry = index[0]
            place = place_of((0, *index[1:]), starts[entry], (1, *dest[1:]), (1, *block[1:]), clamp)
            yield index, None if place is None else (entry, *place[1:])


def write(dest: np.ndarray, source: np.ndarray, starts: np.ndarray, clamp: bool) -> None:
    """Elements of `dest` and `source` may themselves be rows: axes that `starts` has no column for."""
    rank = starts.shape[-1]
    for index, place in pairs(dest.shape[:rank], source.shape[:rank], starts, clamp):
        if place is not None:
            dest[place] = source[index]


def gradients(grad: np.ndarray, block: Sequence[int], starts: np.ndarray, clamp: bool) -> tuple[np.ndarray, np.ndarray]:
    d_dest = grad.copy()
    d_source = np.zeros(block, grad.dtype)
    for index, place in pairs(grad.shape, block, starts, clamp):
        if place is not None:
            d_source[index] = grad[place]
            d_dest[place] = 0
    return d_dest, d_source


def append(tokens: np.ndarray, cache: np.ndarray, slots: Sequence[int]) -> None:
    """In order, so that of two tokens with one slot the later one stays."""
    block_size = cache.shape[1]
    for token, slot in enumerate(slots):
        if 0 <= int(slot) < cache.shape[0] * block_size:
            cache[int(slot) // block_size, int(slot) % block_size] = tokens[token]


def gather(cache: np.ndarray, slots: Sequence[int]) -> np.ndarray:
    block_size = cache.shape[1]
    out = np.zeros((len(slots), *cache.shape[2:]), cache.dtype)
    for token, slot in enumerate(slots):
        if 0 <= int(slot) < cache.shape[0] * block_size:
            out[token] = cache[int(slot) // block_size, int(slot) % block_size]
    return out


#: Bits of mantissa, exponent of the smallest normal number, largest finite number.
_FLOAT8 = {"float8_e4m3fn": (3, -6, 448), "float8_e5m2": (2, -14, 57344)}


def quantize(values: np.ndarray, scale: float, dtype: str) -> np.ndarray:
    """The bits of values / scale (a float32 quotient), by exact arithmetic on fractions."""
    mantissa, smallest, largest = _FLOAT8[dtype]
    with np.errstate(all="ignore"):
        quotients = values.astype(np.float32) / np.float32(scale)
    return np.array([_encode(float(q), mantissa, smallest, largest) for q in quotients.ravel()], np.uint8).reshape(
        values.shape
    )


def _encode(value: float, mantissa: int, smallest: int, largest: int) -> Any:
    if np.isnan(value):
        return 0x7F
    sign = 0x80 if np.signbit(value) else 0
    size = min(abs(value), float(largest))
    if size == 0:
        return sign
    exponent = max(int(np.floor(np.log2(size))), smallest)
    # Python rounds fractions to nearest, ties to even.
    steps = round(Fraction(size) / Fraction(2) ** (exponent - mantissa))
    return sign | ((exponent - smallest) * 2**mantissa + steps)
