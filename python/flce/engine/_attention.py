"""Attention over packed sequences, as an attention function of transformers, whose layers call it with queries and keys behind their
rotary embedding."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flce import errors
from flce.engine._packed import KVCache, PackedBatch

#: the function's name among those of transformers, and that of the keyword argument by which it is given the sequences
NAME = "flce_packed"
# All but cuDNN's, which makes a plan for every new length of a sequence (docs/experiments/2026-11-24.md has the cost).
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Sequences:
    """Facts about one pass through a stage that attention needs. first_layer: the number of the stage's first layer.

    Where there is a cache: past, the tokens [B] int64 that it has of each sequence; for each of the T new tokens the number of its
    sequence and its row among the sequence's new ones, [T] int64; and masks by window, which all layers share."""

    def __init__(self, batch: PackedBatch, first_layer: int) -> None:
        self.batch, self.first_layer = batch, first_layer
        self.masks: dict[int | None, Tensor] = {}
        if batch.cache is not None:
            starts = batch.cu_seqlens.long()
            self.past = torch.tensor(batch.cache.lengths, device=starts.device)
            numbers = torch.arange(len(batch.lengths), device=starts.device)
            self.ids = numbers.repeat_interleave(starts.diff(), output_size=batch.num_tokens)
            self.rows = torch.arange(batch.num_tokens, device=starts.device) - starts[self.ids]

    def seen(self, cache: KVCache, window: int | None) -> tuple[slice, Tensor]:
        """The places of the cache that any new token sees, and which of them each one sees: [B, M, N] bool, M the most new tokens of a
        sequence."""
        end = max(old + new for old, new in zip(cache.lengths, self.batch.lengths, strict=True))
        first = 0 if window is None else max(0, min(cache.lengths) + 1 - window)
        if window not in self.masks:
            i = (self.past[:, None] + torch.arange(self.batch.max_length, device=self.past.device))[..., None]
            j = torch.arange(first, end, device=self.past.device)
            self.masks[window] = j <= i if window is None else (j <= i) & (j > i - window)
        return slice(first, end), self.masks[window]


@dataclass(frozen=True)
class Maths:
    """How scores become weights. window: the number of last keys that a query sees, its own among them; None: all keys."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0


@functools.cache
def register() -> None:
    """Makes the function known to transformers, once."""
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, attend)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    flce_packed: Sequences | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """[1, T, Hq, d] of query [1, Hq, T, d], key and value [1, H, T, d], H a divisor of Hq."""
    kind = type(module).__name__
    if flce_packed is None:
        raise errors.ArgumentError(
            f"a {kind} that a flce.engine stage has taken over is called without the stage; call the stage, or make it from "
            "copy.deepcopy(model)"
        )
    if scaling is None:
        raise errors.UnavailableError(f"this version of transformers does not say by what a {kind} scales scores; use transformers 5.23")
    if query.dtype != value.dtype or key.dtype != value.dtype:  # autocast leaves what the rotary embedding returns in fp32
        query, key = query.to(value.dtype), key.to(value.dtype)
    maths = Maths(scaling, sliding_window or None, softcap or None, dropout)
    batch = flce_packed.batch
    if batch.cache is None:
        return _packed(query, key, value, batch, maths), None
    layer: int = module.layer_idx - flce_packed.first_layer  # type: ignore[operator, assignment]
    batch.cache.write(layer, flce_packed.ids, batch.position_ids, key[0].transpose(0, 1), value[0].transpose(0, 1))
    if not any(batch.cache.lengths):
        return _packed(query, key, value, batch, maths), None
    return _cached(query, flce_packed, batch.cache, layer, maths), None


def _packed(query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch, maths: Maths) -> Tensor:
    """Attention of tokens that see those of their own batch alone."""
    varlen = _varlen_kernel(query, maths)
    if varlen is not None:
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        return varlen(query, key, value, batch, maths).unsqueeze(0)
    parts = zip(*(x.split(list(batch.lengths), dim=2) for x in (query, key, value)), strict=True)
    outputs = [_dense(q, k, v, _window(q.shape[2], maths.window, q.device), maths) for q, k, v in parts]
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _window(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """A mask [length, length] of the keys that each query sees; None for the causal mask."""
    if window is None or length <= window:
        return None
    i, j = torch.arange(length, device=device)[:, None], torch.arange(length, device=device)[None]
    return (j <= i) & (j > i - window)


def _dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, maths: Maths) -> Tensor:
    """[B, Hq, M, d] of query [B, Hq, M, d], key and value [B, H, N, d]. mask, bool: [M, N] or one that broadcasts with [B, 1, M, N]; None
    is the causal one."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and (maths.softcap is not None or (query.is_cuda and mask is not None)):  # no kernel but cuDNN's takes groups and a mask
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if maths.softcap is None:
        with sdpa_kernel(_BACKENDS):
            return F.scaled_dot_product_attention(
                query, key, value, mask, maths.dropout, mask is None, scale=maths.scale, enable_gqa=query.shape[1] != key.shape[1]
            )
    scores = (query @ key.transpose(2, 3)) * maths.scale
    scores = torch.tanh(scores / maths.softcap) * maths.softcap
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1, dtype=torch.float32).to(value.dtype)
    return F.dropout(weights, maths.dropout, maths.dropout > 0) @ value


