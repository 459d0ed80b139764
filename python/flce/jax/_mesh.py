"""Passes over arrays that lie on several devices: rows stay where they are, the weight is whole on each."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.custom_batching import sequential_vmap
from jax.experimental.custom_partitioning import SdyShardingRule, custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flce.jax import _calls
from flce.jax._calls import Layer

_SHARED = {"weight": ("classes", "depth"), "bias": ("classes",), "grad_weight": ("classes", "depth"), "grad_bias": ("classes",)}
_LAST = {"hidden": "depth", "grad_hidden": "depth", "retained": "bytes", "teacher_ids": "top_k", "teacher_probs": "top_k",
         "teacher_logprobs": "top_k"}  # fmt: skip


def run_in_auto_mode(function: Any, arrays: dict[str, jax.Array], kinds: tuple[str, ...]) -> Any:
    """The outputs of `function(arrays)`, a lone one as itself. Under a mesh of explicit axes (jax.set_mesh), where arrays have their
    sharding in their type, axes are automatic within it; outputs of `kinds` "tokens" then lie as hidden's rows, others are whole."""
    explicit = getattr(jax.sharding.get_abstract_mesh(), "explicit_axes", ())
    if explicit:
        rows = tuple(jax.typeof(arrays["hidden"]).sharding.spec)[: arrays["hidden"].ndim - 1]
        shardings = tuple(P(*rows) if kind == "tokens" else P() for kind in kinds)
        made = jax.sharding.auto_axes(function, axes=explicit, out_sharding=shardings)(arrays)
    else:
        made = function(arrays)
    return made if len(made) > 1 else made[0]


def forward(layer: Layer, row_bytes: int, *inputs: jax.Array) -> tuple[jax.Array, ...]:
    if _calls.is_manual():
        return _calls.forward(layer, row_bytes, *inputs)
    made: Any = _sequential(_forward, layer, row_bytes)(*inputs)
    return tuple(made)


def backward(layer: Layer, names: tuple[str, ...], wanted: tuple[str, ...], *arrays: jax.Array) -> tuple[jax.Array, ...]:
    if _calls.is_manual():
        return _calls.backward(layer, names, wanted, *arrays)
    made: Any = _sequential(_backward, layer, names, wanted)(*arrays)
    return tuple(made)


def _sequential(function: Any, *static: Any) -> Any:
    """The partitioned call; under vmap, one after the other."""
    return sequential_vmap(lambda *arrays: function(*static, *arrays))


def _forward_names(layer: Layer, row_bytes: int) -> tuple[str, ...]:
    return (*layer.forward_results, *(("retained",) if row_bytes else ()))


def _factors(name: str, rows: int, hidden_major: bool) -> tuple[str, ...]:
    """Names of an array's dimensions, for Shardy."""
    if name in _SHARED:
        names = _SHARED[name]
        return names[::-1] if hidden_major and len(names) == 2 else names
    of_rows = tuple(f"row{i}" for i in range(rows))
    return (*of_rows, _LAST[name]) if name in _LAST else of_rows


def _rule(layer: Layer, names: tuple[str, ...], results: tuple[str, ...], operands: Any) -> SdyShardingRule:
    rows = len(operands[0].shape) - 1
    operand_factors = tuple(_factors(name, rows, layer.hidden_major) for name in names)
    result_factors = tuple(_factors(name, rows, layer.hidden_major) for name in results)
    used = dict.fromkeys(factor for each in (*operand_factors, *result_factors) for factor in each)  # in the order that Shardy asks for
    whole = tuple(factor for factor in used if not factor.startswith("row"))
    return SdyShardingRule(operand_factors, result_factors, need_replication_factors=whole)


def _shardings(mesh: Any, names: tuple[str, ...], shapes: Any, of_rows: Any) -> tuple[NamedSharding, ...]:
    made = []
    for name, shape in zip(names, shapes, strict=True):
        axes = [] if name in _SHARED else list(of_rows)
        made.append(NamedSharding(mesh, P(*axes, *(None for _ in range(len(shape.shape) - len(axes))))))
    return tuple(made)


def _rows_of(mesh: Any, operands: Any) -> tuple[Any, ...]:
    """Mesh axes over which hidden's rows lie. A dimension that its axes do not divide is whole on each of them: XLA would fill up the last
    parts with rows of any content."""
    shape = operands[0].shape[:-1]
    spec = (*operands[0].sharding.spec, *(None for _ in shape))
    return tuple(axes if size % _count(mesh, axes) == 0 else None for size, axes in zip(shape, spec, strict=False))


def _count(mesh: Any, axes: Any) -> int:
    return math.prod(mesh.shape[axis] for axis in _axes((axes,)))


def _axes(of_rows: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(axis for each in of_rows if each is not None for axis in ((each,) if isinstance(each, str) else each))


def _partition_forward(layer: Layer, row_bytes: int, mesh: Any, operands: Any, results: Any) -> Any:
    of_rows = _rows_of(mesh, operands)
    names = _forward_names(layer, row_bytes)
    return (
        mesh,
        lambda *inputs: _calls.forward(layer, row_bytes, *inputs),
        _shardings(mesh, names, results, of_rows),
        _shardings(mesh, layer.inputs, operands, of_rows),
    )


def _partition_backward(layer: Layer, names: tuple[str, ...], wanted: tuple[str, ...], mesh: Any, operands: Any, results: Any) -> Any:
    of_rows = _rows_of(mesh, operands)
    axes = _axes(of_rows)

    def of_shard(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        made = _calls.backward(layer, names, wanted, *arrays)
        return tuple(jax.lax.psum(each, axes) if name != "hidden" and axes else each for name, each in zip(wanted, made, strict=True))

    gradients = tuple(_calls.GRADIENTS[name] for name in wanted)
    return mesh, of_shard, _shardings(mesh, gradients, results, of_rows), _shardings(mesh, names, operands, of_rows)


def _infer_forward(layer: Layer, row_bytes: int, mesh: Any, operands: Any, results: Any) -> Any:
    return _shardings(mesh, _forward_names(layer, row_bytes), results, _rows_of(mesh, operands))


def _infer_backward(layer: Layer, names: tuple[str, ...], wanted: tuple[str, ...], mesh: Any, operands: Any, results: Any) -> Any:
    return _shardings(mesh, tuple(_calls.GRADIENTS[name] for name in wanted), results, _rows_of(mesh, operands))


def _rule_forward(layer: Layer, row_bytes: int, mesh: Any, operands: Any, results: Any) -> SdyShardingRule:
    return _rule(layer, layer.inputs, _forward_names(layer, row_bytes), operands)


def _rule_backward(
    layer: Layer, names: tuple[str, ...], wanted: tuple[str, ...], mesh: Any, operands: Any, results: Any
) -> SdyShardingRule:
    return _rule(layer, names, tuple(_calls.GRADIENTS[name] for name in wanted), operands)


_forward = custom_partitioning(_calls.forward, static_argnums=(0, 1))
_forward.def_partition(_partition_forward, infer_sharding_from_operands=_infer_forward, sharding_rule=_rule_forward)
_backward = custom_partitioning(_calls.backward, static_argnums=(0, 1, 2))
_backward.def_partition(_partition_backward, infer_sharding_from_operands=_infer_backward, sharding_rule=_rule_backward)
