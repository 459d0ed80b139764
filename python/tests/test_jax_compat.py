"""Stand-ins for losses of JAX's libraries: tokamax's beside the package itself, Levanter's and MaxText's beside their contracts written
out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
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


# ── The function for MaxText in docs/jax.md ─────────


class Held:
    """A parameter as Flax NNX has it."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __getitem__(self, _: Any) -> Any:
        return self.array


def in_maxtexts_place(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The page's function, which stands in its trainer's module afterwards."""
    trainer = types.ModuleType("maxtext.trainers.pre_train.train")
    for name in ("maxtext", "maxtext.trainers", "maxtext.trainers.pre_train"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["maxtext.trainers.pre_train"], "train", trainer, raising=False)
    page = (ROOT / "docs" / "jax.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def vocab_tiling_nnx_loss" in block)
    exec(code, {})
    return trainer.vocab_tiling_nnx_loss


@pytest.mark.parametrize("tied", [False, True])
def test_maxtexts_function(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside whole logits, as MaxText 0.2.5 makes them of a head, a norm of hidden states before it."""
    function = in_maxtexts_place(monkeypatch)
    case = cases.case((2, 12))
    config = types.SimpleNamespace(
        logits_via_embedding=tied, enable_dropout=False, logits_dot_in_fp32=False, normalize_embedding_logits=True, emb_dim=64,
        final_logits_soft_cap=4.0, z_loss_multiplier=1e-3,
    )  # fmt: skip
    data = {"targets": jnp.maximum(case.labels, 0), "targets_segmentation": (case.labels != cases.IGNORED).astype(jnp.int32)}

    def model_of(weight: Any) -> Any:
        decoder = types.SimpleNamespace(
            decoder_norm=jnp.tanh, dropout=lambda hidden, deterministic: hidden, logits_dense=types.SimpleNamespace(kernel=Held(weight.T))
        )
        return types.SimpleNamespace(decoder=decoder, token_embedder=types.SimpleNamespace(embedding=Held(weight)))

    def right(hidden: Any, weight: Any) -> Any:
        logits = jnp.tanh(hidden) @ weight.T
        if tied:
            logits = jnp.tanh(logits / jnp.sqrt(64) / 4.0) * 4.0
        lse = jax.nn.logsumexp(logits, axis=-1)
        z_losses = 1e-3 * lse**2
        losses = lse - jnp.take_along_axis(logits, data["targets"][..., None], axis=-1)[..., 0] + z_losses
        counted = data["targets_segmentation"] != 0
        return (losses * counted).sum(), (z_losses * counted).sum()

    def of_page(hidden: Any, weight: Any) -> Any:
        return function(model_of(weight), hidden, data, config, True)

    found, wanted = (jax.value_and_grad(each, (0, 1), has_aux=True)(case.hidden, case.weight) for each in (of_page, right))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.allclose(one, other, rtol=1e-4, atol=1e-5)
