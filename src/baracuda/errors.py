# SPDX-License-Identifier: Apache-2.0
"""What can go wrong. Every message is one line: the plan, the operand, what was expected, what came."""

from __future__ import annotations

__all__ = [
    "BaracudaError",
    "BufferTooSmallError",
    "CudaError",
    "InvalidProblemError",
    "MisalignedOperandError",
    "UnsupportedError",
    "WorkspaceTooSmallError",
]


class BaracudaError(Exception):
    """The base of all errors of this library."""


class InvalidProblemError(BaracudaError, ValueError):
    """A shape, range, axis, parameter or operand that can't be right."""


class UnsupportedError(BaracudaError, NotImplementedError):
    """The problem is right, but there is no kernel for it."""


class _SizeError(BaracudaError):
    """Carries the sizes in bytes beside the message."""

    def __init__(self, message: str, needed: int, got: int) -> None:
        super().__init__(message, needed, got)
        self.needed = needed
        self.got = got

    def __str__(self) -> str:
        return str(self.args[0])


class BufferTooSmallError(_SizeError, ValueError):
    """Storage of known size (packed int4, bytes) is smaller than its logical shape needs.

    Attributes:
        needed: bytes that the shape needs.
        got: bytes that the storage has.
    """


class WorkspaceTooSmallError(_SizeError, ValueError):
    """The workspace is smaller than the plan declared.

    Attributes:
        needed: ``plan.workspace_size``.
        got: bytes that the given workspace has.
    """


class MisalignedOperandError(BaracudaError, ValueError):
    """An address is not a multiple of what its dtype, or the workspace, needs."""


class CudaError(BaracudaError, RuntimeError):
    """The driver or the device refused: none there, too old, or an error of CUDA itself."""
