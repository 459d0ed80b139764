"""The vocabulary over the ranks of a process group over gloo: on the CPU, and on one GPU that the ranks share."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from levels import by_ranks, in_turn
from rank_support import cases_passed
from test_pipeline import launch

HERE = Path(__file__).resolve().parent


def passed(worker: str, ranks: str, device: str) -> dict[int, int]:
    """Cases by number of ranks. On a GPU each number has a torchrun of its own: what has a CUDA context cannot be forked."""
    if device == "cpu":
        return cases_passed(worker, ranks)
    found = {}
    for number in map(int, ranks.split(",")):
        run = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}")
        found[number] = int(re.findall(r"(\d+) cases passed", launch(*run, str(HERE / worker), ranks_on=device))[0])
    return found


@by_ranks({2: 61, 4: 61})
def test_shards_equal_the_whole_layer(device: str, ranks: int, cases: int) -> None:
    of_the_cpu = 0 if device == "cpu" else 2
    assert passed("tensor_parallel_worker.py", str(ranks), device) == {ranks: cases - of_the_cpu}


@by_ranks({2: 37, 4: 37})
def test_what_else_is_asked_of_a_shard(device: str, ranks: int, cases: int) -> None:
    assert passed("tensor_parallel_heads_worker.py", str(ranks), device) == {ranks: cases}


@by_ranks({1: 28, 2: 28, 3: 28})
def test_a_head_in_8_bits(device: str, ranks: int, cases: int) -> None:
    if device != "cpu" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("an FP8 head needs a Hopper GPU, or a CPU")
    assert passed("tensor_parallel_fp8_worker.py", str(ranks), device) == {ranks: cases}


@pytest.mark.full
def test_compiled_and_dtensors(device: str) -> None:
    ranks = 2 if device == "cpu" else 1
    assert passed("tensor_parallel_compile_worker.py", str(ranks), device) == {ranks: 21}


@by_ranks({2: 14, 3: 14})
def test_which_rows_ranks_have(device: str, ranks: int, cases: int) -> None:
    assert passed("tensor_parallel_layouts_worker.py", str(ranks), device) == {ranks: cases}


@by_ranks({2: 31, 3: 31, 4: 31})
def test_calls_like_an_earlier_one(device: str, ranks: int, cases: int) -> None:
    assert passed("tensor_parallel_direct_worker.py", str(ranks), device) == {ranks: cases}


@by_ranks({2: 17, 3: 17, 4: 17})
def test_calls_like_an_earlier_one_on_some_ranks(device: str, ranks: int, cases: int) -> None:
    assert passed("tensor_parallel_direct_ways_worker.py", str(ranks), device) == {ranks: cases}


@by_ranks({2: 40, 3: 40})
def test_random_shards_equal_the_whole_layer(device: str, ranks: int, cases: int) -> None:
    assert passed("tensor_parallel_property_worker.py", str(ranks), device) == {ranks: len(in_turn(range(cases), 4))}


@pytest.mark.gpu
def test_cuda_graphs_and_other_collectives_over_nccl(device: str) -> None:
    ranks = torch.cuda.device_count()
    assert passed("tensor_parallel_nccl_worker.py", str(ranks), device) == {ranks: 8}


@pytest.mark.gpu
def test_backward_under_a_receive_over_nccl_that_waits_for_it(device: str) -> None:
    ranks = torch.cuda.device_count()
    assert passed("tensor_parallel_receive_worker.py", str(ranks), device) == {ranks: 2}


@pytest.mark.nightly("examples/tensor_parallel.py")
def test_example_trains_and_needs_less_memory() -> None:
    """Runs beside torch's loss_parallel, whose logits, 64 MiB on a rank, are there several times."""
    example = str(HERE.parent.parent / "examples" / "tensor_parallel.py")
    output = launch("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", example, "--tiny")
    steps = re.findall(r"^step (\d+) +(loss_parallel|flce): loss ([\d.]+) +[\d.]+ ms +([\d.]+) MiB", output, re.MULTILINE)
    losses = {name: [float(loss) for _, of, loss, _ in steps if of == name] for name in ("loss_parallel", "flce")}
    memory = {name: [float(mib) for _, of, _, mib in steps if of == name] for name in losses}
    assert len(losses["flce"]) == 4 and losses["flce"] == pytest.approx(losses["loss_parallel"], rel=1e-4)
    assert losses["flce"][-1] < losses["flce"][0]
    assert all(fused < theirs / 2 for fused, theirs in zip(memory["flce"], memory["loss_parallel"], strict=True))


def test_documented_pieces_run() -> None:
    assert cases_passed("tensor_parallel_docs_worker.py", "2") == {2: 2}
