"""The operators flce::linear_divergence and flce::linear_divergence_backward: two heads' kernels, whose calls have structs of their own."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flce import errors
from flce.call import _op
from flce.core import _frame, _kernels, _native
from flce.core._frame import KernelKey, is_hidden_major

IGNORED = -100
_SAVED = ("lse", "teacher_lse", "student_divergence")  # backward's inputs from forward, [N] each
_LEAST_WORK = 0  # multiply-adds from which on logits are retained; 0: the library's number


class _Heads(NamedTuple):
    """The inputs of both passes, as the ABI names them."""

    hidden: Tensor
    weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    target: Tensor
    bias: Tensor | None
    teacher_bias: Tensor | None
    temperature: Tensor | None

    def kernel(self, options: str, workspace_limit_bytes: int) -> _kernels.LoadedKernel:
        hidden, weight = self.hidden, self.weight
        key = KernelKey(
            device=hidden.device,
            hidden_size=hidden.shape[1],
            vocab_size=weight.shape[0],
            dtype=hidden.dtype,
            hidden_major=is_hidden_major(weight),
            weight_dtype=weight.dtype,
            grad_weight_dtype=weight.dtype,
            accumulate=False,
            bias=self.bias is not None,
            class_weight=False,
            temperature=self.temperature is not None,
            token_weight=False,
            options=options,
            workspace_limit_bytes=workspace_limit_bytes,
            num_tokens=_frame.planned_tokens(hidden.shape[0], workspace_limit_bytes),
        )
        return _kernels.find(key)

    def as_read(self) -> dict[str, Tensor]:
        """Tensors by name, without gaps. A weight that is the view of a [D, V] is that."""
        hidden_major = is_hidden_major(self.weight)
        made = {}
        for name, tensor in self._asdict().items():
            if tensor is not None:
                turned = hidden_major and name in ("weight", "teacher_weight")
                made[name] = _frame._aligned(tensor.t().contiguous() if turned else tensor.contiguous())
        return made


def _view(kernel: _kernels.LoadedKernel, dtype: int, address: int, shape: tuple[int, ...]) -> _native.TensorView:
    on_gpu = kernel.key.device.type == "cuda"
    view = _native.TensorView()
    view.data, view.dtype, view.ndim = address, dtype, len(shape)
    view.rows, view.columns = (*shape, 0, 0)[:2]
    view.row_stride, view.column_stride = (view.columns if len(shape) == 2 else 1), 1
    view.device_type, view.device_index = (_native.CUDA if on_gpu else _native.CPU), kernel.key.device.index or 0
    return view


def _run(
    kernel: _kernels.LoadedKernel,
    args: Any,
    function: Any,
    tensors: Mapping[str, Tensor],
    numbers: Mapping[str, Tensor],
    size: int,
) -> None:
    """One pass. `numbers`: [N] fp32 by name, parts of other tensors too."""
    views = {name: _view(kernel, _frame.DTYPE_CODES[each.dtype], each.data_ptr(), tuple(each.shape)) for name, each in tensors.items()}
    views |= {name: _view(kernel, _native.FP32, each.data_ptr(), (each.shape[0],)) for name, each in numbers.items()}
    args.struct_size, args.ignore_index, args.reduction = ctypes.sizeof(args), IGNORED, _native.REDUCTION_NONE
    for name, view in views.items():
        setattr(args, name, ctypes.addressof(view))
    kernel.run(function, ctypes.addressof(args), size)


def _forward_kernel(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(divergence [N], what backward reads [3, N], entropies of student and teacher [2, N], retained logits [bytes])"""
    *tensors, options, workspace_limit_bytes, retain = given
    heads = _Heads(*tensors)
    kernel = heads.kernel(options, workspace_limit_bytes)
    num_tokens = heads.hidden.shape[0]
    divergence, saved, entropies = (kernel.new_floats(shape) for shape in (num_tokens, (len(_SAVED), num_tokens), (2, num_tokens)))
    args = _native.call_arguments().forward()
    retained = kernel.new_bytes(_retained_bytes(kernel, num_tokens, workspace_limit_bytes) if retain else 0)
    args.retained, args.retained_bytes = (retained.data_ptr() if retained.numel() else None), retained.numel()
    word = _view(kernel, _native.UINT64, kernel.invalid_label.data_ptr(), ())
    args.invalid_label = ctypes.addressof(word)
    numbers = dict(zip(_SAVED, saved.unbind(0), strict=True)) | {
        "loss": divergence,
        "entropy": entropies[0],
        "teacher_entropy": entropies[1],
    }
    _run(kernel, args, kernel.forward_function, heads.as_read(), numbers, kernel.workspace_bytes(num_tokens, backward=False))
    return divergence, saved, entropies, retained


def _retained_bytes(kernel: _kernels.LoadedKernel, num_tokens: int, workspace_limit_bytes: int) -> int:
    """Bytes for logits that a limit leaves; none without one."""
    if not kernel.retains or not workspace_limit_bytes:
        return 0
    return _native.choose_retained(kernel._handle, num_tokens, workspace_limit_bytes, False, _LEAST_WORK)[1]


