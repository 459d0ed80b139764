"""Replaces TRL's ChunkedLogProbFunction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flce import functional
from flce.call import _formats
from flce.trl import _own
from flce.trl._own import OPTIONAL_OUTPUTS

_NO_TARGET = -(1 << 63)  # an ignore_index that no target has: every row counts
_ROWS = 8192  # rows of a weight or of hidden states at a time, where a sum over them is made
_MEAN_LOGITS_CHUNK = 4096  # classes of TRL's tiles where they are there for the mean logit alone


class ChunkedLogProbFunction:
    """Stands in for TRL's autograd function of this name: `apply` has its arguments and outputs, which autograd follows as before."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = OPTIONAL_OUTPUTS,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """(logprobs, entropy, log_sum_sq_probs, mean_logits, is_top1) of softcap(logit_scale · (hidden · weightᵀ + bias)) / temperature at
        targets: [N], is_top1 bool and the others fp32; None for outputs that `outputs` does not name. logprobs and entropy are
        differentiable.

        hidden [N, H], weight [V, H], bias [V], targets [N] int64 or int32. is_top1 is True where the target is the first of the largest
        logits. A target outside the vocabulary gives 0 and False, and `flce.check_labels` reports it. chunk_size changes nothing. A weight
        of another floating dtype than hidden's is read in hidden's, in autocast in its dtype.

        Calls that flce does not compute go to TRL's own function, which is logged once with the reason: float64, devices other than a CPU
        and a GPU of sm_80 or newer, a weight of DeepSpeed's ZeRO-3, a scale or cap of 0. Raises the errors of `flce.linear_logprobs`, which
        are RuntimeErrors as those of TRL's, naming the argument; ZeroDivisionError for a temperature of 0.
        """
        _own.check_temperature(temperature)
        given = (hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, tuple(outputs))
        formula = {"logit_scale": logit_scale, "final_logit_softcapping": final_logit_softcapping}
        if not _own.computes("ChunkedLogProbFunction", hidden, weight, formula):
            return _own.LOG_PROBS.own().apply(*given)  # type: ignore[no-any-return]
        dtype = _own.compute_dtype(hidden)
        made = functional.linear_logprobs(
            hidden,
            _own.as_read(weight, dtype),
            targets,
            bias=None if bias is None else _own.as_read(bias, dtype),
            temperature=temperature,
            logit_scale=logit_scale,
            softcap=final_logit_softcapping,
            ignore_index=_NO_TARGET,
            return_entropy="entropy" in outputs,
            return_top1="is_top1" in outputs,
            return_log_sum_sq_probs="log_sum_sq_probs" in outputs,
        )
        parts = iter(made if isinstance(made, tuple) else (made,))  # torch 2.11 traces no list of the rest
        logprobs = next(parts)
        entropy = next(parts) if "entropy" in outputs else None
        top1 = next(parts) if "is_top1" in outputs else None
        is_top1 = None if top1 is None else (top1 == targets) & (top1 >= 0)  # -1 where there is no target
        log_sum_sq_probs = next(parts) if "log_sum_sq_probs" in outputs else None
        mean_logits = _mean_logits(given) if "mean_logits" in outputs else None
        return logprobs, entropy, log_sum_sq_probs, mean_logits, is_top1


@torch.no_grad()
def _mean_logits(given: tuple[Any, ...]) -> Tensor:
    """The mean over the vocabulary of the softmax's logits, [N] fp32, without a gradient.

    Without a cap it is linear in hidden: one product with the mean of the weight's rows. With one, TRL's own function makes tiles of logits
    for it.
    """
    hidden, weight, bias, _, temperature, _, softcap, logit_scale, _ = given
    if softcap is not None:
        mean: Tensor = _own.LOG_PROBS.own().apply(*given[:5], _MEAN_LOGITS_CHUNK, softcap, logit_scale, ("mean_logits",))[3]
        return mean
    with torch.autocast(hidden.device.type, enabled=False):
        row = hidden.new_zeros(weight.shape[1], dtype=torch.float32)
        codes = _formats.of_tensor("weight", weight)
        for first in range(0, weight.shape[0], _ROWS):
            last = min(first + _ROWS, weight.shape[0])
            rows = weight[first:last] if codes is None else codes.numbers(first, last).to(hidden.dtype)
            row += rows.sum(0, dtype=torch.float32)
        means: Tensor = torch.cat([torch.mv(tokens.float(), row) for tokens in hidden.split(_ROWS)]) / weight.shape[0]
        if bias is not None:
            means += bias.float().mean()
        means *= logit_scale / temperature
        return means
