"""A packed batch cut into microbatches, without cutting a sequence."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flce import errors
from flce.core import checks
from flce.engine._packed import PackedBatch


@dataclass(frozen=True, eq=False)
class Microbatch:
    """Sequences `sequences` of the batch, of which there are T_i tokens.

    input_ids: [T_i] int64, on the stage's device; batch: their lengths and positions; kwargs: the loss function's part of the keywords.
    """

    number: int
    sequences: range
    input_ids: Tensor
    batch: PackedBatch
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        first, last = self.sequences[0], self.sequences[-1]
        return f"microbatch {self.number} ({f'sequence {first}' if first == last else f'sequences {first} to {last}'})"


def lengths_of(packed_input_ids: Any, cu_seqlens: Any) -> tuple[int, ...]:
    """The sequences' lengths, from packed_input_ids [T] and cu_seqlens [B + 1]. Raises ArgumentError, ShapeError, DTypeError."""
    for name, tensor in (("packed_input_ids", packed_input_ids), ("cu_seqlens", cu_seqlens)):
        if not isinstance(tensor, Tensor):
            raise errors.DTypeError(f"{name} is a {type(tensor).__name__}; it must be a tensor")
        if tensor.dtype not in (torch.int32, torch.int64):
            raise errors.DTypeError(f"{name} has dtype {tensor.dtype}; it must be int32 or int64")
        if tensor.dim() != 1:
            raise errors.ShapeError(f"{name} has shape {list(tensor.shape)}; it must have one dimension")
    bounds: list[int] = cu_seqlens.tolist()
    num_tokens = packed_input_ids.shape[0]
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != num_tokens:
        raise errors.ArgumentError(
            f"cu_seqlens has {len(bounds)} elements{f' from {bounds[0]} to {bounds[-1]}' if bounds else ''}; it must go from 0 to "
            f"packed_input_ids' {num_tokens} tokens, with one element more than there are sequences"
        )
    lengths = tuple(after - before for before, after in itertools.pairwise(bounds))
    for number, length in enumerate(lengths):
        if length < 1:
            raise errors.ArgumentError(
                f"cu_seqlens gives sequence {number} {length} tokens; every sequence must have one or more: leave empty ones out"
            )
    return lengths


def check_within(packed_input_ids: Tensor, lengths: Sequence[int], num_embeddings: int | None, max_positions: int | None) -> None:
    """ArgumentError for ids and sequences that stages cannot embed. None: any. Waits for the ids' device."""
    if max_positions is not None and max(lengths) > max_positions:
        longest = max(lengths)
        raise errors.ArgumentError(
            f"cu_seqlens gives sequence {lengths.index(longest)} {longest} tokens; the model has learned positions of {max_positions}"
        )
    if num_embeddings is not None:
        least, largest = torch.stack(packed_input_ids.aminmax()).tolist()
        if least < 0 or largest >= num_embeddings:
            raise errors.ArgumentError(
                f"packed_input_ids has {least if least < 0 else largest}; ids must be 0 to {num_embeddings - 1}, the model's vocabulary"
            )


def cut(lengths: Sequence[int], num_micro_batches: int) -> tuple[int, ...]:
    """Where each microbatch's sequences start, and their number behind: runs of whole sequences, in the batch's order, whose largest number
    of tokens is the least possible. ArgumentError where there are fewer sequences than microbatches."""
    count = len(lengths)
    checks.integer("num_micro_batches", num_micro_batches, 1)
    if count < num_micro_batches:
        raise errors.ArgumentError(
            f"the batch has {count} sequences, which are fewer than its {num_micro_batches} microbatches, and no sequence is cut: give "
            f"more sequences, or num_micro_batches={count} or fewer"
        )
    low, high = max(lengths), sum(lengths)
    while low < high:  # the least room that suffices
        room = (low + high) // 2
        if len(_runs(lengths, room)) - 1 <= num_micro_batches:
            high = room
        else:
            low = room + 1
    starts = list(_runs(lengths, low))
    while len(starts) - 1 < num_micro_batches:  # the largest run that has two sequences, in its middle
        runs = [(sum(lengths[a:b]), -i) for i, (a, b) in enumerate(itertools.pairwise(starts)) if b - a > 1]
        run = -max(runs)[1]
        begin, end = starts[run], starts[run + 1]
        half = min(range(begin + 1, end), key=lambda at: max(sum(lengths[begin:at]), sum(lengths[at:end])))
        starts.insert(run + 1, half)
    return tuple(starts)


