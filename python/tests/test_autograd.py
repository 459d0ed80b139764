"""Autograd's ways with the node: partial gradients, repetition, checkpointing, accumulation, autocast, threads, and saved tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import Problem, assert_close, in_double, make_problem, reference, spy_on_backward
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flce
from flce.call import _call
from flce.compat import cce

pytestmark = pytest.mark.first_and_direct


def loss_of(problem: Problem, **options: Any) -> Any:
    return flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, **(problem.options | options))


def reference_gradients(problem: Problem, **options: Any) -> tuple[Tensor, ...]:
    exact = in_double(problem)
    loss = reference(exact.hidden, exact.weight, exact.target, **(exact.options | options))["loss"]
    return torch.autograd.grad(loss.sum(), (exact.hidden, exact.weight))


def check_gradients(
    problem: Problem, hidden: Tensor | None, weight: Tensor | None, dtype: torch.dtype = torch.float32, **options: Any
) -> None:
    wanted = reference_gradients(problem, **options)
    for name, actual, expected in (("hidden", hidden, wanted[0]), ("weight", weight, wanted[1])):
        if actual is not None:
            assert_close(actual, expected, dtype, name)


def test_frozen_weight_and_frozen_hidden(device: str) -> None:
    whole = make_problem(device)
    both = torch.autograd.grad(loss_of(whole), (whole.hidden, whole.weight))
    frozen_weight = make_problem(device)
    frozen_weight.weight.requires_grad_(False)
    loss_of(frozen_weight).backward()
    assert frozen_weight.weight.grad is None
    assert torch.equal(frozen_weight.hidden.grad, both[0])  # type: ignore[arg-type]
    frozen_hidden = make_problem(device)
    frozen_hidden.hidden.requires_grad_(False)
    loss_of(frozen_hidden).backward()
    assert frozen_hidden.hidden.grad is None
    assert torch.equal(frozen_hidden.weight.grad, both[1])  # type: ignore[arg-type]


def test_bias_alone(device: str) -> None:
    problem = make_problem(device, bias=True)
    bias = problem.options["bias"]
    problem.hidden.requires_grad_(False)
    problem.weight.requires_grad_(False)
    loss_of(problem).backward()
    expected = reference(problem.hidden, problem.weight, problem.target, bias=bias)["loss"]
    assert_close(bias.grad, torch.autograd.grad(expected, bias)[0], torch.float32)


def test_no_grad_and_inference_mode_give_the_value_alone(device: str) -> None:
    problem = make_problem(device)
    expected = loss_of(problem)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            loss = loss_of(problem)
        assert not loss.requires_grad
        assert torch.equal(loss, expected)
    with torch.no_grad():
        detached = loss_of(problem)
    with pytest.raises(RuntimeError, match="does not require grad"):
        detached.backward()


def test_two_backwards_with_retain_graph(device: str) -> None:
    problem = make_problem(device)
    loss = loss_of(problem)
    first = torch.autograd.grad(loss, (problem.hidden, problem.weight), retain_graph=True)
    second = torch.autograd.grad(loss, (problem.hidden, problem.weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    check_gradients(problem, *first)


def test_only_what_is_asked_for_is_computed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = spy_on_backward(monkeypatch)
    problem = make_problem(device)
    # A model's layout: the hidden states come from a layer, the weight is a parameter.
    loss = flce.linear_cross_entropy(problem.hidden * 1.0, problem.weight, problem.target)
    for_hidden = torch.autograd.grad(loss, problem.hidden, retain_graph=True)[0]
    for_weight = torch.autograd.grad(loss, problem.weight, retain_graph=True)[0]
    loss.backward()
    assert computed == [(True, False), (False, True), (True, True)]
    assert torch.equal(for_hidden, problem.hidden.grad)  # type: ignore[arg-type]
    assert torch.equal(for_weight, problem.weight.grad)  # type: ignore[arg-type]


def test_nothing_of_the_logits_size_is_saved(device: str) -> None:
    problem = make_problem(device, num_tokens=64, vocab_size=500)
    saved: list[Tensor] = []
    # type: ignore[func-returns-value]
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        loss = loss_of(problem)
    addresses = {problem.hidden.data_ptr(), problem.weight.data_ptr(), problem.target.data_ptr()}
    own = [tensor for tensor in saved if tensor.data_ptr() not in addresses]
    assert [tuple(tensor.shape) for tensor in own] == [(64,)]  # lse
    assert own[0].dtype == torch.float32
    assert len(saved) == 4
    loss.backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(device: str, use_reentrant: bool) -> None:
    problem = make_problem(device)

    def block(hidden: Tensor, weight: Tensor) -> Tensor:
        return flce.linear_cross_entropy(torch.tanh(hidden), weight, problem.target)

    block(problem.hidden, problem.weight).backward()
    expected = problem.hidden.grad, problem.weight.grad
    problem.hidden.grad = problem.weight.grad = None
    checkpoint(block, problem.hidden, problem.weight, use_reentrant=use_reentrant).backward()
    assert torch.equal(problem.hidden.grad, expected[0])  # type: ignore[arg-type]
    assert torch.equal(problem.weight.grad, expected[1])  # type: ignore[arg-type]


def in_its_layer(loss: type, **options: Any) -> Callable[..., Tensor]:
    """A loss's call with the layer of a weight [V, D]."""

    def call(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        layer = nn.Linear(*weight.shape[::-1], bias=False, device="meta")
        layer.weight = weight
        return loss(layer, **options)(hidden, target)

    return call


def in_the_head(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    head = flce.FusedLMHead(*weight.shape[::-1], bias=False, device="meta")
    head.weight = weight
    return head(hidden, labels=target)


ENTRIES: dict[str, Callable[..., Any]] = {
    "loss": flce.linear_cross_entropy,
    "none": lambda *call: flce.linear_cross_entropy(*call, reduction="none"),
    "lse": lambda *call: flce.linear_cross_entropy(*call, return_lse=True)[0],
    "shift": lambda hidden, weight, target: flce.linear_cross_entropy(hidden, weight, target, shift=1 if target.dim() > 1 else 0),
    "all retained": lambda *call: flce.linear_cross_entropy(*call, workspace_limit_bytes=1 << 40),
    "hidden-major": lambda hidden, weight, target: flce.linear_cross_entropy(hidden, weight.detach().t().contiguous().t(), target),
    "frozen weight": lambda hidden, weight, target: flce.linear_cross_entropy(hidden, weight.detach(), target),
    "logprobs": flce.linear_logprobs,
    "head": in_the_head,
    "LinearCrossEntropyLoss": in_its_layer(flce.LinearCrossEntropyLoss, shift=0),
    "PipelineFusedLoss": in_its_layer(flce.PipelineFusedLoss, shift=0),
    "cce": cce.linear_cross_entropy,
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_checkpointing_the_first_call_of_a_shape(device: str, entry: str) -> None:
    """The call that checks its arguments and the direct one that follows save tensors of the same shapes."""
    problem = make_problem(device, num_tokens=12)
    weight = nn.Parameter(problem.weight.detach())
    for shape in ((12,), (3, 4), (2, 2, 3)):
        _call.forget()
        hidden, target = problem.hidden.detach().view(*shape, -1).requires_grad_(), problem.target.view(shape)
        for _ in range(3):
            loss = checkpoint(ENTRIES[entry], hidden, weight, target, use_reentrant=False)
            (gradient,) = torch.autograd.grad(loss.sum(), hidden)
        (right,) = torch.autograd.grad(ENTRIES[entry](hidden, weight, target).sum(), hidden)
        assert torch.equal(gradient, right)


def test_checkpointing_watched_in_forward_alone(device: str) -> None:
    """An operator in forward, a kernel called directly in its repetition."""
    problem = make_problem(device, num_tokens=12)
    hidden, target = problem.hidden.detach().view(3, 4, -1).requires_grad_(), problem.target.view(3, 4)
    _call.forget()
    for _ in range(3):
        with FlopCounterMode(display=False):
            loss = checkpoint(flce.linear_cross_entropy, hidden, problem.weight, target, use_reentrant=False)
        loss.backward()
        flce.linear_cross_entropy(hidden, problem.weight, target)


def test_selective_checkpointing_sees_the_operator(device: str) -> None:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    problem = make_problem(device)
    seen = []

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.append(str(operator))
        return CheckpointPolicy.PREFER_RECOMPUTE

    def block(hidden: Tensor, weight: Tensor) -> Tensor:
        return flce.linear_cross_entropy(hidden * 2.0, weight, problem.target)

    loss = checkpoint(
        block, problem.hidden, problem.weight, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
    )
    loss.backward()
    assert "flce.linear_cross_entropy.default" in seen
    expected = torch.autograd.grad(block(problem.hidden, problem.weight), (problem.hidden, problem.weight))
    assert torch.equal(problem.hidden.grad, expected[0])
    assert torch.equal(problem.weight.grad, expected[1])


def test_gradient_accumulation_over_four_microbatches(device: str) -> None:
    problem = make_problem(device, num_tokens=40)
    count = (problem.target != -100).sum()
    for hidden, target in zip(problem.hidden.chunk(4), problem.target.chunk(4), strict=True):
        flce.linear_cross_entropy(hidden, problem.weight, target, num_valid_tokens=count).backward()
    check_gradients(problem, problem.hidden.grad, problem.weight.grad)


@pytest.mark.parametrize("wide", [False, True])
def test_grad_weight_out_accumulates(device: str, wide: bool) -> None:
    problem = make_problem(device, torch.bfloat16, bias=True, num_tokens=40)
    bias = problem.options["bias"]
    buffer = torch.zeros_like(problem.weight, dtype=torch.float32 if wide else torch.bfloat16, requires_grad=False)
    for hidden, target in zip(problem.hidden.chunk(4), problem.target.chunk(4), strict=True):
        flce.linear_cross_entropy(hidden, problem.weight, target, bias=bias, reduction="sum", grad_weight_out=buffer).backward()
    assert problem.weight.grad is None
    check_gradients(problem, problem.hidden.grad, buffer, torch.bfloat16, reduction="sum")
    exact = in_double(problem)
    expected = reference(exact.hidden, exact.weight, exact.target, reduction="sum", **exact.options)["loss"]
    assert_close(bias.grad, torch.autograd.grad(expected, exact.options["bias"])[0], torch.bfloat16, "bias")


def test_grad_weight_out_is_left_alone_where_weight_is_not_asked_for(device: str) -> None:
    problem = make_problem(device, num_tokens=2, ignored=0.0)
    buffer = torch.zeros_like(problem.weight, requires_grad=False)
    loss = flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, grad_weight_out=buffer)
    torch.autograd.grad(loss, problem.hidden, retain_graph=True)
    assert not buffer.any()
    loss.backward()
    assert buffer.any()


def test_per_token_upstream_gradients_that_are_expanded_or_strided(device: str) -> None:
    problem = make_problem(device)
    loss = loss_of(problem, reduction="none")
    upstream = torch.randn(2 * loss.shape[0], device=device)[::2]
    actual = torch.autograd.grad(loss, (problem.hidden, problem.weight), upstream, retain_graph=True)
    expected = reference(problem.hidden, problem.weight, problem.target, reduction="none")["loss"]
    wanted = torch.autograd.grad(expected, (problem.hidden, problem.weight), upstream.double())
    for a, b in zip(actual, wanted, strict=True):
        assert_close(a, b, torch.float32)
    check_gradients(problem, *torch.autograd.grad(loss.sum(), (problem.hidden, problem.weight)), reduction="sum")


@pytest.mark.parametrize(
    "view",
    [
        lambda t: torch.randn(2, *t.shape, device=t.device)[0].t().contiguous().t().copy_(t),
        lambda t: torch.cat([t, t], dim=1)[:, : t.shape[1]],
        lambda t: torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view_as(t),
    ],
    ids=["transposed", "sliced", "misaligned"],
)
def test_inputs_of_any_layout(device: str, view: Callable[[Tensor], Tensor]) -> None:
    problem = make_problem(device)
    expected = torch.autograd.grad(loss_of(problem), (problem.hidden, problem.weight))
    hidden = view(problem.hidden.detach()).detach().requires_grad_()
    weight = view(problem.weight.detach()).detach().requires_grad_()
    target = torch.stack([problem.target, problem.target], dim=1)[:, 0]
    assert not target.is_contiguous()
    loss = flce.linear_cross_entropy(hidden, weight, target)
    actual = torch.autograd.grad(loss, (hidden, weight))
    assert loss.item() == pytest.approx(loss_of(problem).item(), rel=1e-6)
    for a, b in zip(actual, expected, strict=True):
        assert_close(a, b, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_computes_in_its_dtype_and_returns_fp32_gradients(device: str, dtype: torch.dtype) -> None:
    problem = make_problem(device, bias=True)
    saved: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)  # type: ignore[func-returns-value]
    with hooks, torch.autocast(device, dtype=dtype):
        loss = loss_of(problem)
    loss.backward()
    assert loss.dtype == torch.float32
    assert problem.hidden.grad is not None
    assert problem.hidden.grad.dtype == torch.float32
    rounded = Problem(
        *(tensor.detach().to(dtype).requires_grad_() for tensor in (problem.hidden, problem.weight)),
        problem.target,
        {"bias": problem.options["bias"].detach().to(dtype)},
    )
    check_gradients(rounded, problem.hidden.grad, problem.weight.grad, dtype)
    # The weight itself is saved, and no rounded copy of it beside.
    assert [t.data_ptr() for t in saved if t.shape == problem.weight.shape] == [problem.weight.data_ptr()]


def test_inplace_change_of_a_saved_tensor_is_noticed(device: str) -> None:
    problem = make_problem(device)
    loss = loss_of(problem)
    with torch.no_grad():
        problem.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_two_threads(device: str) -> None:
    """Two options, each in two threads with hidden states of its own: the bits of each by itself."""
    problem = make_problem(device, num_tokens=64, vocab_size=700)
    cases = []
    for cap, scale in ((5.0, 1.0), (5.0, 0.5), (9.0, 1.0), (9.0, 2.0)):
        hidden = (problem.hidden.detach() * scale).requires_grad_()
        loss = flce.linear_cross_entropy(hidden, problem.weight, problem.target, softcap=cap)
        expected = (loss.detach(), *torch.autograd.grad(loss, (hidden, problem.weight)))
        check_gradients(Problem(hidden, problem.weight, problem.target), *expected[1:], softcap=cap)
        cases.append((cap, hidden.detach(), expected))
    done: list[float] = []
    failures: list[str] = []

    def work(cap: float, given: Tensor, expected: tuple[Tensor, ...]) -> None:
        for _ in range(20):
            hidden, weight = (t.detach().clone().requires_grad_() for t in (given, problem.weight))
            loss = flce.linear_cross_entropy(hidden, weight, problem.target, softcap=cap)
            loss.backward()
            for name, actual, right in zip(("loss", "hidden", "weight"), (loss, hidden.grad, weight.grad), expected, strict=True):
                if actual is None or not torch.equal(actual, right):
                    failures.append(f"softcap {cap}: {name}")
        done.append(cap)

    threads = [threading.Thread(target=work, args=case) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sorted(done) == [5.0, 5.0, 9.0, 9.0]
