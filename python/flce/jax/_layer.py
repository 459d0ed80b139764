"""A caller's arguments, checked, as a `Layer` and its inputs."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flce import errors
from flce.budget import MemoryBudget
from flce.call._spec_text import spec_text, workspace_limit
from flce.core import checks
from flce.jax import _calls, _sharded
from flce.jax._calls import Layer

LAYOUTS = ("vocab_major", "hidden_major")
_DEPTH_STEP = 8
_INT = 1 << 31
_OF_CLASSES = ("bias", "class_weight", "class_offset")
_OPTIONAL = (*_OF_CLASSES, "token_weight", "cu_seqlens")
_INTEGERS = ("labels", "teacher_ids", "ids", "positives", "negatives", "of_queries", "of_documents", "cu_seqlens")
_NUMBERS = (*_OF_CLASSES, "token_weight")
_OF_TOKENS = ("labels", "temperature", "token_weight")
_OF_TEACHERS = ("teacher_ids", "teacher_probs", "ids")


def checked(
    weight_layout: str, ignore_index: int, *, of: str = "", temperature: Any = None, num_valid_tokens: Any = None, **given: Any
) -> dict[str, jax.Array]:
    """The arrays that were given, checked; a temperature that is a number as one for each token, left out where it changes nothing. `of`:
    what stands behind the names of one of several hidden states and its tokens' arrays."""
    check_ignore_index(ignore_index)
    arrays: dict[str, jax.Array] = {}
    for name, value in given.items():
        if value is not None or name not in _OPTIONAL:
            arrays[name] = array(name, value, of)
    hidden = arrays["hidden"]
    _check_layer(hidden, arrays["weight"], weight_layout, of)
    _check_classes(arrays, weight_layout)
    arrays |= _temperature(temperature, hidden.shape[:-1], of) | _count(num_valid_tokens, of)
    _check_tokens(arrays, hidden.shape[:-1], of)
    if "teacher_probs" in arrays:
        arrays["teacher_probs"] = _probs(arrays["teacher_probs"], arrays["teacher_ids"])
    if "cu_seqlens" in arrays:
        _check_offsets(arrays["cu_seqlens"], of)
    return arrays


def check_ignore_index(given: Any) -> None:
    checks.integer("ignore_index", given, -_INT)
    if given >= _INT:
        raise errors.ArgumentError(f"ignore_index is {given}; it must fit int32")


def _temperature(given: Any, tokens: tuple[int, ...], of: str) -> dict[str, jax.Array]:
    if isinstance(given, (int, float)):
        if not checks.LEAST_TEMPERATURE <= given <= checks.MOST_TEMPERATURE:
            raise errors.ArgumentError(f"temperature{of} is {given}; it must be between 2^-100 and 2^100")
        return {} if given == 1 else {"temperature": jnp.full(tokens, float(given), jnp.float32)}
    if given is None:
        return {}
    made = _real("temperature", given, of).astype(jnp.float32)
    return {"temperature": jnp.broadcast_to(made, tokens) if made.ndim == 0 else made}


def _count(given: Any, of: str) -> dict[str, jax.Array]:
    if given is None:
        return {}
    if isinstance(given, (int, float)):
        if not 0 <= given < math.inf:
            raise errors.ArgumentError(f"num_valid_tokens{of} is {given}; it must be a finite number of 0 or more")
        return {"num_valid_tokens": jnp.asarray(float(given), jnp.float32)}
    made = _real("num_valid_tokens", given, of)
    if made.size != 1:
        raise errors.ShapeError(f"num_valid_tokens{of} has shape {list(made.shape)}; it must have one element")
    return {"num_valid_tokens": made}


