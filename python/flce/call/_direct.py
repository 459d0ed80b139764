"""Calls like an earlier one: the same tensors but for their contents. The arguments were checked in the earlier call, and only addresses
are left to fill in.

For small layers Python is much of a call's cost, and most of that in backward, which runs on the engine's thread with that core's caches
cold. The checks are therefore settled once, and a direct call touches little code and few objects.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flce.call import _op
from flce.core import _autograd, _frame, _kernels, _retain
from flce.core._frame import CallOptions, Frame, Inputs

try:
    # One question in place of twenty: types, dispatch keys (device type, negation, inference), dtypes, device indices, sizes, strides,
    # requires_grad.
    _TensorGuards: Any = importlib.import_module("torch._C._dynamo.guards").TensorGuards
except (ImportError, AttributeError):
    _TensorGuards = None

HIDDEN, WEIGHT, TARGET, LSE = (Frame.WORD[name] for name in ("hidden", "weight", "target", "lse"))
GRAD_HIDDEN, GRAD_WEIGHT = Frame.WORD["grad_hidden"], Frame.WORD["grad_weight"]
_DIRECT_VALUES = (("loss",), ("logprobs",))
_MISALIGNED = _frame.ROW_ALIGNMENT - 1
_STRIDED = torch.strided
_NO_GRADIENTS = (None, None, None, None)

# Short names for what is asked at every call.
_any_autocast = _autograd.any_autocast
_empty_like = torch.empty_like
_is_grad_enabled = torch.is_grad_enabled


Addresses = tuple[int, int, int, int]


class Form:
    """The form of tensors that have passed all checks: hidden [..., D], weight and target [...], contiguous (weight, or its transpose) and
    of the kernel's dtype, and the one output, the loss or the targets' log-probability. Any thread may use it."""

    __slots__ = (
        "dtype",
        "guard",
        "hidden_shape",
        "make_value",
        "num_tokens",
        "options",
        "requires_grad",
        "reshapes",
        "saved_shape",
        "target_dtype",
        "target_shape",
        "value_form",
        "weight_shape",
        "weight_stride",
    )

    def __init__(self, kernel: _kernels.LoadedKernel, hidden: Tensor, weight: Tensor, target: Tensor, options: CallOptions) -> None:
        self.guard: Callable[..., bool] = _TensorGuards(hidden, weight, target, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        self.requires_grad = hidden.requires_grad or weight.requires_grad
        self.dtype, self.target_dtype = kernel.key.dtype, target.dtype
        self.weight_shape, self.weight_stride = weight.shape, weight.stride()
        self.num_tokens = target.numel()
        # The node's, as every other way of a call saves them: a checkpoint that goes one way and then another compares their shapes.
        self.reshapes = target.dim() != 1
        self.hidden_shape = torch.Size([hidden.numel() // hidden.shape[-1], hidden.shape[-1]])
        self.target_shape = self.saved_shape = torch.Size([self.num_tokens])
        self.options = replace(options, retain=options.retain._replace(gradient=True, weight=weight.requires_grad))
        # The value is make_value(value_form).
        self.make_value: Callable[..., Tensor] = kernel.new_floats
        self.value_form: Any = kernel.outputs.shape(target.shape, self.num_tokens, options.reduction)
        if not self.value_form:
            self.make_value, self.value_form = _empty_like, kernel.float_like

    @staticmethod
    def fits(kernel: _kernels.LoadedKernel, hidden: Tensor, weight: Tensor, target: Tensor, options: CallOptions) -> bool:
        """Whether there can be a direct call for tensors like these, which have passed all checks and found that kernel."""
        key, (values, top1, _, teacher_top_k, _) = kernel.key, kernel.outputs
        return (
            _TensorGuards is not None
            and not options.retain.budget  # a budget counts every call
            and values in _DIRECT_VALUES
            and not (top1 or teacher_top_k)
            and not (key.temperature or key.token_weight)
            and hidden.dtype is weight.dtype
            and weight.shape == (kernel.weight_rows, key.hidden_size)
            and hidden.shape[-1] == key.hidden_size
            and (_frame.is_hidden_major(weight) if key.hidden_major else weight.is_contiguous())
            and hidden.is_contiguous()
            and target.is_contiguous()
        )

    def value(self, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor | None:
        """The output; None where the arguments are unlike those that this was made for."""
        raise NotImplementedError

    def matches(self, hidden: Tensor, weight: Tensor, target: Tensor) -> bool:
        """Whether the tensors are of this form, outside autocast. Modes and transforms are the caller's to rule out."""
        try:
            return (
                # The guard would end the process at a tensor without strides.
                hidden.layout is weight.layout is target.layout is _STRIDED
                and not (hidden.is_nested or weight.is_nested or target.is_nested)
                and self.guard(hidden, weight, target)
                and not (hidden.data_ptr() | weight.data_ptr()) & _MISALIGNED
                and not _any_autocast()
            )
        except (AttributeError, RuntimeError):  # no tensor, or one without memory
            return False

    def matches_backward(
        self, addresses: Addresses, grad_values: Tensor, saved: Tensor, hidden: Tensor, weight: Tensor, target: Tensor
    ) -> bool:
        """Whether `backward` can take these tensors: autograd may give back others than it saved, by a hook or because somebody swapped a
        tensor's memory. A tensor at forward's address and in forward's form counts as the saved one."""
        return (
            (hidden.data_ptr(), weight.data_ptr(), target.data_ptr(), saved.data_ptr()) == addresses
            and hidden.shape == self.hidden_shape
            and weight.shape == self.weight_shape
            and weight.stride() == self.weight_stride
            and target.shape == self.target_shape
            and saved.shape == self.saved_shape
            and hidden.is_contiguous()
            and target.is_contiguous()
            and hidden.dtype is weight.dtype is self.dtype
            and target.dtype is self.target_dtype
            and grad_values.is_contiguous()
            and not grad_values.is_neg()
            and not hasattr(weight, "ds_status")  # memory under DeepSpeed may be half gathered: the general way looks
        )


