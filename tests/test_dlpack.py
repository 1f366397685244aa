# SPDX-License-Identifier: Apache-2.0
"""Every producer of tensors with every dtype and layout that it can have, as an input and as an output."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import support
from support import DTYPES, StridedView

import baracuda as bc

ALL = [name for name in DTYPES if name not in ("int4", "uint4")]
SHAPE = (4, 6)

#: Views of a row-major array of SHAPE, and the layouts that no framework's own indexing makes.
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "row_major": lambda array: array,
    "scalar": lambda array: array[1, 2, ...],
    "no_rows": lambda array: array[:0],
    "no_columns": lambda array: array[:, 3:3],
    "strided": lambda array: array[1::2, ::3],
    "transposed": lambda array: array.T,
    "offset": lambda array: array[1:3, 1:],
    "negative": lambda array: array[::-1, 4::-2],
    "aligned_to_an_element": lambda array: array.reshape(-1)[1:22].reshape(3, 7),
    "read_only": lambda array: array,
}

#: What each producer has not: dtypes, layouts.
NARROW = {"bfloat16", "float8_e4m3fn", "float8_e5m2"}
VIEWS = set(LAYOUTS) - {"row_major", "read_only"}
LACKS: dict[str, tuple[set[str], set[str]]] = {
    "numpy": (set(), set()),
    "torch": (set(), {"negative", "read_only"}),
    # Without 64-bit types, and a view is a copy of its elements.
    "jax": ({"int64", "uint64", "float64", "complex128"}, {"strided", "transposed", "negative"}),
    "cupy": (NARROW, {"read_only"}),
    # Its tensors are whole and row-major.
    "baracuda": (set(), VIEWS - {"no_rows"} | {"read_only"}),
    "dlpack": (set(), set()),
    "old dlpack": (set(), {"read_only"}),
    "interface": (NARROW, set()),
}
DEVICES = {"numpy": ["cpu"], "cupy": ["cuda"], "interface": ["cuda"]}


class Interface:
    """The CUDA array interface and nothing else."""

    def __init__(self, memory: bc.Tensor, view: np.ndarray, offset: int, read_only: bool) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": view.shape,
            "strides": view.strides,
            "typestr": view.dtype.str,
            "data": (memory.data_ptr + offset, read_only),
        }


def offset_of(view: np.ndarray, base: np.ndarray) -> int:
    return 0 if view.size == 0 else view.__array_interface__["data"][0] - base.__array_interface__["data"][0]


class Case:
    """An array of a producer, its base to look at, and the same view of a NumPy array."""

    def __init__(self, producer: str, dtype: str, layout: str, device: str) -> None:
        self.backend = support.Backend(device)
        self.host = support.random_array(np.random.default_rng(3), SHAPE, dtype)
        self.expected = LAYOUTS[layout](self.host)
        read_only = layout == "read_only"
        if producer in ("numpy", "torch", "jax", "cupy"):
            self.base = self.backend.of(producer, self.host)
            self.array = LAYOUTS[layout](self.base)
            if read_only and producer == "numpy":
                self.array.flags.writeable = False
            return
        self.base = self.backend.array(self.host)
        if producer == "baracuda":
            self.array = self.base if layout == "row_major" else self.backend.array(self.expected)
            return
        offset = offset_of(self.expected, self.host)
        if producer == "interface":
            self.array = Interface(self.base, self.expected, offset, read_only)
            return
        self.array = StridedView(
            self.base,
            dtype,
            self.expected.shape,
            tuple(step // self.host.itemsize for step in self.expected.strides),
            byte_offset=offset,
            flags=support.READ_ONLY if read_only else 0,
            legacy=producer == "old dlpack",
        )


def cases() -> list[Any]:
    found = []
    for producer, (dtypes, layouts) in LACKS.items():
        for device in DEVICES.get(producer, ["cpu", "cuda"]):
            needs = ["gpu"] if device == "cuda" else []
            if producer in ("torch", "jax", "cupy"):
                needs.append(f"{producer}.cuda" if needs and producer != "cupy" else producer)
            marks = [pytest.mark.requires(*needs)] if needs else []
            found += [
                pytest.param(producer, layout, [name for name in ALL if name not in dtypes], device, marks=marks,
                             id=f"{producer} {layout} {device}")
                for layout in LAYOUTS if layout not in layouts
            ]  # fmt: skip
    return found


@pytest.mark.parametrize(("producer", "layout", "dtypes", "device"), cases())
def test_every_dtype_in_and_out(producer: str, layout: str, dtypes: list[str], device: str) -> None:
    for dtype in dtypes:
        case = Case(producer, dtype, layout, device)
        shape = case.expected.shape
        assert bc._core.describe(case.array, "it") == (shape, dtype, case.backend.full_name), dtype
        if layout == "scalar":
            plan = bc.WriteSlicePlan(dest_shape=(1,), ranges=((0, 1),), dtype=dtype, device=device)
            with pytest.raises(bc.InvalidProblemError, match=r"source: expected .*1"):
                plan.run(dest=case.backend.array(case.host[0, :1]), source=case.array)
            continue
        plan = bc.WriteSlicePlan(dest_shape=shape, ranges=[(0, extent) for extent in shape], dtype=dtype, device=device)
        dest = case.backend.array(np.zeros(shape, case.host.dtype))
        plan.run(dest=dest, source=case.array)
        support.assert_same_bits(dest.numpy(), case.expected)

        fresh = support.random_array(np.random.default_rng(4), shape, dtype)
        if layout == "read_only" or producer == "jax":
            reason = "JAX arrays are immutable" if producer == "jax" else "dest: is read-only"
            with pytest.raises(bc.InvalidProblemError, match=reason):
                plan.run(dest=case.array, source=case.backend.array(fresh))
            support.assert_same_bits(case.backend.read(case.base), case.host)
            continue
        plan.run(dest=case.array, source=case.backend.array(fresh))
        if producer == "baracuda":
            support.assert_same_bits(case.array.numpy(), fresh)
            continue
        # The elements of the view, and nothing beside them.
        case.expected[...] = fresh
        support.assert_same_bits(case.backend.read(case.base), case.host)


class Lender:
    """Lends a NumPy array; each export holds a reference to it until its deleter has run."""

    def __init__(self, array: np.ndarray, legacy: bool) -> None:
        self.array = array
        self.legacy = legacy
        self.exports = 0

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None) -> Any:
        self.exports += 1
        return self.array.__dlpack__(stream=stream, max_version=None if self.legacy else max_version)

    def references(self) -> int:
        return sys.getrefcount(self.array)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_hundred_thousand_exports_are_deleted_once(legacy: bool) -> None:
    lender = Lender(np.ones(4, np.float32), legacy)
    dest = np.zeros(4, np.float32)
    plan = bc.WriteSlicePlan(dest_shape=(4,), ranges=((0, 4),), dtype="float32", device="cpu")
    wrong = bc.WriteSlicePlan(dest_shape=(5,), ranges=((0, 5),), dtype="float32", device="cpu")
    before = lender.references()
    capsule = lender.__dlpack__(max_version=(1, 0))
    held = lender.references() - before
    assert held > 0
    del capsule
    for _ in range(33_000):
        plan.run(dest=dest, source=lender)
        bound = plan.bind(dest=dest, source=lender)
        # One that is deleted twice would fall below, one that is never deleted stay above.
        assert lender.references() == before + held
        del bound
        try:
            wrong.run(dest=dest, source=lender)
        except bc.InvalidProblemError:
            continue
        raise AssertionError("the shape is wrong")
    assert lender.exports == 99_001
    for _ in range(999):
        plan.can_implement(dest=dest, source=lender)
    assert lender.exports == 100_000
    assert lender.references() == before
    assert dest.tolist() == [1] * 4
