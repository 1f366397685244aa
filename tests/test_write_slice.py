# SPDX-License-Identifier: Apache-2.0
"""WriteSlicePlan against NumPy: bit for bit, and every byte outside the window as it was."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import pytest
import support
from hypothesis import given
from hypothesis import strategies as st
from support import DTYPES, INPUT_LAYOUTS, OUTPUT_LAYOUTS, Placed, StridedView

import baracuda as bc
from reference import layout as reference

Ranges = tuple[tuple[int, int], ...]
PACKED = ("int4", "uint4")


def extent_of(ranges: Ranges) -> tuple[int, ...]:
    return tuple(end - start for start, end in ranges)


def plan_for(dest_shape: tuple[int, ...], ranges: Ranges, dtype: str, device: str, **options: Any) -> bc.WriteSlicePlan:
    return bc.WriteSlicePlan(dest_shape=dest_shape, ranges=ranges, dtype=dtype, device=device, **options)


def expected_bytes(dest: Placed, source: Placed, ranges: Ranges) -> np.ndarray:
    """All the memory of `dest`, as it must be after the run."""
    packed = dest.kind.packed
    width = reference.element_cells(dest.kind.bits)
    cells = []
    views = []
    for operand in (dest, source):
        cells.append(reference.cells_of(operand.memory.before, packed))
        first = operand.offset * 2 if packed else operand.offset
        views.append(reference.view(cells[-1], operand.shape, operand.strides, first, width))
    reference.write_slice(*views, ranges)
    return reference.cells_to_bytes(cells[0], packed)


def check(dest: Placed, source: Placed, ranges: Ranges, device: str, **options: Any) -> bc.WriteSlicePlan:
    expected = expected_bytes(dest, source, ranges)
    plan = plan_for(dest.shape, ranges, dest.kind.name, device, **options)
    plan.run(dest=dest.tensor, source=source.tensor)
    np.testing.assert_array_equal(dest.memory.now(), expected)
    source.memory.assert_untouched()
    return plan


def random_operand(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, device: str, **options: Any) -> Placed:
    return Placed(shape, dtype, device, fill=rng, **options)


# ---------------------------------------------------------------------------------------------------
# The support matrix.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source_layout", INPUT_LAYOUTS)
@pytest.mark.parametrize("dest_layout", OUTPUT_LAYOUTS)
def test_layouts(device: str, dtype: str, dest_layout: str, source_layout: str) -> None:
    rng = np.random.default_rng(1)
    # One axis of extent 1, a window that starts and ends at odd places, odd extents.
    for misaligned in (0, 1):
        dest = random_operand(rng, (3, 1, 4, 7), dtype, device, layout=dest_layout, misalign=3 * misaligned)
        source = random_operand(rng, (2, 1, 3, 5), dtype, device, layout=source_layout, misalign=misaligned)
        check(dest, source, ((1, 3), (0, 1), (0, 3), (1, 6)), device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", range(1, 9))
def test_ranks(device: str, dtype: str, rank: int) -> None:
    rng = np.random.default_rng(rank)
    shape = (3, 2, 3, 2, 2, 3, 2, 5)[-rank:]
    ranges = ((1, 3), (0, 2), (1, 2), (0, 1), (1, 2), (0, 3), (0, 2), (1, 4))[-rank:]
    dest = random_operand(rng, shape, dtype, device)
    check(dest, random_operand(rng, extent_of(ranges), dtype, device), ranges, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("via", ["byte_offset", "pointer"])
def test_null_strides(device: str, dtype: str, via: str) -> None:
    rng = np.random.default_rng(2)
    ranges = ((1, 2), (0, 3), (1, 4))
    dest = random_operand(rng, (2, 3, 5), dtype, device, misalign=1)
    source = random_operand(rng, (1, 3, 3), dtype, device, misalign=2)
    expected = expected_bytes(dest, source, ranges)
    plan_for(dest.shape, ranges, dtype, device).run(
        dest=dest.memory.view(dtype, dest.shape, None, dest.offset, via=via),
        source=source.memory.view(dtype, source.shape, None, source.offset, via=via),
    )
    np.testing.assert_array_equal(dest.memory.now(), expected)


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name not in PACKED])
@pytest.mark.parametrize("layout", INPUT_LAYOUTS)
def test_numpy_views(dtype: str, layout: str) -> None:
    rng = np.random.default_rng(3)
    for dest_layout in OUTPUT_LAYOUTS:
        dest = random_operand(rng, (3, 1, 4, 7), dtype, "cpu", layout=dest_layout, via="numpy", misalign=1)
        source = random_operand(rng, (2, 1, 3, 5), dtype, "cpu", layout=layout, via="numpy")
        check(dest, source, ((1, 3), (0, 1), (0, 3), (1, 6)), "cpu")


@pytest.mark.parametrize("dest_misaligned", range(17))
@pytest.mark.parametrize("source_misaligned", [0, 1, 7, 16])
def test_alignments_against_each_other(device: str, dest_misaligned: int, source_misaligned: int) -> None:
    """Every way that sixteen bytes can straddle: heads, tails, runs shorter than one access."""
    rng = np.random.default_rng(4)
    for dtype in ("int8", "int4"):
        for length in (1, 2, 15, 16, 17, 31, 33, 100):
            ranges = ((0, 3), (1, 1 + length))
            dest = random_operand(rng, (3, length + 3), dtype, device, misalign=dest_misaligned)
            source = random_operand(rng, (3, length), dtype, device, misalign=source_misaligned)
            check(dest, source, ranges, device)


@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize("extent", [7, 8])
def test_half_bytes_at_every_place(device: str, dtype: str, extent: int) -> None:
    rng = np.random.default_rng(5)
    for start in range(extent + 1):
        for end in range(start, extent + 1):
            for rows in (((0, 3)), ((1, 2))):
                ranges = (rows, (start, end))
                dest = random_operand(rng, (3, extent), dtype, device)
                source = random_operand(rng, extent_of(ranges), dtype, device)
                check(dest, source, ranges, device)


@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize("form", ["flat", "long", "halved", "dlpack"])
def test_forms_of_packed_operands(device: str, dtype: str, form: str) -> None:
    """As bytes, flat (of the exact size or longer) or with the last axis halved; as DLPack's half bytes."""
    rng = np.random.default_rng(6)
    dest_shape, ranges = (3, 6), ((1, 3), (1, 5))
    data = {"dest": rng.integers(0, 256, 9, np.uint8), "source": rng.integers(0, 256, 4, np.uint8)}
    if form == "long":
        data = {name: np.append(bytes_, rng.integers(0, 256, 5, np.uint8)) for name, bytes_ in data.items()}
    values = reference.unpack(data["dest"], dest_shape, dtype == "int4")
    values[1:3, 1:5] = reference.unpack(data["source"], (2, 4), dtype == "int4")
    shapes = {"dest": dest_shape, "source": (2, 4)}
    operands: dict[str, Any] = {name: bc.asarray(bytes_, device) for name, bytes_ in data.items()}
    given = operands
    if form == "halved":
        given = {name: StridedView(operands[name], "uint8", (n, m // 2)) for name, (n, m) in shapes.items()}
    if form == "dlpack":
        given = {name: StridedView(operands[name], dtype, shapes[name]) for name in shapes}
    plan_for(dest_shape, ranges, dtype, device).run(**given)
    now = operands["dest"].numpy()
    np.testing.assert_array_equal(now[:9], reference.pack(values))
    np.testing.assert_array_equal(now[9:], data["dest"][9:])


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        ("float16", (0x7C01, 0xFDFF, 0x7E00, 0x8000)),
        ("bfloat16", (0x7F81, 0xFFBF, 0x7FC0, 0x8000)),
        ("float32", (0x7F800001, 0xFFA12345, 0x7FC00000, 0x80000000)),
        ("float64", (0x7FF0000000000001, 0xFFF7123456789ABC, 0x7FF8000000000000, 0x8000000000000000)),
        ("float8_e4m3fn", (0x7F, 0xFF, 0x80, 0x01)),
        ("float8_e5m2", (0x7D, 0xFE, 0x7F, 0x80)),
    ],
)
def test_payloads_of_nans_arrive(device: str, dtype: str, bits: tuple[int, ...]) -> None:
    """Signalling ones, too, and the sign of zero."""
    kind = DTYPES[dtype]
    source = np.array(bits, f"uint{kind.bits}").view(kind.numpy)
    for layout in ("row_major", "stepped"):
        dest = support.Backend(device).output((6,), dtype, layout=layout)
        plan_for((6,), ((1, 5),), dtype, device).run(dest=dest.tensor, source=bc.asarray(source, device))
        assert dest.numpy()[1:5].view(f"uint{kind.bits}").tolist() == list(bits)
        dest.assert_guards()


# What reaches which kernel: name, dtype, dest shape and layout, source layout, ranges, misalignments.
KERNELS = [
    ("runs aligned", "float32", (5, 64), "row_major", "row_major", ((1, 4), (0, 32)), (0, 0)),
    ("runs aligned", "bfloat16", (5, 64), "row_major", "row_major", ((1, 4), (8, 56)), (0, 0)),
    ("runs shifted", "float32", (5, 67), "row_major", "row_major", ((1, 4), (1, 60)), (1, 2)),
    ("runs shifted", "bfloat16", (5, 67), "row_major", "row_major", ((1, 4), (3, 66)), (1, 4)),
    ("runs in one chunk", "float32", (7, 33), "row_major", "row_major", ((2, 6), (0, 33)), (3, 0)),
    ("runs in one chunk", "float16", (7, 33), "row_major", "row_major", ((2, 6), (0, 33)), (5, 1)),
    ("runs from one row", "float32", (9, 40), "row_major", "broadcast", ((0, 9), (1, 39)), (0, 1)),
    ("runs packed", "int4", (5, 67), "row_major", "row_major", ((1, 4), (1, 66)), (1, 2)),
    ("runs packed", "uint4", (4, 64), "row_major", "row_major", ((0, 4), (0, 64)), (0, 0)),
    ("elements of 1", "int8", (9, 7), "stepped", "row_major", ((0, 9), (1, 7)), (1, 0)),
    ("elements of 2", "bfloat16", (9, 7), "stepped", "row_major", ((0, 9), (1, 7)), (1, 0)),
    ("elements of 4", "float32", (9, 7), "negative", "stepped", ((0, 9), (1, 7)), (1, 0)),
    ("elements of 8", "complex64", (9, 7), "stepped", "mixed", ((0, 9), (1, 7)), (2, 0)),
    ("elements of 16", "complex128", (9, 7), "stepped", "mixed", ((0, 9), (1, 7)), (0, 0)),
    ("elements in words", "complex128", (9, 7), "stepped", "mixed", ((0, 9), (1, 7)), (1, 0)),
    ("tiles of 1", "int8", (35, 43), "row_major", "transposed", ((0, 33), (1, 42)), (1, 0)),
    ("tiles of 2", "bfloat16", (35, 43), "row_major", "transposed", ((0, 33), (1, 42)), (1, 3)),
    ("tiles of 4", "float32", (35, 43), "transposed", "row_major", ((0, 33), (1, 42)), (1, 3)),
    ("tiles of 8", "float64", (35, 43), "row_major", "transposed", ((0, 33), (1, 42)), (1, 3)),
    ("tiles of 16", "complex128", (35, 43), "row_major", "transposed", ((0, 33), (1, 42)), (0, 2)),
    ("tiles of planes", "float32", (3, 35, 43), "row_major", "transposed", ((0, 3), (1, 34), (0, 43)), (0, 0)),
    ("tiles of planes", "float16", (3, 9, 70), "channels_last", "row_major", ((0, 3), (0, 9), (1, 69)), (0, 0)),
    ("half bytes", "int4", (9, 7), "transposed", "row_major", ((0, 9), (1, 6)), (1, 0)),
    ("half bytes in runs", "int4", (9, 7), "row_major", "padded_rows", ((0, 9), (0, 7)), (0, 1)),
    ("half bytes in runs", "uint4", (3, 9, 5), "row_major", "padded_rows", ((1, 3), (0, 9), (0, 5)), (1, 0)),
    ("half bytes", "uint4", (5, 7, 3), "mixed", "transposed", ((0, 5), (1, 6), (0, 3)), (0, 3)),
]  # fmt: skip


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    ("name", "dtype", "shape", "dest_layout", "source_layout", "ranges", "misalign"),
    KERNELS,
    ids=[f"{row[0]}-{row[1]}-{row[3]}" for row in KERNELS],
)
def test_each_kernel(
    device: str,
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    dest_layout: str,
    source_layout: str,
    ranges: Ranges,
    misalign: tuple[int, int],
) -> None:
    rng = np.random.default_rng(7)
    dest = random_operand(rng, shape, dtype, device, layout=dest_layout, misalign=misalign[0])
    source = random_operand(rng, extent_of(ranges), dtype, device, layout=source_layout, misalign=misalign[1])
    check(dest, source, ranges, device)


