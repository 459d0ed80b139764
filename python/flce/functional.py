"""`linear_cross_entropy`: what everything else in this package, and most callers, use."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from flce import _kernels, _op, _retain, errors
from flce._checks import COUNT_DTYPES, DTYPES, HIDDEN_MULTIPLE, check_grad_weight_out, is_dtensor
from flce._direct import DirectCall
from flce._frame import PLAIN_TYPES, Inputs
from flce._targets import check_ignore_index, check_target_dtype, check_tensors, shift_labels

REDUCTIONS = {"none": 0, "sum": 1, "mean": 2}
DEVICE_TYPES = ("cpu", "cuda", "meta")
_LONG = 1 << 63

_dispatch_modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", None)
_tracing_state: Any = getattr(torch._C, "_get_tracing_state", lambda: None)  # of torch.jit.trace
_any_autocast: Any = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
_transforms: Any = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_valid_tokens: Tensor | float | None = None,
    shift: int = 0,
    cu_seqlens: Tensor | None = None,
    logit_scale: float | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    return_lse: bool = False,
    return_logprobs: bool = False,
    return_entropy: bool = False,
    class_weight: Tensor | None = None,
    workspace_limit_bytes: int | None = None,
    retain_in_grad_weight: bool | None = None,
    grad_weight_out: Tensor | None = None,
) -> Any:
    """Cross entropy of softcap(logit_scale · (hidden · weightᵀ + bias)) against target, plus z_loss · lse² a token, without the
    logits in memory.

    Args:
        hidden: [..., D] fp32, bf16 or fp16, on the CPU or a CUDA device. Made contiguous if it is not. D not a multiple of 8 is padded (a
            copy of hidden and weight).
        weight: [V, D], of hidden's dtype, or fp32 beside 16-bit hidden states (kernels round it as they read it, within the limit; its
            gradient is fp32). The view `w.t()` of a contiguous [D, V] is taken as it lies.
        target: [...] int64 or int32. Rows that hold ignore_index, and rows out of [0, V) (see `check_labels`), count for nothing.
        bias: [V].
        reduction: "none" gives [...], 0 for ignored rows; "sum" and "mean" a scalar. All fp32. With no valid row, loss and gradients are 0.
        num_valid_tokens: what "mean" divides by: a number or a one-element tensor (fp32, int32, int64) on hidden's device, such as the
            count of all microbatches. None: this call's valid rows (with class_weight: their class weights), counted on the device.
        shift: position t predicts target[t + shift] of the same sequence; the last `shift` positions of each are ignored. Sequences lie
            along target's last dimension, or, with cu_seqlens [num_sequences + 1], one behind the other in the flattened target; that
            dimension, or the flattened target, is 0 or at least `shift` long.
        logit_scale, softcap, label_smoothing, z_loss, class_weight: numbers, and [V] for class_weight, with torch's meaning of smoothing
            and weights.
        return_lse, return_logprobs, return_entropy: also return lse, the target's log-probability, the softmax's entropy (nats): [...]
            fp32, 0 for ignored rows, differentiable.
        workspace_limit_bytes: the most memory that this call takes beyond its inputs, outputs and their gradients, in forward and backward:
            scratch, backward's fp32 sum of hidden's gradient (4·N·D bytes) and what forward leaves to backward so that logits need not be
            computed again. None: 64 MiB + 4·N·D, with nothing left. Every loss that waits for its backward holds its own. Any number is
            allowed: memory beyond what is of use is not taken.
        retain_in_grad_weight: whether forward may already allocate weight's gradient and leave there what spares backward logits. None:
            where one loss at a time waits for its backward, as far as was seen so far, and not while a CUDA graph is captured. On a GPU
            gradients are rounded once more where they come from what was left; on a CPU their bits are the same.
        grad_weight_out: [V, D] of weight's dtype or fp32: backward adds weight's gradient to it, and autograd gets none for weight
            (`weight.grad` itself, or a trainer's main_grad). Contiguous (where weight is the view `w.t()` of a contiguous [D, V]: such a
            view), at a multiple of 16 bytes, D a multiple of 8; a slice of a flat buffer will do, rows or columns of a larger tensor will
            not. Eager mode only; hooks on the weight's gradient do not run. `torch.autograd.grad` of a weight that is a leaf, or of the
            leaf that weight is a view of, returns the gradient and leaves this buffer alone.

    Returns:
        loss, or (loss, lse, logprobs, entropy) with those that were asked for.

    Raises:
        ShapeError, DTypeError, PlacementError, ArgumentError: naming the argument and what is allowed, before anything runs.
        SpecError, PlanError: an option out of its range; a limit that is too small.
        UnsupportedTransformError: under vmap and other torch.func transforms; on a second, forward-mode or batched derivative.
        UnavailableError, CompileError, DeviceError: the kernel cannot be had or run.
    """
    if shift or cu_seqlens is not None:
        target = shift_labels(target, shift, ignore_index=ignore_index, cu_seqlens=cu_seqlens)
    options = None
    if bias is None and class_weight is None and num_valid_tokens is None and grad_weight_out is None and not torch.compiler.is_compiling():
        extra_outputs = (return_lse, return_logprobs, return_entropy)
        memory = (workspace_limit_bytes, retain_in_grad_weight)
        numbers_given = (ignore_index, logit_scale, softcap, label_smoothing, z_loss)
        # With their types: 1, 1.0 and True are equal, and not all of them are taken for every argument.
        types = (type(ignore_index), type(logit_scale), type(softcap), type(label_smoothing), type(z_loss))
        options = (reduction, numbers_given, types, memory, type(workspace_limit_bytes), type(retain_in_grad_weight), extra_outputs)
        try:
            call = _latest.get(options)
        except TypeError:  # an argument that cannot be hashed is refused by the checks
            options = call = None
        if call is not None and not _dispatch_modes() and _transforms() is None and _tracing_state() is None:
            loss = call.loss(hidden, weight, target)
            if loss is not None:
                return loss
    check_tensors(hidden=hidden, weight=weight, target=target, bias=bias, class_weight=class_weight, grad_weight_out=grad_weight_out)
    plain = _is_plain(hidden, weight, bias, class_weight, target)
    signature = passed = None
    if plain and options is not None and not _any_autocast():
        # Everything that the checks below look at: what has passed them passes again.
        signature = (
            *(type(hidden), hidden.shape, hidden.dtype, hidden.device, hidden.requires_grad, hidden.is_inference()),
            *(type(weight), weight.shape, weight.dtype, weight.device, weight.requires_grad, weight.stride()),
            *(target.shape, target.dtype, target.device, options),
        )
        passed = _passed.get(signature)
        if passed is not None and (loss := passed.call_directly(options, hidden, weight, target)) is not None:
            return loss
    num_valid = None
    if passed is None:
        hidden, weight = _autocast(hidden, weight)
        _check_inputs(hidden, weight, target, bias, class_weight)
        if num_valid_tokens is not None:
            num_valid = _num_valid(num_valid_tokens, reduction, hidden)
        if grad_weight_out is not None:
            check_grad_weight_out(
                grad_weight_out, hidden, weight, target=target, bias=bias, class_weight=class_weight, num_valid_tokens=num_valid
            )
        code = REDUCTIONS.get(reduction) if isinstance(reduction, str) else None
        if code is None:
            raise errors.ArgumentError(f"reduction is {reduction!r}; allowed are 'none', 'sum', 'mean'")
        extra = [name for name, asked in (("lse", return_lse), ("logprob", return_logprobs), ("entropy", return_entropy)) if asked]
        text = options_text(logit_scale, softcap, label_smoothing, z_loss, extra)
        limit, choice = _workspace_limit(workspace_limit_bytes), _retain_choice(retain_in_grad_weight)
        passed = _Passed((text, check_ignore_index(ignore_index), code, limit, choice), len(extra))
        if signature is not None:
            _remember(signature, passed)

    token_shape = target.shape
    if len(token_shape) != 1:
        hidden = hidden.reshape(-1, hidden.shape[-1])
        target = target.reshape(-1)
    if hidden.shape[1] % HIDDEN_MULTIPLE:
        padding = -hidden.shape[1] % HIDDEN_MULTIPLE
        hidden, weight = F.pad(hidden, (0, padding)), F.pad(weight, (0, padding))
    if not hidden.is_contiguous():
        hidden = hidden.contiguous()
    given = Inputs(hidden, weight, target, bias, class_weight, num_valid, *passed.call)
    values = _eager(given, passed, grad_weight_out, token_shape) if plain else _through_operator(given, grad_weight_out)
    return _own_outputs(values, given, token_shape, passed.num_extra)


class _Passed:
    """What the checks of a call's arguments came to."""

    __slots__ = ("call", "direct", "kernel", "num_extra")

    def __init__(self, call: tuple[str, int, int, int, int], num_extra: int) -> None:
        self.call = call  # the last fields of Inputs
        self.num_extra = num_extra
        self.kernel: _kernels.Kernel | None = None  # once it is looked up, of calls that are remembered
        self.direct: DirectCall | None = None

    def call_directly(self, options: tuple[Any, ...], hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor | None:
        """The loss by a DirectCall, made at the second such call; None where there can be none."""
        call = self.direct
        if call is None:
            if self.kernel is None or self.num_extra or not DirectCall.fits(self.kernel, hidden, weight, target):
                return None
            call = self.direct = DirectCall(self.kernel, hidden, weight, target, self.call)
        loss = call.loss(hidden, weight, target)
        if loss is not None:
            _latest[options] = call
        return loss


_passed: dict[tuple[Any, ...], _Passed] = {}
_latest: dict[tuple[Any, ...], DirectCall] = {}  # by the options of the call
_MOST_REMEMBERED = 1024


def _remember(signature: tuple[Any, ...], passed: _Passed) -> None:
    if len(_passed) >= _MOST_REMEMBERED:
        forget()
    _passed[signature] = passed


def forget() -> None:
    """Forgets what has passed the checks: the next calls are looked at anew."""
    _passed.clear()
    _latest.clear()


def options_text(
    logit_scale: float | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    extra_outputs: Sequence[str] = (),
) -> str:
    """The options as keys of a Spec's text; what is at its default is left out."""
    parts = []
    values = {
        "logit_scale": (logit_scale, 1.0),
        "softcap": (softcap, 0.0),
        "label_smoothing": (label_smoothing, 0.0),
        "z_loss": (z_loss, 0.0),
    }
    for name, (value, default) in values.items():
        if value is not None and (number := _number(name, value)) != default:
            parts.append(f"{name}={number!r}")
    if extra_outputs:
        parts.append("outputs=loss+" + "+".join(extra_outputs))
    return ",".join(parts)


def _number(name: str, value: Any) -> float:
    if not isinstance(value, (int, float)) and not isinstance(value, numbers.Real):
        raise errors.DTypeError(f"{name} is a {type(value).__name__}; it must be a number (a constant, not a tensor)")
    return float(value)


def _through_operator(given: Inputs, grad_weight_out: Tensor | None) -> Tensor:
    if grad_weight_out is not None:
        raise errors.ArgumentError(
            "grad_weight_out is for eager mode; leave it out under torch.compile, dispatch modes and tensor subclasses"
        )
    values: Tensor = torch.ops.flce.linear_cross_entropy(*given)[0]
    return values


def _own_outputs(values: Tensor, given: Inputs, token_shape: torch.Size, num_extra: int) -> Any:
    """The loss, and the extra outputs if any, as tensors of their own: copies, since autograd takes a change of one view for a change of
    all views of that tensor, and refuses some changes."""
    loss_shape = token_shape if given.reduction == REDUCTIONS["none"] else ()
    if not num_extra:
        return values if values.shape == loss_shape else values.view(loss_shape).clone()
    loss, *extra = _kernels.split_values(values, given.target.shape[0], num_extra)
    return loss.view(loss_shape).clone(), *(output.view(token_shape).clone() for output in extra)


def _eager(given: Inputs, passed: _Passed, grad_weight_out: Tensor | None, token_shape: torch.Size) -> Tensor:
    kernel = passed.kernel
    if kernel is None:
        kernel = passed.kernel = _kernels.find_for(given, grad_weight_out)
    hidden, weight, bias = given.hidden, given.weight, given.bias
    needs_gradient = hidden.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    # Where there are tangents, the node refuses them.
    if (needs_gradient and torch.is_grad_enabled()) or forward_ad._current_level >= 0:
        if kernel.retains:
            given = given._replace(retain=_retain.wanted(given.retain, weight=weight.requires_grad and grad_weight_out is None))
        return _op.apply_directly(hidden, weight, bias, given, kernel, grad_weight_out, token_shape)
    values = kernel.new_values(given, token_shape)
    kernel.forward(given, values)
    return values


def _is_plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, class_weight: Tensor | None, target: Tensor) -> bool:
    """Whether the call may go to the kernels directly: eager, ordinary tensors, nobody watching the dispatcher."""
    if torch.compiler.is_compiling() or _transforms is None or _dispatch_modes is None or _tracing_state() is not None:
        return False
    if _transforms() is not None:
        _op._refuse_transform()
    return (
        not _dispatch_modes()
        and type(hidden) in PLAIN_TYPES
        and type(weight) in PLAIN_TYPES
        and type(target) in PLAIN_TYPES
        and (bias is None or type(bias) in PLAIN_TYPES)
        and (class_weight is None or type(class_weight) in PLAIN_TYPES)
        and not hidden.is_meta
        # the dispatcher resolves it
        and not any(tensor is not None and tensor.is_neg() for tensor in (hidden, weight, bias, class_weight, target))
    )


