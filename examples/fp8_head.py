"""An output layer in 8 bits on the CPU: a small language model trained with flce.Fp8, and the errors of its gradients.

A model reads bytes of this repository's licence. It is trained twice from the same parameters on the same batches, with the layer's
products in bf16 and in 8 bits; losses must agree. Then the gradients of one batch in every form of 8 bits are compared with bf16's.

    python examples/fp8_head.py --steps 200
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import flce

BYTES, LENGTH, WIDTH = 256, 64, 96
MOST_DIFFERENCE = 0.05  # allowed between the last losses
FORMS = [flce.Fp8(logits, dlogits) for logits in ("int8", "e4m3") for dlogits in ("e5m2", "e4m3")]


class Model(nn.Module):
    """Bytes to hidden states: each position sees its own byte's and the earlier ones' running mean. The head is a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, WIDTH)
        self.inner = nn.Sequential(nn.Linear(2 * WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, BYTES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        here = self.embedding(tokens)
        before = here.cumsum(1) / torch.arange(1, tokens.shape[1] + 1)[:, None]
        return (here + self.inner(torch.cat([here, before], dim=-1))).bfloat16()

    def loss(self, tokens: Tensor, fp8: flce.Fp8 | None) -> Tensor:
        return flce.linear_cross_entropy(self(tokens), self.head.weight.bfloat16(), tokens, shift=1, fp8=fp8)


def batches(steps: int, size: int) -> list[Tensor]:
    licence = Path(__file__).resolve().parent.parent / "LICENSE"
    text = torch.frombuffer(bytearray(licence.read_bytes()), dtype=torch.uint8).long()
    draw = torch.Generator().manual_seed(1)
    starts = torch.randint(0, len(text) - LENGTH, (steps, size), generator=draw)
    return [torch.stack([text[start : start + LENGTH] for start in of_batch]) for of_batch in starts]


def trained(data: list[Tensor], fp8: flce.Fp8 | None) -> tuple[Model, list[float]]:
    """The model after a step for each batch, and its losses."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for tokens in data:
        optimizer.zero_grad()
        loss = model.loss(tokens, fp8)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    return model, losses


def gradients(model: Model, tokens: Tensor, fp8: flce.Fp8 | None) -> tuple[Tensor, Tensor]:
    """Gradients of hidden states and of the head's weight, in fp32."""
    hidden = model(tokens).detach().requires_grad_()
    weight = model.head.weight.detach().bfloat16().requires_grad_()
    flce.linear_cross_entropy(hidden, weight, tokens, shift=1, fp8=fp8).backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None and weight.grad is not None
    return hidden.grad.float(), weight.grad.float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    arguments = parser.parse_args()
    data = batches(arguments.steps, arguments.batch)
    model, exact = trained(data, None)
    _, rounded = trained(data, flce.Fp8())
    last = max(1, arguments.steps // 10)
    ends = [sum(losses[-last:]) / last for losses in (exact, rounded)]
    print(f"loss {exact[0]:.3f} → {ends[0]:.4f} in bf16, {ends[1]:.4f} in 8 bits, {arguments.steps} steps")
    if abs(ends[0] - ends[1]) > MOST_DIFFERENCE:
        raise SystemExit(f"the losses differ by {abs(ends[0] - ends[1]):.4f}, more than {MOST_DIFFERENCE}")
    expected = gradients(model, data[-1], None)
    for fp8 in FORMS:
        errors = [float((got - want).norm() / want.norm()) for got, want in zip(gradients(model, data[-1], fp8), expected, strict=True)]
        print(f"{fp8}: gradient of hidden off by {errors[0]:.4f}, of the weight by {errors[1]:.4f}")


if __name__ == "__main__":
    main()
