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
from flce.engine._output import vocab_size_of
from flce.engine._stage import Stage

if TYPE_CHECKING:
    from flce.engine._pipeline_engine import PipelineEngine

_OLDEST_TORCH = (2, 11)


@dataclass(frozen=True)
class Tied:
    """This rank's copy of a tied weight, if it has one; the rank, counted among all, that has the other one; and whether a norm leaves this
    one out."""

    weight: nn.Parameter | None = None
    peer: int = 0
    uncounted: bool = False


def check_torch() -> None:
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if version < _OLDEST_TORCH:
        raise errors.UnavailableError(
            f"PipelineEngine needs torch {'.'.join(map(str, _OLDEST_TORCH))} or newer; this is {torch.__version__}"
        )
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


def group_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):
        raise errors.ArgumentError("pipeline_group does not have this rank; every rank makes the engine with the group that it is in")
    return found


def copies_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise errors.ArgumentError(
            "data_parallel_group does not have this rank; give each rank the group of the ranks that have copies of its stages"
        )
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
    numbers, settings = ((), {}) if error else (tuple(stage.stage for stage in engine.stages), _settings_of(engine))
    problem = error
    if error is None:
        try:
            _schedules.check_placement(engine.schedule, numbers, engine.num_stages, agreement.rank, len(agreement.ranks))
            _check_stages(engine.stages)
        except errors.ArgumentError as refused:
            problem = refused
    known = ({}, []) if problem else (_tied_of(engine), _num_embeddings_of(engine.stages))
    told = agreement.gather((numbers, settings, None if problem is None else str(problem), *known))
    agreement.stages = [numbers for numbers, *_ in told]
    agreement.ends = (0, engine.num_stages - 1) if error is None else agreement.ends
    agreement.num_embeddings = min((pair for *_, pairs in told for pair in pairs), default=(0, None))[1]
    tied = Tied()
    try:
        if problem is None:
            _check_told(agreement, [(others, said) for _, others, said, *_ in told])
            tied = _check_tied(engine, agreement, [part for *_, part, _ in told])
    except (errors.ArgumentError, errors.PipelineError) as refused:
        problem = refused
    agreement.open_store(_check_copies(engine, agreement, problem))
    return agreement, tied


def _num_embeddings_of(stages: Sequence[Stage]) -> list[tuple[int, int]]:
    """How many ids the first stage takes, and the rows of the last one's head: the first of them counts."""
    known = [(stage.stage, stage.num_embeddings) for stage in stages if stage.is_first]
    known += [(stages[0].num_stages, vocab_size_of(stages))]
    return [(stage, number) for stage, number in known if number is not None]


def _settings_of(engine: PipelineEngine) -> dict[str, Any]:
    """Settings with which all ranks of a pipeline have to be made alike."""
    return {
        "num_stages": engine.num_stages,
        "hidden_size": engine.stages[0].hidden_size,
        "dtype": str(engine.stages[0].dtype),
        "schedule": engine.schedule,
        "num_micro_batches": engine.num_micro_batches,
        "normalize": engine.normalize,
        "max_grad_norm": engine.max_grad_norm,
        "nonfinite": engine.nonfinite,
        "data_parallel_group of size": 1 if engine.data_parallel_group is None else dist.get_world_size(engine.data_parallel_group),
    }


def _check_told(agreement: Agreement, told: Sequence[tuple[dict[str, Any], str | None]]) -> None:
    """Checks that no rank has refused its settings, and that all ranks have this one's settings."""
    settings, _ = told[agreement.rank]
    for rank, (_, refused) in enumerate(told):
        if refused is not None:
            raise errors.ArgumentError(f"rank {rank} of the pipeline: {refused}")
    for rank, (others, _) in enumerate(told):
        for name, value in settings.items():
            if others[name] != value:
                raise errors.ArgumentError(
                    f"{agreement.says(agreement.rank)} was made with {name} {value!r}, {agreement.says(rank)} with {others[name]!r}; they "
                    "must be the same on every rank of a pipeline"
                )


def _check_stages(stages: Sequence[Stage]) -> None:
    first = stages[0]
    for stage in stages:
        for name in ("num_stages", "hidden_size", "dtype"):
            if getattr(stage, name) != getattr(first, name):
                raise errors.ArgumentError(
                    f"stage {stage.stage} has {name} {getattr(stage, name)!r}, stage {first.stage} has {getattr(first, name)!r}; they "
                    "must be the same"
                )
        if any(parameter.is_meta for parameter in stage.parameters()):
            raise errors.ArgumentError(f"stage {stage.stage} has parameters on the meta device; load them first (load_stage)")
        if stage.is_last and stage.head is None:
            raise errors.ArgumentError(f"stage {stage.stage} is the last one and has no head; `head` is its output layer")


