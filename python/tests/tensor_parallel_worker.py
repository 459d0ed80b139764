"""One rank of a tensor-parallel group, under torchrun: calls over shards against the same calls of the whole layer, and against plain
torch. Exits with a failed assertion, or 0; rank 0 prints how many cases passed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_support import device, run_main
from tensor_parallel_support import HIDDEN, TOKENS, VOCAB, Layer, backward_of, close, leaf, same_on_every_rank
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.utils.checkpoint import checkpoint

import flce
from flce.core import _retain
from flce.parallel import _shards


def compare(
    layer: Layer,
    call: Callable[..., Any],
    *,
    sequence: bool = False,
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
    **parallel: Any,
) -> None:
    """`call(hidden, weight, bias, select, **parallel)`, where select takes a [vocab] tensor to what the call is to have of it."""
    whole_hidden, whole_weight = leaf(layer.hidden), leaf(layer.weight)
    whole_bias = leaf(layer.bias) if bias else None
    expected = call(whole_hidden, whole_weight, whole_bias, lambda whole: whole)
    backward_of(expected, ())
    hidden = leaf(layer.my_tokens(layer.hidden) if sequence else layer.hidden)
    weight, my_bias = leaf(layer.mine(layer.weight)), leaf(layer.mine(layer.bias)) if bias else None
    got = call(hidden, weight, my_bias, layer.mine, process_group=layer.group, sequence_parallel=sequence, **parallel)
    backward_of(got, ())
    for mine, right in zip(*(made if isinstance(made, tuple) else (made,) for made in (got, expected)), strict=True):
        same_on_every_rank(mine)
        if mine.dtype is torch.int64:
            assert torch.equal(mine, right)
        else:
            close(mine, right, dtype)
    assert whole_hidden.grad is not None and whole_weight.grad is not None
    assert hidden.grad is not None and weight.grad is not None and hidden.grad.dtype is dtype
    right_hidden = layer.my_tokens(whole_hidden.grad) if sequence else whole_hidden.grad
    close(hidden.grad, right_hidden, dtype)
    if not sequence:
        same_on_every_rank(hidden.grad)
    close(weight.grad, layer.mine(whole_weight.grad), dtype)
    if bias:
        assert whole_bias is not None and my_bias is not None and whole_bias.grad is not None and my_bias.grad is not None
        close(my_bias.grad, layer.mine(whole_bias.grad), dtype)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.1, "reduction": "sum"},
    "softcap": {"softcap": 4.0, "logit_scale": 0.7},
    "z_loss": {"z_loss": 1e-2},
    "outputs": {"return_lse": True, "return_logprobs": True, "return_entropy": True, "return_top1": True, "return_log_sum_sq_probs": True},
    "dft": {"dft": True},
    "batch_invariant": {"batch_invariant": True},
}


def cross_entropy(options: str, dtype: torch.dtype, sequence: bool, *, rows: bool = False, parallel: dict[str, Any] | None = None) -> None:
    layer = Layer(dtype)
    tokens: dict[str, Any] = {"temperature": layer.temperature, "token_weight": layer.token_weight} if rows else {}

    def call(hidden: Tensor, weight: Tensor, bias: Tensor | None, mine: Callable[[Tensor], Tensor], **more: Any) -> Any:
        classes = {"class_weight": mine(layer.class_weight), "bias": bias} if rows else {}
        return flce.linear_cross_entropy(hidden, weight, layer.target, **OPTIONS[options], **classes, **tokens, **more)

    compare(layer, call, sequence=sequence, bias=rows, dtype=dtype, **(parallel or {}))


def logprobs(sequence: bool) -> None:
    layer = Layer(torch.bfloat16)

    def call(hidden: Tensor, weight: Tensor, bias: Tensor | None, mine: Any, **more: Any) -> Any:
        flags = {"return_entropy": True, "return_top1": True}
        return flce.linear_logprobs(hidden, weight, layer.target, temperature=layer.temperature, **flags, **more)

    compare(layer, call, sequence=sequence, dtype=torch.bfloat16)


def plain_torch() -> None:
    """Against torch's own cross entropy of materialised logits."""
    layer = Layer()
    hidden, weight = leaf(layer.hidden), leaf(layer.weight)
    expected = F.cross_entropy(F.linear(hidden, weight), layer.target, ignore_index=-100)
    expected.backward()
    mine, shard = leaf(layer.hidden), leaf(layer.mine(layer.weight))
    loss = flce.linear_cross_entropy(mine, shard, layer.target, process_group=layer.group)
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    close(loss, expected)
    close(mine.grad, hidden.grad)
    close(shard.grad, layer.mine(weight.grad))


