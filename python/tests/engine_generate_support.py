"""References for generation: transformers' own generate, and a loop that runs the whole model on every sequence for every token."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from engine_stage_support import VOCAB
from rank_support import generator
from torch import Tensor, nn

from flce.engine import Generated, GenerationConfig, KVCache, PackedBatch, PipelineEngine, Stage, causal_lm_stage
from flce.engine._sampling import Sampler

FAMILIES = ["llama", "qwen3", "gemma2", "gpt2"]
#: lengths of prompts: longer and shorter than gemma2's window, and one token
LENGTHS = [5, 9, 1, 3, 12, 7]
PAD = 0


def prompts(lengths: list[int] = LENGTHS, seed: int = 3) -> tuple[Tensor, Tensor]:
    """packed_input_ids, cu_seqlens."""
    ids = torch.randint(1, VOCAB, (sum(lengths),), generator=generator(seed))
    return ids, torch.tensor([0, *lengths]).cumsum(0).int()


def engine_of(model: nn.Module, stage: int = 0, num_stages: int = 1, **keywords: Any) -> PipelineEngine:
    """This rank's, of a copy of the model."""
    return PipelineEngine(causal_lm_stage(copy.deepcopy(model), stage, num_stages), **keywords)


def tokenizer_of(eos_token_id: Any, pad_token_id: int | None = PAD) -> Any:
    return SimpleNamespace(eos_token_id=eos_token_id, pad_token_id=pad_token_id)


def of_transformers(model: Any, lengths: list[int], config: GenerationConfig) -> list[list[int]]:
    """New tokens of each prompt, by itself, greedy."""
    model = copy.deepcopy(model).eval()
    own = transformers.GenerationConfig(
        max_new_tokens=config.max_new_tokens,
        min_new_tokens=config.min_new_tokens or None,
        do_sample=False,
        eos_token_id=list(config.eos_token_ids) or None,
        pad_token_id=PAD,
    )
    model.generation_config = own
    ids, _ = prompts(lengths)
    return [model.generate(p[None], attention_mask=torch.ones_like(p[None]))[0, len(p) :].tolist() for p in ids.split(lengths)]


@torch.no_grad()
def unpipelined(model: Any, lengths: list[int], config: GenerationConfig, seed: int = 0) -> tuple[list[list[int]], list[Tensor]]:
    """New tokens and their log-probabilities: no cache, no batch, logits written out."""
    model = copy.deepcopy(model).eval()
    sampler = Sampler(config, config.eos_token_ids, seed)
    found: list[list[int]] = []
    logprobs: list[Tensor] = []
    for number, prompt in enumerate(prompts(lengths)[0].split(lengths)):
        ids, chosen, given = prompt, [], []
        for position in range(config.max_new_tokens):
            logits = model(input_ids=ids[None], use_cache=False).logits[0, -1:].float()
            token = int(sampler(logits, torch.tensor([number]), position))
            given.append((logits[0] / config.temperature).log_softmax(0)[token])
            chosen.append(token)
            ids = torch.cat([ids, torch.tensor([token])])
            if token in config.eos_token_ids:
                break
        found.append(chosen)
        logprobs.append(torch.stack(given))
    return found, logprobs


def check(result: Generated | None, expected: list[list[int]], pad: int = PAD) -> Generated:
    """Checks that these are the new tokens, padded behind their ends."""
    assert result is not None
    longest = max(map(len, expected))
    assert result.lengths.tolist() == [len(tokens) for tokens in expected]
    assert result.tokens.tolist() == [tokens + [pad] * (longest - len(tokens)) for tokens in expected]
    assert result.tokens.dtype == result.lengths.dtype == torch.int64
    assert result.logprobs.dtype == torch.float32
    assert result.logprobs.shape == result.tokens.shape
    for row, tokens in zip(result.logprobs, expected, strict=True):
        assert not row[len(tokens) :].any()
        assert (row[: len(tokens)] < 0).all()
    return result


def continued(result: Generated, lengths: list[int] = LENGTHS) -> tuple[Tensor, Tensor, list[slice]]:
    """Prompts with what they were continued by, packed; and where the rows are that log-probabilities of new tokens belong to."""
    parts = [torch.cat([p, t[:n]]) for p, t, n in zip(prompts(lengths)[0].split(lengths), result.tokens, result.lengths, strict=True)]
    bounds = torch.tensor([0, *map(len, parts)]).cumsum(0)
    rows = [slice(int(a) + n - 1, int(b) - 1) for a, b, n in zip(bounds[:-1], bounds[1:], lengths, strict=True)]
    return torch.cat(parts), bounds.int(), rows


class CountingStage(Stage):
    """Sequence b of prompt token t goes on with t + 1, t + 2, …: a stage that remembers its cache's tokens and not its input.

    Its "keys" are the ids, so that a cache with mixed up sequences shows. seen: for each pass the first token of each sequence there.
    """

    def __init__(self, stage: int, num_stages: int, vocab_size: int = 20) -> None:
        super().__init__()
        self.stage, self.num_stages = stage, num_stages
        self.hidden_size, self.dtype = vocab_size, torch.float32
        self.weight = nn.Parameter(torch.zeros(1))
        self.head = nn.Linear(vocab_size, vocab_size, bias=False) if self.is_last else None
        if self.head is not None:
            nn.init.eye_(self.head.weight)
        self.seen: list[list[int]] = []

    def new_cache(self, num_sequences: int, max_length: int) -> KVCache:
        return KVCache(1, num_sequences, max_length, 1, 1, torch.float32, torch.get_default_device())

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        ids = x if self.is_first else x.argmax(1)
        cache = batch.cache
        assert cache is not None
        for sequence, own in enumerate(ids.split(batch.lengths)):
            first = cache.lengths[sequence]
            cache.keys[0][sequence, 0, first : first + len(own), 0] = own.float()
        cache.advance(batch.lengths)
        self.seen.append([int(key[0, 0, 0]) for key in cache.keys[0]])
        shift = int(self.is_last)
        return nn.functional.one_hot((ids + shift) % self.hidden_size, self.hidden_size) * 9.0 + self.weight
