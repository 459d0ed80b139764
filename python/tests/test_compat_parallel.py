"""flce.compat over slices of a vocabulary, on the CPU over gloo."""

from __future__ import annotations

from levels import by_ranks
from rank_support import cases_passed


@by_ranks({2: 51, 4: 51})
def test_slices_equal_the_whole_layer(ranks: int, cases: int) -> None:
    assert cases_passed("compat_parallel_worker.py", str(ranks)) == {ranks: cases}
