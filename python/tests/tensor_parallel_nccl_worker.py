"""One rank of a group over NCCL, under torchrun, with a GPU of its own: a call over a shard, captured in a CUDA graph and played again with
other numbers, and backward beside other collectives. Exits with a failed assertion, or 0; prints how many cases passed."""

from __future__ import annotations

import os
import sys
import time
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


def a_receive_that_waits_for_this_backward(retained: bool) -> None:
    """Every rank receives on another stream what the rank before it sends after its own backward: kernels of NCCL's wait all the while."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if ranks == 1:
        return
    step = Step(sharded=False, **({"workspace_limit_bytes": 1 << 40} if retained else {"retain_in_grad_weight": False}))
    step.fill(5)
    alone = [tensor.clone() for tensor in step.run()]
    to_even, to_odd = (dist.new_group(list(range(ranks))) for _ in range(2))
    there, back = (to_even, to_odd) if rank % 2 == 0 else (to_odd, to_even)
    peer = rank ^ 1
    if peer >= ranks:
        return

    def begun(operation: Any, tensor: Tensor, group: Any) -> Any:
        return dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer, group)])

    for group in (to_even, to_odd):  # a connection is made by both of its ends at once
        for each in begun(dist.irecv if group is there else dist.isend, torch.zeros(1, device="cuda"), group):
            each.wait()
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    for turn, log_size in enumerate((12, 16, 20, 22, 22)):
        received = torch.full((1 << log_size,), -1.0, device="cuda")
        over = {name: torch.cuda.Event() for name in ("the pass", "the receive", "the send")}
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[0]):
            receiving = begun(dist.irecv, received, there)
        made = step.run()
        sent = torch.full((1 << log_size,), 0.0, device="cuda").add_(made[0]).add_(float(turn))
        over["the pass"].record()
        streams[1].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams[1]):
            sending = begun(dist.isend, sent, back)
        for name, stream, works in (("the receive", streams[0], receiving), ("the send", streams[1], sending)):
            with torch.cuda.stream(stream):
                for each in works:
                    each.wait()
                over[name].record()
        all_over(over, f"4 * 2^{log_size} bytes")
        for got, right in zip(made, alone, strict=True):
            assert torch.equal(got, right), "beside a receive the result differs"
        assert bool((received == alone[0] + float(turn)).all())


def all_over(events: dict[str, torch.cuda.Event], what: str, seconds: float = 20.0) -> None:
    """Waits for all of them. A rank that hangs says in what."""
    until = time.monotonic() + seconds
    while left := [name for name, event in events.items() if not event.query()]:
        if time.monotonic() > until:
            print(f"rank {dist.get_rank()}, {what}: not over after {seconds} s: {', '.join(left)}", file=sys.stderr, flush=True)
            os._exit(1)  # nothing on this GPU can be waited for, the end of the process group neither
        time.sleep(0.0005)


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


def main() -> None:
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    # Streams that share one of the GPU's queues wait for each other, and one of them has a receive here that waits for the other.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=60))
    cases: list[tuple[Any, ...]] = [(played_again, sequence, wide) for sequence in (False, True) for wide in (False, True)]
    cases += [(first_call_while_capturing,)]
    cases += [(case, retained) for case in (beside_a_collective, a_receive_that_waits_for_this_backward) for retained in (False, True)]
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
