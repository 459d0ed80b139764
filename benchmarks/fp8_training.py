"""Training curves of a small language model whose output layer multiplies in bf16 and in 8 bits (flce.Fp8).

    python3 benchmarks/fp8_training.py [--steps 2000] [--runs bf16,bf16 again,int8 e5m2,…] [--small] [--logit-scale S] [--out FILE.json]

The text is Python sources that this machine has: its own library's and torch's. Runs begin with the same parameters and have the same
batches. "static" runs have one scale for all rows of hidden and one for the weight's: of the largest numbers of the first 200 steps, times
1.5, since both grow later and numbers beyond a scale saturate. Training is chaotic: "nudged" runs begin with parameters that are off by a
thousandth, and how far apart bf16's are says what a difference is without fp8. Held-out losses are computed with bf16's layer in every run.
--small is for a CPU. --logit-scale multiplies the logits, whose deviation is about half of it at first: rounding is off by a part of a
logit, so that a large scale shows where a form leaves bf16's curve.

The default's six take about two minutes on an H200. A form that the device has no kernels for is left out, which is said.
"""

from __future__ import annotations

import argparse
import json
import re
import sysconfig
import time
import zlib
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import flce

FORMS: dict[str, flce.Fp8 | None] = {
    "bf16": None,
    "int8 e5m2": flce.Fp8("int8", "e5m2"),
    "int8 e4m3": flce.Fp8("int8", "e4m3"),
    "e4m3 e5m2": flce.Fp8("e4m3", "e5m2"),
    "int8 static": flce.Fp8("int8", "e5m2"),
    "e4m3 static": flce.Fp8("e4m3", "e5m2"),
}
STATIC = " static"  # in a run's name: scales of the first steps' largest numbers, times MARGIN
WARM_STEPS, MARGIN = 200, 1.5
NUDGES = ("", " nudged", " nudged again")
RUNS = {form + nudge: (fp8, at) for form, fp8 in FORMS.items() for at, nudge in enumerate(NUDGES)}
DEFAULT = "bf16,bf16 nudged,bf16 nudged again,int8 e5m2,int8 e5m2 nudged,int8 e4m3"
NUDGE = 1e-3
WIDTH = 18  # characters of a column
EVERY = 20  # steps whose mean loss is a point of a curve
BYTES = 256


@dataclass(frozen=True)
class Size:
    """A model, and the tokens of a step."""

    depth: int
    blocks: int
    length: int
    batch: int
    classes: int
    megabytes: int


LARGE, SMALL = Size(512, 4, 256, 16, 16384, 24), Size(64, 1, 64, 8, 2048, 4)


def sources(megabytes: int) -> str:
    """Sources in an order that has nothing to do with where they are from."""
    roots = {Path(sysconfig.get_paths()["stdlib"]), Path(torch.__file__).parent}
    files = sorted({path for root in roots for path in root.rglob("*.py")}, key=lambda path: zlib.crc32(str(path).encode()))
    texts, size = [], 0
    for path in files:
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError):
            continue
        texts.append(text)
        size += len(text)
        if size > megabytes << 20:
            break
    return "\n".join(texts)


def tokens_of(text: str, classes: int) -> Tensor:
    """Words, runs of spaces and single signs as tokens, those that are too rare byte by byte."""
    pieces = re.findall(r"\w+| +|[^\w ]", text)
    common = [piece for piece, _ in Counter(pieces).most_common(classes - BYTES)]
    number = {piece: BYTES + at for at, piece in enumerate(common)}
    ids: list[int] = []
    for piece in pieces:
        known = number.get(piece)
        if known is None:
            ids += piece.encode()
        else:
            ids.append(known)
    return torch.tensor(ids, dtype=torch.int32)


