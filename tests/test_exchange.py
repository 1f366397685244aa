# SPDX-License-Identifier: Apache-2.0
"""Tensors of every framework as operands: what is read, what is refused, and that nothing leaks."""

from __future__ import annotations

import array
import collections
import ctypes
import gc
import mmap
import resource
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import support
from hypothesis import given
from hypothesis import strategies as st
from support import DTYPES, StridedView

import baracuda as bc

UNPACKED = [name for name in DTYPES if name not in ("int4", "uint4")]


def copy(dest: Any, source: Any, dtype: str = "float32", shape: tuple[int, ...] = (4,)) -> None:
    """All of `source` into `dest`, on the CPU."""
    ranges = [(0, extent) for extent in shape]
    bc.WriteSlicePlan(dest_shape=shape, ranges=ranges, dtype=dtype, device="cpu").run(dest=dest, source=source)


def refused(kind: type[bc.BaracudaError], message: str, dest: Any, source: Any, *problem: Any) -> None:
    with pytest.raises(bc.BaracudaError) as caught:
        copy(dest, source, *problem)
    assert type(caught.value) is kind
    assert str(caught.value) == f"WriteSlicePlan: {message}"


def ones(dtype: str = "float32") -> np.ndarray:
    return np.ones(4, DTYPES[dtype].numpy)


def zeros(dtype: str = "float32") -> np.ndarray:
    return np.zeros(4, DTYPES[dtype].numpy)


# ---------------------------------------------------------------------------------------------------
# NumPy.


@pytest.mark.parametrize("dtype", UNPACKED)
def test_numpy_of_every_dtype(dtype: str) -> None:
    source = support.random_array(np.random.default_rng(1), (4,), dtype)
    dest = zeros(dtype)
    copy(dest, source, dtype)
    support.assert_same_bits(dest, source)


@pytest.mark.parametrize("dtype", ["int4", "uint4"])
def test_numpy_half_bytes_are_not_packed(dtype: str) -> None:
    values = np.array([1, 2, 3, 4], DTYPES[dtype].numpy)
    message = f"source: {dtype} with one element to a byte; pack it with baracuda.pack_int4 first"
    refused(bc.UnsupportedError, message, np.zeros(2, np.uint8), values, dtype)
    dest = np.zeros(2, np.uint8)
    copy(dest, bc.pack_int4(values), dtype)
    assert bc.unpack_int4(dest, (4,), dtype).tolist() == [1, 2, 3, 4]


def test_case_F01_read_only() -> None:
    frozen = ones()
    frozen.flags.writeable = False
    refused(bc.InvalidProblemError, "dest: is read-only", frozen, zeros())
    assert frozen.tolist() == [1, 1, 1, 1]
    dest = zeros()
    copy(dest, frozen)
    assert dest.tolist() == [1, 1, 1, 1]
    # The same through DLPack's flag, and without it from a producer that knows no flags.
    memory = bc.asarray(np.zeros(4, np.float32), "cpu")
    view = StridedView(memory, "float32", (4,), flags=support.READ_ONLY)
    refused(bc.InvalidProblemError, "dest: is read-only", view, ones())
    copy(dest, view)
    assert dest.tolist() == [0, 0, 0, 0]
    assert view.calls[0] == {"stream": None, "max_version": (1, 3)}


def test_numpy_byte_swapped() -> None:
    swapped = ones().astype(">f4")
    refused(bc.UnsupportedError, "source: no kernel for byte-swapped float32", zeros(), swapped)
    refused(bc.UnsupportedError, "dest: no kernel for byte-swapped float32", swapped, zeros())


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (object, "object"),
        ("U3", "str96"),
        ("S3", "bytes24"),
        ("M8[ns]", "datetime64[ns]"),
        ([("a", "f4")], "void32"),
        ("longdouble", np.dtype("longdouble").name),
        (ml_dtypes.float4_e2m1fn, "float4_e2m1fn"),
        (ml_dtypes.float8_e5m2fnuz, "float8_e5m2fnuz"),
        (ml_dtypes.int2, "int2"),
    ],
)
def test_numpy_foreign_dtypes(dtype: Any, name: str) -> None:
    refused(bc.UnsupportedError, f"source: no kernel for dtype {name}", zeros(), np.zeros(4, dtype))


def test_numpy_strides_that_are_no_multiple() -> None:
    records = np.zeros(4, [("pad", "i1"), ("value", "f4")])
    message = "a stride of 5 bytes is not a multiple of the element's 4"
    refused(bc.UnsupportedError, f"source: {message}", zeros(), records["value"])
    refused(bc.UnsupportedError, f"dest: {message}", records["value"], zeros())
    # The fields' own bytes can be addressed, and so can fields of records of a fitting size.
    copy(records["pad"], np.full(4, 7, np.int8), "int8")
    assert records["pad"].tolist() == [7] * 4
    fitting = np.zeros(4, [("pad", "f4"), ("value", "f4")])
    copy(fitting["value"], ones())
    assert fitting["value"].tolist() == [1, 1, 1, 1]
    assert fitting["pad"].tolist() == [0, 0, 0, 0]
    # Parts of complex numbers.
    numbers = np.zeros(4, np.complex64)
    copy(numbers.imag, ones())
    assert numbers.tolist() == [1j] * 4


