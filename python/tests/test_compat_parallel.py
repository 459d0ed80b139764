"""flce.compat over slices of a vocabulary, on the CPU over gloo."""

from __future__ import annotations

from rank_support import cases_passed


def test_slices_equal_the_whole_layer() -> None:
    assert cases_passed("compat_parallel_worker.py", "2,4") == {2: 51, 4: 51}
