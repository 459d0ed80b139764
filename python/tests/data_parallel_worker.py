"""Two ranks, under torchrun: the loss outside a model that DDP or FSDP2 wraps; its head's gradient goes through their hooks like every
other."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from pipeline_worker import batch, build, unpipelined
from rank_support import run_main
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import flce


def wrap(kind: str, model: nn.Module) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    policy: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if kind == "fsdp bf16" else {}
    fully_shard(model.layer, **policy)
    return fully_shard(model, **policy)


def run(kind: str, impl: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = build(1, tied=False)
    tokens, labels = batch()
    mine = slice(rank * len(tokens) // world, (rank + 1) * len(tokens) // world)
    expected_model = copy.deepcopy(whole)
    expected, _ = unpipelined(expected_model, tokens, labels)
    expected.backward()

    model: Any = whole[0]
    wrapped = wrap(kind, model)
    keys = list(wrapped.state_dict())
    loss_fn = flce.PipelineFusedLoss(model.head, impl=impl, shift=1)
    loss_fn.normalize_by(labels)
    for _ in range(2):  # the second step meets what the first one left
        wrapped.zero_grad()
        loss = loss_fn(wrapped(tokens[mine]), labels[mine])
        loss.backward()
    assert list(wrapped.state_dict()) == keys, kind
    total = loss.detach().clone()
    dist.all_reduce(total)
    tolerance: dict[str, float] = {"rtol": 2e-2, "atol": 1e-3} if kind == "fsdp bf16" else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(total, expected.detach(), **tolerance)
    for (name, parameter), right in zip(model.named_parameters(), expected_model.parameters(), strict=True):
        gradient: Tensor = parameter.grad if kind == "ddp" else parameter.grad.full_tensor()
        # Both average over ranks; the loss is normalised by the labels of all of them already.
        # type: ignore[misc]
        torch.testing.assert_close(gradient * world, right.grad, msg=lambda m, n=name: f"{kind}, {impl}: {n}: {m}", **tolerance)


def cases() -> list[tuple[str, str]]:
    # torch 2.6 has FSDP2 on GPUs only.
    kinds = ("ddp", "fsdp", "fsdp bf16") if hasattr(torch.cpu.Stream(), "record_event") else ("ddp",)
    return [(kind, impl) for kind in kinds for impl in ("flce", "pytorch")]


if __name__ == "__main__":
    run_main(run, cases)
