# SPDX-License-Identifier: Apache-2.0
"""Names of dtypes. They are NumPy's and ml_dtypes': ``"float32"``, ``"bfloat16"``, ``"int4"``."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from baracuda.errors import InvalidProblemError, UnsupportedError

__all__ = ["DTYPES", "canonical", "numpy_dtype", "pack_int4", "unpack_int4"]

#: Every dtype that the library knows, with the NumPy dtype of an array of it.
DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(getattr(ml_dtypes, name, name))
    for name in (
        "bool",
        "int4",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint4",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "float8_e4m3fn",
        "float8_e5m2",
        "complex64",
        "complex128",
    )
}


def canonical(dtype: Any, where: str = "dtype") -> str:
    """The name of a dtype given as a name, a NumPy dtype or scalar type, or a dtype of torch or JAX.

    Raises:
        InvalidProblemError: it is no dtype.
        UnsupportedError: it is one that the library does not know.
    """
    if isinstance(dtype, str) and dtype in DTYPES:
        return dtype
    if dtype is None:
        # NumPy reads None as float64.
        raise InvalidProblemError(f"{where}: expected a dtype, got None")
    name = str(dtype)
    if name.startswith("torch."):
        name = name.removeprefix("torch.")
    else:
        try:
            name = np.dtype(dtype).name
        except TypeError:
            raise InvalidProblemError(f"{where}: expected a dtype, got {dtype!r}") from None
    if name not in DTYPES:
        raise UnsupportedError(f"{where}: no kernel for dtype {name}")
    return name


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of an array of this dtype."""
    return DTYPES[name]


def pack_int4(array: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Packs integers two to a byte, the element of the lower index in the low half.

    Args:
        array: integers of any shape, int4 and uint4 of ml_dtypes included; of each the low four
            bits are kept. Rows are packed back to back.

    Returns:
        uint8 of shape ``[(array.size + 1) // 2]``; an odd last half byte is 0.

    >>> import baracuda as bc
    >>> [hex(byte) for byte in bc.pack_int4([1, 2, -1])]
    ['0x21', '0xf']
    """
    flat = np.asarray(array).ravel()
    if flat.dtype.name in ("int4", "uint4"):
        flat = flat.astype(np.int8)
    halves = np.zeros(flat.size + flat.size % 2, np.uint8)
    halves[: flat.size] = flat.astype(np.int64) & 15
    return halves[0::2] | halves[1::2] << np.uint8(4)


def unpack_int4(packed: Any, shape: tuple[int, ...], dtype: str = "int4") -> np.ndarray[Any, np.dtype[Any]]:
    """The inverse of :func:`pack_int4`: one element to a byte.

    Args:
        packed: uint8 bytes, at least ``(prod(shape) + 1) // 2`` of them.
        shape: the extents of the result.
        dtype: ``"int4"`` (signed) or ``"uint4"``.

    Returns:
        int8 for int4, uint8 for uint4, of the given shape.

    >>> import baracuda as bc
    >>> bc.unpack_int4(bc.pack_int4([1, 2, -1]), (3,)).tolist()
    [1, 2, -1]
    """
    if dtype not in ("int4", "uint4"):
        raise InvalidProblemError(f"unpack_int4: expected int4 or uint4, got {dtype!r}")
    flat = np.asarray(packed, np.uint8).ravel()
    count = int(np.prod(shape, dtype=np.int64))
    halves = np.stack([flat & 15, flat >> 4], axis=1).ravel()
    if halves.size < count:
        raise InvalidProblemError(f"unpack_int4: {flat.size} bytes hold fewer than {count} elements")
    halves = halves[:count].reshape(shape)
    if dtype == "uint4":
        return halves
    return ((halves ^ 8).astype(np.int8) - 8).astype(np.int8)
