"""One rank of a pipeline of two stages a rank, under torchrun: schedules that split backward, against the unpipelined model."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from pipeline_worker import UNSCALED, batch, build, unpipelined
from rank_support import run_cases
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

import flce


def run(schedule_type: Any, accumulate_into_grad: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    last = 2 * world - 1
    whole = build(last + 1, False)
    tokens, labels = batch()
    expected, _ = unpipelined(whole, tokens, labels)
    expected.backward()

    numbers = [rank, rank + world] if schedule_type is ScheduleInterleavedZeroBubble else [rank, last - rank]
    modules: dict[int, Any] = {number: copy.deepcopy(whole[number]) for number in numbers}
    for module in modules.values():
        module.zero_grad()
    loss_fn: Any = lambda *_: None  # noqa: E731
    if last in modules:
        loss_fn = flce.PipelineFusedLoss(modules[last].head, impl="flce", accumulate_into_grad=accumulate_into_grad)
        loss_fn.normalize_by(labels)
    stages = [PipelineStage(module, number, last + 1, torch.device("cpu")) for number, module in modules.items()]
    losses: list[Tensor] = []
    arguments = {"target": labels, "losses": losses} if last in modules else {}
    schedule_type(stages, 4, loss_fn=loss_fn, **UNSCALED).step(*([tokens] if 0 in modules else []), **arguments)

    name = f"{schedule_type.__name__}, accumulate_into_grad={accumulate_into_grad}, rank {rank} of {world}"
    for number, module in modules.items():
        for (parameter, actual), right in zip(module.named_parameters(), whole[number].parameters(), strict=True):
            # type: ignore[misc]
            torch.testing.assert_close(actual.grad, right.grad, rtol=1e-4, atol=1e-6, msg=lambda m, p=parameter: f"{name}: {p}: {m}")
    if last in modules:
        torch.testing.assert_close(torch.stack(losses).sum(), expected, msg=name)


if __name__ == "__main__":
    schedules = (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble)
    run_cases(run, [(schedule, accumulate) for schedule in schedules for accumulate in (False, True)])
