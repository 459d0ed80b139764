"""A contender's row, and the step that it is measured by."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from flce.bench._contenders import Contender, Loss
from flce.bench._problem import Inputs

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "alloc_cpu")


@dataclasses.dataclass
class Row:
    """Results of one contender at one problem."""

    contender: Contender
    status: str = "ok"  # or "skipped", "failed", "wrong"
    reason: str = ""
    loss: Loss | None = None
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    memory_bytes: int | None = None
    memory_reason: str = ""
    milliseconds: list[float] = dataclasses.field(default_factory=list)

    def end(self, status: str, reason: str) -> None:
        self.status, self.reason, self.loss = status, reason, None
        self.milliseconds.clear()


def run_step(loss: Loss, inputs: Inputs) -> Tensor:
    """One forward, or forward and backward with gradients of its own. The loss."""
    if not inputs.problem.trains:
        with torch.no_grad():
            return loss(inputs)
    inputs.clear()
    value = loss(inputs)
    value.backward(torch.full_like(value, inputs.problem.upstream))
    return value.detach()


def reason_of(error: BaseException) -> str:
    """A line for the table."""
    text = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(sign in str(error).lower() for sign in _OUT_OF_MEMORY):
        return "out of memory"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
