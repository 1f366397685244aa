# SPDX-License-Identifier: Apache-2.0
"""What the function forms return: arrays of the caller's kind."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from baracuda import _core
from baracuda.dtypes import numpy_dtype

__all__ = ["first_of", "new_output", "returned", "scalar_operand", "stacked_boxes", "torch_maker"]


#: The libraries of the types of arrays that came so far, of which a program has few.
_origins: dict[type, str] = {}


def _origin(like: Any) -> str:
    """The library whose array it is."""
    kind = type(like)
    origin = _origins.get(kind)
    if origin is None:
        module = kind.__module__.partition(".")[0]
        origin = "numpy" if issubclass(kind, np.ndarray) else "jax" if module == "jaxlib" else module
        if len(_origins) < 256:
            _origins[kind] = origin
    return origin


def new_output(like: Any, shape: Sequence[int], dtype: str, device: str, stream: Any) -> Any:
    """An undefined array of the kind of `like`, for a plan to write; pass it to :func:`returned` afterwards."""
    origin = _origin(like)
    if origin == "torch":
        function, arguments = torch_maker(tuple(shape), dtype, device)
        return function(*arguments)
    if origin == "numpy":
        return np.empty(shape, numpy_dtype(dtype))
    # JAX arrays are immutable: the library's own memory is handed over when it has been written.
    namespace, place = (None, None) if origin in ("baracuda", "jax") else _namespace(like)
    if namespace is None:
        return _core.empty(shape, dtype, device, stream)
    return namespace.empty(tuple(shape), dtype=getattr(namespace, dtype, numpy_dtype(dtype)), device=place)


@functools.lru_cache(maxsize=1024)
def torch_maker(shape: tuple[int, ...], dtype: str, device: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function and its arguments that make an undefined row-major tensor; torch.empty takes three times as long."""
    torch = sys.modules["torch"]
    kind = getattr(torch, dtype)
    place = torch.device(device)
    fast = getattr(getattr(torch._C._dynamo, "guards", None), f"_empty_strided_{place.type}", None)
    if fast is None:
        return functools.partial(torch.empty, dtype=kind, device=place), (shape,)
    steps = [1]
    for extent in reversed(shape[1:]):
        steps.insert(0, steps[0] * max(extent, 1))
    known = (shape, tuple(steps[: len(shape)]), kind)
    if place.type == "cpu" or torch.cuda.device_count() == 1:
        return fast, known
    current = torch._C._cuda_getDevice

    def make(*known: Any) -> Any:
        # It knows no device but the current one.
        return fast(*known) if current() == place.index else torch.empty(shape, dtype=kind, device=place)

    return make, known


def returned(output: Any, like: Any) -> Any:
    """The written output as the caller gets it."""
    if _origin(like) == "jax":
        import jax.dlpack  # noqa: PLC0415  # only where a caller has it

        return jax.dlpack.from_dlpack(output)
    return output


def first_of(output: Any, count: Any, like: Any, device: str, stream: Any) -> Any:
    """As many entries of a written output as `count` says, which is read back."""
    if stream is not None and device != "cpu":
        # A framework reads in the order of its own stream.
        _core.synchronize(device, stream)
    output, count = returned(output, like), returned(count, like)
    if not isinstance(output, _core.Tensor):
        return output[: int(count[0])]
    entries = output.numpy()[: int(count.numpy()[0])]
    tensor = _core.empty(entries.shape, entries.dtype.name, device, stream)
    _core.upload(tensor, np.ascontiguousarray(entries))
    return tensor


def scalar_operand(like: Any, value: int, device: str, stream: Any) -> Any:
    """An int64 tensor of one element on the device of `like`."""
    if device == "cpu":
        return np.array([value], np.int64)
    namespace, place = _namespace(like)
    if namespace is None or _origin(like) == "jax":
        return _core_scalar(value, device, stream)
    return namespace.full((1,), value, dtype=namespace.int64, device=place)


def stacked_boxes(boxes: Sequence[Any], like: Any, device: str, stream: Any) -> Any:
    """[R, 5]: the boxes [L, 4] of each image below each other, with the image's number in front."""
    namespace, place = _namespace(like)
    if namespace is None:
        # The library's own tensors have no arithmetic.
        rows = stacked_boxes([np.asarray(entry.numpy()) for entry in boxes], np.empty(0), device, stream)
        tensor = _core.empty(rows.shape, rows.dtype.name, device, stream)
        _core.upload(tensor, rows)
        return tensor
    if not boxes:
        return namespace.zeros((0, 5), dtype=namespace.float32, device=place)
    return namespace.concat(
        [
            namespace.concat([namespace.full_like(entry[:, :1], image), entry], axis=1)
            for image, entry in enumerate(boxes)
        ],
        axis=0,
    )


def _core_scalar(value: int, device: str, stream: Any) -> _core.Tensor:
    tensor = _core.empty((1,), "int64", device, stream)
    _core.upload(tensor, np.array([value], np.int64))
    return tensor


def _namespace(like: Any) -> tuple[Any, Any]:
    """The array namespace of an array and its device there, or (None, None)."""
    import array_api_compat  # noqa: PLC0415  # only function forms need it

    try:
        return array_api_compat.array_namespace(like), array_api_compat.device(like)
    except TypeError:
        return None, None
