"""The last stage's output, as a loss function sees it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from flce import _heads, errors
from flce._options import taken_by
from flce.engine._stage import Stage
from flce.functional import linear_cross_entropy, linear_logprobs
from flce.loss import with_budget

_log = logging.getLogger("flce")
_said: set[str] = set()
# Heads whose own forward is known to be a product with their weight.
_compared: WeakSet[nn.Module] = WeakSet()


class HeadOutput:
    """Hidden states [T, D] of a packed microbatch, and the head that makes logits of them; requests are computed without logits.

        def loss_fn(output, packed_input_ids, cu_seqlens, **kwargs):
            return output.cross_entropy(packed_input_ids, shift=1), {}

    Labels are [T] int64 or int32, packed as the ids are. `shift` says how they lie and has no default: 1 for the ids themselves and labels
    like them, where row t is scored with the label of row t + 1 of the same sequence; 0 for labels that are aligned already. A row without
    such a label, or whose label is -100, has no target: log-probability 0, and no part in a loss.

    A loss function that was written for a tensor works as it is: torch's functions, operators, indexing and a tensor's attributes take the
    output for its logits [T, V], or for its values [T] where the head has one row. The logits are then in memory, which is logged once.

    Args:
        hidden: [T, D].
        head: nn.Linear or a module with .weight [V, D] and perhaps .bias [V]; a LoRA layer of peft will do. For any other module the first
            calls compare the product with its own forward on two rows, and raise ArgumentError where they differ.
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
        self._materialised: Tensor | None = None

    @staticmethod
    def of(stage: Stage, hidden: Tensor, cu_seqlens: Tensor, options: Mapping[str, Any] | None = None) -> HeadOutput:
        if stage.head is None:
            raise errors.ArgumentError(
                f"stage {stage.stage} of {stage.num_stages} has no head; the last stage's `head` is its output layer"
            )
        return HeadOutput(hidden, stage.head, stage.logit_scale, stage.softcap, cu_seqlens, options)

    @property
    def is_critic(self) -> bool:
        """Whether the head has one row: a value of each token."""
        return bool(_weight(self.head).shape[0] == 1)

    def _operands(self) -> _heads.Operands:
        _weight(self.head)
        if self.head not in _compared and _heads.forward_is_product(self.head, self.hidden):
            _compared.add(self.head)
        return _heads.operands(self.head, self.hidden)

    def _call(self, function: Callable[..., Any], labels: Tensor, shift: int, options: Mapping[str, Any]) -> Any:
        if self.is_critic:
            raise errors.ArgumentError("this head has one row, a critic's value; call output.values()")
        self.shifts.add(shift)
        hidden, weight, bias = self._operands()
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
        logits = self._operands().logits()
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits

    def values(self) -> Tensor:
        """[T] fp32 of a head with one row. Raises ArgumentError for a head with more."""
        if not self.is_critic:
            rows = _weight(self.head).shape[0]
            raise errors.ArgumentError(f"the head has {rows} rows; values are of a head with one (a critic's)")
        return self.logits()[:, 0].float()

    def tensor(self) -> Tensor:
        """Logits, or a critic's values: what this stands for in code written for tensors. Computed once."""
        if self._materialised is None:
            self._materialised = self.values() if self.is_critic else self.logits()
            if not self.is_critic:
                _say_once(
                    f"flce: the loss function takes its output for a tensor, so logits {list(self._materialised.shape)} of each microbatch "
                    "are in memory; output.cross_entropy(labels, shift=1) and output.logprobs(labels, shift=1) do without"
                )
        return self._materialised

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def as_tensor(value: Any) -> Any:
            return value.tensor() if isinstance(value, HeadOutput) else value

        return func(*tree_map(as_tensor, args), **tree_map(as_tensor, kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.tensor(), name)

    def __repr__(self) -> str:
        return f"HeadOutput(hidden={list(self.hidden.shape)}, head={self.head})"


def rows_of(stages: Sequence[Stage]) -> int | None:
    """Rows of the last stage's head; None where that stage is not among them, and for a head that has no weight [V, D]."""
    heads = [stage.head for stage in stages if stage.is_last and stage.head is not None]
    weight = _heads.weight_of(heads[0]) if heads else None
    return int(weight.shape[0]) if isinstance(weight, Tensor) and weight.dim() == 2 else None


def vocab_size_of(stages: Sequence[Stage]) -> int | None:
    """`rows_of`; None for a critic too."""
    rows = rows_of(stages)
    return None if rows == 1 else rows


def _weight(head: nn.Module) -> Tensor:
    weight = _heads.weight_of(head)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise errors.ArgumentError(f"the head is a {type(head).__name__} without a weight [V, D]; it must be an nn.Linear or stand for one")
    return weight


def _forward_operator(name: str) -> Any:
    def operator(self: HeadOutput, *args: Any) -> Any:
        return getattr(self.tensor(), name)(*(arg.tensor() if isinstance(arg, HeadOutput) else arg for arg in args))

    operator.__name__ = name
    return operator


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_OPERATORS = (
    *(f"__{name}__" for name in _BINARY),
    *(f"__r{name}__" for name in _BINARY if name not in ("mod",)),
    *(f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "abs", "invert", "getitem", "setitem", "len", "iter", "float")),
)
for _name in _OPERATORS:
    setattr(HeadOutput, _name, _forward_operator(_name))
HeadOutput.__hash__ = object.__hash__  # type: ignore[method-assign]


def _say_once(message: str) -> None:
    if message.split(",", 1)[0] not in _said:
        _said.add(message.split(",", 1)[0])
        _log.warning(message)


def head_options_of(given: Mapping[str, Any] | None, memory_limit_bytes: int | None) -> dict[str, Any]:
    """Options of all of a last stage's calls; a memory_limit_bytes is shared by the microbatches in flight."""
    options = dict(given or {})
    allowed = taken_by("engine")
    unknown = sorted(options.keys() - set(allowed))
    if unknown:
        raise errors.ArgumentError(f"head_options has {', '.join(unknown)}; allowed are {', '.join(allowed)}")
    if memory_limit_bytes is not None:
        options["memory_limit_bytes"] = memory_limit_bytes
    if options.get("memory_limit_bytes") is not None and options.get("workspace_limit_bytes") is not None:
        raise errors.ArgumentError("workspace_limit_bytes and memory_limit_bytes are both given; the second one limits scratch too")
    return with_budget(options)
