"""Parameters of a stage, read from a checkpoint's files of that stage alone."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flce.engine._checkpoint_files import COMPUTED, TIED, Checkpoint, Family, Layout, family_of, open_checkpoint
from flce.engine._plan import NAMES, StagePlan
from flce.engine._safetensors import DTYPES, check_equal, library
from flce.engine._stage import Stage
from flce.errors import ArgumentError, CheckpointError, DTypeError, ShapeError

_log = logging.getLogger("flce")
#: how widely the new weights of a value head are spread
SCORE_STD = 0.02


@dataclass(frozen=True)
class LoadReport:
    """Results of `load_stage`, by names: `loaded` from the checkpoint, `initialized` for want of it, `dropped` from the checkpoint's
    tensors of this stage, `missing` and left as they were (with strict=False alone)."""

    loaded: tuple[str, ...]
    initialized: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()


def load_stage(
    stage: Stage,
    directory: str | os.PathLike[str],
    *,
    strict: bool = True,
    convert_dtype: bool = False,
    init_critic_from_actor: bool = False,
) -> LoadReport:
    """Loads a stage's parameters from a checkpoint, by name.

    From a folder that `flce-shard-checkpoint` or `save_stage` made, the index and the files of this stage alone are read; from any other
    safetensors checkpoint of Hugging Face's layout, the tensors of this stage alone. Nothing is changed unless all of it fits.

    Args:
        stage: as `causal_lm_stage` makes it, on the meta device too, or a Stage of your own with the checkpoint's names. Parameters
            stay where they are; those on the meta device are made on the CPU.
        strict: a parameter that the checkpoint does not have, and a tensor of this stage's that the stage does not have, are errors. False:
            such parameters stay as they are, such tensors are left, and both are logged as a warning.
        convert_dtype: convert floating-point tensors to the parameters' dtype where these differ; else that is a DTypeError.
        init_critic_from_actor: for a critic's last stage: the checkpoint is a language model's. `score.weight` is drawn from a normal
            distribution with a standard deviation of 0.02 by torch's generator, and `lm_head.weight` is dropped.

    Raises CheckpointError (files; a checkpoint of another number of stages; names, with strict), ShapeError, DTypeError, ArgumentError.
    """
    checkpoint = open_checkpoint(directory)
    names = _names_in(checkpoint, stage, strict)
    wanted = _wanted(stage)
    found = {ours: theirs for ours, theirs in names.items() if ours in wanted}
    by_tensor = {id(tensor): name for name, tensor in wanted.items() if name in found}
    missing = [name for name, tensor in wanted.items() if id(tensor) not in by_tensor]
    copies = checkpoint.layout.copies if checkpoint.layout else {}
    needless = {ours for ours, theirs in names.items() if theirs in copies or COMPUTED.search(ours) or _same_as_tied(stage, ours)}
    dropped = [ours for ours in names if ours not in wanted and ours not in needless]
    initialized = []
    if init_critic_from_actor:
        initialized = [name for name in missing if name.startswith("score.")]
        missing = [name for name in missing if name not in initialized]
    if strict:
        allowed = [n for n in dropped if init_critic_from_actor and n.startswith("lm_head.")]
        _refuse_names(stage, checkpoint, missing, [name for name in dropped if name not in allowed])
    read = _read(checkpoint, stage, found, wanted, convert_dtype)
    _apply(stage, read, wanted)
    for name in initialized:
        _initialize(stage, name)
    for listed, said in ((initialized, "initialised"), (missing, "left as they were"), (dropped, "not used")):
        if listed:
            _log.warning("%s: stage %d of %d: %s %s", directory, stage.stage, stage.num_stages, ", ".join(sorted(listed)), said)
    files = tuple(checkpoint.folder / file for file in dict.fromkeys(checkpoint.files[theirs] for theirs in found.values()))
    return LoadReport(tuple(found), tuple(initialized), tuple(dropped), tuple(missing), files)


def _wanted(stage: Stage) -> dict[str, Tensor]:
    """Tensors that a checkpoint has to have: parameters and persistent buffers, by name. A tied weight of a lone stage has both of its
    names."""
    return dict(stage.state_dict(keep_vars=True))


def _same_as_tied(stage: Stage, name: str) -> bool:
    """Whether a name is another one of a weight that the stage has: the embedding's on a last stage that ties its head to it."""
    return stage.tied_weight is not None and any(name in (names.embedding, names.head) for names in NAMES.values())


