# SPDX-License-Identifier: Apache-2.0
"""The operators as pure functions of arrays, described once for every framework that traces.

A *form* says which arrays and which static values an operator takes, which plan that is, what comes out,
and how its gradient is made of other forms. :mod:`baracuda.torch` and :mod:`baracuda.jax` bind all of them
by one mechanism each. Arrays are named as the plan's operands.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from baracuda._base import Plan
from baracuda.image import (
    NmsPlan,
    RoiAlignBackwardPlan,
    RoiAlignPlan,
    RoiPoolBackwardPlan,
    RoiPoolPlan,
)
from baracuda.kv_cache import KvCacheAppendPlan, KvCacheGatherPlan
from baracuda.layout import DynamicWriteSliceBackwardPlan, DynamicWriteSlicePlan, WriteSlicePlan
from baracuda.pooling import (
    FractionalMaxPool2dBackwardPlan,
    FractionalMaxPool2dPlan,
    FractionalMaxPool3dBackwardPlan,
    FractionalMaxPool3dPlan,
)
from baracuda.scan import ScanBackwardPlan, ScanPlan
from baracuda.segment import SegmentReduceBackwardPlan, SegmentReducePlan

__all__ = ["FORMS", "Form", "Problem", "Spec", "sum_dtype"]


class Spec(NamedTuple):
    """What is known of an array while a program is traced; extents may be symbols."""

    shape: tuple[Any, ...]
    dtype: str


class Problem(NamedTuple):
    """The fields of the descriptor, and what each output is."""

    fields: dict[str, Any]
    outputs: tuple[Spec, ...]


#: The gradient of a form: (operations of the framework, what was saved, gradients of the outputs) to the
#: gradients of the arrays by name. What was saved has the static values and the arrays of `saves` as
#: attributes, and ``specs`` of all arrays and outputs by name.
Gradient = Callable[..., dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Form:
    """An operator as a pure function.

    Attributes:
        name: of the function.
        plan: the class of plans that runs it.
        describe: the problem of the arrays' specs and the static values.
        outputs: names of what comes out, in order.
        arrays: names of the arrays, in order.
        optional: those that may be left out.
        settings: names of the static values and their kinds: ``"int"``, ``"bool"``, ``"float"``, ``"str"``,
            ``"ints"``, and with a question mark where None is one of them.
        overwritten: arrays that the plan writes in place: as a pure function, a copy of each is an output.
        saves: arrays and outputs that the gradient reads.
        gradient: see :data:`Gradient`; None: the operator has none.
        leading: any further axes in front are independent problems, and axes count from the last.
    """

    name: str
    plan: type[Plan]
    describe: Callable[..., Problem]
    outputs: tuple[str, ...]
    arrays: tuple[str, ...]
    optional: frozenset[str]
    settings: dict[str, str]
    overwritten: tuple[str, ...] = ()
    saves: tuple[str, ...] = ()
    gradient: Gradient | None = None
    leading: bool = False


FORMS: dict[str, Form] = {}

_Describe = Callable[..., Problem]

_KINDS = {
    "int": "int",
    "bool": "bool",
    "float": "float",
    "str": "str",
    "tuple[int, ...]": "ints",
    "float | None": "float?",
    "str | None": "str?",
}


def _form(plan: type[Plan], outputs: str, name: str | None = None, **details: Any) -> Callable[[_Describe], _Describe]:
    """Makes a form of the function that describes its problem; its parameters are the form's."""

    def register(describe: _Describe) -> _Describe:
        arrays: list[str] = []
        optional: set[str] = set()
        settings: dict[str, str] = {}
        for parameter in inspect.signature(describe).parameters.values():
            if parameter.annotation in ("Spec", "Spec | None"):
                arrays.append(parameter.name)
                if parameter.annotation == "Spec | None":
                    optional.add(parameter.name)
            else:
                settings[parameter.name] = _KINDS[parameter.annotation]
        own_name = name or describe.__name__.removeprefix("_")
        form = Form(
            own_name, plan, describe, tuple(outputs.split()), tuple(arrays), frozenset(optional), settings, **details
        )
        FORMS[form.name] = form
        return describe

    return register


