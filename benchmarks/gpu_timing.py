"""Helpers for benchmarks of one GPU: the layer that they time, a step's time, and where figures come from."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


class Layer:
    """An output layer in bf16 and the three GEMMs that its step cannot do without."""

    def __init__(self, num_tokens: int, hidden_size: int, vocab_size: int) -> None:
        torch.manual_seed(0)
        like: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        self.hidden = torch.randn(num_tokens, hidden_size, **like).requires_grad_()
        self.weight = torch.empty(vocab_size, hidden_size, **like).normal_(std=hidden_size**-0.5).requires_grad_()
        self.target = torch.randint(0, vocab_size, (num_tokens,), device="cuda")
        self.dlogits = torch.randn(num_tokens, vocab_size, **like)

    def forward_gemm(self) -> None:
        self.hidden.detach() @ self.weight.detach().t()

    def grad_hidden_gemm(self, dlogits: torch.Tensor) -> None:
        dlogits @ self.weight.detach()

    def grad_weight_gemm(self, dlogits: torch.Tensor) -> None:
        dlogits.t() @ self.hidden.detach()

    def gemms(self, dlogits: torch.Tensor | None = None) -> None:
        dlogits = self.dlogits if dlogits is None else dlogits
        self.forward_gemm()
        self.grad_hidden_gemm(dlogits)
        self.grad_weight_gemm(dlogits)


def timed(step: Callable[[], object]) -> float:
    """Milliseconds of one step."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds


def output(*command: str) -> str:
    """The first line that a command prints; "unknown" where there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.split("\n")[0].strip() or "unknown"


def driver() -> str:
    return output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def commit() -> str:
    return output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
