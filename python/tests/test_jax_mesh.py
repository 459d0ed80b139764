"""flce.jax over eight devices: rows that stay where they are, a weight that is gathered once, the vocabulary over an axis of shard_map."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax_cases as cases
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flce.jax as fj
from flce import errors

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


@pytest.fixture(autouse=True)
def _on_cpu() -> Iterator[None]:
    """Calls without a mesh are the mesh's devices', too."""
    with cases.on("cpu"):
        yield


def make_mesh() -> Mesh:
    return Mesh(np.array(jax.devices("cpu")).reshape(4, 2), ("data", "model"))


def placed(mesh: Mesh, array: jax.Array, *axes: Any) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh, P(*axes)))


def collectives(text: str) -> dict[str, int]:
    """How many of each, by the names of their results' shapes in a compiled program."""
    return {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in COLLECTIVES}


def loss(hidden: Any, weight: Any, labels: Any) -> Any:
    return fj.linear_cross_entropy(hidden, weight, labels, z_loss=1e-3)


def right_of(case: cases.Case, function: Any = loss) -> Any:
    return jax.value_and_grad(function, (0, 1))(case.hidden, case.weight, case.labels)


def close(found: Any, right: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        assert np.allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [("data", None), ("data", "model"), (("data", "model"), None), (None, None)], ids=str)
@pytest.mark.parametrize("weight", [(None, None), ("model", None), (None, "data")], ids=str)
def test_rows_stay_where_they_are(rows: tuple[Any, ...], weight: tuple[Any, ...]) -> None:
    case = cases.case((8, 12), classes=320)
    mesh = make_mesh()
    hidden, labels = placed(mesh, case.hidden, *rows, None), placed(mesh, case.labels, *rows)
    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    text = step.lower(hidden, placed(mesh, case.weight, *weight), labels).compile().as_text()
    found = collectives(text)
    sharded = any(axis is not None for axis in weight)
    # The weight is gathered for forward and backward together; hidden states, labels and per-token numbers never.
    assert found["all-gather"] == sharded, text
    assert found["all-to-all"] == found["collective-permute"] == 0, text
    made = step(hidden, placed(mesh, case.weight, *weight), labels)
    close(made, right_of(case))
    if rows != (None, None):
        assert tuple(made[1][0].sharding.spec)[:2] == tuple(P(*rows))[: len(tuple(made[1][0].sharding.spec))]


@pytest.mark.parametrize("count", [7, 6, 5, 3])
def test_rows_that_the_axis_does_not_divide(count: int) -> None:
    """XLA would fill up the last parts with rows of any content, labels included."""
    case = cases.case((8, 13), classes=320)
    mesh = make_mesh()

    def of_some(hidden: Any, weight: Any, labels: Any) -> Any:
        return loss(hidden[:count, :-1], weight, labels[:count, 1:])

    right = jax.value_and_grad(of_some, (0, 1))(case.hidden, case.weight, case.labels)
    rows = placed(mesh, case.hidden, ("data", "model")), case.weight, placed(mesh, case.labels, ("data", "model"))
    fj.check_labels()
    close(jax.jit(jax.value_and_grad(of_some, (0, 1)))(*rows), right)
    fj.check_labels()


@pytest.mark.parametrize("labels", [("data",), (("data", "model"),), ("data", "model"), ()], ids=str)
@pytest.mark.parametrize("rows", [("data",), (), (None, "model"), (None, None, "model")], ids=str)
def test_what_is_retained_is_read_where_its_rows_are(rows: tuple[Any, ...], labels: tuple[Any, ...]) -> None:
    """A checkpoint's policy lets XLA lay backward's arrays otherwise than forward's. The layer is large enough to retain."""
    case = cases.case((8, 16), depth=256, classes=2000)
    mesh = make_mesh()
    policy = jax.checkpoint_policies.save_only_these_names("flce_lse", "flce_retained")

    def weighted(hidden: Any, weight: Any, labels: Any) -> Any:
        return (fj.linear_cross_entropy(hidden, weight, labels, reduction="none") * case.token_weight).sum()

    right = jax.value_and_grad(weighted, (0, 1))(case.hidden, case.weight, case.labels)
    given = placed(mesh, case.hidden, *rows), case.weight, placed(mesh, case.labels, *labels)
    close(jax.jit(jax.value_and_grad(jax.checkpoint(weighted, policy=policy), (0, 1)))(*given), right)


