# SPDX-License-Identifier: Apache-2.0
"""The build backend: scikit-build-core, plus a CUDA compiler where one is needed, and jaxlib.

A build that wants CUDA on a machine without nvcc gets NVIDIA's compiler wheels as build
requirements. jaxlib ships the header of XLA's handlers. All else is scikit-build-core's.
"""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

from scikit_build_core import build as _scikit_build
from scikit_build_core.build import *  # noqa: F403
from scikit_build_core.settings.skbuild_read_settings import SettingsReader

ConfigSettings = dict[str, "str | list[str]"]

# All five at one minor version: their own dependencies are not pinned, and a compiler that meets
# the headers of another release refuses them.
COMPILER_WHEELS = [
    f"{name}==13.0.*"
    for name in (
        "nvidia-cuda-nvcc",
        "nvidia-cuda-crt",
        "nvidia-nvvm",
        "nvidia-cuda-runtime",
        "nvidia-cuda-cccl",
    )
]


def get_requires_for_build_wheel(config_settings: ConfigSettings | None = None) -> list[str]:
    requires = _scikit_build.get_requires_for_build_wheel(config_settings)
    return requires + _compiler_requires(config_settings) + _xla_requires(config_settings)


def get_requires_for_build_editable(config_settings: ConfigSettings | None = None) -> list[str]:
    requires = _scikit_build.get_requires_for_build_editable(config_settings)
    return requires + _compiler_requires(config_settings) + _xla_requires(config_settings)


def _compiler_requires(config_settings: ConfigSettings | None) -> list[str]:
    # cmake/BaracudaCuda.cmake applies the same rules when it configures.
    defines = _cmake_defines(config_settings)
    wanted = defines.get("BARACUDA_CUDA", "AUTO").upper()
    if wanted in {"OFF", "FALSE", "NO", "0"}:
        return []
    if "CMAKE_CUDA_COMPILER" in defines or _system_nvcc() is not None:
        return []
    if wanted == "AUTO" and not _gpu_visible():
        return []
    return COMPILER_WHEELS


def _xla_requires(config_settings: ConfigSettings | None) -> list[str]:
    # cmake/BaracudaExtension.cmake looks for it there, too.
    return [] if _cmake_defines(config_settings).get("BARACUDA_XLA_INCLUDE_DIR") else ["jaxlib>=0.5"]


def _cmake_defines(config_settings: ConfigSettings | None) -> dict[str, str]:
    """The definitions that CMake will get, from wherever scikit-build-core takes them."""
    settings = SettingsReader.from_file("pyproject.toml", config_settings, state="wheel").settings
    defines = dict(settings.cmake.define)
    for arg in [*settings.cmake.args, *shlex.split(os.environ.get("CMAKE_ARGS", ""))]:
        name, equals, value = arg.removeprefix("-D").partition("=")
        if arg.startswith("-D") and equals:
            defines[name.partition(":")[0]] = value
    return defines


def _system_nvcc() -> str | None:
    if compiler := os.environ.get("CUDACXX"):
        return shutil.which(compiler)
    homes = [Path(home) / "bin" for home in (os.environ.get("CUDA_HOME"),) if home]
    path = os.pathsep.join([*map(str, homes), os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"])
    return shutil.which("nvcc", path=path)


def _gpu_visible() -> bool:
    return Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None
