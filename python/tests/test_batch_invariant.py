"""batch_invariant: a token's bits are the same in whichever batch it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flce
from flce import errors

TOKENS = 4096
HIDDEN, VOCAB = 40, 2311


@pytest.fixture
def device_and_dtype(device: str) -> tuple[str, torch.dtype]:
    if device == "cpu":
        return device, torch.float32
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("batch_invariant needs a Hopper GPU")
    return device, torch.bfloat16


class Pool:
    """Tokens that batches are made of, and what they come to all together."""

    def __init__(self, device: str, dtype: torch.dtype, hidden_size: int = HIDDEN, vocab_size: int = VOCAB) -> None:
        generator = torch.Generator().manual_seed(7)
        self.hidden = torch.randn(TOKENS, hidden_size, generator=generator).to(device, dtype)
        self.weight = (torch.randn(vocab_size, hidden_size, generator=generator) * 0.5).to(device, dtype)
        self.target = torch.randint(0, vocab_size, (TOKENS,), generator=generator).to(device)
        self.temperature = (torch.rand(TOKENS, generator=generator) + 0.5).to(device)
        self.gradient = torch.randn(TOKENS, generator=generator).to(device)
        self.everything = self.outputs(self.hidden, self.target, self.temperature)

    def outputs(self, hidden: Tensor, target: Tensor, temperature: Tensor, **options: Any) -> tuple[Tensor, ...]:
        wanted = {"return_entropy": True, "return_top1": True, "return_log_sum_sq_probs": True}
        result: tuple[Tensor, ...] = flce.linear_logprobs(
            hidden, self.weight, target, temperature=temperature, batch_invariant=True, **wanted, **options
        )
        return result

    def grad_hidden(self, rows: Tensor, target: Tensor, **options: Any) -> Tensor:
        """Gradient of hidden, from losses with the rows' own gradients."""
        hidden = self.hidden[rows].detach().requires_grad_()
        losses = flce.linear_cross_entropy(hidden, self.weight, target, reduction="none", batch_invariant=True, **options)
        (gradient,) = torch.autograd.grad(losses, hidden, self.gradient[rows])
        return gradient


@pytest.fixture
def pool(device_and_dtype: tuple[str, torch.dtype]) -> Pool:
    return Pool(*device_and_dtype)


def same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_every_number_of_tokens(device_and_dtype: tuple[str, torch.dtype]) -> None:
    device, _ = device_and_dtype
    pool = Pool(*device_and_dtype, *((16, 211) if device == "cpu" else (HIDDEN, VOCAB)))
    for n in range(1, TOKENS + 1):
        first = (n * 977) % (TOKENS - n + 1)
        rows = slice(first, first + n)
        got = pool.outputs(pool.hidden[rows], pool.target[rows], pool.temperature[rows])
        assert same(got, tuple(all_of[rows] for all_of in pool.everything)), n


def test_shuffled(pool: Pool) -> None:
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1)).to(pool.hidden.device)
    got = pool.outputs(pool.hidden[order], pool.target[order], pool.temperature[order])
    assert same(got, tuple(all_of[order] for all_of in pool.everything))
    expected = pool.grad_hidden(torch.arange(TOKENS, device=order.device), pool.target)
    assert torch.equal(pool.grad_hidden(order, pool.target[order]), expected[order])


@pytest.mark.parametrize("length", [1, 100, 333])
def test_padded_and_packed(pool: Pool, length: int) -> None:
    device = pool.hidden.device
    lengths = [length, 7, 200, 64]
    padded = torch.full((4, 400), -100, device=device)
    rows = torch.zeros(4, 400, dtype=torch.int64, device=device)
    begin = 0
    for i, n in enumerate(lengths):
        rows[i, :n] = torch.arange(begin, begin + n, device=device)
        padded[i, :n] = pool.target[begin : begin + n]
        begin += n
    real = padded != -100
    expected = tuple(all_of[rows[real]] for all_of in pool.everything)
    got = pool.outputs(pool.hidden[rows], padded, pool.temperature[rows])
    assert same(tuple(value[real] for value in got), expected)
    packed = slice(0, begin)
    assert same(pool.outputs(pool.hidden[packed], pool.target[packed], pool.temperature[packed]), expected)
    whole = pool.grad_hidden(torch.arange(TOKENS, device=device), pool.target)
    of_padded = pool.grad_hidden(rows.flatten(), padded.flatten()).view(4, 400, -1)
    assert torch.equal(of_padded[real], whole[rows[real]])


