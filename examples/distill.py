"""Distillation in small: a student learns a teacher's whole next-byte distribution on the CPU, with flce.linear_divergence.

Teacher and student read bytes of this repository's pages; the student is narrower. Each step the generalized Jensen–Shannon divergence of
their softmaxes goes down, at a --beta of 0 KL(teacher ‖ student), at 1 KL(student ‖ teacher). The same steps run on whole logits; losses
must agree.

    python examples/distill.py --steps 200 --beta 0.5
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import flce

BYTES, LENGTH, TEACHER_STEPS = 256, 64, 150


class Model(nn.Module):
    """Bytes to hidden states: each position sees its own byte's and the earlier ones' running mean. The head is a layer of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.inner = nn.Sequential(nn.Linear(2 * width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, BYTES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        here = self.embedding(tokens)
        before = here.cumsum(1) / torch.arange(1, tokens.shape[1] + 1)[:, None]
        return here + self.inner(torch.cat([here, before], dim=-1))


def batches(steps: int, size: int, seed: int) -> list[Tensor]:
    pages = sorted((Path(__file__).resolve().parent.parent / "docs").glob("*.md"))
    text = torch.frombuffer(bytearray(b"\n".join(page.read_bytes() for page in pages)), dtype=torch.uint8).long()
    draw = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - LENGTH, (steps, size), generator=draw)
    return [torch.stack([text[start : start + LENGTH] for start in of_batch]) for of_batch in starts]


def trained_teacher(size: int) -> Model:
    torch.manual_seed(0)
    teacher = Model(96)
    optimizer = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for tokens in batches(TEACHER_STEPS, size, seed=1):
        optimizer.zero_grad()
        flce.linear_cross_entropy(teacher(tokens), teacher.head.weight, tokens, shift=1).backward()
        optimizer.step()
    return teacher.requires_grad_(False)


def fused(student: Tensor, head: nn.Linear, teacher: Tensor, of_teacher: nn.Linear, beta: float) -> Tensor:
    made = flce.linear_divergence(student, head.weight, teacher, of_teacher.weight, beta=beta, reduction="mean")
    assert isinstance(made, Tensor)
    return made


def materialised(student: Tensor, head: nn.Linear, teacher: Tensor, of_teacher: nn.Linear, beta: float) -> Tensor:
    p, q = (layer(hidden).log_softmax(-1) for layer, hidden in ((head, student), (of_teacher, teacher)))
    if beta in (0, 1):
        first, second = (q, p) if beta == 0 else (p, q)
        return (first.exp() * (first - second)).sum(-1).mean()
    mixture = torch.logaddexp(p + math.log(1 - beta), q + math.log(beta))
    return ((1 - beta) * p.exp() * (p - mixture) + beta * q.exp() * (q - mixture)).sum(-1).mean()


def train(loss_of: Callable[..., Tensor], teacher: Model, steps: int, size: int, beta: float) -> list[float]:
    torch.manual_seed(2)
    student = Model(32)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    losses = []
    for tokens in batches(steps, size, seed=3):
        optimizer.zero_grad()
        loss = loss_of(student(tokens), student.head, teacher(tokens), teacher.head, beta)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--beta", type=float, default=0.5)
    given = parser.parse_args()
    teacher = trained_teacher(given.batch)
    losses, expected = (train(way, teacher, given.steps, given.batch, given.beta) for way in (fused, materialised))
    apart = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
    print(f"divergence {losses[0]:.4f} → {losses[-1]:.4f} in {given.steps} steps; at most {apart:.1e} from whole logits'")
    if apart > 1e-2:
        raise SystemExit("losses differ")


if __name__ == "__main__":
    main()
