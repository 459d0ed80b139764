"""Hugging Face causal language models: hidden states for the loss while training, logits otherwise. transformers itself is imported only
with a model at hand."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flce import errors
from flce.adapters import _head_tap, _model_facts, _own_loss
from flce.adapters._own_loss import Meaning
from flce.adapters._shared_rows import SharedRows
from flce.call import _arguments, _chunked, _heads
from flce.call._options import check_options
from flce.call._targets import shift_labels
from flce.core import _zero3
from flce.loss import LinearCrossEntropyLoss, LossOptions

_MOST_SEQUENCES = 8  # sequences whose logits a loss is compared on
_BY_HAND = (
    "state the head's maths by hand, flce.patch(model, logit_scale=..., softcap=...) for softcap · tanh(logit_scale · (hidden · weightᵀ "
    "+ bias) / "
    "softcap), or keep the model's own loss"
)
_SCALES = ("logit_scale", "lm_head_multiplier", "output_multiplier", "logits_scaling")
_IGNORED = -100  # label that transformers' loss functions ignore, where a call does not say


def causal_lm_of(model: Any) -> Any:
    """The causal language model itself, without compiled, data-parallel and peft wrappers."""
    is_module: bool = isinstance(model, torch.nn.Module)
    if not is_module:
        raise errors.DTypeError(f"model is a {type(model).__name__}; it must be a module, a language model of transformers")
    while True:
        inner = getattr(model, "_modules", {}).get("_orig_mod")
        if inner is None and hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
            inner = model.get_base_model()
        if inner is None and not hasattr(model, "get_output_embeddings"):
            inner = getattr(model, "module", None)
        if inner is None or inner is model:
            return model
        model = inner


def return_hidden_states(model: Any) -> Any:
    """Makes `model`, a causal LM of transformers, return the hidden states that reach its output layer, instead of logits, while it trains:
    in training mode with gradients on. Otherwise (evaluation mode, no_grad, generate) it returns what it returned before.

    In place; parameters and state_dict stay as they are. A model that is wrapped by peft, before or after, trains its adapters. Returns the
    model.

    The mapping that it then returns, for any return_dict: last_hidden_state [batch, sequence, hidden_size]; auxiliary_loss, a scalar, where
    the model's own forward adds something to its loss (routers' balance losses); the model's own fields but for loss and logits; and the
    inputs of `CausalLMLoss`. Labels that are passed are not used.

    Deprecated, and gone in 0.2 together with `CausalLMLoss`: `flce.patch` computes the same loss inside the model's forward, compares all
    of it, and needs no compute_loss_func.

    Raises:
        ArgumentError: here, where model has no output embeddings with a weight [V, D], or is tuned by virtual tokens; at the first step,
            where its forward does not call its output layer once.
    """
    warnings.warn(
        "flce.huggingface.return_hidden_states and CausalLMLoss are deprecated and go in 0.2: flce.patch(model) computes the same loss in "
        "the model's own forward, without compute_loss_func",
        FutureWarning,
        stacklevel=2,
    )
    return prepare(model)


def prepare(model: Any) -> Any:
    """`return_hidden_states`, of which `flce.patch` makes its own forward."""
    inner = check_model(model)
    _head_tap.forget_unpickled(inner)
    if _head_tap.of(inner) is None:
        _head_tap.install(inner)
    return model


def check_model(model: Any) -> Any:
    """The causal language model itself. Raises ArgumentError where it has no output embeddings with a weight [V, D], or is tuned by virtual
    tokens."""
    inner = causal_lm_of(model)
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    weight = _heads.weight_of(head) if head is not None else None
    if not isinstance(weight, Tensor) or len(_zero3.whole_shape(weight)) != 2:
        what = "none" if head is None else f"a {type(head).__name__}"
        raise errors.ArgumentError(
            f"model is a {type(inner).__name__} whose output embeddings are {what}; it must be a causal language model of transformers "
            f"with an output "
            "layer that has a weight [vocab_size, hidden_size]"
        )
    peft_config = getattr(model, "peft_config", None) or {}
    for name, config in peft_config.items() if isinstance(peft_config, Mapping) else ():
        if getattr(config, "is_prompt_learning", False):
            raise errors.ArgumentError(
                f"adapter {name!r} of model is a {type(config).__name__}, which puts virtual tokens before the labels' positions; keep "
                f"the model's own loss"
            )
    return inner


def options_of(config: Any) -> dict[str, Any]:
    """Options of `flce.linear_cross_entropy` that a model's config implies: final_logit_softcapping (Gemma), logits_soft_cap
    (RecurrentGemma), output_logit_soft_cap (xLSTM), logit_scale (Cohere), lm_head_multiplier (FalconH1), output_multiplier, logits_scaling
    (Granite, a divisor; HyperCLOVA X, a factor). `CausalLMLoss` compares them with the model. `flce prewarm --hf-config` reads the same
    (generator/hf_config.cpp)."""
    config = getattr(config, "get_text_config", lambda: config)()
    options: dict[str, Any] = {}
    for name in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"):
        if "softcap" not in options and getattr(config, name, None):
            options["softcap"] = float(getattr(config, name))
    given = [name for name in _SCALES if getattr(config, name, None) is not None]
    if given:
        factor = getattr(config, "model_type", None) in ("hyperclovax", "hyperclovax_vision_v2")
        numbers = [float(getattr(config, name)) for name in given]
        options["logit_scale"] = math.prod(
            1.0 / number if name == "logits_scaling" and not factor else number for name, number in zip(given, numbers, strict=True)
        )
    return options


def _alternatives(config: Any, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Other meanings of the config's numbers, for options that are not given: one name is a factor here, a divisor there, or applied to the
    hidden states already."""
    config = getattr(config, "get_text_config", lambda: config)()
    guess = options_of(config)
    scales, caps = [guess.get("logit_scale")], [guess.get("softcap")]
    if getattr(config, "logits_scaling", None) is not None:
        scales += [float(config.logits_scaling), None]
    scales, caps = [*scales, None], [*caps, None]
    if "logit_scale" in given:
        scales = [given["logit_scale"]]
    if "softcap" in given:
        caps = [given["softcap"]]
    pairs = dict.fromkeys(itertools.product(scales, caps))
    return [{"logit_scale": scale, "softcap": cap} for scale, cap in pairs]


