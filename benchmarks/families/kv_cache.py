# SPDX-License-Identifier: Apache-2.0
"""Appending to key/value caches: paged, by slots; and in place, at positions that are on the device."""

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

DIM = 128
BLOCK_SIZE = 16


def rows(lab: Lab) -> Iterable[dict[str, Any]]:
    """The rows of the family."""
    appends = [*_decode(lab), *_prefill(lab)]
    for append in appends:
        yield from lab.measure(append.case())
    batch, heads, length = (64, 8, 1024) if lab.device == "cuda" else (8, 8, 128)
    if lab.quick:
        batch, length = 4, 64
    for note, batched in (("one position", False), ("ragged", True)):
        yield from lab.measure(_Update(lab, "bfloat16", note, (batch, length, heads, DIM), batched).case())


def _decode(lab: Lab) -> Iterable[_Append]:
    """One token for each sequence of a batch."""
    batches = (1, 8, 64, 256) if lab.device == "cuda" and not lab.quick else (1, 16)
    for heads in (8,) if lab.quick else (8, 32):
        for batch in batches:
            for cache_dtype in (None, "float8_e4m3fn"):
                yield _Append(lab, "decode", batch, heads, cache_dtype)


def _prefill(lab: Lab) -> Iterable[_Append]:
    """The prompts of a batch at once; pages are anywhere, tokens of a page side by side."""
    tokens = 8192 if lab.device == "cuda" and not lab.quick else 256
    for cache_dtype in (None, "float8_e4m3fn"):
        yield _Append(lab, "prefill", tokens, 8, cache_dtype)


@dataclass
class _Set:
    """Buffers of one call."""

    key: Array
    value: Array
    key_cache: Array
    value_cache: Array
    slots: Array


