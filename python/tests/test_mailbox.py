"""Numbers between ranks of one machine: threads that play ranks, each with its own view of the memory, and what happens to the others when
one is late, has ended, makes another call or lives elsewhere."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flce.parallel import _mailbox


class Slow:
    """Stand-in for gloo, by which `open_between` tells numbers."""

    def __init__(self, ranks: int) -> None:
        self._told: list[Any] = [None] * ranks
        self._barrier = threading.Barrier(ranks)

    def of(self, rank: int) -> _mailbox.Tell:
        def tell(numbers: Sequence[int]) -> list[tuple[int, ...]]:
            self._told[rank] = tuple(numbers)
            self._barrier.wait()
            found = list(self._told)
            self._barrier.wait()
            return found

        return tell


def on_ranks(ranks: int, function: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(ranks) as pool:
        return [each.result() for each in [pool.submit(function, rank) for rank in range(ranks)]]


def opened(ranks: int, seconds: float = 60) -> list[Any]:
    slow = Slow(ranks)
    return on_ranks(ranks, lambda rank: _mailbox.open_between(slow.of(rank), rank, ranks, seconds))


def left_behind() -> list[Path]:
    return list(Path("/dev/shm").glob("flce-[0-9a-f]*[0-9a-f]"))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_everyone_hears_everyone(ranks: int) -> None:
    boxes = opened(ranks)

    def run(rank: int) -> None:
        chance = random.Random(rank)
        for turn in range(2000 // ranks):
            count = turn % (_mailbox.MOST + 1)
            told = boxes[rank].tell([turn, rank, -(1 << 63), (1 << 63) - 1, *range(26)][:count])
            assert told == [(turn, other, -(1 << 63), (1 << 63) - 1, *range(26))[:count] for other in range(ranks)]
            if chance.random() < 0.01:
                time.sleep(2e-3)

    on_ranks(ranks, run)


def test_nothing_is_left_in_the_file_system() -> None:
    before = left_behind()
    boxes = opened(3)
    assert all(isinstance(box, _mailbox.Mailbox) for box in boxes) and left_behind() == before


def test_ranks_of_several_machines_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter((7, 7, 8))
    monkeypatch.setattr(_mailbox, "_machine", lambda: next(numbers))
    assert opened(3) == [None] * 3
    with monkeypatch.context() as hidden:  # processes that do not see each other
        hidden.setattr(_mailbox, "_machine", lambda: 7)
        hidden.setattr(_mailbox, "_began", lambda _: -1)
        assert opened(2) == [None] * 2
    monkeypatch.setattr(_mailbox, "_machine", lambda: 0)
    assert opened(2) == [None] * 2


@pytest.mark.parametrize("makes", [False, True])
def test_a_file_that_one_rank_cannot_open(makes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    before, mapped = left_behind(), _mailbox._map

    def refuse(path: Path, size: int, *, make: bool = False) -> Any:
        return None if make == makes else mapped(path, size, make=make)

    monkeypatch.setattr(_mailbox, "_map", refuse)
    assert opened(2) == [None] * 2 and left_behind() == before


def test_a_rank_that_makes_another_call() -> None:
    boxes = opened(2)
    faults = []

    def run(rank: int) -> None:
        try:
            boxes[rank].tell([1] * (3 + rank))
        except RuntimeError as error:
            faults.append(str(error))

    on_ranks(2, run)
    assert len(faults) == 2 and all("they make different calls" in fault for fault in faults)


def test_a_rank_that_does_not_come() -> None:
    box = opened(2, seconds=0.3)[0]
    with pytest.raises(RuntimeError, match=r"rank 1 of the process group has not come to this call for 0\.3 s"):
        box.tell([1])


@pytest.mark.parametrize("reaped", [False, True])
def test_a_rank_that_has_ended(reaped: bool) -> None:
    box = opened(2)[0]
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    box._processes[1] = (child.pid, _mailbox._began(child.pid))
    assert box._processes[1][1] > 0
    child.kill()
    if reaped:
        child.wait()
    with pytest.raises(RuntimeError, match="rank 1 of the process group has ended"):
        box.tell([1])
    child.communicate()


def test_numbers_of_a_process_that_took_an_ended_ones_place() -> None:
    box = opened(2)[0]
    box._processes[1] = (box._processes[1][0], box._processes[1][1] - 1)
    with pytest.raises(RuntimeError, match="has ended"):
        box.tell([1])


def test_a_full_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    before = left_behind()

    def full(*_: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(_mailbox.os, "posix_fallocate", full)
    assert opened(2) == [None] * 2 and left_behind() == before


def test_an_opening_that_fails_leaves_nothing() -> None:
    before = left_behind()
    told = iter([None, None, KeyboardInterrupt])

    def tell(numbers: Sequence[int]) -> list[tuple[int, ...]]:
        if next(told) is not None:
            raise KeyboardInterrupt
        return [tuple(numbers)]

    with pytest.raises(KeyboardInterrupt):
        _mailbox.open_between(tell, 0, 1, 60)
    assert left_behind() == before


def test_a_fork_is_no_rank() -> None:
    box = opened(1)[0]
    assert box.tell([1]) == [(1,)]
    child = os.fork()
    if child == 0:
        try:
            box.leave()
            box.tell([2])
        except RuntimeError as error:
            os._exit(0 if "fork of a rank" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert box.tell([3]) == [(3,)]


def test_a_rank_that_left_calls_by_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The late one hears of it at once, and not after the group's timeout; numbers that cannot be told count for no call."""
    boxes = opened(2)
    with pytest.raises(struct.error):
        boxes[0].tell([1 << 63])
    with monkeypatch.context() as interrupted:
        interrupted.setattr(boxes[0], "_read", lambda *_: ())
        for _ in range(3):
            boxes[0].tell([1])
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 0 of the process group is 2 calls ahead of rank 1"):
        boxes[1].tell([1])
    assert time.monotonic() - begin < 10


