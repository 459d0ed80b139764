"""The losses of a batch's microbatches: how they are weighed, and what they come to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from flce import errors, shift_labels
from flce.engine import _checks, _microbatches
from flce.engine._microbatches import Microbatch
from flce.engine._output import HeadOutput

LossFunction = Callable[..., tuple[Tensor, Any]]
TokenCount = Callable[..., "Tensor | int"] | Tensor | None


@dataclass
class Counts:
    """How many tokens each microbatch's loss is a mean over.

    shift: how many rows later tokens were supposed to have their targets, when they were counted. total: of all microbatches, on all
    data-parallel ranks where a batch is trained on, as they were counted then. again: counts a microbatch's for another shift; None where
    the caller says the numbers. used: the shift that the loss function took last.
    """

    numbers: list[int]
    shift: int
    again: Callable[[Microbatch, int], int] | None
    total: int = 0
    used: int | None = None
    follows: bool = True  #: whether no other shift than the supposed one was used

    def follow(self, microbatch: Microbatch, shifts: set[int]) -> int:
        """A microbatch's number, when its loss is known. ArgumentError where the loss function took several shifts."""
        if self.again is not None and shifts:
            if len(shifts) > 1:
                raise errors.ArgumentError(
                    f"loss_fn scored labels with the shifts {', '.join(map(str, sorted(shifts)))}, so what its loss is a mean over is not "
                    "clear; give token_count="
                )
            (self.used,) = shifts
            if self.used != self.shift:
                self.numbers[microbatch.number] = self.again(microbatch, self.used)
                self.follows = False
        return self.numbers[microbatch.number]


class Losses:
    """counts: None for a mean of means."""

    def __init__(self, loss_fn: LossFunction, microbatches: Sequence[Microbatch], counts: Counts | None) -> None:
        self._loss_fn = loss_fn
        self._microbatches = microbatches
        self.counts = counts
        self._losses: list[Tensor] = []
        self._stats: list[Any] = []

    def add(self, output: HeadOutput, microbatch: Microbatch) -> Tensor:
        """Calls the loss function. Returns the loss with its weight, whose sum over microbatches is to have its gradient taken."""
        returned = self._loss_fn(output, packed_input_ids=microbatch.input_ids, cu_seqlens=microbatch.batch.cu_seqlens, **microbatch.kwargs)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise errors.DTypeError(f"loss_fn returned a {type(returned).__name__}; it must return a tuple (loss, stats)")
        loss, stats = returned
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            got = f"{loss.dtype} {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise errors.ShapeError(f"loss_fn returned {got} as its loss for {microbatch}; it must be a floating scalar")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise errors.ArgumentError(
                f"loss_fn returned a loss without a gradient for {microbatch}; compute it from `output` (times 0 where a microbatch "
                "counts for nothing)"
            )
        loss = loss.reshape(())
        self._stats.append(tree_map_only(Tensor, Tensor.detach, stats))  # a graph in them would keep what backward lets go
        if self.counts is None:
            self._losses.append(loss.detach().float())
            return loss / len(self._microbatches)
        whole = len(self._microbatches) == 1 and self.counts.total in (0, self.counts.numbers[microbatch.number])
        if self.counts.again is not None and output.mean_over is not None and not whole:
            raise errors.ArgumentError(
                f"loss_fn took a mean over {output.mean_over}, and normalize='tokens' weighs microbatches by their numbers of tokens, so "
                "that the losses would not add up to the batch's mean; give token_count=, or have normalize='micro_batches'"
            )
        count = self.counts.follow(microbatch, output.shifts)
        if count == 0:  # a mean over nothing may be NaN
            self._losses.append(torch.zeros_like(loss, dtype=torch.float32).detach())
            return (output.hidden * 0.0).sum()
        self._losses.append(loss.detach().float())
        return loss * (count / max(self.counts.total, 1))

    @property
    def shift(self) -> int:
        """Shift of the loss function's labels, as far as it is known."""
        return 1 if self.counts is None else self.counts.used if self.counts.used is not None else self.counts.shift

    def first_nonfinite(self) -> int | None:
        """The first microbatch whose loss is not finite. Waits for the device."""
        finite: list[bool] = torch.stack(self._losses).isfinite().tolist()
        return None if all(finite) else finite.index(False)

    def result(self) -> tuple[Tensor, list[Any]]:
        stacked = torch.stack(self._losses)
        if self.counts is None:
            return stacked.mean(), self._stats
        counts = torch.tensor(self.counts.numbers, dtype=torch.float32, device=stacked.device)
        return (stacked * counts).sum() / counts.sum().clamp(min=1), self._stats


