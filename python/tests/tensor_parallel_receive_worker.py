"""One rank of a group over NCCL, under torchrun, with a GPU of its own: every rank receives what the rank beside it sends when its own
backward is over, so NCCL's kernel waits under the whole pass. Exits with a failed assertion, or 0; prints how many cases passed.

Its own process, because two things of CUDA's make such a receive wait for ever beside any pass. The first launch of a kernel
loads it, which waits until the GPU is idle: all that runs beside the receive has run before. And streams that share one of the GPU's
queues wait for each other: few streams are made before, and where the smallest kernel does not end either, the failure says so.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from rank_support import run_named, tell_where_it_hangs
from tensor_parallel_nccl_worker import Step
from torch import Tensor

LOG_SIZES = (12, 16, 20, 22, 22)  # fp32 numbers of a message
SECONDS = 20.0


class Neighbours:
    """This rank and the one beside it, and what they send each other. A direction has a group, and so a stream of NCCL's, of its own."""

    def __init__(self) -> None:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        to_even, to_odd = (dist.new_group(list(range(ranks))) for _ in range(2))
        self.there, self.back = (to_even, to_odd) if rank % 2 == 0 else (to_odd, to_even)
        self.peer: int | None = rank ^ 1 if rank ^ 1 < ranks else None
        self.streams = torch.cuda.Stream(), torch.cuda.Stream()
        if self.peer is not None:
            for group in (to_even, to_odd):  # a connection is made by both of its ends at once
                for each in self.begun(dist.irecv if group is self.there else dist.isend, torch.zeros(1, device="cuda"), group):
                    each.wait()

    def begun(self, operation: Any, tensor: Tensor, group: Any) -> Any:
        return dist.batch_isend_irecv([dist.P2POp(operation, tensor, self.peer, group)])

    def receive(self, into: Tensor) -> Any:
        with torch.cuda.stream(self.streams[0]):
            return self.begun(dist.irecv, into, self.there)

    def send(self, tensor: Tensor) -> Any:
        self.streams[1].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.streams[1]):
            return self.begun(dist.isend, tensor, self.back)

    def over(self, works: Any, stream: torch.cuda.Stream) -> torch.cuda.Event:
        with torch.cuda.stream(stream):
            for each in works:
                each.wait()
            return recorded()


def recorded() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


def all_over(events: dict[str, torch.cuda.Event], what: str) -> None:
    """Waits for all of them. A rank that hangs says in what."""
    until = time.monotonic() + SECONDS
    while left := [name for name, event in events.items() if not event.query()]:
        if time.monotonic() > until:
            print(f"rank {dist.get_rank()}, {what}: not over after {SECONDS} s: {', '.join(left)}", file=sys.stderr, flush=True)
            os._exit(1)  # nothing on this GPU can be waited for, the end of the process group neither
        time.sleep(0.0005)


def message(loss: Tensor, turn: int, log_size: int) -> Tensor:
    return torch.full((1 << log_size,), 0.0, device="cuda").add_(loss).add_(float(turn))


def a_receive_that_waits_for_this_backward(beside: Neighbours, retained: bool) -> None:
    step = Step(sharded=False, **({"workspace_limit_bytes": 1 << 40} if retained else {"retain_in_grad_weight": False}))
    step.fill(5)
    alone = [tensor.clone() for tensor in step.run()]
    if beside.peer is None:
        return
    message(alone[0], 0, max(LOG_SIZES))  # loads its kernels
    small = message(alone[0], 0, 1)
    for turn, log_size in enumerate(LOG_SIZES):
        received = torch.full((1 << log_size,), -1.0, device="cuda")
        what = f"a message of 4 * 2^{log_size} bytes"
        torch.cuda.synchronize()
        receiving = beside.receive(received)
        small.add_(1.0)
        all_over({"a small kernel beside the receive, whose stream shares a queue with it": recorded()}, what)
        made = step.run()
        sending = beside.send(message(made[0], turn, log_size))
        events = {"the pass": recorded()}
        events |= {"the receive": beside.over(receiving, beside.streams[0]), "the send": beside.over(sending, beside.streams[1])}
        all_over(events, what)
        for got, right in zip(made, alone, strict=True):
            assert torch.equal(got, right), "beside a receive the result differs"
        assert bool((received == alone[0] + float(turn)).all())


def main() -> None:
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=60))
    tell_where_it_hangs()
    beside = Neighbours()
    for retained in (False, True):
        print(f"rank {dist.get_rank()}: {'everything' if retained else 'nothing'} retained", file=sys.stderr, flush=True)
        run_named(a_receive_that_waits_for_this_backward, beside, retained)
    dist.barrier()
    if dist.get_rank() == 0:
        print("2 cases passed", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
