# SPDX-License-Identifier: Apache-2.0
"""baracuda.jax: every operator under jit, its gradients, batching, and what compiled programs may carry."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
from test_torch import CASES, GIVEN, TWICE

import baracuda as bc
from baracuda._forms import FORMS

if support.missing("jax") is None:
    import jax
    import jax.numpy as jnp
    from jax.test_util import check_grads

    import baracuda.jax as bj
    from baracuda.jax import _bind

pytestmark = pytest.mark.requires("jax")


@pytest.fixture(autouse=True)
def _on(device: str):
    """The test's device is JAX's default, with int64 and float64."""
    with jax.default_device(jax.devices("cuda" if device == "cuda" else "cpu")[0]), bj._int64():
        yield


def arguments(name: str) -> tuple[list[Any], dict[str, Any]]:
    form, case = FORMS[name], CASES[name]
    rng = np.random.default_rng(5)
    arrays: list[Any] = []
    for array in form.arrays:
        value = case[array]
        if value is None:
            arrays.append(None)
            continue
        if isinstance(value, tuple):
            value = rng.uniform(0, 1, value[1:]) if value[0] == "uniform" else rng.standard_normal(value)
        value = np.asarray(value)
        arrays.append(jnp.asarray(value.astype(float) if array in ("rois", "boxes") else value))
    return arrays, {static: case[static] for static in form.settings}


def by_plan(name: str, arrays: list[Any], settings: dict[str, Any]) -> list[np.ndarray]:
    """What the plan gives for the same NumPy arrays."""
    form = FORMS[name]
    specs = [None if array is None else _bind._spec(array) for array in arrays]
    fields, outputs = form.describe(*specs, **settings)
    plan = form.plan(device="cpu", **fields)
    operands = {name: np.array(array) for name, array in zip(form.arrays, arrays, strict=True) if array is not None}
    for output, spec in zip(form.outputs, outputs, strict=True):
        operands.setdefault(output, np.empty(spec.shape, spec.dtype))
    wanted = {operand.name for operand in plan.operands}
    plan.run(**{name: array for name, array in operands.items() if name in wanted})
    return [operands[output] for output in form.outputs]


def differentiable(name: str) -> tuple[Callable[..., Any], list[Any]]:
    """The form as a function of its floating arrays, with floating results only; and these arrays."""
    form = FORMS[name]
    arrays, settings = arguments(name)
    places = [
        place for place, array in enumerate(arrays)
        if array is not None and array.dtype == float and form.arrays[place] not in GIVEN
    ]  # fmt: skip

    def function(*leaves: Any) -> Any:
        filled = list(arrays)
        for place, leaf in zip(places, leaves, strict=True):
            filled[place] = leaf
        results = _bind.call(name, *filled, **settings)
        return [result for result in results if jnp.issubdtype(result.dtype, jnp.floating)]

    return function, [arrays[place] for place in places]


@pytest.mark.parametrize("name", CASES)
def test_every_operator_under_jit(name: str, device: str) -> None:
    arrays, settings = arguments(name)
    jitted = jax.jit(lambda *arrays: _bind.call(name, *arrays, **settings))
    for got, expected in zip(jitted(*arrays), by_plan(name, arrays, settings), strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got, expected, rtol=1e-12 if device == "cuda" else 0)


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.gradient is not None])
def test_gradients(name: str, device: str) -> None:
    function, leaves = differentiable(name)
    assert leaves
    check_grads(jax.jit(function), leaves, order=2 if name in TWICE else 1, modes=["rev"], rtol=1e-5, atol=1e-6)


def test_no_gradient_is_an_error(device: str) -> None:
    cache = jnp.zeros((2, 2, 1, 1))
    loss = lambda cache: bj.kv_cache_gather(cache, cache, jnp.array([1]))[0].sum()  # noqa: E731
    with pytest.raises(bc.UnsupportedError, match=r"^baracuda\.jax: kv_cache_gather: has no gradient of its own"):
        jax.grad(loss)(cache)
    square = lambda x: (bj.cumprod(x) ** 2).sum()  # noqa: E731
    with pytest.raises(bc.UnsupportedError, match=r"cumprod_backward: is a gradient and has no gradient of its own"):
        jax.grad(lambda x: jax.grad(square)(x)[0])(jnp.ones(3))


def test_jit_of_grad_of_several(device: str) -> None:
    ids, boxes = jnp.array([0, 2, 1, 2]), jnp.array([[0, 0.0, 0, 4, 4], [0, 1, 1, 6, 5]])

    def loss(x: Any) -> Any:
        y = bj.cumsum(x, 1) * bj.segment_mean(x, ids, 3).sum()
        image = bj.linear_recurrence(jax.nn.sigmoid(y), x, 1)[None, None]
        return (bj.roi_align(image, boxes, 2) ** 2).sum() + bj.cummax(y, 1).sum()

    x = jax.random.normal(jax.random.key(0), (4, 8))
    value, gradient = jax.jit(jax.value_and_grad(loss))(x)
    np.testing.assert_allclose(value, loss(x), rtol=1e-12)
    np.testing.assert_allclose(gradient, jax.grad(loss)(x), rtol=1e-9)
    check_grads(loss, (x,), order=1, modes=["rev"], rtol=1e-4)


def test_gradients_are_those_of_jax(device: str) -> None:
    x = jax.random.normal(jax.random.key(1), (4, 9))
    weights = jax.random.normal(jax.random.key(2), (4, 9))
    for ours, theirs, reverse in (
        (bj.cumsum, jax.lax.cumsum, False),
        (bj.cumprod, jax.lax.cumprod, True),
        (bj.cummax, jax.lax.cummax, False),
        (bj.cummin, jax.lax.cummin, True),
        (bj.logcumsumexp, jax.lax.cumlogsumexp, False),
    ):
        mine = jax.value_and_grad(lambda x: (ours(x, 1, reverse=reverse) * weights).sum())(x)  # noqa: B023
        reference = jax.value_and_grad(lambda x: (theirs(x, 1, reverse=reverse) * weights).sum())(x)  # noqa: B023
        np.testing.assert_allclose(mine[0], reference[0], rtol=1e-11)
        np.testing.assert_allclose(mine[1], reference[1], rtol=1e-9, atol=1e-12)


def test_vmap(device: str) -> None:
    x = jax.random.normal(jax.random.key(0), (3, 5, 4))
    for axis in (0, 1, -1):
        got = jax.vmap(lambda x: bj.cumsum(x, axis))(x)  # noqa: B023
        np.testing.assert_allclose(got, jnp.cumsum(x, axis if axis < 0 else axis + 1), rtol=1e-12)
    # Of all of a batch there is one call; the arrays that are not batched are repeated.
    text = str(jax.make_jaxpr(jax.vmap(jax.grad(lambda x: (bj.cumsum(x, 0) ** 2).sum())))(x))
    assert not re.search(r"\b(scan|while)\[", text)
    assert text.count("ffi_call[") == 2
    h = jax.vmap(lambda a, b, h0: bj.linear_recurrence(a, b, 0, h0=h0), in_axes=(0, None, 1))(x, x[0], jnp.ones((4, 3)))
    np.testing.assert_allclose(h[2], bj.linear_recurrence(x[2], x[0], 0, h0=jnp.ones(4)), rtol=1e-12)
    nested = jax.vmap(jax.vmap(bj.logcumsumexp))(x)
    np.testing.assert_allclose(nested, bj.logcumsumexp(x), rtol=1e-12)
    # Other operators run one after another.
    ids = jnp.array([[0, 1, 0, 2, 2], [2, 2, 2, 1, 1], [0, 0, 5, 0, 0]])
    sums = jax.vmap(lambda x, ids: bj.segment_sum(x, ids, 3))(x, ids)
    np.testing.assert_allclose(sums[1], bj.segment_sum(x[1], ids[1], 3), rtol=1e-12)
    written = jax.vmap(lambda x: bj.write_slice(x, jnp.zeros((1, 4)), ((2, 3), (0, 4))))(x)
    assert not written[:, 2].any()
    np.testing.assert_array_equal(written[:, 3:], x[:, 3:])
    slopes = jax.vmap(jax.grad(lambda x, ids: (bj.segment_sum(x, ids, 3) ** 2).sum()))(x, ids)
    expected = jax.grad(lambda x: (bj.segment_sum(x, ids[2], 3) ** 2).sum())(x[2])
    np.testing.assert_allclose(slopes[2], expected, rtol=1e-12)


def test_writes_are_pure_and_reuse_donated_memory(device: str) -> None:
    cache = jnp.zeros((4, 8))
    written = bj.write_slice(cache, jnp.ones((1, 8)), np.s_[1:2])
    assert written[1].tolist() == [1] * 8
    assert not cache.any()
    step = jax.jit(lambda cache, at: bj.dynamic_update_slice(cache, jnp.ones((1, 1)), at), donate_argnums=0)
    cache = jax.block_until_ready(jnp.zeros((4, 8)))
    address = cache.unsafe_buffer_pointer()
    for place in range(3):
        cache = step(cache, jnp.array([place, 7]))
    assert cache[:, 7].tolist() == [1, 1, 1, 0]
    assert cache.unsafe_buffer_pointer() == address


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8", "int32", "bool"])
def test_dtypes(dtype: str, device: str) -> None:
    x = jnp.array([1, 0, 1, 1]).astype(dtype)
    assert bj.cumsum(x).tolist() == [1, 1, 2, 3]
    assert bj.cumsum(x).dtype == ("int64" if dtype == "bool" else dtype)
    wide = "float32" if "float" in dtype else "int32"
    assert bj.cumsum(x, dtype=wide).dtype == wide


def test_default_integers_have_32_bits(device: str) -> None:
    code = (
        "import jax.numpy as jnp, baracuda.jax as bj\n"
        "y, where = bj.cummax(jnp.array([1.0, 3.0]), indices=True)\n"
        "keep, count = bj.nms(jnp.array([[0.0, 0, 1, 1]]), jnp.array([1.0]), 0.5)\n"
        "print(where.dtype, bj.cumsum(jnp.array([True])).dtype, keep.dtype, count.dtype, keep, count)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split("\n")[-2] == "int32 int32 int32 int32 [0] 1"


def test_empty_segments_keep_the_sign_of_zero(device: str) -> None:
    data, ids = jnp.ones((1, 2)), jnp.zeros(1, int)
    for zero in (0.0, -0.0, 0.0):
        output = bj.segment_max(data, ids, 2, empty_value=zero)
        assert jnp.signbit(output[1]).tolist() == [math.copysign(1, zero) < 0] * 2


def test_errors_are_ours_and_come_early(device: str) -> None:
    x = jnp.zeros((3, 4))
    with pytest.raises(bc.InvalidProblemError, match=r"^ScanPlan: axis"):
        jax.jit(lambda x: bj.cumsum(x, 5))(x)
    message = r"^ScanPlan: b: expected float64 of shape \(3, 4\), got float64 of shape \(4,\)"
    with pytest.raises(bc.InvalidProblemError, match=message):
        bj.linear_recurrence(x, x[0])
    with pytest.raises(bc.InvalidProblemError, match=r"^segment_sum: num_segments: is missing"):
        bj.segment_sum(x, jnp.zeros(3, int))
    with pytest.raises(bc.InvalidProblemError, match=r"^segment_sum: num_segments: expected 2 for 3 offsets, got 3"):
        bj.segment_sum(x, offsets=jnp.zeros(3, int), num_segments=3)


def test_compiled_programs_hold_no_address(device: str, tmp_path: Path) -> None:
    code = (
        "import jax, jax.numpy as jnp, baracuda.jax as bj, os\n"
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)\n"
        "jax.config.update('jax_persistent_cache_min_entry_size_bytes', 0)\n"
        "hits = []\n"
        "jax.monitoring.register_event_listener(lambda name, **_: hits.append(name.endswith('cache_hits')))\n"
        "print(jax.jit(lambda x: bj.cumsum(x + 1) * 2)(jnp.arange(4.0)).tolist(), any(hits))"
    )
    # Of two processes the second has its plans elsewhere, and the program from the first.
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PLATFORMS": device}
    for hit in (False, True):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120, env=environment
        )
        assert done.stdout.split("\n")[-2] == f"[2.0, 6.0, 12.0, 20.0] {hit}"


def test_programs_of_another_version_are_refused(device: str) -> None:
    call = jax.ffi.ffi_call(_bind._TARGET, jax.ShapeDtypeStruct((4,), np.float32), vmap_method="sequential")
    x = jnp.zeros(4, np.float32)
    attributes = {"operator": "scan", "descriptor": np.zeros(8, np.uint8), "slots": np.zeros(2, np.int32)}
    with pytest.raises(Exception, match="compiled for another version"):
        jax.block_until_ready(call(x, **attributes, version="0"))
    with pytest.raises(Exception, match="fit no operator"):
        jax.block_until_ready(call(x, **attributes, version=bc.__version__))


def test_a_build_without_the_handler_says_so(device: str) -> None:
    code = (
        "import baracuda._core as core\n"
        "core.xla_handler = lambda cuda: None\n"
        "try:\n    import baracuda.jax\nexcept ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert "this build of baracuda has no handler for XLA" in done.stdout
