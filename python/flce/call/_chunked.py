"""The loss in plain torch, a chunk of tokens at a time: losses fall back to it, and flce is compared with it.

Each chunk is checkpointed: forward and backward hold the logits of at most chunk_size tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flce.core.checks import LEAST_TEMPERATURE, MOST_TEMPERATURE

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
    temperature: Tensor | float | None,
    token_weight: Tensor | None,
    class_weight: Tensor | None,
    ignore_index: int,
    logit_scale: float | None,
    softcap: float | None,
    label_smoothing: float,
    z_loss: float,
    dft: bool,
) -> tuple[Tensor, Tensor]:
    """Cross entropy and z-loss of each token of a chunk, fp32, 0 for ignored ones; token weights included."""
    weight = weight.to(hidden.dtype)
    logits = F.linear(hidden, weight, None if bias is None else bias.to(hidden.dtype)).float()
    logits = transform_logits(logits, logit_scale, softcap)
    if temperature is not None:
        logits = logits / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    class_weight = None if class_weight is None else class_weight.float()
    losses = F.cross_entropy(logits, target, class_weight, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing)
    valid = target != ignore_index
    factor = None if token_weight is None else torch.where(valid, token_weight, 0.0)
    if dft:
        with torch.no_grad():
            probability = (logits.gather(1, torch.where(valid, target, 0)[:, None])[:, 0] - logits.logsumexp(-1)).exp()
        factor = probability if factor is None else factor * probability
    z_losses = z_loss * torch.where(valid, logits.logsumexp(-1).square(), 0.0) if z_loss else torch.zeros((), device=hidden.device)
    return (losses, z_losses) if factor is None else (losses * factor, z_losses * factor)


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
    temperature: Tensor | float | None = None,
    token_weight: Tensor | None = None,
    dft: bool = False,
    function: ChunkLoss = chunk_loss,
) -> Tensor:
    """`flce.linear_cross_entropy` with the meaning of every argument unchanged; hidden [..., D], target [...] already shifted."""
    shape = target.shape
    hidden, target = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1).long()
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        hidden = hidden.to(torch.get_autocast_dtype(device_type))
    # A label out of range counts as ignored, by the kernels' rule.
    target = torch.where((target >= 0) & (target < weight.shape[0]), target, ignore_index)
    if isinstance(temperature, Tensor):  # a temperature that none can be divided by counts as ignored, too
        temperature = temperature.reshape(-1)
        right = (temperature >= LEAST_TEMPERATURE) & (temperature <= MOST_TEMPERATURE)
        target, temperature = torch.where(right, target, ignore_index), torch.where(right, temperature, 1.0)
    token_weight = None if token_weight is None else token_weight.reshape(-1).float()
    options = (class_weight, ignore_index, logit_scale, softcap, label_smoothing, z_loss, dft)
    recompute = torch.is_grad_enabled()
    cross_entropies, z_losses = [], []
    for start in range(0, max(hidden.shape[0], 1), chunk_size):
        rows = slice(start, start + chunk_size)
        per_row = (values[rows] if isinstance(values, Tensor) else values for values in (temperature, token_weight))
        arguments: tuple[Any, ...] = (hidden[rows], weight, bias, target[rows], *per_row, *options)
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
        return _divided(cross_entropy + z_part, torch.where(count > 0, count, 0))
    row_weight = token_weight if reduction == "weighted_mean" else None
    total, count = _mean_divisors(target, ignore_index, row_weight, class_weight)
    return _divided(cross_entropy, total) + _divided(z_part, count)


def _mean_divisors(target: Tensor, ignore_index: int, token_weight: Tensor | None, class_weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Divisors of cross entropies and of z-losses: the valid tokens' weights added up, with and without class weights."""
    valid = target != ignore_index
    weights = torch.where(valid, 1.0 if token_weight is None else token_weight, 0.0)
    count = valid.sum() if token_weight is None else weights.sum()
    total = count if class_weight is None else (weights * class_weight.float()[torch.where(valid, target, 0)]).sum()
    return total, count


def _divided(value: Tensor, by: Tensor) -> Tensor:
    """Nothing to divide by (no valid token, say) gives 0, with gradients of 0."""
    return torch.where(by != 0, value / torch.where(by != 0, by, 1), 0.0)