class CausalLMLoss:
    """`compute_loss_func=` of transformers.Trainer for a model prepared by `return_hidden_states`.

        trainer = Trainer(model=return_hidden_states(model), compute_loss_func=CausalLMLoss(model), ...)

    The model's own loss: its shift, its logits' scale and cap, what it adds for routers. At the first step, and where the output layer has
    changed since, the logits of a few rows are compared with those of the model's own forward. The output layer is asked for at each call,
    so `resize_token_embeddings` and adapters are seen.

    Divides by num_items_in_batch where the trainer gives it (gradient accumulation), else takes the mean. Where outputs are logits
    (evaluation), it computes the loss from them. Arguments after the model are those of `LinearCrossEntropyLoss`; `loss` is that object.
    shift, logit_scale and softcap are the model's own, and are not looked for where they are given.

    Raises:
        ArgumentError: at the first step, that the model's own logits or loss are other ones, with the difference and its likely cause.
    """

    def __init__(self, model: Any, **keywords: Any) -> None:
        self._model = causal_lm_of(model)
        self._given = LossOptions(keywords)
        self._shift_known = self._shift_given = "shift" in keywords
        check_options({}, keywords.get("shift", 1))
        self.loss = LinearCrossEntropyLoss(self._model.get_output_embeddings, **({"shift": 1} | options_of(self._model.config) | keywords))
        self.loss.head_is_compared = True
        self._compared_head: Any = None
        self._meanings: dict[Any, Meaning] = {}  # meanings of the model's own loss, by kinds of calls
        tap = _head_tap.of(self._model)
        if tap is not None:
            tap.kinds, tap.fp8 = (), self.loss.options.get("fp8")

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """The loss, an fp32 scalar, of outputs (what the model returned) against labels [batch, sequence], int64 or int32, not shifted."""
        if isinstance(outputs, Mapping) and isinstance(outputs.get("last_hidden_state"), Tensor):
            return self._of_hidden_states(outputs, labels, num_items_in_batch)
        logits = self._logits(outputs)
        loss = self._of_logits(logits, labels, num_items_in_batch)
        return self._with_routers_loss(outputs, loss)

    def _of_hidden_states(self, outputs: Mapping[str, Any], labels: Tensor, count: Tensor | int | None) -> Tensor:
        hidden: Tensor = outputs["last_hidden_state"]
        dtype = outputs.get("autocast_dtype")
        autocast = contextlib.nullcontext() if dtype is None else torch.autocast(hidden.device.type, dtype=dtype)
        with autocast:  # the output layer's own autocast: accelerate returns a forward's outputs in fp32
            _arguments.refuse_dtensor("the output layer's weight", self.loss.weight)
            check_labels_shape(_on(hidden.device, labels), hidden, {})
            self.compare(outputs, labels)
            if mask := self.mask_of_labels():
                raise errors.ArgumentError(
                    f"{type(self._model).__name__}'s own loss leaves out labels where {mask} is 0, which a loss behind the model does not "
                    "know: flce.patch(model) computes it"
                )
            loss = self.of_hidden(hidden, labels, count, outputs.get("shift_labels"))
        auxiliary = outputs.get("auxiliary_loss")
        return loss if auxiliary is None else loss + auxiliary.to(loss.device)

    def of_hidden(
        self,
        hidden: Tensor,
        labels: Tensor,
        count: Tensor | int | None,
        shift_labels: Tensor | None,
        ignore_index: int | None = None,
        *,
        trains: bool = True,
    ) -> Tensor:
        """The loss without a model's additions for routers. `shift_labels`: labels that are shifted already, which then count.
        `ignore_index`: this call's. `trains`: False leaves out the options that the model's own loss does not have."""
        if isinstance(count, Tensor):
            count = count.to(hidden.device)
        loss_fn = self.loss if trains else self.loss.without_training_options().with_ignore_index(_IGNORED)
        aligned = shift_labels if loss_fn.shift == 1 else None
        if aligned is not None:
            loss_fn = loss_fn.with_shift(0)
        if ignore_index is not None:
            loss_fn = loss_fn.with_ignore_index(ignore_index)
        if count is not None and loss_fn.options.get("class_weight") is not None:
            raise errors.ArgumentError(
                "class_weight is an option of this loss and num_items_in_batch is given: the mean divides by the sum of the labels' class "
                "weights, which their number does not tell. Call the model without num_items_in_batch (transformers.Trainer: "
                "trainer.model_accepts_loss_kwargs = False, and each microbatch has its own mean), or leave class_weight out"
            )
        return loss_fn(hidden, _on(hidden.device, labels if aligned is None else aligned), num_valid_tokens=count)

    def mask_of_labels(self) -> str | None:
        """The argument of the last forward where whose zeros the model's own loss leaves out labels, if it does."""
        meaning = self._meanings.get(_kind_of_last(self._model))
        return None if meaning is None else meaning.mask

    def has_compared(self, kind: Any) -> bool:
        """Whether calls of this kind were compared with the model's own forward, for the output layer and what changes its logits now."""
        tap = _head_tap.of(self._model)
        if tap is None:
            return False
        tap.attach(self._model)
        return kind in tap.kinds and kind in self._meanings and self._model.get_output_embeddings() is self._compared_head

    def compare(self, outputs: Mapping[str, Any], labels: Any) -> None:
        """Compares with the model's own forward, unless that is done for this kind of call and the output layer that the model has now."""
        tap: Any = _head_tap.of(self._model)
        if tap is not None and self.has_compared(tap.kind):
            return
        rows, own, plain = (outputs.get(name) for name in ("probe_rows", "probe_logits", "probe_plain"))
        if tap is None or tap.recording is None or tap.probe_own is None or rows is None or own is None or plain is None:
            if tap is not None:
                tap.kinds = ()
            raise errors.ArgumentError(
                "outputs has last_hidden_state, but not of a forward that this loss can be compared with: prepare the model with "
                "flce.huggingface.return_hidden_states, and run it again where the loss was made after its forward; or give hidden states "
                "of your own to "
                "flce.LinearCrossEntropyLoss"
            )
        shape, aligned = outputs["last_hidden_state"].shape[:-1], outputs.get("shift_labels")
        arguments = {**tap.arguments, "labels": _on(rows.device, labels)}
        try:
            settled = self.compare_logits(rows, own, plain)
            self.compare_loss(arguments, tap.probe_own, shape, aligned=aligned)
            if settled:
                self.settle()
        finally:
            tap.recording, tap.probe_own, tap.arguments = None, None, {}

    def settle(self) -> None:
        """Calls of the last one's kind are compared no more."""
        tap: Any = _head_tap.of(self._model)
        self._compared_head = self._model.get_output_embeddings()
        tap.kinds = (*tap.kinds, tap.kind)

    def compare_loss(
        self,
        arguments: Mapping[str, Any],
        own: Tensor,
        shape: torch.Size,
        *,
        aligned: Tensor | None = None,
        ignore_index: int | None = None,
    ) -> Tensor:
        """Compares the model's own loss, for the arguments of the last forward, with the cross entropy that this loss computes. `own`
        [..., 2, V] are logits of few of its rows, `shape` that of all positions. Returns what its forward makes of those logits."""
        tap: Any = _head_tap.of(self._model)
        rows = own.detach().reshape(-1, 2, own.shape[-1])[:_MOST_SEQUENCES].transpose(0, 1).flatten(0, 1)
        positions = torch.arange(shape.numel(), device=rows.device) % (rows.shape[0] // 2)
        logits = SharedRows(rows, positions.reshape(shape), own.dtype)
        first = tap.shift if tap.shift is not None else int(not _model_facts.has_encoder(self._model))

        def replay(changes: Mapping[str, Any], counts: bool, logits: SharedRows = logits) -> Any:
            return tap.replay(self._model, arguments, logits, changes, counts)

        known = tap.calls_loss_function and _model_facts.name_of_loss(tap.own_loss)
        question = _own_loss.Question(
            type(self._model).__name__,
            replay,
            tap.calls_loss_function,
            arguments,
            arguments["labels"],
            aligned,
            arguments.get("num_items_in_batch"),
            _IGNORED if ignore_index is None else ignore_index,
            _model_facts.reads_labels(self._model, arguments),
            self.loss.shift if self._shift_given else first,
            self._shift_given,
            _model_facts.special_classes(self._model, logits.shape[-1]),
            None if known or tap.kinds else functools.partial(replay, logits=_own_loss.logits_in_turn(logits)),
        )
        meaning, made = _own_loss.find(question)
        self.loss, self._shift_known = self.loss.with_shift(meaning.shift), True
        self._meanings[tap.kind] = meaning
        return made

    def _find_shift(self) -> None:
        if not self._shift_known:
            self.loss = self.loss.with_shift(_own_shift(self._model))
            self._shift_known = True

    @torch.no_grad()
    def compare_logits(self, rows: Tensor, own: Tensor, plain: Tensor) -> bool:
        """Compares the logits that the model makes of `rows` with those that this loss stands for. Returns whether that settles it: the
        next step is compared, too, where the weight is 0 and nothing would show."""
        if not bool(rows.isfinite().all()):
            return False
        name, head = type(self._model).__name__, self._model.get_output_embeddings()
        why = _heads.why_hooked(head)
        beside = "" if why is None else f"its output layer {why}; "
        if own.shape != plain.shape:
            raise errors.ArgumentError(
                f"{name}'s own logits for hidden states {list(rows.shape)} have shape {list(own.shape)}, but its output layer's are "
                f"{list(plain.shape)}: it does something else with them, such as cutting off a padded vocabulary; keep the model's own "
                f"loss"
            )
        tolerance = _heads.TOLERANCES.get(plain.dtype, _heads.TOLERANCE_16)
        own = own.double()
        plain = plain.to(own.device)
        differences = []
        for options in _alternatives(self._model.config, self._given):
            mine = _chunked.transform_logits(plain.double(), options["logit_scale"], options["softcap"])
            largest = torch.maximum(own.abs(), mine.abs()).amax(dim=-1, keepdim=True).clamp(min=1e-30)
            difference = ((own - mine).abs() / largest).amax().item()
            if difference <= tolerance:  # not so for NaN
                self.loss.options.update({key: value for key, value in options.items() if value is not None or key in self.loss.options})
                return bool(plain.abs().amax() > 0.5 * _heads.LARGE_LOGIT)
            differences.append(difference)
        raise errors.ArgumentError(
            f"{name}'s own logits differ from those of its output layer by {differences[0]:.2g} of the largest: "
            f"{beside}{_likely_cause(own, plain.double())}; "
            f"{_BY_HAND}"
        )

    def _logits(self, outputs: Any) -> Tensor:
        """The logits in what a model returned without being stopped: its own mapping, or with return_dict=False its own tuple."""
        found: list[Any] = []
        if isinstance(outputs, Mapping):
            found = [outputs.get("logits")]
        elif isinstance(outputs, (tuple, list)):
            found = [value for value in outputs if isinstance(value, Tensor) and value.dim() > 1][:1]
        vocab_size = _heads.shape_of(self.loss.output_embeddings)[0]
        if not found or not isinstance(found[0], Tensor):
            raise errors.ArgumentError(
                f"outputs is a {type(outputs).__name__} with neither last_hidden_state nor logits: give what a model returned that "
                "flce.huggingface.return_hidden_states has prepared"
            )
        logits: Tensor = found[0]
        if logits.shape[-1] != vocab_size:
            raise errors.ArgumentError(
                f"outputs has logits of shape {list(logits.shape)}; the last dimension must be vocab_size, {vocab_size}"
            )
        return logits

    def _of_logits(self, logits: Tensor, labels: Tensor, count: Tensor | int | None) -> Tensor:
        self._find_shift()
        tap = _head_tap.of(self._model)
        aligned = tap.aligned_labels if tap is not None and self.loss.shift == 1 else None
        labels = _on(logits.device, labels if aligned is None else aligned)
        targets = labels if aligned is not None else shift_labels(labels, self.loss.shift, ignore_index=self.loss.ignore_index)
        total = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), ignore_index=self.loss.ignore_index, reduction="sum")
        return total / ((targets != self.loss.ignore_index).sum().clamp(min=1) if count is None else count)

    def _with_routers_loss(self, outputs: Any, loss: Tensor) -> Tensor:
        """Adds what transformers' mixture-of-experts models add in evaluation."""
        auxiliary = outputs.get("aux_loss") if isinstance(outputs, Mapping) else None
        if not isinstance(auxiliary, Tensor):
            return loss
        text_config = getattr(self._model.config, "get_text_config", lambda: self._model.config)()
        for place, name in itertools.product((self._model, text_config, self._model.config), ("router_aux_loss_coef", "aux_loss_coef")):
            weight = getattr(place, name, None)
            if weight is not None:
                return torch.add(loss, auxiliary.to(loss.device), alpha=weight)
        raise errors.ArgumentError(
            f"outputs has aux_loss, but {type(self._model).__name__} has no router_aux_loss_coef: switch it off in evaluation "
            f"(output_router_logits=False)"
        )


