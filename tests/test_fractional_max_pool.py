# SPDX-License-Identifier: Apache-2.0
"""Fractional max pooling against its reference and against PyTorch: bit for bit, forward and backward."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import support
from hypothesis import given
from hypothesis import strategies as st
from support import INPUT_LAYOUTS, OUTPUT_LAYOUTS, Backend, assert_same_bits

import baracuda as bc
from reference import pooling as reference

DTYPES = ("float16", "bfloat16", "float32", "float64")
PLACEMENTS = ("even", "torch")
AXES = {2: ("h", "w"), 3: ("d", "h", "w")}
FORWARD = {2: bc.FractionalMaxPool2dPlan, 3: bc.FractionalMaxPool3dPlan}
BACKWARD = {2: bc.FractionalMaxPool2dBackwardPlan, 3: bc.FractionalMaxPool3dBackwardPlan}
BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))

Extents = Sequence[int]


def fields(n: int, c: int, shape: Extents, window: Extents, out: Extents) -> dict[str, Any]:
    axes = AXES[len(shape)]
    return {
        "batch": n,
        "channels": c,
        **{f"{axis}_in": extent for axis, extent in zip(axes, shape, strict=True)},
        **{f"window_{axis}": extent for axis, extent in zip(axes, window, strict=True)},
        **{f"{axis}_out": extent for axis, extent in zip(axes, out, strict=True)},
    }


def draw(rng: np.random.Generator, shape: Extents, dtype: str, *, specials: bool = False) -> np.ndarray:
    """Few different values, so that there are ties; zeros of both signs; NaN and infinities if wanted."""
    x = rng.integers(-6, 6, tuple(shape)).astype(np.float64)
    x[rng.random(x.shape) < 0.1] = -0.0
    if specials:
        x[rng.random(x.shape) < 0.1] = np.nan
        x[rng.random(x.shape) < 0.3] = -np.inf
        x[rng.random(x.shape) < 0.1] = np.inf
    return x.astype(support.DTYPES[dtype].numpy)


def draw_samples(rng: np.random.Generator, n: int, c: int, rank: int) -> np.ndarray:
    return rng.random((n, c, rank), np.float32)


def forward(
    backend: Backend,
    x: np.ndarray,
    window: Extents,
    out: Extents,
    samples: np.ndarray | None,
    *,
    layouts: tuple[str, str] = ("row_major", "row_major"),
    misalign: int = 0,
    offset: int = 0,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Runs the plan between guards and returns y and the indices."""
    n, c, *shape = x.shape
    dtype = x.dtype.name
    wide = samples is not None and samples.dtype == np.float64
    plan = FORWARD[len(shape)](
        **fields(n, c, shape, window, out),
        dtype=dtype,
        samples=samples is not None,
        samples_dtype="float64" if wide else None,
        device=backend.device,
        **options,
    )
    source = backend.input(x, layout=layouts[0], misalign=misalign)
    y = backend.output((n, c, *out), dtype, layout=layouts[1], misalign=misalign)
    operands = {"x": source.tensor, "y": y.tensor}
    indices = None
    if plan.descriptor.index_dtype is not None:
        indices = backend.output((n, c, *out), plan.descriptor.index_dtype, layout=layouts[1], misalign=misalign)
        operands["indices"] = indices.tensor
    if samples is not None:
        operands["random_samples"] = backend.input(samples).tensor
    else:
        operands["offset"] = backend.input(np.array([offset])).tensor
    plan.run(**operands)
    y.assert_guards()
    source.assert_untouched()
    if indices is None:
        return y.numpy(), None
    indices.assert_guards()
    return y.numpy(), indices.numpy()


def backward(
    backend: Backend,
    dy: np.ndarray,
    indices: np.ndarray,
    shape: Extents,
    window: Extents,
    *,
    layouts: tuple[str, str] = ("row_major", "row_major"),
    misalign: int = 0,
    dx: np.ndarray | None = None,
    **options: Any,
) -> np.ndarray:
    n, c, *out = dy.shape
    dtype = dy.dtype.name
    plan = BACKWARD[len(shape)](
        **fields(n, c, shape, window, out),
        dtype=dtype,
        index_dtype=indices.dtype.name,
        accumulate=dx is not None,
        device=backend.device,
        **options,
    )
    if dx is None:
        written = backend.output((n, c, *shape), dtype, layout=layouts[1], misalign=misalign)
    else:
        written = backend.input(dx, layout=layouts[1], misalign=misalign)
    gradient = backend.input(dy, layout=layouts[0], misalign=misalign)
    plan.run(dy=gradient.tensor, indices=backend.input(indices, layout=layouts[0]).tensor, dx=written.tensor)
    written.assert_guards()
    return written.numpy()


def check(backend: Backend, x: np.ndarray, window: Extents, out: Extents, samples: np.ndarray, **options: Any) -> None:
    """Forward and backward against the reference."""
    placement = options.get("placement", "even")
    base = options.get("index_base", "tensor")
    layouts = options.pop("layouts", ("row_major", "row_major"))
    misalign = options.pop("misalign", 0)
    y, indices = forward(backend, x, window, out, samples, layouts=layouts, misalign=misalign, **options)
    expected_y, expected_indices = reference.forward(x, window, out, samples, placement, base)
    assert_same_bits(y, expected_y)
    np.testing.assert_array_equal(indices, expected_indices)

    rng = np.random.default_rng(5)
    dy = rng.standard_normal(y.shape).astype(x.dtype)
    common = {"placement": placement, "index_base": base, "layouts": layouts, "misalign": misalign}
    dx = backward(backend, dy, indices, x.shape[2:], window, **common)
    assert_same_bits(dx, reference.backward(dy, indices, x.shape, base))
    before = rng.standard_normal(x.shape).astype(x.dtype)
    dx = backward(backend, dy, indices, x.shape[2:], window, dx=before, **common)
    assert_same_bits(dx, reference.backward(dy, indices, x.shape, base, before))


def limit(n: int, k: int, rank: int) -> int:
    """The most outputs that placement "torch" takes."""
    return n - k + 1 - (rank == 3)


# ---------------------------------------------------------------------------------------------------
# The support matrix.

