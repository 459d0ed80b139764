"""fp8=flce.Fp8("e4m3") with a frozen weight that is e4m3 already: its codes are multiplied as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp8_support import error, truth_of
from test_fp8 import BOUND, CLASSES, CUT_OFF_GRADIENT, CUT_OFF_LOSS, HIDDEN, has_fp8, tensors
from test_quantized import retained
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flce
from flce import errors

__all__ = ["has_fp8", "retained"]  # fixtures; the first skips GPUs without such kernels


def bounds(hidden: Tensor) -> tuple[float, float]:
    """Errors that values and gradients may have."""
    on_cpu = hidden.device.type == "cpu"
    return (1e-5, BOUND[hidden.dtype]) if on_cpu else (CUT_OFF_LOSS, BOUND[hidden.dtype] + CUT_OFF_GRADIENT)


def codes_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 with scales of rows that are not those of the rows' largest numbers, some of them negative."""
    generator = torch.Generator().manual_seed(3)
    scale = (weight.detach().float().abs().amax(-1).cpu() / 448 * (1 + torch.rand(len(weight), generator=generator))).to(weight.device)
    scale[::7] *= -1
    return (weight.detach() / scale[:, None]).to(torch.float8_e4m3fn), scale


OF_CODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "numbers": {"softcap": 5.0, "logit_scale": 0.5, "temperature": 1.5, "z_loss": 1e-2},
    "smoothed": {"label_smoothing": 0.1},
}


@pytest.mark.parametrize("dlogits", ["e5m2", "e4m3"])
@pytest.mark.parametrize("options", list(OF_CODES))
def test_frozen_codes_are_multiplied_as_they_are(options: str, dlogits: str, device: str) -> None:
    fp8 = flce.Fp8("e4m3", dlogits)
    hidden, weight, target = tensors(device)
    codes, scale = codes_of(weight)
    bias = (torch.randn(CLASSES, device=device) / 8).to(hidden.dtype).requires_grad_()
    expected = truth_of(hidden, codes, target, fp8, bias=bias, weight_scale=scale, **OF_CODES[options])
    given = {"weight_scale": scale, "bias": bias, "fp8": fp8, **OF_CODES[options]}
    loss = flce.linear_cross_entropy(hidden, codes, target, **given)
    value, gradient = bounds(hidden)
    assert error(loss, expected.loss) < value
    loss.backward()
    assert hidden.grad is not None and bias.grad is not None
    assert error(hidden.grad, expected.grad_hidden) < gradient
    assert error(bias.grad, expected.grad_bias) < gradient
    assert torch.equal(flce.linear_cross_entropy(hidden, codes, target, **{**given, "weight_scale": scale[:, None]}), loss)


def test_frozen_codes_with_one_scale_in_every_place_that_reads_them(device: str) -> None:
    fp8 = flce.Fp8("e4m3")
    hidden, weight, target = tensors(device)
    codes, scale = (weight.detach() * 200).to(torch.float8_e4m3fn), torch.tensor(1 / 200, device=device)
    expected = truth_of(hidden, codes, target, fp8, weight_scale=scale.expand(CLASSES))
    loss = flce.linear_cross_entropy(hidden, codes, target, weight_scale=scale, fp8=fp8)
    value, bound = bounds(hidden)
    assert error(loss, expected.loss) < value
    logprobs = flce.linear_logprobs(hidden, codes, target, weight_scale=scale, fp8=fp8)
    assert error(logprobs, expected.logprobs) < value
    compiled = torch.compile(lambda *given: flce.linear_cross_entropy(*given, weight_scale=scale, fp8=fp8), fullgraph=True)
    assert torch.equal(compiled(hidden, codes, target), loss)
    (gradient,) = torch.autograd.grad(checkpoint(compiled, hidden, codes, target, use_reentrant=False), hidden)
    assert error(gradient, expected.grad_hidden) < bound


@pytest.mark.parametrize("given", [0.01, 0.003])  # the second has most rows' largest numbers beyond 448 codes
def test_one_given_scale_of_hidden_beside_codes(given: float, device: str) -> None:
    fp8 = flce.Fp8("e4m3", scales=(given, None))
    hidden, weight, target = tensors(device)
    codes, scale = codes_of(weight)
    expected = truth_of(hidden, codes, target, fp8, weight_scale=scale)
    call = torch.compile(lambda *of: flce.linear_cross_entropy(*of, weight_scale=scale, fp8=fp8), fullgraph=True)
    loss = flce.linear_cross_entropy(hidden, codes, target, weight_scale=scale, fp8=fp8)
    value, gradient = bounds(hidden)
    assert error(loss, expected.loss) < value and torch.equal(call(hidden, codes, target), loss)
    (grad_hidden,) = torch.autograd.grad(loss, hidden)
    assert error(grad_hidden, expected.grad_hidden) < gradient
    kernel = flce.get_kernel(HIDDEN, CLASSES, fp8=fp8, weight_dtype=torch.float8_e4m3fn, device=device, num_tokens=len(target))
    assert f"fp8=e4m3,fp8_hidden_scale={given}" in kernel.explain() and "fp8_weight_scale" not in kernel.explain()


def hidden_codes() -> Tensor:
    """[TOKENS, 256]: every finite code in every row."""
    finite = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite[127] = finite[255] = 0.0
    generator = torch.Generator().manual_seed(6)
    return torch.stack([finite.view(torch.uint8)[torch.randperm(256, generator=generator)] for _ in range(90)]).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("scales", ["one", "of rows"])
