"""`info_nce`: the contrastive loss of embedding models, two-tower retrieval and CLIP, as a cross entropy whose classes are documents."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flce import errors, functional
from flce.call import _contrastive_checks, _groups, _op
from flce.call._arguments import refuse_tangent
from flce.call._checks import DTYPES, HIDDEN_MULTIPLE
from flce.call._options import call_options
from flce.core import _autograd, checks
from flce.parallel import _blocks, _parallel

_VALUES = ("dtype", "documents_per_block", "scale", "reduction", "negatives")  # arguments that ranks tell each other as numbers

_SCRATCH_BYTES = 64 << 20  # scratch of a call without a limit
_SAID_OF = {
    "queries": "has {} rows",
    "D": "is {} long",
    "documents_per_block": "is {}, 0 for none",
    "negatives": "has {} of each query, 0 for none",
    **dict.fromkeys(("dtype", "scale", "reduction"), "is {}"),
}


def info_nce(
    queries: Tensor,
    documents: Tensor,
    *,
    scale: Tensor | float = 1.0,
    positives: Tensor | None = None,
    negatives: Tensor | None = None,
    negative_log_q: Tensor | None = None,
    mask: tuple[Tensor, Tensor] | None = None,
    symmetric: bool = False,
    reduction: str = "mean",
    process_group: Any = None,
    workspace_limit_bytes: Any = None,
    retain_in_grad_weight: bool | None = None,
    batch_invariant: bool = False,
    documents_per_block: int | None = None,
) -> Tensor:
    """−log softmax(scale · queries · documentsᵀ + negative_log_q) of every query at its positive document (InfoNCE, arXiv 1807.03748),
    without the [N, M] scores in memory. Embeddings are taken as they are: normalise them before, where cosines are wanted.

    Args:
        queries: [N, D] fp32, bf16 or fp16, on the CPU or a CUDA device.
        documents: [M, D] of the same dtype. All of them are in each query's softmax. Both get gradients.
        scale: what scores are multiplied by, the reciprocal of a temperature: a number from 2^-100 to 2^100, or a tensor of one
            element of a floating dtype on queries' device, which gets a gradient, such as CLIP's exponential of a parameter. The kernels
            divide by its reciprocal in fp32. Where a tensor is not between 2^-100 and 2^100 every query counts as ignored, and
            `check_labels` reports it.
        positives: [N] int64 or int32, the row of documents that belongs to each query; -100 for a query that counts for nothing. None: row
            i for query i, so that rows of documents past the N-th are negatives of all queries.
        negatives: [N, K] int64 or int32, K from 1 to 1023: the rows of documents that a query meets beside its positive, instead of all
            of them; -1 for none, and one that is the query's positive is left out. Only rows that are named are read. Another number
            outside the documents counts as none, and `check_labels` reports it. Not with symmetric or documents_per_block.
        negative_log_q: [M] of a floating dtype, finite, with no gradient: −log of the probability that a document was drawn with, which is
            added to its scores, the positive's too (sampled softmax, doi 10.1145/3298689.3346996). Kept to 24 bits in 16-bit dtypes. For it
            queries and documents are copied.
        mask: (of_queries, of_documents), [N] and [M] int64 or int32, any numbers, such as hashes of texts: a document whose number is the
            query's counts for nothing in that query's softmax, unless it is the query's positive. A number below 0 is equal to none. With
            symmetric a query whose number is a positive document's counts for nothing in that document's softmax, but for its own. With
            process_group of_queries and of_documents are this rank's, and meet all ranks'.
        symmetric: the mean of this loss and of that of each positive document among all queries, as CLIP has it. The second takes no
            negative_log_q.
        reduction: "none" gives [N], 0 for ignored queries; "sum" and "mean" a scalar, fp32. "mean" divides by the number of queries that
            count.
        process_group: ranks that share the documents, a ProcessGroup or a DeviceMesh of one dimension. queries [N, D], N the same on every
            rank, and documents [M, D], any M, are this rank's; scale is the same on every rank. Each query meets all ranks' documents.
            positives and negatives count over all ranks' documents in the order of ranks; positives None: row i of this rank's. The loss is
            one for all ranks, of all their queries ("none": [ranks · N], whose gradient from above is the same on every rank), and each
            rank's gradients are those of its own embeddings: where parameters' gradients are averaged over ranks afterwards (DDP), multiply
            the loss by the number of ranks. In eager mode.
        workspace_limit_bytes, retain_in_grad_weight, batch_invariant: as in `linear_cross_entropy`, whose weight is documents. With
            symmetric each of the two losses has this limit. None: 64 MiB beside an fp32 copy of all ranks' queries, and on a GPU 8 KiB for
            each of more than 8192 queries in its place.
        documents_per_block: for the same bits of loss and gradients on every number of ranks, a block's number of documents, of which each
            rank has a multiple (and of queries, with symmetric). The whole batch, its order and this number have to be the same; one
            process without process_group counts as a rank. Each block is a kernel call of its own, queries' gradient takes 12 bytes for
            each number of all ranks' queries beside the limit, and nothing is left to backward. A learned scale's gradient is then on the
            first rank for all of them, and 0 on the others. In eager mode, without retain_in_grad_weight and without a MemoryBudget.

    Returns:
        The loss.

    Raises:
        As `linear_cross_entropy`.
    """

    def check() -> None:
        checks.flag("symmetric", symmetric)
        _contrastive_checks.check(queries, documents, scale, positives, negative_log_q, reduction)
        if mask is not None:
            _groups.check_mask(mask, queries, documents)
        if negatives is not None:
            _contrastive_checks.check_negatives(negatives, queries, symmetric, documents_per_block)
        if documents_per_block is not None:
            _contrastive_checks.check_blocks(
                documents_per_block, queries, documents, symmetric, workspace_limit_bytes, retain_in_grad_weight
            )

    if process_group is None:
        check()
        places = _alone(queries, documents, positives)
    else:
        learned = scale if isinstance(scale, Tensor) and scale.requires_grad else None
        said: dict[str, Any] = {"positives": positives, "negative_log_q": negative_log_q, "symmetric": symmetric or None, "mask": mask}
        said |= {"scale's gradient": learned, "scale as a tensor": scale if isinstance(scale, Tensor) else None}
        places = _over_ranks(process_group, queries, documents, check, said, negatives, documents_per_block, scale, reduction)
    options = {
        "reduction": reduction,
        "workspace_limit_bytes": workspace_limit_bytes,
        "retain_in_grad_weight": retain_in_grad_weight,
        "batch_invariant": batch_invariant,
    }
    rows, classes = queries, documents
    if documents_per_block is None:  # else blocks give the scale its gradient
        rows = _watched(queries, scale)
    if negative_log_q is not None:
        rows, classes = _with_added(rows, documents, negative_log_q.to(torch.float32) / _number_of(scale), places.group)
    way = _Way(scale, queries.shape[1], documents_per_block, places, options)
    if negatives is not None:
        return way.loss_of_named(rows, classes, negatives, mask)
    loss = way.loss(rows, classes, places.positives, places.of_documents, mask)
    if not symmetric:
        return loss
    own = _positive_rows(documents, queries, positives)
    if documents_per_block is None:
        own = _watched(own, scale)
    exchanged = None if mask is None else (_positive_rows(mask[1], queries, positives), mask[0])
    back = way.loss(own, queries, places.queries, places.of_queries, exchanged)
    return (loss + back) / 2


def _positive_rows(documents: Tensor, queries: Tensor, positives: Tensor | None) -> Tensor:
    """Each query's row of documents, or of their numbers."""
    return documents[: queries.shape[0]] if positives is None else documents[positives.clamp(0, documents.shape[0] - 1).long()]


