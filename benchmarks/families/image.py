# SPDX-License-Identifier: Apache-2.0
"""RoI-align and RoI-pooling, forward and backward, and non-maximum suppression."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

import baracuda as bc
from baracuda.dtypes import numpy_dtype
from benchmarks.harness import Array, Calls, Case, Contenders, Lab

__all__ = ["rows"]


def rows(lab: Lab) -> Iterable[dict[str, Any]]:
    """The rows of the family. What targets are set for comes first: a run may be cut."""
    for one in itertools.chain(_rois(lab, ("float32", "float16")), _pools(lab)):
        yield from lab.measure(one.case("fw"))
        yield from lab.measure(one.case("bw"))
    for nms in _nms(lab):
        yield from lab.measure(nms.case())
    for one in _few_rois(lab):
        yield from lab.measure(one.case("bw"))
    for one in itertools.chain(_other_rois(lab), _rois(lab, ("bfloat16",))):
        yield from lab.measure(one.case("fw"))
        yield from lab.measure(one.case("bw"))


# ---------------------------------------------------------------------------------------------------
# RoI-align.


def _sizes(lab: Lab) -> tuple[tuple[int, int, int, int], int]:
    """The map and the number of boxes."""
    if lab.quick:
        return (1, 2, 24, 24), 5
    return ((2, 256, 200, 200), 1000) if lab.device == "cuda" else ((1, 16, 100, 100), 100)


def _rois(lab: Lab, dtypes: Iterable[str]) -> Iterable[_Roi]:
    shape, count = _sizes(lab)
    for dtype in dtypes:
        for pooled in (7, 14):
            for sampling_ratio in (2, 0):
                yield _Roi(lab, shape, count, pooled, sampling_ratio, dtype)


def _few_rois(lab: Lab) -> Iterable[_Roi]:
    """Few boxes on a large map, also in any order."""
    shape, _ = _sizes(lab)
    for deterministic in (True, False):
        for count in (8, 64):
            note = "few boxes" if deterministic else "few boxes, any order"
            yield _Roi(lab, shape, count, 7, 2, "float32", note=note, deterministic=deterministic)


def _other_rois(lab: Lab) -> Iterable[_Roi]:
    """Channels last, and the maps of a pyramid."""
    shape, count = _sizes(lab)
    for dtype in ("float32", "float16"):
        # Only torch exports strided 16-bit arrays of another framework's memory.
        if dtype == "float32" or lab.peers.get("torch") is not None:
            yield _Roi(lab, shape, count, 7, 2, dtype, note="channels last", channels_last=True)
    for level in range(4):
        n, c, h, w = shape
        small = (n, c, max(h >> level, 2), max(w >> level, 2))
        yield _Roi(lab, small, count // 4, 7, 2, "float32", note=f"level {level} of 4", scale=0.25 / 2**level)


@dataclass
class _Maps:
    x: Array
    y: Array
    rois: Array
    dx: Array
    workspace: Array


@dataclass
class _Roi:
    lab: Lab
    shape: tuple[int, int, int, int]
    count: int
    pooled: int
    sampling_ratio: int
    dtype: str
    scale: float = 0.25
    channels_last: bool = False
    note: str = ""
    deterministic: bool = True

    def plan(self, kind: type[bc.Plan]) -> bc.Plan:
        return kind(
            **dict(zip("nchw", self.shape, strict=True)),
            num_rois=self.count,
            pooled_h=self.pooled,
            pooled_w=self.pooled,
            spatial_scale=self.scale,
            sampling_ratio=self.sampling_ratio,
            aligned=True,
            dtype=self.dtype,
            device=self.lab.device,
            preference=bc.PlanPreference(deterministic=self.deterministic),
        )

    @property
    def workspace(self) -> int:
        """Of either direction."""
        return max(self.plan(kind).workspace_size for kind in (bc.RoiAlignPlan, bc.RoiAlignBackwardPlan))

    def case(self, direction: str) -> Case:
        build = self.build_forward if direction == "fw" else self.build_backward
        kind = bc.RoiAlignPlan if direction == "fw" else bc.RoiAlignBackwardPlan
        name = str((*self.shape[:3], self.count, self.pooled, self.sampling_ratio))
        moved = self.plan(kind).cost.bytes
        footprint = moved + math.prod(self.shape) * numpy_dtype(self.dtype).itemsize + self.workspace
        return Case(f"roi_align {direction}", name, self.dtype, self.note, moved, build, footprint=footprint)

    def boxes(self, rng: np.random.Generator, count: int) -> np.ndarray[Any, Any]:
        """Sides of 16 to 296 pixels, as far as they are in the picture."""
        rows = -(-count // 5)
        extent = np.array([self.shape[3], self.shape[2]]) / self.scale
        side = rng.uniform(16, 296, (rows, 2))
        centre = rng.uniform(0, 1, (rows, 2)) * extent
        low, high = np.clip(centre - side / 2, 0, extent - 1), np.clip(centre + side / 2, 1, extent)
        image = rng.integers(0, self.shape[0], (rows, 1))
        return np.concatenate([image, low, high], 1).astype(np.float32).reshape(-1)[:count]

    def maps(self) -> _Maps:
        def normal(rng: Any, count: int) -> Any:
            return rng.standard_normal(count, np.float32).astype(numpy_dtype(self.dtype))

        def last(array_shape: tuple[int, ...]) -> Array:
            n, c, h, w = array_shape
            if not self.channels_last:
                return self.lab.array(array_shape, self.dtype, normal)
            return self.lab.array((n, h, w, c), self.dtype, normal).permute(0, 3, 1, 2)

        return _Maps(
            x=last(self.shape),
            y=last((self.count, self.shape[1], self.pooled, self.pooled)),
            rois=self.lab.array((self.count, 5), "float32", self.boxes),
            dx=last(self.shape),
            workspace=self.lab.array((max(self.workspace, 1),), "uint8"),
        )

    def build_forward(self, count: int) -> Contenders:
        sets = [self.maps() for _ in range(count)]
        plan = self.plan(bc.RoiAlignPlan)
        bound = [plan.bind(input=one.x.ours, rois=one.rois.ours, output=one.y.ours) for one in sets]
        return Contenders(
            ours=[
                functools.partial(ready.run, self.lab.stream, one.workspace.ours)
                for ready, one in zip(bound, sets, strict=True)
            ],
            peers=self.peers(sets, self.torchvision_forward),
            verify=functools.partial(self.verify_forward, sets[-1]),
            extra={"path": plan.path, "arch": plan.sku.arch, "workspace": plan.workspace_size},
        )

    def build_backward(self, count: int) -> Contenders:
        sets = [self.maps() for _ in range(count)]
        plan = self.plan(bc.RoiAlignBackwardPlan)
        bound = [plan.bind(doutput=one.y.ours, rois=one.rois.ours, dinput=one.dx.ours) for one in sets]
        return Contenders(
            ours=[
                functools.partial(ready.run, self.lab.stream, one.workspace.ours)
                for ready, one in zip(bound, sets, strict=True)
            ],
            peers=self.peers(sets, self.torchvision_backward),
            verify=functools.partial(self.verify_backward, sets[-1]),
            extra={"path": plan.path, "arch": plan.sku.arch, "workspace": plan.workspace_size},
        )

    def verify_forward(self, one: _Maps) -> None:
        """Means of samples lie between the least and the greatest value."""
        x, y = one.x.numpy().astype(np.float64), one.y.numpy().astype(np.float64)
        if not (np.abs(y).max() <= np.abs(x).max() and np.abs(y).max() > 0):
            raise AssertionError(f"roi_align fw {self.dtype}: outputs are no means of the input")

    def verify_backward(self, one: _Maps) -> None:
        """Of boxes inside the picture no gradient is lost."""
        given, got = one.y.numpy().astype(np.float64), one.dx.numpy().astype(np.float64)
        wanted, mass = given.sum((0, 2, 3)), np.abs(given).sum()
        if np.abs(got.sum((0, 2, 3)) - wanted).max() > 2**-8 * mass:
            raise AssertionError(f"roi_align bw {self.dtype}: the gradient's sum is off")

    def peers(self, sets: list[_Maps], make: Callable[[_Maps], Callable[[], object]]) -> dict[str, Callable[[], Calls]]:
        # torchvision has no bfloat16.
        if self.lab.peers.get("torchvision") is None or self.dtype == "bfloat16":
            return {}
        return {"torchvision": lambda: [make(one) for one in sets]}

    def torchvision_forward(self, one: _Maps) -> Callable[[], object]:
        torch = self.lab.peers.get("torch")
        x = one.x.torch()
        rois = one.rois.torch().to(x.dtype)
        ratio = self.sampling_ratio or -1
        return lambda: torch.ops.torchvision.roi_align(x, rois, self.scale, self.pooled, self.pooled, ratio, True)

    def torchvision_backward(self, one: _Maps) -> Callable[[], object]:
        torch = self.lab.peers.get("torch")
        dy = one.y.torch()
        rois = one.rois.torch().to(dy.dtype)
        ratio = self.sampling_ratio or -1
        call = torch.ops.torchvision._roi_align_backward
        return lambda: call(dy, rois, self.scale, self.pooled, self.pooled, *self.shape, ratio, True)


# ---------------------------------------------------------------------------------------------------
# RoI-pooling.


def _pools(lab: Lab) -> Iterable[_Pool]:
    shape, count = _sizes(lab)
    for dtype in ("float32", "float16"):
        yield _Pool(lab, shape, count, 7, 0, dtype)


@dataclass
class _Pool(_Roi):
    def plan(self, kind: type[bc.Plan]) -> bc.Plan:
        return kind(
            **dict(zip("nchw", self.shape, strict=True)),
            num_rois=self.count,
            pooled_h=self.pooled,
            pooled_w=self.pooled,
            spatial_scale=self.scale,
            dtype=self.dtype,
            device=self.lab.device,
        )

    def case(self, direction: str) -> Case:
        build = self.build_forward if direction == "fw" else self.build_backward
        name = str((*self.shape[:3], self.count, self.pooled))
        moved = self.plan(bc.RoiPoolPlan if direction == "fw" else bc.RoiPoolBackwardPlan).cost.bytes
        footprint = moved + math.prod(self.shape) * numpy_dtype(self.dtype).itemsize
        return Case(f"roi_pool {direction}", name, self.dtype, "", moved, build, footprint=footprint)

    def sets(self, count: int) -> tuple[list[dict[str, Array]], list[bc.BoundPlan]]:
        def normal(rng: Any, size: int) -> Any:
            return rng.standard_normal(size, np.float32).astype(numpy_dtype(self.dtype))

        plan = self.plan(bc.RoiPoolPlan)
        out = (self.count, self.shape[1], self.pooled, self.pooled)
        arrays = [
            {
                "input": self.lab.array(self.shape, self.dtype, normal),
                "rois": self.lab.array((self.count, 5), "float32", self.boxes),
                "output": self.lab.array(out, self.dtype, normal),
                "argmax": self.lab.array(out, "int32"),
            }
            for _ in range(count)
        ]
        return arrays, [plan.bind(**{name: array.ours for name, array in one.items()}) for one in arrays]

    def build_forward(self, count: int) -> Contenders:
        arrays, bound = self.sets(count)
        return Contenders(
            ours=[functools.partial(one.run, self.lab.stream) for one in bound],
            peers=self.torchvision(arrays, self.forward_of),
            verify=functools.partial(self.verify_maxima, arrays[-1]),
        )

    def build_backward(self, count: int) -> Contenders:
        arrays, bound = self.sets(count)
        for one in bound:
            one.run(self.lab.stream)
        plan = self.plan(bc.RoiPoolBackwardPlan)
        ours = []
        for one in arrays:
            one["dinput"] = self.lab.array(self.shape, self.dtype)
            ready = plan.bind(
                doutput=one["output"].ours, rois=one["rois"].ours, argmax=one["argmax"].ours, dinput=one["dinput"].ours
            )
            ours.append(functools.partial(ready.run, self.lab.stream))
        return Contenders(ours=ours, peers=self.torchvision(arrays, self.backward_of))

    def verify_maxima(self, one: dict[str, Array]) -> None:
        """Each output is where its argmax says."""
        rois, y, argmax = (one[name].numpy() for name in ("rois", "output", "argmax"))
        planes = one["input"].numpy()[rois[:, 0].astype(int)].reshape(*y.shape[:2], -1)
        found = np.take_along_axis(planes, argmax.reshape(*y.shape[:2], -1).clip(0), 2).reshape(y.shape)
        if not np.array_equal(np.where(argmax >= 0, found, 0), y):
            raise AssertionError(f"roi_pool fw {self.dtype}: values are not where argmax says")

    def torchvision(
        self, arrays: list[dict[str, Array]], make: Callable[[dict[str, Array]], Callable[[], object]]
    ) -> dict[str, Callable[[], Calls]]:
        if self.lab.peers.get("torchvision") is None:
            return {}
        return {"torchvision": lambda: [make(one) for one in arrays]}

    def forward_of(self, one: dict[str, Array]) -> Callable[[], object]:
        torch = self.lab.peers.get("torch")
        x = one["input"].torch()
        rois = one["rois"].torch().to(x.dtype)
        return lambda: torch.ops.torchvision.roi_pool(x, rois, self.scale, self.pooled, self.pooled)

    def backward_of(self, one: dict[str, Array]) -> Callable[[], object]:
        torch = self.lab.peers.get("torch")
        dy, argmax = one["output"].torch(), one["argmax"].torch()
        rois = one["rois"].torch().to(dy.dtype)
        call = torch.ops.torchvision._roi_pool_backward
        return lambda: call(dy, rois, argmax, self.scale, self.pooled, self.pooled, *self.shape)


# ---------------------------------------------------------------------------------------------------
# Non-maximum suppression.


def _nms(lab: Lab) -> Iterable[_Nms]:
    counts = (1000, 10000, 100000, 200000) if lab.device == "cuda" else (1000, 3000)
    if lab.quick:
        counts = (40, 50)
    # A peer may take a second for one call of the largest.
    *others, largest = counts
    for count in others:
        yield from _uniform(lab, count)
    for kind in ("identical", "clusters", "chain"):
        yield _Nms(lab, others[-1], kind)
    yield from _uniform(lab, largest)


def _uniform(lab: Lab, count: int) -> Iterable[_Nms]:
    yield _Nms(lab, count, "dense")
    yield _Nms(lab, count, "sparse")
    yield _Nms(lab, count, "dense", classes=80)


@dataclass
class _Nms:
    lab: Lab
    count: int
    kind: str
    classes: int = 0

    def case(self) -> Case:
        note = f"{self.kind}, {self.classes} classes" if self.classes else self.kind
        plan = self.plan()
        footprint = plan.cost.bytes + plan.workspace_size
        return Case("nms", str((self.count,)), "float32", note, plan.cost.bytes, self.build, footprint=footprint)

    def plan(self) -> bc.NmsPlan:
        return bc.NmsPlan(
            num_boxes=self.count, iou_threshold=0.5, class_dtype="int64" if self.classes else None,
            device=self.lab.device,
        )  # fmt: skip

    def boxes(self, rng: np.random.Generator, count: int) -> np.ndarray[Any, Any]:
        rows = -(-count // 4)
        if self.kind == "identical":
            boxes = np.tile([[1.0, 2.0, 30.0, 40.0]], (rows, 1))
        elif self.kind == "chain":
            boxes = np.arange(rows)[:, None] * [3.0, 0.0, 3.0, 0.0] + np.array([0.0, 0.0, 10.0, 10.0])
        elif self.kind == "clusters":
            # 200 things, with many detections each.
            low = rng.uniform(0, 1000, (200, 2))[np.arange(rows) % 200] + rng.normal(0, 1, (rows, 2))
            boxes = np.concatenate([low, low + 40], 1)
        else:
            low = rng.uniform(0, 1000 if self.kind == "dense" else 10000, (rows, 2))
            boxes = np.concatenate([low, low + rng.uniform(1, 61, (rows, 2))], 1)
        return boxes.astype(np.float32).reshape(-1)[:count]

    def scores(self, rng: np.random.Generator, count: int) -> np.ndarray[Any, Any]:
        # No two alike, so that every contender has one right answer.
        order = np.arange(count, 0, -1) if self.kind == "chain" else rng.permutation(count)
        return order.astype(np.float32)

    def build(self, sets: int) -> Contenders:
        plan = self.plan()
        ours, torch_sets, last = [], [], {}
        for _ in range(sets):
            arrays = {
                "boxes": self.lab.array((self.count, 4), "float32", self.boxes),
                "scores": self.lab.array((self.count,), "float32", self.scores),
                "keep": self.lab.array((self.count,), "int64"),
                "count": self.lab.array((1,), "int64"),
            }
            if self.classes:
                arrays["classes"] = self.lab.array(
                    (self.count,), "int64", lambda rng, count: rng.integers(0, self.classes, count)
                )
            bound = plan.bind(**{name: array.ours for name, array in arrays.items()})
            workspace = self.lab.array((max(plan.workspace_size, 1),), "uint8").ours
            ours.append(functools.partial(bound.run, self.lab.stream, workspace))
            torch_sets.append(arrays)
            last = arrays
        peers: dict[str, Callable[[], Calls]] = {}
        if self.lab.peers.get("torchvision") is not None:
            peers["torchvision"] = lambda: [self.torchvision(arrays) for arrays in torch_sets]
        return Contenders(
            ours=ours,
            peers=peers,
            verify=functools.partial(self.verify, last),
            extra={"arch": plan.sku.arch, "workspace": plan.workspace_size},
        )

    def verify(self, arrays: dict[str, Array]) -> None:
        """The best box is kept, and scores go down."""
        kept = arrays["keep"].numpy()[: int(arrays["count"].numpy()[0])]
        scores = arrays["scores"].numpy()
        if not (kept.size and kept[0] == scores.argmax() and (np.diff(scores[kept]) < 0).all()):
            raise AssertionError(f"nms {self.kind}: kept boxes are out of order")

    def torchvision(self, arrays: dict[str, Array]) -> Callable[[], object]:
        ops = self.lab.peers.get("torchvision").ops
        boxes, scores = arrays["boxes"].torch(), arrays["scores"].torch()
        if not self.classes:
            return lambda: ops.nms(boxes, scores, 0.5)
        classes = arrays["classes"].torch()
        return lambda: ops.batched_nms(boxes, scores, classes, 0.5)
