"""One rank under torchrun: what a shard's forward does while other ranks' partial sums come. Exits with a failed assertion, or 0; rank 0
prints how many cases passed."""

from __future__ import annotations

from typing import Any

import torch
from rank_support import device, run_main
from tensor_parallel_support import Layer, close, leaf
from torch import Tensor

import flce
from flce import _parallel, _retain, _shards

LIMITS = (None, 1 << 30)  # nothing but what a shard retains unasked, and all


class Watched:
    """The calls of forward, merge and the gathering of partial sums, in order."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def __enter__(self) -> Watched:
        kernel = _shards.ShardKernel
        self._originals = run, run_in, start = kernel.run, kernel.run_in, _parallel.start_gather
        self._least, _retain.LEAST_WORK = _retain.LEAST_WORK, 1

        def name(this: Any, function: Any) -> str:
            return "forward" if function is this.forward_function else "merge" if function is this.merge_function else "other"

        def watch_run(this: Any, function: Any, *arguments: Any) -> None:
            self.order.append(name(this, function))
            run(this, function, *arguments)

        def watch_run_in(this: Any, workspace: Tensor, size: int, function: Any, address: int) -> None:
            self.order.append(name(this, function))
            run_in(this, workspace, size, function, address)

        def watch_start(group: Any, part: Tensor, ranks: int) -> tuple[Tensor, Any]:
            whole, work = start(group, part, ranks)
            self.order.append("gather")
            return whole, Awaited(work, self.order)

        kernel.run, kernel.run_in, _parallel.start_gather = watch_run, watch_run_in, watch_start  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        kernel = _shards.ShardKernel
        kernel.run, kernel.run_in, _parallel.start_gather = self._originals  # type: ignore[method-assign]
        _retain.LEAST_WORK = self._least


class Awaited:
    def __init__(self, work: Any, order: list[str]) -> None:
        self.work, self.order = work, order

    def wait(self) -> None:
        self.order.append("wait")
        self.work.wait()


def gathers_beside_the_rest(limit: int | None) -> None:
    """Of a forward that leaves something to backward. One that does not is a single call."""
    layer = Layer()
    whole, rows, target = layer.hidden, layer.mine(layer.weight), layer.target
    if device() != "cpu":  # where layers of less work retain nothing, whatever the limit, and those in fp32
        whole, rows, target = torch.randn(4096, 1024), torch.randn(8200, 1024) / 32, torch.arange(4096)
    hidden, shard = leaf(whole.to(torch.bfloat16)), leaf(rows.to(torch.bfloat16))
    options = {} if limit is None else {"workspace_limit_bytes": limit}
    with Watched() as watched:
        loss = flce.linear_cross_entropy(hidden, shard, target, process_group=layer.group, **options)
    assert watched.order == ["forward", "gather", "forward", "wait", "merge"], watched.order
    with Watched() as watched, torch.no_grad():
        close(flce.linear_cross_entropy(hidden, shard, target, process_group=layer.group, **options), loss.detach())
    assert watched.order == ["forward", "gather", "wait", "merge"], watched.order


if __name__ == "__main__":
    run_main(lambda function, *arguments: function(*arguments), lambda: [(gathers_beside_the_rest, limit) for limit in LIMITS])
