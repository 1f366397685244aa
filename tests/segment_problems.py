# SPDX-License-Identifier: Apache-2.0
"""Ids and data of segment reductions, their runs, and the bounds that results are held to."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import support
from support import Backend, assert_same_bits

import baracuda as bc
from reference import segment as reference

KINDS = ("sum", "mean", "max", "min", "prod")
FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "uint8", "int32", "int64")
FORMS = ("unsorted", "sorted", "offsets")
EXTREMES = ("max", "min")
#: Far outside, and what would become an id if it were cut to fewer bits.
HOSTILE = {
    "int32": (-1, -(2**31), 2**31 - 1, 2**30),
    "int64": (-1, -(2**63), 2**63 - 1, 2**32, 2**32 + 1, -(2**32) + 1, 2**31),
}
#: Half a unit in the last place, relative.
UNIT = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24, "float64": 2**-53}
TINY = {"float16": 2**-25, "bfloat16": 2**-134, "float32": 2**-150, "float64": 2**-1075}


def make_ids(
    rng: np.random.Generator, form: str, rows: int, segments: int, dtype: str = "int64", *, hostile: bool = False
) -> np.ndarray:
    if form == "offsets":
        offsets = np.sort(rng.integers(0, rows + 1, segments + 1))
        if hostile:
            offsets[0], offsets[-1] = HOSTILE[dtype][1], HOSTILE[dtype][2]
        return offsets.astype(dtype)
    ids = rng.integers(0, max(segments, 1), rows)
    if hostile:
        ids = np.where(rng.random(rows) < 0.2, rng.choice(np.array(HOSTILE[dtype]), rows), ids)
    return (np.sort(ids) if form == "sorted" else ids).astype(dtype)


def make_data(rng: np.random.Generator, shape: tuple[int, int], dtype: str, *, specials: bool = False) -> np.ndarray:
    """Few different values, so that there are ties; zeros of both signs; NaN and infinities if wanted."""
    if dtype in INTEGERS:
        info = np.iinfo(dtype)
        data = rng.integers(-6 if info.min < 0 else 0, 6, shape).astype(dtype)
        data[rng.random(shape) < 0.1] = info.min
        data[rng.random(shape) < 0.1] = info.max
        return data
    data = rng.integers(-4, 5, shape).astype(np.float64) / 2
    data[rng.random(shape) < 0.1] = -0.0
    if specials:
        data[rng.random(shape) < 0.05] = np.nan
        data[rng.random(shape) < 0.1] = -np.inf
        data[rng.random(shape) < 0.1] = np.inf
    return data.astype(support.DTYPES[dtype].numpy)


def name_of(form: str) -> str:
    return "offsets" if form == "offsets" else "segment_ids"


def forward(
    backend: Backend,
    kind: str,
    data: np.ndarray,
    ids: np.ndarray,
    segments: int,
    form: str = "unsorted",
    *,
    layouts: tuple[str, str] = ("row_major", "row_major"),
    misalign: int = 0,
    preference: bc.PlanPreference | None = None,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Runs the plan between guards and returns the output and arg."""
    plan = bc.SegmentReducePlan(
        kind=kind, num_inputs=data.shape[0], embedding_dim=data.shape[1], num_segments=segments,
        dtype=data.dtype.name, index_dtype=ids.dtype.name, ids=form, device=backend.device, preference=preference,
        **options,
    )  # fmt: skip
    placed = {
        "input": backend.input(data, layout=layouts[0], misalign=misalign),
        name_of(form): backend.input(ids, layout="negative" if layouts[0] != "row_major" else "row_major"),
        "output": backend.output((segments, data.shape[1]), data.dtype.name, layout=layouts[1], misalign=misalign),
    }
    if options.get("return_arg"):
        placed["arg"] = backend.output((segments, data.shape[1]), ids.dtype.name, layout=layouts[1])
    plan.run(**{name: operand.tensor for name, operand in placed.items()})
    placed["input"].assert_untouched()
    placed[name_of(form)].assert_untouched()
    placed["output"].assert_guards()
    if "arg" not in placed:
        return placed["output"].numpy(), None
    placed["arg"].assert_guards()
    return placed["output"].numpy(), placed["arg"].numpy()


