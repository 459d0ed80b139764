"""flce.megatron against GPTModels of megatron-core on the CPU: losses and gradients are those of the model's own path."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flce

pytest.importorskip("megatron.core", reason="megatron-core is not installed (tools/setup.sh --python)")

import megatron_support as support
from megatron_support import BATCH, PADDED, SEQUENCE, VOCAB, Batch, fused_calls, gpt_model, megatron_groups  # noqa: F401  # fixtures
from rank_support import cases_passed
from test_pipeline import launch

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings about missing packages, and about Megatron's later changes

ON_DEVICE = True
EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "megatron_style.py"


@pytest.fixture
def no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers as wide as the vocabulary may not multiply."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    own = ColumnParallelLinear._forward_impl

    def narrow(self: Any, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        assert weight.shape[0] != PADDED, "logits are made"
        return own(self, input, weight, *args, **kwargs)

    monkeypatch.setattr(ColumnParallelLinear, "_forward_impl", narrow)


def compare(own: Any, mine: Any, *, rtol: float = 1e-4, atol: float = 1e-6, **keywords: Any) -> None:
    batch = Batch()
    losses = []
    for model in (own, mine):
        model.zero_grad()
        losses.append(batch.losses(model, **keywords))
        assert losses[-1].shape == (BATCH, SEQUENCE) and losses[-1].dtype == torch.float32 and losses[-1].is_contiguous()
        batch.masked_mean(losses[-1]).backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=rtol, atol=max(atol, 2e-6))
    support.same_gradients(mine, own, rtol=rtol, atol=atol)


@pytest.mark.parametrize("tied", [False, True])
def test_patched_model_equals_its_own_path(tied: bool, fused: list[Any]) -> None:
    own = gpt_model(tied=tied)
    mine = flce.megatron.patch(support.copied(own, tied=tied, seed=7))
    compare(own, mine)
    assert len(fused) == 1 and fused[0]["reduction"] == "none"
    with torch.no_grad():
        torch.testing.assert_close(Batch().losses(mine.eval()), Batch().losses(own.eval()), rtol=1e-5, atol=2e-6)
    assert len(fused) == 2


def test_no_logits_are_made(no_logits: None) -> None:
    mine = flce.megatron.patch(gpt_model(depths=1))
    Batch().losses(mine).sum().backward()
    with pytest.raises(AssertionError, match="logits are made"):
        Batch().losses(flce.megatron.unpatch(mine))


def test_bf16_model() -> None:
    own = gpt_model(tied=True, params_dtype=torch.bfloat16, bf16=True).bfloat16()
    mine = flce.megatron.patch(support.copied(own, tied=True, params_dtype=torch.bfloat16, bf16=True).bfloat16())
    compare(own, mine, rtol=5e-2, atol=2e-2)


def test_vocab_size_leaves_padding_out(fused: list[Any]) -> None:
    """Megatron counts padded rows as classes; with vocab_size they have no probability."""
    own = gpt_model(seed=3)
    mine = flce.megatron.patch(support.copied(own), vocab_size=VOCAB)
    batch = Batch()
    logits = own(batch.tokens, batch.positions, batch.attention_mask)
    right = torch.nn.functional.cross_entropy(logits[..., :VOCAB].flatten(0, 1), batch.labels.flatten(), reduction="none")
    losses = batch.losses(mine)
    torch.testing.assert_close(losses.flatten(), right, rtol=1e-5, atol=2e-6)
    right.sum().backward()
    losses.sum().backward()
    support.same_gradients(mine, own, rtol=1e-4, atol=1e-5)
    assert not mine.output_layer.weight.grad[VOCAB:].any()


def test_model_without_labels_and_after_unpatch_is_its_own(fused: list[Any]) -> None:
    own = gpt_model()
    mine = support.copied(own)
    names = set(mine.__dict__), set(mine.output_layer.__dict__), list(mine.state_dict())
    assert flce.megatron.patch(mine) is mine and list(mine.state_dict()) == names[2]
    batch = Batch()
    arguments = (batch.tokens, batch.positions, batch.attention_mask)
    assert torch.equal(mine(*arguments), own(*arguments)) and mine(*arguments).shape == (BATCH, SEQUENCE, PADDED)
    assert flce.megatron.unpatch(mine) is mine
    assert (set(mine.__dict__), set(mine.output_layer.__dict__), list(mine.state_dict())) == names
    assert torch.equal(batch.losses(mine), batch.losses(own)) and not fused
    assert flce.megatron.unpatch(mine) is mine


def test_patching_once_more_has_the_new_options(fused: list[Any]) -> None:
    mine = flce.megatron.patch(gpt_model(), z_loss=1e-3)
    Batch().losses(mine)
    flce.megatron.patch(mine, workspace_limit_bytes=1 << 24, label_smoothing=0.1)
    Batch().losses(mine)
    assert fused[0]["z_loss"] == 1e-3 and "z_loss" not in fused[1] and fused[1]["label_smoothing"] == 0.1


class Stack(torch.nn.Module):
    """Layers of a MambaModel, which takes a specification of them."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return torch.tanh(self.layer(hidden_states))


