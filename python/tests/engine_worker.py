"""One rank of a pipeline under torchrun: `PipelineEngine` against the model that is not cut, computed by torch alone."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from engine_support import ToyStage, V, batch_of, sft_loss, token_losses, whole_batch
from rank_support import generator, run_main, run_named
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

import flce
from flce.engine import PipelineEngine, _transport
from flce.engine._microbatches import cut
from flce.engine._schedules import SCHEDULES, named, stages_of

# A batch of every step, of its own shapes.
STEPS = ([3, 9, 4, 5, 7, 2, 6, 8], [11, 2, 2, 6, 1, 3, 3, 9, 5], [4, 4, 1, 12, 2, 7, 3, 10])


def my_stages(schedule: str, group: Any, **options: Any) -> list[ToyStage]:
    size = dist.get_world_size(group)
    per_rank = 1 if schedule in ("gpipe", "1f1b") else 2
    return [ToyStage(s, per_rank * size, **options) for s in stages_of(named(schedule), dist.get_rank(group), size, per_rank)]


def parameters(stages: list[ToyStage]) -> dict[str, nn.Parameter]:
    return {name: parameter for stage in stages for name, parameter in stage.named_parameters()}


def reference_loss(whole: ToyStage, ids: Tensor, cu_seqlens: Tensor, labels: Tensor, count: int, normalize: str) -> Tensor:
    hidden = whole_batch(whole, ids, cu_seqlens)
    losses, counted = token_losses(hidden @ whole.head.weight.t(), labels, cu_seqlens)
    if normalize == "tokens":
        return losses[counted].mean()
    return mean_of_means(losses, counted, cu_seqlens, count)


def mean_of_means(losses: Tensor, counted: Tensor, cu_seqlens: Tensor, count: int) -> Tensor:
    bounds = cu_seqlens[list(cut(lengths_of(cu_seqlens), count))].tolist()
    return torch.stack([losses[a:b].sum() / counted[a:b].sum().clamp(min=1) for a, b in itertools.pairwise(bounds)]).mean()


def masked(ids: Tensor, seed: int) -> Tensor:
    """Labels of which some do not count."""
    keep = torch.rand(ids.shape, generator=generator(seed)) > 0.3
    return torch.where(keep, ids, -100)


def trains(schedule: str, normalize: str, tied: bool, clip: float | None, pipeline: Any = None, copies: Any = None) -> None:
    """Three steps: losses, every gradient, and parameters equal the whole model's."""
    stages = my_stages(schedule, pipeline, tied=tied)
    own = parameters(stages)
    optimizer = torch.optim.SGD(own.values(), lr=0.3, momentum=0.9)
    gradients: dict[str, Tensor] = {}
    optimizer.register_step_pre_hook(lambda *_: gradients.update({n: p.grad.clone() for n, p in own.items() if p.grad is not None}))
    whole = ToyStage(0, 1, tied=tied)
    reference = torch.optim.SGD(whole.parameters(), lr=0.3, momentum=0.9)
    of_whole = dict(whole.named_parameters(remove_duplicate=False))
    engine = PipelineEngine(
        stages, pipeline, optimizer, data_parallel_group=copies, schedule=schedule, normalize=normalize, max_grad_norm=clip
    )
    number = 1 if copies is None else dist.get_world_size(copies)
    mine = 0 if copies is None else dist.get_rank(copies)
    for step, lengths in enumerate(STEPS):
        count = 8 if step == 0 or schedule == "dualpipev" else max(4, dist.get_world_size(pipeline))
        batches = []
        for one in range(number):
            ids, cu_seqlens = batch_of(10 * step + one, lengths[one:] + lengths[:one])
            batches.append((ids, cu_seqlens, masked(ids, step + 3 * one)))
        ids, cu_seqlens, labels = batches[mine]
        result = engine.train_batch(ids, cu_seqlens, sft_loss, labels=labels, num_micro_batches=count)
        reference.zero_grad()
        losses = [reference_loss(whole, *batch, count, normalize) for batch in batches]
        counts = [(token_losses(torch.zeros(len(b[0]), V), b[2], b[1])[1]).sum() for b in batches]
        shares = [c / sum(counts) for c in counts] if normalize == "tokens" else [1 / number] * number
        torch.stack([loss * share for loss, share in zip(losses, shares, strict=True)]).sum().backward()
        norm = nn.utils.clip_grad_norm_(whole.parameters(), clip) if clip is not None else None
        assert (result is not None) == engine.is_last
        if result is not None:
            torch.testing.assert_close(result[0], losses[mine].detach(), rtol=1e-5, atol=1e-6)
            assert result[0].dtype == torch.float32
            assert [s["tokens"] for s in result[1]] == [
                sum(lengths_of(cu_seqlens)[a:b]) for a, b in itertools.pairwise(cut(lengths_of(cu_seqlens), count))
            ]
        if norm is not None:
            assert abs(engine.last_grad_norm - float(norm)) < 1e-4 * float(norm), (engine.last_grad_norm, norm)
        assert gradients.keys() == own.keys()
        for name, gradient in gradients.items():
            expected = of_whole[name].grad
            torch.testing.assert_close(gradient, expected, rtol=2e-4, atol=5e-6, msg=lambda m, n=name: f"{schedule} {n}: {m}")
        reference.step()
        assert all(parameter.grad is None for parameter in own.values())
    for name, parameter in own.items():
        torch.testing.assert_close(parameter, of_whole[name], rtol=2e-4, atol=1e-5, msg=lambda m, n=name: f"{schedule} {n}: {m}")


