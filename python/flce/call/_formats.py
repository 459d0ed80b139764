"""Quantised weights of other libraries: those that kernels read where they lie, and for others what to do instead.

None of these libraries is imported. A tensor is known by its class' module and name, a layer of compressed-tensors by its scheme, and each
attribute that is read is looked at. What is not understood is refused.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flce import errors
from flce import fp8 as fp8_options

BLOCK, GROUP = 128, 16  # e4m3's blocks; numbers of a row that have an NVFP4 scale
_E4M3, _MOST = torch.float8_e4m3fn, 448.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BYTES = tuple(dtype for dtype in (torch.uint8, getattr(torch, "float4_e2m1fn_x2", None)) if dtype is not None)
_ROWS = 1024  # classes that are dequantised at a time, where logits are asked for
_COMPRESSED = ("compressed", "decompressed")  # states in which a layer of compressed-tensors leaves its weight as it is
_KNOWN = "Kernels read float8_e4m3fn with scales of rows, of 128 x 128 blocks or of the whole, and NVFP4"
STATE = ("quantization_scheme", "quantization_status", "quantization_enabled")  # names of notes of compressed-tensors in a layer
WITH_SCALES = "codes are given with weight_scale (e4m3, NVFP4), or dequantised"


class Codes(NamedTuple):
    """A frozen weight [V, D] as `linear_cross_entropy` takes it, in place of a tensor of numbers."""

    weight: Tensor
    weight_scale: Tensor
    weight_tensor_scale: Tensor | float | None = None  # NVFP4's, None of e4m3
    inputs: Any = None  # scales of the flce.Fp8 that rounds hidden states as the layer does; None: it does not round them

    @property
    def shape(self) -> torch.Size:
        """[V, D]"""
        rows, columns = self.weight.shape
        return torch.Size((rows, columns if self.weight_tensor_scale is None else 2 * columns))

    def scales(self) -> dict[str, Any]:
        """The arguments of a call that go with `weight`."""
        return {"weight_scale": self.weight_scale, "weight_tensor_scale": self.weight_tensor_scale}

    def numbers(self, first: int, last: int) -> Tensor:
        """[last - first, D] in fp32: numbers of these classes. `first` is a multiple of 128."""
        codes, scale = self.weight[first:last], self.weight_scale
        if self.weight_tensor_scale is not None:
            pairs = codes.view(torch.uint8)
            table = torch.tensor(_E2M1, device=codes.device)
            numbers = table[torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(1).long()]
            groups = scale[first:last].view(_E4M3).float() * self.weight_tensor_scale
            return numbers * groups.repeat_interleave(GROUP, dim=1)
        if scale.numel() == 1:
            wide = scale.reshape(1, 1)
        elif scale.shape[0] == self.weight.shape[0] and scale.numel() == scale.shape[0]:
            wide = scale.reshape(-1, 1)[first:last]
        else:
            wide = scale[first // BLOCK : -(-last // BLOCK)].repeat_interleave(BLOCK, dim=0)[: codes.shape[0]]
            wide = wide.repeat_interleave(BLOCK, dim=1)[:, : codes.shape[1]]
        return codes.view(_E4M3).float() * wide.float()

    def logits(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        """[..., V] in hidden's dtype; a part of the classes is dequantised at a time, in backward again."""
        if self.inputs is not None:
            hidden = _rounded(hidden, self.inputs)

        def part(hidden: Tensor, first: int, last: int) -> Tensor:
            rows = self.numbers(first, last).to(hidden.dtype)
            return F.linear(hidden, rows, None if bias is None else bias[first:last].to(hidden.dtype))

        ends = [(first, min(first + _ROWS, self.shape[0])) for first in range(0, self.shape[0], _ROWS)]
        if torch.is_grad_enabled() and (hidden.requires_grad or (bias is not None and bias.requires_grad)):
            return torch.cat([checkpoint(part, hidden, *each, use_reentrant=False) for each in ends], dim=-1)
        return torch.cat([part(hidden, *each) for each in ends], dim=-1)


def _rounded(hidden: Tensor, scales: Any) -> Tensor:
    """Numbers of hidden's codes, in its dtype. The gradient is that of hidden as it is."""
    wide = hidden.detach().float()
    scale = wide.abs().amax(-1, keepdim=True) / _MOST if isinstance(scales, str) else wide.new_tensor(scales[0])
    codes = torch.where(scale > 0, wide / scale, 0.0).clamp(-_MOST, _MOST).to(_E4M3)
    return (codes.float() * scale).to(hidden.dtype) + (hidden - hidden.detach())  # exactly 0 behind the numbers