PROBLEMS = {
    "2d": ((2, 3), (9, 13), (2, 2), (6, 9)),
    "2d window 3": ((1, 2), (11, 40), (3, 3), (7, 30)),
    "2d uneven": ((2, 2), (10, 37), (3, 2), (4, 33)),
    "2d single": ((3, 2), (5, 6), (2, 3), (1, 1)),
    "2d channels": ((2, 9), (7, 20), (2, 2), (5, 18)),
    "2d channels, window 3": ((1, 8), (6, 9), (3, 2), (4, 5)),
    "2d one column": ((1, 2), (17, 4), (4, 4), (9, 1)),
    "2d ratio 0.9": ((2, 2), (12, 40), (2, 2), (11, 37)),
    "3d": ((2, 2), (6, 7, 9), (2, 2, 2), (4, 5, 6)),
    "3d ratio 0.9": ((1, 2), (5, 6, 21), (2, 2, 2), (3, 4, 18)),
    "3d uneven": ((1, 3), (5, 9, 8), (1, 3, 2), (3, 4, 5)),
    "3d single": ((2, 1), (4, 4, 5), (2, 3, 1), (1, 1, 1)),
    "3d patch": ((1, 2), (4, 48, 50), (2, 2, 2), (2, 34, 35)),
    "3d channels": ((1, 10), (4, 5, 6), (2, 2, 2), (2, 3, 4)),
    "2d wide": ((1, 3), (9, 126), (2, 2), (6, 90)),
    "3d wide": ((1, 3), (5, 17, 50), (2, 2, 2), (3, 12, 36)),
}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_matches_the_reference(backend: Backend, problem: str, dtype: str, placement: str) -> None:
    (n, c), shape, window, out = PROBLEMS[problem]
    rng = np.random.default_rng(len(problem))
    for base, index_dtype, specials in (("tensor", "int64", False), ("plane", "int32", True)):
        x = draw(rng, (n, c, *shape), dtype, specials=specials)
        samples = draw_samples(rng, n, c, len(shape))
        check(backend, x, window, out, samples, placement=placement, index_base=base, index_dtype=index_dtype)


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layouts", [("row_major", "row_major"), ("channels_last", "channels_last")])
@pytest.mark.parametrize(
    ("problem", "placement"), [*((problem, "even") for problem in PROBLEMS), ("3d patch", "torch")]
)
def test_kernels_under_the_sanitizer(
    backend: Backend, problem: str, placement: str, layouts: tuple[str, str], dtype: str
) -> None:
    (n, c), shape, window, out = PROBLEMS[problem]
    rng = np.random.default_rng(3)
    x = draw(rng, (n, c, *shape), dtype, specials=True)
    for index_dtype in ("int64", "int32"):
        samples = draw_samples(rng, n, c, len(shape))
        check(backend, x, window, out, samples, layouts=layouts, index_dtype=index_dtype, placement=placement)


@pytest.mark.parametrize("output_layout", OUTPUT_LAYOUTS)
@pytest.mark.parametrize("input_layout", INPUT_LAYOUTS)
def test_layouts(backend: Backend, input_layout: str, output_layout: str) -> None:
    rng = np.random.default_rng(1)
    for (n, c), shape, window, out in (PROBLEMS["2d"], PROBLEMS["3d"], PROBLEMS["2d channels"]):
        x = draw(rng, (n, c, *shape), "float16")
        if input_layout == "broadcast":
            x[...] = x[:1]
        samples = draw_samples(rng, n, c, len(shape))
        expected = reference.forward(x, window, out, samples, "even", "tensor")
        for misalign in (0, 1):
            y, indices = forward(
                backend, x, window, out, samples, layouts=(input_layout, output_layout), misalign=misalign
            )
            assert_same_bits(y, expected[0])
            np.testing.assert_array_equal(indices, expected[1])
        if input_layout == "broadcast":
            continue
        dy = rng.standard_normal(y.shape).astype(x.dtype)
        dx = backward(backend, dy, indices, shape, window, layouts=(input_layout, output_layout), misalign=1)
        assert_same_bits(dx, reference.backward(dy, indices, x.shape, "tensor"))


@pytest.mark.parametrize(
    ("planes", "shape", "window", "out"),
    [
        pytest.param((1, 1), (4, 3000), (2, 2), (3, 2100), id="long rows"),
        pytest.param((1, 2), (3, 9000), (1, 5), (2, 7000), id="rows too long for the fast kernels"),
        pytest.param((40, 40), (2, 2), (1, 1), (2, 1), id="many small planes"),
        pytest.param((1, 1), (300, 2), (2, 1), (200, 2), id="long columns"),
        pytest.param((1, 2), (6, 7), (2, 2), (50, 40), id="more outputs than cells"),
        pytest.param((1, 2), (6, 7), (6, 7), (3, 4), id="windows of the whole input"),
        pytest.param((1, 1), (40, 45), (17, 20), (9, 30), id="large windows"),
        pytest.param((2, 1), (70, 64), (2, 2), (63, 58), id="ratio 0.9"),
        pytest.param((2, 2), (5, 1, 8), (2, 1, 2), (4, 3, 6), id="a middle axis of one cell and three outputs"),
        pytest.param((1, 2), (9, 6, 1), (2, 3, 1), (5, 4, 2), id="rows of one cell"),
        pytest.param((1, 9), (9, 6, 5), (2, 3, 2), (5, 4, 7), id="more outputs than cells in a row"),
        pytest.param((2, 1), (70, 64), (2, 2), (20, 12), id="ratio 0.2"),
        pytest.param((1, 1), (40, 20, 33), (2, 2, 2), (28, 14, 23), id="3d"),
        pytest.param((1, 1), (9, 9, 9), (3, 3, 3), (20, 21, 22), id="3d, more outputs than cells"),
        pytest.param((1, 2), (7, 100, 126), (2, 3, 2), (5, 69, 88), id="3d, several patches"),
        pytest.param((2, 2), (37, 253), (2, 2), (30, 179), id="2d, wide rows"),
        pytest.param(
            (2, 66), (40, 126), (2, 2), (28, 88), id="2d, wide rows, many planes", marks=pytest.mark.sanitizer
        ),
        pytest.param((1, 7), (33, 104), (3, 2), (20, 93), id="2d, wide rows, ratio 0.9"),
        pytest.param((1, 4), (19, 70, 95), (2, 2, 2), (12, 50, 68), id="3d, wide rows"),
        pytest.param((4, 66), (24, 8, 8), (2, 2, 2), (17, 6, 6), id="3d, many planes"),
        pytest.param((2, 66), (48, 8, 9), (2, 2, 2), (34, 6, 7), id="3d, many long planes"),
    ],
)
def test_extents(backend: Backend, planes: tuple[int, int], shape: Extents, window: Extents, out: Extents) -> None:
    for dtype in ("float32", "float16"):
        rng = np.random.default_rng(9)
        x = draw(rng, (*planes, *shape), dtype)
        check(backend, x, window, out, draw_samples(rng, *planes, len(shape)))


