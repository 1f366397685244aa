# SPDX-License-Identifier: Apache-2.0
"""What a benchmark is, and how its contenders become a row of the results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from benchmarks.peers import Peers

__all__ = ["Array", "Call", "Calls", "Case", "Contender", "Contenders", "HostTimed", "Lab", "median_and_quartiles"]

Call = Callable[[], object]


@dataclass
class HostTimed:
    """Calls that can't be put on the lab's stream: timed by the host's clock up to the end of `wait`."""

    calls: Sequence[Call]
    wait: Call


#: One call for each set of buffers, so that running through them finds the cache cold.
Calls = Sequence[Call] | HostTimed


@dataclass
class Contenders:
    """What a case races: the library's calls and, by name, how to make the calls of each peer.

    Attributes:
        ours: one call for each set of buffers.
        peers: makers of calls; what they raise becomes the peer's entry in the results.
        verify: raises if what `ours` wrote is wrong; called once, after each of `ours` has run once and
            before any peer has.
        extra: further keys of the row.
    """

    ours: Sequence[Call]
    peers: Mapping[str, Callable[[], Calls]] = field(default_factory=dict)
    verify: Call | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One row to be.

    Attributes:
        bytes: what a call must move, reads plus writes.
        build: makes the contenders with the given number of buffer sets.
        footprint: device bytes of one set, where it is more than `bytes`.
    """

    op: str
    shape: str
    dtype: str
    note: str
    bytes: int
    build: Callable[[int], Contenders]
    footprint: int = 0


@dataclass
class Contender:
    """One timed thing of a row. Its samples are microseconds a call."""

    name: str
    calls: Sequence[Call]
    wait: Call | None = None
    timer: Literal["graph", "events", "host"] = "host"
    samples: list[float] = field(default_factory=list)
    #: What the lab has prepared for it.
    plan: Any = None

    @property
    def framework(self) -> str:
        """The library that the calls are of: the name up to the first space."""
        return self.name.partition(" ")[0]


class Array(ABC):
    """Memory of the lab's device, seen by every library without a copy."""

    shape: tuple[int, ...]
    dtype: str

    @property
    @abstractmethod
    def ours(self) -> Any:
        """What the library's plans are given."""

    @abstractmethod
    def numpy(self) -> Any:
        """On the CPU the array itself; from a GPU a copy."""

    @abstractmethod
    def torch(self) -> Any:
        """A torch view."""

    @abstractmethod
    def cupy(self) -> Any:
        """A CuPy view; dtypes that CuPy lacks come as unsigned integers of their size."""

    @abstractmethod
    def permute(self, *axes: int) -> Array:
        """The same memory with its axes in another order."""

    @abstractmethod
    def bits(self) -> Any:
        """The elements as integers, comparable with ``==`` where they lie, in whichever library is there."""


