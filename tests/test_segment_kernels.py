# SPDX-License-Identifier: Apache-2.0
"""Segment reductions of the sizes and orders that each kernel is for, against plain loops."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import support
from segment_problems import (
    EXTREMES,
    FLOATS,
    FORMS,
    HOSTILE,
    KINDS,
    TINY,
    UNIT,
    assert_close,
    assert_same_numbers,
    backward,
    check_backward,
    check_forward,
    forward,
    make_data,
    make_ids,
)
from support import INPUT_LAYOUTS, OUTPUT_LAYOUTS, Backend, assert_same_bits

import baracuda as bc
from reference import segment as reference


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [(150, 12, 9), (300, 1, 20), (70, 5, 100), (400, 4, 2)], ids=str)
def test_kernels_under_the_sanitizer(backend: Backend, size: tuple[int, int, int], form: str, dtype: str) -> None:
    rows, columns, segments = size
    rng = np.random.default_rng(3)
    ids = make_ids(rng, form, rows, segments, "int64", hostile=True)
    members = reference.rows_of_segments(form, ids, rows, segments)
    data = make_data(rng, (rows, columns), dtype)
    d_output = rng.standard_normal((segments, columns)).astype(data.dtype)
    for kind in ("sum", "max", "prod"):
        output, arg = forward(backend, kind, data, ids, segments, form, return_arg=kind == "max")
        check_forward(kind, data, members, output, arg)
        for ties in ("first", "even"):
            check_backward(
                kind, d_output, data, members, backward(backend, kind, d_output, data, ids, form, ties=ties), ties
            )
        if arg is not None:
            given_arg = backward(backend, kind, d_output, data, ids, form, arg=arg)
            check_backward(kind, d_output, data, members, given_arg, "first")


@pytest.mark.parametrize("output_layout", OUTPUT_LAYOUTS)
@pytest.mark.parametrize("input_layout", INPUT_LAYOUTS)
def test_layouts(backend: Backend, input_layout: str, output_layout: str) -> None:
    rng = np.random.default_rng(1)
    rows, columns, segments = 60, 12, 9
    ids = make_ids(rng, "unsorted", rows, segments, hostile=True)
    members = reference.rows_of_segments("unsorted", ids, rows, segments)
    layouts = (input_layout, output_layout)
    for dtype in ("float32", "bfloat16"):
        data = make_data(rng, (rows, columns), dtype)
        d_output = rng.standard_normal((segments, columns)).astype(data.dtype)
        if input_layout == "broadcast":
            data[...] = data[:1]
            d_output[...] = d_output[:1]
        for misalign in (0, 1):
            options = {"layouts": layouts, "misalign": misalign}
            plain = forward(backend, "max", data, ids, segments, return_arg=True)
            output, arg = forward(backend, "max", data, ids, segments, return_arg=True, **options)
            assert_same_bits(output, plain[0])
            np.testing.assert_array_equal(arg, plain[1])
            check_forward("sum", data, members, forward(backend, "sum", data, ids, segments, **options)[0])
            for kind in ("mean", "max"):
                got = backward(backend, kind, d_output, data, ids, **options)
                check_backward(kind, d_output, data, members, got, "first")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", list(itertools.product((0, 3), repeat=3)), ids=str)
def test_empty_extents(backend: Backend, size: tuple[int, int, int], form: str) -> None:
    rows, columns, segments = size
    ids = np.zeros(segments + 1 if form == "offsets" else rows, np.int64)
    if form == "offsets":
        ids[1:] = rows
    members = reference.rows_of_segments(form, ids, rows, segments)
    data = np.ones((rows, columns), np.float32)
    for kind in KINDS:
        output, arg = forward(backend, kind, data, ids, segments, form, return_arg=kind in EXTREMES)
        check_forward(kind, data, members, output, arg)
        d_output = np.full((segments, columns), 3, np.float32)
        for ties in ("first", "even"):
            got = backward(backend, kind, d_output, data, ids, form, ties=ties)
            check_backward(kind, d_output, data, members, got, ties)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize(
    ("rows", "columns", "sizes"),
    [
        pytest.param(9000, 3, (9000,), id="one segment of many rows"),
        pytest.param(9000, 1, (4100, 0, 1, 4899), id="long and empty ones, one column"),
        pytest.param(6000, 4, (1, 2000, 1, 1, 3000, 0, 0, 997), id="long among short"),
        pytest.param(3000, 1, (1,) * 3000, id="one row each"),
        pytest.param(5000, 2, (0,) * 2000 + (5000,) + (0,) * 3000, id="long between many empty"),
    ],
)
def test_segment_sizes(
    backend: Backend, rows: int, columns: int, sizes: tuple[int, ...], dtype: str, form: str
) -> None:
    """Segments that kernels cut into pieces give what whole ones give."""
    rng = np.random.default_rng(8)
    segments = len(sizes)
    ids = np.repeat(np.arange(segments), sizes)
    if form == "unsorted":
        ids = rng.permutation(ids)
    if form == "offsets":
        ids = np.concatenate([[0], np.cumsum(sizes)])
    order = np.argsort(ids, kind="stable") if form == "unsorted" else np.arange(rows)
    starts = np.concatenate([[0], np.cumsum(sizes)])[:-1]
    data = rng.standard_normal((rows, columns)).astype(support.DTYPES[dtype].numpy)
    filled = np.array(sizes) > 0
    exact = data.astype(np.float64)[order]
    expected = np.zeros((segments, columns))
    expected[filled] = np.add.reduceat(exact, starts[filled], axis=0)
    scale = np.zeros((segments, columns))
    scale[filled] = np.add.reduceat(np.abs(exact), starts[filled], axis=0)
    real = UNIT["float64" if dtype == "float64" else "float32"]
    counts = np.array(sizes).reshape(-1, 1)
    output, _ = forward(backend, "sum", data, ids, segments, form)
    # NumPy's own sums are rounded in float64.
    roundings = counts * (2 if dtype == "float64" else 1) * real * 1.01
    assert_close(output, expected, roundings * scale + UNIT[dtype] * np.abs(expected) + TINY[dtype])

    highest = np.full((segments, columns), -np.inf)
    highest[filled] = np.maximum.reduceat(exact, starts[filled], axis=0)
    output, arg = forward(backend, "max", data, ids, segments, form, return_arg=True)
    assert_same_numbers(output, highest.astype(data.dtype))
    assert (arg[~filled] == rows).all()
    of_row = np.empty(rows, np.int64)
    of_row[order] = np.repeat(np.arange(segments), sizes)
    d_output = rng.standard_normal((segments, columns)).astype(data.dtype)
    expected_gradient = np.zeros_like(data)
    for column in range(columns):
        ties = exact[:, column] == highest[np.repeat(np.arange(segments), sizes), column]
        first = np.full(segments, rows)
        np.minimum.at(first, of_row[order][ties], order[ties])
        np.testing.assert_array_equal(arg[:, column], first)
        expected_gradient[first[filled], column] = d_output[filled, column]
    for given_arg in (None, arg):
        assert_same_bits(backward(backend, "max", d_output, data, ids, form, arg=given_arg), expected_gradient)
    assert_same_bits(backward(backend, "sum", d_output, data, ids, form), d_output[of_row])


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [(1500, 24, 2), (500, 40, 10), (250, 136, 6), (300, 16, 50)], ids=str)
def test_maxima_of_wide_rows(backend: Backend, size: tuple[int, int, int], form: str, dtype: str) -> None:
    """Long and short segments, columns that fill no power of two, rows that are dropped, and ties."""
    rows, columns, segments = size
    rng = np.random.default_rng(14)
    ids = make_ids(rng, form, rows, segments, hostile=form != "offsets")
    members = reference.rows_of_segments(form, ids, rows, segments)
    data = make_data(rng, (rows, columns), dtype)
    data[rng.random(data.shape) < 0.2] = -0.0
    data[rng.random(data.shape) < 0.2] = 0.0
    data[rng.random(data.shape) < 2e-3] = np.nan
    d_output = rng.standard_normal((segments, columns)).astype(data.dtype)
    for kind in EXTREMES:
        output, _ = forward(backend, kind, data, ids, segments, form)
        check_forward(kind, data, members, output)
        d_input = backward(backend, kind, d_output, data, ids, form)
        check_backward(kind, d_output, data, members, d_input, "first")


@pytest.mark.sanitizer
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("how", ["even", "skewed", "one", "outside"])
@pytest.mark.parametrize(
    ("rows", "segments"),
    [(1, 1), (4095, 1), (4097, 511), (8193, 512), (20001, 99999), (3000, 2**20)],
)
def test_ids_are_sorted(backend: Backend, rows: int, segments: int, how: str, index_dtype: str) -> None:
    """Tiles of rows that aren't full, and ids of one to three digits, many of them the same or none."""
    rng = np.random.default_rng(15)
    ids = make_ids(rng, "unsorted", rows, segments, index_dtype, hostile=True)
    if how == "skewed":
        ids[rng.random(rows) < 0.7] = segments - 1
    elif how != "even":
        ids[:] = segments // 2 if how == "one" else segments
    data = rng.integers(-1000, 1000, (rows, 3)).astype(np.int32)
    inside = (ids >= 0) & (ids < segments)
    total = np.zeros((segments, 3), np.int32)
    np.add.at(total, ids[inside], data[inside])
    np.testing.assert_array_equal(forward(backend, "sum", data, ids, segments)[0], total)
    first = np.full((segments, 3), rows, index_dtype)
    np.minimum.at(first, ids[inside], np.flatnonzero(inside)[:, None].astype(index_dtype))
    arg = forward(backend, "max", np.zeros_like(data), ids, segments, return_arg=True)[1]
    np.testing.assert_array_equal(arg, first)


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("path", "size"),
    [
        ("buckets", (17000, 1, 900)),
        ("buckets", (16400, 1, 4000)),
        ("few", (17000, 2, 30)),
        ("few", (16384, 8, 5)),
        ("shared", (70000, 16, 3)),
        ("shared", (70000, 24, 90)),
        ("shared", (70001, 16, 80)),
    ],
    ids=str,
)
def test_many_rows_in_any_order(backend: Backend, path: str, size: tuple[int, int, int], dtype: str) -> None:
    """Maxima that kernels find without sorting."""
    rows, columns, segments = size
    if not backend.is_cuda:
        rows //= 16
    rng = np.random.default_rng(12)
    ids = make_ids(rng, "unsorted", rows, segments, "int32" if dtype == "float16" else "int64", hostile=True)
    if path == "shared":
        ids[: rows // 4] = segments - 1
    members = reference.rows_of_segments("unsorted", ids, rows, segments)
    plan = bc.SegmentReducePlan(
        kind="max", num_inputs=rows, embedding_dim=columns, num_segments=segments, dtype=dtype, device=backend.device
    )
    assert plan.path == (path if backend.is_cuda else "direct")
    data = make_data(rng, (rows, columns), dtype)
    data[rng.random(data.shape) < 1e-4] = np.nan
    d_output = rng.standard_normal((segments, columns)).astype(data.dtype)
    for kind in EXTREMES:
        output, arg = forward(backend, kind, data, ids, segments, return_arg=True)
        check_forward(kind, data, members, output, arg)
        for misalign in (0, 1):
            assert_same_bits(forward(backend, kind, data, ids, segments, misalign=misalign)[0], output)
        d_input = backward(backend, kind, d_output, data, ids)
        check_backward(kind, d_output, data, members, d_input, "first")
        assert_same_bits(backward(backend, kind, d_output, data, ids, arg=arg), d_input)


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("form", ["unsorted", "sorted"])
@pytest.mark.parametrize("size", [(36000, 1, 240), (16385, 40, 101), (16500, 67, 33), (16384, 1, 7)], ids=str)
def test_sums_of_many_rows(backend: Backend, size: tuple[int, int, int], form: str, dtype: str) -> None:
    """Sums and maxima of few segments, of more rows than one block takes, and with rows that are dropped."""
    rows, columns, segments = size
    if not backend.is_cuda:
        rows //= 16
    rng = np.random.default_rng(13)
    ids = make_ids(rng, form, rows, segments, hostile=True)
    grouped = reference.Grouped(reference.rows_of_segments(form, ids, rows, segments))
    data = rng.standard_normal((rows, columns)).astype(support.DTYPES[dtype].numpy)
    values = data.astype(np.float64)[grouped.rows]
    exact, magnitude = (grouped.reduce(np.add, some, 0) for some in (values, np.abs(values)))
    highest = grouped.reduce(np.maximum, values, -np.inf)
    counts = grouped.lengths.reshape(-1, 1)
    for kind, divisor in (("sum", 1), ("mean", np.maximum(counts, 1))):
        bound = (counts + 1) * UNIT["float32"] * 1.01 * magnitude / divisor
        expected = exact / divisor
        outputs = [forward(backend, kind, data, ids, segments, form, misalign=m)[0] for m in (0, 1, 4)]
        assert_close(outputs[0], expected, bound + UNIT[dtype] * np.abs(expected) + TINY[dtype])
        for other in outputs[1:]:
            assert_same_bits(other, outputs[0])
    output, arg = forward(backend, "max", data, ids, segments, form, return_arg=True)
    assert_same_numbers(output, highest.astype(data.dtype))
    filled = counts[:, 0] > 0
    np.testing.assert_array_equal(np.take_along_axis(data, arg[filled], axis=0), output[filled])
    assert (ids[arg[filled]] == np.flatnonzero(filled)[:, None]).all()
    assert_same_bits(forward(backend, "max", data, ids, segments, form)[0], output)


def spread_ids(rng: np.random.Generator, how: str, rows: int, segments: int, form: str) -> np.ndarray:
    """Ids, or offsets, of which some segments have nearly all rows, or all rows, or none."""
    if how == "even":
        ids = rng.integers(0, segments, rows)
    elif how == "skewed":
        ids = np.minimum((np.exp(rng.random(rows) * np.log(segments / 2 + 1)) * 2 - 2).astype(np.int64), segments - 1)
        ids = rng.permutation(segments)[ids]
    elif how == "one":
        ids = np.full(rows, segments // 2)
        ids[rng.random(rows) < 0.01] = segments - 1
    else:
        ids = rng.choice(np.array([0, 1, segments // 3, segments - 1]), rows)
    if form == "unsorted":
        dropped = rng.random(rows) < 0.05
        return np.where(dropped, rng.choice(np.array(HOSTILE["int64"]), rows), ids)
    ids = np.sort(ids)
    if form == "sorted":
        ids[: rows // 50] = HOSTILE["int64"][1]
        ids[-(rows // 50) :] = segments
        return ids
    return np.searchsorted(ids, np.arange(segments + 1)) - (rng.random() < 0.5)


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("how", ["even", "skewed", "one", "four"])
@pytest.mark.parametrize("form", ["sorted", "offsets"])
def test_wide_rows_where_they_are(backend: Backend, form: str, how: str, dtype: str) -> None:
    """Segments of any length, long ones in pieces, and ids that skip many; of every layout the same bits."""
    for rows, columns, segments in ((5000, 24, 900), (3000, 136, 20), (2500, 16, 9000), (9000, 16, 40)):
        rng = np.random.default_rng(rows)
        ids = spread_ids(rng, how, rows, segments, form)
        members = reference.rows_of_segments(form, ids, rows, segments)
        data = make_data(rng, (rows, columns), dtype)
        data[rng.random(data.shape) < 1e-4] = np.nan
        plan = bc.SegmentReducePlan(
            kind="sum", num_inputs=rows, embedding_dim=columns, num_segments=segments, dtype=dtype, ids=form,
            device=backend.device,
        )  # fmt: skip
        assert plan.path == ("rows" if backend.is_cuda else "direct")
        layouts = [{}, {"misalign": 1}, {"layouts": ("stepped", "stepped")}]
        for kind in ("sum", "mean", *EXTREMES):
            outputs = [forward(backend, kind, data, ids, segments, form, **options)[0] for options in layouts]
            check_forward(kind, data, members, outputs[0])
            for other in outputs[1:]:
                assert_same_bits(other, outputs[0])
        output, arg = forward(backend, "max", data, ids, segments, form, return_arg=True)
        check_forward("max", data, members, output, arg)
        d_output = rng.standard_normal((segments, columns)).astype(data.dtype)
        for ties in ("first", "even"):
            d_input = backward(backend, "max", d_output, data, ids, form, ties=ties)
            check_backward("max", d_output, data, members, d_input, ties)


@pytest.mark.sanitizer
@pytest.mark.parametrize(("dtype", "index_dtype"), [("bfloat16", "int64"), ("float16", "int32")])
@pytest.mark.parametrize("how", ["even", "skewed", "one", "four"])
@pytest.mark.parametrize("size", [(16500, 64, 100), (120001, 32, 2500), (30001, 256, 3), (40003, 64, 20000)], ids=str)
def test_sorted_rows_in_tiles(
    backend: Backend, size: tuple[int, int, int], how: str, dtype: str, index_dtype: str
) -> None:
    """Segments of one warp, of several, of several blocks, and ids that skip few or many; of every layout the same."""
    rows, columns, segments = size
    if not backend.is_cuda:
        rows //= 16
    rng = np.random.default_rng(rows)
    ids = spread_ids(rng, how, rows, segments, "sorted").astype(index_dtype)
    members = reference.rows_of_segments("sorted", ids, rows, segments)
    data = make_data(rng, (rows, columns), dtype)
    data[rng.random(data.shape) < 1e-4] = np.nan
    for kind in EXTREMES:
        output = forward(backend, kind, data, ids, segments, "sorted")[0]
        check_forward(kind, data, members, output)
        assert_same_bits(forward(backend, kind, data, ids, segments, "sorted", misalign=1)[0], output)
        other = forward(backend, kind, data, ids, segments, "sorted", layouts=("stepped", "stepped"))[0]
        assert_same_bits(other, output)


@pytest.mark.sanitizer
@pytest.mark.parametrize("segments", [90, 20000])
def test_ids_that_fall_where_they_must_not(backend: Backend, segments: int) -> None:
    """Whatever is found, nothing is written elsewhere."""
    rng = np.random.default_rng(21)
    ids = make_ids(rng, "unsorted", 40003, segments, hostile=True)
    data = make_data(rng, (40003, 64), "bfloat16")
    for kind in EXTREMES:
        forward(backend, kind, data, ids, segments, "sorted")


COLUMN_SIZES = ((16384, 300), (20001, 5000), (33333, 16000), (16391, 90000))


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("how", ["even", "skewed", "one", "four"])
@pytest.mark.parametrize("form", FORMS)
def test_single_columns(backend: Backend, form: str, how: str, dtype: str) -> None:
    """Of many rows, however they are spread over segments."""
    for rows, segments in COLUMN_SIZES if backend.is_cuda else [(3001, 700)]:
        rng = np.random.default_rng(rows)
        ids = spread_ids(rng, how, rows, segments, form)
        if rows == 20001 and form == "offsets":
            ids = ids.astype(np.int32)
        members = reference.rows_of_segments(form, ids, rows, segments)
        data = make_data(rng, (rows, 1), dtype)
        data[rng.random(data.shape) < 2e-4] = np.nan
        data[rng.random(data.shape) < 2e-4] = np.inf
        data[rng.random(data.shape) < 2e-4] = -np.inf
        with np.errstate(invalid="ignore"):
            for kind in ("sum", "mean"):
                plain, _ = forward(backend, kind, data, ids, segments, form)
                check_forward(kind, data, members, plain)
                assert_same_bits(forward(backend, kind, data, ids, segments, form, misalign=1)[0], plain)
        filled = [bool(own) for own in members]
        for kind in EXTREMES:
            output, arg = forward(backend, kind, data, ids, segments, form, return_arg=True)
            check_forward(kind, data, members, output, arg)
            assert_same_bits(forward(backend, kind, data, ids, segments, form, misalign=1)[0], output)
            d_output = rng.standard_normal((segments, 1)).astype(data.dtype)
            expected = np.zeros_like(data)
            expected[arg[filled, 0], 0] = d_output[filled, 0]
            assert_same_bits(backward(backend, kind, d_output, data, ids, form), expected)
            assert_same_bits(backward(backend, kind, d_output, data, ids, form, arg=arg), expected)


@pytest.mark.parametrize("spread", [0, 8, 90])
@pytest.mark.parametrize("how", ["even", "skewed", "one"])
def test_sums_in_buckets_are_as_good_as_exact(backend: Backend, how: str, spread: int) -> None:
    """n of N rows lose less than n * N * 2^-61 of the segment's largest magnitude, and the result is rounded to
    float32; so neither the order of rows nor what other segments hold makes a difference."""
    rows, segments = (40000, 3000) if backend.is_cuda else (4000, 300)
    rng = np.random.default_rng(17)
    ids = spread_ids(rng, how, rows, segments, "unsorted")
    scale = 2.0 ** rng.integers(-spread, spread + 1, segments)
    known = (ids >= 0) & (ids < segments)
    data = rng.standard_normal(rows) * np.where(known, scale[np.where(known, ids, 0)], 1e30)
    # What cancels leaves nothing but errors.
    partner = rng.permutation(rows)[: rows // 2]
    data[partner] *= 2.0 ** rng.integers(-20, 1, partner.size)
    data = data.astype(np.float32)[:, None]
    plan = bc.SegmentReducePlan(
        kind="sum", num_inputs=rows, embedding_dim=1, num_segments=segments, dtype="float32", device=backend.device
    )
    output, _ = forward(backend, "sum", data, ids, segments)
    members = reference.rows_of_segments("unsorted", ids, rows, segments)
    if not backend.is_cuda:
        check_forward("sum", data, members, output)
        return
    assert plan.path == "buckets"
    for segment, own in enumerate(members):
        values = [float(data[row, 0]) for row in own]
        exact = math.fsum(values)
        lost = len(own) * rows * 2.0**-61 * max(map(abs, values), default=0.0)
        bound = abs(exact) * UNIT["float32"] + lost * (1 + UNIT["float32"]) + TINY["float32"]
        assert abs(float(output[segment, 0]) - exact) <= bound
    shuffled = rng.permutation(rows)
    if how != "one":
        assert_same_bits(forward(backend, "sum", data[shuffled], ids[shuffled], segments)[0], output)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [(20000, 1, 3000), (900, 8, 70), (300, 5, 40), (40, 3, 0)], ids=str)
def test_sums_in_any_order(backend: Backend, size: tuple[int, int, int], dtype: str) -> None:
    """What deterministic=False allows: the same sums within the same bounds."""
    rows, columns, segments = size
    rng = np.random.default_rng(19)
    ids = make_ids(rng, "unsorted", rows, segments, hostile=True)
    members = reference.rows_of_segments("unsorted", ids, rows, segments)
    data = rng.standard_normal((rows, columns)).astype(support.DTYPES[dtype].numpy)
    any_order = bc.PlanPreference(deterministic=False)
    for kind in ("sum", "mean"):
        for options in ({}, {"empty_value": 3.0}, {"layouts": ("stepped", "stepped")}):
            output, _ = forward(backend, kind, data, ids, segments, preference=any_order, **options)
            filled = [bool(own) for own in members]
            if segments:
                check_forward(kind, data, [own for own in members if own], output[filled])
            assert (output[~np.array(filled, bool)] == options.get("empty_value", 0)).all()
    plan = bc.SegmentReducePlan(
        kind="sum", num_inputs=rows, embedding_dim=columns, num_segments=segments, dtype=dtype, device=backend.device,
        preference=any_order,
    )  # fmt: skip
    assert plan.precision_guarantee.deterministic == (plan.path != "atomic")
    assert (plan.path == "atomic") == (backend.is_cuda and segments > 0)
