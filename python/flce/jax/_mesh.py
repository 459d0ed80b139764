"""Passes over arrays that lie on several devices: rows stay where they are, the weight is whole on each."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.experimental.custom_partitioning import SdyShardingRule, custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flce.jax import _calls
from flce.jax._calls import Layer

_MOST_PARTS = 1 << 16
_ONLY_PART = 1  # part 0 of one
_SHARED = {
    "weight": ("classes", "depth"),
    "bias": ("classes",),
    "class_weight": ("classes",),
    "class_offset": ("classes",),
    "class_group": ("classes",),
    "grad_weight": ("classes", "depth"),
    "grad_bias": ("classes",),
    "grad_class_offset": ("classes",),
}
_LAST = {"hidden": "depth", "grad_hidden": "depth", "retained": "bytes", "teacher_ids": "top_k", "teacher_probs": "top_k",
         "teacher_logprobs": "top_k"}  # fmt: skip


def run_in_auto_mode(function: Any, arrays: Any, like: tuple[Any, ...]) -> Any:
    """The outputs of `function(arrays)`, a lone one as itself. Under a mesh of explicit axes (jax.set_mesh), where arrays have their
    sharding in their type, axes are automatic within it. `like`: for each output the array of rows as which it then lies, or None for one
    that is whole."""
    explicit = getattr(jax.sharding.get_abstract_mesh(), "explicit_axes", ())
    if explicit:
        shardings = jax.tree.map(_rows_sharding, like, is_leaf=lambda each: each is None)
        made = jax.sharding.auto_axes(function, axes=explicit, out_sharding=shardings)(arrays)
    else:
        made = function(arrays)
    return made if len(made) > 1 else made[0]


def _rows_sharding(array: jax.Array | None) -> P:
    return P() if array is None else P(*tuple(jax.typeof(array).sharding.spec)[: array.ndim - 1])


class Pass(NamedTuple):
    """A forward or a backward over a mesh."""

    layer: Layer
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    row_bytes: int = 0  # forward's, of what it retains
    wanted: tuple[str, ...] = ()  # inputs whose gradients backward makes
    pair: int = 0  # number that a forward which retains and its backward have in common

    @property
    def retains(self) -> bool:
        return "retained" in (*self.arguments, *self.results)


def forward(layer: Layer, row_bytes: int, pair: int, *inputs: jax.Array) -> dict[str, jax.Array]:
    """`layer.forward_results` by name; with row_bytes also what is retained, and the place of each row's part of it. `pair`: number of this
    forward and its backward."""
    if _calls.is_manual():
        return dict(zip((*layer.forward_results, "retained"), _calls.forward(layer, row_bytes, *inputs), strict=False))
    results = (*layer.forward_results, *(("retained", "place") if row_bytes else ()))
    made = Pass(layer, layer.inputs, results, row_bytes=row_bytes, pair=pair)
    return dict(zip(results, _sequential(_forward, made)(*inputs), strict=True))


def backward(layer: Layer, arguments: dict[str, jax.Array], wanted: tuple[str, ...], pair: int) -> tuple[jax.Array, ...]:
    """Gradients of the inputs `wanted`."""
    if _calls.is_manual():
        return _calls.backward(layer, tuple(arguments), wanted, *arguments.values())
    gradients = tuple(_calls.GRADIENTS[name] for name in wanted)
    made: Any = _sequential(_backward, Pass(layer, tuple(arguments), gradients, wanted=wanted, pair=pair))(*arguments.values())
    return tuple(made)


def _sequential(function: Any, each: Pass) -> Any:
    """The partitioned call; under vmap, one after the other."""
    return sequential_vmap(lambda *arrays: function(each, *arrays))


# ── A part, or all of it on one device ───────────────────────────────────


def _run_forward(place: Any, each: Pass, *inputs: jax.Array) -> tuple[jax.Array, ...]:
    made = _calls.forward(each.layer, each.row_bytes, *inputs)
    return (*made, jnp.full(inputs[0].shape[:-1], place, jnp.int32)) if each.retains else made


def _run_backward(place: Any, each: Pass, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Gradients; NaN where what is retained was moved: it is for the rows of the part whose forward made it."""
    arguments = dict(zip(each.arguments, arrays, strict=True))
    if each.retains:
        there = jnp.all(arguments.pop("place") == place)
        for name in arguments:
            if name.startswith("grad_"):
                arguments[name] = jnp.where(there, arguments[name], jnp.nan)
    return _calls.backward(each.layer, tuple(arguments), each.wanted, *arguments.values())


def _all_forward(each: Pass, *inputs: jax.Array) -> tuple[jax.Array, ...]:
    return _run_forward(_ONLY_PART, each, *inputs)