def test_codes_of_hidden_are_found_again(scales: str, device: str) -> None:
    """A class reads one number of a row alone, so that a log-probability shows each code."""
    codes, one_hot = hidden_codes(), torch.eye(256).to(torch.float8_e4m3fn)
    scale = torch.tensor(0.0173) if scales == "one" else torch.rand(len(codes), 1, generator=torch.Generator().manual_seed(7)) / 25 + 1e-3
    hidden = (codes.float() * scale).to(torch.bfloat16)
    fp8 = flce.Fp8("e4m3", scales=(scale.item(), None) if scales == "one" else "dynamic")
    found = scale.double() if scales == "one" else (hidden.abs().amax(-1, keepdim=True).float() / 448).double()
    assert ((found - scale) / scale).abs().max() <= 2**-8
    logits = codes.double() * found
    for first in range(0, 256, 64):
        target = (torch.arange(len(codes)) * 7 + first) % 256
        logprobs = flce.linear_logprobs(
            hidden.to(device), one_hot.to(device), target.to(device), weight_scale=torch.ones(256, device=device), fp8=fp8
        )
        expected = torch.log_softmax(logits, -1).gather(-1, target[:, None])[:, 0]
        torch.testing.assert_close(logprobs.cpu().double(), expected, rtol=0, atol=4e-6 if device == "cpu" else CUT_OFF_LOSS)


def test_hidden_of_codes_says_what_to_give(device: str) -> None:
    hidden, weight, target = tensors(device)
    codes, scale = codes_of(weight)
    narrow = hidden.detach().to(torch.float8_e4m3fn)
    for given in ({"weight_scale": scale, "fp8": flce.Fp8("e4m3")}, {"weight_scale": scale}, {}):
        of_weight = codes if given else weight.detach()
        with pytest.raises(
            errors.DTypeError, match=r"hidden has dtype torch\.float8_e4m3fn.*hidden\.float\(\) \* s\)\.to\(torch\.bfloat16"
        ):
            flce.linear_cross_entropy(narrow, of_weight, target, **given)


@pytest.mark.parametrize("dlogits", ["e5m2", "e4m3"])
def test_a_limit_with_room_spares_backward_logits(dlogits: str, retained: list[int], device: str) -> None:
    fp8 = flce.Fp8("e4m3", dlogits)
    torch.manual_seed(6)
    hidden = torch.randn(90, 512).to(device, torch.bfloat16).requires_grad_()
    codes, scale = codes_of((torch.randn(8000, 512) / 16).to(device))  # a GPU's plans retain nothing of smaller ones
    target = torch.randint(0, 8000, (90,), device=device)
    expected = truth_of(hidden, codes, target, fp8, weight_scale=scale)
    loss = flce.linear_cross_entropy(hidden, codes, target, weight_scale=scale, fp8=fp8, workspace_limit_bytes=1 << 30)
    assert [size > 0 for size in retained] == [device == "cpu" or dlogits == "e5m2"], "a GPU retains no exponentials in e4m3"
    value, gradient = bounds(hidden)
    assert error(loss, expected.loss) < value
    for _ in range(2):  # retained exponentials stay
        (made,) = torch.autograd.grad(loss, hidden, retain_graph=True)
        assert error(made, expected.grad_hidden) < gradient


def test_other_codes_are_refused(device: str) -> None:
    hidden, weight, target = tensors(device)
    codes, scale = weight.detach().to(torch.float8_e4m3fn), torch.ones(CLASSES, device=device)
    with pytest.raises(errors.SpecError, match=r"fp8 = int8.*e4m3 where weight_dtype is e4m3.*flce.Fp8\('e4m3'\)"):
        flce.linear_cross_entropy(hidden, codes, target, weight_scale=scale, fp8=flce.Fp8())
    with pytest.raises(errors.SpecError, match=r"fp8_weight_scale = .*whose scales are given"):
        flce.linear_cross_entropy(hidden, codes, target, weight_scale=scale, fp8=flce.Fp8("e4m3", scales=(0.1, 0.1)))
    with pytest.raises(errors.SpecError, match=r"fp8_weight_scale = \(none\).*Hidden's alone is for weight_dtype=e4m3"):
        flce.linear_cross_entropy(hidden, weight, target, fp8=flce.Fp8("e4m3", scales=(0.1, None)))
    with pytest.raises(errors.ArgumentError, match=r"scales is \(None, 0.1\).*\(hidden, None\) beside a weight of codes"):
        flce.Fp8("e4m3", scales=(None, 0.1))  # type: ignore[arg-type]
    blocks = torch.ones(-(-CLASSES // 128), 1, device=device)
    with pytest.raises(errors.SpecError, match=r"weight_block = 128.*leave fp8 out"):
        flce.linear_cross_entropy(hidden, codes, target, weight_scale=blocks, fp8=flce.Fp8("e4m3"))
    pairs, groups = torch.zeros(CLASSES, HIDDEN // 2, dtype=torch.uint8, device=device), scale[:, None].expand(-1, HIDDEN // 16)
    with pytest.raises(errors.SpecError, match=r"weight_dtype = nvfp4.*leave fp8 out"):
        flce.linear_cross_entropy(hidden, pairs, target, weight_scale=groups.to(torch.float8_e4m3fn), fp8=flce.Fp8("e4m3"))