def ranks_without_rows() -> None:
    """A rank with no row, ranks with nothing but padding, and tokens that are all ignored."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layer = Layer()
    for ignored in (False, True):
        target = torch.full_like(layer.target, -100) if ignored else layer.target
        whole = leaf(layer.weight)
        expected = flce.linear_cross_entropy(layer.hidden, whole, target)
        expected.backward()
        rows = [VOCAB, *[0] * (ranks - 1)][rank]
        shard = leaf(layer.weight[:rows])
        loss = flce.linear_cross_entropy(layer.hidden, shard, target, process_group=layer.group)
        loss.backward()
        close(loss, expected)
        assert whole.grad is not None and shard.grad is not None
        close(shard.grad, whole.grad[:rows])
        padded = torch.cat([layer.weight, 50.0 * torch.randn(ranks * VOCAB - VOCAB, HIDDEN)])
        shard = leaf(padded[rank * VOCAB : (rank + 1) * VOCAB])
        loss = flce.linear_cross_entropy(layer.hidden, shard, target, process_group=layer.group, vocab_size=VOCAB)
        loss.backward()
        close(loss, expected)
        assert shard.grad is not None
        close(shard.grad, whole.grad if rank == 0 else torch.zeros_like(shard))


def given_starts() -> None:
    """Ranks in another order than their rows."""
    layer = Layer()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    size = 200 // ranks
    start = (ranks - 1 - rank) * size
    weight = layer.weight[:200]
    target = layer.target.clamp(max=199)
    expected = flce.linear_cross_entropy(layer.hidden, weight, target)
    got = flce.linear_cross_entropy(layer.hidden, weight[start : start + size], target, process_group=layer.group, vocab_start=start)
    close(got, expected)


def many_dimensions(batch_first: bool) -> None:
    """Sequences whose tokens lie over ranks in a dimension that need not be the first."""
    layer = Layer()
    shape = (3, TOKENS // 3) if batch_first else (TOKENS // 3, 3)
    hidden, target = layer.hidden.view(*shape, HIDDEN), layer.target.view(shape)
    dimension = 1 if batch_first else 0
    whole, weight = leaf(hidden), leaf(layer.weight)
    flags: dict[str, Any] = {"reduction": "none", "return_top1": True}
    expected = flce.linear_cross_entropy(whole, weight, target, **flags)
    (expected[0] * torch.arange(TOKENS).view(shape)).sum().backward()
    part = leaf(hidden.chunk(dist.get_world_size(), dimension)[dist.get_rank()])
    shard = leaf(layer.mine(layer.weight))
    got = flce.linear_cross_entropy(part, shard, target, process_group=layer.group, sequence_parallel=True, **flags)
    (got[0] * torch.arange(TOKENS).view(shape)).sum().backward()
    assert got[0].shape == shape and torch.equal(got[1], expected[1])
    close(got[0].detach(), expected[0].detach())
    assert whole.grad is not None and part.grad is not None
    close(part.grad, whole.grad.chunk(dist.get_world_size(), dimension)[dist.get_rank()])


def main_grad(dtype: torch.dtype) -> None:
    """Two microbatches' gradients added up in memory of the caller's."""
    layer = Layer(dtype)
    whole, buffer = leaf(layer.weight), torch.zeros(layer.end - layer.begin, HIDDEN)
    for _ in range(2):
        flce.linear_cross_entropy(layer.hidden, whole, layer.target).backward()
        hidden, shard = leaf(layer.hidden), leaf(layer.mine(layer.weight))
        loss = flce.linear_cross_entropy(hidden, shard, layer.target, process_group=layer.group, grad_weight_out=buffer)
        loss.backward()
        assert shard.grad is None
    assert whole.grad is not None
    close(buffer, layer.mine(whole.grad).float(), dtype)


def backward_twice() -> None:
    """Two backward passes over one forward, and one gradient at a time as schedules ask for them: the same bits each time."""
    layer = Layer()
    hidden, shard = leaf(layer.hidden), leaf(layer.mine(layer.weight))
    loss = flce.linear_cross_entropy(hidden, shard, layer.target, process_group=layer.group)
    first = torch.autograd.grad(loss, (hidden, shard), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, shard), retain_graph=True)
    alone = (*torch.autograd.grad(loss, hidden, retain_graph=True), *torch.autograd.grad(loss, shard))
    for others in (second, alone):
        assert all(torch.equal(a, b) for a, b in zip(first, others, strict=True))


def frozen(which: str) -> None:
    layer = Layer()
    hidden, shard = layer.hidden.clone(), layer.mine(layer.weight)
    (hidden if which == "weight" else shard).requires_grad_()
    whole_hidden, whole = leaf(layer.hidden), leaf(layer.weight)
    flce.linear_cross_entropy(whole_hidden, whole, layer.target).backward()
    flce.linear_cross_entropy(hidden, shard, layer.target, process_group=layer.group).backward()
    assert whole_hidden.grad is not None and whole.grad is not None
    if which == "weight":
        assert shard.grad is None
        close(hidden.grad, whole_hidden.grad)
    else:
        assert hidden.grad is None
        close(shard.grad, layer.mine(whole.grad))


def limits() -> None:
    """Every limit gives the same loss, and gradients within rounding."""
    layer = Layer(tokens=2048)
    results = []
    for limit, retain in itertools.product((None, 1 << 20, 8 << 20), (None, False, True)):
        hidden, shard = leaf(layer.hidden), leaf(layer.mine(layer.weight))
        how: dict[str, Any] = {"workspace_limit_bytes": limit, "retain_in_grad_weight": retain}
        loss = flce.linear_cross_entropy(hidden, shard, layer.target, process_group=layer.group, **how)
        loss.backward()
        results.append((loss.detach(), hidden.grad, shard.grad))
    for loss, grad_hidden, grad_weight in results[1:]:
        close(loss, results[0][0])
        close(grad_hidden, results[0][1])
        close(grad_weight, results[0][2])


def retained(sequence: bool) -> None:
    """Retained logits reach backward, also where hidden states are gathered a second time."""
    layer = Layer()
    whole, rows, target = layer.hidden, layer.mine(layer.weight), layer.target
    if device() != "cpu":  # a GPU retains nothing for layers of less work, or in fp32, under any limit
        whole, rows, target = torch.randn(4096, 1024), torch.randn(8200, 1024) / 32, torch.arange(4096)
    hidden, shard = (leaf(tensor.to(torch.bfloat16)) for tensor in (layer.my_tokens(whole) if sequence else whole, rows))
    used: list[bool] = []
    backward, least = _shards.ShardKernel.backward, _retain.LEAST_WORK

    def watch(self: Any, *args: Any, **keywords: Any) -> None:
        used.append(len(args) > 6 and args[6] is not None)
        backward(self, *args, **keywords)

    elsewhere = []  # where an allocator might put the second gather's hidden states, were it not taken
    try:
        _shards.ShardKernel.backward, _retain.LEAST_WORK = watch, 1
        loss = flce.linear_cross_entropy(
            hidden, shard, target, process_group=layer.group, sequence_parallel=sequence, workspace_limit_bytes=1 << 30
        )
        elsewhere.append(torch.empty(whole.shape, dtype=hidden.dtype))
        loss.backward()
    finally:
        _shards.ShardKernel.backward, _retain.LEAST_WORK = backward, least
    assert used == [True]


def checkpointed() -> None:
    layer = Layer()
    hidden, shard = leaf(layer.hidden), leaf(layer.mine(layer.weight))

    def step(x: Tensor, w: Tensor) -> Tensor:
        loss: Tensor = flce.linear_cross_entropy(x.tanh(), w, layer.target, process_group=layer.group, sequence_parallel=False)
        return loss

    step(hidden, shard).backward()
    again, shard_again = leaf(layer.hidden), leaf(layer.mine(layer.weight))
    for reentrant in (False, True):
        again.grad = shard_again.grad = None
        checkpoint(step, again, shard_again, use_reentrant=reentrant).backward()
        assert torch.equal(again.grad, hidden.grad) and torch.equal(shard_again.grad, shard.grad)


def autocast() -> None:
    """fp32 parameters under bf16 autocast, as the whole layer has it."""
    layer = Layer()
    whole_hidden, whole = leaf(layer.hidden), leaf(layer.weight)
    hidden, shard = leaf(layer.hidden), leaf(layer.mine(layer.weight))
    with torch.autocast(device(), torch.bfloat16):
        expected = flce.linear_cross_entropy(whole_hidden, whole, layer.target)
        loss = flce.linear_cross_entropy(hidden, shard, layer.target, process_group=layer.group)
    expected.backward()
    loss.backward()
    assert whole.grad is not None and shard.grad is not None and shard.grad.dtype is torch.float32
    close(loss, expected, torch.bfloat16)
    close(shard.grad, layer.mine(whole.grad), torch.bfloat16)


def losses() -> None:
    """The losses for trainers over a module that has a shard."""
    layer = Layer()
    head = torch.nn.Linear(HIDDEN, layer.end - layer.begin, bias=False)
    whole = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    with torch.no_grad():
        head.weight.copy_(layer.mine(layer.weight))
        whole.weight.copy_(layer.weight)
    hidden, target = layer.hidden.view(2, -1, HIDDEN), layer.target.view(2, -1)
    for make in (flce.LinearCrossEntropyLoss, flce.PipelineFusedLoss):
        loss, right = make(head, shift=1, process_group=layer.group), make(whole, shift=1)
        close(loss(hidden, target), right(hidden, target))
        assert int(loss.num_valid(target)) == int(right.num_valid(target))
        try:
            loss.forward_logits(hidden)
        except flce.PlacementError as error:
            assert "process_group" in str(error)
        else:
            raise AssertionError("forward_logits of a shard was not refused")


def parts_of_grad_hidden(dtype: torch.dtype, as_dtensor: bool) -> None:
    """Gradients without the sum: ranks' parts of hidden's gradient, which are not alike and whose sum is the whole's."""
    layer = Layer(dtype)
    whole_hidden, whole = leaf(layer.hidden), leaf(layer.weight)
    hidden, shard = leaf(layer.hidden), leaf(layer.mine(layer.weight))
    mesh = init_device_mesh(device(), (dist.get_world_size(),))
    given = hidden if not as_dtensor else distribute_tensor(layer.hidden, mesh, [Replicate()]).requires_grad_()
    calls: list[tuple[Tensor, Tensor, dict[str, Any]]] = [
        (whole_hidden, whole, {}),
        (given, shard, {"process_group": mesh.get_group(), "reduce_grad_hidden": False}),
    ]
    for each, weight, parallel in calls:
        logprobs, entropy = flce.linear_logprobs(each, weight, layer.target, return_entropy=True, **parallel)
        (logprobs * layer.token_weight + 0.5 * entropy).sum().backward()
    part = given.grad
    assert part is not None and whole_hidden.grad is not None and whole.grad is not None
    if isinstance(part, DTensor):
        assert list(part.placements) == [Partial()]
        part = part.to_local()
    total = part.float().clone()
    dist.all_reduce(total)
    close(total, whole_hidden.grad.float(), dtype)
    close(shard.grad, layer.mine(whole.grad), dtype)
    assert dist.get_world_size() == 1 or float((part.float() - total).norm()) > 0.1 * float(total.norm())


