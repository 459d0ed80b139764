"""The operators flce::linear_divergence and flce::linear_divergence_backward: two heads' kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flce import errors
from flce.call import _op
from flce.core import _kernels, _native, _retain
from flce.core._frame import is_hidden_major
from flce.operators import _passes
from flce.operators._passes import IGNORED as IGNORED

_SAVED = ("lse", "teacher_lse", "student_divergence")  # backward's inputs from forward, [N] each
_LEAST_WORK = 0  # multiply-adds from which on logits are retained; 0: the library's number


class _Heads(NamedTuple):
    """The inputs of both passes, as the ABI names them."""

    hidden: Tensor
    weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    target: Tensor | None  # IGNORED where a token is left out; None: all count
    bias: Tensor | None
    teacher_bias: Tensor | None
    temperature: Tensor | None

    def place(self, options: str, parallel: str, *, backward: bool = False) -> _passes.Place | None:
        if not parallel:
            return None
        of_tokens = {"mask": self.targets(), "temperature": self.temperature}
        given = {"mask": self.target is not None, "temperature": self.temperature is not None, "student_bias": self.bias is not None}
        return _passes.place_of(parallel, self.hidden, self.weight, of_tokens, options, given, backward=backward)

    def targets(self) -> Tensor:
        """A class for tokens that count: any."""
        return self.hidden.new_zeros(self.hidden.shape[0], dtype=torch.int64) if self.target is None else self.target

    def kernel(self, options: str, workspace_limit_bytes: int, place: _passes.Place | None) -> _kernels.LoadedKernel:
        biased, tempered = self.bias is not None, self.temperature is not None
        return _passes.kernel_of(self.hidden, self.weight, options, workspace_limit_bytes, place, bias=biased, temperature=tempered)

    def retained_of(self) -> tuple[Tensor | None, ...]:
        return tuple(self)

    def as_read(self) -> dict[str, Tensor]:
        return _passes.as_read(self._replace(target=self.targets())._asdict(), self.weight)


def _forward_kernel(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(divergence [N], what backward reads [3, N], entropies of student and teacher [2, N], retained logits [bytes])"""
    *tensors, options, workspace_limit_bytes, parallel, mixes, retain = given
    heads = _Heads(*tensors)
    place = heads.place(options, parallel)
    kernel = heads.kernel(options, workspace_limit_bytes, place)
    num_tokens = heads.hidden.shape[0]
    divergence, saved, entropies = (kernel.new_floats(shape) for shape in (num_tokens, (len(_SAVED), num_tokens), (2, num_tokens)))
    kept, memory = _retained(kernel, heads, workspace_limit_bytes, place, _retain.Retain.of_bits(retain))
    lent = kept is not None and kept.lent
    written = dict(zip(_SAVED, saved.unbind(0), strict=True))
    written |= {"loss": divergence, "entropy": entropies[0], "teacher_entropy": entropies[1]}
    read = heads.as_read()
    for walk in (_passes.SUMS, _passes.MIXTURE)[: 2 if mixes and place is not None else 1]:
        _passes.forward(kernel, place, read, written, retained=memory, lent=lent, walk=walk)
    if kept is not None:
        _retain.attach(kept, saved)
    return divergence, saved, entropies, kernel.new_bytes(0) if memory is None or lent else memory


def _retained(
    kernel: _kernels.LoadedKernel, heads: _Heads, limit: int, place: _passes.Place | None, retain: _retain.Retain
) -> tuple[_retain.Retained | None, Tensor | None]:
    """Memory for logits that forward is to fill, or None: the weight's gradient's, or what a limit leaves. The first result stands for a
    forward that may lend, and is attached to what it saves."""
    if not kernel.retains or not retain.gradient or (place is not None and place.shard.classes == 0):
        return None, None
    num_tokens, classes = heads.hidden.shape[0], 0 if place is None else place.shard.classes

    def choice(limit: int, lend: bool) -> _retain.Choice:
        where, size = _native.choose_retained(kernel._handle, num_tokens, limit, lend, _LEAST_WORK, classes)
        return _retain.Choice(where == _native.RETAINED_GRAD_WEIGHT, size)

    kept = None
    may_lend = retain.weight and retain.choice != _retain.NEVER and not _retain.under_cudagraph_trees(heads.hidden)
    if may_lend and place is None and choice(0, True).lent:
        kept = _retain.Retained(kernel, heads, kernel.alive)
    chosen = choice(limit, kept is not None and _retain.lends(kernel, retain.choice, heads.hidden))
    if kept is not None and chosen.lent:
        memory = kernel.new_grad_weight(heads.weight)
        kept.keep(memory, lent=True)
        return kept, memory
    return kept, kernel.new_bytes(chosen.size) if limit and chosen.size else None


