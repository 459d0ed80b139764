"""Steps that all ranks of a group take, or none."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from flce.engine._replacement import Replacement, write_text
from flce.errors import CheckpointError

T = TypeVar("T")
Group = dist.ProcessGroup | None
_TOKEN = "flce-token"


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


def agree(groups: Sequence[Group], error: BaseException | None) -> None:
    """Raises this rank's error, or a CheckpointError where another rank has one, on every rank of the groups: a grid's rows and then its
    columns reach all of it."""
    message = None if error is None else f"{type(error).__name__}: {error}"
    for group in groups:
        told = gather(group, message)
        where = next((rank for rank, said in enumerate(told) if said is not None), None)
        if message is None and where is not None:
            message = f"rank {where} of {len(told)}: {told[where]}"
    if error is not None:
        raise error
    if message is not None:
        raise CheckpointError(f"nothing was done, as another rank failed: {message}")


def step(groups: Sequence[Group], action: Callable[[], T]) -> T:
    """Returns the result of `action`, once it has succeeded on every rank of the groups. Its error on one of them is raised on all."""
    error: BaseException | None = None
    result: Any = None
    try:
        result = action()
    except Exception as raised:
        error = raised
    agree(groups, error)
    return result  # type: ignore[no-any-return]


@dataclass(frozen=True)
class SharedFolder:
    """A folder in the making that the ranks of all groups write into. `commit` gives it its name."""

    groups: Sequence[Group]
    folder: Path
    replacement: Replacement | None  #: on the first rank of all

    @property
    def is_first(self) -> bool:
        return self.replacement is not None

    def commit(self, action: Callable[[Path], object]) -> None:
        """Runs `action` on the first rank when the others have written, then gives the folder its name. An error is raised on all ranks."""

        def finish() -> None:
            if self.replacement is not None:
                (self.folder / _TOKEN).unlink()
                action(self.folder)
                self.replacement.commit()

        step(self.groups, finish)


@contextlib.contextmanager
def shared_folder(groups: Sequence[Group], target: str | os.PathLike[str], *, overwrite: bool) -> Iterator[SharedFolder]:
    """A `Replacement` for `target` that the first rank of all groups makes. CheckpointError on all ranks where one does not see it."""
    with contextlib.ExitStack() as stack:

        def begin() -> tuple[Replacement, str] | None:
            if any(rank_of(group) for group in groups):
                return None
            replacement = stack.enter_context(Replacement(target, overwrite=overwrite))
            token = uuid.uuid4().hex
            write_text(replacement.folder / _TOKEN, token)
            return replacement, token

        made = step(groups, begin)
        place = None if made is None else (made[0].folder, made[1])
        for group in groups:
            place = next((told for told in gather(group, place) if told is not None), None)
        assert place is not None
        step(groups, lambda: _wait_for(*place))
        yield SharedFolder(groups, place[0], None if made is None else made[0])


def _wait_for(folder: Path, token: str, seconds: float = 30.0) -> None:
    """Waits until this rank sees the folder that the first one has made; a network's file system may take a moment."""
    until = time.monotonic() + seconds
    while True:
        try:
            if (folder / _TOKEN).read_text() == token:
                return
        except OSError:
            pass
        if time.monotonic() > until:
            raise CheckpointError(f"{folder}, which the first rank has made, is not on this rank's file system; ranks have to share one")
        time.sleep(0.1)
