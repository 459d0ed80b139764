"""flce.patch compares the model's own loss, inside the step's own forward: what it computes is the model's own loss or refused, and nothing
that a forward changes is changed twice."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

import flce
from flce.adapters import _own_loss
from flce.adapters._shared_rows import SharedRows
from flce.core import _once

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from rank_support import generator  # noqa: E402
from test_huggingface import VOCAB_SIZE, tiny_model  # noqa: E402
from test_patch import encoder_decoder  # noqa: E402

ON_DEVICE = True


def batch(**more: Any) -> dict[str, Any]:
    tokens = torch.randint(1, VOCAB_SIZE, (2, 12), generator=generator(7))
    return {"input_ids": tokens, "labels": tokens.clone(), **more}


def mask(zeros: int) -> Tensor:
    made = torch.ones(2, 12, dtype=torch.int64)
    made[0, 12 - zeros :] = 0
    return made


class Inline(transformers.LlamaForCausalLM):  # type: ignore[misc,name-defined]
    """Computes its loss itself, by `own`."""

    own: Any = None

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        logits = self.lm_head(hidden)
        loss = None if labels is None else self.own(logits[:, :-1], labels[:, 1:], attention_mask)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def shifted(logits: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
    return F.cross_entropy(logits.float().reshape(-1, VOCAB_SIZE), labels.reshape(-1))


def masked(logits: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None:  # GraniteSpeech's mask
        logits, labels = logits[mask[:, 1:] != 0], labels[mask[:, 1:] != 0]
    return shifted(logits, labels, None)


def of_sequences(logits: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
    each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return torch.stack([loss[label != -100].mean() for loss, label in zip(each, labels, strict=True)]).nanmean()


def weighted_by_mask(logits: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
    loss = shifted(logits, labels, mask)
    return loss if mask is None else loss * (1.0 + (mask == 0).float().mean())


def smoothed(logits: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCAB_SIZE), labels.reshape(-1), label_smoothing=0.1)


def inline(own: Any) -> tuple[Any, Any]:
    torch.manual_seed(3)
    model = Inline(tiny_model().config).train()
    model.own = own
    return model, flce.patch(copy.deepcopy(model))


@pytest.mark.parametrize("own", [shifted, masked])
def test_a_loss_of_masked_positions_is_the_models_own_whenever_they_come(own: Any) -> None:
    stock, mine = inline(own)
    for given in (batch(), batch(attention_mask=mask(0)), batch(attention_mask=mask(4)), batch(attention_mask=mask(1))):
        expected, loss = stock(**given).loss, mine(**given).loss
        torch.testing.assert_close(loss, expected)
    assert own is shifted or abs(stock(**batch(attention_mask=mask(0))).loss - expected) > 1e-3  # the mask has mattered


@pytest.mark.parametrize(
    ("own", "first", "second", "cause"),
    [
        (of_sequences, {}, None, "the mean of the sequences' own means"),
        (weighted_by_mask, {}, {"attention_mask": mask(0)}, "labels that count where attention_mask is 0 in a way of its own"),
        (smoothed, {}, None, "another function of logits and labels"),
        (lambda *given: 2 * shifted(*given), {}, None, "2 times as large"),
        (lambda logits, labels, mask: logits.sort().values.mean(), {}, None, "another function"),
    ],
    ids=["sequences", "mask", "smoothed", "doubled", "other"],
)
def test_another_loss_is_refused_with_both_numbers(own: Any, first: Any, second: Any, cause: str) -> None:
    _, mine = inline(own)
    if second is not None:
        mine(**batch(**first))
    with pytest.raises(flce.ArgumentError, match=rf"^Inline's own loss for .* is [\d.]+ .* is [\d.]+ with labels shifted by 1.*{cause}"):
        mine(**batch(**(first if second is None else second)))


def test_a_weight_of_a_class_is_found_where_a_mask_leaves_positions_out() -> None:
    weights = torch.ones(VOCAB_SIZE)
    weights[53] = 3.0

    def own(logits: Tensor, labels: Tensor, mask: Any) -> Tensor:
        counts = mask[:, 1:] != 0
        return F.cross_entropy(logits[counts], labels[counts], weight=weights)

    _, mine = inline(own)
    given = batch(attention_mask=mask(4))
    given["labels"].masked_fill_(given["labels"] == 53, 8)
    with pytest.raises(flce.ArgumentError, match="Inline's own loss counts one of the classes 53 to 54 in a way of its own"):
        mine(**given)


def test_a_loss_by_hand_is_not_refused() -> None:
    _, mine = inline(smoothed)
    flce.patch(mine, shift=1)
    stock, _ = inline(shifted)
    stock.load_state_dict(mine.state_dict())
    torch.testing.assert_close(mine(**batch()).loss, stock(**batch()).loss)


def test_options_of_the_loss_are_not_compared() -> None:
    _, mine = inline(shifted)
    plain = mine(**batch()).loss
    assert abs(flce.patch(mine, label_smoothing=0.3)(**batch()).loss - plain) > 1e-4


class Counting(nn.Module):
    """A module that changes at each of its calls: a buffer, an attribute, and random numbers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("mean", torch.zeros(()))
        self.calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        hidden = F.dropout(self.inner(hidden), 0.2)
        self.mean.mul_(0.9).add_(hidden.detach().mean() * 0.1)
        return hidden


