"""flce.trl under DDP and FSDP2, on two ranks over gloo."""

from __future__ import annotations

import pytest
from rank_support import cases_passed


@pytest.mark.nightly("python/flce/trl", "python/tests/test_trl", "python/tests/trl")
def test_gradients_of_wrapped_models_are_those_of_trl() -> None:
    pytest.importorskip("trl", minversion="1.16")
    assert cases_passed("trl_worker.py", "2") == {2: 7}
