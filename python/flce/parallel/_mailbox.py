"""Numbers that ranks of one machine tell each other through shared memory, in microseconds, where gloo takes a millisecond for them.

A rank has two slots, for exchanges of even and of odd number. It writes its numbers into one of them and reads everyone's. A rank that is
ahead has at most begun the next exchange, in the other slots: that one ends when all ranks have come, and so has this one by then.
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

Tell = Callable[[Sequence[int]], list[tuple[int, ...]]]


class Mailbox:
    """The slots of a group's ranks, and this rank's part in them."""

    def __init__(self, memory: mmap.mmap, rank: int, processes: list[tuple[int, int]], seconds: float) -> None:
        self._memory, self._rank, self._processes, self._seconds = memory, rank, processes, seconds
        self._lock = threading.Lock()
        self._number = 0

    def tell(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """Every rank's numbers of 64 bits, at most MOST, in the order of ranks. Raises RuntimeError where a rank has ended, does not come
        in the group's time, or tells another count of numbers."""
        with self._lock:
            self._number += 1
            packed = struct.pack(f"<{len(numbers)}q", *numbers)
            at = self._slot(self._rank)
            self._memory[at + _HEAD.size : at + _HEAD.size + len(packed)] = packed
            _HEAD.pack_into(self._memory, at, self._number, len(numbers), self._checksum(len(numbers), packed))
            return [self._read(rank, len(numbers)) for rank in range(len(self._processes))]

    def _slot(self, rank: int) -> int:
        return (self._number % 2 * len(self._processes) + rank) * _SLOT

    def _checksum(self, count: int, packed: bytes) -> int:
        return zlib.crc32(packed, (self._number * MOST + count) % (1 << 32))

    def _look(self, rank: int) -> tuple[int, bytes] | None:
        """How many numbers the rank tells, and their bytes; None before they are there. The checksum tells numbers that another processor
        has written in part."""
        at = self._slot(rank)
        number, count, checksum = _HEAD.unpack_from(self._memory, at)
        if number != self._number or count > MOST:
            return None
        packed = self._memory[at + _HEAD.size : at + _HEAD.size + 8 * count]
        return (count, packed) if self._checksum(count, packed) == checksum else None

    def _read(self, rank: int, expected: int) -> tuple[int, ...]:
        found = None
        for _ in range(_SPINS):
            if (found := self._look(rank)) is not None:
                break
        count, packed = found or self._wait(rank)
        if count != expected:
            raise RuntimeError(
                f"rank {rank} of the process group tells {count} numbers and rank {self._rank} {expected}: they make different calls"
            )
        return struct.unpack(f"<{count}q", packed)

    def _wait(self, rank: int) -> tuple[int, bytes]:
        begin = looked = time.monotonic()
        pause = _SHORTEST
        while (found := self._look(rank)) is None:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
            now = time.monotonic()
            if now - looked > _LOOK_FOR_THE_DEAD:
                looked = now
                if _began(self._processes[rank][0]) != self._processes[rank][1] and self._look(rank) is None:
                    raise RuntimeError(f"rank {rank} of the process group has ended")
            if now - begin > self._seconds:
                raise RuntimeError(
                    f"rank {rank} of the process group has not come to this call for {self._seconds:g} s, the group's timeout"
                )
        return found


def open_between(tell: Tell, rank: int, ranks: int, seconds: float) -> Mailbox | None:
    """A Mailbox of the ranks, which all call this and tell each other by `tell` meanwhile; None on all of them where they are not processes
    of one machine that see each other. Nothing is left behind in the file system."""
    process = os.getpid()
    everyone = tell([_machine(), process, _began(process), int.from_bytes(os.urandom(7), "little")])
    if everyone[0][0] == 0 or any(numbers[0] != everyone[0][0] for numbers in everyone):
        return None
    path = _FOLDER / f"flce-{everyone[0][3]:x}"
    memory = _map(path, 2 * ranks * _SLOT, make=True) if rank == 0 else None
    tell([0])  # the file is there
    if rank != 0:
        memory = _map(path, 2 * ranks * _SLOT)
    all_have_it = all(numbers[0] for numbers in tell([int(memory is not None)]))
    if rank == 0:
        path.unlink(missing_ok=True)
    if memory is None or not all_have_it:
        return None
    return Mailbox(memory, rank, [(numbers[1], numbers[2]) for numbers in everyone], seconds)


def _map(path: Path, size: int, *, make: bool = False) -> mmap.mmap | None:
    try:
        file = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if make else 0), 0o600)
    except OSError:
        return None
    try:
        if make:
            os.ftruncate(file, size)
        return mmap.mmap(file, size)
    except (OSError, ValueError):
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