_Filled = tuple[memoryview, int, int, Frame]  # words of its views, address of its argument struct, workspace bytes, the frame


class Frames:
    """A kernel, and frames for calls of one form that no call is using."""

    __slots__ = ("_num_tokens", "_rule", "_target_dtype", "backward", "forward", "grad_word", "kernel", "value_word")

    def __init__(self, kernel: _kernels.LoadedKernel, form: Form) -> None:
        self.kernel = kernel
        self._num_tokens, self._target_dtype = form.num_tokens, form.target_dtype
        self._rule = form.options.ignore_index, form.options.reduction
        (value,) = kernel.outputs.values
        self.value_word, self.grad_word = Frame.WORD[value], Frame.WORD[_frame.GRADIENT_VIEWS[value]]
        self.forward: list[_Filled] = []
        # By whether hidden's gradient is wanted, twice whether weight's is.
        self.backward: tuple[list[_Filled], ...] = ([], [], [], [])

    def take_forward(self) -> _Filled:
        """A frame with all of a forward but addresses."""
        try:
            return self.forward.pop()
        except IndexError:
            frame = self._new()
            return frame.words, frame.forward_address, frame.forward_bytes, frame

    def take_backward(self, wanted: int) -> _Filled:
        """A frame with all of a backward but addresses."""
        try:
            return self.backward[wanted].pop()
        except IndexError:
            frame = self._new()
            frame.backward.grad_hidden = frame.address["grad_hidden"] if wanted & 1 else None
            frame.backward.grad_weight = frame.address["grad_weight"] if wanted & 2 else None
            return frame.words, frame.backward_address, frame.backward_bytes, frame

    def _new(self) -> Frame:
        frame = self.kernel.frame_type(self.kernel)
        frame.resize(self._num_tokens)
        frame.set_rule(*self._rule)
        frame.set_target_dtype(self._target_dtype)
        return frame


