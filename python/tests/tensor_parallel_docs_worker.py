"""One of two ranks, under torchrun: runs the pieces of docs/tensor-parallel.md, and of docs/python.md's section about it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_support import device, generator, run_main
from torch.distributed.device_mesh import init_device_mesh

import flce

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"


def pieces(page: str, section: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    if section:
        text = text.split(f"### {section}\n")[1].split("\n##")[0]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def run(page: str, section: str, count: int) -> None:
    found = pieces(page, section)
    assert len(found) == count, f"{page} has {len(found)} pieces"
    make = generator(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    table, hidden = torch.randn(64, 16, generator=make), torch.randn(24, 16, generator=make).requires_grad_()
    labels = torch.randint(0, 60, (24,), generator=make)
    shard = table.chunk(ranks)[rank].clone().requires_grad_()
    head = torch.nn.Linear(16, 64 // ranks, bias=False)
    names: dict[str, Any] = {
        **{"torch": torch, "flce": flce, "dist": dist, "group": dist.group.WORLD, "rank": rank, "ranks": ranks},
        **{"mesh": init_device_mesh(device(), (ranks,), mesh_dim_names=("tp",)), "table": table, "hidden": hidden, "labels": labels},
        **{"shard": shard, "padded_shard": shard, "vocab_size": 60, "head": head},
    }
    for piece in found:
        exec(piece, names)
    whole = table.clone().requires_grad_()
    flce.linear_cross_entropy(hidden.detach(), whole, labels).backward()
    if "main_grad" in names:
        assert whole.grad is not None
        torch.testing.assert_close(names["main_grad"], whole.grad.chunk(ranks)[rank])
    assert shard.grad is not None and hidden.grad is not None


if __name__ == "__main__":
    run_main(run, lambda: [("tensor-parallel.md", "", 6), ("python.md", "The vocabulary over ranks", 1)])
