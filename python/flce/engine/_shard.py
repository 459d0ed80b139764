"""Checkpoints cut into a file (or several) a stage, and back, without a tensor in memory."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flce.engine._checkpoint_files import (
    INDEX_NAME,
    SINGLE_NAME,
    TIED,
    Checkpoint,
    Family,
    Layout,
    family_of,
    open_checkpoint,
    plan_from_headers,
    stage_file,
)
from flce.engine._plan import StagePlan, balance
from flce.engine._replacement import Replacement, check_target, copy_file, write_text
from flce.engine._safetensors import TensorEntry, check_equal, verify_file, write_file
from flce.errors import ArgumentError, CheckpointError

#: called with what is being done ("copying"), the bytes done since the last call, and the bytes that there are to do
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class OutputFile:
    name: str
    entries: tuple[TensorEntry, ...]
    stage: int | None = None

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)


@dataclass(frozen=True)
class Conversion:
    """Files to write: `files` of tensors of `source`, an index where there are several files or stages, and the files in `copied`."""

    source: Checkpoint
    files: tuple[OutputFile, ...]
    metadata: dict[str, str]
    layout: Layout | None = None
    copied: tuple[str, ...] = ()
    left_behind: tuple[str, ...] = field(default=())

    @property
    def total_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def index(self) -> dict[str, Any] | None:
        if self.layout is None and len(self.files) == 1:
            return None
        entries = {entry.name: (entry, file.name) for file in self.files for entry in file.entries}
        metadata: dict[str, Any] = {
            "total_parameters": sum(entry.num_elements for entry, _ in entries.values()),
            "total_size": sum(entry.num_bytes for entry, _ in entries.values()),
        }
        if self.layout is not None:
            metadata["flce"] = self.layout.to_json()
        return {"metadata": metadata, "weight_map": {name: entries[name][1] for name in sorted(entries)}}

    def report(self, target: str | os.PathLike[str]) -> dict[str, Any]:
        """The report that the command prints as JSON: sizes are bytes of tensors, without headers."""
        told: dict[str, Any] = {"source": os.fspath(self.source.folder), "target": os.fspath(target), "total_bytes": self.total_bytes}
        files = [{"file": file.name, "tensors": len(file.entries), "bytes": file.num_bytes, "stage": file.stage} for file in self.files]
        if self.layout is not None and self.layout.starts is not None:
            starts = self.layout.starts
            told["stages"] = [
                {
                    "stage": stage,
                    "layers": [starts[stage], starts[stage + 1] - 1],
                    "tensors": sum(len(file.entries) for file in self.files if file.stage == stage),
                    "bytes": sum(file.num_bytes for file in self.files if file.stage == stage),
                }
                for stage in range(self.layout.num_stages)
            ]
            told["copies"] = self.layout.copies
        return told | {"files": files, "copied": list(self.copied), "left_behind": list(self.left_behind)}


def natural(name: str) -> list[tuple[int, str]]:
    """A sorting key that puts layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def own_entries(checkpoint: Checkpoint) -> dict[str, TensorEntry]:
    """The tensors of a checkpoint without the copies that sharding added. CheckpointError where a copy differs from what it copies."""
    entries = checkpoint.entries()
    for copy, origin in (checkpoint.layout.copies if checkpoint.layout else {}).items():
        if copy not in entries or origin not in entries:
            raise CheckpointError(f"{checkpoint.folder}: {copy!r} is said to copy {origin!r}, and one of them is not there")
        check_equal(entries[copy], entries[origin], "the index says that one copies the other")
        del entries[copy]
    return dict(sorted(entries.items(), key=lambda item: natural(item[0])))


def plan_sharding(source: Checkpoint, num_stages: int, shards_per_stage: int = 1) -> Conversion:
    """ArgumentError: a number of stages or shards that the model does not have, a tensor of no stage."""
    family = family_of(source)
    entries = own_entries(source)
    plan = plan_from_headers(family, entries, num_stages)
    of_stage, copies = assign(family, plan, entries)
    files = []
    for stage, held in enumerate(of_stage):
        if not 1 <= shards_per_stage <= len(held):
            raise ArgumentError(f"shards_per_stage is {shards_per_stage}; stage {stage} has {len(held)} tensors, so 1 to {len(held)} files")
        starts = balance([entry.num_bytes for entry in held], 0, 0, shards_per_stage)
        for shard in range(shards_per_stage):
            name = stage_file(stage, num_stages, shard, shards_per_stage)
            files.append(OutputFile(name, in_file_order(held[starts[shard] : starts[shard + 1]]), stage))
    return _conversion(source, files, Layout(num_stages, plan.starts, copies))


def assign(family: Family, plan: StagePlan, entries: Mapping[str, TensorEntry]) -> tuple[list[list[TensorEntry]], dict[str, str]]:
    """The tensors of each stage, and which of them are copies. A tied weight is there under the embedding's name on the first stage and
    under the output layer's on the last, so each reads its own files alone."""
    of_stage: list[list[TensorEntry]] = [[] for _ in range(plan.num_stages)]
    last = plan.num_stages - 1
    names = plan.names
    by_canonical = {family.canonical(name): entry for name, entry in entries.items()}
    copies: dict[str, str] = {}
    for canonical, entry in by_canonical.items():
        if plan.tied and canonical in (names.embedding, names.head):
            of_stage[0 if canonical == names.embedding else last].append(entry)
        else:
            of_stage[plan.stages_of(canonical)[0]].append(entry)
    if plan.tied and names.embedding in by_canonical and names.head in by_canonical:
        check_equal(by_canonical[names.embedding], by_canonical[names.head], TIED)
    elif plan.tied and last > 0 and not any(canonical.startswith("score.") for canonical in by_canonical):  # a critic has no such head
        here, there = (0, last) if names.embedding in by_canonical else (last, 0)
        origin = by_canonical[names.embedding if here == 0 else names.head]
        copy = names.head if here == 0 else names.embedding.removeprefix(family.prefix)
        of_stage[there].append(dataclasses.replace(origin, name=copy))
        copies[copy] = origin.name
    return of_stage, copies


