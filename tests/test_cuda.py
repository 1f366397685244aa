# SPDX-License-Identifier: Apache-2.0
"""What there is only on a GPU: streams and their order, graphs, devices, load."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import driver
import numpy as np
import problems
import pytest
import support
from problems import PROBLEMS, Problem
from support import StridedView

import baracuda as bc

pytestmark = pytest.mark.requires("gpu")

each_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=[problem.id for problem in PROBLEMS])

COUNT = 1 << 20
CUDA = (support.CUDA, 0)


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """Loads the kernel and takes the memory that the tests count on not to have to wait for."""
    copy_plan().run(dest=tensor(0), source=tensor(1))
    driver.prepare()


@pytest.fixture
def stream() -> Iterator[driver.Stream]:
    made = driver.Stream()
    yield made
    made.close()


@pytest.fixture
def other() -> Iterator[driver.Stream]:
    made = driver.Stream()
    yield made
    made.close()


def copy_plan(**options: Any) -> bc.WriteSlicePlan:
    return bc.WriteSlicePlan(dest_shape=(COUNT,), ranges=((0, COUNT),), dtype="uint8", device="cuda", **options)


def tensor(value: int) -> bc.Tensor:
    """Its bytes are there when this returns."""
    return bc.asarray(np.full(COUNT, value, np.uint8), "cuda")


def raw(memory: bc.Tensor) -> StridedView:
    """The memory alone: nothing is known of streams."""
    return StridedView(memory.data_ptr, "uint8", memory.shape, device=CUDA)


def assert_all(memory: Any, value: int) -> None:
    array = support.Backend("cuda").read(memory)
    assert array.size == COUNT
    assert (array == value).all()


# ---------------------------------------------------------------------------------------------------
# The stream that is named. The source gets its value late, on that stream: a copy on any other would be
# too early.


class Attribute:
    """The stream protocol as some have it, without a call."""

    def __init__(self, handle: int) -> None:
        self.__cuda_stream__ = (0, handle)


class Named:
    def __init__(self, name: str, handle: int) -> None:
        setattr(self, name, handle)


FORMS: dict[str, Callable[[driver.Stream], Any]] = {
    "int": lambda stream: stream.handle,
    "protocol": lambda stream: stream,
    "attribute": lambda stream: Attribute(stream.handle),
    "torch's name": lambda stream: Named("cuda_stream", stream.handle),
    "CuPy's name": lambda stream: Named("ptr", stream.handle),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("bound", [False, True], ids=["run", "bound"])
def test_the_named_stream(stream: driver.Stream, form: Callable[[driver.Stream], Any], bound: bool) -> None:
    dest, source = tensor(0), tensor(1)
    plan = copy_plan()
    ready = plan.bind(dest=raw(dest), source=raw(source)) if bound else None
    stream.occupy()
    stream.fill(source.data_ptr, 7, COUNT)
    if ready:
        ready.run(form(stream))
    else:
        plan.run(dest=raw(dest), source=raw(source), stream=form(stream))
    assert stream.busy, "it waited, or the machine is too fast for this test"
    stream.synchronize()
    assert_all(dest, 7)


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_default_streams(handle: int) -> None:
    """The legacy default stream by both of its handles, and the thread's own."""
    dest, source = tensor(0), tensor(1)
    copy_plan().run(dest=dest, source=source, stream=handle)
    assert dest.stream == (0 if handle == 1 else handle)
    assert_all(dest, 1)


@pytest.mark.requires("torch.cuda")
def test_streams_of_torch() -> None:
    torch = support.torch()
    plan = copy_plan()
    side = torch.cuda.Stream()
    dest = torch.zeros(COUNT, dtype=torch.uint8, device="cuda")
    source = torch.zeros_like(dest)
    torch.cuda.synchronize()
    for current in (False, True):
        dest.zero_()
        source.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            source.fill_(7)
            if current:
                plan.run(dest=dest, source=source)
        if not current:
            plan.run(dest=dest, source=source, stream=side)
        assert not side.query()
        side.synchronize()
        assert dest.eq(7).all()


