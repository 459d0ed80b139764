"""Helpers for benchmarks of one GPU: the layer that they time, times and memory of steps, where figures come from, and their file."""

from __future__ import annotations

import argparse
import datetime
import json
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LEAST_ROUNDS = 4
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


def rounds_of(
    steps: dict[str, Callable[[], object]], seconds: float, time_of: Callable[[str], float], least: int = LEAST_ROUNDS
) -> list[dict[str, float]]:
    """Times of all steps, round by round, in an order drawn anew. `time_of` times the one of a name. A step that it takes out of `steps` is
    in no further round."""
    found: list[dict[str, float]] = []
    end, order = time.monotonic() + seconds, random.Random(0)
    while time.monotonic() < end or len(found) < least:
        one = {name: time_of(name) for name in order.sample(list(steps), len(steps))}
        found.append({name: one[name] for name in steps})  # in the order of the table
    return found


def behind(floor: Callable[[], object], steps: dict[str, Callable[[], object]]) -> Callable[[str], float]:
    """Milliseconds of the step of a name right behind the floor, so that each step finds the GPU's clocks as such GEMMs leave them."""

    def time_of(name: str) -> float:
        floor()
        return timed(steps[name])

    return time_of


def peak_of(step: Callable[[], object]) -> int:
    """Bytes beyond what is there, at the most, that torch's allocator has in use."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def reason(error: Exception) -> str:
    """A failure in a line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


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


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--commit", help="of what is measured (default: git's)")
    parser.add_argument("--out", type=Path, help="a file for the figures as JSON")


def save(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    """Writes what was found, and where it comes from, to --out."""
    if arguments.out is None:
        return
    origin = {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": driver(),
        "torch": torch.__version__,
        "commit": arguments.commit or commit(),
        "date": datetime.date.today().isoformat(),
    }
    arguments.out.write_text(json.dumps(origin | found, indent=1) + "\n")
