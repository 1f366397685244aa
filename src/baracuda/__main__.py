# SPDX-License-Identifier: Apache-2.0
"""``python -m baracuda``: where the C library is, and how to compile and link against it.

cc program.c $(python -m baracuda --cflags --libs) -o program
cmake -S . -B build -Dbaracuda_DIR="$(python -m baracuda --cmake-dir)"
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import baracuda


def _installed(*parts: str) -> Path:
    # An editable install has the sources and the built files in different directories.
    for root in baracuda.__path__:
        path = Path(root).joinpath(*parts)
        if path.exists():
            return path
    raise SystemExit(f"baracuda: {'/'.join(parts)} is not installed with the package")


def _include_dir() -> str:
    return str(_installed("include"))


def _lib_dir() -> str:
    return str(_installed("lib", "libbaracuda.a").parent)


def _cmake_dir() -> str:
    return str(_installed("lib", "cmake", "baracuda"))


def _cflags() -> str:
    return f"-I{shlex.quote(_include_dir())}"


def _libs() -> str:
    """The link line. baracudaConfig.cmake names the same libraries."""
    lib_dir = _lib_dir()
    libraries = ["-lbaracuda"]
    if (Path(lib_dir) / "libcudart_static.a").exists():
        libraries.append("-lcudart_static")
    return " ".join([f"-L{shlex.quote(lib_dir)}", *libraries, "-lstdc++", "-pthread", "-ldl", "-lrt"])


# In the order in which the answers are printed: the compiler's options precede the linker's.
_ANSWERS = {
    "--cmake-dir": (_cmake_dir, "the directory of baracudaConfig.cmake"),
    "--include-dir": (_include_dir, "the directory of the headers"),
    "--lib-dir": (_lib_dir, "the directory of libbaracuda.a"),
    "--cflags": (_cflags, "options for the compiler"),
    "--libs": (_libs, "options for the linker"),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m baracuda",
        description="Where baracuda's C library is, and how to compile and link against it.",
    )
    parser.add_argument("--version", action="version", version=version("baracuda"))
    for option, (_, text) in _ANSWERS.items():
        parser.add_argument(option, dest="asked", action="append_const", const=option, help=text)
    asked = parser.parse_args(argv).asked
    if not asked:
        parser.error("name at least one option")
    print(*(answer() for option, (answer, _) in _ANSWERS.items() if option in asked))


if __name__ == "__main__":
    main()
