# SPDX-License-Identifier: Apache-2.0
"""baracuda.torch: every operator beside torch's own rules, gradients, compilation, graphs and streams."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import support

import baracuda as bc
from baracuda._forms import FORMS

if support.missing("torch") is None:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    import baracuda.torch as bt
    from baracuda.torch import _register

pytestmark = pytest.mark.requires("torch")

#: What each form is tried with: arrays by name as a shape of random float64, or what makes them; then settings.
ROIS = [[0, 0.5, 1, 5.5, 6], [1, 1, 0, 6, 6.5], [0, 2, 2, 3, 4]]
BOXES = [[0, 0, 9, 9], [0, 0, 10, 10], [20, 20, 30, 30], [1, 1, 9, 10]]
IDS = [2, 0, 2, 2, 0, 5]
SCAN = {"axis": 1, "reverse": False, "exclusive": False}
SEGMENTS = {"segment_ids": IDS, "offsets": None}
POOL = {"placement": "torch", "index_base": "plane"}
ROI = {"spatial_scale": 0.9}
ALIGN = ROI | {"sampling_ratio": 2, "aligned": True}

CASES: dict[str, dict[str, Any]] = {
    "cumsum": {"x": (3, 5), **SCAN, "out_dtype": "float64"},
    "cumsum_backward": {"dy": (3, 5), **SCAN, "exclusive": True},
    "cumprod": {"x": (3, 5), **SCAN, "reverse": True, "out_dtype": "float64"},
    "cumprod_backward": {"dy": (3, 5), "x": (3, 5), "y": (3, 5), **SCAN},
    "logcumsumexp": {"x": (3, 5), **SCAN},
    "logcumsumexp_backward": {"dy": (3, 5), "x": (3, 5), "y": (3, 5), **SCAN},
    "linear_recurrence": {"a": (3, 5), "b": (3, 5), "h0": (3,), "axis": 1, "reverse": True},
    "linear_recurrence_backward": {"dh": (3, 5), "a": (3, 5), "h": (3, 5), "axis": -1, "reverse": True},
    "linear_recurrence_backward_h0": {
        "dh": (3, 5), "a": (3, 5), "h": (3, 5), "h0": (3,), "axis": -1, "reverse": False,
    },
    "fractional_max_pool2d": {
        "x": (2, 2, 6, 7), "random_samples": ("uniform", 2, 2, 2), "kernel_size": (2, 3), "output_size": (3, 4), **POOL,
        "index_dtype": "int64",
    },
    "fractional_max_pool2d_backward": {
        "dy": (1, 2, 2, 2), "indices": [[[[0, 5], [12, 35]], [[3, 14], [15, 21]]]], "input_size": (6, 6),
        "kernel_size": (2, 2), **POOL,
    },
    "fractional_max_pool3d": {
        "x": (1, 2, 4, 4, 5), "random_samples": ("uniform", 1, 2, 3), "kernel_size": (2, 2, 2),
        "output_size": (2, 2, 3), **POOL, "index_dtype": "int64",
    },
    "fractional_max_pool3d_backward": {
        "dy": (1, 1, 1, 1, 2), "indices": [[[[[0, 27]]]]], "input_size": (4, 4, 5), "kernel_size": (2, 2, 2), **POOL,
    },
    "roi_align": {"input": (2, 3, 7, 8), "rois": ROIS, "output_size": (2, 3), **ALIGN},
    "roi_align_backward": {"doutput": (3, 2, 2, 3), "rois": ROIS, "images": (2, 7, 8), **ALIGN},
    "roi_pool": {"input": (2, 3, 7, 8), "rois": ROIS, "output_size": (2, 3), **ROI, "index_dtype": "int32"},
    "roi_pool_backward": {
        "doutput": (3, 1, 1, 1), "rois": ROIS, "argmax": np.array([9, 11, -1], np.int32).reshape(3, 1, 1, 1),
        "images": (2, 7, 8), **ROI,
    },
    "nms_padded": {"boxes": BOXES, "scores": ("uniform", 4), "classes": [0, 0, 1, 0], "iou_threshold": 0.5},
    "write_slice": {"dest": (3, 5), "source": (2, 2), "start": (1, 2), "end": (3, 4)},
    "dynamic_update_slice": {"dest": (3, 5), "source": (2, 2), "starts": [2, -1], "bounds": "drop"},
    "dynamic_update_slice_backward": {"grad": (3, 5), "starts": [2, 4], "block_shape": (2, 2), "bounds": "clamp"},
    "kv_cache_append": {
        "key": (3, 2, 4), "value": (3, 2, 4), "key_cache": (2, 2, 2, 4), "value_cache": (2, 2, 2, 4),
        "slot_mapping": [3, -1, 0], "key_scale": None, "value_scale": None,
    },
    "kv_cache_gather": {
        "key_cache": (2, 2, 2, 4), "value_cache": (2, 2, 2, 4), "slot_mapping": [3, -1, 3], "key_scale": None,
        "value_scale": None, "dtype": "float64",
    },
}  # fmt: skip
for kind in ("cummax", "cummin"):
    CASES |= {
        kind: {"x": (3, 5), **SCAN},
        f"{kind}_with_indices": {"x": (3, 5), **SCAN, "ties": "last", "index_dtype": "int64"},
        f"{kind}_backward": {
            "dy": (2, 3), "y": None, "indices": [[0, 1, 1], [0, 0, 2]], **SCAN, "ties": "first",
        },
    }  # fmt: skip
for kind in ("sum", "mean", "max", "min", "prod"):
    CASES[f"segment_{kind}"] = {
        "input": (6, 3), **SEGMENTS, "num_segments": 4, "ids": "unsorted", "ties": "first", "empty_value": 0.5,
    }  # fmt: skip
    CASES[f"segment_{kind}_backward"] = {
        "d_output": (4, 3), "input": None if kind in ("sum", "mean") else (6, 3), "arg": None, **SEGMENTS,
        "num_inputs": 6, "ids": "unsorted", "ties": "first",
    }  # fmt: skip
    if kind in ("max", "min"):
        CASES[f"segment_{kind}_with_arg"] = {
            "input": (6, 3), "segment_ids": None, "offsets": [0, 2, 2, 6], "num_segments": 3, "ids": "offsets",
            "empty_value": 0.5,
        }  # fmt: skip
IN_PLACE = [name for name, form in FORMS.items() if form.overwritten]
EVERY = [*CASES, *(f"{name}_" for name in IN_PLACE)]
#: Gradients with respect to these, which are no numbers to differentiate by.
GIVEN = {"rois", "random_samples", "boxes", "scores"}
TWICE = [
    "cumsum", "linear_recurrence", "segment_sum", "segment_mean", "roi_align", "write_slice", "dynamic_update_slice",
]  # fmt: skip


def arguments(name: str, device: str, requires_grad: bool = False) -> tuple[Any, ...]:
    form = FORMS[name.removesuffix("_")]
    case = CASES[form.name]
    rng = np.random.default_rng(5)
    tensors = []
    for array in form.arrays:
        value = case[array]
        if value is None:
            tensors.append(None)
            continue
        if isinstance(value, tuple):
            drawn = rng.uniform(0, 1, value[1:]) if value[0] == "uniform" else rng.standard_normal(value)
        else:
            drawn = np.asarray(value)
        tensor = torch.from_numpy(np.ascontiguousarray(drawn)).to(device)
        if array in ("rois", "boxes"):
            tensor = tensor.double()
        if requires_grad and tensor.is_floating_point() and array not in GIVEN:
            tensor.requires_grad_()
        tensors.append(tensor)
    return (*tensors, *(list(value) if isinstance(value := case[static], tuple) else value for static in form.settings))


def test_every_operator_is_tried() -> None:
    assert sorted(CASES) == sorted(FORMS)
    assert sorted(EVERY) == sorted(_register.operators)
    for form in FORMS.values():
        assert set(CASES[form.name]) == {*form.arrays, *form.settings}, form.name
    # Every operator of the library is one of them.
    assert {form.plan.Descriptor.operator for form in FORMS.values()} == set(bc._core.operator_names())


def test_baracuda_does_not_import_torch() -> None:
    code = "import sys, baracuda; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", EVERY)
def test_opcheck(name: str, device: str) -> None:
    requires_grad = not name.endswith("_") and FORMS[name].gradient is not None
    args = arguments(name, device, requires_grad)
    results = torch.library.opcheck(_register.operators[name], args, raise_exception=True)
    assert set(results.values()) == {"SUCCESS"}


def test_opcheck_nms(device: str) -> None:
    boxes, scores, classes, threshold = arguments("nms_padded", device)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.baracuda.nms.default, (boxes, scores, classes, threshold), test_utils=tests)


@pytest.mark.parametrize("name", EVERY)
def test_calls_past_the_dispatcher_give_the_same(name: str, device: str) -> None:
    through, past = arguments(name, device), arguments(name, device)
    expected = _register.operators[name](*through)
    got = _register.calls[name](*past)
    if name.endswith("_"):
        expected, got = through, past
    as_tuple = lambda value: value if isinstance(value, tuple) else (value,)  # noqa: E731
    for one, other in zip(as_tuple(expected), as_tuple(got), strict=True):
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other)


class _Watched(TorchDispatchMode if support.missing("torch") is None else object):
    """Lets all calls through, and so keeps them to the dispatcher."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


