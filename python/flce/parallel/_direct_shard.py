"""Calls over ranks like an earlier one: `_direct.DirectCall` for a weight whose classes lie over a group's ranks.

The arguments were checked in an earlier call, and the layer was agreed on. Ranks still tell each other their numbers, once in each forward
and whichever way each of them goes: no rank knows whether another one's call is a known one, too. A rank launches its shard's forward by
the latest layout before it waits for the others' numbers. These confirm the layout, or say another one, or that ranks have to ask further.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flce.call import _direct, _op
from flce.call._direct import GRAD_HIDDEN, GRAD_WEIGHT, HIDDEN, LSE, TARGET, WEIGHT
from flce.core import _autograd, _kernels, _retain
from flce.core._frame import CallOptions, Inputs
from flce.parallel import _layouts, _parallel, _shards
from flce.parallel._shards import ShardKernel

_is_grad_enabled = torch.is_grad_enabled
_MOST_EARLIER = 16  # layouts of a form beside the latest one


class DirectShard(_direct.Form):
    """A rank's part of one layer with one set of options, for tensors of one form."""

    __slots__ = ("earlier", "latest", "parallel", "sums_in_place", "without_gradient")

    def __init__(self, kernel: _kernels.LoadedKernel, hidden: Tensor, weight: Tensor, target: Tensor, options: CallOptions) -> None:
        super().__init__(kernel, hidden, weight, target, options)
        assert options.parallel is not None
        self.without_gradient, self.parallel = options, options.parallel
        self.latest: _Layout | None = None
        self.earlier: dict[tuple[tuple[int, ...], ...], _Layout] = {}  # by every rank's numbers
        # Whether ranks' parts of grad_hidden are added up where the kernels make them.
        self.sums_in_place = not self.parallel.sequence and kernel.key.grad_hidden_dtype in (None, hidden.dtype)

    def value(self, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor | None:
        if not self.matches(hidden, weight, target):
            return None
        differentiable = self.requires_grad and _is_grad_enabled()
        if not differentiable and forward_ad._current_level >= 0:
            return None
        group = self.parallel.resolved()
        if group.size() != self.parallel.ranks:
            return None  # a mesh of a world that was made again
        # From here on there is no other way: ranks tell each other their numbers once.
        if self.reshapes:
            hidden, target = hidden.view(self.hidden_shape), target.view(self.target_shape)
        given = Inputs(hidden, weight, target, self.options if differentiable else self.without_gradient, group=group)
        layout, launched = self._launched(given)
        value = layout.finish(given, launched)
        if not differentiable:
            return value
        value = _apply(hidden, weight, target, self, layout, (value, launched.saved, launched.addresses))
        return _autograd.keep_node(value) if _autograd.LOSES_NODES else value

    def _launched(self, given: Inputs) -> tuple[_Layout, _Launched]:
        """Forward of this rank's shard, and its layout, after the one exchange of a forward. Raises as the general way does, on every
        rank."""
        latest, group, weight, parallel = self.latest, given.group, given.weight, self.parallel
        agreements = _layouts.agreements_of(group)
        if latest is not None and latest.told.agreements is not agreements:
            latest = self.latest = None  # the group is another one of the same name, or what ranks agreed on has been forgotten
            self.earlier.clear()
        agreed = _layouts.agreed_among(agreements, parallel, weight, _shards.layer_of(given)) if latest is None else latest.told.agreed
        numbers = agreed.numbers(parallel, weight, self.num_tokens)
        heard = _parallel.tell_hosts(group, numbers)
        # The shard is most likely the latest one: its forward does without the other ranks, and the host need not wait for theirs before.
        launched = failure = None
        if latest is not None and latest.stays and numbers == latest.told.numbers and not parallel.sequence:
            try:
                launched = latest.launch(self, given)
            except Exception as error:  # an error of this call only where ranks confirm the layout
                failure = error
        everyone = heard()
        if latest is not None and everyone == latest.told.everyone:
            latest.stays = True
            if failure is not None:
                raise failure
            return latest, latest.launch(self, given) if launched is None else launched
        launched = failure = None
        layout = self._layout(given, _Told(agreements, agreed, numbers, everyone))
        return layout, layout.launch(self, given)

    def _layout(self, given: Inputs, told: _Told) -> _Layout:
        """The layout by numbers that are not the latest one's, which it takes the place of where all ranks know it."""
        latest, everyone = self.latest, told.everyone
        layout = self.earlier.pop(tuple(everyone), None)
        if layout is None:
            known = told.agreed.known(everyone) is not None
            shard = _layouts.shard_told(told.agreed, everyone, given.group, self.parallel, given.weight, _shards.tokens_of(given))
            layout = _Layout(_shards.kernel_of(given, shard), self, told)
            if not known:
                return layout
        if latest is not None:
            if len(self.earlier) >= _MOST_EARLIER:
                self.earlier.clear()
            self.earlier[tuple(latest.told.everyone)] = latest
            layout.stays = False  # layers may take turns that this rank does not see
        self.latest = layout
        return layout


class _Told(NamedTuple):
    """Numbers by which ranks know a layout without a further question."""

    agreements: _layouts.Agreements  # all of the group's
    agreed: _layouts.Agreed  # the layer's among them
    numbers: tuple[int, ...]  # this rank's
    everyone: list[tuple[int, ...]]


_Made = tuple[Tensor, Tensor, _direct.Addresses]  # the output, lse, and where inputs and lse lie


class _Launched(NamedTuple):
    """Forward of a rank's shard, under way."""

    filled: Any  # the frame, as _direct.Frames has it
    value: Tensor
    saved: Tensor
    addresses: _direct.Addresses
    partial_sums: Tensor
    retained: _retain.Retained | None


class _Layout(_direct.Frames):
    """A layout of the layer over ranks, with the kernel of this rank's shard."""

    __slots__ = ("stays", "told")
    kernel: ShardKernel

    def __init__(self, kernel: ShardKernel, form: DirectShard, told: _Told) -> None:
        super().__init__(kernel, form)
        self.told = told
        self.stays = True  # whether the next call is most likely of this layout, too

    def launch(self, form: DirectShard, given: Inputs) -> _Launched:
        kernel = self.kernel
        filled = self.take_forward()
        words, _, _, frame = filled
        hidden = kernel.as_read(given).hidden
        value, saved = form.make_value(form.value_form), kernel.new_floats(form.num_tokens)
        addresses = (given.hidden.data_ptr(), given.weight.data_ptr(), given.target.data_ptr(), saved.data_ptr())
        words[HIDDEN], words[WEIGHT], words[TARGET], words[LSE] = addresses
        if hidden is not given.hidden:
            words[HIDDEN] = hidden.data_ptr()
        words[self.value_word] = value.data_ptr()
        retained = kernel.prepare_retained(frame, given)
        return _Launched(filled, value, saved, addresses, kernel.launch_forward(frame), retained)

    def finish(self, given: Inputs, launched: _Launched) -> Tensor:
        """The output, complete on every rank."""
        filled, retained = launched.filled, launched.retained
        self.kernel.merge_sums(filled[3], given.group, launched.partial_sums)
        self.forward.append(filled)
        if retained is not None:
            _retain.attach(retained, launched.saved)
        return launched.value

    def of_backward(
        self,
        given: Inputs,
        saved: Tensor,
        grad_values: Tensor,
        grad_hidden: Tensor | None,
        grad_weight: Tensor | None,
        grad_bias: None,
        retained: Tensor | None = None,
        *,
        lent: bool = False,
        entropy: bool = True,
    ) -> None:
        """The kernel's `backward`, for tensors of forward's form."""
        parallel = given.options.parallel
        assert parallel is not None
        wanted = (grad_hidden is not None) + 2 * (grad_weight is not None)
        filled = self.take_backward(wanted)
        words, _, _, frame = filled
        words[HIDDEN], words[WEIGHT] = given.hidden.data_ptr(), given.weight.data_ptr()
        words[TARGET], words[LSE] = given.target.data_ptr(), saved.data_ptr()
        try:
            words[self.grad_word] = grad_values.data_ptr()
        except RuntimeError:
            _kernels.raise_batched(grad_values)
        if grad_hidden is not None:
            words[GRAD_HIDDEN] = grad_hidden.data_ptr()
        if grad_weight is not None:
            words[GRAD_WEIGHT] = grad_weight.data_ptr()
        frame.retain(frame.backward, retained, lent=lent)
        self.kernel.run_backward(frame, given.group, parallel, grad_hidden)
        self.backward[wanted].append(filled)


class LinearCrossEntropyDirectShard(torch.autograd.Function):
    """The node of direct calls over ranks: `_op.LinearCrossEntropyFunction` with nothing left to decide. Forward has run before it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, form: DirectShard, layout: _Layout, made: _Made) -> Tensor:
        value, saved, addresses = made
        ctx.call = form, layout, addresses, _retain.has_filled(saved)
        ctx.save_for_backward(saved, hidden, weight, target)
        return value

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        grad_values = grad_outputs[0]
        saved, hidden, weight, target = ctx.saved_tensors
        form: DirectShard
        layout: _Layout
        form, layout, addresses, filled = ctx.call
        # The engine is asked however few rows a rank has: ranks add up what all of them ask for.
        wanted = _autograd.wanted_gradients(ctx)
        given = Inputs(hidden, weight, target, form.options, group=form.parallel.resolved())
        if not form.matches_backward(addresses, grad_values, saved, hidden, weight, target) or _is_grad_enabled():
            gradients = _direct.backward_of_any_form(layout.kernel, given, saved, grad_values, wanted, filled=filled)
        else:
            way = layout.of_backward if form.sums_in_place else None
            gradients = _op.gradients_of(layout.kernel, given, saved, grad_values, wanted, filled=filled, backward=way)[:2]
        return *gradients, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _op.refuse_forward_mode()


_apply: Callable[..., Tensor] = super(torch.autograd.Function, LinearCrossEntropyDirectShard).apply
