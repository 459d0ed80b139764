"""A training step of an output layer from PyTorch: memory, time and errors of flce at several limits, beside eager torch and torch.compile.

    python benchmarks/python_step.py [--shape 4096x2048x151936] [--schedules step,gpipe,1f1b] [--rounds 10] [--only NAME] [--out FILE]

bf16, on a GPU. Schedules: one microbatch ("step"); four forwards, then four backwards ("gpipe"); four times a forward and its backward
("1f1b", a last stage's). Variants take turns in rounds; medians in milliseconds, the three bare GEMMs by cuBLAS ("floor") among them. Bytes
are the peak of torch's allocator beyond inputs and their gradients, the weight's counted once. Errors are relative to gradients by fp32
logits, of one microbatch.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flce

MIB = 1 << 20
MICROBATCHES = {"step": 1, "gpipe": 4, "1f1b": 4}
ALL = 1 << 40
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def losses() -> dict[str, Loss]:
    def plain(dtype: torch.dtype) -> Loss:
        return lambda hidden, weight, target: F.cross_entropy(F.linear(hidden, weight).to(dtype), target)

    def fused(**options: Any) -> Loss:
        return lambda hidden, weight, target: flce.linear_cross_entropy(hidden, weight, target, **options)

    options: dict[str, dict[str, Any]] = {
        "default": {},
        "nothing retained": {"retain_in_grad_weight": False},
        "all retained": {"workspace_limit_bytes": ALL, "retain_in_grad_weight": False},
    }
    return {
        "eager, fp32 logits": plain(torch.float32),
        "eager, bf16 logits": plain(torch.bfloat16),
        "torch.compile": torch.compile(plain(torch.float32)),
        **{f"flce, {name}": fused(**chosen) for name, chosen in options.items()},
        **{f"flce, {name}, compiled": torch.compile(fused(**chosen), fullgraph=True) for name, chosen in options.items()},
    }


class Layer:
    """Weight, microbatches, and one run of a schedule."""

    def __init__(self, num_tokens: int, hidden_size: int, vocab_size: int) -> None:
        torch.manual_seed(0)
        scale = 2.0 / hidden_size**0.5  # logits with a standard deviation of 2
        self.weight = (torch.randn(vocab_size, hidden_size, device="cuda") * scale).bfloat16().requires_grad_()
        self.hidden = [torch.randn(num_tokens, hidden_size, device="cuda").bfloat16().requires_grad_() for _ in range(4)]
        self.target = [torch.randint(0, vocab_size, (num_tokens,), device="cuda") for _ in range(4)]

    def run(self, loss: Loss, schedule: str) -> None:
        count = MICROBATCHES[schedule]
        self.weight.grad = None
        for hidden in self.hidden:
            hidden.grad = None
        if schedule == "1f1b":
            for i in range(count):
                loss(self.hidden[i], self.weight, self.target[i]).backward()
            return
        alive = [loss(self.hidden[i], self.weight, self.target[i]) for i in range(count)]
        for value in alive:
            value.backward()

    def bytes_beyond(self, loss: Loss, schedule: str) -> int:
        self.weight.grad = None
        for hidden in self.hidden:
            hidden.grad = None
        torch.cuda.synchronize()
        gradients = self.weight.nbytes + MICROBATCHES[schedule] * self.hidden[0].nbytes
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.run(loss, schedule)
        return torch.cuda.max_memory_allocated() - before - gradients

    def reference(self) -> tuple[Tensor, Tensor, Tensor]:
        """(loss, gradient of hidden, of weight) of the first microbatch by fp32 logits."""
        hidden, weight = self.hidden[0].detach().float(), self.weight.detach().float()
        logits = hidden @ weight.T
        target = self.target[0]
        loss = F.cross_entropy(logits, target)
        logits.sub_(logits.logsumexp(-1, keepdim=True)).exp_()
        logits[torch.arange(target.shape[0], device="cuda"), target] -= 1.0
        logits.div_(target.shape[0])
        return loss, logits @ weight, logits.T @ hidden

    def errors(self, loss: Loss, expected: tuple[Tensor, Tensor, Tensor]) -> dict[str, float]:
        value = loss(self.hidden[0], self.weight, self.target[0])
        gradients = torch.autograd.grad(value, (self.hidden[0], self.weight))
        result = {"loss": abs(value.item() - expected[0].item()) / expected[0].item()}
        for name, actual, right in zip(("grad_hidden", "grad_weight"), gradients, expected[1:], strict=True):
            result[name] = ((actual.float() - right).norm() / right.norm()).item()
        return result

    def floor(self, schedule: str) -> Callable[[], None]:
        """The three GEMMs of each microbatch, all of whose outputs exist already."""
        weight, count = self.weight.detach(), MICROBATCHES[schedule]
        logits = torch.empty(self.hidden[0].shape[0], weight.shape[0], dtype=weight.dtype, device="cuda")
        grad_hidden, grad_weight = torch.empty_like(self.hidden[0]), torch.empty_like(weight)

        def run() -> None:
            for hidden in self.hidden[:count]:
                torch.mm(hidden.detach(), weight.T, out=logits)
                torch.mm(logits, weight, out=grad_hidden.detach())
                torch.mm(logits.T, hidden.detach(), out=grad_weight)

        return run


def milliseconds(step: Callable[[], None]) -> float:
    events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    events[0].record()
    step()
    events[1].record()
    torch.cuda.synchronize()
    return float(events[0].elapsed_time(events[1]))


def measure(layer: Layer, chosen: dict[str, Loss], schedule: str, rounds: int) -> list[dict[str, Any]]:
    rows = []
    for name, loss in chosen.items():
        for _ in range(3):  # kernels compile; and lending depends on the schedule before
            layer.run(loss, schedule)
        rows.append({"schedule": schedule, "loss": name, "bytes_beyond": layer.bytes_beyond(loss, schedule), "ms": []})
        torch.cuda.empty_cache()
    floor = layer.floor(schedule)
    floor()
    floors: list[float] = []
    for i in range(rounds):
        floors.append(milliseconds(floor))
        for row in rows if i % 2 else reversed(rows):  # the row before leaves the chip hot or cool
            loss = chosen[row["loss"]]
            layer.run(loss, schedule)  # a run of its own: lending looks one schedule back
            row["ms"].append(milliseconds(lambda loss=loss: layer.run(loss, schedule)))  # type: ignore[misc]
    base = statistics.median(floors)
    rows.insert(0, {"schedule": schedule, "loss": "floor: three cuBLAS GEMMs", "bytes_beyond": None, "ms": floors})
    for row in rows:
        times = sorted(row.pop("ms"))
        row |= {"median_ms": statistics.median(times), "min_ms": times[0], "max_ms": times[-1], "to_floor": statistics.median(times) / base}
        held = "" if row["bytes_beyond"] is None else f"{row['bytes_beyond'] / MIB:9.1f} MiB"
        spread = f"{row['median_ms']:8.2f} ms ({row['min_ms']:.2f} to {row['max_ms']:.2f})"
        print(f"{schedule:>6} {row['loss']:>34} {held:>14} {spread} {row['to_floor']:.3f}", flush=True)
    return rows


def provenance(commit: str | None) -> dict[str, Any]:
    def output(*command: str) -> str | None:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    return {
        "date": datetime.date.today().isoformat(),
        "gpu": output("nvidia-smi", "--query-gpu=name,driver_version,power.limit,clocks.sm,power.draw", "--format=csv,noheader"),
        "torch": torch.__version__,
        "commit": commit or output("git", "rev-parse", "--short", "HEAD"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4096x2048x151936", help="num_tokens x hidden_size x vocab_size")
    parser.add_argument("--schedules", default="step,gpipe,1f1b")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", action="append", default=[], help="a variant by name; may be repeated")
    parser.add_argument("--commit", help="of what is measured (default: git's)")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    layer = Layer(*map(int, arguments.shape.split("x")))
    chosen = {name: loss for name, loss in losses().items() if not arguments.only or name in arguments.only}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {arguments.shape}, bf16")
    expected = layer.reference()
    errors = {}
    for name, loss in chosen.items():
        errors[name] = layer.errors(loss, expected)
        print(f"errors {name:>34} " + " ".join(f"{key} {value:.2e}" for key, value in errors[name].items()), flush=True)
    del expected
    torch.cuda.empty_cache()
    rows = [row for schedule in arguments.schedules.split(",") for row in measure(layer, chosen, schedule, arguments.rounds)]
    if arguments.out:
        record = provenance(arguments.commit) | {"shape": arguments.shape, "rounds": arguments.rounds, "errors": errors, "rows": rows}
        Path(arguments.out).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
