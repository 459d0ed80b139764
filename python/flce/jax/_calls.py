"""One call of a kernel as XLA's custom call: names, shapes and sizes of its buffers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flce.core import _native
from flce.jax import _library

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
OUTPUTS = ("loss", "lse", "logprobs", "entropy", "top1")
GRADIENTS = {name: f"grad_{name}" for name in ("hidden", "weight", "bias", "class_offset")}
_DIFFERENTIABLE = ("loss", "lse", "logprobs", "entropy")
_FLAGS = ("bias", "temperature", "class_weight", "class_offset")
_ALIGNMENT = 256
_RETAINED_STEP = 16


class Layer(NamedTuple):
    """A call's arguments that are no arrays, and the arrays' names."""

    options: str  # the part of a Spec's text beside sizes and dtypes
    outputs: tuple[str, ...]  # the Spec's outputs, [...] each
    inputs: tuple[str, ...]  # hidden, weight, target, and others as flce.h names them
    hidden_major: bool
    ignore_index: int
    workspace_limit_bytes: int  # 0: the default
    top_k: int = 0  # classes of a teacher
    named: bool = False  # the log-probabilities at the teacher's classes are what has a gradient
    ranks: int = 1  # devices of axis_name, each with a part of the vocabulary
    axis_name: str = ""
    read_back: tuple[str, ...] = ()  # results of forward that backward reads beside lse, entropy and a teacher's log-probabilities

    @property
    def forward_results(self) -> tuple[str, ...]:
        """Names of what forward writes a token, in order: outputs, and what backward reads beside."""
        teacher = ("teacher_logprobs",) if self.top_k else ()
        return (*self.outputs, *(() if "lse" in self.outputs else ("lse",)), *teacher)

    @property
    def saved(self) -> tuple[str, ...]:
        """Names of what backward reads of forward's."""
        return (*(name for name in ("lse", "entropy", "teacher_logprobs") if name in self.forward_results), *self.read_back)

    def of_offsets(self) -> Layer:
        """The layer whose grad_bias is the gradient of class_offset, in fp32."""
        options = (*((self.options,) if self.options else ()), "offset_gradient", "grad_weight_dtype=fp32")
        return self._replace(options=",".join(options), inputs=tuple(dict.fromkeys((*self.inputs, "bias"))))

    def spec(self, hidden: Any, weight: Any) -> str:
        hidden_size = hidden.shape[-1]
        vocab_size = weight.shape[1 if self.hidden_major else 0]
        parts = [f"D={hidden_size}", f"V={vocab_size}", f"dtype={DTYPES[hidden.dtype.name]}"]
        if self.axis_name:
            parts.append(f"whole_vocab_size={vocab_size * self.ranks}")
        if self.hidden_major:
            parts.append("layout=hidden_major")
        if weight.dtype != hidden.dtype:
            parts.append(f"weight_dtype={DTYPES[weight.dtype.name]}")
        parts += [name for name in _FLAGS if name in self.inputs]
        if "class_group" in self.inputs:
            parts.append("class_groups")
        if self.options:
            parts.append(self.options)
        return ",".join(parts)


class Sized(NamedTuple):
    """A layer's kernel for a number of tokens."""

    spec: str
    workspace_limit_bytes: int
    planned_tokens: int
    num_tokens: int

    @property
    def kernel(self) -> Any:
        return _library.kernel(_library.device(), self.spec, self.workspace_limit_bytes, self.planned_tokens)


def sized(layer: Layer, hidden: Any, weight: Any) -> Sized:
    num_tokens = math.prod(hidden.shape[:-1])
    limit = layer.workspace_limit_bytes
    _library.library()
    return Sized(layer.spec(hidden, weight), limit, num_tokens if limit else _native.token_bucket(num_tokens), num_tokens)


