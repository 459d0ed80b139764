"""Rows through the output layer as a function that jax transforms: per-token results, differentiable, batched and partitioned by rows.

A primitive of its own stands outside of the `custom_vjp`, so that vmap meets it first and makes rows of a batch: the weight's gradient of a
batch of examples is one call's. Its derivative is the `custom_vjp`'s.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from flce import errors
from flce.jax import _calls, _layer, _library, _mesh, _sharded, _targets
from flce.jax._calls import Layer

_OF_CLASSES = ("weight", "bias", "class_weight", "class_offset", "class_group")  # inputs that all rows share
_OPTIONAL = ("bias", "class_weight", "class_offset", "class_group", "row_group", "temperature", "teacher_ids", "teacher_probs")


@jax.tree_util.register_static
class _Kept(NamedTuple):
    """Facts that forward knows, among residuals."""

    wanted: tuple[str, ...]
    pair: int  # number of a forward and its backward


_pairs = itertools.count(1)


def results_of(
    arrays: dict[str, jax.Array], target: jax.Array, outputs: tuple[str, ...], *, ignore_index: int, **options: Any
) -> dict[str, jax.Array]:
    """A call's results by name, per token, and what a reduction reads beside: `valid` rows, and with class weights `weight_of_label` and
    `z_losses`."""
    inputs = {"hidden": arrays["hidden"], "weight": arrays["weight"], "target": target}
    inputs |= {name: arrays[name] for name in _OPTIONAL if name in arrays}
    dft, z_loss = options.get("dft") is True, options.get("z_loss")
    written = tuple(name for name in _calls.OUTPUTS if name in outputs or (dft and name == "logprobs"))
    layer, given = _layer.layer_of(inputs, outputs=written, ignore_index=ignore_index, **options)
    made = dict(zip(layer.forward_results, rows(layer, *given), strict=True))
    if "teacher_logprobs" in made and not layer.named:
        made["teacher_logprobs"] = jax.lax.stop_gradient(made["teacher_logprobs"])
    classes = layer.ranks * arrays["weight"].shape[1 if layer.hidden_major else 0]
    made["valid"] = _targets.valid_rows(target, classes, ignore_index, arrays.get("temperature"))
    if "class_weight" in arrays:
        weights = arrays["class_weight"].astype(jnp.float32)
        if layer.axis_name:
            made["weight_of_label"] = _sharded.weights_of_labels(layer, weights, target)
        else:
            made["weight_of_label"] = weights[jnp.where(made["valid"], target, 0)]
        if z_loss:
            share = jnp.exp(jax.lax.stop_gradient(made["logprobs"])) if dft else 1.0
            made["z_losses"] = z_loss * made["lse"] ** 2 * share
    return made


def rows(layer: Layer, *inputs: jax.Array) -> tuple[jax.Array, ...]:
    """`layer.forward_results`, [...] each, of `layer.inputs`."""
    made: Any = _apply_to_own(layer, *inputs) if _calls.is_manual() else _apply(layer, *inputs)
    return tuple(made)


def _passes(layer: Layer) -> Any:
    return _sharded if layer.axis_name else _mesh


def _without_derivative(function: Any) -> Any:
    """A function of arrays that does the same and refuses a derivative of its own: jax would name something within it."""
    made = jax.custom_jvp(function)

    def refuse(primals: Any, tangents: Any) -> Any:
        raise errors.UnsupportedTransformError("flce.jax has no second derivatives: its gradients cannot be differentiated")

    made.defjvp(refuse)
    return made


# ── With a derivative ───────────────────────────────


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(layer: Layer, *inputs: jax.Array) -> Any:
    return _outputs(layer, _passes(layer).forward(layer, 0, 0, *inputs))


def _outputs(layer: Layer, made: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
    return tuple(made[name] for name in layer.forward_results)


def _forward(layer: Layer, *given: Any) -> tuple[Any, Any]:
    inputs = [each.value for each in given]
    wanted = [name for name, each in zip(layer.inputs, given, strict=True) if each.perturbed]
    for name in wanted:
        if name not in _calls.GRADIENTS:
            raise errors.ArgumentError(f"a gradient of {name} is asked for, and it has none here: give jax.lax.stop_gradient({name})")
    row_bytes = _calls.retained_row_bytes(layer, *inputs[:2]) if wanted else 0
    pair = next(_pairs)
    made = _without_derivative(functools.partial(_passes(layer).forward, layer, row_bytes, pair))(*inputs)
    saved = {name: checkpoint_name(made[name], f"flce_{name}") for name in layer.saved}
    saved |= {name: checkpoint_name(made[name], "flce_retained") for name in ("retained", "place") if name in made}
    return _outputs(layer, made | saved), (tuple(inputs), saved, _Kept(tuple(wanted), pair))


def _backward(layer: Layer, residuals: Any, given: Any) -> tuple[Any, ...]:
    inputs, saved, (wanted, pair) = residuals
    arguments = dict(zip(layer.inputs, inputs, strict=True))
    arguments |= saved
    of_results = _calls.gradient_names(layer.forward_results)
    for name, gradient in zip(layer.forward_results, given, strict=True):
        named = name == "teacher_logprobs" and layer.named
        if (name not in of_results and not named) or isinstance(gradient, jax.custom_derivatives.SymbolicZero):
            continue
        whole = _sharded.whole_gradient(layer, gradient) if layer.axis_name else gradient
        if named:
            # A loss −Σ_k q_k·log p_k has the log-probabilities' gradient −q.
            arguments["teacher_probs"] = -whole
            arguments["grad_loss"] = jnp.ones(inputs[0].shape[:-1], jnp.float32)
        else:
            arguments[of_results[name]] = whole
    if "grad_entropy" in arguments:
        for name in ("retained", "place"):
            arguments.pop(name, None)  # a GPU's exponentials are no use there
    if not wanted or not any(name.startswith("grad_") for name in arguments):
        return tuple(None for _ in inputs)
    if "loss" in of_results and "grad_loss" not in arguments:
        arguments["grad_loss"] = jnp.zeros(inputs[0].shape[:-1], jnp.float32)
    passes = _passes(layer)
    names = tuple(arguments)  # jax sorts a dictionary's

    def backward(*arrays: jax.Array) -> Any:
        return passes.backward(layer, dict(zip(names, arrays, strict=True)), wanted, pair)

    made = _without_derivative(backward)(*arguments.values())
    gradients = dict(zip(wanted, made, strict=True))
    return tuple(_as_input(gradients.get(name), value) for name, value in zip(layer.inputs, inputs, strict=True))


def _as_input(gradient: Any, value: jax.Array) -> Any:
    """Summed over the manual axes over which the input, unlike the call, does not vary."""
    if gradient is None:
        return None
    axes = tuple(sorted(_calls.varying(gradient) - _calls.varying(value)))
    return (jax.lax.psum(gradient, axes) if axes else gradient).astype(value.dtype)


_differentiable.defvjp(_forward, _backward, symbolic_zeros=True)


@functools.partial(jax.jit, static_argnums=0)
def _apply_to_own(layer: Layer, *inputs: jax.Array) -> Any:
    """A device's own rows, inside of shard_map."""
    return _differentiable(layer, *inputs)


