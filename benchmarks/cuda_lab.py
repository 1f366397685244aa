# SPDX-License-Identifier: Apache-2.0
"""A GPU as a lab.

Short operations are timed by replaying a CUDA graph of many calls, long ones by events around single
calls. Everything is enqueued without waiting in between, so that the GPU never waits for the host.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, Self

import numpy as np
from cuda.bindings import runtime as cudart

import baracuda as bc
from baracuda.dtypes import numpy_dtype
from benchmarks.harness import Array, Call, Contender, Lab
from benchmarks.peers import Peers

__all__ = ["CudaArray", "CudaLab"]

#: Operations shorter than this are timed in a graph.
GRAPH_BELOW_US = 100.0
#: What one replay of a graph should take: long against the microseconds that starting it takes.
GRAPH_US = 3000.0
MOST_NODES = 2000
#: Copies, the last of the contenders, that keep the GPU busy while the host gets ahead of it.
COVERS = 5
#: What all samples of one contender should take at most.
SAMPLING_US = 500_000.0
#: What its first round through the buffers should take at most, the very first call aside.
WARMING_S = 0.5


def check(answer: tuple[Any, ...]) -> Any:
    """The value of a call of cuda.bindings, or its error as an exception."""
    error, *values = answer
    if int(error) != 0:
        raise RuntimeError(f"{error.name}: {check(cudart.cudaGetErrorString(error)).decode()}")
    return values[0] if len(values) == 1 else values


class _StridedView:
    """Memory with strides, through the CUDA array interface."""

    def __init__(self, owner: bc.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": shape,
            "strides": strides,
            "typestr": dtype.str,
            "data": (owner.data_ptr, False),
            "stream": None,
        }


class CudaArray(Array):
    """A tensor of the library's own, perhaps with its axes in another order."""

    def __init__(self, lab: CudaLab, tensor: bc.Tensor, axes: tuple[int, ...] | None = None) -> None:
        self._lab = lab
        self._tensor = tensor
        self._axes = axes or tuple(range(len(tensor.shape)))
        self.shape = tuple(tensor.shape[axis] for axis in self._axes)
        self.dtype = tensor.dtype

    @property
    def ours(self) -> Any:
        if self._axes == tuple(range(len(self.shape))):
            return self._tensor
        dtype = numpy_dtype(self.dtype)
        # The CUDA array interface has no names for what NumPy has none for.
        return self.torch() if dtype.isbuiltin != 1 else _StridedView(self._tensor, self.shape, self._strides(), dtype)

    def _strides(self) -> tuple[int, ...]:
        size = numpy_dtype(self.dtype).itemsize
        return tuple(size * math.prod(self._tensor.shape[axis + 1 :]) for axis in self._axes)

    def numpy(self) -> Any:
        array = self._tensor.numpy()
        return array if self.dtype in ("int4", "uint4") else array.transpose(self._axes)

    def torch(self) -> Any:
        with self._lab.on_stream("torch"):
            return self._lab.peers.get("torch").from_dlpack(self._tensor).permute(self._axes)

    def cupy(self) -> Any:
        cupy = self._lab.peers.get("cupy")
        dtype = numpy_dtype(self.dtype)
        if dtype.kind == "V":
            dtype = np.dtype(f"u{dtype.itemsize}")
        memory = cupy.cuda.UnownedMemory(self._tensor.data_ptr, self._tensor.nbytes, self._tensor)
        return cupy.ndarray(self.shape, dtype, cupy.cuda.MemoryPointer(memory, 0), self._strides())

    def permute(self, *axes: int) -> CudaArray:
        return CudaArray(self._lab, self._tensor, tuple(self._axes[axis] for axis in axes))

    def bits(self) -> Any:
        size = numpy_dtype(self.dtype).itemsize
        torch = self._lab.peers.get("torch")
        if torch is not None and size <= 8:
            return self.torch().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
        return self.numpy().view(f"u{size}")


