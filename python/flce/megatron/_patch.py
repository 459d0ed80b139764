"""Language models of megatron.core whose own forward gives the loss without logits."""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce import errors
from flce.call._heads import kind_of
from flce.megatron import _head
from flce.megatron._head import Settings, UnmadeLogits, core

_KINDS = ("GPTModel", "MambaModel", "HybridModel")  # all of them end in an output layer and compute_language_model_loss


class Tap:
    """State that a patched model keeps in its __dict__; no parameter, buffer or submodule of it, copied with it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.active = False
        self.depths = 0  # heads of multi-token prediction, whose losses come before the model's own
        self.seen: list[tuple[Tensor, Tensor]] = []  # most likely classes and labels of each loss of a call, [b, s]
        self.losses = 0
        self.weights: dict[int, Tensor] = {}  # stand-ins of a call for weights whose main_grad is added to
        self.counts: Tensor | None = None  # [depths, 2] fp32: accepted and counted tokens

    def loss(self, labels: Tensor, logits: UnmadeLogits) -> Tensor:
        of_depth = self.losses < self.depths
        self.losses += 1
        if not of_depth:
            return _head.loss_of(logits, labels, self.settings, weights=self.weights)[0]
        loss, top1 = _head.loss_of(logits, labels, self.settings, return_top1=True, weights=self.weights)
        self.seen.append((top1, labels))
        return loss

    def count(self, model: Any, loss_mask: Tensor | None, packed_seq_params: Any) -> None:
        """Adds to the counts what the depths of the last call have accepted."""
        roll = core("transformer.multi_token_prediction").roll_tensor
        with torch.no_grad():
            rows = []
            mask = torch.ones_like(self.seen[0][1]) if loss_mask is None else loss_mask
            for top1, labels in self.seen:
                mask, _ = roll(mask, shifts=-1, dims=-1, cp_group=model.pg_collection.cp, packed_seq_params=packed_seq_params)
                valid = mask.bool()
                rows.append(torch.stack((((top1 == labels) & valid).sum(), valid.sum())))
            counts = torch.stack(rows).float()
            self.counts = counts if self.counts is None else self.counts + counts


def _postprocess(model: Any, *args: Any, **kwargs: Any) -> Any:
    return _without_logits(model, type(model)._postprocess, args, kwargs)


def _forward(model: Any, *args: Any, **kwargs: Any) -> Any:
    return _without_logits(model, type(model).forward, args, kwargs)


def _without_logits(model: Any, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs the model's method `own`, with losses in the place of logits where it has labels."""
    tap: Tap = model._flce_tap
    given = inspect.signature(own).bind(model, *args, **kwargs).arguments
    infers = given.get("inference_context") is not None or given.get("inference_params") is not None
    if given.get("labels") is None or given.get("output_processor") is not None or infers or not model.post_process:
        return own(model, *args, **kwargs)
    if getattr(model.config, "config_logger_dir", ""):
        raise errors.ArgumentError(
            f"config.config_logger_dir is {model.config.config_logger_dir!r}: Megatron writes logits there, and a patched model makes none "
            "where labels are given; leave it empty, or flce.megatron.unpatch(model)"
        )
    tap.depths, tap.losses, tap.seen, tap.active = model.config.mtp_num_layers or 0, 0, [], True
    try:
        made = own(model, *args, **kwargs)
        if tap.losses not in (1, tap.depths + 1):  # 1: heads of multi-token prediction were left out
            raise errors.ArgumentError(
                f"the model asked for {tap.losses} losses of its output layer; it must be {tap.depths + 1}, of which {tap.depths} are "
                "multi-token prediction's. What it computes is not understood: flce.megatron.unpatch(model)"
            )
        if tap.losses > 1 and model.training:
            tap.count(model, given.get("loss_mask"), given.get("packed_seq_params"))
    finally:
        tap.active, tap.seen, tap.weights = False, [], {}
    return made


def _compute_language_model_loss(model: Any, labels: Tensor, logits: Any) -> Any:
    if isinstance(logits, UnmadeLogits):
        return model._flce_tap.loss(labels, logits)
    return type(model).compute_language_model_loss(model, labels, logits)


def check_loss(compute_language_model_loss: Any) -> None:
    """Raises ArgumentError for a model whose loss is one of its own."""
    function = getattr(compute_language_model_loss, "__func__", None)
    own = core("models.common.language_module.language_module").LanguageModule.compute_language_model_loss
    if compute_language_model_loss is not None and function not in (own, _compute_language_model_loss):
        raise errors.ArgumentError(
            f"compute_language_model_loss is {compute_language_model_loss!r}; in its place flce computes the cross entropy of "
            "megatron.core's LanguageModule.compute_language_model_loss, and another loss is not known: keep it"
        )


