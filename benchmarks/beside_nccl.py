"""Times of a whole output layer's passes while NCCL is at work beside them, on every GPU of this machine at once.

    torchrun --nproc-per-node=2 benchmarks/beside_nccl.py [--shape 4096x2048x151936] [--rounds 9] [--out FILE.json]

bf16, a GPU and a layer of its own a rank, NCCL without NVLink multicast. Beside a pass runs one of two things, on another stream and begun
before it:

    all-reduce    an all-reduce after another for longer than the pass takes, as of a model's other gradients
    receive       a receive of what the rank beside this one sends when its own pass is over: NCCL's kernel waits all the while

The table has medians of the slowest rank in milliseconds, and in brackets the ratio to the same pass alone. "three GEMMs": the bare
products by cuBLAS. Every gradient is compared with the bits that the pass makes alone.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensor_parallel
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import flce

BESIDE = ("alone", "all-reduce", "receive")
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing retained": {"retain_in_grad_weight": False},
    "retained in grad_weight": {"retain_in_grad_weight": True},
    "all retained": tensor_parallel.RETAINED,
}


class Passes:
    """A layer and its passes. A pass leaves tensors behind that must have the same bits every time."""

    def __init__(self, num_tokens: int, hidden_size: int, vocab_size: int) -> None:
        torch.manual_seed(dist.get_rank())
        like: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        self.hidden = torch.randn(num_tokens, hidden_size, **like).requires_grad_()
        self.weight = torch.empty(vocab_size, hidden_size, **like).normal_(std=hidden_size**-0.5).requires_grad_()
        self.target = torch.randint(0, vocab_size, (num_tokens,), device="cuda")
        self.dlogits = torch.randn(num_tokens, vocab_size, **like)
        self.loss = torch.zeros(())

    def gemms(self) -> list[Tensor]:
        hidden, weight = self.hidden.detach(), self.weight.detach()
        F.linear(hidden, weight)
        return [self.dlogits @ weight, self.dlogits.t() @ hidden]

    def forward(self, **options: Any) -> list[Tensor]:
        self.loss = flce.linear_cross_entropy(self.hidden, self.weight, self.target, **options)
        return [self.loss.detach()]

    def backward(self) -> list[Tensor]:
        return list(torch.autograd.grad(self.loss, (self.hidden, self.weight)))

    def all(self) -> dict[str, tuple[Callable[[], Any], Callable[[], list[Tensor]]]]:
        """Passes by name: the work before the pass, and the pass."""
        # Whether forward retains may be in the last bit of its loss, and by default that hangs on the losses that wait.
        forward = functools.partial(self.forward, **OPTIONS["nothing retained"])
        found: dict[str, Any] = {"three GEMMs": (lambda: None, self.gemms), "forward": (lambda: None, forward)}
        for name, options in OPTIONS.items():
            found[f"backward, {name}"] = (lambda options=options: self.forward(**options), self.backward)
        return found


class Beside:
    """Work of NCCL's that runs beside a pass."""

    def __init__(self, megabytes: int, times: int) -> None:
        everyone = list(range(dist.get_world_size()))
        self.groups: list[Any] = [dist.new_group(everyone) for _ in range(3)]
        self.gradients = torch.zeros(megabytes * 10**6 // 4, device="cuda")
        self.times = times
        self.message = torch.zeros(1 << 20, device="cuda")
        self.stream = torch.cuda.Stream()
        dist.all_reduce(self.message, group=self.groups[0])
        for parity in (0, 1):  # a connection is made by both of its ends at once
            self._peer_to_peer(dist.irecv if dist.get_rank() % 2 == parity else dist.isend)

    def _peer_to_peer(self, operation: Any) -> None:
        """Sends to the rank beside this one. Ranks of even and of odd numbers receive over groups of their own, as a pipeline's do."""
        rank = dist.get_rank()
        receiver = rank if operation is dist.irecv else rank ^ 1
        if rank ^ 1 < dist.get_world_size():
            dist.batch_isend_irecv([dist.P2POp(operation, self.message.clone(), rank ^ 1, self.groups[1 + receiver % 2])])

    def begin(self, what: str) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            if what == "all-reduce":
                for _ in range(self.times):
                    dist.all_reduce(self.gradients, group=self.groups[0], async_op=True)
            elif what == "receive":
                self._peer_to_peer(dist.irecv)

    def end(self, what: str) -> None:
        if what == "receive":
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self._peer_to_peer(dist.isend)


def same_bits(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def timed(before: Callable[[], Any], run: Callable[[], list[Tensor]], beside: Beside, what: str) -> tuple[float, list[Tensor]]:
    """Milliseconds of the slowest rank, and what the pass made."""
    before()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    beside.begin(what)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(tensor_parallel.BEHIND_CYCLES)
    begin.record()
    made = run()
    end.record()
    beside.end(what)
    torch.cuda.synchronize()
    slowest = torch.tensor(begin.elapsed_time(end), dtype=torch.float64, device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item(), made


def measured(passes: Passes, beside: Beside, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (before, run) in passes.all().items():
        times: dict[str, list[float]] = {what: [] for what in BESIDE}
        right = timed(before, run, beside, "alone")[1]
        same = True
        for number in range(-1, rounds):
            order = list(BESIDE)
            random.Random(number).shuffle(order)
            for what in order:
                milliseconds, made = timed(before, run, beside, what)
                same = same and same_bits(made, right)
                if number >= 0:
                    times[what].append(milliseconds)
        medians = {what: statistics.median(values) for what, values in times.items()}
        agreed = torch.tensor(int(same), device="cuda")
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        found[name] = {"milliseconds": medians, "same_bits": bool(agreed.item())}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4096x2048x151936", help="tokens x hidden size x vocabulary of each rank")
    parser.add_argument("--rounds", type=int, default=9, help="that are measured, after one that is not (default: 9)")
    parser.add_argument("--megabytes", type=int, default=1000, help="of one all-reduce (default: 1000)")
    parser.add_argument("--times", type=int, default=8, help="all-reduces beside a pass (default: 8)")
    parser.add_argument("--commit", help="of what is measured (default: git's)")
    parser.add_argument("--out", type=Path, help="a file for the figures as JSON")
    options = parser.parse_args()
    if "RANK" not in os.environ or torch.cuda.device_count() <= int(os.environ["LOCAL_RANK"]):
        parser.error("start it with torchrun, with a GPU for every rank")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=datetime.timedelta(seconds=120))
    passes = Passes(*map(int, options.shape.split("x")))
    found = measured(passes, Beside(options.megabytes, options.times), options.rounds)
    report = tensor_parallel.provenance(options.commit) | {"shape": options.shape, "rounds": options.rounds, "passes": found}
    if dist.get_rank() == 0:
        print(f"{report['gpu']}, {report['ranks']} ranks, {options.shape}")
        print("| | " + " | ".join(BESIDE) + " | same bits |\n|---|" + "---|" * 4)
        for name, row in found.items():
            alone = row["milliseconds"]["alone"]
            columns = [f"{row['milliseconds'][what]:.2f} ({row['milliseconds'][what] / alone:.2f})" for what in BESIDE]
            print(f"| {name} | " + " | ".join(columns) + f" | {row['same_bits']} |", flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
