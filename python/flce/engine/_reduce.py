"""Gradients between a batch's backwards and the optimizer's step: sums over ranks, the norm of them all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flce.engine._transport import on_device

_PART = 1 << 25  # elements of a tied weight's gradient that are exchanged at a time


def sum_tied(weight: nn.Parameter, peer: int, group: dist.ProcessGroup) -> None:
    """Adds the gradient of the copy on rank `peer`, counted among all, to this copy's."""
    total = torch.zeros_like(weight) if weight.grad is None else weight.grad.contiguous()
    for part in total.view(-1).split(_PART):
        sent = part if on_device(group) else part.cpu()
        received = torch.empty_like(sent)
        operations = [dist.P2POp(dist.isend, sent, peer, group), dist.P2POp(dist.irecv, received, peer, group)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        part += received.to(part.device)
    weight.grad = total


def reduce_over_copies(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, *, average: bool) -> None:
    """One reduction over data-parallel ranks: the gradients' average, or their sum. A parameter without a gradient has zeros, as another
    rank may have one."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
        if average:
            parameter.grad /= dist.get_world_size(group)
    for work in [dist.all_reduce(parameter.grad, group=group, async_op=True) for parameter in parameters]:
        work.wait()


def global_norm(gradients: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """The 2-norm of every rank's gradients together: a scalar fp32 on `device`."""
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    total = torch.stack(norms).square().sum() if norms else torch.zeros((), device=device)
    total = total.to(device if on_device(group) else "cpu")
    dist.all_reduce(total, group=group)
    return total.sqrt().to(device)
