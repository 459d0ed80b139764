"""PPO's arithmetic on packed rows (functional.py says what a row is): rewards, advantages, the losses of actor and critic."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.functional import Ratio, build_next_token_mask, rows_sequence


class KLController:
    """The coefficient of the KL penalty, `value`."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current: float, n_steps: int) -> None:
        raise NotImplementedError


class FixedKLController(KLController):
    """A coefficient that stays."""

    def update(self, current: float, n_steps: int) -> None:
        pass


class AdaptiveKLController(KLController):
    """A coefficient that grows while the KL is above the target and shrinks below it (https://arxiv.org/abs/1909.08593, 2.2).

    init_kl_coef: the first value. target: KL to the reference, in nats a sequence. horizon: in sequences.
    """

    def __init__(self, init_kl_coef: float, target: float, horizon: float) -> None:
        if target <= 0 or horizon <= 0:
            raise ValueError(f"target is {target} and horizon {horizon}; both must be above 0")
        super().__init__(init_kl_coef)
        self.target, self.horizon = target, horizon

    def update(self, current: float, n_steps: int) -> None:
        """current: the KL of this batch, in nats a sequence. n_steps: the batch's sequences."""
        error = min(max(current / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


def actor_loss_fn(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, eps_clip: float, loss_mask: Tensor | None = None
) -> tuple[Tensor, dict[str, Ratio]]:
    """PPO's clipped loss: the mean of max(-A·r, -A·clip(r, 1 - eps, 1 + eps)) over the mask's rows, r = exp(logprobs - old_logprobs). 0
    where the mask has no row.

    Args: logprobs, old_logprobs, advantages: fp32, of one shape, of which logprobs alone gets a gradient. loss_mask: bool, of that shape;
        what lies outside it may be anything. None: every row counts.

    Returns: the loss, and statistics: `importance_weight`, the mean of r; `clip_ratio`, the share of rows whose clipped term is the larger;
        `approx_kl`, the mean of (r - 1) - log r, an estimate of KL(old policy, policy) that is never negative.
    """
    mask = torch.ones_like(logprobs, dtype=torch.bool) if loss_mask is None else loss_mask
    log_ratio = torch.where(mask, logprobs - old_logprobs.detach(), 0.0)  # before exp: what overflows outside the mask would leave NaN
    advantages = torch.where(mask, advantages.detach(), 0.0)
    ratio = log_ratio.exp()
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - eps_clip, 1 + eps_clip)
    loss = torch.where(mask, torch.maximum(plain, clipped), 0.0).sum() / mask.sum().clamp(min=1)
    with torch.no_grad():
        stats = {
            "importance_weight": Ratio.over(ratio, mask),
            "clip_ratio": Ratio.over((plain < clipped).float(), mask),
            "approx_kl": Ratio.over(ratio - 1 - log_ratio, mask),
        }
    return loss, stats


def critic_loss_fn(
    value: Tensor,
    old_value: Tensor,
    target_value: Tensor,
    value_eps_clip: float,
    loss_mask: Tensor | None = None,
    loss_fn_type: str = "mse",
) -> tuple[Tensor, dict[str, Ratio]]:
    """PPO's clipped value loss: the mean over the mask's rows of the larger of two losses, of the value and of the value kept within
    value_eps_clip of the old one; 0 where the mask has no row.

    Args: value, old_value, target_value: fp32, of one shape, of which value alone gets a gradient. loss_mask: as for `actor_loss_fn`.
        loss_fn_type: "mse", half the squared difference, or "huber" with delta 10.

    Returns: the loss, and `clip_ratio`, the share of rows whose clipped loss is the larger.
    """
    if loss_fn_type not in ("mse", "huber"):
        raise ValueError(f"loss_fn_type is {loss_fn_type!r}; it must be 'mse' or 'huber'")
    mask = torch.ones_like(value, dtype=torch.bool) if loss_mask is None else loss_mask
    value, old, target = (torch.where(mask, x, 0.0) for x in (value, old_value.detach(), target_value.detach()))

    def loss_of(x: Tensor) -> Tensor:
        if loss_fn_type == "mse":
            return 0.5 * (x - target).square()
        return F.huber_loss(x, target, reduction="none", delta=10.0)

    plain = loss_of(value)
    clipped = loss_of(value.clamp(old - value_eps_clip, old + value_eps_clip))
    loss = torch.maximum(plain, clipped).sum() / mask.sum().clamp(min=1)
    with torch.no_grad():
        stats = {"clip_ratio": Ratio.over((clipped > plain).float(), mask)}
    return loss, stats


@torch.no_grad()
def get_packed_rewards(
    kl_ctl: float,
    clip_reward_value: float,
    log_probs: Tensor,
    ref_log_probs: Tensor,
    reward_score: Tensor,
    cu_seqlens: Tensor,
    seq_no_eos_mask: Tensor,
) -> tuple[Tensor, Tensor]:
    """Rewards of a prediction: the KL penalty of each, and the score of a finished sequence on its last one.

    Args:
        log_probs, ref_log_probs: [T] fp32, of the policy and the reference, 0 in rows that predict a prompt's token.
        reward_score: [B] fp32, clipped to ±clip_reward_value. A sequence of one token has no prediction, so its score goes nowhere.
        seq_no_eos_mask: [B] bool, True where a sequence was cut before it ended: it gets no score.

    Returns: kl_rewards, -kl_ctl · (log_probs - ref_log_probs), and the rewards, both [T].
    """
    num_tokens = log_probs.shape[0]
    has_next = build_next_token_mask(cu_seqlens, num_tokens)
    kl_rewards = torch.where(has_next, -kl_ctl * (log_probs - ref_log_probs), 0.0)
    score = reward_score.clamp(-clip_reward_value, clip_reward_value).masked_fill(seq_no_eos_mask.bool(), 0.0)
    last = has_next & ~F.pad(has_next[1:], (0, 1))  # the row after it predicts nothing
    return kl_rewards, kl_rewards + torch.where(last, score[rows_sequence(cu_seqlens, num_tokens)], 0.0)


@torch.no_grad()
def get_packed_advantages_and_returns(
    gamma: float, lam: float, values: Tensor, rewards: Tensor, cu_seqlens: Tensor, seq_no_eos_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation on packed sequences, and its returns: advantage + value.

    Args:
        gamma, lam: discount and GAE's λ, 0 to 1.
        values: [T] fp32: row t is the value of the sequence's tokens up to t.
        rewards: [T] fp32: row t is the reward of predicting token t + 1.
        seq_no_eos_mask: [B] bool, True where a sequence was cut before it ended: the value of its last row stands for what would follow.
            Where it ended nothing follows, for any value of the last row.

    Returns: advantages and returns, [T] fp32, 0 in each sequence's last row.
    """
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise ValueError(f"gamma is {gamma} and lam {lam}; both must be 0 to 1")
    num_tokens = values.shape[0]
    has_next = build_next_token_mask(cu_seqlens, num_tokens)
    sequence = rows_sequence(cu_seqlens, num_tokens)
    goes_on = has_next | seq_no_eos_mask.bool()[sequence]
    following = torch.roll(torch.where(goes_on, values, 0.0), -1)
    advantages = torch.where(has_next, rewards + gamma * following - values, 0.0)
    # A[t] = Σ (γλ)^k · δ[t + k] to the end of the sequence: a round adds what lies `span` rows on, and doubles the span.
    decay, span = gamma * lam, 1
    while span < num_tokens and decay**span > 0:
        same = sequence[span:] == sequence[:-span]
        advantages = advantages + F.pad(torch.where(same, decay**span * advantages[span:], 0.0), (0, span))
        span *= 2
    return advantages, torch.where(has_next, advantages + values, 0.0)


def ppo_targets(
    data: dict[str, Tensor], loss_mask: Tensor, *, kl_ctl: float, max_reward_clip: float, discount: float, gae_lambda: float
) -> dict[str, Any]:
    """Targets of actor and critic, from a batch of responses: kl_rewards, advantages, returns, old_logp and values, [T] fp32.

    data: packed_logprobs, packed_ref_logprobs and values [T]; rewards [B]; seq_no_eos_mask [B] bool; cu_seqlens [B + 1].
    """
    cu_seqlens, cut = data["cu_seqlens"], data["seq_no_eos_mask"].bool()
    old_logp, ref_logp = (torch.where(loss_mask, data[name].float(), 0.0) for name in ("packed_logprobs", "packed_ref_logprobs"))
    values = data["values"].float()
    kl_rewards, rewards = get_packed_rewards(kl_ctl, max_reward_clip, old_logp, ref_logp, data["rewards"].float(), cu_seqlens, cut)
    advantages, returns = get_packed_advantages_and_returns(discount, gae_lambda, values, rewards, cu_seqlens, cut)
    return {
        "old_logp": old_logp,
        "kl": old_logp - ref_logp,
        "kl_rewards": kl_rewards,
        "advantages": advantages,
        "returns": returns,
        "values": values,
    }
