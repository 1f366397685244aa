#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes docs/performance.md with its plots, and docs/accuracy.md, from the results under benchmarks/results.

    scripts/performance.py            write them
    scripts/performance.py --check    fail if the committed ones are not what would be written

It needs only Python, and the same results give the same bytes.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
PAGE = DOCS / "performance.md"
PLOTS = DOCS / "performance"
ACCURACY = DOCS / "accuracy.md"

INTRODUCTION = """\
<!-- Made by scripts/performance.py from benchmarks/results. Change those and run it again. -->

# Performance

The library against other libraries, and against a copy of the same number of bytes.

Everything in a row was timed in the same run, in turns: the library, each peer, and the copy. A **ratio** is
the fastest peer's time over ours. **% of copy** is our rate over the rate of a device-to-device copy that moves
as many bytes (its size rounded to a multiple of 2 MiB); bytes count the fewest reads and writes that the
operation can do with, so 100 is as fast as memory goes. Times are medians, in microseconds.

Buffers rotate, so that no call finds its data in the L2 cache. Operations under 100 µs are timed by replaying a
CUDA graph of many calls, longer ones by events around each. JAX can't be captured from outside and is timed by
the host's clock over many calls. [benchmarks/README.md](../benchmarks/README.md) has the details, and how to run
this on your card:

```
python -m benchmarks FAMILY --save && scripts/performance.py
```
"""

NOTHING = "\nNo results have been committed yet.\n"

ACCURACY_INTRODUCTION = """\
<!-- Made by scripts/performance.py from benchmarks/results. Change those and run it again. -->

# Accuracy

Errors of the scans and their gradients against the definition in extended precision, ours / PyTorch's on the same
GPU, in units of the dtype's rounding (2⁻²⁴ for float32, 2⁻⁵³, 2⁻¹¹, 2⁻⁸): the largest over all elements, and below it
the mean. An error is relative to the sum of the magnitudes of what makes up the element, for `logcumsumexp` absolute.
Inputs are normal; for `cumprod` they make products that wander around 1. Where ours is the larger one by more than a
hundredth, the cell is in bold. How it is measured: [benchmarks/accuracy.py](../benchmarks/accuracy.py).
"""

#: What the rows of a family are.
NOTES = {
    "kv_cache": """\
*decode* appends the keys and values of one token for each sequence of a batch to pages that are anywhere,
*prefill* those of whole prompts; shapes are (tokens, heads, dim). No peer converts on the way. *dynamic_write_slice*
writes one token for each sequence into a dense cache, at positions that are on the device: the same for all
(torch's slice has its position frozen at capture) or *ragged*.
""",
    "layout": """\
*block* writes a square block into a square of twice its extents, *kv64* writes 64 positions into a key/value
cache, *whole* and *chunk* write contiguous memory, *transposed* reads a transposed source, and *channels_last*
writes a row-major source into a tensor that is stored with its channels last. int4 is packed; no peer has it.
""",
    "scan": """\
Shapes with their axis: rows that a block holds, an axis in front, few long rows, one row, short rows, an axis in the
middle. *fw* and *bw* are the scan and its gradient; gradients of `cummax` find the maxima by the saved output.
torch's exclusive scans don't exist, its reversed ones are flipped on both sides, and a linear recurrence is a doubling
over whole tensors in torch and `associative_scan` in JAX.
""",
    "segment": """\
Shapes are (rows, columns, segments) with ids at random unless noted. Sums have the same bits in every run.
""",
    "image": """\
1000 boxes of 16 to 296 pixels on a map of (2, 256, 200, 200) at a scale of 1/4. Gradients have the same bits in every
run. Sets of boxes for `nms` are described in benchmarks/families/image.py.
""",
    "overhead": """\
What a call costs the host, in µs. *Bare* is `cudaLaunchKernelExC` of the same kernel with the same arguments
and attributes, from a loop in C in the same run; *over it* is the median of the differences between neighbouring
batches. The operands are the same in every call, so `run` issues the launches that it remembers for them; a
bound plan has no operands to look at, and the function form also finds the plan. Peers write the same slice:
*torch view* into a view made beforehand, *torch* slicing at every call. The sums are of (4, 64) elements: the
function forms, the operators of `baracuda.torch` and jitted JAX also make the output, `run` and `bound` write
to one that is there.
""",
}

