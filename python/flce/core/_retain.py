"""Logits, or their exponentials, that forward leaves to backward, which then need not compute them again: place, owner and lifetime.

They ride as an attribute on the tensor that autograd saves anyway, the statistics of forward (lse). They live as long as that tensor, held
by an eager node, a compiled graph, a checkpoint's second forward. A hook that puts another tensor in its place (one that offloads, drops or
writes the saved tensors to a file) loses the attribute, and backward computes the logits again: a lost attribute costs time and changes no
result.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from flce import budget

if TYPE_CHECKING:
    from flce.budget import MemoryBudget
    from flce.core._frame import Inputs
    from flce.core._kernels import LoadedKernel

NEVER, AUTOMATIC, ALWAYS = 0, 1, 2  # Retain.choice
CHOICES = {None: AUTOMATIC, False: NEVER, True: ALWAYS}

# Multiply-adds of a GEMM of the layer below which nothing is retained; 0: what the library finds worth it.
LEAST_WORK = 0
_ATTRIBUTE = "_flce_retained"


class Retain(NamedTuple):
    """Room for forward to leave work to backward, and whether backward will come."""

    choice: int = NEVER  # the caller's, whether the weight's gradient may lend its memory
    gradient: bool = False  # gradients will be asked for
    weight: bool = False  # also the weight's, as a tensor of autograd's
    budget: int = 0  # number of a MemoryBudget; 0: none

    @staticmethod
    def within(choice: bool | None, memory: MemoryBudget) -> Retain:
        """A call's within a budget, in which no gradient lends its memory unasked: it would be there too early."""
        return Retain(ALWAYS if choice else NEVER, budget=memory.number)

    def bits(self) -> int:
        """The number that operators take."""
        return self.choice | self.gradient << 2 | self.weight << 3 | self.budget << 4

    @staticmethod
    def of_bits(bits: int) -> Retain:
        return Retain(bits & 3, bool(bits & 4), bool(bits & 8), bits >> 4)


class Choice(NamedTuple):
    """The library's choice for one forward."""

    lent: bool  # in the memory of the weight's gradient; else in memory of its own
    size: int  # bytes; 0: nothing is retained


class Choices:
    """The library's choices for one kernel and number of tokens, asked once for each limit."""

    __slots__ = ("_kernel", "_known", "_num_tokens", "_ways", "_workspace_bytes")

    def __init__(self, kernel: LoadedKernel, num_tokens: int) -> None:
        self._kernel, self._num_tokens = kernel, num_tokens
        self._known: dict[tuple[int, bool], Choice] = {}
        self._ways: dict[tuple[Retain, int], tuple[bool, bool]] = {}
        self._workspace_bytes = 0

    @property
    def workspace_bytes(self) -> int:
        """Scratch bytes of the pass that takes the most."""
        if not self._workspace_bytes:
            self._workspace_bytes = max(self._kernel.workspace_bytes(self._num_tokens, backward=backward) for backward in (False, True))
        return self._workspace_bytes

    def own_under(self, limit: int) -> int:
        """Bytes of its own memory that a forward fills, with that limit on workspace and what is retained together."""
        if limit <= self.workspace_bytes:
            return 0
        return self._kernel.choose_retained(self._num_tokens, workspace_limit_bytes=limit, retain_in_grad_weight=False).size

    def under(self, limit: int, *, lend: bool) -> Choice:
        """`limit`: on workspace and what is retained together, 0: no memory of its own (of a shard, some). `lend`: the weight's gradient
        may lend."""
        choice = self._known.get((limit, lend))
        if choice is None:
            choice = self._known[limit, lend] = self._kernel.choose_retained(
                self._num_tokens, workspace_limit_bytes=limit, retain_in_grad_weight=lend
            )
        return choice

    def may_lend(self, retain: Retain) -> bool:
        """Whether a forward may ever lend; if so its loss is counted among those alive."""
        return retain.weight and retain.choice != NEVER and self.under(0, lend=True).lent

    def may_retain(self, retain: Retain, limit: int) -> bool:
        """Whether a forward may leave anything to backward."""
        own = limit or self._kernel.retains_unasked
        return bool(retain.gradient and (self.may_lend(retain) or (own and self.under(limit, lend=False).size)))

    def ways(self, retain: Retain, limit: int) -> tuple[bool, bool]:
        """`may_retain`, and `may_lend`."""
        ways = self._ways.get((retain, limit))
        if ways is None:
            ways = self._ways[retain, limit] = self.may_retain(retain, limit), self.may_lend(retain)
        return ways


class ReadAgain(Protocol):
    """Inputs that a forward and its backward are given."""

    def retained_of(self) -> tuple[Tensor | None, ...]:
        """Tensors that the retained numbers depend on."""


class Alive:
    """The losses of layers of one size on one device whose weight gradient is still to come. Memory is lent where there is one at a time:
    the first of several would hold its gradient's memory through the forwards and backwards of the others. Whether there will be several
    nobody says, so it is taken to be as it was before: since there was none alive the last time.

    Without a lock, because the garbage collector may end a loss's life anywhere: only single operations on `losses` count.
    """

    __slots__ = ("losses", "most", "several")

    def __init__(self) -> None:
        self.losses: set[int] = set()
        self.most = 0
        self.several = False

    def enter(self, key: int) -> None:
        self.losses.add(key)
        self.most = max(self.most, len(self.losses))

    def leave(self, key: int) -> None:
        self.losses.discard(key)
        if not self.losses and self.most:
            self.several, self.most = self.most > 1, 0

    def alone(self) -> bool:
        return len(self.losses) == 1 and not self.several


