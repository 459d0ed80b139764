"""The last stage's output, as a loss function sees it, and what `PipelineEngine.forward` returns of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flce import LinearCrossEntropyLoss, errors, linear_cross_entropy, linear_logprobs
from flce.core import checks
from flce.engine._stage import Stage
from flce.loss import with_budget

OUTPUTS = ("logits", "logprobs", "hidden", "entropy", "values")
HEAD_OPTIONS = ("workspace_limit_bytes", "retain_in_grad_weight", "batch_invariant", "memory_limit_bytes")
_NO_TENSOR = (
    "the last stage's output is a HeadOutput and no tensor; output.cross_entropy(labels, shift=1) and output.logprobs(labels, shift=1) do "
    "without logits, output.logits() makes them, and output.values() a critic's values"
)


class HeadOutput:
    """Hidden states [T, D] of a packed microbatch, and the head that makes logits of them; requests are computed without logits.

        def loss_fn(output, packed_input_ids, cu_seqlens, **kwargs):
            return output.cross_entropy(packed_input_ids, shift=1), {}

    Labels are [T] int64 or int32, packed as the ids are. `shift` says how they lie and has no default: 1 for the ids themselves and labels
    like them, where row t is scored with the label of row t + 1 of the same sequence; 0 for labels that are aligned already. A row without
    such a label, or whose label is -100, has no target: log-probability 0, and no part in a loss. torch's functions refuse the output with
    an ArgumentError: it is no tensor.

    Args:
        hidden: [T, D].
        head: nn.Linear or a module that stands for one, with .weight [V, D] and perhaps .bias [V]; a LoRA layer of peft will do. Calls
            raise ArgumentError for one that computes something else, whose logits are `output.head(output.hidden)`.
        logit_scale, softcap: changes of the logits behind the head.
        cu_seqlens: [B + 1] int32 or int64, from 0 to T.
        options: of `flce.linear_cross_entropy` and `flce.linear_logprobs` for every call: workspace_limit_bytes, retain_in_grad_weight,
            batch_invariant.
    """

    def __init__(
        self,
        hidden: Tensor,
        head: nn.Module,
        logit_scale: float = 1.0,
        softcap: float = 0.0,
        cu_seqlens: Tensor | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.hidden = hidden
        self.head = head
        self.logit_scale = logit_scale
        self.softcap = softcap
        self.cu_seqlens = cu_seqlens
        self.shifts: set[int] = set()  #: shifts with which labels were scored
        self.mean_over: str | None = None  #: the weights that a loss was a mean over, in place of tokens
        self._options = dict(options or {})

    @staticmethod
    def of(stage: Stage, hidden: Tensor, cu_seqlens: Tensor | None, options: Mapping[str, Any] | None = None) -> HeadOutput:
        assert stage.head is not None
        return HeadOutput(hidden, stage.head, stage.logit_scale, stage.softcap, cu_seqlens, options)

    @property
    def is_critic(self) -> bool:
        """Whether the head has one row: a value of each token."""
        return num_rows(self.head) == 1

    def _layer(self) -> LinearCrossEntropyLoss:
        """Reads the head: its weight, an adapter's, scale and cap."""
        if num_rows(self.head) is None:
            kind = type(self.head).__name__
            raise errors.ArgumentError(f"the head is a {kind} without a weight [V, D]; it must be an nn.Linear or stand for one")
        return LinearCrossEntropyLoss(self.head, "pytorch", shift=0, logit_scale=self.logit_scale, softcap=self.softcap)

    def _call(self, function: Callable[..., Any], labels: Tensor, shift: int, options: Mapping[str, Any]) -> Any:
        if self.is_critic:
            raise errors.ArgumentError("this head has one row, a critic's value; call output.values()")
        self.shifts.add(shift)
        hidden, weight, bias = self._layer().operands(self.hidden)
        settings = {"logit_scale": self.logit_scale, "softcap": self.softcap or None, **self._options, **options}
        return function(hidden, weight, labels, bias=bias, shift=shift, cu_seqlens=self.cu_seqlens if shift else None, **settings)

    def cross_entropy(self, labels: Tensor, *, reduction: str = "mean", shift: int, **options: Any) -> Any:
        """`flce.linear_cross_entropy` of the rows, with its options (num_valid_tokens, token_weight, z_loss, …): a scalar, or [T] fp32 with
        reduction "none"."""
        if reduction == "weighted_mean" or (reduction == "mean" and options.get("class_weight") is not None):
            self.mean_over = "token_weight" if reduction == "weighted_mean" else "class_weight"
        return self._call(linear_cross_entropy, labels, shift, {"reduction": reduction, **options})

    def logprobs(self, labels: Tensor, temperature: Tensor | float = 1.0, *, shift: int, **options: Any) -> Tensor:
        """log p of each row's target, [T] fp32, 0 where there is none. temperature: a number, or [T] fp32."""
        logp: Tensor = self._call(linear_logprobs, labels, shift, {"temperature": temperature, **options})
        return logp

    def logprobs_and_entropy(
        self, labels: Tensor, temperature: Tensor | float = 1.0, *, shift: int, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """`logprobs` and the entropy of every row that has a target, 0 for others, [T] fp32 each, in one pass over the head."""
        logp, entropy = self._call(linear_logprobs, labels, shift, {"temperature": temperature, "return_entropy": True, **options})
        return logp, entropy

    def entropy(self, temperature: Tensor | float = 1.0, **options: Any) -> Tensor:
        """Entropy of every row's softmax, in nats: [T] fp32."""
        anything, shifts = torch.zeros(self.hidden.shape[0], dtype=torch.int64, device=self.hidden.device), set(self.shifts)
        entropy = self.logprobs_and_entropy(anything, temperature, shift=0, **options)[1]
        self.shifts = shifts
        return entropy

    def logits(self) -> Tensor:
        """[T, V] in hidden's dtype, behind logit_scale and softcap."""
        return self._layer().forward_logits(self.hidden)

    def values(self) -> Tensor:
        """[T] fp32 of a head with one row. Raises ArgumentError for a head with more."""
        if not self.is_critic:
            raise errors.ArgumentError(f"the head has {num_rows(self.head)} rows; values are of a head with one (a critic's)")
        return self.logits()[:, 0].float()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise errors.ArgumentError(_NO_TENSOR)

    def __getattr__(self, name: str) -> Any:
        said = f"; {_NO_TENSOR}" if not name.startswith("_") and hasattr(Tensor, name) else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{said}")

    def __repr__(self) -> str:
        return f"HeadOutput(hidden={list(self.hidden.shape)}, head={self.head})"


def num_rows(head: Any) -> int | None:
    """Rows of a head's weight [V, D], without adapters; None where it has no such weight."""
    weight = getattr(head.get_base_layer() if hasattr(head, "get_base_layer") else head, "weight", None)
    return int(weight.shape[0]) if isinstance(weight, Tensor) and weight.dim() == 2 else None


def rows_of(stages: Sequence[Stage]) -> int | None:
    """`num_rows` of the last stage's head; None where that stage is not among them."""
    return next((num_rows(stage.head) for stage in stages if stage.is_last and stage.head is not None), None)


def vocab_size_of(stages: Sequence[Stage]) -> int | None:
    """`rows_of`; None for a critic too."""
    rows = rows_of(stages)
    return None if rows == 1 else rows


def head_options_of(given: Mapping[str, Any] | None, memory_limit_bytes: int | None) -> dict[str, Any]:
    """Options of all of a last stage's calls; a memory_limit_bytes is shared by the microbatches in flight."""
    options = dict(given or {})
    unknown = sorted(options.keys() - set(HEAD_OPTIONS))
    if unknown:
        raise errors.ArgumentError(f"head_options has {', '.join(unknown)}; allowed are {', '.join(HEAD_OPTIONS)}")
    if memory_limit_bytes is not None:
        options["memory_limit_bytes"] = memory_limit_bytes
    if options.get("memory_limit_bytes") is not None and options.get("workspace_limit_bytes") is not None:
        raise errors.ArgumentError("workspace_limit_bytes and memory_limit_bytes are both given; the second one limits scratch too")
    return with_budget(options)


def check_output(stages: Sequence[Stage], output: Any, labels: Any, temperature: Any) -> None:
    """ArgumentError, ShapeError, DTypeError, before anything is computed: for what the output does not depend on as well."""
    checks.choice("output", output, OUTPUTS)
    rows = rows_of(stages)
    if rows is not None and (rows == 1 if output in ("logprobs", "entropy") else rows > 1 and output == "values"):
        raise errors.ArgumentError(f"output is {output!r}, and the last stage's head has {rows} rows; values are of one row, a critic's")
    if labels is not None and output != "logprobs":
        raise errors.ArgumentError(f'labels are for output="logprobs"; output is {output!r}')
    if labels is not None and (not isinstance(labels, Tensor) or labels.dtype not in (torch.int64, torch.int32)):
        got = f"a {labels.dtype} tensor" if isinstance(labels, Tensor) else f"a {type(labels).__name__}"
        raise errors.DTypeError(f"labels is {got}; it must be an int64 or int32 tensor")
    if labels is not None and labels.dim() != 1:
        raise errors.ShapeError(f"labels has shape {list(labels.shape)}; it must have one dimension, as packed_input_ids")
    checks.number("temperature", temperature)
    checks.temperature(temperature)
    if temperature != 1.0 and output not in ("logprobs", "entropy"):
        raise errors.ArgumentError(f'temperature is {temperature}; it is for output="logprobs" and "entropy", and output is {output!r}')


def compute_output(output: HeadOutput, what: str, labels: Tensor, temperature: float) -> Tensor:
    """One of OUTPUTS. labels: of log-probabilities, packed as the ids are."""
    if what == "logprobs":
        return output.logprobs(labels, temperature, shift=1)
    if what == "entropy":
        return output.entropy(temperature)
    if what == "hidden":
        return output.hidden
    return output.values() if what == "values" else output.logits()