def stepping_of(engine: PipelineEngine, with_values: bool) -> Stepping:
    """Settings by which copies of this rank's parameters are stepped; with_values: a tied weight's values are compared too."""
    groups = [(group, _options_of(engine.optimizer, group)) for group in getattr(engine.optimizer, "param_groups", ())]
    numbers = {id(parameter): number for number, (group, _) in enumerate(groups) for parameter in group["params"]}
    settings = [getattr(engine, name) for name in ("normalize", "max_grad_norm", "nonfinite")]
    parameters = [
        (name, parameter.requires_grad, numbers.get(id(parameter)))
        for stage in engine.stages
        for name, parameter in stage.named_parameters()
    ]
    weights = {stage.stage: stage.tied_weight for stage in engine.stages if stage.num_stages > 1 and stage.tied_weight is not None}
    tied = {}
    for end, weight in weights.items():
        options = groups[numbers[id(weight)]][1] if id(weight) in numbers else None
        tied[end] = digest(repr((weight.requires_grad, options)))
    copy = digest(repr((settings, [options for _, options in groups], parameters)))
    return Stepping(digest(repr(settings)), copy, tied, weights if with_values else {})


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


def _tied_of(engine: PipelineEngine) -> dict[int, tuple[Any, ...]]:
    """Facts of tied weights by stage: shape, dtype, settings of the step, and a checksum of the bits."""
    stepping = stepping_of(engine, True)
    return {
        stage: (tuple(weight.shape), str(weight.dtype), stepping.tied[stage], int(checksum(weight)))
        for stage, weight in stepping.weights.items()
    }


def _check_tied(engine: PipelineEngine, agreement: Agreement, told: list[dict[int, tuple[Any, ...]]]) -> Tied:
    found = {stage: what for part in told for stage, what in part.items()}
    if not found:
        return Tied()
    last = engine.num_stages - 1
    if set(found) != {0, last}:
        raise errors.ArgumentError(
            f"tied_weight is set on the stages {sorted(found)}; the first (0) and the last ({last}) have copies of one parameter, or "
            "none has"
        )
    if found[0] != found[last]:
        names = ("shape", "dtype", "requires_grad or options of the optimizer", "values")
        what = [name for name, one, other in zip(names, found[0], found[last], strict=True) if one != other]
        raise errors.PipelineError(
            f"tied_weight of stage 0 and of stage {last} differ in {', '.join(what)}; they must be copies of one parameter when the engine "
            "is made",
            last,
        )
    own = next(((stage, stage.tied_weight) for stage in engine.stages if stage.stage in found), None)
    if own is None:
        return Tied()
    stage, weight = own
    return Tied(weight, agreement.ranks[-1 if stage.is_first else 0], stage.is_last)


def _check_copies(engine: PipelineEngine, agreement: Agreement, problem: Exception | None) -> str:
    """Checks that no rank of any copy has a problem, and that data-parallel ranks have the same parameters. Raises on every rank of all
    copies, so that none waits for one that has raised: their ranks hear of it first, and then those of their pipelines. Returns a name that
    the copies share."""
    copies, shared = engine.data_parallel_group, agreement.name
    if copies is not None:
        own = [] if problem is not None else engine.parameters()
        bits = sum(
            (checksum(parameter) * (2 * n + 1) for n, parameter in enumerate(own) if not parameter.is_meta),
            torch.zeros((), dtype=torch.int64, device="cpu"),
        )
        told: list[Any] = [None] * dist.get_world_size(copies)
        stepped = 0 if problem is not None else stepping_of(engine, False).copy
        dist.all_gather_object(told, (int(bits), shared, stepped, None if problem is None else str(problem)), group=copies)
        refused = next(((rank, said) for rank, (*_, said) in enumerate(told) if said is not None), None)
        if problem is None and refused is not None:
            problem = errors.PipelineError(f"data-parallel rank {refused[0]} could not make its engine: {refused[1]}")
        elif problem is None and len({bits for bits, *_ in told}) > 1:
            problem = errors.PipelineError(
                f"{agreement.says(agreement.rank)} has other parameters on some of its {len(told)} data-parallel ranks; they must be "
                "copies when the engine is made: load the same checkpoint, or seed alike",
                agreement.stages[agreement.rank][0],
            )
        elif problem is None and len({stepped for _, _, stepped, _ in told}) > 1:
            problem = errors.PipelineError(NOT_ALIKE)
        shared = str(min(name for _, name, *_ in told))
    found = agreement.gather(None if problem is None else (str(problem), getattr(problem, "stage", None)))
    if problem is not None:
        raise problem
    others = next((said for said in found if said is not None), None)
    if others is not None:
        raise errors.PipelineError(*others)
    return shared
