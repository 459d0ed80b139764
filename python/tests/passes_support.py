"""A watch on the passes over an output layer: each pass's gradients, the share of the logits that it was spared, and its multiplications.
For tests under pytest as for processes under torchrun."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

import flce
from flce.call._direct import DirectCall
from flce.core import _kernels


@dataclass(frozen=True)
class Backward:
    """One run of a kernel's backward."""

    grad_hidden: bool
    grad_weight: bool
    share: float  # share of the logits that forward left to it
    lent: bool  # whether they lay in the memory of weight's gradient
    overwrites: bool  # whether the gradient was written over them

    @property
    def multiplications(self) -> float:
        """Multiplications in units of NVD, a GEMM being two: one for each gradient, and one for the logits that are computed again."""
        return 2 * self.grad_hidden + 2 * self.grad_weight + 2 * (1 - self.share)


@dataclass
class Passes:
    forwards: int = 0
    backwards: list[Backward] = field(default_factory=list)

    def clear(self) -> None:
        self.forwards = 0
        self.backwards.clear()

    @property
    def multiplications(self) -> float:
        """Multiplications of all passes, in units of NVD."""
        return 2 * self.forwards + sum(each.multiplications for each in self.backwards)

    def asked(self) -> list[tuple[bool, bool]]:
        """Whether each backward made hidden's and weight's gradients."""
        return [(each.grad_hidden, each.grad_weight) for each in self.backwards]


def _share(kernel: flce.Kernel, num_tokens: int, retained: Tensor | None, *, lent: bool) -> float:
    if retained is None:
        return 0.0
    size = kernel.retained_bytes(num_tokens, in_grad_weight=True) if lent else retained.nbytes
    return min(1.0, size / kernel.retained_bytes(num_tokens))


def watch_passes(replace: Callable[[Any, str, Any], None] = setattr) -> Passes:
    """`replace`: monkeypatch.setattr, or setattr where the process ends with its cases."""
    seen = Passes()
    forward, backward = _kernels.LoadedKernel.forward, _kernels.LoadedKernel.backward
    forward_directly, backward_directly = DirectCall.forward, DirectCall.backward

    def watch_forward(self: Any, *args: Any, **keywords: Any) -> Any:
        seen.forwards += 1
        return forward(self, *args, **keywords)

    def watch_backward(
        self: Any, given: Any, saved: Any, grad: Any, hidden: Any, weight: Any, bias: Any, retained: Any = None, **keywords: Any
    ) -> None:
        lent = retained is not None and bool(keywords.get("lent"))
        share = _share(self, given.target.shape[0], retained, lent=lent)
        seen.backwards.append(Backward(hidden is not None, weight is not None, share, lent, retained is not None and retained is weight))
        backward(self, given, saved, grad, hidden, weight, bias, retained, **keywords)

    def watch_direct_forward(self: Any, *args: Any) -> Any:
        seen.forwards += 1
        return forward_directly(self, *args)

    def watch_direct_backward(self: Any, *args: Any) -> Any:
        gradients = backward_directly(self, *args)
        seen.backwards.append(Backward(gradients[0] is not None, gradients[1] is not None, 0.0, False, False))
        return gradients

    replace(_kernels.LoadedKernel, "forward", watch_forward)
    replace(_kernels.LoadedKernel, "backward", watch_backward)
    replace(DirectCall, "forward", watch_direct_forward)
    replace(DirectCall, "backward", watch_direct_backward)
    return seen
