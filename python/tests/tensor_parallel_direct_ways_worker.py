"""One rank of a tensor-parallel group, under torchrun: calls like an earlier one on some ranks, beside others that go another way, raise or
know another layout. Exits with a failed assertion, or 0; rank 0 prints how many cases passed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from rank_support import device, run_main
from tensor_parallel_direct_worker import Call, is_direct, is_odd, raised_by, run, same
from tensor_parallel_layouts_worker import Through, asks
from tensor_parallel_support import HIDDEN, Layer, close, leaf, same_on_every_rank
from torch import Tensor

import flce
from flce.call import _call
from flce.core import _autograd, _kernels
from flce.parallel import _layouts, _shards


def one_goes_another_way(how: str) -> None:
    """A rank whose call is a new one to it, or none that can be direct, beside ranks whose call is direct."""
    call = Call(even=210)  # a weight of one row lies in both orders at once
    right = [call.step() for _ in range(2)][-1]
    assert is_direct(right[0])
    for number in range(3):
        hidden, weight, target = call.hidden, call.weight, call.target
        if is_odd():
            if how == "strided hidden":
                call.hidden = torch.cat([hidden, hidden], dim=1).detach()[:, :HIDDEN].requires_grad_()
            elif how == "misaligned weight":
                memory = torch.cat([weight.detach().new_zeros(1), weight.detach().reshape(-1)])
                call.weight = memory[1:].view(weight.shape).requires_grad_()
            elif how == "hidden major":
                call.weight = weight.detach().t().contiguous().t().requires_grad_()
            elif how == "shape":
                call.hidden, call.target = hidden.detach().view(2, -1, HIDDEN).requires_grad_(), target.view(2, -1)
            elif how == "new":
                _call.forget()
        if is_odd() and how == "operators":
            with Through():
                made = call.step()
        else:
            made = call.step()
        known = number > 0 and how in ("hidden major", "shape")  # a form of its own, of which the second call is direct
        assert is_direct(made[0]) == (not is_odd() or known)
        call.hidden, call.weight, call.target = hidden, weight, target
        for one, other in zip(made, right, strict=True):
            close(one.reshape(other.shape), other)
        same_on_every_rank(made[0], made[1].reshape(hidden.shape))
        same(right, call.step())


def operators_on_one() -> None:
    """A rank whose backward goes through the operators, of a layer of which the group knows several layouts: no host waits for another."""
    layer, rank, ranks = Layer(), dist.get_rank(), dist.get_world_size()
    classes = 20 * ranks - 1  # the last rank's last row is padding, or is not there
    rows = [(20, 20), (20, 19)]
    weights = [leaf(layer.weight[20 * rank : 20 * rank + each[rank == ranks - 1]]) for each in rows]
    hidden, target = leaf(layer.hidden), layer.target.clamp(max=classes - 1)
    expected = flce.linear_cross_entropy(hidden, layer.weight[:classes], target)
    (of_hidden,) = torch.autograd.grad(expected, hidden)
    for number in range(6):
        weight = weights[number % 2]
        with Through() if is_odd() and number > 1 else nullcontext():
            loss = flce.linear_cross_entropy(hidden, weight, target, process_group=layer.group, vocab_size=classes)
            gradient, _ = torch.autograd.grad(loss, (hidden, weight))
        close(loss, expected)
        close(gradient, of_hidden)


def refused_on_one(change: str) -> None:
    """One rank's call differs in what all ranks have to have alike: all get the error, and the next call is direct again."""
    call = Call()
    right = [call.step() for _ in range(2)][-1]
    options, hidden, target, weight = dict(call.options), call.hidden, call.target, call.weight
    for _ in range(2):
        if is_odd():
            if change == "options":
                call.options["softcap"] = 5.0
            elif change == "fewer tokens":
                call.hidden, call.target = hidden.detach()[:40], target[:40]
            elif change == "vocab_start":
                call.options["vocab_start"] = 10
            else:
                call.hidden, call.weight = hidden.detach().bfloat16(), weight.detach().bfloat16()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, raised_by(flce.PlacementError, call.value))
        assert len(set(everyone)) == 1, everyone
        call.options, call.hidden, call.target, call.weight = dict(options), hidden, target, weight
        made = call.step()
        assert is_direct(made[0])
        same(right, made)


