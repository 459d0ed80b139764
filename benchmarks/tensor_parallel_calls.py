"""Calls beside the cross entropy, over several GPUs, to the GEMMs that they cannot do without.

    torchrun --nproc-per-node=2 benchmarks/tensor_parallel_calls.py [--shape 4096x2048x4096x151936] [--rounds 8] [--out FILE.json]

bf16, a GPU a rank, NCCL without NVLink multicast. Every rank has all tokens and its rows of the weights, the last rank fewer than the
others. `info_nce` has --queries queries and as many documents of 1024 dimensions on each rank. A run is --steps steps one after another, as
in tensor_parallel.py, whose clock this is: behind other work, the slowest rank's time, medians of a step.

Each call stands beside cuBLAS GEMMs on a rank's part, which take turns with it: those of logits once (forward alone) or with both
gradients', and for calls that compute logits again in backward these once more. `error`: of the call's result to that of one GPU with the
whole layer, of its norm. same_bits: whether the results, and hidden's gradient, had the same bits on every rank.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tensor_parallel import ALL, of_all_ranks, provenance, timed
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import flce

K = 64
EMBEDDING = 1024  # dimensions
FEWER = 512  # rows that the last rank's shard lacks


class Layer:
    """Both heads, a rank's rows of them, and embeddings."""

    def __init__(self, shape: str, queries: int) -> None:
        tokens, depth, teacher_depth, classes = map(int, shape.split("x"))
        self.mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        everyones = torch.Generator("cuda").manual_seed(0)

        def drawn(*sizes: int, spread: float = 1.0) -> Tensor:
            return torch.empty(*sizes, dtype=torch.bfloat16, device="cuda").normal_(std=spread, generator=everyones)

        self.hidden = drawn(tokens, depth).requires_grad_()
        self.whole = drawn(classes, depth, spread=2 * depth**-0.5)
        self.teacher_hidden = drawn(tokens, teacher_depth)
        self.teacher_whole = drawn(classes, teacher_depth, spread=2 * teacher_depth**-0.5)
        self.ids = torch.randint(0, classes, (tokens, K), device="cuda", generator=everyones)
        most = -(-(classes + FEWER) // self.ranks)
        rows = slice(self.rank * most, min((self.rank + 1) * most, classes))
        self.weight = self.whole[rows].clone().requires_grad_()
        self.teacher_weight = self.teacher_whole[rows].clone()
        embeddings = [torch.nn.functional.normalize(drawn(self.ranks * queries, EMBEDDING), dim=-1) for _ in range(2)]
        mine = slice(self.rank * queries, (self.rank + 1) * queries)
        self.all_queries, self.all_documents = embeddings
        self.queries, self.documents = (each[mine].clone().requires_grad_() for each in embeddings)
        self.logits = drawn(tokens, len(self.weight))  # last: ranks have unequal numbers of rows

    def forget_gradients(self) -> None:
        for leaf in (self.hidden, self.weight, self.queries, self.documents):
            leaf.grad = None

    # ── GEMMs of a rank's part ──────────────────────

    def student_logits(self) -> None:
        self.hidden.detach() @ self.weight.detach().t()

    def both_logits(self) -> None:
        self.student_logits()
        self.teacher_hidden @ self.teacher_weight.t()

    def gradients(self) -> None:
        self.logits @ self.weight.detach()
        self.logits.t() @ self.hidden.detach()

    def scores(self) -> None:
        queries, documents = self.queries.detach(), self.all_documents
        made = queries @ documents.t()
        made @ documents
        made.t() @ queries


class Call(NamedTuple):
    """A call over ranks, one GPU's call of the whole layer, and the GEMMs that stand beside it."""

    floor: str
    over_ranks: Callable[..., Any]
    alone: Callable[..., Any]


Floor = Callable[[], None]


def floors(layer: Layer) -> dict[str, Floor]:
    def trained(logits: Floor, walks: int) -> Floor:
        def run() -> None:
            for _ in range(walks):
                logits()
            layer.gradients()

        return run

    return {
        "GEMM of logits": layer.student_logits,
        "3 GEMMs": trained(layer.student_logits, 1),
        "4 GEMMs of two heads": trained(layer.both_logits, 1),
        "6 GEMMs of two heads": trained(layer.both_logits, 2),
        "3 GEMMs of embeddings": layer.scores,
    }


def calls(layer: Layer) -> dict[str, Call]:
    teacher = layer.teacher_hidden
    over = {"process_group": layer.mesh}

    def divergence(beta: float, **given: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
        def over_ranks() -> Any:
            return flce.linear_divergence(layer.hidden, layer.weight, teacher, layer.teacher_weight, beta=beta, **given, **over)

        def alone() -> Any:
            return flce.linear_divergence(layer.hidden.detach(), layer.whole, teacher, layer.teacher_whole, beta=beta)

        return over_ranks, alone

    def named(hidden: Tensor, weight: Tensor, **given: Any) -> Any:
        return flce.linear_logprobs_at(hidden, weight, layer.ids, **given)

    def largest(weight: Tensor, **given: Any) -> Any:
        return flce.linear_topk(layer.hidden.detach(), weight, K, **given).logprobs

    def contrastive(queries: Tensor, documents: Tensor, **given: Any) -> Any:
        return flce.info_nce(queries, documents, scale=20.0, **given)

    return {
        "linear_divergence, beta 0": Call("6 GEMMs of two heads", *divergence(0.0)),
        "all retained, beta 0": Call("4 GEMMs of two heads", *divergence(0.0, workspace_limit_bytes=ALL)),
        "linear_divergence, beta 0.5": Call("6 GEMMs of two heads", *divergence(0.5)),
        "all retained, beta 0.5": Call("4 GEMMs of two heads", *divergence(0.5, workspace_limit_bytes=ALL)),
        f"linear_logprobs_at, {K} classes": Call(
            "3 GEMMs", lambda: named(layer.hidden, layer.weight, **over), lambda: named(layer.hidden.detach(), layer.whole)
        ),
        f"linear_topk, {K} classes": Call("GEMM of logits", lambda: largest(layer.weight.detach(), **over), lambda: largest(layer.whole)),
        "info_nce": Call(
            "3 GEMMs of embeddings",
            lambda: contrastive(layer.queries, layer.documents, **over),
            lambda: contrastive(layer.all_queries, layer.all_documents),
        ),
    }


def step_of(call: Call) -> Callable[[], Tensor]:
    def step() -> Tensor:
        made: Tensor = call.over_ranks()
        if made.requires_grad:
            made.sum().backward()
        return made

    return step


def error_of(call: Call) -> float:
    found, right = call.over_ranks().detach().double(), call.alone().double()
    return float((found - right).norm() / right.norm())


def same_bits(layer: Layer, step: Callable[[], Tensor]) -> bool:
    layer.forget_gradients()
    made = step().detach()
    return of_all_ranks(made) and (layer.hidden.grad is None or of_all_ranks(layer.hidden.grad))


def measured(layer: Layer, rounds: int, steps: int, pause: float) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    runs: dict[str, Callable[[], Any]] = dict(floors(layer))
    for name, call in calls(layer).items():
        rows[name] = {"floor": call.floor, "error": error_of(call), "same_bits": same_bits(layer, step_of(call))}
        runs[name] = step_of(call)
        torch.cuda.empty_cache()
    times: dict[str, list[Any]] = {name: [] for name in runs}
    for number in range(-1, rounds):
        for name in random.Random(number).sample(list(runs), len(runs)):
            run = timed(layer, runs[name], steps, pause)  # type: ignore[arg-type]
            if number >= 0:
                times[name].append(run)
    for name, found in times.items():
        row = rows.setdefault(name, {})
        row["milliseconds"] = statistics.median(run.milliseconds for run in found)
        row["host_microseconds"] = statistics.median(run.host_microseconds for run in found)
        row["peak_bytes"] = max(run.peak for run in found)
    for row in rows.values():
        if "floor" in row:
            row["ratio"] = row["milliseconds"] / rows[row["floor"]]["milliseconds"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4096x2048x4096x151936", help="tokens x hidden size x teacher's hidden size x classes")
    parser.add_argument("--queries", type=int, default=16384, help="of a rank (default: 16384)")
    parser.add_argument("--rounds", type=int, default=8, help="that are measured, after one that is not (default: 8)")
    parser.add_argument("--steps", type=int, default=4, help="one after another in a run (default: 4)")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before a run (default: 0)")
    parser.add_argument("--commit", help="of what is measured (default: git's)")
    parser.add_argument("--out", type=Path, help="a file for the figures as JSON")
    options = parser.parse_args()
    if "RANK" not in os.environ or torch.cuda.device_count() <= int(os.environ["LOCAL_RANK"]):
        parser.error("start it with torchrun, with a GPU for every rank")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=datetime.timedelta(seconds=120))
    layer = Layer(options.shape, options.queries)
    found = measured(layer, options.rounds, options.steps, options.pause)
    if dist.get_rank() == 0:
        for name, row in found.items():
            figures = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()}
            print(f"{name:32} {figures}", flush=True)
        if options.out is not None:
            asked = {"shape": options.shape, "queries": options.queries, "rounds": options.rounds, "steps": options.steps}
            options.out.write_text(json.dumps(provenance(options.commit) | asked | {"rows": found}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
