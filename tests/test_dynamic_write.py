# SPDX-License-Identifier: Apache-2.0
"""DynamicWriteSlicePlan and its gradients: bit for bit, and every byte elsewhere as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import support
from hypothesis import given
from hypothesis import strategies as st
from support import DTYPES, INPUT_LAYOUTS, OUTPUT_LAYOUTS, Backend, Placed

import baracuda as bc
from reference import dynamic_write as reference
from reference import layout as cells_reference

PACKED = ("int4", "uint4")
BOUNDS = ("drop", "clamp")
EXTREMES = (-(2**63), -(2**31), -1, 0, 1, 2**31 - 1, 2**63 - 1)


def expected_bytes(dest: Placed, source: Placed, starts: np.ndarray, bounds: str) -> np.ndarray:
    """All the memory of `dest`, as it must be after the run."""
    packed = dest.kind.packed
    width = cells_reference.element_cells(dest.kind.bits)
    cells, views = [], []
    for operand in (dest, source):
        cells.append(cells_reference.cells_of(operand.memory.before, packed))
        first = operand.offset * 2 if packed else operand.offset
        views.append(cells_reference.view(cells[-1], operand.shape, operand.strides, first, width))
    reference.write(*views, starts, bounds == "clamp")
    return cells_reference.cells_to_bytes(cells[0], packed)


def check(
    dest: Placed, source: Placed, starts: Any, device: str, bounds: str = "drop", index_dtype: str = "int64"
) -> bc.DynamicWriteSlicePlan:
    starts = np.array(starts, index_dtype)
    expected = expected_bytes(dest, source, starts, bounds)
    plan = bc.DynamicWriteSlicePlan(
        dest_shape=dest.shape,
        block_shape=source.shape,
        dtype=dest.kind.name,
        index_dtype=index_dtype,
        batched=starts.ndim == 2,
        bounds=bounds,
        device=device,
    )
    plan.run(dest=dest.tensor, source=source.tensor, starts=bc.asarray(starts, device))
    np.testing.assert_array_equal(dest.memory.now(), expected)
    source.memory.assert_untouched()
    return plan


def operands(
    rng: np.random.Generator, dest: tuple[int, ...], block: tuple[int, ...], dtype: str, device: str, **options: Any
) -> tuple[Placed, Placed]:
    dest_options = {key.removeprefix("dest_"): value for key, value in options.items() if key.startswith("dest_")}
    source_options = {key.removeprefix("source_"): value for key, value in options.items() if key.startswith("source_")}
    return (
        Placed(dest, dtype, device, fill=rng, **dest_options),
        Placed(block, dtype, device, fill=rng, **source_options),
    )


# ---------------------------------------------------------------------------------------------------
# Cases by their names.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4", "uint4", "complex64", "bool"])
@pytest.mark.parametrize(
    ("start", "expected"),
    [(1, [0, 1, 1, 1, 0]), (2, [0, 0, 1, 1, 1]), (3, [0, 0, 1, 1, 1]), (-2, [1, 1, 1, 0, 0]), (9, [0, 0, 1, 1, 1])],
)
def test_e01_clamp(device: str, backend: Backend, dtype: str, start: int, expected: list[int]) -> None:
    """Also E17: the same places for half bytes."""
    dest, source = backend.input(np.zeros(5), dtype), backend.input(np.ones(3), dtype)
    check(dest, source, [start], device, "clamp")
    assert dest.numpy().astype(int if dtype != "complex64" else complex).tolist() == expected


@pytest.mark.parametrize("dtype", ["float64", "int4", "uint4"])
def test_e01_two_axes(device: str, backend: Backend, dtype: str) -> None:
    dest = backend.input(np.array([[1, 2, 3], [4, 5, 6]]), dtype)
    source = backend.input(np.array([[7, 8], [9, 10]]) % 16, dtype)
    check(dest, source, [1, 1], device, "clamp")
    expected = np.array([[1, 7, 8], [4, 9, 10]])
    got = dest.numpy().astype(int)
    np.testing.assert_array_equal(got % 16 if dtype == "int4" else got, expected)


@pytest.mark.sanitizer
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize(("starts", "placed"), [([-1, 3], (0, 2)), ([2**31 - 1, 0], (2, 0))])
def test_e03_starts_out_of_range(
    device: str, backend: Backend, index_dtype: str, starts: list[int], placed: tuple[int, int]
) -> None:
    dest = backend.input(np.arange(16, dtype=np.float32).reshape(4, 4))
    source = backend.input(np.full((2, 2), 99, np.float32))
    check(dest, source, starts, device, "clamp", index_dtype)
    expected = np.arange(16).reshape(4, 4)
    expected[placed[0] : placed[0] + 2, placed[1] : placed[1] + 2] = 99
    np.testing.assert_array_equal(dest.numpy(), expected)
    dest.assert_guards()


def test_e11_the_position_advances(device: str, backend: Backend) -> None:
    plan = bc.DynamicWriteSlicePlan(dest_shape=(8,), block_shape=(1,), dtype="float32", advance_axis=0, device=device)
    cache, position = backend.array(np.zeros(8, np.float32)), backend.array(np.zeros(1, np.int32))
    for value in range(1, 5):
        plan.run(dest=cache, source=backend.array(np.array([value], np.float32)), starts=position)
    assert cache.numpy().tolist() == [1, 2, 3, 4, 0, 0, 0, 0]
    assert position.numpy().tolist() == [4]


@pytest.mark.requires("gpu", "torch.cuda")
def test_e11_in_a_captured_graph() -> None:
    """One captured graph appends at a position that moves on the device."""
    torch = support.torch()
    cache = torch.zeros(8, device="cuda")
    value = torch.zeros(1, device="cuda")
    position = torch.zeros(1, dtype=torch.int32, device="cuda")
    plan = bc.DynamicWriteSlicePlan(dest_shape=(8,), block_shape=(1,), dtype="float32", advance_axis=0)
    bound = plan.bind(dest=cache, source=value, starts=position)
    bound.run()
    torch.cuda.synchronize()
    cache.zero_()
    position.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value += 1
        bound.run()
    value.zero_()
    for _ in range(4):
        graph.replay()
    torch.cuda.synchronize()
    assert cache.tolist() == [1, 2, 3, 4, 0, 0, 0, 0]
    assert position.tolist() == [4]


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    ("shape", "before", "block", "starts", "after"),
    [
        ((8,), "10 32 54 76", np.array([-1, -2, -3]), [1], "f0 de 54 76"),
        ((7,), "10 32 54 06", np.array([-4, -5, -6]), [4], "10 32 bc 0a"),
        ((3, 3), "dc fe 10 32 04", np.array([[7], [-8], [7]]), [0, 1], "7c fe 18 72 04"),
    ],
)
@pytest.mark.parametrize("bounds", BOUNDS)
def test_e15_half_bytes(
    device: str, shape: tuple[int, ...], before: str, block: np.ndarray, starts: list[int], after: str, bounds: str
) -> None:
    dest = bc.asarray(np.frombuffer(bytes.fromhex(before), np.uint8), device)
    source = bc.asarray(bc.pack_int4(block), device)
    bc.dynamic_update_slice(
        dest, source, starts, bounds=bounds, dtype="int4", dest_shape=shape, block_shape=block.shape
    )
    assert dest.numpy().tobytes().hex(" ") == after


@pytest.mark.requires("gpu.memory")
def test_e06_an_offset_beyond_int32() -> None:
    """A row whose offset is just past 2^31 elements."""
    torch = support.torch()
    shape, strides = (20973, 6, 128, 128), (102400, 16384, 128, 1)
    state = torch.zeros(20973 * 102400, dtype=torch.float32, device="cuda").as_strided(shape, strides)
    row = torch.ones((1, 6, 128, 128), device="cuda")
    starts = torch.tensor([20972, 0, 0, 0], device="cuda")
    bc.dynamic_update_slice(state, row, starts)
    assert bool((state[20972] == 1).all())
    assert int(torch.count_nonzero(state)) == row.numel()


@pytest.mark.requires("gpu.memory")
def test_e12_complex_beyond_int32() -> None:
    torch = support.torch()
    x = torch.zeros((200, 200, 224, 224), dtype=torch.complex64, device="cuda")
    plane = -torch.arange(224 * 224, device="cuda").to(torch.complex64).reshape(1, 1, 224, 224)
    bc.dynamic_update_slice(x, plane, torch.tensor([53, 99, 0, 0], dtype=torch.int32, device="cuda"))
    assert bool((x[0, 0] == 0).all())
    assert complex(x[53, 99, 0, 1]) == -1
    assert bool((x[53, 99] == plane[0, 0]).all())


# ---------------------------------------------------------------------------------------------------
# The support matrix.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dest_layout", OUTPUT_LAYOUTS)
@pytest.mark.parametrize("source_layout", INPUT_LAYOUTS)
def test_layouts(device: str, dtype: str, dest_layout: str, source_layout: str) -> None:
    rng = np.random.default_rng(1)
    for bounds in BOUNDS:
        for starts in ([1, 0, 1, 1], [-1, 0, 3, -2], [2, 0, -2, 4]):
            dest, source = operands(
                rng, (3, 1, 4, 7), (2, 1, 3, 5), dtype, device,
                dest_layout=dest_layout, dest_misalign=1, source_layout=source_layout,
            )  # fmt: skip
            check(dest, source, starts, device, bounds)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", range(1, 9))
def test_ranks(device: str, dtype: str, rank: int) -> None:
    rng = np.random.default_rng(rank)
    shape, block = (3, 2, 3, 2, 2, 3, 2, 5)[-rank:], (2, 2, 1, 1, 2, 3, 2, 3)[-rank:]
    for bounds in BOUNDS:
        starts = rng.integers(-1, 3, rank)
        check(*operands(rng, shape, block, dtype, device), starts, device, bounds, "int32")


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4", "bfloat16"])
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("batched", [False, True])
def test_hostile_starts(device: str, dtype: str, bounds: str, batched: bool) -> None:
    rng = np.random.default_rng(2)
    for index_dtype in ("int32", "int64"):
        limits = np.iinfo(index_dtype)
        values = [value for value in EXTREMES if limits.min <= value <= limits.max]
        for _ in range(12):
            starts = rng.choice(np.array(values, index_dtype), (3, 3) if batched else 3)
            dest, source = operands(rng, (3, 5, 40), (3, 2, 33), dtype, device, dest_misalign=1)
            check(dest, source, starts, device, bounds, index_dtype)


@pytest.mark.parametrize("dtype", ["float16", "int4", "uint8"])
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("layout", OUTPUT_LAYOUTS)
def test_ragged_batches(device: str, dtype: str, bounds: str, layout: str) -> None:
    rng = np.random.default_rng(3)
    starts = np.zeros((5, 4), np.int32)
    starts[:, 2] = [0, 7, 3, 11, 9]
    starts[:, 0] = [0, 0, 1, 0, -1]
    dest, source = operands(rng, (5, 2, 12, 9), (5, 2, 2, 9), dtype, device, dest_layout=layout)
    check(dest, source, starts, device, bounds, "int32")


@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize("extent", [7, 8])
@pytest.mark.parametrize("batched", [False, True])
def test_half_bytes_at_every_start(device: str, dtype: str, extent: int, batched: bool) -> None:
    rng = np.random.default_rng(4)
    for length in range(1, extent + 1):
        for start in range(-length, extent + 1):
            dest, source = operands(rng, (3, extent), (3, length), dtype, device)
            starts = np.array([[0, start], [0, -start], [0, start + 1]]) if batched else np.array([0, start])
            check(dest, source, starts, device)


@pytest.mark.parametrize("misalign", range(0, 17, 3))
def test_alignments(device: str, misalign: int) -> None:
    rng = np.random.default_rng(5)
    for dtype in ("int8", "int4"):
        for length in (1, 15, 16, 17, 31, 33, 100):
            for start in (0, 1, 2, 5):
                dest, source = operands(
                    rng, (3, length + 3), (2, length), dtype, device, dest_misalign=misalign, source_misalign=start
                )
                check(dest, source, [1, start], device)


@pytest.mark.parametrize("bounds", BOUNDS)
def test_empties(device: str, bounds: str) -> None:
    rng = np.random.default_rng(6)
    check(*operands(rng, (4, 3), (0, 3), "float32", device), [1, 0], device, bounds)
    check(*operands(rng, (0, 3), (0, 2), "float32", device), [1, 0], device, bounds)
    check(*operands(rng, (0, 3), (0, 2), "int4", device), np.zeros((0, 2)), device, bounds)
    if bounds == "drop":
        check(*operands(rng, (0, 3), (2, 2), "float32", device), [0, 0], device)
        check(*operands(rng, (2, 3), (5, 7), "float32", device), [-2, -3], device)


KERNELS = [
    ("runs", "float32", (3, 5, 64), (3, 2, 64), [0, 1, 0], "row_major", False),
    ("runs shifted", "bfloat16", (3, 5, 67), (3, 2, 61), [0, 1, 5], "row_major", False),
    ("runs packed", "int4", (3, 5, 68), (3, 2, 61), [0, 1, 5], "row_major", False),
    ("runs batched", "float16", (3, 5, 64), (3, 2, 64), [[0, 1, 0], [0, -1, 0], [0, 4, 0]], "row_major", True),
    ("elements", "int8", (3, 5, 7), (3, 2, 7), [0, 1, 0], "transposed", False),
    ("elements", "bfloat16", (3, 5, 7), (3, 2, 7), [0, 1, 0], "mixed", False),
    ("elements", "float32", (3, 5, 4), (3, 2, 3), [0, 9, -1], "row_major", False),
    ("elements", "complex64", (3, 5, 7), (3, 2, 7), [0, 1, 0], "stepped", False),
    ("elements", "complex128", (3, 5, 7), (3, 2, 7), [0, 1, 0], "stepped", False),
    ("half bytes", "uint4", (3, 5, 7), (3, 2, 7), [0, 1, 2**31 - 1], "transposed", False),
    ("half bytes", "int4", (3, 5, 7), (3, 2, 5), [[0, 1, 1], [0, -1, 2], [0, 4, -2**31]], "row_major", True),
]  # fmt: skip


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    ("name", "dtype", "dest", "block", "starts", "layout", "batched"),
    KERNELS,
    ids=[f"{row[0]}-{row[1]}-{row[5]}" for row in KERNELS],
)
@pytest.mark.parametrize("bounds", BOUNDS)
def test_each_kernel(
    device: str, name: str, dtype: str, dest: Any, block: Any, starts: Any, layout: str, batched: bool, bounds: str
) -> None:
    rng = np.random.default_rng(7)
    placed = operands(rng, dest, block, dtype, device, dest_layout=layout, dest_misalign=1)
    check(*placed, starts, device, bounds, "int32")


@pytest.mark.parametrize(
    ("dtype", "dest", "block", "layout"),
    [
        ("int8", (1500, 1001), (900, 750), "row_major"),
        ("float32", (700, 600), (500, 500), "transposed"),
        ("int4", (1501, 999), (900, 500), "row_major"),
        ("bfloat16", (8, 16, 600, 64), (8, 16, 32, 64), "row_major"),
    ],
)
def test_large(device: str, dtype: str, dest: Any, block: Any, layout: str) -> None:
    rng = np.random.default_rng(8)
    kind = DTYPES[dtype]
    placed, source = operands(rng, dest, block, dtype, device, dest_layout=layout)
    starts = [int(rng.integers(0, extent - size + 1)) for extent, size in zip(dest, block, strict=True)]
    ranges = tuple((start, start + size) for start, size in zip(starts, block, strict=True))
    expected = placed.numpy().copy()
    expected[tuple(slice(*pair) for pair in ranges)] = source.numpy()
    bc.dynamic_update_slice(
        placed.tensor, source.tensor, bc.asarray(np.array(starts), device), dtype=kind.name,
        dest_shape=dest, block_shape=block,
    )  # fmt: skip
    support.assert_same_bits(placed.numpy(), expected)
    placed.assert_guards()


# ---------------------------------------------------------------------------------------------------
# Properties.


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    rank = draw(st.integers(1, 5))
    largest = (70, 12, 6, 4, 3)[rank - 1]
    shape = draw(st.lists(st.integers(0, largest), min_size=rank, max_size=rank))
    bounds = draw(st.sampled_from(BOUNDS))
    block = [draw(st.integers(0, extent if bounds == "clamp" else extent + 2)) for extent in shape]
    batched = draw(st.booleans())
    if batched:
        block[0] = shape[0]
    index_dtype = draw(st.sampled_from(("int32", "int64")))
    limits = np.iinfo(index_dtype)
    near = st.integers(-4, max(shape, default=0) + 2)
    start = st.one_of(near, near, near, st.sampled_from((int(limits.min), int(limits.max))))
    rows = shape[0] if batched else 1
    starts = np.array([[draw(start) for _ in shape] for _ in range(rows)], index_dtype).reshape(rows, rank)
    if batched and draw(st.booleans()):
        starts[:, 0] = 0
    return {
        "dest": tuple(shape),
        "block": tuple(block),
        "starts": starts if batched else starts[0],
        "bounds": bounds,
        "index_dtype": index_dtype,
        "dtype": draw(st.sampled_from(sorted(DTYPES))),
        "dest_layout": draw(st.sampled_from(OUTPUT_LAYOUTS)),
        "source_layout": draw(st.sampled_from(INPUT_LAYOUTS)),
        "misalign": (draw(st.integers(0, 17)), draw(st.integers(0, 17))),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


@given(problem=problems())
def test_writes_what_the_reference_writes(device: str, problem: dict[str, Any]) -> None:
    rng = np.random.default_rng(problem["seed"])
    dest, source = operands(
        rng, problem["dest"], problem["block"], problem["dtype"], device,
        dest_layout=problem["dest_layout"], dest_misalign=problem["misalign"][0],
        source_layout=problem["source_layout"], source_misalign=problem["misalign"][1],
    )  # fmt: skip
    check(dest, source, problem["starts"], device, problem["bounds"], problem["index_dtype"])


@given(problem=problems())
def test_gradients_are_the_reference_s(device: str, problem: dict[str, Any]) -> None:
    rng = np.random.default_rng(problem["seed"])
    backend = Backend(device)
    dtype = problem["dtype"] if problem["dtype"] not in PACKED else "float32"
    array = support.random_array(rng, problem["dest"], dtype)
    unsigned = f"u{array.dtype.itemsize}" if array.dtype.itemsize <= 8 else None
    grad = backend.input(array, dtype, layout=problem["source_layout"], misalign=problem["misalign"][0])
    layouts = {"layout": problem["dest_layout"], "misalign": problem["misalign"][1]}
    d_dest = backend.output(problem["dest"], dtype, **layouts)
    d_source = backend.output(problem["block"], dtype, **layouts)
    bc.DynamicWriteSliceBackwardPlan(
        dest_shape=problem["dest"], block_shape=problem["block"], dtype=dtype, index_dtype=problem["index_dtype"],
        batched=problem["starts"].ndim == 2, bounds=problem["bounds"], device=device,
    ).run(
        grad=grad.tensor, starts=bc.asarray(problem["starts"], device), d_dest=d_dest.tensor, d_source=d_source.tensor
    )  # fmt: skip
    given_grad = grad.numpy()
    view = given_grad.view(unsigned) if unsigned else given_grad.view(np.void)
    if unsigned is None:
        view = given_grad.view(np.complex128)
    expected = reference.gradients(view, problem["block"], problem["starts"], problem["bounds"] == "clamp")
    for got, want in zip((d_dest, d_source), expected, strict=True):
        support.assert_same_bits(got.numpy().view(want.dtype), want)
        got.assert_guards()
    grad.assert_untouched()


# ---------------------------------------------------------------------------------------------------
# Gradients, advancing, forms, errors, graphs.


GRADIENT_KERNELS = [
    ("float32", (3, 5, 64), (3, 2, 61), [0, 4, 5], "row_major"),
    ("bfloat16", (3, 5, 67), (3, 2, 61), [0, -1, -5], "row_major"),
    ("float64", (3, 5, 7), (3, 2, 7), [0, 4, 0], "transposed"),
    ("float16", (3, 5, 7), (3, 2, 7), [2**31 - 1, 4, 0], "mixed"),
    ("complex128", (3, 5, 7), (3, 2, 7), [0, 4, -(2**31)], "stepped"),
    ("float32", (3, 5, 4), (3, 2, 3), [0, 9, -1], "row_major"),
]


@pytest.mark.sanitizer
@pytest.mark.parametrize(("dtype", "dest", "block", "starts", "layout"), GRADIENT_KERNELS)
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("gradients", ["both", "dest", "source"])
def test_gradient_kernels(
    device: str,
    backend: Backend,
    dtype: str,
    dest: Any,
    block: Any,
    starts: Any,
    layout: str,
    bounds: str,
    gradients: str,
) -> None:
    rng = np.random.default_rng(9)
    values = rng.standard_normal(dest).astype(DTYPES[dtype].numpy)
    grad = backend.input(values, layout=layout, misalign=1)
    outputs = {
        "d_dest": backend.output(dest, dtype, layout=layout),
        "d_source": backend.output(block, dtype, layout=layout, misalign=1),
    }
    if gradients != "both":
        outputs = {f"d_{gradients}": outputs[f"d_{gradients}"]}
    plan = bc.DynamicWriteSliceBackwardPlan(
        dest_shape=dest, block_shape=block, dtype=dtype, bounds=bounds, gradients=gradients, device=device
    )
    starts = np.array(starts, np.int32)
    plan.run(grad=grad.tensor, starts=bc.asarray(starts, device), **{name: out.tensor for name, out in outputs.items()})
    expected = dict(
        zip(("d_dest", "d_source"), reference.gradients(values, block, starts, bounds == "clamp"), strict=True)
    )
    for name, output in outputs.items():
        support.assert_same_bits(output.numpy(), expected[name])
        output.assert_guards()


def test_gradient_in_place(device: str, backend: Backend) -> None:
    values = np.arange(20, dtype=np.float32).reshape(4, 5)
    grad = backend.array(values)
    d_source = backend.output((2, 2), "float32")
    bc.DynamicWriteSliceBackwardPlan(dest_shape=(4, 5), block_shape=(2, 2), dtype="float32", device=device).run(
        grad=grad, starts=backend.array(np.array([1, 4], np.int32)), d_dest=grad, d_source=d_source.tensor
    )
    expected = reference.gradients(values, (2, 2), np.array([1, 4]), False)
    support.assert_same_bits(grad.numpy(), expected[0])
    support.assert_same_bits(d_source.numpy(), expected[1])


@pytest.mark.requires("torch")
@pytest.mark.parametrize("bounds", BOUNDS)
def test_gradients_are_autograd_s(bounds: str) -> None:
    torch = support.torch()
    dest = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    source = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(4, 6, dtype=torch.float64)
    written = dest.clone()
    written[2:4, 1:4] = source
    written.backward(grad)
    d_dest, d_source = bc.dynamic_update_slice_backward(grad, torch.tensor([2, 1]), (2, 3), bounds=bounds)
    assert torch.equal(d_dest, dest.grad)
    assert torch.equal(d_source, source.grad)


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("batched", [False, True])
def test_starts_advance_and_stop_at_the_largest(device: str, backend: Backend, index_dtype: str, batched: bool) -> None:
    highest = int(np.iinfo(index_dtype).max)
    plan = bc.DynamicWriteSlicePlan(
        dest_shape=(3, 9, 2), block_shape=(3, 2, 2), dtype="int16", index_dtype=index_dtype, batched=batched,
        advance_axis=1, device=device,
    )  # fmt: skip
    rows = [[0, 3, 0], [0, highest - 1, 0], [0, -5, 0]]
    starts = np.array(rows if batched else rows[1], index_dtype)
    tensor = backend.array(starts)
    plan.run(
        dest=backend.array(np.zeros((3, 9, 2), np.int16)),
        source=backend.array(np.ones((3, 2, 2), np.int16)),
        starts=tensor,
    )
    expected = [[0, 5, 0], [0, highest, 0], [0, -3, 0]]
    assert tensor.numpy().tolist() == (expected if batched else expected[1])


@pytest.mark.requires("jax")
@pytest.mark.parametrize("start", range(-1, 8))
def test_clamp_is_xla_s(start: int) -> None:
    """After JAX's own wrap of negative starts, which is left out here."""
    jax = support.jax()
    dest, source = np.arange(15.0).reshape(5, 3), -np.ones((2, 2))
    wrapped = max(start, 0)
    expected = jax.lax.dynamic_update_slice(dest, source, (wrapped, 9))
    got = bc.dynamic_update_slice(dest.copy(), source, [start, 9], bounds="clamp")
    np.testing.assert_array_equal(got, np.asarray(expected))


