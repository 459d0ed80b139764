"""Ranks that share a vocabulary and do not make the same call: the same error on all of them where they can tell, torch's error within the
group's timeout where they cannot. On the CPU over gloo, under torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest
from levels import by_ranks
from rank_support import cases_passed
from test_pipeline import launch

WORKER = "tensor_parallel_failures_worker.py"


@by_ranks({2: 62, 3: 62})
def test_every_rank_has_the_same_error_and_goes_on(ranks: int, cases: int) -> None:
    assert cases_passed(WORKER, str(ranks)) == {ranks: cases}


def test_ranks_left_alone_get_an_error_within_the_timeout() -> None:
    assert "rank 0 went on" in ranks_that_end("ranks_die", 3)


@pytest.mark.full
def test_a_group_made_again_is_another_one() -> None:
    output = ranks_that_end("a_group_made_again", 2)
    assert "rank 0 went on" in output and "rank 1 went on" in output


def ranks_that_end(name: str, ranks: int) -> str:
    worker = Path(__file__).resolve().parent / WORKER
    return launch("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(worker), name, timeout=120)