#: Of x and y, float32 [3, 5], ids [3] and offsets [4]: calls whose arguments are brought to those of an operator.
PUBLIC: dict[str, Callable[..., Any]] = {
    "cumsum": lambda x, *_: bt.cumsum(x, -1),
    "cumsum of integers": lambda x, y, ids, offsets: bt.cumsum(offsets.int(), 0),
    "cumsum to float32": lambda x, *_: bt.cumsum(x.half(), 0, dtype=torch.float32, reverse=True, exclusive=True),
    "cumprod of a view": lambda x, *_: bt.cumprod(x.T[::2], 1),
    "linear_recurrence": lambda x, y, *_: bt.linear_recurrence(x, y, 0, h0=y[0], reverse=True),
    "segment_sum": lambda x, y, ids, _: bt.segment_sum(x, ids, 4),
    "segment_mean of offsets": lambda x, y, ids, offsets: bt.segment_mean(x, offsets=offsets),
    "segment_max of rank 3": lambda x, y, ids, _: bt.segment_max(x[:, None], ids, 2, ties="even", empty_value=3),
    "segment_min": lambda x, y, ids, _: bt.segment_min(x, ids, 4, return_arg=True),
    "segment_prod": lambda x, y, ids, _: bt.segment_prod(x, ids, 4, sorted=True),
    "write_slice": lambda x, y, *_: bt.write_slice(x, y[:2, 1:2], ((0, 2), (3, 4))),
    "write_slice by slices": lambda x, y, *_: bt.write_slice(x, y[:, :2], [..., slice(1, 3)]),
    "write_slice_": lambda x, y, *_: bt.write_slice_(x.clone(), y[1:], (slice(1, None),)),
    "dynamic_update_slice": lambda x, y, ids, _: bt.dynamic_update_slice(x, y[:, 1:3], ids[:2] + 1),
    "dynamic_update_slice_": lambda x, y, ids, _: bt.dynamic_update_slice_(x.clone(), y[:2], ids[:2], bounds="clamp"),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_functions_past_the_dispatcher_give_the_same(name: str, device: str) -> None:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(3, 5, generator=generator).to(device) for _ in range(2))
    ids, offsets = torch.tensor([0, 2, 2], device=device), torch.tensor([0, 1, 1, 3], device=device)
    kept = x.clone()
    with _Watched():
        expected = PUBLIC[name](x, y, ids, offsets)
    # The second time finds what the first prepared.
    for _ in range(2):
        torch.testing.assert_close(PUBLIC[name](x, y, ids, offsets), expected, rtol=0, atol=0)
    assert torch.equal(x, kept)


