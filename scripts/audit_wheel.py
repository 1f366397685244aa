# SPDX-License-Identifier: Apache-2.0
"""Audits the distributions in a directory; exits with 1 if any check fails.

    python scripts/audit_wheel.py dist

Takes requirements/audit.txt and nm and readelf of binutils.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

# The kernels of one architecture, which are there twice: in the extension and in the library to link with.
SIZE_CAP = 40 * 10**6
EXPORTS = {"PyInit__core"}
# What an extension may need at run time: the C and C++ runtimes, and no CUDA library.
NEEDED = {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}
MEMBERS = [
    r"baracuda/__init__\.py",
    r"baracuda/_core\.pyi",
    r"baracuda/py\.typed",
    r"baracuda/torch/__init__\.py",
    r"baracuda/jax/__init__\.py",
    r"baracuda/capi\.pxd",
    r"baracuda/include/baracuda/baracuda\.h",
    r"baracuda/include/dlpack/dlpack\.h",
    r"baracuda/include/dlpack/LICENSE",
    r"baracuda/lib/libbaracuda\.a",
    r"baracuda/lib/cmake/baracuda/baracudaConfig\.cmake",
    r"baracuda/lib/cmake/baracuda/baracudaConfigVersion\.cmake",
    r"baracuda-[^/]+\.dist-info/licenses/LICENSE",
    r"baracuda-[^/]+\.dist-info/licenses/NOTICE",
]
STRANGERS = r".*\.(pyx|pxi|c|cpp|cu|cuh|o|pyc)|(?!baracuda[/-]).*"


class AuditError(Exception):
    pass


def output_of(*command: str | Path) -> str:
    run = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if run.returncode != 0:
        raise AuditError(f"{' '.join(map(str, command))} exited with {run.returncode}:\n{run.stdout}")
    return run.stdout


def tool(name: str, *arguments: str | Path) -> str:
    return output_of(sys.executable, "-m", name, *arguments)


def check_metadata(wheel: Path) -> str:
    return tool("twine", "check", "--strict", *sorted(wheel.parent.iterdir())).strip()


def check_members(wheel: Path) -> str:
    names = zipfile.ZipFile(wheel).namelist()
    missing = [m for m in MEMBERS if not any(re.fullmatch(m, name) for name in names)]
    strangers = [name for name in names if re.fullmatch(STRANGERS, name)]
    if missing or strangers:
        raise AuditError(f"missing: {missing}; not to be there: {strangers}")
    return f"{len(names)} members, the {len(MEMBERS)} required ones among them"


def check_size(wheel: Path) -> str:
    size = wheel.stat().st_size
    members = sorted(zipfile.ZipFile(wheel).infolist(), key=lambda m: -m.compress_size)
    largest = "\n".join(f"{m.compress_size:>10} {m.file_size:>10} {m.filename}" for m in members[:10])
    report = f"{size} of at most {SIZE_CAP} bytes; the largest members, packed and unpacked:\n{largest}"
    if size > SIZE_CAP:
        raise AuditError(report)
    return report


def check_symbols(wheel: Path) -> str:
    """The extension exports its entry alone, and needs nothing but the C and C++ runtimes."""
    with tempfile.TemporaryDirectory() as directory:
        extension = Path(zipfile.ZipFile(wheel).extract(extension_of(wheel), directory))
        exports = {line.split()[-1] for line in output_of("nm", "-D", "--defined-only", extension).splitlines()}
        dynamic = output_of("readelf", "-d", extension)
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic))
    if exports != EXPORTS:
        raise AuditError(f"exports {sorted(exports)}, expected {sorted(EXPORTS)}")
    if not needed or needed - NEEDED:
        raise AuditError(f"needs {sorted(needed)}, expected no more than {sorted(NEEDED)}")
    return f"exports {', '.join(exports)}; needs {', '.join(sorted(needed))}"


def check_stable_abi(wheel: Path) -> str:
    extension = extension_of(wheel)
    if "-abi3-" not in wheel.name:
        if ".abi3." in extension:
            raise AuditError(f"{extension} in a wheel that isn't tagged abi3")
        return "not claimed"
    if ".abi3." not in extension:
        raise AuditError(f"{extension} in a wheel that is tagged abi3")
    return tool("abi3audit", "--strict", "--report", wheel).strip()


def check_platform(wheel: Path) -> str:
    report = " ".join(tool("auditwheel", "show", wheel).split())
    if not re.search(r'platform tag: "manylinux_\d+_\d+_', report):
        raise AuditError(f"is no manylinux wheel: {report}")
    return report


def extension_of(wheel: Path) -> str:
    names = zipfile.ZipFile(wheel).namelist()
    extensions = [name for name in names if re.search(r"\.so(\.|$)", name)]
    if len(extensions) != 1 or not re.match(r"baracuda/_core\.", extensions[0]):
        raise AuditError(f"expected one extension module baracuda/_core, got {extensions}")
    return extensions[0]


CHECKS: list[Callable[[Path], str]] = [
    check_metadata,
    check_members,
    check_size,
    check_symbols,
    check_stable_abi,
    check_platform,
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Audit the distributions in a directory.")
    parser.add_argument("directory", type=Path)
    wheels = sorted(parser.parse_args().directory.glob("*.whl"))
    if len(wheels) != 1:
        raise SystemExit(f"expected exactly one wheel, got {[wheel.name for wheel in wheels]}")
    print(f"auditing {wheels[0].name}")
    failures = 0
    for check in CHECKS:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        try:
            print(f"{name}: ok: {check(wheels[0])}")
        except AuditError as failure:
            failures += 1
            print(f"{name}: FAILED: {failure}")
    if failures:
        raise SystemExit(f"{failures} of {len(CHECKS)} checks failed")


if __name__ == "__main__":
    main()
