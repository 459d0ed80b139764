"""Refusals of an engine's calls, before anything is computed or changed: one process, one stage."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from engine_support import D, ToyStage, V, batch_of, sft_loss, token_losses, whole_batch
from torch import Tensor

import flce
from flce.engine import PipelineEngine


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


LENGTHS = [3, 4, 5, 6]
IDS, CU_SEQLENS = batch_of(0, LENGTHS)


def made(**options: Any) -> PipelineEngine:
    stage = ToyStage(0, 1)
    return PipelineEngine(stage, None, torch.optim.SGD(stage.parameters(), lr=0.1), num_micro_batches=2, **options)


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"temperature": 0.5}, 'temperature is 0.5; it is for output="logprobs" and "entropy", and output is \'logits\''),
        ({"temperature": 2, "output": "hidden"}, "and output is 'hidden'"),
        ({"labels": IDS}, "labels are for output=\"logprobs\"; output is 'logits'"),
        ({"labels": IDS, "output": "entropy"}, "output is 'entropy'"),
        ({"labels": IDS[:, None], "output": "logprobs"}, r"labels has shape \[18, 1\]"),
        ({"labels": IDS.float(), "output": "logprobs"}, r"labels is a torch\.float32 tensor; it must be an int64 or int32 tensor"),
        ({"labels": IDS.tolist(), "output": "logprobs"}, "labels is a list"),
        ({"temperature": 0, "output": "logprobs"}, r"temperature is 0; it must be between 2\^-100 and 2\^100"),
        ({"temperature": float("nan"), "output": "entropy"}, "temperature is nan"),
        ({"temperature": torch.ones(18), "output": "logprobs"}, "temperature is tensor.*; it must be a number"),
    ],
)
def test_forward_refuses_what_its_output_would_not_show(keywords: dict[str, Any], says: str) -> None:
    engine = made()
    with pytest.raises(flce.ArgumentError, match=says):
        engine.forward(IDS, CU_SEQLENS, **keywords)
    made_of = engine.forward(IDS, CU_SEQLENS, output="logprobs", labels=IDS.int(), temperature=2)
    assert made_of is not None and made_of.shape == IDS.shape


def test_what_ends_no_engine() -> None:
    """Arguments that the stages, the head or the loss function would stumble over, refused before anything is sent."""
    engine = made(normalize="tokens")
    beyond = IDS.clone()
    beyond[4] = V
    for ids, says in (
        (beyond, f"packed_input_ids has {V}; ids must be 0 to {V - 1}"),
        (IDS - 60, "packed_input_ids has -[0-9]+; ids must"),
    ):
        for call in (engine.train_batch, engine.eval_batch):
            with pytest.raises(flce.ArgumentError, match=says):
                call(ids, CU_SEQLENS, sft_loss, labels=IDS)
        with pytest.raises(flce.ArgumentError, match=says):
            engine.forward(ids.int(), CU_SEQLENS)
    with pytest.raises(flce.ArgumentError, match="output is 'values', and the last stage's head has 53 rows"):
        engine.forward(IDS, CU_SEQLENS, output="values")
    for call in (engine.train_batch, engine.eval_batch):
        with pytest.raises(flce.ArgumentError, match="loss_fn is a NoneType; it must be a function"):
            call(IDS, CU_SEQLENS, None, labels=IDS)  # type: ignore[arg-type]
    assert engine.train_batch(IDS, CU_SEQLENS, sft_loss, labels=IDS) is not None
    critic = PipelineEngine(ToyStage(0, 1, rows=1))
    with pytest.raises(flce.ArgumentError, match="output is 'entropy', and the last stage's head has 1 rows"):
        critic.forward(IDS, CU_SEQLENS, output="entropy")


def test_sequences_longer_than_learned_positions_end_no_engine() -> None:
    stage = ToyStage(0, 1)
    stage.num_embeddings, stage.max_positions = V + 1, 6  # more ids than the head has rows, as for ids that are never predicted
    stage.embedding = torch.nn.Parameter(torch.zeros(V + 1, D))
    engine = PipelineEngine(stage)
    with pytest.raises(flce.ArgumentError, match="cu_seqlens gives sequence 1 15 tokens; the model has learned positions of 6"):
        engine.forward(IDS, torch.tensor([0, 3, 18]), num_micro_batches=2)
    assert engine.forward(torch.full_like(IDS, V), CU_SEQLENS) is not None
    with pytest.raises(flce.ArgumentError, match=f"ids must be 0 to {V}"):
        engine.forward(torch.full_like(IDS, V + 1), CU_SEQLENS)


def test_a_stage_without_weights_is_refused() -> None:
    with pytest.raises(flce.ArgumentError, match=r"stage 0 has parameters on the meta device; load them first \(load_stage\)"):
        PipelineEngine(ToyStage(0, 1, tied=True).to("meta"))


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    """An optimizer of other parameters trains nothing, or, beside the stages', parameters whose gradients nobody reduces or clears."""
    stage = ToyStage(0, 1)
    temperature = torch.nn.Parameter(torch.ones(()))
    for parameters, says in (
        (ToyStage(0, 1).parameters(), r"optimizer has 10 parameters in group 0 that are none of this rank's stages', the first of shape"),
        ([*stage.parameters(), temperature], r"1 parameters in group 0 .* of shape \[\]: no gradient of theirs is reduced or cleared"),
    ):
        engine = PipelineEngine(stage, None, torch.optim.SGD(parameters, lr=0.1))
        with pytest.raises(flce.ArgumentError, match=says):
            engine.train_batch(IDS, CU_SEQLENS, sft_loss, labels=IDS)
        engine.optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
        assert engine.train_batch(IDS, CU_SEQLENS, sft_loss, labels=IDS) is not None


