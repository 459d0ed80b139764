"""The operators flce::linear_quantized and flce::linear_quantized_backward: a layer whose weight is codes and scales, and frozen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flce import errors
from flce.call import _op
from flce.core import _frame, _kernels, _native, _retain
from flce.operators import _passes


class _Inputs(NamedTuple):
    """The inputs of both passes, as the ABI names them."""

    hidden: Tensor
    weight: Tensor  # [V, D] or [V, D / 2]
    weight_scale: Tensor
    weight_tensor_scale: Tensor | None
    target: Tensor
    bias: Tensor | None
    class_offset: Tensor | None
    temperature: Tensor | None
    token_weight: Tensor | None
    num_valid: Tensor | None
    teacher_ids: Tensor | None  # [N, K], classes whose log-probabilities are wanted

    def place(self, options: str, parallel: str, *, backward: bool = False) -> _passes.Place | None:
        of_tokens = {name: getattr(self, name) for name in ("target", "temperature", "token_weight", "teacher_ids")}
        given = {name: getattr(self, name) is not None for name in ("bias", "class_offset", *of_tokens)}
        return _passes.place_of(parallel, self.hidden, self.weight, of_tokens, options, given, backward=backward)

    def kernel(self, options: str, workspace_limit_bytes: int, place: _passes.Place | None) -> _kernels.LoadedKernel:
        flags = {name: getattr(self, name) is not None for name in ("bias", "class_offset", "temperature", "token_weight")}
        codes = _passes.codes_of(self.weight_scale, self.weight_tensor_scale)
        return _passes.kernel_of(self.hidden, self.weight, options, workspace_limit_bytes, place, codes=codes, **flags)

    def as_read(self) -> dict[str, Tensor]:
        return {name: _frame._aligned(each.contiguous()) for name, each in self._asdict().items() if each is not None}


def _forward_kernel(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, [N] with reduction "none", the other values [values, N], what backward reads [saved, N], top1 [N], log-probabilities of
    teacher_ids [N, K], what is retained for backward [bytes])"""
    *tensors, options, ignore_index, reduction, workspace_limit_bytes, parallel, retain = given
    inputs = _Inputs(*tensors)
    place = inputs.place(options, parallel)
    kernel = inputs.kernel(options, workspace_limit_bytes, place)
    outputs, num_tokens = _frame.outputs_of(options), inputs.hidden.shape[0]
    loss, values, saved = (kernel.new_floats(shape) for shape in _shapes(outputs, num_tokens, reduction))
    top1 = inputs.hidden.new_empty(num_tokens if outputs.top1 else 0, dtype=torch.int64)
    named = kernel.new_floats((num_tokens, outputs.teacher_top_k))
    written = dict(zip(outputs.saved, saved.unbind(0), strict=True))
    read = inputs.as_read()
    if outputs.teacher_top_k:
        read["teacher_probs"], written["teacher_logprobs"] = torch.zeros_like(named), named
    copied = []
    for name, value in zip(_values(outputs), values.unbind(0), strict=True):
        if written.setdefault(name, value) is not value:
            copied.append((value, written[name]))
    if "loss" in outputs.values:
        written["loss"] = loss
    if outputs.top1:
        written["top1"] = top1
    retained = kernel.new_bytes(_retained_bytes(kernel, num_tokens, workspace_limit_bytes, place) if retain else 0)
    _passes.forward(kernel, place, read, written, retained=retained, rule=(ignore_index, reduction))
    for value, statistic in copied:  # the caller may change an output in place
        value.copy_(statistic)
    return loss, values, saved, top1, named, retained


def _retained_bytes(kernel: _kernels.LoadedKernel, num_tokens: int, limit: int, place: _passes.Place | None) -> int:
    """Bytes that a limit leaves for what forward spares backward. An entropy may have a gradient, for which it is no use."""
    classes = 0 if place is None else place.shard.classes
    if not limit or not kernel.retains or "entropy" in kernel.outputs.values or (place is not None and classes == 0):
        return 0
    return _native.choose_retained(kernel._handle, num_tokens, limit, False, _retain.LEAST_WORK, classes)[1]


def _values(outputs: _frame.Outputs) -> tuple[str, ...]:
    return tuple(name for name in outputs.values if name != "loss")


def _shapes(outputs: _frame.Outputs, num_tokens: int, reduction: int) -> tuple[tuple[int, ...], ...]:
    loss = () if reduction != _native.REDUCTION_NONE else (num_tokens,)
    return loss if "loss" in outputs.values else (0,), (len(_values(outputs)), num_tokens), (len(outputs.saved), num_tokens)


def _backward_kernel(*given: Any) -> tuple[Tensor, Tensor]:
    grad_loss, grad_values, grad_named, saved, named, retained, *tensors = given[:-_NO_TENSORS]
    options, ignore_index, reduction, limit, parallel, wanted = given[-_NO_TENSORS:]
    inputs = _Inputs(*tensors)
    place = inputs.place(options, parallel, backward=True)
    kernel = inputs.kernel(options, limit, place)
    outputs, num_tokens = _frame.outputs_of(options), inputs.hidden.shape[0]
    shapes = (*_shapes(outputs, num_tokens, reduction), (num_tokens, outputs.teacher_top_k))
    if [tuple(each.shape) for each in (grad_loss, grad_values, saved, named)] != list(shapes) or grad_named.shape != named.shape:
        raise errors.ShapeError(_CHANGED)
    read = inputs.as_read() | dict(zip(outputs.saved, saved.contiguous().unbind(0), strict=True))
    if "loss" in outputs.values:
        read["grad_loss"] = grad_loss.resolve_neg().contiguous()
    if outputs.teacher_top_k:  # a loss of -Σ q·log p with these q has the gradients of log-probabilities
        read |= {"teacher_probs": -grad_named.resolve_neg().contiguous(), "teacher_logprobs": named.contiguous()}
        read["grad_loss"] = torch.ones_like(read["grad_loss"])
    for name, gradient in zip(_values(outputs), grad_values.resolve_neg().contiguous().unbind(0), strict=True):
        if name in _frame.DIFFERENTIABLE:
            read[f"grad_{name}"] = gradient
    made = {f"grad_{name}": torch.empty_like(read[name]) for name, want in zip(("hidden", "bias"), wanted, strict=True) if want}
    if made:
        _passes.backward(kernel, place, read, made, _frame._aligned(retained.contiguous()), rule=(ignore_index, reduction))
    none = grad_values.new_empty(0)
    return made.get("grad_hidden", none), made.get("grad_bias", none)