# ---------------------------------------------------------------------------------------------------
# Scans.


def sum_dtype(dtype: str) -> str:
    """What sums and products of a dtype are kept in by default."""
    return dtype if "float" in dtype else "int64"


def _direction(s: SimpleNamespace) -> dict[str, Any]:
    return {"axis": s.axis, "reverse": s.reverse, "exclusive": s.exclusive}


def _sums(kind: str) -> None:
    def forward(x: Spec, axis: int, reverse: bool, exclusive: bool, out_dtype: str) -> Problem:
        fields = {
            "kind": kind, "shape": x.shape, "axis": axis, "dtype": x.dtype, "out_dtype": out_dtype,
            "reverse": reverse, "exclusive": exclusive,
        }  # fmt: skip
        return Problem(fields, (Spec(x.shape, out_dtype),))

    def of_sum(ops: Any, s: SimpleNamespace, dy: Any) -> dict[str, Any]:
        return {"x": ops.cast(ops.cumsum_backward(dy, **_direction(s)), s.specs["x"].dtype)}

    def of_product(ops: Any, s: SimpleNamespace, dy: Any) -> dict[str, Any]:
        x = ops.cast(s.x, s.specs["y"].dtype)
        return {"x": ops.cast(ops.cumprod_backward(dy, x, s.y, **_direction(s)), s.specs["x"].dtype)}

    gradient = {"gradient": of_sum} if kind == "cumsum" else {"gradient": of_product, "saves": ("x", "y")}
    _form(ScanPlan, "y", kind, leading=True, **gradient)(forward)


def _log_sum() -> None:
    def forward(x: Spec, axis: int, reverse: bool, exclusive: bool) -> Problem:
        fields = {
            "kind": "logcumsumexp", "shape": x.shape, "axis": axis, "dtype": x.dtype, "reverse": reverse,
            "exclusive": exclusive,
        }  # fmt: skip
        return Problem(fields, (x,))

    def gradient(ops: Any, s: SimpleNamespace, dy: Any) -> dict[str, Any]:
        return {"x": ops.logcumsumexp_backward(dy, s.x, s.y, **_direction(s))}

    _form(ScanPlan, "y", "logcumsumexp", leading=True, gradient=gradient, saves=("x", "y"))(forward)


def _saved_scan_gradient(kind: str) -> None:
    def backward(dy: Spec, x: Spec, y: Spec, axis: int, reverse: bool, exclusive: bool) -> Problem:  # noqa: ARG001
        fields = {
            "kind": kind, "shape": dy.shape, "axis": axis, "dtype": dy.dtype, "reverse": reverse,
            "exclusive": exclusive,
        }  # fmt: skip
        return Problem(fields, (dy,))

    _form(ScanBackwardPlan, "dx", f"{kind}_backward", leading=True)(backward)


def _extremes(kind: str) -> None:
    def values(x: Spec, axis: int, reverse: bool, exclusive: bool) -> Problem:
        fields = {
            "kind": kind, "shape": x.shape, "axis": axis, "dtype": x.dtype, "reverse": reverse, "exclusive": exclusive,
        }  # fmt: skip
        return Problem(fields, (x,))

    def of_values(ops: Any, s: SimpleNamespace, dy: Any) -> dict[str, Any]:
        return {"x": ops.operators[f"{kind}_backward"](dy, s.y, None, **_direction(s), ties="first")}

    def places(x: Spec, axis: int, reverse: bool, exclusive: bool, ties: str, index_dtype: str) -> Problem:
        fields = {
            "kind": kind, "shape": x.shape, "axis": axis, "dtype": x.dtype, "reverse": reverse,
            "exclusive": exclusive, "indices": True, "ties": ties, "index_dtype": index_dtype,
        }  # fmt: skip
        return Problem(fields, (x, Spec(x.shape, index_dtype)))

    def of_places(ops: Any, s: SimpleNamespace, dy: Any, _: Any) -> dict[str, Any]:
        return {"x": ops.operators[f"{kind}_backward"](dy, None, s.indices, **_direction(s), ties=s.ties)}

    def backward(
        dy: Spec, y: Spec | None, indices: Spec | None, axis: int, reverse: bool, exclusive: bool, ties: str
    ) -> Problem:
        del y
        fields = {
            "kind": kind, "shape": dy.shape, "axis": axis, "dtype": dy.dtype, "reverse": reverse,
            "exclusive": exclusive, "saved": "y" if indices is None else "indices", "ties": ties,
            "index_dtype": None if indices is None else indices.dtype,
        }  # fmt: skip
        return Problem(fields, (dy,))

    _form(ScanPlan, "y", kind, leading=True, gradient=of_values, saves=("y",))(values)
    _form(ScanPlan, "y indices", f"{kind}_with_indices", leading=True, gradient=of_places, saves=("indices",))(places)
    _form(ScanBackwardPlan, "dx", f"{kind}_backward", leading=True)(backward)