def _in_autocast(hidden: Tensor) -> bool:
    device_type = hidden.device.type
    return device_type in ("cpu", "cuda") and torch.is_autocast_enabled(device_type)


def _autocast(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    if not _in_autocast(hidden):
        return hidden, weight
    device_type = hidden.device.type
    dtype = torch.get_autocast_dtype(device_type)
    if hidden.dtype in DTYPES and hidden.dtype != dtype:
        hidden = hidden.to(dtype)
    # An fp32 weight stays: kernels round it as they read it, so that there is no rounded copy.
    if weight.dtype in DTYPES and weight.dtype not in (dtype, torch.float32):
        weight = weight.to(dtype)
    return hidden, weight


def _check_inputs(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None) -> None:
    dtype, device = hidden.dtype, hidden.device
    if dtype not in DTYPES:
        raise errors.DTypeError(f"hidden has dtype {dtype}; allowed are float32, bfloat16, float16")
    if weight.dtype is not dtype and weight.dtype is not torch.float32:
        raise errors.DTypeError(f"weight has dtype {weight.dtype}; with hidden in {dtype} it must be that or float32")
    check_shapes(hidden, weight, target)
    weight_shape = weight.shape
    if type(hidden) not in PLAIN_TYPES or type(weight) not in PLAIN_TYPES or type(target) not in PLAIN_TYPES:
        for name, tensor in (("hidden", hidden), ("weight", weight), ("target", target)):
            refuse_dtensor(name, tensor)
    if device.type not in DEVICE_TYPES:
        raise errors.PlacementError(f"hidden is on {device}; allowed are cpu and cuda")
    _check_place("weight", weight, device)
    _check_place("target", target, device)
    if bias is not None:
        check_classes("bias", bias, weight_shape[0], device)
    if class_weight is not None:
        check_classes("class_weight", class_weight, weight_shape[0], device)
        if class_weight.requires_grad:
            raise errors.ArgumentError("class_weight requires a gradient; it has none here, detach it")


def check_shapes(hidden: Tensor, weight: Tensor, target: Tensor) -> None:
    """What every way of computing the loss asks of its tensors."""
    check_target_dtype(target)
    shape, weight_shape = hidden.shape, weight.shape
    if len(weight_shape) != 2:
        raise errors.ShapeError(f"weight has shape {list(weight_shape)}; it must be [vocab_size, hidden_size]")
    if len(shape) < 1 or shape[-1] != weight_shape[1]:
        raise errors.ShapeError(f"hidden has shape {list(shape)}; its last dimension must be weight's hidden_size, {weight_shape[1]}")
    if shape[:-1] != target.shape:
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


def refuse_dtensor(name: str, tensor: Any) -> None:
    if is_dtensor(tensor):
        raise errors.PlacementError(
            f"{name} is a DTensor with placements {list(tensor.placements)}; it must be a whole, local tensor: "
            "gather it with full_tensor(), or run inside the module whose hooks unshard it"
        )


def _num_valid(given: Tensor | float, reduction: str, hidden: Tensor) -> Tensor:
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
    given = given.detach().resolve_neg()
    return given if given.dtype in COUNT_DTYPES else given.to(torch.float32)


def _workspace_limit(given: int | None) -> int:
    if given is None:
        return 0
    if not isinstance(given, int) or isinstance(given, bool) or not 0 < given < _LONG:
        raise errors.ArgumentError(f"workspace_limit_bytes is {given!r}; it must be a positive number of bytes, below 2^63, or None")
    return given


def _retain_choice(given: bool | None) -> int:
    if given is not None and not isinstance(given, bool):
        raise errors.ArgumentError(f"retain_in_grad_weight is {given!r}; allowed are True, False and None (automatic)")
    return _retain.CHOICES[given]
