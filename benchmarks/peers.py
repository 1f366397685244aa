# SPDX-License-Identifier: Apache-2.0
"""The other libraries. Each is optional; one that can't be used is named in the results, with the reason."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from typing import Any

__all__ = ["DISTRIBUTIONS", "PEERS", "Peers"]

PEERS = ("torch", "torchvision", "cupy", "jax")

#: Where the version of a library is looked up; the first that is installed counts.
DISTRIBUTIONS = {
    "baracuda": ("baracuda",),
    "numpy": ("numpy",),
    "ml_dtypes": ("ml_dtypes",),
    "cuda-bindings": ("cuda-bindings",),
    "torch": ("torch",),
    "torchvision": ("torchvision",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "jax": ("jax",),
}


class Peers:
    """Imports the others when they are first asked for.

    Args:
        cuda: they are of use only if they see the GPU.
        allowed: the names to use; None for all.
    """

    def __init__(self, *, cuda: bool, allowed: tuple[str, ...] | None = None) -> None:
        self._cuda = cuda
        self._allowed = allowed
        self._modules: dict[str, Any] = {}
        #: Why a peer that was asked for takes no part.
        self.missing: dict[str, str] = {}

    def get(self, name: str) -> Any:
        """The module, or None."""
        if name not in self._modules:
            self._modules[name] = self._import(name)
        return self._modules[name]

    def _import(self, name: str) -> Any:
        if self._allowed is not None and name not in self._allowed:
            self.missing[name] = "left out by --peers"
            return None
        if name == "jax":
            # It takes three quarters of the GPU's memory otherwise.
            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        module: Any = None
        try:
            module = importlib.import_module(name)
            reason = self._unusable(name, module) if self._cuda else None
        except Exception as error:  # noqa: BLE001  a broken installation fails in any way it likes
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if reason is not None:
            self.missing[name] = reason
            return None
        return module

    def _unusable(self, name: str, module: Any) -> str | None:
        if name == "torch" and not module.cuda.is_available():
            return "built without CUDA, or sees no GPU"
        if name == "torchvision" and self.get("torch") is None:
            return "torch takes no part"
        if name == "cupy":
            module.cuda.runtime.getDeviceCount()
        if name == "jax" and module.default_backend() != "gpu":
            return "has no GPU backend"
        return None

    def versions(self) -> dict[str, str]:
        """Of the library, of NumPy and of every peer that took part."""
        found = {}
        for name, distributions in DISTRIBUTIONS.items():
            if name in PEERS and self._modules.get(name) is None:
                continue
            for distribution in distributions:
                try:
                    found[name] = importlib.metadata.version(distribution)
                except importlib.metadata.PackageNotFoundError:
                    continue
                break
        return found
