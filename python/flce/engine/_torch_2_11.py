"""Pipeline stages of torch 2.11 to 2.14, as far as the engine needs names of theirs that are not public."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

FITS = hasattr(PipelineStage, "_get_init_p2p_neighbors_ops")
STATES = "fwd_cache"  #: what a stage keeps of microbatches that have gone forward


class TorchStage(PipelineStage):  # type: ignore[misc]
    """Passes without backward keep nothing of a microbatch."""

    def forget_inputs(self, number: int) -> None:
        outputs, _ = self.fwd_cache[number]
        self.fwd_cache[number] = ((), []) if self.is_last else (outputs, [])

    def forget(self, number: int) -> None:
        """What is under way keeps itself."""
        self.fwd_cache.pop(number)

    # torch's own checks, which want one shape of all microbatches; StageModule checks each one's.
    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        pass

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        pass

    def _validate_stage_tensors(self, desc: str, expected: Any, actual: Any) -> None:
        pass

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Of torch 2.11, which sends to its own rank where two stages that follow each other are there; gloo refuses that."""
        ops: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()
        return [op for op in ops if op.group_peer != self.group_rank]