@pytest.mark.requires("torch.cuda")
def test_a_bound_plan_asks_for_the_current_stream_at_each_run() -> None:
    torch = support.torch()
    dest = torch.zeros(COUNT, dtype=torch.uint8, device="cuda")
    source = torch.zeros_like(dest)
    bound = copy_plan().bind(dest=dest, source=source)
    torch.cuda.synchronize()
    for value in (3, 4):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            source.fill_(value)
            bound.run()
        assert not side.query()
        side.synchronize()
        assert dest.eq(value).all()


@pytest.mark.requires("cupy")
def test_streams_of_cupy() -> None:
    cupy = support.cupy()
    plan = copy_plan()
    for current in (False, True):
        dest, source = cupy.zeros(COUNT, "uint8"), cupy.zeros(COUNT, "uint8")
        scratch = cupy.zeros(1 << 28, "uint8")
        cupy.cuda.Device().synchronize()
        side = cupy.cuda.Stream(non_blocking=True)
        with side:
            for _ in range(300):
                scratch.fill(1)
            source.fill(7)
            if current:
                plan.run(dest=dest, source=source)
        if not current:
            plan.run(dest=dest, source=source, stream=side)
        side.synchronize()
        assert (dest == 7).all()


@pytest.mark.requires("cuda.core")
def test_streams_of_cuda_core(stream: driver.Stream) -> None:
    from cuda.core import Device, Stream  # noqa: PLC0415

    Device(0).set_current()
    dest, source = tensor(0), tensor(1)
    stream.occupy()
    stream.fill(source.data_ptr, 7, COUNT)
    copy_plan().run(dest=raw(dest), source=raw(source), stream=Stream.from_handle(stream.handle))
    assert stream.busy
    stream.synchronize()
    assert_all(dest, 7)


# ---------------------------------------------------------------------------------------------------
# Order between producers.


def late(stream: driver.Stream, value: int) -> bc.Tensor:
    """A tensor that gets its value on `stream`, some time from now."""
    made, source = tensor(0), tensor(value)
    stream.occupy()
    copy_plan().run(dest=made, source=source, stream=stream)
    assert stream.busy
    assert made.stream == stream.handle
    return made


def test_own_tensors_are_waited_for(stream: driver.Stream, other: driver.Stream) -> None:
    source = late(stream, 7)
    dest = tensor(0)
    copy_plan().run(dest=dest, source=source, stream=other)
    # Not by the host.
    assert stream.busy
    assert other.busy
    assert_all(dest, 7)
    assert not stream.busy


def test_an_own_output_is_waited_for(stream: driver.Stream, other: driver.Stream) -> None:
    dest = late(stream, 7)
    copy_plan().run(dest=dest, source=tensor(8), stream=other)
    assert_all(dest, 8)
    stream.synchronize()
    assert_all(dest, 8)


def test_reading_waits(stream: driver.Stream) -> None:
    assert_all(late(stream, 7), 7)


def test_bound_plans_name_the_stream_of_their_own_output(stream: driver.Stream) -> None:
    """With none named it is the one that used the output last."""
    dest = late(stream, 7)
    source = late(stream, 9)
    bound = copy_plan().bind(dest=dest, source=source)
    bound.run()
    assert_all(dest, 9)


@pytest.mark.requires("torch.cuda")
def test_torch_waits_for_own_tensors(stream: driver.Stream) -> None:
    torch = support.torch()
    seen = torch.from_dlpack(late(stream, 7))
    assert seen.eq(7).all()
    # As an input next to a tensor of torch.
    dest = torch.zeros(COUNT, dtype=torch.uint8, device="cuda")
    copy_plan().run(dest=dest, source=late(stream, 8))
    assert dest.eq(8).all()