@dataclass
class _Append:
    lab: Lab
    kind: str
    tokens: int
    heads: int
    cache_dtype: str | None
    dtype: str = "bfloat16"

    @property
    def blocks(self) -> int:
        # A decoding sequence writes into a page of its own; prompts fill theirs.
        return max(16, self.tokens * 2 if self.kind == "decode" else self.tokens * 2 // BLOCK_SIZE)

    def case(self) -> Case:
        elements = self.tokens * self.heads * DIM
        stored = numpy_dtype(self.cache_dtype or self.dtype).itemsize
        moved = 2 * elements * (numpy_dtype(self.dtype).itemsize + stored) + 8 * self.tokens
        held = moved + 2 * self.blocks * BLOCK_SIZE * self.heads * DIM * stored
        shape = f"({self.tokens}, {self.heads}, {DIM})"
        note = f"to {self.cache_dtype}" if self.cache_dtype else ""
        return Case(f"kv_cache_append {self.kind}", shape, self.dtype, note, moved, self.build, footprint=held)

    def slots(self, rng: Any, count: int) -> Any:
        """Slots that are all different."""
        if self.kind == "decode":
            return rng.permutation(self.blocks)[:count] * BLOCK_SIZE + rng.integers(0, BLOCK_SIZE, count)
        pages = rng.permutation(self.blocks)[: -(-count // BLOCK_SIZE)]
        return (pages[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).ravel()[:count]

    def build(self, count: int) -> Contenders:
        lab = self.lab
        tokens = (self.tokens, self.heads, DIM)
        cache = (self.blocks, BLOCK_SIZE, self.heads, DIM)
        normal: Callable[[Any, int], Any] = lambda rng, size: rng.standard_normal(size, np.float32)  # noqa: E731
        sets = [
            _Set(
                *(lab.array(tokens, self.dtype, normal) for _ in range(2)),
                *(lab.array(cache, self.cache_dtype or self.dtype) for _ in range(2)),
                lab.array((self.tokens,), "int64", self.slots),
            )
            for _ in range(count)
        ]
        plan = bc.KvCacheAppendPlan(
            tokens=self.tokens,
            heads=self.heads,
            dim=DIM,
            blocks=self.blocks,
            block_size=BLOCK_SIZE,
            dtype=self.dtype,
            cache_dtype=self.cache_dtype,
            device=lab.device,
        )
        scales = {}
        if self.cache_dtype:
            one = lab.array((1,), "float32", lambda _, size: np.full(size, 0.5))
            scales = {"key_scale": one.ours, "value_scale": one.ours}
        bound = [
            plan.bind(
                key=one.key.ours,
                value=one.value.ours,
                key_cache=one.key_cache.ours,
                value_cache=one.value_cache.ours,
                slot_mapping=one.slots.ours,
                **scales,
            )
            for one in sets
        ]
        return Contenders(
            ours=[functools.partial(one.run, lab.stream) for one in bound],
            peers={} if self.cache_dtype else self.peers(sets),
            verify=functools.partial(self.verify, sets[-1]),
            extra={"path": plan.path, "backend": plan.sku.backend, "arch": plan.sku.arch},
        )

    def verify(self, one: _Set) -> None:
        slots = one.slots.numpy()
        for tokens, cache in ((one.key, one.key_cache), (one.value, one.value_cache)):
            got = cache.numpy().reshape(-1, self.heads, DIM)[slots]
            expected = tokens.numpy()
            if self.cache_dtype:
                expected = (expected.astype(np.float32) / np.float32(0.5)).astype(numpy_dtype(self.cache_dtype))
            if not np.array_equal(got.view(f"u{got.itemsize}"), expected.view(f"u{got.itemsize}")):
                raise AssertionError(f"kv_cache_append {self.kind}: the cache does not hold the tokens")

    def peers(self, sets: list[_Set]) -> dict[str, Callable[[], Calls]]:
        makers: dict[str, Callable[[], Calls]] = {}
        if self.lab.device == "cpu":
            makers["numpy"] = lambda: [_numpy(one, self.heads) for one in sets]
        if self.lab.peers.get("torch") is not None:
            makers["torch index_put_"] = lambda: [_index_put(one, self.heads) for one in sets]
            makers["torch index_copy_"] = lambda: [_index_copy(one, self.heads) for one in sets]
        if self.lab.device == "cuda" and self.lab.peers.get("jax") is not None:
            makers["jax"] = lambda: self.jax(sets)
        return makers

    def jax(self, sets: list[_Set]) -> HostTimed:
        """Scatters into donated caches of its own."""
        jax = self.lab.peers.get("jax")
        update = jax.jit(
            lambda keys, values, key, value, slots: (keys.at[slots].set(key), values.at[slots].set(value)),
            donate_argnums=(0, 1),
        )
        flat = (self.blocks * BLOCK_SIZE, self.heads, DIM)
        kind = numpy_dtype(self.dtype)
        caches = [tuple(jax.numpy.zeros(flat, kind) for _ in range(2)) for _ in sets]
        given = [[jax.numpy.asarray(part.numpy()) for part in (one.key, one.value, one.slots)] for one in sets]

        def call(index: int) -> None:
            caches[index] = update(*caches[index], *given[index])

        calls = [functools.partial(call, index) for index in range(len(sets))]
        return HostTimed(calls, lambda: jax.block_until_ready(caches))


def _numpy(one: _Set, heads: int) -> Callable[[], object]:
    slots = one.slots.numpy()
    pairs = [
        (cache.numpy().reshape(-1, heads, DIM), tokens.numpy())
        for tokens, cache in ((one.key, one.key_cache), (one.value, one.value_cache))
    ]

    def call() -> None:
        for cache, tokens in pairs:
            cache[slots] = tokens

    return call


def _flat(one: _Set, heads: int) -> list[tuple[Any, Any]]:
    return [
        (cache.torch().view(-1, heads, DIM), tokens.torch())
        for tokens, cache in ((one.key, one.key_cache), (one.value, one.value_cache))
    ]


def _index_put(one: _Set, heads: int) -> Callable[[], object]:
    slots, pairs = one.slots.torch(), _flat(one, heads)

    def call() -> None:
        for cache, tokens in pairs:
            cache.index_put_((slots,), tokens)

    return call


def _index_copy(one: _Set, heads: int) -> Callable[[], object]:
    slots, pairs = one.slots.torch(), _flat(one, heads)

    def call() -> None:
        for cache, tokens in pairs:
            cache.index_copy_(0, slots, tokens)

    return call


@dataclass
class _Update:
    """One token for each sequence into a dense cache `[batch, length, heads, dim]`, at positions on the device."""

    lab: Lab
    dtype: str
    note: str
    shape: tuple[int, ...]
    batched: bool

    @property
    def block(self) -> tuple[int, ...]:
        return (self.shape[0], 1, *self.shape[2:])

    def case(self) -> Case:
        size = numpy_dtype(self.dtype).itemsize
        moved = 2 * math.prod(self.block) * size + 4 * len(self.shape) * (self.shape[0] if self.batched else 1)
        held = math.prod(self.shape) * size
        return Case("dynamic_write_slice decode", str(self.shape), self.dtype, self.note, moved, self.build, held)

    def starts(self, rng: Any, count: int) -> Any:
        starts = np.zeros((count // len(self.shape), len(self.shape)), np.int32)
        starts[:, 1] = rng.integers(0, self.shape[1], len(starts))
        return starts.ravel()

    def build(self, count: int) -> Contenders:
        lab = self.lab
        rank = len(self.shape)
        shape = (self.shape[0], rank) if self.batched else (rank,)
        sets = [
            (
                lab.array(self.shape, self.dtype),
                lab.array(self.block, self.dtype),
                lab.array(shape, "int32", self.starts),
            )
            for _ in range(count)
        ]
        plan = bc.DynamicWriteSlicePlan(
            dest_shape=self.shape,
            block_shape=self.block,
            dtype=self.dtype,
            batched=self.batched,
            device=lab.device,
        )
        bound = [plan.bind(dest=dest.ours, source=source.ours, starts=starts.ours) for dest, source, starts in sets]
        return Contenders(
            ours=[functools.partial(one.run, lab.stream) for one in bound],
            peers=self.peers(sets),
            verify=functools.partial(self.verify, *sets[-1]),
            extra={"path": plan.path, "backend": plan.sku.backend, "arch": plan.sku.arch},
        )

    def positions(self, starts: Array) -> Any:
        host = starts.numpy().reshape(-1, len(self.shape))[:, 1]
        return np.broadcast_to(host, self.shape[:1])

    def verify(self, dest: Array, source: Array, starts: Array) -> None:
        unsigned = f"u{numpy_dtype(self.dtype).itemsize}"
        got = dest.numpy()[np.arange(self.shape[0]), self.positions(starts)]
        if not np.array_equal(got.view(unsigned), source.numpy()[:, 0].view(unsigned)):
            raise AssertionError(f"dynamic_write_slice {self.note}: the cache does not hold the tokens")

    def peers(self, sets: list[tuple[Array, Array, Array]]) -> dict[str, Callable[[], Calls]]:
        torch = self.lab.peers.get("torch")
        if torch is None:
            return {}

        def index_put(dest: Array, source: Array, starts: Array) -> Callable[[], object]:
            cache, token = dest.torch(), source.torch()[:, 0]
            rows = torch.arange(self.shape[0], device=cache.device)
            positions = torch.from_numpy(np.array(self.positions(starts), np.int64)).to(cache.device)
            return lambda: cache.index_put_((rows, positions), token)

        makers: dict[str, Callable[[], Calls]] = {"torch index_put_": lambda: [index_put(*one) for one in sets]}
        if not self.batched:
            # The position frozen at capture: the copy alone.
            def slice_copy(dest: Array, source: Array, starts: Array) -> Callable[[], object]:
                at = int(self.positions(starts)[0])
                window, token = dest.torch()[:, at : at + 1], source.torch()
                return lambda: window.copy_(token)

            makers["torch slice"] = lambda: [slice_copy(*one) for one in sets]
        return makers
