# SPDX-License-Identifier: Apache-2.0
"""One module for each family of benchmarks.

A module has a docstring, whose first line `python -m benchmarks --list -v` prints, and
`rows(lab) -> Iterable[dict]`, most often `lab.measure(case)` for each of its cases.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

__all__ = ["load", "names"]


def names() -> list[str]:
    """The families, without importing them."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str) -> ModuleType:
    """The module of a family."""
    return importlib.import_module(f"{__name__}.{name}")
