"""A GPTModel of megatron-core trained as Megatron-LM trains: DistributedDataParallel with overlapped reductions and fp32 main_grad, several
micro-batches a step, multi-token prediction if asked for. Twice from the same weights, as it comes and with flce.megatron.patch(model).
Prints each run's losses, time and peak memory beyond what it holds between steps, and fails where the losses differ.

    python examples/megatron_style.py --tiny                          # on the CPU: seconds
    python examples/megatron_style.py                                 # a GPU: 4 layers, 2 x 4 x 1024 tokens, 2048 x 151936, bf16
    python examples/megatron_style.py --shape 8x4096x128256 --batch 2 --sequence 4096 --depths 1
    torchrun --nproc-per-node=4 examples/megatron_style.py            # the vocabulary and all else over 4 tensor-parallel ranks

A shape is layers x hidden_size x vocab_size of a model with random weights; the data are random tokens. Needs megatron-core (0.16.1 is
tested), without Apex and Transformer Engine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from measuring import MIB, Run, peak, reset_peak, worst_difference
from torch import Tensor

import flce

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # warnings about Apex and Transformer Engine
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 1e-4}  # allowed relative difference of a loss


@dataclass
class MegatronRun(Run):
    accepted: list[float] = field(default_factory=list)  # for each depth, the share of tokens that its head got right


def start(tiny: bool) -> torch.device:
    """Process groups, all ranks tensor parallel."""
    if "WORLD_SIZE" not in os.environ:
        dist.init_process_group("gloo" if tiny else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("gloo" if tiny else "nccl")
    device = torch.device("cpu")
    if tiny:  # Megatron asks CUDA where to allocate, and for generators of dropout, of which there is none here
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
        tensor_parallel.get_cuda_rng_tracker().fork = lambda *_, **__: contextlib.nullcontext()
    else:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    if not tiny:
        tensor_parallel.model_parallel_cuda_manual_seed(1)
    return device


def make_model(arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Any:
    layers, hidden_size, vocab_size = arguments.sizes
    ranks = dist.get_world_size()
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden_size,
        num_attention_heads=max(hidden_size // 128, ranks),
        ffn_hidden_size=2 * hidden_size,
        tensor_model_parallel_size=ranks,
        mtp_num_layers=arguments.depths or None,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
    )
    spec = get_gpt_layer_local_spec()
    heads = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if arguments.depths else None
    torch.manual_seed(0)
    model = GPTModel(
        config,
        spec,
        vocab_size=-(-vocab_size // ranks) * ranks,  # padded, as Megatron does
        max_sequence_length=arguments.sequence,
        position_embedding_type="rope",
        mtp_block_spec=heads,
        share_embeddings_and_output_weights=not arguments.untied,
    )
    return model.to(device, dtype)


class Data:
    """Micro-batches of a few random tokens each, which a model learns to tell apart."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        shape = (arguments.batch, arguments.sequence + 1)
        make = torch.Generator().manual_seed(1)
        self.batches = []
        for _ in range(arguments.micro_batches):
            few = torch.randint(0, arguments.sizes[2], (arguments.batch, 8), generator=make)
            self.batches.append(few.gather(1, torch.randint(0, 8, shape, generator=make)).to(device))
        self.positions = torch.arange(arguments.sequence, device=device).expand(arguments.batch, -1)
        length = arguments.sequence
        self.attention_mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)
        self.loss_mask = torch.ones(arguments.batch, length, device=device)

    def loss(self, model: Any, tokens: Tensor) -> Tensor:
        losses = model(tokens[:, :-1], self.positions, self.attention_mask, labels=tokens[:, 1:].contiguous(), loss_mask=self.loss_mask)
        return (losses * self.loss_mask).sum() / self.loss_mask.sum() / len(self.batches)


