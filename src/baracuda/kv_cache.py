# SPDX-License-Identifier: Apache-2.0
"""Paged key/value caches: appending tokens by slot, and reading them back."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from baracuda import _core
from baracuda._base import Descriptor, Plan, cached_plan
from baracuda._outputs import new_output, returned
from baracuda.dtypes import canonical
from baracuda.errors import InvalidProblemError
from baracuda.plan import PlanPreference

__all__ = [
    "KvCacheAppendDescriptor",
    "KvCacheAppendPlan",
    "KvCacheGatherDescriptor",
    "KvCacheGatherPlan",
    "kv_cache_append",
    "kv_cache_gather",
]


@dataclass(frozen=True, kw_only=True)
class KvCacheAppendDescriptor(Descriptor, operator="kv_cache_append"):
    """The problem of :class:`KvCacheAppendPlan`.

    Attributes:
        tokens: how many keys, and values, there are.
        heads: of each token.
        dim: of each head.
        blocks: of each cache.
        block_size: how many tokens fit into a block.
        dtype: of the keys and values; any but int4, uint4 and the complex ones.
        cache_dtype: ``"float8_e4m3fn"`` or ``"float8_e5m2"``, to convert from float16, bfloat16 or float32; None:
            the caches' dtype is ``dtype``.
        index_dtype: of the slot mapping, ``"int32"`` or ``"int64"``.
    """

    tokens: int
    heads: int
    dim: int
    blocks: int
    block_size: int
    dtype: Any
    cache_dtype: Any = None
    index_dtype: Any = "int64"


class KvCacheAppendPlan(Plan):
    """Writes the keys and values of tokens to their slots of a paged cache, both at once.

    Slot ``s`` is place ``s % block_size`` of block ``s // block_size``. A slot below 0 or not below
    ``blocks * block_size`` skips its token. Of several tokens with the same slot the last one stays, on every
    device and in every run.

    Operands of ``run``:
        key, value (in): ``[tokens, heads, dim]``, any strides, such as views of one fused projection.
        key_cache, value_cache (inout): ``[blocks, block_size, heads, dim]``, any strides whose elements do not
            overlap: views of one fused cache, or of caches whose heads come before the places.
        slot_mapping (in): ``[tokens]``.
        key_scale, value_scale (in): float32, ``[1]``; with a ``cache_dtype`` only.

    With a ``cache_dtype`` the cache gets ``x / scale``, computed in float32, rounded to nearest even and
    saturated: what is beyond the largest finite number, infinities included, becomes that number. NaN becomes
    0x7f. Without one no bit is changed. ``path`` is ``"copy"``, ``"convert"`` or ``"empty"``.

    On a GPU up to 1024 tokens are one launch; more are two for each 8192 of them.

    >>> import numpy as np, baracuda as bc
    >>> plan = bc.KvCacheAppendPlan(tokens=3, heads=1, dim=1, blocks=2, block_size=2, dtype="int8", device="cpu")
    >>> key = np.array([1, 2, 3], np.int8).reshape(3, 1, 1)
    >>> cache = np.zeros((2, 2, 2, 1, 1), np.int8)
    >>> plan.run(key=key, value=-key, key_cache=cache[0], value_cache=cache[1], slot_mapping=np.array([3, -1, 0]))
    >>> cache.reshape(2, 2, 2).tolist()
    [[[3, 0], [0, 1]], [[-3, 0], [0, -1]]]
    """

    Descriptor: ClassVar[type[Any]] = KvCacheAppendDescriptor


@dataclass(frozen=True, kw_only=True)
class KvCacheGatherDescriptor(Descriptor, operator="kv_cache_gather"):
    """The problem of :class:`KvCacheGatherPlan`.

    Attributes:
        tokens: how many keys, and values, there are.
        heads: of each token.
        dim: of each head.
        blocks: of each cache.
        block_size: how many tokens fit into a block.
        dtype: of the keys and values; any but int4, uint4 and the complex ones.
        cache_dtype: ``"float8_e4m3fn"`` or ``"float8_e5m2"``, to convert to float16, bfloat16 or float32; None:
            the caches' dtype is ``dtype``.
        index_dtype: of the slot mapping, ``"int32"`` or ``"int64"``.
    """

    tokens: int
    heads: int
    dim: int
    blocks: int
    block_size: int
    dtype: Any
    cache_dtype: Any = None
    index_dtype: Any = "int64"


class KvCacheGatherPlan(Plan):
    """Reads tokens back from their slots of a paged cache: the inverse of :class:`KvCacheAppendPlan`.

    Operands of ``run``:
        key_cache, value_cache (in): ``[blocks, block_size, heads, dim]``, any strides.
        slot_mapping (in): ``[tokens]``; a slot may come more than once. One that is outside gives zeros.
        key_scale, value_scale (in): float32, ``[1]``; with a ``cache_dtype`` only: an element is ``x * scale``,
            computed in float32 and rounded once.
        key, value (out): ``[tokens, heads, dim]``, any strides whose elements do not overlap.

    >>> import numpy as np, baracuda as bc
    >>> plan = bc.KvCacheGatherPlan(tokens=3, heads=1, dim=1, blocks=2, block_size=2, dtype="int8", device="cpu")
    >>> cache = np.arange(1, 5, dtype=np.int8).reshape(2, 2, 1, 1)
    >>> key, value = np.empty((2, 3, 1, 1), np.int8)
    >>> plan.run(key_cache=cache, value_cache=-cache, slot_mapping=np.array([3, -1, 0]), key=key, value=value)
    >>> key.ravel().tolist(), value.ravel().tolist()
    ([4, 0, 1], [-4, 0, -1])
    """

    Descriptor: ClassVar[type[Any]] = KvCacheGatherDescriptor


def kv_cache_append(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    *,
    key_scale: Any = None,
    value_scale: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> None:
    """Appends the keys and values of tokens to a paged cache; see :class:`KvCacheAppendPlan`.

    Args:
        key, value: ``[tokens, heads, dim]``.
        key_cache, value_cache: ``[blocks, block_size, heads, dim]``, written in place.
        slot_mapping: ``[tokens]``, int32 or int64.
        key_scale, value_scale: needed where the caches are float8 and the tokens aren't: float32 tensors of
            shape ``[1]`` on their device, or numbers (for a GPU those are copied there, which waits).
        stream: see :meth:`baracuda.Plan.run`.
        preference: what the selection of the kernel must keep to.

    Raises:
        InvalidProblemError: shapes, dtypes or devices differ, or a conversion has no scale.

    >>> import numpy as np, baracuda as bc
    >>> caches = np.zeros((2, 4, 16, 8, 64), np.float16)
    >>> qkv = np.ones((5, 3, 8, 64), np.float16)
    >>> bc.kv_cache_append(qkv[:, 1], qkv[:, 2], *caches, np.array([0, 1, 16, 17, -1]))
    >>> caches[0, :2, :3, 0, 0].tolist()
    [[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]]
    """
    where = "kv_cache_append"
    shape, dtype, device = _core.describe(key, f"{where}: key")
    tokens, heads, dim = _extents(shape, 3, f"{where}: key", "[tokens, heads, dim]")
    fields = _cache_fields(where, key_cache, slot_mapping, dtype, key_scale, value_scale)
    plan = cached_plan(KvCacheAppendPlan, device, preference, tokens=tokens, heads=heads, dim=dim, **fields)
    plan.run(
        key=key,
        value=value,
        key_cache=key_cache,
        value_cache=value_cache,
        slot_mapping=slot_mapping,
        stream=stream,
        **_scales(key_scale, value_scale, device, stream),
    )


def kv_cache_gather(
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    *,
    dtype: Any = None,
    key_scale: Any = None,
    value_scale: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> tuple[Any, Any]:
    """Reads tokens back from a paged cache; see :class:`KvCacheGatherPlan`.

    Args:
        key_cache, value_cache: ``[blocks, block_size, heads, dim]``.
        slot_mapping: ``[tokens]``, int32 or int64; a slot that is outside gives zeros.
        dtype: of the result; by default the caches'. float16, bfloat16 or float32 for float8 caches.
        key_scale, value_scale: needed for such a conversion, as in :func:`kv_cache_append`.
        stream: see :meth:`baracuda.Plan.run`.
        preference: what the selection of the kernel must keep to.

    Returns:
        ``(key, value)``, each ``[tokens, heads, dim]``: new arrays of the kind of ``key_cache``.
    """
    where = "kv_cache_gather"
    shape, cache_dtype, device = _core.describe(key_cache, f"{where}: key_cache")
    _, _, heads, dim = _extents(shape, 4, f"{where}: key_cache", "[blocks, block_size, heads, dim]")
    slots = _core.describe(slot_mapping, f"{where}: slot_mapping")[0]
    (tokens,) = _extents(slots, 1, f"{where}: slot_mapping", "[tokens]")
    out_dtype = cache_dtype if dtype is None else canonical(dtype, f"{where}: dtype")
    fields = _cache_fields(where, key_cache, slot_mapping, out_dtype, key_scale, value_scale)
    plan = cached_plan(KvCacheGatherPlan, device, preference, tokens=tokens, heads=heads, dim=dim, **fields)
    key, value = (new_output(key_cache, (tokens, heads, dim), out_dtype, device, stream) for _ in range(2))
    plan.run(
        key_cache=key_cache,
        value_cache=value_cache,
        slot_mapping=slot_mapping,
        key=key,
        value=value,
        stream=stream,
        **_scales(key_scale, value_scale, device, stream),
    )
    return returned(key, key_cache), returned(value, key_cache)


def _cache_fields(
    where: str, key_cache: Any, slot_mapping: Any, dtype: str, key_scale: Any, value_scale: Any
) -> dict[str, Any]:
    """What a descriptor says of the cache, the slots and the conversion."""
    shape, cache_dtype, _ = _core.describe(key_cache, f"{where}: key_cache")
    blocks, block_size, _, _ = _extents(shape, 4, f"{where}: key_cache", "[blocks, block_size, heads, dim]")
    converts = dtype != cache_dtype
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if converts and scale is None:
            raise InvalidProblemError(f"{where}: {name}: is missing, and the cache is {cache_dtype}, not {dtype}")
    return {
        "blocks": blocks,
        "block_size": block_size,
        "dtype": dtype,
        "cache_dtype": cache_dtype if converts else None,
        "index_dtype": _core.describe(slot_mapping, f"{where}: slot_mapping")[1],
    }


def _extents(shape: tuple[int, ...], rank: int, where: str, expected: str) -> tuple[int, ...]:
    if len(shape) != rank:
        raise InvalidProblemError(f"{where}: expected {expected}, got {shape}")
    return shape


def _scales(key_scale: Any, value_scale: Any, device: str, stream: Any) -> dict[str, Any]:
    """The scale operands that there are, on the device."""
    operands = {}
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        operand = scale
        if isinstance(scale, numbers.Real):
            host = np.array([scale], np.float32)
            operand = host
            if device != "cpu":
                operand = _core.empty((1,), "float32", device, stream)
                _core.upload(operand, host)
        if operand is not None:
            operands[name] = operand
    return operands
