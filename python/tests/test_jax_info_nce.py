"""flce.jax.info_nce beside scores in torch's fp64, alone and over a mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jax_cases as cases
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flce.jax as fj
from flce import errors

QUERIES, DOCUMENTS, DEPTH = 24, 40, 32


def embeddings(dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    draw = np.random.default_rng(0)
    made = [draw.normal(size=(count, DEPTH)) / DEPTH**0.5 for count in (QUERIES, DOCUMENTS)]
    positives = draw.integers(0, DOCUMENTS, QUERIES)
    positives[::5] = -100
    log_q = draw.uniform(-12, -1, DOCUMENTS)
    return jnp.asarray(made[0], dtype), jnp.asarray(made[1], dtype), jnp.asarray(positives, jnp.int32), jnp.asarray(-log_q, jnp.float32)


def expected(queries: Any, documents: Any, scale: Any, positives: Any, added: Any, symmetric: bool) -> torch.Tensor:
    """By whole scores, fp64."""
    forth = torch.arange(QUERIES) if positives is None else positives
    scores = scale * queries @ documents.T
    loss = F.cross_entropy(scores if added is None else scores + added, forth)
    if not symmetric:
        return loss
    own = documents[:QUERIES] if positives is None else documents[positives.clamp(min=0)]
    back = torch.arange(QUERIES) if positives is None else torch.where(positives >= 0, torch.arange(QUERIES), -100)
    return (loss + F.cross_entropy(scale * own @ queries.T, back)) / 2


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("dtype", cases.BOUNDS)
def test_values_and_gradients(dtype: str, corrected: bool, named: bool, symmetric: bool) -> None:
    queries, documents, positives, added = embeddings(jnp.dtype(dtype))
    options = {"positives": positives if named else None, "negative_log_q": added if corrected else None, "symmetric": symmetric}
    loss = lambda q, d, s: fj.info_nce(q, d, scale=s, **options)  # noqa: E731
    made, gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(queries, documents, jnp.float32(14.0))
    inputs = [cases.as_torch(each, torch.float64).requires_grad_() for each in (queries, documents)]
    scale = torch.tensor(14.0, dtype=torch.float64, requires_grad=True)
    places = cases.as_torch(positives).long() if named else None
    right = expected(*inputs, scale, places, cases.as_torch(added, torch.float64) if corrected else None, symmetric)
    right.backward()
    cases.near(made, right, 0.2 * cases.BOUNDS[dtype])
    for found, each in zip(gradients, (*inputs, scale), strict=True):
        assert each.grad is not None
        cases.near(found, each.grad, cases.BOUNDS[dtype])


def masked(scores: torch.Tensor, of_rows: Any, of_classes: Any, own: torch.Tensor) -> torch.Tensor:
    same = torch.as_tensor((of_rows[:, None] == of_classes) & (of_rows[:, None] >= 0))
    return scores.masked_fill(same.scatter(1, own.clamp(min=0)[:, None], False), -torch.inf)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("devices", [1, 8])
def test_a_mask(devices: int, named: bool, symmetric: bool) -> None:
    queries, documents, positives, _ = embeddings()
    draw = np.random.default_rng(1)
    of_queries, of_documents = (draw.integers(-1, 6, count) * 10**8 for count in (QUERIES, DOCUMENTS))
    options = {"positives": positives if named else None, "mask": (jnp.asarray(of_queries), jnp.asarray(of_documents))}
    loss = lambda q, d: fj.info_nce(q, d, scale=9.0, symmetric=symmetric, **options)  # noqa: E731
    rows = [queries, documents]
    if devices > 1:
        mesh = Mesh(np.array(jax.devices("cpu")), ("data",))
        rows = [jax.device_put(each, NamedSharding(mesh, P("data"))) for each in rows]
    made, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(*rows)
    inputs = [cases.as_torch(each, torch.float64).requires_grad_() for each in (queries, documents)]
    places = cases.as_torch(positives).long() if named else torch.arange(QUERIES)
    right = F.cross_entropy(masked(9 * inputs[0] @ inputs[1].T, of_queries, of_documents, places), places)
    if symmetric:
        own, back = places.clamp(min=0), torch.where(places >= 0, torch.arange(QUERIES), -100)
        scores = masked(9 * inputs[1][own] @ inputs[0].T, of_documents[own.numpy()], of_queries, torch.arange(QUERIES))
        right = (right + F.cross_entropy(scores, back)) / 2
    right.backward()
    cases.near(made, right, 0.2 * cases.BOUNDS["float32"])
    for found, each in zip(gradients, inputs, strict=True):
        assert each.grad is not None
        cases.near(found, each.grad, cases.BOUNDS["float32"])


def of_named(queries: Any, documents: Any, scale: Any, positives: Any, added: Any, negatives: Any) -> torch.Tensor:
    """The losses by scores of the named documents, fp64; 0 for queries that do not count."""
    scores = scale * queries @ documents.T + (0 if added is None else added)
    counts = positives >= 0
    others = torch.where((negatives == positives[:, None]) | (negatives < 0), -torch.inf, scores.gather(1, negatives.clamp(min=0)))
    own = scores.gather(1, positives.clamp(min=0)[:, None])
    return torch.where(counts, torch.cat([own, others], 1).logsumexp(1) - own[:, 0], 0)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("dtype", cases.BOUNDS)
def test_named_negatives(dtype: str, corrected: bool, named: bool, reduction: str, device: str) -> None:
    queries, documents, positives, added = embeddings(jnp.dtype(dtype))
    places = positives if named else jnp.arange(QUERIES)
    negatives = np.random.default_rng(1).integers(0, DOCUMENTS, (QUERIES, 5))
    negatives[::3, 2] = -1
    negatives[1::3, 4] = np.asarray(places)[1::3]
    negatives[::7] = -1
    given = {"positives": positives if named else None, "negative_log_q": added if corrected else None, "reduction": reduction}
    loss = lambda q, d, s: fj.info_nce(q, d, scale=s, negatives=jnp.asarray(negatives, jnp.int32), **given)  # noqa: E731
    with cases.on(device):
        made = loss(queries, documents, jnp.float32(14.0))
        gradients = jax.jit(jax.grad(lambda *inputs: loss(*inputs).sum(), (0, 1, 2)))(queries, documents, jnp.float32(14.0))
    inputs = [cases.as_torch(each, torch.float64).requires_grad_() for each in (queries, documents)]
    scale = torch.tensor(14.0, dtype=torch.float64, requires_grad=True)
    of_places = cases.as_torch(places).long()
    right = of_named(*inputs, scale, of_places, cases.as_torch(added, torch.float64) if corrected else None, torch.tensor(negatives))
    right = right if reduction == "none" else right.sum() / (int((of_places >= 0).sum()) if reduction == "mean" else 1)
    right.sum().backward()
    cases.near(made, right.detach(), 0.2 * cases.BOUNDS[dtype])
    for found, each in zip(gradients, (*inputs, scale), strict=True):
        assert each.grad is not None
        cases.near(found, each.grad, cases.BOUNDS[dtype])
    fj.check_labels()


def test_a_mask_of_named_negatives() -> None:
    queries, documents, *_ = embeddings()
    numbers = np.arange(QUERIES) % 3, np.arange(DOCUMENTS) % 5
    negatives = np.random.default_rng(2).integers(0, DOCUMENTS, (QUERIES, 6))
    left = np.where(numbers[1][negatives] == numbers[0][:, None], -1, negatives)
    made = fj.info_nce(queries, documents, negatives=jnp.asarray(negatives), mask=tuple(map(jnp.asarray, numbers)), reduction="none")
    assert (left < 0).any()
    np.testing.assert_array_equal(made, fj.info_nce(queries, documents, negatives=jnp.asarray(left), reduction="none"))


def test_named_negatives_that_are_none_of_the_documents() -> None:
    queries, documents, *_ = embeddings()
    one = jnp.full((QUERIES, 1), 39, jnp.int32)
    faults = jnp.concatenate([one, jnp.full((QUERIES, 1), DOCUMENTS, jnp.int32)], 1)
    assert fj.info_nce(queries, documents, negatives=faults) == fj.info_nce(queries, documents, negatives=one)
    with pytest.raises(errors.LabelError):
        fj.check_labels()
    none = fj.info_nce(queries, documents, negatives=one, positives=jnp.full(QUERIES, -100, jnp.int32))
    out_of_range = fj.info_nce(queries, documents, negatives=one, scale=jnp.float32(0))
    assert none == 0 and out_of_range == 0
    with pytest.raises(errors.LabelError):
        fj.check_labels()


def test_named_negatives_over_a_mesh() -> None:
    queries, documents, positives, _ = embeddings()
    negatives = jnp.asarray(np.random.default_rng(1).integers(0, DOCUMENTS, (QUERIES, 5)), jnp.int32)
    step = jax.jit(jax.value_and_grad(lambda q, d: fj.info_nce(q, d, scale=14.0, positives=positives, negatives=negatives), (0, 1)))
    right = step(queries, documents)
    mesh = Mesh(np.array(jax.devices("cpu")), ("data",))
    found = step(*(jax.device_put(each, NamedSharding(mesh, P("data"))) for each in (queries, documents)))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        assert np.allclose(one, other, rtol=1e-5, atol=1e-6)


def test_over_a_mesh() -> None:
    queries, documents, positives, added = embeddings()
    mesh = Mesh(np.array(jax.devices("cpu")), ("data",))
    loss = lambda q, d: fj.info_nce(q, d, scale=14.0, positives=positives, negative_log_q=added, symmetric=True)  # noqa: E731
    right = jax.value_and_grad(loss, (0, 1))(queries, documents)
    rows = [jax.device_put(each, NamedSharding(mesh, P("data"))) for each in (queries, documents)]
    found = jax.jit(jax.value_and_grad(loss, (0, 1)))(*rows)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        assert np.allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [("symmetric",), ("negative_log_q",), ("positives", "symmetric")], ids="+".join)
def test_over_a_mesh_of_explicit_axes(options: tuple[str, ...]) -> None:
    queries, documents, positives, added = embeddings()
    every = {"symmetric": True, "negative_log_q": added, "positives": positives}
    given = {name: every[name] for name in options}
    step = jax.jit(jax.value_and_grad(lambda q, d, s: fj.info_nce(q, d, scale=s, **given), (0, 1, 2)))
    explicit = (jax.sharding.AxisType.Explicit,)
    with cases.on("cpu"):
        right = step(queries, documents, jnp.float32(14))
    with cases.on("cpu"), jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=explicit, devices=jax.devices("cpu"))):
        found = step(jax.device_put(queries, P("data")), jax.device_put(documents, P("data")), jnp.float32(14))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        assert np.allclose(one, other, rtol=1e-5, atol=1e-6)


def test_one_document_and_a_scale_out_of_range() -> None:
    queries, documents, *_ = embeddings()
    gradients = jax.grad(lambda q, d: fj.info_nce(q, d, positives=jnp.zeros(QUERIES, jnp.int32)), (0, 1))(queries, documents[:1])
    assert all((each == 0).all() for each in gradients)
    fj.check_labels()
    loss, slope = jax.value_and_grad(lambda s: fj.info_nce(queries, documents, scale=s))(jnp.float32(0))
    assert loss == 0 and slope == 0
    with pytest.raises(errors.LabelError):
        fj.check_labels()


def test_refusals() -> None:
    queries, documents, positives, added = embeddings()
    for kind, text, call in (
        (errors.ShapeError, "queries has shape", lambda: fj.info_nce(queries[0], documents)),
        (errors.ShapeError, "size and dtype", lambda: fj.info_nce(queries[:, 1:], documents)),
        (errors.ShapeError, "positives is None", lambda: fj.info_nce(documents, queries)),
        (errors.ShapeError, "positives is int32", lambda: fj.info_nce(queries, documents, positives=positives[1:])),
        (errors.ShapeError, "negative_log_q has shape", lambda: fj.info_nce(queries, documents, negative_log_q=added[1:])),
        (errors.ShapeError, r"negatives is float32\[24, 2\]", lambda: fj.info_nce(queries, documents, negatives=jnp.ones((QUERIES, 2)))),
        (errors.ShapeError, r"it must be \[24, K\]", lambda: fj.info_nce(queries, documents, negatives=positives)),
        (
            errors.ArgumentError,
            "negatives is given with symmetric",
            lambda: fj.info_nce(queries, documents, negatives=positives[:, None], symmetric=True),
        ),
        (errors.ShapeError, "scale has shape", lambda: fj.info_nce(queries, documents, scale=jnp.ones(2))),
        (errors.ArgumentError, "scale is 0", lambda: fj.info_nce(queries, documents, scale=0.0)),
        (errors.ArgumentError, "reduction is 'weighted_mean'", lambda: fj.info_nce(queries, documents, reduction="weighted_mean")),
        (errors.ArgumentError, r"mask is .* of shape \[24, 40\]", lambda: fj.info_nce(queries, documents, mask=jnp.zeros((24, 40), bool))),
        (errors.ShapeError, r"mask has int32\[24\] for of_documents", lambda: fj.info_nce(queries, documents, mask=(positives, positives))),
        (
            errors.ArgumentError,
            "of_queries has numbers beyond int32",
            lambda: fj.info_nce(queries, documents, mask=(np.arange(QUERIES) + 2**32, np.arange(DOCUMENTS))),
        ),
        (errors.DTypeError, "mask has None for of_documents", lambda: fj.info_nce(queries, documents, mask=(positives, None))),
        (errors.DTypeError, "symmetric is 1", lambda: fj.info_nce(queries, documents, symmetric=1)),
    ):
        with pytest.raises(kind, match=text):
            call()
