# SPDX-License-Identifier: Apache-2.0
"""Installs what building this project takes into the Python that runs this, for builds without
isolation, which can reuse their build directory:

    python scripts/install_build_requires.py [-C cmake.define.BARACUDA_CUDA=ON ...]

What that is stands in pyproject.toml and in the build backend. CMake and Ninja come too, whatever
the system has, for they also build and run what isn't part of the package.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def pip_install(*requirements: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *requirements], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Install this project's build requirements.")
    parser.add_argument("-C", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    settings = dict(setting.split("=", 1) for setting in parser.parse_args().settings)

    build_system = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
    pip_install(*build_system["requires"], "cmake>=3.26", "ninja>=1.11")
    # The backend can say what else it needs only once these are there.
    query = (
        "import sys; sys.path.insert(0, 'build_backend'); import baracuda_build;"
        f"print(*baracuda_build.get_requires_for_build_wheel({settings!r}), sep='\\n')"
    )
    run = subprocess.run([sys.executable, "-c", query], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    if more := run.stdout.split("\n")[:-1]:
        pip_install(*more)


if __name__ == "__main__":
    main()
