# SPDX-License-Identifier: Apache-2.0
"""Scans and their gradients against their definitions in float64, and against PyTorch."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import support
from hypothesis import given
from hypothesis import strategies as st
from scan_problems import (
    EXTREMA,
    FLOATS,
    INTEGERS,
    KINDS,
    ROUNDING,
    SHAPES,
    SMALLEST,
    assert_close,
    bound_of,
    compute_rounding,
    gradient_bound,
    numpy_dtype,
    run_backward,
    run_forward,
    values,
)
from support import INPUT_LAYOUTS, OUTPUT_LAYOUTS, Backend

import baracuda as bc
from reference import scan as reference


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_floats(device: str, kind: str, dtype: str, shape: tuple[int, ...], axis: int) -> None:
    backend = Backend(device)
    x = values(kind, shape, dtype)
    for reverse in (False, True):
        for exclusive in (False, True):
            fields = {"reverse": reverse, "exclusive": exclusive}
            expected, _ = reference.scan(kind, x, axis, **fields)
            got = run_forward(backend, kind, x, axis, **fields)
            assert got.dtype == x.dtype
            with np.errstate(invalid="ignore"):
                assert_close(got, expected, bound_of(kind, x, expected, axis, dtype, **fields))


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("kind", ["cumsum", "cumprod", "cummax", "cummin"])
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_integers_are_exact(device: str, kind: str, dtype: str, shape: tuple[int, ...], axis: int) -> None:
    backend = Backend(device)
    x = values(kind, shape, dtype)
    for reverse, exclusive in ((False, False), (True, False), (False, True), (True, True)):
        fields = {"reverse": reverse, "exclusive": exclusive}
        expected, _ = reference.scan(kind, x, axis, **fields)
        outs: list[str | None] = [None]
        if kind in ("cumsum", "cumprod"):
            outs += [
                name
                for name in ("int8", "uint8", "int16", "int32", "int64")
                if name == dtype or (name in ("int32", "int64") and numpy_dtype(name).itemsize > x.itemsize)
            ]
        for out in outs:
            got = run_forward(backend, kind, x, axis, **fields, **({"out_dtype": out} if out else {}))
            if out is None:
                assert got.dtype == (x.dtype if kind in EXTREMA else np.int64)
            # Sums and products wrap around.
            np.testing.assert_array_equal(got, expected.astype(got.dtype))


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
@pytest.mark.parametrize("ties", ["first", "last"])
@pytest.mark.parametrize("kind", EXTREMA)
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_indices(device: str, kind: str, ties: str, dtype: str, shape: tuple[int, ...], axis: int) -> None:
    backend = Backend(device)
    x = values(kind, shape, dtype)
    if dtype in FLOATS:
        rng = np.random.default_rng(3)
        x[rng.random(shape) < 0.01] = np.nan
        x[rng.random(shape) < 0.05] = -np.inf if kind == "cummax" else np.inf
    for index_dtype in ("int64", "int32"):
        for reverse, exclusive in ((False, False), (True, True)):
            fields = {"reverse": reverse, "exclusive": exclusive, "ties": ties}
            expected, where = reference.scan(kind, x, axis, **fields)
            got = run_forward(backend, kind, x, axis, indices=True, index_dtype=index_dtype, **fields)
            np.testing.assert_array_equal(got[1], where)
            np.testing.assert_array_equal(got[0].astype(np.float64), expected.astype(np.float64))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["cumsum", "cumprod"])
def test_halves_to_float32(device: str, kind: str, dtype: str) -> None:
    x = values(kind, (3, 500), dtype)
    expected, _ = reference.scan(kind, x, 1)
    got = run_forward(Backend(device), kind, x, 1, out_dtype="float32")
    assert_close(got, expected, bound_of(kind, x, expected, 1, "float32"))


# Each layout beside a row-major one, and beside itself.
LAYOUTS = [
    (source, dest)
    for source in INPUT_LAYOUTS
    for dest in OUTPUT_LAYOUTS
    if "row_major" in (source, dest) or source == dest
]


@functools.cache
def layout_case(
    kind: str, dtype: str, axis: int, reverse: bool, repeated: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """An input, what its scan is, and how far off it may be; the same for most layouts."""
    x = values(kind, (6, 5, 70), dtype)
    if repeated:
        x[:] = x[:1]
    expected, _ = reference.scan(kind, x, axis, reverse=reverse)
    return x, expected, bound_of(kind, x, expected, axis, dtype, reverse=reverse)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("source_layout", "dest_layout"), LAYOUTS)
def test_layouts(device: str, kind: str, source_layout: str, dest_layout: str) -> None:
    """Any strides and any alignment."""
    backend = Backend(device)
    layouts = (source_layout, dest_layout)
    for dtype in ("float32", "bfloat16", "float64"):
        for axis in range(3):
            for reverse in (False, True):
                x, expected, bound = layout_case(kind, dtype, axis, reverse, source_layout == "broadcast")
                for misalign in (0, 1):
                    got = run_forward(backend, kind, x, axis, layouts=layouts, misalign=misalign, reverse=reverse)
                    assert_close(got, expected, bound)


@pytest.mark.parametrize("kind", KINDS)
def test_reverse_is_a_flip(device: str, kind: str) -> None:
    backend = Backend(device)
    x = values(kind, (3, 5000), "float32")
    flipped = np.ascontiguousarray(x[:, ::-1])
    np.testing.assert_array_equal(
        run_forward(backend, kind, x, 1, reverse=True), run_forward(backend, kind, flipped, 1)[:, ::-1]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_exclusive_is_a_shift(device: str, kind: str) -> None:
    """Both are within the bound of what is exact; where sums are cut for one they need not be for the other."""
    backend = Backend(device)
    x = values(kind, (3, 5000), "float32")
    inclusive = run_forward(backend, kind, x, 1)
    exclusive = run_forward(backend, kind, x, 1, exclusive=True)
    bound = 2 * bound_of(kind, x, inclusive, 1, "float32") if kind not in EXTREMA else np.zeros(x.shape)
    assert_close(exclusive[:, 1:], inclusive[:, :-1].astype(np.float64), bound[:, :-1])
    identity = {"cumsum": 0, "cumprod": 1, "cummax": -np.inf, "cummin": np.inf, "logcumsumexp": -np.inf}[kind]
    assert (exclusive[:, 0] == identity).all()


# ---------------------------------------------------------------------------------------------------
# Gradients.


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "axis"), [case for case in SHAPES if np.prod(case[0]) < 500])
def test_gradients(device: str, kind: str, dtype: str, shape: tuple[int, ...], axis: int) -> None:
    backend = Backend(device)
    x = values(kind, shape, dtype)
    dy = values("cumsum", shape, dtype, seed=1)
    for reverse in (False, True):
        for exclusive in (False, True):
            fields: dict[str, Any] = {"reverse": reverse, "exclusive": exclusive}
            y = reference.scan(kind, x, axis, **fields)[0]
            expected, magnitude = reference.gradient(kind, dy, x, axis, **fields)
            stored = y.astype(x.dtype)
            for layout in ("row_major", "transposed"):
                got = run_backward(backend, kind, dy, x, stored, axis, layout=layout, **fields)
                assert_close(got, expected, gradient_bound(kind, x, y, magnitude, axis))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("ties", ["first", "last"])
@pytest.mark.parametrize("kind", EXTREMA)
def test_gradients_of_extrema(device: str, kind: str, ties: str, dtype: str) -> None:
    """From x, y or indices; with ties, NaN and infinities."""
    backend = Backend(device)
    for shape, axis in (((3, 61), 1), ((40, 5), 0)):
        rng = np.random.default_rng(5)
        x = values(kind, shape, dtype)
        x[0] = -np.inf if kind == "cummax" else np.inf
        x[rng.random(shape) < 0.01] = np.nan
        dy = values("cumsum", shape, dtype, seed=1)
        for reverse in (False, True):
            for exclusive in (False, True):
                fields: dict[str, Any] = {"reverse": reverse, "exclusive": exclusive, "ties": ties}
                y, where = reference.scan(kind, x, axis, **fields)
                expected, magnitude = reference.gradient(kind, dy, x, axis, **fields)
                bound = gradient_bound(kind, x, np.zeros(1), magnitude, axis)
                for saved in ("x", "y", "indices") if ties == "first" else ("x", "indices"):
                    for index_dtype in ("int64", "int32") if saved == "indices" else ("int64",):
                        got = run_backward(
                            backend,
                            kind,
                            dy,
                            x,
                            y.astype(x.dtype),
                            axis,
                            saved=saved,
                            indices=where.astype(index_dtype),
                            **fields,
                        )
                        assert_close(got, expected, bound)


@pytest.mark.requires("torch")
@pytest.mark.parametrize("kind", ["cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"])
def test_gradients_against_autograd(kind: str) -> None:
    torch = support.torch()
    x = values("cumsum", (4, 50), "float64")
    g = values("cumsum", (4, 50), "float64", seed=2)
    leaf = torch.tensor(x, requires_grad=True)
    y = getattr(torch, kind)(leaf, 1)
    y = y.values if kind in EXTREMA else y
    y.backward(torch.tensor(g))
    arguments = {"cumsum": (), "cumprod": (x, y.detach().numpy()), "logcumsumexp": (x, y.detach().numpy())}
    if kind in EXTREMA:
        got = getattr(bc, f"{kind}_backward")(g, x, 1, ties="last")
    else:
        got = getattr(bc, f"{kind}_backward")(g, *arguments[kind], axis=1)
    np.testing.assert_allclose(got, leaf.grad.numpy(), rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------------------------------------------
# The linear recurrence.


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("with_h0", [False, True])
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_linear_recurrence(device: str, dtype: str, with_h0: bool, shape: tuple[int, ...], axis: int) -> None:
    backend = Backend(device)
    rng = np.random.default_rng(1)
    kind = numpy_dtype(dtype)
    a = rng.uniform(-1, 1, shape).astype(kind)
    b, g = (rng.normal(size=shape).astype(kind) for _ in range(2))
    rows = tuple(np.delete(shape, axis))
    h0 = rng.normal(size=rows).astype(kind) if with_h0 else np.zeros(rows, kind)
    u, v = compute_rounding(dtype), ROUNDING[dtype]
    n = shape[axis]
    for reverse in (False, True):
        for layout in ("row_major", "transposed"):
            given_ = {name: backend.input(value, layout=layout).tensor for name, value in (("a", a), ("b", b))}
            initial = {"h0": backend.input(h0, layout=layout).tensor} if with_h0 else {}
            h = backend.output(shape, dtype, layout=layout)
            bc.ScanPlan(
                kind="linear_recurrence",
                shape=shape,
                axis=axis,
                dtype=dtype,
                reverse=reverse,
                has_h0=with_h0,
                device=device,
            ).run(h=h.tensor, **given_, **initial)
            h.assert_guards()
            expected, magnitude = reference.linear_recurrence(a, b, axis, reverse=reverse, h0=h0)
            assert_close(h.numpy(), expected, 4 * n * u * magnitude + v * np.abs(expected) + SMALLEST[dtype])
        if n > 300:
            continue
        saved = expected.astype(kind)
        plan = bc.ScanBackwardPlan(
            kind="linear_recurrence",
            shape=shape,
            axis=axis,
            dtype=dtype,
            reverse=reverse,
            has_h0=with_h0,
            device=device,
        )
        outputs = {name: backend.output(shape, dtype) for name in ("da", "db")}
        if with_h0:
            outputs["dh0"] = backend.output(rows, dtype, layout="transposed")
        plan.run(
            dh=backend.array(g),
            a=backend.array(a),
            h=backend.array(saved),
            **initial,
            **{name: output.tensor for name, output in outputs.items()},
        )
        gradients, magnitudes = reference.linear_gradient(g, a, saved, axis, reverse=reverse, h0=h0)
        for name, want, size in zip(("da", "db", "dh0"), gradients, magnitudes, strict=True):
            if name in outputs:
                bound = (8 * n + 8) * u * size + 2 * v * np.abs(want) + SMALLEST[dtype]
                assert_close(outputs[name].numpy(), want, bound)


# ---------------------------------------------------------------------------------------------------
# Cases from the field, by their numbers.


def on(device: str, array: Any, dtype: str = "float32") -> bc.Tensor:
    return bc.asarray(np.asarray(array).astype(numpy_dtype(dtype)), device)


def test_a01_product_gradient_with_a_zero(device: str) -> None:
    x = on(device, [2, 0, 3, 4])
    y = bc.cumprod(x)
    assert bc.cumprod_backward(on(device, [1, 1, 1, 1]), x, y).numpy().tolist() == [1, 32, 0, 0]
    assert bc.cumprod_backward(on(device, [1, 2, 3, 4]), x, y).numpy().tolist() == [1, 118, 0, 0]
    zero = on(device, [0])
    assert bc.cumprod_backward(on(device, [1]), zero, bc.cumprod(zero)).numpy().tolist() == [1]


def test_a03_leading_negative_infinities(device: str) -> None:
    inf = np.inf
    x = on(device, [[2, -inf, -inf, 1], [-inf, -inf, 0, 1]])
    got = bc.logcumsumexp(x, axis=1).numpy()
    np.testing.assert_allclose(
        got, [[2, 2, 2, 2.313261687518223], [-inf, -inf, 0, 1.3132616875182228]], rtol=4 * 2.0**-24
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a06_wide_ranges(device: str, dtype: str) -> None:
    for row, expected in (([1000, 0], [2, 0]), ([0, 1000], [1, 1])):
        x = on(device, row, dtype)
        got = bc.logcumsumexp_backward(on(device, [1, 1], dtype), x, bc.logcumsumexp(x))
        assert got.numpy().tolist() == expected


def test_a07_column_major_integers(device: str) -> None:
    x = np.array([[3, 2, 2, 2, 6, 4, 7, 6, 1, 3], [9, 3, 0, 2, 2, 8, 7, 9, 1, 3]])
    values_, where = run_forward(
        Backend(device), "cummax", x, 1, layouts=("transposed", "transposed"), indices=True, ties="last"
    )
    assert values_.tolist() == [[3, 3, 3, 3, 6, 6, 7, 7, 7, 7], [9] * 10]
    assert where.tolist() == [[0, 0, 0, 0, 4, 4, 6, 6, 6, 6], [0, 0, 0, 0, 0, 0, 0, 7, 7, 7]]


def test_a08_ties(device: str) -> None:
    for row, last, last_gradient in (([1, 1, 1], [0, 1, 2], [1, 1, 1]), ([3, 3, 2, 3], [0, 1, 1, 3], [1, 2, 0, 1])):
        x = on(device, row)
        g = on(device, np.ones(x.shape))
        assert bc.cummax(x, indices=True, ties="last")[1].numpy().tolist() == last
        assert bc.cummax_backward(g, x, ties="last").numpy().tolist() == last_gradient
        assert bc.cummax(x, indices=True)[1].numpy().tolist() == [0] * len(last)
        assert bc.cummax_backward(g, x).numpy().tolist() == [len(last)] + [0] * (len(last) - 1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", EXTREMA)
def test_a09_nan_wins_and_stays(device: str, kind: str, dtype: str) -> None:
    nan = np.nan
    sign = 1 if kind == "cummax" else -1
    scan = getattr(bc, kind)
    got = scan(on(device, sign * np.array([1, 3, nan, 5, 4]), dtype)).numpy().astype(float)
    np.testing.assert_array_equal(got, sign * np.array([1, 3, nan, nan, nan]))
    x = on(device, sign * np.array([1, nan, 3, 2]), dtype)
    for ties in ("first", "last"):
        y, where = scan(x, indices=True, ties=ties)
        np.testing.assert_array_equal(y.numpy().astype(float), sign * np.array([1, nan, nan, nan]))
        assert where.numpy().tolist() == [0, 1, 1, 1]
        gradient = getattr(bc, f"{kind}_backward")(on(device, np.ones(4), dtype), x, ties=ties)
        assert gradient.numpy().astype(float).tolist() == [1, 3, 0, 0]
    x = on(device, sign * np.array([nan, 1, nan, 5]), dtype)
    assert scan(x, indices=True, ties="last")[1].numpy().tolist() == [0, 0, 2, 2]
    assert scan(x, indices=True)[1].numpy().tolist() == [0, 0, 0, 0]


@pytest.mark.requires("gpu.memory")
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("out", ["int32", "int64"])
def test_a11_more_than_two_to_the_31(device: str, out: str) -> None:
    torch = support.torch()
    n = 2**31 + 9
    x = torch.zeros(n, dtype=torch.int8, device=device)
    x[1] = x[-1] = 1
    y = bc.cumsum(x, dtype=out)
    assert y[0].item() == 0
    assert bool((y[1:-1] == 1).all())
    assert y[-1].item() == 2


def test_a14_sums_of_ones_in_half_precision(device: str) -> None:
    got = bc.cumsum(on(device, np.ones(4096), "float16")).numpy()
    assert [float(got[k]) for k in (2047, 2048, 2049, 4095)] == [2048, 2048, 2050, 4096]
    got = bc.cumsum(on(device, np.ones(512), "bfloat16")).numpy()
    assert [float(got[k]) for k in (255, 256, 257, 511)] == [256, 256, 258, 512]


def test_a15_product_in_half_precision(device: str) -> None:
    got = bc.cumprod(on(device, [6.5] * 4, "float16")).numpy()
    assert got.astype(float).tolist() == [6.5, 42.25, 274.5, 1785]


def test_a17_reverse_and_exclusive(device: str) -> None:
    x = on(device, [1, 2, 3])
    assert bc.cumsum(x, exclusive=True).numpy().tolist() == [0, 1, 3]
    assert bc.cumsum(x, reverse=True).numpy().tolist() == [6, 5, 3]
    assert bc.cumsum(x, reverse=True, exclusive=True).numpy().tolist() == [5, 3, 0]
    square = on(device, np.arange(9).reshape(3, 3), "int64")
    assert bc.cumsum(square, axis=1, reverse=True).numpy().tolist() == [[3, 3, 2], [12, 9, 5], [21, 15, 8]]


def test_a19_the_same_bits_in_every_run(device: str) -> None:
    n = 1_000_003
    x64 = np.modf(np.arange(n) * np.pi)[0]
    x = on(device, x64)
    first = bc.cumsum(x).numpy().copy()
    for _ in range(19 if device == "cuda" else 2):
        np.testing.assert_array_equal(bc.cumsum(x).numpy(), first)
    exact = np.cumsum(x.numpy().astype(np.float64))
    assert (np.abs(first - exact) <= n * 2.0**-24 * exact + 2.0**-24).all()


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0, 4)])
@pytest.mark.parametrize("kind", [*KINDS, "linear_recurrence"])
def test_a20_empty_tensors(device: str, kind: str, shape: tuple[int, ...]) -> None:
    for axis in range(len(shape)):
        x = on(device, np.empty(shape))
        if kind == "linear_recurrence":
            rows = tuple(np.delete(shape, axis))
            h0 = on(device, np.ones(rows))
            assert bc.linear_recurrence(x, x, axis, h0=h0).shape == shape
            _, _, dh0 = bc.linear_recurrence_backward(x, x, x, axis, h0=h0)
            assert (dh0.numpy() == 0).all()
            continue
        assert getattr(bc, kind)(x, axis=axis).shape == shape
        arguments = {"cumsum": {}, "cumprod": {"x": x, "y": x}, "logcumsumexp": {"x": x, "y": x}}.get(kind, {"y": x})
        assert getattr(bc, f"{kind}_backward")(x, axis=axis, **arguments).shape == shape
    ints = bc.cumsum(on(device, np.empty(shape), "int32"), axis=-1)
    assert (ints.shape, ints.dtype) == (shape, "int64")


def test_a22_narrow_integers_are_widened(device: str) -> None:
    small = on(device, [200, 100, 50], "uint8")
    assert bc.cumsum(small).numpy().tolist() == [200, 300, 350]
    assert bc.cumprod(small).numpy().tolist() == [200, 20000, 1000000]
    assert bc.cumprod(on(device, [10000] * 3, "int32")).numpy().tolist() == [10**4, 10**8, 10**12]
    assert bc.cumsum(small, dtype="uint8").numpy().tolist() == [200, 300 % 256, 350 % 256]


@pytest.mark.parametrize("shape", [(100, 100), (1024, 128), (3, 5000)])
def test_a24_product_gradient_of_moderate_rows(device: str, shape: tuple[int, int]) -> None:
    ones = on(device, np.ones(shape))
    got = bc.cumprod_backward(ones, ones, ones).numpy()
    np.testing.assert_array_equal(got, np.broadcast_to(np.arange(shape[1], 0, -1), shape))


def test_a26_linear_recurrence(device: str) -> None:
    a, one = on(device, [2, 3, 5]), on(device, [1, 1, 1])
    h = bc.linear_recurrence(a, one)
    assert h.numpy().tolist() == [1, 4, 21]
    da, db = bc.linear_recurrence_backward(one, a, h)
    assert (da.numpy().tolist(), db.numpy().tolist()) == ([0, 6, 4], [19, 6, 1])


@pytest.mark.parametrize(("shape", "axis"), [((64, 1024), 1), ((1024, 64), 0), ((1, 50_000), 1)])
def test_a27_each_axis_of_large_arrays(device: str, shape: tuple[int, int], axis: int) -> None:
    x = np.random.default_rng(0).integers(-5, 5, shape).astype(np.int32)
    np.testing.assert_array_equal(bc.cumsum(on(device, x, "int32"), axis=axis).numpy(), np.cumsum(x, axis))


def test_f09_misaligned_slices(device: str) -> None:
    backend = Backend(device)
    got = run_forward(backend, "cumsum", np.arange(1, 1025, dtype=np.float32), 0, misalign=1)
    assert got[-1] == 524800
    run_forward(backend, "cumsum", np.ones(999, np.float16), 0, misalign=1)


# ---------------------------------------------------------------------------------------------------
# Where peers are wrong, by the list of what they do.


def test_differs_from_torch_on_purpose_half_sums(device: str) -> None:
    """torch on CUDA rounds each partial sum of float16 to float16 and ends at 4080 or 2048."""
    assert float(bc.cumsum(on(device, np.ones(4096), "float16")).numpy()[-1]) == 4096


def test_differs_from_torch_on_purpose_underflow(device: str) -> None:
    """torch divides an underflowed product and loses the gradient: [1, 0, 0]."""
    x = on(device, [1e-30, 1e-30, 1])
    got = bc.cumprod_backward(on(device, [1, 1, 1]), x, bc.cumprod(x)).numpy()
    np.testing.assert_allclose(got, [1, 2e-30, 0], rtol=1e-6)


def test_differs_from_torch_on_purpose_infinite_exponents(device: str) -> None:
    """torch gives NaN to an element that is -infinity; its weight is 0."""
    x = on(device, [-np.inf, 0, 1])
    got = bc.logcumsumexp_backward(on(device, [1, 1, 1]), x, bc.logcumsumexp(x)).numpy()
    np.testing.assert_allclose(got, [0, 1 + np.exp(-np.log1p(np.e)), np.exp(1 - np.log1p(np.e))], rtol=1e-6)


def test_differs_from_torch_on_purpose_mixed_signs(device: str) -> None:
    """torch adds positive and negative gradients apart, in the log domain, and loses their difference."""
    x = on(device, [0.0, 0.0, -40.0])
    g = on(device, [0.0, 1e6, -1e6 + 1])
    got = bc.logcumsumexp_backward(g, x, bc.logcumsumexp(x)).numpy()
    np.testing.assert_allclose(got[:2], [0.5, 0.5], rtol=0.2)


def test_infinities_of_logcumsumexp(device: str) -> None:
    inf, nan = np.inf, np.nan
    for x, expected in (
        ([inf, 1, inf], [inf] * 3),
        ([inf, -inf], [inf] * 2),
        ([1, nan, 2], [1, nan, nan]),
        ([inf, nan], [inf, nan]),
        ([-inf, nan, 1], [-inf, nan, nan]),
    ):
        np.testing.assert_allclose(bc.logcumsumexp(on(device, x)).numpy(), np.array(expected, np.float32), 2**-22)


def test_infinities_of_sums_and_products(device: str) -> None:
    inf, nan = np.inf, np.nan
    np.testing.assert_array_equal(bc.cumprod(on(device, [2, 0, inf])).numpy(), [2, 0, nan])
    np.testing.assert_array_equal(bc.cumprod(on(device, [inf, 0, 2])).numpy(), [inf, nan, nan])
    np.testing.assert_array_equal(bc.cumsum(on(device, [1, inf, -inf, 1])).numpy(), [1, inf, nan, nan])


def test_zeros_of_either_sign_tie(device: str) -> None:
    x = on(device, [0.0, -0.0, 0.0])
    y, where = bc.cummax(x, indices=True)
    assert (where.numpy().tolist(), np.signbit(y.numpy()).tolist()) == ([0, 0, 0], [False] * 3)
    y, where = bc.cummax(x, indices=True, ties="last")
    assert (where.numpy().tolist(), np.signbit(y.numpy()).tolist()) == ([0, 1, 2], [False, True, False])


def test_zero_in_a_product_of_large_numbers(device: str) -> None:
    """A zero sum stays zero beside maps whose product overflows."""
    n = 5000
    x = np.full(n, 10.0)
    g = np.zeros(n)
    g[0] = 1
    y = np.full(n, np.inf)
    y[:30] = 10.0 ** np.arange(1, 31)
    got = bc.cumprod_backward(on(device, g), on(device, x), on(device, y)).numpy()
    assert got[0] == 1
    assert not np.isnan(got[:30]).any()


# ---------------------------------------------------------------------------------------------------
# Refusals.


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"axis": 2}, bc.InvalidProblemError, "axis: expected -2 to 1"),
        ({"axis": -3}, bc.InvalidProblemError, "axis: expected -2 to 1"),
        ({"kind": "cummax", "out_dtype": "int64"}, bc.InvalidProblemError, "out_dtype"),
        ({"indices": True}, bc.InvalidProblemError, "indices"),
        ({"ties": "last"}, bc.InvalidProblemError, "ties"),
        ({"has_h0": True}, bc.InvalidProblemError, "has_h0"),
        ({"kind": "linear_recurrence", "exclusive": True}, bc.InvalidProblemError, "exclusive"),
        ({"kind": "cummax", "indices": True, "index_dtype": "int16"}, bc.InvalidProblemError, "index_dtype"),
        ({"kind": "logcumsumexp", "dtype": "int32"}, bc.UnsupportedError, "logcumsumexp of int32"),
        ({"dtype": "complex64"}, bc.UnsupportedError, "no kernel for cumsum of complex64$"),
        ({"out_dtype": "float16"}, bc.UnsupportedError, "float32 to float16"),
    ],
)
def test_refused_descriptors(device: str, fields: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        bc.ScanPlan(**{"kind": "cumsum", "shape": (2, 3), "dtype": "float32", "device": device, **fields})


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"dtype": "int32"}, bc.UnsupportedError, "int32"),
        ({"saved": "x"}, bc.InvalidProblemError, "saved"),
        ({"kind": "cummax", "ties": "last"}, bc.InvalidProblemError, "saved"),
    ],
)
def test_refused_gradients(device: str, fields: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        bc.ScanBackwardPlan(**{"kind": "cumsum", "shape": (2, 3), "dtype": "float32", "device": device, **fields})


def test_missing_and_surplus_operands(device: str) -> None:
    one = on(device, np.ones((2, 3)))
    plan = bc.ScanBackwardPlan(kind="cumprod", shape=(2, 3), dtype="float32", device=device)
    with pytest.raises(bc.InvalidProblemError, match="y: is missing"):
        plan.run(dy=one, x=one, dx=bc.empty((2, 3), "float32", device))
    with pytest.raises(bc.InvalidProblemError, match="h0"):
        plan.run(dy=one, x=one, y=one, h0=one, dx=bc.empty((2, 3), "float32", device))
    with pytest.raises(bc.InvalidProblemError, match="one of x, y and indices"):
        bc.cummax_backward(one)
    with pytest.raises(bc.InvalidProblemError, match="cummax: out_indices: expected indices=True"):
        bc.cummax(one, out_indices=one)


@given(data=st.data())
def test_any_shape_axis_and_flags(device: str, data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, 4))
    shape = tuple(data.draw(st.lists(st.integers(0, (150, 20, 7, 4)[rank - 1]), min_size=rank, max_size=rank)))
    axis = data.draw(st.integers(-rank, rank - 1))
    kind = data.draw(st.sampled_from(KINDS))
    dtype = data.draw(st.sampled_from(FLOATS))
    fields = {"reverse": data.draw(st.booleans()), "exclusive": data.draw(st.booleans())}
    x = values(kind, shape, dtype, data.draw(st.integers(0, 100)))
    layouts = (data.draw(st.sampled_from(OUTPUT_LAYOUTS)), data.draw(st.sampled_from(OUTPUT_LAYOUTS)))
    got = run_forward(Backend(device), kind, x, axis, layouts=layouts, misalign=data.draw(st.integers(0, 5)), **fields)
    if 0 in shape:
        return
    expected, _ = reference.scan(kind, x, axis, **fields)
    assert_close(got, expected, bound_of(kind, x, expected, axis, dtype, **fields))
