"""SkyRL's `sample_support_scores` (`skyrl.backends.skyrl_train.utils.sample_support_replay`) on flce's kernels: log-probabilities of
sampled tokens over a sampler's own sets of classes, and entropies of these distributions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce import errors, functional
from flce.parallel import _parallel

__all__ = ["SampleSupportScores", "sample_support_scores"]

_MOST_IDS = 1024  # classes a token that a call takes
_NO_CLASS = 2**31 - 1  # in no vocabulary


@dataclass(frozen=True)
class SampleSupportScores:
    logprobs: Tensor  # [...] fp32, 0 where no class is recorded
    entropy: Tensor | None  # [...] fp32, 0 there too; None where it is not asked for
    valid_mask: Tensor  # [...] bool: whether a class is recorded


def sample_support_scores(
    logits_or_hidden: Tensor,
    sampled_ids: Tensor,
    support_ids: Tensor,
    *,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Any,
    compute_entropy: bool = False,
    entropy_requires_grad: bool = False,
    lm_head_weight: Tensor | None = None,
    temperature: float = 1.0,
    chunk_size: int | None = None,
) -> SampleSupportScores:
    """Scores of sampled_ids [...] by the softmax over support_ids [..., K] int32, K at most 1023, in any order, -1 for none.

    logits_or_hidden: hidden states [..., D], computed with in lm_head_weight's dtype. Logits, which have no lm_head_weight [V, D] beside
    them, are an ArgumentError. A sampled token outside of its set has its logit less the set's lse, so that a log-probability may be above
    0. The entropy has a gradient with entropy_requires_grad alone. chunk_size changes nothing.

    tp_group: lm_head_weight is this rank's rows vocab_start_index to vocab_end_index, ids are of the whole vocabulary, all else the same on
    every rank. Outputs are those of the whole layer, the same bits on every rank. The gradient of the hidden states is this rank's part,
    which the caller adds up. None: the rows begin with class 0.

    ValueError as the peer's for tensors of other tokens, ids that are not int32, a temperature that is not positive, and a weight of other
    rows.
    """
    if lm_head_weight is None:
        raise errors.ArgumentError(
            "logits_or_hidden holds logits, as lm_head_weight is None; only hidden states spare them: set "
            "trainer.fused_lm_head_logprob=true, or leave this function as SkyRL's"
        )
    _check(logits_or_hidden, sampled_ids, support_ids, temperature, chunk_size)
    if entropy_requires_grad and not compute_entropy:
        raise errors.ArgumentError("entropy_requires_grad is True and compute_entropy is False; a gradient needs compute_entropy=True")
    over_ranks = _over_ranks(tp_group, lm_head_weight, vocab_start_index, vocab_end_index)
    classes = _classes(over_ranks, vocab_end_index, support_ids.device)
    named = support_ids >= 0
    members, valid = named & (support_ids < classes), named.any(-1)
    inside = (members & (support_ids == sampled_ids[..., None])).any(-1)
    # One more place has a sampled token that is not in its set. Classes that there are not are named, too: so they are reported.
    sampled = torch.where((sampled_ids >= 0) & (sampled_ids < classes), sampled_ids, _NO_CLASS)
    outside = torch.where(valid & ~inside, sampled, -1).to(support_ids.dtype)
    ids = torch.cat([torch.where(named, support_ids, -1), outside[..., None]], -1)
    hidden = logits_or_hidden.to(lm_head_weight.dtype)
    scores = functional.linear_logprobs_at(hidden, lm_head_weight, ids, normalize="support", temperature=temperature, **over_ranks)
    within = torch.where(members, scores[..., :-1], torch.where(members.any(-1), -math.inf, 0.0)[..., None])
    correction = torch.where(inside, 0.0, within.logsumexp(-1))  # the set's share of the softmax over it and the sampled token
    place = (ids == sampled[..., None]).int().argmax(-1, keepdim=True)
    logprobs = torch.where(valid, scores.gather(-1, place).squeeze(-1) - correction, 0.0)
    entropy = None
    if compute_entropy:
        kept = torch.where(members, scores[..., :-1] - correction[..., None], 0.0)
        kept = kept if entropy_requires_grad else kept.detach()
        entropy = -torch.where(members, kept.exp() * kept, 0.0).sum(-1).clamp(max=0.0)
    return SampleSupportScores(logprobs, entropy, valid)


def _check(hidden: Tensor, sampled_ids: Tensor, support_ids: Tensor, temperature: float, chunk_size: int | None) -> None:
    tokens = hidden.shape[:-1]
    if sampled_ids.shape != tokens or support_ids.shape[:-1] != tokens:
        raise errors.ShapeError(
            f"sampled_ids has shape {list(sampled_ids.shape)} and support_ids {list(support_ids.shape)}; with hidden states "
            f"{list(hidden.shape)} they must be {list(tokens)} and {[*tokens, 'K']}"
        )
    if support_ids.dtype != torch.int32:
        raise errors.ArgumentError(f"support_ids is {support_ids.dtype}; it must be torch.int32")
    if support_ids.shape[-1] >= _MOST_IDS:
        raise errors.ShapeError(f"support_ids has shape {list(support_ids.shape)}; it may name at most {_MOST_IDS - 1} classes a token")
    if temperature <= 0:
        raise errors.ArgumentError(f"temperature is {temperature}; it must be positive")
    if chunk_size is not None and chunk_size <= 0:
        raise errors.ArgumentError(f"chunk_size is {chunk_size}; it must be positive")


def _classes(over_ranks: dict[str, Any], end: int, device: torch.device) -> Tensor | int:
    """The whole layer's number of classes."""
    if not over_ranks:
        return end
    classes = torch.tensor(end, device=device)
    dist.all_reduce(classes, dist.ReduceOp.MAX, group=over_ranks["process_group"])
    return classes


def _over_ranks(group: Any, weight: Tensor, start: int, end: int) -> dict[str, Any]:
    """The rows as flce has them."""
    if weight.shape[0] != end - start:
        raise errors.ShapeError(
            f"lm_head_weight has {weight.shape[0]} rows and the vocabulary's part is [{start}, {end}); it must have {end - start}"
        )
    if group is None:
        if start != 0:
            raise errors.ArgumentError(
                f"vocab_start_index is {start} and tp_group is None; without a group the rows must begin with class 0"
            )
        return {}
    return {"process_group": _parallel.group_of(group, "tp_group"), "vocab_start": start, "reduce_grad_hidden": False}
