"""`flce.engine.PipelineEngine` over processes, against the model that is not cut (engine_worker.py)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def launch(ranks: int, script: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(HERE / script), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    return result.stdout


@pytest.mark.parametrize(("ranks", "cases"), [(2, 34), (4, 8)])
def test_engine_equals_the_unpipelined_model(ranks: int, cases: int) -> None:
    output = launch(ranks, "engine_worker.py")
    assert int(re.findall(r"(\d+) cases passed", output)[0]) == cases


def test_tiny_models_of_transformers_train_as_transformers_does() -> None:
    assert "5 cases passed" in launch(2, "engine_models_worker.py")
