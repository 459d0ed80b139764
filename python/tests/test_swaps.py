"""Tensors that .data or a hook on saved tensors exchanges between the passes: used where they fit, refused by name where they do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import Problem, make_problem
from torch import Tensor

import flce
from flce.call import _checks
from flce.call._options import call_options
from flce.core._frame import Inputs, Parallel

Change = Callable[[Tensor], Tensor]
N, V, D = 37, 101, 24

REFUSED: dict[str, tuple[str, Change]] = {
    "target shorter": ("target has shape", lambda t: t[:3]),
    "target empty": ("target has shape", lambda t: t[:0]),
    "target of another shape": ("target has shape", lambda t: t.repeat(2)),
    "target of int16": ("target has dtype", lambda t: t.short()),
    "hidden shorter": ("(hidden|target) has shape", lambda t: t[:3]),
    "hidden narrower": ("weight has shape", lambda t: t[:, :16]),
    "hidden of fp64": ("hidden has dtype", lambda t: t.double()),
    "hidden flat": ("(hidden|weight) has shape", lambda t: t.view(-1)),
    "weight shorter": ("weight has shape", lambda t: t[:50]),
    "weight longer": ("weight has shape", lambda t: torch.cat([t, t])),
    "weight narrower": ("weight has shape", lambda t: t[:, :16]),
    "weight on another device": ("weight is on meta", lambda t: t.to("meta")),
    "bias shorter": ("bias has shape", lambda t: t[:50]),
    "bias negative": ("bias is a tensor of layout torch.strided or a negative view", lambda t: torch._neg_view(-t)),
    "class_weight shorter": ("class_weight has shape", lambda t: t[:50]),
    "lse shorter": ("lse has shape", lambda t: t[:3]),
    "lse of bf16": ("lse has dtype", lambda t: t.bfloat16()),
    "lse on another device": ("lse is on meta", lambda t: t.to("meta")),
}
FITTING: dict[str, tuple[str, Change]] = {
    "target strided": ("target", lambda t: torch.stack([t, torch.zeros_like(t)], dim=-1)[..., 0]),
    "target in twice the memory": ("target", lambda t: t.repeat_interleave(2)[::2]),
    "target of int32": ("target", lambda t: t.int()),
    "hidden strided": ("hidden", lambda t: torch.cat([t, t * 0], dim=1)[:, :D]),
    "weight strided": ("weight", lambda t: torch.cat([t, t * 0], dim=1)[:, :D]),
    "weight hidden-major": ("weight", lambda t: t.t().contiguous().t()),
    "bias strided": ("bias", lambda t: torch.stack([t, t * 0], dim=1)[:, 0]),
    "lse strided": ("lse", lambda t: torch.stack([t, t * 0], dim=1)[:, 0]),
}


def problem_for(device: str, name: str) -> Problem:
    kind = name.split()[0]
    return make_problem(device, num_tokens=N, bias=kind == "bias", class_weight=kind == "class_weight")


def loss_of(problem: Problem, calls: int) -> Tensor:
    for _ in range(calls):
        loss = flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, **problem.options)
    assert isinstance(loss, Tensor)
    return loss


def exchange(problem: Problem, name: str, change: Change, how: str, calls: int) -> Tensor:
    """The loss, with one of the tensors that it saved exchanged."""
    kind = name.split()[0]
    if how == "data":
        loss = loss_of(problem, calls)
        assert loss.grad_fn is not None
        tensor = loss.grad_fn.saved_tensors[0] if kind == "lse" else problem.options.get(kind, getattr(problem, kind, None))
        tensor.data = change(tensor.detach())
        return loss
    original = {"hidden": problem.hidden, "weight": problem.weight, "target": problem.target} | problem.options
    places = {tensor.data_ptr(): name for name, tensor in original.items() if isinstance(tensor, Tensor)}

    def unpack(tensor: Tensor) -> Tensor:
        return change(tensor.detach()) if places.get(tensor.data_ptr(), "lse") == kind else tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        return loss_of(problem, calls)


@pytest.mark.parametrize("calls", [1, 3], ids=["first", "direct"])
@pytest.mark.parametrize("how", ["data", "hook"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(device: str, name: str, how: str, calls: int) -> None:
    message, change = REFUSED[name]
    if how == "data" and "another device" in name:
        pytest.skip("torch does not allow it")
    problem = problem_for(device, name)
    loss = exchange(problem, name, change, how, calls)
    with pytest.raises(flce.ArgumentError, match=message) as caught:
        loss.backward()
    assert "(in backward: something changed it since forward" in str(caught.value)


@pytest.mark.parametrize("calls", [1, 3], ids=["first", "direct"])
@pytest.mark.parametrize("how", ["data", "hook"])
@pytest.mark.parametrize("name", FITTING)
def test_what_fits_is_used(device: str, name: str, how: str, calls: int) -> None:
    kind, change = FITTING[name]
    problem = problem_for(device, kind)
    expected = torch.autograd.grad(loss_of(problem, calls), (problem.hidden, problem.weight))
    actual = torch.autograd.grad(exchange(problem, kind, change, how, calls), (problem.hidden, problem.weight))
    for got, right in zip(actual, expected, strict=True):
        assert torch.equal(got, right)


def test_a_strided_target_at_the_same_address(device: str) -> None:
    """Address and shape are forward's; read densely, it would be other labels."""
    problem = make_problem(device, ignored=0.0)
    memory = torch.stack([problem.target, (problem.target + 1) % V], dim=1)
    problem.target = memory.view(-1)[:N]
    forward_labels = memory.view(-1)[:N].clone()
    loss = loss_of(problem, 3)
    problem.target.data = memory[:, 0]
    assert problem.target.data_ptr() == memory.data_ptr()
    gradient = torch.autograd.grad(loss, problem.hidden)[0]
    problem.target = memory[:, 0].contiguous()
    assert not torch.equal(forward_labels, problem.target)
    assert torch.equal(gradient, torch.autograd.grad(loss_of(problem, 1), problem.hidden)[0])


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"return_lse": True, "return_entropy": True}])
def test_operators_check_what_they_are_given(device: str, options: dict[str, Any]) -> None:
    problem = make_problem(device)
    hidden, weight, target = problem.hidden.detach(), problem.weight.detach(), problem.target
    rest: tuple[Any, ...] = (
        None,
        None,
        None,
        "outputs=loss+lse+entropy" if "return_lse" in options else "",
        -100,
        0 if options.get("reduction") else 2,
        0,
    )
    values, saved, _ = torch.ops.flce.linear_cross_entropy(hidden, weight, target, *rest)
    wanted = [True, True, False]
    torch.ops.flce.linear_cross_entropy_backward(values, hidden, weight, target, saved, *rest, wanted)
    for arguments, name in (
        ((hidden, weight, target[:3]), "target"),
        ((hidden, weight[:, :16], target), "weight"),
        ((hidden, weight.view(-1), target), "weight"),
        ((hidden[0], weight, target), "hidden"),
    ):
        with pytest.raises(flce.ShapeError, match=f"{name} has shape"):
            torch.ops.flce.linear_cross_entropy(*arguments, *rest)
        with pytest.raises(flce.ShapeError, match=f"{name} has shape"):
            torch.ops.flce.linear_cross_entropy_backward(values, *arguments, saved, *rest, wanted)
    with pytest.raises(flce.ShapeError, match="lse has shape"):
        torch.ops.flce.linear_cross_entropy_backward(values, hidden, weight, target, saved[:5], *rest, wanted)
    with pytest.raises(flce.ShapeError, match="upstream gradient has"):
        torch.ops.flce.linear_cross_entropy_backward(
            torch.cat([values.view(-1), values.view(-1)]), hidden, weight, target, saved, *rest, wanted
        )
    with pytest.raises(flce.ShapeError, match="bias has shape"):
        torch.ops.flce.linear_cross_entropy(hidden, weight, target, weight[:50, 0].contiguous(), *rest[1:])