def _forward_fake(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    hidden, (*_, options, _, reduction, _, _, _) = given[0], given
    outputs = _frame.outputs_of(options)
    loss, values, saved = (hidden.new_empty(shape, dtype=torch.float32) for shape in _shapes(outputs, hidden.shape[0], reduction))
    named = hidden.new_empty((hidden.shape[0], outputs.teacher_top_k), dtype=torch.float32)
    top1 = hidden.new_empty(hidden.shape[0] if outputs.top1 else 0, dtype=torch.int64)
    return loss, values, saved, top1, named, hidden.new_empty(0, dtype=torch.uint8)  # how much is retained is a kernel's choice


def _backward_fake(*given: Any) -> tuple[Tensor, Tensor]:
    _, grad_values, _, _, _, _, *tensors = given[:-_NO_TENSORS]
    wanted = given[-1]
    inputs, none = _Inputs(*tensors), grad_values.new_empty(0)
    bias = inputs.bias.new_empty(inputs.bias.shape) if wanted[1] and inputs.bias is not None else none
    return inputs.hidden.new_empty(inputs.hidden.shape) if wanted[0] else none, bias


_CHANGED = "something (a hook on saved tensors, or .data) changed the tensors of a quantised layer between forward and backward"
_GIVEN = (
    "Tensor hidden, Tensor weight, Tensor weight_scale, Tensor? weight_tensor_scale, Tensor target, Tensor? bias, Tensor? class_offset, "
    "Tensor? temperature, Tensor? token_weight, Tensor? num_valid, Tensor? teacher_ids, str options, int ignore_index, int reduction, "
    "int workspace_limit_bytes, str parallel"
)
_GRADIENTS = "Tensor grad_loss, Tensor grad_values, Tensor grad_named, Tensor saved, Tensor named, Tensor retained"
_MADE = "(Tensor loss, Tensor values, Tensor saved, Tensor top1, Tensor named, Tensor retained)"
_SCHEMAS = {
    "linear_quantized": f"({_GIVEN}, bool retain) -> {_MADE}",
    "linear_quantized_backward": f"({_GRADIENTS}, {_GIVEN}, bool[2] wanted) -> (Tensor, Tensor)",
}
_WAYS = {"linear_quantized": "_forward", "linear_quantized_backward": "_backward"}
_TRAINED = (0, 5)  # places of hidden and bias
_NO_TENSORS = 6  # options, ignore_index, reduction, workspace_limit_bytes, parallel; retain, or wanted


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    tensors, ctx.options = inputs[:-_NO_TENSORS], inputs[-_NO_TENSORS:-1]
    loss, values, saved, top1, named, retained = output
    ctx.mark_non_differentiable(saved, top1, retained)
    ctx.set_materialize_grads(False)  # zeros for what is retained would be as large
    ctx.shapes = loss.shape, values.shape, named.shape
    ctx.retained = retained.shape, retained.dtype
    ctx.kinds = _kinds(tensors)
    ctx.save_for_backward(saved, named, retained, *tensors)


def _kinds(tensors: Any) -> list[Any]:
    """Facts that the format of codes follows from."""
    return [None if each is None else (each.dtype, each.dim()) for each in tensors]


def _backward(ctx: Any, grad_loss: Any, grad_values: Any, _saved: Any, _top1: Any, grad_named: Any, _retained: Any) -> tuple[Any, ...]:
    saved, named, retained, *tensors = ctx.saved_tensors
    if _kinds(tensors) != ctx.kinds or (retained.shape, retained.dtype) != ctx.retained:
        raise errors.ShapeError(_CHANGED)
    places: list[Any] = [None] * (len(tensors) + _NO_TENSORS)
    wanted = [ctx.needs_input_grad[place] for place in _TRAINED]
    given = zip((grad_loss, grad_values, grad_named), ctx.shapes, strict=True)
    upstream = [saved.new_zeros(shape) if each is None else each for each, shape in given]
    made = torch.ops.flce.linear_quantized_backward(*upstream, saved, named, retained, *tensors, *ctx.options, wanted)
    gradients: list[Tensor | None] = [each if want else None for each, want in zip(made, wanted, strict=True)]
    if torch.is_grad_enabled():
        gradients = _op.refuse_second_derivative(gradients, (*upstream, *(tensors[place] for place in _TRAINED)))
    for place, gradient in zip(_TRAINED, gradients, strict=True):
        places[place] = gradient
    return tuple(places)


if _passes.define(_SCHEMAS, __name__, _WAYS):
    torch.library.register_autograd(
        "flce::linear_quantized",
        _passes.of_module(__name__, "_backward"),
        setup_context=_passes.of_module(__name__, "_setup_context"),
        lib=vars(torch.ops.flce)["_library"],
    )
run: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]] = torch.ops.flce.linear_quantized.default
