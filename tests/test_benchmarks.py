# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run everywhere, and their results and pages have the promised form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
KEYS = {
    "op",
    "shape",
    "dtype",
    "note",
    "ours_us",
    "peer",
    "peer_us",
    "ratio",
    "bytes",
    "gbs",
    "copy_gbs",
    "percent_of_copy",
}


def run(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def families() -> list[str]:
    return sorted(path.stem for path in (ROOT / "benchmarks" / "families").glob("*.py") if path.stem != "__init__")


def test_list_needs_nothing_installed() -> None:
    assert run("-S", "-m", "benchmarks", "--list").split() == families()


@pytest.mark.parametrize("family", families())
def test_quick_run(family: str, device: str, tmp_path: Path) -> None:
    if device == "cuda":
        pytest.importorskip("cuda.bindings.runtime", reason="the GPU's benchmarks need baracuda[cuda]")
    file = tmp_path / "results" / f"{family}.json"
    arguments = ["--quick", "--device", device, "--json", str(file), "--commit", "abc"]
    # The other frameworks take seconds to start.
    output = run("-m", "benchmarks", family, *arguments, "--peers", "")
    results = json.loads(file.read_text())
    meta, rows = results["meta"], results["rows"]
    assert {"card", "driver", "cuda", "versions", "commit", "date"} <= meta.keys()
    assert meta["commit"] == "abc"
    assert meta["device"] == device
    assert {"python", "baracuda", "numpy"} <= meta["versions"].keys()
    assert len(rows) >= 3
    assert len({(row["op"], row["shape"], row["dtype"], row["note"]) for row in rows}) == len(rows)
    for row in rows:
        check_row(row)
        assert row["op"] in output


def check_row(row: dict[str, Any]) -> None:
    assert row.keys() >= KEYS
    assert row["ours_us"] > 0
    assert row["bytes"] > 0
    low, high = row["ours_quartiles"]
    assert low <= row["ours_us"] <= high
    if row["peer"] is not None:
        assert row["peer_us"] == min(peer["us"] for peer in row["peers"].values() if "us" in peer)
        assert row["ratio"] == pytest.approx(row["peer_us"] / row["ours_us"], abs=2e-3)
    assert not [peer for peer in row["peers"].values() if "error" in peer]
    if row["op"].startswith("overhead"):
        assert row["gbs"] is row["copy_gbs"] is row["percent_of_copy"] is None
    else:
        assert row["gbs"] == pytest.approx(row["bytes"] / row["ours_us"] / 1e3, rel=0.01, abs=0.06)
        # Both rates are given to a tenth, which shows where they are small.
        ratio = row["gbs"] / row["copy_gbs"]
        assert row["percent_of_copy"] == pytest.approx(100 * ratio, rel=0.01, abs=1 + 6 * (1 + ratio) / row["copy_gbs"])


def test_quick_accuracy(device: str, tmp_path: Path) -> None:
    """In units of the rounding of the type that is computed in, errors grow with the length at most."""
    if device == "cuda":
        pytest.importorskip("cuda.bindings.runtime", reason="the GPU's benchmarks need baracuda[cuda]")
    file = tmp_path / "accuracy.json"
    run(
        "-m",
        "benchmarks.accuracy",
        "--quick",
        "--device",
        device,
        "--json",
        str(file),
        "--commit",
        "abc",
        "--peers",
        "",
    )
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 2 * 5 * 4 * 2
    for row in rows:
        stored = {"float32": 2.0**-24, "float64": 2.0**-53, "float16": 2.0**-11, "bfloat16": 2.0**-8}[row["dtype"]]
        computed = min(stored, 2.0**-24)
        error = row["baracuda"]
        assert error["mean"] <= error["max"]
        if row["kind"] == "logcumsumexp":
            # Outputs are below 16, and the gradient sees their rounding as a factor.
            assert error["max"] <= 16 * 8 * (stored + row["length"] * computed), row
        else:
            assert error["max"] <= 4 * (stored + row["length"] * computed), row


def test_select() -> None:
    output = run("-m", "benchmarks", "layout", "--quick", "--device", "cpu", "--peers", "", "--select", "kv64.*int8")
    lines = [line for line in output.splitlines() if line.startswith("write_slice")]
    assert len(lines) == 1
    assert "int8" in lines[0]


def test_committed_results_have_the_form() -> None:
    for file in (ROOT / "benchmarks" / "results").glob("*/*.json"):
        results = json.loads(file.read_text())
        assert results["meta"]["quick"] is False, file
        for row in results["rows"]:
            assert row.keys() >= KEYS, file


def test_performance_page_is_of_the_committed_results() -> None:
    run("scripts/performance.py", "--check")


def test_kv_cache_example() -> None:
    output = run("examples/kv_cache.py")
    assert "All 5 caches are what NumPy has" in output
    assert len(output.splitlines()) < 30


def test_paged_decoder_example() -> None:
    output = run("examples/paged_decoder.py")
    assert "every step agrees with the dense cache" in output
    assert len(output.splitlines()) < 30
