"""Peak memory of a step on a CPU: the growth of the resident set, in a process of the contender's own.

The process allocates every block of 64 KiB and more by itself and gives it back when it is freed (glibc's MALLOC_MMAP_THRESHOLD_), so that
what a step before left in the heap hides nothing. A step comes first, in which kernels are compiled; what a library keeps from one step
to the next is not counted.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from flce.bench import _contenders
from flce.bench._problem import Problem, make_inputs
from flce.bench._row import Row, reason_of, run_step

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_TIMEOUT_SECONDS = 1800


def fill(row: Row, problem: Problem) -> None:
    """Sets the row's memory_bytes, or why there are none. A process that was killed ends the row: this one would be too."""
    contender = row.contender
    if not _CLEAR.exists():
        row.memory_reason = "not measured: needs Linux's /proc"
        return
    asked: dict[str, Any] = {"problem": dataclasses.asdict(problem), "name": contender.name, "threads": torch.get_num_threads()}
    if isinstance(contender, _contenders.Flce):
        asked["options"] = contender.options
    elif _contenders.by_name(contender.name) is not contender:
        row.memory_reason = "not measured: a contender of the caller's own"
        return
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "MALLOC_MMAP_THRESHOLD_": str(64 << 10),
        "MALLOC_TRIM_THRESHOLD_": str(64 << 10),
    }
    command = [sys.executable, "-c", "from flce.bench._resident import main; main()"]
    try:
        done = subprocess.run(
            command, input=json.dumps(asked), env=environment, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        row.end("failed", f"memory: no end after {_TIMEOUT_SECONDS} s")
        return
    if done.returncode < 0:
        killed = done.returncode == -signal.SIGKILL
        row.end("failed", "out of memory (the process was killed)" if killed else f"ended by {signal.Signals(-done.returncode).name}")
        return
    try:
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        answer = {"reason": last}
    row.memory_bytes = answer.get("bytes")
    if row.memory_bytes is None:
        row.memory_reason = f"not measured: {answer['reason']}"


def _field(name: str) -> int:
    lines = _STATUS.read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) << 10


def _measured(asked: dict[str, Any]) -> dict[str, Any]:
    problem = Problem(**asked["problem"])
    options = asked.get("options")
    contender = _contenders.by_name(asked["name"]) if options is None else _contenders.Flce(asked["name"], **options)
    assert contender is not None
    torch.set_num_threads(asked["threads"])
    inputs = make_inputs(problem)
    try:
        loss = contender.prepare(problem)
        run_step(loss, inputs)
        inputs.clear()
        _CLEAR.write_text("5", encoding="ascii")  # the peak starts again
        before = _field("VmRSS")
        run_step(loss, inputs)
        peak = _field("VmHWM")
    except Exception as error:
        return {"reason": reason_of(error)}
    return {"bytes": max(0, peak - before - inputs.gradient_bytes())}


def main() -> None:
    """Runs the process: a problem and a contender on stdin, its bytes on stdout."""
    print(json.dumps(_measured(json.load(sys.stdin))))
