"""Helpers for the tests of flce.compat: problems, formulas in fp64 with the logits written out, and the comparison of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from support import assert_close
from torch import Tensor, nn

from flce.compat import cce, liger, quack, torchtune, verl
from flce.compat import torch as of_torch

DTYPES = [torch.float32, torch.bfloat16]


@dataclass
class Layer:
    """The tensors of a call; leaves but for target."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None

    def leaves(self) -> list[Tensor]:
        return [tensor for tensor in (self.hidden, self.weight, self.bias) if tensor is not None]

    def in_double(self) -> Layer:
        hidden, weight, bias = (
            None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in (self.hidden, self.weight, self.bias)
        )
        assert hidden is not None and weight is not None
        return Layer(hidden, weight, self.target, bias)

    def logits(self, softcap: float | None = None, temperature: float = 1.0) -> Tensor:
        """fp64, of leaves that are."""
        logits = F.linear(self.hidden, self.weight, self.bias)
        return (softcap * torch.tanh(logits / softcap) if softcap else logits) / temperature


def make_layer(
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    shape: Sequence[int] = (33,),
    hidden_size: int = 41,
    vocab_size: int = 63,
    ignore_index: int | None = -100,
    bias: bool = False,
) -> Layer:
    generator = torch.Generator().manual_seed(11)

    def normal(*sizes: int, scale: float) -> Tensor:
        return (torch.randn(*sizes, generator=generator, device="cpu") * scale).to(device=device, dtype=dtype).requires_grad_()

    hidden, weight = normal(*shape, hidden_size, scale=1.0), normal(vocab_size, hidden_size, scale=1.5 / hidden_size**0.5)
    target = torch.randint(0, vocab_size, tuple(shape), generator=generator, device="cpu")
    if ignore_index is not None:
        target[torch.rand(*shape, generator=generator, device="cpu") < 0.3] = ignore_index
    return Layer(hidden, weight, target.to(device), normal(vocab_size, scale=0.5) if bias else None)


def check_gradients(actual: Sequence[Tensor], expected: Sequence[Tensor], layer: Layer, exact: Layer, *, factor: float = 1.0) -> None:
    """Gradients of every leaf, from upstream gradients that differ from output to output and row to row."""
    generator = torch.Generator().manual_seed(5)
    upstream = [torch.randn(value.shape, generator=generator, device="cpu") for value in actual]
    leaves, right_leaves = layer.leaves(), exact.leaves()
    gradients = torch.autograd.grad(actual, leaves, [g.to(v.device, v.dtype) for g, v in zip(upstream, actual, strict=True)])
    # Gradients as they reached the adapter, so that their rounding is no error of the adapter's.
    right_upstream = [g.to(v.device, v.dtype).double() for g, v in zip(upstream, actual, strict=True)]
    right = torch.autograd.grad(expected, right_leaves, right_upstream)
    for leaf, gradient, wanted in zip(leaves, gradients, right, strict=True):
        assert gradient.dtype == leaf.dtype
        assert_close(gradient, wanted, leaf.dtype, f"gradient of a leaf of shape {tuple(leaf.shape)}", factor=factor)


class HeadModel(nn.Module):
    """A model as torchtune's: the output layer is its `output`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.output = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        self.output.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight.detach(), weight.requires_grad)
        if bias is not None:
            self.output.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias.detach(), bias.requires_grad)


def _torchtune(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> Tensor:
    """Loss of torchtune's class with a head of the caller's tensors, leaves or not."""
    loss, head = torchtune.LinearCrossEntropyLoss(), nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    model = nn.Module()
    model.output = head
    del head.weight, head.bias
    head.weight, head.bias = weight, bias
    loss.set_model_output(model)
    return loss(hidden, target)


def _verl(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> Tensor:
    logprobs, entropy = verl.linear_cross_entropy(hidden, weight, target)
    return 0.25 * entropy.mean() - logprobs.mean()


def _cross_entropy(layer: Layer) -> Tensor:
    return F.cross_entropy(layer.logits().flatten(0, -2), layer.target.flatten())


def _with_entropy(layer: Layer) -> Tensor:
    logprobs = layer.logits().flatten(0, -2).log_softmax(-1)
    return _cross_entropy(layer) - 0.25 * (logprobs.exp() * logprobs).sum(-1).mean()


@dataclass(frozen=True)
class Adapter:
    """One stand-in as a scalar of a layer."""

    name: str
    call: Callable[..., Tensor]  # (hidden, weight, target, bias)
    takes_bias: bool = True
    ignores: bool = True  # rows of ignore_index
    expected: Callable[[Layer], Tensor] = _cross_entropy
    own_dtype: bool = False  # the loss has the input's

    def layer(self, device: str = "cpu", dtype: torch.dtype = torch.float32, **options: Any) -> Layer:
        return make_layer(device, dtype, bias=self.takes_bias, ignore_index=-100 if self.ignores else None, **options)

    def loss(self, layer: Layer) -> Tensor:
        return self.call(layer.hidden, layer.weight, layer.target, layer.bias)


ADAPTERS = [
    Adapter("liger", lambda h, w, t, b: liger.liger_fused_linear_cross_entropy(h, w, t, b)),
    Adapter("cce", lambda h, w, t, b: cce.linear_cross_entropy(h, w, t, b)),
    Adapter("verl", _verl, takes_bias=False, ignores=False, expected=_with_entropy),
    Adapter("torchtune", _torchtune),
    Adapter("torch", lambda h, w, t, b: of_torch.linear_cross_entropy(h, w, t, linear_bias=b), own_dtype=True),
    Adapter("quack", lambda h, w, t, b: quack.chunked_linear_cross_entropy(h, w, t), takes_bias=False),
]