def test_a_scheduler_that_cannot_be_stepped_is_refused_before_the_optimizer_steps() -> None:
    schedulers = torch.optim.lr_scheduler
    engine = made()
    optimizer = engine.optimizer
    assert optimizer is not None
    before = [parameter.detach().clone() for parameter in engine.parameters()]

    def refused(scheduler: Any, says: str) -> None:
        engine.lr_scheduler = scheduler
        with pytest.raises(flce.ArgumentError, match=says):
            engine.train_batch(IDS, CU_SEQLENS, sft_loss, labels=IDS)
        assert all(torch.equal(parameter, old) for parameter, old in zip(engine.parameters(), before, strict=True))

    refused(schedulers.ReduceLROnPlateau(optimizer), "lr_scheduler is a ReduceLROnPlateau, whose step takes a metric")
    refused(object(), r"lr_scheduler is a object, which has no step\(\)")
    engine.lr_scheduler = None
    engine.set_version_steps(3)
    refused(schedulers.ReduceLROnPlateau(optimizer), "whose step takes a metric")  # 3 would be the metric
    chained = schedulers.ChainedScheduler([schedulers.ConstantLR(optimizer)])
    refused(chained, r"lr_scheduler is a ChainedScheduler, whose step cannot be called as step\(3\)")
    with pytest.raises(flce.ArgumentError, match="set_version_steps is for schedulers that take it"):
        engine.set_version_steps(4)
    for steps in (-1, 1.5, "3", None, True):
        with pytest.raises(flce.ArgumentError, match=r"version_steps is .*; it must be an integer of 0 or more"):
            engine.set_version_steps(steps)  # type: ignore[arg-type]
    engine.version_steps = None
    assert engine.train_batch(IDS, CU_SEQLENS, sft_loss, labels=IDS) is not None


@pytest.mark.parametrize(
    ("token_count", "says"),
    [
        (
            torch.tensor([0.5, 0.25, 1.0, 1.0]),
            r"token_count gives 0\.75 tokens for microbatch 0 \(sequences 0 to 1\); it must give a whole",
        ),
        (lambda **_: 2.5, r"token_count gives 2\.5 tokens"),
        (lambda **_: float("nan"), "token_count gives nan tokens"),
        (lambda **_: torch.tensor([1, 2]), r"token_count gives tensor\(\[1, 2\]\) tokens"),
        (lambda **_: None, "token_count gives None tokens"),
        (lambda **_: -1, "token_count gives -1 tokens"),
        ([2, 3, 4, 5], r"token_count is a list; it must be a function or a tensor \[4\]"),
    ],
)
def test_counts_that_are_none_are_refused(token_count: Any, says: str) -> None:
    engine = made(normalize="tokens")
    with pytest.raises(flce.ArgumentError, match=says):
        engine.train_batch(IDS, CU_SEQLENS, sft_loss, labels=IDS, token_count=token_count)
    of_floats = lambda packed_input_ids, cu_seqlens, **_: torch.tensor(float(len(packed_input_ids) - len(cu_seqlens) + 1))  # noqa: E731
    losses = [engine.eval_batch(IDS, CU_SEQLENS, sft_loss, labels=IDS, token_count=count) for count in (of_floats, None)]
    assert losses[0][0] == losses[1][0]  # type: ignore[index]


def aligned(output: Any, packed_input_ids: Tensor, cu_seqlens: Tensor, labels: Tensor) -> tuple[Tensor, None]:
    """The loss of labels that are aligned already."""
    return output.cross_entropy(labels, shift=0), None


def rows(packed_input_ids: Tensor, labels: Tensor, **_: Any) -> Tensor:
    return (labels != -100).sum()


