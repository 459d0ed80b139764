"""`torch.nn.functional.linear_cross_entropy` (torch 2.13 and newer) on flce's kernels.

    torch.nn.functional.linear_cross_entropy = flce.compat.torch.linear_cross_entropy    # nn.LinearCrossEntropyLoss calls it too

What flce has no kernel for goes to torch's function, which is looked up once, when this module is imported: class probabilities,
K-dimensional losses, fp64, forward-mode derivatives, transforms of torch.func, tensor subclasses, other devices, and every call that torch
refuses. With a torch that has no such function it goes to `linear` and `cross_entropy`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from flce import functional
from flce.call import _call
from flce.call._checks import DTYPES, OLDEST_GPU
from flce.compat._common import nan_unless
from flce.core._frame import PLAIN_TYPES

__all__ = ["linear_cross_entropy"]


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
) -> Tensor:
    """The cross entropy of linear(input, linear_weight, linear_bias) against target, of input's dtype (fp32 under autocast).

    `options` say how torch's function divides its work; they matter where it is called, and there a second backward is always allowed.
    """
    if not _has_kernel(input, linear_weight, target, linear_bias, weight, reduction, ignore_index, label_smoothing):
        keywords: dict[str, Any] = {"linear_bias": linear_bias, "weight": weight, "reduction": reduction, "ignore_index": ignore_index}
        keywords |= {"label_smoothing": label_smoothing, "options": _retaining(options)}
        of_torch: Tensor = _of_torch(input, linear_weight, target, **keywords)
        return of_torch
    ignored = -100 if ignore_index is None else ignore_index
    loss: Tensor = functional.linear_cross_entropy(
        input,
        linear_weight,
        target,
        bias=linear_bias,
        class_weight=weight,
        reduction=reduction,
        ignore_index=ignored,
        label_smoothing=label_smoothing,
    )
    if reduction == "mean":
        valid = target != ignored
        loss = nan_unless(valid.any() if weight is None else (weight[torch.where(valid, target, 0)] * valid).sum() != 0, loss)
    return loss if torch.is_autocast_enabled(input.device.type) else loss.to(input.dtype)


def _has_kernel(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: Any,
    ignore_index: Any,
    label_smoothing: Any,
) -> bool:
    """Whether flce computes this call: a plain one, that torch takes too."""
    tensors = [tensor for tensor in (input, linear_weight, target, linear_bias, weight) if tensor is not None]
    if not all(type(tensor) in PLAIN_TYPES and tensor.layout == torch.strided for tensor in tensors):
        return False
    return (
        _fits_shapes(input, linear_weight, target, linear_bias, weight)
        and _fits_dtypes(input, linear_weight, target, linear_bias, weight)
        and _fits_device([tensor.device for tensor in tensors])
        and reduction in ("none", "sum", "mean")
        and (ignore_index is None or type(ignore_index) is int)
        and type(label_smoothing) in (int, float)
        and 0 <= label_smoothing <= 1
        and _is_plain_autograd()
        and _labels_are_classes(target, linear_weight.shape[0], -100 if ignore_index is None else ignore_index)
    )


def _fits_shapes(input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None) -> bool:
    classes = linear_weight.shape[:1]
    return (
        input.dim() in (1, 2)
        and linear_weight.dim() == 2
        and input.shape[-1] == linear_weight.shape[1] > 0
        and target.shape == input.shape[:-1]
        and (linear_bias is None or linear_bias.shape == classes)
        and (weight is None or weight.shape == classes)
    )


def _fits_dtypes(input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None) -> bool:
    floats = [tensor for tensor in (input, linear_weight, linear_bias) if tensor is not None]
    return (
        target.dtype is torch.int64
        and all(tensor.dtype in DTYPES for tensor in floats)
        and (len({tensor.dtype for tensor in floats}) == 1 or torch.is_autocast_enabled(input.device.type))
        and (weight is None or (weight.dtype in DTYPES and not weight.requires_grad))
    )


def _fits_device(devices: list[torch.device]) -> bool:
    first = devices[0]
    if any(device != first for device in devices):
        return False
    if first.type != "cuda" or torch.compiler.is_compiling():
        return first.type in ("cpu", "cuda")
    return torch.cuda.get_device_capability(first) >= OLDEST_GPU


def _is_plain_autograd() -> bool:
    if torch.compiler.is_compiling():
        return True
    plain = _call._transforms is not None and _call._transforms() is None and _call._tracing_state() is None
    return plain and forward_ad._current_level < 0


def _labels_are_classes(target: Tensor, num_classes: int, ignored: int) -> bool:
    """Whether all labels are classes or ignored, asked on a CPU alone, where torch names a wrong label. A GPU is not waited for: there a
    wrong label counts as ignored (`flce.check_labels`)."""
    if target.device.type != "cpu" or torch.compiler.is_compiling():
        return True
    return not bool((((target < 0) | (target >= num_classes)) & (target != ignored)).any())


def _retaining(options: Any) -> Any:
    """Options of torch's that let backward run twice."""
    known = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if known is None or not isinstance(options, known):
        return options
    return dataclasses.replace(options, allow_retain_graph=True)  # type: ignore[type-var]


def _in_two_steps(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
) -> Tensor:
    """The logits, then their cross entropy, with the checks of torch's function."""
    if input.dim() not in (1, 2):
        raise RuntimeError(f"expected input with dimensionality 1 or 2, got {input.dim()}")
    if linear_weight.dim() < 2:
        raise RuntimeError(f"expected linear_weight with dimensionality at least 2, got {linear_weight.dim()}")
    rows, features, classes = tuple(input.shape[:-1]), input.shape[-1], tuple(linear_weight.shape[:-1])
    if linear_weight.shape[-1] != features:
        raise RuntimeError(
            "expected equal input and linear_weight last dimensions (in_features), "
            f"got {features} and {linear_weight.shape[-1]}, respectively"
        )
    if linear_bias is not None and tuple(linear_bias.shape) != classes:
        raise RuntimeError(f"expected linear_bias shape {classes}, got {tuple(linear_bias.shape)}")
    if len(classes) > 1 and not rows:
        raise RuntimeError(
            f"K-dimensional loss defined by linear_weight shape {tuple(linear_weight.shape)} requires batched input, (N, {features}), "
            f"got unbatched input with shape {tuple(input.shape)}"
        )
    if tuple(target.shape) == rows + classes and ignore_index is not None:
        raise RuntimeError("ignore_index cannot be specified when target contains probabilities")
    flat_bias = None if linear_bias is None else linear_bias.reshape(-1)
    logits = F.linear(input, linear_weight.reshape(math.prod(classes), features), flat_bias).reshape(rows + classes)
    ignored = -100 if ignore_index is None else ignore_index
    return F.cross_entropy(logits, target, weight, ignore_index=ignored, reduction=reduction, label_smoothing=label_smoothing)


# The function of torch itself, for any later stand-in in its place.
_of_torch: Any = getattr(F, "linear_cross_entropy", _in_two_steps)
