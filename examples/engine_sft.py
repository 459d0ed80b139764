"""Supervised fine-tuning in pipeline stages, a process each: the same steps with a loss function that was written for logits and with the
fused one of examples/engine/sft_interface.py, both with each step's loss and the last stage's peak memory. It fails where losses differ.

    python examples/engine_sft.py                      # CPU, or GPUs where there are any: half a minute
    python examples/engine_sft.py --tiny               # for tests: seconds
    python examples/engine_sft.py --shape 28x2048x151936 --dtype bf16 --length 4096 --sequences 16    # a real one, on GPUs

The model is a Llama of random weights, the text this project's documentation in packed paragraphs; the first quarter of each is the prompt,
which is not trained. A stage has a GPU of its own, over NCCL, where there are enough for all; else all share the one, or the CPU, over
gloo. On the CPU, memory is the process's resident memory.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from engine.functional import Ratio, build_loss_mask
from engine.model_api import Data, Model
from engine.processes import Place, run_stages, transport
from engine.sft_interface import SFTInterface, compute_packed_sft_loss
from engine.text import ByteTokenizer, Paragraphs
from measuring import peak, reset_peak
from torch import Tensor

from flce.engine import PipelineEngine, causal_lm_stage

MIB = 1 << 20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}  # allowed difference of a loss, which later steps carry on


def materialised_sft_loss(output: Any, packed_input_ids: Tensor, cu_seqlens: Tensor, prompt_mask: Tensor) -> tuple[Tensor, Any]:
    """The loss as it is written for logits [T, V], which the output makes."""
    mask = build_loss_mask(prompt_mask, cu_seqlens)
    targets = torch.where(mask, torch.roll(packed_input_ids, -1), -100)
    total = F.cross_entropy(output.logits().float(), targets, reduction="sum")
    n_tokens = mask.sum()
    return total / n_tokens.clamp(min=1), {"loss": Ratio(total.detach(), n_tokens), "n_tokens": n_tokens}


def model_config(shape: str) -> Any:
    """A Llama's, of layers x hidden_size x vocab_size."""
    from transformers import LlamaConfig

    layers, hidden_size, vocab_size = map(int, shape.split("x"))
    heads = max(1, hidden_size // 128) if hidden_size > 128 else 4
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        use_cache=False,
    )


