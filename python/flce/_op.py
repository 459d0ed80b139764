"""The operators flce::linear_cross_entropy and flce::linear_cross_entropy_backward, and the autograd node that both eager code and compilers record.

Operators take hidden [N, D] contiguous, weight [V, D] (its transpose contiguous: no copy is made) of hidden's dtype or fp32, target [N];
`functional` brings arguments into that form. `options` is the part of a Spec's canonical text that is neither a size nor a dtype:
"softcap=30,outputs=loss+lse".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flce import _kernels, _native, errors

NO_GRADIENTS = (None, None, None)


def _is_hidden_major(weight: Tensor) -> bool:
    """Whether [V, D] is the view of a contiguous [D, V]."""
    return weight.stride(0) == 1 and weight.stride(1) == weight.shape[0]


def _find(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    options: str,
    workspace_limit_bytes: int,
    grad_weight_out: Tensor | None,
) -> _kernels.Kernel:
    return _kernels.find(
        hidden.device,
        hidden.shape[1],
        weight.shape[0],
        hidden.dtype,
        _is_hidden_major(weight),
        weight.dtype if grad_weight_out is None else grad_weight_out.dtype,
        grad_weight_out is not None,
        bias is not None,
        class_weight is not None,
        options,
        workspace_limit_bytes,
    )


def _prepare(
    kernel: _kernels.Kernel,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    num_valid: Tensor | None,
    ignore_index: int,
    reduction: int,
) -> _kernels.Call:
    dtype = kernel.key.dtype
    # An fp32 weight of 16-bit hidden states is rounded for this pass alone: what autograd saved is the weight itself.
    rows = weight if weight.dtype is dtype else weight.to(dtype)
    if kernel.key.hidden_major:
        rows = rows.t()
    if bias is not None:
        bias = bias.to(dtype).contiguous()
    if class_weight is not None:
        class_weight = class_weight.to(torch.float32).contiguous()
    if not target.is_contiguous():
        target = target.contiguous()
    hidden, rows = _kernels.contiguous_rows(hidden), _kernels.contiguous_rows(rows)
    return _kernels.Call(hidden, rows, target, bias, class_weight, num_valid, ignore_index, reduction)


def run_forward(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    num_valid: Tensor | None,
    options: str,
    ignore_index: int,
    reduction: int,
    workspace_limit_bytes: int,
    grad_weight_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(values, saved) as `_kernels.Kernel.forward` describes them."""
    kernel = _find(hidden, weight, bias, class_weight, options, workspace_limit_bytes, grad_weight_out)
    return kernel.forward(_prepare(kernel, hidden, weight, target, bias, class_weight, num_valid, ignore_index, reduction))


