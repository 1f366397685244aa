# SPDX-License-Identifier: Apache-2.0
"""Paged key/value caches: slots, layouts, conversions to float8, and reading back."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import support
from hypothesis import given
from hypothesis import strategies as st
from support import DTYPES, Backend, Placed

import baracuda as bc
from reference import dynamic_write as reference

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
WIDER = ("float16", "bfloat16", "float32")
PLAIN = [name for name in DTYPES if name not in ("int4", "uint4", "complex64", "complex128")]


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def make_plan(
    kind: str, tokens: tuple[int, ...], cache: tuple[int, ...], dtype: str, device: str, **fields: Any
) -> Any:
    plan = bc.KvCacheAppendPlan if kind == "append" else bc.KvCacheGatherPlan
    return plan(
        tokens=tokens[0], heads=tokens[1], dim=tokens[2], blocks=cache[0], block_size=cache[1], dtype=dtype,
        device=device, **fields,
    )  # fmt: skip


def check_append(tokens: tuple[Placed, Placed], caches: tuple[Placed, Placed], slots: np.ndarray, device: str) -> Any:
    """Without a conversion: every bit, and what is around."""
    expected = []
    for token, cache in zip(tokens, caches, strict=True):
        after = bits(cache.numpy())
        reference.append(bits(token.numpy()), after, slots)
        expected.append(after)
    plan = make_plan(
        "append", tokens[0].shape, caches[0].shape, tokens[0].kind.name, device, index_dtype=slots.dtype.name
    )
    plan.run(
        key=tokens[0].tensor, value=tokens[1].tensor, key_cache=caches[0].tensor, value_cache=caches[1].tensor,
        slot_mapping=bc.asarray(slots, device),
    )  # fmt: skip
    for cache, after in zip(caches, expected, strict=True):
        np.testing.assert_array_equal(bits(cache.numpy()), after)
        cache.assert_guards()
    for token in tokens:
        token.assert_untouched()
    return plan


def check_gather(caches: tuple[Placed, Placed], tokens: tuple[Placed, Placed], slots: np.ndarray, device: str) -> None:
    plan = make_plan(
        "gather", tokens[0].shape, caches[0].shape, tokens[0].kind.name, device, index_dtype=slots.dtype.name
    )
    plan.run(
        key=tokens[0].tensor, value=tokens[1].tensor, key_cache=caches[0].tensor, value_cache=caches[1].tensor,
        slot_mapping=bc.asarray(slots, device),
    )  # fmt: skip
    for cache, token in zip(caches, tokens, strict=True):
        np.testing.assert_array_equal(bits(token.numpy()), reference.gather(bits(cache.numpy()), slots))
        token.assert_guards()
        cache.assert_untouched()


def placed_pair(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, device: str, **options: Any) -> Any:
    return tuple(Placed(shape, dtype, device, fill=rng, **options) for _ in range(2))


def some_slots(rng: np.random.Generator, tokens: int, capacity: int, dtype: str = "int64") -> np.ndarray:
    """Slots of which some are outside and some come twice."""
    slots = rng.integers(-2, capacity + 3, tokens)
    limits = np.iinfo(dtype)
    for value in (limits.min, limits.max, capacity, -1):
        if tokens > 6:
            slots[rng.integers(0, tokens)] = value
    return slots.astype(dtype)


# ---------------------------------------------------------------------------------------------------
# Cases by their names.


@pytest.mark.sanitizer
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_e07_slots_outside_are_skipped(device: str, backend: Backend, index_dtype: str) -> None:
    rows = np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.float32).reshape(4, 1, 2)
    outside = [8] if index_dtype == "int32" else [8, 2**40 + 17]
    for beyond in outside:
        caches = tuple(backend.input(np.zeros((2, 4, 1, 2), np.float32)) for _ in range(2))
        tokens = tuple(backend.input(rows) for _ in range(2))
        check_append(tokens, caches, np.array([0, -1, beyond, 7], index_dtype), device)
        for cache in caches:
            assert cache.numpy()[0, 0, 0].tolist() == [1, 2]
            assert cache.numpy()[1, 3, 0].tolist() == [7, 8]
            assert np.count_nonzero(cache.numpy()) == 4


def test_e08_blocks_are_of_the_logical_size(device: str, backend: Backend) -> None:
    """Slot 75849 is place 9 of block 4740, whatever the storage's own last axis is."""
    # Stored as [blocks, heads * dim / 4, 16, 4]: the storage's trailing axis of 4 is no block size.
    storage = backend.output((16384, 1, 16, 4), "int8")
    caches = [storage.memory.view("int8", (16384, 16, 1, 4), (64, 4, 64, 1), storage.offset)]
    other = backend.output((16384, 16, 1, 4), "int8")
    caches.append(other.tensor)
    plan = make_plan("append", (1, 1, 4), (16384, 16, 1, 4), "int8", device, index_dtype="int32")
    key = np.array([1, 2, 3, 4], np.int8).reshape(1, 1, 4)
    before = storage.numpy()
    plan.run(
        key=backend.array(key), value=backend.array(key), key_cache=caches[0], value_cache=caches[1],
        slot_mapping=backend.array(np.array([75849], np.int32)),
    )  # fmt: skip
    now = storage.numpy()
    assert now[4740, 0, 9].tolist() == [1, 2, 3, 4]
    now[4740, 0, 9] = before[4740, 0, 9]
    np.testing.assert_array_equal(now, before)


