"""One rank of a pipeline, under torchrun: every schedule in turn against the unpipelined model. Exits with a failed assertion, or 0.

Each rank builds the whole model from one seed and keeps its own stage's copy, so the reference needs no communication.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_support import default_device, device, generator, run_main
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import flce
from flce.core import _retain

D, V, S, ROWS = 24, 499, 10, 8  # large enough that the engine is asked which gradients it wants
# Schedules before torch 2.7 do not scale gradients.
UNSCALED: dict[str, Any] = {"scale_grads": False} if "scale_grads" in inspect.signature(ScheduleGPipe.__init__).parameters else {}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Stage(nn.Module):
    """A slice of the model: the embedding on the first stage, the head on the last, a layer on each."""

    def __init__(self, first: bool, last: bool) -> None:
        super().__init__()
        if first:
            self.embedding = nn.Embedding(V, D)
        self.layer = Layer()
        if last:
            self.head = nn.Linear(D, V, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.embedding(x) if hasattr(self, "embedding") else x)


def build(stages: int, tied: bool) -> nn.ModuleList:
    torch.manual_seed(11)
    model = nn.ModuleList([Stage(i == 0, i == stages - 1) for i in range(stages)])
    if tied:
        first, last = model[0], model[-1]
        last.head.weight = first.embedding.weight  # type: ignore[union-attr, assignment]
    return model


def unpipelined(model: nn.ModuleList, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and logits of the whole batch, the logits written out."""
    hidden = tokens
    for stage in model:
        hidden = stage(hidden)
    logits = model[-1].head(hidden)  # type: ignore[operator, union-attr]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits


def batch() -> tuple[Tensor, Tensor]:
    made = generator(5)
    tokens = torch.randint(0, V, (ROWS, S), generator=made)
    labels = tokens.clone()
    for row in range(ROWS):
        labels[row, : row % 4 * 3] = -100  # every microbatch has another number of valid labels
    return tokens, labels


def cases() -> Iterator[tuple[Any, int, bool, dict[str, Any]]]:
    for schedule in (ScheduleGPipe, Schedule1F1B):
        for microbatches in (1, 2, 4, 8):
            if schedule is Schedule1F1B and microbatches < dist.get_world_size():
                continue  # 1F1B needs a microbatch for each stage
            yield schedule, microbatches, False, {}
        enough = max(4, dist.get_world_size())
        yield schedule, enough, True, {}
        yield schedule, enough, False, {"accumulate_into_grad": True}
        yield schedule, enough, True, {"accumulate_into_grad": True}


lent: list[bool] = []  # for each forward that retained something, whether in the gradient's memory


def watch_retained() -> None:
    """Layers of any size retain."""
    _retain.LEAST_WORK = 1
    keep = _retain.Retained.keep

    def watch(self: Any, memory: Tensor, **keywords: Any) -> None:
        lent.append(keywords["lent"])
        keep(self, memory, **keywords)

    _retain.Retained.keep = watch  # type: ignore[method-assign]


def check_lent(schedule_type: Any, microbatches: int, what: str) -> None:
    """Each forward lends where one loss waits at a time, but for the first after several; where several wait only the first may. Newer
    torch tries a forward and backward before the schedule's first step, which lends too."""
    assert all(lent), what
    if schedule_type is Schedule1F1B or microbatches == 1:
        assert microbatches - 1 <= len(lent) <= microbatches + 1, f"{what}: {len(lent)} lent"
    else:
        assert len(lent) <= 2, f"{what}: {len(lent)} lent"


def run(schedule_type: Any, microbatches: int, tied: bool, options: dict[str, Any]) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    first, last = rank == 0, rank == world - 1
    whole = build(world, tied)
    module: Any = copy.deepcopy(whole[rank])
    tokens, labels = batch()
    expected, logits = unpipelined(whole, tokens, labels)
    expected.backward()

    loss_fn: Any = flce.PipelineFusedLoss(module.head, impl="flce", shift=1, **options) if last else lambda *_: None
    keys = list(module.state_dict())
    stage = PipelineStage(module, rank, world, default_device())
    schedule = schedule_type(stage, microbatches, loss_fn=loss_fn, **UNSCALED)
    losses: list[Tensor] = []
    if last:
        loss_fn.normalize_by(labels)
    lent.clear()
    schedule.step(*([tokens] if first else []), **({"target": labels, "losses": losses} if last else {}))

    name = f"{schedule_type.__name__}, {microbatches} microbatches, tied={tied}, {options}, rank {rank} of {world}"
    if last and not options and device() == "cpu":  # a GPU's kernels retain in bf16 alone
        check_lent(schedule_type, microbatches, name)
    if tied and first != last:  # on one stage autograd adds up the two parts
        flce.sum_tied_gradient(module.embedding.weight if first else module.head.weight, ends())
    assert list(module.state_dict()) == keys, name
    for (parameter, actual), right in zip(module.named_parameters(), whole[rank].parameters(), strict=True):
        # type: ignore[misc]
        torch.testing.assert_close(actual.grad, right.grad, rtol=1e-4, atol=1e-6, msg=lambda m, p=parameter: f"{name}: {p}: {m}")
    if last:
        torch.testing.assert_close(torch.stack(losses).sum(), expected, msg=name)

    # The stage then serves inference: hidden states out, logits made outside.
    with torch.no_grad():
        forward = ScheduleGPipe(PipelineStage(module, rank, world, default_device()), microbatches)
        hidden = forward.step(*([tokens] if first else []))
        if last:
            torch.testing.assert_close(loss_fn.forward_logits(hidden), logits, msg=name)


_ends: list[Any] = []


def ends() -> Any:
    """The group of the first and the last stage; every rank takes part in making it, once."""
    return _ends[0]


def prepare() -> None:
    watch_retained()
    _ends.append(dist.new_group(sorted({0, dist.get_world_size() - 1})))


if __name__ == "__main__":
    run_main(run, cases, prepare=prepare)
