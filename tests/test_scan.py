# SPDX-License-Identifier: Apache-2.0
"""Scans against their definitions in float64.

Bounds. u is the rounding of the type that is computed in (2^-24, for float64 2^-53), v that of the dtype. A sum
of n terms in any order is within n u of the sum of the magnitudes; a product of n factors within n u of its own
magnitude; a value is rounded once more when it is stored, by v. Gradients are sums of products: (2 n + 4) u of the
magnitudes of their terms. The bounds below leave a factor of two for the second-order terms.

Where sums and products are stored as the type that they are computed in, what roundings lose is carried along: at
most n roundings of the magnitude, themselves rounded at most n times, so that n u becomes (n u)^2. For float64 this
is less than the references' own n u.
"""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import support
from hypothesis import given
from hypothesis import strategies as st
from support import INPUT_LAYOUTS, OUTPUT_LAYOUTS, Backend

import baracuda as bc
from reference import scan as reference

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("bool", "uint8", "int8", "int16", "int32", "int64")
KINDS = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")
EXTREMA = ("cummax", "cummin")
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}

# Rows that a few lanes, a warp, a block and several tiles hold; axes in front; odd extents. The CUDA kernels
# differ between these, the CPU's do not.
SHAPES = [
    ((1,), 0),
    ((7,), 0),
    ((3, 33), 1),
    ((5, 64), -1),
    ((2, 129), 1),
    ((3, 300), 1),
    ((2, 1030), 1),
    ((65, 3), 0),
    ((130, 40), 0),
    ((2, 37, 6), 1),
    ((4, 3, 2, 5), 2),
]


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def compute_rounding(dtype: str) -> float:
    return ROUNDING["float64" if dtype == "float64" else "float32"]


def values(kind: str, shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype in INTEGERS:
        return rng.integers(0 if dtype == "uint8" else -9, 10, shape).astype(dtype)
    if kind == "cumprod":
        # Products that stay near 1, with some zeros.
        x = rng.uniform(0.7, 1.35, shape) * rng.choice([-1, 1], shape)
        x[rng.random(shape) < 0.02] = 0
    elif kind in EXTREMA:
        # Few values, for ties.
        x = rng.integers(-20, 20, shape) / 4
    else:
        x = rng.normal(size=shape) * (3 if kind == "logcumsumexp" else 1)
    return x.astype(numpy_dtype(dtype))


def run_forward(
    backend: Backend,
    kind: str,
    x: np.ndarray,
    axis: int,
    *,
    layouts: tuple[str, str] = ("row_major",) * 2,
    misalign: int = 0,
    indices: bool = False,
    index_dtype: str = "int64",
    **fields: Any,
) -> Any:
    plan = bc.ScanPlan(
        kind=kind,
        shape=x.shape,
        axis=axis,
        dtype=x.dtype.name,
        indices=indices,
        index_dtype=index_dtype if indices else None,
        device=backend.device,
        **fields,
    )
    source = backend.input(x, layout=layouts[0], misalign=misalign)
    y = backend.output(x.shape, plan.operands[1].dtype, layout=layouts[1], misalign=misalign)
    where = backend.output(x.shape, index_dtype, layout=layouts[1])
    plan.run(x=source.tensor, y=y.tensor, **({"indices": where.tensor} if indices else {}))
    source.assert_untouched()
    y.assert_guards()
    where.assert_guards()
    return (y.numpy(), where.numpy()) if indices else y.numpy()


def carried(n: int, dtype: str) -> float:
    """Of sums and products of n elements, relative to the magnitude, before they are stored."""
    u = compute_rounding(dtype)
    return 2 * (n * u) ** 2 if dtype == "float32" else 2 * n * u


def bound_of(kind: str, x: np.ndarray, y: np.ndarray, axis: int, out: str, **fields: Any) -> np.ndarray:
    n = x.shape[axis]
    u = compute_rounding(x.dtype.name)
    stored = ROUNDING[out] * np.abs(y) + SMALLEST[out]
    if kind == "cumsum":
        sizes = np.abs(x.astype(np.float64))
        if fields.get("reverse"):
            magnitude = np.flip(np.add.accumulate(np.flip(sizes, axis), axis), axis)
        else:
            magnitude = np.add.accumulate(sizes, axis)
        return carried(n, out) * magnitude + stored
    if kind == "cumprod":
        return carried(n, out) * np.abs(y) + stored
    if kind == "logcumsumexp":
        # n u of the scaled sum, exponentials and logarithms within 4 u, and the sum with the largest element.
        return 2 * (n + 8) * u + 4 * u * np.abs(np.where(np.isfinite(y), y, 0)) + stored
    return np.zeros(y.shape)


def assert_close(got: np.ndarray, expected: np.ndarray, bound: np.ndarray) -> None:
    got = got.astype(np.float64)
    special = ~np.isfinite(expected)
    np.testing.assert_array_equal(got[special], expected[special])
    error = np.abs(got[~special] - expected[~special])
    assert (error <= bound[~special]).all(), f"off by {np.max(error / bound[~special])} bounds"


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


# ---------------------------------------------------------------------------------------------------
# Gradients.


def run_backward(
    backend: Backend,
    kind: str,
    dy: np.ndarray,
    x: np.ndarray,
    y: np.ndarray,
    axis: int,
    *,
    layout: str = "row_major",
    misalign: int = 0,
    saved: str | None = None,
    indices: np.ndarray | None = None,
    **fields: Any,
) -> np.ndarray:
    names = {"cumsum": (), "cumprod": ("x", "y"), "logcumsumexp": ("x", "y")}.get(kind, (saved or "y",))
    if kind in EXTREMA:
        fields["saved"] = saved or "y"
        if saved == "indices":
            fields["index_dtype"] = indices.dtype.name
    plan = bc.ScanBackwardPlan(
        kind=kind, shape=dy.shape, axis=axis, dtype=dy.dtype.name, device=backend.device, **fields
    )
    given_ = {"dy": dy, "x": x, "y": y, "indices": indices}
    operands = {name: backend.input(given_[name], layout=layout, misalign=misalign) for name in ("dy", *names)}
    dx = backend.output(dy.shape, dy.dtype.name, layout=layout, misalign=misalign)
    plan.run(dx=dx.tensor, **{name: operand.tensor for name, operand in operands.items()})
    dx.assert_guards()
    return dx.numpy()


def gradient_bound(kind: str, x: np.ndarray, y: np.ndarray, magnitude: np.ndarray, axis: int) -> np.ndarray:
    dtype = x.dtype.name
    n = x.shape[axis]
    u = compute_rounding(dtype)
    relative = 2 * ROUNDING[dtype]
    if kind == "logcumsumexp":
        # The saved outputs are rounded, which the exponentials see as a factor. Half types take a product of n of them.
        finite = np.abs(np.where(np.isfinite(y), y, 0)).max(initial=0)
        relative += 4 * (finite + 8) * ROUNDING[dtype] + 2 * (2 * n + 16) * u
        if dtype in ("float16", "bfloat16"):
            relative += 4 * n * (finite + 8) * u
    elif dtype == "float32":
        # The output is a product of two rounded numbers.
        relative += 2 * u + 2 * carried(2 * n, dtype)
    else:
        relative += 2 * (2 * n + 4) * u
    return relative * magnitude + SMALLEST[dtype]


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
        ({"dtype": "complex64"}, bc.UnsupportedError, "complex64"),
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
