"""A language model's step whose output layer lies over the ranks of a tensor-parallel group: sequence-parallel hidden states, an embedding
table that is also the output layer and lies over the ranks by rows, a few optimizer steps.

It trains twice, with flce's loss over the shards and with torch's own loss_parallel over DTensor logits, and prints each step's loss, time
and peak memory beyond what a rank holds between steps. It fails where the two losses differ.

    torchrun --nproc-per-node=8 examples/tensor_parallel.py                                  # GPUs, NCCL: 8192 x 4096 x 128256 in bf16
    torchrun --nproc-per-node=8 examples/tensor_parallel.py --shape 4096x2048x151936
    torchrun --nproc-per-node=2 examples/tensor_parallel.py --tiny                           # CPU, gloo: seconds

A shape is num_tokens x hidden_size x vocab_size, of all ranks together; numbers of tokens and classes are multiples of the ranks'.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measuring import MIB, peak, reset_peak
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

import flce

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 3e-3, torch.float32: 1e-4}  # allowed relative difference of a loss
# torch 2.13 has other names for these two, and warns of the old ones.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class Config:
    """Sizes, of all ranks together."""

    num_tokens: int
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    steps: int
    learning_rate: float = 4.0


# ── Model ─────────────────────────────────────────


def gathered(part: Tensor) -> Tensor:
    whole = part.new_empty(part.shape[0] * dist.get_world_size(), *part.shape[1:])
    all_gather(whole, part.contiguous())
    return whole


def scattered_sum(whole: Tensor) -> Tensor:
    part = whole.new_empty(whole.shape[0] // dist.get_world_size(), *whole.shape[1:])
    reduce_scatter(part, whole.contiguous())
    return part


class SumToParts(torch.autograd.Function):
    """Adds up all ranks' contributions for all tokens; each rank gets its tokens. Backward gathers."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor) -> Tensor:
        return scattered_sum(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gathered(gradients[0])


class GatherTokens(torch.autograd.Function):
    """All ranks' tokens. Backward adds up what the ranks have, and each gets its tokens' part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        return gathered(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return scattered_sum(gradients[0])


class Model(nn.Module):
    """An embedding over the ranks, a layer that each rank applies to its tokens, and the table once more as the output layer, which the
    loss applies."""

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        rows = config.vocab_size // ranks
        self.begin = rank * rows
        like: dict[str, Any] = {"dtype": config.dtype, "device": device}
        mine = torch.Generator(device).manual_seed(1 + rank)
        everyones = torch.Generator(device).manual_seed(0)
        self.table = nn.Parameter(torch.empty(rows, config.hidden_size, **like).normal_(std=0.02, generator=mine))
        self.norm = nn.RMSNorm(config.hidden_size, **like)
        self.mix = nn.Linear(config.hidden_size, config.hidden_size, bias=False, **like)
        nn.init.normal_(self.mix.weight, std=config.hidden_size**-0.5, generator=everyones)

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states [num_tokens / ranks, hidden_size] of this rank's tokens; `tokens` are all [num_tokens]."""
        rows = tokens - self.begin
        here = (rows >= 0) & (rows < self.table.shape[0])
        embedded = F.embedding(torch.where(here, rows, 0), self.table) * here[:, None]
        x: Tensor = SumToParts.apply(embedded)
        return self.norm(x + F.silu(self.mix(self.norm(x))))

    def replicated(self) -> list[nn.Parameter]:
        """Parameters that each rank has whole, and of whose gradients it has its tokens' part."""
        return [*self.norm.parameters(), *self.mix.parameters()]


# ── The two losses ──────────────────────────────────


def fused_step(model: Model, tokens: Tensor, labels: Tensor, mesh: DeviceMesh) -> Tensor:
    hidden = model(tokens)
    loss: Tensor = flce.linear_cross_entropy(hidden, model.table, labels, process_group=mesh, sequence_parallel=True)
    loss.backward()
    return loss


def dtensor_step(model: Model, tokens: Tensor, labels: Tensor, mesh: DeviceMesh) -> Tensor:
    hidden = GatherTokens.apply(model(tokens))
    logits = DTensor.from_local(F.linear(hidden, model.table).float(), mesh, [Shard(1)], run_check=False)
    with loss_parallel():
        loss: Any = F.cross_entropy(logits, labels)
        loss.backward()
    local: Tensor = loss.to_local() if isinstance(loss, DTensor) else loss
    return local


STEPS: dict[str, Callable[[Model, Tensor, Tensor, DeviceMesh], Tensor]] = {"loss_parallel": dtensor_step, "flce": fused_step}


# ── Training ────────────────────────────────────────


class Step(NamedTuple):
    """Results of one optimizer step; the slowest rank's time, the largest rise of memory."""

    loss: float
    seconds: float
    rise: float  # bytes, the peak above what was there before the step


def train(name: str, config: Config, mesh: DeviceMesh, device: torch.device) -> list[Step]:
    model = Model(config, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.learning_rate)
    text = torch.randint(0, config.vocab_size, (config.num_tokens + 1,), generator=torch.Generator().manual_seed(0)).to(device)
    tokens, labels = text[:-1], text[1:]
    done = []
    for _ in range(config.steps):
        before, began = reset_peak(device), time.perf_counter()
        loss = STEPS[name](model, tokens, labels, mesh)
        for parameter in model.replicated():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        rise = peak(device) - before  # waits for the device
        measured = torch.tensor([time.perf_counter() - began, rise], dtype=torch.float64, device=device)
        dist.all_reduce(measured, dist.ReduceOp.MAX)
        done.append(Step(loss.item(), *measured.tolist()))
    return done


def report(config: Config, results: dict[str, list[Step]], device: torch.device) -> None:
    sizes = f"{config.num_tokens} x {config.hidden_size} x {config.vocab_size}, {config.dtype}"
    print(f"{dist.get_world_size()} ranks on {device.type}, torch {torch.__version__}: {sizes}, tied embeddings, sequence parallel")
    print("the first step makes what later ones find: kernels, communicators, gradients")
    for i in range(config.steps):
        for name, steps in results.items():
            step = steps[i]
            numbers = f"loss {step.loss:.5f} {1e3 * step.seconds:9.1f} ms {step.rise / MIB:9.1f} MiB at the peak"
            print(f"step {i} {name:>14}: {numbers}")


def worst_difference(results: dict[str, list[Step]]) -> float:
    """The largest relative difference of the losses."""
    pairs = zip(*results.values(), strict=True)
    return max(abs(one.loss - other.loss) / max(abs(one.loss), 1e-6) for one, other in pairs)


def prepared(arguments: argparse.Namespace) -> tuple[Config, torch.device]:
    """Joins the other ranks."""
    if "RANK" not in os.environ:
        sys.exit(f"start it with torchrun: torchrun --nproc-per-node=2 {sys.argv[0]} --tiny")
    # NVLink multicast takes memory of its own on every GPU, and is not there in every container.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    local = int(os.environ["LOCAL_RANK"])
    if not arguments.tiny and torch.cuda.device_count() <= local:
        sys.exit(f"rank {os.environ['RANK']} has no GPU: {torch.cuda.device_count()} here; --tiny runs on the CPU")
    device = torch.device("cpu") if arguments.tiny else torch.device("cuda", local)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 2) // int(os.environ["WORLD_SIZE"])))
    dist.init_process_group("gloo" if arguments.tiny else "nccl", timeout=datetime.timedelta(minutes=5))
    shape = arguments.shape or ("2048x64x16384" if arguments.tiny else "8192x4096x128256")
    num_tokens, hidden_size, vocab_size = map(int, shape.split("x"))
    ranks = dist.get_world_size()
    if num_tokens % ranks or vocab_size % ranks:
        sys.exit(f"--shape is {shape}: {num_tokens} tokens and {vocab_size} classes must be multiples of the {ranks} ranks")
    dtype = DTYPES[arguments.dtype or ("fp32" if arguments.tiny else "bf16")]
    return Config(num_tokens, hidden_size, vocab_size, dtype, arguments.steps), device


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small, on the CPU over gloo")
    parser.add_argument("--shape", help="num_tokens x hidden_size x vocab_size: 8192x4096x128256, or 2048x64x16384 with --tiny")
    parser.add_argument("--dtype", choices=DTYPES, help="of parameters and hidden states: bf16, or fp32 with --tiny")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps")
    parser.add_argument("--only", choices=STEPS, help="train with one of the losses alone, where the other one's memory is not there")
    arguments = parser.parse_args()
    config, device = prepared(arguments)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    names = [arguments.only] if arguments.only else list(STEPS)
    results = {name: train(name, config, mesh, device) for name in names}
    if dist.get_rank() == 0:
        report(config, results, device)
    differs = worst_difference(results) if len(results) > 1 else 0.0
    flce.check_labels()
    dist.destroy_process_group()
    allowed = TOLERANCES[config.dtype]
    if int(os.environ["RANK"]) == 0:
        print(f"losses differ by {differs:.2g} at most, {allowed:.2g} allowed")
    return 0 if differs <= allowed else 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Not sys.exit: a thread of gloo's may still let go of a tensor while the interpreter ends, and torch 2.13 then calls std::terminate.
    os._exit(status)