@pytest.mark.parametrize("way", ["patch", "hidden states"])
def test_what_a_forward_changes_is_changed_once(way: str) -> None:
    own = tiny_model().train()
    own.model.norm = Counting(own.model.norm)
    mine = copy.deepcopy(own)
    hooked: list[Any] = []
    mine.model.norm.register_forward_hook(lambda *given: hooked.append(given[0]))
    loss_fn: Any = None
    if way == "patch":
        flce.patch(mine)
    else:
        loss_fn = flce.huggingface.CausalLMLoss(flce.huggingface.return_hidden_states(mine))
    for calls in (1, 2):
        found = []
        for model in (own, mine):
            torch.manual_seed(5)
            outputs = model(**batch())
            loss = outputs.loss if model is own or loss_fn is None else loss_fn(outputs, batch()["labels"])
            loss.backward()
            found.append((loss.detach(), torch.rand(()), model.model.norm.mean.clone()))
        for mine_has, own_has in zip(found[1], found[0], strict=True):
            torch.testing.assert_close(mine_has, own_has)
        assert mine.model.norm.calls == own.model.norm.calls == len(hooked) == calls


def test_past_key_values_are_filled_once() -> None:
    own = tiny_model().train()
    mine = flce.patch(copy.deepcopy(own))
    losses, lengths = [], []
    for model in (own, mine):
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model.model(input_ids=batch()["input_ids"][:, :4], past_key_values=cache, use_cache=True)
        losses.append(model(**batch(), past_key_values=cache, use_cache=True).loss)
        lengths.append(cache.get_seq_length())
    torch.testing.assert_close(losses[1], losses[0])
    assert lengths == [16, 16]


def test_a_prefix_added_behind_the_patch_trains() -> None:
    peft = pytest.importorskip("peft")
    found = []
    for patched in (False, True):
        model = tiny_model().train()
        if patched:
            flce.patch(model)
        torch.manual_seed(5)
        model = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).train()
        loss = model(**batch(attention_mask=mask(0))).loss
        loss.backward()
        found.append((loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)))
    for got, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, expected)


def switch_transformers() -> Any:
    sizes = {"vocab_size": VOCAB_SIZE, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2}
    sparse = {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "router_jitter_noise": 0.0}
    config = transformers.SwitchTransformersConfig(**sizes, **sparse, dropout_rate=0.0, decoder_start_token_id=0)
    torch.manual_seed(3)
    return transformers.SwitchTransformersForConditionalGeneration(config).train()


def test_losses_under_other_names_are_refused() -> None:
    own = switch_transformers()
    mine = flce.patch(copy.deepcopy(own))
    torch.testing.assert_close(mine(**batch()).loss, own(**batch()).loss)
    with pytest.raises(flce.ArgumentError, match=r"contains encoder_z_loss, .*decoder_aux_loss.*output_router_logits"):
        mine(**batch(output_router_logits=True))


def bert_to_bert() -> Any:
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    bert = transformers.BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(bert, copy.deepcopy(bert))
    config.pad_token_id, config.decoder_start_token_id = 0, 1
    torch.manual_seed(3)
    return transformers.EncoderDecoderModel(config).train()


