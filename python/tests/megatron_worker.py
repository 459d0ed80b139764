"""Two ranks, under torchrun: GPTModels of megatron-core, tensor parallel and data parallel. Exits with a failed
assertion, or 0; rank 0 prints how many cases passed."""

from __future__ import annotations

from typing import Any

import megatron_support as support
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron_support import PADDED, Batch, gpt_model
from rank_support import generator, run_main

import flce
from flce.megatron import _head

CALLS: list[dict[str, Any]] = []


def watch_calls() -> None:
    function = flce.linear_cross_entropy

    def counted(*args: Any, **kwargs: Any) -> Any:
        CALLS.append(kwargs)
        return function(*args, **kwargs)

    _head.linear_cross_entropy = counted  # type: ignore[assignment]


def fused_calls() -> list[dict[str, Any]]:
    made = list(CALLS)
    CALLS.clear()
    return made


# ── Tensor parallel ─────────────────────────────────


def tensor_parallel(tied: bool, sequence: bool, depths: int) -> None:
    with support.megatron_on_cpu(tensor_model_parallel_size=2):
        settings = {"tied": tied, "depths": depths, "sequence_parallel": sequence}
        own = gpt_model(**settings)
        mine = flce.megatron.patch(support.copied(own, **settings, seed=9))
        batch, losses, logged = Batch(), [], []
        for model in (own, mine):
            support.MTPLossLoggingHelper.tracker.clear()
            losses.append(batch.losses(model))
            batch.masked_mean(losses[-1]).backward()
            logged.append([value for value in support.MTPLossLoggingHelper.tracker.values() if isinstance(value, torch.Tensor)])
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=3e-6)
        support.same_gradients(mine, own)
        torch.testing.assert_close(logged[1], logged[0])
        calls = fused_calls()
        assert len(calls) == 1 + depths and all(call["sequence_parallel"] is sequence for call in calls)
        assert mine.output_layer.output_size_per_partition == PADDED // 2
        if depths:
            counts = flce.megatron.mtp_acceptance(mine)
            logits = [part.t() for part in _gathered_argmax(own, batch)]
            assert counts.tolist() == _hits(logits, batch)


def _gathered_argmax(model: Any, batch: Batch) -> list[torch.Tensor]:
    """[s, b] of each depth, from the logits of a model that is not patched."""
    found: list[torch.Tensor] = []
    handle = model.output_layer.register_forward_hook(lambda *given: found.append(given[2][0].detach()))
    batch.losses(model)
    handle.remove()
    gather = support.tensor_parallel.gather_from_tensor_model_parallel_region
    return [gather(logits).argmax(-1) for logits in found[:-1]]


def _hits(found: list[torch.Tensor], batch: Batch) -> list[list[float]]:
    labels, mask, rows = batch.labels, batch.loss_mask, []
    for top1 in found:
        labels, _ = support.roll_tensor(labels)
        mask, _ = support.roll_tensor(mask)
        rows.append([float(((top1 == labels) & mask.bool()).sum()), float(mask.bool().sum())])
    return rows


def processor(sequence: bool, part: bool) -> None:
    """The output processor on shards. `part`: hidden's gradient stays this rank's (disable_grad_reduce)."""
    with support.megatron_on_cpu(tensor_model_parallel_size=2):
        own = gpt_model(sequence_parallel=sequence)
        mine = support.copied(own, sequence_parallel=sequence)
        for model in (own, mine):
            model.output_layer.disable_grad_reduce, model.output_layer.allreduce_dgrad = part, not (part or sequence)
        batch = Batch()
        losses = batch.losses(own)
        got = support.call_with_processor(mine, batch, flce.megatron.output_processor)
        torch.testing.assert_close(got, losses, rtol=1e-5, atol=3e-6)
        for model, made in ((own, losses), (mine, got)):
            batch.masked_mean(made).backward()
            assert model.output_layer.weight.grad is not None
        support.same_gradients(mine, own)
        assert len(fused_calls()) == 1
        try:
            support.call_with_processor(
                mine, batch, lambda **given: flce.megatron.output_processor(**given | {"runtime_gather_output": True})
            )
        except RuntimeError as error:
            assert "runtime_gather_output=True gathers logits" in str(error)
        else:
            raise AssertionError("gathered logits are not refused")


def depths_by_function() -> None:
    """process_mtp_loss, whose caller finds the largest logit from each rank's own."""
    with support.megatron_on_cpu(tensor_model_parallel_size=2):
        if not support.HAS_PROCESS_MTP_LOSS:
            support.multi_token_prediction.process_mtp_loss = support.process_mtp_loss
        own = gpt_model(depths=2)
        batch, logged = Batch(), []
        states = torch.randn(3 * support.SEQUENCE, support.BATCH, support.HIDDEN, generator=generator(4))
        logits = support.tensor_parallel.gather_from_tensor_model_parallel_region(own.output_layer(states)[0])
        first, second = (each.argmax(-1).t() for each in logits.chunk(3)[1:])
        batch.labels[:, 1::3], batch.labels[:, 2::3] = first[:, :-1:3], second[:, :-2:3]
        for function in (support.multi_token_prediction.process_mtp_loss, flce.megatron.process_mtp_loss):
            support.MTPLossLoggingHelper.tracker.clear()
            leaf = states.clone().requires_grad_()
            own.zero_grad()
            made = function(
                leaf,
                labels=batch.labels,
                loss_mask=batch.loss_mask,
                output_layer=own.output_layer,
                output_weight=None,
                runtime_gather_output=None,
                is_training=True,
                compute_language_model_loss=own.compute_language_model_loss,
                config=own.config,
                tp_group=own.tp_group,
            )
            main, hits = made if isinstance(made, tuple) else (made, support.MTPLossLoggingHelper.tracker["correct_values"].tolist())
            main.sum().backward()
            assert min(hits) > 2
            logged.append((hits, leaf.grad, own.output_layer.weight.grad))
        assert logged[0][0] == logged[1][0]
        torch.testing.assert_close(logged[1][1:], logged[0][1:], rtol=1e-4, atol=1e-6)
        assert len(fused_calls()) == 2
        if not support.HAS_PROCESS_MTP_LOSS:
            del support.multi_token_prediction.process_mtp_loss


