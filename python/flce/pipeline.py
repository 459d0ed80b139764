"""The loss of a pipeline's last stage, for the schedules of torch.distributed.pipelining as they are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flce import errors
from flce.call._checks import check_gradient_memory
from flce.call._options import check_options
from flce.core import _autograd, _zero3, checks
from flce.core._frame import is_hidden_major
from flce.loss import LinearCrossEntropyLoss

_log = logging.getLogger("flce")


class PipelineFusedLoss(LinearCrossEntropyLoss):
    """`loss_fn=` of a schedule whose last stage returns hidden states.

        loss = PipelineFusedLoss(last_stage.head, shift=1)  # the head stays a submodule of the stage, which does not call it
        schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss, scale_grads=False)
        loss.normalize_by(labels)                           # the whole batch's valid labels, for every microbatch
        schedule.step(target=labels, losses=losses)         # sum(losses) is the batch's mean
        logits = loss.forward_logits(hidden)

    The head's weight stays a parameter of the stage's module; the loss borrows it, so its gradient is scaled, clipped, sharded and saved
    with the others. A microbatch in flight costs its hidden states, lse and targets, and, with the option memory_limit_bytes, its share of
    that limit: as many microbatches as fit leave logits to their backwards.

    Normalisation: by the number that `normalize_by` was given (build the schedule with scale_grads=False: the losses and gradients of the
    microbatches add up), or, without one, each microbatch by its own valid labels (scale_grads=True then averages the means, which is
    another number wherever masks differ).

    Args:
        accumulate_into_grad: backward adds the weight's gradient to `weight.grad` (made of zeros where it is None) in the kernel, which
            saves a temporary of the weight's size and a pass over it. Hooks on the gradient (DDP, FSDP) do not run. weight.grad must be a
            tensor without gaps (a contiguous slice of a flat buffer is, columns or every other row of a larger tensor are not) and stay
            that tensor until backward; else ArgumentError. Schedules that split backward (zero bubble) ask for the weight's gradient with
            torch.autograd.grad, which takes that temporary, and add it themselves.
        The others: as for `LinearCrossEntropyLoss`, in its order. `PipelineFusedLoss(output_layer=layer)` is taken, too, and a chunk_size
            behind the layer, as in `PipelineFusedLoss(layer, 4096)`.
    """

    def __init__(
        self,
        output_embeddings: nn.Module | Callable[[], nn.Module] | None = None,
        impl: str | int = "auto",
        chunk_size: int = 4096,
        ignore_index: int = -100,
        compile: bool = False,
        *,
        shift: int,
        accumulate_into_grad: bool = False,
        output_layer: nn.Module | None = None,
        **options: Any,
    ) -> None:
        checks.flag("accumulate_into_grad", accumulate_into_grad)
        if (output_embeddings is None) == (output_layer is None):
            raise errors.ArgumentError("output_embeddings is the layer whose loss this is: give it, or output_layer in its place, not both")
        layer: Any = output_layer if output_embeddings is None else output_embeddings
        if isinstance(impl, int):
            if isinstance(impl, bool) or chunk_size != 4096:
                raise errors.ArgumentError(f"impl is {impl!r}, which is taken for a chunk_size, and that is {chunk_size!r}: name both")
            chunk_size, impl = impl, "auto"
        check_options(options, shift)
        super().__init__(layer, impl, chunk_size, ignore_index, compile, shift=shift, **options)
        if accumulate_into_grad and self.actual_impl != "flce":
            raise errors.ArgumentError(f"accumulate_into_grad needs impl 'flce'; this loss uses {self.actual_impl!r}")
        if accumulate_into_grad and not _autograd.knows_what_is_wanted():
            _log.warning("accumulate_into_grad=True is without effect: %s; autograd adds that gradient to weight.grad", _autograd.UNKNOWN)
        self.accumulate_into_grad = accumulate_into_grad
        self.num_valid_tokens: Tensor | None = None

    def normalize_by(self, labels_or_count: Tensor | None, *, cu_seqlens: Tensor | None = None) -> Tensor | None:
        """Sets what the losses from now on are divided by: labels [..., S] of the whole batch, of which `num_valid` is taken on the device
        (their number, or with class_weight their class weights), a scalar that is the count already, or None for each microbatch's own.
        Returns the count, so that data-parallel ranks can add theirs up in place before the step."""
        if labels_or_count is not None and not isinstance(labels_or_count, Tensor):
            raise errors.DTypeError(f"labels_or_count is a {type(labels_or_count).__name__}; it must be a tensor or None")
        if labels_or_count is None or labels_or_count.dim() == 0:
            self.num_valid_tokens = labels_or_count
        else:
            self.num_valid_tokens = self.num_valid(labels_or_count, cu_seqlens=cu_seqlens)
        return self.num_valid_tokens

    def __call__(  # type: ignore[override]  # one hidden state, as a stage has one output
        self,
        hidden_states: Tensor,
        labels: Tensor,
        *,
        num_valid_tokens: Tensor | float | None = None,
        temperature: Tensor | float | None = None,
        token_weight: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        grad_weight_out: Tensor | None = None,
    ) -> Tensor:
        if not isinstance(hidden_states, Tensor):
            raise errors.DTypeError(f"hidden_states is a {type(hidden_states).__name__}; it must be a tensor, the last stage's one output")
        accumulates = self.accumulate_into_grad and self.weight.requires_grad and torch.is_grad_enabled()
        accumulates = accumulates and _autograd.knows_what_is_wanted()
        if accumulates:
            _zero3.refuse_gradient_memory("accumulate_into_grad=True", self.weight)
            grad_weight_out = _gradient_of(self.weight)
        count = self.num_valid_tokens if num_valid_tokens is None else num_valid_tokens
        loss = super().__call__(
            hidden_states,
            labels,
            num_valid_tokens=count,
            temperature=temperature,
            token_weight=token_weight,
            cu_seqlens=cu_seqlens,
            grad_weight_out=grad_weight_out,
        )
        if accumulates:
            loss.register_hook(lambda _: _check_still_grad(self.weight, grad_weight_out))
        return loss


def _gradient_of(weight: Tensor) -> Tensor:
    """weight.grad, of zeros where there is none, in which kernels can add."""
    hidden_major = is_hidden_major(weight)
    if weight.grad is None:  # torch.zeros_like(weight) would give that of a strided weight its order
        weight.grad = torch.zeros_like(weight, memory_format=torch.preserve_format if hidden_major else torch.contiguous_format)
    check_gradient_memory("weight.grad (accumulate_into_grad=True)", weight.grad, weight, hidden_major=hidden_major)
    return weight.grad


def _check_still_grad(weight: Tensor, grad: Tensor | None) -> None:
    """Checks weight.grad before backward adds to `grad`."""
    if weight.grad is not grad:
        raise errors.ArgumentError(
            "weight.grad is not the tensor that it was in forward, so what accumulate_into_grad=True adds to that one would be lost: call "
            "zero_grad() before the loss and not between the loss and its backward, or zero_grad(set_to_none=False)"
        )


def sum_tied_gradient(weight: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Adds up the gradient of a weight that several ranks hold copies of: an embedding on the first stage and the head on the last. Call it
    on the ranks of `group` (`dist.new_group([first, last])`) after the schedule's step and before clipping; every copy then takes the same
    optimizer step. A rank without a gradient adds zeros."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    dist.all_reduce(weight.grad, group=group)
