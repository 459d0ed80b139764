"""One rank of a pipeline under torchrun: tiny models of transformers in stages, trained by `PipelineEngine` as transformers' own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from engine_stage_support import LENGTHS, model_of
from engine_support import batch_of, sft_loss, token_losses
from rank_support import run_main
from torch import Tensor

from flce.engine import PipelineEngine, causal_lm_stage, plan_stages


def loss_of(model: Any, ids: Tensor, cu_seqlens: Tensor, lengths: list[int]) -> Tensor:
    logits = torch.cat([model(input_ids=part[None], use_cache=False).logits[0] for part in ids.split(lengths)])
    losses, counted = token_losses(logits, ids, cu_seqlens)
    return losses[counted].mean()


def trains(name: str, schedule: str, tied: bool) -> None:
    model = model_of(name, tie_word_embeddings=tied)
    ranks = dist.get_world_size()
    numbers = [dist.get_rank()] if schedule == "1f1b" else [dist.get_rank(), ranks + dist.get_rank()]
    num_stages = len(numbers) * ranks
    stages = [causal_lm_stage(copy.deepcopy(model), number, num_stages) for number in numbers]
    own = {name: parameter for stage in stages for name, parameter in stage.named_parameters()}
    optimizer = torch.optim.AdamW(own.values(), lr=1e-2, eps=1e-3)
    reference = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    engine = PipelineEngine(stages, None, optimizer, schedule=schedule, normalize="tokens", max_grad_norm=1.0)
    of_model = dict(model.named_parameters(remove_duplicate=False))
    plan = plan_stages(model.config, num_stages)
    ends = {plan.names.embedding, plan.names.head}  # each name of a tied pair is on its own end
    assert set(own) - ends == {name for name in of_model if set(plan.stages_of(name)) & set(numbers)} - ends
    for step in range(3):
        lengths = LENGTHS[step:] + LENGTHS[:step]
        ids, cu_seqlens = batch_of(step, lengths)
        ids = ids % model.config.vocab_size
        result = engine.train_batch(ids, cu_seqlens, sft_loss, labels=ids)
        reference.zero_grad()
        loss = loss_of(model, ids, cu_seqlens, lengths)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        reference.step()
        if result is not None:
            torch.testing.assert_close(result[0], loss.detach(), rtol=1e-5, atol=1e-5)
    for parameter_name, parameter in own.items():
        what = f"{name} {parameter_name}"
        torch.testing.assert_close(parameter, of_model[parameter_name], rtol=1e-3, atol=1e-4, msg=lambda m, w=what: f"{w}: {m}")
    with torch.no_grad():
        logits = torch.cat([model(input_ids=part[None], use_cache=False).logits[0] for part in ids.split(lengths)])
    logprobs = engine.eval().forward(ids, cu_seqlens, output="logprobs")
    if logprobs is not None:
        bounds = cu_seqlens.tolist()
        expected = logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
        expected = F.pad(expected, (0, 1))
        expected[[end - 1 for end in bounds[1:]]] = 0.0
        torch.testing.assert_close(logprobs, expected, rtol=1e-3, atol=1e-3)


def cases() -> Iterator[tuple[Any, ...]]:
    yield from (
        ("qwen3", "1f1b", False),
        ("qwen3", "1f1b", True),
        ("gemma2", "1f1b", True),
        ("gemma2", "interleaved_1f1b", True),
        ("gpt2", "1f1b", True),
    )


if __name__ == "__main__":
    run_main(trains, cases)
