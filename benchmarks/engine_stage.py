"""A pipeline's training step at a model's shape, with flce on the last stage and with materialised logits.

    python3 benchmarks/engine_stage.py [--stages 2] [--microbatches 4] [--tokens 4096] [--steps 5] [--out FILE.json]

The default shape is Qwen3-1.7B's: its weights are random, made stage by stage by `causal_lm_stage` from a config. Every stage is a process;
where there are fewer GPUs than stages they share them over gloo, and without a GPU they run on CPUs. A microbatch has sequences of several
lengths, others in every step. Contenders, one after the other with an engine of its own:

    flce     loss_fn is output.cross_entropy(labels, shift=1)
    logits   loss_fn is F.cross_entropy on output.logits() in fp32, as a loss function written for tensors has it

Prints JSON. For each contender: step_seconds (median over steps, and the least), loss, and for each stage compute_seconds (its forwards and
backwards of one batch, with no other stage at work), peak_bytes (in training steps, all of it), resident_bytes (of parameters and optimizer
state between steps) and working_bytes (the difference, gradients included). On CPUs bytes are of the process's resident set.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import flce
from flce.engine import HeadOutput, PackedBatch, PipelineEngine, causal_lm_stage

CONTENDERS = ("flce", "logits")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shape = parser.add_argument_group("shape (default: Qwen3-1.7B's)")
    shape.add_argument("--hidden-size", type=int, default=2048)
    shape.add_argument("--intermediate-size", type=int, default=6144)
    shape.add_argument("--layers", type=int, default=28)
    shape.add_argument("--heads", type=int, default=16)
    shape.add_argument("--key-heads", type=int, default=8)
    shape.add_argument("--head-dim", type=int, default=128)
    shape.add_argument("--vocab-size", type=int, default=151936)
    shape.add_argument("--untied", action="store_true", help="an output layer of its own (Qwen3-1.7B ties it to the embedding)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--stages", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--schedule", choices=("1f1b", "gpipe"), default="1f1b")
    parser.add_argument("--microbatches", type=int, default=4, help="of a batch (default: 4)")
    parser.add_argument("--tokens", type=int, default=4096, help="of a microbatch (default: 4096)")
    parser.add_argument("--sequences", type=int, default=4, help="of a microbatch (default: 4)")
    parser.add_argument("--steps", type=int, default=5, help="that are measured, after two that are not (default: 5)")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--memory-limit-bytes", type=int, help="flce's, for all microbatches in flight together (default: none)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--out", type=Path, help="a file for the JSON, beside standard output")
    return parser.parse_args()


def by_flce(output: HeadOutput, packed_input_ids: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, None]:
    return output.cross_entropy(packed_input_ids, shift=1), None


def by_logits(output: HeadOutput, packed_input_ids: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, None]:
    targets = flce.shift_labels(packed_input_ids, 1, cu_seqlens=cu_seqlens)
    return F.cross_entropy(output.logits().float(), targets), None


LOSSES: dict[str, Callable[..., tuple[Tensor, None]]] = {"flce": by_flce, "logits": by_logits}


def batch(options: argparse.Namespace, step: int) -> tuple[Tensor, Tensor]:
    """Ids and cu_seqlens of microbatches · tokens tokens; a sequence has between half and three halves of the mean length."""
    generator = torch.Generator().manual_seed(step)
    lengths: list[int] = []
    for _ in range(options.microbatches):
        shares = torch.rand(options.sequences, generator=generator) + 0.5
        ends = (shares.cumsum(0) / shares.sum() * options.tokens).long().tolist()
        lengths += [max(1, end - start) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    ids = torch.randint(0, options.vocab_size, (sum(lengths),), generator=generator)
    return ids, F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


class Memory:
    """Bytes of this process: of the device, or resident ones where it computes on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def reset(self) -> int:
        """Begins a peak. Returns what is held now."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            return torch.cuda.memory_allocated(self.device)
        Path("/proc/self/clear_refs").write_text("5")
        return self._resident("VmRSS")

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else self._resident("VmHWM")

    @staticmethod
    def _resident(field: str) -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compute_seconds(engine: PipelineEngine, options: argparse.Namespace, loss_fn: Callable[..., Any]) -> float:
    """Forwards and backwards of this stage on a batch's microbatches, one after another, on input of its own."""
    (stage,) = engine.stages
    ids, cu_seqlens = batch(options, 0)
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
    size = options.sequences
    seconds = []
    for turn in range(3):
        synchronise(engine.device)
        start = time.perf_counter()
        for number in range(options.microbatches):
            own = lengths[number * size : (number + 1) * size]
            first = int(cu_seqlens[number * size])
            tokens = ids[first : first + sum(own)].to(engine.device)
            packed = PackedBatch.of(own, engine.device)
            given = tokens
            if not stage.is_first:
                given = torch.randn(len(tokens), stage.hidden_size, dtype=stage.dtype, device=engine.device, requires_grad=True)
            hidden = stage(given, packed)
            if stage.is_last:
                loss, _ = loss_fn(HeadOutput.of(stage, hidden, packed.cu_seqlens), tokens, packed.cu_seqlens)
                loss.backward()
            else:
                hidden.backward(torch.ones_like(hidden))
        synchronise(engine.device)
        if turn:
            seconds.append(time.perf_counter() - start)
        for parameter in stage.parameters():
            parameter.grad = None
    return min(seconds)