#: What the name of a plot ends in that shows how times grow: of rows with this note, over their first extent.
GROWTH = "-growth"
#: More bars than this make several plots, one for each dtype.
MOST_BARS = 40


@dataclass(frozen=True)
class Family:
    """The results of one family on one card."""

    card: str
    name: str
    meta: dict[str, Any]
    rows: list[dict[str, Any]]


def load() -> list[Family]:
    """All results, by card and family."""
    families = []
    for file in sorted(RESULTS.glob("*/*.json")):
        results = json.loads(file.read_text(encoding="utf-8"))
        families.append(Family(file.parent.name, file.stem, results["meta"], results["rows"]))
    return families


def outputs(families: Sequence[Family]) -> dict[Path, str]:
    """Every file of the page, with its text."""
    files: dict[Path, str] = {}
    text = [INTRODUCTION]
    card = ""
    for family in families:
        if family.card != card:
            card = family.card
            text.append(f"\n## {family.meta['card']}\n")
        text.append(f"\n### {family.name}\n")
        text.append("\n" + provenance(family.meta) + "\n")
        if family.name in NOTES:
            text.append("\n" + NOTES[family.name])
        for suffix, rows in parts(family):
            path = PLOTS / f"{card}-{family.name}{suffix}.svg"
            if suffix == GROWTH:
                files[path] = plot_growth(rows)
            else:
                files[path] = plot_overhead(rows) if family.name == "overhead" else plot_bandwidth(rows)
            label = f"{family.name}{suffix.replace('-', ' ')} on {family.meta['card']}"
            text.append(f"\n![{label}]({path.relative_to(DOCS).as_posix()})\n")
        text.append("\n" + (overhead_table if family.name == "overhead" else bandwidth_table)(family.rows))
    if not families:
        text.append(NOTHING)
    return {PAGE: "".join(text), ACCURACY: accuracy_page(), **files}


