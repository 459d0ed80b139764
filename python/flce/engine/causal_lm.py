"""Stages of Hugging Face's causal language models: transformers' own layers, and a loop over those of the stage."""

from __future__ import annotations

import copy
import functools
import hashlib
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flce
from flce import errors
from flce.core import checks
from flce.engine import _attention, _plan
from flce.engine._packed import KVCache, PackedBatch
from flce.engine._stage import Stage

#: options of a config that stages do not compute
_REFUSED = {
    "add_cross_attention": "is True; stages have no encoder's states to attend to",
    "use_bidirectional_attention": "is set; stages are of causal language models",
    "quantization_config": "is set; stages are of models that are not quantised",
    "reorder_and_upcast_attn": "is True; stages compute attention in the dtype of their layers",
}
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
#: options of the head's maths that a family's own forward applies
_HEAD_OPTIONS: dict[str, set[str]] = {"gemma2": {"softcap"}}


class CausalLMStage(Stage):
    """A stage of a causal language model of transformers, which `causal_lm_stage` makes. Its parameters have the names that they have in
    the whole model: `stage.state_dict()` is a part of the model's.

    Attributes:
        config: a copy of the model's config.
        plan: which layers and parameters each stage has.
        critic: whether the last stage has `score`, a row of values, in place of the output layer.
        gradient_checkpointing: True keeps a layer's input alone and computes the layer again in backward, in training mode. False leaves
            it to the layers, which do what the model was asked for (`model.gradient_checkpointing_enable()`) before it was cut.
    """

    def __init__(self, config: Any, plan: _plan.StagePlan, stage: int, modules: dict[str, nn.Module], *, critic: bool) -> None:
        """modules: those of this stage, by their names in the whole model."""
        super().__init__()
        self.config = config
        self.plan = plan
        self.stage = stage
        self.num_stages = plan.num_stages
        self.hidden_size = int(config.hidden_size)
        self.critic = critic
        self.gradient_checkpointing = False
        self._tied = plan.tied and plan.num_stages > 1 and not critic
        options = {} if critic else flce.huggingface.options_of(config)
        self.logit_scale, self.softcap = options.get("logit_scale", 1.0), options.get("softcap", 0.0)
        for name, module in modules.items():
            _put(self, name, module)
            for part in module.modules():
                if getattr(part, "config", None) is not None:
                    setattr(part, "config", config)  # noqa: B010

    @property
    def layers(self) -> list[nn.Module]:
        """Layers of this stage."""
        return list(self.get_submodule(self.plan.names.layer[:-1]).children())

    @property
    def head(self) -> nn.Module | None:  # type: ignore[override]
        return self.get_submodule("score" if self.critic else "lm_head") if self.is_last else None

    @property
    def tied_weight(self) -> nn.Parameter | None:  # type: ignore[override]
        if not self._tied or not (self.is_first or self.is_last):
            return None
        return self.get_parameter(self.plan.names.embedding if self.is_first else self.plan.names.head)

    @property
    def num_embeddings(self) -> int | None:  # type: ignore[override]
        return int(self.get_parameter(self.plan.names.embedding).shape[0]) if self.is_first else None

    @property
    def max_positions(self) -> int | None:  # type: ignore[override]
        """GPT-2 has a learned position for each of its first max_position_embeddings tokens, and none for later ones."""
        return int(self.config.max_position_embeddings) if self.config.model_type == "gpt2" else None

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Dtype of the layers' parameters."""
        return next(self.layers[0].parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.layers[0].parameters()).device

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        """Hidden states [T, hidden_size] of token ids [T] int64 on the first stage, of hidden states [T, hidden_size] elsewhere. With
        `batch.cache` tokens see those in the cache, too, and are added to it; gradients have to be off then.

        Raises ShapeError, DTypeError, ArgumentError: x and batch do not fit each other, the stage or the cache.
        """
        self._check(x, batch)
        hidden = (self._embedded(x, batch) if self.is_first else x).unsqueeze(0)
        sequences = _attention.Sequences(batch, self.plan.starts[self.stage])
        keywords: dict[str, Any] = {"attention_mask": None, "flce_packed": sequences}
        if self._rotary is not None:
            keywords["position_embeddings"] = self._rotary(hidden, batch.position_ids.unsqueeze(0))
        for layer in self.layers:
            run = functools.partial(layer, **keywords)
            itself = getattr(layer, "gradient_checkpointing", False)
            if self.gradient_checkpointing and not itself and self.training and torch.is_grad_enabled():
                hidden = checkpoint(run, hidden, use_reentrant=False)
            else:
                hidden = run(hidden)
        if self.is_last:
            hidden = self.get_submodule(self.plan.names.last[0][:-1])(hidden)
        if batch.cache is not None:
            batch.cache.advance(batch.lengths)
        return hidden.squeeze(0).to(self.dtype)

    def new_cache(self, num_sequences: int, max_length: int) -> KVCache:
        """Raises ArgumentError: a number below 1, or more tokens than the model's positions allow in a cache."""
        for name, value in (("num_sequences", num_sequences), ("max_length", max_length)):
            checks.integer(name, value, 1)
        self._check_length(max_length, "max_length is")
        attention: Any = next(module for module in self.layers[0].modules() if hasattr(module, "layer_idx"))
        heads = getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads
        return KVCache(len(self.layers), num_sequences, max_length, heads, attention.head_dim, self.dtype, self.device)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """`to`, `half`, `cuda` and the like. A rotary embedding keeps its dtype, as the positions' precision is its frequencies'."""
        before = dict(self._rotary.named_buffers()) if self._rotary is not None else {}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            setattr(self._rotary, name, buffer.to(getattr(self._rotary, name).device))
        return self

    @property
    def _rotary(self) -> Any:
        return getattr(self.get_submodule(self.plan.names.layer.split(".")[0]), "rotary_emb", None)

    def _embedded(self, ids: Tensor, batch: PackedBatch) -> Tensor:
        embeddings = [self.get_submodule(name[:-1]) for name in self.plan.names.first]
        hidden: Tensor = embeddings[0](ids)
        if self.config.model_type == "gemma2" and not hasattr(embeddings[0], "embed_scale"):  # older ones scale in the model's forward
            hidden = hidden * torch.tensor(math.sqrt(self.hidden_size), dtype=hidden.dtype)
        if len(embeddings) > 1:
            hidden = self.get_submodule("transformer.drop")(hidden + embeddings[1](batch.position_ids))
        return hidden

    def _check(self, x: Tensor, batch: PackedBatch) -> None:
        if batch.num_tokens == 0:
            raise errors.ShapeError("batch has no tokens; it must have at least one")
        shape = [batch.num_tokens] if self.is_first else [batch.num_tokens, self.hidden_size]
        if list(x.shape) != shape:
            raise errors.ShapeError(
                f"x has shape {list(x.shape)}; stage {self.stage} of {self.num_stages} takes {shape} for a batch of {batch.num_tokens} "
                "tokens"
            )
        if self.is_first and x.dtype not in (torch.int64, torch.int32):
            raise errors.DTypeError(f"x is {x.dtype}; the first stage takes token ids, int64")
        if batch.cache is not None:
            if torch.is_grad_enabled():
                raise errors.ArgumentError("batch has a cache while gradients are on; run the stage under torch.no_grad()")
            batch.cache.check_room(batch.lengths)  # new_cache makes no more room than there are positions
        self._check_length(batch.max_length, "a sequence of batch has")

    def _check_length(self, length: int, what: str) -> None:
        if self.max_positions is not None and length > self.max_positions:
            raise errors.ArgumentError(f"{what} {length} tokens; the model has learned positions of {self.max_positions} (n_positions)")


