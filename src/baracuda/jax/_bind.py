# SPDX-License-Identifier: Apache-2.0
"""Every form as a function of JAX: one handler of XLA's foreign function interface runs them all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from baracuda import _core
from baracuda._base import cached_plan
from baracuda._forms import FORMS, Form, Spec
from baracuda.dtypes import numpy_dtype
from baracuda.errors import InvalidProblemError, UnsupportedError

__all__ = ["call", "register"]

_TARGET = "baracuda_run"


def register() -> None:
    """Tells XLA of the handler.

    Raises:
        ImportError: this build of the library has none.
    """
    for platform, cuda in (("cpu", False), ("CUDA", True)):
        handler = _core.xla_handler(cuda)
        if handler is None:
            raise ImportError(
                "baracuda.jax: this build of baracuda has no handler for XLA; install a wheel, "
                "or build it where jaxlib is installed"
            )
        jax.ffi.register_ffi_target(_TARGET, handler, platform=platform)


def _spec(array: Any) -> Spec | None:
    return None if array is None else Spec(tuple(array.shape), np.dtype(array.dtype).name)


def _run(form: Form, settings: dict[str, Any], arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """The call of the handler for arrays of which None is absent."""
    specs = dict(zip(form.arrays, map(_spec, arrays), strict=True))
    fields, outputs = form.describe(**specs, **settings)
    # The operand list is the same on every device, and so is what is refused.
    plan = cached_plan(form.plan, "cpu", None, **fields)
    results = dict(zip(form.outputs, outputs, strict=True))
    present = [name for name in form.arrays if specs[name] is not None]
    slots = []
    for operand in plan.operands:
        spec = results.get(operand.name, specs.get(operand.name))
        if operand.name in specs and specs[operand.name] is not None:
            spec = specs[operand.name]
        if spec is None:
            slots.append(-1)
            continue
        if spec != (operand.shape, operand.dtype):
            raise InvalidProblemError(
                f"{plan.name}: {operand.name}: expected {operand.dtype} of shape {operand.shape}, "
                f"got {spec.dtype} of shape {spec.shape}"
            )
        written = operand.name in results
        slots.append(-2 - form.outputs.index(operand.name) if written else present.index(operand.name))
    aliases = {present.index(name): form.outputs.index(name) for name in form.overwritten}
    function = jax.ffi.ffi_call(
        _TARGET,
        [jax.ShapeDtypeStruct(spec.shape, numpy_dtype(spec.dtype)) for spec in outputs],
        vmap_method="sequential",
        input_output_aliases=aliases,
    )
    attributes = {
        "operator": plan.descriptor.operator,
        "version": _core.version,
        "descriptor": np.frombuffer(_core.pack_descriptor(plan.descriptor), np.uint8),
        "slots": np.array(slots, np.int32),
    }
    return tuple(function(*(array for array in arrays if array is not None), **attributes))


class _Operations:
    """What gradients are made of; see :data:`baracuda._forms.Gradient`."""

    def __init__(self) -> None:
        self.operators = {name: functools.partial(self._call, name) for name in FORMS}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self.operators[name]

    @staticmethod
    def _call(name: str, *arrays: Any, **settings: Any) -> Any:
        results = call(name, *arrays, **settings)
        return results if len(results) > 1 else results[0]

    @staticmethod
    def cast(array: Any, dtype: str) -> Any:
        return array.astype(numpy_dtype(dtype))

    @staticmethod
    def zeros_like(array: Any) -> Any:
        return jnp.zeros_like(array)

    @staticmethod
    def window(array: Any, start: tuple[int, ...], end: tuple[int, ...]) -> Any:
        return jax.lax.slice(array, start, end)

    @staticmethod
    def shifted(array: Any, first: Any, axis: int, reverse: bool) -> Any:
        """Moved by one in the direction of a scan, with `first` or 0 where it begins."""
        extent = array.shape[axis]
        if extent == 0:
            return array
        edge = jnp.zeros_like(jax.lax.slice_in_dim(array, 0, 1, axis=axis))
        edge = edge if first is None else jnp.expand_dims(first, axis)
        if reverse:
            return jnp.concatenate([jax.lax.slice_in_dim(array, 1, extent, axis=axis), edge], axis)
        return jnp.concatenate([edge, jax.lax.slice_in_dim(array, 0, extent - 1, axis=axis)], axis)

    @staticmethod
    def shifted_back(array: Any, axis: int, reverse: bool) -> tuple[Any, Any]:
        """Moved by one against the direction of a scan, with 0 at its end; and what was at its beginning."""
        extent = array.shape[axis]
        if extent == 0:
            return array, jnp.zeros(np.delete(array.shape, axis), array.dtype)
        zero = jnp.zeros_like(jax.lax.slice_in_dim(array, 0, 1, axis=axis))
        if reverse:
            moved = jnp.concatenate([zero, jax.lax.slice_in_dim(array, 0, extent - 1, axis=axis)], axis)
        else:
            moved = jnp.concatenate([jax.lax.slice_in_dim(array, 1, extent, axis=axis), zero], axis)
        return moved, jax.lax.index_in_dim(array, extent - 1 if reverse else 0, axis, keepdims=False)


_operations = _Operations()


@functools.lru_cache(maxsize=1024)
def _function(name: str, present: tuple[bool, ...], settings: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    """A form with its static values, as a function of the arrays that are there."""
    form = FORMS[name]
    values = dict(settings)

    def spread(given: tuple[Any, ...]) -> tuple[Any, ...]:
        rest = iter(given)
        return tuple(next(rest) if there else None for there in present)

    def run(*given: Any) -> tuple[Any, ...]:
        return _run(form, values, spread(given))

    primal: Any = jax.custom_batching.custom_vmap(run) if form.leading else run

    def batch(size: int, batched: list[bool], *given: Any) -> tuple[Any, tuple[bool, ...]]:
        # Further axes in front are only more of the same problem.
        full = [
            array if own else jnp.broadcast_to(array, (size, *array.shape))
            for array, own in zip(given, batched, strict=True)
        ]
        return primal(*full), (True,) * len(form.outputs)

    if form.leading:
        primal.def_vmap(batch)

    def forward(*given: Any) -> tuple[Any, Any]:
        # Not the call itself: this may be differentiated in its turn.
        results: Any = function(*given)
        arrays = dict(zip(form.arrays, spread(given), strict=True))
        specs = {key: _spec(array) for key, array in arrays.items()}
        arrays |= dict(zip(form.outputs, results, strict=True))
        specs |= {key: _spec(arrays[key]) for key in form.outputs}
        return results, ({key: arrays[key] for key in form.saves}, _Static(specs))

    def backward(saved: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        if form.gradient is None:
            kind = "is a gradient and has" if name.endswith("_backward") else "has"
            raise UnsupportedError(f"baracuda.jax: {name}: {kind} no gradient of its own")
        kept, specs = saved
        found = form.gradient(_operations, SimpleNamespace(**values, **kept, specs=specs.value), *grads)
        return tuple(found.get(key) for key, there in zip(form.arrays, present, strict=True) if there)

    function: Any = jax.custom_vjp(primal)
    function.defvjp(forward, backward)
    jitted: Callable[..., Any] = jax.jit(function)
    return jitted


@jax.tree_util.register_static
class _Static:
    """A value that JAX carries without looking into it."""

    def __init__(self, value: dict[str, Any]) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.value == other.value

    def __hash__(self) -> int:
        return hash(tuple(self.value.items()))


def call(name: str, *arrays: Any, **settings: Any) -> tuple[Any, ...]:
    """The outputs of a form."""
    form = FORMS[name]
    given = tuple(None if array is None else jnp.asarray(array) for array in arrays)
    if form.leading:
        rank = next(array.ndim for array in given if array is not None)
        if 0 <= settings["axis"] < rank:
            settings["axis"] -= rank
    present = tuple(array is not None for array in given)
    values = _core.distinct(tuple(settings.values()))
    function = _function(name, present, tuple(zip(settings, values, strict=True)))
    results: tuple[Any, ...] = function(*(array for array in given if array is not None))
    return results
