"""The digest of plans, and its comparison between ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

import flce

HERE = Path(__file__).resolve().parent


def kernel(**layer: object) -> flce.Kernel:
    # type: ignore[arg-type]
    return flce.get_kernel(**{"hidden_size": 16, "vocab_size": 40, "dtype": torch.float32, "device": "cpu", **layer})


def test_digest_is_of_specs_and_plans_in_any_order() -> None:
    first, second = kernel(), kernel(vocab_size=41)
    assert flce.plan_digest([first, second]) == flce.plan_digest([second, first, first])
    assert flce.plan_digest([first]) != flce.plan_digest([second])
    assert flce.plan_digest([first]) != flce.plan_digest([kernel(workspace_limit_bytes=1 << 20, num_tokens=8)])
    assert len(flce.plan_digest([])) == 64


def test_without_a_group_there_is_nothing_to_compare_with() -> None:
    first = kernel()
    assert flce.check_same_plans([first]) == flce.plan_digest([first])
    assert len(flce.check_same_plans()) == 64


def test_eight_ranks_find_the_one_that_differs() -> None:
    done = subprocess.run([sys.executable, str(HERE / "plans_worker.py")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 of 8 ranks passed" in done.stdout
