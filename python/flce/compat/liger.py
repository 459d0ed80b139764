"""The fused linear cross entropy and Jensen-Shannon divergence of liger-kernel (`liger_kernel.transformers`, `.ops`) on flce's kernels.

Gradients are computed in backward, accumulated in fp32. Options that choose how Liger computes (accum_dtype, chunk_mem_const, ce_impl,
ce_mode, jsd_impl, jsd_mode) are taken and change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flce import divergence, functional
from flce.call._targets import check_ignore_index
from flce.compat._common import check_reduction

__all__ = [
    "CrossEntropyOutput",
    "LigerFusedLinearCrossEntropyFunction",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearJSD",
    "LigerFusedLinearJSDFunction",
    "liger_fused_linear_cross_entropy",
    "liger_fused_linear_jsd",
]

_REDUCTIONS = ("mean", "sum", "none")


@dataclass
class CrossEntropyOutput:
    """Outputs where more than the loss is asked for; None for those that were not."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


class _Asked(NamedTuple):
    z_loss: bool
    token_accuracy: bool
    predicted_tokens: bool


class LigerFusedLinearCrossEntropyFunction:
    """`apply` of Liger's autograd function; what it returns is differentiable as any other tensor."""

    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        ce_impl: Any = None,
        ce_mode: Any = None,
        chunk_mem_const: int = 1,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """(loss, z_loss, token_accuracy, predicted_tokens) of _input [N, D], weight [V, D] and target [N]; None is what was not asked for.

        z_loss is the share of lse_square_scale · lse² in the loss, reduced as the loss is; it and the metrics have no gradient.
        """
        check_reduction(reduction, *_REDUCTIONS)
        if ce_weight is not None:
            vocab_size = weight.shape[0]
            assert ce_weight.shape == (vocab_size,), f"ce_weight has shape {list(ce_weight.shape)}; it must be [V], [{vocab_size}]"
            assert torch.is_floating_point(ce_weight), f"ce_weight has dtype {ce_weight.dtype}; it must be a floating dtype"
            ce_weight = ce_weight.detach().float()
        asked = _Asked(bool(return_z_loss), bool(return_token_accuracy), bool(return_predicted_tokens))
        scaling = bool(use_token_scaling)
        outputs: Any = functional.linear_cross_entropy(
            _input,
            weight,
            target,
            bias=bias,
            class_weight=ce_weight,
            ignore_index=ignore_index,
            z_loss=lse_square_scale,
            label_smoothing=label_smoothing,
            reduction=reduction,
            softcap=softcap,
            dft=scaling,
            return_lse=asked.z_loss,
            return_logprobs=asked.z_loss and scaling,
            return_top1=asked.token_accuracy or asked.predicted_tokens,
        )
        if not any(asked):
            return outputs, None, None, None
        loss, *others = outputs
        valid = target != check_ignore_index(ignore_index)
        z_loss = token_accuracy = predicted_tokens = None
        if asked.z_loss:
            z_losses = lse_square_scale * others.pop(0).detach().square()
            if scaling:
                z_losses = z_losses * torch.where(valid, others.pop(0).detach().exp(), 0.0)
            z_loss = _reduced(z_losses, reduction, valid)
        if asked.token_accuracy:
            right = (others[0] == target).float() * valid
            token_accuracy = right if reduction == "none" else right.sum() / valid.sum()
        if asked.predicted_tokens:
            predicted_tokens = others[0]
        return loss, z_loss, token_accuracy, predicted_tokens


def _reduced(values: Tensor, reduction: str, valid: Tensor) -> Tensor:
    """Reduces values that are 0 in ignored rows; 0 where all rows are ignored."""
    if reduction == "none":
        return values
    return values.sum() / valid.sum().clamp(min=1) if reduction == "mean" else values.sum()


def _output(outputs: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None], asked: _Asked) -> Tensor | CrossEntropyOutput:
    return CrossEntropyOutput(*outputs) if any(asked) else outputs[0]


