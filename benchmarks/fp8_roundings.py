"""Roundings of an FP8 head, and which a training run notices: fp8_training.py's model with some at a time, by torch on whole logits.

    python3 benchmarks/fp8_roundings.py [--runs exact,int8,E e5m2,…] [--steps 1500] [--out FILE.json]

A run's name lists its roundings: `int8` of the logits' operands by rows, `e5m2` and `e4m3` of exponentials, `w8` of the weight in
grad_hidden, `others` for a `w8` that leaves the target's row as it is, `h8` of scaled hidden states in grad_weight, `reference` for
exponents of the first 1,536 classes and the target in the place of lse, `zero` for a target's gradient that is minus the sum of the others.
`exact` has none. The first run is what the others' distances are from.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import fp8_training
import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LOG2E = 1 / math.log(2)
FIRST = 1536  # classes whose logits are known before the others
RUNS = "exact,int8,e5m2,e4m3,w8,w8 others,h8,int8 e5m2 w8 h8 reference,int8 e5m2 w8 h8,int8 e4m3 w8 h8,int8 e5m2 w8 others h8"


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype).float()


def by_rows(x: Tensor) -> Tensor:
    """int8 of each row's largest number."""
    largest = x.abs().amax(1, keepdim=True).clamp_min(1e-30)
    return (x * (127 / largest)).round() * (largest / 127)


def by_power(x: Tensor) -> Tensor:
    """e4m3 below the largest power of two that keeps the largest number within its range."""
    power = 2.0 ** torch.floor(torch.log2(torch.finfo(E4M3).max / x.abs().max()))
    return rounded(x * power, E4M3) / power


class Head(torch.autograd.Function):
    """Mean cross entropy of hidden [N, D] and weight [V, D] with the roundings of `names`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, names: frozenset[str]) -> Tensor:
        operands = [by_rows(each.float()) if "int8" in names else each.float() for each in (hidden, weight)]
        logits = operands[0] @ operands[1].t()
        lse = logits.logsumexp(1)
        ctx.save_for_backward(hidden, weight, target, logits, lse)
        ctx.names = names
        return (lse - logits.gather(1, target[:, None])[:, 0]).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        hidden, weight, target, logits, lse = ctx.saved_tensors
        names = ctx.names
        of_target = logits.gather(1, target[:, None])[:, 0]
        exponent = torch.floor(lse * LOG2E) - (7 if "e4m3" in names else 14)
        if "reference" in names:
            exponent = torch.floor(torch.maximum(logits[:, :FIRST].amax(1), of_target) * LOG2E) - 4
        exponentials = torch.exp2(logits * LOG2E - exponent[:, None]).scatter_(1, target[:, None], 0.0)
        for name, dtype in (("e5m2", E5M2), ("e4m3", E4M3)):
            if name in names:
                exponentials = rounded(exponentials, dtype)
        each = grad / hidden.shape[0]
        factor = each * torch.exp2(exponent - lse * LOG2E)
        target_grad = each * torch.expm1(of_target - lse)
        if "zero" in names:
            target_grad = -factor * exponentials.sum(1)
        scaled = hidden.float() * factor[:, None]
        read_weight = by_power(weight.float()) if "w8" in names else weight.float()
        read_hidden = by_power(scaled) if "h8" in names else scaled
        of_targets = (weight.float() if "others" in names else read_weight)[target]
        grad_hidden = factor[:, None] * (exponentials @ read_weight) + target_grad[:, None] * of_targets
        grad_weight = (exponentials.t() @ read_hidden).index_add_(0, target, target_grad[:, None] * hidden.float())
        return grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype), None, None


class Model(fp8_training.Model):
    names: frozenset[str] = frozenset()

    def loss(self, tokens: Tensor, fp8: Any) -> Tensor:
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            hidden = self.norm(self.blocks(self.embedding(tokens[:, :-1]) + self.position.weight)).bfloat16()
        made: Tensor = Head.apply(hidden.flatten(0, 1), self.head.weight.bfloat16(), tokens[:, 1:].flatten(), self.names)
        return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default=RUNS)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--small", action="store_true", help="a model for a CPU")
    parser.add_argument("--out", type=Path, help="a file for the curves as JSON")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True  # numbers of 8 bits are exact in it
    size = fp8_training.SMALL if arguments.small else fp8_training.LARGE
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = fp8_training.tokens_of(fp8_training.sources(size.megabytes), size.classes).to(device)
    rows = 8 * size.batch
    held = tokens[-rows * (size.length + 1) :].view(rows, -1)
    fp8_training.Model = Model  # type: ignore[misc]
    curves: dict[str, list[float]] = {}
    for name in arguments.runs.split(","):
        begin = time.monotonic()
        Model.names = frozenset(name.split())
        curves[name] = fp8_training.train("bf16", size, tokens[: -held.numel()], held, arguments.steps, 1.0)["curve"]
        first = next(iter(curves.values()))
        last = max(1, len(first) // 5)
        distance = sum(a / b - 1 for a, b in zip(curves[name][-last:], first[-last:], strict=True)) / last
        print(f"{name:28} {curves[name][-1]:.4f}, last fifth {100 * distance:+.2f} %, {time.monotonic() - begin:.0f} s", flush=True)
        if arguments.out is not None:
            origin = {"device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "torch": torch.__version__}
            arguments.out.write_text(json.dumps(origin | {"steps": arguments.steps, "curves": curves}, indent=1) + "\n")


if __name__ == "__main__":
    main()
