# SPDX-License-Identifier: Apache-2.0
"""Non-maximum suppression against the plain greedy algorithm: the same boxes in the same order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import support
from hypothesis import given
from hypothesis import strategies as st
from support import LAYOUTS, Backend

import baracuda as bc
from reference import image as reference

DTYPES = ("float16", "bfloat16", "float32", "float64")


def draw_boxes(rng: np.random.Generator, count: int, extent: float, side: float, dtype: str = "float32") -> np.ndarray:
    low = rng.uniform(0, extent, (count, 2))
    boxes = np.concatenate([low, low + rng.uniform(1, side, (count, 2))], 1)
    return boxes.astype(support.DTYPES[dtype].numpy)


def run(
    backend: Backend,
    boxes: np.ndarray,
    scores: np.ndarray,
    threshold: float,
    classes: np.ndarray | None = None,
    layout: str = "row_major",
) -> np.ndarray:
    plan = bc.NmsPlan(
        num_boxes=len(boxes),
        iou_threshold=threshold,
        dtype=boxes.dtype.name,
        scores_dtype=scores.dtype.name,
        class_dtype=None if classes is None else classes.dtype.name,
        device=backend.device,
    )
    keep = backend.output((len(boxes),), "int64", layout="negative" if layout != "row_major" else layout)
    count = backend.output((1,), "int64")
    operands = {"boxes": backend.input(boxes, layout=layout), "scores": backend.input(scores, layout=layout)}
    if classes is not None:
        operands["classes"] = backend.input(classes, layout=layout)
    plan.run(**{name: placed.tensor for name, placed in operands.items()}, keep=keep.tensor, count=count.tensor)
    for placed in operands.values():
        placed.assert_untouched()
    keep.assert_guards()
    count.assert_guards()
    kept = int(count.numpy()[0])
    assert (keep.numpy()[kept:] == -1).all()
    return keep.numpy()[:kept]


def check(backend: Backend, boxes: np.ndarray, scores: np.ndarray, threshold: float, **options: Any) -> np.ndarray:
    got = run(backend, boxes, scores, threshold, **options)
    expected = reference.nms(boxes, scores, threshold, options.get("classes"))
    np.testing.assert_array_equal(got, expected)
    return got


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scores_dtype", DTYPES)
def test_matches_the_reference(backend: Backend, scores_dtype: str, dtype: str) -> None:
    rng = np.random.default_rng(1)
    for count in (1, 2, 31, 33, 300):
        boxes = draw_boxes(rng, count, 50, 30, dtype)
        # Few different scores: many ties, and zeros of both signs.
        scores = (rng.integers(-4, 5, count) * rng.choice([-0.25, 0.25])).astype(support.DTYPES[scores_dtype].numpy)
        for threshold in (0.0, 0.3, 0.7):
            check(backend, boxes, scores, threshold)


@pytest.mark.parametrize("class_dtype", ["int32", "int64"])
def test_classes(backend: Backend, class_dtype: str) -> None:
    rng = np.random.default_rng(2)
    boxes = draw_boxes(rng, 700, 60, 40)
    # Negative coordinates, and classes far apart: they are compared, and boxes not shifted by them.
    boxes -= 70
    limits = np.iinfo(class_dtype)
    classes = rng.choice([limits.min, -1, 0, 7, limits.max], 700).astype(class_dtype)
    scores = rng.random(700, np.float32)
    kept = check(backend, boxes, scores, 0.4, classes=classes)
    apart = [reference.nms(boxes[classes == kind], scores[classes == kind], 0.4) for kind in np.unique(classes)]
    assert len(kept) == sum(map(len, apart))


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_layouts(backend: Backend, layout: str) -> None:
    rng = np.random.default_rng(3)
    boxes = draw_boxes(rng, 90, 30, 20)
    scores = rng.random(90, np.float32)
    if layout == "broadcast":
        boxes[:] = boxes[:1]
        scores[:] = scores[:1]
    check(backend, boxes, scores, 0.5, classes=np.zeros(90, np.int32), layout=layout)


@pytest.mark.sanitizer
@pytest.mark.parametrize("threshold", [-1.0, -0.0, 0.0, 0.5, 1.0, 2.0])
def test_strange_boxes(backend: Backend, threshold: float) -> None:
    """Inverted and empty boxes, NaN and infinities, in boxes and scores."""
    rng = np.random.default_rng(4)
    boxes = draw_boxes(rng, 400, 20, 10)
    odd = rng.random(boxes.shape)
    for value, place in ((np.nan, 0.02), (np.inf, 0.04), (-np.inf, 0.06), (5.0, 0.3)):
        boxes[(odd > place - 0.02) & (odd < place)] = value
    boxes[::7] = boxes[::7, [2, 3, 0, 1]]
    boxes[5::9, 2:] = boxes[5::9, :2]
    boxes[100:150] = boxes[100]
    scores = rng.standard_normal(400).astype(np.float32)
    scores[rng.random(400) < 0.1] = np.nan
    scores[rng.random(400) < 0.1] = np.inf
    scores[rng.random(400) < 0.1] = -np.inf
    check(backend, boxes, scores, threshold)


@given(st.data())
def test_any_problem(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    count = data.draw(st.integers(0, 200))
    boxes = rng.integers(0, data.draw(st.integers(2, 30)), (count, 4)).astype(data.draw(st.sampled_from(DTYPES[2:])))
    scores = rng.integers(0, data.draw(st.integers(1, 50)), count).astype(np.float32)
    classes = rng.integers(0, 3, count) if data.draw(st.booleans()) else None
    threshold = data.draw(st.sampled_from((0.0, 0.1, 1 / 3, 0.5, 0.9)))
    for device in ("cpu", "cuda") if bc.cuda_device_count() else ("cpu",):
        check(Backend(device), boxes, scores, threshold, classes=classes)


def test_no_boxes(backend: Backend) -> None:
    assert len(run(backend, np.zeros((0, 4), np.float32), np.zeros(0, np.float32), 0.5)) == 0


#: Sets in which overlaps are many, or depend on one another in a long row.
def _sets(rng: np.random.Generator) -> dict[str, np.ndarray]:
    chain = np.arange(3000, dtype=np.float32)[:, None] * [3, 0, 3, 0] + np.array([0, 0, 10, 10])
    centres = rng.uniform(0, 1000, (20, 1, 2))
    clusters = (centres + rng.normal(0, 1, (20, 150, 2))).reshape(-1, 2)
    far = draw_boxes(rng, 3000, 300, 60)
    far[::100] *= 1e15
    far[50::100] *= 1e-20
    corners = rng.uniform(0, 1000, (3000, 2))
    return {
        "dense": draw_boxes(rng, 3000, 300, 60),
        "sparse": draw_boxes(rng, 3000, 10000, 60),
        "identical": np.tile(np.array([[1, 2, 30, 40]]), (3000, 1)),
        "clusters": np.concatenate([clusters, clusters + 40], 1),
        "chain": chain,
        "identical and apart": np.concatenate([np.tile([[0, 0, 9, 9]], (1500, 1)), chain[:1500] * 5 + 100]),
        "far away": far,
        "sizes": np.concatenate([corners, corners + 2 ** rng.uniform(-3, 9, (3000, 2))], 1),
        "nested": np.concatenate([np.zeros((3000, 2)), 1 + np.arange(3000)[:, None].repeat(2, 1) / 9], 1),
    }


@pytest.mark.parametrize(
    "kind",
    ["dense", "sparse", "identical", "clusters", "chain", "identical and apart", "far away", "sizes", "nested"],
)
def test_sets_with_many_overlaps(backend: Backend, kind: str) -> None:
    rng = np.random.default_rng(5)
    boxes = _sets(rng)[kind].astype(np.float32)
    count = len(boxes)
    for scores in (
        rng.random(count, np.float32),
        np.arange(count, 0, -1).astype(np.float32),
        np.ones(count, np.float32),
    ):
        check(backend, boxes, scores, 0.5)


@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("scores_dtype", ["float32", "float64"])
@pytest.mark.parametrize("count", [16384, 16385])
def test_few_boxes_are_counted_and_many_are_sorted(device: str, count: int, scores_dtype: str) -> None:
    rng = np.random.default_rng(10)
    boxes = draw_boxes(rng, count, 1500, 60)
    scores = (rng.integers(0, 5000, count) / 7).astype(scores_dtype)
    classes = rng.integers(0, 300, count) << 40
    for options in ({}, {"classes": classes}):
        got, expected = (run(Backend(where), boxes, scores, 0.3, **options) for where in (device, "cpu"))
        np.testing.assert_array_equal(got, expected)


def test_runs_give_the_same_bits(backend: Backend) -> None:
    rng = np.random.default_rng(6)
    boxes = draw_boxes(rng, 2000, 200, 50)
    scores = rng.integers(0, 9, 2000).astype(np.float32)
    first = run(backend, boxes, scores, 0.4)
    for _ in range(5):
        np.testing.assert_array_equal(run(backend, boxes, scores, 0.4), first)


# ---------------------------------------------------------------------------------------------------
# Known cases.


def test_D12_inverted_box(backend: Backend) -> None:
    boxes = np.array([[0, 0, 1, 1], [2, 1, 1, 2]], np.float32)
    assert run(backend, boxes, np.array([1, 0.5], np.float32), 0.7).tolist() == [0, 1]


def test_D13_equal_scores(backend: Backend) -> None:
    boxes = [[0.3764, 0.0905, 0.6533, 0.4487], [0.3744, 0.0899, 0.6535, 0.4513], [0.3753, 0.0916, 0.6532, 0.4512]]
    assert run(backend, np.array(boxes, np.float32), np.ones(3, np.float32), 0.2).tolist() == [0]


@pytest.mark.parametrize("device", ["cuda"])
def test_D15_more_boxes_than_a_matrix_of_pairs_would_hold(device: str) -> None:
    count = 370704
    backend = Backend(device)
    places = np.arange(count, dtype=np.float32)
    low = np.stack([places % 700, places // 700], 1) * 3
    boxes = np.concatenate([low, low + 1], 1)
    scores = np.random.default_rng(0).random(count, np.float32)
    got = run(backend, boxes, scores, 0.5)
    np.testing.assert_array_equal(got, np.argsort(-scores, kind="stable"))
    plan = bc.NmsPlan(num_boxes=count, iou_threshold=0.5, device=device)
    assert plan.workspace_size < 256 * count


@pytest.mark.requires("torch.cuda")
def test_D16_captured_with_many_classes() -> None:
    torch = support.torch()
    count = 10000
    rng = np.random.default_rng(1)
    plan = bc.NmsPlan(num_boxes=count, iou_threshold=0.5, class_dtype="int64")
    boxes = torch.empty(count, 4, device="cuda")
    scores = torch.empty(count, device="cuda")
    classes = torch.empty(count, device="cuda", dtype=torch.int64)
    keep, kept = torch.empty(count, device="cuda", dtype=torch.int64), torch.empty(1, device="cuda", dtype=torch.int64)
    operands = {"boxes": boxes, "scores": scores, "classes": classes, "keep": keep, "count": kept}
    for tensor in (boxes, scores, classes):
        tensor.zero_()
    plan.run(**operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(**operands)
    for _ in range(2):
        given_boxes = draw_boxes(rng, count, 500, 60)
        given_scores = rng.random(count, np.float32)
        given_classes = rng.integers(0, 80, count)
        boxes.copy_(torch.from_numpy(given_boxes))
        scores.copy_(torch.from_numpy(given_scores))
        classes.copy_(torch.from_numpy(given_classes))
        graph.replay()
        expected = reference.nms(given_boxes, given_scores, 0.5, given_classes)
        assert kept.item() == len(expected)
        np.testing.assert_array_equal(keep[: len(expected)].cpu().numpy(), expected)


# ---------------------------------------------------------------------------------------------------
# torchvision.


@pytest.mark.requires("torchvision", "torch.cuda")
@pytest.mark.parametrize("device", ["cuda"])
def test_equals_torchvision(device: str) -> None:
    torch, ops = support.torch(), support.torchvision().ops
    rng = np.random.default_rng(7)
    for count, extent in ((5, 20), (1000, 300), (8000, 1000)):
        boxes = torch.from_numpy(draw_boxes(rng, count, extent, 60)).to(device)
        scores = torch.from_numpy(rng.permutation(count).astype(np.float32)).to(device)
        idxs = torch.from_numpy(rng.integers(0, 5, count)).to(device)
        assert torch.equal(bc.nms(boxes, scores, 0.5), ops.nms(boxes, scores, 0.5))
        assert torch.equal(bc.batched_nms(boxes, scores, idxs, 0.5), ops.batched_nms(boxes, scores, idxs, 0.5))


def test_differs_from_torchvision_on_purpose(backend: Backend) -> None:
    """torchvision moves boxes apart by their class, so that negative coordinates can meet again."""
    boxes = np.array([[-20, -20, 5, 5], [-14, -14, 11, 11]], np.float32)
    scores = np.array([1, 0.5], np.float32)
    assert run(backend, boxes, scores, 0.1, classes=np.array([1, 0], np.int32)).tolist() == [0, 1]


# ---------------------------------------------------------------------------------------------------
# Function forms and refusals.


def test_function_forms(backend: Backend, framework: str) -> None:
    rng = np.random.default_rng(8)
    boxes = draw_boxes(rng, 100, 40, 30)
    scores = rng.random(100, np.float32)
    classes = rng.integers(0, 3, 100)
    given_boxes, given_scores, given_classes = (backend.of(framework, array) for array in (boxes, scores, classes))
    kept = bc.nms(given_boxes, given_scores, 0.3)
    assert type(kept) is type(given_boxes)
    np.testing.assert_array_equal(backend.read(kept), reference.nms(boxes, scores, 0.3))
    kept = bc.batched_nms(given_boxes, given_scores, given_classes, 0.3)
    np.testing.assert_array_equal(backend.read(kept), reference.nms(boxes, scores, 0.3, classes))


@pytest.mark.requires("torch.cuda")
def test_function_form_on_a_stream() -> None:
    torch = support.torch()
    rng = np.random.default_rng(9)
    boxes, scores = draw_boxes(rng, 5000, 500, 60), rng.random(5000, np.float32)
    given_boxes, given_scores = torch.from_numpy(boxes).cuda(), torch.from_numpy(scores).cuda()
    torch.cuda.synchronize()
    kept = bc.nms(given_boxes, given_scores, 0.5, stream=torch.cuda.Stream())
    np.testing.assert_array_equal(kept.cpu().numpy(), reference.nms(boxes, scores, 0.5))


@pytest.mark.parametrize(
    ("changed", "error", "sentence"),
    [
        ({"num_boxes": -1}, bc.InvalidProblemError, "is negative"),
        ({"num_boxes": 2**26 + 1}, bc.UnsupportedError, "num_boxes: expected at most"),
        ({"iou_threshold": float("nan")}, bc.InvalidProblemError, "iou_threshold: expected a finite number"),
        ({"dtype": "int32"}, bc.UnsupportedError, "dtype: expected float16"),
        ({"scores_dtype": "int32"}, bc.UnsupportedError, "scores_dtype: expected float16"),
        ({"class_dtype": "int8"}, bc.InvalidProblemError, "class_dtype: expected int32 or int64, got int8"),
    ],
)
def test_descriptors_are_refused(device: str, changed: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        bc.NmsPlan(**{"num_boxes": 4, "iou_threshold": 0.5, "device": device, **changed})


def test_function_form_refusals() -> None:
    boxes = np.zeros((3, 4), np.float32)
    with pytest.raises(bc.InvalidProblemError, match=r"boxes: expected shape \(boxes, 4\)"):
        bc.nms(np.zeros((3, 5), np.float32), np.zeros(3, np.float32), 0.5)
    with pytest.raises(bc.InvalidProblemError, match=r"scores: expected shape \(3,\), got \(2,\)"):
        bc.nms(boxes, np.zeros(2, np.float32), 0.5)
    with pytest.raises(bc.InvalidProblemError, match=r"classes: expected shape"):
        bc.batched_nms(boxes, np.zeros(3, np.float32), np.zeros(2, np.int64), 0.5)


def test_what_a_plan_tells(device: str) -> None:
    plan = bc.NmsPlan(num_boxes=100, iou_threshold=0.5, dtype="float16", class_dtype="int32", device=device)
    assert [operand.name for operand in plan.operands] == ["boxes", "scores", "classes", "keep", "count"]
    assert (plan.sku.category, plan.sku.op, plan.sku.aux_dtype) == ("image", "nms", "float16")
    assert plan.cost.bytes == 100 * (8 + 2 + 4 + 8) + 8
    assert plan.precision_guarantee.deterministic
