"""A causal LM of transformers whose forward stops at the output layer while it trains.

The model's own forward runs, with everything before its output layer and beside it (norms, dense layers, divisors, routers' losses). The
output layer notes the hidden states that reach it. Until a loss has compared this kind of call, the output layer gives two rows a sequence,
whose logits show the forward's later steps, and the calls of modules are recorded for a replay; then it gives zeros. transformers is
imported when a model is at hand, not before.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
import types
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flce import errors
from flce.adapters import _model_facts
from flce.adapters._methods import put_back
from flce.adapters._replay import Recording
from flce.adapters._shared_rows import SharedRows
from flce.call import _heads
from flce.call._formats import Codes
from flce.core._once import say_once

# Arguments that a causal LM's forward takes for its own logits and loss.
_LOSS_ARGUMENTS = ("num_items_in_batch", "shift_labels", "return_dict")
# Places by which loss functions of transformers shift labels.
_SHIFTS = {"ForCausalLMLoss": 1, "ForMaskedLMLoss": 0}
_locks: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # by tap, which is copied with its model
_KEEP = "keep the model's own loss, or give hidden states of your own to flce.LinearCrossEntropyLoss"


class Carry(torch.autograd.Function):
    """Zeros, or `values`, in place of logits, which depend on the loss for autograd alone: wrappers that gather a layer's weight once a
    gradient of its output comes (FSDP2) have it when the loss's own backward reads it."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, shape: tuple[int, ...], dtype: torch.dtype, values: Tensor | None = None) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=loss.device) if values is None else values.to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.zeros((), device=gradient.device), None, None, None


