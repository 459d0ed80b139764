"""How generation chooses tokens: GenerationConfig and the Sampler, against exact probabilities and transformers' own processors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, MinNewTokensLengthLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import flce
from flce.engine import GenerationConfig
from flce.engine._sampling import Sampler, filtered

ENDS = (3, 7)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("max_new_tokens", 0, "max_new_tokens is 0; it must be an integer of 1 or more"),
        ("max_new_tokens", 2.5, "max_new_tokens is 2.5; it must be an integer"),
        ("min_new_tokens", -1, "min_new_tokens is -1; it must be an integer of 0 or more"),
        ("min_new_tokens", 300, "min_new_tokens is 300; it must be at most max_new_tokens, 256"),
        ("greedy", 1, "greedy is 1; it must be True or False"),
        ("top_p", 0.0, "top_p is 0.0; it must be above 0 and at most 1"),
        ("top_p", 1.5, "top_p is 1.5; it must be above 0 and at most 1"),
        ("top_p", "0.9", "top_p is '0.9'; it must be a number"),
        ("top_k", 0, "top_k is 0; it must be an integer of 1 or more, or None"),
        ("top_k", True, "top_k is True; it must be an integer of 1 or more, or None"),
        ("temperature", 0, "temperature is 0; .*greedy=True"),
        ("temperature", -1.0, r"temperature is -1.0; it must be between 2\^-100 and 2\^100"),
        ("temperature", float("inf"), r"temperature is inf; it must be between 2\^-100 and 2\^100"),
        ("temperature", float("nan"), r"temperature is nan; it must be between 2\^-100 and 2\^100"),
        ("temperature", 1e-32, r"temperature is 1e-32; it must be between 2\^-100 and 2\^100"),
        ("eos_token_id", -100, "eos_token_id is -100; it must be an integer of 0 or more"),
        ("eos_token_id", [2, "</s>"], "eos_token_id is '</s>'; it must be an integer"),
        ("eos_token_id", "</s>", "eos_token_id is '</s>'; it must be an integer, several integers or None"),
        ("pad_token_id", -1, "pad_token_id is -1; it must be an integer of 0 or more"),
    ],
)
def test_a_value_that_is_not_allowed_is_named(name: str, value: Any, says: str) -> None:
    with pytest.raises(flce.ArgumentError, match=says):
        GenerationConfig(**{name: value})


def test_special_tokens_are_the_configs_then_the_tokenizers() -> None:
    tokenizer = SimpleNamespace(eos_token_id=2, pad_token_id=0)
    assert GenerationConfig().special_tokens(tokenizer) == ((2,), 0)
    assert GenerationConfig(eos_token_id=[5, 6], pad_token_id=9).special_tokens(tokenizer) == ((5, 6), 9)
    assert GenerationConfig().special_tokens(SimpleNamespace(eos_token_id=2, pad_token_id=None)) == ((2,), 2)
    assert GenerationConfig().special_tokens(None) == ((), 0)
    with pytest.raises(flce.ArgumentError, match=r"tokenizer\.eos_token_id is -1"):
        GenerationConfig().special_tokens(SimpleNamespace(eos_token_id=-1))


def processors(config: GenerationConfig, device: str) -> LogitsProcessorList:
    """Processors in transformers' order."""
    chosen: list[Any] = []
    if config.min_new_tokens:
        chosen.append(MinNewTokensLengthLogitsProcessor(4, config.min_new_tokens, list(ENDS), device))
    if not config.greedy:
        if config.temperature != 1.0:
            chosen.append(TemperatureLogitsWarper(config.temperature))
        if config.top_k is not None:
            chosen.append(TopKLogitsWarper(config.top_k))
        if config.top_p < 1.0:
            chosen.append(TopPLogitsWarper(config.top_p))
    return LogitsProcessorList(chosen)


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("top_k", [None, 1, 5, 40, 500])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 1e-6])
def test_filters_equal_those_of_transformers(device: str, top_p: float, top_k: int | None, position: int) -> None:
    logits = 3 * torch.randn(200, 50, device=device)
    logits[:100] = logits[:100].round()  # ties, of which top_k keeps all and top_p those of lower ids
    prompt = torch.zeros(200, 4 + position, dtype=torch.long, device=device)
    for temperature in (1.0, 0.3, 2.0):
        for config in (GenerationConfig(8, 2, False, top_p, top_k, temperature), GenerationConfig(8, 2, True, top_p, top_k, temperature)):
            actual = filtered(logits, config, ENDS, position)
            expected = processors(config, device)(prompt, logits)
            distinct = slice(100 if config.top_p < 1.0 else 0, None)
            assert torch.equal(actual[distinct], expected[distinct])
            assert torch.equal(actual.isinf().sum(1), expected.isinf().sum(1))
    assert not logits.isinf().any()


def draws(logits: Tensor, config: GenerationConfig, count: int, *, position: int = 0, ends: tuple[int, ...] = ()) -> Tensor:
    """Tokens drawn from one row of logits [V], by sequences 0 to count - 1."""
    return Sampler(config, ends, 17)(logits.expand(count, -1), torch.arange(count, device=logits.device), position)


def chi_square(tokens: Tensor, probabilities: Tensor) -> float:
    """Pearson's statistic of tokens drawn with these probabilities [V], over its bound at one in 10⁶: above 1 they were drawn otherwise."""
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    likely = probabilities > 0
    assert counts[~likely].sum() == 0, "a token that was filtered out"
    expected = probabilities[likely] * len(tokens)
    statistic = ((counts[likely] - expected) ** 2 / expected).sum().item()
    freedom = int(likely.sum()) - 1
    # Wilson and Hilferty: (χ²/k)^(1/3) is close to normal.
    return statistic / (freedom * (1 - 2 / (9 * freedom) + 4.75 * (2 / (9 * freedom)) ** 0.5) ** 3)


