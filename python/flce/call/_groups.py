"""Pairs that a contrastive loss leaves out: numbers of queries and documents, and the groups that kernels compare."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flce import errors
from flce.call._arguments import refuse_tangent
from flce.call._checks import TARGET_DTYPES, is_dtensor
from flce.call._targets import check_tensors

_NONE = -1  # number of a row or a class of no group
_INSTEAD = (
    "give (of_queries, of_documents), [{}] and [{}] of int64 or int32: a pair of equal numbers is left out, and below 0 none is equal"
)


def check_mask(mask: Any, queries: Tensor, documents: Tensor) -> None:
    """Raises unless `mask` is numbers of queries and of documents."""
    instead = _INSTEAD.format(queries.shape[0], documents.shape[0])
    if isinstance(mask, Tensor):
        raise errors.ArgumentError(
            f"mask is a tensor of shape {list(mask.shape)}; an [N, M] mask would take the memory that this loss is without: {instead}"
        )
    if not isinstance(mask, (tuple, list)) or len(mask) != 2:
        raise errors.ArgumentError(f"mask is a {type(mask).__name__}; {instead}")
    for name, numbers, rows in (("mask[0]", mask[0], queries), ("mask[1]", mask[1], documents)):
        check_tensors(**{name: numbers})
        if numbers is None:
            raise errors.DTypeError(f"{name} is None; {instead}")
        if numbers.dtype not in TARGET_DTYPES or numbers.shape != rows.shape[:1]:
            raise errors.ShapeError(f"{name} has shape {list(numbers.shape)} and dtype {numbers.dtype}; {instead}")
        if is_dtensor(numbers) or numbers.device != queries.device:
            raise errors.PlacementError(f"{name} is on {numbers.device}; it must be a local tensor on {queries.device}, as queries is")
        refuse_tangent(name, numbers)


def groups_of(of_rows: Tensor, of_classes: Tensor) -> tuple[Tensor, Tensor]:
    """`of_rows` [N] and `of_classes` [M] as int32, below 0 for those of no group: equal numbers stay equal, others different. No host
    waits, and all shapes follow from these."""
    rows, classes = of_rows.long().contiguous(), of_classes.long().contiguous()
    if classes.shape[0] == 0:
        return torch.full_like(rows, _NONE, dtype=torch.int32), classes.to(torch.int32)
    ordered = classes.sort().values.contiguous()
    # The first place of a number among the classes' is that of all equal ones.
    of_class = torch.searchsorted(ordered, classes)
    at = torch.searchsorted(ordered, rows).clamp(max=ordered.shape[0] - 1)
    known = (rows >= 0) & (ordered[at] == rows)
    return torch.where(known, at, _NONE).to(torch.int32), torch.where(classes >= 0, of_class, _NONE).to(torch.int32)


def without_groups(ids: Tensor, of_rows: Tensor, of_classes: Tensor) -> Tensor:
    """`ids` [N, K] of classes, -1 where a class has its row's number, of 0 or more. An id that is no class stays."""
    there = (ids >= 0) & (ids < of_classes.shape[0])
    numbers = of_classes.long()[ids.clamp(0, of_classes.shape[0] - 1).long()]
    of_row = of_rows.long()[:, None]
    return torch.where(there & (numbers == of_row) & (of_row >= 0), -1, ids)
