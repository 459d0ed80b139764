"""flce.jax under jax.jit beside flce.linear_cross_entropy in torch: the same layer and kernels, in one process and in an order drawn anew.

    python3 benchmarks/jax_beside_torch.py [--shape 4096x2048x151936] [--seconds 20] [--out FILE.json]
    python3 benchmarks/jax_beside_torch.py --overhead      # a small layer's steps beside a CUDA graph of the same kernels

Forward and backward in bf16, each three ways: everything retained (workspace_limit_bytes without a bound), nothing retained (64 MiB +
4·N·D), and the default, which in torch lends the weight gradient's memory. A turn repeats a step for a tenth of a second and ends when the
GPU has done all of them, so that what the host takes counts only where the GPU waits for it. The table has medians: milliseconds, the
ratio to three cuBLAS GEMMs of the same run, the ratio to torch of the same round with its quartiles, and peak memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import torch
from gpu_timing import Layer, add_report_arguments, peak_of, rounds_of, save

import flce
import flce.jax

FLOOR = "three GEMMs"
OVERHEAD_SHAPE = "1024x1024x32000"
TURN_SECONDS = 0.1

Step = Callable[[], Any]


def ways(layer: Layer) -> dict[str, dict[str, Any]]:
    tokens, depth = layer.hidden.shape
    return {
        "all retained": {"workspace_limit_bytes": 1 << 40},
        "nothing retained": {"workspace_limit_bytes": (64 << 20) + 4 * tokens * depth},
        "default": {},
    }


def torch_step(layer: Layer, way: str, memory: dict[str, Any]) -> Step:
    given = memory if way == "default" else memory | {"retain_in_grad_weight": False}

    def step() -> Any:
        return torch.autograd.grad(
            flce.linear_cross_entropy(layer.hidden, layer.weight, layer.target, **given), (layer.hidden, layer.weight)
        )

    return step


def jax_step(layer: Layer, memory: dict[str, Any]) -> tuple[Step, int]:
    """The step, and the bytes that it takes beyond arguments and gradients by XLA's account."""
    arrays = [jnp.from_dlpack(each) for each in (layer.hidden.detach(), layer.weight.detach(), layer.target.int())]
    of_arrays = jax.value_and_grad(lambda *given: flce.jax.linear_cross_entropy(*given, **memory), (0, 1))
    made = jax.jit(of_arrays).lower(*arrays).compile()
    return lambda: made(*arrays), int(made.memory_analysis().temp_size_in_bytes)


def graph_of(step: Step) -> Step:
    """The step's kernels alone, replayed."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def milliseconds(step: Step, repeats: int) -> float:
    begin = time.perf_counter()
    made = None
    for _ in range(repeats):
        made = step()
    if made is not None and isinstance(made[0], jax.Array):
        jax.block_until_ready(made)
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin) / repeats


def measured(steps: dict[str, Step], seconds: float) -> list[dict[str, float]]:
    repeats = {}
    for name, step in steps.items():
        milliseconds(step, 2)
        repeats[name] = max(1, round(1e3 * TURN_SECONDS / milliseconds(step, 1)))
    return rounds_of(steps, seconds, lambda name: milliseconds(steps[name], repeats[name]))


def beside(rounds: list[dict[str, float]], name: str, other: str) -> dict[str, Any]:
    quartiles = statistics.quantiles((one[name] / one[other] for one in rounds), n=4)
    apart = statistics.median(one[name] - one[other] for one in rounds)
    return {"beside": other, "ratio_to_it": quartiles[1], "quartiles": quartiles[::2], "microseconds_beyond": 1e3 * apart}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", help=f"num_tokens x hidden_size x vocab_size (default: 4096x2048x151936; {OVERHEAD_SHAPE} for overhead)")
    parser.add_argument("--overhead", action="store_true", help="beside a CUDA graph of torch's step")
    parser.add_argument("--seconds", type=float, default=20, help="time to measure, about (default: 20)")
    add_report_arguments(parser)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device")
    shape = arguments.shape or (OVERHEAD_SHAPE if arguments.overhead else "4096x2048x151936")
    layer = Layer(*map(int, shape.split("x")))
    steps: dict[str, Step] = {FLOOR: layer.gemms}
    memory: dict[str, int] = {}
    pairs: dict[str, str] = {}
    for way, given in ways(layer).items():
        of_torch = torch_step(layer, way, given)
        memory[f"torch, {way}"] = peak_of(of_torch) - 2 * (layer.hidden.numel() + layer.weight.numel())
        steps[f"torch, {way}"] = graph_of(of_torch) if arguments.overhead else of_torch
        steps[f"jax, {way}"], memory[f"jax, {way}"] = jax_step(layer, given)
        pairs[f"jax, {way}"] = f"torch, {way}"
    rounds = measured(steps, arguments.seconds)
    floor = statistics.median(one[FLOOR] for one in rounds)
    rows: dict[str, Any] = {}
    for name in steps:
        median = statistics.median(one[name] for one in rounds)
        rows[name] = {"milliseconds": median, "ratio": median / floor, "memory_bytes": memory.get(name)}
        rows[name] |= beside(rounds, name, pairs[name]) if name in pairs else {}
        more = (
            f"{rows[name]['ratio_to_it']:8.3f} {rows[name]['quartiles']} {rows[name]['microseconds_beyond']:8.1f} us"
            if name in pairs
            else ""
        )
        print(f"{name:24} {median:9.3f} {median / floor:7.3f} {(memory.get(name) or 0) / 2**20:9.1f} MiB {more}", flush=True)
    called = "replayed as a CUDA graph" if arguments.overhead else "called"
    save(arguments, {"jax": jax.__version__, "shape": shape, "torch_steps": called, "rounds": len(rounds), "rows": rows})


if __name__ == "__main__":
    main()