def test_numpy_views_and_subclasses() -> None:
    grid = np.zeros((4, 6), np.float32)
    copy(grid[::-1, ::2].T, np.arange(12, dtype=np.float32).reshape(3, 4), shape=(3, 4))
    assert grid[::-1, ::2].T.tolist() == np.arange(12).reshape(3, 4).tolist()
    assert not grid[:, 1::2].any()
    with mmap.mmap(-1, 16) as mapped:
        memory = np.frombuffer(mapped, np.float32).view(np.memmap)
        copy(memory, ones())
        assert mapped[:] == ones().tobytes()
        del memory


@pytest.mark.parametrize("rank", [9, 32])
def test_numpy_of_a_high_rank(rank: int) -> None:
    refused(
        bc.UnsupportedError, f"source: expected a rank of at most 8, got {rank}", zeros(), np.zeros((1,) * rank, "f4")
    )


def test_case_F09_addresses_of_four_bytes() -> None:
    base = np.arange(1025, dtype=np.float32)[1:]
    assert base.ctypes.data % 8 == 4 or base.ctypes.data % 16 in (4, 12)
    dest = np.zeros(1026, np.float32)[2:]
    copy(dest, base, "float32", (1024,))
    assert dest.tolist() == list(range(1, 1025))
    halves = np.arange(1025, dtype=np.float16)[1:]
    dest = np.zeros(1024, np.float16)
    copy(dest, halves, "float16", (1024,))
    assert dest.tolist() == halves.tolist()


def test_case_F10_negative_strides() -> None:
    dest = np.zeros(8)
    copy(dest, np.arange(8.0)[::-1], "float64", (8,))
    assert dest.tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
    copy(dest[::-1], np.arange(8.0), "float64", (8,))
    assert dest.tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
    flipped = np.arange(12, dtype=np.uint32).reshape(3, 4)[::-1, ::-1].T
    dest = np.zeros((4, 3), np.uint32)
    copy(dest, flipped, "uint32", (4, 3))
    assert dest.tolist() == flipped.tolist()


# ---------------------------------------------------------------------------------------------------
# The buffer protocol.


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda: array.array("f", [0] * 4), "float32"),
        (lambda: array.array("q", [0] * 4), "int64"),
        (lambda: bytearray(4), "uint8"),
        (lambda: memoryview(bytearray(8))[::2], "uint8"),
        (lambda: memoryview(bytearray(16)).cast("f"), "float32"),
        (ctypes.c_int16 * 4, "int16"),
        (ctypes.c_double * 4, "float64"),
    ],
    ids=["array f", "array q", "bytearray", "memoryview with a step", "memoryview", "ctypes h", "ctypes d"],
)
def test_buffers(make: Callable[[], Any], dtype: str) -> None:
    dest, source = make(), make()
    for place in range(4):
        source[place] = place + 1
    copy(dest, source, dtype)
    assert list(dest) == [1, 2, 3, 4]


def test_read_only_buffers() -> None:
    refused(bc.InvalidProblemError, "dest: is read-only", bytes(4), np.ones(4, np.uint8), "uint8")
    dest = bytearray(4)
    copy(dest, b"\x01\x02\x03\x04", "uint8")
    assert dest == b"\x01\x02\x03\x04"
    # Packed bytes from any buffer.
    dest = bytearray(b"\xff\xff")
    copy(dest, b"\x21\x43", "int4")
    assert dest == b"\x21\x43"


def test_buffers_are_released() -> None:
    dest, source = bytearray(4), bytearray(b"abcd")
    copy(dest, source, "uint8")
    # A bytearray with exported buffers can't be resized.
    dest.append(0)
    source.append(0)
    plan = bc.WriteSlicePlan(dest_shape=(4,), ranges=((0, 4),), dtype="uint8", device="cpu")
    source = bytearray(b"efgh")
    dest = bytearray(4)
    bound = plan.bind(dest=dest, source=source)
    for held in (dest, source):
        with pytest.raises(BufferError):
            held.append(0)
    bound.run()
    assert dest == b"efgh"
    del bound
    dest.append(0)
    with pytest.raises(bc.InvalidProblemError):
        copy(source, b"abc", "uint8")
    source.append(0)


# ---------------------------------------------------------------------------------------------------
# DLPack by hand.


