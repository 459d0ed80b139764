"""Refusals that a pipeline's ranks make together, and rules for copies of a parameter: cases of engine_worker.py."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from engine_support import STEPS, ToyStage, V, batch_of, expect, made, my_stages, parameters, reference_loss, sft_loss, whole_batch
from torch import Tensor, nn

import flce
from flce.engine import PipelineEngine


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
    assert (engine.train_batch(ids, cu_seqlens, sft_loss, labels=ids) is None) == (not engine.is_last)
    stage = ToyStage(dist.get_rank(), 2)
    with pytest.raises(flce.ArgumentError, match="train_batch needs an optimizer"):
        PipelineEngine(stage).train_batch(ids, cu_seqlens, sft_loss, labels=ids)
    with pytest.raises(flce.ArgumentError, match=r"made with normalize '(tokens|micro_batches)'"):
        PipelineEngine(stage, normalize="tokens" if odd else "micro_batches")
    with pytest.raises(flce.ArgumentError, match=r"schedule '1f1b' takes one stage a rank, each its own"):
        PipelineEngine(ToyStage(1 - dist.get_rank(), 2))
    tied = ToyStage(dist.get_rank(), 2, tied=True)
    if odd:
        tied.head.weight.data[3, 3] += 1e-6
    with pytest.raises(flce.PipelineError, match="tied_weight of stage 0 and of stage 1 differ in values"):
        PipelineEngine(tied)
    for wrong, said in WRONG_OPTIONS:  # on one rank: the other one hears of it
        with pytest.raises(Exception if odd else flce.PipelineError, match=said if odd else f"rank 1 of 2: .*{said}"):
            PipelineEngine(stage, **(wrong if odd else {}))


WRONG_OPTIONS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"max_grad_norm": -1.0}, "max_grad_norm is -1.0"),
    ({"schedule": "zbv"}, "schedule is 'zbv'; allowed are 'gpipe', '1f1b', 'interleaved_1f1b', 'interleaved_zero_bubble'"),
    ({"num_micro_batches": 0}, "num_micro_batches is 0"),
    ({"head_options": {"size": 1}}, "size"),
    ({"memory_limit_bytes": -1}, "memory_limit_bytes is -1"),
    ({"device": "nowhere"}, "nowhere"),
    ({"data_parallel_group": dist.GroupMember.NON_GROUP_MEMBER}, "data_parallel_group does not have this rank"),
)


def tied_copies_are_kept_alike() -> None:
    """Frozen when the engine was made and trained later, both weights move as the whole model's. Changes that would part the copies are
    refused."""
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
            with pytest.raises(flce.PipelineError, match=f"tied_weight of stage 0 and of stage 1 differ in {says}") as caught:
                engine.train_batch(ids, cu_seqlens, sft_loss, labels=ids)
            assert caught.value.stage == 1

    weight.requires_grad_(engine.is_first)
    refused("requires_grad or options of the optimizer")
    weight.requires_grad_()
    decay = {"params": [weight], "weight_decay": 0.0 if engine.is_first else 0.1}
    engine.optimizer = torch.optim.AdamW([decay, {"params": [p for p in stage.parameters() if p is not weight]}], lr=0.01)
    refused("requires_grad or options of the optimizer")
    with pytest.raises(flce.PipelineError, match=r"tied_weight .* differ in requires_grad or options of the optimizer"):
        PipelineEngine(stage, None, engine.optimizer)
    engine.optimizer = torch.optim.SGD([p for p in stage.parameters() if p is not weight or engine.is_first], lr=0.01)
    refused("requires_grad or options of the optimizer")
    engine.optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)
    engine.max_grad_norm = 1.0 if engine.is_first else None
    with pytest.raises(flce.PipelineError, match="called with different arguments: normalize, max_grad_norm or nonfinite"):
        engine.train_batch(ids, cu_seqlens, sft_loss, labels=ids)
    engine.max_grad_norm = None
    engine.train_batch(ids, cu_seqlens, sft_loss, labels=ids)


def refuses_copies(pipeline: Any, copies: Any) -> None:
    """Data-parallel ranks: another's bad batch, another's NaN, and engines that cannot be made, which ends them on all ranks."""
    rank = dist.get_rank()
    stage = ToyStage(rank % 2, 2)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    engine = PipelineEngine(stage, pipeline, optimizer, data_parallel_group=copies)
    ids, cu_seqlens = batch_of(rank // 2, [3, 9, 4])
    with pytest.raises(flce.ArgumentError if rank < 2 else flce.PipelineError, match="3 sequences, which are fewer"):
        engine.train_batch(ids, cu_seqlens, sft_loss, labels=ids, num_micro_batches=4 if rank < 2 else 3)

    def loss_fn(output: Any, packed_input_ids: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, None]:
        return output.cross_entropy(packed_input_ids, shift=1) * (float("nan") if rank == 3 else 1.0), None

    with pytest.raises(flce.PipelineError, match=r"microbatch 0.* of data-parallel rank 1 is not finite"):
        engine.train_batch(ids, cu_seqlens, loss_fn)
    made = functools.partial(PipelineEngine, pipeline_group=pipeline, data_parallel_group=copies)
    tied = ToyStage(rank % 2, 2, tied=True)
    if rank == 3:
        tied.head.weight.data[3, 3] += 1e-6
    said = ("rank 1 of 2: " if rank < 2 else "") + ".*tied_weight of stage 0"
    with pytest.raises(flce.PipelineError, match=said):
        made(tied)
    misplaced = ToyStage(1 - rank % 2 if rank == 2 else rank % 2, 2)
    with pytest.raises(flce.ArgumentError if rank == 2 else flce.PipelineError, match="rank 0 of 2 was given stages"):
        made(misplaced)
    wrong = {"normalize": "words"} if rank == 2 else {}
    with pytest.raises(flce.ArgumentError if rank == 2 else flce.PipelineError, match="normalize is 'words'"):
        made(stage, **wrong)
    if rank == 2:
        with torch.no_grad():
            next(stage.parameters())[0, 0] += 1e-3
    with pytest.raises(flce.PipelineError, match="stage 0 has other parameters on some of its 2 data-parallel ranks") as caught:
        made(stage)
    assert caught.value.stage == 0
    copy = int(rank > 1)
    parted = r"data-parallel copies are stepped otherwise \(normalize, .*their parameters would part"
    for options in ({"max_grad_norm": 1.0 + copy}, {"normalize": ("tokens", "micro_batches")[copy]}):
        with pytest.raises(flce.PipelineError, match=parted):
            made(ToyStage(rank % 2, 2), **options)
    stage = ToyStage(rank % 2, 2)
    stage.layers["5" if rank % 2 else "0"].requires_grad_(rank < 3)
    with pytest.raises(flce.PipelineError, match=parted):
        made(stage)
    stage.layers.requires_grad_()
    engine = made(stage, optimizer=torch.optim.SGD(stage.parameters(), lr=0.1))
    engine.train_batch(ids, cu_seqlens, sft_loss, labels=ids)
    optimizer = engine.optimizer
    for change in (
        lambda: setattr(engine, "max_grad_norm", 1.0 + copy),
        lambda: stage.layers.requires_grad_(rank < 3),
        lambda: optimizer.param_groups[0].update(lr=0.2 - 0.1 * (rank == 2)),
    ):
        change()
        with pytest.raises(flce.PipelineError, match=parted + ". Nothing was computed"):
            engine.train_batch(ids, cu_seqlens, sft_loss, labels=ids)
        engine.max_grad_norm = None
        stage.layers.requires_grad_()
        optimizer.param_groups[0]["lr"] = 0.1
    engine.train_batch(ids, cu_seqlens, sft_loss, labels=ids)


def counts_follow(pipeline: Any, copies: Any) -> None:
    """Copies of a pipeline whose loss takes aligned labels: each token weighs the same on all of them."""
    number, own = dist.get_world_size(copies), dist.get_rank(copies)
    stages = my_stages("1f1b", pipeline)
    whole = ToyStage(0, 1)
    engine = PipelineEngine(
        stages,
        pipeline,
        torch.optim.SGD(stages[0].parameters(), lr=0.5),
        data_parallel_group=copies,
        normalize="tokens",
    )

    def aligned(output: Any, packed_input_ids: Tensor, cu_seqlens: Tensor, labels: Tensor) -> tuple[Tensor, None]:
        return output.cross_entropy(labels, shift=0), None

    for turn in range(2):
        batches = [batch_of(turn + 5 * copy, [2, 1, 4 - copy, 2, 1 + copy]) for copy in range(number)]
        losses = [F.cross_entropy(whole.head(whole_batch(whole, *batch)), batch[0], reduction="sum") for batch in batches]
        whole.zero_grad()
        (torch.stack(losses).sum() / sum(len(batch[0]) for batch in batches)).backward()
        result = engine.train_batch(
            *batches[own], aligned, labels=batches[own][0], token_count=lambda packed_input_ids, **_: len(packed_input_ids)
        )
        expect(engine, result and result[0], (losses[own] / len(batches[own][0])).detach())
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter -= 0.5 * parameter.grad  # type: ignore[operator]
    for name, parameter in parameters(stages).items():
        torch.testing.assert_close(parameter, dict(whole.named_parameters())[name], rtol=1e-4, atol=1e-5)
