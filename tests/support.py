# SPDX-License-Identifier: Apache-2.0
"""Operands for tests: memory on either device, views of any layout on it, tensors of every framework.

``Backend`` is the way in. What it makes does not depend on any framework: views that
``baracuda.Tensor`` can't be (strided, misaligned, read-only, of half bytes) are ``StridedView``, a
DLPack producer of the tests' own.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import importlib.util
import itertools
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

import baracuda as bc

# ---------------------------------------------------------------------------------------------------
# Dtypes. The codes are DLPack's, written down here a second time.


@dataclass(frozen=True)
class DType:
    name: str
    bits: int
    code: int

    @property
    def packed(self) -> bool:
        return self.bits == 4

    @property
    def itemsize(self) -> int:
        """Bytes of an element; packed types have none."""
        assert not self.packed
        return self.bits // 8

    @property
    def alignment(self) -> int:
        """What an address must be a multiple of. A complex number needs what its parts need."""
        return max(1, self.bits // 8 // (2 if self.name.startswith("complex") else 1))

    @property
    def numpy(self) -> np.dtype[Any]:
        return np.dtype(getattr(ml_dtypes, self.name, self.name))

    def nbytes(self, elements: int) -> int:
        return (elements * self.bits + 7) // 8


_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL, _E4M3FN, _E5M2 = 0, 1, 2, 4, 5, 6, 10, 12

DTYPES: dict[str, DType] = {
    name: DType(name, bits, code)
    for name, bits, code in (
        ("bool", 8, _BOOL),
        *((f"int{bits}", bits, _INT) for bits in (4, 8, 16, 32, 64)),
        *((f"uint{bits}", bits, _UINT) for bits in (4, 8, 16, 32, 64)),
        *((f"float{bits}", bits, _FLOAT) for bits in (16, 32, 64)),
        ("bfloat16", 16, _BFLOAT),
        ("float8_e4m3fn", 8, _E4M3FN),
        ("float8_e5m2", 8, _E5M2),
        ("complex64", 64, _COMPLEX),
        ("complex128", 128, _COMPLEX),
    )
}

# ---------------------------------------------------------------------------------------------------
# What a machine has.


def _module(name: str) -> str | None:
    return None if importlib.util.find_spec(name) is not None else f"{name} is not installed"


def _gpu() -> str | None:
    return bc.cuda_unavailable_reason()


def _kernel_arch() -> str:
    """Of the kernels' machine code on the GPU: "sm_90"."""
    return bc.WriteSlicePlan(dest_shape=(1,), ranges=((0, 1),), dtype="int8", device="cuda").sku.arch


def _sm_90() -> str | None:
    if reason := _gpu():
        return reason
    arch = _kernel_arch()
    return None if int(arch.removeprefix("sm_")) >= 90 else f"kernels for sm_90 or newer are needed, these are {arch}"


def _gpus() -> str | None:
    count = bc.cuda_device_count()
    return None if count > 1 else _gpu() or "two GPUs are needed, this machine has one"


def _torch_cuda() -> str | None:
    return _module("torch") or (None if torch().cuda.is_available() else "this torch has no CUDA here")


def _gpu_memory() -> str | None:
    if reason := _torch_cuda():
        return reason
    # Of the whole card: who needs it waits for its turn, see conftest.py.
    _, total = torch().cuda.mem_get_info()
    return None if total >= 64 * 2**30 else f"a GPU with 64 GiB is needed, there are {total / 2**30:.0f}"


def _jax_cuda() -> str | None:
    if reason := _module("jax"):
        return reason
    return None if any(device.platform == "gpu" for device in jax().devices()) else "this jax has no CUDA here"


def _cuda_core() -> str | None:
    try:
        return _module("cuda.core")
    except ModuleNotFoundError:
        return "cuda-core is not installed"


#: What a test can require, each with the function that says why it can't be had, or None.
REQUIREMENTS: dict[str, Callable[[], str | None]] = {
    "gpu": _gpu,
    "gpus": _gpus,
    "sm_90": _sm_90,
    "torch": functools.partial(_module, "torch"),
    "torch.cuda": _torch_cuda,
    "torchvision": functools.partial(_module, "torchvision"),
    "gpu.memory": _gpu_memory,
    "jax": functools.partial(_module, "jax"),
    "jax.cuda": _jax_cuda,
    "cupy": functools.partial(_module, "cupy"),
    "cuda.core": _cuda_core,
}


