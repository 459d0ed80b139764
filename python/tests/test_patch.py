"""flce.patch: a causal LM of transformers gives its own loss without logits."""

from __future__ import annotations

import copy
import functools
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flce
from flce.call import _call
from flce.core import _kernels

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from rank_support import cases_passed, generator  # noqa: E402
from test_huggingface import VOCAB_SIZE, tiny_model, train  # noqa: E402
from test_pipeline import launch  # noqa: E402

HERE = Path(__file__).resolve().parent
ON_DEVICE = True


def model_of(kind: str) -> Any:
    if kind != "mixtral":
        return tiny_model(kind)
    torch.manual_seed(3)
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**sizes, num_key_value_heads=1, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.3)
    )


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(0, VOCAB_SIZE, (2, 12), generator=generator(7))
    labels = tokens.clone()
    labels[0, :5] = -100
    return {"input_ids": tokens, "labels": labels}


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def step(model: Any, **given: Any) -> tuple[Any, dict[str, Tensor]]:
    model.zero_grad()
    outputs = model(**given)
    (outputs[0] if isinstance(outputs, tuple) else outputs.loss).backward()
    return outputs, gradients(model)


def same(got: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert got.keys() == right.keys()
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, right[name], rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "mixtral"])
@pytest.mark.parametrize("more", ["", "num_items_in_batch", "shift_labels", "ignore_index"])
def test_loss_and_gradients_of_the_model_itself(kind: str, more: str) -> None:
    own = model_of(kind).train()
    mine = flce.patch(copy.deepcopy(own))
    given: dict[str, Any] = batch()
    if more == "num_items_in_batch":
        given[more] = torch.tensor(40)
    if more == "ignore_index":
        given |= {more: 5, "labels": given["labels"].masked_fill(given["labels"] == -100, 5)}
    if more == "shift_labels":
        given[more] = torch.nn.functional.pad(given["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    for _ in range(2):  # the first step compares
        (expected, right), (outputs, got) = step(own, **given), step(mine, **given)
        torch.testing.assert_close(outputs.loss, expected.loss)
        assert outputs.logits is None and type(outputs) is type(expected)
        assert [name for name in expected if name not in ("logits", "past_key_values")] == [
            name for name in outputs if name != "past_key_values"
        ]
        same(got, right)


@pytest.mark.filterwarnings("error:flce:FutureWarning")  # a caller of flce.patch has called nothing that is deprecated
def test_logits_where_somebody_asks() -> None:
    own = tiny_model()
    mine = flce.patch(copy.deepcopy(own))
    given = batch()
    for model in (own, mine):
        model.train()
    assert torch.equal(mine(input_ids=given["input_ids"]).logits, own(input_ids=given["input_ids"]).logits)
    flce.patch(mine, training_logits=True)
    assert torch.equal(mine(**given).logits, own(**given).logits)
    for model in (own, mine):
        model.eval()
    outputs, expected = mine(**given), own(**given)
    assert torch.equal(outputs.logits, expected.logits) and torch.equal(outputs.loss, expected.loss)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(mine.generate(given["input_ids"], **options), own.generate(given["input_ids"], **options))
    flce.patch(mine, evaluation_logits=False)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            outputs = mine(**given)
        assert outputs.logits is None
        torch.testing.assert_close(outputs.loss.detach(), expected.loss.detach())
    assert torch.equal(mine(input_ids=given["input_ids"]).logits, expected.logits)


def test_tuples_and_positional_arguments() -> None:
    own = tiny_model().train()
    mine = flce.patch(copy.deepcopy(own))
    given = batch()
    outputs, got = step(mine, **given, return_dict=False, use_cache=False)
    expected, right = step(own, **given, return_dict=False, use_cache=False)
    assert isinstance(outputs, tuple) and len(outputs) == 1
    torch.testing.assert_close(outputs[0], expected[0])
    same(got, right)
    torch.testing.assert_close(mine(given["input_ids"], labels=given["labels"]).loss, expected[0])


def test_no_logits_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product with the head's weight is flce's, but for the rows that are compared."""
    mine = flce.patch(tiny_model().train())
    step(mine, **batch())
    seen: list[tuple[int, ...]] = []
    own = torch.nn.functional.linear

    def linear(given: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.shape[0] == VOCAB_SIZE:
            seen.append(tuple(given.shape))
        return own(given, weight, bias)

    calls: list[Any] = []
    forward = _kernels.LoadedKernel.forward
    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    monkeypatch.setattr(_kernels.LoadedKernel, "forward", lambda self, *given: calls.append(self) or forward(self, *given))
    flce.call._call.forget()  # type: ignore[attr-defined]
    step(mine, **batch())
    assert seen == [] and len(calls) == 1


def test_random_numbers_of_a_step_are_the_models_own() -> None:
    config = transformers.GPT2Config(vocab_size=VOCAB_SIZE, n_embd=16, n_layer=2, n_head=2)
    assert config.resid_pdrop > 0
    own = transformers.GPT2LMHeadModel(config).train()
    mine = flce.patch(copy.deepcopy(own))
    for _ in range(2):
        losses = []
        for model in (own, mine):
            torch.manual_seed(11)
            losses.append(model(**batch()).loss)
        torch.testing.assert_close(losses[1], losses[0])


def test_what_is_saved_is_as_before(tmp_path: Path) -> None:
    own = tiny_model()
    mine = flce.patch(copy.deepcopy(own).train())
    assert list(mine.state_dict()) == list(own.state_dict())
    assert [name for name, _ in mine.named_modules()] == [name for name, _ in own.named_modules()]
    step(mine, **batch())
    mine.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, value in own.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    twin = copy.deepcopy(mine)
    torch.testing.assert_close(twin(**batch()).loss, mine(**batch()).loss)
    with torch.no_grad():
        twin.get_output_embeddings().weight.zero_()
    assert not torch.equal(twin(**batch()).loss, mine(**batch()).loss)


@pytest.mark.parametrize("targets", [["q_proj"], ["lm_head"]])
@pytest.mark.parametrize("patched_first", [False, True])
def test_peft(targets: list[str], patched_first: bool) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    models = []
    for patched in (False, True):
        model = tiny_model()
        if patched and patched_first:
            flce.patch(model)
        torch.manual_seed(5)
        model = peft.get_peft_model(model, config).train()
        if patched and not patched_first:
            flce.patch(model)
        models.append(model)
    (expected, right), (outputs, got) = (step(model, **batch()) for model in models)
    torch.testing.assert_close(outputs.loss, expected.loss)
    assert outputs.logits is None
    same(got, right)


def test_dropout_of_an_adapter_on_the_output_layer() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["lm_head"], lora_dropout=0.5, init_lora_weights=False)
    results = []
    for patched in (False, True):
        torch.manual_seed(5)
        model = peft.get_peft_model(tiny_model(), config).train()
        if patched:
            flce.patch(model)
        for _ in range(2):
            torch.manual_seed(8)
            outputs, got = step(model, **batch())
        results.append((outputs.loss, got))
    torch.testing.assert_close(results[1][0], results[0][0])
    same(results[1][1], results[0][1])


@pytest.mark.parametrize("accumulation", [1, 4])
def test_trainer(tmp_path: Path, accumulation: int) -> None:
    stock = tiny_model()
    mine = flce.patch(copy.deepcopy(stock))
    expected, expected_eval = train(stock, tmp_path / "stock", accumulation)
    losses, evaluation = train(mine, tmp_path / "patched", accumulation)
    assert losses == pytest.approx(expected, rel=1e-4) and evaluation == pytest.approx(expected_eval, rel=1e-4)


@pytest.mark.full
def test_checkpointed_and_compiled() -> None:
    own = tiny_model().train()
    mine = flce.patch(copy.deepcopy(own))
    expected, right = step(own, **batch())
    mine.gradient_checkpointing_enable({"use_reentrant": False})
    outputs, got = step(mine, **batch())
    torch.testing.assert_close(outputs.loss, expected.loss)
    same(got, right)
    mine.gradient_checkpointing_disable()
    _call.forget()
    for _ in range(2):  # all of the model, and its loss
        mine.zero_grad()
        checkpoint(lambda: mine(**batch()).loss, use_reentrant=False).backward()
        same(gradients(mine), right)
    compiled = torch.compile(mine, backend="aot_eager")
    for _ in range(2):
        mine.zero_grad()
        loss = compiled(**batch()).loss
        loss.backward()
        torch.testing.assert_close(loss, expected.loss)
        same(gradients(mine), right)


def test_a_new_output_layer_is_compared_again() -> None:
    mine = flce.patch(tiny_model().train())
    step(mine, **batch())
    mine.resize_token_embeddings(VOCAB_SIZE + 8)
    own = copy.deepcopy(mine)
    flce.unpatch(own)
    (expected, right), (outputs, got) = step(own, **batch()), step(mine, **batch())
    torch.testing.assert_close(outputs.loss, expected.loss)
    same(got, right)


@pytest.mark.parametrize("way", ["patch", "hidden states", "compiled"])
def test_a_cap_that_changes_between_steps_is_seen(way: str) -> None:
    own = tiny_model("gemma2").train()
    mine = copy.deepcopy(own)
    loss_fn: Any = None
    if way == "hidden states":
        loss_fn = flce.huggingface.CausalLMLoss(flce.huggingface.return_hidden_states(mine))
    else:
        flce.patch(mine)
    call = torch.compile(mine, backend="aot_eager") if way == "compiled" else mine
    for cap in (2.0, 0.1, None):
        for model in (own, mine):
            model.config.final_logit_softcapping = cap
        outputs = call(**batch())
        loss = outputs.loss if loss_fn is None else loss_fn(outputs, batch()["labels"])
        torch.testing.assert_close(loss, own(**batch()).loss)


def _with_a_hook(model: Any) -> None:
    model.get_output_embeddings().register_forward_hook(lambda *given: given[-1] * 2)


def _with_a_bias(model: Any) -> None:
    model.final_logits_bias = torch.linspace(-2, 2, VOCAB_SIZE)[None]


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("llama", _with_a_hook, "2 times as large"),
        ("bart", _with_a_bias, "own logits differ"),
        ("llama", lambda model: setattr(model, "loss_type", "ForMaskedLM"), "loss_type of LlamaForCausalLM is 'ForMaskedLM'"),
    ],
    ids=["hook", "bias", "loss_type"],
)
def test_what_changes_the_loss_after_the_first_step_is_refused(kind: str, change: Any, message: str) -> None:
    mine = flce.patch(encoder_decoder(kind) if kind == "bart" else tiny_model(kind)).train()
    step(mine, **batch())
    change(mine)
    with pytest.raises(flce.ArgumentError, match=message):
        mine(**batch())


def test_a_loss_function_with_a_known_name_is_compared() -> None:
    model = tiny_model().train()
    known = model.loss_function

    @functools.wraps(known)
    def doubled_loss(*args: Any, **kwargs: Any) -> Any:
        return 2 * known(*args, **kwargs)

    model.loss_function = doubled_loss
    with pytest.raises(flce.ArgumentError, match=r"own loss for these labels .*: it is 2 times as large"):
        flce.patch(model)(**batch())


def test_unpatched_as_it_was() -> None:
    own = tiny_model().train()
    mine = copy.deepcopy(own)
    before = set(mine.__dict__)
    flce.patch(mine)
    step(mine, **batch())
    assert flce.unpatch(mine) is mine and set(mine.__dict__) == before
    assert "forward" not in mine.__dict__ and "forward" not in mine.get_output_embeddings().__dict__
    outputs, expected = mine(**batch()), own(**batch())
    assert torch.equal(outputs.logits, expected.logits) and torch.equal(outputs.loss, expected.loss)
    assert flce.unpatch(mine) is mine
    flce.patch(mine)
    assert mine(**batch()).logits is None


def test_a_pickled_model_is_patched_again() -> None:
    mine = flce.patch(tiny_model().train())
    expected, right = step(mine, **batch())
    for patched in (True, False):
        twin = pickle.loads(pickle.dumps(mine))
        outputs, got = step(twin, **batch())
        torch.testing.assert_close(outputs.loss, expected.loss)
        same(got, right)
        (flce.patch if patched else flce.unpatch)(twin)
        outputs, got = step(twin, **batch())
        assert (outputs.logits is None) is patched
        torch.testing.assert_close(outputs.loss, expected.loss)
        same(got, right)


def test_copies_of_data_parallel_are_refused() -> None:
    """nn.DataParallel asks each module for a replica where one process sees several GPUs, as transformers' Trainer then does by itself."""
    mine = flce.patch(tiny_model())
    for model in (mine, copy.deepcopy(mine)):
        with pytest.raises(flce.ArgumentError, match=r"nn.DataParallel copies LlamaForCausalLM .*torchrun"):
            model._replicate_for_data_parallel()
    for model in (pickle.loads(pickle.dumps(mine)), flce.unpatch(mine)):
        assert type(model._replicate_for_data_parallel()) is type(mine)


class Doubled(transformers.LlamaForCausalLM):  # type: ignore[misc,name-defined]
    """Its logits are not those of its output layer."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.pop("labels", None)
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits.abs() * 2
        if labels is not None:
            outputs.loss = self.loss_function(logits=outputs.logits, labels=labels, vocab_size=VOCAB_SIZE)
        return outputs


class Sharpened(transformers.LlamaForCausalLM):  # type: ignore[misc,name-defined]
    """A parameter behind the output layer, which changes nothing as yet."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.sharpness = nn.Parameter(torch.ones(()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.pop("labels", None)
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits * self.sharpness
        if labels is not None:
            outputs.loss = self.loss_function(logits=outputs.logits, labels=labels, vocab_size=VOCAB_SIZE)
        return outputs


@pytest.mark.parametrize("late", [False, True], ids=["at once", "after a step"])
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen head"])
@pytest.mark.parametrize("way", ["patch", "hidden states"])
def test_a_parameter_behind_the_output_layer_is_refused(way: str, frozen: bool, late: bool) -> None:
    model = Sharpened(tiny_model("llama").config).train()
    model.lm_head.requires_grad_(not frozen)
    model.sharpness.requires_grad_(not late)
    given = batch()
    if way == "patch":
        flce.patch(model)
    else:
        flce.huggingface.return_hidden_states(model)
        loss = flce.huggingface.CausalLMLoss(model)

    def call() -> None:
        outputs = model(**given)
        if way != "patch":
            loss(outputs, given["labels"])

    if late:
        call()  # without a gradient the parameter is a number, 1
        model.sharpness.requires_grad_()
    with pytest.raises(flce.ArgumentError, match="Sharpened changes logits behind its output layer by sharpness"):
        call()


def wrapped() -> Any:
    model = flce.patch(tiny_model())
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    return flce.unpatch(model)


def encoder_decoder(kind: str) -> Any:
    torch.manual_seed(3)
    if kind == "t5":
        config = transformers.T5Config(
            vocab_size=VOCAB_SIZE, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0
        )
        return transformers.T5ForConditionalGeneration(config)
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    wide = {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "d_model": 16, "max_position_embeddings": 64, "dropout": 0.0}
    config = transformers.BartConfig(vocab_size=VOCAB_SIZE, **sizes, **wide, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return transformers.BartForConditionalGeneration(config)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_with_an_encoder(kind: str) -> None:
    own = encoder_decoder(kind).train()
    mine = flce.patch(copy.deepcopy(own))
    given = batch()
    given["labels"] = given["labels"][:, :9].contiguous()  # another length than the encoder's
    for _ in range(2):
        (expected, right), (outputs, got) = step(own, **given), step(mine, **given)
        torch.testing.assert_close(outputs.loss, expected.loss)
        assert outputs.logits is None and torch.equal(outputs.encoder_last_hidden_state, expected.encoder_last_hidden_state)
        same(got, right)
    for model in (own, mine):
        model.eval()
    assert torch.equal(mine(**given).logits, own(**given).logits)
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(mine.generate(given["input_ids"], **options), own.generate(given["input_ids"], **options))


class WithoutPreparation(transformers.T5ForConditionalGeneration):  # type: ignore[misc,name-defined]
    prepare_decoder_input_ids_from_labels = property()


def doubled() -> Any:
    model = flce.patch(Doubled(tiny_model().config).train())
    return model(**batch())


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: flce.patch(WithoutPreparation(encoder_decoder("t5").config)), flce.ArgumentError, "has an encoder and no prepare"),
        (lambda: flce.patch(nn.Linear(2, 3)), flce.ArgumentError, "output embeddings are none"),
        (lambda: flce.patch(flce.huggingface.return_hidden_states(tiny_model())), flce.ArgumentError, "use one of the two"),
        (lambda: flce.unpatch(flce.huggingface.return_hidden_states(tiny_model())), flce.ArgumentError, "not by flce.patch"),
        (lambda: flce.patch(tiny_model(), training_logits=1), flce.DTypeError, "training_logits is 1"),
        (lambda: flce.patch(tiny_model(), softcup=2.0), flce.ArgumentError, "softcup"),
        (lambda: flce.patch(tiny_model().train())(input_ids=batch()["input_ids"], labels=[1]), flce.DTypeError, "labels is a list"),
        (wrapped, flce.ArgumentError, "has been wrapped since"),
        (doubled, flce.ArgumentError, "own logits differ"),
    ],
    ids=range(9),
)
def test_refused(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


def test_a_refused_model_is_as_it_was() -> None:
    model = tiny_model()
    before = set(model.__dict__)
    with pytest.raises(flce.ArgumentError):
        flce.patch(model, softcup=2.0)
    assert set(model.__dict__) == before


def test_wrapped_over_two_ranks() -> None:
    assert cases_passed("patch_worker.py", "2") == {2: 3}


@pytest.mark.full
def test_example_trains_alike_and_needs_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1048576")  # freed memory goes back to the system, and a peak shows
    output = launch(str(HERE.parent.parent / "examples" / "hf_trainer.py"), "--tiny")
    found = re.findall(r"^ +(as it comes|flce\.patch): losses ([\d. ]+?) +[\d.]+ ms a step +([\d.]+) MiB", output, re.MULTILINE)
    losses = {name: [float(loss) for loss in of.split()] for name, of, _ in found}
    memory = {name: float(mib) for name, _, mib in found}
    assert losses["flce.patch"] == pytest.approx(losses["as it comes"], rel=1e-4) and len(losses["flce.patch"]) == 4
    assert losses["flce.patch"][-1] < losses["flce.patch"][0]
    assert memory["flce.patch"] < memory["as it comes"] / 2
