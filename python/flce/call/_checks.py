"""Checks of tensors before their addresses go to a kernel, which reads and writes memory without gaps.

`_arguments` checks a caller's tensors. The functions here check tensors that reach a kernel by another way: the operators' arguments,
gradients that autograd gives to backward, and memory that gradients are added to.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor

from flce import errors
from flce.core import _autograd, _kernels, _zero3
from flce.core._frame import PLAIN_TYPES, ROW_ALIGNMENT, Inputs, is_hidden_major

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TARGET_DTYPES = (torch.int64, torch.int32)
COUNT_DTYPES = (torch.float32, torch.int32, torch.int64)
HIDDEN_MULTIPLE = 8
OLDEST_GPU = (8, 0)  # compute capability
_CHANGED = " (in backward: something changed it since forward, such as an assignment to .data or a hook on saved tensors)"


def check_inputs(given: Inputs, when: str = "") -> None:
    """Raises ShapeError, DTypeError, PlacementError or ArgumentError, with `when` at the end, where a kernel would read what is not
    there."""
    hidden, weight, options = given.hidden, given.weight, given.options
    for name in ("weight", "bias"):
        _zero3.refuse_ungathered(name, getattr(given, name), when)
    if hidden.dim() != 2:
        raise errors.ShapeError(f"hidden has shape {list(hidden.shape)}; it must be [num_tokens, hidden_size]{when}")
    num_tokens, hidden_size = hidden.shape
    if weight.dim() != 2 or weight.shape[1] != hidden_size:
        raise errors.ShapeError(f"weight has shape {list(weight.shape)}; it must be [vocab_size, {hidden_size}]{when}")
    classes = [weight.shape[0]]
    if options.parallel is not None:
        num_tokens = num_tokens * options.parallel.sequence_ranks
    _check_tensor("hidden", hidden, [hidden.shape[0], hidden_size], DTYPES, hidden.device, when)
    _check_tensor("weight", weight, [*classes, hidden_size], DTYPES, hidden.device, when)
    _check_tensor("target", given.target, [num_tokens], TARGET_DTYPES, hidden.device, when)
    for name, tensor in given.of_classes().items():
        if tensor is not None:
            _check_tensor(name, tensor, classes, DTYPES, hidden.device, when)
    for name in ("temperature", "token_weight"):
        if (tensor := getattr(given, name)) is not None:
            _check_tensor(name, tensor, [num_tokens], (torch.float32,), hidden.device, when)
    for name, tensor, shape in (("class_group", given.class_group, classes), ("row_group", given.row_group, [num_tokens])):
        if tensor is not None:
            _check_tensor(name, tensor, shape, (torch.int32,), hidden.device, when)
    top_k = options.outputs.teacher_top_k
    for name, dtypes in (("teacher_ids", TARGET_DTYPES), ("teacher_probs", (torch.float32,))):
        tensor = getattr(given, name)
        if (tensor is not None) != (top_k > 0):
            is_there = "absent" if tensor is None else "given"
            raise errors.ArgumentError(f"{name} is {is_there}, and the options say teacher_top_k={top_k}{when}")
        if tensor is not None:
            _check_tensor(name, tensor, [num_tokens, top_k], dtypes, hidden.device, when)
    if (count := given.num_valid) is not None:
        _check_tensor("num_valid_tokens", count, [] if count.dim() == 0 else [1], COUNT_DTYPES, hidden.device, when)


def _check_tensor(name: str, tensor: Tensor, shape: list[int], dtypes: tuple[torch.dtype, ...], device: torch.device, when: str) -> None:
    if list(tensor.shape) != shape:
        raise errors.ShapeError(f"{name} has shape {list(tensor.shape)}; it must be {shape}{when}")
    if tensor.dtype not in dtypes:
        raise errors.DTypeError(f"{name} has dtype {tensor.dtype}; allowed are {', '.join(map(str, dtypes))}{when}")
    if tensor.device != device:
        raise errors.PlacementError(f"{name} is on {tensor.device}; it must be on hidden's device, {device}{when}")
    if tensor.layout != torch.strided or tensor.is_neg():
        raise errors.ArgumentError(
            f"{name} is a tensor of layout {tensor.layout} or a negative view; it must be dense, see resolve_neg(){when}"
        )


def kernel_for_backward(
    kernel: _kernels.LoadedKernel | None, given: Inputs, saved: Tensor, grad_values: Tensor, grad_weight_out: Tensor | None = None
) -> _kernels.LoadedKernel:
    """`kernel`, which is forward's, or the one for these tensors where it is None or a hook on saved tensors gave back another dtype or
    device.

    Raises where a tensor does not have the form that it had in forward, so that no memory is read past its end."""
    check_inputs(given, _CHANGED)
    hidden, weight = given.hidden, given.weight
    if kernel is not None:
        key = kernel.key
        if weight.shape != (kernel.weight_rows, key.hidden_size):
            raise errors.ShapeError(f"weight has shape {list(weight.shape)}; it must be {[kernel.weight_rows, key.hidden_size]}{_CHANGED}")
    if kernel is None or hidden.device != kernel.device or hidden.dtype is not kernel.key.dtype:
        kernel = _kernels.find_for(given, grad_weight_out, backward=True)
    num_tokens = given.target.shape[0]
    _check_tensor("lse", saved, [kernel.outputs.saved_size(num_tokens)], (torch.float32,), hidden.device, _CHANGED)
    size = math.prod(kernel.outputs.shape((num_tokens,), num_tokens, given.options.reduction))
    if grad_values.numel() != size or grad_values.dtype != torch.float32:
        form = f"{grad_values.numel()} elements of {grad_values.dtype}"
        raise errors.ShapeError(f"the upstream gradient has {form}; it must have {size} of torch.float32{_CHANGED}")
    if grad_weight_out is not None:
        check_gradient_memory("grad_weight_out", grad_weight_out, weight, hidden_major=kernel.key.hidden_major, when=_CHANGED)
        if grad_weight_out.dtype is not kernel.key.grad_weight_dtype:
            raise errors.DTypeError(
                f"grad_weight_out has dtype {grad_weight_out.dtype}; it must be {kernel.key.grad_weight_dtype}{_CHANGED}"
            )
    return kernel


def check_grad_weight_out(buffer: Tensor, hidden: Tensor, weight: Tensor, **others: Tensor | None) -> None:
    """Raises unless backward can add the gradient of weight [V, D] to `buffer`; `others` are what else the call reads."""
    if not _autograd.knows_what_is_wanted():
        raise errors.UnavailableError(f"grad_weight_out is given, but {_autograd.UNKNOWN}; leave it out and take weight.grad")
    if buffer.dtype not in (hidden.dtype, torch.float32):
        raise errors.DTypeError(f"grad_weight_out has dtype {buffer.dtype}; allowed are {hidden.dtype} (hidden's) and float32")
    if type(buffer) in PLAIN_TYPES:  # others may have no memory of their own
        for name, other in (("hidden", hidden), ("weight", weight), *others.items()):
            if other is not None and _share_memory(buffer, other):
                raise errors.ArgumentError(f"grad_weight_out shares memory with {name}; the gradient is added to memory of its own")
    check_gradient_memory("grad_weight_out", buffer, weight, hidden_major=is_hidden_major(weight))
    if hidden.shape[-1] % HIDDEN_MULTIPLE:
        raise errors.ArgumentError(
            f"grad_weight_out is given with hidden_size {hidden.shape[-1]}; it must be a multiple of {HIDDEN_MULTIPLE}"
        )


def check_gradient_memory(name: str, buffer: Tensor, weight: Tensor, *, hidden_major: bool, when: str = "") -> None:
    """Raises unless `buffer` is memory for weight's gradient, as kernels write it: [V, D], or [D, V] for a hidden-major weight, without
    gaps.

    How the weight itself lies does not matter: kernels read a copy of a strided one."""
    if buffer.shape != weight.shape:
        raise errors.ShapeError(f"{name} has shape {list(buffer.shape)}; it must be weight's, {list(weight.shape)}{when}")
    if buffer.device != weight.device:
        raise errors.PlacementError(f"{name} is on {buffer.device}; it must be on weight's device, {weight.device}{when}")
    if type(buffer) not in PLAIN_TYPES or buffer.is_neg():
        kind = "a negative view" if buffer.is_neg() else f"a {type(buffer).__name__}"
        raise errors.ArgumentError(f"{name} is {kind}; it must be a plain tensor, on a DTensor to_local(){when}")
    if not (is_hidden_major(buffer) if hidden_major else buffer.is_contiguous()):
        vocab_size, hidden_size = weight.shape
        strides = [1, vocab_size] if hidden_major else [hidden_size, 1]
        raise errors.ArgumentError(
            f"{name} has strides {list(buffer.stride())}; they must be {strides}, weight's order without gaps, "
            "since kernels do not write to rows or "
            f"columns of a larger tensor: give it a tensor of its own, or let autograd add to .grad, which may have any strides{when}"
        )
    if buffer.requires_grad:
        raise errors.ArgumentError(
            f"{name} requires a gradient; the weight's gradient is added to memory that autograd does not follow{when}"
        )
    if buffer.data_ptr() % ROW_ALIGNMENT:
        raise errors.ArgumentError(
            f"{name} begins at {buffer.data_ptr():#x}; its address must be a multiple of {ROW_ALIGNMENT} bytes: "
            "begin slices of a flat buffer at "
            f"multiples of {ROW_ALIGNMENT // buffer.element_size()} elements{when}"
        )


def is_dtensor(tensor: Any) -> bool:
    if torch.compiler.is_compiling():
        return type(tensor).__name__ == "DTensor"
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether bytes between the first and the last element of both are the same ones. A tensor without elements begins at 0, before any
    memory, and shares none."""

    def extent(tensor: Tensor) -> tuple[int, int]:
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()

    try:
        (a_begin, a_end), (b_begin, b_end) = extent(a), extent(b)
    except RuntimeError:  # a tensor of torch's that stands for another
        return False
    return a.device == b.device and a_begin < b_end and b_begin < a_end
