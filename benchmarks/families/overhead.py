# SPDX-License-Identifier: Apache-2.0
"""What a call costs the host.

The operator is a small slice write, as decoding appends to a cache. On a GPU the yardstick is the bare
launch of the very kernel that the call launches, from a loop in C. A batch is smaller than the queue of
launches, and between batches the device is waited for outside the timing, so that no call waits for it.
"""

from __future__ import annotations

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
#: A launch queue holds 1024.
BATCH = 200


@dataclass
class _Operands:
    """A destination and a source of one library, and how that library writes a slice by itself."""

    note: str
    device: str
    dest: Any
    source: Any
    #: Statements over `dest`, `source`, `window` and `view`; by name.
    peers: Mapping[str, str] = field(default_factory=dict)
    view: Any = None
    #: The library whose current stream is the lab's meanwhile.
    framework: str = ""
    #: The stream to name in calls, for tensors that have no current one.
    stream: str = ""


def rows(lab: Lab) -> Iterable[dict[str, Any]]:
    """The rows of the family."""
    for operands in _operands(lab):
        plan = bc.WriteSlicePlan(dest_shape=SHAPE, ranges=RANGES, dtype="float32", device=operands.device)
        with lab.on_stream(operands.framework):
            yield from _rows(lab, operands, plan)


def _operands(lab: Lab) -> Iterable[_Operands]:
    rng = np.random.default_rng(7)
    dest = rng.standard_normal(SHAPE, np.float32)
    source = rng.standard_normal([end - start for start, end in RANGES], np.float32)
    torch = lab.peers.get("torch")
    slice_copy = {"torch": "dest[:, :, 77:78, :].copy_(source)", "torch view": "view.copy_(source)"}
    if lab.device == "cuda":
        if torch is not None:
            on_gpu = torch.from_numpy(dest).cuda()
            yield _Operands(
                "torch CUDA tensors",
                "cuda",
                on_gpu,
                torch.from_numpy(source).cuda(),
                slice_copy,
                on_gpu[WINDOW],
                "torch",
            )
        own = bc.asarray(dest, stream=lab.stream)
        yield _Operands(
            "baracuda CUDA tensors", "cuda", own, bc.asarray(source, stream=lab.stream), stream=f"stream={lab.stream}"
        )
        cupy = lab.peers.get("cupy")
        if cupy is not None:
            with lab.on_stream("cupy"):
                held = cupy.asarray(dest)
                held_source = cupy.asarray(source)
            assign = {"cupy": "dest[:, :, 77:78, :] = source"}
            yield _Operands("CuPy arrays", "cuda", held, held_source, assign, framework="cupy")
    assign = {"numpy": "dest[:, :, 77:78, :] = source"}
    yield _Operands("NumPy arrays", "cpu", dest, source, assign)
    if lab.device == "cpu":
        torch = lab.peers.get("torch")
    if torch is not None:
        held = torch.from_numpy(dest.copy())
        yield _Operands("torch CPU tensors", "cpu", held, torch.from_numpy(source), slice_copy, held[WINDOW])


def _rows(lab: Lab, operands: _Operands, plan: bc.WriteSlicePlan) -> Iterable[dict[str, Any]]:
    bound = plan.bind(dest=operands.dest, source=operands.source)
    names = {
        "dest": operands.dest,
        "source": operands.source,
        "view": operands.view,
        "plan": plan,
        "bound": bound,
        "write_slice": bc.write_slice,
        "ranges": RANGES,
    }
    stream = operands.stream
    ours = {
        "run": f"plan.run(dest=dest, source=source{stream and ', ' + stream})",
        "bound": f"bound.run({stream})",
        "function": f"write_slice(dest, source, ranges{stream and ', ' + stream})",
    }
    for kind, statement in ours.items():
        if not lab.select(f"overhead {kind} {SHAPE} float32 {operands.note}"):
            continue
        statements = {"baracuda": statement, **operands.peers}
        timers = {name: _timer(text, names) for name, text in statements.items()}
        if operands.device == "cuda":
            timers["bare"] = lambda: bc._core._bare_launch_ns(bound, BATCH, lab.stream) / 1e3
        yield _row(kind, operands, plan, _sample(lab, timers))


def _timer(statement: str, names: dict[str, Any]) -> Callable[[], float]:
    """Microseconds of one call, from a batch of them; timeit compiles the loop around the statement."""
    timer = timeit.Timer(statement, globals=names)
    return lambda: timer.timeit(BATCH) / BATCH * 1e6


def _sample(lab: Lab, timers: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in timers}
    # Many short rounds: a host's speed comes and goes within tenths of a second.
    warm_up, rounds = (1, 3) if lab.quick else (20, 301)
    for number in range(warm_up + rounds):
        for name, timer in timers.items():
            lab.synchronize()
            us = timer()
            if number >= warm_up:
                samples[name].append(us)
    lab.synchronize()
    return samples


def _row(kind: str, operands: _Operands, plan: bc.WriteSlicePlan, samples: dict[str, list[float]]) -> dict[str, Any]:
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
        "shape": str(SHAPE),
        "dtype": "float32",
        "note": operands.note,
        "ours_us": ours_us,
        "peer": best,
        "peer_us": peers[best]["us"] if best else None,
        "ratio": peers[best]["ratio"] if best else None,
        "bytes": plan.cost.bytes,
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
        "path": plan.path,
    }
