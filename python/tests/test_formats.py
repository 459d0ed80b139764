"""Quantised weights of other libraries, by stand-ins that have a class' module, name and attributes; test_quantisers.py has the libraries
themselves. Tensors that keep their numbers in a way of their own."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_quantized import CLASSES, HIDDEN, check, hidden_of, quantized
from torch import Tensor, nn

import flce
from flce.call import _formats

E4M3 = torch.float8_e4m3fn


class Wrapped(torch.Tensor):
    """A wrapper subclass without operators, as many libraries have them."""

    @staticmethod
    def __new__(cls, shape: Any, **attributes: Any) -> Wrapped:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16, requires_grad=False)  # type: ignore[attr-defined]
        for name, value in attributes.items():
            setattr(made, name, value)
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:  # nn.Parameter asks for it
            return cls(args[0].shape, **vars(args[0]))
        raise NotImplementedError(f"{func} of a {cls.__name__}")


def named(module: str, name: str) -> type[Wrapped]:
    return type(name, (Wrapped,), {"__module__": module})


def float8(**changes: Any) -> Wrapped:
    """torchao's Float8Tensor with scales of rows."""
    given, _ = quantized("column", "cpu")
    attributes = {
        "qdata": given["weight"],
        "scale": given["weight_scale"],
        "block_size": [1, HIDDEN],
        "act_quant_kwargs": None,
    } | changes
    kept = {name: value for name, value in attributes.items() if value is not ...}
    return named("torchao.quantization", "Float8Tensor")([CLASSES, HIDDEN], **kept)


def by_rows(*, granularity: str = "PerRow", dim: int = -1, **changes: Any) -> Any:
    """torchao's QuantizeTensorToFloat8Kwargs."""
    kwargs: Any = type("QuantizeTensorToFloat8Kwargs", (), {"__module__": "torchao.quantization"})()
    kwargs.granularity = type(granularity, (), {"dim": dim})()
    vars(kwargs).update({"float8_dtype": E4M3, "hp_value_lb": None, "hp_value_ub": None} | changes)
    return kwargs


def inputs(**changes: Any) -> Any:
    """Rounded hidden states in a scheme of compressed-tensors: by rows, as they come."""
    of_rows = {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True, "scale_dtype": None}
    return types.SimpleNamespace(**(of_rows | changes))


def static(scale: Tensor | None = None, form: str = "column", **more: Any) -> nn.Linear:
    given = torch.tensor([0.02]) if scale is None else scale
    return compressed(form, layer_input_activations=inputs(strategy="tensor", dynamic=False), layer_input_scale=given, **more)


def nvfp4(**changes: Any) -> Wrapped:
    given, _ = quantized("nvfp4", "cpu")
    attributes = {
        "qdata": given["weight"],
        "scale": given["weight_scale"],
        "block_size": 16,
        "per_tensor_scale": given["weight_tensor_scale"],
        "is_swizzled_scales": False,
        "act_quant_kwargs": None,
    } | changes
    return named("torchao.prototype.mx_formats.nvfp4_tensor", "NVFP4Tensor")([CLASSES, HIDDEN], **attributes)


