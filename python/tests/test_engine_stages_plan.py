"""Layers of each stage, counted from transformers' own models."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from flce import errors
from flce.engine._plan import NAMES, balance, plan_stages

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 5, "num_attention_heads": 2}
CONFIGS = {
    "llama": lambda **more: transformers.LlamaConfig(**SMALL | more),
    "mistral": lambda **more: transformers.MistralConfig(**SMALL | {"num_key_value_heads": 1} | more),
    "qwen2": lambda **more: transformers.Qwen2Config(**SMALL | more),
    "qwen3": lambda **more: transformers.Qwen3Config(**SMALL | {"head_dim": 8} | more),
    "gemma2": lambda **more: transformers.Gemma2Config(**SMALL | {"num_key_value_heads": 1, "head_dim": 8} | more),
    "gpt2": lambda **more: transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=5, n_head=2, n_positions=32, **more),
}


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_of_a_model_belongs_to_a_stage(family: str, tied: bool) -> None:
    config = CONFIGS[family](tie_word_embeddings=tied)
    model = transformers.AutoModelForCausalLM.from_config(config)
    plan = plan_stages(config, 3)
    assert plan.tied is tied and plan.starts[0] == 0 and plan.starts[-1] == 5
    for name in model.state_dict():
        stages = plan.stages_of(name)
        if tied and name in (plan.names.embedding, plan.names.head):
            assert stages == (0, 2)
        else:
            assert len(stages) == 1


@pytest.mark.parametrize("family", NAMES)
def test_the_largest_stage_is_as_small_as_any_cut_makes_it(family: str) -> None:
    config = CONFIGS[family](tie_word_embeddings=True)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    names = NAMES[family]
    sizes = {name: p.numel() for name, p in model.named_parameters(remove_duplicate=False)}
    layers = [sum(n for name, n in sizes.items() if name.startswith(f"{names.layer}{i}.")) for i in range(5)]
    first = sum(n for name, n in sizes.items() if name.startswith(names.first))
    last = sum(n for name, n in sizes.items() if name.startswith(names.last))
    assert first + last + sum(layers) == sum(sizes.values()) and last > SMALL["vocab_size"] * 16

    def largest(starts: tuple[int, ...]) -> int:
        costs = [sum(layers[a:b]) for a, b in itertools.pairwise(starts)]
        costs[0] += first
        costs[-1] += last
        return max(costs)

    for num_stages in (1, 2, 3, 5):
        cuts = [(0, *inner, 5) for inner in itertools.combinations(range(1, 5), num_stages - 1)]
        assert largest(plan_stages(config, num_stages).starts) == min(map(largest, cuts))


def test_a_heavy_head_leaves_the_last_stage_fewer_layers() -> None:
    assert balance([10] * 8, 0, 40, 2) == (0, 6, 8)
    assert plan_stages(CONFIGS["llama"](vocab_size=2000), 3).starts == (0, 1, 4, 5)


def test_stages_between_an_embedding_and_a_head_of_many_layers_size_are_even() -> None:
    starts = balance([50] * 28, 311, 311, 8)  # Qwen3-1.7B, in millions
    assert starts[:2] == (0, 1) and starts[-2:] == (27, 28)
    assert sorted(b - a for a, b in itertools.pairwise(starts[1:-1])) == [4, 4, 4, 4, 5, 5]


def test_a_folder_with_a_config_is_planned_like_the_config(tmp_path) -> None:
    config = CONFIGS["qwen3"](num_hidden_layers=4)
    config.save_pretrained(tmp_path)
    assert plan_stages(tmp_path, 2) == plan_stages(config, 2) == plan_stages(str(tmp_path), 2)


def test_what_has_no_plan_is_refused_by_name(tmp_path) -> None:
    with pytest.raises(errors.ArgumentError, match=r"num_stages is 6; a model of 5 layers has 1 to 5 stages"):
        plan_stages(CONFIGS["llama"](), 6)
    with pytest.raises(errors.ArgumentError, match=r"model_type 'opt'; stages are made of gemma2, gpt2, llama, mistral, qwen2, qwen3"):
        plan_stages(transformers.OPTConfig(), 2)
    with pytest.raises(errors.ArgumentError, match=r"must be a folder that has a config\.json"):
        plan_stages(tmp_path, 2)
    with pytest.raises(errors.ArgumentError, match=r"config is a dict"):
        plan_stages(json.loads("{}"), 2)
    with pytest.raises(errors.ArgumentError, match=r"'model\.layers\.9\.x' belongs to no stage .* model\.layers\.0 to 4"):
        plan_stages(CONFIGS["llama"](), 2).stages_of("model.layers.9.x")