def _backward_kernel(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    grad_divergence, saved, retained, *tensors, options, workspace_limit_bytes, wanted = given
    heads = _Heads(*tensors)
    kernel = heads.kernel(options, workspace_limit_bytes)
    num_tokens = heads.hidden.shape[0]
    if list(saved.shape) != [len(_SAVED), num_tokens] or list(grad_divergence.shape) != [num_tokens]:
        raise errors.ShapeError("something changed the tensors of a divergence between forward and backward")
    args = _native.call_arguments().backward()
    args.retained, args.retained_bytes = (retained.data_ptr() if retained.numel() else None), retained.numel()
    read = heads.as_read()
    made: dict[str, Tensor] = {}
    for name, want in zip(("hidden", "weight", "bias"), wanted, strict=True):
        if want:
            made[f"grad_{name}"] = torch.empty_like(read[name])
    numbers = dict(zip(_SAVED, saved.contiguous().unbind(0), strict=True))
    upstream = grad_divergence.resolve_neg().contiguous()
    _run(
        kernel, args, kernel.backward_function, read | made, numbers | {"grad_loss": upstream}, kernel.workspace_bytes(num_tokens)
    )  # fmt: skip
    if "grad_weight" in made and kernel.key.hidden_major:
        made["grad_weight"] = made["grad_weight"].t()
    none = upstream.new_empty(0)
    return made.get("grad_hidden", none), made.get("grad_weight", none), made.get("grad_bias", none)


def _forward_fake(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden = given[0]
    num_tokens = hidden.shape[0]
    like = {"dtype": torch.float32}
    return (
        hidden.new_empty(num_tokens, **like),
        hidden.new_empty((len(_SAVED), num_tokens), **like),
        hidden.new_empty((2, num_tokens), **like),
        hidden.new_empty(0, dtype=torch.uint8),  # how much is retained is a kernel's choice
    )


def _backward_fake(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    grad_divergence, _, _, *tensors, _, _, wanted = given
    heads = _Heads(*tensors)
    none = grad_divergence.new_empty(0)
    weight = heads.weight
    grad_weight = none
    if wanted[1]:
        grad_weight = weight.new_empty(weight.shape[::-1]).t() if is_hidden_major(weight) else weight.new_empty(weight.shape)
    bias = heads.bias.new_empty(heads.bias.shape) if wanted[2] and heads.bias is not None else none
    return heads.hidden.new_empty(heads.hidden.shape) if wanted[0] else none, grad_weight, bias


_HEADS = (
    "Tensor hidden, Tensor weight, Tensor teacher_hidden, Tensor teacher_weight, Tensor target, Tensor? bias, Tensor? teacher_bias, "
    "Tensor? temperature, str options, int workspace_limit_bytes"
)
_MADE = "(Tensor divergence, Tensor saved, Tensor entropies, Tensor retained)"
_UPSTREAM = "Tensor grad_divergence, Tensor saved, Tensor retained"
_SCHEMAS = {
    "linear_divergence": f"({_HEADS}, bool retain) -> {_MADE}",
    "linear_divergence_backward": f"({_UPSTREAM}, {_HEADS}, bool[3] wanted) -> (Tensor, Tensor, Tensor)",
}
_STUDENT = (0, 1, 5)  # places of hidden, weight and bias


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, options, workspace_limit_bytes, _ = inputs
    ctx.options = options, workspace_limit_bytes
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # zeros for what is retained would be as large
    ctx.save_for_backward(output[1], output[3], *tensors)


def _backward(ctx: Any, grad_divergence: Tensor | None, *_: Any) -> tuple[Any, ...]:
    saved, retained, *tensors = ctx.saved_tensors
    if grad_divergence is None:
        return (None,) * (len(tensors) + len(ctx.options) + 1)
    wanted = [ctx.needs_input_grad[place] for place in _STUDENT]
    made = torch.ops.flce.linear_divergence_backward(grad_divergence, saved, retained, *tensors, *ctx.options, wanted)
    gradients: list[Tensor | None] = [each if want else None for each, want in zip(made, wanted, strict=True)]
    if torch.is_grad_enabled():
        gradients = _op.refuse_second_derivative(gradients, (grad_divergence, *(tensors[place] for place in _STUDENT)))
    places: list[Any] = [None] * (len(tensors) + len(ctx.options) + 1)
    for place, gradient in zip(_STUDENT, gradients, strict=True):
        places[place] = gradient
    return tuple(places)


def _define() -> None:
    """Operators are the process's and stay, as `_op._define` has it."""
    if hasattr(torch.ops.flce, "linear_divergence"):
        return
    library = vars(torch.ops.flce)["_library"]
    for name, schema in _SCHEMAS.items():
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
        way = name.replace("linear_divergence", "_forward").replace("_forward_backward", "_backward")
        for key in ("CPU", "CUDA"):
            library.impl(name, _in_this_module(f"{way}_kernel"), key)
        torch.library.register_fake(f"flce::{name}", _in_this_module(f"{way}_fake"), lib=library)
    torch.library.register_autograd(
        "flce::linear_divergence", _in_this_module("_backward"), setup_context=_in_this_module("_setup_context"), lib=library
    )


def _in_this_module(name: str) -> Callable[..., Any]:
    """The function of this name that the module has when it is called."""

    def called(*args: Any, **named: Any) -> Any:
        return getattr(sys.modules[__name__], name)(*args, *named.values())

    return called


_define()
run: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = torch.ops.flce.linear_divergence.default
