"""flce.compat over slices of a vocabulary, on the CPU over gloo."""

from __future__ import annotations

from levels import QUICK, by_ranks, in_turn
from rank_support import cases_passed


@by_ranks({2: 51, 4: 51})
def test_slices_equal_the_whole_layer(ranks: int, cases: int) -> None:
    left_out = 16 - len(in_turn(range(16), 5)) + 3 * QUICK
    assert cases_passed("compat_parallel_worker.py", str(ranks)) == {ranks: cases - left_out}