def test_a_mask_that_is_made_of_labels_is_refused_and_taken_by_hand() -> None:
    own = bert_to_bert()
    mine = flce.patch(copy.deepcopy(own))
    labels = batch()["labels"].masked_fill(mask(4) == 0, -100)
    with pytest.raises(flce.ArgumentError, match=r"decoder\.bert another attention_mask .*decoder_attention_mask"):
        mine(**batch() | {"labels": labels})
    read = own.prepare_decoder_input_ids_from_labels(labels)
    by_hand = batch(decoder_input_ids=read, decoder_attention_mask=(read != 0).long()) | {"labels": labels}
    torch.testing.assert_close(mine(**by_hand).loss, own(**by_hand).loss)
    torch.testing.assert_close(mine(**by_hand).loss, own(**batch() | {"labels": labels}).loss)


def test_shared_rows_are_what_whole_logits_are() -> None:
    rows, index = torch.randn(3, 7, dtype=torch.float64), torch.arange(10).reshape(2, 5) % 3
    logits, labels = SharedRows(rows, index, torch.bfloat16), torch.arange(10).reshape(2, 5) % 7
    assert logits.shape == (2, 5, 7) and logits.dtype == torch.bfloat16
    whole = rows[index]
    keep = labels != 3

    def losses(given: Tensor) -> list[Tensor]:
        capped = 3.0 * torch.tanh(given / 3.0) + torch.linspace(0, 1, 7, dtype=torch.float64)
        return [
            F.cross_entropy(capped[:, :-1].reshape(-1, 7), labels[:, 1:].reshape(-1)),
            F.cross_entropy(capped.float()[keep].contiguous().view(-1, 7), labels[keep], reduction="sum"),
            F.cross_entropy(capped.view(-1, 7), labels.view(-1), torch.arange(7.0, dtype=capped.dtype), ignore_index=2),
            F.cross_entropy(capped.view(-1, 7), labels.view(-1).masked_fill(labels.view(-1) == 2, -100), reduction="none"),
            F.log_softmax(capped[..., :5], dim=-1)[0].unsqueeze(0).whole()
            if isinstance(given, SharedRows)
            else F.log_softmax(capped[..., :5], dim=-1)[0].unsqueeze(0),
        ]

    with torch.no_grad():
        for got, expected in zip(losses(logits), losses(whole), strict=True):
            torch.testing.assert_close(got.double(), expected.double(), rtol=1e-2 if got.dtype == torch.bfloat16 else 1e-6, atol=1e-6)
        many = SharedRows(rows, torch.zeros(1 << 21, dtype=torch.int64), torch.float32)
        for weight in (None, torch.ones(7)):
            assert F.cross_entropy(many, torch.zeros(1 << 21, dtype=torch.int64), weight).isfinite()
        with pytest.raises(flce.ArgumentError, match=r"cannot be followed: aten\.sort"):
            many.sort()
        with pytest.raises(flce.ArgumentError, match=r"cannot be followed: .* in place"):
            logits.zero_()


@pytest.mark.parametrize("name", ["logits_to_keep"])
def test_labels_of_the_positions_that_are_kept(name: str) -> None:
    own = tiny_model().train()
    mine = flce.patch(copy.deepcopy(own))
    cut = batch(**{name: 5})
    cut["labels"] = cut["labels"][:, -5:]
    for _ in range(2):
        torch.testing.assert_close(mine(**cut).loss, own(**cut).loss)
        with pytest.raises(flce.ShapeError, match=rf"labels has shape \[2, 12\].*positions \[2, 5\].*{name}=5"):
            mine(**batch(**{name: 5}))
    torch.testing.assert_close(mine(**batch()).loss, own(**batch()).loss)


def test_two_models_share_an_output_layer() -> None:
    draft, target = tiny_model().train(), tiny_model().train()
    with torch.no_grad():
        draft.model.layers[0].mlp.down_proj.weight.mul_(9.0)
    draft.lm_head = target.lm_head
    stocks = copy.deepcopy([draft, target])
    models = [flce.patch(draft), flce.patch(target)]
    for _ in range(2):
        for mine, stock in zip(models, stocks, strict=True):
            outputs = mine(**batch())
            torch.testing.assert_close(outputs.loss, stock(**batch()).loss)
            assert outputs.logits is None
    flce.unpatch(draft)
    assert draft(**batch()).logits is not None and target(**batch()).logits is None
    flce.unpatch(target)
    assert "forward" not in target.lm_head.__dict__ and target(**batch()).logits is not None


