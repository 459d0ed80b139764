"""Outputs are tensors of their own, in every way of calling: each may be changed in place under grad, and the others and their gradients
stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from retain_support import LENT, Watched
from retain_support import make as make_retaining
from support import Problem, assert_close, make_problem, reference
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flce

EXTRA = ("lse", "logprobs", "entropy")
FORMS = [(36,), (4, 9)]
Call = Callable[..., Any]


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def _dispatched(*args: Any, **options: Any) -> Any:
    with Watch():
        return flce.linear_cross_entropy(*args, **options)


def _compiled(*args: Any, **options: Any) -> Any:
    return torch.compile(flce.linear_cross_entropy, fullgraph=True, backend="aot_eager")(*args, **options)


WAYS: dict[str, Call] = {
    "eager": lambda *args, **options: flce.linear_cross_entropy(*args, **options),
    "dispatched": _dispatched,
    "compiled": _compiled,
}


def shaped(problem: Problem, form: tuple[int, ...]) -> Problem:
    hidden = problem.hidden.detach().reshape(*form, -1).requires_grad_()
    return Problem(hidden, problem.weight, problem.target.reshape(form), problem.options)


def check_changes(problem: Problem, way: Call, names: tuple[str, ...], options: dict[str, Any], dtype: torch.dtype) -> None:
    """Each output in turn is doubled in place, or shifted, filled and detached; the sum of all then has the gradients that it should."""
    expected_outputs = reference(problem.hidden, problem.weight, problem.target, **options)
    expected = [expected_outputs[name] for name in ("loss", *names)]

    def run() -> tuple[Tensor, ...]:
        result = way(problem.hidden, problem.weight, problem.target, **options, **{f"return_{name}": True for name in names})
        return result if names else (result,)

    for changed in range(len(expected)):
        outputs = run()
        squares = [output.square() for output in outputs]  # saves each: a change of another must not be taken for a change of it
        values = [output.detach().clone() for output in outputs]
        total = torch.stack(
            [square.sum() for i, square in enumerate(squares) if i != changed] + [outputs[changed].mul_(3.0).add_(1.0).sum()]
        ).sum()
        for i, (output, value) in enumerate(zip(outputs, values, strict=True)):
            assert torch.equal(output, value * 3 + 1 if i == changed else value)
        wanted_total = sum(value.square().sum() if i != changed else (3 * value + 1).sum() for i, value in enumerate(expected))
        assert isinstance(wanted_total, Tensor)
        actual = torch.autograd.grad(total, (problem.hidden, problem.weight))
        for got, right in zip(actual, torch.autograd.grad(wanted_total, (problem.hidden, problem.weight), retain_graph=True), strict=True):
            assert_close(got, right, dtype, f"{('loss', *names)[changed]} changed", factor=3)
        outputs = run()
        outputs[changed].zero_()
        assert all(torch.equal(output, value) for i, (output, value) in enumerate(zip(outputs, values, strict=True)) if i != changed)
        outputs[changed].detach_()
        assert not outputs[changed].requires_grad


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("names", [(), EXTRA], ids=["loss", "all"])
def test_outputs_changed_in_place(device: str, way: Call, reduction: str, form: tuple[int, ...], names: tuple[str, ...]) -> None:
    torch._dynamo.reset()
    problem = shaped(make_problem(device, num_tokens=36), form)
    for _ in range(3):  # other ways from the second call on
        check_changes(problem, way, names, {"reduction": reduction}, torch.float32)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("form", [(40,), (4, 10)], ids=str)
def test_outputs_of_retaining_layers_changed_in_place(device: str, watched: Watched, reduction: str, form: tuple[int, ...]) -> None:
    problem = shaped(make_retaining(device, 40), form)
    for _ in range(3):
        check_changes(problem, WAYS["eager"], (), {"reduction": reduction}, torch.bfloat16)
    assert set(watched.take()) == {LENT}
    check_changes(problem, WAYS["eager"], ("lse",), {"reduction": reduction}, torch.bfloat16)


@pytest.mark.parametrize("impl", ["flce", "pytorch"])
def test_a_masked_loss_as_trainers_write_it(device: str, impl: str) -> None:
    problem = make_problem(device, num_tokens=36, ignored=0.0)
    head = torch.nn.Linear(24, 101, bias=False, device=device)
    head.weight = torch.nn.Parameter(problem.weight.detach())
    loss_fn = flce.LinearCrossEntropyLoss(head, impl=impl, shift=0, reduction="none", chunk_size=16)
    mask = (torch.arange(36, device=device) % 3 != 0).float().view(4, 9)
    hidden, target = problem.hidden.detach().view(4, 9, 24).requires_grad_(), problem.target.view(4, 9)
    expected = torch.autograd.grad((reference(hidden, head.weight, target, reduction="none")["loss"] * mask).sum() / mask.sum(), hidden)[0]
    for _ in range(4):
        loss = loss_fn(hidden, target)
        loss *= mask
        loss = loss.sum()
        loss /= mask.sum()
        assert_close(torch.autograd.grad(loss, hidden)[0], expected, torch.float32)


def test_outputs_without_grad(device: str) -> None:
    problem = shaped(make_problem(device, num_tokens=36), (4, 9))
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            outputs = flce.linear_cross_entropy(
                problem.hidden, problem.weight, problem.target, reduction="none", return_lse=True, return_logprobs=True, return_entropy=True
            )
            for i, output in enumerate(outputs):
                others = [other.clone() for other in outputs]
                output.zero_()
                assert all(torch.equal(a, b) for j, (a, b) in enumerate(zip(outputs, others, strict=True)) if j != i)
