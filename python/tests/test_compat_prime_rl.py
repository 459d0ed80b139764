"""flce.compat.prime_rl: log-probabilities over a sampler's sets, entropies, losses and gradients against their formulas in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from compat_support import DTYPES, Layer, check_gradients, make_layer
from support import assert_close
from torch import Tensor, nn

import flce
from flce.compat.prime_rl import FusedOutputLinear
from flce.core import _kernels

SHAPE, K = (3, 11), 6
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def make_head(layer: Layer, chunk_size: int = 4) -> FusedOutputLinear:
    head = FusedOutputLinear(layer.weight.shape[1], layer.weight.shape[0], chunk_size)
    head.weight = nn.Parameter(layer.weight.detach())
    layer.weight = head.weight
    return head


def make_mask(labels: Tensor, classes: int) -> Tensor:
    """Distinct classes in another order for each token, with the label; -1 between them. Some tokens have none, some not the label, some
    the label alone."""
    generator = torch.Generator().manual_seed(2)
    rows = []
    for number, label in enumerate(labels.flatten().tolist()):
        others = [each for each in torch.randperm(classes, generator=generator).tolist() if each != label]
        row = torch.tensor([label, *others[: K - 1]])[torch.randperm(K, generator=generator)]
        row[(torch.rand(K, generator=generator) < 0.3) & (row != label)] = -1
        if number % 5 == 1:
            row[:] = -1
        elif number % 5 == 2:
            row[row == label] = others[K]
        elif number % 5 == 3:
            row[row != label] = -1
        rows.append(row)
    return torch.stack(rows).view(*labels.shape, K).to(labels.device, torch.int32)


def temperatures(device: str) -> Tensor:
    return (torch.rand(SHAPE, generator=torch.Generator().manual_seed(4)) + 0.5).to(device)


def expected(layer: Layer, temperature: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probabilities, entropies and log-probabilities of the kept classes: whole logits, those outside of the sets at -inf."""
    logits = layer.logits() / temperature.double()[..., None]
    whole = logits.log_softmax(-1)
    entropy, labels = -(whole.exp() * whole).sum(-1), layer.target[..., None]
    if mask is None:
        return whole.gather(-1, labels).squeeze(-1), entropy, None
    kept = torch.zeros_like(logits).scatter_add(-1, mask.clamp(min=0).long(), (mask >= 0).double()) > 0
    replayed = kept.gather(-1, labels)
    restricted = torch.where(kept | ~replayed, logits, -torch.inf).log_softmax(-1)
    places = torch.where(replayed & (mask >= 0), restricted.gather(-1, mask.clamp(min=0).long()), 0.0)
    return restricted.gather(-1, labels).squeeze(-1), entropy, places


@dtypes
@pytest.mark.parametrize("kind", ["none", "some", "all", "int64"])
def test_log_probabilities_entropies_and_gradients(device: str, dtype: torch.dtype, kind: str) -> None:
    layer = make_layer(device, dtype, shape=SHAPE, ignore_index=None)
    head, temperature = make_head(layer), temperatures(device)
    mask = None if kind == "none" else make_mask(layer.target, layer.weight.shape[0])
    if kind == "all":
        assert mask is not None
        mask = torch.where((mask == layer.target[..., None]).any(-1, keepdim=True), mask, layer.target[..., None]).int()
        mask[..., 1:] = torch.where(mask[..., 1:] == mask[..., :1], -1, mask[..., 1:])
    mask = mask.long() if kind == "int64" and mask is not None else mask
    output, exact = head(layer.hidden, layer.target, temperature, mask), layer.in_double()
    logprobs, entropy, _ = expected(exact, temperature, mask)
    assert set(output) == {"logprobs", "entropy"}
    assert_close(output["logprobs"], logprobs, dtype, "logprobs", output=True, factor=4.0)
    assert_close(output["entropy"], entropy, dtype, "entropy", output=True, factor=4.0)
    assert output["logprobs"].dtype is torch.float32 and not output["entropy"].requires_grad
    check_gradients([output["logprobs"]], [logprobs], layer, exact)


