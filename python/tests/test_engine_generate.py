"""PipelineEngine.generate in one process, on one stage."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers
from engine_generate_support import (
    FAMILIES,
    LENGTHS,
    CountingStage,
    check,
    continued,
    engine_of,
    of_transformers,
    prompts,
    tokenizer_of,
    unpipelined,
)
from engine_stage_support import VOCAB, model_of

import flce
from flce.engine import Generated, GenerationConfig, HeadOutput, PipelineEngine, Stage, causal_lm_stage

SAMPLED = [GenerationConfig(10, temperature=0.7), GenerationConfig(10, top_k=12, top_p=0.8, temperature=1.4, eos_token_id=[4, 9, 23])]


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_equals_transformers_generate(name: str) -> None:
    model = model_of(name)
    engine = engine_of(model)
    endless = GenerationConfig(8, greedy=True)
    expected = of_transformers(model, LENGTHS, endless)
    check(engine.generate(*prompts(), None, endless), expected)
    # A token of theirs ends sequences at different places.
    ends = [expected[0][2], expected[1][5]]
    for config in (GenerationConfig(8, greedy=True, eos_token_id=ends), GenerationConfig(8, 4, greedy=True, eos_token_id=ends)):
        expected = of_transformers(model, LENGTHS, config)
        assert config.min_new_tokens or len({len(tokens) for tokens in expected}) > 1
        for number in (1, 2, 3, 6):
            check(engine.generate(*prompts(), tokenizer_of(None), config, num_micro_batches=number), expected)


@pytest.mark.parametrize("config", SAMPLED)
@pytest.mark.parametrize("name", FAMILIES)
def test_sampling_equals_a_loop_over_the_whole_model(name: str, config: GenerationConfig) -> None:
    model = model_of(name)
    engine = engine_of(model)
    expected, logprobs = unpipelined(model, LENGTHS, config, seed=8)
    for number in (1, 2, 4, 6):
        result = check(engine.generate(*prompts(), tokenizer_of(None), config, num_micro_batches=number, seed=8), expected)
        for row, own in zip(result.logprobs, logprobs, strict=True):
            torch.testing.assert_close(row[: len(own)], own, rtol=0, atol=5e-5)  # without a cache, attention is summed in another order


@pytest.mark.parametrize("config", [*SAMPLED, GenerationConfig(6, greedy=True, temperature=2.0, min_new_tokens=2, eos_token_id=4)])
@pytest.mark.parametrize("name", FAMILIES)
def test_logprobs_are_those_of_a_training_pass(name: str, config: GenerationConfig) -> None:
    engine = engine_of(model_of(name))
    result = engine.generate(*prompts(), None, config, num_micro_batches=2, seed=1)
    ids, cu_seqlens, rows = continued(result)
    seen: list[Tensor] = []

    def loss_fn(output: HeadOutput, packed_input_ids: Tensor, cu_seqlens: Tensor) -> Any:
        seen.append(output.logprobs(packed_input_ids, config.temperature, shift=1))
        return seen[-1].sum(), {}

    engine.eval_batch(ids, cu_seqlens, loss_fn, num_micro_batches=1)
    forward = engine.forward(ids, cu_seqlens, output="logprobs", temperature=config.temperature)
    for row, length, where in zip(result.logprobs, result.lengths.tolist(), rows, strict=True):
        for trained in (seen[0], forward):
            torch.testing.assert_close(row[:length], trained[where], rtol=0, atol=1e-5)


def test_a_seed_decides_and_torchs_own_where_there_is_none() -> None:
    engine = engine_of(model_of("llama"))
    config = GenerationConfig(12)

    def tokens(seed: int | None) -> list[list[int]]:
        return engine.generate(*prompts(), None, config, seed=seed).tokens.tolist()

    assert tokens(5) == tokens(5)
    assert tokens(5) != tokens(6)
    assert tokens(None) != tokens(None)
    torch.manual_seed(1)
    one = tokens(None)
    torch.manual_seed(1)
    assert tokens(None) == one


def test_a_sequence_goes_on_alike_whatever_comes_behind_it() -> None:
    engine = engine_of(model_of("llama"))
    whole = engine.generate(*prompts(), None, GenerationConfig(9), seed=3)
    ids, cu_seqlens = prompts()
    few = engine.generate(ids[: cu_seqlens[3]], cu_seqlens[:4], None, GenerationConfig(9), seed=3)
    assert torch.equal(few.tokens, whole.tokens[:3])


def counted(lengths: list[int], starts: list[int], config: GenerationConfig, number: int) -> tuple[Generated, list[list[int]]]:
    """Continues prompts that end with these tokens, from which a CountingStage counts on."""
    stage = CountingStage(0, 1)
    ids = torch.cat([torch.arange(start - length + 1, start + 1) for start, length in zip(starts, lengths, strict=True)])
    result = PipelineEngine(stage).generate(ids, torch.tensor([0, *lengths]).cumsum(0), None, config, num_micro_batches=number)
    return result, stage.seen


def test_finished_sequences_leave_the_batch() -> None:
    config = GenerationConfig(10, greedy=True, eos_token_id=[15], pad_token_id=0)
    result, seen = counted([2, 1, 3, 1], [10, 14, 12, 3], config, 1)
    check(result, [[11, 12, 13, 14, 15], [15], [13, 14, 15], list(range(4, 14))])
    first = [9, 14, 10, 3]
    assert seen == [first, *[[9, 10, 3]] * 2, *[[9, 3]] * 2, *[[3]] * 5]


def test_a_microbatch_whose_sequences_are_finished_is_left_out() -> None:
    config = GenerationConfig(1000, greedy=True, eos_token_id=[15], pad_token_id=0)
    result, seen = counted([1, 1, 1, 1], [14, 14, 12, 14], config, 2)
    check(result, [[15], [15], [13, 14, 15], [15]])
    assert seen == [[14, 14], [12, 14], [12], [12]]
    result, seen = counted([1, 1, 1, 1], [14] * 4, config, 4)
    check(result, [[15]] * 4)
    assert seen == [[14]] * 4


def test_logits_are_made_for_last_positions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    of = HeadOutput.logits

    def logits(self: HeadOutput) -> Tensor:
        made = of(self)
        rows.append(made.shape[0])
        return made

    monkeypatch.setattr(HeadOutput, "logits", logits)
    engine_of(model_of("llama")).generate(*prompts(), None, GenerationConfig(3, greedy=True), num_micro_batches=2)
    assert sum(rows[:2]) == len(LENGTHS)
    assert rows == rows[:2] * 3


def test_dropout_is_off_modes_stay_and_no_gradient_is_recorded() -> None:
    model = model_of("gpt2", resid_pdrop=0.9, embd_pdrop=0.9, attn_pdrop=0.9)
    config = GenerationConfig(6, greedy=True)
    engine = engine_of(model)
    engine.train()
    layer: nn.Module = engine.stages[0].layers[1]  # type: ignore[index, assignment, union-attr]
    layer.eval()
    modes = [module.training for module in engine.stages[0].modules()]
    check(result := engine.generate(*prompts(), None, config), of_transformers(model, LENGTHS, config))
    assert [module.training for module in engine.stages[0].modules()] == modes
    assert len(set(modes)) == 2
    assert not any(value.requires_grad for value in result)
    assert all(parameter.grad is None for parameter in engine.parameters())
    engine.stages[0].head.weight.data[:] = torch.nan  # type: ignore[union-attr]
    with pytest.raises(flce.PipelineError):
        engine.generate(*prompts(), None, config)
    assert [module.training for module in engine.stages[0].modules()] == modes


def ids_of(*tokens: int) -> Tensor:
    return torch.tensor(tokens)


@pytest.mark.parametrize(
    ("ids", "bounds", "keywords", "says"),
    [
        (ids_of(1, 2, 3), [0, 1, 1, 3], {}, "cu_seqlens gives sequence 1 0 tokens"),
        (ids_of(1, 2, 3), [0, 1, 4], {}, "cu_seqlens has 3 elements from 0 to 4; it must go from 0 to packed_input_ids' 3 tokens"),
        (ids_of(1, 2, 3), [0, 1, 3], {"num_micro_batches": 3}, "the batch has 2 sequences, which are fewer than its 3 microbatches"),
        (ids_of(*range(1, 40), 1), [0, 1, 40], {}, "sequence 1 has 39 tokens, and max_new_tokens is 26; together .* at most 64"),
        (ids_of(1, VOCAB, 3), [0, 3], {}, f"packed_input_ids has {VOCAB}; ids must be 0 to {VOCAB - 1}"),
        (ids_of(1, -1, 3), [0, 3], {}, "packed_input_ids has -1; ids must be 0"),
        (ids_of(1), [0, 1], {"tokenizer": tokenizer_of(VOCAB)}, f"eos_token_id is {VOCAB}; it must be 0 to {VOCAB - 1}"),
        (ids_of(1), [0, 1], {"tokenizer": tokenizer_of(list(range(VOCAB)))}, f"eos_token_id has all {VOCAB} tokens"),
        (ids_of(1), [0, 1], {"tokenizer": GenerationConfig(3)}, "tokenizer is a GenerationConfig; it must have eos_token_id and pad_token"),
        (ids_of(1), [0, 1], {"tokenizer": transformers.GenerationConfig(max_new_tokens=3)}, "The config is gconfig="),
        (ids_of(1), [0, 1], {"tokenizer": object()}, "tokenizer is a object"),
        (ids_of(1), [0, 1], {"seed": "7"}, "seed is '7'; it must be an integer or None"),
        (ids_of(1), [0, 1], {"seed": 1 << 64}, f"seed is {1 << 64}; it must have 64 bits"),
        (ids_of(1), [0, 1], {"gconfig": transformers.GenerationConfig()}, "gconfig is a GenerationConfig of .*transformers"),
        (ids_of(1), [0, 1], {"gconfig": {"max_new_tokens": 3}}, "gconfig is a dict; it must be a flce.engine.GenerationConfig"),
    ],
)
def test_what_cannot_be_generated_from_is_named(ids: Tensor, bounds: list[int], keywords: dict[str, Any], says: str) -> None:
    engine = engine_of(model_of("llama"))
    with pytest.raises(flce.ArgumentError, match=says):
        engine.generate(ids, torch.tensor(bounds), **{"gconfig": GenerationConfig(26, greedy=True), **keywords})
    assert engine.generate(ids_of(1), ids_of(0, 1), None, GenerationConfig(1)).lengths.tolist() == [1]


def test_a_critic_several_stages_and_one_without_a_cache_are_refused() -> None:
    critic = PipelineEngine(causal_lm_stage(model_of("llama"), 0, 1, critic=True))
    with pytest.raises(flce.ArgumentError, match="the last stage's head has one row, a critic's value"):
        critic.generate(*prompts(), None, GenerationConfig(3))

    both = PipelineEngine(CountingStage(0, 1))
    both.stages *= 2  # two stages on a rank, as some schedules have them
    with pytest.raises(flce.ArgumentError, match="this rank has 2 stages; generate needs one stage a rank"):
        both.generate(ids_of(1), ids_of(0, 1), None, GenerationConfig(3))

    class NoCache(CountingStage):
        new_cache = Stage.new_cache

    with pytest.raises(NotImplementedError, match="NoCache keeps no keys and values, so it cannot generate"):
        PipelineEngine(NoCache(0, 1)).generate(ids_of(1), ids_of(0, 1), None, GenerationConfig(3))


@pytest.mark.parametrize("config", [GenerationConfig(8, greedy=True, pad_token_id=0), GenerationConfig(8, top_p=0.5, pad_token_id=0)])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_reported_with_their_sequence(config: GenerationConfig, value: float) -> None:
    class Broken(CountingStage):
        """Breaks the logits of token 8."""

        def forward(self, x: Tensor, batch: Any) -> Tensor:
            hidden = super().forward(x, batch)
            hidden[x == 7] = value
            return hidden

    engine = PipelineEngine(Broken(0, 1))
    says = "stage 0: logits of sequence 2 for new token 4 are NaN or infinite, in microbatch 1; nothing is returned"
    with pytest.raises(flce.PipelineError, match=re.escape(says)) as raised:
        engine.generate(ids_of(9, 10, 4, 12), ids_of(0, 1, 2, 3, 4), None, config, num_micro_batches=2, seed=0)
    assert raised.value.stage == 0
    check(engine.generate(ids_of(9), ids_of(0, 1), None, GenerationConfig(3, greedy=True)), [[10, 11, 12]])  # and can be used further
