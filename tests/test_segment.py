# SPDX-License-Identifier: Apache-2.0
"""Segment reductions and their gradients against plain loops, and against PyTorch and JAX."""

from __future__ import annotations

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import support
from hypothesis import given
from hypothesis import strategies as st
from segment_problems import (
    EXTREMES,
    FLOATS,
    FORMS,
    HOSTILE,
    INTEGERS,
    KINDS,
    assert_same_numbers,
    backward,
    check_backward,
    check_forward,
    forward,
    make_data,
    make_ids,
)
from support import Backend, assert_same_bits

import baracuda as bc
from reference import segment as reference


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_the_reference_is_the_plain_one(dtype: str, form: str) -> None:
    rng = np.random.default_rng(21)
    for rows, columns, segments in ((60, 3, 9), (12, 2, 30), (40, 2, 1), (0, 2, 3), (7, 0, 2), (5, 2, 0)):
        ids = make_ids(rng, form, rows, segments, hostile=True)
        members = reference.rows_of_segments(form, ids, rows, segments)
        d_output = rng.standard_normal((segments, columns))
        for kind, specials in itertools.product(KINDS, (False, True)):
            data = make_data(rng, (rows, columns), dtype, specials=specials)
            for empty in (None, 3):
                expected = reference.plain_forward(kind, data, members, empty)
                for got, value in zip(reference.forward(kind, data, members, empty), expected, strict=True):
                    assert_same_numbers(got, value)
            if dtype in FLOATS:
                for ties in ("first", "even") if kind in EXTREMES else ("first",):
                    with np.errstate(invalid="ignore"):
                        value = reference.plain_backward(kind, d_output, data, members, ties)
                        assert_same_numbers(reference.backward(kind, d_output, data, members, ties), value)