class _Places(NamedTuple):
    """Where each query's positive is, for all queries of all ranks, and how classes lie over ranks."""

    positives: Tensor
    queries: Tensor  # the query of each positive document: the other way's positives
    of_documents: _Classes
    of_queries: _Classes
    rank: int = 0
    group: Any = None


class _Classes(NamedTuple):
    """Classes of all ranks."""

    of_ranks: tuple[int, ...]
    over: dict[str, Any]  # options of a call whose classes are this rank's


def _check_some(count: int) -> None:
    if count == 0:
        raise errors.ShapeError("documents has no rows; there must be one document or more")


def _alone(queries: Tensor, documents: Tensor, positives: Tensor | None) -> _Places:
    _check_some(documents.shape[0])
    rows = torch.arange(queries.shape[0], device=queries.device)
    classes = _Classes((documents.shape[0],), {}), _Classes((queries.shape[0],), {})
    if positives is None:
        return _Places(rows, rows, *classes)
    there = (positives >= 0) & (positives < documents.shape[0])
    return _Places(positives, torch.where(there, rows, -100), *classes)


def _over_ranks(
    process_group: Any,
    queries: Tensor,
    documents: Tensor,
    check: Callable[[], None],
    said: dict[str, Any],
    negatives: Tensor | None,
    per_block: int | None,
    scale: Tensor | float,
    reduction: str,
) -> _Places:
    """`check` raises for this rank's arguments; then every rank raises. `said`: what all ranks give, or none."""
    group = _parallel.group_of(process_group)
    fault = None
    facts = dict.fromkeys(("queries", "D", *_VALUES, "queries' gradient", "documents' gradient", *said), 0)
    rows = 0
    try:
        check()
        learns = torch.is_grad_enabled()
        of_queries = (
            *queries.shape,
            *_values(queries, per_block, scale, reduction),
            0 if negatives is None else negatives.shape[1],
            learns and queries.requires_grad,
            learns and documents.requires_grad,
        )
        facts = dict(zip(facts, (*of_queries, *(value is not None for value in said.values())), strict=True))
        rows = documents.shape[0]
    except (errors.FlceError, TypeError) as error:
        fault = error
    told = _parallel.told_by_hosts(group, [fault is not None, rows, *map(int, facts.values())])
    if fault is not None:
        raise fault
    _check_alike(told, list(facts))
    positives = said["positives"]
    if said["symmetric"] and positives is not None:
        raise errors.ArgumentError(
            "positives is given with symmetric and process_group: a positive document may lie on another rank. Leave positives out, with "
            "row i of this rank's documents for its query i"
        )
    count, ranks, mine = queries.shape[0], len(told), group.rank()
    starts = [sum(m for _, m, *_ in told[:rank]) for rank in range(ranks)]
    total = starts[-1] + told[-1][1]
    _check_some(total)
    if positives is None:
        # Made on the device: the copy of a list to it would wait for all that the device has to do.
        everyones = torch.cat([torch.arange(start, start + count, device=queries.device) for start in starts])
    else:
        everyones = _parallel.gathered(group, positives.long(), ranks)
    over = {"process_group": group, "sequence_parallel": True}
    all_queries = torch.arange(count * ranks, device=queries.device)
    of_documents = _Classes(tuple(m for _, m, *_ in told), {**over, "vocab_start": starts[mine], "vocab_size": total})
    of_queries = _Classes((count,) * ranks, {**over, "vocab_start": mine * count, "vocab_size": ranks * count})
    return _Places(everyones, all_queries, of_documents, of_queries, mine, group)


