"""flce.linear_divergence beside what else computes a divergence of two heads, and beside the bare GEMMs of its arithmetic, in one process
and in an order drawn anew. Each --plan is a contender more: flce with the plan that it takes unasked, but for these keys (lent=0x0:
nothing lies in the weight gradient's memory).

    python3 benchmarks/divergence.py [--shape 4096x2048x4096x151936] [--beta 0.5] [--seconds 20] [--plan lent=4096x8192] [--out FILE.json]

A shape is tokens x the student's hidden size x the teacher's x classes. Forward and backward in bf16, each step behind the floor, so that
every step finds the GPU's clocks as it leaves them. Floors: the products of forward (twice for a mixture, whose normalizers have to be
known first), of logits that backward computes again, and of the student's two gradients; and these without the logits of backward. Peers
are plain torch with fp32 logits, torch.compile of it, TRL's chunked function and Liger's fused one, where they are installed. The table has
medians: milliseconds, the ratio to the floor, peak memory beyond inputs and their gradients, and errors relative to fp64's of 64 tokens.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from gpu_timing import add_report_arguments, behind, peak_of, reason, rounds_of, save
from torch import Tensor

import flce
from flce.core import _kernels, _native

FLOOR, RETAINED_FLOOR = "GEMMs", "GEMMs, logits of backward left out"
CHECKED = 64
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # divergences [N] of student's hidden and weight, teacher's hidden and weight


class Heads:
    def __init__(self, num_tokens: int, student_size: int, teacher_size: int, vocab_size: int) -> None:
        torch.manual_seed(0)
        like: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        self.hidden = torch.randn(num_tokens, student_size, **like).requires_grad_()
        self.weight = torch.empty(vocab_size, student_size, **like).normal_(std=2 * student_size**-0.5).requires_grad_()
        self.teacher_hidden = torch.randn(num_tokens, teacher_size, **like)
        self.teacher_weight = torch.empty(vocab_size, teacher_size, **like).normal_(std=2 * teacher_size**-0.5)
        self.dlogits = torch.randn(num_tokens, vocab_size, **like)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.hidden, self.weight, self.teacher_hidden, self.teacher_weight

    def logits_gemms(self) -> None:
        self.hidden.detach() @ self.weight.detach().t()
        self.teacher_hidden @ self.teacher_weight.t()

    def gradient_gemms(self) -> None:
        self.dlogits @ self.weight.detach()
        self.dlogits.t() @ self.hidden.detach()


def of_logits(beta: float, student: Tensor, teacher: Tensor) -> Tensor:
    student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    if beta == 0:
        return (teacher.exp() * (teacher - student)).sum(-1)
    if beta == 1:
        return (student.exp() * (student - teacher)).sum(-1)
    mixture = torch.logaddexp(student + math.log(1 - beta), teacher + math.log(beta))
    return ((1 - beta) * student.exp() * (student - mixture) + beta * teacher.exp() * (teacher - mixture)).sum(-1)


def plain(beta: float) -> Loss:
    return lambda hidden, weight, teacher_hidden, teacher_weight: of_logits(
        beta, (hidden @ weight.t()).float(), (teacher_hidden @ teacher_weight.t()).float()
    )


def fused(beta: float, limit: int | None = None, lend: bool | None = None) -> Loss:
    return lambda *heads: flce.linear_divergence(  # type: ignore[return-value]
        *heads, beta=beta, workspace_limit_bytes=limit, retain_in_grad_weight=lend
    )


def trl(beta: float) -> Loss:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    def loss(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> Tensor:
        made: Tensor = ChunkedDivergenceFunction.apply(hidden, weight, None, teacher_hidden, teacher_weight, None, beta)[0]
        return made

    return loss


def liger(beta: float) -> Loss:
    """Its loss is the mean over tokens of the generalized divergence, whose beta weighs as TRL's does."""
    from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

    module = LigerFusedLinearJSD(jsd_beta=beta)
    return lambda hidden, weight, teacher_hidden, teacher_weight: module(hidden, weight, teacher_hidden, teacher_weight, None)


class Planned:
    """`loss` with the planner's plan, in which `changes` ("lent=4096x8192,chunk=8192") take the place of keys."""

    def __init__(self, loss: Loss, changes: str) -> None:
        self._loss, self._changes = loss, dict(change.split("=", 1) for change in changes.split(","))
        self._known: dict[Any, _kernels.LoadedKernel] = {}
        self._find = _kernels.find

    def __call__(self, *heads: Tensor) -> Tensor:
        return self._loss(*heads)

    def __enter__(self) -> None:
        _kernels.find = self._kernel  # type: ignore[assignment]

    def __exit__(self, *_: Any) -> None:
        _kernels.find = self._find

    def _kernel(self, key: Any, **_: Any) -> _kernels.LoadedKernel:
        if key not in self._known:
            way, *keys = self._find(key).plan.split(",")
            changed = dict(each.split("=", 1) for each in keys) | self._changes
            if changed.get("lent") == "0x0":
                del changed["lent"]
            plan = ",".join([way, *(f"{name}={value}" for name, value in changed.items())])
            options = _native.KernelOptions(ctypes.sizeof(_native.KernelOptions), plan.encode(), 0, 0, key.num_tokens)
            handle = ctypes.c_void_p()
            session = _kernels._session(key.device, None)
            _native.check(_native.library().flce_get_kernel(session, key.spec().encode(), ctypes.byref(options), ctypes.byref(handle)))
            self._known[key] = _kernels.LoadedKernel(key._replace(workspace_limit_bytes=0, num_tokens=0), handle)
        return self._known[key]


