"""TRL's trainers on a tiny random model: what a training run of each came to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import rank_support
import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from transformers.utils import logging as transformers_logging
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

disable_progress_bars()
transformers_logging.disable_progress_bar()
WORDS = 61
STEPS = 10
TEXTS = [" ".join(f"w{(3 * i + i * i * j + 7 * j) % WORDS}" for j in range(4 + i % 5)) for i in range(24)]
OF_A_RUN: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 4,
    "learning_rate": 0.2,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "report_to": [],
    "save_strategy": "no",
    "logging_strategy": "steps",
    "logging_steps": 1,
    "disable_tqdm": True,
    "use_cpu": rank_support.device() == "cpu",
    "bf16": False,
    "seed": 7,
    "gradient_checkpointing": False,
}


@dataclass
class Run:
    """Numbers of each step."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)


class Watch(TrainerCallback):  # type: ignore[misc]
    def __init__(self, run: Run) -> None:
        self.run = run

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.run.gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        if logs and "loss" in logs:
            self.run.logs.append(logs)


def tokenizer() -> Any:
    words = {**{f"w{i}": i for i in range(WORDS)}, "<pad>": WORDS, "<eos>": WORDS + 1, "<unk>": WORDS + 2}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def model(seed: int = 0, kind: str = "llama", **config: Any) -> Any:
    """A Llama; with kind a model of another class and formula of logits: gemma2 (a softcap), cohere (a scale)."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": WORDS + 3, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    formula = {"gemma2": {"final_logit_softcapping": 5.0, "head_dim": 8, "num_key_value_heads": 2}, "cohere": {"logit_scale": 0.25}}.get(
        kind, {}
    )
    of_model = AutoConfig.for_model(kind, **{**sizes, "max_position_embeddings": 64, "use_cache": False, **formula, **config})
    made = AutoModelForCausalLM.from_config(of_model, attn_implementation="eager")
    with torch.no_grad():
        made.get_output_embeddings().weight.mul_(20)  # a model that prefers some tokens
    made.generation_config.pad_token_id, made.generation_config.eos_token_id = WORDS, WORDS + 1
    return made


def saved(folder: Path, **options: Any) -> str:
    made = model(**options)
    made.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(ord(c) for c in text) % 17) for text in completions]


def train(trainer: Any) -> Run:
    run = Run()
    own = trainer.training_step

    def training_step(*args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = own(*args, **kwargs)
        run.losses.append(loss.item())
        return loss

    trainer.training_step = training_step
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Watch(run))
    trainer.train()
    return run


def compare(actual: Run, expected: Run, steps: int = STEPS) -> None:
    """Losses, gradients and metrics of two runs of `steps` steps, within fp32 rounding that ten steps have carried on, or thirty of a
    smaller size."""
    assert len(actual.gradients) == len(expected.gradients) == steps
    assert len(actual.losses) == len(expected.losses) and len(actual.losses) % steps == 0
    assert all(any(gradient.norm() > 1e-3 for gradient in step.values()) for step in expected.gradients)
    for a, b in zip(actual.losses, expected.losses, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=2e-6)
    for step, others in zip(actual.gradients, expected.gradients, strict=True):
        assert step.keys() == others.keys() and step
        for name, gradient in step.items():
            assert (gradient - others[name]).norm() <= 1e-4 * others[name].norm() + 1e-7, name
    for log, other in zip(actual.logs, expected.logs, strict=True):
        assert log.keys() == other.keys()
        for key, value in log.items():
            if isinstance(value, float) and "time" not in key and not key.startswith("perf/"):
                assert value == pytest.approx(other[key], rel=1e-3, abs=1e-4), key


def sft(folder: Path, peft_config: Any = None, kind: str = "llama", **options: Any) -> Any:
    arguments = SFTConfig(output_dir=str(folder), **{**OF_A_RUN, **options})
    data = Dataset.from_dict({"text": TEXTS})
    return SFTTrainer(model(kind=kind), arguments, train_dataset=data, processing_class=tokenizer(), peft_config=peft_config)


def other_texts(ahead: int) -> list[str]:
    return [" " + text for text in TEXTS[ahead:] + TEXTS[:ahead]]


def pairs() -> Dataset:
    return Dataset.from_dict({"prompt": TEXTS, "chosen": other_texts(1), "rejected": other_texts(5)})


def dpo(folder: Path, kind: str = "llama", **options: Any) -> Any:
    arguments = DPOConfig(output_dir=str(folder), **{**OF_A_RUN, **options})
    return DPOTrainer(model(kind=kind), model(seed=1, kind=kind), args=arguments, train_dataset=pairs(), processing_class=tokenizer())


def grpo(folder: Path, kind: str = "llama", **options: Any) -> Any:
    given = {"num_generations": 4, "max_completion_length": 6, "beta": 0.05, "temperature": 0.9, **options}
    arguments = GRPOConfig(output_dir=str(folder), **{**OF_A_RUN, **given})
    prompts = Dataset.from_dict({"prompt": TEXTS})
    return GRPOTrainer(saved(folder / "model", kind=kind), reward, args=arguments, train_dataset=prompts, processing_class=tokenizer())


def rloo(folder: Path, kind: str = "llama", **options: Any) -> Any:
    given = {"num_generations": 4, "max_completion_length": 6, "learning_rate": 0.005, **options}
    arguments = RLOOConfig(output_dir=str(folder), **{**OF_A_RUN, **given})
    prompts = Dataset.from_dict({"prompt": TEXTS})
    return RLOOTrainer(saved(folder / "model", kind=kind), reward, args=arguments, train_dataset=prompts, processing_class=tokenizer())


def kto(folder: Path, kind: str = "llama", **options: Any) -> Any:
    arguments = KTOConfig(output_dir=str(folder), **{**OF_A_RUN, **options})
    labels = [i % 2 == 0 for i in range(len(TEXTS))]
    data = Dataset.from_dict({"prompt": TEXTS, "completion": other_texts(2), "label": labels})
    return KTOTrainer(model(kind=kind), model(seed=1, kind=kind), args=arguments, train_dataset=data, processing_class=tokenizer())


def distillation(folder: Path, **options: Any) -> Any:
    given = {"max_completion_length": 6, **options}
    arguments = DistillationConfig(output_dir=str(folder), **{**OF_A_RUN, **given})
    prompts = Dataset.from_dict({"prompt": TEXTS})
    teacher = model(seed=1)
    return DistillationTrainer(model(), teacher, args=arguments, train_dataset=prompts, processing_class=tokenizer())


TRAINERS: dict[str, Callable[..., Any]] = {"sft": sft, "dpo": dpo, "grpo": grpo, "rloo": rloo, "kto": kto, "distillation": distillation}