ROUNDING = {"float32": 2.0**-24, "float64": 2.0**-53, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def accuracy_page() -> str:
    """Errors, for each card a table of every kind."""
    text = [ACCURACY_INTRODUCTION]
    for file in sorted(RESULTS.glob("*/accuracy/*.json")):
        results = json.loads(file.read_text(encoding="utf-8"))
        rows = results["rows"]
        text.append(f"\n## {results['meta']['card']}\n\n{provenance(results['meta'])}\n")
        lengths = sorted({row["length"] for row in rows})
        for kind, direction in dict.fromkeys((row["kind"], row["direction"]) for row in rows):
            text.append(f"\n### {kind}, {direction}\n\n")
            body = []
            for dtype in dict.fromkeys(row["dtype"] for row in rows):
                found = {
                    row["length"]: row
                    for row in rows
                    if (row["kind"], row["direction"], row["dtype"]) == (kind, direction, dtype)
                }
                for what in ("max", "mean"):
                    cells = [error_cell(found[length], what, dtype) if length in found else "–" for length in lengths]
                    body.append([dtype if what == "max" else "", what, *cells])
            text.append(table(["dtype", "", *(f"{length:,}" for length in lengths)], body, 2))
    return "".join(text) if len(text) > 1 else text[0] + NOTHING


def error_cell(row: dict[str, Any], what: str, dtype: str) -> str:
    """Ours and PyTorch's, in roundings."""
    values = [row[name][what] / ROUNDING[dtype] for name in ("baracuda", "torch") if name in row]
    text = " / ".join(f"{value:.3g}" for value in values)
    return f"**{text}**" if len(values) == 2 and values[0] > 1.01 * values[1] else text


def parts(family: Family) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The rows of each plot, with what its name ends in."""
    growing = [row for row in family.rows if row["note"] == "growth"]
    bars = [row for row in family.rows if row["note"] != "growth"]
    if len(bars) <= MOST_BARS:
        yield "", bars
    else:
        for dtype in dict.fromkeys(row["dtype"] for row in bars):
            yield f"-{dtype}", [row for row in bars if row["dtype"] == dtype]
    if len(growing) > 1:
        yield GROWTH, growing


def provenance(meta: dict[str, Any]) -> str:
    """A paragraph: what was measured, when, and with what."""
    versions = meta["versions"]
    names = {"torch": "PyTorch", "cupy": "CuPy", "jax": "JAX", "numpy": "NumPy", "python": "Python"}
    listed = [
        f"{names.get(name, name)} {version}"
        for name, version in sorted(versions.items())
        if name not in ("baracuda", "ml_dtypes", "cuda-bindings")
    ]
    commit = str(meta["commit"])[:12] if meta["commit"] else "unknown"
    changed = ", with changes that were not committed" if meta.get("modified") else ""
    if meta["driver"] is not None:
        listed = [f"driver {meta['driver']}", f"CUDA {meta['cuda']}", *listed]
    sentences = [
        f"baracuda {versions.get('baracuda', '?')} at `{commit}`{changed}, {meta['date']}.",
        f"With {', '.join(listed)}.",
    ]
    if not meta.get("complete", True):
        sentences.append("The run was cut short: rows at the end are missing.")
    for name, reason in meta.get("missing_peers", {}).items():
        sentences.append(f"Without {names.get(name, name)} ({reason}).")
    return " ".join(sentences)


def number(value: float | None, digits: int = 1) -> str:
    """With thousands separated; an absent one as a dash."""
    return "–" if value is None else f"{value:,.{digits}f}"


def microseconds(value: float | None) -> str:
    """With three significant digits or so."""
    return number(value, 0 if value is not None and value >= 1000 else 1 if value is not None and value >= 10 else 2)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], texts: int) -> str:
    """In Markdown; the first `texts` columns are aligned to the left."""
    rule = ["---" if column < texts else "---:" for column in range(len(head))]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, rule, *rows))


def bandwidth_table(rows: Sequence[dict[str, Any]]) -> str:
    """Of operations that are judged by the bytes they move."""
    head = ["operation", "shape", "", "dtype", "µs", "peer", "µs", "ratio", "GB/s", "% of copy"]
    body = [
        [
            row["op"],
            row["shape"],
            row["note"],
            row["dtype"],
            microseconds(row["ours_us"]),
            row["peer"] or "–",
            microseconds(row["peer_us"]),
            f"{number(row['ratio'], 2)}×" if row["ratio"] is not None else "–",
            number(row["gbs"], 0),
            number(row["percent_of_copy"], 0),
        ]
        for row in rows
    ]
    return table(head, body, 4)


def overhead_table(rows: Sequence[dict[str, Any]]) -> str:
    """Of the host's time."""
    head = ["call", "operands", "µs", "bare", "over it", "peer", "µs", "ratio"]
    body = [
        [
            row["op"].removeprefix("overhead "),
            row["note"],
            number(row["ours_us"], 2),
            number(row.get("bare_us"), 2),
            number(row.get("over_bare_us"), 2),
            row["peer"] or "–",
            number(row["peer_us"], 2),
            f"{number(row['ratio'], 1)}×" if row["ratio"] is not None else "–",
        ]
        for row in rows
    ]
    return table(head, body, 2)


@dataclass(frozen=True)
class Bar:
    """A group of bars: a label, and for each series its value and the text at its end."""

    label: str
    values: tuple[float | None, ...]
    texts: tuple[str, ...]


def plot_bandwidth(rows: Sequence[dict[str, Any]]) -> str:
    """Percent of the copy, ours and the fastest peer's."""
    bars = []
    for row in rows:
        ours = row["percent_of_copy"]
        theirs = None if row["ratio"] is None else ours / row["ratio"]
        name = " ".join(part for part in (row["op"], row["shape"], row["note"], row["dtype"]) if part)
        peer = "" if theirs is None else f"{theirs:.0f}  {row['peer']}"
        bars.append(Bar(name, (ours, theirs), (f"{ours:.0f}", peer)))
    return chart("% of a copy of the same bytes: more is faster", bars, ("baracuda", "fastest peer"), mark=100)


def plot_overhead(rows: Sequence[dict[str, Any]]) -> str:
    """Microseconds of host time."""
    bars = []
    for row in rows:
        bare, peer = row.get("bare_us"), row["peer_us"]
        bars.append(
            Bar(
                f"{row['op'].removeprefix('overhead ')}, {row['note']}",
                (row["ours_us"], bare, peer),
                (
                    f"{row['ours_us']:.2f}",
                    "" if bare is None else f"{bare:.2f}",
                    "" if peer is None else f"{peer:.2f}  {row['peer']}",
                ),
            )
        )
    return chart("µs of host time a call: less is faster", bars, ("baracuda", "bare launch", "fastest peer"))


COLOURS = {"baracuda": "#0f766e", "bare launch": "#d97706", "fastest peer": "#9ca3af"}
#: In pixels. Text is measured by its count of characters, so that no font is needed to draw.
THICKNESS, GAP, GLYPH, PLOT_WIDTH, END = 11, 9, 6.2, 420, 110


def chart(title: str, bars: Sequence[Bar], series: Sequence[str], mark: float | None = None) -> str:
    """Horizontal bars as SVG. `mark` draws a line that they are judged by."""
    left = 20 + max(len(bar.label) for bar in bars) * GLYPH
    top = 62
    height_of = [THICKNESS * sum(value is not None for value in bar.values) + GAP for bar in bars]
    width, height = left + PLOT_WIDTH + END, top + sum(height_of) + 12
    largest = max(value for bar in bars for value in bar.values if value is not None)
    scale = PLOT_WIDTH / max(largest, mark or 0)
    size = f'width="{width:.0f}" height="{height}"'
    style = 'font-family="system-ui, sans-serif" font-size="11" fill="#111827"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width:.0f} {height}" {style}>',
        f"<title>{html.escape(title)}</title>",
        f'<rect {size} fill="#ffffff"/>',
        f'<text x="12" y="22" font-size="13" font-weight="600">{html.escape(title)}</text>',
    ]
    x = 12.0
    for name in series:
        lines.append(f'<rect x="{x:.1f}" y="34" width="11" height="11" fill="{COLOURS[name]}"/>')
        lines.append(f'<text x="{x + 16:.1f}" y="43">{html.escape(name)}</text>')
        x += 36 + len(name) * GLYPH
    if mark is not None:
        x = left + mark * scale
        lines.append(f'<path d="M{x:.1f} {top - 6}V{height - 8}" stroke="#6b7280" stroke-dasharray="3 3"/>')
    y = top
    for bar, used in zip(bars, height_of, strict=True):
        middle = y + (used - GAP) / 2 + 4
        lines.append(f'<text x="{left - 8:.1f}" y="{middle:.1f}" text-anchor="end">{html.escape(bar.label)}</text>')
        at = y
        for value, text, name in zip(bar.values, bar.texts, series, strict=True):
            if value is None:
                continue
            length = value * scale
            lines.append(
                f'<rect x="{left:.1f}" y="{at}" width="{length:.1f}" height="{THICKNESS - 1}" fill="{COLOURS[name]}"/>'
            )
            end = f'<text x="{left + length + 5:.1f}" y="{at + 9}" font-size="10" fill="#374151">'
            lines.append(f"{end}{html.escape(text)}</text>")
            at += THICKNESS
        y += used
    return "\n".join([*lines, "</svg>"]) + "\n"