def test_residuals_that_were_moved_make_gradients_nan() -> None:
    case = cases.case((8, 16), depth=256, classes=2000)
    rows = NamedSharding(Mesh(np.array(jax.devices("cpu")), ("data",)), P("data"))
    total = functools.partial(fj.linear_cross_entropy, reduction="sum")
    _, pull = jax.jit(lambda h, w: jax.vjp(lambda h, w: total(h, w, case.labels), h, w))(jax.device_put(case.hidden, rows), case.weight)
    right = jax.grad(total, (0, 1))(case.hidden, case.weight, case.labels)
    close(jax.jit(lambda pull: pull(jnp.float32(1)))(pull), right)
    moved = jax.device_put(pull, jax.devices("cpu")[0])
    assert all(jnp.isnan(each).any() for each in jax.jit(lambda pull: pull(jnp.float32(1)))(moved))


def test_hidden_major_weights_and_options_over_a_mesh() -> None:
    case = cases.case((8, 12), classes=320)
    mesh = make_mesh()

    def of_flax(hidden: Any, kernel: Any, labels: Any) -> Any:
        return fj.linear_cross_entropy(
            hidden, kernel, labels, weight_layout="hidden_major", bias=case.bias, temperature=case.temperature, shift=1
        )

    kernel = case.weight.T
    right = jax.value_and_grad(of_flax, (0, 1))(case.hidden, kernel, case.labels)
    rows = placed(mesh, case.hidden, "data"), placed(mesh, kernel, None, "model"), placed(mesh, case.labels, "data")
    close(jax.jit(jax.value_and_grad(of_flax, (0, 1)))(*rows), right)


def test_a_mesh_of_explicit_axes() -> None:
    """Arrays have their sharding in their type: outputs lie as hidden's rows, gradients as their arrays."""
    case = cases.case((8, 12), classes=320)

    def rows(hidden: Any, weight: Any, labels: Any) -> Any:
        made = fj.linear_cross_entropy(hidden, weight, labels, shift=1, temperature=0.7, reduction="none", return_lse=True)
        return made[0].sum() + made[1].sum(), made

    step = jax.jit(jax.value_and_grad(rows, (0, 1), has_aux=True))
    right = step(case.hidden, case.weight, case.labels)
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=explicit, devices=jax.devices("cpu"))
    with jax.set_mesh(mesh):
        given = [jax.device_put(case.hidden, P("data")), jax.device_put(case.weight, P("model")), jax.device_put(case.labels, P("data"))]
        found = step(*given)
        eager = fj.linear_cross_entropy(*given, shift=1, temperature=0.7)
    close(found, right)
    (_, (loss, lse)), gradients = found
    for array, spec in (
        (loss, P("data", None)),
        (lse, P("data", None)),
        (gradients[0], P("data", None, None)),
        (gradients[1], P("model", None)),
    ):
        assert jax.typeof(array).sharding.spec == spec
    close(eager, fj.linear_cross_entropy(case.hidden, case.weight, case.labels, shift=1, temperature=0.7))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "softcap": 7.0, "bias": True}], ids=["plain", "options"])
def test_the_vocabulary_over_an_axis(options: dict[str, Any], sequence_parallel: bool, check_vma: bool) -> None:
    case = cases.case((8, 12), classes=320)
    mesh = make_mesh()
    given = {name: value for name, value in options.items() if name != "bias"}
    bias = case.bias if "bias" in options else jnp.zeros_like(case.bias)

    def outputs(hidden: Any, weight: Any, bias: Any, labels: Any, **more: Any) -> Any:
        more |= {"bias": bias} if "bias" in options else {}
        return fj.linear_cross_entropy(
            hidden, weight, labels, reduction="none", return_lse=True, return_logprobs=True, return_entropy=True, **given, **more
        )

    rows = P("data", "model") if sequence_parallel else P("data")

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(rows, P("model"), P("model"), P("data")), out_specs=P("data"), check_vma=check_vma
    )
    def over_axis(hidden: Any, weight: Any, bias: Any, labels: Any) -> Any:
        if sequence_parallel:
            hidden = jax.lax.all_gather(hidden, "model", axis=1, tiled=True)
        return outputs(hidden, weight, bias, labels, axis_name="model")

    def total(function: Any, hidden: Any, weight: Any, bias: Any) -> Any:
        made = function(hidden, weight, bias, case.labels)
        return sum((i + 1) * each.sum() for i, each in enumerate(made)), made

    def both(function: Any) -> Any:
        return jax.jit(jax.value_and_grad(functools.partial(total, function), (0, 1, 2), has_aux=True))(case.hidden, case.weight, bias)

    close(both(over_axis), both(outputs))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("use", ["mean", "own part"])
