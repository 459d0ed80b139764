"""Fates of a pipeline whose rank dies or raises (engine_failures_worker.py)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def ends() -> dict[tuple[str, int, bool], list[Any]]:
    """Errors of each rank's two calls, by event, stage, and whether the store outlives the ranks."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(HERE / "engine_failures_worker.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    return {(what, where, agent): said for what, where, agent, said in json.loads(result.stdout)}


@pytest.mark.parametrize(
    ("what", "where", "agent", "message"),
    [
        ("kill", 0, True, None),
        ("kill", 1, True, None),
        ("kill", 0, False, None),
        ("module", 1, True, r"stage 1 failed on microbatch 0 \(sequences 0 to 1\): ValueError: no such layer"),
        ("backward", 1, True, r"stage 1 failed on microbatch 0 \(sequences 0 to 1\): ValueError: no such gradient"),
        ("loss", 2, True, r"stage 2 failed on microbatch 0 \(sequences 0 to 1\): ValueError: no such loss"),
    ],
)
def test_a_rank_that_fails_ends_the_others(ends: Any, what: str, where: int, agent: bool, message: str | None) -> None:
    """A rank that raises is named; one that was killed has said nothing, and those that waited for it say what they saw."""
    for rank, said in enumerate(ends[what, where, agent]):
        if what == "kill" and rank == where:
            assert said is None
            continue
        (stage, first), (_, then) = said
        assert stage == (None if message is None else where), said
        expected = message or r"stage \d could not exchange data with another stage"
        assert re.match(expected, first), said
        assert re.match(f"this engine has failed and cannot go on.*{expected}", then), said
