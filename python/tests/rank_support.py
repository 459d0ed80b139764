"""Setup and teardown of a rank round its cases: under torchrun, or forked from the worker."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import worker_server
from forked_ranks import is_rank, run_forked


def device() -> str:
    """Device of the cases: "cpu", or "cuda" for ranks that share the first GPU and for trainers."""
    return os.environ.get("FLCE_TEST_RANKS_ON", "cpu")


def generator(seed: int) -> torch.Generator:
    return torch.Generator(device()).manual_seed(seed)


def tell_where_it_hangs() -> None:
    """A process that is ended from outside says where it was."""
    faulthandler.register(signal.SIGTERM, all_threads=False, chain=True)


def default_device() -> torch.device:
    """Device of this rank's stages and meshes."""
    return torch.get_default_device()


def one_rank_backend() -> str:
    """Backend for a group of one process, whose tensors may be on the GPU."""
    return "gloo" if device() == "cpu" else "cpu:gloo,cuda:nccl"


def run_named(function: Callable[..., None], *arguments: Any) -> None:
    """`run` of `run_cases` where a case is a function and its arguments; says which case failed."""
    try:
        function(*arguments)
    except BaseException:
        print(f"failed: {function.__name__}{arguments}", flush=True)
        raise


def cases_passed(worker: str, *arguments: str) -> dict[int, int]:
    """Runs a worker whose last argument is its numbers of ranks, as "2,4", on the CPU. Returns how many cases passed by number of ranks."""
    # Variables that make this process a rank, and those that differ from test to test.
    left_out = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "PYTEST_CURRENT_TEST")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "FLCE_TEST_RANKS_ON": "cpu"}
    result = worker_server.run([str(Path(__file__).with_name(worker)), *arguments], environment, timeout=500)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    found = re.findall(r"^(\d+) ranks:$.*?^(\d+) cases passed$", result.stdout, re.MULTILINE | re.DOTALL)
    return {int(ranks): int(cases) for ranks, cases in found}


def run_main(run: Callable[..., None], cases: Callable[[], Iterable[tuple[Any, ...]]], **options: Any) -> None:
    """A worker's `run_cases`: as a rank of torchrun's, or for each number of ranks among this process's last arguments, forked from it. The
    process ends; with 1 where a rank has failed."""
    if is_rank():
        run_cases(run, cases(), **options)
    for number in sys.argv[-1].split(","):
        print(f"{number} ranks:", flush=True)
        codes = run_forked(int(number), lambda: run_cases(run, cases(), **options))
        if any(codes):
            print(f"of {number} ranks these failed: {[rank for rank, code in enumerate(codes) if code]}, {codes}", file=sys.stderr)
            sys.exit(1)


def run_cases(run: Callable[..., None], cases: Iterable[tuple[Any, ...]], *, prepare: Callable[[], None] = lambda: None) -> None:
    """Calls `prepare` once and `run` for each case, on every rank of a group; rank 0 prints how many cases passed, and the process ends.
    Cases go to stderr, with the seconds that the case before took. A rank whose peer has failed raises after 120 s. The group is NCCL's
    where every rank has a GPU of its own; else gloo's: NCCL takes no two ranks on one GPU, and DTensor's collectives crash over gloo with
    tensors there (torch 2.11)."""
    own_gpu = device() != "cpu" and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    if own_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    dist.init_process_group("nccl" if own_gpu else "gloo", timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    if device() != "cpu":
        torch.set_default_device(device())
    tell_where_it_hangs()
    prepare()
    passed, begin = 0, time.monotonic()
    for case in cases:
        if dist.get_rank() == 0:
            print(f"{time.monotonic() - begin:7.2f} s; case {passed}: {case}"[:200], file=sys.stderr, flush=True)
            begin = time.monotonic()
        run(*case)
        passed += 1
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"{passed} cases passed", flush=True)
    dist.destroy_process_group()
    sys.stdout.flush()
    # All is done and told. A thread of gloo's may still let go of a tensor while the interpreter ends: std::terminate (torch 2.13).
    os._exit(0)
