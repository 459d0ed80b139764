"""transformers.Trainer with a tiny model: the same losses as the stock model, hidden states while training, logits while evaluating."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flce
from flce.huggingface import CausalLMLoss, options_of, return_hidden_states

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

VOCAB_SIZE = 97


def tiny_model(kind: str = "llama") -> Any:
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(3)
    if kind == "llama":
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=1, tie_word_embeddings=True)
        return transformers.LlamaForCausalLM(config)
    if kind == "gemma2":
        config = transformers.Gemma2Config(**sizes, num_key_value_heads=1, head_dim=8, final_logit_softcapping=2.0)
        return transformers.Gemma2ForCausalLM(config)
    config = transformers.GPT2Config(vocab_size=VOCAB_SIZE, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return transformers.GPT2LMHeadModel(config)


class Sequences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sixteen sequences whose labels are masked by different amounts."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, VOCAB_SIZE, (12,), generator=torch.Generator().manual_seed(index))
        labels = tokens.clone()
        labels[: index % 9] = -100
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def train(model: Any, folder: Path, accumulation: int, **keywords: Any) -> tuple[list[float], float]:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        max_steps=4,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        seed=5,
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Sequences(), eval_dataset=Sequences(), **keywords)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("impl", ["flce", "pytorch"])
def test_trainer_gives_the_stock_losses(tmp_path: Path, accumulation: int, impl: str) -> None:
    stock = tiny_model()
    fused = copy.deepcopy(stock)
    expected, expected_eval = train(stock, tmp_path / "stock", accumulation)
    keys = list(fused.state_dict())
    return_hidden_states(fused)
    losses, eval_loss = train(fused, tmp_path / "fused", accumulation, compute_loss_func=CausalLMLoss(fused, impl=impl))
    assert len(losses) == 4
    assert losses == pytest.approx(expected, abs=2e-4)  # as the trainer rounds them
    assert eval_loss == pytest.approx(expected_eval, rel=1e-4)
    assert list(fused.state_dict()) == keys
    for (name, actual), right in zip(fused.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(actual, right, rtol=2e-3, atol=2e-4, msg=name)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
def test_loss_and_gradients_equal_the_stock_model(kind: str) -> None:
    stock = tiny_model(kind).train()
    fused = return_hidden_states(copy.deepcopy(stock))
    batch = torch.utils.data.default_collate([Sequences()[i] for i in range(4)])
    expected = stock(**batch).loss
    expected.backward()
    outputs = fused(**batch)
    assert "logits" not in outputs
    assert flce.extract_hidden_states(outputs).shape == (4, 12, 16)
    loss = CausalLMLoss(fused, impl="flce")(outputs, batch["labels"])
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for (name, actual), right in zip(fused.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, right.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_evaluation_still_gives_logits() -> None:
    stock = tiny_model("gemma2").eval()
    fused = return_hidden_states(copy.deepcopy(stock)).eval()
    tokens = Sequences()[0]["input_ids"][None]
    logits = fused(input_ids=tokens).logits
    assert torch.equal(logits, stock(input_ids=tokens).logits)
    assert fused.generate(tokens, max_new_tokens=3, do_sample=False).shape == (1, 15)
    fused.train()
    loss = CausalLMLoss(fused, impl="flce").loss
    torch.testing.assert_close(loss.forward_logits(fused(input_ids=tokens).last_hidden_state), logits)
    assert options_of(fused.config) == {"softcap": 2.0}


def test_a_model_without_a_separate_head_is_refused() -> None:
    with pytest.raises(flce.ArgumentError, match="model is a Linear"):
        return_hidden_states(nn.Linear(2, 2))