@pytest.mark.requires("torch.cuda")
def test_own_outputs_wait_for_torch() -> None:
    """The stream is the output's; what torch does on its current stream comes first."""
    torch = support.torch()
    dest = tensor(0)
    source = torch.zeros(COUNT, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        source.fill_(7)
        copy_plan().run(dest=dest, source=source)
        assert not side.query()
    assert_all(dest, 7)


@pytest.mark.requires("torch.cuda", "cupy")
def test_frameworks_wait_for_each_other() -> None:
    torch, cupy = support.torch(), support.cupy()
    plan = copy_plan()
    source = torch.zeros(COUNT, dtype=torch.uint8, device="cuda")
    dest = cupy.zeros(COUNT, "uint8")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), cupy.cuda.Stream(non_blocking=True) as theirs:
        torch.cuda._sleep(50_000_000)
        source.fill_(7)
        plan.run(dest=dest, source=source)
        theirs.synchronize()
        assert (dest == 7).all()
    late_cupy = cupy.zeros(COUNT, "uint8")
    scratch = cupy.zeros(1 << 28, "uint8")
    back = torch.zeros_like(source)
    torch.cuda.synchronize()
    with cupy.cuda.Stream(non_blocking=True), torch.cuda.stream(side):
        for _ in range(300):
            scratch.fill(1)
        late_cupy.fill(9)
        plan.run(dest=back, source=late_cupy)
        side.synchronize()
        assert back.eq(9).all()


