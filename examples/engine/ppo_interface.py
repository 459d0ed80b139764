"""PPO's actor and critic over flce.engine: no logits on the way."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from engine import ppo_functional
from engine.functional import Ratio, aggregate_stats, build_loss_mask, masked_normalization, sum_by_sequence
from engine.model_api import Data, Model, split_minibatches
from torch import Tensor

from flce.engine import HeadOutput


def _summed(value: Ratio, group: dist.ProcessGroup | None) -> Tensor:
    """The ratio over the data-parallel group; 0 where it is of nothing."""
    both = torch.stack([value.numerator.float(), value.denominator.float()])
    if group is not None:
        dist.all_reduce(both, group=group)
    return both[0] / both[1].clamp(min=1)


def ppo_actor_loss_from_model_outputs(
    output: HeadOutput,
    packed_input_ids: Tensor,
    cu_seqlens: Tensor,
    old_logp: Tensor,
    ppo_loss_mask: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float,
    temperature: float = 1.0,
    entropy_coef: float = 0.0,
    early_stop_imp_ratio: float | None = None,
    early_stop_kl: float | None = None,
    data_parallel_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """A microbatch's loss of the actor, and its statistics.

    A microbatch whose importance weight or approximate KL (of all data-parallel ranks, where there is a group) is above its limit is
    abandoned: its loss is multiplied by 0, on the device. Statistic `abandoned` counts those.

    Args: old_logp, advantages: [T] fp32. ppo_loss_mask: [T] bool, the rows that predict a response's token; other rows are not computed.
        entropy_coef: how much of the mean entropy is taken from the loss; with 0 entropy is not computed.
    """
    targets = torch.roll(ppo_loss_mask, 1)  # the tokens that those rows predict; a sequence's last row predicts none, so nothing goes round
    labels = packed_input_ids.masked_fill(~targets, -100)
    entropy = None
    if entropy_coef:
        logprobs, entropy = output.logprobs_and_entropy(labels, temperature)
    else:
        logprobs = output.logprobs(labels, temperature)
    loss, ppo = ppo_functional.actor_loss_fn(logprobs, old_logp, advantages, eps_clip, ppo_loss_mask)
    n_tokens = ppo_loss_mask.sum()
    stats: dict[str, Any] = {
        "actor_loss": Ratio(loss.detach() * n_tokens, n_tokens),
        "ppo_approx_kl": ppo["approx_kl"],
        "actor_clip_ratio": ppo["clip_ratio"],
        "importance_weight": ppo["importance_weight"],
    }
    if entropy is not None:
        loss = loss - entropy_coef * torch.where(ppo_loss_mask, entropy, 0.0).sum() / n_tokens.clamp(min=1)
        stats["entropy"] = Ratio.over(entropy, ppo_loss_mask)
    abandoned = torch.zeros((), dtype=torch.bool, device=loss.device)
    for limit, name in ((early_stop_imp_ratio, "importance_weight"), (early_stop_kl, "approx_kl")):
        if limit is not None:
            abandoned = abandoned | (_summed(ppo[name], data_parallel_group) > limit)
    stats["abandoned"] = abandoned.float()
    return loss * (~abandoned), stats


def ppo_critic_loss_from_model_outputs(
    output: HeadOutput,
    packed_input_ids: Tensor,
    cu_seqlens: Tensor,
    values: Tensor,
    ppo_loss_mask: Tensor,
    returns: Tensor,
    *,
    value_eps_clip: float,
) -> tuple[Tensor, dict[str, Any]]:
    """A microbatch's loss of the critic, and its statistics. values (those before training), returns: [T] fp32."""
    new_values = output.values()
    loss, critic = ppo_functional.critic_loss_fn(new_values, values, returns, value_eps_clip, ppo_loss_mask)
    n_tokens = ppo_loss_mask.sum()
    return loss, {
        "value_loss": Ratio(loss.detach() * n_tokens, n_tokens),
        "value_clip_ratio": critic["clip_ratio"],
        "values": Ratio.over(new_values, ppo_loss_mask),
    }