def counts_of(
    token_count: TokenCount,
    microbatches: Sequence[Microbatch],
    lengths: Sequence[int],
    kinds: Mapping[str, str],
    vocab_size: int | None,
    shift: int,
) -> Counts:
    """vocab_size: of the head, None on ranks without it and for a critic. ArgumentError, ShapeError for a token_count that does not say."""
    again = None
    if isinstance(token_count, Tensor):
        if token_count.dim() != 1 or token_count.shape[0] != len(lengths):
            raise errors.ShapeError(
                f"token_count has shape {list(token_count.shape)}; it must be [{len(lengths)}], a number for each sequence"
            )
        by_sequence = token_count.tolist()
        found = [sum(by_sequence[m.sequences.start : m.sequences.stop]) for m in microbatches]
    elif token_count is not None:
        if not callable(token_count):
            raise errors.DTypeError(f"token_count is a {type(token_count).__name__}; it must be a function or a tensor [{len(lengths)}]")
        for m in microbatches[:1]:
            _checks.function("token_count", token_count, packed_input_ids=m.input_ids, cu_seqlens=m.batch.cu_seqlens, **m.kwargs)
        found = [token_count(packed_input_ids=m.input_ids, cu_seqlens=m.batch.cu_seqlens, **m.kwargs) for m in microbatches]
    else:
        again = lambda microbatch, shift: int(_targets_of(microbatch, kinds, vocab_size, shift))  # noqa: E731
        found = [_targets_of(m, kinds, vocab_size, shift) for m in microbatches]
    return Counts([_whole(number, microbatch) for microbatch, number in zip(microbatches, found, strict=True)], shift, again)


def _whole(number: Any, microbatch: Microbatch) -> int:
    given = number.item() if isinstance(number, Tensor) and number.numel() == 1 else number
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not math.isfinite(given) or given < 0 or given != int(given):
        raise errors.ArgumentError(f"token_count gives {given} tokens for {microbatch}; it must give a whole number, 0 or more")
    return int(given)


def _targets_of(microbatch: Microbatch, kinds: Mapping[str, str], vocab_size: int | None, shift: int) -> Tensor | int:
    """Tokens that have a target `shift` rows later in their sequence, by the keyword `labels` or else `loss_mask`. A label outside the
    vocabulary is none, as in the loss."""
    for name, ignored in (("labels", -100), ("loss_mask", 0)):
        given = microbatch.kwargs.get(name)
        if kinds.get(name) not in (_microbatches.TOKEN, _microbatches.TARGET):
            continue
        if given is None or given.dim() != 1:
            raise errors.ShapeError(f"{name} has shape {list(given.shape) if given is not None else None}; give token_count=")
        counted: Tensor = given != ignored
        if name == "labels" and vocab_size is not None:
            counted = counted & (given >= 0) & (given < vocab_size)
        counted = counted.long()
        if kinds[name] == _microbatches.TOKEN:
            counted = shift_labels(counted, shift, ignore_index=0, cu_seqlens=microbatch.batch.cu_seqlens)
        return counted.sum()
    return sum(max(length - shift, 0) for length in microbatch.batch.lengths)
