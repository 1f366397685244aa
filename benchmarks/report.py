# SPDX-License-Identifier: Apache-2.0
"""Results as a file and as a table."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Lab

__all__ = ["RESULTS", "card_directory", "header", "line", "meta", "write"]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def card_directory(card: str) -> str:
    """The name of the folder of a card's results: H100-80GB-HBM3."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", card.removeprefix("NVIDIA ")).strip("-")


def meta(lab: Lab, family: str, commit: str | None) -> dict[str, Any]:
    """What was measured, on what and with what."""
    found, modified = _commit(commit)
    device = lab.describe()
    return {
        "family": family,
        "card": device.pop("card"),
        "driver": device.pop("driver"),
        "cuda": device.pop("cuda"),
        "versions": {"python": platform.python_version(), **lab.peers.versions()},
        "commit": found,
        "modified": modified,
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "device": lab.device,
        **device,
        "missing_peers": dict(sorted(lab.peers.missing.items())),
        "quick": lab.quick,
    }


def _commit(given: str | None) -> tuple[str | None, bool | None]:
    """The commit, and whether files differ from it where git can tell."""
    given = given or os.environ.get("BARACUDA_COMMIT")
    if given:
        return given, None
    try:
        commit = _git("rev-parse", "HEAD")
        modified = bool(_git("status", "--porcelain", "--", "csrc", "src", "benchmarks/*.py", "benchmarks/families"))
    except (OSError, subprocess.CalledProcessError):
        return None, None
    return commit, modified


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def write(path: Path, described: dict[str, Any], rows: Sequence[dict[str, Any]], complete: bool = True) -> None:
    """One row a line, so that a changed number is a changed line. `complete`: there are no more rows to come."""
    described = {**described, "complete": complete}
    body = ",\n    ".join(json.dumps(row) for row in rows)
    parts = json.dumps(described, indent=2).replace("\n", "\n  ")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{\n  "meta": {parts},\n  "rows": [\n    {body}\n  ]\n}}\n')


_COLUMNS = (
    ("operation", 46),
    ("dtype", 9),
    ("µs", 9),
    ("peer", 12),
    ("µs", 9),
    ("ratio", 6),
    ("GB/s", 7),
    ("% copy", 6),
)


def header() -> str:
    """Of the table that `line` fills."""
    return _fill(name for name, _ in _COLUMNS)


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    name = " ".join(part for part in (row["op"], row["shape"], row["note"]) if part)
    numbers = [name, row["dtype"], _number(row["ours_us"], 2), row["peer"] or "–", _number(row["peer_us"], 2)]
    numbers += [_number(row["ratio"], 2), _number(row["gbs"], 0), _number(row["percent_of_copy"], 1)]
    text = _fill(numbers)
    if row.get("bare_us") is not None:
        text += f"  bare {row['bare_us']:.2f}, over it {row['over_bare_us']:+.2f}"
    failed = [f"{name}: {peer['error']}" for name, peer in row["peers"].items() if "error" in peer]
    return "\n".join([text, *(f"    {reason}" for reason in failed)])


def _fill(cells: Iterable[str]) -> str:
    padded = [
        cell.ljust(width) if index in (0, 1, 3) else cell.rjust(width)
        for index, (cell, (_, width)) in enumerate(zip(cells, _COLUMNS, strict=True))
    ]
    return " ".join(padded).rstrip()


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"