@given(st.data())
def test_any_problem(data: st.DataObject) -> None:
    rank = data.draw(st.sampled_from((2, 3)))
    placement = data.draw(st.sampled_from(PLACEMENTS))
    dtype = data.draw(st.sampled_from(DTYPES))
    shape, window, out = [], [], []
    for _ in range(rank):
        n = data.draw(st.integers(1 + (placement == "torch" and rank == 3), 9))
        k = data.draw(st.integers(1, limit(n, 1, rank) if placement == "torch" else n))
        shape.append(n)
        window.append(k)
        out.append(data.draw(st.integers(1, limit(n, k, rank) if placement == "torch" else 12)))
    planes = (data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    x = draw(rng, (*planes, *shape), dtype, specials=data.draw(st.booleans()))
    samples = draw_samples(rng, *planes, rank)
    samples[rng.random(samples.shape) < 0.2] = data.draw(st.sampled_from((0.0, float(BELOW_ONE), -3.0, 7.0, np.nan)))
    devices = ("cpu", "cuda") if bc.cuda_device_count() else ("cpu",)
    for device in devices:
        check(Backend(device), x, window, out, samples, placement=placement)


def test_float64_samples(backend: Backend) -> None:
    rng = np.random.default_rng(2)
    x = draw(rng, (2, 2, 30, 20), "float64")
    samples = rng.random((2, 2, 2))
    for placement in PLACEMENTS:
        check(backend, x, (2, 3), (17, 12), samples, placement=placement)


# ---------------------------------------------------------------------------------------------------
# Where windows lie.


@pytest.mark.parametrize("u", [0.0, 0.3, 0.5, float(BELOW_ONE)])
def test_even_is_the_exact_rule(u: float) -> None:
    """But for the one rounding of the sum of the fraction and the sample."""
    for n, k, o in itertools.product((5, 16, 31, 64), (1, 2, 5), (1, 2, 7, 30, 64, 100)):
        for i in range(o):
            exact = reference.exact_start(n, k, o, i, float(np.float32(u)))
            got = reference.start(n, k, o, i, u, "even", np.float32)
            distance = abs(exact - round(exact))
            if distance > 2**-22:
                assert got == min(math.floor(exact), n - k)
            else:
                assert abs(got - exact) <= 1


def starts_from_plan(backend: Backend, n: int, k: int, o: int, samples: np.ndarray, placement: str) -> np.ndarray:
    """[samples, o], from the indices of a constant input: its first cell is every window's maximum."""
    x = np.zeros((1, samples.size, 2, n), np.float32)
    pairs = np.zeros((1, samples.size, 2), np.float32)
    pairs[0, :, 0 if placement == "torch" else 1] = samples
    _, indices = forward(backend, x, (1, k), (1, o), pairs, placement=placement, index_base="plane")
    return indices[0, :, 0] % n


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_starts(backend: Backend, placement: str) -> None:
    samples = np.array([0, 2**-24, 0.25, 0.5, 0.7, BELOW_ONE, -1, 1, 2, 1e30, -np.inf, np.inf, np.nan], np.float32)
    rng = np.random.default_rng(4)
    for _ in range(60):
        n = int(rng.integers(1, 65))
        k = int(rng.integers(1, n + 1))
        o = int(rng.integers(1, limit(n, k, 2) + 1 if placement == "torch" else 65))
        got = starts_from_plan(backend, n, k, o, samples, placement)
        expected = [[reference.start(n, k, o, i, u, placement, np.float32) for i in range(o)] for u in samples]
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("garbage", [5.0, -5.0, np.inf, -np.inf, np.nan])
def test_samples_outside_read_nothing_outside(backend: Backend, placement: str, garbage: float) -> None:
    # The guards around x are NaN in every dtype's eyes, and NaN would win.
    x = np.ones((1, 2, 7, 8), np.float32)
    samples = np.full((1, 2, 2), garbage, np.float32)
    n, c, *shape = x.shape
    plan = bc.FractionalMaxPool2dPlan(
        **fields(n, c, shape, (2, 2), (4, 4)), dtype="float32", placement=placement, device=backend.device
    )
    source = backend.input(x, fill=0xFF)
    y = backend.output((n, c, 4, 4), "float32")
    indices = backend.output((n, c, 4, 4), "int64")
    plan.run(x=source.tensor, random_samples=backend.input(samples).tensor, y=y.tensor, indices=indices.tensor)
    assert (y.numpy() == 1).all()
    assert (indices.numpy() >= 0).all()
    assert (indices.numpy() < x.size).all()


# ---------------------------------------------------------------------------------------------------
# PyTorch.


def torch_results(x: np.ndarray, window: Extents, out: Extents, samples: np.ndarray, device: str) -> Any:
    torch = support.torch()
    pool = getattr(torch.nn.functional, f"fractional_max_pool{x.ndim - 2}d")
    tensor = support.to_torch(x, device)
    drawn = support.to_torch(samples, device).to(tensor.dtype)
    y, indices = pool(tensor, tuple(window), output_size=tuple(out), return_indices=True, _random_samples=drawn)
    return support.from_torch(y), support.from_torch(indices), support.from_torch(drawn.float())


def random_problem(rng: np.random.Generator, rank: int) -> tuple[tuple[int, int], list[int], list[int], list[int]]:
    shape, window, out = [], [], []
    for _ in range(rank):
        n = int(rng.integers(2, 40 if rank == 2 else 14))
        k = int(rng.integers(1, min(5, limit(n, 1, rank)) + 1))
        shape.append(n)
        window.append(k)
        out.append(int(rng.integers(1, limit(n, k, rank) + 1)))
    return (int(rng.integers(1, 4)), int(rng.integers(1, 4))), shape, window, out


@pytest.mark.requires("torch")
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("rank", [2, 3])
def test_equals_torch_on_the_cpu(backend: Backend, rank: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(15):
        planes, shape, window, out = random_problem(rng, rank)
        x = draw(rng, (*planes, *shape), "float32", specials=bool(rng.integers(2)))
        samples = draw_samples(rng, *planes, rank)
        y, indices, _ = torch_results(x, window, out, samples, "cpu")
        got, got_indices = forward(backend, x, window, out, samples, placement="torch", index_base="plane")
        assert_same_bits(got, y)
        np.testing.assert_array_equal(got_indices, indices)


@pytest.mark.requires("torch.cuda")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [2, 3])
def test_equals_torch_on_cuda(rank: int, dtype: str) -> None:
    rng = np.random.default_rng(rank)
    for device, _ in itertools.product(("cpu", "cuda"), range(60)):
        if device == "cuda" and not bc.cuda_device_count():
            continue
        planes, shape, window, out = random_problem(rng, rank)
        x = draw(rng, (*planes, *shape), dtype, specials=bool(rng.integers(2)))
        samples = draw_samples(rng, *planes, rank)
        # torch's samples have the tensor's dtype; what rounds to 1 is outside.
        y, indices, drawn = torch_results(x, window, out, np.minimum(samples, np.float32(0.99)), "cuda")
        got, got_indices = forward(
            Backend(device), x, window, out, drawn.astype(np.float32), placement="torch", index_base="plane"
        )
        assert_same_bits(got, y)
        np.testing.assert_array_equal(got_indices, indices)


@pytest.mark.requires("torch")
@pytest.mark.parametrize("rank", [2, 3])
def test_backward_equals_torch_autograd(backend: Backend, rank: int) -> None:
    torch = support.torch()
    rng = np.random.default_rng(11)
    for _ in range(20):
        planes, shape, window, out = random_problem(rng, rank)
        x = rng.standard_normal((*planes, *shape))
        samples = draw_samples(rng, *planes, rank)
        tensor = torch.tensor(x, requires_grad=True)
        pool = getattr(torch.nn.functional, f"fractional_max_pool{rank}d")
        drawn = torch.tensor(samples.astype(np.float64))
        y, indices = pool(tensor, tuple(window), output_size=tuple(out), return_indices=True, _random_samples=drawn)
        dy = rng.standard_normal(tuple(y.shape))
        y.backward(torch.tensor(dy))
        dx = backward(backend, dy, support.from_torch(indices), shape, window, placement="torch", index_base="plane")
        np.testing.assert_allclose(dx, tensor.grad.numpy(), rtol=0, atol=1e-13)


def test_differs_from_torch_on_purpose(backend: Backend) -> None:
    """A sample that isn't in [0, 1) reads nothing outside; torch on CUDA doesn't look."""
    x = np.arange(36, dtype=np.float32).reshape(1, 1, 6, 6)
    y, _ = forward(backend, x, (2, 2), (3, 3), np.full((1, 1, 2), 9, np.float32), placement="torch")
    expected, _ = forward(backend, x, (2, 2), (3, 3), np.full((1, 1, 2), BELOW_ONE), placement="torch")
    assert_same_bits(y, expected)


# ---------------------------------------------------------------------------------------------------
# Samples from a seed.


def test_reference_philox() -> None:
    # The known answers that come with the generator's paper.
    assert reference.philox((0,) * 4, (0,) * 2) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert reference.philox((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("seed", "offset"), [(0, 0), (7, 3), (-1, 2**40 + 5), (2**63 - 1, -1), (-(2**63), 2**62)])
@pytest.mark.parametrize("rank", [2, 3])
def test_seeds(backend: Backend, rank: int, seed: int, offset: int, placement: str) -> None:
    rng = np.random.default_rng(1)
    shape, window, out = (10, 12, 9)[:rank], (2, 3, 2)[:rank], (5, 7, 4)[:rank]
    x = draw(rng, (2, 3, *shape), "float32")
    got = forward(backend, x, window, out, None, seed=seed, offset=offset, placement=placement)
    samples = reference.generated_samples(seed, offset, 2, 3, rank)
    expected = reference.forward(x, window, out, samples, placement, "tensor")
    assert_same_bits(got[0], expected[0])
    np.testing.assert_array_equal(got[1], expected[1])


def test_seeds_by_channels_last(backend: Backend) -> None:
    rng = np.random.default_rng(1)
    x = draw(rng, (2, 11, 10, 12), "float32")
    options = {"seed": 5, "offset": 6}
    expected = forward(backend, x, (2, 2), (7, 8), None, **options)
    got = forward(backend, x, (2, 2), (7, 8), None, layouts=("channels_last", "channels_last"), **options)
    assert_same_bits(got[0], expected[0])
    np.testing.assert_array_equal(got[1], expected[1])


def test_generated_samples_are_uniform(backend: Backend) -> None:
    """Chi-squared over the place of a single window, for each axis, and over both together."""
    cells = 16
    planes = 20000
    x = np.zeros((1, planes, cells + 1, cells + 1), np.float32)
    _, indices = forward(backend, x, (2, 2), (1, 1), None, seed=1234, offset=1, index_base="plane")
    places = indices.reshape(-1)
    # floor(u * 15) for u in [0, 1): 15 places of one probability.
    rows, columns = np.divmod(places, cells + 1)
    for counts, kinds in (
        (np.bincount(rows, minlength=15), 15),
        (np.bincount(columns, minlength=15), 15),
        (np.bincount(rows * 15 + columns, minlength=225), 225),
    ):
        assert counts.size == kinds
        expected = planes / kinds
        statistic = ((counts - expected) ** 2 / expected).sum()
        # Six standard deviations of the distribution.
        assert abs(statistic - (kinds - 1)) < 6 * math.sqrt(2 * (kinds - 1))
    rows_after = np.corrcoef(rows[:-1], rows[1:])[0, 1]
    assert abs(rows_after) < 6 / math.sqrt(planes)


def test_offsets_give_other_samples(backend: Backend) -> None:
    x = np.zeros((1, 50, 33, 33), np.float32)
    first = forward(backend, x, (2, 2), (1, 1), None, seed=1, offset=0)[1]
    for seed, offset in ((1, 1), (2, 0)):
        other = forward(backend, x, (2, 2), (1, 1), None, seed=seed, offset=offset)[1]
        assert (first == other).mean() < 0.2


@pytest.mark.requires("torch.cuda")
def test_captured_graph_replays_with_another_offset() -> None:
    torch = support.torch()
    x = torch.rand(2, 3, 20, 20, device="cuda")
    y = torch.empty(2, 3, 11, 11, device="cuda")
    indices = torch.empty(2, 3, 11, 11, device="cuda", dtype=torch.int64)
    offset = torch.zeros(1, device="cuda", dtype=torch.int64)
    plan = bc.FractionalMaxPool2dPlan(
        **fields(2, 3, (20, 20), (2, 2), (11, 11)), dtype="float32", samples=False, seed=3
    )
    operands = {"x": x, "offset": offset, "y": y, "indices": indices}
    plan.run(**operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(**operands)
    for value in (5, 9):
        offset.fill_(value)
        graph.replay()
        samples = reference.generated_samples(3, value, 2, 3, 2)
        expected = reference.forward(support.from_torch(x), (2, 2), (11, 11), samples, "even", "tensor")
        assert_same_bits(support.from_torch(y), expected[0])
        np.testing.assert_array_equal(support.from_torch(indices), expected[1])


# ---------------------------------------------------------------------------------------------------
# Backward.


@pytest.mark.requires("torch.cuda")
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_backwards_in_a_row_keep_their_order(captured: bool) -> None:
    """Each reads what the one before wrote, and may be given its blocks before that one is done."""
    torch = support.torch()
    extents, planes = (14, 20, 28, 40), (4, 33)
    gradients = [torch.randn(*planes, extent, extent, extent, device="cuda") for extent in extents]
    calls = []
    for (small, dy), (large, dx) in itertools.pairwise(zip(extents, gradients, strict=True)):
        _, indices = bc.fractional_max_pool3d(torch.rand_like(dx), 2, small, seed=1, return_indices=True)
        plan = bc.FractionalMaxPool3dBackwardPlan(
            **fields(*planes, [large] * 3, (2, 2, 2), [small] * 3), dtype="float32", index_dtype="int64"
        )
        calls.append((plan, {"dy": dy, "indices": indices, "dx": dx}))
    for plan, operands in calls:
        plan.run(**operands)
        torch.cuda.synchronize()
    expected = support.from_torch(gradients[-1])

    def work() -> None:
        for dx in gradients[1:]:
            dx.fill_(math.nan)
        for plan, operands in calls:
            plan.run(**operands)

    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        run = graph.replay
    else:
        run = work
    for _ in range(10):
        run()
    torch.cuda.synchronize()
    assert_same_bits(support.from_torch(gradients[-1]), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["row_major", "channels_last"])
def test_backward_has_the_same_bits_in_every_run(backend: Backend, layout: str, dtype: str) -> None:
    rng = np.random.default_rng(8)
    shape, window, out = (40, 50), (3, 3), (31, 39)
    x = draw(rng, (2, 9, *shape), dtype)
    _, indices = forward(backend, x, window, out, draw_samples(rng, 2, 9, 2))
    dy = rng.standard_normal(indices.shape).astype(x.dtype)
    first = backward(backend, dy, indices, shape, window, layouts=(layout, layout))
    assert_same_bits(first, reference.backward(dy, indices, x.shape, "tensor"))
    for misalign in (0, 1, 2, 3):
        again = backward(backend, dy, indices, shape, window, layouts=(layout, layout), misalign=misalign)
        assert_same_bits(again, first)


@pytest.mark.parametrize("layout", ["row_major", "channels_last"])
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_bad_indices_add_nothing(backend: Backend, index_dtype: str, rank: int, layout: str) -> None:
    rng = np.random.default_rng(6)
    shape, window, out = (12, 14, 11)[:rank], (2, 3, 2)[:rank], (7, 9, 8)[:rank]
    x = draw(rng, (2, 2, *shape), "float32")
    _, indices = forward(backend, x, window, out, draw_samples(rng, 2, 2, rank), index_dtype=index_dtype)
    dy = rng.standard_normal(indices.shape).astype(np.float32)
    limits = np.iinfo(index_dtype)
    garbage = [-1, x.size, x.size + 3, limits.min, limits.max]
    # The other end of the same plane, which no window of the first output can hold, and another plane.
    garbage += [math.prod(shape) - 1, math.prod(shape) + 1]
    if index_dtype == "int64":
        # Right in its lower half.
        garbage.append(int(indices[0, 0].reshape(-1)[len(garbage)]) + 2**32)
    damaged = indices.copy()
    kept = dy.copy()
    for place, bad in enumerate(garbage):
        damaged[0, 0].reshape(-1)[place] = bad
        kept[0, 0].reshape(-1)[place] = 0
    got = backward(backend, dy, damaged, shape, window, layouts=(layout, layout))
    np.testing.assert_array_equal(got, reference.backward(kept, indices, x.shape, "tensor"))


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("channels", "shape", "out"),
    [
        (9, (30, 13), (21, 9)),
        (9, (30, 13, 17), (21, 9, 12)),
        (9, (5, 50, 60), (4, 35, 42)),
        (9, (6, 100, 128), (4, 70, 90)),
        (9, (7, 33, 57), (5, 23, 40)),
        (9, (20, 130), (14, 92)),
        (9, (340, 260), (240, 184)),
        (66, (40, 126), (28, 88)),
        (9, (400, 130), (280, 66)),
    ],
)
def test_random_indices_agree_on_all_devices_and_paths(
    backend: Backend, channels: int, shape: Extents, out: Extents, dtype: str, index_dtype: str
) -> None:
    rng = np.random.default_rng(12)
    window = (2,) * len(shape)
    cells = math.prod(shape)
    indices = rng.integers(-3, 2 * channels * cells + 3, (2, channels, *out)).astype(index_dtype)
    # Many to one cell, and many near where they belong.
    indices[0] = (np.arange(math.prod(out)) * cells // math.prod(out)).reshape(out)
    # Any that the output could name for some samples, though not all for the same ones.
    near = (channels + np.arange(4, channels)).reshape(-1, *(1 for _ in out)) + np.zeros(out, int)
    for axis, (n, o) in enumerate(zip(shape, out, strict=True)):
        starts = (np.arange(o) * (n - 2) // (o - 1)).reshape([-1 if a == axis else 1 for a in range(len(out))])
        near = near * n + np.minimum(starts + rng.integers(0, 3, near.shape), n - 1)
    indices[1, 4:] = near
    dy = rng.standard_normal(indices.shape).astype(dtype)
    expected = backward(Backend("cpu"), dy, indices, shape, window)
    for layout, misalign in (("row_major", 0), ("row_major", 1), ("channels_last", 0)):
        got = backward(backend, dy, indices, shape, window, layouts=(layout, layout), misalign=misalign)
        assert_same_bits(got, expected)


def test_backward_reaches_every_place_a_window_can_have(backend: Backend) -> None:
    """Whatever the sample: from the indices of all starts, nothing of dy is lost."""
    samples = np.linspace(0, 1, 41, dtype=np.float32)
    samples[-1] = BELOW_ONE
    rng = np.random.default_rng(3)
    for placement in PLACEMENTS:
        for _ in range(12):
            n = int(rng.integers(2, 33))
            k = int(rng.integers(1, n + 1))
            o = int(rng.integers(1, limit(n, k, 2) + 1 if placement == "torch" else 40))
            pairs = np.stack([samples, samples], axis=-1)[None]
            x = rng.standard_normal((1, samples.size, n, n)).astype(np.float32)
            _, indices = forward(backend, x, (k, k), (o, o), pairs, placement=placement)
            dy = np.ones(indices.shape, np.float32)
            dx = backward(backend, dy, indices, (n, n), (k, k), placement=placement)
            np.testing.assert_array_equal(dx.sum((2, 3)), np.full((1, samples.size), o * o))


# ---------------------------------------------------------------------------------------------------
# Known cases.


def arange(*shape: int) -> np.ndarray:
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize("layout", ["row_major", "channels_last", "transposed"])
def test_C01_nan_and_minus_infinity(backend: Backend, layout: str) -> None:
    x = arange(1, 1, 6, 6)
    x[0, 0, 1, 1] = np.nan
    samples = np.array([[[0.3, 0.7]]], np.float32)
    options = {"placement": "torch", "index_base": "plane", "layouts": (layout, layout)}
    y, indices = forward(backend, x, (2, 2), (3, 3), samples, **options)
    np.testing.assert_array_equal(y[0, 0], [[np.nan, 9, 11], [19, 21, 23], [31, 33, 35]])
    assert indices[0, 0].tolist() == [[7, 9, 11], [19, 21, 23], [31, 33, 35]]
    y, indices = forward(backend, np.full_like(x, -np.inf), (2, 2), (3, 3), samples, **options)
    assert (y == -np.inf).all()
    assert indices[0, 0].tolist() == [[0, 2, 4], [12, 14, 16], [24, 26, 28]]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_nan_of_a_window(backend: Backend, placement: str) -> None:
    """The first NaN, and under placement "torch" the last."""
    x = np.array([[[[np.nan, 0], [np.nan, 0]]]], np.float32)
    _, indices = forward(backend, x, (2, 2), (1, 1), np.zeros((1, 1, 2), np.float32), placement=placement)
    assert indices.item() == (2 if placement == "torch" else 0)


def test_C03_transposed_input(backend: Backend) -> None:
    x = arange(2, 6, 6)[None].transpose(0, 1, 3, 2)
    samples = np.array([[[0.3, 0.7], [0.6, 0.1]]], np.float32)
    y, indices = forward(
        backend, x, (2, 2), (3, 3), samples,
        placement="torch", index_base="plane", layouts=("transposed", "row_major"),
    )  # fmt: skip
    first = np.array([[7, 19, 31], [9, 21, 33], [11, 23, 35]])
    np.testing.assert_array_equal(y[0], [first, first + 36])
    np.testing.assert_array_equal(indices[0], [[[7, 9, 11], [19, 21, 23], [31, 33, 35]]] * 2)


@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 2)])
def test_C04_unbatched(backend: Backend, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).standard_normal((2, 7, 7)).astype(np.float32)
    samples = np.random.default_rng(1).random(shape, np.float32)
    expected = reference.forward(x[None], (2, 2), (3, 3), samples.reshape(1, 2, 2), "even", "tensor")
    y = bc.fractional_max_pool2d(x, 2, 3, random_samples=samples)
    assert_same_bits(y, expected[0][0])


def test_C06_bad_saved_indices(backend: Backend) -> None:
    dy = np.ones((2, 3, 2, 2, 2), np.float32)
    for wrong in (np.empty(0, np.int64), np.zeros((2, 3, 2, 2), np.int64)):
        with pytest.raises(bc.InvalidProblemError, match="indices: expected shape"):
            bc.fractional_max_pool3d_backward(dy, wrong, (2, 3, 4, 4, 4), 2)
    indices = np.full(dy.shape, 1250000000000, np.int64)
    dx = backward(backend, dy, indices, (4, 4, 4), (2, 2, 2))
    assert not dx.any()


@pytest.mark.parametrize("ratio", [-13.0, 0, 1.5, math.nan, 1.0])
def test_C08_ratios(ratio: float) -> None:
    x = np.zeros((1, 1, 7, 7), np.float32)
    with pytest.raises(ValueError, match="between 0 and 1"):
        bc.fractional_max_pool2d(x, 2, output_ratio=ratio, seed=0)
    assert bc.fractional_max_pool2d(x, 2, output_ratio=0.5, seed=0).shape == (1, 1, 3, 3)


def test_C12_edges_of_the_interval_rule(backend: Backend) -> None:
    x = arange(1, 1, 4, 5, 6)
    samples = np.array([[[0.1, 0.5, 0.9]]], np.float32)
    y, _ = forward(backend, x, (2, 2, 2), (2, 3, 4), samples, placement="torch")
    first = np.array([[37, 38, 39, 41], [49, 50, 51, 53], [55, 56, 57, 59]])
    np.testing.assert_array_equal(y[0, 0], [first, first + 60])
    y, _ = forward(backend, arange(1, 1, 6, 6), (2, 2), (1, 1), np.zeros((1, 1, 2), np.float32), placement="torch")
    assert y.item() == 35


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_C12_starts_of_16_bit_tensors_are_computed_in_float32(backend: Backend, dtype: str) -> None:
    n, k, o = 4098, 2, 2049
    x = np.zeros((1, 1, 1, n), support.DTYPES[dtype].numpy)
    samples = np.full((1, 1, 2), 0.3, np.float32)
    _, indices = forward(backend, x, (1, k), (1, o), samples, placement="torch")
    expected = [reference.start(n, k, o, i, 0.3, "torch", np.float32) for i in range(o)]
    assert indices.reshape(-1).tolist() == expected


# ---------------------------------------------------------------------------------------------------
# Function forms.


@pytest.mark.parametrize("rank", [2, 3])
def test_function_forms(backend: Backend, framework: str, rank: int) -> None:
    pool = getattr(bc, f"fractional_max_pool{rank}d")
    pool_backward = getattr(bc, f"fractional_max_pool{rank}d_backward")
    rng = np.random.default_rng(1)
    shape, out = (8, 9, 7)[:rank], (5, 6, 4)[:rank]
    x = draw(rng, (2, 3, *shape), "float32")
    samples = draw_samples(rng, 2, 3, rank)
    expected = reference.forward(x, (2,) * rank, out, samples, "even", "tensor")
    ours = backend.of(framework, x)
    given_samples = backend.of(framework, samples)
    y, indices = pool(ours, 2, out, random_samples=given_samples, return_indices=True)
    assert type(y) is type(ours)
    assert_same_bits(backend.read(y), expected[0])
    np.testing.assert_array_equal(backend.read(indices), expected[1])
    assert_same_bits(backend.read(pool(ours, 2, out, random_samples=given_samples)), expected[0])

    dy = rng.standard_normal(expected[0].shape).astype(np.float32)
    dx = pool_backward(backend.of(framework, dy), indices, x.shape, 2)
    assert type(dx) is type(ours)
    assert_same_bits(backend.read(dx), reference.backward(dy, expected[1], x.shape, "tensor"))

    y = pool(ours, 2, out, seed=3, offset=4)
    expected = reference.forward(x, (2,) * rank, out, reference.generated_samples(3, 4, 2, 3, rank), "even", "tensor")
    assert_same_bits(backend.read(y), expected[0])
    if framework != "jax":
        y, indices = (backend.of(framework, np.empty_like(part)) for part in expected)
        written = pool(ours, 2, out, seed=3, offset=4, return_indices=True, out=(y, indices))
        assert written[0] is y
        assert written[1] is indices
        assert_same_bits(backend.read(y), expected[0])


@pytest.mark.requires("torch")
def test_function_form_takes_16_bit_samples() -> None:
    torch = support.torch()
    x = torch.rand(1, 2, 9, 9, dtype=torch.float16)
    samples = torch.rand(1, 2, 2, dtype=torch.float16)
    got = bc.fractional_max_pool2d(x, 2, 5, random_samples=samples)
    assert torch.equal(got, bc.fractional_max_pool2d(x, 2, 5, random_samples=samples.float()))


def test_samples_of_more_batch_entries() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 9, 9)).astype(np.float32)
    samples = draw_samples(rng, 4, 3, 2)
    got = bc.fractional_max_pool2d(x, 2, 5, random_samples=samples)
    assert_same_bits(got, bc.fractional_max_pool2d(x, 2, 5, random_samples=samples[:2]))


