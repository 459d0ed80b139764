"""save_stage, save_state and load_state on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_support import cases_passed

pytest.importorskip("transformers")
pytest.importorskip("safetensors")


def test_two_ranks_save_and_resume_together(tmp_path: Path) -> None:
    assert cases_passed("engine_checkpoint_worker.py", str(tmp_path), "2") == {2: 7}
