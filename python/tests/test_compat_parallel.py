"""flce.compat over slices of a vocabulary, on the CPU over gloo, under torchrun."""

from __future__ import annotations

import pytest
from test_tensor_parallel import cases_passed


@pytest.mark.parametrize("ranks", [2, 4])
def test_slices_equal_the_whole_layer(ranks: int) -> None:
    assert cases_passed("compat_parallel_worker.py", ranks) == 51
