"""Checks of the arguments of `info_nce`."""

from __future__ import annotations

import numbers
from typing import Any

from torch import Tensor

from flce import errors
from flce.budget import MemoryBudget
from flce.call._arguments import refuse_tangent
from flce.call._checks import DTYPES, TARGET_DTYPES, is_dtensor
from flce.call._targets import check_tensors
from flce.core import checks

REDUCTIONS = ("none", "sum", "mean")
_MOST_NEGATIVES = 1023  # beside a positive
_AS_DTENSOR = {True: " as a DTensor, where a local tensor (to_local()) is taken", False: ""}


def check(queries: Tensor, documents: Tensor, scale: Any, positives: Tensor | None, negative_log_q: Tensor | None, reduction: Any) -> None:
    check_tensors(queries=queries, documents=documents, positives=positives, negative_log_q=negative_log_q)
    if isinstance(scale, Tensor):
        check_tensors(scale=scale)
    for name, tensor in (("queries", queries), ("documents", documents)):
        if tensor is None:
            raise errors.DTypeError(f"{name} is None; it must be a tensor")
        if is_dtensor(tensor):
            raise errors.PlacementError(f"{name} is a DTensor; give local tensors (to_local()), and process_group for all ranks' documents")
        if tensor.dim() != 2:
            raise errors.ShapeError(f"{name} has shape {list(tensor.shape)}; it must have two dimensions, rows and their size")
        if tensor.dtype not in DTYPES:
            raise errors.DTypeError(f"{name} has dtype {tensor.dtype}; allowed are torch.float32, torch.bfloat16 and torch.float16")
    if queries.shape[1] != documents.shape[1] or queries.dtype != documents.dtype or queries.device != documents.device:
        raise errors.ShapeError(
            f"queries has {list(queries.shape)} of {queries.dtype} on {queries.device} and documents {list(documents.shape)} of "
            f"{documents.dtype} on {documents.device}; size, dtype and device are one"
        )
    for name, value in (("positives", positives), ("negative_log_q", negative_log_q), ("scale", scale)):
        if isinstance(value, Tensor) and (is_dtensor(value) or value.device != queries.device):
            raise errors.PlacementError(f"{name} is on {value.device}{_AS_DTENSOR[is_dtensor(value)]}; queries is on {queries.device}")
    checks.choice("reduction", reduction, REDUCTIONS)
    _of_scale(scale)
    if positives is None and documents.shape[0] < queries.shape[0]:
        raise errors.ShapeError(
            f"documents has {documents.shape[0]} rows and queries {queries.shape[0]}, and positives is None: document i is query i's; give "
            "positives where several queries share one"
        )
    if positives is not None and (positives.dtype not in TARGET_DTYPES or positives.shape != queries.shape[:1]):
        raise errors.ShapeError(
            f"positives has shape {list(positives.shape)} and dtype {positives.dtype}; it must be [{queries.shape[0]}], int64 or int32"
        )
    if negative_log_q is not None and (not negative_log_q.is_floating_point() or negative_log_q.shape != documents.shape[:1]):
        raise errors.ShapeError(
            f"negative_log_q has shape {list(negative_log_q.shape)} and dtype {negative_log_q.dtype}; it must be [{documents.shape[0]}] of "
            "a floating dtype"
        )
    if negative_log_q is not None:
        if negative_log_q.requires_grad:
            raise errors.ArgumentError("negative_log_q requires a gradient; it has none here, detach it")
        refuse_tangent("negative_log_q", negative_log_q)


def check_blocks(per_block: int, queries: Tensor, documents: Tensor, symmetric: bool, limit: Any, retain: Any) -> None:
    checks.integer("documents_per_block", per_block, 1, ", or None")
    for name, tensor, counts in (("documents", documents, True), ("queries", queries, symmetric)):
        if counts and tensor.shape[0] % per_block:
            raise errors.ShapeError(
                f"{name} has {tensor.shape[0]} rows and documents_per_block is {per_block}; it must be a multiple of it"
                + (" with symmetric" if name == "queries" else "")
            )
    if isinstance(limit, MemoryBudget):
        raise errors.ArgumentError("workspace_limit_bytes is a MemoryBudget and documents_per_block is given; give a number of bytes")
    if retain:
        raise errors.ArgumentError("retain_in_grad_weight is True and documents_per_block is given; nothing is left to backward with it")


def check_negatives(negatives: Tensor, queries: Tensor, symmetric: bool, per_block: int | None) -> None:
    check_tensors(negatives=negatives)
    if is_dtensor(negatives) or negatives.device != queries.device:
        raise errors.PlacementError(
            f"negatives is on {negatives.device}{_AS_DTENSOR[is_dtensor(negatives)]}; queries is on {queries.device}"
        )
    shape = list(negatives.shape)
    if negatives.dtype not in TARGET_DTYPES or shape[:-1] != [queries.shape[0]] or not 1 <= shape[-1] <= _MOST_NEGATIVES:
        raise errors.ShapeError(
            f"negatives has shape {shape} and dtype {negatives.dtype}; it must be [{queries.shape[0]}, K], K from 1 to {_MOST_NEGATIVES}, "
            "int64 or int32"
        )
    for name, given in (("symmetric", symmetric), ("documents_per_block", per_block is not None)):
        if given:
            raise errors.ArgumentError(
                f"negatives is given with {name}, which is about all documents; leave one of them out"
                + (", and add a second call with documents and queries exchanged" if name == "symmetric" else "")
            )


def _of_scale(scale: Any) -> None:
    if isinstance(scale, Tensor):
        if scale.numel() != 1 or not scale.is_floating_point():
            raise errors.ShapeError(
                f"scale has shape {list(scale.shape)} and dtype {scale.dtype}; as a tensor it must be one number of a floating dtype"
            )
        refuse_tangent("scale", scale)
    elif isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise errors.DTypeError(f"scale is a {type(scale).__name__}; it must be a number or a tensor of one element")
    elif not checks.LEAST_TEMPERATURE <= float(scale) <= checks.MOST_TEMPERATURE:
        raise errors.ArgumentError(f"scale is {scale!r}; it must be from 2^-100 to 2^100")
