"""How an FP8 head multiplies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flce import errors
from flce.core import checks

LOGITS = ("int8", "e4m3")
DLOGITS = ("e5m2", "e4m3")
SCALES = ("dynamic",)


@dataclass(frozen=True)
class Fp8:
    """Products of numbers in 8 bits: `linear_cross_entropy(..., fp8=flce.Fp8())`. Tensors stay in their dtype, and kernels round them as
    they read them. docs/python.md has its errors and what it does not go with.

    Args:
        logits: format of hidden and weight as operands of the logits, with a scale a row: "int8", or "e4m3" for rows with outliers.
        dlogits: format of the logits' gradients: "e5m2", which reaches far down, or "e4m3", with one more bit.
        scales: "dynamic": scales are those of the numbers that a call has.

    Raises ArgumentError for another word.
    """

    logits: str = "int8"
    dlogits: str = "e5m2"
    scales: str = "dynamic"

    def __post_init__(self) -> None:
        checks.choice("logits", self.logits, LOGITS)
        checks.choice("dlogits", self.dlogits, DLOGITS)
        checks.choice("scales", self.scales, SCALES)


def spec_keys(fp8: Any) -> list[str]:
    """Keys of a Spec's text for an argument fp8, which may be anything."""
    if fp8 is None:
        return []
    if not isinstance(fp8, Fp8):
        raise errors.ArgumentError(f"fp8 is {fp8!r}; it must be a flce.Fp8, such as flce.Fp8(), or None")
    return [f"fp8={fp8.logits}", *([] if fp8.dlogits == "e5m2" else [f"fp8_dlogits={fp8.dlogits}"])]
