"""The example of contrastive training, which fails where it differs from materialised scores or learns nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "retrieval.py"


def run(*arguments: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def test_queries_find_their_documents() -> None:
    output = run("--steps", "40", "--batch", "256")
    shares = [int(share) for share in re.findall(r"(\d+)% of new queries", output)]
    assert len(shares) == 2 and shares[0] == shares[1] > 20
    assert "scores that did not exist: 0.2 MiB a step" in output


def test_the_correction_finds_what_users_take() -> None:
    plain, corrected = map(float, re.findall(r"([\d.]+) nats from what users take", run("--catalogue", "--steps", "60")))
    assert corrected < plain
