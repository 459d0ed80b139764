"""Keyword arguments of the public functions, for type checkers alone: what is returned depends on the return_ flags.

A function's arguments without its flags are one TypedDict; from it come one without any flag set (a tensor is returned), one for each flag
that is True (a tuple), and one whose flags are not known (either). Nothing imports this module at run time. A test compares it with the
table of options and with the functions' own signatures.
"""

# ruff: noqa: UP013  # a flag is a line, not a class

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from flce.budget import MemoryBudget
from flce.fp8 import Fp8


class _EveryCall(TypedDict, total=False):
    bias: Tensor | None
    class_offset: Tensor | None
    logit_scale: float | None
    softcap: float | None
    batch_invariant: bool
    workspace_limit_bytes: int | MemoryBudget | None
    retain_in_grad_weight: bool | None
    grad_weight_out: Tensor | None
    process_group: Any
    sequence_parallel: bool
    vocab_start: int | None
    vocab_size: int | None
    reduce_dtype: torch.dtype | None
    reduce_grad_hidden: bool


class _Head(_EveryCall, total=False):
    temperature: Tensor | float | None


class _Layer(_Head, total=False):
    ignore_index: int
    shift: int
    cu_seqlens: Tensor | None


class _Codes(TypedDict, total=False):
    weight_scale: Tensor | None
    weight_tensor_scale: Tensor | float | None


class _Formats(_Codes, total=False):
    fp8: Fp8 | None


class _Scored(_Layer, _Formats, total=False): ...


class _LogprobsAt(_Head, _Codes, total=False):
    offsets: Tensor | None
    normalize: str
    max_ids: int | None


class _Loss(_Layer, total=False):
    reduction: str
    num_valid_tokens: Tensor | float | None
    label_smoothing: float
    z_loss: float
    token_weight: Tensor | None


class _CrossEntropy(_Loss, _Formats, total=False):
    class_weight: Tensor | None
    dft: bool
    loss_weights: Sequence[float] | None


class _Distillation(_Loss, total=False):
    target: Tensor | None
    hard_weight: float


class _HeadCall(TypedDict, total=False):
    class_offset: Tensor | None
    num_valid_tokens: Tensor | float | None
    temperature: Tensor | float | None
    token_weight: Tensor | None
    cu_seqlens: Tensor | None
    grad_weight_out: Tensor | None
    loss_weights: Sequence[float] | None


# Flags: not known, not set, set.
_Lse = TypedDict("_Lse", {"return_lse": bool}, total=False)
_NoLse = TypedDict("_NoLse", {"return_lse": Literal[False]}, total=False)
_WithLse = TypedDict("_WithLse", {"return_lse": Literal[True]})
_Logprobs = TypedDict("_Logprobs", {"return_logprobs": bool}, total=False)
_NoLogprobs = TypedDict("_NoLogprobs", {"return_logprobs": Literal[False]}, total=False)
_WithLogprobs = TypedDict("_WithLogprobs", {"return_logprobs": Literal[True]})
_Entropy = TypedDict("_Entropy", {"return_entropy": bool}, total=False)
_NoEntropy = TypedDict("_NoEntropy", {"return_entropy": Literal[False]}, total=False)
_WithEntropy = TypedDict("_WithEntropy", {"return_entropy": Literal[True]})
_Top1 = TypedDict("_Top1", {"return_top1": bool}, total=False)
_NoTop1 = TypedDict("_NoTop1", {"return_top1": Literal[False]}, total=False)
_WithTop1 = TypedDict("_WithTop1", {"return_top1": Literal[True]})
_LogSumSqProbs = TypedDict("_LogSumSqProbs", {"return_log_sum_sq_probs": bool}, total=False)
_NoLogSumSqProbs = TypedDict("_NoLogSumSqProbs", {"return_log_sum_sq_probs": Literal[False]}, total=False)
_WithLogSumSqProbs = TypedDict("_WithLogSumSqProbs", {"return_log_sum_sq_probs": Literal[True]})
_TeacherLogprobs = TypedDict("_TeacherLogprobs", {"return_teacher_logprobs": bool}, total=False)
_NoTeacherLogprobs = TypedDict("_NoTeacherLogprobs", {"return_teacher_logprobs": Literal[False]}, total=False)
_WithTeacherLogprobs = TypedDict("_WithTeacherLogprobs", {"return_teacher_logprobs": Literal[True]})


# linear_cross_entropy


