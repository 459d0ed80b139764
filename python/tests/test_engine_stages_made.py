"""Stages that are made from a config; critics; what no stage is made of."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from engine_stage_support import LENGTHS, MODELS, config_of, logits_of, model_of, near, own, packed, run, stages_of

from flce import errors
from flce.engine import causal_lm_stage


@pytest.mark.parametrize("name", ["llama-rope", "qwen3", "gemma2", "gpt2"])
def test_stages_of_a_config_are_the_same_model_for_every_number_of_stages(name: str) -> None:
    config = config_of(name, tie_word_embeddings=name != "qwen3")
    model = transformers.AutoModelForCausalLM.from_config(config)
    ids, batch = packed(LENGTHS)
    outputs, weights = [], []
    for num_stages in (1, 2, 4):
        state = torch.random.get_rng_state()
        stages = [causal_lm_stage(config, stage, num_stages, seed=3) for stage in range(num_stages)]
        assert torch.equal(torch.random.get_rng_state(), state)
        whole = {}
        for stage in stages:
            for key, value in stage.state_dict().items():
                assert torch.equal(whole.setdefault(key, value), value)
        weights.append(whole)
        if stages[0].tied_weight is not None:
            assert torch.equal(stages[0].tied_weight, stages[-1].tied_weight) and stages[0].tied_weight is not stages[-1].tied_weight
        outputs.append(logits_of(stages, run(stages, ids, batch)))
        model.load_state_dict(whole)
        near(outputs[-1], own(model, ids, LENGTHS)[1])
    assert all(w.keys() == weights[0].keys() and all(torch.equal(w[k], weights[0][k]) for k in w) for w in weights)
    other = causal_lm_stage(config, 0, 1, seed=4)
    assert not torch.equal(next(other.parameters()), next(stages[0].parameters()))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_a_configs_weights_are_spread_as_the_models_own(name: str) -> None:
    config = config_of(name)
    model = transformers.AutoModelForCausalLM.from_config(config)
    made = causal_lm_stage(config, 0, 1).state_dict()
    for key, value in model.state_dict().items():
        if value.numel() < 200 or value.std() == 0:  # few to tell by, or all the same: norms and biases
            assert value.std() > 0 or torch.equal(made[key], value), key
        else:
            assert 0.8 < made[key].std() / value.std() < 1.25 and not torch.equal(made[key], value), key


def test_a_config_says_its_dtype_and_a_stage_may_have_another(tmp_path) -> None:
    config = config_of("qwen3", dtype="bfloat16")
    config.save_pretrained(tmp_path)
    assert causal_lm_stage(tmp_path, 1, 2).dtype == torch.bfloat16
    stage = causal_lm_stage(tmp_path, 0, 2, dtype=torch.float64)
    assert {p.dtype for p in stage.parameters()} == {torch.float64}
    frequencies = stage.model.rotary_emb.inv_freq.clone()
    stage.to(torch.bfloat16)
    assert {p.dtype for p in stage.parameters()} == {torch.bfloat16}
    assert stage.model.rotary_emb.inv_freq.dtype == torch.float32 and torch.equal(stage.model.rotary_emb.inv_freq, frequencies)


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "llama-yarn"])
def test_stages_on_the_meta_device_take_a_state_dict(name: str) -> None:
    model = model_of(name)
    ids, batch = packed(LENGTHS)
    stages = [causal_lm_stage(model.config, stage, 2, device="meta") for stage in range(2)]
    assert all(p.is_meta for stage in stages for p in stage.parameters())
    for stage in stages:
        stage.load_state_dict({key: model.state_dict()[key] for key in stage.state_dict()}, assign=True)
    near(run(stages, ids, batch), own(model, ids, LENGTHS)[0])


def test_a_model_is_taken_over_and_not_copied() -> None:
    model = model_of("llama", tie_word_embeddings=True)
    parameters = {id(p) for p in model.parameters()}
    stages = [causal_lm_stage(model, stage, 2) for stage in range(2)]
    fresh = [key for stage in stages for key, p in stage.named_parameters() if id(p) not in parameters]
    assert fresh == ["lm_head.weight"]
    assert model.config._attn_implementation == "eager" and model.lm_head.weight is model.model.embed_tokens.weight
    with pytest.raises(
        errors.ArgumentError, match=r"a LlamaAttention that a flce\.engine stage has taken over is called without the stage"
    ):
        model(input_ids=torch.ones(1, 3, dtype=torch.long))
    model.requires_grad_(False)
    assert not any(p.requires_grad for p in causal_lm_stage(model, 1, 2).parameters())
    assert not causal_lm_stage(model.eval(), 0, 2).training


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt2"])
def test_a_critics_last_stage_has_a_row_of_values(name: str) -> None:
    model = model_of(name, tie_word_embeddings=True)
    ids, batch = packed(LENGTHS)
    stages = stages_of(model, 2, critic=True)
    assert stages[0].head is None and stages[0].tied_weight is stages[1].tied_weight is None
    assert list(stages[1].head.weight.shape) == [1, 16] and stages[1].head.bias is None
    assert "score.weight" in stages[1].state_dict() and "lm_head.weight" not in stages[1].state_dict()
    assert stages[1].softcap == 0.0 and stages[1].logit_scale == 1.0
    assert 0.03 < stages[1].head.weight.std() < 1.0
    assert stages[0].plan == stages_of(model, 2)[0].plan
    hidden = run(stages, ids, batch)
    near(hidden, own(model, ids, LENGTHS)[0])
    stages[1].head(hidden).sum().backward()
    assert stages[1].head.weight.grad is not None
    of_config = [causal_lm_stage(model.config, 1, 2, critic=True, seed=seed).head.weight for seed in (0, 1)]
    assert torch.equal(of_config[0], stages[1].head.weight) and not torch.equal(*of_config)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_sequence_classifier_of_one_label_is_a_critic(name: str) -> None:
    config = config_of(name, num_labels=1, pad_token_id=0)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    ids, batch = packed([6, 4])
    ids = ids.clamp(min=1)
    expected = torch.cat([model(input_ids=part[None]).logits[0] for part in ids.split([6, 4])])
    stages = stages_of(model, 2, critic=True)
    assert {key for stage in stages for key in stage.state_dict()} == set(model.state_dict())
    near(stages[1].head(run(stages, ids, batch))[[5, 9]].squeeze(1), expected)


def test_what_stages_are_not_made_of_is_refused_by_name() -> None:
    model = model_of("llama")
    for stage in (-1, 2, 1.0):
        with pytest.raises(errors.ArgumentError, match=r"stage is .*; it must be 0 to 1, with num_stages=2"):
            causal_lm_stage(model, stage, 2)
    with pytest.raises(errors.ArgumentError, match="num_stages is 5; a model of 4 layers"):
        causal_lm_stage(model, 0, 5)
    with pytest.raises(errors.ArgumentError, match="model_type 'opt'; stages are made of gemma2, gpt2, llama"):
        causal_lm_stage(transformers.OPTConfig(), 0, 2)
    with pytest.raises(errors.ArgumentError, match="model_or_config is a LlamaModel; a stage is made of a LlamaForCausalLM"):
        causal_lm_stage(model.model, 0, 2)
    with pytest.raises(errors.ArgumentError, match="model_or_config is a Linear; it must be a model of transformers itself"):
        causal_lm_stage(torch.nn.Linear(2, 2), 0, 2)
    for name, more, match in (
        ("llama", {"logit_scale": 0.5}, r"config asks for \{'logit_scale': 0.5\} .* models of type .llama. do not apply"),
        ("qwen2", {"final_logit_softcapping": 30.0}, r"config asks for \{'softcap': 30.0\}"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is set"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
        ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is set"),
    ):
        with pytest.raises(errors.ArgumentError, match=match):
            causal_lm_stage(config_of(name, **more), 0, 2)
    untied = copy.deepcopy(model)
    untied.config.tie_word_embeddings = True
    with pytest.raises(errors.ArgumentError, match=r"lm_head.weight is not model.embed_tokens.weight; call model.tie_weights\(\)"):
        causal_lm_stage(untied, 0, 2)
    untied.tie_weights()
    untied.config.tie_word_embeddings = False
    with pytest.raises(errors.ArgumentError, match=r"False, but lm_head.weight is model.embed_tokens.weight; .* config's to True"):
        causal_lm_stage(untied, 0, 2)
    short = copy.deepcopy(model)
    del short.model.layers[3]
    with pytest.raises(errors.ArgumentError, match=r"has 3 layers, and its config 4"):
        causal_lm_stage(short, 0, 2)
    with pytest.raises(errors.ArgumentError, match=r"has 2 labels; a critic's values are one"):
        causal_lm_stage(transformers.LlamaForSequenceClassification(config_of("llama")), 0, 2, critic=True)
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(config_of("llama"))
    with pytest.raises(errors.ArgumentError, match="parameters on the meta device; load them first, or give the config"):
        causal_lm_stage(empty, 0, 2)


def test_a_model_with_adapters_is_refused() -> None:
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(target_modules=["q_proj"], r=2)
    with pytest.raises(errors.ArgumentError, match=r"Merge adapters first \(merge_and_unload\(\)\)"):
        causal_lm_stage(peft.get_peft_model(model_of("llama"), adapters), 0, 2)
    model = model_of("llama")
    try:
        model.add_adapter(adapters)
    except ValueError as problem:  # transformers may ask for a PEFT that is not published yet
        pytest.skip(str(problem))
    with pytest.raises(errors.ArgumentError, match="model_or_config has adapters; merge them first"):
        causal_lm_stage(model, 0, 2)


def test_every_family_has_a_model_here() -> None:
    from flce.engine._plan import NAMES

    assert {config_of(name).model_type for name in MODELS} == set(NAMES)
