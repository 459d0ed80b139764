"""PPO's actor and critic over flce.engine: no logits on the way."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine import ppo_functional
from engine.functional import (
    Ratio,
    aggregate_stats,
    build_loss_mask,
    concat_prompt_to_generation_output,
    masked_normalization,
    sum_by_sequence,
)
from engine.model_api import Data, Model, counted_by, split_minibatches
from flce.engine import GenerationConfig, HeadOutput, PipelineEngine


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
    abandoned: its loss is 0. No host waits for that. Statistic `abandoned` counts those.

    Args: old_logp, advantages: [T] fp32. ppo_loss_mask: [T] bool, the rows that predict a response's token; other rows are not computed.
        entropy_coef: how much of the mean entropy is taken from the loss; with 0 entropy is not computed.
    """
    targets = torch.roll(ppo_loss_mask, 1)  # the tokens that those rows predict; a sequence's last row predicts none, so nothing goes round
    labels = packed_input_ids.masked_fill(~targets, -100)
    entropy = None
    if entropy_coef:
        logprobs, entropy = output.logprobs_and_entropy(labels, temperature, shift=1)
    else:
        logprobs = output.logprobs(labels, temperature, shift=1)
    with torch.no_grad():
        loss, ppo = ppo_functional.actor_loss_fn(logprobs, old_logp, advantages, eps_clip, ppo_loss_mask)
        abandoned = torch.zeros((), dtype=torch.bool, device=loss.device)
        for limit, name in ((early_stop_imp_ratio, "importance_weight"), (early_stop_kl, "approx_kl")):
            if limit is not None:
                abandoned = abandoned | (_summed(ppo[name], data_parallel_group) > limit)
    n_tokens = ppo_loss_mask.sum()
    stats: dict[str, Any] = {
        "actor_loss": Ratio(loss * n_tokens, n_tokens),
        "ppo_approx_kl": ppo["approx_kl"],
        "actor_clip_ratio": ppo["clip_ratio"],
        "importance_weight": ppo["importance_weight"],
        "abandoned": abandoned.float(),
    }
    trained = ppo_loss_mask & ~abandoned  # nothing of an abandoned one, whose ratios may have overflowed, reaches backward
    loss, _ = ppo_functional.actor_loss_fn(logprobs, old_logp, advantages, eps_clip, trained)
    if entropy is not None:
        loss = loss - entropy_coef * torch.where(trained, entropy, 0.0).sum() / n_tokens.clamp(min=1)
        stats["entropy"] = Ratio.over(entropy, ppo_loss_mask)
    return loss, stats


def count_tokens(packed_input_ids: Tensor, cu_seqlens: Tensor, ppo_loss_mask: Tensor, **_: Tensor) -> Tensor:
    """Number of tokens that both losses are means over: the engine's token_count, for normalize="tokens"."""
    return ppo_loss_mask.sum()


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
    """Base of actor and critic: both turn the same data into the same rewards.

    n_minibatches: optimizer steps of one train step. kl_ctl: coefficient of the KL penalty; with adaptive_kl_ctl the first one, which then
        follows the target (nats a sequence) over the horizon (sequences). discount, gae_lambda: of advantages. max_reward_clip: of scores.
    Statistics, normalisation and limits are of all data-parallel ranks where the engine has a group of them. `micro_batch_stats` has the
    statistics of this rank's last step, a dict for each microbatch.
    """

    n_minibatches: int = 4
    kl_ctl: float = 0.1
    discount: float = 1.0
    gae_lambda: float = 1.0
    max_reward_clip: float = 5.0
    adaptive_kl_ctl: bool = False
    adaptive_kl_target: float = 6.0
    adaptive_kl_horizon: float = 10000.0

    def __post_init__(self) -> None:
        self.kl_adapter: ppo_functional.KLController = (
            ppo_functional.AdaptiveKLController(self.kl_ctl, self.adaptive_kl_target, self.adaptive_kl_horizon)
            if self.adaptive_kl_ctl
            else ppo_functional.FixedKLController(self.kl_ctl)
        )
        self.micro_batch_stats: list[dict[str, Any]] = []

    def _prepare(self, engine: PipelineEngine, data: Data) -> tuple[dict[str, Any], dict[str, float]]:
        """Targets of training, with `ppo_loss_mask`; and statistics of the batch. The coefficient moves behind it."""
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
            engine.data_parallel_group,
        )
        stats["kl_ctl"] = self.kl_adapter.value
        self.kl_adapter.update(stats["kl"], int(stats["n_seqs"]))
        return {**targets, "ppo_loss_mask": mask}, stats

    def _train(self, model: Model, data: Data, tensors: Data, loss_fn: Any) -> dict[str, float]:
        """One batch of the engine for each minibatch, up to one of which a microbatch was abandoned."""
        engine = model.module
        engine.eval()  # dropout would make other log-probabilities and values than those that the new ones are compared with
        engine.set_version_steps(model.version)
        whole = {"packed_input_ids": data["packed_input_ids"], "cu_seqlens": data["cu_seqlens"], **tensors}
        self.micro_batch_stats = []
        trained = 0
        for part in split_minibatches(whole, self.n_minibatches, engine.num_micro_batches):
            ids, cu_seqlens = part.pop("packed_input_ids"), part.pop("cu_seqlens")
            rows = dict.fromkeys(part, "token")
            result = engine.train_batch(ids, cu_seqlens, loss_fn, rows=rows, **counted_by(engine, count_tokens), **part)
            stats = [] if result is None else result[1]
            self.micro_batch_stats += stats
            trained += 1
            if self._stops(engine, stats):
                break
        model.inc_version()
        if not engine.is_last:
            return {}
        return aggregate_stats(self.micro_batch_stats, engine.data_parallel_group) | {"n_minibatches": float(trained)}

    def _stops(self, engine: PipelineEngine, stats: list[dict[str, Any]]) -> bool:
        """Whether the minibatches that follow are left out; the same on every stage."""
        return False


