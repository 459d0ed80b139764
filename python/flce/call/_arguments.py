"""Checks of a caller's tensors. Every refusal names the argument, its value and the values that are allowed."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flce import errors
from flce.call import _formats
from flce.call._checks import COUNT_DTYPES, DTYPES, TARGET_DTYPES, is_dtensor
from flce.call._targets import check_target_dtype, check_tensors
from flce.core._frame import PLAIN_TYPES

DEVICE_TYPES = ("cpu", "cuda", "meta")
MOST_TEACHER_TOP_K = 1024
_HIDDEN_CODES = (
    "Codes of one scale s are found again in (hidden.float() * s).to(torch.bfloat16) by fp8=flce.Fp8('e4m3', scales=(s, None)) beside a "
    "weight of codes; of a scale a row by flce.Fp8('e4m3')"
)


def check_inputs(hidden: Tensor, weight: Tensor, target: Tensor, of_classes: Mapping[str, Tensor | None], sequence_ranks: int = 1) -> None:
    """`of_classes`: tensors with a number for every class, by name. `sequence_ranks`: over how many ranks hidden's first dimension lies."""
    dtype, device = hidden.dtype, hidden.device
    if dtype not in DTYPES:
        codes = f". {_HIDDEN_CODES}" if dtype is torch.float8_e4m3fn else ""
        raise errors.DTypeError(f"hidden has dtype {dtype}; allowed are float32, bfloat16, float16{codes}")
    if weight.dtype is not dtype and weight.dtype is not torch.float32:
        codes = f"; {_formats.WITH_SCALES}" if _formats.are_codes(weight.dtype) else ""
        raise errors.DTypeError(f"weight has dtype {weight.dtype}; with hidden in {dtype} it must be that or float32{codes}")
    check_shapes(hidden, weight, target, sequence_ranks)
    weight_shape = weight.shape
    if type(hidden) not in PLAIN_TYPES or type(weight) not in PLAIN_TYPES or type(target) not in PLAIN_TYPES:
        for name, tensor in (("hidden", hidden), ("weight", weight), ("target", target)):
            refuse_dtensor(name, tensor)
    if device.type not in DEVICE_TYPES:
        raise errors.PlacementError(f"hidden is on {device}; allowed are cpu and cuda")
    _check_place("weight", weight, device)
    _check_place("target", target, device)
    for name, numbers_of in of_classes.items():
        if numbers_of is not None:
            check_classes(name, numbers_of, weight_shape[0], device)
            if name != "bias":
                refuse_tangent(name, numbers_of)
            if name == "class_weight" and numbers_of.requires_grad:
                raise errors.ArgumentError(f"{name} requires a gradient; it has none here, detach it")


def check_shapes(hidden: Tensor, weight: Tensor, target: Tensor, sequence_ranks: int = 1) -> None:
    """Checks the shapes and dtypes that every way of computing the loss needs."""
    check_target_dtype(target)
    shape, weight_shape = hidden.shape, weight.shape
    if len(weight_shape) != 2:
        raise errors.ShapeError(f"weight has shape {list(weight_shape)}; it must be [vocab_size, hidden_size]")
    if len(shape) < 1 or shape[-1] != weight_shape[1]:
        turned = len(shape) > 0 and shape[-1] == weight_shape[0]
        more = (
            f" (weight has shape {list(weight_shape)}, which looks transposed: give weight.t(), [vocab_size, hidden_size])"
            if turned
            else ""
        )
        raise errors.ShapeError(f"hidden has shape {list(shape)}; its last dimension must be weight's hidden_size, {weight_shape[1]}{more}")
    if sequence_ranks > 1:
        if len(shape) < 2:
            raise errors.ShapeError(
                f"hidden has shape {list(shape)}; with sequence_parallel over {sequence_ranks} ranks it must be [..., hidden_size] with at "
                "least one dimension of tokens, of which it is this rank's part"
            )
        wanted = [shape[0] * sequence_ranks, *shape[1:-1]]
        if list(target.shape) != wanted:
            raise errors.ShapeError(
                f"target has shape {list(target.shape)}; with sequence_parallel over {sequence_ranks} ranks and hidden {list(shape)} "
                f"it must be {wanted}: all tokens, of which hidden is this rank's part"
            )
    elif shape[:-1] != target.shape:
        raise errors.ShapeError(
            f"target has shape {list(target.shape)}; it must be hidden's without the last dimension, {list(shape[:-1])}"
        )


