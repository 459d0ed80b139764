"""Steps in a row, as in training: seconds of one step without a pause, until the GPU is at its power limit and its clock has settled.

    python3 benchmarks/in_a_row.py [--shape 8192x4096x64128] [--retain all] [--plan grad_weight=192x128x64x4/4x1 ...] [--out FILE.json]

bf16. Other benchmarks let contenders take turns within tens of milliseconds: all of them have one clock then, and their times compare
cycles. In a row each has the clock that its own power allows, so times compare energy. Contenders:

    three GEMMs                 by cuBLAS, operands of both signs; and each of the three by itself
    three GEMMs, exponentials   the backward products read exponentials, as flce's do: whether operands make a difference
    flce                        forward and backward as planned; forward alone, retaining and not
    flce, PLAN                  the plan with parts of it replaced, by --plan

--retain says how much forward leaves to backward: all, in memory of its own; as much as grad_weight's memory has room for; or nothing. Rows
come in rounds, in an order drawn anew, behind a row of GEMMs that is not counted: a GPU that has idled is quicker for a second. The table
has, for the last three quarters of each row, the mean time of a step in milliseconds, its energy in J (power is the same in all rows, so
time follows energy), the ratios of both to the GEMMs of the same round, and the median clock: medians over rounds, with the range of the
time's ratio.
Needs a GPU and nvidia-ml-py, which reads the SM clock in MHz and the energy.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from ctypes import byref, c_void_p, sizeof
from typing import Any

import torch
from gpu_timing import Layer, add_report_arguments, save

import flce
from flce.call import _call
from flce.core import _kernels, _native

RETAIN: dict[str, dict[str, Any]] = {
    "all": {"workspace_limit_bytes": 1 << 40, "retain_in_grad_weight": False},
    "grad_weight": {},
    "none": {"retain_in_grad_weight": False},
}
FLOOR = "three GEMMs"
PARTS = (
    "three GEMMs, exponentials",
    "forward's GEMM",
    "grad_hidden's GEMM",
    "grad_weight's GEMM",
    "flce, forward that retains",
    "flce, forward",
)
Step = Callable[[], object]


class StepsOfALayer(Layer):
    """A layer whose backward products read numbers of both signs, or exponentials; its weight's gradient is written or added to."""

    def __init__(self, num_tokens: int, hidden_size: int, vocab_size: int, options: dict[str, Any], *, accumulate: bool) -> None:
        super().__init__(num_tokens, hidden_size, vocab_size)
        self.exponentials = self.dlogits.exp()
        self.options = options
        self.into = torch.zeros_like(self.weight, requires_grad=False) if accumulate else None

    def grad_weight_gemm(self, dlogits: torch.Tensor) -> None:
        if self.into is None:
            super().grad_weight_gemm(dlogits)
        else:
            self.into.addmm_(dlogits.t(), self.hidden.detach())

    def loss(self) -> torch.Tensor:
        loss: torch.Tensor = flce.linear_cross_entropy(self.hidden, self.weight, self.target, grad_weight_out=self.into, **self.options)
        return loss

    def step(self) -> None:
        torch.autograd.grad(self.loss(), (self.hidden, self.weight), allow_unused=True)

    def forward(self) -> None:
        """Runs forward without a gradient to come: nothing is retained."""
        with torch.no_grad():
            self.loss()


def replaced(plan: str, parts: str) -> str:
    """The plan with parts of it replaced: "grad_weight=192x128x64x4/4x1,raster=4"."""
    fields = dict(field.partition("=")[::2] for field in plan.split(","))
    for part in parts.split(","):
        name, _, value = part.partition("=")
        if name not in fields:
            raise SystemExit(f"--plan {parts}: the plan has no {name}; it is {plan}")
        fields[name] = value
    return ",".join(f"{name}={value}" if value else name for name, value in fields.items())


class Plan:
    """Calls while this is entered have this plan, which Python offers no argument for."""

    def __init__(self, plan: str) -> None:
        self._plan = plan
        self._asked = _native.get_kernel
        # Memories of kernels: of calls by their arguments, of the latest calls, and of kernels by their computation.
        self._remembered: tuple[dict[Any, Any], ...] = ({}, {}, {})

    def __enter__(self) -> None:
        self._swap()
        _native.get_kernel = self._get_kernel

    def __exit__(self, *_: object) -> None:
        self._swap()
        _native.get_kernel = self._asked

    def _swap(self) -> None:
        ours, self._remembered = self._remembered, (_call._passed, _call._latest, _kernels._found)
        _call._passed, _call._latest, _kernels._found = ours

    def _get_kernel(self, session: c_void_p, spec: str, workspace_limit_bytes: int, num_tokens: int) -> c_void_p:
        del workspace_limit_bytes  # a plan has its scratch
        options = _native.KernelOptions(struct_size=sizeof(_native.KernelOptions), plan=self._plan.encode(), num_tokens=num_tokens)
        handle = c_void_p()
        _native.check(_native.library().flce_get_kernel(session, spec.encode(), byref(options), byref(handle)))
        return handle


class Meter:
    """Clock in MHz and energy in J while a row runs, every 20 ms."""

    def __init__(self) -> None:
        import pynvml  # type: ignore[import-not-found,unused-ignore]

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
            joules = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu) / 1000
            self._samples.append((time.monotonic(), clock, joules))

    def between(self, begin: float, end: float) -> tuple[float, float]:
        """The median clock, and the mean power in W."""
        kept = [sample for sample in self._samples if begin <= sample[0] <= end]
        if len(kept) < 2:
            return 0.0, 0.0
        (first, _, before), (last, _, after) = kept[0], kept[-1]
        return statistics.median(clock for _, clock, _ in kept), (after - before) / (last - first)


