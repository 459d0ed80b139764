"""`HeadOutput` against logits that torch makes, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_support import token_losses
from torch import Tensor, nn

import flce
from flce.engine import HeadOutput, Stage
from flce.engine._output import head_options_of

D, V, LENGTHS = 16, 61, [5, 1, 8, 3]
T = sum(LENGTHS)


def problem(rows: int = V, *, bias: bool = True, scale: float = 1.0, softcap: float = 0.0) -> tuple[HeadOutput, Tensor, Tensor, Tensor]:
    """The output, logits of its own hidden states by torch, labels, cu_seqlens."""
    torch.manual_seed(0)
    hidden = torch.randn(T, D, requires_grad=True)
    head = nn.Linear(D, rows, bias=bias)
    cu_seqlens = F.pad(torch.tensor(LENGTHS).cumsum(0), (1, 0)).int()
    labels = torch.randint(0, V, (T,))
    labels[2] = -100
    logits = head(hidden) * scale
    logits = torch.tanh(logits / softcap) * softcap if softcap else logits
    return HeadOutput(hidden, head, scale, softcap, cu_seqlens), logits, labels, cu_seqlens


def gradients(value: Tensor, output: HeadOutput) -> tuple[Tensor, ...]:
    weight: Any = output.head.weight
    return torch.autograd.grad(value, (output.hidden, weight), retain_graph=True)


def same(value: Tensor, expected: Tensor, output: HeadOutput) -> None:
    torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    weights = torch.linspace(-1, 1, value.numel()).view(value.shape)
    for one, other in zip(gradients((value * weights).sum(), output), gradients((expected * weights).sum(), output), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("bias", "scale", "softcap"), [(True, 1.0, 0.0), (False, 0.5, 2.0)])
def test_what_is_asked_for_equals_torchs(bias: bool, scale: float, softcap: float) -> None:
    output, logits, labels, cu_seqlens = problem(bias=bias, scale=scale, softcap=softcap)
    losses, counted = token_losses(logits, labels, cu_seqlens)
    same(output.cross_entropy(labels, shift=1), losses[counted].mean(), output)
    same(output.cross_entropy(labels, reduction="sum", shift=1), losses[counted].sum(), output)
    same(output.cross_entropy(labels, shift=0, reduction="none"), F.cross_entropy(logits, labels, reduction="none"), output)
    same(output.logprobs(labels, shift=1), torch.where(counted, -losses, 0.0), output)
    cooled, _ = token_losses(logits / 0.7, labels, cu_seqlens)
    same(output.logprobs(labels, 0.7, shift=1), torch.where(counted, -cooled, 0.0), output)
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    same(output.entropy(), entropy, output)
    both = output.logprobs_and_entropy(labels, shift=1)
    same(both[0], torch.where(counted, -losses, 0.0), output)
    same(both[1], torch.where(counted, entropy, 0.0), output)
    same(output.logits(), logits, output)


def test_a_critics_values() -> None:
    output, logits, labels, _ = problem(1)
    same(output.values(), logits[:, 0], output)
    with pytest.raises(flce.ArgumentError, match=r"one row, a critic's value; call output\.values"):
        output.cross_entropy(labels, shift=1)
    with pytest.raises(flce.ArgumentError, match="the head has 61 rows"):
        problem()[0].values()


@pytest.mark.parametrize(
    "use",
    [
        lambda x: torch.log_softmax(x, dim=-1),
        lambda x: F.cross_entropy(x, torch.arange(T)),
        lambda x: torch.cat([x, x]),
        lambda x: torch.ones(V) * x,
        lambda x: x.float(),
        lambda x: x.shape,
    ],
)
def test_code_that_is_written_for_tensors_is_told_what_to_call(use: Any) -> None:
    with pytest.raises((flce.ArgumentError, AttributeError), match=r"HeadOutput and no tensor; .*output\.logits\(\) makes them"):
        use(problem()[0])
    for operator in (lambda x: x / 2.0, lambda x: x[0]):
        with pytest.raises(TypeError, match="HeadOutput"):
            operator(problem()[0])
    with pytest.raises(AttributeError, match=r"^'HeadOutput' object has no attribute 'logitz'$"):
        problem()[0].logitz  # type: ignore[attr-defined]  # noqa: B018


def test_options_of_every_call() -> None:
    assert head_options_of(None, None) == {}
    made = head_options_of({"retain_in_grad_weight": False}, 1 << 20)
    assert isinstance(made["workspace_limit_bytes"], flce.MemoryBudget)
    with pytest.raises(flce.ArgumentError, match="head_options has softcap; allowed are workspace_limit_bytes"):
        head_options_of({"softcap": 2.0}, None)
    with pytest.raises(flce.ArgumentError, match="both given"):
        head_options_of({"workspace_limit_bytes": 1 << 20}, 1 << 20)
    with pytest.raises(flce.ArgumentError, match="memory_limit_bytes is 0"):
        head_options_of(None, 0)


def test_a_head_that_is_no_layer_is_refused() -> None:
    output, _, labels, cu_seqlens = problem()
    with pytest.raises(flce.ArgumentError, match=r"the head is a Sequential without a weight \[V, D\]"):
        HeadOutput(output.hidden, nn.Sequential(output.head), cu_seqlens=cu_seqlens).cross_entropy(labels, shift=1)
    stage = Stage()
    assert stage.head is None
    stage.head = output.head
    assert stage.head is output.head
    assert sorted(stage.state_dict()) == ["head.bias", "head.weight"]


class Capped(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(super().forward(hidden) / 20.0) * 20.0


def test_a_head_with_a_forward_of_its_own_is_refused() -> None:
    output, _, labels, cu_seqlens = problem()
    own = HeadOutput(output.hidden, Capped(D, V), cu_seqlens=cu_seqlens)
    for call in (lambda: own.cross_entropy(labels, shift=1), lambda: own.logprobs(labels, shift=1), own.entropy, own.logits):
        with pytest.raises(flce.ArgumentError, match=r"Capped that has a forward of its own .* may be more than hidden · weightᵀ \+ bias"):
            call()
    assert own.head(own.hidden).isfinite().all()  # the documentation's advice


def test_an_adapter_is_computed_with_its_head() -> None:
    peft = pytest.importorskip("peft")
    model = nn.Sequential(nn.Linear(D, V))
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"], r=2, init_lora_weights=False))
    head = wrapped.base_model.model[0].train()
    output, *_, labels, cu_seqlens = problem()
    own = HeadOutput(output.hidden, head, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(own.logits(), head(output.hidden), rtol=1e-4, atol=1e-5)
    losses, counted = token_losses(head(output.hidden), labels, cu_seqlens)
    loss = own.cross_entropy(labels, shift=1)
    torch.testing.assert_close(loss, losses[counted].mean(), rtol=1e-4, atol=1e-5)
    loss.backward()
    assert head.lora_B["default"].weight.grad is not None
