"""The vocabulary over the ranks of a process group over gloo, under torchrun: on the CPU, and on one GPU that the ranks share."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from test_pipeline import launch

HERE = Path(__file__).resolve().parent


def cases_passed(worker: str, ranks: int, device: str = "cpu") -> int:
    run = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    output = launch(*run, str(HERE / worker), ranks_on=device)
    return int(re.findall(r"(\d+) cases passed", output)[0])


@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_equal_the_whole_layer(ranks: int, device: str) -> None:
    assert cases_passed("tensor_parallel_worker.py", ranks, device) == (63 if device == "cpu" else 61)


def test_compiled_and_dtensors(device: str) -> None:
    assert cases_passed("tensor_parallel_compile_worker.py", 2 if device == "cpu" else 1, device) == 21


@pytest.mark.parametrize("ranks", [2, 3])
def test_random_shards_equal_the_whole_layer(ranks: int, device: str) -> None:
    assert cases_passed("tensor_parallel_property_worker.py", ranks, device) == 40


@pytest.mark.gpu
def test_cuda_graphs_and_other_collectives_over_nccl(device: str) -> None:
    assert cases_passed("tensor_parallel_nccl_worker.py", torch.cuda.device_count(), device) == 9


def test_example_trains_and_needs_less_memory() -> None:
    """Beside torch's loss_parallel, of whose logits a rank holds 64 MiB several times."""
    example = str(HERE.parent.parent / "examples" / "tensor_parallel.py")
    output = launch("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", example, "--tiny")
    steps = re.findall(r"^step (\d+) +(loss_parallel|flce): loss ([\d.]+) +[\d.]+ ms +([\d.]+) MiB", output, re.MULTILINE)
    losses = {name: [float(loss) for _, of, loss, _ in steps if of == name] for name in ("loss_parallel", "flce")}
    memory = {name: [float(mib) for _, of, _, mib in steps if of == name] for name in losses}
    assert len(losses["flce"]) == 4 and losses["flce"] == pytest.approx(losses["loss_parallel"], rel=1e-4)
    assert losses["flce"][-1] < losses["flce"][0]
    assert all(fused < theirs / 2 for fused, theirs in zip(memory["flce"], memory["loss_parallel"], strict=True))


def test_documented_pieces_run() -> None:
    assert cases_passed("tensor_parallel_docs_worker.py", 2) == 2
