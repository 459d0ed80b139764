"""Checks of arguments that several calls have."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from flce import errors


def choice(name: str, value: Any, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise errors.ArgumentError(f"{name} is {value!r}; allowed are {', '.join(map(repr, allowed))}")
    return str(value)


def integer(name: str, value: Any, least: int, otherwise: str = "") -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise errors.ArgumentError(f"{name} is {value!r}; it must be an integer of {least} or more{otherwise}")
    return value


def number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise errors.DTypeError(f"{name} is {value!r}; it must be a number")


def temperature(value: Any, instead: str = "") -> None:
    """Checks the number that logits are divided by, as flce's functions do."""
    number("temperature", value)
    if not 2.0**-100 <= value <= 2.0**100:
        raise errors.ArgumentError(f"temperature is {value}; it must be between 2^-100 and 2^100{instead}")


def why_not_called(function: Any, *arguments: Any, **keywords: Any) -> str | None:
    """Why `function` cannot be called with these, by its signature; None where it can, or has none."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # not a Python function
        return None
    try:
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        return str(error)
    return None
