"""A training's state, to go on where it was: parameters, optimizer, scheduler and random generators, a file for every rank."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from flce.core import checks
from flce.engine._checkpoint_files import read_json
from flce.engine._collective import Group, gather, rank_of, size_of, write_together
from flce.engine._collective import step as agreed
from flce.engine._replacement import present, replace_text, write_text
from flce.engine._stage import Stage
from flce.errors import ArgumentError, CheckpointError

if TYPE_CHECKING:
    from flce.engine._pipeline_engine import PipelineEngine

#: number in the files; another number is refused
FORMAT = 1
MANIFEST = "flce-state.json"
LATEST = "latest"


@dataclass
class TrainingParts:
    """This rank's part of a training without a `PipelineEngine`, for `save_state` and `load_state`."""

    stages: Sequence[Stage]
    optimizer: torch.optim.Optimizer | None = None
    lr_scheduler: Any = None
    version_steps: int | None = None
    pipeline_group: dist.ProcessGroup | None = None
    data_parallel_group: dist.ProcessGroup | None = None


Trained: TypeAlias = "PipelineEngine | TrainingParts"


@dataclass(frozen=True)
class RestoredState:
    """Result of `load_state`: the number of steps, the version steps and the `extra` that were saved."""

    step: int
    version_steps: int | None
    extra: Any


def save_state(engine: Trained, directory: str | os.PathLike[str], step: int, *, keep: int = 2, extra: Any = None) -> Path:
    """Saves everything that a training needs to go on as if it had not been interrupted, in `directory`/step-00000012. Every rank calls it,
    and writes its own file. The folder comes into being whole or not at all; then `directory`/latest names it, and older ones are removed.
    An error on one rank is raised on all.

    Saved are the stages' parameters and persistent buffers, the optimizer's state with its parameters' names, the scheduler's state, the
    version steps, and the states of the random generators of Python, torch (the CPU's and that of the stage's device) and, where it is
    loaded, NumPy. Gradients are not.

    Args:
        engine: a `PipelineEngine`, or `TrainingParts`.
        directory: on a file system that all ranks share.
        step: the number of steps that the training has done, 0 or more. A state of the same number is replaced.
        keep: how many states to keep, this one counted: those saved last, in any order of steps.
        extra: of this rank, what torch.load(weights_only=True) reads: numbers, strings, tensors, lists and dicts of these. Where the data
            is, say.

    Returns the state's folder. Raises ArgumentError (ranks that save different steps, too), CheckpointError.
    """
    groups = _groups_of(engine)

    def prepare() -> dict[str, Any]:
        checks.integer("step", step, 0)
        checks.integer("keep", keep, 1)
        return {
            "step": step,
            "version_steps": engine.version_steps,
            "description": _description(engine),
            "stages": {stage.stage: {name: _own(tensor) for name, tensor in stage.state_dict().items()} for stage in engine.stages},
            "states": [None if part is None else part.state_dict() for part in (engine.optimizer, engine.lr_scheduler)],
            "random": _random_state(engine),
            "extra": extra,
        }

    content = agreed(groups, prepare)
    _check_alike(groups, step, ArgumentError, "ranks save different steps")
    folder = Path(directory) / name_of(step)

    def finish(partial: Path) -> None:
        files = {file.name: file.stat().st_size for file in sorted(partial.glob("*.pt"))}
        shape = _shape_of(engine)
        if len(files) != shape["pipeline_ranks"] * shape["data_parallel_ranks"]:
            raise CheckpointError(
                f"{partial} has {len(files)} files of {shape}: two ranks wrote the same one, so the groups make no grid, or one wrote to "
                "another file system"
            )
        told = {"format": FORMAT, "step": step, **shape, "files": files, "torch": torch.__version__}
        write_text(partial / MANIFEST, json.dumps(told, indent=2) + "\n")

    def write(partial: Path) -> None:
        _write(partial / _file_of(engine), content)

    write_together(groups, folder, overwrite=True, write=write, finish=finish)
    agreed(groups, lambda: None if any(map(rank_of, groups)) else _point_to(folder, keep))
    return folder