def _all_backward(each: Pass, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return _run_backward(_ONLY_PART, each, *arrays)


# ── Over several ────────────────────────────────────

_decided: dict[int, Any] = {}  # mesh axes of rows by pair: what forward retains is of its own rows


def _factors(name: str, rows: int, hidden_major: bool) -> tuple[str, ...]:
    """Names of an array's dimensions, for Shardy."""
    if name in _SHARED:
        names = _SHARED[name]
        return names[::-1] if hidden_major and len(names) == 2 else names
    of_rows = tuple(f"row{i}" for i in range(rows))
    return (*of_rows, _LAST[name]) if name in _LAST else of_rows


def _rule(each: Pass, mesh: Any, operands: Any, results: Any) -> SdyShardingRule:
    if "retained" in each.results:
        _decided.pop(each.pair, None)  # another program begins
    rows = len(_hidden(each, operands).shape) - 1
    operand_factors = tuple(_factors(name, rows, each.layer.hidden_major) for name in each.arguments)
    result_factors = tuple(_factors(name, rows, each.layer.hidden_major) for name in each.results)
    used = dict.fromkeys(factor for factors in (*operand_factors, *result_factors) for factor in factors)  # in Shardy's order
    whole = tuple(factor for factor in used if not factor.startswith("row"))
    return SdyShardingRule(operand_factors, result_factors, need_replication_factors=whole)


def _shardings(mesh: Any, names: tuple[str, ...], shapes: Any, of_rows: Any) -> tuple[NamedSharding, ...]:
    made = []
    for name, shape in zip(names, shapes, strict=True):
        axes = [] if name in _SHARED else list(of_rows)
        made.append(NamedSharding(mesh, P(*axes, *(None for _ in range(len(shape.shape) - len(axes))))))
    return tuple(made)


def _hidden(each: Pass, operands: Any) -> Any:
    return operands[each.arguments.index("hidden")]


def _rows_of(each: Pass, mesh: Any, operands: Any) -> tuple[Any, ...]:
    """Mesh axes over which hidden's rows lie. A dimension that its axes do not divide is whole on each of them: XLA would fill up the last
    parts with rows of any content."""
    hidden = _hidden(each, operands)
    shape = hidden.shape[:-1]
    spec = (*hidden.sharding.spec, *(None for _ in shape))
    mine = tuple(axes if size % _count(mesh, axes) == 0 else None for size, axes in zip(shape, spec, strict=False))
    if not each.retains:
        return mine
    known, rows = _decided.setdefault(each.pair, (tuple(mesh.shape.items()), mine))
    return rows if known == tuple(mesh.shape.items()) else mine


def _count(mesh: Any, axes: Any) -> int:
    return math.prod(mesh.shape[axis] for axis in _axes((axes,)))


def _axes(of_rows: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(axis for each in of_rows if each is not None for axis in ((each,) if isinstance(each, str) else each))


def _place(mesh: Any, axes: tuple[str, ...]) -> Any:
    """The number of a part, and of how many parts."""
    index: Any = 0
    for axis in axes:
        index = index * mesh.shape[axis] + jax.lax.axis_index(axis)
    return index * _MOST_PARTS + math.prod(mesh.shape[axis] for axis in axes)


def _lower_sum(context: Any, array: Any, *, axes: tuple[str, ...]) -> Any:
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        plain = [jax.core.ShapedArray(each.shape, each.dtype) for each in context.avals_in]
        context = context.replace(avals_in=plain, avals_out=plain)
        return mlir.lower_fun(lambda array: jax.lax.psum(array, axes), multiple_results=False)(context, array)


# A psum of a part. jax 0.11 lowers parts under the mesh that jax.set_mesh has set, and where the mesh's axes are explicit gives the psum's
# addition a sharding, with which XLA cannot compile it.
_sum_p = Primitive("flce_sum")
_sum_p.def_abstract_eval(lambda array, *, axes: array)
mlir.register_lowering(_sum_p, _lower_sum)


def _partition(each: Pass, mesh: Any, operands: Any, results: Any) -> Any:
    of_rows = _rows_of(each, mesh, operands)
    axes = _axes(of_rows)

    def of_part(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        place = _place(mesh, axes)
        if not each.wanted:
            return _run_forward(place, each, *arrays)
        made = _run_backward(place, each, *arrays)
        return tuple(_sum_p.bind(one, axes=axes) if name != "hidden" and axes else one for name, one in zip(each.wanted, made, strict=True))

    return mesh, of_part, _shardings(mesh, each.results, results, of_rows), _shardings(mesh, each.arguments, operands, of_rows)


def _infer(each: Pass, mesh: Any, operands: Any, results: Any) -> Any:
    return _shardings(mesh, each.results, results, _rows_of(each, mesh, operands))


_forward, _backward = (custom_partitioning(run, static_argnums=(0,)) for run in (_all_forward, _all_backward))
for _each in (_forward, _backward):
    _each.def_partition(_partition, infer_sharding_from_operands=_infer, sharding_rule=_rule)
