# SPDX-License-Identifier: Apache-2.0
"""Segment reductions with random, sorted, skewed and given offsets, forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

import baracuda as bc
from baracuda import _core
from baracuda.dtypes import numpy_dtype
from benchmarks.harness import Array, Calls, Case, Contenders, HostTimed, Lab

__all__ = ["rows"]

Size = tuple[int, int, int]

#: Rows, columns and segments.
SIZES: tuple[Size, ...] = ((1 << 20, 64, 100_000), (1 << 20, 64, 100), (1 << 24, 1, 1 << 20), (1 << 18, 512, 4096))
SUMS: tuple[Size, ...] = (SIZES[0], (1 << 22, 16, 64), SIZES[2])
#: Edges, features and nodes of a graph whose nodes' degrees follow a power law.
GRAPHS: tuple[Size, ...] = ((1 << 24, 1, 1 << 20), (1 << 24, 64, 1 << 20), (1 << 24, 256, 1 << 20))
#: How the backward's cost grows.
GROWTH: tuple[Size, ...] = tuple((1 << bits, 16, 1 << (bits - 4)) for bits in range(14, 25, 2))


def rows(lab: Lab) -> Iterable[dict[str, Any]]:
    """The rows of the family."""
    make = functools.partial(_Segments, lab)
    small = lab.quick or lab.device != "cuda"

    def shrink(size: Size) -> Size:
        return (size[0] >> 8, size[1], max(size[2] >> 8, 2)) if small else size

    for dtype in ("float32", "bfloat16"):
        for size in map(shrink, SIZES):
            for direction in ("fw", "bw", "bw arg"):
                yield from lab.measure(make("max", size, dtype).case(direction))
            yield from lab.measure(make("max", size, dtype, "sorted").case("fw"))
    for size in map(shrink, SUMS):
        yield from lab.measure(make("sum", size, "float32").case("fw"))
    for form in ("sorted", "offsets"):
        for size in map(shrink, SIZES[:3]):
            yield from lab.measure(make("sum", size, "float32", form).case("fw"))
    for kind in ("sum", "mean", "min", "prod"):
        if kind != "sum":
            yield from lab.measure(make(kind, shrink(SIZES[0]), "float32").case("fw"))
        yield from lab.measure(make(kind, shrink(SIZES[0]), "float32").case("bw"))
    for size in GROWTH[: 2 if small else None]:
        yield from lab.measure(make("max", size, "float32", note="growth").case("bw"))
    for size in map(shrink, GRAPHS):
        for kind in ("sum", "max"):
            yield from lab.measure(make(kind, size, "float32", skewed=True).case("fw"))
        # What the same bits in every run cost.
        yield from lab.measure(make("sum", size, "float32", skewed=True, note="any order").case("fw"))


@dataclass
class _Buffers:
    input: Array
    ids: Array
    output: Array
    arg: Array | None
    d_input: Array | None
    workspace: Any


@dataclass
class _Segments:
    lab: Lab
    kind: str
    size: Size
    dtype: str
    form: str = "unsorted"
    skewed: bool = False
    note: str = ""

    @property
    def fields(self) -> dict[str, Any]:
        n, d, s = self.size
        return {
            "kind": self.kind,
            "num_inputs": n,
            "embedding_dim": d,
            "num_segments": s,
            "dtype": self.dtype,
            "ids": self.form,
            "device": self.lab.device,
        }

    def plan(self, direction: str) -> Any:
        if direction == "fw":
            preference = bc.PlanPreference(deterministic=self.note != "any order")
            return bc.SegmentReducePlan(**self.fields, preference=preference)
        saved = "arg" if direction == "bw arg" else "input"
        return bc.SegmentReduceBackwardPlan(**self.fields, saved=saved)

    def case(self, direction: str) -> Case:
        forms = {"unsorted": "", "sorted": "sorted ", "offsets": "offsets "}
        note = " ".join(filter(None, ["skewed" if self.skewed else "", self.note]))
        # Neither plan can be made where there is no device for it, and rows that aren't wanted needn't be.
        n, d, s = self.size
        element = numpy_dtype(self.dtype).itemsize
        moved = (n + s) * d * element + 8 * (s + 1 if self.form == "offsets" else n)
        if direction == "bw" and self.kind not in ("sum", "mean"):
            moved += n * d * element
        if direction == "bw arg":
            moved += 8 * s * d
        return Case(
            f"{forms[self.form]}segment_{self.kind} {direction}", str(self.size), self.dtype, note, moved,
            functools.partial(self.build, direction), footprint=moved + n * d * element,
        )  # fmt: skip

    def indices(self) -> Array:
        n, _, s = self.size
        rng = np.random.default_rng(n + s)
        if self.skewed:
            # Node r has a share of 1 / (r + 10) of the edges.
            ids = np.exp(rng.random(n) * np.log((s + 10) / 10)) * 10 - 10
            ids = rng.permutation(s)[np.minimum(ids.astype(np.int64), s - 1)]
        else:
            ids = rng.integers(0, s, n)
        if self.form == "sorted":
            ids = np.sort(ids)
        if self.form == "offsets":
            ids = np.concatenate([[0], np.cumsum(np.bincount(ids, minlength=s))])
        array = self.lab.array(ids.shape, "int64")
        if isinstance(array.ours, _core.Tensor):
            _core.upload(array.ours, ids)
        else:
            array.numpy()[...] = ids
        return array

    def buffers(self, plan: Any, direction: str, ids: Array) -> _Buffers:
        n, d, s = self.size

        def normal(rng: Any, count: int) -> Any:
            return rng.standard_normal(count, np.float32).astype(numpy_dtype(self.dtype))

        size = plan.workspace_size
        return _Buffers(
            input=self.lab.array((n, d), self.dtype, normal),
            ids=ids,
            output=self.lab.array((s, d), self.dtype, normal),
            arg=self.lab.array((s, d), "int64") if direction == "bw arg" else None,
            d_input=self.lab.array((n, d), self.dtype) if direction != "fw" else None,
            workspace=self.lab.array((size,), "uint8").ours if size else None,
        )

    def build(self, direction: str, count: int) -> Contenders:
        plan = self.plan(direction)
        ids = self.indices()
        sets = [self.buffers(plan, direction, ids) for _ in range(count)]
        if direction == "bw arg":
            forward = bc.SegmentReducePlan(**self.fields, return_arg=True)
            for one in sets:
                operands = {"input": one.input.ours, "output": one.output.ours, "arg": one.arg.ours}
                forward.run(segment_ids=ids.ours, stream=self.lab.stream, **operands)
        return Contenders(
            ours=[self.call(plan, direction, one) for one in sets],
            peers=self.peers(direction, sets),
            verify=functools.partial(self.verify, direction, sets[-1]),
            extra={"path": plan.path, "arch": plan.sku.arch, "workspace": plan.workspace_size},
        )

    def call(self, plan: Any, direction: str, one: _Buffers) -> Callable[[], object]:
        operands = {"offsets" if self.form == "offsets" else "segment_ids": one.ids.ours}
        if direction == "fw":
            operands |= {"input": one.input.ours, "output": one.output.ours}
        else:
            operands |= {"d_output": one.output.ours, "d_input": one.d_input.ours}
            if direction == "bw arg":
                operands["arg"] = one.arg.ours
            elif self.kind not in ("sum", "mean"):
                operands["input"] = one.input.ours
        bound = plan.bind(**operands)
        return functools.partial(bound.run, self.lab.stream, one.workspace)

    def verify(self, direction: str, one: _Buffers) -> None:
        """One segment, the first row's."""
        n, d, s = self.size
        if n * d > 1 << 28:
            return
        ids = one.ids.numpy()
        if self.form == "offsets":
            ids = np.repeat(np.arange(s), np.diff(ids))
        segment = ids[0]
        members = np.flatnonzero(ids == segment)
        x = one.input.numpy()[members].astype(np.float64)
        output = one.output.numpy()[segment].astype(np.float64)
        name = f"segment_{self.kind} {direction} {self.size} {self.dtype} {self.form}"
        if direction == "fw":
            expected = getattr(np, self.kind)(x, axis=0)
            exact = self.kind in ("max", "min")
            scale = np.abs(x).sum(0) if self.kind in ("sum", "mean") else np.abs(expected)
            if not (np.abs(output - expected) <= (0 if exact else 1e-6 * len(members)) * scale).all():
                raise AssertionError(f"{name}: wrong values")
            return
        share = one.d_input.numpy()[members].astype(np.float64)
        expected = np.zeros_like(share)
        if self.kind in ("max", "min"):
            expected[getattr(np, f"arg{self.kind}")(x, axis=0), np.arange(d)] = output
        elif self.kind == "prod":
            expected = output * np.prod(x, axis=0) / x
        else:
            expected[:] = output / (len(members) if self.kind == "mean" else 1)
        if not np.allclose(share, expected, rtol=1e-5, atol=1e-30):
            raise AssertionError(f"{name}: wrong gradient")

    def peers(self, direction: str, sets: list[_Buffers]) -> dict[str, Callable[[], Calls]]:
        found: dict[str, Callable[[], Calls]] = {}
        get = self.lab.peers.get
        if direction == "bw arg" or self.note:
            return found
        if get("torch") is not None:
            torch_call = self.torch_backward if direction == "bw" else self.torch_forward
            found["torch"] = lambda: [torch_call(one) for one in sets]
            if direction == "fw" and self.kind == "sum" and self.form == "unsorted":
                found["torch deterministic"] = lambda: [self.torch_deterministic(one) for one in sets]
        jax_has_it = direction == "fw" and self.form != "offsets" and self.kind != "mean"
        if jax_has_it and self.lab.device == "cuda" and get("jax") is not None:
            found["jax"] = lambda: self.jax_forward(sets)
        return found

    def torch_forward(self, one: _Buffers) -> Callable[[], object]:
        torch = self.lab.peers.get("torch")
        x, ids, output = one.input.torch(), one.ids.torch(), one.output.torch().clone()
        names = {"max": "amax", "min": "amin"}
        if self.form == "offsets":
            return lambda: torch.segment_reduce(x, self.kind, offsets=ids, axis=0)
        if self.form == "sorted":
            lengths = torch.bincount(ids, minlength=self.size[2])
            return lambda: torch.segment_reduce(x, self.kind, lengths=lengths, axis=0)
        if self.kind == "sum":
            return lambda: output.zero_().index_add_(0, ids, x)
        index = ids[:, None].expand(x.shape)
        return lambda: output.zero_().scatter_reduce_(0, index, x, names.get(self.kind, self.kind), include_self=False)

    def torch_deterministic(self, one: _Buffers) -> Callable[[], object]:
        torch = self.lab.peers.get("torch")
        call = self.torch_forward(one)

        def run() -> object:
            before = torch.are_deterministic_algorithms_enabled()
            torch.use_deterministic_algorithms(True)
            try:
                return call()
            finally:
                torch.use_deterministic_algorithms(before)

        return run

    def torch_backward(self, one: _Buffers) -> Callable[[], object]:
        torch = self.lab.peers.get("torch")
        x, ids, d_output = one.input.torch().clone().requires_grad_(), one.ids.torch(), one.output.torch()
        start = torch.zeros(d_output.shape, dtype=x.dtype, device=x.device)
        name = {"max": "amax", "min": "amin"}.get(self.kind, self.kind)
        output = start.scatter_reduce(0, ids[:, None].expand(x.shape), x, name, include_self=False)
        return lambda: torch.autograd.grad(output, x, d_output, retain_graph=True)

    def jax_forward(self, sets: list[_Buffers]) -> Calls:
        jax = self.lab.peers.get("jax")
        reduce = getattr(jax.ops, f"segment_{self.kind}")
        call = jax.jit(functools.partial(reduce, num_segments=self.size[2], indices_are_sorted=self.form == "sorted"))
        last: list[Any] = []
        given = [(jax.dlpack.from_dlpack(one.input.ours), jax.dlpack.from_dlpack(one.ids.ours)) for one in sets]

        def run(x: Any, ids: Any) -> None:
            last[:] = [call(x, ids)]

        def wait() -> None:
            last[0].block_until_ready()

        return HostTimed([functools.partial(run, x, ids) for x, ids in given], wait)