_sums("cumsum")
_sums("cumprod")
_log_sum()
_saved_scan_gradient("cumprod")
_saved_scan_gradient("logcumsumexp")
_extremes("cummax")
_extremes("cummin")


def _of_cumsum_backward(ops: Any, s: SimpleNamespace, ddx: Any) -> dict[str, Any]:
    return {"dy": ops.cumsum(ddx, **_direction(s), out_dtype=s.specs["dy"].dtype)}


@_form(ScanBackwardPlan, "dx", leading=True, gradient=_of_cumsum_backward)
def _cumsum_backward(dy: Spec, axis: int, reverse: bool, exclusive: bool) -> Problem:
    fields = {
        "kind": "cumsum", "shape": dy.shape, "axis": axis, "dtype": dy.dtype, "reverse": reverse,
        "exclusive": exclusive,
    }  # fmt: skip
    return Problem(fields, (dy,))


def _of_recurrence(ops: Any, s: SimpleNamespace, dh: Any) -> dict[str, Any]:
    if s.h0 is None:
        da, db = ops.linear_recurrence_backward(dh, s.a, s.h, axis=s.axis, reverse=s.reverse)
        return {"a": da, "b": db}
    da, db, dh0 = ops.linear_recurrence_backward_h0(dh, s.a, s.h, s.h0, axis=s.axis, reverse=s.reverse)
    return {"a": da, "b": db, "h0": dh0}


@_form(ScanPlan, "h", gradient=_of_recurrence, saves=("a", "h0", "h"), leading=True)
def _linear_recurrence(a: Spec, b: Spec, h0: Spec | None, axis: int, reverse: bool) -> Problem:
    del b
    fields = {
        "kind": "linear_recurrence", "shape": a.shape, "axis": axis, "dtype": a.dtype, "reverse": reverse,
        "has_h0": h0 is not None,
    }  # fmt: skip
    return Problem(fields, (a,))


# The backward scan gives g = db, with g_j = dh_j + a_{j+1} g_{j+1}, da_j = g_j h_{j-1} and dh0 = a_0 g_0. With
# q_j the gradient of the loss with respect to g_j alone, that with respect to dh is s_j = q_j + a_j s_{j-1}: a
# recurrence along the axis again, which begins with the gradient of dh0.
def _of_recurrence_backward(ops: Any, s: SimpleNamespace, u: Any, v: Any, w: Any = None) -> dict[str, Any]:
    h0 = getattr(s, "h0", None)
    step = {"axis": s.axis, "reverse": s.reverse}
    ahead = ops.linear_recurrence(s.a, u * ops.shifted(s.h, h0, **step) + v, w, **step)
    of_h, first = ops.shifted_back(u * s.db, **step)
    gradients = {"dh": ahead, "a": ops.shifted(ahead, w, **step) * s.db, "h": of_h}
    return gradients if h0 is None else gradients | {"h0": first}


def _recurrence_gradient_fields(dh: Spec, axis: int, reverse: bool, has_h0: bool) -> dict[str, Any]:
    return {
        "kind": "linear_recurrence", "shape": dh.shape, "axis": axis, "dtype": dh.dtype, "reverse": reverse,
        "has_h0": has_h0,
    }  # fmt: skip