def test_versioned_capsules_are_asked_for_first() -> None:
    memory = bc.asarray(np.arange(4, dtype=np.float32), "cpu")
    view = StridedView(memory, "float32", (4,))
    dest = zeros()
    copy(dest, view)
    assert dest.tolist() == [0, 1, 2, 3]
    assert view.calls == [{"stream": None, "max_version": (1, 3)}]


def test_older_producers_are_asked_again_without_a_version() -> None:
    memory = bc.asarray(np.arange(4, dtype=np.float32), "cpu")
    view = StridedView(memory, "float32", (4,), legacy=True)
    dest = zeros()
    copy(dest, view)
    assert dest.tolist() == [0, 1, 2, 3]
    assert [sorted(call) for call in view.calls] == [["max_version", "stream"], ["stream"]]
    # They know no flags, so they can be written.
    copy(view, ones())
    assert memory.numpy().tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(("major", "fine"), [(0, False), (1, True), (2, False), (99, False)])
def test_major_versions(major: int, fine: bool) -> None:
    memory = bc.asarray(np.arange(4, dtype=np.float32), "cpu")
    view = StridedView(memory, "float32", (4,), version=(major, 7))
    if fine:
        copy(zeros(), view)
    else:
        refused(bc.UnsupportedError, f"source: DLPack {major}.7 is not supported, 1.x is", zeros(), view)


def test_unknown_flags_are_no_reason_to_refuse() -> None:
    memory = bc.asarray(np.zeros(4, np.float32), "cpu")
    copy(StridedView(memory, "float32", (4,), flags=support.IS_COPIED | 1 << 40), ones())
    assert memory.numpy().tolist() == [1, 1, 1, 1]


class Once:
    """Keeps the capsule that it gave."""

    def __init__(self, view: Any) -> None:
        self.view = view
        self.capsules: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.view.__dlpack_device__()

    def __dlpack__(self, **arguments: Any) -> Any:
        self.capsules.append(self.view.__dlpack__(**arguments))
        return self.capsules[-1]


@pytest.mark.parametrize("legacy", [False, True])
def test_a_capsule_is_borrowed_and_its_export_deleted_once(legacy: bool) -> None:
    memory = bc.asarray(np.arange(4, dtype=np.float32), "cpu")
    producer = Once(StridedView(memory, "float32", (4,), legacy=legacy))
    references = sys.getrefcount(memory)
    copy(zeros(), producer)
    (capsule,) = producer.capsules
    # Nobody has consumed it, nobody else holds it, and its export is alive until it goes.
    assert support.capsule_name(capsule) == ("dltensor" if legacy else "dltensor_versioned")
    assert sys.getrefcount(capsule) == 3
    assert support.live_exports() == 1
    del capsule
    producer.capsules.clear()
    assert support.live_exports() == 0
    assert sys.getrefcount(memory) == references


def test_a_bound_plan_keeps_exports_alive_and_lets_them_go() -> None:
    plan = bc.WriteSlicePlan(dest_shape=(4,), ranges=((0, 4),), dtype="float32", device="cpu")
    memory = [bc.asarray(np.full(4, value, np.float32), "cpu") for value in (0, 1)]
    alive = [weakref.ref(one) for one in memory]
    bound = plan.bind(dest=StridedView(memory[0], "float32", (4,)), source=StridedView(memory[1], "float32", (4,)))
    values = memory[0].numpy()
    memory.clear()
    gc.collect()
    assert support.live_exports() == 2
    assert all(ref() is not None for ref in alive)
    bound.run()
    assert values.tolist() == [1, 1, 1, 1]
    del bound, values
    gc.collect()
    assert support.live_exports() == 0
    assert [ref() for ref in alive] == [None, None]


def test_a_failing_call_lets_exports_go() -> None:
    memory = bc.asarray(np.zeros(4, np.float32), "cpu")
    references = sys.getrefcount(memory)
    for options in ({"version": (2, 0)}, {"byte_offset": 2}, {"flags": support.READ_ONLY}, {}):
        view = StridedView(memory, "float32", (4,), **options)
        for source in (np.zeros(5, np.float32), "no tensor", StridedView(memory, "float32", (4,))):
            with pytest.raises(bc.BaracudaError):
                copy(view, source, "float32" if options else "int8")
        del view, source
    assert support.live_exports() == 0
    assert sys.getrefcount(memory) == references


def test_a_consumed_capsule_is_refused() -> None:
    source = np.ones(4, np.float32)
    producer = Once(source)
    np.from_dlpack(producer)  # renames the capsule

    class Used(Once):
        def __dlpack__(self, **_: Any) -> Any:
            return producer.capsules[0]

    refused(bc.InvalidProblemError, "source: __dlpack__ gave no unused DLPack capsule", zeros(), Used(source))


