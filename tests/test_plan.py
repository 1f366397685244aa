# SPDX-License-Identifier: Apache-2.0
"""What every plan has in common: its face, its values, binding, pickling, threads, the cache."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import problems
import pytest
import support
from problems import PROBLEMS, Problem
from support import StridedView

import baracuda as bc
from baracuda import _core

FIELDS: dict[str, Any] = {"dest_shape": (3, 4), "ranges": ((0, 3), (1, 3)), "dtype": "float32"}

each_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=[problem.id for problem in PROBLEMS])


def plan_for(device: str, **change: Any) -> bc.WriteSlicePlan:
    return bc.WriteSlicePlan(**{**FIELDS, **change}, device=device)


# ---------------------------------------------------------------------------------------------------
# Every operator of the C library is a plan in Python, and a row in the tests.

# Plans that are derived from another one only name some of its problems.
PLANS = {
    value.Descriptor.operator: value
    for value in vars(bc).values()
    if isinstance(value, type) and bc.Plan in value.__bases__
}


@pytest.mark.parametrize("operator", _core.operator_names())
def test_operators_and_plans_are_the_same(operator: str) -> None:
    plan_name, category, fields = _core.operator_info(operator)
    plan = PLANS[operator]
    assert plan.__name__ == plan_name
    assert plan.__module__ == f"baracuda.{category}"
    descriptor = plan.Descriptor
    assert descriptor.__name__ == plan_name.removesuffix("Plan") + "Descriptor"
    assert getattr(bc, descriptor.__name__) is descriptor
    assert tuple(own.name for own in dataclasses.fields(descriptor)) == fields
    assert all(own.kw_only for own in dataclasses.fields(descriptor))
    assert any(problem.plan is plan for problem in PROBLEMS), "no row in problems.py"


# ---------------------------------------------------------------------------------------------------
# What a plan answers.


def test_operands(device: str) -> None:
    assert plan_for(device).operands == (
        bc.Operand(name="dest", role="inout", dtype="float32", shape=(3, 4), optional=False, in_place_with="source"),
        bc.Operand(name="source", role="in", dtype="float32", shape=(3, 2), optional=False, in_place_with=None),
    )


def test_sku_and_guarantee(device: str) -> None:
    plan = plan_for(device)
    exact = bc.PrecisionGuarantee(
        math_precision="exact", accumulator="none", bit_stable_on_same_hardware=True, deterministic=True
    )
    assert plan.precision_guarantee == exact
    assert plan.sku == bc.KernelSku(
        category="layout",
        op="write_slice",
        dtype="float32",
        aux_dtype=None,
        layout=None,
        epilogue=None,
        arch=plan.sku.arch,
        backend="cpu" if device == "cpu" else "bespoke",
        precision_guarantee=exact,
    )
    assert plan.sku.arch == "cpu" if device == "cpu" else plan.sku.arch.startswith("sm_")
    # A key of dictionaries: equal for equal kernels.
    skus = {plan_for(device).sku: 1, plan_for(device, overlap="stage").sku: 2, plan_for(device, dtype="int8").sku: 3}
    assert len(skus) == 2
    assert skus[plan.sku] == 2


@pytest.mark.parametrize(
    ("dtype", "shape", "ranges", "count"),
    [
        ("float32", (3, 4), ((0, 3), (1, 3)), 2 * 6 * 4),
        ("complex128", (3, 4), ((0, 3), (1, 3)), 2 * 6 * 16),
        ("int4", (3, 5), ((0, 3), (1, 4)), 2 * 5),
        ("bool", (3,), ((1, 1),), 0),
        ("uint8", (2**20, 2**20, 2**20), ((0, 2**20),) * 3, 2 * 2**60),
    ],
)
def test_cost(device: str, dtype: str, shape: Any, ranges: Any, count: int) -> None:
    plan = plan_for(device, dtype=dtype, dest_shape=shape, ranges=ranges)
    assert plan.cost == bc.PlanCost(bytes=count, operations=0)


@pytest.mark.parametrize(
    ("dtype", "extent", "size"),
    [("float32", 6, 256), ("uint8", 256, 256), ("uint8", 257, 512), ("int4", 513, 512), ("int8", 0, 0)],
)
def test_workspace_size(device: str, dtype: str, extent: int, size: int) -> None:
    change = {"dest_shape": (1000,), "ranges": ((1, 1 + extent),), "dtype": dtype}
    assert plan_for(device, **change).workspace_size == 0
    assert plan_for(device, **change, overlap="stage").workspace_size == size


def test_names_and_devices(backend: support.Backend) -> None:
    plan = plan_for(backend.device)
    assert plan.name == "WriteSlicePlan"
    assert plan.path == "rows"
    assert plan.device == backend.full_name
    assert plan_for(backend.full_name).device == backend.full_name
    assert plan.preference == bc.PlanPreference()
    assert plan.descriptor == bc.WriteSliceDescriptor(**FIELDS)


@pytest.mark.requires("torch")
def test_devices_may_be_of_torch() -> None:
    assert plan_for(support.torch().device("cpu")).device == "cpu"


@pytest.mark.parametrize(
    "name", ["operands", "sku", "cost", "path", "name", "workspace_size", "device", "precision_guarantee"]
)
def test_a_plan_can_not_be_changed(name: str) -> None:
    plan = plan_for("cpu")
    with pytest.raises(AttributeError):
        setattr(plan, name, None)


@pytest.mark.parametrize("kind", ["descriptor", "preference", "sku", "precision_guarantee", "operands", "cost"])
def test_values_are_frozen_and_hashable(kind: str) -> None:
    value = getattr(plan_for("cpu"), kind)
    value = value[0] if kind == "operands" else value
    first = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, first, None)
    assert hash(value) == hash(copy.deepcopy(value))
    assert value == pickle.loads(pickle.dumps(value)) == copy.copy(value)


def test_a_plan_says_how_to_make_it(device: str) -> None:
    plan = plan_for(device, overlap="stage")
    again = eval(repr(plan), vars(bc))
    assert repr(again) == repr(plan)
    assert again.descriptor == plan.descriptor
    assert again.device == plan.device


def test_run_takes_keywords_only() -> None:
    dest, source = np.zeros((3, 4), np.float32), np.ones((3, 2), np.float32)
    plan = plan_for("cpu")
    for call in (plan.run, plan.bind, plan.can_implement):
        with pytest.raises(TypeError):
            call(dest, source)
    assert not dest.any()


# ---------------------------------------------------------------------------------------------------
# Descriptors: one normal form.


@pytest.mark.parametrize(
    "fields",
    [
        {"dest_shape": [3, 4], "ranges": [[0, 3], [1, 3]], "dtype": "float32"},
        {"dest_shape": np.array([3, 4]), "ranges": np.array([[0, 3], [1, 3]]), "dtype": np.float32},
        {"dest_shape": (np.int8(3), np.uint64(4)), "ranges": (range(0, 6, 3), (True, 3)), "dtype": np.dtype("f4")},
        {"dest_shape": iter((3, 4)), "ranges": iter([(0, 3), (1, 3)]), "dtype": "f4"},
        {"dest_shape": np.zeros((3, 4)).shape, "ranges": {(0, 3): 1, (1, 3): 2}, "dtype": np.dtype(">f4")},
        {**FIELDS, "overlap": "refuse"},
    ],
)
def test_equal_problems_are_equal_descriptors(fields: dict[str, Any]) -> None:
    one, two = bc.WriteSliceDescriptor(**FIELDS), bc.WriteSliceDescriptor(**fields)
    assert one == two
    assert hash(one) == hash(two)
    assert repr(one) == repr(two)
    assert two.dest_shape == (3, 4)
    assert two.ranges == ((0, 3), (1, 3))
    for extent in (*two.dest_shape, *(place for pair in two.ranges for place in pair)):
        assert type(extent) is int
    assert type(two.dtype) is str
    assert two.overlap == "refuse"


def test_different_problems_are_different_descriptors() -> None:
    descriptors = {
        bc.WriteSliceDescriptor(**{**FIELDS, **change})
        for change in (
            {},
            {"dest_shape": (3, 5)},
            {"ranges": ((0, 3), (1, 4))},
            {"dtype": "int32"},
            {"overlap": "stage"},
        )
    }
    assert len(descriptors) == 5


@pytest.mark.parametrize("dtype", support.DTYPES)
def test_dtypes_by_name_and_type(dtype: str) -> None:
    kind = support.DTYPES[dtype].numpy
    for spelling in (dtype, kind, kind.type, getattr(ml_dtypes, dtype, kind)):
        assert bc.WriteSliceDescriptor(**{**FIELDS, "dtype": spelling}).dtype == dtype


@pytest.mark.requires("torch")
@pytest.mark.parametrize("dtype", [name for name in support.DTYPES if name not in ("int4", "uint4")])
def test_dtypes_of_torch(dtype: str) -> None:
    spelling = getattr(support.torch(), dtype)
    assert bc.WriteSliceDescriptor(**{**FIELDS, "dtype": spelling}).dtype == dtype


@pytest.mark.requires("jax")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int4", "float8_e5m2"])
def test_dtypes_of_jax(dtype: str) -> None:
    spelling = getattr(support.jax().numpy, dtype)
    assert bc.WriteSliceDescriptor(**{**FIELDS, "dtype": spelling}).dtype == dtype


# ---------------------------------------------------------------------------------------------------
# Every plan, whatever it computes.


@each_problem
def test_guards_poison_and_alignment(device: str, problem: Problem) -> None:
    """Outputs are overwritten fully, whatever they held; nothing else is; bits don't follow the address."""
    plan = problem.select(device)
    seen = []
    for poison, misalign in ((0xA5, 0), (0x00, 0), (0xFF, 1), (0x5A, 3)):
        operands = problem.operands(plan, poison=poison, misalign=misalign)
        plan.run(**problems.given(operands))
        seen.append(problems.results(plan, operands))
    assert all(one == seen[0] for one in seen)


