"""load_stage and save_stage, in one process."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine_checkpoint import assert_same_bits, config_of, save_model, tensors_of
from torch import Tensor, nn

from flce import errors
from flce.engine import PackedBatch, Stage, causal_lm_stage, load_stage, merge_checkpoint, save_stage, shard_checkpoint
from flce.engine._checkpoint_files import INDEX_NAME
from flce.engine._plan import NAMES
from flce.engine._safetensors import bytes_of

transformers = pytest.importorskip("transformers")
st = pytest.importorskip("safetensors.torch")


def stages_of(folder: Path, num_stages: int, **options: Any) -> list[Any]:
    """Stages of the folder's config, with weights of their own."""
    return [causal_lm_stage(folder, stage, num_stages, **options) for stage in range(num_stages)]


def expected_of(model: Any, stage: Any) -> dict[str, Tensor]:
    whole = model.state_dict()
    return {name: whole[name] for name in stage.state_dict()}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("model_type", sorted(NAMES))
def test_every_stage_loads_its_own_files_alone(tmp_path: Path, model_type: str, tied: bool) -> None:
    model = save_model(tmp_path / "whole", model_type, tied=tied, max_shard_size="20KB")
    shard_checkpoint(tmp_path / "whole", tmp_path / "three", 3, shards_per_stage=2)
    shard_checkpoint(tmp_path / "whole", tmp_path / "one", 1)
    for stage in stages_of(tmp_path / "whole", 3):
        own = tmp_path / f"own{stage.stage}"
        shutil.copytree(tmp_path / "three", own)
        for file in own.glob("model-stage-*"):
            if f"stage-{stage.stage:02d}-of" not in file.name:
                file.unlink()
        report = load_stage(stage, own)
        assert_same_bits(stage.state_dict(), expected_of(model, stage))
        assert len(report.files) == 2 and set(report.loaded) == set(stage.state_dict())
        assert not (report.initialized or report.dropped)
    for folder in ("whole", "three"):
        (empty,) = [causal_lm_stage(tmp_path / "whole", 1, 3, device="meta")]
        load_stage(empty, tmp_path / folder)
        assert_same_bits(empty.state_dict(), expected_of(model, empty))
        assert all(parameter.requires_grad for parameter in empty.parameters())
    for folder, num_stages in (("whole", 3), ("one", 1), ("whole", 1)):
        for stage in stages_of(tmp_path / "whole", num_stages):
            load_stage(stage, tmp_path / folder)
            assert_same_bits(stage.state_dict(), expected_of(model, stage))
            ends = stage.is_first and stage.is_last and tied
            assert not ends or stage.head.weight is stage.get_parameter(stage.plan.names.embedding)


def test_a_whole_checkpoint_is_read_where_the_stage_needs_it(tmp_path: Path) -> None:
    """The files of other stages' tensors may be missing."""
    model = save_model(tmp_path / "whole", max_shard_size="10KB")
    stage = causal_lm_stage(tmp_path / "whole", 1, 3)
    index = json.loads((tmp_path / "whole" / INDEX_NAME).read_text())
    needed = {index["weight_map"][name] for name in stage.state_dict()}
    removed = [file for file in (tmp_path / "whole").glob("*.safetensors") if file.name not in needed]
    assert removed
    for file in removed:
        file.unlink()
    load_stage(stage, tmp_path / "whole")
    assert_same_bits(stage.state_dict(), expected_of(model, stage))


def test_a_tied_weight_that_a_whole_checkpoint_has_twice_has_to_be_the_same(tmp_path: Path) -> None:
    model = save_model(tmp_path / "in", tied=True)
    file = tmp_path / "in" / "model.safetensors"
    tensors = tensors_of(tmp_path / "in")
    embedding = tensors["model.embed_tokens.weight"]
    st.save_file(tensors | {"lm_head.weight": embedding.clone()}, file, {"format": "pt"})
    for stage in stages_of(tmp_path / "in", 1) + stages_of(tmp_path / "in", 2):
        load_stage(stage, tmp_path / "in")
        assert_same_bits(stage.state_dict(), expected_of(model, stage))
    st.save_file(tensors | {"lm_head.weight": embedding + 1}, file, {"format": "pt"})
    for stage in stages_of(tmp_path / "in", 1) + stages_of(tmp_path / "in", 2):
        with pytest.raises(errors.CheckpointError, match=r"'model.embed_tokens.weight' and 'lm_head.weight' differ, and config.json ties"):
            load_stage(stage, tmp_path / "in")
    for stage in stages_of(tmp_path / "in", 2, critic=True):  # a critic has no such head
        load_stage(stage, tmp_path / "in", init_critic_from_actor=True)