def plot_growth(rows: Sequence[dict[str, Any]]) -> str:
    """Microseconds over the first extent of the shape, both in powers of ten, a line for each operation and dtype."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        extent = int(re.findall(r"\d+", row["shape"])[0])
        lines.setdefault(f"{row['op']} {row['dtype']}", []).append((extent, row["ours_us"]))
    return log_log("µs over the first extent; dashed: in proportion to it", lines)


def log_log(title: str, lines: dict[str, list[tuple[float, float]]]) -> str:
    """Lines through points as SVG. A dashed line through the last point of each is what goes in proportion."""
    left, top, side, right, bottom = 70, 44, 420, 210, 40
    points = [point for line in lines.values() for point in line]
    low = [math.floor(min(math.log10(point[axis]) for point in points)) for axis in (0, 1)]
    high = [math.ceil(max(math.log10(point[axis]) for point in points)) for axis in (0, 1)]

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = ((math.log10(v) - low[i]) / max(high[i] - low[i], 1) for i, v in enumerate((x, y)))
        return left + side * across, top + side * (1 - up)

    width, height = left + side + right, top + side + bottom
    size = f'width="{width}" height="{height}"'
    style = 'font-family="system-ui, sans-serif" font-size="11" fill="#111827"'
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}" {style}>',
        f"<title>{html.escape(title)}</title>",
        f'<rect {size} fill="#ffffff"/>',
        f'<text x="12" y="22" font-size="13" font-weight="600">{html.escape(title)}</text>',
    ]
    for axis in (0, 1):
        for power in range(low[axis], high[axis] + 1):
            x, y = place(10.0**power, 10.0 ** low[1]) if axis == 0 else place(10.0 ** low[0], 10.0**power)
            path = f"M{x:.1f} {top}V{top + side}" if axis == 0 else f"M{left} {y:.1f}H{left + side}"
            at = f'x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle"'
            if axis == 1:
                at = f'x="{left - 8}" y="{y + 4:.1f}" text-anchor="end"'
            svg.append(f'<path d="{path}" stroke="#e5e7eb"/>')
            svg.append(f"<text {at}>{10**power:,}</text>" if power >= 0 else f"<text {at}>{10.0**power:g}</text>")
    for name, line in lines.items():
        colour = COLOURS["baracuda"]
        ordered = sorted(line)
        last_x, last_y = ordered[-1]
        first_x = max(ordered[0][0], 10.0 ** low[1] / last_y * last_x)
        (x0, y0), (x1, y1) = place(first_x, last_y * first_x / last_x), place(last_x, last_y)
        svg.append(f'<path d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}" stroke="#9ca3af" stroke-dasharray="3 3"/>')
        places = [place(x, y) for x, y in ordered]
        joined = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        svg.append(f'<path d="M{joined}" fill="none" stroke="{colour}" stroke-width="2"/>')
        svg += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        svg.append(f'<text x="{x1 + 8:.1f}" y="{y1 + 4:.1f}">{html.escape(name)}</text>')
    return "\n".join([*svg, "</svg>"]) + "\n"


def stale(files: dict[Path, str]) -> list[str]:
    """What the committed files lack, or have too much."""
    wrong = [path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    wrong += [path for path in PLOTS.glob("*.svg") if path not in files]
    return sorted(path.relative_to(ROOT).as_posix() for path in wrong)


def write(files: dict[Path, str]) -> None:
    """Puts the files there and removes the plots that are no longer made."""
    for path in PLOTS.glob("*.svg"):
        if path not in files:
            path.unlink()
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Writes or checks."""
    parser = argparse.ArgumentParser(description=re.split(r"\n\s*\n", __doc__ or "")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the files are stale")
    options = parser.parse_args(argv)
    files = outputs(load())
    if not options.check:
        write(files)
        return 0
    for path in stale(files):
        print(f"{path} is stale: run scripts/performance.py", file=sys.stderr)
    return 1 if stale(files) else 0


if __name__ == "__main__":
    sys.exit(main())