def lengths_of(cu_seqlens: Tensor) -> list[int]:
    lengths: list[int] = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
    return lengths


def made(schedule: str, options: dict[str, Any] | None = None, **of_stage: Any) -> tuple[PipelineEngine, dict[str, nn.Parameter], ToyStage]:
    """An engine on toy stages, its parameters, and the whole model."""
    stages = my_stages(schedule, None, **of_stage)
    own = parameters(stages)
    optimizer = torch.optim.SGD(own.values(), lr=0.5)
    return PipelineEngine(stages, None, optimizer, schedule=schedule, **(options or {})), own, ToyStage(0, 1, **of_stage)


def expect(engine: PipelineEngine, result: Any, expected: Tensor) -> None:
    assert (result is None) != engine.is_last
    if result is not None:
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def forwards(schedule: str) -> None:
    """Every output, packed as the batch is; evaluation leaves gradients None; numbers of microbatches change from call to call."""
    engine, own, whole = made(schedule, softcap=2.0)
    batches = [batch_of(n, lengths) for n, lengths in enumerate(STEPS)]
    for turn, ((ids, cu_seqlens), count) in enumerate(zip(batches + batches, (8, 4, 2, 4, 8, 1), strict=True)):
        hidden = whole_batch(whole, ids, cu_seqlens).detach()
        logits = torch.tanh(whole.head(hidden) / 2.0) * 2.0
        labels = masked(ids, turn)
        losses, counted = token_losses(logits, labels, cu_seqlens)
        of_ids, every = token_losses(logits / 0.7, ids, cu_seqlens)
        p = logits.softmax(-1)
        call = functools.partial(engine.forward, ids, cu_seqlens, num_micro_batches=count)
        expect(engine, call(), logits)
        expect(engine, call(output="hidden"), hidden)
        expect(engine, call(output="logprobs", labels=labels), torch.where(counted, -losses, 0.0))
        expect(engine, call(output="logprobs", temperature=0.7), torch.where(every, -of_ids, 0.0))
        expect(engine, call(output="entropy"), -(p * p.log()).sum(-1))
        result = engine.eval().eval_batch(ids, cu_seqlens, sft_loss, labels=labels, num_micro_batches=count)
        assert not engine.training
        expect(engine, result and result[0], mean_of_means(losses, counted, cu_seqlens, count))
        assert all(parameter.grad is None for parameter in own.values())
        if turn % 2 == 0 and schedule not in ("dualpipev", "interleaved_zero_bubble"):  # a step between, and back
            before = {name: parameter.detach().clone() for name, parameter in own.items()}
            engine.train().train_batch(ids, cu_seqlens, sft_loss, labels=labels, num_micro_batches=max(4, dist.get_world_size()))
            assert engine.training
            with torch.no_grad():
                assert all(not torch.equal(before[name], parameter) for name, parameter in own.items())
                for name, parameter in own.items():
                    parameter.copy_(before[name])


