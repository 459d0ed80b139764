"""The interfaces of examples/engine on two ranks, and the examples that run them as processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rank_support import cases_passed

pytest.importorskip("transformers")

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent.parent / "examples"


def run(*command: str, expected: int = 0, timeout: int = 500) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    assert result.returncode == expected, result.stdout[-3000:] + result.stderr[-6000:]
    return result.stdout + result.stderr


@pytest.mark.nightly("python/flce/engine", "examples/engine", "python/tests/engine_examples")
def test_interfaces_step_as_the_whole_model_with_its_logits() -> None:
    """Fine-tuning, PPO's actor and critic: statistics, gradients, parameters; two stages, and two data-parallel ranks."""
    assert cases_passed("engine_examples_worker.py", "2") == {2: 12}


@pytest.mark.nightly("python/flce/engine", "examples/engine", "python/tests/engine_examples")
def test_fine_tuning_needs_less_memory_for_the_same_losses() -> None:
    output = run(str(EXAMPLES / "engine_sft.py"), "--tiny")
    memory = {name: float(mib) for name, mib in re.findall(r"^ +(materialised logits|flce): +([\d.]+) MiB", output, re.MULTILINE)}
    losses = {name: row.split() for name, row in re.findall(r"^ +(materialised logits|flce): losses (.*)$", output, re.MULTILINE)}
    assert 2 * memory["flce"] < memory["materialised logits"]
    assert len(losses["flce"]) == len(losses["materialised logits"]) == 4
    assert float(losses["flce"][-1]) < float(losses["flce"][0])
    assert float(re.findall(r"losses differ by ([\d.e-]+)", output)[0]) < 1e-4


@pytest.mark.nightly("examples/engine")
def test_ppo_raises_its_scores() -> None:
    output = run(str(EXAMPLES / "engine_ppo.py"), "--tiny", "--early-stop-kl", "1.0", "--entropy-coef", "0.001", "--adaptive-kl")
    first, last = map(float, re.findall(r"mean score of the first \d+ iterations ([+-][\d.]+), of the last \d+ ([+-][\d.]+)", output)[0])
    assert last > first + 0.1
    assert len(re.findall(r"^iteration +\d+", output, re.MULTILINE)) == 8


@pytest.mark.nightly
def test_demo_trains_from_stages_files_and_generates(tmp_path: Path) -> None:
    output = run(str(EXAMPLES / "engine_demo.py"), "--steps", "25", "--loss-bound", "4.5", "--keep", str(tmp_path), "--schedule", "gpipe")
    for stage in range(2):
        assert re.search(rf"^stage {stage} on cpu: [\d,]+ parameters from \S*{stage}\S*-of-\S+\.safetensors$", output, re.MULTILINE)
    first, last = map(float, re.findall(r"loss ([\d.]+) -> ([\d.]+) nats a byte", output)[0])
    assert last < 4.5 < first
    assert (
        len(re.findall(r"^    ['\"](?:The kernel|A stage of the pipeline |The loss is computed with).+['\"]$", output, re.MULTILINE)) == 3
    )
    assert (tmp_path / "whole" / "model.safetensors").exists()
