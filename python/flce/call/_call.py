"""One call of `flce.linear_cross_entropy`, `flce.linear_logprobs` or `flce.linear_topk_distillation`: from arguments to what the caller
gets, by the shortest way there is.

A call like one before (the same options, tensors of the same form) is a direct one; one whose arguments have passed the checks before
goes to its kernel; any other is looked at first. Where the call is traced, watched or transformed, it goes through the operators.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from flce import errors
from flce.call import _arguments, _op, _options
from flce.call._checks import DTYPES, HIDDEN_MULTIPLE, check_grad_weight_out
from flce.call._direct import DirectCall, Form
from flce.call._targets import check_tensors
from flce.core import _autograd, _frame, _kernels, _native, _zero3
from flce.core._frame import PLAIN_TYPES, CallOptions, Inputs

_dispatch_modes, _tracing_state, _transforms = _autograd.dispatch_modes, _autograd.tracing_state, _autograd.transforms
_any_autocast = _autograd.any_autocast


def run(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    options: CallOptions,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    class_offset: Tensor | None = None,
    num_valid_tokens: Tensor | float | None = None,
    temperature: Tensor | float | None = None,
    token_weight: Tensor | None = None,
    grad_weight_out: Tensor | None = None,
    teacher_ids: Tensor | None = None,
    teacher_probs: Tensor | None = None,
    class_group: Tensor | None = None,
    row_group: Tensor | None = None,
) -> Any:
    """`temperature`: read where it is a tensor; the options have one that is a number. `_arguments.check_teacher` has looked at the
    teacher's. `class_group` and `row_group`: both or neither."""
    rows = temperature if isinstance(temperature, Tensor) else None
    alone = False  # there is nothing but options
    if not torch.compiler.is_compiling():
        alone = bias is None and class_weight is None and num_valid_tokens is None and token_weight is None and grad_weight_out is None
        alone = alone and class_offset is None and class_group is None and rows is None and teacher_ids is None
        value = _directly(hidden, weight, target, options if alone else None)
        if value is not None:
            return value
    of_tokens = rows, token_weight, teacher_ids, teacher_probs
    given = Inputs(hidden, weight, target, options, bias, class_weight, None, *of_tokens, class_offset, class_group, row_group)
    return _run_checked(given, num_valid_tokens, grad_weight_out, alone=alone)


def _directly(hidden: Tensor, weight: Tensor, target: Tensor, options: CallOptions | None) -> Tensor | None:
    """The output by the latest direct call with these options; None where there is none, or the tensors are unlike its own."""
    if hasattr(weight, "ds_status"):
        _zero3.refuse_ungathered("weight", weight)
    call = None if options is None else _latest.get(options)
    if call is None or _dispatch_modes() or _transforms() is not None or _tracing_state() is not None:
        return None
    return call.value(hidden, weight, target)


def again(place: str, given: Mapping[str, Any], hidden: Any, weight: Any, target: Any) -> Tensor | None:
    """The output of a function called with options that `remember` knows, by a direct call; None: they are to be looked at."""
    try:
        found = _again.get(_again_key(place, given))
    except TypeError:  # an option that has no hash
        return None
    if found is None:
        return None
    options, group = found
    if group is not None and group() is not given["process_group"]:
        return None  # another one at the place of one that is gone
    return _directly(hidden, weight, target, options)


def remember(place: str, given: Mapping[str, Any], options: CallOptions) -> None:
    """Takes note that a caller's options, none of which is a tensor, come to these where there are direct calls with them."""
    group = given.get("process_group")
    if options in _latest and all(type(each) in _SIMPLE or each is group for each in given.values()):
        _remember(_again, _again_key(place, given), (options, None if group is None else weakref.ref(group)))