def with_prompts(data: Data) -> Data:
    """The first quarter of each sequence is its prompt."""
    starts, lengths = data["cu_seqlens"][:-1].long(), data["cu_seqlens"].diff().long()
    places = torch.arange(data["packed_input_ids"].numel()) - torch.repeat_interleave(starts, lengths)
    return data | {"prompt_mask": places < torch.repeat_interleave(lengths // 4, lengths)}


@dataclass
class Run:
    """Each step's statistics, those of held-out text, and by how many bytes memory rose above what is held between steps."""

    history: list[dict[str, float]]
    held_out: dict[str, float]
    rise: int


def train(place: Place, arguments: argparse.Namespace, loss_fn: Any) -> Run:
    """The last stage's run, from the same weights for every loss function."""
    config = model_config(arguments.shape)
    stage = causal_lm_stage(config, place.rank, place.num_stages, dtype=DTYPES[arguments.dtype], device=place.device)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=arguments.learning_rate)
    engine = PipelineEngine(
        stage,
        place.group,
        optimizer,
        schedule=arguments.schedule,
        max_grad_norm=1.0,
        normalize="tokens",
        head_options={"workspace_limit_bytes": arguments.workspace_limit * MIB},
    )
    model, interface = Model(engine, ByteTokenizer()), SFTInterface(loss_fn)
    text = Paragraphs(arguments.length)
    history: list[dict[str, float]] = []
    held = 0
    for step in range(arguments.steps):
        history.append(interface.train_step(model, with_prompts(text.batch(step, arguments.sequences))))
        if step == 0:  # everything lazy (kernels, optimizer state, communicators) exists now
            held = reset_peak(place.device)
    rise = peak(place.device) - held
    others = interface.evaluate(model, [with_prompts(text.held_out(4 * place.num_stages))])
    return Run(history, others, rise)


def compare(place: Place, arguments: argparse.Namespace) -> dict[str, Run]:
    """One stage's process."""
    runs = {}
    for name, loss_fn in (("flce", compute_packed_sft_loss), ("materialised logits", materialised_sft_loss)):
        runs[name] = train(place, arguments, loss_fn)
        if place.is_last:
            losses = " ".join(f"{stats['loss']:.4f}" for stats in runs[name].history)
            print(f"{name:>20}: losses {losses}", flush=True)
    return runs


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a few steps of a small model, for tests")
    parser.add_argument("--shape", help="layers x hidden_size x vocab_size (default: 4x64x16384, with --tiny 2x32x16384)")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of parameters (default: fp32)")
    parser.add_argument("--stages", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--schedule", choices=("1f1b", "gpipe"), default="1f1b", help="default: 1f1b")
    parser.add_argument("--steps", type=int, help="optimizer steps, 2 or more (default: 12, with --tiny 4)")
    parser.add_argument("--sequences", type=int, default=8, help="paragraphs of a batch (default: 8)")
    parser.add_argument("--length", type=int, help="tokens of the longest paragraph (default: 256, with --tiny 128)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="default: 0.003")
    parser.add_argument("--workspace-limit", type=int, metavar="MIB", help="of flce's loss (default: 64, with --tiny 8)")
    arguments = parser.parse_args()
    arguments.workspace_limit = (8 if arguments.tiny else 64) if arguments.workspace_limit is None else arguments.workspace_limit
    arguments.shape = arguments.shape or ("2x32x16384" if arguments.tiny else "4x64x16384")
    arguments.steps = (4 if arguments.tiny else 12) if arguments.steps is None else arguments.steps
    arguments.length = arguments.length or (128 if arguments.tiny else 256)
    sizes = arguments.shape.split("x")
    if len(sizes) != 3 or not all(size.isdigit() for size in sizes) or int(sizes[2]) < ByteTokenizer.vocab_size:
        parser.error(f"--shape is {arguments.shape}; it must be layers x hidden_size x vocab_size, with {ByteTokenizer.vocab_size} or more")
    if not 1 <= arguments.stages <= int(sizes[0]):
        parser.error(f"--stages is {arguments.stages}; a model of {sizes[0]} layers has 1 to {sizes[0]} stages")
    if arguments.sequences < arguments.stages:
        parser.error(f"--sequences is {arguments.sequences}; every one of {arguments.stages} microbatches needs one")
    if arguments.steps < 2:
        parser.error(f"--steps is {arguments.steps}; memory is measured from the second on")
    return arguments


def main() -> int:
    arguments = parsed()
    backend, kind = transport(arguments.stages)
    print(
        f"{arguments.stages} stages, {arguments.schedule}, {arguments.shape} in {arguments.dtype}, {arguments.sequences} paragraphs of up "
        f"to {arguments.length} tokens a step, on {kind} over {backend}",
        flush=True,
    )
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(MIB))  # a CPU's memory goes back to the system when it is freed, and a peak shows
    runs = run_stages(compare, arguments.stages, arguments)
    flces, own = runs["flce"], runs["materialised logits"]
    print(
        f"held-out text: loss {flces.held_out['loss']:.4f}, perplexity {flces.held_out['ppl']:.1f} of {flces.held_out['n_seqs']:.0f} "
        "paragraphs"
    )
    print("last stage's peak above what it holds between steps:")
    for name, run in runs.items():
        print(f"{name:>20}: {run.rise / MIB:8.1f} MiB")
    print(f"materialised logits take {own.rise / max(flces.rise, 1):.1f} times flce's memory")
    apart = max(abs(a["loss"] - b["loss"]) for a, b in zip(own.history, flces.history, strict=True))
    print(f"losses differ by {apart:.2g} at most, {TOLERANCES[arguments.dtype]:.2g} allowed")
    return 0 if apart <= TOLERANCES[arguments.dtype] else 1


if __name__ == "__main__":
    sys.exit(main())
