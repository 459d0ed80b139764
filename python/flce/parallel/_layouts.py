"""Agreement of a group's ranks before a call of a new layer: where each rank's rows of the weight lie in the vocabulary.

A rank sees its own rows alone. Another layer may have equally many rows here and others on the next rank, and a weight that is known here
may be new there. No rank therefore decides anything by its own memory: in each forward the ranks' hosts tell each other their numbers, a
few of them and without waiting for a device:

    the numbers of a layer that was agreed on      its shards, at once
    any others                                     ranks tell each other everything, and find the same shards or the same error
"""

from __future__ import annotations

import weakref
import zlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flce import errors
from flce.core import _locks
from flce.core._frame import Parallel
from flce.parallel._parallel import told_by_hosts

_MOST = 1 << 62  # numbers that hosts tell each other have 64 bits


class Shard(NamedTuple):
    """This rank's part of a layer, as all ranks have found together."""

    vocab_start: int
    rows: int  # rows of this rank's weight
    classes: int  # how many of them are classes
    most_classes: int  # the most classes of any rank
    most_rows: int
    vocab_size: int  # classes of all ranks together


class _Facts(NamedTuple):
    """Facts that a rank tells the others of a new layer."""

    rank: int
    rows: int
    vocab_start: int
    all_rows: int  # rows of a DTensor over all ranks; -1: the weight is none
    layer: tuple[Any, ...]  # facts that have to be the same on every rank, as (name, value)
    tokens: tuple[Any, ...]  # contents of tensors over tokens, which have to be the same on every rank, as (name, contents)


class Agreed:
    """A layer as ranks describe it alike, and the shards that they have agreed on for it. Every rank has the same history."""

    def __init__(self, layer: tuple[Any, ...]) -> None:
        self.layer = layer
        self.digest = zlib.crc32(repr(layer).encode())
        self.shards: dict[tuple[Any, ...], Shard] = {}  # this rank's, by every rank's rows, vocab_start and all_rows

    def numbers(self, parallel: Parallel, weight: Tensor, num_tokens: int) -> tuple[int, ...]:
        """This rank's numbers of a call."""
        capturing = weight.is_cuda and torch.cuda.is_current_stream_capturing()
        place = (weight.shape[0], min(parallel.vocab_start, _MOST), parallel.all_rows)
        return (self.digest, len(self.shards), num_tokens, int(capturing), *place)

    def known(self, everyone: list[tuple[int, ...]]) -> Shard | None:
        """The shard that every rank has by all ranks' numbers; None where they have yet to agree on one."""
        alike = len({numbers[:3] for numbers in everyone}) == 1
        return self.shards.get(_places(everyone)) if alike else None


Agreements = dict[tuple[Any, ...], Agreed]  # by layer
_lock = _locks.new_lock()
# Agreements by group: a group that is destroyed takes its own along.
_known: weakref.WeakKeyDictionary[Any, Agreements] = weakref.WeakKeyDictionary()


def agreements_of(group: Any) -> Agreements:
    """Agreements of the group's ranks: the same object until the group is destroyed or all is forgotten."""
    agreements = _known.get(group)
    if agreements is None:
        with _lock:
            agreements = _known.setdefault(group, {})
    return agreements


def agreed_among(agreements: Agreements, parallel: Parallel, weight: Tensor, layer: tuple[tuple[str, Any], ...]) -> Agreed:
    """The agreement on a layer of this description, which may have no shards yet."""
    layer = (("vocab_size", None if parallel.vocab_size < 0 else parallel.vocab_size), ("hidden's device", weight.device.type), *layer)
    agreed = agreements.get(layer)
    return agreements.setdefault(layer, Agreed(layer)) if agreed is None else agreed


