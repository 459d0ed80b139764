"""Checkpoints cut into a file (or several) a stage, and back, a tensor at a time."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flce.engine._checkpoint_files import (
    INDEX_NAME,
    SINGLE_NAME,
    TIED,
    Checkpoint,
    Layout,
    along,
    canonical,
    files_of_stage,
    open_checkpoint,
    prefix_of,
    write_index,
)
from flce.engine._plan import StagePlan, plan_stages
from flce.engine._replacement import copy_file, replacement
from flce.engine._safetensors import Entry, check_equal, write_file
from flce.errors import ArgumentError, CheckpointError


def shard_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    num_stages: int,
    *,
    shards_per_stage: int = 1,
    overwrite: bool = False,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Cuts a safetensors checkpoint of Hugging Face's layout into stages: `flce-shard-checkpoint SOURCE TARGET --stages N`.

    Each file of `target` has parameters of one stage only, and each stage `shards_per_stage` files. Stages are those of `plan_stages`.
    `source` may be cut into another number of stages. One tensor at a time is in memory. transformers reads `target` as any other
    checkpoint.

    Args:
        overwrite: replace a checkpoint that `target` has; it is valid until the new one is complete.
        dry_run: write nothing.

    Returns the report that the command prints: stages, files, copies, and what was copied along and left behind. Raises ArgumentError
    (numbers and tensors that do not fit the model, a target that is in use), CheckpointError (files).
    """
    checkpoint = open_checkpoint(source)
    plan = plan_stages(checkpoint.folder, num_stages)
    of_stage, copies = _assigned(checkpoint, plan)
    layout = Layout(num_stages, plan.starts, copies)
    files: dict[str, list[Entry]] = {}
    stages = []
    for stage, entries in enumerate(of_stage):
        files |= files_of_stage(stage, num_stages, entries, shards_per_stage)
        layers = [plan.starts[stage], plan.starts[stage + 1] - 1]
        stages.append({"stage": stage, "layers": layers, "tensors": len(entries), "bytes": _bytes_of(entries)})
    told = {"stages": stages, "copies": copies}
    return told | _write(checkpoint, files, layout, target, overwrite=overwrite, dry_run=dry_run)


def merge_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Joins what `shard_checkpoint` or `save_stage` wrote to model.safetensors, or to several files of at most `max_shard_bytes` each (a
    larger tensor has a file of its own) with an index: `flce-shard-checkpoint SOURCE TARGET --merge`. Tensors are those of the original,
    bit for bit. Arguments, result and errors as `shard_checkpoint`'s; CheckpointError for a source that is not cut into stages."""
    checkpoint = open_checkpoint(source)
    if checkpoint.layout is None:
        raise CheckpointError(
            f"{checkpoint.folder} is not cut into stages (its index, if it has one, does not name any): there is nothing to merge"
        )
    if max_shard_bytes < 1:
        raise ArgumentError(f"max_shard_bytes is {max_shard_bytes}; it must be positive")
    shards: list[list[Entry]] = [[]]
    for entry in _own_entries(checkpoint).values():
        if shards[-1] and _bytes_of(shards[-1]) + entry.num_bytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(entry)
    count = len(shards)
    names = [SINGLE_NAME] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    files = dict(zip(names, shards, strict=True))
    return _write(checkpoint, files, None, target, overwrite=overwrite, dry_run=dry_run)


def _own_entries(checkpoint: Checkpoint) -> dict[str, Entry]:
    """The tensors of a checkpoint without the copies that sharding added, layer 2 before layer 10. CheckpointError where a copy differs
    from what it copies."""
    entries = checkpoint.entries()
    for copy, origin in (checkpoint.layout.copies if checkpoint.layout else {}).items():
        if copy not in entries or origin not in entries:
            raise CheckpointError(f"{checkpoint.folder}: {copy!r} is said to copy {origin!r}, and one of them is not there")
        check_equal(entries[copy], entries[origin], f"the index of {checkpoint.folder} says that one copies the other")
        del entries[copy]
    return {name: entries[name] for name in sorted(entries, key=lambda name: re.sub(r"\d+", lambda digits: digits[0].zfill(8), name))}