@pytest.mark.parametrize("lengths", [[2, 2, 9, 1], [1, 1, 1, 1], LENGTHS])
def test_labels_of_another_shift_need_their_counts(lengths: list[int]) -> None:
    ids, cu_seqlens = batch_of(1, lengths)
    labels = ids.roll(-1).masked_fill(torch.arange(len(ids)) % 5 == 2, -100)
    engine = made(normalize="tokens")
    whole = ToyStage(0, 1)
    expected = F.cross_entropy(whole.head(whole_batch(whole, ids, cu_seqlens)), labels)
    expected.backward()
    for call in (engine.eval_batch, engine.train_batch):
        result = call(ids, cu_seqlens, aligned, labels=labels, rows={"labels": "token"}, token_count=rows)
        torch.testing.assert_close(result[0], expected.detach())  # type: ignore[index]
    for parameter, old in zip(engine.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(parameter.detach(), old.detach() - 0.1 * old.grad)  # type: ignore[operator]
    if max(lengths) > 1:
        losses, counted = token_losses(engine.forward(ids, cu_seqlens), ids, cu_seqlens)  # type: ignore[arg-type]
        result = engine.eval_batch(ids, cu_seqlens, sft_loss, labels=ids)
        torch.testing.assert_close(result[0], losses[counted].mean())  # type: ignore[index]
        with pytest.raises(flce.PipelineError, match=r"loss_fn took a mean over labels with shift=0, .*give token_count="):
            engine.train_batch(ids, cu_seqlens, aligned, labels=labels, rows={"labels": "token"})


def test_a_batch_without_tokens_that_count_is_refused() -> None:
    engine = made(normalize="tokens")
    before = [parameter.detach().clone() for parameter in engine.parameters()]
    nothing = torch.full_like(IDS, -100)
    for loss_fn in (sft_loss, aligned):
        for call in (engine.train_batch, engine.eval_batch):
            with pytest.raises(flce.ArgumentError, match="the batch has no token that counts"):
                call(IDS, CU_SEQLENS, loss_fn, labels=nothing)
    assert all(torch.equal(parameter, old) for parameter, old in zip(engine.parameters(), before, strict=True))
    assert all(parameter.grad is None for parameter in engine.parameters())

    def both(output: Any, packed_input_ids: Tensor, cu_seqlens: Tensor, labels: Tensor) -> tuple[Tensor, None]:
        assert output.entropy().shape == packed_input_ids.shape
        return output.cross_entropy(labels, shift=1) + output.logprobs(labels, shift=2).mean(), None

    assert made(normalize="tokens").train_batch(IDS, CU_SEQLENS, both, labels=IDS, token_count=torch.ones(4)) is not None
    with pytest.raises(flce.PipelineError, match=r"loss_fn took a mean over labels with shift=1, 2,.*give token_count="):
        engine.train_batch(IDS, CU_SEQLENS, both, labels=IDS)


@pytest.mark.parametrize("over", ["class_weight", "token_weight"])
def test_means_over_weights_are_not_weighed_by_tokens(over: str) -> None:
    def weighted(output: Any, packed_input_ids: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, None]:
        rows, vocab_size = packed_input_ids.shape[0], output.head.weight.shape[0]
        options: dict[str, Any] = {"class_weight": torch.linspace(0.5, 2.0, vocab_size)}
        if over == "token_weight":
            options = {"token_weight": torch.linspace(0.5, 2.0, rows), "reduction": "weighted_mean"}
        return output.cross_entropy(packed_input_ids, shift=1, **options), None

    engine = made(normalize="tokens")
    with pytest.raises(flce.PipelineError, match=f"loss_fn took a mean over {over}.*give token_count="):
        engine.train_batch(IDS, CU_SEQLENS, weighted)
    assert made(normalize="micro_batches").train_batch(IDS, CU_SEQLENS, weighted) is not None
    assert made(normalize="tokens").train_batch(IDS, CU_SEQLENS, weighted, num_micro_batches=1) is not None


def test_statistics_keep_no_graph() -> None:
    hidden: list[Any] = []

    def loss_fn(output: Any, packed_input_ids: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Any]:
        hidden.append(weakref.ref(output.hidden))
        return output.cross_entropy(packed_input_ids, shift=1), {
            "entropy": output.entropy(),
            "pair": (output.logprobs(packed_input_ids, shift=1), 3),
        }

    result = made().train_batch(IDS, CU_SEQLENS, loss_fn)
    assert result is not None
    _, stats = result
    gc.collect()
    assert [reference() for reference in hidden] == [None, None]
    for of, tokens in zip(stats, (7, 11), strict=True):
        assert of["pair"][1] == 3
        for value in (of["entropy"], of["pair"][0]):
            assert value.shape == (tokens,)
            assert not value.requires_grad
