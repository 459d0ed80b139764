"""Locks of modules, which a forked process finds open."""

from __future__ import annotations

import os
import threading
from typing import Any


def new_lock() -> Any:
    """An RLock. In a child process nobody holds it: a thread of the parent that did is not forked, and would never let go of it."""
    made: Any = threading.RLock()
    os.register_at_fork(after_in_child=made._at_fork_reinit)
    return made
