# SPDX-License-Identifier: Apache-2.0
"""Which views share memory: the solver against counting. Nothing is run, so there need be no memory."""

from __future__ import annotations

import functools
import itertools
import math
import random
import re

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from support import DTYPES, StridedView

import baracuda as bc

BASE = 1 << 20
DTYPE_NAMES = ("int4", "int8", "bfloat16", "float32", "complex64", "complex128")


def places(shape: tuple[int, ...], strides: tuple[int, ...], first: int, width: int) -> np.ndarray:
    """The half bytes of a view, element by element."""
    at = np.full((), first, np.int64)
    for extent, stride in zip(shape, strides, strict=True):
        at = at[..., None] + np.arange(extent, dtype=np.int64) * stride * width
    return (at[..., None] + np.arange(width)).ravel()


@functools.cache
def copy_of(shape: tuple[int, ...], dtype: str) -> bc.WriteSlicePlan:
    ranges = [(0, extent) for extent in shape]
    return bc.WriteSlicePlan(dest_shape=shape, ranges=ranges, dtype=dtype, device="cpu")


def answer(dest: StridedView, source: StridedView, dtype: str) -> str | None:
    """What the checker says of a copy of the whole."""
    try:
        copy_of(dest.shape, dtype).can_implement(dest=dest, source=source)
    except bc.InvalidProblemError as error:
        message = str(error).removeprefix("WriteSlicePlan: dest: ")
        return re.sub(r", strides .*", "", message)
    return None


def counted(dest: StridedView, source: StridedView, dtype: str) -> str | None:
    width = DTYPES[dtype].bits // 4
    views = [places(view.shape, view.strides, 2 * (view.base + view.byte_offset), width) for view in (dest, source)]
    if np.unique(views[0]).size < views[0].size:
        return "elements share memory"
    if np.array_equal(*views):
        return None
    return "shares memory with source" if np.intersect1d(*views).size else None


def aligned(byte: int, dtype: str) -> int:
    return byte // DTYPES[dtype].alignment * DTYPES[dtype].alignment


@st.composite
def pairs(draw: st.DrawFn) -> tuple[str, StridedView, StridedView]:
    dtype = draw(st.sampled_from(DTYPE_NAMES))
    rank = draw(st.integers(1, 4))
    shape = tuple(draw(st.lists(st.integers(1, 6 if rank < 4 else 3), min_size=rank, max_size=rank)))
    limit = draw(st.sampled_from((3, 8, 40)))
    strides = st.lists(st.integers(-limit, limit), min_size=rank, max_size=rank).map(tuple)
    offset = aligned(draw(st.integers(-limit * 4, limit * 4)), dtype)
    return (
        dtype,
        StridedView(BASE, dtype, shape, draw(strides)),
        StridedView(BASE, dtype, shape, draw(strides), byte_offset=max(offset, 0))
        if offset >= 0
        else StridedView(BASE + offset, dtype, shape, draw(strides)),
    )


@settings(max_examples=5 * settings().max_examples)
@given(pair=pairs())
def test_solver_agrees_with_counting(pair: tuple[str, StridedView, StridedView]) -> None:
    dtype, dest, source = pair
    assert answer(dest, source, dtype) == counted(dest, source, dtype)


def test_solver_agrees_with_counting_on_every_small_view() -> None:
    """All strides of all small shapes: where the rare cases are."""
    found = dict.fromkeys((None, "elements share memory", "shares memory with source"), 0)
    far = StridedView(BASE * 16, "int8", (1, 1), (0, 0))
    for shape in ((2, 2), (3, 2), (2, 3), (4, 3)):
        for strides in itertools.product(range(-7, 8), repeat=2):
            dest = StridedView(BASE, "int8", shape, strides)
            source = StridedView(far.base, "int8", shape, strides)
            expected = counted(dest, source, "int8")
            assert answer(dest, source, "int8") == expected, (shape, strides)
            found[expected] += 1
            if expected is not None:
                continue
            for offset in range(-9, 10, 3):
                for other in ((1, 2), (5, -2), (-3, 7), (0, 4)):
                    source = StridedView(BASE + offset, "int8", shape, other)
                    expected = counted(dest, source, "int8")
                    assert answer(dest, source, "int8") == expected, (shape, strides, offset, other)
                    found[expected] += 1
    # Each answer has been asked for.
    assert min(found.values()) > 100, found


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_partial_elements_count(dtype: str) -> None:
    """Elements may overlap by some of their bytes, where alignment lets them."""
    kind = DTYPES[dtype]
    dest = StridedView(BASE, dtype, (2,), (1,))
    size = 2 * kind.bits // 8 or 1
    for offset in range(-size - 2, size + 3):
        if offset % kind.alignment:
            continue
        source = StridedView(BASE + offset, dtype, (2,), (1,))
        assert answer(dest, source, dtype) == counted(dest, source, dtype), offset


@given(
    shape=st.lists(st.integers(1, 1000), min_size=1, max_size=8).map(tuple),
    order=st.randoms(use_true_random=False),
    gap=st.integers(-3, 3),
)
def test_dense_blocks_are_decided_at_any_size(shape: tuple[int, ...], order: random.Random, gap: int) -> None:
    """Transposed blocks next to each other: far too many elements to count."""
    while np.prod(shape, dtype=object) > 2**60:
        shape = shape[1:]
    # Of very few elements the second block could be the first.
    assume(np.prod(shape, dtype=object) > 3)
    axes = list(range(len(shape)))
    views = []
    for address in (2**61, 2**61 + int(np.prod(shape, dtype=object)) + gap):
        order.shuffle(axes)
        strides = [0] * len(shape)
        step = 1
        for axis in axes:
            strides[axis] = step
            step *= shape[axis]
        views.append(StridedView(address, "uint8", shape, tuple(strides)))
    assert answer(*views, "uint8") == ("shares memory with source" if gap < 0 else None)