# ── Context parallel ────────────────────────────────


def context_parallel(per_token: bool) -> None:
    """Each rank has its part of the tokens, and heads' labels and masks come from the other one. The local attention knows no context
    parallel, so that the postprocessing of both models is given hidden states."""
    with support.megatron_on_cpu(context_parallel_size=2):
        settings = {"depths": 2, "calculate_per_token_loss": per_token}
        own = gpt_model(**settings)
        mine = flce.megatron.patch(support.copied(own, **settings, seed=9))
        assert own.cp_group.size() == mine.pg_collection.cp.size() == 2
        rank = dist.get_rank()
        states = torch.randn(3 * support.SEQUENCE, support.BATCH, support.HIDDEN, generator=generator(4 + rank))
        batch = Batch(seed=6 + rank)
        given = {"input_ids": None, "position_ids": None, "rotary_pos_emb": None, "rotary_pos_cos": None, "rotary_pos_sin": None}
        results = []
        for model in (own, mine):
            support.MTPLossLoggingHelper.tracker.clear()
            leaf = states.clone().requires_grad_()
            losses = model._postprocess(leaf, labels=batch.labels, loss_mask=batch.loss_mask, mtp_in_postprocess=False, **given)
            batch.masked_mean(losses).backward()
            support.MTPLossLoggingHelper.reduce_loss_in_tracker()
            values = support.MTPLossLoggingHelper.tracker["values"].clone()
            results.append((losses.detach(), leaf.grad, model.output_layer.weight.grad, values))
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=3e-6)
        assert len(fused_calls()) == 3
        group = support.parallel_state.get_data_parallel_group(with_context_parallel=True)
        counted, mask = [], batch.loss_mask
        for _ in range(2):
            mask, _ = support.multi_token_prediction.roll_tensor(mask, cp_group=own.cp_group)
            total = mask.sum()
            dist.all_reduce(total)
            counted.append(float(total))
        assert flce.megatron.mtp_acceptance(mine, group)[:, 1].tolist() == counted


# ── Data parallel, with main_grad ───────────────────


def main_grad(tied: bool, depths: int, distributed_optimizer: bool) -> None:
    """DistributedDataParallel with overlapped reductions over micro-batches: from the second step on every bucket's reduction begins within
    backward, and main_grad
    is what the model's own path makes it."""
    torch.use_deterministic_algorithms(True)  # memory that nobody wrote holds NaN, as a dummy does that should not be read
    with support.megatron_on_cpu():
        wrapped, settings = [], {"tied": tied, "depths": depths}
        for fused in (False, True):
            model = gpt_model(**settings)
            config = DistributedDataParallelConfig(
                overlap_grad_reduce=True, grad_reduce_in_fp32=True, bucket_size=2000, use_distributed_optimizer=distributed_optimizer
            )
            wrapped.append(DistributedDataParallel(config=model.config, ddp_config=config, module=model))
            if fused:
                flce.megatron.patch(wrapped[-1] if tied else model, main_grad=True)
        for step in range(2):
            for ddp in wrapped:
                ddp.zero_grad_buffer()
                batches = [Batch(seed=10 * step + 2 * part + dist.get_rank()) for part in range(3)]
                with ddp.no_sync():
                    for batch in batches[:-1]:
                        batch.masked_mean(batch.losses(ddp)).backward()
                _refuse_late_reductions(ddp, begun=False)
                batches[-1].masked_mean(batches[-1].losses(ddp)).backward()
                _refuse_late_reductions(ddp, begun=step > 0)  # the first step learns how often hooks run
                ddp.finish_grad_sync()
            own, mine = (dict(ddp.module.named_parameters()) for ddp in wrapped)
            weight = mine["embedding.word_embeddings.weight" if tied else "output_layer.weight"]
            assert weight.grad is None and weight.grad_added_to_main_grad is True
            assert getattr(weight, "zero_out_wgrad", False) is tied
            for name, parameter in own.items():
                torch.testing.assert_close(
                    mine[name].main_grad, parameter.main_grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
                )
            calls = fused_calls()
            assert len(calls) == 3 * (1 + depths) and all(call["grad_weight_out"] is weight.main_grad for call in calls)


def _refuse_late_reductions(ddp: Any, *, begun: bool) -> None:
    assert len(ddp.bucket_groups) > 1
    for group in ddp.bucket_groups:
        assert (group.grad_reduce_handle is not None) is begun


if __name__ == "__main__":
    watch_calls()
    shards = [(False, False, 0), (True, True, 2), (False, True, 0), (True, False, 1)]
    replicas = [(False, 0, False), (True, 0, False), (True, 2, True), (False, 1, True)]
    cases: list[tuple[Any, ...]] = [(tensor_parallel, *case) for case in shards]
    cases += [(processor, False, False), (processor, True, False), (processor, False, True), (depths_by_function,)]
    cases += [(context_parallel, False), (context_parallel, True)]
    cases += [(main_grad, *case) for case in replicas]
    run_main(lambda case, *given: case(*given), lambda: cases)
