"""torch's schedules by their names here, and where each one has a pipeline's stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.pipelining import schedules as torchs

from flce import errors

SINGLE, LOOP, V_SHAPE = "single", "loop", "v"


@dataclass(frozen=True)
class Schedule:
    """A schedule of torch's, and where a rank's stages lie: one stage a rank ("single"); several, rank r having r, R + r, 2R + r, …
    ("loop"); two, r and 2R - 1 - r ("v"), so that the first rank has the last stage."""

    name: str
    class_name: str
    placement: str


SCHEDULES = {
    known.name: known
    for known in (
        Schedule("gpipe", "ScheduleGPipe", SINGLE),
        Schedule("1f1b", "Schedule1F1B", SINGLE),
        Schedule("interleaved_1f1b", "ScheduleInterleaved1F1B", LOOP),
        Schedule("looped_bfs", "ScheduleLoopedBFS", LOOP),
        Schedule("interleaved_zero_bubble", "ScheduleInterleavedZeroBubble", LOOP),
        Schedule("zbv", "ScheduleZBVZeroBubble", V_SHAPE),
        Schedule("dualpipev", "ScheduleDualPipeV", V_SHAPE),
    )
}
# Schedules that run forwards alone, for any number of microbatches.
FORWARD_ONLY = {SINGLE: "gpipe", LOOP: "looped_bfs", V_SHAPE: "zbv"}


def named(name: Any) -> Schedule:
    """ArgumentError for a name that there is not, UnavailableError for a schedule that this torch has not."""
    if name not in SCHEDULES:
        raise errors.ArgumentError(f"schedule is {name!r}; allowed are {', '.join(map(repr, SCHEDULES))}")
    found = SCHEDULES[name]
    if not hasattr(torchs, found.class_name):
        raise errors.UnavailableError(f"schedule {name!r} is torch's {found.class_name}, which torch {torch.__version__} has not")
    return found


def stages_of(schedule: Schedule, rank: int, num_ranks: int, per_rank: int) -> tuple[int, ...]:
    """The numbers of a rank's stages, in order."""
    if schedule.placement == V_SHAPE:
        return (rank, 2 * num_ranks - 1 - rank)
    return tuple(range(rank, num_ranks * per_rank, num_ranks))


def rank_of(schedule: Schedule, stage: int, num_ranks: int) -> int:
    """The rank, counted in the pipeline's group, that has a stage."""
    if schedule.placement == V_SHAPE:
        return min(stage, 2 * num_ranks - 1 - stage)
    return stage % num_ranks


def check_placement(schedule: Schedule, stages: tuple[int, ...], num_stages: int, rank: int, num_ranks: int) -> None:
    """ArgumentError where a rank has other stages than the schedule runs there."""
    per_rank = len(stages)
    allowed = {SINGLE: per_rank == 1, LOOP: per_rank > 1, V_SHAPE: per_rank == 2}[schedule.placement]
    if not allowed:
        wanted = {SINGLE: "one stage", LOOP: "two or more stages", V_SHAPE: "two stages"}[schedule.placement]
        raise errors.ArgumentError(f"stage: rank {rank} was given {per_rank} stages; schedule {schedule.name!r} takes {wanted} a rank")
    expected = stages_of(schedule, rank, num_ranks, per_rank)
    if stages != expected or num_stages != per_rank * num_ranks:
        raise errors.ArgumentError(
            f"stage: rank {rank} of {num_ranks} was given stages {list(stages)} of {num_stages}; schedule {schedule.name!r} has stages "
            f"{list(expected)} of {per_rank * num_ranks} there"
        )


def make(schedule: Schedule, stages: list[Any], num_micro_batches: int, loss_fn: Callable[..., Any] | None) -> Any:
    """torch's schedule, whose losses are not scaled; without a loss function one that runs forwards alone. ArgumentError for a number of
    microbatches that it does not take."""
    if loss_fn is None:
        schedule = SCHEDULES[FORWARD_ONLY[schedule.placement]]
    elif schedule.name == "1f1b" and num_micro_batches < stages[0].num_stages:
        schedule = SCHEDULES["gpipe"]  # gpipe has this very order, which torch's 1F1B refuses
    given = stages[0] if schedule.placement == SINGLE else stages
    try:
        return getattr(torchs, schedule.class_name)(given, num_micro_batches, loss_fn=loss_fn, scale_grads=False)
    except ValueError as error:
        raise errors.ArgumentError(
            f"num_micro_batches is {num_micro_batches}, which schedule {schedule.name!r} refuses: {error}"
        ) from error
