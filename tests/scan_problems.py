# SPDX-License-Identifier: Apache-2.0
"""Values for scans, their runs, and the bounds that results are held to.

Bounds. u is the rounding of the type that is computed in (2^-24, for float64 2^-53), v that of the dtype. A sum
of n terms in any order is within n u of the sum of the magnitudes; a product of n factors within n u of its own
magnitude; a value is rounded once more when it is stored, by v. Gradients are sums of products: (2 n + 4) u of the
magnitudes of their terms. The bounds below leave a factor of two for the second-order terms.

Where sums and products are stored as the type that they are computed in, what roundings lose is carried along: at
most n roundings of the magnitude, themselves rounded at most n times, so that n u becomes (n u)^2. For float64 this
is less than the references' own n u.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from support import Backend

import baracuda as bc

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


def assert_close(got: np.ndarray, expected: np.ndarray, bound: np.ndarray) -> None:
    got = got.astype(np.float64)
    special = ~np.isfinite(expected)
    np.testing.assert_array_equal(got[special], expected[special])
    error = np.abs(got[~special] - expected[~special])
    assert (error <= bound[~special]).all(), f"off by {np.max(error / bound[~special])} bounds"