def test_mamba_model(fused: list[Any]) -> None:
    """Its loss is in its forward, and it has no postprocessing."""
    module = pytest.importorskip("megatron.core.models.mamba.mamba_model")
    config = gpt_model().config
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(
            module.MambaModel(config, support.ModuleSpec(module=Stack), PADDED, SEQUENCE, share_embeddings_and_output_weights=True)
        )
    own, mine = models
    flce.megatron.patch(mine)
    batch = Batch()
    arguments = (batch.tokens, batch.positions, batch.attention_mask)
    losses = [model(*arguments, labels=batch.labels) for model in models]
    for each in losses:
        batch.masked_mean(each).backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=2e-6)
    support.same_gradients(mine, own)
    assert len(fused) == 1 and torch.equal(mine(*arguments), own(*arguments))
    flce.megatron.unpatch(mine)
    assert torch.equal(mine(*arguments, labels=batch.labels), losses[0]) and len(fused) == 1


# ── Multi-token prediction ──────────────────────────


def logits_of_depths(model: Any, batch: Batch) -> list[Tensor]:
    """Logits of each depth, from a model that is not patched."""
    logits: list[Tensor] = []
    handle = model.output_layer.register_forward_hook(lambda *given: logits.append(given[2][0].detach()))
    batch.losses(model)
    handle.remove()
    return logits[:-1]


def hit_some(model: Any, batch: Batch) -> None:
    """Labels that the heads of both depths get right here and there."""
    first, second = (logits.argmax(-1).t() for logits in logits_of_depths(model, batch))
    batch.labels[:, 1::3], batch.labels[:, 2::3] = first[:, :-1:3], second[:, :-2:3]


def hits_of_logits(model: Any, batch: Batch) -> list[list[float]]:
    """Hits and counts of each depth, from the logits of a model that is not patched."""
    labels, mask, rows = batch.labels, batch.loss_mask, []
    for of_depth in logits_of_depths(model, batch):
        labels, _ = support.roll_tensor(labels)
        mask, _ = support.roll_tensor(mask)
        rows.append([float(((of_depth.argmax(-1).t() == labels) & mask.bool()).sum()), float(mask.bool().sum())])
    return rows


@pytest.mark.parametrize(("tied", "per_token"), [(True, False), (False, True)])
def test_multi_token_prediction(tied: bool, per_token: bool, fused: list[Any]) -> None:
    settings = {"tied": tied, "depths": 2, "calculate_per_token_loss": per_token, "mtp_loss_scaling_factor": 0.3}
    own = gpt_model(**settings)
    mine = flce.megatron.patch(support.copied(own, **settings))
    batch, logged = Batch(), []
    hit_some(own, batch)
    support.MTPLossAutoScaler.set_loss_scale(torch.tensor(0.5))
    try:
        for model in (own, mine):
            support.MTPLossLoggingHelper.tracker.clear()
            batch.masked_mean(batch.losses(model)).backward()
            logged.append({name: value for name, value in support.MTPLossLoggingHelper.tracker.items() if isinstance(value, Tensor)})
    finally:
        support.MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    support.same_gradients(mine, own)
    assert logged[0].keys() == logged[1].keys() and logged[0]
    for name, values in logged[0].items():
        torch.testing.assert_close(logged[1][name], values)
    assert len(fused) == 3
    hits = hits_of_logits(own, batch)
    assert all(hits_of_depth > 2 for hits_of_depth, _ in hits)
    assert flce.megatron.mtp_acceptance(mine, reset=False).tolist() == hits
    batch.losses(mine)
    group = support.parallel_state.get_data_parallel_group(with_context_parallel=True)
    assert flce.megatron.mtp_acceptance(mine, group).tolist() == [[2 * count for count in row] for row in hits]
    assert not flce.megatron.mtp_acceptance(mine).any()