@dataclass(kw_only=True)
class _PPOInterface:
    """What actor and critic share: both turn the same data into the same rewards.

    n_minibatches: optimizer steps of one train step. kl_ctl: coefficient of the KL penalty; with adaptive_kl_ctl the first one, which then
        follows the target (nats a sequence) over the horizon (sequences). discount, gae_lambda: of advantages. max_reward_clip: of scores.
    data_parallel_group: statistics, normalisation and limits are of all its ranks. None: of this rank.
    """

    n_minibatches: int = 4
    kl_ctl: float = 0.1
    discount: float = 1.0
    gae_lambda: float = 1.0
    max_reward_clip: float = 5.0
    adaptive_kl_ctl: bool = False
    adaptive_kl_target: float = 6.0
    adaptive_kl_horizon: float = 10000.0
    data_parallel_group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        self.kl_adapter: ppo_functional.KLController = (
            ppo_functional.AdaptiveKLController(self.kl_ctl, self.adaptive_kl_target, self.adaptive_kl_horizon)
            if self.adaptive_kl_ctl
            else ppo_functional.FixedKLController(self.kl_ctl)
        )

    def _prepare(self, data: Data) -> tuple[dict[str, Any], dict[str, float]]:
        """What to train towards, with `ppo_loss_mask`; and statistics of the batch. The coefficient moves behind it."""
        cu_seqlens, prompt_mask = data["cu_seqlens"], data["prompt_mask"]
        mask = build_loss_mask(prompt_mask, cu_seqlens)
        targets = ppo_functional.ppo_targets(
            data,
            mask,
            kl_ctl=self.kl_adapter.value,
            max_reward_clip=self.max_reward_clip,
            discount=self.discount,
            gae_lambda=self.gae_lambda,
        )
        n_seqs = torch.tensor(cu_seqlens.numel() - 1)
        stats = aggregate_stats(
            [
                {
                    "task_reward": Ratio(data["rewards"].float().sum(), n_seqs),
                    "kl_reward": Ratio.over(targets["kl_rewards"], mask),
                    "kl": Ratio(sum_by_sequence(targets["kl"], cu_seqlens).sum(), n_seqs),
                    "advantage": Ratio.over(targets["advantages"], mask),
                    "returns": Ratio.over(targets["returns"], mask),
                    "avg_seq_len": Ratio(torch.tensor(prompt_mask.numel()), n_seqs),
                    "avg_prompt_len": Ratio(prompt_mask.sum(), n_seqs),
                    "n_tokens": mask.sum(),
                    "n_seqs": n_seqs,
                }
            ],
            self.data_parallel_group,
        )
        stats["kl_ctl"] = self.kl_adapter.value
        self.kl_adapter.update(stats["kl"], int(stats["n_seqs"]))
        return {**targets, "ppo_loss_mask": mask}, stats


@dataclass(kw_only=True)
class PPOActorInterface(_PPOInterface):
    """The policy, and its reference.

    data: packed_input_ids [T], cu_seqlens [B + 1], prompt_mask [T] bool, packed_logprobs, packed_ref_logprobs and values [T], rewards [B],
        seq_no_eos_mask [B] bool; the same on every stage (`from_last_stage`).
    gconfig: of `engine.generate`. temperature: what log-probabilities are taken at, that of generation. adv_norm: advantages are normalised.
    early_stop_kl, early_stop_imp_ratio: microbatches above are abandoned, and minibatches behind one with such are not trained.
    """

    gconfig: Any = None
    temperature: float = 1.0
    adv_norm: bool = True
    eps_clip: float = 0.2
    entropy_coef: float = 0.0
    early_stop_kl: float | None = None
    early_stop_imp_ratio: float | None = None

    def inference(self, model: Model, data: Data) -> Data | None:
        """packed_ref_logprobs [T] of the model, the reference or the policy itself, on the last stage; None on the others."""
        engine = model.module
        engine.eval()
        ids = data["packed_input_ids"]
        logprobs = engine.forward(ids, data["cu_seqlens"], output="logprobs", labels=ids, temperature=self.temperature)
        return None if logprobs is None else {"packed_ref_logprobs": logprobs}