def test_what_may_change_is_not_remembered(device: str) -> None:
    x, start = torch.zeros(8, device=device), torch.tensor(1)
    ranges: list[Any] = [(start, 3)]
    bt.write_slice_(x, torch.ones(2, device=device), ranges)
    bt.write_slice_(x, torch.ones(2, device=device), tuple(ranges))
    start += 1
    bt.write_slice_(x, torch.full((1,), 5.0, device=device), tuple(ranges))
    ranges[0] = (6, 8)
    bt.write_slice_(x, torch.full((2,), 7.0, device=device), ranges)
    assert x.tolist() == [0, 1, 5, 0, 0, 0, 7, 7]


def test_more_layouts_than_are_remembered(device: str) -> None:
    for extent in (*range(1, 300), *range(1, 9)):
        assert bt.cumsum(torch.ones(extent, device=device), 0)[-1].item() == extent


# ---------------------------------------------------------------------------------------------------
# Gradients.


def of_leaves(name: str, device: str, call: Callable[..., Any]) -> tuple[Callable[..., Any], list[Any]]:
    """The call as a function of what requires grad, with floating results only; and these tensors."""
    args = arguments(name, device, requires_grad=True)
    places = [place for place, arg in enumerate(args) if isinstance(arg, torch.Tensor) and arg.requires_grad]

    def function(*leaves: Any) -> Any:
        filled = list(args)
        for place, leaf in zip(places, leaves, strict=True):
            filled[place] = leaf
        results = call(*filled)
        results = results if isinstance(results, tuple) else (results,)
        return tuple(result for result in results if result.is_floating_point())

    return function, [args[place] for place in places]


