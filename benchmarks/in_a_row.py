"""Steps in a row, as in training: seconds of the same step without a pause, until the GPU is at its power limit and its clock has settled.

    python3 benchmarks/in_a_row.py [--shape 8192x4096x64128] [--plan grad_weight=192x128x64x4/4x1 ...] [--seconds 3] [--out FILE.json]

bf16. Other benchmarks let contenders take turns within tens of milliseconds: all of them have one clock then, and their times compare
cycles. In a row each has the clock that its own power allows, so times compare energy. Contenders:

    three GEMMs                 by cuBLAS, operands of both signs; and each of the three by itself
    three GEMMs, exponentials   the backward products read exponentials, as flce's do: whether operands make a difference
    flce                        forward and backward as planned, everything retained by a limit; forward alone
    flce, PLAN                  the same with parts of the plan replaced, by --plan

The table has, from the second half of each row, the median of a step in milliseconds, its ratio to the GEMMs, and medians of clock and
power; rows come in rounds, in an order drawn anew. Needs a GPU and nvidia-ml-py, which reads the SM clock in MHz and the power in W.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from ctypes import byref, c_void_p, sizeof
from pathlib import Path
from typing import Any

import torch
from gpu_timing import Layer, commit, driver

import flce
from flce import _native

ALL = 1 << 40
FLOOR = "three GEMMs"
Step = Callable[[], object]


class StepsOfALayer(Layer):
    """A layer whose backward products read numbers of both signs, or exponentials."""

    def __init__(self, num_tokens: int, hidden_size: int, vocab_size: int) -> None:
        super().__init__(num_tokens, hidden_size, vocab_size)
        self.exponentials = self.dlogits.exp()

    def loss(self, limit: int) -> torch.Tensor:
        loss: torch.Tensor = flce.linear_cross_entropy(
            self.hidden, self.weight, self.target, workspace_limit_bytes=limit, retain_in_grad_weight=False
        )
        return loss

    def step(self, limit: int) -> None:
        torch.autograd.grad(self.loss(limit), (self.hidden, self.weight))

    def forward(self, limit: int) -> None:
        with torch.no_grad():
            self.loss(limit)


def replaced(plan: str, parts: str) -> str:
    """The plan with parts of it replaced: "grad_weight=192x128x64x4/4x1,raster=4"."""
    fields = dict(field.partition("=")[::2] for field in plan.split(","))
    for part in parts.split(","):
        name, _, value = part.partition("=")
        if name not in fields:
            raise SystemExit(f"--plan {parts}: the plan has no {name}; it is {plan}")
        fields[name] = value
    return ",".join(f"{name}={value}" if value else name for name, value in fields.items())


@contextlib.contextmanager
def plans_of_limits(plans: dict[int, str]) -> Iterator[None]:
    """Calls under one of these limits have its plan, which Python offers no argument for."""
    planned = _native.get_kernel

    def get_kernel(session: c_void_p, spec: str, workspace_limit_bytes: int, num_tokens: int) -> c_void_p:
        plan = plans.get(workspace_limit_bytes)
        if plan is None:
            return planned(session, spec, workspace_limit_bytes, num_tokens)
        options = _native.KernelOptions(struct_size=sizeof(_native.KernelOptions), plan=plan.encode(), num_tokens=num_tokens)
        handle = c_void_p()
        _native.check(_native.library().flce_get_kernel(session, spec.encode(), byref(options), byref(handle)))
        return handle

    _native.get_kernel = get_kernel
    try:
        yield
    finally:
        _native.get_kernel = planned


class Meter:
    """Clock in MHz and power in W while a row runs, every 20 ms."""

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml: Any = pynvml
        self._gpu: Any = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
        self._samples: list[tuple[float, float, float]] = []
        self._done = threading.Event()

    def __enter__(self) -> Meter:
        self._samples, self._done = [], threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(0.02):
            clock = self._nvml.nvmlDeviceGetClockInfo(self._gpu, self._nvml.NVML_CLOCK_SM)
            self._samples.append((time.monotonic(), clock, self._nvml.nvmlDeviceGetPowerUsage(self._gpu) / 1000))

    def medians_since(self, begin: float) -> tuple[float, float]:
        kept = [(clock, power) for at, clock, power in self._samples if at >= begin] or [(0.0, 0.0)]
        clocks, powers = zip(*kept, strict=True)
        return statistics.median(clocks), statistics.median(powers)


def row(step: Step, seconds: float, meter: Meter) -> dict[str, float]:
    """The host is always some steps ahead, so that the GPU has no pause."""
    torch.cuda.synchronize()
    events: list[tuple[float, torch.cuda.Event]] = []
    begin = time.monotonic()
    with meter:
        while time.monotonic() < begin + seconds:
            for _ in range(4):
                step()
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            if len(events) > 1:
                events[-1][1].synchronize()
            events.append((time.monotonic(), event))
        torch.cuda.synchronize()
    half = begin + seconds / 2
    settled = [event for at, event in events if at >= half]
    if len(settled) < 2:
        raise SystemExit(f"{seconds} s are too few for this shape: a row has {4 * len(events)} steps")
    times = [a.elapsed_time(b) / 4 for a, b in itertools.pairwise(settled)]
    clock, power = meter.medians_since(half)
    return {"milliseconds": statistics.median(times), "sm_clock_mhz": clock, "power_w": power}


def contenders(layer: StepsOfALayer, parts: list[str]) -> tuple[dict[str, Step], dict[int, str]]:
    num_tokens, hidden_size = layer.hidden.shape
    kernel = flce.get_kernel(hidden_size, len(layer.weight), torch.bfloat16, workspace_limit_bytes=ALL, num_tokens=num_tokens)
    steps: dict[str, Step] = {
        FLOOR: layer.gemms,
        "three GEMMs, exponentials": lambda: layer.gemms(layer.exponentials),
        "forward's GEMM": layer.forward_gemm,
        "grad_hidden's GEMM": lambda: layer.grad_hidden_gemm(layer.dlogits),
        "grad_weight's GEMM": lambda: layer.grad_weight_gemm(layer.dlogits),
        "flce": lambda: layer.step(ALL),
        "flce, forward": lambda: layer.forward(ALL),
    }
    plans: dict[int, str] = {}
    for number, part in enumerate(parts, 1):
        plans[ALL + number] = replaced(kernel.plan, part)
        steps[f"flce, {part}"] = lambda limit=ALL + number: layer.step(limit)  # type: ignore[misc]
    print(f"flce: {kernel.plan}")
    return steps, plans


def measured(steps: dict[str, Step], rounds: int, seconds: float) -> dict[str, Any]:
    meter = Meter()
    rows: dict[str, list[dict[str, float]]] = {}
    for name, step in steps.items():  # compiles and warms up
        try:
            step()
            step()
            rows[name] = []
        except flce.PlanError as error:
            print(f"{name}: {error}", file=sys.stderr)
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(rows), len(rows)):
            rows[name].append(row(steps[name], seconds, meter))
    found = {name: {key: statistics.median(one[key] for one in of) for key in of[0]} for name, of in rows.items()}
    for one in found.values():
        one["ratio"] = one["milliseconds"] / found[FLOOR]["milliseconds"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8192x4096x64128", help="num_tokens x hidden_size x vocab_size")
    parser.add_argument("--plan", action="append", default=[], metavar="PARTS", help="of flce's plan, to be replaced; may be repeated")
    parser.add_argument("--rounds", type=int, default=2, help="rows of each contender (default: 2)")
    parser.add_argument("--seconds", type=float, default=3, help="of a row (default: 3)")
    parser.add_argument("--commit", help="of what is measured (default: git's)")
    parser.add_argument("--out", type=Path, help="a file for the figures as JSON")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device")
    layer = StepsOfALayer(*map(int, arguments.shape.split("x")))
    steps, plans = contenders(layer, arguments.plan)
    with plans_of_limits(plans):
        found = measured(steps, arguments.rounds, arguments.seconds)
    print(f"{torch.cuda.get_device_name()}, {arguments.shape}\n{'':44} {'ms':>8} {'ratio':>6} {'MHz':>6} {'W':>5}")
    for name, one in found.items():
        print(f"{name:44} {one['milliseconds']:8.2f} {one['ratio']:6.3f} {one['sm_clock_mhz']:6.0f} {one['power_w']:5.0f}")
    report = {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver(),
        "torch": torch.__version__,
        "commit": arguments.commit or commit(),
        "date": datetime.date.today().isoformat(),
        "shape": arguments.shape,
        "contenders": found,
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
