"""Several hidden states given to flce.LinearCrossEntropyLoss, by every implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flce
from flce import errors

IMPLS = ("flce", "pytorch")
D, VOCAB = 24, 101


def layer(device: str, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(D, VOCAB, bias=bias).to(device)


def data(device: str, count: int) -> tuple[list[Tensor], Tensor]:
    make = torch.Generator().manual_seed(2)
    hidden = [torch.randn(2, 9, D, generator=make).to(device).requires_grad_() for _ in range(count)]
    labels = torch.randint(0, VOCAB, (2, 9), generator=make)
    labels[0, 2:4] = -100
    return hidden, labels.to(device)


def whole(head: nn.Module, hidden: list[Tensor], targets: list[Tensor]) -> list[Tensor]:
    """Torch's mean cross entropy of each depth."""
    return [F.cross_entropy(head(states).flatten(0, 1), target.flatten()) for states, target in zip(hidden, targets, strict=True)]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("aligned", [False, True])
def test_losses_are_those_of_a_call_each(device: str, impl: str, aligned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    head = layer(device, bias=True)
    hidden, labels = data(device, 3)
    targets = [flce.shift_labels(labels, 1 + depth) for depth in range(3)]
    weights = [1.0, 0.15, 0.15]
    rights = whole(head, hidden, targets)
    total = sum((w * loss for w, loss in zip(weights, rights, strict=True)), torch.zeros((), device=device))
    expected = torch.autograd.grad(total, [*hidden, *head.parameters()])
    calls = []
    own = flce.loss.linear_cross_entropy
    monkeypatch.setattr(flce.loss, "linear_cross_entropy", lambda *args, **kwargs: calls.append(1) or own(*args, **kwargs))
    loss = flce.LinearCrossEntropyLoss(head, impl, shift=0 if aligned else [1, 2, 3])
    made, losses = loss(hidden, targets if aligned else labels, loss_weights=weights)
    assert len(calls) == (impl == "flce")
    torch.testing.assert_close(torch.stack(losses), torch.stack(rights), rtol=1e-4, atol=1e-5)
    made.backward()
    for got, right in zip([*(each.grad for each in hidden), head.weight.grad, head.bias.grad], expected, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)
    plain = loss(tuple(hidden), targets if aligned else labels)
    torch.testing.assert_close(torch.stack(plain), torch.stack(losses))


@pytest.mark.parametrize("impl", IMPLS)
def test_numbers_of_depths(device: str, impl: str) -> None:
    """A list of counts and temperatures, and one for all."""
    head = layer(device)
    hidden, labels = data(device, 2)
    loss = flce.LinearCrossEntropyLoss(head, impl, shift=[1, 2], temperature=2.0)
    one = [loss.with_shift(1)(hidden[0], labels, num_valid_tokens=5), loss.with_shift(2)(hidden[1], labels, num_valid_tokens=7)]
    torch.testing.assert_close(torch.stack(loss(hidden, labels, num_valid_tokens=[5, 7])), torch.stack(one))
    cooler = [loss.with_shift(at + 1)(hidden[at], labels, temperature=t) for at, t in enumerate((0.5, 3.0))]
    torch.testing.assert_close(torch.stack(loss(hidden, labels, temperature=[0.5, 3.0])), torch.stack(cooler))


def test_an_adapter_of_the_layer_is_trained(device: str) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm_head = layer(device)

    adapted = peft.get_peft_model(Model(), peft.LoraConfig(r=4, target_modules=["lm_head"]))
    head = adapted.base_model.model.lm_head
    nn.init.normal_(head.lora_B["default"].weight)
    hidden, labels = data(device, 2)
    targets = [flce.shift_labels(labels, 1), flce.shift_labels(labels, 2)]
    rights = whole(head, hidden, targets)
    trained = [head.lora_A["default"].weight, head.lora_B["default"].weight]
    expected = torch.autograd.grad(rights[0] + rights[1], [*hidden, *trained])
    losses = flce.LinearCrossEntropyLoss(head, "flce", shift=[1, 2])(hidden, labels)
    torch.testing.assert_close(torch.stack(losses), torch.stack(rights), rtol=1e-4, atol=1e-5)
    for got, right in zip(torch.autograd.grad(losses[0] + losses[1], [*hidden, *trained]), expected, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


def test_auto_falls_back_for_a_list(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise errors.UnavailableError("no kernel here")

    hidden, labels = data(device, 2)
    loss = flce.LinearCrossEntropyLoss(layer(device), shift=[1, 2])
    right = loss(hidden, labels)
    monkeypatch.setattr(flce.loss, "linear_cross_entropy", missing)
    torch.testing.assert_close(torch.stack(loss(hidden, labels)), torch.stack(right), rtol=1e-4, atol=1e-5)
    assert loss.actual_impl == "pytorch"


@pytest.mark.parametrize("impl", IMPLS)
def test_refusals(device: str, impl: str) -> None:
    head = layer(device)
    hidden, labels = data(device, 2)

    def refused(message: str, given: Any, *args: Any, shift: Any = (1, 2), kind: type[Exception] = ValueError, **more: Any) -> None:
        with pytest.raises(kind, match=message):
            flce.LinearCrossEntropyLoss(head, impl, shift=shift)(given, *args, **more)

    refused(r"shift is \(1, 2\) and hidden_states is one tensor", hidden[0], labels)
    refused("loss_weights is given and hidden_states is one tensor", hidden[0], labels, shift=1, loss_weights=[1.0])
    refused("target and shift are one for all", hidden, labels, shift=1)
    refused("shift has 2 items and hidden has 1", hidden[:1], labels)
    refused("loss_weights has 1 items and hidden has 2", hidden, labels, loss_weights=[1.0])
    refused("hidden is an empty list", [], labels)
    with pytest.raises(flce.ArgumentError, match="shift is -1; it must be an integer"):
        flce.LinearCrossEntropyLoss(head, impl, shift=[0, -1])
    with pytest.raises(flce.ArgumentError, match=r"shift is \[1, 2\], and one target is counted"):
        flce.LinearCrossEntropyLoss(head, impl, shift=[1, 2]).num_valid(labels)


def test_losses_of_one_hidden_state_stay_so(device: str) -> None:
    """A pipeline's loss and a model's own have one."""
    head = layer(device)
    hidden, labels = data(device, 2)
    with pytest.raises(flce.ArgumentError, match=r"shift is \[1, 2\]; it must be an integer"):
        flce.PipelineFusedLoss(head, shift=[1, 2])
    with pytest.raises(flce.DTypeError, match="hidden_states is a list"):
        flce.PipelineFusedLoss(head, shift=0)(hidden, [labels, labels])
