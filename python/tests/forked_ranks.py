"""Ranks that are forks of one process. Importing torch and transformers takes a processor longer than most cases do; so it is done once,
for every number of ranks that a worker is asked for."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

import torch.distributed as dist

_GRACE_SECONDS = 10.0  # for what the others have to say of a rank that failed


def is_rank() -> bool:
    """Whether torchrun has started this process as one."""
    return "RANK" in os.environ


def run_forked(ranks: int, body: Callable[[], None]) -> list[int]:
    """Runs `body` on this many ranks, which find each other as under torchrun: this process keeps the store. It must have no thread, since
    threads are not forked: it has computed with one, if at all, and nothing backwards. Returns each rank's exit code, negative for the
    signal that ended it. When one has failed, the others are ended soon."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    sys.stdout.flush()
    sys.stderr.flush()
    # Ranks begin when all are there: the store's thread, which serves those that have begun, holds locks that a fork would keep.
    gate = os.pipe()
    started = {_forked(rank, body, gate): rank for rank in range(ranks)}
    for end in gate:
        os.close(end)
    codes: dict[int, int] = {}
    until = float("inf")
    while len(codes) < ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in started:
            codes[started[pid]] = os.waitstatus_to_exitcode(status)
            if any(codes.values()):
                until = min(until, time.monotonic() + _GRACE_SECONDS)
        elif time.monotonic() > until:
            for other, rank in started.items():
                if rank not in codes:
                    os.kill(other, signal.SIGKILL)
            until = float("inf")
        else:
            time.sleep(0.02)
    return [codes[rank] for rank in range(ranks)]


def _forked(rank: int, body: Callable[[], None], gate: tuple[int, int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.close(gate[1])
    os.read(gate[0], 1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    code = 1
    try:
        body()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
