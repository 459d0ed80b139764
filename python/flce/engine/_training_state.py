"""A training's state, to go on where it was: parameters, optimizer, scheduler and random generators, a file for every rank."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flce.engine import _random_state
from flce.engine._checkpoint_files import read_json
from flce.engine._collective import Group, gather, rank_of, shared_folder, size_of, step
from flce.engine._replacement import present, replace_text, try_lock, write_text
from flce.engine._stage import Stage
from flce.errors import ArgumentError, CheckpointError, DTypeError, ShapeError

#: number in the files; another number is refused
FORMAT = 1
MANIFEST = "flce-state.json"
LATEST = "latest"
#: types in a file beside lists, tuples and dicts: torch.load reads no more with weights_only=True
PLAIN = (type(None), int, float, bool, str, bytes, torch.dtype, torch.device, torch.Size, Tensor, nn.Parameter)
_DICTS = (dict, OrderedDict, Counter)


class Trained(Protocol):
    """Parts of an engine that are saved: `PipelineEngine` has these attributes, and so has `TrainingParts`."""

    stages: Sequence[Stage]
    optimizer: Any
    lr_scheduler: Any
    version_steps: int | None
    pipeline_group: dist.ProcessGroup | None
    data_parallel_group: dist.ProcessGroup | None


@dataclass
class TrainingParts:
    """This rank's part of a training without a `PipelineEngine`, for `save_state` and `load_state`."""

    stages: Sequence[Stage]
    optimizer: torch.optim.Optimizer | None = None
    lr_scheduler: Any = None
    version_steps: int | None = None
    pipeline_group: dist.ProcessGroup | None = None
    data_parallel_group: dist.ProcessGroup | None = None


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

    Saved are the stages' parameters and persistent buffers, the optimizer's state by the parameters' names, the scheduler's state, the
    version steps, and the states of the random generators of Python, torch (the CPU's and that of the stage's device) and, where it is
    loaded, NumPy. Gradients are not.

    Args:
        engine: a `PipelineEngine`, or `TrainingParts`.
        directory: on a file system that all ranks share.
        step: the number of steps that the training has done, 0 or more. A state of the same number is replaced.
        keep: how many states to keep, this one counted: those saved last, in any order of steps.
        extra: of this rank, numbers, strings, None, tensors and lists, tuples and dicts of these: where the data is, say.

    Returns the state's folder. Raises ArgumentError (ranks that save different steps, too), CheckpointError.
    """
    groups = groups_of(engine)

    def prepare() -> tuple[Path, dict[str, Any]]:
        check_step(step)
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            raise ArgumentError(f"keep is {keep!r}; it must be 1 or more")
        return Path(directory) / name_of(step), content_of(engine, step, extra)

    folder, content = agreed(groups, prepare)
    _check_alike(groups, step, ArgumentError, "ranks save different steps")
    with shared_folder(groups, folder, overwrite=True) as shared:
        agreed(groups, lambda: _write(shared.folder / file_of(engine), content))

        def finish(partial: Path) -> None:
            files = {file.name: file.stat().st_size for file in sorted(partial.glob("*.pt"))}
            sizes = {"pipeline_ranks": size_of(groups[0]), "data_parallel_ranks": data_parallel_size(engine)}
            if len(files) != sizes["pipeline_ranks"] * sizes["data_parallel_ranks"]:
                raise CheckpointError(
                    f"{partial} has {len(files)} files of {sizes}: two ranks wrote the same one, so the groups make no grid"
                )
            order = 1 + max((_order_of(other) for other in folder.parent.glob("step-*")), default=0)
            told = {"format": FORMAT, "step": step, "order": order, "num_stages": engine.stages[0].num_stages, **sizes, "files": files}
            write_text(partial / MANIFEST, json.dumps(told | {"torch": torch.__version__}, indent=2) + "\n")

        shared.commit(finish)
        agreed(groups, lambda: _point_to(folder, keep) if shared.is_first else None)
    return folder


def load_state(engine: Trained, directory: str | os.PathLike[str], step: int | None = None) -> RestoredState:
    """Restores what `save_state` has saved, on every rank, into stages, optimizer, scheduler and generators that were made as they were
    made for the training that saved it. A training that goes on so equals one that was not interrupted, bit for bit on the CPU. Nothing
    changes on any rank unless all of it fits on every rank.

    Args:
        engine: a `PipelineEngine`, or `TrainingParts`.
        directory: what `save_state` was given.
        step: which state; None: the latest.

    Raises CheckpointError: no state, files that are missing or damaged, another number of stages or ranks, other parameters, another
    optimizer or scheduler. ShapeError, DTypeError: parameters of other shapes or dtypes. ArgumentError: step is no whole number.
    """
    groups = groups_of(engine)
    content = agreed(groups, lambda: _read(engine, Path(directory), step))
    chosen = content["step"]
    _check_alike(groups, chosen, CheckpointError, f"ranks read different states of {directory}")
    agreed(groups, lambda: _apply(engine, content))
    return RestoredState(chosen, content["version_steps"], content["extra"])


def latest_step(directory: str | os.PathLike[str]) -> int | None:
    """The step of the latest state in a folder; None where there is none. CheckpointError where `latest` names no state."""
    try:
        named = (Path(directory) / LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    if not re.fullmatch(r"step-\d{8,}", named):
        raise CheckpointError(f"{Path(directory) / LATEST} says {named!r}, which names no state")
    return int(named.removeprefix("step-"))


def _check_alike(groups: Sequence[Group], value: Any, kind: type[Exception], words: str) -> None:
    """Checks that all ranks have one value. Every group is asked before any rank raises."""
    told = [sorted(set(gather(group, value))) for group in groups]

    def check() -> None:
        for values in told:
            if len(values) > 1:
                raise kind(f"{words}: {', '.join(map(str, values))}")

    agreed(groups, check)


def check_step(step: Any) -> None:
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ArgumentError(f"step is {step!r}; it must be a whole number, 0 or more")


agreed = step  # `step` is an argument's name as well


def name_of(number: int) -> str:
    return f"step-{number:08d}"


def groups_of(engine: Trained) -> list[Group]:
    return [engine.pipeline_group] if engine.data_parallel_group is None else [engine.pipeline_group, engine.data_parallel_group]


def data_parallel_size(engine: Trained) -> int:
    return 1 if engine.data_parallel_group is None else size_of(engine.data_parallel_group)


def file_of(engine: Trained) -> str:
    copy = 0 if engine.data_parallel_group is None else rank_of(engine.data_parallel_group)
    rank, ranks = rank_of(engine.pipeline_group), size_of(engine.pipeline_group)
    return f"rank-{rank:02d}-of-{ranks:02d}.data-{copy:02d}-of-{data_parallel_size(engine):02d}.pt"


def parameters_of(engine: Trained) -> dict[str, nn.Parameter]:
    """Parameters by stage and name: "0:model.layers.0.mlp.up_proj.weight"."""
    return {f"{stage.stage}:{name}": parameter for stage in engine.stages for name, parameter in stage.named_parameters()}


def class_of(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def content_of(engine: Trained, step: int, extra: Any) -> dict[str, Any]:
    content = {
        "format": FORMAT,
        "step": step,
        "version_steps": engine.version_steps,
        "stages": {stage.stage: {name: _own(tensor) for name, tensor in stage.state_dict().items()} for stage in engine.stages},
        "optimizer": None if engine.optimizer is None else _optimizer_content(engine),
        "lr_scheduler": None,
        "random": _random_state.get(next(engine.stages[0].parameters()).device),
        "extra": extra,
    }
    if engine.lr_scheduler is not None:
        content["lr_scheduler"] = {"class": class_of(engine.lr_scheduler), "state": engine.lr_scheduler.state_dict()}
    check_plain(content, "state")
    return content


def _own(tensor: Tensor) -> Tensor:
    """The tensor without the rest of a larger storage, which torch.save would write as well."""
    tensor = tensor.detach()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _optimizer_content(engine: Trained) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in parameters_of(engine).items()}
    told = engine.optimizer.state_dict()
    by_index: dict[Any, str] = {}
    groups = []
    for number, (group, saved) in enumerate(zip(engine.optimizer.param_groups, told["param_groups"], strict=True)):
        foreign = [i for i, parameter in enumerate(group["params"]) if id(parameter) not in names]
        if foreign:
            raise ArgumentError(
                f"optimizer: parameter {foreign[0]} of group {number}, of shape {list(group['params'][foreign[0]].shape)}, is not one of "
                f"stage {', '.join(str(stage.stage) for stage in engine.stages)}; an optimizer has its own rank's parameters"
            )
        by_index |= {index: names[id(parameter)] for index, parameter in zip(saved["params"], group["params"], strict=True)}
        groups.append(saved | {"params": [names[id(parameter)] for parameter in group["params"]]})
    unknown = next((key for key in told["state"] if key not in by_index), None)
    if unknown is not None:
        raise ArgumentError(f"optimizer: its state has {unknown!r}, which is none of its parameters; states are saved by parameters' names")
    state = {by_index[index]: values for index, values in told["state"].items()}
    other = {key: value for key, value in told.items() if key not in ("state", "param_groups")}
    return {"class": class_of(engine.optimizer), "groups": groups, "state": state, "other": other}


def check_plain(value: Any, where: str) -> None:
    """ArgumentError for what torch.load with weights_only=True would refuse."""
    if type(value) in _DICTS:
        for key, item in value.items():
            check_plain(key, f"{where} key")
            check_plain(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for number, item in enumerate(value):
            check_plain(item, f"{where}[{number}]")
    elif type(value) not in PLAIN:
        raise ArgumentError(
            f"{where} is a {class_of(value)}; states have numbers, strings, None, tensors, and lists, tuples and dicts of these"
        )


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
    directory = folder.parent
    replace_text(directory / LATEST, folder.name + "\n")
    older = sorted(
        (path for path in directory.glob("step-*") if path.name != folder.name),
        key=lambda path: (_order_of(path), path.name),
        reverse=True,
    )
    for path in older[keep - 1 :]:
        shutil.rmtree(path.rename(directory / f".{path.name}.flce-gone"))  # a half removed folder is no state
    for left in directory.glob(".step-*.flce-*"):
        state = directory / left.name[1:].split(".")[0]
        if present(state) == left:
            left.rename(state)  # a process was killed when it replaced it
            continue
        descriptor = os.open(left, os.O_RDONLY)
        try:
            if try_lock(descriptor):
                shutil.rmtree(left)
        finally:
            os.close(descriptor)


def _order_of(folder: Path) -> int:
    """The place of a state in the order of saving: 1, 2, …; 0 where it is not known."""
    try:
        order = read_json(folder / MANIFEST).get("order", 0)
    except CheckpointError:
        return 0
    return order if isinstance(order, int) else 0


def _read(engine: Trained, directory: Path, step: int | None) -> dict[str, Any]:
    """This rank's file, when all of it fits."""
    if step is not None:
        check_step(step)
    number = latest_step(directory) if step is None else step
    if number is None:
        raise CheckpointError(f"{directory} has no state: there is no file {LATEST!r} in it")
    folder = present(directory / name_of(number))
    told = read_json(folder / MANIFEST)
    if told.get("format") != FORMAT:
        raise CheckpointError(f"{folder} has format {told.get('format')!r}; this version of flce reads format {FORMAT}")
    here = {
        "num_stages": engine.stages[0].num_stages,
        "pipeline_ranks": size_of(engine.pipeline_group),
        "data_parallel_ranks": data_parallel_size(engine),
    }
    for key, value in here.items():
        if told.get(key) != value:
            raise CheckpointError(f"{folder} was saved with {key} {told.get(key)}, and this training has {value}; they must be equal")
    file = folder / file_of(engine)
    size = file.stat().st_size if file.is_file() else None
    if size != told["files"].get(file.name):
        raise CheckpointError(f"{file} has {size} bytes, and {MANIFEST} says {told['files'].get(file.name)}: it is damaged")
    try:
        content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    _check(engine, content, file)
    return content


