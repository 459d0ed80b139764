"""One rank of a pipeline that generates, under torchrun. Exits with a failed assertion, or 0.

Each rank builds the whole model from one seed and keeps its own stage's copy, so what is expected needs no communication.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
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
from rank_support import is_rank, run_main, run_named
from torch import Tensor

import flce
from flce.engine import Generated, GenerationConfig, PackedBatch, PipelineEngine, causal_lm_stage


def last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def engine_here(model: Any, **keywords: Any) -> PipelineEngine:
    return engine_of(model, dist.get_rank(), dist.get_world_size(), **keywords)


def expect(result: Generated | None, expected: list[list[int]]) -> None:
    if last():
        check(result, expected)
    else:
        assert result is None


@functools.cache
def expected_of_greedy(name: str) -> list[tuple[int | None, GenerationConfig, list[list[int]]]]:
    """Microbatches, how to generate, and what comes of it by transformers. Ends are at different places."""
    model = model_of(name)
    endless = of_transformers(model, LENGTHS, GenerationConfig(8, greedy=True))
    ends = (endless[0][2], endless[1][5])
    ending = GenerationConfig(8, greedy=True, eos_token_id=ends)
    late, one = GenerationConfig(8, 2, greedy=True, eos_token_id=ends), GenerationConfig(1, greedy=True)
    ended = of_transformers(model, LENGTHS, ending)
    return [
        (None, GenerationConfig(8, greedy=True), endless),
        (1, ending, ended),
        (3, late, of_transformers(model, LENGTHS, late)),
        (6, ending, ended),
        (2, one, of_transformers(model, LENGTHS, one)),
    ]


def greedy(name: str) -> None:
    """Generates in microbatches of one sequence and of several."""
    engine = engine_here(model_of(name))
    for number, config, expected in expected_of_greedy(name):
        result = engine.generate(*prompts(), tokenizer_of(None), config, num_micro_batches=number)
        expect(result, expected)


@functools.cache
def expected_of_sampled(name: str, config: GenerationConfig) -> list[list[int]]:
    return unpipelined(model_of(name), LENGTHS, config, seed=21)[0]


def sampled(name: str, config: GenerationConfig) -> None:
    """Tokens equal those of a loop over the whole model, on any number of stages, and log-probabilities equal those of the pass that trains
    on them."""
    engine = engine_here(model_of(name))
    expected = expected_of_sampled(name, config)
    for number in (1, 2, 5):
        result = engine.generate(*prompts(), None, config, num_micro_batches=number, seed=21)
        expect(result, expected)
    told = [result]
    dist.broadcast_object_list(told, dist.get_world_size() - 1)
    assert told[0] is not None
    ids, cu_seqlens, rows = continued(Generated(*(part.to(torch.get_default_device()) for part in told[0])))  # perhaps from another GPU
    trained = engine.forward(ids, cu_seqlens, output="logprobs", temperature=config.temperature)
    if last():
        assert trained is not None
        for row, length, where in zip(told[0].logprobs, told[0].lengths.tolist(), rows, strict=True):
            torch.testing.assert_close(row[:length], trained[where], rtol=0, atol=1e-5)


def without_a_seed() -> None:
    """The last stage's generator decides alone."""
    engine = engine_here(model_of("llama"))
    found = []
    for others in (1, 2):
        torch.manual_seed(7 if last() else others)
        result = engine.generate(*prompts(), None, GenerationConfig(9))
        found.append(None if result is None else result.tokens.tolist())
    assert found[0] == found[1]


def counting(stage: type[CountingStage] = CountingStage, group: dist.ProcessGroup | None = None) -> tuple[PipelineEngine, Any]:
    made = stage(dist.get_rank(), dist.get_world_size())
    return PipelineEngine(made, group), made


def sequences_leave_every_stage() -> None:
    engine, stage = counting()
    ids, cu_seqlens = torch.tensor([9, 10, 14, 10, 11, 12, 3]), torch.tensor([0, 2, 3, 6, 7])
    config = GenerationConfig(10, greedy=True, eos_token_id=15, pad_token_id=0)
    for number, seen in (
        (1, [[9, 14, 10, 3], *[[9, 10, 3]] * 2, *[[9, 3]] * 2, *[[3]] * 5]),
        (2, [[9, 14], [10, 3], [9], [10, 3], [9], [10, 3], [9], [3], [9], *[[3]] * 6]),
    ):
        stage.seen.clear()
        result = engine.generate(ids, cu_seqlens, None, config, num_micro_batches=number)
        expect(result, [[11, 12, 13, 14, 15], [15], [13, 14, 15], list(range(4, 14))])
        assert stage.seen == seen, (dist.get_rank(), stage.seen)


def all_end_at_once() -> None:
    engine, stage = counting()
    ids = torch.full((4,), 14)
    config = GenerationConfig(10_000, greedy=True, eos_token_id=15, pad_token_id=0)
    expect(engine.generate(ids, torch.arange(5), None, config, num_micro_batches=4), [[15]] * 4)
    assert stage.seen == [[14]] * 4


class Waiting(CountingStage):
    """Its last stage ends no pass before the first stage has begun the next one: of the next microbatch, or of the next position while
    other microbatches are at this one."""

    passes = 3 * 2

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        store = dist.PrefixStore("waiting", dist.distributed_c10d._get_default_store())
        number = len(self.seen)
        if self.is_first:
            store.set(f"{number}", "begun")
        if self.is_last and number + 1 < self.passes:
            store.wait([f"{number + 1}"], timedelta(seconds=60))
        return super().forward(x, batch)


