"""Memory that several losses share until their backwards."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flce import errors

if TYPE_CHECKING:
    from flce.core._retain import Retained

_numbers = itertools.count(1)
_budgets: weakref.WeakValueDictionary[int, MemoryBudget] = weakref.WeakValueDictionary()
_MOST_BYTES = 1 << 63


class MemoryBudget:
    """The most memory that all losses which wait for their backward take together, beyond inputs, outputs and gradients.

        budget = flce.MemoryBudget(4 << 30)
        losses = [flce.linear_cross_entropy(h, weight, t, workspace_limit_bytes=budget) for h, t in microbatches]

    Given as `workspace_limit_bytes`, it counts the scratch of one call, since calls of one device run one after the other, and what every
    forward leaves to its backward so that logits need not be computed again. A forward leaves as much as the budget has room for, and
    nothing where there is none. The memory comes back when autograd lets go of the loss's graph. So the losses that come first have the
    most; how many there will be need not be known. A call whose scratch is larger than any before takes room from the newest of them,
    whose backward then computes its logits again.

    `LinearCrossEntropyLoss` and `PipelineFusedLoss` make one of their option `memory_limit_bytes`. Losses of several layers may share one,
    on one device. Any thread may use it.

    Args:
        memory_limit_bytes: a positive number of bytes. A call whose scratch alone is above it raises PlanError.

    Raises ArgumentError for what is no such number.
    """

    def __init__(self, memory_limit_bytes: int) -> None:
        if not isinstance(memory_limit_bytes, int) or isinstance(memory_limit_bytes, bool) or not 0 < memory_limit_bytes < _MOST_BYTES:
            raise errors.ArgumentError(f"memory_limit_bytes is {memory_limit_bytes!r}; it must be a positive number of bytes, below 2^63")
        self.memory_limit_bytes = memory_limit_bytes
        self.number = next(_numbers)  # operators know the budget by this number
        self._workspace_bytes = 0  # scratch of the call that took the most
        # Holders by id, in order of age. An entry is taken away without the lock: the garbage collector may end a loss's life on a thread
        # that has it.
        self._held: dict[int, tuple[weakref.ref[Retained], int]] = {}
        self._lock = threading.Lock()
        _budgets[self.number] = self

    @property
    def held_bytes(self) -> int:
        """Bytes that forwards have left to backwards that are still to come."""
        return sum(size for _, size in list(self._held.values()))

    @contextmanager
    def room(self, workspace_bytes: int) -> Iterator[int]:
        """Yields, for a forward that takes that much scratch, the limit on scratch and retained bytes together. The forward tells `hold`
        what it retains before the end."""
        with self._lock:
            if workspace_bytes > self._workspace_bytes:
                self._workspace_bytes = workspace_bytes
                self._make_room()
            yield self.memory_limit_bytes - self.held_bytes - (self._workspace_bytes - workspace_bytes)

    def _make_room(self) -> None:
        for holder, _ in reversed(list(self._held.values())):
            if self.held_bytes + self._workspace_bytes <= self.memory_limit_bytes:
                return
            retained = holder()
            if retained is not None:
                retained.give_up()

    def hold(self, retained: Retained, size: int) -> None:
        self._held[id(retained)] = weakref.ref(retained), size

    def release(self, retained: Retained) -> None:
        self._held.pop(id(retained), None)

    def __deepcopy__(self, memo: Any) -> MemoryBudget:
        """A copy of a model or of its loss has a budget of its own."""
        return MemoryBudget(self.memory_limit_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return MemoryBudget, (self.memory_limit_bytes,)

    def __repr__(self) -> str:
        return f"MemoryBudget({self.memory_limit_bytes})"


def _begin_in_a_fork() -> None:
    """Renews locks, which forwards of the parent's other threads may hold."""
    for budget in list(_budgets.values()):
        budget._lock = threading.Lock()


os.register_at_fork(after_in_child=_begin_in_a_fork)


def of_number(number: int, memory_limit_bytes: int) -> MemoryBudget | None:
    """The budget of that number; None where it is gone, or another: a compiled graph may come from another process, and then retains
    nothing."""
    found = _budgets.get(number) if number else None
    return found if found is not None and found.memory_limit_bytes == memory_limit_bytes else None
