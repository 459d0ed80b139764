"""Replaces the loss of TRL's experimental GKDTrainer, the generalized Jensen-Shannon divergence of a student's and a teacher's softmax,
which is `flce.linear_divergence` of both models' hidden states.

TRL's loss takes whole logits. Both models' own forwards run here, but for their output layers, which compute two positions a sequence.
These logits show in every step whether a model's are what its config says of a scale and a cap.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flce import divergence as two_heads
from flce import errors
from flce.adapters._methods import standing_in
from flce.call import _heads
from flce.core._once import say_once
from flce.huggingface import options_of
from flce.trl import _own
from flce.trl._divergence import _lie_alike, _why_not_two_heads

_WHAT = "GKDTrainer.compute_loss"


class _NotComputedError(Exception):
    """The reason why TRL's own loss is computed."""


class _States(NamedTuple):
    """A model's hidden states, and its output layer."""

    hidden: Tensor  # [B, S, D], in the dtype in which the output layer computes
    weight: Tensor
    bias: Tensor | None
    logit_scale: float
    softcap: float | None


def compute_loss(
    self: Any, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Tensor | float | None = None
) -> Any:
    """Stands in for GKDTrainer's method of this name. What it does not compute, TRL's own does, for the reason that is logged once: outputs
    are asked for (as in evaluation), the output layer is no plain Linear that lies here whole (modules_to_save, FSDP, ZeRO-3), the model is
    compiled, a subclass has another divergence, and what `ChunkedDivergenceFunction` leaves to TRL."""
    try:
        if return_outputs:
            raise _NotComputedError("the model's outputs are asked for, which have logits")
        return _loss(self, model, inputs, num_items_in_batch)
    except _NotComputedError as reason:
        say_once(f"flce.trl: TRL's own {_WHAT} computes this loss: {reason}")
        _own.count(fused=False)
    return _own.GKD.own()(self, model, inputs, return_outputs, num_items_in_batch)


def _loss(trainer: Any, model: Any, inputs: dict[str, Any], num_items_in_batch: Tensor | float | None) -> Tensor:
    module = sys.modules[_own.GKD.module]
    if trainer.generalized_jsd_loss is not module.GKDTrainer.generalized_jsd_loss:  # type: ignore[attr-defined]
        raise _NotComputedError(f"{type(trainer).__name__} has a generalized_jsd_loss of its own")
    of_student, of_teacher = trainer.accelerator.unwrap_model(model), trainer.accelerator.unwrap_model(trainer.teacher_model)
    heads = [_plain_head(each) for each in (of_student, of_teacher)]
    for each in (model, trainer.teacher_model):
        if hasattr(each, "_orig_mod"):
            raise _NotComputedError("a model is compiled")
    student = _states(model, of_student, heads[0], inputs)
    trainer.teacher_model.eval()
    with torch.no_grad():
        teacher = _states(trainer.teacher_model, of_teacher, heads[1], inputs)
    formula: dict[str, Any] = {
        "student_logit_scale": student.logit_scale,
        "student_softcap": student.softcap,
        "teacher_logit_scale": teacher.logit_scale,
        "teacher_softcap": teacher.softcap,
    }
    _refuse_others(student, teacher, formula, trainer.beta)
    labels = inputs["labels"][:, 1:]
    counts = labels != -100
    weights = _lie_alike(student.weight.to(student.hidden.dtype), teacher.weight.detach().to(teacher.hidden.dtype))
    divergence: Any = two_heads.linear_divergence(
        student.hidden[:, :-1][counts],
        weights[0],
        teacher.hidden[:, :-1][counts].detach(),
        weights[1],
        beta=trainer.beta,
        reduction="sum",
        student_bias=student.bias,
        teacher_bias=None if teacher.bias is None else teacher.bias.detach(),
        **formula,
    )
    _own.count(fused=True)
    module.empty_cache()  # type: ignore[attr-defined]
    if num_items_in_batch is None:
        return divergence / counts.sum().clamp_min(1)  # type: ignore[no-any-return]
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(divergence.device)
    return divergence / num_items_in_batch  # type: ignore[no-any-return]


def _plain_head(model: Any) -> Any:
    head = model.get_output_embeddings()
    try:
        weight, _ = _heads.of_linear(head)
    except errors.FlceError as error:
        raise _NotComputedError(f"the output layer of {type(model).__name__} is not taken: {error}") from None
    if isinstance(weight, DTensor):
        raise _NotComputedError(f"the output layer's weight of {type(model).__name__} lies over ranks")
    if "forward" in vars(head):
        raise _NotComputedError(f"the output layer's forward of {type(model).__name__} is wrapped")
    return head


def _states(called: Any, model: Any, head: Any, inputs: dict[str, Any]) -> _States:
    """Runs `called`, which is `model` or a wrapper of it."""
    taken: list[tuple[Tensor, Tensor]] = []
    dtypes: list[torch.dtype] = []
    own = head.forward

    def few(hidden: Tensor) -> Tensor:
        rows: Tensor = own(hidden[..., -2:, :])
        taken.append((hidden, rows))
        dtypes.append(_own.compute_dtype(hidden))
        return rows

    with standing_in(head, "forward", few):
        outputs = called(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
    name = type(model).__name__
    if len(taken) != 1 or taken[0][0].shape[:-1] != inputs["input_ids"].shape:
        raise _NotComputedError(f"the forward of {name} calls its output layer {len(taken)} times, or not with all positions")
    hidden, rows = taken[0]
    options = options_of(model.config)
    scale, cap = options.get("logit_scale", 1.0), options.get("softcap")
    if (reason := _why_other(outputs.logits.detach().float(), rows.detach(), scale, cap)) is not None:
        raise _NotComputedError(f"the logits of {name} {reason}")
    bias = None if head.bias is None else head.bias.to(dtypes[0])
    return _States(hidden.to(dtypes[0]), head.weight, bias, scale, cap)


def _why_other(found: Tensor, rows: Tensor, scale: float, cap: float | None) -> str | None:
    """Why a model's logits may not be those of its output layer, scaled and capped. In every step: a cap far above its logits shows nothing
    until they grow. Logits that nothing is done to are equal to the last bit."""
    expected = rows.float() * scale
    expected = expected if cap is None else cap * torch.tanh(expected / cap)
    close = 0.0 if scale == 1 and cap is None else 1e-5 if rows.dtype is torch.float32 else 1e-2
    largest = expected.abs().amax()
    if largest == 0:
        return "are 0, which does not show what is done to others"
    if found.shape != expected.shape or not (found - expected).abs().amax() <= close * largest:  # NaN is not close
        return f"are not what its config says of a scale ({scale}) and a cap ({cap})"
    return None


def _refuse_others(student: _States, teacher: _States, formula: dict[str, Any], beta: float) -> None:
    classes = student.weight.shape[0], teacher.weight.shape[0]
    if classes[0] != classes[1]:
        raise _NotComputedError(f"the student has {classes[0]} classes and the teacher {classes[1]}")
    if len({each.device for states in (student, teacher) for each in (states.hidden, states.weight)}) > 1:
        raise _NotComputedError("hidden states and weights are on several devices")
    reason = _own.why_own(student.hidden, student.weight, formula)
    reason = reason or _why_not_two_heads(student.hidden, teacher.hidden, teacher.weight, (student.bias, teacher.bias), beta)
    if reason is not None:
        raise _NotComputedError(reason)
