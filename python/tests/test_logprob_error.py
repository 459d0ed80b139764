"""Log-probabilities of bf16 inputs have fp32's error, not that of bf16 logits (docs/numerics.md, "An fp32 head at bf16 speed")."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import flce


@pytest.mark.parametrize("labels", ["random", "confident"])
def test_logprobs_of_bf16_inputs_are_those_of_an_fp32_head(device: str, labels: str) -> None:
    num_tokens, hidden_size, vocab_size = 96, 512, 6000
    weight = torch.randn(vocab_size, hidden_size) * (3 / math.sqrt(hidden_size))
    hidden = torch.randn(num_tokens, hidden_size)
    target = torch.randint(0, vocab_size, (num_tokens,))
    if labels == "confident":
        hidden += weight[target] * ((math.log(vocab_size) + 8.5) / weight[target].square().sum(dim=1, keepdim=True))
    hidden, weight = hidden.bfloat16(), weight.bfloat16()

    exact = F.log_softmax(hidden.double() @ weight.double().t(), dim=-1)[torch.arange(num_tokens), target]
    assert (exact.exp().median() > 0.9) == (labels == "confident")
    hidden, weight, target = hidden.to(device), weight.to(device), target.to(device)
    ours = flce.linear_logprobs(hidden, weight, target)
    rounded = F.log_softmax(F.linear(hidden, weight).float(), dim=-1).gather(1, target[:, None]).squeeze(1)
    error, rounded_error = ((values.double().cpu() - exact).abs().max() for values in (ours, rounded))
    assert error < 1e-5
    assert rounded_error > 100 * error
