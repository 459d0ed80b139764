"""Stand-ins for losses of JAX's libraries: tokamax's beside the package itself, Levanter's beside its contract written out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax_cases as cases
import numpy as np
import pytest

from flce import errors
from flce.jax import compat

ROOT = Path(__file__).resolve().parent.parent.parent


def rows(seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    case = cases.case((128,), depth=128, classes=256, seed=seed)
    return case.hidden, jnp.where(case.labels == cases.IGNORED, 7, case.labels), case.weight.T


def test_tokamax_itself(tmp_path: Path) -> None:
    x, labels, weights = rows()
    np.savez(tmp_path / "given.npz", x=x, labels=labels, weights=weights)
    # It wants another typeguard than the trainers do.
    path = os.pathsep.join([str(ROOT / ".tools" / "jax"), os.environ.get("PYTHONPATH", "")])
    worker = [sys.executable, str(Path(__file__).with_name("tokamax_worker.py")), str(tmp_path / "given.npz"), str(tmp_path / "made.npz")]
    done = subprocess.run(worker, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    if "No module named 'tokamax'" in done.stderr:
        pytest.skip("tokamax is not installed; tools/setup.sh --trainers fetches it")
    assert done.returncode == 0, done.stderr[-3000:]
    right = np.load(tmp_path / "made.npz")
    for reduction in ("sum", "mean"):
        loss = lambda x, weights: compat.linear_softmax_cross_entropy_loss(x, labels, weights, reduction=reduction)  # noqa: B023, E731
        made, gradients = jax.value_and_grad(loss, (0, 1))(x, weights)
        assert np.allclose(made, right[reduction], rtol=1e-5)
        for found, name in zip(gradients, ("x", "weights"), strict=True):
            assert np.allclose(found, right[f"{reduction} {name}"], rtol=1e-4, atol=1e-5)


def test_tokamax_refuses_as_there() -> None:
    x, labels, weights = rows()
    with pytest.raises(errors.ArgumentError, match="reduction is 'none'"):
        compat.linear_softmax_cross_entropy_loss(x, labels, weights, reduction="none")
    with pytest.raises(errors.ArgumentError, match="precision is"):
        compat.linear_softmax_cross_entropy_loss(x, labels, weights, precision="highest")
    with pytest.raises(errors.ShapeError, match=r"must be \[B, H\] and \[B\]"):
        compat.linear_softmax_cross_entropy_loss(x, labels[1:], weights)


def levanter(x: Any, labels: Any, w: Any, *, reduction: Any, weight: Any, logsumexp_weight: float, logit_soft_cap: Any) -> Any:
    """The contract, on whole logits."""
    logits = (x @ w).astype(jnp.float32)
    if logit_soft_cap is not None:
        logits = jnp.tanh(logits / logit_soft_cap) * logit_soft_cap
    lse = jax.nn.logsumexp(logits, axis=-1)
    loss = lse - jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0] + logsumexp_weight * lse**2
    loss = loss if weight is None else loss * weight
    if reduction is None:
        return loss
    total = loss.sum()
    if reduction == "sum":
        return total
    return total / (x.shape[0] if weight is None else weight.sum())


@pytest.mark.parametrize("reduction", ["mean", "sum", None])
@pytest.mark.parametrize("masked", [False, True])
def test_levanters_contract(reduction: str | None, masked: bool) -> None:
    x, labels, w = rows(1)
    given = {"weight": jnp.arange(128) % 3 > 0 if masked else None, "logsumexp_weight": 1e-3, "logit_soft_cap": 12.0}
    of_flce = lambda x, w: compat.fused_cross_entropy_loss_and_logsumexp_penalty(  # noqa: E731
        x, labels, w, reduction=reduction, block_size=512, implementation="xla", **given
    )
    right = lambda x, w: levanter(x, labels, w, reduction=reduction, **given)  # noqa: E731
    assert np.allclose(of_flce(x, w), right(x, w), rtol=1e-5)
    gradients = [jax.grad(lambda x, w: function(x, w).sum(), (0, 1))(x, w) for function in (of_flce, right)]  # noqa: B023
    for found, wanted in zip(*gradients, strict=True):
        assert np.allclose(found, wanted, rtol=1e-4, atol=1e-6)


def test_levanters_argmax_and_no_weights() -> None:
    x, labels, w = rows()
    loss, argmax = compat.fused_cross_entropy_loss_and_logsumexp_penalty(x, labels, w, return_argmax=True)
    assert jnp.array_equal(argmax, (x @ w).argmax(-1)) and loss.shape == ()
    assert compat.fused_cross_entropy_loss_and_logsumexp_penalty(x, labels, w, weight=jnp.zeros(128)) == 0