# ── The output processor ────────────────────────────


@pytest.mark.parametrize("tied", [False, True])
def test_output_processor_equals_the_models_own_path(tied: bool, fused: list[Any], no_logits: None) -> None:
    own, mine = gpt_model(tied=tied), gpt_model(tied=tied)
    flce.megatron.patch(own)  # compared with the model's own path above
    batch = Batch()
    for model, losses in ((own, batch.losses(own)), (mine, support.call_with_processor(mine, batch, flce.megatron.output_processor))):
        assert losses.shape == (BATCH, SEQUENCE)
        batch.masked_mean(losses).backward()
        assert model.embedding.word_embeddings.weight.grad is not None
    support.same_gradients(mine, own, rtol=0.0, atol=0.0)
    assert len(fused) == 2


def test_mup_scale_reaches_the_loss(fused: list[Any]) -> None:
    own = gpt_model(seed=5)
    mine = support.copied(own)
    batch = Batch()
    logits = own(batch.tokens, batch.positions, batch.attention_mask) * 0.25
    right = own.compute_language_model_loss(batch.labels, logits.transpose(0, 1).contiguous())
    got = support.call_with_processor(mine, batch, flce.megatron.output_processor, scale=lambda logits: logits * 0.25)
    torch.testing.assert_close(got, right, rtol=1e-5, atol=2e-6)
    right.sum().backward()
    got.sum().backward()
    support.same_gradients(mine, own)
    assert fused[0]["logit_scale"] == 0.25
    with pytest.raises(flce.ArgumentError, match="torch's tanh of logits that flce does not make"):
        support.call_with_processor(mine, batch, flce.megatron.output_processor, scale=torch.tanh)


