"""One rank of a pipeline under torchrun: every schedule that torch exports, two steps each, against the unpipelined model. The passes over
the output layer are counted, and what they come to in multiplications."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from levels import in_turn
from passes_support import Passes, watch_passes
from pipeline_worker import ROWS, UNSCALED, D, S, V, batch, build
from rank_support import default_device, device, run_main
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

import flce
from flce.core import _retain

# DualPipeV wants a microbatch for each stage, of which a rank has two.
MICROBATCHES = max(int(os.environ.get("FLCE_TEST_MICROBATCHES", "4")), 2 * int(os.environ.get("WORLD_SIZE", "2")))
TOKENS = ROWS // 4 * S  # tokens of a microbatch
ALL = 1 << 40
# Where a rank's stages lie: one stage a rank; two, of which the second follows the last rank's first; two, of which the second is as far
# from the end as the first is from the beginning, so that the first rank has the head.
SINGLE, LOOP, V_SHAPE = "single", "loop", "v"
# Whether a schedule splits backward.
KNOWN = {
    "ScheduleGPipe": (SINGLE, False),
    "Schedule1F1B": (SINGLE, False),
    "ScheduleInterleaved1F1B": (LOOP, False),
    "ScheduleLoopedBFS": (LOOP, False),
    "ScheduleInterleavedZeroBubble": (LOOP, True),
    "ScheduleZBVZeroBubble": (V_SHAPE, True),
    "ScheduleDualPipeV": (V_SHAPE, True),
}
# Losses by name: options, and the multiplications of a microbatch's passes in NVD, (without, with a split backward); None: not looked at.
LOSSES: dict[str, tuple[dict[str, Any], tuple[float, float] | None]] = {
    "plain": ({}, None),  # memory retained unasked depends on how many losses wait at a time
    "nothing retained": ({"retain_in_grad_weight": False}, (8, 10)),
    "lent": ({"retain_in_grad_weight": True}, (6, 6)),
    "limit": ({"workspace_limit_bytes": ALL}, (6, 6)),
    "accumulating": ({"accumulate_into_grad": True}, (8, 10)),
    "accumulating, limit": ({"accumulate_into_grad": True, "workspace_limit_bytes": ALL}, (6, 6)),
    "part": ({"retain_in_grad_weight": False}, (8, 10)),
    "frozen": ({"workspace_limit_bytes": ALL}, (4, 4)),
    "functional": ({"workspace_limit_bytes": ALL}, (6, 6)),
    "means": ({}, None),
}
TIED = ("plain", "accumulating, limit")
RETAINS = device() == "cpu"  # a GPU's kernels retain in bf16 alone

passes = Passes()
ends: Any = None  # the group of the ranks that have the first stage and, unless stages lie in a V, the last


def names() -> list[str]:
    """Every schedule of this torch; one that is not known here has to be looked at."""
    exported = [name for name in schedules.__all__ if name.startswith("Schedule")]
    unknown = set(exported) - set(KNOWN)
    what = f"torch {torch.__version__} exports {sorted(unknown)}"
    assert not unknown, f"{what}: say in KNOWN where its stages lie and whether it splits backward"
    return exported


def cases() -> Iterator[tuple[str, str, bool]]:
    for name in names():
        for loss in LOSSES:
            yield name, loss, False
        for loss in TIED:
            yield name, loss, True


@functools.cache
def limit_of_a_part() -> tuple[int, float]:
    """A limit that leaves room for a part of a microbatch's logits beside scratch, which a limit cuts, too; and the part."""
    for limit in range(1 << 18, 1 << 20, 1 << 12):
        kernel = flce.get_kernel(D, V, torch.float32, device=default_device(), num_tokens=TOKENS, workspace_limit_bytes=limit)
        choice = kernel.choose_retained(TOKENS, workspace_limit_bytes=limit, retain_in_grad_weight=False)
        share = choice.size / kernel.retained_bytes(TOKENS)
        if 0.2 < share < 0.8:
            return limit, share
    raise AssertionError("no limit leaves room for a part")


def expected_loss(head: nn.Linear, hidden: Tensor, labels: Tensor, loss: str) -> Tensor:
    """Loss from logits, of the whole batch."""
    logits = head(hidden)[:, :-1]
    targets = labels[:, 1:]
    if loss == "functional":
        logp = logits.log_softmax(-1)
        chosen = logp.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        entropy = -(logp.exp() * logp).sum(-1)
        valid = targets >= 0
        return -((chosen + 0.1 * entropy) * valid).sum() / valid.sum()
    if loss == "means":
        parts = zip(logits.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True)
        return torch.stack([F.cross_entropy(part.flatten(0, 1), target.flatten()) for part, target in parts]).mean()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def functional_loss(head: nn.Linear, count: Tensor) -> Any:
    """A loss written with a functional of several outputs, as a policy's is."""

    def loss_fn(hidden: Tensor, labels: Tensor) -> Tensor:
        targets = F.pad(labels[:, 1:], (0, 1), value=-100)
        logprobs, entropy = flce.linear_logprobs(hidden, head.weight, targets, return_entropy=True, workspace_limit_bytes=ALL)
        valid = targets >= 0
        return -((logprobs + 0.1 * entropy) * valid).sum() / count

    return loss_fn


