"""verl's fused output layer (`verl.utils.kernel`) on flce's kernels: log-probabilities and entropies of labels, and log-probabilities of a
teacher's top-k classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flce import errors, functional
from flce.compat._common import check_reduction
from flce.parallel import _parallel

__all__ = ["linear_cross_entropy", "linear_topk_log_probs"]

_NO_LABEL = -(1 << 63)  # an ignore_index that no label has: every row counts


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropies) of hidden [..., D] with weight [V, D] at labels [...]: fp32, flat, one for each row.

    `reduction` is of the log-probabilities alone, over all rows. A label outside the vocabulary gives 0 for both, and
    `flce.check_labels` reports it.

    dist_process_group: weight is this rank's slice of the vocabulary, one of equal slices in the order of ranks, labels are of the whole
    vocabulary, hidden and labels the same on every rank. Outputs are those of the whole layer, the same bits on every rank. hidden's
    gradient is this rank's part, which the caller adds up.
    """
    assert isinstance(temperature, float), f"temperature is a {type(temperature).__name__}; it must be a float"
    assert isinstance(reduction, str), f"reduction is a {type(reduction).__name__}; it must be a str"
    reduction = reduction.lower()
    check_reduction(reduction, "none", "sum", "mean")
    over_ranks = {} if dist_process_group is None else _over_ranks(dist_process_group, weight)
    logprobs, entropy = functional.linear_logprobs(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.reshape(-1),
        temperature=temperature,
        ignore_index=_NO_LABEL,
        return_entropy=True,
        **over_ranks,
    )
    if reduction != "none":
        logprobs = logprobs.sum() if reduction == "sum" else logprobs.mean()
    return logprobs, entropy


def linear_topk_log_probs(
    hidden: Tensor,
    weight: Tensor,
    topk_ids: Tensor,
    temperature: float = 1.0,
    dist_process_group: Any = None,
    chunk_size: int | None = None,
) -> Tensor:
    """log-probabilities [..., K] fp32, of the whole vocabulary's softmax, of hidden [..., D] with weight [V, D] at topk_ids [..., K] int32
    or int64, K at most 1024.

    An id outside the vocabulary is a ValueError on a CPU. On a GPU -1 gives 0, as another one does, which `flce.check_labels` reports.
    chunk_size changes nothing.

    dist_process_group: as in `linear_cross_entropy`; ids are of the whole vocabulary.
    """
    if not isinstance(temperature, float):
        raise TypeError(f"temperature is a {type(temperature).__name__}; it must be a float")
    if chunk_size is not None and chunk_size <= 0:
        raise errors.ArgumentError(f"chunk_size is {chunk_size}; it must be positive")
    over_ranks = {} if dist_process_group is None else _over_ranks(dist_process_group, weight)
    classes = weight.shape[0] * (over_ranks["process_group"].size() if over_ranks else 1)
    if topk_ids.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_ids(topk_ids, classes)
    logprobs: Tensor = functional.linear_logprobs_at(
        hidden.reshape(-1, hidden.shape[-1]), weight, topk_ids.reshape(-1, topk_ids.shape[-1]), temperature=temperature, **over_ranks
    )
    return logprobs.view(topk_ids.shape)


def _over_ranks(dist_process_group: Any, weight: Tensor) -> dict[str, Any]:
    """The group as flce has it. Slices that are not equal overlap or leave a gap, which it refuses."""
    group = _parallel.group_of(dist_process_group, "dist_process_group")
    return {"process_group": group, "vocab_start": group.rank() * weight.shape[0], "reduce_grad_hidden": False}


def _check_ids(topk_ids: Tensor, classes: int) -> None:
    wrong = ((topk_ids < 0) | (topk_ids >= classes)).flatten(0, -2).any(-1)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise errors.LabelError(f"topk_ids has an id in row {row} that is not in [0, {classes})", row)
