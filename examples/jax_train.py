"""Train a small language model in JAX, with Flax NNX and optax, on flce's output layer: no [tokens, vocabulary] logits.

python examples/jax_train.py                          # pip install flax optax
python examples/jax_train.py --plain                  # optax on whole logits beside it: the same losses
XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/jax_train.py    # data parallel over what jax.devices() has
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flce.jax

VOCAB_SIZE, LENGTH = 256, 64


class Model(nnx.Module):
    """Bytes to hidden states: each position sees its own byte's and the earlier ones' running mean. The head is the embedding's, tied."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(VOCAB_SIZE, width, rngs=rngs)
        self.inner = nnx.Linear(2 * width, 4 * width, rngs=rngs)
        self.outer = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        here = self.embedding(tokens)
        before = jnp.cumsum(here, axis=1) / jnp.arange(1, tokens.shape[1] + 1)[:, None]
        return here + self.outer(nnx.gelu(self.inner(jnp.concatenate([here, before], axis=-1))))


def fused_loss(model: Model, tokens: jax.Array) -> jax.Array:
    return flce.jax.linear_cross_entropy(model(tokens), model.embedding.embedding[...], tokens, shift=1)


def plain_loss(model: Model, tokens: jax.Array) -> jax.Array:
    logits = model(tokens)[:, :-1] @ model.embedding.embedding[...].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def batches(batch_size: int, steps: int) -> np.ndarray:
    """Pieces of this repository's documentation, [steps, batch_size, LENGTH]."""
    pages = sorted((Path(__file__).resolve().parent.parent / "docs").glob("*.md"))
    text = np.frombuffer(b"\n".join(page.read_bytes() for page in pages), np.uint8)
    starts = np.random.default_rng(0).integers(0, len(text) - LENGTH, (steps, batch_size))
    return text[starts[..., None] + np.arange(LENGTH)].astype(np.int32)


def train(loss_function: Callable[[Model, jax.Array], jax.Array], *, steps: int, batch_size: int, width: int) -> list[float]:
    model = Model(width, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: Model, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(loss_function)(model, tokens)
        optimizer.update(model, gradients)
        return loss

    # Rows of a batch over all devices, parameters on each of them.
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
    losses = [step(model, optimizer, jax.device_put(tokens, rows)) for tokens in batches(batch_size, steps)]
    return [float(loss) for loss in losses]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--plain", action="store_true", help="train a second time, with optax's loss on whole logits")
    given = parser.parse_args()
    for name, function in {"flce": fused_loss, **({"plain": plain_loss} if given.plain else {})}.items():
        start = time.perf_counter()
        losses = train(function, steps=given.steps, batch_size=given.batch_size, width=given.width)
        print(f"{name:5}  loss {losses[0]:.4f} → {losses[-1]:.4f} in {given.steps} steps, {time.perf_counter() - start:.1f} s")
    flce.jax.check_labels()


if __name__ == "__main__":
    main()