def of_layer(what: str, layer: Any, fp8: Any = None) -> Codes | None:
    """Codes of the layer's weight; None for a weight of numbers, or one that `refuse_quantised` knows. Raises ArgumentError for a format,
    and for a layer, that is understood to be another one, and for one that rounds hidden states in another way than a loss with `fp8`."""
    layer = getattr(layer, "_modules", {}).get("_orig_mod", layer)  # torch.compile's wrapper
    scheme = getattr(layer, "quantization_scheme", None)
    if scheme is not None and _package(type(scheme)) == "compressed_tensors":
        return _of_compressed(what, layer, scheme, fp8)
    return of_tensor(f"{what}'s weight", getattr(layer, "weight", None), fp8)


def of_tensor(name: str, weight: Any, fp8: Any = None) -> Codes | None:
    """Codes of a tensor, as `of_layer` has those of a layer."""
    kind = type(weight)
    if kind is Tensor or kind is nn.Parameter or _package(kind) != "torchao":
        return None
    reader = _READERS.get(kind.__name__)
    return None if reader is None else reader(name, weight, fp8)


def codes_of(weight: Any, scale: Tensor | None, tensor_scale: Tensor | float | None, fp8: Any = None) -> Codes | None:
    """Codes of a call's weight, with the scales that are given beside it or with its own; None for a weight of numbers. Raises
    ArgumentError for scales that are given twice, or without what they go with."""
    codes = weight if isinstance(weight, Codes) else of_tensor("weight", weight, fp8)
    if codes is None and scale is not None:
        return Codes(weight, scale, tensor_scale)
    for name, given in (("weight_scale", scale), ("weight_tensor_scale", tensor_scale)):
        if given is not None and codes is not None:
            raise errors.ArgumentError(f"{name} is given, and weight has its own; give codes and scales, or the quantised weight alone")
    if tensor_scale is not None:
        raise errors.ArgumentError("weight_tensor_scale is given and weight_scale is None; it goes with an NVFP4 weight's scales")
    if codes is not None and codes.inputs is not None and (why := _why_rounded_otherwise(codes.inputs, fp8)) is not None:
        raise errors.ArgumentError(f"weight is codes of a layer {why}")
    return codes


def are_codes(dtype: torch.dtype) -> bool:
    """Whether a weight of this dtype lacks its scales."""
    return dtype in (_E4M3, *_BYTES, torch.int8)


def held_weight(layer: Any) -> Any:
    """The tensor that a layer's weight lies in: codes where these have a name of their own; None where it has none."""
    weight = getattr(layer, "weight", None)
    return getattr(layer, "weight_packed", None) if weight is None else weight


def refuse_quantised(name: str, tensor: Any) -> None:
    """Raises ArgumentError for a tensor that stands for numbers which its memory does not hold as such."""
    kind = type(tensor)
    if kind is Tensor or kind is nn.Parameter:
        return
    how = _DEQUANTISE.get(_package(kind))
    if how is not None:
        raise errors.ArgumentError(
            f"{name} is a {kind.__module__}.{kind.__qualname__} in {tensor.dtype}, a quantised tensor; it must be of float32, bfloat16 or "
            f"float16. {how(tensor)}, or leave the output layer out of the quantisation (transformers: llm_int8_skip_modules, "
            "modules_to_not_convert; torchao: filter_fn)"
        )


def refuse_codes(name: str, codes: Codes | None, why: str = "which is not read here") -> None:
    """Raises ArgumentError for a quantised weight where numbers alone are read."""
    if codes is not None:
        raise errors.ArgumentError(
            f"{name} is quantised ({codes.weight.dtype} {list(codes.weight.shape)} with scales), {why}: give the numbers that it stands for"
        )


def refuse_foreign(name: str, tensor: Any) -> None:
    """Raises ArgumentError for a tensor whose numbers are known to its class alone. torch's own classes are known elsewhere."""
    kind = type(tensor)
    if kind is Tensor or kind is nn.Parameter or not isinstance(tensor, Tensor) or _package(kind) == "torch":
        return
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise errors.ArgumentError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}, which keeps its numbers in a way of its own (__torch_dispatch__); give a "
            f"plain tensor of them, or codes with weight_scale. {_KNOWN}"
        )


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _of_bitsandbytes(tensor: Any) -> str:
    form = getattr(tensor, "quant_type", None)
    if type(tensor).__name__ == "Int8Params":
        return "It is int8: dequantise it (bitsandbytes.functional.int8_vectorwise_dequant(weight.CB, weight.SCB))"
    said = form if isinstance(form, str) else "of 4 bits"
    return f"It is {said}: dequantise it (bitsandbytes.functional.dequantize_4bit(weight, weight.quant_state))"


