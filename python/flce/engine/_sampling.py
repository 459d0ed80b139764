"""How generation chooses a token: what a `GenerationConfig` says, and the `Sampler` that does it.

The noise of a choice is a function of (seed, sequence, position, token) and of nothing else, computed with integer arithmetic that wraps.
A generator with a state would give a sequence other noise when it is in another microbatch or when others have ended before it. The token
is the argmax of logits + Gumbel noise, which is a draw from their softmax. Logits that differ by a rounding error then give another token
only where the two best sums are as near to each other as that. In a cumulative sum over the vocabulary a rounding error moves the border
of every token behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flce import errors
from flce.core import checks

_MOST_NOISE = 1 << 24  #: elements of noise [rows, V] made at a time


@dataclass(frozen=True)
class GenerationConfig:
    """How `PipelineEngine.generate` continues prompts. Raises ArgumentError, DTypeError for values that are not allowed.

    Attributes:
        max_new_tokens: most tokens that a prompt is continued by, at least 1.
        min_new_tokens: tokens before which no end of sequence is chosen, 0 to max_new_tokens.
        greedy: takes the likeliest token, the first of equals; top_p and top_k are then without effect.
        top_p: in (0, 1]; keeps the likeliest tokens up to the one with which their probabilities reach top_p. 1.0: all.
        top_k: keeps the k likeliest tokens and those as likely as the last of them. None: all. top_p is of what top_k keeps.
        temperature: 2^-100 to 2^100; logits are divided by it before top_k and top_p. It is that of the log-probabilities, too.
        eos_token_id: the token or tokens that end a sequence. None: the tokenizer's.
        pad_token_id: what stands behind a sequence that is shorter than the longest. None: the tokenizer's, or where it has none the first
            end of sequence.
    """

    max_new_tokens: int = 256
    min_new_tokens: int = 0
    greedy: bool = False
    top_p: float = 1.0
    top_k: int | None = None
    temperature: float = 1.0
    eos_token_id: int | Sequence[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        checks.integer("max_new_tokens", self.max_new_tokens, 1)
        checks.integer("min_new_tokens", self.min_new_tokens, 0)
        if self.min_new_tokens > self.max_new_tokens:
            raise errors.ArgumentError(f"min_new_tokens is {self.min_new_tokens}; it must be at most max_new_tokens, {self.max_new_tokens}")
        checks.flag("greedy", self.greedy)
        checks.number("top_p", self.top_p)
        if not 0.0 < self.top_p <= 1.0:
            raise errors.ArgumentError(f"top_p is {self.top_p}; it must be above 0 and at most 1, which keeps all tokens")
        if self.top_k is not None:
            checks.integer("top_k", self.top_k, 1, ", or None, which keeps all tokens")
        checks.number("temperature", self.temperature)
        checks.temperature(self.temperature, ". greedy=True is what a temperature of 0 stands for")
        _token_ids("eos_token_id", self.eos_token_id)
        if self.pad_token_id is not None:
            checks.integer("pad_token_id", self.pad_token_id, 0)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """eos_token_id as a tuple, empty where it is None."""
        return _token_ids("eos_token_id", self.eos_token_id)

    def special_tokens(self, tokenizer: Any | None) -> tuple[tuple[int, ...], int]:
        """(all that end a sequence, what pads): this config's, otherwise those of the tokenizer, which needs `eos_token_id` and
        `pad_token_id` alone. Without an end of sequence all continuations are equally long, and nothing is padded."""
        if tokenizer is not None and (hasattr(tokenizer, "max_new_tokens") or not hasattr(tokenizer, "eos_token_id")):
            raise errors.DTypeError(
                f"tokenizer is a {type(tokenizer).__name__}; it must have eos_token_id and pad_token_id, or be None. The config is gconfig="
            )
        ends = self.eos_token_ids or _token_ids("tokenizer.eos_token_id", getattr(tokenizer, "eos_token_id", None))
        pad = self.pad_token_id
        if pad is None and getattr(tokenizer, "pad_token_id", None) is not None:
            pad = checks.integer("tokenizer.pad_token_id", tokenizer.pad_token_id, 0)  # type: ignore[union-attr]
        return ends, next(iter(ends), 0) if pad is None else pad


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    """A token, several or None as a tuple."""
    if value is None:
        return ()
    if isinstance(value, int):
        value = (value,)
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise errors.DTypeError(f"{name} is {value!r}; it must be an integer, several integers or None")
    return tuple(checks.integer(name, token, 0) for token in value)


def filtered(logits: Tensor, config: GenerationConfig, ends: Sequence[int], position: int) -> Tensor:
    """Logits [n, V] fp32 as tokens are drawn from them: -inf where a token may not be chosen, divided by the temperature unless greedy.
    Ends of sequence go before min_new_tokens, then top_k, then top_p, as transformers does it. position: new tokens before this one."""
    if ends and position < config.min_new_tokens:
        logits = logits.index_fill(1, torch.tensor(ends, device=logits.device), -torch.inf)
    if config.greedy:
        return logits
    if config.temperature != 1.0:
        logits = logits / config.temperature
    if config.top_k is not None and config.top_k < logits.shape[1]:
        least = logits.topk(config.top_k, dim=1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if config.top_p < 1.0:
        ordered, order = logits.sort(dim=1, descending=True, stable=True)
        # Whole numbers, whose sums are the same on every device: a GPU's floating-point cumsum promises no such thing.
        mass = (ordered.softmax(dim=1).double() * 2.0**40).round().long()
        reached = mass.cumsum(dim=1)
        dropped = (reached - mass).double() >= config.top_p * reached[:, -1:].double()
        dropped[:, 0] = False
        logits = logits.masked_fill(torch.empty_like(dropped).scatter_(1, order, dropped), -torch.inf)
    return logits


class Sampler:
    """Chooses tokens as a GenerationConfig says.

    ends: the tokens that end a sequence. seed: any integer of 64 bits. The token of a sequence at a position depends on its logits, the
    seed, the sequence's number and the position alone.
    """

    def __init__(self, config: GenerationConfig, ends: Sequence[int], seed: int) -> None:
        self._config, self._ends, self._seed = config, tuple(ends), seed

    def __call__(self, logits: Tensor, sequences: Tensor, position: int) -> Tensor:
        """Tokens [n] int64 of n sequences. logits: [n, V] fp32. sequences: [n] int64, their numbers. position: the new tokens that each
        has already. A row of logits with NaN or +inf, or without a finite number, gives -1."""
        best = logits.amax(dim=1)
        logits = filtered(logits, self._config, self._ends, position)
        if self._config.greedy:
            tokens = logits.argmax(dim=1)
        else:
            sparse = self._config.top_p < 1.0 or self._config.top_k is not None
            step = max(1, _MOST_NOISE // logits.shape[1])
            keys = _row_keys(self._seed, sequences, position)
            parts = zip(logits.split(step), keys.split(step), strict=True)
            tokens = torch.cat([_noisy_argmax(rows, row_keys, sparse) for rows, row_keys in parts])
        return torch.where(best.isfinite(), tokens, -1)


def _noisy_argmax(logits: Tensor, keys: Tensor, sparse: bool) -> Tensor:
    """Tokens [n] drawn from the softmax of logits [n, V] with keys [n]. sparse: most logits are -inf and need no noise."""
    sums = logits.double()
    if sparse:
        rows, ids = (logits > -torch.inf).nonzero(as_tuple=True)
        sums[rows, ids] += _gumbel(keys[rows], ids)
    else:
        sums += _gumbel(keys[:, None], torch.arange(logits.shape[1], device=logits.device))
    return sums.argmax(dim=1)


def _gumbel(keys: Tensor, ids: Tensor) -> Tensor:
    """Gumbel noise fp64 of tokens `ids` under their rows' keys, int64 tensors that broadcast."""
    bits = (_mix(keys + (ids + 1) * _WEYL) >> 12) & ((1 << 52) - 1)
    uniform = (bits.double() + 0.5) * 2.0**-52  # in the open interval (0, 1)
    return -(-uniform.log()).log()


def _row_keys(seed: int, sequences: Tensor, position: int) -> Tensor:
    """[n] int64: the keys of sequences [n] at a position. Each argument goes through a mix of its own, so neighbours have nothing in
    common."""
    key = _mix(torch.full_like(sequences, _signed(seed)))
    key = _mix(key + (sequences + 1) * _WEYL)
    return _mix(key + _signed((position + 1) * _WEYL))


def _signed(number: int) -> int:
    """The int64 of the same lowest 64 bits."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


_WEYL = _signed(0x9E3779B97F4A7C15)
_FACTORS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser of int64, in place: a bijection of which every bit depends on every bit of x."""
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        x ^= (x >> shift) & ((1 << (64 - shift)) - 1)  # a shift that brings in zeros
        x *= factor
    x ^= (x >> 31) & ((1 << 33) - 1)
    return x
