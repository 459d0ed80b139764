"""PipelineEngine.generate over 2 and 4 stages, a process each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_pipeline import launch

pytest.importorskip("transformers")

HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize("stages", [2, 4])
def test_stages_generate_what_one_model_does(stages: int) -> None:
    output = launch("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={stages}", str(HERE / "engine_generate_worker.py"))
    assert re.findall(r"(\d+) cases passed", output) == ["13"]
