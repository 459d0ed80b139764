"""One call of `flce.linear_cross_entropy`, `flce.linear_logprobs` or `flce.linear_topk_distillation`: from arguments to what the caller
gets, by the shortest way there is.

A call like one before (the same options, tensors of the same form) is a `DirectCall`; one whose arguments have passed the checks before
goes to its kernel; any other is looked at first. Where the call is traced, watched or transformed, it goes through the operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from flce import _arguments, _engine, _frame, _kernels, _op, _parallel, _retain, _zero3, errors
from flce._arguments import Options
from flce._checks import DTYPES, HIDDEN_MULTIPLE, check_grad_weight_out
from flce._direct import DirectCall
from flce._frame import PLAIN_TYPES, Inputs
from flce._targets import check_tensors

_dispatch_modes, _tracing_state, _transforms = _engine.dispatch_modes, _engine.tracing_state, _engine.transforms
_any_autocast: Any = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def run(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    options: tuple[Any, ...],
    temperature: Tensor | float | None,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    num_valid_tokens: Tensor | float | None = None,
    token_weight: Tensor | None = None,
    grad_weight_out: Tensor | None = None,
    teacher: tuple[Tensor, Tensor] | None = None,
) -> Any:
    """`options`: the fields of Options. A plain tuple is quicker to make, and most calls need no more of it than whether it is known.
    `teacher`: ids and probabilities, which `_arguments.check_teacher` has looked at."""
    known = None
    alone = False
    if not torch.compiler.is_compiling():
        if hasattr(weight, "ds_status"):
            _zero3.refuse_ungathered("weight", weight)
        number = None if isinstance(temperature, Tensor) else temperature
        # Types belong to the key: 1, 1.0 and True are equal, and not all of them are taken for every argument.
        known = (options, number, type(number), *map(type, options))
        alone = bias is None and class_weight is None and num_valid_tokens is None and token_weight is None and grad_weight_out is None
        alone = alone and number is temperature and teacher is None
        try:
            call = _latest.get(known)
        except TypeError:  # an argument that cannot be hashed is refused by the checks
            known = call = None
        if call is not None and alone and not _dispatch_modes() and _transforms() is None and _tracing_state() is None:
            value = call.value(hidden, weight, target)
            if value is not None:
                return value
    others = _Others(bias, class_weight, num_valid_tokens, temperature, token_weight, grad_weight_out, teacher, options, known, alone)
    return _run_checked(hidden, weight, target, others)


@dataclass
class _Others:
    """The arguments of a call besides hidden, weight and target."""

    bias: Tensor | None
    class_weight: Tensor | None
    num_valid_tokens: Tensor | float | None
    temperature: Tensor | float | None
    token_weight: Tensor | None
    grad_weight_out: Tensor | None
    teacher: tuple[Tensor, Tensor] | None
    options: tuple[Any, ...]
    known: tuple[Any, ...] | None  # key of the options and of a temperature that is a number; None: not looked up
    alone: bool  # there is nothing but options, and a number for temperature
    num_valid: Tensor | None = None  # num_valid_tokens as a tensor


def _run_checked(hidden: Tensor, weight: Tensor, target: Tensor, others: _Others) -> Any:
    bias, class_weight, token_weight = others.bias, others.class_weight, others.token_weight
    temperatures = others.temperature if isinstance(others.temperature, Tensor) else None
    check_tensors(
        hidden=hidden,
        weight=weight,
        target=target,
        bias=bias,
        class_weight=class_weight,
        temperature=temperatures,
        token_weight=token_weight,
        grad_weight_out=others.grad_weight_out,
    )
    plain = _is_plain(hidden, weight, target, bias, class_weight, temperatures, token_weight, *(others.teacher or ()))
    signature = passed = None
    known = others.known
    if plain and others.alone and known is not None and not _any_autocast():
        # Everything that the checks look at: what has passed them passes again.
        signature = (
            *(type(hidden), hidden.shape, hidden.dtype, hidden.device, hidden.requires_grad, hidden.is_inference()),
            *(type(weight), weight.shape, weight.dtype, weight.device, weight.requires_grad, weight.stride()),
            *(target.shape, target.dtype, target.device, known),
        )
        passed = _passed.get(signature)
        if passed is not None and (value := passed.call_directly(known, hidden, weight, target)) is not None:
            return value
    if passed is None:
        hidden, weight = _autocast(hidden, weight)
        passed = _check(hidden, weight, target, others)
        if signature is not None:
            _remember(_passed, signature, passed)

    token_shape = target.shape
    if len(token_shape) != 1:
        hidden = hidden.reshape(-1, hidden.shape[-1])
        target = target.reshape(-1)
    if hidden.shape[1] % HIDDEN_MULTIPLE:
        padding = -hidden.shape[1] % HIDDEN_MULTIPLE
        hidden, weight = F.pad(hidden, (0, padding)), F.pad(weight, (0, padding))
    if not hidden.is_contiguous():
        hidden = hidden.contiguous()
    if passed.temperature is not None:
        temperatures = torch.full(target.shape, passed.temperature, dtype=torch.float32, device=hidden.device)
    rows = (_row_numbers(temperatures), _row_numbers(token_weight), *_teacher_rows(others.teacher))
    rest = passed.checked.rest
    given = Inputs(hidden, weight, target, bias, class_weight, others.num_valid, *rest[:5], *rows, parallel=rest[5])
    if plain:
        made = _eager(given, passed, others.grad_weight_out, token_shape)
    else:
        made = _through_operator(given, passed.checked, others.grad_weight_out)
    if _engine.LOSES_NODES:
        made = made._replace(values=_engine.keep_node(made.values))
    return _own_outputs(made, given, token_shape, passed.checked, eager=plain)


def _check(hidden: Tensor, weight: Tensor, target: Tensor, others: _Others) -> _Passed:
    options = Options(*others.options)
    sequence_ranks = _parallel.sequence_ranks(options.parallel) if options.parallel else 1
    _arguments.check_inputs(hidden, weight, target, others.bias, others.class_weight, sequence_ranks)
    temperatures = others.temperature if isinstance(others.temperature, Tensor) else None
    if temperatures is not None:
        _arguments.check_temperature(temperatures, target)
    _arguments.check_token_weight(others.token_weight, options.reduction, target)
    if others.num_valid_tokens is not None:
        _arguments.check_one_divisor(others.num_valid_tokens, others.class_weight, options.z_loss)
        others.num_valid = _arguments.num_valid(others.num_valid_tokens, options.reduction, hidden)
    if others.grad_weight_out is not None:
        check_grad_weight_out(
            others.grad_weight_out,
            hidden,
            weight,
            target=target,
            bias=others.bias,
            class_weight=others.class_weight,
            num_valid_tokens=others.num_valid,
            temperature=temperatures,
            token_weight=others.token_weight,
            **dict(zip(("teacher_ids", "teacher_probs"), others.teacher or (), strict=False)),
        )
    settled = None if others.known is None else _settled.get(others.known)
    if settled is None:
        number = None if temperatures is not None else _arguments.temperature_number(others.temperature)
        settled = (_arguments.check_options(options), number)
        if others.known is not None:
            _remember(_settled, others.known, settled)
    return _Passed(*settled)


class _Passed:
    """A call whose arguments have passed the checks."""

    __slots__ = ("checked", "direct", "kernel", "temperature")

    def __init__(self, checked: _arguments.Checked, temperature: float | None) -> None:
        self.checked = checked
        self.temperature = temperature  # one for all tokens
        self.kernel: _kernels.LoadedKernel | None = None  # the looked-up kernel of a call that is remembered
        self.direct: DirectCall | None = None

    def call_directly(self, known: tuple[Any, ...], hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor | None:
        """The output by a DirectCall, made at the second such call; None where there can be none."""
        call = self.direct
        if call is None:
            if self.kernel is None or not DirectCall.fits(self.kernel, hidden, weight, target, self.checked.rest[4]):
                return None
            call = self.direct = DirectCall(self.kernel, hidden, weight, target, self.checked.rest)
        value = call.value(hidden, weight, target)
        if value is not None:
            _latest[known] = call
        return value


_passed: dict[tuple[Any, ...], _Passed] = {}
_latest: dict[tuple[Any, ...], DirectCall] = {}  # by a call's key, as _settled
_settled: dict[tuple[Any, ...], tuple[_arguments.Checked, float | None]] = {}  # options, and the temperature that is one for all tokens
_MOST_REMEMBERED = 1024


def _remember(known: dict[tuple[Any, ...], Any], key: tuple[Any, ...], value: Any) -> None:
    if len(known) >= _MOST_REMEMBERED:
        forget()
    known[key] = value


def forget() -> None:
    """Forgets what has passed the checks: the next calls are looked at anew."""
    _passed.clear()
    _latest.clear()
    _settled.clear()


def _row_numbers(given: Tensor | None) -> Tensor | None:
    """A number a token as kernels read it, [N] fp32."""
    return None if given is None else given.detach().resolve_neg().to(torch.float32).reshape(-1)


def _teacher_rows(teacher: tuple[Tensor, Tensor] | None) -> tuple[Tensor | None, Tensor | None]:
    """Ids and probabilities as kernels read them, [N, K] and fp32."""
    if teacher is None:
        return None, None
    ids, probs = teacher
    top_k = ids.shape[-1]
    return ids.resolve_neg().reshape(-1, top_k), probs.detach().resolve_neg().to(torch.float32).reshape(-1, top_k)


def _through_operator(given: Inputs, checked: _arguments.Checked, grad_weight_out: Tensor | None) -> _op.Made:
    if grad_weight_out is not None:
        raise errors.ArgumentError(
            "grad_weight_out is for eager mode; leave it out under torch.compile, dispatch modes and tensor subclasses"
        )
    values, saved, top1 = torch.ops.flce.linear_cross_entropy(*given)
    teacher_logprobs = given.outputs().teacher_logprobs(saved).clone() if checked.teacher_logprobs else None
    return _op.Made(values, top1, teacher_logprobs)


def _own_outputs(made: _op.Made, given: Inputs, token_shape: torch.Size, checked: _arguments.Checked, *, eager: bool) -> Any:
    """The outputs that were asked for, each a tensor of its own. Where several lie in one tensor they are copied: autograd takes a change
    of one view for a change of all views of that tensor, and refuses some changes."""
    asked, written = checked.asked, checked.written
    values, top1, teacher_logprobs = made
    shapes: dict[str, Sequence[int]] = {"loss": token_shape if given.reduction == _arguments.REDUCTIONS["none"] else ()}
    if len(written) == 1 and teacher_logprobs is None:
        shape = shapes.get(written[0], token_shape)
        return values if values.shape == shape else values.view(shape).clone()
    parts = _frame.split_values(values, given.target.shape[0], [name for name in written if name != "top1"])
    if "log_sum_sq_probs" in parts:
        parts["log_sum_sq_probs"] = parts["log_sum_sq_probs"].detach()
    outputs = []
    for name in asked:
        if name == "entropy" and eager:
            outputs.append(_op.own_entropy(parts[name].view(token_shape), values))
        elif name != "top1":
            outputs.append(parts[name].view(shapes.get(name, token_shape)).clone())
        elif top1 is not None:
            outputs.append(top1 if top1.shape == token_shape else top1.view(token_shape).clone())
    if teacher_logprobs is not None:
        outputs.append(teacher_logprobs.view(*token_shape, teacher_logprobs.shape[-1]))
    return tuple(outputs) if len(outputs) > 1 else outputs[0]


def _eager(given: Inputs, passed: _Passed, grad_weight_out: Tensor | None, token_shape: torch.Size) -> _op.Made:
    hidden, weight, bias = given.hidden, given.weight, given.bias
    kernel = passed.kernel
    if kernel is None or given.parallel:
        kernel = passed.kernel = _kernels.find_for(given, grad_weight_out)
    teacher_logprobs = kernel.new_teacher_logprobs(token_shape) if passed.checked.teacher_logprobs else None
    made = _op.Made(kernel.new_values(given, token_shape), kernel.new_top1(token_shape), teacher_logprobs)
    needs_gradient = hidden.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    # Where there are tangents, the node refuses them.
    if (needs_gradient and torch.is_grad_enabled()) or forward_ad._current_level >= 0:
        if kernel.may_retain():
            given = given._replace(retain=_retain.wanted(given.retain, weight=weight.requires_grad and grad_weight_out is None))
        return made._replace(values=_op.apply_directly(hidden, weight, bias, given, kernel, grad_weight_out, made))
    kernel.forward(given, *made)
    return made


def _is_plain(hidden: Tensor, *others: Tensor | None) -> bool:
    """Whether the call may go to the kernels directly: eager, ordinary tensors, nobody watching the dispatcher."""
    if torch.compiler.is_compiling() or _transforms is None or _dispatch_modes is None or _tracing_state() is not None:
        return False
    if _transforms() is not None:
        _op._refuse_transform()
    if _dispatch_modes() or hidden.is_meta:
        return False
    for tensor in (hidden, *others):  # noqa: SIM110  # in half of all()'s time
        if tensor is not None and (type(tensor) not in PLAIN_TYPES or tensor.is_neg()):
            return False  # the dispatcher resolves a negative view
    return True


def _autocast(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    device_type = hidden.device.type
    if device_type not in ("cpu", "cuda") or not torch.is_autocast_enabled(device_type):
        return hidden, weight
    dtype = torch.get_autocast_dtype(device_type)
    if hidden.dtype in DTYPES and hidden.dtype != dtype:
        hidden = hidden.to(dtype)
    # An fp32 weight stays: kernels round it as they read it, so that there is no rounded copy.
    if weight.dtype in DTYPES and weight.dtype not in (dtype, torch.float32):
        weight = weight.to(dtype)
    return hidden, weight
