"""Methods of one object that stand before its class's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def put_back(holder: Any, name: str, own: Any) -> None:
    """Takes off what stands at `name` of an object. `own`: what stood there before; None: nothing, the class's own is seen again."""
    if own is None:
        holder.__dict__.pop(name, None)
    else:
        holder.__dict__[name] = own


@contextmanager
def standing_in(holder: Any, name: str, function: Any) -> Iterator[None]:
    """Has `function` stand at `name` of an object meanwhile."""
    own = holder.__dict__.get(name)
    holder.__dict__[name] = function
    try:
        yield
    finally:
        put_back(holder, name, own)
