"""Checks of an engine when it is made, alone and together with the other ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flce import errors
from flce.engine import _schedules
from flce.engine._agreement import NOT_ALIKE, Agreement, Stepping, checksum, digest
from flce.engine._collective import gather, step
from flce.engine._output import vocab_size_of
from flce.engine._stage import Stage

if TYPE_CHECKING:
    from flce.engine._pipeline_engine import PipelineEngine


@dataclass(frozen=True)
class Tied:
    """This rank's copy of a tied weight, if it has one; the rank, counted among all, that has the other one; and whether a norm leaves this
    one out."""

    weight: nn.Parameter | None = None
    peer: int = 0
    uncounted: bool = False


def check_torch() -> None:
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 11):
        raise errors.UnavailableError(f"PipelineEngine needs torch 2.11 or newer; this is {torch.__version__}")
    if not dist.is_available() or not dist.is_initialized():
        raise errors.ArgumentError("PipelineEngine needs torch.distributed: call torch.distributed.init_process_group() first (torchrun)")


def stages_of(stage: Any) -> tuple[Stage, ...]:
    stages = (stage,) if isinstance(stage, nn.Module) else tuple(stage)
    for one in stages:
        if not isinstance(one, Stage):
            raise errors.DTypeError(f"stage is a {type(one).__name__}; it must be a flce.engine.Stage, or a list of them")
    if not stages:
        raise errors.ArgumentError("stage is an empty list; give this rank's stages")
    return stages


def norm(value: Any) -> float | None:
    if value is not None and (not isinstance(value, (int, float)) or isinstance(value, bool) or math.isnan(value) or value <= 0):
        raise errors.ArgumentError(f'max_grad_norm is {value!r}; it must be a positive number (float("inf") measures alone) or None')
    return value


def group_of(name: str, group: Any) -> dist.ProcessGroup:
    if not isinstance(group, dist.ProcessGroup):
        raise errors.ArgumentError(f"{name} does not have this rank; give each rank the group that it is in")
    return group


def device_of(stages: Sequence[Stage], device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    devices = {parameter.device for stage in stages for parameter in stage.parameters()}
    if len(devices) > 1:
        raise errors.PlacementError(f"stage: its parameters are on {', '.join(sorted(map(str, devices)))}; they must be on one device")
    return devices.pop() if devices else torch.device("cpu")


def meet(engine: PipelineEngine, error: Exception | None) -> tuple[Agreement, Tied]:
    """Tells the other ranks what this one was made with, and checks that it fits; `error`: why this rank cannot make its engine. Raises it,
    or ArgumentError, PipelineError, and on every rank, of data-parallel copies too."""
    agreement = Agreement(engine.pipeline_group, torch.device("cpu") if error else engine.device)
    copies = engine.data_parallel_group
    groups = [engine.pipeline_group] if copies is None else [engine.pipeline_group, copies]

    def alone() -> tuple[Any, ...]:
        if error is not None:
            raise error
        numbers = tuple(stage.stage for stage in engine.stages)
        _schedules.check_placement(engine.schedule, numbers, engine.num_stages, agreement.rank, len(agreement.ranks))
        settings = {stage.stage: _settings_of(engine, stage) for stage in engine.stages}
        stepping = stepping_of(engine)
        bits = [int(checksum(parameter)) for parameter in engine.parameters()]
        ids = (next((stage.num_embeddings for stage in engine.stages if stage.is_first), None), vocab_size_of(engine.stages))
        weights = _tied_weights(engine).items()
        tied = {stage: (tuple(weight.shape), str(weight.dtype), stepping.tied, int(checksum(weight))) for stage, weight in weights}
        return settings, tied, ids, (stepping.copy, bits)

    told = gather(engine.pipeline_group, step(groups, alone, errors.PipelineError))
    agreement.stages = [tuple(settings) for settings, *_ in told]
    ids = [*(first for _, _, (first, _), _ in told), *(rows for _, _, (_, rows), _ in told)]
    agreement.num_embeddings = next((number for number in ids if number is not None), None)

    def together() -> Tied:
        _check_settings(engine.stages[0].stage, {stage: facts for settings, *_ in told for stage, facts in settings.items()})
        return _check_tied(engine, agreement, {stage: facts for _, tied, *_ in told for stage, facts in tied.items()})

    tied = step(groups, together, errors.PipelineError)
    of_copies = [] if copies is None else gather(copies, (told[agreement.rank][-1], agreement.ranks))
    step(groups, lambda: _check_copies(agreement, [facts for facts, _ in of_copies]), errors.PipelineError)
    agreement.open_store(min((ranks for _, ranks in of_copies), default=agreement.ranks))
    return agreement, tied


def _settings_of(engine: PipelineEngine, stage: Stage) -> dict[str, Any]:
    """Settings that all stages of a pipeline have to have alike. ArgumentError for a stage that is not complete."""
    if any(parameter.is_meta for parameter in stage.parameters()):
        raise errors.ArgumentError(f"stage {stage.stage} has parameters on the meta device; load them first (load_stage)")
    if stage.is_last and stage.head is None:
        raise errors.ArgumentError(f"stage {stage.stage} is the last one and has no head; `head` is its output layer")
    copies = engine.data_parallel_group
    return {
        **{name: getattr(stage, name) for name in ("num_stages", "hidden_size", "dtype")},
        **{name: getattr(engine, name) for name in ("schedule", "num_micro_batches", "normalize", "max_grad_norm", "nonfinite")},
        "data_parallel_group of size": 1 if copies is None else dist.get_world_size(copies),
    }


def _check_settings(own: int, told: dict[int, dict[str, Any]]) -> None:
    for stage, others in told.items():
        for name, value in told[own].items():
            if others[name] != value:
                raise errors.ArgumentError(
                    f"stage {own} was made with {name} {value!r}, stage {stage} with {others[name]!r}; they must be the same on every "
                    "stage of a pipeline"
                )


def stepping_of(engine: PipelineEngine) -> Stepping:
    """Settings by which copies of this rank's parameters are stepped."""
    groups = [(group, _options_of(engine.optimizer, group)) for group in getattr(engine.optimizer, "param_groups", ())]
    numbers = {id(parameter): number for number, (group, _) in enumerate(groups) for parameter in group["params"]}
    settings = [getattr(engine, name) for name in ("normalize", "max_grad_norm", "nonfinite")]
    named = [each for stage in engine.stages for each in stage.named_parameters()]
    parameters = [(name, parameter.requires_grad, numbers.get(id(parameter))) for name, parameter in named]
    tied = None
    for weight in _tied_weights(engine).values():
        tied = digest((weight.requires_grad, groups[numbers[id(weight)]][1] if id(weight) in numbers else None))
    return Stepping(digest(settings), digest((settings, [options for _, options in groups], parameters)), tied)


