"""Errors, peak memory and times of contenders on the same tensors. Times are taken in rounds, in which everything has its turn."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flce import errors
from flce.bench import _resident
from flce.bench._contenders import Contender, Flce, Loss, NotComparedError, Torch
from flce.bench._problem import Inputs, Problem, Reference, make_inputs, reference, relative_error
from flce.bench._row import Row, reason_of, run_step

Progress = Callable[[str], None]
# The largest relative errors of a right result; beyond them a row is WRONG. Above what rounding logits and gradients to the dtype costs
# (TF32 for fp32), and below any mistake in a formula.
LOSS_BOUND = {"bf16": 1e-2, "fp16": 1e-2, "fp32": 1e-3}
GRADIENT_BOUND = {"bf16": 0.1, "fp16": 0.1, "fp32": 1e-2}
LEAST_ROUNDS, MOST_ROUNDS = 3, 100
WARM_SECONDS = 1.0  # GEMMs before the first round on a GPU, whose clocks rise with work
FAILURES = (Exception,)


def _settle(problem: Problem, name: str) -> None:
    """Gives memory back after a failure. A device that no longer answers ends the run, since nothing else can be measured."""
    if not problem.on_gpu:
        return
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        raise errors.DeviceError(f"{name} has left the CUDA device unusable ({reason_of(error)}); compare without it") from error


def _try(row: Row, problem: Problem, action: Callable[[Loss], Any]) -> Any:
    """The action's result; None, and a row that has ended, where it fails."""
    if row.loss is None:
        return None
    try:
        return action(row.loss)
    except FAILURES as error:
        row.end("failed", reason_of(error))
    _settle(problem, row.contender.name)
    return None


def check(row: Row, inputs: Inputs, expected: Reference) -> None:
    """Runs a step and compares it with the reference."""
    problem = inputs.problem

    def errors_of(loss: Loss) -> dict[str, float]:
        value = float(run_step(loss, inputs))
        found = {"loss": abs(value - expected.loss) / abs(expected.loss)}
        gradients = inputs.gradients()
        for name, right in expected.gradients.items():
            if name in gradients:
                found[name] = relative_error(gradients[name], right, problem.upstream)
        return found

    found = _try(row, problem, errors_of)
    inputs.clear()
    if found is None:
        return
    row.errors = found
    missing = [name for name in expected.gradients if name not in found]
    if missing:
        row.end("wrong", f"no {missing[0]}")
    for name, error in found.items():
        bound = (LOSS_BOUND if name == "loss" else GRADIENT_BOUND)[problem.dtype]
        if not error <= bound:  # a NaN is wrong too
            row.end("wrong", f"error of {name} {error:.1e}, at most {bound:.0e} allowed")
            return


def gpu_bytes(loss: Loss, inputs: Inputs) -> int:
    """Peak of torch's allocator during a step, beyond the inputs and their gradients."""
    inputs.clear()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(inputs.problem.device)
    torch.cuda.reset_peak_memory_stats(inputs.problem.device)
    run_step(loss, inputs)
    torch.cuda.synchronize()
    return max(0, torch.cuda.max_memory_allocated(inputs.problem.device) - before - inputs.gradient_bytes())


class Floor:
    """The bare GEMMs of the problem, by torch.mm (cuBLAS on a GPU), into tensors that are there: one of a forward, and one of each gradient
    of hidden and weight."""

    def __init__(self, inputs: Inputs) -> None:
        problem = inputs.problem
        self.hidden, self.weight = inputs.hidden.detach(), inputs.weight.detach()
        self.logits = self.hidden.new_empty(problem.num_tokens, problem.vocab_size)
        self.grads = {name: torch.empty_like(getattr(self, name)) for name in problem.wanted if name != "bias"}
        self.gemms = 1 + len(self.grads)

    def __call__(self) -> None:
        torch.mm(self.hidden, self.weight.t(), out=self.logits)
        if "hidden" in self.grads:
            torch.mm(self.logits, self.weight, out=self.grads["hidden"])
        if "weight" in self.grads:
            torch.mm(self.logits.t(), self.hidden, out=self.grads["weight"])


class Stopwatch:
    """Milliseconds of a call: by events on a GPU, after its L2 cache was written over; of the wall clock on a CPU."""

    def __init__(self, problem: Problem) -> None:
        self.device = torch.device(problem.device)
        self.flushed_bytes = 0
        if problem.on_gpu:
            cache = getattr(torch.cuda.get_device_properties(self.device), "L2_cache_size", 0) or 64 << 20
            self.flushed_bytes = 2 * cache
            self.flush = torch.empty(self.flushed_bytes, dtype=torch.uint8, device=self.device)

    def __call__(self, call: Callable[[], Any]) -> float:
        if self.device.type != "cuda":
            begin = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - begin)
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.flush.zero_()
        begun.record()
        call()
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended))


def _warm(floor: Floor, problem: Problem) -> None:
    if not problem.on_gpu:
        return floor()
    end = time.monotonic() + WARM_SECONDS
    while time.monotonic() < end:
        floor()
        torch.cuda.synchronize()


