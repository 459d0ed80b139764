"""flce.compat.skyrl: log-probabilities of sampled tokens over recorded sets, entropies of them and gradients against formulas in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compat_support import DTYPES, Layer, check_gradients, make_layer
from support import assert_close
from torch import Tensor

import flce
from flce.compat.skyrl import SampleSupportScores, sample_support_scores

K = 6
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def make_support(sampled: Tensor, classes: int) -> Tensor:
    """Distinct classes in any order, -1 between and behind them; mostly with the sampled one. Some tokens have none, some not the sampled
    class, some that alone."""
    generator = torch.Generator().manual_seed(2)
    rows = []
    for number, token in enumerate(sampled.flatten().tolist()):
        others = [each for each in torch.randperm(classes, generator=generator).tolist() if each != token]
        row = torch.tensor([token, *others[: K - 1]])[torch.randperm(K, generator=generator)]
        row[(torch.rand(K, generator=generator) < 0.3) & (row != token)] = -1
        if number % 5 == 1:
            row[:] = -1
        elif number % 5 == 2:
            row[row == token] = others[K]
        elif number % 5 == 3:
            row[row != token] = -1
        rows.append(row)
    return torch.stack(rows).view(*sampled.shape, K).to(sampled.device, torch.int32)


def scores(layer: Layer, support: Tensor, **options: Any) -> SampleSupportScores:
    rows = {"vocab_start_index": 0, "vocab_end_index": layer.weight.shape[0], "tp_group": None, "lm_head_weight": layer.weight}
    return sample_support_scores(layer.hidden, layer.target, support, **(rows | options))


def expected(layer: Layer, support: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The sampled token's logit less the set's lse, and the set's entropy: whole logits, those outside of the set at -inf."""
    logits = layer.logits(temperature=temperature)
    kept = torch.zeros_like(logits).scatter_add(-1, support.clamp(min=0).long(), (support >= 0).double()) > 0
    valid = kept.any(-1)
    restricted = torch.where(kept | ~valid[..., None], logits, -torch.inf)
    logprobs = logits.gather(-1, layer.target[..., None]).squeeze(-1) - restricted.logsumexp(-1)
    log_softmax = torch.where(kept, restricted.log_softmax(-1), 0.0)
    entropy = -torch.where(kept, log_softmax.exp() * log_softmax, 0.0).sum(-1)
    return torch.where(valid, logprobs, 0.0), entropy


