"""A checkpoint that every rank writes its own stages' files of."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from flce.engine._checkpoint_files import Layout, along, files_of_stage, write_index
from flce.engine._collective import gather, step, write_together
from flce.engine._plan import classifier_of
from flce.engine._replacement import copy_file, write_text
from flce.engine._safetensors import NAMES_OF_DTYPES, Entry, write_file
from flce.engine._stage import Stage
from flce.errors import ArgumentError, CheckpointError


def save_stage(
    stage: Stage | Sequence[Stage],
    directory: str | os.PathLike[str],
    *,
    group: dist.ProcessGroup | None = None,
    data_parallel_group: dist.ProcessGroup | None = None,
    shards_per_stage: int = 1,
    config: Any = None,
    files_from: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a checkpoint as `flce-shard-checkpoint` makes it: every rank its own stages' files, and rank 0 of the group the index when all
    are there. Every rank of the pipeline calls it, and of every data-parallel copy. `directory` comes into being whole or not at all, and
    an error on one rank is raised on all.

    Args:
        stage: this rank's stage, or stages.
        directory: on a file system that all ranks share.
        group: the pipeline's ranks. None: all ranks, or this process alone where torch.distributed is not initialised.
        data_parallel_group: the ranks that have copies of these stages; the first of them writes.
        shards_per_stage: files of a stage, balanced by bytes.
        config: a config of transformers, written as config.json. None: the stage's own `config`, if it has one.
        files_from: a folder whose other files are copied along: tokenizer, generation config.
        overwrite: replace a checkpoint that `directory` has; it is valid until the new one is complete.

    Raises ArgumentError (stages that do not make a model, tied weights that differ, a directory in use), CheckpointError.
    """
    stages = [stage] if isinstance(stage, Stage) else list(stage)

    def save() -> None:
        own = step([group], lambda: [_part_of(one, shards_per_stage) for one in stages])
        everything = [part for parts in gather(group, [part for part, _ in own]) for part in parts]
        layout = layout_of(everything)

        def write(folder: Path) -> None:
            for _, files in own:
                for file, entries in files.items():
                    write_file(folder / file, entries)

        def finish(folder: Path) -> None:
            listed = [each for part in everything for each in part.tensors]
            absent = {file for _, file, *_ in listed if not (folder / file).is_file()}
            if absent:
                raise CheckpointError(f"{folder} has no {min(absent)}, which another rank wrote; ranks have to share a file system")
            _write_along(folder, stages[0], config, files_from)
            write_index(folder, listed, layout)

        write_together([group], directory, overwrite=overwrite, write=write, finish=finish)

    groups = [group] if data_parallel_group is None else [group, data_parallel_group]
    step(groups, lambda: save() if data_parallel_group is None or dist.get_rank(data_parallel_group) == 0 else None)


@dataclass(frozen=True)
class Part:
    """Facts that a rank tells of one of its stages."""

    stage: int
    num_stages: int
    starts: tuple[int, ...] | None
    tensors: tuple[tuple[str, str, int, int], ...]  #: name, file, elements and bytes of each
    tied: str | None  #: the name of its copy of a tied weight
    tied_digest: str | None


def _part_of(stage: Stage, num_files: int) -> tuple[Part, dict[str, list[Entry]]]:
    """Facts of a stage, and its files: a weight that has two names, as a tied one of a lone stage, has the first of them there."""
    names: dict[int, str] = {}
    entries = []
    for name, tensor in stage.state_dict(keep_vars=True).items():
        if type(tensor).__name__ == "DTensor":
            raise ArgumentError(f"{name!r} of stage {stage.stage} is sharded over ranks (DTensor); gather it before it is saved")
        if tensor.is_meta or tensor.dtype not in NAMES_OF_DTYPES:
            raise ArgumentError(f"{name!r} of stage {stage.stage} is {tensor.dtype} on {tensor.device}; it cannot be saved")
        if names.setdefault(id(tensor), name) == name:
            entries.append(Entry(name, tensor.dtype, tuple(tensor.shape), tensor.detach))
    tied, plan = names.get(id(stage.tied_weight)), getattr(stage, "plan", None)
    digest = next((entry.digest() for entry in entries if entry.name == tied), None)
    files = files_of_stage(stage.stage, stage.num_stages, entries, num_files)
    tensors = tuple((e.name, file, e.num_elements, e.num_bytes) for file, held in files.items() for e in held)
    return Part(stage.stage, stage.num_stages, plan and tuple(plan.starts), tensors, tied, digest), files


def layout_of(parts: Sequence[Part]) -> Layout:
    """ArgumentError where the stages of all ranks do not make one model."""
    counts, starts = {part.num_stages for part in parts}, {part.starts for part in parts}
    if len(counts) != 1 or len(starts) != 1:
        raise ArgumentError(f"the ranks' stages are of different models: num_stages {sorted(counts)}, layers {starts}")
    (count,), numbers = counts, sorted(part.stage for part in parts)
    if numbers != list(range(count)):
        raise ArgumentError(f"the group's ranks have the stages {numbers}; they must be 0 to {count - 1}, each once")
    tied = [part for part in sorted(parts, key=lambda part: part.stage) if part.tied is not None]
    if len({part.tied_digest for part in tied}) > 1:
        raise ArgumentError(
            f"{' and '.join(repr(part.tied) for part in tied)} are copies of one weight, and differ. Their gradients were not summed, or "
            "one was changed alone; make them equal first"
        )
    copies = {part.tied: tied[0].tied for part in tied[1:] if part.tied and tied[0].tied and part.tied != tied[0].tied}
    names = [name for part in parts for name, *_ in part.tensors]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ArgumentError(f"several stages have {twice[:4]}; a parameter belongs to one stage, and a copy needs a name of its own")
    return Layout(count, next(iter(starts)), copies)


def _write_along(folder: Path, stage: Stage, config: Any, files_from: str | os.PathLike[str] | None) -> None:
    for name in along(Path(files_from))[0] if files_from is not None else ():
        copy_file(Path(files_from or "") / name, folder / name)
    config = getattr(stage, "config", None) if config is None else config
    if config is None:
        return
    config = copy.deepcopy(config)
    config.dtype = stage.dtype
    if getattr(stage, "critic", False):
        config.num_labels = 1
        config.architectures = list(map(classifier_of, config.architectures or ())) or None
    write_text(folder / "config.json", config.to_json_string())
