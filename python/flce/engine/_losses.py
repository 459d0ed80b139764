"""The losses of a batch's microbatches: how they are weighed, and what they come to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from flce import errors, shift_labels
from flce.engine import _microbatches
from flce.engine._microbatches import Microbatch
from flce.engine._output import HeadOutput

LossFunction = Callable[..., tuple[Tensor, Any]]
TokenCount = Callable[..., "Tensor | int"] | Tensor | None


class Losses:
    """counts: how many tokens each microbatch's loss is a mean over; None for a mean of means. given: whether the caller said so; else
    tokens with a target one row on were counted. total: of all microbatches, on all data-parallel ranks where a batch is trained on."""

    def __init__(
        self, loss_fn: LossFunction, microbatches: Sequence[Microbatch], counts: Sequence[int] | None, given: bool, total: int
    ) -> None:
        self._loss_fn, self._microbatches = loss_fn, microbatches
        self._counts, self._given, self._total = counts, given, total
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
        if self._counts is None:
            self._losses.append(loss.detach().float())
            return loss / len(self._microbatches)
        count = self._counts[microbatch.number]
        if not self._given:
            over = None if len(self._microbatches) == 1 and self._total == count else output.mean_over
            if over is None and output.shifts - {1}:
                over = f"labels with shift={', '.join(map(str, sorted(output.shifts)))}"
            if over is not None:
                raise errors.ArgumentError(
                    f"loss_fn took a mean over {over}, and normalize='tokens' weighs microbatches by their numbers of tokens with a target "
                    "one row on, so that the losses would not add up to the batch's mean; give token_count=, or have "
                    "normalize='micro_batches'"
                )
        if count == 0:  # a mean over nothing may be NaN
            self._losses.append(torch.zeros_like(loss, dtype=torch.float32).detach())
            return (output.hidden * 0.0).sum()
        self._losses.append(loss.detach().float())
        return loss * (count / max(self._total, 1))

    def first_nonfinite(self) -> int | None:
        """The first microbatch whose loss is not finite. Waits for the device."""
        finite: list[bool] = torch.stack(self._losses).isfinite().tolist()
        return None if all(finite) else finite.index(False)

    def result(self) -> tuple[Tensor, list[Any]]:
        stacked = torch.stack(self._losses)
        if self._counts is None:
            return stacked.mean(), self._stats
        counts = torch.tensor(self._counts, dtype=torch.float32, device=stacked.device)
        return (stacked * counts).sum() / counts.sum().clamp(min=1), self._stats


def counts_of(
    token_count: TokenCount,
    microbatches: Sequence[Microbatch],
    lengths: Sequence[int],
    kinds: Mapping[str, str],
    vocab_size: int | None,
) -> list[int]:
    """vocab_size: of the head, None on ranks without it and for a critic. ArgumentError, ShapeError for a token_count that does not say."""
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
        found = [token_count(packed_input_ids=m.input_ids, cu_seqlens=m.batch.cu_seqlens, **m.kwargs) for m in microbatches]
    else:
        found = [_targets_of(m, kinds, vocab_size) for m in microbatches]
    counts = []
    for microbatch, number in zip(microbatches, found, strict=True):
        given = number.item() if isinstance(number, Tensor) and number.numel() == 1 else number
        if isinstance(given, bool) or not isinstance(given, (int, float)) or not math.isfinite(given) or given < 0 or given != int(given):
            raise errors.ArgumentError(f"token_count gives {given} tokens for {microbatch}; it must give a whole number, 0 or more")
        counts.append(int(given))
    return counts


def _targets_of(microbatch: Microbatch, kinds: Mapping[str, str], vocab_size: int | None) -> Tensor | int:
    """Tokens that have a target one row later in their sequence, by the keyword `labels` or else `loss_mask`. A label outside the
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
            counted = shift_labels(counted, ignore_index=0, cu_seqlens=microbatch.batch.cu_seqlens)
        return counted.sum()
    return sum(length - 1 for length in microbatch.batch.lengths)
