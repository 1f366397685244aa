# SPDX-License-Identifier: Apache-2.0
"""Streams and graphs of CUDA's driver, for tests that owe nothing to any framework."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import baracuda as bc

NON_BLOCKING = 1
NOT_READY = 600
#: Of stream capture. The strictest: no thread may do what could disturb a capture.
GLOBAL = 0
KERNEL_NODE = 0


@functools.cache
def _library() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuInit(0)
    return library


def call(name: str, *arguments: Any) -> None:
    """A function of the driver that must succeed."""
    library = _library()
    status = getattr(library, name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        library.cuGetErrorName(status, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'?').decode()}")


@functools.cache
def _primary_context(ordinal: int) -> ctypes.c_void_p:
    device = ctypes.c_int()
    call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
    context = ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


def enter(ordinal: int = 0) -> None:
    """Makes the context that the runtime uses, too, current in this thread."""
    call("cuCtxSetCurrent", _primary_context(ordinal))


class Stream:
    """A stream that does not wait for the legacy default stream, nor that for it."""

    def __init__(self) -> None:
        enter()
        self._handle = ctypes.c_void_p()
        call("cuStreamCreate", ctypes.byref(self._handle), ctypes.c_uint(NON_BLOCKING))

    @property
    def handle(self) -> int:
        assert self._handle.value is not None
        return self._handle.value

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)

    def synchronize(self) -> None:
        call("cuStreamSynchronize", self._handle)

    @property
    def busy(self) -> bool:
        status = _library().cuStreamQuery(self._handle)
        assert status in (0, NOT_READY)
        return bool(status == NOT_READY)

    def fill(self, address: int, value: int, count: int) -> None:
        """Bytes, in the order of the stream."""
        call("cuMemsetD8Async", ctypes.c_uint64(address), ctypes.c_ubyte(value), ctypes.c_size_t(count), self._handle)

    def occupy(self) -> None:
        """Tens of milliseconds of work."""
        scratch = _scratch()
        for _ in range(100):
            self.fill(scratch.data_ptr, 1, scratch.nbytes)

    def close(self) -> None:
        self.synchronize()
        call("cuStreamDestroy_v2", self._handle)

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        graph = Graph()
        call("cuStreamBeginCapture_v2", self._handle, ctypes.c_int(GLOBAL))
        try:
            yield graph
        except BaseException:
            _library().cuStreamEndCapture(self._handle, ctypes.byref(graph.graph))
            raise
        call("cuStreamEndCapture", self._handle, ctypes.byref(graph.graph))
        call("cuGraphInstantiateWithFlags", ctypes.byref(graph.executable), graph.graph, ctypes.c_uint64(0))


@functools.cache
def _scratch() -> bc.Tensor:
    made = bc.empty(1 << 30, "uint8", "cuda")
    bc.synchronize("cuda")
    return made


def prepare() -> None:
    """Takes what `occupy` needs."""
    _scratch()


class _KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


def plain_name(mangled: str) -> str:
    """A kernel's own name, without its namespaces and template arguments."""
    rest = mangled.removeprefix("_Z").removeprefix("N")
    name = rest
    while length := re.match(r"\d+", rest):
        end = length.end() + int(length[0])
        name, rest = rest[length.end() : end], rest[end:]
    return name


class Graph:
    """What was captured, ready to be launched."""

    def __init__(self) -> None:
        self.graph = ctypes.c_void_p()
        self.executable = ctypes.c_void_p()

    @property
    def nodes(self) -> int:
        count = ctypes.c_size_t()
        call("cuGraphGetNodes", self.graph, None, ctypes.byref(count))
        return count.value

    @property
    def kernels(self) -> list[str]:
        """The names of what is launched, in no order."""
        count = ctypes.c_size_t(self.nodes)
        nodes = (ctypes.c_void_p * count.value)()
        call("cuGraphGetNodes", self.graph, nodes, ctypes.byref(count))
        names = []
        for handle in nodes:
            node, kind = ctypes.c_void_p(handle), ctypes.c_int()
            call("cuGraphNodeGetType", node, ctypes.byref(kind))
            if kind.value != KERNEL_NODE:
                continue
            launched, name = _KernelNode(), ctypes.c_char_p()
            call("cuGraphKernelNodeGetParams_v2", node, ctypes.byref(launched))
            if launched.function:
                call("cuFuncGetName", ctypes.byref(name), ctypes.c_void_p(launched.function))
            else:
                call("cuKernelGetName", ctypes.byref(name), ctypes.c_void_p(launched.kernel))
            names.append(plain_name((name.value or b"").decode()))
        return names

    def launch(self, stream: Stream) -> None:
        call("cuGraphLaunch", self.executable, ctypes.c_void_p(stream.handle))

    def close(self) -> None:
        call("cuGraphExecDestroy", self.executable)
        call("cuGraphDestroy", self.graph)
