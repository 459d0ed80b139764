"""Masks, normalisation and statistics of packed batches.

Every tensor of tokens has a row for each packed token, [T]. Row t of a number about predictions (a log-probability, a reward, an
advantage) belongs to the prediction of token t + 1 of the same sequence; a sequence's last row predicts nothing and is 0. ReaLHF leaves
that row out: `drop_last_rows` makes its layout, [T - B], of this one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


def rows_sequence(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """[T] int64: the number of the sequence that a row belongs to. Waits for no device."""
    return torch.repeat_interleave(cu_seqlens.diff().long(), output_size=num_tokens)


def build_next_token_mask(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """[T] bool: whether a row has a next token in its sequence."""
    ends = cu_seqlens[1:].long()[rows_sequence(cu_seqlens, num_tokens)]
    return torch.arange(num_tokens, device=cu_seqlens.device) + 1 < ends


def build_loss_mask(prompt_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] bool: whether a row predicts a token of its sequence that is not the prompt's.

    prompt_mask: [T] bool, True for a prompt's tokens."""
    if prompt_mask.dtype != torch.bool or prompt_mask.dim() != 1:
        raise ValueError(f"prompt_mask is {prompt_mask.dtype} {list(prompt_mask.shape)}; it must be bool [T], True for a prompt's tokens")
    responses = torch.roll(~prompt_mask, -1)
    return responses & build_next_token_mask(cu_seqlens, prompt_mask.numel())


def drop_last_rows(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T - B] of [T]: without each sequence's last row, as ReaLHF has its log-probabilities, rewards and advantages."""
    return x[build_next_token_mask(cu_seqlens, x.shape[0])]


def sum_by_sequence(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[B] fp64: sums of x, [T], over each sequence's rows."""
    sums = torch.zeros(cu_seqlens.numel() - 1, dtype=torch.float64, device=x.device)
    return sums.index_add_(0, rows_sequence(cu_seqlens, x.shape[0]), x.double())


def concat_prompt_to_generation_output(
    packed_prompts: Tensor, cu_seqlens: Tensor, gen_tokens: Tensor, logprobs: Tensor, gen_lengths: Tensor
) -> dict[str, Tensor]:
    """Prompts and what was generated behind them as one packed batch.

    Args: packed_prompts: [P] int64. cu_seqlens: [B + 1], of the prompts. gen_tokens [B, L] int64, logprobs [B, L] fp32, gen_lengths [B]:
        what `PipelineEngine.generate` returns; sequence b has gen_lengths[b] tokens.

    Returns: packed_input_ids [T] int64, cu_seqlens [B + 1] int32, packed_logprobs [T] fp32 (0 in rows that predict a prompt's token, and in
        last rows), prompt_mask [T] bool.
    """
    bounds, lengths = cu_seqlens.tolist(), gen_lengths.tolist()
    device = gen_tokens.device
    ids, rows, masks, ends = [], [], [], [0]
    for b, (begin, end) in enumerate(itertools.pairwise(bounds)):
        ids += [packed_prompts[begin:end].to(device), gen_tokens[b, : lengths[b]]]
        rows += [logprobs.new_zeros(end - begin - 1), logprobs[b, : lengths[b]], logprobs.new_zeros(1)]
        masks += [torch.ones(end - begin, dtype=torch.bool), torch.zeros(lengths[b], dtype=torch.bool)]
        ends.append(ends[-1] + end - begin + lengths[b])
    return {
        "packed_input_ids": torch.cat(ids),
        "cu_seqlens": torch.tensor(ends, dtype=torch.int32, device=device),
        "packed_logprobs": torch.cat(rows),
        "prompt_mask": torch.cat(masks).to(device),
    }


@torch.no_grad()
def masked_normalization(
    x: Tensor, mask: Tensor | None = None, *, unbiased: bool = False, eps: float = 1e-5, group: dist.ProcessGroup | None = None
) -> Tensor:
    """(x - mean) / (standard deviation + eps) over the rows of the mask, fp32, 0 elsewhere; sums are taken in fp64.

    Args:
        x: of any shape.
        mask: bool, of x's shape; None: all rows count.
        unbiased: divide the sum of squares by the number of rows less one.
        group: the data-parallel group whose ranks are normalised together; every rank of it calls. None: this rank alone.
    """
    wide = x.double()
    counted = torch.ones_like(wide) if mask is None else mask.double()
    wide = torch.where(counted > 0, wide, 0.0)
    sums = torch.stack([counted.sum(), wide.sum(), wide.square().sum()])
    if group is not None:
        dist.all_reduce(sums, group=group)
    count, total, squares = sums.unbind()
    mean = total / count.clamp(min=1)
    variance = (squares / count.clamp(min=1) - mean.square()).clamp(min=0)
    if unbiased:
        variance = variance * count / (count - 1).clamp(min=1)
    return torch.where(counted > 0, (wide - mean) / (variance.sqrt() + eps), 0.0).float()


class Ratio(NamedTuple):
    """A statistic that is a mean, as its sum and what the sum is divided by: two scalars. Parts are added, their means are not averaged."""

    numerator: Tensor
    denominator: Tensor

    @staticmethod
    def over(x: Tensor, mask: Tensor) -> Ratio:
        """The mean of x over the mask's rows."""
        return Ratio(torch.where(mask, x.detach(), 0.0).sum(), mask.sum())


Stats = Mapping[str, Any]


def aggregate_stats(stats: Sequence[Stats], group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """One set of statistics of a list of microbatches' (or batches'), waiting for the device once.

    Args:
        stats: dicts of the same names; a value is a `Ratio`, whose numerators and denominators are added before they are divided (0 / 0 is
            NaN), or a scalar, which is added.
        group: the data-parallel group to add over as well, on whose every rank this is called. None: this rank's own statistics.
    """
    if not stats:
        raise ValueError("stats is an empty list; a batch has statistics of one microbatch at least")
    names = list(stats[0])
    for other in stats[1:]:
        if set(other) != set(names):
            raise ValueError(f"microbatches have statistics of different names: {sorted(names)} and {sorted(other)}")
    device = next((part.device for value in stats[0].values() for part in _parts(value) if isinstance(part, Tensor)), torch.device("cpu"))
    rows = [[torch.as_tensor(part, device=device).detach().double() for name in names for part in _parts(one[name])] for one in stats]
    totals = torch.stack([torch.stack(row) for row in rows]).sum(0)
    if group is not None:
        dist.all_reduce(totals, group=group)
    numbers = iter(totals.tolist())
    result = {}
    for name in names:
        numerator = next(numbers)
        if isinstance(stats[0][name], Ratio):
            denominator = next(numbers)
            numerator = numerator / denominator if denominator else float("nan")
        result[name] = numerator
    return result


def _parts(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, Ratio) else (value,)
