"""PipelineFusedLoss: under torchrun with unmodified schedules, what a microbatch in flight costs, and the example."""

from __future__ import annotations

import inspect
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from levels import by_ranks, in_turn
from rank_support import cases_passed
from support import assert_close, spy_on_backward
from torch import Tensor, nn
from torch.distributed.pipelining import schedules

import flce
from flce.core import _retain

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def launch(*command: str, timeout: int = 400, ranks_on: str = "cpu") -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "FLCE_TEST_RANKS_ON": ranks_on}
    if ranks_on == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    result = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    return result.stdout


@by_ranks({1: 14, 2: 13, 4: 12})
def test_schedules_equal_the_unpipelined_model(ranks: int, cases: int) -> None:
    assert cases_passed("pipeline_worker.py", str(ranks)) == {ranks: cases}


def test_hooks_of_data_parallel_wrappers_see_the_head() -> None:
    assert cases_passed("data_parallel_worker.py", "2") == {2: 6}


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_example_trains_and_needs_less_memory(schedule: str) -> None:
    output = launch(str(ROOT / "examples" / "pipeline_last_stage.py"), "--tiny", "--schedule", schedule)
    memory = {name: float(mib) for name, mib in re.findall(r"^ +(materialised logits|flce): +([\d.]+) MiB", output, re.MULTILINE)}
    first, last = map(float, re.findall(r"flce: loss ([\d.]+) -> ([\d.]+)", output)[0])
    assert last < first
    assert memory["flce"] < memory["materialised logits"]


def test_every_schedule_equals_the_unpipelined_model() -> None:
    """Runs schedules of one stage a rank and of two, whether they split backward or not, with 12 losses each."""
    exported = [name for name in schedules.__all__ if name.startswith("Schedule")]
    assert cases_passed("schedules_worker.py", "2") == {2: len(in_turn(range(12 * len(exported)), 5))}