def _values(queries: Tensor, per_block: int | None, scale: Tensor | float, reduction: str) -> tuple[int, ...]:
    """A number for each of _VALUES but the last; a scale's are its bits."""
    number = 0.0 if isinstance(scale, Tensor) else float(scale)
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return DTYPES.index(queries.dtype), per_block or 0, bits, _contrastive_checks.REDUCTIONS.index(reduction)


def _check_alike(told: Sequence[tuple[int, ...]], names: Sequence[str]) -> None:
    """Raises on every rank where one has refused its arguments, or where they differ in what is one for all."""
    refused = [rank for rank, (fault, *_) in enumerate(told) if fault]
    if refused:
        raise errors.ArgumentError(f"ranks {refused} of process_group have refused their arguments of info_nce: their errors say why")
    for name, values in zip(names, zip(*(facts for _, _, *facts in told), strict=True), strict=True):
        if len(set(values)) > 1:
            what = _SAID_OF.get(name, "is there: {}")
            if name == "scale":
                values = struct.unpack(f"<{len(values)}d", struct.pack(f"<{len(values)}q", *values))
            if name in ("dtype", "reduction"):
                values = tuple((DTYPES if name == "dtype" else _contrastive_checks.REDUCTIONS)[value] for value in values)
            raise errors.ShapeError(
                f"{name} differs between the ranks of process_group ({what.format(list(values))}); each has as many queries (drop a last "
                "batch that is shorter), of one size, and the same arguments"
            )


