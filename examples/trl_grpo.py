"""TRL's GRPOTrainer with one line of flce: a policy trained twice from the same weights on the same completions, as TRL comes and with
flce.trl.patch(), with each run's losses, gradients' norms, time and peak memory of loss and backward beyond what was held before them. It
fails where the runs differ.

    python examples/trl_grpo.py --tiny                                       # on the CPU: seconds
    python examples/trl_grpo.py                                              # a GPU: 4 layers, 16 x 512 tokens, 2048 x 151936, bf16
    python examples/trl_grpo.py --shape 8x4096x128256 --completions 8 --length 2048

A shape is layers x hidden_size x vocab_size of a Llama with random weights. Completions are random tokens in place of a sampler's, so that
both runs have the same ones; everything else is the trainer's. Every second step uses a step's completions again, where the ratio of
policies is not 1. Needs trl >= 1.15, datasets and accelerate.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import Dataset
from measuring import MIB, Run, peak, reset_peak, sizes_of
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import flce

GROUP = 4  # completions of a prompt
PROMPT = "tell me a number"
TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 1e-4}  # allowed difference: a loss's absolute, a gradient norm's relative


@dataclass
class PolicyRun(Run):
    """Time and peaks are those of loss and backward."""

    norms: list[float] = field(default_factory=list)  # norms of the gradients


class Watch(TrainerCallback):  # type: ignore[misc]
    """Notes each step's loss, time and memory."""

    def __init__(self, run: PolicyRun, device: torch.device) -> None:
        self.run, self.device = run, device
        self.held, self.begin = 0, 0.0

    def on_loss(self) -> None:
        self.held, self.begin = reset_peak(self.device), time.perf_counter()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.run.peaks.append(peak(self.device) - self.held)
        self.run.milliseconds.append(1e3 * (time.perf_counter() - self.begin))

    def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        if logs and "loss" in logs:
            self.run.losses.append(logs["loss"])
            self.run.norms.append(logs["grad_norm"])


class WatchedTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer that says when a loss begins: generation and old log-probabilities are behind it then."""

    watch: Watch

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.watch.on_loss()
        return super().compute_loss(*args, **kwargs)


def tokenizer() -> Any:
    """A tokenizer of the prompt's words; completions are numbers already."""
    words = {word: i for i, word in enumerate([*PROMPT.split(), "<pad>", "<eos>"])}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def rollouts(arguments: argparse.Namespace, vocab_size: int) -> Any:
    """Stands for a sampler: completions of random lengths, the same in each run."""
    make = torch.Generator().manual_seed(1)
    prompt = list(range(len(PROMPT.split())))

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        lengths = torch.randint(arguments.length // 2, arguments.length + 1, (len(prompts),), generator=make).tolist()
        completions = [torch.randint(len(prompt) + 2, vocab_size, (length,), generator=make).tolist() for length in lengths]
        return {"prompt_ids": [prompt for _ in prompts], "completion_ids": completions, "logprobs": None}

    return rollout


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(ids) / len(ids) for ids in completion_ids]


def train(model: Any, arguments: argparse.Namespace, device: torch.device) -> PolicyRun:
    run = PolicyRun()
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=arguments.completions,
            num_generations=GROUP,
            num_iterations=2,
            max_completion_length=arguments.length,
            beta=0.0,
            temperature=0.9,
            max_steps=arguments.steps,
            learning_rate=0.1,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=1e9,  # a norm that leaves gradients as they are, and has theirs logged
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            gradient_checkpointing=False,
            use_cpu=device.type == "cpu",
            bf16=False,
            seed=5,
        )
        trainer = WatchedTrainer(
            model=model,
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": [PROMPT] * arguments.completions * arguments.steps}),
            processing_class=tokenizer(),
            rollout_func=rollouts(arguments, model.config.vocab_size),
        )
        trainer.watch = Watch(run, device)
        trainer.add_callback(trainer.watch)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return run


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small, on the CPU")
    parser.add_argument("--shape", help="layers x hidden_size x vocab_size: 4x2048x151936, or 2x64x16384 with --tiny")
    parser.add_argument("--completions", type=int, help=f"a step, a multiple of {GROUP}: 16, or 8 with --tiny")
    parser.add_argument("--length", type=int, help="tokens of the longest: 512, or 64 with --tiny")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps")
    arguments = parser.parse_args()
    if not arguments.tiny and not torch.cuda.is_available():
        parser.error("there is no GPU here; --tiny runs on the CPU")
    arguments.shape = arguments.shape or ("2x64x16384" if arguments.tiny else "4x2048x151936")
    arguments.completions = arguments.completions or (8 if arguments.tiny else 16)
    arguments.length = arguments.length or (64 if arguments.tiny else 512)
    if arguments.completions % GROUP:
        parser.error(f"--completions is {arguments.completions}; it must be a multiple of {GROUP}, a prompt's")
    return arguments


def policy(shape: str, device: torch.device, dtype: torch.dtype) -> Any:
    layers, hidden_size, vocab_size = sizes_of(shape, "4x2048x151936")
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
    return LlamaForCausalLM(config).to(device, dtype)


def main() -> int:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # no warning about rollout_func
    warnings.simplefilter("ignore")
    arguments = parsed()
    device = torch.device("cpu" if arguments.tiny else "cuda")
    dtype = torch.float32 if arguments.tiny else torch.bfloat16
    stock = policy(arguments.shape, device, dtype)
    runs = {}
    for name in ("TRL as it comes", "flce.trl.patch()"):
        if name.startswith("flce"):
            flce.trl.patch()
        model = copy.deepcopy(stock)
        runs[name] = train(model, arguments, device)
        del model
    print(f"{arguments.shape}, {arguments.completions} completions of up to {arguments.length} tokens a step, {dtype}, on {device.type}")
    for name, run in runs.items():
        losses = " ".join(f"{loss:.6f}" for loss in run.losses)
        milliseconds, most = run.typical()
        print(f"{name:>17}: losses {losses}   {milliseconds:8.1f} ms of loss and backward   {most / MIB:8.1f} MiB at their peak")
    flce.check_labels()
    own, fused = runs.values()
    loss = max(abs(a - b) for a, b in zip(own.losses, fused.losses, strict=True))
    norm = max(abs(a - b) / a for a, b in zip(own.norms, fused.norms, strict=True))
    print(f"losses differ by {loss:.2g} and gradients' norms by {norm:.2g} of theirs at most, {TOLERANCES[dtype]:.2g} allowed")
    print(f"flce computed {flce.trl.calls()['fused']} calls of the output layer, TRL's own function {flce.trl.calls()['own']} in its place")
    return 0 if max(loss, norm) <= TOLERANCES[dtype] and flce.trl.calls()["fused"] else 1


if __name__ == "__main__":
    sys.exit(main())