class CudaLab(Lab):
    """The current GPU, through a stream of its own."""

    device = "cuda"
    copy_unit = 2 << 20

    def __init__(self, *, quick: bool, select: Callable[[str], bool], peers: tuple[str, ...] | None = None) -> None:
        super().__init__(quick=quick, select=select)
        self.peers = Peers(cuda=True, allowed=peers)
        self._stream = check(cudart.cudaStreamCreateWithFlags(cudart.cudaStreamNonBlocking))
        self.stream = int(self._stream)
        self._index = check(cudart.cudaGetDevice())
        self._properties = check(cudart.cudaGetDeviceProperties(self._index))
        self._rng = np.random.default_rng(7)
        noise = self._rng.integers(0, 256, 32 << 20, np.uint8)
        self._noise = bc.asarray(noise, stream=self.stream)
        self._phase = 0

    @property
    def cache_bytes(self) -> int:
        return int(self._properties.l2CacheSize)

    @property
    def memory_budget(self) -> int:
        free, _ = check(cudart.cudaMemGetInfo())
        return int(free // 4)

    def describe(self) -> dict[str, Any]:
        version = check(cudart.cudaDriverGetVersion())
        return {
            "card": self._properties.name.partition(b"\0")[0].decode(),
            "driver": _driver(),
            "cuda": f"{version // 1000}.{version % 1000 // 10}",
            "compute_capability": f"{self._properties.major}.{self._properties.minor}",
            "multiprocessors": self._properties.multiProcessorCount,
            "cache_bytes": self.cache_bytes,
        }

    def array(self, shape: Sequence[int], dtype: str, make: Callable[[Any, int], Any] | None = None) -> CudaArray:
        tensor = bc.empty(tuple(shape), dtype, stream=self.stream)
        if make is None:
            # Each array starts elsewhere in the noise, so that no two are alike.
            self._phase = (self._phase + (7 << 20) + 4096) % self._noise.nbytes
            self._tile(tensor, self._noise, self._phase)
        else:
            block = make(self._rng, min(math.prod(shape), 1 << 22)).astype(numpy_dtype(dtype))
            self._tile(tensor, bc.asarray(block, stream=self.stream), 0)
        return CudaArray(self, tensor)

    def _tile(self, tensor: bc.Tensor, block: bc.Tensor, phase: int) -> None:
        done = 0
        while done < tensor.nbytes:
            size = min(block.nbytes - phase, tensor.nbytes - done)
            self._copy(tensor.data_ptr + done, block.data_ptr + phase, size)
            done += size
            phase = 0

    def _copy(self, to: int, source: int, size: int) -> None:
        kind = cudart.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        check(cudart.cudaMemcpyAsync(to, source, size, kind, self._stream))

    def synchronize(self) -> None:
        check(cudart.cudaDeviceSynchronize())

    def copies(self, size: int, count: int) -> Sequence[Call]:
        pairs = [(self.array((size,), "uint8"), self.array((size,), "uint8")) for _ in range(count)]
        return [_Copy(self, to.ours, source.ours) for to, source in pairs]

    def on_stream(self, framework: str) -> AbstractContextManager[Any]:
        current: AbstractContextManager[Any] = nullcontext()
        if framework in ("torch", "torchvision"):
            torch = self.peers.get("torch")
            current = torch.cuda.stream(torch.cuda.ExternalStream(self.stream))
        elif framework == "cupy":
            current = self.peers.get("cupy").cuda.ExternalStream(self.stream, self._index)
        return current

    def _warm(self, calls: Sequence[Call]) -> Sequence[Call]:
        """Calls each of them, and returns those that were called: at least two, for a slow one not all.

        What the cache saves a slow call doesn't show.
        """
        calls[0]()  # may compile
        self.synchronize()
        start = time.perf_counter()
        for count, call in enumerate(calls[1:], 2):
            call()
            self.synchronize()
            if time.perf_counter() - start > WARMING_S:
                return calls[:count]
        return calls

    def prepare(self, contender: Contender) -> None:
        with self.on_stream(contender.framework):
            calls = contender.calls = self._warm(contender.calls)
            if contender.wait is not None:
                contender.timer = "host"
                contender.wait()
                start = time.perf_counter()
                for call in calls:
                    call()
                contender.wait()
                each = (time.perf_counter() - start) * 1e6 / len(calls)
                nodes = max(1, math.ceil(GRAPH_US / each))
                contender.plan = _Plan(each * nodes, nodes, calls)
                return
            with _Events(self._stream) as events:
                events.start()
                for call in calls:
                    call()
                events.stop()
                each = events.microseconds()[0] / len(calls)
            if each < GRAPH_BELOW_US:
                nodes = min(MOST_NODES, math.ceil(GRAPH_US / max(each, 0.5)))
                nodes = math.ceil(nodes / len(calls)) * len(calls)
                contender.timer = "graph"
                replay = self._capture(contender, nodes)
                replay()
                self.synchronize()
                contender.plan = _Plan(each * nodes, nodes, [replay])
            else:
                contender.timer = "events"
                contender.plan = _Plan(each, 1, calls)

    def _capture(self, contender: Contender, nodes: int) -> Call:
        chosen = itertools.islice(itertools.cycle(contender.calls), nodes)
        # Other threads of the frameworks may allocate meanwhile; that is none of this capture's business.
        if contender.framework in ("torch", "torchvision"):
            # By torch's own means: its allocator must know of the capture.
            graph = self.peers.get("torch").cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for call in chosen:
                    call()
            finally:
                graph.capture_end()
            replay: Call = graph.replay
            return replay
        mode = cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        check(cudart.cudaStreamBeginCapture(self._stream, mode))
        try:
            for call in chosen:
                call()
        finally:
            answer = cudart.cudaStreamEndCapture(self._stream)
        return _Graph(check(answer), self._stream)

    def sample(self, contenders: Sequence[Contender]) -> None:
        most = 5 if self.quick else 25
        rounds = {c.name: int(max(3, min(most, SAMPLING_US // max(1.0, c.plan.us)))) for c in contenders}
        on_host = [contender for contender in contenders if contender.timer == "host"]
        on_device = [contender for contender in contenders if contender.timer != "host"]
        recorded: list[tuple[Contender, _Events]] = []
        with ExitStack() as stack:
            for number in range(max(rounds.values())):
                for contender in on_host:
                    if number < rounds[contender.name]:
                        self.synchronize()
                        contender.samples.append(self._host_sample(contender))
                if on_host or number == 0:
                    # On an idle GPU the first samples would hold the time that the host takes to start them.
                    copy = contenders[-1].plan
                    for launch in itertools.islice(itertools.cycle(copy.launches), COVERS):
                        launch()
                for contender in on_device:
                    if number < rounds[contender.name]:
                        events = stack.enter_context(_Events(self._stream))
                        self._device_sample(contender, number, events)
                        recorded.append((contender, events))
            self.synchronize()
            for contender, events in recorded:
                contender.samples += [us / contender.plan.inner for us in events.microseconds()]
        for contender in contenders:
            contender.plan = None
        gc.collect()

    def _device_sample(self, contender: Contender, number: int, events: _Events) -> None:
        launches = contender.plan.launches
        with self.on_stream(contender.framework):
            events.start()
            launches[number % len(launches)]()
            events.stop()

    def _host_sample(self, contender: Contender) -> float:
        plan: _Plan = contender.plan
        assert contender.wait is not None
        start = time.perf_counter()
        for call in itertools.islice(itertools.cycle(plan.launches), plan.inner):
            call()
        contender.wait()
        return (time.perf_counter() - start) * 1e6 / plan.inner


class _Copy:
    def __init__(self, lab: CudaLab, to: bc.Tensor, source: bc.Tensor) -> None:
        self._lab, self._to, self._source = lab, to, source

    def __call__(self) -> None:
        self._lab._copy(self._to.data_ptr, self._source.data_ptr, self._to.nbytes)


class _Plan:
    """How a contender is sampled: `launches` in turn, each of `inner` calls, about `us` long."""

    def __init__(self, us: float, inner: int, launches: Sequence[Call]) -> None:
        self.us, self.inner, self.launches = us, inner, launches


class _Graph:
    def __init__(self, graph: Any, stream: Any) -> None:
        self._stream = stream
        self._executable = check(cudart.cudaGraphInstantiate(graph, 0))
        check(cudart.cudaGraphDestroy(graph))

    def __call__(self) -> None:
        check(cudart.cudaGraphLaunch(self._executable, self._stream))

    def __del__(self) -> None:
        cudart.cudaGraphExecDestroy(self._executable)


class _Events:
    """A pair of events on a stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._events: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def _record(self) -> None:
        event = check(cudart.cudaEventCreate())
        self._events.append(event)
        check(cudart.cudaEventRecord(event, self._stream))

    start = stop = _record

    def microseconds(self) -> list[float]:
        """Between each start and its stop, once they are done."""
        check(cudart.cudaEventSynchronize(self._events[-1]))
        pairs = zip(self._events[0::2], self._events[1::2], strict=True)
        return [1e3 * check(cudart.cudaEventElapsedTime(start, stop)) for start, stop in pairs]

    def __exit__(self, *_: object) -> None:
        for event in self._events:
            cudart.cudaEventDestroy(event)


@functools.cache
def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError):
        try:
            return Path("/sys/module/nvidia/version").read_text().strip()
        except OSError:
            return None