def run_backward(
    grad_values: Tensor,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    saved: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    num_valid: Tensor | None,
    options: str,
    ignore_index: int,
    reduction: int,
    workspace_limit_bytes: int,
    wanted: Sequence[bool],
    grad_weight_out: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias, None where `wanted` is false. With `grad_weight_out` the weight's is added there and None here."""
    kernel = _find(hidden, weight, bias, class_weight, options, workspace_limit_bytes, grad_weight_out)
    call = _prepare(kernel, hidden, weight, target, bias, class_weight, num_valid, ignore_index, reduction)
    wide = kernel.key.grad_weight_dtype
    grad_hidden = torch.empty_like(hidden) if wanted[0] else None
    rows: Tensor | None = None
    if wanted[1]:
        if grad_weight_out is None:
            rows = torch.empty_like(call.weight, dtype=wide)
        else:
            rows = grad_weight_out.t() if kernel.key.hidden_major else grad_weight_out
    grad_bias: Tensor | None = None
    if wanted[2] and bias is not None:
        # An accumulating kernel adds to the bias gradient too; autograd wants this call's alone.
        make = torch.zeros if kernel.key.accumulate else torch.empty
        grad_bias = make(bias.shape, dtype=wide, device=hidden.device)
    if grad_hidden is None and rows is None and grad_bias is None:
        return NO_GRADIENTS
    kernel.backward(call, saved, grad_values.contiguous(), grad_hidden, rows, grad_bias)
    if grad_bias is not None and bias is not None:
        grad_bias = grad_bias.to(bias.dtype)
    if rows is None or grad_weight_out is not None:
        return grad_hidden, None, grad_bias
    return grad_hidden, rows.t() if kernel.key.hidden_major else rows, grad_bias


class NoSecondDerivative(torch.autograd.Function):
    """The identity on a gradient; refuses to be differentiated, where torch would silently return zeros."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise errors.UnsupportedTransformError(
            "flce.linear_cross_entropy has no second derivatives: differentiate its gradients with the loss written in plain torch instead"
        )


def _refuse_second_derivative(gradients: Sequence[Tensor | None], sources: Sequence[Tensor | None]) -> list[Tensor | None]:
    tracked = [source for source in sources if source is not None and source.requires_grad]
    if not tracked:
        return list(gradients)
    return [None if gradient is None else NoSecondDerivative.apply(gradient, *tracked) for gradient in gradients]


_SMALL = 1 << 16  # multiply-adds
_engine_will_run = getattr(torch._C, "_will_engine_execute_node", None)


def _wanted(ctx: Any, hidden: Tensor, weight: Tensor) -> list[bool]:
    """Whether this run of the engine uses the gradients of hidden, weight and bias. needs_input_grad says what forward's inputs required; a schedule
    that runs backward for activations first and for weights later asks for less each time."""
    wanted = list(ctx.needs_input_grad[:3])
    if _engine_will_run is None or sum(wanted) < 2:
        return wanted
    # Asking takes some microseconds, in which small gradients are long made. (Not where one would be added to a buffer unasked, nor while tracing: no
    # choice may hang on the number of tokens there.)
    if not ctx.dispatch and ctx.grad_weight_out is None and hidden.shape[0] * weight.numel() < _SMALL:
        return wanted
    # One edge a tensor input, in order: a missing bias has none, but is not wanted either.
    for i, (node, _) in enumerate(ctx.next_functions[:3]):
        if wanted[i] and node is not None:
            try:
                wanted[i] = _engine_will_run(node)
            except RuntimeError:
                pass  # what the engine refuses to say it of is a leaf that autograd.grad() was asked for
    return wanted


class LinearCrossEntropyFunction(torch.autograd.Function):
    """The node. The differentiable inputs come first (`_wanted` counts on it). With `dispatch` it goes through the operators."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        num_valid: Tensor | None,
        call: tuple[str, int, int, int],
        grad_weight_out: Tensor | None,
        dispatch: bool,
    ) -> Any:
        ctx.dispatch, ctx.call, ctx.grad_weight_out = dispatch, call, grad_weight_out
        if dispatch:
            with torch._C._AutoDispatchBelowAutograd():
                values, saved = _forward_op(hidden, weight, target, bias, class_weight, num_valid, *call)
            ctx.mark_non_differentiable(saved)
        else:
            values, saved = run_forward(hidden, weight, target, bias, class_weight, num_valid, *call, grad_weight_out)
        ctx.save_for_backward(hidden, weight, target, saved, bias, class_weight, num_valid)
        return (values, saved) if dispatch else values

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        grad_values = grad_outputs[0]
        hidden, weight, target, saved, bias, class_weight, num_valid = ctx.saved_tensors
        wanted = _wanted(ctx, hidden, weight)
        gradients: Sequence[Tensor | None]
        inputs: tuple[Any, ...] = (grad_values, hidden, weight, target, saved, bias, class_weight, num_valid, *ctx.call, wanted)
        if ctx.dispatch:
            gradients = [value if want else None for value, want in zip(_backward_op(*inputs), wanted, strict=True)]
        else:
            inputs = (*inputs, ctx.grad_weight_out)
            gradients = run_backward(*inputs)
            if torch.is_grad_enabled():
                gradients = _refuse_second_derivative(gradients, (grad_values, hidden, weight, bias))
        return *gradients, None, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise errors.UnsupportedTransformError(
            "flce.linear_cross_entropy has no forward-mode derivatives: use reverse mode (backward, autograd.grad)"
        )


