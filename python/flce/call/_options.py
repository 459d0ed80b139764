"""Options of the public functions, of losses and of adapters: one table of them, their checks, and the `CallOptions` of a call.

Every refusal names the option, its value and the values that are allowed.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from flce import errors
from flce.budget import MemoryBudget
from flce.call._spec_text import REDUCTIONS, reduction_code, spec_text, workspace_limit
from flce.call._targets import check_ignore_index
from flce.core import _frame, _retain, checks
from flce.core._frame import CallOptions
from flce.fp8 import refuse, spec_keys

REDUCTION_NAMES = {code: name for name, code in REDUCTIONS.items()}
OUTPUTS = (*_frame.VALUES[:-1], "top1", _frame.VALUES[-1])  # a Spec's outputs, in the order in which callers get them


class Option(NamedTuple):
    """One option, wherever it is taken."""

    kind: str  # logits, training (what is trained on; in no model's own loss), kernels (flce's alone), ranks, call or outputs
    annotation: str
    default: Any
    allowed: str
    places: str  # names of functions without linear_ and of adapters; "losses" are LinearCrossEntropyLoss and those built on it
    allows: Callable[[float], bool] | None = None  # whether a number is in the range that `allowed` says


_ALL = "cross_entropy logprobs topk_distillation"
_AT = f"{_ALL} logprobs_at"
_LOSS = "cross_entropy topk_distillation"
_CODES = "cross_entropy logprobs logprobs_at"
_FLAG = "True, False"
_BYTES = "from 1 to 2^63 - 1"
_WHOLE = "0 or above"
OPTIONS = {
    "z_loss": Option("training", "float", 0.0, "finite and 0 or above", f"{_LOSS} losses megatron torchtitan", lambda x: 0 <= x < math.inf),
    "label_smoothing": Option("training", "float", 0.0, "from 0 to 1", f"{_LOSS} losses megatron torchtitan", lambda x: 0 <= x <= 1),
    "logit_scale": Option(
        "logits", "float | None", None, "finite and not 0", f"{_AT} losses torchtitan", lambda x: math.isfinite(x) and x != 0
    ),
    "softcap": Option(
        "logits", "float | None", None, "finite and 0 (off) or above", f"{_AT} losses megatron torchtitan", lambda x: 0 <= x < math.inf
    ),
    "temperature": Option("training", "Tensor | float | None", 1.0, "2^-100 to 2^100; [...] fp32", f"{_AT} losses megatron"),
    "reduction": Option("training", "str", "mean", ", ".join(REDUCTIONS), f"{_LOSS} losses"),
    "class_weight": Option("training", "Tensor | None", None, "[V]", "cross_entropy losses"),
    "dft": Option("training", "bool", False, _FLAG, "cross_entropy losses megatron"),
    "hard_weight": Option("training", "float", 0.0, "from 0 to 1", "topk_distillation"),
    "workspace_limit_bytes": Option(
        "kernels", "int | MemoryBudget | None", None, f"{_BYTES}; a MemoryBudget", f"{_AT} losses megatron torchtitan engine"
    ),
    "retain_in_grad_weight": Option("kernels", "bool | None", None, f"{_FLAG}, None", f"{_AT} losses megatron engine"),
    "batch_invariant": Option("kernels", "bool", False, _FLAG, f"{_AT} losses megatron engine"),
    "fp8": Option("kernels", "Fp8 | None", None, "a flce.Fp8", "cross_entropy logprobs losses"),
    "memory_limit_bytes": Option("kernels", "int | None", None, _BYTES, "losses engine"),
    "process_group": Option("ranks", "Any", None, "a ProcessGroup; a DeviceMesh of one dimension", f"{_AT} losses"),
    "sequence_parallel": Option("ranks", "bool", False, _FLAG, f"{_AT} losses"),
    "vocab_start": Option("ranks", "int | None", None, _WHOLE, f"{_AT} losses"),
    "vocab_size": Option("ranks", "int | None", None, _WHOLE, f"{_AT} losses megatron"),
    "reduce_dtype": Option("ranks", "torch.dtype | None", None, "hidden's, torch.float32", f"{_AT} losses megatron"),
    "reduce_grad_hidden": Option("ranks", "bool", True, _FLAG, f"{_AT} losses"),
    "bias": Option("call", "Tensor | None", None, "[V]", _AT),
    "class_offset": Option("call", "Tensor | None", None, "[V] fp32", _AT),
    "weight_scale": Option("call", "Tensor | None", None, "[V]; [V / 128, D / 128]; [V, D / 16]", _CODES),
    "weight_tensor_scale": Option("call", "Tensor | float | None", None, "one element", _CODES),
    "target": Option("call", "Tensor | None", None, "[...]", "topk_distillation"),
    "ignore_index": Option("call", "int", -100, "of 64 bits", f"{_ALL} megatron"),
    "shift": Option("call", "int", 0, _WHOLE, _ALL),
    "cu_seqlens": Option("call", "Tensor | None", None, "[num_sequences + 1]", _ALL),
    "num_valid_tokens": Option("call", "Tensor | float | None", None, "finite and 0 or above", _LOSS),
    "token_weight": Option("call", "Tensor | None", None, "[...]", _LOSS),
    "grad_weight_out": Option("call", "Tensor | None", None, "[V, D]", _AT),
    "offsets": Option("call", "Tensor | None", None, "[N + 1]", "logprobs_at"),
    "normalize": Option("call", "str", "vocabulary", "vocabulary, support", "logprobs_at"),
    "max_ids": Option("call", "int | None", None, "1 or above", "logprobs_at"),
    "loss_weights": Option("call", "Sequence[float] | None", None, "a number for each of several hidden states", "cross_entropy"),
    "return_lse": Option("outputs", "bool", False, _FLAG, f"{_LOSS} logprobs_at"),
    "return_logprobs": Option("outputs", "bool", False, _FLAG, "cross_entropy"),
    "return_entropy": Option("outputs", "bool", False, _FLAG, _AT),
    "return_top1": Option("outputs", "bool", False, _FLAG, "cross_entropy logprobs"),
    "return_log_sum_sq_probs": Option("outputs", "bool", False, _FLAG, "cross_entropy logprobs"),
    "return_teacher_logprobs": Option("outputs", "bool", False, _FLAG, "topk_distillation"),
}


def taken_by(place: str) -> tuple[str, ...]:
    """Names of the options that a function or an adapter takes."""
    return tuple(name for name, option in OPTIONS.items() if place in option.places.split())


def of_kind(*kinds: str) -> frozenset[str]:
    return frozenset(name for name, option in OPTIONS.items() if option.kind in kinds)


def way_of(name: str) -> str:
    """How an option of a function reaches a call: among its tensors, in its CallOptions, or in what says how the weight lies over ranks."""
    option = OPTIONS[name]
    return "ranks" if option.kind == "ranks" else "tensors" if option.annotation.startswith("Tensor") else "options"


def parameters_of(place: str) -> list[inspect.Parameter]:
    options = {name: OPTIONS[name] for name in taken_by(place)}
    kind = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(name, kind, default=each.default, annotation=each.annotation) for name, each in options.items()]


# ── A call's ────────────────────────────────────────


def call_options(**given: Any) -> CallOptions:
    """Options of a call, checked, by their names in OPTIONS; return_loss and teacher_top_k in addition."""
    if not torch.compiler.is_compiling():
        try:
            return known(**given)
        except TypeError:  # an option that cannot be hashed is refused below
            pass
    return _checked(**given)


def _checked(
    *,
    reduction: Any = "mean",
    ignore_index: Any = -100,
    workspace_limit_bytes: Any = None,
    retain_in_grad_weight: Any = None,
    temperature: Any = None,
    return_teacher_logprobs: Any = False,
    named_logprobs: bool = False,
    **of_spec: Any,
) -> CallOptions:
    refuse(of_spec)
    flags = {name: of_spec.pop(name) for name in _FLAGS.values() if name in of_spec}
    asked = asked_outputs(flags)
    spec = spec_text(written_outputs(asked, of_spec.get("dft", False)), **of_spec)
    return CallOptions(
        spec=spec,
        outputs=_frame.outputs_of(spec),
        ignore_index=check_ignore_index(ignore_index),
        reduction=reduction_code(reduction),
        workspace_limit_bytes=workspace_limit(workspace_limit_bytes),
        retain=retain_choice(retain_in_grad_weight, workspace_limit_bytes),
        asked=asked,
        teacher_logprobs=return_teacher_logprobs is True,
        temperature=temperature_number(temperature),
        named_logprobs=named_logprobs,
    )


# Types belong to the key: 1, 1.0 and True are equal, and not all of them are taken for every option.
known = functools.lru_cache(maxsize=1024, typed=True)(_checked)
_FLAGS = {name: f"return_{name}" for name in OUTPUTS}


def asked_outputs(flags: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of OUTPUTS whose flags are set."""
    for name, flag in flags.items():
        checks.flag(name, flag)
    return tuple(name for name in OUTPUTS if flags.get(_FLAGS[name], False))


