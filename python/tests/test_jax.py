"""flce.jax: values and gradients beside fp64, beside torch's flce bit for bit, and under jax's transformations."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax_cases as cases
import numpy as np
import pytest
import torch
from jax.extend.core import jaxprs_in_params

import flce
import flce.jax as fj
from flce import errors
from flce.jax import _calls

OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1, "z_loss": 1e-3},
    {"softcap": 8.0, "logit_scale": 0.5, "bias": True},
    {"temperature": True},
    {"temperature": 0.7, "bias": True, "label_smoothing": 0.2},
]
REDUCTIONS = ("none", "sum", "mean", "weighted_mean")


def arguments(case: cases.Case, options: dict[str, Any]) -> dict[str, Any]:
    """Options with their arrays."""
    given = dict(options)
    if given.get("bias"):
        given["bias"] = case.bias
    if given.get("temperature") is True:
        given["temperature"] = case.temperature
    return given


def wanted(case: cases.Case, options: dict[str, Any], inputs: list[torch.Tensor]) -> cases.Expected:
    given = {name: value for name, value in options.items() if name not in ("bias", "temperature")}
    temperature = options.get("temperature")
    if temperature is True:
        given["temperature"] = cases.as_torch(case.temperature, torch.float64)
    elif temperature is not None:
        given["temperature"] = torch.full(case.labels.shape, temperature, dtype=torch.float64)
    hidden, weight, *bias = inputs
    return cases.expected(hidden, weight, cases.as_torch(case.labels).long(), *bias, **given)


@pytest.mark.parametrize("layout", ["vocab_major", "hidden_major"])
@pytest.mark.parametrize("dtype", cases.BOUNDS)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda each: "+".join(each) or "plain")
def test_values_and_gradients_beside_fp64(options: dict[str, Any], dtype: str, layout: str, device: str) -> None:
    with cases.on(device):
        # Classes are no multiple of a tile, tokens have two dimensions.
        case = cases.case((3, 11), dtype=jnp.dtype(dtype))
        given = arguments(case, options)
        arrays = [case.hidden, case.weight.T if layout == "hidden_major" else case.weight, *([case.bias] if options.get("bias") else [])]

        def outputs(hidden: Any, weight: Any, bias: Any = None) -> tuple[Any, ...]:
            more = given | ({"bias": bias} if bias is not None else {})
            made: tuple[Any, ...] = fj.linear_cross_entropy(
                hidden, weight, case.labels, weight_layout=layout, reduction="none", return_lse=True, return_logprobs=True,
                return_entropy=True, **more,
            )  # fmt: skip
            return made

        def total(*given: Any) -> Any:
            return sum((i + 1) * each.sum() for i, each in enumerate(outputs(*given)))

        made = jax.jit(outputs)(*arrays)
        gradients = jax.jit(jax.grad(total, tuple(range(len(arrays)))))(*arrays)
    inputs = [cases.as_torch(each, torch.float64).requires_grad_() for each in (case.hidden, case.weight, *arrays[2:])]
    right = wanted(case, options, inputs)
    bound = cases.BOUNDS[dtype]
    for found, each in zip(made, right[:4], strict=True):
        cases.near(found, each, bound)
    sum((i + 1) * each.sum() for i, each in enumerate(right[:4])).backward()
    for i, (found, each) in enumerate(zip(gradients, inputs, strict=True)):
        assert found.dtype == arrays[i].dtype
        assert each.grad is not None
        cases.near(found.T if i == 1 and layout == "hidden_major" else found, each.grad, bound)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("labels", ["some", "none valid", "one valid"])
def test_reductions(reduction: str, labels: str) -> None:
    case = cases.case()
    target = case.labels
    if labels != "some":
        target = jnp.full_like(target, cases.IGNORED)
        target = target.at[5].set(3) if labels == "one valid" else target
    # Ignored rows hold what must not be read.
    hidden = jnp.where((target == cases.IGNORED)[:, None], jnp.nan, case.hidden)
    weight = jnp.where(target == cases.IGNORED, jnp.inf, case.token_weight)
    given: dict[str, Any] = {"reduction": reduction, "z_loss": 1e-3}
    if reduction != "mean":
        given["token_weight"] = weight
    total = lambda hidden, weight: fj.linear_cross_entropy(hidden, weight, target, **given).sum()  # noqa: E731
    loss, gradients = jax.value_and_grad(total, (0, 1))(hidden, case.weight)
    inputs = [cases.as_torch(each, torch.float32).requires_grad_() for each in (hidden, case.weight)]
    of_torch = {name: cases.as_torch(value) if name == "token_weight" else value for name, value in given.items()}
    right = flce.linear_cross_entropy(*inputs, cases.as_torch(target), **of_torch).sum()
    right.backward()
    assert np.isfinite(loss)
    cases.near(loss, right, 1e-6)
    for found, each in zip(gradients, inputs, strict=True):
        cases.near(found, each.grad.nan_to_num(0), 1e-5)


def test_a_given_number_of_tokens_divides() -> None:
    case = cases.case()
    loss = functools.partial(fj.linear_cross_entropy, case.hidden, case.weight, case.labels)
    total = loss(reduction="sum")
    assert np.allclose(loss(num_valid_tokens=5), total / 5) and loss(num_valid_tokens=jnp.int32(0)) == 0
    with pytest.raises(errors.ArgumentError, match="only 'mean' divides"):
        loss(num_valid_tokens=5, reduction="sum")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("limit", [None, 1 << 22])
def test_the_same_bits_as_in_torch(dtype: Any, limit: int | None, device: str) -> None:
    """Both take the same plan. On a CPU what is retained changes no bit; on a GPU both retain nothing here."""
    case = cases.case((40,), classes=500, dtype=dtype)
    inputs = [cases.as_torch(each).to(device).requires_grad_() for each in (case.hidden, case.weight)]
    target = cases.as_torch(case.labels).to(device)
    given = {"workspace_limit_bytes": limit, "label_smoothing": 0.1}
    loss, lse = flce.linear_cross_entropy(*inputs, target, reduction="none", return_lse=True, retain_in_grad_weight=False, **given)
    loss.sum().backward()
    with cases.on(device):
        of_rows = functools.partial(fj.linear_cross_entropy, reduction="none", return_lse=True, **given)
        made, pull = jax.vjp(lambda hidden, weight: of_rows(hidden, weight, case.labels), case.hidden, case.weight)
        gradients = pull((jnp.ones_like(made[0]), jnp.zeros_like(made[1])))
    for found, right in zip((*made, *gradients), (loss, lse, *(each.grad for each in inputs)), strict=True):
        assert torch.equal(cases.as_torch(found), right.detach().cpu())


def test_an_fp32_weight_beside_16_bits() -> None:
    case = cases.case(dtype=jnp.bfloat16)
    wide = case.weight.astype(jnp.float32) * 1.001
    total = lambda hidden, weight: fj.linear_cross_entropy(hidden, weight, case.labels)  # noqa: E731
    gradient = jax.grad(total, 1)(case.hidden, wide)
    assert gradient.dtype == jnp.float32
    assert total(case.hidden, wide) == total(case.hidden, wide.astype(jnp.bfloat16))


def test_hidden_sizes_and_vocabularies_that_are_padded() -> None:
    case = cases.case(depth=61, classes=299)
    right = [cases.as_torch(each, torch.float64).requires_grad_() for each in (case.hidden, case.weight)]
    expected = cases.expected(*right, cases.as_torch(case.labels).long())
    (expected.loss.sum() / expected.valid.sum()).backward()
    for layout in ("vocab_major", "hidden_major"):
        weight = case.weight.T if layout == "hidden_major" else case.weight
        total = lambda hidden, weight: fj.linear_cross_entropy(hidden, weight, case.labels, weight_layout=layout)  # noqa: B023, E731
        gradients = jax.grad(total, (0, 1))(case.hidden, weight)
        cases.near(gradients[0], right[0].grad, 2e-5)
        cases.near(gradients[1].T if layout == "hidden_major" else gradients[1], right[1].grad, 2e-5)


def test_shift_is_along_the_sequence() -> None:
    case = cases.case((3, 12))
    shifted = jnp.concatenate([case.labels[:, 1:], jnp.full((3, 1), cases.IGNORED)], 1)
    assert fj.linear_cross_entropy(case.hidden, case.weight, case.labels, shift=1) == fj.linear_cross_entropy(
        case.hidden, case.weight, shifted
    )
    with pytest.raises(errors.ArgumentError, match="where a sequence ends is not known"):
        fj.linear_cross_entropy(case.hidden[0], case.weight, case.labels[0], shift=1)
    with pytest.raises(errors.ArgumentError, match="12 long"):
        fj.linear_cross_entropy(case.hidden, case.weight, case.labels, shift=13)


def test_the_most_likely_class() -> None:
    case = cases.case((4, 9))
    _, top1 = fj.linear_logprobs(case.hidden, case.weight, case.labels, return_top1=True)
    logits = case.hidden @ case.weight.T
    assert top1.dtype == jnp.int32
    assert jnp.array_equal(top1, jnp.where(case.labels == cases.IGNORED, -1, logits.argmax(-1)))
    both = lambda hidden: fj.linear_cross_entropy(hidden, case.weight, case.labels, return_top1=True)  # noqa: E731
    (_, again), gradient = jax.value_and_grad(both, has_aux=True)(case.hidden)
    assert jnp.array_equal(again, top1) and jnp.array_equal(gradient, jax.grad(plain(case))(case.hidden, case.weight))


# ── A teacher's classes ─────────────────────────────


def test_distillation_beside_torch(device: str) -> None:
    case = cases.case((2, 13), classes=120)
    options = {"hard_weight": 0.3, "temperature": 0.5, "reduction": "sum"}
    inputs = [cases.as_torch(each).to(device).requires_grad_() for each in (case.hidden, case.weight)]
    ids, probs, labels = (cases.as_torch(each).to(device) for each in (case.teacher_ids, case.teacher_probs, case.labels))
    right, *of_classes = flce.linear_topk_distillation(*inputs, ids, probs, target=labels, return_teacher_logprobs=True, **options)
    right.backward()
    with cases.on(device):
        loss = lambda hidden, weight: fj.linear_topk_distillation(  # noqa: E731
            hidden, weight, case.teacher_ids, case.teacher_probs, labels=case.labels, return_teacher_logprobs=True, **options
        )
        (made, logprobs), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(case.hidden, case.weight)
    cases.near(made, right.cpu(), 1e-6)
    cases.near(logprobs, of_classes[0].cpu(), 1e-6)
    for found, each in zip(gradients, inputs, strict=True):
        cases.near(found, each.grad.cpu(), 1e-5)
    with pytest.raises(errors.ArgumentError, match="labels is None"):
        fj.linear_topk_distillation(case.hidden, case.weight, case.teacher_ids, case.teacher_probs, hard_weight=0.5)
    # Log-probabilities in the place of probabilities.
    assert fj.linear_topk_distillation(case.hidden, case.weight, case.teacher_ids, jnp.log(case.teacher_probs)) == 0
    with pytest.raises(errors.LabelError):
        fj.check_labels()


def test_logprobs_at_beside_fp64(device: str) -> None:
    case = cases.case((2, 13), classes=120)
    ids = case.teacher_ids.at[..., 1].set(case.teacher_ids[..., 0]).at[0, 2].set(-1)
    given = case.teacher_probs
    with cases.on(device):
        total = lambda hidden, weight: (fj.linear_logprobs_at(hidden, weight, ids, softcap=9.0) * given).sum()  # noqa: E731
        made, lse = fj.linear_logprobs_at(case.hidden, case.weight, ids, softcap=9.0, return_lse=True)
        gradients = jax.jit(jax.grad(total, (0, 1)))(case.hidden, case.weight)
    inputs = [cases.as_torch(each, torch.float64).requires_grad_() for each in (case.hidden, case.weight)]
    at = cases.as_torch(ids).long()
    right = cases.expected(*inputs, torch.zeros(2, 13), softcap=9.0)
    named = torch.where(at == -1, 0.0, right.all_logprobs.gather(-1, at.clamp(min=0)))
    (named * cases.as_torch(given, torch.float64)).sum().backward()
    cases.near(made, named, 2e-5)
    cases.near(lse, torch.where((at != -1).any(-1), right.lse, 0.0), 2e-5)
    for found, each in zip(gradients, inputs, strict=True):
        cases.near(found, each.grad, 2e-5)


# ── Transformations ─────────────────────────────────


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


def plain(case: cases.Case) -> Any:
    return lambda hidden, weight: fj.linear_cross_entropy(hidden, weight, case.labels)


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
    row = _calls.retained_row_bytes(layer, case.hidden, case.weight)
    assert 0 < row * 512 <= case.weight.nbytes


# ── Refusals ────────────────────────────────────────


def test_arguments_are_refused_by_name() -> None:
    case = cases.case()
    hidden, weight, labels = case.hidden, case.weight, case.labels
    loss = fj.linear_cross_entropy
    refused: list[tuple[type[Exception], str, Any]] = [
        (errors.ShapeError, "weight_layout='hidden_major'", lambda: loss(hidden, weight.T, labels)),
        (errors.ShapeError, r"labels has shape \[36\]", lambda: loss(hidden, weight, labels[1:])),
        (errors.ShapeError, "bias has shape", lambda: loss(hidden, weight, labels, bias=case.bias[1:])),
        (errors.ShapeError, "temperature has shape", lambda: loss(hidden, weight, labels, temperature=case.temperature[1:])),
        (errors.ShapeError, "token_weight has shape", lambda: loss(hidden, weight, labels, token_weight=case.token_weight[1:])),
        (errors.DTypeError, "labels has dtype float32", lambda: loss(hidden, weight, labels * 1.0)),
        (errors.DTypeError, "hidden has dtype int32", lambda: loss(labels, weight, labels)),
        (errors.DTypeError, "weight has dtype bfloat16", lambda: loss(hidden, weight.astype(jnp.bfloat16), labels)),
        (errors.DTypeError, "weight is a str", lambda: loss(hidden, "weight", labels)),
        (errors.ArgumentError, "weight_layout is 'auto'", lambda: loss(hidden, weight, labels, weight_layout="auto")),
        (errors.ArgumentError, "reduction is 'max'", lambda: loss(hidden, weight, labels, reduction="max")),
        (errors.ArgumentError, "token_weight is None", lambda: loss(hidden, weight, labels, reduction="weighted_mean")),
        (errors.ArgumentError, "temperature is 0.0", lambda: loss(hidden, weight, labels, temperature=0.0)),
        (errors.ArgumentError, "workspace_limit_bytes is -1", lambda: loss(hidden, weight, labels, workspace_limit_bytes=-1)),
        (errors.ArgumentError, "axis_name is 'x'", lambda: loss(hidden, weight, labels, axis_name="x")),
        (errors.ArgumentError, "ignore_index is 2147483648", lambda: loss(hidden, weight, labels, ignore_index=2**31)),
        (errors.ArgumentError, "ignore_index is None", lambda: loss(hidden, weight, labels, ignore_index=None, shift=1)),
        (errors.ArgumentError, "beyond int32", lambda: loss(hidden, weight, np.full(37, 2**32 + 3))),
        (errors.DTypeError, "labels is None", lambda: loss(hidden, weight, None)),
        (errors.DTypeError, "hidden is None", lambda: loss(None, weight, labels)),
        (errors.DTypeError, "labels is a list", lambda: loss(hidden, weight, [[1, 2], [3]])),
        (errors.DTypeError, "return_lse is 'no'", lambda: loss(hidden, weight, labels, return_lse="no")),
        (errors.DTypeError, "token_weight has dtype complex64", lambda: loss(hidden, weight, labels, token_weight=1j * case.token_weight)),
        (errors.ArgumentError, "temperature is 1000", lambda: loss(hidden, weight, labels, temperature=10**400)),
        (errors.ArgumentError, "num_valid_tokens is -3", lambda: loss(hidden, weight, labels, num_valid_tokens=-3)),
        (errors.ArgumentError, "num_valid_tokens is nan", lambda: loss(hidden, weight, labels, num_valid_tokens=float("nan"))),
        (
            errors.ArgumentError,
            "there is none here",
            lambda: jax.vmap(lambda h: loss(h, weight, labels, axis_name="x"), axis_name="x")(hidden[None]),
        ),
        (errors.SpecError, "label_smoothing", lambda: loss(hidden, weight, labels, label_smoothing=2.0)),
        (errors.PlanError, "too small", lambda: loss(hidden, weight, labels, workspace_limit_bytes=100)),
        (errors.ShapeError, "ids has shape", lambda: fj.linear_logprobs_at(hidden, weight, labels)),
        (
            errors.ArgumentError,
            r"stop_gradient\(temperature\)",
            lambda: jax.grad(lambda t: loss(hidden, weight, labels, temperature=t))(2.0),
        ),
        (
            errors.UnsupportedTransformError,
            "no second derivatives",
            lambda: jax.grad(lambda h: (jax.grad(plain(case))(h, weight) ** 2).sum())(hidden),
        ),
        (TypeError, "forward-mode", lambda: jax.jvp(lambda h: loss(h, weight, labels), (hidden,), (hidden,))),
        (ValueError, "flce_forward", lambda: jax.export.export(jax.jit(plain(case)))(hidden, weight)),
    ]
    for kind, text, call in refused:
        with pytest.raises(kind, match=text):
            call()


def test_labels_out_of_range_are_told() -> None:
    case = cases.case()
    fj.check_labels()
    wrong = case.labels.at[5].set(301).at[9].set(-3)
    loss = fj.linear_cross_entropy(case.hidden, case.weight, wrong)
    assert loss == fj.linear_cross_entropy(case.hidden, case.weight, case.labels.at[5].set(-100).at[9].set(-100))
    with pytest.raises(errors.LabelError, match=r"target\[5\]") as caught:
        fj.check_labels()
    assert caught.value.row == 5
    fj.check_labels()  # once
    # Kernels' faults are told one a check.
    for options in ({"softcap": 3.0}, {"softcap": 3.0, "z_loss": 1e-3}):
        fj.linear_cross_entropy(case.hidden, case.weight, wrong, **options)
    for _ in range(2):
        with pytest.raises(errors.LabelError):
            fj.check_labels()
    fj.check_labels()


def test_one_token_and_none() -> None:
    case = cases.case((2, 5))
    one = lambda hidden: fj.linear_cross_entropy(hidden, case.weight, case.labels[1, 1], return_lse=True)[0]  # noqa: E731
    right = lambda hidden: fj.linear_cross_entropy(hidden, case.weight, case.labels[1:, 1])  # noqa: E731
    assert one(case.hidden[1, 1]) == right(case.hidden[1:, 1])
    assert jnp.array_equal(jax.grad(one)(case.hidden[1, 1]), jax.grad(right)(case.hidden[1:, 1])[0])
    for shift in (0, 1):
        none = lambda weight: fj.linear_cross_entropy(case.hidden[:, :0], weight, case.labels[:, :0], shift=shift)  # noqa: B023, E731
        loss, gradient = jax.value_and_grad(none)(case.weight)
        assert loss == 0 and not gradient.any()


@pytest.mark.nightly
def test_more_kernels_than_words() -> None:
    """Faults of kernels beyond the thousandth share a word. In a process of its own, whose kernels they are."""
    program = """
