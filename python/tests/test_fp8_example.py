"""The example of a head in 8 bits, whose losses are bf16's, and the benchmark that trains with it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def run(*command: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def test_a_model_trains_as_in_bf16() -> None:
    made = run(str(ROOT / "examples" / "fp8_head.py"), "--steps", "60", "--batch", "8")
    first, exact, rounded = map(float, re.findall(r"loss ([\d.]+) → ([\d.]+) in bf16, ([\d.]+) in 8 bits", made)[0])
    assert exact < 0.8 * first and abs(rounded - exact) < 0.05
    errors = [float(each) for each in re.findall(r"off by ([\d.]+)|weight by ([\d.]+)", made) for each in each if each]
    assert len(errors) == 8 and min(errors) > 1e-3
    assert max(errors[:4]) < 0.05, "int8"
    assert max(errors[4:]) < 0.15, "e4m3, whose logits are off by three times as much"


def test_the_benchmark_writes_curves(tmp_path: Path) -> None:
    out = tmp_path / "curves.json"
    made = run(
        str(ROOT / "benchmarks" / "fp8_training.py"),
        "--small",
        "--device",
        "cpu",
        "--steps",
        "40",
        "--runs",
        "bf16,int8 e5m2",
        "--out",
        str(out),
    )
    runs = json.loads(out.read_text())["runs"]
    assert list(runs) == ["bf16", "int8 e5m2"] and all(len(each["curve"]) == 2 for each in runs.values())
    assert abs(runs["bf16"]["held_out"] - runs["int8 e5m2"]["held_out"]) < 0.05
    assert "held out" in made