# ---------------------------------------------------------------------------------------------------
# Refusals.


@pytest.mark.parametrize(
    ("changed", "error", "sentence"),
    [
        ({"batch": 0}, bc.InvalidProblemError, "batch: expected at least 1, got 0"),
        ({"channels": -1}, bc.InvalidProblemError, "channels: expected at least 1"),
        ({"h_in": 0}, bc.InvalidProblemError, "h_in: expected at least 1"),
        ({"w_out": 0}, bc.InvalidProblemError, "w_out: expected at least 1"),
        ({"window_h": 0}, bc.InvalidProblemError, "window_h: expected 1 to 8"),
        ({"window_w": 10}, bc.InvalidProblemError, "window_w: expected 1 to 9"),
        ({"w_in": 2**31, "w_out": 2}, bc.UnsupportedError, "w: expected extents of at most"),
        ({"dtype": "int32"}, bc.UnsupportedError, "dtype: expected float16, bfloat16, float32 or float64"),
        ({"dtype": "complex64"}, bc.UnsupportedError, "dtype"),
        ({"index_dtype": "int16"}, bc.InvalidProblemError, "index_dtype: expected int32 or int64, got int16"),
        ({"batch": 2**31, "index_dtype": "int32"}, bc.InvalidProblemError, "int32 can't count"),
        ({"placement": "random"}, bc.InvalidProblemError, "placement"),
        ({"placement": "torch", "h_out": 8}, bc.InvalidProblemError, "h_out: placement torch takes at most 7"),
        ({"batch": 2**40, "channels": 2**30}, bc.InvalidProblemError, "more bytes than an int64"),
    ],
)
def test_descriptors_are_refused(device: str, changed: dict[str, Any], error: type[Exception], sentence: str) -> None:
    good = {**fields(1, 1, (8, 9), (2, 2), (4, 5)), "dtype": "float32", "device": device}
    with pytest.raises(error, match=sentence):
        bc.FractionalMaxPool2dPlan(**{**good, **changed})
    if "index_dtype" not in changed:
        with pytest.raises(error, match=sentence):
            bc.FractionalMaxPool2dBackwardPlan(**{**good, **changed})


