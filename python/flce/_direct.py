"""Calls like one that went before: the same tensors but for their contents. What that call's arguments were found to be holds for these too, and only
addresses are left to fill in.

For small layers Python is much of what a call costs, and most of that in backward, which runs on the engine's thread with that core's caches cold. So
what can be settled once is, and little code and few objects are touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flce import _kernels, _native, _op
from flce._kernels import Frame, Inputs

try:
    # One call in place of twenty: types, dtypes, devices, sizes, strides, requires_grad, and every mode and transform that goes by dispatch keys.
    from torch._C._dynamo.guards import TensorGuards as _TensorGuards
except ImportError:
    _TensorGuards = None  # type: ignore[assignment, misc, unused-ignore]

_HIDDEN, _WEIGHT, _TARGET, _LSE, _LOSS = (Frame.WORD[name] for name in ("hidden", "weight", "target", "lse", "loss"))
_GRAD_HIDDEN, _GRAD_WEIGHT = Frame.WORD["grad_hidden"], Frame.WORD["grad_weight"]
_MISALIGNED = _kernels.ROW_ALIGNMENT - 1
_NO_GRADIENTS = (None, None, None, None)

_empty_like = torch.empty_like
_is_grad_enabled = torch.is_grad_enabled


def _guard(*tensors: Tensor) -> Callable[..., bool]:
    check: Callable[..., bool] = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


class DirectCall:
    """One layer with one set of options, for hidden [..., D], weight and target [...] of one form, contiguous (weight, or its transpose) and of the
    kernel's dtype. Any thread may use it."""

    __slots__ = (
        "asks_engine",
        "backward_frames",
        "forward_frames",
        "kernel",
        "make_value",
        "matches",
        "matches_backward",
        "needs_gradient",
        "num_tokens",
        "rest",
        "target_dtype",
        "value_form",
    )

    def __init__(self, kernel: _kernels.Kernel, hidden: Tensor, weight: Tensor, target: Tensor, rest: tuple[str, int, int, int]) -> None:
        self.kernel = kernel
        self.rest = rest  # the fields of Inputs that are no tensors
        self.num_tokens = target.numel()
        self.target_dtype = target.dtype
        self.needs_gradient = hidden.requires_grad or weight.requires_grad
        self.asks_engine = self.num_tokens * weight.numel() >= _op.SMALL
        self.matches = _guard(hidden, weight, target)
        self.matches_backward: Callable[..., bool] | None = None  # of grad_values, saved, hidden, weight, target
        # The loss is make_value(value_form).
        self.make_value: Callable[..., Tensor] = _empty_like
        self.value_form: Any = kernel.float_like
        if rest[2] == _native.REDUCTION_NONE:
            self.make_value, self.value_form = kernel.new_floats, target.shape
        # Frames that no call is using, as `_new_frame` makes them; backward's by whether hidden's gradient is wanted, twice whether weight's is.
        self.forward_frames: list[tuple[memoryview, int, int, Frame]] = []
        self.backward_frames: tuple[list[tuple[memoryview, int, int, Frame]], ...] = ([], [], [], [])

    def __call__(self, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor | None:
        """The loss; None where the arguments are unlike those that this was made for."""
        if not self.matches(hidden, weight, target):
            return None
        if self.needs_gradient and _is_grad_enabled():
            return _apply(hidden, weight, target, self)
        if forward_ad._current_level >= 0:
            return None
        return self.forward(hidden, weight, target)[0]

    def inputs(self, hidden: Tensor, weight: Tensor, target: Tensor) -> Inputs:
        return Inputs(hidden.reshape(-1, hidden.shape[-1]), weight, target.reshape(-1), None, None, None, *self.rest)

    def _new_frame(self, *, backward: bool, wanted: int = 0) -> tuple[memoryview, int, int, Frame]:
        frame = Frame(self.kernel)
        frame.resize(self.num_tokens)
        frame.set_rule(self.rest[1], self.rest[2])
        frame.set_target_dtype(self.target_dtype)
        if not backward:
            return frame.words, frame.forward_address, frame.forward_bytes, frame
        frame.backward.grad_hidden = frame.address["grad_hidden"] if wanted & 1 else None
        frame.backward.grad_weight = frame.address["grad_weight"] if wanted & 2 else None
        return frame.words, frame.backward_address, frame.backward_bytes, frame

    def forward(self, hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """(loss, lse)."""
        hidden_address, weight_address = hidden.data_ptr(), weight.data_ptr()
        if (hidden_address | weight_address) & _MISALIGNED:
            values, saved = self.kernel.forward(self.inputs(hidden, weight, target))
            return (values.reshape(target.shape).clone() if values.dim() else values), saved
        kernel, frames = self.kernel, self.forward_frames
        try:
            frame = frames.pop()
        except IndexError:
            frame = self._new_frame(backward=False)
        words, args, size, _ = frame
        saved = kernel.new_floats(self.num_tokens)
        values = self.make_value(self.value_form)
        words[_HIDDEN] = hidden_address
        words[_WEIGHT] = weight_address
        words[_TARGET] = target.data_ptr()
        words[_LSE] = saved.data_ptr()
        words[_LOSS] = values.data_ptr()
        kernel.run(kernel.forward_function, args, size)
        frames.append(frame)
        return values, saved

    def backward(self, grad_values: Tensor, saved: Tensor, hidden: Tensor, weight: Tensor, target: Tensor, wanted: int) -> Any:
        """The node's gradients, for tensors that `matches_backward`."""
        kernel, frames = self.kernel, self.backward_frames[wanted]
        try:
            frame = frames.pop()
        except IndexError:
            frame = self._new_frame(backward=True, wanted=wanted)
        words, args, size, _ = frame
        words[_HIDDEN] = hidden.data_ptr()
        words[_WEIGHT] = weight.data_ptr()
        words[_TARGET] = target.data_ptr()
        words[_LSE] = saved.data_ptr()
        words[_LOSS] = grad_values.data_ptr()
        grad_hidden = grad_weight = None
        if wanted & 1:
            grad_hidden = _empty_like(hidden)
            words[_GRAD_HIDDEN] = grad_hidden.data_ptr()
        if wanted & 2:
            grad_weight = _empty_like(weight)
            words[_GRAD_WEIGHT] = grad_weight.data_ptr()
        kernel.run(kernel.backward_function, args, size)
        frames.append(frame)
        return grad_hidden, grad_weight, None, None

    @staticmethod
    def accepts(kernel: _kernels.Kernel, hidden: Tensor, weight: Tensor, target: Tensor) -> bool:
        """Whether there can be a direct call for tensors of this form, which have passed all checks and found that kernel."""
        key = kernel.key
        return (
            _TensorGuards is not None
            and all(type(tensor) in _kernels.PLAIN_TYPES and tensor.device == key.device for tensor in (hidden, weight, target))
            and (hidden.dtype, weight.dtype) == (key.dtype, key.dtype)
            and weight.shape == (key.vocab_size, key.hidden_size)
            and hidden.shape == (*target.shape, key.hidden_size)
            and (_kernels.is_hidden_major(weight) if key.hidden_major else weight.is_contiguous())
            and hidden.is_contiguous()
            and target.is_contiguous()
        )

    def accepts_backward(self, grad_values: Tensor, saved: Tensor, hidden: Tensor, weight: Tensor, target: Tensor) -> bool:
        """Whether `backward` may be given tensors of this form: as forward had them, and a contiguous upstream gradient."""
        return (
            self.accepts(self.kernel, hidden, weight, target)
            and (target.numel(), target.dtype) == (self.num_tokens, self.target_dtype)
            and all(
                type(tensor) is Tensor and tensor.device == hidden.device and tensor.dtype is torch.float32 and tensor.is_contiguous()
                for tensor in (grad_values, saved)
            )
            and saved.numel() == self.num_tokens
        )


class LinearCrossEntropyDirect(torch.autograd.Function):
    """The node of direct calls: `_op.LinearCrossEntropyFunction` with nothing left to decide."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, call: DirectCall) -> Tensor:
        values, saved = call.forward(hidden, weight, target)
        ctx.call = call
        ctx.save_for_backward(saved, hidden, weight, target)
        return values

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        grad_values = grad_outputs[0]
        saved, hidden, weight, target = ctx.saved_tensors
        call: DirectCall = ctx.call
        matches = call.matches_backward
        if (
            matches is None
            or not matches(grad_values, saved, hidden, weight, target)
            or (hidden.data_ptr() | weight.data_ptr()) & _MISALIGNED
            or _is_grad_enabled()
        ):
            return _backward_of_any_form(ctx, grad_values, saved, hidden, weight, target)
        wants = _op.wanted_gradients(ctx) if call.asks_engine else ctx.needs_input_grad
        wanted = wants[0] + 2 * wants[1]
        return call.backward(grad_values, saved, hidden, weight, target, wanted) if wanted else _NO_GRADIENTS

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _op.refuse_forward_mode()


_apply: Callable[..., Tensor] = super(torch.autograd.Function, LinearCrossEntropyDirect).apply


def _backward_of_any_form(ctx: Any, grad_values: Tensor, saved: Tensor, hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
    """For gradients that are to be differentiated, a first time, and what hooks on saved tensors gave back in another form."""
    call: DirectCall = ctx.call
    given = call.inputs(hidden, weight, target)
    kernel = call.kernel
    if hidden.device != kernel.device or hidden.dtype is not kernel.key.dtype:
        kernel = _kernels.find_for(given)
    elif not torch.is_grad_enabled() and call.accepts_backward(grad_values, saved, hidden, weight, target):
        call.matches_backward = _guard(grad_values, saved, hidden, weight, target)
    wanted = _op.wanted_gradients(ctx) if call.asks_engine else ctx.needs_input_grad[:3]
    grad_hidden, grad_weight, _ = _op.run_backward(kernel, given, saved, grad_values.reshape(-1) if grad_values.dim() else grad_values, wanted)
    if grad_hidden is not None:
        grad_hidden = grad_hidden.view(hidden.shape)
    if torch.is_grad_enabled():
        grad_hidden, grad_weight = _op.refuse_second_derivative((grad_hidden, grad_weight), (grad_values, hidden, weight))
    return grad_hidden, grad_weight, None, None
