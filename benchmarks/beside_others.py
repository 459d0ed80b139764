"""Times of an output layer's passes while a kernel of somebody else's holds some of the GPU's SMs, as NCCL's kernels do while they wait for
a peer.

    python benchmarks/beside_others.py [--shape 4096x1024x32000] [--blocks 0,1,8,24,128] [--rounds 7] [--out FILE]

bf16, on a GPU; needs CuPy. The foreign kernel has --blocks blocks of 32 threads, which spin for --hold-ms milliseconds on another stream. A
pass is timed by events on the device alone, when the foreign kernel has run for two milliseconds. The table has medians in milliseconds,
and in brackets the ratio to the same pass alone. "floor": the three bare GEMMs by cuBLAS. "bound": a pass may take 1.3 times its time
alone, times all SMs over the SMs that are not held.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import torch
import torch.nn.functional as F

import flce

SPIN = cupy.RawKernel(
    r"""
extern "C" __global__ void spin(unsigned long long ns) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - begin < ns);
}
""",
    "spin",
)
ALL = 1 << 40
Pass = Callable[[], None]


class Foreign:
    def __init__(self, hold_ms: float) -> None:
        self.stream = torch.cuda.Stream()
        self.ns = int(hold_ms * 1e6)

    def start(self, blocks: int) -> None:
        if blocks:
            SPIN((blocks,), (32,), (cupy.uint64(self.ns),), stream=cupy.cuda.ExternalStream(self.stream.cuda_stream))


def passes(num_tokens: int, hidden_size: int, vocab_size: int) -> dict[str, tuple[Pass, Pass]]:
    """Passes by name: the work before the pass, and the pass."""
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(vocab_size, hidden_size, device="cuda") * (2 / hidden_size**0.5)).bfloat16().requires_grad_()
    target = torch.randint(0, vocab_size, (num_tokens,), device="cuda")
    state: dict[str, Any] = {}
    options: dict[str, dict[str, Any]] = {
        "recomputed": {"retain_in_grad_weight": False},
        "retained in grad_weight": {"retain_in_grad_weight": True},
        "retained apart": {"workspace_limit_bytes": ALL, "retain_in_grad_weight": False},
    }
    dlogits = torch.randn(num_tokens, vocab_size, device="cuda", dtype=torch.bfloat16)

    def floor() -> None:
        with torch.no_grad():
            F.linear(hidden, weight)
            dlogits @ weight
            dlogits.t() @ hidden

    def nothing() -> None:
        state.clear()
        hidden.grad = weight.grad = None

    def forward(**chosen: Any) -> None:
        nothing()
        state["loss"] = flce.linear_cross_entropy(hidden, weight, target, **chosen)

    def backward() -> None:
        state["loss"].backward()

    found: dict[str, tuple[Pass, Pass]] = {"floor": (nothing, floor), "forward": (nothing, forward)}
    for name, chosen in options.items():
        found[f"backward, {name}"] = (lambda chosen=chosen: forward(**chosen), backward)  # type: ignore[misc]
    return found


def milliseconds(before: Pass, run: Pass, foreign: Foreign, blocks: int, rounds: int) -> float:
    times = []
    for _ in range(rounds + 1):
        before()
        torch.cuda.synchronize()
        foreign.start(blocks)
        torch.cuda._sleep(4_000_000)  # while the host brings everything on its way
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4096x1024x32000", help="tokens x hidden size x vocabulary")
    parser.add_argument("--blocks", default="0,1,8,24,128", help="of the foreign kernel")
    parser.add_argument("--hold-ms", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    num_tokens, hidden_size, vocab_size = map(int, options.shape.split("x"))
    blocks = [int(b) for b in options.blocks.split(",")]
    properties = torch.cuda.get_device_properties(0)
    foreign = Foreign(options.hold_ms)
    table: dict[str, dict[int, float]] = {}
    bounds = {b: 1.3 * properties.multi_processor_count / max(properties.multi_processor_count - b, 1) for b in blocks}
    for name, (before, run) in passes(num_tokens, hidden_size, vocab_size).items():
        table[name] = {b: milliseconds(before, run, foreign, b, options.rounds) for b in blocks}
    print(f"{properties.name}, {options.shape}, foreign kernel of {options.hold_ms:g} ms")
    print("| foreign blocks | " + " | ".join(map(str, blocks)) + " |\n|---|" + "---|" * len(blocks))
    for name, row in table.items():
        alone = row[blocks[0]]
        print(f"| {name} | " + " | ".join(f"{ms:.2f} ({ms / alone:.2f})" for ms in row.values()) + " |")
    print("| bound | " + " | ".join(f"({bounds[b]:.2f})" for b in blocks) + " |")
    if options.out:
        driver = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
        ).stdout.strip()
        record = {
            "gpu": properties.name,
            "driver": driver,
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
            "shape": options.shape,
            "hold_ms": options.hold_ms,
            "milliseconds": table,
            "bounds": bounds,
        }
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
