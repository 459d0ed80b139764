"""Gradients between a batch's backwards and the optimizer's step: sums over ranks, the norm of them all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flce.engine._transport import on_device

_BUCKET_ELEMENTS = 1 << 25


def sum_tied(weights: Sequence[nn.Parameter], peer: int | None, group: dist.ProcessGroup) -> None:
    """Adds up the gradients of copies of one parameter: those on this rank and, in parts, the copy's on rank `peer`, counted among all."""
    if not weights:
        return
    for weight in weights:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    total = gradients[0]
    for gradient in gradients[1:]:
        total += gradient
    if peer is not None:
        for part in total.view(-1).split(_BUCKET_ELEMENTS):
            sent = part if on_device(group) else part.cpu()
            received = torch.empty_like(sent)
            operations = [dist.P2POp(dist.isend, sent, peer, group), dist.P2POp(dist.irecv, received, peer, group)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            part += received.to(part.device)
    for gradient in gradients[1:]:
        gradient.copy_(total)


def reduce_over_copies(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, *, average: bool) -> None:
    """One reduction over data-parallel ranks, in flat buckets: the gradients' average, or their sum. A parameter without a gradient has
    zeros, as another rank may have one."""
    buckets: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        bucket = buckets.setdefault(parameter.grad.dtype, [])
        if bucket and sum(g.numel() for g in bucket) + parameter.grad.numel() > _BUCKET_ELEMENTS:
            _reduce_bucket(bucket, group, average)
            bucket.clear()
        bucket.append(parameter.grad)
    for bucket in buckets.values():
        _reduce_bucket(bucket, group, average)


def _reduce_bucket(gradients: list[Tensor], group: dist.ProcessGroup, average: bool) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    if average:
        flat /= dist.get_world_size(group)
    dist.all_reduce(flat, group=group)
    at = 0
    for gradient in gradients:
        gradient.copy_(flat[at : at + gradient.numel()].view(gradient.shape))
        at += gradient.numel()


def global_norm(gradients: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """The 2-norm of every rank's gradients together: a scalar fp32 on `device`."""
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    total = torch.stack(norms).square().sum() if norms else torch.zeros((), device=device)
    total = total.to(device if on_device(group) else "cpu")
    dist.all_reduce(total, group=group)
    return total.sqrt().to(device)


def clip(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scales gradients so that the norm is at most max_norm."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
