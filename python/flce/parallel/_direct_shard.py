"""Calls over ranks like an earlier one: `_direct.DirectCall` for a weight whose classes lie over a group's ranks.

The arguments were checked in an earlier call, and the layer was agreed on. Ranks still tell each other their numbers, once in each forward
and whichever way each of them goes: no rank knows whether another one's call is a known one, too. What they have told says which shard this
rank has, or that they have to ask each other further; from there on this is the call that it always was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flce.call import _direct, _op
from flce.core import _autograd, _kernels, _retain
from flce.core._frame import CallOptions, Inputs
from flce.parallel import _layouts, _shards
from flce.parallel._shards import ShardKernel

_is_grad_enabled = torch.is_grad_enabled


class DirectShard(_direct.Form):
    """A rank's part of one layer with one set of options, for tensors of one form."""

    __slots__ = ("last", "parallel", "without_gradient")

    def __init__(self, kernel: _kernels.LoadedKernel, hidden: Tensor, weight: Tensor, target: Tensor, options: CallOptions) -> None:
        super().__init__(kernel, hidden, weight, target, options)
        assert options.parallel is not None
        self.without_gradient, self.parallel = options, options.parallel
        self.last: _Told | None = None

    def value(self, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor | None:
        if not self.matches(hidden, weight, target):
            return None
        differentiable = self.requires_grad and _is_grad_enabled()
        if not differentiable and forward_ad._current_level >= 0:
            return None
        # From here on there is no other way: ranks tell each other their numbers once.
        group = self.parallel.resolved()
        if self.reshapes:
            hidden, target = hidden.view(self.hidden_shape), target.view(self.target_shape)
        given = Inputs(hidden, weight, target, self.options if differentiable else self.without_gradient, group=group)
        kernel = self._told_kernel(given)
        if differentiable:
            value = _apply(hidden, weight, target, self, given, kernel)
            return _autograd.keep_node(value) if _autograd.LOSES_NODES else value
        value = self.make_value(self.value_form)
        kernel.forward(given, value)
        return value

    def _told_kernel(self, given: Inputs) -> ShardKernel:
        """The kernel of this rank's shard, after the one exchange of a forward. Raises as the general way does, on every rank."""
        last, group, weight, parallel = self.last, given.group, given.weight, self.parallel
        agreements = _layouts.agreements_of(group)
        if last is not None and last.agreements is not agreements:
            last = None  # the group is another one of the same name, or what ranks agreed on has been forgotten
        agreed = _layouts.agreed_among(agreements, parallel, weight, _shards.layer_of(given)) if last is None else last.agreed
        everyone = agreed.told(group, parallel, weight, self.num_tokens)
        if last is not None and everyone == last.everyone:
            return last.kernel
        known = agreed.known(everyone)
        shard = _layouts.shard_told(agreed, everyone, group, parallel, weight, _shards.tokens_of(given))
        kernel = _shards.kernel_of(given, shard)
        if known is not None:
            self.last = _Told(agreements, agreed, everyone, kernel)
        return kernel


class _Told(NamedTuple):
    """Numbers by which ranks knew their shards without a further question."""

    agreements: _layouts.Agreements  # all of the group's
    agreed: _layouts.Agreed  # this layer's among them
    everyone: list[tuple[int, ...]]  # every rank's numbers
    kernel: ShardKernel  # kernel of this rank's shard by these numbers


class LinearCrossEntropyDirectShard(torch.autograd.Function):
    """The node of direct calls over ranks: `_op.LinearCrossEntropyFunction` with nothing left to decide."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, call: DirectShard, given: Inputs, kernel: ShardKernel) -> Tensor:
        value = call.make_value(call.value_form)
        saved = kernel.forward(given, value)
        addresses = (hidden.data_ptr(), weight.data_ptr(), target.data_ptr(), saved.data_ptr())
        ctx.call = call, kernel, addresses, _retain.has_filled(saved)
        ctx.save_for_backward(saved, hidden, weight, target)
        return value

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        grad_values = grad_outputs[0]
        saved, hidden, weight, target = ctx.saved_tensors
        call: DirectShard
        call, kernel, addresses, filled = ctx.call
        # The engine is asked however few rows a rank has: ranks add up what all of them ask for.
        wanted = _autograd.wanted_gradients(ctx)[:4]
        given = Inputs(hidden, weight, target, call.options, group=call.parallel.resolved())
        if not call.matches_backward(addresses, grad_values, saved, hidden, weight, target) or _is_grad_enabled():
            gradients = _direct.backward_of_any_form(kernel, given, saved, grad_values, wanted, filled=filled)
        else:
            gradients = _op.gradients_of(kernel, given, saved, grad_values, wanted, filled=filled)[:2]
        return *gradients, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _op.refuse_forward_mode()


_apply: Callable[..., Tensor] = super(torch.autograd.Function, LinearCrossEntropyDirectShard).apply
