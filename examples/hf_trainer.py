"""transformers' Trainer with one line of flce: a causal language model trained twice from the same weights, as it comes and with
flce.patch(model), with each run's losses, time and peak memory beyond what it holds between steps. It fails where the losses differ.

    python examples/hf_trainer.py --tiny                                     # on the CPU: seconds
    python examples/hf_trainer.py                                            # a GPU: 4 layers, 4 x 1024 tokens, 2048 x 151936, bf16
    python examples/hf_trainer.py --shape 8x4096x128256 --batch 2 --sequence 4096

A shape is layers x hidden_size x vocab_size of a Llama with random weights; the data are random tokens. Needs transformers and accelerate.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from typing import Any

import torch
from measuring import MIB, Run, peak, reset_peak, sizes_of, worst_difference
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

import flce

TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 1e-4}  # allowed relative difference of a loss


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences of a few random tokens each, which a model learns to tell apart."""

    def __init__(self, sequences: int, length: int, vocab_size: int) -> None:
        make = torch.Generator().manual_seed(1)
        few = torch.randint(0, vocab_size, (sequences, 8), generator=make)
        self.tokens = few.gather(1, torch.randint(0, 8, (sequences, length), generator=make))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Watch(TrainerCallback):  # type: ignore[misc]
    """Notes each step's time and memory."""

    def __init__(self, run: Run, device: torch.device) -> None:
        self.run, self.device = run, device
        self.held, self.begin = 0, 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.held, self.begin = reset_peak(self.device), time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.run.peaks.append(peak(self.device) - self.held)
        self.run.milliseconds.append(1e3 * (time.perf_counter() - self.begin))

    def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        if logs and "loss" in logs:
            self.run.losses.append(logs["loss"])


def train(model: Any, arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Run:
    run = Run()
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=arguments.batch,
            max_steps=arguments.steps,
            learning_rate=0.5,
            lr_scheduler_type="constant",
            optim="sgd",
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=device.type == "cpu",
            bf16=False,
            seed=5,
        )
        data = Tokens(arguments.batch * arguments.steps, arguments.sequence, model.config.vocab_size)
        trainer = Trainer(model=model.to(device, dtype), args=settings, train_dataset=data, callbacks=[Watch(run, device)])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return run


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small, on the CPU")
    parser.add_argument("--shape", help="layers x hidden_size x vocab_size: 4x2048x151936, or 2x64x16384 with --tiny")
    parser.add_argument("--batch", type=int, help="sequences a step: 4")
    parser.add_argument("--sequence", type=int, help="tokens of each: 1024, or 256 with --tiny")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps")
    arguments = parser.parse_args()
    if not arguments.tiny and not torch.cuda.is_available():
        parser.error("there is no GPU here; --tiny runs on the CPU")
    arguments.shape = arguments.shape or ("2x64x16384" if arguments.tiny else "4x2048x151936")
    arguments.batch = arguments.batch or 4
    arguments.sequence = arguments.sequence or (256 if arguments.tiny else 1024)
    return arguments


def main() -> int:
    arguments = parsed()
    layers, hidden_size, vocab_size = sizes_of(arguments.shape, "4x2048x151936")
    device = torch.device("cpu" if arguments.tiny else "cuda")
    dtype = torch.float32 if arguments.tiny else torch.bfloat16
    torch.manual_seed(0)
    heads = max(hidden_size // 128, 1)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        tie_word_embeddings=True,
        use_cache=False,
    )
    stock = LlamaForCausalLM(config)
    models = {"as it comes": stock, "flce.patch": flce.patch(copy.deepcopy(stock))}
    runs = {}
    for name, model in models.items():
        runs[name] = train(model, arguments, device, dtype)
        model.to("meta")  # the other one's memory is its own
    tokens = arguments.batch * arguments.sequence
    print(f"{arguments.shape}, {tokens} tokens a step, {dtype}, on {device.type}")
    for name, run in runs.items():
        losses = " ".join(f"{loss:.5f}" for loss in run.losses)
        milliseconds, most = run.typical()
        print(f"{name:>12}: losses {losses}   {milliseconds:8.1f} ms a step   {most / MIB:8.1f} MiB at the peak")
    flce.check_labels()
    worst = worst_difference(*(run.losses for run in runs.values()))
    print(f"losses differ by {worst:.2g} at most, {TOLERANCES[dtype]:.2g} allowed")
    return 0 if worst <= TOLERANCES[dtype] else 1


if __name__ == "__main__":
    sys.exit(main())
