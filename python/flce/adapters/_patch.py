"""`patch` and `unpatch`: a language model of transformers whose own forward gives the loss without logits."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch
from torch import Tensor

from flce import errors
from flce.adapters import _head_tap, _model_facts
from flce.adapters._model_facts import has_encoder
from flce.core import checks
from flce.core._once import say_once
from flce.huggingface import CausalLMLoss, causal_lm_of, check_labels_shape, check_model, prepare
from flce.loss import OF_TRAINING


class _Patch:
    """The forward of a patched model. In the model's __dict__, by its tap."""

    def __init__(self, model: Any, training_logits: bool, evaluation_logits: bool, options: dict[str, Any]) -> None:
        self.training_logits, self.evaluation_logits = training_logits, evaluation_logits
        self.loss = CausalLMLoss(model, **options)
        unused = sorted(OF_TRAINING & options.keys())
        if training_logits and unused:
            raise errors.ArgumentError(
                f"{unused[0]} is given and training_logits is True, with which the model computes its own loss, without that option; leave "
                "one of the two out"
            )

    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.update(_model_facts.named_arguments(model, args))
        labels = kwargs.get("labels")
        trains = model.training and torch.is_grad_enabled()
        if labels is None or (self.training_logits if trains else self.evaluation_logits):
            if labels is None and trains and not self.training_logits and not torch.compiler.is_compiling():
                say_once(
                    f"flce: {type(model).__name__}, which flce.patch has patched, is called in training without labels, and gives logits "
                    "as before. transformers.Trainer keeps labels to itself for label_smoothing_factor and compute_loss_func: take "
                    "flce.patch(model, label_smoothing=...) and leave these out"
                )
            return _head_tap._own_forward(model, **kwargs)
        if not isinstance(labels, Tensor):
            raise errors.DTypeError(f"labels is a {type(labels).__name__}; it must be a tensor [batch, sequence]")
        compared = self.loss.has_compared(_model_facts.kind_of(model, kwargs))
        return (self._step if compared else self._compared)(model, labels, kwargs, trains=trains)

    def _step(self, model: Any, labels: Tensor, kwargs: dict[str, Any], *, trains: bool) -> Any:
        with _head_tap.of(model).alone():  # type: ignore[union-attr]
            return self._fused(model, labels, kwargs, trains=trains)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _compared(self, model: Any, labels: Tensor, kwargs: dict[str, Any], *, trains: bool) -> Any:
        """The step, with the comparison inside it."""
        return self._step(model, labels, kwargs, trains=trains)

    def _compare(self, tap: Any, hidden: Tensor, kwargs: dict[str, Any], ignored: int | None) -> None:
        """Compares loss and logits with the model's own, on its modules' results in this step, before the step's loss is computed."""
        made = self.loss.compare_loss(kwargs, tap.probe_own, hidden.shape[:-1], aligned=kwargs.get("shift_labels"), ignore_index=ignored)
        few = made.shape[0] // 2
        own = made.reshape(2, few, -1).transpose(0, 1)
        rows, plain = (each.reshape(-1, 2, each.shape[-1])[:few] for each in (tap.probe, tap.probe_plain))
        self.loss.compare_logits(rows, own, plain)

    def _fused(self, model: Any, labels: Tensor, kwargs: dict[str, Any], *, trains: bool) -> Any:
        tap: Any = _head_tap.of(model)
        count, aligned = kwargs.get("num_items_in_batch"), kwargs.get("shift_labels")
        # A loss function of transformers has it from the model's keywords.
        ignored = kwargs.get("ignore_index") if tap.calls_loss_function else None

        def loss_of(hidden: Tensor) -> Tensor:
            check_labels_shape(labels, hidden, kwargs)
            if tap.probe is not None:
                self._compare(tap, hidden, kwargs, ignored)
            given, mask = labels, self.loss.mask_of_labels()
            if mask is not None:
                ignore_index = self.loss.loss.ignore_index if ignored is None else ignored
                given = labels.masked_fill(kwargs[mask].to(labels.device) == 0, ignore_index)
            return self.loss.of_hidden(hidden, given, count, aligned, ignored, trains=trains)

        tap.fused = loss_of
        return_dict = kwargs.get("return_dict")
        if return_dict is None:
            return_dict = getattr(model.config, "return_dict", True)
        try:
            outputs = tap.to_hidden_states(model, **_with_decoder_input_ids(model, labels, kwargs))
            # DeepSpeed's ZeRO-3 gathers the weight once a gradient comes to what it has returned in place of the carrier.
            carriers = [tap.carrier, *([tap.logits] if tap.logits is not None and tap.logits.requires_grad else [])]
            loss = _head_tap.Carried.apply(tap.fused_loss, *carriers)
            # Hooks of the output layer have run in the step alone.
            if "probe_rows" in outputs and self.loss.compare_logits(*(outputs[f"probe_{name}"] for name in ("rows", "logits", "plain"))):
                self.loss.settle()
        finally:
            tap.fused = tap.fused_loss = tap.carrier = tap.logits = tap.recording = tap.probe_own = None
        auxiliary = outputs.get("auxiliary_loss")
        if auxiliary is not None:
            loss = loss + auxiliary.to(loss.device)
        known = inspect.signature(tap.output_type).parameters
        made = tap.output_type(loss=loss, **{name: value for name, value in outputs.items() if name in known})
        return made if return_dict else made.to_tuple()


