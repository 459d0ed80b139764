"""transformers.Trainer with a tiny model: the same losses as the stock model, hidden states while training, logits while evaluating."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rank_support
import torch
from torch import Tensor, nn

import flce
from flce.core import _kernels
from flce.huggingface import CausalLMLoss, options_of, return_hidden_states

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

VOCAB_SIZE = 97
ON_DEVICE = True


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
        tokens = torch.randint(0, VOCAB_SIZE, (12,), generator=torch.Generator().manual_seed(index), device="cpu")
        labels = tokens.clone()
        labels[: index % 9] = -100
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def train(
    model: Any,
    folder: Path,
    accumulation: int,
    bf16: bool = False,
    max_steps: int = 4,
    learning_rate: float = 1e-2,
    **keywords: Any,
) -> tuple[list[float], float]:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        max_steps=max_steps,
        learning_rate=learning_rate,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        seed=5,
        disable_tqdm=True,
        use_cpu=rank_support.device() == "cpu",
        bf16=bf16,
    )
    with torch.device("cpu"):  # where a data loader's batches are made; the trainer moves them
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
    assert losses == pytest.approx(expected, abs=2e-4)  # rounded by the trainer
    assert eval_loss == pytest.approx(expected_eval, rel=1e-4)
    assert list(fused.state_dict()) == keys
    for (name, actual), right in zip(fused.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(actual, right, rtol=2e-3, atol=2e-4, msg=name)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
def test_loss_and_gradients_equal_the_stock_model(kind: str) -> None:
    stock = tiny_model(kind).train()
    fused = return_hidden_states(copy.deepcopy(stock))
    batch = labels_of(4)
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


def labels_of(count: int) -> dict[str, Tensor]:
    batch: dict[str, Tensor] = torch.utils.data.default_collate([Sequences()[i] for i in range(count)])
    return {name: tensor.to(rank_support.device()) for name, tensor in batch.items()}


def test_bf16_autocast_of_fp32_weights_reaches_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer(bf16=True): the output layer would run in bf16, so the loss does, though accelerate returns fp32 and autocast is over by
    then."""
    called: list[tuple[torch.dtype, torch.dtype]] = []
    lookup = _kernels.find_for

    def find_for(given: Any, *others: Any) -> Any:
        called.append((given.hidden.dtype, given.weight.dtype))
        return lookup(given, *others)

    monkeypatch.setattr(_kernels, "find_for", find_for)
    stock = tiny_model()
    fused = return_hidden_states(copy.deepcopy(stock))
    expected, expected_eval = train(stock, tmp_path / "stock", 1, bf16=True)
    losses, eval_loss = train(fused, tmp_path / "fused", 1, bf16=True, compute_loss_func=CausalLMLoss(fused, impl="flce"))
    assert set(called) == {(torch.bfloat16, torch.float32)}
    assert losses == pytest.approx(expected, rel=3e-3)
    assert eval_loss == pytest.approx(expected_eval, rel=3e-3)


def test_generate_in_training_mode() -> None:
    stock = tiny_model().train()
    fused = return_hidden_states(copy.deepcopy(stock))
    batch = labels_of(2)
    loss_fn = CausalLMLoss(fused, impl="flce")
    loss = loss_fn(fused(**batch), batch["labels"])
    tokens = batch["input_ids"][:1]
    generated = fused.generate(tokens, max_new_tokens=3, do_sample=False)
    assert torch.equal(generated, stock.generate(tokens, max_new_tokens=3, do_sample=False))
    with torch.no_grad():
        torch.testing.assert_close(fused(**batch).loss, loss)
    assert loss_fn(fused(**batch), batch["labels"]).item() == loss.item()


@pytest.mark.parametrize("prepared_first", [False, True])
def test_accelerates_wrappers_come_off(prepared_first: bool) -> None:
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=rank_support.device() == "cpu")
    model = tiny_model()
    signature = inspect.signature(model.forward)
    if prepared_first:
        return_hidden_states(model)
    assert inspect.signature(model.forward) == signature
    wrapped = accelerator.prepare(model)
    return_hidden_states(wrapped)
    loss_fn, batch = CausalLMLoss(wrapped, impl="flce"), labels_of(2)
    in_bf16 = loss_fn(wrapped(**batch), batch["labels"])
    for _ in range(2):
        plain = accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False).train()
        outputs = plain(**batch)
        assert "autocast_dtype" not in outputs
        loss = loss_fn(outputs, batch["labels"])
        assert loss.item() == pytest.approx(in_bf16.item(), rel=2e-2)
        assert loss.item() != in_bf16.item()
    assert plain.eval()(**batch).logits.shape == (2, 12, VOCAB_SIZE)


def test_evaluation_with_tuples() -> None:
    """Classes and features are equally many, so logits and hidden states have one shape."""
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=96, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    stock = transformers.LlamaForCausalLM(config).eval()
    fused = return_hidden_states(copy.deepcopy(stock))
    loss_fn, batch = CausalLMLoss(fused, impl="flce"), {name: value.clamp(max=95) for name, value in labels_of(2).items()}
    expected = stock(**batch).loss
    labels = batch.pop("labels")
    outputs = fused(**batch, return_dict=False)
    assert isinstance(outputs, tuple)
    torch.testing.assert_close(loss_fn(outputs, labels), expected)
    torch.testing.assert_close(loss_fn(fused(**batch, labels=labels, return_dict=False), labels), expected)
    torch.testing.assert_close(loss_fn(fused.train()(**batch, return_dict=False), labels), expected)
    with pytest.raises(flce.ArgumentError, match=r"logits of shape \[2, 12, 7\].*vocab_size, 96"):
        loss_fn((torch.zeros(2, 12, 7),), labels)