DIFFERENTIABLE = [name for name, form in FORMS.items() if form.gradient is not None]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradcheck(name: str, device: str) -> None:
    function, leaves = of_leaves(name, device, _register.calls[name])
    assert leaves
    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("name", TWICE)
def test_gradgradcheck(name: str, device: str) -> None:
    function, leaves = of_leaves(name, device, _register.operators[name])
    assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("extent", [0, 1, 3])
@pytest.mark.parametrize("initial", [False, True])
def test_recurrence_three_times(reverse: bool, extent: int, initial: bool, device: str) -> None:
    rng = torch.Generator().manual_seed(3)
    make = lambda *shape: torch.rand(*shape, generator=rng, dtype=torch.float64).to(device).requires_grad_()  # noqa: E731
    leaves = [make(1, extent, 2), make(1, extent, 2)] + ([make(1, 2)] if initial else [])
    if extent == 0:
        h = bt.linear_recurrence(*leaves[:2], 1, h0=leaves[2] if initial else None, reverse=reverse)
        grads = torch.autograd.grad(h.sum(), leaves, create_graph=True, allow_unused=True)
        assert all(grad is None or not grad.any() for grad in grads)
        return

    def once(*leaves: Any) -> Any:
        h = bt.linear_recurrence(*leaves[:2], 1, h0=leaves[2] if initial else None, reverse=reverse)
        return torch.autograd.grad((h * h).sum(), leaves, create_graph=True)

    assert torch.autograd.gradcheck(once, leaves)
    assert torch.autograd.gradgradcheck(once, leaves)


@pytest.mark.parametrize(
    "name", ["cumprod", "logcumsumexp", "cummax_with_indices", "segment_max", "segment_prod", "roi_pool"]
)
def test_no_second_gradient_is_an_error(name: str, device: str) -> None:
    function, leaves = of_leaves(name, device, _register.calls[name])
    (first,) = torch.autograd.grad(function(*leaves)[0].square().sum(), leaves, create_graph=True)
    with pytest.raises(bc.UnsupportedError, match=r"^baracuda::\w+_backward: is a gradient and has no gradient"):
        first.sum().backward()


