# SPDX-License-Identifier: Apache-2.0
"""Finds the coins in a photograph: proposals, RoI-align, non-maximum suppression, crops.

    python examples/coins.py [coins.png]

The photograph is the one that scikit-image ships; without scikit-image a drawn one takes its place, of which it is
known where the coins are. Squares of several sizes all over the picture are proposals. ``roi_align`` resamples each,
with a margin, to 5 x 5 means; a coin is brighter inside than around. ``nms`` leaves the best proposal of each coin, and
``roi_align`` cuts these out, all at one size. With a file name the picture with the boxes, and the crops below it,
are written as a PNG.
"""

from __future__ import annotations

import importlib.util
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

import baracuda as bc

Array = np.ndarray[Any, np.dtype[Any]]
MARGIN = 1.45
SIDES = (32, 38, 44, 52, 60)
STEP = 4
CROP = 48


def drawn_picture() -> tuple[Array, Array]:
    """Bright discs on a dark ground that isn't even, and their boxes."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:240, :320]
    picture = 30 + 0.15 * x + 6 * rng.standard_normal(x.shape)
    boxes = []
    for row in range(3):
        for column in range(4):
            radius = rng.uniform(17, 27)
            cy, cx = 45 + 75 * row + rng.uniform(-5, 5), 45 + 75 * column + rng.uniform(-5, 5)
            inside = (y - cy) ** 2 + (x - cx) ** 2 < radius**2
            picture[inside] += rng.uniform(90, 140)
            boxes.append([cx - radius, cy - radius, cx + radius, cy + radius])
    return picture.clip(0, 255).astype(np.float32), np.array(boxes, np.float32)


def proposals(shape: tuple[int, int]) -> Array:
    """Squares (x1, y1, x2, y2) that lie inside."""
    boxes = []
    for side in SIDES:
        y, x = np.mgrid[0 : shape[0] - side : STEP, 0 : shape[1] - side : STEP]
        boxes.append(np.stack([x, y, x + side, y + side], -1).reshape(-1, 4))
    return np.concatenate(boxes).astype(np.float32)


def scaled(boxes: Array, factor: float) -> Array:
    centre = (boxes[:, :2] + boxes[:, 2:]) / 2
    half = (boxes[:, 2:] - boxes[:, :2]) / 2 * factor
    return np.concatenate([centre - half, centre + half], 1)


def scores_of(picture: Array, boxes: Array) -> Array:
    """How much brighter and how even a box is inside, against its margin."""
    # Beyond the picture its edge goes on; samples there would count 0.
    around = int(max(SIDES) * (MARGIN - 1) / 2) + 1
    padded = np.pad(picture, around, mode="edge")
    means = bc.roi_align(padded[None, None], [scaled(boxes, MARGIN) + np.float32(around)], 5, aligned=True)[:, 0]
    inside = means[:, 1:4, 1:4].reshape(len(boxes), -1)
    corners = means[:, [0, 0, 4, 4], [0, 4, 0, 4]]
    margin = np.concatenate([means[:, 0], means[:, 4], means[:, 1:4, 0], means[:, 1:4, 4]], 1)
    return inside.min(1) + 0.5 * inside.mean(1) - corners.max(1) - 0.5 * margin.mean(1)


def write_png(path: Path, picture: Array) -> None:
    height, width, _ = picture.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), picture.reshape(height, -1)], 1)

    def piece(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + piece(b"IHDR", header)
        + piece(b"IDAT", zlib.compress(lines.tobytes()))
        + piece(b"IEND", b"")
    )


def sheet(picture: Array, boxes: Array, crops: Array) -> Array:
    """The picture with the boxes drawn in, and the crops below."""
    image = np.repeat(picture[:, :, None], 3, 2)
    for x1, y1, x2, y2 in boxes.round().astype(int).clip(0, [[picture.shape[1] - 1, picture.shape[0] - 1] * 2]):
        for part in (np.s_[y1, x1:x2], np.s_[y2, x1:x2], np.s_[y1:y2, x1], np.s_[y1:y2, x2]):
            image[part] = (255, 60, 40)
    across = picture.shape[1] // CROP
    rows = -(-len(crops) // across)
    below = np.zeros((rows * CROP, picture.shape[1], 3))
    for place, crop in enumerate(crops):
        row, column = divmod(place, across)
        below[row * CROP : (row + 1) * CROP, column * CROP : (column + 1) * CROP] = crop[:, :, None]
    return np.concatenate([image, below]).clip(0, 255).astype(np.uint8)


def main() -> None:
    known = None
    if importlib.util.find_spec("skimage"):
        from skimage import data  # noqa: PLC0415  # only where it is installed

        picture = data.coins().astype(np.float32)
    else:
        picture, known = drawn_picture()
        print("without scikit-image: a drawn picture")

    boxes = proposals(picture.shape)
    scores = scores_of(picture, boxes)
    good = scores > 20
    boxes, scores = boxes[good], scores[good]
    kept = bc.nms(boxes, scores, 0.1)
    found = boxes[kept]
    print(f"{good.size} proposals, {good.sum()} brighter than their margin, {len(found)} coins")
    crops = bc.roi_align(picture[None, None], [found], CROP, aligned=True)[:, 0]
    assert crops.shape == (len(found), CROP, CROP)

    if known is not None:
        centres = (found[:, :2] + found[:, 2:]) / 2
        inside = (known[:, None, :2] < centres).all(-1) & (centres < known[:, None, 2:]).all(-1)
        assert (inside.sum(1) == 1).all()
        assert len(found) == len(known)
        print("each of the drawn coins was found once")
    if len(sys.argv) > 1:
        write_png(Path(sys.argv[1]), sheet(picture, found, crops))
        print(f"see {sys.argv[1]}")


if __name__ == "__main__":
    main()
