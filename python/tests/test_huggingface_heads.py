"""Output layers that change or that are more than a product: adapters of peft, replaced ones, other formulas, routers' losses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flce

ON_DEVICE = True
transformers = pytest.importorskip("transformers")
from causal_lm_support import VOCAB_SIZE, batch, tiny_causal_lm  # noqa: E402

from flce.huggingface import CausalLMLoss, options_of, return_hidden_states  # noqa: E402


def losses(fused: Any, stock: Any, loss_fn: CausalLMLoss, steps: int = 2) -> None:
    """Each step's loss and every gradient are the stock model's."""
    inputs = batch()
    for _ in range(steps):
        torch.manual_seed(3)
        expected = stock(**inputs).loss
        torch.manual_seed(3)
        loss = loss_fn(fused(**inputs), inputs["labels"])
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        for model, value in ((stock, expected), (fused, loss)):
            model.zero_grad()
            value.backward()
        for (name, actual), right in zip(fused.named_parameters(), stock.parameters(), strict=True):
            assert (actual.grad is None) == (right.grad is None), name
            if right.grad is not None:
                torch.testing.assert_close(actual.grad, right.grad, rtol=1e-3, atol=1e-5, msg=name)
        with torch.no_grad():
            for actual, right in zip(fused.parameters(), stock.parameters(), strict=True):
                for parameter in (actual, right):
                    if right.grad is not None:
                        parameter -= 0.1 * right.grad


ADAPTERS: list[dict[str, Any]] = [
    {"target_modules": ["lm_head", "q_proj"]},
    {"target_modules": ["lm_head"], "lora_dropout": 0.4},
    {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [1, 2]}},
]


@pytest.mark.parametrize("prepared_first", [False, True])
@pytest.mark.parametrize("options", ADAPTERS, ids=lambda options: "+".join(options))
def test_adapters_of_peft_train(options: dict[str, Any], prepared_first: bool) -> None:
    peft = pytest.importorskip("peft")
    base = tiny_causal_lm("Gemma2ForCausalLM")
    fused_base = copy.deepcopy(base)
    if prepared_first:
        return_hidden_states(fused_base)
    stock, fused = (peft.get_peft_model(m, peft.LoraConfig(r=4, init_lora_weights=False, **options)) for m in (base, fused_base))
    fused.load_state_dict(stock.state_dict())
    return_hidden_states(fused)
    losses(fused.train(), stock.train(), CausalLMLoss(fused, impl="flce"))


@pytest.mark.parametrize("impl", ["flce", "pytorch"])
def test_lora_that_is_disabled_merged_or_switched(impl: str) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        tiny_causal_lm("LlamaForCausalLM"), peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["lm_head"])
    )
    model.add_adapter("other", peft.LoraConfig(r=8, init_lora_weights=False, target_modules=["lm_head"]))
    head = model.get_output_embeddings()
    loss_fn = flce.LinearCrossEntropyLoss(head, impl=impl, shift=1)
    hidden, labels = torch.randn(2, 5, 32, requires_grad=True), batch()["labels"][:, :5]

    def check() -> float:
        logits = head(hidden)
        expected = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss = loss_fn(hidden, labels)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(loss_fn.forward_logits(hidden), logits)
        torch.testing.assert_close(torch.autograd.grad(loss, hidden), torch.autograd.grad(expected, hidden))
        return loss.item()

    values = {check()}
    model.set_adapter("other")
    values.add(check())
    with model.disable_adapter():
        values.add(check())
    model.base_model.set_adapter(["default", "other"])
    values.add(check())
    assert len(values) == 4
    model.merge_adapter()
    assert check() in [pytest.approx(value, rel=1e-5) for value in values]


def test_a_16_bit_weight_does_not_swallow_a_small_adapter() -> None:
    """Merged into the weight, an adapter of a thousandth of it is rounded away."""
    peft = pytest.importorskip("peft")
    model = tiny_causal_lm("LlamaForCausalLM").to(torch.bfloat16)
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=8, target_modules=["lm_head"]))
    head = model.get_output_embeddings()
    loss_fn = flce.LinearCrossEntropyLoss(head, impl="flce", shift=0)
    hidden = torch.randn(1, 64, 32, dtype=torch.bfloat16)
    labels = torch.arange(64)[None]
    with torch.no_grad():
        before = loss_fn(hidden, labels).item()
        head.lora_B["default"].weight.normal_(std=2e-3)
        added = head.lora_B["default"].weight @ head.lora_A["default"].weight
        logits = hidden.double() @ (head.weight.double() + added.double()).T
        expected = nn.functional.cross_entropy(logits[0], labels[0]).item()
        assert abs(loss_fn(hidden, labels).item() - expected) < 0.1 * abs(before - expected)


@pytest.mark.parametrize("adapter", [False, True])
def test_bf16_hidden_states_under_fp16_autocast(adapter: bool) -> None:
    """torch.cat refuses bf16 there: rows that heads are compared in, and hidden states beside an adapter's."""
    model = tiny_causal_lm("LlamaForCausalLM").to(torch.bfloat16).train()
    if adapter:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["lm_head"]))
    given = batch()
    with torch.autocast("cpu", dtype=torch.float16):
        expected = model(**given).loss
        loss = flce.patch(model)(**given).loss
    assert loss.item() == pytest.approx(expected.item(), rel=2e-2)
    loss.backward()


