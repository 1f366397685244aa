#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A decoder with a paged key/value cache, checked step by step against one with a dense cache.

Prompts of different lengths are answered together. Their keys and values live in pages that are handed out
as sequences grow, in no order; one append writes those of every prompt, and then one append per step those
of the newest tokens. A finished sequence's slot is -1, which the append skips. Beside it the same decoder
keeps a dense cache and writes by plain indexing; at every step both must say the same token and hold the
same bits. It runs with torch on a GPU if there is one, else with NumPy.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import baracuda as bc

HEADS, DIM, WIDTH, VOCABULARY = 4, 32, 64, 128
BLOCKS, BLOCK_SIZE = 40, 8
PROMPTS, STEPS = (3, 17, 8, 1, 11), 32
#: A sequence ends at this many tokens.
LONGEST = 40


class Pages:
    """Which pages each sequence has, and the slots of its next tokens."""

    def __init__(self, sequences: int) -> None:
        self.free = list(np.random.default_rng(1).permutation(BLOCKS))
        self.table: list[list[int]] = [[] for _ in range(sequences)]
        self.lengths = [0] * sequences

    def extend(self, sequence: int, tokens: int) -> list[int]:
        slots = []
        for position in range(self.lengths[sequence], self.lengths[sequence] + tokens):
            if position // BLOCK_SIZE == len(self.table[sequence]):
                self.table[sequence].append(int(self.free.pop()))
            slots.append(self.table[sequence][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        self.lengths[sequence] += tokens
        return slots

    def slots_of(self, sequence: int) -> list[int]:
        return [
            self.table[sequence][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            for position in range(self.lengths[sequence])
        ]


class Model:
    """Embedding, one attention layer and output, which have learnt nothing."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        self.embedding = rng.standard_normal((VOCABULARY, WIDTH), np.float32)
        scale = np.float32(WIDTH**-0.5)
        # One projection for queries, keys and values: the append reads views of its result.
        self.qkv = rng.standard_normal((WIDTH, 3 * HEADS * DIM), np.float32) * scale
        self.output = rng.standard_normal((HEADS * DIM, VOCABULARY), np.float32) * scale

    def project(self, tokens: Any) -> Any:
        """[tokens] to [tokens, 3, heads, dim], in the dtype of the cache."""
        return (self.embedding[tokens] @ self.qkv).reshape(-1, 3, HEADS, DIM).astype(np.float16)

    def next_token(self, query: Any, keys: Any, values: Any) -> int:
        """What follows, for one query [heads, dim] and all its keys and values [length, heads, dim]."""
        query, keys, values = (array.astype(np.float32) for array in (query, keys, values))
        scores = np.einsum("hd,lhd->hl", query, keys) / np.float32(DIM**0.5)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = np.einsum("hl,lhd->hd", weights / weights.sum(axis=-1, keepdims=True), values)
        return int((mixed.ravel() @ self.output).argmax())


class Device:
    """Arrays on the GPU as torch tensors, or NumPy's."""

    def __init__(self) -> None:
        self.torch: Any = None
        if bc.cuda_device_count():
            try:
                import torch  # noqa: PLC0415
            except ImportError:
                return
            if torch.cuda.is_available():
                self.torch = torch

    def put(self, array: Any) -> Any:
        return array if self.torch is None else self.torch.from_numpy(array).cuda()

    def get(self, array: Any) -> Any:
        return array if self.torch is None else array.cpu().numpy()


def main() -> int:
    device = Device()
    model = Model()
    pages = Pages(len(PROMPTS))
    # Keys and values of a page side by side in one tensor; the append takes views of it.
    cache = device.put(np.zeros((BLOCKS, 2, BLOCK_SIZE, HEADS, DIM), np.float16))
    key_cache, value_cache = cache[:, 0], cache[:, 1]
    dense = np.zeros((2, len(PROMPTS), LONGEST, HEADS, DIM), np.float16)

    rng = np.random.default_rng(5)
    texts = [list(rng.integers(0, VOCABULARY, length)) for length in PROMPTS]
    answers: list[list[int]] = [[] for _ in PROMPTS]
    pending = [list(text) for text in texts]
    appended = 0
    for step in range(STEPS):
        # All new tokens of all sequences, one after another.
        slots, queries = [], []
        flat = [token for tokens in pending for token in tokens] or [0]
        projected = model.project(np.array(flat))
        place = 0
        for sequence, tokens in enumerate(pending):
            first = pages.lengths[sequence]
            room = min(len(tokens), LONGEST - first)
            slots += pages.extend(sequence, room) + [-1] * (len(tokens) - room)
            rows = projected[place : place + room]
            dense[:, sequence, first : first + room] = rows[:, 1:].swapaxes(0, 1)
            place += len(tokens)
            queries.append(projected[place - 1, 0] if room else None)
        qkv = device.put(projected)
        bc.kv_cache_append(qkv[:, 1], qkv[:, 2], key_cache, value_cache, device.put(np.array(slots)))
        appended += sum(slot >= 0 for slot in slots)

        pending = []
        for sequence, query in enumerate(queries):
            if query is None:
                pending.append([0])  # finished: its slot stays -1
                continue
            length = pages.lengths[sequence]
            mapping = device.put(np.array(pages.slots_of(sequence)))
            keys, values = (device.get(part) for part in bc.kv_cache_gather(key_cache, value_cache, mapping))
            expected = dense[:, sequence, :length]
            if keys.tobytes() != expected[0].tobytes() or values.tobytes() != expected[1].tobytes():
                print(f"step {step}, sequence {sequence}: the paged cache differs from the dense one")
                return 1
            token = model.next_token(query, keys, values)
            if token != model.next_token(query, *expected):
                print(f"step {step}, sequence {sequence}: the next token differs")
                return 1
            answers[sequence].append(token)
            pending.append([token])

    where = "NumPy on the CPU" if device.torch is None else "torch on the GPU"
    used = sum(len(table) for table in pages.table)
    print(f"{where}: {len(PROMPTS)} sequences, {appended} tokens in {used} pages of {BLOCK_SIZE}")
    for sequence, answer in enumerate(answers):
        print(f"  prompt of {PROMPTS[sequence]:2}: {len(answer):2} tokens, {' '.join(map(str, answer[:8]))} ...")
    print("every step agrees with the dense cache")
    return 0


if __name__ == "__main__":
    sys.exit(main())