def row(step: Step, seconds: float, meter: Meter) -> dict[str, float]:
    """The host is always some steps ahead, so that the GPU has no pause."""
    torch.cuda.synchronize()
    events: list[torch.cuda.Event] = []
    begin = time.monotonic()
    with meter:
        while time.monotonic() < begin + seconds:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            events.append(event)
            step()
            if len(events) > 8:
                events[-8].synchronize()
        torch.cuda.synchronize()
    if len(events) < 16:
        raise SystemExit(f"{seconds} s are too few for this shape: a row has {len(events)} steps")
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    ends = itertools.accumulate(times)
    milliseconds = statistics.mean(own for own, end in zip(times, ends, strict=True) if end > sum(times) / 4)
    clock, power = meter.between(begin + seconds / 4, begin + seconds)
    return {"milliseconds": milliseconds, "joules": power * milliseconds / 1000, "sm_clock_mhz": clock, "power_w": power}


def contenders(layer: StepsOfALayer, parts: list[str]) -> dict[str, tuple[Step, Any]]:
    num_tokens, hidden_size = layer.hidden.shape
    limit = layer.options.get("workspace_limit_bytes")
    accumulate = layer.into is not None
    kernel = flce.get_kernel(
        hidden_size, len(layer.weight), torch.bfloat16, workspace_limit_bytes=limit, num_tokens=num_tokens, accumulate=accumulate
    )
    steps: dict[str, Step] = {
        FLOOR: layer.gemms,
        "three GEMMs, exponentials": lambda: layer.gemms(layer.exponentials),
        "forward's GEMM": layer.forward_gemm,
        "grad_hidden's GEMM": lambda: layer.grad_hidden_gemm(layer.dlogits),
        "grad_weight's GEMM": lambda: layer.grad_weight_gemm(layer.dlogits),
        "flce": layer.step,
        "flce, forward that retains": layer.loss,
        "flce, forward": layer.forward,
    }
    made: dict[str, tuple[Step, Any]] = {name: (step, contextlib.nullcontext()) for name, step in steps.items()}
    for part in parts:
        made[f"flce, {part}"] = layer.step, Plan(replaced(kernel.plan, part))
    print(f"flce: {kernel.plan}")
    return made


def measured(made: dict[str, tuple[Step, Any]], rounds: int, seconds: float) -> dict[str, Any]:
    meter = Meter()
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, (step, plan) in made.items():  # compiles and warms up
        try:
            with plan:
                step()
                step()
            rows[name] = []
        except flce.PlanError as error:
            print(f"{name}: {error}", file=sys.stderr)
    row(made[FLOOR][0], 2 * seconds, meter)
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(rows), len(rows)):
            step, plan = made[name]
            with plan:
                rows[name].append(row(step, seconds, meter))
    found: dict[str, Any] = {}
    for name, of in rows.items():
        found[name] = {key: statistics.median(one[key] for one in of) for key in of[0]}
        for ratio, key in (("ratio", "milliseconds"), ("energy_ratio", "joules")):
            ratios = [one[key] / floor[key] for one, floor in zip(of, rows[FLOOR], strict=True)]
            found[name][ratio] = statistics.median(ratios)
            found[name][f"{ratio}_range"] = [min(ratios), max(ratios)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8192x4096x64128", help="num_tokens x hidden_size x vocab_size")
    parser.add_argument("--retain", choices=tuple(RETAIN), default="all", help="what forward leaves to backward (default: all)")
    parser.add_argument("--accumulate", action="store_true", help="the weight's gradient is added to")
    parser.add_argument("--steps", action="store_true", help="whole steps alone: not the GEMMs by themselves, nor forward")
    parser.add_argument("--plan", action="append", default=[], metavar="PARTS", help="of flce's plan, to be replaced; may be repeated")
    parser.add_argument("--rounds", type=int, default=3, help="rows of each contender (default: 3)")
    parser.add_argument("--seconds", type=float, default=4, help="of a row (default: 4)")
    add_report_arguments(parser)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device")
    num_tokens, hidden_size, vocab_size = map(int, arguments.shape.split("x"))
    layer = StepsOfALayer(num_tokens, hidden_size, vocab_size, RETAIN[arguments.retain], accumulate=arguments.accumulate)
    made = contenders(layer, arguments.plan)
    if arguments.steps:
        made = {name: of for name, of in made.items() if name not in PARTS}
    found = measured(made, arguments.rounds, arguments.seconds)
    mode = f"retained: {arguments.retain}" + (", gradient added to" if arguments.accumulate else "")
    print(f"{torch.cuda.get_device_name()}, {arguments.shape}, {mode}")
    print(f"{'':60} {'ms':>8} {'J':>6} {'ratio':>6} {'range':>13} {'of energy':>9} {'MHz':>6} {'W':>5}")
    for name, one in found.items():
        least, most = one["ratio_range"]
        print(
            f"{name:60} {one['milliseconds']:8.2f} {one['joules']:6.2f} {one['ratio']:6.3f} {least:6.3f}-{most:.3f} "
            f"{one['energy_ratio']:9.3f} {one['sm_clock_mhz']:6.0f} {one['power_w']:5.0f}"
        )
    mode = {"retain": arguments.retain, "accumulate": arguments.accumulate}
    save(arguments, {"shape": arguments.shape, **mode, "contenders": found})


if __name__ == "__main__":
    main()
