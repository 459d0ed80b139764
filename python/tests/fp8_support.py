"""An FP8 head in fp64, by torch's own types of 8 bits: what flce.Fp8 means, by definition."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import flce

LOG2_E = float(torch.tensor(1.44269504))
E4M3_MOST, E5M2_MOST = 448.0, 57344.0


def to_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MOST, E4M3_MOST).to(torch.float8_e4m3fn).double()


def to_e5m2(x: Tensor) -> Tensor:
    return x.clamp(-E5M2_MOST, E5M2_MOST).to(torch.float8_e5m2).double()


def operands(rows: Tensor, form: str, given: float | None = None) -> Tensor:
    """Rows as the logits' products have them: codes times the row's scale, or times a scale that is given for all rows."""
    rows = rows.float()
    most = 127.0 if form == "int8" else E4M3_MOST
    largest = rows.abs().amax(-1, keepdim=True)
    if given is not None:
        scaled = rows * (torch.ones(()) / torch.tensor(given))
        return (scaled.round().clamp(-127, 127).double() if form == "int8" else to_e4m3(scaled)) * float(torch.tensor(given))
    factor = torch.full_like(largest, most) / largest  # most / largest is most · (1 / largest) in torch, rounded twice
    scaled = rows * torch.where(largest > 0, factor, 0.0)
    codes = scaled.round().clamp(-127, 127) if form == "int8" else to_e4m3(scaled)
    return codes.double() * (largest / most).double()


def to_e4m3_range(x: Tensor) -> tuple[Tensor, float]:
    """Numbers times the largest power of two with which they stay in e4m3's range, rounded, and the power's reciprocal."""
    largest = float(x.abs().max())
    power = math.floor(math.log2(E4M3_MOST / largest)) if largest > 0 else 0
    return to_e4m3((x * 2.0**power).float()), 2.0**-power


@dataclass
class Truth:
    """Results of a mean loss and its backward."""

    loss: Tensor
    lse: Tensor  # [N]
    logprobs: Tensor  # [N]
    entropy: Tensor  # [N]
    grad_hidden: Tensor
    grad_weight: Tensor
    grad_bias: Tensor


def truth_of(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    fp8: flce.Fp8,
    *,
    bias: Tensor | None = None,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    z_loss: float = 0.0,
    class_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    of_entropy: Tensor | None = None,
    weight_scale: Tensor | None = None,
) -> Truth:
    """The mean over targets that are not -100. `of_entropy` [N]: gradients of the tokens' entropies. `weight_scale` [V]: of a weight of
    codes. All on the CPU."""
    hidden, weight, target = hidden.detach().cpu(), weight.detach().cpu(), target.cpu()
    of_classes = None if weight_scale is None else weight_scale.detach().cpu()[:, None]
    codes, weight = weight, weight if of_classes is None else weight.float() * of_classes
    valid = target >= 0
    rows = torch.arange(len(target))[valid]
    y = target[valid]
    of_hidden, of_weight = fp8.scales if isinstance(fp8.scales, tuple) else (None, None)
    of_logits = operands(weight, fp8.logits, of_weight) if of_classes is None else codes.double() * of_classes.double()
    x = operands(hidden[valid], fp8.logits, of_hidden) @ of_logits.T + (0 if bias is None else bias.detach().cpu().double())
    z, slope = x * logit_scale, torch.ones_like(x)
    if softcap:
        t = torch.tanh(z / softcap)
        z, slope = softcap * t, 1 - t * t
    z = z / temperature
    gain = logit_scale / temperature
    lse = torch.logsumexp(z, -1)
    own = z[torch.arange(len(y)), y]
    of_class = torch.ones(len(y)) if class_weight is None else class_weight.cpu()[y]
    divisor = of_class.sum().double()
    weights = torch.ones(len(weight)).double() if class_weight is None else class_weight.cpu().double()
    of_all = (weights * (lse[:, None] - z)).sum(-1) / len(weight)
    loss = ((1 - label_smoothing) * of_class * (lse - own) + label_smoothing * of_all).sum() / divisor + (z_loss * lse * lse).mean()

    hit = (1 - label_smoothing) * of_class / divisor
    smoothing = label_smoothing / len(weight) / divisor  # times a class's weight
    a = hit + smoothing * weights.sum() + 2 * z_loss * lse / len(y)
    entropy = lse - (torch.softmax(z, -1) * z).sum(-1)
    b = torch.zeros_like(lse) if of_entropy is None else -of_entropy.cpu()[valid].double()
    a = a + b * entropy  # at z = lse
    scale = torch.where(b == 0, a, torch.maximum(a.abs(), b.abs()))
    share = (a[:, None] + b[:, None] * (z - lse[:, None])) / scale[:, None]
    e5m2 = fp8.dlogits == "e5m2"
    k = torch.floor(lse.float() * LOG2_E).double() - (14 if e5m2 else 7)
    exponentials = (torch.exp2(z * LOG2_E - k[:, None]) * slope * share).float()
    exponentials = to_e5m2(exponentials) if e5m2 else to_e4m3(exponentials)
    exponentials[torch.arange(len(y)), y] = 0
    r = scale * gain * torch.exp2(k - lse * LOG2_E)
    of_target = ((a + b * (own - lse)) * torch.exp(own - lse) - hit) * slope[torch.arange(len(y)), y] * gain

    narrow_weight, weight_unit = to_e4m3_range(weight.double())
    narrow_hidden, hidden_unit = to_e4m3_range(hidden[valid].double() * r[:, None])
    grad_hidden = torch.zeros(hidden.shape, dtype=torch.float64)
    grad_hidden[rows] = r[:, None] * (exponentials @ narrow_weight) * weight_unit + of_target[:, None] * narrow_weight[y] * weight_unit
    grad_hidden[rows] -= smoothing * gain * (weights @ weight.double())
    grad_weight = exponentials.T @ narrow_hidden * hidden_unit
    grad_weight.index_add_(0, y, of_target[:, None] * hidden[valid].double())
    grad_weight -= smoothing * gain * weights[:, None] * hidden[valid].double().sum(0)
    grad_bias = (exponentials * r[:, None]).sum(0).index_add_(0, y, of_target) - smoothing * gain * weights * len(y)
    of_rows = [torch.zeros(len(target), dtype=torch.float64) for _ in range(3)]
    of_rows[0][rows], of_rows[1][rows], of_rows[2][rows] = lse, own - lse, entropy
    return Truth(loss, *of_rows, grad_hidden, grad_weight, grad_bias)


def error(got: Tensor, expected: Tensor) -> float:
    """‖got − expected‖ / ‖expected‖."""
    got, expected = got.detach().cpu().double(), expected.detach().cpu().double()
    return float((got - expected).norm() / expected.norm())
