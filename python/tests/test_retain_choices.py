"""A forward's choice to retain, from a caller's choice, a limit and the kernel's room; and when losses count as several. Kernels are
stand-ins."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

import flce
from flce.core import _retain
from flce.core._frame import Inputs
from flce.core._retain import ALWAYS, AUTOMATIC, NEVER, Alive, Choice, Choices, Retain


class StandIn:
    """A kernel with 100 bytes of scratch, that lends 50 and fills what a limit leaves."""

    retains_unasked = False
    lends = True

    def __init__(self) -> None:
        self.asked: list[tuple[int, bool]] = []

    def workspace_bytes(self, num_tokens: int, *, backward: bool) -> int:
        assert num_tokens == 7
        return 100 if backward else 40

    def choose_retained(self, num_tokens: int, *, workspace_limit_bytes: int, retain_in_grad_weight: bool) -> Choice:
        assert num_tokens == 7
        self.asked.append((workspace_limit_bytes, retain_in_grad_weight))
        own = max(workspace_limit_bytes - 100, 0) or (30 if self.retains_unasked else 0)
        lent = retain_in_grad_weight and self.lends and own <= 50
        return Choice(lent, 50 if lent else own)


def choices_of(kernel: Any) -> Choices:
    return Choices(kernel, 7)


def test_bits_say_all_of_it() -> None:
    assert [Retain(choice).bits() for choice in (NEVER, AUTOMATIC, ALWAYS)] == [0, 1, 2]
    every = [Retain(*each) for each in itertools.product((NEVER, AUTOMATIC, ALWAYS), (False, True), (False, True), (0, 1, 77))]
    assert [Retain.of_bits(retain.bits()) for retain in every] == every


def test_within_a_budget_no_gradient_lends_unasked() -> None:
    budget = flce.MemoryBudget(1000)
    for given, choice in ((True, ALWAYS), (False, NEVER), (None, NEVER)):
        assert Retain.within(given, budget) == Retain(choice, gradient=False, weight=False, budget=budget.number)
    assert flce.budget.of_number(budget.number, 1000) is budget
    assert flce.budget.of_number(budget.number, 999) is None
    assert flce.budget.of_number(0, 1000) is None


def test_memory_of_its_own_is_what_the_limit_leaves_beside_the_larger_pass() -> None:
    kernel = StandIn()
    choices = choices_of(kernel)
    assert choices.workspace_bytes == 100
    assert (choices.own_under(99), choices.own_under(100)) == (0, 0) and not kernel.asked
    assert choices.own_under(101) == 1 and kernel.asked == [(101, False)]


def test_a_kernel_is_asked_once_for_each_limit() -> None:
    kernel = StandIn()
    choices = choices_of(kernel)
    for _ in range(2):
        assert choices.under(0, lend=True) == Choice(True, 50)
        assert choices.under(0, lend=False) == Choice(False, 0)
        assert choices.under(300, lend=True) == Choice(False, 200)
    assert kernel.asked == [(0, True), (0, False), (300, True)]


@pytest.mark.parametrize("lends", [True, False])
def test_the_weights_gradient_lends_where_it_is_asked_for(lends: bool) -> None:
    kernel = StandIn()
    kernel.lends = lends
    choices = choices_of(kernel)
    for choice in (NEVER, AUTOMATIC, ALWAYS):
        assert choices.may_lend(Retain(choice, gradient=True, weight=True)) is (lends and choice != NEVER)
        assert choices.may_lend(Retain(choice, gradient=True)) is False


@pytest.mark.parametrize(
    ("retain", "limit", "unasked", "expected"),
    [
        (Retain(AUTOMATIC, gradient=True, weight=True), 0, False, True),  # lent
        (Retain(AUTOMATIC, weight=True), 0, True, False),  # no gradient will be asked for
        (Retain(NEVER, gradient=True, weight=True), 0, False, False),
        (Retain(NEVER, gradient=True, weight=True), 0, True, True),  # a shard's
        (Retain(NEVER, gradient=True), 200, False, True),
        (Retain(NEVER, gradient=True), 100, False, False),
        (Retain(NEVER), 200, False, False),
    ],
)
def test_a_forward_may_retain(retain: Retain, limit: int, unasked: bool, expected: bool) -> None:
    kernel = StandIn()
    kernel.retains_unasked = unasked
    assert choices_of(kernel).may_retain(retain, limit) is expected


def test_losses_are_several_once_two_were_alive_until_one_by_one() -> None:
    alive = Alive()
    alive.enter(1)
    assert alive.alone()
    alive.enter(2)
    assert not alive.alone()
    alive.leave(1)
    assert alive.alone() and not alive.several  # decided when none is left
    alive.leave(2)
    assert alive.several and not alive.alone()
    alive.leave(2)  # once more says nothing
    assert alive.several
    alive.enter(3)
    assert not alive.alone()
    alive.leave(3)
    assert not alive.several
    alive.enter(4)
    assert alive.alone()


def test_what_was_left_is_of_the_same_tensors_alone() -> None:
    names = ("hidden", "weight", "target", "temperature")
    given = Inputs(**{name: torch.zeros(2) for name in names}, options=None)  # type: ignore[arg-type]
    addresses = _retain._addresses(given)
    for name in names:
        assert _retain._addresses(given._replace(**{name: torch.zeros(2)})) != addresses, name
    assert _retain._addresses(given._replace(temperature=None)) not in (addresses, None)


class Holder:
    """Holds memory of a budget, and gives it up."""

    def __init__(self, budget: flce.MemoryBudget, size: int) -> None:
        self.budget = budget
        budget.hold(self, size)  # type: ignore[arg-type]

    def give_up(self) -> None:
        self.budget.release(self)  # type: ignore[arg-type]


def test_a_budget_has_room_beside_the_most_scratch_and_takes_it_from_the_newest() -> None:
    budget = flce.MemoryBudget(1000)
    with budget.room(300) as limit:
        assert limit == 1000
        oldest = Holder(budget, 300)
    with budget.room(100) as limit:
        assert limit == 500  # 100 of scratch, 400 beside it; 200 of scratch are another call's
        newest = Holder(budget, 400)
    for scratch, held in ((300, 700), (301, 300), (700, 300), (701, 0)):
        with budget.room(scratch):
            assert budget.held_bytes == held, scratch
    assert oldest is not newest


def test_a_copy_of_a_budget_is_another_with_the_same_limit() -> None:
    budget = flce.MemoryBudget(1000)
    other = copy.deepcopy(budget)
    assert other.memory_limit_bytes == 1000 and other.number != budget.number
    assert repr(budget) == "MemoryBudget(1000)"