class CrossEntropyAlone(_CrossEntropy, _NoLse, _NoLogprobs, _NoEntropy, _NoTop1, _NoLogSumSqProbs): ...


class CrossEntropyWithLse(_CrossEntropy, _WithLse, _Logprobs, _Entropy, _Top1, _LogSumSqProbs): ...


class CrossEntropyWithLogprobs(_CrossEntropy, _Lse, _WithLogprobs, _Entropy, _Top1, _LogSumSqProbs): ...


class CrossEntropyWithEntropy(_CrossEntropy, _Lse, _Logprobs, _WithEntropy, _Top1, _LogSumSqProbs): ...


class CrossEntropyWithTop1(_CrossEntropy, _Lse, _Logprobs, _Entropy, _WithTop1, _LogSumSqProbs): ...


class CrossEntropyWithLogSumSqProbs(_CrossEntropy, _Lse, _Logprobs, _Entropy, _Top1, _WithLogSumSqProbs): ...


class CrossEntropyOrMore(_CrossEntropy, _Lse, _Logprobs, _Entropy, _Top1, _LogSumSqProbs): ...


class CrossEntropyOfSeveral(_EveryCall, _Formats, _Lse, _Logprobs, _Entropy, _Top1, _LogSumSqProbs, total=False):
    """Options of a call of several hidden states: some are one for all, or one for each."""

    temperature: Tensor | float | Sequence[Tensor | float] | None
    ignore_index: int
    shift: int | Sequence[int]
    cu_seqlens: Tensor | Sequence[Tensor | None] | None
    reduction: str
    num_valid_tokens: Tensor | float | Sequence[Tensor | float | None] | None
    label_smoothing: float
    z_loss: float
    token_weight: Tensor | Sequence[Tensor | None] | None
    class_weight: Tensor | None
    dft: bool
    loss_weights: Sequence[float] | None


# linear_logprobs


class LogprobsAlone(_Scored, _NoEntropy, _NoTop1, _NoLogSumSqProbs): ...


class LogprobsWithEntropy(_Scored, _WithEntropy, _Top1, _LogSumSqProbs): ...


class LogprobsWithTop1(_Scored, _Entropy, _WithTop1, _LogSumSqProbs): ...


class LogprobsWithLogSumSqProbs(_Scored, _Entropy, _Top1, _WithLogSumSqProbs): ...


class LogprobsOrMore(_Scored, _Entropy, _Top1, _LogSumSqProbs): ...


# linear_logprobs_at


class LogprobsAtAlone(_LogprobsAt, _NoLse, _NoEntropy): ...


class LogprobsAtWithLse(_LogprobsAt, _WithLse, _Entropy): ...


class LogprobsAtWithEntropy(_LogprobsAt, _Lse, _WithEntropy): ...


class LogprobsAtOrMore(_LogprobsAt, _Lse, _Entropy): ...


# linear_topk_distillation


class DistillationAlone(_Distillation, _NoLse, _NoEntropy, _NoTeacherLogprobs): ...


class DistillationWithLse(_Distillation, _WithLse, _Entropy, _TeacherLogprobs): ...


class DistillationWithEntropy(_Distillation, _Lse, _WithEntropy, _TeacherLogprobs): ...


class DistillationWithTeacherLogprobs(_Distillation, _Lse, _Entropy, _WithTeacherLogprobs): ...


class DistillationOrMore(_Distillation, _Lse, _Entropy, _TeacherLogprobs): ...


# FusedLMHead, of a call


class HeadCallAlone(_HeadCall, _NoLse, _NoLogprobs, _NoEntropy, _NoTop1, _NoLogSumSqProbs): ...


class HeadCallWithLse(_HeadCall, _WithLse, _Logprobs, _Entropy, _Top1, _LogSumSqProbs): ...


class HeadCallWithLogprobs(_HeadCall, _Lse, _WithLogprobs, _Entropy, _Top1, _LogSumSqProbs): ...


class HeadCallWithEntropy(_HeadCall, _Lse, _Logprobs, _WithEntropy, _Top1, _LogSumSqProbs): ...


class HeadCallWithTop1(_HeadCall, _Lse, _Logprobs, _Entropy, _WithTop1, _LogSumSqProbs): ...


class HeadCallWithLogSumSqProbs(_HeadCall, _Lse, _Logprobs, _Entropy, _Top1, _WithLogSumSqProbs): ...


class HeadCallOrMore(_HeadCall, _Lse, _Logprobs, _Entropy, _Top1, _LogSumSqProbs): ...
