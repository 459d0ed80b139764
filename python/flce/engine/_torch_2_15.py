"""Names of torch 2.15's pipeline stages that are not public, as far as the engine needs them."""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining import PipelineStage

FITS = hasattr(PipelineStage, "release_fwd_send_outputs")
STATES = "_forward_chunk_states"  #: the attribute in which a stage keeps microbatches that have gone forward


class TorchStage(PipelineStage):  # type: ignore[misc]
    """A stage without torch's own check, which wants one shape of all microbatches; StageModule checks each one's."""

    def _validate_stage_tensors(self, desc: str, expected: Any, actual: Any) -> None:
        pass
