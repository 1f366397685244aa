# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks FAMILY``: see README.md beside this file."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import families


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one family, prints its table and writes its results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Times a family of operators.")
    parser.add_argument("family", nargs="?", metavar="FAMILY", help="one of those that --list prints")
    parser.add_argument("--list", action="store_true", help="print the families, one a line")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--save", action="store_true", help="write them to benchmarks/results/CARD/FAMILY.json")
    parser.add_argument("--quick", action="store_true", help="small sizes, few repetitions: not for reporting")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is a GPU")
    parser.add_argument("--select", default="", metavar="REGEX", help="only rows whose op, shape, dtype, note match")
    parser.add_argument("--peers", metavar="NAMES", help="only these, with commas between; '' for none")
    parser.add_argument("--commit", help="what the results are of, where git can't tell")
    options = parser.parse_args(argv)
    if options.list:
        print(*families.names(), sep="\n")
        return 0
    if options.family not in families.names():
        parser.error(f"FAMILY: expected one of {', '.join(families.names())}, got {options.family}")
    return run(options)


def run(options: argparse.Namespace) -> int:
    """Runs what the options ask for."""
    # Imported here, so that --list works in a bare checkout.
    import baracuda as bc  # noqa: PLC0415
    from benchmarks import report  # noqa: PLC0415
    from benchmarks.harness import Lab  # noqa: PLC0415

    device = options.device or ("cuda" if bc.cuda_device_count() else "cpu")
    peers = None if options.peers is None else tuple(filter(None, options.peers.split(",")))
    select = re.compile(options.select).search
    lab: Lab
    if device == "cuda":
        from benchmarks.cuda_lab import CudaLab  # noqa: PLC0415

        lab = CudaLab(quick=options.quick, select=lambda name: bool(select(name)), peers=peers)
    else:
        from benchmarks.cpu_lab import CpuLab  # noqa: PLC0415

        lab = CpuLab(quick=options.quick, select=lambda name: bool(select(name)), peers=peers)
        if options.device is None:
            print(f"on the CPU: {bc.cuda_unavailable_reason()}", file=sys.stderr)
    print(report.header(), flush=True)
    rows = []
    for row in families.load(options.family).rows(lab):
        rows.append(row)
        print(report.line(row), flush=True)
        if options.json is not None:
            # A run that is cut short leaves what it has.
            report.write(options.json, report.meta(lab, options.family, options.commit), rows, complete=False)
    if not rows:
        print("no row matches --select", file=sys.stderr)
        return 1
    described = report.meta(lab, options.family, options.commit)
    for name, reason in described["missing_peers"].items():
        print(f"without {name}: {reason}")
    if options.json is not None:
        report.write(options.json, described, rows)
    if options.save:
        report.write(
            report.RESULTS / report.card_directory(described["card"]) / f"{options.family}.json", described, rows
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
