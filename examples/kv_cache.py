#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A decode loop that appends to a key/value cache, and checks every step against NumPy.

One attention layer with random weights generates tokens. Its cache is of the library: the prompt's keys
and values are written as one block, those of each new token as another, at a position that moves. What the
layer attends to is read back from that cache, so a wrong byte would change what it says; and at every step
the whole cache is compared with one that NumPy wrote. It runs on the GPU if there is one, else on the CPU.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import baracuda as bc

BATCH, HEADS, LENGTH, DIM = 4, 8, 256, 64
PROMPT, STEPS = 37, 64
VOCABULARY, WIDTH = 256, 128
DTYPES = ("float32", "bfloat16", "float16", "int8", "int4")
SHAPE = (BATCH, HEADS, LENGTH, DIM)


class Layer:
    """Embedding, attention and output of a language model that has learnt nothing."""

    def __init__(self) -> None:
        rng = np.random.default_rng(2025)
        self.embedding = rng.standard_normal((VOCABULARY, WIDTH), np.float32)
        scale = np.float32(1 / np.sqrt(WIDTH))
        self.query, self.key, self.value = rng.standard_normal((3, WIDTH, HEADS * DIM), np.float32) * scale
        self.output = rng.standard_normal((HEADS * DIM, VOCABULARY), np.float32) * scale

    def project(self, tokens: Any, weights: Any) -> Any:
        """[batch, tokens] to [batch, heads, tokens, dim]."""
        # einsum, because BLAS spends longer on its threads than on products this small.
        heads = np.einsum("btw,wn->btn", self.embedding[tokens], weights).reshape(*tokens.shape, HEADS, DIM)
        return np.ascontiguousarray(heads.transpose(0, 2, 1, 3))

    def next_token(self, token: Any, keys: Any, values: Any) -> Any:
        """[batch, 1]: what follows `token`, given the cache up to it."""
        scores = np.einsum("bhqd,bhkd->bhqk", self.project(token, self.query), keys) / np.float32(np.sqrt(DIM))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = np.einsum("bhqk,bhkd->bqhd", weights / weights.sum(axis=-1, keepdims=True), values)
        logits = np.einsum("bn,nv->bv", mixed.reshape(len(token), HEADS * DIM), self.output)
        return logits.argmax(axis=-1)[:, None]


def quantize(block: Any, dtype: str) -> tuple[Any, Any]:
    """The block in the cache's dtype, and the scale of each of its vectors."""
    if not dtype.startswith("int"):
        return block.astype(getattr(ml_dtypes, dtype, dtype)), np.ones_like(block[..., :1])
    largest = 127 if dtype == "int8" else 7
    scale = np.abs(block).max(axis=-1, keepdims=True) / np.float32(largest)
    return np.rint(block / scale).astype(np.int8), scale


def stored(array: Any, dtype: str) -> Any:
    """An array as its cache holds it: 4-bit integers two to a byte."""
    return bc.pack_int4(array) if dtype == "int4" else array


class Cache:
    """Keys or values of the library, and the same written by NumPy."""

    def __init__(self, dtype: str, device: str, seed: int) -> None:
        # Old contents that a step must leave alone.
        noise = np.random.default_rng(seed).integers(-8, 8, SHAPE).astype(np.int8)
        self.dtype = dtype
        self.expected = noise if dtype.startswith("int") else noise.astype(getattr(ml_dtypes, dtype, dtype))
        self.expected_scales = np.ones((*SHAPE[:3], 1), np.float32)
        self.tensor = bc.asarray(stored(self.expected, dtype), device)
        self.scales = bc.asarray(self.expected_scales, device)

    def append(self, block: Any, plan: bc.WriteSlicePlan) -> None:
        """Writes a block of new positions, and the scales of integers."""
        elements, scale = quantize(block, self.dtype)
        plan.run(dest=self.tensor, source=bc.asarray(stored(elements, self.dtype), plan.device))
        ranges = plan.descriptor.ranges[:3]
        if self.dtype.startswith("int"):
            bc.write_slice(self.scales, bc.asarray(scale, plan.device), ranges)
        window = tuple(slice(*pair) for pair in ranges)
        self.expected[window] = elements
        self.expected_scales[window] = scale

    def read(self, length: int, where: str) -> Any:
        """The first positions in float32, after the whole cache was found to be NumPy's."""
        found, scales = self.tensor.numpy(), self.scales.numpy()
        wanted = stored(self.expected, self.dtype)
        if found.tobytes() != wanted.tobytes() or scales.tobytes() != self.expected_scales.tobytes():
            sys.exit(f"{where}: the cache differs from NumPy's")
        elements = bc.unpack_int4(found, SHAPE) if self.dtype == "int4" else found
        return elements[:, :, :length].astype(np.float32) * scales[:, :, :length]


