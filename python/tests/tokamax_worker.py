"""tokamax's own loss on arrays of a file, by its XLA implementation: tokamax_worker.py ARRAYS.npz RESULTS.npz"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import tokamax

given = np.load(sys.argv[1])
x, labels, weights = (jnp.asarray(given[name]) for name in ("x", "labels", "weights"))


def loss(x: jax.Array, weights: jax.Array, reduction: str) -> jax.Array:
    return tokamax.linear_softmax_cross_entropy_loss(x, labels, weights, reduction=reduction, implementation="xla")


made = {}
for each in ("sum", "mean"):
    made[each], (made[f"{each} x"], made[f"{each} weights"]) = jax.value_and_grad(loss, (0, 1))(x, weights, each)
np.savez(sys.argv[2], **made)
