"""Memory, time and losses of a training, as the examples note and compare them."""

from __future__ import annotations

import re
import resource
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

MIB = 1 << 20


@dataclass
class Run:
    """Results of one training run."""

    losses: list[float] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)  # bytes beyond what was held before the step

    def typical(self) -> tuple[float, int]:
        """Median milliseconds and largest peak, but for those of the first step, which makes what later ones find."""
        later = slice(1, None) if len(self.peaks) > 1 else slice(None)
        return statistics.median(self.milliseconds[later]), max(self.peaks[later])


def worst_difference(right: Sequence[float], losses: Sequence[float]) -> float:
    """The largest relative difference of losses from the right ones."""
    return max(abs(a - b) / abs(a) for a, b in zip(right, losses, strict=True))


def sizes_of(shape: str, instance: str) -> tuple[int, int, int]:
    """(layers, hidden size, vocabulary) of --shape. instance: one that is right."""
    try:
        layers, hidden_size, vocab_size = map(int, shape.split("x"))
    except ValueError:
        sys.exit(f"--shape is {shape}; it must be layers x hidden_size x vocab_size, such as {instance}")
    return layers, hidden_size, vocab_size


def reset_peak(device: torch.device) -> int:
    """Starts a new peak of memory; returns the bytes in use now: the allocator's on a GPU, the process's resident ones on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the resident peak starts again
    except OSError:
        pass
    return peak(device)


def peak(device: torch.device) -> int:
    """Bytes at the peak since. Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    try:
        return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])
    except (OSError, IndexError):
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
