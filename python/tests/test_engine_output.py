"""`HeadOutput` against logits that torch makes, and where it stands for a tensor."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_support import token_losses
from torch import Tensor, nn

import flce
from flce.engine import HeadOutput, Stage, _output
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
    assert output.shape == (T,)
    same((output - 1.0) ** 2, (logits[:, 0] - 1.0) ** 2, output)
    with pytest.raises(flce.ArgumentError, match=r"one row, a critic's value; call output\.values"):
        output.cross_entropy(labels, shift=1)
    with pytest.raises(flce.ArgumentError, match="the head has 61 rows"):
        problem()[0].values()


AS_A_TENSOR: dict[str, Any] = {
    "function": lambda x: torch.log_softmax(x, dim=-1),
    "functional": lambda x: F.cross_entropy(x, torch.arange(T)),
    "method": lambda x: x.float().mean(),
    "in a list": lambda x: torch.cat([x, x]),
    "keyword": lambda x: torch.sum(input=x, dim=0),
    "operators": lambda x: -(x / 2.0 + 1.0) * 3.0 - x + (2.0 - x) ** 2 + 1.0 / (x * x + 1.0),
    "matmul": lambda x: x @ torch.ones(V, 2),
    "index": lambda x: x[torch.tensor([0, 3]), 2:5],
    "iteration": lambda x: torch.stack([row.sum() for row in x]),
    "masked": lambda x: x.masked_fill(x > 0.5, 0.0) + (x <= 0.1).float(),
    "own with a tensor on the left": lambda x: torch.ones(V) * x,
    "augmented": lambda x: augmented(x),
}


def augmented(x: Any) -> Tensor:
    x /= 0.5
    return x  # type: ignore[no-any-return]


@pytest.mark.parametrize("what", AS_A_TENSOR)
def test_code_that_is_written_for_tensors_gets_logits(what: str) -> None:
    output, logits, *_ = problem()
    same(AS_A_TENSOR[what](output), AS_A_TENSOR[what](logits), output)


def test_attributes_of_the_tensor() -> None:
    output, logits, *_ = problem()
    assert (output.shape, output.dtype, output.device, output.size(-1), len(output)) == (logits.shape, torch.float32, logits.device, V, T)
    assert not hasattr(output, "no_such_attribute")
    with pytest.raises(AttributeError, match="'HeadOutput' object has no attribute 'logitz'"):
        output.logitz  # noqa: B018


def test_logits_in_memory_are_said_once_and_made_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_output, "_said", set())
    output, *_, labels, _ = problem()
    with caplog.at_level(logging.WARNING, logger="flce"):
        output.cross_entropy(labels, shift=1)
        assert not caplog.records
        assert output.float().data_ptr() == output.detach().data_ptr()
        problem()[0].mean()
    assert [f"logits [{T}, {V}]" in record.message for record in caplog.records] == [True]


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


def test_a_head_that_is_no_layer_and_a_stage_without_one_are_refused() -> None:
    output, _, labels, cu_seqlens = problem()
    with pytest.raises(flce.ArgumentError, match=r"the head is a Sequential without a weight \[V, D\]"):
        HeadOutput(output.hidden, nn.Sequential(output.head), cu_seqlens=cu_seqlens).cross_entropy(labels, shift=1)
    stage = Stage()
    stage.stage, stage.num_stages = 0, 2
    assert stage.head is None
    with pytest.raises(flce.ArgumentError, match="stage 0 of 2 has no head"):
        HeadOutput.of(stage, output.hidden, cu_seqlens)
    stage.head = output.head
    assert stage.head is output.head
    assert sorted(stage.state_dict()) == ["head.bias", "head.weight"]


class Capped(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(super().forward(hidden) / 20.0) * 20.0


class Cut(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden)[..., :-3]


class Scaled(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * self.scale


class Same(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight.t() + self.bias


OTHER_FORMULAS = {
    Capped: r"Capped, differs from hidden · weightᵀ \+ bias by .* of the largest logit.*softcap",
    Cut: r"Cut, gives \[2, 58\] for two rows; it must give logits \[2, 61\]",
    Scaled: r"Scaled with a parameter scale \[\] beside its weight and bias, which would get no gradient",
}


@pytest.mark.parametrize("kind", OTHER_FORMULAS)
def test_a_head_with_a_forward_of_its_own_is_refused_where_it_is_no_product(kind: type[nn.Linear]) -> None:
    output, _, labels, cu_seqlens = problem()
    own = HeadOutput(output.hidden, kind(D, V), cu_seqlens=cu_seqlens)
    for call in (
        lambda: own.cross_entropy(labels, shift=1),
        lambda: own.logprobs(labels, shift=1),
        own.entropy,
        own.logits,
        lambda: own.mean(),
    ):
        with pytest.raises(flce.ArgumentError, match=OTHER_FORMULAS[kind]):
            call()
    assert own.head(own.hidden).isfinite().all()  # the message's advice


def test_a_forward_that_is_a_product_is_compared_until_a_row_settles_it(monkeypatch: pytest.MonkeyPatch) -> None:
    output, *_, labels, cu_seqlens = problem()
    calls: list[Tensor] = []
    monkeypatch.setattr(Same, "forward", lambda head, hidden, own=Same.forward: calls.append(hidden) or own(head, hidden))
    head = Same(D, V)
    with torch.no_grad():
        head.weight.zero_()
    for expected in (1, 2):  # logits of a weight of zeros show nothing
        HeadOutput(output.hidden, head, cu_seqlens=cu_seqlens).cross_entropy(labels, shift=1)
        assert len(calls) == expected
    nn.init.normal_(head.weight)
    for _ in range(2):
        HeadOutput(output.hidden, head, cu_seqlens=cu_seqlens).cross_entropy(labels, shift=1)
        assert len(calls) == 3
    torch.testing.assert_close(calls[-1][0], output.hidden[-1])
    late = Capped(D, V)
    nn.init.zeros_(late.weight)
    HeadOutput(output.hidden, late, cu_seqlens=cu_seqlens).cross_entropy(labels, shift=1)
    nn.init.normal_(late.weight)
    with pytest.raises(flce.ArgumentError, match="Capped, differs"):
        HeadOutput(output.hidden, late, cu_seqlens=cu_seqlens).cross_entropy(labels, shift=1)


def test_an_adapters_dropout_is_off_while_its_head_is_compared() -> None:
    peft = pytest.importorskip("peft")
    model = nn.Sequential(nn.Linear(D, V))
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"], r=2, lora_dropout=0.5, init_lora_weights=False))
    head = wrapped.base_model.model[0].train()
    output, *_, labels, cu_seqlens = problem()
    HeadOutput(output.hidden, head, cu_seqlens=cu_seqlens).cross_entropy(labels, shift=1).backward()
    assert head in _output._compared
    assert head.lora_dropout["default"].training
    assert head.lora_B["default"].weight.grad is not None
