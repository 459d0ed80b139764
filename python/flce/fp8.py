"""How an FP8 head multiplies."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flce import errors
from flce.core import checks

LOGITS = ("int8", "e4m3")
DLOGITS = ("e5m2", "e4m3")
LEAST_SCALE, MOST_SCALE = 2.0**-100, 2.0**100


@dataclass(frozen=True)
class Fp8:
    """Products of numbers in 8 bits: `linear_cross_entropy(..., fp8=flce.Fp8())`. Tensors stay in their dtype, and kernels round them as
    they read them. docs/python.md has its errors and what it does not go with.

    Args:
        logits: format of hidden and weight as operands of the logits: "int8", or "e4m3" for rows with outliers.
        dlogits: format of the logits' gradients: "e5m2", which reaches far down, or "e4m3", with one more bit.
        scales: of hidden and weight as operands of the logits. "dynamic": a row's largest number becomes the format's. Or a pair (hidden,
            weight) of numbers, 2^-100 to 2^100, the same for all rows: a number is about its code times the scale, and one beyond the
            format's largest code, 127 or 448, becomes that. Other numbers compile nothing. (hidden, None): beside a weight of codes, which
            has scales of its own. The gradients' operands have powers of two, which cost no digits, either way.

    Raises ArgumentError for another word, or for scales that are neither.
    """

    logits: str = "int8"
    dlogits: str = "e5m2"
    scales: str | tuple[float, float | None] = "dynamic"

    def __post_init__(self) -> None:
        checks.choice("logits", self.logits, LOGITS)
        checks.choice("dlogits", self.dlogits, DLOGITS)
        if isinstance(self.scales, str) and self.scales == "dynamic":  # an array has no truth
            return
        pair = given_scales(self.scales)
        if pair != self.scales or type(self.scales) is not tuple:
            object.__setattr__(self, "scales", pair)


def given_scales(scales: Any) -> tuple[float, float | None]:
    """The pair that `scales` is."""
    if isinstance(scales, Sequence) and not isinstance(scales, str) and len(scales) == 2:
        hidden, weight = scales
        if is_scale(hidden) and (weight is None or is_scale(weight)):
            return float(hidden), None if weight is None else float(weight)
    raise errors.ArgumentError(
        f"scales is {scales!r}; allowed are 'dynamic' and a pair (hidden, weight) of numbers from 2^-100 to 2^100: what one code stands "
        "for; (hidden, None) beside a weight of codes"
    )


def is_scale(given: Any) -> bool:
    return isinstance(given, numbers.Real) and not isinstance(given, bool) and LEAST_SCALE <= float(given) <= MOST_SCALE


def spec_keys(fp8: Any) -> list[str]:
    """Keys of a Spec's text for an argument fp8, which may be anything."""
    if fp8 is None:
        return []
    if not isinstance(fp8, Fp8):
        raise errors.ArgumentError(f"fp8 is {fp8!r}; it must be a flce.Fp8, such as flce.Fp8(), or None")
    keys = [f"fp8={fp8.logits}", *([] if fp8.dlogits == "e5m2" else [f"fp8_dlogits={fp8.dlogits}"])]
    if isinstance(fp8.scales, tuple):
        names = ("fp8_hidden_scale", "fp8_weight_scale")
        # A float of it: torch.compile has a symbol where a call before had another number.
        keys += [f"{name}={float(scale)!r}" for name, scale in zip(names, fp8.scales, strict=True) if scale is not None]
    return keys


def refuse(options: Mapping[str, Any]) -> None:
    """Raises SpecError for options of a call or a loss that an FP8 head has no arithmetic for, by the names that a caller gives them."""
    if options.get("fp8") is None:
        return
    if options.get("batch_invariant"):
        raise errors.SpecError("batch_invariant is True with fp8, whose scales are those of a whole call: leave batch_invariant or fp8 out")
    if options.get("label_smoothing") and options.get("softcap"):
        raise errors.SpecError(
            f"label_smoothing is {options['label_smoothing']!r} with fp8 and a softcap, under which its gradient is no product of a number "
            "of the token and one of the class: leave label_smoothing, the softcap or fp8 out"
        )