def alone(engine: PipelineEngine, options: argparse.Namespace, loss_fn: Callable[..., Any]) -> float:
    """`compute_seconds` of one rank after the other."""
    found = 0.0
    for rank in range(dist.get_world_size()):
        dist.barrier()
        if rank == dist.get_rank():
            found = compute_seconds(engine, options, loss_fn)
    dist.barrier()
    return found


def measure(options: argparse.Namespace, contender: str, config: Any, device: torch.device) -> dict[str, Any]:
    dtype = getattr(torch, options.dtype)
    stage = causal_lm_stage(config, dist.get_rank(), options.stages, dtype=dtype, device=device)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-6)
    limit = options.memory_limit_bytes if contender == "flce" else None
    engine = PipelineEngine(
        stage, None, optimizer, schedule=options.schedule, memory_limit_bytes=limit, num_micro_batches=options.microbatches
    )
    loss_fn, memory = LOSSES[contender], Memory(device)
    compute = alone(engine, options, loss_fn)
    seconds, loss, resident = [], 0.0, 0
    for step in range(-2, options.steps):
        if step == 0:
            resident = memory.reset()
        dist.barrier()
        start = time.perf_counter()
        result = engine.train_batch(*batch(options, step + 2), loss_fn)
        synchronise(device)
        dist.barrier()
        if step >= 0:
            seconds.append(time.perf_counter() - start)
        loss = float(result[0]) if result is not None else 0.0
        if dist.get_rank() == 0:
            print(f"{contender}: step {step + 3} of {options.steps + 2}", file=sys.stderr, flush=True)
    peak = memory.peak()
    own = {"stage": stage.stage, "parameters": sum(p.numel() for p in stage.parameters()), "compute_seconds": compute}
    own |= {"peak_bytes": peak, "resident_bytes": resident, "working_bytes": peak - resident, "loss": loss}
    told: list[Any] = [None] * options.stages
    dist.all_gather_object(told, own)
    last = told[-1]["loss"]
    for one in told:
        del one["loss"]
    return {"step_seconds": statistics.median(seconds), "least_step_seconds": min(seconds), "loss": last, "stages": told}


def run_rank(options: argparse.Namespace) -> None:
    from transformers import Qwen3Config

    rank, gpus = int(os.environ["RANK"]), torch.cuda.device_count()
    on_gpu = options.device == "cuda" or (options.device == "auto" and gpus > 0)
    device = torch.device("cuda", rank % gpus) if on_gpu else torch.device("cpu")
    backend = "nccl" if on_gpu and gpus >= options.stages else "gloo"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=600))
    config = Qwen3Config(
        vocab_size=options.vocab_size,
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.key_heads,
        head_dim=options.head_dim,
        tie_word_embeddings=not options.untied,
        max_position_embeddings=max(40960, 2 * options.tokens),
    )
    found: dict[str, Any] = {}
    for contender in options.contenders:
        found[contender] = measure(options, contender, config, device)
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    if rank == 0:
        name = torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads a process"
        shape = {key: value for key, value in vars(options).items() if key not in ("out", "device", "contenders")}
        report = {"device": name, "gpus": min(gpus, options.stages) if on_gpu else 0, "backend": backend, "torch": torch.__version__}
        text = json.dumps(report | {"options": shape, "contenders": found}, indent=2)
        print(text, flush=True)
        if options.out is not None:
            options.out.write_text(text + "\n")
    dist.destroy_process_group()


def main() -> int:
    options = parsed()
    if "RANK" in os.environ:
        run_rank(options)
        return 0
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.stages}"]
    return subprocess.run([*launcher, __file__, *sys.argv[1:]], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
