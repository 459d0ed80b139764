"""flce under DeepSpeed's ZeRO-3, on two ranks over gloo."""

from __future__ import annotations

import pytest
from rank_support import cases_passed


@pytest.mark.parametrize(
    ("which", "cases"),
    [
        pytest.param("daily", 11, marks=pytest.mark.nightly("python/flce/core/_zero3", "python/flce/adapters", "python/tests/zero3")),
        pytest.param("nightly", 12, marks=pytest.mark.nightly),
    ],
)
def test_training_equals_the_unpatched_model_and_one_process(monkeypatch: pytest.MonkeyPatch, which: str, cases: int) -> None:
    """Training equals the reference, or is refused by name where the weight is not gathered."""
    pytest.importorskip("deepspeed", exc_type=ImportError)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert cases_passed("zero3_worker.py", which, "2") == {2: cases}