@each_problem
def test_can_implement_writes_nothing(device: str, problem: Problem) -> None:
    plan = problem.select(device)
    operands = problem.operands(plan)
    assert plan.can_implement(**problems.given(operands)) is None
    plan.bind(**problems.given(operands))
    for operand in operands.values():
        operand.assert_untouched()


@each_problem
def test_bound_plans_run_alike(device: str, problem: Problem) -> None:
    plan = problem.select(device)
    expected = problem.operands(plan)
    plan.run(**problems.given(expected))
    bits = problems.results(plan, expected)
    for workspace in (None, problems.poisoned_workspace(plan)):
        operands = problem.operands(plan)
        bound = plan.bind(**problems.given(operands))
        assert bound.plan is plan
        bound.run(workspace=workspace)
        assert problems.results(plan, operands) == bits
    # The plan lives as long as what is bound to it.
    alive = weakref.ref(plan)
    del plan
    gc.collect()
    assert alive() is not None
    bound.run()


@each_problem
def test_workspaces_of_the_callers(device: str, problem: Problem) -> None:
    """Of the exact size and full of poison, or larger; and of memory that the library takes itself."""
    plan = problem.select(device)
    expected = problem.operands(plan)
    plan.run(**problems.given(expected))
    larger = bc.empty(plan.workspace_size + 1000, "uint8", plan.device)
    words = bc.empty(plan.workspace_size // 8, "float64", plan.device)
    for workspace in (problems.poisoned_workspace(plan), larger, words):
        operands = problem.operands(plan)
        plan.run(**problems.given(operands), workspace=workspace)
        assert problems.results(plan, operands) == problems.results(plan, expected)


@each_problem
def test_a_pickled_plan_computes_the_same(device: str, problem: Problem) -> None:
    preference = bc.PlanPreference(max_workspace=2**40)
    plan = problem.select(device, preference=preference)
    expected = problem.operands(plan)
    plan.run(**problems.given(expected))
    selected = problem.plan.select(plan.descriptor, device=device, preference=preference)
    for again in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan), selected):
        assert type(again) is type(plan)
        for name in ("descriptor", "device", "preference", "operands", "sku", "cost", "workspace_size", "path"):
            assert getattr(again, name) == getattr(plan, name)
        operands = problem.operands(again)
        again.run(**problems.given(operands))
        assert problems.results(again, operands) == problems.results(plan, expected)


