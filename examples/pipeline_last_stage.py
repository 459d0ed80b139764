"""A pipeline's last stage with the loss fused into it: two ranks, tied embeddings, real text.

Without arguments it trains twice, with materialised logits and with flce, and prints losses and the peak memory of the rank that has the
last stage. With --schedule zbv backward is split in two, and the stages lie in a V: the first rank has the first and the last one. With
--measure, on a GPU, it has four microbatches of 4096 x 2048 x 151936 in flight and compares flce with eager torch and torch.compile.

Two processes on the CPU (gloo) or, where there are two, on GPUs (nccl). The text is this repository's own documentation, a token a word.
"""

from __future__ import annotations

import argparse
import datetime
import inspect
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from engine.processes import run_processes
from measuring import MIB, peak, reset_peak
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble

import flce

ROOT = Path(__file__).resolve().parent.parent
# Imports of the process that ranks are forked from: each would import for seconds.
PRELOADED = ["torch.distributed.pipelining", "flce"]
# Schedules before torch 2.7 do not scale gradients.
UNSCALED: dict[str, Any] = {"scale_grads": False} if "scale_grads" in inspect.signature(Schedule1F1B.__init__).parameters else {}
# Schedules by name: the class, and the numbers of rank 0's and rank 1's stages.
SCHEDULES: dict[str, tuple[Any, list[list[int]]]] = {
    "1f1b": (Schedule1F1B, [[0], [1]]),
    "zbv": (ScheduleZBVZeroBubble, [[0, 3], [1, 2]]),
}


@dataclass
class Config:
    """Sizes of the model and of its training."""

    hidden_size: int = 128
    vocab_size: int = 8192  # the words that the text has, padded as real vocabularies are
    sequence: int = 256
    sequences: int = 4  # in a microbatch
    microbatches: int = 4
    steps: int = 24
    learning_rate: float = 3e-3
    schedule: str = "1f1b"


# ── Text ──────────────────────────────────────────


def read_tokens(vocab_size: int) -> Tensor:
    """The documentation as word numbers, the most frequent word first; words beyond the vocabulary share its last number."""
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "LICENSE", *sorted((ROOT / "docs").glob("*.md"))]
    words = re.findall(r"\w+|[^\w\s]|\n", "\n".join(path.read_text(encoding="utf-8") for path in files))
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    numbers = {word: min(i, vocab_size - 1) for i, word in enumerate(sorted(counts, key=lambda word: (-counts[word], word)))}
    return torch.tensor([numbers[word] for word in words])


