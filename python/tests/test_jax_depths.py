"""flce.jax: several hidden states on one weight, beside torch's flce and beside a call of each."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import jax_cases as cases
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flce
import flce.jax as fj
from flce import errors

SHAPES = {"alike": ((8, 5),) * 3, "other": ((2, 5), (9,), (3, 2, 2))}
LOSS_WEIGHTS = [1.0, 0.3, -0.5]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logits": {"bias": True, "softcap": 5.0, "logit_scale": 0.7, "temperature": 1.3},
    "smoothed": {"label_smoothing": 0.1, "z_loss": 0.01},
    "class_weight": {"class_weight": True, "label_smoothing": 0.1},
    "dft": {"dft": True},
    "temperatures": {"temperature": "arrays"},
    "some_temperatures": {"temperature": "some"},
    "counts": {"num_valid_tokens": [3, 4.0, None]},
    "some_weights": {"token_weight": "some"},
}


def depths(shapes: str = "other", **given: Any) -> list[cases.Case]:
    return [cases.case(shape, seed=seed, **given) for seed, shape in enumerate(SHAPES[shapes])]


def options_of(name: str, reduction: str, each: list[cases.Case]) -> dict[str, Any]:
    options = {**OPTIONS[name], "reduction": reduction}
    if options.get("bias"):
        options["bias"] = each[0].bias
    if options.get("class_weight"):
        options["class_weight"] = class_weight()
    if "temperature" in options:
        of_rows = [case.temperature for case in each]
        options["temperature"] = {"arrays": of_rows, "some": [of_rows[0], 2.0, 1.0]}.get(options["temperature"], options["temperature"])
    if options.get("token_weight") == "some":
        options["token_weight"] = [each[0].token_weight, None, 0.5]
    if reduction == "weighted_mean":
        options["token_weight"] = [case.token_weight for case in each]
    if reduction != "mean":
        options.pop("num_valid_tokens", None)
    return options


def class_weight() -> jax.Array:
    return jnp.asarray(np.random.default_rng(8).uniform(0.2, 2, 301), jnp.float32)


def in_torch(value: Any) -> Any:
    if isinstance(value, list):
        return [in_torch(each) for each in value]
    return cases.as_torch(value) if isinstance(value, jax.Array) else value


def close(found: Any, right: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        assert one.shape == other.shape
        assert np.allclose(one, other, rtol=1e-5, atol=1e-6)


def placed(mesh: Mesh, array: jax.Array, *axes: Any) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh, P(*axes)))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "weighted_mean"])
@pytest.mark.parametrize("shapes", SHAPES)
def test_losses_and_gradients_are_torchs(shapes: str, reduction: str, name: str, device: str) -> None:
    each = depths(shapes)
    options = options_of(name, reduction, each)
    states = [cases.as_torch(case.hidden).to(device).requires_grad_() for case in each]
    weight = cases.as_torch(each[0].weight).to(device).requires_grad_()
    of_torch = {key: _moved(in_torch(value), device) for key, value in options.items()}
    labels = [cases.as_torch(case.labels).to(device) for case in each]
    right, losses = flce.linear_cross_entropy(states, weight, labels, loss_weights=LOSS_WEIGHTS, **of_torch)
    gradients = torch.autograd.grad(right, [*states, weight])

    def total(hidden: Any, weight: Any) -> Any:
        return fj.linear_cross_entropy(hidden, weight, [case.labels for case in each], loss_weights=LOSS_WEIGHTS, **options)

    with cases.on(device):
        (found, of_depths), (of_hidden, of_weight) = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(
            [case.hidden for case in each], each[0].weight
        )
    for one, other in zip((found, *of_depths), (right, *losses), strict=True):
        cases.near(one, other.cpu(), 1e-5)
    for one, other in zip((*of_hidden, of_weight), gradients, strict=True):
        cases.near(one, other.cpu(), 1e-5)


def _moved(value: Any, device: str) -> Any:
    if isinstance(value, list):
        return [_moved(each, device) for each in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_beside_fp64(dtype: str) -> None:
    each = depths(dtype=jnp.dtype(dtype))
    wide = [cases.as_torch(array, torch.float64).requires_grad_() for array in (*(case.hidden for case in each), each[0].weight)]
    right = []
    for hidden, case in zip(wide[:-1], each, strict=True):
        made = cases.expected(hidden, wide[-1], cases.as_torch(case.labels).long())
        right.append(made.loss.sum() / made.valid.sum())
    (right[0] + 0.3 * right[1] - 0.5 * right[2]).backward()

    def total(hidden: Any, weight: Any) -> Any:
        return fj.linear_cross_entropy(hidden, weight, [case.labels for case in each], loss_weights=LOSS_WEIGHTS)

    (_, losses), gradients = jax.value_and_grad(total, (0, 1), has_aux=True)([case.hidden for case in each], each[0].weight)
    for one, other in zip(losses, right, strict=True):
        cases.near(one, other, cases.BOUNDS[dtype])
    for found, leaf in zip((*gradients[0], gradients[1]), wide, strict=True):
        assert found.dtype == jnp.dtype(dtype) and leaf.grad is not None
        cases.near(found, leaf.grad, cases.BOUNDS[dtype])


@pytest.mark.parametrize("shapes", SHAPES)
def test_outputs_beside_the_losses_have_the_depths_shapes(shapes: str) -> None:
    each = depths(shapes)
    flags = {"return_lse": True, "return_logprobs": True, "return_entropy": True, "return_top1": True, "reduction": "none"}
    made = fj.linear_cross_entropy([case.hidden for case in each], each[0].weight, [case.labels for case in each], **flags)
    for at, case in enumerate(each):
        close([output[at] for output in made], fj.linear_cross_entropy(case.hidden, each[0].weight, case.labels, **flags))
    (lone,) = fj.linear_cross_entropy([each[0].hidden], each[0].weight, [each[0].labels])
    assert lone == fj.linear_cross_entropy(each[0].hidden, each[0].weight, each[0].labels)


@pytest.mark.parametrize("shapes", SHAPES)
def test_one_forward_and_one_backward(shapes: str) -> None:
    """In the compiled program, with one gradient of the weight."""
    each = depths(shapes)

    def total(hidden: Any, weight: Any) -> Any:
        return fj.linear_cross_entropy(hidden, weight, [case.labels for case in each], loss_weights=LOSS_WEIGHTS)[0]

    program = jax.jit(jax.grad(total, (0, 1))).lower([case.hidden for case in each], each[0].weight).compile().as_text()
    assert re.findall(r'custom_call_target="flce_(\w+)"', program) == ["forward", "backward"]
    assert program.count('results = "grad_hidden,grad_weight,workspace"') == 1, program


def test_a_depth_predicts_the_label_so_many_positions_on() -> None:
    each = depths("alike")
    states, weight, labels = [case.hidden for case in each], each[0].weight, each[0].labels
    losses = fj.linear_cross_entropy(states, weight, labels, shift=[1, 2, 0])
    for hidden, loss, shift in zip(states, losses, (1, 2, 0), strict=True):
        close(loss, fj.linear_cross_entropy(hidden, weight, labels, shift=shift))
    packed = [hidden.reshape(40, -1) for hidden in states]
    close(fj.linear_cross_entropy(packed, weight, labels.reshape(40), shift=[1, 2, 0], cu_seqlens=jnp.arange(0, 41, 5)), losses)


def test_a_depth_without_a_valid_row_is_0() -> None:
    each = depths()
    states, weight = [case.hidden for case in each], each[0].weight
    labels = [each[0].labels, jnp.full_like(each[1].labels, cases.IGNORED), each[2].labels]
    losses, gradients = jax.value_and_grad(lambda hidden: fj.linear_cross_entropy(hidden, weight, labels, loss_weights=[1, 1, 1])[0] * 1.0)(
        states
    )
    assert losses > 0 and not gradients[1].any() and gradients[0].any() and jnp.isfinite(gradients[0]).all()
    assert all(loss == 0 for loss in fj.linear_cross_entropy(states, weight, labels, num_valid_tokens=0))


def test_a_label_past_the_vocabulary_is_reported() -> None:
    each = depths()
    fj.check_labels()
    labels = [each[0].labels, each[1].labels.at[3].set(301), each[2].labels]
    fj.linear_cross_entropy([case.hidden for case in each], each[0].weight, labels)
    with pytest.raises(errors.LabelError, match=r"labels\[13\].*one behind the other"):
        fj.check_labels()


def test_under_vmap() -> None:
    """A batch is more rows of the one call."""
    each = depths("alike")
    states, weight = [case.hidden for case in each], each[0].weight

    def of_batch(states: Any, weight: Any) -> Any:
        run = lambda states, labels: fj.linear_cross_entropy(states, weight, labels, loss_weights=LOSS_WEIGHTS)[0]  # noqa: E731
        return jax.vmap(run)(states, [case.labels for case in each]).sum()

    def one_by_one(states: Any, weight: Any) -> Any:
        made = 0.0
        for row in range(8):
            rows = [hidden[row] for hidden in states]
            made += fj.linear_cross_entropy(rows, weight, [case.labels[row] for case in each], loss_weights=LOSS_WEIGHTS)[0]
        return made

    found = jax.jit(jax.value_and_grad(of_batch, (0, 1)))
    program = found.lower(states, weight).compile().as_text()
    assert re.findall(r'custom_call_target="flce_(\w+)"', program) == ["forward", "backward"]
    close(found(states, weight), jax.value_and_grad(one_by_one, (0, 1))(states, weight))


# ── Over a mesh ─────────────────────────────────────


def make_mesh() -> Mesh:
    return Mesh(np.array(jax.devices("cpu")).reshape(4, 2), ("data", "model"))


def total_of(labels: Any, states: Any, weight: Any, **options: Any) -> Any:
    return fj.linear_cross_entropy(states, weight, labels, loss_weights=LOSS_WEIGHTS, z_loss=1e-3, **options)


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("rows", ["data", ("data", "model")], ids=str)
def test_rows_of_one_shape_stay_where_they_are(rows: Any, shapes: str) -> None:
    with cases.on("cpu"):
        each = depths(shapes)
        labels = [case.labels for case in each]
        step = jax.jit(jax.value_and_grad(lambda labels, states, weight: total_of(labels, states, weight)[0], (1, 2)))
        right = step(labels, [case.hidden for case in each], each[0].weight)
        mesh = make_mesh()
        own = rows if shapes == "alike" else None
        given = (
            [placed(mesh, one, own) for one in labels],
            [placed(mesh, case.hidden, own) for case in each],
            placed(mesh, each[0].weight),
        )
        close(step(*given), right)
        if shapes == "alike":
            program = step.lower(*given).compile().as_text()
            assert not re.findall(r" (all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", program), program
            assert sorted(re.findall(r'custom_call_target="flce_(\w+)"', program)) == ["backward", "forward"]


def test_a_mesh_of_explicit_axes() -> None:
    with cases.on("cpu"):
        each = depths("alike", classes=320)
        labels = [case.labels for case in each]

        def run(states: Any, weight: Any, labels: Any) -> Any:
            total, *others = total_of(labels, states, weight, return_lse=True)
            return total, others

        step = jax.jit(jax.value_and_grad(run, (0, 1), has_aux=True))
        right = step([case.hidden for case in each], each[0].weight, labels)
        explicit = (jax.sharding.AxisType.Explicit,) * 2
        with jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"), axis_types=explicit, devices=jax.devices("cpu"))):
            rows = [jax.device_put(case.hidden, P("data")) for case in each]
            found = step(rows, jax.device_put(each[0].weight, P("model")), [jax.device_put(one, P("data")) for one in labels])
    close(found, right)
    (_, (_, lse)), gradients = found
    assert [jax.typeof(one).sharding.spec for one in lse] == [P("data", None)] * 3
    assert jax.typeof(gradients[0][1]).sharding.spec == P("data", None, None)


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_vocabulary_over_an_axis(check_vma: bool) -> None:
    with cases.on("cpu"):
        each = [cases.case((8, 5), classes=320, seed=seed) for seed in range(3)]
        labels = [case.labels for case in each]

        def over_axis(states: Any, weight: Any, labels: Any) -> Any:
            losses, lse = fj.linear_cross_entropy(states, weight, labels, reduction="none", return_lse=True, axis_name="model")
            return losses, lse

        mapped = jax.shard_map(
            over_axis, mesh=make_mesh(), in_specs=(P("data"), P("model"), P("data")), out_specs=P("data"), check_vma=check_vma
        )

        def total(function: Any, states: Any, weight: Any) -> Any:
            losses, lse = function(states, weight, labels)
            return sum((1 + at) * (one.sum() + other.sum()) for at, (one, other) in enumerate(zip(losses, lse, strict=True)))

        whole = functools.partial(fj.linear_cross_entropy, reduction="none", return_lse=True)
        found, right = (
            jax.jit(jax.value_and_grad(functools.partial(total, function), (0, 1)))([case.hidden for case in each], each[0].weight)
            for function in (mapped, whole)
        )
        close(found, right)


# ── What is refused ─────────────────────────────────


def test_refusals_name_the_depth() -> None:
    each = depths()
    states, weight, labels = [case.hidden for case in each], each[0].weight, [case.labels for case in each]
    one = states[0]

    def refused(kind: type[Exception], message: str, *rows: Any, **options: Any) -> None:
        with pytest.raises(kind, match=message):
            fj.linear_cross_entropy(*(rows or (states, weight, labels)), **options)

    refused(errors.ArgumentError, "hidden is an empty list", [], weight, [])
    refused(errors.ArgumentError, "labels has 2 items and hidden has 3", states, weight, labels[:2])
    refused(errors.ArgumentError, r"hidden is a list of 2, and labels and shift are one for all.*\[1, 2\]", [one, one], weight, labels[0])
    refused(errors.ArgumentError, "shift has 1 items and hidden has 2", [one, one], weight, labels[0], shift=[1])
    refused(errors.ArgumentError, "loss_weights has 2 items and hidden has 3", loss_weights=[1.0, 2.0])
    refused(errors.DTypeError, "loss_weights is a float", loss_weights=1.0)
    refused(errors.DTypeError, r"loss_weights\[1\] is a .*; it must be a number", loss_weights=[1.0, jnp.ones(()), 1.0])
    refused(errors.ArgumentError, "loss_weights is given with reduction 'none'", loss_weights=LOSS_WEIGHTS, reduction="none")
    refused(errors.ArgumentError, "loss_weights is given and hidden is one array", one, weight, labels[0], loss_weights=[1.0])
    refused(errors.ArgumentError, "reduction is 'median'", reduction="median")
    refused(errors.ArgumentError, r"num_valid_tokens\[0\] is given with reduction 'sum'", num_valid_tokens=3, reduction="sum")
    refused(errors.ArgumentError, r"token_weight\[0\] is None", reduction="weighted_mean")
    refused(errors.ShapeError, r"labels\[1\] has shape \[2, 5\]", states, weight, [labels[0], labels[0], labels[2]])
    refused(errors.ShapeError, r"token_weight\[0\] has shape \[9\]", token_weight=[jnp.ones(9), None, None])
    refused(errors.ShapeError, r"temperature\[1\] has shape \[2\]", temperature=[1.0, jnp.ones(2), 1.0])
    refused(errors.ArgumentError, r"temperature\[2\] is 0", temperature=[1.0, 1.0, 0])
    refused(errors.ShapeError, r"hidden\[1\] has shape \[2, 5, 16\]", [one, one[..., :16]], weight, [labels[0]] * 2)
    refused(errors.DTypeError, r"hidden\[1\] has dtype bfloat16", [one, one.astype(jnp.bfloat16)], weight, [labels[0]] * 2)
    refused(errors.DTypeError, r"hidden\[1\] is None", [one, None], weight, [labels[0]] * 2)
    refused(errors.DTypeError, "hidden is a list; it must be an array, or a list of arrays", [[1.0, 2.0]], weight, [labels[0]])
    refused(errors.DTypeError, r"labels\[0\] has dtype float32", [one], weight, [one[..., 0]])
    refused(errors.ShapeError, r"bias has shape \[3\]", bias=jnp.ones(3))
    refused(
        errors.ArgumentError, "num_valid_tokens is given with class_weight", num_valid_tokens=3, class_weight=class_weight(), z_loss=0.1
    )
    with pytest.raises(errors.DTypeError, match="linear_cross_entropy takes several"):
        fj.linear_logprobs(states, weight, labels)
