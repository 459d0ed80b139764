"""Keyword arguments of the public functions, for type checkers alone: what is returned depends on the return_ flags.

A function's arguments without its flags are one TypedDict; from it come one without any flag set (a tensor is returned), one for each flag
that is True (a tuple), and one whose flags are not known (either). Nothing imports this module at run time. A test compares the names with
the functions' own signatures, which say what the arguments mean.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

import torch
from torch import Tensor
from typing_extensions import Required

from flce.budget import MemoryBudget


class _Layer(TypedDict, total=False):
    bias: Tensor | None
    logit_scale: float | None
    softcap: float | None
    temperature: Tensor | float | None
    ignore_index: int
    shift: int
    cu_seqlens: Tensor | None
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


class _Loss(_Layer, total=False):
    reduction: str
    num_valid_tokens: Tensor | float | None
    label_smoothing: float
    z_loss: float
    token_weight: Tensor | None


class _CrossEntropy(_Loss, total=False):
    class_weight: Tensor | None
    dft: bool


class _Distillation(_Loss, total=False):
    target: Tensor | None
    hard_weight: float


class _HeadCall(TypedDict, total=False):
    num_valid_tokens: Tensor | float | None
    temperature: Tensor | float | None
    token_weight: Tensor | None
    cu_seqlens: Tensor | None
    grad_weight_out: Tensor | None


# linear_cross_entropy


class CrossEntropyAlone(_CrossEntropy, total=False):
    return_lse: Literal[False]
    return_logprobs: Literal[False]
    return_entropy: Literal[False]
    return_top1: Literal[False]
    return_log_sum_sq_probs: Literal[False]


class CrossEntropyWithLse(_CrossEntropy, total=False):
    return_lse: Required[Literal[True]]
    return_logprobs: bool
    return_entropy: bool
    return_top1: bool
    return_log_sum_sq_probs: bool


class CrossEntropyWithLogprobs(_CrossEntropy, total=False):
    return_lse: bool
    return_logprobs: Required[Literal[True]]
    return_entropy: bool
    return_top1: bool
    return_log_sum_sq_probs: bool


class CrossEntropyWithEntropy(_CrossEntropy, total=False):
    return_lse: bool
    return_logprobs: bool
    return_entropy: Required[Literal[True]]
    return_top1: bool
    return_log_sum_sq_probs: bool


class CrossEntropyWithTop1(_CrossEntropy, total=False):
    return_lse: bool
    return_logprobs: bool
    return_entropy: bool
    return_top1: Required[Literal[True]]
    return_log_sum_sq_probs: bool


class CrossEntropyWithLogSumSqProbs(_CrossEntropy, total=False):
    return_lse: bool
    return_logprobs: bool
    return_entropy: bool
    return_top1: bool
    return_log_sum_sq_probs: Required[Literal[True]]


class CrossEntropyOrMore(_CrossEntropy, total=False):
    return_lse: bool
    return_logprobs: bool
    return_entropy: bool
    return_top1: bool
    return_log_sum_sq_probs: bool


# linear_logprobs


class LogprobsAlone(_Layer, total=False):
    return_entropy: Literal[False]
    return_top1: Literal[False]
    return_log_sum_sq_probs: Literal[False]


class LogprobsWithEntropy(_Layer, total=False):
    return_entropy: Required[Literal[True]]
    return_top1: bool
    return_log_sum_sq_probs: bool


class LogprobsWithTop1(_Layer, total=False):
    return_entropy: bool
    return_top1: Required[Literal[True]]
    return_log_sum_sq_probs: bool


class LogprobsWithLogSumSqProbs(_Layer, total=False):
    return_entropy: bool
    return_top1: bool
    return_log_sum_sq_probs: Required[Literal[True]]


class LogprobsOrMore(_Layer, total=False):
    return_entropy: bool
    return_top1: bool
    return_log_sum_sq_probs: bool


# linear_topk_distillation


class DistillationAlone(_Distillation, total=False):
    return_lse: Literal[False]
    return_entropy: Literal[False]
    return_teacher_logprobs: Literal[False]


class DistillationWithLse(_Distillation, total=False):
    return_lse: Required[Literal[True]]
    return_entropy: bool
    return_teacher_logprobs: bool


class DistillationWithEntropy(_Distillation, total=False):
    return_lse: bool
    return_entropy: Required[Literal[True]]
    return_teacher_logprobs: bool


class DistillationWithTeacherLogprobs(_Distillation, total=False):
    return_lse: bool
    return_entropy: bool
    return_teacher_logprobs: Required[Literal[True]]


class DistillationOrMore(_Distillation, total=False):
    return_lse: bool
    return_entropy: bool
    return_teacher_logprobs: bool


# FusedLMHead, of a call


class HeadCallAlone(_HeadCall, total=False):
    return_lse: Literal[False]
    return_logprobs: Literal[False]
    return_entropy: Literal[False]
    return_top1: Literal[False]
    return_log_sum_sq_probs: Literal[False]


class HeadCallWithLse(_HeadCall, total=False):
    return_lse: Required[Literal[True]]
    return_logprobs: bool
    return_entropy: bool
    return_top1: bool
    return_log_sum_sq_probs: bool


class HeadCallWithLogprobs(_HeadCall, total=False):
    return_lse: bool
    return_logprobs: Required[Literal[True]]
    return_entropy: bool
    return_top1: bool
    return_log_sum_sq_probs: bool


class HeadCallWithEntropy(_HeadCall, total=False):
    return_lse: bool
    return_logprobs: bool
    return_entropy: Required[Literal[True]]
    return_top1: bool
    return_log_sum_sq_probs: bool


class HeadCallWithTop1(_HeadCall, total=False):
    return_lse: bool
    return_logprobs: bool
    return_entropy: bool
    return_top1: Required[Literal[True]]
    return_log_sum_sq_probs: bool


class HeadCallWithLogSumSqProbs(_HeadCall, total=False):
    return_lse: bool
    return_logprobs: bool
    return_entropy: bool
    return_top1: bool
    return_log_sum_sq_probs: Required[Literal[True]]


class HeadCallOrMore(_HeadCall, total=False):
    return_lse: bool
    return_logprobs: bool
    return_entropy: bool
    return_top1: bool
    return_log_sum_sq_probs: bool