import flce, flce.jax, jax.numpy as jnp
from flce.jax import _library
for tokens in range(1, 1100):
    _library.kernel(_library.CPU, "D=16,V=40,dtype=fp32", 1 << 28, tokens)
flce.jax.linear_cross_entropy(jnp.ones((9, 16)), jnp.ones((40, 16)), jnp.full(9, 40), workspace_limit_bytes=1 << 29)
try:
    flce.jax.check_labels()
except flce.LabelError as error:
    assert "target[0]" in str(error), error
else:
    raise SystemExit("no error")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_strict_mode_and_one_cache_with_torch(tmp_path: Path) -> None:
    """A kernel that torch's call has compiled is there for JAX's of the same layer; another is a miss that names the command."""
    environment = os.environ | {"FLCE_CACHE_DIR": str(tmp_path)}
    of_torch = """
import torch, flce
hidden, weight = torch.ones(4, 72, requires_grad=True), torch.ones(91, 72)
flce.linear_cross_entropy(hidden, weight, torch.zeros(4, dtype=torch.int64), softcap=9.0).backward()
"""
    of_jax = """
import jax, flce.jax, jax.numpy as jnp
hidden, weight, labels = jnp.ones((4, 72)), jnp.ones((91, 72)), jnp.zeros(4, jnp.int32)
print(jax.grad(lambda h: flce.jax.linear_cross_entropy(h, weight, labels, softcap=9.0))(hidden).shape)
try:
    flce.jax.linear_cross_entropy(hidden, weight, labels, z_loss=1e-3)
except flce.CacheMissError as error:
    print(error)
"""
    for program, strict in ((of_torch, "0"), (of_jax, "1")):
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment | {"FLCE_STRICT": strict}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
    shape, miss = done.stdout.strip().split("\n")
    assert shape == "(4, 72)" and "flce prewarm --spec 'D=72,V=91,dtype=fp32,z_loss=0.001' --device " in miss


