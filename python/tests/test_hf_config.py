"""Numbers that `flce prewarm --hf-config` reads of a config.json, beside those that `flce.patch` reads of the model's configuration, and
beside the model itself, on a meta device."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import flce
from flce.core import _native

transformers = pytest.importorskip("transformers")

from transformers.models.auto import modeling_auto  # noqa: E402

from flce.huggingface import options_of  # noqa: E402

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers", "depth")
_MAPPINGS = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
_QUICK = {
    "bert": "BertLMHeadModel",
    "cohere": "CohereForCausalLM",
    "electra": "ElectraForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "granite": "GraniteForCausalLM",
    "modernbert-decoder": "ModernBertDecoderForCausalLM",
    "phi": "PhiForCausalLM",
    "recurrent_gemma": "RecurrentGemmaForCausalLM",
    "xlm-roberta": "XLMRobertaForCausalLM",
    "xlstm": "xLSTMForCausalLM",
}


def small_config(model_type: str) -> Any:
    """A default configuration with at most two layers; its other sizes stay, as a meta device holds nothing."""
    config = transformers.AutoConfig.for_model(model_type)
    for part in (config, *(getattr(config, name, None) for name in ("text_config", "decoder", "vision_config"))):
        for name in _LAYERS:
            if isinstance(getattr(part, name, None), int):
                with contextlib.suppress(Exception):  # some follow from others
                    setattr(part, name, min(getattr(part, name), 2))
        if getattr(part, "layer_types", None):
            with contextlib.suppress(AttributeError):
                part.layer_types = list(part.layer_types)[:2]
    return config


def head_of(config: Any, class_name: str) -> torch.nn.Module | None:
    with torch.device("meta"):
        head = getattr(transformers, class_name)(config).get_output_embeddings()
    return head if isinstance(getattr(head, "weight", None), torch.Tensor) and head.weight.dim() == 2 else None


def read(config: Any) -> dict[str, str]:
    text = _native.text(_native.library().flce_hf_config_spec, config.to_json_string().encode())
    return {key: value for key, _, value in (item.partition("=") for item in text.split(","))}


def check(config: Any, head: torch.nn.Module) -> None:
    spec = read(config)
    rows, width = head.weight.shape
    assert int(spec["V"]) == rows and int(spec["D"]) == -(-width // 8) * 8
    assert ("bias" in spec) == (getattr(head, "bias", None) is not None)
    options = options_of(config)
    for name, without in (("softcap", 0.0), ("logit_scale", 1.0)):
        assert float(spec.get(name, without)) == pytest.approx(options.get(name, without))


@pytest.mark.parametrize("model_type", _QUICK)
def test_a_config_says_what_its_model_has(model_type: str) -> None:
    config = small_config(model_type)
    head = head_of(config, _QUICK[model_type])
    assert head is not None
    check(config, head)


@pytest.mark.nightly
def test_every_class_of_transformers() -> None:
    """Each is read as it is, or refused by name; what cannot be built here from its default configuration is left out."""
    checked, wrong = 0, []
    for mapping in _MAPPINGS:
        for model_type, names in mapping.items():
            name = names if isinstance(names, str) else names[0]
            try:
                config = small_config(model_type)
                head = head_of(config, name)
            except Exception:
                continue
            if head is None:
                continue
            try:
                check(config, head)
            except flce.SpecError:
                continue
            except AssertionError as error:
                wrong.append(f"{name}: {str(error).splitlines()[0]}")
            checked += 1
    assert not wrong, "\n".join(wrong)
    assert checked > 200
