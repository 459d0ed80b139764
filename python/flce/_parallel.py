"""The vocabulary over the ranks of a process group: what a caller says of it, what the ranks agree on, and the collectives of a call.

A call's `Parallel` travels as text through operators and compiled graphs; groups are found again by their names.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flce import errors

if dist.is_available():
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
else:  # nothing is one

    class ProcessGroup:  # type: ignore[no-redef]
        """A group of ranks."""

    class DeviceMesh:  # type: ignore[no-redef]
        """Ranks in several dimensions."""


_REDUCE_DTYPES = {None: "", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# torch 2.13 has other names for these two, and warns of the old ones. A torch without distributed has neither.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)
_BY_NAME = {name: dtype for dtype, name in _REDUCE_DTYPES.items()}


class Parallel(NamedTuple):
    """How a weight's rows lie over a group."""

    ranks: int
    sequence: bool  # hidden is this rank's part of the tokens
    vocab_start: int  # label of the first row of this rank's weight; -1: the rows of lower ranks added up
    vocab_size: int  # classes of all ranks; -1: all of their rows
    reduce_dtype: str  # in which grad_hidden is added up; "": hidden's
    reduce_grad_hidden: bool  # grad_hidden is added up; else this rank's part
    group: str  # name

    def text(self) -> str:
        sums = f"{self.reduce_dtype or '-'} {int(self.reduce_grad_hidden)}"
        return f"{self.ranks} {int(self.sequence)} {self.vocab_start} {self.vocab_size} {sums} {self.group}"


def parallel_of(text: str) -> Parallel:
    ranks, sequence, vocab_start, vocab_size, reduce_dtype, reduce_grad_hidden, group = text.split(" ", 6)
    sums = (reduce_dtype.strip("-"), reduce_grad_hidden == "1")
    return Parallel(int(ranks), sequence == "1", int(vocab_start), int(vocab_size), *sums, group)


def sequence_ranks(text: str) -> int:
    """By what number a call's hidden has fewer rows than its target."""
    parallel = parallel_of(text)
    return parallel.ranks if parallel.sequence else 1


def reduce_dtype(parallel: Parallel, hidden: torch.dtype) -> torch.dtype:
    """In which this rank's part of hidden's gradient is made and added up: hidden's or fp32."""
    return _BY_NAME[parallel.reduce_dtype] or hidden


def asked(
    process_group: Any, sequence_parallel: Any, vocab_start: Any, vocab_size: Any, reduce_dtype: Any, reduce_grad_hidden: Any
) -> Parallel | None:
    """What a caller's arguments say; None where the weight is whole. Raises ArgumentError, DTypeError."""
    others = {"vocab_start": vocab_start, "vocab_size": vocab_size, "reduce_dtype": reduce_dtype}
    for name, flag in (("sequence_parallel", sequence_parallel), ("reduce_grad_hidden", reduce_grad_hidden)):
        if not isinstance(flag, bool):
            raise errors.DTypeError(f"{name} is {flag!r}; it must be True or False")
    if process_group is None:
        flags = {"sequence_parallel": sequence_parallel or None, "reduce_grad_hidden": None if reduce_grad_hidden else False}
        for name, value in {**flags, **others}.items():
            if value is not None:
                raise errors.ArgumentError(f"{name} is given and process_group is None; it says how a weight lies over a group's ranks")
        return None
    group = group_of(process_group)
    for name in ("vocab_start", "vocab_size"):
        value = others[name]
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise errors.ArgumentError(f"{name} is {value!r}; it must be an integer of 0 or more, or None")
    if reduce_dtype is not None and not (isinstance(reduce_dtype, torch.dtype) and reduce_dtype in _REDUCE_DTYPES):
        raise errors.DTypeError(f"reduce_dtype is {reduce_dtype!r}; allowed are torch.bfloat16, torch.float16, torch.float32 and None")
    if not reduce_grad_hidden:
        for name, value in (("sequence_parallel", sequence_parallel or None), ("reduce_dtype", reduce_dtype)):
            if value is not None:
                raise errors.ArgumentError(
                    f"{name} is {value!r} and reduce_grad_hidden is False; it says how the ranks' parts are added up"
                )
    start, size = (-1 if value is None else value for value in (vocab_start, vocab_size))
    return Parallel(group.size(), sequence_parallel, start, size, _REDUCE_DTYPES[reduce_dtype], reduce_grad_hidden, group.group_name)


