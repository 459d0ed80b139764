"""An entropy that nothing is computed from has no gradient, and backward is told so: it may then use what forward retained on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flce
from flce.core import _kernels, _retain

N, D, V = 24, 64, 301


def layer(device: str, vocab_size: int = V) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(N, D, generator=generator).to(device, torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocab_size, D, generator=generator) / 4).to(device, torch.bfloat16).requires_grad_()
    target = torch.randint(0, vocab_size, (N,), generator=generator).to(device)
    target[::7] = -100
    return hidden, weight, target


def expected(hidden: Tensor, weight: Tensor, target: Tensor, shares: tuple[float, float]) -> tuple[Tensor, ...]:
    hidden, weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    log_p = torch.log_softmax(hidden @ weight.T, -1)
    valid = target >= 0
    logprobs = log_p.gather(1, target.clamp(min=0)[:, None])[:, 0][valid].sum()
    entropy = -(log_p.exp() * log_p).sum(-1)[valid].sum()
    return torch.autograd.grad(shares[0] * logprobs + shares[1] * entropy, (hidden, weight))


def assert_near(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for gradient, truth in zip(got, want, strict=True):
        assert (gradient.double() - truth).norm() <= 4e-3 * truth.norm()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each backward was told of an entropy's gradient."""
    seen: list[bool] = []
    run = _kernels.LoadedKernel.backward

    def backward(*args: Any, entropy: bool = True, **others: Any) -> None:
        seen.append(entropy)
        run(*args, entropy=entropy, **others)

    monkeypatch.setattr(_kernels.LoadedKernel, "backward", backward)
    return seen


def total(outputs: tuple[Tensor, ...], shares: tuple[float, float]) -> Tensor:
    return sum((share * output.sum() for share, output in zip(shares, outputs[:2], strict=True) if share), torch.zeros(()).to(outputs[0]))


@pytest.mark.parametrize("shares", [(1.0, 0.0), (0.0, 1.0), (1.0, -0.5)])
def test_backward_is_told(device: str, told: list[bool], shares: tuple[float, float]) -> None:
    hidden, weight, target = layer(device)
    for _ in range(3):  # the way of a call that is known, too
        outputs = flce.linear_logprobs(hidden, weight, target, return_entropy=True, return_top1=True)
        got = torch.autograd.grad(total(outputs, shares), (hidden, weight))
        assert_near(got, expected(hidden, weight, target, shares))
    assert told == [shares[1] != 0] * 3


def test_the_loss_is_told_as_well(device: str, told: list[bool]) -> None:
    hidden, weight, target = layer(device)
    loss, entropy = flce.linear_cross_entropy(hidden, weight, target, return_entropy=True)
    loss.backward(retain_graph=True)
    assert told == [False]
    hidden.grad = weight.grad = None
    entropy.sum().backward()
    assert told == [False, True]
    assert_near((hidden.grad, weight.grad), expected(hidden, weight, target, (0.0, 1.0)))  # type: ignore[arg-type]


def test_backward_again(device: str, told: list[bool]) -> None:
    hidden, weight, target = layer(device)
    outputs = flce.linear_logprobs(hidden, weight, target, return_entropy=True)
    for shares in ((1.0, 0.0), (1.0, 2.0), (1.0, 0.0)):
        got = torch.autograd.grad(total(outputs, shares), (hidden, weight), retain_graph=True)
        assert_near(got, expected(hidden, weight, target, shares))
    assert told == [False, True, True], "once there was a gradient of it, a node takes it that there is"


def test_a_compiled_call_gives_the_whole_gradient(device: str, told: list[bool]) -> None:
    hidden, weight, target = layer(device)

    def both(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = flce.linear_logprobs(hidden, weight, target, return_entropy=True)
        return outputs

    outputs = torch.compile(both, fullgraph=True, backend="aot_eager")(hidden, weight)
    assert_near(torch.autograd.grad(total(outputs, (1.0, -0.5)), (hidden, weight)), expected(hidden, weight, target, (1.0, -0.5)))
    assert told == [True]


def test_retained_where_it_is_of_use(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_retain, "LEAST_WORK", 1)
    retained = 0
    prepare = _retain.prepare

    def prepared(*args: Any) -> Any:
        nonlocal retained
        made, memory = prepare(*args)
        retained += made is not None
        return made, memory

    monkeypatch.setattr(_retain, "prepare", prepared)
    own = V + 2  # no other test has asked this size's kernel how much it retains
    hidden, weight, target = layer(device, own)
    kernel = flce.get_kernel(D, own, device=device, return_loss=False, return_logprobs=True, return_entropy=True)
    if not kernel.retains:
        pytest.skip("this device's kernels retain nothing")

    def step(shares: tuple[float, float]) -> int:
        before = retained
        torch.autograd.grad(total(flce.linear_logprobs(hidden, weight, target, return_entropy=True), shares), (hidden, weight))
        return retained - before

    step((1.0, 0.0))
    assert step((1.0, 0.0)) == 1
    step((1.0, 1.0))
    # A CPU retains logits, which an entropy's gradient is made of, too.
    assert step((1.0, 1.0)) == (0 if hidden.is_cuda else 1)
    step((1.0, 0.0))
    assert step((1.0, 0.0)) == 1
