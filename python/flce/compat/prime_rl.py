"""prime-rl's `FusedOutputLinear` (`prime_rl.trainer.models.layers.lm_head`) on flce's kernels: an output layer that returns labels'
log-probabilities, over a sampler's own sets of classes where it is given them, and entropies."""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from flce import errors, functional

__all__ = ["FusedOutputLinear", "PrimeLmOutput"]

IGNORE_INDEX = -100
_MOST_IDS = 1024  # classes a token that a call takes


class PrimeLmOutput(TypedDict, total=False):
    """The layer's output: `loss`, or `logprobs` and `entropy`, with `mask_logprobs` where they are asked for."""

    logits: Tensor | None
    logprobs: Tensor | None
    entropy: Tensor | None
    mask_logprobs: Tensor | None
    loss: Tensor | None


class FusedOutputLinear(nn.Linear):
    """An output layer without a bias.

    Args:
        chunk_size: taken; kernels need no chunks.

    return_mask_logprobs, an attribute: whether `forward` also returns log-probabilities of all classes of sampling_mask.
    """

    def __init__(self, in_features: int, out_features: int, chunk_size: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.chunk_size = chunk_size
        self.return_mask_logprobs = False

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        labels: Tensor | None = None,
        temperature: Tensor | None = None,
        sampling_mask: Tensor | None = None,
    ) -> PrimeLmOutput:
        """logprobs and entropy [B, S] fp32 of hidden_states [B, S, D] at labels [B, S]; logits are divided by temperature [B, S].

        sampling_mask [B, S, K], int32 or int64, K at most 1024: the classes that the sampler kept, in any order, -1 for none. A token whose
        label is among them has the log-probability of the softmax over them, any other token, and one without a class, that of the
        vocabulary. The entropy is the vocabulary's at each token, and has no gradient. mask_logprobs [B, S, K] fp32 are of the softmax over
        the kept classes, with a gradient; 0 at -1, and at tokens whose label is not among them.

        Without a temperature: the sum of cross entropies over labels other than -100, fp32, as `loss`.

        AssertionError for labels that are missing, sampling_mask without a temperature, and tensors whose tokens are not those of
        hidden_states. A label outside the vocabulary gives 0 for log-probability and entropy, and `flce.check_labels` reports it.
        """
        assert labels is not None, "FusedOutputLinear requires labels for chunked logprob computation"
        _check_tokens(hidden_states, labels=labels, temperature=temperature)
        if temperature is None:
            assert sampling_mask is None, "sampling_mask is given without temperature; it requires per-token temperatures"
            loss = functional.linear_cross_entropy(hidden_states, self.weight, labels, reduction="sum", ignore_index=IGNORE_INDEX)
            return {"loss": loss}
        options: dict[str, Any] = {"temperature": temperature.float(), "ignore_index": IGNORE_INDEX}
        if sampling_mask is None or sampling_mask.shape[-1] == 0:
            logprobs, entropy = functional.linear_logprobs(hidden_states, self.weight, labels, return_entropy=True, **options)
            kept = None
        else:
            logprobs, entropy, kept = self._replayed(hidden_states, labels, sampling_mask, options)
        output: PrimeLmOutput = {"logprobs": logprobs, "entropy": entropy.detach()}
        if self.return_mask_logprobs and sampling_mask is not None:
            output["mask_logprobs"] = torch.zeros_like(sampling_mask, dtype=torch.float32) if kept is None else kept
        return output

    def _replayed(self, hidden: Tensor, labels: Tensor, mask: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities and entropies, and log-probabilities of the kept classes. Tokens are ignored by one of two calls over the
        vocabulary each: those of the kept classes need its entropy and no gradient."""
        _check_mask(mask, labels)
        same = (mask == labels[..., None]) & (mask >= 0)
        replayed = same.any(-1)
        ids = torch.where(replayed[..., None], mask, -1)
        kept = functional.linear_logprobs_at(hidden, self.weight, ids, normalize="support", temperature=options["temperature"])
        others = torch.where(replayed, IGNORE_INDEX, labels)
        whole, entropy = functional.linear_logprobs(hidden, self.weight, others, return_entropy=True, **options)
        with torch.no_grad():
            only = torch.where(replayed, labels, IGNORE_INDEX)
            entropy_there = functional.linear_logprobs(hidden, self.weight, only, return_entropy=True, **options)[1]
        at_label = kept.gather(-1, same.int().argmax(-1, keepdim=True)).squeeze(-1)
        return torch.where(replayed, at_label, whole), torch.where(replayed, entropy_there, entropy.detach()), kept


def _check_tokens(hidden_states: Tensor, **tensors: Tensor | None) -> None:
    """The peer's own checks are assertions."""
    tokens = list(hidden_states.shape[:-1])
    assert len(tokens) == 2, f"hidden_states has shape {list(hidden_states.shape)}; it must be [B, S, D]"
    for name, tensor in tensors.items():
        shape = tokens if tensor is None else list(tensor.shape)
        assert shape == tokens, f"{name} has shape {shape}; it must be {tokens}"


def _check_mask(mask: Tensor, labels: Tensor) -> None:
    assert mask.shape[:-1] == labels.shape, f"sampling_mask has shape {list(mask.shape)}; it must be {[*labels.shape, 'K']}"
    if mask.dtype not in (torch.int32, torch.int64):
        raise errors.DTypeError(f"sampling_mask is {mask.dtype}; it must be torch.int32 or torch.int64")
    if mask.shape[-1] > _MOST_IDS:
        raise errors.ShapeError(f"sampling_mask has shape {list(mask.shape)}; it may name at most {_MOST_IDS} classes a token")
