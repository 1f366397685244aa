# SPDX-License-Identifier: Apache-2.0
"""What a call costs the host.

The operators are a small slice write, as decoding appends to a cache, and a small scan. On a GPU the
yardstick is the bare launch of the very kernel that the call launches, from a loop in C. A batch is smaller
than the queue of launches, and between batches the device is waited for outside the timing, so that no call
waits for it.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import baracuda as bc
from benchmarks.harness import Lab, median_and_quartiles

__all__ = ["rows"]

SHAPE = (4, 8, 256, 64)
RANGES = ((0, 4), (0, 8), (77, 78), (0, 64))
WINDOW = np.s_[:, :, 77:78, :]
SCAN_SHAPE = (4, 64)
#: A launch queue holds 1024.
BATCH = 200
#: What a row takes, unless its rounds are done before or are too few.
SECONDS = 1.0
LEAST_ROUNDS = 31


@dataclass
class _Problem:
    """A plan, the operands of one library, how ours is called, and how that library does the same by itself."""

    note: str
    plan: bc.Plan
    operands: Mapping[str, Any]
    #: Statements over the operands, `names`, `plan` and `bound`, by the kind of call.
    calls: Mapping[str, str]
    #: The same of others, by name.
    peers: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, Any] = field(default_factory=dict)
    #: The library whose current stream is the lab's meanwhile.
    framework: str = ""
    shape: tuple[int, ...] = SHAPE
    #: Called between batches, outside of the timing.
    wait: Callable[[], object] = lambda: None

    @property
    def device(self) -> str:
        return self.plan.device.partition(":")[0]


def rows(lab: Lab) -> Iterable[dict[str, Any]]:
    """The rows of the family, those of the lab's device first: a run may be stopped by its time."""
    makers = [*_writes(lab), *_scans(lab), *_operators(lab)]
    for make in sorted(makers, key=lambda make: make.device != lab.device):
        problem = make()
        with lab.on_stream(problem.framework):
            yield from _rows(lab, problem)


def _write_calls(stream: str = "", operator: bool = False) -> dict[str, str]:
    stream = stream and f"stream={stream}"
    calls = {
        "run": f"plan.run(dest=dest, source=source, {stream})",
        "bound": f"bound.run({stream})",
        "function": f"write_slice(dest, source, ranges, {stream})",
    }
    return calls | ({"torch operator": "operator(dest, source, ranges)"} if operator else {})


def _writes(lab: Lab) -> Iterable[_Problem]:
    rng = np.random.default_rng(7)
    dest = rng.standard_normal(SHAPE, np.float32)
    source = rng.standard_normal([end - start for start, end in RANGES], np.float32)
    names = {"ranges": RANGES, "write_slice": bc.write_slice}
    copies = {"torch": "dest[:, :, 77:78, :].copy_(source)", "torch view": "view.copy_(source)"}

    def problem(note: str, device: str, dest: Any, source: Any, calls: Mapping[str, str], **more: Any) -> _Problem:
        plan = bc.WriteSlicePlan(dest_shape=SHAPE, ranges=RANGES, dtype="float32", device=device)
        more.setdefault("names", names)
        return _Problem(note, plan, {"dest": dest, "source": source}, calls, **more)

    def of_torch(note: str, device: str, framework: str) -> _Problem:
        from baracuda import torch as operators  # noqa: PLC0415  # where there is torch

        held = torch.from_numpy(dest.copy()).to(device)
        more = names | {"view": held[WINDOW], "operator": operators.write_slice_}
        return problem(
            note, device, held, torch.from_numpy(source).to(device), _write_calls(operator=True),
            peers=copies, names=more, framework=framework,
        )  # fmt: skip

    torch = lab.peers.get("torch")
    if lab.device == "cuda":
        if torch is not None:
            yield of_torch("torch CUDA tensors", "cuda", "torch")
        own = bc.asarray(dest, stream=lab.stream)
        held_source = bc.asarray(source, stream=lab.stream)
        yield problem("baracuda CUDA tensors", "cuda", own, held_source, _write_calls(str(lab.stream)))
        cupy = lab.peers.get("cupy")
        if cupy is not None:
            with lab.on_stream("cupy"):
                held, held_source = cupy.asarray(dest), cupy.asarray(source)
            assign = {"cupy": "dest[:, :, 77:78, :] = source"}
            yield problem(
                "CuPy arrays", "cuda", held, held_source, _write_calls(), peers=assign, framework="cupy"
            )  # fmt: skip
    assign = {"numpy": "dest[:, :, 77:78, :] = source"}
    yield problem("NumPy arrays", "cpu", dest, source, _write_calls(), peers=assign)
    if torch is not None:
        yield of_torch("torch CPU tensors", "cpu", "")


