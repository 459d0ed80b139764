"""flce.jax over a mesh of GPUs, beside one GPU with the whole layer: losses, gradients and times.

    python3 benchmarks/jax_mesh.py [--shape 8192x4096x128256] [--rounds 8] [--out FILE.json]

bf16, forward and backward under jax.jit, in one process. Over all GPUs the vocabulary lies over them (each has all tokens and its rows of
the weight), or the tokens do (each has the whole weight, whose gradient is added up), both inside of jax.shard_map. A run is --steps steps
one after another; contenders take turns. rate: a GPU's work in its time, to that of the one GPU. errors: of the loss, and of both
gradients to the one GPU's, of their norms.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import jax
import jax.numpy as jnp
import numpy as np
from gpu_timing import add_report_arguments, save
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flce.jax

Step = Callable[..., Any]
EVERYTHING = {"workspace_limit_bytes": 1 << 40}


def mean_loss(hidden: jax.Array, weight: jax.Array, labels: jax.Array, **given: Any) -> jax.Array:
    loss: jax.Array = flce.jax.linear_cross_entropy(hidden, weight, labels, **given)
    return loss


def over(mesh: Mesh, way: str, **given: Any) -> tuple[Step, tuple[P, ...]]:
    """The loss of a mesh's devices, and how its arrays lie over them."""
    if way == "vocabulary":
        specs = (P(), P("gpus"), P())
        function = functools.partial(mean_loss, axis_name="gpus", **given)
    else:
        specs = (P("gpus"), P(), P("gpus"))

        def function(*arrays: Any) -> Any:
            return jax.lax.pmean(mean_loss(*arrays, **given), "gpus")

    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P()), specs


def compiled(function: Step, arrays: tuple[jax.Array, ...]) -> tuple[Callable[[], Any], int]:
    made = jax.jit(jax.value_and_grad(function, (0, 1))).lower(*arrays).compile()
    return lambda: made(*arrays), int(made.memory_analysis().temp_size_in_bytes)


def milliseconds(step: Callable[[], Any], steps: int) -> float:
    jax.block_until_ready(step())
    begin = time.perf_counter()
    for _ in range(steps):
        made = step()
    jax.block_until_ready(made)
    return 1e3 * (time.perf_counter() - begin) / steps


def errors(found: Any, right: Any) -> dict[str, float]:
    names = ("loss", "grad_hidden", "grad_weight")
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True)
    made = {}
    for name, (one, other) in zip(names, pairs, strict=True):
        here, there = (np.asarray(jax.device_get(each)).astype(np.float32) for each in (one, other))
        made[name] = float(np.linalg.norm(here - there) / np.linalg.norm(there))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8192x4096x128256", help="num_tokens x hidden_size x vocab_size")
    parser.add_argument("--rounds", type=int, default=8, help="(default: 8)")
    parser.add_argument("--steps", type=int, default=4, help="one after another in a run (default: 4)")
    add_report_arguments(parser)
    arguments = parser.parse_args()
    devices = jax.devices("gpu")
    if len(devices) < 2:
        parser.error(f"{len(devices)} GPUs here; it takes 2 or more")
    tokens, depth, classes = map(int, arguments.shape.split("x"))
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (tokens, depth), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (classes, depth), jnp.bfloat16) * depth**-0.5
    labels = jax.random.randint(keys[2], (tokens,), 0, classes)
    mesh = Mesh(np.array(devices), ("gpus",))
    steps: dict[str, Callable[[], Any]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for memory, given in (("all retained", EVERYTHING), ("default", {})):
        steps[f"one GPU, {memory}"], temporary = compiled(functools.partial(mean_loss, **given), (hidden, weight, labels))
        rows[f"one GPU, {memory}"] = {"temporary_bytes": temporary}
        right = steps[f"one GPU, {memory}"]()
        for way in ("vocabulary", "tokens"):
            name = f"{way} over {len(devices)}, {memory}"
            function, specs = over(mesh, way, **given)
            placed = [jax.device_put(each, NamedSharding(mesh, spec)) for each, spec in zip((hidden, weight, labels), specs, strict=True)]
            steps[name], temporary = compiled(function, tuple(placed))
            rows[name] = {"temporary_bytes": temporary, "errors": errors(steps[name](), right)}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(arguments.rounds):
        for name, step in steps.items():
            times[name].append(milliseconds(step, arguments.steps))
    for name, row in rows.items():
        row["milliseconds"] = statistics.median(times[name])
        one = statistics.median(times[f"one GPU, {name.split(', ')[1]}"])
        if not name.startswith("one GPU"):
            row["rate"] = one / len(devices) / row["milliseconds"]
        print(f"{name:32} {row}", flush=True)
    save(arguments, {"jax": jax.__version__, "shape": arguments.shape, "gpus": len(devices), "rows": rows})


if __name__ == "__main__":
    main()
