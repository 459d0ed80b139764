"""The states of the generators that a training draws from, as plain data."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def get(device: torch.device) -> dict[str, Any]:
    """States of the random generators of Python, of torch on the CPU and on `device`, and of NumPy where something has imported it."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": None, "numpy": None}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, gauss = numpy.random.get_state()
        state["numpy"] = (str(kind), [int(key) for key in keys], int(position), int(has_gauss), float(gauss))
    return state


def set_all(state: dict[str, Any], device: torch.device) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    if state["numpy"] is not None:
        import numpy

        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
