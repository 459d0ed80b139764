"""A KeyboardInterrupt at any line of the package leaves nothing behind: the calls after it have the bits that they have alone."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from support import Problem, make_problem
from torch import Tensor

import flce
from flce.call import _call, _options
from flce.core import _kernels, _retain

PACKAGE = str(Path(flce.__file__).resolve().parent)
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt in a finalizer


class Interrupt:
    """Raises KeyboardInterrupt at the given line of the package that is run, and counts lines; opcodes instead of lines where that is
    asked."""

    def __init__(self, at: int = -1, *, opcodes: bool = False) -> None:
        self.at, self.count, self.opcodes = at, 0, opcodes

    def __enter__(self) -> Interrupt:
        self.before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = self.opcodes, not self.opcodes
        return self._line

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event != ("opcode" if self.opcodes else "line"):
            return self._line
        self.count += 1
        if self.count - 1 == self.at:
            sys.settrace(self.before)
            raise KeyboardInterrupt
        return self._line


@dataclass
class Step:
    """Forward and backward with one set of tensors and options."""

    problem: Problem
    way: Callable[..., Any]

    def run(self) -> list[Tensor]:
        problem = self.problem
        options = dict(problem.options)
        buffer = options["grad_weight_out"] = options["grad_weight_out"].clone() if "grad_weight_out" in options else None
        result = self.way(problem.hidden, problem.weight, problem.target, **options)
        outputs = list(result) if isinstance(result, tuple) else [result]
        total = torch.stack([output.sum() * (i + 1) for i, output in enumerate(outputs)]).sum()
        inputs = [problem.hidden] if buffer is not None else [problem.hidden, problem.weight]
        if buffer is None:
            gradients = list(torch.autograd.grad(total, inputs))
        else:
            problem.hidden.grad = None
            total.backward()
            gradients = [problem.hidden.grad, buffer]
        return [*(output.detach().clone() for output in outputs), *(gradient for gradient in gradients if gradient is not None)]


def eager(*args: Any, **options: Any) -> Any:
    return flce.linear_cross_entropy(*args, **options)


def operator(hidden: Tensor, weight: Tensor, target: Tensor, reduction: str = "mean", ignore_index: int = -100, **_: Any) -> Any:
    code = _options.REDUCTIONS[reduction]
    return torch.ops.flce.linear_cross_entropy(hidden, weight, target, None, None, None, "", ignore_index, code, 0)[0]


def steps(device: str, kind: str) -> list[Step]:
    """Steps of one kernel that differ in all that a call leaves behind: tokens, target's dtype, reduction and ignore_index."""
    common: dict[str, Any] = {"hidden_size": 32, "vocab_size": 150}
    dtype = torch.float32
    if kind == "extra outputs":
        common |= {"return_lse": True, "return_logprobs": True, "return_entropy": True, "bias": True}
    if kind == "retaining":
        dtype = torch.bfloat16
        common["vocab_size"] = 600
    reductions = ("mean", "mean", "mean") if kind == "num_valid_tokens" else ("mean", "sum", "none")
    first = make_problem(device, dtype, num_tokens=24, reduction=reductions[0], **common)
    second = make_problem(device, dtype, num_tokens=40, reduction=reductions[1], ignore_index=5, **common)
    second.target = second.target.int()
    third = make_problem(device, dtype, num_tokens=40, reduction=reductions[2], **common)
    third.hidden = third.hidden.detach().view(4, 10, 32).requires_grad_()
    third.target = third.target.view(4, 10)
    made = [first, second] if kind == "operator" else [first, second, third]
    for problem, count_dtype in zip(made, (torch.int64, torch.float32, torch.int32), strict=False):
        if kind == "grad_weight_out":
            problem.options["grad_weight_out"] = torch.ones_like(problem.weight, requires_grad=False)
        if kind == "num_valid_tokens":
            problem.options["num_valid_tokens"] = torch.tensor(7, dtype=count_dtype, device=device)
    return [Step(problem, operator if kind == "operator" else eager) for problem in made]


def equal(kind: str, actual: list[Tensor], expected: list[Tensor]) -> bool:
    # gradients from retained logits have other bits there, and the objects alive decide whether logits are retained
    if kind == "retaining" and actual[0].is_cuda:
        return all(
            torch.allclose(a.float(), b.float(), rtol=2e-2, atol=1e-2 * b.float().abs().max().item())
            for a, b in zip(actual, expected, strict=True)
        )
    return all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def forget() -> None:
    _call.forget()
    for kernel in _kernels.all_kernels():
        kernel.frames.clear()


LEAST_LINES = 50  # lines of the package that forward and backward run through


@pytest.mark.parametrize(
    ("kind", "fresh"),
    [
        *((kind, False) for kind in ("grad_weight_out", "operator")),
        ("retaining", True),
        *(pytest.param(kind, False, marks=pytest.mark.nightly) for kind in ("plain", "num_valid_tokens", "extra outputs", "retaining")),
        pytest.param("plain", True, marks=pytest.mark.nightly),
    ],
    ids=lambda value: {True: "first use"}.get(value, value),
)
def test_interrupted_at_every_line(device: str, kind: str, fresh: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "retaining":
        monkeypatch.setattr(_retain, "LEAST_WORK", 1)
    interrupted_everywhere(device, kind, fresh=fresh, opcodes=False)


@pytest.mark.parametrize("kind", ["plain", pytest.param("num_valid_tokens", marks=pytest.mark.nightly)])
def test_interrupted_at_every_opcode(device: str, kind: str) -> None:
    """Interrupts between the parts of one line, too: of two assignments, or of a call and the storing of its result."""
    interrupted_everywhere(device, kind, fresh=False, opcodes=True)


def interrupted_everywhere(device: str, kind: str, *, fresh: bool, opcodes: bool) -> None:
    forget()
    made = steps(device, kind)
    expected = [step.run() for step in made]
    first, interrupted = made[0], made[1]

    def prepare() -> None:
        forget()
        for _ in range(0 if fresh else 3):  # direct calls from the second on
            interrupted.run()
            first.run()

    # The interrupted step again, as somebody who runs a notebook's cell once more does, or what went before it.
    orders = [[1, *range(2, len(made)), 0], [0, 1, 0]]
    prepare()
    for at in itertools.count():
        ended = True
        for order in orders:
            if fresh:
                prepare()
            with Interrupt(at, opcodes=opcodes) as trace, contextlib.suppress(KeyboardInterrupt):
                interrupted.run()
            ended = ended and trace.count <= at
            for i in order:
                assert equal(kind, made[i].run(), expected[i]), f"step {i}, interrupted at {'opcode' if opcodes else 'line'} {at}"
        if ended:
            break
    assert at > LEAST_LINES
