"""One rank under torchrun: when ranks ask each other which rows they have, layers that this rank's rows do not tell apart, and weights that
are known on some ranks alone. Exits with a failed assertion, or 0; rank 0 prints how many cases passed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rank_support import generator, run_main
from tensor_parallel_compile_worker import compiled, mesh, shard_loss
from tensor_parallel_support import TOKENS, Layer, close, leaf
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flce
from flce.call import _op
from flce.parallel import _layouts, _parallel


def asks(calls: Callable[[], None]) -> int:
    """How often ranks ask each other for their rows in these calls."""
    asked, original = 0, dist.all_gather_object

    def count(*arguments: Any, **keywords: Any) -> None:
        nonlocal asked
        asked += 1
        original(*arguments, **keywords)

    dist.all_gather_object = count
    try:
        calls()
    finally:
        dist.all_gather_object = original
    return asked


def other_places(kept: bool) -> None:
    """Pairs of layers in which a rank has equally many rows in different places: weights that stay, and weights that are made anew. Ranks
    ask once for each layer."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layer = Layer(seed=int(kept))
    hidden = layer.hidden.repeat(1, 2)  # a width for which ranks have agreed on nothing yet
    table = layer.weight.repeat(1, 2)
    if not kept:
        hidden, table = hidden[:, :80].contiguous(), table[:, :80].contiguous()
    places = []
    for first, second in ((60, 40), (40, 60), (60, 60)):
        bounds = [0, first, *(first + second + 10 * i for i in range(ranks - 1))]
        mine, target = table[bounds[rank] : bounds[rank + 1]], layer.target.clamp(max=bounds[-1] - 1)
        expected = flce.linear_cross_entropy(hidden, table[: bounds[-1]], target)
        places.append((leaf(mine), target, expected))

    def calls() -> None:
        for weight, target, expected in places:
            given = weight if kept else weight.detach().clone()
            loss = flce.linear_cross_entropy(hidden, given, target, process_group=layer.group)
            close(loss, expected)
            if kept:
                loss.backward()

    assert [asks(calls) for _ in range(2)] == [3, 0]


class Through(TorchDispatchMode):
    """Calls go through the operators, as in a graph."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        return function(*arguments, **(keywords or {}))


def other_places_in_graphs() -> None:
    """Runs `other_places` in graphs. A graph's backward may have a copy of the weight, and its forward may have been any of three
    layers'."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layer = Layer(seed=3)
    hidden, table = layer.hidden[:, :32].contiguous(), layer.weight[:, :32].contiguous()
    original = _op._backward_op
    made: list[Any] = []
    with Through():
        for first, second in ((60, 40), (40, 60), (60, 60)):
            bounds = [0, first, *(first + second + 10 * i for i in range(ranks - 1))]
            whole, weight = leaf(table[: bounds[-1]]), leaf(table[bounds[rank] : bounds[rank + 1]])
            target = layer.target.clamp(max=bounds[-1] - 1)
            flce.linear_cross_entropy(hidden, whole, target).backward()
            assert whole.grad is not None
            loss = flce.linear_cross_entropy(hidden, weight, target, process_group=layer.group)
            made.append((loss, weight, whole.grad[bounds[rank] : bounds[rank + 1]]))
        try:
            _op._backward_op = lambda grad, hidden, weight, *rest: original(grad, hidden, weight.clone(), *rest)
            for loss, _, _ in made:
                loss.backward()
        finally:
            _op._backward_op = original
    for _, weight, right in made:
        close(weight.grad, right)


def the_same_again(how: str) -> None:
    """One layer, in any tensor that holds its weight."""
    layer = Layer()
    width = {"anew": 40, "alias": 48, "other memory": 56, "new parameter": 24}[how]  # widths for which ranks have agreed on nothing yet
    hidden, table = layer.hidden[:, :width].contiguous(), nn.Parameter(layer.mine(layer.weight)[:, :width].contiguous())

    def calls() -> None:
        for _ in range(6):
            table.data = table.data.clone() if how == "other memory" else table.data
            given = {
                "anew": table.detach().clone(),
                "alias": table.detach(),
                "other memory": table,
                "new parameter": nn.Parameter(table.clone()),
            }[how]
            flce.linear_cross_entropy(hidden, given, layer.target, process_group=layer.group)

    assert asks(calls) == 1


def equals_the_whole(layer: Layer, width: int, weight: Tensor, whole: Tensor) -> None:
    """The loss and this rank's gradient of `weight`, a part of `whole`, in two calls."""
    hidden, target = layer.hidden[:, :width].contiguous(), layer.target % whole.shape[0]
    expected = flce.linear_cross_entropy(hidden, table := leaf(whole), target)
    expected.backward()
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, weight.shape[0])
    begin = sum(rows[: dist.get_rank()])
    for _ in range(2):
        mine = weight if weight.requires_grad else leaf(weight)
        loss = flce.linear_cross_entropy(hidden, mine, target, process_group=layer.group)
        close(loss, expected)
        (gradient,) = torch.autograd.grad(loss, mine)
        assert table.grad is not None
        close(gradient, table.grad[begin : begin + weight.shape[0]])