@pytest.mark.parametrize("bits", [4, 8])
def test_case_F05_null_strides_are_row_major(bits: int) -> None:
    dtype = "uint4" if bits == 4 else "uint8"
    memory = bc.asarray(np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA], np.uint8), "cpu")
    dest = np.zeros((2, 3) if bits == 8 else 3, np.uint8)
    copy(dest, StridedView(memory, dtype, (2, 3), None), dtype, (2, 3))
    assert dest.ravel().tolist() == memory.numpy()[: dest.size].tolist()
    # A scalar has no shape either; it is read, and is no operand of rank 2.
    message = "source: expected shape (2, 3), got ()"
    refused(bc.InvalidProblemError, message, dest, StridedView(memory, dtype, ()), dtype, (2, 3))


@pytest.mark.parametrize("strides", [(77, 1), (1, 1), (0, 1), (-5, 1), (2**62, 1)])
def test_case_F06_strides_of_unit_axes_say_nothing(strides: tuple[int, int]) -> None:
    memory = bc.asarray(np.arange(77, dtype=np.float32), "cpu")
    for dest, source in (
        (np.zeros((1, 77), np.float32), StridedView(memory, "float32", (1, 77), strides)),
        (StridedView(memory, "float32", (1, 77), strides), np.ones((1, 77), np.float32)),
    ):
        copy(dest, source, "float32", (1, 77))
    assert memory.numpy().tolist() == [1] * 77
    # As a workspace: contiguous all the same.
    plan = bc.WriteSlicePlan(dest_shape=(8,), ranges=((2, 8),), dtype="uint8", overlap="stage", device="cpu")
    shared = bc.asarray(np.arange(8, dtype=np.uint8), "cpu")
    workspace = bc.empty(256, "uint8", "cpu")
    plan.run(
        dest=shared,
        source=StridedView(shared, "uint8", (6,)),
        workspace=StridedView(workspace, "uint8", (1, 256), strides),
    )
    assert shared.numpy().tolist() == [0, 1, 0, 1, 2, 3, 4, 5]


def test_byte_offset_and_pointer_are_added() -> None:
    memory = bc.asarray(np.arange(16, dtype=np.float32), "cpu")
    dest = zeros()
    copy(dest, StridedView(memory, "float32", (4,), byte_offset=8, shift=12))
    assert dest.tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize("kind", [support.CUDA_HOST, support.CUDA_MANAGED])
def test_pinned_and_managed_memory_are_of_the_cpu_too(kind: int) -> None:
    memory = bc.asarray(np.ones(4, np.float32), "cpu")
    dest = zeros()
    copy(dest, StridedView(memory, "float32", (4,), device=(kind, 0)))
    assert dest.tolist() == [1, 1, 1, 1]


def test_case_F21_metadata_is_copied_when_bound() -> None:
    """Who owns the shape may change it afterwards."""
    plan = bc.WriteSlicePlan(dest_shape=(2, 3), ranges=((0, 2), (0, 3)), dtype="float32", device="cpu")
    memory = bc.asarray(np.zeros(64, np.float32), "cpu")
    producer = Once(StridedView(memory, "float32", (2, 3), (3, 1)))
    source = np.arange(6, dtype=np.float32).reshape(2, 3)
    bound = plan.bind(dest=producer, source=source)
    tensor = support.capsule_struct(producer.capsules[0]).dl_tensor
    for pointer in (tensor.shape, tensor.strides):
        (ctypes.c_int64 * 2).from_address(pointer)[:] = [2**40, 2**40]
    bound.run()
    assert memory.numpy()[:7].tolist() == [0, 1, 2, 3, 4, 5, 0]


# ---------------------------------------------------------------------------------------------------
# Tensors of the library's own.


@pytest.mark.parametrize("dtype", UNPACKED)
def test_own_tensors_and_numpy(dtype: str) -> None:
    values = support.random_array(np.random.default_rng(2), (3, 5), dtype)
    tensor = bc.asarray(values, "cpu")
    assert (tensor.shape, tensor.dtype, tensor.device, tensor.nbytes) == ((3, 5), dtype, "cpu", values.nbytes)
    assert tensor.data_ptr % 256 == 0
    support.assert_same_bits(tensor.numpy(), values)
    # A view, not a copy, which keeps the memory.
    view = tensor.numpy()
    assert view.ctypes.data == tensor.data_ptr
    alive = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert alive() is not None
    support.assert_same_bits(view, values)
    del view
    gc.collect()
    assert alive() is None


def test_own_tensors_as_arrays(device: str) -> None:
    tensor = bc.asarray([1, 2, 3], device)
    if device != "cpu":
        with pytest.raises(TypeError, match=r"method numpy\(\)"):
            np.asarray(tensor)
        return
    view = np.asarray(tensor)
    assert view.ctypes.data == tensor.data_ptr
    for dtype, copy in ((np.int64, True), (np.float32, None)):
        array = np.array(tensor, dtype, copy=copy)
        assert (array.dtype, array.tolist()) == (dtype, [1, 2, 3])
        assert array.ctypes.data != tensor.data_ptr
    with pytest.raises(ValueError, match="without a copy"):
        np.array(tensor, np.float32, copy=False)
    with pytest.raises(TypeError, match="int4"):
        np.asarray(bc.empty(3, "int4", "cpu"))