def test_no_gradient_is_an_error(device: str) -> None:
    cache = torch.zeros(2, 2, 1, 1, device=device, requires_grad=True)
    key, _ = bt.kv_cache_gather(cache, cache, torch.tensor([1], device=device))
    with pytest.raises(bc.UnsupportedError, match=r"^baracuda::kv_cache_gather: has no gradient of its own$"):
        key.sum().backward()
    with pytest.raises(bc.UnsupportedError, match=r"_: writes in place, which has no gradient; use write_slice$"):
        bt.write_slice_(torch.zeros(3, device=device), torch.ones(1, device=device).requires_grad_(), (1, 2))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_are_those_of_torch(reverse: bool, dtype: str, device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 9, generator=generator).to(device, getattr(torch, dtype)).requires_grad_()
    weights = torch.randn(4, 9, generator=generator).to(x)
    flip = (lambda tensor: tensor.flip(1)) if reverse else (lambda tensor: tensor)
    for ours, theirs in (
        (bt.cumsum, torch.cumsum),
        (bt.cumprod, torch.cumprod),
        (bt.logcumsumexp, torch.logcumsumexp),
        (lambda *args, **kwargs: bt.cummax(*args, **kwargs).values, lambda *args: torch.cummax(*args).values),
        (lambda *args, **kwargs: bt.cummin(*args, **kwargs).values, lambda *args: torch.cummin(*args).values),
    ):
        mine, reference = ours(x, 1, reverse=reverse), flip(theirs(flip(x), 1))
        torch.testing.assert_close(mine, reference)
        (got,) = torch.autograd.grad((mine * weights).sum(), x)
        (expected,) = torch.autograd.grad((reference * weights).sum(), x)
        torch.testing.assert_close(got, expected)


def test_func_grad(device: str) -> None:
    x = torch.tensor([2.0, 3.0, 5.0], device=device)
    loss = lambda x: (bt.cumsum(x, 0) ** 2).sum()  # noqa: E731
    expected = torch.func.grad(lambda x: (torch.cumsum(x, 0) ** 2).sum())(x)
    torch.testing.assert_close(torch.func.grad(loss)(x), expected)
    hessian = torch.func.grad(lambda x: torch.func.grad(loss)(x)[0])(x)
    torch.testing.assert_close(hessian, torch.tensor([6.0, 4.0, 2.0], device=device))
    ids = torch.tensor([0, 1, 0], device=device)
    grad = torch.func.grad(lambda x: bt.segment_max(x, ids, 2).sum())(x)
    assert grad.tolist() == [0, 1, 1]


# ---------------------------------------------------------------------------------------------------
# Compilation.


@pytest.fixture
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Importing the compiler warns of a decorator in torch itself.
COMPILES = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")


@COMPILES
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_has_no_graph_break(dynamic: bool, device: str) -> None:
    ids = torch.tensor([0, 2, 1, 2], device=device)
    boxes = torch.tensor([[0, 0.0, 0, 4, 4], [0, 1, 1, 6, 5]], device=device)

    def function(x: Any, cache: Any) -> Any:
        y = bt.cumsum(x, -1) * bt.segment_mean(x, ids, 3).sum()
        image = bt.linear_recurrence(torch.sigmoid(y), x, 1).reshape(1, 1, *x.shape)
        pooled = bt.roi_align(image, boxes, 2)
        bt.write_slice_(cache, pooled.detach()[0, 0], ((0, 2), (1, 3)))
        return bt.cummax(y, 1).values.sum() + pooled.square().sum()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for columns in (8, 11) if dynamic else (8,):
        generator = torch.Generator().manual_seed(columns)
        x = torch.randn(4, columns, generator=generator).to(device).requires_grad_()
        caches = torch.zeros(2, 2, 4, device=device)
        expected, got = function(x, caches[0]), compiled(x, caches[1])
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(caches[1], caches[0])
        assert caches[1].any()
        torch.testing.assert_close(torch.autograd.grad(got, x), torch.autograd.grad(expected, x))


