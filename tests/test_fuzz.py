# SPDX-License-Identifier: Apache-2.0
"""Anything at all as a descriptor or an operand: accepted, or refused with one line, and never a crash."""

from __future__ import annotations

from typing import Any

import numpy as np
import support
from hypothesis import given, settings
from hypothesis import strategies as st
from support import StridedView

import baracuda as bc

EDGES = [0, 1, 2, 3, 7, 8, 255, 2**31 - 1, 2**31, 2**32, 2**40, 2**61, 2**62, 2**63 - 1]
numbers = st.one_of(st.integers(-2, 9), st.sampled_from([sign * edge for edge in EDGES for sign in (1, -1)]))
wild_numbers = st.one_of(numbers, st.integers(), st.floats(), st.none(), st.text(max_size=2), st.booleans())


def one_line(error: bc.BaracudaError) -> None:
    message = str(error)
    assert message.startswith("WriteSlicePlan: ")
    assert "\n" not in message
    assert message.isprintable()


pairs = st.one_of(st.tuples(wild_numbers, wild_numbers), st.lists(numbers))


@given(
    fields=st.fixed_dictionaries(
        {
            "dest_shape": st.one_of(st.lists(wild_numbers, max_size=10), wild_numbers),
            "ranges": st.one_of(st.lists(pairs, max_size=10), wild_numbers),
            "dtype": st.one_of(st.sampled_from(sorted(support.DTYPES)), st.text(max_size=8), wild_numbers),
            "overlap": st.one_of(st.sampled_from(["refuse", "stage"]), wild_numbers),
        }
    )
)
@settings(max_examples=10 * settings().max_examples)
def test_any_fields(fields: dict[str, Any]) -> None:
    try:
        plan = bc.WriteSlicePlan(**fields, device="cpu")
    except bc.BaracudaError as error:
        one_line(error)
        return
    assert 1 <= len(plan.descriptor.dest_shape) <= 8
    assert all(
        0 <= start <= end <= extent
        for (start, end), extent in zip(plan.descriptor.ranges, plan.descriptor.dest_shape, strict=True)
    )
    assert plan.workspace_size >= 0
    assert plan.cost.bytes >= 0


@st.composite
def near_plans(draw: st.DrawFn) -> dict[str, Any]:
    """Right problems, of any size."""
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 8, 2**20, 2**31, 2**40]), min_size=1, max_size=8))
    while np.prod([max(extent, 1) for extent in shape], dtype=object) >= 2**58:
        shape[shape.index(max(shape))] = 2
    ranges = []
    for extent in shape:
        start = draw(st.integers(0, extent))
        ranges.append((start, draw(st.integers(start, extent))))
    return {
        "dest_shape": shape,
        "ranges": ranges,
        "dtype": draw(st.sampled_from(sorted(support.DTYPES))),
        "overlap": draw(st.sampled_from(["refuse", "stage"])),
    }


@st.composite
def operands(draw: st.DrawFn, shape: tuple[int, ...], dtype: str) -> StridedView:
    """About what the plan takes, with some of it wrong."""
    sane = st.integers(0, 9).map(bool)
    kind: Any = dtype
    if not draw(sane):
        kind = draw(st.tuples(st.integers(0, 255), st.integers(0, 255), st.integers(0, 2)))
    if not draw(sane):
        shape = tuple(draw(st.lists(numbers.filter(lambda n: abs(n) < 2**63), max_size=10)))
    strides: Any = None
    if draw(st.booleans()):
        small = st.integers(-9, 9)
        any_stride = st.one_of(small, numbers.filter(lambda n: abs(n) < 2**63))
        strides = tuple(draw(st.lists(any_stride, min_size=len(shape), max_size=len(shape))))
    return StridedView(
        draw(st.sampled_from([0, 1, 2**12, 2**20, 2**40, 2**63, 2**64 - 16])),
        kind,
        shape,
        strides,
        byte_offset=draw(st.sampled_from([0, 0, 0, 1, 16, 2**40])),
        flags=draw(st.sampled_from([0, 0, 0, 1, 2, 4, 2**63])),
        version=draw(st.sampled_from([(1, 0), (1, 0), (1, 99), (0, 5), (2, 0)])),
        legacy=draw(st.booleans()),
        device=draw(st.sampled_from([(1, 0), (1, 0), (1, 0), (2, 0), (3, 0), (13, 1), (8, 0), (99, -1)])),
    )


@given(problem=near_plans(), data=st.data())
@settings(max_examples=10 * settings().max_examples)
def test_any_operands(problem: dict[str, Any], data: st.DataObject) -> None:
    """Only looked at: there is no memory behind them."""
    plan = bc.WriteSlicePlan(**problem, device="cpu")
    given_operands = {operand.name: data.draw(operands(operand.shape, operand.dtype)) for operand in plan.operands}
    try:
        plan.can_implement(**given_operands)
    except bc.BaracudaError as error:
        one_line(error)


@given(
    value=st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary()),
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
        max_leaves=5,
    ),
    name=st.one_of(st.sampled_from(["dest", "source"]), st.text(max_size=5)),
)
def test_any_object_as_an_operand(value: Any, name: str) -> None:
    plan = bc.WriteSlicePlan(dest_shape=(4,), ranges=((1, 3),), dtype="uint8", device="cpu")
    dest = np.zeros(4, np.uint8)
    given_operands: dict[str, Any] = {"dest": dest, "source": np.ones(2, np.uint8)}
    if name in ("workspace", "stream"):
        return
    given_operands[name] = value
    try:
        plan.run(**given_operands)
    except bc.BaracudaError as error:
        message = str(error)
    else:
        return
    assert message.startswith("WriteSlicePlan: ")
    assert not dest.any()