def _check(engine: Trained, content: dict[str, Any], file: Path) -> None:
    numbers = sorted(stage.stage for stage in engine.stages)
    if sorted(content["stages"]) != numbers:
        raise CheckpointError(f"{file} has the stages {sorted(content['stages'])}, and this rank has {numbers}")
    for stage in engine.stages:
        own, saved = stage.state_dict(), content["stages"][stage.stage]
        _same_names(own, saved, f"{file}: stage {stage.stage}")
        for name, tensor in own.items():
            if tensor.shape != saved[name].shape:
                raise ShapeError(f"{file}: {name!r} has shape {list(saved[name].shape)}, and the stage has {list(tensor.shape)}")
            if tensor.dtype != saved[name].dtype:
                raise DTypeError(f"{file}: {name!r} is {saved[name].dtype}, and the stage has {tensor.dtype}")
    for part in ("optimizer", "lr_scheduler"):
        thing, saved = getattr(engine, part), content[part]
        here, there = None if thing is None else class_of(thing), None if saved is None else saved["class"]
        if here != there:
            raise CheckpointError(f"{file} was saved with {part} {there}, and this training has {here}")
    if engine.optimizer is not None:
        _check_groups(engine, content["optimizer"]["groups"], file)


def _check_groups(engine: Trained, saved: list[dict[str, Any]], file: Path) -> None:
    names = {id(parameter): name for name, parameter in parameters_of(engine).items()}
    groups = engine.optimizer.param_groups
    if len(groups) != len(saved):
        raise CheckpointError(f"{file}: the optimizer had {len(saved)} parameter groups, and has {len(groups)}")
    for number, (group, old) in enumerate(zip(groups, saved, strict=True)):
        _same_names(
            [names.get(id(p), "a parameter of no stage") for p in group["params"]], old["params"], f"{file}: optimizer group {number}"
        )