def load_state(engine: Trained, directory: str | os.PathLike[str], step: int | None = None) -> RestoredState:
    """Restores what `save_state` has saved, on every rank, into stages, optimizer, scheduler and generators that were made as they were
    made for the training that saved it. A training that goes on so equals one that was not interrupted, bit for bit on the CPU. Nothing
    changes on any rank unless all of it fits on every rank.

    Args:
        engine: a `PipelineEngine`, or `TrainingParts`.
        directory: what `save_state` was given.
        step: which state; None: the latest.

    Raises CheckpointError: no state, files that are missing or damaged, another number of stages or ranks, other parameters, shapes
    or dtypes, another optimizer or scheduler. ArgumentError: step is no whole number.
    """
    groups = _groups_of(engine)
    content = agreed(groups, lambda: _read(engine, Path(directory), step))
    chosen = content["step"]
    _check_alike(groups, chosen, CheckpointError, f"ranks read different states of {directory}")
    agreed(groups, lambda: _apply(engine, content))
    return RestoredState(chosen, content["version_steps"], content["extra"])


def latest_step(directory: str | os.PathLike[str]) -> int | None:
    """The step of the latest state in a folder; None where there is none. CheckpointError where `latest` names no state."""
    names = _listed(Path(directory))
    return int(names[0].removeprefix("step-")) if names else None


def _listed(directory: Path) -> list[str]:
    """The states in a folder, the one that was saved last first."""
    try:
        names = (directory / LATEST).read_text(encoding="utf-8").split()
    except FileNotFoundError:
        return []
    for name in names:
        if not re.fullmatch(r"step-\d{8,}", name):
            raise CheckpointError(f"{directory / LATEST} says {name!r}, which names no state")
    return names


def _check_alike(groups: Sequence[Group], value: Any, kind: type[Exception], words: str) -> None:
    """Checks that all ranks have one value. Every group is asked before any rank raises."""
    told = sorted({each for group in groups for each in gather(group, value)})

    def check() -> None:
        if len(told) > 1:
            raise kind(f"{words}: {', '.join(map(str, told))}")

    agreed(groups, check)


def name_of(number: int) -> str:
    return f"step-{number:08d}"


def _groups_of(engine: Trained) -> list[Group]:
    return [engine.pipeline_group] if engine.data_parallel_group is None else [engine.pipeline_group, engine.data_parallel_group]


def _shape_of(engine: Trained) -> dict[str, int]:
    copies = engine.data_parallel_group
    return {
        "num_stages": engine.stages[0].num_stages,
        "pipeline_ranks": size_of(engine.pipeline_group),
        "data_parallel_ranks": 1 if copies is None else size_of(copies),
    }


def _file_of(engine: Trained) -> str:
    shape, copies = _shape_of(engine), engine.data_parallel_group
    rank, copy = rank_of(engine.pipeline_group), 0 if copies is None else rank_of(copies)
    return f"rank-{rank:02d}-of-{shape['pipeline_ranks']:02d}.data-{copy:02d}-of-{shape['data_parallel_ranks']:02d}.pt"


def _description(engine: Trained) -> dict[str, Any]:
    """Facts that a training and a state of it have to share: parameters and buffers with shapes and dtypes, by stage; the classes of
    optimizer and scheduler; and the parameters of the optimizer's groups, in order."""
    tensors = {
        f"{name!r} of stage {stage.stage}": f"{tensor.dtype} {list(tensor.shape)}"
        for stage in engine.stages
        for name, tensor in stage.state_dict().items()
    }
    kinds = {name: type(getattr(engine, name)) for name in ("optimizer", "lr_scheduler")}
    parts = {name: None if kind is type(None) else f"{kind.__module__}.{kind.__qualname__}" for name, kind in kinds.items()}
    names = {f"optimizer group {number}": str(names) for number, names in enumerate(_names_of_groups(engine))}
    return _shape_of(engine) | tensors | parts | names


def _own(tensor: Tensor) -> Tensor:
    """The tensor without the rest of a larger storage, which torch.save would write as well."""
    tensor = tensor.detach()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _names_of_groups(engine: Trained) -> list[list[str]]:
    """Names of the parameters of the optimizer's groups, by stage: "0:model.layers.0.mlp.up_proj.weight"."""
    names = {id(parameter): f"{stage.stage}:{name}" for stage in engine.stages for name, parameter in stage.named_parameters()}
    groups: Any = () if engine.optimizer is None else engine.optimizer.param_groups
    for number, group in enumerate(groups):
        for i, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise ArgumentError(
                    f"optimizer: parameter {i} of group {number}, of shape {list(parameter.shape)}, is not one of stage "
                    f"{', '.join(str(stage.stage) for stage in engine.stages)}; an optimizer has its own rank's parameters"
                )
    return [[names[id(parameter)] for parameter in group["params"]] for group in groups]