def train(model: Any, arguments: argparse.Namespace, device: torch.device) -> MegatronRun:
    run, data = MegatronRun(), Data(arguments, device)
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
    ddp = DistributedDataParallel(config=model.config, ddp_config=settings, module=model)
    for _ in range(arguments.steps):
        held, begin = reset_peak(device), time.perf_counter()
        ddp.zero_grad_buffer()
        losses = []
        for i, tokens in enumerate(data.batches):
            with contextlib.nullcontext() if i + 1 == len(data.batches) else ddp.no_sync():
                loss = data.loss(ddp, tokens)
                loss.backward()
            losses.append(loss.detach())
            del loss
        ddp.finish_grad_sync()
        with torch.no_grad():
            for parameter in ddp.parameters():
                parameter -= arguments.rate * parameter.main_grad
        run.losses.append(float(torch.stack(losses).sum()))
        run.peaks.append(peak(device) - held)
        run.milliseconds.append(1e3 * (time.perf_counter() - begin))
    return run


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small, on the CPU")
    parser.add_argument("--shape", help="layers x hidden_size x vocab_size: 4x2048x151936, or 2x64x16384 with --tiny")
    parser.add_argument("--batch", type=int, help="sequences of a micro-batch: 4")
    parser.add_argument("--sequence", type=int, help="tokens of each: 1024, or 256 with --tiny")
    parser.add_argument("--micro-batches", type=int, default=2, help="of a step")
    parser.add_argument("--depths", type=int, default=0, help="heads of multi-token prediction")
    parser.add_argument("--untied", action="store_true", help="an output layer with a weight of its own")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps")
    parser.add_argument("--rate", type=float, default=0.5, help="learning rate of plain gradient descent")
    arguments = parser.parse_args()
    if not arguments.tiny and not torch.cuda.is_available():
        parser.error("there is no GPU here; --tiny runs on the CPU")
    shape = arguments.shape or ("2x64x16384" if arguments.tiny else "4x2048x151936")
    try:
        layers, hidden_size, vocab_size = map(int, shape.split("x"))
    except ValueError:
        parser.error(f"--shape is {shape}; it must be layers x hidden_size x vocab_size, such as 4x2048x151936")
    arguments.shape, arguments.sizes = shape, (layers, hidden_size, vocab_size)
    arguments.batch = arguments.batch or 4
    arguments.sequence = arguments.sequence or (256 if arguments.tiny else 1024)
    return arguments


def main() -> int:
    arguments = parsed()
    device = start(arguments.tiny)
    dtype = torch.float32 if arguments.tiny else torch.bfloat16
    runs, first = {}, dist.get_rank() == 0
    for name in ("as it comes", "flce"):
        model = make_model(arguments, device, dtype)
        if name == "flce":
            flce.megatron.patch(model, main_grad=True)
        runs[name] = train(model, arguments, device)
        if name == "flce" and arguments.depths:
            runs[name].accepted = [float(hits / max(counted, 1)) for hits, counted in flce.megatron.mtp_acceptance(model).tolist()]
        del model
    tokens = arguments.batch * arguments.sequence
    if first:
        where = f"{dist.get_world_size()} x {device.type}"
        print(f"{arguments.shape}, {arguments.micro_batches} x {tokens} tokens a step, {arguments.depths} MTP heads, {dtype}, on {where}")
    for name, run in runs.items():
        losses = " ".join(f"{loss:.5f}" for loss in run.losses)
        milliseconds, most = run.typical()
        accepted = "".join(f"   {100 * share:.1f} % accepted at depth {i + 1}" for i, share in enumerate(run.accepted))
        if first:
            print(f"{name:>12}: losses {losses}   {milliseconds:8.1f} ms a step   {most / MIB:8.1f} MiB at the peak{accepted}")
    flce.check_labels()
    worst = worst_difference(*(run.losses for run in runs.values()))
    if first:
        print(f"losses differ by {worst:.2g} at most, {TOLERANCES[dtype]:.2g} allowed", flush=True)
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return 0 if worst <= TOLERANCES[dtype] else 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a thread of gloo's may still let go of a tensor while the interpreter ends
