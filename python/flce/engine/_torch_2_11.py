"""Pipeline stages of torch 2.11 to 2.14, as far as the engine needs names of theirs that are not public."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

FITS = hasattr(PipelineStage, "_get_init_p2p_neighbors_ops")
STATES = "fwd_cache"  #: the attribute in which a stage keeps microbatches that have gone forward


class TorchStage(PipelineStage):  # type: ignore[misc]
    """Passes without backward keep nothing of a microbatch."""

    def forget_inputs(self, number: int) -> None:
        outputs, _ = self.fwd_cache[number]
        self.fwd_cache[number] = ((), []) if self.is_last else (outputs, [])

    def forget(self, number: int) -> None:
        """Forgets a microbatch. Sends under way keep their tensors themselves."""
        self.fwd_cache.pop(number)

    # torch's own checks, which want one shape of all microbatches; StageModule checks each one's.
    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        pass

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        pass

    def _validate_stage_tensors(self, desc: str, expected: Any, actual: Any) -> None:
        pass

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Operations of torch 2.11 without those to its own rank, where two neighbouring stages are on it; gloo refuses them."""
        ops: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()
        return [op for op in ops if op.group_peer != self.group_rank]