def _same_names(here: Any, saved: Any, where: str) -> None:
    new, gone = sorted(set(here) - set(saved)), sorted(set(saved) - set(here))
    if new or gone:
        raise CheckpointError(f"{where} has other parameters: saved but not here {gone[:4]}, here but not saved {new[:4]}")


@torch.no_grad()
def _apply(engine: Trained, content: dict[str, Any]) -> None:
    for stage in engine.stages:
        saved = content["stages"][stage.stage]
        for name, tensor in stage.state_dict(keep_vars=True).items():
            tensor.copy_(saved[name])
    if engine.optimizer is not None:
        _apply_optimizer(engine, content["optimizer"])
    if engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(content["lr_scheduler"]["state"])
    engine.version_steps = content["version_steps"]
    _random_state.set_all(content["random"], next(engine.stages[0].parameters()).device)


def _apply_optimizer(engine: Trained, saved: dict[str, Any]) -> None:
    """Applies the saved state by name: the order of parameters in a group may be another."""
    parameters = parameters_of(engine)
    names = {id(parameter): name for name, parameter in parameters.items()}
    optimizer = engine.optimizer
    told = optimizer.state_dict()
    state, groups = {}, []
    for group, current, old in zip(optimizer.param_groups, told["param_groups"], saved["groups"], strict=True):
        groups.append(current | old | {"params": current["params"]})
        for index, parameter in zip(current["params"], group["params"], strict=True):
            if names[id(parameter)] in saved["state"]:
                state[index] = saved["state"][names[id(parameter)]]
    optimizer.load_state_dict({"state": state, "param_groups": groups, **saved["other"]})
    for name, values in saved["state"].items():  # torch converts to the parameter's dtype; fp32 moments of bf16 parameters stay fp32
        kept = optimizer.state[parameters[name]]
        for key, value in values.items():
            if isinstance(value, Tensor) and isinstance(kept.get(key), Tensor) and kept[key].dtype != value.dtype:
                kept[key] = value.to(kept[key].device)