@COMPILES
@pytest.mark.usefixtures("_fresh_compiler")
def test_inductor(device: str) -> None:
    # Of ours alone: what is torch's it would give to compilers of C++ and Triton, for half a minute.
    def function(x: Any, ids: Any, cache: Any) -> Any:
        sums = bt.segment_sum(bt.cumsum(x, 1), ids, 3)
        bt.write_slice_(cache, sums, ((0, 3), (1, 6)))
        return bt.logcumsumexp(sums, 0)

    x, ids = torch.rand(6, 5, device=device), torch.tensor([0, 1, 1, 2, 2, 2], device=device)
    caches = torch.zeros(2, 4, 8, device=device)
    got = torch.compile(function, fullgraph=True, backend="inductor")(x, ids, caches[0])
    assert torch.equal(got, function(x, ids, caches[1]))
    assert torch.equal(caches[0], caches[1])
    assert caches[0].any()


@COMPILES
@pytest.mark.usefixtures("_fresh_compiler")
def test_compile_of_modules_and_writes(device: str) -> None:
    pool = bt.FractionalMaxPool2d(2, output_size=3, _random_samples=torch.rand(1, 2, 2, device=device))

    def function(x: Any, at: Any) -> Any:
        return bt.dynamic_update_slice(pool(x), torch.ones(1, 1, 1, 1, device=device), at)

    x, at = torch.randn(1, 2, 6, 6, device=device), torch.tensor([0, 1, 2, 0], device=device)
    torch.testing.assert_close(
        torch.compile(function, fullgraph=True, backend="aot_eager")(x, at), function(x, at), rtol=0, atol=0
    )


def test_fake_tensors_need_no_kernel() -> None:
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(3, 5, device="cuda", dtype=torch.int32)
        y = bt.cumsum(x, 1)
        assert (y.dtype, y.shape, y.device.type) == (torch.int64, (3, 5), "cuda")
        output, arg = bt.segment_max(torch.empty(7, 2, 3), torch.empty(7, dtype=torch.int32), 4, return_arg=True)
        assert (output.shape, arg.shape, arg.dtype) == ((4, 2, 3), (4, 2, 3), torch.int32)
    assert bt.cumsum(torch.empty(3, device="meta"), 0).device.type == "meta"


# ---------------------------------------------------------------------------------------------------
# What torch users expect.


def test_autocast(device: str) -> None:
    x = torch.randn(3, 5, device=device).to(torch.bfloat16)
    for enabled, expected in ((False, torch.bfloat16), (True, torch.float32), (False, torch.bfloat16)):
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            assert bt.cumsum(x, 1).dtype == expected
    with torch.autocast(device, torch.bfloat16):
        assert bt.cumsum(x, 1).dtype == torch.float32
        assert bt.cumprod(x, 1).dtype == torch.float32
        assert bt.logcumsumexp(x, 1).dtype == torch.bfloat16
        assert bt.cumsum(x.double(), 1).dtype == torch.float64
        mixed = bt.linear_recurrence(x, x.float(), 1)
        assert mixed.dtype == torch.float32
        written = bt.write_slice(x.float(), x[:1], ((0, 1), (0, 5)))
        assert written.dtype == torch.float32
    torch.testing.assert_close(mixed, bt.linear_recurrence(x.float(), x.float(), 1))
    with pytest.raises(bc.InvalidProblemError, match="dtype"):
        bt.linear_recurrence(x, x.float(), 1)
    leaf = x.clone().requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        bt.cumsum(leaf, 1).sum().backward()
    assert leaf.grad.dtype == torch.bfloat16


def test_lazy_views_are_resolved(device: str) -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j], device=device).conj()
    assert numbers.imag.is_neg()
    assert bt.cumsum(numbers.imag, 0).tolist() == [-2, 2]
    assert bt.write_slice(numbers, numbers[:1], (1, 2)).tolist() == [1 - 2j, 1 - 2j]