def test_negative_starts_differ_from_jax_on_purpose() -> None:
    """JAX reads -2 as n - 2; data on the device is clamped as it is."""
    got = bc.dynamic_update_slice(np.zeros(5), np.ones(3), [-2], bounds="clamp")
    assert got.tolist() == [1, 1, 1, 0, 0]


def descriptor(**changes: Any) -> dict[str, Any]:
    return {"dest_shape": (4, 5), "block_shape": (2, 2), "dtype": "float32", **changes}


@pytest.mark.parametrize(
    ("fields", "error", "sentence"),
    [
        ({"block_shape": (2,)}, bc.InvalidProblemError, "block_shape: expected 2 extents"),
        ({"block_shape": (5, 2), "bounds": "clamp"}, bc.InvalidProblemError, "block_shape: expected at most"),
        ({"batched": True}, bc.InvalidProblemError, "block_shape: expected the leading extent 4"),
        ({"index_dtype": "int16"}, bc.InvalidProblemError, "index_dtype: expected int32 or int64, got int16"),
        ({"bounds": "wrap"}, bc.InvalidProblemError, "bounds: expected 'drop' or 'clamp'"),
        ({"advance_axis": 2}, bc.InvalidProblemError, "advance_axis: expected -1 or an axis"),
        ({"block_shape": (4, 2), "batched": True, "advance_axis": 0}, bc.InvalidProblemError, "advance_axis"),
        ({"dest_shape": (), "block_shape": ()}, bc.InvalidProblemError, "dest_shape: expected a rank of 1 to 8"),
    ],
)
def test_refused_descriptors(fields: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=f"^DynamicWriteSlicePlan: .*{sentence}"):
        bc.DynamicWriteSlicePlan(**descriptor(**fields), device="cpu")


