"""Eight ranks, forked from one process so that torch is imported once: they compare their plans, first alike, then with one that
differs."""

from __future__ import annotations

import os
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist

import flce

WORLD = 8
LAYER = {"hidden_size": 16, "vocab_size": 40, "dtype": torch.float32, "device": "cpu"}
ODD = 5
LIMIT = 1 << 20  # another plan, since scratch is cut to it


def run(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=120))
    same = [flce.get_kernel(**LAYER)]
    digest = flce.check_same_plans(same)
    assert digest == flce.plan_digest(same) and len(digest) == 64
    mine = [flce.get_kernel(**LAYER, workspace_limit_bytes=LIMIT, num_tokens=8)] if rank == ODD else same
    try:
        flce.check_same_plans(mine)
    except flce.PlanMismatchError as error:
        message = str(error)
        assert f"rank {ODD} (" in message and "ranks 0, 1, 2, 3, 4, 6, 7: " in message, message
        assert same[0].plan in message and same[0].spec in message, message
        assert rank != ODD or mine[0].plan in message, message
        assert sorted(map(len, error.ranks.values())) == [1, WORLD - 1]
    else:
        raise AssertionError("a rank with another plan went unnoticed")
    try:
        flce.check_same_plans([] if rank == ODD else same)
    except flce.PlanMismatchError as error:
        assert f"no kernel for {same[0].spec}" in str(error), error
    else:
        raise AssertionError("a rank without the kernel went unnoticed")
    flce.check_same_plans(same)  # the group still works
    dist.destroy_process_group()


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(WORLD):
            child = os.fork()
            if child == 0:
                try:
                    run(rank, os.path.join(folder, "store"))
                except BaseException as error:
                    print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                    os._exit(1)
                os._exit(0)
            children.append(child)
        failed = sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)
    print(f"{WORLD - failed} of {WORLD} ranks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