@each_problem
def test_threads_run_one_plan_at_once(device: str, problem: Problem) -> None:
    plan = problem.select(device)
    count, rounds = 8, 6
    expected = []
    for seed in range(count):
        operands = problem.operands(plan, seed)
        plan.run(**problems.given(operands))
        expected.append(problems.results(plan, operands))
    assert any(one != expected[0] for one in expected)

    def work(seed: int) -> list[dict[str, bytes]]:
        seen = []
        for place in range(rounds):
            operands = problem.operands(plan, seed)
            if place % 2:
                plan.bind(**problems.given(operands)).run()
            else:
                plan.run(**problems.given(operands))
            seen.append(problems.results(plan, operands))
        return seen

    with ThreadPoolExecutor(count) as pool:
        for seed, seen in enumerate(pool.map(work, range(count))):
            assert seen == [expected[seed]] * rounds


@each_problem
def test_runs_give_the_same_bits(device: str, problem: Problem) -> None:
    plan = problem.select(device)
    if not plan.precision_guarantee.bit_stable_on_same_hardware:
        pytest.fail("a row for a plan that is not stable by default")
    seen = set()
    for _ in range(10):
        operands = problem.operands(plan)
        plan.run(**problems.given(operands))
        seen.add(tuple(sorted(problems.results(plan, operands).items())))
    assert len(seen) == 1


