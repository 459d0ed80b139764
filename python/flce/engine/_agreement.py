"""Messages between a pipeline's ranks beside hidden states: whether they were called alike, and which stage failed."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as distributed_c10d
from torch import Tensor

from flce import errors
from flce.engine._transport import on_device

_made: dict[str, int] = {}

WHAT = (
    "the call and its options",
    "the number of microbatches",
    "the number of sequences",
    "cu_seqlens",
    "packed_input_ids",
    "the keywords",
    "normalize, max_grad_norm or nonfinite",
)
NOT_ALIKE = (
    "data-parallel copies are stepped otherwise (normalize, max_grad_norm, nonfinite, requires_grad, the optimizer's groups or their "
    "options); their parameters would part"
)
_TIED = 4  # numbers of a row for each end of the pipeline that may have a tied weight


class Agreed(Exception):  # noqa: N818
    """An error that ends a call on every rank alike, and leaves the engine usable."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def digest(text: str) -> int:
    return zlib.crc32(text.encode())


@dataclass(frozen=True)
class Stepping:
    """Settings by which copies of a parameter are stepped, as digests. Copies that start alike stay alike where these are the same.

    settings: the engine's. copy: what this rank's data-parallel copies must have alike. tied: what a tied weight's copies must, by stage.
    weights: tied weights whose values are to be compared, by stage.
    """

    settings: int
    copy: int
    tied: Mapping[int, int]
    weights: Mapping[int, Tensor]