def swizzled(scale: Tensor) -> Tensor:
    """Scales as cuBLAS has them: in blocks of 128 x 4, row r of a block in row r % 32 of 16 bytes, at 4 * (r // 32)."""
    rows, groups = scale.shape
    across = -(-groups // 4)
    made = torch.zeros(-(-rows // 128) * across, 32, 16, dtype=torch.uint8)
    row, group = torch.arange(rows)[:, None], torch.arange(groups)[None]
    made[row // 128 * across + group // 4, row % 32, row % 128 // 32 * 4 + group % 4] = scale.view(torch.uint8)
    return made.view(E4M3).view(-(-rows // 128) * 32, across * 16)


def compressed(form: str, **changes: Any) -> nn.Linear:
    """A layer as compressed-tensors leaves it. `changes`: of the scheme's weights, of the layer where a name begins with layer_."""
    kinds = {"column": ("channel", 8), "blocks": ("block", 8), "nvfp4": ("tensor_group", 4)}
    strategy, bits = kinds[form]
    of_layer = {name.removeprefix("layer_"): changes.pop(name) for name in list(changes) if name.startswith("layer_")}
    weights = {"type": "float", "num_bits": bits, "strategy": strategy, "symmetric": True, "dynamic": False, "group_size": 16}
    weights |= {"block_structure": [128, 128]} | changes
    scheme: Any = type("QuantizationScheme", (), {"__module__": "compressed_tensors.quantization"})()
    scheme.weights, scheme.input_activations, scheme.output_activations = types.SimpleNamespace(**weights), None, None
    given, _ = quantized(form, "cpu")
    layer: Any = nn.Linear(HIDDEN, CLASSES, bias=False)
    del layer.weight
    named = {"weight" if form != "nvfp4" else "weight_packed": given["weight"], "weight_scale": given["weight_scale"]}
    if form == "nvfp4":
        named["weight_global_scale"] = 1 / given["weight_tensor_scale"].reshape(1)
    for name, tensor in named.items():
        layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    layer.quantization_scheme, layer.quantization_status = scheme, types.SimpleNamespace(value="compressed")
    for name, value in of_layer.items():
        if name.endswith("activations"):
            setattr(scheme, name, value)
        elif isinstance(value, Tensor):
            layer.register_parameter(name, nn.Parameter(value, requires_grad=False))
        else:
            setattr(layer, name, value)
    return layer  # type: ignore[no-any-return]


def linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(HIDDEN, CLASSES, bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


READ: dict[str, tuple[str, Callable[[], nn.Linear]]] = {
    "torchao rows": ("column", lambda: linear(float8())),
    "torchao whole": ("number", lambda: linear(float8(scale=quantized("number", "cpu")[0]["weight_scale"], block_size=[]))),
    "torchao blocks": ("blocks", lambda: linear(float8(scale=quantized("blocks", "cpu")[0]["weight_scale"], block_size=[128, 128]))),
    "torchao nvfp4": ("nvfp4", lambda: linear(nvfp4())),
    "torchao without a whole scale": ("nvfp4_alone", lambda: linear(nvfp4(per_tensor_scale=None))),
    "torchao swizzled": (
        "nvfp4",
        lambda: linear(nvfp4(scale=swizzled(quantized("nvfp4", "cpu")[0]["weight_scale"]), is_swizzled_scales=True)),
    ),
    "compressed channel": ("column", lambda: compressed("column")),
    "compressed block": ("blocks", lambda: compressed("blocks")),
    "compressed nvfp4": ("nvfp4", lambda: compressed("nvfp4")),
    "compressed inputs": ("column", lambda: compressed("column", layer_input_activations=0, layer_quantization_enabled=False)),
}


@pytest.mark.parametrize("kind", READ)
def test_a_quantised_layer_is_read_as_it_is(kind: str) -> None:
    form, make = READ[kind]
    head, (hidden, target) = make(), hidden_of(torch.bfloat16, "cpu")
    _, dense = quantized(form, "cpu")
    expected = flce.linear_cross_entropy(hidden, dense.to(hidden.dtype), target, shift=1)
    check(flce.LinearCrossEntropyLoss(head, shift=1)(hidden, target), expected, hidden, "cpu")
    fused = flce.FusedLMHead.from_linear(head, shift=1)
    check(fused(hidden, labels=target), flce.linear_cross_entropy(hidden, dense.to(hidden.dtype), target, shift=1), hidden, "cpu")
    logits = nn.functional.linear(hidden, dense.to(hidden.dtype))
    torch.testing.assert_close(fused(hidden), logits, rtol=2**-7, atol=2**-7 * float(logits.abs().max()))


@pytest.mark.parametrize("kind", [kind for kind, (form, _) in READ.items() if form in ("column", "number")])
def test_a_head_in_8_bits_multiplies_a_layers_codes(kind: str) -> None:
    form, make = READ[kind]
    head, (hidden, target), fp8 = make(), hidden_of(torch.bfloat16, "cpu"), flce.Fp8("e4m3")
    given, _ = quantized(form, "cpu")
    expected = flce.linear_cross_entropy(hidden, given["weight"], target, weight_scale=given["weight_scale"], shift=1, fp8=fp8)
    assert torch.equal(flce.LinearCrossEntropyLoss(head, shift=1, fp8=fp8)(hidden, target), expected)
    check(flce.FusedLMHead.from_linear(head, shift=1, fp8=fp8)(hidden, labels=target), expected, hidden, "cpu")


E4M3_HEAD, STATIC = flce.Fp8("e4m3"), flce.Fp8("e4m3", scales=(0.02, None))
ROUNDING: dict[str, tuple[Callable[[], nn.Linear], flce.Fp8]] = {
    "torchao": (lambda: linear(float8(act_quant_kwargs=by_rows())), E4M3_HEAD),
    "compressed": (lambda: compressed("column", layer_input_activations=inputs()), E4M3_HEAD),
    "compressed static": (static, STATIC),
}


@pytest.mark.parametrize("kind", ROUNDING)
def test_a_head_in_8_bits_of_a_layer_that_rounds_hidden_states(kind: str) -> None:
    make, fp8 = ROUNDING[kind]
    head, (hidden, target) = make(), hidden_of(torch.bfloat16, "cpu")
    given, dense = quantized("column", "cpu")
    expected = flce.linear_cross_entropy(hidden, given["weight"], target, weight_scale=given["weight_scale"], shift=1, fp8=fp8)
    loss, fused = flce.LinearCrossEntropyLoss(head, shift=1, fp8=fp8), flce.FusedLMHead.from_linear(head, shift=1, fp8=fp8)
    assert torch.equal(loss(hidden, target), expected)
    check(fused(hidden, labels=target), expected, hidden, "cpu")
    if "compressed" not in kind:
        assert torch.equal(flce.linear_cross_entropy(hidden, head.weight, target, shift=1, fp8=fp8), expected)
    rows = hidden.detach().double()
    scale = rows.abs().amax(-1, keepdim=True) / 448 if fp8 is E4M3_HEAD else 0.02
    logits = ((rows / scale).clamp(-448, 448).to(E4M3).double() * scale) @ dense.double().T
    for made in (fused(hidden), loss.forward_logits(hidden)):
        torch.testing.assert_close(made.double(), logits, rtol=2**-7, atol=2**-7 * float(logits.abs().max()))
        assert torch.autograd.grad(made.sum(), hidden)[0].any()
    read = loss.operands(hidden).weight
    for other in (None, flce.Fp8(), flce.Fp8("e4m3", scales=(0.03, None)), STATIC if fp8 is E4M3_HEAD else E4M3_HEAD):
        with pytest.raises(flce.ArgumentError, match=r"rounds hidden states as well, as losses with fp8=flce\.Fp8\('e4m3'"):
            flce.LinearCrossEntropyLoss(head, shift=1, fp8=other)(hidden, target)
        with pytest.raises(flce.ArgumentError, match="weight is codes of a layer which rounds hidden states as well"):
            flce.linear_cross_entropy(hidden, read, target, fp8=other)
    with pytest.raises(flce.ArgumentError, match="which rounds hidden states as well"):
        flce.linear_topk(hidden, head, 3)


ROUNDED_OTHERWISE: dict[str, tuple[Callable[[], nn.Linear], str]] = {
    "torchao whole": (lambda: linear(float8(act_quant_kwargs=by_rows(granularity="PerTensor"))), "as no flce.Fp8 does"),
    "torchao columns": (lambda: linear(float8(act_quant_kwargs=by_rows(dim=1))), "as no flce.Fp8 does"),
    "torchao bounds": (lambda: linear(float8(act_quant_kwargs=by_rows(hp_value_ub=3.0))), "as no flce.Fp8 does"),
    "torchao e5m2": (lambda: linear(float8(act_quant_kwargs=by_rows(float8_dtype=torch.float8_e5m2))), "as no flce.Fp8 does"),
    "nvfp4": (lambda: linear(nvfp4(act_quant_kwargs=by_rows())), "act_quant_kwargs = None"),
    "whole": (lambda: compressed("column", layer_input_activations=inputs(strategy="tensor")), "by tensor, dynamic, which.*no flce.Fp8"),
    "groups": (lambda: compressed("column", layer_input_activations=inputs(strategy="group")), "float of 8 bits by group, dynamic"),
    "integers": (lambda: compressed("column", layer_input_activations=inputs(type="int")), "int of 8 bits by token, dynamic"),
    "zero points": (lambda: compressed("column", layer_input_activations=inputs(symmetric=False)), "no flce.Fp8"),
    "powers": (lambda: compressed("column", layer_input_activations=inputs(scale_dtype=torch.uint8)), "no flce.Fp8"),
    "a zero point": (lambda: static(layer_input_zero_point=torch.zeros(1)), "by tensor, which.*no flce.Fp8"),
    "two numbers": (lambda: static(torch.ones(2)), "no flce.Fp8"),
    "on meta": (lambda: static(torch.ones(1, device="meta")), "input_scale, one number, is to be compared"),
    "logits": (lambda: compressed("column", layer_output_activations=0), "output_activations in its scheme, which rounds logits"),
}


@pytest.mark.parametrize("fp8", [E4M3_HEAD, STATIC])
@pytest.mark.parametrize("kind", ROUNDED_OTHERWISE)
def test_hidden_states_that_are_rounded_otherwise_are_refused(kind: str, fp8: flce.Fp8) -> None:
    make, message = ROUNDED_OTHERWISE[kind]
    head, (hidden, target) = make(), hidden_of(torch.bfloat16, "cpu")
    for call in (
        lambda: flce.LinearCrossEntropyLoss(head, shift=0, fp8=fp8)(hidden, target),
        lambda: flce.linear_cross_entropy(hidden, head, target, fp8=fp8),
        lambda: flce.FusedLMHead.from_linear(head, fp8=fp8)(hidden, labels=target),
    ):
        with pytest.raises(flce.ArgumentError, match=message):
            call()


def test_rounded_hidden_states_are_their_codes_exactly() -> None:
    hidden = torch.tensor([100.0, 10.0, -50.0, 0.0]).bfloat16().requires_grad_()
    made = _formats._rounded(hidden, (0.003, None))
    assert torch.equal(made, torch.tensor([448, 448, -448, 0]).mul(0.003).bfloat16())
    made.sum().backward()
    assert torch.equal(hidden.grad, torch.ones(4).bfloat16())  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["rows", "column", "number", "blocks", "nvfp4", "nvfp4_alone"])
def test_numbers_of_codes(form: str) -> None:
    given, dense = quantized(form, "cpu")
    if form == "nvfp4_alone":
        given["weight_tensor_scale"] = 1.0
    codes = _formats.Codes(**given)
    assert list(codes.shape) == [CLASSES, HIDDEN]
    for first, last in ((0, CLASSES), (128, 201), (256, CLASSES)):
        assert torch.equal(codes.numbers(first, last), dense[first:last])


WRONG: dict[str, tuple[Callable[[], nn.Linear], str]] = {
    "e5m2": (lambda: linear(float8(qdata=torch.ones(CLASSES, HIDDEN).to(torch.float8_e5m2))), "whose qdata is torch.float8_e5m2"),
    "groups": (lambda: linear(float8(block_size=[1, 16])), r"whose block_size is \[1, 16\]"),
    "scale": (lambda: linear(float8(scale=torch.ones(7, 1))), r"whose scale is \[7, 1\] with a block_size of \[1, 144\]"),
    "no block size": (lambda: linear(float8(block_size=None)), "whose block_size is None"),
    "another version": (lambda: linear(float8(block_size=...)), "without block_size, as no version that is known"),
    "inputs": (
        lambda: linear(float8(act_quant_kwargs=1)),
        "act_quant_kwargs 1, which rounds hidden states as well.*set weight.act_quant_kwargs = None",
    ),
    "nvfp4 groups": (lambda: linear(nvfp4(block_size=32)), "whose block_size is 32"),
    "nvfp4 scale": (lambda: linear(nvfp4(is_swizzled_scales=True)), r"whose scale is \[301, 9\], where \[96, 48\] is expected"),
    "nvfp4 whole": (lambda: linear(nvfp4(per_tensor_scale=torch.ones(3))), r"whose per_tensor_scale is torch.float32 \[3\]"),
    "integers": (lambda: compressed("column", type="int"), "int of 8 bits by channel.*decompress_module"),
    "zero points": (lambda: compressed("column", symmetric=False), "zero points"),
    "zero point": (lambda: compressed("column", layer_weight_zero_point=torch.zeros(CLASSES, 1)), "with weight_zero_point"),
    "order": (lambda: compressed("nvfp4", layer_weight_g_idx=torch.zeros(HIDDEN)), "with weight_g_idx"),
    "small blocks": (lambda: compressed("blocks", block_structure=[64, 64]), r"of blocks \[64, 64\]"),
    "mxfp4": (lambda: compressed("nvfp4", strategy="group", group_size=32), "float of 4 bits by group"),
    "rounded inputs": (lambda: compressed("column", layer_input_activations=0), "input_activations.*quantization_enabled = False"),
    "rounded outputs": (lambda: compressed("column", layer_output_activations=0), "output_activations.*quantization_enabled = False"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_not_understood_is_refused(kind: str) -> None:
    make, message = WRONG[kind]
    head, (hidden, target) = make(), hidden_of(torch.bfloat16, "cpu")
    for call in (
        lambda: flce.LinearCrossEntropyLoss(head, shift=0)(hidden, target),
        lambda: flce.linear_cross_entropy(hidden, head, target),
        lambda: flce.FusedLMHead.from_linear(head)(hidden, labels=target),
    ):
        with pytest.raises(flce.ArgumentError, match=message):
            call()


def test_scales_beside_a_quantised_weight() -> None:
    hidden, target = hidden_of(torch.bfloat16, "cpu")
    with pytest.raises(flce.ArgumentError, match="weight_scale is given, and weight has its own"):
        flce.linear_cross_entropy(hidden, float8(), target, weight_scale=torch.ones(CLASSES))


def test_a_weight_that_only_its_class_reads() -> None:
    weight = named("somebody.fp4", "PackedTensor")([CLASSES, HIDDEN])
    hidden, target = hidden_of(torch.bfloat16, "cpu")
    ids, whole = target.clamp(min=0)[..., None], torch.ones(CLASSES, HIDDEN, dtype=torch.bfloat16)
    calls: dict[str, Callable[[], Any]] = {
        "cross_entropy": lambda: flce.linear_cross_entropy(hidden, weight, target),
        "logprobs": lambda: flce.linear_logprobs(hidden, weight, target),
        "logprobs_at": lambda: flce.linear_logprobs_at(hidden, weight, ids),
        "distillation": lambda: flce.linear_topk_distillation(hidden, weight, ids, torch.ones(ids.shape)),
        "topk": lambda: flce.linear_topk(hidden, weight, 3),
        "divergence": lambda: flce.linear_divergence(hidden, whole, hidden.detach(), weight, beta=0),
        "codes": lambda: flce.linear_cross_entropy(hidden, weight, target, weight_scale=torch.ones(CLASSES)),
        "layer": lambda: flce.linear_cross_entropy(hidden, linear(weight), target),
        "loss": lambda: flce.LinearCrossEntropyLoss(linear(weight), shift=0)(hidden, target),
        "pytorch": lambda: flce.LinearCrossEntropyLoss(linear(weight), "pytorch", shift=0)(hidden, target),
        "logits": lambda: flce.LinearCrossEntropyLoss(linear(weight), shift=0).forward_logits(hidden),
        "head": lambda: flce.FusedLMHead.from_linear(linear(weight))(hidden, labels=target),
    }
    for name, call in calls.items():
        with pytest.raises(flce.ArgumentError, match=r"somebody\.fp4\.PackedTensor, which keeps its numbers in a way of its own"):
            call()
            pytest.fail(name)
    of_group = named("somebody.fp4", "Scales")([CLASSES])
    with pytest.raises(flce.ArgumentError, match=r"weight_scale is a somebody\.fp4\.Scales"):
        flce.linear_cross_entropy(hidden, torch.ones(CLASSES, HIDDEN).to(E4M3), target, weight_scale=of_group)


def test_codes_without_scales_say_what_they_lack() -> None:
    hidden, target = hidden_of(torch.bfloat16, "cpu")
    codes = torch.ones(CLASSES, HIDDEN).to(E4M3)
    with pytest.raises(flce.DTypeError, match=r"weight has dtype torch\.float8_e4m3fn.*codes are given with weight_scale"):
        flce.linear_cross_entropy(hidden, codes, target)
    with pytest.raises(flce.DTypeError, match=r"weight has dtype torch\.float8_e4m3fn.*codes are given with weight_scale"):
        flce.linear_topk(hidden, codes, 3)
    with pytest.raises(flce.DTypeError, match=r"teacher_weight has dtype torch\.float8_e4m3fn.*dequantise it"):
        flce.linear_divergence(hidden, codes.to(hidden.dtype), hidden.detach(), codes, beta=0)
    with pytest.raises(flce.ArgumentError, match=r"has dtype torch\.float8_e4m3fn, as of a quantised layer.*with weight_scale"):
        flce.LinearCrossEntropyLoss(linear(codes), shift=0)(hidden, target)
