"""`info_nce`: a contrastive loss as a cross entropy whose classes are documents."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.numpy as jnp

from flce import errors
from flce.core import checks
from flce.jax import _calls, _layer

_REDUCTIONS = ("none", "sum", "mean")
_IGNORED = -100
_MOST_NEGATIVES = 1023  # beside a positive


def check(queries: jax.Array, documents: jax.Array, scale: Any, positives: Any, negative_log_q: Any, reduction: str) -> None:
    for name, array in (("queries", queries), ("documents", documents)):
        if array.ndim != 2:
            raise errors.ShapeError(f"{name} has shape {list(array.shape)}; it must have two dimensions, rows and their size")
        if array.dtype.name not in _calls.DTYPES:
            raise errors.DTypeError(f"{name} has dtype {array.dtype}; allowed are {', '.join(_calls.DTYPES)}")
    if queries.shape[1] != documents.shape[1] or queries.dtype != documents.dtype:
        raise errors.ShapeError(
            f"queries has {list(queries.shape)} of {queries.dtype} and documents {list(documents.shape)} of {documents.dtype}; size and "
            "dtype are one"
        )
    if documents.shape[0] == 0:
        raise errors.ShapeError("documents has no rows; there must be one document or more")
    if positives is None and documents.shape[0] < queries.shape[0]:
        raise errors.ShapeError(
            f"documents has {documents.shape[0]} rows and queries {queries.shape[0]}, and positives is None: document i is query i's; give "
            "positives where several queries share one"
        )
    if positives is not None and (positives.dtype not in (jnp.int32, jnp.int64) or positives.shape != queries.shape[:1]):
        raise errors.ShapeError(f"positives is {positives.dtype}{list(positives.shape)}; it must be [{queries.shape[0]}], int32 or int64")
    if negative_log_q is not None and negative_log_q.shape != documents.shape[:1]:
        raise errors.ShapeError(f"negative_log_q has shape {list(negative_log_q.shape)}; it must be [{documents.shape[0]}]")
    checks.choice("reduction", reduction, _REDUCTIONS)
    if isinstance(scale, numbers.Real) and not isinstance(scale, bool):
        if not checks.LEAST_TEMPERATURE <= float(scale) <= checks.MOST_TEMPERATURE:
            raise errors.ArgumentError(f"scale is {scale!r}; it must be from 2^-100 to 2^100")
    elif jnp.shape(scale) != () and jnp.size(scale) != 1:
        raise errors.ShapeError(f"scale has shape {list(jnp.shape(scale))}; it must be one number")


def check_mask(mask: Any, queries: jax.Array, documents: jax.Array) -> dict[str, jax.Array]:
    """Numbers of queries and of documents, by name; none where there is no mask."""
    if mask is None:
        return {}
    instead = f"give (of_queries, of_documents), [{queries.shape[0]}] and [{documents.shape[0]}] of int32 or int64"
    if not isinstance(mask, (tuple, list)) or len(mask) != 2:
        shape = f" of shape {list(mask.shape)}" if hasattr(mask, "shape") else ""
        raise errors.ArgumentError(f"mask is a {type(mask).__name__}{shape}; {instead}: a pair of equal numbers is left out")
    made = _layer.arrays_of(of_queries=mask[0], of_documents=mask[1])
    for name, rows in (("of_queries", queries), ("of_documents", documents)):
        if name not in made:
            raise errors.DTypeError(f"mask has None for {name}; {instead}")
        if made[name].dtype not in (jnp.int32, jnp.int64) or made[name].shape != rows.shape[:1]:
            raise errors.ShapeError(f"mask has {made[name].dtype}{list(made[name].shape)} for {name}; {instead}")
    return made


def groups_of(of_rows: jax.Array, of_classes: jax.Array) -> dict[str, jax.Array]:
    """The numbers as int32: equal ones stay equal, others different, and those below 0 are of no group."""
    ordered = jnp.sort(of_classes)
    at = jnp.minimum(jnp.searchsorted(ordered, of_rows), ordered.shape[0] - 1)
    rows = jnp.where((of_rows >= 0) & (ordered[at] == of_rows), at, -1)
    classes = jnp.where(of_classes >= 0, jnp.searchsorted(ordered, of_classes), -1)
    return {"row_group": rows.astype(jnp.int32), "class_group": classes.astype(jnp.int32)}


def check_negatives(negatives: jax.Array, queries: int, symmetric: bool) -> None:
    shape, kinds = negatives.shape, (jnp.int32, jnp.int64)
    if negatives.dtype not in kinds or negatives.ndim != 2 or shape[0] != queries or not 1 <= shape[1] <= _MOST_NEGATIVES:
        raise errors.ShapeError(
            f"negatives is {negatives.dtype}{list(shape)}; it must be [{queries}, K], K from 1 to {_MOST_NEGATIVES}, int32 or int64"
        )
    if symmetric:
        raise errors.ArgumentError(
            "negatives is given with symmetric, which is about all documents; leave one of them out, and add a second call with documents "
            "and queries exchanged"
        )


def named(positives: jax.Array, negatives: jax.Array, documents: int, of_queries: Any, of_documents: Any) -> jax.Array:
    """The documents that each query meets, its positive first; -1 for none. A fault is none of the documents', and not -1."""
    own = jnp.where((positives < 0) | (positives >= documents), documents, positives).astype(negatives.dtype)
    others = jnp.where(negatives == positives[:, None], -1, negatives)
    if of_queries is not None:
        there = (others >= 0) & (others < documents)
        same = of_documents[jnp.clip(others, 0, documents - 1)] == of_queries[:, None]
        others = jnp.where(there & same & (of_queries >= 0)[:, None], -1, others)
    others = jnp.where((others < -1) | (others >= documents), documents, others)
    return jnp.where((positives != _IGNORED)[:, None], jnp.concatenate([own[:, None], others], 1), -1)


