"""Labels to targets, and per-token losses to one: array arithmetic, differentiable, partitioned by XLA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from flce import errors
from flce.call._spec_text import number, reduction_code
from flce.core import checks


def shifted(labels: jax.Array, shift: int, ignore_index: int, cu_seqlens: jax.Array | None = None) -> jax.Array:
    """The label that each position predicts: `shift` later in its sequence, ignore_index where there is none. Sequences are the last
    dimension, or with cu_seqlens lie one behind the other in flattened labels."""
    checks.integer("shift", shift, 0)
    if shift == 0 and cu_seqlens is None:
        return labels
    if labels.ndim < 2 and cu_seqlens is None:
        raise errors.ArgumentError(
            f"shift is {shift} and labels has shape {list(labels.shape)}, flattened tokens without cu_seqlens: where a sequence ends is "
            "not known. Give cu_seqlens, or hidden [batch, sequence, D] and labels [batch, sequence], or leave shift at 0 for labels that "
            "are aligned already. One sequence, as each is under jax.vmap, has cu_seqlens=jnp.array([0, length])"
        )
    length = labels.shape[-1] if cu_seqlens is None else labels.size
    if 0 < length < shift:
        where = "labels' sequences (its last dimension)" if cu_seqlens is None else "all sequences of labels together"
        raise errors.ArgumentError(f"shift is {shift}; {where} are {length} long, and shift must not be more")
    if length == 0:
        return labels
    if cu_seqlens is not None:
        return _shifted_in_packs(labels, shift, ignore_index, cu_seqlens.astype(jnp.int32))
    rest = jnp.full((*labels.shape[:-1], shift), ignore_index, labels.dtype)
    return jnp.concatenate([labels[..., shift:], rest], axis=-1)


def _shifted_in_packs(labels: jax.Array, shift: int, ignore_index: int, cu_seqlens: jax.Array) -> jax.Array:
    """Labels past the last sequence are ignored. Where offsets do not begin with 0, or decrease, every row is at fault."""
    flat = labels.reshape(-1)
    positions = jnp.arange(flat.size, dtype=jnp.int32)
    # The first boundary beyond a position; past the last boundary, one that it is already behind.
    at = jnp.minimum(jnp.searchsorted(cu_seqlens, positions, side="right"), cu_seqlens.size - 1)
    ends = jnp.minimum(cu_seqlens[at], flat.size)
    moved = jnp.where(positions + shift < ends, jnp.roll(flat, -shift), ignore_index)
    wrong = (cu_seqlens[0] != 0) | (cu_seqlens[1:] < cu_seqlens[:-1]).any()
    return jnp.where(wrong, _impossible(ignore_index), moved).astype(labels.dtype).reshape(labels.shape)


def _impossible(ignore_index: int) -> int:
    """A label that no vocabulary has, for rows that are at fault."""
    return -(1 << 31) + (ignore_index == -(1 << 31))


def rows_with_a_class(ids: jax.Array, ignore_index: int) -> jax.Array:
    """A target that says which rows take part, by any class."""
    return jnp.where((ids != -1).any(-1), jnp.int32(1 if ignore_index == 0 else 0), jnp.int32(ignore_index))


def valid_rows(target: jax.Array, vocab_size: int, ignore_index: int, temperature: jax.Array | None = None) -> jax.Array:
    """Rows that kernels count: a class's label, a temperature in its range."""
    valid = (target != ignore_index) & (target >= 0) & (target < vocab_size)
    if temperature is not None:
        valid &= (temperature >= checks.LEAST_TEMPERATURE) & (temperature <= checks.MOST_TEMPERATURE)
    return valid


def check_reduction(reduction: Any, token_weight: Any, num_valid_tokens: Any, of: str = "") -> None:
    """`of`: what stands behind the names of one of several hidden states' arguments."""
    reduction_code(reduction)
    if reduction == "weighted_mean" and token_weight is None:
        raise errors.ArgumentError(f"reduction is 'weighted_mean' and token_weight{of} is None; it divides by the sum of token_weight")
    if num_valid_tokens is not None and reduction != "mean":
        raise errors.ArgumentError(f"num_valid_tokens{of} is given with reduction {reduction!r}; only 'mean' divides by it")