def test_unpatched_under_accelerates_wrapper() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # a Trainer of an earlier test has set it
    model = flce.patch(tiny_model().train())
    stock = flce.unpatch(copy.deepcopy(model))
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    accelerator.prepare_model(model)
    assert model(**batch()).logits is None
    for _ in range(2):
        flce.unpatch(model)
        assert model(**batch()).logits is not None
        flce.patch(model)
        assert model(**batch()).logits is None
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    torch.testing.assert_close(model(**batch()).loss, stock(**batch()).loss)
    assert model(**batch()).logits is None
    flce.unpatch(model)
    torch.testing.assert_close(model(**batch()).logits, stock(**batch()).logits)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("patched_first", [True, False])
def test_an_output_layer_in_a_unit_of_fsdp_1_is_refused(patched_first: bool, use_orig_params: bool) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = tiny_model().train()
        if patched_first:
            flce.patch(model)
        policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: module is model.lm_head)
        wrapped = FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
        with pytest.raises(flce.ArgumentError, match="unit of its own of FSDP 1"):
            (wrapped if patched_first else flce.patch(wrapped))(**batch())
    finally:
        dist.destroy_process_group()


_SMALL = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "dropout": 0.0}
_SMALL |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "d_model": 16, "vocab_size": VOCAB_SIZE, "decoder_start_token_id": 3}
_SMALL |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def whisper() -> tuple[Any, dict[str, Tensor]]:
    config = transformers.WhisperConfig(**_SMALL, num_mel_bins=4, max_source_positions=16, max_target_positions=32)
    return transformers.WhisperForConditionalGeneration(config), {"input_features": torch.randn(2, 4, 32, generator=generator(3))}


