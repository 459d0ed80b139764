"""PipelineEngine.generate over 2 and 4 stages, a process each."""

from __future__ import annotations

import pytest
from levels import by_ranks
from rank_support import cases_passed

pytest.importorskip("transformers")


@by_ranks({2: 13, 4: 13})
def test_stages_generate_what_one_model_does(ranks: int, cases: int) -> None:
    assert cases_passed("engine_generate_worker.py", str(ranks)) == {ranks: cases}
