"""Warnings that a process gives once."""

from __future__ import annotations

import logging

_log = logging.getLogger("flce")
said: set[str] = set()


def say_once(message: str, about: str | None = None) -> None:
    """Logs a warning where the same has not been logged before; with `about`, where none has been about that."""
    known = message if about is None else about
    if known not in said:
        said.add(known)
        _log.warning(message)
