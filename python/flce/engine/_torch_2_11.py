"""Names of torch 2.11 to 2.14's pipeline stages that are not public, as far as the engine needs them."""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining import PipelineStage

FITS = hasattr(PipelineStage, "_get_init_p2p_neighbors_ops")
STATES = "fwd_cache"  #: the attribute in which a stage keeps microbatches that have gone forward


class TorchStage(PipelineStage):  # type: ignore[misc]
    """A stage without torch's own checks, which want one shape of all microbatches; StageModule checks each one's."""

    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        pass

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        pass

    def _validate_stage_tensors(self, desc: str, expected: Any, actual: Any) -> None:
        pass