class DirectCall(Form):
    """One whole layer with one set of options, for tensors of one form."""

    __slots__ = ("asks_engine", "frames", "kernel", "retains")

    def __init__(self, kernel: _kernels.LoadedKernel, hidden: Tensor, weight: Tensor, target: Tensor, options: CallOptions) -> None:
        super().__init__(kernel, hidden, weight, target, options)
        self.kernel, self.frames = kernel, Frames(kernel, self)
        # Where logits may be retained, host time is small beside the kernels': such calls go the general way from here.
        may_retain = _retain.Choices(kernel, self.num_tokens).may_retain(self.options.retain, options.workspace_limit_bytes)
        self.retains = self.requires_grad and may_retain
        self.asks_engine = self.num_tokens * weight.numel() >= _op.SMALL

    def value(self, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor | None:
        if not self.matches(hidden, weight, target):
            return None
        if self.requires_grad and _is_grad_enabled():
            if self.reshapes:
                hidden, target = hidden.view(self.hidden_shape), target.view(self.target_shape)
            value = _apply(hidden, weight, target, self)
            return _autograd.keep_node(value) if _autograd.LOSES_NODES else value
        if forward_ad._current_level >= 0:
            return None
        return self.forward(hidden, weight, target)[0]

    def forward(self, hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Addresses]:
        """(the output, lse, where hidden, weight, target and lse lie). Leaves nothing to backward."""
        kernel, frames = self.kernel, self.frames
        filled = frames.take_forward()
        words, args, size, _ = filled
        saved = kernel.new_floats(self.num_tokens)
        values = self.make_value(self.value_form)
        addresses = (hidden.data_ptr(), weight.data_ptr(), target.data_ptr(), saved.data_ptr())
        words[HIDDEN], words[WEIGHT], words[TARGET], words[LSE] = addresses
        words[frames.value_word] = values.data_ptr()
        kernel.run(kernel.forward_function, args, size)
        frames.forward.append(filled)
        return values, saved, addresses

    def forward_retaining(self, hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor, None]:
        """Runs forward the general way, for an output whose gradients will be asked for."""
        values = self.make_value(self.value_form)
        return values, self.kernel.forward(Inputs(hidden, weight, target, self.options), values), None

    def backward(
        self, addresses: Addresses, grad_values: Tensor, hidden: Tensor, weight: Tensor, wanted: int
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        """The node's gradients: hidden's if `wanted` is odd, weight's if it is 2 or more."""
        kernel, frames = self.kernel, self.frames
        filled = frames.take_backward(wanted)
        words, args, size, _ = filled
        words[HIDDEN], words[WEIGHT], words[TARGET], words[LSE] = addresses
        try:
            words[frames.grad_word] = grad_values.data_ptr()
        except RuntimeError:
            _kernels.raise_batched(grad_values)
        grad_hidden = grad_weight = None
        if wanted & 1:
            grad_hidden = _empty_like(hidden)
            words[GRAD_HIDDEN] = grad_hidden.data_ptr()
        if wanted & 2:
            grad_weight = _empty_like(weight)
            words[GRAD_WEIGHT] = grad_weight.data_ptr()
        kernel.run(kernel.backward_function, args, size)
        frames.backward[wanted].append(filled)
        return grad_hidden, grad_weight, None, None


class LinearCrossEntropyDirect(torch.autograd.Function):
    """The node of direct calls: `_op.LinearCrossEntropyFunction` with nothing left to decide."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, call: DirectCall) -> Tensor:
        values, saved, addresses = call.forward_retaining(hidden, weight, target) if call.retains else call.forward(hidden, weight, target)
        ctx.call = call, addresses, addresses is None and _retain.has_filled(saved)
        ctx.save_for_backward(saved, hidden, weight, target)
        return values

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        grad_values = grad_outputs[0]
        saved, hidden, weight, target = ctx.saved_tensors
        call: DirectCall
        call, addresses, filled = ctx.call
        wants = _autograd.wanted_gradients(ctx) if call.asks_engine else ctx.needs_input_grad[:4]
        if addresses is None or not call.matches_backward(addresses, grad_values, saved, hidden, weight, target) or _is_grad_enabled():
            given = Inputs(hidden, weight, target, call.options)
            return *backward_of_any_form(call.kernel, given, saved, grad_values, wants, filled=filled), None, None
        wanted = wants[0] + 2 * wants[1]
        return call.backward(addresses, grad_values, hidden, weight, wanted) if wanted else _NO_GRADIENTS

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _op.refuse_forward_mode()


_apply: Callable[..., Tensor] = super(torch.autograd.Function, LinearCrossEntropyDirect).apply


def backward_of_any_form(
    kernel: _kernels.LoadedKernel, given: Inputs, saved: Tensor, grad_values: Tensor, wanted: Sequence[bool], *, filled: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Runs backward for gradients that are to be differentiated, and for tensors in another form."""
    grad_hidden, grad_weight, *_ = _op.run_backward(kernel, given, saved, grad_values, wanted, filled=filled)
    if torch.is_grad_enabled():
        grad_hidden, grad_weight = _op.refuse_second_derivative((grad_hidden, grad_weight), (grad_values, given.hidden, given.weight))
    return grad_hidden, grad_weight
