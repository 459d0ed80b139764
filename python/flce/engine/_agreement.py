"""Messages between a pipeline's ranks beside hidden states: whether they were called alike, and which stage failed."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as distributed_c10d
from torch import Tensor

from flce import errors
from flce.engine._collective import gather
from flce.engine._transport import on_device

_made: dict[str, int] = {}
NOT_ALIKE = (
    "data-parallel copies are stepped otherwise (normalize, max_grad_norm, nonfinite, requires_grad, the optimizer's groups or their "
    "options); their parameters would part"
)


class Agreed(Exception):  # noqa: N818
    """An error that ends a call on every rank alike, and leaves the engine usable."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def digest(value: Any) -> int:
    return zlib.crc32(repr(value).encode())


class Stepping(NamedTuple):
    """Settings by which copies of a parameter are stepped, as digests. Copies that start alike stay alike where these are the same.

    settings: the engine's. copy: what this rank's data-parallel copies must have alike. tied: what a tied weight's copies must; None
    without one.
    """

    settings: int = 0
    copy: int = 0
    tied: int | None = None


@dataclass(frozen=True)
class Call:
    """Arguments that ranks must be called with alike; ids are compared by a checksum. stepping: for a call that trains."""

    kind: str
    num_micro_batches: int
    lengths: Sequence[int]
    packed_input_ids: Tensor
    keywords: Mapping[str, Any]
    stepping: Stepping

    def facts(self) -> dict[str, int]:
        shapes = [(name, (list(v.shape), v.dtype) if isinstance(v, Tensor) else ()) for name, v in sorted(self.keywords.items())]
        return {
            "the call and its options": digest(self.kind),
            "the number of microbatches": self.num_micro_batches,
            "the number of sequences": len(self.lengths),
            "cu_seqlens": digest(tuple(self.lengths)),
            "packed_input_ids": int(checksum(self.packed_input_ids)),
            "the keywords": digest(shapes),
            "normalize, max_grad_norm or nonfinite": self.stepping.settings,
        }


def checksum(tensor: Tensor) -> Tensor:
    """Checksum of a tensor's bits and their places: an int64 scalar, on its device, which no rounding changes."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().reshape(-1).view(kinds[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, part in enumerate(bits.split(1 << 22)):
        places = torch.arange(1, 2 * part.numel(), 2, device=tensor.device)
        total += (part.to(torch.int64) * places).sum() * (2 * number + 1)
    return total


class Agreement:
    """The ranks of one pipeline.

    group: theirs. stages: the numbers of each rank's stages, by its rank in the group. num_embeddings: how many ids the first stage takes;
    None where that is not known. shared: ranks of one of the pipeline's data-parallel copies, under whose name all of them keep the first
    failure of any.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.ranks = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank(group)
        self.device = device if on_device(group) else torch.device("cpu")
        self.stages: list[tuple[int, ...]] = [()] * len(self.ranks)
        self.num_embeddings: int | None = None
        self._store: Any = None

    def open_store(self, shared: Sequence[int]) -> None:
        name = "-".join(map(str, shared))
        _made[name] = _made.get(name, 0) + 1
        self._store = distributed_c10d.PrefixStore(f"flce/engine/{name}/{_made[name]}", distributed_c10d._get_default_store())

    def says(self, rank: int) -> str:
        """A rank by its stages."""
        stages = self.stages[rank]
        return f"stage {stages[0]}" if len(stages) == 1 else f"stages {' and '.join(map(str, stages))}"

    def check_called_alike(self, prepare: Callable[[], Call], copies: dist.ProcessGroup | None) -> None:
        """Runs `prepare`, which raises where this rank's arguments are wrong, and compares. Raises Agreed on every rank where two ranks
        differ or one rank's arguments are wrong; with `copies`, also where a data-parallel rank's pipeline refused its batch, or is stepped
        otherwise."""
        problem: Exception | None = None
        facts: dict[str, int] = {}
        stepping = Stepping()
        try:
            call = prepare()
            facts, stepping = call.facts(), call.stepping
        except Exception as error:
            problem = error
        refused = None if problem is None else f"{type(problem).__name__}: {problem}"
        told = gather(self.group, (refused, facts, stepping))
        problem = problem or self._difference(told)
        if copies is not None:
            steppings = [each.copy for _, _, each in told]
            others = gather(copies, (None if problem is None else str(problem), steppings))
            said = next((said for said, _ in others if said is not None), None)
            if problem is None and said is not None:
                own = self.stages[self.rank][0]
                problem = errors.PipelineError(f"another data-parallel rank refused its batch: {said}. Nothing was computed", own)
            if problem is None and any(each != steppings for _, each in others):
                problem = errors.PipelineError(f"{NOT_ALIKE}. Nothing was computed")
        if problem is not None:
            raise Agreed(problem)

    def _difference(self, told: Sequence[tuple[str | None, dict[str, int], Stepping]]) -> errors.PipelineError | None:
        for rank, (refused, _, _) in enumerate(told):
            if refused is not None:
                return errors.PipelineError(
                    f"{self.says(rank)} refused what it was called with: {refused}. Nothing was computed", self.stages[rank][0]
                )
        first = told[0][1]
        for rank, (_, facts, _) in enumerate(told):
            parts = [name for name, value in facts.items() if value != first[name]]
            if parts:
                return errors.PipelineError(
                    f"{self.says(0)} and {self.says(rank)} were called with different arguments: {', '.join(parts)}; every rank of a "
                    "pipeline must be given the same batch. Nothing was computed",
                    self.stages[rank][0],
                )
        if told[0][2].tied != told[-1][2].tied:
            last = self.stages[-1][-1]
            return errors.PipelineError(
                f"tied_weight of stage 0 and of stage {last} differ in requires_grad or options of the optimizer; they must be copies of "
                "one parameter, trained alike. Nothing was computed",
                last,
            )
        return None

    def tell(self, stage: int, message: str) -> None:
        """Tells other ranks, which find the message where their own waits end. The first message stays."""
        try:
            self._store.compare_set("failed", "", f"{stage} {message}")
        except Exception:
            pass  # the store may have gone with the rank that kept it

    def reason(self, error: BaseException) -> errors.PipelineError:
        """Why a wait on another rank ended with `error`: what the first rank that failed, or that saw a connection broken, has told."""
        own = f"{self.says(self.rank)} could not exchange data with another stage, which is gone or does not answer"
        self.tell(-1, own)
        try:
            stage, message = self._store.get("failed").decode().split(" ", 1)
        except Exception:
            stage, message = "-1", own
        first_line = (str(error) or type(error).__name__).strip().splitlines()[0][:200]
        return errors.PipelineError(f"{message} (seen by {self.says(self.rank)}: {first_line})", None if stage == "-1" else int(stage))