def check_labels_shape(labels: Tensor, hidden: Tensor, given: Mapping[str, Any]) -> None:
    """Raises ShapeError where labels are not one for each position that the output layer computes, DTypeError where they are no classes."""
    if labels.dtype not in (torch.int64, torch.int32):
        raise errors.DTypeError(f"labels has dtype {labels.dtype}; allowed are int64 and int32")
    if labels.shape != hidden.shape[:-1]:
        kept = [f"{name}={given[name]}" for name in ("logits_to_keep", "num_logits_to_keep") if isinstance(given.get(name), int)]
        what = f", with {kept[0]}, which cuts them: cut labels alike" if kept else ""
        raise errors.ShapeError(
            f"labels has shape {list(labels.shape)}; the output layer computes positions {list(hidden.shape[:-1])}{what}. It must be one "
            "label for each"
        )


def _kind_of_last(model: Any) -> Any:
    tap = _head_tap.of(model)
    return None if tap is None else tap.kind


def _on(device: torch.device, labels: Any) -> Tensor:
    if not isinstance(labels, Tensor):
        raise errors.DTypeError(f"labels is a {type(labels).__name__}; it must be a tensor [batch, sequence]")
    return labels.to(device)


@_heads.without_graph()
def _own_shift(model: Any) -> int:
    """Places by which the model's own loss shifts labels; found by running it on a few tokens where the name of its loss function does not
    say."""
    shift = (_head_tap.of(model) or _head_tap.HeadTap(model)).shift
    if shift is not None:
        return shift
    name, head = type(model).__name__, model.get_output_embeddings()
    weight = _heads.weight_of(head)
    tokens = torch.arange(1, 9, device=weight.device).remainder(_heads.shape_of(head)[0])[None]
    instead = "say by hand what it does, CausalLMLoss(model, shift=1) or shift=0, or keep the model's own loss"
    try:
        with torch.random.fork_rng(devices=[weight.device] if weight.is_cuda else []):
            outputs = model(input_ids=tokens, labels=tokens, return_dict=True)
        logits, own = outputs["logits"], float(outputs["loss"])
    except Exception as error:
        raise errors.ArgumentError(
            f"by how much {name}'s own loss shifts labels is not known, "
            f"and a run on 8 tokens failed ({type(error).__name__}: {error}); {instead}"
        ) from error
    away = {}  # in the logits' own precision, as in many models, and in fp32
    for shift in (1, 0):
        losses = [F.cross_entropy(values[0, : 8 - shift], tokens[0, shift:]).item() for values in (logits, logits.float())]
        away[shift] = min(abs(loss - own) for loss in losses) / max(abs(own), 1e-30)
    nearer = min(away, key=lambda shift: away[shift])
    if away[nearer] > 1e-5 or away[1 - nearer] < 10 * away[nearer] + 1e-6:
        raise errors.ArgumentError(
            f"{name}'s own loss for 8 tokens, {own:.6g}, is away from the cross entropy of its logits by {away[1]:.2g} of itself with "
            f"labels shifted by 1, "
            f"and by {away[0]:.2g} with none; {instead}"
        )
    return nearer


