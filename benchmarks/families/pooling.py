# SPDX-License-Identifier: Apache-2.0
"""Fractional max pooling, forward with indices and backward from them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

import baracuda as bc
from baracuda.dtypes import numpy_dtype
from benchmarks.harness import Array, Calls, Case, Contenders, Lab

__all__ = ["rows"]

PLANS = {
    2: (bc.FractionalMaxPool2dPlan, bc.FractionalMaxPool2dBackwardPlan),
    3: (bc.FractionalMaxPool3dPlan, bc.FractionalMaxPool3dBackwardPlan),
}


def rows(lab: Lab) -> Iterable[dict[str, Any]]:
    """The rows of the family."""
    for pool in _pools(lab):
        yield from lab.measure(pool.case("fw"))
        yield from lab.measure(pool.case("bw"))


def _pools(lab: Lab) -> Iterable[_Pool]:
    flat, solid = ((16, 64, 256), (4, 32, 64)) if lab.device == "cuda" else ((2, 8, 96), (1, 4, 24))
    if lab.quick:
        flat, solid = (1, 2, 32), (1, 2, 12)
    make = functools.partial(_Pool, lab)
    for dtype in ("float32", "float16", "bfloat16", "float64"):
        yield make(2, flat, _out(flat, 0.7071), dtype)
        yield make(3, solid, _out(solid, 0.7071), dtype)
    for dtype in ("float32", "float16"):
        yield make(2, flat, _out(flat, 0.7071), dtype, note="int32 indices", index_dtype="int32")
        yield make(3, solid, _out(solid, 0.7071), dtype, note="int32 indices", index_dtype="int32")
    for dtype in ("float32", "bfloat16"):
        yield make(2, flat, _out(flat, 0.7071), dtype, note="channels last", channels_last=True)
        yield make(3, solid, _out(solid, 0.7071), dtype, note="channels last", channels_last=True)
        yield make(2, flat, _out(flat, 0.7071), dtype, note="window 3", window=3)
        yield make(3, solid, _out(solid, 0.7071), dtype, note="window 3", window=3)
    yield make(2, flat, _out(flat, 0.7071), "float32", note="placement torch", placement="torch")
    for ratio in (0.5, 0.6, 0.8, 0.9):
        yield make(2, flat, _out(flat, ratio), "float32", note=f"ratio {ratio}")


def _out(shape: tuple[int, int, int], ratio: float) -> int:
    return int(shape[2] * ratio)


@dataclass
class _Buffers:
    x: Array
    samples: Array
    y: Array
    indices: Array
    dx: Array


@dataclass
class _Pool:
    lab: Lab
    rank: int
    #: Batch, channels, and the extent of every axis.
    shape: tuple[int, int, int]
    out: int
    dtype: str
    window: int = 2
    index_dtype: str = "int64"
    placement: str = "even"
    channels_last: bool = False
    note: str = ""

    @property
    def in_shape(self) -> tuple[int, ...]:
        return (*self.shape[:2], *(self.shape[2],) * self.rank)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.shape[:2], *(self.out,) * self.rank)

    @property
    def fields(self) -> dict[str, Any]:
        axes = "dhw"[-self.rank :]
        return {
            "batch": self.shape[0],
            "channels": self.shape[1],
            **{f"{axis}_in": self.shape[2] for axis in axes},
            **{f"window_{axis}": self.window for axis in axes},
            **{f"{axis}_out": self.out for axis in axes},
            "dtype": self.dtype,
            "index_dtype": self.index_dtype,
            "index_base": "plane",
            "placement": self.placement,
            "device": self.lab.device,
        }

    def case(self, direction: str) -> Case:
        element = numpy_dtype(self.dtype).itemsize
        inputs, outputs = math.prod(self.in_shape), math.prod(self.out_shape)
        moved = inputs * element + outputs * (element + numpy_dtype(self.index_dtype).itemsize)
        name = str((*self.shape, self.out))
        build = self.build_forward if direction == "fw" else self.build_backward
        return Case(
            f"fmp{self.rank}d {direction}", name, self.dtype, self.note, moved, build,
            footprint=moved + inputs * element,
        )  # fmt: skip

    def array(self, shape: tuple[int, ...], dtype: str, make: Any = None) -> Array:
        if not self.channels_last:
            return self.lab.array(shape, dtype, make)
        stored = self.lab.array((shape[0], *shape[2:], shape[1]), dtype, make)
        return stored.permute(0, self.rank + 1, *range(1, self.rank + 1))

    def buffers(self) -> _Buffers:
        def normal(rng: Any, count: int) -> Any:
            return rng.standard_normal(count, np.float32).astype(numpy_dtype(self.dtype))

        def uniform(rng: Any, count: int) -> Any:
            return rng.random(count, np.float32)

        return _Buffers(
            x=self.array(self.in_shape, self.dtype, normal),
            samples=self.lab.array((*self.shape[:2], self.rank), "float32", uniform),
            # Random bits would be gradients that are no numbers.
            y=self.array(self.out_shape, self.dtype, normal),
            indices=self.array(self.out_shape, self.index_dtype),
            dx=self.array(self.in_shape, self.dtype),
        )

    def build_forward(self, count: int) -> Contenders:
        sets = [self.buffers() for _ in range(count)]
        plan = PLANS[self.rank][0](**self.fields)
        bound = [self.bind_forward(plan, one) for one in sets]
        return Contenders(
            ours=[functools.partial(one.run, self.lab.stream) for one in bound],
            peers=self.peers(sets, self.torch_forward),
            verify=functools.partial(self.verify_forward, sets[-1]),
            extra={"path": plan.path, "arch": plan.sku.arch},
        )

    @staticmethod
    def bind_forward(plan: bc.Plan, one: _Buffers) -> bc.BoundPlan:
        return plan.bind(x=one.x.ours, random_samples=one.samples.ours, y=one.y.ours, indices=one.indices.ours)

    def build_backward(self, count: int) -> Contenders:
        sets = [self.buffers() for _ in range(count)]
        forward = PLANS[self.rank][0](**self.fields)
        for one in sets:
            # Its maxima are as good as gradients as any numbers.
            self.bind_forward(forward, one).run(self.lab.stream)
        plan = PLANS[self.rank][1](**self.fields)
        bound = [plan.bind(dy=one.y.ours, indices=one.indices.ours, dx=one.dx.ours) for one in sets]
        return Contenders(
            ours=[functools.partial(one.run, self.lab.stream) for one in bound],
            peers=self.peers(sets, self.torch_backward),
            verify=functools.partial(self.verify_backward, sets[-1]),
            extra={"path": plan.path, "arch": plan.sku.arch},
        )

    def verify_forward(self, one: _Buffers) -> None:
        """Each value is the one that its index names, and columns go no further back than a window's width."""
        x, y, indices = (array.numpy()[-1, -1] for array in (one.x, one.y, one.indices))
        if not np.array_equal(x.reshape(-1)[indices.reshape(-1)], y.reshape(-1)):
            raise AssertionError(f"fmp{self.rank}d fw {self.dtype} {self.note}: values are not where indices say")
        if not (np.diff(indices % self.shape[2], axis=-1) > -self.window).all():
            raise AssertionError(f"fmp{self.rank}d fw {self.dtype} {self.note}: indices are out of order")

    def verify_backward(self, one: _Buffers) -> None:
        dy, dx, indices = (array.numpy()[-1, -1] for array in (one.y, one.dx, one.indices))
        real = np.float64 if self.dtype == "float64" else np.float32
        expected = np.zeros(dx.size, real)
        np.add.at(expected, indices.reshape(-1), dy.reshape(-1).astype(real))
        if not np.array_equal(expected.astype(dx.dtype), dx.reshape(-1)):
            raise AssertionError(f"fmp{self.rank}d bw {self.dtype} {self.note}: wrong sums")

    def peers(
        self, sets: list[_Buffers], make: Callable[[_Buffers], Callable[[], object]]
    ) -> dict[str, Callable[[], Calls]]:
        # PyTorch has int64 indices only.
        if self.lab.peers.get("torch") is None or self.index_dtype != "int64":
            return {}
        return {"torch": lambda: [make(one) for one in sets]}

    def torch_forward(self, one: _Buffers) -> Callable[[], object]:
        torch = self.lab.peers.get("torch")
        pool = getattr(torch.nn.functional, f"fractional_max_pool{self.rank}d")
        x = one.x.torch()
        samples = one.samples.torch().to(x.dtype)
        out = (self.out,) * self.rank
        return lambda: pool(x, self.window, output_size=out, return_indices=True, _random_samples=samples)

    def torch_backward(self, one: _Buffers) -> Callable[[], object]:
        torch = self.lab.peers.get("torch")
        pool = getattr(torch.ops.aten, f"fractional_max_pool{self.rank}d_backward")
        dy, x, indices = one.y.torch(), one.x.torch(), one.indices.torch()
        window, out = [self.window] * self.rank, [self.out] * self.rank
        return lambda: pool(dy, x, window, out, indices)
