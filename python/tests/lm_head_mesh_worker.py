"""Four ranks, under torchrun: a model that FSDP2 shards over two of them, whose FusedLMHead has its rows over the other two, trained beside
the same model on one. Exits with a failed assertion, or 0; rank 0 prints how many cases passed."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from rank_support import default_device, device, generator, run_main, run_named
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import flce

# A GPU has a vocabulary that does not divide, and 16-bit parameters: one more step's rounding is a thousandth of the loss there.
ON_GPU = device() != "cpu"
D, V, ROWS, LENGTH = (512, 32007, 16, 128) if ON_GPU else (32, 103, 8, 12)
DTYPE, TOLERANCE = (torch.bfloat16, 2e-2) if ON_GPU else (torch.float32, 1e-4)
STEPS = 100


class Model(nn.Module):
    """Predicts the next token of a sequence from the one at hand."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(V, D, dtype=DTYPE)
        self.body = nn.Linear(D, D, dtype=DTYPE)
        self.head = flce.FusedLMHead(D, V, bias=False, shift=1, dtype=DTYPE)

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.head(torch.tanh(self.body(self.table(tokens))), labels=tokens)
        return loss


def batch(step: int) -> Tensor:
    """Sequences that count upwards by one of a few strides: there is something to learn."""
    make = generator(step)
    first, stride = (torch.randint(low, high, (ROWS, 1), generator=make) for low, high in ((0, 64), (1, 4)))
    return (first + stride * torch.arange(LENGTH)) % 64


def over_the_mesh(model: Model) -> Any:
    """The model with its head's rows over "tp" and everything over "dp"."""
    mesh = init_device_mesh(default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    head = flce.FusedLMHead(D, V, bias=False, shift=1, dtype=DTYPE, process_group=mesh["tp"])
    head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach().clone(), mesh["tp"], [Shard(0)]))
    model.head = head
    for part in (model.body, model.head, model):
        fully_shard(part, mesh=mesh["dp"])
    return model


def trained(model: Any, rows: slice) -> list[float]:
    """The loss of every step on these rows of the batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(step)[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().float())
    return torch.stack(losses).tolist()


def both_ways() -> None:
    """A loss is the same on both ranks of "tp"; the mean over "dp" is that of the whole batch, since every row has as many tokens."""
    torch.manual_seed(2)
    whole = Model()
    model = over_the_mesh(copy.deepcopy(whole))
    expected = trained(whole, slice(None))
    half = dist.get_rank() // 2
    mine = torch.tensor(trained(model, slice(half * ROWS // 2, (half + 1) * ROWS // 2)))
    everyone = [torch.empty_like(mine) for _ in range(4)]
    dist.all_gather(everyone, mine)
    assert torch.equal(everyone[0], everyone[1]) and torch.equal(everyone[2], everyone[3])
    found = (everyone[0] + everyone[2]) / 2
    right = torch.tensor(expected)
    apart = ((found - right).abs() / right.clamp(min=0.1)).max().item()
    if dist.get_rank() == 0:
        print(f"loss {right[0]:.4f} to {right[-1]:.4f}; the mesh's at most {apart:.1e} apart", flush=True)
    assert right[-1] < 0.7 * right[0] and apart < TOLERANCE, (apart, found.tolist(), expected)
    weight: Any = model.head.weight
    assert isinstance(weight, DTensor) and weight.to_local().shape[0] < V // 2  # this rank has a quarter of the rows


if __name__ == "__main__":
    run_main(run_named, lambda: [(both_ways,)])