@functools.cache
def missing(name: str) -> str | None:
    """Why a requirement can't be met, or None."""
    return REQUIREMENTS[name]()


def _imported(name: str) -> ModuleType:
    # Warnings of their imports are theirs; an import that fails is an error, not a reason to skip.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


@functools.cache
def torch() -> ModuleType:
    return _imported("torch")


@functools.cache
def torchvision() -> ModuleType:
    return _imported("torchvision")


@functools.cache
def cupy() -> ModuleType:
    return _imported("cupy")


@functools.cache
def jax() -> ModuleType:
    module = _imported("jax")
    module.config.update("jax_enable_x64", True)
    return module


def device_lines() -> Iterator[str]:
    yield "cpu"
    if bc.cuda_device_count():
        yield f"{bc.cuda_device_count()} × cuda ({_kernel_arch()})"


def witness_lines() -> Iterator[str]:
    for name in ("torch", "jax", "cupy"):
        # A framework's distribution may have another name than its module.
        yield f"no {name} ({missing(name)})" if missing(name) else f"{name} {importlib.import_module(name).__version__}"


# ---------------------------------------------------------------------------------------------------
# DLPack by hand.


class _DLDevice(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class _DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Legacy(ctypes.Structure):
    _fields_ = [("dl_tensor", _DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", _DLTensor),
    ]


_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_capsule_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))


def capsule_struct(capsule: object) -> Any:
    """The managed tensor of a capsule that nobody has consumed."""
    name = _capsule_name(capsule)
    kind = _Versioned if name == b"dltensor_versioned" else _Legacy
    return kind.from_address(_capsule_pointer(capsule, name))


def capsule_name(capsule: object) -> str:
    return _capsule_name(capsule).decode()


CPU, CUDA, CUDA_HOST, METAL, CUDA_MANAGED = 1, 2, 3, 8, 13
READ_ONLY, IS_COPIED, PADDED = 1, 2, 4


class _Export:
    """One export: what it refers to, alive until its deleter has run."""

    def __init__(self, *owned: object) -> None:
        self.owned = owned
        self.byte = ctypes.c_uint8()
        self.__array_interface__ = {
            "version": 3, "shape": (1,), "typestr": "|u1", "data": (ctypes.addressof(self.byte), False),
        }  # fmt: skip
        _LIVE.add(self)


_LIVE: weakref.WeakSet[_Export] = weakref.WeakSet()


def live_exports() -> int:
    """Exports of ``StridedView`` that are not deleted yet."""
    if len(_LIVE):
        gc.collect()
    return len(_LIVE)


class StridedView:
    """A DLPack producer whose every field can be chosen, over the memory of `base` or at an address.

    Its capsules are NumPy's, filled anew: so their destructor and deleter are C code of somebody
    else, and an export counts as deleted when NumPy's deleter has let go of what it refers to.

    Args:
        base: a ``baracuda.Tensor``, or an address (int), which nothing has to be at.
        dtype: a name, or DLPack's (code, bits, lanes).
        strides: in elements; None exports a NULL pointer.
        byte_offset: exported as DLPack's field of that name.
        shift: bytes added to the data pointer itself.
        flags: of DLPack's versioned capsule.
        version: of DLPack's versioned capsule.
        legacy: an older producer, which knows no versions.
        device: DLPack's (type, id); None: that of `base`.
    """

    def __init__(
        self,
        base: bc.Tensor | int,
        dtype: str | tuple[int, int, int],
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
        *,
        byte_offset: int = 0,
        shift: int = 0,
        flags: int = 0,
        version: tuple[int, int] = (1, 0),
        legacy: bool = False,
        device: tuple[int, int] | None = None,
    ) -> None:
        self.base = base
        self.dtype = dtype
        self.shape = tuple(int(extent) for extent in shape)
        self.strides = None if strides is None else tuple(int(stride) for stride in strides)
        self.byte_offset = byte_offset
        self.shift = shift
        self.flags = flags
        self.version = version
        self.legacy = legacy
        if device is None:
            device = (CPU, 0) if isinstance(base, int) else base.__dlpack_device__()
        self.device = device
        #: The arguments of each call of ``__dlpack__``.
        self.calls: list[dict[str, Any]] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **arguments: Any) -> object:
        self.calls.append(arguments)
        if self.legacy and "max_version" in arguments:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        owner = self.base
        if isinstance(owner, bc.Tensor) and owner.device.startswith("cuda"):
            # For what it does to the streams.
            owner.__dlpack__(stream=arguments.get("stream"), max_version=(1, 0))
        count = len(self.shape)
        shape = (ctypes.c_int64 * max(count, 1))(*self.shape)
        strides = (ctypes.c_int64 * max(count, 1))(*(self.strides or ()))
        array = np.asarray(_Export(owner, shape, strides))
        if self.legacy or arguments.get("max_version") is None:
            capsule = array.__dlpack__()
            tensor = capsule_struct(capsule).dl_tensor
        else:
            capsule = array.__dlpack__(max_version=(1, 0))
            managed = capsule_struct(capsule)
            managed.major, managed.minor = self.version
            managed.flags = self.flags
            tensor = managed.dl_tensor
        data = owner if isinstance(owner, int) else owner.data_ptr
        tensor.data = (data + self.shift) or None
        tensor.device = _DLDevice(*self.device)
        tensor.ndim = count
        kind = DTYPES[self.dtype] if isinstance(self.dtype, str) else None
        tensor.dtype = _DLDataType(kind.code, kind.bits, 1) if kind else _DLDataType(*self.dtype)
        tensor.shape = ctypes.addressof(shape) if count else None
        tensor.strides = None if self.strides is None else ctypes.addressof(strides)
        tensor.byte_offset = self.byte_offset
        return capsule