def test_entropy_beside_the_loss() -> None:
    own = gpt_model()
    batch = Batch()
    processor = flce.megatron.OutputProcessor(return_entropy=True, temperature=0.7)
    losses, entropy = support.call_with_processor(own, batch, processor)
    log_p = torch.log_softmax(own(batch.tokens, batch.positions, batch.attention_mask) / 0.7, -1)
    torch.testing.assert_close(entropy, -(log_p.exp() * log_p).sum(-1), rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(losses, -log_p.gather(-1, batch.labels[..., None])[..., 0], rtol=1e-4, atol=2e-6)


def test_hooks_before_the_output_layer_run() -> None:
    """Where parameters are gathered (overlap_param_gather) is such a hook."""
    model, seen = gpt_model(), []
    model.output_layer.register_forward_pre_hook(lambda *_: seen.append(1))
    support.call_with_processor(model, Batch(), flce.megatron.output_processor)
    Batch().losses(flce.megatron.patch(model))
    assert len(seen) == 2 and "forward" in model.output_layer.__dict__


def test_packed_sequences(fused: list[Any]) -> None:
    """[t, 1, h] and [1, t], with heads whose labels stay within their sequence. The local attention takes no packed sequences, so that the
    postprocessing of both models is given hidden states."""
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.tensor([0, 5, 12, 16], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    own = gpt_model(depths=2)
    mine = flce.megatron.patch(support.copied(own, depths=2))
    hidden, labels = torch.randn(3 * SEQUENCE, 1, 32), torch.randint(0, VOCAB, (1, SEQUENCE))
    made = []
    for model in (own, mine):
        states = hidden.clone().requires_grad_()
        given = {"input_ids": None, "position_ids": None, "rotary_pos_emb": None, "rotary_pos_cos": None, "rotary_pos_sin": None}
        losses = model._postprocess(states, labels=labels, packed_seq_params=packed, mtp_in_postprocess=False, **given)
        losses.sum().backward()
        made.append((losses, states.grad, model.output_layer.weight.grad))
    assert made[1][0].shape == (1, SEQUENCE) and len(fused) == 3
    for right, got in zip(*made, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=2e-6)
    assert flce.megatron.mtp_acceptance(mine)[:, 1].tolist() == [13.0, 10.0]


@pytest.mark.parametrize("runtime_gather_output", [None, True])
def test_process_mtp_loss(runtime_gather_output: bool | None, monkeypatch: pytest.MonkeyPatch, fused: list[Any], no_logits: None) -> None:
    """Where the installed package has no such function, one that asks of its arguments what that of newer versions does."""
    settings = {"labels": torch.randint(0, VOCAB, (BATCH, SEQUENCE)), "loss_mask": Batch().loss_mask, "is_training": True}
    if not support.HAS_PROCESS_MTP_LOSS:
        with pytest.raises(flce.UnavailableError, match="has no process_mtp_loss"):
            flce.megatron.process_mtp_loss()
        monkeypatch.setattr(support.multi_token_prediction, "process_mtp_loss", support.process_mtp_loss, raising=False)
    model = gpt_model(depths=2)
    states = torch.randn(3 * SEQUENCE, BATCH, 32, requires_grad=True)
    made = flce.megatron.process_mtp_loss(
        states,
        output_layer=model.output_layer,
        output_weight=None,
        runtime_gather_output=runtime_gather_output,
        compute_language_model_loss=model.compute_language_model_loss,
        config=model.config,
        **settings,
    )
    main = made[0] if isinstance(made, tuple) else made
    main.sum().backward()
    assert len(fused) == 2 and all(call["return_top1"] for call in fused)
    with pytest.raises(flce.ArgumentError, match="is flce's, which calls it; replace the name in the model's module"):
        monkeypatch.setattr(support.multi_token_prediction, "process_mtp_loss", flce.megatron.process_mtp_loss)
        flce.megatron.process_mtp_loss()
    assert model.output_layer.weight.grad.any() and states.grad[SEQUENCE:].any() and (states.grad[:SEQUENCE] == 1).all()


def test_the_models_own_loss_comes_behind_its_depths(monkeypatch: pytest.MonkeyPatch, fused: list[Any]) -> None:
    """Why depths and the model's own loss are not one call: its hidden states carry the depths' losses. docs/training.md has the reason;
    where a Megatron hangs the losses on something else, it no longer holds."""
    model = flce.megatron.patch(gpt_model(depths=2))
    given: list[Any] = []
    own = support._head.defer
    monkeypatch.setattr(support._head, "defer", lambda layer, hidden, **others: given.append(hidden) or own(layer, hidden, **others))
    Batch().losses(model).sum().backward()
    assert len(given) == len(fused) == 3
    assert [type(hidden.grad_fn).__name__.startswith("MTPLossAutoScaler") for hidden in given] == [False, False, True]


@pytest.mark.parametrize("main_grad", [None, True])
def test_heads_that_leave_the_weight_alone(main_grad: bool | None, monkeypatch: pytest.MonkeyPatch, fused: list[Any]) -> None:
    """Newer versions' mtp_detach_heads: depths train themselves, and neither the weight nor its main_grad has a gradient of theirs."""
    if not support.HAS_PROCESS_MTP_LOSS:
        monkeypatch.setattr(support.multi_token_prediction, "process_mtp_loss", support.process_mtp_loss, raising=False)
    model = gpt_model(depths=2)
    weight = with_main_grad(model)
    states = torch.randn(3 * SEQUENCE, BATCH, 32, requires_grad=True)
    made = flce.megatron.OutputProcessor(main_grad=main_grad).process_mtp_loss(
        states,
        labels=torch.randint(0, VOCAB, (BATCH, SEQUENCE)),
        loss_mask=Batch().loss_mask,
        output_layer=model.output_layer,
        output_weight=weight.detach(),
        runtime_gather_output=None,
        is_training=True,
        compute_language_model_loss=model.compute_language_model_loss,
        config=model.config,
    )
    (made[0] if isinstance(made, tuple) else made).sum().backward()
    assert len(fused) == 2 and states.grad[SEQUENCE:].any()
    assert weight.grad is None and (weight.main_grad == 1).all() and weight.grad_added_to_main_grad is False


# ── main_grad ───────────────────────────────────────


def with_main_grad(model: Any, *, offset: int = 0) -> Tensor:
    weight = model.output_layer.weight
    weight.main_grad = torch.ones(weight.numel() + offset)[offset:].view_as(weight)
    weight.grad_added_to_main_grad = False
    return weight


def test_main_grad_has_the_gradient_and_autograd_a_dummy(fused: list[Any]) -> None:
    """Twice the same loss, in one graph and in two: everything is added."""
    own = gpt_model()
    Batch().losses(own).sum().backward()
    model = flce.megatron.patch(gpt_model(), main_grad=True)
    weight = with_main_grad(model)
    weight.register_post_accumulate_grad_hook(lambda parameter: arrived.append(parameter.grad.shape))
    arrived: list[torch.Size] = []
    for losses in (Batch().losses(model).sum(), Batch().losses(model).sum() + Batch().losses(model).sum()):
        losses.backward()
    torch.testing.assert_close(weight.main_grad, 1 + 3 * own.output_layer.weight.grad, rtol=1e-4, atol=1e-5)
    assert weight.grad_added_to_main_grad is True and arrived == [weight.shape] * 2
    torch.use_deterministic_algorithms(True)  # memory that nobody wrote then holds NaN
    try:
        for zeros in (False, True):
            weight.zero_out_wgrad, weight.grad = zeros, None
            Batch().losses(model).sum().backward()
            assert (weight.grad == 0).all() if zeros else weight.grad.isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_depths_share_one_dummy(monkeypatch: pytest.MonkeyPatch, fused: list[Any]) -> None:
    runs: list[Any] = []
    backward = support._head.MainGrad.backward
    monkeypatch.setattr(
        support._head.MainGrad, "backward", staticmethod(lambda ctx, gradient: runs.append(gradient) or backward(ctx, gradient))
    )
    own, model = gpt_model(depths=2), flce.megatron.patch(gpt_model(depths=2), main_grad=True)
    weight = with_main_grad(model)
    for each in (own, model):
        Batch().losses(each).sum().backward()
    torch.testing.assert_close(weight.main_grad, 1 + own.output_layer.weight.grad, rtol=1e-4, atol=1e-5)
    assert runs == [None] and len(fused) == 3


def test_main_grad_is_left_alone_where_a_gradient_is_asked_for() -> None:
    own, model = gpt_model(), flce.megatron.patch(gpt_model(), main_grad=True)
    weight = with_main_grad(model)
    (right,) = torch.autograd.grad(Batch().losses(own).sum(), [own.output_layer.weight])
    (got,) = torch.autograd.grad(Batch().losses(model).sum(), [weight])
    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-6)
    assert (weight.main_grad == 1).all() and weight.grad_added_to_main_grad is False
    weight.requires_grad_(False)
    Batch().losses(model).sum().backward()
    assert weight.grad is None and (weight.main_grad == 1).all()


def test_main_grad_by_the_layers_own_choice(fused: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    """gradient_accumulation_fusion chooses it, where kernels can write the memory."""
    for offset, choice, taken in ((0, None, True), (1, None, False), (0, False, False)):
        model = flce.megatron.patch(gpt_model(), main_grad=choice)
        weight = with_main_grad(model, offset=offset)
        model.output_layer.gradient_accumulation_fusion = True
        Batch().losses(model).sum().backward()
        assert (fused[-1]["grad_weight_out"] is not None) is taken and weight.grad_added_to_main_grad is taken
        assert (weight.main_grad == 1).all() is not taken
    assert caplog.text.count("goes through autograd, not to main_grad directly: grad_weight_out begins at") == 1
    model = flce.megatron.patch(gpt_model(), main_grad=True)
    with pytest.raises(flce.ArgumentError, match="main_grad is True and the output layer's weight has None for main_grad"):
        Batch().losses(model)
    with_main_grad(model, offset=1)
    with pytest.raises(flce.ArgumentError, match="must be a multiple of 16 bytes"):
        Batch().losses(model)


# ── Processes of their own ──────────────────────────


@pytest.mark.nightly("examples/megatron_style.py")
def test_example_trains_and_needs_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1048576")  # freed memory goes back to the system, and a peak shows
    output = launch(str(EXAMPLE), "--tiny", "--depths", "1", "--steps", "3")
    lines = re.findall(r"^ +(as it comes|flce): losses ([\d. ]+?) +[\d.]+ ms a step +([\d.]+) MiB", output, re.MULTILINE)
    losses = {name: [float(loss) for loss in each.split()] for name, each, _ in lines}
    memory = {name: float(mib) for name, _, mib in lines}
    assert len(losses["flce"]) == 3 and losses["flce"] == pytest.approx(losses["as it comes"], rel=1e-4)
    assert losses["flce"][-1] < losses["flce"][0]
    assert memory["flce"] < memory["as it comes"] / 2 and "% accepted at depth 1" in output


@pytest.mark.nightly("python/flce/megatron", "python/flce/parallel", "python/tests/test_megatron", "python/tests/megatron")
def test_ranks() -> None:
    """Tensor parallel with and without sequence parallel, context parallel, and data parallel with main_grad and overlapped reductions."""
    assert cases_passed("megatron_worker.py", "2") == {2: 14}
