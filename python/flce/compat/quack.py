"""The chunked linear cross entropy of quack-kernels (`quack.linear_cross_entropy`) on flce's kernels.

Nothing is left from forward to backward, so that a gradient has the same bits beside a frozen input, compiled, and in a second backward.
"""

from __future__ import annotations

from torch import Tensor

from flce import errors, functional
from flce.compat._common import check_reduction, nan_unless

__all__ = ["chunked_linear_cross_entropy"]


def chunked_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    chunk_size: int = 4096,
    ignore_index: int = -100,
    reduction: str = "mean",
    tuned: bool = True,
    use_scaled_exp: bool | None = None,
) -> Tensor:
    """The loss of x [..., D] with weight [V, D] against target, int64 or int32, one element for each row of x: an fp32 scalar.

    The mean is NaN where no row is valid. chunk_size (a multiple of 8), tuned and use_scaled_exp change nothing: they choose how fast QuACK
    computes.
    """
    check_reduction(reduction, "mean", "sum")
    assert chunk_size % 8 == 0, f"chunk_size is {chunk_size}; it must be a multiple of 8"
    rows, labels = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    if labels.shape[0] != rows.shape[0]:
        raise errors.ShapeError(f"target has shape {list(target.shape)}; it must have a label for each row of x, {list(x.shape)}")
    loss: Tensor = functional.linear_cross_entropy(
        rows, weight, labels, ignore_index=ignore_index, reduction=reduction, retain_in_grad_weight=False
    )
    return loss if reduction == "sum" else nan_unless((labels != ignore_index).any(), loss)