def normalizes(normalize: str, expected: float) -> None:
    """Losses 4 and 1, 1, 1 of two microbatches: of the means 2.5, of the tokens 1.75. The loss reads what is packed by targets."""
    engine, *_ = made("gpipe", {"normalize": normalize})
    ids, cu_seqlens = batch_of(0, [2, 4])
    values = torch.tensor([4.0, 1.0, 1.0, 1.0])

    def loss_fn(output: Any, packed_input_ids: Tensor, cu_seqlens: Tensor, values: Tensor) -> tuple[Tensor, None]:
        return output.hidden.sum() * 0 + values.mean(), None

    result = engine.train_batch(ids, cu_seqlens, loss_fn, values=values)
    expect(engine, result and result[0], torch.tensor(expected))
    for token_count in () if normalize != "tokens" else (torch.tensor([3, 1]), lambda packed_input_ids, **_: 5 - len(packed_input_ids)):
        result = engine.eval_batch(ids, cu_seqlens, loss_fn, values=values, token_count=token_count)
        expect(engine, result and result[0], torch.tensor((4.0 * 3 + 1.0) / 4))


def counts(name: str) -> None:
    """Tokens that count are found by `labels` and `loss_mask`; a label outside the vocabulary does not count."""
    engine, _, whole = made("1f1b", {"normalize": "tokens"})
    ids, cu_seqlens = batch_of(3, STEPS[0])
    labels = masked(ids, 1)
    losses, counted = token_losses(whole.head(whole_batch(whole, ids, cu_seqlens)), labels, cu_seqlens)

    def loss_fn(output: Any, packed_input_ids: Tensor, cu_seqlens: Tensor, loss_mask: Tensor) -> tuple[Tensor, None]:
        return output.cross_entropy(packed_input_ids.where(loss_mask != 0, -100), shift=1), None

    if name == "labels":
        labels = labels.masked_fill((labels == -100) & (torch.arange(len(labels)) % 2 == 0), V)
    labels = labels if engine.is_last else torch.full_like(labels, -100)  # values are read on the last stage alone
    keywords = {"labels": labels} if name == "labels" else {"loss_mask": labels != -100}
    result = engine.eval_batch(ids, cu_seqlens, sft_loss if name == "labels" else loss_fn, num_micro_batches=3, **keywords)
    expect(engine, result and result[0], losses[counted].mean().detach())


def through_the_host(schedule: str) -> None:
    """As with a GPU and a group that cannot send from it."""
    with mock.patch.object(_transport, "through_host", lambda device, group: True):
        trains(schedule, "micro_batches", True, None)
        forwards(schedule)


def critic() -> None:
    engine, own, whole = made("1f1b", rows=1)
    ids, cu_seqlens = batch_of(3, STEPS[0])
    returns = torch.randn(len(ids), generator=generator(0))

    def loss_fn(output: Any, packed_input_ids: Tensor, cu_seqlens: Tensor, returns: Tensor) -> tuple[Tensor, Any]:
        assert output.shape == packed_input_ids.shape  # for a tensor it stands for values
        return F.mse_loss(output, returns), {"mean": (output * 1.0).mean().item()}

    values = whole.head(whole_batch(whole, ids, cu_seqlens))[:, 0]
    expect(engine, engine.forward(ids, cu_seqlens, output="values"), values.detach())
    result = engine.train_batch(ids, cu_seqlens, loss_fn, num_micro_batches=1, returns=returns)
    expect(engine, result and result[0], F.mse_loss(values, returns).detach())
    F.mse_loss(values, returns).backward()
    for name, parameter in whole.named_parameters():
        if name in own:
            torch.testing.assert_close(own[name], parameter - 0.5 * parameter.grad, rtol=1e-4, atol=1e-5)  # type: ignore[operator]