def causal_lm_stage(
    model_or_config: Any,
    stage: int,
    num_stages: int,
    *,
    critic: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> CausalLMStage:
    """Stage `stage` of a causal language model: Llama, Mistral, Qwen2, Qwen3, Gemma-2, GPT-2. `plan_stages` says which layers it has.

    Args:
        model_or_config: a model of transformers, whose modules of this stage are taken over and not copied: the model itself cannot be
            called any more, and modules that no stage took are freed with it. Or a config, or a folder with a config.json: this stage's
            modules are made, and nothing of the other stages takes memory.
        stage, num_stages: which, counted from 0, of how many: 1 to the number of layers.
        critic: a value head on the last stage, `score`, an nn.Linear of one row without bias, in place of the output layer. From a
            ForSequenceClassification model with one label it is the model's own.
        dtype: of the parameters; None: the model's, or the config's dtype. A rotary embedding stays in fp32.
        device: of the parameters; None: the model's, or torch's default device. "meta", with a config: parameters without memory for
            `load_state_dict(..., assign=True)`; tensors that no checkpoint has (rotary frequencies) are on the CPU then.
        seed: of parameters that are made, by the model's own initialisation. Every module draws from `seed` and its name, so the weights
            are the same for every number of stages and on every rank (of the same kind of device), and copies of a tied embedding are
            equal. They are not those that transformers draws from the same seed. Torch's own generator stays as it is.

    Where embedding and output layer are tied, and on different stages, each has a copy (`tied_weight`), whose gradients have to be summed.

    Raises ArgumentError: another kind of model, adapters or quantised layers in it, an option of its config that stages do not know, or a
    stage that there is not.
    """
    from transformers import PreTrainedModel

    given = model_or_config if isinstance(model_or_config, PreTrainedModel) else None
    if given is None and isinstance(model_or_config, nn.Module):
        raise errors.ArgumentError(
            f"model_or_config is a {type(model_or_config).__name__}; it must be a model of transformers itself, a config or a folder with "
            "a config.json. Merge adapters first (merge_and_unload()), and wrap the stage rather than the model"
        )
    config = _plan.config_of(model_or_config if given is None else given.config)
    _plan.names_of(config)
    _refuse_options(config, critic)
    whole = _plan.skeleton(config)
    plan = _plan.plan_of(whole, num_stages)
    if not isinstance(stage, int) or not 0 <= stage < num_stages:
        raise errors.ArgumentError(f"stage is {stage!r}; it must be 0 to {num_stages - 1}, with num_stages={num_stages}")
    if given is not None:
        _refuse_model(given, type(whole), plan, critic)
    _attention.register()
    if given is None:
        asked = dtype or getattr(config, "dtype", None) or torch.get_default_dtype()
        dtype = getattr(torch, asked) if isinstance(asked, str) else asked
        device = torch.get_default_device() if device is None else device
    config = copy.deepcopy(config)
    config._attn_implementation = _attention.NAME
    modules = _modules_of(whole if given is None else given, plan, stage, critic)
    if given is not None and plan.tied and not critic and 0 < stage == num_stages - 1:
        modules["lm_head"] = copy.deepcopy(modules["lm_head"])
    made = CausalLMStage(config, plan, stage, modules, critic=critic)
    made.train(True if given is None else given.training)
    _place(made, dtype, None if device is None else torch.device(device))
    new_score = ["score"] if "score" in modules and not hasattr(given, "score") else []
    _initialise(made, whole, list(modules) if given is None else new_score, seed)
    return made


def _refuse_options(config: Any, critic: bool) -> None:
    kind = config.model_type
    for name, why in _REFUSED.items():
        if getattr(config, name, None):
            raise errors.ArgumentError(f"config.{name} {why}")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        raise errors.ArgumentError(f"config.rope_parameters has rope_type {rope!r}, whose frequencies hang on a sequence's length")
    others = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS
    if others:
        raise errors.ArgumentError(f"config.layer_types has {sorted(others)}; stages know {sorted(_KNOWN_LAYERS)}")
    unknown = {} if critic else {k: v for k, v in flce.huggingface.options_of(config).items() if k not in _HEAD_OPTIONS.get(kind, ())}
    if unknown:
        raise errors.ArgumentError(
            f"config asks for {unknown} behind the output layer, which models of type {kind!r} do not apply; remove that from the "
            "config, or write a flce.engine.Stage with the head's maths of your model"
        )


def _refuse_model(model: Any, kind: type, plan: _plan.StagePlan, critic: bool) -> None:
    import transformers

    kinds = [kind, getattr(transformers, _plan.classifier_of(kind.__name__))] if critic else [kind]
    if type(model) not in kinds:
        allowed = " or ".join(each.__name__ for each in kinds)
        raise errors.ArgumentError(
            f"model_or_config is a {type(model).__name__}; a stage{' of a critic' if critic else ''} is made of a {allowed}"
        )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise errors.ArgumentError("model_or_config has adapters; merge them first, or delete them (model.delete_adapter)")
    head = getattr(model, "score", None)
    if head is not None and head.weight.shape[0] != 1:
        raise errors.ArgumentError(f"model_or_config has {head.weight.shape[0]} labels; a critic's values are one (num_labels=1)")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise errors.ArgumentError("model_or_config has parameters on the meta device; load them first, or give the config")
    count = len(model.get_submodule(plan.names.layer[:-1]))
    if count != plan.starts[-1]:
        raise errors.ArgumentError(f"model_or_config has {count} layers, and its config {plan.starts[-1]} (num_hidden_layers)")
    if critic:
        return
    shared = model.get_parameter(plan.names.head) is model.get_parameter(plan.names.embedding)
    if plan.tied is not shared:
        raise errors.ArgumentError(
            f"config.tie_word_embeddings is {plan.tied}, but {plan.names.head} is {'' if shared else 'not '}{plan.names.embedding}; call "
            f"model.tie_weights(), or set the config's to {shared}"
        )


def _modules_of(model: Any, plan: _plan.StagePlan, stage: int, critic: bool) -> dict[str, nn.Module]:
    """Modules of `model` that the stage has, by name."""
    names, base = plan.names, plan.names.layer.split(".")[0]
    wanted = [f"{names.layer}{number}" for number in plan.layers(stage)]
    if stage == 0:
        wanted = [name[:-1] for name in names.first] + [f"{base}.drop"] * hasattr(model.get_submodule(base), "drop") + wanted
    modules = {name: model.get_submodule(name) for name in wanted}
    rotary = getattr(model.get_submodule(base), "rotary_emb", None)
    if rotary is not None:  # it has a state, and no parameters: every stage has its own
        on_meta = any(buffer.is_meta for buffer in rotary.buffers())
        modules[f"{base}.rotary_emb"] = type(rotary)(config=model.config) if on_meta else copy.deepcopy(rotary)
    if stage == plan.num_stages - 1:
        norm = names.last[0][:-1]
        modules[norm] = model.get_submodule(norm)
        if critic:
            like = next(modules[norm].parameters())
            made = nn.Linear(model.config.hidden_size, 1, bias=False, device=like.device, dtype=like.dtype)
            modules["score"] = getattr(model, "score", made)
        else:
            modules["lm_head"] = model.get_submodule("lm_head")
    return modules


def _put(root: nn.Module, name: str, module: nn.Module) -> None:
    """`module` at `name` below root, with containers on the way: the layers' is by number, `stage.model.layers["7"]`."""
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.ModuleDict() if last.isdigit() and part == path[-1] else nn.Module())
        root = root.get_submodule(part)
    root.add_module(last, module)


