"""What `PipelineEngine.forward` returns of a batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flce.engine import _setup
from flce.engine._microbatches import Microbatch
from flce.engine._output import HeadOutput

OUTPUTS = ("logits", "logprobs", "hidden", "entropy", "values")


def check(output: Any) -> None:
    _setup.choice("output", output, OUTPUTS)


def compute(output: HeadOutput, microbatch: Microbatch, what: str, temperature: float) -> Tensor:
    if what == "logprobs":
        return output.logprobs(microbatch.kwargs.get("labels", microbatch.input_ids), temperature)
    if what == "entropy":
        return output.entropy(temperature)
    if what == "hidden":
        return output.hidden
    return output.values() if what == "values" else output.logits()
