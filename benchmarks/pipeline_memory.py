"""GPipe's last stage: time and memory of several microbatches whose losses all wait for their backward, over memory_limit_bytes.

    python3 benchmarks/pipeline_memory.py [--shape 4096x2048x151936] [--microbatches 4] [--seconds 20] [--out FILE] [--plot FILE.svg]

A step is the forward of every microbatch and then every backward, by PipelineFusedLoss with the weight's gradient added in place. The
limits go from one call's need to room for every microbatch's exponentials. Beside it stand F.linear with cross_entropy, on fp32 and on
16-bit logits, and torch.compile of the first. "ratio" is the time to that of three cuBLAS GEMMs for each microbatch; the median over the
rounds. Before each step they run twice, the second time timed, so that the step and they find the GPU's clocks as such GEMMs leave them.
"arithmetic" is (8 - 2f) / 6, with f the part of all exponentials that the limit has room for beside one call's scratch. Memory is the peak
beyond inputs, weight and their gradients. Rounds are interleaved: every contender once in each, in random order. "by itself": every
microbatch's backward follows its forward, with a limit of its own, as calls without a shared limit run.

Needs a GPU. Writes JSON (default: benchmarks/results/GPU-DATE-pipeline-memory.json); --plot needs matplotlib.
--draw JSON draws an earlier measurement.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from gpu_timing import ROOT, commit, driver, timed
from torch import Tensor, nn

import flce

GB = 1e9


@dataclass
class Contender:
    name: str
    step: Callable[[], None]
    arithmetic: float | None = None
    limit_bytes: int | None = None  # bytes for all microbatches, or for each one by itself
    by_itself: bool = False
    milliseconds: list[float] = field(default_factory=list)
    floors: list[float] = field(default_factory=list)  # times of the GEMMs before each of them
    peak_bytes: int = 0
    failure: str = ""


class Stage:
    """The last stage's inputs: hidden states and labels of every microbatch, the head and its gradient's buffer."""

    def __init__(self, num_tokens: int, hidden_size: int, vocab_size: int, microbatches: int) -> None:
        torch.manual_seed(0)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False, device="cuda", dtype=torch.bfloat16)
        self.head.weight.grad = torch.zeros_like(self.head.weight)
        self.hidden = [
            torch.randn(num_tokens, hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(microbatches)
        ]
        self.labels = [torch.randint(vocab_size, (num_tokens,), device="cuda") for _ in range(microbatches)]

    def run(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        losses = [loss(hidden, labels) for hidden, labels in zip(self.hidden, self.labels, strict=True)]
        while losses:
            losses.pop(0).backward()

    def run_by_itself(self, limit: int) -> None:
        into = self.head.weight.grad
        for hidden, labels in zip(self.hidden, self.labels, strict=True):
            flce.linear_cross_entropy(hidden, self.head.weight, labels, grad_weight_out=into, workspace_limit_bytes=limit).backward()

    def clear(self) -> None:
        for hidden in self.hidden:
            hidden.grad = None

    def gemms(self) -> None:
        weight, grad_weight = self.head.weight.data, self.head.weight.grad
        assert grad_weight is not None
        for hidden in self.hidden:
            logits = hidden.data @ weight.t()
            torch.mm(logits, weight)
            grad_weight.addmm_(logits.t(), hidden.data)


def contenders(stage: Stage, steps: int) -> list[Contender]:
    num_tokens, hidden_size = stage.hidden[0].shape
    vocab_size = stage.head.weight.shape[0]

    def fp32(hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, stage.head.weight).float(), labels)

    def bf16(hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, stage.head.weight), labels)

    compiled = torch.compile(fp32)
    made = [
        Contender("three GEMMs", stage.gemms),
        Contender("eager, fp32 logits", lambda: stage.run(fp32)),
        Contender("eager, bf16 logits", lambda: stage.run(bf16)),
        Contender("torch.compile", lambda: stage.run(compiled)),
    ]
    kernel = flce.get_kernel(
        hidden_size, vocab_size, torch.bfloat16, device="cuda", accumulate=True, workspace_limit_bytes=1 << 40, num_tokens=num_tokens
    )
    scratch = max(kernel.workspace_bytes(num_tokens, backward=backward) for backward in (False, True))
    everything = kernel.retained_bytes(num_tokens) * len(stage.hidden)
    for number in range(steps + 1):
        limit = scratch + everything * number // steps
        loss = flce.PipelineFusedLoss(stage.head, impl="flce", shift=0, accumulate_into_grad=True, memory_limit_bytes=limit)
        arithmetic = (8 - 2 * number / steps) / 6
        made.append(Contender(f"flce, {limit / GB:.2f} GB", lambda loss=loss: stage.run(loss), arithmetic, limit))  # type: ignore[misc]
    for part in (0.0, 0.5, 1.0):
        limit = scratch + int(kernel.retained_bytes(num_tokens) * part)
        step = functools.partial(stage.run_by_itself, limit)
        made.append(Contender(f"by itself, {limit / GB:.2f} GB", step, (8 - 2 * part) / 6, limit, by_itself=True))
    return made


def measure(stage: Stage, contender: Contender) -> None:
    """One step behind the GEMMs: its time, theirs, and its peak."""
    stage.clear()
    torch.cuda.synchronize()
    stage.gemms()
    contender.floors.append(timed(stage.gemms))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    contender.milliseconds.append(timed(contender.step))
    outputs = sum(hidden.grad.nbytes for hidden in stage.hidden if hidden.grad is not None)
    contender.peak_bytes = torch.cuda.max_memory_allocated() - before - outputs


def measure_all(stage: Stage, all_of: list[Contender], seconds: float) -> None:
    for contender in all_of:  # compiles and warms up
        try:
            measure(stage, contender)
            measure(stage, contender)
        except torch.cuda.OutOfMemoryError as error:
            contender.failure = str(error).splitlines()[0]
        print(f"warmed up: {contender.name} {contender.failure}", file=sys.stderr, flush=True)
        contender.milliseconds.clear()
        contender.floors.clear()
    able = [contender for contender in all_of if not contender.failure]
    end = time.monotonic() + seconds
    order = random.Random(0)
    while time.monotonic() < end or len(able[0].milliseconds) < 3:
        for contender in order.sample(able, len(able)):
            measure(stage, contender)


def rows(all_of: list[Contender]) -> list[dict[str, object]]:
    done: list[dict[str, object]] = []
    for contender in all_of:
        row: dict[str, object] = {"name": contender.name, "limit_bytes": contender.limit_bytes, "arithmetic": contender.arithmetic}
        if contender.by_itself:
            row["by_itself"] = True
        if contender.failure:
            row["failure"] = contender.failure
        else:
            median = statistics.median(contender.milliseconds)
            spread = (max(contender.milliseconds) - min(contender.milliseconds)) / median
            ratios = [own / floor for own, floor in zip(contender.milliseconds, contender.floors, strict=True)]
            row |= {"ms": median, "spread": spread, "ratio": statistics.median(ratios), "rounds": len(ratios)}
            row["ratio_quartiles"] = statistics.quantiles(ratios, n=4)[::2]
            row["peak_bytes"] = contender.peak_bytes
        done.append(row)
    return done


def report(done: list[dict[str, object]]) -> None:
    print(f"{'':>22} {'GB beyond':>10} {'ms':>9} {'ratio':>7} {'arithmetic':>11}")
    for row in done:
        if "failure" in row:
            print(f"{row['name']:>22} {row['failure']}")
            continue
        arithmetic = "" if row["arithmetic"] is None else f"{row['arithmetic']:11.3f}"
        gigabytes = row["peak_bytes"] / GB  # type: ignore[operator]
        print(f"{row['name']:>22} {gigabytes:10.2f} {row['ms']:9.2f} {row['ratio']:7.3f} {arithmetic}")


def draw(done: list[dict[str, object]], title: str, path: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.5))
    curve = [row for row in done if row["arithmetic"] is not None and "ratio" in row and "by_itself" not in row]
    memory = [float(row["peak_bytes"]) / GB for row in curve]  # type: ignore[arg-type]
    axes.plot(memory, [row["arithmetic"] for row in curve], "--", color="gray", label="(8 - 2f) / 6")  # type: ignore[arg-type]
    axes.plot(memory, [row["ratio"] for row in curve], "o-", label="flce, memory_limit_bytes")  # type: ignore[arg-type]
    for row in done[1:]:
        if row["arithmetic"] is None and "ratio" in row:
            axes.plot([float(row["peak_bytes"]) / GB], [row["ratio"]], "s", label=row["name"])  # type: ignore[arg-type]
    axes.set(xlabel="GB beyond inputs and gradients, all microbatches", ylabel="time / three GEMMs of each", title=title, ylim=(0.95, None))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def title_of(about: dict[str, object]) -> str:
    return f"{about['microbatches']} microbatches of {about['shape']}, {about['gpu']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4096x2048x151936", help="num_tokens x hidden_size x vocab_size of a microbatch")
    parser.add_argument("--microbatches", type=int, default=4, help="losses that are alive together")
    parser.add_argument("--steps", type=int, default=8, help="parts of the curve")
    parser.add_argument("--seconds", type=float, default=20, help="time to measure, about")
    parser.add_argument("--commit", help="of what is measured (default: git's)")
    parser.add_argument("--out", help="JSON")
    parser.add_argument("--plot", help="a picture")
    parser.add_argument("--draw", help="only draw that JSON, into --plot")
    arguments = parser.parse_args()
    if arguments.draw:
        kept = json.loads(Path(arguments.draw).read_text())
        draw(kept["rows"], title_of(kept["context"]), arguments.plot or parser.error("--draw needs --plot"))
        return 0
    if not torch.cuda.is_available():
        sys.exit("no CUDA device")
    num_tokens, hidden_size, vocab_size = map(int, arguments.shape.split("x"))
    stage = Stage(num_tokens, hidden_size, vocab_size, arguments.microbatches)
    all_of = contenders(stage, arguments.steps)
    measure_all(stage, all_of, arguments.seconds)
    flce.check_labels()
    done = rows(all_of)
    report(done)
    name = torch.cuda.get_device_name()
    today = datetime.date.today().isoformat()
    about = {
        "gpu": name,
        "driver": driver(),
        "torch": torch.__version__,
        "commit": arguments.commit or commit(),
        "date": today,
        "shape": arguments.shape,
        "microbatches": arguments.microbatches,
    }
    out = arguments.out or str(ROOT / "benchmarks" / "results" / f"{name.split()[-1].lower()}-{today}-pipeline-memory.json")
    Path(out).write_text(json.dumps({"context": about, "rows": done}, indent=1) + "\n")
    print(out)
    if arguments.plot:
        draw(done, title_of(about), arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
