"""Parameters of a stage, read from a checkpoint's files of that stage alone."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flce.engine._checkpoint_files import TIED, Checkpoint, canonical, open_checkpoint, prefix_of, stage_prefix
from flce.engine._safetensors import check_equal
from flce.engine._stage import Stage
from flce.errors import CheckpointError, DTypeError, ShapeError

_log = logging.getLogger("flce")
#: how widely the new weights of a value head are spread
SCORE_STD = 0.02
# Buffers that older versions of transformers wrote, and that models compute themselves.
_COMPUTED = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class LoadReport:
    """Results of `load_stage`, by names: `loaded` from the checkpoint, `initialized` for want of it, `dropped` from the checkpoint's
    tensors of this stage."""

    loaded: tuple[str, ...]
    initialized: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()


def load_stage(
    stage: Stage, directory: str | os.PathLike[str], *, convert_dtype: bool = False, init_critic_from_actor: bool = False
) -> LoadReport:
    """Loads a stage's parameters from a checkpoint, by name.

    From a folder that `flce-shard-checkpoint` or `save_stage` made, the index and the files of this stage alone are read; from any other
    safetensors checkpoint of Hugging Face's layout, the tensors of this stage alone. Nothing is changed unless all of it fits: a parameter
    that the checkpoint does not have, and a tensor of this stage's that the stage does not have, are errors.

    Args:
        stage: as `causal_lm_stage` makes it, on the meta device too, or a Stage of your own with the checkpoint's names. Parameters
            stay where they are; those on the meta device are made on the CPU.
        convert_dtype: convert floating-point tensors to the parameters' dtype where these differ; else that is a DTypeError.
        init_critic_from_actor: for a critic's last stage: the checkpoint is a language model's. `score.weight` is drawn from a normal
            distribution with a standard deviation of 0.02 by torch's generator, and `lm_head.weight` is dropped.

    Raises CheckpointError (files; a checkpoint of another number of stages; names), ShapeError, DTypeError, ArgumentError.
    """
    checkpoint = open_checkpoint(directory)
    wanted: dict[str, Tensor] = dict(stage.state_dict(keep_vars=True))
    names = _names_in(checkpoint, stage, wanted)
    found = {ours: theirs for ours, theirs in names.items() if ours in wanted}
    known = {id(wanted[name]) for name in found}  # a tied weight of a lone stage has two names
    missing = [name for name, tensor in wanted.items() if id(tensor) not in known]
    dropped = [ours for ours in names if ours not in wanted and not _COMPUTED.search(ours)]
    initialized = [name for name in missing if init_critic_from_actor and name.startswith("score.")]
    allowed = [name for name in dropped if init_critic_from_actor and name.startswith("lm_head.")]
    _refuse_names(stage, checkpoint, set(missing) - set(initialized), set(dropped) - set(allowed))
    _load(stage, wanted, _sources(checkpoint, stage, found, wanted, convert_dtype) | dict.fromkeys(initialized))
    for listed, said in ((initialized, "initialised"), (dropped, "not used")):
        if listed:
            _log.warning("%s: stage %d of %d: %s %s", directory, stage.stage, stage.num_stages, ", ".join(sorted(listed)), said)
    files = tuple(checkpoint.folder / file for file in dict.fromkeys(checkpoint.files[theirs] for theirs in found.values()))
    return LoadReport(tuple(found), tuple(initialized), tuple(dropped), files)


def _names_in(checkpoint: Checkpoint, stage: Stage, wanted: dict[str, Tensor]) -> dict[str, str]:
    """The tensors that the checkpoint has for a stage: of the module's name, the checkpoint's."""
    plan, layout = getattr(stage, "plan", None), checkpoint.layout
    if layout is not None and (layout.num_stages != stage.num_stages or (plan and layout.starts and tuple(plan.starts) != layout.starts)):
        raise CheckpointError(
            f"{checkpoint.folder} is cut into {layout.num_stages} stages, whose layers start at {layout.starts}, and the stage is one of "
            f"{stage.num_stages}, whose layers start at {plan and plan.starts}. Cut it again: "
            f"flce-shard-checkpoint {checkpoint.folder} {checkpoint.folder}-{stage.num_stages} --stages {stage.num_stages}"
        )
    if plan is None and layout is not None:
        beginning = stage_prefix(stage.stage, layout.num_stages)
        return {name: name for name, file in checkpoint.files.items() if file.startswith(beginning)}
    if plan is None:
        layers = tuple(match[0] for name in wanted if (match := re.match(r".*?\.\d+\.", name)))
        return {name: name for name in checkpoint.files if name in wanted or name.startswith(layers)}
    prefix = prefix_of(plan.names, checkpoint.files)
    names = {canonical(prefix, name): name for name in checkpoint.files}
    if plan.tied:
        _follow_ties(checkpoint, stage, names, wanted)
    return {ours: theirs for ours, theirs in names.items() if stage.stage in plan.stages_of(ours)}


def _follow_ties(checkpoint: Checkpoint, stage: Any, names: dict[str, str], wanted: dict[str, Tensor]) -> None:
    """A whole checkpoint has a tied weight once, under either name, or twice, and alike then. A stage reads the one under its own name."""
    ends = (stage.plan.names.embedding, stage.plan.names.head)
    if checkpoint.layout is None and not stage.critic and all(name in names for name in ends) and any(name in wanted for name in ends):
        entries = checkpoint.entries([names[name] for name in ends])
        embedding, head = (entries[names[name]] for name in ends)
        check_equal(embedding, head, TIED)
    for one, other in (ends, ends[::-1]):
        if one in wanted and one not in names and other in names:
            names[one] = names[other]
    for name in ends:
        if name not in wanted:
            names.pop(name, None)


def _refuse_names(stage: Stage, checkpoint: Checkpoint, missing: set[str], unexpected: set[str]) -> None:
    if not missing and not unexpected:
        return
    said = [f"the checkpoint lacks {_some(missing)}"] * bool(missing) + [f"the stage has no {_some(unexpected)}"] * bool(unexpected)
    critics = any(name.startswith("score.") for name in missing) or any(name.startswith("lm_head.") for name in unexpected)
    hint = ". init_critic_from_actor=True makes a critic of a language model" if critics and getattr(stage, "critic", True) else ""
    raise CheckpointError(f"{checkpoint.folder} and stage {stage.stage} of {stage.num_stages} do not fit: {'; '.join(said)}{hint}")


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(map(repr, listed[:4])) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")


def _sources(
    checkpoint: Checkpoint, stage: Stage, found: dict[str, str], wanted: dict[str, Tensor], convert_dtype: bool
) -> dict[str, Callable[[], Tensor] | None]:
    """Readers of each parameter's tensor. Shapes and dtypes are compared by the headers, before anything is loaded."""
    entries = checkpoint.entries(list(found.values()))
    for ours, theirs in found.items():
        entry, tensor, file = entries[theirs], wanted[ours], checkpoint.folder / checkpoint.files[theirs]
        if entry.shape != tuple(tensor.shape):
            raise ShapeError(f"{file}: {theirs!r} has shape {list(entry.shape)}, and stage {stage.stage} has {list(tensor.shape)}")
        if entry.dtype != tensor.dtype and not (convert_dtype and entry.dtype.is_floating_point and tensor.is_floating_point()):
            raise DTypeError(
                f"{file}: {theirs!r} is {entry.dtype}, and stage {stage.stage} has {tensor.dtype}; convert_dtype=True converts "
                "floating-point tensors"
            )
    return {ours: entries[theirs].read for ours, theirs in found.items()}


@torch.no_grad()
def _load(stage: Stage, wanted: dict[str, Tensor], sources: dict[str, Callable[[], Tensor] | None]) -> None:
    """sources: None for a parameter that is drawn."""
    made: dict[int, Tensor] = {}
    for name, read in sources.items():
        target = wanted[name]
        tensor = nn.init.normal_(torch.empty(target.shape, dtype=target.dtype, device="cpu"), std=SCORE_STD) if read is None else read()
        if not target.is_meta:
            target.copy_(tensor)
            continue
        made[id(target)] = tensor.to(target.dtype, copy=True)
        if isinstance(target, nn.Parameter):
            made[id(target)] = nn.Parameter(made[id(target)], requires_grad=target.requires_grad)
    stage.load_state_dict({name: made[id(tensor)] for name, tensor in wanted.items() if id(tensor) in made}, strict=False, assign=True)