def batches(config: Config) -> Callable[[int], Tensor]:
    """step -> token ids [sequences of the whole batch, sequence]."""
    tokens = read_tokens(config.vocab_size)
    rows = config.sequences * config.microbatches

    def batch(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(0, tokens.numel() - config.sequence, (rows,), generator=generator)
        return torch.stack([tokens[start : start + config.sequence] for start in starts.tolist()])

    return batch


# ── Model ─────────────────────────────────────────


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, hidden_size: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.RMSNorm(hidden_size), nn.RMSNorm(hidden_size)])
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.out = nn.Linear(hidden_size, hidden_size, bias=False)
        self.mlp = nn.Sequential(nn.Linear(hidden_size, 4 * hidden_size), nn.GELU(), nn.Linear(4 * hidden_size, hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class FirstStage(nn.Module):
    """Embedding and a layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.sequence, config.hidden_size)
        self.block = Block(config.hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.block(self.embedding(tokens) + self.position.weight)


class MiddleStage(nn.Module):
    """A layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.block = Block(config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.block(hidden)


class LastStage(nn.Module):
    """A layer and the head. The head is a parameter of the stage, but forward returns hidden states: the loss applies it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.block = Block(config.hidden_size)
        self.norm = nn.RMSNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(self.block(hidden))


class MaterialisedLoss:
    """The loss that flce replaces: logits in memory, then cross entropy. Sums over the microbatch, divided by the whole batch's number of
    labels."""

    def __init__(self, head: nn.Linear) -> None:
        self.head = head
        self.count: Tensor | None = None

    def normalize_by(self, labels: Tensor) -> None:
        self.count = (labels[:, 1:] != -100).sum()

    def __call__(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(hidden)[:, :-1].float()
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / self.count


# ── Training ────────────────────────────────────────


def make_stages(rank: int, config: Config, device: torch.device) -> dict[int, Any]:
    """This rank's stages by their numbers, with equal tables on the first and the last one."""
    numbers = SCHEDULES[config.schedule][1]
    last = max(map(max, numbers))
    kinds = {0: FirstStage, last: LastStage}
    torch.manual_seed(rank)
    modules: dict[int, Any] = {number: kinds.get(number, MiddleStage)(config).to(device) for number in numbers[rank]}
    table = torch.empty(config.vocab_size, config.hidden_size, device=device)
    nn.init.normal_(table, std=0.02)
    dist.broadcast(table, 0)
    if 0 in modules:
        modules[0].embedding.weight.data.copy_(table)
    if last in modules:
        modules[last].head.weight.data.copy_(table)
    if 0 in modules and last in modules:
        modules[last].head.weight = modules[0].embedding.weight  # one parameter: autograd adds up both uses
    return modules


def make_schedule(modules: dict[int, Any], loss_fn: Any, config: Config, device: torch.device) -> Any:
    kind, numbers = SCHEDULES[config.schedule]
    stages = [PipelineStage(module, number, sum(map(len, numbers)), device) for number, module in modules.items()]
    if hasattr(PipelineStage, "_get_init_p2p_neighbors_ops"):
        for stage in stages:  # torch before 2.13 has two neighbours on one rank greet each other, which hangs
            stage._get_init_p2p_neighbors_ops = lambda: []  # type: ignore[method-assign]
    given = stages[0] if len(stages) == 1 else stages
    return kind(given, config.microbatches, loss_fn=loss_fn or (lambda *_: None), **UNSCALED)


def stage_main(rank: int, store: str, results: Any, fused: bool, config: Config) -> None:
    """A rank's process: rank 0 has the first stage."""
    cuda = torch.cuda.device_count() >= 2
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    modules = make_stages(rank, config, device)
    has_first = any(isinstance(module, FirstStage) for module in modules.values())
    last: Any = next((module for module in modules.values() if isinstance(module, LastStage)), None)

    loss_fn: Any = None
    if last is not None:
        # flce by name: "auto" would go on with plain torch where libflce is missing, and this is about flce.
        loss_fn = (
            flce.PipelineFusedLoss(last.head, impl="flce", workspace_limit_bytes=4 * MIB, shift=1) if fused else MaterialisedLoss(last.head)
        )
    schedule = make_schedule(modules, loss_fn, config, device)
    parameters = list(nn.ModuleList(modules.values()).parameters())
    optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate)
    batch = batches(config)
    history: list[float] = []
    start = 0
    for step in range(config.steps):
        tokens = batch(step).to(device)
        losses: list[Tensor] = []
        if last is not None:
            loss_fn.normalize_by(tokens)
        schedule.step(*([tokens] if has_first else []), **({"target": tokens, "losses": losses} if last is not None else {}))
        if has_first != (last is not None):  # copies of one table on two ranks stay equal
            flce.sum_tied_gradient(modules[0].embedding.weight if has_first else last.head.weight)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if last is not None:
            history.append(torch.stack(losses).detach().sum().item())
        if step == 0:  # everything lazy (kernels, optimizer state, communicators) exists now
            start = reset_peak(device)
    if last is not None:
        results.put((history, peak(device) - start))
    dist.barrier()
    dist.destroy_process_group()


def train(fused: bool, config: Config) -> tuple[list[float], int]:
    """Losses of the steps, and by how many bytes the last stage's memory rose at most above what it holds between steps."""
    history, rise = run_processes(stage_main, 2, fused, config, preload=PRELOADED)
    return history, rise


def demo(config: Config) -> int:
    print(
        f"two ranks, {config.schedule}, {config.microbatches} microbatches of {config.sequences * config.sequence} tokens, "
        f"hidden size {config.hidden_size}, "
        f"vocabulary {config.vocab_size}, tied embeddings"
    )
    runs = {}
    for name, fused in (("materialised logits", False), ("flce", True)):
        runs[name] = train(fused, config)
    names = list(runs)
    print(f"{'step':>6} " + " ".join(f"{name:>20}" for name in names))
    shown = sorted({0, config.steps // 4, config.steps // 2, 3 * config.steps // 4, config.steps - 1})
    for step in shown:
        print(f"{step:>6} " + " ".join(f"{runs[name][0][step]:>20.5f}" for name in names))
    print("last stage's peak above what it holds between steps:")
    for name in names:
        print(f"  {name:>20}: {runs[name][1] / MIB:8.1f} MiB")
    first, last = runs["flce"][0][0], runs["flce"][0][-1]
    apart = max(abs(a - b) for a, b in zip(*(runs[name][0] for name in names), strict=True))
    learnt = config.steps < 2 or last < first
    print(f"flce: loss {first:.4f} -> {last:.4f}; largest difference between the two runs {apart:.2e}")
    if not learnt or apart > 0.02 * first:
        print("the two runs disagree, or the model did not learn", file=sys.stderr)
        return 1
    return 0


# ── Measurement ───────────────────────────────────────


def loss_functions(head: nn.Linear) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    def eager(dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda hidden, target: F.cross_entropy(F.linear(hidden, head.weight).to(dtype), target)

    fused = flce.PipelineFusedLoss(head, impl="flce", shift=0)
    accumulating = flce.PipelineFusedLoss(head, impl="flce", shift=0, accumulate_into_grad=True)
    return {
        "eager, fp32 logits": eager(torch.float32),
        "eager, bf16 logits": eager(torch.bfloat16),
        "torch.compile": torch.compile(eager(torch.float32)),
        "flce": fused,
        "flce into .grad": accumulating,
    }


def measure_one(
    function: Callable[[Tensor, Tensor], Tensor], head: nn.Linear, hidden: list[Tensor], target: list[Tensor], rounds: int
) -> Any:
    """(bytes beyond parameters, gradients and hidden states at the peak, median milliseconds) of four forwards, then four backwards, as
    GPipe runs them."""

    def step() -> None:
        losses = [function(h, t) for h, t in zip(hidden, target, strict=True)]
        for loss in losses:
            loss.backward()

    times = []
    for i in range(rounds + 2):
        for h in hidden:
            h.grad = None
        if i == 1:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated() + sum(h.nbytes for h in hidden)  # hidden's gradients, made by this step
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        step()
        events[1].record()
        torch.cuda.synchronize()
        if i == 1:
            beyond = torch.cuda.max_memory_allocated() - held
        if i >= 2:
            times.append(events[0].elapsed_time(events[1]))
    return beyond, statistics.median(times)


def measure(out: str | None, num_tokens: int, hidden_size: int, vocab_size: int, rounds: int, names: list[str]) -> int:
    if not torch.cuda.is_available():
        print("--measure needs a GPU", file=sys.stderr)
        return 3
    torch.manual_seed(0)
    head = nn.Linear(hidden_size, vocab_size, bias=False, dtype=torch.bfloat16, device="cuda")
    head.weight.grad = torch.zeros_like(head.weight)
    hidden = [torch.randn(num_tokens, hidden_size, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(4)]
    target = [torch.randint(0, vocab_size, (num_tokens,), device="cuda") for _ in range(4)]
    rows = []
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: four microbatches of "
        f"{num_tokens} x {hidden_size} x {vocab_size} in flight, bf16"
    )
    print(f"{'':>20} {'beyond parameters, gradients, hidden':>38} {'four microbatches':>18}")
    for name, function in loss_functions(head).items():
        if names and name not in names:
            continue
        beyond, milliseconds = measure_one(function, head, hidden, target, rounds)
        rows.append({"loss": name, "bytes_beyond": beyond, "milliseconds": milliseconds, "rounds": rounds})
        print(f"{name:>20} {beyond / MIB:>34.1f} MiB {milliseconds:>15.1f} ms", flush=True)
        torch.cuda.empty_cache()
    limit = 96 * MIB + head.weight.nbytes + 4 * 18_000_000
    print(f"{'limit for flce':>20} {limit / MIB:>34.1f} MiB  (96 MiB + one temporary dW + 18 MB a microbatch)")
    within = all(row["bytes_beyond"] <= limit for row in rows if row["loss"].startswith("flce"))
    if out:
        Path(out).write_text(
            json.dumps(provenance() | {"shape": [num_tokens, hidden_size, vocab_size], "limit": limit, "rows": rows}, indent=1) + "\n"
        )
    return 0 if within else 1


def provenance() -> dict[str, Any]:
    def output(*command: str) -> str | None:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    return {
        "date": datetime.date.today().isoformat(),
        "gpu": output("nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"),
        "torch": torch.__version__,
        "commit": output("git", "rev-parse", "--short", "HEAD"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a few steps of a smaller model, for tests")
    parser.add_argument("--steps", type=int, help="optimizer steps")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="(default: 1f1b)")
    parser.add_argument("--measure", action="store_true", help="memory and time of the loss alone at a real shape, on a GPU")
    parser.add_argument("--shape", default="4096x2048x151936", help="of --measure: num_tokens x hidden_size x vocab_size")
    parser.add_argument("--rounds", type=int, default=5, help="of --measure")
    parser.add_argument("--only", action="append", default=[], help="of --measure: one loss by name; may be repeated")
    parser.add_argument("--out", help="of --measure: write JSON here")
    arguments = parser.parse_args()
    if arguments.measure:
        num_tokens, hidden_size, vocab_size = map(int, arguments.shape.split("x"))
        return measure(arguments.out, num_tokens, hidden_size, vocab_size, arguments.rounds, arguments.only)
    config = Config(hidden_size=64, vocab_size=16384, sequence=64, sequences=2, steps=6) if arguments.tiny else Config()
    config.steps = arguments.steps or config.steps
    config.schedule = arguments.schedule
    return demo(config)


if __name__ == "__main__":
    sys.exit(main())