def _layer_forward(layer: Any, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
    if not layer._flce_tap.active:
        return type(layer).forward(layer, input_, weight=weight, runtime_gather_output=runtime_gather_output)
    _head.check_layer(layer)
    return _head.defer(layer, input_, weight=weight, runtime_gather_output=runtime_gather_output)


def language_model_of(model: Any) -> Any:
    """The language model under wrappers such as Float16Module and DistributedDataParallel. Raises ArgumentError."""
    inner = model
    while _kind_of(inner) is None and isinstance(getattr(inner, "module", None), torch.nn.Module):
        inner = inner.module
    if _kind_of(inner) is None:
        raise errors.ArgumentError(
            f"model is a {kind_of(inner)}; it must be megatron.core's {', '.join(_KINDS[:-1])} or {_KINDS[-1]}, or wrap one"
        )
    return inner


def _kind_of(model: Any) -> Any:
    """The class of megatron.core that the model is of."""
    kinds = (each for each in type(model).__mro__ if each.__name__ in _KINDS and each.__module__.startswith("megatron.core."))
    return next(kinds, None)


def _replacements(model: Any) -> list[tuple[Any, str, Any]]:
    """Functions that replace a patched model's methods: (holder, name, function)."""
    entry = ("_postprocess", _postprocess) if hasattr(type(model), "_postprocess") else ("forward", _forward)
    loss = ("compute_language_model_loss", _compute_language_model_loss)
    return [(model, *entry), (model, *loss), (model.output_layer, "forward", _layer_forward)]


def patch(model: Any, *, main_grad: bool | None = None, **options: Any) -> Any:
    """Has a GPTModel, MambaModel or HybridModel compute its loss without logits: `model(..., labels=labels)` gives what it gave, [b, s]
    fp32, unreduced. So do its heads of multi-token prediction, whose losses Megatron scales, adds and logs as before; `mtp_acceptance`
    counts what they accept.

    The model's own code runs. Its output layer gives what stands for logits, and `compute_language_model_loss` computes the loss
    from that. Without labels, and with an inference_context, the model gives logits as before. Parameters and state_dict are as they were.
    In place, before or after Float16Module and DistributedDataParallel; a pipeline stage without an output layer is left alone. Returns the
    model. Patched once more, it has the new options.

    Args:
        main_grad, options: those of `OutputProcessor`.

    Raises ArgumentError for a model of another kind, or with a loss of its own. When the model is called: as `OutputProcessor`.
    """
    settings = _head.settings_of(main_grad, options)
    inner = language_model_of(model)
    if not inner.post_process:
        return model
    replacements = _replacements(inner)
    for _, name, _ in replacements[:2]:
        if getattr(type(inner), name) is not getattr(_kind_of(inner), name):
            raise errors.ArgumentError(
                f"model is a {type(inner).__qualname__}, which has a {name} of its own, so that what its loss is is not known; keep it"
            )
    _head.check_layer(inner.output_layer)
    tap = inner.__dict__.get("_flce_tap")
    if tap is not None:
        tap.settings = settings
        return model
    for holder, name, _ in replacements:
        if name in holder.__dict__:
            raise errors.ArgumentError(
                f"{type(holder).__name__}.{name} is replaced already, by {holder.__dict__[name]!r}; take that off first"
            )
    inner.__dict__["_flce_tap"] = inner.output_layer.__dict__["_flce_tap"] = Tap(settings)
    for holder, name, function in replacements:
        holder.__dict__[name] = types.MethodType(function, holder)
    return model


def unpatch(model: Any) -> Any:
    """Takes back what `patch` did; a model that is not patched stays as it is. Returns the model. Raises ArgumentError where somebody has
    replaced a method since."""
    inner = language_model_of(model)
    if "_flce_tap" not in inner.__dict__:
        return model
    replacements = _replacements(inner)
    for holder, name, function in replacements:
        if getattr(holder.__dict__.get(name), "__func__", None) is not function:
            raise errors.ArgumentError(f"{type(holder).__name__}.{name} has been replaced since the model was patched; take that off first")
    for holder, name, _ in replacements:
        del holder.__dict__[name]
    del inner.__dict__["_flce_tap"], inner.output_layer.__dict__["_flce_tap"]
    return model


def mtp_acceptance(model: Any, group: Any = None, *, reset: bool = True) -> Tensor:
    """[mtp_num_layers, 2] fp32: for each depth of multi-token prediction, how often its most likely class was the token, and how many
    tokens were counted, those whose rolled loss_mask is not 0. Counts all training calls of a patched model since the last reset.

    Args:
        model: on the rank that has its output layer.
        group: the ranks over which counts are added up, such as the data-parallel group with context parallel. None: this rank's tokens.

    Raises ArgumentError for a model that is not patched or has no heads of multi-token prediction.
    """
    inner = language_model_of(model)
    tap, depths = inner.__dict__.get("_flce_tap"), inner.config.mtp_num_layers
    if tap is None or not depths:
        why = "is not patched here" if tap is None else f"has mtp_num_layers={depths}"
        raise errors.ArgumentError(f"model {why}; it must be patched by flce.megatron.patch and have heads of multi-token prediction")
    device = next(inner.parameters()).device
    counts = torch.zeros(depths, 2, device=device) if tap.counts is None else tap.counts.clone()
    if reset:
        tap.counts = None
    if group is not None:
        dist.all_reduce(counts, group=group)
    return counts
