# SPDX-License-Identifier: Apache-2.0
"""Outputs of the function forms: arrays of the caller's kind."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from baracuda import _core
from baracuda.dtypes import numpy_dtype

__all__ = ["Output", "empty_like_of"]


@dataclass(frozen=True)
class Output:
    """An output: what a plan writes to, and how that becomes what the caller gets."""

    operand: Any
    convert: Callable[[Any], Any] | None = None

    def result(self) -> Any:
        return self.operand if self.convert is None else self.convert(self.operand)


def _is(value: Any, module: str, name: str) -> bool:
    # A value of a library that nobody has imported can't be.
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))


def empty_like_of(like: Any, shape: tuple[int, ...], dtype: str, device: str, stream: Any) -> Output:
    """An array with undefined elements, of the library of `like` and on its device.

    NumPy, torch and CuPy arrays are made by their libraries. JAX's can't be written to, so it is given
    memory of ours when that is done. For all others it is a :class:`baracuda.Tensor`.
    """
    if isinstance(like, np.ndarray):
        return Output(np.empty(shape, numpy_dtype(dtype)))
    if _is(like, "torch", "Tensor"):
        torch = sys.modules["torch"]
        return Output(torch.empty(shape, dtype=getattr(torch, dtype), device=like.device))
    if _is(like, "cupy", "ndarray"):
        cupy = sys.modules["cupy"]
        with like.device:
            return Output(cupy.empty(shape, numpy_dtype(dtype)))
    tensor = _core.empty(shape, dtype, device, stream)
    if _is(like, "jax", "Array"):
        return Output(tensor, sys.modules["jax"].dlpack.from_dlpack)
    return Output(tensor)