# ── torch.library ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────

_INPUTS = "Tensor hidden, Tensor weight, Tensor target"
_OPTIONAL = "Tensor? bias, Tensor? class_weight, Tensor? num_valid"
_CALL = "str options, int ignore_index, int reduction, int workspace_limit_bytes"

_library = torch.library.Library("flce", "DEF")
_tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_library.define(f"linear_cross_entropy({_INPUTS}, {_OPTIONAL}, {_CALL}) -> (Tensor values, Tensor saved)", tags=_tags)
_library.define(
    f"linear_cross_entropy_backward(Tensor grad_values, {_INPUTS}, Tensor saved, {_OPTIONAL}, {_CALL}, bool[3] wanted)"
    " -> (Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)",
    tags=_tags,
)
_forward_op: Callable[..., tuple[Tensor, Tensor]] = torch.ops.flce.linear_cross_entropy.default
_backward_op: Callable[..., tuple[Tensor, Tensor, Tensor]] = torch.ops.flce.linear_cross_entropy_backward.default


def _backward_kernel(grad_values: Tensor, *args: Any) -> tuple[Tensor, ...]:
    gradients = run_backward(grad_values, *args)
    return tuple(grad_values.new_empty(0) if gradient is None else gradient for gradient in gradients)


def _forward_fake(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    num_valid: Tensor | None,
    options: str,
    ignore_index: int,
    reduction: int,
    workspace_limit_bytes: int,
) -> tuple[Tensor, Tensor]:
    num_tokens = hidden.shape[0]
    extra = _kernels.extra_outputs(options)
    saved = hidden.new_empty(2 * num_tokens if "entropy" in extra else num_tokens, dtype=torch.float32)
    per_token = reduction == _native.REDUCTION_NONE
    if not extra:
        return hidden.new_empty((num_tokens,) if per_token else (), dtype=torch.float32), saved
    first = num_tokens if per_token else 1
    return hidden.new_empty(first + len(extra) * num_tokens, dtype=torch.float32), saved


def _backward_fake(
    grad_values: Tensor, hidden: Tensor, weight: Tensor, target: Tensor, saved: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    wanted = rest[-1]
    none = grad_values.new_empty(0)
    grad_hidden = torch.empty_like(hidden) if wanted[0] else none
    grad_weight = none
    if wanted[1]:
        grad_weight = weight.new_empty(weight.shape[::-1]).t() if _is_hidden_major(weight) else weight.new_empty(weight.shape)
    grad_bias = bias.new_empty(bias.shape) if wanted[2] and bias is not None else grad_values.new_empty(0)
    return grad_hidden, grad_weight if wanted[1] else grad_values.new_empty(0), grad_bias


def _forward_autograd(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    num_valid: Tensor | None,
    *call: Any,
) -> Any:
    return LinearCrossEntropyFunction.apply(hidden, weight, bias, target, class_weight, num_valid, call, None, True)


def _backward_autograd(grad_values: Tensor, hidden: Tensor, weight: Tensor, target: Tensor, saved: Tensor, bias: Any, *rest: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        gradients = _backward_op(grad_values, hidden, weight, target, saved, bias, *rest)
    if not torch.is_grad_enabled():
        return gradients
    return tuple(_refuse_second_derivative(gradients, (grad_values, hidden, weight, bias)))


def _refuse_transform(*args: Any, **kwargs: Any) -> Any:
    raise errors.UnsupportedTransformError(
        "flce.linear_cross_entropy cannot run under a transform of torch.func (vmap, grad, jvp, …): fold the mapped dimension into the tokens, "
        "and use backward or autograd.grad for gradients"
    )


for _name, _forward_or_backward, _autograd, _fake in (
    ("linear_cross_entropy", run_forward, _forward_autograd, _forward_fake),
    ("linear_cross_entropy_backward", _backward_kernel, _backward_autograd, _backward_fake),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _forward_or_backward, _key)
    _library.impl(_name, _autograd, "Autograd")
    _library.impl(_name, _refuse_transform, "FuncTorchBatched")
    torch.library.register_fake(f"flce::{_name}", _fake, lib=_library)
