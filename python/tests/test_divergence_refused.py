"""Arguments that flce.linear_divergence refuses, and transformations of torch that it does not go through."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_divergence import N, V, heads
from torch.autograd import forward_ad

import flce


def test_transforms_of_torch_func_are_refused() -> None:
    hidden, *rest = heads("cpu", torch.float32)
    with pytest.raises(flce.UnsupportedTransformError):
        torch.func.grad(lambda h: flce.linear_divergence(h, *rest, beta=0.0, reduction="sum"))(hidden)
    with pytest.raises(flce.UnsupportedTransformError):
        torch.vmap(lambda h: flce.linear_divergence(h, *rest, beta=0.0))(hidden[None])


@pytest.mark.parametrize("name", ["student_bias", "teacher_bias", "temperature"])
def test_tangents_are_refused(name: str) -> None:
    inputs = [each.detach() for each in heads("cpu", torch.float32)]
    like = torch.ones(N if name == "temperature" else V)
    with forward_ad.dual_level(), pytest.raises(flce.UnsupportedTransformError, match=name):
        flce.linear_divergence(*inputs, beta=0.3, **{name: forward_ad.make_dual(like, like)})


def test_second_derivatives_are_refused() -> None:
    inputs = heads("cpu", torch.float32)
    made = flce.linear_divergence(*inputs, beta=0.0, reduction="sum")
    (gradient,) = torch.autograd.grad(made, inputs[0], create_graph=True)
    with pytest.raises(flce.UnsupportedTransformError, match="second derivatives"):
        gradient.sum().backward()


def test_refusals() -> None:
    hidden, weight, teacher_hidden, teacher_weight = heads("cpu", torch.float32)

    def call(*places: Any, **given: Any) -> Any:
        return flce.linear_divergence(*places, **{"beta": 0.0, **given})

    every = (hidden, weight, teacher_hidden, teacher_weight)
    trained = teacher_hidden.clone().requires_grad_()
    for error, text, places, given in (
        (flce.ArgumentError, "beta is 1.5; it must be from 0 to 1", every, {"beta": 1.5}),
        *((flce.ArgumentError, "from 2.-10 to 1 - 2.-10", every, {"beta": beta}) for beta in (1e-8, 0.9999)),
        *((flce.DTypeError, "is None; it must be a tensor", (*every[:place], None, *every[place + 1 :]), {}) for place in range(4)),
        (flce.ShapeError, "at least 2 classes", (hidden, weight[:1], teacher_hidden, teacher_weight[:1]), {}),
        (flce.ShapeError, "at least 2 classes", (hidden[:, :0], weight[:, :0], teacher_hidden, teacher_weight), {}),
        (flce.ArgumentError, r"class that is not in \[0, 1000\)", every, {"teacher_ids_map": torch.arange(1, V + 1)}),
        (flce.PlacementError, "teacher_ids_map is on meta", every, {"teacher_ids_map": torch.arange(V, device="meta")}),
        (flce.ShapeError, r"teacher_bias has shape \[900\]", every, {"teacher_ids_map": torch.arange(V), "teacher_bias": torch.ones(900)}),
        (flce.DTypeError, "teacher_bias is a list", every, {"teacher_ids_map": torch.arange(V), "teacher_bias": [1.0]}),
        (flce.DTypeError, "beta is a Tensor", every, {"beta": torch.tensor(0.5)}),
        (flce.ShapeError, "900 classes and student_weight 1000", (*every[:3], teacher_weight[:900]), {}),
        (flce.ShapeError, "teacher_hidden has shape", (hidden, weight, teacher_hidden[:5], teacher_weight), {}),
        (flce.DTypeError, "teacher_weight has dtype torch.bfloat16", (*every[:3], teacher_weight.bfloat16()), {}),
        (flce.ArgumentError, "teacher_hidden requires a gradient", (hidden, weight, trained, teacher_weight), {}),
        (flce.ArgumentError, "lie in memory in different ways", (*every[:3], teacher_weight.t().contiguous().t()), {}),
        (flce.DTypeError, "mask has dtype torch.int64", every, {"mask": torch.ones(N, dtype=torch.int64)}),
        (flce.ShapeError, "token_weight has shape", every, {"token_weight": torch.ones(N + 1)}),
        (flce.ArgumentError, "temperature is 0", every, {"temperature": 0}),
        (flce.ArgumentError, "temperature requires a gradient", every, {"temperature": torch.ones(N, requires_grad=True)}),
        (flce.ArgumentError, "reduction is 'batchmean'", every, {"reduction": "batchmean"}),
        (flce.ArgumentError, "^retain_in_grad_weight is 1; allowed are True, False and None", every, {"retain_in_grad_weight": 1}),
        (flce.ShapeError, "teacher_ids_map has shape", every, {"teacher_ids_map": torch.arange(5)}),
        (flce.ShapeError, "student_bias has shape", every, {"student_bias": torch.ones(5)}),
        (flce.SpecError, "teacher_softcap", every, {"teacher_softcap": -1.0}),
        (flce.SpecError, "^student_softcap is -1.0", every, {"student_softcap": -1.0}),
        (flce.SpecError, "^student_logit_scale is 0", every, {"student_logit_scale": 0}),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            call(*places, **given)
