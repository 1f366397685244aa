# SPDX-License-Identifier: Apache-2.0
"""Every refusal: its class, its sentence, that it survives pickling, and that nothing was written."""

from __future__ import annotations

import ctypes
import pickle
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import support
from support import StridedView

import baracuda as bc

BUILTIN = {
    bc.InvalidProblemError: ValueError,
    bc.UnsupportedError: NotImplementedError,
    bc.BufferTooSmallError: ValueError,
    bc.WorkspaceTooSmallError: ValueError,
    bc.MisalignedOperandError: ValueError,
    bc.CudaError: RuntimeError,
    bc.BaracudaError: Exception,
}


def check_error(error: BaseException, kind: type[bc.BaracudaError], message: str) -> None:
    assert type(error) is kind
    assert isinstance(error, bc.BaracudaError)
    assert isinstance(error, BUILTIN[kind])
    assert str(error) == message
    assert "\n" not in message
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is kind
    assert str(copied) == message
    assert copied.args == error.args
    for size in ("needed", "got"):
        assert getattr(copied, size, None) == getattr(error, size, None)


# ---------------------------------------------------------------------------------------------------
# Descriptors and selection.

PROBLEM: dict[str, Any] = {"dest_shape": (3, 4), "ranges": ((0, 3), (1, 3)), "dtype": "float32"}
INVALID, UNSUPPORTED = bc.InvalidProblemError, bc.UnsupportedError
BIG = 2**62


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"dest_shape": (), "ranges": ()}, INVALID, "dest_shape: expected a rank of 1 to 8, got 0"),
        ({"dest_shape": (1,) * 9}, UNSUPPORTED, "dest_shape: expected a rank of 1 to 8, got 9"),
        ({"dest_shape": (3, -1)}, INVALID, "dest_shape: extent -1 of axis 1 is negative"),
        ({"dest_shape": (BIG, 2)}, INVALID, f"dest_shape: ({BIG}, 2) has more bytes than an int64 can count"),
        ({"dest_shape": (0, BIG, 2)}, INVALID, f"dest_shape: (0, {BIG}, 2) has more bytes than an int64 can count"),
        ({"dest_shape": (2**63, 4)}, INVALID, f"dest_shape: {2**63} does not fit an int64"),
        ({"dest_shape": (2.5, 4)}, INVALID, "dest_shape: expected an integer, got 2.5"),
        ({"dest_shape": 12}, INVALID, "dest_shape: expected a tuple of extents, got 12"),
        ({"ranges": ((0, 3),)}, INVALID, "ranges: expected 2 ranges for dest_shape (3, 4), got 1"),
        ({"ranges": ((0, 3),) * 9}, INVALID, "ranges: expected 2 ranges for dest_shape (3, 4), got 9"),
        ({"ranges": ((0, 3), (1, 5))}, INVALID, "ranges: expected 0 <= start <= end <= 4 on axis 1, got (1, 5)"),
        ({"ranges": ((2, 1), (1, 3))}, INVALID, "ranges: expected 0 <= start <= end <= 3 on axis 0, got (2, 1)"),
        ({"ranges": ((-1, 1), (1, 3))}, INVALID, "ranges: expected 0 <= start <= end <= 3 on axis 0, got (-1, 1)"),
        ({"ranges": ((0, 3, 1), (1, 3))}, INVALID, "ranges: expected a (start, end) for each axis, got (0, 3, 1)"),
        ({"ranges": (0, 3)}, INVALID, "ranges: expected a (start, end) for each axis, got 0"),
        ({"ranges": ((0, 3), (1, 2.0))}, INVALID, "ranges: expected an integer, got 2.0"),
        ({"dtype": "float31"}, INVALID, "dtype: expected a dtype, got 'float31'"),
        ({"dtype": None}, INVALID, "dtype: expected a dtype, got None"),
        ({"dtype": "longdouble"}, UNSUPPORTED, f"dtype: no kernel for dtype {np.dtype('longdouble').name}"),
        ({"dtype": np.dtype(object)}, UNSUPPORTED, "dtype: no kernel for dtype object"),
        ({"dtype": ml_dtypes.float8_e4m3b11fnuz}, UNSUPPORTED, "dtype: no kernel for dtype float8_e4m3b11fnuz"),
        ({"overlap": "maybe"}, INVALID, "overlap: expected 'refuse' or 'stage', got 'maybe'"),
        ({"device": "tpu"}, INVALID, "device must be 'cpu', 'cuda' or 'cuda:N', got 'tpu'"),
        ({"device": "cpu:1"}, INVALID, "device must be 'cpu', 'cuda' or 'cuda:N', got 'cpu:1'"),
        ({"device": "cuda:-1"}, INVALID, "device must be 'cpu', 'cuda' or 'cuda:N', got 'cuda:-1'"),
    ],
)  # fmt: skip
def test_refused_problems(device: str, change: dict[str, Any], kind: type[bc.BaracudaError], message: str) -> None:
    with pytest.raises(bc.BaracudaError) as refused:
        bc.WriteSlicePlan(**{**PROBLEM, "device": device, **change})
    check_error(refused.value, kind, f"WriteSlicePlan: {message}")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dest_shape": (3,), "dtype": "int8"}, "WriteSlicePlan: missing 1 required keyword-only argument: 'ranges'"),
        ({**PROBLEM, "axis": 0}, "WriteSlicePlan: got an unexpected keyword argument 'axis'"),
    ],
)
def test_fields_are_those_of_the_descriptor(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError) as refused:
        bc.WriteSlicePlan(device="cpu", **fields)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_workspace": -1}, "max_workspace: expected a number of bytes, got -1"),
        ({"max_workspace": 2**63}, f"max_workspace: expected a number of bytes, got {2**63}"),
        ({"max_workspace": "1 MB"}, "max_workspace: expected an integer, got '1 MB'"),
        ({"deterministic": "no"}, "deterministic: expected True or False, got 'no'"),
        ({"backend": 1}, "backend: expected a name or None, got 1"),
    ],
)
def test_preferences_that_could_not_be_kept(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(bc.InvalidProblemError) as refused:
        bc.PlanPreference(**fields)
    check_error(refused.value, INVALID, f"PlanPreference: {message}")


def test_a_preference_is_a_preference() -> None:
    with pytest.raises(bc.InvalidProblemError) as refused:
        bc.WriteSlicePlan(**PROBLEM, device="cpu", preference="fastest")
    check_error(refused.value, INVALID, "WriteSlicePlan: preference: expected a PlanPreference, got str")


def test_select_takes_its_own_descriptor() -> None:
    with pytest.raises(bc.InvalidProblemError) as refused:
        bc.WriteSlicePlan.select((3, 4), device="cpu")
    check_error(refused.value, INVALID, "WriteSlicePlan: expected a WriteSliceDescriptor, got tuple")


def test_a_plan_that_was_not_created() -> None:
    plan = bc.WriteSlicePlan.__new__(bc.WriteSlicePlan)
    for call in (plan.run, plan.bind, plan.can_implement):
        with pytest.raises(bc.BaracudaError) as refused:
            call()
        check_error(refused.value, bc.BaracudaError, "WriteSlicePlan: the plan was not created")


def test_a_plan_is_immutable() -> None:
    plan = bc.WriteSlicePlan(**PROBLEM, device="cpu")
    with pytest.raises(bc.BaracudaError) as refused:
        plan._create("write_slice", plan.descriptor, "cpu", plan.preference)
    check_error(refused.value, bc.BaracudaError, "WriteSlicePlan: a plan is immutable")


def test_cuda_where_there_is_none() -> None:
    """One sentence that says what is missing; where there is a GPU, a device that isn't there."""
    if bc.cuda_device_count() == 0:
        reason = bc.cuda_unavailable_reason()
        assert reason
        assert "\n" not in reason
        for act, where in (
            (lambda: bc.WriteSlicePlan(**PROBLEM), "WriteSlicePlan"),
            (lambda: bc.empty((3,), "int8"), "device"),
            (lambda: bc.empty((3,), "int8", "cuda:0"), "allocate"),
        ):
            with pytest.raises(bc.CudaError) as refused:
                act()
            message = str(refused.value)
            check_error(refused.value, bc.CudaError, message)
            assert message.startswith(f"{where}: ")
            assert message.removeprefix(f"{where}: ").startswith(
                reason.removesuffix('; use device="cpu" on this machine')
            )
            assert 'device="cpu"' in message or "driver" in message
    else:
        assert bc.cuda_unavailable_reason() is None
        count = bc.cuda_device_count()
        with pytest.raises(bc.InvalidProblemError) as refused:
            bc.WriteSlicePlan(**PROBLEM, device="cuda:99")
        has = f"{count} GPU" if count == 1 else f"{count} GPUs"
        message = f"WriteSlicePlan: device cuda:99 is not there; this machine has {has}"
        check_error(refused.value, INVALID, message)


# ---------------------------------------------------------------------------------------------------
# Operands. Each row makes the operands of a plan that its keywords change, and may add what its sentence
# is filled in with.


@dataclass
class Scene:
    backend: support.Backend
    dtype: str
    #: Whatever has to be as it was afterwards.
    watched: list[support.Placed | support.Memory] = field(default_factory=list)
    words: dict[str, Any] = field(default_factory=dict)

    @property
    def pair(self) -> tuple[int, int]:
        return (support.CUDA, 0) if self.backend.is_cuda else (support.CPU, 0)

    def placed(self, shape: tuple[int, ...], dtype: str | None = None, **options: Any) -> Any:
        made = support.Placed(shape, dtype or self.dtype, self.backend.device, **options)
        self.watched.append(made)
        return made.tensor

    def bytes(self, count: int) -> bc.Tensor:
        memory = support.Memory(np.arange(count) % 251, self.backend.device)
        self.watched.append(memory)
        return memory.tensor

    @property
    def dest(self) -> Any:
        return self.placed((3, 4))

    @property
    def source(self) -> Any:
        return self.placed((3, 2))


@dataclass(frozen=True)
class Row:
    name: str
    kind: type[bc.BaracudaError]
    message: str
    operands: Callable[[Scene], dict[str, Any]]
    problem: dict[str, Any]
    sizes: tuple[int, int] | None


ROWS: list[Row] = []


def row(
    kind: type[bc.BaracudaError], message: str, sizes: tuple[int, int] | None = None, **problem: Any
) -> Callable[[Callable[[Scene], dict[str, Any]]], None]:
    def add(operands: Callable[[Scene], dict[str, Any]]) -> None:
        ROWS.append(Row(operands.__name__, kind, message, operands, problem, sizes))

    return add


@row(INVALID, "source: is missing")
def missing(scene: Scene) -> dict[str, Any]:
    return {"dest": scene.dest}


@row(INVALID, "dest: is missing")
def none_is_missing(scene: Scene) -> dict[str, Any]:
    return {"dest": None, "source": scene.source}


@row(INVALID, "src: is no operand; expected dest, source")
def no_operand(scene: Scene) -> dict[str, Any]:
    return {"dest": scene.dest, "source": scene.source, "src": scene.source}


@row(INVALID, "source: expected a tensor (DLPack, CUDA array interface or buffer), got builtins.int")
def no_tensor(scene: Scene) -> dict[str, Any]:
    return {"dest": scene.dest, "source": 5}


@row(INVALID, "dest: expected a tensor (DLPack, CUDA array interface or buffer), got builtins.list")
def no_tensor_either(scene: Scene) -> dict[str, Any]:
    return {"dest": [[1.0] * 4] * 3, "source": scene.source}


@row(INVALID, "source: expected device {device}, got {other}")
def other_device(scene: Scene) -> dict[str, Any]:
    other = (support.CPU, 0) if scene.backend.is_cuda else (support.CUDA, 0)
    scene.words["other"] = "cpu" if scene.backend.is_cuda else "cuda:0"
    return {"dest": scene.dest, "source": StridedView(4096, "float32", (3, 2), device=other)}


@row(INVALID, "dest: expected device {device}, got DLPack device type 8")
def foreign_device(scene: Scene) -> dict[str, Any]:
    metal = StridedView(4096, "float32", (3, 4), device=(support.METAL, 0))
    return {"dest": metal, "source": scene.source}


@row(INVALID, "source: expected dtype float32, got int32")
def other_dtype(scene: Scene) -> dict[str, Any]:
    return {"dest": scene.dest, "source": scene.placed((3, 2), "int32")}


@row(INVALID, "dest: expected dtype float32, got bfloat16")
def other_dtype_of_dest(scene: Scene) -> dict[str, Any]:
    return {"dest": scene.placed((3, 4), "bfloat16"), "source": scene.source}


@row(INVALID, "source: expected shape (3, 2), got (2, 3)")
def other_shape(scene: Scene) -> dict[str, Any]:
    return {"dest": scene.dest, "source": scene.placed((2, 3))}


@row(INVALID, "dest: expected shape (3, 4), got (12,)")
def other_rank(scene: Scene) -> dict[str, Any]:
    return {"dest": scene.placed((12,)), "source": scene.source}


@row(INVALID, "source: expected shape (3, 2), got ()")
def rank_zero(scene: Scene) -> dict[str, Any]:
    return {"dest": scene.dest, "source": scene.placed(())}


@row(UNSUPPORTED, "source: expected a rank of at most 8, got 9")
def rank_nine(scene: Scene) -> dict[str, Any]:
    return {"dest": scene.dest, "source": scene.placed((3, 2, 1, 1, 1, 1, 1, 1, 1))}


@row(UNSUPPORTED, "source: no kernel for float4_e2m1fn")
def case_F04_float4(scene: Scene) -> dict[str, Any]:
    return {"dest": scene.dest, "source": StridedView(scene.bytes(64), (17, 4, 1), (3, 2))}


@row(UNSUPPORTED, "source: no kernel for dtype code 2 of 32 bits, 4 lanes")
def lanes(scene: Scene) -> dict[str, Any]:
    return {"dest": scene.dest, "source": StridedView(scene.bytes(128), (2, 32, 4), (3, 2))}


@row(UNSUPPORTED, "dest: no kernel for dtype code 2 of 128 bits, 1 lanes")
def wide_float(scene: Scene) -> dict[str, Any]:
    return {"dest": StridedView(scene.bytes(192), (2, 128, 1), (3, 4)), "source": scene.source}


@row(UNSUPPORTED, "source: int4 padded to bytes; pack it two to a byte first", dtype="int4")
def case_F04_padded(scene: Scene) -> dict[str, Any]:
    return {
        "dest": scene.dest,
        "source": StridedView(scene.bytes(64), "int4", (3, 2), flags=support.PADDED),
    }


@row(INVALID, "dest: is read-only")
def read_only(scene: Scene) -> dict[str, Any]:
    view = StridedView(scene.bytes(64), "float32", (3, 4), flags=support.READ_ONLY)
    return {"dest": view, "source": scene.source}


@row(INVALID, "source: has elements but no memory")
def no_memory(scene: Scene) -> dict[str, Any]:
    return {"dest": scene.dest, "source": StridedView(0, "float32", (3, 2), device=scene.pair)}


@row(bc.MisalignedOperandError, "source: expected an address that is a multiple of 4, got {address:#x}")
def misaligned(scene: Scene) -> dict[str, Any]:
    memory = scene.bytes(64)
    scene.words["address"] = memory.data_ptr + 6
    return {"dest": scene.dest, "source": StridedView(memory, "float32", (3, 2), byte_offset=6)}


@row(
    bc.MisalignedOperandError,
    "dest: expected an address that is a multiple of 8, got {address:#x}",
    dtype="complex128",
)
def misaligned_complex(scene: Scene) -> dict[str, Any]:
    memory = scene.bytes(256)
    scene.words["address"] = memory.data_ptr + 12
    return {"dest": StridedView(memory, "complex128", (3, 4), shift=12), "source": scene.source}


@row(INVALID, "source: reaches beyond memory, strides (4611686018427387904, 1) for shape (3, 2)")
def beyond_memory(scene: Scene) -> dict[str, Any]:
    return {"dest": scene.dest, "source": StridedView(scene.bytes(64), "float32", (3, 2), (BIG, 1))}


@row(INVALID, "source: reaches beyond memory, strides (-4096, 1) for shape (3, 2)")
def below_memory(scene: Scene) -> dict[str, Any]:
    return {"dest": scene.dest, "source": StridedView(4096, "float32", (3, 2), (-4096, 1), device=scene.pair)}


@row(INVALID, "dest: elements share memory, strides (0, 1) for shape (3, 4)")
def zero_stride(scene: Scene) -> dict[str, Any]:
    return {"dest": StridedView(scene.bytes(64), "float32", (3, 4), (0, 1)), "source": scene.source}


@row(INVALID, "dest: elements share memory, strides (3, 1) for shape (3, 4)")
def rows_overlap(scene: Scene) -> dict[str, Any]:
    return {"dest": StridedView(scene.bytes(64), "float32", (3, 4), (3, 1)), "source": scene.source}


@row(INVALID, "dest: elements share memory, strides (3, -2) for shape (3, 4)", dtype="int4")
def rows_of_half_bytes_overlap(scene: Scene) -> dict[str, Any]:
    return {
        "dest": StridedView(scene.bytes(64), "int4", (3, 4), (3, -2), byte_offset=16),
        "source": scene.source,
    }


@row(INVALID, "dest: shares memory with source")
def overlap(scene: Scene) -> dict[str, Any]:
    memory = scene.bytes(64)
    # The last element of the source is the first of the window.
    return {
        "dest": StridedView(memory, "float32", (3, 4)),
        "source": StridedView(memory, "float32", (3, 2), (-1, -1), byte_offset=16),
    }


def puzzle(seed: int) -> tuple[int, ...]:
    """Steps whose sums meet, or don't, as it happens: finding out takes a search."""
    rng = random.Random(seed)
    return tuple(rng.randrange(2**24, 2**25) for _ in range(8))


@row(
    INVALID,
    "dest: can't tell whether elements share memory, strides ({strides}) for shape (9, 9, 9, 9, 9, 9, 9, 9)",
    dest_shape=(9,) * 8,
    ranges=((0, 9),) * 8,
    dtype="uint8",
)
def undecided_itself(scene: Scene) -> dict[str, Any]:
    scene.words["strides"] = ", ".join(map(str, puzzle(0)))
    dest = StridedView(2**40, "uint8", (9,) * 8, puzzle(0), device=scene.pair)
    return {"dest": dest, "source": StridedView(2**50, "uint8", (9,) * 8, device=scene.pair)}


@row(
    INVALID,
    "dest: can't tell whether it shares memory with source",
    dest_shape=(3,) * 8,
    ranges=((0, 3),) * 8,
    dtype="uint8",
)
def undecided(scene: Scene) -> dict[str, Any]:
    return {
        "dest": StridedView(2**40, "uint8", (3,) * 8, puzzle(1), device=scene.pair),
        "source": StridedView(2**40 + 2**20 - 1, "uint8", (3,) * 8, puzzle(2), device=scene.pair),
    }


@row(bc.BufferTooSmallError, "dest: expected at least 6 bytes for (3, 4) of int4, got 5", (6, 5), dtype="int4")
def too_few_bytes(scene: Scene) -> dict[str, Any]:
    return {"dest": scene.bytes(5), "source": scene.source}


@row(
    bc.BufferTooSmallError,
    "source: expected at least 3 bytes for (3, 2) of uint4, got 0",
    (3, 0),
    dtype="uint4",
)
def no_bytes(scene: Scene) -> dict[str, Any]:
    return {"dest": scene.dest, "source": scene.bytes(0)}


PACKED_FORMS = "expected bytes of packed int4, flat (6,) or with the last axis of (3, 4) halved, got"


@row(INVALID, f"dest: {PACKED_FORMS} (2, 3)", dtype="int4")
def other_form_of_bytes(scene: Scene) -> dict[str, Any]:
    return {"dest": StridedView(scene.bytes(6), "uint8", (2, 3)), "source": scene.source}


@row(INVALID, f"dest: {PACKED_FORMS} (3, 4)", dtype="int4")
def one_element_to_a_byte(scene: Scene) -> dict[str, Any]:
    return {"dest": StridedView(scene.bytes(12), "uint8", (3, 4)), "source": scene.source}


@row(
    INVALID,
    "dest: expected bytes of packed int4, flat (5,) or with the last axis of (3, 3) halved, got (3, 2)",
    dest_shape=(3, 3),
    dtype="int4",
)
def halved_rows_with_a_hole(scene: Scene) -> dict[str, Any]:
    return {"dest": StridedView(scene.bytes(6), "uint8", (3, 2)), "source": scene.source}


@row(INVALID, "dest: expected packed bytes without gaps, got strides (2,)", dtype="int4")
def bytes_with_gaps(scene: Scene) -> dict[str, Any]:
    return {"dest": StridedView(scene.bytes(12), "uint8", (6,), (2,)), "source": scene.source}


@row(INVALID, "dest: expected dtype int4, got int8", dtype="int4")
def signed_bytes_are_not_packed(scene: Scene) -> dict[str, Any]:
    return {"dest": StridedView(scene.bytes(6), "int8", (6,)), "source": scene.source}


class Broken:
    def __dlpack_device__(self) -> tuple[int, int]:
        return (support.CPU, 0)

    def __dlpack__(self, **_: object) -> object:
        raise BufferError("not today\nnor tomorrow")


@row(INVALID, f"source: {__name__}.Broken can't be exported: not today")
def broken_producer(scene: Scene) -> dict[str, Any]:
    return {"dest": scene.dest, "source": Broken()}


class NoCapsule(Broken):
    def __dlpack__(self, **_: object) -> object:
        return 5


@row(INVALID, "source: __dlpack__ gave no unused DLPack capsule")
def no_capsule(scene: Scene) -> dict[str, Any]:
    return {"dest": scene.dest, "source": NoCapsule()}


@row(UNSUPPORTED, "source: DLPack 2.0 is not supported, 1.x is")
def dlpack_2(scene: Scene) -> dict[str, Any]:
    return {
        "dest": scene.dest,
        "source": StridedView(scene.bytes(64), "float32", (3, 2), version=(2, 0)),
    }


def scene_for(entry: Row, device: str) -> tuple[Scene, bc.WriteSlicePlan]:
    problem = {**PROBLEM, **entry.problem}
    if "ranges" not in entry.problem and len(problem["dest_shape"]) == 2:
        problem["ranges"] = ((0, 3), (1, 3))
    plan = bc.WriteSlicePlan(**problem, device=device)
    return Scene(support.Backend(device), problem["dtype"]), plan


@pytest.mark.parametrize("entry", ROWS, ids=[entry.name for entry in ROWS])
@pytest.mark.parametrize("call", ["run", "bind", "can_implement"])
def test_refused_operands(device: str, entry: Row, call: str) -> None:
    scene, plan = scene_for(entry, device)
    operands = entry.operands(scene)
    with pytest.raises(bc.BaracudaError) as refused:
        getattr(plan, call)(**operands)
    message = "WriteSlicePlan: " + entry.message.format(device=scene.backend.full_name, **scene.words)
    check_error(refused.value, entry.kind, message)
    if entry.sizes:
        assert (refused.value.needed, refused.value.got) == entry.sizes
    for watched in scene.watched:
        watched.assert_untouched()


def test_rows_cover_every_sentence_of_the_checker() -> None:
    names = [entry.name for entry in ROWS]
    assert len(names) == len(set(names))
    assert {entry.kind for entry in ROWS} == set(BUILTIN) - {
        bc.CudaError,
        bc.WorkspaceTooSmallError,
        bc.BaracudaError,
    }


# ---------------------------------------------------------------------------------------------------
# Workspaces and streams.


def staged(backend: support.Backend) -> tuple[bc.WriteSlicePlan, support.Memory, dict[str, Any]]:
    memory = backend.memory(np.arange(64))
    plan = bc.WriteSlicePlan(**PROBLEM, overlap="stage", device=backend.device)
    assert plan.workspace_size == 256
    operands = {
        "dest": memory.view("float32", (3, 4), None),
        "source": memory.view("float32", (3, 2), None, 4),
    }
    return plan, memory, operands


def refused_workspace(
    backend: support.Backend, workspace: Any, kind: type[bc.BaracudaError], message: str
) -> bc.BaracudaError:
    plan, memory, operands = staged(backend)
    for run in (plan.run, lambda **rest: plan.bind(**operands).run(workspace=rest["workspace"])):
        with pytest.raises(bc.BaracudaError) as refused:
            run(**operands, workspace=workspace)
        check_error(refused.value, kind, f"WriteSlicePlan: workspace: {message}")
        memory.assert_untouched()
    return refused.value


@pytest.mark.parametrize("size", [255, 0])
def test_workspace_too_small(backend: support.Backend, size: int) -> None:
    error = refused_workspace(
        backend,
        bc.empty(size, "uint8", backend.device),
        bc.WorkspaceTooSmallError,
        f"expected at least 256 bytes, got {size}",
    )
    assert isinstance(error, bc.WorkspaceTooSmallError)
    assert (error.needed, error.got) == (256, size)


def test_workspace_misaligned(backend: support.Backend) -> None:
    memory = bc.empty(512, "uint8", backend.device)
    refused_workspace(
        backend,
        StridedView(memory, "uint8", (256,), byte_offset=8),
        bc.MisalignedOperandError,
        f"expected an address that is a multiple of 256, got {memory.data_ptr + 8:#x}",
    )


def test_workspace_elsewhere(backend: support.Backend) -> None:
    other = (support.CPU, 0) if backend.is_cuda else (support.CUDA, 0)
    workspace = StridedView(4096, "uint8", (256,), device=other)
    refused_workspace(backend, workspace, INVALID, f"expected device {backend.full_name}")


def test_workspace_read_only(backend: support.Backend) -> None:
    memory = bc.empty(256, "uint8", backend.device)
    workspace = StridedView(memory, "uint8", (256,), flags=support.READ_ONLY)
    refused_workspace(backend, workspace, INVALID, "is read-only")


def test_workspace_with_gaps(backend: support.Backend) -> None:
    memory = bc.empty(1024, "uint8", backend.device)
    workspace = StridedView(memory, "uint8", (512,), (2,))
    refused_workspace(backend, workspace, INVALID, "expected contiguous memory")


def test_workspace_that_is_no_tensor(backend: support.Backend) -> None:
    expected = "expected a tensor (DLPack, CUDA array interface or buffer), got builtins.int"
    refused_workspace(backend, 4096, INVALID, expected)


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (-1, "stream: expected a handle, got -1"),
        ("0", "stream: expected an int or an object with __cuda_stream__, got str"),
        (1.0, "stream: expected an int or an object with __cuda_stream__, got float"),
        (True, "stream: expected an int or an object with __cuda_stream__, got bool"),
    ],
)
def test_refused_streams(backend: support.Backend, stream: Any, message: str) -> None:
    plan, memory, operands = staged(backend)
    for run in (plan.run, lambda **rest: plan.bind(**operands).run(stream=rest["stream"])):
        with pytest.raises(bc.InvalidProblemError) as refused:
            run(**operands, stream=stream)
        check_error(refused.value, INVALID, message)
        memory.assert_untouched()


