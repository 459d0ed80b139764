"""A GRPO step with fused log-probabilities: a policy and a frozen reference, no logits in memory.

Completions come from the policy of some steps ago, in groups of one prompt's, and are scored; a token's advantage is its completion's
score, normalised in the group. (Tokens and scores are random here.) The loss is the clipped ratio of the policies, a penalty of the
distance to the reference, and an entropy bonus; entropy, most likely token and log Σp² come from the same pass as the log-probabilities.

The step runs twice, on materialised logits and with flce.linear_logprobs; both must agree on the loss and on every gradient. Without
arguments the model is tiny and runs on the CPU. A real output layer, on a GPU:

    python examples/grpo_step.py --device cuda --dtype bf16 --hidden 2048 --vocab 151936 --groups 2 --completions 4 --sequence 512
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flce

MIB = 1 << 20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# ‖difference‖ / ‖gradient‖: 16-bit gradients are rounded, and go on through the layers below.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


@dataclass
class Config:
    """Sizes, and what the loss weighs."""

    hidden: int = 64
    vocab: int = 4096
    groups: int = 2
    completions: int = 4  # completions of each group's prompt
    prompt: int = 8
    sequence: int = 64
    temperature: float = 0.8  # sampling temperature of completions
    clip: float = 0.2
    kl: float = 0.04
    entropy: float = 0.001


class Policy(nn.Module):
    """A causal language model in small: an embedding, a recurrent layer, an output layer that is not called."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.body = nn.GRU(config.hidden, config.hidden, batch_first=True)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        nn.init.normal_(self.head.weight, std=16 / config.hidden**0.5)  # a policy that prefers some tokens

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states [batch, sequence, hidden] of tokens [batch, sequence]."""
        hidden: Tensor = self.body(self.embedding(tokens))[0]
        return hidden


class Scores(NamedTuple):
    """Numbers of a token, [batch, sequence], 0 where nothing is predicted (top1: -1)."""

    logprobs: Tensor
    entropy: Tensor
    top1: Tensor
    log_sum_sq_probs: Tensor


def fused(hidden: Tensor, head: nn.Linear, targets: Tensor, temperature: float) -> Scores:
    return Scores(
        *flce.linear_logprobs(
            hidden, head.weight, targets, temperature=temperature, return_entropy=True, return_top1=True, return_log_sum_sq_probs=True
        )
    )


def materialised(hidden: Tensor, head: nn.Linear, targets: Tensor, temperature: float) -> Scores:
    logits = F.linear(hidden.float(), head.weight.float())  # logits rounded to 16 bits would be off by more than the step
    log_softmax = (logits / temperature).log_softmax(-1)
    valid = targets != -100
    logprobs = log_softmax.gather(-1, torch.where(valid, targets, 0)[..., None])[..., 0]
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    sum_sq = (2 * log_softmax.detach()).logsumexp(-1)
    zero = torch.zeros_like(entropy)
    return Scores(
        torch.where(valid, logprobs, zero),
        torch.where(valid, entropy, zero),
        log_softmax.argmax(-1).where(valid, -1),
        sum_sq.where(valid, zero),
    )


class Batch(NamedTuple):
    """One step's completions."""

    tokens: Tensor  # [batch, sequence]
    targets: Tensor  # [batch, sequence]: the next token where it is the completion's, else -100
    advantages: Tensor  # [batch, 1]
    old_logprobs: Tensor  # [batch, sequence], of the policy that the completions were sampled from


def make_batch(config: Config, sampler: Policy) -> Batch:
    """Random completions and scores, in place of a sampler and a reward."""
    batch, device = config.groups * config.completions, sampler.head.weight.device
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, config.vocab, (batch, config.sequence), generator=generator).to(device)
    lengths = torch.randint(config.prompt + 1, config.sequence + 1, (batch, 1), generator=generator).to(device)
    positions = torch.arange(config.sequence, device=device)
    labels = torch.where((positions >= config.prompt) & (positions < lengths), tokens, -100)
    scores = torch.rand(config.groups, config.completions, generator=generator).to(device)
    advantages = (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-4)
    targets = flce.shift_labels(labels)
    with torch.no_grad():
        old = flce.linear_logprobs(sampler(tokens), sampler.head.weight, targets, temperature=config.temperature)
    return Batch(tokens, targets, advantages.view(-1, 1), old)