def test_limits_of_placement_torch() -> None:
    """As PyTorch has them: one output fewer in 3-D."""
    common = {"dtype": "float32", "placement": "torch", "device": "cpu"}
    bc.FractionalMaxPool2dPlan(**fields(1, 1, (4, 4), (2, 2), (3, 3)), **common)
    bc.FractionalMaxPool3dPlan(**fields(1, 1, (4, 4, 4), (2, 2, 2), (2, 2, 2)), **common)
    with pytest.raises(bc.InvalidProblemError, match="d_out: placement torch takes at most 2"):
        bc.FractionalMaxPool3dPlan(**fields(1, 1, (4, 4, 4), (2, 2, 2), (3, 2, 2)), **common)


def test_float64_samples_need_float64_tensors() -> None:
    with pytest.raises(bc.InvalidProblemError, match="samples_dtype: expected float32, got float64"):
        bc.FractionalMaxPool2dPlan(
            **fields(1, 1, (4, 4), (2, 2), (3, 3)), dtype="float32", samples_dtype="float64", device="cpu"
        )


def test_function_form_refusals() -> None:
    x = np.zeros((1, 2, 8, 8), np.float32)
    samples = np.zeros((1, 2, 2), np.float32)
    for arguments, sentence in (
        ({"output_size": 3}, "expected random_samples or a seed"),
        ({"output_size": 3, "seed": 1, "random_samples": samples}, "got both"),
        ({"seed": 1}, "one of output_size and output_ratio"),
        ({"output_size": 3, "output_ratio": 0.5, "seed": 1}, "one of output_size and output_ratio"),
        ({"output_size": (3, 3, 3), "seed": 1}, "output_size: expected one number or 2, got 3"),
        ({"output_size": 2.5, "seed": 1}, "output_size: expected an integer, got 2.5"),
        ({"output_size": object, "seed": 1}, "output_size: expected one number or 2, got <class"),
        ({"output_size": 3, "seed": 1.5}, "fractional_max_pool2d: seed: expected an integer, got 1.5"),
        ({"output_size": 3, "random_samples": np.zeros((1, 3, 2), np.float32)}, "random_samples: expected shape"),
        ({"output_size": 3, "random_samples": np.zeros((1, 2, 2), np.int32)}, "random_samples: expected dtype"),
    ):
        with pytest.raises(bc.InvalidProblemError, match=sentence):
            bc.fractional_max_pool2d(x, 2, **arguments)
    with pytest.raises(bc.InvalidProblemError, match=r"x: expected shape \(\[n,\] c, h, w\)"):
        bc.fractional_max_pool2d(x[0, 0], 2, 3, seed=1)
    y, indices = bc.fractional_max_pool2d(x, 2, 3, seed=1, return_indices=True)
    with pytest.raises(bc.InvalidProblemError, match=r"out: expected \(y, indices\), got ndarray"):
        bc.fractional_max_pool2d(x, 2, 3, seed=1, return_indices=True, out=y)
    with pytest.raises(bc.InvalidProblemError, match="input_shape"):
        bc.fractional_max_pool2d_backward(y, indices, (2, 2, 8, 8), 2)
    with pytest.raises(bc.InvalidProblemError, match="expected out"):
        bc.fractional_max_pool2d_backward(y, indices, x.shape, 2, accumulate=True)


