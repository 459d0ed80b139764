"""Hugging Face causal language models: hidden states for the loss while training, logits while evaluating. transformers itself is not imported."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from flce import errors
from flce._targets import shift_labels
from flce.loss import LinearCrossEntropyLoss, extract_hidden_states

# What a causal LM's forward takes for its own logits and loss, and its decoder does not.
_HEAD_ARGUMENTS = ("labels", "num_items_in_batch", "shift_labels", "logits_to_keep", "num_logits_to_keep")


class _HiddenStatesForward:
    """A model's forward: its decoder's while training, its own otherwise. Has the original's signature, which trainers inspect."""

    def __init__(self, model: nn.Module, forward: Any) -> None:
        self.model = model
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.model.training:
            return self.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]
        for name in _HEAD_ARGUMENTS:
            kwargs.pop(name, None)
        decoder: Any = self.model.base_model
        return decoder(*args, **kwargs)


def return_hidden_states(model: Any) -> Any:
    """Makes `model`, a causal LM of transformers, return its decoder's output (with last_hidden_state) in training mode; in evaluation mode it
    returns logits as before. In place; parameters and state_dict stay as they are. Returns the model. Raises ArgumentError where there is no decoder
    apart from the head."""
    decoder = getattr(model, "base_model", None)
    if decoder is None or decoder is model or model.get_output_embeddings() is None:
        raise errors.ArgumentError(f"model is a {type(model).__name__}; it must be a causal language model with a base_model and output embeddings")
    if any(module is model.get_output_embeddings() for module in decoder.modules() if not isinstance(module, nn.Embedding)):
        raise errors.ArgumentError(f"model is a {type(model).__name__}, whose base_model contains the output layer itself")
    if not isinstance(model.forward, _HiddenStatesForward):
        model.forward = _HiddenStatesForward(model, model.forward)
    return model


def options_of(config: Any) -> dict[str, Any]:
    """Options of `flce.linear_cross_entropy` that a model's config implies: final_logit_softcapping (Gemma), logit_scale (Cohere), logits_scaling
    (Granite, a divisor)."""
    config = getattr(config, "get_text_config", lambda: config)()
    options: dict[str, Any] = {}
    if getattr(config, "final_logit_softcapping", None):
        options["softcap"] = float(config.final_logit_softcapping)
    if getattr(config, "logit_scale", None) is not None:
        options["logit_scale"] = float(config.logit_scale)
    elif getattr(config, "logits_scaling", None) is not None:
        options["logit_scale"] = 1.0 / float(config.logits_scaling)
    return options


class CausalLMLoss:
    """`compute_loss_func=` of transformers.Trainer for a model prepared by `return_hidden_states`.

        trainer = Trainer(model=return_hidden_states(model), compute_loss_func=CausalLMLoss(model), ...)

    Divides by num_items_in_batch where the trainer gives it (gradient accumulation), else takes the mean. In evaluation, where outputs are logits,
    it is the stock loss. Arguments after the model are those of `LinearCrossEntropyLoss`; `loss` is that object.
    """

    def __init__(self, model: Any, **keywords: Any) -> None:
        self.loss = LinearCrossEntropyLoss(model.get_output_embeddings(), **(options_of(model.config) | keywords))

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        logits = outputs.get("logits") if isinstance(outputs, Mapping) else None
        if logits is not None:
            return self._of_logits(logits, labels, num_items_in_batch)
        hidden = extract_hidden_states(outputs)
        labels = labels.to(hidden.device)
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(hidden.device)
        return self.loss(hidden, labels, num_valid_tokens=num_items_in_batch)

    def _of_logits(self, logits: Tensor, labels: Tensor, count: Tensor | int | None) -> Tensor:
        targets = shift_labels(labels.to(logits.device), self.loss.shift, ignore_index=self.loss.ignore_index)
        total = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), ignore_index=self.loss.ignore_index, reduction="sum")
        return total / ((targets != self.loss.ignore_index).sum().clamp(min=1) if count is None else count)