@dtypes
@pytest.mark.parametrize("shape", [(33,), (3, 11)], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
def test_scores_and_gradients(device: str, dtype: torch.dtype, shape: tuple[int, ...], temperature: float, entropy: str) -> None:
    layer = make_layer(device, dtype, shape=shape, ignore_index=None)
    support, exact = make_support(layer.target, layer.weight.shape[0]), layer.in_double()
    actual = scores(
        layer,
        support,
        temperature=temperature,
        compute_entropy=entropy != "none",
        entropy_requires_grad=entropy == "gradient",
        chunk_size=None if entropy == "none" else 4,
    )
    logprobs, right_entropy = expected(exact, support, temperature)
    assert torch.equal(actual.valid_mask, (support >= 0).any(-1)) and not actual.valid_mask.all()
    assert actual.logprobs.dtype is torch.float32 and (actual.logprobs[~actual.valid_mask] == 0).all()
    assert_close(actual.logprobs, logprobs, dtype, "logprobs", output=True, factor=4.0)
    made, right = [actual.logprobs], [logprobs]
    if entropy == "none":
        assert actual.entropy is None
    else:
        assert actual.entropy is not None and actual.entropy.requires_grad == (entropy == "gradient")
        assert_close(actual.entropy, right_entropy, dtype, "entropy", output=True, factor=4.0)
        if entropy == "gradient":
            made, right = [*made, actual.entropy], [*right, right_entropy]
    check_gradients(made, right, layer, exact)


def test_a_sampled_token_far_above_its_set(device: str) -> None:
    """Its probability beside the set's is 1 in fp32, and the set's share of it 0."""
    layer = make_layer(device, shape=(2,), ignore_index=None)
    with torch.no_grad():
        layer.weight[layer.target[0]] = 8 * layer.hidden[0]
    support = torch.tensor([[1, 2, -1], [3, 4, 5]], dtype=torch.int32, device=device)
    assert not (support == layer.target[:, None]).any()
    exact = layer.in_double()
    actual = scores(layer, support, compute_entropy=True, entropy_requires_grad=True)
    right = expected(exact, support, 1.0)
    assert right[0][0] > 100
    for value, wanted in zip((actual.logprobs, actual.entropy), right, strict=True):
        assert_close(value, wanted, torch.float32, output=True, factor=100.0)
    check_gradients([actual.logprobs], [right[0]], layer, exact, factor=4.0)


def test_sets_of_one_class_and_no_place_at_all(device: str) -> None:
    layer = make_layer(device, ignore_index=None)
    alone = scores(layer, layer.target[:, None].int(), compute_entropy=True)
    assert (alone.logprobs == 0).all() and (alone.entropy == 0).all() and alone.valid_mask.all()  # type: ignore[union-attr]
    empty = scores(layer, layer.target.new_empty((33, 0), dtype=torch.int32), compute_entropy=True, entropy_requires_grad=True)
    assert (empty.logprobs == 0).all() and not empty.valid_mask.any()
    assert empty.entropy is not None
    gradients = torch.autograd.grad(empty.logprobs.sum() + empty.entropy.sum(), layer.leaves())
    assert all((gradient == 0).all() for gradient in gradients)


def test_classes_that_there_are_not_count_for_nothing_and_are_reported(device: str) -> None:
    layer = make_layer(device, shape=(4,), ignore_index=None)
    classes = layer.weight.shape[0]
    support = torch.tensor([[2, 3, -1], [2, 3, 4], [2, 3, 4], [2, 3, 4]], dtype=torch.int32, device=device)
    layer.target[:] = torch.tensor([5, 4, 4, 4])
    right = scores(layer, support, compute_entropy=True)
    support[0, 2] = classes
    got = scores(layer, support, compute_entropy=True)
    assert right.entropy is not None and got.entropy is not None
    assert torch.equal(got.logprobs, right.logprobs) and torch.equal(got.entropy, right.entropy)
    with pytest.raises(flce.LabelError) as error:
        flce.check_labels()
    assert error.value.row == 0
    for fault in (-1, classes, 2**32 + 4):
        layer.target[2] = fault
        got = scores(layer, support)
        assert torch.equal(got.logprobs[1], right.logprobs[1])
        with pytest.raises(flce.LabelError):
            flce.check_labels()


def test_hidden_states_are_of_the_weights_dtype() -> None:
    layer = make_layer(ignore_index=None)
    support, rounded = make_support(layer.target, layer.weight.shape[0]), layer.hidden.detach().bfloat16()
    mixed = Layer(rounded.requires_grad_(), layer.weight, layer.target, None)
    exact = mixed.in_double()
    actual, right = scores(mixed, support).logprobs, expected(exact, support, 1.0)[0]
    assert_close(actual, right, torch.float32, output=True, factor=4.0)
    check_gradients([actual], [right], mixed, exact)


def test_a_graph_without_breaks_computes_the_same() -> None:
    layer = make_layer(ignore_index=None)
    support = make_support(layer.target, layer.weight.shape[0])

    def step(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        made = scores(Layer(hidden * 1.0, weight, layer.target, None), support, compute_entropy=True, entropy_requires_grad=True)
        assert made.entropy is not None
        return made.logprobs, made.entropy

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(layer.hidden, layer.weight)
    eager = step(layer.hidden, layer.weight)
    assert all(torch.equal(one, other) for one, other in zip(compiled, eager, strict=True))
    made, wanted = (torch.autograd.grad(torch.stack(each).sum(), layer.leaves()) for each in (compiled, eager))
    for one, other in zip(made, wanted, strict=True):
        assert_close(one, other.double(), torch.float32)


def test_bad_input_is_refused_by_name() -> None:
    layer = make_layer(ignore_index=None)
    classes = layer.weight.shape[0]
    support = make_support(layer.target, classes)
    for message, ids, options in (
        ("logits_or_hidden holds logits", support, {"lm_head_weight": None}),
        ("support_ids has shape|sampled_ids has shape", support[1:], {}),
        ("must be torch.int32", support.long(), {}),
        ("at most 1023 classes", support.repeat(1, 171), {}),
        ("temperature is 0", support, {"temperature": 0.0}),
        ("chunk_size is 0", support, {"chunk_size": 0}),
        ("compute_entropy=True", support, {"entropy_requires_grad": True}),
        ("lm_head_weight has 63 rows", support, {"vocab_end_index": classes + 1}),
        ("tp_group is None", support, {"vocab_start_index": 4, "vocab_end_index": classes + 4}),
        ("tp_group is a object", support, {"tp_group": object()}),
    ):
        with pytest.raises(ValueError, match=message):
            scores(layer, ids, **options)
    assert issubclass(flce.ShapeError, ValueError)
