"""A folder with a checkpoint: which tensor lies where, and which stage has it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flce.engine._plan import NAMES, Names, StagePlan, balance
from flce.engine._replacement import present
from flce.engine._safetensors import TensorEntry, read_header
from flce.errors import ArgumentError, CheckpointError

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
#: number in the index's "flce" metadata; another number is refused
FORMAT = 1
#: model types that transformers ties where config.json does not say it
TIED_BY_DEFAULT = {"gemma2", "gpt2"}
#: buffers that older versions of transformers wrote, and that models compute themselves
COMPUTED = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")
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

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "num_stages": self.num_stages, "starts": self.starts and list(self.starts), "copies": self.copies}

    @staticmethod
    def from_json(told: Any, index: Path) -> Layout:
        if not isinstance(told, dict) or told.get("format") != FORMAT:
            said = told.get("format") if isinstance(told, dict) else told
            raise CheckpointError(f"{index}: stages of format {said!r}; this version of flce reads format {FORMAT}")
        try:
            starts = None if told["starts"] is None else tuple(map(int, told["starts"]))
            layout = Layout(int(told["num_stages"]), starts, dict(told["copies"]))
        except (KeyError, TypeError, ValueError) as error:
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

    def entries(self, names: Sequence[str] | None = None) -> dict[str, TensorEntry]:
        """Where the tensors lie, all or those named. CheckpointError where files and index contradict each other."""
        wanted = self.files if names is None else {name: self.files[name] for name in names}
        found: dict[str, TensorEntry] = {}
        for file in dict.fromkeys(wanted.values()):
            header = read_header(self.folder / file)
            for entry in header.entries:
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

    def metadata(self) -> dict[str, str]:
        """Metadata that the headers of all files have alike, with {"format": "pt"} at least."""
        told = [read_header(self.folder / file).metadata for file in dict.fromkeys(self.files.values())]
        common = {key: value for key, value in (told[0] if told else {}).items() if all(other.get(key) == value for other in told)}
        return {"format": "pt"} | common

    def stage_names(self, stage: int) -> list[str]:
        """The tensors in the files of a stage of a sharded checkpoint."""
        assert self.layout is not None
        beginning = stage_prefix(stage, self.layout.num_stages)
        return [name for name, file in self.files.items() if file.startswith(beginning)]

    def config(self) -> dict[str, Any]:
        return read_json(self.folder / "config.json")

    def along(self) -> tuple[list[str], list[str]]:
        return along(self.folder, {INDEX_NAME, *self.files.values()})


def along(folder: Path, known: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Files in a folder beside `known`: those to copy along (config, generation config, tokenizer) and those left behind (other weights,
    hidden files, folders)."""
    copied: list[str] = []
    left: list[str] = []
    for path in sorted(folder.iterdir()):
        if path.name not in known:
            plain = path.is_file() and not path.name.startswith(".") and not WEIGHTS.search(path.name)
            (copied if plain else left).append(path.name)
    return copied, left


def stage_prefix(stage: int, num_stages: int) -> str:
    return f"model-stage-{stage:02d}-of-{num_stages:02d}-"


def stage_file(stage: int, num_stages: int, shard: int, num_shards: int) -> str:
    return f"{stage_prefix(stage, num_stages)}shard-{shard:02d}-of-{num_shards:02d}.safetensors"


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
        return Checkpoint(folder, {entry.name: SINGLE_NAME for entry in read_header(single).entries}, None)
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


@dataclass(frozen=True)
class Family:
    """Names that a checkpoint's config.json implies."""

    names: Names
    tied: bool
    num_layers: int
    prefix: str  #: beginning of every name but the heads': "" or, for a checkpoint of the bare model, "transformer."

    def canonical(self, name: str) -> str:
        """The name that the causal language model's modules have for a tensor of this checkpoint."""
        return name if name.startswith(("lm_head.", "score.")) else self.prefix + name


def family_of(checkpoint: Checkpoint) -> Family:
    """ArgumentError for a model type that has no stages."""
    config = checkpoint.config()
    model_type = config.get("model_type")
    if model_type not in NAMES:
        raise ArgumentError(f"{checkpoint.folder}: model_type is {model_type!r}; stages are made of {', '.join(sorted(NAMES))}")
    names = NAMES[model_type]
    num_layers = config.get("num_hidden_layers", config.get("n_layer"))
    if not isinstance(num_layers, int):
        raise CheckpointError(f"{checkpoint.folder / 'config.json'} does not say how many layers the model has")
    root = names.layer.split(".")[0] + "."
    bare = not any(name.startswith(root) for name in checkpoint.files)
    return Family(names, bool(config.get("tie_word_embeddings", model_type in TIED_BY_DEFAULT)), num_layers, root if bare else "")


def plan_from_headers(family: Family, entries: Mapping[str, TensorEntry], num_stages: int) -> StagePlan:
    """The plan that `plan_stages` makes of the config, from the sizes that the headers tell: no model is made. ArgumentError for a tensor
    that belongs to no stage, CheckpointError where layers are missing."""
    names = family.names
    whole = StagePlan(names, (0, family.num_layers), family.tied)
    layers = [0] * family.num_layers
    sizes: dict[str, int] = {}
    for name, entry in entries.items():
        canonical = family.canonical(name)
        whole.stages_of(canonical)
        if COMPUTED.search(canonical):
            continue
        number = re.match(re.escape(names.layer) + r"(\d+)\.", canonical)
        if number is not None:
            layers[int(number[1])] += entry.num_elements
        else:
            sizes[canonical] = entry.num_elements
    if 0 in layers:
        raise CheckpointError(
            f"the checkpoint has no parameters of layer {layers.index(0)}, and config.json says {family.num_layers} layers"
        )
    embedding = sizes.get(names.embedding, sizes.get(names.head))
    if embedding is None:
        raise CheckpointError(f"the checkpoint has no {names.embedding!r}")
    sizes.setdefault(names.embedding, embedding)
    sizes.setdefault(names.head, embedding)  # tied, or a critic of the language model's stages

    def total(prefixes: tuple[str, ...]) -> int:
        return sum(size for name, size in sizes.items() if name.startswith(prefixes) and not name.startswith("score."))

    return StagePlan(names, balance(layers, total(names.first), total(names.last), num_stages), family.tied)
