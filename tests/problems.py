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


def _window(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(extent // 4, extent - extent // 3) for extent in shape]


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