def planned(loss: Loss) -> AbstractContextManager[None]:
    return loss if isinstance(loss, Planned) else nullcontext()


CONTENDERS: dict[str, Callable[[float], Loss]] = {
    "flce": fused,
    "flce not lent": lambda beta: fused(beta, lend=False),
    "flce in 1 GiB": lambda beta: fused(beta, 1 << 30),
    "flce all retained": lambda beta: fused(beta, 1 << 40),
    "torch": plain,
    "torch.compile": lambda beta: torch.compile(plain(beta)),
    "TRL": trl,
    "Liger": liger,
}


def step(loss: Loss, heads: Heads) -> tuple[Tensor, tuple[Tensor, ...]]:
    with planned(loss):
        divergence = loss(*heads.inputs())
        return divergence.detach(), torch.autograd.grad(divergence.sum(), (heads.hidden, heads.weight))


def errors_of(loss: Loss, beta: float, heads: Heads) -> dict[str, float]:
    """Errors of a few tokens, to fp64."""
    few = [each.detach()[:CHECKED] if each.shape[0] == heads.hidden.shape[0] else each.detach() for each in heads.inputs()]
    few[0].requires_grad_()
    with planned(loss):
        found = loss(few[0], *few[1:])
        gradient = None if found.dim() == 0 else torch.autograd.grad(found.sum(), (few[0],))[0]
    if gradient is None:  # a mean, of whose parts nothing is known
        return {}
    exact = [each.detach().double() for each in few]
    exact[0].requires_grad_()
    right = of_logits(beta, exact[0] @ exact[1].t(), exact[2] @ exact[3].t())
    (expected,) = torch.autograd.grad(right.sum(), (exact[0],))
    return {
        "divergence": float((found.double() - right).norm() / right.norm()),
        "grad_hidden": float((gradient.double() - expected).norm() / expected.norm()),
    }


def floors(heads: Heads, beta: float) -> dict[str, Callable[[], Any]]:
    walks = 2 if 0 < beta < 1 else 1

    def retained() -> None:
        for _ in range(walks):
            heads.logits_gemms()
        heads.gradient_gemms()

    def all_again() -> None:
        retained()
        heads.logits_gemms()

    return {FLOOR: all_again, RETAINED_FLOOR: retained}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4096x2048x4096x151936", help="tokens x student's size x teacher's size x classes")
    parser.add_argument("--beta", type=float, default=0.5)
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="names, separated by commas; torch has whole logits")
    parser.add_argument("--plan", action="append", default=[], help="a contender with these keys in its plan, such as lent=4096x8192")
    parser.add_argument("--seconds", type=float, default=20, help="time to measure, about (default: 20)")
    add_report_arguments(parser)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device")
    heads = Heads(*map(int, arguments.shape.split("x")))
    gradients = 2 * (heads.hidden.numel() + heads.weight.numel())
    steps, rows = floors(heads, arguments.beta), {}
    for name in [*arguments.contenders.split(","), *arguments.plan]:
        try:
            loss = CONTENDERS[name](arguments.beta) if name in CONTENDERS else Planned(fused(arguments.beta), name)
            rows[name] = {"errors": errors_of(loss, arguments.beta, heads)}
            run = lambda loss=loss: step(loss, heads)  # noqa: E731
            run()
            rows[name]["memory_bytes"] = peak_of(run) - gradients
            steps[name] = run
        except Exception as error:
            rows[name] = {"reason": reason(error)}
    found = rounds_of(steps, arguments.seconds, behind(steps[RETAINED_FLOOR], steps))
    for name in steps:
        rows.setdefault(name, {})["milliseconds"] = statistics.median(one[name] for one in found)
    for name, row in rows.items():
        if "milliseconds" in row:
            row["ratio"] = row["milliseconds"] / rows[FLOOR]["milliseconds"]
        shown = {key: (f"{value:.4g}" if isinstance(value, float) else value) for key, value in row.items()}
        print(f"{name:40} {shown}", flush=True)
    save(arguments, {"shape": arguments.shape, "beta": arguments.beta, "rounds": len(found), "rows": rows})


if __name__ == "__main__":
    main()