class Block(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.heads = depth // 64
        self.first, self.second = nn.RMSNorm(depth), nn.RMSNorm(depth)
        self.qkv, self.out = nn.Linear(depth, 3 * depth, bias=False), nn.Linear(depth, depth, bias=False)
        self.up, self.down = nn.Linear(depth, 4 * depth, bias=False), nn.Linear(4 * depth, depth, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(self.first(x)).view(b, s, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, d))
        made: Tensor = x + self.down(nn.functional.gelu(self.up(self.second(x))))
        return made


class Model(nn.Module):
    """A transformer whose parameters are fp32, and its head, of which a step takes a copy in bf16."""

    def __init__(self, size: Size, logit_scale: float) -> None:
        super().__init__()
        self.logit_scale = logit_scale
        self.embedding, self.position = nn.Embedding(size.classes, size.depth), nn.Embedding(size.length, size.depth)
        self.blocks = nn.Sequential(*(Block(size.depth) for _ in range(size.blocks)))
        self.norm = nn.RMSNorm(size.depth)
        self.head = nn.Linear(size.depth, size.classes, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def operands(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states of tokens [batch, length + 1] but for the last, and the head's weight."""
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            x = self.embedding(tokens[:, :-1]) + self.position.weight
            return self.norm(self.blocks(x)).bfloat16(), self.head.weight.bfloat16()

    def loss(self, tokens: Tensor, fp8: flce.Fp8 | None) -> Tensor:
        """The mean loss of predicting tokens [batch, length + 1] from the second on."""
        hidden, weight = self.operands(tokens)
        return flce.linear_cross_entropy(hidden, weight, tokens[:, 1:].contiguous(), logit_scale=self.logit_scale, fp8=fp8)


class StaticScales:
    """Scales that do not change: until WARM_STEPS those of a call's numbers, and then those of the largest seen so far, times MARGIN."""

    def __init__(self, fp8: flce.Fp8) -> None:
        self.fp8 = fp8
        self.largest = [0.0, 0.0]

    @torch.no_grad()
    def look(self, model: Model, tokens: Tensor, step: int) -> None:
        """Before a step, whose tokens these are."""
        if step > WARM_STEPS:
            return
        self.largest = [max(a, float(x.abs().max())) for a, x in zip(self.largest, model.operands(tokens), strict=True)]
        if step == WARM_STEPS:
            most = 127 if self.fp8.logits == "int8" else 448
            hidden, weight = (MARGIN * number / most for number in self.largest)
            self.fp8 = replace(self.fp8, scales=(hidden, weight))


def train(name: str, size: Size, data: Tensor, held: Tensor, steps: int, logit_scale: float) -> dict[str, Any]:
    fp8, nudge = RUNS[name]
    torch.manual_seed(0)
    model = Model(size, logit_scale)
    if nudge:
        torch.manual_seed(nudge)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + NUDGE * torch.randn_like(parameter))
    model = model.to(data.device)
    draw = torch.Generator().manual_seed(1)
    starts = torch.randint(0, len(data) - size.length - 1, (steps, size.batch, 1), generator=draw).to(data.device)
    window = torch.arange(size.length + 1, device=data.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=data.is_cuda)
    scales = StaticScales(fp8) if fp8 is not None and STATIC in name else None
    curve: list[float] = []
    sums = torch.zeros((), device=data.device)
    begin = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 100) * max(0.05, 1 - step / steps)
        tokens = data[starts[step] + window].long()
        if scales is not None:
            scales.look(model, tokens, step)
            fp8 = scales.fp8
        loss = model.loss(tokens, fp8)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        sums += loss.detach()
        if (step + 1) % EVERY == 0:
            curve.append(float(sums) / EVERY)
            sums.zero_()
    seconds = time.monotonic() - begin
    with torch.no_grad():
        held_out = torch.stack([model.loss(part.long(), None) for part in held.split(size.batch)]).mean()
    return {"fp8": repr(fp8), "held_out": float(held_out), "seconds": seconds, "curve": curve}


def report(found: dict[str, dict[str, Any]]) -> None:
    """Curves beside each other at ten points, and held-out losses as distances from bf16's."""
    points = max(1, len(next(iter(found.values()))["curve"]) // 10)
    print(f"{'step':>8}" + "".join(f"{name:>{WIDTH}}" for name in found))
    for at in range(points - 1, len(next(iter(found.values()))["curve"]), points):
        print(f"{(at + 1) * EVERY:>8}" + "".join(f"{run['curve'][at]:>{WIDTH}.4f}" for run in found.values()))
    print(f"{'held out':>8}" + "".join(f"{run['held_out']:>{WIDTH}.4f}" for run in found.values()))
    if "bf16" in found:
        print(f"{'to bf16':>8}" + "".join(f"{run['held_out'] - found['bf16']['held_out']:>+{WIDTH}.4f}" for run in found.values()))
        rest = len(found["bf16"]["curve"]) // 2
        apart = {
            name: [a - b for a, b in zip(run["curve"][rest:], found["bf16"]["curve"][rest:], strict=True)] for name, run in found.items()
        }
        print(f"{'2nd half':>8}" + "".join(f"{sum(each) / len(each):>+{WIDTH}.4f}" for each in apart.values()))
    print(f"{'seconds':>8}" + "".join(f"{run['seconds']:>{WIDTH}.1f}" for run in found.values()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--runs", default=DEFAULT, help="some of: " + ", ".join(RUNS))
    parser.add_argument("--logit-scale", type=float, default=1.0, help="by which logits are multiplied")
    parser.add_argument("--small", action="store_true", help="a model for a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="a file for the curves as JSON")
    arguments = parser.parse_args()
    names = arguments.runs.split(",")
    if unknown := [name for name in names if name not in RUNS]:
        parser.error(f"{unknown[0]!r} is no run; there are {', '.join(RUNS)}")
    if arguments.steps < EVERY:
        parser.error(f"--steps is {arguments.steps}; it must be {EVERY} or more")
    size = SMALL if arguments.small else LARGE
    tokens = tokens_of(sources(size.megabytes), size.classes).to(arguments.device)
    rows = 64 * size.batch
    held = tokens[-rows * (size.length + 1) :].view(rows, -1)
    data = tokens[: -held.numel()]
    print(f"{len(tokens)} tokens, {size}", flush=True)
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        try:
            found[name] = train(name, size, data, held, arguments.steps, arguments.logit_scale)
        except (flce.PlanError, flce.SpecError) as error:
            print(f"{name}: left out, {error}", flush=True)
            continue
        if arguments.out is not None:
            figures: dict[str, Any] = {"device": device, "torch": torch.__version__, "size": vars(size), "steps": arguments.steps}
            figures |= {"logit_scale": arguments.logit_scale, "runs": found}
            arguments.out.write_text(json.dumps(figures, indent=1) + "\n")
    if found:
        report(found)


if __name__ == "__main__":
    main()