def test_labels_that_the_trainer_has_shifted() -> None:
    """Context parallelism makes a shard's last label the next shard's first; padding-free collators shift, too."""
    stock = tiny_model()
    fused = return_hidden_states(copy.deepcopy(stock))
    batch = labels_of(3)
    labels = batch.pop("labels")
    shifted = torch.randint(0, VOCAB_SIZE, labels.shape)
    shifted[0, 3:] = -100
    loss_fn = CausalLMLoss(fused, impl="flce")
    for model in (stock, fused):
        model.train()
    expected = stock(**batch, labels=labels, shift_labels=shifted).loss
    torch.testing.assert_close(loss_fn(fused(**batch, shift_labels=shifted), labels), expected)
    torch.testing.assert_close(loss_fn(fused.eval()(**batch, shift_labels=shifted), labels), expected)
    expected = stock(**batch, labels=labels).loss
    torch.testing.assert_close(loss_fn(fused(**batch), labels), expected)
    torch.testing.assert_close(loss_fn(fused.train()(**batch), labels), expected)


@pytest.mark.full
def test_compiled_model() -> None:
    stock = tiny_model("gemma2").train()
    fused = return_hidden_states(copy.deepcopy(stock))
    compiled = torch.compile(fused, backend="aot_eager")
    loss_fn, batch = CausalLMLoss(compiled, impl="flce"), labels_of(2)
    expected = stock(**batch)
    for _ in range(3):
        torch.testing.assert_close(loss_fn(compiled(**batch), batch["labels"]), expected.loss)
    with torch.no_grad():
        torch.testing.assert_close(compiled(**batch).logits, expected.logits)
    torch.testing.assert_close(compiled.eval()(**batch).logits, stock.eval()(**batch).logits)


def test_positional_arguments_and_copies() -> None:
    model = return_hidden_states(tiny_model().train())
    batch = labels_of(2)
    loss_fn = CausalLMLoss(model, impl="flce")
    expected = loss_fn(model(**batch), batch["labels"]).item()
    positional = (batch["input_ids"], batch["attention_mask"], None, None, None, batch["labels"])
    assert loss_fn(model(*positional), batch["labels"]).item() == expected
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_input_embeddings().weight.mul_(2.0)
    of_other = CausalLMLoss(other, impl="flce")(other(**batch), batch["labels"])
    of_other.backward()
    assert of_other.item() != pytest.approx(expected, rel=1e-3)
    assert other.lm_head.weight.grad is not None
    assert model.lm_head.weight.grad is None
    assert loss_fn(model(**batch), batch["labels"]).item() == expected


def test_the_older_way_is_deprecated() -> None:
    with pytest.warns(FutureWarning, match=r"deprecated and go in 0\.2: flce\.patch\(model\) computes the same loss") as warned:
        return_hidden_states(tiny_model())
    assert [each.filename for each in warned] == [__file__]


def test_outputs_that_cannot_be_compared_are_refused() -> None:
    model = return_hidden_states(tiny_model().train())
    batch = labels_of(2)
    hidden = model.base_model(batch["input_ids"])
    with pytest.raises(flce.ArgumentError, match=r"prepare the model with flce\.huggingface\.return_hidden_states"):
        CausalLMLoss(model)(hidden, batch["labels"])
    with pytest.raises(flce.ArgumentError, match="outputs is a Tensor with neither"):
        CausalLMLoss(model)(hidden.last_hidden_state, batch["labels"])
    with pytest.raises(flce.DTypeError, match="labels is a NoneType"):
        CausalLMLoss(model, impl="flce")(model(**batch), None)


@pytest.mark.full
def test_the_submodule_is_there_without_an_import_of_it() -> None:
    absent = "assert 'transformers' not in sys.modules"
    code = f"import sys, flce; {absent}; flce.huggingface.CausalLMLoss; {absent}"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert "huggingface" in dir(flce)
    with pytest.raises(AttributeError, match="has no attribute 'hugging'"):
        _ = flce.hugging  # type: ignore[attr-defined]


def test_evaluation_still_gives_logits() -> None:
    stock = tiny_model("gemma2").eval()
    fused = return_hidden_states(copy.deepcopy(stock)).eval()
    tokens = labels_of(1)["input_ids"]
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


@pytest.fixture
def alone() -> Any:
    """A process group of this process."""
    distributed = torch.distributed
    distributed.init_process_group(rank_support.one_rank_backend(), store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_ddp_that_looks_for_unused_parameters() -> None:
    """Trainer's setting. The output layer's weight is used, but after the forward."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    model = return_hidden_states(transformers.LlamaForCausalLM(config).train())
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    loss_fn, batch = CausalLMLoss(model, impl="flce"), labels_of(2)
    ready: list[Tensor] = []

    def hook(_, bucket):  # type: ignore[no-untyped-def]
        ready.append(bucket.buffer().clone())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    wrapped.register_comm_hook(None, hook)
    for _ in range(3):
        ready.clear()
        model.zero_grad()
        loss_fn(wrapped(**batch), batch["labels"]).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        assert all(gradient is not None for gradient in gradients)
        # Sums over the ranks are of every gradient in its final state.
        sums = sum(buffer.abs().sum().item() for buffer in ready)
        assert sums == pytest.approx(sum(g.abs().sum().item() for g in gradients if g is not None), rel=1e-4)
