# SPDX-License-Identifier: Apache-2.0
"""Operators on regions of images, sample by sample and box by box.

Where samples lie is worked out in the type that the rule is stated in, every operation rounded once; values and sums
are wider than float64, so that they can be the measure of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

MOST_SAMPLES = 2**20
WIDE = np.longdouble


@dataclass(frozen=True)
class Axis:
    """Positions of the samples, [bins, samples of a bin]."""

    positions: Array
    cells: int

    def corners(self, b: int) -> tuple[Array, Array]:
        """The cells beside the samples of a bin that lie inside, two for each, and their weights."""
        p = self.positions[b].astype(WIDE)
        p = np.clip(p[(p >= -1) & (p <= self.cells)], 0, self.cells - 1)
        before = np.floor(p).astype(np.int64)
        beyond = p - before
        after = np.minimum(before + 1, self.cells - 1)
        return np.concatenate([before, after]), np.concatenate([1 - beyond, beyond])

    @property
    def samples(self) -> int:
        """Of a bin, inside or not."""
        return self.positions.shape[1]


def axis_of(
    start: Any, end: Any, cells: int, bins: int, scale: float, sampling_ratio: int, aligned: bool, real: type
) -> Axis | None:
    with np.errstate(over="ignore", invalid="ignore"):
        scale = real(scale)
        shift = real(0.5 if aligned else 0)
        start = real(start) * scale - shift
        end = real(end) * scale - shift
        extent = end - start
        if not np.isfinite(extent):
            return None
        if not aligned:
            extent = max(extent, real(1))
        bin_extent = extent / real(bins)
        grid = real(sampling_ratio) if sampling_ratio > 0 else np.ceil(bin_extent)
        if grid * bins > MOST_SAMPLES:
            return None
        count = max(int(grid), 0)
        b = np.arange(bins).astype(real)[:, None]
        i = np.arange(count).astype(real)[None, :]
        return Axis(start + b * bin_extent + (i + real(0.5)) * bin_extent / grid, cells)


def axes_of(roi: Array, shape: tuple[int, ...], pooled: tuple[int, int], rule: dict[str, Any], real: type) -> Any:
    """(image, axis y, axis x), or None for a RoI that takes no part."""
    batch, x1, y1, x2, y2 = roi.tolist()
    if not (-1 < batch < shape[0]) or 0 in shape[2:]:
        return None
    with np.errstate(over="ignore"):
        x1, y1, x2, y2 = (real(value) for value in (x1, y1, x2, y2))
    axis_y = axis_of(y1, y2, shape[2], pooled[0], real=real, **rule)
    axis_x = axis_of(x1, x2, shape[3], pooled[1], real=real, **rule)
    return None if axis_y is None or axis_x is None else (int(batch), axis_y, axis_x)


def _products(axis_y: Axis, axis_x: Axis) -> Iterator[tuple[tuple[int, int], Array, Array, Array]]:
    """For each bin the four corners of each of its samples: rows, columns and weights, each [corners y, corners x]."""
    for ph, pw in itertools.product(range(axis_y.positions.shape[0]), range(axis_x.positions.shape[0])):
        rows, row_weights = axis_y.corners(ph)
        columns, column_weights = axis_x.corners(pw)
        weight = row_weights[:, None] * column_weights
        yield (ph, pw), np.broadcast_to(rows[:, None], weight.shape), np.broadcast_to(columns, weight.shape), weight


@dataclass(frozen=True)
class Result:
    """A sum, the sum of its terms' magnitudes, and how many roundings lie on the way to it at most."""

    value: Array
    magnitude: Array
    roundings: Array


def roi_align(x: Array, rois: Array, pooled: tuple[int, int], real: type, **rule: Any) -> Result:
    shape = (rois.shape[0], x.shape[1], *pooled)
    value, magnitude = np.zeros(shape, WIDE), np.zeros(shape, WIDE)
    roundings = np.zeros((rois.shape[0], 1, 1, 1))
    wide = x.astype(np.float64).astype(WIDE)
    for r in range(rois.shape[0]):
        axes = axes_of(rois[r], x.shape, pooled, rule, real)
        if axes is None:
            continue
        image, axis_y, axis_x = axes
        count = max(axis_y.samples * axis_x.samples, 1)
        for (ph, pw), row, column, weight in _products(axis_y, axis_x):
            with np.errstate(invalid="ignore"):
                terms = np.where(weight == 0, 0, wide[image][:, row, column] * weight)
                value[r, :, ph, pw] = terms.sum((-2, -1)) / count
                magnitude[r, :, ph, pw] = np.abs(terms).sum((-2, -1)) / count
        # A weight takes a rounding for each of its samples. A bin has at most two cells for each sample of an
        # axis, so as many additions; the products, the mean and what lies around them are the rest.
        roundings[r] = 3 * (axis_y.samples + axis_x.samples) + 6
    return Result(value, magnitude, roundings)


