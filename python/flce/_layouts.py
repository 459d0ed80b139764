"""What the ranks of a group agree on before a call of a new layer: where each rank's rows of the weight lie in the vocabulary.

A rank sees its own rows alone, and another layer may have as many rows on this rank and others on the next. So whether to ask the others is
decided by what all ranks see alike:

    a DTensor           its rows over all ranks are part of the layer: asked once for each layer
    a known weight      the same tensor, or another one over its memory, is known on every rank, as ranks run one program: asked once
    a new parameter     asked
    a new tensor        asked until `ALIKE` answers in a row were the same; then its rows are taken for those of that answer
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from flce import errors
from flce._parallel import Parallel, group_named

ALIKE = 4  # an answer costs about a millisecond, and waits for the GPU


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
    tokens: tuple[Any, ...]  # what tensors over tokens hold, which has to be the same on every rank, too, as (name, contents)


class WeightMap:
    """From weights to what is known of them, while they, or other tensors over their memory, exist. A compiled graph hands over aliases of
    its inputs, and ZeRO-3 gives a parameter new memory in each step."""

    def __init__(self) -> None:
        self._tensors: Any = WeakTensorKeyDictionary()
        self._places: dict[tuple[int, ...], tuple[Any, Any]] = {}  # (storage, offset, shape) -> its reference, value
        self._room = 64

    def get(self, weight: Tensor) -> Any:
        """None where the weight is not known."""
        value = self._tensors.get(weight)
        if value is None:
            value = self._places.get(_place(weight), (None, None))[1]  # a storage that is known keeps its number, gone or not
        return value

    def set(self, weight: Tensor, value: Any) -> None:
        if len(self._places) >= self._room:
            self._places = {place: known for place, known in self._places.items() if not known[0].expired()}
            self._room = 64 + 2 * len(self._places)
        self._tensors[weight] = value
        self._places[_place(weight)] = StorageWeakRef(weight.untyped_storage()), value


def _place(weight: Tensor) -> tuple[int, ...]:
    return weight.untyped_storage()._cdata, weight.storage_offset(), *weight.shape


class _Answers:
    """What a group's ranks have agreed on for layers that they describe alike. Every rank has the same history."""

    def __init__(self) -> None:
        self.of_weight = WeightMap()  # Shard
        self.places: list[tuple[int, int]] = []  # every rank's (rows, vocab_start), of the last answer
        self.alike = 0  # answers in a row that had these places
        self.shards: list[Shard] = []  # this rank's of every answer, the last one at the end, each once

    def find(self, weight: Tensor, parallel: Parallel, *, capturing: bool) -> Shard | None:
        """The shard of a forward's weight. A capture cannot ask: it takes the last answer. Where the rows of every rank are those of that
        answer, so is the layer; a rank whose rows are not finds nothing."""
        shard = self.of_weight.get(weight)
        if shard is not None and _fits(shard, weight, parallel):
            return shard  # type: ignore[no-any-return]
        at_once = capturing or parallel.all_rows >= 0
        if isinstance(weight, nn.Parameter) and not at_once:
            return None
        if self.alike >= (1 if at_once else ALIKE) and _fits(self.shards[-1], weight, parallel):
            return self.shards[-1]
        return None

    def find_again(self, weight: Tensor, parallel: Parallel) -> Shard | None:
        """The shard of a backward whose forward is not known: one of the answers."""
        shard = self.of_weight.get(weight)
        if shard is not None and _fits(shard, weight, parallel):
            return shard  # type: ignore[no-any-return]
        fitting = [each for each in self.shards if _fits(each, weight, parallel)]
        if len(fitting) > 1:
            raise errors.PlacementError(
                f"this rank has {weight.shape[0]} rows of several layers, from labels {[each.vocab_start for each in fitting]} on, and "
                "which of them a backward is of is not known, as a hook has replaced its tensors: pass vocab_start on every rank"
            )
        return fitting[0] if fitting else None

    def add(self, weight: Tensor, places: list[tuple[int, int]], shard: Shard) -> None:
        self.alike = self.alike + 1 if places == self.places else 1
        self.places = places
        self.shards = [each for each in self.shards if each != shard] + [shard]
        self.of_weight.set(weight, shard)


def _fits(shard: Shard, weight: Tensor, parallel: Parallel) -> bool:
    return shard.rows == weight.shape[0] and parallel.vocab_start in (-1, shard.vocab_start)


_lock = threading.Lock()
# By group: one that is destroyed goes, and what its ranks agreed on.
_known: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], _Answers]] = weakref.WeakKeyDictionary()
_of_saved = WeightMap()  # by what an operator's forward has saved: its shard, for the backward, whose weight may be another copy


def remember(saved: Tensor, shard: Shard) -> None:
    with _lock:
        _of_saved.set(saved, shard)


def shard_of(
    parallel: Parallel,
    weight: Tensor,
    tokens: dict[str, Tensor | None],
    layer: tuple[tuple[str, Any], ...],
    saved: Tensor | None = None,
) -> Shard:
    """This rank's shard. A first call (see above) asks all ranks, which have to call at the same time, and waits for the device: `layer`
    and `tokens`, what is said of each token, have to be the same on all of them. A backward, which has what forward `saved`, takes
    forward's shard, or the one answer that fits. Raises PlacementError on every rank where the ranks do not fit together, or where several
    answers fit a backward; UnavailableError in a capture without an answer."""
    group = group_named(parallel.group)
    capturing = weight.is_cuda and torch.cuda.is_current_stream_capturing()
    key = (parallel._replace(vocab_start=min(parallel.vocab_start, 0)), weight.device.type, layer)
    with _lock:
        answers = _known.setdefault(group, {}).setdefault(key, _Answers())
        shard = None if saved is None else _of_saved.get(saved)
        if shard is None or not _fits(shard, weight, parallel):
            again = saved is not None
            shard = answers.find_again(weight, parallel) if again else answers.find(weight, parallel, capturing=capturing)
    if shard is not None:
        return shard
    if capturing:
        raise errors.UnavailableError(
            "ranks have not agreed yet on how this weight lies over their group, and a CUDA graph is being captured: run the call once "
            "before the capture"
        )
    layer = (("vocab_size", None if parallel.vocab_size < 0 else parallel.vocab_size), *layer)
    same = tuple((name, _contents(name, tensor)) for name, tensor in tokens.items())
    facts = _Facts(group.rank(), weight.shape[0], parallel.vocab_start, layer, same)
    everyone: list[Any] = [None] * parallel.ranks
    dist.all_gather_object(everyone, facts, group=group)
    everyone = [_Facts(*one) for one in everyone]
    shard = agreed(parallel, everyone, group.rank())
    with _lock:
        answers.add(weight, [(one.rows, one.vocab_start) for one in everyone], shard)
    return shard


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
    if parallel.all_rows not in (-1, whole):
        raise errors.PlacementError(
            f"weight is a DTensor of {parallel.all_rows} rows, and the ranks of process_group have {rows}: {whole} in all"
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