def test_asarray_takes_what_numpy_takes() -> None:
    assert bc.asarray([[1, 2], [3, 4]], "cpu").numpy().tolist() == [[1, 2], [3, 4]]
    assert bc.asarray(3.5, "cpu").shape == ()
    assert bc.asarray(np.zeros((2, 0)), "cpu").numpy().shape == (2, 0)
    assert bc.asarray(np.arange(6).reshape(2, 3).T, "cpu").numpy().tolist() == [[0, 3], [1, 4], [2, 5]]
    # Byte order is NumPy's affair.
    assert bc.asarray(np.array([1, 2], ">i4"), "cpu").numpy().tolist() == [1, 2]
    values = np.array([[1, -2, 3], [-4, 5, -6]], ml_dtypes.int4)
    packed = bc.asarray(values, "cpu")
    assert (packed.shape, packed.dtype, packed.nbytes) == ((2, 3), "int4", 3)
    assert bc.unpack_int4(packed.numpy(), (2, 3)).tolist() == values.astype(int).tolist()


@given(
    values=st.lists(st.integers(-8, 7), max_size=20),
    dtype=st.sampled_from(["int64", "int8", "int4", "float32"]),
)
def test_packing_and_back(values: list[int], dtype: str) -> None:
    packed = bc.pack_int4(np.array(values, DTYPES[dtype].numpy))
    assert packed.dtype == np.uint8
    assert packed.shape == ((len(values) + 1) // 2,)
    signed = bc.unpack_int4(packed, (len(values),))
    assert signed.dtype == np.int8
    assert signed.tolist() == values
    unsigned = bc.unpack_int4(packed, (len(values),), "uint4")
    assert unsigned.dtype == np.uint8
    assert unsigned.tolist() == [value % 16 for value in values]


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "complex128", "uint8", "float16"])
def test_own_tensors_into_numpy_by_dlpack(dtype: str) -> None:
    values = support.random_array(np.random.default_rng(3), (2, 3), dtype)
    tensor = bc.asarray(values, "cpu")
    alive = weakref.ref(tensor)
    seen = np.from_dlpack(tensor)
    support.assert_same_bits(seen, values)
    assert seen.ctypes.data == tensor.data_ptr
    assert seen.flags.writeable
    del tensor
    gc.collect()
    assert alive() is not None
    support.assert_same_bits(seen, values)
    del seen
    gc.collect()
    assert alive() is None


def test_own_capsules() -> None:
    tensor = bc.empty((2, 3), "bfloat16", "cpu")
    references = sys.getrefcount(tensor)
    for version, name in (
        (None, "dltensor"),
        ((0, 8), "dltensor"),
        ((1, 0), "dltensor_versioned"),
        ((2, 1), "dltensor_versioned"),
    ):
        capsule = tensor.__dlpack__(max_version=version)
        assert support.capsule_name(capsule) == name
        managed = support.capsule_struct(capsule)
        if name == "dltensor_versioned":
            assert managed.major == 1
            assert managed.flags == 0
        exported = managed.dl_tensor
        assert exported.data == tensor.data_ptr
        assert (exported.device.device_type, exported.device.device_id) == (support.CPU, 0)
        assert (exported.dtype.code, exported.dtype.bits, exported.dtype.lanes) == (4, 16, 1)
        assert exported.ndim == 2
        assert list((ctypes.c_int64 * 2).from_address(exported.shape)) == [2, 3]
        assert list((ctypes.c_int64 * 2).from_address(exported.strides)) == [3, 1]
        assert exported.byte_offset == 0
        assert sys.getrefcount(tensor) == references + 1
        # A capsule that nobody consumes frees its export.
        del capsule, managed, exported
        assert sys.getrefcount(tensor) == references
    assert tensor.__dlpack_device__() == (support.CPU, 0)


def test_own_exports_refuse_what_they_can_not_do() -> None:
    tensor = bc.empty((2, 3), "float32", "cpu")
    with pytest.raises(BufferError, match="without a copy"):
        tensor.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="on its own device"):
        tensor.__dlpack__(dl_device=(support.CUDA, 0))
    assert tensor.__dlpack__(copy=False, dl_device=(support.CPU, 0)) is not None


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (2,) * 8])
def test_own_shapes(shape: tuple[int, ...]) -> None:
    tensor = bc.empty(shape, "float64", "cpu")
    assert tensor.shape == shape
    assert np.from_dlpack(tensor).shape == shape
    assert tensor.numpy().shape == shape
    assert tensor.nbytes == 8 * int(np.prod(shape))


# ---------------------------------------------------------------------------------------------------
# torch.


