"""The operators flce::linear_cross_entropy and flce::linear_cross_entropy_backward, and the autograd node that both eager code and
compilers record.

Operators take plain types: the tensors of `_frame.Inputs`, and its options as numbers and texts. No copy is made where hidden is contiguous
and weight or its transpose is.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flce import errors
from flce.call import _checks
from flce.core import _autograd, _frame, _kernels, _retain
from flce.core._frame import CallOptions, Inputs, Parallel


def run_backward(
    kernel: _kernels.LoadedKernel | None,
    given: Inputs,
    saved: Tensor,
    grad_values: Tensor,
    wanted: Sequence[bool],
    grad_weight_out: Tensor | None = None,
    *,
    filled: bool = False,
    entropy: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight, bias and class_offset, None where `wanted` is false. With `grad_weight_out` the weight's is added there
    and None here. All tensors are looked at again: a hook on saved tensors, or `.data`, may have put others in the place of forward's.
    `filled`: forward left something to backward, as far as the caller knows; `saved` tells too, unless a hook has put another tensor in its
    place. `entropy`: LoadedKernel.backward's."""
    given = given.with_group()
    kernel = _checks.kernel_for_backward(kernel, given, saved, grad_values, grad_weight_out)
    upstream = grad_values.resolve_neg().contiguous()
    return gradients_of(kernel, given, saved, upstream, wanted, grad_weight_out, filled=filled, entropy=entropy)