def _cached(query: Tensor, sequences: Sequences, cache: KVCache, layer: int, maths: Maths) -> Tensor:
    """Attention of tokens that see those in the cache, too: one call for all sequences, padded to the longest sequence's queries."""
    where, mask = sequences.seen(cache, maths.window)
    keys, values = cache.keys[layer][:, :, where], cache.values[layer][:, :, where]
    num_sequences, most = mask.shape[:2]
    heads, groups = keys.shape[1], query.shape[1] // keys.shape[1]
    padded = torch.zeros(num_sequences, most, query.shape[1], query.shape[3], dtype=keys.dtype, device=query.device)
    padded[sequences.ids, sequences.rows] = query[0].transpose(0, 1).to(keys.dtype)
    # the queries of a group of heads as rows of one head: no key is repeated
    grouped = padded.view(num_sequences, most, heads, groups, -1).permute(0, 2, 3, 1, 4).reshape(num_sequences, heads, groups * most, -1)
    attended = _dense(grouped, keys, values, mask.repeat(1, groups, 1)[:, None], maths)
    attended = attended.view(num_sequences, heads, groups, most, -1).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return attended[sequences.ids, sequences.rows].unsqueeze(0).to(query.dtype)


def _varlen_kernel(query: Tensor, maths: Maths) -> Callable[..., Tensor] | None:
    """A kernel for packed sequences that can do this, if there is one here."""
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return None
    if query.shape[-1] % 8 or query.shape[-1] > 256 or torch.cuda.get_device_capability(query.device) < (8, 0):
        return None
    if _flash_attn() is not None:
        return _flash
    if maths.softcap is None and maths.dropout == 0 and _torch_varlen() is not None:
        return _torch
    return None


@functools.cache
def _flash_attn() -> Any:
    try:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found, unused-ignore]
    except (ImportError, OSError):  # OSError: built for another torch
        return None
    return flash_attn_varlen_func


@functools.cache
def _torch_varlen() -> Any:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    if not {"scale", "window_size"} <= set(known):
        return None
    return varlen_attn if "enable_gqa" in known else functools.partial(_without_groups, varlen_attn)


def _without_groups(attention: Any, query: Tensor, key: Tensor, value: Tensor, *more: Any, enable_gqa: bool, **options: Any) -> Any:
    """An attention of torch before 2.12, which has a key's head for every query's."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    return attention(query, key, value, *more, **options)


def _flash(query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch, maths: Maths) -> Any:
    window = (-1, -1) if maths.window is None else (maths.window - 1, 0)
    return _flash_attn()(
        *(query, key, value, batch.cu_seqlens, batch.cu_seqlens, batch.max_length, batch.max_length),
        dropout_p=maths.dropout,
        softmax_scale=maths.scale,
        causal=True,
        window_size=window,
        softcap=maths.softcap or 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def _torch(query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch, maths: Maths) -> Any:
    window = (-1, 0) if maths.window is None else (maths.window - 1, 0)
    return _torch_varlen()(
        *(query, key, value, batch.cu_seqlens, batch.cu_seqlens, batch.max_length, batch.max_length),
        scale=maths.scale,
        window_size=window,
        enable_gqa=query.shape[1] != key.shape[1],
    )
