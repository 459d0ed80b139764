"""flce.linear_logprobs_at: log-probabilities of several classes a token, and their gradients, beside plain arithmetic in fp64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import GRADIENT_BOUND, OUTPUT_BOUND
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flce

N, D, V, K = 37, 24, 101, 7
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "logits": {"logit_scale": 0.7, "softcap": 5.0},
    "temperature": {"temperature": 1.3},
    "class_offset": {"class_offset": True, "softcap": 5.0},
    "class_offset alone": {"class_offset": True, "logit_scale": 0.7},
    "everything": {"class_offset": True, "bias": True, "logit_scale": 0.7, "softcap": 5.0, "temperature": "each"},
}


@pytest.fixture(params=("vocabulary", "support"))
def normalize(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def tensors(device: str, dtype: torch.dtype = torch.float32, *, hidden_major: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight, and ids: of all rows but the first some are none, of some two are equal, of others all are none."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(N, D, generator=generator).to(device, dtype).requires_grad_()
    weight = (0.5 * torch.randn(V, D, generator=generator)).to(device, dtype)
    weight = (weight.t().contiguous().t() if hidden_major else weight).requires_grad_()
    ids = torch.randint(0, V, (N, K), generator=generator)
    ids[1::3, 2] = -1
    ids[2::5, 4] = ids[2::5, 1]
    ids[4::9] = -1
    return hidden, weight, ids.to(device)


def given_of(name: str, device: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(4)
    options = dict(OPTIONS[name])
    if "bias" in options:
        options["bias"] = torch.randn(V, generator=generator).to(device, dtype).requires_grad_()
    if "class_offset" in options:
        options["class_offset"] = torch.randn(V, generator=generator).to(device).requires_grad_()
    if options.get("temperature") == "each":
        options["temperature"] = (torch.rand(N, generator=generator) + 0.5).to(device)
    return options


def right(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    normalize: str = "vocabulary",
    bias: Any = None,
    logit_scale: Any = 1,
    softcap: Any = 0,
    temperature: Any = 1,
    class_offset: Any = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """In fp64: log-probabilities, lse and entropy, 0 for rows that name nothing."""
    logits = logit_scale * (hidden.double() @ weight.double().t() + (0 if bias is None else bias.double()))
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    logits = logits + class_offset
    logits = logits / (temperature.double()[:, None] if isinstance(temperature, Tensor) else temperature)
    there, named = ids >= 0, (ids != -1).any(-1)
    if normalize == "support":
        logits = torch.where(there, logits.gather(-1, ids.clamp(min=0).long()), -torch.inf)
        logits = torch.where(named[:, None], logits, 0.0)
        logprobs = F.log_softmax(logits, -1)
        terms = torch.where(there, logprobs.exp() * torch.where(there, logprobs, 0.0), 0.0)
        chosen, entropy = torch.where(there, logprobs, 0.0), -terms.sum(-1)
        return chosen, torch.where(named, torch.logsumexp(logits, -1), 0), torch.where(named, entropy, 0)
    logprobs = F.log_softmax(logits, -1)
    chosen = torch.where(there, logprobs.gather(-1, ids.clamp(min=0).long()), 0)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return chosen, torch.where(named, torch.logsumexp(logits, -1), 0), torch.where(named, entropy, 0)


def near(got: Tensor, expected: Tensor, bound: float) -> None:
    error, size = (got.double() - expected.double()).norm(), expected.double().norm()
    assert got.shape == expected.shape and bool(error <= bound * size), f"off by {float(error / size):.2e}, allowed {bound:.1e}"


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("dtype", "hidden_major"), itertools.product(DTYPES, (False, True)))
def test_equal_to_plain_arithmetic(device: str, dtype: torch.dtype, hidden_major: bool, name: str, normalize: str) -> None:
    hidden, weight, ids = tensors(device, dtype, hidden_major=hidden_major)
    options = given_of(name, device, dtype)
    made = flce.linear_logprobs_at(hidden, weight, ids, return_lse=True, return_entropy=True, normalize=normalize, **options)
    expected = right(hidden, weight, ids, normalize=normalize, **options)
    for got, wanted in zip(made, expected, strict=True):
        near(got, wanted, OUTPUT_BOUND[dtype])
    assert not made[0][ids == -1].any() and not made[1][(ids == -1).all(-1)].any()
    upstream = torch.randn(N, K, generator=torch.Generator().manual_seed(8)).to(device)
    parameters = [hidden, weight, *(options[name] for name in ("bias", "class_offset") if name in options)]
    for entropy in (0.0, 0.5):
        total, plain = (
            (chosen * upstream).sum() + 0.3 * lse.sum() + (entropy * of_entropy.sum() if entropy else 0)
            for chosen, lse, of_entropy in (made, expected)
        )
        gradients = torch.autograd.grad(total, parameters, retain_graph=True)
        for got, wanted in zip(gradients, torch.autograd.grad(plain, parameters, retain_graph=True), strict=True):
            near(got, wanted, GRADIENT_BOUND[dtype])


def test_central_differences(normalize: str) -> None:
    hidden, weight, ids = tensors("cpu")
    upstream = torch.randn(N, K, generator=torch.Generator().manual_seed(9))
    direction = torch.randn(D, generator=torch.Generator().manual_seed(10))

    def total(step: float) -> Tensor:
        return (flce.linear_logprobs_at(hidden + step * direction, weight, ids, softcap=5.0, normalize=normalize).double() * upstream).sum()

    (gradient,) = torch.autograd.grad(total(0.0), hidden)
    difference = (total(1e-2) - total(-1e-2)) / 2e-2
    assert abs(difference - (gradient.double() * direction).sum()) < 2e-3 * difference.abs()


def test_a_token_whose_classes_are_all_ruled_out_is_no_number(device: str) -> None:
    hidden, weight, ids = tensors(device)
    bias = torch.full((V,), -torch.inf, device=device)
    bias[:2] = 0
    ids = torch.where(ids >= 0, ids % 2, ids)
    ids[3] = -1
    ids[3, :2] = torch.tensor([5, 6], device=device)
    logprobs, lse, entropy = flce.linear_logprobs_at(
        hidden, weight, ids, bias=bias, return_lse=True, return_entropy=True, normalize="support"
    )
    assert lse[3] == -torch.inf and logprobs[3, :2].isnan().all() and entropy[3].isnan() and not logprobs[3, 2:].any()
    others = torch.arange(N, device=device) != 3
    for got, wanted in zip((logprobs, lse, entropy), right(hidden, weight, ids, normalize="support"), strict=True):
        near(got[others], wanted[others], 1e-5)


def test_batched_gradients_are_refused_by_name(device: str, normalize: str) -> None:
    hidden, weight, ids = tensors(device)
    logprobs = flce.linear_logprobs_at(hidden, weight, ids, normalize=normalize)
    with pytest.raises(flce.UnsupportedTransformError, match="cannot be batched"):
        torch.autograd.grad(logprobs[:, 0], hidden, torch.eye(N, device=device), is_grads_batched=True)


@pytest.mark.parametrize("index", [torch.int64, torch.int32])
def test_one_class_is_linear_logprobs(device: str, index: torch.dtype) -> None:
    hidden, weight, ids = tensors(device)
    target = ids[:, 0].to(index)
    expected = flce.linear_logprobs(hidden, weight, target, ignore_index=-1)
    got = flce.linear_logprobs_at(hidden, weight, target[:, None])
    torch.testing.assert_close(got[:, 0], expected)
    for made, wanted in zip(
        torch.autograd.grad(got.sum(), (hidden, weight)), torch.autograd.grad(expected.sum(), (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-6)


def test_equal_ids_are_places_of_their_own(device: str) -> None:
    hidden, weight, ids = tensors(device)
    once, twice = ids[:, :1], ids[:, [0, 0]]
    made = flce.linear_logprobs_at(hidden, weight, twice)
    assert torch.equal(made[:, 0], made[:, 1])
    (got,) = torch.autograd.grad((made * torch.tensor([0.3, 0.7], device=device)).sum(), hidden)
    (expected,) = torch.autograd.grad(flce.linear_logprobs_at(hidden, weight, once).sum(), hidden)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("retain", [True, False])
@pytest.mark.parametrize("count", [300, 1024])
def test_many_classes(device: str, count: int, retain: bool, normalize: str) -> None:
    """More than a kernel lists in shared memory, many of them equal, on a layer that is deep enough to retain something."""
    generator = torch.Generator().manual_seed(11)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.randn(70, 512, generator=generator).to(device, dtype).requires_grad_()
    weight = (0.05 * torch.randn(3000, 512, generator=generator)).to(device, dtype).requires_grad_()
    bias = torch.randn(3000, generator=generator).to(device, dtype).requires_grad_()
    ids = (3000 * torch.rand(70, count, generator=generator) ** 3).long().to(device)
    ids[5:9, 3:] = -1
    made = flce.linear_logprobs_at(hidden, weight, ids, bias=bias, retain_in_grad_weight=retain, normalize=normalize)
    expected = right(hidden, weight, ids, bias=bias, normalize=normalize)[0]
    near(made, expected, OUTPUT_BOUND[dtype])
    upstream = torch.randn(70, count, generator=generator).to(device)
    inputs = (hidden, weight, bias)
    gradients = torch.autograd.grad((made * upstream).sum(), inputs)
    for got, wanted in zip(gradients, torch.autograd.grad((expected * upstream).sum(), inputs), strict=True):
        near(got, wanted, GRADIENT_BOUND[dtype])


MANY_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "falls": {"softcap": 20.0},
    "capped": {"logit_scale": 0.7, "softcap": 5.0, "temperature": True},
    "offsets": {"class_offset": True, "softcap": 5.0},
    "far above": {"bias": True},
}


@pytest.mark.parametrize("name", MANY_OPTIONS)
@pytest.mark.parametrize(("dtype", "hidden_major"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)])
@pytest.mark.parametrize("retain", [True, False])
@pytest.mark.parametrize("count", [260, 1024])
def test_many_classes_of_many_tokens(device: str, dtype: torch.dtype, hidden_major: bool, count: int, retain: bool, name: str) -> None:
    """Classes that Hopper's forward picks from its own tiles: some tiles have hundreds of a token's, others none. Classes are named again,
    once or a thousand times; the vocabulary's last ones are named, and some tokens name nothing. "far above": one class is 45 nats above
    all others, and references of retained exponentials know it in some rows alone."""
    tokens, depth, classes = 333, 192, 3064
    generator = torch.Generator().manual_seed(12)
    dtype = dtype if device == "cuda" else torch.float32
    hidden = torch.randn(tokens, depth, generator=generator).to(device, dtype).requires_grad_()
    weight = (0.1 * torch.randn(classes, depth, generator=generator)).to(device, dtype)
    weight = (weight.t().contiguous().t() if hidden_major else weight).requires_grad_()
    ids = (classes * torch.rand(tokens, count, generator=generator) ** 3).long()
    ids[:, 7::16] = classes - 1 - torch.arange(count)[7::16] // 16
    ids[5:40, 3:] = -1
    ids[41], ids[42], ids[43:60] = 17, torch.arange(count), -1
    ids[60:80, 9::3] = -1
    ids[::3, 1] = 2000
    ids = ids.to(device)
    options = dict(MANY_OPTIONS[name])
    if "temperature" in options:
        options["temperature"] = (torch.rand(tokens, generator=generator) + 0.5).to(device)
    if "class_offset" in options:
        options["class_offset"] = torch.randn(classes, generator=generator).to(device).requires_grad_()
    if "bias" in options:
        bias = torch.randn(classes, generator=generator)
        bias[2000] = 45
        options["bias"] = bias.to(device, dtype).requires_grad_()
    made = flce.linear_logprobs_at(hidden, weight, ids, retain_in_grad_weight=retain, return_lse=True, **options)
    expected = right(hidden, weight, ids, **options)
    for got, wanted in zip(made, expected[:2], strict=True):
        near(got, wanted, OUTPUT_BOUND[dtype])
        near(got[-80:], wanted[-80:], 2 * OUTPUT_BOUND[dtype])
    assert not made[0][ids == -1].any() and torch.equal(made[0][41], made[0][41, :1].expand(count))
    upstream = torch.randn(tokens, count, generator=generator).to(device)
    parameters = [hidden, weight, *(options[name] for name in ("bias", "class_offset") if name in options)]
    gradients = torch.autograd.grad((made[0] * upstream).sum(), parameters)
    for got, wanted in zip(gradients, torch.autograd.grad((expected[0] * upstream).sum(), parameters), strict=True):
        near(got, wanted, GRADIENT_BOUND[dtype])


def test_nothing_named_is_0(device: str, normalize: str) -> None:
    hidden, weight, ids = tensors(device)
    for of_none in (torch.full_like(ids, -1), ids[:0]):
        states = hidden[: of_none.shape[0]]
        made = flce.linear_logprobs_at(states, weight, of_none, normalize=normalize)
        gradients = torch.autograd.grad(made.sum(), (hidden, weight), allow_unused=True)
        assert not made.any() and all(gradient is None or not gradient.any() for gradient in gradients)
    assert flce.linear_logprobs_at(hidden.detach()[:0], weight, ids[:0], normalize=normalize).shape == (0, K)


def test_many_dimensions_and_a_layer(device: str, normalize: str) -> None:
    hidden, _, ids = tensors(device)
    layer = nn.Linear(D, V, device=device)
    flat = flce.linear_logprobs_at(hidden[:36], layer, ids[:36], return_lse=True, normalize=normalize)
    shaped = flce.linear_logprobs_at(hidden[:36].view(3, 12, D), layer, ids[:36].view(3, 12, K), return_lse=True, normalize=normalize)
    for got, wanted in zip(shaped, flat, strict=True):
        assert torch.equal(got.flatten(0, 1), wanted)
    with torch.no_grad():
        assert torch.equal(flce.linear_logprobs_at(hidden[:36], layer, ids[:36], normalize=normalize), flat[0])


def test_lists_of_different_lengths(device: str, normalize: str) -> None:
    hidden, weight, ids = tensors(device)
    there = ids != -1
    offsets = F.pad(there.sum(-1).cumsum(0), (1, 0)).to(torch.int32)
    expected = flce.linear_logprobs_at(hidden, weight, ids, normalize=normalize)
    for max_ids in (None, K, 9):
        made = flce.linear_logprobs_at(hidden, weight, ids[there], offsets=offsets, max_ids=max_ids, normalize=normalize)
        assert torch.equal(made, expected[there])
    upstream = torch.randn(made.shape, generator=torch.Generator().manual_seed(2)).to(device)
    got = torch.autograd.grad((made * upstream).sum(), (hidden, weight))
    for gradient, wanted in zip(got, torch.autograd.grad((expected[there] * upstream).sum(), (hidden, weight)), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)
    empty = flce.linear_logprobs_at(
        hidden, weight, ids.new_empty(0), offsets=torch.zeros(N + 1, dtype=torch.int64, device=device), normalize=normalize
    )
    assert empty.shape == (0,)


@pytest.mark.parametrize("lists", [False, True])
def test_under_compile_and_checkpoint(device: str, lists: bool, normalize: str) -> None:
    hidden, weight, ids = tensors(device)
    options: dict[str, Any] = {"softcap": 5.0, "return_entropy": True}
    if lists:
        options |= {"offsets": torch.arange(0, N * K + 1, K, device=device), "max_ids": K}
        ids = ids.flatten()

    def total(states: Tensor, rows: Tensor) -> Tensor:
        logprobs, entropy = flce.linear_logprobs_at(states, rows, ids, normalize=normalize, **options)
        return logprobs.square().sum() + entropy.sum()

    expected = torch.autograd.grad(total(hidden, weight), (hidden, weight))
    torch._dynamo.reset()
    compiled = torch.compile(total, fullgraph=True, backend="aot_eager")
    for made in (compiled(hidden, weight), checkpoint(total, hidden, weight, use_reentrant=False)):
        for got, wanted in zip(torch.autograd.grad(made, (hidden, weight)), expected, strict=True):
            torch.testing.assert_close(got, wanted)


def test_a_gradient_into_a_buffer_and_of_one_input(device: str, normalize: str) -> None:
    hidden, weight, ids = tensors(device)
    (expected,) = torch.autograd.grad(flce.linear_logprobs_at(hidden, weight, ids, normalize=normalize).sum(), weight)
    buffer = torch.ones(V, D, device=device)
    flce.linear_logprobs_at(hidden, weight, ids, grad_weight_out=buffer, normalize=normalize).sum().backward()
    torch.testing.assert_close(buffer, 1 + expected, rtol=1e-4, atol=1e-5)
    frozen = flce.linear_logprobs_at(hidden.detach(), weight, ids, normalize=normalize).sum()
    torch.testing.assert_close(torch.autograd.grad(frozen, weight)[0], expected)


def test_a_class_that_is_none_is_reported(device: str, normalize: str) -> None:
    hidden, weight, ids = tensors(device)
    ids[3, 1] = V
    made = flce.linear_logprobs_at(hidden, weight, ids, normalize=normalize)
    assert made[3, 1] == 0 and made[3, 0] != 0
    with pytest.raises(flce.LabelError) as error:
        flce.check_labels()
    assert error.value.row == 3


@pytest.mark.gpu
def test_lists_at_fault_are_reported_on_a_gpu(device: str, normalize: str) -> None:
    hidden, weight, ids = tensors(device)
    offsets = torch.arange(0, N * K + 1, K, device=device)
    made = flce.linear_logprobs_at(hidden, weight, ids.flatten(), offsets=offsets, max_ids=K - 1, normalize=normalize)
    assert not made.any()
    with pytest.raises(flce.LabelError):
        flce.check_labels()


@pytest.mark.gpu
def test_in_a_cuda_graph(device: str, normalize: str) -> None:
    hidden, weight, ids = tensors(device, torch.bfloat16)
    flce.linear_logprobs_at(hidden, weight, ids, normalize=normalize).sum().backward()
    hidden.grad = weight.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = flce.linear_logprobs_at(hidden, weight, ids, normalize=normalize)
        made.sum().backward()
    with torch.no_grad():
        hidden.mul_(0.5)
    graph.replay()
    near(made, right(hidden, weight, ids, normalize=normalize)[0], OUTPUT_BOUND[torch.bfloat16])


def test_refused_by_name() -> None:
    hidden, weight, ids = tensors("cpu")
    offsets = torch.arange(0, N * K + 1, K)

    def refused(kind: type[Exception], message: str, *rows: Any, **options: Any) -> None:
        with pytest.raises(kind, match=message):
            flce.linear_logprobs_at(*(rows or (hidden, weight, ids)), **options)

    refused(flce.DTypeError, "ids is None", hidden, weight, None)
    refused(flce.DTypeError, "ids is a list", hidden, weight, [[1]])
    refused(flce.DTypeError, "ids has dtype torch.float32", hidden, weight, ids.float())
    refused(flce.ShapeError, r"ids has shape \[37\]", hidden, weight, ids[:, 0])
    refused(flce.ShapeError, r"ids has shape \[37, 2000\].*K from 1 to", hidden, weight, ids[:, :1].expand(-1, 2000))
    refused(flce.ShapeError, r"ids has shape \[36, 7\]", hidden, weight, ids[1:])
    refused(flce.ArgumentError, "max_ids is given without offsets", max_ids=3)
    refused(flce.ArgumentError, r"ids has shape \[37, 7\].*with offsets ids is \[M\]", offsets=offsets)
    refused(flce.ArgumentError, "offsets has shape .* torch.float32", hidden, weight, ids.flatten(), offsets=offsets.float())
    refused(
        flce.ArgumentError, r"offsets holds \[0, 7\] for row 0.*at most 3 ids", hidden, weight, ids.flatten(), offsets=offsets, max_ids=3
    )
    refused(flce.ArgumentError, r"offsets holds \[14, 7\] for row 2", hidden, weight, ids.flatten(), offsets=torch.tensor([0, 7, 14, 7]))
    refused(
        flce.ArgumentError, "offsets holds 0 to 14;.*number of ids, 259", hidden, weight, ids.flatten(), offsets=torch.tensor([0, 7, 14])
    )
    refused(
        flce.ShapeError,
        r"offsets has shape \[3\] and hidden \[37, 24\]",
        hidden,
        weight,
        ids[:2].flatten(),
        offsets=torch.tensor([0, 7, 14]),
    )
    refused(flce.ShapeError, r"offsets has shape \[0\]", hidden, weight, ids.flatten(), offsets=offsets[:0])
    refused(flce.ArgumentError, "max_ids is 0", hidden, weight, ids.flatten(), offsets=offsets, max_ids=0)
    refused(TypeError, "unexpected keyword argument 'ignore_index'", ignore_index=3)
    made = flce.linear_logprobs_at(hidden, weight, ids)
    (gradient,) = torch.autograd.grad(made.sum(), hidden, create_graph=True)
    with pytest.raises(flce.UnsupportedTransformError, match="second derivatives"):
        gradient.sum().backward()