def gradients_of(
    kernel: _kernels.LoadedKernel,
    given: Inputs,
    saved: Tensor,
    upstream: Tensor,
    wanted: Sequence[bool],
    grad_weight_out: Tensor | None = None,
    *,
    filled: bool,
    entropy: bool = True,
    backward: Callable[..., None] | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """`run_backward` of tensors that have been looked at; `upstream`: of values, contiguous. `backward`: in place of the kernel's."""
    backward = backward or kernel.backward
    hidden, weight, bias = given.hidden, given.weight, given.bias
    want_hidden, want_weight, want_bias, want_offset = wanted
    grad_hidden = grad_bias = grad_offset = None
    if want_offset and given.class_offset is not None:
        grad_offset = _offset_gradient(kernel, given, given.class_offset, saved, upstream, entropy=entropy)
    if want_hidden:
        grad_hidden = torch.empty_like(hidden) if hidden.is_contiguous() else hidden.new_empty(hidden.shape)
    if want_bias and bias is not None:
        # An accumulating kernel adds to the bias gradient too; autograd wants this call's alone.
        make = torch.zeros if kernel.key.accumulate else torch.empty
        grad_bias = make(bias.shape, dtype=kernel.key.grad_weight_dtype, device=hidden.device)
    if grad_hidden is None and grad_bias is None and not want_weight:
        return None, None, None, grad_offset
    kernel.trains_entropy = entropy and "entropy" in kernel.outputs.values
    grad_weight = grad_weight_out if want_weight else None
    retained = _retain.of(saved)
    if retained is None:
        if want_weight and grad_weight is None:
            grad_weight = _new_grad_weight(kernel, weight)
        saved = kernel.saved_anew(given, saved) if filled and kernel.retaining_changes_saved else saved.contiguous()
        backward(given, saved, upstream, grad_hidden, grad_weight, grad_bias, entropy=entropy)
    else:
        with retained.taken(kernel, given, weight=want_weight) as (memory, overwrite):
            if want_weight and grad_weight is None:
                grad_weight = memory if overwrite else _new_grad_weight(kernel, weight)
            if memory is None and retained.filled and kernel.retaining_changes_saved:
                saved = kernel.saved_anew(given, saved)
            backward(given, saved, upstream, grad_hidden, grad_weight, grad_bias, memory, lent=retained.lent, entropy=entropy)
            del memory
    if grad_bias is not None and bias is not None:
        grad_bias = grad_bias.to(bias.dtype)
    if grad_weight_out is not None:
        grad_weight = None
    elif grad_weight is not None and kernel.key.accumulate:
        grad_weight = grad_weight.to(weight.dtype)  # the kernel is for a buffer, whose dtype may be another
    return grad_hidden, grad_weight, grad_bias, grad_offset


def _offset_gradient(
    kernel: _kernels.LoadedKernel, given: Inputs, offset: Tensor, saved: Tensor, grad_values: Tensor, *, entropy: bool
) -> Tensor:
    """class_offset's gradient: the bias's of a kernel that takes the slopes of logits for 1, which computes the logits once more."""
    if given.bias is None:
        given = given._replace(bias=torch.zeros_like(offset))
    gradient = kernel.new_floats(offset.shape)
    kernel.of_offsets(given).backward(given, saved.contiguous(), grad_values, None, None, gradient, entropy=entropy)
    return gradient.masked_fill_(offset.isneginf(), 0).to(offset.dtype)


def _new_grad_weight(kernel: _kernels.LoadedKernel, weight: Tensor) -> Tensor:
    """Memory for weight's gradient, as the kernel has to find it."""
    gradient = kernel.new_grad_weight(weight)
    return gradient.zero_() if kernel.key.accumulate else gradient


class NoSecondDerivative(torch.autograd.Function):
    """The identity on a gradient; refuses to be differentiated, where torch would silently return zeros."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise errors.UnsupportedTransformError(
            "flce has no second derivatives: differentiate its gradients with the loss written in plain torch instead"
        )


def refuse_second_derivative(gradients: Sequence[Tensor | None], sources: Sequence[Tensor | None]) -> list[Tensor | None]:
    tracked = [source for source in sources if source is not None and source.requires_grad]
    if not tracked:
        return list(gradients)
    return [None if gradient is None else NoSecondDerivative.apply(gradient, *tracked) for gradient in gradients]


# Multiply-adds up to which gradients are made unasked: the question to the engine takes some microseconds, and small gradients are made in
# less. (Not where one would be added to a buffer unasked, and not while tracing: there no choice may hang on the number of tokens.)
SMALL = 1 << 16


def refuse_forward_mode() -> None:
    raise errors.UnsupportedTransformError(
        "flce.linear_cross_entropy has no forward-mode derivatives: use reverse mode (backward, autograd.grad)"
    )


class Made(NamedTuple):
    """Memory for what a forward writes."""

    values: Tensor  # with CallOptions.named_logprobs flat, and teacher_logprobs its end
    top1: Tensor | None
    teacher_logprobs: Tensor | None

    def as_written(self, given: Inputs) -> Made:
        """The tensors as a kernel knows them."""
        if not given.options.named_logprobs:
            return self
        values, named = split_named(self.values, given)
        return self._replace(values=values, teacher_logprobs=named)


def split_named(values: Tensor, given: Inputs) -> tuple[Tensor, Tensor]:
    """A kernel's values, and teacher_logprobs [N, K], of the tensor that holds both; or their gradients."""
    outputs, num_tokens = given.options.outputs, given.target.shape[0]
    size = len(outputs.values) * num_tokens
    return values[:size], values[size:].view(num_tokens, outputs.teacher_top_k)


def _of_named_gradients(given: Inputs, grad_values: Tensor) -> tuple[Inputs, Tensor]:
    """A call whose loss, -Σ q·log p, has the gradients of its log-probabilities, and that call's upstream gradient."""
    gradients, of_named = split_named(grad_values.resolve_neg(), given)
    num_tokens = given.target.shape[0]
    gradients = torch.cat([torch.ones_like(gradients[:num_tokens]), gradients[num_tokens:]])
    return given._replace(teacher_probs=-of_named), gradients


class LinearCrossEntropyFunction(torch.autograd.Function):
    """The node. The differentiable inputs come first (`_autograd.wanted_gradients` counts on it), and again in `given`. Its one output is
    made.values (schedules that split backward add up the gradients of a node's outputs, or know the first alone). Without a kernel it goes
    through the operators, and its outputs are theirs."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        class_offset: Tensor | None,
        given: Inputs,
        kernel: _kernels.LoadedKernel | None,
        grad_weight_out: Tensor | None,
        made: Made | None,
    ) -> Any:
        ctx.call = kernel, grad_weight_out, given.options
        if kernel is None or made is None:
            with torch._C._AutoDispatchBelowAutograd():
                values, saved, top1 = _forward_op(*operands(given, FORWARD))
            ctx.mark_non_differentiable(saved, top1)
        else:
            saved = kernel.forward(given, *made.as_written(given))
        ctx.filled = _retain.has_filled(saved)
        ctx.has_entropy_gradient = True
        ctx.save_for_backward(saved, *given.tensors().values())
        return (values, saved, top1) if made is None else made.values

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        grad_values = grad_outputs[0]
        saved, *tensors = ctx.saved_tensors
        kernel, grad_weight_out, options = ctx.call
        given = Inputs.of(tensors, options)
        hidden, weight = given.hidden, given.weight
        if options.named_logprobs:
            if kernel is not None:
                _kernels.refuse_batched(grad_values)
            given, grad_values = _of_named_gradients(given, grad_values)
        # Ranks that share a vocabulary add up what all of them ask for, however few rows one has.
        may_ask = kernel is None or grad_weight_out is not None or options.parallel is not None or hidden.shape[0] * weight.numel() >= SMALL
        wanted = _autograd.wanted_gradients(ctx, bias=given.bias is not None) if may_ask else ctx.needs_input_grad[:4]
        gradients: Sequence[Tensor | None]
        if kernel is None:
            of_values = {"grad_values": grad_values, "saved": saved, "wanted": wanted[:3], "want_class_offset": wanted[3]}
            made = _backward_op(*operands(given, BACKWARD, **of_values))
            return *(value if want else None for value, want in zip(made, wanted, strict=True)), None, None, None, None
        into = grad_weight_out
        if into is not None and wanted[1] and _autograd.is_asked_for_by_grad(ctx.next_functions[1][0]):
            into = None
        entropy = ctx.has_entropy_gradient
        gradients = run_backward(kernel, given, saved, grad_values, wanted, into, filled=ctx.filled, entropy=entropy)
        if torch.is_grad_enabled():
            gradients = refuse_second_derivative(gradients, (grad_outputs[0], hidden, weight, given.bias, given.class_offset))
        return *gradients, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse_forward_mode()


class OwnEntropy(torch.autograd.Function):
    """A copy of the entropy among a node's values, whose backward tells the node that there is a gradient of it. The engine runs that
    before the node. Told once, the node takes it for so ever after: another thread's backward may be under way."""

    @staticmethod
    def forward(ctx: Any, entropy: Tensor, node: Any) -> Tensor:
        ctx.node = node
        return entropy.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.node.has_entropy_gradient = True
        return gradients[0], None


def own_entropy(entropy: Tensor, values: Tensor) -> Tensor:
    """A copy of an eager call's entropy, a part of `values`. Where nothing is computed from it that has a gradient, backward may use what
    forward retained."""
    node = _autograd.python_node(values)
    if node is None:
        return entropy.clone()
    node.has_entropy_gradient = False
    copy: Tensor = OwnEntropy.apply(entropy, node)
    return copy


# Function.apply without its layer in Python, for calls that have looked for torch.func's transforms themselves.
apply_directly: Callable[..., Tensor] = super(torch.autograd.Function, LinearCrossEntropyFunction).apply


# ── torch.library ───────────────────────────────────────

_INPUTS = "Tensor hidden, Tensor weight, Tensor target"
_REST = "Tensor? bias, Tensor? class_weight, Tensor? num_valid, str options, int ignore_index, int reduction, int workspace_limit_bytes"
# A schema's fields keep their places, since caches of compiled graphs do not look at schemas.
_CHOICE = "int retain=0"
_ROWS = "Tensor? temperature=None, Tensor? token_weight=None, Tensor? teacher_ids=None, Tensor? teacher_probs=None, str parallel=''"
_CLASSES = "Tensor? class_offset=None, Tensor? class_group=None, Tensor? row_group=None"

_SCHEMAS = {
    "linear_cross_entropy": f"({_INPUTS}, {_REST}, {_CHOICE}, {_ROWS}, bool named_logprobs=False, {_CLASSES})"
    " -> (Tensor values, Tensor saved, Tensor top1)",
    "linear_cross_entropy_backward": f"(Tensor grad_values, {_INPUTS}, Tensor saved, {_REST}, bool[3] wanted, {_ROWS}, {_CLASSES},"
    " bool want_class_offset=False) -> (Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias, Tensor grad_class_offset)",
}


def _define() -> None:
    """Operators are the process's and stay. Where this module is imported a second time they are there, and find what it has."""
    if hasattr(torch.ops.flce, "linear_cross_entropy"):
        return
    library = torch.library.Library("flce", "DEF")
    vars(torch.ops.flce)["_library"] = library  # the library takes its operators with it when it goes
    for name, schema in _SCHEMAS.items():
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
        way = name.replace("linear_cross_entropy", "_forward").replace("_forward_backward", "_backward")
        for key, what in (("CPU", "kernel"), ("CUDA", "kernel"), ("Autograd", "autograd")):
            library.impl(name, _in_this_module(f"{way}_{what}"), key)
        library.impl(name, _in_this_module("_refuse_transform"), "FuncTorchBatched")
        torch.library.register_fake(f"flce::{name}", _in_this_module(f"{way}_fake"), lib=library)


def _in_this_module(name: str) -> Callable[..., Any]:
    """The function of this name that the module has when it is called."""
    return lambda *args: getattr(sys.modules[__name__], name)(*args)


_define()
_forward_op: Callable[..., tuple[Tensor, ...]] = torch.ops.flce.linear_cross_entropy.default
_backward_op: Callable[..., tuple[Tensor, ...]] = torch.ops.flce.linear_cross_entropy_backward.default
FORWARD, BACKWARD = ([each.name for each in op._schema.arguments] for op in (_forward_op, _backward_op))  # type: ignore[attr-defined]


def operands(given: Inputs, names: Sequence[str], **more: Any) -> list[Any]:
    """The arguments of the operator that has them by these names; `more`: those that are not in `given`."""
    options, parallel = given.options, given.options.parallel
    more |= given.tensors() | {
        "options": options.spec,
        "ignore_index": options.ignore_index,
        "reduction": options.reduction,
        "workspace_limit_bytes": options.workspace_limit_bytes,
        "retain": options.retain.bits(),
        "parallel": "" if parallel is None else parallel.text(),
        "named_logprobs": options.named_logprobs,
    }
    return [more[name] for name in names]


@functools.lru_cache(maxsize=1024)
def _options_of(
    options: str,
    ignore_index: int,
    reduction: int,
    workspace_limit_bytes: int,
    retain: int = 0,
    parallel: str = "",
    named_logprobs: bool = False,
) -> CallOptions:
    return CallOptions(
        spec=options,
        outputs=_frame.outputs_of(options),
        ignore_index=ignore_index,
        reduction=reduction,
        workspace_limit_bytes=workspace_limit_bytes,
        retain=_retain.Retain.of_bits(retain),
        parallel=Parallel.of_text(parallel),
        named_logprobs=named_logprobs,
    )


_OF_OPTIONS = tuple(inspect.signature(_options_of).parameters)


def _given(names: Sequence[str], args: Sequence[Any]) -> tuple[Inputs, dict[str, Any]]:
    """An operator's arguments as Inputs, and by name. The dispatcher leaves out those at their defaults."""
    named = dict(zip(names, args, strict=False))
    options = _options_of(**{name: named[name] for name in _OF_OPTIONS if name in named})
    return Inputs(**{name: named.get(name) for name in _frame.TENSORS}, options=options), named  # type: ignore[arg-type]


# Name of the attribute of `saved` that holds forward's shard. Ranks whose backward is eager know theirs: they would not come where hosts
# tell each other numbers.
_SHARD = "_flce_shard"


def _forward_kernel(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    given = _given(FORWARD, args)[0].with_group()
    if given.options.retain != _retain.Retain() and _retain.under_cudagraph_trees(given.hidden):
        given = given.retaining(_retain.Retain())
    _checks.check_inputs(given)
    kernel = _kernels.find_for(given)
    made = new_made(kernel, given, given.target.shape)
    saved = kernel.forward(given, *made.as_written(given))
    if given.options.parallel is not None:
        shard, _ = kernel.of
        setattr(saved, _SHARD, shard)
    return made.values, saved, given.hidden.new_empty(0, dtype=torch.int64) if made.top1 is None else made.top1


def new_made(kernel: _kernels.LoadedKernel, given: Inputs, token_shape: torch.Size, *, teacher_logprobs: bool = False) -> Made:
    """`teacher_logprobs`: the caller gets them, and they have no gradient."""
    options = given.options
    if options.named_logprobs:
        values = kernel.new_floats((len(options.outputs.values) + options.outputs.teacher_top_k) * given.target.shape[0])
    else:
        values = kernel.new_values(given, token_shape)
    return Made(values, kernel.new_top1(token_shape), kernel.new_teacher_logprobs(token_shape) if teacher_logprobs else None)


def _backward_kernel(*args: Any) -> tuple[Tensor, ...]:
    given, named = _given(BACKWARD, args)
    grad_values, saved, wanted = named["grad_values"], named["saved"], named["wanted"]
    shard = getattr(saved, _SHARD, None)
    kernel = None if shard is None else _kernels.find_for(given, backward=True, shard=shard)
    gradients = run_backward(kernel, given, saved, grad_values, (*wanted, named.get("want_class_offset", False)))
    if wanted[1] and (retained := _retain.of(saved)) is not None:
        retained.close()  # a compiler may use the memory of `saved` for something else, and that tensor as long as it likes
    return tuple(grad_values.new_empty(0) if gradient is None else gradient for gradient in gradients)


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    given, _ = _given(FORWARD, args)
    hidden = given.hidden
    num_tokens = given.target.shape[0]
    outputs = given.outputs()
    shape = outputs.shape((num_tokens,), num_tokens, given.options.reduction)
    if given.options.named_logprobs:
        shape = ((len(outputs.values) + outputs.teacher_top_k) * num_tokens,)
    values = hidden.new_empty(shape, dtype=torch.float32)
    saved = hidden.new_empty(outputs.saved_size(num_tokens), dtype=torch.float32)
    return values, saved, hidden.new_empty(num_tokens if outputs.top1 else 0, dtype=torch.int64)


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    given, named = _given(BACKWARD, args)
    grad_values, wanted = named["grad_values"], named["wanted"]
    weight, bias, offset = given.weight, given.bias, given.class_offset
    grad_hidden = given.hidden.new_empty(given.hidden.shape) if wanted[0] else grad_values.new_empty(0)
    grad_weight = grad_values.new_empty(0)
    if wanted[1]:
        grad_weight = weight.new_empty(weight.shape[::-1]).t() if _frame.is_hidden_major(weight) else weight.new_empty(weight.shape)
    grad_bias = bias.new_empty(bias.shape) if wanted[2] and bias is not None else grad_values.new_empty(0)
    grad_offset = grad_values.new_empty(0)
    if offset is not None and named.get("want_class_offset", False):
        grad_offset = offset.new_empty(offset.shape)
    return grad_hidden, grad_weight, grad_bias, grad_offset


def _forward_autograd(*args: Any) -> Any:
    given, _ = _given(FORWARD, args)
    asked = given.asks_gradient()
    # Whether an entropy will have a gradient nobody can tell here, and exponentials would be no use to it.
    exponentials = given.hidden.device.type == "cuda" and "entropy" in given.options.outputs.values
    if asked and torch.is_grad_enabled() and not exponentials:
        given = given.retaining(given.options.retain._replace(gradient=True, weight=given.weight.requires_grad))
    return LinearCrossEntropyFunction.apply(given.hidden, given.weight, given.bias, given.class_offset, given, None, None, None)


def _backward_autograd(*args: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        gradients = _backward_op(*args)
    if not torch.is_grad_enabled():
        return gradients
    given, named = _given(BACKWARD, args)
    return tuple(refuse_second_derivative(gradients, (named["grad_values"], given.hidden, given.weight, given.bias, given.class_offset)))


def _refuse_transform(*args: Any, **kwargs: Any) -> Any:
    raise errors.UnsupportedTransformError(
        "flce.linear_cross_entropy cannot run under a transform of torch.func (vmap, grad, jvp, …): fold the mapped dimension into the "
        "tokens, and use backward or autograd.grad for gradients"
    )
