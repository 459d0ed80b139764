"""A small model in stages, in which a token takes in the mean of the tokens before it: a sequence that was cut gives other numbers."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_support import generator
from torch import Tensor, nn

from flce.engine import PackedBatch, PipelineEngine, Stage
from flce.engine._microbatches import cut
from flce.engine._schedules import SINGLE, stages_of

V, D, LAYERS = 53, 16, 8


class ToyStage(Stage):
    """Layers of a residual model: stage `stage` of `num_stages` has every layer from LAYERS·stage/num_stages on. rows: of the head."""

    def __init__(self, stage: int, num_stages: int, *, tied: bool = False, rows: int = V, softcap: float = 0.0) -> None:
        super().__init__()
        self.stage, self.num_stages = stage, num_stages
        self.hidden_size, self.dtype = D, torch.float32
        self.softcap = softcap
        made = generator(5)
        embedding = torch.randn(V, D, generator=made)
        layers = torch.randn(LAYERS, 2, D, D, generator=made) / 4
        head = embedding if tied else torch.randn(rows, D, generator=made) / 4
        self.numbers = [n for n in range(LAYERS) if n * num_stages // LAYERS == stage]
        self.layers = nn.ParameterDict({f"{n}": nn.Parameter(layers[n].clone()) for n in self.numbers})
        if self.is_first:
            self.embedding = nn.Parameter(embedding.clone())
        if self.is_last:
            self.head = nn.Linear(D, rows, bias=False)
            self.head.weight = nn.Parameter(head.clone())
        self.tied = tied
        if tied and num_stages == 1:
            self.head.weight = self.embedding

    @property
    def tied_weight(self) -> nn.Parameter | None:  # type: ignore[override]
        if not self.tied or not (self.is_first or self.is_last):
            return None
        return self.embedding if self.is_first else self.head.weight

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        x = self.embedding[x] if self.is_first else x
        for n in self.numbers:
            mixed = [part.cumsum(0) / torch.arange(1, len(part) + 1)[:, None] for part in x.split(batch.lengths)]
            own, before = self.layers[f"{n}"]
            x = x + torch.tanh(x @ own + torch.cat(mixed) @ before + torch.sin(batch.position_ids)[:, None])
        return F.layer_norm(x, (D,)) if self.is_last else x


def names_of(stage: ToyStage) -> dict[str, nn.Parameter]:
    """Parameters by the names that they have in the whole model."""
    return dict(stage.named_parameters())


def batch_of(seed: int, lengths: list[int]) -> tuple[Tensor, Tensor]:
    made = generator(seed)
    ids = torch.randint(0, V, (sum(lengths),), generator=made)
    return ids, F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


def token_losses(logits: Tensor, labels: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of every token that has a target, and which tokens these are [T]: by torch alone."""
    bounds = cu_seqlens.tolist()
    targets = torch.full_like(labels, -100)
    for begin, end in itertools.pairwise(bounds):
        targets[begin : end - 1] = labels[begin + 1 : end]
    return F.cross_entropy(logits, targets, reduction="none"), targets != -100


def whole_batch(stage: ToyStage, ids: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Hidden states of the whole model, on a batch that is not cut."""
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
    return stage(ids, PackedBatch.of(lengths, ids.device))


def sft_loss(output: Any, packed_input_ids: Tensor, cu_seqlens: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return output.cross_entropy(labels, shift=1), {"tokens": packed_input_ids.shape[0], "sequences": cu_seqlens.shape[0] - 1}


# A batch of every step, of its own shapes.
STEPS = ([3, 9, 4, 5, 7, 2, 6, 8], [11, 2, 2, 6, 1, 3, 3, 9, 5], [4, 4, 1, 12, 2, 7, 3, 10])


def my_stages(schedule: str, group: Any, **options: Any) -> list[ToyStage]:
    size = dist.get_world_size(group)
    num_stages = size if schedule in SINGLE else 2 * size
    return [ToyStage(s, num_stages, **options) for s in stages_of(schedule, dist.get_rank(group), size, num_stages)]


def parameters(stages: list[ToyStage]) -> dict[str, nn.Parameter]:
    return {name: parameter for stage in stages for name, parameter in stage.named_parameters()}


def reference_loss(whole: ToyStage, ids: Tensor, cu_seqlens: Tensor, labels: Tensor, count: int, normalize: str) -> Tensor:
    hidden = whole_batch(whole, ids, cu_seqlens)
    losses, counted = token_losses(hidden @ whole.head.weight.t(), labels, cu_seqlens)
    if normalize == "tokens":
        return losses[counted].mean()
    return mean_of_means(losses, counted, cu_seqlens, count)


def mean_of_means(losses: Tensor, counted: Tensor, cu_seqlens: Tensor, count: int) -> Tensor:
    bounds = cu_seqlens[list(cut(lengths_of(cu_seqlens), count))].tolist()
    return torch.stack([losses[a:b].sum() / counted[a:b].sum().clamp(min=1) for a, b in itertools.pairwise(bounds)]).mean()


def masked(ids: Tensor, seed: int) -> Tensor:
    """Labels of which some do not count."""
    keep = torch.rand(ids.shape, generator=generator(seed)) > 0.3
    return torch.where(keep, ids, -100)


def lengths_of(cu_seqlens: Tensor) -> list[int]:
    lengths: list[int] = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
    return lengths


def made(schedule: str, options: dict[str, Any] | None = None, **of_stage: Any) -> tuple[PipelineEngine, dict[str, nn.Parameter], ToyStage]:
    """An engine on toy stages, its parameters, and the whole model."""
    stages = my_stages(schedule, None, **of_stage)
    own = parameters(stages)
    optimizer = torch.optim.SGD(own.values(), lr=0.5)
    return PipelineEngine(stages, None, optimizer, schedule=schedule, **(options or {})), own, ToyStage(0, 1, **of_stage)


def expect(engine: PipelineEngine, result: Any, expected: Tensor) -> None:
    assert (result is None) != engine.is_last
    if result is not None:
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
