"""Two ranks, under torchrun: a FusedLMHead inside a model that DDP or FSDP2 wraps, or whose rows lie over the ranks; and what is refused
outside the forward. Exits with a failed assertion, or 0; rank 0 prints how many cases passed."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from rank_support import default_device, generator, run_main, run_named
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import flce

D, V, ROWS = 32, 102, 4


class Model(nn.Module):
    """Logits, or with labels the loss."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.body = nn.Linear(D, D)
        self.head = flce.FusedLMHead(D, V, bias=False, shift=1, **options)

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Any:
        return self.head(torch.tanh(self.body(hidden)), labels=labels)


def batch() -> tuple[Tensor, Tensor]:
    make = generator(3)
    labels = torch.randint(0, V, (ROWS, 9), generator=make)
    labels[2, 3:] = -100
    return torch.randn(ROWS, 9, D, generator=make), labels


def whole_model(**options: Any) -> Model:
    torch.manual_seed(2)
    return Model(**options)


def wrapped(kind: str) -> None:
    """A sum over tokens, so that ranks' losses add up to the whole batch's."""
    expected_model = whole_model(reduction="sum")
    hidden, labels = batch()
    expected = expected_model(hidden, labels)
    expected.backward()
    model: Any = copy.deepcopy(expected_model)
    model.zero_grad()
    keys = list(model.state_dict())
    inside = model
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        policy: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if kind == "fsdp bf16" else {}
        if kind == "fsdp head":
            fully_shard(model.head)
        fully_shard(model, **policy)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    tolerance: dict[str, float] = {"rtol": 3e-2, "atol": 0.2} if kind == "fsdp bf16" else {"rtol": 1e-4, "atol": 1e-5}
    for _ in range(2):  # the second step meets what the first one left
        model.zero_grad()
        loss = model(hidden[mine], labels[mine])
        loss.backward()
    total = loss.detach().float()
    dist.all_reduce(total)
    torch.testing.assert_close(total, expected.detach(), **tolerance)
    assert list(inside.state_dict()) == keys
    for parameter, right in zip(inside.parameters(), expected_model.parameters(), strict=True):
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        torch.testing.assert_close(gradient * ranks, right.grad, **tolerance)  # both wrappers average
    torch.testing.assert_close(model(hidden[mine]).float(), expected_model(hidden[mine]), **tolerance)


def outside_of_the_forward() -> None:
    """A head that FSDP2 has sharded with its model, called by itself: refused, never read as it lies."""
    model: Any = fully_shard(whole_model())
    hidden, labels = batch()
    model(hidden, labels).backward()  # a first forward, which sets FSDP2 up
    for given in (None, labels):
        try:
            model.head.forward(hidden, labels=given)
        except flce.PlacementError as error:
            assert "weight is a DTensor" in str(error), error
        else:
            raise AssertionError("a sharded weight was taken")


def rows_over_ranks(kind: str) -> None:
    """Tensor parallel: every rank has the batch, and its rows of the weight."""
    expected_model = whole_model()
    hidden, labels = batch()
    expected = expected_model(hidden, labels)
    expected.backward()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(default_device().type, (ranks,), mesh_dim_names=("tp",))
    model: Any = copy.deepcopy(expected_model)
    model.zero_grad()
    rows = expected_model.head.weight.detach().chunk(ranks)[rank].clone()
    options: dict[str, Any] = {"process_group": mesh}
    head = flce.FusedLMHead(D, V if kind == "DTensor" else rows.shape[0], bias=False, shift=1, **options)
    weight = distribute_tensor(expected_model.head.weight.detach().clone(), mesh, [Shard(0)]) if kind == "DTensor" else rows
    head.weight = nn.Parameter(weight)
    model.head = head
    loss = model(hidden, labels)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    gradient = model.head.weight.grad
    got = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    right = expected_model.head.weight.grad
    assert right is not None
    torch.testing.assert_close(got, right if kind == "DTensor" else right.chunk(ranks)[rank], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(model.body.weight.grad, expected_model.body.weight.grad, rtol=1e-4, atol=1e-6)


def ranks_that_differ() -> None:
    """Rows that leave a gap are refused on every rank."""
    hidden, labels = batch()
    head = flce.FusedLMHead(D, 40, bias=False, process_group=dist.group.WORLD, vocab_start=60 * dist.get_rank(), shift=1)
    try:
        head(hidden, labels=labels)
    except flce.PlacementError as error:
        assert "leave a gap" in str(error), error
    else:
        raise AssertionError("a gap was not refused")


CASES: list[tuple[Any, ...]] = [
    *((wrapped, kind) for kind in ("ddp", "fsdp", "fsdp head", "fsdp bf16")),
    (outside_of_the_forward,),
    *((rows_over_ranks, kind) for kind in ("plain", "DTensor")),
    (ranks_that_differ,),
]


if __name__ == "__main__":
    run_main(run_named, lambda: CASES)