def _assigned(checkpoint: Checkpoint, plan: StagePlan) -> tuple[list[list[Entry]], dict[str, str]]:
    """The tensors of each stage, and which of them are copies. A tied weight is there under the embedding's name on the first stage and
    under the output layer's on the last, so each reads its own files alone."""
    names, last = plan.names, plan.num_stages - 1
    prefix = prefix_of(names, checkpoint.files)
    entries = {canonical(prefix, name): entry for name, entry in _own_entries(checkpoint).items()}
    of_stage: list[list[Entry]] = [[] for _ in range(plan.num_stages)]
    for name, entry in entries.items():
        stages = plan.stages_of(name)
        of_stage[stages[-1] if name == names.head else stages[0]].append(entry)
    for layer in range(plan.starts[-1]):
        if not any(name.startswith(f"{names.layer}{layer}.") for name in entries):
            raise CheckpointError(f"{checkpoint.folder} has no parameters of layer {layer}, and config.json says {plan.starts[-1]} layers")
    if not plan.tied:
        return of_stage, {}
    if names.embedding in entries and names.head in entries:
        check_equal(entries[names.embedding], entries[names.head], TIED)
        return of_stage, {}
    if last == 0 or any(name.startswith("score.") for name in entries):  # a critic has no such head
        return of_stage, {}
    one, other = (names.embedding, names.head) if names.embedding in entries else (names.head, names.embedding)
    if one not in entries:
        raise CheckpointError(f"{checkpoint.folder} has no {names.embedding!r}")
    copy = dataclasses.replace(entries[one], name=other if other == names.head else other.removeprefix(prefix))
    of_stage[last if other == names.head else 0].append(copy)
    return of_stage, {copy.name: entries[one].name}


def _bytes_of(entries: Iterable[Entry]) -> int:
    return sum(entry.num_bytes for entry in entries)


def _write(
    source: Checkpoint,
    files: Mapping[str, Sequence[Entry]],
    layout: Layout | None,
    target: str | os.PathLike[str],
    *,
    overwrite: bool,
    dry_run: bool,
) -> dict[str, Any]:
    """Writes files: whole or not at all, with an index where there are several of them or stages. Returns the report of files."""
    total = sum(map(_bytes_of, files.values()))
    copied, left = along(source.folder)
    told = {
        "source": os.fspath(source.folder),
        "target": os.fspath(target),
        "total_bytes": total,
        "files": [{"file": name, "tensors": len(entries), "bytes": _bytes_of(entries)} for name, entries in files.items()],
        "copied": copied,
        "left_behind": [name for name in left if name not in {INDEX_NAME, *source.files.values()}],
        "dry_run": dry_run,
    }
    if dry_run:
        return told
    origin, real = Path(os.path.realpath(source.folder)), Path(os.path.realpath(target))
    if origin == real or real in origin.parents or origin in real.parents:
        raise ArgumentError(f"{target} and {source.folder} must be folders of which neither is in the other")
    with replacement(target, overwrite=overwrite) as folder:
        free = shutil.disk_usage(folder).free
        if total > free:
            raise CheckpointError(f"{real.parent} has {free} bytes free; the checkpoint takes {total}")
        try:
            for name, entries in files.items():
                write_file(folder / name, entries)
            for name in copied:
                copy_file(source.folder / name, folder / name)
            if layout is not None or len(files) > 1:
                written = ((e.name, file, e.num_elements, e.num_bytes) for file, entries in files.items() for e in entries)
                write_index(folder, written, layout)
        except OSError as error:
            raise CheckpointError(f"{target} was not written: {error}") from error
    return told
