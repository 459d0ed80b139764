"""The same loss in plain torch, a chunk of tokens at a time: what losses fall back to, and what flce is compared with.

Each chunk is checkpointed, so that neither forward nor backward ever holds the logits of more than chunk_size tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

ChunkLoss = Callable[..., tuple[Tensor, Tensor]]


def transform_logits(logits: Tensor, logit_scale: float | None = None, softcap: float | None = None) -> Tensor:
    if logit_scale is not None and logit_scale != 1.0:
        logits = logits * logit_scale
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def chunk_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    logit_scale: float | None,
    softcap: float | None,
    label_smoothing: float,
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    """Cross entropy and z-loss of each token of a chunk, fp32, 0 for ignored ones."""
    weight = weight.to(hidden.dtype)
    logits = F.linear(hidden, weight, None if bias is None else bias.to(hidden.dtype)).float()
    logits = transform_logits(logits, logit_scale, softcap)
    class_weight = None if class_weight is None else class_weight.float()
    losses = F.cross_entropy(logits, target, class_weight, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing)
    if not z_loss:
        return losses, torch.zeros((), device=hidden.device)
    return losses, z_loss * torch.where(target != ignore_index, logits.logsumexp(-1).square(), 0.0)


def chunked_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    chunk_size: int,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_valid_tokens: Tensor | float | None = None,
    logit_scale: float | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weight: Tensor | None = None,
    function: ChunkLoss = chunk_loss,
) -> Tensor:
    """`flce.linear_cross_entropy` with the meaning of every argument unchanged; hidden [..., D], target [...] already shifted."""
    shape = target.shape
    hidden, target = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1).long()
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        hidden = hidden.to(torch.get_autocast_dtype(device_type))
    # As in the kernels, a label out of range counts as ignored.
    target = torch.where((target >= 0) & (target < weight.shape[0]), target, ignore_index)
    options = (ignore_index, logit_scale, softcap, label_smoothing, z_loss)
    recompute = torch.is_grad_enabled()
    cross_entropies, z_losses = [], []
    for start in range(0, max(hidden.shape[0], 1), chunk_size):
        rows = slice(start, start + chunk_size)
        arguments: tuple[Any, ...] = (hidden[rows], weight, bias, target[rows], class_weight, *options)
        pair = checkpoint(function, *arguments, use_reentrant=False) if recompute else function(*arguments)
        if reduction == "none":
            cross_entropies.append(pair[0] + pair[1])
        else:
            cross_entropies.append(pair[0].sum())
            z_losses.append(pair[1].sum())
    if reduction == "none":
        return torch.cat(cross_entropies).view(shape)
    cross_entropy, z_part = torch.stack(cross_entropies).sum(), torch.stack(z_losses).sum()
    if reduction == "sum":
        return cross_entropy + z_part
    if num_valid_tokens is not None:
        count = torch.as_tensor(num_valid_tokens, device=hidden.device)
        return torch.where(count > 0, (cross_entropy + z_part) / torch.where(count > 0, count, 1), 0.0)
    valid = target != ignore_index
    count = valid.sum()
    total = count if class_weight is None else torch.where(valid, class_weight.float()[torch.where(valid, target, 0)], 0.0).sum()
    # No valid token: 0, with gradients of 0. A sum of class weights may be small, but not a count.
    return cross_entropy / torch.where(total > 0, total, 1.0) + z_part / count.clamp(min=1)