def test_another_number_of_stages_names_both_and_the_command(tmp_path: Path) -> None:
    save_model(tmp_path / "in")
    shard_checkpoint(tmp_path / "in", tmp_path / "four", 4)
    stage = causal_lm_stage(tmp_path / "in", 0, 2)
    with pytest.raises(errors.CheckpointError) as refused:
        load_stage(stage, tmp_path / "four")
    for part in ("cut into 4 stages", "one of 2", f"flce-shard-checkpoint {tmp_path}/four {tmp_path}/four-2 --stages 2"):
        assert part in str(refused.value)
    shard_checkpoint(tmp_path / "four", tmp_path / "four-2", 2)
    load_stage(stage, tmp_path / "four-2")


def test_a_tensor_of_no_stage_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "in")
    tensors = tensors_of(tmp_path / "in") | {"visual.weight": torch.ones(2)}
    st.save_file(tensors, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    stage = causal_lm_stage(tmp_path / "in", 0, 2)
    with pytest.raises(errors.ArgumentError, match=r"'visual.weight' belongs to no stage"):
        load_stage(stage, tmp_path / "in")


def change(folder: Path, stage: int, edit: Any) -> None:
    (file,) = folder.glob(f"model-stage-{stage:02d}-*")
    tensors = st.load_file(file)
    edit(tensors)
    st.save_file(tensors, file, {"format": "pt"})
    index = json.loads((folder / INDEX_NAME).read_text())
    kept = {name: other for name, other in index["weight_map"].items() if other != file.name}
    index["weight_map"] = kept | dict.fromkeys(tensors, file.name)
    (folder / INDEX_NAME).write_text(json.dumps(index))


def test_names_shapes_and_dtypes_have_to_fit(tmp_path: Path) -> None:
    model = save_model(tmp_path / "in")
    shard_checkpoint(tmp_path / "in", tmp_path / "fine", 2)
    name = "model.layers.0.mlp.up_proj.weight"

    def folder(edit: Any) -> Path:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        shutil.copytree(tmp_path / "fine", tmp_path / "out")
        change(tmp_path / "out", 0, edit)
        return tmp_path / "out"

    stage = causal_lm_stage(tmp_path / "in", 0, 2)
    before = {key: tensor.clone() for key, tensor in stage.state_dict().items()}
    refusals: list[tuple[Any, type[Exception], str]] = [
        (lambda tensors: tensors.pop(name), errors.CheckpointError, f"lacks '{name}'"),
        (lambda tensors: tensors.update({"model.layers.0.extra": torch.ones(2)}), errors.CheckpointError, "has no 'model.layers.0.extra'"),
        (lambda tensors: tensors.update({name: torch.ones(3, 2)}), errors.ShapeError, r"shape \[3, 2\], and stage 0 has \[48, 32\]"),
        (lambda tensors: tensors.update({name: torch.ones(48, 32)}), errors.DTypeError, "is torch.float32, and stage 0 has torch.bfloat16"),
        (lambda tensors: tensors.update({name: torch.ones(48, 32, dtype=torch.int8)}), errors.DTypeError, "is torch.int8"),
    ]
    for edit, kind, message in refusals:
        with pytest.raises(kind, match=message):
            load_stage(stage, folder(edit))
        assert_same_bits(stage.state_dict(), before)
    with pytest.raises(errors.DTypeError, match=r"is torch\.int8"):
        load_stage(stage, tmp_path / "out", convert_dtype=True)
    wide = causal_lm_stage(tmp_path / "in", 0, 2, dtype=torch.float32)
    load_stage(wide, tmp_path / "fine", convert_dtype=True)
    assert_same_bits(wide.state_dict(), {key: tensor.float() for key, tensor in expected_of(model, wide).items()})


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_a_critic_starts_from_a_language_model_when_it_is_asked_to(
    tmp_path: Path, tied: bool, cut: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = save_model(tmp_path / "in", tied=tied)
    if cut:
        shard_checkpoint(tmp_path / "in", tmp_path / "cut", 2)
    folder = tmp_path / ("cut" if cut else "in")
    first, last = stages_of(tmp_path / "in", 2, critic=True)
    load_stage(first, folder)
    with pytest.raises(errors.CheckpointError, match=r"lacks 'score.weight'.*init_critic_from_actor=True"):
        load_stage(last, folder)
    with torch.no_grad():
        last.score.weight.fill_(float("nan"))
    with caplog.at_level(logging.WARNING, "flce"):
        report = load_stage(last, folder, init_critic_from_actor=True)
    assert report.initialized == ("score.weight",)
    assert "score.weight initialised" in caplog.text
    assert (report.dropped == ("lm_head.weight",)) == (not tied)
    assert 0 < last.score.weight.float().std() < 0.05
    layers = {name: tensor for name, tensor in last.state_dict().items() if name != "score.weight"}
    assert_same_bits(layers, {name: model.state_dict()[name] for name in layers})
    empty = causal_lm_stage(tmp_path / "in", 1, 2, critic=True, device="meta")
    load_stage(empty, folder, init_critic_from_actor=True)
    assert not any(parameter.is_meta for parameter in empty.parameters())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_reward_models_checkpoint_keeps_its_head(tmp_path: Path, tied: bool) -> None:
    config = config_of("llama", tied=tied)
    config.num_labels, config.pad_token_id = 1, 0
    model = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "in")
    shard_checkpoint(tmp_path / "in", tmp_path / "out", 2)
    stages = stages_of(tmp_path / "out", 2, critic=True, dtype=torch.float32)
    for stage in stages:
        load_stage(stage, tmp_path / "out")
        assert_same_bits(stage.state_dict(), expected_of(model, stage))
    save_stage(stages, tmp_path / "saved", files_from=tmp_path / "out")
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert_same_bits(again.state_dict(), model.state_dict())
    merge_checkpoint(tmp_path / "out", tmp_path / "merged")
    assert_same_bits(tensors_of(tmp_path / "merged"), tensors_of(tmp_path / "in"))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("model_type", ["gpt2", "qwen3"])
def test_saved_stages_are_the_tools(tmp_path: Path, model_type: str, tied: bool) -> None:
    model = save_model(tmp_path / "in", model_type, tied=tied)
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    for num_stages in (1, 2):
        saved, tools = tmp_path / f"saved{num_stages}", tmp_path / f"tools{num_stages}"
        shard_checkpoint(tmp_path / "in", tools, num_stages, shards_per_stage=2)
        stages = stages_of(tools, num_stages)
        for stage in stages:
            load_stage(stage, tools)
        save_stage(stages, saved, shards_per_stage=2, files_from=tmp_path / "in")
        assert_same_bits(tensors_of(saved), tensors_of(tools))
        indexes = [json.loads((folder / INDEX_NAME).read_text()) for folder in (saved, tools)]
        assert indexes[0]["metadata"] == indexes[1]["metadata"]
        assert sorted(file.name for file in saved.iterdir()) == sorted(file.name for file in tools.iterdir())
        again = transformers.AutoModelForCausalLM.from_pretrained(saved)
        assert again.dtype == torch.bfloat16
        assert_same_bits(again.state_dict(), model.state_dict())
        merge_checkpoint(saved, tmp_path / f"merged{num_stages}")
        assert_same_bits(tensors_of(tmp_path / f"merged{num_stages}"), tensors_of(tmp_path / "in"))
        with pytest.raises(errors.ArgumentError, match="exists and is not empty"):
            save_stage(stages, saved)
        save_stage(stages, saved, overwrite=True)
        load_stage(stages[0], saved)


class OwnStage(Stage):
    """A user's stage, with names of its own."""

    def __init__(self, stage: int, num_stages: int):
        super().__init__()
        self.stage, self.num_stages, self.hidden_size, self.dtype = stage, num_stages, 4, torch.float32
        self.add_module(f"block{stage}", nn.Linear(4, 4))

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        return x


def test_stages_of_ones_own_are_saved_and_loaded(tmp_path: Path) -> None:
    stages = [OwnStage(stage, 2) for stage in range(2)]
    save_stage(stages, tmp_path / "out")
    for stage in stages:
        again = OwnStage(stage.stage, 2)
        load_stage(again, tmp_path / "out")
        assert_same_bits(again.state_dict(), stage.state_dict())
    merge_checkpoint(tmp_path / "out", tmp_path / "merged")
    load_stage(again, tmp_path / "merged")


def test_stages_that_make_no_model_are_not_saved(tmp_path: Path) -> None:
    save_model(tmp_path / "in", tied=True)
    stages = stages_of(tmp_path / "in", 2)
    for given, message in (
        (stages[:1], r"have the stages \[0\]; they must be 0 to 1"),
        ([stages[0], stages[0], stages[1]], r"stages \[0, 0, 1\]"),
        ([stages[0], causal_lm_stage(tmp_path / "in", 2, 3)], "of different models"),
        ([stages[0], causal_lm_stage(tmp_path / "in", 1, 2, device="meta")], "on meta"),
    ):
        with pytest.raises(errors.ArgumentError, match=message):
            save_stage(given, tmp_path / "out")
    with torch.no_grad():
        stages[1].tied_weight[0, 0] += 1
    with pytest.raises(errors.ArgumentError, match="are copies of one weight, and differ"):
        save_stage(stages, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_bytes_to_be_written_live_as_long_as_their_view() -> None:
    """Bytes of a tensor that has to be copied first: one on a GPU, or one that is not contiguous."""
    tensors = [torch.randn(64, 48, generator=torch.Generator().manual_seed(n)).t() for n in range(50)]
    views = [bytes_of(tensor) for tensor in tensors]
    for tensor, view in zip(tensors, views, strict=True):
        assert bytes(view) == tensor.contiguous().numpy().tobytes()
