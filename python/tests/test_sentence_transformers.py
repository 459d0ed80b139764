"""The stand-in for sentence-transformers' in-batch loss against the package's own: values, gradients, and steps of its trainer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_support import cases_passed
from torch import Tensor, nn

import flce
from flce.compat import sentence_transformers as stand_in

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed; tools/setup.sh --trainers fetches it")
import sentence_transformers
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.util import cos_sim, dot_score, euclidean_sim

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
FORMS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "dot": {"similarity_fct": dot_score, "scale": 1.5},
    "cosines by name": {"similarity_fct": cos_sim, "scale": 50.0},
    "both ways": {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"},
    "both ways together": {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "joint"},
    "no strength": {"hardness_mode": "hard_negatives"},
    "repeated": {"directions": ("query_to_doc", "query_to_doc")},
}


class Embeddings(nn.Module):
    """Gives a column's own tensor as its embedding."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features["input_ids"]}


@pytest.mark.parametrize("columns", [2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients(form: str, columns: int) -> None:
    embeddings = [torch.randn(19, 32, requires_grad=True) for _ in range(columns)]
    own = losses.MultipleNegativesRankingLoss(Embeddings(), **FORMS[form])
    mine = stand_in.MultipleNegativesRankingLoss(Embeddings(), **FORMS[form])
    right = own.compute_loss_from_embeddings(embeddings, torch.zeros(1))
    loss = mine([{"input_ids": each} for each in embeddings], None)
    torch.testing.assert_close(loss, right)
    for got, expected in zip(torch.autograd.grad(loss, embeddings), torch.autograd.grad(right, embeddings), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    assert mine.get_config_dict() == own.get_config_dict() and mine.temperature == own.temperature


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"similarity_fct": euclidean_sim}, "similarity_fct is 'euclidean_sim'"),
        ({"similarity_fct": lambda a, b: a @ b.T}, "similarity_fct is '<lambda>'"),
        ({"directions": ("query_to_doc", "query_to_query")}, "leave pairs out"),
        ({"directions": ("doc_to_query",)}, "directions is"),
        ({"hardness_mode": "all_negatives", "hardness_strength": 5.0}, "hardness_mode is 'all_negatives'"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(flce.ArgumentError, match=says):
        stand_in.MultipleNegativesRankingLoss(Embeddings(), **given)


@pytest.mark.parametrize("given", [{"hardness_mode": "some"}, {"hardness_strength": -1.0}, {"scale": 0.0}, {"partition_mode": "both"}])
def test_wrong_for_the_package_too(given: dict[str, Any]) -> None:
    for kind in (losses.MultipleNegativesRankingLoss, stand_in.MultipleNegativesRankingLoss):
        with pytest.raises(ValueError):
            kind(Embeddings(), **given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_embeddings_of_16_bits(dtype: torch.dtype) -> None:
    """Large ones, and a zero, whose norms fp16 does not have."""
    embeddings = [(torch.randn(9, 64) * 3000).to(dtype).requires_grad_() for _ in range(2)]
    with torch.no_grad():
        embeddings[0][3] = 0
    own, mine = (kind(Embeddings()) for kind in (losses.MultipleNegativesRankingLoss, stand_in.MultipleNegativesRankingLoss))
    right, loss = (each.compute_loss_from_embeddings(embeddings, torch.zeros(1)) for each in (own, mine))
    torch.testing.assert_close(loss, right)
    for got, expected in zip(torch.autograd.grad(loss, embeddings), torch.autograd.grad(right, embeddings), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("form", ["as it comes", "both ways", "both ways together"])
def test_columns_of_other_lengths(form: str) -> None:
    """One pair, and documents without an anchor."""
    own, mine = (kind(Embeddings(), **FORMS[form]) for kind in (losses.MultipleNegativesRankingLoss, stand_in.MultipleNegativesRankingLoss))
    for lengths in ((1, 1), (1, 1, 1), (5, 8)):
        if lengths == (5, 8) and form == "both ways":
            continue  # refused by the package
        embeddings = [torch.randn(length, 16) for length in lengths]
        right, loss = (each.compute_loss_from_embeddings(embeddings, torch.zeros(1)) for each in (own, mine))
        torch.testing.assert_close(loss, right, rtol=1e-5, atol=1e-6)
    with pytest.raises(flce.ShapeError, match="3 positives of 5 anchors"):
        mine.compute_loss_from_embeddings([torch.randn(5, 8), torch.randn(3, 8), torch.randn(7, 8)])


def encoder(folder: Path) -> Any:
    """A BERT of two small layers with a vocabulary of words, made here."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", *(f"w{number}" for number in range(60))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    config = BertConfig(vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    BertModel(config).save_pretrained(folder)
    return sentence_transformers.SentenceTransformer(str(folder), device="cpu")


def test_ten_steps_of_its_trainer(tmp_path: Path) -> None:
    from datasets import Dataset

    model = encoder(tmp_path / "model")
    sentences = [f"w{number} w{(number * 7) % 60} w{(number * 11) % 60}" for number in range(60)]
    rows = {
        "anchor": sentences,
        "positive": [" ".join(reversed(text.split())) for text in sentences],
        "negative": sentences[1:] + sentences[:1],
    }
    found = []
    for kind in (losses.MultipleNegativesRankingLoss, stand_in.MultipleNegativesRankingLoss):
        trained = copy.deepcopy(model)
        arguments = sentence_transformers.SentenceTransformerTrainingArguments(
            str(tmp_path / kind.__module__),
            max_steps=10,
            per_device_train_batch_size=12,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            seed=1,
            disable_tqdm=True,
        )
        trainer = sentence_transformers.SentenceTransformerTrainer(trained, arguments, Dataset.from_dict(rows), loss=kind(trained))
        trainer.train()
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(found[0]) == 10 and found[0][-1] < found[0][0]
    assert found[1] == pytest.approx(found[0], rel=2e-3, abs=2e-4)


@pytest.mark.nightly("python/flce/compat/sentence", "python/flce/contrastive", "python/flce/parallel", "python/tests/sentence")
def test_over_ranks() -> None:
    assert cases_passed("sentence_transformers_worker.py", "2") == {2: 3}
