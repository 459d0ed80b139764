"""Keys and values of the tokens that a stage has seen, for generation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class KVCache:
    """For every layer of a stage, keys and values [B, H, L, d] of B sequences with room for L tokens each. `lengths[b]` tokens of sequence
    b are there already; a pass over a `PackedBatch` writes behind them, and `advance` counts what it wrote."""

    def __init__(
        self, num_layers: int, num_sequences: int, max_length: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ):
        shape = (num_sequences, num_heads, max_length, head_dim)
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.lengths = [0] * num_sequences
        self.max_length = max_length

    def advance(self, lengths: Sequence[int]) -> None:
        """Counts the tokens that a pass through all layers has written, by sequence."""
        self.lengths = [old + new for old, new in zip(self.lengths, lengths, strict=True)]

    def select(self, sequences: Tensor) -> None:
        """Keeps these sequences alone, in this order: [B'] int64, on the cache's device."""
        self.keys = [k.index_select(0, sequences) for k in self.keys]
        self.values = [v.index_select(0, sequences) for v in self.values]
        self.lengths = [self.lengths[b] for b in sequences.tolist()]