def roi_align_backward(dy: Array, rois: Array, shape: tuple[int, ...], real: type, **rule: Any) -> Result:
    value, magnitude = np.zeros(shape, WIDE), np.zeros(shape, WIDE)
    roundings = np.full((shape[0], 1, *shape[2:]), 6.0)
    channels = np.arange(shape[1])[:, None, None]
    for r in range(rois.shape[0]):
        axes = axes_of(rois[r], shape, dy.shape[2:], rule, real)
        if axes is None:
            continue
        image, axis_y, axis_x = axes
        count = max(axis_y.samples * axis_x.samples, 1)
        for (ph, pw), row, column, weight in _products(axis_y, axis_x):
            given = dy[r, :, ph, pw].astype(np.float64).astype(WIDE)[:, None, None]
            with np.errstate(invalid="ignore"):
                terms = np.where(weight == 0, 0, given * weight / count)
            np.add.at(value[image], (channels, row[None], column[None]), terms)
            np.add.at(magnitude[image], (channels, row[None], column[None]), np.abs(terms))
            # Each bin over a cell is an addition or two; each weight takes a rounding for each of its samples.
            np.add.at(roundings[image, 0], (row, column), 2.0 * (weight != 0))
        roundings[image] += axis_y.samples + axis_x.samples
    return Result(value, magnitude, roundings)


def overlaps(box: Array, others: Array) -> Array:
    """Intersection over union, every operation rounded once in the type of the boxes."""
    with np.errstate(all="ignore"):
        width = np.minimum(box[2], others[:, 2]) - np.maximum(box[0], others[:, 0])
        height = np.minimum(box[3], others[:, 3]) - np.maximum(box[1], others[:, 1])
        shared = np.where(width > 0, width, 0) * np.where(height > 0, height, 0)
        area = (box[2] - box[0]) * (box[3] - box[1])
        areas = (others[:, 2] - others[:, 0]) * (others[:, 3] - others[:, 1])
        return shared / (area + areas - shared)


def nms(boxes: Array, scores: Array, threshold: float, classes: Array | None = None) -> Array:
    """The kept boxes, by comparing each kept box with all that come after it."""
    real = np.float64 if boxes.dtype == np.float64 else np.float32
    wide = boxes.astype(real)
    numbers = scores.astype(np.float64)
    # -nan sorts last, and a stable sort of negated numbers keeps the order of equal ones.
    order = np.argsort(-numbers, kind="stable")
    alive = np.ones(len(order), bool)
    kept = []
    for place, i in enumerate(order):
        if not alive[place]:
            continue
        kept.append(i)
        later = order[place + 1 :]
        hit = overlaps(wide[i], wide[later]) > real(threshold)
        if classes is not None:
            hit &= classes[later] == classes[i]
        alive[place + 1 :] &= ~hit
    return np.array(kept, np.int64)


def roi_pool(x: Array, rois: Array, pooled: tuple[int, int], scale: float, real: type) -> tuple[Array, Array]:
    """(y, argmax), bin by bin."""
    y = np.zeros((rois.shape[0], x.shape[1], *pooled), x.dtype)
    argmax = np.full(y.shape, -1, np.int64)
    for r in range(rois.shape[0]):
        bins = pool_bins(rois[r], x.shape, pooled, scale, real)
        if bins is None:
            continue
        image, rows, columns = bins
        for ph, pw in itertools.product(range(pooled[0]), range(pooled[1])):
            cells = np.arange(x.shape[2] * x.shape[3]).reshape(x.shape[2:])[rows[ph], columns[pw]].reshape(-1)
            if cells.size == 0:
                continue
            values = x[image].reshape(x.shape[1], -1)[:, cells].astype(np.float64)
            # NumPy's maximum is the first NaN, if there is one.
            best = cells[values.argmax(1)]
            argmax[r, :, ph, pw] = best
            y[r, :, ph, pw] = x[image].reshape(x.shape[1], -1)[np.arange(x.shape[1]), best]
    return y, argmax


def pool_bins(roi: Array, shape: tuple[int, ...], pooled: tuple[int, int], scale: float, real: type) -> Any:
    """(image, the rows of each bin, the columns of each bin) as slices, or None for a RoI that takes no part."""
    batch, *corners = roi.tolist()
    if not -1 < batch < shape[0]:
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = [real(corner) * real(scale) for corner in corners]
        x1, y1, x2, y2 = (real(np.copysign(np.floor(abs(s) + real(0.5)), s)) for s in scaled)
        slices = []
        for start, end, cells, bins in ((y1, y2, shape[2], pooled[0]), (x1, x2, shape[3], pooled[1])):
            extent = end - start + real(1)
            if not np.isfinite(extent):
                return None
            step = max(extent, real(1)) / real(bins)
            low = [int(np.clip(np.floor(real(b) * step) + start, 0, cells)) for b in range(bins)]
            high = [int(np.clip(np.ceil(real(b + 1) * step) + start, 0, cells)) for b in range(bins)]
            slices.append([slice(a, b) for a, b in zip(low, high, strict=True)])
    return int(batch), slices[0], slices[1]


def roi_pool_backward(dy: Array, argmax: Array, rois: Array, shape: tuple[int, ...], dx: Array | None = None) -> Array:
    """Sums in the order of the RoIs and their bins, in float32 (float64 for float64), rounded once."""
    real = np.float64 if dy.dtype == np.float64 else np.float32
    sums = np.zeros((shape[0], shape[1], shape[2] * shape[3]), real)
    for r, c in itertools.product(range(dy.shape[0]), range(shape[1])):
        named = argmax[r, c].reshape(-1)
        some = named >= 0
        if some.any():
            # Unbuffered, so one after the other.
            np.add.at(sums[int(rois[r, 0]), c], named[some], dy[r, c].reshape(-1)[some].astype(real))
    sums = sums.reshape(shape)
    return (sums if dx is None else dx.astype(real) + sums).astype(dy.dtype)