# ---------------------------------------------------------------------------------------------------
# What isn't a plan.


@pytest.mark.parametrize(
    ("act", "kind", "message"),
    [
        (lambda d: bc.empty((1,) * 9, "int8", d), UNSUPPORTED, "empty: expected a rank of at most 8, got 9"),
        (lambda d: bc.empty((2, -3), "int8", d), INVALID, "empty: extent -3 of axis 1 is negative"),
        (lambda d: bc.empty((BIG, 2), "int8", d), INVALID, f"empty: ({BIG}, 2) has more bytes than an int64 can count"),
        (lambda d: bc.empty((2, 1.5), "int8", d), INVALID, "empty: shape: expected an integer, got 1.5"),
        (lambda d: bc.empty(3, "int9", d), INVALID, "dtype: expected a dtype, got 'int9'"),
        (lambda d: bc.empty(3, "int8", "gpu"), INVALID, "empty: device must be 'cpu', 'cuda' or 'cuda:N', got 'gpu'"),
        (lambda d: bc.asarray(np.zeros((1,) * 9), d), UNSUPPORTED, "empty: expected a rank of at most 8, got 9"),
        (lambda d: bc.asarray(["a"], d), UNSUPPORTED, "dtype: no kernel for dtype str32"),
        (
            lambda d: bc.unpack_int4(np.zeros(1, np.uint8), (3,)),
            INVALID,
            "unpack_int4: 1 bytes hold fewer than 3 elements",
        ),
        (
            lambda d: bc.unpack_int4(np.zeros(1, np.uint8), (1,), "int8"),
            INVALID,
            "unpack_int4: expected int4 or uint4, got 'int8'",
        ),
        (lambda d: bc.synchronize("gpu"), INVALID, "synchronize: device must be 'cpu', 'cuda' or 'cuda:N', got 'gpu'"),
    ],
    ids=[
        "rank",
        "extent",
        "size",
        "no extent",
        "dtype",
        "device",
        "array rank",
        "array dtype",
        "too few",
        "unpack dtype",
        "synchronize",
    ],
)
def test_refused_tensors(device: str, act: Callable[[str], Any], kind: type[bc.BaracudaError], message: str) -> None:
    with pytest.raises(bc.BaracudaError) as refused:
        act(device)
    check_error(refused.value, kind, message)