def test_a_library_that_was_built_without_xlas_headers(tmp_path: Path) -> None:
    (tmp_path / "libflce.so").symlink_to(Path(os.environ["FLCE_LIBRARY"]).resolve())
    program = """
import flce.jax, jax.numpy as jnp
try:
    flce.jax.linear_cross_entropy(jnp.ones((3, 8)), jnp.ones((5, 8)), jnp.zeros(3, jnp.int32))
except flce.UnavailableError as error:
    assert "FLCE_XLA_INCLUDE" in str(error), error
else:
    raise SystemExit("no error")
"""
    environment = os.environ | {"FLCE_LIBRARY": str(tmp_path / "libflce.so")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_without_torch_and_without_jax() -> None:
    """Each stands alone: flce.jax where torch is not installed, and the rest of the package without jax."""
    of_jax = """
        import sys
        sys.modules["torch"] = None
        import flce, flce.jax, jax.numpy as jnp
        assert flce.jax.linear_cross_entropy(jnp.ones((3, 8)), jnp.ones((5, 8)), jnp.zeros(3, jnp.int32)) > 0
        try:
            flce.linear_cross_entropy
        except AttributeError as error:
            assert "needs torch" in str(error) and "flce.jax" in str(error), error
        else:
            sys.exit("no error")
        import pydoc
        assert "ArgumentError" in pydoc.render_doc(flce) and "engine" not in dir(flce) and not hasattr(flce, "engine")
        names = {}
        exec("from flce import *", names)
        assert "ArgumentError" in names
    """
    of_torch = """
        import sys
        import flce, torch
        flce.linear_cross_entropy(torch.ones(3, 8), torch.ones(5, 8), torch.zeros(3, dtype=torch.int64))
        assert "jax" not in sys.modules and "flce.jax" not in sys.modules
    """
    for program in (of_jax, of_torch):
        text = "\n".join(line.removeprefix("        ") for line in program.split("\n"))
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
