"""One rank of a pipeline under torchrun: `PipelineEngine` against the model that is not cut, computed by torch alone."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from engine_refusals import counts_follow, refuses, refuses_copies, tied_copies_are_kept_alike
from engine_support import (
    STEPS,
    ToyStage,
    V,
    batch_of,
    expect,
    lengths_of,
    made,
    masked,
    mean_of_means,
    my_stages,
    parameters,
    reference_loss,
    sft_loss,
    token_losses,
    whole_batch,
)
from rank_support import generator, run_main, run_named
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

import flce
from flce.engine import PipelineEngine, _transport
from flce.engine._microbatches import cut
from flce.engine._schedules import SCHEDULES


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
        count = 8 if step == 0 else max(4, dist.get_world_size(pipeline))
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
        if turn % 2 == 0 and schedule != "interleaved_zero_bubble":  # a step between, and back
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
    """Sends through the host, as with a GPU and a group that cannot send from it."""
    with mock.patch.object(_transport, "through_host", lambda device, group: True):
        trains(schedule, "micro_batches", True, None)
        forwards(schedule)


def critic() -> None:
    engine, own, whole = made("1f1b", rows=1)
    ids, cu_seqlens = batch_of(3, STEPS[0])
    returns = torch.randn(len(ids), generator=generator(0))

    def loss_fn(output: Any, packed_input_ids: Tensor, cu_seqlens: Tensor, returns: Tensor) -> tuple[Tensor, Any]:
        return F.mse_loss(output.values(), returns), {}

    values = whole.head(whole_batch(whole, ids, cu_seqlens))[:, 0]
    expect(engine, engine.forward(ids, cu_seqlens, output="values"), values.detach())
    result = engine.train_batch(ids, cu_seqlens, loss_fn, num_micro_batches=1, returns=returns)
    expect(engine, result and result[0], F.mse_loss(values, returns).detach())
    F.mse_loss(values, returns).backward()
    for name, parameter in whole.named_parameters():
        if name in own:
            torch.testing.assert_close(own[name], parameter - 0.5 * parameter.grad, rtol=1e-4, atol=1e-5)  # type: ignore[operator]


def of_logits() -> None:
    """A loss function in the origin's manner: of logits."""
    engine, own, whole = made("gpipe", softcap=3.0)
    ids, cu_seqlens = batch_of(3, STEPS[0])

    def loss_fn(output: Any, packed_input_ids: Tensor, cu_seqlens: Tensor, scale: float) -> tuple[Tensor, Any]:
        logits = output.logits()
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


def cases() -> Iterator[tuple[Any, ...]]:
    if dist.get_world_size() == 2:
        for schedule in SCHEDULES:
            yield trains, schedule, "micro_batches", False, None
            yield trains, schedule, "tokens", True, 0.05
            yield forwards, schedule
        yield from ((normalizes, "micro_batches", 2.5), (normalizes, "tokens", 1.75), (counts, "labels"), (counts, "loss_mask"))
        yield from ((critic,), (of_logits,), (frozen, True), (frozen, False), (budget,), (steps_the_scheduler,))
        if dist.get_backend() == "gloo":
            yield from ((through_the_host, "1f1b"), (through_the_host, "interleaved_zero_bubble"))
        yield from ((nonfinite, "raise"), (nonfinite, "skip"), (refuses,))
        yield (tied_copies_are_kept_alike,)
    else:
        for schedule in ("1f1b", "interleaved_zero_bubble"):
            yield from ((with_copies, schedule, "micro_batches"), (with_copies, schedule, "tokens"))
        if dist.get_world_size() == 4:
            yield refuses_copies, _groups["pipeline"], _groups["copies"]
            yield counts_follow, _groups["pipeline"], _groups["copies"]
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