_DEQUANTISE: dict[str, Callable[[Any], str]] = {
    "bitsandbytes": _of_bitsandbytes,
    "torchao": lambda tensor: "Dequantise it (weight.dequantize())",
}


def _why_rounded_otherwise(scales: Any, fp8: Any) -> str | None:
    """Says how a layer rounds hidden states where a loss with `fp8` does not; None where that does it alike. `scales`: of the flce.Fp8
    that does, None where none does."""
    if scales is None:
        return "which rounds hidden states as well, as no flce.Fp8 does (a scale a row, or one given number)"
    own = getattr(fp8, "scales", None) if getattr(fp8, "logits", None) == "e4m3" else None
    if isinstance(own, tuple) and isinstance(scales, tuple):
        own, scales = ((ctypes.c_float(hidden).value, weight) for hidden, weight in (own, scales))  # numbers as kernels have them
    form = "" if isinstance(scales, str) else f", scales={scales}"
    return None if own == scales else f"which rounds hidden states as well, as losses with fp8=flce.Fp8('e4m3'{form}) do"


# ── torchao ─────────────────────────────────────────


def _of_float8(name: str, weight: Any, fp8: Any) -> Codes:
    """A Float8Tensor."""
    codes, scale, block = (_read(name, weight, each) for each in ("qdata", "scale", "block_size"))
    inputs = _inputs_of(name, weight, fp8)
    if codes.dtype is not _E4M3 or codes.dim() != 2 or list(codes.shape) != list(weight.shape):
        raise _not_read(name, weight, f"whose qdata is {codes.dtype} {list(codes.shape)}")
    rows, columns = codes.shape
    block = [rows, columns] if block is not None and len(block) == 0 else block
    of_blocks = {(1, columns): [rows, 1], (rows, columns): [1, 1], (BLOCK, BLOCK): [-(-rows // BLOCK), -(-columns // BLOCK)]}
    expected = of_blocks.get(tuple(block)) if isinstance(block, (list, tuple)) else None
    if expected is None:
        raise _not_read(name, weight, f"whose block_size is {block}")
    if list(scale.shape) != expected and not (scale.numel() == 1 and expected == [1, 1]):
        raise _not_read(name, weight, f"whose scale is {list(scale.shape)} with a block_size of {list(block)}")
    return Codes(codes, scale, inputs=inputs)


def _of_nvfp4(name: str, weight: Any, fp8: Any) -> Codes:
    """An NVFP4Tensor. Swizzled scales are copied, V · D / 16 bytes."""
    codes, scale, group = (_read(name, weight, each) for each in ("qdata", "scale", "block_size"))
    whole, swizzled = (_read(name, weight, each) for each in ("per_tensor_scale", "is_swizzled_scales"))
    _inputs_of(name, weight, None)
    if codes.dtype not in _BYTES or codes.dim() != 2 or [codes.shape[0], 2 * codes.shape[1]] != list(weight.shape):
        raise _not_read(name, weight, f"whose qdata is {codes.dtype} {list(codes.shape)}")
    if group != GROUP or scale.dtype is not _E4M3:
        raise _not_read(name, weight, f"whose block_size is {group} and scale {scale.dtype}")
    if whole is not None and (whole.numel() != 1 or not whole.dtype.is_floating_point):
        raise _not_read(name, weight, f"whose per_tensor_scale is {whole.dtype} {list(whole.shape)}")
    rows, groups = codes.shape[0], 2 * codes.shape[1] // GROUP
    expected = [-(-rows // 128) * 32, -(-groups // 4) * 16] if swizzled else [rows, groups]
    if list(scale.shape) != expected:
        raise _not_read(name, weight, f"whose scale is {list(scale.shape)}, where {expected} is expected")
    return Codes(codes, _unswizzled(scale, rows, groups) if swizzled else scale, 1.0 if whole is None else whole)


def _unswizzled(scale: Tensor, rows: int, groups: int) -> Tensor:
    """[rows, groups] of scales in the blocks of 128 x 4 that tensor cores read: in a block 32 rows of 16 bytes, each of four rows of scales
    that are 32 apart."""
    row_blocks, column_blocks = -(-rows // 128), -(-groups // 4)
    blocks = scale.contiguous().view(torch.uint8).view(row_blocks, column_blocks, 32, 4, 4)
    lying = blocks.permute(0, 3, 2, 1, 4).reshape(row_blocks * 128, column_blocks * 4)
    return lying[:rows, :groups].contiguous().view(_E4M3)


def _inputs_of(name: str, weight: Any, fp8: Any) -> str | None:
    """Codes.inputs of a torchao tensor. Raises ArgumentError where a loss with `fp8` rounds hidden states in another way."""
    kwargs = _read(name, weight, "act_quant_kwargs")
    if kwargs is None:
        return None
    by_row = _is_by_row(kwargs)
    if (why := _why_rounded_otherwise("dynamic" if by_row else None, fp8)) is not None:
        raise errors.ArgumentError(
            f"{name} is a {_kind(weight)} with act_quant_kwargs{'' if by_row else f' {kwargs}'}, {why}; for the weight alone set "
            "weight.act_quant_kwargs = None, or quantise it so (Float8WeightOnlyConfig, NVFP4WeightOnlyConfig)"
        )
    return "dynamic"


def _is_by_row(kwargs: Any) -> bool:
    """Whether torchao rounds hidden states to e4m3 whose largest code is each row's largest number."""
    granularity = getattr(kwargs, "granularity", None)
    return (
        (_package(type(kwargs)), type(kwargs).__name__) == ("torchao", "QuantizeTensorToFloat8Kwargs")
        and getattr(kwargs, "float8_dtype", None) is _E4M3
        and (type(granularity).__name__, getattr(granularity, "dim", None)) == ("PerRow", -1)
        and all(getattr(kwargs, bound, 0.0) is None for bound in ("hp_value_lb", "hp_value_ub"))
    )


def _read(name: str, weight: Any, attribute: str) -> Any:
    if not hasattr(weight, attribute):
        raise _not_read(name, weight, f"without {attribute}, as no version that is known")
    return getattr(weight, attribute)


def _not_read(name: str, weight: Any, why: str) -> errors.ArgumentError:
    return errors.ArgumentError(f"{name} is a {_kind(weight)} {why}. {_KNOWN}; give weight.dequantize()")


def _kind(given: Any) -> str:
    return f"{type(given).__module__}.{type(given).__qualname__}"


_READERS: dict[str, Callable[[str, Any, Any], Codes]] = {"Float8Tensor": _of_float8, "NVFP4Tensor": _of_nvfp4}


# ── compressed-tensors ──────────────────────────────


def _of_compressed(what: str, layer: Any, scheme: Any, fp8: Any) -> Codes | None:
    """A layer whose state is "compressed"; in every other one its weight is numbers."""
    if not is_compressed(layer):
        return None
    weights = scheme.weights
    if (why := why_more(layer, fp8)) is not None:
        raise errors.ArgumentError(f"{what} is a {_kind(layer)} of compressed-tensors that {why}")
    form = tuple(getattr(weights, each, None) for each in ("type", "num_bits", "strategy"))
    said = f"{what} is a {_kind(layer)} of compressed-tensors, {form[0]} of {form[1]} bits by {form[2]}"
    own = {"weight", "weight_packed", "weight_scale", "weight_global_scale"}
    more = sorted({name for name in (*layer._parameters, *layer._buffers) if name.startswith("weight")} - own)
    scale = getattr(layer, "weight_scale", None)
    if more or getattr(weights, "symmetric", False) is not True or getattr(weights, "dynamic", True) is not False or scale is None:
        raise _not_compressed(said, f"with {', '.join(more) or 'scales that are not fixed, or zero points'}")
    if form == ("float", 4, "tensor_group") and getattr(weights, "group_size", None) == GROUP:
        return _of_packed(said, layer, scale)
    codes, block = getattr(layer, "weight", None), getattr(weights, "block_structure", None)
    if form[:2] != ("float", 8) or codes is None or codes.dtype is not _E4M3 or codes.dim() != 2:
        raise _not_compressed(said, "")
    rows, columns = codes.shape
    of_strategy = {"channel": [rows, 1], "tensor": [1]}
    if list(block or ()) == [BLOCK, BLOCK]:
        of_strategy["block"] = [-(-rows // BLOCK), -(-columns // BLOCK)]
    if list(scale.shape) != of_strategy.get(str(form[2])):
        raise _not_compressed(said, f"with weight_scale {list(scale.shape)} of blocks {block}")
    return Codes(codes.detach(), scale.detach(), inputs=fp8.scales if _rounds_inputs(layer) else None)


def _of_packed(said: str, layer: Any, scale: Tensor) -> Codes:
    codes, whole = (getattr(layer, each, None) for each in ("weight_packed", "weight_global_scale"))
    if codes is None or codes.dtype is not torch.uint8 or codes.dim() != 2 or scale.dtype is not _E4M3:
        raise _not_compressed(said, "without weight_packed and weight_scale as nvfp4-pack-quantized has them")
    if list(scale.shape) != [codes.shape[0], 2 * codes.shape[1] // GROUP] or (whole is not None and whole.numel() != 1):
        raise _not_compressed(said, f"with weight_scale {list(scale.shape)} beside weight_packed {list(codes.shape)}")
    return Codes(codes.detach(), scale.detach(), 1.0 if whole is None else whole.detach().float().reciprocal())


def is_compressed(layer: Any) -> bool:
    """Whether compressed-tensors has put codes in the place of the layer's weight."""
    scheme: Any = getattr(layer, "quantization_scheme", None)
    return _package(type(scheme)) == "compressed_tensors" and scheme.weights is not None and _status(layer) == "compressed"


def is_forward_of_compressed(forward: Any) -> bool:
    """Whether compressed-tensors has put this function in the place of a layer's forward."""
    return str(getattr(forward, "__globals__", {}).get("__name__", "")).partition(".")[0] == "compressed_tensors"


def why_more(layer: Any, fp8: Any = None) -> str | None:
    """Names something that a layer of compressed-tensors computes beside the product with its weight, or with `fp8` beside the product with
    hidden states that are rounded so; None where that is all."""
    scheme = getattr(layer, "quantization_scheme", None)
    if scheme is None or not getattr(layer, "quantization_enabled", True):
        return None
    alone = "for the weight alone set its quantization_enabled = False"
    if _rounds_inputs(layer) and (why := _why_inputs_differ(layer, scheme.input_activations, fp8)) is not None:
        return f"has input_activations in its scheme, {why}; {alone}"
    if getattr(scheme, "output_activations", None) is not None:
        return f"has output_activations in its scheme, which rounds logits; {alone}"
    if getattr(scheme, "weights", None) is not None and _status(layer) not in _COMPRESSED:
        return "rounds its weight in each forward: compress it (compressed_tensors.compressors.compress_module)"
    return None


def _rounds_inputs(layer: Any) -> bool:
    return getattr(layer, "quantization_enabled", True) and getattr(layer.quantization_scheme, "input_activations", None) is not None


def _why_inputs_differ(layer: Any, inputs: Any, fp8: Any) -> str | None:
    """_why_rounded_otherwise of a layer of compressed-tensors."""
    form = tuple(getattr(inputs, each, None) for each in ("type", "num_bits", "strategy", "dynamic"))
    said = f"{form[0]} of {form[1]} bits by {form[2]}{', dynamic' if form[3] else ''}, "
    scale = getattr(layer, "input_scale", None)
    more = [name for name in (*layer._parameters, *layer._buffers) if name.startswith("input_") and name != "input_scale"]
    if not is_compressed(layer):
        return f"{said}which rounds hidden states as well, as losses with fp8 do where it is compressed"
    plain = getattr(inputs, "symmetric", False) is True and getattr(inputs, "scale_dtype", None) is None and not more
    if plain and form == ("float", 8, "token", True):
        return _why_rounded_otherwise("dynamic", fp8)
    if not plain or form != ("float", 8, "tensor", False) or scale is None or scale.numel() != 1:
        return said + str(_why_rounded_otherwise(None, fp8))
    if torch.compiler.is_compiling() or scale.is_meta:
        return "whose input_scale, one number, is to be compared with fp8's, and is read neither under torch.compile nor on meta"
    number = scale.item()
    if not fp8_options.LEAST_SCALE <= number <= fp8_options.MOST_SCALE:
        return f"whose input_scale is {number}, which is no scale"
    return _why_rounded_otherwise((number, None), fp8)


def _status(layer: Any) -> str:
    status = getattr(layer, "quantization_status", None)
    return str(getattr(status, "value", status))


def _not_compressed(said: str, why: str) -> errors.ArgumentError:
    return errors.ArgumentError(
        f"{said}{' ' if why else ''}{why}. {_KNOWN}; decompress the layer (compressed_tensors.compressors.decompress_module(layer))"
    )
