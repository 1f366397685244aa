# SPDX-License-Identifier: Apache-2.0
"""The parts of a plan that are plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baracuda._arguments import integer
from baracuda.errors import InvalidProblemError

__all__ = ["KernelSku", "Operand", "PlanCost", "PlanPreference", "PrecisionGuarantee"]


@dataclass(frozen=True, kw_only=True)
class PlanPreference:
    """What the selection of a kernel must keep to. It is obeyed or refused, never ignored.

    Attributes:
        deterministic: only kernels whose bits don't depend on timing.
        backend: only this backend (see :class:`KernelSku`); None: the fastest.
        max_workspace: bytes of workspace at most; None: no limit.
    """

    deterministic: bool = True
    backend: str | None = None
    max_workspace: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.deterministic, bool):
            raise InvalidProblemError(
                f"PlanPreference: deterministic: expected True or False, got {self.deterministic!r}"
            )
        if not isinstance(self.backend, str | None):
            raise InvalidProblemError(f"PlanPreference: backend: expected a name or None, got {self.backend!r}")
        where = "PlanPreference: max_workspace"
        if self.max_workspace is not None and not 0 <= integer(self.max_workspace, where) < 2**63:
            raise InvalidProblemError(f"{where}: expected a number of bytes, got {self.max_workspace}")


@dataclass(frozen=True, kw_only=True)
class PrecisionGuarantee:
    """What a kernel promises of its results.

    Attributes:
        math_precision: the precision of its arithmetic, ``"exact"`` where bits are only moved.
        accumulator: the dtype that sums are kept in, ``"none"`` where there are none.
        bit_stable_on_same_hardware: the same inputs give the same bits on the same GPU model.
        deterministic: bits do not depend on timing.
    """

    math_precision: str
    accumulator: str
    bit_stable_on_same_hardware: bool
    deterministic: bool


@dataclass(frozen=True, kw_only=True)
class KernelSku:
    """The identity of a kernel.

    Attributes:
        category: the family, such as ``"layout"``.
        op: the operator, such as ``"write_slice"``.
        dtype: the dtype of the operands.
        aux_dtype: the dtype of indices or other second operands, or None.
        layout: the only layout of operands that the kernel takes, or None.
        epilogue: what it does to results before it stores them, or None.
        arch: what runs: ``"sm_90"``, ``"cpu"``.
        backend: ``"bespoke"``, ``"cub"``, ``"memcpy"``, ``"cpu"`` or a library's name.
        precision_guarantee: see :class:`PrecisionGuarantee`.
    """

    category: str
    op: str
    dtype: str
    aux_dtype: str | None
    layout: str | None
    epilogue: str | None
    arch: str
    backend: str
    precision_guarantee: PrecisionGuarantee


@dataclass(frozen=True, kw_only=True)
class Operand:
    """An argument of ``plan.run``.

    Attributes:
        name: the keyword.
        role: read (``"in"``), overwritten (``"out"``) or both (``"inout"``).
        dtype: its dtype's name.
        shape: its extents in elements.
        optional: it may be left out.
        in_place_with: the operand that may be the very same elements, or None.
    """

    name: str
    role: Literal["in", "out", "inout"]
    dtype: str
    shape: tuple[int, ...]
    optional: bool
    in_place_with: str | None


@dataclass(frozen=True, kw_only=True)
class PlanCost:
    """The floor of a problem.

    Attributes:
        bytes: the fewest bytes to move: each input read once, each output written once.
        operations: arithmetic operations.
    """

    bytes: int
    operations: int
