"""Sequences of different lengths one after another, without padding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from flce.engine._cache import KVCache


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Facts about a microbatch that a stage needs beside the tokens' ids or hidden states [T, ...].

    cu_seqlens: [B + 1] int32, on the stage's device: sequence b is rows cu_seqlens[b] to cu_seqlens[b + 1] of the T packed rows.
    lengths: the B lengths, on the host: no stage waits for its device to learn a shape.
    position_ids: [T] int64, on the stage's device: a token's place in its own sequence, tokens in `cache` counted.
    cache: keys and values of the same B sequences' earlier tokens, to which the stage adds these tokens'; None outside generation.
    """

    cu_seqlens: Tensor
    lengths: tuple[int, ...]
    position_ids: Tensor
    cache: KVCache | None = None

    @staticmethod
    def of(
        lengths: Sequence[int],
        device: torch.device,
        cache: KVCache | None = None,
        past_lengths: Sequence[int] | None = None,
    ) -> PackedBatch:
        """The batch of sequences of these lengths. past_lengths: the tokens that each one has before these; None: what is in
        `cache`, or nothing without one. ArgumentError for a cache of another number of sequences."""
        if past_lengths is None and cache is not None:
            cache.check_room(lengths)
            past_lengths = cache.lengths
        past = [0] * len(lengths) if past_lengths is None else list(past_lengths)
        cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cpu")
        places = [torch.arange(first, first + length, device="cpu") for first, length in zip(past, lengths, strict=True)]
        position_ids = torch.cat(places) if places else torch.zeros(0, dtype=torch.int64, device="cpu")
        return PackedBatch(cu_seqlens.to(device), tuple(lengths), position_ids.to(device), cache)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def max_length(self) -> int:
        return max(self.lengths, default=0)