def backward(
    backend: Backend,
    kind: str,
    d_output: np.ndarray,
    data: np.ndarray,
    ids: np.ndarray,
    form: str = "unsorted",
    *,
    arg: np.ndarray | None = None,
    layouts: tuple[str, str] = ("row_major", "row_major"),
    misalign: int = 0,
    **options: Any,
) -> np.ndarray:
    plan = bc.SegmentReduceBackwardPlan(
        kind=kind, num_inputs=data.shape[0], embedding_dim=data.shape[1], num_segments=d_output.shape[0],
        dtype=data.dtype.name, index_dtype=ids.dtype.name, ids=form, saved="input" if arg is None else "arg",
        device=backend.device, **options,
    )  # fmt: skip
    placed = {
        "d_output": backend.input(d_output, layout=layouts[0], misalign=misalign),
        name_of(form): backend.input(ids),
        "d_input": backend.output(data.shape, data.dtype.name, layout=layouts[1], misalign=misalign),
    }
    if kind == "prod" or (kind in EXTREMES and arg is None):
        placed["input"] = backend.input(data, layout=layouts[0], misalign=misalign)
    if arg is not None:
        placed["arg"] = backend.input(arg, layout=layouts[0])
    plan.run(**{name: operand.tensor for name, operand in placed.items()})
    placed["d_input"].assert_guards()
    return placed["d_input"].numpy()


def assert_close(got: np.ndarray, expected: np.ndarray, bound: Any) -> None:
    """Equal where it isn't finite, else within `bound`."""
    got = got.astype(np.float64)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(got[~finite], expected[~finite])
    excess = np.abs(got[finite] - expected[finite]) - np.broadcast_to(bound, expected.shape)[finite]
    assert (excess <= 0).all(), f"{excess.max()} beyond the bound"


def magnitudes(data: np.ndarray, members: list[list[int]]) -> np.ndarray:
    """The sum of the magnitudes of each segment's columns."""
    finite = np.where(np.isfinite(data.astype(np.float64)), np.abs(data.astype(np.float64)), 0)
    grouped = reference.Grouped(members)
    return grouped.reduce(np.add, finite[grouped.rows], 0)


def check_forward(
    kind: str, data: np.ndarray, members: list[list[int]], output: np.ndarray, arg: np.ndarray | None = None
) -> None:
    expected, expected_arg = reference.forward(kind, data, members)
    if arg is not None:
        np.testing.assert_array_equal(arg, expected_arg)
    dtype = data.dtype.name
    if dtype in INTEGERS:
        np.testing.assert_array_equal(output, expected)
        return
    if kind in EXTREMES:
        assert_same_numbers(output, expected.astype(data.dtype))
        return
    counts = np.array([len(rows) for rows in members]).reshape(-1, 1)
    real = UNIT["float64" if dtype == "float64" else "float32"]
    within = np.where(np.isfinite(expected), np.abs(expected), 0)
    if kind == "prod":
        # One rounding for each factor, and one at the store.
        bound = (counts * real * 1.01 + UNIT[dtype]) * within + TINY[dtype]
        expected = rounded_range(expected, dtype)
    else:
        # One for each sum, of which none is above the sum of the magnitudes.
        scale = magnitudes(data, members) / (np.maximum(counts, 1) if kind == "mean" else 1)
        bound = (counts + 1) * real * 1.01 * scale + UNIT[dtype] * within + TINY[dtype]
    assert_close(output, expected, bound)


def rounded_range(values: np.ndarray, dtype: str) -> np.ndarray:
    """With infinities for what the dtype can't hold."""
    largest = float(ml_dtypes.finfo(support.DTYPES[dtype].numpy).max)
    beyond = np.isfinite(values) & (np.abs(values) > largest)
    return np.where(beyond, np.copysign(np.inf, values), values)


def assert_same_numbers(got: np.ndarray, expected: np.ndarray) -> None:
    """The same bits, but for those of NaN."""
    nan = np.isnan(expected.astype(np.float64))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float64)), nan)
    assert_same_bits(np.where(nan, got.dtype.type(0), got), np.where(nan, got.dtype.type(0), expected))


def check_backward(
    kind: str, d_output: np.ndarray, data: np.ndarray, members: list[list[int]], d_input: np.ndarray, ties: str
) -> None:
    expected = reference.backward(kind, d_output, data, members, ties)
    dtype = data.dtype.name
    if kind == "sum" or (kind in EXTREMES and ties == "first"):
        assert_same_numbers(d_input, expected.astype(data.dtype))
        return
    counts = np.zeros((data.shape[0], 1))
    grouped = reference.Grouped(members)
    counts[grouped.rows, 0] = grouped.lengths[grouped.segments]
    real = UNIT["float64" if dtype == "float64" else "float32"]
    # Of prod: a rounding for each factor, one for the quotient, one for d_output.
    roundings = counts + 3 if kind == "prod" else 1
    bound = (roundings * real * 1.01 + UNIT[dtype]) * np.abs(np.where(np.isfinite(expected), expected, 0))
    assert_close(d_input, rounded_range(expected, dtype), bound + TINY[dtype])