def run_rounds(
    rows: Sequence[Row], inputs: Inputs, *, rounds: int | None, seconds: float, progress: Progress
) -> tuple[list[float], dict[str, Any]]:
    """Fills the rows' milliseconds. Returns the floor's, and what is to be said of it."""
    problem = inputs.problem
    inputs.clear()
    try:
        floor, stopwatch = Floor(inputs), Stopwatch(problem)
        _warm(floor, problem)
    except FAILURES as error:  # its logits need 2·N·V bytes, which fused losses do not
        reason = reason_of(error)
        if reason != "out of memory":
            raise
        _settle(problem, "the floor")
        progress("the floor's logits do not fit in memory: times have no ratio to it")
        floor, stopwatch = None, Stopwatch(problem)
        return [], _turns(rows, inputs, floor, stopwatch, rounds, seconds, progress)[1] | {"reason": reason}
    return _turns(rows, inputs, floor, stopwatch, rounds, seconds, progress)


def _turns(
    rows: Sequence[Row],
    inputs: Inputs,
    floor: Floor | None,
    stopwatch: Stopwatch,
    rounds: int | None,
    seconds: float,
    progress: Progress,
) -> tuple[list[float], dict[str, Any]]:
    problem, floors = inputs.problem, []
    begin = told = time.monotonic()
    for turn in range(rounds or MOST_ROUNDS):
        now = time.monotonic()
        if rounds is None and turn >= LEAST_ROUNDS and now - begin > seconds:
            break
        if now - told > 1:
            told = now
            progress(f"round {turn + 1}")
        if floor is not None:
            floors.append(stopwatch(floor))
        for row in rows if turn % 2 else reversed(rows):  # the contender before leaves the chip hot or cool
            if problem.on_gpu:  # an untimed step first: torch's allocator has its blocks as in a run of its own
                _try(row, problem, lambda loss: run_step(loss, inputs))
            inputs.clear()
            taken = _try(row, problem, lambda loss: stopwatch(lambda: run_step(loss, inputs)))
            if taken is not None:
                row.milliseconds.append(taken)
    inputs.clear()
    how = {"gemms": floor.gemms if floor else 0, "flushed_bytes": stopwatch.flushed_bytes}
    return floors, how


def summary(times: Sequence[float]) -> dict[str, float]:
    """Median, smallest, largest, and spread: (90th percentile − 10th) / median."""
    ordered = sorted(times)

    def percentile(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    median = statistics.median(ordered)
    return {"ms": median, "ms_min": ordered[0], "ms_max": ordered[-1], "spread": (percentile(0.9) - percentile(0.1)) / median}


def measure(
    problem: Problem,
    contenders: Sequence[Contender],
    *,
    rounds: int | None,
    seconds: float,
    memory: bool,
    progress: Progress,
) -> dict[str, Any]:
    """One problem: its entry in the result."""
    torch._dynamo.reset()  # code compiled for another problem counts towards a limit
    inputs = make_inputs(problem)
    progress("the reference")
    expected = reference(inputs)
    rows = [Row(contender) for contender in contenders]
    plain = next((row for row in rows if type(row.contender) is Torch), None)
    for row in rows:
        _prepare(row, problem)
        if row.loss is not None and memory and not problem.on_gpu:
            progress(f"memory of {row.contender.name}")
            _resident.fill(row, problem)
        progress(f"errors of {row.contender.name}" if row.loss is not None else f"{row.contender.name}: {row.reason}")
        check(row, inputs, expected)
    if plain is None:
        plain = Row(Torch())
        _prepare(plain, problem)
        check(plain, inputs, expected)
    told = {"dtype": expected.dtype, "loss": expected.loss}
    del expected
    for row in rows:
        if problem.on_gpu and memory and row.loss is not None:
            torch.cuda.empty_cache()
            row.memory_bytes = _try(row, problem, lambda loss: gpu_bytes(loss, inputs))
    floors, how = run_rounds([row for row in rows if row.loss], inputs, rounds=rounds, seconds=seconds, progress=progress)
    return {
        "problem": problem.json(),
        "reference": told,
        "floor": how | {"rounds": len(floors)} | (summary(floors) if floors else {}),
        "rows": _entries(rows, floors, plain.errors),
    }


def _prepare(row: Row, problem: Problem) -> None:
    try:
        row.loss = row.contender.prepare(problem)
    except NotComparedError as skipped:
        row.end("skipped", str(skipped))
    except FAILURES as error:
        row.end("failed", reason_of(error))


def _entries(rows: Sequence[Row], floors: Sequence[float], plain: dict[str, float]) -> list[dict[str, Any]]:
    base = statistics.median(floors) if floors else None
    own = next((row for row in rows if isinstance(row.contender, Flce) and row.milliseconds), None)
    flce = statistics.median(own.milliseconds) if own else None
    entries = []
    for row in rows:
        found: dict[str, Any] = {"ms": None, "ms_min": None, "ms_max": None, "spread": None}
        found |= summary(row.milliseconds) if row.milliseconds else {}
        ms = found["ms"]
        entries.append(
            {
                "compare": row.contender.key,
                "name": row.contender.name,
                "version": row.contender.version(),
                "status": row.status,
                "reason": row.reason,
                **found,
                "rounds": len(row.milliseconds),
                "to_floor": ms / base if ms and base else None,
                "to_flce": ms / flce if ms and flce else None,
                "memory_bytes": row.memory_bytes,
                "memory_reason": row.memory_reason,
                "errors": row.errors,
                "errors_to_torch": {name: error / plain[name] for name, error in row.errors.items() if plain.get(name)},
            }
        )
    return entries