def group_of(given: Any, name: str = "process_group") -> Any:
    """A ProcessGroup from what a caller has: one, or a DeviceMesh of one dimension."""
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            names = given.mesh_dim_names or ["unnamed"] * given.ndim
            raise errors.PlacementError(
                f"{name} is a DeviceMesh of dimensions {list(names)}; it must have one: take that of the tensor-parallel ranks, "
                "such as mesh['tp']"
            )
        if given.get_coordinate() is None:
            raise errors.PlacementError(f"process_group is a {given}, in which this rank is not; only its ranks make the call")
        given = given.get_group()
    if not isinstance(given, ProcessGroup):
        raise errors.ArgumentError(
            f"{name} is a {type(given).__name__}; it must be a torch.distributed ProcessGroup that this rank is in, or a DeviceMesh"
        )
    return given


# ── What ranks agree on ─────────────────────────────


class Shard(NamedTuple):
    """This rank's part of a layer, as all ranks have found together."""

    vocab_start: int
    rows: int  # of this rank's weight
    classes: int  # how many of them are classes
    most_classes: int  # of any rank
    most_rows: int
    vocab_size: int  # of all ranks


class _Facts(NamedTuple):
    """What a rank tells the others before the first call of its kind."""

    rank: int
    rows: int
    vocab_start: int
    layer: tuple[Any, ...]  # what has to be the same on every rank, as (name, value)
    tokens: tuple[Any, ...]  # the same of tensors, as (name, contents)


_lock = threading.Lock()
# By group: one that is destroyed goes, and what its ranks agreed on.
_known: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], Shard]] = weakref.WeakKeyDictionary()


def group_named(name: str) -> Any:
    try:
        return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type]
    except RuntimeError as error:
        raise errors.PlacementError(f"process_group {name!r} is gone, or this process is not in it: {error}") from None


def shard_of(parallel: Parallel, weight: Tensor, tokens: dict[str, Tensor | None], layer: tuple[tuple[str, Any], ...]) -> Shard:
    """This rank's shard. The first call of a kind (a group, a weight's shape, `layer`) asks all ranks, which have to call at the same time,
    and waits for the device: `layer` and `tokens`, what is said of each token, have to be the same on all of them. Raises PlacementError on
    every rank where they are not."""
    group = group_named(parallel.group)
    key = (parallel, tuple(weight.shape), weight.device.type, layer)
    shard = _known.get(group, {}).get(key)
    if shard is not None:
        return shard
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        raise errors.UnavailableError(
            "ranks have not agreed yet on how this weight lies over their group, and a CUDA graph is being captured: run the call once "
            "before the capture"
        )
    layer = (("vocab_size", None if parallel.vocab_size < 0 else parallel.vocab_size), *layer)
    same = tuple((name, _contents(name, tensor)) for name, tensor in tokens.items())
    facts = _Facts(group.rank(), weight.shape[0], parallel.vocab_start, layer, same)
    everyone: list[Any] = [None] * parallel.ranks
    dist.all_gather_object(everyone, facts, group=group)
    made = agreed(parallel, [_Facts(*one) for one in everyone], group.rank())
    with _lock:
        return _known.setdefault(group, {}).setdefault(key, made)


# What ranks compute for themselves may differ in its last bits, and what an ignored row holds in all of them: of these no digest is taken.
_SHAPE_ALONE = ("token_weight", "teacher_probs")


def _contents(name: str, tensor: Tensor | None) -> tuple[list[int], str, int] | None:
    """Shape, dtype and a digest of a tensor's numbers, which depends on their order."""
    if tensor is None:
        return None
    digest = 0
    if name not in _SHAPE_ALONE:
        bits = tensor.detach().contiguous().reshape(-1)
        bits = bits.view(torch.int32) if bits.dtype is torch.float32 else bits
        digest = int((bits.to(torch.int64) * torch.arange(1, bits.numel() + 1, device=bits.device)).sum().item())
    return list(tensor.shape), str(tensor.dtype), digest