def test_threads_of_a_rank_share_a_box() -> None:
    """An exchange is read before the next one begins, whichever thread began it."""
    boxes = opened(2)
    with ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(lambda box: [box.begin([7])() for _ in range(300)], boxes[number % 2]) for number in range(6)]
        assert all(told == [(7,), (7,)] for call in calls for told in call.result())


def test_exchanges_that_nobody_reads() -> None:
    boxes = opened(2)
    on_ranks(2, lambda rank: [boxes[rank].begin([number]) for number in range(5)])
    first, second = on_ranks(2, lambda rank: boxes[rank].begin([rank]))
    assert on_ranks(2, lambda rank: boxes[rank].tell([10 + rank])) == [[(10,), (11,)]] * 2
    assert first() == second() == first() == [(0,), (1,)]


def test_an_error_is_that_of_its_exchange() -> None:
    boxes = opened(2, seconds=0.2)
    heard = boxes[0].begin([1])
    late = threading.Thread(target=lambda: [boxes[1].tell([1]), boxes[1].tell([2])])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="rank 1 of the process group has not come"):
            heard()
    late.start()
    assert boxes[0].tell([2]) == [(2,), (2,)]
    late.join()


def test_a_rank_that_lets_go_of_the_group() -> None:
    boxes = opened(2)
    assert on_ranks(2, lambda rank: boxes[rank].tell([rank]))[0] == [(0,), (1,)]
    late = threading.Timer(0.1, lambda: boxes[0].tell([2]))
    late.start()
    assert boxes[1].tell([3]) == [(2,), (3,)]
    boxes[1].leave()
    late.join()  # has read what the other told before it left
    with pytest.raises(RuntimeError, match="rank 1 of the process group has let go of the group"):
        boxes[0].tell([5])


def test_numbers_that_are_there_in_part() -> None:
    """The head is seen before what it is a checksum of."""
    boxes = opened(2)
    at = _mailbox._SLOT * 3 + _mailbox._HEAD.size  # numbers of rank 1, in the exchange of odd number

    def late(rank: int) -> Any:
        if rank == 0:
            return boxes[0].tell([5, 6])
        tell, boxes[1]._read = boxes[1].tell, lambda *_: ()
        tell([7, 8])
        kept = boxes[1]._memory[at : at + 16]
        boxes[1]._memory[at : at + 8] = bytes(8)
        time.sleep(0.05)
        boxes[1]._memory[at : at + 16] = kept
        return None

    found = on_ranks(2, late)[0]
    assert found == [(5, 6), (7, 8)]
