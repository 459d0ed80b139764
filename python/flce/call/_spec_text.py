"""Options as the library takes them, without torch: keys of a Spec's text, reductions, limits."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any

from flce import errors
from flce.budget import MemoryBudget
from flce.core import checks
from flce.fp8 import Fp8, spec_keys

REDUCTIONS = {"none": 0, "sum": 1, "mean": 2, "weighted_mean": 3}
LONG = 1 << 63


def spec_text(
    outputs: Iterable[str],
    *,
    logit_scale: float | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    dft: bool = False,
    batch_invariant: bool = False,
    teacher_top_k: int = 0,
    hard_weight: float = 0.0,
    support: bool = False,
    fp8: Fp8 | None = None,
) -> str:
    """The options as keys of a Spec's text; what is at its default is left out."""
    parts = []
    values = {
        "logit_scale": (logit_scale, 1.0),
        "softcap": (softcap, 0.0),
        "label_smoothing": (label_smoothing, 0.0),
        "z_loss": (z_loss, 0.0),
        "hard_weight": (hard_weight, 0.0),
    }
    for name, (value, default) in values.items():
        if value is not None and (parsed := number(name, value)) != default:
            parts.append(f"{name}={parsed!r}")
    for name, flag in (("batch_invariant", batch_invariant), ("dft", dft), ("support", support)):
        checks.flag(name, flag)
        if flag:
            parts.append(name)
    parts += spec_keys(fp8)
    if teacher_top_k:
        parts.append(f"teacher_top_k={teacher_top_k}")
    if tuple(outputs) != ("loss",):
        parts.append("outputs=" + "+".join(outputs))
    return ",".join(parts)


def number(name: str, value: Any) -> float:
    if not isinstance(value, numbers.Real):
        raise errors.DTypeError(
            f"{name} is a {type(value).__name__}; it must be a number (a constant: no tensor, and no argument of a traced function)"
        )
    return float(value)


def is_support(normalize: Any) -> bool:
    """Whether `normalize` of linear_logprobs_at asks for the softmax over a token's own ids."""
    if normalize not in ("vocabulary", "support"):
        raise errors.ArgumentError(f"normalize is {normalize!r}; allowed are 'vocabulary' and 'support'")
    return bool(normalize == "support")


def reduction_code(given: Any) -> int:
    code = REDUCTIONS.get(given) if isinstance(given, str) else None
    if code is None:
        raise errors.ArgumentError(f"reduction is {given!r}; allowed are {', '.join(map(repr, REDUCTIONS))}")
    return code


def workspace_limit(given: int | MemoryBudget | None) -> int:
    if given is None:
        return 0
    if isinstance(given, MemoryBudget):
        return given.memory_limit_bytes
    if not isinstance(given, int) or isinstance(given, bool) or not 0 < given < LONG:
        raise errors.ArgumentError(
            f"workspace_limit_bytes is {given!r}; it must be a positive number of bytes, below 2^63, a flce.MemoryBudget, or None"
        )
    return given