# ---------------------------------------------------------------------------------------------------
# Layouts: strides in elements for a shape.


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return ordered(shape, range(len(shape)))


def ordered(shape: tuple[int, ...], order: Iterable[int], steps: Iterable[int] | None = None) -> tuple[int, ...]:
    """Axes in the given order from the longest stride to the shortest; `steps` leave places unused."""
    strides = [0] * len(shape)
    step = 1
    gaps = list(steps) if steps is not None else [1] * len(shape)
    for axis in reversed(list(order)):
        step *= gaps[axis]
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)


def _channels_last(shape: tuple[int, ...]) -> tuple[int, ...]:
    axes = list(range(len(shape)))
    return ordered(shape, axes[:1] + axes[2:] + axes[1:2])


def _unit_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    # As some frameworks leave them: whatever was computed, or garbage.
    odd = itertools.cycle((7, -3, 0, 2**40))
    return tuple(next(odd) if extent <= 1 else s for extent, s in zip(shape, row_major(shape), strict=True))


#: Every layout but "broadcast" is fine for outputs, too.
LAYOUTS: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
    "row_major": row_major,
    "transposed": lambda shape: ordered(shape, reversed(range(len(shape)))),
    "negative": lambda shape: tuple(-stride for stride in row_major(shape)),
    "mixed": lambda shape: tuple(
        -stride if axis % 2 else stride for axis, stride in enumerate(ordered(shape, reversed(range(len(shape)))))
    ),
    "stepped": lambda shape: ordered(shape, range(len(shape)), [2] * len(shape)),
    "padded_rows": lambda shape: ordered(shape, range(len(shape)), [1] * (len(shape) - 2) + [3, 1][-len(shape) :]),
    "channels_last": _channels_last,
    "unit_axes": _unit_axes,
    "broadcast": lambda shape: (0, *row_major(shape)[1:]),
}
INPUT_LAYOUTS = tuple(LAYOUTS)
OUTPUT_LAYOUTS = tuple(name for name in LAYOUTS if name != "broadcast")


def span(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int]:
    """The lowest place that the elements take, relative to the first, and one past the highest."""
    if 0 in shape:
        return 0, 0
    low = sum(min(stride, 0) * (extent - 1) for extent, stride in zip(shape, strides, strict=True))
    high = sum(max(stride, 0) * (extent - 1) for extent, stride in zip(shape, strides, strict=True))
    return low, high + 1


# ---------------------------------------------------------------------------------------------------
# Memory and views of it.

GUARD = 64


