"""temperature, token_weight, dft, top1 and log_sum_sq_probs, and linear_logprobs: against fp64, in every form and combination."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from levels import first_quick
from support import OUTPUTS, Problem, assert_close, check, make_problem, reference
from torch import Tensor

import flce
from flce.core import _kernels
from flce.core._frame import Inputs

pytestmark = [pytest.mark.first_and_direct, pytest.mark.pairwise]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FUNCTIONS = ["linear_cross_entropy", "linear_logprobs"]
ALL_LOGPROBS = {f"return_{name}": True for name in OUTPUTS["linear_logprobs"][1:]}
ALL_OUTPUTS = {f"return_{name}": True for name in OUTPUTS["linear_cross_entropy"][1:]}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("temperature", [None, 1.0, 1, 0.6, True], ids=str)
@pytest.mark.parametrize("extra", [{}, {"return_entropy": True}, ALL_LOGPROBS], ids=["alone", "entropy", "all"])
def test_logprobs_match_fp64(device: str, dtype: torch.dtype, temperature: Any, extra: dict[str, bool]) -> None:
    problem = make_problem(device, dtype, bias=bool(extra), softcap=5.0, temperature=temperature)
    check(problem, dtype, "linear_logprobs", **extra)


@pytest.mark.parametrize("options", [{}, {"logit_scale": 0.7, "ignore_index": 3}, {"workspace_limit_bytes": 4 << 20}], ids=str)
@pytest.mark.parametrize("shape", [(1, 8, 2), (5, 8, 3), (129, 64, 1000), (7, 5, 123)], ids=str)
def test_logprobs_of_any_shape(device: str, shape: tuple[int, int, int], options: dict[str, Any]) -> None:
    num_tokens, hidden_size, vocab_size = shape
    check(
        make_problem(device, num_tokens=num_tokens, hidden_size=hidden_size, vocab_size=vocab_size, **options),
        torch.float32,
        "linear_logprobs",
    )


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "weighted_mean"])
@pytest.mark.parametrize("dft", [False, True])
@pytest.mark.parametrize("outputs", [{}, ALL_OUTPUTS], ids=["loss", "all"])
def test_reductions_of_weighted_tokens(device: str, reduction: str, dft: bool, outputs: dict[str, bool]) -> None:
    for class_weight in (False, True):
        problem = make_problem(device, token_weight=True, class_weight=class_weight, z_loss=1e-2, dft=dft)
        check(problem, torch.float32, reduction=reduction, **outputs)


def test_weights_of_nothing_give_zero(device: str) -> None:
    problem = make_problem(device)
    for weights in (torch.zeros(37, device=device), (problem.target == -100).float()):
        loss = flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, token_weight=weights, reduction="weighted_mean")
        assert loss.item() == 0
        assert not any(gradient.any() for gradient in torch.autograd.grad(loss, (problem.hidden, problem.weight)))


def test_weights_of_ignored_rows_are_not_read(device: str) -> None:
    problem = make_problem(device, token_weight=True)
    for reduction in ("none", "weighted_mean"):
        expected = flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, reduction=reduction, **problem.options)
        weights = torch.where(problem.target == -100, torch.nan, problem.options["token_weight"])
        loss = flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, reduction=reduction, token_weight=weights)
        assert torch.equal(loss, expected)


def _random_call(seed: int, device: str) -> tuple[Problem, torch.dtype, str]:
    choice = random.Random(seed)

    def sometimes(**option: Any) -> dict[str, Any]:
        return option if choice.random() < 0.4 else {}

    function = choice.choice(FUNCTIONS)
    dtype = choice.choice([torch.float32, torch.float32, torch.bfloat16])
    form = choice.choice([(30,), (5, 6), (2, 3, 5), (1,), (64,)])
    options: dict[str, Any] = sometimes(logit_scale=0.7) | sometimes(softcap=5.0) | sometimes(bias=True)
    options |= sometimes(class_offset=True)
    options |= sometimes(temperature=choice.choice([0.5, 1.0, 2, True, True, True]))
    if function == "linear_cross_entropy":
        options |= sometimes(token_weight=True) | sometimes(dft=True) | sometimes(class_weight=True)
        options |= sometimes(label_smoothing=0.1) | sometimes(z_loss=1e-2)
        options["reduction"] = choice.choice(["none", "sum", "mean"] + ["weighted_mean"] * ("token_weight" in options))
    for name in OUTPUTS[function][1:]:
        options |= sometimes(**{f"return_{name}": True})
    options |= sometimes(workspace_limit_bytes=8 << 20) | sometimes(retain_in_grad_weight=choice.choice([True, False]))
    problem = make_problem(
        device,
        dtype,
        num_tokens=torch.Size(form).numel(),
        hidden_size=choice.choice([8, 20, 48]),
        vocab_size=choice.choice([11, 300]),
        **options,
    )
    problem.target = problem.target.view(form)
    if choice.random() < 0.3:
        problem.target = problem.target.int()
    problem.hidden = problem.hidden.detach().view(*form, -1).requires_grad_()
    for name in ("temperature", "token_weight"):
        given = problem.options.get(name)
        if isinstance(given, Tensor):
            given = given.view(form)
            ways: list[Callable[[Tensor], Tensor]] = [
                lambda t: t,
                lambda t: torch.stack([t, t], dim=-1)[..., 0],
                lambda t: t[..., :1].expand(t.shape),
                lambda t: torch._neg_view(-t),
            ]
            problem.options[name] = choice.choice(ways)(given)
    return problem, dtype, function


@pytest.mark.parametrize("seed", first_quick(range(60), 10))
def test_random_combination(device: str, seed: int) -> None:
    problem, dtype, function = _random_call(seed, device)
    check(problem, dtype, function)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_forms_of_a_number_a_token(device: str, function: str) -> None:
    """Compares bits with a contiguous tensor's, for any strides."""
    problem = make_problem(device, num_tokens=36, temperature=True, token_weight=function == "linear_cross_entropy")
    hidden, target = problem.hidden.view(4, 9, 24), problem.target.view(4, 9)

    def run(view: Callable[[Tensor], Tensor]) -> list[Tensor]:
        rows = {name: view(value[:9].expand(4, 9)) for name, value in problem.options.items()}
        outputs = getattr(flce, function)(hidden, problem.weight, target, return_entropy=True, **rows)
        total = torch.stack([output.sum() for output in outputs]).sum()
        return [*outputs, *torch.autograd.grad(total, (problem.hidden, problem.weight))]

    expected = run(lambda t: t.contiguous())
    for view in (
        lambda t: t,
        lambda t: torch.stack([t, t], dim=-1)[..., 1],
        lambda t: t.t().contiguous().t(),
        lambda t: torch._neg_view(-t),
        lambda t: torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(4, 9),
    ):
        for actual, right in zip(run(view), expected, strict=True):
            assert torch.equal(actual, right)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_token_weights_of_any_real_dtype(device: str, dtype: torch.dtype) -> None:
    problem = make_problem(device)
    weights = (torch.arange(37, device=device) % 3).to(dtype)
    losses = [
        flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, token_weight=each, reduction="weighted_mean")
        for each in (weights, weights.float())
    ]
    assert torch.equal(losses[0], losses[1])


