"""`info_nce`: the contrastive loss of embedding models, two-tower retrieval and CLIP, as a cross entropy whose classes are documents."""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flce import errors, functional
from flce.call._checks import DTYPES, HIDDEN_MULTIPLE, TARGET_DTYPES, is_dtensor
from flce.call._targets import check_tensors
from flce.core import checks
from flce.parallel import _parallel

_REDUCTIONS = ("none", "sum", "mean")


def info_nce(
    queries: Tensor,
    documents: Tensor,
    *,
    scale: Tensor | float = 1.0,
    positives: Tensor | None = None,
    negative_log_q: Tensor | None = None,
    symmetric: bool = False,
    reduction: str = "mean",
    process_group: Any = None,
    workspace_limit_bytes: Any = None,
    retain_in_grad_weight: bool | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """−log softmax(scale · queries · documentsᵀ + negative_log_q) of every query at its positive document (InfoNCE, arXiv 1807.03748),
    without the [N, M] scores in memory. Embeddings are taken as they are: normalise them before, where cosines are wanted.

    Args:
        queries: [N, D] fp32, bf16 or fp16, on the CPU or a CUDA device.
        documents: [M, D] of the same dtype. All of them are in each query's softmax. Both get gradients.
        scale: what scores are multiplied by, the reciprocal of a temperature: a number above 0 and below infinity, or a tensor of one
            element of a floating dtype on queries' device, which gets a gradient, such as CLIP's exponential of a parameter. The kernels
            divide by its reciprocal in fp32. Where a tensor is not between 2^-100 and 2^100 every query counts as ignored, and
            `check_labels` reports it.
        positives: [N] int64 or int32, the row of documents that belongs to each query; -100 for a query that counts for nothing. None: row
            i for query i, so that rows of documents past the N-th are negatives of all queries.
        negative_log_q: [M] of a floating dtype, finite, with no gradient: −log of the probability that a document was drawn with, which is
            added to its scores, the positive's too (sampled softmax, doi 10.1145/3298689.3346996). Kept to 24 bits in 16-bit dtypes. For it
            queries and documents are copied.
        symmetric: the mean of this loss and of that of each positive document among all queries, as CLIP has it. The second takes no
            negative_log_q.
        reduction: "none" gives [N], 0 for ignored queries; "sum" and "mean" a scalar, fp32. "mean" divides by the number of queries that
            count.
        process_group: ranks that share the documents, a ProcessGroup or a DeviceMesh of one dimension. queries [N, D], N the same on every
            rank, and documents [M, D], any M, are this rank's; each query meets all ranks' documents. positives count over all ranks'
            documents in the order of ranks; None: row i of this rank's. The loss is one for all ranks, of all their queries ("none":
            [ranks · N]), and each rank's gradients are those of its own embeddings: where parameters' gradients are averaged over ranks
            afterwards (DDP), multiply the loss by the number of ranks. In eager mode.
        workspace_limit_bytes, retain_in_grad_weight, batch_invariant: as in `linear_cross_entropy`, whose weight is documents. With
            symmetric each of the two losses has this limit.

    Returns:
        The loss.

    Raises:
        As `linear_cross_entropy`.
    """
    _check(queries, documents, scale, positives, negative_log_q, reduction)
    checks.flag("symmetric", symmetric)
    if process_group is None:
        places = _alone(queries, documents, positives)
    else:
        places = _over_ranks(process_group, queries, documents, positives, symmetric=symmetric)
    options = {
        "reduction": reduction,
        "workspace_limit_bytes": workspace_limit_bytes,
        "retain_in_grad_weight": retain_in_grad_weight,
        "batch_invariant": batch_invariant,
    }
    rows, classes = _watched(queries, scale), documents
    if negative_log_q is not None:
        rows, classes = _with_added(rows, documents, negative_log_q.detach().to(torch.float32) / _number_of(scale))
    loss = _one_way(rows, classes, places.positives, scale, {**options, **places.of_documents})
    if not symmetric:
        return loss
    own = documents[: queries.shape[0]] if positives is None else documents[positives.clamp(0, documents.shape[0] - 1).long()]
    back = _one_way(_watched(own, scale), queries, places.queries, scale, {**options, **places.of_queries})
    return (loss + back) / 2


class _Places(NamedTuple):
    """Where each query's positive is, for all queries of all ranks, and how classes lie over ranks."""

    positives: Tensor
    queries: Tensor  # the query of each positive document: the other way's positives
    of_documents: dict[str, Any]
    of_queries: dict[str, Any]


def _alone(queries: Tensor, documents: Tensor, positives: Tensor | None) -> _Places:
    rows = torch.arange(queries.shape[0], device=queries.device)
    if positives is None:
        return _Places(rows, rows, {}, {})
    there = (positives >= 0) & (positives < documents.shape[0])
    return _Places(positives, torch.where(there, rows, -100), {}, {})


def _over_ranks(process_group: Any, queries: Tensor, documents: Tensor, positives: Tensor | None, *, symmetric: bool) -> _Places:
    if torch.compiler.is_compiling():
        raise errors.ArgumentError("info_nce has process_group under torch.compile; its ranks tell each other their sizes: call it eagerly")
    if symmetric and positives is not None:
        raise errors.ArgumentError(
            "positives is given with symmetric and process_group: a positive document may lie on another rank. Leave positives out, with "
            "row i of this rank's documents for its query i"
        )
    group = _parallel.group_of(process_group)
    told = _parallel.told_by_hosts(group, [queries.shape[0], documents.shape[0], queries.shape[1], positives is None])
    if len({(n, d, alone) for n, _, d, alone in told}) > 1:
        raise errors.ShapeError(
            f"queries has {[n for n, *_ in told]} rows of size {[d for *_, d, _ in told]} on the ranks of process_group, and positives is "
            f"None on {[bool(alone) for *_, alone in told]}; the three are the same on every rank (drop a last batch that is shorter)"
        )
    count, ranks = queries.shape[0], len(told)
    starts = [sum(m for _, m, *_ in told[:rank]) for rank in range(ranks)]
    total = starts[-1] + told[-1][1]
    rows = torch.arange(count * ranks, device=queries.device)
    if positives is None:
        everyones = (torch.tensor(starts, device=queries.device)[:, None] + torch.arange(count, device=queries.device)).reshape(-1)
    else:
        everyones = _parallel.gathered(group, positives.long(), ranks)
    over = {"process_group": group, "sequence_parallel": True}
    mine = group.rank()
    of_documents = {**over, "vocab_start": starts[mine], "vocab_size": total}
    return _Places(everyones, rows, of_documents, {**over, "vocab_start": mine * count, "vocab_size": ranks * count})


def _one_way(rows: Tensor, classes: Tensor, target: Tensor, scale: Tensor | float, options: dict[str, Any]) -> Tensor:
    if isinstance(scale, Tensor):
        options["temperature"] = (1 / _number_of(scale)).expand(target.shape)
    else:
        options["logit_scale"] = float(scale)
    loss: Tensor = functional.linear_cross_entropy(rows, classes, target, **options)
    return loss


def _watched(rows: Tensor, scale: Tensor | float) -> Tensor:
    """The rows, whose gradient gives a learned scale's."""
    if not isinstance(scale, Tensor) or not scale.requires_grad:
        return rows
    watched: Tensor = _Scaled.apply(rows, scale)
    return watched


class _Scaled(torch.autograd.Function):
    """The rows themselves, with scale's gradient for what is computed of scale · rows: with scores s · x and x linear in rows,
    Σ dscore · x = Σ rows · grad_rows / s."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(rows, scale)
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        rows, scale = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return grad, None
        whole = (rows.to(torch.float32) * grad.to(torch.float32)).sum() / scale.to(torch.float32).reshape(())
        return grad, whole.to(scale.dtype).reshape(scale.shape)


def _number_of(scale: Tensor | float) -> Any:
    return scale.detach().to(torch.float32).reshape(()) if isinstance(scale, Tensor) else float(scale)


def _with_added(queries: Tensor, documents: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """queries and documents with columns more, whose products are `added` [M]: as many numbers of the dtype as 24 bits take."""
    parts = []
    for _ in range(1 if documents.dtype == torch.float32 else 3):
        parts.append(added.to(documents.dtype))
        added = added - parts[-1].to(torch.float32)
    columns = len(parts) + -(documents.shape[1] + len(parts)) % HIDDEN_MULTIPLE
    of_documents = documents.new_zeros((documents.shape[0], columns))
    of_documents[:, : len(parts)] = torch.stack(parts, dim=1)
    of_queries = queries.new_zeros((queries.shape[0], columns))
    of_queries[:, : len(parts)] = 1
    return torch.cat([queries, of_queries], dim=1), torch.cat([documents, of_documents], dim=1)


def _check(queries: Tensor, documents: Tensor, scale: Any, positives: Tensor | None, negative_log_q: Tensor | None, reduction: Any) -> None:
    check_tensors(queries=queries, documents=documents, positives=positives, negative_log_q=negative_log_q)
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
    checks.choice("reduction", reduction, _REDUCTIONS)
    _check_scale(scale, queries)
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


def _check_scale(scale: Any, queries: Tensor) -> None:
    if isinstance(scale, Tensor):
        if scale.numel() != 1 or not scale.is_floating_point() or scale.device != queries.device:
            raise errors.ShapeError(
                f"scale has shape {list(scale.shape)}, dtype {scale.dtype} and device {scale.device}; as a tensor it must be one number of "
                f"a floating dtype on queries' device, {queries.device}"
            )
    elif isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise errors.DTypeError(f"scale is a {type(scale).__name__}; it must be a number or a tensor of one element")
    elif not 0 < float(scale) < math.inf:
        raise errors.ArgumentError(f"scale is {scale!r}; it must be above 0 and below infinity")