@pytest.mark.requires("torch")
class TestTorch:
    @pytest.mark.parametrize("dtype", UNPACKED)
    def test_every_dtype(self, dtype: str) -> None:
        values = support.random_array(np.random.default_rng(4), (4,), dtype)
        dest = support.to_torch(zeros(dtype))
        copy(dest, support.to_torch(values), dtype)
        support.assert_same_bits(support.from_torch(dest), values)

    def test_views(self) -> None:
        torch = support.torch()
        grid = torch.zeros(4, 6)
        copy(grid[:, 1::2].T, torch.arange(12.0).reshape(4, 3).T, "float32", (3, 4))
        assert grid[:, 1::2].flatten().tolist() == list(range(12))
        assert not grid[:, ::2].any()
        # Zero strides are fine for what is read only.
        copy(grid, torch.tensor([7.0]).expand(4, 6), "float32", (4, 6))
        assert grid.eq(7).all()
        message = "dest: elements share memory, strides (0,) for shape (4,)"
        refused(bc.InvalidProblemError, message, torch.zeros(1).expand(4), ones())
        # A fused qkv buffer.
        fused = torch.zeros(2, 3, 3, 4)
        _, key, _ = fused.unbind(2)
        copy(key, torch.ones(2, 3, 4), "float32", (2, 3, 4))
        assert fused[:, :, 1].eq(1).all()
        assert fused.sum() == 24

    @pytest.mark.parametrize("memory_format", ["contiguous_format", "channels_last"])
    def test_channels_last(self, memory_format: str) -> None:
        torch = support.torch()
        image = torch.zeros(2, 3, 4, 5).to(memory_format=getattr(torch, memory_format))
        block = torch.randn(2, 3, 2, 3).to(memory_format=torch.channels_last)
        expected = image.clone()
        expected[:, :, 1:3, 1:4] = block
        bc.write_slice(image, block, np.s_[:, :, 1:3, 1:4])
        assert torch.equal(image, expected)

    def test_case_F06_unit_axes(self) -> None:
        torch = support.torch()
        one = torch.arange(16)[::3][:1]
        assert one.stride() == (3,)
        dest = np.zeros(1, np.int64)
        copy(dest, one + 5, "int64", (1,))
        assert dest.tolist() == [5]
        copy(one, np.array([9]), "int64", (1,))
        assert one.item() == 9

    def test_an_output_that_requires_grad(self) -> None:
        torch = support.torch()
        message = "dest: is written, but requires grad; pass a tensor that doesn't, such as x.detach()"
        leaf = torch.zeros(4, requires_grad=True)
        for output in (leaf, leaf * 2, torch.nn.Parameter(torch.zeros(4))):
            refused(bc.InvalidProblemError, message, output, ones())
            assert not output.any()
        copy(leaf.detach(), ones())
        assert leaf.eq(1).all()
        # As inputs they are fine.
        dest = zeros()
        for source in (leaf, leaf * 1, torch.nn.Parameter(torch.ones(4))):
            dest[:] = 0
            copy(dest, source)
            assert dest.tolist() == [1, 1, 1, 1]

    def test_case_F20_lazy_conjugation_and_negation(self) -> None:
        torch = support.torch()
        lazy = torch.tensor([1 + 2j] * 4).conj()
        message = "source: is a lazily conjugated view; call resolve_conj() first"
        refused(bc.InvalidProblemError, message, zeros("complex64"), lazy, "complex64")
        refused(bc.InvalidProblemError, message.replace("source", "dest"), lazy, ones("complex64"), "complex64")
        dest = zeros("complex64")
        copy(dest, lazy.resolve_conj(), "complex64")
        assert dest.tolist() == [1 - 2j] * 4
        message = "source: is a lazily negated view; call resolve_neg() first"
        refused(bc.InvalidProblemError, message, zeros(), lazy.imag)
        dest = zeros()
        copy(dest, lazy.imag.resolve_neg())
        assert dest.tolist() == [-2] * 4
        # The real part isn't lazy.
        copy(dest, lazy.real)
        assert dest.tolist() == [1] * 4

    @pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
    def test_tensors_without_memory(self) -> None:
        torch = support.torch()
        from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415

        with FakeTensorMode():
            fake = torch.zeros(4)
        for empty in (fake, torch._efficientzerotensor(4)):
            refused(bc.InvalidProblemError, "source: has elements but no memory", zeros(), empty)
            refused(bc.InvalidProblemError, "dest: has elements but no memory", empty, ones())

    @pytest.mark.parametrize("kind", ["meta", "sparse", "vmap", "func.grad", "mkldnn"])
    def test_tensors_that_are_not_what_they_seem(self, kind: str) -> None:
        """Their type is torch.Tensor, but there are no strided elements behind it."""
        torch = support.torch()
        seen = []

        def attempt(tensor: Any) -> Any:
            for operands in ((zeros(), tensor), (tensor.detach(), ones())):
                with pytest.raises(
                    bc.InvalidProblemError, match=r"^WriteSlicePlan: (dest|source): torch can't export it: "
                ) as caught:
                    copy(*operands)
                assert "\n" not in str(caught.value)
            seen.append(type(tensor))
            return tensor if kind == "mkldnn" else tensor.sum()

        if kind == "meta":
            attempt(torch.ones(4, device="meta"))
        elif kind == "sparse":
            attempt(torch.ones(4).to_sparse())
        elif kind == "vmap":
            torch.vmap(attempt)(torch.ones(2, 4))
        elif kind == "func.grad":
            torch.func.grad(attempt)(torch.ones(4))
        else:
            attempt(torch.ones(4).to_mkldnn())
        assert seen == [torch.Tensor]

    def test_subclasses_speak_for_themselves(self) -> None:
        torch = support.torch()

        class Loud(torch.Tensor):
            exports = 0

            def __dlpack__(self, *arguments: Any, **options: Any) -> Any:
                type(self).exports += 1
                return super().__dlpack__(*arguments, **options)

        dest = torch.zeros(4).as_subclass(Loud)
        copy(dest, ones())
        assert Loud.exports == 1
        assert dest.eq(1).all()
        message = "source: .*Loud can't be exported: Can't export tensors that require gradient, use tensor.detach"
        with pytest.raises(bc.InvalidProblemError, match=message):
            copy(zeros(), torch.zeros(4, requires_grad=True).as_subclass(Loud))

    def test_inference_mode(self) -> None:
        torch = support.torch()
        with torch.inference_mode():
            dest = torch.zeros(4)
            copy(dest, ones())
        assert dest.eq(1).all()
        copy(dest, zeros())
        assert not dest.any()

    def test_refusals_of_the_checker_are_the_same(self) -> None:
        torch = support.torch()
        refused(bc.InvalidProblemError, "source: expected dtype float32, got float64", zeros(), torch.zeros(4).double())
        refused(bc.InvalidProblemError, "source: expected shape (4,), got (5,)", zeros(), torch.zeros(5))
        nine = torch.zeros((1,) * 9)
        refused(bc.UnsupportedError, "source: expected a rank of at most 8, got 9", zeros(), nine)
        shared = torch.arange(5.0)
        refused(bc.InvalidProblemError, "dest: shares memory with source", shared[:4], shared[1:])
        assert shared.tolist() == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize("dtype", UNPACKED)
    def test_own_tensors_into_torch(self, dtype: str) -> None:
        torch = support.torch()
        values = support.random_array(np.random.default_rng(5), (2, 3), dtype)
        tensor = bc.asarray(values, "cpu")
        alive = weakref.ref(tensor)
        seen = torch.from_dlpack(tensor)
        assert seen.data_ptr() == tensor.data_ptr
        support.assert_same_bits(support.from_torch(seen), values)
        del tensor
        gc.collect()
        assert alive() is not None
        support.assert_same_bits(support.from_torch(seen), values)
        del seen
        gc.collect()
        assert alive() is None

    def test_case_F21_bound_tensors_may_change_their_shape(self) -> None:
        torch = support.torch()
        plan = bc.WriteSlicePlan(dest_shape=(2, 3), ranges=((0, 2), (0, 3)), dtype="float32", device="cpu")
        dest = torch.zeros(2, 3)
        bound = plan.bind(dest=dest, source=torch.arange(6.0).reshape(2, 3))
        dest.t_()
        dest.unsqueeze_(0)
        bound.run()
        assert dest.squeeze(0).t().flatten().tolist() == [0, 1, 2, 3, 4, 5]

    def test_second_witness(self) -> None:
        torch = support.torch()
        rng = np.random.default_rng(6)
        for slices in (np.s_[1:3], np.s_[..., 2:], np.s_[:, -2:, :1], np.s_[0:1, 1:4, 2:5]):
            dest = rng.standard_normal((3, 4, 5))
            expected = torch.from_numpy(dest.copy())
            source = rng.standard_normal(dest[slices].shape)
            expected[slices] = torch.from_numpy(source)
            got = torch.from_numpy(dest)
            assert bc.write_slice(got, torch.from_numpy(source), slices) is got
            assert torch.equal(got, expected)


