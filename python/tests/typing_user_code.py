"""User code as a type checker sees it: checked by mypy (`tools/test_python.sh typing`), never run."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import flce


def functions(hidden: Tensor, head: nn.Linear, target: Tensor, ids: Tensor, probs: Tensor, flag: bool, group: Any) -> None:
    assert_type(flce.linear_cross_entropy(hidden, head, target), Tensor)
    assert_type(flce.linear_cross_entropy(hidden, head.weight, target, bias=head.bias, shift=1, softcap=30.0), Tensor)
    assert_type(flce.linear_cross_entropy(hidden, head, target, return_lse=False, process_group=group), Tensor)
    assert_type(flce.linear_cross_entropy(hidden, head, target, return_lse=True), tuple[Tensor, ...])
    assert_type(flce.linear_cross_entropy(hidden, head, target, return_logprobs=True, return_entropy=flag), tuple[Tensor, ...])
    assert_type(flce.linear_cross_entropy(hidden, head, target, return_entropy=True), tuple[Tensor, ...])
    assert_type(flce.linear_cross_entropy(hidden, head, target, return_top1=True, return_lse=False), tuple[Tensor, ...])
    assert_type(flce.linear_cross_entropy(hidden, head, target, return_log_sum_sq_probs=True), tuple[Tensor, ...])
    assert_type(flce.linear_cross_entropy(hidden, head, target, return_lse=flag), Tensor | tuple[Tensor, ...])
    assert_type(flce.linear_cross_entropy([hidden, hidden], head, target, shift=[1, 2], loss_weights=[1.0, 0.3]), tuple[Any, ...])
    flce.linear_cross_entropy(hidden, head, target).backward()
    loss, lse, logprobs = flce.linear_cross_entropy(hidden, head, target, return_lse=True, return_logprobs=True)
    (loss + lse.mean() + logprobs.sum()).backward()

    assert_type(flce.linear_logprobs(hidden, head, target, temperature=0.7), Tensor)
    assert_type(flce.linear_logprobs(hidden, head, target, return_entropy=True), tuple[Tensor, ...])
    assert_type(flce.linear_logprobs(hidden, head, target, return_top1=True, return_entropy=False), tuple[Tensor, ...])
    assert_type(flce.linear_logprobs(hidden, head, target, return_log_sum_sq_probs=True), tuple[Tensor, ...])
    assert_type(flce.linear_logprobs(hidden, head, target, return_entropy=flag), Tensor | tuple[Tensor, ...])

    assert_type(flce.linear_logprobs_at(hidden, head, ids, softcap=30.0), Tensor)
    assert_type(flce.linear_logprobs_at(hidden, head, ids, return_lse=True), tuple[Tensor, ...])
    assert_type(flce.linear_logprobs_at(hidden, head, ids, return_entropy=flag), Tensor | tuple[Tensor, ...])

    assert_type(flce.linear_topk_distillation(hidden, head, ids, probs, target=target, hard_weight=0.5), Tensor)
    assert_type(flce.linear_topk_distillation(hidden, head, ids, probs, return_lse=True), tuple[Tensor, ...])
    assert_type(flce.linear_topk_distillation(hidden, head, ids, probs, return_entropy=True), tuple[Tensor, ...])
    assert_type(flce.linear_topk_distillation(hidden, head, ids, probs, return_teacher_logprobs=True), tuple[Tensor, ...])
    assert_type(flce.linear_topk_distillation(hidden, head, ids, probs, return_lse=flag), Tensor | tuple[Tensor, ...])


def options_in_a_dictionary(hidden: Tensor, head: nn.Linear, target: Tensor, options: dict[str, Any]) -> Tensor:
    loss: Tensor = flce.linear_cross_entropy(hidden, head, target, **options)
    return loss


def losses(hidden: Tensor, head: nn.Linear, labels: Tensor) -> None:
    loss = flce.LinearCrossEntropyLoss(head, softcap=30.0, shift=1)
    assert_type(loss(hidden, labels, num_valid_tokens=7), Tensor)
    assert_type(loss.forward_logits(hidden), Tensor)
    assert_type(flce.PipelineFusedLoss(head, shift=1)(hidden, labels), Tensor)


def heads(hidden: Tensor, labels: Tensor, maybe: Tensor | None, flag: bool) -> None:
    head = flce.FusedLMHead(16, 32, bias=False, shift=1)
    assert_type(head(hidden), Tensor)
    assert_type(head(hidden, labels), Tensor)
    assert_type(head(hidden, labels=maybe), Tensor)
    assert_type(head(hidden, labels=labels, return_lse=True), tuple[Tensor, ...])
    assert_type(head.forward(hidden, labels, return_entropy=True, num_valid_tokens=3), tuple[Tensor, ...])
    assert_type(head(hidden, labels=labels, return_top1=flag), Tensor | tuple[Tensor, ...])


def as_values(hidden: Tensor, head: nn.Linear, target: Tensor) -> None:
    compiled = torch.compile(flce.linear_cross_entropy, fullgraph=True)
    compiled(hidden, head, target)
    shifted = functools.partial(flce.linear_cross_entropy, shift=1)
    shifted(hidden, head, target)


def mistakes(hidden: Tensor, head: nn.Linear, target: Tensor) -> None:
    flce.linear_cross_entropy(hidden, head, target, soft_cap=30.0)  # type: ignore[call-overload]
    flce.linear_cross_entropy(hidden, head, target, softcap="30")  # type: ignore[call-overload]
    flce.linear_cross_entropy(hidden, head)  # type: ignore[call-overload]
    flce.linear_logprobs(hidden, head, target, return_lse=True)  # type: ignore[call-overload]
    flce.linear_cross_entropy(hidden, head, target, return_lse=True).backward()  # type: ignore[attr-defined]
    flce.FusedLMHead(16, 32, shift=1)(hidden, labels=target, softcap=3.0)  # type: ignore[call-overload]
