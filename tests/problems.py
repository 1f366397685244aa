# SPDX-License-Identifier: Apache-2.0
"""One small problem or more for each plan, for the tests that every plan has to pass: threads, binding,
pickling, poison, graph capture. A new operator adds its rows to ``PROBLEMS``; its operands follow from what
the plan says of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from support import DTYPES, Backend, Placed

import baracuda as bc


def usual_values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Finite numbers of moderate size."""
    kind = DTYPES[dtype]
    if kind.packed:
        return rng.integers(-8, 8, shape, np.int8) if dtype == "int4" else rng.integers(0, 16, shape, np.uint8)
    if kind.name == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if kind.name.startswith(("int", "uint")):
        return rng.integers(0, 100, shape).astype(kind.numpy)
    if kind.name.startswith("complex"):
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(kind.numpy)
    return rng.standard_normal(shape).astype(np.float32).astype(kind.numpy)


@dataclass(frozen=True)
class Problem:
    """A plan and what its operands hold.

    Attributes:
        id: the plan's problem in a few words.
        plan: the class of the plan.
        fields: of its descriptor.
        values: inputs for which any numbers won't do, by name: a function of (rng, shape, dtype).
        absent: optional operands that are left out.
    """

    id: str
    plan: type[bc.Plan]
    fields: dict[str, Any]
    values: Mapping[str, Callable[[np.random.Generator, tuple[int, ...], str], np.ndarray]] = field(
        default_factory=dict
    )
    absent: tuple[str, ...] = ()

    def select(self, device: str, **options: Any) -> Any:
        return self.plan(**self.fields, device=device, **options)

    def operands(self, plan: bc.Plan, seed: int = 0, *, poison: int = 0xA5, misalign: int = 0) -> dict[str, Placed]:
        """Inputs from `seed`, outputs of poison, each between guards."""
        backend = Backend(plan.device)
        rng = np.random.default_rng([seed, *self.id.encode()])
        made = {}
        for operand in plan.operands:
            if operand.name in self.absent:
                continue
            if operand.role == "out":
                made[operand.name] = backend.output(operand.shape, operand.dtype, misalign=misalign, fill=poison)
                continue
            array = self.values.get(operand.name, usual_values)(rng, operand.shape, operand.dtype)
            made[operand.name] = backend.input(array, operand.dtype, misalign=misalign, fill=poison)
        return made


def given(operands: Mapping[str, Placed]) -> dict[str, Any]:
    """The operands as keywords of run."""
    return {name: operand.tensor for name, operand in operands.items()}


def results(plan: bc.Plan, operands: Mapping[str, Placed]) -> dict[str, bytes]:
    """The bits of what was written, after a look at the bytes around everything and at what was only read."""
    written = {}
    for operand in plan.operands:
        if operand.name not in operands:
            continue
        placed = operands[operand.name]
        if operand.role == "in":
            placed.assert_untouched()
        else:
            placed.assert_guards()
            written[operand.name] = placed.numpy().tobytes()
    assert written
    return written


def poisoned_workspace(plan: bc.Plan) -> bc.Tensor:
    return bc.asarray(np.full(plan.workspace_size, 0x7F, np.uint8), plan.device)


