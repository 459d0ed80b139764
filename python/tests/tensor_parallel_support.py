"""Things that ranks over shards share: a layer that is whole on every rank, and its part of it; comparisons."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rank_support import generator
from torch import Tensor

VOCAB, HIDDEN, TOKENS = 203, 64, 48


class Layer:
    """A whole layer and its tokens, the same on every rank, and this rank's part."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, seed: int = 0, even: int = 0, tokens: int = TOKENS) -> None:
        """`even`: the number of classes, divided evenly among ranks; 0: VOCAB classes in unlike parts."""
        make = generator(seed)
        ranks, rank = dist.get_world_size(), dist.get_rank()
        self.hidden = torch.randn(tokens, HIDDEN, generator=make).to(dtype)
        vocab = even or VOCAB
        self.weight = (0.3 * torch.randn(vocab, HIDDEN, generator=make)).to(dtype)
        self.bias = torch.randn(vocab, generator=make).to(dtype)
        self.class_weight = torch.rand(vocab, generator=make) + 0.5
        self.target = torch.randint(0, vocab, (tokens,), generator=make)
        self.target[3::7] = -100
        self.temperature = torch.rand(tokens, generator=make) + 0.5
        self.token_weight = torch.rand(tokens, generator=make)
        self.teacher_ids = torch.randint(0, vocab, (tokens, 4), generator=make)
        self.teacher_ids[::5, 1] = -1
        self.teacher_probs = torch.rand(tokens, 4, generator=make)
        cuts = [vocab * i // ranks for i in range(1, ranks)] if even else [60, 61, 150, 151, 160, 170, 190][: ranks - 1]
        self.begin, self.end = [0, *cuts, vocab][rank : rank + 2]
        self.group = dist.group.WORLD

    def mine(self, whole: Tensor) -> Tensor:
        return whole[self.begin : self.end].clone()

    def my_tokens(self, whole: Tensor) -> Tensor:
        return whole.chunk(dist.get_world_size())[dist.get_rank()].clone()


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


def same_on_every_rank(*tensors: Tensor) -> None:
    for tensor in tensors:
        bits = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
        everyone = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, bits)
        assert all(torch.equal(one, bits) for one in everyone), "outputs are not the same bits on every rank"


def close(got: Tensor | None, right: Tensor | None, dtype: torch.dtype = torch.float32) -> None:
    """Compares in the Euclidean norm, within the rounding of gradients in `dtype` and of the rest in fp32."""
    assert got is not None and right is not None and got.shape == right.shape
    error, size = float((got.detach().double() - right.detach().double()).norm()), float(right.detach().double().norm())
    assert error <= (2e-5 if dtype is torch.float32 else 1e-2) * size, f"off by {error / max(size, 1e-300):.2e}"


def backward_of(outputs: Any, names: tuple[str, ...]) -> None:
    """Runs backward from a sum of everything that is differentiable."""
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    total = sum(((i + 1.0) * part.sum() for i, part in enumerate(parts) if part.requires_grad), torch.zeros(()))
    assert isinstance(total, Tensor), names
    total.backward()
