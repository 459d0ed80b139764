"""Passes of one device's part of the vocabulary, inside of shard_map, with the collectives between them.

A device's labels are turned so that its own classes come first: kernels then need not know where the part begins, which is a number on the
device.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from flce import errors
from flce.core import _native
from flce.jax import _calls
from flce.jax._calls import Layer, sized

_LABELS = ("target", "teacher_ids")
_OF_MERGE = ("target", "temperature", "teacher_ids", "teacher_probs")


def ranks_of(axis_name: str) -> int:
    """Devices along a manual axis. Raises ArgumentError outside of shard_map."""
    try:
        return int(jax.lax.axis_size(axis_name)) if hasattr(jax.lax, "axis_size") else int(jax.lax.psum(1, axis_name))
    except NameError:
        raise errors.ArgumentError(f"axis_name is {axis_name!r}, which is no axis here; call inside of jax.shard_map over it") from None


def _is_checked(axis_name: str) -> bool:
    """Whether shard_map keeps account of what varies over the axis (check_vma)."""
    return axis_name in _calls.varying(jax.lax.axis_index(axis_name))


def _turned(layer: Layer, inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    weight = inputs["weight"]
    rows = weight.shape[1 if layer.hidden_major else 0]
    whole = rows * layer.ranks
    start = jax.lax.axis_index(layer.axis_name) * rows
    turned = dict(inputs)
    for name in _LABELS:
        if name in inputs:
            label = inputs[name]
            is_class = (label >= 0) & (label < whole) & (label != layer.ignore_index)
            turned[name] = jnp.where(is_class, (label - start.astype(label.dtype)) % whole, label)
    return turned


def forward(layer: Layer, row_bytes: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    inputs = dict(zip(layer.inputs, arrays, strict=True))
    hidden, weight = arrays[:2]
    tokens = hidden.shape[:-1]
    size = sized(layer, hidden, weight)
    fields = _native.partial_sum_fields(size.kernel)
    results = {"partial_sums": jax.ShapeDtypeStruct((fields, *tokens), jnp.float32)}
    if row_bytes:
        results["retained"] = jax.ShapeDtypeStruct((*tokens, row_bytes), jnp.uint8)
    mine = {name: value for name, value in _turned(layer, inputs).items() if name != "teacher_probs"}
    made = _calls.call(layer, "forward", _native.FORWARD, mine, results, size)
    # A sum with zeros of the others, whose result shard_map knows to be the same on every device.
    place = (jnp.arange(layer.ranks) == jax.lax.axis_index(layer.axis_name)).reshape(-1, *(1 for _ in made["partial_sums"].shape))
    all_sums = jax.lax.psum(jnp.where(place, made["partial_sums"][None], 0.0), layer.axis_name)
    shared = {"all_partial_sums": all_sums.reshape(-1, *tokens), **{name: inputs[name] for name in _OF_MERGE if name in inputs}}
    outputs = {name: _calls.token_shape(layer, name, tokens) for name in layer.forward_results}
    merged = _calls.call(layer, "merge", _native.MERGE, shared, outputs, size)
    return (*(_calls.as_output(name, merged[name]) for name in outputs), *((made["retained"],) if row_bytes else ()))


def backward(layer: Layer, names: tuple[str, ...], wanted: tuple[str, ...], *arrays: jax.Array) -> tuple[jax.Array, ...]:
    arguments = _turned(layer, dict(zip(names, arrays, strict=True)))
    if not _is_checked(layer.axis_name):
        # Each device's gradients of results that all have are then a share of them.
        for name in arguments:
            if name.startswith("grad_"):
                arguments[name] = jax.lax.psum(arguments[name], layer.axis_name)
    return _calls.backward(layer, tuple(arguments), wanted, *arguments.values())