@_form(ScanBackwardPlan, "da db", gradient=_of_recurrence_backward, saves=("a", "h", "db"), leading=True)
def _linear_recurrence_backward(dh: Spec, a: Spec, h: Spec, axis: int, reverse: bool) -> Problem:
    del a, h
    return Problem(_recurrence_gradient_fields(dh, axis, reverse, False), (dh, dh))


@_form(ScanBackwardPlan, "da db dh0", gradient=_of_recurrence_backward, saves=("a", "h", "h0", "db"), leading=True)
def _linear_recurrence_backward_h0(dh: Spec, a: Spec, h: Spec, h0: Spec, axis: int, reverse: bool) -> Problem:
    del a, h
    return Problem(_recurrence_gradient_fields(dh, axis, reverse, True), (dh, dh, h0))


# ---------------------------------------------------------------------------------------------------
# Segments.


def _groups(segment_ids: Spec | None, offsets: Spec | None) -> Spec:
    groups = offsets if segment_ids is None else segment_ids
    assert groups is not None
    return groups


def _segments(kind: str) -> None:
    extreme = kind in ("max", "min")

    def fields_of(
        rows: Any, columns: Any, segments: Any, dtype: str, segment_ids: Spec | None, offsets: Spec | None, ids: str
    ) -> dict[str, Any]:
        return {
            "kind": kind, "num_inputs": rows, "embedding_dim": columns, "num_segments": segments, "dtype": dtype,
            "index_dtype": _groups(segment_ids, offsets).dtype, "ids": ids,
        }  # fmt: skip

    def forward(
        input: Spec,  # noqa: A002
        segment_ids: Spec | None,
        offsets: Spec | None,
        num_segments: int,
        ids: str,
        ties: str,
        empty_value: float | None,
    ) -> Problem:
        rows, columns = input.shape
        fields = fields_of(rows, columns, num_segments, input.dtype, segment_ids, offsets, ids)
        fields |= {"ties": ties, "empty_value": empty_value}
        return Problem(fields, (Spec((num_segments, columns), input.dtype),))

    def with_arg(
        input: Spec,  # noqa: A002
        segment_ids: Spec | None,
        offsets: Spec | None,
        num_segments: int,
        ids: str,
        empty_value: float | None,
    ) -> Problem:
        fields, outputs = forward(input, segment_ids, offsets, num_segments, ids, "first", empty_value)
        arg = Spec((num_segments, input.shape[1]), _groups(segment_ids, offsets).dtype)
        return Problem(fields | {"return_arg": True}, (*outputs, arg))

    def backward(
        d_output: Spec,
        input: Spec | None,  # noqa: A002
        arg: Spec | None,
        segment_ids: Spec | None,
        offsets: Spec | None,
        num_inputs: int,
        ids: str,
        ties: str,
    ) -> Problem:
        del input
        fields = fields_of(
            num_inputs, d_output.shape[1], d_output.shape[0], d_output.dtype, segment_ids, offsets, ids
        )  # fmt: skip
        fields |= {"ties": ties, "saved": "input" if arg is None else "arg"}
        return Problem(fields, (Spec((num_inputs, d_output.shape[1]), d_output.dtype),))

    def gradient(ops: Any, s: SimpleNamespace, d_output: Any, *_: Any) -> dict[str, Any]:
        return {
            "input": ops.operators[f"segment_{kind}_backward"](
                d_output,
                getattr(s, "input", None),
                getattr(s, "arg", None),
                s.segment_ids,
                s.offsets,
                num_inputs=s.specs["input"].shape[0],
                ids=s.ids,
                ties=getattr(s, "ties", "first"),
            )
        }

    def of_backward(ops: Any, s: SimpleNamespace, dd_input: Any) -> dict[str, Any]:
        # The sums and means are linear, and each the transpose of its gradient. Empty segments have none.
        return {
            "d_output": ops.operators[f"segment_{kind}"](
                dd_input,
                s.segment_ids,
                s.offsets,
                num_segments=s.specs["d_output"].shape[0],
                ids=s.ids,
                ties="first",
                empty_value=None,
            )
        }

    groups = ("segment_ids", "offsets")
    saved = ("input", *groups) if extreme or kind == "prod" else groups
    _form(SegmentReducePlan, "output", f"segment_{kind}", gradient=gradient, saves=saved)(forward)
    if extreme:
        _form(SegmentReducePlan, "output arg", f"segment_{kind}_with_arg", gradient=gradient, saves=("arg", *groups))(
            with_arg
        )
    linear = {"gradient": of_backward, "saves": groups} if kind in ("sum", "mean") else {}
    _form(SegmentReduceBackwardPlan, "d_input", f"segment_{kind}_backward", **linear)(backward)