# ---------------------------------------------------------------------------------------------------
# Bound plans.


def test_a_bound_plan_reads_what_the_memory_holds_now(backend: support.Backend) -> None:
    plan = bc.WriteSlicePlan(dest_shape=(4,), ranges=((1, 3),), dtype="int32", device=backend.device)
    dest = backend.array(np.zeros(4, np.int32))
    source = backend.array(np.zeros(2, np.int32))
    bound = plan.bind(dest=dest, source=source)
    for value in (1, 2, 3):
        bc.write_slice(source, backend.array(np.full(2, value, np.int32)), ...)
        bound.run()
        assert backend.read(dest).tolist() == [0, value, value, 0]


def test_a_bound_plan_keeps_its_operands(backend: support.Backend) -> None:
    plan = bc.WriteSlicePlan(dest_shape=(4,), ranges=((1, 3),), dtype="int32", device=backend.device)
    dest = backend.array(np.zeros(4, np.int32))
    source = backend.array(np.ones(2, np.int32))
    alive = weakref.ref(source)
    bound = plan.bind(dest=dest, source=source)
    del source
    gc.collect()
    assert alive() is not None
    bound.run()
    assert backend.read(dest).tolist() == [0, 1, 1, 0]
    del bound
    gc.collect()
    assert alive() is None


def test_a_bound_plan_of_an_empty_problem(backend: support.Backend) -> None:
    plan = bc.WriteSlicePlan(dest_shape=(4,), ranges=((2, 2),), dtype="int32", device=backend.device)
    dest = backend.memory(np.arange(16))
    bound = plan.bind(dest=dest.view("int32", (4,), None), source=backend.array(np.zeros(0, np.int32)))
    bound.run()
    dest.assert_untouched()


def test_a_bound_plan_in_place(backend: support.Backend) -> None:
    plan = bc.WriteSlicePlan(dest_shape=(4,), ranges=((1, 3),), dtype="int32", device=backend.device)
    dest = backend.memory(np.arange(16))
    bound = plan.bind(dest=dest.view("int32", (4,), None), source=dest.view("int32", (2,), None, 4))
    bound.run()
    dest.assert_untouched()


def test_a_bound_plan_is_checked_when_it_is_bound(backend: support.Backend) -> None:
    plan = plan_for(backend.device)
    with pytest.raises(bc.InvalidProblemError, match=r"^WriteSlicePlan: source: is missing$"):
        plan.bind(dest=backend.array(np.zeros((3, 4), np.float32)))


# ---------------------------------------------------------------------------------------------------
# Threads on the CPU, with enough work that the library starts threads of its own.


def test_threads_within_threads() -> None:
    shape = (2000, 1003)
    plan = bc.WriteSlicePlan(dest_shape=shape, ranges=((0, 2000), (1, 1002)), dtype="int16", device="cpu")
    rng = np.random.default_rng(1)
    source = rng.integers(0, 2**15, (2000, 1001), np.int16)
    expected = np.zeros(shape, np.int16)
    expected[:, 1:1002] = source

    def work(_: int) -> bool:
        dest = np.zeros(shape, np.int16)
        plan.run(dest=dest, source=source)
        return np.array_equal(dest, expected)

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(24)))


def test_threads_write_parts_of_one_tensor() -> None:
    """Disjoint windows of one destination, at bytes next to each other."""
    dest = np.zeros((8, 4096), np.uint8)
    plans = [
        bc.WriteSlicePlan(dest_shape=dest.shape, ranges=((0, 8), (start, start + 511)), dtype="uint8", device="cpu")
        for start in range(0, 511 * 8, 511)
    ]
    sources = [np.full((8, 511), value + 1, np.uint8) for value in range(len(plans))]

    def work(place: int) -> None:
        for _ in range(20):
            plans[place].run(dest=dest, source=sources[place])

    with ThreadPoolExecutor(len(plans)) as pool:
        list(pool.map(work, range(len(plans))))
    assert dest[:, : 511 * 8].tolist() == np.repeat(np.arange(1, 9), 511)[None].repeat(8, 0).tolist()
    assert not dest[:, 511 * 8 :].any()


# ---------------------------------------------------------------------------------------------------
# The cache of the function forms.