def shard_of(
    group: Any,
    parallel: Parallel,
    weight: Tensor,
    tokens: dict[str, Tensor | None],
    layer: tuple[tuple[str, Any], ...],
    *,
    backward: bool = False,
) -> Shard:
    """This rank's shard. All ranks call at the same time. For a new layer they wait for the device: `layer` and `tokens`, what is said of
    each token, have to be the same on all of them. A `backward` asks the others only where its forward may have been one of several
    layers'. Raises PlacementError or ShapeError on every rank where the ranks do not fit together; UnavailableError, on every rank, for a
    new layer in a capture."""
    agreed = agreed_among(agreements_of(group), parallel, weight, layer)
    if backward and len(agreed.shards) == 1:
        return next(iter(agreed.shards.values()))
    first = next(each for each in tokens.values() if each is not None)
    everyone = told_by_hosts(group, agreed.numbers(parallel, weight, first.shape[0]))
    return shard_told(agreed, everyone, group, parallel, weight, tokens)


def shard_told(
    agreed: Agreed,
    everyone: list[tuple[int, ...]],
    group: Any,
    parallel: Parallel,
    weight: Tensor,
    tokens: dict[str, Tensor | None],
) -> Shard:
    """`shard_of` once every rank has told its numbers."""
    shard = agreed.known(everyone)
    if shard is None:
        if any(numbers[3] for numbers in everyone):
            raise errors.UnavailableError(
                "ranks have not agreed yet on how this weight lies over their group, and a CUDA graph is being captured: run the call once "
                "before the capture"
            )
        shard = agreed.shards[_places(everyone)] = _ask(group, parallel, weight, agreed.layer, tokens)
    return shard


def _places(everyone: list[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Every rank's rows, vocab_start and all_rows, among its numbers."""
    return tuple(numbers[4:] for numbers in everyone)


def _ask(group: Any, parallel: Parallel, weight: Tensor, layer: tuple[Any, ...], tokens: dict[str, Tensor | None]) -> Shard:
    same = tuple((name, _contents(name, tensor)) for name, tensor in tokens.items())
    facts = _Facts(group.rank(), weight.shape[0], parallel.vocab_start, parallel.all_rows, layer, same)
    everyone: list[Any] = [None] * parallel.ranks
    dist.all_gather_object(everyone, facts, group=group)
    return agreed_shard(parallel.vocab_size, [_Facts(*one) for one in everyone], group.rank())


# No digest is taken of these two: numbers that ranks compute for themselves may differ in their last bits, and an ignored row in all of
# them.
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


def agreed_shard(vocab_size: int, everyone: list[_Facts], rank: int) -> Shard:
    """The shard of `rank` among those that all ranks say they have. Raises PlacementError where they do not make a vocabulary."""
    first = everyone[0]
    for facts in everyone[1:]:
        for (name, here), (_, there) in zip(first.layer, facts.layer, strict=True):
            if here != there:
                differ = "differ" if name.endswith("options") else "differs"
                between = f"between ranks of the process group: {here!r} on rank 0, {there!r} on {facts.rank}"
                raise errors.PlacementError(f"{name} {differ} {between}")
        for (name, here), (_, there) in zip(first.tokens, facts.tokens, strict=True):
            if here != there:
                said = f"{_said(here)}, {_said(there)}" if _said(here) != _said(there) else f"{_said(here)}, with other numbers"
                raise errors.PlacementError(
                    f"{name} differs between ranks 0 and {facts.rank} of the process group ({said}): ranks that "
                    "share a vocabulary have the same tokens; for tokens of its own give each rank the whole weight and no process_group"
                )
    starts = _starts(everyone)
    rows = [facts.rows for facts in everyone]
    whole = max(start + count for start, count in zip(starts, rows, strict=True))
    vocab_size = whole if vocab_size < 0 else vocab_size
    for facts in everyone:
        if facts.all_rows not in (-1, whole):
            raise errors.PlacementError(
                f"weight is a DTensor of {facts.all_rows} rows on rank {facts.rank}, and the ranks of process_group have {rows}: {whole} "
                "in all"
            )
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