@pytest.mark.parametrize(
    ("dtype", "shape", "ranges", "dest_layout", "source_layout"),
    [
        ("int8", (3000, 1001), ((1, 2999), (3, 1000)), "row_major", "row_major"),
        ("float32", (1300, 1100), ((0, 1300), (1, 1099)), "row_major", "transposed"),
        ("bfloat16", (7, 600, 513), ((0, 7), (1, 599), (0, 512)), "channels_last", "row_major"),
        ("int4", (3001, 999), ((0, 3001), (0, 998)), "row_major", "row_major"),
        ("int4", (3001, 999), ((0, 3001), (0, 999)), "row_major", "padded_rows"),
        ("uint4", (3001, 999), ((1, 3000), (0, 999)), "transposed", "row_major"),
        ("int4", (1, 4_000_003), ((0, 1), (1, 4_000_002)), "row_major", "row_major"),
        ("complex128", (513, 257), ((0, 512), (1, 257)), "mixed", "stepped"),
    ],
)
def test_large(
    device: str, dtype: str, shape: tuple[int, ...], ranges: Ranges, dest_layout: str, source_layout: str
) -> None:
    """Enough for several threads on the CPU and many blocks on a GPU; rows that nearly touch."""
    rng = np.random.default_rng(8)
    dest = random_operand(rng, shape, dtype, device, layout=dest_layout, misalign=1)
    source = random_operand(rng, extent_of(ranges), dtype, device, layout=source_layout)
    check(dest, source, ranges, device)