def test_weights_are_those_of_rows_whatever_the_shift(device: str) -> None:
    problem = make_problem(device, num_tokens=36, temperature=True, token_weight=True)
    hidden, target = problem.hidden.view(4, 9, 24), problem.target.view(4, 9)
    rows = {name: value.view(4, 9) for name, value in problem.options.items()}
    shifted = flce.linear_cross_entropy(hidden, problem.weight, target, shift=1, reduction="none", **rows)
    expected = reference(hidden, problem.weight, flce.shift_labels(target), reduction="none", **rows)["loss"]
    assert_close(shifted, expected, torch.float32, output=True)
    logprobs = flce.linear_logprobs(hidden, problem.weight, target, shift=1, temperature=rows["temperature"])
    packed = flce.linear_logprobs(
        hidden, problem.weight, target, shift=1, temperature=rows["temperature"], cu_seqlens=torch.arange(0, 37, 9, device=device)
    )
    assert torch.equal(logprobs, packed)
    assert_close(
        logprobs,
        reference(hidden, problem.weight, flce.shift_labels(target), temperature=rows["temperature"])["logprobs"],
        torch.float32,
        output=True,
    )


def test_a_temperature_of_one_is_none(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    find = _kernels.find_for

    def watch(given: Inputs, *others: Any) -> Any:
        found.append((given.temperature, find(given, *others)))
        return found[-1][1]

    monkeypatch.setattr(_kernels, "find_for", watch)
    problem = make_problem(device)
    results = []
    for number in (None, 1, 1.0, 0.5):
        for function in FUNCTIONS:
            results.append(getattr(flce, function)(problem.hidden, problem.weight, problem.target, temperature=number))
    assert {temperature is None for temperature, _ in found[:-2]} == {True}
    assert "temperature" not in found[0][1].spec
    assert "temperature" in found[-1][1].spec
    assert torch.equal(results[0], results[4])
    assert torch.equal(results[1], results[3])
    assert not torch.equal(results[1], results[7])


def test_the_first_of_equal_logits_is_the_largest(device: str) -> None:
    hidden = torch.ones(3, 8, device=device)
    weight = torch.zeros(300, 8, device=device)
    weight[[7, 41, 299]] = 1.0
    target = torch.tensor([7, -100, 299], device=device)
    for options in ({}, {"softcap": 2.0}, {"temperature": 3.0}):
        logprobs, top1 = flce.linear_logprobs(hidden, weight, target, return_top1=True, **options)
        assert top1.dtype == torch.int64
        assert top1.tolist() == [7, -1, 7]
        assert logprobs[1] == 0
    zero = flce.linear_logprobs(hidden, torch.zeros_like(weight), target, return_top1=True, return_log_sum_sq_probs=True)
    assert zero[1].tolist() == [0, -1, 0]
    torch.testing.assert_close(zero[2], -torch.tensor(300.0, device=device).log() * torch.tensor([1.0, 0.0, 1.0], device=device))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), float("-inf"), 2.0**-101, 1e-45, 2.0**101, 3e38])