def has_two_divisors(reduction: str, class_weight: Any, z_loss: Any) -> bool:
    """Whether cross entropies and z-losses, which are functions of lse, are divided by sums of their own."""
    return class_weight is not None and reduction not in ("none", "sum") and number("z_loss", z_loss) != 0


def check_one_divisor(num_valid_tokens: Any, class_weight: Any, z_loss: Any) -> None:
    """Refuses a number of tokens where the mean of a loss has two divisors."""
    if num_valid_tokens is not None and has_two_divisors("mean", class_weight, z_loss):
        raise errors.ArgumentError(
            f"num_valid_tokens is given with class_weight and z_loss={z_loss}: the mean divides cross entropies by class weights and "
            "z-losses by rows, and one number does not stand for both. Leave one of the three out, or have z_loss=0 and return_lse=True "
            "and add z_loss * jnp.sum(lse**2) / rows"
        )


def reduced(rows: Mapping[str, jax.Array], reduction: str, token_weight: jax.Array | None, num_valid_tokens: Any) -> jax.Array:
    """`reduction` of the tokens' losses, as `flce.linear_cross_entropy` has it; 0 where it would divide by 0. `rows`: loss and valid, and
    with class weights those of labels, and z-losses where there are any."""
    loss, valid = rows["loss"], rows["valid"]
    weight = None if token_weight is None else jnp.where(valid, token_weight.astype(jnp.float32), 0.0)
    if weight is not None:
        loss = jnp.where(valid, loss * weight, 0.0)
    if reduction == "none":
        return loss
    total = jnp.sum(loss)
    if reduction == "sum":
        return total
    if num_valid_tokens is not None:
        divisor = jnp.asarray(num_valid_tokens).reshape(()).astype(jnp.float32)
        return _divided(total, jnp.where(divisor > 0, divisor, 0.0))
    counted = weight if weight is not None and reduction == "weighted_mean" else valid
    if "weight_of_label" not in rows:
        return _divided(total, _sum(counted))
    z_part = jnp.zeros(())
    if "z_losses" in rows:
        z_part = jnp.sum(jnp.where(valid, rows["z_losses"] * (1.0 if weight is None else weight), 0.0))
    weights = jnp.where(valid, rows["weight_of_label"] * counted, 0.0)
    return _divided(total - z_part, _sum(weights)) + _divided(z_part, _sum(counted))


def _sum(numbers: jax.Array) -> jax.Array:
    return jnp.sum(numbers, dtype=jnp.int32 if numbers.dtype == jnp.bool_ else None).astype(jnp.float32)


def _divided(value: jax.Array, by: jax.Array) -> jax.Array:
    return jnp.where(by != 0, value / jnp.where(by != 0, by, 1.0), 0.0)


def outputs(
    rows: Mapping[str, jax.Array], names: tuple[str, ...], reduction: str, of_tokens: Mapping[str, jax.Array]
) -> tuple[jax.Array, ...]:
    """`of_tokens`: token_weight and num_valid_tokens, where they were given."""
    given = [of_tokens.get(name) for name in ("token_weight", "num_valid_tokens")]
    return tuple(reduced(rows, reduction, *given) if name == "loss" else rows[name] for name in names)


def without_impossible_teachers(target: jax.Array, ids: jax.Array, probs: jax.Array, ignore_index: int) -> jax.Array:
    """`target`, at fault where what a teacher has at a class is negative or more than 1 (as 16 bits may round it)."""
    wrong = ((probs < 0) | (probs > 1 + 2.0**-6)) & (ids != -1)
    return jnp.where(wrong.any(-1) & (target != ignore_index), _impossible(ignore_index), target)