def reduced(losses: jax.Array, positives: jax.Array, documents: int, scale: jax.Array, reduction: str) -> jax.Array:
    """The queries' losses over those that count."""
    if reduction == "none":
        return losses
    counts = (positives >= 0) & (positives < documents) & (scale >= checks.LEAST_TEMPERATURE) & (scale <= checks.MOST_TEMPERATURE)
    return losses.sum() / (jnp.maximum(counts.sum(), 1) if reduction == "mean" else 1)


def watched(rows: jax.Array, scale: jax.Array) -> jax.Array:
    """The rows themselves, with scale's gradient for what is computed of scale · rows: rows times a 1 that depends on the scale."""
    counts = (scale >= checks.LEAST_TEMPERATURE) & (scale <= checks.MOST_TEMPERATURE)
    number = jnp.where(counts, scale, 1.0)
    return (rows.astype(jnp.float32) * (number / jax.lax.stop_gradient(number))).astype(rows.dtype)


def with_added(queries: jax.Array, documents: jax.Array, added: jax.Array) -> tuple[jax.Array, jax.Array]:
    """queries and documents with columns more, whose products are `added` [M]: as many numbers of the dtype as 24 bits take."""
    dtype = documents.dtype
    factor = jnp.float32(1)
    if dtype == jnp.float16:  # has no number above 65504
        factor = jnp.exp2(jnp.clip(jnp.ceil(jnp.log2(jnp.abs(added).max() / 2**15)), 0, 15))
    parts, rest = [], added / factor
    for _ in range(1 if dtype == jnp.float32 else 3):
        # A reduction of precision that XLA keeps: a conversion there and back it may leave out.
        parts.append(jax.lax.reduce_precision(rest, *_BITS[dtype.name]))
        rest = rest - parts[-1]
    of_queries = jnp.broadcast_to(factor, (queries.shape[0], len(parts))).astype(dtype)
    return jnp.concatenate([queries, of_queries], 1), jnp.concatenate([documents, jnp.stack(parts, 1).astype(dtype)], 1)


_BITS = {"bfloat16": (8, 7), "float16": (5, 10), "float32": (8, 23)}  # bits of exponent and mantissa


def alone(queries: jax.Array, positives: jax.Array | None, documents: int) -> tuple[jax.Array, jax.Array]:
    """The positive of each query, and the query of each positive document."""
    rows = jnp.arange(queries.shape[0], dtype=jnp.int32)
    if positives is None:
        return rows, rows
    return positives, jnp.where((positives >= 0) & (positives < documents), rows, _IGNORED)