def grpo_loss(config: Config, batch: Batch, policy: Scores, reference: Tensor) -> Tensor:
    valid = (batch.targets != -100).float()
    ratio = torch.exp(policy.logprobs - batch.old_logprobs)
    gain = torch.minimum(ratio * batch.advantages, ratio.clamp(1 - config.clip, 1 + config.clip) * batch.advantages)
    away = reference - policy.logprobs
    penalty = away.exp() - away - 1  # an estimate of KL(policy, reference), never below 0
    per_token = -gain + config.kl * penalty - config.entropy * policy.entropy
    return (per_token * valid).sum() / valid.sum()


class Step(NamedTuple):
    """Results of one way of computing the step."""

    loss: Tensor
    gradients: list[Tensor]
    scores: Scores
    peak: int | None  # bytes that the step took beyond what was there, on a GPU


def run_step(config: Config, score: object, batch: Batch, policy: Policy, frozen: Policy) -> Step:
    assert callable(score)
    gpu = batch.tokens.is_cuda
    policy.zero_grad(set_to_none=True)
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if gpu else 0
    with torch.no_grad():
        reference = score(frozen(batch.tokens), frozen.head, batch.targets, config.temperature).logprobs
    scores: Scores = score(policy(batch.tokens), policy.head, batch.targets, config.temperature)
    loss = grpo_loss(config, batch, scores, reference)
    loss.backward()
    peak = torch.cuda.max_memory_allocated() - before if gpu else None
    gradients = [parameter.grad.float() for parameter in policy.parameters() if parameter.grad is not None]
    return Step(loss.detach(), gradients, Scores(*(value.detach() for value in scores)), peak)


def compare(expected: Step, actual: Step, tolerance: float) -> float:
    """The largest relative difference of a gradient; raises where it, or the loss, is beyond the tolerance."""
    difference = abs(expected.loss - actual.loss).item() / max(1.0, abs(expected.loss).item())
    away = [((a - b).norm() / b.norm().clamp(min=1e-12)).item() for a, b in zip(actual.gradients, expected.gradients, strict=True)]
    if not (difference <= tolerance and max(away) <= tolerance):
        raise SystemExit(f"the steps differ: loss by {difference:.2g}, gradients by {max(away):.2g}; {tolerance:.2g} allowed")
    return max(away)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32", choices=DTYPES)
    for name in ("hidden", "vocab", "groups", "completions", "sequence"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Config, name))
    parser.add_argument("--temperature", type=float, default=Config.temperature)
    given = vars(parser.parse_args())
    device, dtype = given.pop("device"), DTYPES[given.pop("dtype")]
    config = Config(**given)
    torch.manual_seed(0)
    policy = Policy(config).to(device, dtype)
    frozen, sampler = copy.deepcopy(policy).requires_grad_(False), copy.deepcopy(policy).requires_grad_(False)
    with torch.no_grad():  # the policy has moved since
        for parameter in policy.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter) * parameter.std())
    batch = make_batch(config, sampler)
    run_step(config, fused, batch, policy, frozen)  # kernels are compiled here
    steps = {name: run_step(config, score, batch, policy, frozen) for name, score in (("materialised", materialised), ("flce", fused))}
    away = compare(steps["materialised"], steps["flce"], TOLERANCES[dtype])

    count, logits = batch.targets.numel(), batch.targets.numel() * config.vocab
    valid = batch.targets != -100
    scores = steps["flce"].scores
    print(f"{count} tokens, hidden size {config.hidden}, vocabulary {config.vocab}, {dtype} on {device}")
    for name, step in steps.items():
        print(f"{name:>14}: loss {step.loss.item():.6f}" + (f", {step.peak / MIB:.0f} MiB at the peak" if step.peak is not None else ""))
    print(f"gradients differ by {away:.2g} at most, {TOLERANCES[dtype]:.2g} allowed")
    print(
        f"entropy {scores.entropy[valid].mean().item():.3f} nats, log Σp² {scores.log_sum_sq_probs[valid].mean().item():.3f}; both ways "
        f"find the same likeliest token for {(scores.top1 == steps['materialised'].scores.top1)[valid].float().mean().item():.1%}"
    )
    print(f"logits that did not exist: {logits * 4 / MIB:.1f} MiB in fp32, several times in a step")
    flce.check_labels()


if __name__ == "__main__":
    main()
