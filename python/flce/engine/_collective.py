"""Steps that all ranks of a group take, or none."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from flce.engine._replacement import partial, replacement
from flce.errors import CheckpointError, PipelineError

T = TypeVar("T")
Group = dist.ProcessGroup | None


def rank_of(group: Group) -> int:
    """0 where torch.distributed is not initialised: a process alone."""
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


def size_of(group: Group) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def gather(group: Group, value: T) -> list[T]:
    """A picklable value of every rank, on every rank."""
    if size_of(group) == 1:
        return [value]
    values: list[Any] = [None] * size_of(group)
    dist.all_gather_object(values, value, group=group)
    return values


def step(groups: Sequence[Group], action: Callable[[], T], kind: type[CheckpointError] | type[PipelineError] = CheckpointError) -> T:
    """Returns the result of `action`, once it has succeeded on every rank of the groups: a grid's rows and then its columns reach all of
    it. Its error on one rank is raised on all, as one of `kind` on the others."""
    error: Exception | None = None
    result: Any = None
    try:
        result = action()
    except Exception as raised:
        error = raised
    message = None if error is None else f"{type(error).__name__}: {error}"
    stage = getattr(error, "stage", None)
    for group in groups:
        told = gather(group, (message, stage))
        where = next((rank for rank, (said, _) in enumerate(told) if said is not None), None)
        if message is None and where is not None:
            message, stage = f"rank {where} of {len(told)}: {told[where][0]}", told[where][1]
    if error is not None:
        raise error
    if message is not None:
        said = f"nothing was done, as another rank failed: {message}"
        raise PipelineError(said, stage) if kind is PipelineError else kind(said)
    return result  # type: ignore[no-any-return]


def write_together(
    groups: Sequence[Group],
    target: str | os.PathLike[str],
    *,
    overwrite: bool,
    write: Callable[[Path], object],
    finish: Callable[[Path], object],
) -> None:
    """Makes a folder of which every rank of the groups writes a part, and the first rank of all finishes it and gives it its name. An error
    of one rank is raised on all, and nothing is left."""
    with contextlib.ExitStack() as stack:
        first = not any(rank_of(group) for group in groups)
        step(groups, lambda: stack.enter_context(replacement(target, overwrite=overwrite)) if first else None)
        folder = partial(Path(os.path.realpath(target)))

        def write_own() -> None:
            try:
                write(folder)
            except OSError as error:
                where = "" if folder.is_dir() else "; is it on a file system that all ranks share?"
                raise CheckpointError(f"{folder} was not written: {error}{where}") from error

        def commit() -> None:
            if first:
                finish(folder)
                stack.close()

        step(groups, write_own)
        step(groups, commit)