def parts_in_turn() -> None:
    """No rank waits for another in a backward that adds nothing up: rank 0 runs its own before the others begin theirs."""
    layer = Layer()
    whole = leaf(layer.hidden)
    flce.linear_cross_entropy(whole, layer.weight, layer.target).backward()
    hidden, shard = leaf(layer.hidden), layer.mine(layer.weight)
    loss = flce.LinearCrossEntropyLoss(Head(shard), shift=0, process_group=layer.group, reduce_grad_hidden=False)(hidden, layer.target)
    for rank in range(dist.get_world_size()):
        if rank == dist.get_rank():
            loss.backward()
        dist.barrier()
    assert hidden.grad is not None and whole.grad is not None
    dist.all_reduce(hidden.grad)
    close(hidden.grad, whole.grad)


class Head(torch.nn.Module):
    """An output layer with a given weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)


def refused_sums() -> None:
    """Refuses options that do not go with reduce_grad_hidden, by name, before any rank waits for another; and ranks that differ in it."""
    layer = Layer()
    shard = layer.weight[:5]  # a shape for which ranks have agreed on nothing yet
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"reduce_grad_hidden": False}, flce.ArgumentError, "process_group is None"),
        ({"reduce_grad_hidden": 1}, flce.DTypeError, "reduce_grad_hidden is 1"),
        ({"reduce_grad_hidden": None, "process_group": layer.group}, flce.DTypeError, "reduce_grad_hidden is None"),
        ({"reduce_grad_hidden": False, "process_group": layer.group, "sequence_parallel": True}, flce.ArgumentError, "sequence_parallel"),
        ({"reduce_grad_hidden": False, "process_group": layer.group, "reduce_dtype": torch.float32}, flce.ArgumentError, "reduce_dtype"),
        ({"reduce_grad_hidden": dist.get_rank() == 0, "process_group": layer.group}, flce.PlacementError, "reduce_grad_hidden differs"),
    ]
    for given, kind, message in cases:
        try:
            flce.linear_cross_entropy(layer.hidden, shard, layer.target, **given)
        except kind as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"not refused: {message}")


def labels_at_fault() -> None:
    """One fault, on every rank."""
    layer = Layer()
    target = layer.target.clone()
    target[11] = VOCAB
    target[20] = -7
    shard = layer.mine(layer.weight)
    loss = flce.linear_cross_entropy(layer.hidden, shard, target, process_group=layer.group)
    assert bool(loss.isfinite())
    try:
        flce.check_labels()
    except flce.LabelError as error:
        assert error.row == 11 and f"0 to {VOCAB - 1}" in str(error), error
    else:
        raise AssertionError("a label out of range was not reported")
    flce.check_labels()


def all_cases() -> list[tuple[Any, ...]]:
    kinds = (torch.float32, torch.bfloat16)
    cases: list[tuple[Any, ...]] = [
        *((cross_entropy, options, dtype, sequence) for options in OPTIONS for dtype in kinds for sequence in (False, True)),
    ]
    if device() != "cpu":  # there it takes bf16
        cases = [case for case in cases if case[1:3] != ("batch_invariant", torch.float32)]
    return cases + OTHERS


def everything(sequence: bool) -> None:
    cross_entropy("outputs", torch.float32, sequence, rows=True)
    cross_entropy("smoothing", torch.float32, sequence, rows=True)


def summed_in_fp32(sequence: bool) -> None:
    cross_entropy("plain", torch.bfloat16, sequence, parallel={"reduce_dtype": torch.float32})


OTHERS: list[tuple[Any, ...]] = [
    *((function, flag) for function in (everything, summed_in_fp32, logprobs, many_dimensions, retained) for flag in (False, True)),
    *((main_grad, dtype) for dtype in (torch.float32, torch.bfloat16)),
    *((frozen, which) for which in ("weight", "hidden")),
    *((function,) for function in (plain_torch, ranks_without_rows, given_starts, backward_twice, limits, checkpointed, autocast, losses)),
    *((parts_of_grad_hidden, *how) for how in itertools.product((torch.float32, torch.bfloat16), (False, True))),
    (parts_in_turn,),
    (refused_sums,),
    (labels_at_fault,),
]

if __name__ == "__main__":
    run_main(lambda function, *arguments: function(*arguments), all_cases)
