"""Checks of arguments that are no tensors, which functions, adapters and the engine have alike."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

from flce import errors

LEAST_TEMPERATURE, MOST_TEMPERATURE = 2.0**-100, 2.0**100


def flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise errors.DTypeError(f"{name} is {value!r}; it must be True or False")


def choice(name: str, value: Any, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise errors.ArgumentError(f"{name} is {value!r}; allowed are {', '.join(map(repr, allowed))}")
    return str(value)


def integer(name: str, value: Any, least: int, otherwise: str = "") -> int:
    if not isinstance(value, int) and isinstance(value, numbers.Integral):  # numpy's
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise errors.ArgumentError(f"{name} is {value!r}; it must be an integer of {least} or more{otherwise}")
    return value


def number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise errors.DTypeError(f"{name} is {value!r}; it must be a number")


def temperature(value: float, instead: str = "") -> None:
    """Checks the range of a number that logits are divided by."""
    if not LEAST_TEMPERATURE <= value <= MOST_TEMPERATURE:
        raise errors.ArgumentError(f"temperature is {value}; it must be between 2^-100 and 2^100{instead}")
