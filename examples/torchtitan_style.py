"""torchtitan's training step with three losses: whole logits (CrossEntropyLoss), chunks of them (ChunkedLossWrapper, its default) and none
(flce.torchtitan.FusedLoss). Decoder, FSDP2 units, token counts and calls are its Trainer's, from the same weights; each run's losses, time
and peak memory beyond what it holds between steps. It fails where the losses differ.

    python examples/torchtitan_style.py --tiny                                     # on the CPU: seconds
    python examples/torchtitan_style.py                                            # a GPU: 4 layers, 2 x 4096 tokens, 4096 x 128256, bf16
    python examples/torchtitan_style.py --shape 4x2048x151936 --batch 4 --sequence 1024

A shape is layers x hidden_size x vocab_size; weights and data are random. Needs torchtitan. With its own Trainer none of this is written:

    python -m torchtitan.train --module llama3 --config llama3_8b --override.imports flce.torchtitan.fused_loss
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from measuring import MIB, Run, peak, reset_peak, sizes_of, worst_difference
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.distributed.utils import set_spmd_backend

import flce
from flce.torchtitan import FusedLoss

TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 1e-4}  # allowed relative difference of a loss
LOSSES: dict[str, Any] = {"CrossEntropyLoss": CrossEntropyLoss, "ChunkedLossWrapper": ChunkedLossWrapper, "FusedLoss": FusedLoss}


class Decoder(nn.Module):
    """Named as torchtitan's: with `_skip_lm_head` it returns hidden states, and the loss has the output layer."""

    _skip_lm_head = False

    def __init__(self, layers: int, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, hidden_size)
        heads = max(hidden_size // 128, 1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(hidden_size, heads, 2 * hidden_size, 0.0, batch_first=True, norm_first=True, bias=False)
            for _ in range(layers)
        )
        self.norm = nn.RMSNorm(hidden_size)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        nn.init.normal_(self.lm_head.weight, std=hidden_size**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tok_embeddings(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device, dtype=hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        hidden = self.norm(hidden)
        return hidden if self._skip_lm_head else self.lm_head(hidden)


def sharded(model: Decoder, device: torch.device, dtype: torch.dtype) -> Decoder:
    """FSDP2 in torchtitan's units, of which norm and output layer are one; gradients are sums."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    settings: dict[str, Any] = {"mesh": init_device_mesh(device.type, (1,)), "mp_policy": policy}
    model.to(device)
    fully_shard(model.tok_embeddings, **settings)
    fully_shard([model.norm, model.lm_head], **settings, reshard_after_forward=False)
    for layer in model.layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    return model


def train(model: Decoder, loss_fn: Any, arguments: argparse.Namespace, device: torch.device) -> Run:
    run = Run()
    if isinstance(loss_fn, ChunkedLossWrapper):
        loss_fn.set_lm_head(model.lm_head)
        model._skip_lm_head = True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make = torch.Generator().manual_seed(1)
    vocab_size, shape = model.tok_embeddings.num_embeddings, (arguments.batch, arguments.sequence + 1)
    for _ in range(arguments.steps):
        tokens = torch.randint(0, min(vocab_size, 64), shape, generator=make)  # few, which a model learns to tell apart
        labels = tokens[:, 1:].clone()
        labels[:, : arguments.sequence // 8] = -100  # a prompt
        count = (labels != -100).sum().to(device)
        inputs, labels = tokens[:, :-1].to(device), labels.to(device)
        optimizer.zero_grad()
        held, begin = reset_peak(device), time.perf_counter()
        loss, _ = loss_fn(model(inputs), labels, count)
        loss.backward()
        run.peaks.append(peak(device) - held)
        run.milliseconds.append(1e3 * (time.perf_counter() - begin))
        run.losses.append(loss.item())
        optimizer.step()
    return run


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small, on the CPU")
    parser.add_argument("--shape", help="layers x hidden_size x vocab_size: 4x4096x128256, or 2x64x16384 with --tiny")
    parser.add_argument("--batch", type=int, help="sequences a step: 2, or 4 with --tiny")
    parser.add_argument("--sequence", type=int, help="tokens of each: 4096, or 256 with --tiny")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps")
    parser.add_argument("--only", choices=LOSSES, help="train with one of the losses alone, where the others' memory is not there")
    arguments = parser.parse_args()
    if not arguments.tiny and not torch.cuda.is_available():
        parser.error("there is no GPU here; --tiny runs on the CPU")
    arguments.shape = arguments.shape or ("2x64x16384" if arguments.tiny else "4x4096x128256")
    arguments.batch = arguments.batch or (4 if arguments.tiny else 2)
    arguments.sequence = arguments.sequence or (256 if arguments.tiny else 4096)
    return arguments


def main() -> int:
    arguments = parsed()
    layers, hidden_size, vocab_size = sizes_of(arguments.shape, "4x4096x128256")
    device = torch.device("cpu" if arguments.tiny else "cuda")
    dtype = torch.float32 if arguments.tiny else torch.bfloat16
    dist.init_process_group("gloo" if arguments.tiny else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    set_spmd_backend("partial_dtensor")
    torch.manual_seed(0)
    stock = Decoder(layers, hidden_size, vocab_size)
    runs = {}
    for name in [arguments.only] if arguments.only else LOSSES:
        model = sharded(copy.deepcopy(stock), device, dtype)
        try:
            runs[name] = train(model, LOSSES[name].Config().build(), arguments, device)
        except RuntimeError as error:
            if name != "ChunkedLossWrapper":
                raise
            print(f"{name} failed with torch {torch.__version__}: {str(error).splitlines()[0]}")  # it is made for torch's nightly builds
        del model
    tokens = arguments.batch * arguments.sequence
    print(f"{arguments.shape}, {tokens} tokens a step, {dtype}, on {device.type}")
    for name, run in runs.items():
        text = " ".join(f"{loss:.5f}" for loss in run.losses)
        milliseconds, most = run.typical()
        print(f"{name:>18}: losses {text}   {milliseconds:8.1f} ms a step   {most / MIB:8.1f} MiB at the peak")
    flce.check_labels()
    worst = 0.0
    if not arguments.only:
        worst = worst_difference(runs["CrossEntropyLoss"].losses, runs["FusedLoss"].losses)
        print(f"losses differ by {worst:.2g} at most, {TOLERANCES[dtype]:.2g} allowed")
    dist.destroy_process_group()
    return 0 if worst <= TOLERANCES[dtype] else 1


if __name__ == "__main__":
    sys.exit(main())