class Memory:
    """Bytes on a device, of which every one can be compared with what it was."""

    def __init__(self, data: np.ndarray, device: str) -> None:
        self.before = np.ascontiguousarray(data, np.uint8)
        self.device = device
        self.tensor = bc.asarray(self.before, device)

    def now(self) -> np.ndarray:
        return self.tensor.numpy().copy()

    def view(
        self,
        dtype: str,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None,
        offset: int = 0,
        *,
        via: str = "byte_offset",
    ) -> Any:
        """Elements at `strides`, the first at byte `offset`.

        `via` is how they are handed over: "byte_offset" or "pointer" (DLPack, where the offset goes), or
        "numpy" (an array, on the CPU only).
        """
        if via == "numpy":
            assert self.device == "cpu"
            kind = DTYPES[dtype]
            steps = row_major(shape) if strides is None else strides
            steps = tuple(step * kind.itemsize for step in steps)
            return np.ndarray(shape, kind.numpy, self.tensor.numpy(), offset, steps)
        if via == "pointer":
            return StridedView(self.tensor, dtype, shape, strides, shift=offset)
        return StridedView(self.tensor, dtype, shape, strides, byte_offset=offset)

    def assert_untouched(self) -> None:
        np.testing.assert_array_equal(self.now(), self.before, "bytes were written")


class Placed:
    """Elements with a layout, between guards, in memory of their own.

    ``tensor`` is the operand, ``numpy()`` its elements now (int4 and uint4 one to a byte), and the
    bytes around and between the elements can be checked.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: str,
        device: str,
        *,
        layout: str = "row_major",
        strides: tuple[int, ...] | None = None,
        misalign: int = 0,
        fill: int | np.random.Generator = 0xA5,
        via: str = "byte_offset",
    ) -> None:
        self.kind = DTYPES[dtype]
        self.shape = tuple(shape)
        self.strides = LAYOUTS[layout](self.shape) if strides is None else strides
        low, high = span(self.shape, self.strides)
        if self.kind.packed:
            # A pointer can't point into a byte.
            low -= low % 2
        width = self.kind.bits
        self.offset = GUARD + misalign * self.kind.alignment + -low * width // 8
        size = self.offset + -(-high * width // 8) + GUARD
        data = np.full(size, fill, np.uint8) if isinstance(fill, int) else fill.integers(0, 256, size, np.uint8)
        self._indices = self._cell_indices()
        self._data = data
        self._make(device, via)

    def _make(self, device: str, via: str) -> None:
        self.memory = Memory(self._data, device)
        name = self.kind.name
        self.tensor = self.memory.view(name, self.shape, self.strides, self.offset, via=via)

    def _cell_indices(self) -> np.ndarray:
        """For each element the places of its cells (bytes, or half bytes of packed types)."""
        width = 1 if self.kind.packed else self.kind.itemsize
        start = self.offset * 2 if self.kind.packed else self.offset
        places = np.full((1,) * len(self.shape), start, np.int64)
        for axis, (extent, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            steps = np.arange(extent, dtype=np.int64) * (0 if extent <= 1 else stride * width)
            places = places + steps.reshape([-1 if a == axis else 1 for a in range(len(self.shape))])
        return places[..., None] + np.arange(width)

    def _cells(self, data: np.ndarray) -> np.ndarray:
        if not self.kind.packed:
            return data
        return np.stack([data & 15, data >> 4], axis=1).ravel()

    def numpy(self) -> np.ndarray:
        cells = self._cells(self.memory.now())[self._indices]
        if not self.kind.packed:
            return np.ascontiguousarray(cells).reshape(-1).view(self.kind.numpy).reshape(self.shape)
        halves = cells[..., 0]
        return (halves ^ 8).astype(np.int8) - np.int8(8) if self.kind.name == "int4" else halves

    def assert_guards(self) -> None:
        """Bytes (of packed types half bytes) that belong to no element are what they were."""
        now, before = self._cells(self.memory.now()), self._cells(self.memory.before)
        outside = np.ones(now.size, bool)
        outside[self._indices.ravel()] = False
        np.testing.assert_array_equal(now[outside], before[outside], "bytes outside the elements were written")

    def assert_untouched(self) -> None:
        self.memory.assert_untouched()


class _Filled(Placed):
    """Elements with given values."""

    def __init__(self, array: np.ndarray, dtype: str, device: str, **options: Any) -> None:
        self.array = array
        super().__init__(array.shape, dtype, device, **options)

    def _make(self, device: str, via: str) -> None:
        cells = self._cells(self._data).copy()
        if self.kind.packed:
            cells[self._indices[..., 0]] = np.asarray(self.array).astype(np.int64) & 15
            self._data = cells[0::2] | cells[1::2] << 4
        else:
            values = np.ascontiguousarray(self.array, self.kind.numpy).reshape(-1).view(np.uint8)
            cells[self._indices] = values.reshape(self._indices.shape)
            self._data = cells
        super()._make(device, via)


# ---------------------------------------------------------------------------------------------------
# Frameworks.


def to_torch(array: np.ndarray, device: str = "cpu") -> Any:
    """A torch tensor with the bits of the array, ml_dtypes' types included."""
    module = torch()
    dtype = getattr(module, array.dtype.name)
    if array.size == 0:
        return module.empty(array.shape, dtype=dtype, device=device)
    data = bytearray(np.ascontiguousarray(array).tobytes())
    return module.frombuffer(data, dtype=module.uint8).clone().view(dtype).reshape(array.shape).to(device)