CONFIGS = [
    GenerationConfig(),
    GenerationConfig(temperature=0.5),
    GenerationConfig(temperature=2.0),
    GenerationConfig(top_k=4),
    GenerationConfig(top_p=0.8),
    GenerationConfig(top_k=6, top_p=0.8, temperature=1.5),
]


def test_tokens_have_the_probabilities_that_the_filters_leave(device: str) -> None:
    logits = torch.linspace(-2, 2, 12, device=device)[torch.randperm(12)]
    distributions = [processors(config, device)(torch.zeros(1, 1), logits[None])[0].softmax(0).double().cpu() for config in CONFIGS]
    for config, probabilities in zip(CONFIGS, distributions, strict=True):
        tokens = draws(logits, config, 20_000).cpu()
        assert chi_square(tokens, probabilities) < 1
        for other in distributions:  # the bound knows a wrong filter, or a wrong temperature
            if other is not probabilities and (other[tokens] > 0).all():
                assert chi_square(tokens, other) > 1


def test_noise_is_as_independent_as_it_claims(device: str) -> None:
    """Pairs of neighbouring sequences, positions and seeds fill the square evenly."""
    logits, count = torch.zeros(8, device=device), 30_000
    numbers = torch.arange(count, device=device)

    def tokens(seed: int = 1, shift: int = 0, position: int = 0) -> Tensor:
        return Sampler(GenerationConfig(), (), seed)(logits.expand(count, -1), numbers + shift, position)

    even = torch.full((64,), 1 / 64, dtype=torch.float64)
    one = tokens()
    for other in (tokens(shift=1), tokens(position=1), tokens(seed=2), tokens(seed=-1), tokens(seed=1 << 62)):
        assert chi_square((8 * one + other).cpu(), even) < 1


@pytest.mark.nightly
def test_a_rare_token_comes_as_often_as_it_should() -> None:
    """Noise of 24 bits would miss these."""
    logits = torch.zeros(50_000)
    logits[7] = 9.0
    tokens = draws(logits, GenerationConfig(), 4_000)
    assert 440 < int((tokens == 7).sum()) < 640  # 8103 of 58,102: 13.9 %, 558 ± 22
    assert len(tokens.unique()) > 3_300


def test_a_choice_depends_on_its_own_sequence_and_position_alone(device: str) -> None:
    logits = torch.randn(64, 40, device=device)
    numbers = torch.arange(64, device=device)
    for config in (GenerationConfig(), GenerationConfig(top_k=9, top_p=0.9)):
        whole = Sampler(config, (), 5)(logits, numbers, 3)
        chosen = torch.tensor([60, 2, 33], device=device)
        assert torch.equal(Sampler(config, (), 5)(logits[chosen], chosen, 3), whole[chosen])
        assert torch.equal(Sampler(config, (), 5)(logits + 1e-6 * torch.randn_like(logits), numbers, 3), whole)
        for seed, sequences, position in ((6, numbers, 3), (5, numbers + 64, 3), (5, numbers, 4)):
            assert not torch.equal(Sampler(config, (), seed)(logits, sequences, position), whole)


def test_many_rows_equal_the_same_rows_in_parts(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    logits = torch.randn(20, 30, device=device)
    for config in (GenerationConfig(), GenerationConfig(top_k=5)):
        whole = draws_of_rows(logits, config)
        with monkeypatch.context() as patch:
            patch.setattr("flce.engine._sampling._MOST_NOISE", 100)
            assert torch.equal(draws_of_rows(logits, config), whole)


def draws_of_rows(logits: Tensor, config: GenerationConfig) -> Tensor:
    return Sampler(config, (), 2)(logits, torch.arange(len(logits), device=logits.device), 0)


def test_greedy_takes_the_first_of_equals(device: str) -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0]], device=device)
    assert draws_of_rows(logits, GenerationConfig(greedy=True, temperature=0.1, top_k=1)).tolist() == [1, 0]


def test_of_equals_the_lowest_ids_reach_top_p(device: str) -> None:
    logits = torch.zeros(1, 40, device=device)
    kept = filtered(logits, GenerationConfig(top_p=0.25), (), 0) > -torch.inf
    assert kept[0].nonzero()[:, 0].tolist() == list(range(10))


def test_no_end_comes_before_min_new_tokens(device: str) -> None:
    logits = torch.zeros(10, device=device)
    logits[list(ENDS)] = 8.0
    for greedy in (True, False):
        config = GenerationConfig(min_new_tokens=2, greedy=greedy)
        for position in (0, 1):
            assert not torch.isin(draws(logits, config, 300, position=position, ends=ENDS), torch.tensor(ENDS, device=device)).any()
        assert torch.isin(draws(logits, config, 300, position=2, ends=ENDS), torch.tensor(ENDS, device=device)).float().mean() > 0.9


@pytest.mark.parametrize("config", [GenerationConfig(greedy=True), GenerationConfig(), GenerationConfig(top_k=3, top_p=0.5)])
def test_logits_without_a_best_choose_nothing(device: str, config: GenerationConfig) -> None:
    logits = torch.randn(5, 6, device=device)
    logits[1, 2] = torch.nan
    logits[2, 0] = torch.inf
    logits[3] = -torch.inf
    logits[4, :5] = -torch.inf
    tokens = draws_of_rows(logits, config).tolist()
    assert tokens[1:4] == [-1, -1, -1]
    assert tokens[0] >= 0
    assert tokens[4] == 5
