"""Every class of transformers' causal-LM mapping, as a tiny random model: flce.huggingface and flce.patch give the loss and the gradients
of the model's own forward, or refuse by name. docs/python.md has the table."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch

import flce

ON_DEVICE = True
transformers = pytest.importorskip("transformers")
from causal_lm_support import batch, batches, class_names, encoder_decoder_names, tiny_causal_lm, tiny_encoder_decoder  # noqa: E402

from flce.huggingface import CausalLMLoss, return_hidden_states  # noqa: E402

REFUSED = {
    "DoryForCausalLM": "with a parameter logit_scale .* beside its weight",
    "ProphetNetForCausalLM": "labels has shape|ProphetNetForCausalLM's own loss",  # several future tokens at a time
}
NOT_SMALL = {
    "BltForCausalLM": "has nested byte-level models",
    "CohereCompassForCausalLM": "its text config alone builds no model",
    "DbrxForCausalLM": "its default config builds no model",
    "Gemma3nForConditionalGeneration": "its vision tower needs timm and pillow",
    "Gemma4AssistantForCausalLM": "is a drafter that needs another model's states",
    "Gemma4UnifiedAssistantForCausalLM": "is a drafter that needs another model's states",
    "GitForCausalLM": "its own loss needs an image",
    "MiMoV2FlashForCausalLM": "its sizes depend on each other",
    "MossTranscribeDiarizeForConditionalGeneration": "has a speech encoder",
    "MusicgenForCausalLM": "predicts several codebooks of audio",
    "MusicgenMelodyForCausalLM": "predicts several codebooks of audio",
    "ZambaForCausalLM": "needs its full depth",
}
# Classes that cannot return their routers' logits at this size.
WITHOUT_ROUTERS = ("DeepseekV4ForCausalLM", "FlintForCausalLM")
QUICK = (
    "LlamaForCausalLM",
    "Gemma2ForCausalLM",
    "GPT2LMHeadModel",
    "CohereForCausalLM",
    "MixtralForCausalLM",
    "BartForCausalLM",
    "MambaForCausalLM",
    "Qwen3NextForCausalLM",
)
# Models with an encoder: which of their batches are refused. The others are equal.
ENCODER_DECODERS_REFUSED = {
    "DiaForConditionalGeneration": "output embeddings are none",
    "EncoderDecoderModel": "another attention_mask",
    "FSMTForConditionalGeneration": "output layer is called with|makes no decoder_input_ids of them",
    "ProphetNetForConditionalGeneration": "labels has shape",
}
ENCODER_DECODER_SAMPLE = ("T5ForConditionalGeneration", "M2M100ForConditionalGeneration", "EncoderDecoderModel")
_walked: set[str] = set()


def some(names: Any, sample: tuple[str, ...]) -> list[Any]:
    """All of them at length, the sample else."""
    return [pytest.param(name, marks=() if name in sample else pytest.mark.nightly) for name in names]


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    transformers.logging.set_verbosity_error()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(threads)


def seeded(model: Any, **inputs: Any) -> Any:
    torch.manual_seed(4)
    return model(**inputs)


def check_gradients(fused: Any, stock: Any) -> None:
    for (name, parameter), own in zip(fused.named_parameters(), stock.parameters(), strict=True):
        actual = torch.zeros_like(own) if parameter.grad is None else parameter.grad
        expected = torch.zeros_like(own) if own.grad is None else own.grad
        scale = expected.abs().max().item()
        assert (actual - expected).abs().max().item() <= 1e-3 * scale + 1e-6, name


def in_quick(name: str) -> bool:
    """One of each kind: plain, capped, tied, scaled, with routers, encoder and decoder, with states in place of attention; and refused."""
    return name in QUICK or name in list(REFUSED)[:1]


@pytest.mark.parametrize("name", [name if in_quick(name) else pytest.param(name, marks=pytest.mark.full) for name in class_names()])
def test_loss_is_the_models_own_or_refused(name: str) -> None:
    if name in NOT_SMALL:
        pytest.skip(f"{name} {NOT_SMALL[name]}")
    stock = tiny_causal_lm(name, routers=name not in WITHOUT_ROUTERS)
    patched = flce.patch(copy.deepcopy(stock))
    fused = return_hidden_states(copy.deepcopy(stock))
    loss_fn = CausalLMLoss(fused, impl="flce")
    inputs = batch()
    if name in REFUSED:
        with pytest.raises(flce.ArgumentError, match=REFUSED[name]):
            loss_fn(fused(**inputs), inputs["labels"])
        with pytest.raises(flce.ArgumentError, match=REFUSED[name]):
            patched(**inputs)
        return
    expected = seeded(stock, **inputs).loss
    expected.backward()
    outputs = seeded(fused, **inputs)
    assert "logits" not in outputs
    loss = loss_fn(outputs, inputs["labels"])
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    check_gradients(fused, stock)
    with_loss = seeded(patched, **inputs)
    with_loss.loss.backward()
    assert with_loss.get("logits") is None and with_loss.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    check_gradients(patched, stock)
    # The second step compares nothing and runs without the output layer.
    again = seeded(fused, **inputs)
    assert "probe_logits" not in again
    assert loss_fn(again, inputs["labels"]).item() == pytest.approx(expected.item(), rel=1e-5)
    with torch.no_grad():
        expected = seeded(stock.eval(), **inputs).loss
        tokens = {key: value for key, value in inputs.items() if key != "labels"}
        assert loss_fn(seeded(fused.eval(), **tokens), inputs["labels"]).item() == pytest.approx(expected.item(), rel=1e-5)
    _walked.add(name)


def compare_losses(name: str, model: Any, refused: str | None) -> int:
    """A step's loss of each batch is the model's own or refused. Returns how many were equal."""
    stock, equal = copy.deepcopy(model), 0
    if refused is not None and "output embeddings" in refused:
        with pytest.raises(flce.ArgumentError, match=refused):
            flce.patch(model)
        return 0
    flce.patch(model)
    for what, inputs in batches(model).items():
        try:
            expected = seeded(stock, **inputs).loss
        except Exception:
            continue  # such as a tokenizer's rule that labels have an end
        try:
            loss = seeded(model, **inputs).loss
        except flce.ArgumentError as error:
            assert refused is not None and re.search(refused, str(error)), f"{name}, {what}: {error}"
            continue
        assert loss.item() == pytest.approx(expected.nan_to_num().item(), rel=1e-5), what
        equal += 1
    return equal


@pytest.mark.parametrize("name", some(class_names(), (*QUICK[:6], *REFUSED)))
def test_masks_padding_and_ignored_sequences(name: str) -> None:
    if name in NOT_SMALL:
        pytest.skip(f"{name} {NOT_SMALL[name]}")
    equal = compare_losses(name, tiny_causal_lm(name, routers=name not in WITHOUT_ROUTERS), REFUSED.get(name))
    assert (equal > 0) is (name not in REFUSED)


@pytest.mark.parametrize("name", some(encoder_decoder_names(), ENCODER_DECODER_SAMPLE))
def test_models_with_an_encoder(name: str) -> None:
    try:
        model = tiny_encoder_decoder(name)
    except Exception as error:
        pytest.skip(f"no tiny {name} can be made: {error}")
    refused = ENCODER_DECODERS_REFUSED.get(name)
    equal = compare_losses(name, model, refused)
    assert equal > 0 or refused is not None or name not in ENCODER_DECODER_SAMPLE


@pytest.mark.full
def test_nearly_every_class_is_walked() -> None:
    names = set(class_names())
    if not _walked & set(list(names)[-5:]):
        pytest.skip("single classes were chosen")
    assert len(_walked) >= 0.9 * len(names)
    assert "auxiliary_loss" in tiny_outputs("MixtralForCausalLM")


def tiny_outputs(name: str) -> Any:
    return return_hidden_states(tiny_causal_lm(name, routers=True))(**batch())
