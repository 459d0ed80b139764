"""Device memory that a kernel keeps for as long as it lives."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor


def make_once(device: torch.device, make: Callable[[], Tensor]) -> Tensor:
    """make()'s tensor on `device`, an ordinary one, in memory that belongs to nobody's pool and is ready for every stream.

    Calls come from anywhere: a CUDA graph's pool (`torch.compile(mode="reduce-overhead")` runs a model in one before it captures it, and
    accounts for every byte that is left there), a `torch.cuda.use_mem_pool`, inference mode, a device context. All of these are a thread's
    own, and torch says of none how to leave it; a new thread is in none of them.
    """
    if device.type != "cuda":
        with torch.inference_mode(False):
            return make()
    made: list[Tensor] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            tensor = make()
            torch.cuda.current_stream(device).synchronize()
            made.append(tensor)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="flce: memory", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]