@pytest.mark.requires("jax.cuda")
def test_jax_as_input() -> None:
    jax = support.jax()
    values = jax.jit(lambda x: (x @ x).sum(1).astype("uint8") * 0 + 7)
    source = values(jax.numpy.ones((COUNT // 1024, COUNT // 1024), "float32"))
    dest = tensor(0)
    plan = bc.WriteSlicePlan(dest_shape=(COUNT,), ranges=((0, source.size),), dtype="uint8", device="cuda")
    plan.run(dest=dest, source=source)
    assert dest.numpy()[: source.size].tolist() == [7] * source.size
    with pytest.raises(bc.InvalidProblemError, match="is written, but JAX arrays are immutable"):
        plan.run(dest=jax.numpy.zeros(COUNT, "uint8"), source=source)


class Interface:
    """The CUDA array interface and nothing else."""

    def __init__(self, memory: bc.Tensor, **more: Any) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (COUNT,),
            "typestr": "|u1",
            "data": (memory.data_ptr, False),
            **more,
        }


def test_cuda_array_interface(stream: driver.Stream) -> None:
    dest, source = tensor(0), tensor(1)
    plan = copy_plan()
    plan.run(dest=Interface(dest), source=Interface(source))
    assert_all(dest, 1)
    with pytest.raises(bc.InvalidProblemError, match=r"^WriteSlicePlan: dest: is read-only$"):
        plan.run(dest=Interface(dest, data=(dest.data_ptr, True)), source=source)
    # Strides are in bytes and may be negative.
    ramp = bc.asarray(np.arange(COUNT, dtype=np.uint32).astype(np.uint8), "cuda")
    backwards = Interface(ramp, data=(ramp.data_ptr + COUNT - 1, False), strides=(-1,))
    plan.run(dest=Interface(dest, strides=None), source=backwards)
    assert (dest.numpy() == ramp.numpy()[::-1]).all()
    # The stream that the producer named is waited for.
    stream.occupy()
    stream.fill(source.data_ptr, 9, COUNT)
    plan.run(dest=dest, source=Interface(source, stream=stream.handle))
    assert stream.busy
    assert_all(dest, 9)


def test_memory_is_freed_after_its_last_use(stream: driver.Stream) -> None:
    """Freed while the copy from it waits: whoever gets the memory next must not reach the copy."""
    plan = copy_plan()
    dest = tensor(0)
    for value in range(1, 6):
        source = tensor(value)
        stream.occupy()
        plan.run(dest=dest, source=source, stream=stream)
        del source
        for _ in range(4):
            tensor(99)
        assert stream.busy
        stream.synchronize()
        assert_all(dest, value)


def test_empty_takes_memory_in_the_order_of_a_stream(stream: driver.Stream) -> None:
    made = bc.empty(COUNT, "uint8", "cuda", stream=stream)
    assert made.stream == stream.handle
    stream.fill(made.data_ptr, 5, COUNT)
    assert_all(made, 5)
    copied = bc.asarray(np.full(COUNT, 6, np.uint8), "cuda", stream=stream)
    assert copied.stream == stream.handle
    assert_all(copied, 6)
    stream.occupy()
    bc.synchronize("cuda", stream)
    assert not stream.busy


# ---------------------------------------------------------------------------------------------------
# Nothing waits.


@each_problem
@pytest.mark.parametrize("workspace", ["own", "given"])
def test_run_does_not_wait(stream: driver.Stream, problem: Problem, workspace: str) -> None:
    plan = problem.select("cuda")
    expected = problem.operands(plan)
    plan.run(**problems.given(expected))
    for bound in (False, True):
        operands = problem.operands(plan)
        space = problems.poisoned_workspace(plan) if workspace == "given" else None
        ready = plan.bind(**problems.given(operands)) if bound else None
        stream.occupy()
        if ready:
            ready.run(stream, workspace=space)
        else:
            plan.run(**problems.given(operands), stream=stream, workspace=space)
        assert stream.busy
        stream.synchronize()
        assert problems.results(plan, operands) == problems.results(plan, expected)


# ---------------------------------------------------------------------------------------------------
# Graphs.


def refill(plan: bc.Plan, operands: dict[str, support.Placed], fresh: dict[str, support.Placed]) -> None:
    """Puts the bytes of other operands in place of these, inputs and poison alike."""
    for name, placed in operands.items():
        memory = placed.memory
        bc.write_slice(memory.tensor, fresh[name].memory.tensor, ...)
        memory.before = fresh[name].memory.before


@each_problem
@pytest.mark.parametrize("workspace", ["own", "given"])
@pytest.mark.parametrize("bound", [False, True], ids=["run", "bound"])
def test_capture_and_replay(stream: driver.Stream, problem: Problem, workspace: str, bound: bool) -> None:
    plan = problem.select("cuda")
    expected = {}
    for seed in range(3):
        operands = problem.operands(plan, seed)
        plan.run(**problems.given(operands))
        expected[seed] = problems.results(plan, operands)

    operands = problem.operands(plan, 0)
    given = problems.given(operands)
    space = problems.poisoned_workspace(plan) if workspace == "given" else None
    ready = plan.bind(**given) if bound else None
    # As frameworks advise: once before, so that everything has been on this stream.
    plan.run(**given, stream=stream, workspace=space)
    stream.synchronize()
    with stream.capture() as graph:
        if ready:
            ready.run(stream, workspace=space)
        else:
            plan.run(**given, stream=stream, workspace=space)
    assert graph.nodes > 0
    # An eager run of something larger in between must not disturb what the graph refers to.
    large = bc.asarray(np.zeros(1 << 22, np.uint8), "cuda")
    for seed in (0, 1, 2, 1):
        refill(plan, operands, problem.operands(plan, seed))
        graph.launch(stream)
        stream.synchronize()
        assert problems.results(plan, operands) == expected[seed]
        bc.write_slice(large, StridedView(large, "uint8", (1 << 21,)), np.s_[1 : 1 + (1 << 21)], overlap="stage")
    graph.close()


def test_looking_at_operands_leaves_no_trace_in_a_graph(stream: driver.Stream) -> None:
    plan = copy_plan()
    dest, source = tensor(0), tensor(1)
    plan.run(dest=dest, source=source, stream=stream)
    stream.synchronize()
    with stream.capture() as graph:
        plan.can_implement(dest=dest, source=source)
        plan.bind(dest=dest, source=source)
    assert graph.nodes == 0
    graph.close()


def test_own_tensors_of_another_stream_can_be_captured(stream: driver.Stream) -> None:
    """They were made, and are done, on the default stream, which isn't captured."""
    plan = copy_plan()
    dest, source = tensor(0), tensor(7)
    bc.synchronize("cuda")
    with stream.capture() as graph:
        plan.run(dest=dest, source=source, stream=stream)
    assert graph.nodes == 1
    assert_all(dest, 0)
    graph.launch(stream)
    stream.synchronize()
    assert_all(dest, 7)
    # And used on another stream afterwards.
    bc.write_slice(dest, tensor(8), ...)
    assert_all(dest, 8)
    graph.close()


@pytest.mark.requires("torch.cuda")
@each_problem
@pytest.mark.parametrize("bound", [False, True], ids=["run", "bound"])
def test_torch_graphs(problem: Problem, bound: bool) -> None:
    """The operands through torch, on whatever stream torch captures."""
    torch = support.torch()
    plan = problem.select("cuda")
    eager = problem.operands(plan)
    plan.run(**problems.given(eager))
    operands = problem.operands(plan)
    bytes_of = {name: torch.from_dlpack(placed.memory.tensor) for name, placed in operands.items()}
    copies = {name: memory.clone() for name, memory in bytes_of.items()}
    # Memory of torch, with the operands' layout.
    given = {
        name: StridedView(
            memory.data_ptr(), placed.kind.name, placed.shape, placed.strides, shift=placed.offset, device=CUDA
        )
        for (name, memory), placed in zip(copies.items(), operands.values(), strict=True)
    }
    ready = plan.bind(**given) if bound else None
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # What other threads of the process do meanwhile, those of JAX say, is no part of the graph.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        current = torch.cuda.current_stream()
        if ready:
            ready.run(current)
        else:
            plan.run(**given, stream=current)
    for _ in range(3):
        for name, memory in copies.items():
            memory.copy_(bytes_of[name])
        graph.replay()
    torch.cuda.synchronize()
    for name, placed in operands.items():
        support.assert_same_bits(support.from_torch(copies[name]), eager[name].memory.now())
        placed.assert_untouched()


@pytest.mark.requires("torch.cuda")
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("joined", [False, True], ids=["one stream", "two streams"])
def test_kernels_in_a_row_keep_their_order(captured: bool, joined: bool) -> None:
    """Each step reads what the step before wrote, from elsewhere on the card: a kernel that started too early
    would see older numbers."""
    torch = support.torch()
    count, steps = 1 << 22, 40
    first, second = (torch.zeros(count, dtype=torch.int32, device="cuda") for _ in range(2))
    places = torch.arange(count, dtype=torch.int32, device="cuda")
    half = count // 2 - 3
    low, high = ((begin, begin + half) for begin in (1, count // 2 + 1))
    plans = [bc.WriteSlicePlan(dest_shape=(count,), ranges=(part,), dtype="int32") for part in (low, high)]
    side = torch.cuda.Stream()

    def work() -> None:
        first.copy_(places)
        for _ in range(steps):
            # The halves change places, by two kernels of ours in a row, between two of torch.
            plans[0].run(dest=second, source=first[slice(*high)])
            plans[1].run(dest=second, source=first[slice(*low)])
            if joined:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    second.add_(1)
                torch.cuda.current_stream().wait_stream(side)
            else:
                second.add_(1)
            plans[0].run(dest=first, source=second[slice(*low)])
            plans[1].run(dest=first, source=second[slice(*high)])

    work()
    expected = torch.cat(
        [places[:1], places[slice(*low)] + steps, places[low[1] : high[0]], places[slice(*high)] + steps]
    )
    expected = torch.cat([expected, places[high[1] :]])
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            work()
    for _ in range(3):
        first.zero_()
        graph.replay() if captured else work()
        assert torch.equal(first, expected)


@pytest.mark.requires("torch.cuda")
def test_case_F12_exchange_while_capturing() -> None:
    """torch's tensors by themselves, no stream named; a tensor made within the capture."""
    torch = support.torch()
    x = torch.arange(8.0, device="cuda")
    dest = torch.zeros(10, device="cuda")
    plan = bc.WriteSlicePlan(dest_shape=(10,), ranges=((1, 9),), dtype="float32", device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        plan.run(dest=dest, source=y)
        bc.write_slice(dest, y[:1], np.s_[9:])
    assert not dest.any()
    graph.replay()
    assert dest.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 1]
    x.add_(10)
    graph.replay()
    assert dest.tolist() == [0, 11, 12, 13, 14, 15, 16, 17, 18, 11]


@pytest.mark.requires("torch.cuda")
def test_case_F14_workspace_within_a_graph() -> None:
    """The first use of the library's memory happens while a graph is captured, in a process of its own."""
    program = """
import numpy as np, torch, baracuda as bc
x = torch.arange(1000, device="cuda", dtype=torch.int32)
plan = bc.WriteSlicePlan(dest_shape=(1000,), ranges=((1, 1000),), dtype="int32", overlap="stage", device="cuda")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    plan.run(dest=x, source=x[:-1])
expected = np.arange(1000)
large = torch.zeros(10_000_000, device="cuda", dtype=torch.int32)
for _ in range(3):
    graph.replay()
    expected[1:] = expected[:-1].copy()
    assert x.cpu().numpy().tolist() == expected.tolist()
    bc.write_slice(large, large[:-5], (5, 10_000_000), overlap="stage")
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "fine"


# ---------------------------------------------------------------------------------------------------
# Threads, load, bits.


@each_problem
def test_threads_with_streams_of_their_own(problem: Problem) -> None:
    plan = problem.select("cuda")
    expected = problem.operands(plan)
    plan.run(**problems.given(expected))
    bits = problems.results(plan, expected)

    def attempt(own: driver.Stream, bind: bool) -> bool:
        operands = problem.operands(plan)
        if bind:
            plan.bind(**problems.given(operands)).run(own)
        else:
            plan.run(**problems.given(operands), stream=own)
        own.synchronize()
        return problems.results(plan, operands) == bits

    def work(place: int) -> bool:
        own = driver.Stream()
        fine = all(attempt(own, bool((place + round_) % 2)) for round_ in range(6))
        # What was used on the stream is gone by now.
        own.close()
        return fine

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_one_bound_plan_on_many_streams() -> None:
    """It is immutable: threads may launch it at once."""
    dest, source = tensor(0), tensor(7)
    bound = copy_plan().bind(dest=dest, source=source)

    def work(_: int) -> None:
        own = driver.Stream()
        for _ in range(50):
            bound.run(own)
        own.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert_all(dest, 7)


@pytest.mark.sanitizer
def test_a_run_that_comes_again_sees_what_changed(stream: driver.Stream) -> None:
    """From the same addresses: other strides, shapes, dtypes and flags; and more sets than are remembered."""
    plan = bc.WriteSlicePlan(dest_shape=(4, 6), ranges=((1, 3), (0, 6)), dtype="int32", device="cuda")
    dest, source = bc.asarray(np.zeros((4, 6), np.int32)), bc.asarray(np.arange(256, dtype=np.int32))

    def view(memory: bc.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], **more: Any) -> StridedView:
        return StridedView(memory.data_ptr, "int32", shape, strides, device=CUDA, **more)

    def expect(rows: list[list[int]]) -> None:
        stream.synchronize()
        assert dest.numpy()[1:3].tolist() == rows

    rows_of = view(source, (2, 6), (6, 1))
    columns_of = view(source, (2, 6), (1, 2))
    for _ in range(4):
        plan.run(dest=dest, source=rows_of, stream=stream)
        expect([[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]])
        plan.run(dest=dest, source=columns_of, stream=stream)
        expect([[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]])
        with pytest.raises(bc.InvalidProblemError, match="source: expected shape"):
            plan.run(dest=dest, source=view(source, (6, 2), (1, 6)), stream=stream)
        with pytest.raises(bc.InvalidProblemError, match="shares memory"):
            plan.run(dest=dest, source=view(dest, (2, 6), (6, 1), shift=4), stream=stream)
        with pytest.raises(bc.InvalidProblemError, match="is missing"):
            plan.run(dest=dest, stream=stream)
    for _ in range(2):
        for first in range(250):
            plan.run(dest=dest, source=view(source, (2, 6), (0, 1), shift=4 * first), stream=stream)
        expect([[*range(249, 255)]] * 2)
    another = bc.WriteSlicePlan(dest_shape=(4, 6), ranges=((0, 2), (0, 6)), dtype="int32", device="cuda")
    another.run(dest=dest, source=rows_of, stream=stream)
    stream.synchronize()
    assert dest.numpy()[0].tolist() == [0, 1, 2, 3, 4, 5]


@each_problem
def test_bits_do_not_depend_on_load(stream: driver.Stream, other: driver.Stream, problem: Problem) -> None:
    plan = problem.select("cuda")
    seen = set()
    for place in range(20):
        operands = problem.operands(plan, misalign=place % 3)
        if place % 2:
            other.occupy()
        plan.run(**problems.given(operands), stream=stream)
        stream.synchronize()
        seen.add(tuple(sorted(problems.results(plan, operands).items())))
    other.synchronize()
    assert len(seen) == 1


EXACT = [problem for problem in PROBLEMS if problem.select("cpu").precision_guarantee.math_precision == "exact"]


@pytest.mark.parametrize("problem", EXACT, ids=[problem.id for problem in EXACT])
def test_the_cpu_and_cuda_agree(problem: Problem) -> None:
    """Bit for bit where nothing is rounded."""
    seen = []
    for device in ("cpu", "cuda"):
        plan = problem.select(device)
        operands = problem.operands(plan)
        plan.run(**problems.given(operands))
        seen.append(problems.results(plan, operands))
    assert seen[0] == seen[1]


def test_too_little_memory() -> None:
    """An error like any other: what comes after it works."""
    with pytest.raises(bc.CudaError, match=r"^cudaMallocFromPoolAsync failed: [^\n]*$"):
        bc.empty(2**45, "uint8", "cuda")
    dest = tensor(0)
    copy_plan().run(dest=dest, source=tensor(7))
    assert_all(dest, 7)


# ---------------------------------------------------------------------------------------------------
# Devices.


@pytest.mark.requires("torch.cuda")
def test_devices_that_do_not_fit() -> None:
    torch = support.torch()
    plans = {
        device: bc.WriteSlicePlan(dest_shape=(4,), ranges=((0, 4),), dtype="float32", device=device)
        for device in ("cpu", "cuda")
    }
    cpu, cuda = torch.zeros(4), torch.zeros(4, device="cuda")
    array = np.zeros(4, np.float32)
    for device, dest, source, message in (
        ("cpu", cpu, cuda, "source: expected device cpu, got cuda:0"),
        ("cpu", array, bc.asarray(array, "cuda"), "source: expected device cpu, got cuda:0"),
        ("cuda", cuda, cpu, "source: expected device cuda:0, got cpu"),
        ("cuda", array, cuda, "dest: expected device cuda:0, got cpu"),
        ("cuda", cuda, bc.empty(4, "float32", "cpu"), "source: expected device cuda:0, got cpu"),
    ):
        with pytest.raises(bc.InvalidProblemError) as refused:
            plans[device].run(dest=dest, source=source)
        assert str(refused.value) == f"WriteSlicePlan: {message}"
    with pytest.raises(bc.InvalidProblemError, match=r"source: expected device cuda:0, got (cpu|pinned host memory)$"):
        plans["cuda"].run(dest=cuda, source=cpu.pin_memory())


@pytest.mark.requires("torch.cuda")
def test_the_function_form_follows_its_tensor() -> None:
    torch = support.torch()
    for device in ("cpu", "cuda"):
        dest = torch.zeros(3, 5, dtype=torch.bfloat16, device=device)
        source = torch.ones(3, 2, dtype=torch.bfloat16, device=device)
        assert bc.write_slice(dest, source, np.s_[:, 1:3]) is dest
        assert dest.sum(0).tolist() == [0, 3, 3, 0, 0]


@pytest.mark.requires("torch.cuda")
@pytest.mark.parametrize("dtype", [name for name in support.DTYPES if name not in ("int4", "uint4")])
def test_torch_of_every_dtype(dtype: str) -> None:
    values = support.random_array(np.random.default_rng(1), (3, 5), dtype)
    dest = support.to_torch(np.zeros((3, 5), values.dtype), "cuda")
    bc.write_slice(dest, support.to_torch(values, "cuda"), ...)
    support.assert_same_bits(support.from_torch(dest), values)
    own = bc.asarray(values, "cuda")
    seen = support.torch().from_dlpack(own)
    assert seen.data_ptr() == own.data_ptr
    support.assert_same_bits(support.from_torch(seen), values)


@pytest.mark.requires("torch.cuda")
def test_refusals_of_torch_tensors() -> None:
    torch = support.torch()
    plan = bc.WriteSlicePlan(dest_shape=(4,), ranges=((0, 4),), dtype="complex64", device="cuda")
    dest = torch.zeros(4, dtype=torch.complex64, device="cuda")
    lazy = "source: is a lazily conjugated view; call resolve_conj() first"
    grad = "dest: is written, but requires grad; pass a tensor that doesn't, such as x.detach()"
    for output, source, message in (
        (dest, dest.clone().conj(), lazy),
        (dest.clone().requires_grad_(), dest, grad),
    ):
        with pytest.raises(bc.InvalidProblemError) as refused:
            plan.run(dest=output, source=source)
        assert str(refused.value) == f"WriteSlicePlan: {message}"


@pytest.mark.requires("torch.cuda")
def test_case_F09_addresses_of_four_bytes() -> None:
    torch = support.torch()
    for dtype in (torch.float32, torch.float16):
        source = torch.arange(1025, device="cuda").to(dtype)[1:]
        dest = torch.zeros(1024 + 3, dtype=dtype, device="cuda")[3:]
        bc.write_slice(dest, source, ...)
        assert torch.equal(dest, source)


@pytest.mark.requires("cupy")
def test_case_F10_negative_strides_of_cupy() -> None:
    cupy = support.cupy()
    flipped = cupy.flip(cupy.arange(12, dtype="uint32").reshape(3, 4)).T
    dest = cupy.zeros((4, 3), "uint32")
    bc.write_slice(dest, flipped, ...)
    assert (dest == flipped).all()
    backwards = cupy.zeros(8)[::-1]
    bc.write_slice(backwards, cupy.arange(8.0), ...)
    assert backwards.tolist() == list(range(8))


@pytest.mark.requires("gpus", "torch.cuda")
class TestTwoDevices:
    def test_case_F15_the_device_is_that_of_the_plan(self) -> None:
        torch = support.torch()
        with torch.cuda.device(0):
            dest = torch.zeros(4, device="cuda:1")
            source = torch.ones(4, device="cuda:1")
            plan = bc.WriteSlicePlan(dest_shape=(4,), ranges=((0, 4),), dtype="float32", device="cuda:1")
            assert plan.device == "cuda:1"
            plan.run(dest=dest, source=source)
            assert torch.cuda.current_device() == 0
            assert dest.tolist() == [1, 1, 1, 1]
            bc.write_slice(dest, source * 2, ...)
            assert torch.cuda.current_device() == 0
            assert dest.tolist() == [2, 2, 2, 2]
            own = bc.asarray(np.zeros(4, np.float32), "cuda:1")
            plan.run(dest=own, source=source)
            assert own.numpy().tolist() == [1, 1, 1, 1]
            assert torch.cuda.current_device() == 0

    def test_cuda_is_the_current_device(self) -> None:
        torch = support.torch()
        with torch.cuda.device(1):
            plan = bc.WriteSlicePlan(dest_shape=(4,), ranges=((0, 4),), dtype="float32", device="cuda")
            assert plan.device == "cuda:1"
            assert bc.empty(3, "int8", "cuda").device == "cuda:1"

    def test_the_other_device_is_refused(self) -> None:
        torch = support.torch()
        plan = bc.WriteSlicePlan(dest_shape=(4,), ranges=((0, 4),), dtype="float32", device="cuda:0")
        zeros, ones = torch.zeros(4, device="cuda:0"), torch.ones(4, device="cuda:1")
        with pytest.raises(bc.InvalidProblemError) as refused:
            plan.run(dest=zeros, source=ones)
        assert str(refused.value) == "WriteSlicePlan: source: expected device cuda:0, got cuda:1"

    def test_capture_on_the_second_device(self) -> None:
        torch = support.torch()
        dest = torch.zeros(4, device="cuda:1")
        plan = bc.WriteSlicePlan(dest_shape=(4,), ranges=((0, 4),), dtype="float32", device="cuda:1")
        with torch.cuda.device(1):
            source = torch.ones(4, device="cuda:1")
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph), torch.cuda.device(0):
                plan.run(dest=dest, source=source, stream=torch.cuda.current_stream(1))
            graph.replay()
        assert dest.tolist() == [1, 1, 1, 1]