def test_refused_operands() -> None:
    plan = bc.DynamicWriteSlicePlan(**descriptor(), device="cpu")
    dest, source = np.zeros((4, 5), np.float32), np.ones((2, 2), np.float32)
    with pytest.raises(bc.InvalidProblemError, match="starts: expected shape"):
        plan.run(dest=dest, source=source, starts=np.zeros(3, np.int32))
    with pytest.raises(bc.InvalidProblemError, match=r"dynamic_update_slice: starts: expected integers, got \[0.5\]"):
        bc.dynamic_update_slice(np.zeros(4, np.float32), np.zeros(2, np.float32), [0.5])
    with pytest.raises(bc.InvalidProblemError, match="starts: expected dtype int32, got int64"):
        plan.run(dest=dest, source=source, starts=np.zeros(2, np.int64))
    with pytest.raises(bc.InvalidProblemError, match="dest: shares memory with source"):
        plan.run(dest=dest, source=dest[:2, :2], starts=np.zeros(2, np.int32))
    with pytest.raises(bc.UnsupportedError, match="no kernel for int4"):
        bc.DynamicWriteSliceBackwardPlan(**descriptor(dtype="int4"), device="cpu")
    advancing = bc.DynamicWriteSlicePlan(**descriptor(advance_axis=0), device="cpu")
    starts = np.zeros(2, np.int32)
    starts.setflags(write=False)
    with pytest.raises(bc.InvalidProblemError, match="starts: is read-only"):
        advancing.run(dest=dest, source=source, starts=starts)
    assert not dest.any()


