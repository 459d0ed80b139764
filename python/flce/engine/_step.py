"""The optimizer's step, from a batch's gradients on."""

from __future__ import annotations

import inspect
import logging
import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from flce import errors
from flce.engine._agreement import Agreed
from flce.engine._losses import Losses
from flce.engine._transport import on_device

if TYPE_CHECKING:
    from flce.engine._pipeline_engine import PipelineEngine

_log = logging.getLogger("flce")
_PART = 1 << 25  # elements of a tied weight's gradient that are exchanged at a time


def check(engine: PipelineEngine) -> None:
    """Checks that optimizer and scheduler can step, before anything is computed. ArgumentError."""
    optimizer = engine.optimizer
    if optimizer is None:
        raise errors.ArgumentError("train_batch needs an optimizer; this engine was made without one")
    check_scheduler(engine.lr_scheduler, engine.version_steps)
    own = {id(parameter) for parameter in engine.parameters()}
    # One of the user's own may step copies of parameters.
    for number, group in enumerate(optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else ()):
        foreign = [parameter for parameter in group["params"] if id(parameter) not in own]
        if foreign:
            raise errors.ArgumentError(
                f"optimizer has {len(foreign)} parameters in group {number} that are none of this rank's stages', the first of shape "
                f"{list(foreign[0].shape)}: no gradient of theirs is reduced or cleared. Make it of engine.parameters(), behind whatever "
                "makes new ones (load_stage of a stage on the meta device)"
            )


def check_scheduler(scheduler: Any, version_steps: int | None) -> None:
    """Checks that the scheduler is stepped without arguments, or by version steps, where they are set."""
    if scheduler is None:
        return
    kind = type(scheduler).__name__
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise errors.ArgumentError(f"lr_scheduler is a {kind}, whose step takes a metric; step it yourself, behind train_batch")
    if not callable(getattr(scheduler, "step", None)):
        raise errors.ArgumentError(f"lr_scheduler is a {kind}, which has no step()")
    try:
        inspect.signature(scheduler.step).bind(*() if version_steps is None else (version_steps,))
    except TypeError as error:
        given, why = ("", "") if version_steps is None else (version_steps, "; set_version_steps is for schedulers that take it")
        raise errors.ArgumentError(f"lr_scheduler is a {kind}, whose step cannot be called as step({given}): {error}{why}") from error
    except ValueError:  # not a Python function
        pass


def clear_gradients(engine: PipelineEngine) -> None:
    for parameter in engine.parameters():
        parameter.grad = None


def total_of(engine: PipelineEngine, numbers: Sequence[int], train: bool) -> int:
    """Number of tokens that count, alike on all ranks. It is the last stage's: other stages need not have its keywords' values."""
    summed = torch.tensor(sum(numbers) if engine.is_last else 0, dtype=torch.int64, device=engine._agreement.device)
    dist.all_reduce(summed, group=engine.pipeline_group)
    if train and engine.data_parallel_group is not None:
        dist.all_reduce(summed, group=engine.data_parallel_group)
    if not summed:
        raise Agreed(errors.ArgumentError('the batch has no token that counts, which normalize="tokens" would divide by'))
    return int(summed)


def finish(engine: PipelineEngine, losses: Losses) -> None:
    """Ends a batch behind the last backward: reductions, and the steps of optimizer and scheduler, or none where a loss is not finite."""
    problem = _nonfinite_loss(engine, losses)
    if problem is None:
        tied = engine._tied
        if tied.weight is not None and tied.weight.requires_grad:
            sum_tied(tied.weight, tied.peer, engine.pipeline_group)
        if engine.data_parallel_group is not None:
            trained = [parameter for parameter in engine.parameters() if parameter.requires_grad]
            reduce_over_copies(trained, engine.data_parallel_group, average=engine.normalize == "micro_batches")
        problem = _clip(engine)
    if problem is not None:
        clear_gradients(engine)
        if engine.nonfinite == "raise":
            raise Agreed(problem)
        _log.warning("flce: %s; the optimizer's step is left out", problem)
        return
    assert engine.optimizer is not None
    with engine._own():
        engine.optimizer.step()
        if engine.lr_scheduler is not None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The epoch parameter", category=UserWarning)
                engine.lr_scheduler.step(*() if engine.version_steps is None else (engine.version_steps,))
    clear_gradients(engine)


def _nonfinite_loss(engine: PipelineEngine, losses: Losses) -> errors.PipelineError | None:
    """Names the first microbatch whose loss is not finite, on all ranks alike."""
    fine, copies = 1 << 62, engine.data_parallel_group
    copy = 0 if copies is None else dist.get_rank(copies)
    bad = losses.first_nonfinite() if engine.is_last else None
    code = torch.tensor(fine if bad is None else (copy << 32) + bad, device=engine._agreement.device)
    for group in (engine.pipeline_group, copies):
        if group is not None:
            dist.all_reduce(code, dist.ReduceOp.MIN, group=group)
    found = int(code)
    if found == fine:
        return None
    number = found & 0xFFFFFFFF
    name = str(engine._microbatches[number]) if found >> 32 == copy else f"microbatch {number}"
    of = "" if copies is None else f" of data-parallel rank {found >> 32}"
    return errors.PipelineError(f"the loss of {name}{of} is not finite; parameters are as they were", engine.num_stages - 1)


def _clip(engine: PipelineEngine) -> errors.PipelineError | None:
    if engine.max_grad_norm is None:
        return None
    twice = engine._tied.weight if engine._tied.uncounted else None
    gradients = [parameter.grad for parameter in engine.parameters() if parameter.grad is not None and parameter is not twice]
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    total = torch.stack(norms).square().sum() if norms else torch.zeros(())
    total = total.to(engine._agreement.device)
    dist.all_reduce(total, group=engine.pipeline_group)
    norm = total.sqrt().to(engine.device)
    engine.last_grad_norm = float(norm)
    if not math.isfinite(engine.last_grad_norm):
        return errors.PipelineError(f"the gradients' norm is {engine.last_grad_norm}; parameters are as they were")
    if engine.last_grad_norm > engine.max_grad_norm:
        nn.utils.clip_grads_with_norm_(engine.parameters(), engine.max_grad_norm, norm)
    return None


def sum_tied(weight: nn.Parameter, peer: int, group: dist.ProcessGroup) -> None:
    """Adds the gradient of the copy on rank `peer`, counted among all, to this copy's."""
    total = torch.zeros_like(weight) if weight.grad is None else weight.grad.contiguous()
    for part in total.view(-1).split(_PART):
        sent = part if on_device(group) else part.cpu()
        received = torch.empty_like(sent)
        operations = [dist.P2POp(dist.isend, sent, peer, group), dist.P2POp(dist.irecv, received, peer, group)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        part += received.to(part.device)
    weight.grad = total


def reduce_over_copies(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, *, average: bool) -> None:
    """One reduction over data-parallel ranks: the gradients' average, or their sum. A parameter without a gradient has zeros, as another
    rank may have one."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
        if average:
            parameter.grad /= dist.get_world_size(group)
    for work in [dist.all_reduce(parameter.grad, group=group, async_op=True) for parameter in parameters]:
        work.wait()