def _runs(lengths: Sequence[int], room: int) -> tuple[int, ...]:
    """Where runs start that are filled one after another up to `room` tokens, and their end."""
    starts, held = [0], 0
    for number, length in enumerate(lengths):
        if held and held + length > room:
            starts.append(number)
            held = 0
        held += length
    return (*starts, len(lengths))


TOKEN, TARGET, SEQUENCE, WHOLE = "token", "target", "sequence", "none"


def kinds_of(kwargs: Mapping[str, Any], lengths: Sequence[int], rows: Mapping[str, str]) -> dict[str, str]:
    """How each keyword is split: as `rows` says, else by the first dimension of a tensor, T (tokens), T - B (tokens that have a next token
    in their sequence) or B (sequences). A tensor without dimensions, and any other value, goes to each microbatch whole. ArgumentError and
    ShapeError name a keyword whose kind is not clear."""
    sizes = {TOKEN: sum(lengths), TARGET: sum(lengths) - len(lengths), SEQUENCE: len(lengths)}
    for name, kind in rows.items():
        checks.choice(f"rows[{name!r}]", kind, (*sizes, WHOLE))
        if name not in kwargs:
            raise errors.ArgumentError(f"rows names {name!r}, and no such keyword is given")
    kinds: dict[str, str] = {}
    for name, value in kwargs.items():
        named = rows.get(name)
        if named in sizes and (not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != sizes[named]):
            shape = list(value.shape) if isinstance(value, Tensor) else f"no tensor but a {type(value).__name__}"
            raise errors.ShapeError(f"{name} has shape {shape}; with rows[{name!r}] {named!r} its first dimension must be {sizes[named]}")
        if named is not None or not isinstance(value, Tensor) or value.dim() == 0:
            kinds[name] = named or WHOLE
            continue
        fitting = [kind for kind, size in sizes.items() if value.shape[0] == size]
        if len(fitting) != 1:
            which = " and ".join(f"{kind} ({sizes[kind]})" for kind in fitting or sizes)
            why = f"fits {which} alike" if fitting else f"is none of {which}"
            raise errors.ArgumentError(
                f"{name} has shape {list(value.shape)}, whose first dimension {why}: say what its rows are, rows={{{name!r}: …}}, with "
                f"{', '.join(map(repr, (*sizes, WHOLE)))}"
            )
        kinds[name] = fitting[0]
    return kinds


def split(
    packed_input_ids: Tensor,
    lengths: Sequence[int],
    starts: Sequence[int],
    device: torch.device,
    kwargs: Mapping[str, Any],
    kinds: Mapping[str, str],
) -> list[Microbatch]:
    """The microbatches whose sequences start at `starts`, on `device`, each with its part of `kwargs`."""
    ids = packed_input_ids.to(device=device, dtype=torch.int64)
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in kwargs.items()}
    made = []
    token = 0
    for number, (first, end) in enumerate(itertools.pairwise(starts)):
        own = lengths[first:end]
        tokens = slice(token, token + sum(own))
        slices = {TOKEN: tokens, TARGET: slice(tokens.start - first, tokens.stop - end), SEQUENCE: slice(first, end)}
        part = {name: value if kinds[name] == WHOLE else value[slices[kinds[name]]] for name, value in moved.items()}
        made.append(Microbatch(number, range(first, end), ids[tokens], PackedBatch.of(own, device), part))
        token = tokens.stop
    return made