def samples(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Numbers in [0, 1)."""
    return rng.random(shape, np.float32).astype(DTYPES[dtype].numpy)


def below(count: int) -> Callable[[np.random.Generator, tuple[int, ...], str], np.ndarray]:
    """Integers from 0 to `count` - 1."""
    return lambda rng, shape, dtype: rng.integers(0, count, shape, DTYPES[dtype].numpy)


def _window(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(extent // 4, extent - extent // 3) for extent in shape]


def _starts(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """For blocks of half the extent; some reach outside. Column 0 of batched starts is 0."""
    starts = rng.integers(-1, 5, shape).astype(dtype)
    if len(shape) == 2:
        starts[:, 0] = 0
    return starts


def _slots(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """For caches of 24 places: some slots are outside and some come twice."""
    return rng.integers(-2, 27, shape).astype(dtype)


def _scale(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return rng.uniform(0.1, 3.0, shape).astype(dtype)


_KV_CACHE = {"tokens": 21, "heads": 3, "dim": 16, "blocks": 6, "block_size": 4}
_KV_VALUES = {"slot_mapping": _slots, "key_scale": _scale, "value_scale": _scale}

PROBLEMS: list[Problem] = [
    Problem(
        f"write_slice {dtype} {overlap}",
        bc.WriteSlicePlan,
        {"dest_shape": shape, "ranges": _window(shape), "dtype": dtype, "overlap": overlap},
    )
    for dtype, shape, overlap in (
        ("float32", (12, 50), "refuse"),
        ("bfloat16", (5, 9, 33), "refuse"),
        ("int4", (7, 41), "refuse"),
        ("float64", (300, 700), "refuse"),
        ("float16", (12, 50), "stage"),
    )
]
PROBLEMS += [
    Problem(
        f"dynamic_write_slice {dtype} {bounds}{' batched' if batched else ''}{' advancing' if advance > 0 else ''}",
        bc.DynamicWriteSlicePlan,
        {
            "dest_shape": (3, 9, 40),
            "block_shape": (3, 4, 20),
            "dtype": dtype,
            "batched": batched,
            "bounds": bounds,
            "advance_axis": advance,
        },
        {"starts": _starts},
    )
    for dtype, bounds, batched, advance in (
        ("float32", "drop", False, -1),
        ("int4", "clamp", True, -1),
        ("bfloat16", "clamp", True, 1),
    )
]
PROBLEMS += [
    Problem(
        f"dynamic_write_slice_backward {dtype} {gradients}",
        bc.DynamicWriteSliceBackwardPlan,
        {"dest_shape": (3, 9, 40), "block_shape": (3, 4, 20), "dtype": dtype, "gradients": gradients},
        {"starts": _starts},
    )
    for dtype, gradients in (("float32", "both"), ("complex64", "source"))
]
PROBLEMS += [
    Problem(
        f"{operator} {dtype} {cache_dtype or ''}".strip(),
        plan,
        {**_KV_CACHE, "dtype": dtype, "cache_dtype": cache_dtype, "index_dtype": index_dtype},
        _KV_VALUES,
    )
    for operator, plan in (("kv_cache_append", bc.KvCacheAppendPlan), ("kv_cache_gather", bc.KvCacheGatherPlan))
    for dtype, cache_dtype, index_dtype in (
        ("bfloat16", None, "int64"),
        ("float32", "float8_e4m3fn", "int32"),
    )
]
PROBLEMS += [
    Problem(
        f"kv_cache_append many {dtype} {cache_dtype or ''}".strip(),
        bc.KvCacheAppendPlan,
        {**_KV_CACHE, "tokens": 2100, "dtype": dtype, "cache_dtype": cache_dtype},
        _KV_VALUES,
    )
    for dtype, cache_dtype in (("float32", None), ("bfloat16", "float8_e5m2"))
]

_POOL_2D = {"batch": 2, "channels": 3, "h_in": 14, "w_in": 37, "window_h": 2, "window_w": 3, "h_out": 9, "w_out": 24}
_POOL_3D = {"batch": 1, "channels": 3, "d_in": 6, "h_in": 9, "w_in": 35, "window_d": 2, "window_h": 2, "window_w": 2,
            "d_out": 4, "h_out": 6, "w_out": 21}  # fmt: skip

PROBLEMS += [
    Problem(
        f"{plan.__name__.removesuffix('Plan')} {dtype} {change}",
        plan,
        {**sizes, "dtype": dtype, **change},
        {"random_samples": samples, "indices": below(cells)},
    )
    for plan, sizes, cells, dtype, change in (
        (bc.FractionalMaxPool2dPlan, _POOL_2D, 0, "float32", {}),
        (bc.FractionalMaxPool2dPlan, _POOL_2D, 0, "bfloat16", {"samples": False, "seed": 7, "index_dtype": "int32"}),
        (bc.FractionalMaxPool3dPlan, _POOL_3D, 0, "float16", {"placement": "torch", "index_base": "plane"}),
        (bc.FractionalMaxPool2dBackwardPlan, _POOL_2D, 2 * 3 * 14 * 37, "float32", {}),
        (bc.FractionalMaxPool3dBackwardPlan, _POOL_3D, 3 * 6 * 9 * 35, "bfloat16", {"accumulate": True}),
    )
]


def _rois(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Boxes for maps of 30 x 41, some of them over its edges or inverted, of two images and of a third that isn't."""
    return np.concatenate([rng.integers(0, 3, (shape[0], 1)), rng.uniform(-5, 45, (shape[0], 4))], 1).astype(dtype)


_ROIS = {"n": 2, "c": 35, "h": 30, "w": 41, "num_rois": 21, "pooled_h": 5, "pooled_w": 7}

PROBLEMS += [
    Problem(
        f"{plan.__name__.removesuffix('Plan')} {dtype} {change}", plan, {**_ROIS, "dtype": dtype, **change},
        {"rois": _rois},
    )
    for plan, dtype, change in (
        (bc.RoiAlignPlan, "float32", {"sampling_ratio": 2}),
        (bc.RoiAlignPlan, "bfloat16", {"aligned": True, "rois_dtype": "float64"}),
        (bc.RoiAlignBackwardPlan, "float32", {}),
        (bc.RoiAlignBackwardPlan, "float16", {"accumulate": True, "sampling_ratio": 2}),
    )
]  # fmt: skip


def _corners(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    low = rng.uniform(0, 40, (shape[0], 2))
    return np.concatenate([low, low + rng.uniform(1, 20, low.shape)], 1).astype(dtype)


PROBLEMS += [
    Problem(f"Nms {fields}", bc.NmsPlan, {"num_boxes": 200, "iou_threshold": 0.3, **fields}, {"boxes": _corners})
    for fields in ({}, {"dtype": "float64", "scores_dtype": "bfloat16", "class_dtype": "int64"})
]
PROBLEMS += [
    Problem(
        f"{plan.__name__.removesuffix('Plan')} {dtype} {change}", plan, {**_ROIS, "dtype": dtype, **change},
        {"rois": _rois, "argmax": below(30 * 41)},
    )
    for plan, dtype, change in (
        (bc.RoiPoolPlan, "float32", {}),
        (bc.RoiPoolPlan, "bfloat16", {"index_dtype": None, "rois_dtype": "float64"}),
        (bc.RoiPoolBackwardPlan, "float32", {"index_dtype": "int64"}),
        (bc.RoiPoolBackwardPlan, "float16", {"accumulate": True}),
    )
]  # fmt: skip


# Short rows, rows, a long row and columns: a kernel each.
_SCANS: tuple[tuple[tuple[int, ...], int], ...] = (((5, 40), 1), ((3, 700), 1), ((1, 70_000), 1), ((300, 70), 0))

PROBLEMS += [
    Problem(
        f"scan {kind} {dtype} {shape}",
        bc.ScanPlan,
        {"kind": kind, "shape": shape, "axis": axis, "dtype": dtype} | more,
    )
    for kind, dtype, more in (
        ("cumsum", "float32", {}),
        ("cumprod", "float64", {"reverse": True, "exclusive": True}),
        ("cummax", "bfloat16", {"indices": True}),
        ("logcumsumexp", "float16", {}),
        ("linear_recurrence", "float32", {"has_h0": True}),
        ("cumsum", "uint8", {}),
    )
    for shape, axis in _SCANS
]
PROBLEMS += [
    Problem(
        f"scan_backward {kind} {dtype} {shape}",
        bc.ScanBackwardPlan,
        {"kind": kind, "shape": shape, "axis": axis, "dtype": dtype} | more,
    )
    for kind, dtype, more in (
        ("cumprod", "bfloat16", {}),
        ("cummin", "float32", {"saved": "x"}),
        ("logcumsumexp", "float32", {"reverse": True}),
        ("linear_recurrence", "float64", {"has_h0": True}),
    )
    for shape, axis in _SCANS
]

_SEGMENT = {"num_inputs": 500, "embedding_dim": 12, "num_segments": 40}


def _ids(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """For 40 segments; some are outside."""
    return rng.integers(-3, 45, shape).astype(dtype)


def _offsets(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """For 500 rows."""
    return np.sort(rng.integers(0, 501, shape)).astype(dtype)


PROBLEMS += [
    Problem(
        " ".join([plan.__name__.removesuffix("Plan"), dtype, *map(str, change.values())]),
        plan,
        {**_SEGMENT, "dtype": dtype, **change},
        {"segment_ids": _ids, "offsets": _offsets, "arg": below(500)},
    )
    for plan, dtype, change in (
        (bc.SegmentReducePlan, "float32", {"kind": "sum"}),
        (bc.SegmentReducePlan, "float32", {"kind": "mean", "embedding_dim": 1, "index_dtype": "int32"}),
        (bc.SegmentReducePlan, "bfloat16", {"kind": "max", "return_arg": True}),
        (bc.SegmentReducePlan, "int8", {"kind": "prod", "ids": "offsets"}),
        (bc.SegmentReduceBackwardPlan, "float32", {"kind": "max"}),
        (bc.SegmentReduceBackwardPlan, "float16", {"kind": "min", "ties": "even"}),
        (bc.SegmentReduceBackwardPlan, "float64", {"kind": "prod", "ids": "offsets"}),
        (bc.SegmentReduceBackwardPlan, "float32", {"kind": "mean", "embedding_dim": 1}),
        (bc.SegmentReduceBackwardPlan, "bfloat16", {"kind": "max", "saved": "arg", "ids": "offsets"}),
    )
]