@st.composite
def slices_of_one_array(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[tuple[int, int, int]]]]:
    """A shape, and two times (first, step, count) for each axis, the counts being the same."""
    rank = draw(st.integers(1, 8))
    shape = tuple(draw(st.lists(st.integers(1, 2000 if rank < 6 else 100), min_size=rank, max_size=rank)))
    views: list[list[tuple[int, int, int]]] = [[], []]
    for extent in shape:
        steps = [draw(st.integers(1, min(extent, 9))) for _ in views]
        count = draw(st.integers(1, min((extent - 1) // step + 1 for step in steps)))
        for view, step in zip(views, steps, strict=True):
            reach = step * (count - 1)
            first = draw(st.integers(0, extent - 1 - reach))
            view.append((first + reach, -step, count) if draw(st.booleans()) else (first, step, count))
    return shape, views


@settings(max_examples=5 * settings().max_examples)
@given(problem=slices_of_one_array())
def test_slices_of_one_array_are_always_decided(
    problem: tuple[tuple[int, ...], list[list[tuple[int, int, int]]]],
) -> None:
    """They meet where their indices do, axis by axis."""
    shape, slices = problem
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    views = [
        StridedView(
            BASE,
            "uint8",
            tuple(count for _, _, count in view),
            tuple(step * stride for (_, step, _), stride in zip(view, strides, strict=True)),
            byte_offset=sum(first * stride for (first, _, _), stride in zip(view, strides, strict=True)),
        )
        for view in slices
    ]
    same = all(one[0] == two[0] and (one[1] == two[1] or one[2] == 1) for one, two in zip(*slices, strict=True))
    meet = all(
        np.intersect1d(*(first + step * np.arange(count) for first, step, count in axis)).size
        for axis in zip(*slices, strict=True)
    )
    assert answer(*views, "uint8") == ("shares memory with source" if meet and not same else None)


def test_columns_of_a_matrix() -> None:
    """Interleaved, of any size; the first and the last column are neighbours of two rows."""
    rows, columns = 10**9, 10**5
    for first, second, width in ((0, 1, 1), (0, 50_000, 50_000), (1, 99_999, 1)):
        dest = StridedView(BASE, "uint8", (rows, width), (columns, 1), byte_offset=first)
        source = StridedView(BASE, "uint8", (rows, width), (columns, 1), byte_offset=second)
        assert answer(dest, source, "uint8") is None
        # One column more meets the other.
        wider = StridedView(BASE, "uint8", (rows, width), (columns, 1), byte_offset=max(first, second - width + 1))
        assert (answer(wider, source, "uint8") is None) == (wider.byte_offset == second)


@pytest.mark.parametrize("half", [0, 1])
def test_half_bytes_of_one_byte_are_apart(half: int) -> None:
    """Even and odd half bytes interleave without meeting."""
    dest = StridedView(BASE, "int4", (4, 2), (4, 2))
    source = StridedView(BASE, "int4", (4, 2), (-4, 2 if half else 1), byte_offset=6)
    # Both views hold even half bytes only when the steps are even.
    assert answer(dest, source, "int4") == counted(dest, source, "int4")
    assert counted(dest, source, "int4") == "shares memory with source"
    # A view that runs backwards from an odd place.
    backwards = StridedView(BASE, "int4", (2, 4), (-1 + 2 * 4, -2), byte_offset=8)
    assert answer(StridedView(BASE, "int4", (2, 4), (8, 2)), backwards, "int4") == counted(
        StridedView(BASE, "int4", (2, 4), (8, 2)), backwards, "int4"
    )


# The steps of a subset-sum puzzle: whether two such views meet takes a search that grows with every
# axis. The answer may be yes, no or a refusal, but it comes soon, and is never a wrong no.
HARD = (1_009_243, 1_022_117, 1_031_171, 1_041_827, 1_056_023, 1_064_353, 1_071_043, 1_083_289)


def test_what_can_not_be_decided_is_refused() -> None:
    undecided = 0
    for seed in range(30):
        rng = random.Random(seed)
        shape = (9,) * 8
        strides = tuple(step + rng.randrange(1000) for step in HARD)
        others = tuple(step + rng.randrange(1000) for step in HARD)
        dest = StridedView(BASE, "uint8", shape, strides)
        source = StridedView(BASE + rng.randrange(10**6, 10**7), "uint8", shape, others)
        said = answer(dest, source, "uint8")
        assert said in (
            None,
            "elements share memory",
            "shares memory with source",
            "can't tell whether elements share memory",
            "can't tell whether it shares memory with source",
        )
        undecided += said is not None and said.startswith("can't tell")
    assert undecided > 0


@example(outer=2**40, inner=1)
@given(outer=st.integers(1, 2**44), inner=st.integers(1, 2**20))
def test_two_strides_need_no_search(outer: int, inner: int) -> None:
    """Whether (x, y) -> outer x + inner y is one to one has a formula: no common multiple within reach."""
    rows, columns = 1000, 1000
    dest = StridedView(2**61, "uint8", (rows, columns), (outer, inner))
    source = StridedView(2**50, "uint8", (rows, columns), (columns, 1))
    common = math.lcm(outer, inner)
    meets = common // outer < rows and common // inner < columns
    said = answer(dest, source, "uint8")
    assert said == ("elements share memory" if meets else None)