def loss_of(module: Any, loss: str, labels: Tensor) -> Any:
    options = dict(LOSSES[loss][0])
    if loss == "functional":
        return functional_loss(module.head, (labels[:, 1:] >= 0).sum())
    if loss == "part" and RETAINS:
        options["workspace_limit_bytes"] = limit_of_a_part()[0]
    loss_fn = flce.PipelineFusedLoss(module.head, impl="flce", shift=1, **options)
    if loss != "means":
        loss_fn.normalize_by(labels)
    return loss_fn


def make_stages(where: str, whole: nn.ModuleList, tied: bool) -> dict[int, Any]:
    """This rank's stages, copies of the model's."""
    rank, world, last = dist.get_rank(), dist.get_world_size(), len(whole) - 1
    numbers = {SINGLE: [rank], LOOP: [rank, rank + world], V_SHAPE: [rank, last - rank]}[where]
    modules: dict[int, Any] = {number: copy.deepcopy(whole[number]) for number in numbers}
    for module in modules.values():
        module.zero_grad()
    if tied and 0 in modules and last in modules:
        modules[last].head.weight = modules[0].embedding.weight
    return modules


def make_schedule(name: str, modules: dict[int, Any], count: int, loss_fn: Any, loss: str) -> Any:
    stages: list[Any] = [PipelineStage(module, number, count, default_device()) for number, module in modules.items()]
    if hasattr(stages[0], "_get_init_p2p_neighbors_ops"):
        for stage in stages:  # torch before 2.13 has neighbours on one rank greet each other here, which hangs
            stage._get_init_p2p_neighbors_ops = lambda: []
    given = stages[0] if KNOWN[name][0] == SINGLE else stages
    return getattr(schedules, name)(given, MICROBATCHES, loss_fn=loss_fn, **(UNSCALED if loss != "means" else {}))


def check_passes(name: str, loss: str, what: str) -> None:
    splits = KNOWN[name][1]
    asked = sorted(passes.asked())
    if loss == "frozen":
        assert asked == [(True, False)] * MICROBATCHES, f"{what}: {asked}"
    elif splits:  # a schedule may run some microbatches' backward in one
        whole = asked.count((True, True))
        assert whole < MICROBATCHES, f"{what}: {asked}"
        apart = MICROBATCHES - whole
        assert asked == [(False, True)] * apart + [(True, False)] * apart + [(True, True)] * whole, f"{what}: {asked}"
    else:
        assert asked == [(True, True)] * MICROBATCHES, f"{what}: {asked}"
    assert passes.forwards == MICROBATCHES, f"{what}: {passes.forwards} forwards"
    expected = LOSSES[loss][1]
    if expected is None:
        return
    if not RETAINS:
        expected = (6, 6) if loss == "frozen" else (8, 10)
    elif loss == "part":
        share = limit_of_a_part()[1]
        expected = 8 - 2 * share, 10 - 4 * share
    apart = MICROBATCHES - asked.count((True, True)) if splits else 0
    right = expected[0] * (MICROBATCHES - apart) + expected[1] * apart
    assert abs(passes.multiplications - right) < 0.05 * MICROBATCHES, f"{what}: {passes.multiplications} NVD, expected {right}: {passes}"
    if loss == "lent" and RETAINS:
        assert all(each.lent for each in passes.backwards), f"{what}: {passes}"
        assert all(each.overwrites == each.grad_weight for each in passes.backwards), f"{what}: {passes}"


def run(name: str, loss: str, tied: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    where = KNOWN[name][0]
    count = world if where == SINGLE else 2 * world
    last = count - 1
    whole = build(count, tied)
    if loss == "frozen":
        whole[-1].head.weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    tokens, labels = (torch.cat([each.roll(i, 0) for i in range(MICROBATCHES // 4)]) for each in batch())
    hidden = tokens
    for part in whole:
        hidden = part(hidden)
    expected = expected_loss(whole[-1].head, hidden, labels, loss)  # type: ignore[arg-type]
    expected.backward()

    modules = make_stages(where, whole, tied)
    loss_fn: Any = loss_of(modules[last], loss, labels) if last in modules else lambda *_: None
    schedule = make_schedule(name, modules, count, loss_fn, loss)
    what = f"{name}, {loss}, tied={tied}, rank {rank} of {world}"
    for _ in range(2):  # torch's own trial runs come before the first
        for module in modules.values():
            module.zero_grad()
        passes.clear()
        losses: list[Tensor] = []
        schedule.step(*([tokens] if 0 in modules else []), **({"target": labels, "losses": losses} if last in modules else {}))
    if tied and where != V_SHAPE and (0 in modules or last in modules):
        flce.sum_tied_gradient(modules[0].embedding.weight if 0 in modules else modules[last].head.weight, ends)
    for number, module in modules.items():
        for (parameter, actual), right in zip(module.named_parameters(), whole[number].parameters(), strict=True):
            # type: ignore[misc]
            close = {"rtol": 1e-4, "atol": 1e-6 * max(1.0, world / 4)}  # a gradient goes through every stage
            torch.testing.assert_close(actual.grad, right.grad, **close, msg=lambda m, p=parameter: f"{what}: {p}: {m}")
    if last in modules:
        total = torch.stack(losses).mean() if loss == "means" else torch.stack(losses).sum()
        torch.testing.assert_close(total.detach(), expected.detach(), msg=lambda m: f"{what}: {m}")
        check_passes(name, loss, what)


def prepare() -> None:
    global passes, ends
    ends = dist.new_group([0, dist.get_world_size() - 1])
    _retain.LEAST_WORK = 1  # layers of any size retain
    passes = watch_passes()


if __name__ == "__main__":
    run_main(run, lambda: in_turn(list(cases()), 5), prepare=prepare)