@pytest.mark.parametrize("least_work", [1, 1 << 40], ids=["retaining", "computing again"])
@pytest.mark.parametrize("accumulate_into_grad", [False, True])
def test_split_backward_computes_each_gradient_once(
    device: str, monkeypatch: pytest.MonkeyPatch, least_work: int, accumulate_into_grad: bool
) -> None:
    """Zero-bubble schedules ask for the stage's input first and for the weights later, with these two functions."""
    split = pytest.importorskip("torch.distributed.pipelining._backward")
    computed = spy_on_backward(monkeypatch)
    monkeypatch.setattr(_retain, "LEAST_WORK", least_work)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to(device)
    head = nn.Linear(64, 500, bias=False, device=device)
    loss_fn = flce.PipelineFusedLoss(head, impl="flce", shift=0, accumulate_into_grad=accumulate_into_grad)
    parameters = [*layers.parameters(), *head.parameters()]
    totals: list[Tensor | None] = [None] * len(parameters)
    for _ in range(2):  # the second microbatch adds to what the first has left
        x = torch.randn(40, 64, device=device, requires_grad=True)
        target = torch.randint(0, 500, (40,), device=device)
        expected = torch.autograd.grad(nn.functional.cross_entropy(head(layers(x)), target), [x, *parameters])
        totals = [right if total is None else total + right for total, right in zip(totals, expected[1:], strict=True)]
        computed.clear()
        grad_input, groups = split.stage_backward_input([loss_fn(layers(x), target)], None, [x], iter(parameters))
        split.stage_backward_weight(iter(parameters), groups)
        assert computed == [(True, False), (False, True)]
        for actual, right in zip([grad_input[0], *(parameter.grad for parameter in parameters)], [expected[0], *totals], strict=True):
            assert_close(actual, right, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gradient_that_grad_asks_for_is_not_added(device: str, dtype: torch.dtype) -> None:
    head = nn.Linear(32, 500, bias=False, device=device, dtype=dtype)
    hidden, labels = microbatches(device, 1)[0]
    hidden = hidden.detach().to(dtype).requires_grad_()
    loss_fn = flce.PipelineFusedLoss(head, impl="flce", shift=0, accumulate_into_grad=True)
    plain = torch.autograd.grad(flce.PipelineFusedLoss(head, impl="flce", shift=0)(hidden, labels), (hidden, head.weight))
    for inputs, expected in (((hidden, head.weight), plain), ((head.weight,), plain[1:]), ((hidden,), plain[:1])):
        for actual, right in zip(torch.autograd.grad(loss_fn(hidden, labels), inputs), expected, strict=True):
            assert actual.dtype == right.dtype
            assert_close(actual, right, dtype)
        assert head.weight.grad is not None
        assert not head.weight.grad.any()
    for times in (1, 2):
        loss_fn(hidden, labels).backward()
        assert_close(head.weight.grad, times * plain[1], dtype)
    wide = torch.zeros_like(head.weight, dtype=torch.float32)
    loss = flce.linear_cross_entropy(hidden, head.weight, labels, grad_weight_out=wide)
    (gradient,) = torch.autograd.grad(loss, head.weight)
    assert gradient.dtype == dtype
    assert_close(gradient, plain[1], dtype)
    assert not wide.any()


def microbatches(device: str, count: int, num_tokens: int = 64, hidden_size: int = 32) -> list[tuple[Tensor, Tensor]]:
    return [
        (torch.randn(num_tokens, hidden_size, device=device, requires_grad=True), torch.randint(0, 500, (num_tokens,), device=device))
        for _ in range(count)
    ]


@pytest.mark.parametrize("accumulate_into_grad", [False, True])
def test_a_microbatch_in_flight_keeps_hidden_and_lse(device: str, accumulate_into_grad: bool) -> None:
    head = nn.Linear(32, 500, bias=False, device=device)
    loss_fn = flce.PipelineFusedLoss(head, impl="flce", accumulate_into_grad=accumulate_into_grad, shift=1)
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    flights = microbatches(device, 4)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        losses = [loss_fn(hidden[None], labels[None]) for hidden, labels in flights]
    shared = {tensor.untyped_storage().data_ptr() for tensor in (head.weight, *(hidden for hidden, _ in flights))}
    own = sum(size for address, size in held.items() if address not in shared)
    assert own == 4 * (64 * 4 + 64 * 8)  # fp32 lse and the shifted int64 labels of each
    for loss in losses:
        loss.backward()


@pytest.mark.gpu
def test_gpu_memory_grows_by_lse_and_labels_alone() -> None:
    head = nn.Linear(256, 32000, bias=False, device="cuda", dtype=torch.bfloat16)
    loss_fn = flce.PipelineFusedLoss(head, impl="flce", shift=0)
    flights = [
        (torch.randn(2048, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True), torch.randint(0, 32000, (2048,), device="cuda"))
        for _ in range(8)
    ]
    loss_fn(*flights[0]).backward()
    allocated = []
    losses = []
    for hidden, labels in flights:
        losses.append(loss_fn(hidden, labels))
        allocated.append(torch.cuda.memory_allocated())
    growth = {after - before for before, after in itertools.pairwise(allocated)}
    assert growth == {2048 * 4 + 512}  # lse, and the allocator's smallest block for the loss


def test_mean_of_each_microbatch_without_a_count(device: str) -> None:
    head = nn.Linear(32, 500, device=device)
    hidden, labels = microbatches(device, 1)[0]
    labels[10:] = -100
    loss_fn = flce.PipelineFusedLoss(head, impl="flce", shift=0)
    alone = loss_fn(hidden, labels)
    assert loss_fn.normalize_by(labels) == 10
    assert torch.equal(loss_fn(hidden, labels), alone)
    loss_fn.normalize_by(torch.tensor(20, device=device))
    assert loss_fn(hidden, labels).item() == pytest.approx(alone.item() / 2)
    loss_fn.normalize_by(None)
    assert torch.equal(loss_fn(hidden, labels), alone)


def test_global_normalisation_of_uneven_masks(device: str) -> None:
    """Microbatch losses {4} and {1, 1, 1} give 7/4, not the mean of the means, 5/2."""
    hidden = torch.zeros(4, 8, device=device)
    labels = torch.tensor([0, -100, -100, -100, 1, 1, 1, -100], device=device)
    logits = torch.tensor([0.0, 3.0, -1e4], device=device)

    class Head(nn.Module):
        """Zero hidden states make its bias the logits."""

        weight = nn.Parameter(torch.zeros(3, 8, device=device))
        bias = logits

    loss_fn = flce.PipelineFusedLoss(Head(), impl="flce", shift=0)
    loss_fn.normalize_by(labels)
    total = torch.stack([loss_fn(hidden, part) for part in labels.chunk(2)]).detach().sum()
    each = -torch.log_softmax(logits, 0)
    assert total.item() == pytest.approx((each[0] + 3 * each[1]).item() / 4, rel=1e-6)


@pytest.mark.parametrize("impl", ["flce", "pytorch"])
def test_class_weights_of_microbatches_are_counted(device: str, impl: str) -> None:
    """The microbatches' losses add up to the whole batch's mean, which divides by the labels' class weights."""
    head, weights = nn.Linear(32, 500, device=device), torch.linspace(0.1, 4.0, 500, device=device)
    hidden, labels = microbatches(device, 1)[0]
    labels[:24] //= 9  # classes of the small weights
    labels[40:44] = torch.tensor([-100, -100, 500, -7], device=device)
    loss_fn = flce.PipelineFusedLoss(head, impl=impl, shift=0, class_weight=weights)
    valid = (labels >= 0) & (labels < 500)
    expected = nn.functional.cross_entropy(head(hidden)[valid], labels[valid], weights)
    assert loss_fn.normalize_by(labels).item() == pytest.approx(weights[labels[valid]].sum().item())  # type: ignore[union-attr]
    total = torch.stack([loss_fn(*part) for part in zip(hidden.split(16), labels.split(16), strict=True)]).sum()
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(
        loss_fn(hidden, labels), flce.LinearCrossEntropyLoss(head, impl, shift=0, class_weight=weights)(hidden, labels)
    )
    with pytest.raises(flce.LabelError):
        flce.check_labels()
    both = flce.PipelineFusedLoss(head, impl=impl, shift=0, class_weight=weights, z_loss=0.1)
    assert both(hidden, labels).isfinite()
    both.normalize_by(labels)
    with pytest.raises(flce.ArgumentError, match=r"num_valid_tokens is given with class_weight and z_loss=0\.1"):
        both(hidden, labels)
    over_ranks = flce.PipelineFusedLoss(head, impl="flce", shift=0, class_weight=weights)
    over_ranks.options["process_group"] = object()
    with pytest.raises(flce.ArgumentError, match="class_weight lies over process_group"):
        over_ranks.normalize_by(labels)


@pytest.mark.parametrize("options", [{"accumulate_into_grad": True, "impl": "pytorch"}])
def test_accumulating_needs_flce(options: dict[str, Any]) -> None:
    with pytest.raises(flce.ArgumentError, match="accumulate_into_grad needs impl 'flce'"):
        flce.PipelineFusedLoss(nn.Linear(8, 11), shift=1, **options)


def test_losses_take_the_same_arguments_in_the_same_order() -> None:
    own, other = (list(inspect.signature(kind).parameters.values()) for kind in (flce.PipelineFusedLoss, flce.LinearCrossEntropyLoss))
    positional = [name for name, kind in ((p.name, p.kind) for p in other) if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in own][: len(positional)] == positional
    head = nn.Linear(8, 11)
    for loss in (
        flce.PipelineFusedLoss(head, "pytorch", 3, shift=1),
        flce.PipelineFusedLoss(output_layer=head, chunk_size=3, impl="pytorch", shift=1),
    ):
        assert (loss.output_embeddings, loss.actual_impl, loss.chunk_size) == (head, "pytorch", 3)
    assert flce.PipelineFusedLoss(head, 3, shift=1).chunk_size == 3
    for unclear in ((3, 5), (True,)):
        with pytest.raises(flce.ArgumentError, match="which is taken for a chunk_size"):
            flce.PipelineFusedLoss(head, *unclear, shift=1)
    for given in ({}, {"output_embeddings": head, "output_layer": head}):
        with pytest.raises(flce.ArgumentError, match="output_embeddings is the layer whose loss this is"):
            flce.PipelineFusedLoss(**given, shift=1)