def test_views_parameters_and_subclasses(device: str) -> None:
    x = torch.arange(12.0, device=device).reshape(3, 4)
    torch.testing.assert_close(bt.cumsum(x.T, 1), torch.cumsum(x.T, 1))
    parameter = torch.nn.Parameter(x)
    bt.cumsum(parameter, 0).sum().backward()
    assert parameter.grad[:, 0].tolist() == [3, 2, 1]

    class Named(torch.Tensor):
        pass

    named = x.as_subclass(Named)
    torch.testing.assert_close(bt.cumsum(named, 1).as_subclass(torch.Tensor), torch.cumsum(x, 1))
    assert bt.cumsum(named.requires_grad_(), 1).requires_grad


def test_in_place_counts_versions(device: str) -> None:
    x = torch.zeros(4, device=device)
    leaf = torch.ones(4, device=device, requires_grad=True)
    product = leaf * x
    before = x._version
    assert bt.write_slice_(x, torch.ones(1, device=device), (0, 1)) is x
    assert x._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    with torch.inference_mode():
        y = torch.zeros(4, device=device)
        bt.write_slice_(y, torch.ones(1, device=device), (3, 4))
        assert y.tolist() == [0, 0, 0, 1]


def test_errors_are_ours(device: str) -> None:
    x = torch.zeros(3, device=device)
    with pytest.raises(bc.InvalidProblemError, match=r"^ScanPlan: axis"):
        bt.cumsum(x, 3)
    ids = torch.zeros(3, dtype=torch.int64, device=device)
    with pytest.raises(bc.InvalidProblemError, match=r"^segment_sum: num_segments: is missing"):
        bt.segment_sum(x, ids)
    with pytest.raises(bc.InvalidProblemError, match=r"^segment_sum: num_segments: expected 2 for 3 offsets, got 3"):
        bt.segment_sum(x, offsets=ids, num_segments=3)
    with pytest.raises(bc.InvalidProblemError, match=r"^roi_align: boxes: expected \[R, 5\], got \(3, 4\)"):
        bt.roi_align(torch.zeros(1, 1, 4, 4, device=device), torch.zeros(3, 4, device=device), 2)


def test_modules_are_those_of_torch(device: str) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 3, 9, 10, generator=generator).to(device)
    samples = torch.rand(2, 3, 2, generator=generator).to(device)
    arguments = {"kernel_size": (2, 3), "output_size": (4, 5), "return_indices": True, "_random_samples": samples}
    for mine, theirs in zip(
        bt.FractionalMaxPool2d(**arguments)(x), torch.nn.FractionalMaxPool2d(**arguments)(x), strict=True
    ):
        assert torch.equal(mine, theirs)
    volume = torch.randn(3, 7, 8, 9, generator=generator).to(device)
    arguments = {"kernel_size": 2, "output_ratio": 0.6, "_random_samples": samples.new_full((1, 3, 3), 0.3)}
    mine, theirs = bt.FractionalMaxPool3d(**arguments)(volume), torch.nn.FractionalMaxPool3d(**arguments)(volume)
    assert torch.equal(mine, theirs)
    boxes = torch.tensor(ROIS, dtype=torch.float32, device=device)
    module = bt.RoIAlign(3, 0.5, -1, aligned=True)
    torch.testing.assert_close(module(x, boxes), bc.roi_align(x, boxes, 3, 0.5, -1, True))
    assert str(module) == "RoIAlign(output_size=3, spatial_scale=0.5, sampling_ratio=-1, aligned=True)"
    assert torch.equal(bt.RoIPool(2, 0.5)(x, boxes), bc.roi_pool(x, boxes, 2, 0.5))
    per_image = [boxes[boxes[:, 0] == image][:, 1:] for image in (0, 1)]
    assert bt.roi_align(x, per_image, 2).shape == (3, 3, 2, 2)
    torch.manual_seed(0)
    assert bt.FractionalMaxPool2d(2, output_size=3)(x).shape == (2, 3, 3, 3)


def test_nms(device: str) -> None:
    boxes = torch.tensor(BOXES, dtype=torch.float32, device=device)
    scores = torch.tensor([0.3, 0.9, 0.5, 0.8], device=device)
    assert bt.nms(boxes, scores, 0.5).tolist() == [1, 2]
    assert bt.batched_nms(boxes, scores, torch.tensor([0, 0, 0, 1], device=device), 0.5).tolist() == [1, 3, 2]
    assert bt.nms(boxes[:0], scores[:0], 0.5).tolist() == []


