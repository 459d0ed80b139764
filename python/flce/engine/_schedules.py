"""torch's schedules by their names here, and where each one has a pipeline's stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.pipelining import schedules as torchs

from flce import errors

#: torch's classes by name. The first two have one stage a rank; the others several, rank r of R having the stages r, R + r, 2R + r, …
SCHEDULES = {
    "gpipe": torchs.ScheduleGPipe,
    "1f1b": torchs.Schedule1F1B,
    "interleaved_1f1b": torchs.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": torchs.ScheduleInterleavedZeroBubble,
}
SINGLE = ("gpipe", "1f1b")


def stages_of(schedule: str, rank: int, num_ranks: int, num_stages: int) -> tuple[int, ...]:
    """The numbers of a rank's stages, in order."""
    return (rank,) if schedule in SINGLE else tuple(range(rank, num_stages, num_ranks))


def check_placement(schedule: str, stages: tuple[int, ...], num_stages: int, rank: int, num_ranks: int) -> None:
    """ArgumentError where a rank has other stages than the schedule runs there."""
    fits = num_stages == num_ranks if schedule in SINGLE else num_stages > num_ranks > 1 and num_stages % num_ranks == 0
    if not fits or stages != stages_of(schedule, rank, num_ranks, num_stages):
        wanted = "one stage a rank, each its own" if schedule in SINGLE else "two or more stages a rank, r, R + r, … on rank r of R"
        raise errors.ArgumentError(
            f"stage: rank {rank} of {num_ranks} was given stages {list(stages)} of {num_stages}; schedule {schedule!r} takes {wanted}"
        )


def make(schedule: str, stages: list[Any], num_micro_batches: int, loss_fn: Callable[..., Any] | None) -> Any:
    """torch's schedule, whose losses are not scaled; without a loss function one that runs forwards alone, for any number of microbatches.
    ArgumentError for a number of microbatches that it does not take."""
    single = schedule in SINGLE
    made = SCHEDULES[schedule]
    if loss_fn is None:
        made = torchs.ScheduleGPipe if single else torchs.ScheduleLoopedBFS
    elif schedule == "1f1b" and num_micro_batches < stages[0].num_stages:
        made = torchs.ScheduleGPipe  # it has this very order, which torch's 1F1B refuses
    try:
        return made(stages[0] if single else stages, num_micro_batches, loss_fn=loss_fn, scale_grads=False)
    except ValueError as error:
        raise errors.ArgumentError(f"num_micro_batches is {num_micro_batches}, which schedule {schedule!r} refuses: {error}") from error