@dataclass
class Outcome:
    """What a loop did."""

    path: str
    kernel: str
    error: float
    prompt_us: float
    step_us: float
    prompt_bytes: int


def plan_for(start: int, end: int, dtype: str, device: str) -> bc.WriteSlicePlan:
    """Writes positions `start` to `end` of a cache."""
    ranges = ((0, BATCH), (0, HEADS), (start, end), (0, DIM))
    return bc.WriteSlicePlan(dest_shape=SHAPE, ranges=ranges, dtype=dtype, device=device)


def decode(layer: Layer, prompt: Any, dtype: str, device: str) -> Outcome:
    """Generates tokens with a cache of this dtype, checking it at every step."""
    keys, values = Cache(dtype, device, 1), Cache(dtype, device, 2)
    bounds = [(0, PROMPT), *((at, at + 1) for at in range(PROMPT, PROMPT + STEPS))]
    plans = [plan_for(start, end, dtype, device) for start, end in bounds]
    tokens = prompt
    cached = None
    for step, (plan, (start, end)) in enumerate(zip(plans, bounds, strict=True)):
        new = tokens[:, start:end]
        keys.append(layer.project(new, layer.key), plan)
        values.append(layer.project(new, layer.value), plan)
        where = f"{dtype}, step {step}"
        cached = keys.read(end, f"{where}: keys")
        following = layer.next_token(new[:, -1:], cached, values.read(end, f"{where}: values"))
        tokens = np.append(tokens, following, axis=1)
    exact = layer.project(tokens[:, :-1], layer.key)
    sku = plans[1].sku
    return Outcome(
        path=plans[1].path,
        kernel=sku.backend if sku.backend == sku.arch else f"{sku.backend} {sku.arch}",
        error=float(np.linalg.norm(cached - exact) / np.linalg.norm(exact)),
        prompt_us=measure(plans[:1], keys, values),
        step_us=measure(plans[1:], keys, values),
        prompt_bytes=2 * plans[0].cost.bytes,
    )


def measure(plans: list[bc.WriteSlicePlan], keys: Cache, values: Cache) -> float:
    """Microseconds for keys and values of a step: checks, launch and write, back to back."""
    extents = [end - start for start, end in plans[0].descriptor.ranges]
    block = stored(np.ones(extents, keys.expected.dtype), keys.dtype)
    source = bc.asarray(block, plans[0].device)
    best = float("inf")
    for _ in range(20):
        bc.synchronize(plans[0].device)
        start = time.perf_counter()
        for plan in plans:
            plan.run(dest=keys.tensor, source=source)
            plan.run(dest=values.tensor, source=source)
        bc.synchronize(plans[0].device)
        best = min(best, (time.perf_counter() - start) / len(plans))
    return best * 1e6


def main() -> None:
    """Runs the loop once for each dtype and prints a table."""
    device = "cuda" if bc.cuda_device_count() else "cpu"
    where = "on the GPU" if device == "cuda" else f"on the CPU, because {bc.cuda_unavailable_reason()}"
    print(f"baracuda {bc.__version__} {where}")
    print(f"{BATCH} sequences, {HEADS} heads of {DIM}, caches of {LENGTH} positions: a prompt of {PROMPT} tokens,")
    print(f"then {STEPS} steps of one token. Every step is compared with NumPy, bit for bit.\n")
    layer = Layer()
    prompt = np.random.default_rng(7).integers(0, VOCABULARY, (BATCH, PROMPT))
    print("dtype     path  kernel         steps   µs a step   prompt µs    GB/s   key error")
    for dtype in DTYPES:
        outcome = decode(layer, prompt, dtype, device)
        rate = outcome.prompt_bytes / outcome.prompt_us / 1e3
        print(
            f"{dtype:9s} {outcome.path:5s} {outcome.kernel:14s} {STEPS + 1} ok {outcome.step_us:11.2f} "
            f"{outcome.prompt_us:11.1f} {rate:7.1f} {outcome.error:11.3%}"
        )
    print(f"\nAll {len(DTYPES)} caches are what NumPy has, after every step. Times are of keys and values together,")
    print("with all checks and launches; GB/s are the prompt's, bytes read and written; the error is rounding's.")


if __name__ == "__main__":
    main()
