"""The fused linear cross entropy of verl (`verl.utils.kernel.linear_cross_entropy`) on flce's kernels: log-probabilities and entropies."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flce import functional
from flce.compat._common import check_reduction
from flce.parallel import _parallel

__all__ = ["linear_cross_entropy"]

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


def _over_ranks(dist_process_group: Any, weight: Tensor) -> dict[str, Any]:
    """The group as flce has it. Slices that are not equal overlap or leave a gap, which it refuses."""
    group = _parallel.group_of(dist_process_group, "dist_process_group")
    return {"process_group": group, "vocab_start": group.rank() * weight.shape[0], "reduce_grad_hidden": False}