def _check_tokens(arrays: dict[str, jax.Array], tokens: tuple[int, ...], of: str) -> None:
    for name, value in arrays.items():
        said = _said(name, of)
        if name in _INTEGERS and value.dtype not in (jnp.int32, jnp.int64):
            raise errors.DTypeError(f"{said} has dtype {value.dtype}; allowed are int32 and int64")
        if name in _NUMBERS:
            _real(name, value, of)
        if name in _OF_TOKENS and value.shape != tokens:
            raise errors.ShapeError(f"{said} has shape {list(value.shape)}; it must be hidden{of}'s without the last, {list(tokens)}")
        if name in _OF_TEACHERS and (value.ndim == 0 or value.shape[:-1] != tokens or not 1 <= value.shape[-1] <= 1024):
            raise errors.ShapeError(f"{said} has shape {list(value.shape)}; it must be {[*tokens, 'K']}, K from 1 to 1024")


def _probs(probs: jax.Array, ids: jax.Array) -> jax.Array:
    if probs.shape != ids.shape:
        raise errors.ShapeError(f"teacher_probs has shape {list(probs.shape)}; it must be teacher_ids', {list(ids.shape)}")
    if not jnp.issubdtype(probs.dtype, jnp.floating):
        raise errors.DTypeError(f"teacher_probs has dtype {probs.dtype}; it must be a floating dtype (computed with in float32)")
    return probs.astype(jnp.float32)


def _check_offsets(cu_seqlens: jax.Array, of: str) -> None:
    """Looks at its numbers where they are on the host."""
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] == 0:
        raise errors.ShapeError(f"cu_seqlens{of} has shape {list(cu_seqlens.shape)}; it must be [num_sequences + 1]")
    if isinstance(cu_seqlens, jax.core.Tracer) or not cu_seqlens.is_fully_addressable:
        return
    if any(each.platform != "cpu" for each in cu_seqlens.devices()):
        return
    offsets = np.asarray(cu_seqlens)
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if offsets[0] == 0 and not len(falls):
        return
    found = f"cu_seqlens{of}[0] is {offsets[0]}"
    if offsets[0] == 0:
        found = f"cu_seqlens{of}[{falls[0] + 1}] is {offsets[falls[0] + 1]} behind {offsets[falls[0]]}"
    raise errors.ArgumentError(
        f"{found}; it must hold offsets, which begin with 0 and do not decrease: of lengths, jnp.pad(lengths.cumsum(), (1, 0))"
    )


def _said(name: str, of: str) -> str:
    """An argument's name: of one hidden state's tokens, or of all."""
    return name if name in ("weight", *_OF_CLASSES) else name + of


def _real(name: str, given: Any, of: str = "") -> jax.Array:
    made = array(name, given, of)
    if jnp.issubdtype(made.dtype, jnp.complexfloating):
        raise errors.DTypeError(f"{_said(name, of)} has dtype {made.dtype}; it must be real")
    return made


def arrays_of(**given: Any) -> dict[str, jax.Array]:
    """The arrays that were given."""
    return {name: array(name, value) for name, value in given.items() if value is not None}


def array(name: str, value: Any, of: str = "") -> jax.Array:
    said = _said(name, of)
    if value is None:
        raise errors.DTypeError(f"{said} is None; it must be an array")
    if name in _INTEGERS and isinstance(value, np.ndarray) and value.dtype == np.int64 and not jax.config.jax_enable_x64:
        # jax would cut each to its lower half, which may be a class.
        beyond = (value < -_INT) | (value >= _INT)
        if beyond.any():
            raise errors.ArgumentError(f"{said} has numbers beyond int32, which jax has with jax_enable_x64 alone")
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise errors.DTypeError(f"{said} is a {type(value).__name__}; it must be an array ({error})") from None


