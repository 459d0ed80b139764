"""A folder with a checkpoint: which tensor lies where, and which stage has it."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flce.engine._plan import Names, balance
from flce.engine._replacement import present, write_text
from flce.engine._safetensors import Entry, read_entries
from flce.errors import ArgumentError, CheckpointError

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
#: number in the index's "flce" metadata; another number is refused
FORMAT = 1
#: files with weights, which are converted or left behind, never copied along
WEIGHTS = re.compile(r"\.(safetensors|safetensors\.index\.json|bin|bin\.index\.json|pt|pth|ckpt|h5|msgpack|gguf|onnx|tflite|npz)$")
#: why an embedding and an output layer have to be equal
TIED = "config.json ties them. Set tie_word_embeddings to false there if the model was trained with two weights"


@dataclass(frozen=True)
class Layout:
    """How a checkpoint is cut into stages: what the index's metadata says under "flce"."""

    num_stages: int
    starts: tuple[int, ...] | None  #: where each stage's layers start, and their number; None for stages that have no plan
    #: name of a tensor that was added for the last stage (or first) alone, to the name of its original
    copies: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def from_json(told: Any, index: Path) -> Layout:
        try:
            if told.get("format") != FORMAT:
                raise CheckpointError(f"{index}: stages of format {told.get('format')!r}; this version of flce reads format {FORMAT}")
            starts = None if told["starts"] is None else tuple(map(int, told["starts"]))
            layout = Layout(int(told["num_stages"]), starts, dict(told["copies"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f'{index}: "flce" in its metadata is malformed: {error!r}') from error
        if starts is not None and len(starts) != layout.num_stages + 1:
            raise CheckpointError(f"{index}: {layout.num_stages} stages do not fit the layers {starts}")
        return layout


@dataclass(frozen=True)
class Checkpoint:
    """Tensors of `folder`. `files` is the file of each tensor; headers are read when they are asked for, so that a stage touches its own
    files alone."""

    folder: Path
    files: dict[str, str]
    layout: Layout | None

    def entries(self, names: Sequence[str] | None = None) -> dict[str, Entry]:
        """The tensors, all or those named. CheckpointError where files and index contradict each other."""
        wanted = self.files if names is None else {name: self.files[name] for name in names}
        found: dict[str, Entry] = {}
        for file in dict.fromkeys(wanted.values()):
            for entry in read_entries(self.folder / file):
                if self.files.get(entry.name) != file:
                    other = self.files.get(entry.name)
                    said = f"is in {other} according to the index" if other else "is not in the index"
                    raise CheckpointError(f"{self.folder / file}: tensor {entry.name!r} {said}")
                if entry.name in wanted:
                    found[entry.name] = entry
        for name, file in wanted.items():
            if name not in found:
                raise CheckpointError(f"{self.folder / file}: tensor {name!r} is not there, and the index says it is")
        return found


def along(folder: Path) -> tuple[list[str], list[str]]:
    """Files in a folder that are copied along (config, generation config, tokenizer), and the rest: weights, hidden files, folders."""
    copied: list[str] = []
    left: list[str] = []
    for path in sorted(folder.iterdir()):
        plain = path.is_file() and not path.name.startswith(".") and not WEIGHTS.search(path.name)
        (copied if plain else left).append(path.name)
    return copied, left


def stage_prefix(stage: int, num_stages: int) -> str:
    return f"model-stage-{stage:02d}-of-{num_stages:02d}-"


def files_of_stage(stage: int, num_stages: int, entries: Sequence[Entry], num_files: int) -> dict[str, list[Entry]]:
    """A stage's files, balanced by bytes, and the tensors of each."""
    if not 1 <= num_files <= len(entries):
        raise ArgumentError(f"shards_per_stage is {num_files}; stage {stage} has {len(entries)} tensors, so 1 to {len(entries)} files")
    starts = balance([entry.num_bytes for entry in entries], 0, 0, num_files)
    beginning = stage_prefix(stage, num_stages)
    return {
        f"{beginning}shard-{n:02d}-of-{num_files:02d}.safetensors": list(entries[start:end])
        for n, (start, end) in enumerate(itertools.pairwise(starts))
    }


def write_index(folder: Path, written: Iterable[tuple[str, str, int, int]], layout: Layout | None) -> None:
    """written: name, file, elements and bytes of each tensor."""
    ordered = sorted(written)
    metadata: dict[str, Any] = {"total_parameters": sum(each[2] for each in ordered), "total_size": sum(each[3] for each in ordered)}
    if layout is not None:
        metadata["flce"] = {"format": FORMAT, **asdict(layout)}
    content = {"metadata": metadata, "weight_map": {name: file for name, file, *_ in ordered}}
    write_text(folder / INDEX_NAME, json.dumps(content, indent=2) + "\n")


def read_json(file: Path) -> dict[str, Any]:
    """CheckpointError for a file that is missing or holds no object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} does not exist") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a {type(content).__name__}; it must be an object")
    return content


def open_checkpoint(folder: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint in a folder of Hugging Face's layout, sharded into stages or not. CheckpointError where there is none."""
    folder = present(Path(folder))
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; a checkpoint is a folder with {SINGLE_NAME} or {INDEX_NAME}")
    single, index = folder / SINGLE_NAME, folder / INDEX_NAME
    if single.exists() and index.exists():
        raise CheckpointError(f"{folder} has both {SINGLE_NAME} and {INDEX_NAME}; remove the one that does not belong to it")
    if single.exists():
        return Checkpoint(folder, {entry.name: SINGLE_NAME for entry in read_entries(single)}, None)
    if not index.exists():
        others = sorted(path.name for path in folder.iterdir() if WEIGHTS.search(path.name))[:3]
        raise CheckpointError(
            f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}"
            + (f" (but {', '.join(others)}); only safetensors checkpoints are read" if others else "")
        )
    return _of_index(folder, index)


def _of_index(folder: Path, index: Path) -> Checkpoint:
    content = read_json(index)
    files = content.get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
        raise CheckpointError(f'{index} has no "weight_map" of tensor names to file names')
    for file in dict.fromkeys(files.values()):
        if file != os.path.basename(file) or not file.endswith(".safetensors"):
            raise CheckpointError(f"{index} names {file!r}; only safetensors files in its own folder are read")
    told = (content.get("metadata") or {}).get("flce")
    layout = None if told is None else Layout.from_json(told, index)
    if layout is not None:
        for name, file in files.items():
            if not re.match(rf"model-stage-\d+-of-{layout.num_stages:02d}-", file):
                raise CheckpointError(f"{index}: {name!r} is in {file!r}, which is no file of one of {layout.num_stages} stages")
    return Checkpoint(folder, files, layout)


def prefix_of(names: Names, files: Collection[str]) -> str:
    """Beginning of the names that a checkpoint of the bare model (GPT-2's on the hub) leaves out, "transformer."; "" for others."""
    root = names.layer.split(".")[0] + "."
    return "" if any(name.startswith(root) for name in files) else root


def canonical(prefix: str, name: str) -> str:
    """The name that the causal language model's modules have for a tensor of a checkpoint."""
    return name if name.startswith(("lm_head.", "score.")) else prefix + name
