"""Steps of examples/engine's interfaces under torchrun with two ranks, as two stages and as two data-parallel ranks, against the whole
model with its logits in memory."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
import torch.distributed as dist
from engine_examples_support import (
    actor_loss_of_loops,
    advantages_of_loops,
    cut,
    logprobs_of_logits,
    packed,
    rewards_of_loops,
    sft_loss_of_logits,
)
from rank_support import generator, run_main, run_named
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from flce.engine import GenerationConfig, PipelineEngine, _microbatches, causal_lm_stage

from engine.functional import build_loss_mask  # isort: skip
from engine.model_api import Data, Model, from_last_stage, split_minibatches  # isort: skip
from engine.ppo_interface import PPOActorInterface, PPOCriticInterface  # isort: skip
from engine.sft_interface import SFTInterface  # isort: skip

VOCAB = 60
LENGTHS = [9, 4, 12, 1, 7, 15, 3, 8]
PROMPTS = [3, 4, 2, 1, 1, 6, 1, 5]
EOS = 2
LEARNING_RATE = 0.1
GROUPS: dict[str, Any] = {}


def prepare() -> None:
    """Every rank's group of itself, for data-parallel cases."""
    GROUPS["alone"] = [dist.new_group([rank]) for rank in range(dist.get_world_size())]


def whole_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


