"""flce.trl under DDP and FSDP2, on two ranks over gloo."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_pipeline import launch


def test_gradients_of_wrapped_models_are_those_of_trl() -> None:
    pytest.importorskip("trl", minversion="1.15")
    worker = Path(__file__).resolve().parent / "trl_worker.py"
    output = launch("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(worker))
    assert re.findall(r"(\d+) cases passed", output) == ["5"]
