"""Losses of JAX's libraries under their own signatures, on flce's kernels. Names and meanings are theirs.

tokamax 0.0.12: tokamax.linear_softmax_cross_entropy_loss
Levanter (marin's main branch, 2026-11): levanter.kernels.pallas.fused_cross_entropy_loss
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flce import errors
from flce.core import checks
from flce.jax import linear_cross_entropy

__all__ = ["fused_cross_entropy_loss_and_logsumexp_penalty", "linear_softmax_cross_entropy_loss"]


def _check_rows(name: str, labels: Any, hidden: Any) -> None:
    if hidden.ndim != 2 or labels.shape != hidden.shape[:1]:
        raise errors.ShapeError(f"{name} has shape {list(hidden.shape)} and labels {list(labels.shape)}; they must be [B, H] and [B]")


def linear_softmax_cross_entropy_loss(
    x: Any, labels: Any, weights: Any, *, reduction: str = "sum", precision: Any = None, implementation: Any = None
) -> jax.Array:
    """tokamax's: the sum or the mean over all B rows of −log softmax(x · weights)[label], a float32 scalar.

    x [B, H], labels [B], weights [H, V]. `implementation` is not looked at; a `precision` is an ArgumentError, as there. Labels outside of
    [0, V) have loss 0 as there, and no gradient.
    """
    checks.choice("reduction", reduction, ("sum", "mean"))
    if precision is not None:
        raise errors.ArgumentError(f"precision is {precision!r}; sums are float32, and nothing else can be chosen")
    del implementation
    x, labels = jnp.asarray(x), jnp.asarray(labels)
    _check_rows("x", labels, x)
    given = x.shape[0] if reduction == "mean" else None
    made: jax.Array = linear_cross_entropy(
        x, weights, labels, weight_layout="hidden_major", ignore_index=-1, reduction=reduction, num_valid_tokens=given
    )
    return made


def fused_cross_entropy_loss_and_logsumexp_penalty(
    x: Any,
    labels: Any,
    w: Any,
    *,
    reduction: str | None = "mean",
    weight: Any = None,
    logsumexp_weight: float | None = 0.0,
    block_size: int | None = None,
    block_sizes: Any = None,
    dtype: Any = jnp.float32,
    logit_soft_cap: float | None = None,
    precision: Any = None,
    implementation: Any = None,
    return_argmax: bool = False,
) -> Any:
    """Levanter's: cross entropy plus logsumexp_weight · lse² of x · w, each row times `weight`; "mean" divides by the sum of weights, or by
    B without them.

    x [B, H], labels [B], w [H, V], weight [B] or what broadcasts to it. Sums are float32 whatever `dtype` and `precision` say; block
    sizes and `implementation` are not read. Labels outside of [0, V) count for nothing.

    Returns:
        the loss, float32 ([B] where reduction is None), or (loss, argmax [B] int32).
    """
    del block_size, block_sizes, dtype, precision, implementation
    if reduction is not None:
        checks.choice("reduction", reduction, ("sum", "mean"))
    x, labels = jnp.asarray(x), jnp.asarray(labels)
    _check_rows("x", labels, x)
    loss, *argmax = _as_tuple(
        linear_cross_entropy(
            x,
            w,
            labels,
            weight_layout="hidden_major",
            ignore_index=-1,
            reduction="none",
            z_loss=logsumexp_weight or 0.0,
            softcap=logit_soft_cap,
            return_top1=return_argmax,
        )
    )
    weights = jnp.ones_like(loss) if weight is None else jnp.broadcast_to(jnp.asarray(weight, jnp.float32), loss.shape)
    loss = loss * weights
    if reduction is not None:
        loss = jnp.sum(loss)
    if reduction == "mean":
        divisor = jnp.sum(weights)
        loss = jnp.where(divisor != 0, loss / jnp.where(divisor != 0, divisor, 1.0), 0.0)
    return (loss, *argmax) if argmax else loss


def _as_tuple(made: Any) -> tuple[Any, ...]:
    return made if isinstance(made, tuple) else (made,)