@pytest.mark.requires("gpu.memory")
def test_e06_a_cache_beyond_int32() -> None:
    """[blocks, heads, dim / 8, block_size, 8], seen as heads * dim / 8 heads of eight elements."""
    torch = support.torch()
    caches = [torch.zeros((64000, 32, 16, 16, 8), dtype=torch.float16, device="cuda") for _ in range(2)]
    seen = [cache.reshape(64000, 512, 16, 8).permute(0, 2, 1, 3) for cache in caches]
    key = torch.randn(1, 512, 8, device="cuda").half()
    slots = torch.tensor([63999 * 16 + 5], device="cuda")
    bc.kv_cache_append(key, -key, *seen, slots)
    assert torch.equal(seen[0][63999, 5], key[0])
    assert torch.equal(seen[1][63999, 5], -key[0])
    back = bc.kv_cache_gather(*seen, slots)
    assert torch.equal(back[0], key)
    for cache in caches:
        written = int(torch.count_nonzero(cache[-1]))
        assert written == int(torch.count_nonzero(key))
        assert not any(bool(part.any()) for part in cache[:-1].split(8000))


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_e16_a_conversion_needs_a_scale_and_saturates(device: str, backend: Backend, dtype: str) -> None:
    values = np.array([448, 449, 1e4, -0.0, np.nan], DTYPES[dtype].numpy).reshape(5, 1, 1)
    caches = [backend.array(np.zeros((1, 5, 1, 1), ml_dtypes.float8_e4m3fn)) for _ in range(2)]
    slots = backend.array(np.arange(5))
    given = {"key": backend.array(values), "value": backend.array(values)}
    with pytest.raises(bc.InvalidProblemError, match=r"^kv_cache_append: key_scale: is missing.*float8_e4m3fn"):
        bc.kv_cache_append(*given.values(), *caches, slots)
    plan = make_plan("append", (5, 1, 1), (1, 5), dtype, device, cache_dtype="float8_e4m3fn")
    operands = {**given, "key_cache": caches[0], "value_cache": caches[1], "slot_mapping": slots}
    with pytest.raises(bc.InvalidProblemError, match=r"^KvCacheAppendPlan: key_scale: is missing$"):
        plan.run(**operands)
    plain = make_plan("append", (5, 1, 1), (1, 5), dtype, device)
    with pytest.raises(bc.InvalidProblemError, match=f"key_cache: expected dtype {dtype}, got float8_e4m3fn"):
        plain.run(**operands)
    bc.kv_cache_append(*given.values(), *caches, slots, key_scale=1.0, value_scale=1.0)
    for cache in caches:
        got = cache.numpy().reshape(5).astype(np.float32)
        np.testing.assert_array_equal(got, np.array([448, 448, 448, -0.0, np.nan], np.float32))
        assert np.signbit(got[3])


