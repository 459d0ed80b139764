"""Labels to targets on the device: tensor arithmetic of the tokens' number, no value read back, no shape that depends on data."""

from __future__ import annotations

import torch
from torch import Tensor


def shift_labels(labels: Tensor, shift: int = 1, *, ignore_index: int = -100, cu_seqlens: Tensor | None = None) -> Tensor:
    """What each position has to predict: the label `shift` positions later in the same sequence, ignore_index where there is none.

    labels [..., S] are sequences along the last dimension. With cu_seqlens [num_sequences + 1] (non-decreasing, from 0) labels are one row of
    packed sequences, sequence i at cu_seqlens[i] to cu_seqlens[i + 1]; what lies past the last is ignored. Returns a new tensor of labels' shape
    and dtype.
    """
    if cu_seqlens is None:
        target = torch.full_like(labels, ignore_index, memory_format=torch.contiguous_format)
        length = labels.shape[-1]
        if shift < length:
            target[..., : length - shift] = labels[..., shift:]
        return target
    flat = labels.reshape(-1)
    positions = torch.arange(flat.shape[0], device=flat.device, dtype=cu_seqlens.dtype)
    # The end of the sequence that a position is in: the first boundary beyond it; past the last boundary, a place it is already behind.
    ends = cu_seqlens[torch.bucketize(positions, cu_seqlens, right=True).clamp(max=cu_seqlens.shape[0] - 1)]
    moved = torch.roll(flat, -shift)
    return torch.where(positions + shift < ends, moved, ignore_index).view(labels.shape)
