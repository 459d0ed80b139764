"""Replaces TRL's divergences from a teacher: DistillationTrainer's ChunkedDivergenceFunction, of two whole softmaxes, which is
`flce.linear_divergence`, and AsyncDistillationTrainer's `_chunked_jsd_loss`, of a teacher that is known by its likeliest tokens.

The latter is a function of the student's log-probabilities at those tokens, which `flce.linear_logprobs_at` has with their gradient.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from flce import divergence as two_heads
from flce import errors, functional
from flce.call._arguments import MOST_TEACHER_TOP_K
from flce.core._frame import is_hidden_major
from flce.core._once import say_once
from flce.trl import _own


class ChunkedDivergenceFunction:
    """Stands in for TRL's autograd function of this name: `apply` has its arguments and outputs, which autograd follows as before."""

    @staticmethod
    def apply(
        student_hidden: Tensor,
        student_weight: Tensor,
        student_bias: Tensor | None,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        beta: float,
        temperature: float = 1.0,
        student_logit_scale: float = 1.0,
        student_final_logit_softcapping: float | None = None,
        teacher_logit_scale: float = 1.0,
        teacher_final_logit_softcapping: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(divergence, the student's entropy), [N] fp32 each; the divergence has gradients of the student's hidden, weight and bias.

        student_hidden [N, H_s], student_weight [V, H_s], teacher_hidden [N, H_t], teacher_weight [V or more, H_t], biases of as many
        classes. Weights of another dtype than that in which TRL computes logits are copied in it, and weights that lie in memory in
        different ways as [V, H]. What `ChunkedLogProbFunction` leaves to TRL, heads of two dtypes, a bias of another dtype, a beta within
        2^-10 of 0 or 1, and on a GPU float32, is TRL's own function's.
        """
        _own.check_temperature(temperature)
        given = (
            *(student_hidden, student_weight, student_bias, teacher_hidden, teacher_weight, teacher_bias, beta, temperature),
            *(student_logit_scale, student_final_logit_softcapping, teacher_logit_scale, teacher_final_logit_softcapping),
        )
        formula = {
            "student_logit_scale": student_logit_scale,
            "student_final_logit_softcapping": student_final_logit_softcapping,
            "teacher_logit_scale": teacher_logit_scale,
            "teacher_final_logit_softcapping": teacher_final_logit_softcapping,
        }
        also = _why_not_two_heads(student_hidden, teacher_hidden, teacher_weight, (student_bias, teacher_bias), beta)
        if not _own.computes("ChunkedDivergenceFunction", student_hidden, student_weight, formula, also):
            return _own.TWO_HEADS.own().apply(*given)  # type: ignore[no-any-return]
        dtype, classes = _own.compute_dtype(student_hidden), student_weight.shape[0]
        student, teacher = _lie_alike(student_weight.to(dtype), teacher_weight[:classes].detach().to(dtype))
        made = two_heads.linear_divergence(
            student_hidden.to(dtype),
            student,
            teacher_hidden.detach().to(dtype),
            teacher,
            beta=beta,
            temperature=temperature,
            student_bias=student_bias,
            teacher_bias=None if teacher_bias is None else teacher_bias[:classes].detach(),
            student_logit_scale=student_logit_scale,
            student_softcap=student_final_logit_softcapping,
            teacher_logit_scale=teacher_logit_scale,
            teacher_softcap=teacher_final_logit_softcapping,
            return_student_entropy=True,
        )
        assert isinstance(made, two_heads.Divergence) and made.student_entropy is not None
        return made.divergence, made.student_entropy


def _lie_alike(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Both weights, copied as [V, H] where they lie in memory in different ways."""
    if is_hidden_major(student) == is_hidden_major(teacher):
        return student, teacher
    return student.contiguous(), teacher.contiguous()


def _why_not_two_heads(
    student: Tensor, teacher: Tensor, teacher_weight: Tensor, biases: tuple[Tensor | None, ...], beta: float
) -> str | None:
    dtype, of_teacher = _own.compute_dtype(student), _own.compute_dtype(teacher)
    if hasattr(teacher_weight, "ds_id"):
        return "the teacher's weight is divided by DeepSpeed's ZeRO-3"
    if beta not in (0, 1) and not two_heads.is_mixture(beta):
        return f"beta is {beta}, for whose mixture float32 has no digits"
    if any(bias is not None and bias.dtype is not dtype for bias in biases):
        return f"a bias is of another dtype than {dtype}, and TRL does not round it"
    if dtype is not of_teacher:
        return f"the student computes in {dtype} and the teacher in {of_teacher}"
    if student.device.type == "cuda" and dtype is torch.float32:
        return "hidden states are in torch.float32, and flce's divergence is for 16-bit dtypes on a GPU"
    return None


def chunked_jsd_loss(
    hidden_valid: Tensor,
    lm_head_weight: Tensor,
    lm_head_bias: Tensor | None,
    logit_scale: float,
    final_logit_softcapping: float | None,
    target_ids: Tensor,
    teacher_target_logps: Tensor,
    valid_candidate_mask: Tensor,
    beta: float,
    temperature: float,
    add_tail_bucket: bool,
    teacher_id_idx: Tensor | None,
    num_teachers: int,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, divergence, student's entropy, teacher's entropy, [count, divergence, teacher's entropy] of each teacher), fp32 sums over
    tokens; the loss is the divergence with its gradients.

    hidden_valid [N, H], lm_head_weight [V, H], lm_head_bias [V], target_ids, teacher_target_logps and valid_candidate_mask [N, K],
    teacher_id_idx [N]. The divergence itself is TRL's. 16-bit hidden states beside an fp32 weight are read as fp32, as TRL does. K beyond
    1024, and what `ChunkedLogProbFunction` leaves to TRL, is TRL's own function's.
    """
    given = (
        *(hidden_valid, lm_head_weight, lm_head_bias, logit_scale, final_logit_softcapping, target_ids, teacher_target_logps),
        *(valid_candidate_mask, beta, temperature, add_tail_bucket, teacher_id_idx, num_teachers, chunk_size),
    )
    _own.check_temperature(temperature)
    formula = {"logit_scale": logit_scale, "final_logit_softcapping": final_logit_softcapping}
    if target_ids.shape[-1] > MOST_TEACHER_TOP_K:
        say_once(f"flce.trl: TRL's own _chunked_jsd_loss computes more than {MOST_TEACHER_TOP_K} classes a token")
        _own.count(fused=False)
        return _own.DIVERGENCE.own()(*given)  # type: ignore[no-any-return]
    if not _own.computes("_chunked_jsd_loss", hidden_valid, lm_head_weight, formula):
        return _own.DIVERGENCE.own()(*given)  # type: ignore[no-any-return]
    dtype = torch.promote_types(hidden_valid.dtype, lm_head_weight.dtype)
    ids = _classes(target_ids, valid_candidate_mask, lm_head_weight.shape[0])
    at_ids, entropy = functional.linear_logprobs_at(
        hidden_valid.to(dtype),
        _own.as_read(lm_head_weight, dtype),
        ids,
        bias=None if lm_head_bias is None else _own.as_read(lm_head_bias, dtype),
        logit_scale=logit_scale,
        softcap=final_logit_softcapping,
        temperature=temperature,
        return_entropy=True,
    )
    divergence, teacher, support = _divergence(at_ids, teacher_target_logps, valid_candidate_mask, beta, add_tail_bucket)
    loss = divergence.sum()
    of_teachers = _of_teachers(divergence.detach(), teacher, support, teacher_id_idx, num_teachers)
    return loss, loss.detach().clone(), entropy.detach().sum(), *of_teachers


def _classes(ids: Tensor, valid: Tensor, vocab_size: int) -> Tensor:
    """-1 where there is none; a token without any names class 0, which the mask leaves out, since its entropy counts. Raises ArgumentError
    for a class that the student does not have, where TRL's own function has a RuntimeError; it waits for the device, as the trainer's
    metrics do in every step."""
    ids = torch.where(valid, ids.clamp_min(0), -1)
    ids[..., :1] = torch.where(valid.any(-1, keepdim=True), ids[..., :1], 0)
    largest = int(ids.max()) if ids.numel() else -1
    if largest >= vocab_size:
        raise errors.ArgumentError(
            f"target_ids has class {largest}; the student has {vocab_size}, from 0 on: teacher and student must share a vocabulary"
        )
    return ids


def _of_teachers(parts: Tensor, teacher: Tensor, support: Tensor, index: Tensor | None, num_teachers: int) -> tuple[Tensor, Tensor]:
    """The teachers' entropy, and what each of them did, [3 · num_teachers]."""
    probs = torch.where(support, teacher.exp(), 0.0)
    entropy = -(probs * torch.where(support, teacher, 0.0)).nan_to_num(nan=0.0).sum(-1)
    each = entropy.new_zeros(num_teachers, 3)
    if index is not None:
        divergence = parts.sum(-1)
        each.index_add_(0, index, torch.stack([torch.ones_like(divergence), divergence, entropy], dim=1))
    return entropy.sum(), each.flatten()


def _divergence(student: Tensor, teacher: Tensor, valid: Tensor, beta: float, add_tail_bucket: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Runs TRL's own functions on log-probabilities [N, K]: parts of the divergence, the teacher's distribution, and a mask of its
    classes."""
    module: Any = sys.modules[_own.DIVERGENCE.module]
    student = student.masked_fill(~valid, float("-inf"))
    teacher = teacher.float().masked_fill(~valid, float("-inf"))
    support = valid
    if add_tail_bucket:
        student, support = module._add_tail_bucket(student, valid)
        teacher, _ = module._add_tail_bucket(teacher, valid)
    else:
        student = student - student.logsumexp(-1, keepdim=True)
        teacher = teacher - teacher.logsumexp(-1, keepdim=True)
    return module._jsd_divergence(student, teacher, beta=beta, support_mask=support), teacher, support
