"""Layers, and with them parameters, of each stage of a causal language model."""

from __future__ import annotations

import copy
import itertools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flce import errors
from flce.engine._replacement import present


@dataclass(frozen=True)
class Names:
    """How a family of models names its parameters, in checkpoints and modules alike."""

    layer: str  #: beginning of a layer's name, before its number: "model.layers."
    first: tuple[str, ...]  #: the first stage's modules beside its layers: "model.embed_tokens."
    last: tuple[str, ...]  #: the last stage's modules beside its layers: "model.norm.", "lm_head."
    embedding: str  #: the embedding's weight: "model.embed_tokens.weight"
    head: str = "lm_head.weight"  #: the output layer's weight


LLAMA_NAMES = Names("model.layers.", ("model.embed_tokens.",), ("model.norm.", "lm_head.", "score."), "model.embed_tokens.weight")
GPT2_NAMES = Names(
    "transformer.h.", ("transformer.wte.", "transformer.wpe."), ("transformer.ln_f.", "lm_head.", "score."), "transformer.wte.weight"
)
#: names by the config's model_type
NAMES = {**dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma2"), LLAMA_NAMES), "gpt2": GPT2_NAMES}


@dataclass(frozen=True)
class StagePlan:
    """Stage s has the layers starts[s] to starts[s + 1] - 1."""

    names: Names
    starts: tuple[int, ...]
    tied: bool

    @property
    def num_stages(self) -> int:
        return len(self.starts) - 1

    def layers(self, stage: int) -> range:
        return range(self.starts[stage], self.starts[stage + 1])

    def stages_of(self, parameter: str) -> tuple[int, ...]:
        """The stages that have a parameter of this name: one, or the first and the last for a tied embedding. ArgumentError for a name that
        the family does not have."""
        last = self.num_stages - 1
        if self.tied and parameter in (self.names.embedding, self.names.head):
            return tuple(sorted({0, last}))
        number = re.match(re.escape(self.names.layer) + r"(\d+)\.", parameter)
        if number is not None and int(number[1]) < self.starts[-1]:
            return (next(s for s in range(self.num_stages) if int(number[1]) in self.layers(s)),)
        if parameter.startswith(self.names.first):
            return (0,)
        if parameter.startswith(self.names.last):
            return (last,)
        raise errors.ArgumentError(
            f"parameter {parameter!r} belongs to no stage of this model: its layers are {self.names.layer}0 to {self.starts[-1] - 1}"
        )


def balance(layer_sizes: Sequence[int], first: int, last: int, num_stages: int) -> tuple[int, ...]:
    """Where each stage's layers start, and their number behind: the cut into runs whose largest sum is least, where `first` and `last` are
    added to the first and last stage. Among cuts with that largest sum the one whose sums' squares add up to least: an embedding or a head
    may be most of its stage, and the other stages are to be even all the same. Among these the one with the earlier starts. Every stage has
    a layer."""
    count = len(layer_sizes)
    if not 1 <= num_stages <= count:
        raise errors.ArgumentError(f"num_stages is {num_stages}; a model of {count} layers has 1 to {count} stages")
    sums = list(itertools.accumulate(layer_sizes, initial=0))

    def cost(stage: int, start: int, end: int) -> int:
        return sums[end] - sums[start] + (first if stage == 0 else 0) + (last if stage == num_stages - 1 else 0)

    def best(add: Callable[[int, int], int], limit: float) -> tuple[int, tuple[int, ...]]:
        """The least total of the stages' costs, which `add` adds to what the stages before have, and the cut; no cost is above limit."""
        reached: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, (0,))}
        for stage in range(num_stages):
            behind: dict[int, tuple[int, tuple[int, ...]]] = {}
            for start, (total, starts) in reached.items():
                for end in range(start + 1, count - (num_stages - 1 - stage) + 1):
                    more = cost(stage, start, end)
                    candidate = (add(total, more), (*starts, end))
                    if more <= limit and (end not in behind or candidate < behind[end]):
                        behind[end] = candidate
            reached = behind
        return reached[count]

    largest, _ = best(max, float("inf"))
    return best(lambda total, more: total + more * more, largest)[1]


def plan_stages(config: Any, num_stages: int) -> StagePlan:
    """The cut of a causal language model into stages by parameters: the largest stage is as small as it can be. The first stage counts the
    embeddings beside its layers, the last one the final norm and the output layer, also where that is tied to the embedding: its product
    costs what its size says. A critic is cut as the language model is, so both read the same files.

    Args:
        config: a config of transformers (PreTrainedConfig), or a folder that has a config.json.
        num_stages: 1 to the number of layers.

    Raises ArgumentError: a model type that stages are not made of, a number of stages that the model does not have.
    """
    return plan_of(skeleton(config_of(config)), num_stages)


def plan_of(model: Any, num_stages: int) -> StagePlan:
    """`plan_stages` of a causal language model of transformers that is there."""
    names = names_of(model.config)

    def size(prefix: str) -> int:
        return sum(p.numel() for name, p in model.named_parameters(remove_duplicate=False) if name.startswith(prefix))

    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.get_submodule(names.layer[:-1])]
    starts = balance(layers, sum(map(size, names.first)), sum(map(size, names.last)), num_stages)
    return StagePlan(names, starts, bool(model.config.tie_word_embeddings))


def config_of(config: Any) -> Any:
    """The config itself, or that of a folder with a config.json."""
    from transformers import AutoConfig, PretrainedConfig

    if isinstance(config, (str, os.PathLike)):
        folder = present(Path(config))
        if not (folder / "config.json").is_file():
            raise errors.ArgumentError(f"config is {os.fspath(config)!r}; a path must be a folder that has a config.json")
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if not isinstance(config, PretrainedConfig):
        raise errors.ArgumentError(
            f"config is a {type(config).__name__}; it must be a config of transformers or a folder with a config.json"
        )
    return config


def names_of(config: Any) -> Names:
    """ArgumentError for a family that stages are not made of."""
    if config.model_type not in NAMES:
        raise errors.ArgumentError(
            f"config has model_type {config.model_type!r}; stages are made of {', '.join(sorted(NAMES))}. For another model write a "
            "flce.engine.Stage of your own"
        )
    return NAMES[config.model_type]


def classifier_of(name: str) -> str:
    """The class that a critic has in place of a language model's class of that name."""
    return re.sub("ForCausalLM$|LMHeadModel$", "ForSequenceClassification", name)


def skeleton(config: Any) -> Any:
    """The whole model as transformers makes it, on the meta device: shapes and modules without memory."""
    from transformers import AutoModelForCausalLM

    names_of(config)
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"  # the config's own attention may not be installed; no stage uses it
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)
