# SPDX-License-Identifier: Apache-2.0
"""Scans of the sizes and layouts that each kernel is for, against float64 chains."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import support
from scan_problems import (
    KINDS,
    ROUNDING,
    SHAPES,
    SMALLEST,
    assert_close,
    carried,
    compute_rounding,
    gradient_bound,
    numpy_dtype,
    run_backward,
    run_forward,
    values,
)
from support import Backend

import baracuda as bc
from reference import scan as reference


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("shape", "axis"), [((3, 40), 1), ((2, 600), 1), ((230, 600), 1), ((1, 50001), 1), ((300, 70), 0)]
)
def test_each_kernel(device: str, kind: str, dtype: str, shape: tuple[int, ...], axis: int) -> None:
    """Every access pattern, forward and backward, aligned and not, against a float64 chain."""
    backend = Backend(device)
    x = values(kind, shape, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        wide = x.astype(np.float64)
        ufunc = {
            "cumsum": np.add,
            "cumprod": np.multiply,
            "cummax": np.maximum,
            "cummin": np.minimum,
            "logcumsumexp": np.logaddexp,
        }[kind]
        expected = ufunc.accumulate(wide, axis)
        magnitude = np.add.accumulate(np.abs(wide), axis) if kind == "cumsum" else np.abs(expected) + 1
    n = shape[axis]
    relative = carried(n, dtype) if kind in ("cumsum", "cumprod") else 2 * (n + 8) * ROUNDING["float32"]
    for misalign in (0, 1):
        y = run_forward(backend, kind, x, axis, misalign=misalign)
        bound = relative * magnitude + ROUNDING[dtype] * np.abs(expected) + SMALLEST[dtype]
        assert_close(y, expected, bound)
        again = run_forward(backend, kind, x, axis, misalign=1 - misalign)
        np.testing.assert_array_equal(again.view(np.uint8), y.view(np.uint8))
    run_backward(backend, kind, x, x, y, axis)


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_many_columns_are_as_few(device: str, kind: str, dtype: str) -> None:
    """Kernels for many columns give the bits of those for few, which other tests compare with references."""
    backend = Backend(device)
    # Of float32, two parts of tiles of columns.
    shape = (4, 150, 8200)
    x = values(kind, shape, dtype)
    dy = values("cumsum", shape, dtype, seed=1)
    for fields in ({}, {"reverse": True, "exclusive": True}):
        y = run_forward(backend, kind, x, 1, **fields)
        dx = run_backward(backend, kind, dy, x, y, 1, **fields)
        for part in (slice(0, 40), slice(-40, None)):
            few_x, few_dy, few_y = (np.ascontiguousarray(of[..., part]) for of in (x, dy, y))
            got = run_forward(backend, kind, few_x, 1, **fields)
            np.testing.assert_array_equal(got.view(np.uint8), few_y.view(np.uint8))
            got = run_backward(backend, kind, few_dy, few_x, few_y, 1, **fields)
            few_dx = np.ascontiguousarray(dx[..., part])
            np.testing.assert_array_equal(got.view(np.uint8), few_dx.view(np.uint8))


def test_alignment_does_not_show(device: str) -> None:
    backend = Backend(device)
    for shape, axis in [*SHAPES, ((1, 50001), 1), ((700, 33), 0)]:
        for dtype in ("float32", "bfloat16"):
            x = values("cumsum", shape, dtype)
            results = [run_forward(backend, "cumsum", x, axis, misalign=m).tobytes() for m in (0, 1, 3, 4)]
            assert len(set(results)) == 1


# Rows that CUDA cuts into tiles: whole ones and a part, which ends between sixteen bytes or not.
LONG = [(1, 50001), (3, 47120)]
# More rows than are taken for few elements: several in a warp or warps for each, whole runs in each lane or not.
MANY = [(2100, 64), (4200, 40), (140, 1024), (70, 2064)]
# Elements that misalign: nothing, an odd place, and ends of odd rows that are aligned again.
MISALIGNED = (0, 1, 7)


def small_steps(kind: str, shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Values whose products stay near 1 for long."""
    if kind != "cumprod":
        return values(kind, shape, dtype, seed)
    return np.exp(np.random.default_rng(seed).normal(size=shape) / 100).astype(numpy_dtype(dtype))


