"""flce.megatron against GPTModels of megatron-core on the CPU: losses and gradients are those of the model's own path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flce

pytest.importorskip("megatron.core", reason="megatron-core is not installed (tools/setup.sh --python)")

import megatron_support as support
from megatron_support import BATCH, PADDED, SEQUENCE, VOCAB, Batch, gpt_model

from test_tensor_parallel import cases_passed

from flce.megatron import _head

pytestmark = pytest.mark.filterwarnings("ignore")  # of what is not installed, and of what Megatron will not do one day


@pytest.fixture(scope="module", autouse=True)
def _groups() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with support.megatron_on_cpu():
        yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keywords of every call of flce's function."""
    support.MTPLossLoggingHelper.tracker.clear()
    calls: list[dict[str, Any]] = []
    function = flce.linear_cross_entropy

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return function(*args, **kwargs)

    monkeypatch.setattr(_head, "linear_cross_entropy", counted)
    return calls


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


# ── Multi-token prediction ──────────────────────────


def logits_of_depths(model: Any, batch: Batch) -> list[Tensor]:
    """Of a model that is not patched."""
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
    """What the heads of a model that is not patched accept, from their logits."""
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


# ── Ranks ───────────────────────────────────────────


def test_ranks() -> None:
    """Tensor parallel with and without sequence parallel, and data parallel with main_grad and overlapped reductions."""
    assert cases_passed("megatron_worker.py", 2) == 10