for _kind in ("sum", "mean", "max", "min", "prod"):
    _segments(_kind)


# ---------------------------------------------------------------------------------------------------
# Pooling.


def _pools(axes: tuple[str, ...], plan: type[Plan], backward_plan: type[Plan]) -> None:
    name = f"fractional_max_pool{len(axes)}d"

    def extents(full: tuple[Any, ...], window: tuple[int, ...], pooled: tuple[Any, ...]) -> dict[str, Any]:
        return {
            "batch": full[0],
            "channels": full[1],
            **{f"{axis}_in": extent for axis, extent in zip(axes, full[2:], strict=True)},
            **{f"window_{axis}": extent for axis, extent in zip(axes, window, strict=True)},
            **{f"{axis}_out": extent for axis, extent in zip(axes, pooled, strict=True)},
        }

    def forward(
        x: Spec,
        random_samples: Spec,
        kernel_size: tuple[int, ...],
        output_size: tuple[int, ...],
        placement: str,
        index_base: str,
        index_dtype: str,
    ) -> Problem:
        fields = extents(x.shape, kernel_size, output_size) | {
            "dtype": x.dtype, "placement": placement, "index_base": index_base, "index_dtype": index_dtype,
            "samples_dtype": random_samples.dtype,
        }  # fmt: skip
        shape = (*x.shape[:2], *output_size)
        return Problem(fields, (Spec(shape, x.dtype), Spec(shape, index_dtype)))

    def gradient(ops: Any, s: SimpleNamespace, dy: Any, _: Any) -> dict[str, Any]:
        return {
            "x": ops.operators[f"{name}_backward"](
                dy,
                s.indices,
                input_size=tuple(s.specs["x"].shape[2:]),
                kernel_size=s.kernel_size,
                placement=s.placement,
                index_base=s.index_base,
            )
        }

    def backward(
        dy: Spec,
        indices: Spec,
        input_size: tuple[int, ...],
        kernel_size: tuple[int, ...],
        placement: str,
        index_base: str,
    ) -> Problem:
        full = (*dy.shape[:2], *input_size)
        fields = extents(full, kernel_size, dy.shape[2:]) | {
            "dtype": dy.dtype, "placement": placement, "index_base": index_base, "index_dtype": indices.dtype,
        }  # fmt: skip
        return Problem(fields, (Spec(full, dy.dtype),))

    _form(plan, "y indices", name, gradient=gradient, saves=("indices",))(forward)
    _form(backward_plan, "dx", f"{name}_backward")(backward)


_pools(("h", "w"), FractionalMaxPool2dPlan, FractionalMaxPool2dBackwardPlan)
_pools(("d", "h", "w"), FractionalMaxPool3dPlan, FractionalMaxPool3dBackwardPlan)


# ---------------------------------------------------------------------------------------------------
# Regions of images.


def _region_fields(
    full: tuple[Any, ...], rois: Spec, pooled: tuple[int, ...], scale: float, dtype: str
) -> dict[str, Any]:
    return {
        **dict(zip("nchw", full, strict=True)),
        "num_rois": rois.shape[0],
        "pooled_h": pooled[0],
        "pooled_w": pooled[1],
        "spatial_scale": scale,
        "dtype": dtype,
        "rois_dtype": rois.dtype,
    }


