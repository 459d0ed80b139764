"""Pipeline stages of torch 2.15, as far as the engine needs names of theirs that are not public."""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining import PipelineStage

FITS = hasattr(PipelineStage, "release_fwd_send_outputs")
STATES = "_forward_chunk_states"  #: the attribute in which a stage keeps microbatches that have gone forward


class TorchStage(PipelineStage):  # type: ignore[misc]
    """Passes without backward keep nothing of a microbatch."""

    _forward_chunk_states: dict[int, Any]

    def forget_inputs(self, number: int) -> None:
        state = self._forward_chunk_states[number]
        state.input_values.clear()
        if self.is_last:
            state.live_outputs.clear()

    def forget(self, number: int) -> None:
        """Forgets a microbatch. Sends under way keep their tensors themselves."""
        self._forward_chunk_states.pop(number, None)

    # torch's own check, which wants one shape of all microbatches; StageModule checks each one's.
    def _validate_stage_tensors(self, desc: str, expected: Any, actual: Any) -> None:
        pass
