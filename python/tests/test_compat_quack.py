"""flce.compat.quack: losses and gradients against their formulas in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from compat_support import DTYPES, check_gradients, make_layer
from support import assert_close
from torch import Tensor

from flce.compat.quack import chunked_linear_cross_entropy

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
reductions = pytest.mark.parametrize("reduction", ["mean", "sum"])


@dtypes
@reductions
@pytest.mark.parametrize("shape", [(24,), (4, 6)], ids=str)
@pytest.mark.parametrize("labels", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_losses_and_gradients(
    device: str, dtype: torch.dtype, reduction: str, shape: tuple[int, ...], labels: torch.dtype, ignore_index: int
) -> None:
    layer = make_layer(device, dtype, shape=shape, hidden_size=64, vocab_size=96, ignore_index=ignore_index)
    loss = chunked_linear_cross_entropy(layer.hidden, layer.weight, layer.target.to(labels), 16, ignore_index, reduction)
    exact = layer.in_double()
    right = F.cross_entropy(exact.logits().flatten(0, -2), layer.target.flatten(), ignore_index=ignore_index, reduction=reduction)
    assert loss.dtype is torch.float32
    assert_close(loss, right, dtype, "loss", output=True)
    check_gradients([loss], [right], layer, exact)


def test_targets_may_be_flat_beside_hidden_states_that_are_not(device: str) -> None:
    layer = make_layer(device, shape=(4, 6))
    expected = chunked_linear_cross_entropy(layer.hidden, layer.weight, layer.target)
    assert torch.equal(chunked_linear_cross_entropy(layer.hidden, layer.weight, layer.target.flatten()), expected)
    with pytest.raises(ValueError, match="target"):
        chunked_linear_cross_entropy(layer.hidden, layer.weight, layer.target[:, 1:])


@reductions
def test_with_no_valid_row_the_mean_is_nan(device: str, reduction: str) -> None:
    layer = make_layer(device)
    layer.target.fill_(-100)
    loss = chunked_linear_cross_entropy(layer.hidden, layer.weight, layer.target, reduction=reduction)
    assert bool(loss.isnan()) == (reduction == "mean")
    loss.backward()
    assert layer.hidden.grad is not None and not layer.hidden.grad.any()


@pytest.mark.parametrize("num_tokens", [8, 16, 24, 600])
@reductions
def test_bf16_is_closer_than_two_steps_in_bf16(device: str, num_tokens: int, reduction: str) -> None:
    layer = make_layer(device, torch.bfloat16, shape=(num_tokens,), hidden_size=512, vocab_size=1536)
    exact, steps = layer.in_double(), make_layer(device, torch.bfloat16, shape=(num_tokens,), hidden_size=512, vocab_size=1536)
    loss = chunked_linear_cross_entropy(layer.hidden, layer.weight, layer.target, reduction=reduction)
    in_steps = F.cross_entropy(F.linear(steps.hidden, steps.weight).float(), layer.target, reduction=reduction)
    right = F.cross_entropy(exact.logits(), layer.target, reduction=reduction)
    assert (loss - right).abs() < 3 * (in_steps - right).abs() + 1e-5 * right.abs().clamp(min=1)
    for value in (loss, in_steps, right):
        value.backward()
    for leaf, other, wanted in zip(layer.leaves(), steps.leaves(), exact.leaves(), strict=True):
        assert leaf.grad is not None and other.grad is not None and wanted.grad is not None
        assert (leaf.grad - wanted.grad).abs().max() < 2 * (other.grad - wanted.grad).abs().max() + 1e-4


@dtypes
def test_a_compiled_sum_has_the_same_bits(device: str, dtype: torch.dtype) -> None:
    layer = make_layer(device, dtype)
    compiled = torch.compile(chunked_linear_cross_entropy, fullgraph=True, backend="aot_eager")

    def gradients(function: object) -> tuple[Tensor, ...]:
        loss = function(layer.hidden, layer.weight, layer.target, reduction="sum")  # type: ignore[operator]
        return torch.autograd.grad(loss, layer.leaves())

    for one, other in zip(gradients(compiled), gradients(chunked_linear_cross_entropy), strict=True):
        assert torch.equal(one, other)


@dtypes
def test_a_gradient_has_the_same_bits_beside_a_frozen_input(device: str, dtype: torch.dtype) -> None:
    layer = make_layer(device, dtype)
    both = torch.autograd.grad(chunked_linear_cross_entropy(layer.hidden, layer.weight, layer.target), layer.leaves())
    hidden = torch.autograd.grad(chunked_linear_cross_entropy(layer.hidden, layer.weight.detach(), layer.target), layer.hidden)
    weight = torch.autograd.grad(chunked_linear_cross_entropy(layer.hidden.detach(), layer.weight, layer.target), layer.weight)
    assert torch.equal(both[0], hidden[0]) and torch.equal(both[1], weight[0])


def test_choices_of_speed_change_nothing(device: str) -> None:
    layer = make_layer(device)
    losses = [
        chunked_linear_cross_entropy(layer.hidden, layer.weight, layer.target, chunk_size, -100, "mean", tuned, scaled)
        for chunk_size, tuned, scaled in ((4096, True, None), (16, False, True), (1024, True, False))
    ]
    assert torch.equal(losses[0], losses[1]) and torch.equal(losses[0], losses[2])


def test_what_is_refused() -> None:
    layer = make_layer()
    for reduction in ("none", "weighted_mean"):
        with pytest.raises(ValueError, match=reduction):
            chunked_linear_cross_entropy(layer.hidden, layer.weight, layer.target, reduction=reduction)
    with pytest.raises(AssertionError, match="chunk_size is 12"):
        chunked_linear_cross_entropy(layer.hidden, layer.weight, layer.target, 12)