def check_classes(name: str, tensor: Tensor, vocab_size: int, device: torch.device) -> None:
    if tensor.dtype not in DTYPES:
        raise errors.DTypeError(f"{name} has dtype {tensor.dtype}; allowed are float32, bfloat16, float16")
    if tensor.dim() != 1 or tensor.shape[0] != vocab_size:
        raise errors.ShapeError(f"{name} has shape {list(tensor.shape)}; it must be [vocab_size], [{vocab_size}]")
    refuse_dtensor(name, tensor)
    _check_place(name, tensor, device)


def _check_place(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise errors.PlacementError(f"{name} is on {tensor.device}; it must be on hidden's device, {device}")


def refuse_dtensor(name: str, tensor: Any, over_ranks: bool = False) -> None:
    """`over_ranks`: a process_group is given."""
    if over_ranks and is_dtensor(tensor):
        raise errors.PlacementError(
            f"{name} is a DTensor with placements {list(tensor.placements)}; beside process_group it must be a plain tensor: give "
            "to_local(), which for weights and biases is this rank's part of the classes"
        )
    if is_dtensor(tensor):
        raise errors.PlacementError(
            f"{name} is a DTensor with placements {list(tensor.placements)}; it must be a whole, local tensor: "
            "gather it with full_tensor(), run inside the module whose hooks unshard it, or, where the vocabulary lies over "
            "tensor-parallel ranks, give their process_group"
        )


def check_one_divisor(num_valid_tokens: Any, class_weight: Any, z_loss: Any) -> None:
    """Raises ArgumentError for a number of tokens where the mean of a loss has two divisors."""
    if num_valid_tokens is not None and class_weight is not None and z_loss:
        raise errors.ArgumentError(
            f"num_valid_tokens is given with class_weight and z_loss={z_loss}: the mean divides cross entropies by class weights and "
            "z-losses by rows, and one number does not stand for both. Leave one of the three out, or have z_loss=0 and return_lse=True "
            "and add z_loss * lse.square().sum() / rows"
        )


def num_valid(given: Tensor | float, reduction: str, hidden: Tensor) -> Tensor:
    if reduction != "mean":
        raise errors.ArgumentError(f"num_valid_tokens is given with reduction {reduction!r}; only 'mean' divides by it")
    if not isinstance(given, Tensor):
        if not isinstance(given, numbers.Real):
            raise errors.DTypeError(f"num_valid_tokens is a {type(given).__name__}; it must be a number or a tensor of one element")
        number = float(given)
        if not 0 <= number < math.inf:
            raise errors.ArgumentError(f"num_valid_tokens is {number}; it must be a finite number of 0 or more")
        return torch.full((), float(given), dtype=torch.float32, device=hidden.device)
    check_tensors(num_valid_tokens=given)
    if given.dtype.is_complex:
        raise errors.DTypeError(
            f"num_valid_tokens has dtype {given.dtype}; it must be real (float32, int32 and int64 are taken as they are)"
        )
    if given.numel() != 1:
        raise errors.ShapeError(f"num_valid_tokens has shape {list(given.shape)}; it must have one element")
    if given.device != hidden.device:
        raise errors.PlacementError(
            f"num_valid_tokens is on {given.device}; it must be on hidden's device, {hidden.device}, or a Python number"
        )
    given = given.detach().resolve_neg().reshape(())
    return given if given.dtype in COUNT_DTYPES else given.to(torch.float32)


# ── A number a token ────────────────────────────────


def check_temperature(given: Tensor, target: Tensor) -> None:
    if given.dtype is not torch.float32:
        raise errors.DTypeError(f"temperature has dtype {given.dtype}; a tensor of temperatures must be float32")
    _check_row_numbers("temperature", given, target)
    if given.requires_grad:
        raise errors.ArgumentError("temperature requires a gradient; it has none here, detach it")
    refuse_tangent("temperature", given)


def refuse_tangent(name: str, given: Tensor) -> None:
    """Refuses a tensor whose forward-mode tangent would be dropped."""
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0 and forward_ad.unpack_dual(given).tangent is not None:
        raise errors.UnsupportedTransformError(f"{name} has a forward-mode tangent; flce has no forward-mode derivatives: use backward")


def check_token_weight(given: Tensor | None, reduction: Any, target: Tensor) -> None:
    if given is None:
        if reduction == "weighted_mean":
            raise errors.ArgumentError("reduction is 'weighted_mean' and token_weight is None; it divides by the sum of token_weight")
        return
    if given.dtype.is_complex:
        raise errors.DTypeError(f"token_weight has dtype {given.dtype}; it must be real")
    _check_row_numbers("token_weight", given, target)
    refuse_tangent("token_weight", given)
    if given.requires_grad:
        raise errors.ArgumentError(
            "token_weight requires a gradient; it has none here: multiply the losses of reduction='none' by it instead, or detach it"
        )


def check_teacher(ids: Tensor, probs: Tensor, hidden: Tensor, target: Tensor | None, *, over_ranks: bool) -> int:
    """Returns K. `over_ranks`: hidden may be a part of the tokens."""
    check_tensors(teacher_ids=ids, teacher_probs=probs, hidden=hidden)
    if ids is None or probs is None:
        raise errors.DTypeError("teacher_ids and teacher_probs must be tensors, not None")
    top_k = check_ids("teacher_ids", ids, hidden, target, over_ranks=over_ranks)
    if not probs.dtype.is_floating_point:
        raise errors.DTypeError(f"teacher_probs has dtype {probs.dtype}; it must be a floating dtype (computed with in float32)")
    if probs.shape != ids.shape:
        raise errors.ShapeError(f"teacher_probs has shape {list(probs.shape)}; it must be teacher_ids', {list(ids.shape)}")
    refuse_dtensor("teacher_probs", probs)
    _check_place("teacher_probs", probs, hidden.device)
    if probs.requires_grad:
        raise errors.ArgumentError("teacher_probs requires a gradient; it has none here, detach it")
    return top_k


def check_ids(name: str, ids: Tensor, hidden: Tensor, target: Tensor | None, *, over_ranks: bool) -> int:
    """Returns K of ids [..., K]. `over_ranks`: hidden may be a part of the tokens."""
    if ids.dtype not in TARGET_DTYPES:
        raise errors.DTypeError(f"{name} has dtype {ids.dtype}; allowed are int64 and int32")
    refuse_dtensor("target", target)
    tokens, said = hidden.shape[:-1], "hidden's without the last dimension"
    if over_ranks:
        tokens, said = (target.shape, "target's") if isinstance(target, Tensor) else (ids.shape[:-1], "all tokens")
    if ids.dim() < 1 or ids.shape[:-1] != tokens or not 1 <= ids.shape[-1] <= MOST_TEACHER_TOP_K:
        raise errors.ShapeError(
            f"{name} has shape {list(ids.shape)}; it must be {said}, and K from 1 to {MOST_TEACHER_TOP_K}: {[*tokens, 'K']}"
        )
    refuse_dtensor(name, ids)
    _check_place(name, ids, hidden.device)
    return int(ids.shape[-1])


def _check_row_numbers(name: str, tensor: Tensor, target: Tensor) -> None:
    if tensor.shape != target.shape:
        raise errors.ShapeError(f"{name} has shape {list(tensor.shape)}; it must be target's, {list(target.shape)} (expand it)")
    refuse_dtensor(name, tensor)
    if tensor.device != target.device:
        raise errors.PlacementError(f"{name} is on {tensor.device}; it must be on hidden's device, {target.device}")
