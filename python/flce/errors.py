"""Exceptions of flce. Every message names the argument, its value and what is allowed.

`FlceError` is the base of them all. The library's own status codes map to one class each; what Python refuses by itself uses the same
classes.
"""

from __future__ import annotations

import copyreg
from typing import Any

__all__ = [
    "ArgumentError",
    "CacheMissError",
    "CheckpointError",
    "CompileError",
    "DTypeError",
    "DeviceError",
    "FlceError",
    "InternalError",
    "LabelError",
    "PipelineError",
    "PlacementError",
    "PlanError",
    "PlanMismatchError",
    "ShapeError",
    "SpecError",
    "UnavailableError",
    "UnsupportedTransformError",
]


class FlceError(RuntimeError):
    """Base of every exception that flce raises on purpose. All of them can be pickled, as process pools do."""

    def __reduce__(self) -> tuple[Any, ...]:
        """A class's own attributes come with the state, not through its constructor."""
        made: Any = super().__reduce__()
        return copyreg.__newobj__, (type(self), *self.args), *made[2:]  # type: ignore[attr-defined]


class SpecError(FlceError, ValueError):
    """The output layer is outside what can be computed (hidden size, vocabulary, an option's range)."""


class PlanError(FlceError, ValueError):
    """A plan or a workspace limit is malformed or not legal for this layer and device."""


class PlanMismatchError(FlceError):
    """`check_same_plans` found ranks that would compute with different plans. `ranks` maps each digest to the ranks that have it."""

    def __init__(self, message: str, ranks: dict[str, list[int]]) -> None:
        super().__init__(message)
        self.ranks = ranks


class PipelineError(FlceError):
    """A stage of a `flce.engine.PipelineEngine` failed, is gone, or was called with another batch than the others; or a loss is not finite.
    `stage` is that stage's number, None where it is not one stage."""

    def __init__(self, message: str, stage: int | None = None) -> None:
        super().__init__(message)
        self.stage = stage


class ArgumentError(FlceError, ValueError):
    """An argument of a call is wrong. Nothing was computed."""


class ShapeError(ArgumentError):
    """A tensor's shape does not fit the others'."""


class DTypeError(ArgumentError, TypeError):
    """A tensor's dtype, or an argument's Python type, is not supported there."""


class PlacementError(ArgumentError):
    """A tensor is on another device than hidden, or is sharded where a whole tensor is needed."""


class LabelError(ArgumentError, IndexError):
    """`check_labels` found a label outside the vocabulary. `row` is the first such row of the flattened target."""

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row


class CompileError(FlceError):
    """A compiler refused generated source. `log` is its whole output."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class DeviceError(FlceError):
    """A CUDA driver call failed."""


class UnavailableError(FlceError, ImportError):
    """Something that the call needs is not on this machine: libflce, a device, NVRTC, memory."""


class CacheMissError(FlceError, LookupError):
    """Strict mode: no cache has the kernel, and nothing is compiled. The message names the `flce prewarm` that compiles it."""


class CheckpointError(FlceError):
    """Files of a checkpoint are missing, malformed, incomplete or of another kind than was asked for, or could not be written. The message
    names the file or folder."""


class InternalError(FlceError):
    """A bug in flce."""


class UnsupportedTransformError(FlceError, NotImplementedError):
    """A transform of torch.func, a second derivative or a forward-mode derivative, which flce does not have."""