class _Way(NamedTuple):
    """Arguments of a loss of rows among classes that both directions have."""

    scale: Tensor | float
    columns: int  # numbers of an embedding, without those that `_with_added` puts behind them
    per_block: int | None
    places: _Places
    options: dict[str, Any]

    def loss(self, rows: Tensor, classes: Tensor, target: Tensor, there: _Classes, mask: Any) -> Tensor:
        """`mask`: numbers of this rank's rows and classes, or None."""
        if sum(there.of_ranks) <= 1:
            return _of_one_document(rows, classes, target, self.options["reduction"], self.scale)
        scale, options = self.scale, dict(self.options)
        groups = None if mask is None else _groups.groups_of(self._of_all_rows(mask[0], there), mask[1])
        if not isinstance(scale, Tensor):
            options["logit_scale"] = float(scale)
        if self.per_block is not None:
            blocks = _blocks.Blocks(self.per_block, there.of_ranks, self.places.rank, self.places.group)
            of_call = call_options(return_loss=True, **options)
            return _blocks.cross_entropy(rows, classes, target, scale, blocks, of_call, self.columns, groups)
        if isinstance(scale, Tensor):
            options["temperature"] = (1 / _number_of(scale)).expand(target.shape)
        if options["workspace_limit_bytes"] is None and rows.is_cuda:
            options["workspace_limit_bytes"] = _enough_bytes(target.shape[0], rows.shape[1])
        loss: Tensor = functional.cross_entropy_of_groups(rows, classes, target, groups, **options, **there.over)
        return loss

    def _of_all_rows(self, numbers: Tensor, there: _Classes) -> Tensor:
        """All ranks' numbers of as many rows."""
        group = self.places.group
        return numbers if group is None else _parallel.gathered(group, numbers.long(), len(there.of_ranks))

    def _of_all_classes(self, numbers: Tensor, there: _Classes) -> Tensor:
        """All ranks' numbers of their classes."""
        if self.places.group is None:
            return numbers
        most = max(there.of_ranks)
        padded = numbers.new_full((most,), -1, dtype=torch.int64)
        padded[: numbers.shape[0]] = numbers
        everyone = self._of_all_rows(padded, there).view(-1, most)
        return torch.cat([of_rank[:count] for of_rank, count in zip(everyone, there.of_ranks, strict=True)])

    def loss_of_named(self, rows: Tensor, classes: Tensor, negatives: Tensor, mask: Any) -> Tensor:
        """The loss of each query's positive among the documents that are named for it."""
        there, positives = self.places.of_documents, self.places.positives.long()
        options, documents = dict(self.options), sum(there.of_ranks)
        reduction = options.pop("reduction")
        if documents == 1:
            return _of_one_document(rows, classes, positives, reduction, self.scale)
        if self.places.group is not None:
            negatives = _parallel.gathered(self.places.group, negatives.long(), len(there.of_ranks))
        others = torch.where(negatives == positives[:, None], -1, negatives)
        if mask is not None:
            others = _groups.without_groups(others, self._of_all_rows(mask[0], there), self._of_all_classes(mask[1], there))
        counts = positives != -100
        # A fault is none of the documents', and not -1, which is no fault of a negative.
        own = torch.where((positives < 0) | (positives >= documents), documents, positives)
        others = torch.where((others < -1) | (others >= documents), documents, others)
        ids = torch.where(counts[:, None], torch.cat([own[:, None], others], 1), -1)
        if isinstance(self.scale, Tensor):
            number = _number_of(self.scale)
            options["temperature"] = (1 / number).expand(positives.shape)
            counts = counts & (number >= checks.LEAST_TEMPERATURE) & (number <= checks.MOST_TEMPERATURE)
        else:
            options["logit_scale"] = float(self.scale)
        losses: Tensor = -functional.linear_logprobs_at(rows, classes, ids, normalize="support", **options, **there.over)[:, 0]
        if reduction == "none":
            return losses
        counts = counts & (positives >= 0) & (positives < documents)
        total: Tensor = losses.sum() / (counts.sum().clamp(min=1) if reduction == "mean" else 1)
        return total