def _backward_kernel(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    grad_divergence, saved, retained, *tensors, options, workspace_limit_bytes, parallel, wanted = given
    heads = _Heads(*tensors)
    place = heads.place(options, parallel, backward=True)
    kernel = heads.kernel(options, workspace_limit_bytes, place)
    num_tokens = heads.hidden.shape[0]
    if list(saved.shape) != [len(_SAVED), num_tokens] or list(grad_divergence.shape) != [num_tokens]:
        raise errors.ShapeError("something changed the tensors of a divergence between forward and backward")
    read = heads.as_read()
    upstream = grad_divergence.resolve_neg().contiguous()
    numbers = dict(zip(_SAVED, saved.contiguous().unbind(0), strict=True)) | {"grad_loss": upstream}

    def run(memory: Tensor | None, overwrite: bool, lent: bool) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        for name, want in zip(("hidden", "weight", "bias"), wanted, strict=True):
            if want:
                made[f"grad_{name}"] = memory if overwrite and name == "weight" and memory is not None else torch.empty_like(read[name])
        if made:
            _passes.backward(kernel, place, read | numbers, made, memory, lent=lent)
        return made

    kept = _retain.of(saved)
    if kept is None:
        made = run(retained, False, False)
    else:
        with kept.taken(kernel, heads, weight=wanted[1]) as (memory, overwrite):
            made = run(retained if memory is None else memory, overwrite, memory is not None)
            del memory
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
    grad_divergence, _, _, *tensors, _, _, _, wanted = given
    heads = _Heads(*tensors)
    none = grad_divergence.new_empty(0)
    weight = heads.weight
    grad_weight = none
    if wanted[1]:
        grad_weight = weight.new_empty(weight.shape[::-1]).t() if is_hidden_major(weight) else weight.new_empty(weight.shape)
    bias = heads.bias.new_empty(heads.bias.shape) if wanted[2] and heads.bias is not None else none
    return heads.hidden.new_empty(heads.hidden.shape) if wanted[0] else none, grad_weight, bias


_HEADS = (
    "Tensor hidden, Tensor weight, Tensor teacher_hidden, Tensor teacher_weight, Tensor? target, Tensor? bias, Tensor? teacher_bias, "
    "Tensor? temperature, str options, int workspace_limit_bytes, str parallel"
)
_MADE = "(Tensor divergence, Tensor saved, Tensor entropies, Tensor retained)"
_UPSTREAM = "Tensor grad_divergence, Tensor saved, Tensor retained"
_SCHEMAS = {
    "linear_divergence": f"({_HEADS}, bool mixes, int retain) -> {_MADE}",
    "linear_divergence_backward": f"({_UPSTREAM}, {_HEADS}, bool[3] wanted) -> (Tensor, Tensor, Tensor)",
}
_WAYS = {"linear_divergence": "_forward", "linear_divergence_backward": "_backward"}
_STUDENT = (0, 1, 5)  # places of hidden, weight and bias
_NO_TENSORS = 5  # options to retain


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, options, workspace_limit_bytes, parallel, _, _ = inputs
    ctx.options = options, workspace_limit_bytes, parallel
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # zeros for what is retained would be as large
    ctx.save_for_backward(output[1], output[3], *tensors)


def _backward(ctx: Any, grad_divergence: Tensor | None, *_: Any) -> tuple[Any, ...]:
    saved, retained, *tensors = ctx.saved_tensors
    places: list[Any] = [None] * (len(tensors) + _NO_TENSORS)
    if grad_divergence is None:
        return tuple(places)
    wanted = [ctx.needs_input_grad[place] for place in _STUDENT]
    made = torch.ops.flce.linear_divergence_backward(grad_divergence, saved, retained, *tensors, *ctx.options, wanted)
    gradients: list[Tensor | None] = [each if want else None for each, want in zip(made, wanted, strict=True)]
    if torch.is_grad_enabled():
        gradients = _op.refuse_second_derivative(gradients, (grad_divergence, *(tensors[place] for place in _STUDENT)))
    for place, gradient in zip(_STUDENT, gradients, strict=True):
        places[place] = gradient
    return tuple(places)


if _passes.define(_SCHEMAS, __name__, _WAYS):
    torch.library.register_autograd(
        "flce::linear_divergence",
        _passes.of_module(__name__, "_backward"),
        setup_context=_passes.of_module(__name__, "_setup_context"),
        lib=vars(torch.ops.flce)["_library"],
    )
run: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = torch.ops.flce.linear_divergence.default
