"""Tiny random models of the classes in transformers' causal-LM mapping: configs whose sizes are made small by name, and what single ones
need besides."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from rank_support import generator
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

VOCAB_SIZE = 97
MOST_PARAMETERS = 20_000_000

# Sizes by the names that configs have for them.
_SIZES: dict[str, Any] = (
    dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB_SIZE)
    | dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size", "n_embed", "lru_width", "image_size"), 32)
    | dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "shared_intermediate_size"), 48)
    | dict.fromkeys(("ffn_hidden_size", "prefix_dense_intermediate_size", "intermediate_size_mlp"), 48)
    | dict.fromkeys(
        ("moe_intermediate_size", "moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16
    )
    | dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"), 2)
    | dict.fromkeys(
        ("encoder_layers", "num_encoder_layers", "n_group", "topk_group", "mamba_n_groups", "n_groups", "first_k_dense_replace"), 1
    )
    | dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"), 4)
    | dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads", "num_key_value_heads", "conv_kernel"), 4)
    | dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "linear_num_value_heads", "linear_num_heads"), 4
    )
    | dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "linear_num_key_heads"), 2)
    | dict.fromkeys(
        ("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank", "rotary_dim", "patch_size"), 8
    )
    | dict.fromkeys(
        ("mamba_n_heads", "mamba_d_head", "mamba_num_heads", "mamba_head_dim", "state_size", "mamba_d_state", "ssm_state_size"), 8
    )
    | dict.fromkeys(("hidden_size_per_layer_input", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8)
    | dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"), 64)
    | dict.fromkeys(("attention_window_size", "sliding_window"), 16)
    | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "dropout": 0.0, "use_cache": False, "is_decoder": True}
)
# Set where the config's own default is None, too.
_WHERE_NONE = ("pad_token_id", "head_dim", "num_key_value_heads", "use_cache")


def _part(model_type: str, **more: Any) -> dict[str, Any]:
    """A small text or vision config inside another."""
    names = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "image_size",
        "patch_size",
        "vocab_size",
        "pad_token_id",
    )
    return {"model_type": model_type, "num_hidden_layers": 2, **{name: _SIZES[name] for name in names}, **more}


_GOT_VISION = {"output_channels": 16, "mlp_dim": 32, "global_attn_indexes": [0], "window_size": 2}
_ONE_HYBRID = ["mamba", "hybrid"]
# Options by model type; None leaves the config's default.
_BESIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"head_dim": None, "n_group": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "big_bird": {"attention_type": "original_full"},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 64, "lm_head_multiplier": 0.7},
    "fuyu": {"text_config": _part("persimmon"), "patch_size": 4},
    "gemma3": {"text_config": _part("gemma3_text", head_dim=8), "vision_config": _part("siglip_vision_model"), "mm_tokens_per_image": 4},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "gemma4_text": {"num_kv_shared_layers": 0},
    "gemma4_unified": {"text_config": _part("gemma4_unified_text", head_dim=8, num_kv_shared_layers=0)},
    "got_ocr2": {"text_config": _part("qwen2"), "vision_config": _part("got_ocr2_vision", **_GOT_VISION)},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hyperclovax": {"logits_scaling": 0.7},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "mimo_v2_flash": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 8, "swa_v_head_dim": 8},
    "moshi": {"audio_vocab_size": VOCAB_SIZE},
    "recurrent_gemma": {"num_hidden_layers": 3, "logits_soft_cap": 3.0},
    "reformer": {
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 5,
        "lsh_attn_chunk_length": 5,
        "num_buckets": 2,
        "hash_seed": 0,
        "hidden_dropout_prob": 0.0,  # its dropout draws seeds of its own
        "local_attention_probs_dropout_prob": 0.0,
        "lsh_attention_probs_dropout_prob": 0.0,
    },
    "roc_bert": {"pronunciation_vocab_size": 20, "shape_vocab_size": 20},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layers_block_type": _ONE_HYBRID, "layer_types": _ONE_HYBRID, "num_mem_blocks": 1, "hybrid_layer_ids": [1]},
    "zaya": {"num_experts_per_tok": 1},
}


def class_names() -> dict[str, str]:
    """Each class of the mapping, with the first model type that it stands for."""
    names: dict[str, str] = {}
    for model_type, found in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        names.setdefault(found if isinstance(found, str) else found[0], model_type)
    return names


def _sizes_of(config_class: Any, besides: dict[str, Any]) -> dict[str, Any]:
    defaults = config_class().__dict__
    sizes = {name: size for name, size in _SIZES.items() if name in defaults and (defaults[name] is not None or name in _WHERE_NONE)}
    for name, part in (getattr(config_class, "sub_configs", None) or {}).items():
        if name in defaults and issubclass(part, transformers.PretrainedConfig) and name not in besides:
            sizes[name] = _sizes_of(part, {})
    return {name: value for name, value in (sizes | besides).items() if value is not None}


def tiny_causal_lm(class_name: str, *, routers: bool = False) -> Any:
    """A random model of the class, in training mode; with `routers` it asks for its routers' losses. Errors of the class pass through where
    its config cannot be made small by name."""
    model_class = getattr(transformers, class_name)
    config = model_class.config_class(**_sizes_of(model_class.config_class, _BESIDES.get(class_names()[class_name], {})))
    if routers:
        for part in {id(part): part for part in (config, config.get_text_config())}.values():
            part.output_router_logits = True
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in model_class(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count} parameters: too many for a tiny model")
    torch.manual_seed(1)
    model = model_class(config)
    # Random logits of a new model are so small that a wrong scale or cap hardly shows in the loss.
    with torch.no_grad():
        weight = getattr(model.get_output_embeddings(), "weight", None)
        if weight is not None:
            weight.mul_(20.0)
    return model.train()


@functools.cache
def batch() -> dict[str, Any]:
    tokens = torch.randint(3, VOCAB_SIZE - 3, (2, 10), generator=generator(2))
    labels = tokens.clone()
    labels[0, :4] = -100
    return {"input_ids": tokens, "labels": labels}


def batches(model: Any) -> dict[str, dict[str, Any]]:
    """Batches that a loss may treat in a way of its own: masks, zeros of a mask under labels, padding, a sequence without labels."""
    tokens = batch()
    if model.main_input_name in ("input_features", "input_values"):
        features = torch.randn(2, getattr(model.config, "num_mel_bins", 80), 64, generator=generator(3))
        if "Speech2Text" in type(model).__name__:
            features = features.transpose(1, 2)
        sound = torch.randn(2, 4000, generator=generator(3))
        tokens = {model.main_input_name: features if model.main_input_name == "input_features" else sound, "labels": tokens["labels"]}
    labels = tokens["labels"]
    ones = torch.ones_like(labels)
    zeros = ones.clone()
    zeros[0, -3:] = zeros[1, -1:] = 0
    ignored = labels.clone()
    ignored[0] = -100
    made = {"plain": tokens, "a sequence ignored": tokens | {"labels": ignored}}
    if "input_ids" in tokens:
        padded = labels.masked_fill(zeros == 0, -100)
        made |= {"a mask of ones": tokens | {"attention_mask": ones}, "zeros under labels": tokens | {"attention_mask": zeros}}
        made["padding"] = tokens | {"attention_mask": zeros, "labels": padded}
    if model.config.is_encoder_decoder:
        made["a mask of the decoder"] = tokens | {"decoder_attention_mask": zeros}
    return made


def encoder_decoder_names() -> dict[str, str]:
    """Each class of the mappings of models with an encoder that is none of causal LMs, with the first model type that it stands for."""
    names: dict[str, str] = {}
    for mapping in (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES):
        for model_type, found in mapping.items():
            names.setdefault(found if isinstance(found, str) else found[0], model_type)
    return {name: model_type for name, model_type in names.items() if name not in class_names()}


def tiny_encoder_decoder(class_name: str) -> Any:
    """A random model of the class without dropout, in training mode. Errors of the class pass through where its config cannot be made small
    by name."""
    model_class = getattr(transformers, class_name)
    if class_name == "EncoderDecoderModel":
        bert = transformers.BertConfig(**_sizes_of(transformers.BertConfig, {"is_decoder": False, "bos_token_id": None}))
        config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(bert, bert)
        config.pad_token_id = 0
    else:
        config = model_class.config_class(**_sizes_of(model_class.config_class, _BESIDES.get(encoder_decoder_names()[class_name], {})))
    config.decoder_start_token_id = 1
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in model_class(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count} parameters: too many for a tiny model")
    torch.manual_seed(1)
    model = model_class(config)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.train()
