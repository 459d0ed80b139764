"""A step of flce.linear_logprobs_at, normalized over each token's own ids and over the vocabulary, beside what else computes the former, in
one process and in an order drawn anew.

    python3 benchmarks/logprobs_at.py [--shape 4096x2048x151936] [--k 64] [--ids zipf|uniform] [--seconds 10] [--out FILE.json]

bf16, gradients of hidden and weight. `bytes` is a copy inside the GPU that moves as many bytes as the step has to: the weight's row
of each id in forward and again for grad_hidden, and grad_weight written once; the hidden states that grad_weight reads lie in the L2 cache.
`torch` gathers the weight's rows, 64 tokens at a time where all do not fit, with checkpoints; `torch dense` has whole logits and a mask, as
trainers do it. ids are drawn without repetition from a distribution that falls with the class's number (zipf), as tokens do, or not at all.
The table has medians: milliseconds, the ratio to `bytes`, peak memory beyond inputs and gradients, and errors to fp64 of 64 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from gpu_timing import Layer, add_report_arguments, behind, peak_of, reason, rounds_of, save
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flce

FLOOR = "bytes"
CHECKED = 64
Logprobs = Callable[[Tensor, Tensor, Tensor], Tensor]  # function of hidden, weight and ids


def drawn_ids(kind: str, num_tokens: int, classes: int, k: int) -> Tensor:
    rows = []
    for part in range(0, num_tokens, 512):
        count = min(512, num_tokens - part)
        scores = torch.rand(count, classes, device="cuda").log_().neg_()
        if kind == "zipf":
            scores *= torch.arange(1, classes + 1, device="cuda")
        rows.append(scores.topk(k, largest=False).indices)
    return torch.cat(rows)


def gathered(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return torch.einsum("nd,nkd->nk", hidden, weight[ids]).float().log_softmax(-1)


def in_chunks(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    parts = [
        checkpoint(gathered, *each, use_reentrant=False)
        for each in zip(hidden.split(64), [weight] * -(-hidden.shape[0] // 64), ids.split(64), strict=True)
    ]
    return torch.cat(parts)


def dense(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    logits = (hidden @ weight.t()).float()
    kept = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, ids, True)
    return logits.masked_fill(~kept, -torch.inf).log_softmax(-1).gather(1, ids)


def ours(normalize: str) -> Logprobs:
    return lambda hidden, weight, ids: flce.linear_logprobs_at(hidden, weight, ids, normalize=normalize)


def errors(run: Logprobs, layer: Layer, ids: Tensor) -> dict[str, float]:
    """Relative errors of a small step."""
    found: list[list[Tensor]] = []
    for function, dtype in ((run, torch.bfloat16), (gathered, torch.float64)):
        hidden = layer.hidden.detach()[:CHECKED].to(dtype).requires_grad_()
        weight = layer.weight.detach().to(dtype).requires_grad_()
        logprobs = function(hidden, weight, ids[:CHECKED])
        slopes = torch.linspace(-1, 1, logprobs.numel(), device="cuda").view_as(logprobs)
        gradients = torch.autograd.grad((logprobs * slopes).sum(), (hidden, weight))
        found.append([each.detach() for each in (logprobs, *gradients)])
    names = ("logprobs", "grad_hidden", "grad_weight")
    return {
        name: float((got.double() - exact.double()).norm() / exact.double().norm()) for name, got, exact in zip(names, *found, strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4096x2048x151936", help="tokens x hidden size x classes")
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--ids", choices=("zipf", "uniform"), default="zipf")
    parser.add_argument("--seconds", type=float, default=10, help="time to measure, about (default: 10)")
    add_report_arguments(parser)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device")
    layer = Layer(*map(int, arguments.shape.split("x")))
    layer.dlogits = torch.empty(0)
    ids = drawn_ids(arguments.ids, layer.hidden.shape[0], layer.weight.shape[0], arguments.k)
    slopes = torch.randn(ids.shape, device="cuda")
    moved = 2 * ids.numel() * layer.weight.shape[1] * 2 + layer.weight.nbytes
    copied = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
    copy = torch.empty_like(copied)

    def step_of(run: Logprobs) -> Callable[[], Any]:
        return lambda: torch.autograd.grad((run(layer.hidden, layer.weight, ids) * slopes).sum(), (layer.hidden, layer.weight))

    def forward_of(run: Logprobs) -> Callable[[], Any]:
        return lambda: run(layer.hidden.detach(), layer.weight.detach(), ids)

    contenders: dict[str, Logprobs] = {
        "flce": ours("support"),
        "flce vocabulary": ours("vocabulary"),
        "torch": in_chunks,
        "torch dense": dense,
    }
    steps: dict[str, Callable[[], Any]] = {FLOOR: lambda: copy.copy_(copied)}
    rows: dict[str, dict[str, Any]] = {}
    for name, run in contenders.items():
        try:
            step = step_of(run)
            gradients = sum(each.nbytes for each in step())
            rows[name] = {"memory_bytes": peak_of(step) - gradients}
            if name != "flce vocabulary":
                rows[name] |= {f"error_{what}": error for what, error in errors(run, layer, ids).items()}
            steps |= {name: step, f"{name}, forward": forward_of(run)}
        except Exception as error:
            rows[name] = {"reason": reason(error)}
        torch.cuda.empty_cache()
    found = rounds_of(steps, arguments.seconds, behind(layer.forward_gemm, steps))
    for name in steps:
        rows.setdefault(name, {})["milliseconds"] = statistics.median(one[name] for one in found)
    for name, row in rows.items():
        if "milliseconds" in row:
            row["ratio"] = row["milliseconds"] / rows[FLOOR]["milliseconds"]
        print(f"{name:26} { {key: (f'{value:.4g}' if isinstance(value, float) else value) for key, value in row.items()} }", flush=True)
    save(
        arguments,
        {"shape": arguments.shape, "k": arguments.k, "ids": arguments.ids, "moved_bytes": moved, "rounds": len(found), "rows": rows},
    )


if __name__ == "__main__":
    main()
