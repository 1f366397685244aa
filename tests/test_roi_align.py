# SPDX-License-Identifier: Apache-2.0
"""RoI-align against its reference, forward and backward, within bounds that follow from the arithmetic."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import support
from hypothesis import given
from hypothesis import strategies as st
from support import INPUT_LAYOUTS, OUTPUT_LAYOUTS, Backend, assert_same_bits

import baracuda as bc
from reference import image as reference

DTYPES = ("float16", "bfloat16", "float32", "float64")
#: Half the distance of two numbers around 1.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
SMALLEST = {"float16": 2.0**-25, "bfloat16": 2.0**-134, "float32": 2.0**-150, "float64": 0.0}
Rule = dict[str, Any]


def real_of(dtype: str) -> type:
    return np.float64 if dtype == "float64" else np.float32


def assert_close(got: np.ndarray, expected: reference.Result) -> None:
    """Within the rounding of the sums and that of the store."""
    dtype = got.dtype.name
    unit = ROUNDING["float64" if dtype == "float64" else "float32"]
    error = expected.roundings * unit / (1 - expected.roundings * unit) * expected.magnitude
    finite = np.isfinite(expected.value)
    with np.errstate(invalid="ignore"):
        bound = error + ROUNDING[dtype] * (np.abs(expected.value) + error) + SMALLEST[dtype]
        wide = got.astype(np.float64)
        wrong = np.abs(wide - expected.value) > bound
    same = (wide == expected.value) | (np.isnan(wide) & np.isnan(expected.value))
    wrong = np.where(finite, wrong, ~same)
    places = tuple(place[:3] for place in np.nonzero(wrong))
    assert not wrong.any(), (wrong.sum(), places, wide[places], expected.value[places])


def fields(shape: tuple[int, ...], count: int, pooled: tuple[int, int]) -> dict[str, Any]:
    return {
        **dict(zip("nchw", shape, strict=True)),
        "num_rois": count,
        "pooled_h": pooled[0],
        "pooled_w": pooled[1],
    }


def plan_rule(rule: Rule) -> Rule:
    rule = dict(rule)
    rule["spatial_scale"] = rule.pop("scale")
    return rule


def rule_of(scale: float = 1.0, sampling_ratio: int = 0, aligned: bool = False) -> Rule:
    return {"scale": scale, "sampling_ratio": sampling_ratio, "aligned": aligned}


def forward(
    backend: Backend,
    x: np.ndarray,
    rois: np.ndarray,
    pooled: tuple[int, int],
    rule: Rule,
    *,
    layouts: tuple[str, str] = ("row_major", "row_major"),
    misalign: int = 0,
    max_workspace: int | None = None,
) -> np.ndarray:
    plan = bc.RoiAlignPlan(
        **fields(x.shape, rois.shape[0], pooled), **plan_rule(rule), dtype=x.dtype.name, rois_dtype=rois.dtype.name,
        device=backend.device, preference=bc.PlanPreference(max_workspace=max_workspace),
    )  # fmt: skip
    assert max_workspace is None or plan.workspace_size <= max_workspace
    source = backend.input(x, layout=layouts[0], misalign=misalign)
    output = backend.output((rois.shape[0], x.shape[1], *pooled), x.dtype.name, layout=layouts[1], misalign=misalign)
    boxes = backend.input(rois, layout="row_major" if layouts[0] == "broadcast" else layouts[0])
    plan.run(input=source.tensor, rois=boxes.tensor, output=output.tensor)
    output.assert_guards()
    source.assert_untouched()
    return output.numpy()


def backward(
    backend: Backend,
    dy: np.ndarray,
    rois: np.ndarray,
    shape: tuple[int, ...],
    rule: Rule,
    *,
    layouts: tuple[str, str] = ("row_major", "row_major"),
    misalign: int = 0,
    dx: np.ndarray | None = None,
    max_workspace: int | None = None,
    deterministic: bool = True,
) -> np.ndarray:
    plan = bc.RoiAlignBackwardPlan(
        **fields(shape, rois.shape[0], dy.shape[2:]), **plan_rule(rule), dtype=dy.dtype.name,
        rois_dtype=rois.dtype.name, accumulate=dx is not None, device=backend.device,
        preference=bc.PlanPreference(max_workspace=max_workspace, deterministic=deterministic),
    )  # fmt: skip
    assert max_workspace is None or plan.workspace_size <= max_workspace
    given = backend.input(dy, layout=layouts[0], misalign=misalign)
    if dx is None:
        written = backend.output(shape, dy.dtype.name, layout=layouts[1], misalign=misalign)
    else:
        written = backend.input(dx, layout=layouts[1], misalign=misalign)
    plan.run(doutput=given.tensor, rois=backend.input(rois).tensor, dinput=written.tensor)
    written.assert_guards()
    given.assert_untouched()
    return written.numpy()


def check(
    backend: Backend, x: np.ndarray, rois: np.ndarray, pooled: tuple[int, int], rule: Rule, **options: Any
) -> None:
    """Forward, backward and backward that adds, against the reference."""
    real = real_of(x.dtype.name)
    assert_close(forward(backend, x, rois, pooled, rule, **options), reference.roi_align(x, rois, pooled, real, **rule))
    rng = np.random.default_rng(7)
    dy = rng.standard_normal((rois.shape[0], x.shape[1], *pooled)).astype(x.dtype)
    expected = reference.roi_align_backward(dy, rois, x.shape, real, **rule)
    assert_close(backward(backend, dy, rois, x.shape, rule, **options), expected)
    before = rng.standard_normal(x.shape).astype(x.dtype)
    wide = before.astype(np.float64)
    sums = reference.Result(expected.value + wide, expected.magnitude + np.abs(wide), expected.roundings + 1)
    assert_close(backward(backend, dy, rois, x.shape, rule, dx=before, **options), sums)


def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return rng.standard_normal(shape).astype(support.DTYPES[dtype].numpy)


def draw_rois(
    rng: np.random.Generator, count: int, shape: tuple[int, ...], *, strange: bool = False, scale: float = 1.0
) -> np.ndarray:
    """Boxes inside and over the edges; if wanted also inverted, empty, far outside, and no boxes at all."""
    n, _, h, w = shape
    corners = rng.uniform(-0.3, 1.3, (count, 2, 2)) * [w, h] / scale
    corners.sort(axis=1)
    rois = np.concatenate([rng.integers(0, n, (count, 1)), corners.reshape(count, 4)], axis=1)
    if strange:
        for r in range(count):
            kind = rng.integers(0, 9)
            if kind == 0:
                rois[r, 1:] = rois[r, [3, 4, 1, 2]]
            elif kind == 1:
                rois[r, 3:] = rois[r, 1:3]
            elif kind == 2:
                rois[r, 1:] = np.rint(rois[r, 1:])
            elif kind == 3:
                rois[r, int(rng.integers(1, 5))] = rng.choice([np.nan, np.inf, -np.inf, 3e38, -3e38, 1e6, -1e6, 40.0])
            elif kind == 4:
                rois[r, 0] = rng.choice([-1, n, np.nan, np.inf, -np.inf, -0.5, n - 0.5, 1e30, -7])
            elif kind == 5:
                rois[r, 1:] += 1e4
    return rois.astype(np.float32)


# ---------------------------------------------------------------------------------------------------
# The support matrix.

PROBLEMS = {
    "7 x 7, two samples": ((2, 5, 20, 23), 9, (7, 7), rule_of(0.5, 2, True)),
    "7 x 7, adaptive": ((2, 5, 20, 23), 9, (7, 7), rule_of(0.25, 0, True)),
    "bins of many cells": ((1, 3, 50, 61), 5, (2, 3), rule_of(1.0, 0, False)),
    "bins of many cells, two samples": ((1, 3, 50, 61), 5, (2, 3), rule_of(1.0, 2, False)),
    "bins smaller than cells": ((1, 37, 9, 8), 6, (14, 13), rule_of(0.5, 0, False)),
    "many samples": ((1, 2, 12, 9), 4, (3, 2), rule_of(1.0, 11, True)),
    "one cell": ((3, 2, 1, 1), 7, (2, 2), rule_of(1.0, 2, False)),
    "one row": ((1, 2, 1, 40), 7, (3, 5), rule_of(1.0, 0, True)),
    "one bin": ((2, 70, 17, 33), 8, (1, 1), rule_of(1.0, 3, True)),
    "more channels than a block has lanes": ((1, 289, 10, 7), 4, (3, 3), rule_of(1.0, 2, True)),
    "more rows of bins than lanes": ((1, 3, 30, 31), 3, (35, 2), rule_of(1.0, 1, True)),
    "more columns of bins than lanes": ((1, 2, 30, 31), 3, (1, 67), rule_of(1.0, 0, False)),
    "channels for two warps": ((2, 150, 13, 17), 8, (7, 7), rule_of(0.5, 2, True)),
    "many bins of many channels": ((1, 45, 20, 17), 4, (14, 15), rule_of(1.0, 0, False)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_matches_the_reference(backend: Backend, problem: str, dtype: str) -> None:
    shape, count, pooled, rule = PROBLEMS[problem]
    rng = np.random.default_rng(len(problem))
    rois = draw_rois(rng, count, shape, strange=True, scale=rule["scale"])
    if dtype in ("float16", "float64"):
        rois = rois.astype(np.float64)
    check(backend, draw(rng, shape, dtype), rois, pooled, rule)


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["row_major", "channels_last"])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_kernels_under_the_sanitizer(backend: Backend, problem: str, layout: str, dtype: str) -> None:
    shape, count, pooled, rule = PROBLEMS[problem]
    rng = np.random.default_rng(3)
    rois = draw_rois(rng, count, shape, strange=True, scale=rule["scale"])
    # By a word: 16-bit gradients are copied by words, too.
    misalign = {"float32": 1, "bfloat16": 2}[dtype]
    check(backend, draw(rng, shape, dtype), rois, pooled, rule, layouts=(layout, layout), misalign=misalign)


@pytest.mark.parametrize("layout", sorted({*INPUT_LAYOUTS, *OUTPUT_LAYOUTS}))
def test_layouts(backend: Backend, layout: str) -> None:
    rng = np.random.default_rng(1)
    shape = (2, 35, 18, 21)
    rois = draw_rois(rng, 6, shape)
    output_layout = layout if layout != "broadcast" else "row_major"
    for dtype, other in (("float16", "row_major"), ("float32", output_layout)):
        x = draw(rng, shape, dtype)
        if layout == "broadcast":
            x[...] = x[:1]
        for misalign in (0, 1):
            got = forward(backend, x, rois, (3, 4), rule_of(), layouts=(layout, other), misalign=misalign)
            assert_close(got, reference.roi_align(x, rois, (3, 4), np.float32, **rule_of()))
        if layout == "broadcast":
            continue
        check(backend, x, rois, (3, 4), rule_of(), layouts=(layout, other), misalign=1)


@given(st.data())
def test_any_problem(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = tuple(data.draw(st.integers(1, most)) for most in (3, 40, 25, 25))
    pooled = (data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9)))
    rule = rule_of(
        data.draw(st.sampled_from((1.0, 0.5, 0.3, -1.0))),
        data.draw(st.sampled_from((0, 0, 1, 2, 3, 20))),
        data.draw(st.booleans()),
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rois = draw_rois(rng, data.draw(st.integers(0, 12)), shape, strange=True, scale=rule["scale"])
    x = draw(rng, shape, dtype)
    devices = ("cpu", "cuda") if bc.cuda_device_count() else ("cpu",)
    for device in devices:
        check(Backend(device), x, rois, pooled, rule)


@pytest.mark.parametrize("sampling_ratio", [0, 2])
def test_many_rois_and_a_large_map(backend: Backend, sampling_ratio: int) -> None:
    rng = np.random.default_rng(8)
    shape = (2, 33, 70, 90)
    rois = draw_rois(rng, 70, shape, strange=True)
    rois[:, 1:] = np.where(np.abs(rois[:, 1:]) < 200, rois[:, 1:], np.float32(5))
    check(backend, draw(rng, shape, "float32"), rois, (7, 7), rule_of(1.0, sampling_ratio, True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "channels"), [(1, 3), (8, 3), (40, 3), (8, 35)])
def test_few_rois_on_many_tiles(backend: Backend, count: int, channels: int, dtype: str) -> None:
    """Tiles that no RoI touches are cleared in another way if they are most."""
    rng = np.random.default_rng(17)
    shape = (2, channels, 136, 132)
    rois = draw_rois(rng, count, shape, strange=True)
    check(backend, draw(rng, shape, dtype), rois, (7, 7), rule_of(1.0, 2, True))


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("layout", ["row_major", "channels_last", "stepped"])
def test_gradients_in_any_order(backend: Backend, layout: str, dtype: str) -> None:
    """What deterministic=False allows: the same sums within the same bounds."""
    rng = np.random.default_rng(18)
    shape = (2, 11, 20, 23)
    for count, rule in ((8, rule_of(1.0, 2, True)), (5, rule_of(1.0)), (0, rule_of())):
        rois = draw_rois(rng, count, shape, strange=True)
        dy = draw(rng, (count, 11, 6, 7), dtype)
        expected = reference.roi_align_backward(dy, rois, shape, real_of(dtype), **rule)
        for misalign in (0, 1):
            options: dict[str, Any] = {"layouts": (layout, layout), "misalign": misalign, "deterministic": False}
            assert_close(backward(backend, dy, rois, shape, rule, **options), expected)
            before = draw(rng, shape, dtype)
            wide = before.astype(np.float64)
            sums = reference.Result(expected.value + wide, expected.magnitude + np.abs(wide), expected.roundings + 1)
            assert_close(backward(backend, dy, rois, shape, rule, dx=before, **options), sums)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_may_be_added_in_any_order(device: str, dtype: str) -> None:
    """Where nothing is gained the bits stay the same in every run."""
    for count, preference, atomic in (
        (8, bc.PlanPreference(deterministic=False), dtype in ("float32", "float64")),
        (8, bc.PlanPreference(), False),
        (8, bc.PlanPreference(deterministic=False, max_workspace=0), False),
        (0, bc.PlanPreference(deterministic=False), False),
        (1000, bc.PlanPreference(deterministic=False), False),
    ):
        plan = bc.RoiAlignBackwardPlan(
            **fields((2, 3, 20, 23), count, (7, 7)), dtype=dtype, device=device, preference=preference
        )
        assert (plan.path == "atomic") == (atomic and device == "cuda")
        assert plan.precision_guarantee.deterministic == (plan.path != "atomic")
        assert plan.precision_guarantee.bit_stable_on_same_hardware == (plan.path != "atomic")


def test_without_a_workspace(backend: Backend) -> None:
    rng = np.random.default_rng(8)
    shape = (2, 5, 30, 41)
    x, rois = draw(rng, shape, "float32"), draw_rois(rng, 20, shape, strange=True)
    expected = reference.roi_align(x, rois, (4, 3), np.float32, **rule_of())
    assert_close(forward(backend, x, rois, (4, 3), rule_of(), max_workspace=0), expected)
    dy = draw(rng, (20, 5, 4, 3), "float32")
    expected = reference.roi_align_backward(dy, rois, shape, np.float32, **rule_of())
    assert_close(backward(backend, dy, rois, shape, rule_of(), max_workspace=0), expected)


def test_more_rois_than_a_block_looks_at(backend: Backend) -> None:
    rng = np.random.default_rng(11)
    shape = (2, 3, 13, 11)
    rois = draw_rois(rng, 2100, shape)
    rois[1030:2050, 0] = 1  # and the other image's, of which many batches have none
    dy = draw(rng, (2100, 3, 2, 3), "float32")
    rule = rule_of(1.0, 2, True)
    dx = backward(backend, dy, rois, shape, rule)
    assert_close(dx, reference.roi_align_backward(dy, rois, shape, np.float32, **rule))


@pytest.mark.parametrize("layout", ["row_major", "channels_last"])
@pytest.mark.parametrize("value", [1e38, -3e38, np.nan, np.inf])
@pytest.mark.parametrize("channel", [5, 33])
def test_huge_gradients_stay_where_their_weights_are(backend: Backend, channel: int, value: float, layout: str) -> None:
    """Beside a bin of them, in its RoI, its channel and its tile, all is as without it."""
    rng = np.random.default_rng(13)
    shape = (1, 34, 20, 20)
    rois = np.array([[0, 1, 1, 18, 18], [0, 4, 2, 12, 14]], np.float32)
    dy = draw(rng, (2, 34, 7, 7), "float32")
    rule = rule_of(1.0, 2, True)
    dy[0, channel, 3, 3] = 0
    plain = backward(backend, dy, rois, shape, rule, layouts=(layout, layout))
    dy[0, channel, 3, 3] = 1
    reached = backward(backend, dy, rois, shape, rule, layouts=(layout, layout)) != plain
    dy[0, channel, 3, 3] = value
    huge = backward(backend, dy, rois, shape, rule, layouts=(layout, layout))
    assert reached[0, channel].any()
    assert not np.delete(reached[0], channel, 0).any()
    assert_same_bits(huge[~reached], plain[~reached])
    assert_close(huge, reference.roi_align_backward(dy, rois, shape, np.float32, **rule))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bounds_of_the_workspace_choose_the_kernel(backend: Backend, dtype: str) -> None:
    rng = np.random.default_rng(14)
    shape = (2, 40, 11, 13)
    x, rois = draw(rng, shape, dtype), draw_rois(rng, 30, shape, strange=True)
    expected = reference.roi_align(x, rois, (5, 4), real_of(dtype), **rule_of())
    common = {**fields(shape, 30, (5, 4)), "dtype": dtype, "device": backend.device}
    bounds, paths = [None, 0], []
    if backend.device == "cuda":
        bounds.insert(1, bc.RoiAlignPlan(**common).workspace_size - 1)
    for bound in bounds:
        paths.append(bc.RoiAlignPlan(**common, preference=bc.PlanPreference(max_workspace=bound)).path)
        assert_close(forward(backend, x, rois, (5, 4), rule_of(), max_workspace=bound), expected)
    if backend.device == "cuda":
        assert paths == (["rows", "any", "any"] if dtype == "float64" else ["turned", "rows", "any"])


@pytest.mark.parametrize("sampling_ratio", [0, 2])
def test_boxes_wider_than_a_warp_takes_at_once(backend: Backend, sampling_ratio: int) -> None:
    rng = np.random.default_rng(12)
    for columns in (135, 800):
        shape = (1, 11, 6, columns)
        rois = draw_rois(rng, 6, shape)
        rois[0, 1:] = [-3, 0, columns + 2, 5]
        x = draw(rng, shape, "float32")
        rule = rule_of(1.0, sampling_ratio, True)
        assert_close(forward(backend, x, rois, (5, 6), rule), reference.roi_align(x, rois, (5, 6), np.float32, **rule))


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
    x = np.ones(shape, np.float32)
    y = forward(backend, x, rois, pooled, rule_of())
    assert y.shape == (count, shape[1], *pooled)
    assert not y.any()
    dx = backward(backend, np.ones(y.shape, np.float32), rois, shape, rule_of())
    assert not dx.any()
    dx = backward(backend, np.ones(y.shape, np.float32), rois, shape, rule_of(), dx=x)
    assert (dx == 1).all()


# ---------------------------------------------------------------------------------------------------
# Properties.


@pytest.mark.parametrize("sampling_ratio", [0, 2])
def test_gradient_mass(backend: Backend, sampling_ratio: int) -> None:
    """Backward of ones sums to the forward of ones: the weights of all cells."""
    rng = np.random.default_rng(2)
    shape = (2, 3, 30, 41)
    rois = draw_rois(rng, 40, shape)
    rule = rule_of(1.0, sampling_ratio, True)
    y = forward(backend, np.ones(shape), rois, (5, 6), rule)
    dx = backward(backend, np.ones(y.shape), rois, shape, rule)
    np.testing.assert_allclose(dx.sum((2, 3)).sum(0), y.sum((0, 2, 3)), rtol=1e-12)


def test_backward_is_the_transpose(backend: Backend) -> None:
    rng = np.random.default_rng(4)
    shape = (2, 4, 19, 22)
    rois = draw_rois(rng, 15, shape, strange=True).astype(np.float64)
    x = rng.standard_normal(shape)
    y = forward(backend, x, rois, (3, 5), rule_of(aligned=True))
    dy = rng.standard_normal(y.shape)
    dx = backward(backend, dy, rois, shape, rule_of(aligned=True))
    assert (dy * y).sum() == pytest.approx((dx * x).sum(), rel=1e-11)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["row_major", "channels_last"])
def test_backward_has_the_same_bits_in_every_run(backend: Backend, layout: str, dtype: str) -> None:
    rng = np.random.default_rng(5)
    shape = (2, 40, 37, 45)
    rois = draw_rois(rng, 60, shape)
    dy = draw(rng, (60, 40, 7, 7), dtype)
    first = backward(backend, dy, rois, shape, rule_of(), layouts=(layout, layout))
    for misalign in (0, 1, 2, 3):
        assert_same_bits(
            backward(backend, dy, rois, shape, rule_of(), layouts=(layout, layout), misalign=misalign), first
        )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("sampling_ratio", [0, 2])
def test_cells_without_a_weight_play_no_part(backend: Backend, sampling_ratio: int, value: float) -> None:
    """Also those between two samples of a bin, and those beside a sample that lies on a cell."""
    rng = np.random.default_rng(6)
    shape = (1, 2, 33, 40)
    rois = np.array([[0, 3, 2, 32, 27], [0, 4, 4, 8, 8], [0, 0.5, 0.5, 4.5, 8.5]], np.float32)
    rule = rule_of(1.0, sampling_ratio, True)
    x = draw(rng, shape, "float32")
    x[0, :, ::3, ::2] = value
    assert_close(forward(backend, x, rois, (4, 4), rule), reference.roi_align(x, rois, (4, 4), np.float32, **rule))
    dy = draw(rng, (3, 2, 4, 4), "float32")
    dy[:, :, 1, 2] = value
    dx = backward(backend, dy, rois, shape, rule)
    assert_close(dx, reference.roi_align_backward(dy, rois, shape, np.float32, **rule))
    assert np.isfinite(dx).any()


def test_bad_rois_give_zeros_and_no_gradient(backend: Backend) -> None:
    nan, inf = np.nan, np.inf
    bad = [[-1, 0, 0, 3, 3], [2, 0, 0, 3, 3], [nan, 0, 0, 3, 3], [inf, 0, 0, 3, 3], [1e30, 0, 0, 3, 3]]
    bad += [[0, *np.where(np.arange(4) == i, value, [0, 0, 3, 3])] for i in range(4) for value in (nan, inf, -inf)]
    bad += [[0, -3e38, 0, 3e38, 3]]
    rois = np.array(bad, np.float32)
    for sampling_ratio in (0, 2):
        for aligned in (False, True):
            rule = rule_of(1.0, sampling_ratio, aligned)
            x = np.full((2, 3, 6, 6), np.nan, np.float32)
            assert (forward(backend, x, rois, (2, 2), rule) == 0).all()
            dy = np.full((len(bad), 3, 2, 2), np.nan, np.float32)
            assert (backward(backend, dy, rois, x.shape, rule) == 0).all()
    huge = np.array([[0, -1e8, 0, 1e8, 3]], np.float32)
    assert (forward(backend, np.ones((1, 1, 4, 4), np.float32), huge, (3, 3), rule_of()) == 0).all()


def test_float64_rois_that_float32_can_not_hold(backend: Backend) -> None:
    rois = np.array([[0, 0, 0, 1e300, 3]])
    assert (forward(backend, np.ones((1, 1, 4, 4), np.float32), rois, (1, 1), rule_of(1.0, 1)) == 0).all()
    x = np.arange(64.0).reshape(1, 1, 8, 8)
    rois = np.array([[0, 1 + 1e-12, 1, 5, 5]])
    assert_close(forward(backend, x, rois, (2, 2), rule_of()), reference.roi_align(x, rois, (2, 2), float, **rule_of()))


# ---------------------------------------------------------------------------------------------------
# Known cases.

NINE = np.arange(1, 10, dtype=np.float32).reshape(1, 1, 3, 3)


@pytest.mark.parametrize("box", [[np.nan] * 4, [0, 0, np.inf, np.inf]])
def test_D01_boxes_that_are_not_finite(backend: Backend, box: list[float]) -> None:
    rois = np.array([[0, *box]], np.float32)
    x = np.zeros((1, 1, 4, 4), np.float32)
    assert forward(backend, x, rois, (1, 1), rule_of(1.0, 1, True)).item() == 0
    assert not backward(backend, np.ones((1, 1, 1, 1), np.float32), rois, x.shape, rule_of(1.0, 1, True)).any()


def test_D03_inverted_box(backend: Backend) -> None:
    rois = np.array([[0, 0, 2, 2, 0]], np.float32)
    assert forward(backend, NINE, rois, (2, 2), rule_of(1.0, 1, False))[0, 0].tolist() == [[7.5, 8.5], [7.5, 8.5]]
    assert forward(backend, NINE, rois, (2, 2), rule_of(1.0, 1, True))[0, 0].tolist() == [[4, 5], [1, 2]]


def test_D04_inverted_box_adaptive(backend: Backend) -> None:
    rois = np.array([[0, 0, 2, 2, 0]], np.float32)
    assert not forward(backend, NINE, rois, (2, 2), rule_of(1.0, 0, True)).any()


def test_D05_box_without_area(backend: Backend) -> None:
    rois = np.array([[0, 1, 1, 1, 1]], np.float32)
    assert not forward(backend, NINE, rois, (2, 2), rule_of(1.0, 0, True)).any()
    assert forward(backend, NINE, rois, (1, 1), rule_of(1.0, 1, True)).item() == 3
    assert forward(backend, NINE, rois, (1, 1), rule_of(1.0, 1, False)).item() == 7


def test_D07_bfloat16(backend: Backend) -> None:
    x = np.ones((1, 1, 4, 4), ml_dtypes.bfloat16)
    rois = np.array([[0, 0, 0, 3, 3]], np.float32)
    y = forward(backend, x, rois, (2, 2), rule_of())
    assert y.dtype == ml_dtypes.bfloat16
    assert (y == 1).all()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_D08_coordinates_are_not_rounded_to_16_bits(backend: Backend, dtype: str) -> None:
    x = np.broadcast_to(np.arange(4096, dtype=np.float32), (1, 1, 5, 4096)).astype(dtype)
    rois = np.array([[0, 2049, 0, 2053, 4]], np.float32)
    y = forward(backend, x, rois, (1, 1), rule_of(1.0, 2, True))
    # float16 has only even numbers there.
    assert y.item() == np.dtype(dtype).type(2050.5)
    many = np.broadcast_to(np.arange(2050, dtype=np.float32)[:, None, None, None], (2050, 1, 1, 1)).astype(dtype)
    rois = np.array([[2049, 0, 0, 1, 1]], np.float32)
    assert forward(backend, many, rois, (1, 1), rule_of()).item() == many[2049].item()


def test_D18_boxes_without_batch_numbers(backend: Backend) -> None:
    with pytest.raises(ValueError, match=r"boxes: expected shape \(rois, 5\)"):
        bc.roi_align(backend.of("baracuda", NINE), backend.array(np.zeros((2, 4), np.float32)), 2)


@pytest.mark.requires("torch.cuda", "gpu.memory")
def test_D21_more_than_2_to_the_31_outputs() -> None:
    torch = support.torch()
    count = 171200
    x = torch.ones(1, 256, 8, 8, dtype=torch.float16, device="cuda")
    rois = torch.tensor([[0.0, 0, 0, 7, 7]], device="cuda").repeat(count, 1)
    y = bc.roi_align(x, rois, 7)
    assert y.numel() > 2**31
    assert bool((y[-1] == 1).all())
    assert bool((y[0] == 1).all())
    assert int((y != 1).sum()) == 0


# ---------------------------------------------------------------------------------------------------
# torchvision.


def torchvision_results(
    x: np.ndarray, rois: np.ndarray, pooled: tuple[int, int], rule: Rule, dy: np.ndarray, device: str
) -> tuple[np.ndarray, np.ndarray]:
    tensor = support.to_torch(x, device).requires_grad_()
    ratio = rule["sampling_ratio"] or -1
    y = support.torchvision().ops.roi_align(
        tensor, support.to_torch(rois, device), pooled, rule["scale"], ratio, rule["aligned"]
    )
    y.backward(support.to_torch(dy, device))
    return support.from_torch(y), support.from_torch(tensor.grad)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.requires("torch.cuda"))])
@pytest.mark.requires("torchvision")
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("sampling_ratio", [0, 2])
def test_agrees_with_torchvision(device: str, sampling_ratio: int, aligned: bool) -> None:
    """Boxes inside the map and over its edges, in float64."""
    rng = np.random.default_rng(9)
    backend = Backend(device)
    for pooled in ((7, 7), (3, 5)):
        shape = (2, 3, 31, 40)
        rois = draw_rois(rng, 40, shape, scale=0.5).astype(np.float64)
        x = rng.standard_normal(shape)
        dy = rng.standard_normal((40, 3, *pooled))
        rule = rule_of(0.5, sampling_ratio, aligned)
        y, dx = torchvision_results(x, rois, pooled, rule, dy, device)
        np.testing.assert_allclose(forward(backend, x, rois, pooled, rule), y, rtol=0, atol=1e-12)
        np.testing.assert_allclose(backward(backend, dy, rois, shape, rule), dx, rtol=0, atol=1e-11)


@pytest.mark.requires("torchvision")
def test_differs_from_torchvision_on_purpose(backend: Backend) -> None:
    """torchvision's boxes have the features' type, in which image 2049 is image 2048."""
    x = (np.arange(2050) % 2).astype(np.float16).reshape(2050, 1, 1, 1)
    rois = np.array([[2049, 0, 0, 1, 1]], np.float32)
    dy = np.ones((1, 1, 1, 1), np.float16)
    y, _ = torchvision_results(x, rois.astype(np.float16), (1, 1), rule_of(), dy, "cpu")
    assert y.item() == 0
    assert forward(backend, x, rois, (1, 1), rule_of()).item() == 1


# ---------------------------------------------------------------------------------------------------
# Function forms.


def test_function_forms(backend: Backend, framework: str) -> None:
    rng = np.random.default_rng(1)
    x = draw(rng, (2, 3, 16, 18), "float32")
    rois = draw_rois(rng, 6, x.shape)
    rois = rois[np.argsort(rois[:, 0], kind="stable")]
    rule = rule_of(1.0, 0, True)
    expected = reference.roi_align(x, rois, (3, 4), np.float32, **rule)
    ours = backend.of(framework, x)
    y = bc.roi_align(ours, backend.of(framework, rois), (3, 4), sampling_ratio=-1, aligned=True)
    assert type(y) is type(ours)
    assert_close(backend.read(y), expected)
    lists = [backend.of(framework, np.ascontiguousarray(rois[rois[:, 0] == image, 1:])) for image in range(2)]
    assert_same_bits(backend.read(bc.roi_align(ours, lists, (3, 4), aligned=True)), backend.read(y))

    dy = draw(rng, (6, 3, 3, 4), "float32")
    given_dy = backend.of(framework, dy)
    dx = bc.roi_align_backward(given_dy, backend.of(framework, rois), x.shape, (3, 4), aligned=True)
    assert type(dx) is type(ours)
    assert_close(backend.read(dx), reference.roi_align_backward(dy, rois, x.shape, np.float32, **rule))
    assert_same_bits(backend.read(bc.roi_align_backward(given_dy, lists, x.shape, aligned=True)), backend.read(dx))
    if framework != "jax":
        out = backend.of(framework, np.empty_like(dy))
        assert bc.roi_align(ours, lists, (3, 4), aligned=True, out=out) is out
        assert_same_bits(backend.read(out), backend.read(y))


def test_function_form_takes_no_boxes() -> None:
    x = np.ones((1, 2, 4, 4), np.float32)
    assert bc.roi_align(x, [], 3).shape == (0, 2, 3, 3)
    assert bc.roi_align(x, [np.zeros((0, 4), np.float32)], 3).shape == (0, 2, 3, 3)


@pytest.mark.requires("torch")
def test_function_form_takes_16_bit_boxes() -> None:
    torch = support.torch()
    x = torch.rand(1, 2, 9, 9)
    rois = torch.tensor([[0, 1, 1, 7.5, 6]])
    expected = bc.roi_align(x, rois, 3)
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(bc.roi_align(x, rois.to(dtype), 3), expected)


def test_function_form_refusals() -> None:
    x = np.zeros((1, 2, 8, 8), np.float32)
    rois = np.zeros((3, 5), np.float32)
    for arguments, sentence in (
        ((x[0], rois, 3), r"input: expected shape \(n, c, h, w\)"),
        ((x, rois, (3, 3, 3)), "output_size: expected one number or 2"),
        ((x, [rois], 3), r"boxes\[0\]: expected shape \(boxes, 4\)"),
        ((x, rois, 3, 1.0, -2), "sampling_ratio: expected at least 0"),
        ((x, rois.astype(np.int32), 3), "rois_dtype: expected float32 or float64, got int32"),
    ):
        with pytest.raises(bc.InvalidProblemError, match=sentence):
            bc.roi_align(*arguments)
    dy = np.zeros((3, 2, 4, 4), np.float32)
    for arguments, options, sentence in (
        ((dy[0], rois, x.shape), {}, "grad: expected shape"),
        ((dy, rois, (1, 3, 8, 8)), {}, "input_shape: expected"),
        ((dy, rois, x.shape), {"accumulate": True}, "expected out, to add to"),
        ((dy, rois, x.shape, 5), {}, "doutput: expected shape"),
    ):
        with pytest.raises(bc.InvalidProblemError, match=sentence):
            bc.roi_align_backward(*arguments, **options)


# ---------------------------------------------------------------------------------------------------
# Refusals, and what a plan tells.


@pytest.mark.parametrize(
    ("changed", "error", "sentence"),
    [
        ({"h": -1}, bc.InvalidProblemError, "extent -1 of axis 2 is negative"),
        ({"num_rois": -1}, bc.InvalidProblemError, "is negative"),
        ({"dtype": "int32"}, bc.UnsupportedError, "dtype: expected float16, bfloat16, float32 or float64"),
        ({"rois_dtype": "float16"}, bc.InvalidProblemError, "rois_dtype: expected float32 or float64, got float16"),
        ({"spatial_scale": math.nan}, bc.InvalidProblemError, "spatial_scale: expected a finite number"),
        ({"sampling_ratio": -1}, bc.InvalidProblemError, "sampling_ratio: expected at least 0"),
        ({"sampling_ratio": 2**19}, bc.UnsupportedError, "at most 1048576 samples along an axis, got 3 x 524288"),
        ({"sampling_ratio": 2**63 - 1}, bc.UnsupportedError, "samples along an axis"),
        ({"w": 2**20 + 1}, bc.UnsupportedError, "w: expected at most 1048576, got 1048577"),
        ({"n": 2**31}, bc.UnsupportedError, "n: expected at most"),
        ({"n": 2**31, "c": 2**40}, bc.InvalidProblemError, "more bytes than an int64"),
    ],
)
def test_descriptors_are_refused(device: str, changed: dict[str, Any], error: type[Exception], sentence: str) -> None:
    good = {**fields((1, 2, 8, 9), 4, (3, 3)), "dtype": "float32", "device": device}
    for plan in (bc.RoiAlignPlan, bc.RoiAlignBackwardPlan):
        with pytest.raises(error, match=sentence):
            plan(**{**good, **changed})


def test_what_a_plan_tells(device: str) -> None:
    common = {**fields((2, 3, 8, 9), 4, (3, 5)), "dtype": "bfloat16", "device": device}
    plan = bc.RoiAlignPlan(**common)
    assert [operand.name for operand in plan.operands] == ["input", "rois", "output"]
    assert (plan.sku.category, plan.sku.op, plan.sku.aux_dtype) == ("image", "roi_align", "float32")
    assert plan.cost.bytes == 2 * (2 * 3 * 8 * 9 + 4 * 3 * 3 * 5) + 4 * 4 * 5
    assert (plan.workspace_size == 0) == (device == "cpu")
    assert plan.precision_guarantee.deterministic
    assert plan.precision_guarantee.math_precision == "float32"
    plan = bc.RoiAlignBackwardPlan(**common, accumulate=True)
    assert [operand.role for operand in plan.operands] == ["in", "in", "inout"]
    assert plan.cost.bytes == 2 * (2 * 2 * 3 * 8 * 9 + 4 * 3 * 3 * 5) + 4 * 4 * 5
    assert (plan.workspace_size == 0) == (device == "cpu")