def written_outputs(asked: Iterable[str], dft: Any) -> tuple[str, ...]:
    """Outputs that a kernel has to write, in the order of OUTPUTS: backward of dft reads the targets' log-probabilities."""
    return tuple(name for name in OUTPUTS if name in asked or (dft is True and name == "logprobs"))


def retain_choice(given: bool | None, limit: int | MemoryBudget | None = None) -> _retain.Retain:
    if given is not None and not isinstance(given, bool):
        raise errors.ArgumentError(f"retain_in_grad_weight is {given!r}; allowed are True, False and None (automatic)")
    return _retain.Retain.within(given, limit) if isinstance(limit, MemoryBudget) else _retain.Retain(_retain.CHOICES[given])


def temperature_number(given: Any) -> float | None:
    """A temperature that is no tensor; None where it changes nothing."""
    if given is None:
        return None
    if not isinstance(given, numbers.Real):
        raise errors.DTypeError(f"temperature is a {type(given).__name__}; it must be a number or a float32 tensor of target's shape")
    number = float(given)
    checks.temperature(number)
    return None if number == 1.0 else number


# ── A loss's ────────────────────────────────────────


def check_options(options: Mapping[str, Any], shift: Any) -> None:
    """Raises ArgumentError for what is no option of a loss or no shift, SpecError for a number out of its range."""
    allowed = sorted(taken_by("losses"))
    unknown = sorted(options.keys() - set(allowed))
    if unknown:
        raise errors.ArgumentError(f"{unknown[0]} is not an option of the loss; allowed are {', '.join(allowed)}")
    reduction_code(options.get("reduction", "mean"))
    temperature_number(options.get("temperature"))
    for name, option in OPTIONS.items():
        value = options.get(name)
        if option.allows is not None and value is not None and not (isinstance(value, numbers.Real) and option.allows(float(value))):
            raise errors.SpecError(f"{name} is {value!r}; it must be a number, {option.allowed}")
    if not isinstance(shift, int) or shift < 0:
        raise errors.ArgumentError(f"shift is {shift!r}; it must be an integer of 0 or more")
    for name in ("dft", "batch_invariant"):
        checks.flag(name, options.get(name, False))
    spec_keys(options.get("fp8"))
    refuse(options)
    workspace_limit(options.get("workspace_limit_bytes"))
    retain_choice(options.get("retain_in_grad_weight"))
    if options.get("memory_limit_bytes") is not None and options.get("workspace_limit_bytes") is not None:
        raise errors.ArgumentError(
            "memory_limit_bytes and workspace_limit_bytes are given; give the limit on all calls together, or a call's"
        )
