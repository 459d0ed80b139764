"""Helpers for the tests of retained memory: problems, ways to the loss, and a watch on memory that is kept and used."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support import assert_close, in_double, make_problem, reference
from torch import Tensor

import flce
from flce.core import _kernels, _retain

NONE, OWN, LENT = "none", "own", "lent"
ALL = 1 << 40
Loss = Callable[..., Tensor]


@dataclass
class Watched:
    """Memory that each forward retained and each backward used, and all memory that forwards allocated."""

    backward: list[str] = field(default_factory=list)
    memory: list[weakref.ref[Tensor]] = field(default_factory=list)

    def take(self) -> list[str]:
        used, self.backward[:] = list(self.backward), []
        return used

    def alive(self) -> int:
        return sum(reference() is not None for reference in self.memory)


def retain_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets layers of any size retain, and forgets earlier choices."""
    monkeypatch.setattr(_retain, "LEAST_WORK", 1)
    forget_losses()


def forget_losses() -> None:
    """No loss counts as alive, and no number of tokens as known."""
    for kernel in _kernels.all_kernels():
        kernel.alive.several = False
        kernel.alive.losses.clear()
        kernel.frames.clear()


@pytest.fixture
def watched(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """Layers of any size retain, and nothing that went before counts."""
    if not flce.get_kernel(64, 600, torch.bfloat16, device=device).retains:
        pytest.skip("this device's kernels retain nothing")
    seen = Watched()
    retain_any_size(monkeypatch)
    backward, keep = _kernels.LoadedKernel.backward, _retain.Retained.keep

    def watch_backward(self: Any, *args: Any, **keywords: Any) -> None:
        grad_weight, retained = args[4], args[6] if len(args) > 6 else None
        seen.backward.append(NONE if retained is None else LENT if retained is grad_weight else OWN)
        backward(self, *args, **keywords)

    def watch_keep(self: Any, memory: Tensor, *, lent: bool) -> None:
        seen.memory.append(weakref.ref(memory))
        keep(self, memory, lent=lent)

    monkeypatch.setattr(_kernels.LoadedKernel, "backward", watch_backward)
    monkeypatch.setattr(_retain.Retained, "keep", watch_keep)
    yield seen
    monkeypatch.undo()
    forget_losses()


def make(device: str, num_tokens: int = 40, **options: Any) -> Any:
    return make_problem(device, torch.bfloat16, num_tokens=num_tokens, hidden_size=64, vocab_size=3000, **options)


def loss_of(problem: Any, **options: Any) -> Tensor:
    loss: Tensor = flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, **(problem.options | options))
    return loss


def compiled_loss(backend: str) -> Loss:
    torch._dynamo.reset()
    compiled = torch.compile(flce.linear_cross_entropy, fullgraph=True, backend=backend)
    return lambda problem, **options: compiled(problem.hidden, problem.weight, problem.target, **options)


def gradients_of(problem: Any, loss: Tensor, **keywords: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, (problem.hidden, problem.weight), **keywords)


def check(problem: Any, actual: tuple[Tensor | None, ...], plain: tuple[Tensor, ...] | None = None) -> None:
    """Checks gradients against the reference's bounds; on a CPU against the bits of a call that retains nothing."""
    if plain is None:
        plain = gradients_of(problem, loss_of(problem, retain_in_grad_weight=False))
    exact = in_double(problem)
    expected = gradients_of(exact, reference(exact.hidden, exact.weight, exact.target, **exact.options)["loss"])
    for name, got, bits, right in zip(("hidden", "weight"), actual, plain, expected, strict=True):
        assert got is not None
        # A GPU's retained exponentials are rounded once more than dz alone (docs/numerics.md, retained exponentials).
        assert_close(got, right, torch.bfloat16, name, factor=2**0.5 if got.is_cuda else 1.0)
        if got.device.type == "cpu":
            assert torch.equal(got, bits), name


@pytest.fixture(params=["eager", "aot_eager"])
def way(request: pytest.FixtureRequest) -> Loss:
    return loss_of if request.param == "eager" else compiled_loss(request.param)