class Lab(ABC):
    """A device with its clocks, its buffers and the peers that can use it."""

    #: "cuda" or "cpu", as plans take it.
    device: str
    #: The handle that every contender is launched on; 0 on the CPU.
    stream: int
    peers: Peers
    #: Sizes of the copies are rounded to a multiple of it.
    copy_unit: int

    def __init__(self, *, quick: bool, select: Callable[[str], bool]) -> None:
        #: Small sizes and few repetitions: to see that everything runs.
        self.quick = quick
        self.select = select

    @property
    @abstractmethod
    def cache_bytes(self) -> int:
        """The size of the last cache before memory."""

    @property
    @abstractmethod
    def memory_budget(self) -> int:
        """Bytes that the buffers of one row may take."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """card, driver and cuda, and whatever else tells this device from another."""

    @abstractmethod
    def array(self, shape: Sequence[int], dtype: str, make: Callable[[Any, int], Any] | None = None) -> Array:
        """A row-major array.

        Args:
            make: given a NumPy generator and a count, that many elements as a NumPy array, repeated to
                fill the array; random bits by default.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until the device has nothing left to do."""

    @abstractmethod
    def copies(self, size: int, count: int) -> Sequence[Call]:
        """`count` copies of `size` bytes between buffers of their own."""

    @abstractmethod
    def prepare(self, contender: Contender) -> None:
        """Warms up, and decides how to time."""

    @abstractmethod
    def sample(self, contenders: Sequence[Contender]) -> None:
        """Fills the samples of all, taking turns. The last one is the copy."""

    def on_stream(self, framework: str) -> AbstractContextManager[Any]:
        """Makes the lab's stream the current one of a library."""
        del framework
        return nullcontext()

    def measure(self, case: Case) -> Iterator[dict[str, Any]]:
        """The row of a case, unless it is not selected."""
        if not self.select(f"{case.op} {case.shape} {case.dtype} {case.note}"):
            return
        sets = self._sets(case.bytes, max(case.footprint, case.bytes))
        contenders = case.build(sets)
        ours = Contender("baracuda", contenders.ours)
        for call in ours.calls:
            call()
        self.synchronize()
        if contenders.verify is not None:
            contenders.verify()
        self.prepare(ours)
        errors = {}
        peers = []
        for name, make in contenders.peers.items():
            try:
                with self.on_stream(name.partition(" ")[0]):
                    calls = make()
                if isinstance(calls, HostTimed):
                    peer = Contender(name, calls.calls, calls.wait)
                else:
                    peer = Contender(name, calls)
                self.prepare(peer)
            except Exception as error:  # noqa: BLE001  a peer that can't is a result, not the end of the run
                errors[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
                continue
            peers.append(peer)
        size = max(1, round(case.bytes / 2 / self.copy_unit)) * self.copy_unit
        copy = Contender("copy", self.copies(size, self._sets(2 * size, 2 * size)))
        self.prepare(copy)
        self.sample([ours, *peers, copy])
        yield _row(case, sets, ours, peers, errors, copy, size, contenders.extra)

    def _sets(self, moved: int, footprint: int) -> int:
        """Sets of buffers: three times the cache between two uses of the same one, if memory allows."""
        wanted = max(2, -(-3 * self.cache_bytes // max(1, moved)))
        return max(1, min(wanted, 64, self.memory_budget // max(1, footprint)))


def median_and_quartiles(samples: Sequence[float]) -> tuple[float, list[float]]:
    """Rounded to nanoseconds."""
    low, middle, high = (round(float(value), 3) for value in np.percentile(samples, [25, 50, 75]))
    return middle, [low, high]


def _row(
    case: Case,
    sets: int,
    ours: Contender,
    peers: Sequence[Contender],
    errors: Mapping[str, Any],
    copy: Contender,
    copy_size: int,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    ours_us, ours_quartiles = median_and_quartiles(ours.samples)
    copy_us, copy_quartiles = median_and_quartiles(copy.samples)
    entries: dict[str, Any] = {}
    for peer in peers:
        us, quartiles = median_and_quartiles(peer.samples)
        entries[peer.name] = {
            "us": us,
            "quartiles": quartiles,
            "ratio": round(us / ours_us, 3),
            "timer": peer.timer,
            "samples": len(peer.samples),
        }
    best = min(entries, key=lambda name: entries[name]["us"], default=None)
    gbs = case.bytes / ours_us / 1e3
    copy_gbs = 2 * copy_size / copy_us / 1e3
    return {
        "op": case.op,
        "shape": case.shape,
        "dtype": case.dtype,
        "note": case.note,
        "ours_us": ours_us,
        "peer": best,
        "peer_us": entries[best]["us"] if best else None,
        "ratio": entries[best]["ratio"] if best else None,
        "bytes": case.bytes,
        "gbs": round(gbs, 1),
        "copy_gbs": round(copy_gbs, 1),
        "percent_of_copy": round(100 * gbs / copy_gbs, 1),
        "ours_quartiles": ours_quartiles,
        "timer": ours.timer,
        "samples": len(ours.samples),
        "buffers": sets,
        "copy_us": copy_us,
        "copy_bytes": copy_size,
        "copy_quartiles": copy_quartiles,
        "peers": {**entries, **errors},
        **extra,
    }