def _of_roi_align(ops: Any, s: SimpleNamespace, doutput: Any) -> dict[str, Any]:
    n, _, h, w = s.specs["input"].shape
    return {
        "input": ops.roi_align_backward(
            doutput, s.rois, images=(n, h, w), spatial_scale=s.spatial_scale, sampling_ratio=s.sampling_ratio,
            aligned=s.aligned,
        )
    }  # fmt: skip


@_form(RoiAlignPlan, "output", gradient=_of_roi_align, saves=("rois",))
def _roi_align(
    input: Spec,  # noqa: A002
    rois: Spec,
    output_size: tuple[int, ...],
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
) -> Problem:
    fields = _region_fields(input.shape, rois, output_size, spatial_scale, input.dtype)
    fields |= {"sampling_ratio": sampling_ratio, "aligned": aligned}
    return Problem(fields, (Spec((rois.shape[0], input.shape[1], *output_size), input.dtype),))


def _of_roi_align_backward(ops: Any, s: SimpleNamespace, dd: Any) -> dict[str, Any]:
    # It is linear in the features, and so the transpose of its gradient.
    return {
        "doutput": ops.roi_align(
            dd, s.rois, output_size=tuple(s.specs["doutput"].shape[2:]), spatial_scale=s.spatial_scale,
            sampling_ratio=s.sampling_ratio, aligned=s.aligned,
        )
    }  # fmt: skip


@_form(RoiAlignBackwardPlan, "dinput", gradient=_of_roi_align_backward, saves=("rois",))
def _roi_align_backward(
    doutput: Spec,
    rois: Spec,
    images: tuple[int, ...],
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
) -> Problem:
    full = (images[0], doutput.shape[1], *images[1:])
    fields = _region_fields(full, rois, doutput.shape[2:], spatial_scale, doutput.dtype)
    fields |= {"sampling_ratio": sampling_ratio, "aligned": aligned}
    return Problem(fields, (Spec(full, doutput.dtype),))


def _of_roi_pool(ops: Any, s: SimpleNamespace, doutput: Any, _: Any) -> dict[str, Any]:
    n, _, h, w = s.specs["input"].shape
    return {"input": ops.roi_pool_backward(doutput, s.rois, s.argmax, images=(n, h, w), spatial_scale=s.spatial_scale)}


@_form(RoiPoolPlan, "output argmax", gradient=_of_roi_pool, saves=("rois", "argmax"))
def _roi_pool(
    input: Spec,  # noqa: A002
    rois: Spec,
    output_size: tuple[int, ...],
    spatial_scale: float,
    index_dtype: str,
) -> Problem:
    fields = _region_fields(input.shape, rois, output_size, spatial_scale, input.dtype)
    shape = (rois.shape[0], input.shape[1], *output_size)
    return Problem(fields | {"index_dtype": index_dtype}, (Spec(shape, input.dtype), Spec(shape, index_dtype)))


@_form(RoiPoolBackwardPlan, "dinput")
def _roi_pool_backward(
    doutput: Spec, rois: Spec, argmax: Spec, images: tuple[int, ...], spatial_scale: float
) -> Problem:
    full = (images[0], doutput.shape[1], *images[1:])
    fields = _region_fields(full, rois, doutput.shape[2:], spatial_scale, doutput.dtype)
    return Problem(fields | {"index_dtype": argmax.dtype}, (Spec(full, doutput.dtype),))


@_form(NmsPlan, "keep count")
def _nms_padded(boxes: Spec, scores: Spec, classes: Spec | None, iou_threshold: float) -> Problem:
    fields = {
        "num_boxes": boxes.shape[0], "iou_threshold": iou_threshold, "dtype": boxes.dtype,
        "scores_dtype": scores.dtype, "class_dtype": None if classes is None else classes.dtype,
    }  # fmt: skip
    return Problem(fields, (Spec((boxes.shape[0],), "int64"), Spec((1,), "int64")))


# ---------------------------------------------------------------------------------------------------
# Writes. As pure functions they return the whole of what was written to.


