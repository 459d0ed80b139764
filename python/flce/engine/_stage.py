"""A stage's module, as the engine uses it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flce.engine._packed import KVCache, PackedBatch


class Stage(nn.Module):
    """One stage of a model: base class of the modules that `PipelineEngine` runs.

    forward(x, batch) takes, on the first stage, token ids [T] int64, elsewhere the hidden states [T, hidden_size] of the stage before; it
    returns hidden states [T, hidden_size] of `dtype`. The last stage's are those behind the model's final norm, which `head` takes: its
    forward never calls the head.

    Attributes:
        stage, num_stages: this stage's number, from 0, and the number of stages.
        hidden_size, dtype: those of the hidden states that go from stage to stage.
        head: the output layer, an nn.Linear or a module that holds one (vocabulary, or one row: a critic's values); None but on the last
            stage, which need not set it. Its parameters are the stage's own, as every other's.
        logit_scale, softcap: changes of the logits behind the head (1.0 and 0.0: none).
        num_embeddings: for the first stage, which takes the ids 0 to num_embeddings - 1. None: the number of rows of the last stage's head,
            or any with a critic's head.
        max_positions: the most tokens of a sequence, where positions are learned. None: any.
        tied_weight: the embedding's weight on the first stage and the head's on the last, where these are copies of one parameter, whose
            gradients have to be summed; else None. A subclass makes it a property: a parameter that is assigned has a second name.
    """

    stage: int
    num_stages: int
    hidden_size: int
    dtype: torch.dtype
    head: nn.Module | None
    logit_scale: float = 1.0
    softcap: float = 0.0
    num_embeddings: int | None = None
    max_positions: int | None = None
    tied_weight: nn.Parameter | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "head" and name not in self._modules:  # a default in the class would hide the submodule
            return None
        return super().__getattr__(name)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        raise NotImplementedError

    def new_cache(self, num_sequences: int, max_length: int) -> KVCache:
        """Room for keys and values of this stage's layers: num_sequences sequences of at most max_length tokens each."""
        raise NotImplementedError(f"{type(self).__name__} keeps no keys and values, so it cannot generate")