class Retained:
    """Memory that one forward left, or only the note that the forward is alive."""

    __slots__ = (
        "__weakref__",
        "_addresses",
        "_alive",
        "_budget",
        "_captured",
        "_given_up",
        "_kernel",
        "_memory",
        "attached",
        "filled",
        "lent",
    )

    def __init__(self, kernel: LoadedKernel, given: ReadAgain, alive: Alive | None, memory_budget: MemoryBudget | None = None) -> None:
        self._kernel = kernel
        self._budget = memory_budget
        self._addresses = _addresses(given)
        self._alive = alive
        self._captured = self._given_up = False
        self.attached = False  # whether the forward that fills it has ended
        self.filled = self.lent = False
        self._memory: list[Tensor] = []  # at most one; popped and put back, so that of several backwards at once one has it
        if alive is not None:
            alive.enter(id(self))

    def keep(self, memory: Tensor, *, lent: bool) -> None:
        self._memory.append(memory)
        self.filled, self.lent = True, lent
        self._captured = memory.is_cuda and torch.cuda.is_current_stream_capturing()

    @contextmanager
    def taken(self, kernel: LoadedKernel, given: ReadAgain, *, weight: bool) -> Iterator[tuple[Tensor | None, bool]]:
        """The memory for one backward, or None, and whether the weight's gradient is to be written over it. Lent memory that has been
        written over is gone with its contents; after any failure meanwhile it counts as gone, too."""
        memory = None
        if kernel is self._kernel and _addresses(given) == self._addresses:
            try:
                memory = self._memory.pop()
            except IndexError:
                pass
        overwrite = self.lent and weight
        again = memory
        if memory is not None and memory.is_cuda and (capturing := torch.cuda.is_current_stream_capturing()) != self._captured:
            # A captured forward writes to it at every replay: it cannot be a gradient of this backward. A captured backward would read it
            # at every replay, when it is gone.
            overwrite = False
            if capturing:
                memory = None
        yield memory, overwrite and memory is not None
        if weight:
            self.leave()
        if again is not None and not overwrite and not self._given_up:
            self._memory.append(again)

    def close(self) -> None:
        self._memory.clear()
        self._release()

    def give_up(self) -> None:
        """Memory that is needed more elsewhere. Not while a forward, or the replays of a captured one, may still write to it."""
        if self.attached and not self._captured:
            self._given_up = True
            self.close()

    def leave(self) -> None:
        alive = getattr(self, "_alive", None)  # an interrupt may have ended __init__ before it was set
        if alive is not None:
            alive.leave(id(self))

    def _release(self) -> None:
        memory_budget = getattr(self, "_budget", None)
        if memory_budget is not None:
            memory_budget.release(self)

    def __del__(self) -> None:
        self.leave()
        self._release()

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of the tensor has none of it."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and torch.save write none of it: an empty dictionary is there, which weights_only reads too."""
        return OrderedDict, ()


def _addresses(given: ReadAgain) -> tuple[int, ...]:
    return tuple(0 if each is None else each.data_ptr() for each in given.retained_of())


def prepare(kernel: LoadedKernel, given: Inputs, choices: Choices) -> tuple[Retained | None, Tensor | None]:
    """Prepares one forward: the object to attach to its statistics, and the memory that it is to fill, either None."""
    limit, retain = given.options.workspace_limit_bytes, given.options.retain
    shared = budget.of_number(retain.budget, limit) if retain.budget else None
    if shared is None and retain.budget:
        return None, None  # nobody counts
    may_retain, may_lend = choices.ways(retain, limit)
    if not may_retain:
        if shared is not None:
            with shared.room(choices.workspace_bytes):
                pass
        return None, None
    retained = Retained(kernel, given, kernel.alive if may_lend else None, shared)
    lend = may_lend and lends(kernel, retain.choice, given.hidden)
    if shared is not None and not (lend and choices.under(limit, lend=True).lent):
        return retained, _of_budget(retained, shared, kernel, choices)
    choice = choices.under(limit, lend=lend)
    if not choice.size:
        return retained, None
    memory = kernel.new_grad_weight(given.weight) if choice.lent else kernel.new_bytes(choice.size)
    retained.keep(memory, lent=choice.lent)
    return retained, memory


def lends(kernel: LoadedKernel, choice: int, hidden: Tensor) -> bool:
    """Whether a forward that may lend the weight's gradient does, by the caller's choice. It is among `kernel.alive`."""
    return choice == ALWAYS or (choice == AUTOMATIC and kernel.alive.alone() and not _capturing(hidden))


def _of_budget(retained: Retained, shared: MemoryBudget, kernel: LoadedKernel, choices: Choices) -> Tensor | None:
    with shared.room(choices.workspace_bytes) as limit:
        size = choices.own_under(limit)
        if not size:
            return None
        shared.hold(retained, size)
    memory = kernel.new_bytes(size)
    retained.keep(memory, lent=False)
    return memory


def attach(retained: Retained, saved: Tensor) -> None:
    """Attaches `retained` at the end of the forward that filled it."""
    retained.attached = True
    setattr(saved, _ATTRIBUTE, retained)


def of(saved: Tensor) -> Retained | None:
    retained = getattr(saved, _ATTRIBUTE, None)
    return retained if isinstance(retained, Retained) else None


def has_filled(saved: Tensor) -> bool:
    """Whether the forward that `saved` comes from left something to backward."""
    retained = of(saved)
    return retained is not None and retained.filled


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def under_cudagraph_trees(tensor: Tensor) -> bool:
    """Whether torch.compile's CUDA graphs are being warmed up or recorded: they account for all of their pool, and know outputs alone."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or not tensor.is_cuda:
        return False
    manager = trees.get_manager(tensor.device.index, create_if_none_exists=False)
    return manager is not None and torch.cuda.current_stream(tensor.device) == manager.stream
