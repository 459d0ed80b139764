"""flce.jax: values and gradients beside fp64, and beside torch's flce bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import jax_cases as cases
import numpy as np
import pytest
import torch
from jax_cases import plain

import flce
import flce.jax as fj
from flce import errors

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
