"""torch's pipeline stage with receive buffers of a microbatch's size. Names of torch's that are not public, and that the engine relies on,
stand here; a test pins them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from flce import errors
from flce.engine._microbatches import Microbatch
from flce.engine._packed import PackedBatch
from flce.engine._stage import Stage

# The attribute in which torch's stages keep microbatches that have gone forward, by what else they have: of 2.15, of 2.11 to 2.14.
_STATES = "_forward_chunk_states" if hasattr(PipelineStage, "release_fwd_send_outputs") else "fwd_cache"


def on_device(group: dist.ProcessGroup | None) -> bool:
    """Whether a group sends what lies on a GPU itself; gloo's goes through the host's memory."""
    return "nccl" in dist.get_backend_config(group)


def through_host(device: torch.device, group: dist.ProcessGroup | None) -> bool:
    """Whether what is sent has to go through the host's memory."""
    return device.type == "cuda" and not on_device(group)


def computed(stage: Stage, x: Tensor, batch: PackedBatch, of: str) -> Tensor:
    """A stage's hidden states [T, hidden_size], whose shape and dtype are looked at. of: which microbatch."""
    hidden = stage(x, batch)
    expected = [batch.num_tokens, stage.hidden_size]
    if not isinstance(hidden, Tensor) or list(hidden.shape) != expected or hidden.dtype != stage.dtype:
        got = f"{hidden.dtype} {list(hidden.shape)}" if isinstance(hidden, Tensor) else f"a {type(hidden).__name__}"
        raise errors.ShapeError(f"stage {stage.stage} returned {got} for {of}; its forward must return {stage.dtype} {expected}")
    return hidden


class StageModule(nn.Module):
    """The module that torch's stage calls: `stage`, on the microbatch whose turn it is.

    microbatches: of the batch at hand, which the engine sets on every rank before a step. finish: what becomes of the last stage's hidden
    states where no schedule asks for a loss.
    """

    def __init__(self, stage: Stage, noting: Callable[[StageModule], AbstractContextManager[None]]) -> None:
        """noting: what notes an error of this rank's own computing, not of its waiting for others."""
        super().__init__()
        self.stage = stage
        self.noting = functools.partial(noting, self)
        self.microbatches: list[Microbatch] = []
        self.number = 0
        self.finish: Callable[[Tensor, int], Any] | None = None

    def forward(self, x: Tensor) -> Tensor:
        microbatch = self.microbatches[self.number]
        given = microbatch.input_ids if self.stage.is_first else x
        hidden = computed(self.stage, given, microbatch.batch, str(microbatch))
        if self.finish is not None and self.stage.is_last:
            self.finish(hidden, self.number)
        if torch.is_grad_enabled() and not hidden.requires_grad:
            hidden = hidden.detach().requires_grad_()  # output of frozen layers alone: backward ends here
        # Schedules that split backward detach outputs in place, which a view refuses.
        return hidden.clone(memory_format=torch.contiguous_format) if torch.is_grad_enabled() else hidden.contiguous()


class EngineStage(PipelineStage):  # type: ignore[misc]
    """One stage of one schedule: torch keeps a schedule's number of microbatches in its stages."""

    submod: StageModule

    def __init__(self, module: StageModule, device: torch.device, group: dist.ProcessGroup | None) -> None:
        stage = module.stage
        hidden = torch.empty(1, stage.hidden_size, dtype=stage.dtype, device="meta", requires_grad=stage.dtype.is_floating_point)
        number = torch.empty(1, dtype=torch.int64, device="meta")
        super().__init__(
            module,
            stage.stage,
            stage.num_stages,
            torch.device("cpu") if through_host(device, group) else device,  # torch exchanges its own first words there
            input_args=(number if stage.is_first else hidden,),
            output_args=(hidden,),
            group=group,
        )
        missing = [name for name in (_STATES, "args_recv_info", "grad_recv_info", "bwd_cache") if not hasattr(self, name)]
        if missing:
            raise errors.UnavailableError(
                f"torch {torch.__version__} has a torch.distributed.pipelining that PipelineEngine does not know (2.11 to 2.15 are "
                f"tested): its stages have no {', '.join(missing)}"
            )
        self._through_host = through_host(device, group)
        self._computes_on = device

    # torch's own checks (the first two are 2.11's to 2.14's) want one shape of all microbatches; StageModule checks each one's.

    def _validate_fwd_input(self, *_: Any, **__: Any) -> None:
        pass

    _validate_fwd_outputs = _validate_stage_tensors = _validate_fwd_input

    def _new(self, number: int) -> Tensor:
        tokens = self.submod.microbatches[number].batch.num_tokens
        stage = self.submod.stage
        return torch.empty(tokens, stage.hidden_size, dtype=stage.dtype, device=self.device)

    def _into_new(self, ops: list[dist.P2POp], infos: tuple[Any, ...], number: int, grad: bool) -> list[dist.P2POp]:
        """Receives into buffers of a microbatch's size."""
        for op, info in zip(ops, infos, strict=True) if ops else ():
            op.tensor = info.buffer = self._new(number).requires_grad_(grad)
        return ops

    def _as_sent(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        for op in ops if self._through_host else ():
            op.tensor = op.tensor.detach().cpu()
        return ops

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        infos = self.args_recv_info[fwd_chunk_id]
        return self._into_new(super().get_fwd_recv_ops(fwd_chunk_id), infos, fwd_chunk_id, self.has_backward)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        infos = self.grad_recv_info.get(bwd_chunk_id, ())
        return self._into_new(super().get_bwd_recv_ops(bwd_chunk_id), infos, bwd_chunk_id, False)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        ops = self._as_sent(super().get_fwd_send_ops(fwd_chunk_id))
        if not self.has_backward:  # sends under way keep their tensors themselves
            getattr(self, _STATES).pop(fwd_chunk_id, None)
        return ops

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._as_sent(super().get_bwd_send_ops(bwd_chunk_id))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.submod.number = fwd_chunk_id
        self._to_device(self.args_recv_info[fwd_chunk_id], self.has_backward)
        with self.submod.noting():
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.has_backward:
            self._let_go(self.args_recv_info[fwd_chunk_id])
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        if not self.has_backward:
            return
        received = self.grad_recv_info.get(bwd_chunk_id, ())
        self._to_device(received, False)
        self.submod.number = bwd_chunk_id
        with self.submod.noting():
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if not self.is_first:
            gradient, *rest = self.bwd_cache[bwd_chunk_id]
            if gradient is None:  # the output does not hang on the input
                gradient = self._new(bwd_chunk_id).zero_().to(self._computes_on)
            self.bwd_cache[bwd_chunk_id] = (gradient.contiguous(), *rest)
        self._let_go((*self.args_recv_info[bwd_chunk_id], *received))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self.submod.number = bwd_chunk_id
        with self.submod.noting():
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def _to_device(self, infos: tuple[Any, ...], requires_grad: bool) -> None:
        for info in infos if self._through_host else ():
            if getattr(info, "buffer", None) is not None:
                info.buffer = info.buffer.detach().to(self._computes_on).requires_grad_(requires_grad)

    def _let_go(self, infos: tuple[Any, ...]) -> None:
        """Frees buffers; torch up to 2.14 wants a tensor there."""
        for info in infos:
            if getattr(info, "buffer", None) is not None:
                info.buffer = torch.empty(0, dtype=info.buffer.dtype, device=self.device)
