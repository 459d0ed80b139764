"""save_stage, save_state and load_state on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_pipeline import HERE, launch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")


def test_two_ranks_save_and_resume_together(tmp_path: Path) -> None:
    worker = str(HERE / "engine_checkpoint_worker.py")
    output = launch("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", worker, str(tmp_path))
    assert "7 cases passed" in output
