"""The functions of examples/engine against the same written with logits, sequences and loops."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_examples_support import (
    actor_loss_of_loops,
    advantages_of_loops,
    cut,
    logprobs_of_logits,
    packed,
    rewards_of_loops,
    sft_loss_of_logits,
)
from torch import Tensor, nn

from flce.engine import HeadOutput

import engine_demo  # isort: skip
import engine_ppo  # isort: skip
import engine_sft  # isort: skip
from engine import functional, model_api, ppo_functional, ppo_interface, sft_interface  # isort: skip

LENGTHS = [5, 1, 9, 2, 7]


def random_rows(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def prompts(cu_seqlens: Tensor, lengths: list[int]) -> Tensor:
    mask = torch.zeros(int(cu_seqlens[-1]), dtype=torch.bool)
    for (begin, end), length in zip(cut(cu_seqlens), lengths, strict=True):
        mask[begin : min(begin + length, end)] = True
    return mask


# A sequence of one token, and one of a prompt alone, are among them.
CU_SEQLENS = packed(LENGTHS)
PROMPT_MASK = prompts(CU_SEQLENS, [2, 1, 4, 2, 1])
LOSS_MASK = functional.build_loss_mask(PROMPT_MASK, CU_SEQLENS)
NUM_TOKENS = sum(LENGTHS)


def test_masks_are_of_rows_that_predict() -> None:
    expected = torch.tensor([t + 1 < end and not PROMPT_MASK[t + 1] for begin, end in cut(CU_SEQLENS) for t in range(begin, end)])
    assert torch.equal(LOSS_MASK, expected)
    rows = torch.arange(NUM_TOKENS)
    kept = torch.cat([rows[begin : end - 1] for begin, end in cut(CU_SEQLENS)])
    assert torch.equal(functional.drop_last_rows(rows, CU_SEQLENS), kept)
    sums = torch.stack([rows[begin:end].sum() for begin, end in cut(CU_SEQLENS)])
    assert torch.equal(functional.sum_by_sequence(rows, CU_SEQLENS), sums.double())
    with pytest.raises(ValueError, match=r"prompt_mask is torch\.int64"):
        functional.build_loss_mask(PROMPT_MASK.long(), CU_SEQLENS)


@pytest.mark.parametrize("unbiased", [False, True])
def test_normalisation_counts_the_mask_alone(unbiased: bool) -> None:
    x = random_rows(NUM_TOKENS).float() * 3 + 100
    chosen = x[LOSS_MASK].double()
    expected = torch.zeros_like(x)
    expected[LOSS_MASK] = ((chosen - chosen.mean()) / (chosen.std(unbiased=unbiased) + 1e-5)).float()
    x[~LOSS_MASK] = float("nan")
    torch.testing.assert_close(functional.masked_normalization(x, LOSS_MASK, unbiased=unbiased), expected)
    assert not functional.masked_normalization(x, torch.zeros_like(LOSS_MASK), unbiased=unbiased).any()


def test_statistics_add_parts_before_they_divide() -> None:
    ratio = functional.Ratio
    stats = [
        {"mean": ratio(torch.tensor(4.0), torch.tensor(1)), "count": torch.tensor(1)},
        {"mean": ratio(torch.tensor(3.0), torch.tensor(3)), "count": torch.tensor(3)},
    ]
    assert functional.aggregate_stats(stats) == {"mean": 1.75, "count": 4.0}
    nothing = functional.aggregate_stats([{"mean": ratio(torch.tensor(0.0), torch.tensor(0))}])
    assert nothing["mean"] != nothing["mean"]
    with pytest.raises(ValueError, match="different names"):
        functional.aggregate_stats([stats[0], {"mean": stats[0]["mean"]}])
    with pytest.raises(ValueError, match="empty"):
        functional.aggregate_stats([])


def test_actor_loss_equals_the_loop() -> None:
    logp = random_rows(NUM_TOKENS, seed=1, scale=0.5).requires_grad_()
    old, advantages = random_rows(NUM_TOKENS, seed=2, scale=0.5), random_rows(NUM_TOKENS, seed=3)
    expected, stats = actor_loss_of_loops(logp, old, advantages, 0.2, LOSS_MASK)
    (gradient,) = torch.autograd.grad(expected, logp)
    spoilt = torch.where(LOSS_MASK, old, -1e6), torch.where(LOSS_MASK, advantages, float("nan"))  # exp makes inf of these
    loss, own = ppo_functional.actor_loss_fn(logp, *spoilt, 0.2, LOSS_MASK)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, logp)[0], gradient)
    assert 0 < stats["clip_ratio"] < 1
    assert functional.aggregate_stats([own]) == pytest.approx(stats)
    whole, _ = ppo_functional.actor_loss_fn(logp[LOSS_MASK], old[LOSS_MASK], advantages[LOSS_MASK], 0.2)
    torch.testing.assert_close(whole, expected)


def test_losses_of_no_rows_are_zero() -> None:
    x, nothing = random_rows(NUM_TOKENS).requires_grad_(), torch.zeros_like(LOSS_MASK)
    for loss, _ in (ppo_functional.actor_loss_fn(x, x, x, 0.2, nothing), ppo_functional.critic_loss_fn(x, x, x, 0.2, nothing)):
        assert loss.item() == 0
        assert not torch.autograd.grad(loss, x)[0].any()


@pytest.mark.parametrize("kind", ["mse", "huber"])
def test_critic_loss_equals_the_loop(kind: str) -> None:
    value = (8 * random_rows(NUM_TOKENS, seed=1)).requires_grad_()
    old, target = value.detach() + random_rows(NUM_TOKENS, seed=2), 8 * random_rows(NUM_TOKENS, seed=3)
    losses, clipped = [], 0
    for t in LOSS_MASK.nonzero().flatten().tolist():
        kept = old[t] + (value[t] - old[t]).clamp(-0.5, 0.5)
        pair = []
        for x in (value[t], kept):
            error = (x - target[t]).abs()
            pair.append(error.square() / 2 if kind == "mse" or error < 10 else 10 * (error - 5))
        losses.append(torch.maximum(*pair))
        clipped += int(pair[1] > pair[0])
    expected = torch.stack(losses).mean()
    spoilt = torch.where(LOSS_MASK, old, float("inf")), torch.where(LOSS_MASK, target, float("nan"))
    loss, stats = ppo_functional.critic_loss_fn(value, *spoilt, 0.5, LOSS_MASK, kind)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, value)[0], torch.autograd.grad(expected, value)[0])
    assert 0 < clipped < len(losses)
    assert functional.aggregate_stats([stats])["clip_ratio"] == pytest.approx(clipped / len(losses))
    with pytest.raises(ValueError, match="'l1'"):
        ppo_functional.critic_loss_fn(value, old, target, 0.5, LOSS_MASK, "l1")


def test_rewards_equal_the_loop() -> None:
    logp, ref = (random_rows(NUM_TOKENS, seed=seed) for seed in (1, 2))
    score, unfinished = torch.tensor([1.0, 2.0, -7.0, 3.0, 4.0]).double(), torch.tensor([False, False, False, False, True])
    expected = rewards_of_loops(0.1, 5.0, logp, ref, score, CU_SEQLENS, unfinished)
    kl_rewards, rewards = ppo_functional.get_packed_rewards(0.1, 5.0, logp, ref, score, CU_SEQLENS, unfinished)
    torch.testing.assert_close(rewards, expected)
    alone = rewards_of_loops(0.1, 5.0, logp, ref, score * 0, CU_SEQLENS, unfinished)
    torch.testing.assert_close(kl_rewards, alone)


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_advantages_equal_the_loop(gamma: float, lam: float) -> None:
    lengths = [*LENGTHS, 40, 1, 33]
    cu_seqlens, num_tokens = packed(lengths), sum(lengths)
    values, rewards = random_rows(num_tokens, seed=1), random_rows(num_tokens, seed=2)
    unfinished = torch.arange(len(lengths)) % 2 == 0
    expected = advantages_of_loops(gamma, lam, values, rewards, cu_seqlens, unfinished)
    for begin, end in cut(cu_seqlens):  # a row that predicts nothing has no reward
        rewards[end - 1] = float("nan")
        assert begin < end
    actual = ppo_functional.get_packed_advantages_and_returns(gamma, lam, values, rewards, cu_seqlens, unfinished)
    for own, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(own, right)


def test_discounts_out_of_range_are_refused() -> None:
    x = torch.zeros(2)
    with pytest.raises(ValueError, match=r"gamma is 1\.5"):
        ppo_functional.get_packed_advantages_and_returns(1.5, 1.0, x, x, packed([2]), torch.tensor([False]))


def test_kl_coefficients_follow_their_target() -> None:
    adaptive, fixed = ppo_functional.AdaptiveKLController(0.1, target=6.0, horizon=100.0), ppo_functional.FixedKLController(0.1)
    for current, expected in ((6.6, 0.1 * 1.01), (60.0, 0.1 * 1.01 * 1.02), (0.0, 0.1 * 1.01 * 1.02 * 0.98)):
        adaptive.update(current, 10)
        fixed.update(current, 10)
        assert adaptive.value == pytest.approx(expected)
        assert fixed.value == 0.1
    with pytest.raises(ValueError, match="target is 0"):
        ppo_functional.AdaptiveKLController(0.1, 0.0, 100.0)


def test_minibatches_are_whole_sequences() -> None:
    data = {
        "packed_input_ids": torch.arange(NUM_TOKENS),
        "cu_seqlens": CU_SEQLENS,
        "advantages": random_rows(NUM_TOKENS),
        "rewards": torch.arange(5),
    }
    parts = model_api.split_minibatches(data, 2, 2)
    assert [part["rewards"].tolist() for part in parts] == [[0, 1, 2], [3, 4]]
    for part in parts:
        assert part["cu_seqlens"].tolist() == packed([LENGTHS[b] for b in part["rewards"].tolist()]).tolist()
        assert part["cu_seqlens"].dtype == torch.int32
    for name in ("packed_input_ids", "advantages"):
        assert torch.equal(torch.cat([part[name] for part in parts]), data[name])
    assert [len(part["rewards"]) for part in model_api.split_minibatches(data, 5)] == [1] * 5
    with pytest.raises(ValueError, match="takes 6 sequences, and the batch has 5"):
        model_api.split_minibatches(data, 3, 2)
    with pytest.raises(ValueError, match="values has 3 rows"):
        model_api.split_minibatches(data | {"values": torch.zeros(3)}, 2)


class Layer:
    """A head, hidden states before it and labels; fp64 logits beside the engine's output."""

    def __init__(self, device: str, vocab_size: int = 83, hidden_size: int = 16):
        torch.manual_seed(0)
        self.hidden = torch.randn(NUM_TOKENS, hidden_size, device=device, requires_grad=True)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False, device=device)
        nn.init.normal_(self.head.weight, std=0.4)
        self.ids = torch.randint(0, vocab_size, (NUM_TOKENS,), device=device)
        self.output = HeadOutput(self.hidden, self.head, 1.0, 0.0, CU_SEQLENS.to(device))
        self.exact = [self.hidden.detach().double().cpu().requires_grad_(), self.head.weight.detach().double().cpu().requires_grad_()]
        self.logits = self.exact[0] @ self.exact[1].T

    def check(self, loss: Tensor, expected: Tensor) -> None:
        """The loss and both gradients."""
        torch.testing.assert_close(loss.detach().double().cpu(), expected.detach(), rtol=1e-5, atol=1e-6)
        actual = torch.autograd.grad(loss, [self.hidden, self.head.weight])
        for own, right in zip(actual, torch.autograd.grad(expected, self.exact), strict=True):
            torch.testing.assert_close(own.double().cpu(), right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_sft_loss_equals_materialised_logits(device: str, masked: bool) -> None:
    layer = Layer(device)
    prompt_mask = PROMPT_MASK if masked else None
    given = {"prompt_mask": PROMPT_MASK.to(device)} if masked else {}
    loss, stats = sft_interface.compute_packed_sft_loss(layer.output, packed_input_ids=layer.ids, cu_seqlens=CU_SEQLENS.to(device), **given)
    expected, perplexities = sft_loss_of_logits(layer.logits, layer.ids.cpu(), CU_SEQLENS, prompt_mask)
    layer.check(loss, expected)
    n_tokens = sum(LENGTHS) - len(LENGTHS) if prompt_mask is None else int(LOSS_MASK.sum())
    assert functional.aggregate_stats([stats]) == pytest.approx(
        {
            "loss": expected.item(),
            "ppl": sum(perplexities) / len(perplexities),
            "n_tokens": n_tokens,
            "n_seqs": len(perplexities),
        },
        rel=1e-5,
    )


@pytest.mark.parametrize("entropy_coef", [0.0, 0.3])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_ppo_actor_loss_equals_materialised_logits(device: str, entropy_coef: float, temperature: float) -> None:
    layer = Layer(device)
    logp = logprobs_of_logits(layer.logits, layer.ids.cpu(), CU_SEQLENS, temperature)
    old, advantages = (logp.detach() + random_rows(NUM_TOKENS, seed=1, scale=0.3)).float(), random_rows(NUM_TOKENS, seed=2).float()
    loss_fn = functools.partial(
        ppo_interface.ppo_actor_loss_from_model_outputs, eps_clip=0.2, temperature=temperature, entropy_coef=entropy_coef
    )
    tensors = {"cu_seqlens": CU_SEQLENS, "old_logp": old, "ppo_loss_mask": LOSS_MASK, "advantages": advantages}
    on_device: dict[str, Any] = {name: x.to(device) for name, x in tensors.items()}
    loss, stats = loss_fn(layer.output, packed_input_ids=layer.ids, **on_device)
    expected, right = actor_loss_of_loops(logp, old, advantages, 0.2, LOSS_MASK)
    own = functional.aggregate_stats([stats])
    assert own["actor_loss"] == pytest.approx(expected.item(), rel=1e-4)
    if entropy_coef:
        log_softmax = (layer.logits / temperature).log_softmax(-1)
        entropy = -(log_softmax.exp() * log_softmax).sum(-1)[LOSS_MASK].mean()
        expected = expected - entropy_coef * entropy
        assert own["entropy"] == pytest.approx(entropy.item(), rel=1e-4)
    layer.check(loss, expected)
    for name, value in right.items():
        assert own[{"importance_weight": name}.get(name, f"{'actor' if name == 'clip_ratio' else 'ppo'}_{name}")] == pytest.approx(
            value, rel=1e-3
        )
    assert own["abandoned"] == 0


@pytest.mark.parametrize("limit", ["early_stop_kl", "early_stop_imp_ratio"])
def test_microbatch_beyond_a_limit_is_abandoned(device: str, limit: str) -> None:
    """Ratios that overflow leave no NaN behind."""
    layer = Layer(device)
    tensors = {"old_logp": torch.full((NUM_TOKENS,), -200.0), "ppo_loss_mask": LOSS_MASK, "advantages": -torch.ones(NUM_TOKENS)}
    on_device: dict[str, Any] = {name: x.to(device) for name, x in (tensors | {"cu_seqlens": CU_SEQLENS}).items()}
    loss, stats = ppo_interface.ppo_actor_loss_from_model_outputs(
        layer.output, layer.ids, **on_device, eps_clip=0.2, entropy_coef=0.1, **{limit: 3.0}
    )
    assert loss.item() == 0
    assert functional.aggregate_stats([stats])["abandoned"] == 1
    for gradient in torch.autograd.grad(loss, [layer.hidden, layer.head.weight]):
        assert not gradient.any()


@pytest.mark.parametrize(("final", "code"), [(2.7, 0), (2.9, 1), (float("nan"), 1)])
def test_demo_is_a_check_of_its_bound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, final: float, code: int) -> None:
    monkeypatch.setattr(sys, "argv", ["engine_demo.py", "--keep", str(tmp_path)])
    monkeypatch.setattr(engine_demo, "shard", lambda *_: None)
    monkeypatch.setattr(engine_demo, "run_stages", lambda *_: {"losses": [5.5] * 10 + [final] * 5, "texts": []})
    assert engine_demo.main() == code


@pytest.mark.parametrize(
    ("example", "arguments", "message"),
    [
        (engine_demo, ["--stages", "3", "--layers", "2"], "--stages is 3; a model of 2 layers has 1 to 2 stages"),
        (engine_demo, ["--steps", "4"], "--steps is 4; the loss is of the last 5"),
        (engine_ppo, ["--sequences", "7"], "--sequences is 7; --minibatches 4 of 2 microbatches each need 8 or more"),
        (engine_sft, ["--shape", "2x32"], "--shape is 2x32; it must be layers x hidden_size x vocab_size"),
    ],
)
def test_examples_refuse_what_cannot_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], example: Any, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "argv", [example.__file__, *arguments])
    with pytest.raises(SystemExit) as ended:
        example.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
