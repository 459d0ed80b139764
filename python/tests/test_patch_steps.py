"""Steps of a patched model after its first: what has changed since is compared again or refused, and nothing of a step that failed, or of
another thread's, is left."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import flce
from flce.adapters import _head_tap

transformers = pytest.importorskip("transformers")

VOCAB_SIZE = 97


def llama() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=64, **sizes)).train()


def tokens(batch: int = 2, length: int = 8, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(7, VOCAB_SIZE - 1, (batch, length), generator=generator)


def loss_of(model: Any, ids: Tensor, **arguments: Any) -> float:
    return float(model(input_ids=ids, labels=arguments.pop("labels", ids), **arguments).loss.detach())


class DroppingHead(nn.Linear):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__(*weight.shape[::-1], bias=False)
        self.weight, self.drop = weight, nn.Dropout(0.3)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(self.drop(input))


def dropping(model: Any) -> None:
    model.lm_head = DroppingHead(model.lm_head.weight)


def doubling(model: Any) -> None:
    model.lm_head.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 2,))


def normalised(model: Any) -> None:
    parametrizations.spectral_norm(model.lm_head)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after a step"])
@pytest.mark.parametrize(
    ("change", "says"), [(dropping, "a dropout inside"), (doubling, "a full backward pre-hook"), (normalised, "a spectral norm")]
)
def test_what_an_output_layer_does_in_a_step_is_refused(change: Any, says: str, before: bool) -> None:
    model = llama()
    if before:
        change(model)
    flce.patch(model)
    if not before:
        loss_of(model, tokens())
        change(model)
    with pytest.raises(flce.ArgumentError, match=says):
        loss_of(model, tokens())


def test_a_buffer_that_is_written_to_is_compared_again() -> None:
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = transformers.BartConfig(vocab_size=VOCAB_SIZE, encoder_ffn_dim=48, decoder_ffn_dim=48, dropout=0.0, **sizes)
    model = transformers.BartForConditionalGeneration(config).train()
    own = copy.deepcopy(model)
    flce.patch(model)
    assert loss_of(model, tokens()) == pytest.approx(loss_of(own, tokens()), rel=1e-5)
    state = {**own.state_dict(), "final_logits_bias": torch.linspace(-3, 3, VOCAB_SIZE)[None]}
    for each in (model, own):
        each.load_state_dict(state)
    with pytest.raises(flce.ArgumentError, match="logits"):
        loss_of(model, tokens())


@pytest.mark.parametrize("special", [VOCAB_SIZE - 1, 2], ids=["the last class", "the config's eos"])
def test_a_loss_that_leaves_a_class_out_is_refused_at_the_first_step(special: int) -> None:
    model = llama()
    model.config.eos_token_id = 2
    own = model.loss_function

    def without(logits: Tensor, labels: Tensor, vocab_size: int, **more: Any) -> Any:
        return own(logits, labels.masked_fill(labels == special, -100), vocab_size, **more)

    model.loss_function = without
    flce.patch(model)
    with pytest.raises(flce.ArgumentError, match="loss"):
        loss_of(model, tokens())


@pytest.mark.parametrize("factor", [0.0, 0.7, 2.0])
@pytest.mark.parametrize("how", ["a vector", "token by token", "over the count"])
def test_a_loss_that_weighs_one_class_is_refused_at_the_first_step(how: str, factor: float) -> None:
    model, weighed = llama(), 53
    weights = torch.ones(VOCAB_SIZE)
    weights[weighed] = factor

    def own(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
        rows, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        if how == "a vector":
            return F.cross_entropy(rows, targets, weight=weights)
        each = F.cross_entropy(rows, targets, reduction="none")
        shares = torch.where(targets == -100, 0.0, weights[targets.clamp(min=0)])
        return (each * shares).sum() / ((targets != -100).sum() if how == "over the count" else shares.sum())

    model.loss_function = own
    flce.patch(model)
    ids = tokens().masked_fill(tokens() == weighed, 8)
    with pytest.raises(flce.ArgumentError, match=f"own loss counts (class|one of the classes) .*{weighed}.* in a way of its own"):
        loss_of(model, ids)
    weights.fill_(1.0)
    loss_of(model, ids)


def test_a_step_that_failed_leaves_nothing() -> None:
    model, ids = llama(), tokens()
    flce.patch(model)
    first = loss_of(model, ids)
    with pytest.raises(flce.ShapeError):
        loss_of(model, ids, labels=ids[:, :5], attention_mask=torch.ones_like(ids))
    assert loss_of(model, ids) == first
    assert loss_of(model, ids, attention_mask=torch.ones_like(ids)) == pytest.approx(first, rel=1e-6)


def test_a_loss_function_that_is_set_later_is_refused_and_kept() -> None:
    model = llama()
    flce.patch(model)
    loss_of(model, tokens())

    def later(*_: Any, **__: Any) -> Tensor:
        return torch.zeros(())

    model.loss_function = later
    with pytest.raises(flce.ArgumentError, match="loss_function of LlamaForCausalLM has been set since"):
        loss_of(model, tokens())
    flce.unpatch(model)
    assert model.loss_function is later and loss_of(model, tokens()) == 0


def test_threads_take_turns_with_a_model() -> None:
    model, batches = llama(), [tokens(seed=seed) for seed in range(4)]
    own = [loss_of(model, ids) for ids in batches]
    flce.patch(model)
    loss_of(model, batches[0])
    wrong: list[str] = []

    def steps(number: int) -> None:
        try:
            for _ in range(10):
                if number == 0:
                    with torch.no_grad():
                        assert model(input_ids=batches[0]).logits.shape[-1] == VOCAB_SIZE
                assert loss_of(model, batches[number]) == pytest.approx(own[number], rel=1e-5)
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=steps, args=(number,)) for number in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def on_another_thread(function: Callable[[], Any]) -> Any:
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(function()))
    thread.start()
    thread.join()
    return made[0]


@pytest.mark.parametrize("during", ["the forward", "a replay"])
def test_another_thread_evaluates_during_a_step_that_compares(during: str) -> None:
    model, ids, others = llama(), tokens(), tokens(seed=5)
    own = [loss_of(model, each) for each in (ids, others)]
    found: list[float] = []

    @torch.no_grad()
    def evaluate() -> float:
        return loss_of(model, others)

    def once(*_: Any) -> None:
        if not found:
            found.append(0.0)
            found.append(on_another_thread(evaluate))

    stock = model.loss_function
    if during == "a replay":
        model.loss_function = lambda *given, **more: (once(), stock(*given, **more))[1]
    else:
        model.model.norm.register_forward_hook(once)
    flce.patch(model)
    assert loss_of(model, ids) == pytest.approx(own[0], rel=1e-5)
    assert found[1] == pytest.approx(own[1], rel=1e-6)
    assert all("_compiled_call_impl" not in module.__dict__ for module in model.modules())


def test_a_child_process_has_nothing_of_another_threads_step() -> None:
    model, inside, goes_on = llama(), threading.Event(), threading.Event()
    flce.patch(model)
    tap: Any = _head_tap.of(model)
    model.model.norm.register_forward_hook(lambda *_: (inside.set(), goes_on.wait(60))[0])
    thread = threading.Thread(target=lambda: loss_of(model, tokens()))
    thread.start()
    assert inside.wait(60)
    child = os.fork()
    if child == 0:  # computes nothing: torch's threads are not forked
        try:
            changed = any("_compiled_call_impl" in module.__dict__ for module in model.modules())
            os._exit(int(changed or tap.active or not tap.alone().acquire(blocking=False)))
        finally:
            os._exit(2)
    assert tap.active
    goes_on.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.nightly
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_for_several_batch_sizes(dynamic: bool | None) -> None:
    model = llama()
    own = {batch: loss_of(model, tokens(batch)) for batch in (1, 2, 3)}
    flce.patch(model)
    compiled = torch.compile(model, backend="aot_eager", dynamic=dynamic)
    for batch in (2, 2, 3, 1, 3):
        assert loss_of(compiled, tokens(batch)) == pytest.approx(own[batch], rel=1e-5)


class AnyArguments(transformers.LlamaForCausalLM):  # type: ignore[misc,name-defined]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_a_forward_that_hands_its_arguments_on_takes_them_by_place() -> None:
    model = AnyArguments(llama().config).train()
    own = float(model(tokens(), labels=tokens()).loss.detach())
    flce.patch(model)
    assert float(model(tokens(), labels=tokens()).loss.detach()) == pytest.approx(own, rel=1e-5)


def capped() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = transformers.Gemma2Config(vocab_size=VOCAB_SIZE, head_dim=8, final_logit_softcapping=2.0, **sizes)
    return transformers.Gemma2ForCausalLM(config).train()


def with_adapter() -> Any:
    peft = pytest.importorskip("peft")
    model = llama()
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)).train()


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("way", ["patch", "hidden states"])
@pytest.mark.parametrize("make", [llama, capped, with_adapter])
def test_the_first_step_of_a_kind_inside_a_checkpoint(make: Any, way: str) -> None:
    model = make()
    own = copy.deepcopy(model)
    if way == "patch":
        flce.patch(model)
    else:
        loss_fn = flce.huggingface.CausalLMLoss(flce.huggingface.return_hidden_states(model))
    for more in ({}, {"attention_mask": torch.ones(2, 8, dtype=torch.int64)}):
        given = {"input_ids": tokens(), "labels": tokens(), **more}
        own(**given).loss.backward()
        if way == "patch":
            checkpoint(model, use_reentrant=False, **given).loss.backward()
        else:
            loss_fn(checkpoint(model, use_reentrant=False, **given), given["labels"]).backward()
        got, right = gradients(model), gradients(own)
        assert got.keys() == right.keys()
        for name, gradient in got.items():
            torch.testing.assert_close(gradient, right[name], rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("impl", ["flce", "pytorch"])
@pytest.mark.parametrize("make", [llama, with_adapter])
def test_the_first_step_under_autocast_has_every_gradient(make: Any, impl: str) -> None:
    model = flce.patch(make(), impl=impl)
    steps = []
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        steps.append(gradients(model))
    assert steps[0].keys() == steps[1].keys() and any("head" in name for name in steps[0])
    for name, gradient in steps[0].items():
        assert torch.equal(gradient, steps[1][name]), name


class Scaled(transformers.LlamaForCausalLM):  # type: ignore[misc,name-defined]
    """Multiplies its logits by what `factor_of` finds."""

    factor_of: Any = None

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.lm_head(self.model(input_ids=input_ids, **kwargs).last_hidden_state) * self.factor_of(self)
        loss = None if labels is None else self.loss_function(logits=logits, labels=labels, vocab_size=VOCAB_SIZE)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def in_a_tensor(model: Any, factor: float) -> None:
    if not hasattr(model, "factor"):
        model.factor = torch.ones(())
    model.factor.fill_(factor)


def in_a_frozen_parameter(model: Any, factor: float) -> None:
    if not hasattr(model, "factor"):
        model.factor = nn.Parameter(torch.ones(()), requires_grad=False)
    with torch.no_grad():
        model.factor.fill_(factor)


@pytest.mark.parametrize(
    ("factor_of", "change"),
    [
        (lambda model: model.sharpness, lambda model, factor: setattr(model, "sharpness", int(factor))),
        (lambda model: model.config.sharpness, lambda model, factor: setattr(model.config, "sharpness", factor)),
        (lambda model: model.lm_head.sharpness, lambda model, factor: setattr(model.lm_head, "sharpness", factor)),
        (lambda model: model.factor, in_a_tensor),
        (lambda model: model.factor, in_a_frozen_parameter),
    ],
    ids=["model", "config", "output layer", "tensor", "parameter"],
)
def test_a_factor_of_logits_under_any_name_is_compared_again(factor_of: Any, change: Any) -> None:
    model = Scaled(llama().config).train()
    model.__dict__["factor_of"] = factor_of
    change(model, 1.0)
    flce.patch(model)
    loss_of(model, tokens())
    kinds = _head_tap.of(model).kinds  # type: ignore[union-attr]
    model.eval()
    with torch.no_grad():
        loss_of(model, tokens())
    model.train()
    loss_of(model, tokens())
    assert _head_tap.of(model).kinds is kinds  # type: ignore[union-attr]  # what has not changed is not compared again
    change(model, 2.0)
    with pytest.raises(flce.ArgumentError, match="2 times as large"):
        loss_of(model, tokens())