def test_what_a_plan_tells(device: str) -> None:
    plan = bc.FractionalMaxPool2dPlan(
        **fields(2, 3, (8, 8), (2, 2), (5, 5)), dtype="float32", samples=False, device=device
    )
    assert [operand.name for operand in plan.operands] == ["x", "offset", "y", "indices"]
    assert plan.sku.op == "fractional_max_pool2d"
    assert plan.sku.aux_dtype == "int64"
    assert plan.cost.bytes == 4 * 2 * 3 * 64 + (4 + 8) * 2 * 3 * 25 + 8
    assert plan.workspace_size == 0
    assert plan.precision_guarantee.deterministic
    assert plan.precision_guarantee.math_precision == "exact"
    without = bc.FractionalMaxPool2dPlan(
        **fields(2, 3, (8, 8), (2, 2), (5, 5)), dtype="float32", index_dtype=None, device=device
    )
    assert [operand.name for operand in without.operands] == ["x", "random_samples", "y"]
    assert without.sku.aux_dtype is None


def test_without_indices(backend: Backend) -> None:
    rng = np.random.default_rng(0)
    for layout in ("row_major", "channels_last"):
        x = draw(rng, (2, 2, 9, 9), "float16")
        samples = draw_samples(rng, 2, 2, 2)
        y, _ = forward(backend, x, (2, 2), (5, 5), samples, index_dtype=None, layouts=(layout, layout))
        assert_same_bits(y, reference.forward(x, (2, 2), (5, 5), samples, "even", "tensor")[0])