def grown_on_one() -> None:
    """The last rank's weight has other rows in every second call; the other ranks' calls are like their earlier ones."""
    layer, rank, ranks = Layer(), dist.get_rank(), dist.get_world_size()
    last = rank == ranks - 1
    few, more = (leaf(layer.weight[20 * rank : 20 * rank + 20 + (10 if last else 0) * long]) for long in (0, 1))
    hidden = leaf(layer.hidden)

    def calls(*, known: bool = False) -> None:
        for number in range(6):
            size = 20 * ranks + 10 * (number % 2)
            target = layer.target.clamp(max=size - 1)
            mine = few if number % 2 == 0 or not last else more
            loss = flce.linear_cross_entropy(hidden, mine, target, process_group=layer.group)
            (gradient,) = torch.autograd.grad(loss, mine)
            whole = leaf(layer.weight[:size])
            expected = flce.linear_cross_entropy(layer.hidden, whole, target)
            expected.backward()
            close(loss, expected)
            assert whole.grad is not None
            close(gradient, whole.grad[20 * rank : 20 * rank + mine.shape[0]])
            assert is_direct(loss) == (known or (number > 1 if last else number > 0))

    assert asks(calls) == 2
    launches, original = [0], _shards.ShardKernel.launch_forward

    def count(*arguments: Any) -> Any:
        launches[0] += 1
        return original(*arguments)

    _shards.ShardKernel.launch_forward = count
    try:
        calls(known=True)
    finally:
        _shards.ShardKernel.launch_forward = original
    assert launches == [6], launches  # no rank launches what it then has to throw away, time and again


def failing_launch() -> None:
    """A launch that raises on one rank, in a call that the ranks refuse: every rank gets the refusal."""
    call = Call()
    right = [call.step() for _ in range(3)][-1]
    options, original = dict(call.options), _kernels.LoadedKernel.run

    def fail(*arguments: Any) -> None:
        raise MemoryError

    if is_odd():
        _kernels.LoadedKernel.run = fail
    else:
        call.options["softcap"] = 5.0
    try:
        raised_by(flce.PlacementError, call.value)
    finally:
        _kernels.LoadedKernel.run, call.options = original, options
    same(right, call.step())


def another_size() -> None:
    """A group that has another size than when the call was read, as that of a mesh has where the world was made again."""
    call = Call()
    value, *gradients = [call.step() for _ in range(3)][-1]
    form = _autograd.python_node(value).call[0]
    form.parallel = form.parallel._replace(ranks=form.parallel.ranks + 1)
    made = call.step()
    assert not is_direct(made[0])
    same((value, *gradients), made)


def forgotten(on_all: bool) -> None:
    """Facts that one rank or all of them have forgotten are asked for again, once; calls stay direct."""
    call = Call()
    right = [call.step() for _ in range(2)][-1]
    if on_all or is_odd():
        _layouts.forget()
    made: list[tuple[Tensor, ...]] = []
    assert [asks(lambda: made.append(call.step())) for _ in range(3)] == [1, 0, 0]
    for each in made:
        same(right, each)
        assert is_direct(each[0])


def gone() -> None:
    """A group that is destroyed is refused, in forward and in backward; another one is another."""
    if device() != "cpu":
        return
    call = Call()
    for _ in range(2):
        call.options["process_group"] = dist.new_group(list(range(dist.get_world_size())))
        made = [call.step() for _ in range(3)]
        assert is_direct(made[-1][0])
        value = call.value()
        dist.destroy_process_group(call.options["process_group"])
        for refused in (call.value, value.backward):
            assert "is gone" in raised_by(flce.PlacementError, refused)


CASES: list[tuple[Any, ...]] = [
    *((one_goes_another_way, how) for how in ("strided hidden", "misaligned weight", "hidden major", "shape", "new", "operators")),
    (operators_on_one,),
    *((refused_on_one, change) for change in ("options", "fewer tokens", "vocab_start", "dtype")),
    (grown_on_one,),
    (failing_launch,),
    (another_size,),
    *((forgotten, on_all) for on_all in (False, True)),
    (gone,),
]

if __name__ == "__main__":
    run_main(run, lambda: CASES)
