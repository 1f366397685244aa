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
from itertools import chain
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
    for device in (lab.device, "cpu")[: 1 if lab.device == "cpu" else 2]:
        for problem in chain(_writes(lab, device), _operators(lab, device), _scans(lab, device)):
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


def _writes(lab: Lab, device: str) -> Iterable[_Problem]:
    rng = np.random.default_rng(7)
    dest = rng.standard_normal(SHAPE, np.float32)
    source = rng.standard_normal([end - start for start, end in RANGES], np.float32)
    plan = bc.WriteSlicePlan(dest_shape=SHAPE, ranges=RANGES, dtype="float32", device=device)
    names = {"ranges": RANGES, "write_slice": bc.write_slice}
    torch = lab.peers.get("torch")
    if torch is not None:
        from baracuda import torch as operators  # noqa: PLC0415  # where there is torch

        held = torch.from_numpy(dest.copy()).to(device)
        copies = {"torch": "dest[:, :, 77:78, :].copy_(source)", "torch view": "view.copy_(source)"}
        yield _Problem(
            f"torch {device.upper()} tensors", plan, {"dest": held, "source": torch.from_numpy(source).to(device)},
            _write_calls(operator=True), copies, names | {"view": held[WINDOW], "operator": operators.write_slice_},
            "torch" if device == "cuda" else "",
        )  # fmt: skip
    if device == "cpu":
        assign = {"numpy": "dest[:, :, 77:78, :] = source"}
        yield _Problem("NumPy arrays", plan, {"dest": dest, "source": source}, _write_calls(), assign, names)
        return
    own = {"dest": bc.asarray(dest, stream=lab.stream), "source": bc.asarray(source, stream=lab.stream)}
    yield _Problem("baracuda CUDA tensors", plan, own, _write_calls(str(lab.stream)), {}, names)
    cupy = lab.peers.get("cupy")
    if cupy is not None:
        with lab.on_stream("cupy"):
            arrays = {"dest": cupy.asarray(dest), "source": cupy.asarray(source)}
        assign = {"cupy": "dest[:, :, 77:78, :] = source"}
        yield _Problem("CuPy arrays", plan, arrays, _write_calls(), assign, names, "cupy")


def _operators(lab: Lab, device: str) -> Iterable[_Problem]:
    """Calls of torch's operators beside those of the libraries that have the same."""
    torch = lab.peers.get("torch")
    if torch is None:
        return
    from baracuda import torch as operators  # noqa: PLC0415  # where there is torch

    rng = np.random.default_rng(9)

    def tensor(array: Any) -> Any:
        return torch.from_numpy(np.asarray(array)).to(device)

    def problem(note: str, plan: bc.Plan, call: str, peers: Mapping[str, str], shape: Any, **names: Any) -> _Problem:
        return _Problem(
            f"{note} of torch {device.upper()} tensors", plan, {}, {"torch operator": call}, peers, names,
            "torch" if device == "cuda" else "", shape,
        )  # fmt: skip

    for rank, ours, plan_class in (
        (2, operators.fractional_max_pool2d, bc.FractionalMaxPool2dPlan),
        (3, operators.fractional_max_pool3d, bc.FractionalMaxPool3dPlan),
    ):
        shape = (1, 2) + (8,) * rank
        axes = "dhw"[-rank:]
        plan = plan_class(
            batch=1, channels=2, dtype="float32", placement="torch", samples=True, device=device,
            **{f"{axis}_in": 8 for axis in axes}, **{f"{axis}_out": 4 for axis in axes},
            **{f"window_{axis}": 2 for axis in axes},
        )  # fmt: skip
        call = "(x, 2, output_size=4, _random_samples=samples)"
        theirs = getattr(torch.nn.functional, f"fractional_max_pool{rank}d")
        yield problem(
            f"fractional_max_pool{rank}d", plan, f"ours{call}", {"torch": f"theirs{call}"}, shape,
            x=tensor(rng.standard_normal(shape, np.float32)), samples=tensor(rng.random((1, 2, rank), np.float32)),
            ours=ours, theirs=theirs,
        )  # fmt: skip
    shape = (1, 2, 8, 8)
    torchvision = lab.peers.get("torchvision")
    plan = bc.RoiAlignPlan(
        n=1, c=2, h=8, w=8, num_rois=1, pooled_h=2, pooled_w=2, dtype="float32", sampling_ratio=2, device=device
    )
    yield problem(
        "roi_align", plan, "ours(x, boxes, 2, 1.0, 2)",
        {} if torchvision is None else {"torchvision": "theirs(x, boxes, 2, 1.0, 2)"}, shape,
        x=tensor(rng.standard_normal(shape, np.float32)), boxes=tensor(np.array([[0, 0, 0, 4, 4]], np.float32)),
        ours=operators.roi_align, theirs=None if torchvision is None else torchvision.ops.roi_align,
    )  # fmt: skip
    plan = bc.SegmentReducePlan(
        kind="sum", num_inputs=16, embedding_dim=8, num_segments=4, dtype="float32", index_dtype="int64",
        ids="offsets", device=device,
    )  # fmt: skip
    yield problem(
        "segment_sum", plan, "ours(data, offsets=offsets)",
        {"torch": "theirs(data, 'sum', offsets=offsets, axis=0)"}, (16, 8),
        data=tensor(rng.standard_normal((16, 8), np.float32)), offsets=tensor(np.arange(5) * 4),
        ours=operators.segment_sum, theirs=torch.segment_reduce,
    )  # fmt: skip


def _scans(lab: Lab, device: str) -> Iterable[_Problem]:
    host = np.random.default_rng(8).standard_normal(SCAN_SHAPE, np.float32)
    calls = {"run": "plan.run(x=x, y=y)", "bound": "bound.run()", "function": "cumsum(x)"}
    torch, jax, cupy = (lab.peers.get(name) for name in ("torch", "jax", "cupy"))
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
    # A problem without operands is timed by calls that make their own.
    bound = problem.plan.bind(**problem.operands) if problem.operands else None
    names = {**problem.operands, **problem.names, "plan": problem.plan, "bound": bound}
    for kind, statement in problem.calls.items():
        if not lab.select(f"overhead {kind} {problem.shape} float32 {problem.note}"):
            continue
        statements = {"baracuda": statement, **problem.peers}
        timers = {name: _timer(text, names) for name, text in statements.items()}
        if problem.device == "cuda" and kind != "jit" and bound is not None and _is_one_kernel(bound, lab):
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