# ---------------------------------------------------------------------------------------------------
# Properties.


@st.composite
def strides_for(draw: st.DrawFn, shape: tuple[int, ...], *, written: bool) -> tuple[int, ...]:
    """Strides of a view whose elements don't overlap; of a source also zeros."""
    rank = len(shape)
    order = draw(st.permutations(range(rank)))
    steps = draw(st.lists(st.sampled_from((1, 1, 1, 2, 3)), min_size=rank, max_size=rank))
    strides = list(support.ordered(shape, order, steps))
    signs = draw(st.lists(st.sampled_from((1, 1, -1) if written else (1, 1, -1, 0)), min_size=rank, max_size=rank))
    return tuple(sign * stride for sign, stride in zip(signs, strides, strict=True))


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    rank = draw(st.integers(1, 8))
    largest = (70, 20, 8, 5, 4, 3, 3, 2)[rank - 1]
    shape = tuple(draw(st.lists(st.integers(0, largest), min_size=rank, max_size=rank)))
    ranges = []
    for extent in shape:
        start = draw(st.integers(0, extent))
        ranges.append((start, draw(st.integers(start, extent))))
    row_major = draw(st.sampled_from((True, False, False)))
    extent = extent_of(tuple(ranges))
    return {
        "shape": shape,
        "ranges": tuple(ranges),
        "dtype": draw(st.sampled_from(sorted(DTYPES))),
        "dest_strides": support.row_major(shape) if row_major else draw(strides_for(shape, written=True)),
        "source_strides": support.row_major(extent) if row_major else draw(strides_for(extent, written=False)),
        "misalign": (draw(st.integers(0, 17)), draw(st.integers(0, 17))),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


@given(problem=problems(), data=st.data())
def test_writes_what_numpy_writes(device: str, problem: dict[str, Any], data: st.DataObject) -> None:
    rng = np.random.default_rng(problem["seed"])
    ways = ["byte_offset", "pointer"]
    if device == "cpu" and problem["dtype"] not in PACKED:
        ways.append("numpy")
    operands = [
        random_operand(
            rng,
            shape,
            problem["dtype"],
            device,
            strides=strides,
            misalign=misalign,
            via=data.draw(st.sampled_from(ways)),
        )
        for shape, strides, misalign in zip(
            (problem["shape"], extent_of(problem["ranges"])),
            (problem["dest_strides"], problem["source_strides"]),
            problem["misalign"],
            strict=True,
        )
    ]
    check(*operands, problem["ranges"], device)


def places(shape: tuple[int, ...], strides: tuple[int, ...], first: int, width: int) -> np.ndarray:
    """The cells that each element of a view takes, by counting."""
    at = np.full((), first, np.int64)
    for extent, stride in zip(shape, strides, strict=True):
        at = at[..., None] + np.arange(extent) * stride * width
    return (at[..., None] + np.arange(width)).reshape(-1, width)


@st.composite
def overlapping(draw: st.DrawFn) -> dict[str, Any]:
    """A destination and a source in one memory, mostly such that some element of both is the same."""
    dtype = draw(st.sampled_from(("int4", "uint4", "int8", "bfloat16", "float32", "complex64")))
    rank = draw(st.integers(1, 3))
    shape = tuple(draw(st.lists(st.integers(1, 7 - rank), min_size=rank, max_size=rank)))
    ranges = []
    for extent in shape:
        start = draw(st.integers(0, extent // 3))
        ranges.append((start, extent - draw(st.integers(0, (extent - start) // 3))))
    strides = draw(strides_for(shape, written=True))
    if draw(st.booleans()):
        # The same steps: then the source may also be the window itself, or lie in its gaps.
        source_strides = strides
    else:
        steps = st.integers(-6, 6)
        source_strides = tuple(draw(st.lists(steps, min_size=rank, max_size=rank)))
    kind = DTYPES[dtype]
    if draw(st.sampled_from((True, True, True, False))):
        written = [draw(st.integers(start, end - 1)) for start, end in ranges]
        read = [draw(st.integers(0, end - start - 1)) for start, end in ranges]
        apart = sum(at * stride for at, stride in zip(written, strides, strict=True))
        apart -= sum(at * stride for at, stride in zip(read, source_strides, strict=True))
        distance = apart * kind.bits // 8 // kind.alignment
    else:
        distance = draw(st.integers(-12, 12))
    return {
        "dtype": dtype,
        "shape": shape,
        "ranges": tuple(ranges),
        "strides": (strides, source_strides),
        # Between the first elements, in alignments of the dtype.
        "distance": distance,
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


def overlap_views(problem: dict[str, Any], device: str) -> tuple[support.Memory, list[Any], list[int]]:
    """The memory, the two operands in it, and the bytes at which they begin."""
    kind = DTYPES[problem["dtype"]]
    shapes = (problem["shape"], extent_of(problem["ranges"]))
    spans = [support.span(shape, strides) for shape, strides in zip(shapes, problem["strides"], strict=True)]
    lowest = (max(-low for low, _ in spans) + 1) * max(kind.bits, 8) // 8
    lowest += (abs(problem["distance"]) + 1) * kind.alignment
    lowest += -lowest % 16
    starts = [lowest, lowest + problem["distance"] * kind.alignment]
    size = max(start + high * max(kind.bits, 8) // 8 for start, (_, high) in zip(starts, spans, strict=True)) + 64
    memory = support.Memory(np.random.default_rng(problem["seed"]).integers(0, 256, size, np.uint8), device)
    operands = [
        memory.view(problem["dtype"], shape, strides, start)
        for shape, strides, start in zip(shapes, problem["strides"], starts, strict=True)
    ]
    return memory, operands, starts


def overlap_expected(
    problem: dict[str, Any], memory: support.Memory, starts: list[int]
) -> tuple[np.ndarray, bool, bool]:
    """The memory as NumPy leaves it; whether window and source share cells; whether they are the same."""
    kind = DTYPES[problem["dtype"]]
    width = reference.element_cells(kind.bits)
    cells = reference.cells_of(memory.before, kind.packed)
    firsts = [start * 2 if kind.packed else start for start in starts]
    shapes = (problem["shape"], extent_of(problem["ranges"]))
    dest, source = (
        reference.view(cells, shape, strides, first, width)
        for shape, strides, first in zip(shapes, problem["strides"], firsts, strict=True)
    )
    corner = sum(start * stride for (start, _), stride in zip(problem["ranges"], problem["strides"][0], strict=True))
    written = places(shapes[1], problem["strides"][0], firsts[0] + corner * width, width)
    read = places(shapes[1], problem["strides"][1], firsts[1], width)
    shared = bool(np.intersect1d(written, read).size)
    window = dest[tuple(slice(start, end) for start, end in problem["ranges"])]
    # NumPy's own exact answer about the same two views is the second witness.
    assert np.shares_memory(window, source, max_work=-1) == shared
    reference.write_slice(dest, source.copy(), problem["ranges"])
    return reference.cells_to_bytes(cells, kind.packed), shared, bool(np.array_equal(written, read))


@given(problem=overlapping())
def test_overlap_is_refused_exactly_where_there_is_one(device: str, problem: dict[str, Any]) -> None:
    memory, (dest, source), starts = overlap_views(problem, device)
    expected, shared, same = overlap_expected(problem, memory, starts)
    plan = plan_for(problem["shape"], problem["ranges"], problem["dtype"], device)
    if shared and not same:
        with pytest.raises(bc.InvalidProblemError, match=r"^WriteSlicePlan: dest: shares memory with source$"):
            plan.run(dest=dest, source=source)
        memory.assert_untouched()
    else:
        plan.run(dest=dest, source=source)
        np.testing.assert_array_equal(memory.now(), expected)


@given(problem=overlapping())
def test_staged_overlap_gives_what_numpy_gives(device: str, problem: dict[str, Any]) -> None:
    memory, (dest, source), starts = overlap_views(problem, device)
    expected, _, _ = overlap_expected(problem, memory, starts)
    plan = plan_for(problem["shape"], problem["ranges"], problem["dtype"], device, overlap="stage")
    plan.run(dest=dest, source=source)
    np.testing.assert_array_equal(memory.now(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_window_itself_is_a_fine_source(device: str, dtype: str) -> None:
    rng = np.random.default_rng(9)
    for layout in OUTPUT_LAYOUTS:
        dest = random_operand(rng, (4, 1, 6), dtype, device, layout=layout)
        bits = dest.kind.bits
        start = dest.offset + (dest.strides[0] + 2 * dest.strides[2]) * bits // 8
        if (dest.strides[0] + 2 * dest.strides[2]) * bits % 8:
            continue  # a pointer can't point there
        # The stride of an axis of one entry says nothing.
        source = dest.memory.view(dtype, (2, 1, 3), (dest.strides[0], 99, dest.strides[2]), start)
        plan_for((4, 1, 6), ((1, 3), (0, 1), (2, 5)), dtype, device).run(dest=dest.tensor, source=source)
        dest.memory.assert_untouched()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4"])
def test_interleaved_views_share_nothing(device: str, dtype: str) -> None:
    rng = np.random.default_rng(10)
    kind = DTYPES[dtype]
    memory = support.Memory(rng.integers(0, 256, 32 * kind.bits // 8, np.uint8), device)
    # Every fourth element, from the first and from the third.
    dest = memory.view(dtype, (8,), (4,), 0)
    source = memory.view(dtype, (8,), (4,), 2 * kind.bits // 8)
    plan_for((8,), ((0, 8),), dtype, device).run(dest=dest, source=source)
    cells = reference.cells_of(memory.before, kind.packed)
    width = reference.element_cells(kind.bits)
    elements = cells[: 32 * width].reshape(32, width)
    elements[0::4] = elements[2::4]
    np.testing.assert_array_equal(memory.now(), reference.cells_to_bytes(cells, kind.packed))


# ---------------------------------------------------------------------------------------------------
# Empty windows, paths, preferences.


@pytest.mark.parametrize(
    ("shape", "ranges"),
    [
        ((4,), ((2, 2),)),
        ((4,), ((4, 4),)),
        ((0,), ((0, 0),)),
        ((3, 4), ((0, 3), (1, 1))),
        ((3, 0), ((0, 3), (0, 0))),
        ((0, 4), ((0, 0), (1, 3))),
        ((2, 0, 3), ((1, 1), (0, 0), (0, 3))),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_empty_windows(device: str, dtype: str, shape: tuple[int, ...], ranges: Ranges) -> None:
    rng = np.random.default_rng(11)
    dest = random_operand(rng, shape, dtype, device)
    source = random_operand(rng, extent_of(ranges), dtype, device)
    for overlap in ("refuse", "stage"):
        plan = check(dest, source, ranges, device, overlap=overlap)
        assert plan.path == "empty"
        assert plan.cost == bc.PlanCost(bytes=0, operations=0)
        assert plan.workspace_size == 0
    # What has no elements needs no memory.
    device_pair = (support.CPU, 0) if device == "cpu" else (support.CUDA, 0)
    plan.run(dest=dest.tensor, source=StridedView(0, dtype, extent_of(ranges), device=device_pair))
    dest.memory.assert_untouched()


@pytest.mark.parametrize(
    ("shape", "ranges", "path"),
    [
        ((4,), ((0, 4),), "whole"),
        ((3, 4), ((0, 3), (0, 4)), "whole"),
        ((1, 4), ((0, 1), (0, 4)), "whole"),
        ((4,), ((1, 3),), "chunk"),
        ((3, 4), ((1, 3), (0, 4)), "chunk"),
        ((3, 4), ((1, 2), (1, 3)), "chunk"),
        ((3, 4, 5), ((1, 2), (2, 4), (0, 5)), "chunk"),
        ((3, 1, 5), ((0, 2), (0, 1), (0, 5)), "chunk"),
        ((3, 4), ((0, 3), (1, 3)), "rows"),
        ((3, 4, 5), ((0, 2), (2, 4), (0, 5)), "rows"),
        ((3, 4, 5), ((0, 1), (2, 4), (1, 5)), "rows"),
        ((3, 4), ((1, 1), (0, 4)), "empty"),
        ((0, 4), ((0, 0), (0, 4)), "empty"),
    ],
)
def test_path(device: str, shape: tuple[int, ...], ranges: Ranges, path: str) -> None:
    rng = np.random.default_rng(12)
    for dtype in ("bfloat16", "uint4"):
        dest = random_operand(rng, shape, dtype, device)
        assert check(dest, random_operand(rng, extent_of(ranges), dtype, device), ranges, device).path == path


def test_preferences_are_obeyed_or_refused(device: str) -> None:
    problem = {"dest_shape": (3, 4), "ranges": ((0, 3), (1, 3)), "dtype": "float32", "device": device}
    backend = "bespoke" if device == "cuda" else "cpu"
    other = "cpu" if device == "cuda" else "bespoke"
    prefer = bc.PlanPreference
    for allowed in (
        prefer(),
        prefer(deterministic=False),
        prefer(backend=backend),
        prefer(max_workspace=0),
    ):
        plan = bc.WriteSlicePlan(**problem, preference=allowed)
        assert plan.preference == allowed
        assert plan.sku.backend == backend
        assert plan.precision_guarantee.deterministic
    with pytest.raises(bc.UnsupportedError) as refused:
        bc.WriteSlicePlan(**problem, preference=prefer(backend=other))
    assert str(refused.value) == (f'WriteSlicePlan: backend "{other}" was asked for, this problem has "{backend}"')

    staged = bc.WriteSlicePlan(**problem, overlap="stage")
    assert staged.workspace_size >= 3 * 2 * 4
    limit = prefer(max_workspace=staged.workspace_size)
    assert bc.WriteSlicePlan(**problem, overlap="stage", preference=limit).workspace_size == staged.workspace_size
    with pytest.raises(bc.UnsupportedError) as refused:
        bc.WriteSlicePlan(**problem, overlap="stage", preference=prefer(max_workspace=staged.workspace_size - 1))
    assert str(refused.value) == (
        f"WriteSlicePlan: needs a workspace of {staged.workspace_size} bytes, "
        f"max_workspace is {staged.workspace_size - 1}"
    )


# ---------------------------------------------------------------------------------------------------
# The function form.

SLICES = {
    "all": np.s_[:],
    "ellipsis": np.s_[...],
    "first axis": np.s_[1:3],
    "last axis": np.s_[..., 1:4],
    "middle": np.s_[:, 1:2],
    "around": np.s_[1:2, ..., 2:],
    "every axis": np.s_[0:2, 1:3, 2:5],
    "every axis and none": np.s_[0:2, ..., 1:3, 2:5],
    "negative": np.s_[-2:, :-1, -3:-1],
    "outside": np.s_[1:99, -99:2, 3:7],
    "backwards": np.s_[2:1, 0:1],
    "step of one": np.s_[0:3:1, ::1],
    "NumPy's integers": np.s_[np.int32(1) : np.int64(3)],
}


@pytest.mark.parametrize("slices", SLICES.values(), ids=SLICES.keys())
def test_slices_mean_what_numpy_means(backend: support.Backend, slices: Any) -> None:
    rng = np.random.default_rng(13)
    expected = rng.standard_normal((3, 4, 5)).astype(np.float32)
    dest = backend.array(expected)
    source = rng.standard_normal(expected[slices].shape).astype(np.float32)
    expected[slices] = source
    assert bc.write_slice(dest, backend.array(source), slices) is dest
    support.assert_same_bits(backend.read(dest), expected)


@pytest.mark.parametrize(
    "ranges",
    [((1, 3), (0, 2)), [[1, 3], [0, 2]], ((1, 3), np.s_[:2]), (np.array([1, 3]), (0, 2)), (np.s_[1:], (0, 2))],
    ids=["pairs", "lists", "pair and slice", "array and pair", "slice and pair"],
)
def test_ranges_are_pairs_or_slices(backend: support.Backend, ranges: Any) -> None:
    expected = np.zeros((3, 4), np.int16)
    dest = backend.array(expected)
    expected[1:3, 0:2] = 7
    bc.write_slice(dest, backend.array(np.full((2, 2), 7, np.int16)), ranges)
    support.assert_same_bits(backend.read(dest), expected)


@pytest.mark.parametrize("ranges", [(1, 3), [1, 3], ((1, 3),), np.s_[1:3], (np.int64(1), np.int64(3))])
def test_one_range_for_one_axis(backend: support.Backend, ranges: Any) -> None:
    dest = backend.array(np.zeros(4, np.int8))
    bc.write_slice(dest, backend.array(np.ones(2, np.int8)), ranges)
    assert backend.read(dest).tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        (np.s_[::2], "write_slice: ranges: expected no step on axis 0, got 2"),
        (np.s_[:, ::-1], "write_slice: ranges: expected no step on axis 1, got -1"),
        (np.s_[1, :], "write_slice: ranges: expected (start, end) or a slice on axis 0, got 1"),
        (((0, 1, 2), (0, 1)), "write_slice: ranges: expected (start, end) or a slice on axis 0, got (0, 1, 2)"),
        (np.s_[:, :, :], "write_slice: ranges: expected at most 2, got 3"),
        (np.s_[..., ...], "write_slice: ranges: expected (start, end) or a slice on axis 1, got Ellipsis"),
        (((0, 5), (0, 1)), "WriteSlicePlan: ranges: expected 0 <= start <= end <= 3 on axis 0, got (0, 5)"),
        (((-1, 1), (0, 1)), "WriteSlicePlan: ranges: expected 0 <= start <= end <= 3 on axis 0, got (-1, 1)"),
    ],
)
def test_ranges_that_are_refused(backend: support.Backend, ranges: Any, message: str) -> None:
    dest = backend.memory(np.arange(12))
    with pytest.raises(bc.InvalidProblemError) as refused:
        bc.write_slice(dest.view("uint8", (3, 4), None), backend.array(np.zeros((1, 1), np.uint8)), ranges)
    assert str(refused.value) == message
    dest.assert_untouched()


def test_function_form_of_packed_bytes(backend: support.Backend) -> None:
    dest = backend.array(bc.pack_int4(np.zeros((3, 3), np.int8)))
    source = backend.array(bc.pack_int4([1, -2, 3]))
    bc.write_slice(dest, source, np.s_[:, 1:2], dtype="int4", dest_shape=(3, 3))
    assert bc.unpack_int4(backend.read(dest), (3, 3)).tolist() == [[0, 1, 0], [0, -2, 0], [0, 3, 0]]


@pytest.mark.sanitizer
def test_function_form_stages_overlap(backend: support.Backend) -> None:
    dest = backend.memory(np.arange(8))
    view = dest.view("uint8", (8,), None)
    bc.write_slice(view, dest.view("uint8", (6,), None), np.s_[2:], overlap="stage")
    assert dest.now().tolist() == [0, 1, 0, 1, 2, 3, 4, 5]


# ---------------------------------------------------------------------------------------------------
# Cases from public bug reports.


def zeros_past_2_31(nbytes: int) -> np.ndarray:
    """Bytes of which only those that are touched take memory."""
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)


def surroundings(memory: np.ndarray, start: int, end: int) -> None:
    """Bytes around [start, end), and where 32-bit offsets would have put them, are zero."""
    margin = 4096
    assert not memory[max(0, start - margin) : start].any()
    assert not memory[end : end + margin].any()
    for wrap in (31, 32, 33):
        low = start % 2**wrap
        if low + margin < start:
            assert not memory[low : min(low + end - start, start)].any()
    assert not memory[:margin].any()


def test_case_E06_block_of_a_large_cache_on_the_cpu() -> None:
    shape = (64000, 32, 16, 16, 8)
    memory = zeros_past_2_31(math.prod(shape) * 2)
    cache = memory.view(np.float16).reshape(shape)
    source = np.arange(1, 1 + 32 * 16 * 8, dtype=np.float16).reshape(1, 32, 16, 1, 8)
    bc.write_slice(cache, source, np.s_[63999:, :, :, 5:6])
    np.testing.assert_array_equal(cache[63999:, :, :, 5:6], source)
    assert not cache[63999, :, :, :5].any()
    assert not cache[63999, :, :, 6:].any()
    surroundings(memory, cache[:63999].nbytes, memory.size)


def test_case_E06_row_of_a_padded_state_on_the_cpu() -> None:
    memory = zeros_past_2_31((20972 * 102400 + 6 * 128 * 128) * 4)
    flat = memory.view(np.float32)
    state = np.lib.stride_tricks.as_strided(flat, (20973, 6, 128, 128), (409600, 65536, 512, 4))
    row = np.arange(1, 1 + 6 * 128 * 128, dtype=np.float32).reshape(1, 6, 128, 128)
    bc.write_slice(state, row, np.s_[20972:])
    assert 20972 * 102400 == 2_147_532_800
    np.testing.assert_array_equal(flat[2_147_532_800:], row.ravel())
    surroundings(memory, 2_147_532_800 * 4, memory.size)


def test_case_E12_copy_past_2_31_on_the_cpu() -> None:
    shape = (200, 200, 224, 224)
    memory = zeros_past_2_31(math.prod(shape) * 8)
    x = memory.view(np.complex64).reshape(shape)
    source = -np.arange(224 * 224).astype(np.complex64).reshape(1, 1, 224, 224)
    bc.write_slice(x, source, np.s_[53:54, 99:100])
    assert x[53, 99, 0, 1] == -1
    np.testing.assert_array_equal(x[53, 99], source[0, 0])
    start = x[:53].nbytes + x[53, :99].nbytes
    surroundings(memory, start, start + source.nbytes)


@pytest.mark.parametrize("dtype", PACKED)
def test_half_bytes_past_2_32_on_the_cpu(dtype: str) -> None:
    memory = zeros_past_2_31(2**32 + 4096)
    elements = 2 * memory.size
    source = np.array([0x21, 0x43, 0x05], np.uint8)
    start = 2**33 + 1001
    bc.write_slice(memory, source, (start, start + 5), dtype=dtype, dest_shape=(elements,))
    assert memory[start // 2 - 1 : start // 2 + 4].tolist() == [0, 0x10, 0x32, 0x54, 0]
    surroundings(memory, start // 2, start // 2 + 3)


def test_case_E15_half_bytes_keep_their_neighbours(backend: support.Backend) -> None:
    def hex_after(dest: list[int], shape: tuple[int, ...], source: list[int], ranges: Ranges) -> str:
        target = backend.array(bc.pack_int4(dest))
        plan = plan_for(shape, ranges, "int4", backend.device)
        plan.run(dest=target, source=backend.array(bc.pack_int4(source)))
        return backend.read(target).tobytes().hex(" ")

    assert bc.pack_int4(range(8)).tobytes().hex(" ") == "10 32 54 76"
    assert hex_after(list(range(8)), (8,), [-1, -2, -3], ((1, 4),)) == "f0 de 54 76"
    assert hex_after(list(range(7)), (7,), [-4, -5, -6], ((4, 7),)) == "10 32 bc 0a"
    square = [-4, -3, -2, -1, 0, 1, 2, 3, 4]
    assert bc.pack_int4(square).tobytes().hex(" ") == "dc fe 10 32 04"
    assert hex_after(square, (3, 3), [7, -8, 7], ((0, 3), (1, 2))) == "7c fe 18 72 04"


def test_case_E16_no_conversion_on_write(backend: support.Backend) -> None:
    """bfloat16 into a float8 cache would have to be scaled and rounded; a copy of bits is refused."""
    values = np.array([448, 449, 1e4, -0.0, np.nan], DTYPES["bfloat16"].numpy)
    cache = backend.output((5,), "float8_e4m3fn")
    with pytest.raises(bc.InvalidProblemError) as refused:
        plan_for((5,), ((0, 5),), "float8_e4m3fn", backend.device).run(dest=cache.tensor, source=backend.array(values))
    assert str(refused.value) == "WriteSlicePlan: source: expected dtype float8_e4m3fn, got bfloat16"
    cache.assert_untouched()


@pytest.mark.parametrize("dtype", PACKED)
def test_case_E17_half_bytes_go_where_bytes_go(backend: support.Backend, dtype: str) -> None:
    signed = dtype == "int4"

    def after(dest: Any, source: Any, ranges: Ranges) -> list[Any]:
        dest, source = np.array(dest), np.array(source)
        target = backend.array(reference.pack(dest))
        plan_for(dest.shape, ranges, dtype, backend.device).run(
            dest=target, source=backend.array(reference.pack(source))
        )
        return reference.unpack(backend.read(target), dest.shape, signed).tolist()

    assert after([0] * 5, [1] * 3, ((1, 4),)) == [0, 1, 1, 1, 0]
    assert after([0] * 5, [1] * 3, ((2, 5),)) == [0, 0, 1, 1, 1]
    assert after([0] * 5, [1] * 3, ((0, 3),)) == [1, 1, 1, 0, 0]
    eight, nine, ten = (-8, -7, -6) if signed else (8, 9, 10)
    written = [[7, eight], [nine, ten]]
    assert after([[1, 2, 3], [4, 5, 6]], written, ((0, 2), (1, 3))) == [[1, 7, eight], [4, nine, ten]]
    # A static start is checked when the plan is made; nothing is clamped.
    with pytest.raises(bc.InvalidProblemError, match="expected 0 <= start <= end <= 5 on axis 0"):
        plan_for((5,), ((3, 6),), dtype, backend.device)


# ---------------------------------------------------------------------------------------------------
# Past 2^31 on a GPU. Everything is compared there, by torch.


@pytest.fixture
def large() -> Any:
    """torch, whose memory is given back afterwards."""
    module = support.torch()
    module.cuda.empty_cache()
    yield module
    module.cuda.empty_cache()


@pytest.mark.requires("gpu", "gpu.memory")
class TestPast2To31OnCuda:
    def test_case_E06_block_of_a_large_cache(self, large: Any) -> None:
        cache = large.zeros((64000, 32, 16, 16, 8), dtype=large.float16, device="cuda")
        block = (large.arange(32 * 16 * 8, device="cuda") % 2000 + 1).half().reshape(1, 32, 16, 1, 8)
        bc.write_slice(cache, block, np.s_[63999:, :, :, 5:6])
        assert large.equal(cache[63999:, :, :, 5:6], block)
        assert large.count_nonzero(cache.view(large.int16)).item() == block.numel()

    def test_case_E06_row_of_a_padded_state(self, large: Any) -> None:
        flat = large.zeros(20972 * 102400 + 6 * 128 * 128, device="cuda")
        state = flat.as_strided((20973, 6, 128, 128), (102400, 16384, 128, 1))
        row = large.arange(1, 1 + 6 * 128 * 128, device="cuda").float().reshape(1, 6, 128, 128)
        bc.write_slice(state, row, np.s_[20972:])
        assert large.equal(flat[2_147_532_800:], row.reshape(-1))
        assert large.count_nonzero(flat).item() == row.numel()

    def test_case_E12_copy(self, large: Any) -> None:
        x = large.zeros((200, 200, 224, 224), dtype=large.complex64, device="cuda")
        source = -large.arange(224 * 224, device="cuda").to(large.complex64).reshape(1, 1, 224, 224)
        bc.write_slice(x, source, np.s_[53:54, 99:100])
        assert x[53, 99, 0, 1].item() == -1
        assert large.equal(x[53:54, 99:100], source)
        assert large.count_nonzero(large.view_as_real(x)).item() == source.numel() - 1

    @pytest.mark.parametrize("transposed", [False, True])
    def test_half_bytes(self, large: Any, transposed: bool) -> None:
        """In runs, the second of which starts within a byte; and with a thread for each half byte."""
        columns = 2**31 + 3
        data = large.zeros(columns, dtype=large.uint8, device="cuda")
        source = large.full((columns,), 0xB7, dtype=large.uint8, device="cuda")
        device = (support.CUDA, large.cuda.current_device())
        window = ((0, 2), (1, columns - 1))
        plan_for((2, columns), window, "uint4", "cuda").run(
            # Transposed, the half bytes of two rows share a byte. Each gets the source's first.
            dest=StridedView(data.data_ptr(), "uint4", (2, columns), (1, 2) if transposed else None, device=device),
            source=StridedView(
                source.data_ptr(), "uint4", extent_of(window), (0, 0) if transposed else None, device=device
            ),
            stream=large.cuda.current_stream(),
        )
        if transposed:
            assert data[1:-1].eq(0x77).all().item()
            assert data[0].item() == data[-1].item() == 0
            return
        # Elements 1 to columns - 2 and columns + 1 to 2 columns - 2 are written: 7 and 11 in turn,
        # from 7; the number of elements in a row is odd.
        middle = columns // 2
        assert data[0].item() == 0x70
        assert data[1:middle].eq(0x7B).all().item()
        assert data[middle].item() == 0
        assert data[middle + 1 : -1].eq(0x7B).all().item()
        assert data[-1].item() == 0x0B

    def test_more_than_2_32_elements(self, large: Any) -> None:
        """A thread for each element: indices of 64 bits."""
        shape = (2**16, 2**16 + 2)
        dest = large.zeros(shape, dtype=large.uint8, device="cuda")
        one = large.full((1, 1), 7, dtype=large.uint8, device="cuda").expand(2**16, 2**16)
        bc.write_slice(dest, one, np.s_[:, 1:-1])
        assert dest[:, 1:-1].eq(7).all().item()
        assert not dest[:, 0].any().item()
        assert not dest[:, -1].any().item()

    def test_more_than_2_32_chunks(self, large: Any) -> None:
        """A thread for each sixteen bytes, two to a run of seventeen: more than 2^32 of them."""
        rows = 2**31 + 5
        dest = large.zeros((rows, 19), dtype=large.uint8, device="cuda")
        source = large.arange(1, 18, dtype=large.uint8, device="cuda").expand(rows, 17)
        bc.write_slice(dest, source, np.s_[:, 1:18])
        for part in dest.split(2**27):
            assert part[:, 1:18].eq(source[: part.shape[0]]).all().item()
            assert not part[:, 0].any().item()
            assert not part[:, 18].any().item()
