"""flce.torchtitan with several hidden states and labels, as torchtitan's multi-token prediction gives them after 0.3.0."""

# ruff: noqa: E402  # imports come after what skips without torchtitan, and prepares it

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

for _name in ("torchtitan", "spmd_types", "tensorboard"):
    pytest.importorskip(_name, reason=f"{_name} is not installed: tools/setup.sh --trainers fetches tools/trainers.txt")

import titan_support

titan_support.prepare()
from test_torchtitan import DEVICE, VOCAB, D, linear, loss_of, one_rank  # noqa: F401
from titan_support import calls_of_flce, loss_of_depths
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss

import flce
from flce.torchtitan import FusedLoss, fused_loss

SCALE = 0.3


def of_depths(head: Any, **options: Any) -> FusedLoss:
    return loss_of(head, loss_fn=loss_of_depths().Config(mtp_scale=SCALE), **options)


def depths(
    count: int, tokens: tuple[int, ...] = (12,), dtype: torch.dtype = torch.float32
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Hidden states, and labels of which each depth ignores others, its last ones as the decoder's shift leaves them."""
    make = torch.Generator().manual_seed(0)
    hidden = tuple(torch.randn(*tokens, D, generator=make).to(DEVICE, dtype).requires_grad_() for _ in range(count))
    labels = tuple(torch.randint(0, VOCAB, tokens, generator=make).to(DEVICE) for _ in range(count))
    for depth, of_depth in enumerate(labels):
        of_depth[..., 2 * depth : 2 * depth + 3] = -100
        of_depth[..., of_depth.shape[-1] - depth :] = -100
    return hidden, labels


def expected_loss(head: Any, hidden: tuple[Tensor, ...], labels: tuple[Tensor, ...], counts: list[Any]) -> Tensor:
    """Torch's cross entropies of whole logits: the first depth's, and SCALE times the mean of the others', each over its count."""
    sums = [F.cross_entropy(head(h).float().flatten(0, -2), y.flatten(), reduction="sum") for h, y in zip(hidden, labels, strict=True)]
    weights = [1.0, *[SCALE / (len(sums) - 1)] * (len(sums) - 1)]
    return sum((w * each / n for w, each, n in zip(weights, sums, counts, strict=True)), torch.zeros((), device=DEVICE))


@pytest.mark.parametrize("tokens", [(12,), (2, 6)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("given", ["none", "number", "tensor", "each", "each by name"])
def test_loss_and_gradients_of_depths(tokens: tuple[int, ...], bias: bool, count: int, given: str) -> None:
    hidden, labels = depths(count, tokens)
    head = linear(bias=bias)
    numbers = [1] * count if given == "none" else [9] * count if given in ("number", "tensor") else [9, 7, 0][:count]
    expected = expected_loss(head, hidden, labels, [max(number, 1) for number in numbers])
    right = torch.autograd.grad(expected, [*hidden, *head.parameters()])
    counts = {
        "none": (None, None),
        "number": (9, None),
        "tensor": (torch.tensor(9, device=DEVICE), None),
        "each": (torch.tensor(numbers, device=DEVICE), None),
        "each by name": (None, torch.tensor(numbers, device=DEVICE)),
    }[given]
    loss = of_depths(head, num_chunks=5)
    with calls_of_flce() as calls:
        value, metrics = loss(hidden, labels, counts[0], global_loss_token_counts=counts[1], positions=labels[0])
    assert calls == [(count * 12, D)] and metrics == {} and value.dtype == torch.float32 and value.dim() == 0
    value.backward()
    torch.testing.assert_close(value.detach(), expected.detach(), rtol=1e-5, atol=1e-6)
    for got, gradient in zip([each.grad for each in (*hidden, *head.parameters())], right, strict=True):
        torch.testing.assert_close(got, gradient, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        seen, _ = loss(hidden, labels, counts[0], global_loss_token_counts=counts[1])
    assert not seen.requires_grad
    torch.testing.assert_close(seen, expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not hasattr(ChunkedLossWrapper, "_combine_chunk_metrics"), reason="another ChunkedLossWrapper")
def test_against_the_wrapper_of_this_torchtitan() -> None:
    """Its own, with its own MTPLoss, where that takes tuples."""
    if loss_of_depths().__module__ == titan_support.__name__:
        pytest.skip("this torchtitan's ChunkedLossWrapper takes one hidden state (0.3.0)")
    results = []
    for kind in (ChunkedLossWrapper, FusedLoss):
        hidden, labels = depths(3)
        head = linear()
        loss = kind.Config(num_chunks=4, loss_fn=loss_of_depths().Config(mtp_scale=SCALE)).build()
        loss.set_lm_head(head)
        value, _ = loss(tuple(each * 1.0 for each in hidden), labels, torch.tensor(9, device=DEVICE))
        value.backward()
        results.append([value.detach(), *(each.grad for each in hidden), head.weight.grad])
    for right, got in zip(*results, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


def test_options_are_for_every_depth() -> None:
    hidden, labels = depths(2)
    head = linear()
    value, _ = of_depths(head, z_loss=1e-3, softcap=20.0)(hidden, labels, 10)
    right = torch.zeros((), device=DEVICE)
    for weight, states, of_depth in zip((1.0, SCALE), hidden, labels, strict=True):
        logits = 20.0 * torch.tanh(head(states) / 20.0)
        row = F.cross_entropy(logits, of_depth, reduction="none") + 1e-3 * logits.logsumexp(-1) ** 2 * (of_depth != -100)
        right = right + weight * row.sum() / 10
    torch.testing.assert_close(value.detach(), right.detach(), rtol=1e-4, atol=1e-5)


def test_a_depth_that_is_frozen_and_a_loss_of_nothing() -> None:
    hidden, labels = depths(2)
    head = linear()
    expected = expected_loss(head, hidden, labels, [9, 9])
    (right,) = torch.autograd.grad(expected, head.weight)
    value, _ = of_depths(head)((hidden[0], hidden[1].detach()), labels, 9)
    value.backward()
    torch.testing.assert_close(head.weight.grad, right, rtol=1e-4, atol=1e-5)
    assert hidden[0].grad is not None and hidden[1].grad is None
    value, _ = of_depths(head)(hidden, tuple(torch.full_like(each, -100) for each in labels), torch.zeros(2, device=DEVICE))
    value.backward()
    assert float(value.detach()) == 0


def test_one_count_by_its_new_name() -> None:
    (hidden, *_), (labels, *_) = depths(2, (2, 6))
    head = linear()
    right, _ = loss_of(head)(hidden, labels, 9)
    for count in (9, torch.tensor(9, device=DEVICE), torch.tensor([9], device=DEVICE)):
        value, _ = loss_of(head)(hidden, labels, global_loss_token_counts=count)
        torch.testing.assert_close(value.detach(), right.detach())


def test_configs() -> None:
    loss_fn = loss_of_depths().Config(mtp_scale=0.5, global_vocab_size=VOCAB)
    for given in (loss_fn, ChunkedLossWrapper.Config(num_chunks=4, loss_fn=loss_fn)):
        made = fused_loss(given, z_loss=1e-4)
        assert type(made) is FusedLoss.Config and made.loss_fn is loss_fn and made.z_loss == 1e-4
        assert made.build().loss_fn.mtp_scale == 0.5


def test_what_is_not_understood_is_refused() -> None:
    hidden, labels = depths(2)
    head = linear()

    def refused(message: str, *args: Any, kind: type[Exception] = ValueError, loss: Any = None, **more: Any) -> None:
        with pytest.raises(kind, match=message):
            (loss or of_depths(head))(*args, **more)

    refused("pred is a tuple of 2 and loss_fn is CrossEntropyLoss", hidden, labels, loss=loss_of(head))
    refused("both are tensors, or both tuples", hidden, labels[0], kind=flce.DTypeError)
    refused("both are tensors, or both tuples", list(hidden), list(labels), kind=flce.DTypeError)
    refused("MTPLoss is called with one tensor of each", hidden[0], labels[0])
    refused("MTPLoss is called with 2 hidden states and 1 labels", hidden, labels[:1])
    refused("MTPLoss is called with 1 hidden states", hidden[:1], labels[:1])
    refused(r"labels\[1\] has shape \[10\] and pred\[1\] \[12, 32\]", hidden, (labels[0], labels[1][:10]), kind=flce.ShapeError)
    refused(r"hidden\[1\] has dtype torch.bfloat16", (hidden[0], hidden[1].bfloat16()), labels, kind=flce.DTypeError)
    refused(r"token counts have shape \[3\] and there are 2 depths", hidden, labels, torch.ones(3), kind=flce.ShapeError)
    refused("is one number and there are 2 depths", hidden, labels, global_loss_token_counts=torch.tensor(3), kind=flce.ShapeError)
    refused("both given", hidden, labels, 3, global_loss_token_counts=torch.ones(2))
    assert head.weight.grad is None


def test_a_loss_that_is_called_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer torchtitan's loss may take what changes its value; dropping that would be another loss."""

    def call(self: Any, pred: Any, labels: Any, global_valid_tokens: Any = None, *, depth_scales: Any = None, **loss_inputs: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(CrossEntropyLoss, "__call__", call)
    with pytest.raises(flce.ArgumentError, match="CrossEntropyLoss is called with depth_scales, which FusedLoss does not know"):
        FusedLoss.Config().build()


def test_the_loss_of_logits_is_refused() -> None:
    """0.3.0's MTPLoss, which shifts labels itself."""
    from torchtitan.models.deepseek_v3.mtp import MTPLoss

    if issubclass(MTPLoss, CrossEntropyLoss):
        pytest.skip("this torchtitan's takes tuples")
    with pytest.raises(flce.ArgumentError, match=r"loss is a MTPLoss\.Config; fused_loss replaces"):
        fused_loss(MTPLoss.Config())
    with pytest.raises(flce.ArgumentError, match=r"loss_fn is a MTPLoss\.Config"):
        FusedLoss.Config(loss_fn=MTPLoss.Config()).build()
