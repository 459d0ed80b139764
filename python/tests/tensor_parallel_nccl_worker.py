"""One rank of a group over NCCL, under torchrun, with a GPU of its own: a call over a shard, captured in a CUDA graph and played again with
other numbers, and backward beside other collectives. Exits with a failed assertion, or 0; prints how many cases passed."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from rank_support import run_named, tell_where_it_hangs
from torch import Tensor

import flce

HIDDEN, VOCAB, TOKENS = 512, 30011, 720


class Step:
    """Inputs that stay where they are, and a step over them: over this rank's rows and tokens, or the whole layer."""

    def __init__(self, *, sharded: bool = True, sequence: bool = False, **options: Any) -> None:
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if sharded else (1, 0)
        self.rows = slice(VOCAB * rank // ranks, VOCAB * (rank + 1) // ranks)
        self.tokens = slice(TOKENS * rank // ranks, TOKENS * (rank + 1) // ranks) if sequence else slice(0, TOKENS)
        like: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        self.hidden = torch.zeros(self.tokens.stop - self.tokens.start, HIDDEN, **like).requires_grad_()
        self.weight = torch.zeros(self.rows.stop - self.rows.start, HIDDEN, **like).requires_grad_()
        self.target = torch.zeros(TOKENS, dtype=torch.int64, device="cuda")
        self.options = options | ({"process_group": dist.group.WORLD, "sequence_parallel": sequence} if sharded else {})

    def fill(self, seed: int) -> None:
        make = torch.Generator("cuda").manual_seed(seed)
        hidden = torch.randn(TOKENS, HIDDEN, device="cuda", generator=make)
        weight = torch.randn(VOCAB, HIDDEN, device="cuda", generator=make) * HIDDEN**-0.5
        with torch.no_grad():
            self.hidden.copy_(hidden[self.tokens])
            self.weight.copy_(weight[self.rows])
            self.target.random_(0, VOCAB, generator=make)
            self.target[::9] = -100

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        loss = flce.linear_cross_entropy(self.hidden, self.weight, self.target, **self.options)
        grad_hidden, grad_weight = torch.autograd.grad(loss, (self.hidden, self.weight))
        return loss.detach(), grad_hidden, grad_weight


def near_the_whole_layer(step: Step, made: list[Tensor], seed: int) -> None:
    whole = Step(sharded=False)
    whole.fill(seed)
    loss, grad_hidden, grad_weight = whole.run()
    for got, right in zip(made, (loss, grad_hidden[step.tokens], grad_weight[step.rows]), strict=True):
        error, size = float((got.double() - right.double()).norm()), float(right.double().norm())
        assert error <= 1e-2 * size, f"off by {error / size:.2e} from the whole layer"


def played_again(sequence: bool, wide: bool) -> None:
    step = Step(sequence=sequence, **({"reduce_dtype": torch.float32} if wide else {}))
    step.fill(1)
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(2):
            step.run()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step.run()
    for seed in (2, 3):
        step.fill(seed)
        graph.replay()
        replayed = [tensor.clone() for tensor in made]
        for got, right in zip(replayed, step.run(), strict=True):
            assert torch.equal(got, right), "a replay and an eager call differ"
        near_the_whole_layer(step, replayed, seed)


def beside_a_collective(retained: bool) -> None:
    """An all-reduce of another group's begins before backward on another stream, and ends after it has begun."""
    other: Any = dist.new_group(list(range(dist.get_world_size())))
    step = Step(**({"workspace_limit_bytes": 1 << 40} if retained else {"retain_in_grad_weight": False}))
    step.fill(4)
    alone = [tensor.clone() for tensor in step.run()]
    large = torch.ones(1 << 27, device="cuda")
    dist.all_reduce(large, group=other)
    stream = torch.cuda.Stream()
    for _ in range(5):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work = dist.all_reduce(large, group=other, async_op=True)
        for got, right in zip(step.run(), alone, strict=True):
            assert torch.equal(got, right), "beside a collective the result differs"
        work.wait()
    assert bool((large == float(dist.get_world_size()) ** 6).all())


def first_call_while_capturing() -> None:
    step = Step(label_smoothing=0.25)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step.run()
    except flce.UnavailableError as error:
        assert "run the call once" in str(error), error
    else:
        raise AssertionError("a first call was captured")


def host_goes_ahead() -> None:
    """A step never waits for the device, once ranks have agreed on its layer."""
    step = Step()
    step.fill(5)
    queries, documents = (torch.randn(96, HIDDEN, dtype=torch.bfloat16, device="cuda").requires_grad_() for _ in range(2))

    def both() -> None:
        step.run()
        flce.info_nce(queries, documents, scale=20.0, process_group=dist.group.WORLD).backward()

    both()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        both()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def main() -> None:
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=60))
    cases: list[tuple[Any, ...]] = [(played_again, sequence, wide) for sequence in (False, True) for wide in (False, True)]
    cases += [(first_call_while_capturing,)]
    cases += [(beside_a_collective, retained) for retained in (False, True)]
    cases += [(host_goes_ahead,)]
    tell_where_it_hangs()
    for function, *arguments in cases:
        print(f"rank {dist.get_rank()}: {function.__name__}{arguments}", file=sys.stderr, flush=True)
        run_named(function, *arguments)
    torch.cuda.synchronize()
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"{len(cases)} cases passed", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
