"""flce.compat over slices of a vocabulary, on the CPU over gloo."""

from __future__ import annotations

import pytest
from levels import QUICK, in_turn
from rank_support import cases_passed


@pytest.mark.parametrize(("ranks", "cases"), [(2, 55), pytest.param(4, 55, marks=pytest.mark.nightly)])
def test_slices_equal_the_whole_layer(ranks: int, cases: int) -> None:
    left_out = 16 - len(in_turn(range(16), 5)) + 3 * QUICK
    assert cases_passed("compat_parallel_worker.py", str(ranks)) == {ranks: cases - left_out}