def _again_key(place: str, given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Options as they are found again. Types belong to it: 1, 1.0 and True are equal, and not all of them are taken for every option. A
    group, of which equal ones may be different ones, counts by its address."""
    group = given.get("process_group")
    values: Iterable[Any] = given.values()
    if group is not None:
        values = [id(each) if each is group else each for each in values]
    return place, *given, *values, *map(type, values)


def _run_checked(given: Inputs, num_valid_tokens: Tensor | float | None, grad_weight_out: Tensor | None, *, alone: bool) -> Any:
    hidden, weight, target = given.hidden, given.weight, given.target
    check_tensors(**given.tensors(), grad_weight_out=grad_weight_out)
    plain = _is_plain(given)
    signature = passed = None
    if plain and alone and not _any_autocast():
        # Everything that the checks look at: what has passed them passes again.
        signature = (
            *(type(hidden), hidden.shape, hidden.dtype, hidden.device, hidden.requires_grad, hidden.is_inference()),
            *(type(weight), weight.shape, weight.dtype, weight.device, weight.requires_grad, weight.stride()),
            *(target.shape, target.dtype, target.device, given.options),
        )
        passed = _passed.get(signature)
        if passed is not None and (value := passed.call_directly(given)) is not None:
            return value
    if passed is None:
        given = _check(_autocast(given), num_valid_tokens, grad_weight_out, plain=plain)
        passed = _Passed()
        if signature is not None:
            _remember(_passed, signature, passed)
    given = _with_offset_as_bias(_as_kernels_read(given), grad_weight_out)
    made = _eager(given, passed, grad_weight_out, target.shape) if plain else _through_operator(given)
    if _autograd.LOSES_NODES:
        made = made._replace(values=_autograd.keep_node(made.values))
    return _own_outputs(made, given, target.shape, eager=plain)


def _check(given: Inputs, num_valid_tokens: Tensor | float | None, grad_weight_out: Tensor | None, *, plain: bool) -> Inputs:
    """`given` with its num_valid. `plain`: the call may go to the kernels directly."""
    hidden, weight, target, options = given.hidden, given.weight, given.target, given.options
    sequence_ranks = 1 if options.parallel is None else options.parallel.sequence_ranks
    _arguments.check_inputs(hidden, weight, target, given.of_classes(), sequence_ranks)
    if given.temperature is not None:
        _arguments.check_temperature(given.temperature, target)
    reduction = _options.REDUCTION_NAMES[options.reduction]
    _arguments.check_token_weight(given.token_weight, reduction, target)
    if num_valid_tokens is not None:
        given = given._replace(num_valid=_arguments.num_valid(num_valid_tokens, reduction, hidden))
    if grad_weight_out is not None:
        if not plain:
            raise errors.ArgumentError(
                "grad_weight_out is for eager mode and plain tensors; leave it out under torch.compile and dispatch modes, and for tensor "
                "subclasses, meta tensors and negative views"
            )
        others = {name: tensor for name, tensor in given.tensors().items() if name not in ("hidden", "weight")}
        others["num_valid_tokens"] = others.pop("num_valid")
        check_grad_weight_out(grad_weight_out, hidden, weight, **others)
    return given


def _as_kernels_read(given: Inputs) -> Inputs:
    """Tokens in one dimension, hidden states in rows of whole vectors."""
    hidden, weight, target = given.hidden, given.weight, given.target
    if target.dim() != 1:
        hidden = hidden.reshape(-1, hidden.shape[-1])
        target = target.reshape(-1)
    if hidden.shape[1] % HIDDEN_MULTIPLE:
        padding = -hidden.shape[1] % HIDDEN_MULTIPLE
        hidden, weight = F.pad(hidden, (0, padding)), F.pad(weight, (0, padding))
    if not hidden.is_contiguous():
        hidden = hidden.contiguous()
    temperature, ids, probs = given.temperature, given.teacher_ids, given.teacher_probs
    if given.options.temperature is not None:
        temperature = torch.full(target.shape, given.options.temperature, dtype=torch.float32, device=hidden.device)
    if ids is not None and probs is not None:
        top_k = ids.shape[-1]
        ids, probs = ids.resolve_neg().reshape(-1, top_k), probs.detach().resolve_neg().to(torch.float32).reshape(-1, top_k)
    return given._replace(
        hidden=hidden,
        weight=weight,
        target=target,
        temperature=_row_numbers(temperature),
        token_weight=_row_numbers(given.token_weight),
        teacher_ids=ids,
        teacher_probs=probs,
    )


def _with_offset_as_bias(given: Inputs, grad_weight_out: Tensor | None) -> Inputs:
    """A bias of the same value that brings class_offset's gradient. Without a softcap it is the bias's over logit_scale; kernels whose
    weight's gradient has 16 bits would round it to as many."""
    offset, options = given.class_offset, given.options
    if offset is None or not (offset.requires_grad and torch.is_grad_enabled()) or options.number("softcap"):
        return given
    if (given.weight if grad_weight_out is None else grad_weight_out).dtype is not torch.float32:
        return given
    finite = offset.float().nan_to_num(neginf=0.0)  # a class that is ruled out has a gradient of 0
    zero = (finite - finite.detach()) / options.number("logit_scale", 1.0)
    bias = zero if given.bias is None else given.bias.float() + zero
    return given._replace(bias=bias, class_offset=offset.detach())


# Direct calls of a weight that lies over ranks; set by what knows of ranks.
direct_shard: type[Form] | None = None


class _Passed:
    """A call whose arguments have passed the checks."""

    __slots__ = ("direct", "kernel")

    def __init__(self) -> None:
        self.kernel: _kernels.LoadedKernel | None = None  # the looked-up kernel of a call that is remembered
        self.direct: Form | None = None

    def call_directly(self, given: Inputs) -> Tensor | None:
        """The output by a direct call, made at the second call of the kind; None where there can be none."""
        hidden, weight, target, options = given.hidden, given.weight, given.target, given.options
        call = self.direct
        if call is None:
            kind = DirectCall if options.parallel is None else direct_shard
            if kind is None or self.kernel is None or not kind.fits(self.kernel, hidden, weight, target, options):
                return None
            call = self.direct = kind(self.kernel, hidden, weight, target, options)
        value = call.value(hidden, weight, target)
        if value is not None:
            _latest[options] = call
        return value


_passed: dict[tuple[Any, ...], _Passed] = {}
_latest: dict[CallOptions, Form] = {}
_again: dict[tuple[Any, ...], tuple[CallOptions, weakref.ref[Any] | None]] = {}  # by `_again_key`
_SIMPLE = (bool, int, float, str, type(None), torch.dtype)
_MOST_REMEMBERED = 1024


def _remember(known: dict[tuple[Any, ...], Any], key: tuple[Any, ...], value: Any) -> None:
    if len(known) >= _MOST_REMEMBERED:
        forget()
    known[key] = value


def forget() -> None:
    """Forgets what has passed the checks: the next calls are looked at anew."""
    _passed.clear()
    _latest.clear()
    _again.clear()
    _options.known.cache_clear()


def _row_numbers(given: Tensor | None) -> Tensor | None:
    """A number a token as kernels read it, [N] fp32."""
    return None if given is None else given.detach().resolve_neg().to(torch.float32).reshape(-1)


def _through_operator(given: Inputs) -> _op.Made:
    values, saved, top1 = torch.ops.flce.linear_cross_entropy(*_op.operands(given, _op.FORWARD))
    teacher_logprobs = given.outputs().teacher_logprobs(saved).clone() if given.options.teacher_logprobs else None
    return _op.Made(values, top1, teacher_logprobs)


def _own_outputs(made: _op.Made, given: Inputs, token_shape: torch.Size, *, eager: bool) -> Any:
    """The outputs that were asked for, each a tensor of its own. Where several lie in one tensor they are copied: autograd takes a change
    of one view for a change of all views of that tensor, and refuses some changes."""
    options, (names, *_) = given.options, given.options.outputs
    values, top1, teacher_logprobs = made
    if options.named_logprobs:
        return _named_outputs(values, given, token_shape, eager=eager)
    shapes: dict[str, Sequence[int]] = {"loss": token_shape if options.reduction == _native.REDUCTION_NONE else ()}
    if len(names) == 1 and not options.outputs.top1 and teacher_logprobs is None:
        shape = shapes.get(names[0], token_shape)
        return values if values.shape == shape else values.view(shape).clone()
    parts = _frame.split_values(values, given.target.shape[0], names)
    if "log_sum_sq_probs" in parts:
        parts["log_sum_sq_probs"] = parts["log_sum_sq_probs"].detach()
    outputs = []
    for name in options.asked:
        if name == "entropy" and eager:
            outputs.append(_op.own_entropy(parts[name].view(token_shape), values))
        elif name != "top1":
            outputs.append(parts[name].view(shapes.get(name, token_shape)).clone())
        elif top1 is not None:
            outputs.append(top1 if top1.shape == token_shape else top1.view(token_shape).clone())
    if teacher_logprobs is not None:
        outputs.append(teacher_logprobs.view(*token_shape, teacher_logprobs.shape[-1]))
    return tuple(outputs) if len(outputs) > 1 else outputs[0]


def _named_outputs(values: Tensor, given: Inputs, token_shape: torch.Size, *, eager: bool) -> tuple[Tensor, ...]:
    """Log-probabilities of the classes that were named, and behind them the outputs that were asked for."""
    rest, named = _op.split_named(values, given)
    parts = _frame.split_values(rest, given.target.shape[0], given.options.outputs.values)
    outputs = [named.reshape(*token_shape, named.shape[1]).clone()]
    for name in given.options.asked:
        if name == "entropy" and eager:
            outputs.append(_op.own_entropy(parts[name].view(token_shape), values))
        elif name != "loss":
            outputs.append(parts[name].view(token_shape).clone())
    return tuple(outputs)


def _eager(given: Inputs, passed: _Passed, grad_weight_out: Tensor | None, token_shape: torch.Size) -> _op.Made:
    given = given.with_group()
    hidden, weight, options = given.hidden, given.weight, given.options
    kernel = passed.kernel
    if kernel is None or options.parallel is not None:
        kernel = passed.kernel = _kernels.find_for(given, grad_weight_out)
    made = _op.new_made(kernel, given, token_shape, teacher_logprobs=options.teacher_logprobs)
    # Where there are tangents, the node refuses them.
    if (given.asks_gradient() and torch.is_grad_enabled()) or forward_ad._current_level >= 0:
        if given.class_offset is not None and given.class_offset.requires_grad:
            kernel.of_offsets(given)  # strict mode and a capture miss a kernel here, not in backward
        if kernel.may_retain():
            given = given.retaining(options.retain._replace(gradient=True, weight=weight.requires_grad and grad_weight_out is None))
        return made._replace(
            values=_op.apply_directly(hidden, weight, given.bias, given.class_offset, given, kernel, grad_weight_out, made)
        )
    kernel.forward(given, *made.as_written(given))
    return made


def _is_plain(given: Inputs) -> bool:
    """Whether the call may go to the kernels directly: eager, ordinary tensors, nobody watching the dispatcher."""
    if torch.compiler.is_compiling() or _transforms is None or _dispatch_modes is None or _tracing_state() is not None:
        return False
    if _transforms() is not None:
        _op._refuse_transform()
    if _dispatch_modes() or given.hidden.is_meta:
        return False
    for tensor in given.tensors().values():  # noqa: SIM110  # in half of all()'s time
        if tensor is not None and (type(tensor) not in PLAIN_TYPES or tensor.is_neg()):
            return False  # the dispatcher resolves a negative view
    return True


def _autocast(given: Inputs) -> Inputs:
    hidden, weight = given.hidden, given.weight
    device_type = hidden.device.type
    if device_type not in ("cpu", "cuda") or not torch.is_autocast_enabled(device_type):
        return given
    dtype = torch.get_autocast_dtype(device_type)
    if hidden.dtype in DTYPES and hidden.dtype != dtype:
        hidden = hidden.to(dtype)
    # An fp32 weight stays: kernels round it as they read it, so that there is no rounded copy.
    if weight.dtype in DTYPES and weight.dtype not in (dtype, torch.float32):
        weight = weight.to(dtype)
    return given._replace(hidden=hidden, weight=weight)