def test_a_temperature_that_is_none_is_a_fault(device: str, function: str, bad: float) -> None:
    flce.check_labels()
    problem = make_problem(device, ignored=0.0, temperature=True)
    good, temperature = problem.options["temperature"], problem.options["temperature"].clone()
    temperature[[6, 30]] = bad

    def run(target: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
        outputs = getattr(flce, function)(problem.hidden, problem.weight, target, temperature=temperature, return_top1=True)
        return *outputs, *torch.autograd.grad(outputs[0].sum(), (problem.hidden, problem.weight))

    actual = run(problem.target, temperature)
    with pytest.raises(flce.LabelError, match=r"temperature\[6\] is not between 2\^-100 and 2\^100") as caught:
        flce.check_labels()
    assert caught.value.row == 6
    ignored = problem.target.clone()
    ignored[[6, 30]] = -100
    for value, right in zip(actual, run(ignored, good), strict=True):
        assert torch.equal(value, right)
    run(ignored, temperature)  # nobody asks about ignored rows
    flce.check_labels()


@pytest.mark.parametrize("options", [{}, {"return_top1": True}, {"dft": True, "return_entropy": True, "return_top1": True}], ids=str)
def test_outputs_may_be_changed_in_place(device: str, options: dict[str, Any]) -> None:
    problem = make_problem(device, num_tokens=36, temperature=True)
    hidden, target = problem.hidden.view(4, 9, 24), problem.target.view(4, 9)
    rows = {"temperature": problem.options["temperature"].view(4, 9)}

    def run() -> tuple[Tensor, ...]:
        outputs = flce.linear_cross_entropy(
            hidden, problem.weight, target, reduction="none", return_log_sum_sq_probs=True, **rows, **options
        )
        assert isinstance(outputs, tuple)
        return outputs

    values = [output.detach().clone() for output in run()]
    for changed in range(len(values)):
        outputs = run()
        outputs[changed].mul_(3)
        for i, (output, value) in enumerate(zip(outputs, values, strict=True)):
            assert torch.equal(output, value * 3 if i == changed else value)
    expected = torch.autograd.grad(run()[0].sum(), problem.weight)[0]
    outputs = run()
    for output in outputs[1:]:
        output.zero_()
    assert torch.equal(torch.autograd.grad(outputs[0].sum(), problem.weight)[0], expected)