# ── As a primitive ──────────────────────────────────

_rows_p = Primitive("flce_rows")
_rows_p.multiple_results = True


@functools.partial(jax.jit, static_argnums=0)
def _apply(layer: Layer, *inputs: jax.Array) -> Any:
    return _bind(layer, *inputs)


def _bind(layer: Layer, *inputs: Any) -> Any:
    call = _call(layer, _library.device(), *((each.shape, each.dtype) for each in inputs))
    return _rows_p.bind(*inputs, layer=layer, call=call)


@functools.lru_cache(maxsize=256)
def _call(layer: Layer, device: int, *inputs: Any) -> Any:
    """The passes' jaxpr, with the sizes of a device's kernel. jax looks into it for what it has to tell about devices before it lowers."""
    shapes = [jax.ShapeDtypeStruct(*each) for each in inputs]
    return jax.make_jaxpr(lambda *inputs: _outputs(layer, _mesh.forward(layer, 0, 0, *inputs)))(*shapes)


def _evaluate(*inputs: jax.Array, layer: Layer, call: Any) -> Any:
    return jaxpr_as_fun(call)(*inputs)


def _abstract(*inputs: Any, layer: Layer, call: Any) -> list[Any]:
    return [jax.core.ShapedArray(each.shape, each.dtype) for each in call.out_avals]


def _derivative(primals: Any, tangents: Any, *, layer: Layer, call: Any) -> tuple[Any, Any]:
    at = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

    def of(*values: jax.Array) -> Any:
        inputs = list(primals)
        for i, value in zip(at, values, strict=True):
            inputs[i] = value
        return _differentiable(layer, *inputs)

    outputs, slopes = jax.jvp(of, [primals[i] for i in at], [tangents[i] for i in at])
    return outputs, [
        slope if jnp.issubdtype(output.dtype, jnp.floating) else ad.Zero(jax.core.ShapedArray(output.shape, jax.dtypes.float0))
        for output, slope in zip(outputs, slopes, strict=True)
    ]


def _batched(inputs: Any, axes: Any, *, layer: Layer, call: Any) -> tuple[Any, Any]:
    """A batch axis of what belongs to tokens makes more rows; of a weight or a bias, a call each."""
    (count,) = {value.shape[axis] for value, axis in zip(inputs, axes, strict=True) if axis is not None}
    named = list(zip(layer.inputs, inputs, axes, strict=True))
    if any(axis is not None for name, _, axis in named if name in _OF_CLASSES):
        moved = [value if axis is None else jnp.moveaxis(value, axis, 0) for _, value, axis in named]
        batched = [value for value, axis in zip(moved, axes, strict=True) if axis is not None]

        def one(parts: Any) -> Any:
            rest = iter(parts)
            return _bind(layer, *(value if axis is None else next(rest) for value, axis in zip(moved, axes, strict=True)))

        return jax.lax.map(one, batched), [0] * len(layer.forward_results)

    def of_rows(name: str, value: Any, axis: int | None) -> Any:
        if name in _OF_CLASSES:
            return value
        return jnp.broadcast_to(value, (count, *value.shape)) if axis is None else jnp.moveaxis(value, axis, 0)

    made = _bind(layer, *(of_rows(*each) for each in named))
    return made, [0] * len(made)


_rows_p.def_impl(_evaluate)
_rows_p.def_abstract_eval(_abstract)
ad.primitive_jvps[_rows_p] = _derivative
batching.primitive_batchers[_rows_p] = _batched
mlir.register_lowering(_rows_p, mlir.lower_fun(_evaluate, multiple_results=True))
