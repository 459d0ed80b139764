"""`flce.engine.PipelineEngine` over processes, against the model that is not cut (engine_worker.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from levels import by_ranks
from rank_support import cases_passed

HERE = Path(__file__).resolve().parent


def launch(ranks: int, script: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(HERE / script), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    return result.stdout


@by_ranks({2: 28, 4: 9})
def test_engine_equals_the_unpipelined_model(ranks: int, cases: int) -> None:
    assert cases_passed("engine_worker.py", str(ranks)) == {ranks: cases}


def test_tiny_models_of_transformers_train_as_transformers_does() -> None:
    assert cases_passed("engine_models_worker.py", "2") == {2: 5}


@pytest.mark.nightly
def test_the_last_stage_needs_less_memory_than_with_logits(tmp_path: Path) -> None:
    """benchmarks/engine_stage.py, in small: a microbatch's logits are 113 MiB."""
    shape = {"hidden-size": 32, "intermediate-size": 32, "layers": 2, "heads": 2, "key-heads": 1, "head-dim": 16, "vocab-size": 29000}
    shape |= {"tokens": 1024, "microbatches": 2, "steps": 1, "dtype": "float32", "device": "cpu", "out": tmp_path / "found.json"}
    benchmark = str(HERE.parent.parent / "benchmarks" / "engine_stage.py")
    launch(2, benchmark, *(f"--{name}={value}" for name, value in shape.items()))
    found = json.loads((tmp_path / "found.json").read_text())["contenders"]
    assert abs(found["flce"]["loss"] - found["logits"]["loss"]) < 1e-4
    assert [stage["stage"] for stage in found["flce"]["stages"]] == [0, 1]
    logits_bytes = 1024 * 29000 * 4
    assert found["logits"]["stages"][1]["working_bytes"] > 2 * logits_bytes
    assert found["flce"]["stages"][1]["working_bytes"] < logits_bytes
