"""Labels to targets, and per-token losses to one: array arithmetic, differentiable, partitioned by XLA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flce import errors
from flce.call._spec_text import reduction_code
from flce.core import checks


def shifted(labels: jax.Array, shift: int, ignore_index: int) -> jax.Array:
    """The label that each position predicts: `shift` later in the last dimension, ignore_index where there is none."""
    checks.integer("shift", shift, 0)
    if shift == 0:
        return labels
    if labels.ndim < 2:
        raise errors.ArgumentError(
            f"shift is {shift} and labels has shape {list(labels.shape)}, flattened tokens: where a sequence ends is not known. Give "
            "hidden [batch, sequence, D] and labels [batch, sequence], or leave shift at 0 for labels that are aligned already"
        )
    length = labels.shape[-1]
    if 0 < length < shift:
        raise errors.ArgumentError(
            f"shift is {shift}; labels' sequences (its last dimension) are {length} long, and shift must not be more"
        )
    if length == 0:
        return labels
    rest = jnp.full((*labels.shape[:-1], shift), ignore_index, labels.dtype)
    return jnp.concatenate([labels[..., shift:], rest], axis=-1)


def rows_with_a_class(ids: jax.Array, ignore_index: int) -> jax.Array:
    """A target that says which rows take part, by any class."""
    return jnp.where((ids != -1).any(-1), jnp.int32(1 if ignore_index == 0 else 0), jnp.int32(ignore_index))


def valid_rows(target: jax.Array, vocab_size: int, ignore_index: int, temperature: jax.Array | None = None) -> jax.Array:
    """Rows that kernels count: a class's label, a temperature in its range."""
    valid = (target != ignore_index) & (target >= 0) & (target < vocab_size)
    if temperature is not None:
        valid &= (temperature >= checks.LEAST_TEMPERATURE) & (temperature <= checks.MOST_TEMPERATURE)
    return valid


def check_reduction(reduction: Any, token_weight: Any, num_valid_tokens: Any) -> None:
    reduction_code(reduction)
    if reduction == "weighted_mean" and token_weight is None:
        raise errors.ArgumentError("reduction is 'weighted_mean' and token_weight is None; it divides by the sum of token_weight")
    if num_valid_tokens is not None and reduction != "mean":
        raise errors.ArgumentError(f"num_valid_tokens is given with reduction {reduction!r}; only 'mean' divides by it")


def reduced(loss: jax.Array, valid: jax.Array, reduction: str, token_weight: jax.Array | None, num_valid_tokens: Any) -> jax.Array:
    """`reduction` of the tokens' losses, as `flce.linear_cross_entropy` has it; 0 where it would divide by 0."""
    weight = None if token_weight is None else jnp.where(valid, token_weight.astype(jnp.float32), 0.0)
    if weight is not None:
        loss = jnp.where(valid, loss * weight, 0.0)
    if reduction == "none":
        return loss
    total = jnp.sum(loss)
    if reduction == "sum":
        return total
    if reduction == "weighted_mean":
        divisor = jnp.sum(weight)
        return jnp.where(divisor == 0, 0.0, total / jnp.where(divisor == 0, 1.0, divisor))
    divisor = jnp.sum(valid, dtype=jnp.int32) if num_valid_tokens is None else jnp.asarray(num_valid_tokens).reshape(())
    divisor = divisor.astype(jnp.float32)
    return jnp.where(divisor > 0, total / jnp.where(divisor > 0, divisor, 1.0), 0.0)


def without_impossible_teachers(target: jax.Array, ids: jax.Array, probs: jax.Array, ignore_index: int) -> jax.Array:
    """`target`, at fault where what a teacher has at a class is negative or more than 1 (as 16 bits may round it)."""
    wrong = ((probs < 0) | (probs > 1 + 2.0**-6)) & (ids != -1)
    impossible = -(1 << 31) + (ignore_index == -(1 << 31))
    return jnp.where(wrong.any(-1) & (target != ignore_index), impossible, target)