@pytest.mark.parametrize("calls", [1, 3], ids=["first", "direct"])
def test_a_weight_that_zero3_has_divided_again_is_refused(calls: int) -> None:
    problem = make_problem("cpu")
    loss = loss_of(problem, calls)
    weight: Any = problem.weight
    weight.ds_status, weight.ds_shape = "NOT_AVAILABLE", weight.shape
    weight.data = torch.empty(0)
    with pytest.raises(flce.PlacementError, match=r"weight is a parameter \[101, 24\].* \(in backward: something changed it"):
        loss.backward()


def test_a_target_has_the_tokens_of_all_ranks_with_sequence_parallel() -> None:
    over_ranks = Parallel(2, True, -1, -1, -1, None, True, "tp")
    options = replace(call_options(return_loss=True), parallel=over_ranks)
    given = Inputs(torch.zeros(4, D), torch.zeros(V, D), torch.zeros(8, dtype=torch.int64), options)
    _checks.check_inputs(given)
    with pytest.raises(flce.ShapeError, match=r"target has shape \[4\]; it must be \[8\]"):
        _checks.check_inputs(given._replace(target=given.target[:4]))


@pytest.mark.parametrize("name", ["teacher_ids", "teacher_probs"])
def test_a_teacher_is_there_where_the_options_say_so(name: str) -> None:
    problem = make_problem("cpu")
    given = (problem.hidden.detach(), problem.weight.detach(), problem.target)
    teacher = {"teacher_ids": torch.zeros(N, 2, dtype=torch.int64), "teacher_probs": torch.full((N, 2), 0.5)}
    tensor = teacher.pop(name)
    for options, there, says in (("", {name: tensor}, "given"), ("teacher_top_k=2", teacher, "absent")):
        with pytest.raises(flce.ArgumentError, match=f"{name} is {says}, and the options say teacher_top_k={2 if options else 0}"):
            torch.ops.flce.linear_cross_entropy(*given, None, None, None, options, -100, 2, 0, **there)
    both = teacher | {name: tensor}
    with pytest.raises(flce.ShapeError, match=rf"{name} has shape \[37, 1\]; it must be \[37, 2\]"):
        torch.ops.flce.linear_cross_entropy(*given, None, None, None, "teacher_top_k=2", -100, 2, 0, **both | {name: tensor[:, :1]})