@dataclass(frozen=True)
class Call:
    """Arguments that ranks must be called with alike: its parts, in the order of WHAT; ids are compared by a checksum. stepping: for a call
    that trains."""

    kind: str
    num_micro_batches: int
    lengths: Sequence[int]
    packed_input_ids: Tensor
    keywords: Mapping[str, Any]
    stepping: Stepping | None = None

    def row(self, device: torch.device, ends: tuple[int, int]) -> Tensor:
        """ends: the first stage and the last."""
        shapes = {name: (list(v.shape), str(v.dtype)) if isinstance(v, Tensor) else () for name, v in sorted(self.keywords.items())}
        known = [digest(self.kind), self.num_micro_batches, len(self.lengths), digest(repr(tuple(self.lengths))), 0, digest(repr(shapes))]
        with_what = self.stepping or Stepping(0, 0, {}, {})
        tied = [[int(end in with_what.tied), with_what.tied.get(end, 0), int(end in with_what.weights), 0] for end in ends]
        row = torch.tensor([1, *known, with_what.settings, with_what.copy, *tied[0], *tied[1]], dtype=torch.int64, device=device)
        row[1 + WHAT.index("packed_input_ids")] = checksum(self.packed_input_ids)
        for place, end in ((-_TIED - 1, ends[0]), (-1, ends[1])):
            if end in with_what.weights:
                row[place] = checksum(with_what.weights[end])
        return row


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
    None where that is not known. shared: a name that all data-parallel copies of the pipeline have, under which the first failure of any is
    kept.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.ranks = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank(group)
        self.device = device if on_device(group) else torch.device("cpu")
        self.stages: list[tuple[int, ...]] = [()] * len(self.ranks)
        self.num_embeddings: int | None = None
        self.ends = (0, 0)
        self.parted = False  # whether a tied weight's copies were found to differ
        self._store: Any = None
        self._calls = 0

    @property
    def name(self) -> str:
        return "-".join(map(str, self.ranks))

    def open_store(self, shared: str) -> None:
        _made[shared] = _made.get(shared, 0) + 1
        self._store = distributed_c10d.PrefixStore(f"flce/engine/{shared}/{_made[shared]}", distributed_c10d._get_default_store())

    def says(self, rank: int) -> str:
        """A rank by its stages."""
        stages = self.stages[rank]
        return f"stage {stages[0]}" if len(stages) == 1 else f"stages {' and '.join(map(str, stages))}"

    def gather(self, value: Any) -> list[Any]:
        """An object of every rank, by rank."""
        gathered: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def check_called_alike(self, prepare: Callable[[], Call], copies: dist.ProcessGroup | None) -> None:
        """Runs `prepare`, which raises where this rank's arguments are wrong, and compares. Raises Agreed on every rank where two ranks
        differ or one rank's arguments are wrong; with `copies`, also where a data-parallel rank's pipeline refused its batch, or is stepped
        otherwise."""
        problem: Exception | None = None
        call: Call | None = None
        self._calls += 1
        key = f"refused {self._calls}"
        own = self.stages[self.rank][0]
        try:
            call = prepare()
            row = call.row(self.device, self.ends)
        except Exception as error:
            problem = error
            self.tell(own, f"{type(error).__name__}: {error}", key)
            row = torch.zeros(2 + len(WHAT) + 2 * _TIED, dtype=torch.int64, device=self.device)
        rows = [torch.empty_like(row) for _ in self.ranks]
        dist.all_gather(rows, row, group=self.group)
        table = torch.stack(rows).tolist()
        problem = problem or self._difference(table, key) or self._tied_difference(table)
        if copies is not None:
            if problem is not None:
                self.tell(own, str(problem), key)
            problem = self._copies_difference(table, copies, key, problem)
        if problem is not None:
            raise Agreed(problem)

    def _tied_difference(self, table: list[list[int]]) -> errors.PipelineError | None:
        """Compares the copies of a tied weight, which the first and the last stage have."""
        first, last = (
            next((row[begin : begin + _TIED] for row in table if row[begin]), [0] * _TIED)
            for begin in (len(table[0]) - 2 * _TIED, len(table[0]) - _TIED)
        )
        if first[:2] == last[:2]:
            if not (first[2] and last[2]):
                return None
            self.parted = first[3] != last[3]
            if not self.parted:
                return None
        what = "values" if first[:2] == last[:2] else "requires_grad or options of the optimizer"
        return errors.PipelineError(
            f"tied_weight of stage {self.ends[0]} and of stage {self.ends[1]} differ in {what}; they must be copies of one parameter, "
            "trained alike. Nothing was computed",
            self.ends[1],
        )

    def _copies_difference(
        self, table: list[list[int]], copies: dist.ProcessGroup, key: str, problem: Exception | None
    ) -> Exception | None:
        """Compares data-parallel ranks. A problem of one is a problem of all."""
        own = self.stages[self.rank][0]
        stepped = digest(repr([row[len(WHAT) : len(WHAT) + 2] for row in table]))
        found = torch.tensor([int(problem is None), stepped, -stepped], device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=copies)
        fine, least, most = found.tolist()
        if problem is None and not fine:
            return errors.PipelineError(f"another data-parallel rank refused its batch{self._told_of(key)}. Nothing was computed", own)
        if problem is None and least != -most:
            return errors.PipelineError(f"{NOT_ALIKE}. Nothing was computed")
        return problem

    def _told_of(self, key: str) -> str:
        told = self.told(key)
        return f": {told[1]}" if told else ""

    def _difference(self, rows: list[list[int]], key: str) -> errors.PipelineError | None:
        for rank, row in enumerate(rows):
            if not row[0]:
                return errors.PipelineError(
                    f"{self.says(rank)} refused what it was called with{self._told_of(key)}. Nothing was computed", self.stages[rank][0]
                )
        for rank, row in enumerate(rows):
            parts = [name for name, one, other in zip(WHAT, rows[0][1:], row[1:], strict=False) if one != other]
            if parts:
                return errors.PipelineError(
                    f"{self.says(0)} and {self.says(rank)} were called with different arguments: {', '.join(parts)}; every rank of a "
                    "pipeline must be given the same batch. Nothing was computed",
                    self.stages[rank][0],
                )
        return None

    def tell(self, stage: int, message: str, key: str = "failed") -> None:
        """Tells other ranks, which find the message where their own waits end. The first message stays."""
        if self._store is None:
            return
        try:
            self._store.compare_set(key, "", f"{stage} {message}")
        except Exception:
            pass  # the store may have gone with the rank that kept it

    def told(self, key: str = "failed") -> tuple[int, str] | None:
        try:
            if self._store is None or not self._store.check([key]):
                return None
            stage, message = self._store.get(key).decode().split(" ", 1)
            return int(stage), message
        except Exception:
            return None

    def reason(self, error: BaseException) -> errors.PipelineError:
        """Why a wait on another rank ended with `error`: what the first rank that failed, or that saw a connection broken, has told."""
        self.tell(-1, f"{self.says(self.rank)} could not exchange data with another stage, which is gone or does not answer")
        stage, message = self.told() or (-1, f"{self.says(self.rank)} could not exchange data with another stage")
        return errors.PipelineError(f"{message} (seen by {self.says(self.rank)}: {_first_line(error)})", None if stage < 0 else stage)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0][:200]
