"""The example of distillation, which fails where it differs from whole logits, and whose divergence falls."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "distill.py"


def test_the_divergence_falls() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLE), "--steps", "30", "--batch", "8"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    first, last = map(float, re.findall(r"divergence ([\d.]+) → ([\d.]+) in 30 steps", done.stdout)[0])
    assert last < 0.7 * first
