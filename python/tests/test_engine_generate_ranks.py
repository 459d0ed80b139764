"""PipelineEngine.generate over 2 and 4 stages, a process each."""

from __future__ import annotations

import pytest
from rank_support import cases_passed

pytest.importorskip("transformers")


def test_stages_generate_what_one_model_does() -> None:
    assert cases_passed("engine_generate_worker.py", "2,4") == {2: 13, 4: 13}
