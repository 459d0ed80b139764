"""examples/engine for tests, and PPO and fine-tuning as they are written with logits: dense, a sequence at a time, in loops."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "examples"))


def cut(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    ends = cu_seqlens.tolist()
    return list(itertools.pairwise(ends))


def packed(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def logprobs_of_logits(logits: Tensor, ids: Tensor, cu_seqlens: Tensor, temperature: float = 1.0) -> Tensor:
    """[T] in logits' dtype: row t is log p of token t + 1, 0 in last rows."""
    rows = []
    for begin, end in cut(cu_seqlens):
        log_softmax = (logits[begin:end] / temperature).log_softmax(-1)
        rows += [log_softmax[t, ids[begin + t + 1]] for t in range(end - begin - 1)] + [logits.new_zeros(())]
    return torch.stack(rows)


def sft_loss_of_logits(logits: Tensor, ids: Tensor, cu_seqlens: Tensor, prompt_mask: Tensor | None = None) -> tuple[Tensor, list[float]]:
    """The mean over trained tokens, and each sequence's perplexity (those with trained tokens)."""
    logprobs, trained, perplexities = logprobs_of_logits(logits, ids, cu_seqlens), [], []
    for begin, end in cut(cu_seqlens):
        own = [logprobs[t] for t in range(begin, end - 1) if prompt_mask is None or not prompt_mask[t + 1]]
        trained += own
        if own:
            perplexities.append(math.exp(-sum(x.item() for x in own) / len(own)))
    return -torch.stack(trained).mean(), perplexities


def rewards_of_loops(
    kl_ctl: float, clip: float, logp: Tensor, ref: Tensor, score: Tensor, cu_seqlens: Tensor, unfinished: Tensor
) -> Tensor:
    rewards = torch.zeros_like(logp)
    for b, (begin, end) in enumerate(cut(cu_seqlens)):
        for t in range(begin, end - 1):
            rewards[t] = -kl_ctl * (logp[t] - ref[t])
        if end - begin > 1 and not unfinished[b]:
            rewards[end - 2] += min(max(score[b].item(), -clip), clip)
    return rewards


def advantages_of_loops(
    gamma: float, lam: float, values: Tensor, rewards: Tensor, cu_seqlens: Tensor, unfinished: Tensor
) -> tuple[Tensor, Tensor]:
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    for b, (begin, end) in enumerate(cut(cu_seqlens)):
        following = 0.0
        for t in reversed(range(begin, end - 1)):
            next_value = values[t + 1] if t + 1 < end - 1 or unfinished[b] else 0.0
            following = rewards[t] + gamma * next_value - values[t] + gamma * lam * following
            advantages[t], returns[t] = following, following + values[t]
    return advantages, returns


def actor_loss_of_loops(logp: Tensor, old: Tensor, advantages: Tensor, eps: float, mask: Tensor) -> tuple[Tensor, dict[str, float]]:
    losses, ratios, clipped, kl = [], [], 0, []
    for t in mask.nonzero().flatten().tolist():
        ratio = (logp[t] - old[t]).exp()
        kept = ratio.clamp(1 - eps, 1 + eps)
        gain, kept_gain = advantages[t] * ratio, advantages[t] * kept
        losses.append(-torch.minimum(gain, kept_gain))
        clipped += int(kept_gain < gain)
        ratios.append(ratio.item())
        kl.append(ratio.item() - 1 - math.log(ratio.item()))
    count = len(losses)
    stats = {"importance_weight": sum(ratios) / count, "clip_ratio": clipped / count, "approx_kl": sum(kl) / count}
    return torch.stack(losses).mean(), stats
