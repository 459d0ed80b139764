"""Numbers that ranks of one machine tell each other through shared memory, in microseconds, where gloo takes a millisecond for them.

A rank has two slots, for exchanges of even and of odd number. It writes its numbers into one of them and reads everyone's. A rank that is
ahead has at most begun the next exchange, in the other slots: that one ends when all ranks have come, and so has this one by then. A rank
that left an exchange by an error may be further ahead; the others are told so in the place of its numbers. An exchange is begun and then
read, which leaves the rank time for other work; of several threads none begins the next one before that.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

MOST = 30  # numbers of a rank
_HEAD = struct.Struct("<qII")  # number of the exchange; how many numbers; a checksum of both and of them
_SLOT = _HEAD.size + 8 * MOST
_FOLDER = Path("/dev/shm")
_SPINS = 500  # looks without a sleep: some 100 µs
_SHORTEST, _LONGEST = 2e-5, 1e-3  # seconds of sleep between two looks
_LOOK_FOR_THE_DEAD = 0.25  # seconds
_LEFT = -1  # number of a rank's exchange once its group is gone

Tell = Callable[[Sequence[int]], list[tuple[int, ...]]]


class Mailbox:
    """The slots of a group's ranks, and this rank's part in them."""

    def __init__(self, memory: mmap.mmap, rank: int, processes: list[tuple[int, int]], seconds: float) -> None:
        self._memory, self._rank, self._processes, self._seconds = memory, rank, processes, seconds
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._number = 0
        self._begun: _Exchange | None = None  # exchange whose numbers are yet to be read

    def tell(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """`begin`, and what the others have told."""
        return self.begin(numbers)()

    def begin(self, numbers: Sequence[int]) -> Callable[[], list[tuple[int, ...]]]:
        """Tells the others this rank's numbers of 64 bits, at most MOST. Returns the function that waits for theirs: every rank's numbers,
        in the order of ranks. Raises RuntimeError where a rank has ended or let go of the group, does not come in the group's time, left an
        earlier call by an error, or tells another count of numbers; and in a fork."""
        if os.getpid() != self._process:
            raise RuntimeError("this process is a fork of a rank of the process group; the rank itself makes the call")
        packed = struct.pack(f"<{len(numbers)}q", *numbers)
        with self._lock:
            if self._begun is not None:  # an exchange of another thread, or one that was left by an error
                self._begun.settle()
            number = self._number = self._number + 1
            at = self._slot(self._rank, number)
            self._memory[at + _HEAD.size : at + _HEAD.size + len(packed)] = packed
            _HEAD.pack_into(self._memory, at, number, len(numbers), _checksum(number, len(numbers), packed))
            begun = self._begun = _Exchange(self, number, struct.unpack(f"<{len(numbers)}q", packed))
        return begun

    def _everyone(self, number: int, mine: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [mine if rank == self._rank else self._read(rank, number, len(mine)) for rank in range(len(self._processes))]

    def leave(self) -> None:
        """Tells the others that this rank makes no further call: its group is gone. The last call's numbers stay for those yet to read."""
        if os.getpid() == self._process:
            self._number += 1
            _HEAD.pack_into(self._memory, self._slot(self._rank, self._number), _LEFT, 0, 0)

    def _slot(self, rank: int, number: int) -> int:
        return (number % 2 * len(self._processes) + rank) * _SLOT

    def _look(self, rank: int, expected: int) -> tuple[int, bytes] | None:
        """How many numbers the rank tells, and their bytes; None before they are there. The checksum tells numbers that another processor
        has written in part."""
        at = self._slot(rank, expected)
        number, count, checksum = _HEAD.unpack_from(self._memory, at)
        if number != expected or count > MOST:
            return None
        packed = self._memory[at + _HEAD.size : at + _HEAD.size + 8 * count]
        return (count, packed) if _checksum(number, count, packed) == checksum else None

    def _read(self, rank: int, number: int, expected: int) -> tuple[int, ...]:
        found = None
        for _ in range(_SPINS):
            if (found := self._look(rank, number)) is not None:
                break
        count, packed = found or self._wait(rank, number)
        if count != expected:
            raise RuntimeError(
                f"rank {rank} of the process group tells {count} numbers and rank {self._rank} {expected}: they make different calls"
            )
        return struct.unpack(f"<{count}q", packed)

    def _wait(self, rank: int, number: int) -> tuple[int, bytes]:
        begin = looked = time.monotonic()
        pause = _SHORTEST
        while (found := self._look(rank, number)) is None:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
            now = time.monotonic()
            if now - looked > _LOOK_FOR_THE_DEAD:
                looked = now
                if (there := self._number_there(rank, number)) == _LEFT:
                    raise RuntimeError(f"rank {rank} of the process group has let go of the group")
                if there > number and there == self._number_there(rank, number):  # seen twice: it is there as a whole
                    raise RuntimeError(
                        f"rank {rank} of the process group is {there - number} calls ahead of rank {self._rank}: it left one by an "
                        "error; make the group anew"
                    )
                if _began(self._processes[rank][0]) != self._processes[rank][1] and self._look(rank, number) is None:
                    raise RuntimeError(f"rank {rank} of the process group has ended")
            if now - begin > self._seconds:
                raise RuntimeError(
                    f"rank {rank} of the process group has not come to this call for {self._seconds:g} s, the group's timeout"
                )
        return found

    def _number_there(self, rank: int, number: int) -> int:
        """The number of the exchange in whose place the rank's numbers of exchange `number` will be."""
        there: int = _HEAD.unpack_from(self._memory, self._slot(rank, number))[0]
        return there