def _check_layer(hidden: jax.Array, weight: jax.Array, weight_layout: str, of: str) -> None:
    """Raises ShapeError and DTypeError, naming the argument."""
    checks.choice("weight_layout", weight_layout, LAYOUTS)
    for name, value in ((f"hidden{of}", hidden), ("weight", weight)):
        if value.dtype.name not in _calls.DTYPES:
            codes = "; codes are read under torch alone: dequantise the weight" if value.dtype.name in ("float8_e4m3fn", "uint8") else ""
            raise errors.DTypeError(f"{name} has dtype {value.dtype}; allowed are {', '.join(_calls.DTYPES)}{codes}")
    if weight.dtype not in (hidden.dtype, jnp.float32):
        raise errors.DTypeError(f"weight has dtype {weight.dtype}; it must be {' or '.join(dict.fromkeys((str(hidden.dtype), 'float32')))}")
    if hidden.ndim < 1 or weight.ndim != 2:
        raise errors.ShapeError(
            f"hidden{of} has shape {list(hidden.shape)} and weight {list(weight.shape)}; they must be [..., D] and [V, D]"
        )
    depth = weight.shape[0 if weight_layout == "hidden_major" else 1]
    if depth != hidden.shape[-1]:
        other = weight.shape[1 if weight_layout == "hidden_major" else 0]
        hint = ""
        if other == hidden.shape[-1]:
            hint = f"; it looks like weight_layout={next(each for each in LAYOUTS if each != weight_layout)!r}"
        shape = "[D, V]" if weight_layout == "hidden_major" else "[V, D]"
        raise errors.ShapeError(f"weight has shape {list(weight.shape)}; with hidden{of} {list(hidden.shape)} it must be {shape}{hint}")


def _check_classes(arrays: dict[str, jax.Array], weight_layout: str) -> None:
    classes = arrays["weight"].shape[1 if weight_layout == "hidden_major" else 0]
    for name in _OF_CLASSES:
        if name in arrays and arrays[name].shape != (classes,):
            raise errors.ShapeError(f"{name} has shape {list(arrays[name].shape)}; it must be [{classes}]")


def layer_of(
    arrays: dict[str, jax.Array],
    *,
    weight_layout: str,
    ignore_index: int,
    workspace_limit_bytes: int | None,
    axis_name: str | None,
    outputs: tuple[str, ...],
    named: bool = False,
    **of_spec: Any,
) -> tuple[Layer, tuple[jax.Array, ...]]:
    """`arrays`: hidden, weight, target, and bias, class weights and offsets, a temperature and a teacher's where there are any."""
    hidden, weight = arrays["hidden"], arrays["weight"]
    ranks = 1 if axis_name is None else _sharded.ranks_of(axis_name)
    if axis_name is not None:
        for name in ("weight", *(each for each in _OF_CLASSES if each in arrays)):
            _sharded.check_is_part(name, arrays[name], axis_name)
    padding = -hidden.shape[-1] % _DEPTH_STEP
    if padding:
        of_depth = (padding, 0) if weight_layout == "hidden_major" else (0, padding)
        arrays["hidden"] = jnp.pad(hidden, [(0, 0)] * (hidden.ndim - 1) + [(0, padding)])
        arrays["weight"] = jnp.pad(weight, [(0, each) for each in of_depth])
    if "bias" in arrays:
        arrays["bias"] = arrays["bias"].astype(hidden.dtype)
    top_k = arrays["teacher_ids"].shape[-1] if "teacher_ids" in arrays else 0
    if isinstance(workspace_limit_bytes, MemoryBudget):
        raise errors.ArgumentError(
            "workspace_limit_bytes is a MemoryBudget, which calls share while they run. XLA lays out a program's memory before: give a "
            "number of bytes"
        )
    options = spec_text(outputs, teacher_top_k=top_k, **of_spec)
    read_back = ("logprobs",) if of_spec.get("dft") else ()
    if "class_offset" in arrays:
        arrays["class_offset"] = arrays["class_offset"].astype(jnp.float32)
    if "class_weight" in arrays:
        arrays["class_weight"] = arrays["class_weight"].astype(jnp.float32)
        if axis_name is not None:
            read_back += ("target_class_weight", *(("class_weight_total",) if of_spec["label_smoothing"] else ()))
    layer = Layer(
        options=options,
        outputs=outputs,
        inputs=tuple(arrays),
        hidden_major=weight_layout == "hidden_major",
        ignore_index=ignore_index,
        workspace_limit_bytes=workspace_limit(workspace_limit_bytes),
        top_k=top_k,
        named=named,
        ranks=ranks,
        axis_name=axis_name or "",
        read_back=read_back,
    )
    return layer, tuple(arrays.values())