def retained_row_bytes(layer: Layer, hidden: Any, weight: Any) -> int:
    """Bytes a token that forward leaves to backward: as many as the limit has room for, or, without one, as many as the weight's gradient
    has. XLA owns that gradient's memory, so that it cannot lend it."""
    size = sized(layer, hidden, weight)
    if size.num_tokens == 0:
        return 0
    kernel = size.kernel
    # Rows have whole steps of bytes: their last bytes are kept free of the limit, so that all columns are retained where there is room.
    rounded = _RETAINED_STEP * size.num_tokens
    if layer.workspace_limit_bytes:
        room = layer.workspace_limit_bytes
    else:
        # The choice with a limit knows a layer that is too small to gain.
        of_gradient = math.prod(weight.shape) * weight.dtype.itemsize
        room = of_gradient + _native.workspace_bytes(kernel, size.num_tokens, _native.BACKWARD)
    _, most = _native.choose_retained(kernel, size.num_tokens, max(room - rounded, 1), False, 0)
    return -(-most // rounded) * _RETAINED_STEP


def call(
    layer: Layer, name: str, which: int, arguments: Mapping[str, jax.Array], results: Mapping[str, Any], size: Sized
) -> dict[str, Any]:
    """One pass, `flce_{name}`. `results`: shapes and dtypes. Its workspace is a result of XLA's, since scratch that a captured call was
    lent may be another's when it is replayed."""
    needed = _native.workspace_bytes(size.kernel, size.num_tokens, which)
    axes = varying(*arguments.values())
    shapes = {**results, "workspace": jax.ShapeDtypeStruct((needed + _ALIGNMENT if needed else 0,), jnp.uint8)}
    made = jax.ffi.ffi_call(f"flce_{name}", tuple(shapes.values()), vmap_method="sequential")(
        *(made_varying(each, axes) for each in arguments.values()),
        spec=size.spec,
        workspace_limit_bytes=np.int64(size.workspace_limit_bytes),
        num_tokens=np.int64(size.planned_tokens),
        ignore_index=np.int64(layer.ignore_index),
        arguments=",".join(arguments),
        results=",".join(shapes),
    )
    return {key: made_varying(each, axes) for key, each in zip(results, made, strict=False)}


def forward(layer: Layer, row_bytes: int, *inputs: jax.Array) -> tuple[jax.Array, ...]:
    """`layer.forward_results` and, with row_bytes, what is retained for backward."""
    arguments = dict(zip(layer.inputs, inputs, strict=True))
    hidden, weight = inputs[:2]
    results = {name: token_shape(layer, name, hidden.shape[:-1]) for name in layer.forward_results}
    if row_bytes:
        results["retained"] = jax.ShapeDtypeStruct((*hidden.shape[:-1], row_bytes), jnp.uint8)
    made = call(layer, "forward", _native.FORWARD, arguments, results, sized(layer, hidden, weight))
    return tuple(as_output(name, made[name]) for name in results)


def backward(layer: Layer, names: tuple[str, ...], wanted: tuple[str, ...], *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Gradients of the inputs `wanted`. `names`: those of `arrays`, the inputs, what forward saved, and gradients of its results."""
    arguments = dict(zip(names, arrays, strict=True))
    hidden, weight = arguments["hidden"], arguments["weight"]
    shapes = {
        "hidden": jax.ShapeDtypeStruct(hidden.shape, hidden.dtype),
        "weight": jax.ShapeDtypeStruct(weight.shape, weight.dtype),
    }
    if "bias" in wanted:
        shapes["bias"] = jax.ShapeDtypeStruct(arguments["bias"].shape, weight.dtype)
    results = {GRADIENTS[name]: shapes[name] for name in wanted if name != "class_offset"}
    made = call(layer, "backward", _native.BACKWARD, arguments, results, sized(layer, hidden, weight)) if results else {}
    if "class_offset" in wanted:
        made["grad_class_offset"] = _offset_gradient(layer.of_offsets(), arguments)
    return tuple(made[GRADIENTS[name]] for name in wanted)


def _offset_gradient(layer: Layer, arguments: dict[str, jax.Array]) -> jax.Array:
    """class_offset's gradient, by a backward of its own that computes the logits once more."""
    hidden, weight, offset = (arguments[name] for name in ("hidden", "weight", "class_offset"))
    given = {"bias": jnp.zeros(offset.shape, hidden.dtype), **{name: each for name, each in arguments.items() if name != "retained"}}
    results = {"grad_bias": jax.ShapeDtypeStruct(offset.shape, jnp.float32)}
    made = call(layer, "backward", _native.BACKWARD, given, results, sized(layer, hidden, weight))["grad_bias"]
    return jnp.where(offset == -jnp.inf, 0.0, made)


def gradient_names(results: Sequence[str]) -> dict[str, str]:
    """Fields of backward's struct by forward's results that have a gradient; `loss` among them."""
    return {name: f"grad_{name}" for name in results if name in _DIFFERENTIABLE}


def token_shape(layer: Layer, name: str, tokens: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    if name == "top1":
        return jax.ShapeDtypeStruct((*tokens, 2), jnp.uint32)  # int64, which jax has with x64 alone
    if name == "teacher_logprobs":
        return jax.ShapeDtypeStruct((*tokens, layer.top_k), jnp.float32)
    if name == "class_weight_total":
        return jax.ShapeDtypeStruct((), jnp.float32)
    return jax.ShapeDtypeStruct(tokens, jnp.float32)


def as_output(name: str, made: jax.Array) -> jax.Array:
    """The lower half of an int64 that a class or -1 is in."""
    return jax.lax.bitcast_convert_type(made[..., 0], jnp.int32) if name == "top1" else made


# ── Manual axes (shard_map) ─────────────────────────


def varying(*arrays: Any) -> frozenset[str]:
    """Manual axes over which one of the arrays varies, where shard_map checks that."""
    return frozenset().union(*(_varying(jax.typeof(each)) for each in arrays))


def _varying(kind: Any) -> frozenset[str]:
    of_jax_10 = getattr(kind, "manual_axis_type", None)
    made: frozenset[str] = getattr(kind, "vma", frozenset()) if of_jax_10 is None else of_jax_10.varying
    return made


def made_varying(array: jax.Array, axes: frozenset[str]) -> jax.Array:
    missing = tuple(sorted(axes - varying(array)))
    if not missing:
        return array
    return jax.lax.pcast(array, missing, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(array, missing)


def is_manual() -> bool:
    """Whether the caller is inside of shard_map, where arrays are a device's own."""
    return bool(getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ()))