def _with_decoder_input_ids(model: Any, labels: Tensor, given: dict[str, Any]) -> dict[str, Any]:
    """`given`, with what the decoder reads where the model makes that of labels, and its forward is not given labels. The first step
    compares it with what the model makes of them."""
    if not _model_facts.reads_labels(model, given) or _head_tap.of(model).calls_loss_function:  # type: ignore[union-attr]
        return given
    return {**given, "decoder_input_ids": _decoder_input_ids(model, labels)}


def _decoder_input_ids(model: Any, labels: Tensor) -> Tensor:
    own = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if own is None:
        shift: Any = _own_shifting_function(model)
        names = [name for name in ("pad_token_id", "decoder_start_token_id") if name in inspect.signature(shift).parameters]
        own = functools.partial(shift, **{name: getattr(model.config, name) for name in names})
    try:
        return own(labels.clone())  # type: ignore[no-any-return]  # FSMT's writes over what it is given
    except (RuntimeError, IndexError, ValueError) as error:
        raise errors.ArgumentError(
            f"labels: {type(model).__name__} makes no decoder_input_ids of them ({error}); give decoder_input_ids too, or "
            f"train it unpatched"
        ) from error


def _makes_decoder_input_ids(model: Any) -> bool:
    own = getattr(model, "prepare_decoder_input_ids_from_labels", None) or _own_shifting_function(model)
    return own is not None or _model_facts.calls_loss_function(model)


def _own_shifting_function(model: Any) -> Any:
    """shift_tokens_right of the module that a class of the model is defined in."""
    modules = (sys.modules.get(each.__module__) for each in type(model).__mro__)
    return next((function for module in modules if (function := getattr(module, "shift_tokens_right", None)) is not None), None)


def patch(model: Any, *, training_logits: bool = False, evaluation_logits: bool = True, **options: Any) -> Any:
    """Has `model`, a language model of transformers with or without an encoder, compute its loss without logits: in training,
    `model(input_ids, labels=labels).loss` keeps its value, and `.logits` is None.

    The model's own forward runs up to its output layer; the loss is computed in that layer's forward, where FSDP2 has gathered its weight.
    Without labels, in `generate` and, unless evaluation_logits is False, in evaluation, nothing changes. Parameters, state_dict and
    save_pretrained are as they were. In place; the model may be wrapped by peft, accelerate, DDP or FSDP2 before or after. Returns the
    model. `unpatch` takes it back. A pickled model comes back without the patch, and is patched again.

    At the first step of each kind of call, and whenever the output layer has been replaced, the logits of a few rows and the model's own
    loss of them are compared with flce's, inside the step's own forward. Routers' losses, num_items_in_batch, shift_labels and return_dict
    work as before; with return_dict=False the tuple has no logits.

    Args:
        model: or a wrapper round it. Patched once more, it has the new options.
        training_logits: True: training gives logits as before, and nothing is saved.
        evaluation_logits: False: in evaluation, and under no_grad, a call with labels gives the loss and no logits either.
        options: those of `flce.LinearCrossEntropyLoss`. shift, logit_scale and softcap are the model's own where they are not given.
            label_smoothing, z_loss, class_weight, temperature and dft are for training alone: in evaluation the loss, with or without
            logits, is the model's own. class_weight goes with calls that have no num_items_in_batch.

    Raises ArgumentError for a model without an output layer that has a weight, or tuned by virtual tokens; at the first
    step for one whose own logits or loss are other ones, with the difference, its likely cause and how to say it by hand.
    """
    for name, flag in (("training_logits", training_logits), ("evaluation_logits", evaluation_logits)):
        checks.flag(name, flag)
    inner = causal_lm_of(model)
    if has_encoder(inner) and not _makes_decoder_input_ids(inner):
        raise errors.ArgumentError(
            f"model is a {type(inner).__name__}, which has an encoder and no prepare_decoder_input_ids_from_labels, nor its module a "
            "shift_tokens_right, so that what its decoder reads is not known without its own loss. Give the decoder's hidden states to "
            "flce.LinearCrossEntropyLoss(model.get_output_embeddings, shift=0)"
        )
    _head_tap.forget_unpickled(inner)
    known = _head_tap.of(inner)
    if known is not None and known.patch is None:
        raise errors.ArgumentError(
            "model was prepared by flce.huggingface.return_hidden_states, which has its forward return hidden states; use one of the two"
        )
    check_model(model)
    made = _Patch(inner, training_logits, evaluation_logits, options)  # before anything of the model is changed
    prepare(model)
    tap: Any = _head_tap.of(inner)
    tap.patch = made
    tap.kinds, tap.fp8 = (), options.get("fp8")
    return model


def unpatch(model: Any) -> Any:
    """Takes back what `patch` did; a model that is not patched stays as it is. Returns the model. Raises ArgumentError where somebody has
    wrapped the model's forward since, unless the wrapper leads back to it by __wrapped__, as accelerate's does."""
    inner = causal_lm_of(model)
    _head_tap.forget_unpickled(inner)
    tap = _head_tap.of(inner)
    if tap is not None and tap.patch is None:
        raise errors.ArgumentError("model was prepared by flce.huggingface.return_hidden_states, not by flce.patch")
    _head_tap.remove(inner)
    return model