class Whole(nn.Module):
    """The model run sequence by sequence: logits, or a critic's values."""

    def __init__(self, model: LlamaForCausalLM, score: Tensor | None = None):
        super().__init__()
        self.model = model
        self.score = None if score is None else nn.Parameter(score.clone())

    def forward(self, ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        rows = []
        for begin, end in cut(cu_seqlens):
            hidden = self.model.model(input_ids=ids[begin:end][None]).last_hidden_state[0]
            rows.append(self.model.lm_head(hidden) if self.score is None else hidden @ self.score[0])
        return torch.cat(rows)

    def named(self) -> dict[str, nn.Parameter]:
        found = dict(self.model.named_parameters())
        return found if self.score is None else found | {"score.weight": self.score}


class Case:
    """An engine of a copy of a model, and the whole model to compare with."""

    def __init__(self, *, data_parallel: bool = False, critic: bool = False, seed: int = 0, **of: Any):
        rank = dist.get_rank()
        stage, num_stages = (0, 1) if data_parallel else (rank, dist.get_world_size())
        model = whole_model(seed)
        self.stage = causal_lm_stage(copy.deepcopy(model), stage, num_stages, critic=critic)
        torch.manual_seed(seed + 10)
        score = 0.3 * torch.randn(1, 16) if critic else None
        if score is not None and self.stage.is_last:
            with torch.no_grad():
                self.stage.head.weight.copy_(score)
        self.whole = Whole(model, score)
        self.gradients: dict[str, Tensor] = {}
        self.steps = 0
        optimizer = torch.optim.SGD(self.stage.parameters(), LEARNING_RATE)
        optimizer.register_step_pre_hook(self.keep_gradients)
        groups = {"data_parallel_group": dist.group.WORLD} if data_parallel else {}
        self.engine = PipelineEngine(
            self.stage, GROUPS["alone"][rank] if data_parallel else dist.group.WORLD, optimizer, num_micro_batches=2, **groups, **of
        )
        self.model = Model(self.engine)

    def keep_gradients(self, *_: Any) -> None:
        self.steps += 1
        self.gradients = {name: p.grad.clone() for name, p in self.stage.named_parameters() if p.grad is not None}

    def step_whole(self, loss: Tensor) -> None:
        """SGD on the whole model, whose gradients are then compared with the engine's last ones, where this was its last step."""
        named = self.whole.named()
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        self.expected = {name: g for name, g in zip(named, gradients, strict=True) if g is not None}
        with torch.no_grad():
            for name, gradient in self.expected.items():
                named[name] -= LEARNING_RATE * gradient

    def check(self) -> None:
        """Gradients of the last step, and parameters."""
        named = self.whole.named() | ({} if self.whole.score is not None else {"lm_head.weight": self.whole.model.lm_head.weight})
        tied = {"lm_head.weight": "model.embed_tokens.weight"}
        assert self.gradients
        for name, parameter in self.stage.named_parameters():
            pairs = {"parameter": (parameter, named[name]), "gradient": (self.gradients[name], self.expected[tied.get(name, name)])}
            for what, (actual, expected) in pairs.items():
                away = ((actual - expected).norm() / expected.norm()).item()
                assert away <= 2e-5, f"{what} {name} differs by {away:.2g} of its norm"


def sequences(seed: int = 0) -> Data:
    made = generator(seed)
    ids = torch.randint(3, VOCAB, (sum(LENGTHS),), generator=made)
    cu_seqlens = packed(LENGTHS)
    prompt_mask = torch.zeros(sum(LENGTHS), dtype=torch.bool)
    for (begin, _), length in zip(cut(cu_seqlens), PROMPTS, strict=True):
        prompt_mask[begin : begin + length] = True
    return {"packed_input_ids": ids, "cu_seqlens": cu_seqlens, "prompt_mask": prompt_mask}


def mine(data: Data) -> Data:
    """A data-parallel rank's half."""
    return split_minibatches(data, 2)[dist.get_rank()]


def microbatches(data: Data, number: int = 2) -> list[Data]:
    """Cuts a batch where the engine cuts it."""
    ends = data["cu_seqlens"].tolist()
    lengths = [after - before for before, after in itertools.pairwise(ends)]
    starts = _microbatches.cut(lengths, number)
    made = []
    for first, last in itertools.pairwise(starts):
        rows = slice(ends[first], ends[last])
        made.append({name: x[rows] for name, x in data.items() if name != "cu_seqlens" and x.shape[0] == ends[-1]})
        made[-1]["cu_seqlens"] = data["cu_seqlens"][first : last + 1] - ends[first]
    return made


def check_sft(normalize: str, data_parallel: bool) -> None:
    case = Case(data_parallel=data_parallel, normalize=normalize)
    data = sequences()
    interface = SFTInterface()

    def losses(parts: list[Data]) -> list[tuple[Tensor, list[float]]]:
        return [
            sft_loss_of_logits(
                case.whole(part["packed_input_ids"], part["cu_seqlens"]), part["packed_input_ids"], part["cu_seqlens"], part["prompt_mask"]
            )
            for part in parts
        ]

    for step in range(2):
        stats = interface.train_step(case.model, mine(data) if data_parallel else data)
        ((token_mean, perplexities),) = losses([data])
        halves = [part for half in split_minibatches(data, 2) for part in microbatches(half)] if data_parallel else microbatches(data)
        case.step_whole(token_mean if normalize == "tokens" else torch.stack([loss for loss, _ in losses(halves)]).mean())
        case.check()
        assert case.model.version == step + 1
        assert bool(stats) == case.engine.is_last
        if stats:
            expected = {"loss": token_mean.item(), "ppl": sum(perplexities) / len(perplexities), "n_seqs": len(perplexities)}
            expected["n_tokens"] = int(build_loss_mask(data["prompt_mask"], data["cu_seqlens"]).sum())
            close(stats, expected)
            assert len(interface.micro_batch_stats) == 2
    before = [p.clone() for p in case.stage.parameters()]
    stats = interface.evaluate(case.model, [mine(data) if data_parallel else data] * 2)
    assert all(torch.equal(old, new) for old, new in zip(before, case.stage.parameters(), strict=True))
    if stats:
        close(stats, {"loss": losses([data])[0][0].item(), "n_seqs": 2 * len(perplexities)})


def close(stats: dict[str, float], expected: dict[str, float]) -> None:
    for name, value in expected.items():
        assert abs(stats[name] - value) <= 1e-4 * max(1.0, abs(value)), (name, stats[name], value)


def rollout(seed: int = 0) -> Data:
    """Data of a PPO step."""
    data = sequences(seed)
    made = generator(seed + 1)
    num_tokens, num_sequences = sum(LENGTHS), len(LENGTHS)
    return data | {
        "packed_logprobs": torch.randn(num_tokens, generator=made) - 4,
        "packed_ref_logprobs": torch.randn(num_tokens, generator=made) - 4,
        "values": torch.randn(num_tokens, generator=made),
        "rewards": 4 * torch.randn(num_sequences, generator=made),
        "seq_no_eos_mask": torch.arange(num_sequences) % 3 == 0,
    }


SETTINGS: dict[str, Any] = {"kl_ctl": 0.2, "discount": 0.95, "gae_lambda": 0.9, "max_reward_clip": 3.0}


def targets_of_loops(data: Data, kl_ctl: float) -> dict[str, Tensor]:
    mask = build_loss_mask(data["prompt_mask"], data["cu_seqlens"])
    old, ref = data["packed_logprobs"] * mask, data["packed_ref_logprobs"] * mask
    rest = (data["cu_seqlens"], data["seq_no_eos_mask"])
    rewards = rewards_of_loops(kl_ctl, 3.0, old, ref, data["rewards"], *rest)
    advantages, returns = advantages_of_loops(0.95, 0.9, data["values"], rewards, *rest)
    chosen = advantages[mask].double()
    normal = torch.where(mask, (advantages.double() - chosen.mean()) / (chosen.std(unbiased=False) + 1e-5), 0.0).float()
    return {"advantages": normal, "raw": advantages, "returns": returns, "mask": mask, "kl": old - ref}


def check_actor(entropy_coef: float, data_parallel: bool, adaptive: bool) -> None:
    case = Case(data_parallel=data_parallel, normalize="tokens")
    data = rollout()
    minibatches = 1 if data_parallel else 2
    actor = PPOActorInterface(
        n_minibatches=minibatches,
        entropy_coef=entropy_coef,
        gconfig=GenerationConfig(temperature=0.8),
        adaptive_kl_ctl=adaptive,
        adaptive_kl_target=1.0,
        adaptive_kl_horizon=20.0,
        **SETTINGS,
    )
    kl_ctl = 0.2
    for _ in range(2):
        stats = actor.train_step(case.model, mine(data) if data_parallel else data)
        targets = targets_of_loops(data, kl_ctl)
        losses = []
        for part in split_minibatches(data | {"advantages": targets["advantages"], "mask": targets["mask"]}, minibatches):
            ids, cu_seqlens, mask = part["packed_input_ids"], part["cu_seqlens"], part["mask"]
            logits = case.whole(ids, cu_seqlens) / 0.8
            logp = logprobs_of_logits(logits, ids, cu_seqlens)
            loss, own = actor_loss_of_loops(logp, part["packed_logprobs"], part["advantages"], 0.2, mask)
            losses.append((loss.item(), own, int(mask.sum())))
            if entropy_coef:
                log_softmax = logits.log_softmax(-1)
                loss = loss + entropy_coef * (log_softmax.exp() * log_softmax).sum(-1)[mask].mean()
            case.step_whole(loss)
        case.check()
        if stats:
            count = sum(tokens for _, _, tokens in losses)
            expected = {
                "actor_loss": sum(loss * tokens for loss, _, tokens in losses) / count,
                "actor_clip_ratio": sum(own["clip_ratio"] * tokens for _, own, tokens in losses) / count,
                "importance_weight": sum(own["importance_weight"] * tokens for _, own, tokens in losses) / count,
                "ppo_approx_kl": sum(own["approx_kl"] * tokens for _, own, tokens in losses) / count,
                "kl": targets["kl"].sum().item() / len(LENGTHS),
                "task_reward": data["rewards"].mean().item(),
                "advantage": targets["raw"][targets["mask"]].mean().item(),
                "avg_seq_len": sum(LENGTHS) / len(LENGTHS),
                "avg_prompt_len": sum(PROMPTS) / len(PROMPTS),
                "n_seqs": len(LENGTHS),
                "n_tokens": count,
                "n_minibatches": minibatches,
                "abandoned": 0,
                "kl_ctl": kl_ctl,
            }
            close(stats, expected)
        if adaptive:
            error = min(max(targets["kl"].sum().item() / len(LENGTHS) - 1, -0.2), 0.2)
            kl_ctl *= 1 + error * len(LENGTHS) / 20
        assert abs(actor.kl_adapter.value - kl_ctl) < 1e-6


def check_critic(data_parallel: bool) -> None:
    case = Case(data_parallel=data_parallel, critic=True, normalize="tokens")
    data = rollout()
    minibatches = 1 if data_parallel else 2
    critic = PPOCriticInterface(n_minibatches=minibatches, value_eps_clip=0.3, **SETTINGS)
    values = critic.inference(case.model, mine(data) if data_parallel else data)
    if values is not None:
        right = case.whole(data["packed_input_ids"], data["cu_seqlens"]).detach()
        if data_parallel:
            right = mine({"right": right, "cu_seqlens": data["cu_seqlens"], "packed_input_ids": data["packed_input_ids"]})["right"]
        torch.testing.assert_close(values["values"], right)
    for _ in range(2):
        stats = critic.train_step(case.model, mine(data) if data_parallel else data)
        targets = targets_of_loops(data, 0.2)
        for part in split_minibatches(data | {"returns": targets["returns"], "mask": targets["mask"]}, minibatches):
            new, old = case.whole(part["packed_input_ids"], part["cu_seqlens"]), part["values"]
            returns, mask = part["returns"], part["mask"]
            kept = old + (new - old).clamp(-0.3, 0.3)
            loss = torch.maximum((new - returns).square(), (kept - returns).square())[mask].mean() / 2
            case.step_whole(loss)
        case.check()
        assert bool(stats) == case.engine.is_last
        if stats and minibatches == 1:
            close(stats, {"value_loss": loss.item(), "values": new[mask].mean().item()})


def check_early_stop(limit: str, normalize: str) -> None:
    """A first minibatch far from the old policy, and none behind it: parameters stay."""
    case = Case(normalize=normalize)
    actor = PPOActorInterface(n_minibatches=2, **{limit: 1e-3}, **SETTINGS)
    before = [p.clone() for p in case.stage.parameters()]
    stats = actor.train_step(case.model, rollout())
    assert case.steps == 1
    assert all(torch.equal(old, new) for old, new in zip(before, case.stage.parameters(), strict=True))
    if stats:
        close(stats, {"n_minibatches": 1, "abandoned": 2})
    assert actor.kl_adapter.value == 0.2


def check_rollout() -> None:
    """Generation, reference and critic to a step, with data from one stage to all; log-probabilities are the whole model's."""
    case, reference, critic = Case(normalize="tokens"), Case(seed=3), Case(critic=True, normalize="tokens")
    prompts = sequences()
    prompts = {"packed_input_ids": prompts["packed_input_ids"], "cu_seqlens": prompts["cu_seqlens"]}
    config = GenerationConfig(max_new_tokens=6, temperature=0.9, eos_token_id=EOS)
    actor, values = PPOActorInterface(n_minibatches=2, gconfig=config), PPOCriticInterface(n_minibatches=2)
    data = from_last_stage(case.engine, actor.generate(case.model, prompts, seed=7))
    data |= from_last_stage(case.engine, actor.inference(reference.model, data))
    data |= from_last_stage(case.engine, values.inference(critic.model, data))
    data["rewards"] = (data["packed_input_ids"] % 2).double()[: len(LENGTHS)].float()
    ids, cu_seqlens, mask = data["packed_input_ids"], data["cu_seqlens"], build_loss_mask(data["prompt_mask"], data["cu_seqlens"])
    for (begin, end), (first, last), unfinished in zip(cut(cu_seqlens), cut(prompts["cu_seqlens"]), data["seq_no_eos_mask"], strict=True):
        assert torch.equal(ids[begin : begin + last - first], prompts["packed_input_ids"][first:last])
        assert data["prompt_mask"][begin:end].sum() == last - first
        assert bool(unfinished) == bool(ids[end - 1] != EOS)
        assert 1 <= end - begin - (last - first) <= 6
    with torch.no_grad():
        logp = logprobs_of_logits(case.whole(ids, cu_seqlens), ids, cu_seqlens, 0.9)
        ref = logprobs_of_logits(reference.whole(ids, cu_seqlens), ids, cu_seqlens, 0.9)
    torch.testing.assert_close(data["packed_logprobs"], torch.where(mask, logp, 0.0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(data["packed_ref_logprobs"], ref, rtol=1e-5, atol=1e-5)
    stats, of_critic = actor.train_step(case.model, data), values.train_step(critic.model, data)
    if stats:
        close(stats, {"importance_weight": stats["importance_weight"], "n_tokens": int(mask.sum())})
        assert of_critic["n_minibatches"] == 2


CASES: list[tuple[Any, ...]] = [
    *((check_sft, normalize, parallel) for normalize in ("micro_batches", "tokens") for parallel in (False, True)),
    (check_actor, 0.0, False, True),
    (check_actor, 0.1, False, False),
    (check_actor, 0.1, True, True),
    *((check_critic, parallel) for parallel in (False, True)),
    (check_early_stop, "early_stop_kl", "tokens"),
    (check_early_stop, "early_stop_imp_ratio", "micro_batches"),
    (check_rollout,),
]

if __name__ == "__main__":
    run_main(run_named, lambda: CASES, prepare=prepare)