@dataclass(kw_only=True)
class PPOActorInterface(_PPOInterface):
    """The policy, and its reference.

    data: packed_input_ids [T], cu_seqlens [B + 1], prompt_mask [T] bool, packed_logprobs, packed_ref_logprobs and values [T], rewards [B],
        seq_no_eos_mask [B] bool; the same on every stage (`from_last_stage`).
    gconfig: flce.engine.GenerationConfig, whose temperature every log-probability is taken at. adv_norm: advantages are normalised over
        the rows that are trained. eps_clip: of the ratio. entropy_coef: what the mean entropy counts in the loss.
    early_stop_kl, early_stop_imp_ratio: a microbatch above is abandoned, and the minibatches behind its own are not trained.
    """

    gconfig: GenerationConfig = dataclasses.field(default_factory=GenerationConfig)
    adv_norm: bool = True
    eps_clip: float = 0.2
    entropy_coef: float = 0.0
    early_stop_kl: float | None = None
    early_stop_imp_ratio: float | None = None

    def _stops(self, engine: PipelineEngine, stats: list[dict[str, Any]]) -> bool:
        if self.early_stop_kl is None and self.early_stop_imp_ratio is None:
            return False
        mine = torch.stack([one["abandoned"] for one in stats]).sum() if stats else torch.zeros((), device=engine.device)
        dist.all_reduce(mine, group=engine.pipeline_group)  # data-parallel ranks have the same number: limits are of all of them
        return bool(mine)

    def generate(self, model: Model, data: Data, **options: Any) -> Data | None:
        """Responses to prompts (packed_input_ids, cu_seqlens) on the last stage, None on the others: what
        `concat_prompt_to_generation_output` returns, and seq_no_eos_mask [B] bool, True where no end of sequence was reached.

        options: of `engine.generate` (seed)."""
        engine = model.module
        engine.eval()
        result = engine.generate(data["packed_input_ids"], data["cu_seqlens"], model.tokenizer, self.gconfig, **options)
        if result is None:
            return None
        tokens, logprobs, lengths = result
        made = concat_prompt_to_generation_output(data["packed_input_ids"], data["cu_seqlens"], tokens, logprobs, lengths)
        last = tokens.gather(1, (lengths.long() - 1).clamp(min=0)[:, None])[:, 0]
        ends = torch.tensor(self.gconfig.special_tokens(model.tokenizer)[0], dtype=torch.int64, device=tokens.device)
        made["seq_no_eos_mask"] = ~torch.isin(last, ends)
        return made

    def inference(self, model: Model, data: Data) -> Data | None:
        """packed_ref_logprobs [T] fp32 of the model (the reference, or the policy itself) on the last stage; None on the others."""
        engine = model.module
        engine.eval()
        ids = data["packed_input_ids"]
        logprobs = engine.forward(ids, data["cu_seqlens"], output="logprobs", labels=ids, temperature=self.gconfig.temperature)
        return None if logprobs is None else {"packed_ref_logprobs": logprobs}

    def train_step(self, model: Model, data: Data) -> dict[str, float]:
        """One optimizer step for each minibatch. Returns the statistics on the last stage, {} on the others; `abandoned` counts
        microbatches and `n_minibatches` those that were trained."""
        engine = model.module
        targets, batch_stats = self._prepare(engine, data)
        if self.adv_norm:
            targets["advantages"] = masked_normalization(targets["advantages"], targets["ppo_loss_mask"], group=engine.data_parallel_group)
        names = ("old_logp", "advantages", "ppo_loss_mask")
        loss_fn = functools.partial(
            ppo_actor_loss_from_model_outputs,
            eps_clip=self.eps_clip,
            temperature=self.gconfig.temperature,
            entropy_coef=self.entropy_coef,
            early_stop_imp_ratio=self.early_stop_imp_ratio,
            early_stop_kl=self.early_stop_kl,
            data_parallel_group=engine.data_parallel_group,
        )
        stats = self._train(model, data, {name: targets[name] for name in names}, loss_fn)
        return {**stats, **batch_stats} if stats else {}


@dataclass(kw_only=True)
class PPOCriticInterface(_PPOInterface):
    """The values. data: as for `PPOActorInterface`. value_eps_clip: how far a value may move from the old one."""

    gae_lambda: float = 0.95
    value_eps_clip: float = 0.2

    def inference(self, model: Model, data: Data) -> Data | None:
        """values [T] fp32 on the last stage, None on the others."""
        engine = model.module
        engine.eval()
        values = engine.forward(data["packed_input_ids"], data["cu_seqlens"], output="values")
        return None if values is None else {"values": values}

    def train_step(self, model: Model, data: Data) -> dict[str, float]:
        """One optimizer step for each minibatch. Returns the statistics on the last stage, {} on the others."""
        engine = model.module
        targets, batch_stats = self._prepare(engine, data)
        names = ("values", "returns", "ppo_loss_mask")
        loss_fn = functools.partial(ppo_critic_loss_from_model_outputs, value_eps_clip=self.value_eps_clip)
        stats = self._train(model, data, {name: targets[name] for name in names}, loss_fn)
        return {**stats, **batch_stats} if stats else {}
