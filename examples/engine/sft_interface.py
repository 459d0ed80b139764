"""Supervised fine-tuning over flce.engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.functional import Ratio, aggregate_stats, build_loss_mask, sum_by_sequence
from engine.model_api import Data, Model, counted_by
from flce.engine import HeadOutput, PipelineEngine


def compute_packed_sft_loss(
    output: HeadOutput, packed_input_ids: Tensor, cu_seqlens: Tensor, prompt_mask: Tensor | None = None
) -> tuple[Tensor, dict[str, Any]]:
    """Mean cross entropy of the next token over the tokens that are not the prompt's; 0 where there is none.

    Args: output: the engine's. packed_input_ids: [T] int64. cu_seqlens: [B + 1] int32. prompt_mask: [T] bool, True for a prompt's tokens;
        None: every token with one before it is trained.

    Returns: the loss, and statistics: `loss`, `ppl` (the mean over sequences of a sequence's perplexity; one without trained tokens has
        none), `n_tokens` and `n_seqs`, which were counted for them.
    """
    if prompt_mask is None:
        prompt_mask = torch.zeros_like(packed_input_ids, dtype=torch.bool)
    mask = build_loss_mask(prompt_mask, cu_seqlens)
    losses = output.cross_entropy(packed_input_ids.masked_fill(prompt_mask, -100), reduction="none", shift=1)
    n_tokens = mask.sum()
    loss = losses.sum() / n_tokens.clamp(min=1)
    with torch.no_grad():
        tokens_of = sum_by_sequence(mask, cu_seqlens)
        perplexities = (sum_by_sequence(losses, cu_seqlens) / tokens_of.clamp(min=1)).exp()
        n_seqs = (tokens_of > 0).sum()
        stats = {
            "loss": Ratio(losses.detach().sum(), n_tokens),
            "ppl": Ratio(torch.where(tokens_of > 0, perplexities, 0.0).sum(), n_seqs),
            "n_tokens": n_tokens,
            "n_seqs": n_seqs,
        }
    return loss, stats


def count_tokens(packed_input_ids: Tensor, cu_seqlens: Tensor, prompt_mask: Tensor | None = None) -> Tensor:
    """Number of tokens that `compute_packed_sft_loss` is a mean over: the engine's token_count, for normalize="tokens"."""
    if prompt_mask is None:
        prompt_mask = torch.zeros_like(packed_input_ids, dtype=torch.bool)
    return build_loss_mask(prompt_mask, cu_seqlens).sum()


@dataclass
class SFTInterface:
    """data: packed_input_ids [T], cu_seqlens [B + 1], and prompt_mask [T] bool where prompts are not trained; the same on every stage.

    Statistics are dicts of floats on the last stage, {} on the others: `loss`, `ppl`, `n_tokens` and `n_seqs`, of all data-parallel ranks
    where the engine has a group of them. `micro_batch_stats` has those of this rank's last call, a dict for each microbatch. loss_fn may be
    another function of the same arguments.
    """

    loss_fn: Callable[..., tuple[Tensor, dict[str, Any]]] = compute_packed_sft_loss
    micro_batch_stats: list[dict[str, Any]] = field(default_factory=list)

    def train_step(self, model: Model, data: Data) -> dict[str, float]:
        """One optimizer step."""
        engine = model.module
        engine.train()
        engine.set_version_steps(model.version)
        result = engine.train_batch(data["packed_input_ids"], data["cu_seqlens"], self.loss_fn, **_keywords(engine, data))
        model.inc_version()
        self.micro_batch_stats = [] if result is None else result[1]
        return aggregate_stats(self.micro_batch_stats, engine.data_parallel_group) if engine.is_last else {}

    def evaluate(self, model: Model, batches: Iterable[Data]) -> dict[str, float]:
        """Statistics of all batches together, without gradients."""
        engine = model.module
        engine.eval()
        self.micro_batch_stats = []
        for data in batches:
            result = engine.eval_batch(data["packed_input_ids"], data["cu_seqlens"], self.loss_fn, **_keywords(engine, data))
            self.micro_batch_stats += [] if result is None else result[1]
        return aggregate_stats(self.micro_batch_stats, engine.data_parallel_group) if engine.is_last else {}


def _keywords(engine: PipelineEngine, data: Data) -> dict[str, Any]:
    keywords = counted_by(engine, count_tokens)
    return keywords | {"rows": {"prompt_mask": "token"}, "prompt_mask": data["prompt_mask"]} if "prompt_mask" in data else keywords