def _scans(lab: Lab) -> Iterable[_Problem]:
    host = np.random.default_rng(8).standard_normal(SCAN_SHAPE, np.float32)
    devices = ["cuda", "cpu"] if lab.device == "cuda" else ["cpu"]
    calls = {"run": "plan.run(x=x, y=y)", "bound": "bound.run()", "function": "cumsum(x)"}
    torch, jax, cupy = (lab.peers.get(name) for name in ("torch", "jax", "cupy"))
    for device in devices:
        plan = bc.ScanPlan(kind="cumsum", shape=SCAN_SHAPE, dtype="float32", device=device)
        names = {"cumsum": bc.cumsum}
        kind = device.upper()
        if torch is not None:
            from baracuda import torch as operators  # noqa: PLC0415  # where there is torch

            x = torch.from_numpy(host).to(device)
            yield _Problem(
                f"cumsum of torch {kind} tensors", plan, {"x": x, "y": torch.empty_like(x)},
                calls | {"torch operator": "operator(x, 1)"}, {"torch": "theirs(x, 1)"},
                names | {"operator": operators.cumsum, "theirs": torch.cumsum},
                "torch" if device == "cuda" else "", SCAN_SHAPE,
            )  # fmt: skip
        if jax is not None and _has(jax, device):
            from baracuda import jax as operators  # noqa: PLC0415  # where there is JAX

            x = jax.device_put(host, jax.devices(device)[0])
            ours, theirs = jax.jit(operators.cumsum), jax.jit(lambda x: jax.numpy.cumsum(x, 1))
            own = bc.empty(SCAN_SHAPE, "float32", device)
            yield _Problem(
                f"cumsum of JAX {kind} arrays", plan, {"x": x, "y": own},
                {"jit": "ours(x)", "function": "cumsum(x)"}, {"jax": "theirs(x)"},
                names | {"ours": ours, "theirs": theirs}, "", SCAN_SHAPE,
                lambda x=x, ours=ours, theirs=theirs: (ours(x).block_until_ready(), theirs(x).block_until_ready()),
            )  # fmt: skip
        if device == "cuda" and cupy is not None:
            with lab.on_stream("cupy"):
                x = cupy.asarray(host)
                y = cupy.empty_like(x)
            yield _Problem(
                "cumsum of CuPy arrays", plan, {"x": x, "y": y}, calls, {"cupy": "theirs(x, 1)"},
                names | {"theirs": cupy.cumsum}, "cupy", SCAN_SHAPE,
            )  # fmt: skip
        if device == "cpu":
            yield _Problem(
                "cumsum of NumPy arrays", plan, {"x": host, "y": np.empty_like(host)}, calls,
                {"numpy": "theirs(x, 1)"}, names | {"theirs": np.cumsum}, "", SCAN_SHAPE,
            )  # fmt: skip


def _has(jax: Any, device: str) -> bool:
    try:
        return bool(jax.devices(device))
    except RuntimeError:
        return False


def _is_one_kernel(bound: bc.BoundPlan, lab: Lab) -> bool:
    """Whether there is a bare launch to compare with."""
    try:
        bc._core._bare_launch_ns(bound, 1, lab.stream)
    except bc.UnsupportedError:
        return False
    return True


def _rows(lab: Lab, problem: _Problem) -> Iterable[dict[str, Any]]:
    bound = problem.plan.bind(**problem.operands)
    names = {**problem.operands, **problem.names, "plan": problem.plan, "bound": bound}
    for kind, statement in problem.calls.items():
        if not lab.select(f"overhead {kind} {problem.shape} float32 {problem.note}"):
            continue
        statements = {"baracuda": statement, **problem.peers}
        timers = {name: _timer(text, names) for name, text in statements.items()}
        if problem.device == "cuda" and kind != "jit" and _is_one_kernel(bound, lab):
            timers["bare"] = lambda: bc._core._bare_launch_ns(bound, BATCH, lab.stream) / 1e3
        yield _row(kind, problem, _sample(lab, timers, problem.wait))


def _timer(statement: str, names: dict[str, Any]) -> Callable[[], float]:
    """Microseconds of one call, from a batch of them; timeit compiles the loop around the statement."""
    timer = timeit.Timer(statement, globals=names)
    return lambda: timer.timeit(BATCH) / BATCH * 1e6


def _sample(lab: Lab, timers: Mapping[str, Callable[[], float]], wait: Callable[[], object]) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in timers}
    # Many short rounds: a host's speed comes and goes within tenths of a second.
    warm_up, rounds = (1, 3) if lab.quick else (10, 301)
    # All rows together should take a minute.
    last = time.perf_counter() + SECONDS
    for number in range(warm_up + rounds):
        if number >= warm_up + LEAST_ROUNDS and time.perf_counter() > last:
            break
        for name, timer in timers.items():
            lab.synchronize()
            wait()
            us = timer()
            if number >= warm_up:
                samples[name].append(us)
    lab.synchronize()
    return samples


def _row(kind: str, problem: _Problem, samples: dict[str, list[float]]) -> dict[str, Any]:
    summary = {name: median_and_quartiles(values) for name, values in samples.items()}
    over_bare = None
    if "bare" in samples:
        # Of neighbours in time, so that a host that changes its speed changes both.
        over_bare, _ = median_and_quartiles(
            [ours - bare for ours, bare in zip(samples["baracuda"], samples["bare"], strict=True)]
        )
    ours_us, ours_quartiles = summary.pop("baracuda")
    bare_us, bare_quartiles = summary.pop("bare", (None, None))
    peers: dict[str, dict[str, Any]] = {
        name: {"us": us, "quartiles": quartiles, "ratio": round(us / ours_us, 3), "timer": "host"}
        for name, (us, quartiles) in summary.items()
    }
    best = min(peers, key=lambda name: peers[name]["us"], default=None)
    return {
        "op": f"overhead {kind}",
        "shape": str(problem.shape),
        "dtype": "float32",
        "note": problem.note,
        "ours_us": ours_us,
        "peer": best,
        "peer_us": peers[best]["us"] if best else None,
        "ratio": peers[best]["ratio"] if best else None,
        "bytes": problem.plan.cost.bytes,
        # The host's time says nothing of bandwidth.
        "gbs": None,
        "copy_gbs": None,
        "percent_of_copy": None,
        "bare_us": bare_us,
        "over_bare_us": over_bare,
        "ours_quartiles": ours_quartiles,
        "bare_quartiles": bare_quartiles,
        "timer": "host",
        "samples": len(samples["baracuda"]),
        "peers": peers,
        "path": problem.plan.path,
    }
