"""Memory that backward adds the weight's gradient to: nothing beside it is written, and what cannot be written to is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import assert_close, make_problem, reference
from torch import Tensor, nn

import flce

V, D = 101, 24


def loss_of(problem: Any, buffer: Tensor, weight: Tensor | None = None) -> Tensor:
    loss: Tensor = flce.linear_cross_entropy(
        problem.hidden, problem.weight if weight is None else weight, problem.target, grad_weight_out=buffer
    )
    return loss


def expected_gradient(problem: Any) -> Tensor:
    loss = reference(problem.hidden, problem.weight, problem.target)["loss"]
    return torch.autograd.grad(loss, problem.weight)[0]


GAPS: dict[str, Callable[[Tensor], Tensor]] = {  # parts of a tensor [2 V, 2 D]
    "columns": lambda big: big[:V, :D],
    "later columns": lambda big: big[:V, D:],
    "every other row": lambda big: big.view(4 * V, D)[: 2 * V : 2],
    "every other column": lambda big: big[:V, ::2],
    "one row expanded": lambda big: big[0, :D].expand(V, D),
    "one element expanded": lambda big: big[0, 0].expand(V, D),
    "hidden-major": lambda big: big.new_zeros(D, V).t(),
    "columns of a hidden-major one": lambda big: big.view(-1)[: 2 * V * D].view(D, 2 * V)[:, :V].t(),
    "a negative view": lambda big: torch._neg_view(big.new_zeros(V, D)),
    "misaligned": lambda big: big.view(-1)[1 : 1 + V * D].view(V, D),
}


@pytest.mark.parametrize("form", GAPS.values(), ids=GAPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_buffer_with_gaps_is_refused_before_anything_is_written(
    device: str, form: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    problem = make_problem(device, dtype)
    big = torch.zeros(2 * V, 2 * D, dtype=dtype, device=device)
    buffer = form(big)
    with pytest.raises(flce.ArgumentError, match=r"grad_weight_out (has strides .*; they must be \[24, 1\]|is a negative view|begins at)"):
        loss_of(problem, buffer).backward()
    assert not big.any()


@pytest.mark.parametrize("name", ["columns", "later columns", "every other row", "every other column", "one row expanded"])
def test_a_buffer_with_the_gaps_of_its_weight_is_refused(device: str, name: str) -> None:
    problem = make_problem(device)
    weight = GAPS[name](torch.randn(2 * V, 2 * D, device=device)).detach().requires_grad_()
    big = torch.zeros(2 * V, 2 * D, device=device)
    buffer = GAPS[name](big)
    assert buffer.stride() == weight.stride()
    with pytest.raises(flce.ArgumentError, match=r"grad_weight_out has strides .*; they must be \[24, 1\]"):
        loss_of(problem, buffer, weight)  # backward wrote over memory here
    assert not big.any()


def test_a_contiguous_slice_of_a_flat_buffer(device: str) -> None:
    """Parameters and gradients that lie one behind the other, as Megatron's and FSDP's do."""
    problem = make_problem(device)
    flat = torch.zeros(3 * V * D, device=device)
    weight = torch.cat([flat, problem.weight.detach().reshape(-1)])[-V * D :].view(V, D).requires_grad_()
    loss_of(problem, flat[V * D : 2 * V * D].view(V, D), weight).backward()
    before, gradient, after = flat.view(3, V, D)
    assert_close(gradient, expected_gradient(problem), torch.float32)
    assert not before.any()
    assert not after.any()


WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": lambda w: torch.cat([w, torch.full_like(w, 1e30)], dim=1)[:, :D],
    "every other row": lambda w: torch.stack([w, torch.full_like(w, 1e30)], dim=1)[:, 0],
    "columns of a hidden-major one": lambda w: torch.cat([w.t(), torch.full_like(w.t(), 1e30)], dim=1)[:, :V].t(),
}


@pytest.mark.parametrize("form", WEIGHTS.values(), ids=WEIGHTS)
def test_the_gradient_of_a_strided_weight(device: str, form: Callable[[Tensor], Tensor]) -> None:
    """Gradients come by autograd, in a contiguous buffer, and twice, since the second call goes another way; a buffer with the weight's
    strides is refused."""
    problem = make_problem(device)
    strided = form(problem.weight.detach()).detach().requires_grad_()
    assert not strided.is_contiguous()
    expected = expected_gradient(problem)
    for _ in range(3):
        loss = flce.linear_cross_entropy(problem.hidden, strided, problem.target)
        assert_close(torch.autograd.grad(loss, strided)[0], expected, torch.float32)
        buffer = torch.ones(V, D, device=device)
        loss_of(problem, buffer, strided).backward()
        assert_close(buffer - 1, expected, torch.float32, factor=4)
    with pytest.raises(flce.ArgumentError, match="grad_weight_out has strides"):
        loss_of(problem, form(torch.zeros(V, D, device=device)), strided)


def test_the_gradient_of_a_hidden_major_weight(device: str) -> None:
    problem = make_problem(device)
    weight = problem.weight.detach().t().contiguous().t().requires_grad_()
    buffer = torch.zeros(D, V, device=device).t()
    loss_of(problem, buffer, weight).backward()
    assert_close(buffer, expected_gradient(problem), torch.float32)
    with pytest.raises(flce.ArgumentError, match=r"grad_weight_out has strides \[24, 1\]; they must be \[1, 101\]"):
        loss_of(problem, torch.zeros(V, D, device=device), weight)


def test_hidden_states_of_several_dimensions(device: str) -> None:
    problem = make_problem(device)
    buffer = torch.zeros(V, D, device=device)
    loss = flce.linear_cross_entropy(problem.hidden.view(1, 37, D), problem.weight, problem.target.view(1, 37), grad_weight_out=buffer)
    loss.backward()
    assert_close(buffer, expected_gradient(problem), torch.float32)


def test_a_buffer_for_rows_of_no_whole_vectors_is_refused(device: str) -> None:
    problem = make_problem(device, hidden_size=20)
    with pytest.raises(flce.ArgumentError, match="grad_weight_out is given with hidden_size 20; it must be a multiple of 8"):
        loss_of(problem, torch.zeros(V, 20, device=device))


def test_a_buffer_of_a_call_without_memory_is_refused() -> None:
    hidden, weight, target = (torch.zeros(shape, device="meta") for shape in ((37, D), (V, D), (37,)))
    with pytest.raises(flce.ArgumentError, match=r"grad_weight_out is for eager mode and plain tensors; .* meta tensors"):
        flce.linear_cross_entropy(hidden, weight, target.long(), grad_weight_out=torch.zeros_like(weight))


@pytest.mark.parametrize("name", ["target", "bias", "class_weight", "num_valid_tokens"])
def test_memory_of_another_argument(device: str, name: str) -> None:
    problem = make_problem(device)
    memory = torch.zeros(V * D, device=device)
    others: dict[str, Any] = {
        "target": memory.view(torch.int32)[:37],
        "bias": memory[:V],
        "class_weight": memory[:V],
        "num_valid_tokens": memory[:1],
    }
    arguments = {"target": problem.target} | {name: others[name]}
    with pytest.raises(flce.ArgumentError, match=f"grad_weight_out shares memory with {name}"):
        flce.linear_cross_entropy(problem.hidden, problem.weight, **arguments, grad_weight_out=memory.view(V, D))


@pytest.mark.parametrize("change", ["shorter", "strided", "bf16", "freed"])
def test_a_buffer_exchanged_between_the_passes(device: str, change: str) -> None:
    problem = make_problem(device)
    buffer = torch.zeros(V, D, device=device)
    loss = loss_of(problem, buffer)
    if change == "freed":
        buffer.untyped_storage().resize_(0)
    else:
        buffer.data = {"shorter": buffer[:50], "strided": torch.zeros(V, 2 * D, device=device)[:, :D], "bf16": buffer.bfloat16()}[change]
    with pytest.raises(flce.ArgumentError, match="grad_weight"):
        loss.backward()


def head_with(weight: Tensor, gradient: Tensor | None) -> nn.Linear:
    head = nn.Linear(D, V, bias=False, device=weight.device)
    head.weight = nn.Parameter(weight)
    head.weight.grad = gradient
    return head


def pipeline_loss(head: nn.Linear) -> flce.PipelineFusedLoss:
    return flce.PipelineFusedLoss(head, impl="flce", shift=0, accumulate_into_grad=True)


def test_accumulating_into_slices_of_flat_buffers(device: str) -> None:
    problem = make_problem(device)
    expected = expected_gradient(problem)
    flat = torch.zeros(3, V, D, device=device)
    head = head_with(torch.stack([flat[0], problem.weight.detach()])[1], flat[1])
    for count in (1, 2, 3):
        pipeline_loss(head)(problem.hidden, problem.target).backward()
        assert_close(flat[1], count * expected, torch.float32)
    assert not flat[::2].any()
    wide = torch.zeros(V, 2 * D, device=device)
    strided = head_with(problem.weight.detach(), wide[:, :D])
    with pytest.raises(flce.ArgumentError, match=r"weight.grad \(accumulate_into_grad=True\) has strides \[48, 1\]"):
        pipeline_loss(strided)(problem.hidden, problem.target).backward()
    assert not wide.any()


def test_accumulating_for_a_strided_weight(device: str) -> None:
    problem = make_problem(device)
    for form in WEIGHTS.values():
        head = head_with(form(problem.weight.detach()), None)
        pipeline_loss(head)(problem.hidden, problem.target).backward()
        assert_close(head.weight.grad, expected_gradient(problem), torch.float32)


def test_accumulating_into_a_gradient_that_was_replaced_is_refused(device: str) -> None:
    """zero_grad() between the loss and its backward would leave what is accumulated with nobody."""
    problem = make_problem(device)
    head = head_with(problem.weight.detach(), None)
    optimizer = torch.optim.SGD(head.parameters())
    loss = pipeline_loss(head)(problem.hidden, problem.target)
    optimizer.zero_grad()
    with pytest.raises(flce.ArgumentError, match=r"weight.grad is not the tensor that it was in forward.*zero_grad"):
        loss.backward()
    loss = pipeline_loss(head)(problem.hidden, problem.target)
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    assert_close(head.weight.grad, expected_gradient(problem), torch.float32)