class Carried(torch.autograd.Function):
    """The loss, whose gradient goes through what carries it as well."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *carriers: Tensor) -> Tensor:
        ctx.likes = [(carrier.shape, carrier.dtype) for carrier in carriers]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, *(torch.zeros(shape, dtype=dtype, device=gradient.device) for shape, dtype in ctx.likes)


class HeadTap:
    """State that a prepared model keeps in its __dict__; no parameter, buffer or submodule of it, copied with it."""

    def __init__(self, model: Any) -> None:
        self.own_loss: Any = getattr(model, "loss_function", None)
        self.calls_loss_function = _model_facts.calls_loss_function(model)
        # Places by which the model's own loss shifts labels; None where its name does not say so.
        named = self.calls_loss_function and not _model_facts.has_encoder(model)
        self.shift: int | None = _SHIFTS.get(_model_facts.name_of_loss(self.own_loss)) if named else None
        self.loss_type = getattr(model, "loss_type", None)  # the name by which transformers finds own_loss
        self.head: Any = None
        self.held: tuple[Any, tuple[Any, ...]] = (None, ())  # an output layer, and the modules that contain it
        self.numbers: Any = None  # _LOGIT_NUMBERS, as they were compared
        self.beside: Any = None  # other objects that may change logits
        self.kinds: tuple[Any, ...] = ()  # kinds of calls for which a loss knows the fate of the output layer's logits
        self.kind: Any = None  # kind of the last call
        self.recording: Recording | None = None  # recording of a call whose kind is not known
        self.arguments: dict[str, Any] = {}  # arguments of that call
        self.replayed: tuple[int, bool] | None = None  # a replay's thread, and whether the loss function gives its loss or 0
        self.active = False
        self.thread = 0  # the thread that runs the step
        self.patch: Any = None  # the forward that flce.patch sets; None: it stops at the hidden states
        self.fp8: Any = None  # option of the loss, for a layer that rounds hidden states
        self.fused: Any = None  # from hidden states to the loss, computed in the output layer's forward, where its weight is gathered
        self.fused_loss: Tensor | None = None
        self.carrier: Tensor | None = None  # the output layer's output in place of logits: its gradient comes before the loss's
        self.node: Any = None  # node of autograd's graph that the output layer's output came from
        self.logits: Tensor | None = None  # the carrier as the model's forward and wrappers of the layer have changed it
        self.own_loss_name = "_loss_function" in model.__dict__  # where transformers keeps a loss function that somebody has set
        self.output_type: Any = None  # return type of the model's own forward
        self.hidden: list[Tensor] = []
        self.probe: Tensor | None = None  # the rows that the output layer was given instead
        self.probe_plain: Tensor | None = None  # their product with the weight, adapters included
        self.probe_own: Tensor | None = None  # the output layer's own logits of these rows
        self.autocast_dtype: torch.dtype | None = None  # the dtype of autocast around the output layer's call
        self.losses_asked = 0
        self.aligned_labels: Tensor | None = None  # shift_labels of the last forward in evaluation

    def loss_function(self, *args: Any, **kwargs: Any) -> Any:
        """Stands for the model's loss function: 0 where forward stops at the output layer, so that what the model adds to its loss is
        left."""
        if self.replayed is not None and self.replayed[0] == threading.get_ident():
            if self.replayed[1]:
                return self.own_loss(*args, **kwargs)
            return torch.zeros((), dtype=torch.float64, device=kwargs["logits"].device if "logits" in kwargs else args[0].device)
        if not self.runs_here():
            return self.own_loss(*args, **kwargs)
        self.losses_asked += 1
        logits, labels = (kwargs[name] if name in kwargs else args[i] for i, name in enumerate(("logits", "labels")))
        if logits.shape[-2] != 2 or labels is None or labels.shape != self.hidden[0].shape[:-1]:
            self.shift = None  # cut before the loss function, so its name does not say by how much labels are shifted
        return torch.zeros((), device=logits.device)

    def attach(self, model: Any) -> None:
        """Taps the output layer that the model has now. Comparisons are forgotten where the layer, or what may change its logits, is
        another one: a compiled graph knows numbers of known names alone."""
        head, beside = model.get_output_embeddings(), self.beside
        if torch.compiler.is_compiling():
            changed = _model_facts.logit_numbers(model) != self.numbers
        else:
            if self.held[0] is not head:
                self.held = head, _model_facts.holders(model, head)
            beside = _model_facts.beside(*self.held)
            changed = beside != self.beside
        if head is self.head and not changed:
            return
        self.head, self.numbers, self.beside, self.kinds = head, _model_facts.logit_numbers(model), beside, ()
        _heads.refuse_fsdp1(head)
        taps = head.__dict__.get("_flce_taps", ())  # several models may share one output layer
        if not taps:
            head.__dict__["_flce_own_forward"] = head.__dict__.get("forward")
        head.__dict__["_flce_taps"] = (*(tap for tap in taps if tap is not self), self)
        head.forward = _bound(_head_forward, head)

    def runs_here(self) -> bool:
        """Whether this thread runs a step of the model."""
        return self.active and (torch.compiler.is_compiling() or self.thread in (0, threading.get_ident()))

    def leave_other_threads(self) -> None:
        """Ends what threads other than this one have begun with the model and, in a forked process, never end."""
        here = threading.get_ident()
        if self.thread != here:
            self.active = False
        if self.replayed is not None and self.replayed[0] != here:
            self.replayed = None
        if self.recording is not None and self.recording.thread != here:
            self.recording.stop()

    def alone(self) -> Any:
        """A context in which no other thread runs a step of the model: what a step keeps is the tap's."""
        return contextlib.nullcontext() if torch.compiler.is_compiling() else _locks.setdefault(self, threading.RLock())

    def to_hidden_states(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """The forward of a training step, to the hidden states."""
        kwargs.update(_model_facts.named_arguments(model, args))
        with self.alone():
            self.attach(model)
            self.kind = _model_facts.kind_of(model, kwargs)
            return self._stopped(model, kwargs) if self.kind in self.kinds else self._recorded(model, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _recorded(self, model: Any, kwargs: dict[str, Any]) -> Any:
        self.arguments, self.recording = dict(kwargs), Recording(model, self.head)
        with self.recording.running():
            return self._stopped(model, kwargs)

    def _stopped(self, model: Any, kwargs: dict[str, Any]) -> Any:
        shift_labels, labels = kwargs.get("shift_labels"), kwargs.pop("labels", None)
        for name in _LOSS_ARGUMENTS:
            kwargs.pop(name, None)
        asks = self.calls_loss_function
        if asks:
            labels = _model_facts.labels_of_nothing(model, kwargs) if labels is None else labels
            asks = isinstance(labels, Tensor)
            kwargs |= {"labels": labels} if asks else {}
        if self.calls_loss_function and getattr(model, "loss_type", None) != self.loss_type:
            raise errors.ArgumentError(
                f"the loss_type of {type(model).__name__} is {model.loss_type!r} and was {self.loss_type!r} when the model was prepared, "
                "whose loss this is: set it before flce.patch or return_hidden_states"
            )
        if self.calls_loss_function and not torch.compiler.is_compiling() and model.loss_function != self.loss_function:
            raise errors.ArgumentError(
                f"the loss_function of {type(model).__name__} has been set since the model was prepared, whose loss this is: set it before "
                "flce.patch or return_hidden_states"
            )
        self.hidden, self.losses_asked, self.active = [], 0, True
        self.probe = self.probe_plain = None  # rows of a step that ended early go
        self.thread = 0 if torch.compiler.is_compiling() else threading.get_ident()
        try:
            outputs = _own_forward(model, return_dict=True, **kwargs)
        finally:
            hidden, self.hidden, self.active = self.hidden, [], False
        if len(hidden) != 1:
            raise errors.ArgumentError(
                f"the forward of {type(model).__name__} calls its output layer, a {type(self.head).__name__}, {len(hidden)} times; it "
                f"must be once, "
                f"with the hidden states of all positions: {_KEEP}"
            )
        if asks and self.losses_asked != 1:
            raise errors.ArgumentError(
                f"the forward of {type(model).__name__} calls model.loss_function {self.losses_asked} times and not once, so what it adds "
                f"to its loss "
                f"is not known (was loss_function set after return_hidden_states?): {_KEEP}"
            )
        return self._collect(model, outputs, hidden[0], asks, shift_labels)

    def replay(self, model: Any, arguments: Mapping[str, Any], logits: SharedRows, changes: Mapping[str, Any], counts: bool) -> Any:
        """The model's own forward on what its modules gave in the recorded one, and on `logits`, with its own loss or with 0 for it."""
        recording: Any = self.recording
        with self.alone():
            self.replayed = threading.get_ident(), counts
            try:
                return recording.replay(functools.partial(_own_forward, model), logits, {**arguments, "return_dict": True}, changes)
            finally:
                self.replayed = None

    def _collect(self, model: Any, outputs: Any, hidden: Tensor, asked: bool, shift_labels: Tensor | None) -> Any:
        from transformers.utils import ModelOutput  # type: ignore[attr-defined]

        self.output_type = type(outputs)
        logits, node, self.node = outputs.get("logits"), self.node, None
        if isinstance(logits, Tensor) and logits.requires_grad and not torch.compiler.is_compiling():
            refuse_parameters_behind(model, logits, node)
        if self.fused is not None:
            self.logits = logits
        fields = {name: value for name, value in outputs.items() if name not in ("loss", "logits") and value is not None}
        if not asked and (found := _model_facts.losses_beside(fields)):
            raise errors.ArgumentError(
                f"{type(model).__name__} returns {', '.join(found)}, but with what weight its loss contains that is not known: switch it "
                f"off (output_router_logits=False), or {_KEEP}"
            )
        result: dict[str, Any] = {"last_hidden_state": hidden}
        if self.probe is not None:
            result |= {"probe_rows": self.probe, "probe_logits": outputs["logits"].detach(), "probe_plain": self.probe_plain}
            self.probe = self.probe_plain = None
        if asked:
            result["auxiliary_loss"] = outputs["loss"]
        if self.autocast_dtype is not None:
            result["autocast_dtype"] = self.autocast_dtype
        if shift_labels is not None:
            result["shift_labels"] = shift_labels
        if uses := tuple(p[:0] for p in self.head.parameters() if p.requires_grad and type(p) is nn.Parameter and p.dim() > 0):
            # DistributedDataParallel takes for unused what the outputs do not depend on; the loss uses these after the forward.
            result["head_uses"] = uses
        return ModelOutput(**(result | {name: value for name, value in fields.items() if name not in result}))


def _begin_in_a_fork() -> None:
    """Has a forked process begin without the locks and the steps of its parent's other threads."""
    for tap in list(_locks):
        tap.leave_other_threads()
    _locks.clear()


os.register_at_fork(after_in_child=_begin_in_a_fork)


def refuse_parameters_behind(model: Any, logits: Tensor, node: Any) -> None:
    """Raises ArgumentError where a parameter that takes a gradient changes logits behind the output layer, whose output came from `node`.
    It may be one that does nothing yet, such as a bias of zeros: the logits of a few rows do not show it, and it would never get a
    gradient."""
    seen, ways = {node}, [logits.grad_fn]
    while ways:
        each: Any = ways.pop()
        if each is None or each in seen:
            continue
        seen.add(each)
        ways.extend(way for way, _ in each.next_functions)
        parameter = getattr(each, "variable", None)
        if parameter is not None:
            names = [name for name, value in model.named_parameters() if value is parameter]
            what = names[0] if names else f"a parameter of shape {list(parameter.shape)}"
            raise errors.ArgumentError(
                f"{type(model).__name__} changes logits behind its output layer by {what}, which would get no gradient: {_KEEP}"
            )


def _bound(function: Any, module: Any, unwrapped: Any = None) -> Any:
    """`function` as a method "forward" of `module`, with the signature of the module's own, which trainers inspect. A method, because
    accelerate wraps and unwraps methods; what it finds in __wrapped__ when it takes its wrappers off, it binds to the module:
    `unwrapped`."""
    copies: list[Any] = []
    for each in (function, unwrapped):
        if each is not None:
            copies.append(types.FunctionType(each.__code__, each.__globals__, "forward"))
            copies[-1].__doc__ = type(module).forward.__doc__
            copies[-1].__signature__ = inspect.signature(type(module).forward)
    if unwrapped is not None:
        copies[0].__wrapped__ = copies[1]
    return types.MethodType(copies[0], module)


def _own_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    own = module.__dict__["_flce_own_forward"]  # None: the class's
    return type(module).forward(module, *args, **kwargs) if own is None else own(*args, **kwargs)


def _model_forward(model: Any, *args: Any, **kwargs: Any) -> Any:
    tap = of(model)
    if tap is None or kwargs.get("fused_lm_head"):  # unpatched under a wrapper, or patched over TRL's, whose loss _notice speaks of
        return _own_forward(model, *args, **kwargs)
    if tap.patch is not None:
        return tap.patch(model, *args, **kwargs)
    if model.training and torch.is_grad_enabled():
        return tap.to_hidden_states(model, *args, **kwargs)
    tap.aligned_labels = kwargs.get("shift_labels")
    return _own_forward(model, *args, **kwargs)


def _unwrapped_model_forward(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs the model's own forward once all wrappers of it are taken off: the wrappers under flce's go, too."""
    model.__dict__["_flce_own_forward"] = None
    return _model_forward(model, *args, **kwargs)


def _replicate_for_data_parallel(model: Any) -> Any:
    """Replaces nn.Module's method, which a pickled model finds again by this name."""
    raise errors.ArgumentError(
        f"nn.DataParallel copies {type(model).__name__} for each GPU of one process, and its copies would call this model's own forward. "
        "Start a process for each GPU (torchrun or accelerate launch), or show this one a single GPU (CUDA_VISIBLE_DEVICES=0)"
    )


def _head_forward(head: Any, *args: Any, **kwargs: Any) -> Any:
    active = [tap for tap in head._flce_taps if tap.head is head and tap.runs_here()]
    if not active:
        return _own_forward(head, *args, **kwargs)
    tap: HeadTap = active[0]
    if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or args[0].dim() < 2 or not args[0].is_floating_point():
        what = ", ".join([*(str(value.dtype) if isinstance(value, Tensor) else type(value).__name__ for value in args), *kwargs])
        raise errors.ArgumentError(
            f"the output layer is called with ({what}); it must be with one tensor, hidden states [..., S, D]: {_KEEP}"
        )
    hidden = args[0]
    tap.hidden.append(hidden)
    device_type = hidden.device.type
    tap.autocast_dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    shape = (*hidden.shape[:-2], 2, _heads.weight_of(head).shape[0])
    dtype = tap.autocast_dtype or hidden.dtype
    own = _probe(tap, head, hidden) if tap.kind not in tap.kinds else None
    if tap.fused is not None:
        tap.fused_loss = tap.fused(hidden)
        tap.carrier = Carry.apply(tap.fused_loss, shape, dtype, own)
        tap.node = tap.carrier.grad_fn
        return tap.carrier
    return torch.zeros(shape, dtype=dtype, device=hidden.device) if own is None else own


@_heads.without_graph()
def _probe(tap: HeadTap, head: Any, hidden: Tensor) -> Tensor:
    """The output layer's answer to two rows a sequence, which the tap keeps. An adapter's dropout is a loss's; these rows have none.
    Nothing of it is in the step's graph, so a step that compares saves the same tensors as the next one, with which a checkpoint recomputes
    it."""
    _heads.refuse_other_steps(head)
    with _heads.without_dropout(head):
        # Each sequence's last row: padded on the right or not, it attends to something.
        last = hidden[..., -1:, :]
        # Raises for a weight that cannot be read, before the forward fails by it.
        plain = _heads.operands(head, last, dropout=False, fp8=tap.fp8)
        tap.probe = _heads.probe_rows(last, _own_logits(head, last, plain))
        of_rows = _heads.operands(head, tap.probe, dropout=False, fp8=tap.fp8)
        tap.probe_plain = of_rows.logits()
        own = tap.probe_own = _own_logits(head, tap.probe, of_rows)
        return own


def _own_logits(head: Any, hidden: Tensor, plain: _heads.Operands) -> Tensor:
    """Logits by the output layer's own forward. Layers that compressed-tensors has compressed have none, and torchao's tensors none of some
    forms: theirs are the product's."""
    if isinstance(plain.weight, Codes) and _heads.is_compressed(head):
        return plain.logits()
    try:
        own: Tensor = _own_forward(head, hidden)
    except NotImplementedError:
        if not isinstance(plain.weight, Codes):
            raise
        return plain.logits()
    return own


def install(model: Any) -> None:
    """Sets the model's forward and loss function; once."""
    tap = HeadTap(model)
    tap.attach(model)
    model.__dict__["_flce_tap"] = tap
    if not _is_under(model.__dict__.get("forward")):  # where it is, it was unpatched under a wrapper
        model.__dict__["_flce_own_forward"] = model.__dict__.get("forward")
        model.forward = _bound(_model_forward, model, _unwrapped_model_forward)
    model.register_forward_pre_hook(_notice, with_kwargs=True)
    model.__dict__["_replicate_for_data_parallel"] = types.MethodType(_replicate_for_data_parallel, model)
    if tap.calls_loss_function:
        model.loss_function = tap.loss_function


def forget_unpickled(model: Any) -> None:
    """Removes what `install` set from a model that was unpickled: a method of an object comes back as the method of its class."""
    tap = of(model)
    now = model.__dict__.get("forward")
    if tap is None or getattr(now, "__func__", None) is not type(model).forward:
        return
    for module in [model, *([tap.head] if tap.head is not None else [])]:
        for name in ("forward", "_flce_tap", "_flce_taps", "_flce_own_forward"):
            module.__dict__.pop(name, None)
    _restore_rest(model, tap)


def remove(model: Any) -> None:
    """Takes away what `install` and `attach` set. Raises ArgumentError where somebody has wrapped the model's or the output layer's forward
    since."""
    tap = of(model)
    if tap is None:
        return
    now = model.__dict__.get("forward")
    outside = not _is_ours(now, _model_forward, _unwrapped_model_forward)
    if outside and not _is_under(now):
        raise _wrapped_since(model)
    if tap.head is not None:
        if not _is_ours(tap.head.__dict__.get("forward"), _head_forward):
            raise _wrapped_since(tap.head)
        _release(tap.head, tap)
    del model.__dict__["_flce_tap"]
    if not outside:  # else what lies under a wrapper of accelerate's goes on as the model's own
        put_back(model, "forward", model.__dict__.pop("_flce_own_forward"))
    _restore_rest(model, tap)


def _is_ours(forward: Any, *functions: Any) -> bool:
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    return any(code is function.__code__ for function in functions)


def _is_under(forward: Any) -> bool:
    """Whether what wraps `forward` leads to ours, as accelerate's wrappers do by __wrapped__."""
    while forward is not None and not _is_ours(forward, _model_forward):
        forward = getattr(forward, "__wrapped__", None)
    return forward is not None


def _wrapped_since(module: Any) -> errors.ArgumentError:
    return errors.ArgumentError(
        f"the forward of {type(module).__name__} has been wrapped since it was patched, by what does not lead back to it (__wrapped__); "
        "take that off first"
    )


def _release(head: Any, tap: HeadTap) -> None:
    left = tuple(each for each in head.__dict__["_flce_taps"] if each is not tap)
    head.__dict__["_flce_taps"] = left
    if left:  # another patched model shares it
        return
    del head.__dict__["_flce_taps"]
    put_back(head, "forward", head.__dict__.pop("_flce_own_forward"))


def _notice(model: Any, args: Any, kwargs: Any) -> None:
    """TRL's trainers wrap a model's forward and do not come to it while they train."""
    if not torch.compiler.is_compiling() and kwargs.get("fused_lm_head"):
        say_once(
            f"flce: TRL computes the loss of {type(model).__name__} in a function of its own, so flce.patch does nothing here; "
            "flce.trl.patch() puts flce in that function's place"
        )


def _restore_rest(model: Any, tap: HeadTap) -> None:
    for key in [key for key, hook in model._forward_pre_hooks.items() if hook is _notice]:
        del model._forward_pre_hooks[key]
        model._forward_pre_hooks_with_kwargs.pop(key, None)
    model.__dict__.pop("_replicate_for_data_parallel", None)
    if tap.calls_loss_function and getattr(model.loss_function, "__func__", None) is HeadTap.loss_function:  # else somebody has set another
        model.loss_function = tap.own_loss
        if not tap.own_loss_name:
            model.__dict__.pop("_loss_function", None)


def of(model: Any) -> HeadTap | None:
    """The tap of a prepared model."""
    tap = model.__dict__.get("_flce_tap")
    return tap if isinstance(tap, HeadTap) else None
