# SPDX-License-Identifier: Apache-2.0
"""Every form as an operator of torch's dispatcher: schema, kernels, fake kernel and gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from baracuda import _core
from baracuda._base import cached_plan, clear_with_plans
from baracuda._forms import FORMS, Form, Spec
from baracuda._outputs import torch_maker
from baracuda.errors import UnsupportedError

__all__ = ["LIBRARY", "NAMES", "TAGS", "calls", "compiling", "direct", "operators"]

#: Whether the compiler reads the code instead of running it. All else that traces is a mode or a transform.
compiling = torch.compiler.is_dynamo_compiling

# torch.library.custom_op and register_autograd give the same from decorators. Their wrappers cost a call four
# times as much as all of what is here.
LIBRARY = torch.library.Library("baracuda", "DEF")
TAGS = (torch.Tag.pt2_compliant_tag,)

#: The registered operators by the name of their form; those that write in place end in an underscore.
operators: dict[str, Any] = {}

#: The same as functions, which are faster.
calls: dict[str, Callable[..., Any]] = {}

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32,
        torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn,
        torch.float8_e5m2, torch.complex64, torch.complex128,
    )
}  # fmt: skip

#: The library's names of torch's dtypes.
NAMES = {dtype: name for name, dtype in _DTYPES.items()}

_TYPES = {
    "int": "SymInt", "bool": "bool", "float": "float", "str": "str", "ints": "SymInt[]", "float?": "float?",
    "str?": "str?",
}  # fmt: skip


def _spec(tensor: Tensor | None) -> Spec | None:
    return None if tensor is None else Spec(tuple(tensor.shape), NAMES[tensor.dtype])


def _prepare(form: Form, args: tuple[Any, ...]) -> tuple[Any, tuple[int, ...], Any]:
    """The plan of a call, where its operands are among the arguments and outputs, and how outputs are made."""
    count = len(form.arrays)
    specs = dict(zip(form.arrays, map(_spec, args[:count]), strict=True))
    fields, described = form.describe(**specs, **dict(zip(form.settings, args[count:], strict=True)))
    device = str(next(tensor.device for tensor in args[:count] if tensor is not None))
    plan = cached_plan(form.plan, device, None, **fields)
    place_of = {name: place for place, name in enumerate(form.arrays)}
    outputs: tuple[Any, ...] = ()
    if not form.overwritten:
        outputs = tuple(torch_maker(tuple(spec.shape), spec.dtype, device) for spec in described)
        place_of |= {name: count + place for place, name in enumerate(form.outputs)}
    return plan, tuple(place_of.get(operand.name, -1) for operand in plan.operands), outputs


def _kernel(form: Form, copied: tuple[int, ...], fast: Any) -> Callable[..., Any]:
    """What the dispatcher calls with tensors of a device that the library knows."""
    count = len(form.arrays)
    lists = "ints" in form.settings.values()

    def kernel(*args: Any) -> Any:
        if lists:
            args = tuple(tuple(value) if type(value) is list else value for value in args)
        result = fast.run(args)
        if result is not NotImplemented:
            return result
        # Subclasses, and all tensors of a torch without the exchange API.
        values: list[Any] = [
            tensor if tensor is None else tensor.detach().as_subclass(Tensor) for tensor in args[:count]
        ]
        for place in copied:
            values[place] = values[place].clone(memory_format=torch.contiguous_format)
        plan, places, outputs = _prepare(form, (*values, *args[count:]))
        made = [function(*arguments) for function, arguments in outputs]
        plan._run_slots([*values, *made, None], places)
        made += [values[place] for place in copied]
        return None if not made else made[0] if len(made) == 1 else tuple(made)

    return kernel


def _fake(form: Form) -> Callable[..., Any]:
    count = len(form.arrays)

    def fake(*args: Any) -> Any:
        like = next(tensor for tensor in args[:count] if tensor is not None)
        specs = dict(zip(form.arrays, map(_spec, args[:count]), strict=True))
        problem = form.describe(**specs, **dict(zip(form.settings, args[count:], strict=True)))
        outputs = tuple(
            torch.empty(spec.shape, dtype=_DTYPES[spec.dtype], device=like.device) for spec in problem.outputs
        )
        return outputs[0] if len(outputs) == 1 else outputs

    return fake


class _Operations:
    """What gradients are made of; see :data:`baracuda._forms.Gradient`."""

    def __init__(self) -> None:
        self.operators: dict[str, Callable[..., Any]] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self.operators[name]

    @staticmethod
    def cast(tensor: Tensor, dtype: str) -> Tensor:
        return tensor.to(_DTYPES[dtype])

    @staticmethod
    def zeros_like(tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor)

    @staticmethod
    def window(tensor: Tensor, start: tuple[int, ...], end: tuple[int, ...]) -> Tensor:
        return tensor[tuple(slice(*pair) for pair in zip(start, end, strict=True))]

    @staticmethod
    def shifted(tensor: Tensor, first: Tensor | None, axis: int, reverse: bool) -> Tensor:
        """Moved by one in the direction of a scan, with `first` or 0 where it begins."""
        extent = tensor.shape[axis]
        if extent == 0:
            return tensor
        edge = tensor.narrow(axis, 0, 1)
        edge = torch.zeros_like(edge) if first is None else first.unsqueeze(axis)
        if reverse:
            return torch.cat([tensor.narrow(axis, 1, extent - 1), edge], axis)
        return torch.cat([edge, tensor.narrow(axis, 0, extent - 1)], axis)

    @staticmethod
    def shifted_back(tensor: Tensor, axis: int, reverse: bool) -> tuple[Tensor, Tensor]:
        """Moved by one against the direction of a scan, with 0 at its end; and what was at its beginning."""
        extent = tensor.shape[axis]
        if extent == 0:
            shape = list(tensor.shape)
            del shape[axis]
            return tensor, tensor.new_zeros(shape)
        begin = extent - 1 if reverse else 0
        zero = torch.zeros_like(tensor.narrow(axis, 0, 1))
        if reverse:
            moved = torch.cat([zero, tensor.narrow(axis, 0, extent - 1)], axis)
        else:
            moved = torch.cat([tensor.narrow(axis, 1, extent - 1), zero], axis)
        return moved, tensor.select(axis, begin)


_operations = _Operations()


def _bound(form: Form, call: Callable[..., Any]) -> Callable[..., Any]:
    """An operator that takes its static values by name."""

    def bound(*arrays: Any, **settings: Any) -> Any:
        return call(*arrays, *(settings[name] for name in form.settings))

    return bound


def _autograd(form: Form, operator: Any, kernel: Callable[..., Any]) -> tuple[Callable[..., Any], Any, Any]:
    """What the dispatcher calls where a gradient may be wanted, and its nodes in the graph."""
    count = len(form.arrays)
    below = torch._C._after_autograd_keyset
    guard = torch._C._AutoDispatchBelowAutograd
    backends = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
    plain: dict[int, bool] = {}

    def redispatch(keyset: Any, args: tuple[Any, ...]) -> Any:
        rest = keyset & below
        bits = rest.raw_repr()
        known = plain.get(bits)
        if known is None:
            # Nothing but a device is left: neither a mode, nor a transform, nor a fake tensor.
            highest = rest.remove(torch._C.DispatchKey.ADInplaceOrView).highestPriorityTypeId()
            plain[bits] = known = highest in backends
        with guard():
            return kernel(*args) if known else operator.redispatch(rest, *args)

    def keep(ctx: Any, args: tuple[Any, ...], result: Any) -> None:
        outputs = result if isinstance(result, tuple) else (result,)
        arrays = dict(zip(form.arrays, args[:count], strict=True))
        # An output takes the place of an array of its name: that was written to.
        arrays |= dict(zip(form.outputs, outputs, strict=True))
        ctx.save_for_backward(*(arrays[name] for name in form.saves))
        ctx.settings = dict(zip(form.settings, args[count:], strict=True))
        ctx.specs = tuple(
            (name, None if tensor is None else (tensor.shape, tensor.dtype)) for name, tensor in arrays.items()
        )
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))

    def backward(ctx: Any, grads: tuple[Any, ...], needed: tuple[bool, ...]) -> tuple[Any, ...]:
        if form.gradient is None:
            kind = "is a gradient and has" if form.name.endswith("_backward") else "has"
            raise UnsupportedError(f"baracuda::{form.name}: {kind} no gradient of its own")
        saved = dict(zip(form.saves, ctx.saved_tensors, strict=True))
        specs = {name: None if known is None else Spec(tuple(known[0]), NAMES[known[1]]) for name, known in ctx.specs}
        found = form.gradient(_operations, SimpleNamespace(**ctx.settings, **saved, specs=specs), *grads)
        # The static values have none.
        wanted = zip(form.arrays, needed, strict=False)
        return (*(found.get(name) if need else None for name, need in wanted), *(None for _ in form.settings))

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
            result = kernel(*args) if keyset is None else redispatch(keyset, args)
            keep(ctx, args, result)
            return result

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return (None, *backward(ctx, grads, ctx.needs_input_grad[1:]))

    # What torch.func's transforms need, and what would cost a common call a third more.
    class Transformed(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            with guard():
                return operator(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            keep(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return backward(ctx, grads, ctx.needs_input_grad)

    for node in (Node, Transformed):
        node.__name__ = node.__qualname__ = f"{form.name.title().replace('_', '')}Backward"
    grad_enabled = torch.is_grad_enabled

    def autograd(keyset: Any, *args: Any) -> Any:
        if grad_enabled():
            for tensor in args[:count]:
                if tensor is not None and tensor.requires_grad:
                    return Node.apply(keyset, *args)
        return redispatch(keyset, args)

    return autograd, Node, Transformed


def _autograd_in_place(form: Form, operator: Any) -> Callable[..., Any]:
    count = len(form.arrays)

    def autograd(keyset: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in args[:count]):
            pure = f"; use {form.name}" if form.gradient is not None else ""
            raise UnsupportedError(f"baracuda::{form.name}_: writes in place, which has no gradient{pure}")
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    return autograd


def _count_versions(form: Form, operator: Any) -> Callable[..., Any]:
    written = tuple(form.arrays.index(name) for name in form.overwritten)

    def bump(keyset: Any, *args: Any) -> Any:
        torch.autograd.graph.increment_version([args[place] for place in written])
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return operator.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)

    return bump


def _schema(form: Form, in_place: bool) -> str:
    arguments = []
    marks = dict(zip(form.overwritten, "abcd", strict=False)) if in_place else {}
    for name in form.arrays:
        mark = f"({marks[name]}!)" if name in marks else ""
        arguments.append(f"Tensor{mark}{'?' if name in form.optional else ''} {name}")
    arguments += [f"{_TYPES[kind]} {name}" for name, kind in form.settings.items()]
    returns = "()" if in_place else ", ".join(["Tensor"] * len(form.outputs))
    if len(form.outputs) > 1 and not in_place:
        returns = f"({returns})"
    return f"{form.name}{'_' if in_place else ''}({', '.join(arguments)}) -> {returns}"


_SPECIAL = (
    torch._C._len_torch_dispatch_stack,
    torch._C._len_torch_function_stack,
    torch._C._functorch.peek_interpreter_stack,
    torch._C._get_tracing_state,
)


def direct(
    name: str, general: Callable[..., Any], arguments: Callable[..., Any], special: tuple[Callable[[], Any], ...] = ()
) -> Any:
    """`general` straight to the plan, where the dispatcher has nothing to do.

    Args:
        name: of the operator that `general` comes to.
        general: takes the operator's tensors, and then settings of its own.
        arguments: the operator's arguments of those of `general`, or None where only `general` serves. It is asked
            once for each layout of the tensors and their settings, so no tensor's elements may matter.
        special: what else gives neither None nor 0 where only `general` serves.
    """
    form = FORMS[name.removesuffix("_")]

    def prepare(args: tuple[Any, ...]) -> Any:
        found = arguments(*args)
        return None if found is None else _prepare(form, found)

    places = tuple(form.arrays.index(array) for array in form.overwritten)
    written, copied = (places, ()) if name.endswith("_") else ((), places)
    fast = _core.TorchCall(len(form.arrays), general, None, prepare, written, copied, _SPECIAL + special)
    clear_with_plans.append(fast.clear)
    return fast


def _register(form: Form, in_place: bool = False) -> None:
    name = f"{form.name}_" if in_place else form.name
    LIBRARY.define(_schema(form, in_place), tags=TAGS)
    operator = getattr(torch.ops.baracuda, name).default
    transforms = torch._C._functorch.peek_interpreter_stack
    node: Any = None
    transformed: Any = None

    def general(*args: Any) -> Any:
        if transforms() is not None and transformed is not None:
            return transformed.apply(*args)
        return operator(*args)

    def differentiated(*args: Any) -> Any:
        return node.apply(*args)

    written = tuple(form.arrays.index(name) for name in form.overwritten)
    copied = () if in_place else written
    fast = _core.TorchCall(
        len(form.arrays), general, None if in_place else differentiated, functools.partial(_prepare, form),
        written if in_place else (), copied, _SPECIAL,
    )  # fmt: skip
    clear_with_plans.append(fast.clear)
    kernel = _kernel(form, copied, fast)
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, kernel, key)
    if in_place:
        LIBRARY.impl(name, _count_versions(form, operator), "ADInplaceOrView", with_keyset=True)
        LIBRARY.impl(name, _autograd_in_place(form, operator), "Autograd", with_keyset=True)
        torch.library.register_fake(f"baracuda::{name}", lambda *args: None, lib=LIBRARY)  # noqa: ARG005
    else:
        autograd, node, transformed = _autograd(form, operator, kernel)
        LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)
        torch.library.register_fake(f"baracuda::{name}", _fake(form), lib=LIBRARY)

    def call(*args: Any) -> Any:
        return operator(*args) if compiling() else fast(*args)

    operators[name] = operator
    calls[name] = call
    if not in_place:
        _operations.operators[name] = _bound(form, call)


for _form in FORMS.values():
    _register(_form)
    if _form.overwritten:
        _register(_form, in_place=True)