class _Exchange:
    """Exchange whose numbers this rank has told. A call of it waits for the others'. Where nobody has called it `Mailbox.begin` does: the
    exchange after the next one has the same slots."""

    __slots__ = ("_box", "_error", "_everyone", "_mine", "_number")

    def __init__(self, box: Mailbox, number: int, mine: tuple[int, ...]) -> None:
        self._box, self._number, self._mine = box, number, mine
        self._everyone: list[tuple[int, ...]] | None = None
        self._error: RuntimeError | None = None

    def __call__(self) -> list[tuple[int, ...]]:
        with self._box._lock:
            self.settle()
        if self._error is not None:
            raise self._error
        assert self._everyone is not None
        return self._everyone

    def settle(self) -> None:
        """Reads every rank's numbers, or takes note of the error. Mailbox._lock is held."""
        if self._box._begun is not self:
            return
        try:
            self._everyone = self._box._everyone(self._number, self._mine)
        except RuntimeError as error:
            self._error = error
        self._box._begun = None


def _checksum(number: int, count: int, packed: bytes) -> int:
    return zlib.crc32(packed, (number * MOST + count) % (1 << 32))


def open_between(tell: Tell, rank: int, ranks: int, seconds: float) -> Mailbox | None:
    """A Mailbox of the ranks, which all call this and tell each other by `tell` meanwhile; None on all of them where they are not processes
    of one machine that see each other. Nothing is left behind in the file system."""
    process = os.getpid()
    everyone = tell([_machine(), process, _began(process), int.from_bytes(os.urandom(7), "little")])
    machine, _, _, name = everyone[0]
    path, memory = _FOLDER / f"flce-{name:x}", None
    seen = machine != 0 and all(other == machine and _began(pid) == began != -1 for other, pid, began, _ in everyone)
    if not all(numbers[0] for numbers in tell([int(seen)])):
        return None
    try:
        if rank == 0:
            memory = _map(path, 2 * ranks * _SLOT, make=True)
        tell([0])  # the file is there
        if rank != 0:
            memory = _map(path, 2 * ranks * _SLOT)
        all_have_it = all(numbers[0] for numbers in tell([int(memory is not None)]))
    finally:
        if rank == 0 and memory is not None:
            path.unlink(missing_ok=True)
    if memory is None or not all_have_it:
        return None
    return Mailbox(memory, rank, [(pid, began) for _, pid, began, _ in everyone], seconds)


def _map(path: Path, size: int, *, make: bool = False) -> mmap.mmap | None:
    try:
        file = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if make else 0), 0o600)
    except OSError:
        return None
    try:
        if make:
            os.posix_fallocate(file, 0, size)  # a full file system says so now, and not by a signal at the first write
        return mmap.mmap(file, size)
    except (OSError, ValueError):
        if make:
            path.unlink(missing_ok=True)
        return None
    finally:
        os.close(file)


def _machine() -> int:
    """A number that processes have in common which share a kernel, memory files and process numbers; 0 where that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        found = (boot, _FOLDER.stat().st_dev, os.stat("/proc/self/ns/pid").st_ino, os.stat("/proc/self/ns/mnt").st_ino)
    except OSError:
        return 0
    return zlib.crc32(repr(found).encode()) + 1


def _began(process: int) -> int:
    """When a process began, in ticks of its kernel; -1 for one that has ended, whether or not anybody has taken note of it."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in "ZX" else int(fields[19])
