"""A budget that the losses which wait for their backward share: what each of them leaves to it, and that their sum keeps to the limit."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from typing import Any

import pytest
import torch
from retain_support import LENT, NONE, OWN, Loss, Watched, check, gradients_of, loss_of, make

import flce
from flce.core import _kernels

NUM_TOKENS = 40


def sizes(device: str, num_tokens: int = NUM_TOKENS, limit: int = 1 << 30) -> tuple[int, int]:
    """(scratch of a call, all that one forward has a use for), in bytes."""
    kernel = flce.get_kernel(64, 3000, torch.bfloat16, device=device, workspace_limit_bytes=limit, num_tokens=num_tokens)
    scratch = max(kernel.workspace_bytes(num_tokens, backward=backward) for backward in (False, True))
    return scratch, kernel.retained_bytes(num_tokens)


def limit_for(device: str, forwards: float) -> tuple[int, int]:
    """A limit with room for the exponentials of that many forwards, and the bytes of one forward's. Under a limit that is near what a call
    takes another plan may be chosen, with less scratch: the limit that is wanted is that of its own plan."""
    limit = 1 << 30
    while True:
        scratch, whole = sizes(device, limit=limit)
        wanted = scratch + int(forwards * whole)
        if wanted >= limit:
            assert wanted == limit, "a plan with more scratch under a smaller limit"
            return limit, whole
        limit = wanted


def budget_for(device: str, forwards: float) -> tuple[flce.MemoryBudget, int]:
    """A budget with that limit."""
    limit, whole = limit_for(device, forwards)
    return flce.MemoryBudget(limit), whole


def test_four_losses_alive_share_the_limit(device: str, watched: Watched, way: Loss) -> None:
    budget, whole = budget_for(device, 2.5)
    for _ in range(2):  # the second step as the first
        problems = [make(device) for _ in range(4)]
        losses, held = [], []
        for problem in problems:
            losses.append(way(problem, workspace_limit_bytes=budget))
            held.append(budget.held_bytes)
        assert held[:2] == [whole, 2 * whole] and 2 * whole < held[2] <= 2.5 * whole and held[3] == held[2]
        for problem, loss in zip(problems, losses, strict=True):
            check(problem, gradients_of(problem, loss))
        assert [used for used in watched.take() if used == OWN] == [OWN] * 3
        del loss, losses
        gc.collect()
        assert budget.held_bytes == 0 and watched.alive() == 0


def test_one_loss_at_a_time_has_all_of_it(device: str, watched: Watched) -> None:
    budget, whole = budget_for(device, 1)
    for _ in range(3):
        problem = make(device)
        loss = loss_of(problem, workspace_limit_bytes=budget)
        assert budget.held_bytes == whole
        loss.backward()
        del loss
        assert budget.held_bytes == 0
    assert watched.take() == [OWN] * 3


def test_memory_comes_back_without_a_backward(device: str, watched: Watched) -> None:
    budget, whole = budget_for(device, 1)
    problem = make(device)
    loss = loss_of(problem, workspace_limit_bytes=budget)
    assert budget.held_bytes == whole
    del loss
    assert budget.held_bytes == 0
    with torch.no_grad():
        loss_of(problem, workspace_limit_bytes=budget)
    assert budget.held_bytes == 0
    fresh = flce.MemoryBudget(budget.memory_limit_bytes)
    with torch.no_grad():
        loss_of(problem, workspace_limit_bytes=fresh)
    assert fresh._workspace_bytes == budget._workspace_bytes > 0  # the scratch of a call that leaves nothing counts too


def test_no_gradient_lends_its_memory_unasked(device: str, watched: Watched) -> None:
    problem = make(device)
    budget, _ = budget_for(device, 0.1)  # more room would hold more than the gradient's memory
    for way in ({}, {"workspace_limit_bytes": budget}, {"workspace_limit_bytes": budget, "retain_in_grad_weight": True}):
        loss_of(problem, **way).backward()
    first, unasked, asked = watched.take()
    assert first == asked == LENT != unasked


def test_a_call_with_more_scratch_takes_room_from_the_newest(device: str, watched: Watched) -> None:
    limit = 5 << 20
    small, whole = sizes(device, limit=limit)
    large, _ = sizes(device, 4000, limit=limit)
    if not small + 3 * whole > limit - large + small >= small + whole:
        pytest.skip("scratch does not grow by as much as one forward leaves here")
    budget = flce.MemoryBudget(limit)
    problems = [make(device) for _ in range(3)]
    losses = [loss_of(problem, workspace_limit_bytes=budget) for problem in problems]
    assert budget.held_bytes + large > limit
    problems.append(make(device, num_tokens=4000))
    losses.append(loss_of(problems[-1], workspace_limit_bytes=budget))
    assert whole <= budget.held_bytes <= limit - large
    gradients = [gradients_of(problem, loss) for problem, loss in zip(problems, losses, strict=True)]
    assert 1 <= watched.take().count(OWN) < 3
    for problem, got in zip(problems, gradients, strict=True):
        check(problem, got, gradients_of(problem, loss_of(problem, workspace_limit_bytes=limit)))


def test_losses_have_one_of_their_own(device: str, watched: Watched) -> None:
    limit, _ = limit_for(device, 2)
    problem = make(device)
    head = torch.nn.Linear(64, 3000, bias=False, device=device, dtype=torch.bfloat16)
    fused = flce.FusedLMHead.from_linear(head, shift=0, memory_limit_bytes=limit)
    loss: Any
    for loss in (
        flce.LinearCrossEntropyLoss(head, shift=0, memory_limit_bytes=limit),
        flce.PipelineFusedLoss(head, shift=0, memory_limit_bytes=limit, accumulate_into_grad=True),
        lambda hidden, target: fused(hidden, labels=target),
    ):
        values = [loss(problem.hidden, problem.target) for _ in range(4)]
        for value in values:
            value.backward()
        assert watched.take() == [OWN, OWN, NONE, NONE]
        del value, values
    budget = fused.options["workspace_limit_bytes"]
    assert copy.deepcopy(fused).options["workspace_limit_bytes"] is not budget
    assert pickle.loads(pickle.dumps(budget)).memory_limit_bytes == budget.memory_limit_bytes


def test_several_threads_keep_to_the_limit(device: str, watched: Watched) -> None:
    budget, whole = budget_for(device, 3)
    most: list[int] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(10):
                problem = make(device)
                losses = [loss_of(problem, workspace_limit_bytes=budget) for _ in range(3)]
                most.append(budget.held_bytes)
                for loss in losses:
                    loss.backward()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and 0 < max(most) <= 3 * whole
    gc.collect()
    assert budget.held_bytes == 0


def test_memory_that_a_forward_is_writing_to_is_not_taken(device: str, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's call comes between the choice to retain and the launch that fills the memory."""
    budget, whole = budget_for(device, 1)
    scratch, _ = sizes(device)
    problem = make(device)
    run = _kernels.LoadedKernel.run
    during: list[tuple[int, int]] = []

    def interrupted(self: Any, *args: Any) -> None:
        if not during:
            with budget.room(scratch + whole):
                during.append((budget.held_bytes, watched.alive()))
        run(self, *args)

    monkeypatch.setattr(_kernels.LoadedKernel, "run", interrupted)
    loss = loss_of(problem, workspace_limit_bytes=budget)
    assert during == [(whole, 1)]
    budget._workspace_bytes = 0  # repeats the request after forward: now the memory goes
    with budget.room(scratch + whole):
        pass
    assert (budget.held_bytes, watched.alive()) == (0, 0)
    gradients = gradients_of(problem, loss)
    assert watched.take() == [NONE]
    # Compared with a call under the same limit: another limit may cut a call into other chunks, whose sums round elsewhere.
    check(problem, gradients, gradients_of(problem, loss_of(problem, workspace_limit_bytes=budget.memory_limit_bytes)))


