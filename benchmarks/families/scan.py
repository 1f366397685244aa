# SPDX-License-Identifier: Apache-2.0
"""Prefix scans along one axis and their gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import baracuda as bc
from baracuda.dtypes import numpy_dtype
from benchmarks.harness import Array, Calls, Case, Contenders, HostTimed, Lab

__all__ = ["rows"]

#: Random numbers of an array, which repeats them: drawing more takes the host longer than timing does.
DRAWN = 1 << 20
EXTREMA = ("cummax", "cummin")
UFUNCS: dict[str, np.ufunc] = {
    "cumsum": np.add,
    "cumprod": np.multiply,
    "cummax": np.maximum,
    "cummin": np.minimum,
    "logcumsumexp": np.logaddexp,
}


def rows(lab: Lab) -> Iterable[dict[str, Any]]:
    """The rows of the family."""
    for scan in _scans(lab):
        yield from lab.measure(scan.case())


def _scans(lab: Lab) -> Iterable[_Scan]:
    small = lab.quick or lab.device == "cpu"
    # Rows that a block holds, columns, few long rows, one row, short rows, and an axis in the middle.
    shapes = [
        ((16384, 4096), 1),
        ((4096, 16384), 0),
        ((64, 1 << 20), 1),
        ((1, 1 << 26), 1),
        ((1 << 20, 64), 1),
        ((32, 1024, 2048), 1),
    ]
    if small:
        # Each as many times smaller, whichever its rank.
        shapes = [
            (tuple(max(1, extent >> (8 // sum(other > 1 for other in shape))) for extent in shape), axis)
            for shape, axis in shapes
        ]
    for shape, axis in shapes:
        for dtype in ("float32", "bfloat16"):
            for kind in ("cumsum", "cumprod", "cummax", "logcumsumexp"):
                yield _Scan(lab, kind, shape, axis, dtype)
                yield _Scan(lab, kind, shape, axis, dtype, backward=True)
    for dtype in ("float16", "float64", "int64"):
        for shape, axis in shapes:
            yield _Scan(lab, "cumsum", shape, axis, dtype)
    for shape, axis in shapes:
        yield _Scan(lab, "cumsum", shape, axis, "float32", fields={"reverse": True})
        yield _Scan(lab, "cumsum", shape, axis, "float32", fields={"exclusive": True})
        yield _Scan(lab, "cummax", shape, axis, "float32", fields={"indices": True})
    sequence = (2, 256, 128) if small else (8, 4096, 2048)
    for dtype in ("float32", "bfloat16"):
        yield _Scan(lab, "linear_recurrence", sequence, 1, dtype)
        yield _Scan(lab, "linear_recurrence", sequence, 1, dtype, backward=True)
    for length in (64, 256, 1024, 4096):
        for kind in ("cumsum", "logcumsumexp"):
            yield _Scan(lab, kind, (length,), 0, "float32")
            yield _Scan(lab, kind, (length,), 0, "float32", backward=True)


def _small_numbers(rng: Any, count: int) -> Any:
    # Each beside its opposite, so that sums of the array's repetitions stay within float16.
    half = rng.normal(size=(count + 1) // 2).astype(np.float32)
    return np.concatenate((half, -half))[:count]


def _near_one(rng: Any, count: int) -> Any:
    return rng.uniform(0.9, 1.1, count).astype(np.float32)


def _below_one(rng: Any, count: int) -> Any:
    return rng.uniform(-1, 1, count).astype(np.float32)


@dataclass
class _Scan:
    lab: Lab
    kind: str
    shape: tuple[int, ...]
    axis: int
    dtype: str
    backward: bool = False
    fields: dict[str, Any] = field(default_factory=dict)
    saved: dict[str, Array] = field(default_factory=dict)

    def case(self) -> Case:
        op = f"{self.kind} {'bw' if self.backward else 'fw'}"
        note = ", ".join((f"axis={self.axis}", *self.fields))
        return Case(op, str(self.shape), self.dtype, note, self.plan(self.lab.device).cost.bytes, self.build)

    def plan(self, device: str) -> Any:
        common = {"kind": self.kind, "shape": self.shape, "axis": self.axis, "dtype": self.dtype, "device": device}
        return bc.ScanBackwardPlan(**common) if self.backward else bc.ScanPlan(**common, **self.fields)

    def array(self, make: Callable[[Any, int], Any] = _small_numbers) -> Array:
        dtype = numpy_dtype(self.dtype)

        def repeated(rng: Any, count: int) -> Any:
            return np.resize(make(rng, min(count, DRAWN)).astype(dtype), count)

        return self.lab.array(self.shape, self.dtype, repeated)

    def build(self, count: int) -> Contenders:
        plan = self.plan(self.lab.device)
        sets = [self.operands(plan) for _ in range(count)]
        bound = [plan.bind(**{name: array.ours for name, array in arrays.items()}) for arrays in sets]
        return Contenders(
            ours=[functools.partial(one.run, self.lab.stream) for one in bound],
            peers=self.peers(sets),
            verify=functools.partial(self.verify, sets[-1]),
            extra={"path": plan.path, "workspace": plan.workspace_size, "arch": plan.sku.arch},
        )

    def operands(self, plan: Any) -> dict[str, Array]:
        """Inputs with values that make sense to each other; outputs with random bits."""
        first = {"cumprod": _near_one, "linear_recurrence": _below_one}.get(self.kind, _small_numbers)
        arrays: dict[str, Array] = {}
        if self.backward and self.kind != "cumsum":
            forward = bc.ScanPlan(
                kind=self.kind, shape=self.shape, axis=self.axis, dtype=self.dtype, device=self.lab.device
            )
            for operand in forward.operands:
                arrays[operand.name] = self.array(first if operand.name in ("x", "a") else _small_numbers)
            forward.run(stream=self.lab.stream, **{name: array.ours for name, array in arrays.items()})
        for operand in plan.operands:
            if operand.name in arrays:
                continue
            if operand.role == "in":
                arrays[operand.name] = self.array(first if operand.name in ("x", "a") else _small_numbers)
            else:
                arrays[operand.name] = self.lab.array(operand.shape, operand.dtype)
        # What the forward scan had besides is kept: peers differentiate from it.
        self.saved = {name: array for name, array in arrays.items() if name in ("x", "a", "b")}
        return {operand.name: arrays[operand.name] for operand in plan.operands}

    def verify(self, arrays: dict[str, Array]) -> None:
        """The first and the last line along the axis, against float64."""
        if self.backward or self.kind not in UFUNCS:
            return
        lines = [np.moveaxis(arrays[name].numpy(), self.axis, -1) for name in ("x", "y")]
        # Of one line, the first is the last.
        for pick in (0, -1)[: math.prod(lines[0].shape[:-1])]:
            x, y = (array[(pick,) * (array.ndim - 1)].astype(np.float64) for array in lines)
            if self.fields.get("reverse"):
                x, y = x[::-1], y[::-1]
            with np.errstate(all="ignore"):
                expected = UFUNCS[self.kind].accumulate(x)
                scale = np.add.accumulate(np.abs(x)) if self.kind == "cumsum" else np.abs(expected) + 1
            if self.fields.get("exclusive"):
                expected, y, scale = expected[:-1], y[1:], scale[:-1]
            tolerance = max(1e-3, 2e-8 * len(x)) if self.dtype in ("float32", "float64", "int64") else 2e-2
            if not (np.abs(y - expected) <= tolerance * scale).all():
                raise AssertionError(f"{self.kind} {self.dtype} {self.shape}: a line is wrong")

    def peers(self, sets: list[dict[str, Array]]) -> dict[str, Callable[[], Calls]]:
        makers: dict[str, Callable[[], Calls]] = {}
        torch = self.lab.peers.get("torch")
        if torch is not None and not self.fields.get("exclusive"):
            makers["torch"] = lambda: [self.torch(torch, arrays) for arrays in sets]
        jax = self.lab.peers.get("jax") if self.lab.device == "cuda" else None
        # JAX's extrema come without indices.
        if jax is not None and not self.backward and self.dtype != "int64" and not self.fields.get("indices"):
            makers["jax"] = lambda: self.jax(jax, sets)
        return makers

    def torch(self, torch: Any, arrays: dict[str, Array]) -> Callable[[], object]:
        if self.kind == "linear_recurrence":
            return self.torch_recurrence(torch, arrays)
        function = getattr(torch, self.kind)
        if self.backward:
            leaf = (self.saved["x"] if "x" in self.saved else self.array()).torch().detach().requires_grad_()
            y = function(leaf, self.axis)
            y = y.values if self.kind in EXTREMA else y
            dy = arrays["dy"].torch()
            return lambda: torch.autograd.grad(y, leaf, dy, retain_graph=True)
        x = arrays["x"].torch()
        if self.fields.get("reverse"):
            return lambda: function(x.flip(self.axis), self.axis).flip(self.axis)
        return lambda: function(x, self.axis)

    def torch_recurrence(self, torch: Any, arrays: dict[str, Array]) -> Callable[[], object]:
        """Doubling: log2(length) steps over whole tensors, no loop over elements."""
        axis, length = self.axis, self.shape[self.axis]

        def scan(a: Any, b: Any) -> Any:
            step = 1
            while step < length:
                head, a_head = b.narrow(axis, 0, step), a.narrow(axis, 0, step)
                a_on, b_on = a.narrow(axis, step, length - step), b.narrow(axis, step, length - step)
                b = torch.cat((head, a_on * b.narrow(axis, 0, length - step) + b_on), axis)
                a = torch.cat((a_head, a_on * a.narrow(axis, 0, length - step)), axis)
                step *= 2
            return b

        if not self.backward:
            a, b = arrays["a"].torch(), arrays["b"].torch()
            return lambda: scan(a, b)
        a, h, dh = (arrays[name].torch() for name in ("a", "h", "dh"))

        def gradient() -> Any:
            # S_j = dh_j + a_{j+1} S_{j+1}
            onward = torch.cat((a.narrow(axis, 1, length - 1), torch.zeros_like(a.narrow(axis, 0, 1))), axis)
            db = scan(onward.flip(axis), dh.flip(axis)).flip(axis)
            before = torch.cat((torch.zeros_like(h.narrow(axis, 0, 1)), h.narrow(axis, 0, length - 1)), axis)
            return db * before, db

        return gradient

    def jax(self, jax: Any, sets: list[dict[str, Array]]) -> HostTimed:
        axis = self.axis
        reverse = bool(self.fields.get("reverse"))
        if self.kind == "linear_recurrence":

            def combine(left: Any, right: Any) -> Any:
                return left[0] * right[0], right[0] * left[1] + right[1]

            scan = jax.jit(lambda a, b: jax.lax.associative_scan(combine, (a, b), axis=axis)[1])
            names = ("a", "b")
        else:
            function = {"logcumsumexp": "cumlogsumexp"}.get(self.kind, self.kind)
            scan = jax.jit(lambda x: getattr(jax.lax, function)(x, axis=axis, reverse=reverse))
            names = ("x",)
        inputs = [[jax.dlpack.from_dlpack(arrays[name].ours) for name in names] for arrays in sets[:2]]
        results: list[Any] = [None] * len(inputs)

        def call(index: int) -> None:
            results[index] = scan(*inputs[index])

        return HostTimed(
            [functools.partial(call, index) for index in range(len(inputs))], lambda: jax.block_until_ready(results)
        )