def test_torch_may_come_later() -> None:
    """Frameworks are looked at when their tensors come, and never imported."""
    program = """
import sys
import numpy as np
import baracuda as bc
dest = np.zeros(4, np.float32)
bc.write_slice(dest, np.ones(4, np.float32), ...)
assert dest.tolist() == [1, 1, 1, 1]
loaded = {"torch", "jax", "jaxlib", "cupy", "cuda", "numba", "tvm_ffi"} & set(sys.modules)
assert not loaded, loaded
libraries = open("/proc/self/maps").read()
for name in ("libtorch", "libc10", "libcudart.so", "xla_extension"):
    assert name not in libraries, name
print("alone")
if sys.argv[1] == "torch":
    import warnings
    warnings.simplefilter("ignore")
    import torch
    dest = torch.zeros(4)
    bc.write_slice(dest, np.ones(4, np.float32), slice(0, 4))
    assert dest.eq(1).all()
    try:
        bc.write_slice(torch.zeros(4, requires_grad=True), dest, ...)
    except bc.InvalidProblemError as error:
        print(error)
"""
    which = "none" if support.missing("torch") else "torch"
    done = subprocess.run([sys.executable, "-c", program, which], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "alone" in line or "requires grad" in line]
    assert lines[0] == "alone"
    assert len(lines) == (2 if which == "torch" else 1)