def test_memory_given_up_while_a_backward_reads_it_does_not_come_back(
    device: str, watched: Watched, way: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread's call needs room during a backward: that backward ends with the memory, and no later one has it."""
    budget, whole = budget_for(device, 1)
    scratch, _ = sizes(device)
    problem = make(device)
    loss = way(problem, workspace_limit_bytes=budget)
    run = _kernels.LoadedKernel.run
    during: list[tuple[int, int]] = []

    def interrupted(self: Any, *args: Any) -> None:
        if not during:
            with budget.room(scratch + whole):
                during.append((budget.held_bytes, watched.alive()))
        run(self, *args)

    monkeypatch.setattr(_kernels.LoadedKernel, "run", interrupted)
    first = gradients_of(problem, loss, retain_graph=True)
    assert during == [(0, 1)]  # counted as free, and read by the backward still
    assert watched.alive() == 0
    second = gradients_of(problem, loss)
    assert watched.take() == [OWN, NONE] and budget.held_bytes == 0
    check(problem, second, first)


def test_a_graph_of_another_process_retains_nothing(device: str, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    budget, _ = budget_for(device, 1)
    problem = make(device)
    monkeypatch.setattr(flce.budget, "_budgets", {})
    loss_of(problem, workspace_limit_bytes=budget).backward()
    assert watched.take() == [NONE] and budget.held_bytes == 0


def test_bad_limits_are_refused() -> None:
    problem = make("cpu")
    head = torch.nn.Linear(64, 3000)
    for bad in (0, -1, 1.5, True, "1G", None, 1 << 63):
        with pytest.raises(flce.ArgumentError, match="memory_limit_bytes is"):
            flce.MemoryBudget(bad)  # type: ignore[arg-type]
    with pytest.raises(flce.ArgumentError, match="memory_limit_bytes is 0"):
        flce.LinearCrossEntropyLoss(head, memory_limit_bytes=0, shift=1)
    with pytest.raises(flce.ArgumentError, match="memory_limit_bytes and workspace_limit_bytes"):
        flce.FusedLMHead(64, 3000, memory_limit_bytes=1 << 20, workspace_limit_bytes=1 << 20, shift=1)
    with pytest.raises(flce.PlanError):  # less than a call's scratch
        loss_of(problem, workspace_limit_bytes=flce.MemoryBudget(1))
