"""Stages with a cache: prefill and decoding against the pass without one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from engine_stage_support import MODELS, model_of, near, packed, run, stages_of

from flce import errors
from flce.engine import CausalLMStage, KVCache, PackedBatch

CPU = torch.device("cpu")


def pieces(sequences: list[Tensor], starts: list[int], lengths: list[int]) -> Tensor:
    return torch.cat([s[start : start + n] for s, start, n in zip(sequences, starts, lengths, strict=True)])


def cached(stages: list[CausalLMStage], caches: list[KVCache], sequences: list[Tensor], lengths: list[int]) -> list[Tensor]:
    """Runs the next lengths[b] tokens of each sequence b."""
    past = list(caches[0].lengths)
    hidden = pieces(sequences, past, lengths)
    for stage, cache in zip(stages, caches, strict=True):
        hidden = stage(hidden, PackedBatch.of(lengths, CPU, cache))
        assert cache.lengths == [old + new for old, new in zip(past, lengths, strict=True)]
    return list(hidden.split(lengths))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_prefill_and_decoding_give_what_the_pass_without_a_cache_gives(name: str) -> None:
    lengths = [14, 9, 17]
    stages = [stage.eval() for stage in stages_of(model_of(name), 2)]
    ids, batch = packed(lengths)
    sequences, expected = list(ids.split(lengths)), run(stages, ids, batch).split(lengths)
    caches = [stage.new_cache(3, 17) for stage in stages]
    # prompts; a token each; pieces of different lengths on top, one of them empty; a token each until the ends
    for new in ([5, 1, 7], [1, 1, 1], [4, 0, 2], [1, 3, 1], *[[1, 1, 1]] * 3):
        past = list(caches[0].lengths)
        for b, hidden in enumerate(cached(stages, caches, sequences, new)):
            near(hidden, expected[b][past[b] : past[b] + new[b]])
    assert caches[0].lengths == [14, 8, 14]


@pytest.mark.parametrize("name", ["qwen3", "mistral-window", "gemma2", "gpt2"])
@torch.no_grad()
def test_sequences_that_are_done_leave_and_the_others_go_on(name: str) -> None:
    lengths = [8, 6, 12, 7]
    stages = [stage.eval() for stage in stages_of(model_of(name), 3)]
    ids, batch = packed(lengths)
    sequences, expected = list(ids.split(lengths)), list(run(stages, ids, batch).split(lengths))
    caches = [stage.new_cache(4, 12) for stage in stages]
    cached(stages, caches, sequences, [5, 5, 5, 5])
    cached(stages, caches, sequences, [1, 1, 1, 1])
    for kept in ([3, 0, 2], [2]):
        for cache in caches:
            cache.select(torch.tensor(kept))
        sequences, expected = [sequences[b] for b in kept], [expected[b] for b in kept]
        for _ in range(1):
            past = list(caches[0].lengths)
            for b, hidden in enumerate(cached(stages, caches, sequences, [1] * len(kept))):
                near(hidden, expected[b][past[b] : past[b] + 1])
    for cache in caches:
        cache.select(torch.tensor([], dtype=torch.int64))
        assert cache.lengths == [] and cache.keys[0].shape[0] == 0


@torch.no_grad()
def test_decoding_calls_attention_once_for_all_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    (stage,) = stages_of(model_of("llama"), 1)
    ids, _ = packed([3] * 5)
    cache = stage.new_cache(5, 4)
    stage(ids, PackedBatch.of([3] * 5, CPU, cache))
    shapes = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def counted(query: Tensor, key: Tensor, *args, **keywords) -> Tensor:
        shapes.append((list(query.shape), list(key.shape)))
        return attend(query, key, *args, **keywords)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    stage(ids[:5], PackedBatch.of([1] * 5, CPU, cache))
    assert shapes == [([5, 2, 2, 6], [5, 2, 4, 6])] * 4  # 4 heads of queries on 2 of keys; 4 layers


@torch.no_grad()
def test_a_cache_is_of_the_stages_dtype_and_runs_in_16_bits() -> None:
    model = model_of("gemma2")
    stages = [stage.eval() for stage in stages_of(model, 2, dtype=torch.bfloat16)]
    caches = [stage.new_cache(2, 9) for stage in stages]
    assert {k.dtype for cache in caches for k in cache.keys + cache.values} == {torch.bfloat16}
    assert [len(cache.keys) for cache in caches] == [len(stage.layers) for stage in stages]
    ids, batch = packed([9, 4])
    expected = run(stages, ids, batch).split([9, 4])
    sequences = list(ids.split([9, 4]))
    cached(stages, caches, sequences, [8, 3])
    for b, hidden in enumerate(cached(stages, caches, sequences, [1, 1])):
        assert hidden.dtype == torch.bfloat16
        near(hidden.float(), expected[b][-1:].float(), 0.1)


def test_batches_that_do_not_fit_the_cache_are_refused() -> None:
    (stage,) = stages_of(model_of("llama"), 1)
    ids, _ = packed([3, 2])
    cache = stage.new_cache(2, 3)
    with pytest.raises(errors.ArgumentError, match="batch has a cache while gradients are on"):
        stage(ids, PackedBatch.of([3, 2], CPU, cache))
    with torch.no_grad():
        with pytest.raises(errors.ArgumentError, match="batch has 1 sequences, and its cache 2"):
            stage(ids[:2], PackedBatch.of([2], CPU, cache))
        stage(ids, PackedBatch.of([3, 2], CPU, cache))
        with pytest.raises(
            errors.ArgumentError, match="sequence 0 of the batch has 1 tokens, and 3 in the cache; the cache has room for 3"
        ):
            stage(ids[:2], PackedBatch.of([1, 1], CPU, cache))
        cache.select(torch.tensor([1]))
        assert cache.lengths == [2]
        assert PackedBatch.of([1], CPU, cache).position_ids.tolist() == [2]
    for arguments in ((0, 3), (2, 0), (2, 1.5)):
        with pytest.raises(errors.ArgumentError, match="must be an integer of 1 or more"):
            stage.new_cache(*arguments)
    with pytest.raises(errors.ArgumentError, match="max_length is 41 tokens; the model has learned positions of 40"):
        stages_of(model_of("gpt2"), 1)[0].new_cache(1, 41)