def test_function_forms_share_plans(backend: support.Backend) -> None:
    bc.plan_cache_clear()
    dest, source = backend.array(np.zeros(4, np.int8)), backend.array(np.ones(2, np.int8))
    for _ in range(5):
        bc.write_slice(dest, source, np.s_[1:3])
    info = bc.plan_cache_info()
    assert (info.hits, info.misses, info.currsize) == (4, 1, 1)
    # Another window, another preference, another way of overlapping: other plans.
    bc.write_slice(dest, source, np.s_[0:2])
    bc.write_slice(dest, source, np.s_[0:2], preference=bc.PlanPreference(max_workspace=0))
    bc.write_slice(dest, source, np.s_[0:2], overlap="stage")
    assert bc.plan_cache_info().currsize == 4
    with pytest.raises(bc.UnsupportedError):
        bc.write_slice(dest, source, np.s_[0:2], overlap="stage", preference=bc.PlanPreference(max_workspace=0))
    # Refusals aren't kept.
    assert bc.plan_cache_info().currsize == 4
    bc.plan_cache_clear()
    assert bc.plan_cache_info().currsize == 0


def test_the_look_up_tells_arguments_apart() -> None:
    asked = []

    def general(*args: Any, **fields: Any) -> tuple[Any, ...]:
        asked.append((args, fields))
        return (*args, *fields.items())

    cache = bc._core.PlanCache(general)
    plain = {"a": 0, "b": 1000, "c": 0.5, "d": "name", "e": (1, 2)}
    others: list[dict[str, Any]] = [
        plain | {"a": False},
        plain | {"a": 0.0},
        plain | {"a": -0.0},
        plain | {"a": None},
        plain | {"a": 1 << 70},
        plain | {"b": 1001},
        plain | {"c": -0.5},
        plain | {"e": (1, 3)},
        {"b": 0, "a": 1000, "c": 0.5, "d": "name", "e": (1, 2)},
        {},
    ]
    for number, fields in enumerate([plain, *others]):
        for _ in range(3):
            found = cache.find(int, "cpu", **fields)
            assert [*map(repr, found)] == [*map(repr, (int, "cpu", *fields.items()))]
        # The other two found it.
        assert (len(asked), cache.hits) == (number + 1, 2 * (number + 1)), fields
    cache.find(int, "cpu", **plain)
    # A number need not be the same object.
    before = len(asked), cache.hits
    cache.find(int, "cpu", **plain | {"b": int("1000"), "c": float("0.5")})
    assert (len(asked), cache.hits) == (before[0], before[1] + 1)
    # Another positional argument, and more of them than the look-up keeps.
    assert cache.find(str, "cpu") == (str, "cpu")
    assert cache.find(*range(50)) == cache.find(*range(50)) == tuple(range(50))
    asked.clear()
    cache.clear()
    assert cache.hits == 0
    cache.find(int, "cpu", **plain)
    assert len(asked) == 1


def test_what_the_look_up_refuses_it_asks_for_again() -> None:
    def general(answer: object) -> object:
        if isinstance(answer, str):
            raise KeyError(answer)
        return answer

    cache = bc._core.PlanCache(general)
    for _ in range(3):
        with pytest.raises(KeyError):
            cache.find("no")
    assert cache.hits == 0


def test_the_cache_is_bounded() -> None:
    bc.plan_cache_clear()
    dest, source = np.zeros(3000, np.int8), np.ones(1, np.int8)
    for start in range(3000):
        bc.write_slice(dest, source, (start, start + 1))
    assert dest.all()
    info = bc.plan_cache_info()
    assert info.currsize == info.maxsize <= 1024
    bc.plan_cache_clear()


def test_workspace_may_be_any_contiguous_memory() -> None:
    plan = plan_for("cpu", overlap="stage")
    raw = np.zeros(512 + 256, np.uint8)
    start = -raw.ctypes.data % 256
    memory = bc.empty(256, "uint8", "cpu")
    makers = [
        raw[start : start + 256],
        raw[start : start + 256].view(np.complex128),
        raw[start : start + 512].reshape(2, 16, 16),
        memory,
        memory.numpy(),
        memoryview(memory.numpy()),
        StridedView(memory, "int4", (512,)),
        StridedView(memory, "float32", (64,), None),
    ]
    for workspace in makers:
        shared = bc.asarray(np.arange(12, dtype=np.float32).reshape(3, 4), "cpu")
        plan.run(dest=shared, source=StridedView(shared, "float32", (3, 2)), workspace=workspace)
        assert shared.numpy().tolist() == [[0, 0, 1, 3], [4, 2, 3, 7], [8, 4, 5, 11]]
