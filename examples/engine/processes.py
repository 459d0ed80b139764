"""Processes on this machine, and one for each stage of a pipeline."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Imports of the process that all others are forked from: each would import for many seconds, on a machine with few cores in turns.
PRELOADED = ["torch", "flce.engine", "transformers.models.llama.modeling_llama"]


@dataclass
class Place:
    """Where a process is: stage `rank` of `num_stages`, its device, and the pipeline's group."""

    rank: int
    num_stages: int
    device: torch.device
    group: dist.ProcessGroup

    @property
    def is_last(self) -> bool:
        return self.rank == self.num_stages - 1


def transport(num_stages: int) -> tuple[str, str]:
    """(backend, device type): NCCL where every stage has a GPU of its own; else gloo, on the one GPU or on the CPU."""
    gpus = torch.cuda.device_count()
    if gpus >= num_stages and dist.is_nccl_available():
        return "nccl", "cuda"
    return "gloo", "cuda" if gpus else "cpu"


def run_processes(process: Callable[..., None], count: int, *arguments: Any, preload: list[str]) -> Any:
    """Runs process(rank, store, results, *arguments) in `count` processes and returns what one of them puts into `results` (it is pickled).
    store: a file's name for init_process_group. The first exception ends the others and is raised here."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(preload)
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(process, (f"{folder}/store", results, *arguments), nprocs=count, start_method="forkserver")
    return results.get()


def run_stages(worker: Callable[..., Any], num_stages: int, *arguments: Any) -> Any:
    """Runs worker(place, *arguments) in num_stages processes and returns what the last stage's returns. Errors as `run_processes`."""
    return run_processes(_process, num_stages, num_stages, worker, arguments, preload=PRELOADED)


def _process(rank: int, store: str, results: Any, num_stages: int, worker: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    backend, kind = transport(num_stages)
    device = torch.device(kind, rank % torch.cuda.device_count()) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or num_stages) // num_stages))
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=num_stages, timeout=timedelta(seconds=300))
    place = Place(rank, num_stages, device, dist.group.WORLD)
    result = worker(place, *arguments)
    if place.is_last:
        results.put(result)
    dist.barrier()
    dist.destroy_process_group()