@pytest.mark.parametrize("function", ["cross entropy", "logprobs at"])
def test_labels_that_are_gathered_too(function: str, use: str, check_vma: bool) -> None:
    """Results then vary over the axis as shard_map knows it, and each device has a share of their gradients."""
    case = cases.case((8, 12), classes=320)
    shapes = {"mesh": make_mesh(), "in_specs": (P("data", "model"), P("model"), P("data", "model"))}

    def of_rows(hidden: Any, weight: Any, labels: Any, axis_name: str | None = None) -> Any:
        if function == "cross entropy":
            return fj.linear_cross_entropy(hidden, weight, labels, reduction="none", z_loss=1e-3, axis_name=axis_name)
        ids = jnp.stack([labels, jnp.zeros_like(labels)], -1)
        return fj.linear_logprobs_at(hidden, weight, jnp.maximum(ids, -1), axis_name=axis_name).sum(-1)

    def over_axis(hidden: Any, weight: Any, labels: Any) -> Any:
        whole = [jax.lax.all_gather(each, "model", axis=1, tiled=True) for each in (hidden, labels)]
        made = of_rows(whole[0], weight, whole[1], axis_name="model")
        if use == "mean":
            return jax.lax.pmean(jax.lax.psum(made.sum(), "model"), "data") / 2 * 4
        return jax.lax.dynamic_slice_in_dim(made, jax.lax.axis_index("model") * 6, 6, 1)

    spec = P() if use == "mean" else P("data", "model")

    def total(hidden: Any, weight: Any) -> Any:
        if use == "mean":
            return jax.shard_map(lambda *g: jax.lax.psum(over_axis(*g) / 4, "data"), out_specs=spec, check_vma=check_vma, **shapes)(
                hidden, weight, case.labels
            )
        return jax.shard_map(over_axis, out_specs=spec, check_vma=check_vma, **shapes)(hidden, weight, case.labels).sum()

    right = jax.value_and_grad(lambda h, w: of_rows(h, w, case.labels).sum(), (0, 1))(case.hidden, case.weight)
    close(jax.jit(jax.value_and_grad(total, (0, 1)))(case.hidden, case.weight), right)


def test_an_ignore_index_among_the_classes() -> None:
    """Labels are turned for each part, and a turned one must not be taken for it; nor a teacher's class."""
    case = cases.case((8, 12), classes=320)
    labels = jnp.where(case.labels == cases.IGNORED, 0, case.labels).at[0, :6].set(160)  # the second part's first
    ids = case.teacher_ids.at[..., 0].set(0)

    def distilled(hidden: Any, weight: Any, axis_name: str | None = None) -> Any:
        options = {"labels": labels, "ignore_index": 0, "hard_weight": 0.3, "reduction": "none", "axis_name": axis_name}
        return fj.linear_topk_distillation(hidden, weight, ids, case.teacher_probs, **options)

    over_axis = jax.shard_map(functools.partial(distilled, axis_name="model"), mesh=make_mesh(), in_specs=(P(), P("model")), out_specs=P())
    found, right = (
        jax.value_and_grad(lambda h, w: function(h, w).sum(), (0, 1))(case.hidden, case.weight)  # noqa: B023
        for function in (over_axis, distilled)
    )
    close(found, right)