def chain(kind: str, x: np.ndarray) -> np.ndarray:
    """Along the last axis, one step after the other, in float64."""
    ufuncs = {"cumsum": np.add, "cumprod": np.multiply, "cummax": np.maximum, "logcumsumexp": np.logaddexp}
    return np.asarray(ufuncs[kind].accumulate(x.astype(np.float64), -1))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("kind", ["cumsum", "cumprod", "cummax", "logcumsumexp"])
@pytest.mark.parametrize("shape", LONG + MANY)
def test_long_rows_and_many(device: str, kind: str, dtype: str, shape: tuple[int, ...]) -> None:
    """From either end, exclusive too, with the same bits at every alignment."""
    backend = Backend(device)
    x = small_steps(kind, shape, dtype)
    n = shape[-1]
    relative = {"cummax": 0.0, "logcumsumexp": 2 * (n + 8) * compute_rounding(dtype)}.get(kind, carried(n, dtype))
    identity = {"cumsum": 0, "cumprod": 1}.get(kind, -np.inf)
    for reverse in (False, True):
        onward = x[:, ::-1] if reverse else x
        inclusive = chain(kind, onward)
        magnitude = chain(kind, np.abs(onward)) if kind == "cumsum" else np.abs(inclusive) + 1
        for exclusive in (False, True):
            expected, size = inclusive, magnitude
            if exclusive:
                expected = np.concatenate([np.full((shape[0], 1), identity), inclusive[:, :-1]], 1)
                size = np.concatenate([np.zeros((shape[0], 1)), magnitude[:, :-1]], 1)
            bound = relative * size + ROUNDING[dtype] * np.where(np.isfinite(expected), np.abs(expected), 0)
            results = [
                run_forward(backend, kind, x, 1, misalign=m, reverse=reverse, exclusive=exclusive) for m in MISALIGNED
            ]
            assert_close(results[0][:, ::-1] if reverse else results[0], expected, bound + SMALLEST[dtype])
            assert len({result.tobytes() for result in results}) == 1


@pytest.mark.parametrize(
    ("dtype", "index_dtype"),
    [
        pytest.param("float32", "int64", marks=pytest.mark.sanitizer),
        ("float32", "int32"),
        ("bfloat16", "int64"),
        ("bfloat16", "int32"),
        ("float64", "int64"),
        ("float64", "int32"),
        ("int32", "int64"),
    ],
)
@pytest.mark.parametrize("shape", LONG + MANY)
def test_indices_of_long_rows_and_many(device: str, dtype: str, index_dtype: str, shape: tuple[int, ...]) -> None:
    """From either end, with either rule for ties, at every alignment."""
    backend = Backend(device)
    n = shape[1]
    # New extrema all along the rows, and equal ones in between.
    steps = np.random.default_rng(5).integers(0, 6, shape) + np.minimum(np.arange(n), n - 1 - np.arange(n)) // 2000
    x = steps.astype(numpy_dtype(dtype))
    for reverse in (False, True):
        turn = slice(None, None, -1 if reverse else 1)
        expected = np.maximum.accumulate(steps[:, turn], 1)
        before = np.concatenate([np.full((shape[0], 1), -1), expected[:, :-1]], 1)
        for ties in ("first", "last"):
            new = steps[:, turn] > before if ties == "first" else steps[:, turn] >= before
            where = np.maximum.accumulate(np.where(new, np.arange(n), 0), 1)
            for misalign in MISALIGNED:
                y, indices = run_forward(
                    backend,
                    "cummax",
                    x,
                    1,
                    indices=True,
                    index_dtype=index_dtype,
                    misalign=misalign,
                    reverse=reverse,
                    ties=ties,
                )
                np.testing.assert_array_equal(y[:, turn].astype(np.int64), expected)
                np.testing.assert_array_equal(indices[:, turn], n - 1 - where if reverse else where)


