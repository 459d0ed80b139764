"""Processes that die at a chosen change of a file system."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

_CHANGES = ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync")


def _dying(call: Any, left: list[int]) -> Any:
    def counting(*arguments: Any, **keywords: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            os._exit(9)
        return call(*arguments, **keywords)

    return counting


def killed_everywhere(action: Callable[[], Any]) -> Iterator[int]:
    """Runs `action` in forks, of which number n dies before its n-th change of a file system. Yields behind each death; ends with the
    first fork that lives."""
    number = 0
    while True:
        process = os.fork()
        if process == 0:
            left = [number]
            for name in _CHANGES:
                setattr(os, name, _dying(getattr(os, name), left))
            shutil.rmtree = _dying(shutil.rmtree, left)  # type: ignore[assignment]
            try:
                action()
            except BaseException:
                os._exit(1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        assert code in (0, 9)
        if code == 0:
            return
        yield number
        number += 1