def stages_work_at_the_same_time() -> None:
    engine, stage = counting(Waiting)
    result = engine.generate(torch.tensor([3, 5]), torch.arange(3), None, GenerationConfig(3, greedy=True), num_micro_batches=2)
    expect(result, [[4, 5, 6], [6, 7, 8]])
    assert len(stage.seen) == Waiting.passes


def refused(call: Callable[[], Any], kind: type[Exception], says: str) -> Exception:
    try:
        call()
    except kind as error:
        assert says in str(error), (dist.get_rank(), says, str(error))
        return error
    raise AssertionError(f"rank {dist.get_rank()}: nothing refused; expected {says}")


class Broken(CountingStage):
    """The logits behind token 7 are NaN."""

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        hidden = super().forward(x, batch)
        return hidden.masked_fill(x.argmax(1)[:, None] == 7, torch.nan) if self.is_last else hidden


def logits_that_are_not_finite_are_named_on_every_stage() -> None:
    engine, _ = counting(Broken)
    config = GenerationConfig(12, greedy=True)
    for number, microbatch in ((1, 0), (2, 1), (4, 2)):
        error = refused(
            lambda number=number: engine.generate(torch.tensor([9, 10, 4, 12]), torch.arange(5), None, config, num_micro_batches=number),
            flce.PipelineError,
            f"stage {dist.get_world_size() - 1}: logits of sequence 2 for new token 4 are NaN or infinite, in microbatch {microbatch}",
        )
        assert error.stage == dist.get_world_size() - 1  # type: ignore[attr-defined]
        result = engine.generate(torch.tensor([9, 10]), torch.arange(3), None, GenerationConfig(3, greedy=True))
        expect(result, [[10, 11, 12], [11, 12, 13]])


def calls_that_differ_are_refused_on_every_stage() -> None:
    model = model_of("llama")
    engine = engine_here(model)
    ids, cu_seqlens = prompts()
    config = GenerationConfig(3, greedy=True)
    other = cu_seqlens.clone()
    other[1] += int(last())
    for call, says in (
        (lambda: engine.generate(ids, other, None, config), "cu_seqlens"),
        (lambda: engine.generate(ids.roll(int(last())), cu_seqlens, None, config), "packed_input_ids"),
        (lambda: engine.generate(ids, cu_seqlens, None, config, seed=dist.get_rank()), "the call and its options"),
        (lambda: engine.generate(ids, cu_seqlens, None, GenerationConfig(3 + int(last()))), "the call and its options"),
        (lambda: engine.generate(ids, cu_seqlens, None, config, num_micro_batches=1 + int(last())), "the number of microbatches"),
        (
            lambda: (
                engine.eval_batch(ids, cu_seqlens, lambda output, **_: None) if last() else engine.generate(ids, cu_seqlens, None, config)
            ),
            "the call",
        ),
    ):
        refused(call, flce.PipelineError, says)
    outside = torch.where(torch.arange(len(ids)) == 3, VOCAB, ids)
    says = f"packed_input_ids has {VOCAB}; ids must be 0 to {VOCAB - 1}"
    refused(lambda: engine.generate(outside, cu_seqlens, None, config), flce.ArgumentError, says)
    # The last stage alone knows its head.
    kind = flce.ArgumentError if last() else flce.PipelineError
    critic = PipelineEngine(causal_lm_stage(model_of("llama"), dist.get_rank(), dist.get_world_size(), critic=True))
    refused(lambda: critic.generate(ids, cu_seqlens, None, config), kind, "the last stage's head has one row, a critic's value")
    expect(engine.generate(ids, cu_seqlens, None, config), of_transformers(model, LENGTHS, config))


class Failing(CountingStage):
    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        if self.stage == 1 and len(self.seen) == 5:
            raise ValueError("of no memory")
        return super().forward(x, batch)


def a_stage_that_fails_ends_all() -> None:
    engine, _ = counting(Failing, dist.new_group(timeout=timedelta(seconds=12)))
    says = "stage 1 failed: ValueError: of no memory"
    error = refused(
        lambda: engine.generate(torch.tensor([3, 5]), torch.arange(3), None, GenerationConfig(8, greedy=True)), flce.PipelineError, says
    )
    assert error.stage == 1  # type: ignore[attr-defined]
    refused(lambda: engine.generate(torch.tensor([3]), torch.arange(2)), flce.PipelineError, "make another one, on new process groups")
    again, _ = counting(CountingStage, dist.new_group())
    expect(again.generate(torch.tensor([3]), torch.arange(2), None, GenerationConfig(3, greedy=True)), [[4, 5, 6]])


SAMPLED = (
    ("qwen3", GenerationConfig(9, temperature=0.7)),
    ("gemma2", GenerationConfig(9, top_k=12, top_p=0.8, temperature=1.4, eos_token_id=(4, 9, 23), pad_token_id=0)),
)


def compute_what_is_expected() -> None:
    """Computes references once, for all ranks that are forked from this process."""
    torch.set_num_threads(1)
    for name in FAMILIES:
        expected_of_greedy(name)
    for of_sampled in SAMPLED:
        expected_of_sampled(*of_sampled)


def cases() -> Iterator[tuple[Any, ...]]:
    for name in FAMILIES:
        yield greedy, name
    for of_sampled in SAMPLED:
        yield sampled, *of_sampled
    yield (without_a_seed,)
    yield (sequences_leave_every_stage,)
    yield (all_end_at_once,)
    yield (stages_work_at_the_same_time,)
    yield (logits_that_are_not_finite_are_named_on_every_stage,)
    yield (calls_that_differ_are_refused_on_every_stage,)
    yield (a_stage_that_fails_ends_all,)


if __name__ == "__main__":
    if not is_rank():
        compute_what_is_expected()
    run_main(run_named, cases)
