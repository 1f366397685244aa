# SPDX-License-Identifier: Apache-2.0
"""Tensors of the library's own, for programs without a framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from baracuda import _core
from baracuda.dtypes import pack_int4

__all__ = ["asarray", "empty"]


def empty(shape: int | Sequence[int], dtype: Any, device: object = "cuda", stream: Any = None) -> _core.Tensor:
    """A row-major tensor with undefined elements.

    Args:
        shape: extents in elements, rank 0 to 8.
        dtype: any dtype of the library; int4 and uint4 are packed two to a byte.
        device: ``"cuda"``, ``"cuda:N"`` or ``"cpu"``.
        stream: the stream in whose order the memory is taken; None is the legacy default stream.

    Raises:
        CudaError: the device can't be used, or has too little memory.

    >>> import baracuda as bc
    >>> bc.empty((2, 3), "bfloat16", "cpu")
    baracuda.Tensor(shape=(2, 3), dtype='bfloat16', device='cpu')
    """
    return _core.empty(shape, dtype, device, stream)


def asarray(array: Any, device: object = "cuda", stream: Any = None) -> _core.Tensor:
    """Copies host data to a new tensor; returns when the copy is done.

    Args:
        array: anything that ``numpy.asarray`` takes, of a dtype that the library knows; int4 and uint4
            of ml_dtypes are packed.
        device: ``"cuda"``, ``"cuda:N"`` or ``"cpu"``.
        stream: the stream in whose order it is copied; None is the legacy default stream.

    >>> import numpy as np, baracuda as bc
    >>> bc.asarray(np.arange(3.0), "cpu").numpy().tolist()
    [0.0, 1.0, 2.0]
    """
    host = np.ascontiguousarray(array).reshape(np.shape(array))
    if not host.dtype.isnative:
        host = host.astype(host.dtype.newbyteorder("="))
    tensor = _core.empty(host.shape, host.dtype, device, stream)
    _core.upload(tensor, pack_int4(host) if tensor.dtype in ("int4", "uint4") else host)
    return tensor