def test_tensors_and_bound_plans_are_not_made_by_hand() -> None:
    for kind, message in (
        (bc.Tensor, "baracuda.empty and baracuda.asarray make tensors"),
        (bc.BoundPlan, "plan.bind makes bound plans"),
    ):
        with pytest.raises(TypeError) as refused:
            kind()
        assert str(refused.value) == message


def test_too_little_memory() -> None:
    with pytest.raises(MemoryError):
        bc.empty(2**58, "int8", "cpu")


def test_messages_are_of_the_thread_that_failed() -> None:
    """Two threads that fail at the same time each get their own sentence."""
    plan = bc.WriteSlicePlan(**PROBLEM, device="cpu")
    dest = np.zeros((3, 4), np.float32)
    start = threading.Barrier(2)
    seen: dict[int, set[str]] = {3: set(), 5: set()}

    def fail(extent: int) -> None:
        source = np.zeros((extent, extent), np.float32)
        start.wait()
        for _ in range(500):
            try:
                plan.run(dest=dest, source=source)
            except bc.InvalidProblemError as error:
                seen[extent].add(str(error))

    threads = [threading.Thread(target=fail, args=(extent,)) for extent in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for extent, messages in seen.items():
        assert messages == {f"WriteSlicePlan: source: expected shape (3, 2), got ({extent}, {extent})"}


def test_an_error_can_be_made_by_hand() -> None:
    for kind in BUILTIN:
        error = kind("text", 5, 3) if kind in (bc.BufferTooSmallError, bc.WorkspaceTooSmallError) else kind("text")
        check_error(error, kind, "text")


def test_sizes_do_not_wrap() -> None:
    """Sizes are 64 bits wide on the way out of the library."""
    assert ctypes.sizeof(ctypes.c_size_t) == 8
    shape = (2**40, 2**18)
    plan = bc.WriteSlicePlan(dest_shape=shape, ranges=((0, 1), (0, 2)), dtype="int4", device="cpu")
    with pytest.raises(bc.BufferTooSmallError) as refused:
        plan.can_implement(dest=np.zeros(3, np.uint8), source=np.zeros(1, np.uint8))
    assert (refused.value.needed, refused.value.got) == (2**57, 3)
