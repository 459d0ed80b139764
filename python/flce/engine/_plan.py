"""Which layers, and so which parameters, each stage of a causal language model has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from flce import errors


@dataclass(frozen=True)
class Names:
    """How a family of models names its parameters, in checkpoints and modules alike."""

    layer: str  #: what stands before a layer's number: "model.layers."
    first: tuple[str, ...]  #: what the first stage has beside its layers: "model.embed_tokens."
    last: tuple[str, ...]  #: what the last stage has: "model.norm.", "lm_head."
    embedding: str  #: the embedding's weight: "model.embed_tokens.weight"
    head: str  #: the output layer's weight: "lm_head.weight"


LLAMA_NAMES = Names(
    "model.layers.", ("model.embed_tokens.",), ("model.norm.", "lm_head.", "score."), "model.embed_tokens.weight", "lm_head.weight"
)
GPT2_NAMES = Names(
    "transformer.h.",
    ("transformer.wte.", "transformer.wpe."),
    ("transformer.ln_f.", "lm_head.", "score."),
    "transformer.wte.weight",
    "lm_head.weight",
)
#: by the config's model_type
NAMES = {
    "llama": LLAMA_NAMES,
    "mistral": LLAMA_NAMES,
    "qwen2": LLAMA_NAMES,
    "qwen3": LLAMA_NAMES,
    "gemma2": LLAMA_NAMES,
    "gpt2": GPT2_NAMES,
}


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
    added to the first and last stage. Of equal cuts the one with the earlier starts. Every stage has a layer."""
    count = len(layer_sizes)
    if not 1 <= num_stages <= count:
        raise errors.ArgumentError(f"num_stages is {num_stages}; a model of {count} layers has 1 to {count} stages")
    sums = [0]
    for size in layer_sizes:
        sums.append(sums[-1] + size)

    def cost(stage: int, start: int, end: int) -> int:
        return sums[end] - sums[start] + (first if stage == 0 else 0) + (last if stage == num_stages - 1 else 0)

    best: list[dict[int, tuple[int, tuple[int, ...]]]] = [{0: (0, (0,))}]
    for stage in range(num_stages):
        reached: dict[int, tuple[int, tuple[int, ...]]] = {}
        for start, (largest, starts) in best[-1].items():
            for end in range(start + 1, count - (num_stages - 1 - stage) + 1):
                candidate = (max(largest, cost(stage, start, end)), (*starts, end))
                if end not in reached or candidate < reached[end]:
                    reached[end] = candidate
        best.append(reached)
    return best[-1][count][1]