def _likely_cause(own: Tensor, plain: Tensor) -> str:
    """The likely use that the model makes of its output layer's logits, in words. Rows are pairs: as they come, and at a length that makes
    logits large."""
    if own.isnan().any() or own.isinf().any():
        return "some of its own are not finite, as where classes are masked"
    low, high = (((own[..., row, :] * plain[..., row, :]).sum() / plain[..., row, :].square().sum()).item() for row in (0, 1))

    def is_multiple(row: int, factor: float) -> bool:
        difference = (own[..., row, :] - factor * plain[..., row, :]).abs().amax()
        return bool(difference <= _heads.TOLERANCE_16 * own[..., row, :].abs().amax())

    if is_multiple(0, low) and is_multiple(1, high):
        if abs(low - high) <= _heads.TOLERANCE_16 * abs(low):
            return f"they are {low:.6g} times as large, as with logit_scale={low:.6g}"
        return "a layer norm or another function of the whole row comes after the output layer, or a cap"
    largest = own[..., 1, :].abs().amax().item()
    if largest < 0.9 * plain[..., 1, :].abs().amax().item():
        return f"large ones are capped near {largest:.4g}, as with softcap={largest:.4g}"
    return "its output layer is not hidden · weightᵀ + bias, or its forward changes logits in another way"