def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
) -> Tensor | CrossEntropyOutput:
    """The loss of input [N, D] with weight [V, D] against target [N]: a tensor, or a CrossEntropyOutput where a metric is asked for."""
    asked = _Asked(return_z_loss, return_token_accuracy, return_predicted_tokens)
    outputs = LigerFusedLinearCrossEntropyFunction.apply(
        input,
        weight,
        target,
        bias,
        ce_weight,
        ignore_index,
        lse_square_scale,
        label_smoothing,
        reduction,
        softcap,
        return_z_loss,
        accum_dtype,
        use_token_scaling,
        return_token_accuracy,
        return_predicted_tokens,
    )
    return _output(outputs, asked)


class LigerFusedLinearCrossEntropyLoss(torch.nn.Module):
    """The module, which takes the weight before the hidden states."""

    def __init__(
        self,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__()
        assert 0 <= label_smoothing <= 1, f"label_smoothing is {label_smoothing}; it must be from 0 to 1"
        assert reduction in _REDUCTIONS, f"reduction is {reduction!r}; allowed are {', '.join(map(repr, _REDUCTIONS))}"
        assert softcap is None or softcap > 0, f"softcap is {softcap}; it must be None or above 0"
        self.ce_weight = ce_weight
        self.ignore_index = ignore_index
        self.lse_square_scale = lse_square_scale
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.softcap = softcap
        self.return_z_loss = return_z_loss
        self.accum_dtype = accum_dtype
        self.use_token_scaling = use_token_scaling
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens

    def forward(self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor | CrossEntropyOutput:
        return liger_fused_linear_cross_entropy(
            _input,
            lin_weight,
            target,
            bias,
            self.ce_weight,
            self.ignore_index,
            self.lse_square_scale,
            self.label_smoothing,
            self.reduction,
            self.softcap,
            self.return_z_loss,
            self.accum_dtype,
            self.use_token_scaling,
            self.return_token_accuracy,
            self.return_predicted_tokens,
        )


class LigerFusedLinearJSDFunction:
    """`apply` of Liger's autograd function of two heads."""

    @staticmethod
    def apply(
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        shift_labels: Tensor | None = None,
        jsd_beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None,
        jsd_impl: Any = None,
        jsd_mode: Any = None,
    ) -> Tensor:
        """The mean over tokens, fp32, of the generalized Jensen-Shannon divergence of two softmaxes: of student_input [N, D] with
        student_weight [V, D], and of teacher_input [N, D_t] with teacher_weight [V, D_t]. KL(teacher ‖ student) at a jsd_beta of 0,
        KL(student ‖ teacher) at 1. Tokens whose shift_labels [N] are ignore_index are left out. Gradients to the student alone."""
        mask = None
        if shift_labels is not None:
            tokens = student_input.shape[:-1]
            assert shift_labels.shape == tokens, f"shift_labels has shape {list(shift_labels.shape)}; it must be [N], {list(tokens)}"
            mask = shift_labels != ignore_index
        loss = divergence.linear_divergence(
            student_input,
            student_weight,
            teacher_input.detach(),
            teacher_weight,
            beta=jsd_beta,
            temperature=temperature,
            mask=mask,
            reduction="mean",
        )
        assert isinstance(loss, Tensor)
        return loss


def liger_fused_linear_jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    shift_labels: Tensor | None = None,
    jsd_beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    accum_dtype: torch.dtype | None = None,
) -> Tensor:
    """`LigerFusedLinearJSDFunction.apply` as a function."""
    return LigerFusedLinearJSDFunction.apply(
        student_input, student_weight, teacher_input, teacher_weight, shift_labels, jsd_beta, ignore_index, temperature, accum_dtype
    )


class LigerFusedLinearJSD(torch.nn.Module):
    """The module of `liger_fused_linear_jsd`."""

    def __init__(
        self, jsd_beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0, accum_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        assert temperature != 0, "temperature is 0; it must be above 0"
        self.jsd_beta = jsd_beta
        self.temperature = temperature
        self.ignore_index = ignore_index
        self.accum_dtype = accum_dtype

    def forward(
        self, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor, shift_labels: Tensor | None
    ) -> Tensor:
        return liger_fused_linear_jsd(
            student_input,
            student_weight,
            teacher_input,
            teacher_weight,
            shift_labels,
            self.jsd_beta,
            self.ignore_index,
            self.temperature,
            self.accum_dtype,
        )
