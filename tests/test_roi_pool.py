# SPDX-License-Identifier: Apache-2.0
"""RoI-pooling against its reference: bit for bit, forward and backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import support
from hypothesis import given
from hypothesis import strategies as st
from support import INPUT_LAYOUTS, OUTPUT_LAYOUTS, Backend, assert_same_bits

import baracuda as bc
from reference import image as reference

DTYPES = ("float16", "bfloat16", "float32", "float64")


def fields(shape: tuple[int, ...], count: int, pooled: tuple[int, int]) -> dict[str, Any]:
    return {
        **dict(zip("nchw", shape, strict=True)),
        "num_rois": count,
        "pooled_h": pooled[0],
        "pooled_w": pooled[1],
    }


def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, *, specials: bool = False) -> np.ndarray:
    """Few different values, so that there are ties; NaN and infinities if wanted."""
    x = rng.integers(-6, 6, shape).astype(np.float64)
    if specials:
        x[rng.random(shape) < 0.05] = np.nan
        x[rng.random(shape) < 0.3] = -np.inf
        x[rng.random(shape) < 0.05] = np.inf
    return x.astype(support.DTYPES[dtype].numpy)


def draw_rois(rng: np.random.Generator, count: int, shape: tuple[int, ...], *, strange: bool = False) -> np.ndarray:
    n, _, h, w = shape
    corners = rng.uniform(-0.3, 1.3, (count, 2, 2)) * [w, h]
    corners.sort(axis=1)
    rois = np.concatenate([rng.integers(0, n, (count, 1)), corners.reshape(count, 4)], axis=1)
    for r in range(count if strange else 0):
        kind = rng.integers(0, 7)
        if kind == 0:
            rois[r, 1:] = rois[r, [3, 4, 1, 2]]
        elif kind == 1:
            # Halves, which are rounded away from zero.
            rois[r, 1:] = np.rint(rois[r, 1:]) + 0.5
        elif kind == 2:
            rois[r, int(rng.integers(1, 5))] = rng.choice([np.nan, np.inf, -np.inf, 3e38, -3e38, 1e6, -1e6])
        elif kind == 3:
            rois[r, 0] = rng.choice([-1, n, np.nan, np.inf, -0.5, n - 0.5, 1e30])
    return rois.astype(np.float32)


def forward(
    backend: Backend,
    x: np.ndarray,
    rois: np.ndarray,
    pooled: tuple[int, int],
    scale: float = 1.0,
    *,
    layouts: tuple[str, str] = ("row_major", "row_major"),
    misalign: int = 0,
    index_dtype: str | None = "int32",
    max_workspace: int | None = None,
) -> tuple[np.ndarray, np.ndarray | None]:
    plan = bc.RoiPoolPlan(
        **fields(x.shape, rois.shape[0], pooled), spatial_scale=scale, dtype=x.dtype.name, rois_dtype=rois.dtype.name,
        index_dtype=index_dtype, device=backend.device, preference=bc.PlanPreference(max_workspace=max_workspace),
    )  # fmt: skip
    assert max_workspace is None or plan.workspace_size <= max_workspace
    shape = (rois.shape[0], x.shape[1], *pooled)
    source = backend.input(x, layout=layouts[0], misalign=misalign)
    output = backend.output(shape, x.dtype.name, layout=layouts[1], misalign=misalign)
    argmax = None if index_dtype is None else backend.output(shape, index_dtype, layout=layouts[1], misalign=misalign)
    extra = {} if argmax is None else {"argmax": argmax.tensor}
    boxes = backend.input(rois, layout="row_major" if layouts[0] == "broadcast" else layouts[0])
    plan.run(input=source.tensor, rois=boxes.tensor, output=output.tensor, **extra)
    output.assert_guards()
    source.assert_untouched()
    if argmax is None:
        return output.numpy(), None
    argmax.assert_guards()
    return output.numpy(), argmax.numpy()


def backward(
    backend: Backend,
    dy: np.ndarray,
    argmax: np.ndarray,
    rois: np.ndarray,
    shape: tuple[int, ...],
    scale: float = 1.0,
    *,
    layouts: tuple[str, str] = ("row_major", "row_major"),
    misalign: int = 0,
    dx: np.ndarray | None = None,
    max_workspace: int | None = None,
) -> np.ndarray:
    plan = bc.RoiPoolBackwardPlan(
        **fields(shape, rois.shape[0], dy.shape[2:]), spatial_scale=scale, dtype=dy.dtype.name,
        rois_dtype=rois.dtype.name, index_dtype=argmax.dtype.name, accumulate=dx is not None, device=backend.device,
        preference=bc.PlanPreference(max_workspace=max_workspace),
    )  # fmt: skip
    assert max_workspace is None or plan.workspace_size <= max_workspace
    if dx is None:
        written = backend.output(shape, dy.dtype.name, layout=layouts[1], misalign=misalign)
    else:
        written = backend.input(dx, layout=layouts[1], misalign=misalign)
    operands = {
        "doutput": backend.input(dy, layout=layouts[0], misalign=misalign),
        "rois": backend.input(rois),
        "argmax": backend.input(argmax, layout=layouts[0]),
    }
    plan.run(**{name: placed.tensor for name, placed in operands.items()}, dinput=written.tensor)
    written.assert_guards()
    for placed in operands.values():
        placed.assert_untouched()
    return written.numpy()


def check(
    backend: Backend, x: np.ndarray, rois: np.ndarray, pooled: tuple[int, int], scale: float = 1.0, **options: Any
) -> None:
    """Forward, backward and backward that adds."""
    real = np.float64 if x.dtype == np.float64 else np.float32
    index_dtype = options.pop("index_dtype", "int32")
    y, argmax = forward(backend, x, rois, pooled, scale, index_dtype=index_dtype, **options)
    expected_y, expected_argmax = reference.roi_pool(x, rois, pooled, scale, real)
    np.testing.assert_array_equal(argmax, expected_argmax)
    assert_same_bits(y, expected_y)
    rng = np.random.default_rng(7)
    dy = rng.standard_normal(y.shape).astype(x.dtype)
    dx = backward(backend, dy, argmax, rois, x.shape, scale, **options)
    assert_same_bits(dx, reference.roi_pool_backward(dy, expected_argmax, rois, x.shape))
    before = rng.standard_normal(x.shape).astype(x.dtype)
    dx = backward(backend, dy, argmax, rois, x.shape, scale, dx=before, **options)
    assert_same_bits(dx, reference.roi_pool_backward(dy, expected_argmax, rois, x.shape, before))


PROBLEMS = {
    "7 x 7": ((2, 5, 20, 23), 9, (7, 7), 0.5),
    "bins of many cells": ((1, 3, 41, 50), 5, (2, 3), 1.0),
    "bins smaller than cells": ((1, 37, 9, 8), 6, (14, 13), 1.0),
    "one cell": ((3, 2, 1, 1), 7, (2, 2), 1.0),
    "one bin": ((2, 70, 17, 33), 8, (1, 1), 1.0),
    "many bins of many channels": ((2, 150, 13, 17), 9, (11, 10), 0.5),
    "more columns of bins than lanes": ((1, 2, 12, 150), 5, (2, 70), 1.0),
    "more columns than a band's": ((1, 9, 4, 5000), 4, (3, 20), 1.0),
    "more columns than a block's": ((1, 2, 2, 21000), 3, (2, 5), 1.0),
    "more rows than a band's": ((1, 33, 300, 24), 20, (7, 7), 1.0),
    "more boxes than a block lists": ((1, 2, 9, 8), 1100, (3, 2), 1.0),
    "more bins than a block lists": ((1, 2, 9, 8), 3, (3000, 2), 1.0),
    "many boxes over the same cells": ((1, 3, 6, 7), 200, (7, 7), 1.0),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_matches_the_reference(backend: Backend, problem: str, dtype: str) -> None:
    shape, count, pooled, scale = PROBLEMS[problem]
    rng = np.random.default_rng(len(problem))
    for specials, index_dtype in ((False, "int32"), (True, "int64")):
        rois = draw_rois(rng, count, shape, strange=True)
        rois[:, 1:] *= np.where(np.abs(rois[:, 1:]) < 1e30, 1 / scale, 1).astype(np.float32)
        if specials:
            rois = rois.astype(np.float64)
        check(backend, draw(rng, shape, dtype, specials=specials), rois, pooled, scale, index_dtype=index_dtype)


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["row_major", "channels_last"])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_kernels_under_the_sanitizer(backend: Backend, problem: str, layout: str, dtype: str) -> None:
    shape, count, pooled, scale = PROBLEMS[problem]
    rng = np.random.default_rng(3)
    rois = draw_rois(rng, count, shape, strange=True)
    check(backend, draw(rng, shape, dtype), rois, pooled, scale, layouts=(layout, layout), misalign=1)


@pytest.mark.parametrize("layout", sorted({*INPUT_LAYOUTS, *OUTPUT_LAYOUTS}))
def test_layouts(backend: Backend, layout: str) -> None:
    rng = np.random.default_rng(1)
    shape = (2, 35, 18, 21)
    rois = draw_rois(rng, 6, shape)
    x = draw(rng, shape, "float16")
    if layout == "broadcast":
        x[...] = x[:1]
        y, argmax = forward(backend, x, rois, (3, 4), layouts=("broadcast", "row_major"))
        expected = reference.roi_pool(x, rois, (3, 4), 1.0, np.float32)
        assert_same_bits(y, expected[0])
        np.testing.assert_array_equal(argmax, expected[1])
    else:
        check(backend, x, rois, (3, 4), layouts=(layout, layout), misalign=1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_workspace(backend: Backend, dtype: str) -> None:
    rng = np.random.default_rng(4)
    shape = (2, 36, 12, 15)
    check(backend, draw(rng, shape, dtype), draw_rois(rng, 9, shape, strange=True), (3, 4), max_workspace=0)


def test_paths(device: str) -> None:
    """A few channels, or a few boxes, aren't worth turning the map."""
    common = {"dtype": "float32", "index_dtype": "int32", "device": device}
    paths = []
    for channels, count, bound in ((32, 9, None), (31, 9, None), (32, 1, None), (32, 9, 0)):
        problem = {**common, **fields((2, channels, 12, 15), count, (3, 4))}
        plan = bc.RoiPoolPlan(**problem, preference=bc.PlanPreference(max_workspace=bound))
        assert (plan.workspace_size > 0) == (plan.path == "turned")
        paths.append(plan.path)
    assert paths == (["direct"] * 4 if device == "cpu" else ["turned", "any", "any", "any"])


