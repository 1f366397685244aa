# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.accuracy``: errors of the scans and their gradients, beside PyTorch's on the same device.

Every cell compares with the definition in extended precision (80 bits on x86). The inputs are rounded to the dtype
first, so that only what the scan does is counted. An error is relative to the sum of the magnitudes of the terms
that make up the element, for ``logcumsumexp`` absolute.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import baracuda as bc
from baracuda.dtypes import numpy_dtype
from benchmarks import report
from benchmarks.harness import Lab

__all__ = ["main"]

KINDS = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")
DTYPES = ("float32", "float64", "float16", "bfloat16")
LENGTHS = (10**2, 10**3, 10**4, 10**5, 10**6, 10**7)
#: What the dtypes round to infinity.
TOO_LARGE = {"float32": 2.0**128, "float64": np.longdouble(2) ** 1024, "float16": 65520, "bfloat16": 2.0**128}
#: Normal numbers.
SMALLEST = {"float32": 2.0**-126, "float64": 2.0**-1022, "float16": 2.0**-14, "bfloat16": 2.0**-126}
UFUNCS = {
    "cumsum": np.add,
    "cumprod": np.multiply,
    "cummax": np.maximum,
    "cummin": np.minimum,
    "logcumsumexp": np.logaddexp,
}


@dataclass
class Cell:
    """Inputs of one cell, with what the exact results are and what errors are relative to."""

    kind: str
    dtype: str
    length: int
    x: Any
    dy: Any
    y: Any = None
    dx: Any = None
    y_scale: Any = 1
    dx_scale: Any = 1

    @classmethod
    def make(cls, kind: str, dtype: str, length: int) -> Cell:
        """Many short rows or one long one, of values whose scans stay in the range of float16."""
        rng = np.random.default_rng([length, KINDS.index(kind)])
        shape = (max(1, min(1000, 10**6 // length)), length)
        if kind == "cumprod":
            # Neighbours cancel but for a little, so that products wander around 1.
            x = np.exp(rng.normal(scale=0.5, size=shape))
            x[:, 1::2] = np.exp(rng.normal(scale=1e-3, size=x[:, 1::2].shape)) / x[:, : x.shape[1] // 2 * 2 : 2]
        else:
            x = rng.normal(size=shape)
        as_stored = numpy_dtype(dtype)
        cell = cls(kind, dtype, length, x.astype(as_stored), rng.normal(size=shape).astype(as_stored))
        cell.solve()
        return cell

    def solve(self) -> None:
        """The definitions."""
        x, dy = self.x.astype(np.longdouble), self.dy.astype(np.longdouble)
        self.y = UFUNCS[self.kind].accumulate(x, -1)
        if self.kind == "cumsum":
            self.y_scale = np.add.accumulate(np.abs(x), -1)
            self.dx, self.dx_scale = _from_the_end(dy), _from_the_end(np.abs(dy))
        elif self.kind == "cumprod":
            self.y_scale = np.abs(self.y)
            self.dx = _from_the_end(dy * self.y) / x
            self.dx_scale = _from_the_end(np.abs(dy * self.y)) / np.abs(x)
        elif self.kind == "logcumsumexp":
            self.dx = np.exp(x) * _from_the_end(dy * np.exp(-self.y))
            self.dx_scale = np.exp(x) * _from_the_end(np.abs(dy) * np.exp(-self.y))
        else:
            # Ties go to the last, as PyTorch has it; values from a normal distribution have few.
            places = np.arange(self.length)
            last = np.maximum.accumulate(np.where(x == self.y, places, 0), -1)
            self.dx, self.dx_scale = np.zeros_like(dy), np.zeros_like(dy)
            for row in range(len(x)):
                np.add.at(self.dx[row], last[row], dy[row])
                np.add.at(self.dx_scale[row], last[row], np.abs(dy[row]))


def _from_the_end(values: Any) -> Any:
    return np.add.accumulate(values[:, ::-1], -1)[:, ::-1]


def errors(got: Any, exact: Any, scale: Any) -> dict[str, float]:
    """The largest and the mean relative error; below the normal numbers of the dtype relative to the smallest.

    Results that the dtype can't hold are left out.
    """
    inside = np.abs(exact) < TOO_LARGE[got.dtype.name]
    off = np.abs(got.astype(np.longdouble) - exact)[inside]
    relative = off / np.maximum(np.broadcast_to(scale, exact.shape)[inside], SMALLEST[got.dtype.name])
    return {"max": float(f"{relative.max():.4g}"), "mean": float(f"{relative.mean():.4g}")}


def ours(cell: Cell, device: str) -> tuple[Any, Any]:
    """Outputs and gradients of the library."""
    extremum = cell.kind in ("cummax", "cummin")
    common = {"kind": cell.kind, "shape": cell.x.shape, "axis": 1, "dtype": cell.dtype, "device": device}
    forward = bc.ScanPlan(**common, **({"ties": "last"} if extremum else {}))
    backward = bc.ScanBackwardPlan(**common, **({"ties": "last", "saved": "x"} if extremum else {}))
    on_device = {
        "x": bc.asarray(cell.x, device=device),
        "dy": bc.asarray(cell.dy, device=device),
        "y": bc.asarray(np.zeros_like(cell.x), device=device),
        "dx": bc.asarray(np.zeros_like(cell.x), device=device),
    }
    for plan in (forward, backward):
        plan.run(**{operand.name: on_device[operand.name] for operand in plan.operands})
    return on_device["y"].numpy(), on_device["dx"].numpy()


def torchs(cell: Cell, torch: Any, device: str) -> tuple[Any, Any]:
    """The same of PyTorch."""

    def tensor(values: Any) -> Any:
        bits = values.view(np.uint16) if cell.dtype == "bfloat16" else values
        return torch.from_numpy(bits.copy()).view(getattr(torch, cell.dtype)).to(device)

    def array(values: Any) -> Any:
        values = values.detach().cpu()
        if cell.dtype == "bfloat16":
            return values.view(torch.uint16).numpy().view(numpy_dtype("bfloat16"))
        return values.numpy()

    leaf = tensor(cell.x).requires_grad_()
    y = getattr(torch, cell.kind)(leaf, 1)
    y = y if cell.kind not in ("cummax", "cummin") else y.values
    y.backward(tensor(cell.dy))
    return array(y), array(leaf.grad)


def rows(lab: Lab) -> Iterator[dict[str, Any]]:
    """A row for each cell, forward and backward."""
    torch = lab.peers.get("torch")
    lengths = LENGTHS[:2] if lab.quick else LENGTHS
    wanted = [(kind, dtype, length) for length in lengths for kind in KINDS for dtype in DTYPES]
    with ThreadPoolExecutor() as pool:
        # A few at a time: the long ones are large.
        for start in range(0, len(wanted), 16):
            for cell in pool.map(lambda which: Cell.make(*which), wanted[start : start + 16]):
                if not lab.select(f"{cell.kind} {cell.dtype} {cell.length}"):
                    continue
                found = {"baracuda": ours(cell, lab.device)}
                if torch is not None:
                    found["torch"] = torchs(cell, torch, lab.device)
                for which, direction in enumerate(("forward", "backward")):
                    exact, scale = ((cell.y, cell.y_scale), (cell.dx, cell.dx_scale))[which]
                    yield {
                        "kind": cell.kind,
                        "direction": direction,
                        "dtype": cell.dtype,
                        "length": cell.length,
                        **{name: errors(results[which], exact, scale) for name, results in found.items()},
                    }


def _all(name: str) -> bool:
    del name
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, and writes the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--quick", action="store_true", help="only short rows")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if bc.cuda_device_count() else "cpu")
    parser.add_argument("--peers", metavar="NAMES", help="only these, with commas between; '' for none")
    parser.add_argument("--commit", help="what the results are of, where git can't tell")
    options = parser.parse_args(argv)
    peers = None if options.peers is None else tuple(filter(None, options.peers.split(",")))
    lab: Lab
    if options.device == "cuda":
        from benchmarks.cuda_lab import CudaLab  # noqa: PLC0415

        lab = CudaLab(quick=options.quick, select=_all, peers=peers)
    else:
        from benchmarks.cpu_lab import CpuLab  # noqa: PLC0415

        lab = CpuLab(quick=options.quick, select=_all, peers=peers)
    found = []
    for row in rows(lab):
        found.append(row)
        texts = [
            f"{name} {row[name]['max']:.2e} {row[name]['mean']:.2e}" for name in ("baracuda", "torch") if name in row
        ]
        print(
            f"{row['kind']:13} {row['direction']:8} {row['dtype']:8} {row['length']:9}  {'  '.join(texts)}", flush=True
        )
    if options.json is not None:
        report.write(options.json, report.meta(lab, "accuracy", options.commit), found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