def known_on_one_rank(how: str) -> None:
    """A weight that stays on one rank and is new on another, or whose rows have changed on one rank alone."""
    layer, rank, ranks = Layer(), dist.get_rank(), dist.get_world_size()
    width = {"no rows": 16, "grown": 32, "alias": 48, "cast": 8}[how]
    table = layer.weight[:, :width].contiguous()
    if how == "no rows":  # the last rank's weight is made anew in every call
        cuts = [*(50 * i for i in range(ranks)), 50 * (ranks - 1)]
        mine: Tensor = nn.Parameter(table[cuts[rank] : cuts[rank + 1]].clone())
        for _ in range(3):
            equals_the_whole(layer, width, mine if rank < ranks - 1 else torch.empty(0, width), table[: cuts[-1]])
    elif how == "grown":  # on the last rank, and back
        mine = nn.Parameter(table[20 * rank : 20 * rank + 20].clone())
        more = nn.Parameter(table[20 * rank : 20 * rank + 30].clone())
        for grown in (False, True, False, True):
            equals_the_whole(layer, width, more if grown and rank == ranks - 1 else mine, table[: 20 * ranks + (10 if grown else 0)])
    elif how == "alias":  # with one row stored.t() is contiguous, with more it is copied
        count = 1 if rank == 0 else 20
        begin = 0 if rank == 0 else 20 * rank - 19
        stored = table[begin : begin + count].t().contiguous()
        for _ in range(3):
            equals_the_whole(layer, width, stored.t().contiguous(), table[: 20 * ranks - 19])
    else:  # two layers with equally many rows on rank 0, cast in every call
        for call in range(12):
            rows = 20 if rank == 0 or call % 2 else 30
            begin = 0 if rank == 0 else 20 + rows * (rank - 1)
            whole = 20 + (20 if call % 2 else 30) * (ranks - 1)
            equals_the_whole(layer, width, table[begin : begin + rows].clone(), table[:whole])


def by_a_backend_of_its_own() -> None:
    """Hosts of a group without collectives of the host's memory meet beside it."""
    group = dist.new_group(list(range(dist.get_world_size())))
    layer = Layer()
    layer.group = group
    original = _parallel._has_host_memory
    _parallel._has_host_memory = lambda _: False
    try:
        equals_the_whole(layer, 24, layer.mine(layer.weight)[:, :24].contiguous(), layer.weight[:, :24].contiguous())
        assert isinstance(_parallel._hosts[group], dist.ProcessGroupGloo)
    finally:
        _parallel._has_host_memory = original


def one_rank_forgets() -> None:
    """All ranks ask again for facts that one rank has not kept, or has not heard to their end."""
    layer = Layer()
    table = layer.mine(layer.weight)[:, :56].contiguous()

    def calls() -> None:
        for _ in range(2):
            flce.linear_cross_entropy(layer.hidden[:, :56].contiguous(), table, layer.target, process_group=layer.group)

    calls()
    if dist.get_rank() == 1:
        _layouts.forget()
    assert asks(calls) == 1


def other_dtensors() -> None:
    """DTensors with equally many rows on the last rank, and one more or less on the others. Each has a graph of its own: torch guards a
    DTensor's local shape alone."""
    ranks = dist.get_world_size()
    table, hidden, make = Layer().weight, Layer().hidden[:, :40].contiguous(), generator(7)
    for rows in (8 * ranks - 1, 8 * ranks - ranks, 8 * ranks - 1):  # the last rank has 7 rows of each
        weight, target = table[:rows, :40].contiguous(), torch.randint(0, rows, (TOKENS,), generator=make)
        expected = flce.linear_cross_entropy(hidden, weight, target)
        shard = distribute_tensor(weight, mesh(), [Shard(0)])
        torch._dynamo.reset()
        for function in (shard_loss, compiled(shard_loss)):
            close(function(hidden, shard, target, process_group=mesh()), expected)


CASES: list[tuple[Any, ...]] = [
    *((other_places, flag) for flag in (True, False)),
    (other_places_in_graphs,),
    *((the_same_again, how) for how in ("anew", "alias", "other memory", "new parameter")),
    *((known_on_one_rank, how) for how in ("no rows", "grown", "alias", "cast")),
    (by_a_backend_of_its_own,),
    (one_rank_forgets,),
    (other_dtensors,),
]

if __name__ == "__main__":
    run_main(lambda function, *arguments: function(*arguments), lambda: CASES)