def _of_write_slice(ops: Any, s: SimpleNamespace, grad: Any) -> dict[str, Any]:
    window = ops.window(grad, s.start, s.end)
    return {"dest": ops.write_slice(grad, ops.zeros_like(window), start=s.start, end=s.end), "source": window}


@_form(WriteSlicePlan, "dest", overwritten=("dest",), gradient=_of_write_slice)
def _write_slice(dest: Spec, source: Spec, start: tuple[int, ...], end: tuple[int, ...]) -> Problem:
    del source
    ranges = tuple(zip(start, end, strict=True))
    return Problem({"dest_shape": dest.shape, "ranges": ranges, "dtype": dest.dtype}, (dest,))


def _of_dynamic_update_slice(ops: Any, s: SimpleNamespace, grad: Any) -> dict[str, Any]:
    d_dest, d_source = ops.dynamic_update_slice_backward(
        grad, s.starts, block_shape=tuple(s.specs["source"].shape), bounds=s.bounds
    )
    return {"dest": d_dest, "source": d_source}


def _dynamic_fields(dest: Spec, block: tuple[Any, ...], starts: Spec, bounds: str) -> dict[str, Any]:
    return {
        "dest_shape": dest.shape, "block_shape": block, "dtype": dest.dtype, "index_dtype": starts.dtype,
        "batched": len(starts.shape) == 2, "bounds": bounds,
    }  # fmt: skip


@_form(DynamicWriteSlicePlan, "dest", overwritten=("dest",), gradient=_of_dynamic_update_slice, saves=("starts",))
def _dynamic_update_slice(dest: Spec, source: Spec, starts: Spec, bounds: str) -> Problem:
    return Problem(_dynamic_fields(dest, source.shape, starts, bounds), (dest,))


def _of_dynamic_update_slice_backward(ops: Any, s: SimpleNamespace, dd_dest: Any, dd_source: Any) -> dict[str, Any]:
    # Moving elements is linear: the transpose puts both gradients where they came from.
    return {"grad": ops.dynamic_update_slice(dd_dest, dd_source, s.starts, bounds=s.bounds)}


@_form(DynamicWriteSliceBackwardPlan, "d_dest d_source", gradient=_of_dynamic_update_slice_backward, saves=("starts",))
def _dynamic_update_slice_backward(grad: Spec, starts: Spec, block_shape: tuple[int, ...], bounds: str) -> Problem:
    fields = _dynamic_fields(grad, tuple(block_shape), starts, bounds)
    return Problem(fields, (grad, Spec(tuple(block_shape), grad.dtype)))


def _cache_fields(tokens: Any, cache: Spec, slot_mapping: Spec, dtype: str) -> dict[str, Any]:
    blocks, block_size, heads, dim = cache.shape
    return {
        "tokens": tokens, "heads": heads, "dim": dim, "blocks": blocks, "block_size": block_size, "dtype": dtype,
        "cache_dtype": None if cache.dtype == dtype else cache.dtype, "index_dtype": slot_mapping.dtype,
    }  # fmt: skip


@_form(KvCacheAppendPlan, "key_cache value_cache", overwritten=("key_cache", "value_cache"))
def _kv_cache_append(
    key: Spec,
    value: Spec,
    key_cache: Spec,
    value_cache: Spec,
    slot_mapping: Spec,
    key_scale: Spec | None,
    value_scale: Spec | None,
) -> Problem:
    del value, key_scale, value_scale
    fields = _cache_fields(key.shape[0], key_cache, slot_mapping, key.dtype)
    return Problem(fields, (key_cache, value_cache))


@_form(KvCacheGatherPlan, "key value")
def _kv_cache_gather(
    key_cache: Spec,
    value_cache: Spec,
    slot_mapping: Spec,
    key_scale: Spec | None,
    value_scale: Spec | None,
    dtype: str,
) -> Problem:
    del value_cache, key_scale, value_scale
    tokens = Spec((slot_mapping.shape[0], *key_cache.shape[2:]), dtype)
    return Problem(_cache_fields(tokens.shape[0], key_cache, slot_mapping, dtype), (tokens, tokens))