def plan_merging(source: Checkpoint, max_shard_bytes: int) -> Conversion:
    """CheckpointError for a checkpoint that is not cut into stages."""
    if source.layout is None:
        raise CheckpointError(
            f"{source.folder} is not cut into stages (its index, if it has one, does not name any): there is nothing to merge"
        )
    if max_shard_bytes < 1:
        raise ArgumentError(f"max_shard_size is {max_shard_bytes} bytes; it must be positive")
    shards: list[list[TensorEntry]] = [[]]
    filled = 0
    for entry in own_entries(source).values():
        if shards[-1] and filled + entry.num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.num_bytes
    count = len(shards)
    names = [SINGLE_NAME] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    return _conversion(source, [OutputFile(name, in_file_order(shard)) for name, shard in zip(names, shards, strict=True)], None)


def in_file_order(entries: Sequence[TensorEntry]) -> tuple[TensorEntry, ...]:
    """Wide elements first, so that each tensor's data is aligned; else the order that they have."""
    return tuple(sorted(entries, key=lambda entry: -(entry.num_bytes // entry.num_elements if entry.num_elements else 0)))


def _conversion(source: Checkpoint, files: list[OutputFile], layout: Layout | None) -> Conversion:
    copied, left = source.along()
    return Conversion(source, tuple(files), source.metadata(), layout, tuple(copied), tuple(left))


def write(
    conversion: Conversion,
    target: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    verify: bool = False,
    progress: Progress | None = None,
) -> None:
    """Writes a conversion: whole or not at all. CheckpointError for what cannot be read or written, ArgumentError for a target that must
    not be written to."""
    source, real = Path(os.path.realpath(conversion.source.folder)), Path(os.path.realpath(target))
    if source == real or real in source.parents or source in real.parents:
        raise ArgumentError(f"{target} and {conversion.source.folder} must be folders of which neither is in the other")
    check_target(real, overwrite=overwrite)
    with Replacement(target, overwrite=overwrite) as replacement:
        free = shutil.disk_usage(replacement.folder).free
        if conversion.total_bytes > free:
            raise CheckpointError(f"{real.parent} has {free} bytes free; the checkpoint takes {conversion.total_bytes}")
        try:
            _write_into(conversion, replacement.folder, verify, progress)
        except OSError as error:
            raise CheckpointError(f"{target} was not written: {error}") from error
        replacement.commit()


def _write_into(conversion: Conversion, folder: Path, verify: bool, progress: Progress | None) -> None:
    def advance(what: str) -> Callable[[int], None]:
        return lambda count: progress(what, count, conversion.total_bytes) if progress is not None else None

    digests = {}
    for file in conversion.files:
        digests[file.name] = write_file(folder / file.name, file.entries, conversion.metadata, digests=verify, advance=advance("copying"))
    for name in conversion.copied:
        copy_file(conversion.source.folder / name, folder / name)
    for file in conversion.files if verify else ():
        verify_file(folder / file.name, file.entries, digests[file.name], advance=advance("verifying"))
    index = conversion.index()
    if index is not None:
        write_text(folder / INDEX_NAME, json.dumps(index, indent=2) + "\n")


def shard_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    num_stages: int,
    *,
    shards_per_stage: int = 1,
    overwrite: bool = False,
    verify: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Cuts a safetensors checkpoint of Hugging Face's layout into stages: `flce-shard-checkpoint SOURCE TARGET --stages N`.

    Each file of `target` has parameters of one stage only, and each stage `shards_per_stage` files. Stages are those of `plan_stages`.
    `source` may be cut into another number of stages. At most 4 MiB of tensors are in memory. transformers reads `target` as any other
    checkpoint.

    Args:
        overwrite: replace a checkpoint that `target` has; it is valid until the new one is complete.
        verify: read what was written again and compare digests.
        progress: called with what is being done, the bytes since the last call and all bytes.

    Returns the report that the command prints as JSON.
    Raises ArgumentError (numbers and tensors that do not fit the model, a target that is in use), CheckpointError (files).
    """
    conversion = plan_sharding(open_checkpoint(source), num_stages, shards_per_stage)
    write(conversion, target, overwrite=overwrite, verify=verify, progress=progress)
    return conversion.report(target)


def merge_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    verify: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Joins what `shard_checkpoint` or `save_stage` wrote to model.safetensors, or to several files of at most `max_shard_bytes` each (a
    larger tensor has a file of its own) with an index: `flce-shard-checkpoint SOURCE TARGET --merge`. Tensors are those of the original,
    bit for bit. Arguments, result and errors as `shard_checkpoint`'s; CheckpointError for a source that is not cut into stages."""
    conversion = plan_merging(open_checkpoint(source), max_shard_bytes)
    write(conversion, target, overwrite=overwrite, verify=verify, progress=progress)
    return conversion.report(target)