SHAPES = {
    "few segments": (300, 5, 3),
    "one column": (700, 1, 40),
    "vectors": (260, 64, 50),
    "more segments than rows": (30, 8, 200),
    "one segment": (500, 16, 1),
    "wide": (90, 300, 7),
    "odd": (129, 33, 20),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_reference(backend: Backend, shape: str, dtype: str, form: str) -> None:
    rows, columns, segments = SHAPES[shape]
    rng = np.random.default_rng(len(shape))
    if not backend.is_cuda and columns > 40:
        columns = 33 if columns == 64 else 48
    index_dtype = "int32" if dtype in ("float16", "float64", "int8") else "int64"
    ids = make_ids(rng, form, rows, segments, index_dtype, hostile=True)
    members = reference.rows_of_segments(form, ids, rows, segments)
    data = make_data(rng, (rows, columns), dtype, specials=True)
    for kind in KINDS:
        with_arg = kind in EXTREMES
        output, arg = forward(backend, kind, data, ids, segments, form, return_arg=with_arg)
        check_forward(kind, data, members, output, arg)
        if with_arg:
            assert_same_bits(forward(backend, kind, data, ids, segments, form)[0], output)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_match_the_reference(backend: Backend, shape: str, dtype: str, form: str) -> None:
    rows, columns, segments = SHAPES[shape]
    rows = min(rows, 200)
    rng = np.random.default_rng(len(shape))
    if not backend.is_cuda and columns > 20:
        columns = 20
    index_dtype = "int32" if dtype in ("float16", "float64") else "int64"
    ids = make_ids(rng, form, rows, segments, index_dtype, hostile=True)
    members = reference.rows_of_segments(form, ids, rows, segments)
    d_output = rng.standard_normal((segments, columns)).astype(support.DTYPES[dtype].numpy)
    for kind, ties in (
        ("sum", "first"),
        ("mean", "first"),
        ("prod", "first"),
        *itertools.product(EXTREMES, ("first", "even")),
    ):
        data = make_data(rng, (rows, columns), dtype, specials=kind in EXTREMES)
        d_input = backward(backend, kind, d_output, data, ids, form, ties=ties)
        check_backward(kind, d_output, data, members, d_input, ties)
        if kind in EXTREMES and ties == "first":
            _, arg = forward(backend, kind, data, ids, segments, form, return_arg=True)
            assert_same_bits(backward(backend, kind, d_output, data, ids, form, arg=arg), d_input)


@given(st.data())
def test_any_problem(data: st.DataObject) -> None:
    rows, columns, segments = (data.draw(st.integers(0, most)) for most in (40, 9, 12))
    kind = data.draw(st.sampled_from(KINDS))
    form = data.draw(st.sampled_from(FORMS))
    dtype = data.draw(st.sampled_from(FLOATS + INTEGERS))
    index_dtype = data.draw(st.sampled_from(("int32", "int64")))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    ids = make_ids(rng, form, rows, segments, index_dtype, hostile=data.draw(st.booleans()))
    members = reference.rows_of_segments(form, ids, rows, segments)
    values = make_data(rng, (rows, columns), dtype, specials=data.draw(st.booleans()))
    with_arg = kind in EXTREMES and data.draw(st.booleans())
    for device in ("cpu", "cuda") if bc.cuda_device_count() else ("cpu",):
        backend = Backend(device)
        output, arg = forward(backend, kind, values, ids, segments, form, return_arg=with_arg)
        check_forward(kind, values, members, output, arg)
        if dtype in FLOATS:
            d_output = rng.standard_normal((segments, columns)).astype(values.dtype)
            ties = data.draw(st.sampled_from(("first", "even")))
            with np.errstate(all="ignore"):
                got = backward(backend, kind, d_output, values, ids, form, ties=ties)
                check_backward(kind, d_output, values, members, got, ties)


# ---------------------------------------------------------------------------------------------------
# Values.


@pytest.mark.parametrize("dtype", FLOATS)
def test_signed_zeros_are_ordered(backend: Backend, dtype: str) -> None:
    """Whatever order they come in."""
    data = np.array([[-0.0, 0.0], [0.0, -0.0], [-0.0, 0.0]]).astype(support.DTYPES[dtype].numpy)
    ids = np.zeros(3, np.int64)
    for kind, expected, rows in (("max", 0.0, [1, 0]), ("min", -0.0, [0, 1])):
        output, arg = forward(backend, kind, data, ids, 1, return_arg=True)
        assert_same_bits(output, np.full((1, 2), expected).astype(data.dtype))
        assert arg.tolist() == [rows]


@pytest.mark.parametrize("kind", EXTREMES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_first_nan_takes_the_gradient(backend: Backend, dtype: str, kind: str) -> None:
    data = np.array([1, np.nan, np.inf, np.nan, -np.inf]).reshape(5, 1).astype(support.DTYPES[dtype].numpy)
    ids = np.zeros(5, np.int64)
    output, arg = forward(backend, kind, data, ids, 1, return_arg=True)
    assert np.isnan(output.astype(np.float32)).all()
    assert arg.tolist() == [[1]]
    for ties in ("first", "even"):
        got = backward(backend, kind, np.ones((1, 1), data.dtype), data, ids, ties=ties)
        assert got[:, 0].tolist() == [0, 1, 0, 0, 0]


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_segments_of_the_lowest_value_are_not_empty(backend: Backend, dtype: str) -> None:
    kind = support.DTYPES[dtype].numpy
    for reduction in EXTREMES:
        worst = np.array(reference.default_empty(reduction, kind)).astype(kind)
        data = np.full((4, 3), worst)
        output, arg = forward(backend, reduction, data, np.array([1, 0, 1, 0]), 3, return_arg=True, empty_value=7)
        assert_same_bits(output, np.stack([data[0], data[0], np.full(3, 7, kind)]))
        assert arg.tolist() == [[1] * 3, [0] * 3, [4] * 3]


@pytest.mark.parametrize("dtype", FLOATS)
def test_empty_values(backend: Backend, dtype: str) -> None:
    kind = support.DTYPES[dtype].numpy
    data = np.ones((2, 2), kind)
    for reduction, value in itertools.product(KINDS, (None, -3.5, math.inf, math.nan)):
        output, _ = forward(backend, reduction, data, np.array([1, 1]), 2, empty_value=value)
        wanted = reference.default_empty(reduction, kind) if value is None else value
        assert_same_numbers(output[0], np.full(2, wanted).astype(kind))


def test_empty_segments_keep_the_sign_of_zero(backend: Backend) -> None:
    data = np.ones((1, 2), np.float32)
    for zero in (0.0, -0.0, np.float32(0.0), np.float32(-0.0), 0):
        got = bc.segment_max(backend.array(data), vector(backend, [0]), 2, empty_value=zero).numpy()
        assert_same_bits(got[1], np.full(2, zero, np.float32))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_product_gradients_neither_overflow_nor_underflow(backend: Backend, dtype: str) -> None:
    """The product of all is outside of the dtype's range, that of the others is not."""
    big = 2.0**100 if dtype != "float64" else 2.0**1000
    columns = [
        [big, big, 1 / big, 3],
        [1 / big, 1 / big, big, 5],
        [big, 0, 1 / big, 1],
        [math.inf, 2, 3, 1],
        [0, 0, 7, 1],
    ]
    data = np.array(columns).T.astype(support.DTYPES[dtype].numpy)
    d_output = np.array([[1, 1, 1, 1, 1]]).astype(data.dtype)
    got = backward(backend, "prod", d_output, data, np.zeros(4, np.int64)).astype(np.float64)
    assert got[2, 0] == math.inf  # 3 * big * big
    assert got[:, 0].tolist()[:2] == [3, 3]
    assert got[:, 1].tolist()[:2] == [5, 5]
    assert got[:, 2].tolist() == [0, 1, 0, 0]
    assert got[:, 3].tolist() == [6, math.inf, math.inf, math.inf]
    assert got[:, 4].tolist() == [0, 0, 0, 0]


def test_sums_of_many_small_numbers(backend: Backend) -> None:
    """16-bit sums are kept in float32: a running float16 sum would stop at 2048."""
    for dtype, count in (("float16", 60000), ("bfloat16", 70000)):
        data = np.ones((count, 1), support.DTYPES[dtype].numpy)
        output, _ = forward(backend, "sum", data, np.zeros(count, np.int32), 1)
        assert_same_bits(output, np.full((1, 1), count).astype(data.dtype))


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_ids_outside_are_dropped(backend: Backend, index_dtype: str) -> None:
    ids = np.array([0, *HOSTILE[index_dtype], 3, 4], index_dtype)
    data = np.arange(1, ids.size + 1, dtype=np.float32).reshape(-1, 1)
    output, _ = forward(backend, "sum", data, ids, 4)
    assert output[:, 0].tolist() == [1, 0, 0, ids.size - 1]
    d_input = backward(backend, "sum", np.ones((4, 1), np.float32), data, ids)
    assert d_input[:, 0].tolist() == [1] + [0] * len(HOSTILE[index_dtype]) + [1, 0]
    output, arg = forward(backend, "max", data, np.full_like(ids, -1), 4, return_arg=True)
    assert (output == -np.inf).all()
    assert (arg == ids.size).all()


@pytest.mark.parametrize("columns", [1, 8])
@pytest.mark.parametrize("form", ["sorted", "offsets"])
def test_broken_promises_stay_inside(backend: Backend, form: str, columns: int) -> None:
    """Ids that fall, offsets that fall: any values, but only inside of the operands, which `forward` looks at."""
    rng = np.random.default_rng(6)
    rows, segments = 700, 90
    for _ in range(5):
        ids = rng.integers(
            -3, rows + 5 if form == "offsets" else segments + 5, segments + 1 if form == "offsets" else rows
        )
        ids[rng.random(ids.size) < 0.1] = rng.choice(np.array(HOSTILE["int64"]))
        data = rng.standard_normal((rows, columns)).astype(np.float32)
        d_output = rng.standard_normal((segments, columns)).astype(np.float32)
        for kind in ("sum", "max"):
            forward(backend, kind, data, ids, segments, form, return_arg=kind == "max")
            for ties in ("first", "even"):
                backward(backend, kind, d_output, data, ids, form, ties=ties)
        backward(backend, "mean", d_output, data, ids, form)


@pytest.mark.parametrize("columns", [1, 5, 16, 72])
@pytest.mark.parametrize("form", FORMS)
def test_damaged_args_stay_inside(backend: Backend, form: str, columns: int) -> None:
    """An arg that names no row, or a row of another segment, gives nothing to anybody."""
    rng = np.random.default_rng(7)
    rows, segments = 300, 40
    ids = make_ids(rng, form, rows, segments)
    members = reference.rows_of_segments(form, ids, rows, segments)
    arg = rng.integers(0, rows, (segments, columns))
    arg[rng.random(arg.shape) < 0.3] = rng.choice(np.array([*HOSTILE["int64"], rows]))
    d_output = rng.standard_normal((segments, columns)).astype(np.float32)
    expected = np.zeros((rows, columns), np.float32)
    for segment, own in enumerate(members):
        for column in range(columns):
            if arg[segment, column] in own:
                expected[arg[segment, column], column] = d_output[segment, column]
    got = backward(backend, "max", d_output, np.zeros((rows, columns), np.float32), ids, form, arg=arg)
    assert_same_bits(got, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_are_the_same_in_every_run(backend: Backend, dtype: str, kind: str) -> None:
    """And don't depend on alignment."""
    rng = np.random.default_rng(2)
    for rows, columns, segments in ((20000, 1, 900), (3000, 24, 50), (4000, 8, 2)):
        data = rng.uniform(0.5, 1.5, (rows, columns)).astype(support.DTYPES[dtype].numpy)
        ids = make_ids(rng, "unsorted", rows, segments, hostile=True)
        d_output = rng.standard_normal((segments, columns)).astype(data.dtype)
        outputs = {forward(backend, kind, data, ids, segments, misalign=m)[0].tobytes() for m in (0, 0, 1, 4)}
        assert len(outputs) == 1
        gradients = {backward(backend, kind, d_output, data, ids, misalign=m).tobytes() for m in (0, 0, 1, 4)}
        assert len(gradients) == 1


@pytest.mark.requires("gpu")
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_devices_agree(dtype: str) -> None:
    """Bit for bit where no order plays a part."""
    rng = np.random.default_rng(5)
    both = (Backend("cpu"), Backend("cuda"))
    for rows, columns, segments in ((2000, 7, 60), (50000, 1, 700), (50000, 1, 12000), (30000, 12, 40)):
        data = make_data(rng, (rows, columns), dtype, specials=True)
        ids = make_ids(rng, "unsorted", rows, segments, hostile=True)
        for kind in KINDS if dtype in INTEGERS else EXTREMES:
            for with_arg in (False, True) if kind in EXTREMES else (False,):
                cpu, cuda = (forward(one, kind, data, ids, segments, return_arg=with_arg) for one in both)
                assert_same_bits(cuda[0], cpu[0])
                if with_arg:
                    assert_same_bits(cuda[1], cpu[1])
            if kind in EXTREMES and dtype in FLOATS:
                d_output = rng.standard_normal((segments, columns)).astype(data.dtype)
                for ties in ("first", "even"):
                    cpu_input, cuda_input = (backward(one, kind, d_output, data, ids, ties=ties) for one in both)
                    assert_same_bits(cuda_input, cpu_input)


# ---------------------------------------------------------------------------------------------------
# Cases from public bug reports, by their id.


def on(backend: Backend, values: Any, dtype: Any = np.float32) -> bc.Tensor:
    array = np.asarray(values, dtype)
    return backend.array(array.reshape(array.shape if array.ndim == 2 else (-1, 1)))


def vector(backend: Backend, values: Any, dtype: Any = np.int64) -> bc.Tensor:
    return backend.array(np.asarray(values, dtype))


def test_b01_nan_is_not_hidden(backend: Backend) -> None:
    data, ids = on(backend, [7, np.nan, -2]), vector(backend, [0, 4, 5])
    for empty, value in ((None, -np.inf), (float(np.finfo(np.float32).min), np.finfo(np.float32).min)):
        got = bc.segment_max(data, ids, 9, empty_value=empty).numpy()[:, 0]
        expected = np.full(9, value, np.float32)
        expected[[0, 4, 5]] = 7, np.nan, -2
        np.testing.assert_array_equal(got, expected)


def test_b02_gaps_hold_the_empty_value(backend: Backend) -> None:
    data = np.array([[1, 2, 3, 4], [5, 6, 7, 8], [4, 3, 2, 1], [8, 7, 6, 5]], np.float32)
    got = bc.segment_max(backend.array(data), vector(backend, [1, 2, 3, 4]), 5, sorted=True, empty_value=0).numpy()
    np.testing.assert_array_equal(got, np.concatenate([np.zeros((1, 4)), data]))


def test_b04_product_gradients_with_zeros(backend: Backend) -> None:
    ids, d_output = vector(backend, [0, 0, 0, 1, 1, 1]), on(backend, [1, 10])
    for data, expected in (([2, 0, 3, 0, 0, 4], [0, 6, 0, 0, 0, 0]), ([2, 5, 3, 0, 7, 4], [15, 6, 10, 280, 0, 0])):
        got = bc.segment_prod_backward(d_output, on(backend, data), ids).numpy()
        assert got[:, 0].tolist() == expected


@pytest.mark.parametrize("ties", ["first", "even"])
def test_b06_gradient_of_a_nan_differs_from_torch_on_purpose(backend: Backend, ties: Any) -> None:
    data, ids = on(backend, [1, np.nan, 3]), vector(backend, [0, 0, 1])
    np.testing.assert_array_equal(bc.segment_max(data, ids, 2).numpy()[:, 0], [np.nan, 3])
    assert bc.segment_max_backward(on(backend, [1, 1]), data, ids, ties=ties).numpy()[:, 0].tolist() == [0, 1, 1]


def test_b09_ids_are_not_trusted(backend: Backend) -> None:
    assert bc.segment_sum(on(backend, np.ones(3)), vector(backend, [-9, -1024, 0]), 1).numpy().tolist() == [[1]]
    # As many segments as can be, and so no columns.
    nothing = backend.array(np.zeros((1, 0), np.float32))
    lowest = vector(backend, [-(2**31)], np.int32)
    assert bc.segment_max(nothing, lowest, 2**31 - 1).shape == (2**31 - 1, 0)
    data = backend.array(np.ones((3, 80), np.float32))
    assert bc.segment_sum(data, vector(backend, [1, 0, 1]), 0).shape == (0, 80)
    with pytest.raises(bc.InvalidProblemError, match=r"segment_sum: segment_ids: expected 0 to 0, got -9 at 0"):
        bc.segment_sum(on(backend, np.ones(3)), vector(backend, [-9, -1024, 0]), 1, check_data=True)


def test_b10_mean_of_nothing_is_zero(backend: Backend) -> None:
    data, ids, d_output = on(backend, [1, 2, 4]), vector(backend, [0, 2, 2]), on(backend, [1, 1, 1])
    assert bc.segment_mean(data, ids, 3).numpy()[:, 0].tolist() == [1, 0, 3]
    assert bc.segment_mean_backward(d_output, ids).numpy()[:, 0].tolist() == [1, 0.5, 0.5]
    offsets = vector(backend, np.cumsum([0, 1, 1, 0, 2]))
    assert bc.segment_mean(on(backend, [1, 2, 3, 5]), offsets=offsets).numpy()[:, 0].tolist() == [1, 2, 0, 4]
    got = bc.segment_mean_backward(on(backend, np.ones(4)), offsets=offsets).numpy()[:, 0]
    assert got.tolist() == [1, 1, 0.5, 0.5]


def test_b11_trailing_empty_segments_stay(backend: Backend) -> None:
    offsets = vector(backend, np.cumsum([0, 1, 0, 5, 4, 0]))
    data = backend.array(np.ones((10, 3), np.float32))
    got = bc.segment_sum(data, offsets=offsets).numpy()
    np.testing.assert_array_equal(got, np.repeat([[1], [0], [5], [4], [0]], 3, axis=1))
    d_output = backend.array(np.ones((5, 3), np.float32))
    np.testing.assert_array_equal(bc.segment_sum_backward(d_output, offsets=offsets).numpy(), np.ones((10, 3)))


def test_b12_no_rows(backend: Backend) -> None:
    data, offsets = backend.array(np.zeros((0, 6), np.float32)), vector(backend, [0, 0, 0])
    for kind, value in (("sum", 0), ("max", -np.inf), ("prod", 1)):
        got = getattr(bc, f"segment_{kind}")(data, offsets=offsets).numpy()
        np.testing.assert_array_equal(got, np.full((2, 6), value))


def test_b15_half_sums_are_kept_in_float32(backend: Backend) -> None:
    for kind, count in ((np.float16, 4096), (ml_dtypes.bfloat16, 512)):
        got = bc.segment_sum(on(backend, np.ones(count), kind), vector(backend, np.zeros(count)), 1)
        assert float(got.numpy()[0, 0]) == count


def test_b17_num_segments_from_the_ids(backend: Backend) -> None:
    got = bc.segment_sum(on(backend, [1, 2, 3]), vector(backend, [0, 3, 3])).numpy()
    assert got[:, 0].tolist() == [1, 0, 0, 5]


def test_b18_integer_means_are_rounded_down(backend: Backend) -> None:
    for values, expected in (([1, 2, 4], 2), ([-1, -2, -4], -3)):
        got = bc.segment_mean(on(backend, values, np.int64), vector(backend, [0, 0, 0]), 1)
        assert got.numpy().tolist() == [[expected]]


@pytest.mark.requires("gpu.memory")
def test_b19_int32_ids_reach_beyond_int32() -> None:
    """The last byte of 2 * 65536 rows of 65535 bytes, by an int32 id."""
    torch = support.torch()
    segments, columns, at = 2 * 65536, 65535, 4294963200
    data = torch.full((1, columns), 0, dtype=torch.uint8, device="cuda")
    data[0, at % columns] = 0xA5
    ids = torch.tensor([at // columns], dtype=torch.int32, device="cuda")
    output = bc.segment_sum(data, ids, segments)
    assert output.view(-1)[at].item() == 0xA5
    assert int(torch.count_nonzero(output.view(torch.int8)[: segments // 2])) == 0
    assert int(torch.count_nonzero(output.view(torch.int8)[segments // 2 :])) == 1


@pytest.mark.parametrize("kind", [np.int8, ml_dtypes.bfloat16])
def test_b21_identities_of_each_dtype(backend: Backend, kind: Any) -> None:
    data, ids = on(backend, [3, -5], kind), vector(backend, [0, 0])
    for function, expected in ((bc.segment_max, 3), (bc.segment_min, -5)):
        assert function(data, ids, 2, empty_value=9).numpy()[:, 0].tolist() == [expected, 9]


def test_b23_more_rows_than_segments(backend: Backend) -> None:
    got = bc.segment_sum(on(backend, np.ones(5)), vector(backend, [0, 1, 1, 0, 1]), 2)
    assert got.numpy()[:, 0].tolist() == [2, 3]


# ---------------------------------------------------------------------------------------------------
# Against others.


@pytest.mark.requires("torch")
def test_even_gradients_are_torchs(device: str) -> None:
    torch = support.torch()
    backend = Backend(device)
    if device == "cuda" and support.missing("torch.cuda"):
        pytest.fail("torch has no CUDA here")
    rng = np.random.default_rng(4)
    ids = rng.integers(0, 20, 300)
    data = make_data(rng, (300, 6), "float32") + np.float32(0)
    d_output = rng.standard_normal((20, 6)).astype(np.float32)
    for kind, name in (("max", "amax"), ("min", "amin"), ("prod", "prod"), ("mean", "mean"), ("sum", "sum")):
        x = torch.tensor(data, dtype=torch.float64, requires_grad=True)
        # torch counts the value that was there as one that ties; it never does.
        start = torch.full((20, 6), -1e3 if kind == "max" else 1e3, dtype=torch.float64)
        index = torch.tensor(ids)[:, None].expand(300, 6)
        start.scatter_reduce(0, index, x, name, include_self=False).backward(
            torch.tensor(d_output, dtype=torch.float64)
        )
        got = backward(backend, kind, d_output, data, ids, ties="even")
        np.testing.assert_allclose(got, x.grad.numpy(), rtol=2e-6, atol=1e-30)


@pytest.mark.requires("jax")
def test_even_gradients_are_jaxs() -> None:
    jax = support.jax()
    rng = np.random.default_rng(4)
    ids = rng.integers(-2, 22, 300)
    # jax's gathers of gradients wrap negative ids, where its sums drop them: such rows are left out here.
    ids[ids < 0] = 99
    data = make_data(rng, (300, 6), "float64") + 0.0
    d_output = rng.standard_normal((20, 6))
    for kind in ("max", "min", "sum"):
        reduce = getattr(jax.ops, f"segment_{kind}")
        value, pull = jax.vjp(lambda x, reduce=reduce: reduce(x, jax.numpy.asarray(ids), 20), data)
        np.testing.assert_array_equal(forward(Backend("cpu"), kind, data, ids, 20)[0], np.asarray(value))
        got = backward(Backend("cpu"), kind, d_output, data, ids, ties="even")
        np.testing.assert_allclose(got, np.asarray(pull(jax.numpy.asarray(d_output))[0]), rtol=1e-14)


# ---------------------------------------------------------------------------------------------------
# Function forms.


def test_function_forms_of_any_rank(backend: Backend, framework: str) -> None:
    rng = np.random.default_rng(9)
    # The library's own tensors are matrices here: they can't be seen in another shape.
    for shape in ((50, 3),) if framework == "baracuda" else ((50,), (50, 3), (50, 2, 3, 2)):
        data = rng.standard_normal(shape).astype(np.float32)
        ids = rng.integers(-1, 9, 50)
        flat = data.reshape(50, -1)
        for kind in KINDS:
            array, given_ids = backend.of(framework, data), backend.of(framework, ids)
            output = getattr(bc, f"segment_{kind}")(array, given_ids, 8)
            assert type(output) is type(array) or framework == "jax"
            expected = forward(backend, kind, flat, ids, 8)[0].reshape((8, *shape[1:]))
            assert_same_bits(backend.read(output), expected)
            d_output = rng.standard_normal((8, *shape[1:])).astype(np.float32)
            arguments = (given_ids,) if kind in ("sum", "mean") else (array, given_ids)
            got = getattr(bc, f"segment_{kind}_backward")(backend.of(framework, d_output), *arguments)
            expected = backward(backend, kind, d_output.reshape(8, -1), flat, ids).reshape(shape)
            assert_same_bits(backend.read(got), expected)


def test_function_forms_of_max(backend: Backend) -> None:
    rng = np.random.default_rng(9)
    data = rng.integers(0, 3, (40, 4)).astype(np.float32)
    offsets = np.array([0, 7, 7, 40])
    array, given_offsets = backend.array(data), backend.array(offsets)
    output, arg = bc.segment_max(array, offsets=given_offsets, return_arg=True)
    assert arg.dtype == "int64"
    d_output = backend.array(np.ones((3, 4), np.float32))
    got = bc.segment_max_backward(d_output, offsets=given_offsets, arg=arg).numpy()
    np.testing.assert_array_equal(got, bc.segment_max_backward(d_output, array, offsets=given_offsets).numpy())
    into = (backend.array(np.zeros((3, 4), np.float32)), backend.array(np.zeros((3, 4), np.int64)))
    assert bc.segment_max(array, offsets=given_offsets, return_arg=True, out=into)[0] is into[0]
    assert_same_bits(into[0].numpy(), output.numpy())


def test_out_is_written_or_refused() -> None:
    data, ids = np.ones((4, 2, 3), np.float32), np.array([0, 1, 1, 0])
    out = np.zeros((2, 2, 3), np.float32)
    assert bc.segment_sum(data, ids, 2, out=out) is out
    assert (out == 2).all()
    with pytest.raises(bc.InvalidProblemError, match=r"segment_sum: out: \(2, 2, 3\) can't be seen as \(2, 6\)"):
        bc.segment_sum(data, ids, 2, out=np.zeros((2, 3, 2), np.float32).transpose(0, 2, 1))
    gradient = np.zeros((4, 2, 3), np.float32)
    assert bc.segment_sum_backward(out, ids, out=gradient) is gradient
    assert (gradient == 2).all()


FIELDS = {"num_inputs": 4, "embedding_dim": 2, "num_segments": 3, "dtype": "float32"}


def test_named_forms() -> None:
    for kind in KINDS:
        for direction in ("", "Backward"):
            named = getattr(bc, f"UnsortedSegment{kind.capitalize()}{direction}Plan")
            plan = named(**FIELDS, device="cpu")
            assert isinstance(plan, getattr(bc, f"SegmentReduce{direction}Plan"))
            assert (plan.descriptor.kind, plan.descriptor.ids) == (kind, "unsorted")
            assert type(named.select(plan.descriptor, device="cpu")) is named
    with pytest.raises(bc.InvalidProblemError, match="UnsortedSegmentMaxPlan: expected kind 'max' and ids 'unsorted'"):
        bc.UnsortedSegmentMaxPlan.select(bc.SegmentReduceDescriptor(kind="sum", **FIELDS), device="cpu")


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"kind": "median"}, bc.InvalidProblemError, "kind: expected 'sum', 'mean', 'max', 'min' or 'prod'"),
        ({"num_inputs": -1}, bc.InvalidProblemError, "num_inputs, embedding_dim: extent -1 of axis 0"),
        ({"num_segments": -2}, bc.InvalidProblemError, "num_segments, embedding_dim: extent -2"),
        ({"dtype": "int16"}, bc.UnsupportedError, "dtype: expected float16, .* got int16"),
        ({"dtype": "complex64"}, bc.UnsupportedError, "got complex64"),
        ({"index_dtype": "int16"}, bc.InvalidProblemError, "index_dtype: expected int32 or int64, got int16"),
        ({"return_arg": True}, bc.InvalidProblemError, "return_arg: only max and min"),
        ({"kind": "max", "return_arg": True, "ties": "even"}, bc.InvalidProblemError, "ties: even"),
        ({"dtype": "uint8", "empty_value": -1.0}, bc.InvalidProblemError, "empty_value: expected an integer of uint8"),
        ({"dtype": "int32", "empty_value": 0.5}, bc.InvalidProblemError, "empty_value: expected an integer of int32"),
        ({"dtype": "int64", "empty_value": 2.0**63}, bc.InvalidProblemError, "empty_value: expected an integer of"),
        ({"ids": "offsets", "num_segments": 2**63 - 1, "embedding_dim": 0}, bc.InvalidProblemError, "num_segments"),
        (
            {"kind": "max", "return_arg": True, "index_dtype": "int32", "num_inputs": 2**31},
            bc.InvalidProblemError,
            "int32 can't count the 2147483648 rows",
        ),
    ],
)
def test_refused_problems(device: str, change: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=f"SegmentReducePlan: .*{sentence}"):
        bc.SegmentReducePlan(**{**FIELDS, "kind": "sum", **change}, device=device)


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"dtype": "int32"}, bc.UnsupportedError, "dtype: expected float16, bfloat16, float32 or float64, got int32"),
        ({"saved": "arg"}, bc.InvalidProblemError, "saved: only max and min have an arg"),
        ({"kind": "min", "saved": "arg", "ties": "even"}, bc.InvalidProblemError, "saved: ties even needs the input"),
    ],
)
def test_refused_gradients(device: str, change: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=f"SegmentReduceBackwardPlan: {sentence}"):
        bc.SegmentReduceBackwardPlan(**{**FIELDS, "kind": "sum", **change}, device=device)


def test_refused_calls() -> None:
    data, ids, offsets = np.ones((4, 2), np.float32), np.array([0, 1, 1, 0]), np.array([0, 4])
    for message, call in {
        "segment_sum: expected one of segment_ids and offsets": lambda: bc.segment_sum(data),
        "segment_max: expected one of": lambda: bc.segment_max(data, ids, offsets=offsets),
        "segment_sum: num_segments: expected 1 for 2": lambda: bc.segment_sum(data, num_segments=3, offsets=offsets),
        "segment_sum: offsets: expected .num_segments . 1.": lambda: bc.segment_sum(data, offsets=offsets[:0]),
        "segment_sum: segment_ids: expected .num_inputs.": lambda: bc.segment_sum(data, data),
        "segment_sum: data: expected at least one axis": lambda: bc.segment_sum(np.float32(1).reshape(()), ids),
        "segment_ids: expected shape .4,., got .3,.": lambda: bc.segment_sum(data, ids[:3], 2),
        "segment_max_backward: data: is missing, and so is arg": lambda: bc.segment_max_backward(data[:2], None, ids),
        "segment_ids: expected no lower than before, got 0 at 3": lambda: bc.segment_sum(
            data, ids, 2, sorted=True, check_data=True
        ),
        "segment_sum: num_segments: expected an integer, got 2.0": lambda: bc.segment_sum(data, ids, 2.0),
        "num_inputs: expected 4 for 4 ids, got 5": lambda: bc.segment_sum_backward(data[:2], ids, num_inputs=5),
        "segment_max_backward: data: expected at least one axis": lambda: bc.segment_max_backward(
            data, data.sum(), ids
        ),
        "segment_min: out: expected .output, arg., got 3 entries": lambda: bc.segment_min(
            data, ids, 2, return_arg=True, out=(data, ids, ids)
        ),
        "segment_max: out: expected .output, arg., got ndarray": lambda: bc.segment_max(
            data, ids, 2, return_arg=True, out=data
        ),
        "offsets: expected 0 to 4, got 5 at 1": lambda: bc.segment_sum(data, offsets=np.array([0, 5]), check_data=True),
    }.items():
        with pytest.raises(bc.InvalidProblemError, match=message):
            call()


def test_operands_and_cost() -> None:
    plan = bc.SegmentReducePlan(kind="max", **FIELDS, return_arg=True, index_dtype="int32", device="cpu")
    assert [(operand.name, operand.role, operand.dtype, operand.shape) for operand in plan.operands] == [
        ("input", "in", "float32", (4, 2)),
        ("segment_ids", "in", "int32", (4,)),
        ("output", "out", "float32", (3, 2)),
        ("arg", "out", "int32", (3, 2)),
    ]
    assert plan.cost == bc.PlanCost(bytes=4 * (8 + 4 + 6 + 6), operations=8)
    for kind, names in (
        ("sum", ["d_output", "segment_ids", "d_input"]),
        ("prod", ["d_output", "segment_ids", "input", "d_input"]),
        ("max", ["d_output", "segment_ids", "input", "d_input"]),
    ):
        plan = bc.SegmentReduceBackwardPlan(kind=kind, **FIELDS, device="cpu")
        assert [operand.name for operand in plan.operands] == names
    plan = bc.SegmentReduceBackwardPlan(kind="min", **FIELDS, ids="offsets", saved="arg", device="cpu")
    assert [operand.name for operand in plan.operands] == ["d_output", "offsets", "arg", "d_input"]


@pytest.mark.requires("gpu.memory")
@pytest.mark.parametrize("form", ["unsorted", "sorted"])
def test_more_elements_than_int32_counts(form: str) -> None:
    torch = support.torch()
    rows, columns, segments = 2**20 + 3, 2**11, 1000
    data = torch.ones((rows, columns), dtype=torch.int8, device="cuda")
    ids = torch.arange(rows, device="cuda") * segments // rows
    if form == "unsorted":
        ids = ids.flip(0)
    data[-1, -1] = 100
    output = bc.segment_sum(data.view(torch.uint8), ids, segments, sorted=form == "sorted")
    last = int(ids[-1])
    counts = torch.bincount(ids, minlength=segments)
    assert torch.equal(output[:, 0], counts.to(torch.uint8))
    assert int(output[last, -1]) == (int(counts[last]) + 99) % 256
    del data, output
    torch.cuda.empty_cache()
    rows, columns = 2**18, 2**13 + 8
    d_output = torch.arange(segments * columns, device="cuda", dtype=torch.float32).view(segments, columns).half()
    ids = torch.arange(rows, device="cuda") % segments
    d_input = bc.segment_sum_backward(d_output, ids)
    assert torch.equal(d_input[-1], d_output[int(ids[-1])])
    assert torch.equal(d_input[:segments], d_output)
