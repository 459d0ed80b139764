"""A call whose weight is codes with scales, and frozen: e4m3 with scales of rows or of 128 x 128 blocks, or NVFP4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flce import errors
from flce.call import _arguments, _options
from flce.call._checks import DTYPES
from flce.call._formats import BLOCK, GROUP, Codes
from flce.call._targets import check_tensors
from flce.core import _autograd
from flce.core._frame import CallOptions, Parallel
from flce.operators import _quantized

_CODES = (torch.uint8, torch.float8_e4m3fn)
_REFUSED = ("class_weight", "grad_weight_out")


def run(
    parallel: Parallel | None,
    hidden: Tensor,
    given: Codes,
    target: Tensor,
    options: CallOptions,
    *,
    num_valid_tokens: Tensor | float | None = None,
    **tensors: Any,
) -> Any:
    """`tensors`: other tensors of the call, by the names of its options."""
    if _autograd.transforms is not None and not torch.compiler.is_compiling() and _autograd.transforms() is not None:
        raise errors.UnsupportedTransformError(
            "a layer with weight_scale is called under a transform of torch.func, which it does not have"
        )
    check_plain(hidden, given, {"target": target, **tensors}, over_ranks=parallel is not None)
    for name in _REFUSED:
        if tensors.get(name) is not None:
            raise errors.ArgumentError(f"{name} is given with weight_scale: a quantised weight is frozen, and has no {name}; leave it out")
    if parallel is not None and (parallel.sequence or parallel.reduce_dtype is not None or not parallel.reduce_grad_hidden):
        raise errors.ArgumentError(
            "sequence_parallel, reduce_dtype and reduce_grad_hidden are not for a call with weight_scale; leave them out"
        )
    bias, offset, temperature, token_weight = (tensors.get(name) for name in ("bias", "class_offset", "temperature", "token_weight"))
    hidden, bias = _autocast(hidden, bias)
    codes, scale, tensor_scale = as_kernels_read(hidden, *given[:3])
    layer = hidden.new_empty(1).expand(codes.shape[0], hidden.shape[-1])  # the dequantised weight, as checks see it
    _arguments.check_inputs(hidden, layer, target, {"bias": bias, "class_offset": offset})
    if bias is not None and bias.dtype is not hidden.dtype:
        raise errors.DTypeError(f"bias has dtype {bias.dtype}; it must be hidden's: convert it with bias.to({hidden.dtype})")
    if offset is not None and offset.requires_grad:
        raise errors.ArgumentError("class_offset requires a gradient; it has none with weight_scale, detach it")
    reduction = _options.REDUCTION_NAMES[options.reduction]
    if temperature is not None:
        _arguments.check_temperature(temperature, target)
    _arguments.check_token_weight(token_weight, reduction, target)
    divisor = None if num_valid_tokens is None else _arguments.num_valid(num_valid_tokens, reduction, hidden)
    tokens = target.shape
    if temperature is None and options.temperature is not None:
        temperature = torch.full(tokens, options.temperature, dtype=torch.float32, device=hidden.device)
    ids = tensors.get("teacher_ids")
    trained = hidden.requires_grad or (bias is not None and bias.requires_grad)
    loss, values, _, top1, named, _ = _quantized.run(
        hidden.reshape(-1, hidden.shape[-1]),
        codes,
        scale,
        tensor_scale,
        target.reshape(-1),
        bias,
        None if offset is None else offset.detach().float(),
        _per_token(temperature),
        _per_token(token_weight),
        divisor,
        None if ids is None else ids.reshape(-1, ids.shape[-1]),
        options.spec,
        options.ignore_index,
        options.reduction,
        options.workspace_limit_bytes,
        "" if parallel is None else parallel.text(),
        trained and torch.is_grad_enabled() and not options.retain.budget,
    )
    rest = dict(zip((name for name in options.outputs.values if name != "loss"), values.unbind(0), strict=True)) | {"top1": top1}
    if options.named_logprobs:
        return named.view(*tokens, named.shape[-1]), *(_own(name, rest[name], tokens) for name in options.asked if name != "loss")
    made = [
        loss.view(tokens if reduction == "none" else ()) if name == "loss" else _own(name, rest[name], tokens) for name in options.asked
    ]
    return made[0] if len(made) == 1 else tuple(made)


def _own(name: str, value: Tensor, tokens: torch.Size) -> Tensor:
    """An output of its own memory."""
    value = value.detach() if name in ("top1", "log_sum_sq_probs") else value
    return value.view(tokens).clone()


def _per_token(given: Tensor | None) -> Tensor | None:
    return None if given is None else given.detach().resolve_neg().to(torch.float32).reshape(-1)


def check_plain(hidden: Tensor, codes: Codes, others: Mapping[str, Any], *, over_ranks: bool) -> None:
    """Looks at the tensors of a call, those of the weight among them."""
    frozen: dict[str, Tensor] = {"weight": codes.weight, "weight_scale": codes.weight_scale}
    if isinstance(codes.weight_tensor_scale, Tensor):
        frozen["weight_tensor_scale"] = codes.weight_tensor_scale
    given = {"hidden": hidden, **frozen, **{name: each for name, each in others.items() if isinstance(each, Tensor) or name == "target"}}
    check_tensors(**given)
    for name, each in given.items():
        if each is None:
            raise errors.DTypeError(f"{name} is None; it must be a tensor")
        _arguments.refuse_dtensor(name, each, over_ranks=over_ranks)
        _arguments.refuse_tangent(name, each)
    for name, each in frozen.items():
        if each.requires_grad:
            raise errors.ArgumentError(f"{name} requires a gradient; a quantised weight is frozen: detach it")
        if each.device != hidden.device:
            raise errors.PlacementError(f"{name} is on {each.device}; it must be on hidden's device, {hidden.device}")


def as_kernels_read(
    hidden: Tensor, weight: Tensor, scale: Tensor, tensor_scale: Tensor | float | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, scales and the tensor's scale, None where the format is e4m3. Copies are made of scales alone."""
    size = hidden.shape[-1] if hidden.dim() else 0
    if size == 0:
        raise errors.ShapeError(f"hidden has shape {list(hidden.shape)}; beside weight_scale its last dimension must be a multiple of 16")
    if weight.dtype not in _CODES and weight.dtype is not getattr(torch, "float4_e2m1fn_x2", None):
        raise errors.DTypeError(
            f"weight has dtype {weight.dtype} and weight_scale is given; codes are torch.float8_e4m3fn or uint8 [V, D], or of "
            "NVFP4 uint8 [V, D / 2]"
        )
    # Two comparisons: torch.compile answers `in` wrongly where a size is dynamic.
    if weight.dim() != 2 or (weight.shape[1] != size and weight.shape[1] != size // 2):
        raise errors.ShapeError(
            f"weight has shape {list(weight.shape)}; codes beside a hidden_size of {size} are [V, {size}], or of NVFP4 [V, {size // 2}]"
        )
    if not weight.is_contiguous():
        raise errors.ArgumentError("weight is not contiguous; kernels read codes where they lie, row by row: give weight.contiguous()")
    if hidden.dtype is torch.float32:
        raise errors.DTypeError(
            "hidden has dtype torch.float32; beside weight_scale it must be bfloat16 or float16: cast it, or use autocast"
        )
    if weight.shape[1] == size:
        if weight.dtype not in _CODES:
            raise errors.ShapeError(
                f"weight is {weight.dtype} {list(weight.shape)}; two codes an element beside a hidden_size of {size} are [V, {size // 2}]"
            )
        if tensor_scale is not None:
            raise errors.ArgumentError("weight_tensor_scale is given with e4m3 codes; it is NVFP4's: multiply weight_scale by it")
        return weight, _e4m3_scale(weight, scale), None
    if weight.dtype is torch.float8_e4m3fn:
        raise errors.DTypeError(f"weight has dtype {weight.dtype} and shape {list(weight.shape)}; NVFP4 codes are uint8, two in a byte")
    groups = [weight.shape[0], size // GROUP]
    if list(scale.shape) != groups or scale.dtype not in _CODES:
        raise errors.ShapeError(
            f"weight_scale is {scale.dtype} {list(scale.shape)}; of NVFP4 codes it must be torch.float8_e4m3fn {groups}, "
            "row by row (not swizzled)"
        )
    if isinstance(tensor_scale, Tensor):
        if not tensor_scale.dtype.is_floating_point:
            raise errors.DTypeError(f"weight_tensor_scale has dtype {tensor_scale.dtype}; it must be a floating one")
    elif tensor_scale is not None and (isinstance(tensor_scale, bool) or not isinstance(tensor_scale, (int, float))):
        raise errors.DTypeError(f"weight_tensor_scale is {tensor_scale!r}; it must be a number, or a tensor of one")
    if tensor_scale is None or not isinstance(tensor_scale, Tensor):
        number = torch.full((), 1.0 if tensor_scale is None else float(tensor_scale), dtype=torch.float32, device=hidden.device)
        return weight.view(torch.uint8), scale, number
    if tensor_scale.numel() != 1:
        raise errors.ShapeError(f"weight_tensor_scale has shape {list(tensor_scale.shape)}; it must have one element")
    return weight.view(torch.uint8), scale, tensor_scale.reshape(()).float()


def _e4m3_scale(weight: Tensor, scale: Tensor) -> Tensor:
    if scale.dtype not in DTYPES:
        raise errors.DTypeError(f"weight_scale has dtype {scale.dtype}; beside e4m3 codes allowed are float32, bfloat16, float16")
    rows, columns = weight.shape
    blocks = [-(-rows // BLOCK), -(-columns // BLOCK)]
    if scale.numel() == 1 and (scale.dim() < 2 or blocks != [1, 1]):
        scale = scale.reshape(1).expand(rows)
    elif list(scale.shape) == [rows, 1]:
        scale = scale.reshape(rows)
    elif list(scale.shape) != [rows] and list(scale.shape) != blocks:
        raise errors.ShapeError(
            f"weight_scale has shape {list(scale.shape)}; it must be [{rows}] (a scale a row), {blocks} (a scale for 128 x 128 "
            "numbers) or one number"
        )
    return scale.float().contiguous()


def _autocast(hidden: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    device_type = hidden.device.type
    if device_type not in ("cpu", "cuda") or not torch.is_autocast_enabled(device_type):
        return hidden, bias
    dtype = torch.get_autocast_dtype(device_type)
    hidden = hidden.to(dtype) if hidden.dtype in DTYPES else hidden
    return hidden, bias.to(dtype) if bias is not None and bias.dtype in DTYPES else bias
