# SPDX-License-Identifier: Apache-2.0
"""Which kernels are launched.

The kernels of an operator give the same results, so no other test would see that one is never taken any more. Here a
captured run is asked for its kernels, on shapes for which other tests compare results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import driver
import pytest
import support

import baracuda as bc

pytestmark = pytest.mark.requires("gpu")


@dataclass(frozen=True)
class Case:
    """A plan and what it launches, among others.

    Attributes:
        path: what the plan says.
        kernels: what is launched for row-major operands at addresses that are multiples of 64.
        plan: the class of the plan.
        fields: of its descriptor.
        elsewhere: what is launched in place of `kernels` for operands that are one element further on; empty: the same.
        engine: whether it takes the copy engine, from sm_90 on.
        deterministic: whether results must be.
    """

    path: str
    kernels: tuple[str, ...]
    plan: type[bc.Plan]
    fields: dict[str, Any]
    elsewhere: tuple[str, ...] = ()
    engine: bool = False
    deterministic: bool = True

    @property
    def name(self) -> str:
        kind = self.fields.get("kind", "")
        return " ".join(filter(None, [self.plan.__name__, kind, self.fields["dtype"], *self.kernels]))


def pooling(planes: tuple[int, int], shape: tuple[int, ...], out: tuple[int, ...], dtype: str, **more: Any) -> Any:
    """Fields for windows of two."""
    axes = "dhw"[-len(shape) :]
    extents = zip(axes, shape, out, strict=True)
    made: dict[str, Any] = {"batch": planes[0], "channels": planes[1], "dtype": dtype, **more}
    for axis, cells, outputs in extents:
        made |= {f"{axis}_in": cells, f"window_{axis}": 2, f"{axis}_out": outputs}
    return made


def segments(kind: str, size: tuple[int, int, int], dtype: str, ids: str = "unsorted", **more: Any) -> Any:
    rows, columns, count = size
    return {
        "kind": kind, "num_inputs": rows, "embedding_dim": columns, "num_segments": count, "dtype": dtype, "ids": ids,
        **more,
    }  # fmt: skip


def rois(count: int, dtype: str, *, channels: int = 40) -> Any:
    return {"n": 2, "c": channels, "h": 11, "w": 13, "num_rois": count, "pooled_h": 5, "pooled_w": 4, "dtype": dtype}


POOL_2D, POOL_3D = bc.FractionalMaxPool2dPlan, bc.FractionalMaxPool3dPlan
POOL_2D_BACKWARD, POOL_3D_BACKWARD = bc.FractionalMaxPool2dBackwardPlan, bc.FractionalMaxPool3dBackwardPlan
REDUCE, REDUCE_BACKWARD = bc.SegmentReducePlan, bc.SegmentReduceBackwardPlan

CASES = [
    # Pooling.
    Case("rows", ("pool_rows",), POOL_2D, pooling((2, 3), (9, 13), (6, 9), "float32")),
    *(
        Case("rows", ("pool_staged",), plan, pooling((1, 2), shape, out, dtype), ("pool_rows",), engine=True)
        for plan, shape, out, dtype in (
            (POOL_2D, (12, 40), (11, 37), "float16"),
            (POOL_3D, (4, 48, 50), (2, 34, 35), "bfloat16"),
            (POOL_3D, (4, 48, 50), (2, 34, 35), "float32"),
        )
    ),
    *(
        Case("sweep", ("pool_sweep",), POOL_2D_BACKWARD,
             pooling((2, 66), (40, 126), (28, 88), dtype, index_dtype=index_dtype), ("pool_runs",), engine=True)
        for dtype in ("float16", "bfloat16", "float32")
        for index_dtype in ("int32", "int64")
    ),
    *(
        Case("runs", ("pool_runs",), POOL_2D_BACKWARD, pooling((1, 3), (9, 126), (6, 90), dtype))
        for dtype in ("float16", "bfloat16", "float32")
    ),
    *(
        Case("slabs", ("pool_slabs",), POOL_3D_BACKWARD,
             pooling((1, 3), (5, 17, 50), (3, 12, 36), dtype, index_dtype=index_dtype), (elsewhere,), engine=True)
        for dtype, elsewhere in (("float16", "pool_runs"), ("bfloat16", "pool_runs"), ("float32", "pool_tiles"))
        for index_dtype in ("int32", "int64")
    ),
    Case("patches", ("pool_patches",), POOL_3D_BACKWARD,
         pooling((1, 2), (4, 48, 50), (2, 34, 35), "float32", placement="torch")),
    Case("tiles", ("pool_tiles",), POOL_2D_BACKWARD, pooling((2, 3), (9, 13), (6, 9), "float64")),
    # Segments.
    *(
        Case("tiles", ("reduce_tiles", "join_tiles"), REDUCE,
             segments(kind, size, dtype, "sorted", index_dtype=index_dtype), (elsewhere,), engine=True)
        for kind, dtype, index_dtype in (("max", "bfloat16", "int64"), ("min", "float16", "int32"))
        for size, elsewhere in (
            ((16500, 64, 100), "segment_any"),
            ((120001, 32, 2500), "segment_any"),
            ((30001, 256, 3), "segment_few"),
            ((40003, 64, 20000), "segment_any"),
        )
    ),
    Case("few", ("segment_few",), REDUCE, segments("sum", (17000, 2, 30), "float32")),
    Case("shared", ("segment_shared",), REDUCE, segments("max", (70000, 24, 90), "float32")),
    Case("buckets", ("fill_buckets", "bucket_extremes"), REDUCE, segments("max", (16400, 1, 4000), "float32")),
    Case("buckets", ("fill_buckets", "bucket_sums"), REDUCE, segments("sum", (40000, 1, 3000), "float32")),
    Case("runs", ("reduce_runs", "join_runs"), REDUCE, segments("sum", (33333, 1, 16000), "float32", "sorted")),
    Case("runs", ("reduce_ranges",), REDUCE, segments("sum", (33333, 1, 16000), "float32", "offsets")),
    Case("atomic", ("add_rows",), REDUCE, segments("sum", (900, 8, 70), "float32"), deterministic=False),
    Case("sort", ("count_digits", "move_rows"), REDUCE, segments("sum", (5000, 24, 900), "float32")),
    Case("rows", ("segment_own_rows",), REDUCE, segments("sum", (5000, 24, 900), "float32", "sorted")),
    Case("chunks", ("segment_any",), REDUCE, segments("sum", (300, 5, 40), "float32", "sorted")),
    Case("sort", ("visit_owned",), REDUCE_BACKWARD, segments("max", (9000, 16, 900), "float32")),
    Case("spread", ("gather_gradient",), REDUCE_BACKWARD, segments("sum", (900, 8, 70), "float32")),
    # Scans.
    Case("rows", ("scan_rows",), bc.ScanPlan, {"kind": "cumsum", "shape": (140, 1024), "axis": 1, "dtype": "float32"}),
    *(
        Case("long rows", ("scan_stream",), plan,
             {"kind": kind, "shape": (3, 47120), "axis": 1, "dtype": dtype, **more}, ("scan_long_rows",), engine=True)
        for plan, kind, dtype, more in (
            (bc.ScanPlan, "cumsum", "float32", {}),
            (bc.ScanPlan, "logcumsumexp", "bfloat16", {}),
            (bc.ScanPlan, "cummax", "float32", {"indices": True}),
            (bc.ScanBackwardPlan, "cumprod", "float32", {}),
            (bc.ScanBackwardPlan, "cummax", "bfloat16", {}),
        )
    ),
    Case("long rows", ("scan_long_rows",), bc.ScanPlan,
         {"kind": "cumsum", "shape": (3, 47120), "axis": 1, "dtype": "int32"}),
    *(
        Case("columns", ("scan_strips",), plan,
             {"kind": kind, "shape": (4, 150, 8200), "axis": 1, "dtype": "bfloat16"}, ("scan_columns",), engine=True)
        for plan, kind in ((bc.ScanPlan, "cumsum"), (bc.ScanPlan, "logcumsumexp"), (bc.ScanBackwardPlan, "cummax"))
    ),
    Case("columns", ("scan_columns",), bc.ScanPlan,
         {"kind": "cumsum", "shape": (4, 150, 8200), "axis": 1, "dtype": "float32"}),
    # Images.
    Case("turned", ("roi_turn_map", "roi_align_lines"), bc.RoiAlignPlan, rois(30, "bfloat16")),
    Case("turned", ("roi_turn_map", "roi_align_strips"), bc.RoiAlignPlan, rois(30, "float32")),
    Case("rows", ("roi_align_rows",), bc.RoiAlignPlan, rois(30, "float64")),
    Case("tiles", ("roi_align_bands", "roi_align_tiles"), bc.RoiAlignBackwardPlan, rois(30, "float32")),
    Case("atomic", ("roi_align_add",), bc.RoiAlignBackwardPlan, rois(8, "float32"), deterministic=False),
    Case("turned", ("roi_turn_map", "roi_pool_lines"), bc.RoiPoolPlan, rois(30, "float32")),
    Case("any", ("roi_pool_any",), bc.RoiPoolPlan, rois(30, "float32", channels=31)),
    Case("bands", ("roi_pool_list", "roi_pool_bands"), bc.RoiPoolBackwardPlan, rois(30, "float32")),
    Case("tiles", ("find_overlaps", "decide"), bc.NmsPlan,
         {"num_boxes": 2000, "iou_threshold": 0.5, "dtype": "float32"}),
]  # fmt: skip


@pytest.fixture
def stream() -> Iterator[driver.Stream]:
    """Closed when the operands are gone, which are freed in its order."""
    made = driver.Stream()
    yield made
    made.close()


def launched(plan: bc.Plan, stream: driver.Stream, misalign: int) -> list[str]:
    backend = support.Backend(plan.device)
    operands = {
        operand.name: backend.output(operand.shape, operand.dtype, misalign=misalign).tensor
        for operand in plan.operands
    }
    # Kernels are loaded when they are launched first, which a capture may not allow.
    plan.run(**operands, stream=stream)
    with stream.capture() as graph:
        plan.run(**operands, stream=stream)
    names = graph.kernels
    graph.close()
    return names


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=pytest.mark.requires("sm_90") if case.engine else ()) for case in CASES],
)
def test_kernels(case: Case, stream: driver.Stream) -> None:
    preference = bc.PlanPreference(deterministic=case.deterministic)
    plan = case.plan(**case.fields, device="cuda", preference=preference)
    assert plan.path == case.path
    names = launched(plan, stream, 0)
    assert set(case.kernels) <= set(names), names
    if case.elsewhere:
        names = launched(plan, stream, 1)
        assert set(case.elsewhere) <= set(names), names
        assert not set(case.kernels) & set(names), names