def test_segments_of_any_rank(device: str) -> None:
    data = torch.arange(24.0, device=device).reshape(4, 3, 2).requires_grad_()
    ids = torch.tensor([0, 1, 1, 3], device=device)
    got = bt.segment_max(data, ids, 4)
    assert torch.equal(got, torch.stack([data[0], data[2], torch.full_like(data[0], -torch.inf), data[3]]))
    got[ids].sum().backward()
    assert data.grad[:, 0, 0].tolist() == [1, 0, 2, 1]
    even = bt.segment_min(data.detach() * 0, ids, 4, ties="even", return_arg=False)
    assert even[1].tolist() == [[0, 0]] * 3


def test_empty_segments_keep_the_sign_of_zero(device: str) -> None:
    data, ids = torch.ones(1, 2, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    for zero in (0.0, -0.0, 0.0):
        output = bt.segment_max(data, ids, 2, empty_value=zero)
        assert output[1].signbit().tolist() == [math.copysign(1, zero) < 0] * 2


def test_float8_cache(device: str) -> None:
    key = torch.linspace(-3, 3, 12, device=device).reshape(3, 1, 4)
    caches = torch.zeros(2, 1, 4, 1, 4, device=device).to(torch.float8_e4m3fn)
    scale = torch.full((1,), 0.5, device=device)
    slots = torch.tensor([0, 1, 3], device=device)
    bt.kv_cache_append_(key, -key, caches[0], caches[1], slots, key_scale=scale, value_scale=scale)
    back, values = bt.kv_cache_gather(
        caches[0], caches[1], slots, dtype=torch.float32, key_scale=scale, value_scale=scale
    )
    expected = (key.cpu().numpy() * 2).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * 0.5
    assert np.array_equal(back.cpu().numpy(), expected)
    assert torch.equal(values, -back)


def test_threads_share_operators(device: str) -> None:
    bc.plan_cache_clear()
    wrong = []

    def work(extent: int) -> None:
        ones = torch.ones(extent, device=device)
        wrong.extend(extent for _ in range(30) if bt.cumsum(ones, 0)[-1].item() != extent)

    threads = [threading.Thread(target=work, args=(extent,)) for extent in (3, 4, 5, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert bc.plan_cache_info().currsize == 3
    bc.plan_cache_clear()
    assert bc.plan_cache_info().currsize == 0


# ---------------------------------------------------------------------------------------------------
# CUDA.


@pytest.mark.requires("gpu")
def test_cuda_graph() -> None:
    x = torch.randn(64, 1000, device="cuda")
    ids = torch.randint(0, 10, (64,), device="cuda")
    position = torch.zeros(2, dtype=torch.int64, device="cuda")
    cache = torch.zeros(64, 1000, device="cuda")

    def step() -> Any:
        y = bt.cumsum(x, 1)
        bt.dynamic_update_slice_(cache, y[:, :1], position)
        return bt.segment_sum(y, ids, 10)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for place in (5, 7):
        x.copy_(torch.randn(64, 1000, device="cuda"))
        position[1] = place
        graph.replay()
        torch.testing.assert_close(captured, bt.segment_sum(bt.cumsum(x, 1), ids, 10))
        assert torch.equal(cache[:, place], x[:, 0])


@pytest.mark.requires("gpu")
def test_work_is_in_the_current_stream() -> None:
    stream = torch.cuda.Stream()
    x = torch.zeros(1 << 22, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        # What is read is written by what the stream does late.
        torch.cuda._sleep(20_000_000)
        late = x + 1
        y = bt.cumsum(late, 0)
        last = y[-1].clone()
        (gradient,) = torch.autograd.grad(y[-1], x)
        assert not stream.query()
    stream.synchronize()
    assert last.item() == 1 << 22
    assert gradient.sum().item() == 1 << 22
