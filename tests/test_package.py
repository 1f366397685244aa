# SPDX-License-Identifier: Apache-2.0
"""The package as it is installed: what importing it costs and needs, and what lies beside it."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import baracuda as bc

# An editable install looks whether it has to be built anew; that isn't what is timed.
AS_INSTALLED = """
import sys
for finder in sys.meta_path:
    if hasattr(finder, "rebuild_flag"):
        finder.rebuild_flag = False
"""


def output_of(*arguments: str) -> str:
    """The last line that a program prints."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_version() -> None:
    assert bc.__version__ == importlib.metadata.version("baracuda")
    assert output_of("-m", "baracuda", "--version") == bc.__version__


def test_importing_takes_less_than_80_ms_beyond_numpy() -> None:
    program = """
import time, numpy
start = time.process_time()
import baracuda
print(time.process_time() - start)
"""
    # The first time fills the caches, and other processes come between: one that they leave alone is enough.
    times: list[float] = []
    while len(times) < 30 and min(times, default=1.0) >= 0.080:
        times.append(float(output_of("-c", AS_INSTALLED + program)))
    assert min(times) < 0.080, times


def test_importing_starts_nothing() -> None:
    program = """
import os
before = set(sys.modules)
import numpy
threads = len(os.listdir("/proc/self/task"))
import baracuda
assert len(os.listdir("/proc/self/task")) == threads
print(sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""
    loaded = output_of("-c", AS_INSTALLED + program)
    for name in ("torch", "jax", "cupy", "cuda", "scipy"):
        assert f"'{name}'" not in loaded


def test_case_F16_no_framework_is_linked() -> None:
    program = """
for name in ("torch", "jax", "jaxlib", "cupy"):
    sys.modules[name] = None
import numpy as np
import baracuda as bc
assert bc.cumsum(np.ones(3)).tolist() == [1, 2, 3]
with open("/proc/self/maps") as maps:
    print(sorted({line.split()[-1].rpartition("/")[2] for line in maps if ".so" in line}))
"""
    loaded = output_of("-c", AS_INSTALLED + program)
    assert "'_core." in loaded
    for name in ("libtorch", "libc10", "libjax", "libcudart"):
        assert f"'{name}" not in loaded


def test_case_F19_one_build_for_all_frameworks() -> None:
    needed = {re.split(r"[^\w-]", text)[0] for text in importlib.metadata.requires("baracuda") or () if ";" not in text}
    assert needed == {"numpy", "array-api-compat", "ml_dtypes"}
    # The stable ABI of 3.11 lacks what calls are made of, so that 3.11 has a build of its own.
    assert (".abi3." in bc._core.__file__) == (sys.version_info >= (3, 12))


def test_the_device_count_never_fails() -> None:
    program = "import baracuda as bc; print(bc.cuda_device_count(), bc.cuda_unavailable_reason() is None)"
    count, available = output_of("-c", AS_INSTALLED + program).split()
    assert (int(count) > 0) == (available == "True")


@pytest.mark.parametrize(
    ("option", "file"),
    [
        ("--include-dir", "baracuda/baracuda.h"),
        ("--include-dir", "dlpack/dlpack.h"),
        ("--lib-dir", "libbaracuda.a"),
        ("--cmake-dir", "baracudaConfig.cmake"),
    ],
)
def test_what_a_c_program_needs(option: str, file: str) -> None:
    assert (Path(output_of("-m", "baracuda", option)) / file).is_file()


def test_options_for_compilers() -> None:
    answer = output_of("-m", "baracuda", "--libs", "--cflags")
    assert answer.startswith("-I")
    assert answer.index("-I") < answer.index("-lbaracuda") < answer.index("-lstdc++")


def test_typed() -> None:
    (found,) = (path for root in bc.__path__ if (path := Path(root) / "py.typed").exists())
    assert found.read_text() == ""
