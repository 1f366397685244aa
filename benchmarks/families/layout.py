# SPDX-License-Identifier: Apache-2.0
"""Writing a block into a tensor in place."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

import baracuda as bc
from baracuda.dtypes import numpy_dtype
from benchmarks.harness import Array, Calls, Case, Contenders, HostTimed, Lab

__all__ = ["rows"]

#: Windows of more elements are not compared where that takes a copy to the host.
MOST_ON_HOST = 1 << 24


def rows(lab: Lab) -> Iterable[dict[str, Any]]:
    """The rows of the family."""
    for write in _writes(lab):
        yield from lab.measure(write.case())


def _writes(lab: Lab) -> Iterable[_Write]:
    # The destination is twice the block on each axis; 1001 and 1003 are odd and share no alignment.
    block, odd = (4096, (1001, 1003)) if lab.device == "cuda" else (1024, (251, 253))
    cache, position, steps = ((16, 32, 8192, 128), 4097, 64) if lab.device == "cuda" else ((2, 8, 1024, 128), 513, 64)
    images = (32, 256, 112, 112) if lab.device == "cuda" else (4, 64, 56, 56)
    if lab.quick:
        block, odd, cache, position, steps = 128, (33, 35), (2, 4, 256, 64), 129, 16
        images = (2, 16, 14, 14)
    square = (2 * block, 2 * block)
    aligned = (block // 4, block // 4)

    for dtype in ("float32", "bfloat16", "int8", "int4"):
        for note, start in (("odd offsets", odd), ("aligned", aligned)):
            ranges = tuple((at, at + block) for at in start)
            yield _Write(lab, "block", f"({2 * block}, {block})", dtype, note, square, ranges)
    for dtype in ("float32", "bfloat16", "int8", "int4"):
        ranges = (*((0, extent) for extent in cache[:2]), (position, position + steps), (0, cache[3]))
        yield _Write(lab, "kv64", str(cache), dtype, "", cache, ranges)
    for dtype in ("float32", "int8"):
        whole = (block, block)
        yield _Write(lab, "whole", str(whole), dtype, "", whole, ((0, block), (0, block)))
        chunk = (2 * block, block)
        ranges = ((odd[0], odd[0] + block), (0, block))
        yield _Write(lab, "chunk", str(chunk), dtype, "odd offsets", chunk, ranges)
    for dtype in ("float32", "float16", "int8"):
        ranges = tuple((at, at + block) for at in aligned)
        yield _Write(
            lab, "transposed", f"({2 * block}, {block})", dtype, "source.T", square, ranges, source_axes=(1, 0)
        )
    for dtype in ("float32", "float16"):
        # Stored N, H, W, C, seen as N, C, H, W.
        n, c, h, w = images
        ranges = tuple((0, extent) for extent in images)
        stored = (n, h, w, c)
        yield _Write(lab, "channels_last", str(images), dtype, "dest NHWC", stored, ranges, dest_axes=(0, 3, 1, 2))


@dataclass
class _Write:
    lab: Lab
    kind: str
    shape: str
    dtype: str
    note: str
    #: As stored; the axes say in which order they are seen.
    dest_shape: tuple[int, ...]
    #: Of the destination as it is seen.
    ranges: tuple[tuple[int, int], ...]
    dest_axes: tuple[int, ...] | None = None
    source_axes: tuple[int, ...] | None = None

    @property
    def extents(self) -> tuple[int, ...]:
        return tuple(end - start for start, end in self.ranges)

    @property
    def window(self) -> tuple[slice, ...]:
        return tuple(slice(start, end) for start, end in self.ranges)

    def case(self) -> Case:
        bits = 4 if self.dtype == "int4" else 8 * numpy_dtype(self.dtype).itemsize
        moved = math.prod(self.extents) * bits // 8
        held = math.prod(self.dest_shape) * bits // 8 + moved
        op = f"write_slice {self.kind}"
        return Case(op, self.shape, self.dtype, self.note, 2 * moved, self.build, footprint=held)

    def build(self, count: int) -> Contenders:
        pairs = [(self.dest(), self.source()) for _ in range(count)]
        plan = bc.WriteSlicePlan(
            dest_shape=pairs[0][0].shape, ranges=self.ranges, dtype=self.dtype, device=self.lab.device
        )
        bound = [plan.bind(dest=dest.ours, source=source.ours) for dest, source in pairs]
        return Contenders(
            ours=[functools.partial(one.run, self.lab.stream) for one in bound],
            peers=self.peers(pairs),
            verify=functools.partial(self.verify, *pairs[-1]),
            extra={"path": plan.path, "backend": plan.sku.backend, "arch": plan.sku.arch},
        )

    def dest(self) -> Array:
        dest = self.lab.array(self.dest_shape, self.dtype)
        return dest if self.dest_axes is None else dest.permute(*self.dest_axes)

    def source(self) -> Array:
        if self.source_axes is None:
            return self.lab.array(self.extents, self.dtype)
        stored = [0] * len(self.extents)
        for seen, axis in enumerate(self.source_axes):
            stored[axis] = self.extents[seen]
        return self.lab.array(stored, self.dtype).permute(*self.source_axes)

    def verify(self, dest: Array, source: Array) -> None:
        if self.dtype == "int4":
            if math.prod(dest.shape) > MOST_ON_HOST:
                return
            written = bc.unpack_int4(dest.numpy(), dest.shape)[self.window]
            same = np.array_equal(written, bc.unpack_int4(source.numpy(), source.shape))
        else:
            same = bool((dest.bits()[self.window] == source.bits()).all())
        if not same:
            raise AssertionError(f"write_slice {self.kind} {self.dtype} {self.note}: the window is not the source")

    def peers(self, pairs: list[tuple[Array, Array]]) -> dict[str, Callable[[], Calls]]:
        if self.dtype == "int4":
            return {}
        makers: dict[str, Callable[[], Calls]] = {}
        if self.lab.device == "cpu":
            makers["numpy"] = lambda: [_numpy(dest.numpy()[self.window], source.numpy()) for dest, source in pairs]
        if self.lab.peers.get("torch") is not None:
            makers["torch"] = lambda: [_torch(dest.torch()[self.window], source.torch()) for dest, source in pairs]
        if self.lab.device == "cuda":
            if self.lab.peers.get("cupy") is not None:
                makers["cupy"] = lambda: [_cupy(dest.cupy()[self.window], source.cupy()) for dest, source in pairs]
            if self.dest_axes is None and self.source_axes is None and self.lab.peers.get("jax") is not None:
                makers["jax"] = lambda: self.jax(len(pairs))
        return makers

    def jax(self, count: int) -> HostTimed:
        """Updates in place, through donated buffers of its own."""
        jax = self.lab.peers.get("jax")
        starts = tuple(start for start, _ in self.ranges)
        update = jax.jit(lambda dest, source: jax.lax.dynamic_update_slice(dest, source, starts), donate_argnums=0)
        dtype = numpy_dtype(self.dtype)
        unsigned = np.dtype(f"u{dtype.itemsize}")

        def random(seed: int, shape: tuple[int, ...]) -> Any:
            drawn = jax.random.bits(jax.random.key(seed), shape, unsigned)
            return jax.lax.bitcast_convert_type(drawn, dtype)

        sources = [random(index, self.extents) for index in range(count)]
        dests = [random(count + index, self.dest_shape) for index in range(count)]

        def call(index: int) -> None:
            dests[index] = update(dests[index], sources[index])

        calls = [functools.partial(call, index) for index in range(count)]
        return HostTimed(calls, lambda: jax.block_until_ready(dests))


def _numpy(window: Any, source: Any) -> Callable[[], object]:
    return lambda: np.copyto(window, source)


def _torch(window: Any, source: Any) -> Callable[[], object]:
    return lambda: window.copy_(source)


def _cupy(window: Any, source: Any) -> Callable[[], object]:
    def call() -> None:
        window[...] = source

    return call