# ---------------------------------------------------------------------------------------------------
# Sizes.


@pytest.mark.requires("torch.cuda", "gpu.memory")
@pytest.mark.parametrize("layout", ["row_major", "channels_last"])
def test_more_than_2_to_the_31_elements(layout: str) -> None:
    torch = support.torch()
    n, c, h, w, o = 5, 7, 8200, 8201, 4100
    last = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    x = torch.empty(n, c, h, w, dtype=torch.bfloat16, device="cuda", memory_format=last).uniform_()
    assert x.numel() > 2**31
    samples = torch.rand(n, c, 2, device="cuda")
    y, indices = bc.fractional_max_pool2d(x, 2, o, random_samples=samples, return_indices=True)
    few, few_indices = bc.fractional_max_pool2d(
        x[-1:, -1:].contiguous(), 2, o, random_samples=samples[-1:, -1:].contiguous(), return_indices=True
    )
    assert torch.equal(y[-1:, -1:], few)
    assert torch.equal(indices[-1:, -1:], few_indices + (n * c - 1) * h * w)
    dx = bc.fractional_max_pool2d_backward(y, indices, x.shape, 2)
    few_dx = bc.fractional_max_pool2d_backward(few, few_indices, (1, 1, h, w), 2)
    assert torch.equal(dx[-1:, -1:], few_dx)