def _enough_bytes(count: int, columns: int) -> int | None:
    """The fp32 sum of `count` queries' gradient, and 4096 of their scores at a time: narrower chunks go through that sum too often. None: a
    call's own limit has them."""
    scores = int(count) * 4096 * 2
    return None if scores <= _SCRATCH_BYTES else scores + int(count) * (4 * columns + 8)


def _of_one_document(rows: Tensor, classes: Tensor, target: Tensor, reduction: str, scale: Tensor | float) -> Tensor:
    """The loss where there is nothing to tell the positive from: 0, and gradients of 0."""
    nothing = 0 * (rows.sum(dtype=torch.float32) + classes.sum(dtype=torch.float32))
    if isinstance(scale, Tensor):
        nothing = nothing + 0 * scale.to(torch.float32).reshape(()).nan_to_num(0, 0, 0)
    return nothing.expand(target.shape).clone() if reduction == "none" else nothing


def _watched(rows: Tensor, scale: Tensor | float) -> Tensor:
    """The rows, whose gradient gives a learned scale's."""
    if not isinstance(scale, Tensor) or not scale.requires_grad:
        return rows
    if not torch.compiler.is_compiling() and (_autograd.transforms is None or _autograd.transforms() is not None):
        _op._refuse_transform()
    refuse_tangent("queries", rows)
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        rows, scale = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return grad, None
        number = scale.to(torch.float32).reshape(())
        # A query that counts for nothing has a gradient of 0, whatever its numbers are.
        whole = (torch.where(grad != 0, rows, 0).to(torch.float32) * grad.to(torch.float32)).sum()
        # Where the scale is no number that the kernels take, nothing counts.
        counts = (number >= checks.LEAST_TEMPERATURE) & (number <= checks.MOST_TEMPERATURE)
        whole = torch.where(counts, whole / torch.where(counts, number, 1), 0)
        return grad, whole.to(scale.dtype).reshape(scale.shape)


def _number_of(scale: Tensor | float) -> Any:
    return scale.detach().to(torch.float32).reshape(()) if isinstance(scale, Tensor) else float(scale)


def _with_added(queries: Tensor, documents: Tensor, added: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """queries and documents with columns more, whose products are `added` [M]: as many numbers of the dtype as 24 bits take. `group`: ranks
    whose queries meet these documents, or None."""
    device = queries.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else documents.dtype
    factor = torch.ones((), device=queries.device)
    if dtype == torch.float16:  # has no number above 65504
        largest = added.abs().amax() if added.numel() else factor
        if group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        factor = torch.exp2(torch.log2(largest / 2**15).ceil().clamp(0, 15))
    parts, rest = [], added / factor
    for _ in range(1 if dtype == torch.float32 else 3):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].to(torch.float32)
    columns = len(parts) + -(documents.shape[1] + len(parts)) % HIDDEN_MULTIPLE
    of_documents = torch.zeros((documents.shape[0], columns), dtype=dtype, device=queries.device)
    of_documents[:, : len(parts)] = torch.stack(parts, dim=1)
    of_queries = torch.zeros((queries.shape[0], columns), dtype=dtype, device=queries.device)
    of_queries[:, : len(parts)] = factor
    return torch.cat([queries.to(dtype), of_queries], dim=1), torch.cat([documents.to(dtype), of_documents], dim=1)