def written_for_tensors() -> None:
    """A loss function in the origin's manner: output is logits."""
    engine, own, whole = made("gpipe", softcap=3.0)
    ids, cu_seqlens = batch_of(3, STEPS[0])

    def loss_fn(logits: Any, packed_input_ids: Tensor, cu_seqlens: Tensor, scale: float) -> tuple[Tensor, Any]:
        assert logits.shape == (len(packed_input_ids), V)
        assert logits.dtype == torch.float32
        logp = torch.log_softmax(logits.float() / scale, dim=-1)
        return -logp.gather(-1, packed_input_ids[:, None]).mean() + (logits * 2 - logits)[0, 0], {"first": logits[0].detach()}

    logits = torch.tanh(whole.head(whole_batch(whole, ids, cu_seqlens)) / 3.0) * 3.0
    expected = F.cross_entropy(logits / 2.0, ids) + logits[0, 0]
    result = engine.train_batch(ids, cu_seqlens, loss_fn, num_micro_batches=1, scale=2.0)
    expect(engine, result and result[0], expected.detach())
    expected.backward()
    for name, parameter in own.items():
        after = dict(whole.named_parameters())[name]
        torch.testing.assert_close(parameter, after - 0.5 * after.grad, rtol=1e-4, atol=1e-5)  # type: ignore[operator]


def frozen(first: bool) -> None:
    """The first stage has nothing to train, or the last nothing but its head."""
    engine, own, _ = made("1f1b")
    for name, parameter in own.items():
        parameter.requires_grad_(engine.is_last if first else name.startswith("head") or engine.is_first)
    before = {name: parameter.detach().clone() for name, parameter in own.items()}
    ids, cu_seqlens = batch_of(3, STEPS[0])
    engine.train_batch(ids, cu_seqlens, sft_loss, labels=ids)
    for name, parameter in own.items():
        assert torch.equal(before[name], parameter) != parameter.requires_grad, name


def budget() -> None:
    """Microbatches in flight share a limit; the losses are the same."""
    ids, cu_seqlens = batch_of(3, STEPS[0])
    losses = []
    for options in ({}, {"memory_limit_bytes": 1 << 20}, {"head_options": {"workspace_limit_bytes": 1 << 20}}):
        engine, *_ = made("gpipe", options)
        for _ in range(2):
            result = engine.train_batch(ids, cu_seqlens, sft_loss, labels=ids, num_micro_batches=4)
        losses.append(result and result[0])
    if losses[0] is not None:
        torch.testing.assert_close(losses[1], losses[0])
        torch.testing.assert_close(losses[2], losses[0])


def nonfinite(policy: str) -> None:
    """A loss of NaN in microbatch 1: parameters stay, every rank says which one; the engine goes on."""
    engine, own, _ = made("1f1b", {"nonfinite": policy})
    ids, cu_seqlens = batch_of(3, STEPS[0])
    before = {name: parameter.detach().clone() for name, parameter in own.items()}

    def loss_fn(output: Any, packed_input_ids: Tensor, cu_seqlens: Tensor, scale: Tensor) -> tuple[Tensor, None]:
        return output.cross_entropy(packed_input_ids, shift=1) * scale.mean(), None

    scale = torch.ones(len(STEPS[0]))
    start, end = cut(STEPS[0], 4)[1:3]
    scale[start] = float("nan")
    if policy == "raise":
        with pytest.raises(flce.PipelineError, match=rf"microbatch 1 \(sequences? {start}( to {end - 1})?\) is not finite") as caught:
            engine.train_batch(ids, cu_seqlens, loss_fn, num_micro_batches=4, scale=scale)
        assert caught.value.stage == engine.num_stages - 1
    else:
        engine.train_batch(ids, cu_seqlens, loss_fn, num_micro_batches=4, scale=scale)
    for name, parameter in own.items():
        assert torch.equal(parameter, before[name]), name
        assert parameter.grad is None
    engine.train_batch(ids, cu_seqlens, loss_fn, num_micro_batches=4, scale=torch.ones(len(STEPS[0])))
    assert not any(torch.equal(parameter, before[name]) for name, parameter in own.items())


