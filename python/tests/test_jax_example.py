"""The example of a training loop in JAX, whose losses are those of whole logits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "jax_train.py"


def test_it_trains_as_on_whole_logits() -> None:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, str(EXAMPLE), "--plain", "--steps", "30"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    (first, last), (plain_first, plain_last) = (
        tuple(map(float, each)) for each in re.findall(r"loss ([\d.]+) → ([\d.]+) in 30 steps", done.stdout)
    )
    assert abs(first - plain_first) < 1e-3 and abs(last - plain_last) < 1e-2
    assert last < first - 1
