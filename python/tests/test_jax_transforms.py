"""flce.jax under jax's transformations, and the memory of a step."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import jax_cases as cases
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax_cases import plain

import flce.jax as fj
from flce.core import _native
from flce.jax import _calls


def calls_in(function: Any, *given: Any) -> list[tuple[str, str]]:
    """Passes in a function's jaxpr, each with the names of its results."""
    found = []
    waiting = [jax.make_jaxpr(function)(*given).jaxpr]
    while waiting:
        for equation in waiting.pop().eqns:
            if equation.primitive.name == "ffi_call":
                found.append((equation.params["target_name"], dict(equation.params["attributes"])["results"]))
            waiting += jaxprs_in_params(equation.params)
    return found


def calls_of(function: Any, *given: Any) -> dict[str, int]:
    names = [name for name, _ in calls_in(function, *given)]
    return {name: names.count(f"flce_{name}") for name in ("forward", "backward")}


def test_a_batch_is_one_call() -> None:
    """vmap makes more rows of a batch, and the weight's gradient of a batch is one call's."""
    case = cases.case((4, 10))

    def of_each(hidden: Any, weight: Any) -> Any:
        return jax.vmap(lambda hidden, labels: fj.linear_cross_entropy(hidden, weight, labels, temperature=case.temperature[0]))(
            hidden, case.labels
        ).mean()

    gradient = jax.grad(of_each, (0, 1))
    assert calls_of(gradient, case.hidden, case.weight) == {"forward": 1, "backward": 1}
    rows = [
        jax.grad(lambda h, w: fj.linear_cross_entropy(h, w, case.labels[i], temperature=case.temperature[0]), (0, 1))(  # noqa: B023
            case.hidden[i], case.weight
        )
        for i in range(4)
    ]
    found = gradient(case.hidden, case.weight)
    assert np.allclose(found[0], np.stack([each[0] for each in rows]) / 4, atol=1e-7)
    assert np.allclose(found[1], sum(each[1] for each in rows) / 4, atol=1e-6)


def test_gradients_of_each_example() -> None:
    case = cases.case((4, 10))
    one = lambda weight, hidden, labels: fj.linear_cross_entropy(hidden, weight, labels)  # noqa: E731
    found = jax.jit(jax.vmap(jax.grad(one), (None, 0, 0)))(case.weight, case.hidden, case.labels)
    for i in range(4):
        assert np.allclose(found[i], jax.grad(one)(case.weight, case.hidden[i], case.labels[i]), atol=1e-7)


def test_a_batch_of_weights() -> None:
    case = cases.case((10,))
    weights = jnp.stack([case.weight, case.weight * 2])
    found = jax.vmap(plain(case), (None, 0))(case.hidden, weights)
    assert np.allclose(found, [plain(case)(case.hidden, each) for each in weights])
    gradients = jax.grad(lambda w: jax.vmap(plain(case), (None, 0))(case.hidden, w).sum())(weights)
    assert np.allclose(gradients[1], jax.grad(plain(case), 1)(case.hidden, weights[1]), atol=1e-7)


def test_scan_remat_and_donation() -> None:
    case = cases.case((2, 10))
    loss = plain(case)
    right = jax.value_and_grad(loss, (0, 1))(case.hidden, case.weight)

    def by_scan(hidden: Any, weight: Any) -> Any:
        def step(total: Any, each: Any) -> Any:
            hidden, labels = each
            return total + fj.linear_cross_entropy(hidden, weight, labels, reduction="sum"), None

        total, _ = jax.lax.scan(jax.checkpoint(step), 0.0, (hidden, case.labels))
        return total / (case.labels != cases.IGNORED).sum()

    for function in (by_scan, jax.checkpoint(loss)):
        found = jax.jit(jax.value_and_grad(function, (0, 1)))(case.hidden, case.weight)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
            assert np.allclose(one, other, atol=1e-6)
    step = jax.jit(lambda w, h: w - jax.grad(loss, 1)(h, w), donate_argnums=0)
    assert np.allclose(step(jnp.array(case.weight), case.hidden), case.weight - right[1][1], atol=1e-6)