def gradient_chain(g: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """S_j = g_j + c_{j+1} S_{j+1} along the last axis in float64, and the same of magnitudes."""
    terms = np.stack([g, np.abs(g)]).T.astype(np.float64)
    factors = np.stack([c, np.abs(c)]).T
    sums = np.empty(terms.shape)
    total = np.zeros(terms.shape[1:])
    for j in reversed(range(len(terms))):
        sums[j] = total = terms[j] + total
        total = factors[j] * total
    return tuple(sums.T)


def gradient_case(kind: str, shape: tuple[int, int], dtype: str) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """dy, x and y along the last axis, what the gradient is, and how far off it may be."""
    x = small_steps(kind, shape, dtype)
    dy = values("cumsum", shape, dtype, seed=1)
    y = chain(kind, x)
    wide = x.astype(np.float64)
    before = np.concatenate([np.full((shape[0], 1), 1 if kind == "cumprod" else -np.inf), y[:, :-1]], 1)
    # c_j of the step from j to j - 1, and what is left of S_j.
    c, o = {
        "cumsum": lambda: (np.ones(shape), np.ones(shape)),
        "cumprod": lambda: (wide, before),
        "cummax": lambda: (1.0 * (y == before), 1.0 * (y != before)),
        "logcumsumexp": lambda: (np.exp(before - y), np.exp(wide - y)),
    }[kind]()
    sums, sizes = gradient_chain(dy.astype(np.float64), c)
    return [dy, x, y.astype(x.dtype)], o * sums, gradient_bound(kind, x, y, np.abs(o) * sizes, 1)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["cumsum", "cumprod", "cummax", "logcumsumexp"])
@pytest.mark.parametrize("shape", LONG + MANY)
def test_gradients_of_long_rows_and_many(device: str, kind: str, dtype: str, shape: tuple[int, int]) -> None:
    backend = Backend(device)
    case, expected, bound = gradient_case(kind, shape, dtype)
    for reverse in (False, True):
        operands = [np.ascontiguousarray(operand[:, ::-1]) if reverse else operand for operand in case]
        results = [run_backward(backend, kind, *operands, 1, misalign=m, reverse=reverse) for m in MISALIGNED]
        assert_close(results[0][:, ::-1] if reverse else results[0], expected, bound)
        assert len({result.tobytes() for result in results}) == 1


@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("kind", ["cumprod", "cummax", "logcumsumexp"])
def test_rows_of_halves_that_fill_the_card(device: str, kind: str) -> None:
    """So many rows that each gets few of the kernel's warps, which go over it piece by piece."""
    case, expected, bound = gradient_case(kind, (4, 2100), "bfloat16")
    operands = [np.tile(operand, (2050, 1)) for operand in case]
    got = run_backward(Backend(device), kind, *operands, 1).reshape(2050, 4, 2100)
    assert_close(got[0], expected, bound)
    assert (got.view(np.uint16) == got[0].view(np.uint16)).all()


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", LONG + MANY)
def test_long_recurrences_and_many(device: str, dtype: str, shape: tuple[int, ...]) -> None:
    """With a value before the first, and its gradient."""
    backend = Backend(device)
    rng = np.random.default_rng(3)
    kind = numpy_dtype(dtype)
    a = rng.uniform(-1, 1, shape).astype(kind)
    b, g = (rng.normal(size=shape).astype(kind) for _ in range(2))
    h0 = rng.normal(size=shape[:1]).astype(kind)
    u, v = compute_rounding(dtype), ROUNDING[dtype]
    n = shape[1]
    fields: dict[str, Any] = {
        "kind": "linear_recurrence",
        "shape": shape,
        "axis": 1,
        "dtype": dtype,
        "has_h0": True,
        "device": device,
    }
    expected, magnitude = reference.linear_recurrence(a, b, 1, h0=h0)
    saved = expected.astype(kind)
    wide = a.astype(np.float64)
    before = np.concatenate([h0[:, None], saved[:, :-1]], 1).astype(np.float64)
    sums, sizes = gradient_chain(g.astype(np.float64), wide)
    want = [before * sums, sums, wide[:, 0] * sums[:, 0]]
    size = [np.abs(before) * sizes, sizes, np.abs(wide[:, 0]) * sizes[:, 0]]
    for reverse in (False, True):
        turn = slice(None, None, -1 if reverse else 1)
        arrays = {name: value[:, turn].copy() for name, value in (("a", a), ("b", b), ("dh", g), ("h", saved))}
        for misalign in MISALIGNED:
            operands = {name: backend.input(value, misalign=misalign).tensor for name, value in arrays.items()}
            initial = backend.array(h0)
            h = backend.output(shape, dtype, misalign=misalign)
            bc.ScanPlan(**fields, reverse=reverse).run(h=h.tensor, h0=initial, a=operands["a"], b=operands["b"])
            h.assert_guards()
            bound = 4 * n * u * magnitude + v * np.abs(expected) + SMALLEST[dtype]
            assert_close(h.numpy()[:, turn], expected, bound)
            outputs = {name: backend.output(shape, dtype, misalign=misalign) for name in ("da", "db")}
            outputs["dh0"] = backend.output(shape[:1], dtype)
            bc.ScanBackwardPlan(**fields, reverse=reverse).run(
                h0=initial,
                **{name: operands[name] for name in ("dh", "a", "h")},
                **{name: output.tensor for name, output in outputs.items()},
            )
            for output, exact, scale in zip(outputs.values(), want, size, strict=True):
                output.assert_guards()
                got = output.numpy()
                bound = (8 * n + 8) * u * scale + 2 * v * np.abs(exact) + SMALLEST[dtype]
                assert_close(got[:, turn] if got.ndim == 2 else got, exact, bound)