def _place(stage: CausalLMStage, dtype: torch.dtype | None, device: torch.device | None) -> None:
    """Moves parameters and buffers, and makes room for what is on the meta device, unless parameters are to be there."""
    to_meta = device is None or device.type == "meta"
    homes: dict[int, nn.Parameter] = {}  # a tied weight has two names and is one parameter
    for part in stage.modules():
        for name, p in part._parameters.items():
            if p is None:
                continue
            if id(p) not in homes and p.is_meta and not to_meta:
                homes[id(p)] = nn.Parameter(torch.empty(p.shape, dtype=dtype or p.dtype, device=device), requires_grad=p.requires_grad)
            elif id(p) not in homes:
                p.data = p.data.to(device, dtype)
                homes[id(p)] = p
            part._parameters[name] = homes[id(p)]
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                buffer = torch.full_like(buffer, float("nan"), device="cpu")
            part._buffers[name] = buffer if buffer is None or to_meta else buffer.to(device)


def _initialise(stage: CausalLMStage, whole: Any, names: list[str], seed: int) -> None:
    """The model's own initialisation of these modules of the stage."""
    with torch.no_grad():
        for top in names:
            if top == "lm_head" and stage.plan.tied:
                continue
            for name, part in reversed(list(stage.get_submodule(top).named_modules(prefix=top))):  # a block comes behind its parts
                _draw(whole, part, name, seed)
        if stage.is_last and stage.tied_weight is not None and "lm_head" in names:  # drawn as on the first stage
            embedding = whole.get_submodule(stage.plan.names.embedding.removesuffix(".weight"))
            embedding.weight = stage.tied_weight
            _draw(whole, embedding, stage.plan.names.embedding.removesuffix(".weight"), seed)
    for name, buffer in stage.named_buffers():
        if buffer.isnan().any():
            raise errors.UnavailableError(
                f"this version of transformers does not say what {name} is without a whole model; use transformers 5.23, or give the model"
            )


def _draw(whole: Any, part: nn.Module, name: str, seed: int) -> None:
    weight = next(part.parameters(), None)
    if weight is None:
        return
    cuda = weight.device.type == "cuda"
    generator = torch.cuda.default_generators[weight.device.index] if cuda else torch.default_generator
    with torch.random.fork_rng([weight.device] if cuda else []):
        generator.manual_seed(int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "big"))
        whole._init_weights(part)
