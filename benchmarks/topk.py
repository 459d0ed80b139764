"""flce.linear_topk beside what else finds a token's most likely classes, beside flce's own forward and the bare GEMM, in one process and in
an order drawn anew.

    python3 benchmarks/topk.py [--shape 4096x2048x151936] [--k 64] [--seconds 10] [--out FILE.json]

bf16, each contender behind the GEMM, so that each finds the GPU's clocks as it leaves them. `forward` is flce.linear_logprobs of one target
a token; `torch` are whole logits, `torch in chunks` 512 tokens of them at a time, both in fp32 behind a bf16 product, as trainers have it.
The table has medians: milliseconds, ratios to the GEMM and to `forward`, peak memory beyond inputs and results, and the share of classes
that fp64 logits of 64 tokens have in the same place.
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

import flce

FLOOR, FORWARD = "GEMM", "forward"
CHECKED = 64
Find = Callable[[Tensor], tuple[Tensor, Tensor]]  # log-probabilities and ids of hidden states


def of_logits(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    found = logits.topk(k)
    return found.values - logits.logsumexp(-1, keepdim=True), found.indices


def contenders(layer: Layer, k: int) -> dict[str, Find]:
    weight = layer.weight.detach()

    def chunks(hidden: Tensor) -> tuple[Tensor, Tensor]:
        parts = [of_logits(part @ weight.t(), k) for part in hidden.split(512)]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def ours(limit: int | None = None) -> Find:
        def find(hidden: Tensor) -> tuple[Tensor, Tensor]:
            made = flce.linear_topk(hidden, weight, k, workspace_limit_bytes=limit)
            return made.logprobs, made.ids

        return find

    return {
        "flce": ours(),
        "flce in 256 MiB": ours(256 << 20),
        "torch": lambda hidden: of_logits(hidden @ weight.t(), k),
        "torch in chunks": chunks,
    }


def right_places(find: Find, layer: Layer, k: int) -> float:
    hidden = layer.hidden.detach()[:CHECKED]
    exact = (hidden.double() @ layer.weight.detach().double().t()).topk(k).indices
    return float((find(hidden)[1] == exact).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4096x2048x151936", help="tokens x hidden size x classes")
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10, help="time to measure, about (default: 10)")
    add_report_arguments(parser)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device")
    layer = Layer(*map(int, arguments.shape.split("x")))
    layer.dlogits = torch.empty(0)
    hidden = layer.hidden.detach()
    steps: dict[str, Callable[[], Any]] = {FLOOR: layer.forward_gemm}
    steps[FORWARD] = lambda: flce.linear_logprobs(hidden, layer.weight.detach(), layer.target)
    rows: dict[str, dict[str, Any]] = {}
    for name, find in contenders(layer, arguments.k).items():
        try:
            run = lambda find=find: find(hidden)  # noqa: E731
            results = sum(each.nbytes for each in run())
            rows[name] = {"right_places": right_places(find, layer, arguments.k), "memory_bytes": peak_of(run) - results}
            steps[name] = run
        except Exception as error:
            rows[name] = {"reason": reason(error)}
    found = rounds_of(steps, arguments.seconds, behind(steps[FLOOR], steps))
    for name in steps:
        rows.setdefault(name, {})["milliseconds"] = statistics.median(one[name] for one in found)
    for name, row in rows.items():
        if "milliseconds" in row:
            row["ratio"] = row["milliseconds"] / rows[FLOOR]["milliseconds"]
            row["to_forward"] = row["milliseconds"] / rows[FORWARD]["milliseconds"]
        print(f"{name:20} { {key: (f'{value:.4g}' if isinstance(value, float) else value) for key, value in row.items()} }", flush=True)
    save(arguments, {"shape": arguments.shape, "k": arguments.k, "rounds": len(found), "rows": rows})


if __name__ == "__main__":
    main()
