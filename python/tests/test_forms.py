"""Forms of logits that docs/python.md makes of softcap, logit_scale and bias, against their formulas in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

import flce

N, D, V = 41, 24, 101
A, B, C, SCALE = 23.0, 5.0, 7.5, 0.5
Form = Callable[[Tensor, Tensor], Tensor]  # logits of z = hidden · weightᵀ and a bias
FORMS: dict[str, tuple[Form, dict[str, Any]]] = {
    "sigmoid": (lambda z, _: A * torch.sigmoid((z + B) / C), {"softcap": A / 2, "logit_scale": A / (4 * C), "constant": B}),
    "scaled sigmoid": (
        lambda z, _: A * torch.sigmoid((SCALE * z + B) / C),
        {"softcap": A / 2, "logit_scale": SCALE * A / (4 * C), "constant": B / SCALE},
    ),
    "offset": (lambda z, bias: z + bias, {}),
    "scaled offset": (lambda z, bias: SCALE * z + SCALE * bias, {"logit_scale": SCALE}),
    "left out": (lambda z, bias: z + bias, {"left_out": True}),
}


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_is_its_formula(device: str, form: str, dtype: torch.dtype, retain: bool) -> None:
    formula, given = FORMS[form]
    options = dict(given)
    generator = torch.Generator().manual_seed(2)
    hidden, weight, bias = (torch.randn(shape, generator=generator).to(device, dtype) for shape in ((N, D), (V, D), (V,)))
    target = torch.randint(0, V, (N,), generator=generator).to(device)
    target[::4] = -100
    constant, left_out = options.pop("constant", None), options.pop("left_out", False)
    if constant is not None:
        bias = torch.full_like(bias, constant)
    if left_out:
        bias[::3] = -math.inf
        target = torch.where(target % 3 == 0, target + 1, target).clamp(max=V - 1)
    inputs = [tensor.requires_grad_() for tensor in (hidden, weight, bias)][: 2 if constant is not None else 3]
    if constant is not None:
        bias.requires_grad_(False)
    loss, entropy = flce.linear_cross_entropy(
        hidden, weight, target, bias=bias, return_entropy=True, retain_in_grad_weight=retain, **options
    )
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    logits = formula(exact[0] @ exact[1].T, exact[2] if len(exact) > 2 else bias.double())
    right = F.cross_entropy(logits, target)
    torch.testing.assert_close(loss.double(), right, rtol=1e-6, atol=1e-6)
    probs = logits.detach().softmax(1)
    torch.testing.assert_close(entropy.double(), torch.where(target >= 0, torch.special.entr(probs).sum(1), 0), rtol=1e-5, atol=1e-5)
    tolerance = 1e-6 if dtype == torch.float32 else 8e-3
    for got, expected in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(right, exact), strict=True):
        assert (got.double() - expected).abs().max() <= tolerance * max(expected.abs().max().item(), 1e-2)


def test_a_label_that_is_left_out_has_an_infinite_loss(device: str) -> None:
    hidden, weight, bias = (torch.randn(shape, device=device) for shape in ((N, D), (V, D), (V,)))
    bias[7] = -math.inf
    target = torch.full((N,), 3, device=device)
    target[5] = 7
    losses = flce.linear_cross_entropy(hidden, weight, target, bias=bias, reduction="none")
    assert losses[5] == math.inf and losses.isfinite().sum() == N - 1


@pytest.mark.parametrize("function", ["linear_cross_entropy", "linear_logprobs_at", "support"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_classes_that_are_left_out_take_no_share_of_an_entropys_gradient(device: str, dtype: torch.dtype, function: str) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in ((N, D), (V, D)))
    ids = torch.randint(0, 40, (N, 5), generator=generator).to(device)
    offsets = torch.zeros(V, device=device)
    offsets[30:] = -math.inf

    def gradients(upstream: float) -> tuple[Tensor, ...]:
        options: dict[str, Any] = {"class_offset": offsets, "return_entropy": True}
        if function == "linear_cross_entropy":
            entropy = flce.linear_cross_entropy(hidden, weight, ids[:, 0] % 30, **options)[1]
        else:
            ids[:, 0] %= 30
            options["normalize"] = "support" if function == "support" else "vocabulary"
            entropy = flce.linear_logprobs_at(hidden, weight, ids, **options)[1]
        return torch.autograd.grad(entropy.sum() * upstream, (hidden, weight))

    for small, large in zip(gradients(1.0), gradients(2.0**40), strict=True):
        assert small.any()
        torch.testing.assert_close(large.double(), small.double() * 2.0**40, rtol=0.02, atol=2.0**40 * 1e-5)


@pytest.mark.parametrize("classes", [96, 101])
def test_smoothing_over_a_last_class_that_is_left_out_is_infinite(device: str, classes: int) -> None:
    hidden, weight = (torch.randn(shape, device=device) for shape in ((N, D), (classes, D)))
    offsets = torch.zeros(classes, device=device)
    offsets[-1] = -math.inf
    loss = flce.linear_cross_entropy(
        hidden, weight, torch.zeros(N, dtype=torch.int64, device=device), class_offset=offsets, label_smoothing=0.1
    )
    assert loss == math.inf


@pytest.mark.parametrize("name", ["class_weight", "class_offset", "token_weight"])
def test_tangents_of_numbers_without_a_gradient_are_refused(device: str, name: str) -> None:
    hidden, weight = (torch.randn(shape, device=device) for shape in ((N, D), (V, D)))
    numbers = torch.ones(N if name == "token_weight" else V, device=device)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(numbers, torch.ones_like(numbers))
        with pytest.raises(flce.UnsupportedTransformError, match=f"{name} has a forward-mode tangent"):
            flce.linear_cross_entropy(hidden, weight, torch.zeros(N, dtype=torch.int64, device=device), **{name: dual})