def refuses() -> None:
    """Ranks that are called with different batches, or one of which refuses its own, all raise before anything runs, and go on."""
    engine, *_ = made("1f1b")
    ids, cu_seqlens = batch_of(3, [3, 9, 4])
    odd = dist.get_rank() == 1
    moved = torch.tensor([0, 4, 12, 16], dtype=torch.int32) if odd else cu_seqlens
    changed = ids.clone()
    changed[5] = (changed[5] + odd) % V
    extra = {"labels": ids, **({"other": 1} if odd else {})}
    other: dict[str, tuple[Any, ...]] = {
        "cu_seqlens": (ids, moved, {"labels": ids}, {}),
        "packed_input_ids": (changed, cu_seqlens, {"labels": ids}, {}),
        "the keywords": (ids, cu_seqlens, extra, {}),
        "the number of microbatches": (ids, cu_seqlens, {"labels": ids}, {"num_micro_batches": 2 + odd}),
    }
    for what, (its_ids, its_cu_seqlens, keywords, options) in other.items():
        with pytest.raises(flce.PipelineError, match=f"stage 0 and stage 1 were called with different arguments.*{what}"):
            engine.train_batch(its_ids, its_cu_seqlens, lambda output, **_: sft_loss(output, **_), **keywords, **options)
    with pytest.raises(flce.PipelineError, match="the call and its options"):
        (engine.eval_batch if odd else engine.train_batch)(ids, cu_seqlens, sft_loss, labels=ids)
    engine.set_version_steps(3 + odd)
    with pytest.raises(flce.PipelineError, match="the call and its options"):
        engine.train_batch(ids, cu_seqlens, sft_loss, labels=ids)
    engine.version_steps = None
    with pytest.raises(flce.ArgumentError if odd else flce.PipelineError, match=r"cu_seqlens has 3 elements from 0 to 12"):
        engine.train_batch(ids, cu_seqlens[:-1] if odd else cu_seqlens, sft_loss, labels=ids)
    with pytest.raises(flce.ArgumentError, match="3 sequences, which are fewer than its 4 microbatches"):
        engine.train_batch(ids, cu_seqlens, sft_loss, labels=ids, num_micro_batches=4)
    with pytest.raises(flce.ArgumentError, match=r'token_count is for normalize="tokens"'):
        engine.train_batch(ids, cu_seqlens, sft_loss, labels=ids, token_count=torch.ones(3))
    with pytest.raises(flce.ArgumentError, match=r"output is 'both'; allowed are 'logits'"):
        engine.forward(ids, cu_seqlens, output="both")
    with pytest.raises(flce.ArgumentError, match=f"packed_input_ids has {V}; ids must be 0 to {V - 1}"):
        engine.train_batch(ids.masked_fill(ids == ids[2], V), cu_seqlens, sft_loss, labels=ids)
    with pytest.raises(flce.ArgumentError if odd else flce.PipelineError, match="missing a required argument: 'labels'"):
        engine.train_batch(ids, cu_seqlens, sft_loss)
    with pytest.raises(flce.ArgumentError, match="train_batch"):
        engine.backward(torch.zeros(1))
    with pytest.raises(flce.ArgumentError, match="train_batch"):
        engine.step()
    assert (engine.train_batch(ids, cu_seqlens, sft_loss, labels=ids) is None) == (not engine.is_last)
    stage = ToyStage(dist.get_rank(), 2)
    with pytest.raises(flce.ArgumentError, match="train_batch needs an optimizer"):
        PipelineEngine(stage).train_batch(ids, cu_seqlens, sft_loss, labels=ids)
    with pytest.raises(flce.ArgumentError, match=r"made with normalize '(tokens|micro_batches)'"):
        PipelineEngine(stage, normalize="tokens" if odd else "micro_batches")
    with pytest.raises(flce.ArgumentError, match=r"schedule '1f1b' has stages \[[01]\] of 2 there"):
        PipelineEngine(ToyStage(1 - dist.get_rank(), 2))
    tied = ToyStage(dist.get_rank(), 2, tied=True)
    if odd:
        tied.head.weight.data[3, 3] += 1e-6
    with pytest.raises(flce.PipelineError, match="tied_weight of stage 0 and of stage 1 differ in values"):
        PipelineEngine(tied)
    for wrong, said in WRONG_OPTIONS:  # on one rank: the other one hears of it
        with pytest.raises(Exception if odd else flce.ArgumentError, match=said if odd else f"rank 1 of the pipeline: .*{said}"):
            PipelineEngine(stage, **(wrong if odd else {}))


WRONG_OPTIONS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"max_grad_norm": -1.0}, "max_grad_norm is -1.0"),
    ({"schedule": "2f2b"}, "schedule is '2f2b'"),
    ({"num_micro_batches": 0}, "num_micro_batches is 0"),
    ({"head_options": {"size": 1}}, "size"),
    ({"memory_limit_bytes": -1}, "limit_bytes is -1"),
    ({"device": "nowhere"}, "nowhere"),
    ({"data_parallel_group": dist.GroupMember.NON_GROUP_MEMBER}, "data_parallel_group does not have this rank"),
)


