"""The cost of a call on the host: forward + backward at a tiny shape, eager, beside an empty torch.autograd.Function pair, an empty
custom_op and torch's own losses.

    python benchmarks/python_overhead.py [--device cuda|cpu] [--out FILE]

Rounds of the variants take turns; a round is --calls calls, waited for at its end; medians and minima in microseconds a call. On a GPU also
the same step captured in a CUDA graph.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flce

N, D, V = 8, 16, 32


class Empty(torch.autograd.Function):
    """Two inputs saved, one output, no work: what autograd itself costs."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return torch.empty((), dtype=torch.float32, device=hidden.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        return torch.empty_like(hidden), torch.empty_like(weight)


@torch.library.custom_op("flce_overhead::empty", mutates_args=())
def empty_op(hidden: Tensor, weight: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.float32, device=hidden.device)


@torch.library.custom_op("flce_overhead::empty_backward", mutates_args=())
def empty_backward_op(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), torch.empty_like(weight)


empty_op.register_autograd(
    lambda ctx, grad: empty_backward_op(*ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def variants(device: str) -> dict[str, Callable[[], None]]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    hidden = torch.randn(N, D, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, D, device=device, dtype=dtype, requires_grad=True)
    target = torch.randint(0, V, (N,), device=device)
    leaves = (hidden, weight)

    def steps(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def step() -> None:
            for leaf in leaves:
                leaf.grad = None
            loss().backward()

        return step

    compiled = torch.compile(lambda: F.cross_entropy(F.linear(hidden, weight).float(), target))
    operator = torch.ops.flce.linear_cross_entropy.default
    result = {
        "empty autograd.Function": steps(lambda: Empty.apply(hidden, weight)),
        "empty custom_op": steps(lambda: empty_op(hidden, weight)),
        "flce": steps(lambda: flce.linear_cross_entropy(hidden, weight, target)),
        "flce operator": steps(lambda: operator(hidden, weight, target, None, None, None, "", -100, 2, 0)[0]),
        "eager linear + cross_entropy": steps(lambda: F.cross_entropy(F.linear(hidden, weight).float(), target)),
        "torch.compile": steps(compiled),
    }
    if device == "cuda":
        result["flce in a CUDA graph"] = captured(hidden, weight, target)
    return result


def captured(hidden: Tensor, weight: Tensor, target: Tensor) -> Callable[[], None]:
    def both() -> Any:
        return torch.autograd.grad(flce.linear_cross_entropy(hidden, weight, target), (hidden, weight))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = both()

    def replay() -> None:
        graph.replay()

    replay.kept = kept  # type: ignore[attr-defined]
    return replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--commit", help="of what is measured (default: git's)")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    wait = torch.cuda.synchronize if arguments.device == "cuda" else lambda: None
    steps = variants(arguments.device)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(20):
            step()
    for _ in range(arguments.rounds):
        for name, step in steps.items():
            wait()
            start = time.perf_counter()
            for _ in range(arguments.calls):
                step()
            wait()
            times[name].append((time.perf_counter() - start) / arguments.calls * 1e6)
    rows = {name: {"median_us": statistics.median(values), "min_us": min(values)} for name, values in times.items()}
    base = rows["empty autograd.Function"]
    print(f"torch {torch.__version__}, {arguments.device}: microseconds a forward + backward at {N} x {D} x {V}")
    for name, row in rows.items():
        over = row["median_us"] - base["median_us"]
        print(f"{name:>30}: median {row['median_us']:7.1f}  min {row['min_us']:7.1f}  over the empty pair {over:+7.1f}")
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(provenance(arguments.device, arguments.commit) | {"rows": rows}, indent=1) + "\n")


def provenance(device: str, commit: str | None) -> dict[str, Any]:
    def output(*command: str) -> str | None:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    return {
        "date": datetime.date.today().isoformat(),
        "device": output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") if device == "cuda" else device,
        "torch": torch.__version__,
        "commit": commit or output("git", "rev-parse", "--short", "HEAD"),
    }


if __name__ == "__main__":
    main()
