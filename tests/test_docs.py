# SPDX-License-Identifier: Apache-2.0
"""What the documentation says is there, and what it shows runs."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import io
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import support

import baracuda as bc

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def modules() -> list[Any]:
    names = ["baracuda", *(f"baracuda.{found.name}" for found in pkgutil.iter_modules(bc.__path__))]
    frameworks = {"baracuda.torch": "torch", "baracuda.jax": "jax"}
    assert frameworks.keys() <= set(names)
    return [
        pytest.param(name, marks=pytest.mark.requires(frameworks[name])) if name in frameworks else name
        for name in names
    ]


@pytest.mark.parametrize("name", modules())
def test_doctests(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    failed, tried = doctest.testmod(module)
    assert failed == 0
    # None is skipped by the finder.
    source = inspect.getsource(module) if name != "baracuda._core" else ""
    assert tried == len(re.findall(r"^\s*>>> ", source, re.MULTILINE))


def public(owner: type | ModuleType) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(owner).items() if not name.startswith("_")]


@pytest.mark.parametrize("name", bc.__all__)
def test_public_names_have_docstrings(name: str) -> None:
    value = getattr(bc, name)
    assert inspect.getdoc(value), name
    assert value.__doc__
    if not isinstance(value, type):
        return
    attributes = inspect.getdoc(value)
    for member, what in public(value):
        # Fields are described in the docstring of their class.
        described = re.search(rf"^\s*{member}( \(.*\))?:", attributes, re.MULTILINE)
        assert getattr(what, "__doc__", None) or described or member in ("operator", "Descriptor"), f"{name}.{member}"


def test_all_is_sorted_and_complete() -> None:
    assert bc.__all__ == sorted(bc.__all__)
    for name, value in public(bc):
        if not isinstance(value, ModuleType):
            assert name in bc.__all__, name


@pytest.mark.parametrize("name", [name for name in modules() if name not in ("baracuda", "baracuda._core")])
def test_all_of_each_module(name: str) -> None:
    module = importlib.import_module(name)
    if name == "baracuda.__main__":
        return
    for exported in module.__all__:
        assert hasattr(module, exported)
    own = [key for key, value in public(module) if getattr(value, "__module__", None) == name]
    assert set(own) - {"T", "Range"} <= set(module.__all__)


@pytest.mark.parametrize("name", [name for name in bc.__all__ if hasattr(getattr(bc, name), "Descriptor")])
def test_plans_document_their_fields_and_operands(name: str) -> None:
    plan = getattr(bc, name)
    if plan is bc.Plan:
        assert "Raises:" in plan.__doc__
        return
    assert ">>> " in plan.__doc__
    # From Python 3.13 on, the compiler takes the indentation away.
    documentation = inspect.cleandoc(plan.Descriptor.__doc__)
    for field in plan.Descriptor.__dataclass_fields__:
        assert re.search(rf"^    {field}: ", documentation, re.MULTILINE), field


def test_readme_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    names: dict[str, Any] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in blocks:
            exec(block, names)
    assert printed.getvalue().split() == ["[5]", "rows", "0", "cpu"]


@pytest.mark.parametrize(
    "page",
    [
        "numpy",
        *(
            pytest.param(name, marks=pytest.mark.requires(*needed))
            for name, needed in (("torch", ["torch"]), ("jax", ["jax"]), ("cupy", ["cupy", "gpu"]))
        ),
    ],
)
def test_pages_of_frameworks_run(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    expected = re.findall(r"^print\(.*\)  # (.*)$", "".join(blocks), re.MULTILINE)
    assert len(expected) >= 3
    assert len(expected) == "".join(blocks).count("print(")
    names: dict[str, Any] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in blocks:
            exec(compile(block, page, "exec"), names)
    assert printed.getvalue().splitlines() == expected


def test_readme_lists_what_there_is() -> None:
    table = [line for line in README.splitlines() if line.startswith("| ") and "`" in line]
    for value in vars(bc).values():
        if isinstance(value, type) and issubclass(value, bc.Plan) and value is not bc.Plan:
            assert any(f"`{value.__name__}`" in line for line in table), value.__name__
    dtypes = next(line for line in table if "`WriteSlicePlan`" in line)
    for name in support.DTYPES:
        assert re.search(rf"\b{name}\b", dtypes) or re.fullmatch(r"u?int(8|16|32)", name), name


def test_links_lead_somewhere() -> None:
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")):
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_examples_run(example: str) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / example], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