def tied_copies_are_kept_alike() -> None:
    """Frozen when the engine was made and trained later: as the whole model. What would part the copies is refused."""
    stage, whole = ToyStage(dist.get_rank(), 2, tied=True), ToyStage(0, 1, tied=True)
    for frozen in (stage, whole):
        (frozen.tied_weight if frozen is stage else frozen.embedding).requires_grad_(False)  # type: ignore[union-attr]
    engine = PipelineEngine(stage, None, torch.optim.SGD(stage.parameters(), lr=0.5), max_grad_norm=0.1)
    reference = torch.optim.SGD(whole.parameters(), lr=0.5)
    ids, cu_seqlens = batch_of(3, STEPS[0])
    weight = stage.tied_weight
    assert weight is not None
    for turn in range(3):
        if turn:
            weight.requires_grad_()
            whole.embedding.requires_grad_()
        engine.train_batch(ids, cu_seqlens, sft_loss, labels=ids)
        reference.zero_grad()
        reference_loss(whole, ids, cu_seqlens, ids, 2, "micro_batches").backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        reference.step()
    torch.testing.assert_close(weight, whole.embedding, rtol=1e-4, atol=1e-5)
    for copies in (stage, whole):
        assert not torch.equal(copies.embedding if copies is whole else weight, ToyStage(0, 1).embedding)

    def refused(says: str) -> None:
        for _ in range(2):  # once found, it is looked for in every batch
            with pytest.raises(flce.PipelineError, match=f"tied_weight of stage 0 .* and of stage 1 differ in {says}") as caught:
                engine.train_batch(ids, cu_seqlens, sft_loss, labels=ids)
            assert caught.value.stage == 1

    weight.requires_grad_(engine.is_first)
    refused("requires_grad: True on rank 0 of them and False on rank 1")
    weight.requires_grad_()
    decay = {"params": [weight], "weight_decay": 0.0 if engine.is_first else 0.1}
    engine.optimizer = torch.optim.AdamW([decay, {"params": [p for p in stage.parameters() if p is not weight]}], lr=0.01)
    refused("weight_decay: 0.0 on rank 0 of them and 0.1 on rank 1")
    with pytest.raises(flce.PipelineError, match=r"tied_weight .* differ in requires_grad or options of the optimizer"):
        PipelineEngine(stage, None, engine.optimizer)
    engine.optimizer = torch.optim.SGD([p for p in stage.parameters() if p is not weight or engine.is_first], lr=0.01)
    refused("optimizer's group: None on rank|optimizer: 'SGD' on rank 0 of them and None on rank 1")
    engine.optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)
    with torch.no_grad():
        weight[0, 0] += float(engine.is_last)
    engine._batches = 255
    refused("values")
    with torch.no_grad():
        weight[0, 0] -= float(engine.is_last)
    engine.max_grad_norm = 1.0 if engine.is_first else None
    with pytest.raises(flce.PipelineError, match="called with different arguments: normalize, max_grad_norm or nonfinite"):
        engine.train_batch(ids, cu_seqlens, sft_loss, labels=ids)
    engine.max_grad_norm = None
    engine.train_batch(ids, cu_seqlens, sft_loss, labels=ids)


def warns_of_few_microbatches() -> None:
    """Once, on the first stage."""
    engine, *_ = made("1f1b", {"num_micro_batches": 1})
    ids, cu_seqlens = batch_of(3, STEPS[0])
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("flce").addHandler(handler)
    for _ in range(2):
        engine.train_batch(ids, cu_seqlens, sft_loss, labels=ids)
    logging.getLogger("flce").removeHandler(handler)
    said = ["flce: num_micro_batches is 1 in a pipeline of 2 stages, which wait for each other; 2 or more keep them busy"]
    assert [record.getMessage() for record in records] == (said if engine.is_first else [])


def steps_the_scheduler() -> None:
    engine, *_ = made("1f1b")
    optimizer = engine.optimizer
    assert optimizer is not None
    engine.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    ids, cu_seqlens = batch_of(3, STEPS[0])
    engine.train_batch(ids, cu_seqlens, sft_loss, labels=ids)
    assert optimizer.param_groups[0]["lr"] == 0.25
    engine.set_version_steps(5)
    for _ in range(2):
        engine.train_batch(ids, cu_seqlens, sft_loss, labels=ids)
        assert optimizer.param_groups[0]["lr"] == 0.5 * 0.5**5