def _names_in(checkpoint: Checkpoint, stage: Stage, strict: bool) -> dict[str, str]:
    """The tensors that the checkpoint has for a stage: of the module's name, the checkpoint's."""
    layout = checkpoint.layout
    if layout is not None:
        if layout.num_stages != stage.num_stages:
            raise CheckpointError(
                f"{checkpoint.folder} is cut into {layout.num_stages} stages, and the stage is one of {stage.num_stages}. Cut it again: "
                f"flce-shard-checkpoint {checkpoint.folder} {checkpoint.folder}-{stage.num_stages} --stages {stage.num_stages}"
            )
        _check_starts(checkpoint, layout, stage)
        family = _family(checkpoint)
        return {(family.canonical(name) if family else name): name for name in checkpoint.stage_names(stage.stage)}
    family = _family(checkpoint)
    all_names = {(family.canonical(name) if family else name): name for name in checkpoint.files}
    _check_tied(checkpoint, all_names, stage)
    return _own_names(all_names, stage, strict)


def _check_tied(checkpoint: Checkpoint, names: dict[str, str], stage: Stage) -> None:
    """A whole checkpoint may have a tied weight twice, and has it alike then: each stage reads the one under its own name."""
    plan = getattr(stage, "plan", None)
    if plan is None or not plan.tied or getattr(stage, "critic", False):
        return
    both = [plan.names.embedding, plan.names.head]
    if all(name in names for name in both) and any(name in _wanted(stage) for name in both):
        embedding, head = (names[name] for name in both)
        entries = checkpoint.entries([embedding, head])
        check_equal(entries[embedding], entries[head], TIED)


def _family(checkpoint: Checkpoint) -> Family | None:
    """Names of the checkpoint's model; None for a user's own model, whose names are the module's as they are."""
    config = checkpoint.folder / "config.json"
    try:
        return family_of(checkpoint) if config.is_file() else None
    except ArgumentError:
        return None


def _check_starts(checkpoint: Checkpoint, layout: Layout, stage: Stage) -> None:
    plan = getattr(stage, "plan", None)
    if plan is not None and layout.starts is not None and tuple(plan.starts) != layout.starts:
        raise CheckpointError(
            f"{checkpoint.folder} has stages whose layers start at {list(layout.starts[:-1])}, and the stage's plan has "
            f"{list(plan.starts[:-1])} ({layout.starts[-1]} and {plan.starts[-1]} layers in all). Cut it again with this version of flce"
        )


def _own_names(names: dict[str, str], stage: Stage, strict: bool) -> dict[str, str]:
    """Names of a whole model's tensors that belong to a stage: its own, others of its layers, and others of the ends' modules."""
    wanted = _wanted(stage)
    plan = getattr(stage, "plan", None)
    if plan is not None:
        own = {ours: theirs for ours, theirs in names.items() if _is_of(plan, stage.stage, ours, strict)}
    else:
        layers = {match[0] for name in wanted if (match := re.match(r".*?\.\d+\.", name))}
        own = {ours: theirs for ours, theirs in names.items() if ours in wanted or ours.startswith(tuple(layers))}
    tied = plan.names if plan is not None and plan.tied else None
    if tied is not None:  # a whole checkpoint has the tied weight once, under either name
        for one, other in ((tied.embedding, tied.head), (tied.head, tied.embedding)):
            if one in wanted and one not in own and other in names:
                own[one] = names[other]
        if tied.embedding in own and tied.embedding not in wanted:
            del own[tied.embedding]
        if tied.head in own and tied.head not in wanted and not (stage.is_last and getattr(stage, "critic", False)):
            del own[tied.head]
    return own