def nllb() -> tuple[Any, dict[str, Tensor]]:
    sparse = {"num_experts": 4, "encoder_sparse_step": 1, "decoder_sparse_step": 1, "moe_token_dropout": 0.0, "router_jitter_noise": 0.0}
    rest = {"attention_dropout": 0.0, "activation_dropout": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
    config = transformers.NllbMoeConfig(**_SMALL, **sparse, **rest, max_position_embeddings=64)
    return transformers.NllbMoeForConditionalGeneration(config), {"input_ids": batch()["input_ids"]}


def mbart() -> tuple[Any, dict[str, Tensor]]:
    """A model that makes nothing of labels of which a whole sequence is ignored, and fails by them."""
    return transformers.MBartForConditionalGeneration(transformers.MBartConfig(**_SMALL)), {"input_ids": batch()["input_ids"]}


@pytest.mark.parametrize("fused_head", [False, True], ids=["", "FusedLMHead"])
@pytest.mark.parametrize("make", [whisper, nllb, mbart])
def test_a_decoder_reads_what_the_models_module_makes_of_labels(make: Any, fused_head: bool) -> None:
    torch.manual_seed(3)
    own, given = make()
    mine = copy.deepcopy(own.train())
    if fused_head:
        mine.set_output_embeddings(flce.FusedLMHead.from_linear(mine.get_output_embeddings(), shift=0))
    flce.patch(mine)
    labels = batch()["labels"].masked_fill(mask(4) == 0, -100)
    for _ in range(2):
        outputs = mine(**given, labels=labels)
        torch.testing.assert_close(outputs.loss, own(**given, labels=labels).loss)
        assert outputs.logits is None


def of_8_bits(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(torch.ones(VOCAB_SIZE, 16, dtype=torch.int8), requires_grad=False)


def offloaded(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.data.to("meta"))


@pytest.mark.parametrize(
    ("change", "given", "kind", "message"),
    [
        (of_8_bits, {}, flce.ArgumentError, "int8"),
        (offloaded, {}, flce.PlacementError, "on meta"),
        (
            lambda model: model.lm_head.register_forward_hook(lambda *given: given[-1] * 2),
            {},
            flce.ArgumentError,
            r"its output layer has hooks \(.*lambda.*2 times as large",
        ),
        (lambda model: None, {"labels": torch.zeros(2, 12)}, flce.DTypeError, "labels has dtype torch.float32"),
        (lambda model: None, {"labels": torch.zeros(2, 11, dtype=torch.int64)}, flce.ShapeError, r"labels has shape \[2, 11\]"),
    ],
    ids=["8 bits", "offloaded", "hook", "labels", "shape"],
)
def test_the_cause_is_named(change: Any, given: Any, kind: type[Exception], message: str) -> None:
    model = flce.patch(tiny_model().train())
    change(model)
    with pytest.raises(kind, match=message):
        model(**(batch() | given))


@pytest.mark.parametrize("call", [flce.patch, flce.unpatch, flce.huggingface.return_hidden_states])
def test_no_model_is_refused_by_name(call: Any) -> None:
    for given in ("name", None, torch.zeros(2)):
        with pytest.raises(flce.DTypeError, match=f"model is a {type(given).__name__}; it must be a module"):
            call(given)


def test_what_does_nothing_is_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_once, "said", set())
    model = flce.patch(tiny_model().train())
    tokens = {"input_ids": batch()["input_ids"]}
    for _ in range(2):
        model(**tokens)  # the call of Trainer(label_smoothing_factor=...)
    own = model.forward
    model.forward = lambda *args, fused_lm_head=False, **kwargs: None if fused_lm_head else own(*args, **kwargs)  # TRL's wrapper
    for _ in range(2):
        model(**batch(), fused_lm_head=True)
    model(**batch())
    with torch.no_grad():
        model(**tokens)
    said = [record.getMessage() for record in caplog.records if record.name == "flce"]
    assert len(said) == 2 and "label_smoothing_factor" in said[0] and "flce.trl.patch()" in said[1]


def question_of(outputs: dict[str, Any], labels: Tensor) -> Any:
    return _own_loss.Question("Model", lambda changes, counts: outputs, False, {}, labels, None, None, -100, False, 1, False)


def test_a_forward_without_a_loss_or_logits_to_follow_is_refused() -> None:
    labels, rows = torch.zeros(2, 4, dtype=torch.int64), torch.randn(2, VOCAB_SIZE)
    logits = SharedRows(rows, torch.zeros(2, 4, dtype=torch.int64), torch.float32)
    case = _own_loss._Case("these labels", {}, labels, None)
    for outputs, says in (
        ({"loss": torch.ones(2), "logits": logits}, r"gives no loss for labels \[2, 4\]"),
        ({"loss": None, "logits": logits}, "gives no loss"),
        ({"loss": torch.ones(()), "logits": rows}, "gives a Tensor for them"),
    ):
        with pytest.raises(flce.ArgumentError, match=says):
            _own_loss._loss(question_of(outputs, labels), case)
    # Labels that are not one for each position have no sequences to take means of.
    loss = _own_loss._loss(question_of({"loss": torch.ones(()), "logits": logits}, labels[:, :3]), case._replace(labels=labels[:, :3]))
    assert not _own_loss._is_mean_of_sequences(question_of({}, labels), [loss], 1)


def test_classes_are_compared_where_labels_lie_in_sequences() -> None:
    labels = torch.zeros(4, dtype=torch.int64)
    flat = question_of({}, labels)._replace(of_classes=lambda changes, counts: pytest.fail("a replay"))
    _own_loss._compare_classes(flat, _own_loss.Meaning(1), None, VOCAB_SIZE)


def test_no_number_is_like_no_number_alone() -> None:
    nan = float("nan")
    assert _own_loss._alike(nan, nan)
    assert not _own_loss._alike(nan, 1.0) and not _own_loss._alike(1.0, nan)
    assert _own_loss._alike(1.0, 1.0 + 5e-6) and not _own_loss._alike(1.0, 1.0 + 2e-5)


class WritesOverLabels(transformers.T5ForConditionalGeneration):  # type: ignore[misc,name-defined]
    """Shifts as FSMT does: labels that are ignored become padding in the caller's own memory, and a row of them alone has no end."""

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        if (labels == -100).all(dim=1).any():
            raise RuntimeError("index -1 is out of bounds")
        labels.masked_fill_(labels == -100, self.config.pad_token_id)
        return self._shift_right(labels)  # type: ignore[no-any-return]


def test_labels_that_a_model_would_write_over() -> None:
    own = WritesOverLabels(encoder_decoder("t5").config).train()
    mine = flce.patch(copy.deepcopy(own))
    labels = batch()["labels"].index_fill(1, torch.tensor([0, 2]), -100)
    before = labels.clone()
    for _ in range(2):
        torch.testing.assert_close(mine(**batch() | {"labels": labels}).loss, own(**batch() | {"labels": labels}).loss)
        assert torch.equal(labels, before)
    with pytest.raises(flce.ArgumentError, match="makes no decoder_input_ids of them"):
        mine(**batch() | {"labels": labels.index_fill(0, torch.tensor([1]), -100)})
