# SPDX-License-Identifier: Apache-2.0
"""Moving elements. A cell is the smallest thing with an address: half a byte for int4 and uint4, a byte for
all others. An element is a row of cells, so one assignment of unsigned bytes serves every dtype and
no bit can be changed by arithmetic."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided

__all__ = ["cells_of", "cells_to_bytes", "element_cells", "pack", "unpack", "view", "write_slice"]


def cells_of(memory: np.ndarray, packed: bool) -> np.ndarray:
    """The cells of bytes, one to a byte."""
    if not packed:
        return memory.copy()
    cells = np.empty(2 * memory.size, np.uint8)
    cells[0::2] = memory % 16
    cells[1::2] = memory // 16
    return cells


def cells_to_bytes(cells: np.ndarray, packed: bool) -> np.ndarray:
    """The inverse of :func:`cells_of`."""
    if not packed:
        return cells
    return (cells[0::2] + 16 * cells[1::2].astype(np.uint16)).astype(np.uint8)


def element_cells(bits: int) -> int:
    """Cells of an element."""
    return 1 if bits == 4 else bits // 8


def view(cells: np.ndarray, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, width: int) -> np.ndarray:
    """Elements of `width` cells: the first at cell `offset`, the others at `strides`, in elements."""
    steps = (*(stride * width for stride in strides), 1)
    return as_strided(cells[offset:], (*shape, width), steps)


def write_slice(dest: np.ndarray, source: np.ndarray, ranges: tuple[tuple[int, int], ...]) -> None:
    """dest[ranges] = source, for views of cells."""
    dest[tuple(slice(start, end) for start, end in ranges)] = source


def pack(values: np.ndarray) -> np.ndarray:
    """Integers to half bytes, the first in the low half."""
    out = np.zeros((values.size + 1) // 2, np.uint8)
    for place, value in enumerate(values.ravel().tolist()):
        out[place // 2] += (value % 16) * (16 if place % 2 else 1)
    return out


def unpack(packed: np.ndarray, shape: tuple[int, ...], signed: bool) -> np.ndarray:
    """Half bytes to integers."""
    count = int(np.prod(shape, dtype=np.int64))
    halves = [int(packed[place // 2]) // (16 if place % 2 else 1) % 16 for place in range(count)]
    return np.array([half - 16 if signed and half > 7 else half for half in halves], np.int64).reshape(shape)
