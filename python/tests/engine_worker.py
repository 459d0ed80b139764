"""One rank of a pipeline under torchrun: `PipelineEngine` against the model that is not cut, computed by torch alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from engine_support import ToyStage, V, batch_of, sft_loss, token_losses, whole_batch
from rank_support import run_cases
from torch import Tensor, nn

from flce.engine import PipelineEngine
from flce.engine._microbatches import cut
from flce.engine._schedules import SCHEDULES, named, stages_of

# A batch of every step, of its own shapes.
STEPS = ([3, 9, 4, 5, 7, 2, 6, 8], [11, 2, 2, 6, 1, 3, 3, 9, 5], [4, 4, 1, 12, 2, 7, 3, 10])


def my_stages(schedule: str, group: Any, **options: Any) -> list[ToyStage]:
    size = dist.get_world_size(group)
    per_rank = 1 if schedule in ("gpipe", "1f1b") else 2
    return [ToyStage(s, per_rank * size, **options) for s in stages_of(named(schedule), dist.get_rank(group), size, per_rank)]


def parameters(stages: list[ToyStage]) -> dict[str, nn.Parameter]:
    return {name: parameter for stage in stages for name, parameter in stage.named_parameters()}


def reference_loss(whole: ToyStage, ids: Tensor, cu_seqlens: Tensor, labels: Tensor, count: int, normalize: str) -> Tensor:
    hidden = whole_batch(whole, ids, cu_seqlens)
    losses, counted = token_losses(hidden @ whole.head.weight.t(), labels, cu_seqlens)
    if normalize == "tokens":
        return losses[counted].mean()
    bounds = cu_seqlens[list(cut((cu_seqlens[1:] - cu_seqlens[:-1]).tolist(), count))].tolist()
    return torch.stack([losses[a:b].sum() / counted[a:b].sum().clamp(min=1) for a, b in itertools.pairwise(bounds)]).mean()


def masked(ids: Tensor, seed: int) -> Tensor:
    """Labels of which some do not count."""
    keep = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) > 0.3
    return torch.where(keep, ids, -100)


def trains(schedule: str, normalize: str, tied: bool, clip: float | None, pipeline: Any = None, copies: Any = None) -> None:
    """Three steps: losses, every gradient, and parameters equal the whole model's."""
    stages = my_stages(schedule, pipeline, tied=tied)
    own = parameters(stages)
    optimizer = torch.optim.SGD(own.values(), lr=0.3, momentum=0.9)
    gradients: dict[str, Tensor] = {}
    optimizer.register_step_pre_hook(lambda *_: gradients.update({n: p.grad.clone() for n, p in own.items() if p.grad is not None}))
    whole = ToyStage(0, 1, tied=tied)
    reference = torch.optim.SGD(whole.parameters(), lr=0.3, momentum=0.9)
    of_whole = dict(whole.named_parameters(remove_duplicate=False))
    engine = PipelineEngine(
        stages, pipeline, optimizer, data_parallel_group=copies, schedule=schedule, normalize=normalize, max_grad_norm=clip
    )
    number = 1 if copies is None else dist.get_world_size(copies)
    mine = 0 if copies is None else dist.get_rank(copies)
    for step, lengths in enumerate(STEPS):
        count = 8 if step == 0 else 4
        if schedule == "dualpipev":
            count = 8
        batches = []
        for one in range(number):
            ids, cu_seqlens = batch_of(10 * step + one, lengths[one:] + lengths[:one])
            batches.append((ids, cu_seqlens, masked(ids, step + 3 * one)))
        ids, cu_seqlens, labels = batches[mine]
        result = engine.train_batch(ids, cu_seqlens, sft_loss, labels=labels, num_micro_batches=count)
        reference.zero_grad()
        losses = [reference_loss(whole, *batch, count, normalize) for batch in batches]
        counts = [(token_losses(torch.zeros(len(b[0]), V), b[2], b[1])[1]).sum() for b in batches]
        shares = [c / sum(counts) for c in counts] if normalize == "tokens" else [1 / number] * number
        torch.stack([loss * share for loss, share in zip(losses, shares, strict=True)]).sum().backward()
        norm = nn.utils.clip_grad_norm_(whole.parameters(), clip) if clip is not None else None
        assert (result is not None) == engine.is_last
        if result is not None:
            torch.testing.assert_close(result[0], losses[mine].detach(), rtol=1e-5, atol=1e-6)
            assert result[0].dtype == torch.float32
            assert [s["tokens"] for s in result[1]] == [
                sum(lengths_of(cu_seqlens)[a:b]) for a, b in itertools.pairwise(cut(lengths_of(cu_seqlens), count))
            ]
        if norm is not None:
            assert abs(engine.last_grad_norm - float(norm)) < 1e-4 * float(norm), (engine.last_grad_norm, norm)
        assert gradients.keys() == own.keys()
        for name, gradient in gradients.items():
            expected = of_whole[name].grad
            torch.testing.assert_close(gradient, expected, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{schedule} {n}: {m}")
        reference.step()
        assert all(parameter.grad is None for parameter in own.values())
    for name, parameter in own.items():
        torch.testing.assert_close(parameter, of_whole[name], rtol=2e-4, atol=1e-5, msg=lambda m, n=name: f"{schedule} {n}: {m}")


def lengths_of(cu_seqlens: Tensor) -> list[int]:
    return (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()


def cases() -> Iterator[tuple[Any, ...]]:
    for schedule in SCHEDULES:
        yield trains, schedule, "micro_batches", False, None
        yield trains, schedule, "tokens", True, 0.05


def run(case: Any, *arguments: Any) -> None:
    case(*arguments)


if __name__ == "__main__":
    run_cases(run, cases())