def test_the_vocabulary_over_an_axis_with_a_teacher() -> None:
    case = cases.case((8, 12), classes=320)
    mesh = make_mesh()

    def distilled(hidden: Any, weight: Any, ids: Any, probs: Any, labels: Any, axis_name: str | None = None) -> Any:
        return fj.linear_topk_distillation(
            hidden, weight, ids, probs, labels=labels, hard_weight=0.4, reduction="none", axis_name=axis_name
        )

    rows = case.teacher_ids, case.teacher_probs, case.labels
    shapes = {"mesh": mesh, "in_specs": (P("data"), P("model"), P("data"), P("data"), P("data")), "out_specs": P("data")}
    over_axis = jax.shard_map(functools.partial(distilled, axis_name="model"), **shapes)
    found, right = (
        jax.value_and_grad(lambda h, w: function(h, w, *rows).sum(), (0, 1))(case.hidden, case.weight)  # noqa: B023
        for function in (over_axis, distilled)
    )
    close(found, right)


@pytest.mark.parametrize("check_vma", [True, False])
def test_data_parallel_inside_of_shard_map(check_vma: bool) -> None:
    case = cases.case((8, 12), classes=320)

    @functools.partial(jax.shard_map, mesh=make_mesh(), in_specs=(P("data"), P(), P("data")), out_specs=P(), check_vma=check_vma)
    def summed(hidden: Any, weight: Any, labels: Any) -> Any:
        total = fj.linear_cross_entropy(hidden, weight, labels, z_loss=1e-3, reduction="sum")
        return jax.lax.psum(total, "data") / jax.lax.psum((labels != cases.IGNORED).sum(), "data")

    close(jax.jit(jax.value_and_grad(summed, (0, 1)))(case.hidden, case.weight, case.labels), right_of(case))


def test_the_same_bits_on_every_device_of_the_axis() -> None:
    case = cases.case((16,), classes=320)

    @functools.partial(jax.shard_map, mesh=make_mesh(), in_specs=(P(), P("model"), P()), out_specs=P(("data", "model")), check_vma=False)
    def each(hidden: Any, weight: Any, labels: Any) -> Any:
        return fj.linear_cross_entropy(hidden, weight, labels, reduction="none", axis_name="model")[None]

    made = jax.jit(each)(case.hidden, case.weight, case.labels)
    assert all(jnp.array_equal(row, made[0]) for row in made)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_classes_that_every_device_has_whole_are_refused(name: str) -> None:
    case = cases.case((16,), classes=320)
    arrays = {"hidden": case.hidden, "weight": case.weight, "labels": case.labels}
    shapes = {"hidden": P(), "weight": P("model") if name == "bias" else P(), "labels": P()}
    if name == "bias":
        arrays["bias"], shapes["bias"] = jnp.zeros(160), P()

    def loss(each: dict[str, Any]) -> Any:
        return fj.linear_cross_entropy(**each, axis_name="model")

    call = jax.shard_map(loss, mesh=make_mesh(), in_specs=(shapes,), out_specs=P())
    with pytest.raises(errors.PlacementError, match=f"{name} is the same on every device of axis 'model'"):
        call(arrays)


def test_labels_out_of_range_and_refusals_over_an_axis() -> None:
    case = cases.case((16,), classes=320)
    mesh = make_mesh()
    shapes = {"mesh": mesh, "in_specs": (P(), P("model"), P()), "out_specs": P()}
    over_axis = jax.shard_map(functools.partial(fj.linear_cross_entropy, axis_name="model"), **shapes)
    fj.check_labels()
    wrong = case.labels.at[5].set(320)
    found = over_axis(case.hidden, case.weight, wrong)
    assert np.allclose(found, fj.linear_cross_entropy(case.hidden, case.weight, case.labels.at[5].set(cases.IGNORED)))
    with pytest.raises(errors.LabelError, match=r"labels\[5\].*0 to 319"):
        fj.check_labels()
    top1 = functools.partial(fj.linear_cross_entropy, axis_name="model", return_top1=True)
    with pytest.raises(errors.ArgumentError, match="return_top1 is given with axis_name"):
        jax.shard_map(top1, mesh=mesh, in_specs=(P(), P("model"), P()), out_specs=(P(), P()))(case.hidden, case.weight, case.labels)
