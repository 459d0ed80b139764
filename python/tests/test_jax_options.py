"""flce.jax: class weights and offsets, dft, batch invariance and packed sequences, beside torch's flce."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import jax_cases as cases
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flce
import flce.jax as fj
from flce import errors

OPTIONS: dict[str, dict[str, Any]] = {
    "class_weight": {"class_weight": True},
    "class_weight_smoothed": {"class_weight": True, "label_smoothing": 0.1},
    "class_weight_z_loss": {"class_weight": True, "label_smoothing": 0.1, "z_loss": 1e-2},
    "class_offset": {"class_offset": True, "softcap": 8.0},
    "class_offset_alone": {"class_offset": True},
    "dft": {"dft": True},
    "dft_z_loss": {"dft": True, "z_loss": 1e-2, "temperature": 1.5},
    "all": {"class_weight": True, "class_offset": True, "dft": True, "label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 8.0},
}
REDUCTIONS = ("none", "sum", "mean", "weighted_mean")


def class_weight(classes: int = 301) -> jax.Array:
    return jnp.asarray(np.random.default_rng(8).uniform(0.2, 2, classes), jnp.float32)


def class_offset(classes: int = 301) -> jax.Array:
    return jnp.asarray(np.random.default_rng(9).normal(size=classes), jnp.float32)


OF_CLASSES = {"class_weight": class_weight, "class_offset": class_offset}


def given(options: dict[str, Any], classes: int = 301) -> dict[str, Any]:
    return options | {name: make(classes) for name, make in OF_CLASSES.items() if name in options}


def close(found: Any, right: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        assert np.allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", OPTIONS)
def test_class_weights_and_dft_beside_torch(name: str, reduction: str, device: str) -> None:
    case = cases.case((3, 11))
    options = given(OPTIONS[name]) | {"reduction": reduction, "return_logprobs": True}
    if reduction in ("sum", "weighted_mean"):
        options["token_weight"] = case.token_weight
    hidden, weight = (cases.as_torch(array).to(device).requires_grad_() for array in (case.hidden, case.weight))
    of_torch = {key: cases.as_torch(value).to(device) if isinstance(value, jax.Array) else value for key, value in options.items()}
    leaves = [hidden, weight, *([of_torch["class_offset"].requires_grad_()] if "class_offset" in of_torch else [])]
    offsets = [options.pop("class_offset")] if "class_offset" in options else []
    right, right_logprobs = flce.linear_cross_entropy(hidden, weight, cases.as_torch(case.labels).to(device), **of_torch)
    slopes = cases.as_torch(case.temperature).to(device)  # any numbers
    ((right * slopes if reduction == "none" else right).sum() + 0.1 * right_logprobs.sum()).backward()

    def total(hidden: Any, weight: Any, *offsets: Any) -> Any:
        given = options | {"class_offset": offsets[0]} if offsets else options
        loss, logprobs = fj.linear_cross_entropy(hidden, weight, case.labels, **given)
        return (loss * case.temperature if reduction == "none" else loss).sum() + 0.1 * logprobs.sum(), (loss, logprobs)

    with cases.on(device):
        step = jax.jit(jax.value_and_grad(total, tuple(range(len(leaves))), has_aux=True))
        (_, made), gradients = step(case.hidden, case.weight, *offsets)
    for found, other in zip(made, (right, right_logprobs), strict=True):
        cases.near(found, other.detach().cpu(), 1e-5)
    for found, leaf in zip(gradients, leaves, strict=True):
        cases.near(found, leaf.grad.cpu(), 1e-5)


def test_class_weights_that_add_up_to_0() -> None:
    case = cases.case()
    total = lambda hidden: fj.linear_cross_entropy(hidden, case.weight, case.labels, class_weight=jnp.zeros(301))  # noqa: E731
    loss, gradient = jax.value_and_grad(total)(case.hidden)
    assert loss == 0 and not gradient.any()


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_vocabulary_over_an_axis(name: str, check_vma: bool) -> None:
    with cases.on("cpu"):
        case = cases.case((8, 12), classes=320)
        mesh = jax.make_mesh((4, 2), ("data", "model"), devices=jax.devices("cpu"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        options = given(OPTIONS[name], 320)
        of_classes = {name: options.pop(name) for name in OF_CLASSES if name in options}

        def mean(hidden: Any, weight: Any, of_classes: Any, labels: Any, axis_name: str | None = None) -> Any:
            return fj.linear_cross_entropy(
                hidden, weight, labels, return_lse=True, return_entropy=True, axis_name=axis_name, **of_classes, **options
            )

        over_axis = jax.shard_map(
            functools.partial(mean, axis_name="model"),
            mesh=mesh,
            in_specs=(P(), P("model"), P("model"), P()),
            out_specs=(P(), P(), P()),
            check_vma=check_vma,
        )

        def total(function: Any, hidden: Any, weight: Any, offsets: Any) -> Any:
            given = of_classes | {"class_offset": offsets} if "class_offset" in of_classes else of_classes
            loss, lse, entropy = function(hidden, weight, given, case.labels)
            return loss + 1e-2 * lse.sum() + 1e-2 * entropy.sum(), (loss, lse, entropy)

        found, right = (
            jax.jit(jax.value_and_grad(functools.partial(total, function), (0, 1, 2), has_aux=True))(
                case.hidden, case.weight, class_offset(320)
            )
            for function in (over_axis, mean)
        )
        close(found, right)


@pytest.mark.parametrize("name", OPTIONS)
def test_rows_over_a_mesh(name: str) -> None:
    with cases.on("cpu"):
        case = cases.case((8, 12))
        options = given(OPTIONS[name])
        offsets = options.pop("class_offset", None)
        loss = lambda h, w, o, y: fj.linear_cross_entropy(h, w, y, class_offset=o, **options)  # noqa: E731
        step = jax.jit(jax.value_and_grad(loss, (0, 1) if offsets is None else (0, 1, 2)))
        right = step(case.hidden, case.weight, offsets, case.labels)
        mesh = jax.make_mesh((8,), ("data",), devices=jax.devices("cpu"), axis_types=(jax.sharding.AxisType.Auto,))
        rows = NamedSharding(mesh, P("data"))
        close(step(jax.device_put(case.hidden, rows), case.weight, offsets, jax.device_put(case.labels, rows)), right)


def test_under_vmap() -> None:
    case = cases.case((4, 9))
    options = given(OPTIONS["all"])
    offsets = options.pop("class_offset")
    one = lambda h, w, o, y: fj.linear_cross_entropy(h, w, y, class_offset=o, **options)  # noqa: E731
    total = lambda h, w, o: jax.vmap(one, (0, None, None, 0))(h, w, o, case.labels).sum()  # noqa: E731
    by_rows = lambda h, w, o: sum(one(h[i], w, o, case.labels[i]) for i in range(4))  # noqa: E731
    close(*(jax.value_and_grad(function, (0, 1, 2))(case.hidden, case.weight, offsets) for function in (total, by_rows)))


def test_refused() -> None:
    case = cases.case()
    loss = functools.partial(fj.linear_cross_entropy, case.hidden, case.weight, case.labels)
    refused: list[tuple[type[Exception], str, Any]] = [
        (errors.ShapeError, r"class_weight has shape \[3\]; it must be \[301\]", lambda: loss(class_weight=jnp.ones(3))),
        (errors.ShapeError, r"class_offset has shape \[3\]; it must be \[301\]", lambda: loss(class_offset=jnp.ones(3))),
        (errors.DTypeError, "class_weight has dtype complex64", lambda: loss(class_weight=1j * class_weight())),
        (
            errors.ArgumentError,
            "num_valid_tokens is given with class_weight and z_loss",
            lambda: loss(class_weight=class_weight(), num_valid_tokens=3, z_loss=0.1),
        ),
        (
            errors.ArgumentError,
            r"stop_gradient\(class_weight\)",
            lambda: jax.grad(lambda weights: loss(class_weight=weights))(class_weight()),
        ),
        (
            errors.DTypeError,
            "z_loss is a .*; it must be a number",
            lambda: jax.jit(lambda z_loss: loss(class_weight=class_weight(), z_loss=z_loss))(0.1),
        ),
        (errors.DTypeError, "dft is 1", lambda: loss(dft=1)),
        (errors.DTypeError, "batch_invariant is 'yes'", lambda: loss(batch_invariant="yes")),
    ]
    for kind, text, call in refused:
        with pytest.raises(kind, match=text):
            call()
    assert np.allclose(loss(class_weight=2 * class_weight(), num_valid_tokens=4), 2 * loss(class_weight=class_weight(), num_valid_tokens=4))


# ── Batch invariance ────────────────────────────────


def test_the_same_bits_in_whichever_batch() -> None:
    with cases.on("cpu"):
        case = cases.case((300,), depth=40, classes=2311)
        order = jnp.asarray(np.random.default_rng(1).permutation(300))

        def rows(at: Any) -> Any:
            labels, slopes = case.labels[at], case.token_weight[at]
            of_rows = functools.partial(
                fj.linear_cross_entropy, reduction="none", return_lse=True, return_entropy=True, batch_invariant=True
            )

            def total(hidden: Any) -> Any:
                made = of_rows(hidden, case.weight, labels)
                return (made[0] * slopes).sum(), made

            gradient, made = jax.jit(jax.grad(total, has_aux=True))(case.hidden[at])
            return (*made, gradient)

        whole = rows(jnp.arange(300))
        for part in (order, order[:1], order[3:40], jnp.arange(128, 300)):
            for found, right in zip(rows(part), whole, strict=True):
                assert jnp.array_equal(found, right[part])
        in_torch = flce.linear_logprobs(*(cases.as_torch(each) for each in case[:3]), batch_invariant=True)
        assert torch.equal(cases.as_torch(fj.linear_logprobs(*case[:3], batch_invariant=True)), in_torch)
        ids, probs = case.teacher_ids, case.teacher_probs
        for function in (
            lambda at: fj.linear_logprobs_at(case.hidden[at], case.weight, ids[at], batch_invariant=True),
            lambda at: fj.linear_topk_distillation(
                case.hidden[at], case.weight, ids[at], probs[at], reduction="none", batch_invariant=True
            ),
        ):
            assert jnp.array_equal(function(order[:7]), function(jnp.arange(300))[order[:7]])


# ── Packed sequences ────────────────────────────────

LENGTHS = ((10, 1, 0, 12, 14), (37,), (5, 20), (1,) * 37)


@pytest.mark.parametrize("offsets", [np.int32, np.int64])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("shift", [0, 1, 2])
def test_packed_sequences_beside_torch(shift: int, lengths: tuple[int, ...], offsets: Any) -> None:
    """The last pack of one case ends before the labels do."""
    case = cases.case()
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(offsets)
    in_torch = [cases.as_torch(array) for array in case[:3]]
    for labels, hidden in ((case.labels, case.hidden), (case.labels[:36].reshape(4, 9), case.hidden[:36].reshape(4, 9, -1))):
        right = flce.linear_logprobs(
            cases.as_torch(hidden), in_torch[1], cases.as_torch(labels), shift=shift, cu_seqlens=torch.from_numpy(bounds)
        )
        call = functools.partial(fj.linear_logprobs, shift=shift)
        for function in (call, jax.jit(call)):
            cases.near(function(hidden, case.weight, labels, cu_seqlens=bounds), right, 1e-6)


def test_packs_of_each_example_and_over_a_mesh() -> None:
    with cases.on("cpu"):
        case = cases.case((4, 16))
        bounds = jnp.asarray([[0, 3, 16], [0, 8, 16], [0, 16, 16], [0, 1, 9]], jnp.int32)
        one = lambda hidden, labels, bounds: fj.linear_logprobs(hidden, case.weight, labels, shift=1, cu_seqlens=bounds)  # noqa: E731
        found = jax.vmap(one)(case.hidden, case.labels, bounds)
        close(found, jnp.stack([one(*each) for each in zip(case.hidden, case.labels, bounds, strict=True)]))
        mesh = jax.make_mesh((8,), ("data",), devices=jax.devices("cpu"), axis_types=(jax.sharding.AxisType.Auto,))
        rows = NamedSharding(mesh, P("data"))
        flat = case.hidden.reshape(64, -1), case.labels.reshape(64)
        ends = jnp.asarray([0, 5, 30, 64])
        close(jax.jit(one)(*(jax.device_put(each, rows) for each in flat), ends), one(*flat, ends))


def test_offsets_that_are_none() -> None:
    case = cases.case()
    loss = functools.partial(fj.linear_cross_entropy, case.hidden, case.weight, case.labels, shift=1)
    for offsets, text in (([1, 37], r"cu_seqlens\[0\] is 1"), ([0, 9, 4, 37], r"cu_seqlens\[2\] is 4 behind 9")):
        with pytest.raises(errors.ArgumentError, match=text):
            loss(cu_seqlens=jnp.asarray(offsets))
        fj.check_labels()
        assert jax.jit(lambda offsets: loss(cu_seqlens=offsets))(jnp.asarray(offsets)) == 0
        with pytest.raises(errors.LabelError, match="or cu_seqlens was given and does not begin with 0, or decreases"):
            fj.check_labels()
    refused: list[tuple[type[Exception], str, Any]] = [
        (errors.ShapeError, r"cu_seqlens has shape \[2, 1\]", lambda: loss(cu_seqlens=jnp.zeros((2, 1), jnp.int32))),
        (errors.DTypeError, "cu_seqlens has dtype float32", lambda: loss(cu_seqlens=jnp.zeros(2))),
        (errors.ArgumentError, "flattened tokens without cu_seqlens", loss),
        (
            errors.ArgumentError,
            "shift is 38; all sequences of labels together are 37 long",
            lambda: fj.linear_logprobs(case.hidden, case.weight, case.labels, shift=38, cu_seqlens=jnp.asarray([0, 37])),
        ),
    ]
    for kind, message, call in refused:
        with pytest.raises(kind, match=message):
            call()


@pytest.mark.parametrize("function", ["linear_logprobs", "linear_logprobs_at", "linear_topk_distillation"])
def test_class_offsets_of_other_functions_beside_torch(function: str, device: str) -> None:
    case = cases.case((3, 11))
    ids = jnp.asarray(np.random.default_rng(10).integers(0, 301, (3, 11, 4)), jnp.int32)
    others = {"linear_logprobs": (case.labels,), "linear_logprobs_at": (ids,), "linear_topk_distillation": (ids, jnp.full(ids.shape, 0.2))}
    offsets = class_offset()
    hidden, weight = (cases.as_torch(array).to(device).requires_grad_() for array in (case.hidden, case.weight))
    of_torch = [cases.as_torch(each).to(device) for each in (*others[function], offsets)]
    of_torch[-1].requires_grad_()
    right = getattr(flce, function)(hidden, weight, *of_torch[:-1], class_offset=of_torch[-1], softcap=8.0)
    right.sum().backward()
    with cases.on(device):
        total = lambda hidden, weight, offsets: getattr(fj, function)(  # noqa: E731
            hidden, weight, *others[function], class_offset=offsets, softcap=8.0
        ).sum()
        made, gradients = jax.jit(jax.value_and_grad(total, (0, 1, 2)))(case.hidden, case.weight, offsets)
    cases.near(made, right.detach().sum().cpu(), 1e-5)
    for found, leaf in zip(gradients, (hidden, weight, of_torch[-1]), strict=True):
        cases.near(found, leaf.grad.cpu(), 1e-5)
