"""Tiny models of every family, and their stages run one after another in one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import Tensor

from flce.engine import CausalLMStage, PackedBatch, causal_lm_stage

#: transformers imports a model's module where it is asked for: here, before ranks are forked, and not on each of them
CLASSES = (
    transformers.AutoModelForCausalLM,
    transformers.Gemma2ForCausalLM,
    transformers.GPT2LMHeadModel,
    transformers.LlamaForCausalLM,
    transformers.MistralForCausalLM,
    transformers.Qwen2ForCausalLM,
    transformers.Qwen3ForCausalLM,
)
VOCAB = 50
SMALL = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 64, "initializer_range": 0.3}
ROPE = {"rope_theta": 10000.0}
GPT2 = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 4, "n_head": 4, "n_positions": 40, "initializer_range": 0.3}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
WINDOWS = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 2}
#: lengths of the sequences, longer and shorter than the windows, and of one token
LENGTHS = [7, 1, 12, 4, 1]


def config_of(name: str, **more: Any) -> Any:
    configs = {
        "llama": lambda: transformers.LlamaConfig(**SMALL | more),
        "llama-rope": lambda: transformers.LlamaConfig(
            **SMALL,
            rope_parameters=ROPE
            | {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
            attention_bias=True,
            mlp_bias=True,
            **more,
        ),
        "llama-yarn": lambda: transformers.LlamaConfig(
            **SMALL,
            rope_parameters=ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
            **more,
        ),
        "qwen2": lambda: transformers.Qwen2Config(**SMALL | more),
        "qwen2-window": lambda: transformers.Qwen2Config(**SMALL | WINDOWS | more),
        "qwen3": lambda: transformers.Qwen3Config(**SMALL | more),
        "qwen3-window": lambda: transformers.Qwen3Config(**SMALL | WINDOWS | more),
        "mistral": lambda: transformers.MistralConfig(**SMALL | {"sliding_window": None} | more),
        "mistral-window": lambda: transformers.MistralConfig(**SMALL | {"sliding_window": 3} | more),
        "gemma2": lambda: transformers.Gemma2Config(
            **SMALL
            | {
                "sliding_window": 5,
                "attn_logit_softcapping": 2.0,
                "final_logit_softcapping": 3.0,
                "query_pre_attn_scalar": 5,
                "pad_token_id": 0,
            }
            | more
        ),
        "gpt2": lambda: transformers.GPT2Config(**GPT2 | NO_DROPOUT | more),
        "gpt2-scales": lambda: transformers.GPT2Config(
            **GPT2 | NO_DROPOUT | {"scale_attn_by_inverse_layer_idx": True, "n_inner": 20} | more
        ),
        "gpt2-unscaled": lambda: transformers.GPT2Config(**GPT2 | NO_DROPOUT | {"scale_attn_weights": False} | more),
    }
    config = configs[name]()
    config._attn_implementation = "eager"
    return config


MODELS = ["llama", "llama-rope", "llama-yarn", "qwen2", "qwen2-window", "qwen3", "qwen3-window", "mistral", "mistral-window", "gemma2"]
MODELS += ["gpt2", "gpt2-scales", "gpt2-unscaled"]


def model_of(name: str, seed: int = 0, **more: Any) -> Any:
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config_of(name, **more))
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases, too, differ from 1 and 0
            parameter += 0.1 * torch.randn_like(parameter)
    return model.train()


def stages_of(model: Any, num_stages: int, **keywords: Any) -> list[CausalLMStage]:
    """Stages of a copy of the model."""
    model = copy.deepcopy(model)
    return [causal_lm_stage(model, stage, num_stages, **keywords) for stage in range(num_stages)]


def run(stages: list[CausalLMStage], ids: Tensor, batch: PackedBatch) -> Tensor:
    hidden = ids
    for stage in stages:
        hidden = stage(hidden, batch)
    return hidden


def logits_of(stages: list[CausalLMStage], hidden: Tensor) -> Tensor:
    last = stages[-1]
    logits = last.head(hidden) * last.logit_scale
    return last.softcap * torch.tanh(logits / last.softcap) if last.softcap else logits


def packed(lengths: list[int], seed: int = 1) -> tuple[Tensor, PackedBatch]:
    torch.manual_seed(seed)
    return torch.randint(0, VOCAB, (sum(lengths),)), PackedBatch.of(lengths, torch.get_default_device())


def own(model: Any, ids: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """The model's hidden states and logits, sequence by sequence."""
    base = getattr(model, model.base_model_prefix)
    hidden = [base(input_ids=part[None], use_cache=False).last_hidden_state[0] for part in ids.split(lengths)]
    logits = [model(input_ids=part[None], use_cache=False).logits[0] for part in ids.split(lengths)]
    return torch.cat(hidden), torch.cat(logits)


def near(value: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert value.shape == expected.shape
    torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance)
