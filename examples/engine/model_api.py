"""Objects that interfaces work on: a model, and how its data moves."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce.engine import PipelineEngine

Data = dict[str, Tensor]  # packed_input_ids [T], cu_seqlens [B + 1]; every other tensor has a row for each token, or for each sequence


@dataclass
class Model:
    """An engine with what belongs to it. `version` counts train steps; the engine's learning-rate scheduler steps by it."""

    module: PipelineEngine
    tokenizer: Any = None
    version: int = 0

    def inc_version(self) -> None:
        self.version += 1


def split_minibatches(data: Mapping[str, Tensor], n_minibatches: int, min_sequences: int = 1) -> list[Data]:
    """Splits the batch into n_minibatches runs of whole sequences, of nearly equal numbers of tokens, in the batch's order (every rank of a
    pipeline has to cut alike, so nothing is shuffled here).

    data: packed_input_ids [T], cu_seqlens [B + 1] and tensors of T or B rows; each minibatch has the same names. A tensor of another number
    of rows is refused, and so is one that could be either, where T is B (every sequence has one token).
    min_sequences: the least sequences of a minibatch: the engine's number of microbatches.
    """
    ends = data["cu_seqlens"].tolist()
    num_sequences, num_tokens = len(ends) - 1, ends[-1]
    if n_minibatches < 1 or num_sequences < n_minibatches * min_sequences:
        raise ValueError(
            f"n_minibatches is {n_minibatches} and a minibatch has {min_sequences} microbatches or more: that takes "
            f"{max(n_minibatches, 1) * min_sequences} sequences, and the batch has {num_sequences}"
        )
    rows_of_tokens = {name for name, x in data.items() if name != "cu_seqlens" and x.shape[0] == num_tokens}
    for name, x in data.items():
        if name != "cu_seqlens" and x.shape[0] not in (num_tokens, num_sequences):
            raise ValueError(f"{name} has {x.shape[0]} rows; the batch has {num_tokens} tokens and {num_sequences} sequences")
    if num_tokens == num_sequences and n_minibatches > 1:
        raise ValueError(f"every one of the {num_sequences} sequences has one token: none predicts anything")
    cuts = [0]
    for i in range(1, n_minibatches):
        target = num_tokens * i / n_minibatches
        first, last = cuts[-1] + min_sequences, num_sequences - (n_minibatches - i) * min_sequences
        cuts.append(min(range(first, last + 1), key=lambda b: abs(ends[b] - target)))
    cuts.append(num_sequences)
    parts = []
    for begin, end in itertools.pairwise(cuts):
        part = {name: x[ends[begin] : ends[end]] if name in rows_of_tokens else x[begin:end] for name, x in data.items()}
        part["cu_seqlens"] = data["cu_seqlens"][begin : end + 1] - ends[begin]
        parts.append(part)
    return parts


def counted_by(engine: PipelineEngine, token_count: Any) -> dict[str, Any]:
    """The keyword that tells an engine what the loss is a mean over, where it asks: with normalize="tokens"."""
    return {"token_count": token_count} if engine.normalize == "tokens" else {}


def from_last_stage(engine: PipelineEngine, data: Mapping[str, Tensor] | None) -> Data:
    """The last stage's tensors on every stage's device: `generate` and `inference` return them there alone, and training needs them
    everywhere. Every rank of the pipeline calls it; what other stages pass is ignored."""
    group, device = engine.pipeline_group, engine.device
    if engine.is_last and data is None:
        raise ValueError("data is None on the last stage, which has to have it")
    source = dist.get_process_group_ranks(group)[-1]
    shapes: list[Any] = [[(name, tuple(x.shape), x.dtype) for name, x in (data or {}).items()] if engine.is_last else None]
    dist.broadcast_object_list(shapes, source, group=group, device=device)
    received = {}
    for name, shape, dtype in shapes[0]:
        x = data[name].to(device).contiguous() if engine.is_last and data is not None else torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(x, source, group=group)
        received[name] = x
    return received
