"""How far log-probabilities of targets are from fp64, by flce and by what trainers do, and how long each takes.

    python benchmarks/logprob_error.py [--shape 4096x4096x128256] [--sample 512] [--rounds 10] [--device cuda] [--out FILE]

Hidden states (of norm sqrt(D)) and weight are bf16, and those are exact: fp64 computes with the same numbers. Logits have a standard
deviation of 3. Two sets of inputs: labels at random, and labels that the hidden states point at, most of them with a probability near 1.
fp64 log-probabilities are computed of a sample of rows, a part of the vocabulary at a time; errors are of these rows, times of all rows.
Variants, each the forward pass alone:

    flce.linear_logprobs           bf16 inputs
    F.linear in bf16               its logits in fp32 from there on: log_softmax and the targets' column
    F.linear in fp32               TF32 off; inputs are converted beforehand, outside of the time

Times are medians: of CUDA events on a GPU, of the wall clock on a CPU. --out writes JSON with the device, the driver, the commit and the
date.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flce

LOGIT_SPREAD = 3.0
VOCAB_PART = 8192
Variant = Callable[[], Tensor]


def inputs(num_tokens: int, hidden_size: int, vocab_size: int, device: str, *, confident: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden, weight, target)."""
    generator = torch.Generator(device=device).manual_seed(0)
    weight = torch.randn(vocab_size, hidden_size, device=device, generator=generator) * (LOGIT_SPREAD / math.sqrt(hidden_size))
    hidden = torch.randn(num_tokens, hidden_size, device=device, generator=generator)
    target = torch.randint(0, vocab_size, (num_tokens,), device=device, generator=generator)
    if confident:
        # log V + spread²/2 is lse of such logits; 4 above it, a label has a probability of 0.98.
        rows = weight[target]
        hidden += rows * ((math.log(vocab_size) + LOGIT_SPREAD**2 / 2 + 4) / rows.square().sum(dim=1, keepdim=True))
    hidden *= math.sqrt(hidden_size) / hidden.norm(dim=1, keepdim=True)
    return hidden.bfloat16(), weight.bfloat16(), target


def in_fp64(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """log p(target) of rows of hidden."""
    rows = hidden.double()
    parts = [(rows @ part.double().t()).logsumexp(dim=1) for part in weight.split(VOCAB_PART)]
    return (rows * weight[target].double()).sum(dim=1) - torch.stack(parts).logsumexp(dim=0)


def of_logits(logits: Tensor, target: Tensor) -> Tensor:
    return F.log_softmax(logits.float(), dim=-1).gather(1, target[:, None]).squeeze(1)


def variants(hidden: Tensor, weight: Tensor, target: Tensor) -> dict[str, Variant]:
    wide_hidden, wide_weight = hidden.float(), weight.float()
    return {
        "flce.linear_logprobs, bf16": lambda: flce.linear_logprobs(hidden, weight, target),
        "F.linear in bf16, log_softmax in fp32": lambda: of_logits(F.linear(hidden, weight), target),
        "F.linear in fp32, log_softmax in fp32": lambda: of_logits(F.linear(wide_hidden, wide_weight), target),
    }


def milliseconds(run: Variant, device: torch.device, rounds: int) -> float:
    times = []
    for _ in range(rounds + 2):  # two that warm up
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            began = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[2:])


def measure(shape: str, sample: int, rounds: int, device: str) -> list[dict[str, Any]]:
    rows = []
    for confident in (False, True):
        hidden, weight, target = inputs(*map(int, shape.split("x")), device, confident=confident)
        chosen = torch.linspace(0, hidden.shape[0] - 1, min(sample, hidden.shape[0]), device=device).long()
        right = in_fp64(hidden[chosen], weight, target[chosen])
        for name, run in variants(hidden, weight, target).items():
            error = (run()[chosen].double() - right).abs()
            row = {
                "labels": "confident" if confident else "random",
                "variant": name,
                "largest_error": error.max().item(),
                "rms_error": error.square().mean().sqrt().item(),
                "ms": milliseconds(run, hidden.device, rounds),
                "median_probability": right.exp().median().item(),
            }
            rows.append(row)
            print(f"{row['labels']:>10}  {name:<38} {row['largest_error']:10.1e} {row['rms_error']:10.1e} {row['ms']:10.2f}", flush=True)
    return rows


def output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def processor() -> str:
    models = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return models[0] if models else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4096x4096x128256", help="num_tokens x hidden_size x vocab_size")
    parser.add_argument("--sample", type=int, default=512, help="rows that are compared with fp64")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_grad_enabled(False)

    on_gpu = args.device.startswith("cuda")
    device = torch.cuda.get_device_name(args.device) if on_gpu else f"{processor()}, {torch.get_num_threads()} threads"
    print(f"{device}, {args.shape}; errors of {args.sample} rows against fp64, |log p - log p in fp64|")
    print(f"{'labels':>10}  {'':<38} {'largest':>10} {'rms':>10} {'ms':>10}")
    rows = measure(args.shape, args.sample, args.rounds, args.device)
    if args.out:
        record = {
            "date": datetime.date.today().isoformat(),
            "device": device,
            "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else None,
            "torch": torch.__version__,
            "commit": output("git", "rev-parse", "--short", "HEAD"),
            "command": " ".join(["python", *sys.argv]),
            "shape": args.shape,
            "sample": args.sample,
            "rows": rows,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
