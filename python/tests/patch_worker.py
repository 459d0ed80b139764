"""Two ranks, under torchrun: a patched model of transformers that DDP or FSDP2 wraps. Exits with a failed assertion, or 0; rank 0 prints
how many cases passed."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from rank_support import generator, run_main
from test_huggingface import VOCAB_SIZE, tiny_model
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import flce


def wrapped(kind: str) -> None:
    own = tiny_model("gemma2").train()
    mine: Any = flce.patch(copy.deepcopy(own))
    tokens = torch.randint(0, VOCAB_SIZE, (4, 12), generator=generator(7))
    count = torch.tensor(tokens.numel())
    expected = own(input_ids=tokens, labels=tokens, num_items_in_batch=count).loss
    expected.backward()
    model = mine
    if kind == "ddp":
        model = DistributedDataParallel(mine)
    else:
        for layer in mine.model.layers:
            fully_shard(layer)
        if kind == "fsdp, embeddings and head apart":
            fully_shard([mine.model.embed_tokens, mine.lm_head])
        fully_shard(mine)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    part = tokens.chunk(ranks)[rank]
    for _ in range(2):
        model.zero_grad()
        outputs = model(input_ids=part, labels=part, num_items_in_batch=count)
        assert outputs.logits is None
        outputs.loss.backward()
    total = outputs.loss.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, expected.detach())
    for (name, parameter), right in zip(mine.named_parameters(), own.parameters(), strict=True):
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        torch.testing.assert_close(gradient * ranks, right.grad, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{kind}, {n}: {m}")


if __name__ == "__main__":
    run_main(wrapped, lambda: [(kind,) for kind in ("ddp", "fsdp", "fsdp, embeddings and head apart")])
