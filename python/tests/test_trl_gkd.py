"""flce.trl in the place of GKDTrainer's loss: the trainer with its own beside it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flce

pytest.importorskip("trl", minversion="1.16")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # experimental
    import trl.experimental.gkd.gkd_trainer as trl_gkd
    from trl.experimental.gkd import GKDConfig, GKDTrainer

import trl_support
from datasets import Dataset
from peft import LoraConfig

import flce.trl

OWN = GKDTrainer.compute_loss
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # everything is tiny
    yield
    torch.set_num_threads(threads)
    flce.trl.unpatch()
    assert GKDTrainer.compute_loss is OWN


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Ids padded on the right, and labels of the last half of each row."""
    ids = [row["input_ids"] for row in rows]
    longest = max(map(len, ids))
    padded = torch.tensor([row + [trl_support.WORDS] * (longest - len(row)) for row in ids])
    attention = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids])
    labels = torch.tensor([[-100] * (len(row) // 2) + row[len(row) // 2 :] + [-100] * (longest - len(row)) for row in ids])
    return {"input_ids": padded, "attention_mask": attention, "labels": labels, "prompts": padded, "prompt_attention_mask": attention}


def trainer(folder: Path, kind: str = "llama", lora: str = "", **options: Any) -> Any:
    arguments = GKDConfig(output_dir=str(folder), **{**trl_support.OF_A_RUN, "lmbda": 0.0, **options})
    tokenizer = trl_support.tokenizer()
    data = Dataset.from_dict({"input_ids": [tokenizer(text)["input_ids"] for text in trl_support.TEXTS]})
    given = {"args": arguments, "train_dataset": data, "data_collator": collate, "processing_class": tokenizer}
    adapter = LoraConfig(target_modules=[lora], r=4, init_lora_weights=False) if lora else None
    torch.manual_seed(5)
    return GKDTrainer(trl_support.model(kind=kind), trl_support.model(seed=1, hidden_size=24), **given, peft_config=adapter)


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.5},
        {"beta": 0.0, "gradient_accumulation_steps": 2, "kind": "gemma2"},
        {"beta": 1.0, "kind": "cohere"},
        {"lora": "v_proj"},
    ],
    ids=["mixture", "forward_with_a_cap", "reverse_with_a_scale", "lora"],
)
def test_ten_steps_are_those_of_trl(tmp_path: Path, options: dict[str, Any]) -> None:
    expected = trl_support.train(trainer(tmp_path / "own", **options))
    before = flce.trl.calls()
    with flce.trl.patch():
        actual = trl_support.train(trainer(tmp_path / "flce", **options))
    steps = trl_support.STEPS * options.get("gradient_accumulation_steps", 1)
    assert flce.trl.calls() == {"fused": before["fused"] + steps, "own": before["own"]}
    trl_support.compare(actual, expected)


def both_losses(made: Any, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = {**collate(list(made.train_dataset)[:4]), **changes}
    with flce.trl.patch():
        return made.compute_loss(made.model, inputs), OWN(made, made.model, inputs)


def test_no_token_counts(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    loss, own = both_losses(made, labels=torch.full_like(collate(list(made.train_dataset)[:4])["labels"], -100))
    loss.backward()
    assert loss == own == 0 and not any(p.grad.any() for p in made.model.parameters() if p.grad is not None)


class OtherDivergence(GKDTrainer):  # type: ignore[misc]
    @staticmethod
    def generalized_jsd_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * GKDTrainer.generalized_jsd_loss(*args, **kwargs)


def own_head(made: Any) -> None:
    made.model.get_output_embeddings().register_forward_hook(lambda module, args, output: output * 2)


def own_logits(made: Any) -> None:
    def scaled(module: Any, args: Any, outputs: Any) -> Any:
        outputs.logits = outputs.logits * 1.001
        return outputs

    both_losses(made)  # the first step shows a model that nothing is done to
    made.model.register_forward_hook(scaled)


def head_of_zeros(made: Any) -> None:
    with torch.no_grad():
        made.model.get_output_embeddings().weight.zero_()


def own_config(made: Any) -> None:
    made.model.config.logit_scale = 0.5


def own_class(made: Any) -> None:
    made.__class__ = OtherDivergence


def other_dtype(made: Any) -> None:
    made.teacher_model.to(torch.bfloat16)


def near_an_end(made: Any) -> None:
    made.beta = 1e-5


def own_divergence(made: Any) -> None:
    made.generalized_jsd_loss = OtherDivergence.generalized_jsd_loss


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (own_head, "is not taken"),
        (own_logits, "what its config says"),
        (head_of_zeros, "does not show"),
        (own_config, "what its config says"),
        (own_class, "OtherDivergence has a generalized_jsd_loss of its own"),
        (other_dtype, "the teacher in torch.bfloat16"),
        (near_an_end, "no digits"),
        (own_divergence, "GKDTrainer has a generalized_jsd_loss of its own"),
    ],
    ids=["hook", "logits", "zeros", "config", "subclass", "dtype", "beta", "divergence"],
)
def test_trls_own_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Any, says: str) -> None:
    made = trainer(tmp_path)
    change(made)
    before = flce.trl.calls()
    with caplog.at_level(logging.WARNING, "flce"):
        loss, own = both_losses(made)
    assert torch.equal(loss, own) and flce.trl.calls() == {"fused": before["fused"], "own": before["own"] + 1}
    assert says in caplog.text


def test_outputs_are_trls_own(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    with flce.trl.patch():
        _, outputs = made.compute_loss(made.model, collate(list(made.train_dataset)[:4]), return_outputs=True)
    assert outputs.logits.shape[-1] == trl_support.WORDS + 3


def test_another_form_is_left_alone(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):  # type: ignore[no-untyped-def]
        return 0

    monkeypatch.setattr(flce.trl._own.GKD, "known", None)
    monkeypatch.setattr(GKDTrainer, "compute_loss", compute_loss)
    with caplog.at_level(logging.WARNING, "flce"), flce.trl.patch():
        assert trl_gkd.GKDTrainer.compute_loss is compute_loss
    assert "compute_loss has another body than that of 1.16.0" in caplog.text
    monkeypatch.undo()
