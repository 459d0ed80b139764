"""Layers for tests of flce.jax, on eight devices of a CPU, and their losses in torch's fp64."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

import flce.jax

# Before XLA's backends are made.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch's tests have the GPU, too
jax.config.update("jax_platforms", "cuda,cpu" if torch.cuda.is_available() else "cpu")

IGNORED = -100
BOUNDS = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}  # errors allowed, as parts of an array's largest number


def on(device: str) -> AbstractContextManager[Any]:
    """Calls within are traced for, and run on, the device of conftest's fixture."""
    return jax.default_device(jax.local_devices(backend=device)[0])


class Case(NamedTuple):
    hidden: jax.Array
    weight: jax.Array
    labels: jax.Array
    bias: jax.Array
    temperature: jax.Array
    token_weight: jax.Array
    teacher_ids: jax.Array
    teacher_probs: jax.Array


def case(tokens: Any = (37,), depth: int = 64, classes: int = 301, dtype: Any = jnp.float32, top_k: int = 5, seed: int = 0) -> Case:
    draw = np.random.default_rng(seed)
    tokens = tuple(tokens)
    labels = draw.integers(0, classes, tokens)
    labels.reshape(-1)[::7] = IGNORED
    probs = draw.random((*tokens, top_k))
    return Case(
        jnp.asarray(draw.normal(size=(*tokens, depth)), dtype),
        jnp.asarray(draw.normal(size=(classes, depth)) * 0.2, dtype),
        jnp.asarray(labels, jnp.int32),
        jnp.asarray(draw.normal(size=classes), dtype),
        jnp.asarray(draw.uniform(0.5, 2, tokens), jnp.float32),
        jnp.asarray(draw.uniform(0, 2, tokens), jnp.float32),
        jnp.asarray(draw.integers(-1, classes, (*tokens, top_k)), jnp.int32),
        jnp.asarray(probs / probs.sum(-1, keepdims=True), jnp.float32),
    )


def as_torch(array: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Numbers of an array in torch; bf16 by way of fp32, since numpy has none of torch's."""
    wide = np.asarray(array.astype(jnp.float32)) if array.dtype == jnp.bfloat16 else np.asarray(array)
    made = torch.from_numpy(wide.copy())
    return made.to(torch.bfloat16 if array.dtype == jnp.bfloat16 and dtype is None else dtype or made.dtype)


class Expected(NamedTuple):
    """Per token, fp64; what is no function of a label is there for ignored rows, too."""

    loss: torch.Tensor
    lse: torch.Tensor
    logprobs: torch.Tensor
    entropy: torch.Tensor
    valid: torch.Tensor
    all_logprobs: torch.Tensor


def expected(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float | None = None,
    softcap: float | None = None,
    temperature: torch.Tensor | None = None,
) -> Expected:
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    logits = logits * (logit_scale or 1.0)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if temperature is not None:
        logits = logits / temperature[..., None]
    lse = logits.logsumexp(-1)
    every = logits - lse[..., None]
    valid = labels != IGNORED
    logprobs = every.gather(-1, labels.clamp(min=0).long()[..., None])[..., 0]
    loss = -(1 - label_smoothing) * logprobs - label_smoothing * every.mean(-1) + z_loss * lse**2
    entropy = -(every.exp() * every).sum(-1)
    zero = torch.zeros((), dtype=torch.float64)
    return Expected(*(torch.where(valid, each, zero) for each in (loss, lse, logprobs, entropy)), valid, every)


def near(found: Any, wanted: torch.Tensor, bound: float) -> None:
    """Fails unless the largest difference is within `bound` of the largest number, or of 1e-3."""
    found = np.asarray(found.astype(jnp.float32), np.float64)
    right = wanted.detach().numpy()
    assert found.shape == right.shape
    largest = max(float(np.abs(right).max(initial=0)), 1e-3)
    error = float(np.abs(found - right).max(initial=0))
    assert error <= bound * largest, f"{error:.3g} of {largest:.3g}"


def plain(case: Case) -> Any:
    """The loss as a function of hidden and weight."""
    return lambda hidden, weight: flce.jax.linear_cross_entropy(hidden, weight, case.labels)
