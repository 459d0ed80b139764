"""An output layer over several GPUs: a step of flce beside the GEMMs that it cannot do without, torch's loss_parallel and one GPU.

    torchrun --nproc-per-node=2 benchmarks/tensor_parallel.py [--shapes 8192x4096x128256 ...] [--rounds 12] [--out FILE.json]

bf16, a GPU a rank, NCCL without NVLink multicast. A shape is num_tokens x hidden_size x vocab_size of all ranks together; every rank has
all tokens and its rows of the weight. Contenders take turns in rounds, in an order drawn anew for each one. A run is --steps steps one
after another.

Before a run the GPU has nothing to do for --pause seconds. A run lasts a few milliseconds, and takes up to a fifth longer if the contender
before it has kept the GPU at its power limit. With --pause 0 the GPU is about as warm as in training; then leave `one GPU` and
`loss_parallel` out (--contenders), which change the figures of the contender after them.

A run begins behind 2 ms a step of other work on every GPU, as a model's other layers are, so that the host is ahead; and behind a small
reduction, so that the GPUs begin together: clocks differ, and so does the time that they have for the other work. A run's time is the
slowest rank's; the table has medians of a step in milliseconds, and what the host takes for a step in microseconds:

    floor6             three cuBLAS GEMMs on the shard, nothing else
    floor6, reduced    the same, with the all-reduce of grad_hidden under grad_weight's GEMM
    loss_parallel      F.cross_entropy of torch over DTensor logits in fp32
    flce, retained     forward and backward with everything retained (workspace_limit_bytes without a bound)
    flce               the same by default
    one GPU            flce with everything retained on the whole layer, each rank by itself
    flce, fp8          `flce, retained` with fp8=flce.Fp8(), on Hopper (asked for by --contenders alone)
    liger              liger-cute-kernels, if it and liger_kernel are installed (asked for by --contenders alone)

rate: the work of a GPU in its time, against the one GPU's: one GPU / ranks / contender. same_bits: whether loss, and grad_hidden, had the
same bits on every rank in every run. --timeline: the kernels of one more step of each flce contender, on rank 0, with their streams.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

import flce

SHAPES = ("8192x4096x128256", "4096x2048x151936", "3328x4096x128256", "4800x4096x128256")
CONTENDERS = ("floor6", "floor6, reduced", "loss_parallel", "flce, retained", "flce", "one GPU")
ASKED_FOR = ("flce, fp8", "liger")
ALL = 1 << 40
RETAINED: dict[str, Any] = {"workspace_limit_bytes": ALL, "retain_in_grad_weight": False}
BEHIND_CYCLES = 2_000_000  # 1 ms of the GPU's clock
BEHIND_STEP = 2 * BEHIND_CYCLES


class Layer:
    """Tensors that the contenders read, and the mesh of all ranks."""

    def __init__(self, shape: str, mesh: DeviceMesh) -> None:
        tokens, width, classes = map(int, shape.split("x"))
        self.mesh, self.ranks = mesh, dist.get_world_size()
        everyones = torch.Generator("cuda").manual_seed(0)
        like: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        self.hidden = torch.empty(tokens, width, **like).normal_(generator=everyones).requires_grad_()
        self.whole = torch.empty(classes, width, **like).normal_(std=width**-0.5, generator=everyones).requires_grad_()
        self.target = torch.randint(0, classes, (tokens,), device="cuda", generator=everyones)
        bounds = [classes * rank // self.ranks for rank in range(self.ranks + 1)]
        self.weight = self.whole.detach()[bounds[dist.get_rank()] : bounds[dist.get_rank() + 1]].clone().requires_grad_()
        self.first_class = bounds[dist.get_rank()]
        self.logits = torch.empty(tokens, len(self.weight), **like).normal_()

    def forget_gradients(self) -> None:
        self.hidden.grad = self.weight.grad = self.whole.grad = None

    def floor(self) -> None:
        hidden, weight = self.hidden.detach(), self.weight.detach()
        hidden @ weight.t()
        self.logits @ weight
        self.logits.t() @ hidden

    def reduced_floor(self) -> None:
        hidden, weight = self.hidden.detach(), self.weight.detach()
        hidden @ weight.t()
        work = dist.all_reduce(self.logits @ weight, async_op=True)
        self.logits.t() @ hidden
        work.wait()

    def loss_parallel(self) -> Tensor:
        logits = DTensor.from_local(F.linear(self.hidden, self.weight).float(), self.mesh, [Shard(1)], run_check=False)
        with loss_parallel():
            loss: Any = F.cross_entropy(logits, self.target)
            loss.backward()
        dist.all_reduce(self.hidden.grad)
        return loss.to_local() if isinstance(loss, DTensor) else loss

    def fused(self, **options: Any) -> Tensor:
        loss: Tensor = flce.linear_cross_entropy(self.hidden, self.weight, self.target, process_group=self.mesh, **options)
        loss.backward()
        return loss

    def alone(self) -> Tensor:
        loss: Tensor = flce.linear_cross_entropy(self.hidden, self.whole, self.target, **RETAINED)
        loss.backward()
        return loss

    def liger(self) -> Tensor:
        from liger_kernel.ops.cute import fused_linear_scaled_cross_entropy_tp as native

        function = native.LigerFusedLinearScaledCrossEntropyNativeTPFunction
        losses: Tensor = function.apply(self.hidden, self.weight, self.target, self.first_class, 1.0, -100, 1, False, dist.group.WORLD)
        loss = losses.mean()
        loss.backward()
        return loss

    def contenders(self) -> dict[str, Callable[[], Tensor | None]]:
        return {
            "floor6": self.floor,
            "floor6, reduced": self.reduced_floor,
            "loss_parallel": self.loss_parallel,
            "flce, retained": lambda: self.fused(**RETAINED),
            "flce": self.fused,
            "flce, fp8": lambda: self.fused(fp8=flce.Fp8(), **RETAINED),
            "one GPU": self.alone,
            "liger": self.liger,
        }


def prepare_liger(shapes: list[str]) -> None:
    """Liger's pool, for the largest of all shapes. Its shards are equally large."""
    from liger_cute_kernels import FusedLinearCrossEntropyConfig, configure

    tokens, width, classes = (max(sizes) for sizes in zip(*(map(int, shape.split("x")) for shape in shapes), strict=True))
    sizes = {"max_tokens": tokens, "hidden_size": width, "local_vocab_size": classes // dist.get_world_size()}
    configure(
        bootstrap_group=dist.group.WORLD,
        device=torch.device("cuda", torch.cuda.current_device()),
        flsce=FusedLinearCrossEntropyConfig(**sizes),
    )


class Run(NamedTuple):
    milliseconds: float  # a step's, on the slowest rank
    host_microseconds: float  # a step's, on the slowest host
    peak: int  # bytes of this rank above its inputs
    loss: Tensor | None  # the last step's


def timed(layer: Layer, step: Callable[[], Tensor | None], steps: int, pause_seconds: float) -> Run:
    layer.forget_gradients()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    time.sleep(pause_seconds)
    dist.barrier()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(BEHIND_STEP * steps)
    dist.all_reduce(torch.ones(1, device="cuda"))
    began = time.perf_counter()
    begin.record()
    for _ in range(steps):
        layer.forget_gradients()
        loss = step()
    end.record()
    host = 1e6 * (time.perf_counter() - began) / steps
    end.synchronize()
    slowest = torch.tensor((begin.elapsed_time(end) / steps, host), dtype=torch.float64, device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return Run(*slowest.tolist(), torch.cuda.max_memory_allocated() - before, None if loss is None else loss.detach())


def of_all_ranks(tensor: Tensor) -> bool:
    """Whether every rank has the same bits."""
    bits = tensor.detach().float().contiguous().view(torch.int32).long()
    sums = torch.stack([bits.sum(), (bits.flatten() * torch.arange(bits.numel(), device="cuda")).sum()])
    others = [torch.empty_like(sums) for _ in range(dist.get_world_size())]
    dist.all_gather(others, sums)
    return all(torch.equal(other, sums) for other in others)


def timeline(layer: Layer, run: Callable[[], Tensor | None]) -> list[dict[str, Any]]:
    """The kernels and copies of a step on this rank, in the order of their beginnings, in microseconds from the first one's."""
    layer.forget_gradients()
    dist.barrier()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.cuda._sleep(10 * BEHIND_CYCLES)  # the profiler slows the host down
        run()
        torch.cuda.synchronize()
    on_gpu = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    on_gpu = sorted((event for event in on_gpu if "spin_kernel" not in event.name), key=lambda event: event.time_range.start)
    start = on_gpu[0].time_range.start if on_gpu else 0
    return [
        {
            "name": event.name[:80],
            "begin": round(event.time_range.start - start, 1),
            "end": round(event.time_range.end - start, 1),
            "stream": event.device_resource_id,
        }
        for event in on_gpu
    ]


def measured(layer: Layer, names: list[str], rounds: int, steps: int, pause_seconds: float) -> dict[str, Any]:
    runs = {name: run for name, run in layer.contenders().items() if name in names}
    times: dict[str, list[float]] = {}
    hosts: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    losses: dict[str, float] = {}
    same: dict[str, bool] = {}
    for number in range(-2, rounds):
        order = list(runs)
        random.Random(number).shuffle(order)
        for name in order:
            milliseconds, host, peak, loss = timed(layer, runs[name], steps, pause_seconds)
            if number >= 0:
                times.setdefault(name, []).append(milliseconds)
                hosts.setdefault(name, []).append(host)
                peaks[name] = max(peak, peaks.get(name, 0))
            if loss is not None:
                losses[name] = loss.item()
                if name != "one GPU":
                    same[name] = same.get(name, True) and of_all_ranks(loss) and of_all_ranks(layer.hidden.grad)
    medians = {name: statistics.median(values) for name, values in times.items()}

    def to(other: str, name: str) -> float | None:
        return medians[name] / medians[other] if other in medians else None

    return {
        name: {
            "milliseconds": medians[name],
            "range": [min(times[name]), max(times[name])],
            "to_floor6": to("floor6", name),
            "to_reduced_floor6": to("floor6, reduced", name),
            "host_microseconds": statistics.median(hosts[name]),
            "rate": medians["one GPU"] / layer.ranks / medians[name] if "one GPU" in medians else None,
            "peak_bytes": peaks[name],
            "loss": losses.get(name),
            "same_bits": same.get(name),
        }
        for name in runs
    }


def show(shape: str, found: dict[str, Any], gpus: str) -> None:
    def ratio(value: float | None) -> str:
        return "    -" if value is None else f"{value:5.3f}"

    print(f"{shape}, {gpus}", flush=True)
    for name, row in found.items():
        figures = f"{row['milliseconds']:9.2f} ms  {ratio(row['to_floor6'])} of floor6  {ratio(row['to_reduced_floor6'])} of it reduced"
        more = f"rate {ratio(row['rate'])}  host {row['host_microseconds']:5.0f} us"
        more += f"  {row['peak_bytes'] / 2**20:6.0f} MiB  same bits {row['same_bits']}"
        print(f"  {name:18}{figures}  {more}", flush=True)


def provenance(commit: str | None) -> dict[str, Any]:
    def output(*command: str) -> str:
        found = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
        return found.stdout.strip().split("\n")[0]

    return {
        "gpu": torch.cuda.get_device_name(),
        "ranks": dist.get_world_size(),
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "commit": commit or output("git", "rev-parse", "--short", "HEAD"),
        "date": datetime.date.today().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="num_tokens x hidden_size x vocab_size, of all ranks together")
    parser.add_argument(
        "--contenders",
        nargs="+",
        default=CONTENDERS,
        choices=(*CONTENDERS, *ASKED_FOR),
        metavar="NAME",
        help=f"names of the list above, such as 'flce, retained' (default: all but {' and '.join(ASKED_FOR)})",
    )
    parser.add_argument("--rounds", type=int, default=12, help="that are measured, after two that are not (default: 12)")
    parser.add_argument("--steps", type=int, default=4, help="one after another in a run (default: 4)")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds before a run (default: 0.1)")
    parser.add_argument("--one-thread", action="store_true", help="run backward on the caller's thread, not on one of autograd's")
    parser.add_argument("--timeline", action="store_true", help="the kernels of a step of each flce contender, in --out's file")
    parser.add_argument("--commit", help="of what is measured (default: git's)")
    parser.add_argument("--out", type=Path, help="a file for the figures as JSON")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, with a GPU for every rank")
    if torch.cuda.device_count() <= int(os.environ["LOCAL_RANK"]):
        parser.error(f"rank {os.environ['RANK']} finds {torch.cuda.device_count()} GPUs; each rank takes one of its own")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=datetime.timedelta(seconds=120))
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    torch.autograd.set_multithreading_enabled(not options.one_thread)
    asked = {"rounds": options.rounds, "steps": options.steps, "pause_seconds": options.pause, "one_thread": options.one_thread}
    report: dict[str, Any] = provenance(options.commit) | asked | {"shapes": {}}
    if "liger" in options.contenders:
        prepare_liger(options.shapes)
    for shape in options.shapes:
        layer = Layer(shape, mesh)
        found = report["shapes"][shape] = measured(layer, options.contenders, options.rounds, options.steps, options.pause)
        if options.timeline:
            for name in sorted({"flce", "flce, retained", "flce, fp8"} & found.keys()):
                found[name]["timeline"] = timeline(layer, layer.contenders()[name])
        if dist.get_rank() == 0:
            show(shape, found, f"{report['ranks']} x {report['gpu']}")
            if options.out is not None:
                options.out.write_text(json.dumps(report, indent=1) + "\n")
        del layer
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