@given(st.data())
def test_any_problem(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = tuple(data.draw(st.integers(1, most)) for most in (3, 40, 20, 20))
    pooled = (data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rois = draw_rois(rng, data.draw(st.integers(0, 9)), shape, strange=True)
    x = draw(rng, shape, dtype, specials=data.draw(st.booleans()))
    scale = data.draw(st.sampled_from((1.0, 0.3)))
    for device in ("cpu", "cuda") if bc.cuda_device_count() else ("cpu",):
        check(Backend(device), x, rois, pooled, scale)


@pytest.mark.parametrize(
    ("shape", "count", "pooled"),
    [
        ((0, 3, 5, 5), 2, (2, 2)),
        ((2, 0, 5, 5), 2, (2, 2)),
        ((2, 3, 0, 5), 2, (2, 2)),
        ((2, 3, 5, 0), 2, (2, 2)),
        ((2, 3, 5, 5), 0, (2, 2)),
        ((2, 3, 5, 5), 2, (0, 2)),
        ((2, 3, 5, 5), 2, (2, 0)),
    ],
)
def test_empty_extents(backend: Backend, shape: tuple[int, ...], count: int, pooled: tuple[int, int]) -> None:
    rois = np.tile(np.array([[0, 0, 0, 4, 4]], np.float32), (count, 1))
    y, argmax = forward(backend, np.ones(shape, np.float32), rois, pooled)
    assert y.shape == (count, shape[1], *pooled)
    assert not y.any()
    assert (argmax == -1).all()
    assert not backward(backend, np.ones(y.shape, np.float32), argmax, rois, shape).any()


def test_bad_argmax_adds_nothing(backend: Backend) -> None:
    rng = np.random.default_rng(6)
    shape = (2, 3, 12, 14)
    rois = np.array([[0, 1, 1, 9, 8], [1, 3, 0, 13, 11], [1, 0, 0, 2, 2]], np.float32)
    x = draw(rng, shape, "float32")
    for index_dtype in ("int32", "int64"):
        _, argmax = forward(backend, x, rois, (2, 3), index_dtype=index_dtype)
        dy = rng.standard_normal(argmax.shape).astype(np.float32)
        limits = np.iinfo(index_dtype)
        # The last two are cells, but not of the bin.
        garbage = [-1, 12 * 14, limits.min, limits.max, 0, 12 * 14 - 1]
        damaged, kept = argmax.copy(), dy.copy()
        damaged[0, 0].reshape(-1)[:] = garbage
        kept[0, 0] = 0
        got = backward(backend, dy, damaged, rois, shape)
        assert_same_bits(got, reference.roi_pool_backward(kept, argmax, rois, shape))


def test_backward_has_the_same_bits_in_every_run(backend: Backend) -> None:
    rng = np.random.default_rng(8)
    shape = (2, 40, 30, 33)
    rois = draw_rois(rng, 50, shape)
    _, argmax = forward(backend, draw(rng, shape, "float16"), rois, (5, 4))
    dy = rng.standard_normal(argmax.shape).astype(np.float16)
    first = backward(backend, dy, argmax, rois, shape)
    for layout, misalign in (("row_major", 1), ("channels_last", 0), ("row_major", 0)):
        again = backward(backend, dy, argmax, rois, shape, layouts=(layout, layout), misalign=misalign)
        assert_same_bits(again, first)


# ---------------------------------------------------------------------------------------------------
# Known cases and peers.


def test_D18_boxes(backend: Backend) -> None:
    x = np.linspace(1, 64, 64, dtype=np.float32).reshape(1, 1, 8, 8)
    rois = np.array([[0, 0, 0, 3, 3]], np.float32)
    assert forward(backend, x, rois, (2, 2))[0][0, 0].tolist() == [[10, 12], [26, 28]]
    with pytest.raises(ValueError, match=r"boxes: expected shape \(rois, 5\)"):
        bc.roi_pool(x, rois[:, 1:], 2)


def test_D20_differs_from_torchvision_on_purpose(backend: Backend) -> None:
    """NaN is kept, and so is minus infinity, which torchvision turns into the lowest finite number."""
    x = np.full((1, 1, 4, 4), -5, np.float32)
    x[0, 0, 0, 0] = np.nan
    rois = np.array([[0, 0, 0, 3, 3]], np.float32)
    y, argmax = forward(backend, x, rois, (2, 2))
    np.testing.assert_array_equal(y[0, 0], [[np.nan, -5], [-5, -5]])
    assert argmax[0, 0].tolist() == [[0, 2], [8, 10]]
    y, argmax = forward(backend, np.full_like(x, -np.inf), rois, (2, 2))
    assert (y == -np.inf).all()
    assert argmax[0, 0].tolist() == [[0, 2], [8, 10]]
    outside = np.array([[0, 10, 10, 12, 12]], np.float32)
    y, argmax = forward(backend, x, outside, (2, 2))
    assert (y == 0).all()
    assert (argmax == -1).all()
    assert not backward(backend, np.ones_like(y), argmax, outside, x.shape).any()


@pytest.mark.requires("torchvision")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.requires("torch.cuda"))])
def test_agrees_with_torchvision(device: str) -> None:
    rng = np.random.default_rng(9)
    shape = (2, 3, 31, 40)
    rois = draw_rois(rng, 40, shape)
    x = rng.standard_normal(shape).astype(np.float32)
    dy = rng.standard_normal((40, 3, 3, 5)).astype(np.float32)
    tensor = support.to_torch(x, device).requires_grad_()
    y = support.torchvision().ops.roi_pool(tensor, support.to_torch(rois, device), (3, 5), 1.0)
    y.backward(support.to_torch(dy, device))
    got, argmax = forward(Backend(device), x, rois, (3, 5))
    assert_same_bits(got, support.from_torch(y))
    dx = backward(Backend(device), dy, argmax, rois, shape)
    np.testing.assert_allclose(dx, support.from_torch(tensor.grad), rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------------------------------
# Function forms and refusals.


def test_function_forms(backend: Backend, framework: str) -> None:
    rng = np.random.default_rng(1)
    x = draw(rng, (2, 3, 16, 18), "float32")
    rois = draw_rois(rng, 6, x.shape)
    expected = reference.roi_pool(x, rois, (3, 4), 1.0, np.float32)
    ours, boxes = backend.of(framework, x), backend.of(framework, rois)
    assert_same_bits(backend.read(bc.roi_pool(ours, boxes, (3, 4))), expected[0])
    y, argmax = bc.roi_pool(ours, boxes, (3, 4), return_argmax=True)
    assert type(y) is type(ours)
    assert_same_bits(backend.read(y), expected[0])
    np.testing.assert_array_equal(backend.read(argmax), expected[1])
    dy = draw(rng, (6, 3, 3, 4), "float32")
    dx = bc.roi_pool_backward(backend.of(framework, dy), boxes, argmax, x.shape)
    assert type(dx) is type(ours)
    assert_same_bits(backend.read(dx), reference.roi_pool_backward(dy, expected[1], rois, x.shape))
    if framework != "jax":
        y, argmax = backend.of(framework, np.empty_like(expected[0])), backend.of(framework, np.empty_like(expected[1]))
        written = bc.roi_pool(ours, boxes, (3, 4), return_argmax=True, index_dtype="int64", out=(y, argmax))
        assert written[0] is y
        assert written[1] is argmax
        np.testing.assert_array_equal(backend.read(argmax), expected[1])


@pytest.mark.parametrize(
    ("changed", "error", "sentence"),
    [
        ({"h": -1}, bc.InvalidProblemError, "is negative"),
        ({"dtype": "int32"}, bc.UnsupportedError, "dtype: expected float16"),
        ({"rois_dtype": "int64"}, bc.InvalidProblemError, "rois_dtype: expected float32 or float64"),
        ({"index_dtype": "int16"}, bc.InvalidProblemError, "index_dtype: expected int32 or int64, got int16"),
        ({"h": 2**20, "w": 2**20}, bc.InvalidProblemError, "int32 can't count"),
        ({"pooled_h": 2**21}, bc.UnsupportedError, "samples along an axis"),
        ({"spatial_scale": float("inf")}, bc.InvalidProblemError, "spatial_scale"),
    ],
)
def test_descriptors_are_refused(device: str, changed: dict[str, Any], error: type[Exception], sentence: str) -> None:
    good = {**fields((1, 2, 8, 9), 4, (3, 3)), "dtype": "float32", "device": device}
    for plan in (bc.RoiPoolPlan, bc.RoiPoolBackwardPlan):
        with pytest.raises(error, match=sentence):
            plan(**{**good, **changed})


def test_function_form_refusals() -> None:
    x, rois = np.zeros((1, 2, 8, 8), np.float32), np.zeros((3, 5), np.float32)
    with pytest.raises(bc.InvalidProblemError, match=r"input: expected shape \(n, c, h, w\)"):
        bc.roi_pool(x[0], rois, 3)
    with pytest.raises(bc.InvalidProblemError, match=r"out: expected \(y, argmax\), got 1 entries"):
        bc.roi_pool(x, rois, 3, return_argmax=True, out=(x,))
    dy, argmax = np.zeros((3, 2, 4, 4), np.float32), np.zeros((3, 2, 4, 4), np.int32)
    with pytest.raises(bc.InvalidProblemError, match="argmax: expected shape"):
        bc.roi_pool_backward(dy, rois, argmax[:2], x.shape)
    with pytest.raises(bc.InvalidProblemError, match="input_shape: expected"):
        bc.roi_pool_backward(dy, rois, argmax, (1, 3, 8, 8))
    with pytest.raises(bc.InvalidProblemError, match="expected out, to add to"):
        bc.roi_pool_backward(dy, rois, argmax, x.shape, accumulate=True)


def test_what_a_plan_tells(device: str) -> None:
    common = {**fields((2, 3, 8, 9), 4, (3, 5)), "dtype": "bfloat16", "device": device}
    plan = bc.RoiPoolPlan(**common)
    assert [operand.name for operand in plan.operands] == ["input", "rois", "output", "argmax"]
    assert (plan.sku.category, plan.sku.op, plan.sku.aux_dtype) == ("image", "roi_pool", "float32")
    assert plan.cost.bytes == 2 * 2 * 3 * 8 * 9 + (2 + 4) * 4 * 3 * 3 * 5 + 4 * 4 * 5
    assert plan.precision_guarantee.math_precision == "exact"
    plan = bc.RoiPoolBackwardPlan(**common, accumulate=True)
    assert [operand.role for operand in plan.operands] == ["in", "in", "in", "inout"]
    # The GPU lists there which bins lie over which rows.
    assert (plan.workspace_size > 0) == (device == "cuda")