def from_torch(tensor: Any) -> np.ndarray:
    module = torch()
    name = str(tensor.dtype).removeprefix("torch.")
    dtype = DTYPES[name].numpy
    if tensor.numel() == 0:
        return np.empty(tuple(tensor.shape), dtype)
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    if tensor.dtype.is_complex:
        flat = module.view_as_real(flat).reshape(-1)
    return flat.view(module.uint8).numpy().view(dtype).reshape(tuple(tensor.shape)).copy()


class Backend:
    """Arrays onto a device and back."""

    def __init__(self, device: str) -> None:
        self.device = device

    @property
    def is_cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def full_name(self) -> str:
        """The device as the library names it."""
        return "cuda:0" if self.device == "cuda" else self.device

    def array(self, array: Any) -> bc.Tensor:
        """A copy as a ``baracuda.Tensor``."""
        return bc.asarray(array, self.device)

    def input(
        self,
        array: Any,
        dtype: str | None = None,
        *,
        layout: str = "row_major",
        misalign: int = 0,
        **options: Any,
    ) -> Placed:
        """Given values with a layout; `misalign` is the address modulo 64, in alignments of the dtype."""
        array = np.asarray(array)
        return _Filled(array, dtype or array.dtype.name, self.device, layout=layout, misalign=misalign, **options)

    def output(
        self,
        shape: tuple[int, ...],
        dtype: str,
        *,
        layout: str = "row_major",
        misalign: int = 0,
        **options: Any,
    ) -> Placed:
        """Poison with a layout, for what a plan must overwrite fully and keep within."""
        return Placed(shape, dtype, self.device, layout=layout, misalign=misalign, **options)

    def memory(self, data: Any) -> Memory:
        """Bytes on the device."""
        return Memory(np.asarray(data, np.uint8), self.device)

    def of(self, framework: str, array: np.ndarray) -> Any:
        """A copy as a tensor of a framework: numpy, baracuda, torch, cupy or jax."""
        if framework == "numpy":
            assert not self.is_cuda
            return np.array(array)
        if framework == "baracuda":
            return self.array(array)
        if framework == "torch":
            return to_torch(array, self.device)
        if framework == "cupy":
            assert self.is_cuda
            return cupy().asarray(array)
        assert framework == "jax"
        return jax().device_put(array, jax().devices("gpu" if self.is_cuda else "cpu")[0])

    def read(self, tensor: Any) -> np.ndarray:
        """The elements of any framework's tensor."""
        if isinstance(tensor, np.ndarray):
            return tensor.copy()
        if isinstance(tensor, (bc.Tensor, Placed)):
            return np.array(tensor.numpy())
        module = type(tensor).__module__.partition(".")[0]
        if module == "torch":
            return from_torch(tensor)
        return cupy().asnumpy(tensor) if module == "cupy" else np.array(tensor)


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Any bits at all: NaNs of every payload, infinities, subnormals. int4 and uint4 one to a byte."""
    kind = DTYPES[dtype]
    if kind.packed:
        return rng.integers(-8, 8, shape, np.int8) if dtype == "int4" else rng.integers(0, 16, shape, np.uint8)
    if dtype == "bool":
        return rng.integers(0, 2, shape, np.uint8).astype(bool)
    count = math.prod(shape)
    return rng.integers(0, 256, count * kind.itemsize, np.uint8).view(kind.numpy).reshape(shape)


def assert_same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    as_bytes = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (got, expected)]
    np.testing.assert_array_equal(*as_bytes)