def _is_of(plan: StagePlan, stage: int, name: str, strict: bool) -> bool:
    try:
        return stage in plan.stages_of(name)
    except ArgumentError:  # the name belongs to no stage
        if strict:
            raise
        return False


def _refuse_names(stage: Stage, checkpoint: Checkpoint, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    if not missing and not unexpected:
        return
    where = f"{checkpoint.folder} and stage {stage.stage} of {stage.num_stages} do not fit"
    said = []
    if missing:
        said.append(f"the checkpoint lacks {_some(missing)}")
    if unexpected:
        said.append(f"the stage has no {_some(unexpected)}")
    critics = any(name.startswith("score.") for name in missing) or any(name.startswith("lm_head.") for name in unexpected)
    hint = " init_critic_from_actor=True makes a critic of a language model" if critics and getattr(stage, "critic", True) else ""
    raise CheckpointError(f"{where}: {'; '.join(said)}.{hint or ' strict=False loads what fits'}")


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(map(repr, listed[:4])) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")


def _read(
    checkpoint: Checkpoint, stage: Stage, found: dict[str, str], wanted: dict[str, Tensor], convert_dtype: bool
) -> dict[str, tuple[Path, str]]:
    """Where each parameter's tensor lies. Shapes and dtypes are compared by the headers, before anything is loaded."""
    entries = checkpoint.entries(list(found.values()))
    for ours, theirs in found.items():
        entry, tensor = entries[theirs], wanted[ours]
        if entry.shape != tuple(tensor.shape):
            raise ShapeError(f"{entry.file}: {theirs!r} has shape {list(entry.shape)}, and stage {stage.stage} has {list(tensor.shape)}")
        dtype = DTYPES.get(entry.dtype)
        if dtype != tensor.dtype and not (convert_dtype and dtype is not None and dtype.is_floating_point and tensor.is_floating_point()):
            raise DTypeError(
                f"{entry.file}: {theirs!r} is {entry.dtype}, and stage {stage.stage} has {tensor.dtype}; convert_dtype=True converts "
                "floating-point tensors"
            )
    return {ours: (entries[theirs].file, theirs) for ours, theirs in found.items()}


@torch.no_grad()
def _apply(stage: Stage, read: dict[str, tuple[Path, str]], wanted: dict[str, Tensor]) -> None:
    by_file: dict[Path, list[tuple[str, str]]] = {}
    for ours, (file, theirs) in read.items():
        by_file.setdefault(file, []).append((ours, theirs))
    made: dict[int, nn.Parameter] = {}
    for file, pairs in by_file.items():
        with library().safe_open(os.fspath(file), framework="pt") as opened:
            for ours, theirs in pairs:
                tensor = opened.get_tensor(theirs)
                if wanted[ours].is_meta:
                    made[id(wanted[ours])] = _materialized(wanted[ours], tensor.to(wanted[ours].dtype, copy=True))
                else:
                    wanted[ours].copy_(tensor)
    for name, tensor in wanted.items():
        if id(tensor) in made:
            _assign(stage, name, made[id(tensor)])


def _materialized(like: Tensor, tensor: Tensor) -> Any:
    return nn.Parameter(tensor, requires_grad=like.requires_grad) if isinstance(like, nn.Parameter) else tensor


def _assign(stage: Stage, name: str, tensor: Any) -> None:
    module, _, last = name.rpartition(".")
    setattr(stage.get_submodule(module), last, tensor)


@torch.no_grad()
def _initialize(stage: Stage, name: str) -> None:
    parameter = stage.get_parameter(name)
    if parameter.is_meta:
        parameter = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu"))
        _assign(stage, name, parameter)
    nn.init.normal_(parameter, std=SCORE_STD)
