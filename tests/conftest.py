# SPDX-License-Identifier: Apache-2.0
"""What a machine can run is collected; what it can't is counted and reported, never skipped.

A test that needs something says so: by the parameter ``device`` (every test that takes it runs on each
of "cpu" and "cuda"; one that takes ``framework``, too, with each framework there), or by
``@pytest.mark.requires("torch", ...)`` with names of ``support.REQUIREMENTS``.
The summary tells how many cases were not run, and why.

    --require NAME     the session fails at once where NAME can't be had (repeatable)
    --require-gpu      the same for a GPU, and a skipped CUDA case counts as failed
    --part K/N         of what would run, every Nth case from the Kth on: N sessions share the work
"""

from __future__ import annotations

import fcntl
import gc
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import support

pytest.register_assert_rewrite("scan_problems", "segment_problems")

# JAX would take three quarters of the GPU at its first use.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

DEVICES = ("cpu", "cuda")
FRAMEWORKS = (
    ("cpu", "numpy"),
    ("cpu", "baracuda"),
    pytest.param("cpu", "torch", marks=pytest.mark.requires("torch")),
    pytest.param("cpu", "jax", marks=pytest.mark.requires("jax")),
    ("cuda", "baracuda"),
    pytest.param("cuda", "torch", marks=pytest.mark.requires("torch.cuda")),
    pytest.param("cuda", "cupy", marks=pytest.mark.requires("cupy")),
    pytest.param("cuda", "jax", marks=pytest.mark.requires("jax.cuda")),
)

for name, examples in {"quick": 15, "default": 60, "ci": 60, "thorough": 2000}.items():
    hypothesis.settings.register_profile(
        name,
        max_examples=examples,
        deadline=None,
        print_blob=True,
        # The same examples in every run of continuous integration; elsewhere always new ones.
        derandomize=name == "ci",
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

NOT_RUN = pytest.StashKey[Counter[tuple[str, str]]]()
PASSED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("baracuda")
    group.addoption(
        "--require", action="append", default=[], metavar="NAME", choices=sorted(support.REQUIREMENTS),
        help="fail where NAME can't be had: " + ", ".join(sorted(support.REQUIREMENTS)),
    )  # fmt: skip
    group.addoption("--require-gpu", action="store_true", help="fail where there is no GPU, or a CUDA case is skipped")
    group.addoption("--part", type=part, metavar="K/N", help="every Nth case from the Kth on, of 1 to N")


def part(text: str) -> slice:
    """The cases of a part such as "2/3"."""
    first, count = map(int, text.split("/"))
    if not 1 <= first <= count:
        raise ValueError(f"expected a part from 1/{count} to {count}/{count}, got {text}")
    return slice(first - 1, None, count)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "requires(*names): what a test needs, of support.REQUIREMENTS")
    config.addinivalue_line(
        "markers",
        "sanitizer: small shapes that reach each kernel template with one float and one 16-bit dtype, "
        "for runs under compute-sanitizer",
    )
    config.stash[NOT_RUN] = Counter()
    required = list(config.getoption("--require"))
    if config.getoption("--require-gpu"):
        required.append("gpu")
    for name in required:
        reason = support.missing(name)
        if reason is not None:
            raise pytest.UsageError(f"{name} is required, but {reason}")


def parametrized(metafunc: pytest.Metafunc) -> set[str]:
    """The arguments that a test's own marks give values."""
    names = (mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    return {
        name for given in names for name in (given.replace(" ", "").split(",") if isinstance(given, str) else given)
    }


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    open_names = set(metafunc.fixturenames) - parametrized(metafunc)
    if {"device", "framework"} <= open_names:
        metafunc.parametrize(("device", "framework"), FRAMEWORKS)
    elif "device" in open_names:
        metafunc.parametrize("device", DEVICES)


def needs(item: pytest.Item) -> list[str]:
    """The names of what a case needs; a GPU first, so that its reason is the one that is told."""
    names = [str(name) for mark in item.iter_markers("requires") for name in mark.args]
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    if str(parameters.get("device", "")).startswith("cuda"):
        names.append("gpu")
    return sorted(names, key=lambda name: name != "gpu")


# Last, so that what -k and -m leave out isn't counted.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    not_run = []
    run = []
    for item in items:
        names = needs(item)
        reason = next((why for name in names if (why := support.missing(name)) is not None), None)
        if reason is None:
            run.append(item)
            continue
        not_run.append(item)
        config.stash[NOT_RUN][" CUDA" if "gpu" in names or "gpus" in names else "", reason] += 1
    if chosen := config.getoption("--part"):
        others = run.copy()
        del others[chosen]
        not_run += others
        run = run[chosen]
    if not_run:
        config.hook.pytest_deselected(items=not_run)
        items[:] = run


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    if report.when == "call":
        item.stash[PASSED] = report.passed
    skipped = report.skipped and not hasattr(report, "wasxfail")
    if skipped and item.config.getoption("--require-gpu") and {"gpu", "gpus"}.intersection(needs(item)):
        report.outcome = "failed"
        report.longrepr = f"skipped, although --require-gpu was given: {report.longrepr}"
    return report


# With pytest-xdist every worker collects everything: what one has counted is told by the session that runs them.
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        counts = session.config.stash[NOT_RUN].items()
        session.config.workeroutput["not_run"] = [[*reason, count] for reason, count in counts]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for *reason, count in getattr(node, "workeroutput", {}).get("not_run", ()):
        node.config.stash[NOT_RUN][tuple(reason)] = count


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    write = terminalreporter.write_line
    terminalreporter.section("what this machine could run")
    write("devices: " + ", ".join(support.device_lines()))
    write("second witnesses: " + ", ".join(support.witness_lines()))
    for (kind, reason), count in sorted(config.stash[NOT_RUN].items()):
        write(f"not run: {count}{kind} {'case' if count == 1 else 'cases'} ({reason})", yellow=True)


@pytest.fixture
def backend(device: str) -> support.Backend:
    """How a test puts arrays on its device and reads them back."""
    return support.Backend(device)


@pytest.fixture(autouse=True)
def _turn_for_much_memory(request: pytest.FixtureRequest):
    """Of several test processes on one GPU, one at a time fills most of its memory."""
    if "gpu.memory" not in needs(request.node):
        yield
        return
    with (Path(tempfile.gettempdir()) / "baracuda-tests-gpu-memory.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        gc.collect()
        support.torch().cuda.empty_cache()


@pytest.fixture(autouse=True)
def _no_leaked_exports(request: pytest.FixtureRequest):
    """What a test exported through ``StridedView`` is deleted when it ends."""
    yield
    # The traceback of a failure keeps its exports.
    if request.node.stash.get(PASSED, False):
        assert support.live_exports() == 0
