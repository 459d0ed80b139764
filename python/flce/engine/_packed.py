"""Sequences of different lengths one after another, without padding, and keys and values of tokens that a stage has seen."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flce import errors


class KVCache:
    """Keys and values [B, H, L, d] for every layer of a stage, of B sequences with room for L tokens each, H heads of keys. `lengths[b]`
    tokens of sequence b are there already; a pass over a `PackedBatch` of the same B sequences writes behind them, and `advance` counts the
    written tokens."""

    def __init__(
        self, num_layers: int, num_sequences: int, max_length: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ):
        shape = (num_sequences, num_heads, max_length, head_dim)
        # zeros: a masked place has weight 0, and 0 times stale memory may be NaN
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.lengths = [0] * num_sequences
        self.max_length = max_length

    def check_room(self, lengths: Sequence[int]) -> None:
        """Raises ArgumentError unless lengths has a number for each sequence of the cache, and the cache has room for that many more
        tokens of the sequence."""
        if len(lengths) != len(self.lengths):
            raise errors.ArgumentError(f"batch has {len(lengths)} sequences, and its cache {len(self.lengths)}; they must be the same ones")
        for sequence, (old, new) in enumerate(zip(self.lengths, lengths, strict=True)):
            if old + new > self.max_length:
                raise errors.ArgumentError(
                    f"sequence {sequence} of the batch has {new} tokens, and {old} in the cache; the cache has room for {self.max_length}"
                )

    def write(self, layer: int, sequences: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores tokens of one layer, counted from the stage's first: keys and values [T, H, d], of token t at place positions[t] of
        sequence sequences[t]."""
        stored = self.keys[layer]
        stored[sequences, :, positions] = keys.to(stored.dtype)
        self.values[layer][sequences, :, positions] = values.to(stored.dtype)

    def advance(self, lengths: Sequence[int]) -> None:
        """Counts the tokens that a pass through all layers has written, by sequence."""
        self.lengths = [old + new for old, new in zip(self.lengths, lengths, strict=True)]

    def select(self, sequences: Tensor) -> None:
        """Keeps these sequences alone, in this order: [B'] int64, on the cache's device."""
        self.keys = [k.index_select(0, sequences) for k in self.keys]
        self.values = [v.index_select(0, sequences) for v in self.values]
        self.lengths = [self.lengths[b] for b in sequences.tolist()]


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
    def of(lengths: Sequence[int], device: torch.device, cache: KVCache | None = None) -> PackedBatch:
        """The batch of sequences of these lengths, behind the tokens in `cache`. ArgumentError for a cache of another number of
        sequences."""
        if cache is not None:
            cache.check_room(lengths)
        past = torch.tensor([0] * len(lengths) if cache is None else cache.lengths, dtype=torch.int64, device="cpu")
        cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cpu")
        before = (past - cu_seqlens[:-1]).repeat_interleave(cu_seqlens.diff().long())
        position_ids = torch.arange(sum(lengths), device="cpu") + before
        return PackedBatch(cu_seqlens.to(device), tuple(lengths), position_ids.to(device), cache)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def max_length(self) -> int:
        return max(self.lengths, default=0)