def test_what_a_plan_says(device: str) -> None:
    plan = bc.DynamicWriteSlicePlan(
        dest_shape=(4, 8, 64), block_shape=(4, 1, 64), dtype="bfloat16", batched=True, device=device
    )
    assert [operand.name for operand in plan.operands] == ["dest", "source", "starts"]
    assert plan.operands[2].shape == (4, 3)
    assert plan.workspace_size == 0
    assert plan.path == "runs"
    assert plan.cost.bytes == 2 * 4 * 64 * 2 + 4 * 3 * 4
    assert plan.precision_guarantee.deterministic
    assert plan.precision_guarantee.bit_stable_on_same_hardware
    assert plan.sku.aux_dtype == "int32"


@pytest.mark.requires("gpu", "torch.cuda")
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_graph_of_ragged_appends(dtype: str) -> None:
    """Positions of each sequence's own, advanced by the plan, over many replays."""
    torch = support.torch()
    kind = getattr(torch, dtype)
    batch, length, replays = 5, 40, 30
    cache = torch.zeros((batch, length, 3, 16), dtype=kind, device="cuda")
    token = torch.zeros((batch, 1, 3, 16), dtype=kind, device="cuda")
    first = [0, 3, 9, 35, 20]
    starts = torch.zeros((batch, 4), dtype=torch.int32, device="cuda")
    plan = bc.DynamicWriteSlicePlan(
        dest_shape=tuple(cache.shape), block_shape=tuple(token.shape), dtype=dtype, batched=True, advance_axis=1
    )
    bound = plan.bind(dest=cache, source=token, starts=starts)
    bound.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token += 1
        bound.run()
    cache.zero_()
    token.zero_()
    starts.zero_()
    starts[:, 1] = torch.tensor(first, device="cuda")
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    expected = np.zeros((batch, length), np.float64)
    for entry, start in enumerate(first):
        for step in range(replays):
            if start + step < length:
                expected[entry, start + step] = step + 1
    got = cache.cpu().double().numpy()
    np.testing.assert_array_equal(got, np.broadcast_to(expected[:, :, None, None], got.shape))
    assert starts[:, 1].tolist() == [start + replays for start in first]


@pytest.mark.requires("gpu")
@given(problem=problems())
def test_the_gpu_and_the_cpu_agree(problem: dict[str, Any]) -> None:
    got = []
    for device in ("cpu", "cuda"):
        rng = np.random.default_rng(problem["seed"])
        dest, source = operands(rng, problem["dest"], problem["block"], problem["dtype"], device)
        check(dest, source, problem["starts"], device, problem["bounds"], problem["index_dtype"])
        got.append(dest.memory.now())
    np.testing.assert_array_equal(*got)
