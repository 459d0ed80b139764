"""The pipeline engine from a checkpoint to text, in under a minute on two CPU cores: makes a small Llama of random weights, saves it as a
Hugging Face checkpoint, cuts that into a file for each stage (flce-shard-checkpoint), starts a process for each stage that loads its own
file, trains on this project's documentation, and continues a few beginnings. It fails, with exit code 1, where the loss has not fallen
below --loss-bound (bytes' frequencies alone give 3.4 nats a byte, a model of random weights 5.5 or more).

    make demo-engine                                       # builds what is missing, then this
    python examples/engine_demo.py --steps 400             # a better model
    python examples/engine_demo.py --stages 4 --schedule gpipe --keep /tmp/demo

A token is a byte. Stages have a GPU each, over NCCL, where there are enough; else they share the one, or the CPU, over gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from engine.functional import aggregate_stats
from engine.processes import Place, run_stages, transport
from engine.sft_interface import compute_packed_sft_loss
from engine.text import ByteTokenizer, Paragraphs, packed

from flce.engine import GenerationConfig, PipelineEngine, causal_lm_stage, load_stage, shard_checkpoint

BEGINNINGS = ("The kernel", "A stage of the pipeline ", "The loss is computed with")
LAST = 5  # steps whose mean loss is held to the bound


def make_checkpoint(folder: Path, arguments: argparse.Namespace) -> int:
    """A Llama of random weights as save_pretrained writes it; returns its number of parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=ByteTokenizer.vocab_size,
        hidden_size=arguments.hidden_size,
        intermediate_size=3 * arguments.hidden_size,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=ByteTokenizer.eos_token_id,
        pad_token_id=ByteTokenizer.pad_token_id,
        tie_word_embeddings=True,
        initializer_range=0.1,  # a small model learns sooner from larger weights than the usual 0.02
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model.num_parameters()


def shard(source: Path, target: Path, num_stages: int) -> None:
    """Runs flce-shard-checkpoint's function."""
    print(f"$ flce-shard-checkpoint {source} {target} --stages {num_stages}", flush=True)
    report = shard_checkpoint(source, target, num_stages, overwrite=True)
    for file in report["files"]:
        print(f"    {file['file']}: {file['tensors']} tensors, {file['bytes']:,} bytes", flush=True)


def train_and_generate(place: Place, folder: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One stage's process."""
    stage = causal_lm_stage(folder, place.rank, place.num_stages, device=place.device)
    report = load_stage(stage, folder)
    count, files = sum(p.numel() for p in stage.parameters()), ", ".join(file.name for file in report.files)
    print(f"stage {place.rank} on {place.device}: {count:,} parameters from {files}", flush=True)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=arguments.learning_rate)
    warmup = max(1, arguments.steps // 10)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, max(0.05, 1 - (step - warmup) / max(1, arguments.steps - warmup)))
    )
    engine = PipelineEngine(stage, place.group, optimizer, lr_scheduler=scheduler, schedule=arguments.schedule, max_grad_norm=1.0)
    text = Paragraphs(arguments.length)
    losses: list[float] = []
    begin = time.perf_counter()
    for step in range(arguments.steps):
        data = text.batch(step, arguments.sequences)
        result = engine.train_batch(data["packed_input_ids"], data["cu_seqlens"], compute_packed_sft_loss)
        if result is not None:
            losses.append(aggregate_stats(result[1])["loss"])
            if step % max(1, arguments.steps // 10) == 0 or step == arguments.steps - 1:
                print(f"step {step + 1:>4}: loss {losses[-1]:.4f} nats a byte, {time.perf_counter() - begin:5.1f} s", flush=True)
    return {"losses": losses, "texts": continuations(engine, arguments)}


def continuations(engine: PipelineEngine, arguments: argparse.Namespace) -> list[str]:
    """BEGINNINGS and what the model makes of them, on the last stage."""
    tokenizer = ByteTokenizer()
    engine.eval()
    prompts = packed([tokenizer.encode(text) for text in BEGINNINGS])
    config = GenerationConfig(max_new_tokens=arguments.new_tokens, temperature=0.7, top_k=20)
    made = engine.generate(prompts["packed_input_ids"], prompts["cu_seqlens"], tokenizer, config, seed=1)
    if made is None:
        return []
    rows = zip(BEGINNINGS, made.tokens.tolist(), made.lengths.tolist(), strict=True)
    return [text + tokenizer.decode(tokens[:length]) for text, tokens, length in rows]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps (default: 150)")
    parser.add_argument("--stages", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--schedule", choices=("1f1b", "gpipe"), default="1f1b", help="default: 1f1b")
    parser.add_argument("--layers", type=int, help="default: 2, or a layer for each stage")
    parser.add_argument("--hidden-size", type=int, default=64, help="a multiple of 8 (default: 64)")
    parser.add_argument("--sequences", type=int, default=8, help="paragraphs of a batch (default: 8)")
    parser.add_argument("--length", type=int, default=160, help="bytes of the longest paragraph (default: 160)")
    parser.add_argument("--learning-rate", type=float, default=6e-3, help="the highest, after a tenth of the steps (default: 0.006)")
    parser.add_argument("--new-tokens", type=int, default=60, help="bytes that a beginning is continued by, at most (default: 60)")
    parser.add_argument(
        "--loss-bound", type=float, default=2.8, help=f"nats a byte that the last {LAST} steps' mean loss has to be below (default: 2.8)"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the checkpoints, whole and in stages, here")
    arguments = parser.parse_args()
    arguments.layers = max(2, arguments.stages) if arguments.layers is None else arguments.layers
    if not 1 <= arguments.stages <= arguments.layers:
        parser.error(f"--stages is {arguments.stages}; a model of {arguments.layers} layers has 1 to {arguments.layers} stages")
    if arguments.sequences < arguments.stages:
        parser.error(f"--sequences is {arguments.sequences}; every one of {arguments.stages} microbatches needs one")
    if arguments.steps < LAST:
        parser.error(f"--steps is {arguments.steps}; the loss is of the last {LAST}")
    if arguments.hidden_size < 8 or arguments.hidden_size % 8:
        parser.error(f"--hidden-size is {arguments.hidden_size}; it must be a multiple of 8")
    if not 1 <= arguments.new_tokens <= 400:
        parser.error(f"--new-tokens is {arguments.new_tokens}; it must be 1 to 400")
    if not 33 <= arguments.length <= 512:
        parser.error(f"--length is {arguments.length}; it must be 33 to 512")
    return arguments


def main() -> int:
    arguments = parsed()
    backend, kind = transport(arguments.stages)
    print(f"{arguments.stages} stages on {kind} over {backend}, schedule {arguments.schedule}", flush=True)
    with contextlib.ExitStack() as stack:
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flce-demo-")))
        whole, stages = folder / "whole", folder / f"stages-{arguments.stages}"
        print(f"a Llama of {make_checkpoint(whole, arguments):,} parameters in {whole}", flush=True)
        shard(whole, stages, arguments.stages)
        result = run_stages(train_and_generate, arguments.stages, str(stages), arguments)
    print("what it writes:")
    for text in result["texts"]:
        print(f"    {text!r}")
    losses = result["losses"]
    mean = sum(losses[-LAST:]) / LAST
    print(f"loss {losses[0]:.4f} -> {mean:.4f} nats a byte, {arguments.loss_bound} allowed")
    if not mean < arguments.loss_bound:
        print("the loss did not fall below its bound", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