# ---------------------------------------------------------------------------------------------------
# The support matrix.

#: How caches lie in memory: the axes' order from the longest step, after those of the shape.
CACHE_LAYOUTS = {
    "blocks, places, heads": (0, 1, 2, 3),
    "blocks, heads, places": (0, 2, 1, 3),
    "heads first": (2, 0, 1, 3),
    "dims before places": (0, 2, 3, 1),
}


@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize("layout", CACHE_LAYOUTS)
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_layouts(device: str, dtype: str, layout: str, index_dtype: str) -> None:
    rng = np.random.default_rng(1)
    for heads, dim, misalign in ((2, 8, 0), (3, 5, 1), (1, 16, 0)):
        shape = (4, 3, heads, dim)
        strides = support.ordered(shape, CACHE_LAYOUTS[layout])
        caches = placed_pair(rng, shape, dtype, device, strides=strides, misalign=misalign)
        slots = some_slots(rng, 9, 12, index_dtype)
        check_append(placed_pair(rng, (9, heads, dim), dtype, device, misalign=misalign), caches, slots, device)
        caches = placed_pair(rng, shape, dtype, device, strides=strides, misalign=misalign)
        check_gather(caches, placed_pair(rng, (9, heads, dim), dtype, device), slots, device)


@pytest.mark.parametrize("layout", support.OUTPUT_LAYOUTS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_layouts_of_tokens(device: str, dtype: str, layout: str) -> None:
    rng = np.random.default_rng(2)
    slots = some_slots(rng, 9, 12)
    tokens = placed_pair(rng, (9, 2, 8), dtype, device, layout=layout)
    check_append(tokens, placed_pair(rng, (4, 3, 2, 8), dtype, device, layout=layout), slots, device)
    caches = placed_pair(rng, (4, 3, 2, 8), dtype, device)
    check_gather(caches, placed_pair(rng, (9, 2, 8), dtype, device, layout=layout), slots, device)


def test_views_of_fused_tensors(device: str, backend: Backend) -> None:
    """Keys and values inside one projection, caches inside one tensor, in three usual orders."""
    rng = np.random.default_rng(3)
    tokens, heads, dim = 7, 2, 16
    qkv = backend.memory(rng.integers(0, 256, tokens * 3 * heads * dim * 2, np.uint8))
    step = heads * dim
    key, value = (qkv.view("float16", (tokens, heads, dim), (3 * step, dim, 1), part * step * 2) for part in (1, 2))
    values = qkv.before.view(np.uint16).reshape(tokens, 3, heads, dim)
    slots = np.array([3, 0, 11, -1, 5, 5, 99])
    blocks, block_size = 4, 3
    for order in ((0, 1, 2, 3, 4), (1, 0, 2, 3, 4), (1, 2, 0, 3, 4), (1, 3, 2, 0, 4)):
        # The axes are: key or value, block, place, head, dim.
        shape = (2, blocks, block_size, heads, dim)
        strides = support.ordered(shape, order)
        memory = backend.memory(np.zeros(int(np.prod(shape)) * 2, np.uint8))
        caches = [memory.view("float16", shape[1:], strides[1:], part * strides[0] * 2) for part in range(2)]
        make_plan("append", (tokens, heads, dim), (blocks, block_size), "float16", device).run(
            key=key, value=value, key_cache=caches[0], value_cache=caches[1], slot_mapping=backend.array(slots)
        )
        got = np.lib.stride_tricks.as_strided(memory.now().view(np.uint16), shape, [stride * 2 for stride in strides])
        for part in range(2):
            expected = np.zeros(shape[1:], np.uint16)
            reference.append(values[:, part + 1], expected, slots)
            np.testing.assert_array_equal(got[part], expected)


# What reaches which kernel: tokens, heads, dim, blocks, block size.
SIZES = [
    (5, 2, 8, 3, 4),
    (64, 8, 16, 9, 16),
    (3, 40, 16, 2, 4),
    (1025, 1, 8, 70, 16),
    (1100, 2, 24, 100, 16),
]


@pytest.mark.sanitizer
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("misalign", [0, 1])
def test_each_kernel(device: str, size: tuple[int, ...], dtype: str, misalign: int) -> None:
    rng = np.random.default_rng(4)
    tokens, heads, dim, blocks, block_size = size
    slots = some_slots(rng, tokens, blocks * block_size)
    caches = placed_pair(rng, (blocks, block_size, heads, dim), dtype, device, misalign=misalign)
    check_append(placed_pair(rng, (tokens, heads, dim), dtype, device), caches, slots, device)
    check_gather(
        placed_pair(rng, (blocks, block_size, heads, dim), dtype, device),
        placed_pair(rng, (tokens, heads, dim), dtype, device, misalign=misalign), slots, device,
    )  # fmt: skip


@pytest.mark.parametrize("tokens", [2, 65, 1024, 1025, 3000, 8192, 8193, 20000])
@pytest.mark.parametrize("slots", ["one", "few", "all", "pairs", "far pairs"])
def test_the_last_token_of_a_slot_stays(device: str, backend: Backend, tokens: int, slots: str) -> None:
    rng = np.random.default_rng(5)
    capacity = 2 * tokens + 4
    mapping = {
        "one": np.full(tokens, 3),
        "few": rng.integers(0, 7, tokens),
        "all": rng.integers(0, capacity, tokens),
        "pairs": np.arange(tokens) // 2,
        "far pairs": np.arange(tokens) % max(tokens // 2, 1),
    }[slots]
    key = np.arange(tokens, dtype=np.int32).reshape(tokens, 1, 1)
    expected = np.full((capacity // 4, 4, 1, 1), -1, np.int32)
    caches = [backend.array(expected) for _ in range(2)]
    reference.append(key, expected, mapping)
    for _ in range(2):
        bc.kv_cache_append(backend.array(key), backend.array(key), *caches, backend.array(mapping))
        for cache in caches:
            np.testing.assert_array_equal(cache.numpy(), expected)


def test_empties(device: str) -> None:
    rng = np.random.default_rng(6)
    none = np.zeros(0, np.int64)
    cache = (3, 4, 2, 8)
    check_append(
        placed_pair(rng, (0, 2, 8), "float32", device), placed_pair(rng, cache, "float32", device), none, device
    )
    check_gather(
        placed_pair(rng, cache, "float32", device), placed_pair(rng, (0, 2, 8), "float32", device), none, device
    )
    slots = np.array([0, 1, -1])
    for empty in ((0, 4, 2, 8), (3, 0, 2, 8)):
        caches = placed_pair(rng, empty, "float32", device)
        check_append(placed_pair(rng, (3, 2, 8), "float32", device), caches, slots, device)
        check_gather(caches, placed_pair(rng, (3, 2, 8), "float32", device), slots, device)
    for empty in ((3, 4, 0, 8), (3, 4, 2, 0)):
        tokens = placed_pair(rng, (3, *empty[2:]), "float32", device)
        check_append(tokens, placed_pair(rng, empty, "float32", device), slots, device)


# ---------------------------------------------------------------------------------------------------
# Conversions.


def float8_values(dtype: str, cache_dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Every number of the cache's type, the points half way between neighbours and just beside those."""
    numbers = np.arange(256).astype(np.uint8).view(DTYPES[cache_dtype].numpy).astype(np.float64)
    numbers = np.unique(numbers[np.isfinite(numbers)])
    half = (numbers[1:] + numbers[:-1]) / 2
    points = np.concatenate([numbers, half, half * (1 + 2.0**-8), half * (1 - 2.0**-8), rng.normal(0, 30, 300)])
    special = [np.nan, -np.nan, np.inf, -np.inf, -0.0, 0.0, 1e30, -1e30, 1e-30, 464, 465, 61440, 61441, 65504]
    with np.errstate(over="ignore"):
        return np.concatenate([points, special]).astype(DTYPES[dtype].numpy)


@pytest.mark.parametrize("dtype", WIDER)
@pytest.mark.parametrize("cache_dtype", FLOAT8)
@pytest.mark.parametrize("scale", [1.0, 0.37, 2.0**-20, 3e4])
@pytest.mark.parametrize("dim", [8, 5])
def test_conversions_round_to_nearest_even_and_saturate(
    device: str, backend: Backend, dtype: str, cache_dtype: str, scale: float, dim: int
) -> None:
    rng = np.random.default_rng(7)
    with np.errstate(all="ignore"):
        values = (float8_values(dtype, cache_dtype, rng).astype(np.float64) * scale).astype(DTYPES[dtype].numpy)
    tokens = values.size // dim
    key = values[: tokens * dim].reshape(tokens, 1, dim)
    value = -key
    slots = rng.permutation(tokens)
    caches = [backend.array(np.zeros((tokens, 1, 1, dim), DTYPES[cache_dtype].numpy)) for _ in range(2)]
    scales = {"key_scale": backend.array(np.array([scale], np.float32)),
              "value_scale": backend.array(np.array([2 * scale], np.float32))}  # fmt: skip
    bc.kv_cache_append(backend.array(key), backend.array(value), *caches, backend.array(slots), **scales)
    for cache, tensor, factor in ((caches[0], key, scale), (caches[1], value, 2 * scale)):
        expected = np.zeros((tokens, 1, 1, dim), np.uint8)
        reference.append(reference.quantize(tensor, factor, cache_dtype), expected, slots)
        np.testing.assert_array_equal(bits(cache.numpy()), expected)


@pytest.mark.parametrize("cache_dtype", FLOAT8)
def test_finite_conversions_are_ml_dtypes(cache_dtype: str) -> None:
    values = float8_values("float32", cache_dtype, np.random.default_rng(8))
    largest = float(ml_dtypes.finfo(cache_dtype).max)
    values = values[np.abs(values) <= largest]
    expected = values.astype(DTYPES[cache_dtype].numpy)
    np.testing.assert_array_equal(reference.quantize(values, 1.0, cache_dtype), bits(expected))


@pytest.mark.parametrize("dtype", WIDER)
@pytest.mark.parametrize("cache_dtype", FLOAT8)
@pytest.mark.parametrize("dim", [8, 3])
def test_gathering_multiplies_by_the_scale(
    device: str, backend: Backend, dtype: str, cache_dtype: str, dim: int
) -> None:
    blocks = -(-256 // dim)
    codes = np.resize(np.arange(256).astype(np.uint8), (blocks, 1, 1, dim)).view(DTYPES[cache_dtype].numpy)
    slots = np.append(np.arange(blocks), [-1, blocks])
    scales = (0.3, 3.0)
    got = bc.kv_cache_gather(
        backend.array(codes), backend.array(codes), backend.array(slots), dtype=dtype,
        key_scale=scales[0], value_scale=scales[1],
    )  # fmt: skip
    for tensor, scale in zip(got, scales, strict=True):
        with np.errstate(all="ignore"):
            product = codes.reshape(blocks, 1, dim).astype(np.float32) * np.float32(scale)
            expected = np.concatenate([product, np.zeros((2, 1, dim), np.float32)]).astype(DTYPES[dtype].numpy)
        np.testing.assert_array_equal(backend.read(tensor).astype(np.float64), expected.astype(np.float64))


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", WIDER)
@pytest.mark.parametrize("cache_dtype", FLOAT8)
@pytest.mark.parametrize("tokens", [9, 1100])
@pytest.mark.parametrize("dim", [16, 5])
def test_each_conversion_kernel(device: str, dtype: str, cache_dtype: str, tokens: int, dim: int) -> None:
    rng = np.random.default_rng(9)
    backend = Backend(device)
    values = [rng.standard_normal((tokens, 2, dim)).astype(DTYPES[dtype].numpy) for _ in range(2)]
    slots = some_slots(rng, tokens, 300)
    caches = [backend.output((100, 3, 2, dim), cache_dtype) for _ in range(2)]
    expected = []
    for value, cache in zip(values, caches, strict=True):
        after = bits(cache.numpy())
        reference.append(reference.quantize(value, 0.25, cache_dtype), after, slots)
        expected.append(after)
    scale = backend.array(np.array([0.25], np.float32))
    make_plan("append", (tokens, 2, dim), (100, 3), dtype, device, cache_dtype=cache_dtype).run(
        key=backend.array(values[0]), value=backend.array(values[1]), key_cache=caches[0].tensor,
        value_cache=caches[1].tensor, slot_mapping=backend.array(slots), key_scale=scale, value_scale=scale,
    )  # fmt: skip
    for cache, after in zip(caches, expected, strict=True):
        np.testing.assert_array_equal(bits(cache.numpy()), after)
        cache.assert_guards()
    gathered = [backend.output((tokens, 2, dim), dtype, misalign=int(dim == 5)) for _ in range(2)]
    make_plan("gather", (tokens, 2, dim), (100, 3), dtype, device, cache_dtype=cache_dtype).run(
        key_cache=caches[0].tensor, value_cache=caches[1].tensor, slot_mapping=backend.array(slots),
        key_scale=scale, value_scale=scale, key=gathered[0].tensor, value=gathered[1].tensor,
    )  # fmt: skip
    for cache, tensor in zip(caches, gathered, strict=True):
        stored = reference.gather(cache.numpy(), slots).astype(np.float32) * np.float32(0.25)
        np.testing.assert_array_equal(
            tensor.numpy().astype(np.float32), stored.astype(DTYPES[dtype].numpy).astype(np.float32)
        )
        tensor.assert_guards()


# ---------------------------------------------------------------------------------------------------
# Properties, forms, errors, graphs.


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    tokens, heads, dim = (draw(st.integers(0, most)) for most in (40, 4, 20))
    blocks, block_size = (draw(st.integers(0, most)) for most in (6, 5))
    shape = (blocks, block_size, heads, dim)
    steps = draw(st.lists(st.sampled_from((1, 1, 2)), min_size=4, max_size=4))
    strides = support.ordered(shape, draw(st.permutations(range(4))), steps)
    signs = draw(st.lists(st.sampled_from((1, 1, -1)), min_size=4, max_size=4))
    capacity = blocks * block_size
    index_dtype = draw(st.sampled_from(("int32", "int64")))
    limits = np.iinfo(index_dtype)
    slot = st.one_of(st.integers(-1, capacity), st.sampled_from((int(limits.min), int(limits.max), capacity - 1, 0)))
    return {
        "tokens": (tokens, heads, dim),
        "cache": shape,
        "strides": tuple(sign * stride for sign, stride in zip(signs, strides, strict=True)),
        "slots": np.array(draw(st.lists(slot, min_size=tokens, max_size=tokens)), index_dtype),
        "dtype": draw(st.sampled_from(PLAIN)),
        "layout": draw(st.sampled_from(support.OUTPUT_LAYOUTS)),
        "misalign": (draw(st.integers(0, 17)), draw(st.integers(0, 17))),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


@given(problem=problems())
def test_caches_are_the_reference_s(device: str, problem: dict[str, Any]) -> None:
    rng = np.random.default_rng(problem["seed"])
    dtype = problem["dtype"]

    def tokens() -> Any:
        return placed_pair(
            rng, problem["tokens"], dtype, device, layout=problem["layout"], misalign=problem["misalign"][0]
        )

    def caches() -> Any:
        return placed_pair(
            rng, problem["cache"], dtype, device, strides=problem["strides"], misalign=problem["misalign"][1]
        )

    check_append(tokens(), caches(), problem["slots"], device)
    check_gather(caches(), tokens(), problem["slots"], device)


@pytest.mark.parametrize("framework", ["numpy", "baracuda", pytest.param("torch", marks=pytest.mark.requires("torch"))])
def test_forms_return_the_callers_kind(framework: str) -> None:
    backend = Backend("cpu")
    key = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    caches = [backend.of(framework, np.zeros((2, 2, 2, 2), np.float32)) for _ in range(2)]
    slots = backend.of(framework, np.array([3, 0, 1]))
    bc.kv_cache_append(backend.of(framework, key), backend.of(framework, -key), *caches, slots)
    got = bc.kv_cache_gather(*caches, slots)
    assert type(got[0]) is type(caches[0])
    np.testing.assert_array_equal(backend.read(got[0]), key)
    np.testing.assert_array_equal(backend.read(got[1]), -key)


@pytest.mark.parametrize(
    ("fields", "error", "sentence"),
    [
        ({"dtype": "int4"}, bc.UnsupportedError, "dtype: no kernel for int4"),
        ({"dtype": "complex64"}, bc.UnsupportedError, "dtype: no kernel for complex64"),
        ({"cache_dtype": "float16"}, bc.UnsupportedError, "cache_dtype: no conversion from float32 to float16"),
        ({"dtype": "float64", "cache_dtype": "float8_e5m2"}, bc.UnsupportedError, "no conversion from float64"),
        ({"index_dtype": "uint32"}, bc.InvalidProblemError, "index_dtype: expected int32 or int64, got uint32"),
        ({"tokens": -1}, bc.InvalidProblemError, "extent -1 of axis 0 is negative"),
        ({"heads": 2**20, "dim": 2**20}, bc.UnsupportedError, "heads, dim: at most"),
    ],
)
@pytest.mark.parametrize("plan", [bc.KvCacheAppendPlan, bc.KvCacheGatherPlan])
def test_refused_descriptors(plan: Any, fields: dict[str, Any], error: type[Exception], sentence: str) -> None:
    given = {"tokens": 1, "heads": 1, "dim": 1, "blocks": 1, "block_size": 1, "dtype": "float32", **fields}
    with pytest.raises(error, match=f"^{plan.__name__}: .*{sentence}"):
        plan(**given, device="cpu")


def test_refused_operands() -> None:
    key, cache = np.zeros((2, 1, 4), np.float32), np.zeros((3, 2, 1, 4), np.float32)
    slots = np.arange(2)
    with pytest.raises(bc.InvalidProblemError, match="key_cache: shares memory with value_cache"):
        bc.kv_cache_append(key, key, cache, cache, slots)
    with pytest.raises(bc.InvalidProblemError, match="value_cache: expected shape"):
        bc.kv_cache_append(key, key, cache, cache[:2].copy(), slots)
    with pytest.raises(bc.InvalidProblemError, match="key_scale: is no operand"):
        bc.kv_cache_append(key, key, cache, cache.copy(), slots, key_scale=1.0)
    with pytest.raises(bc.InvalidProblemError, match=r"kv_cache_append: key: expected \[tokens, heads, dim\]"):
        bc.kv_cache_append(key[0], key, cache, cache.copy(), slots)
    with pytest.raises(bc.InvalidProblemError, match=r"key_cache: expected \[blocks, block_size, heads, dim\]"):
        bc.kv_cache_append(key, key, cache[0], cache.copy(), slots)


def test_what_a_plan_says(device: str) -> None:
    plan = make_plan("append", (64, 8, 128), (100, 16), "bfloat16", device)
    names = ["key", "value", "key_cache", "value_cache", "slot_mapping"]
    assert [operand.name for operand in plan.operands] == names
    assert plan.workspace_size == 0
    assert plan.path == "copy"
    assert plan.cost.bytes == 4 * 64 * 8 * 128 * 2 + 64 * 8
    assert plan.precision_guarantee.math_precision == "exact"
    converting = make_plan("append", (64, 8, 128), (100, 16), "bfloat16", device, cache_dtype="float8_e4m3fn")
    assert [operand.name for operand in converting.operands] == [*names, "key_scale", "value_scale"]
    assert converting.path == "convert"
    assert converting.sku.aux_dtype == "float8_e4m3fn"
    assert converting.precision_guarantee.deterministic


@pytest.mark.requires("gpu", "torch.cuda")
@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_graph_appends_where_the_slots_say(cache_dtype: str) -> None:
    """The slots are data: one captured graph serves every step."""
    torch = support.torch()
    tokens, heads, dim, blocks, block_size = 6, 2, 16, 20, 4
    kind = getattr(torch, cache_dtype)
    caches = [torch.zeros((blocks, block_size, heads, dim), device="cuda").to(kind) for _ in range(2)]
    key = torch.zeros((tokens, heads, dim), dtype=torch.bfloat16, device="cuda")
    value = torch.zeros_like(key)
    slots = torch.full((tokens,), -1, device="cuda")
    scale = torch.full((1,), 0.5, device="cuda")
    scales = {} if cache_dtype == "bfloat16" else {"key_scale": scale, "value_scale": scale}
    plan = make_plan(
        "append", (tokens, heads, dim), (blocks, block_size), "bfloat16", "cuda",
        cache_dtype=None if cache_dtype == "bfloat16" else cache_dtype,
    )  # fmt: skip
    bound = plan.bind(key=key, value=value, key_cache=caches[0], value_cache=caches[1], slot_mapping=slots, **scales)
    bound.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        key += 1
        value -= 1
        slots += tokens
        bound.run()
    key.zero_()
    value.zero_()
    slots.copy_(torch.arange(tokens, device="cuda") - tokens)
    expected = np.zeros((blocks * block_size,), np.float32)
    for step in range(1, 16):
        graph.replay()
        places = np.arange(tokens) + (step - 1) * tokens
        expected[places[places < expected.size]] = step * (1.0 if cache_dtype == "bfloat16" else 2.0)
    torch.cuda.synchronize()
    for cache, sign in zip(caches, (1, -1), strict=True):
        got = cache.float().cpu().numpy().reshape(-1, heads, dim)
        np.testing.assert_array_equal(got, np.broadcast_to(sign * expected[:, None, None], got.shape))


@pytest.mark.requires("gpu", "torch.cuda")
@pytest.mark.parametrize("tokens", [64, 5000])
def test_runs_agree_bit_for_bit(tokens: int) -> None:
    """Many tokens fight for few slots; the outcome is the same in every run."""
    torch = support.torch()
    slots = torch.randint(0, 50, (tokens,), device="cuda")
    key = torch.randn(tokens, 4, 64, device="cuda").bfloat16()
    value = torch.randn(tokens, 4, 64, device="cuda").bfloat16()
    outcomes = []
    for _ in range(20):
        caches = [torch.zeros(10, 16, 4, 64, device="cuda").bfloat16() for _ in range(2)]
        bc.kv_cache_append(key, value, *caches, slots)
        outcomes.append(torch.stack(caches))
    assert all(torch.equal(outcomes[0], outcome) for outcome in outcomes)


@pytest.mark.requires("gpu", "torch.cuda")
@pytest.mark.parametrize("tokens", [700, 3000, 9000])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_slots_from_the_kernel_before(tokens: int, captured: bool) -> None:
    """A write of the library's own makes the slots just before: other slots each time, some of them twice. A kernel
    that looked at them too early would leave an earlier token."""
    torch = support.torch()
    rounds, capacity = 12, 4096
    chosen = torch.randint(0, capacity, (rounds, tokens), device="cuda")
    slots = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    numbers = torch.arange(1, tokens + 1, device="cuda")
    key = numbers.int().repeat_interleave(16).reshape(tokens, 1, 16)
    caches = torch.zeros((rounds, 2, capacity // 16, 16, 1, 16), dtype=torch.int32, device="cuda")

    def work() -> None:
        for step in range(rounds):
            bc.write_slice(slots, chosen[step], ...)
            bc.kv_cache_append(key, key, *caches[step], slots)

    work()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        caches.zero_()
        graph.replay()
    expected = torch.zeros((rounds, capacity), dtype=torch.int64, device="cuda")
    expected.scatter_reduce_(1, chosen, numbers.expand(rounds, -1), "amax")
    for part in range(2):
        got = caches[:, part].reshape(rounds, capacity, 16)
        assert torch.equal(got, expected[:, :, None].expand_as(got).int())