def _options_of(optimizer: Any, group: dict[str, Any]) -> list[Any]:
    """A group's options that the optimizer's class has, in a form that compares between processes."""

    def plain(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple(map(plain, value))
        if isinstance(value, Tensor) and value.numel() == 1:
            return value.item()
        return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__

    defaults = getattr(optimizer, "defaults", None) or ()
    return [type(optimizer).__name__, *((name, plain(group[name])) for name in sorted(defaults) if name in group)]


def _tied_weights(engine: PipelineEngine) -> dict[int, nn.Parameter]:
    """This rank's copies of a tied weight, by stage: one stage alone has no copy."""
    return {stage.stage: stage.tied_weight for stage in engine.stages if stage.num_stages > 1 and stage.tied_weight is not None}


def _check_tied(engine: PipelineEngine, agreement: Agreement, found: dict[int, tuple[Any, ...]]) -> Tied:
    last = engine.num_stages - 1
    if found and set(found) != {0, last}:
        raise errors.ArgumentError(
            f"tied_weight is set on the stages {sorted(found)}; the first (0) and the last ({last}) have copies of one parameter, or "
            "none has"
        )
    if found and found[0] != found[last]:
        names = ("shape", "dtype", "requires_grad or options of the optimizer", "values")
        what = ", ".join(name for name, one, other in zip(names, found[0], found[last], strict=True) if one != other)
        raise errors.PipelineError(
            f"tied_weight of stage 0 and of stage {last} differ in {what}; they must be copies of one parameter", last
        )
    for stage, weight in _tied_weights(engine).items():
        return Tied(weight, agreement.ranks[0 if stage else -1], stage == last)
    return Tied()


def _check_copies(agreement: Agreement, told: Sequence[tuple[int, list[int]]]) -> None:
    """Checks that data-parallel ranks have the same parameters, and step them alike. told: by rank, digests of the step and of the bits."""
    if len({str(bits) for _, bits in told}) > 1:
        raise errors.PipelineError(
            f"{agreement.says(agreement.rank)} has other parameters on some of its {len(told)} data-parallel ranks; they must be copies "
            "when the engine is made: load the same checkpoint, or seed alike",
            agreement.stages[agreement.rank][0],
        )
    if len({stepped for stepped, _ in told}) > 1:
        raise errors.PipelineError(NOT_ALIKE)