def agreed(parallel: Parallel, everyone: list[_Facts], rank: int) -> Shard:
    """The shard of `rank` among those that all ranks say they have. Raises PlacementError where they do not make a vocabulary."""
    first = everyone[0]
    for facts in everyone[1:]:
        for (name, here), (_, there) in zip(first.layer, facts.layer, strict=True):
            if here != there:
                between = f"differs between ranks of the process group: {here!r} on rank 0, {there!r} on {facts.rank}"
                raise errors.PlacementError(f"{name} {between}")
        for (name, here), (_, there) in zip(first.tokens, facts.tokens, strict=True):
            if here != there:
                raise errors.PlacementError(
                    f"{name} differs between ranks 0 and {facts.rank} of the process group ({_said(here)}, {_said(there)}): ranks that "
                    "share a vocabulary have the same tokens; for tokens of its own give each rank the whole weight and no process_group"
                )
    starts = _starts(everyone)
    rows = [facts.rows for facts in everyone]
    whole = max(start + count for start, count in zip(starts, rows, strict=True))
    vocab_size = whole if parallel.vocab_size < 0 else parallel.vocab_size
    if not 2 <= vocab_size <= whole:
        raise errors.ShapeError(f"vocab_size is {vocab_size}; all ranks' weights have {whole} rows, so that it must be from 2 to {whole}")
    classes = [min(max(vocab_size - start, 0), count) for start, count in zip(starts, rows, strict=True)]
    return Shard(starts[rank], rows[rank], classes[rank], max(classes), max(rows), vocab_size)


def _said(contents: tuple[Any, ...] | None) -> str:
    return "none" if contents is None else f"{contents[0]} of {contents[1]}"


def _starts(everyone: list[_Facts]) -> list[int]:
    """Labels of every rank's first row."""
    given = [facts.vocab_start for facts in everyone]
    if -1 in given and any(start != -1 for start in given):
        raise errors.PlacementError(f"vocab_start is given on some ranks and None on others: {[None if s < 0 else s for s in given]}")
    if given[0] == -1:
        return [sum(facts.rows for facts in everyone[:i]) for i in range(len(everyone))]
    end = 0
    for facts in sorted(everyone, key=lambda facts: (facts.vocab_start, facts.rows)):
        if facts.vocab_start != end:
            what = "overlap" if facts.vocab_start < end else "leave a gap"
            raise errors.PlacementError(
                f"vocab_start is {given} for weights of {[facts.rows for facts in everyone]} rows: they {what} at label {end}"
            )
        end += facts.rows
    return given


def forget() -> None:
    """Forgets what ranks have agreed on: the next calls ask again, on every rank."""
    with _lock:
        _known.clear()


# ── Collectives ─────────────────────────────────────


def gathered(group: Any, part: Tensor, ranks: int) -> Tensor:
    """All ranks' parts along dimension 0, in the order of ranks. On the current stream."""
    whole, work = start_gather(group, part, ranks)
    work.wait()
    return whole


def start_gather(group: Any, part: Tensor, ranks: int) -> tuple[Tensor, Any]:
    """The same, and what to wait for before it is read."""
    part = part.contiguous()
    whole = part.new_empty((ranks * part.shape[0], *part.shape[1:]))
    return whole, _all_gather(whole, part, group=group, async_op=True)


def start_sum(group: Any, gradient: Tensor, parallel: Parallel) -> tuple[Tensor, Any]:
    """Adds up the ranks' gradients [N, D], in place; with sequence parallel this rank's rows of the sum. Returns them, and what to wait for
    before they are read."""
    if not parallel.sequence:
        return gradient, dist.all_reduce(gradient, group=group, async_op=True)
    mine = gradient.new_empty((gradient.shape[0] // parallel.ranks, gradient.shape[1]))
    return mine, _reduce_scatter(mine, gradient, group=group, async_op=True)