def test_what_a_checkpoint_may_keep_has_names() -> None:
    case = cases.case((64,), depth=256, classes=2000)
    kept = jax.checkpoint_policies.save_only_these_names("flce_lse", "flce_retained")
    counts = {}
    for name, policy in (("nothing", None), ("kept", kept)):
        both = jax.value_and_grad(jax.checkpoint(plain(case), policy=policy), (0, 1))
        counts[name] = calls_of(both, case.hidden, case.weight)
    assert counts["nothing"] == {"forward": 2, "backward": 1}, counts
    assert counts["kept"] == {"forward": 1, "backward": 1}, counts


def test_a_frozen_weight_gets_no_gradient() -> None:
    case = cases.case()
    made = dict(calls_in(jax.grad(plain(case)), case.hidden, case.weight))
    assert made["flce_backward"] == "grad_hidden,workspace"


@pytest.mark.parametrize("labels", [np.int32, np.int64])
def test_with_numbers_of_64_bits(labels: Any) -> None:
    case = cases.case()
    before = plain(case)(case.hidden, case.weight)
    with jax.enable_x64(True):
        target = jnp.asarray(np.asarray(case.labels), labels)
        assert target.dtype == labels
        loss, gradient = jax.value_and_grad(lambda h: fj.linear_cross_entropy(h, case.weight, target))(case.hidden)
        assert loss == before and gradient.dtype == jnp.float32


def test_from_two_threads() -> None:
    case = cases.case((200,), classes=1000)
    step = jax.jit(jax.grad(plain(case), (0, 1)))
    right = step(case.hidden, case.weight)
    wrong: list[Any] = []

    def work() -> None:
        for _ in range(20):
            found = step(case.hidden, case.weight)
            if not all(jnp.array_equal(a, b) for a, b in zip(found, right, strict=True)):
                wrong.append(found)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ── Memory ──────────────────────────────────────────


def test_memory_keeps_to_a_limit() -> None:
    """XLA's own account: nothing of [N, V], and with a limit no more than that."""
    case = cases.case((512,), depth=64, classes=200_000)
    of_logits = 512 * 200_000 * 4

    def temporary(limit: int | None) -> int:
        step = jax.jit(jax.value_and_grad(lambda h, w: fj.linear_cross_entropy(h, w, case.labels, workspace_limit_bytes=limit), (0, 1)))
        return int(step.lower(case.hidden, case.weight).compile().memory_analysis().temp_size_in_bytes)

    gradient = case.weight.nbytes
    assert temporary(None) < of_logits / 2
    arrays = 64 * 512 * 8  # per-token numbers of XLA's own, and alignment
    for limit in (4 << 20, 16 << 20, 100 << 20):
        assert temporary(limit) <= limit + arrays, limit
    assert temporary(4 << 20) < temporary(100 << 20)
    assert temporary(None) >= gradient / 2  # something is retained


def test_retained_bytes_follow_the_weight() -> None:
    case = cases.case((512,), depth=64, classes=20000)
    layer = _calls.Layer("", ("loss",), ("hidden", "weight", "target"), False, -100, 0)
    with cases.on("cpu"):  # a GPU retains nothing of so small a layer
        row = _calls.retained_row_bytes(layer, case.hidden, case.weight)
    assert 0 < row * 512 <= case.weight.nbytes


def test_all_is_retained_where_rows_end_anywhere() -> None:
    """Bytes of a row are whole steps, and no column is computed again for it."""
    case = cases.case((100,), classes=2999)
    layer = _calls.Layer("", ("loss",), ("hidden", "weight", "target"), False, -100, 1 << 40)
    with cases.on("cpu"):
        row = _calls.retained_row_bytes(layer, case.hidden, case.weight)
        kernel = _calls.sized(layer, case.hidden, case.weight).kernel
        _, most = _native.choose_retained(kernel, 100, 1 << 40, False, 0)
    assert most <= row * 100 < most + 100 * 16
