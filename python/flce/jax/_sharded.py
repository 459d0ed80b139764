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

_IGNORED = -100
_OF_MERGE = ("target", "temperature", "teacher_ids", "teacher_probs")


def ranks_of(axis_name: str) -> int:
    """Devices along a manual axis. Raises ArgumentError for what is none."""
    manual = getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ())
    if not isinstance(axis_name, str) or axis_name not in manual:
        raise errors.ArgumentError(
            f"axis_name is {axis_name!r}; it must be the name of one axis that the caller is manual over, inside of jax.shard_map: "
            f"{', '.join(map(repr, manual)) or 'there is none here'}"
        )
    return int(jax.lax.axis_size(axis_name)) if hasattr(jax.lax, "axis_size") else int(jax.lax.psum(1, axis_name))


def _checks_what_varies(axis_name: str) -> bool:
    """Whether shard_map knows over which axes an array varies (check_vma)."""
    return axis_name in _calls.varying(jax.lax.axis_index(axis_name))


def check_is_part(name: str, array: jax.Array, axis_name: str) -> None:
    """Refuses an array of classes that shard_map knows to be the same on every device: each would count its classes again."""
    if ranks_of(axis_name) > 1 and _checks_what_varies(axis_name) and axis_name not in _calls.varying(array):
        raise errors.PlacementError(
            f"{name} is the same on every device of axis {axis_name!r}, where each has its part of the classes: name the axis in {name}'s "
            f"PartitionSpec of shard_map's in_specs, as P({axis_name!r}) for [V, D], or leave axis_name out for a whole vocabulary"
        )


def whole_gradient(layer: Layer, gradient: jax.Array) -> jax.Array:
    """A result's gradient, which kernels of all parts need whole. Where shard_map does not check what varies (check_vma), or knows that the
    result varies over the axis (as its labels do), each device has a share of it."""
    if _checks_what_varies(layer.axis_name) and layer.axis_name not in _calls.varying(gradient):
        return gradient
    return jax.lax.psum(gradient, layer.axis_name)


def _turned(layer: Layer, inputs: dict[str, jax.Array]) -> tuple[Layer, dict[str, jax.Array]]:
    """Labels as the device's part has them, and the layer of these. A label that counts for nothing is -100, which no turned label is."""
    weight = inputs["weight"]
    rows = weight.shape[1 if layer.hidden_major else 0]
    whole = rows * layer.ranks
    start = jax.lax.axis_index(layer.axis_name) * rows
    turned = dict(inputs)
    for name in ("target", "teacher_ids"):
        if name in inputs:
            label = inputs[name]
            is_class = (label >= 0) & (label < whole)
            if name == "target":
                is_class &= label != layer.ignore_index
            other = _IGNORED if name == "target" else label
            turned[name] = jnp.where(is_class, (label - start.astype(label.dtype)) % whole, other)
    return layer._replace(ignore_index=_IGNORED), turned


def weights_of_labels(layer: Layer, class_weight: jax.Array, target: jax.Array) -> jax.Array:
    """The class weight of each token's label, whichever part has it; 0 for a label that is no class."""
    mine = target - jax.lax.axis_index(layer.axis_name).astype(target.dtype) * class_weight.shape[0]
    is_mine = (mine >= 0) & (mine < class_weight.shape[0])
    return jax.lax.psum(jnp.where(is_mine, class_weight[jnp.where(is_mine, mine, 0)], 0.0), layer.axis_name)


def forward(layer: Layer, row_bytes: int, _: int, *arrays: jax.Array) -> dict[str, jax.Array]:
    inputs = dict(zip(layer.inputs, arrays, strict=True))
    hidden, weight = arrays[:2]
    tokens = hidden.shape[:-1]
    size = sized(layer, hidden, weight)
    fields = _native.partial_sum_fields(size.kernel)
    results = {"partial_sums": jax.ShapeDtypeStruct((fields, *tokens), jnp.float32)}
    if row_bytes:
        results["retained"] = jax.ShapeDtypeStruct((*tokens, row_bytes), jnp.uint8)
    of_part, turned = _turned(layer, inputs)
    mine = {name: value for name, value in turned.items() if name != "teacher_probs"}
    made = _calls.call(of_part, "forward", _native.FORWARD, mine, results, size)
    # A sum with zeros of the others, whose result shard_map knows to be the same on every device.
    place = (jnp.arange(layer.ranks) == jax.lax.axis_index(layer.axis_name)).reshape(-1, *(1 for _ in made["partial_sums"].shape))
    all_sums = jax.lax.psum(jnp.where(place, made["partial_sums"][None], 0.0), layer.axis_name)
    shared = {"all_partial_sums": all_sums.reshape(-1, *tokens), **{name: inputs[name] for name in _OF_MERGE if name in inputs}}
    outputs = {name: _calls.token_shape(layer, name, tokens) for name in dict.fromkeys((*layer.forward_results, *layer.saved))}
    merged = _calls.call(layer, "merge", _native.MERGE, shared, outputs, size)
    return {name: _calls.as_output(name, merged[name]) for name in outputs} | ({"retained": made["retained"]} if row_bytes else {})


def backward(layer: Layer, arguments: dict[str, jax.Array], wanted: tuple[str, ...], _: int) -> tuple[jax.Array, ...]:
    of_part, turned = _turned(layer, arguments)
    return _calls.backward(of_part, tuple(turned), wanted, *turned.values())