def with_copies(schedule: str, normalize: str) -> None:
    trains(schedule, normalize, True, 0.05, _groups["pipeline"], _groups["copies"])


def refuses_copies() -> None:
    """Data-parallel ranks: another's bad batch, another's NaN, and engines that cannot be made, which ends them on all ranks."""
    rank = dist.get_rank()
    stage = ToyStage(rank % 2, 2)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    engine = PipelineEngine(stage, _groups["pipeline"], optimizer, data_parallel_group=_groups["copies"])
    ids, cu_seqlens = batch_of(rank // 2, [3, 9, 4])
    with pytest.raises(flce.ArgumentError if rank < 2 else flce.PipelineError, match="3 sequences, which are fewer"):
        engine.train_batch(ids, cu_seqlens, sft_loss, labels=ids, num_micro_batches=4 if rank < 2 else 3)

    def loss_fn(output: Any, packed_input_ids: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, None]:
        return output.cross_entropy(packed_input_ids, shift=1) * (float("nan") if rank == 3 else 1.0), None

    with pytest.raises(flce.PipelineError, match=r"microbatch 0.* of data-parallel rank 1 is not finite"):
        engine.train_batch(ids, cu_seqlens, loss_fn)
    made = functools.partial(PipelineEngine, pipeline_group=_groups["pipeline"], data_parallel_group=_groups["copies"])
    tied = ToyStage(rank % 2, 2, tied=True)
    if rank == 3:
        tied.head.weight.data[3, 3] += 1e-6
    said = ("data-parallel rank 1 could not make its engine: " if rank < 2 else "") + "tied_weight of stage 0"
    with pytest.raises(flce.PipelineError, match=said):
        made(tied)
    misplaced = ToyStage(1 - rank % 2 if rank == 2 else rank % 2, 2)
    with pytest.raises(flce.ArgumentError if rank > 1 else flce.PipelineError, match="rank 0 of 2 was given stages"):
        made(misplaced)
    wrong = {"normalize": "words"} if rank == 2 else {}
    with pytest.raises(flce.ArgumentError if rank > 1 else flce.PipelineError, match="normalize is 'words'"):
        made(stage, **wrong)
    if rank == 2:
        with torch.no_grad():
            next(stage.parameters())[0, 0] += 1e-3
    with pytest.raises(flce.PipelineError, match="stage 0 has other parameters on some of its 2 data-parallel ranks") as caught:
        made(stage)
    assert caught.value.stage == 0
    copy = int(rank > 1)
    for options, says in (
        ({"max_grad_norm": 1.0 + copy}, f"stage {rank % 2} is stepped otherwise .* max_grad_norm: 1.0 on rank 0 of them and 2.0 on rank 1"),
        ({"normalize": ("tokens", "micro_batches")[copy]}, f"stage {rank % 2} .* normalize: 'tokens' on rank 0 of them and 'micro"),
    ):
        with pytest.raises(flce.PipelineError, match=says):
            made(ToyStage(rank % 2, 2), **options)
    stage = ToyStage(rank % 2, 2)
    stage.layers["5" if rank % 2 else "0"].requires_grad_(rank < 3)
    with pytest.raises(
        flce.PipelineError, match=r"stage 1 is .* group of stage 1's layers.5: \(True, None\) on rank 0 of them and \(False"
    ):
        made(stage)
    stage.layers.requires_grad_()
    engine = made(stage, optimizer=torch.optim.SGD(stage.parameters(), lr=0.1))
    engine.train_batch(ids, cu_seqlens, sft_loss, labels=ids)
    optimizer = engine.optimizer
    for change, says in (
        (lambda: setattr(engine, "max_grad_norm", 1.0 + copy), "stage 0 .* max_grad_norm: 1.0 on rank 0 of them and 2.0 on rank 1"),
        (lambda: stage.layers.requires_grad_(rank < 3), r"stage 1 .* stage 1's layers.4: \(True, 0\) .* and \(False, 0\)"),
        (
            lambda: optimizer.param_groups[0].update(lr=0.2 - 0.1 * (rank == 2)),
            "stage 0 is .* options of the optimizer's group 0: .*'lr': 0.2",
        ),
    ):
        change()
        with pytest.raises(flce.PipelineError, match=says + ".*their parameters would part. Nothing was computed"):
            engine.train_batch(ids, cu_seqlens, sft_loss, labels=ids)
        engine.max_grad_norm = None
        stage.layers.requires_grad_()
        optimizer.param_groups[0]["lr"] = 0.1
    engine.train_batch(ids, cu_seqlens, sft_loss, labels=ids)


def counts_follow(number: int) -> None:
    """Copies of a pipeline whose loss takes aligned labels: each token weighs the same on all of them."""
    own = dist.get_rank() // (dist.get_world_size() // number)
    stages = my_stages("1f1b", _groups["pipeline"])
    whole = ToyStage(0, 1)
    engine = PipelineEngine(
        stages,
        _groups["pipeline"],
        torch.optim.SGD(stages[0].parameters(), lr=0.5),
        data_parallel_group=_groups["copies"],
        normalize="tokens",
    )

    def aligned(output: Any, packed_input_ids: Tensor, cu_seqlens: Tensor, labels: Tensor) -> tuple[Tensor, None]:
        return output.cross_entropy(labels, shift=0), None

    for turn in range(2):
        batches = [batch_of(turn + 5 * copy, [2, 1, 4 - copy, 2, 1 + copy]) for copy in range(number)]
        losses = [F.cross_entropy(whole.head(whole_batch(whole, *batch)), batch[0], reduction="sum") for batch in batches]
        whole.zero_grad()
        (torch.stack(losses).sum() / sum(len(batch[0]) for batch in batches)).backward()
        result = engine.train_batch(*batches[own], aligned, labels=batches[own][0])
        expect(engine, result and result[0], (losses[own] / len(batches[own][0])).detach())
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter -= 0.5 * parameter.grad  # type: ignore[operator]
    for name, parameter in parameters(stages).items():
        torch.testing.assert_close(parameter, dict(whole.named_parameters())[name], rtol=1e-4, atol=1e-5)


def cases() -> Iterator[tuple[Any, ...]]:
    if dist.get_world_size() == 2:
        for schedule in SCHEDULES:
            yield trains, schedule, "micro_batches", False, None
            yield trains, schedule, "tokens", True, 0.05
            yield forwards, schedule
        yield from ((normalizes, "micro_batches", 2.5), (normalizes, "tokens", 1.75), (counts, "labels"), (counts, "loss_mask"))
        yield from ((critic,), (written_for_tensors,), (frozen, True), (frozen, False), (budget,), (steps_the_scheduler,))
        if dist.get_backend() == "gloo":
            yield from ((through_the_host, "1f1b"), (through_the_host, "zbv"))
        yield from ((nonfinite, "raise"), (nonfinite, "skip"), (refuses,), (warns_of_few_microbatches,))
        yield (tied_copies_are_kept_alike,)
    else:
        for schedule in ("1f1b", "zbv"):
            yield from ((with_copies, schedule, "micro_batches"), (with_copies, schedule, "tokens"))
        if dist.get_world_size() == 4:
            yield from ((refuses_copies,), (counts_follow, 2))
            yield trains, "interleaved_1f1b", "micro_batches", True, 0.05  # the model has too few layers for 16 stages
        yield trains, "1f1b", "tokens", True, 0.05
        yield forwards, "1f1b"


_groups: dict[str, Any] = {}


def prepare() -> None:
    for name in ("_shape_inference", "_forward_metadata_inference", "_backward_metadata_inference"):
        if hasattr(PipelineStage, name):
            setattr(PipelineStage, name, no_inference)
    half = dist.get_world_size() // 2
    if half > 1:  # two pipelines, each of half of the ranks
        _groups["pipeline"], _ = dist.new_subgroups_by_enumeration([list(range(half)), list(range(half, 2 * half))])
        _groups["copies"], _ = dist.new_subgroups_by_enumeration([[rank, half + rank] for rank in range(half)])


def no_inference(*arguments: Any, **keywords: Any) -> Any:
    raise AssertionError("torch infers a stage's shapes")


if __name__ == "__main__":
    run_main(run_named, cases, prepare=prepare)
