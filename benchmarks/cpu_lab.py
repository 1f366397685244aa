# SPDX-License-Identifier: Apache-2.0
"""The CPU as a lab: there to run every benchmark anywhere, with NumPy as the copy and as a peer."""

from __future__ import annotations

import itertools
import math
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from baracuda.dtypes import numpy_dtype
from benchmarks.harness import Array, Call, Contender, Lab
from benchmarks.peers import Peers

__all__ = ["CpuArray", "CpuLab"]


class CpuArray(Array):
    """A NumPy array; int4 and uint4 as their packed bytes."""

    def __init__(self, array: Any, shape: tuple[int, ...], dtype: str, torch: Any) -> None:
        self._array = array
        self._torch = torch
        self.shape = shape
        self.dtype = dtype

    @property
    def ours(self) -> Any:
        return self._array

    def numpy(self) -> Any:
        return self._array

    def torch(self) -> Any:
        if self.dtype == "bfloat16":
            return self._torch.from_numpy(self._array.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_numpy(self._array)

    def cupy(self) -> Any:
        raise NotImplementedError("CuPy has no arrays on the CPU")

    def permute(self, *axes: int) -> CpuArray:
        shape = tuple(self.shape[axis] for axis in axes)
        return CpuArray(self._array.transpose(axes), shape, self.dtype, self._torch)

    def bits(self) -> Any:
        return self._array.view(f"u{self._array.itemsize}")


class CpuLab(Lab):
    """Times by the host's clock, over enough calls for the clock not to matter."""

    device = "cpu"
    stream = 0
    copy_unit = 64

    def __init__(self, *, quick: bool, select: Callable[[str], bool], peers: tuple[str, ...] | None = None) -> None:
        super().__init__(quick=quick, select=select)
        self.peers = Peers(cuda=False, allowed=peers)
        self._rng = np.random.default_rng(7)

    @property
    def cache_bytes(self) -> int:
        # Of an L3 that other machines share it is anyone's guess how much is ours.
        return 32 << 10 if self.quick else 4 << 20

    @property
    def memory_budget(self) -> int:
        return 1 << 30

    def describe(self) -> dict[str, Any]:
        return {"card": "CPU", "driver": None, "cuda": None, "processor": _processor()}

    def array(self, shape: Sequence[int], dtype: str, make: Callable[[Any, int], Any] | None = None) -> CpuArray:
        shape = tuple(shape)
        count = math.prod(shape)
        if dtype in ("int4", "uint4"):
            array = self._rng.integers(0, 256, (count + 1) // 2, np.uint8)
        elif make is not None:
            array = np.resize(make(self._rng, min(count, 1 << 22)), shape).astype(numpy_dtype(dtype))
        else:
            kind = numpy_dtype(dtype)
            array = self._rng.integers(0, 256, count * kind.itemsize, np.uint8).view(kind).reshape(shape)
        return CpuArray(array, shape, dtype, self.peers.get("torch"))

    def synchronize(self) -> None:
        """Nothing is ever pending."""

    def copies(self, size: int, count: int) -> Sequence[Call]:
        return [_copy(np.full(size, 3, np.uint8), np.full(size, 5, np.uint8)) for _ in range(count)]

    def prepare(self, contender: Contender) -> None:
        contender.timer = "host"
        for call in contender.calls:
            call()

    def sample(self, contenders: Sequence[Contender]) -> None:
        rounds, least = (3, 1e-4) if self.quick else (15, 2e-3)
        loops = {}
        for contender in contenders:
            elapsed = max(1e-7, _time(contender.calls, len(contender.calls)) / len(contender.calls))
            loops[contender.name] = max(1, math.ceil(least / elapsed))
        for _ in range(rounds):
            for contender in contenders:
                loop = loops[contender.name]
                contender.samples.append(_time(contender.calls, loop) / loop * 1e6)


def _copy(to: Any, source: Any) -> Call:
    return lambda: np.copyto(to, source)


def _time(calls: Sequence[Call], count: int) -> float:
    chosen = list(itertools.islice(itertools.cycle(calls), count))
    start = time.perf_counter()
    for call in chosen:
        call()
    return time.perf_counter() - start


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
