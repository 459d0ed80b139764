"""A checkpoint that every rank writes its own stages' files of."""

from __future__ import annotations

import copy
import ctypes
import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from flce.engine._checkpoint_files import INDEX_NAME, Layout, along, stage_file
from flce.engine._collective import Group, agree, gather, shared_folder, step
from flce.engine._plan import balance
from flce.engine._replacement import copy_file, write_text
from flce.engine._safetensors import DTYPES, TensorEntry, encode_header, write_all
from flce.engine._stage import Stage
from flce.errors import ArgumentError

_NAMES_OF_DTYPES = {dtype: name for name, dtype in DTYPES.items()}


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
    groups = [group] if data_parallel_group is None else [group, data_parallel_group]
    error: Exception | None = None
    if data_parallel_group is None or dist.get_rank(data_parallel_group) == 0:
        try:
            _Saving(stages, Path(directory), group, shards_per_stage).run(config, files_from, overwrite)
        except Exception as raised:
            error = raised
    agree(groups, error)


@dataclass(frozen=True)
class Part:
    """Facts that a rank tells of one of its stages."""

    stage: int
    num_stages: int
    starts: tuple[int, ...] | None
    names: tuple[str, ...]
    tied: str | None  #: the name of its copy of a tied weight
    tied_digest: str | None


class _Saving:
    def __init__(self, stages: list[Stage], directory: Path, group: Group, shards_per_stage: int):
        self.stages = stages
        self.directory = directory
        self.group = group
        self.shards_per_stage = shards_per_stage

    def run(self, config: Any, files_from: str | os.PathLike[str] | None, overwrite: bool) -> None:
        own = step([self.group], lambda: [part_of(stage) for stage in self.stages])
        layout = layout_of([part for parts in gather(self.group, own) for part in parts])
        with shared_folder([self.group], self.directory, overwrite=overwrite) as shared:
            files = step([self.group], lambda: self._write(shared.folder))
            entries = [entry for told in gather(self.group, files) for entry in told]

            def finish(folder: Path) -> None:
                write_along(folder, self.stages[0], config, files_from)
                write_index(folder, layout, entries)

            shared.commit(finish)

    def _write(self, folder: Path) -> list[tuple[str, str, int, int]]:
        """This rank's files. Returns name, file, elements and bytes of each tensor."""
        written = []
        for stage in self.stages:
            tensors = list(tensors_of(stage).items())
            if not 1 <= self.shards_per_stage <= len(tensors):
                raise ArgumentError(
                    f"shards_per_stage is {self.shards_per_stage}; stage {stage.stage} has {len(tensors)} tensors for as many files"
                )
            starts = balance([tensor.nbytes for _, tensor in tensors], 0, 0, self.shards_per_stage)
            for shard in range(self.shards_per_stage):
                file = stage_file(stage.stage, stage.num_stages, shard, self.shards_per_stage)
                held = tensors[starts[shard] : starts[shard + 1]]
                write_tensors(folder / file, held)
                written += [(name, file, tensor.numel(), tensor.nbytes) for name, tensor in held]
        return written


def tensors_of(stage: Stage) -> dict[str, Tensor]:
    """A stage's part of the model's state_dict: a weight that has two names there, as a tied one of a lone stage, under the first."""
    found: dict[str, Tensor] = {}
    known: set[int] = set()
    for name, tensor in stage.state_dict(keep_vars=True).items():
        if type(tensor).__name__ == "DTensor":
            raise ArgumentError(f"{name!r} of stage {stage.stage} is sharded over ranks (DTensor); gather it before it is saved")
        if tensor.is_meta or tensor.dtype not in _NAMES_OF_DTYPES:
            raise ArgumentError(f"{name!r} of stage {stage.stage} is {tensor.dtype} on {tensor.device}; it cannot be saved")
        if id(tensor) not in known:
            known.add(id(tensor))
            found[name] = tensor.detach()
    return found


def part_of(stage: Stage) -> Part:
    tensors = tensors_of(stage)
    tied = stage.tied_weight
    name = None if tied is None else next(n for n, t in stage.state_dict(keep_vars=True).items() if t is tied)
    digest = None if name is None else hashlib.sha256(bytes_of(tensors[name])).hexdigest()
    plan = getattr(stage, "plan", None)
    return Part(stage.stage, stage.num_stages, None if plan is None else tuple(plan.starts), tuple(tensors), name, digest)


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
    names = [name for part in parts for name in part.names]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ArgumentError(f"several stages have {twice[:4]}; a parameter belongs to one stage, and a copy needs a name of its own")
    return Layout(count, next(iter(starts)), copies)


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes on the host. The view keeps them alive, also where they are a copy that nothing else has."""
    owner = tensor.detach().cpu().contiguous()
    if owner.nbytes == 0:
        return memoryview(b"")
    array = (ctypes.c_char * owner.nbytes).from_address(owner.data_ptr())
    array.owner = owner  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def write_tensors(target: Path, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """A safetensors file, of which one tensor at a time is on the host."""
    ordered = sorted(tensors, key=lambda item: -item[1].element_size())
    entries = [TensorEntry(name, _NAMES_OF_DTYPES[t.dtype], tuple(t.shape), target, 0, t.nbytes) for name, t in ordered]
    with open(target, "wb", buffering=0) as out:
        write_all(out, memoryview(encode_header(entries, {"format": "pt"})))
        for _, tensor in ordered:
            write_all(out, bytes_of(tensor))
        os.fsync(out.fileno())


def write_along(folder: Path, stage: Stage, config: Any, files_from: str | os.PathLike[str] | None) -> None:
    if files_from is not None:
        for name in along(Path(files_from))[0]:
            copy_file(Path(files_from) / name, folder / name)
    config = getattr(stage, "config", None) if config is None else config
    if config is None:
        return
    config = copy.deepcopy(config)
    config.dtype = stage.dtype
    if getattr(stage, "critic", False):
        config.num_labels = 1
        config.architectures = [
            re.sub("ForCausalLM$|LMHeadModel$", "ForSequenceClassification", n) for n in config.architectures or []
        ] or None
    write_text(folder / "config.json", config.to_json_string())


def write_index(folder: Path, layout: Layout, entries: Sequence[tuple[str, str, int, int]]) -> None:
    sizes = {"total_parameters": sum(entry[2] for entry in entries), "total_size": sum(entry[3] for entry in entries)}
    content = {"metadata": sizes | {"flce": layout.to_json()}, "weight_map": {name: file for name, file, *_ in sorted(entries)}}
    write_text(folder / INDEX_NAME, json.dumps(content, indent=2) + "\n")