@pytest.mark.parametrize("kind", ["dora", "ia3"])
def test_other_adapters_on_the_output_layer_are_refused(kind: str) -> None:
    peft = pytest.importorskip("peft")
    dora = peft.LoraConfig(target_modules=["lm_head"], use_dora=True)
    config, what = {
        "dora": (dora, r"adapter 'default' is LoRA of a special kind \(DoraLinearVariant\)"),
        "ia3": (peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[]), r"is a peft\.tuners\.ia3.*over a Linear"),
    }[kind]
    model = return_hidden_states(peft.get_peft_model(tiny_causal_lm("LlamaForCausalLM"), config))
    inputs = batch()
    with pytest.raises(flce.ArgumentError, match=f"the output layer.*{what}; supported .*modules_to_save"):
        CausalLMLoss(model)(model(**inputs), inputs["labels"])


@pytest.mark.parametrize("name", ["torchao.quantization.Int8Tensor", "bitsandbytes.nn.modules.Params4bit"])
def test_a_quantised_output_layer_is_refused(name: str) -> None:
    """Stand-ins for both packages' weights: classes of these names, over a forward that knows them."""

    class Quantised(nn.Linear):
        """Computes with what its weight stands for."""

        def forward(self, input: Tensor) -> Tensor:
            return nn.functional.linear(input, whole)

    model = tiny_causal_lm("LlamaForCausalLM")
    whole = model.lm_head.weight.detach()
    module, _, kind = name.rpartition(".")
    memory = whole if kind == "Int8Tensor" else torch.zeros(whole.numel() // 2, 1, dtype=torch.uint8)
    model.lm_head = Quantised(*whole.T.shape, bias=False)
    made = type(kind, (nn.Parameter,), {"__module__": module})
    model.lm_head.weight = torch.Tensor._make_subclass(made, memory, False)  # type: ignore[assignment]
    flce.patch(model)
    with pytest.raises(flce.ArgumentError, match=f"the output layer's weight is a {name} in .*, a quantised tensor"):
        model(**batch())


def test_virtual_tokens_are_refused() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_causal_lm("LlamaForCausalLM"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(flce.ArgumentError, match="adapter 'default' of model is a PromptTuningConfig, which puts virtual tokens"):
        return_hidden_states(model)


def test_resized_and_replaced_output_layers_are_seen() -> None:
    stock = tiny_causal_lm("LlamaForCausalLM")
    fused = return_hidden_states(copy.deepcopy(stock))
    loss_fn = CausalLMLoss(fused, impl="flce")
    losses(fused, stock, loss_fn)
    for size in (VOCAB_SIZE + 31, VOCAB_SIZE + 5):
        torch.manual_seed(6)
        stock.resize_token_embeddings(size, mean_resizing=False)
        fused.resize_token_embeddings(size, mean_resizing=False)
        fused.load_state_dict(stock.state_dict())
        losses(fused, stock, loss_fn)
        assert loss_fn.loss.weight.shape[0] == size
    for model in (stock, fused):
        model.set_output_embeddings(nn.Linear(32, size, bias=True))
    fused.load_state_dict(stock.state_dict())
    losses(fused, stock, loss_fn)


def test_routers_losses_are_added_with_their_gradients() -> None:
    stock = tiny_causal_lm("MixtralForCausalLM", routers=True)
    stock.router_aux_loss_coef = 3.0
    fused = return_hidden_states(copy.deepcopy(stock))
    loss_fn = CausalLMLoss(fused, impl="flce")
    losses(fused, stock, loss_fn)
    inputs = batch()
    outputs = fused(**inputs)
    assert outputs.auxiliary_loss.item() == pytest.approx(3.0 * outputs.aux_loss.item())
    assert outputs.auxiliary_loss.item() > 1.0


class Odd(nn.Module):
    """A causal LM whose forward does `change` to its output layer's logits."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.model = tiny_causal_lm("LlamaForCausalLM")
        self.config, self.change = self.model.config, change

    def get_output_embeddings(self) -> nn.Module:
        return self.model.lm_head

    def loss_function(self, logits: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
        return self.model.loss_function(logits, labels, vocab_size)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, return_dict: bool = True) -> Any:
        logits = self.change(self.model.lm_head(self.model.model(input_ids).last_hidden_state))
        loss = None if labels is None else nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


CHANGES: list[tuple[Any, str, dict[str, float]]] = [
    (lambda logits: logits * 0.25, r"0\.25 times as large, as with logit_scale=0\.25", {"logit_scale": 0.25}),
    (lambda logits: 5 * torch.tanh(logits / 5), r"capped near 5, as with softcap=5", {"softcap": 5.0}),
    (lambda logits: 50 * torch.tanh(logits / 50), r"capped near 50, as with softcap=50", {"softcap": 50.0}),
    (lambda logits: logits + torch.arange(VOCAB_SIZE) / 10, "its forward changes logits in another way", {}),
    (lambda logits: logits.masked_fill(torch.arange(VOCAB_SIZE) > 90, -torch.inf), "not finite, as where classes are masked", {}),
    (lambda logits: logits[..., :90], r"shape \[2, 2, 90\].*cutting off a padded vocabulary", {}),
]


@pytest.mark.parametrize(("change", "cause", "by_hand"), CHANGES, ids=["scale", "softcap", "large-softcap", "offset", "mask", "cut"])
def test_heads_of_another_formula_are_refused_with_their_cause(change: Any, cause: str, by_hand: dict[str, float]) -> None:
    stock = Odd(change).train()
    fused = return_hidden_states(copy.deepcopy(stock))
    inputs = batch()
    loss_fn = CausalLMLoss(fused, impl="flce")
    for _ in range(2):  # it is not taken for good at the second call
        with pytest.raises(flce.ArgumentError, match=f"^Odd's own .*{cause}.*keep the model's own loss"):
            loss_fn(fused(**inputs), inputs["labels"])
    if by_hand:
        losses(fused, stock, CausalLMLoss(fused, impl="flce", **by_hand))
        with pytest.raises(flce.ArgumentError, match="own logits differ"):
            CausalLMLoss(fused, **{name: 1.2 * value for name, value in by_hand.items()})(fused(**inputs), inputs["labels"])


def test_a_cap_shows_however_small_the_logits_are() -> None:
    model = Odd(lambda logits: 30 * torch.tanh(logits / 30)).train()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1e-4)
    return_hidden_states(model)
    inputs = batch()
    with pytest.raises(flce.ArgumentError, match="capped near 30"):
        CausalLMLoss(model)(model(**inputs), inputs["labels"])


def test_a_weight_of_zeros_is_compared_again() -> None:
    model = return_hidden_states(Odd(lambda logits: 30 * torch.tanh(logits / 30)).train())
    weight = model.get_output_embeddings().weight
    with torch.no_grad():
        weight.zero_()
    loss_fn, inputs = CausalLMLoss(model, impl="flce", shift=1), batch()
    assert loss_fn(model(**inputs), inputs["labels"]).item() == pytest.approx(torch.tensor(VOCAB_SIZE).log().item())
    with torch.no_grad():
        weight.normal_()
    with pytest.raises(flce.ArgumentError, match="capped near 30"):
        loss_fn(model(**inputs), inputs["labels"])


class UnshiftedOdd(Odd):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, return_dict: bool = True) -> Any:
        logits = self.model.lm_head(self.model.model(input_ids).last_hidden_state)
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) * self.change(1.0)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def test_a_loss_that_does_not_shift_is_found_and_another_refused() -> None:
    stock = UnshiftedOdd(lambda factor: factor).train()
    fused = return_hidden_states(copy.deepcopy(stock))
    loss_fn = CausalLMLoss(fused, impl="flce")
    losses(fused, stock, loss_fn)
    assert loss_fn.loss.shift == 0
    other = return_hidden_states(UnshiftedOdd(lambda factor: 1.1 * factor)).train()
    inputs = batch()
    with pytest.raises(
        flce.ArgumentError,
        match=r"UnshiftedOdd's own loss for these labels .*shifted by 1, and .* with none: it is 1.1 times as large; .*shift=0",
    ):
        CausalLMLoss(other)(other(**inputs), inputs["labels"])
    assert CausalLMLoss(other, shift=0, impl="flce")(other(**inputs), inputs["labels"]).isfinite()


class CallsHead(Odd):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, return_dict: bool = True) -> Any:
        hidden = self.model.model(input_ids).last_hidden_state
        logits = [self.model.lm_head(hidden) for _ in range(self.change(0))]
        logits = logits or [nn.functional.linear(hidden, self.model.lm_head.weight)]
        return transformers.modeling_outputs.CausalLMOutput(logits=logits[0])


@pytest.mark.parametrize("calls", [0, 2])
def test_an_output_layer_that_is_not_called_once_is_refused(calls: int) -> None:
    model = return_hidden_states(CallsHead(lambda _: calls).train())
    with pytest.raises(
        flce.ArgumentError, match=f"the forward of CallsHead calls its output layer, a Linear, {calls} times; it must be once"
    ):
        model(**batch())


def test_what_the_config_implies() -> None:
    config = transformers.RecurrentGemmaConfig(logits_soft_cap=12.0)
    assert options_of(config) == {"softcap": 12.0}
    assert options_of(transformers.GraniteConfig(logits_scaling=4.0)) == {"logit_scale": 0.25}
    assert options_of(transformers.FalconH1Config(lm_head_multiplier=0.5)) == {"logit_scale": 0.5}


def test_an_evaluation_has_one_meaning() -> None:
    """Evaluation gives the model's own loss, with logits or without: options are for training."""
    given, weights = batch(), torch.linspace(0.5, 2.0, VOCAB_SIZE)
    options: dict[str, Any] = {"z_loss": 0.1, "label_smoothing": 0.2, "temperature": 2.0, "dft": True, "class_weight": weights}
    own, mine = tiny_causal_lm("LlamaForCausalLM").eval(), tiny_causal_lm("LlamaForCausalLM")
    expected = own(**given).loss
    for evaluation_logits in (True, False):
        flce.patch(mine, evaluation_logits=evaluation_logits, ignore_index=5, **options)
        torch.testing.assert_close(mine.eval()(**given).loss, expected)
    assert abs(mine.train()(**given).loss - expected) > 0.1
    with pytest.raises(flce.ArgumentError, match="label_smoothing is given and training_logits is True"):
        flce.patch(mine, training_logits=True, label_smoothing=0.2, softcap=30.0)


def test_class_weights_have_no_number_of_items() -> None:
    """A mean over class weights divides by their sum, which a trainer's number of labels does not tell."""
    mine, weights = tiny_causal_lm("LlamaForCausalLM").train(), torch.linspace(0.5, 2.0, VOCAB_SIZE)
    flce.patch(mine, class_weight=weights)
    given = batch()
    logits = tiny_causal_lm("LlamaForCausalLM")(input_ids=given["input_ids"]).logits
    expected = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), given["labels"][:, 1:].flatten(), weights)
    torch.testing.assert_close(mine(**given).loss, expected)
    with pytest.raises(flce.ArgumentError, match=r"class_weight is .* num_items_in_batch is given.*model_accepts_loss_kwargs = False"):
        mine(**given, num_items_in_batch=torch.tensor(40))
    with torch.no_grad():
        assert mine.eval()(**given, num_items_in_batch=torch.tensor(40)).loss > 0
