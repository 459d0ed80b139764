"""The gradient of class_offset: its own ways through autograd, and what it is next to nothing. `test_numerics` has it beside fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import assert_close, in_double, make_problem, reference, spy_on_backward
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flce
from flce.call import _op

WAYS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 5.0, "logit_scale": 0.7},
    "no softcap": {"logit_scale": 0.7},
    "bias": {"bias": True, "softcap": 5.0},
    "bias, no softcap": {"bias": True},
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    return WAYS[request.param]


def of_all(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("hidden_type", [torch.float32, torch.bfloat16])
def test_central_differences(device: str, hidden_type: torch.dtype, way: dict[str, Any]) -> None:
    problem = make_problem(device, hidden_type, class_offset=True, **way)
    offset = problem.options.pop("class_offset")
    direction = torch.randn(offset.shape, generator=torch.Generator().manual_seed(3)).to(device)

    def loss(step: float) -> Tensor:
        given = offset + step * direction
        made: Tensor = flce.linear_cross_entropy(
            problem.hidden, problem.weight, problem.target, class_offset=given, reduction="none", **problem.options
        )
        return made.double().sum()

    (gradient,) = of_all(loss(0.0), offset)
    difference = (loss(1e-2) - loss(-1e-2)) / 2e-2
    assert abs(difference - (gradient.double() * direction).sum()) < 2e-3 * abs(difference)


def test_16_bits_do_not_round_it(device: str) -> None:
    for softcap in (None, 5.0):
        problem = make_problem(device, torch.bfloat16, class_offset=True, softcap=softcap)
        offset = problem.options["class_offset"]
        (gradient,) = of_all(flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, **problem.options), offset)
        exact = in_double(problem)
        right = reference(exact.hidden, exact.weight, exact.target, **exact.options)["loss"]
        assert gradient.dtype is torch.float32 and not torch.equal(gradient, gradient.bfloat16().float())
        assert_close(gradient, of_all(right, exact.options["class_offset"])[0], torch.bfloat16, factor=0.5)


def test_it_has_the_offsets_dtype_and_is_0_at_classes_that_are_ruled_out(device: str, way: dict[str, Any]) -> None:
    problem = make_problem(device, class_offset=True, **way)
    offset = problem.options.pop("class_offset").detach().bfloat16().requires_grad_()
    loss = flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, class_offset=offset, **problem.options)
    (gradient,) = of_all(loss, offset)
    assert gradient.dtype is torch.bfloat16 and offset.isneginf().any()
    assert torch.equal(gradient == 0, offset.isneginf())


@pytest.mark.parametrize("tokens", [0, 37])
def test_nothing_that_counts_is_0(device: str, tokens: int, way: dict[str, Any]) -> None:
    problem = make_problem(device, class_offset=True, num_tokens=tokens, ignored=1.1, **way)
    loss = flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, **problem.options)
    assert not of_all(loss, problem.options["class_offset"])[0].any()


def test_the_same_bits_and_the_others_bits(device: str, way: dict[str, Any]) -> None:
    """Twice, by checkpoints, through the operators and compiled; and whether it is asked for moves no other gradient."""
    torch._dynamo.reset()
    problem = make_problem(device, class_offset=True, num_tokens=200, vocab_size=700, **way)
    given = problem.options

    def loss(hidden: Tensor, weight: Tensor, offset: Tensor) -> Tensor:
        made: Tensor = flce.linear_cross_entropy(hidden, weight, problem.target, **given | {"class_offset": offset})
        return made

    inputs = (problem.hidden, problem.weight, given["class_offset"])
    right = of_all(loss(*inputs), *inputs)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for made in (loss(*inputs), checkpoint(loss, *inputs, use_reentrant=False), compiled(*inputs)):
        for found, expected in zip(of_all(made, *inputs), right, strict=True):
            assert torch.equal(found, expected)
    if "softcap" in way:
        without = of_all(loss(problem.hidden, problem.weight, given["class_offset"].detach()), *inputs[:2])
        assert all(torch.equal(found, expected) for found, expected in zip(without, right, strict=False))


def test_the_operators_own_gradient(device: str, way: dict[str, Any]) -> None:
    problem = make_problem(device, class_offset=True, **way)
    scale, softcap = way.get("logit_scale", 1.0), way.get("softcap", 0.0)
    options = f"logit_scale={scale},outputs=loss" + (f",softcap={softcap}" if softcap else "")
    of_call = [problem.options.get("bias"), None, None, options, -100, 2, 0]
    values, *_ = torch.ops.flce.linear_cross_entropy(
        problem.hidden, problem.weight, problem.target, *of_call, class_offset=problem.options["class_offset"]
    )
    exact = in_double(problem)
    expected = reference(exact.hidden, exact.weight, exact.target, **exact.options)["loss"]
    (found,), (right,) = of_all(values, problem.options["class_offset"]), of_all(expected, exact.options["class_offset"])
    assert_close(found, right, torch.float32)


def test_only_what_is_asked_for_is_computed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(device, class_offset=True, softcap=5.0, num_tokens=300, vocab_size=1000)
    monkeypatch.setattr(_op, "SMALL", 0)
    computed = spy_on_backward(monkeypatch)
    offset = problem.options["class_offset"]
    loss = flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, **problem.options)
    torch.autograd.grad(loss, (problem.hidden, problem.weight), retain_graph=True)
    assert computed == [(True, True)]
    torch.autograd.grad(loss, offset, retain_graph=True)
    assert computed[1:] == [(False, False)]
    loss.backward()
    assert computed[2:] == [(False, False), (True, True)] and offset.grad is not None
    with torch.no_grad():
        flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, **problem.options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beside_a_buffer_for_the_weights_gradient(device: str, dtype: torch.dtype, way: dict[str, Any]) -> None:
    problem = make_problem(device, dtype, class_offset=True, **way)
    arguments, offset = (problem.hidden, problem.weight, problem.target), problem.options["class_offset"]
    weight_right, right = of_all(flce.linear_cross_entropy(*arguments, **problem.options), problem.weight, offset)
    buffer = torch.ones(problem.weight.shape, device=device)
    flce.linear_cross_entropy(*arguments, **problem.options, grad_weight_out=buffer).backward()
    assert_close(offset.grad, right, torch.float32)
    assert_close(buffer - 1, weight_right, dtype)


def test_several_hidden_states_and_the_other_functions(device: str) -> None:
    problem = make_problem(device, class_offset=True, softcap=5.0)
    hidden, weight, target, offset = problem.hidden, problem.weight, problem.target, problem.options["class_offset"]
    options = {"softcap": 5.0, "class_offset": offset}
    losses = flce.linear_cross_entropy([hidden, 2 * hidden], weight, [target, target], **options)
    each = [flce.linear_cross_entropy(states, weight, target, **options) for states in (hidden, 2 * hidden)]
    torch.testing.assert_close(of_all(sum(losses), offset), of_all(sum(each), offset))
    logprobs = flce.linear_logprobs(hidden, weight, target, **options)
    at = flce.linear_logprobs_at(hidden, weight, target.clamp(min=-1)[:, None], **options)
    taught = flce.linear_topk_distillation(
        hidden, weight, target.clamp(min=-1)[:, None], torch.ones(37, 1, device=device), reduction="sum", **options
    )
    expected = of_all(logprobs.sum(), offset)
    torch.testing.assert_close(of_all(at.sum(), offset), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(of_all(-taught, offset), expected, rtol=1e-4, atol=1e-5)
    head = flce.FusedLMHead(24, 101, bias=False, softcap=5.0, device=device)
    loss = head(hidden[None], target[None], class_offset=offset)
    expected_loss = flce.linear_cross_entropy(hidden[None], head.weight, target[None], shift=head.shift, **options)
    assert torch.equal(*of_all(loss, offset), *of_all(expected_loss, offset))


def test_no_second_derivative_and_no_batches(device: str) -> None:
    problem = make_problem(device, class_offset=True, softcap=5.0)
    offset = problem.options["class_offset"]
    loss = flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, reduction="none", **problem.options)
    with pytest.raises(flce.UnsupportedTransformError, match="cannot be batched"):
        torch.autograd.grad(loss, offset, torch.eye(37, device=device), is_grads_batched=True)
    (gradient,) = torch.autograd.grad(loss.sum(), offset, create_graph=True)
    with pytest.raises(flce.UnsupportedTransformError, match="no second derivatives"):
        gradient.sum().backward()


@pytest.mark.gpu
def test_in_a_cuda_graph(way: dict[str, Any]) -> None:
    problem = make_problem("cuda", torch.bfloat16, num_tokens=64, hidden_size=64, vocab_size=1000, class_offset=True, **way)
    inputs = (problem.hidden, problem.weight, problem.options["class_offset"])

    def step() -> tuple[Tensor, ...]:
        return of_all(flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, **problem.options), *inputs)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    with torch.no_grad():
        problem.hidden.mul_(0.5)
    graph.replay()
    for found, expected in zip(made, step(), strict=True):
        assert torch.equal(found, expected)
