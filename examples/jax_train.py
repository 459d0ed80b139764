"""Train a small language model in JAX, with Flax NNX and optax, on flce's output layer: no [tokens, vocabulary] logits.

python examples/jax_train.py                          # pip install flax optax
python examples/jax_train.py --plain                  # optax on whole logits beside it: the same losses
XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/jax_train.py    # data parallel over what jax.devices() has
python examples/jax_train.py --width 2048 --vocab-size 151936 --length 512 --bf16 --steps 20    # the head of Qwen3-1.7B, on a GPU
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

BYTES = 256


class Model(nnx.Module):
    """Bytes to hidden states: each position sees its own byte's and the earlier ones' running mean. The head is the embedding's, tied."""

    def __init__(self, width: int, vocab_size: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(vocab_size, width, dtype=dtype, rngs=rngs)  # parameters are fp32
        self.inner = nnx.Linear(2 * width, 4 * width, dtype=dtype, rngs=rngs)
        self.outer = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        here = self.embedding(tokens)
        before = (jnp.cumsum(here, axis=1, dtype=jnp.float32) / jnp.arange(1, tokens.shape[1] + 1)[:, None]).astype(here.dtype)
        return here + self.outer(nnx.gelu(self.inner(jnp.concatenate([here, before], axis=-1))))


def fused_loss(model: Model, tokens: jax.Array) -> jax.Array:
    return flce.jax.linear_cross_entropy(model(tokens), model.embedding.embedding[...], tokens, shift=1)


def plain_loss(model: Model, tokens: jax.Array) -> jax.Array:
    hidden = model(tokens)[:, :-1]
    weight = model.embedding.embedding[...].astype(hidden.dtype)
    logits = jnp.einsum("bsd,vd->bsv", hidden, weight, preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def batches(batch_size: int, steps: int, length: int) -> np.ndarray:
    """Pieces of this repository's documentation, [steps, batch_size, length]."""
    pages = sorted((Path(__file__).resolve().parent.parent / "docs").glob("*.md"))
    text = np.frombuffer(b"\n".join(page.read_bytes() for page in pages), np.uint8)
    starts = np.random.default_rng(0).integers(0, len(text) - length, (steps, batch_size))
    return text[starts[..., None] + np.arange(length)].astype(np.int32)


def train(loss_function: Callable[[Model, jax.Array], jax.Array], given: argparse.Namespace) -> list[float]:
    model = Model(given.width, given.vocab_size, jnp.dtype("bfloat16" if given.bf16 else "float32"), nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: Model, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(loss_function)(model, tokens)
        optimizer.update(model, gradients)
        return loss

    # Rows of a batch over all devices, parameters on each of them.
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
    text = batches(given.batch_size, given.steps, given.length)
    losses = [step(model, optimizer, jax.device_put(tokens, rows)) for tokens in text]
    return [float(loss) for loss in losses]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=BYTES)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--plain", action="store_true", help="train a second time, with optax's loss on whole logits")
    given = parser.parse_args()
    for name, function in {"flce": fused_loss, **({"plain": plain_loss} if given.plain else {})}.items():
        start = time.perf_counter()
        losses = train(function, given)
        peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        memory = "" if peak is None else f", at most {peak / 2**30:.2f} GiB so far"
        print(f"{name:5}  loss {losses[0]:.4f} → {losses[-1]:.4f} in {given.steps} steps, {time.perf_counter() - start:.1f} s{memory}")
    flce.jax.check_labels()


if __name__ == "__main__":
    main()