@dtypes
def test_log_probabilities_of_all_kept_classes(device: str, dtype: torch.dtype) -> None:
    layer = make_layer(device, dtype, shape=SHAPE, ignore_index=None)
    head, temperature, mask = make_head(layer), temperatures(device), make_mask(layer.target, layer.weight.shape[0])
    head.return_mask_logprobs = True
    output, exact = head(layer.hidden, layer.target, temperature, mask), layer.in_double()
    logprobs, _, places = expected(exact, temperature, mask)
    assert places is not None
    assert_close(output["mask_logprobs"], places, dtype, "mask_logprobs", output=True, factor=4.0)
    check_gradients([output["logprobs"], output["mask_logprobs"]], [logprobs, places], layer, exact)
    assert "mask_logprobs" not in head(layer.hidden, layer.target, temperature)
    empty = head(layer.hidden, layer.target, temperature, mask[..., :0])
    assert empty["mask_logprobs"].shape == (*SHAPE, 0)
    assert torch.equal(empty["logprobs"], head(layer.hidden, layer.target, temperature)["logprobs"])


@dtypes
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_one_gradient_alone(device: str, dtype: torch.dtype, frozen: str) -> None:
    layer = make_layer(device, dtype, shape=SHAPE, ignore_index=None)
    head, temperature, mask = make_head(layer), temperatures(device), make_mask(layer.target, layer.weight.shape[0])
    getattr(layer, frozen).requires_grad_(False)
    exact, other = layer.in_double(), "weight" if frozen == "hidden" else "hidden"
    head(layer.hidden, layer.target, temperature, mask)["logprobs"].sum().backward()
    expected(exact, temperature, mask)[0].sum().backward()
    assert getattr(layer, frozen).grad is None
    assert_close(getattr(layer, other).grad, getattr(exact, other).grad, dtype, other)


@dtypes
def test_without_a_temperature_it_is_the_sum_of_cross_entropies(device: str, dtype: torch.dtype) -> None:
    layer = make_layer(device, dtype, shape=SHAPE)
    head, exact = make_head(layer), layer.in_double()
    output = head(layer.hidden, layer.target)
    right = F.cross_entropy(exact.logits().flatten(0, -2), layer.target.flatten(), reduction="sum")
    assert set(output) == {"loss"} and output["loss"].dtype is torch.float32
    assert_close(output["loss"], right, dtype, "loss", output=True)
    check_gradients([output["loss"]], [right], layer, exact)


def test_a_graph_without_breaks_computes_the_same() -> None:
    layer = make_layer(shape=SHAPE, ignore_index=None)
    head, temperature, mask = make_head(layer), temperatures("cpu"), make_mask(layer.target, layer.weight.shape[0])
    output = torch.compile(head, fullgraph=True, backend="aot_eager")(layer.hidden, layer.target, temperature, mask)
    right = head(layer.hidden, layer.target, temperature, mask)
    for name in ("logprobs", "entropy"):
        assert torch.equal(output[name], right[name])
    made, wanted = (torch.autograd.grad(each["logprobs"].sum(), layer.leaves()) for each in (output, right))
    assert all(torch.equal(one, other) for one, other in zip(made, wanted, strict=True))


def test_bad_input_is_refused_by_name() -> None:
    layer = make_layer(shape=SHAPE, ignore_index=None)
    head, temperature, mask = make_head(layer), temperatures("cpu"), make_mask(layer.target, layer.weight.shape[0])
    hidden, labels = layer.hidden, layer.target
    for message, arguments in (
        ("requires labels", (hidden,)),
        ("sampling_mask is given without temperature", (hidden, labels, None, mask)),
        ("labels has shape", (hidden, labels[1:], temperature)),
        ("temperature has shape", (hidden, labels, temperature[:1])),
        ("sampling_mask has shape", (hidden, labels, temperature, mask[1:])),
        ("hidden_states has shape", (hidden[0], labels[0], temperature[0])),
    ):
        with pytest.raises(AssertionError, match=message):
            head(*arguments)
    with pytest.raises(flce.DTypeError, match=r"sampling_mask is torch\.bool"):
        head(hidden, labels, temperature, mask > 0)
    with pytest.raises(flce.ShapeError, match="at most 1024 classes"):
        head(hidden, labels, temperature, mask.repeat(1, 1, 200))


def test_labels_and_temperatures_that_are_none_are_reported(device: str) -> None:
    layer = make_layer(device, shape=SHAPE, ignore_index=None)
    head, temperature, mask = make_head(layer), temperatures(device), make_mask(layer.target, layer.weight.shape[0])
    for kernel in _kernels.all_kernels():  # other tests' labels
        kernel.invalid_label.fill_(-1)
    layer.target[0, 4] = layer.weight.shape[0]
    output = head(layer.hidden, layer.target, temperature, mask)
    assert output["logprobs"][0, 4] == 0 and output["entropy"][0, 4] == 0
    with pytest.raises(flce.LabelError) as caught:
        flce.check_labels()
    assert caught.value.row == 4
