"""Lists of classes that a caller names for each row, of different lengths, as rows of one length."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flce import errors
from flce.call._checks import TARGET_DTYPES
from flce.call._targets import check_tensors
from flce.core import _autograd, checks

NONE = -1  # the id of no class
_WRONG = -2  # an id that no vocabulary has


class Lists(NamedTuple):
    """Lists of ids as rows of equal length."""

    ids: Tensor  # [N, K], NONE behind a list's end
    rows: Tensor  # [M], the row of each id of the lists
    places: Tensor  # [M], the id's place there

    def of_each_id(self, padded: Tensor) -> Tensor:
        """[M] of a number for each place [N, K]."""
        return padded[self.rows, self.places]


def lists_of(ids: Tensor, offsets: Tensor, max_ids: int | None) -> Lists:
    """Row i has ids[offsets[i]:offsets[i + 1]]. `max_ids`: as many as a row may have; None: as many as the longest has, for which a GPU is
    waited for. Offsets that are none, or a longer list, are an ArgumentError on a CPU. On a GPU, and in a graph, such a row has ids that no
    vocabulary has, which `check_labels` reports."""
    for name, tensor in (("ids", ids), ("offsets", offsets)):
        if not isinstance(tensor, Tensor) or tensor.dtype not in TARGET_DTYPES or tensor.dim() != 1:
            form = f"shape {list(tensor.shape)} and dtype {tensor.dtype}" if isinstance(tensor, Tensor) else f"type {type(tensor).__name__}"
            raise errors.ArgumentError(f"{name} has {form}; with offsets ids is [M] and offsets [N + 1], int32 or int64")
    check_tensors(ids=ids, offsets=offsets)
    if offsets.shape[0] == 0:
        raise errors.ShapeError("offsets has shape [0]; it must be [N + 1], from 0 to the number of ids")
    if offsets.device != ids.device:
        raise errors.PlacementError(f"offsets is on {offsets.device}; it must be on ids' device, {ids.device}")
    lengths, count = offsets.diff(), ids.shape[0]
    if max_ids is None:
        max_ids = _longest(lengths)
    checks.integer("max_ids", max_ids, 1)
    wrong = (lengths < 0) | (lengths > max_ids) | (offsets[:-1] < 0) | (offsets[1:] > count)
    ends_wrong = (offsets[0] != 0) | (offsets[-1] != count)
    if ids.device.type == "cpu" and _autograd.is_eager() and bool(wrong.any() | ends_wrong):
        row = int(wrong.int().argmax()) if wrong.any() else 0
        found = f"{offsets[row : row + 2].tolist()} for row {row}" if wrong.any() else f"{offsets[0]} to {offsets[-1]}"
        raise errors.ArgumentError(
            f"offsets holds {found}; it must begin with 0, not decrease, and end with the number of ids, {count}, with at most {max_ids} "
            "ids a row"
        )
    wrong = wrong | ends_wrong
    at = offsets[:-1, None] + torch.arange(max_ids, device=ids.device, dtype=offsets.dtype)
    there = at < offsets[1:, None]
    padded = torch.where(there, ids[at.clamp(0, count - 1).long()], NONE) if count else torch.full_like(at, NONE)
    padded = torch.where(wrong[:, None], _WRONG, padded)
    each = torch.arange(count, device=ids.device, dtype=offsets.dtype)
    rows = torch.bucketize(each, offsets[1:].contiguous(), right=True).clamp(max=max(lengths.shape[0] - 1, 0))
    return Lists(padded, rows, (each - offsets[rows]).clamp(0, max_ids - 1).long())


def _longest(lengths: Tensor) -> int:
    if not _autograd.is_eager() or (lengths.is_cuda and torch.cuda.is_current_stream_capturing()):
        raise errors.ArgumentError("offsets is given without max_ids, in a graph: say how many ids a row may have")
    return max(int(lengths.max()), 1) if lengths.numel() else 1
