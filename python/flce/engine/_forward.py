"""Results of `PipelineEngine.forward` for a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flce import errors
from flce.core import checks
from flce.engine._microbatches import Microbatch
from flce.engine._output import HeadOutput, rows_of
from flce.engine._stage import Stage

OUTPUTS = ("logits", "logprobs", "hidden", "entropy", "values")


def check(stages: Sequence[Stage], output: Any, labels: Any, temperature: Any) -> None:
    """ArgumentError, ShapeError, DTypeError, before anything is computed: for what the output does not depend on as well."""
    checks.choice("output", output, OUTPUTS)
    rows = rows_of(stages)
    if rows is not None and (rows == 1 if output in ("logprobs", "entropy") else rows > 1 and output == "values"):
        raise errors.ArgumentError(f"output is {output!r}, and the last stage's head has {rows} rows; values are of one row, a critic's")
    if labels is not None and output != "logprobs":
        raise errors.ArgumentError(f'labels are for output="logprobs"; output is {output!r}')
    if labels is not None and (not isinstance(labels, Tensor) or labels.dtype not in (torch.int64, torch.int32)):
        got = f"a {labels.dtype} tensor" if isinstance(labels, Tensor) else f"a {type(labels).__name__}"
        raise errors.DTypeError(f"labels is {got}; it must be an int64 or int32 tensor")
    if labels is not None and labels.dim() != 1:
        raise errors.ShapeError(f"labels has shape {list(labels.shape)}; it must have one dimension, as packed_input_ids")
    checks.number("temperature", temperature)
    checks.temperature(temperature)
    if temperature != 1.0 and output not in ("logprobs", "entropy"):
        raise errors.ArgumentError(f'temperature is {temperature}; it is for output="logprobs" and "entropy", and output is {output!r}')


def compute(output: HeadOutput, microbatch: Microbatch, what: str, temperature: float) -> Tensor:
    if what == "logprobs":
        return output.logprobs(microbatch.kwargs.get("labels", microbatch.input_ids), temperature, shift=1)
    if what == "entropy":
        return output.entropy(temperature)
    if what == "hidden":
        return output.hidden
    return output.values() if what == "values" else output.logits()
