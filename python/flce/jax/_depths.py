"""Several hidden states on one weight: the rows of all depths in one call, so that the weight's gradient is written once, and each depth's
loss from the rows' losses.

Depth d has hidden[d] [..., D] and labels[d] [...], of any shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from flce import errors
from flce.call._spec_text import number
from flce.jax import _layer


def are_several(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _of_each(name: str, value: Any, count: int) -> list[Any]:
    """The items of a list, or one value `count` times."""
    if not are_several(value):
        return [value] * count
    if len(value) != count:
        for_all = "" if name == "loss_weights" else ", or one for all"
        raise errors.ArgumentError(f"{name} has {len(value)} items and hidden has {count}; give one for each hidden state{for_all}")
    return list(value)


def of_each(hidden: Sequence[Any], labels: Any, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each depth's hidden states, labels and options."""
    each: list[dict[str, Any]] = [{"hidden": states} for states in _states(hidden)]
    _check_stated(len(each), labels, options["shift"])
    for name, value in {"labels": labels, **options}.items():
        for of_depth, own in zip(each, _of_each(name, value, len(each)), strict=True):
            of_depth[name] = own
    for at, of_depth in enumerate(each):
        of_depth["token_weight"] = _for_each_token(f"token_weight[{at}]", of_depth["token_weight"], of_depth["hidden"])
    return each


def _states(hidden: Sequence[Any]) -> list[jax.Array]:
    if not hidden:
        raise errors.ArgumentError("hidden is an empty list; give at least one hidden state")
    if not hasattr(hidden[0], "dtype"):
        raise errors.DTypeError(f"hidden is a {type(hidden).__name__}; it must be an array, or a list of arrays")
    made = [_layer.array("hidden", states, f"[{at}]") for at, states in enumerate(hidden)]
    for at, states in enumerate(made):
        if states.ndim == 0 or states.shape[-1:] != made[0].shape[-1:]:
            raise errors.ShapeError(
                f"hidden[{at}] has shape {list(states.shape)} and hidden[0] {list(made[0].shape)}; they must be [..., D] of one D"
            )
        if states.dtype != made[0].dtype:
            raise errors.DTypeError(f"hidden[{at}] has dtype {states.dtype} and hidden[0] {made[0].dtype}; all have one")
    return made


def _check_stated(count: int, labels: Any, shift: Any) -> None:
    """Refuses labels of which it is not said which one a depth predicts."""
    if not are_several(labels) and not are_several(shift):
        raise errors.ArgumentError(
            f"hidden is a list of {count}, and labels and shift are one for all: give labels for each, aligned with it, or a list of "
            f"shifts: {[1 + depth for depth in range(count)]} where depth d predicts the label 1 + d positions on, {[0] * count} where all "
            "predict the same"
        )


def _for_each_token(name: str, given: Any, hidden: Any) -> Any:
    """A number as one for each token."""
    if given is None or hasattr(given, "shape"):
        return given
    return jnp.full(hidden.shape[:-1], number(name, given), jnp.float32)


def check_weights(loss_weights: Any, reduction: str, hidden: Any) -> list[float] | None:
    if loss_weights is None:
        return None
    if not are_several(hidden):
        raise errors.ArgumentError("loss_weights is given and hidden is one array; it has a number for each of several hidden states")
    if not are_several(loss_weights):
        raise errors.DTypeError(f"loss_weights is a {type(loss_weights).__name__}; it must be a list of numbers")
    if reduction == "none":
        raise errors.ArgumentError("loss_weights is given with reduction 'none', whose losses are not added up; take 'sum' or a mean")
    return [number(f"loss_weights[{at}]", value) for at, value in enumerate(_of_each("loss_weights", loss_weights, len(hidden)))]


def weighted_sum(weights: Sequence[float], losses: Sequence[jax.Array]) -> jax.Array:
    return jnp.asarray(sum(weight * loss for weight, loss in zip(weights, losses, strict=True)))


class Joined:
    """Arrays of tokens of all depths as one. Those of one shape get a dimension of their own, so that on a mesh they stay where they are;
    others are flattened. A lone depth's are as they were."""

    def __init__(self, each: Sequence[Mapping[str, jax.Array]]) -> None:
        self._each = each
        self._shapes = [of_depth["labels"].shape for of_depth in each]
        self._alike = len(set(self._shapes)) == 1

    def rows(self) -> dict[str, jax.Array]:
        """hidden, and a temperature where any depth has one."""
        made = {"hidden": self.joined(of_depth["hidden"] for of_depth in self._each)}
        if any("temperature" in of_depth for of_depth in self._each):
            ones = (jnp.ones(shape, jnp.float32) for shape in self._shapes)
            made["temperature"] = self.joined(of_depth.get("temperature", one) for of_depth, one in zip(self._each, ones, strict=True))
        return made

    def joined(self, arrays: Iterable[jax.Array]) -> jax.Array:
        given = list(arrays)
        if len(given) == 1:
            return given[0]
        if self._alike:
            return jnp.stack(given)
        return jnp.concatenate([each.reshape(-1, *each.shape[len(shape) :]) for each, shape in zip(given, self._shapes, strict=True)])

    def split(self, rows: Mapping[str, jax.Array]) -> list[dict[str, jax.Array]]:
        """Each depth's part of numbers of each row."""
        if len(self._shapes) == 1:
            return [dict(rows)]
        if self._alike:
            return [{name: value[at] for name, value in rows.items()} for at in range(len(self._shapes))]
        made: list[dict[str, jax.Array]] = []
        end = 0
        for shape in self._shapes:
            start, end = end, end + math.prod(shape)
            made.append({name: value[start:end].reshape(shape) for name, value in rows.items()})
        return made
