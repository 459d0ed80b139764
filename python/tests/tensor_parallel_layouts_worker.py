"""One rank under torchrun: when ranks ask each other which rows they have, and layers that this rank's rows do not tell apart. Exits with
a failed assertion, or 0; rank 0 prints how many cases passed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rank_support import generator, run_main
from tensor_parallel_compile_worker import compiled, mesh, shard_loss
from tensor_parallel_worker import TOKENS, Layer, close, leaf
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flce
from flce import _layouts, _op, _parallel


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
    """Layers in which a rank has as many rows as in another one, in other places: weights that stay, and weights that are made anew."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layer = Layer(seed=int(kept))
    hidden = layer.hidden.repeat(1, 2)  # of a width for which ranks have agreed on nothing yet
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

    assert [asks(calls) for _ in range(2)] == [3, 0 if kept else 3]


class Through(TorchDispatchMode):
    """Calls go through the operators, as in a graph."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        return function(*arguments, **(keywords or {}))


def other_places_in_graphs() -> None:
    """As `other_places`. A graph's backward is told by what forward has saved which layer it has: it may have a copy of the weight."""
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
    """A weight that each call makes anew is asked for a few times, one that is the same in another form once."""
    layer = Layer()
    width = {"anew": 40, "alias": 48, "other memory": 56}[how]  # for which ranks have agreed on nothing yet
    hidden, table = layer.hidden[:, :width].contiguous(), nn.Parameter(layer.mine(layer.weight)[:, :width].contiguous())

    def calls() -> None:
        for _ in range(3 * _layouts.ALIKE):
            table.data = table.data.clone() if how == "other memory" else table.data
            given = {"anew": table.detach().clone(), "alias": table.detach(), "other memory": table}[how]
            flce.linear_cross_entropy(hidden, given, layer.target, process_group=layer.group)

    assert asks(calls) == (_layouts.ALIKE if how == "anew" else 1)


def new_parameters() -> None:
    """However often the others were the same."""
    layer = Layer()
    hidden, table = layer.hidden[:, :24].contiguous(), layer.mine(layer.weight)[:, :24].contiguous()

    def calls() -> None:
        for _ in range(2 * _layouts.ALIKE):
            flce.linear_cross_entropy(hidden, nn.Parameter(table.clone()), layer.target, process_group=layer.group)

    assert asks(calls) == 2 * _layouts.ALIKE


def captured_and_replaced() -> None:
    """What cannot ask: a capture goes by the last answer alone, and a backward refuses to guess."""
    parallel = _parallel.asked(dist.group.WORLD, False, None, None, None, True)
    assert parallel is not None
    answers = _layouts._Answers()
    first, second = _layouts.Shard(40, 60, 60, 60, 60, 100), _layouts.Shard(60, 60, 60, 60, 60, 120)
    rows = torch.zeros(60, 8)
    assert answers.find(rows, parallel, capturing=True) is None and answers.find_again(rows, parallel) is None
    answers.add(torch.zeros(60, 8), [(40, -1), (60, -1)], first)
    assert answers.find(rows, parallel, capturing=True) == answers.find_again(rows, parallel) == first
    assert answers.find(rows, parallel, capturing=False) is None
    answers.add(torch.zeros(40, 8), [(60, -1), (40, -1)], first._replace(vocab_start=60, rows=40))
    assert answers.find(rows, parallel, capturing=True) is None  # other ranks may have found the last one to fit
    assert answers.find_again(rows, parallel) == first
    answers.add(torch.zeros(60, 8), [(60, -1), (60, -1)], second)
    assert answers.find(rows, parallel, capturing=True) == second
    try:
        answers.find_again(rows, parallel)
    except flce.PlacementError as error:
        assert "rows of several layers, from labels [40, 60] on" in str(error), error
    else:
        raise AssertionError("a backward guessed")
    assert answers.find_again(rows, parallel._replace(vocab_start=40)) == first


def forgotten() -> None:
    """What is known of weights that are gone does not stay."""
    known = _layouts.WeightMap()
    kept = torch.zeros(3, 2)
    known.set(kept, "kept")
    for _ in range(1000):
        known.set(torch.zeros(3, 2), "gone")
    assert len(known._places) <= 2 * 64 and len(known._tensors) == 1
    assert known.get(kept) == known.get(kept.detach()) == "kept"
    assert known.get(kept[1:]) is None and known.get(torch.zeros(3, 2)) is None


def other_dtensors() -> None:
    """DTensors of which the last rank has as many rows, and the others one more or less. Each has a graph of its own: torch guards a
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
    *((the_same_again, how) for how in ("anew", "alias", "other memory")),
    (new_parameters,),
    (captured_and_replaced,),
    (forgotten,),
    (other_dtensors,),
]

if __name__ == "__main__":
    run_main(lambda function, *arguments: function(*arguments), lambda: CASES)