@pytest.mark.sanitizer
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("columns", [520, 521])
def test_recurrences_along_many_columns(device: str, columns: int, dtype: str, reverse: bool) -> None:
    """Gradients by tiles of columns, with many lines and odd ones."""
    backend = Backend(device)
    rng = np.random.default_rng(4)
    kind = numpy_dtype(dtype)
    shape = (2, 530, columns)
    a = rng.uniform(-1, 1, shape).astype(kind)
    g, saved = (rng.normal(size=shape).astype(kind) for _ in range(2))
    h0 = rng.normal(size=(2, columns)).astype(kind)
    plan = bc.ScanBackwardPlan(
        kind="linear_recurrence", shape=shape, axis=1, dtype=dtype, reverse=reverse, has_h0=True, device=device
    )
    outputs = {name: backend.output(shape, dtype) for name in ("da", "db")}
    outputs["dh0"] = backend.output(h0.shape, dtype)
    inputs = {"dh": g, "a": a, "h": saved, "h0": h0}
    plan.run(
        **{name: backend.array(value) for name, value in inputs.items()},
        **{name: output.tensor for name, output in outputs.items()},
    )
    # Columns as rows, from the first element on.
    turn = slice(None, None, -1 if reverse else 1)
    rows = {
        name: np.moveaxis(value, 1, -1)[..., turn].reshape(-1, shape[1]).astype(np.float64)
        for name, value in inputs.items()
        if name != "h0"
    }
    before = np.concatenate([h0.reshape(-1, 1).astype(np.float64), rows["h"][:, :-1]], 1)
    sums, sizes = gradient_chain(rows["dh"], rows["a"])
    want = [before * sums, sums, rows["a"][:, :1] * sums[:, :1]]
    size = [np.abs(before) * sizes, sizes, np.abs(rows["a"][:, :1]) * sizes[:, :1]]
    u, v = compute_rounding(dtype), ROUNDING[dtype]
    for output, exact, scale in zip(outputs.values(), want, size, strict=True):
        output.assert_guards()
        got = output.numpy()
        got = (np.moveaxis(got, 1, -1)[..., turn] if got.ndim == 3 else got).reshape(exact.shape)
        assert_close(got, exact, (8 * shape[1] + 8) * u * scale + 2 * v * np.abs(exact) + SMALLEST[dtype])


@pytest.mark.requires("gpu.memory")
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize(("shape", "axis"), [((2**16 + 1, 2**15), 1), ((2**16 + 1, 2**15), 0), ((2**25 + 1, 64), 1)])
def test_many_elements_in_rows_and_columns(device: str, shape: tuple[int, int], axis: int) -> None:
    torch = support.torch()
    x = torch.ones(shape, dtype=torch.int8, device=device)
    y = bc.cumsum(x, axis=axis, dtype="int32")
    expected = torch.arange(1, shape[axis] + 1, dtype=torch.int32, device=device)
    assert bool((y[-1] == expected).all() if axis == 1 else (y[:, -1] == expected).all())
    assert bool((y[:, -1] == shape[1]).all() if axis == 1 else (y[-1] == shape[0]).all())