# ---------------------------------------------------------------------------------------------------
# JAX.


@pytest.mark.requires("jax")
class TestJax:
    @pytest.mark.parametrize("dtype", UNPACKED)
    def test_as_input(self, dtype: str) -> None:
        values = support.random_array(np.random.default_rng(7), (4,), dtype)
        dest = zeros(dtype)
        copy(dest, support.Backend("cpu").of("jax", values), dtype)
        support.assert_same_bits(dest, values)

    def test_not_as_output(self) -> None:
        output = support.jax().numpy.zeros(4, "float32")
        refused(bc.InvalidProblemError, "dest: is written, but JAX arrays are immutable", output, ones())
        assert not np.asarray(output).any()
        # Its NumPy view is read-only, too.
        refused(bc.InvalidProblemError, "dest: is read-only", np.asarray(output), ones())

    def test_not_while_traced(self) -> None:
        jax = support.jax()
        with pytest.raises(bc.InvalidProblemError, match=r"^WriteSlicePlan: source: .*Tracer can't be exported: "):
            jax.jit(lambda x: copy(zeros(), x))(jax.numpy.zeros(4, "float32"))

    def test_own_tensors_into_jax(self) -> None:
        jax = support.jax()
        tensor = bc.asarray(np.arange(6, dtype=np.float32).reshape(2, 3), "cpu")
        seen = jax.dlpack.from_dlpack(tensor)
        assert seen.tolist() == [[0, 1, 2], [3, 4, 5]]

    def test_second_witness(self) -> None:
        jax = support.jax()
        rng = np.random.default_rng(8)
        dest, source = rng.standard_normal((4, 6)), rng.standard_normal((2, 3))
        expected = jax.lax.dynamic_update_slice(dest, source, (1, 2))
        bc.write_slice(dest, source, np.s_[1:3, 2:5])
        np.testing.assert_array_equal(dest, np.asarray(expected))


# ---------------------------------------------------------------------------------------------------
# Leaks.

MAKERS: dict[str, tuple[str | None, Callable[[], Any]]] = {
    "numpy": (None, ones),
    "baracuda": (None, lambda: bc.asarray(ones(), "cpu")),
    "buffer": (None, lambda: array.array("f", [1] * 4)),
    "dlpack": (None, lambda: StridedView(bc.asarray(ones(), "cpu"), "float32", (4,))),
    "old dlpack": (None, lambda: StridedView(bc.asarray(ones(), "cpu"), "float32", (4,), legacy=True)),
    "torch": ("torch", lambda: support.to_torch(ones())),
    "jax": ("jax", lambda: support.Backend("cpu").of("jax", ones())),
}


@pytest.mark.parametrize(
    "maker",
    [
        pytest.param(make, id=name, marks=[pytest.mark.requires(need)] if need else [])
        for name, (need, make) in MAKERS.items()
    ],
)
@pytest.mark.parametrize("fails", [False, True], ids=["runs", "refusals"])
def test_thousands_of_exchanges_leak_nothing(maker: Callable[[], Any], fails: bool) -> None:
    plan = bc.WriteSlicePlan(dest_shape=(4,), ranges=((0, 4),), dtype="float32", device="cpu")
    source = maker()
    by_hand = isinstance(source, StridedView)
    if by_hand:
        source.calls = collections.deque(maxlen=1)
    dest = np.zeros(5, np.float32) if fails else zeros()

    def once() -> None:
        if fails:
            with pytest.raises(bc.InvalidProblemError):
                plan.run(source=source, dest=dest)
            return
        plan.run(source=source, dest=dest)
        plan.can_implement(source=source, dest=dest)
        plan.bind(source=source, dest=dest).run()

    def state() -> tuple[list[int], int]:
        gc.collect()
        watched = [source, dest, plan, type(source), *([source.base] if by_hand else [])]
        return [sys.getrefcount(value) for value in watched], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    for _ in range(300):
        once()
    references, memory = state()
    for _ in range(2_000 if by_hand or fails else 10_000):
        once()
    references_now, memory_now = state()
    assert references_now == references
    # KiB; one lost object in each exchange would be more.
    assert memory_now - memory < 512