def _random_state(engine: Trained) -> dict[str, Any]:
    """States of the random generators of Python, of torch on the CPU and on the stage's device, and of NumPy where it is imported."""
    device = next(engine.stages[0].parameters()).device
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": None, "numpy": None}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, gauss = numpy.random.get_state()
        state["numpy"] = (str(kind), [int(key) for key in keys], int(position), int(has_gauss), float(gauss))
    return state


def _set_random_state(engine: Trained, state: dict[str, Any]) -> None:
    device = next(engine.stages[0].parameters()).device
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    if state["numpy"] is not None:
        import numpy

        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))


def _write(file: Path, content: dict[str, Any]) -> None:
    try:
        with open(file, "wb") as out:
            torch.save(content, out)
            out.flush()
            os.fsync(out.fileno())
    except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError for a full disk
        raise CheckpointError(f"{file} was not written: {error}") from error
    try:  # its structure; tensors are mapped, and not read
        torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(f"what was written into {file} could not be read again: {error}") from error


def _point_to(folder: Path, keep: int) -> None:
    """Has `latest` name the states, the new one first, and removes all but `keep`. A state that is named is there at every moment."""
    directory = folder.parent
    names = [folder.name, *(name for name in _listed(directory) if name != folder.name)]
    replace_text(directory / LATEST, "\n".join(names) + "\n")
    for name in names[keep:]:
        if (directory / name).exists():
            shutil.rmtree((directory / name).rename(directory / f".{name}.flce-gone"))  # a half removed folder is no state
    replace_text(directory / LATEST, "\n".join(names[:keep]) + "\n")
    for left in directory.glob(".step-*.flce-*"):  # remains of processes that were killed
        state = directory / left.name[1:].split(".")[0]
        if state.name in names[:keep] and present(state) == left:
            left.rename(state)
        else:
            shutil.rmtree(left)


def _read(engine: Trained, directory: Path, step: int | None) -> dict[str, Any]:
    """This rank's file, when all of it fits."""
    if step is not None:
        checks.integer("step", step, 0)
    number = latest_step(directory) if step is None else step
    if number is None:
        raise CheckpointError(f"{directory} has no state: there is no file {LATEST!r} in it")
    folder = present(directory / name_of(number))
    told = read_json(folder / MANIFEST)
    if told.get("format") != FORMAT:
        raise CheckpointError(f"{folder} has format {told.get('format')!r}; this version of flce reads format {FORMAT}")
    shape = _shape_of(engine)
    _check({key: told.get(key) for key in shape}, shape, folder)
    file = folder / _file_of(engine)
    size = file.stat().st_size if file.is_file() else None
    if size != told["files"].get(file.name):
        raise CheckpointError(f"{file} has {size} bytes, and {MANIFEST} says {told['files'].get(file.name)}: it is damaged")
    try:
        content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    _check(content["description"], _description(engine), file)
    return content


def _check(saved: dict[str, Any], here: dict[str, Any], where: Path) -> None:
    for key in (*saved, *here):
        if saved.get(key) != here.get(key):
            raise CheckpointError(
                f"{where} was saved with {key} {saved.get(key)}, and this training has {here.get(key)}; they must be equal"
            )


@torch.no_grad()
def _apply(engine: Trained, content: dict[str, Any]) -> None:
    for stage in engine.stages:
        saved = content["stages"][stage.stage]
        for name, tensor in stage.state_dict(keep_vars=True).items():
            tensor.copy_(saved[name])
    of_optimizer, of_scheduler = content["states"]
    if engine.optimizer is not None:
        engine.optimizer.load_state_dict(of_optimizer)
        _widen(engine.optimizer, of_optimizer)
    if engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(of_scheduler)
    engine.version_steps = content["version_steps"]
    _set_random_state(engine, content["random"])


def _widen(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Gives moments the dtypes that they had: torch has converted them to their parameters'."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        kept = optimizer.state.get(parameter, {})
        for key, value in saved["state"].get(number, {}).items():
            if isinstance(value, Tensor) and isinstance(kept.get(key), Tensor) and kept[key].dtype != value.dtype:
                kept[key] = value.to(kept[key].device)