@pytest.mark.parametrize("limit", [None, "smallest", 40 << 20])
def test_under_a_limit(pool: Pool, limit: Any) -> None:
    device = pool.hidden.device
    if limit == "smallest":
        with pytest.raises(errors.PlanError, match="batch_invariant") as too_small:
            pool.outputs(pool.hidden, pool.target, pool.temperature, workspace_limit_bytes=1 << 16)
        limit = int(str(too_small.value).rsplit(" ", 1)[1])
    for n in (5, 700, 3000):
        rows = slice(0, n)
        got = pool.outputs(pool.hidden[rows], pool.target[rows], pool.temperature[rows], workspace_limit_bytes=limit)
        assert same(got, tuple(all_of[rows] for all_of in pool.everything))
    whole = pool.grad_hidden(torch.arange(TOKENS, device=device), pool.target)
    some = torch.arange(1000, 1700, device=device)
    assert torch.equal(pool.grad_hidden(some, pool.target[some], workspace_limit_bytes=limit), whole[some])


def test_more_tokens_than_one_launch_has(pool: Pool) -> None:
    """Forward and backward go through blocks of rows."""
    device = pool.hidden.device
    rows = torch.arange(70_001, device=device) % TOKENS
    got = pool.outputs(pool.hidden[rows], pool.target[rows], pool.temperature[rows])
    assert same(got, tuple(all_of[rows] for all_of in pool.everything))
    whole = pool.grad_hidden(torch.arange(TOKENS, device=device), pool.target)
    for limit in (None, 4 * HIDDEN * len(rows) + (20 << 20)):
        assert torch.equal(pool.grad_hidden(rows, pool.target[rows], workspace_limit_bytes=limit), whole[rows])


def test_compiled_and_eager(pool: Pool) -> None:
    def losses(hidden: Tensor, target: Tensor) -> Tensor:
        result: Tensor = flce.linear_cross_entropy(hidden, pool.weight, target, reduction="none", batch_invariant=True)
        return result

    expected = losses(pool.hidden, pool.target)
    compiled = torch.compile(losses, fullgraph=True, dynamic=True)
    for n in (3, 500):
        assert torch.equal(compiled(pool.hidden[:n], pool.target[:n]), expected[:n])


def test_a_loss_has_it_with_flce_alone(device_and_dtype: tuple[str, torch.dtype]) -> None:
    device, dtype = device_and_dtype
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=False, device=device, dtype=dtype)
    hidden = torch.randn(2, 30, HIDDEN, device=device, dtype=dtype)
    labels = torch.randint(0, VOCAB, (2, 30), device=device)
    loss = flce.LinearCrossEntropyLoss(head, impl="flce", reduction="none", batch_invariant=True, shift=1)
    assert torch.equal(loss(hidden, labels)[1], loss(hidden[1:], labels[1:])[0])
    other = flce.LinearCrossEntropyLoss(head, impl="pytorch", batch_invariant=True, shift=1)
    with pytest.raises(errors.ArgumentError, match="batch_invariant needs impl 'flce'"):
        other(hidden, labels)
    with pytest.raises(errors.DTypeError, match="batch_invariant is 1"):
        flce.LinearCrossEntropyLoss(head, batch_invariant=1, shift=1)


def test_fp16_is_for_the_cpu(device: str) -> None:
    hidden, weight = torch.randn(8, 64, device=device).half(), torch.randn(100, 64, device=device).half()
    target = torch.zeros(8, dtype=torch.int64, device=device)
    if device == "cpu":
        whole = flce.linear_logprobs(hidden, weight, target, batch_invariant=True)
        assert torch.equal(flce.linear_logprobs(hidden[3:4], weight, target[3:4], batch_invariant=True), whole[3:4])
    else:
        with pytest.raises(errors.PlanError, match="batch_invariant with dtype=fp16"):
            flce.linear_logprobs(hidden, weight, target, batch_invariant=True)
